// The GRU cell: one hidden unit of one batch item, forward and backward.
//
//   r = s_r(a_r)   z = s_z(a_z)
//   n = s_n(a_n + r q)   reset after the product: q is the candidate's recurrent product plus its bias bhn
//   n = s_n(a_n + q)     reset before the product: q is the candidate's recurrent product of r h_prev
//   h = z h_prev + (1 - z) n,  or with flip_z  (1 - z) h_prev + z n
//
//   r, z, n   the gates: reset, update and candidate      s_k   the activation function of gate k
//   a_k       the preactivation of gate k; for the candidate n without the term with q
//   y         the array of the gates r, z, n              h_prev   h before the step
//   d...      a gradient: dh of the new h, dy of the gates as outputs, dz of the preactivations, dz_n that of n's
//   cotangent the gradient that the caller gives for an output of the call, such as the gates
//
// metal/README.md has the backward equations.
//
// cell.metal explains the members of the struct, which all cells have, and the bits of its template parameter OPTIONS.
// Parameters without a name are for other cells. The GRU has two more bits:
//   bit 23   1 if the reset comes before the candidate's product (RESETS_BEFORE), 0 if it comes after
//   bit 24   1 for flip_z (FLIPS_Z)
// A unit has one constant, its bias bhn, which is the same at all steps. It is 0 if the reset comes before the product:
// then the bias is a part of a_n.
template <int OPTIONS>
struct GRUCell {
  // GATE_R, GATE_Z, GATE_N number the gates. READS_BEFORE has bit 0 set: the backward step reads h before the step.
  // SEGMENTS: how many parts the backward product dz Wh has. Usually each gate has its own part, because the part of
  // gate n has dz r in place of dz. If the reset comes before the product, only the gates r and z have a part, and the
  // candidate n has a separate product. FLIPS_Z: z and 1 - z change places in the new h.
  enum { GATE_R, GATE_Z, GATE_N, GATES, PRODUCTS = 3, KEPT = 3, GRADIENTS = 3, CARRIED = 0, PASSES_H = 1 };
  enum { READS_BEFORE = 1, READS_AFTER = 0, CONSTANTS = 1, INPUTS = 0, SUMMED = 0 };
  enum { RESETS_BEFORE = (OPTIONS >> 23) & 1, FLIPS_Z = (OPTIONS >> 24) & 1, SEGMENTS = RESETS_BEFORE ? 2 : 3 };

  static constexpr int block(int gate) { return block_of(OPTIONS, gate); }
  static constexpr int activation(int gate) { return activation_of(OPTIONS, gate); }

  // Read the constant of one unit into bhn[0]: the bias of the candidate's recurrent product, from the array a.bhn [D,
  // H], or 0 if the call does not have this array.
  template <class Index, class Arrays>
  static void constants(thread const Arrays& a, int direction, int H, int unit, thread float* bhn) {
    bhn[0] = value_at(a.bhn, Index(direction) * H + unit, 0.0f);
  }

  // Return the gate r. a: its preactivation.
  static float reset(float a) { return activate(activation(GATE_R), a); }

  // Return the candidate n. q: its recurrent product. a: the rest of its preactivation. r: the reset gate; if the reset
  // comes before the product, q already contains it.
  static float candidate(float a, float r, float q) {
    return activate(activation(GATE_N), a + (RESETS_BEFORE ? q : r * q));
  }

  // Return the new h, computed from the gates z and n and from h before the step. It is z first + (1 - z) second, where
  // (first, second) is (h_prev, n), or with flip_z (n, h_prev). The equivalent formula second + z (first - second)
  // takes one instruction less. But for an infinite n it gives inf - inf, which is NaN. n can be infinite only with the
  // activations identity and relu, so only they use the longer formula.
  static float state(float z, float n, float h_prev) {
    const float first = FLIPS_Z ? n : h_prev, second = FLIPS_Z ? h_prev : n;
    if (activation(GATE_N) == IDENTITY || activation(GATE_N) == RELU) return z * first + (1.0f - z) * second;
    return second + z * (first - second);
  }

