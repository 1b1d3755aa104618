// The GRU step in the kernels that run all time steps in one launch and divide the product among lanes. Four adjacent
// lanes share a hidden unit. Lanes 0, 1, 2 have the gates r, z, n; lane 2 also has h. In the backward pass lane 3 has
// the gradient of the recurrent product of the candidate n, which differs from the gradient of n's preactivation.
//
//   r, z = s(a)      h = z h_prev + (1 - z) n
//   n = s_n(a_n + r q), or s_n(a_n + q) if the reset comes before the product
//
// s and s_n are the activations of the gates r, z and of n. a is the preactivation, a_n that of n without q. q is the
// candidate's recurrent product with its bias bhn: h Wh_n^T + bhn, with r h for h if the reset comes before it.
// The option flip_z exchanges z and 1 - z. GRUCell<OPTIONS> (cell_gru.metal) is the cell of one unit, with functions
// for single gates and their gradients. activate_own<OPTIONS, N>: the activation of the lane's gate, one of the first
// N. sum_over_lanes(x): the sum of x over the lanes of a unit. of_lane<4>(x, n): the x of the unit's lane n.

// How the four lanes of a unit compute a step. fused_lanes.metal explains the members of this struct.
template <int OPTIONS>
struct Lanes<GRUCell<OPTIONS>> {
  using Cell = GRUCell<OPTIONS>;
  // TWO_PRODUCTS: if the reset comes before the candidate's product, that product needs r, so a step has two products.
  // FIRST: the first product is for r and z (1 + 2) if there are two, else for all gates (1 + 2 + 4).
  enum { LANES = 4, WRITER = 2, TWO_PRODUCTS = Cell::RESETS_BEFORE, FIRST = TWO_PRODUCTS ? 3 : 7 };

  // operand_block: lane 3 writes the block of the candidate n, because it has the gradient of the candidate's product;
  // lane 2 has that of n's preactivation and writes nothing. slot_block: slot n of every lane belongs to gate n.
  static constexpr int gate_block(int lane) { return lane <= Cell::GATE_N ? Cell::block(lane) : -1; }
  static constexpr int operand_block(int lane) {
    return lane == Cell::GATE_N ? -1 : Cell::block(lane > Cell::GATE_N ? int(Cell::GATE_N) : lane);
  }
  static constexpr int slot_block(int n, int) { return Cell::block(n); }

  // Return the unit's bias bhn from the array a.bhn [D H], or 0 if the call does not have this array.
  template <class Arrays>
  static float constant_of(thread const Arrays& a, int direction, int, int H, int unit) {
    return value_at(a.bhn, long(direction) * H + unit, 0.0f);
  }

  // Add up the partial sums of the four lanes of a unit. On entry each lane has a part of the sum of every gate: r, z,
  // n in slots[0], slots[1], slots[2]. WANTED: the gates to sum, one bit each: bits 0 and 1 for r and z, bit 2 (4) for
  // n. On return slots[0] is the sum of gate r in lanes 0 and 2, and of gate z in lanes 1 and 3; slots[2] is the sum of
  // gate n in all lanes. slots[1] is not used afterwards. In the first shuffle two lanes exchange parts. Each keeps its
  // part of the sum that it needs (mine), and sends its part of the sum that the other lane needs (given).
  template <int WANTED>
  static void sum_of_unit(thread float* slots, int lane) {
    if constexpr ((WANTED & 1) != 0) {
      const float r = slots[0], z = slots[1];
      const float mine = (lane & 1) ? z : r, given = (lane & 1) ? r : z;
      slots[0] = mine + simd_shuffle_xor(given, 1);
      slots[0] += simd_shuffle_xor(slots[0], 2);
    }
    if (WANTED & 4) slots[2] = sum_over_lanes<LANES>(slots[2]);
  }

  // Compute one step and return the new h; the result is valid only in lane 2, the lane of gate n. gate: the lane's
  // number. sums: the recurrent products. y: on entry the input's part of the lane's preactivation, on return the
  // lane's gate. Parameters without a name are for other cells. Lane 2 reads r from lane 0 and z from lane 1:
  // simd_shuffle_xor(x, d) reads x of lane (n ^ d), an exclusive or, where n is the number of this lane: 2 ^ 2 = 0 and
  // 2 ^ 3 = 1. The variable own is the gate r in lane 0 and z in lane 1, for which gate & 1 is 1; in the lanes 2 and 3
  // it is not used.
  static float forward(
      int gate, float bhn, float, float, float h_prev, thread const float* sums, thread float&, thread float& y) {
    const float a = y + sums[0];
    const float own = activate_own<OPTIONS, 2>(gate & 1, a);
    const float r = simd_shuffle_xor(own, 2), z = simd_shuffle_xor(own, 3);
    const float n = Cell::candidate(y, r, sums[2] + bhn);
    y = gate == Cell::GATE_N ? n : own;
    return Cell::state(z, n, h_prev);
  }

  // Compute one step in reverse. gate: the lane's number. y: its gate. q: the candidate's recurrent product. dh: on
  // entry the gradient of the new h, on return the part of the gradient of h_prev that does not go through the
  // products. d: on entry the cotangent of the lane's gate (the gradient that the caller gives for it), on return the
  // gradient of the gate's preactivation. In lane 3, which has no gate, d becomes the gradient of the candidate's
  // product. dz_n, dz_z, dz_r: the gradients of the three preactivations. Every lane computes all three. But dz_z and
  // dz_r need the lane's own d, so they are right only in the lane of their gate, and only this lane uses them. If the
  // reset comes before the product, the gradient of r needs the result of another product. It is computed later, and d
  // of lane 0 stays the cotangent. Parameters without a name are for other cells.
  static void backward(
      int gate, float y, float, float h_prev, float q, float, float, thread float& dh, thread float&,
      thread float& d) {
    const float r = of_lane<LANES>(y, Cell::GATE_R), z = of_lane<LANES>(y, Cell::GATE_Z);
    const float n = of_lane<LANES>(y, Cell::GATE_N);
    const float dz_n = Cell::candidate_backward(z, n, dh, of_lane<LANES>(d, Cell::GATE_N));
    const float dz_z = Cell::update_backward(z, n, h_prev, dh, d);
    const float dz_r = Cell::RESETS_BEFORE ? d : Cell::reset_backward(r, d + dz_n * q);
    const float of_product = Cell::RESETS_BEFORE ? dz_n : dz_n * r;
    d = gate == Cell::GATE_R ? dz_r : gate == Cell::GATE_Z ? dz_z : gate == Cell::GATE_N ? dz_n : of_product;
    dh = Cell::past_products(z, dh);
  }
};
