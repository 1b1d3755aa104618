// Copy the recurrent weights Wh [D, G H, H] into `arranged` [D, simdgroups, COUNT, 32 lanes, 4], with zeros as padding.
// This is the order in which the whole-sequence kernels (all time steps in one launch) read the weights: the vectors of
// one lane lie at fixed distances, and the vectors of neighbouring lanes lie side by side. So a lane needs no bounds
// checks and no address arithmetic to read them. This copy runs once per pass, with one thread per vector of 4 weights.
//
//   COUNT        how many vectors a lane has. H and COUNT come from the array `sizes` and not from template parameters,
//                so that one compiled kernel serves layers of any size
//   index        the number of a lane (thread) in its threadgroup
//   vector       the number of one of the lane's vectors
//   unit, block, k   which weights the vector holds: those from number k on, in the row of Wh of this unit and of the
//                gate at position `block` on the gate axis. Backward it is the unit's column of Wh
//   BACK         whether the order is that of the backward pass, which multiplies by the columns of Wh
//   MATRICES     whether the order is for products of 8 x 8 matrices (fused_matrix.metal), else for products in lanes
//   SLOTS, PER   how many rows of weights a lane has in all, and of one unit: one per gate, or 1 in the backward pass
// fused.metal explains the other names.
//
// For quantized weights, LaneShare (fused_quantized.metal) says which words a lane reads:
//   SPAN         how many weights of a row a lane has
//   PIECE        how many of these weights have the same scale
//   FACTORS      2 if a piece has a scale and a bias, else 1
//   FIELD        the bits that a weight takes in the words that lanes read
//   V            the type PackedVector, which selects the LaneShare for quantized weights
//   Packed       the arrays of words, scales and biases (quantized.metal), with BITS bits per weight and one scale per
//                SIZE weights; scale_of<SIZE> returns a scale as a float

// weight_of returns the k-th weight of the row (or column) of Wh that computes one number for `unit`, or 0 past its
// end. ALL and BUT_CANDIDATE are special values of its argument `block` in the backward pass.
//
// In the forward pass the product computes one gate: the weights are the row of Wh that belongs to this unit and to the
// gate at position `block`. In the backward pass (BACK) it computes the gradient of the unit's h: the weights are the
// unit's column of Wh. There `block` selects the rows of one gate, of ALL gates, or of all gates but the last one, a
// GRU's candidate (BUT_CANDIDATE). With BUT_CANDIDATE weight k is H rows further in Wh, if it lies behind the rows that
// are left out. Wh: the weights of one direction.
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

// Find the 4 weights that vector number `vector` of lane `index` holds, for the product that is divided among lanes:
// the weights k ... k + 3 of `unit` and `block`. A lane's first vectors all have the same k: one vector for each gate
// of its own unit, then one for each gate of unit (own ^ 1), (own ^ 2), ... (exclusive or). The vectors of the same
// units and gates with the next k follow, and so on. The backward pass of a GRU whose reset comes before the product
// has two products. There the vectors of the candidate's product come first, with `first` runs of 4 weights for each
// unit; then come the vectors of the other two gates.
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

// Find the 4 weights that vector number `vector` of lane `index` holds, for the product with 8 x 8 matrices: the
// weights k, k + 1, k + 8 and k + 9 of `unit` and `block` (backward: of all gates). The reason: a vector serves two
// matrices of 8 columns each, and a lane holds two neighbouring numbers of each matrix, at row_of and column_of. A
// simdgroup has 8 units.
template <class Cell, bool BACK>
void place_in_matrices(int index, int vector, thread int& unit, thread int& block, thread int& k) {
  constexpr int PER = BACK ? 1 : int(Cell::GATES);
  unit = index / 32 * 8 + row_of(index % 32);
  block = BACK ? int(ALL) : Cell::block(vector % PER);
  k = 16 * (vector / PER) + column_of(index % 32);
}

