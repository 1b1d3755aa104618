// The GRU cell: one hidden unit of one batch item, forward and backward.
//
//   r = s_r(a_r)   z = s_z(a_z)
//   n = s_n(a_n + r q)   reset after the product: q is the candidate's recurrent product plus its bias bhn
//   n = s_n(a_n + q)     reset before the product: q is the candidate's recurrent product of r h_prev
//   h = z h_prev + (1 - z) n,  or with flip_z  (1 - z) h_prev + z n
//
//   r, z, n   the gates: reset, update and candidate      s_k   the activation function of gate k
//   a_k       the preactivation of gate k; for the candidate n without the term with q
//   y         the gates r, z, n                           h_prev   h before the step
//   d...      a gradient: dh of the new h, dy of the gates as outputs, dz of the preactivations, dz_n that of n's
//   cotangent the gradient that the caller gives for an output of the call, such as the gates
//
// metal/README.md has the backward equations.
//
// The struct's template parameter OPTIONS has the layout of cell.metal: bits 0-7 the position of each gate's block,
// bits 8-22 the activations. The GRU has two more bits:
//   bit 23   1 if the reset comes before the candidate's product (RESETS_BEFORE), 0 if it comes after
//   bit 24   1 for flip_z (FLIPS_Z)
// A unit has one constant, its bias bhn, which is the same at all steps. It is 0 if the reset comes before the product:
// then the bias is a part of a_n. All structs of cells have the same members (cell.metal), so that every kernel runs
// every cell. Most are counts per unit: GATES preactivations, PRODUCTS of them with a recurrent product; KEPT numbers
// for the backward step, and GRADIENTS of preactivations that it stores; CONSTANTS, SUMMED of them with a gradient;
// INPUTS of each step, in a user's cell; CARRIED states besides h. PASSES_H: 1 if a step reads h outside the product.
// SEGMENTS: the parts of the backward product dz Wh. Parameters without a name are for other cells.
template <int OPTIONS>
struct GRUCell {
  // GATE_R, GATE_Z, GATE_N number the gates. READS_BEFORE: the backward step reads h before the step, bit 0. SEGMENTS:
  // one per gate, because the candidate's dz is multiplied by r; if the reset comes before the product, only r and z
  // are in it: the candidate has a product of its own.
  enum { GATE_R, GATE_Z, GATE_N, GATES, PRODUCTS = 3, KEPT = 3, GRADIENTS = 3, CARRIED = 0, PASSES_H = 1 };
  enum { READS_BEFORE = 1, READS_AFTER = 0, CONSTANTS = 1, INPUTS = 0, SUMMED = 0 };
  enum { RESETS_BEFORE = (OPTIONS >> 23) & 1, FLIPS_Z = (OPTIONS >> 24) & 1, SEGMENTS = RESETS_BEFORE ? 2 : 3 };

  // block: the position of a gate's H numbers on the gate axis. activation: a gate's activation function.
  static constexpr int block(int gate) { return block_of(OPTIONS, gate); }
  static constexpr int activation(int gate) { return activation_of(OPTIONS, gate); }

  // Read one unit's constant: its number of a.bhn [D, H], the bias of the candidate's recurrent product; 0 if the call
  // lacks the array. direction: 0 or 1 of D. H: the number of units. Index: the integer type that counts elements.
  template <class Index, class Arrays>
  static void constants(thread const Arrays& a, int direction, int H, int unit, thread float* bhn) {
    bhn[0] = value_at(a.bhn, Index(direction) * H + unit, 0.0f);
  }

  // Return the gate r. a: its preactivation.
  static float reset(float a) { return activate(activation(GATE_R), a); }

  // Return the candidate n. a: its preactivation without q, the candidate's recurrent product. If the reset comes
  // before the product, r is in q already.
  static float candidate(float a, float r, float q) {
    return activate(activation(GATE_N), a + (RESETS_BEFORE ? q : r * q));
  }

