// The recurrent product of one forward time step with quantized weights. quantized.metal describes their format and the
// functions that read it. The result `sums` in threadgroup memory has a row per batch item and a column per unit and
// gate; stepwise_lanes.metal has the formula, stepwise.metal explains the operand x.
//
// For few batch items there is the struct QuantizedByLanes: a team of eight lanes computes a whole column, which needs
// one row of weights. A threadgroup of 64 threads has eight teams; team m computes the columns m, m + 8, ... A lane
// multiplies TAKEN neighbouring weights at a time, which share a scale. It does not dequantize them. It adds up x times
// the integers or small floats q, and applies scale and bias to these sums. For many batch items there is the struct
// ByTiles (stepwise_tiles.metal), which multiplies 8 x 8 matrices; a lane dequantizes its weights in registers just
// before. This file defines the struct LaneColumns of ByTiles for quantized weights.
//
//   OWN          how many columns (rows of weights) a team has
//   COUNT        TAKEN<BITS, GROUP, ROWS>
//   rows         a lane's pointers into x, one per batch item, of type R
//   place        a lane's number in its team; in the product in tiles its row in an 8 x 8 matrix
//   A, B or T    the types of the arrays of scales and of biases; Absent if there are no biases
// In the product in tiles a lane has 16 neighbouring weights per turn and column: number 4 n + m is for matrix m of
// quad n.

// Return the matrix of quantized weights that begins at row number `row` of `weights`. K: how many weights a row has;
// they fill K BITS / 32 words. from(biases, n) is a pointer to bias n, or `absent` without biases.
template <int BITS, int GROUP, class A, class B>
Packed<BITS, GROUP, A, B> rows_from(Packed<BITS, GROUP, A, B> weights, Index row, int K) {
  const Index groups = row * (K / GROUP);
  return {weights.words + row * (K * BITS / 32), weights.scales + groups, from(weights.biases, groups)};
}

// --- The product in lanes ---

// How many neighbouring weights of a row a lane reads and multiplies at a time: 32 or 16. They share a scale and fill a
// whole number of 32-bit words. It is 16 if only 16 weights share a scale (GROUP == 16). It is also 16 with several
// batch items, because a lane then needs registers for more sums. But for odd BITS 16 weights do not fill whole words,
// so it stays 32.
template <int BITS, int GROUP, int ROWS>
constant constexpr int TAKEN = GROUP == 16 || (ROWS > 1 && BITS % 2 == 0) ? 16 : 32;

// Read WORDS neighbouring words into `taken`. If WORDS is a multiple of 4, vectors of four are read, which takes fewer
// loads.
template <int WORDS>
void take_words(const device uint* words, thread uint (&taken)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
    UNROLL for (int n = 0; n < WORDS; ++n) taken[n] = (*(const device packed_uint4*)(words + n / 4 * 4))[n % 4];
  } else {
    UNROLL for (int n = 0; n < WORDS; ++n) taken[n] = words[n];
  }
}

