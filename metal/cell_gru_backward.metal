// The GRU cell backward on scalars; cell_gru_forward.metal has the equations.
//
// y: the gates r, z, n (N: 3 or more). h: the state before the step. dh: in the gradient of the new h, out what of it
// reaches h past the products. dz: in the gradients the gates have from outside, of z and n out those of their
// preactivations.
template <int CELL, int N>
void gru_cell_backward(thread const float (&y)[N], float h, thread float& dh, thread float (&dz)[N]) {
  const float of_n = FLIPS_Z<CELL> ? y[GATE_Z] : 1.0f - y[GATE_Z];
  const float through_z = FLIPS_Z<CELL> ? y[GATE_N] - h : h - y[GATE_N];
  dz[GATE_Z] = (dz[GATE_Z] + dh * through_z) * slope(activation_of(CELL, GATE_Z), y[GATE_Z]);
  dz[GATE_N] = (dz[GATE_N] + dh * of_n) * slope(activation_of(CELL, GATE_N), y[GATE_N]);
  dh *= FLIPS_Z<CELL> ? 1.0f - y[GATE_Z] : y[GATE_Z];
}

// The gradient of r's preactivation. dr: that of r, from outside and from the step: dz_n q, or the masked h times the
// gradient of the product's operand r h where the reset comes before it.
template <int CELL>
float gru_reset_backward(float r, float dr) {
  return dr * slope(activation_of(CELL, GATE_R), r);
}
