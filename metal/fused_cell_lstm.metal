// The LSTM in the fused kernels: four lanes to a unit, of which lane n computes gate n; the last has c and h.

constant constexpr int GATES = 4, LANES = 4, PRODUCTS = 4, WRITER = 3;
constant constexpr bool APART = false;
template <int CELL> constant constexpr bool TWO_PRODUCTS = false;
template <int CELL> constant constexpr int FIRST_PRODUCT = 15;

// The H-block of z, gates, dz that a lane has, and of what its gradient multiplies; that of the rows of Wh in slot n of
// a lane, or of product n.
constexpr int gate_block(int cell, int gate) { return place_of(cell, gate); }
constexpr int operand_block(int cell, int gate) { return place_of(cell, gate); }
constexpr int slot_block(int cell, int n, int gate) { return place_of(cell, n ^ gate); }
constexpr int product_block(int cell, int n) { return place_of(cell, n); }

// A lane's own number out of the peephole [D, 4H].
template <int CELL, class E>
float lane_constant(E peephole, int direction, int gate, int H, int unit) {
  return value_at(peephole, (4l * direction + place_of(CELL, gate)) * H + unit, 0.0f);
}

// Slot n of a lane is gate n ^ (its own): out in slot 0 the sum of its own.
template <int CELL, int WANTED>
void sum_of_unit(thread float* slots, int) {
  slots[0] += simd_shuffle_xor(slots[2], 2);
  slots[1] += simd_shuffle_xor(slots[3], 2);
  slots[0] += simd_shuffle_xor(slots[1], 1);
}

// A step. y: in the lane's z, out its gate; c: in c_prev, out c, in the last lane. Returns h, there too.
template <int CELL>
float step_of_lanes(
    int gate, float p, float forget_bias, float limit, float, thread const float* sums, thread float& c,
    thread float& y) {
  const float a = y + sums[0], c_prev = PEEPHOLE<CELL> == NO_PEEPHOLE ? c : quad_broadcast(c, WRITER);
  y = activate_own<CELL, 4>(gate, lstm_preactivation<CELL>(gate, a, p, c_prev, forget_bias));
  c = lstm_state<CELL>(simd_shuffle_xor(y, 3), simd_shuffle_xor(y, 2), simd_shuffle_xor(y, 1), c_prev, limit);
  if (PEEPHOLE<CELL> == O_SEES_CURRENT && gate == GATE_O) y = lstm_gate<CELL>(GATE_O, a, p, c, forget_bias);
  return y * activate(activation_of(CELL, OUTPUT), c);
}

// A step of a unit in one lane. sums: the products; y: in z, out the gates; c: in c_prev, out c. Returns h.
template <int CELL>
float step_of_unit(
    thread const float (&sums)[4], thread const float (&p)[4], float forget_bias, float limit, float, thread float& c,
    thread float (&y)[4]) {
  for (int gate = 0; gate < 4; ++gate) y[gate] += sums[gate];
  return lstm_cell<CELL>(y, p, c, forget_bias, limit);
}
