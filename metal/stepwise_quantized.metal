// The recurrent product of a forward step with quantized weights, whose format quantized.metal describes. The result is
// a matrix with one row per batch item and one column per gate of each unit. Each of its numbers is a sum of K terms.
//
// With few batch items, a team of eight lanes computes a whole column, which needs one row of weights. A threadgroup
// has eight teams, so a team computes every eighth column. The lanes of a team divide the K terms of each sum: a lane
// multiplies TAKEN neighbouring weights at a time, which have the same scale. The lane does not dequantize them. It
// adds up the products of x and the quantized numbers, and applies scale and bias to these sums. With many batch items,
// stepwise_tiles.metal computes the product with 8 x 8 matrices, and each lane dequantizes its weights in registers
// just before.
//
// BITS: the bits of a weight. GROUP: the weights that share a scale. ROWS: batch items of a threadgroup. OWN: the
// columns of a team. R: a row type of x, see find_row in stepwise.metal. A, B: the types of scales and biases. A call
// without biases has the type Absent for B. quantized.metal defines number_at, of_group and scale_of.

// Return the quantized weights from row `row` on. K: the number of columns, which is the length of each sum of the
// product.
template <int BITS, int GROUP, class A, class B>
Packed<BITS, GROUP, A, B> rows_from(Packed<BITS, GROUP, A, B> weights, Index row, int K) {
  const Index groups = row * (K / GROUP);
  return {weights.words + row * (K * BITS / 32), weights.scales + groups, from(weights.biases, groups)};
}

// --- The product in lanes ---

// TAKEN is the number of neighbouring weights of a row that a lane reads and multiplies at a time; they fill a whole
// number of 32-bit words. It is smaller with several batch items, because the lane then needs registers for more sums.
template <int BITS, int GROUP, int ROWS>
constant constexpr int TAKEN = GROUP == 16 || (ROWS > 1 && BITS % 2 == 0) ? 16 : 32;

// Read WORDS neighbouring words, as vectors of four where possible.
template <int WORDS>
void take_words(const device uint* words, thread uint (&taken)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
#pragma clang loop unroll(full)
    for (int n = 0; n < WORDS; ++n) taken[n] = (*(const device packed_uint4*)(words + n / 4 * 4))[n % 4];
  } else {
#pragma clang loop unroll(full)
    for (int n = 0; n < WORDS; ++n) taken[n] = words[n];
  }
}

// Return the sum of `value` over N neighbouring lanes; all N lanes get the sum. first: 1, or a power of two if each run
// of `first` neighbouring lanes already has its sum in `value`; then only these sums are added up.
template <int N> float sum_of_team(float value, int first) {
#pragma clang loop unroll(full)
  for (int distance = first; distance < N; distance *= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}

// Where a lane reads one column (one row of quantized weights) next: the index of its next 32-bit word with weights,
// and the index of the scale of its quantization group.
struct PackedColumn {
  Index words, group;
};

// What a lane computes from the TAKEN weights that it multiplies at a time. products[column][row]: the sum of x times
// number_at(weight). x_sums[row]: the sum of x, which is later multiplied by the bias. scales, biases: the scale and
// the bias of the weights' quantization group, one per column. If several lanes share the group, only the first of them
// reads its scale and bias, and the others have 0.
template <int ROWS, int OWN>
struct PartialSums {
  float products[OWN][ROWS], x_sums[ROWS], scales[OWN], biases[OWN];
};

// Multiply the lane's next TAKEN weights of each column by x of every batch item. Write the sums, with the scales and
// biases of the weights, to `part`. place: the lane's number in its team of eight lanes.
template <int ROWS, int OWN, int BITS, int GROUP, class A, class B, class R>
void multiply(
    thread R (&rows)[ROWS], Packed<BITS, GROUP, A, B> weights, thread PackedColumn (&columns)[OWN], uint place,
    thread PartialSums<ROWS, OWN>& part) {
  constexpr int COUNT = TAKEN<BITS, GROUP, ROWS>, WORDS = COUNT * BITS / 32, AT_ONCE = ROWS == 1 ? COUNT : 4;
  uint words[OWN][WORDS];
#pragma clang loop unroll(full)
  for (int n = 0; n < OWN; ++n) take_words(weights.words + columns[n].words, words[n]);
  if (place % (GROUP / COUNT) == 0)
#pragma clang loop unroll(full)
    for (int n = 0; n < OWN; ++n) {
      part.scales[n] = scale_of<GROUP>(weights.scales[columns[n].group]);
      part.biases[n] = value_at(weights.biases, columns[n].group, 0.0f);
    }
#pragma clang loop unroll(full)
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    float operands[ROWS][AT_ONCE];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) operands_at<AT_ONCE>(rows[r], first, operands[r]);
#pragma clang loop unroll(full)
    for (int number = 0; number < AT_ONCE * ROWS; ++number) {
      const int e = number / ROWS, r = number % ROWS;
      part.x_sums[r] += operands[r][e];
#pragma clang loop unroll(full)
      for (int n = 0; n < OWN; ++n)
        part.products[n][r] += operands[r][e] * number_at<BITS>(words[n], first + e, weights.biases);
    }
  }
}

