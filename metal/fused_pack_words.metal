// Packed Wh [D, G H, H] in the order in which the lanes of the kernel that runs a sequence forward read it, [D,
// simdgroups, COUNT, 32 lanes, 4 words]; fused_packed.metal says which. Zeros as padding of rows and columns; what fills
// a lane's last vector nobody reads. One thread per vector, in the order of `packed`.

// BITS bits from number k on of a row.
template <int BITS>
uint bits_of(const device uint* words, int k) {
  const int word = k * BITS / 32, shift = k * BITS % 32;
  uint found = words[word] >> shift;
  if (shift + BITS > 32) found |= words[word + 1] << (32 - shift);
  return found & ((1u << BITS) - 1);
}

// Word `number` of lane `index`: of weights, in fields, or a scale or bias.
template <int CELL, int H, int UNITS, class V, int FIELD, int BITS, int SIZE, class A, class B>
uint word_of_lane(Packed<BITS, SIZE, A, B> Wh, long direction, int index, int number) {
  constexpr int GROUP = LANES * UNITS, SLOTS = UNITS * PRODUCTS, PER_WORD = 32 / FIELD;
  using Share = LaneShare<V, H, GROUP, SLOTS>;
  const int piece = number / Share::EACH, place = number % Share::EACH, factor = place - int(Share::OF_WEIGHTS);
  const int slot = factor < 0 ? place / Share::WORDS % SLOTS : factor / Share::FACTORS;
  int unit, block, k;
  place_in_lanes<CELL, H, UNITS, false>(index, slot, unit, block, k);
  k = index % GROUP * Share::SPAN + piece * Share::PIECE;
  if (factor < 0) k += place / (Share::WORDS * SLOTS) * 8 + place % Share::WORDS * PER_WORD;
  if (unit >= H || k >= H) return 0;
  const long row = (direction * GATES + block) * H + unit, group = row * (H / SIZE) + k / SIZE;
  if (factor >= 0) {
    const bool is_scale = factor % Share::FACTORS == 0;
    return as_type<uint>(is_scale ? scale_of<SIZE>(Wh.scales[group]) : value_at(Wh.biases, group, 0.0f));
  }
  uint found = 0;
  for (int n = 0; n < PER_WORD; ++n) found |= bits_of<BITS>(Wh.words + row * (H * BITS / 32), k + n) << (FIELD * n);
  return found;
}

template <int CELL, int H, int UNITS, int COUNT, int FIELD, class V, int BITS, int SIZE, class A, class B>
void fused_pack_words(Packed<BITS, SIZE, A, B> Wh, device uint* packed, uint2 place, uint threads) {
  const int index = int(place.x) / (32 * COUNT) * 32 + int(place.x) % 32, vector = int(place.x) / 32 % COUNT;
  for (int n = 0; n < 4; ++n)
    packed[4 * (long(place.y) * (COUNT * threads) + place.x) + n] =
        word_of_lane<CELL, H, UNITS, V, FIELD>(Wh, long(place.y), index, 4 * vector + n);
}
