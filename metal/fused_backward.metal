// The steps of fused.metal in reverse: from the gradients that h, gates, hT and an LSTM's c, cT have from outside (dh,
// dgates, dhT, dc, dcT, in the shapes of those) to dz, dh0, dc0.
//
//   dh_t = mask_next * (d_next Wh) + what reaches h_t past the product + dh[t];   d_t, ... = cell_backward(dh_t, ...)
//
//   beside         an LSTM's dc [T, B, D H], or a GRU's q [D, T, B, H]
//   d_out          [T, B, D G H] or absent: d
//   states, first  [T, B, D H] and [B, D H]: what the cell keeps after each step and before the first, c or h
// d is dz, but for a GRU's candidate, whose product gets dz_n r. It stands in `vectors`, [2][ROWS][padded G H], the two
// halves by turns; of a cell with two products dz_n, for r's gradient, in the first [ROWS][padded H] and dz_r, dz_z
// behind it. Every lane of a unit keeps its dh, dc and state; each of four reads one number of state before, dh, beside,
// mask, and of the gates its own.
template <int CELL, int H, int UNITS, int ROWS, int RESIDENT, class Index, class S, class G, class X, class X0, class W,
    class E, class M, class L, class D, class Q, class DG, class DT, class DCT, class DO, class DC0>
