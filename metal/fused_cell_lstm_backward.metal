// A step of the LSTM back. c: of this step; dh: in the gradient of h, out what of it reaches h_prev past the product:
// nothing; dc: in the gradient of c, out that of c_prev; seen: c_prev, then dc from outside.

// By the lanes of a unit, of which each has its own gate y and p. d: in the gradient the gate has from outside, out
// that of the preactivation.
template <int CELL>
void step_back_of_lanes(
    int gate, float y, float p, thread const float (&seen)[4], float c, thread float& dh, thread float& dc,
    thread float& d) {
  const float s = activate(activation_of(CELL, OUTPUT), c), own_slope = slope_own<CELL, 4>(gate, y);
  dc = lstm_state_backward<CELL>(dc + seen[2], dh, of_lane<LANES>(y, GATE_O), s);
  if constexpr (PEEPHOLE<CELL> == O_SEES_CURRENT)
    dc += of_lane<LANES>(p * lstm_gate_backward(d, dh, s, own_slope), GATE_O);
  const float beside = simd_shuffle_xor(y, GATE_I ^ GATE_G);
  const float factor = gate == GATE_F ? seen[0] : beside;
  d = lstm_gate_backward(d, gate == GATE_O ? dh : dc, gate == GATE_O ? s : factor, own_slope);
  dc *= of_lane<LANES>(y, GATE_F);
  if constexpr (PEEPHOLE<CELL> != NO_PEEPHOLE)
    dc += sum_over_lanes<LANES>(PEEPHOLE<CELL> == O_SEES_CURRENT && gate == GATE_O ? 0.0f : d * p);
  dh = 0.0f;
}

// In one lane. y, p, d: of all gates.
template <int CELL>
void step_back_of_unit(
    thread const float (&y)[4], thread const float (&p)[4], thread const float (&seen)[4], float c, thread float& dh,
    thread float& dc, thread float (&d)[4]) {
  dc += seen[2];
  lstm_cell_backward<CELL>(y, p, seen[0], c, dh, dc, d);
  dh = 0.0f;
}
