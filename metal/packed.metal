// Weights as mx.quantize packs them, BITS to a weight, and what turns them into numbers: GROUP neighbours of a row share
// a scale and, in mode affine, a bias.
//
//   words   [rows, K BITS / 32] of 32 bits: the weights of a row as one string of bits, each with its lowest bit first
//   scales  [rows, K / GROUP]: numbers, or 8 bits: powers of two (groups of 32), or floats of 8 bits (of 16)
//   biases  [rows, K / GROUP], or absent
// A weight is scale * q + bias of an integer q, or scale * q of a float q of 4 or 8 bits.

// Weights that a lane takes at a time: those of 1 or 2 words, of an odd width as many as fill words.
template <int BITS> constant constexpr int TAKEN = BITS == 4 || BITS == 8 ? 8 : BITS % 2 == 0 ? 16 : 32;

template <int BITS, int GROUP, class A, class B>
struct Packed {
  const device uint* words;
  A scales;
  B biases;
};

template <int BITS, int GROUP, class W, class A, class B>
Packed<BITS, GROUP, A, B> packed_weights(W words, A scales, B biases) { return {words, scales, biases}; }

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
