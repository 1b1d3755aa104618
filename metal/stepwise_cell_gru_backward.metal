// The GRU in stepwise_backward.metal, with the reset after the candidate's product. What it carries is the gradient of
// h_prev past the products.

constant constexpr int GATES = 3, PRODUCT_GATES = 3;
constant constexpr bool CARRIES = true, CARRIES_DH = true;

// dz of a step as its products saw it: that of the candidate times r.
template <int CELL, class S, class G, class L>
float operand(thread const Following<CELL, S, G, L>& x, int b, int k) {
  const int t = next_step(*x.s, value_at(x.lengths, b, x.s->T)), j = k % x.H;
  const bool candidate = t >= 0 && k - j == place_of(CELL, GATE_N) * x.H;
  const float r = candidate ? x.gates[place(*x.s, t, b, 3 * x.H) + place_of(CELL, GATE_R) * x.H + j] : S(1.0f);
  return r * float(x.dz[place(*x.s, 0, b, 3 * x.H) + k]);
}

// q: the candidate's recurrent product. h: the state before.
template <int CELL, class E>
void cell_backward(
    thread const Step&, int, E, thread const float (&y)[3], float, float h, float q, float dh, thread float& carry,
    thread float (&dz)[3]) {
  carry += dh;
  gru_cell_backward<CELL>(y, h, carry, dz);
  dz[GATE_R] = gru_reset_backward<CELL>(y[GATE_R], dz[GATE_R] + dz[GATE_N] * q);
}
