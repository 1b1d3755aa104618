// The recurrent product of a step for few batch rows: a matrix-vector product per row, bound by the stream of weights.
//
//   sums[r, n] = sum over k of operand(b0 + r, k) weights[row(n), k]
//   row(n) = place_of(CELL, FIRST + n / UNITS) H + j0 + n % UNITS
//
//   x        what find_row(x, b, segment, row) finds a row of operands in: the numbers of batch row b in one of SEGMENTS
//            equal parts of K
//   weights  [., K], H rows per gate; packed ones as stepwise_packed.metal has them
//   sums     [ROWS, COLUMNS]
// A simdgroup computes every eighth column for all rows; its lanes split K, four numbers at a time, of packed
// weights more, and are summed at the end. Rows and units past the end are those before it again, which nobody reads.

template <int COLUMNS> constant constexpr int THREADS = 256;

// N numbers of every row times as many of every column; both move on by `step`.
template <int N, int ROWS, int OWN, class R, class C>
void accumulate(thread R (&rows)[ROWS], thread C (&columns)[OWN], int step, thread float (&partial)[OWN][ROWS]) {
  float operands[ROWS][N], w[OWN][N];
#pragma clang loop unroll(full)
  for (int n = 0; n < OWN; ++n) {
    operands_at<N>(columns[n], 0, w[n]);
    move(columns[n], step);
  }
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    operands_at<N>(rows[r], 0, operands[r]);
    move(rows[r], step);
  }
#pragma clang loop unroll(full)
  for (int part = 0; part < OWN * ROWS * N; ++part) {
    const int e = part / (OWN * ROWS), n = part / ROWS % OWN, r = part % ROWS;
    partial[n][r] += operands[r][e] * w[n][e];
  }
}

// The products of every row with every column, from number k on to `length`.
template <int ROWS, int OWN, class R, class W>
void add_products(
    thread R (&rows)[ROWS], thread ItemsRow<W> (&columns)[OWN], int k, int length, thread float (&partial)[OWN][ROWS]) {
  for (; k + 3 < length; k += 128) accumulate<4>(rows, columns, 128, partial);
  for (; k < length; ++k) accumulate<1>(rows, columns, 1, partial);
}

template <int CELL, int FIRST, int ROWS, int COLUMNS, int UNITS, int SEGMENTS, class X, class W>
void product(
    thread const X& x, W weights, int B, int H, int K, int b0, int j0, threadgroup float* sums,
    threadgroup float*, int simdgroup, int lane) {
  constexpr int OWN = COLUMNS / 8, AT_ONCE = Columns<W>::AT_ONCE;
  float partial[OWN][ROWS];
  typename X::Row rows[ROWS];
  typename Columns<W>::Row columns[OWN];
#pragma clang loop unroll(full)
  for (int part = 0; part < OWN * ROWS; ++part) partial[part / ROWS][part % ROWS] = 0.0f;
  for (int segment = 0; segment < SEGMENTS; ++segment) {
    const int length = K / SEGMENTS;
#pragma clang loop unroll(full)
    for (int n = 0; n < OWN; ++n) {
      const int gate = place_of(CELL, FIRST + 8 * n / UNITS), unit = min(j0 + 8 * n % UNITS + simdgroup, H - 1);
      find_column(weights, Index(gate) * H + unit, K, segment * length, AT_ONCE * lane, lane, columns[n]);
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      find_row(x, min(b0 + r, B - 1), segment, rows[r]);
      move(rows[r], AT_ONCE * lane);
    }
    add_products(rows, columns, AT_ONCE * lane, length, partial);
  }
#pragma clang loop unroll(full)
  for (int part = 0; part < OWN * ROWS; ++part) {
    const int n = part / ROWS, r = part % ROWS;
    const float sum = simd_sum(partial[n][r]);
    if (lane == 0) sums[r * COLUMNS + simdgroup + 8 * n] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
