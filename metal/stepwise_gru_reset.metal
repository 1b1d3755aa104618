// The first launch of a step of the GRU whose reset comes before the candidate's product: r, z, and r * mask * h_before.
//
//   reset_row  out, [3, B, D H]: r * mask * h_before, r, z      the other arrays are those of stepwise_forward.metal
template <int CELL, int ROWS, class S, class X, class Z, class W, class H0, class M, class L>
void stepwise_gru_reset(
    int n, Z z, const device X* before, W Wh, H0 h0, M mask, L lengths, const constant int* sizes, device S* reset_row,
    threadgroup float* sums, threadgroup float* tiles, uint3 group, int simdgroup, int lane) {
  constexpr int SIZE = 16, COLUMNS = 2 * SIZE;
  const Step s = step_of(n, sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * SIZE;
  const Index units = Index(B) * s.D * H;
  const Previous<S, H0, M, L> x = {(const device S*)before, h0, mask, lengths, &s};
  product<CELL, 0, ROWS, COLUMNS, SIZE, 1>(
      x, rows_from(Wh, Index(3) * s.d * H, H), B, H, H, b0, j0, sums, tiles, simdgroup, lane);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * SIZE; cell += THREADS<COLUMNS>) {
    const int r = cell / SIZE, b = b0 + r, j = j0 + cell % SIZE;
    if (b >= B || j >= H) continue;
    const Index at = place(s, 0, b, H) + j;
    float y[2];
    for (int gate = GATE_R; gate < GATE_N; ++gate) {
      const float of_input = float(z[place(s, s.t, b, 3 * H) + place_of(CELL, gate) * H + j]);
      y[gate] = activate(activation_of(CELL, gate), of_input + sums[r * COLUMNS + gate * SIZE + cell % SIZE]);
      reset_row[(1 + gate) * units + at] = S(y[gate]);
    }
    float h[1];
    PreviousRow<S, H0, M> row;
    find_row(x, b, 0, row);
    operands_at<1>(row, j, h);
    reset_row[at] = S(y[GATE_R] * h[0]);
  }
  pad_row(reset_row, 3 * units, group, 32 * simdgroup + lane);
}
