// The GRU in stepwise_forward.metal, with the reset after the candidate's product. extra: bhn [D H].

constant constexpr int GATES = 3, UNITS = 8;
constant constexpr bool CARRIES = false;

// q: the sums of the products. y: in the input's part of the preactivations, out the gates. h: the state before.
template <int CELL, class E, class N>
float cell_forward(
    thread const Step& s, int j, E bhn, N, thread const float (&q)[3], thread float (&y)[3], thread float& h) {
  for (int gate = GATE_R; gate < GATE_N; ++gate)
    y[gate] = activate(activation_of(CELL, gate), y[gate] + q[gate]);
  y[GATE_N] = gru_candidate<CELL>(y[GATE_N], y[GATE_R], q[GATE_N] + value_at(bhn, Index(s.d) * s.H + j, 0.0f));
  return gru_state<CELL>(y[GATE_Z], y[GATE_N], h);
}
