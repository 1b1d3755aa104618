// The GRU in stepwise_backward.metal, with the reset after the candidate's product. What it carries is the gradient of
// h_prev past the products.

constant constexpr int GATES = 3, PRODUCT_GATES = 3, SEGMENTS = 3;
constant constexpr bool CARRIES = true, CARRIES_DH = true;

// dz of a step as its products saw it, a gate at a time: that of the candidate times r.
template <int CELL, class S, class G, class L>
void find_row(thread const Following<CELL, S, G, L>& x, int b, int segment, thread FollowingRow<S, G>& row) {
  const int t = next_step(*x.s, value_at(x.lengths, b, x.s->T));
  row.dz = x.dz + place(*x.s, 0, b, 3 * x.H) + segment * x.H;
  row.r = x.gates + place(*x.s, max(t, 0), b, 3 * x.H) + place_of(CELL, GATE_R) * x.H;
  row.candidate = t >= 0 && segment == place_of(CELL, GATE_N);
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
