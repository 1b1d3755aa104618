// Weights as mx.quantize packs them, BITS to a weight, and what turns them into numbers: GROUP neighbours of a row share
// a scale and, in mode affine, a bias.
//
//   words   [rows, K BITS / 32] of 32 bits: the weights of a row as one string of bits, each with its lowest bit first
//   scales  [rows, K / GROUP]: numbers, or 8 bits: powers of two (groups of 32), or floats of 8 bits (of 16)
//   biases  [rows, K / GROUP], or absent
// A weight is scale * q + bias of an integer q, or scale * q of a float q of 4 or 8 bits.
//
// A product does not make weights. It has the bits of q in the mantissa of a half, where they are the number
// 2^BITS + q, or in that of which a small float is a FACTOR; both are exact. The rest comes once for a group:
//   sum of w x = scale * (sum of number x - 2^BITS * sum of x) + bias * sum of x, or scale * FACTOR * sum of number x

template <int BITS, int GROUP, class A, class B>
struct Packed {
  const device uint* words;
  A scales;
  B biases;
};

template <int BITS, int GROUP, class W, class A, class B>
Packed<BITS, GROUP, A, B> packed_weights(W words, A scales, B biases) { return {words, scales, biases}; }

// Bits of the mantissa of a small float: sign, 2 of exponent, 1, or sign, 4, 3; and what it is of a half in whose
// exponent and mantissa its own are the lowest and the highest bits.
template <int BITS> constant constexpr int MANTISSA = BITS == 4 ? 1 : 3;
template <int BITS> constant constexpr float FACTOR = BITS == 4 ? 16384.0f : 256.0f;

inline uint shifted(uint bits, int left) { return left < 0 ? bits >> -left : bits << left; }

// The numbers of two weights, of which the bits of an integer, or the lowest of a float, are shifted to the place they
// have in a half, in both halves of a word.
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

// The number of weight e of those in some words. Two that begin in the same place of either half of a word are made at
// once; of widths that do not fill halves each is made alone.
template <int BITS, int WORDS, class B>
float number_at(thread const uint (&words)[WORDS], int e, B biases) {
  const int word = BITS * e / 32, first = BITS * e % 32;
  if constexpr (16 % BITS == 0) {
    const half2 two = as_type<half2>(halves_of<BITS>(words[word], first % 16, biases));
    return float(first < 16 ? two.x : two.y);
  } else {
    uint found = shifted(words[word], 10 - BITS - first);
    if (first + BITS > 32) found |= words[word + 1] << (42 - BITS - first);
    return float(as_type<half2>(with_exponents<BITS>(found)).x);
  }
}

// What a group adds to a product: its scale and bias times the sums of number x and of x.
template <int BITS> float of_group(float product, float, float scale, float, Absent) {
  return scale * (FACTOR<BITS> * product);
}
template <int BITS, class B> float of_group(float product, float x_sum, float scale, float bias, B) {
  return scale * (product - float(1 << BITS) * x_sum) + bias * x_sum;
}

// A float of 4 bits (sign, 2 of exponent, 1) or 8 (sign, 4, 3), whose bits stand where a half has those.
inline float small_float(uint bits, int exponent, int mantissa) {
  const uint magnitude = bits & ((1u << (exponent + mantissa)) - 1);
  const float value = float(as_type<half>(ushort(magnitude << (10 - mantissa)))) * (exponent == 2 ? 16384.0f : 256.0f);
  return bits >> (exponent + mantissa) & 1 ? -value : value;
}

template <int GROUP> float scale_of(uchar bits) {
  return GROUP == 16 ? small_float(bits, 4, 3) : as_type<float>(bits == 0 ? 0x400000u : uint(bits) << 23);
}
template <int GROUP, class S> float scale_of(S scale) { return float(scale); }

// q as a number.
template <int BITS> float number_of(uint q, Absent) { return BITS == 4 ? small_float(q, 2, 1) : small_float(q, 4, 3); }
template <int BITS, class B> float number_of(uint q, B) { return float(q); }

// The bits from `first` on, in words of which those are there.
template <int BITS, int WORDS>
uint bits_at(thread const uint (&words)[WORDS], int first) {
  const int word = first / 32, shift = first % 32;
  uint found = words[word] >> shift;
  if (shift + BITS > 32) found |= words[word + 1] << (32 - shift);
  return BITS == 32 ? found : found & ((1u << BITS) - 1);
}
