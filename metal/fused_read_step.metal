// What the fused kernels read backward of a step besides its gates: four numbers of a unit of a batch item, which are
// the state before it, dh, beside and the mask.

// Of ROWS items, whose places and lengths these are: those that lane `lane` of N reads, number k lane k, or all of them
// where it is the only one. earlier: what lies before the launch's first time index in [T, B, D H], in which two time
// indices are `step` apart.
template <int N, int ROWS, class Index, class X, class X0, class L, class D, class Q, class M>
void read_step(
    thread const Sweep& sweep, int n, int lane, thread const Place<Index>* at, Index earlier, Index step,
    thread const int* length, X states, X0 first, L lengths, D dh, Q beside, M mask,
    thread float (*number)[N > 1 ? 1 : 4]) {
  constexpr int OWN = N > 1 ? 0 : 1;
  const int t = time_of(sweep, n);
  const Index before = earlier + (sweep.reverse ? step : -step);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) number[r][0] = 0.0f;
  if (lane == 0 && n > 0)
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][0] = float(states[at[r].state + before]);
  if (lane == 0 && (is_present(lengths) || (is_present(first) && n == 0)))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r)
      if (is_present(lengths) && sweep.reverse ? t + 1 == length[r] : n == 0)
        number[r][0] = value_at(first, at[r].state - Index(t - first_time(sweep)) * step, 0.0f);
  if (is_present(dh) && lane == (N > 1 ? 1 : 0))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][OWN] = value_at(dh, at[r].state + earlier, 0.0f);
  if (is_present(beside) && lane == (N > 1 ? 2 : 0))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r)
      number[r][2 * OWN] = value_at(beside, APART ? at[r].apart : at[r].state + earlier, 0.0f);
  if (is_present(mask) && lane == (N > 1 ? 3 : 0))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][3 * OWN] = value_at(mask, at[r].mask, 1.0f);
}

// What every lane of a unit then has of an item; without an array 0, and 1 of the mask.
template <int N, class D, class Q, class M>
void share_step(thread const float (&number)[N > 1 ? 1 : 4], D dh, Q beside, M mask, thread float (&seen)[4]) {
  constexpr int OWN = N > 1 ? 0 : 1;
  seen[0] = of_lane<N>(number[0], 0);
  seen[1] = is_present(dh) ? of_lane<N>(number[OWN], 1) : 0.0f;
  seen[2] = is_present(beside) ? of_lane<N>(number[2 * OWN], 2) : 0.0f;
  seen[3] = is_present(mask) ? of_lane<N>(number[3 * OWN], 3) : 1.0f;
}
