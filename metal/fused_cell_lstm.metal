// The LSTM in the fused kernels: four lanes to a unit, of which lane n computes gate n.

constant constexpr int GATES = 4, LANES = 4;
constant constexpr bool APART = false;
template <int CELL> constant constexpr bool TWO_PRODUCTS = false;
template <int CELL> constant constexpr int FIRST_PRODUCT = 15;

// The H-block of z, gates, dz that a lane has, and that of the rows of Wh whose product it sums.
constexpr int gate_block(int cell, int gate) { return place_of(cell, gate); }
constexpr int weight_block(int cell, int gate) { return place_of(cell, gate); }

// A lane's own number out of the peephole [D, 4H].
template <int CELL, class E>
float lane_constant(E peephole, int direction, int gate, int H, int unit) {
  return value_at(peephole, (4l * direction + place_of(CELL, gate)) * H + unit, 0.0f);
}

// A step. y: in the lane's preactivation, out its gate; c: in c_prev, out c. Returns h.
template <int CELL>
float step_of_lanes(
    int gate, int lane, float p, float forget_bias, float limit, float, thread float& c, thread float& y) {
  const float a = y, c_prev = c;
  float q[4];
  y = lstm_gate<CELL>(gate, a, p, c_prev, forget_bias);
  share(y, lane, q);
  c = lstm_state<CELL>(q[GATE_I], q[GATE_F], q[GATE_G], c_prev, limit);
  if constexpr (PEEPHOLE<CELL> == O_SEES_CURRENT) {
    if (gate == GATE_O) y = lstm_gate<CELL>(GATE_O, a, p, c, forget_bias);
    share(y, lane, q);
  }
  return q[GATE_O] * activate(activation_of(CELL, OUTPUT), c);
}

// A step of a unit in one lane. sums: the products; y: in z, out the gates; c: in c_prev, out c. Returns h.
template <int CELL>
float step_of_unit(
    thread const float (&sums)[4], thread const float (&p)[4], float forget_bias, float limit, float, thread float& c,
    thread float (&y)[4]) {
  for (int gate = 0; gate < 4; ++gate) y[gate] += sums[gate];
  return lstm_cell<CELL>(y, p, c, forget_bias, limit);
}
