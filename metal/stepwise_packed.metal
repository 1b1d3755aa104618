// The products of stepwise_product_*.metal with packed weights, which become numbers in registers.

// A row of it, from number k on; `lane`: which of a simdgroup's reads it; scale and bias of the group it is in.
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
  enum { AT_ONCE = TAKEN<BITS> };
};

template <int BITS, int GROUP, class A, class B>
Packed<BITS, GROUP, A, B> rows_from(Packed<BITS, GROUP, A, B> weights, Index row, int K) {
  const Index groups = row * (K / GROUP);
  return {weights.words + row * (K * BITS / 32), weights.scales + groups, from(weights.biases, groups)};
}

template <int BITS, int GROUP, class A, class B>
void find_column(
    Packed<BITS, GROUP, A, B> weights, Index row, int K, int first, int, int lane,
    thread PackedRow<BITS, GROUP, A, B>& column) {
  const Packed<BITS, GROUP, A, B> found = rows_from(weights, row, K);
  column.words = found.words;
  column.scales = found.scales;
  column.biases = found.biases;
  column.k = first;
  column.lane = lane;
}

// A weight of its q; the bias is 0 where there is none.
inline float weight_of(float q, float2 factors, Absent) { return factors.x * q; }
template <class B> float weight_of(float q, float2 factors, B) { return factors.x * q + factors.y; }

// The bias that lane `leader` has.
inline float of_leader(float, int, Absent) { return 0.0f; }
template <class B> float of_leader(float bias, int leader, B) { return simd_shuffle(bias, ushort(leader)); }

// Scale and bias of the group that begins with lane `leader`, which alone reads them, where it is `inside` the row.
template <int BITS, int GROUP, class A, class B>
float2 factors_of(thread const PackedRow<BITS, GROUP, A, B>& row, int k, bool inside, int leader) {
  float scale = 0.0f, bias = 0.0f;
  if (inside && row.lane == leader) {
    scale = scale_of<GROUP>(row.scales[k / GROUP]);
    bias = value_at(row.biases, k / GROUP, 0.0f);
  }
  return float2(simd_shuffle(scale, ushort(leader)), of_leader(bias, leader, row.biases));
}

// The words of a lane's TAKEN weights from k on, zeros where it is not `inside` the row.
template <int WORDS>
void take_words(const device uint* words, bool inside, thread uint (&taken)[WORDS]) {
#pragma clang loop unroll(full)
  for (int n = 0; n < WORDS; ++n) taken[n] = 0;
  if (!inside) return;
  if constexpr (WORDS == 2) {
    const uint2 both = *(const device uint2*)words;
    taken[0] = both.x;
    taken[1] = both.y;
  } else {
#pragma clang loop unroll(full)
    for (int n = 0; n < WORDS; ++n) taken[n] = words[n];
  }
}

// The products of every row with every column, of whole groups up to `length`. Each lane takes AT_ONCE neighbours at a
// time, where there are any.
template <int ROWS, int OWN, int BITS, int GROUP, class A, class B, class R>
void add_products(
    thread R (&rows)[ROWS], thread PackedRow<BITS, GROUP, A, B> (&columns)[OWN], int k, int length,
    thread float (&partial)[OWN][ROWS]) {
  constexpr int COUNT = TAKEN<BITS>, WORDS = COUNT * BITS / 32, SHARE = GROUP / COUNT;
  const int lane = columns[0].lane;
  for (; k - COUNT * lane < length; k += 32 * COUNT) {  // as often in every lane
    const bool inside = k < length;
    uint words[OWN][WORDS];
    float2 factors[OWN];
#pragma clang loop unroll(full)
    for (int n = 0; n < OWN; ++n) {
      take_words(columns[n].words + k * BITS / 32, inside, words[n]);
      factors[n] = factors_of(columns[n], k, inside, lane / SHARE * SHARE);
    }
#pragma clang loop unroll(full)
    for (int first = 0; first < COUNT; first += 8) {
      float operands[ROWS][8] = {};
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r)
        if (inside) operands_at<8>(rows[r], first, operands[r]);
#pragma clang loop unroll(full)
      for (int part = 0; part < OWN * 8; ++part) {
        const int n = part / 8, e = part % 8;
        const float q = number_of<BITS>(bits_at<BITS>(words[n], BITS * (first + e)), columns[n].biases);
        const float weight = weight_of(q, factors[n], columns[n].biases);
#pragma clang loop unroll(full)
        for (int r = 0; r < ROWS; ++r) partial[n][r] += operands[r][e] * weight;
      }
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) move(rows[r], 32 * COUNT);
  }
}

// Four numbers of the 32 that eight lanes have from row.k on, each lane those of its own place; zeros where there are
// not so many. Each of the lanes reads a word of these, if there are that many, and a group's first one its scale, where
// the group begins.
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
