// One time step of the LSTM, backward, in one launch: the product and the cell's backward.
//
//   dh_t = mask_next * (dz_next Wh) + the gradient h[t] has from outside;   dz_t, dc_prev = cell_backward(dh_t, dc_t)
//
// "next" is the step processed after t; after an item's last step dhT takes the place of the product. With a projection
// lstm_stepwise_dh computes dh_t [B, P], and lstm_stepwise_backward takes dm = dh_t Wp as its product.
//
//   a         [B, K]      dz_next, K = 4H; with a projection dh_t, K = P
//   weights   [H, K]      Wh^T, or Wp^T with a projection; in lstm_stepwise_dh Wh^T [P, 4H]
//   gates     [B, 4H]     c, c_prev  [B, H] float    peephole  [4H]    lengths  [B]
//   c0        [B, H]      where `reverse` meets lengths: what an item starts from at its end
//   mask      [B, H]      of the step processed after t
//   dh, dc, dgates        the gradients of h_t [B, H], c_t [B, H], gates_t [B, 4H] from outside;    dhT  [B, H]
//   dc_next   [B, H]      float, the gradient of c_t from the step processed after t
//   dz        [B, 4H]     out, 0 past an item's end      dc_prev  [B, H]  out, float
//   sizes     T, B, H (in lstm_stepwise_dh: P), K
// A threadgroup computes ROWS rows of UNITS units: the product, then every thread some cells.

template <int CELL, int ROWS, int UNITS, bool REVERSE, bool PROJECTED, class S, class A, class W, class G,
    class C, class C0, class P, class M, class L, class D, class DC, class DG, class DT,
    class DN>
void lstm_stepwise_backward(
    int t, A a, W weights, G gates, C c, C c_prev, C0 c0, P peephole, M mask, L lengths, D dh, DC dc, DG dgates,
    DT dhT, DN dc_next, const constant int* sizes, device S* dz, device float* dc_prev, threadgroup float* sums,
    threadgroup float* tiles, uint2 group, int simdgroup, int lane) {
  const int T = sizes[0], B = sizes[1], H = sizes[2];
  const int b0 = int(group.y) * ROWS, j0 = int(group.x) * UNITS;
  lstm_product<ROWS, UNITS, UNITS>(a, weights, B, H, sizes[3], b0, j0, sums, tiles, simdgroup, lane);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * UNITS; cell += THREADS) {
    const int b = b0 + cell / UNITS, j = j0 + cell % UNITS;
    if (b >= B || j >= H) continue;
    const int length = value_at(lengths, b, T);
    const long at = long(b) * H + j, gates_at = 4 * long(b) * H + j;
    float y[4], p[4], dy[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float dc_now = dc_next[at];
    if (t < length) {
      for (int gate = 0; gate < 4; ++gate) {
        const long block = place_of(CELL, gate) * long(H);
        y[gate] = float(gates[gates_at + block]);
        dy[gate] = value_at(dgates, gates_at + block, 0.0f);
        p[gate] = value_at(peephole, block + j, 0.0f);
      }
      const float dm = PROJECTED ? sums[cell] : lstm_dh<REVERSE>(sums[cell], t, length, at, mask, dh, dhT);
      const bool starts = REVERSE && value_at(lengths, b, 0) == t + 1;
      const float before = starts ? value_at(c0, at, 0.0f) : c_prev[at];
      dc_now += value_at(dc, at, 0.0f);
      lstm_cell_backward<CELL>(y, p, before, c[at], dm, dc_now, dy);
    }
    for (int gate = 0; gate < 4; ++gate) dz[gates_at + place_of(CELL, gate) * H] = S(dy[gate]);
    dc_prev[at] = dc_now;
  }
}
