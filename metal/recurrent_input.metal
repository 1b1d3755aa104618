// Compute h_in, the vectors that were multiplied with Wh at all steps: mask * h_prev, where h_prev is h of the step
// processed before, or h0 at an item's first step. Past an item's end h_in is 0. The kernel runs before the steps of a
// backward pass. With h_in the gradient of Wh is one product over all steps.
//
// The kernel also writes two arrays for other gradients. `ones` has a 1 for each time and item: a product with it sums
// over times and items, for the gradients of biases. `x_in` is x, but 0 past an item's end. If x were NaN there, its
// product with a gradient of 0 would still be NaN and spoil the gradient of Wx.
//
//   h     [T, B, D H]         h0  [B, D H]               lengths  [B]: the steps of each item
//   mask  [T or 1, B, D H]    h_in  [D, T, B, H], output  ones  [T, B], output, may be absent
//   x, x_in  [T, B, I], input and output, may be absent
//   sizes  T; B; D; H; 1 if the only direction is the reverse one; 1 if each step has its own mask; I, or 0 without x
//
// T: steps, B: batch items, D: directions, H: the width of h, I: the width of x, S: the dtype of the arrays.

// Thread (k, t, d) computes number k % H of batch item k / H, at time index t in direction d.
//   item   the position of the number in [B, D H]      step   how many numbers a time step of h has
//   seen   mask * h_prev at this step                   row    the position of the time and item in [T, B]
// The threads of direction 0 also write `ones` and `x_in`, which both directions share.
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
