// The LSTM in stepwise_backward.metal. extra: the peephole [D, 4H].

constant constexpr int GATES = 4, PRODUCT_GATES = 4, SEGMENTS = 1;
constant constexpr bool CARRIES = true, CARRIES_DH = false;

template <int CELL, class S, class G, class L>
void find_row(thread const Following<CELL, S, G, L>& x, int b, int, thread FollowingRow<S, G>& row) {
  row.dz = x.dz + place(*x.s, 0, b, x.s->K);
  row.r = x.gates;
  row.candidate = false;
}

// carry: in the gradient of c, out that of c_prev. dz: in that of the gates from outside.
template <int CELL, class E>
void cell_backward(
    thread const Step& s, int j, E extra, thread const float (&y)[4], float c, float c_prev, float, float dm,
    thread float& carry, thread float (&dz)[4]) {
  float p[4];
  for (int gate = 0; gate < 4; ++gate) p[gate] = value_at(extra, (4 * s.d + place_of(CELL, gate)) * s.H + j, 0.0f);
  lstm_cell_backward<CELL>(y, p, c_prev, c, dm, carry, dz);
}
