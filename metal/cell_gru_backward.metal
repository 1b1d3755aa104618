// The GRU cell backward on scalars; cell_gru_forward.metal has the equations.

// The gradients of the preactivations of z and n. dh: that of the new h; dy: that of the gate from outside.
template <int CELL>
float gru_update_backward(float z, float n, float h, float dh, float dy) {
  return (dy + dh * (FLIPS_Z<CELL> ? n - h : h - n)) * slope(activation_of(CELL, GATE_Z), z);
}
template <int CELL>
float gru_candidate_backward(float z, float n, float dh, float dy) {
  return (dy + dh * (FLIPS_Z<CELL> ? z : 1.0f - z)) * slope(activation_of(CELL, GATE_N), n);
}

// What of dh reaches h past the products.
template <int CELL>
float gru_past_products(float z, float dh) {
  return dh * (FLIPS_Z<CELL> ? 1.0f - z : z);
}

// y: the gates r, z, n (N: 3 or more). h: the state before the step. dh: in the gradient of the new h, out what of it
// reaches h past the products. dz: in the gradients the gates have from outside, of z and n out those of their
// preactivations.
template <int CELL, int N>
void gru_cell_backward(thread const float (&y)[N], float h, thread float& dh, thread float (&dz)[N]) {
  dz[GATE_Z] = gru_update_backward<CELL>(y[GATE_Z], y[GATE_N], h, dh, dz[GATE_Z]);
  dz[GATE_N] = gru_candidate_backward<CELL>(y[GATE_Z], y[GATE_N], dh, dz[GATE_N]);
  dh = gru_past_products<CELL>(y[GATE_Z], dh);
}

// The gradient of r's preactivation. dr: that of r, from outside and from the step: dz_n q, or the masked h times the
// gradient of the product's operand r h where the reset comes before it.
template <int CELL>
float gru_reset_backward(float r, float dr) {
  return dr * slope(activation_of(CELL, GATE_R), r);
}
