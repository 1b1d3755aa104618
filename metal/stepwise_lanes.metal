// The recurrent product of a step for few batch items. Each weight is then used for few multiplications, so reading the
// weights limits the speed. The result is a matrix `sums` in threadgroup memory, with a row per batch item and a column
// per unit and gate. A threadgroup computes the batch items from b0 on and the units j0 ... j0 + UNITS - 1 of the gates
// from FIRST on.
//
//   sums[r, n] = sum over k of x(b0 + r, k) weights[row(n), k]
//   row(n) = Gates::block(FIRST + n / UNITS) H + j0 + n % UNITS
//
//   x        the operand. The K numbers of a batch item are divided into SEGMENTS equal parts;
//            find_row(x, b, segment, row) lets `row` point to one part of batch item b
//   weights  [., K], H rows per gate
//   sums     [ROWS, COLUMNS], in threadgroup memory; a barrier at the end separates the writes of the simdgroups from
//            the reads of the cells
// Each of the 8 simdgroups computes every eighth column for all rows. Its 32 lanes divide the K terms of a sum: each
// multiplies four neighbouring terms at a time. At the end the lanes' sums are added up. Batch items and units past the
// end repeat the last ones; their results are not used.
//
// R: a row type of x, see find_row in stepwise.metal. W: a pointer to weights. OWN: how many columns a simdgroup
// computes. A lane is one of the 32 threads of a simdgroup.

// Multiply the next N numbers of each row of x with the next N numbers of each of this lane's columns (OWN rows of
// weights), and add the products to partial[column][row]. Then move the pointers of rows and columns by `step` numbers.
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

// Add this lane's share of dot products to partial[column][row]: of each of the ROWS rows of x with each of OWN columns
// of weights. The 32 lanes divide the numbers of a row among themselves. k: the index of the first number that this
// lane multiplies. length: how many numbers a row has.
template <int ROWS, int OWN, class R, class W>
void add_products(
    thread R (&rows)[ROWS], thread ItemsRow<W> (&columns)[OWN], int k, int length, thread float (&partial)[OWN][ROWS]) {
  // First the 32 lanes multiply whole vectors of 4, side by side. Then one lane multiplies the remaining numbers, which
  // do not fill a vector.
  for (; k + 3 < length; k += 128) accumulate<4>(rows, columns, 128, partial);
  for (; k < length; ++k) accumulate<1>(rows, columns, 1, partial);
}

// The product of ROWS batch items and COLUMNS columns by 256 threads, 8 simdgroups. k: the number of terms of a sum
// (K).
template <int HEIGHT, int WIDTH>
struct ByLanes {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 256 };

  template <class Gates, int FIRST, int UNITS, int SEGMENTS, class X, class W>
  static void product(thread const X& x, W weights, int B, int H, int K, thread const Block& block) {
    constexpr int OWN = COLUMNS / 8;
    const int b0 = block.b0, j0 = block.j0, simdgroup = block.simdgroup, lane = block.lane;
    float partial[OWN][ROWS];
    typename X::Row rows[ROWS];
    ItemsRow<W> columns[OWN];
#pragma clang loop unroll(full)
    for (int part = 0; part < OWN * ROWS; ++part) partial[part / ROWS][part % ROWS] = 0.0f;
    for (int segment = 0; segment < SEGMENTS; ++segment) {
      const int length = K / SEGMENTS;
#pragma clang loop unroll(full)
      for (int n = 0; n < OWN; ++n) {
        const int gate = Gates::block(FIRST + 8 * n / UNITS), unit = min(j0 + 8 * n % UNITS + simdgroup, H - 1);
        columns[n].values = weights + (Index(gate) * H + unit) * K + segment * length + 4 * lane;
      }
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) {
        find_row(x, min(b0 + r, B - 1), segment, rows[r]);
        move(rows[r], 4 * lane);
      }
      add_products(rows, columns, 4 * lane, length, partial);
    }
#pragma clang loop unroll(full)
    for (int part = 0; part < OWN * ROWS; ++part) {
      const int n = part / ROWS, r = part % ROWS;
      const float sum = simd_sum(partial[n][r]);
      if (lane == 0) block.sums[r * COLUMNS + simdgroup + 8 * n] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
};
