// The plain cell in the fused kernels: one lane to a unit.

constant constexpr int GATES = 1, LANES = 1;
template <int CELL> constant constexpr bool TWO_PRODUCTS = false;
template <int CELL> constant constexpr int FIRST_PRODUCT = 1;
constexpr int gate_block(int, int) { return 0; }
constexpr int weight_block(int, int) { return 0; }

template <int CELL>
float lane_constant(Absent, int, int, int, int) { return 0.0f; }

// A step. y: the preactivation. Returns h.
template <int CELL>
float step_of_lanes(int, int, float, float, float, float, thread float&, thread float& y) { return rnn_cell<CELL>(y); }
