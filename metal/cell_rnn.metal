// The plain RNN cell, h = s(a): one hidden unit of one batch item, forward and backward.
//
//   a     the preactivation: the input's part plus the recurrent product. It is stored as the cell's only gate, y[0],
//         so that all cells share the layout of gates
//   s     the activation function       da, dh   the gradients of a and h
//
// cell.metal explains the members of the struct, which all cells have, and the bits of its template parameter OPTIONS.
// Parameters without a name are for other cells.
template <int OPTIONS>
struct RNNCell {
  // READS_AFTER: the backward step reads only h after the step, because the slope of the activation is computed from
  // its output.
  enum { GATES = 1, PRODUCTS = 1, KEPT = 1, GRADIENTS = 1, SEGMENTS = 1, CARRIED = 0, PASSES_H = 0 };
  enum { READS_BEFORE = 0, READS_AFTER = 1, CONSTANTS = 0, INPUTS = 0, SUMMED = 0 };

  // block: the only gate has position 0 on the gate axis. activation: the number of its activation function.
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

  // Return the gradient of the recurrent product. It equals the gradient of the preactivation, because the product is
  // only added to the input's part.
  static float product_gradient(int, thread const float*, thread const float* da) { return da[0]; }
};