// The product of ROWS batch items and COLUMNS columns by 64 threads: 8 teams of 8 lanes. SHARE: how many lanes share a
// quantization group; their sums are added up before its scale is applied, which only the first of them has read.
template <int HEIGHT, int WIDTH>
struct QuantizedByLanes {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 64 };

  template <class Gates, int FIRST, int UNITS, int SEGMENTS, class X, int BITS, int GROUP, class A, class T>
  static void product(
      thread const X& x, Packed<BITS, GROUP, A, T> weights, int B, int H, int K, thread const Block& block) {
    constexpr int OWN = COLUMNS / 8, COUNT = TAKEN<BITS, GROUP, ROWS>, SHARE = GROUP / COUNT;
    const uint place = uint(block.lane) % 8, first = COUNT * place;
    const int team = 4 * block.simdgroup + block.lane / 8;
    float partial[OWN][ROWS] = {};
    typename X::Row rows[ROWS];
    PackedColumn columns[OWN];
#pragma clang loop unroll(full)
    for (int n = 0; n < OWN; ++n) {
      const int gate = Gates::block(FIRST + 8 * n / UNITS), unit = min(block.j0 + 8 * n % UNITS + team, H - 1);
      const Index row = Index(gate) * H + unit;
      columns[n].words = row * (K * BITS / 32) + first * BITS / 32;
      columns[n].group = row * (K / GROUP) + first / GROUP;
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      find_row(x, min(block.b0 + r, B - 1), 0, rows[r]);
      move(rows[r], int(first));
    }
    for (uint k = 0; k < uint(K); k += 8 * COUNT) {
      PartialSums<ROWS, OWN> part = {};
      if (k + first < uint(K)) multiply(rows, weights, columns, place, part);
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) {
        const float x_sum = sum_of_team<SHARE>(part.x_sums[r], 1);
#pragma clang loop unroll(full)
        for (int n = 0; n < OWN; ++n) {
          const float product = sum_of_team<SHARE>(part.products[n][r], 1);
          partial[n][r] += of_group<BITS>(product, x_sum, part.scales[n], part.biases[n], weights.biases);
        }
        move(rows[r], 8 * COUNT);
      }
#pragma clang loop unroll(full)
      for (int n = 0; n < OWN; ++n) columns[n].words += COUNT * BITS / 4, columns[n].group += 8 * COUNT / GROUP;
    }
#pragma clang loop unroll(full)
    for (int part = 0; part < OWN * ROWS; ++part) {
      const int n = part / ROWS, r = part % ROWS;
      const float sum = sum_of_team<8>(partial[n][r], SHARE);
      if (place == 0) block.sums[r * COLUMNS + team + 8 * n] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
};

// --- The product in tiles ---

