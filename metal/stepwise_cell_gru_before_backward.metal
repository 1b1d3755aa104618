// The GRU in stepwise_backward.metal, with the reset before the candidate's product: the gradients of z and n. Those of r
// and of what goes into that product are left to stepwise_gru_reset_backward.metal, which writes the step's row.

constant constexpr int GATES = 3, PRODUCT_GATES = 2, SEGMENTS = 2;
constant constexpr bool CARRIES = true, CARRIES_DH = true;

// dz of r, then that of z.
template <int CELL, class S, class G, class L>
void find_row(thread const Following<CELL, S, G, L>& x, int b, int segment, thread FollowingRow<S, G>& row) {
  row.dz = x.dz + place(*x.s, 0, b, 3 * x.H) + place_of(CELL, segment) * x.H;
  row.r = x.gates;
  row.candidate = false;
}

// h: the state before. The gradient of r stays what it is from outside.
template <int CELL, class E>
void cell_backward(
    thread const Step&, int, E, thread const float (&y)[3], float, float h, float, float dh, thread float& carry,
    thread float (&dz)[3]) {
  carry += dh;
  gru_cell_backward<CELL>(y, h, carry, dz);
}
