// The products of stepwise_product_by_tiles.metal with packed weights, which become numbers in registers.

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
};

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
