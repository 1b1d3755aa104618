// The second launch of a step of the GRU whose reset comes before the candidate's product: n and h. reset_row is that of
// stepwise_gru_reset.metal; `after` and the other arrays are those of stepwise_forward.metal.
template <int CELL, int ROWS, bool KEEPS, class S, class X, class Z, class W, class H0, class F, class L>
void stepwise_gru_candidate(
    int n, Z z, const device X* before, const device S* reset_row, W Wh, H0 h0, F keep, L lengths,
    const constant int* sizes, device X* after, threadgroup float* sums, threadgroup float* tiles, uint3 group,
    int simdgroup, int lane) {
  constexpr int COLUMNS = 32;
  const Step s = step_of(n, sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(B) * s.D * H;
  const Items<S> x = items_of(s, reset_row, H);
  device S* arrays = (device S*)after;
  product<CELL, GATE_N, ROWS, COLUMNS, COLUMNS, 1>(
      x, rows_from(Wh, Index(3) * s.d * H, H), B, H, H, b0, j0, sums, tiles, simdgroup, lane);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += THREADS<COLUMNS>) {
    const int b = b0 + cell / COLUMNS, j = j0 + cell % COLUMNS;
    if (b >= B || j >= H) continue;
    const int length = value_at(lengths, b, s.T);
    const bool live = s.t < length;
    const Index at = place(s, 0, b, H) + j;
    const float last = is_first(s, length) ? value_at(h0, at, 0.0f) : float(((const device S*)before)[at]);
    const float h = last * value_at(keep, place(s, s.t, b, 1), 1.0f);
    float y[3] = {float(reset_row[units + at]), float(reset_row[2 * units + at]), 0.0f};
    const float a = float(z[place(s, s.t, b, 3 * H) + place_of(CELL, GATE_N) * H + j]);
    y[GATE_N] = gru_candidate<CELL>(a, y[GATE_R], sums[cell]);
    arrays[at] = S(live ? gru_state<CELL>(y[GATE_Z], y[GATE_N], h) : 0.0f);
    for (int gate = 0; KEEPS && gate < 3; ++gate)
      arrays[units + place(s, 0, b, 3 * H) + place_of(CELL, gate) * H + j] = S(live ? y[gate] : 0.0f);
  }
  pad_row(after, units * (KEEPS ? 4 : 1), group, 32 * simdgroup + lane);
}
