// Copy the recurrent weights Wh [D, G H, H] into `arranged` [D, simdgroups, COUNT, 32 lanes, 4]: the order in which the
// lanes of the whole-sequence kernels read them, with zeros as padding. In the new order the vectors of one lane lie at
// fixed distances, and the vectors of neighbouring lanes lie side by side. So a lane needs no bounds checks and no
// address arithmetic to read them. The kernel runs once per pass, with one thread per vector of 4 weights.
//
//   D, G, H     directions, gates, hidden units. COUNT: the vectors of a lane. H and COUNT come from the array `sizes`,
//               not from template parameters, so that one compiled kernel serves layers of any size
//   index       the number of a lane in its threadgroup; `vector`: the number of one of its vectors
//   unit, block, k   which weights a vector holds: the row of Wh of this unit and of the gate at position `block` on
//               the gate axis; k: the first of them in the row. In the backward pass it is a column of Wh
//   BACK        whether the order is that of the backward pass, which multiplies by the columns of Wh
//   MATRICES    whether it is that of products of 8 x 8 matrices (fused_matrix.metal), else of products in lanes
//   LANES, UNITS, GROUP   LANES adjacent lanes share a unit; LANES * UNITS = GROUP lanes divide the rows of UNITS units
//   SLOTS, PER  rows of weights of a lane; those of one unit: one per gate, or 1 in the backward pass
//   Cell        the struct of a cell (cell.metal): GATES is G, block(n) the position of gate n. Lanes<Cell>
//               (fused_lanes.metal): slot_block(n, lane) is the block of the n-th row that a lane has of its unit
//   a, S, W     the struct of all arrays; the dtype of the weights; the type of the array Wh
//
// Quantized weights: LaneShare (fused_quantized.metal) says which words a lane reads: it has SPAN weights of a row, in
// pieces of PIECE weights with the same scale (FACTORS: 2 with a bias, else 1). V, the type PackedVector, selects it.
// FIELD: the bits that a weight takes in these words. Packed (quantized.metal) has the arrays of words, scales and
// biases; BITS bits per weight, SIZE weights per scale. scale_of<SIZE>: a scale as a float; SIZE tells its format.

// ALL, BUT_CANDIDATE: values of `block` in the backward pass; see weight_of. weight_of returns the k-th weight of the
// product that computes one number for `unit`, or 0 past the end.
//
// Forward the product computes one gate: the weights are the row of Wh of this unit and of the gate at position
// `block`. Backward (BACK) it computes the gradient of the unit's h: the weights are the unit's column of Wh, and
// `block` selects rows of the column: those of one gate, of ALL gates, or of all but the last gate, a GRU's candidate
// (BUT_CANDIDATE). Then a row behind the candidate's rows lies H rows further in Wh. Wh: the weights of one direction.
constant constexpr int ALL = -1, BUT_CANDIDATE = -2;
template <class Cell, bool BACK, class W>
float weight_of(W Wh, int H, int unit, int block, int k) {
  constexpr int GATES = Cell::GATES;
  const int candidate = Cell::block(GATES - 1) * H;
  const int length = !BACK || block >= 0 ? H : block == ALL ? GATES * H : (GATES - 1) * H;
  if (unit >= H || k >= length) return 0.0f;
  if (!BACK) return float(Wh[(block * H + unit) * H + k]);
  const int row = block >= 0 ? block * H + k : block == BUT_CANDIDATE && k >= candidate ? k + H : k;
  return float(Wh[row * H + unit]);
}

// For the product in lanes, find which 4 weights vector number `vector` of lane `index` holds: weights k ... k + 3 of
// `unit` and `block`. The lane's first vectors have the same k: one for each gate of its own unit, then one for each
// gate of unit (own ^ 1), (own ^ 2), ... (exclusive or). Then the vectors of the same units and gates follow with the
// next k, and so on. If the backward pass has two products (a GRU whose reset comes before the product), the vectors of
// the candidate's product come first, `first` runs of 4 weights for each unit; then those of the other two gates.
template <class Cell, int UNITS, bool BACK>
void place_in_lanes(int H, int index, int vector, thread int& unit, thread int& block, thread int& k) {
  constexpr int LANES = Lanes<Cell>::LANES, GROUP = LANES * UNITS, PER = BACK ? 1 : int(Cell::GATES);
  const int first = (H + 4 * GROUP - 1) / (4 * GROUP);  // the candidate's product has this number of runs of 4 weights
  const int s = index % GROUP, slot = vector % (UNITS * PER), run = vector / (UNITS * PER);
  unit = index / GROUP * UNITS + ((slot / PER) ^ (s / LANES));
  block = BACK ? int(ALL) : Lanes<Cell>::slot_block(slot % PER, s % LANES);
  k = 4 * (s + GROUP * run);
  if constexpr (BACK && Lanes<Cell>::TWO_PRODUCTS != 0) {
    block = run < first ? Cell::block(Cell::GATES - 1) : int(BUT_CANDIDATE);
    k -= run < first ? 0 : 4 * GROUP * first;
  }
}

// For the product of 8 x 8 matrices, find which 4 weights vector number `vector` of lane `index` holds. They are
// weights k, k + 1, k + 8, k + 9 of `unit` and `block` (backward: of all gates), because a lane holds two neighbouring
// numbers of each matrix (row_of, column_of in fused_matrix.metal), a matrix has 8 columns, and a vector serves two
// matrices. A simdgroup has 8 units.
template <class Cell, bool BACK>
void place_in_matrices(int index, int vector, thread int& unit, thread int& block, thread int& k) {
  constexpr int PER = BACK ? 1 : int(Cell::GATES);
  unit = index / 32 * 8 + row_of(index % 32);
  block = BACK ? int(ALL) : Cell::block(vector % PER);
  k = 16 * (vector / PER) + column_of(index % 32);
}

