// The plain RNN step with one lane per unit.
template <int OPTIONS>
struct Lanes<RNNCell<OPTIONS>> {
  // fused_lanes.metal describes the members. There is one gate and one lane, so each block is number 0, there is no
  // constant, and no sum over lanes.
  using Cell = RNNCell<OPTIONS>;
  enum { LANES = 1, WRITER = 0, TWO_PRODUCTS = 0, FIRST = 1 };

  static constexpr int gate_block(int) { return 0; }
  static constexpr int operand_block(int) { return 0; }
  static constexpr int slot_block(int, int) { return 0; }

  template <class Arrays>
  static float constant_of(thread const Arrays&, int, int, int, int) { return 0.0f; }

  template <int WANTED>
  static void sum_of_unit(thread float*, int) {}

  // Compute one step and return h. y: on entry the input's part of the unit's preactivation, on return the whole one.
  // sums: the recurrent product. A parameter without a name is one that only the lanes of other cells read.
  static float forward(
      int, float, float, float, float, thread const float* sums, thread float&, thread float& y) {
    y += sums[0];
    return activate(Cell::activation(0), y);
  }

  // Compute one step in reverse. h: the new h. dh: on entry the gradient of h, on return 0. d: on entry the cotangent
  // of the preactivation (the gradient that the caller gives for it as an output), on return its whole gradient.
  static void backward(
      int, float, float, float, float, float h, float, thread float& dh, thread float&, thread float& d) {
    d = dh * slope(Cell::activation(0), h) + d;
    dh = 0.0f;
  }
};
