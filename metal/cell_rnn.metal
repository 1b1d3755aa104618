// The plain cell: one hidden unit of one batch item, forward and backward. h = s(a). What is stored as its only gate is
// a itself, so that the layout of gates is that of the other cells.
template <int OPTIONS>
struct RNNCell {
  enum { GATES = 1, CONSTANTS = 1, SEGMENTS = 1, HAS_C = 0, PASSES_H = 0 };

  static constexpr int block(int) { return 0; }
  static constexpr int activation(int gate) { return activation_of(OPTIONS, gate); }

  template <class Index, class Arrays>
  static void constants(thread const Arrays&, int, int, int, thread float (&p)[1]) { p[0] = 0.0f; }

  // Compute a step and return h. y: in the input's part of the preactivation, out the preactivation.
  static float forward(
      thread const float (&sums)[1], thread const float (&)[1], float, float, float, thread float&,
      thread float (&y)[1]) {
    y[0] += sums[0];
    return activate(activation(0), y[0]);
  }

  // Compute a step in reverse. h: the new one; dh: in its gradient, out 0, as h_prev is reached through the product
  // only; da: in the gradient that the preactivation has from outside, out the whole one.
  static void backward(
      thread const float (&)[1], thread const float (&)[1], float, float h, float, thread float& dh, thread float&,
      thread float (&da)[1]) {
    da[0] = dh * slope(activation(0), h) + da[0];
    dh = 0.0f;
  }

  static float product_gradient(int, thread const float (&)[1], thread const float (&da)[1]) { return da[0]; }
};
