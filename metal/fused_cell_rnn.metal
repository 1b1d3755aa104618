// The plain cell in the fused kernels: one lane to a unit.

constant constexpr int GATES = 1, LANES = 1, PRODUCTS = 1, WRITER = 0;
constant constexpr bool APART = false;
template <int CELL> constant constexpr bool TWO_PRODUCTS = false;
template <int CELL> constant constexpr int FIRST_PRODUCT = 1;
constexpr int gate_block(int, int) { return 0; }
constexpr int operand_block(int, int) { return 0; }
constexpr int slot_block(int, int, int) { return 0; }
constexpr int product_block(int, int) { return 0; }

template <int CELL>
float lane_constant(Absent, int, int, int, int) { return 0.0f; }

template <int CELL, int WANTED>
void sum_of_unit(thread float*, int) {}

// A step. y: in z, out the preactivation. Returns h.
template <int CELL>
float step_of_lanes(int, float, float, float, float, thread const float* sums, thread float&, thread float& y) {
  y += sums[0];
  return rnn_cell<CELL>(y);
}

// A step of a unit, whose only lane's place in a simdgroup does not matter. y: in z, out the preactivation. Returns h.
template <int CELL>
float step_of_unit(
    thread const float (&sums)[1], thread const float (&)[1], float, float, float, thread float&,
    thread float (&y)[1]) {
  y[0] += sums[0];
  return rnn_cell<CELL>(y[0]);
}
