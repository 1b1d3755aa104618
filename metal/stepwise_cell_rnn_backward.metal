// The plain cell in stepwise_backward.metal.

constant constexpr int GATES = 1, PRODUCT_GATES = 1, SEGMENTS = 1;
constant constexpr bool CARRIES = false, CARRIES_DH = false;

template <int CELL, class S, class G, class L>
void find_row(thread const Following<CELL, S, G, L>& x, int b, int, thread FollowingRow<S, G>& row) {
  row.dz = x.dz + place(*x.s, 0, b, x.s->K);
  row.r = x.gates;
  row.candidate = false;
}

template <int CELL, class E>
void cell_backward(
    thread const Step&, int, E, thread const float (&)[1], float h, float, float, float dh, thread float&,
    thread float (&dz)[1]) {
  dz[0] = rnn_cell_backward<CELL>(h, dh, dz[0]);
}
