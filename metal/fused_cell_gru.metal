// The GRU in the fused kernels: four lanes to a unit, of which the first three have the gates r, z, n, the third h.

constant constexpr int GATES = 3, LANES = 4, PRODUCTS = 3, WRITER = 2;
constant constexpr bool APART = true;
template <int CELL> constant constexpr bool TWO_PRODUCTS = RESETS_BEFORE<CELL>;
template <int CELL> constant constexpr int FIRST_PRODUCT = RESETS_BEFORE<CELL> ? 3 : 7;

// The H-block of z, gates, dz that a lane has, and of what its gradient multiplies, -1 for none; that of the rows of Wh
// in slot n of a lane, or of product n.
constexpr int gate_block(int cell, int gate) { return gate <= GATE_N ? place_of(cell, gate) : -1; }
constexpr int operand_block(int cell, int gate) {
  return gate == GATE_N ? -1 : place_of(cell, gate > GATE_N ? int(GATE_N) : gate);
}
constexpr int slot_block(int cell, int n, int) { return place_of(cell, n); }
constexpr int product_block(int cell, int n) { return place_of(cell, n); }

// A unit's own number out of bhn [D H].
template <int CELL, class E>
float lane_constant(E bhn, int direction, int, int H, int unit) {
  return value_at(bhn, long(direction) * H + unit, 0.0f);
}

// Out in slot 0 the sum of r in the first and third lane, that of z in the others; in slot 2 that of n, in all.
template <int CELL, int WANTED>
void sum_of_unit(thread float* slots, int gate) {
  if constexpr ((WANTED & 1) != 0) {
    const float r = slots[0], z = slots[1];
    const float mine = (gate & 1) ? z : r, given = (gate & 1) ? r : z;
    slots[0] = mine + simd_shuffle_xor(given, 1);
    slots[0] += simd_shuffle_xor(slots[0], 2);
  }
  if (WANTED & 4) slots[2] = sum_over_lanes<LANES>(slots[2]);
}

// A step. y: in the lane's z, out its gate; bhn: the unit's. Returns h, in the third lane.
template <int CELL>
float step_of_lanes(
    int gate, float bhn, float, float, float h_prev, thread const float* sums, thread float&, thread float& y) {
  const float a = y + sums[0];
  const float own = activate_own<CELL, 2>(gate & 1, a);
  const float r = simd_shuffle_xor(own, 2), z = simd_shuffle_xor(own, 3);
  const float n = gru_candidate<CELL>(y, r, sums[2] + bhn);
  y = gate == GATE_N ? n : own;
  return gru_state<CELL>(z, n, h_prev);
}

// A step of a unit in one lane. sums: the products; y: in z, out the gates. Returns h.
template <int CELL>
float step_of_unit(
    thread const float (&sums)[3], thread const float (&p)[4], float, float, float h_prev, thread float&,
    thread float (&y)[4]) {
  y[GATE_R] = gru_reset<CELL>(y[GATE_R] + sums[GATE_R]);
  y[GATE_Z] = activate(activation_of(CELL, GATE_Z), y[GATE_Z] + sums[GATE_Z]);
  y[GATE_N] = gru_candidate<CELL>(y[GATE_N], y[GATE_R], sums[GATE_N] + p[GATE_N]);
  return gru_state<CELL>(y[GATE_Z], y[GATE_N], h_prev);
}
