// The LSTM in stepwise_forward.metal. extra: the peephole [D, 4H]; numbers: forget_bias, limit.

constant constexpr int GATES = 4, UNITS = 8;
constant constexpr bool CARRIES = true;

// q: the sums of the products. y: in the input's part of the preactivations, out the gates. state: in c_prev, out c.
template <int CELL, class E, class N>
float cell_forward(
    thread const Step& s, int j, E extra, N numbers, thread const float (&q)[4], thread float (&y)[4],
    thread float& state) {
  float p[4];
  for (int gate = 0; gate < 4; ++gate) {
    p[gate] = value_at(extra, (4 * s.d + place_of(CELL, gate)) * s.H + j, 0.0f);
    y[gate] += q[gate];
  }
  return lstm_cell<CELL>(y, p, state, numbers[0], numbers[1]);
}
