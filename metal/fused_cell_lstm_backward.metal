// A step of the LSTM back, in every lane of a unit. y: the gates; seen: c_prev, then dc from outside; c: of this step.
// dh: in the gradient of h, out what of it reaches h_prev past the product; dc: in the gradient of c, out that of
// c_prev.
// d: in the gradients the gates have from outside, out by lane that of the preactivation.
template <int CELL>
void step_back_of_lanes(
    thread const float (&y)[4], thread const float (&p)[4], thread const float (&seen)[4], float c, thread float& dh,
    thread float& dc, thread float (&d)[4]) {
  dc += seen[2];
  lstm_cell_backward<CELL>(y, p, seen[0], c, dh, dc, d);
  dh = 0.0f;
}
