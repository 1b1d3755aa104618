// The plain RNN cell, h = s(a): one hidden unit of one batch item, forward and backward. The preactivation a is stored
// as the cell's only gate, so that all cells share the layout of gates.
template <int OPTIONS>
struct RNNCell {
  enum { GATES = 1, CONSTANTS = 1, SEGMENTS = 1, HAS_C = 0, PASSES_H = 0 };

  static constexpr int block(int) { return 0; }
  static constexpr int activation(int gate) { return activation_of(OPTIONS, gate); }

  template <class Index, class Arrays>
  static void constants(thread const Arrays&, int, int, int, thread float (&p)[1]) { p[0] = 0.0f; }

  // Compute one step and return h. y: on entry the input's part of the preactivation, on return the preactivation.
  static float forward(
      thread const float (&sums)[1], thread const float (&)[1], float, float, float, thread float&,
      thread float (&y)[1]) {
    y[0] += sums[0];
    return activate(activation(0), y[0]);
  }

  // Compute one step in reverse. h: the new h. dh: on entry the gradient of the new h, on return 0, because h_prev is
  // used only in the recurrent product. da: on entry the cotangent of the preactivation, on return its whole gradient.
  static void backward(
      thread const float (&)[1], thread const float (&)[1], float, float h, float, float, thread float& dh,
      thread float&, thread float (&da)[1]) {
    da[0] = dh * slope(activation(0), h) + da[0];
    dh = 0.0f;
  }

  static float product_gradient(int, thread const float (&)[1], thread const float (&da)[1]) { return da[0]; }
};
