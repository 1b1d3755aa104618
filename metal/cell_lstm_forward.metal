// The LSTM cell on scalars: one hidden unit of one batch item. All arithmetic is float, whatever the arrays store.
//
//   i = s_i(a_i + p_i c_prev)   f = s_f(a_f + forget_bias + p_f c_prev)   g = s_g(a_g + p_g c_prev)
//   c = f c_prev + i g, clipped to +-limit
//   o = s_o(a_o + p_o c)  or  s_o(a_o + p_o c_prev)
//   m = o s_output(c)

template <int CELL> constant constexpr bool CLIPS = (CELL >> 25) & 1;

// What a gate is the activation of. a: the preactivation, p: its peephole weight, state: the cell state it peeps at.
template <int CELL>
float lstm_preactivation(int gate, float a, float p, float state, float forget_bias) {
  a += gate == GATE_F ? forget_bias : 0.0f;
  return a + (PEEPHOLE<CELL> == NO_PEEPHOLE ? 0.0f : p * state);
}

template <int CELL>
float lstm_gate(int gate, float a, float p, float state, float forget_bias) {
  return activate(activation_of(CELL, gate), lstm_preactivation<CELL>(gate, a, p, state, forget_bias));
}

template <int CELL>
float lstm_state(float i, float f, float g, float c_prev, float limit) {
  const float c = f * c_prev + i * g;
  return CLIPS<CELL> ? within(-limit, c, limit) : c;
}

// y: in the preactivations of i, f, g, o, out the gates. c: in c_prev, out c. Returns m.
template <int CELL>
float lstm_cell(thread float (&y)[4], thread const float (&p)[4], thread float& c, float forget_bias, float limit) {
  const float c_prev = c;
  for (int gate = GATE_I; gate < GATE_O; ++gate) y[gate] = lstm_gate<CELL>(gate, y[gate], p[gate], c_prev, forget_bias);
  c = lstm_state<CELL>(y[GATE_I], y[GATE_F], y[GATE_G], c_prev, limit);
  const float seen = PEEPHOLE<CELL> == O_SEES_CURRENT ? c : c_prev;
  y[GATE_O] = lstm_gate<CELL>(GATE_O, y[GATE_O], p[GATE_O], seen, forget_bias);
  return y[GATE_O] * activate(activation_of(CELL, OUTPUT), c);
}
