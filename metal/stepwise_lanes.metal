// The recurrent product of one time step for few batch items. Each weight is used for only few multiplications, so
// reading the weights limits the speed.
//
//   sums[r, n] = sum over k of x(b0 + r, k) weights[row(n), k]
//   row(n) = Gates::block(FIRST + n / UNITS) H + j0 + n % UNITS
//
// Row r of `sums` is batch item b0 + r, column n one unit of one gate: a threadgroup computes the units j0 ... j0 +
// UNITS - 1 of each gate from number FIRST on. The 256 threads are 8 simdgroups of 32 lanes, which run together.
// Simdgroup s computes the columns s, s + 8, ... for all items. Its lanes divide the K terms of a sum: each multiplies
// four neighbouring terms at a time, lane l the terms 4 l, 128 + 4 l, ... At the end the lanes' sums are added up.
//
// stepwise.metal explains the operand x, its row type and the functions that read it. The K terms consist of SEGMENTS
// equal parts. There are several only in a GRU's backward step, whose x has a part that is multiplied by a gate.
// `weights` has H rows of K numbers per gate; Gates::block(gate) is the position of a gate's rows, in blocks of H.
//   OWN          how many columns a simdgroup computes, COLUMNS / 8
//   rows         this lane's pointers into x, one per item
//   columns      this lane's pointers into the weights, one for each column that its simdgroup computes
//   partial      [OWN][ROWS]: this lane's share of each sum
// Batch items and units past the end are computed from the numbers of the last ones (min), and their results are not
// used.

// Multiply the next N numbers of each of ROWS batch items by the next N weights of each of OWN columns, and add the
// products to `partial`. Then move all pointers forward by `step`, to the numbers that this lane multiplies next. All
// numbers are read before the first multiplication, so that the reads overlap. The last loop runs over number e, column
// n and batch item r; `part` counts their combinations.
template <int N, int ROWS, int OWN, class R, class C>
void accumulate(thread R (&rows)[ROWS], thread C (&columns)[OWN], int step, thread float (&partial)[OWN][ROWS]) {
  float operands[ROWS][N], w[OWN][N];
  UNROLL for (int n = 0; n < OWN; ++n) {
    operands_at<N>(columns[n], 0, w[n]);
    move(columns[n], step);
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    operands_at<N>(rows[r], 0, operands[r]);
    move(rows[r], step);
  }
  UNROLL for (int part = 0; part < OWN * ROWS * N; ++part) {
    const int e = part / (OWN * ROWS), n = part / ROWS % OWN, r = part % ROWS;
    partial[n][r] += operands[r][e] * w[n][e];
  }
}

// Add this lane's share of the products over one segment (an equal part of the K terms) to `partial`. rows: the lane's
// pointers into x, one per batch item. columns: its pointers into the weights. k: the index within the segment of the
// elements to which these pointers point, 4 * lane at first. length: how many elements the segment has.
template <int ROWS, int OWN, class R, class W>
void add_products(
    thread R (&rows)[ROWS], thread ItemsRow<W> (&columns)[OWN], int k, int length, thread float (&partial)[OWN][ROWS]) {
  // First the 32 lanes multiply vectors of 4 neighbouring numbers each: 128 numbers per pass. Fewer than 4 numbers may
  // be left at the end of the segment; then one lane multiplies them one by one.
  for (; k + 3 < length; k += 128) accumulate<4>(rows, columns, 128, partial);
  for (; k < length; ++k) accumulate<1>(rows, columns, 1, partial);
}

// The 256 threads of a threadgroup compute the recurrent products of HEIGHT batch items for WIDTH columns.
template <int HEIGHT, int WIDTH>
struct ByLanes {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 256 };

  // Compute the product into `block.sums`. Every lane adds up its share of OWN * ROWS sums, segment by segment. Then
  // simd_sum adds up the shares of the 32 lanes, and lane 0 writes the sum. The barrier at the end separates these
  // writes from the reads by the threads that compute the cells.
  template <class Gates, int FIRST, int UNITS, int SEGMENTS, class X, class W>
  static void product(thread const X& x, W weights, int B, int H, int K, thread const Block& block) {
    constexpr int OWN = COLUMNS / 8;
    const int b0 = block.b0, j0 = block.j0, simdgroup = block.simdgroup, lane = block.lane;
    float partial[OWN][ROWS];
    typename X::Row rows[ROWS];
    ItemsRow<W> columns[OWN];
    UNROLL for (int part = 0; part < OWN * ROWS; ++part) partial[part / ROWS][part % ROWS] = 0.0f;
    for (int segment = 0; segment < SEGMENTS; ++segment) {
      const int length = K / SEGMENTS;
      // Column 8 n + simdgroup; UNITS is a multiple of 8, so 8 n decides / and %.
      UNROLL for (int n = 0; n < OWN; ++n) {
        const int gate = Gates::block(FIRST + 8 * n / UNITS), unit = min(j0 + 8 * n % UNITS + simdgroup, H - 1);
        columns[n].values = weights + (Index(gate) * H + unit) * K + segment * length + 4 * lane;
      }
      UNROLL for (int r = 0; r < ROWS; ++r) {
        find_row(x, min(b0 + r, B - 1), segment, rows[r]);
        move(rows[r], 4 * lane);
      }
      add_products(rows, columns, 4 * lane, length, partial);
    }
    UNROLL for (int part = 0; part < OWN * ROWS; ++part) {
      const int n = part / ROWS, r = part % ROWS;
      const float sum = simd_sum(partial[n][r]);
      if (lane == 0) block.sums[r * COLUMNS + simdgroup + 8 * n] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
};
