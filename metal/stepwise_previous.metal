// What the product of a step forward multiplies: mask * h_before. h0, mask, lengths as in stepwise_forward.metal.
template <class S, class H0, class M>
struct PreviousRow {
  const device S* h;
  H0 h0;
  M mask;
  bool starts;
};

template <class S, class H0, class M, class L>
struct Previous {
  using Row = PreviousRow<S, H0, M>;
  const device S* h;
  H0 h0;
  M mask;
  L lengths;
  thread const Step* s;
};

template <class S, class H0, class M, class L>
void find_row(thread const Previous<S, H0, M, L>& x, int b, int, thread PreviousRow<S, H0, M>& row) {
  thread const Step& s = *x.s;
  const Index at = place(s, 0, b, s.K);
  row.h = x.h + at;
  row.h0 = from(x.h0, at);
  row.mask = from(x.mask, place(s, s.own_mask * s.t, b, s.K));
  row.starts = is_first(s, value_at(x.lengths, b, s.T));
}

template <class S, class H0, class M>
void move(thread PreviousRow<S, H0, M>& row, int n) {
  row.h += n;
  row.h0 = from(row.h0, n);
  row.mask = from(row.mask, n);
}

template <int N, class S, class H0, class M>
void operands_at(thread const PreviousRow<S, H0, M>& row, int k, thread float (&values)[N]) {
  float factors[N];
  if (row.starts)
    take<N>(row.h0, k, 0.0f, values);
  else
    take<N>(row.h, k, 0.0f, values);
  take<N>(row.mask, k, 1.0f, factors);
#pragma clang loop unroll(full)
  for (int e = 0; e < N; ++e) values[e] *= factors[e];
}
