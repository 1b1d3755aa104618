// dh_t [B, D P], the gradient of h_t, out of dz of the row before; stepwise_backward.metal has the arrays. With a
// projection it is a launch of every step, which writes it as a row of S, 0 past an item's end. At n = -1 it is dh0, of
// any cell, an array of S.
template <int CELL, int ROWS, int COLUMNS, class S, class X, class W, class G, class M, class L, class D, class DT,
    class R>
void stepwise_dh(
    int n, const device X* before, W weights, G gates, M mask, L lengths, D dh, DT dhT, const constant int* sizes,
    device R* row, threadgroup float* sums, threadgroup float* tiles, uint3 group, int simdgroup, int lane) {
  const Step s = step_of(n, sizes, group.z);
  const int P = s.H, H = s.K / PRODUCT_GATES, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index start = carried<S, CARRIES>(Index(s.B) * s.D * H);
  const Following<CELL, S, G, L> x = {(const device S*)before + start, gates, lengths, &s, H};
  if (n + 1 < s.T)
    product<0, 0, ROWS, COLUMNS, COLUMNS, SEGMENTS>(
        x, weights + Index(s.d) * P * s.K, s.B, P, s.K, b0, j0, sums, tiles, simdgroup, lane);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += THREADS<COLUMNS>) {
    const int b = b0 + cell / COLUMNS, j = j0 + cell % COLUMNS;
    if (b >= s.B || j >= P) continue;
    const int length = value_at(lengths, b, s.T);
    const Index at = place(s, 0, b, P) + j;
    float sum = 0.0f;
    if (n < 0 || s.t < length) sum = dh_sum(s, sums + cell, length, b, j, P, mask, dh, dhT);
    if constexpr (CARRIES_DH) sum += carry_at(before, at);
    ((device S*)row)[at] = S(sum);
  }
  pad_row(row, Index(s.B) * s.D * P, group, 32 * simdgroup + lane);
}
