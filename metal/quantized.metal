// Quantized weights as mx.quantize packs them, with BITS bits per weight. GROUP neighbouring weights of a row share a
// scale and, in mode affine, a bias.
//
//   words   [rows, K BITS / 32] of 32 bits: the weights of a row as one string of bits, each with its lowest bit first
//   scales  [rows, K / GROUP]: floats, or numbers of 8 bits: powers of two if GROUP is 32, small floats if GROUP is 16
//   biases  [rows, K / GROUP], or absent
// In mode affine a weight is scale * q + bias with an integer q. In the other modes it is scale * q with a float q of 4
// or 8 bits, without biases. Therefore the functions below have two overloads, selected by the type of the argument
// `biases`: Absent for small floats, any other type for integers.
//
// A product of quantized weights w and numbers x does not compute w. A shift and a few masks turn the bits of two
// weights at once into two numbers v of type half, without rounding. If q is an integer, v = 2^BITS + q. If q is a
// small float, v = q / FACTOR with a constant FACTOR. Scale and bias are applied once per group of weights:
//   affine:  sum of w x = scale * (sum of v x - 2^BITS * sum of x) + bias * sum of x
//   others:  sum of w x = scale * FACTOR * sum of v x

// A matrix of quantized weights. A, B: the types of the arrays of scales and biases; B is Absent without biases.
template <int BITS, int GROUP, class A, class B>
struct Packed {
  const device uint* words;
  A scales;
  B biases;
};

template <int BITS, int GROUP, class W, class A, class B>
Packed<BITS, GROUP, A, B> packed_weights(W words, A scales, B biases) { return {words, scales, biases}; }

// A small float has 1 sign bit, then 2 exponent bits and 1 mantissa bit (BITS = 4), or 4 exponent bits and 3 mantissa
// bits (BITS = 8). To convert it to a half, its exponent becomes the lowest bits of the half's exponent, and its
// mantissa the highest bits of the half's mantissa. The half is the value divided by FACTOR, because the exponents of
// the two types have different offsets: 15 in a half, 1 (BITS = 4) or 7 (BITS = 8) in a small float, and FACTOR is 2 to
// the power of the difference.
template <int BITS> constant constexpr int MANTISSA = BITS == 4 ? 1 : 3;
template <int BITS> constant constexpr float FACTOR = BITS == 4 ? 16384.0f : 256.0f;

// Shift the bits to the left, or to the right if `left` is negative, which C++ does not allow.
inline uint shifted(uint bits, int left) { return left < 0 ? bits >> -left : bits << left; }

// Convert two quantized weights at once: return two numbers of type half in one 32-bit word. `word` holds the BITS bits
// of one weight from bit `first` of its lower 16 bits on, and those of the other from bit `first` of its upper 16 bits
// on. A half has 1 sign bit, 5 exponent bits (with an offset of 15) and 10 mantissa bits.
//   with_exponents   for integers q that are at the top of the mantissas already: set the exponents to that of 2^BITS.
//                    Each result is 2^BITS + q
//   halves_of(B)     integers: mode affine has biases, of a type B. Move q to the top of the mantissas
//   halves_of(Absent)   small floats, in the other modes, which have no biases. One shift moves exponent and mantissa,
//                    another one the sign, which lies elsewhere in a half. Each result is the small float / FACTOR
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

// Return the number that a product uses in place of weight e of `words`: 2^BITS + q if q is an integer, q / FACTOR if q
// is a small float. If BITS divides 16, one call of halves_of converts two weights, in the lower and the upper half of
// a word. The function makes the same call for both weights; in an unrolled loop the compiler computes it only once.
// For other BITS each weight is converted alone; its bits may continue in the next word. biases: only its type is used.
template <int BITS, int WORDS, class B>
float number_at(thread const uint (&words)[WORDS], int e, B biases) {
  const int word = BITS * e / 32, first = BITS * e % 32;
  if constexpr (16 % BITS == 0) {
    const half2 two = as_type<half2>(halves_of<BITS>(words[word], first % 16, biases));
    return float(first < 16 ? two.x : two.y);
  } else {
    uint bits = shifted(words[word], 10 - BITS - first);
    if (first + BITS > 32) bits |= words[word + 1] << (42 - BITS - first);
    return float(as_type<half2>(with_exponents<BITS>(bits)).x);
  }
}

// Return the sum of w x over the weights w of one quantization group. product: the sum of v x, where v = number_at(w)
// is 2^BITS + q for an integer q, or q / FACTOR for a small float q. x_sum: the sum of x. The functions need it to
// subtract the added 2^BITS and to add the bias. scale, bias: the group's scale and bias.
template <int BITS> float of_group(float product, float, float scale, float, Absent) {
  return scale * (FACTOR<BITS> * product);
}
template <int BITS, class B> float of_group(float product, float x_sum, float scale, float bias, B) {
  return scale * (product - float(1 << BITS) * x_sum) + bias * x_sum;
}

// Convert the bits of a small float to a float, through a half. exponent: how many exponent bits the small float has.
// mantissa: how many mantissa bits it has. The factor, 2^14 or 2^8, makes up for the exponent offset of a half (15),
// which is 1 or 7 in the small float.
inline float small_float(uint bits, int exponent, int mantissa) {
  const uint magnitude = bits & ((1u << (exponent + mantissa)) - 1);
  const float value = float(as_type<half>(ushort(magnitude << (10 - mantissa)))) * (exponent == 2 ? 16384.0f : 256.0f);
  return bits >> (exponent + mantissa) & 1 ? -value : value;
}

// Return a scale as a float. If GROUP is 16, the 8 bits are a small float with 4 exponent bits and 3 mantissa bits. If
// GROUP is 32, the 8 bits are the exponent of a power of two, with the offset of a float, whose exponent begins at bit
// 23. Exponent 0 means 2^-127, which is a denormal float with the bits 0x400000. Scales of mode affine are floats
// already.
template <int GROUP> float scale_of(uchar bits) {
  return GROUP == 16 ? small_float(bits, 4, 3) : as_type<float>(bits == 0 ? 0x400000u : uint(bits) << 23);
}
template <int GROUP, class S> float scale_of(S scale) { return float(scale); }

// Return the value of q, a weight without its scale and bias. number: the result of number_at, which is 2^BITS + q for
// an integer q, or q / FACTOR for a small float q (weights without biases).
template <int BITS> float value_of(float number, Absent) { return FACTOR<BITS> * number; }
template <int BITS, class B> float value_of(float number, B) { return number - float(1 << BITS); }
