// A unit of a batch item in the fused kernels backward: what it begins with, and what is read of a step besides gates,
// four numbers, which are the state before the step, dh, beside and the mask.
//
// at: its place; dh, dc: gradients from later steps; now: the state after the step; y, d: a lane's gate and its
// gradient; past: what of dh reaches h_prev past the product; mask: the product's factor.
template <class Index>
struct Item {
  Place<Index> at;
  int length;
  float dh, dc, now, y, d, past, mask;
};

template <class Index, class L, class DT, class DCT>
void begin_item(
    thread const Sweep& sweep, int b, int gates, int block, int H, int unit, bool real, L lengths, DT dhT, DCT dcT,
    thread Item<Index>& item) {
  const long place = place_in(sweep, b, 1, 0, H, unit);
  first_place<true>(sweep, b, gates, block, H, unit, item.at);
  item.length = b < sweep.B ? value_at(lengths, b, sweep.T) : 0;
  item.dh = real ? value_at(dhT, place, 0.0f) : 0.0f;
  item.dc = real ? value_at(dcT, place, 0.0f) : 0.0f;
}

// The numbers of step n, of ROWS items: lane k of N reads number k, or the only lane all. earlier: what lies before the
// launch's first time index in [T, B, D H], in which two time indices are `step` apart.
template <int N, int ROWS, class Index, class X, class X0, class L, class D, class Q, class M>
void read_step(
    thread const Sweep& sweep, int n, int lane, thread const Item<Index>* items, Index earlier, Index step, X states,
    X0 first, L lengths, D dh, Q beside, M mask, thread float (*number)[N == 1 ? 4 : 1]) {
  constexpr int OWN = N == 1 ? 1 : 0;
  const int t = time_of(sweep, n);
  const Index before = earlier + (sweep.reverse ? step : -step);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) number[r][0] = 0.0f;
  if (lane == 0 && n > 0)
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][0] = float(states[items[r].at.state + before]);
  if (lane == 0 && (is_present(lengths) || (is_present(first) && n == 0)))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r)
      if (is_present(lengths) && sweep.reverse ? t + 1 == items[r].length : n == 0)
        number[r][0] = value_at(first, items[r].at.state - Index(t - first_time(sweep)) * step, 0.0f);
  if (is_present(dh) && lane == (N == 1 ? 0 : 1))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][OWN] = value_at(dh, items[r].at.state + earlier, 0.0f);
  if (is_present(beside) && lane == (N == 1 ? 0 : 2))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r)
      number[r][2 * OWN] = value_at(beside, APART ? items[r].at.apart : items[r].at.state + earlier, 0.0f);
  if (is_present(mask) && lane == (N == 1 ? 0 : 3))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][3 * OWN] = value_at(mask, items[r].at.mask, 1.0f);
}

// What every lane of a unit then has of an item: state before and beside in `seen`; without an array 0, of the mask 1.
template <int N, class Index, class D, class Q, class M>
void share_step(
    thread const float (&number)[N == 1 ? 4 : 1], D dh, Q beside, M mask, thread Item<Index>& item,
    thread float (&seen)[4]) {
  constexpr int OWN = N == 1 ? 1 : 0;
  seen[0] = of_lane<N>(number[0], 0);
  seen[2] = is_present(beside) ? of_lane<N>(number[2 * OWN], 2) : 0.0f;
  item.past = item.dh + (is_present(dh) ? of_lane<N>(number[OWN], 1) : 0.0f);
  item.mask = is_present(mask) ? of_lane<N>(number[3 * OWN], 3) : 1.0f;
}
