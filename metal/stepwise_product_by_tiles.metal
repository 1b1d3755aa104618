// The recurrent product of a step for many batch rows: the equation of stepwise_product_by_lanes.metal in 8 x 8
// matrices.
//
// The threads copy 32 columns of K at a time, as float and padded with zeros, into `tiles`: ROWS rows of the operand,
// then COLUMNS rows of weights. Simdgroup s of COLUMNS / 8 computes columns 8 s ... 8 s + 7 for all rows.

template <int COLUMNS> constant constexpr int THREADS = 4 * COLUMNS;
constant constexpr int PITCH = 36;

template <int CELL, int FIRST, int ROWS, int COLUMNS, int UNITS, class X, class W>
void product(
    thread const X& x, W weights, int B, int H, int K, int b0, int j0, threadgroup float* sums,
    threadgroup float* tiles, int simdgroup, int lane) {
  simdgroup_float8x8 total[ROWS / 8], left, right;
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS / 8; ++r) total[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  threadgroup float* weight_tile = tiles + ROWS * PITCH;
  for (int start = 0; start < K; start += 32) {
    const int k = start + lane;
    for (int r = simdgroup; r < ROWS; r += COLUMNS / 8)
      tiles[r * PITCH + lane] = b0 + r < B && k < K ? operand(x, b0 + r, k) : 0.0f;
    for (int n = simdgroup; n < COLUMNS; n += COLUMNS / 8) {
      const int unit = j0 + n % UNITS;
      const long row = long(place_of(CELL, FIRST + n / UNITS)) * H + unit;
      weight_tile[n * PITCH + lane] = unit < H && k < K ? float(weights[row * K + k]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int part = 0; part < 32; part += 8) {
      simdgroup_load(right, weight_tile + 8 * simdgroup * PITCH + part, PITCH, ulong2(0), true);
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS / 8; ++r) {
        simdgroup_load(left, tiles + 8 * r * PITCH + part, PITCH);
        simdgroup_multiply_accumulate(total[r], left, right, total[r]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS / 8; ++r)
    simdgroup_store(total[r], sums + 8 * r * COLUMNS + 8 * simdgroup, COLUMNS);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
