// A step's h = m Wp^T, with m in the row of its launch before. Wp [D, P, H], h [B, D P], a row of S.
template <int ROWS, int COLUMNS, class S, class X, class W>
void stepwise_project(
    int n, const device X* row, W Wp, const constant int* sizes, device X* h, threadgroup float* sums,
    threadgroup float* tiles, uint3 group, int simdgroup, int lane) {
  const Step s = step_of(n, sizes, group.z);
  const int P = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Items<S> x = items_of(s, (const device S*)row + carried<S, true>(Index(s.B) * s.D * s.K), s.K);
  product<0, 0, ROWS, COLUMNS, COLUMNS, 1>(
      x, rows_from(Wp, Index(s.d) * P, s.K), s.B, P, s.K, b0, j0, sums, tiles, simdgroup, lane);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += THREADS<COLUMNS>) {
    const int b = b0 + cell / COLUMNS, j = j0 + cell % COLUMNS;
    if (b < s.B && j < P) ((device S*)h)[place(s, 0, b, P) + j] = S(sums[cell]);
  }
  pad_row(h, Index(s.B) * s.D * P, group, 32 * simdgroup + lane);
}
