// Quantized weights as mx.quantize packs them, with BITS bits per weight. GROUP neighbouring weights of a row share a
// scale and, in mode affine, a bias.
//
//   words   [rows, K BITS / 32] of 32 bits: the weights of a row as one string of bits, each with its lowest bit first
//   scales  [rows, K / GROUP]: floats, or 8 bits: powers of two (groups of 32) or 8-bit floats (groups of 16)
//   biases  [rows, K / GROUP], or absent
// In mode affine a weight is scale * q + bias with an integer q. In the other modes it is scale * q with a float q of 4
// or 8 bits, without biases. So the type of `biases` selects the overload of a function below: Absent if not affine.
//
// A product of weights w and x does not compute w. A shift and a few masks turn the bits of q into a half v: for an
// integer q, v = 2^BITS + q; for a small float q, v = q / FACTOR, with a constant FACTOR. Both are exact, and two
// weights are converted at once. Scale and bias are applied once per group of weights:
//   affine:  sum of w x = scale * (sum of v x - 2^BITS * sum of x) + bias * sum of x
//   others:  sum of w x = scale * FACTOR * sum of v x

template <int BITS, int GROUP, class A, class B>
struct Packed {
  const device uint* words;
  A scales;
  B biases;
};

template <int BITS, int GROUP, class W, class A, class B>
Packed<BITS, GROUP, A, B> packed_weights(W words, A scales, B biases) { return {words, scales, biases}; }

// A small float has 1 sign bit, then 2 exponent bits and 1 mantissa bit (BITS = 4), or 4 exponent bits and 3 mantissa
// bits (BITS = 8). Exponent and mantissa are moved to the lowest bits of a half's exponent and the highest bits of its
// mantissa. This divides the value by FACTOR.
template <int BITS> constant constexpr int MANTISSA = BITS == 4 ? 1 : 3;
template <int BITS> constant constexpr float FACTOR = BITS == 4 ? 16384.0f : 256.0f;

inline uint shifted(uint bits, int left) { return left < 0 ? bits >> -left : bits << left; }

// Return a word with two halves that represent two weights: 2^BITS + q for an integer q, or q / FACTOR for a small
// float q. The bits of the weights begin at bit `first` of the lower and of the upper 16 bits of `word`. Integers go
// to the top of the mantissa, behind the exponent of 2^BITS. A small float's sign moves separately.
template <int BITS> uint with_exponents(uint bits) {
  constexpr uint MASK = ((1u << BITS) - 1) << (10 - BITS), EXPONENT = (15 + BITS) << 10;
  return (bits & (MASK << 16 | MASK)) | (EXPONENT << 16 | EXPONENT);
}
template <int BITS, class B> uint halves_of(uint word, int first, B) {
  return with_exponents<BITS>(shifted(word, 10 - BITS - first));
}
template <int BITS> uint halves_of(uint word, int first, Absent) {
  constexpr int LOWEST = 10 - MANTISSA<BITS>;
  constexpr uint MASK = ((1u << (BITS - 1)) - 1) << LOWEST;
  return (shifted(word, LOWEST - first) & (MASK << 16 | MASK)) | (shifted(word, 16 - BITS - first) & 0x80008000u);
}

// Return the number that represents weight e of `words` in a product: 2^BITS + q if q is an integer, or q / FACTOR if
// q is a small float. If BITS divides 16, one call of halves_of converts two weights: one from the lower half of a
// word and one from the upper half. For both weights the same call is made, and in an unrolled loop the compiler
// computes it only once. For other BITS each weight is converted alone.
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

// Return what one quantization group adds to the product of weights and x. product: the group's sum of
// number_at(weight) times x. x_sum: the group's sum of x.
template <int BITS> float of_group(float product, float, float scale, float, Absent) {
  return scale * (FACTOR<BITS> * product);
}
template <int BITS, class B> float of_group(float product, float x_sum, float scale, float bias, B) {
  return scale * (product - float(1 << BITS) * x_sum) + bias * x_sum;
}

// Convert the bits of a small float to a float, through a half. exponent: how many exponent bits the small float has.
// mantissa: how many mantissa bits it has.
inline float small_float(uint bits, int exponent, int mantissa) {
  const uint magnitude = bits & ((1u << (exponent + mantissa)) - 1);
  const float value = float(as_type<half>(ushort(magnitude << (10 - mantissa)))) * (exponent == 2 ? 16384.0f : 256.0f);
  return bits >> (exponent + mantissa) & 1 ? -value : value;
}

// Return a scale as a float. If GROUP is 16, the 8 bits are a small float with 4 exponent bits and 3 mantissa bits. If
// GROUP is 32, the 8 bits are the exponent of a power of two. Exponent 0 means 2^-127, which is a denormal float with
// the bits 0x400000.
template <int GROUP> float scale_of(uchar bits) {
  return GROUP == 16 ? small_float(bits, 4, 3) : as_type<float>(bits == 0 ? 0x400000u : uint(bits) << 23);
}
template <int GROUP, class S> float scale_of(S scale) { return float(scale); }

// Return the value of q as a float. number: what represents q in a product; it is q / FACTOR if q is a small float
// (weights without biases), else 2^BITS + q.
template <int BITS> float value_of(float number, Absent) { return FACTOR<BITS> * number; }
template <int BITS, class B> float value_of(float number, B) { return number - float(1 << BITS); }
