// A unit of a batch item in a sweep backward: its state, and the numbers of a step that it reads besides the gates.
//
// Arrays, besides those of fused.metal: the gradients from outside, in the shapes of what they belong to (dh, dgates,
// dhT and of an LSTM dc, dcT), and
//   states, states0  [T, B, D H] and [B, D H]: c after each step and before the first; h of a cell without c
//   q                [D, T, B, H]: the candidate's recurrent product of a GRU
// So a unit reads up to four numbers of a step: the state before it, dh, dc or q, the mask. Each of four lanes reads one
// of them and hands it to the others; a lane that has its unit alone reads all four.
//
// at: the unit's places; dh, dc: the gradients from later steps; now: the state after the step; y, d: a lane's gate and
// its gradient; past: what of dh reaches h_prev past the product; mask: the factor on the product.
template <class Index>
struct Item {
  Place<Index> at;
  int length;
  float dh, dc, now, y, d, past, mask;
};

// Begin with the gradients of the final states. b may be past the last item: then the length is 0, and nothing is live.
template <class Index, class Arrays>
void begin_item(
    thread const Sweep& sweep, thread const Arrays& a, int b, int gates, int block, int H, int unit, bool real,
    thread Item<Index>& item) {
  const long place = place_in(sweep, b, 1, 0, H, unit);
  first_place<true>(sweep, b, gates, block, H, unit, item.at);
  item.length = b < sweep.B ? value_at(a.lengths, b, sweep.T) : 0;
  item.dh = real ? value_at(a.dhT, place, 0.0f) : 0.0f;
  item.dc = real ? value_at(a.dcT, place, 0.0f) : 0.0f;
}

// Read the numbers of step n of ROWS items: lane k of N reads number k, or the only lane all. earlier: what lies before
// the launch's first time index in [T, B, D H], in which two time indices are `step` apart.
template <int N, int ROWS, class Index, class Arrays>
void read_step(
    thread const Sweep& sweep, thread const Arrays& a, int n, int lane, thread const Item<Index>* items, Index earlier,
    Index step, thread float (*number)[N == 1 ? 4 : 1]) {
  constexpr int OWN = N == 1 ? 1 : 0;
  const int t = time_of(sweep, n);
  const Index before = earlier + (sweep.reverse ? step : -step);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) number[r][0] = 0.0f;
  // The state after the step before.
  if (lane == 0 && n > 0)
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][0] = float(a.states[items[r].at.state + before]);
  // At an item's first step that is states0: at its last time index where it runs in reverse, which lengths tell.
  if (lane == 0 && (is_present(a.lengths) || (is_present(a.states0) && n == 0)))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r)
      if (is_present(a.lengths) && sweep.reverse ? t + 1 == items[r].length : n == 0)
        number[r][0] = value_at(a.states0, items[r].at.state - Index(t - first_time(sweep)) * step, 0.0f);
  if (is_present(a.dh) && lane == (N == 1 ? 0 : 1))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][OWN] = value_at(a.dh, items[r].at.state + earlier, 0.0f);
  if (is_present(a.dc) && lane == (N == 1 ? 0 : 2))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][2 * OWN] = value_at(a.dc, items[r].at.state + earlier, 0.0f);
  if (is_present(a.q) && lane == (N == 1 ? 0 : 2))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][2 * OWN] = value_at(a.q, items[r].at.q, 0.0f);
  if (is_present(a.mask) && lane == (N == 1 ? 0 : 3))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][3 * OWN] = value_at(a.mask, items[r].at.mask, 1.0f);
}

// Give all lanes of a unit the numbers that read_step read: the state before, and dc or q, in `before` and `dc_or_q`.
// Without an array these are 0, the mask is 1.
template <int N, class Index, class Arrays>
void share_step(
    thread const float (&number)[N == 1 ? 4 : 1], thread const Arrays& a, thread Item<Index>& item,
    thread float& before, thread float& dc_or_q) {
  constexpr int OWN = N == 1 ? 1 : 0;
  before = of_lane<N>(number[0], 0);
  dc_or_q = is_present(a.dc) || is_present(a.q) ? of_lane<N>(number[2 * OWN], 2) : 0.0f;
  item.past = item.dh + (is_present(a.dh) ? of_lane<N>(number[OWN], 1) : 0.0f);
  item.mask = is_present(a.mask) ? of_lane<N>(number[3 * OWN], 3) : 1.0f;
}
