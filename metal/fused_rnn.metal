// The plain cell in lanes: one to a unit.
template <int OPTIONS>
struct Lanes<RNNCell<OPTIONS>> {
  using Cell = RNNCell<OPTIONS>;
  enum { LANES = 1, WRITER = 0, TWO_PRODUCTS = 0, FIRST = 1 };

  static constexpr int gate_block(int) { return 0; }
  static constexpr int operand_block(int) { return 0; }
  static constexpr int slot_block(int, int) { return 0; }

  template <class Arrays>
  static float constant_of(thread const Arrays&, int, int, int, int) { return 0.0f; }

  template <int WANTED>
  static void sum_of_unit(thread float*, int) {}

  // Compute a step and return h. y: in z, out the preactivation.
  static float forward(
      int, float, float, float, float, thread const float* sums, thread float&, thread float& y) {
    y += sums[0];
    return activate(Cell::activation(0), y);
  }

  // Compute a step in reverse. h: the new one; dh: in its gradient, out 0; d: in the gradient that the preactivation
  // has from outside, out the whole one.
  static void backward(
      int, float, float, float, float, float h, thread float& dh, thread float&, thread float& d) {
    d = dh * slope(Cell::activation(0), h) + d;
    dh = 0.0f;
  }
};