  // Compute one step, with the reset after the product. (With the reset before the product a step has two products. The
  // kernels for it call the functions reset, candidate and state instead.) sums: the recurrent products of the gates.
  // h: on entry h_prev, on return the new h. y: on entry the input's parts of the preactivations, on return the gates.
  static void forward(
      thread const float* bhn, thread const float*, thread const float* sums, thread float* h, thread float* y) {
    y[GATE_R] = reset(y[GATE_R] + sums[GATE_R]);
    y[GATE_Z] = activate(activation(GATE_Z), y[GATE_Z] + sums[GATE_Z]);
    y[GATE_N] = candidate(y[GATE_N], y[GATE_R], sums[GATE_N] + bhn[0]);
    h[0] = state(y[GATE_Z], y[GATE_N], h[0]);
  }

  // Return the gradient of the preactivation of gate z (update_backward) or n (candidate_backward): the gradient of the
  // gate times the slope of its activation. dh: the gradient of the new h. dy: the cotangent of the gate (the gradient
  // that the caller gives for it). The new h is z h_prev + (1 - z) n; if FLIPS_Z, the factors z and 1 - z change
  // places.
  static float update_backward(float z, float n, float h_prev, float dh, float dy) {
    return (dy + dh * (FLIPS_Z ? n - h_prev : h_prev - n)) * slope(activation(GATE_Z), z);
  }
  static float candidate_backward(float z, float n, float dh, float dy) {
    return (dy + dh * (FLIPS_Z ? z : 1.0f - z)) * slope(activation(GATE_N), n);
  }

  // Return the part of the gradient of h_prev that does not go through the recurrent products. The new h contains the
  // term z h_prev, or (1 - z) h_prev if FLIPS_Z. dh: the gradient of the new h.
  static float past_products(float z, float dh) { return dh * (FLIPS_Z ? 1.0f - z : z); }

  // Return the gradient of the preactivation of gate r. dr: the gradient of the gate r. The caller computes dr as the
  // cotangent of r plus one term. If r multiplies the candidate's product q, the term is q dz_n, where dz_n is the
  // gradient of n's preactivation. If r multiplies x = mask * h_prev before the product, the term is x times the
  // gradient of r x.
  static float reset_backward(float r, float dr) { return dr * slope(activation(GATE_R), r); }

  // Compute one step in reverse. y: the gates. q[0]: the candidate's recurrent product with its bias. h_prev[0]: h
  // before the step. dh: on entry the gradient of the new h; on return the part of the gradient of h_prev that does not
  // go through the products. dz: on entry the cotangents of the gates (the gradients that the caller gives for them);
  // on return the gradients of their preactivations. If the reset comes before the product, dz[GATE_R] stays the
  // cotangent, because the gradient of r needs another product.
  static void backward(
      thread const float*, thread const float* q, thread const float* y, thread const float* h_prev,
      thread const float*, thread float* dh, thread float* dz, thread float*, thread float*) {
    dz[GATE_Z] = update_backward(y[GATE_Z], y[GATE_N], h_prev[0], dh[0], dz[GATE_Z]);
    dz[GATE_N] = candidate_backward(y[GATE_Z], y[GATE_N], dh[0], dz[GATE_N]);
    dh[0] = past_products(y[GATE_Z], dh[0]);
    if (!RESETS_BEFORE) dz[GATE_R] = reset_backward(y[GATE_R], dz[GATE_R] + dz[GATE_N] * q[0]);
  }

  // Return the gradient of a gate's recurrent product. For r and z it is dz, the gradient of the preactivation. The
  // candidate's product is multiplied by r before it is added to the preactivation, so its gradient is dz r. (Kernels
  // call this function only if the reset comes after the product.) y: the gates.
  static float product_gradient(int gate, thread const float* y, thread const float* dz) {
    return gate == GATE_N ? dz[GATE_N] * y[GATE_R] : dz[gate];
  }
};
