// The product of stepwise_product_by_lanes.metal with packed weights, whose words eight lanes share: a team of them
// computes every eighth column for all rows; its lanes split K, TAKEN neighbours at a time, which one scale belongs to.

template <int COLUMNS> constant constexpr int THREADS = 64;

// Weights that a lane takes at a time, in whole words: fewer where it multiplies them with several rows.
template <int BITS, int GROUP, int ROWS>
constant constexpr int TAKEN = GROUP == 16 || (ROWS > 1 && BITS % 2 == 0) ? 16 : 32;

// A lane's words.
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

// The sum of a number over N neighbouring lanes, in all of them.
template <int N> float sum_of_team(float value, int first) {
#pragma clang loop unroll(full)
  for (int distance = first; distance < N; distance *= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}

// Where a lane's words of a column begin, and the scale of their group.
struct PackedColumn {
  Index words, group;
};

// What a lane has of every row and column over the weights that it takes at a time: the sums of number x, and of x; the
// scale and bias, which the first of the lanes that share them reads.
template <int ROWS, int OWN>
struct Found {
  float products[OWN][ROWS], x_sums[ROWS], scales[OWN], biases[OWN];
};

template <int ROWS, int OWN, int BITS, int GROUP, class A, class B, class R>
void multiply(
    thread R (&rows)[ROWS], Packed<BITS, GROUP, A, B> weights, thread PackedColumn (&columns)[OWN], uint place,
    thread Found<ROWS, OWN>& found) {
  constexpr int COUNT = TAKEN<BITS, GROUP, ROWS>, WORDS = COUNT * BITS / 32, AT_ONCE = ROWS == 1 ? COUNT : 4;
  uint words[OWN][WORDS];
#pragma clang loop unroll(full)
  for (int n = 0; n < OWN; ++n) take_words(weights.words + columns[n].words, words[n]);
  if (place % (GROUP / COUNT) == 0)
#pragma clang loop unroll(full)
    for (int n = 0; n < OWN; ++n) {
      found.scales[n] = scale_of<GROUP>(weights.scales[columns[n].group]);
      found.biases[n] = value_at(weights.biases, columns[n].group, 0.0f);
    }
#pragma clang loop unroll(full)
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    float operands[ROWS][AT_ONCE];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) operands_at<AT_ONCE>(rows[r], first, operands[r]);
#pragma clang loop unroll(full)
    for (int part = 0; part < AT_ONCE * ROWS; ++part) {
      const int e = part / ROWS, r = part % ROWS;
      found.x_sums[r] += operands[r][e];
#pragma clang loop unroll(full)
      for (int n = 0; n < OWN; ++n)
        found.products[n][r] += operands[r][e] * number_at<BITS>(words[n], first + e, weights.biases);
    }
  }
}

template <int CELL, int FIRST, int ROWS, int COLUMNS, int UNITS, int SEGMENTS, class X, int BITS, int GROUP, class A,
    class T>
void product(
    thread const X& x, Packed<BITS, GROUP, A, T> weights, int B, int H, int K, int b0, int j0, threadgroup float* sums,
    threadgroup float*, int simdgroup, int lane) {
  constexpr int OWN = COLUMNS / 8, COUNT = TAKEN<BITS, GROUP, ROWS>, SHARE = GROUP / COUNT;
  const uint place = uint(lane) % 8, first = COUNT * place;
  const int team = 4 * simdgroup + lane / 8;
  float partial[OWN][ROWS] = {};
  typename X::Row rows[ROWS];
  PackedColumn columns[OWN];
#pragma clang loop unroll(full)
  for (int n = 0; n < OWN; ++n) {
    const int gate = place_of(CELL, FIRST + 8 * n / UNITS), unit = min(j0 + 8 * n % UNITS + team, H - 1);
    const Index row = Index(gate) * H + unit;
    columns[n].words = row * (K * BITS / 32) + first * BITS / 32;
    columns[n].group = row * (K / GROUP) + first / GROUP;
  }
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    find_row(x, min(b0 + r, B - 1), 0, rows[r]);
    move(rows[r], int(first));
  }
  for (uint k = 0; k < uint(K); k += 8 * COUNT) {
    Found<ROWS, OWN> found = {};
    if (k + first < uint(K)) multiply(rows, weights, columns, place, found);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      const float x_sum = sum_of_team<SHARE>(found.x_sums[r], 1);
#pragma clang loop unroll(full)
      for (int n = 0; n < OWN; ++n) {
        const float product = sum_of_team<SHARE>(found.products[n][r], 1);
        partial[n][r] += of_group<BITS>(product, x_sum, found.scales[n], found.biases[n], weights.biases);
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
    if (place == 0) sums[r * COLUMNS + team + 8 * n] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