// Copy weights into the order in which the kernels read them; each thread copies one vector of 4 weights. place.x
// counts the vectors of one direction in the order [simdgroups, COUNT vectors of a lane, 32 lanes], place.y the
// directions. threads: the threads of a threadgroup in the kernel that will read the weights; one direction has COUNT *
// threads vectors. at: the number of a weight in its row. If MATRICES is true, a vector has two weights of one 8 x 8
// matrix and two of the next matrix. So its weights are numbers k, k + 1, k + 8 and k + 9 of the row.
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
// describes this order. Units past H and weights past a row's end become zeros. A lane reads vectors of 4 words (a word
// has 32 bits). If a lane's words do not fill its last vector, the vector ends with words that no kernel uses.

// Return the BITS bits of weight k of a row of quantized weights, which lie in 32-bit words without gaps. A weight may
// begin in one word and end in the next.
template <int BITS>
uint bits_of(const device uint* words, int k) {
  const int word = k * BITS / 32, shift = k * BITS % 32;
  uint bits = words[word] >> shift;
  if (shift + BITS > 32) bits |= words[word + 1] << (32 - shift);
  return bits & ((1u << BITS) - 1);
}

// Return number `number` of the 32-bit words that lane `index` reads. The word contains several weights, each in a
// field of FIELD bits, or one scale or bias as a float. Wh: the quantized weights of all directions, with BITS bits per
// weight and one scale for every SIZE weights.
template <class Cell, int H, int UNITS, class V, int FIELD, int BITS, int SIZE, class A, class B>
uint word_of_lane(Packed<BITS, SIZE, A, B> Wh, long direction, int index, int number) {
  constexpr int GATES = Cell::GATES, GROUP = Lanes<Cell>::LANES * UNITS, SLOTS = UNITS * GATES, PER_WORD = 32 / FIELD;
  using Share = LaneShare<V, H, GROUP, SLOTS>;
  // A lane's words consist of pieces of EACH words: first OF_WEIGHTS words with weights, then scales and biases. slot:
  // which of the lane's rows of Wh the word belongs to. factor: the number of the word among the scales and biases of
  // its piece; if factor is negative, the word holds weights.
  const int piece = number / Share::EACH, place = number % Share::EACH, factor = place - int(Share::OF_WEIGHTS);
  const int slot = factor < 0 ? place / Share::WORDS % SLOTS : factor / Share::FACTORS;
  int unit, block, k;
  place_in_lanes<Cell, UNITS, false>(H, index, slot, unit, block, k);
  k = index % GROUP * Share::SPAN + piece * Share::PIECE;
  // If the word holds weights, add the index of its first weight in the piece. The order of the words is: WORDS words
  // with eight weights of the first row, then with eight weights of each other row, then with the next eight weights of
  // the first row.
  if (factor < 0) k += place / (Share::WORDS * SLOTS) * 8 + place % Share::WORDS * PER_WORD;
  if (unit >= H || k >= H) return 0;
  // group: the number of the scale, and of the bias, of weight k in this row
  const long row = (direction * GATES + block) * H + unit, group = row * (H / SIZE) + k / SIZE;
  if (factor >= 0) {
    const bool is_scale = factor % Share::FACTORS == 0;
    return as_type<uint>(is_scale ? scale_of<SIZE>(Wh.scales[group]) : value_at(Wh.biases, group, 0.0f));
  }
  // Copy each weight from its BITS bits to a field of FIELD bits, which the kernels extract with fewer instructions.
  uint word = 0;
  for (int n = 0; n < PER_WORD; ++n) word |= bits_of<BITS>(Wh.words + row * (H * BITS / 32), k + n) << (FIELD * n);
  return word;
}

// Copy the quantized recurrent weights Wh into `arranged` [D, simdgroups, COUNT, 32 lanes, 4 words], the order in which
// the lanes read them. One thread copies one vector. place, threads: as in fused_arrange.
template <class Cell, int H, int UNITS, int COUNT, int FIELD, class V, class Arrays>
void fused_arrange_quantized(thread const Arrays& a, uint2 place, uint threads) {
  const int index = int(place.x) / (32 * COUNT) * 32 + int(place.x) % 32, vector = int(place.x) / 32 % COUNT;
  for (int n = 0; n < 4; ++n)
    a.arranged[4 * (long(place.y) * (COUNT * threads) + place.x) + n] = word_of_lane<Cell, H, UNITS, V, FIELD>(
        a.Wh, long(place.y), index, 4 * vector + n);
}