// Return the sum of `value` over N neighbouring lanes. With first = 1 all N lanes get the sum of all N. With a larger
// power of two as `first`, a lane gets the sum over those lanes whose distance from it is a multiple of `first`.
template <int N> float sum_of_team(float value, int first) {
  UNROLL for (int distance = first; distance < N; distance *= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}

// The position at which a lane reads next, in one row of quantized weights (one column of the product). words: the
// index of the next 32-bit word in the array of words. group: the index of the quantization group in the arrays of
// scales and biases.
struct PackedColumn {
  Index words, group;
};

// The sums of a lane over its next TAKEN weights of each of OWN columns, for ROWS batch items, before scale and bias
// are applied.
//   products[column][row]   the sum of x times number_at(weight), the number that stands for the weight before scale
//   and bias
//   x_sums[row]             the sum of x, by which the bias is multiplied later
//   scales, biases          scale and bias of the weights' group, per column. If several lanes share a group, only the
//                           first of these lanes reads them; the others have 0
template <int ROWS, int OWN>
struct PartialSums {
  float products[OWN][ROWS], x_sums[ROWS], scales[OWN], biases[OWN];
};

// Multiply the lane's next TAKEN weights of each column by x of every batch item, and add the sums to `part`, which is
// zero on entry. place: the lane's number in its team of eight. The lane reads scale and bias only if its weights are
// the first of their quantization group (place % (GROUP / COUNT) == 0). AT_ONCE: how many numbers of x are read before
// they are multiplied; it is 4 with several batch items, to save registers. e counts these numbers, r the batch items,
// n the columns.
template <int ROWS, int OWN, int BITS, int GROUP, class A, class B, class R>
void multiply(
    thread R (&rows)[ROWS], Packed<BITS, GROUP, A, B> weights, thread PackedColumn (&columns)[OWN], uint place,
    thread PartialSums<ROWS, OWN>& part) {
  constexpr int COUNT = TAKEN<BITS, GROUP, ROWS>, WORDS = COUNT * BITS / 32, AT_ONCE = ROWS == 1 ? COUNT : 4;
  uint words[OWN][WORDS];
  UNROLL for (int n = 0; n < OWN; ++n) take_words(weights.words + columns[n].words, words[n]);
  if (place % (GROUP / COUNT) == 0)
    UNROLL for (int n = 0; n < OWN; ++n) {
      part.scales[n] = scale_of<GROUP>(weights.scales[columns[n].group]);
      part.biases[n] = value_at(weights.biases, columns[n].group, 0.0f);
    }
  UNROLL for (int first = 0; first < COUNT; first += AT_ONCE) {
    float operands[ROWS][AT_ONCE];
    UNROLL for (int r = 0; r < ROWS; ++r) operands_at<AT_ONCE>(rows[r], first, operands[r]);
    UNROLL for (int number = 0; number < AT_ONCE * ROWS; ++number) {
      const int e = number / ROWS, r = number % ROWS;
      part.x_sums[r] += operands[r][e];
      UNROLL for (int n = 0; n < OWN; ++n)
        part.products[n][r] += operands[r][e] * number_at<BITS>(words[n], first + e, weights.biases);
    }
  }
}

// The 64 threads of a threadgroup, which are 8 teams of 8 lanes, compute the recurrent products of HEIGHT batch items
// for WIDTH columns, with quantized weights.
template <int HEIGHT, int WIDTH>
struct QuantizedByLanes {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 64 };

  // Compute the product into `block.sums`. In each pass a team multiplies 8 COUNT weights of each of its columns, COUNT
  // per lane. SHARE neighbouring lanes have weights of one quantization group. Their sums are added up first, then the
  // scale is applied. Only the first of these lanes has the scale; the others have 0, so their terms are 0. After the
  // last pass only the lanes with place 0, SHARE, 2 SHARE, ... have sums, and sum_of_team<8>(..., SHARE) adds them up.
  // SEGMENTS is always 1 with quantized weights. The barrier at the end separates the writes of `sums` from the reads
  // by the threads that compute the cells.
  //   first      the lane's first weight in a pass      partial   this lane's sums with scale and bias
  //   columns    where the lane reads next; in a pass they move forward by 8 COUNT weights
  template <class Gates, int FIRST, int UNITS, int SEGMENTS, class X, int BITS, int GROUP, class A, class T>
  static void product(
      thread const X& x, Packed<BITS, GROUP, A, T> weights, int B, int H, int K, thread const Block& block) {
    constexpr int OWN = COLUMNS / 8, COUNT = TAKEN<BITS, GROUP, ROWS>, SHARE = GROUP / COUNT;
    const uint place = uint(block.lane) % 8, first = COUNT * place;
    const int team = 4 * block.simdgroup + block.lane / 8;
    float partial[OWN][ROWS] = {};
    typename X::Row rows[ROWS];
    PackedColumn columns[OWN];
    UNROLL for (int n = 0; n < OWN; ++n) {
      const int gate = Gates::block(FIRST + 8 * n / UNITS), unit = min(block.j0 + 8 * n % UNITS + team, H - 1);
      const Index row = Index(gate) * H + unit;
      columns[n].words = row * (K * BITS / 32) + first * BITS / 32;
      columns[n].group = row * (K / GROUP) + first / GROUP;
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      find_row(x, min(block.b0 + r, B - 1), 0, rows[r]);
      move(rows[r], int(first));
    }
    for (uint k = 0; k < uint(K); k += 8 * COUNT) {
      PartialSums<ROWS, OWN> part = {};
      if (k + first < uint(K)) multiply(rows, weights, columns, place, part);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const float x_sum = sum_of_team<SHARE>(part.x_sums[r], 1);
        UNROLL for (int n = 0; n < OWN; ++n) {
          const float product = sum_of_team<SHARE>(part.products[n][r], 1);
          partial[n][r] += of_group<BITS>(product, x_sum, part.scales[n], part.biases[n], weights.biases);
        }
        move(rows[r], 8 * COUNT);
      }
      UNROLL for (int n = 0; n < OWN; ++n) columns[n].words += COUNT * BITS / 4, columns[n].group += 8 * COUNT / GROUP;
    }
    UNROLL for (int part = 0; part < OWN * ROWS; ++part) {
      const int n = part / ROWS, r = part % ROWS;
      const float sum = sum_of_team<8>(partial[n][r], SHARE);
      if (place == 0) block.sums[r * COLUMNS + team + 8 * n] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
};

// --- The product in tiles ---

// The quantized weights that a lane multiplies in the product ByTiles: those of two columns of the product, which are
// two rows of weights. The product adds up its terms in turns of 128; in each turn a lane holds 16 neighbouring weights
// of each of the two rows.
//   columns   the two rows of weights
//   k         the number within a row of the lane's first weight in the next turn
//   lane     the lane's number
//   leader   the number of the lane that has the first weights of the same quantization group; only this lane reads
//            the scale and bias
//   words     the bits of the 16 weights of each column       factors   scale and bias of each column
// WORDS: how many 32-bit words hold 16 weights. stepwise_tiles.metal explains SPAN, QUADS and STEP. The last template
// argument is the number of slices. It is 1 here, because several simdgroups would read the same words.
template <int BITS, int GROUP, class A, class B>
struct LaneColumns<Packed<BITS, GROUP, A, B>, 1> {
  enum { SPAN = 16, QUADS = 4, STEP = 4, WORDS = (BITS + 1) / 2 };
  Packed<BITS, GROUP, A, B> columns[2];
  int k, lane, leader;
  uint words[2][WORDS];
  float2 factors[2];
};

// Set this lane's column e (0 or 1) to row number `row` of the weights, which have K numbers per row. first: the number
// within the row at which the product begins. place: the lane's row in an 8 x 8 matrix; its weights begin at number
// first + 16 place.
template <int BITS, int GROUP, class A, class B>
void find_column(
    thread LaneColumns<Packed<BITS, GROUP, A, B>, 1>& own, Packed<BITS, GROUP, A, B> weights, int e, Index row, int K,
    int first, int lane, int place, int) {
  const Packed<BITS, GROUP, A, B> column = rows_from(weights, row, K);
  own.columns[e].words = column.words;
  own.columns[e].scales = column.scales;
  own.columns[e].biases = column.biases;
  own.k = first + 16 * place;
  own.lane = lane;
  // The bits with the values 2, 4 and 16 in `lane` are the number of the lane's row in an 8 x 8 matrix. In a turn a
  // lane has 16 neighbouring weights of a column, one in each of the 16 matrices, in the same matrix row. So the lanes
  // of 2, 4 or 8 neighbouring matrix rows share a group of 32, 64 or 128 weights. In the first lane of a group the
  // lowest 1, 2 or 3 of these bits are 0.
  own.leader = lane & ~(GROUP == 16 ? 0 : GROUP == 32 ? 2 : GROUP == 64 ? 6 : 22);
}

// Return the bias that lane `leader`, the first lane of a quantization group, has read. Return 0 if the weights have no
// biases: then the last parameter, the array of biases, has the type Absent.
inline float of_leader(float, int, Absent) { return 0.0f; }
template <class B> float of_leader(float bias, int leader, B) { return simd_shuffle(bias, ushort(leader)); }

// Read the lane's 16 weights of both columns for one turn of 128 terms, and their scales and biases. Then set k to the
// next turn. inside: whether the lane's weights lie within the row. If not, they become 0, because in memory other
// weights follow after the end of a row.
template <int BITS, int GROUP, class A, class B>
void load_columns(thread LaneColumns<Packed<BITS, GROUP, A, B>, 1>& own, bool inside) {
  constexpr int WORDS = (BITS + 1) / 2;
  UNROLL for (int e = 0; e < 2; ++e) {
    float scale = 0.0f, bias = 0.0f;
    // 16 weights take 16 * BITS bits, which are BITS numbers of type ushort. If BITS is odd, they may begin in the
    // middle of a 32-bit word, so they are read as ushort.
    const device ushort* halves = (const device ushort*)own.columns[e].words + own.k / 16 * BITS;
    UNROLL for (int n = 0; n < WORDS; ++n) {
      own.words[e][n] = 0u;
      if (!inside) continue;
      if (BITS % 2 == 0) own.words[e][n] = ((const device uint*)halves)[n];
      else if (2 * n + 1 == BITS) own.words[e][n] = halves[2 * n];
      else own.words[e][n] = halves[2 * n] | uint(halves[2 * n + 1]) << 16;
    }
    if (inside && own.lane == own.leader) {
      scale = scale_of<GROUP>(own.columns[e].scales[own.k / GROUP]);
      bias = value_at(own.columns[e].biases, own.k / GROUP, 0.0f);
    }
    if constexpr (GROUP > 16) {
      scale = simd_shuffle(scale, ushort(own.leader));
      bias = of_leader(bias, own.leader, own.columns[e].biases);
    }
    own.factors[e] = float2(scale, bias);
  }
  own.k += TURN;
}

// Read the lane's weights of a whole turn of 128 terms, in which no lane's weights lie past the end of the row
// (`true`).
template <int BITS, int GROUP, class A, class B>
void load_turn(thread LaneColumns<Packed<BITS, GROUP, A, B>, 1>& own) { load_columns(own, true); }

// Return a dequantized weight: scale * q + bias, or scale * q if the weights have no biases. factors: scale and bias.
// The last parameter, the array of biases, is there for its type: Absent without biases.
inline float weight_of(float q, float2 factors, Absent) { return factors.x * q; }
template <class B> float weight_of(float q, float2 factors, B) { return factors.x * q + factors.y; }

// Dequantize the lane's weights for quad n of the turn (four pairs of 8 x 8 matrices), as w[e][m]: column e (0 or 1) of
// the lane, pair m of the quad.
template <int BITS, int GROUP, class A, class B>
void weights_of(
    thread const LaneColumns<Packed<BITS, GROUP, A, B>, 1>& own, int n, thread float (&w)[2][4]) {
  UNROLL for (int part = 0; part < 8; ++part) {
    const int e = part / 4, m = part % 4;
    const B biases = own.columns[e].biases;
    const float q = value_of<BITS>(number_at<BITS>(own.words[e], 4 * n + m, biases), biases);
    w[e][m] = weight_of(q, own.factors[e], biases);
  }
}

// Multiply the terms that are left of K after the whole turns of 128. left: how many they are, a multiple of 16,
// because K is a multiple of the size of a quantization group. place: the lane's row in an 8 x 8 matrix, which has 16
// of these terms; lanes past the end multiply zeros. The parameter without a name is used only for weights that are not
// quantized. operands: where the lane reads x in threadgroup memory. total: the sums of ROWS batch items and eight
// columns.
template <int ROWS, int BITS, int GROUP, class A, class B>
void multiply_rest(
    thread LaneColumns<Packed<BITS, GROUP, A, B>, 1>& own, int left, int place, int,
    threadgroup const float4* operands, thread simdgroup_float8x8 (&total)[ROWS / 8]) {
  load_columns(own, 16 * place < left);
  multiply_turn<ROWS>(own, operands, total);
}
