// Compute the input of the recurrent product at every step, mask * h_prev, from which the gradient of Wh is computed.
// It is 0 past an item's end. Also write two more arrays. `ones` has a 1 per row, so that sums over all rows can be
// computed as products. `x_in` is x with zeros past an item's end, because NaN there would spoil the gradient of Wx. D:
// directions. H: the width of h. I: that of x. S: the dtype of the arrays. Thread (k, t, d) computes number k % H of
// batch item k / H, at time index t in direction d.
//
//   h     [T, B, D H]         h0  [B, D H]               lengths  [B]
//   mask  [T or 1, B, D H]    h_in  [D, T, B, H], output  ones  [T, B], output, may be absent
//   x, x_in  [T, B, I], input and output, may be absent
//   sizes  T; B; D; H; 1 if the only direction is the reverse one; 1 if each step has its own mask; I, or 0 if x is
//          absent
template <class S, class Arrays>
void recurrent_input(thread const Arrays& a, uint3 thread_index) {
  const int T = a.sizes[0], B = a.sizes[1], D = a.sizes[2], H = a.sizes[3];
  const int b = int(thread_index.x) / H, j = int(thread_index.x) % H;
  const int t = int(thread_index.y), direction = int(thread_index.z);
  if (b >= B) return;
  const bool reverse = direction == 1 || a.sizes[4] != 0;
  const int length = value_at(a.lengths, b, T);
  const long item = (long(b) * D + direction) * H + j, step = long(B) * D * H;
  float seen = 0.0f;
  if (t < length) {
    const bool starts = reverse ? t + 1 == length : t == 0;
    seen = starts ? value_at(a.h0, item, 0.0f) : float(a.h[(reverse ? t + 1 : t - 1) * step + item]);
    seen *= value_at(a.mask, (a.sizes[5] ? t * step : 0) + item, 1.0f);
  }
  const long row = long(t) * B + b;
  a.h_in[(long(direction) * T * B + row) * H + j] = S(seen);
  if (direction != 0) return;
  if (j == 0) store(a.ones, row, 1.0f);
  for (int k = j; k < a.sizes[6]; k += H) {  // the H threads of an item divide the I numbers of x
    const long at = row * a.sizes[6] + k;
    store(a.x_in, at, t < length ? value_at(a.x, at, 0.0f) : 0.0f);
  }
}
