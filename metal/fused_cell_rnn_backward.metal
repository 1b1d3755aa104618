// A step of the plain cell back. h: of this step. dh: in its gradient, out what of it reaches h_prev past the product:
// nothing.
// d: in the gradient the preactivation has from outside, out the whole one.
template <int CELL>
void step_back_of_lanes(
    thread const float (&)[1], thread const float (&)[1], thread const float (&)[4], float h, thread float& dh,
    thread float&, thread float (&d)[1]) {
  d[0] = rnn_cell_backward<CELL>(h, dh, d[0]);
  dh = 0.0f;
}
