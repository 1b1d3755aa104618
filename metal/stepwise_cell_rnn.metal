// The plain cell in stepwise_forward.metal.

constant constexpr int GATES = 1, UNITS = 32;
constant constexpr bool CARRIES = false;

// q: the sum of the product. y: in the input's part of the preactivation, out the preactivation.
template <int CELL, class E, class N>
float cell_forward(
    thread const Step&, int, E, N, thread const float (&q)[1], thread float (&y)[1], thread float&) {
  y[0] += q[0];
  return rnn_cell<CELL>(y[0]);
}
