// Copies quantized Wh [D, G H, H] into `arranged` [D, simdgroups, COUNT, 32 lanes, 4 words], the order in which the lanes
// of the whole-sequence kernel forward read it; fused_quantized.metal says which. Padding rows and columns are zeros; what
// fills a lane's last vector nobody reads. One thread per vector, in the order of `arranged`.

// Return the BITS bits of number k of a row.
template <int BITS>
uint bits_of(const device uint* words, int k) {
  const int word = k * BITS / 32, shift = k * BITS % 32;
  uint bits = words[word] >> shift;
  if (shift + BITS > 32) bits |= words[word + 1] << (32 - shift);
  return bits & ((1u << BITS) - 1);
}

// Return word `number` of lane `index`: weights in fields of FIELD bits, or a scale or bias as a float.
template <class Cell, int H, int UNITS, class V, int FIELD, int BITS, int SIZE, class A, class B>
uint word_of_lane(Packed<BITS, SIZE, A, B> Wh, long direction, int index, int number) {
  constexpr int GATES = Cell::GATES, GROUP = Lanes<Cell>::LANES * UNITS, SLOTS = UNITS * GATES, PER_WORD = 32 / FIELD;
  using Share = LaneShare<V, H, GROUP, SLOTS>;
  // A piece is OF_WEIGHTS words of weights, then each slot's factors: so factor < 0 says that the word is of weights.
  const int piece = number / Share::EACH, place = number % Share::EACH, factor = place - int(Share::OF_WEIGHTS);
  const int slot = factor < 0 ? place / Share::WORDS % SLOTS : factor / Share::FACTORS;
  int unit, block, k;
  place_in_lanes<Cell, H, UNITS, false>(index, slot, unit, block, k);
  k = index % GROUP * Share::SPAN + piece * Share::PIECE;
  if (factor < 0) k += place / (Share::WORDS * SLOTS) * 8 + place % Share::WORDS * PER_WORD;
  if (unit >= H || k >= H) return 0;
  const long row = (direction * GATES + block) * H + unit, group = row * (H / SIZE) + k / SIZE;
  if (factor >= 0) {
    const bool is_scale = factor % Share::FACTORS == 0;
    return as_type<uint>(is_scale ? scale_of<SIZE>(Wh.scales[group]) : value_at(Wh.biases, group, 0.0f));
  }
  uint word = 0;
  for (int n = 0; n < PER_WORD; ++n) word |= bits_of<BITS>(Wh.words + row * (H * BITS / 32), k + n) << (FIELD * n);
  return word;
}

template <class Cell, int H, int UNITS, int COUNT, int FIELD, int BITS, int SIZE, class V, class Arrays>
void fused_arrange_quantized(thread const Arrays& a, uint2 place, uint threads) {
  const int index = int(place.x) / (32 * COUNT) * 32 + int(place.x) % 32, vector = int(place.x) / 32 % COUNT;
  for (int n = 0; n < 4; ++n)
    a.arranged[4 * (long(place.y) * (COUNT * threads) + place.x) + n] = word_of_lane<Cell, H, UNITS, V, FIELD>(
        a.Wh, long(place.y), index, 4 * vector + n);
}
