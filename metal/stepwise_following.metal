// What the stepwise kernels backward share: the step processed after a step, its dz, and dh_t out of a product.

// Its find_row is in stepwise_cell_*_backward.metal. dz: that of the row before, or dh_t of an LSTM with a projection; H:
// hidden units. Of a row those of a GRU's candidate are multiplied by r.
template <class S, class G>
struct FollowingRow {
  const device S* dz;
  G r;
  bool candidate;
};

template <int CELL, class S, class G, class L>
struct Following {
  using Row = FollowingRow<S, G>;
  const device S* dz;
  G gates;
  L lengths;
  thread const Step* s;
  int H;
};

template <class S, class G>
void move(thread FollowingRow<S, G>& row, int n) {
  row.dz += n;
  row.r = from(row.r, n);
}

template <int N, class S, class G>
void operands_at(thread const FollowingRow<S, G>& row, int k, thread float (&values)[N]) {
  take<N>(row.dz, k, 0.0f, values);
  if (!row.candidate) return;
  float r[N];
  take<N>(row.r, k, 1.0f, r);
#pragma clang loop unroll(full)
  for (int e = 0; e < N; ++e) values[e] *= r[e];
}

template <class S>
const device S* either(Absent, const device S* otherwise) { return otherwise; }
template <class S, class X>
const device S* either(const device X* row, const device S*) { return (const device S*)row; }

// The time index of an item's step processed after s; -1 where there is none.
inline int next_step(thread const Step& s, int length) {
  const int t = s.reverse ? min(s.t, length) - 1 : s.t + 1;
  return t < length ? t : -1;
}

// The gradient of h_t[b, j], of `width`: what the next step sends back, and what comes from outside.
template <class M, class D, class DT>
float dh_sum(
    thread const Step& s, threadgroup const float* sum, int length, int b, int j, int width, M mask, D dh, DT dhT) {
  const float outside = value_at(dh, place(s, s.t, b, width) + j, 0.0f);
  const int next = next_step(s, length);
  if (next < 0) return outside + value_at(dhT, place(s, 0, b, width) + j, 0.0f);
  return outside + *sum * mask_at(s, mask, next, b, j, width);
}
