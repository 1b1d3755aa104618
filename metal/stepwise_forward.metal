// One time step of a recurrence, forward, in one launch: the recurrent product and the cell.
//
//   gates, state, h = cell(z_t, (mask_t * h_before) Wh^T, keep_t * state_before), keep_t being in mask_t, too
//
//   z         [T, B, D G H]  input's part of the preactivations, blocks in the cell's gate order
//   before    the row of the step processed before; `after`, this step's, is written: c (where there is one), m [B, D H]
//             (h, where nothing is projected) and, where KEEPS, the gates [B, D G H]; 0 past an item's end
//   h_before  [B, D K]       a row with h of the step before, where it is projected and so in no row
//   Wh        [D, G H, K]    extra  peephole [D, 4H] or bhn [D H]
//   h0, c0    [B, D K], [B, D H]: what an item starts from, at t = 0 or, reversed, at its end
//   mask      [T or 1, B, D K]     keep     [T, B, D]      lengths  [B]      numbers  forget_bias, limit
// A threadgroup computes ROWS rows of UNITS units: the product, then every thread some cells. *_stepwise_cell.metal has
// GATES, UNITS, CARRIES and what a cell does with its sums.

template <class S, class X>
const device S* h_of(thread const Step& s, const device X* row, Absent) {
  return (const device S*)row + carried<S, CARRIES>(Index(s.B) * s.D * s.H);
}
template <class S, class X>
const device S* h_of(thread const Step&, const device X*, const device X* h) { return (const device S*)h; }

template <int CELL, int ROWS, bool KEEPS, class S, class X, class Z, class A, class W, class H0, class C0, class E,
    class M, class F, class L, class N>
void stepwise_forward(
    int n, Z z, const device X* before, A h_before, W Wh, H0 h0, C0 c0, E extra, M mask, F keep, L lengths,
    const constant int* sizes, N numbers, device X* after, threadgroup float* sums, threadgroup float* tiles,
    uint3 group, int simdgroup, int lane) {
  constexpr int COLUMNS = GATES * UNITS;
  const Step s = step_of(n, sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * UNITS;
  const Index units = Index(B) * s.D * H, start = carried<S, CARRIES>(units);
  const Previous<S, H0, M, L> x = {h_of<S>(s, before, h_before), h0, mask, lengths, &s};
  product<CELL, 0, ROWS, COLUMNS, UNITS, 1>(
      x, rows_from(Wh, Index(s.d) * GATES * H, s.K), B, H, s.K, b0, j0, sums, tiles, simdgroup, lane);
  device S* arrays = (device S*)after + start;
  for (int cell = 32 * simdgroup + lane; cell < ROWS * UNITS; cell += THREADS<COLUMNS>) {
    const int r = cell / UNITS, b = b0 + r, j = j0 + cell % UNITS;
    if (b >= B || j >= H) continue;
    const int length = value_at(lengths, b, s.T);
    const bool starts = is_first(s, length), live = s.t < length;
    const Index at = place(s, 0, b, H) + j, gates_at = place(s, 0, b, GATES * H) + j;
    float y[GATES], q[GATES], state;
    for (int gate = 0; gate < GATES; ++gate) {
      y[gate] = float(z[place(s, s.t, b, GATES * H) + place_of(CELL, gate) * H + j]);
      q[gate] = sums[r * COLUMNS + gate * UNITS + cell % UNITS];
    }
    if constexpr (CARRIES)
      state = starts ? value_at(c0, at, 0.0f) : carry_at(before, at);
    else
      state = starts ? value_at(h0, at, 0.0f) : float(x.h[at]);
    state *= value_at(keep, place(s, s.t, b, 1), 1.0f);
    const float output = cell_forward<CELL>(s, j, extra, numbers, q, y, state);
    if (CARRIES) set_carry(after, at, live ? state : 0.0f);
    arrays[at] = S(live ? output : 0.0f);
    for (int gate = 0; KEEPS && gate < GATES; ++gate)
      arrays[units + gates_at + place_of(CELL, gate) * H] = S(live ? y[gate] : 0.0f);
  }
  pad_row(after, start + units * (KEEPS ? 1 + GATES : 1), group, 32 * simdgroup + lane);
}
