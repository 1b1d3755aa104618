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

// Sums of products of the columns of a group's units with the vectors, by batch item: of a lane's unit, in all its lanes.
template <int UNITS, int ROWS, int RUNS, int FROM, int RESIDENT, class V>
void products_of_columns(
    thread float (&sum)[ROWS], thread const V* kept, const device V* read, threadgroup const float4* x) {
  constexpr int GROUP = LANES * UNITS;
  float sums[ROWS][UNITS] = {};
  add_product<ROWS, UNITS, RUNS, GROUP, FROM, 1, 1, RESIDENT, GROUP * RUNS>(sums, kept, read, x);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    sum_over_units<UNITS, 1, 1, LANES>(sums[r]);
    sum[r] = sum_over_lanes<LANES>(sums[r][0]);
  }
}

template <int CELL, int H, int UNITS, int ROWS, int RESIDENT, class Index, class S, class G, class X, class X0, class W,
    class E, class M, class L, class D, class Q, class DG, class DT, class DCT, class DO, class DC0>
void fused_backward(
    G gates, X states, X0 first, W packed, E extra, M mask, L lengths, D dh, Q beside, DG dgates, DT dhT, DCT dcT,
    const constant int* sizes, device S* dz, DO d_out, device S* dh0, DC0 dc0, threadgroup float4* vectors, uint2 group,
    uint index, uint threads) {
  constexpr bool TWO = TWO_PRODUCTS<CELL>;
  constexpr int GROUP = LANES * UNITS, FIRST = RUNS_OF<H, GROUP>, RUNS = RUNS_OF<(TWO ? GATES - 1 : GATES) * H, GROUP>;
  constexpr int ROW = GROUP * (TWO ? FIRST : RUNS), HALF = ROWS * ROW, SIZE = HALF + ROWS * GROUP * RUNS;
  Sweep sweep = {};
  read_sizes(sizes, group.y, sweep);
  const int gate = int(index) % LANES, s = int(index) % GROUP, unit = int(index) / LANES;
  const int row = operand_block(CELL, gate), block = gate_block(CELL, gate) < 0 ? row : gate_block(CELL, gate);
  const bool real = H % (32 / LANES) == 0 || unit < H, has_gate = real && (GATES == LANES || gate != LANES - 1);
  const Index step = Index(time_step(sweep, 1, H)), earlier = Index(first_time(sweep)) * step;
  Place<Index> next;
  between_steps<true>(sweep, GATES, H, next);
  const device vec<S, 4>* read =
      vectors_of_lane<UNITS * (RUNS + (TWO ? FIRST : 0)), S>(packed, sweep.direction, index, threads);
  vec<S, 4> kept[RESIDENT > 0 ? RESIDENT : 1];
  keep<RESIDENT>(read, kept);
  fill_with_zeros(vectors, SIZE, index, threads);
  const float p = real ? lane_constant<CELL>(extra, sweep.direction, gate, H, unit) : 0.0f;
  float dh_now[ROWS], dc_now[ROWS], now[ROWS], sum[ROWS];
  int length[ROWS];
  Place<Index> at[ROWS];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group.x) * ROWS + r, sweep.B - 1);
    const long item = place_in(sweep, b, 1, 0, H, unit), last = time_of(sweep, sweep.stop - 1);
    first_place<true>(sweep, b, GATES, block, H, unit, at[r]);
    length[r] = value_at(lengths, b, sweep.T);
    dh_now[r] = real ? value_at(dhT, item, 0.0f) : 0.0f;
    dc_now[r] = real ? value_at(dcT, item, 0.0f) : 0.0f;
    now[r] = of_lane<LANES>(real && gate == 0 ? float(states[last * time_step(sweep, 1, H) + item]) : 0.0f, 0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    const int t = time_of(sweep, n);
    threadgroup float4* current = vectors + (TWO ? 0 : n & 1) * HALF;
    float number[ROWS][LANES > 1 ? 1 : 4], y[ROWS], d[ROWS], direct[ROWS], mask_of[ROWS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      y[r] = has_gate ? value_at(gates, at[r].gate + Index(GATES) * earlier, 0.0f) : 0.0f;
      d[r] = has_gate ? value_at(dgates, at[r].gate + Index(GATES) * earlier, 0.0f) : 0.0f;
    }
    read_step<LANES, ROWS>(
        sweep, n, real ? gate : -1, at, earlier, step, length, states, first, lengths, dh, beside, mask, number);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      const bool live = !is_present(lengths) || t < length[r];
      float seen[4], dc = dc_now[r];
      share_step<LANES>(number[r], dh, beside, mask, seen);
      direct[r] = dh_now[r] + seen[1], mask_of[r] = seen[3];
      step_back_of_lanes<CELL>(gate, y[r], p, seen, now[r], direct[r], dc, d[r]);
      dc_now[r] = live ? dc : dc_now[r];
      now[r] = seen[0];
      const S result = S(live ? d[r] : 0.0f);
      if (has_gate && (!TWO || gate > 0)) dz[at[r].gate] = result;
      if (real && (TWO ? gate == LANES - 1 : row >= 0)) {
        store(d_out, at[r].gate, float(result));
        ((threadgroup float*)current)[4 * r * ROW + (TWO ? 0 : row * H) + unit] = float(result);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if constexpr (TWO) {
      products_of_columns<UNITS, ROWS, FIRST, 0, RESIDENT>(sum, kept, read, vectors + s);
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) {
        const float reset = of_lane<LANES>(y[r], 0), dr = sum[r] * mask_of[r];
        if (gate == 0) d[r] = gru_reset_backward<CELL>(reset, d[r] + dr * now[r]);
        direct[r] += dr * reset;
        const S result = S(!is_present(lengths) || t < length[r] ? d[r] : 0.0f);
        if (real && gate == 0) dz[at[r].gate] = result;
        if (real && gate < 2) ((threadgroup float*)(vectors + HALF + r * GROUP * RUNS))[(row > operand_block(CELL, LANES - 1) ? row - 1 : row) * H + unit] = float(result);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    products_of_columns<UNITS, ROWS, RUNS, TWO ? FIRST * UNITS : 0, RESIDENT>(
        sum, kept, read, (TWO ? vectors + HALF : current) + s);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      const float dh_before = sum[r] * mask_of[r] + direct[r];
      dh_now[r] = !is_present(lengths) || t < length[r] ? dh_before : dh_now[r];
      advance(at[r], next);
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
