// The GRU in the fused kernels: four lanes to a unit, for r, z, the input's part of n, and n's recurrent product q.

constant constexpr int GATES = 3, LANES = 4;
constant constexpr bool APART = true;
template <int CELL> constant constexpr bool TWO_PRODUCTS = RESETS_BEFORE<CELL>;
template <int CELL> constant constexpr int FIRST_PRODUCT = RESETS_BEFORE<CELL> ? 3 : 11;

// The H-block of z, gates, dz that a lane has, and that of the rows of Wh whose product it sums; -1: none.
constexpr int gate_block(int cell, int gate) { return gate <= GATE_N ? place_of(cell, gate) : -1; }
constexpr int weight_block(int cell, int gate) {
  return gate == GATE_N ? -1 : place_of(cell, gate == 3 ? int(GATE_N) : gate);
}

// A lane's own number: the last one's out of bhn [D H].
template <int CELL, class E>
float lane_constant(E bhn, int direction, int gate, int H, int unit) {
  return gate > GATE_N ? value_at(bhn, long(direction) * H + unit, 0.0f) : 0.0f;
}

// A step. y: in what the lane summed, out its gate. Returns h.
template <int CELL>
float step_of_lanes(int gate, int lane, float p, float, float, float h_prev, thread float&, thread float& y) {
  float q[4];
  share(gate < GATE_N ? activate(activation_of(CELL, gate), y) : y + p, lane, q);
  const float n = gru_candidate<CELL>(q[GATE_N], q[GATE_R], q[3]);
  y = gate == GATE_R ? q[GATE_R] : gate == GATE_Z ? q[GATE_Z] : n;
  return gru_state<CELL>(q[GATE_Z], n, h_prev);
}

// A step of a unit in one lane. sums: the products, as the lanes have them; y: in z, out the gates. Returns h.
template <int CELL>
float step_of_unit(
    thread const float (&sums)[4], thread const float (&p)[4], float, float, float h_prev, thread float&,
    thread float (&y)[4]) {
  y[GATE_R] = gru_reset<CELL>(y[GATE_R] + sums[GATE_R]);
  y[GATE_Z] = activate(activation_of(CELL, GATE_Z), y[GATE_Z] + sums[GATE_Z]);
  y[GATE_N] = gru_candidate<CELL>(y[GATE_N], y[GATE_R], sums[3] + p[3]);
  return gru_state<CELL>(y[GATE_Z], y[GATE_N], h_prev);
}
