// Quantized weights in the format of mx.quantize, and the numbers that a product multiplies in their place.
//
//   BITS     the bits of a weight      K   the weights of a row
//   GROUP    how many neighbouring weights of a row share a scale and, in mode affine, a bias: a quantization group
//   words    [rows, K BITS / 32] of 32 bits: the weights of a row as one string of bits, each with its lowest bit first
//   scales   [rows, K / GROUP]: floats in mode affine; in the other modes 8 bits: powers of two if GROUP is 32, small
//            floats if GROUP is 16
//   biases   [rows, K / GROUP] in mode affine, else absent
//   q        what the bits of a weight mean: an integer in mode affine, else a small float of 4 or 8 bits. The weight
//            is scale * q + bias, or scale * q
//   Absent   the type of an array that the call lacks. So the type of `biases` tells the modes apart: most functions
//            have two overloads, for Absent (small floats) and for any other type (integers), and read the argument for
//            its type only
//   half     a float of 16 bits: 1 sign bit, 5 exponent bits (with an offset of 15), 10 mantissa bits
//
// A product of quantized weights w and numbers x never computes w. A shift and a few masks turn the bits of two weights
// at once into two halves v, without rounding. If q is an integer, v = 2^BITS + q. If q is a small float, v = q /
// FACTOR with a constant FACTOR. The product adds up v x over a quantization group, then applies scale and bias once
// per group:
//   affine:  sum of w x = scale * (sum of v x - 2^BITS * sum of x) + bias * sum of x
//   others:  sum of w x = scale * FACTOR * sum of v x

// A matrix of quantized weights. A: the type of the array of scales. B: the type of the array of biases, Absent in
// modes without biases.
template <int BITS, int GROUP, class A, class B>
struct Packed {
  const device uint* words;
  A scales;
  B biases;
};

// Return a matrix of quantized weights from its three arrays. The generated source of a kernel calls this function.
template <int BITS, int GROUP, class W, class A, class B>
Packed<BITS, GROUP, A, B> packed_weights(W words, A scales, B biases) { return {words, scales, biases}; }

// The format of a small float: 1 sign bit, then 2 exponent bits and 1 mantissa bit (BITS = 4), or 4 exponent bits and 3
// mantissa bits (BITS = 8). MANTISSA: the number of its mantissa bits. A half is made of it by copying bits: the
// exponent becomes the lowest bits of the half's exponent, and the mantissa the highest bits of the half's mantissa.
// The half is the small float divided by FACTOR, because the exponents have different offsets: 15 in a half, 1 (BITS =
// 4) or 7 (BITS = 8) in a small float. FACTOR is 2 to the power of the difference of the offsets.
template <int BITS> constant constexpr int MANTISSA = BITS == 4 ? 1 : 3;
template <int BITS> constant constexpr float FACTOR = BITS == 4 ? 16384.0f : 256.0f;

// Shift the bits by `left` to the left, or by -left to the right if `left` is negative. (In C++ a shift by a negative
// number is undefined.)
inline uint shifted(uint bits, int left) { return left < 0 ? bits >> -left : bits << left; }

// Convert two quantized weights at once: return two numbers of type half in one 32-bit word. The types B (any) and
// Absent of the last argument tell integers from small floats. `word` holds the BITS bits of one weight from bit
// `first` of its lower 16 bits on, and those of the other from bit `first` of its upper 16 bits on.
//   with_exponents          for integers q that are already at the top of the mantissas: set both exponents to the
//                           exponent of 2^BITS, which gives 2^BITS + q
//   halves_of(.., B)        for integers q: move q to the top of the mantissas, then call with_exponents
//   halves_of(.., Absent)   for small floats: one shift moves exponent and mantissa, another shift the sign, which has
//                           another distance. Each result is the small float / FACTOR
template <int BITS> uint with_exponents(uint bits) {
  constexpr uint MASK = ((1u << BITS) - 1) << (10 - BITS), EXPONENT = (15 + BITS) << 10;
  return (bits & (MASK << 16 | MASK)) | (EXPONENT << 16 | EXPONENT);
}
template <int BITS, class B> uint halves_of(uint word, int first, B) {
  return with_exponents<BITS>(shifted(word, 10 - BITS - first));
}
template <int BITS> uint halves_of(uint word, int first, Absent) {
  constexpr int LOWEST = 10 - MANTISSA<BITS>;  // the bit of a half at which the lowest mantissa bit arrives
  constexpr uint MASK = ((1u << (BITS - 1)) - 1) << LOWEST;
  return (shifted(word, LOWEST - first) & (MASK << 16 | MASK)) | (shifted(word, 16 - BITS - first) & 0x80008000u);
}

