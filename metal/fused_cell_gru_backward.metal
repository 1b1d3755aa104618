// A step of the GRU back, in every lane of a unit. y: the gates; seen: h_prev, then q. dh: in the gradient of h, out
// what of it reaches h_prev past the products. d: in the gradients the gates have from outside, out by lane that of the
// preactivation and, in the last, what goes into the candidate's product; r's waits for that product where the reset
// comes before it.
template <int CELL>
void step_back_of_lanes(
    thread const float (&y)[4], thread const float (&)[4], thread const float (&seen)[4], float, thread float& dh,
    thread float&, thread float (&d)[4]) {
  gru_cell_backward<CELL>(y, seen[0], dh, d);
  d[3] = d[GATE_N];
  if constexpr (!RESETS_BEFORE<CELL>) {
    d[3] *= y[GATE_R];
    d[GATE_R] = gru_reset_backward<CELL>(y[GATE_R], d[GATE_R] + d[GATE_N] * seen[2]);
  }
}
