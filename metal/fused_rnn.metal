// The step of the plain RNN, h = s(a), in the kernels that run all time steps in one launch and divide the product
// among lanes. Each hidden unit has one lane. The preactivation a is stored as the cell's only gate, number 0, so every
// block is number 0. RNNCell<OPTIONS> (cell_rnn.metal) is the cell of one unit.

// How the one lane of a unit computes a step. fused_lanes.metal explains the members of this struct. Parameters without
// a name are for other cells.
template <int OPTIONS>
struct Lanes<RNNCell<OPTIONS>> {
  using Cell = RNNCell<OPTIONS>;
  enum { LANES = 1, WRITER = 0, TWO_PRODUCTS = 0, FIRST = 1 };

  static constexpr int gate_block(int) { return 0; }
  static constexpr int operand_block(int) { return 0; }
  static constexpr int slot_block(int, int) { return 0; }

  // Return 0, because a plain RNN has no constant per unit, such as a peephole weight.
  template <class Arrays>
  static float constant_of(thread const Arrays&, int, int, int, int) { return 0.0f; }

  // Do nothing: the unit has one lane, so there are no sums to add up over its lanes.
  template <int WANTED>
  static void sum_of_unit(thread float*, int) {}

  // Compute one step and return h. y: on entry the input's part of the unit's preactivation, on return the whole one.
  // sums: the recurrent product.
  static float forward(
      int, float, float, float, float, thread const float* sums, thread float&, thread float& y) {
    y += sums[0];
    return activate(Cell::activation(0), y);
  }

  // Compute one step in reverse. h: the new h. dh: on entry the gradient of h, on return the part of the gradient of
  // h_prev that does not go through the recurrent product: 0 in a plain RNN. d: on entry the cotangent of the
  // preactivation (the gradient that the caller gives for it as an output), on return its whole gradient.
  static void backward(
      int, float, float, float, float, float h, float, thread float& dh, thread float&, thread float& d) {
    d = dh * slope(Cell::activation(0), h) + d;
    dh = 0.0f;
  }
};