// The weights that a lane holds for two columns of the product, which are two rows of quantized weights. The product
// runs in turns of 128 numbers of K. In each turn a lane holds 16 neighbouring weights of each row, beginning at number
// k, and their scale and bias. If several lanes hold weights of one quantization group, only the lane with the group's
// first weights, the `leader`, reads scale and bias. With other weights several simdgroups (slices) divide a turn among
// themselves; here they do not, because they would read the same words.
template <int BITS, int GROUP, class A, class B>
struct LaneColumns<Packed<BITS, GROUP, A, B>, 1> {
  enum { SPAN = 16, QUADS = 4, STEP = 4, WORDS = (BITS + 1) / 2 };
  Packed<BITS, GROUP, A, B> columns[2];
  int k, lane, leader;
  uint words[2][WORDS];
  float2 factors[2];
};

// Set the pointers of this lane's column e (0 or 1) to row number `row` of the quantized weights. The lane's weights
// begin at number first + 16 place of this row, where place is the lane's row in an 8 x 8 matrix.
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
  // Bits 2, 4 and 16 of `lane` are the number of its matrix row. Each matrix row has 16 weights, so 2, 4 or 8 matrix
  // rows share a group of 32, 64 or 128 weights. The group's first lane has zeros in the lowest 1, 2 or 3 of these
  // bits.
  own.leader = lane & ~(GROUP == 16 ? 0 : GROUP == 32 ? 2 : GROUP == 64 ? 6 : 22);
}

// Return the bias that lane `leader`, the first lane of a quantization group, has read. Without biases return 0.
inline float of_leader(float, int, Absent) { return 0.0f; }
template <class B> float of_leader(float bias, int leader, B) { return simd_shuffle(bias, ushort(leader)); }

// Read the lane's 16 weights of both columns, and their scales and biases. If the lane is past the end of the row (not
// `inside`), set them to 0. Then advance k to the next turn, 128 numbers further.
template <int BITS, int GROUP, class A, class B>
void load_columns(thread LaneColumns<Packed<BITS, GROUP, A, B>, 1>& own, bool inside) {
  constexpr int WORDS = (BITS + 1) / 2;
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    float scale = 0.0f, bias = 0.0f;
    // 16 weights take 16 BITS bits, which are BITS ushorts. If BITS is odd, they may begin in the middle of a word.
    const device ushort* halves = (const device ushort*)own.columns[e].words + own.k / 16 * BITS;
#pragma clang loop unroll(full)
    for (int n = 0; n < WORDS; ++n) {
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

// Read the lane's weights of a whole turn: no lane is past the end.
template <int BITS, int GROUP, class A, class B>
void load_turn(thread LaneColumns<Packed<BITS, GROUP, A, B>, 1>& own) { load_columns(own, true); }

// Return the weight, computed from q and the factors (scale, bias).
inline float weight_of(float q, float2 factors, Absent) { return factors.x * q; }
template <class B> float weight_of(float q, float2 factors, B) { return factors.x * q + factors.y; }

// Dequantize the lane's weights that the next four matrix products need, as w[column][m]: column 0 or 1 of the lane,
// matrix m of the four. n: the number of these four matrices (a quad) in the turn.
template <int BITS, int GROUP, class A, class B>
void weights_of(
    thread const LaneColumns<Packed<BITS, GROUP, A, B>, 1>& own, int n, thread float (&w)[2][4]) {
#pragma clang loop unroll(full)
  for (int part = 0; part < 8; ++part) {
    const int e = part / 4, m = part % 4;
    const B biases = own.columns[e].biases;
    const float q = value_of<BITS>(number_at<BITS>(own.words[e], 4 * n + m, biases), biases);
    w[e][m] = weight_of(q, own.factors[e], biases);
  }
}

// Multiply what remains of K after the whole turns of 128 numbers: `left` numbers, a multiple of 16. Lanes past the end
// multiply zeros. place: the lane's row in an 8 x 8 matrix; a matrix row has 16 numbers.
template <int ROWS, int BITS, int GROUP, class A, class B>
void multiply_rest(
    thread LaneColumns<Packed<BITS, GROUP, A, B>, 1>& own, int left, int place, int,
    threadgroup const float4* operands, thread simdgroup_float8x8 (&total)[ROWS / 8]) {
  load_columns(own, 16 * place < left);
  multiply_turn<ROWS>(own, operands, total);
}
