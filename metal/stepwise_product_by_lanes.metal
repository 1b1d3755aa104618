// The recurrent product of a step for few batch rows: a matrix-vector product per row, bound by the stream of weights.
//
//   sums[r, n] = sum over k of operand(x, b0 + r, k) weights[row(n), k]
//   row(n) = place_of(CELL, FIRST + n / UNITS) H + j0 + n % UNITS
//
//   x        what the step's operand(x, b, k) reads the K numbers of batch row b from
//   weights  [., K], H rows per gate
//   sums     [ROWS, COLUMNS]
// A simdgroup computes every eighth column for all rows; its lanes split K and are summed at the end.

template <int COLUMNS> constant constexpr int THREADS = 256;

template <int CELL, int FIRST, int ROWS, int COLUMNS, int UNITS, class X, class W>
void product(
    thread const X& x, W weights, int B, int H, int K, int b0, int j0, threadgroup float* sums,
    threadgroup float*, int simdgroup, int lane) {
  float partial[COLUMNS / 8][ROWS];
  for (int n = 0; n < COLUMNS / 8; ++n)
    for (int r = 0; r < ROWS; ++r) partial[n][r] = 0.0f;
  for (int k = lane; k < K; k += 32) {
    float operands[ROWS];
    for (int r = 0; r < ROWS; ++r) operands[r] = operand(x, min(b0 + r, B - 1), k);
    for (int n = 0; n < COLUMNS / 8; ++n) {
      const int column = simdgroup + 8 * n;
      const int unit = min(j0 + column % UNITS, H - 1);
      const float w = float(weights[(long(place_of(CELL, FIRST + column / UNITS)) * H + unit) * K + k]);
      for (int r = 0; r < ROWS; ++r) partial[n][r] += operands[r] * w;
    }
  }
  for (int n = 0; n < COLUMNS / 8; ++n)
    for (int r = 0; r < ROWS; ++r) {
      const float sum = simd_sum(partial[n][r]);
      if (lane == 0) sums[r * COLUMNS + simdgroup + 8 * n] = sum;
    }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
