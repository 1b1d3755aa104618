// A recurrence over a whole sequence, forward; fused.metal has the arrays and the arrangement of the threads.
//
//   a_t = z_t + (mask_t * h_prev) Wh^T;   gates, state, h = cell(a_t, h_prev, state)
//
// The masked h of the step before stands in `vectors`, [2][ROWS][padded H], the two halves by turns; of a cell with two
// products in the first, and the second product's operand r * mask * h_prev in the second. gates may be absent.
template <int CELL, int H, int UNITS, int ROWS, int RESIDENT, class S, class Z, class H0, class C0, class W, class E,
    class M, class L, class N, class C, class G, class CT>
void fused_forward(
    Z z, H0 h0, C0 c0, W Wh, E extra, M mask, L lengths, const constant int* sizes, N numbers, device S* h, C c,
    G gates, device S* hT, CT cT, threadgroup float4* vectors, uint2 group, uint index, uint threads, uint lane) {
  constexpr int GROUP = LANES * UNITS, RUNS = GROUP * RUNS_OF<H, GROUP>, HALF = ROWS * RUNS;
  Sweep sweep = {};
  read_sizes(sizes, group.y, H, sweep);
  const float forget_bias = value_at(numbers, 0, 0.0f), limit = value_at(numbers, 1, 0.0f);
  const int s = int(index) % GROUP, gate = s % LANES, first_unit = int(index) / GROUP * UNITS;
  const int unit = first_unit + s / LANES, b0 = int(group.x) * ROWS, block = gate_block(CELL, gate);
  const long step = time_step(sweep, 1, H), gate_step = GATES * step;
  const W weights = Wh + long(sweep.direction) * GATES * H * H;
  int rows_at[GROUP], length[ROWS];
  vec<S, 4> kept[GROUP * RESIDENT];
  for (int v = 0; v < GROUP; ++v)
    rows_at[v] = weight_row(weight_block(CELL, v % LANES), first_unit + v / LANES, GATES, H);
  keep_runs<GROUP, RESIDENT, GROUP, S>(weights, rows_at, GATES * H, H, s, kept);
  for (int n = int(index); n < 2 * HALF; n += int(threads)) vectors[n] = float4(0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float p = unit < H ? lane_constant<CELL>(extra, sweep.direction, gate, H, unit) : 0.0f;
  float h_now[ROWS], c_now[ROWS], a[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    const long at = place_in(sweep, b0 + r, 1, 0, H, unit);
    const bool real = b0 + r < sweep.B && unit < H;
    length[r] = b0 + r < sweep.B ? value_at(lengths, b0 + r, sweep.T) : 0;
    h_now[r] = real ? value_at(h0, at, 0.0f) : 0.0f;
    c_now[r] = real ? value_at(c0, at, 0.0f) : 0.0f;
    if (real && gate == LANES - 1)
      ((threadgroup float*)vectors)[4 * ((TWO_PRODUCTS<CELL> ? 0 : sweep.start & 1) * HALF + r * RUNS) + unit] =
          h_now[r] * value_at(mask, time_of(sweep, sweep.start) * sweep.mask_step + at, 1.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.start; n < sweep.stop; ++n) {
    const int t = time_of(sweep, n), local = t - first_time(sweep);
    threadgroup float4* before = vectors + (TWO_PRODUCTS<CELL> ? 0 : n & 1) * HALF;
    threadgroup float4* after = vectors + (TWO_PRODUCTS<CELL> ? 0 : ~n & 1) * HALF;
    for (int r = 0; r < ROWS; ++r) {
      const bool has_z = b0 + r < sweep.B && unit < H && block >= 0;
      a[r] = has_z ? float(z[t * gate_step + place_in(sweep, b0 + r, GATES, block, H, unit)]) : 0.0f;
      a[r] += product_of_group<GROUP, LANES, GROUP, FIRST_PRODUCT<CELL>, RESIDENT, H, S>(
          kept, weights, rows_at, GATES * H, before + r * RUNS, s);
    }
    if constexpr (TWO_PRODUCTS<CELL>) {
      threadgroup float4* operand = vectors + HALF;
      for (int r = 0; r < ROWS; ++r) {
        float reset[LANES];
        share(gru_reset<CELL>(a[r]), int(lane), reset);
        if (gate < LANES - 1) continue;
        const int at = 4 * r * RUNS + unit;
        ((threadgroup float*)operand)[at] = reset[0] * ((threadgroup const float*)before)[at];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int r = 0; r < ROWS; ++r)
        a[r] += product_of_group<GROUP, LANES, GROUP, 1 << (LANES - 1), RESIDENT, H, S>(
            kept, weights, rows_at, GATES * H, operand + r * RUNS, s);
    }
    for (int r = 0; r < ROWS; ++r) {
      const bool real = b0 + r < sweep.B && unit < H, live = t < length[r];
      const long item = place_in(sweep, b0 + r, 1, 0, H, unit), at = local * step + item;
      float state = c_now[r], y = a[r];
      const S m = S(step_of_lanes<CELL>(gate, int(lane), p, forget_bias, limit, h_now[r], state, y));
      h_now[r] = live ? float(m) : h_now[r];
      c_now[r] = live ? state : c_now[r];
      if (real && block >= 0)
        store(gates, local * gate_step + place_in(sweep, b0 + r, GATES, block, H, unit), live ? y : 0.0f);
      if (real && gate == 0) store(c, at, live ? state : 0.0f);
      if (!real || gate < LANES - 1) continue;
      h[at] = live ? m : S(0.0f);
      if (n + 1 < sweep.stop)
        ((threadgroup float*)after)[4 * r * RUNS + unit] =
            h_now[r] * value_at(mask, time_of(sweep, n + 1) * sweep.mask_step + item, 1.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int r = 0; r < ROWS; ++r) {
    if (b0 + r >= sweep.B || unit >= H) continue;
    if (gate == LANES - 1) hT[place_in(sweep, b0 + r, 1, 0, H, unit)] = S(h_now[r]);
    if (gate == 0) store(cT, place_in(sweep, b0 + r, 1, 0, H, unit), c_now[r]);
  }
}
