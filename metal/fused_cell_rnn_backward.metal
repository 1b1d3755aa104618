// A step of the plain cell back. h: of this step. dh: in its gradient, out what of it reaches h_prev past the product:
// nothing. d: in the gradient the preactivation has from outside, out the whole one.
template <int CELL>
void step_back_of_lanes(
    int, float, float, thread const float (&)[4], float h, thread float& dh, thread float&, thread float& d) {
  d = rnn_cell_backward<CELL>(h, dh, d);
  dh = 0.0f;
}

template <int CELL>
void step_back_of_unit(
    thread const float (&y)[1], thread const float (&)[1], thread const float (&seen)[4], float h, thread float& dh,
    thread float& dc, thread float (&d)[1]) {
  step_back_of_lanes<CELL>(0, y[0], 0.0f, seen, h, dh, dc, d[0]);
}
