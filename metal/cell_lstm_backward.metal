// The LSTM cell backward on scalars; cell_lstm_forward.metal has the equations. The clip passes gradients through.

// The gradient of c. dc: that from later steps and from outside, dm: that of m, s: s_output(c).
template <int CELL>
float lstm_state_backward(float dc, float dm, float o, float s) {
  return dc + dm * o * slope(activation_of(CELL, OUTPUT), s);
}

// The gradient of a gate's preactivation. dy: that of the gate from outside; d: that of what the gate is a factor of,
// of m for o, else of c; other: the other factor; slope: of its activation.
inline float lstm_gate_backward(float dy, float d, float other, float slope) { return (dy + d * other) * slope; }

// y: the gates i, f, g, o. dm: the gradient of m. dc: in the gradient of c, out that of c_prev.
// dz: in the gradients the gates have from outside, out those of the preactivations.
template <int CELL>
void lstm_cell_backward(
    thread const float (&y)[4], thread const float (&p)[4], float c_prev, float c, float dm, thread float& dc,
    thread float (&dz)[4]) {
  const float s = activate(activation_of(CELL, OUTPUT), c);
  dz[GATE_O] = lstm_gate_backward(dz[GATE_O], dm, s, slope(activation_of(CELL, GATE_O), y[GATE_O]));
  dc = lstm_state_backward<CELL>(dc, dm, y[GATE_O], s);
  if (PEEPHOLE<CELL> == O_SEES_CURRENT) dc += dz[GATE_O] * p[GATE_O];
  dz[GATE_I] = lstm_gate_backward(dz[GATE_I], dc, y[GATE_G], slope(activation_of(CELL, GATE_I), y[GATE_I]));
  dz[GATE_F] = lstm_gate_backward(dz[GATE_F], dc, c_prev, slope(activation_of(CELL, GATE_F), y[GATE_F]));
  dz[GATE_G] = lstm_gate_backward(dz[GATE_G], dc, y[GATE_I], slope(activation_of(CELL, GATE_G), y[GATE_G]));
  dc *= y[GATE_F];
  if (PEEPHOLE<CELL> != NO_PEEPHOLE) dc += dz[GATE_I] * p[GATE_I] + dz[GATE_F] * p[GATE_F] + dz[GATE_G] * p[GATE_G];
  if (PEEPHOLE<CELL> == O_SEES_PREVIOUS) dc += dz[GATE_O] * p[GATE_O];
}
