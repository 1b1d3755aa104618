// The LSTM cell backward on scalars; cell_lstm_forward.metal has the equations. The clip passes gradients through.

// The gradient of c. dc: that from later steps and from outside, dm: that of m, s: s_output(c).
template <int CELL>
float lstm_state_backward(float dc, float dm, float o, float s) {
  return dc + dm * o * slope(activation_of(CELL, OUTPUT), s);
}

// The gradient of a gate's preactivation. dy: that of the gate from outside; dm, s, dc: as above; other: what the gate
// multiplies in c; y: the gate.
template <int CELL>
float lstm_gate_backward(int gate, float dy, float dm, float s, float dc, float other, float y) {
  return (dy + (gate == GATE_O ? dm * s : dc * other)) * slope_own<CELL, 4>(gate, y);
}

// y: the gates i, f, g, o. dm: the gradient of m. dc: in the gradient of c, out that of c_prev.
// dz: in the gradients the gates have from outside, out those of the preactivations.
template <int CELL>
void lstm_cell_backward(
    thread const float (&y)[4], thread const float (&p)[4], float c_prev, float c, float dm, thread float& dc,
    thread float (&dz)[4]) {
  const float s = activate(activation_of(CELL, OUTPUT), c);
  dz[GATE_O] = lstm_gate_backward<CELL>(GATE_O, dz[GATE_O], dm, s, 0.0f, 0.0f, y[GATE_O]);
  dc = lstm_state_backward<CELL>(dc, dm, y[GATE_O], s);
  if (PEEPHOLE<CELL> == O_SEES_CURRENT) dc += dz[GATE_O] * p[GATE_O];
  dz[GATE_I] = lstm_gate_backward<CELL>(GATE_I, dz[GATE_I], dm, s, dc, y[GATE_G], y[GATE_I]);
  dz[GATE_F] = lstm_gate_backward<CELL>(GATE_F, dz[GATE_F], dm, s, dc, c_prev, y[GATE_F]);
  dz[GATE_G] = lstm_gate_backward<CELL>(GATE_G, dz[GATE_G], dm, s, dc, y[GATE_I], y[GATE_G]);
  dc *= y[GATE_F];
  if (PEEPHOLE<CELL> != NO_PEEPHOLE) dc += dz[GATE_I] * p[GATE_I] + dz[GATE_F] * p[GATE_F] + dz[GATE_G] * p[GATE_G];
  if (PEEPHOLE<CELL> == O_SEES_PREVIOUS) dc += dz[GATE_O] * p[GATE_O];
}