  // Return the new h, computed from the gates z and n and the h before the step. It is z first + (1 - z) second, where
  // (first, second) is (h_prev, n), or with flip_z (n, h_prev). The equal formula second + z (first - second) takes one
  // instruction less. But for an infinite n it gives inf - inf, which is NaN. n can be infinite only with the
  // activations identity and relu, so for them the longer formula is used.
  static float state(float z, float n, float h_prev) {
    const float first = FLIPS_Z ? n : h_prev, second = FLIPS_Z ? h_prev : n;
    if (activation(GATE_N) == IDENTITY || activation(GATE_N) == RELU) return z * first + (1.0f - z) * second;
    return second + z * (first - second);
  }

  // Compute one step, with the reset after the product. (With the reset before it a step has two products, and its
  // kernels call reset, candidate and state.) sums: the recurrent products of the gates. h: on entry h_prev, on return
  // the new h. y: on entry the input's parts of the preactivations, on return the gates.
  static void forward(
      thread const float* bhn, thread const float*, thread const float* sums, thread float* h, thread float* y) {
    y[GATE_R] = reset(y[GATE_R] + sums[GATE_R]);
    y[GATE_Z] = activate(activation(GATE_Z), y[GATE_Z] + sums[GATE_Z]);
    y[GATE_N] = candidate(y[GATE_N], y[GATE_R], sums[GATE_N] + bhn[0]);
    h[0] = state(y[GATE_Z], y[GATE_N], h[0]);
  }

  // Return the gradient of z's preactivation (update_backward) or of n's (candidate_backward): the gradient of the gate
  // times the slope of its activation. dh: the gradient of the new h. dy: the cotangent of the gate. In h, n has the
  // factor 1 - z and h_prev the factor z; if FLIPS_Z, the two factors change places.
  static float update_backward(float z, float n, float h_prev, float dh, float dy) {
    return (dy + dh * (FLIPS_Z ? n - h_prev : h_prev - n)) * slope(activation(GATE_Z), z);
  }
  static float candidate_backward(float z, float n, float dh, float dy) {
    return (dy + dh * (FLIPS_Z ? z : 1.0f - z)) * slope(activation(GATE_N), n);
  }

  // Return the part of the gradient of h_prev that bypasses the recurrent products: h contains z h_prev, or (1 - z)
  // h_prev if FLIPS_Z. dh: the gradient of the new h.
  static float past_products(float z, float dh) { return dh * (FLIPS_Z ? 1.0f - z : z); }

  // Return the gradient of r's preactivation. dr: the gradient of the gate r: its cotangent plus one term, which the
  // caller adds. If r multiplies the product q, the term is q dz_n. If r multiplies x = mask * h_prev before the
  // product, it is x times the gradient of r x; `mask` is the factor on h in a recurrent product.
  static float reset_backward(float r, float dr) { return dr * slope(activation(GATE_R), r); }

  // Compute one step in reverse. y: the gates. q: the candidate's recurrent product with its bias. h_prev: h before the
  // step. dh: on entry the gradient of the new h, on return the part of that of h_prev that bypasses the products. dz:
  // on entry the cotangents of the gates, on return the gradients of their preactivations. If the reset comes before
  // the product, dz of gate r stays its cotangent here, because its gradient needs another product.
  static void backward(
      thread const float*, thread const float* q, thread const float* y, thread const float* h_prev,
      thread const float*, thread float* dh, thread float* dz, thread float*, thread float*) {
    dz[GATE_Z] = update_backward(y[GATE_Z], y[GATE_N], h_prev[0], dh[0], dz[GATE_Z]);
    dz[GATE_N] = candidate_backward(y[GATE_Z], y[GATE_N], dh[0], dz[GATE_N]);
    dh[0] = past_products(y[GATE_Z], dh[0]);
    if (!RESETS_BEFORE) dz[GATE_R] = reset_backward(y[GATE_R], dz[GATE_R] + dz[GATE_N] * q[0]);
  }

  // Return the gradient of a gate's recurrent product. It is dz, but the candidate's product is multiplied by r before
  // it enters the preactivation, so its gradient is dz_n r. (Kernels ask for it with the reset after the product only.)
  // y: the gates.
  static float product_gradient(int gate, thread const float* y, thread const float* dz) {
    return gate == GATE_N ? dz[GATE_N] * y[GATE_R] : dz[gate];
  }
};
