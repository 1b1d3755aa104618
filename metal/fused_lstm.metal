// The LSTM in lanes: four to a unit. Lane n computes gate n; lane 3 (gate o) has c and h.
template <int OPTIONS>
struct Lanes<LSTMCell<OPTIONS>> {
  using Cell = LSTMCell<OPTIONS>;
  enum { LANES = 4, WRITER = 3, TWO_PRODUCTS = 0, FIRST = 15 };

  static constexpr int gate_block(int lane) { return Cell::block(lane); }
  static constexpr int operand_block(int lane) { return Cell::block(lane); }
  static constexpr int slot_block(int n, int lane) { return Cell::block(n ^ lane); }

  // Return the peephole weight [D, 4H] of a lane's gate.
  template <class Arrays>
  static float constant_of(thread const Arrays& a, int direction, int lane, int H, int unit) {
    return value_at(a.peephole, (4l * direction + Cell::block(lane)) * H + unit, 0.0f);
  }

  // Sum over the lanes of a unit. Slot n of a lane is gate n ^ lane; out in slot 0 the whole sum of the lane's own
  // gate.
  template <int WANTED>
  static void sum_of_unit(thread float* slots, int) {
    slots[0] += simd_shuffle_xor(slots[2], 2);
    slots[1] += simd_shuffle_xor(slots[3], 2);
    slots[0] += simd_shuffle_xor(slots[1], 1);
  }

  // Compute a step and return h, in the last lane. y: in the lane's z, out its gate; c: in c_prev, out c, in the last
  // lane: from there its xor-neighbours at 3, 2, 1 are i, f, g. What the other lanes compute for c nobody reads.
  static float forward(
      int gate, float p, float forget_bias, float limit, float, thread const float* sums, thread float& c,
      thread float& y) {
    const float a = y + sums[0], c_prev = Cell::PEEPHOLE == Cell::NO_PEEPHOLE ? c : quad_broadcast(c, WRITER);
    y = activate_own<OPTIONS, 4>(gate, Cell::preactivation(gate, a, p, c_prev, forget_bias));
    c = Cell::state(simd_shuffle_xor(y, 3), simd_shuffle_xor(y, 2), simd_shuffle_xor(y, 1), c_prev, limit);
    if (Cell::PEEPHOLE == Cell::O_SEES_CURRENT && gate == Cell::GATE_O) y = Cell::gate(gate, a, p, c, forget_bias);
    return y * activate(Cell::activation(Cell::OUTPUT), c);
  }

  // Compute a step in reverse, the equations of LSTMCell::backward with the gates spread over the lanes. y, p: the
  // lane's gate and peephole weight; c: the new one; dc_outside: the gradient that it has from outside; dh: in the
  // gradient of h, out 0; dc: in the gradient of c from later steps, out that of c_prev; d: in the gradient that the
  // lane's gate has from outside, out that of its preactivation.
  static void backward(
      int gate, float y, float p, float c_prev, float dc_outside, float c, thread float& dh, thread float& dc,
      thread float& d) {
    const float s = activate(Cell::activation(Cell::OUTPUT), c), own_slope = slope_own<OPTIONS, 4>(gate, y);
    dc = Cell::state_backward(dc + dc_outside, dh, of_lane<LANES>(y, Cell::GATE_O), s);
    if constexpr (Cell::PEEPHOLE == Cell::O_SEES_CURRENT)
      dc += of_lane<LANES>(p * Cell::gate_backward(d, dh, s, own_slope), Cell::GATE_O);
    // The other factor beside a gate: of i it is g, of g it is i, two lanes apart; of f c_prev; of o s_output(c).
    const float neighbour = simd_shuffle_xor(y, Cell::GATE_I ^ Cell::GATE_G);
    const float factor = gate == Cell::GATE_F ? c_prev : neighbour;
    d = Cell::gate_backward(d, gate == Cell::GATE_O ? dh : dc, gate == Cell::GATE_O ? s : factor, own_slope);
    dc *= of_lane<LANES>(y, Cell::GATE_F);
    if constexpr (Cell::PEEPHOLE != Cell::NO_PEEPHOLE)
      dc += sum_over_lanes<LANES>(Cell::PEEPHOLE == Cell::O_SEES_CURRENT && gate == Cell::GATE_O ? 0.0f : d * p);
    dh = 0.0f;
  }
};
