// One time step of a recurrence, backward, in one launch: the product and the cell's backward.
//
//   dh_t = mask_next * (dz_next Wh) + the gradient h[t] has from outside;   dz_t, carry = cell_backward(dh_t, carry_next)
//
// "next" is an item's step processed after t; after its last one dhT takes the place of the product. With a projection
// stepwise_dh computes dh_t [B, D P], and the product here is dm = dh_t Wp.
//
//   before    the row of the step processed after; `after`, this step's, is written: carry (the gradient of c[t-1], or
//             of h[t-1] past the products) and dz [B, D G H]. Past an item's end both are passed on. With `keep` there is
//             then the carry before it was multiplied by keep [B, D H], of S; 0 past an item's end
//   dh_now    [B, D P]      a row with dh_t, with a projection only
//   weights   [D, H, K]     the transposed Wh, K = G H, or the transposed Wp, K = P
//   gates     [T, B, D G H]     states  [T, B, D H]  c, or h where there is none     states0  [B, D H]  what starts it
//   q         [D, T, B, H]  the candidate's recurrent products of a GRU        extra  peephole [D, 4H]
//   mask      [T or 1, B, D P], times keep       keep  [T, B, D]  lengths [B]
//   dh, dc, dgates, dhT, dcT    the gradients from outside, in the shapes of what they belong to
// A threadgroup computes ROWS rows of UNITS units: the product, then every thread some cells.

template <int CELL, int ROWS, int COLUMNS, class S, class X, class A, class W, class G, class C, class C0, class Q,
    class E, class M, class F, class L, class D, class DC, class DG, class DT, class DCT>
void stepwise_backward(
    int n, const device X* before, A dh_now, W weights, G gates, C states, C0 states0, Q q, E extra, M mask, F keep, L lengths,
    D dh, DC dc, DG dgates, DT dhT, DCT dcT, const constant int* sizes, device X* after, threadgroup float* sums,
    threadgroup float* tiles, uint3 group, int simdgroup, int lane) {
  const Step s = step_of(n, sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(B) * s.D * H, start = carried<S, CARRIES>(units);
  const device S* dz_before = (const device S*)before + start;
  const Following<CELL, S, G, L> x = {either(dh_now, dz_before), gates, lengths, &s, H};
  const bool begins = n + 1 == s.T;
  if (!begins || is_present(dh_now))
    product<0, 0, ROWS, COLUMNS, COLUMNS, SEGMENTS>(
        x, weights + Index(s.d) * H * s.K, B, H, s.K, b0, j0, sums, tiles, simdgroup, lane);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += THREADS<COLUMNS>) {
    const int b = b0 + cell / COLUMNS, j = j0 + cell % COLUMNS;
    if (b >= B || j >= H) continue;
    const int length = value_at(lengths, b, s.T);
    const Index at = place(s, 0, b, H) + j, now = place(s, s.t, b, H) + j;
    const bool live = s.t < length;
    float y[GATES], dz[GATES], carry = 0.0f, kept = 0.0f;
    if (CARRIES) carry = begins ? value_at(dcT, at, 0.0f) : carry_at(before, at);
    for (int gate = 0; gate < GATES; ++gate) {
      const Index block = j + place_of(CELL, gate) * H, gate_now = place(s, s.t, b, GATES * H) + block;
      y[gate] = live ? value_at(gates, gate_now, 0.0f) : 0.0f;
      dz[gate] = live ? value_at(dgates, gate_now, 0.0f)
          : begins    ? 0.0f
                      : float(dz_before[place(s, 0, b, GATES * H) + block]);
    }
    if (live) {
      const Index previous = place(s, s.reverse ? s.t + 1 : s.t - 1, b, H) + j;
      float from = is_first(s, length) ? value_at(states0, at, 0.0f) : float(states[previous]);
      const float dh_t = is_present(dh_now) ? sums[cell] : dh_sum(s, sums + cell, length, b, j, H, mask, dh, dhT);
      const float factor = value_at(keep, place(s, s.t, b, 1), 1.0f);
      carry += value_at(dc, now, 0.0f);
      if (is_present(keep)) from *= factor;
      cell_backward<CELL>(s, j, extra, y, float(states[now]), from,
          value_at(q, ((Index(s.d) * s.T + s.t) * B + b) * H + j, 0.0f), dh_t, carry, dz);
      if (is_present(keep)) kept = carry, carry *= factor;
    }
    if (CARRIES) set_carry(after, at, carry);
    for (int gate = 0; gate < GATES; ++gate)
      ((device S*)after)[start + place(s, 0, b, GATES * H) + j + place_of(CELL, gate) * H] = S(dz[gate]);
    if (is_present(keep)) ((device S*)after)[start + units * GATES + at] = S(kept);
  }
  pad_row(after, start + units * (is_present(keep) ? GATES + 1 : GATES), group, 32 * simdgroup + lane);
}
