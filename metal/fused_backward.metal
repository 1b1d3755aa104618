// The steps of fused.metal in reverse: from the gradients that h, gates, hT and an LSTM's c, cT have from outside (dh,
// dgates, dhT, dc, dcT, in the shapes of those) to dz, dh0, dc0.
//
//   dh_t = mask_next * (d_next Wh) + what reaches h_t past the product + dh[t];   d_t, ... = cell_backward(dh_t, ...)
//
//   Wh_T           [D, H, G H]: Wh transposed
//   beside         an LSTM's dc [T, B, D H], or a GRU's q [D, T, B, H]
//   d_out          [T, B, D G H] or absent: d
//   states, first  [T, B, D H] and [B, D H]: what the cell keeps after each step and before the first, c or h
// d is dz, but for a GRU's candidate, whose product gets dz_n r. It stands in `vectors`, [2][ROWS][padded G H], the two
// halves by turns; of a cell with two products dz_n in the first, for r's gradient, and dz_r, dz_z in the second. Every
// lane of a unit keeps its dh, dc and state; each of four reads one number of state before, dh, beside, mask, and of
// the gates its own.
template <int CELL, int H, int UNITS, int ROWS, int RESIDENT, class S, class G, class X, class X0, class W, class E,
    class M, class L, class D, class Q, class DG, class DT, class DCT, class DO, class DC0>
void fused_backward(
    G gates, X states, X0 first, W Wh_T, E extra, M mask, L lengths, D dh, Q beside, DG dgates, DT dhT, DCT dcT,
    const constant int* sizes, device S* dz, DO d_out, device S* dh0, DC0 dc0, threadgroup float4* vectors, uint2 group,
    uint index, uint threads, uint lane) {
  constexpr int GROUP = LANES * UNITS, K = GATES * H, RUNS = GROUP * RUNS_OF<K, GROUP>, HALF = ROWS * RUNS;
  Sweep sweep = {};
  read_sizes(sizes, group.y, H, sweep);
  const int s = int(index) % GROUP, gate = s % LANES, first_unit = int(index) / GROUP * UNITS;
  const int unit = first_unit + s / LANES, b0 = int(group.x) * ROWS, block = gate_block(CELL, gate);
  const long step = time_step(sweep, 1, H), gate_step = GATES * step;
  const W weights = Wh_T + long(sweep.direction) * GATES * H * H;
  int rows_at[UNITS], length[ROWS];
  vec<S, 4> kept[UNITS * RESIDENT];
  for (int v = 0; v < UNITS; ++v) rows_at[v] = first_unit + v;
  keep_runs<UNITS, RESIDENT, GROUP, S>(weights, rows_at, H, K, s, kept);
  for (int n = int(index); n < 2 * HALF; n += int(threads)) vectors[n] = float4(0.0f);
  float p[LANES], dh_now[ROWS], dc_now[ROWS], now[ROWS], mask_now[ROWS], direct[ROWS], own[ROWS], reset[ROWS];
  share(unit < H ? lane_constant<CELL>(extra, sweep.direction, gate, H, unit) : 0.0f, int(lane), p);
  for (int r = 0; r < ROWS; ++r) {
    const long at = place_in(sweep, b0 + r, 1, 0, H, unit);
    const bool real = b0 + r < sweep.B && unit < H;
    length[r] = b0 + r < sweep.B ? value_at(lengths, b0 + r, sweep.T) : 0;
    dh_now[r] = real ? value_at(dhT, at, 0.0f) : 0.0f;
    dc_now[r] = real ? value_at(dcT, at, 0.0f) : 0.0f;
    now[r] = read_once<LANES>(states, time_of(sweep, sweep.stop - 1) * step + at, real, int(lane));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    const int t = time_of(sweep, n), local = t - first_time(sweep);
    threadgroup float4* current = vectors + (TWO_PRODUCTS<CELL> ? 0 : n & 1) * HALF;
    for (int r = 0; r < ROWS; ++r) {
      const int b = b0 + r, row = weight_block(CELL, gate);
      const bool real = b < sweep.B && unit < H, live = t < length[r], has_gate = real && block >= 0;
      const long gate_at = place_in(sweep, b, GATES, block, H, unit);
      float mine[4] = {}, seen[4], y[LANES], d[LANES] = {}, dc = dc_now[r];
      if (real) read_step<LANES, APART>(sweep, n, gate, b, H, unit, length[r], states, first, dh, beside, mask, mine);
      share_each<LANES>(mine, int(lane), seen);
      share(has_gate ? value_at(gates, t * gate_step + gate_at, 0.0f) : 0.0f, int(lane), y);
      if (is_present(dgates)) share(has_gate ? value_at(dgates, t * gate_step + gate_at, 0.0f) : 0.0f, int(lane), d);
      direct[r] = dh_now[r] + seen[1];
      step_back_of_lanes<CELL>(y, p, seen, now[r], direct[r], dc, d);
      own[r] = pick(d, gate);
      reset[r] = y[0];
      const S result = S(live ? own[r] : 0.0f);
      dc_now[r] = live ? dc : dc_now[r];
      now[r] = seen[0];
      mask_now[r] = seen[3];
      if (has_gate && (!TWO_PRODUCTS<CELL> || gate > 0)) dz[local * gate_step + gate_at] = result;
      if (!real || (TWO_PRODUCTS<CELL> ? gate < LANES - 1 : row < 0)) continue;
      store(d_out, local * gate_step + place_in(sweep, b, GATES, row, H, unit), float(result));
      ((threadgroup float*)current)[4 * r * RUNS + row * H + unit] = float(result);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if constexpr (TWO_PRODUCTS<CELL>) {
      for (int r = 0; r < ROWS; ++r) {
        const float dr =
            product_of_group<GROUP, LANES, UNITS, -1, RESIDENT, K, S>(kept, weights, rows_at, H, current + r * RUNS, s);
        if (gate == 0) own[r] = gru_reset_backward<CELL>(reset[r], own[r] + dr * now[r] * mask_now[r]);
        direct[r] += dr * reset[r] * mask_now[r];
        if (b0 + r >= sweep.B || unit >= H || gate > 1) continue;
        const S result = S(t < length[r] ? own[r] : 0.0f);
        if (gate == 0) dz[local * gate_step + place_in(sweep, b0 + r, GATES, block, H, unit)] = result;
        ((threadgroup float*)current)[4 * (HALF + r * RUNS) + block * H + unit] = float(result);
      }
      current += HALF;
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int r = 0; r < ROWS; ++r) {
      const float sum =
          product_of_group<GROUP, LANES, UNITS, -1, RESIDENT, K, S>(kept, weights, rows_at, H, current + r * RUNS, s);
      dh_now[r] = t < length[r] ? sum * mask_now[r] + direct[r] : dh_now[r];
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    if (b0 + r >= sweep.B || unit >= H) continue;
    if (gate == 0) dh0[place_in(sweep, b0 + r, 1, 0, H, unit)] = S(dh_now[r]);
    if (gate == LANES - 1) store(dc0, place_in(sweep, b0 + r, 1, 0, H, unit), dc_now[r]);
  }
}
