// The plain RNN cell, h = s(a): one hidden unit of one batch item, forward and backward.
//
//   a     the preactivation: the input's part plus the recurrent product. It is stored as the cell's only gate, y[0],
//         so that all cells share the layout of gates
//   s     the activation function       da, dh   the gradients of a and h
//
// The struct's template parameter OPTIONS has the layout of cell.metal: bits 8-10 are the activation. The structs of
// all cells have the same members, so that every kernel runs every cell; cell.metal explains them. Parameters without a
// name are for other cells. Most members are counts per unit: GATES preactivations, of which PRODUCTS have a recurrent
// product; KEPT numbers that the forward step saves; GRADIENTS of preactivations that the backward step stores;
// CONSTANTS, of which SUMMED have a gradient; INPUTS of each step (only in a user's cell); CARRIED states besides h.
// PASSES_H is 1 if a step reads h outside the product. SEGMENTS: the parts of the backward product dz Wh.
template <int OPTIONS>
struct RNNCell {
  // READS_BEFORE and READS_AFTER have one bit per state. The backward step reads only h after the step (bit 0 of
  // READS_AFTER), because the slope of the activation is computed from its output.
  enum { GATES = 1, PRODUCTS = 1, KEPT = 1, GRADIENTS = 1, SEGMENTS = 1, CARRIED = 0, PASSES_H = 0 };
  enum { READS_BEFORE = 0, READS_AFTER = 1, CONSTANTS = 0, INPUTS = 0, SUMMED = 0 };

  // block: the position of a gate on the gate axis; the only gate has position 0. activation: the number of its
  // activation function.
  static constexpr int block(int) { return 0; }
  static constexpr int activation(int gate) { return activation_of(OPTIONS, gate); }

  // Do nothing: a plain RNN has no constants per unit, such as peephole weights.
  template <class Index, class Arrays>
  static void constants(thread const Arrays&, int, int, int, thread float*) {}

  // Compute one step. sums: the recurrent product. h: on return the new h. y: on entry the input's part of the
  // preactivation, on return the whole one.
  static void forward(
      thread const float*, thread const float*, thread const float* sums, thread float* h, thread float* y) {
    y[0] += sums[0];
    h[0] = activate(activation(0), y[0]);
  }

  // Compute one step in reverse. h: the new h. dh: on entry the gradient of h, on return the part of the gradient of
  // h_prev that does not go through the recurrent product: 0, because only this product reads h_prev. da: on entry the
  // cotangent of the preactivation (the gradient that the caller gives for it as an output), on return its whole
  // gradient.
  static void backward(
      thread const float*, thread const float*, thread const float*, thread const float*, thread const float* h,
      thread float* dh, thread float* da, thread float*, thread float*) {
    da[0] = dh[0] * slope(activation(0), h[0]) + da[0];
    dh[0] = 0.0f;
  }

  // Return the gradient of the recurrent product. It equals da[0], the gradient of the preactivation, because the
  // preactivation is the product plus the input's part.
  static float product_gradient(int, thread const float*, thread const float* da) { return da[0]; }
};