// Copy one vector of 4 weights per thread. place.x counts the vectors of one direction in the order [simdgroups, COUNT,
// 32 lanes], place.y the directions. threads: how many threads, and so lanes, a threadgroup of the product has. at: the
// number of a weight in its row. In matrices the third and fourth weight are those of the next 8 x 8 matrix, 8 numbers
// further: n + 6 is 8, 9.
template <class Cell, int UNITS, bool BACK, bool MATRICES, class S, class Arrays>
void fused_arrange(thread const Arrays& a, uint2 place, uint threads) {
  const int H = a.sizes[0], COUNT = a.sizes[1];
  const int index = int(place.x) / (32 * COUNT) * 32 + int(place.x) % 32, vector = int(place.x) / 32 % COUNT;
  int unit, block, k;
  if (MATRICES) place_in_matrices<Cell, BACK>(index, vector, unit, block, k);
  else place_in_lanes<Cell, UNITS, BACK>(H, index, vector, unit, block, k);
  for (int n = 0; n < 4; ++n) {
    const int at = k + (MATRICES && n > 1 ? n + 6 : n);
    a.arranged[4 * (long(place.y) * (COUNT * threads) + place.x) + n] =
        S(weight_of<Cell, BACK>(a.Wh + long(place.y) * (Cell::GATES * H * H), H, unit, block, at));
  }
}

// --- Quantized weights ---
//
// The code below copies quantized weights into the order in which the forward kernel reads them; fused_quantized.metal
// describes it. Units past H and weights past a row's end are zeros. A lane reads vectors of 4 words of 32 bits; if its
// words do not fill the last vector, this vector ends with words that no kernel uses.

// Return the BITS bits of weight k of a row of packed words. A weight may begin in one word and end in the next.
template <int BITS>
uint bits_of(const device uint* words, int k) {
  const int word = k * BITS / 32, shift = k * BITS % 32;
  uint bits = words[word] >> shift;
  if (shift + BITS > 32) bits |= words[word + 1] << (32 - shift);
  return bits & ((1u << BITS) - 1);
}

// Return word number `number` of the 32-bit words that lane `index` reads. It contains several weights, each in a field
// of FIELD bits, or one scale or bias as a float. Wh: the quantized weights of all directions, BITS bits per weight,
// with a scale for every SIZE of them.
template <class Cell, int H, int UNITS, class V, int FIELD, int BITS, int SIZE, class A, class B>
uint word_of_lane(Packed<BITS, SIZE, A, B> Wh, long direction, int index, int number) {
  constexpr int GATES = Cell::GATES, GROUP = Lanes<Cell>::LANES * UNITS, SLOTS = UNITS * GATES, PER_WORD = 32 / FIELD;
  using Share = LaneShare<V, H, GROUP, SLOTS>;
  // A lane's words consist of pieces of EACH words: first OF_WEIGHTS words with weights, then scales and biases. A slot
  // is one row of Wh. factor: the number of this word among the piece's scales and biases. If it is negative, the word
  // holds weights.
  const int piece = number / Share::EACH, place = number % Share::EACH, factor = place - int(Share::OF_WEIGHTS);
  const int slot = factor < 0 ? place / Share::WORDS % SLOTS : factor / Share::FACTORS;
  int unit, block, k;
  place_in_lanes<Cell, UNITS, false>(H, index, slot, unit, block, k);
  k = index % GROUP * Share::SPAN + piece * Share::PIECE;
  // A word of weights: eight of a slot's numbers fill WORDS words, and all slots follow before the next eight.
  if (factor < 0) k += place / (Share::WORDS * SLOTS) * 8 + place % Share::WORDS * PER_WORD;
  if (unit >= H || k >= H) return 0;
  // group: the number of the scale, and of the bias, of weight k in this row
  const long row = (direction * GATES + block) * H + unit, group = row * (H / SIZE) + k / SIZE;
  if (factor >= 0) {
    const bool is_scale = factor % Share::FACTORS == 0;
    return as_type<uint>(is_scale ? scale_of<SIZE>(Wh.scales[group]) : value_at(Wh.biases, group, 0.0f));
  }
  // Move each weight from BITS bits, packed without gaps, to its own field of FIELD bits.
  uint word = 0;
  for (int n = 0; n < PER_WORD; ++n) word |= bits_of<BITS>(Wh.words + row * (H * BITS / 32), k + n) << (FIELD * n);
  return word;
}

// Copy the quantized recurrent weights Wh into `arranged` [D, simdgroups, COUNT, 32 lanes, 4 words], in which each lane
// finds its words one after the other: COUNT vectors of 4 words in each of D directions. One thread copies one vector.
// place.x counts the vectors of one direction in the order [simdgroups, COUNT, 32 lanes], place.y the directions.
// threads: how many threads, and so lanes, a threadgroup of the product has.
template <class Cell, int H, int UNITS, int COUNT, int FIELD, class V, class Arrays>
void fused_arrange_quantized(thread const Arrays& a, uint2 place, uint threads) {
  const int index = int(place.x) / (32 * COUNT) * 32 + int(place.x) % 32, vector = int(place.x) / 32 % COUNT;
  for (int n = 0; n < 4; ++n)
    a.arranged[4 * (long(place.y) * (COUNT * threads) + place.x) + n] = word_of_lane<Cell, H, UNITS, V, FIELD>(
        a.Wh, long(place.y), index, 4 * vector + n);
}