// Return the number that a product multiplies in place of weight e of `words`. With q, the number that the bits of the
// weight stand for, it is 2^BITS + q if q is an integer, and q / FACTOR (the constant in the head of this file) if q is
// a small float. If BITS divides 16, one call of halves_of converts two weights, one in the lower and one in the upper
// half of a word. The function makes the same call for both weights; in an unrolled loop the compiler computes it once.
// For other BITS, which only integers have, each weight is converted alone, because its bits may continue in the next
// word.
template <int BITS, int WORDS, class B>
float number_at(thread const uint (&words)[WORDS], int e, B biases) {
  const int word = BITS * e / 32, first = BITS * e % 32;
  if constexpr (16 % BITS == 0) {
    const half2 two = as_type<half2>(halves_of<BITS>(words[word], first % 16, biases));
    return float(first < 16 ? two.x : two.y);
  } else {
    uint bits = shifted(words[word], 10 - BITS - first);
    // The bits of the next word follow 32 bits later, so their shift is larger by 32.
    if (first + BITS > 32) bits |= words[word + 1] << (42 - BITS - first);
    return float(as_type<half2>(with_exponents<BITS>(bits)).x);
  }
}

// Return the sum of w x over the weights w of one quantization group. product: the sum of v x, where v is what
// number_at returns for a weight. x_sum: the sum of x. It is needed to subtract the 2^BITS that v contains, and for the
// bias. scale, bias: scale and bias of the group. The last parameter, the array of biases, is there for its type:
// Absent for small floats.
template <int BITS> float of_group(float product, float, float scale, float, Absent) {
  return scale * (FACTOR<BITS> * product);
}
template <int BITS, class B> float of_group(float product, float x_sum, float scale, float bias, B) {
  return scale * (product - float(1 << BITS) * x_sum) + bias * x_sum;
}

// Return the value of a small float, whose bits are a sign bit, `exponent` exponent bits and `mantissa` mantissa bits.
// Its exponent and mantissa are copied into a half (16-bit float). The factor 2^14 or 2^8 corrects the exponent's
// offset, which is 15 in a half, but 1 or 7 in the small float.
inline float small_float(uint bits, int exponent, int mantissa) {
  const uint magnitude = bits & ((1u << (exponent + mantissa)) - 1);
  const float value = float(as_type<half>(ushort(magnitude << (10 - mantissa)))) * (exponent == 2 ? 16384.0f : 256.0f);
  return bits >> (exponent + mantissa) & 1 ? -value : value;
}

// Return a scale as a float. If GROUP is 16, the 8 bits of a scale are a small float with 4 exponent bits and 3
// mantissa bits. If GROUP is 32, they are the exponent field of a float that is a power of two; this field begins at
// bit 23. Exponent 0 means 2^-127, a denormal float with the bits 0x400000. In mode affine scales are floats already
// (second overload).
template <int GROUP> float scale_of(uchar bits) {
  return GROUP == 16 ? small_float(bits, 4, 3) : as_type<float>(bits == 0 ? 0x400000u : uint(bits) << 23);
}
template <int GROUP, class S> float scale_of(S scale) { return float(scale); }

// Return q, the number that the bits of a weight stand for, without scale and bias. number: the result of number_at,
// which is 2^BITS + q for an integer q, or q / FACTOR for a small float q. The last parameter, the array of biases, is
// there for its type: Absent for small floats.
template <int BITS> float value_of(float number, Absent) { return FACTOR<BITS> * number; }
template <int BITS, class B> float value_of(float number, B) { return number - float(1 << BITS); }
