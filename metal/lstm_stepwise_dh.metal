// dh_t, the gradient of h_t, out of dz of the step processed after t; lstm_stepwise_backward.metal has the arrays.

// With a projection: dh_t [B, P] from dz_next, 0 past an item's end.
template <int ROWS, int UNITS, bool REVERSE, class S, class A, class W, class M, class L, class D,
    class DT>
void lstm_stepwise_dh(
    int t, A dz_next, W weights, M mask, L lengths, D dh, DT dhT, const constant int* sizes, device S* dh_t,
    threadgroup float* sums, threadgroup float* tiles, uint2 group, int simdgroup, int lane) {
  const int B = sizes[1], P = sizes[2];
  const int b0 = int(group.y) * ROWS, j0 = int(group.x) * UNITS;
  lstm_product<ROWS, UNITS, UNITS>(dz_next, weights, B, P, sizes[3], b0, j0, sums, tiles, simdgroup, lane);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * UNITS; cell += THREADS) {
    const int b = b0 + cell / UNITS, j = j0 + cell % UNITS;
    if (b >= B || j >= P) continue;
    const int length = value_at(lengths, b, sizes[0]);
    const long at = long(b) * P + j;
    dh_t[at] = S(t < length ? lstm_dh<REVERSE>(sums[cell], t, length, at, mask, dh, dhT) : 0.0f);
  }
}
