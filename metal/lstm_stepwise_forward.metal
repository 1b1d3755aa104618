// One time step of the LSTM, forward, in one launch: the recurrent product and the cell.
//
//   a_t = z_t + (mask_t * h_prev) Wh^T;   gates, c, m = cell(a_t, c_prev)
//
//   z         [B, 4H]     input's part of the preactivations, blocks in the cell's gate order
//   h_prev    [B, K]      h of the step processed before (K: the width of h)
//   c_prev    [B, H]      float
//   Wh        [4H, K]     peephole  [4H]
//   h0, c0    [B, K], [B, H]  where `reverse` meets lengths: what an item starts from at its end
//   mask      [B, K]      of this step
//   lengths   [B]         past its end an item's outputs are 0
//   m, c      [B, H]      out: m is h where there is no projection; c is float
//   gates     [B, 4H]     out
//   sizes     T, B, H, K  numbers  forget_bias, limit
// A threadgroup computes ROWS rows of 8 units: the product, then every thread some cells.

// What the product multiplies: mask * h_prev, and h0 for an item that starts at this step, which has length `now`.
template <class A, class H0, class M, class L>
struct Previous {
  A h;
  H0 h0;
  M mask;
  L lengths;
  int now;
};

template <class X>
float operand(thread const X& x, int b, int K, int k) {
  const long at = long(b) * K + k;
  const float h = value_at(x.lengths, b, 0) == x.now ? value_at(x.h0, at, 0.0f) : float(x.h[at]);
  return h * value_at(x.mask, at, 1.0f);
}

template <int CELL, int ROWS, bool REVERSE, class S, class Z, class A, class C, class W, class H0,
    class C0, class P, class M, class L>
void lstm_stepwise_forward(
    int t, Z z, A h_prev, C c_prev, W Wh, H0 h0, C0 c0, P peephole, M mask, L lengths, const constant int* sizes,
    const constant float* numbers, device S* m, device float* c, device S* gates, threadgroup float* sums,
    threadgroup float* tiles, uint2 group, int simdgroup, int lane) {
  const int T = sizes[0], B = sizes[1], H = sizes[2], K = sizes[3];
  const int b0 = int(group.y) * ROWS, j0 = int(group.x) * 8;
  const int now = REVERSE ? t + 1 : -1;
  const Previous<A, H0, M, L> x = {h_prev, h0, mask, lengths, now};
  lstm_product<ROWS, 32, 8>(x, Wh, B, H, K, b0, j0, sums, tiles, simdgroup, lane);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * 8; cell += THREADS) {
    const int r = cell / 8, b = b0 + r, j = j0 + cell % 8;
    if (b >= B || j >= H) continue;
    const bool live = t < value_at(lengths, b, T);
    const long at = long(b) * H + j, gates_at = 4 * long(b) * H + j;
    float y[4], p[4];
    for (int gate = 0; gate < 4; ++gate) {
      const int block = place_of(CELL, gate);
      y[gate] = float(z[gates_at + block * H]) + sums[r * 32 + block * 8 + cell % 8];
      p[gate] = value_at(peephole, block * H + j, 0.0f);
    }
    float state = value_at(lengths, b, 0) == now ? value_at(c0, at, 0.0f) : c_prev[at];
    const float output = lstm_cell<CELL>(y, p, state, numbers[0], numbers[1]);
    m[at] = S(live ? output : 0.0f);
    c[at] = live ? state : 0.0f;
    for (int gate = 0; gate < 4; ++gate) gates[gates_at + place_of(CELL, gate) * H] = S(live ? y[gate] : 0.0f);
  }
}
