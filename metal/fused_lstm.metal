// The LSTM step in the kernels that run all time steps in one launch and divide the product among lanes. Four adjacent
// lanes share a hidden unit: lane n computes gate n (0 i, 1 f, 2 g, 3 o). Lane 3 also has the states c and h.
//
//   i, f, g, o = s(a)      c = f c_prev + i g, clipped to +-limit      h = o s_output(c)
//
// a: the preactivation z + h_prev Wh^T, with z from the input, plus forget bias and peephole term. LSTMCell<OPTIONS>
// (cell_lstm.metal) is the cell of one unit. activate_own<OPTIONS, N>, slope_own: the activation of the lane's gate,
// one of the first N, and its derivative. sum_over_lanes(x): the sum of x over the lanes of a unit. of_lane<4>(x, n):
// the x of the unit's lane n. simd_shuffle_xor(x, n): the x of the lane whose number is (own number) ^ n, an exclusive
// or.

// How the four lanes of a unit compute a step. fused_lanes.metal explains the members of this struct.
template <int OPTIONS>
struct Lanes<LSTMCell<OPTIONS>> {
  using Cell = LSTMCell<OPTIONS>;
  // FIRST: the product is for all four gates (binary 1111 = 15).
  enum { LANES = 4, WRITER = 3, TWO_PRODUCTS = 0, FIRST = 15 };

  // slot_block: slot n of the lane has the rows of Wh of gate n ^ lane (exclusive or). So slot 0 belongs to the lane's
  // own gate.
  static constexpr int gate_block(int lane) { return Cell::block(lane); }
  static constexpr int operand_block(int lane) { return Cell::block(lane); }
  static constexpr int slot_block(int n, int lane) { return Cell::block(n ^ lane); }

  // Return the peephole weight of the lane's gate, from the array peephole [D, 4H]; 0 without peepholes.
  template <class Arrays>
  static float constant_of(thread const Arrays& a, int direction, int lane, int H, int unit) {
    return value_at(a.peephole, (4l * direction + Cell::block(lane)) * H + unit, 0.0f);
  }

  // Add up the partial sums of the four lanes of a unit, so that each lane gets the whole sum of its own gate in
  // slots[0]. On entry slots[n] of a lane is its part of the sum of gate n ^ lane. So slots[2] belongs to the gate of
  // lane ^ 2; the first shuffle sends it to that lane.
  template <int WANTED>
  static void sum_of_unit(thread float* slots, int) {
    slots[0] += simd_shuffle_xor(slots[2], 2);
    slots[1] += simd_shuffle_xor(slots[3], 2);
    slots[0] += simd_shuffle_xor(slots[1], 1);
  }

  // Compute one step and return h; the result is valid in lane 3 only. gate: the lane's number, which is that of its
  // gate. p: the gate's peephole weight. limit: the limit of c. sums[0]: the gate's recurrent product. y: on entry the
  // input's part of the preactivation, on return the gate. c: in lane 3, on entry c_prev, on return the new c; other
  // lanes have no valid c. The parameter without a name, h_prev, is for other cells. Lane 3 reads i, f and g from the
  // lanes 3 ^ 3 = 0, 3 ^ 2 = 1 and 3 ^ 1 = 2. With peepholes lane 3 sends c_prev to all four lanes, because the gates'
  // peepholes read it.
  static float forward(
      int gate, float p, float forget_bias, float limit, float, thread const float* sums, thread float& c,
      thread float& y) {
    const float a = y + sums[0], c_prev = Cell::PEEPHOLE == Cell::NO_PEEPHOLE ? c : quad_broadcast(c, WRITER);
    y = activate_own<OPTIONS, 4>(gate, Cell::preactivation(gate, a, p, c_prev, forget_bias));
    c = Cell::state(simd_shuffle_xor(y, 3), simd_shuffle_xor(y, 2), simd_shuffle_xor(y, 1), c_prev, limit);
    if (Cell::PEEPHOLE == Cell::O_SEES_CURRENT && gate == Cell::GATE_O) y = Cell::gate(gate, a, p, c, forget_bias);
    return y * activate(Cell::activation(Cell::OUTPUT), c);
  }

  // Compute one step in reverse; each lane computes the gradient of its own gate. LSTMCell::backward has the equations.
  // gate: the lane's number, which is that of its gate. y, p: the gate and its peephole weight. c: the new c.
  // dc_outside: the cotangent of c (the gradient that the caller gives for it). limit: the limit of c. The last three
  // parameters are changed:
  //   dh: the gradient of h; on return 0, because an LSTM has no path from h_prev to h besides the product
  //   dc: the gradient of c from later steps; on return the gradient of c_prev
  //   d: the cotangent of the lane's gate; on return the gradient of its preactivation
  static void backward(
      int gate, float y, float p, float c_prev, float dc_outside, float c, float limit, thread float& dh,
      thread float& dc, thread float& d) {
    const float s = activate(Cell::activation(Cell::OUTPUT), c), own_slope = slope_own<OPTIONS, 4>(gate, y);
    dc = Cell::state_backward(dc + dc_outside, dh, of_lane<LANES>(y, Cell::GATE_O), s);
    if constexpr (Cell::PEEPHOLE == Cell::O_SEES_CURRENT)
      dc += of_lane<LANES>(p * Cell::gate_backward(d, dh, s, own_slope), Cell::GATE_O);
    gates_backward(gate, y, p, c_prev, c, limit, s, dh, dc, d);
  }

  // Compute the gradients of the gates and of c_prev, as the last part of a step in reverse. gate: the lane's number,
  // y: its gate, p: its peephole weight. c: the new c. s: s_output(c), of which o is the factor; with a norm of c,
  // fused_norm.metal calls this function with s_output of the normalised c. dh: the gradient of h, on return 0. dc: on
  // entry the whole gradient of c, on return that of c_prev. d: on entry the cotangent of the lane's gate, on return
  // the gradient of its preactivation.
  static void gates_backward(
      int gate, float y, float p, float c_prev, float c, float limit, float s, thread float& dh, thread float& dc,
      thread float& d) {
    if constexpr (Cell::STOPS != 0)
      dc = Cell::clip_backward(
          dc, of_lane<LANES>(y, Cell::GATE_I), of_lane<LANES>(y, Cell::GATE_F), of_lane<LANES>(y, Cell::GATE_G), c_prev,
          c, limit);
    // In a step each gate is multiplied by one other factor: i g, f c_prev and o s_output(c). The gradient of a gate is
    // the gradient of this product times the other factor: g for i, i for g, c_prev for f, s_output(c) for o. The lanes
    // of i and g, whose numbers differ in one bit, get the factor from each other.
    const float neighbour = simd_shuffle_xor(y, Cell::GATE_I ^ Cell::GATE_G);
    const float factor = gate == Cell::GATE_F ? c_prev : neighbour;
    d = Cell::gate_backward(
        d, gate == Cell::GATE_O ? dh : dc, gate == Cell::GATE_O ? s : factor, slope_own<OPTIONS, 4>(gate, y));
    dc *= of_lane<LANES>(y, Cell::GATE_F);
    // The term of o is 0 here if its peephole reads the new c, because `backward` has already added it to dc.
    if constexpr (Cell::PEEPHOLE != Cell::NO_PEEPHOLE)
      dc += sum_over_lanes<LANES>(Cell::PEEPHOLE == Cell::O_SEES_CURRENT && gate == Cell::GATE_O ? 0.0f : d * p);
    dh = 0.0f;
  }
};
