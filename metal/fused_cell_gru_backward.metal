// A step of the GRU back. dh: in the gradient of h, out what of it reaches h_prev past the products; seen: h_prev, then
// q. The fourth d is what goes into the candidate's product; that of r waits for this product where the reset comes
// before it.

// By the lanes of a unit, of which each has its own gate y. d: in the gradient the gate has from outside, out that of
// the preactivation.
template <int CELL>
void step_back_of_lanes(
    int gate, float y, float, thread const float (&seen)[4], float, thread float& dh, thread float&, thread float& d) {
  const float r = of_lane<LANES>(y, GATE_R), z = of_lane<LANES>(y, GATE_Z), n = of_lane<LANES>(y, GATE_N);
  const float dz_n = gru_candidate_backward<CELL>(z, n, dh, of_lane<LANES>(d, GATE_N));
  const float dz_z = gru_update_backward<CELL>(z, n, seen[0], dh, d);
  const float dz_r = RESETS_BEFORE<CELL> ? d : gru_reset_backward<CELL>(r, d + dz_n * seen[2]);
  const float of_product = RESETS_BEFORE<CELL> ? dz_n : dz_n * r;
  d = gate == GATE_R ? dz_r : gate == GATE_Z ? dz_z : gate == GATE_N ? dz_n : of_product;
  dh = gru_past_products<CELL>(z, dh);
}

// In one lane. y, d: of all gates.
template <int CELL>
void step_back_of_unit(
    thread const float (&y)[4], thread const float (&)[4], thread const float (&seen)[4], float, thread float& dh,
    thread float&, thread float (&d)[4]) {
  gru_cell_backward<CELL>(y, seen[0], dh, d);
  d[3] = d[GATE_N] * y[GATE_R];
  d[GATE_R] = gru_reset_backward<CELL>(y[GATE_R], d[GATE_R] + d[GATE_N] * seen[2]);
}
