// What the product of a step forward multiplies: mask * h_before. h0, mask, lengths as in stepwise_forward.metal.
template <class S, class H0, class M, class L>
struct Previous {
  const device S* h;
  H0 h0;
  M mask;
  L lengths;
  thread const Step* s;
};

template <class X>
float operand(thread const X& x, int b, int k) {
  const bool starts = is_first(*x.s, value_at(x.lengths, b, x.s->T));
  const long at = place(*x.s, 0, b, x.s->K) + k;
  return (starts ? value_at(x.h0, at, 0.0f) : float(x.h[at])) * mask_at(*x.s, x.mask, x.s->t, b, k, x.s->K);
}
