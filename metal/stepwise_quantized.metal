// The recurrent product of a forward step with quantized weights. quantized.metal describes the format of the weights.
//
// With few batch items the product runs by lanes. Eight lanes form a team; a team computes every eighth column for all
// rows. Its lanes split K; each takes TAKEN neighbouring weights at a time, which share one scale. The weights
// themselves are never computed, only sums of their numbers times x. With many batch items the product runs in tiles:
// weights are dequantized in registers on their way into the tile of stepwise_tiles.metal.

// Return the quantized weights from row `row` on.
template <int BITS, int GROUP, class A, class B>
Packed<BITS, GROUP, A, B> rows_from(Packed<BITS, GROUP, A, B> weights, Index row, int K) {
  const Index groups = row * (K / GROUP);
  return {weights.words + row * (K * BITS / 32), weights.scales + groups, from(weights.biases, groups)};
}

// --- The product in lanes ---

// TAKEN: how many weights a lane takes at a time, a whole number of words. It is smaller if the lane multiplies them
// with several rows.
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

// Return the sum of `value` over N neighbouring lanes; all N lanes get the sum. first: the distance between the two
// lanes of the first addition. Lanes that are closer than `first` have already been summed.
template <int N> float sum_of_team(float value, int first) {
#pragma clang loop unroll(full)
  for (int distance = first; distance < N; distance *= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}

// The positions of one column in a lane: its next word of weights, and the scale of its quantization group.
struct PackedColumn {
  Index words, group;
};

// The sums that a lane computes from the weights that it takes at a time: for every row and column the sum of number
// times x, and for every row the sum of x. The struct also has the scale and the bias, which only the first lane of a
// quantization group reads.
template <int ROWS, int OWN>
struct PartialSums {
  float products[OWN][ROWS], x_sums[ROWS], scales[OWN], biases[OWN];
};

// Multiply the weights that a lane takes at a time with its numbers of every row, and add the products to `part`.
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

// A row of quantized weights from number k on, as lane `lane` reads it. factors: the scale and bias of the group at k.
template <int BITS, int GROUP, class A, class B>
struct PackedRow {
  const device uint* words;
  A scales;
  B biases;
  int k, lane;
  float2 factors;
};

template <int BITS, int GROUP, class A, class B>
void move(thread PackedRow<BITS, GROUP, A, B>& row, int n) { row.k += n; }

template <int BITS, int GROUP, class A, class B> struct Columns<Packed<BITS, GROUP, A, B>> {
  using Row = PackedRow<BITS, GROUP, A, B>;
};

template <int BITS, int GROUP, class A, class B>
void find_column(
    Packed<BITS, GROUP, A, B> weights, Index row, int K, int first, int, int lane,
    thread PackedRow<BITS, GROUP, A, B>& column) {
  const Packed<BITS, GROUP, A, B> own = rows_from(weights, row, K);
  column.words = own.words;
  column.scales = own.scales;
  column.biases = own.biases;
  column.k = first;
  column.lane = lane;
}

// Return the weight, computed from q and the factors (scale, bias).
inline float weight_of(float q, float2 factors, Absent) { return factors.x * q; }
template <class B> float weight_of(float q, float2 factors, B) { return factors.x * q + factors.y; }

// Return the bias that lane `leader` has, or 0 if there are no biases.
inline float of_leader(float, int, Absent) { return 0.0f; }
template <class B> float of_leader(float bias, int leader, B) { return simd_shuffle(bias, ushort(leader)); }

// Return the scale and bias of the group that begins with lane `leader`. Only this lane reads them, and only if the
// group is `inside` the row.
template <int BITS, int GROUP, class A, class B>
float2 factors_of(thread const PackedRow<BITS, GROUP, A, B>& row, int k, bool inside, int leader) {
  float scale = 0.0f, bias = 0.0f;
  if (inside && row.lane == leader) {
    scale = scale_of<GROUP>(row.scales[k / GROUP]);
    bias = value_at(row.biases, k / GROUP, 0.0f);
  }
  return float2(simd_shuffle(scale, ushort(leader)), of_leader(bias, leader, row.biases));
}

// Dequantize the 32 weights from row.k on with eight lanes: each lane computes the four weights of its own place, and
// zeros past the end of the row. 32 weights are BITS words. The first BITS of the eight lanes read one word each and
// share it. Where a group begins, the group's first lane reads its scale and bias.
template <bool WHOLE, int BITS, int GROUP, class A, class B>
void part_of(thread PackedRow<BITS, GROUP, A, B>& row, int left, thread float (&values)[4]) {
  const int place = row.lane % 8, first = row.lane - place, bit = 4 * BITS * place;
  const int numbers = WHOLE ? 32 : left + 4 * place;
  const uint own = 32 * place < BITS * numbers && place < BITS ? row.words[row.k / 32 * BITS + place] : 0u;
  const uint low = simd_shuffle(own, ushort(first + bit / 32));
  const uint high = simd_shuffle(own, ushort(first + (bit / 32 + 1) % 8));
  const uint words[2] = {low, high};
  constexpr int SHARE = GROUP < 32 ? GROUP / 4 : 8;
  if (row.k % GROUP == 0 || GROUP < 32)
    row.factors = factors_of(row, row.k + 4 * place, 4 * place < numbers, row.lane / SHARE * SHARE);
#pragma clang loop unroll(full)
  for (int e = 0; e < 4; ++e) {
    const float q = number_of<BITS>(bits_at<BITS>(words, bit % 32 + BITS * e), row.biases);
    values[e] = weight_of(q, row.factors, row.biases);
  }
}