void fused_backward(
    G gates, X states, X0 first, W packed, E extra, M mask, L lengths, D dh, Q beside, DG dgates, DT dhT, DCT dcT,
    const constant int* sizes, device S* dz, DO d_out, device S* dh0, DC0 dc0, threadgroup float4* vectors, uint2 group,
    uint index, uint threads) {
  constexpr bool TWO = TWO_PRODUCTS<CELL>;
  constexpr int GROUP = LANES * UNITS, FIRST = RUNS_OF<H, GROUP>, K = TWO ? (GATES - 1) * H : GATES * H;
  constexpr int RUNS = RUNS_OF<K, GROUP>, COUNT = UNITS * (RUNS + (TWO ? FIRST : 0)), ROW = GROUP * RUNS;
  constexpr int HALF = ROWS * (TWO ? GROUP * FIRST : ROW), SIZE = HALF + ROWS * ROW, OWN = LANES > 1 ? 0 : 1;
  Sweep sweep = {};
  read_sizes(sizes, group.y, sweep);
  const int s = int(index) % GROUP, gate = s % LANES, unit = int(index) / LANES;
  const int row = operand_block(CELL, gate), block = gate_block(CELL, gate) < 0 ? row : gate_block(CELL, gate);
  const bool real = H % (32 / LANES) == 0 || unit < H;
  const bool has_gate = real && (GATES == LANES || gate_block(CELL, gate) >= 0);
  const long step = time_step(sweep, 1, H), gate_step = GATES * step, first_at = first_time(sweep);
  const long last = sweep.reverse ? 0 : sweep.stop - 1 - sweep.start, rows = long(sweep.B) * H;
  // What comes before the launch's first time index in the arrays that have all of them; of states the step before it.
  const Index earlier = Index(first_at * step), earlier_gates = Index(GATES) * earlier;
  const Index before = earlier + Index(sweep.reverse ? step : -step);
  const device vec<S, 4>* read = vectors_of_lane<COUNT, S>(packed, sweep.direction, index, threads);
  vec<S, 4> kept[RESIDENT > 0 ? RESIDENT : 1];
#pragma clang loop unroll(full)
  for (int n = 0; n < RESIDENT; ++n) kept[n] = read[32 * n];
  for (int n = int(index); n < SIZE; n += int(threads)) vectors[n] = float4(0.0f);
  const float p = real ? lane_constant<CELL>(extra, sweep.direction, gate, H, unit) : 0.0f;
  float dh_now[ROWS], dc_now[ROWS], now[ROWS];
  int length[ROWS];
  Index at[ROWS], gate_at[ROWS], beside_at[ROWS], mask_at[ROWS];
  const Index stride = Index(sweep.reverse ? step : -step), mask_stride = sweep.masks_differ ? stride : 0;
  const Index beside_stride = Index(sweep.reverse ? rows : -rows);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group.x) * ROWS + r, sweep.B - 1);
    const long item = place_in(sweep, b, 1, 0, H, unit);
    at[r] = Index(last * step + item);
    gate_at[r] = Index(last * gate_step + place_in(sweep, b, GATES, block, H, unit));
    beside_at[r] = Index(((long(sweep.direction) * sweep.T + first_at + last) * sweep.B + b) * H + unit);
    mask_at[r] = Index((sweep.masks_differ ? (first_at + last) * step : 0) + item);
    length[r] = value_at(lengths, b, sweep.T);
    dh_now[r] = real ? value_at(dhT, item, 0.0f) : 0.0f;
    dc_now[r] = real ? value_at(dcT, item, 0.0f) : 0.0f;
    now[r] = of_lane<LANES>(real && gate == 0 ? float(states[time_of(sweep, sweep.stop - 1) * step + item]) : 0.0f, 0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    const int t = time_of(sweep, n);
    threadgroup float* current = (threadgroup float*)(vectors + (TWO ? 0 : n & 1) * HALF);
    float number[ROWS][3 * OWN + 1], y[ROWS], d[ROWS], direct[ROWS], mask_of[ROWS], sums[ROWS][UNITS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      number[r][0] = 0.0f;
      y[r] = has_gate ? value_at(gates, gate_at[r] + earlier_gates, 0.0f) : 0.0f;
      d[r] = has_gate ? value_at(dgates, gate_at[r] + earlier_gates, 0.0f) : 0.0f;
    }
    if (real && gate == 0 && n > 0)
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) number[r][0] = float(states[at[r] + before]);
    if (real && gate == 0 && (is_present(lengths) || (is_present(first) && n == 0)))
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) {
        const Index item = at[r] - Index(t - int(first_at)) * Index(step);
        if (is_present(lengths) && sweep.reverse ? t + 1 == length[r] : n == 0)
          number[r][0] = value_at(first, item, 0.0f);
      }
    if (real && is_present(dh) && (LANES == 1 || gate == 1))
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) number[r][OWN] = value_at(dh, at[r] + earlier, 0.0f);
    if (real && is_present(beside) && (LANES == 1 || gate == 2))
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r)
        number[r][2 * OWN] = value_at(beside, APART ? beside_at[r] : at[r] + earlier, 0.0f);
    if (real && is_present(mask) && (LANES == 1 || gate == 3))
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) number[r][3 * OWN] = value_at(mask, mask_at[r], 1.0f);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      const bool live = !is_present(lengths) || t < length[r];
      float seen[4] = {of_lane<LANES>(number[r][0], 0)}, dc = dc_now[r];
      direct[r] = dh_now[r], mask_of[r] = 1.0f;
      if (is_present(dh)) direct[r] += of_lane<LANES>(number[r][OWN], 1);
      if (is_present(beside)) seen[2] = of_lane<LANES>(number[r][2 * OWN], 2);
      if (is_present(mask)) mask_of[r] = of_lane<LANES>(number[r][3 * OWN], 3);
      step_back_of_lanes<CELL>(gate, y[r], p, seen, now[r], direct[r], dc, d[r]);
      dc_now[r] = live ? dc : dc_now[r];
      now[r] = seen[0];
      const S result = S(live ? d[r] : 0.0f);
      if (has_gate && (!TWO || gate > 0)) dz[gate_at[r]] = result;
      if (real && (TWO ? gate == LANES - 1 : row >= 0)) {
        store(d_out, gate_at[r], float(result));
        current[4 * r * (TWO ? GROUP * FIRST : ROW) + (TWO ? 0 : row * H) + unit] = float(result);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if constexpr (TWO) {
      clear<ROWS, UNITS>(sums);
      add_product<ROWS, UNITS, FIRST, GROUP, 0, 1, 1, RESIDENT, GROUP * FIRST>(sums, kept, read, vectors + s);
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) {
        sum_over_units<UNITS, 1, 1, LANES>(sums[r]);
        const float reset = of_lane<LANES>(y[r], 0), dr = sum_over_lanes<LANES>(sums[r][0]) * mask_of[r];
        if (gate == 0) d[r] = gru_reset_backward<CELL>(reset, d[r] + dr * now[r]);
        direct[r] += dr * reset;
        const S result = S(!is_present(lengths) || t < length[r] ? d[r] : 0.0f);
        if (real && gate == 0) dz[gate_at[r]] = result;
        if (real && gate < 2) ((threadgroup float*)(vectors + HALF))[4 * r * ROW + (row > operand_block(CELL, LANES - 1) ? row - 1 : row) * H + unit] = float(result);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    clear<ROWS, UNITS>(sums);
    add_product<ROWS, UNITS, RUNS, GROUP, TWO ? FIRST * UNITS : 0, 1, 1, RESIDENT, ROW>(
        sums, kept, read, (TWO ? vectors + HALF : (threadgroup float4*)current) + s);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      sum_over_units<UNITS, 1, 1, LANES>(sums[r]);
      const float dh_before = sum_over_lanes<LANES>(sums[r][0]) * mask_of[r] + direct[r];
      dh_now[r] = !is_present(lengths) || t < length[r] ? dh_before : dh_now[r];
      at[r] += stride;
      gate_at[r] += Index(GATES) * stride;
      beside_at[r] += beside_stride;
      mask_at[r] += mask_stride;
    }
    read += unknown_zero(sweep);
  }
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const long item = place_in(sweep, min(int(group.x) * ROWS + r, sweep.B - 1), 1, 0, H, unit);
    if (!real) continue;
    if (gate == 0) dh0[item] = S(dh_now[r]);
    if (gate == LANES - 1) store(dc0, item, dc_now[r]);
  }
}
