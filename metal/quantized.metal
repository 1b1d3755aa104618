// Quantized weights as mx.quantize packs them, BITS to a weight: GROUP neighbours of a row share a scale and, in mode
// affine, a bias.
//
//   words   [rows, K BITS / 32] of 32 bits: the weights of a row as one string of bits, each with its lowest bit first
//   scales  [rows, K / GROUP]: numbers, or 8 bits: powers of two (groups of 32), or floats of 8 bits (groups of 16)
//   biases  [rows, K / GROUP], or absent
// A weight is scale * q + bias of an integer q (mode affine), or scale * q of a float q of 4 or 8 bits (the others,
// which have no biases: so the type of `biases`, Absent or not, selects between the two below).
//
// A product makes no weights. It puts the bits of q into the mantissa of a half with a fixed exponent. Of an integer q
// that half is the number 2^BITS + q; of a small float q it is q / FACTOR. Both are exact, and cost a shift and masks
// for two weights. Scale, bias and the constants are applied once per group:
//   sum of w x = scale * (sum of number x - 2^BITS * sum of x) + bias * sum of x     or     scale * FACTOR * sum of
//            number x

template <int BITS, int GROUP, class A, class B>
struct Packed {
  const device uint* words;
  A scales;
  B biases;
};

template <int BITS, int GROUP, class W, class A, class B>
Packed<BITS, GROUP, A, B> packed_weights(W words, A scales, B biases) { return {words, scales, biases}; }

// Small floats have a sign, 2 bits of exponent, 1 of mantissa (4 bits), or 1, 4, 3 (8 bits). Their exponent and
// mantissa become the lowest bits of a half's exponent and the highest of its mantissa: FACTOR is what that divides
// them by.
template <int BITS> constant constexpr int MANTISSA = BITS == 4 ? 1 : 3;
template <int BITS> constant constexpr float FACTOR = BITS == 4 ? 16384.0f : 256.0f;

inline uint shifted(uint bits, int left) { return left < 0 ? bits >> -left : bits << left; }

// Return a word with the halves of two weights whose bits begin at `first` in either half of `word`: integers shifted
// to the top of the mantissa under the exponent of 2^BITS; small floats with exponent and mantissa moved together and
// the sign moved to the half's sign.
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

// Return the number of weight e of those in `words`. Two weights that begin in the same place of either half of a word
// are made at once, which the compiler sees in the unrolled loops; of widths that do not divide 16 each is made alone.
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

// Return what a group adds to a product, from its sums of number x and of x.
template <int BITS> float of_group(float product, float, float scale, float, Absent) {
  return scale * (FACTOR<BITS> * product);
}
template <int BITS, class B> float of_group(float product, float x_sum, float scale, float bias, B) {
  return scale * (product - float(1 << BITS) * x_sum) + bias * x_sum;
}

// Return a small float, by way of a half; `exponent` and `mantissa` are its bits of each.
inline float small_float(uint bits, int exponent, int mantissa) {
  const uint magnitude = bits & ((1u << (exponent + mantissa)) - 1);
  const float value = float(as_type<half>(ushort(magnitude << (10 - mantissa)))) * (exponent == 2 ? 16384.0f : 256.0f);
  return bits >> (exponent + mantissa) & 1 ? -value : value;
}

// Return a scale. Of 8 bits: in groups of 16 a float (1, 4, 3), in groups of 32 the exponent of a float; 0x400000 is
// 2^-127, which a float holds as a denormal.
template <int GROUP> float scale_of(uchar bits) {
  return GROUP == 16 ? small_float(bits, 4, 3) : as_type<float>(bits == 0 ? 0x400000u : uint(bits) << 23);
}
template <int GROUP, class S> float scale_of(S scale) { return float(scale); }

// Return q as a number.
template <int BITS> float number_of(uint q, Absent) { return BITS == 4 ? small_float(q, 2, 1) : small_float(q, 4, 3); }
template <int BITS, class B> float number_of(uint q, B) { return float(q); }

// Return BITS bits of `words`, from bit `first` on.
template <int BITS, int WORDS>
uint bits_at(thread const uint (&words)[WORDS], int first) {
  const int word = first / 32, shift = first % 32;
  uint bits = words[word] >> shift;
  if (shift + BITS > 32) bits |= words[word + 1] << (32 - shift);
  return BITS == 32 ? bits : bits & ((1u << BITS) - 1);
}
