// The GRU cell: one hidden unit of one batch item, forward and backward.
//
//   r = s_r(a_r)   z = s_z(a_z)
//   n = s_n(a_n + r q)   reset after the product: q is the candidate's recurrent product and its bias bhn
//   n = s_n(a_n + q)     reset before it: q is the candidate's product with r h
//   h = z h_prev + (1 - z) n,  or with flip_z  (1 - z) h_prev + z n
// metal/README.md has the derivation of the backward equations.
//
// Own options: bit 23 whether the reset comes before the candidate's product, bit 24 flip_z.
// Constant of a unit: bhn; 0 where the reset comes before.
template <int OPTIONS>
struct GRUCell {
  enum { GATE_R, GATE_Z, GATE_N, GATES = 3, CONSTANTS = 1, HAS_C = 0, PASSES_H = 1 };
  enum { RESETS_BEFORE = (OPTIONS >> 23) & 1, FLIPS_Z = (OPTIONS >> 24) & 1, SEGMENTS = RESETS_BEFORE ? 2 : 3 };

  static constexpr int block(int gate) { return block_of(OPTIONS, gate); }
  static constexpr int activation(int gate) { return activation_of(OPTIONS, gate); }

  // Read bhn [D H] of a unit.
  template <class Index, class Arrays>
  static void constants(thread const Arrays& a, int direction, int H, int unit, thread float (&bhn)[1]) {
    bhn[0] = value_at(a.bhn, Index(direction) * H + unit, 0.0f);
  }

  static float reset(float a) { return activate(activation(GATE_R), a); }

  static float candidate(float a, float r, float q) {
    return activate(activation(GATE_N), a + (RESETS_BEFORE ? q : r * q));
  }

  // Return the new h.
  static float state(float z, float n, float h_prev) {
    return FLIPS_Z ? h_prev + z * (n - h_prev) : n + z * (h_prev - n);
  }

  // Compute a step with the reset after the product and return h. sums: the recurrent products; y: in the input's part
  // of the preactivations, out the gates.
  static float forward(
      thread const float (&sums)[3], thread const float (&bhn)[1], float, float, float h_prev, thread float&,
      thread float (&y)[3]) {
    y[GATE_R] = reset(y[GATE_R] + sums[GATE_R]);
    y[GATE_Z] = activate(activation(GATE_Z), y[GATE_Z] + sums[GATE_Z]);
    y[GATE_N] = candidate(y[GATE_N], y[GATE_R], sums[GATE_N] + bhn[0]);
    return state(y[GATE_Z], y[GATE_N], h_prev);
  }

  // Return the gradients of the preactivations of z and of n. dh: that of the new h; dy: that which the gate has from
  // outside.
  static float update_backward(float z, float n, float h_prev, float dh, float dy) {
    return (dy + dh * (FLIPS_Z ? n - h_prev : h_prev - n)) * slope(activation(GATE_Z), z);
  }
  static float candidate_backward(float z, float n, float dh, float dy) {
    return (dy + dh * (FLIPS_Z ? z : 1.0f - z)) * slope(activation(GATE_N), n);
  }

  // Return what of dh reaches h_prev past the products.
  static float past_products(float z, float dh) { return dh * (FLIPS_Z ? 1.0f - z : z); }

  // Return the gradient of r's preactivation. dr: the gradient of r, from outside and from the step: dz_n q, or where
  // the reset comes before, the masked h times the gradient of r h.
  static float reset_backward(float r, float dr) { return dr * slope(activation(GATE_R), r); }

  // Compute a step in reverse. y: the gates; dh: in the gradient of h, out what of it reaches h_prev past the products;
  // dz: in the gradients that the gates have from outside, out those of the preactivations. Where the reset comes
  // before, dz of r stays what it is: its gradient needs another product.
  static void backward(
      thread const float (&y)[3], thread const float (&)[1], float h_prev, float, float q, thread float& dh,
      thread float&, thread float (&dz)[3]) {
    dz[GATE_Z] = update_backward(y[GATE_Z], y[GATE_N], h_prev, dh, dz[GATE_Z]);
    dz[GATE_N] = candidate_backward(y[GATE_Z], y[GATE_N], dh, dz[GATE_N]);
    dh = past_products(y[GATE_Z], dh);
    if (!RESETS_BEFORE) dz[GATE_R] = reset_backward(y[GATE_R], dz[GATE_R] + dz[GATE_N] * q);
  }

  // The candidate's product is multiplied by r before it enters the preactivation.
  static float product_gradient(int gate, thread const float (&y)[3], thread const float (&dz)[3]) {
    return gate == GATE_N ? dz[GATE_N] * y[GATE_R] : dz[gate];
  }
};
