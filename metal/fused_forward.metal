// A recurrence over a whole sequence, forward; fused.metal has the arrays and the arrangement of the threads.
//
//   a_t = z_t + (mask_t * h_prev) Wh^T;   gates, state, h = cell(a_t, keep_t * h_prev, keep_t * state)
//
// In mask_t there is keep_t already.
// The masked h of the step before stands in `vectors`, [2][ROWS][padded H], the two halves by turns; of a cell with two
// products in the first, and the second product's operand r * mask * h_prev in the second. One lane of a unit, WRITER,
// has its state. gates may be absent.

// Adds a product to the sums of every batch item, over the lanes of the group: fused_cell_*.metal say which lane has
// which then. WANTED: which of a unit's products, by bits.
template <int CELL, int UNITS, int ROWS, int RUNS, int WANTED, int RESIDENT, class V>
void add_products(
    thread float (&sums)[ROWS][UNITS * PRODUCTS], thread const V* kept, const device V* read,
    threadgroup const float4* x, int gate) {
  constexpr int GROUP = LANES * UNITS;
  add_product<ROWS, UNITS * PRODUCTS, RUNS, GROUP, 0, PRODUCTS, WANTED, RESIDENT, GROUP * RUNS>(sums, kept, read, x);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    sum_over_units<UNITS, PRODUCTS, WANTED, LANES>(sums[r]);
    sum_of_unit<CELL, WANTED>(sums[r], gate);
  }
}

template <int CELL, int H, int UNITS, int ROWS, int RESIDENT, class Index, class S, class V, class Z, class H0, class C0,
    class W, class E, class M, class F, class L, class N, class C, class G, class CT>
void fused_forward(
    Z z, H0 h0, C0 c0, W packed, E extra, M mask, F keeps, L lengths, const constant int* sizes, N numbers,
    device S* h, C c, G gates, device S* hT, CT cT, threadgroup float4* vectors, uint2 group, uint index, uint threads) {
  constexpr int GROUP = LANES * UNITS;
  using Share = LaneShare<V, H, GROUP, UNITS * PRODUCTS>;
  constexpr int RUNS = Share::RUNS, ROW = GROUP * RUNS, HALF = ROWS * ROW;
  constexpr bool TWO = TWO_PRODUCTS<CELL>;
  Sweep sweep = {};
  read_sizes(sizes, group.y, sweep);
  const float forget_bias = value_at(numbers, 0, 0.0f), limit = value_at(numbers, 1, 0.0f);
  const int s = int(index) % GROUP, gate = s % LANES, unit = int(index) / LANES, block = gate_block(CELL, gate);
  const int own = place_in_row<Share::SPAN, GROUP>(unit);
  const bool real = H % (32 / LANES) == 0 || unit < H, writes = real && gate == WRITER;
  const bool has_gate = real && (GATES == LANES || block >= 0);
  // What comes before the launch's first time index in z, which has all of them.
  const Index earlier = Index(first_time(sweep) * time_step(sweep, GATES, H));
  Place<Index> next;
  between_steps<false>(sweep, GATES, H, next);
  const device V* read = vectors_of_lane<Share::COUNT, V>(packed, sweep.direction, index, threads);
  V kept[RESIDENT == 0 ? 1 : RESIDENT];
  keep<RESIDENT>(read, kept);
  fill_with_zeros(vectors, 2 * HALF, index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float p = real ? lane_constant<CELL>(extra, sweep.direction, gate, H, unit) : 0.0f;
  float h_now[ROWS], c_now[ROWS];
  int length[ROWS];
  Place<Index> at[ROWS];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group.x) * ROWS + r, sweep.B - 1);
    const long item = place_in(sweep, b, 1, 0, H, unit);
    first_place<false>(sweep, b, GATES, block, H, unit, at[r]);
    length[r] = value_at(lengths, b, sweep.T);
    h_now[r] = writes ? value_at(h0, item, 0.0f) : 0.0f;
    c_now[r] = writes ? value_at(c0, item, 0.0f) : 0.0f;
    const int row = (TWO ? 0 : sweep.start & 1) * HALF + r * ROW;
    if (writes) number_at(vectors, row, own) = h_now[r] * value_at(mask, at[r].mask, 1.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.start; n < sweep.stop; ++n) {
    threadgroup float4* before = vectors + (TWO ? 0 : n & 1) * HALF;
    threadgroup float4* after = vectors + (TWO ? 0 : ~n & 1) * HALF;
    float y[ROWS], sums[ROWS][UNITS * PRODUCTS] = {};
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) y[r] = has_gate ? float(z[at[r].gate + earlier]) : 0.0f;
    add_products<CELL, UNITS, ROWS, RUNS, FIRST_PRODUCT<CELL>, RESIDENT>(sums, kept, read, before + s, gate);
    if constexpr (TWO) {
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) {
        const float reset = simd_shuffle_xor(gru_reset<CELL>(y[r] + sums[r][0]), 2);
        if (writes) number_at(vectors + HALF, r * ROW, own) = reset * number_at(before, r * ROW, own);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      add_products<CELL, UNITS, ROWS, RUNS, 4, RESIDENT>(sums, kept, read, vectors + HALF + s, gate);
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      const bool live = is_live(lengths, time_of(sweep, n), length[r]);
      const float factor = value_at(keeps, at[r].keep, 1.0f);
      float state = factor * c_now[r];
      const S m = S(step_of_lanes<CELL>(gate, p, forget_bias, limit, factor * h_now[r], sums[r], state, y[r]));
      h_now[r] = live ? float(m) : h_now[r];
      c_now[r] = live ? state : c_now[r];
      if (has_gate) store(gates, at[r].gate, live ? y[r] : 0.0f);
      if (writes) store(c, at[r].state, live ? state : 0.0f);
      if (writes) h[at[r].state] = live ? m : S(0.0f);
      if (writes && (!is_present(mask) || n + 1 < sweep.stop))
        number_at(after, r * ROW, own) = h_now[r] * value_at(mask, at[r].mask + next.mask, 1.0f);
      advance(at[r], next);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    read += unknown_zero(sweep);
  }
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    if (!writes) continue;
    const long item = place_in(sweep, min(int(group.x) * ROWS + r, sweep.B - 1), 1, 0, H, unit);
    hT[item] = S(h_now[r]);
    store(cT, item, c_now[r]);
  }
}
