// The second launch of a step back of the GRU whose reset comes before the candidate's product: the gradient of r, and of
// h_before through that product. now_row is the row that stepwise_backward wrote for this step, `after` the same with
// these two in it; what stands behind dz where there is `keep` is copied. weights [D, H, H] is the transposed Wh of the candidate; the other arrays are those of
// stepwise_backward.metal.
template <int CELL, int ROWS, int COLUMNS, class S, class X, class W, class G, class A, class H0, class M, class F, class L>
void stepwise_gru_reset_backward(
    int n, const device X* now_row, W weights, G gates, A states, H0 states0, M mask, F keep, L lengths,
    const constant int* sizes, device X* after, threadgroup float* sums, threadgroup float* tiles, uint3 group,
    int simdgroup, int lane) {
  const Step s = step_of(n, sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(B) * s.D * H, start = carried<S, true>(units);
  const device S* dz = (const device S*)now_row + start;
  const Items<S> x = items_of(s, dz + place_of(CELL, GATE_N) * H, 3 * H);
  product<0, 0, ROWS, COLUMNS, COLUMNS, 1>(
      x, weights + Index(s.d) * H * H, B, H, H, b0, j0, sums, tiles, simdgroup, lane);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += THREADS<COLUMNS>) {
    const int b = b0 + cell / COLUMNS, j = j0 + cell % COLUMNS;
    if (b >= B || j >= H) continue;
    const int length = value_at(lengths, b, s.T), block = place_of(CELL, GATE_R) * H + j;
    const Index at = place(s, 0, b, H) + j, gates_at = place(s, 0, b, 3 * H);
    float carry = carry_at(now_row, at), dr = float(dz[gates_at + block]);
    if (s.t < length) {
      const Index previous = place(s, s.reverse ? s.t + 1 : s.t - 1, b, H) + j;
      const float h = is_first(s, length) ? value_at(states0, at, 0.0f) : float(states[previous]);
      const float r = float(gates[place(s, s.t, b, 3 * H) + block]), m = mask_at(s, mask, s.t, b, j, H);
      dr = gru_reset_backward<CELL>(r, dr + sums[cell] * h * m);
      carry += sums[cell] * r * m;
    }
    set_carry(after, at, carry);
    if (is_present(keep)) ((device S*)after)[start + 3 * units + at] = dz[3 * units + at];
    for (int gate = 0; gate < 3; ++gate) {
      const Index gate_at = gates_at + place_of(CELL, gate) * H + j;
      ((device S*)after)[start + gate_at] = gate == GATE_R ? S(dr) : dz[gate_at];
    }
  }
  pad_row(after, start + (is_present(keep) ? 4 : 3) * units, group, 32 * simdgroup + lane);
}
