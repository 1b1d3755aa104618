// The steps of fused.metal in reverse: from the gradients that h, gates, hT and an LSTM's c, cT have from outside (dh,
// dgates, dhT, dc, dcT, in the shapes of those) to dz, dh0, dc0.
//
//   dh_t = mask_next * (d_next Wh) + keep_next * what reaches h_t past the product + dh[t]
//   d_t, ... = cell_backward(dh_t, ...)
//
//   beside         an LSTM's dc [T, B, D H], or a GRU's q [D, T, B, H]
//   d_out          [T, B, D G H] or absent: d
//   carry          [T, B, D H] float or absent: what reaches keep * c, or keep * h past the product
//   states, first  [T, B, D H] and [B, D H]: what the cell keeps after each step and before the first, c or h
// d is dz, but for a GRU's candidate, whose product gets dz_n r. It stands in `vectors`, [2][ROWS][padded G H], the two
// halves by turns; of a cell with two products dz_n, for r's gradient, in the first [ROWS][padded H] and dz_r, dz_z
// behind it. Every lane of a unit keeps its dh, dc and state; each of four reads one number of state before, dh,
// beside, mask, and of the gates its own.

// Sums of products of the columns of a group's units with the vectors, by batch item: a lane has those of its unit.
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

// Of a cell with two products, between them: from the sum of the first to r's gradient and what the second multiplies,
// which r and z write to `vectors`, [ROWS][ROW].
template <int CELL, int H, int ROWS, int ROW, class Index, class S, class L>
void reset_back(
    thread Item<Index> (&items)[ROWS], thread const float (&sum)[ROWS], int gate, int unit, bool real, int t, L lengths,
    device S* dz, threadgroup float4* vectors) {
  const int row = operand_block(CELL, gate), rank = row > operand_block(CELL, LANES - 1) ? row - 1 : row;
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const float reset = of_lane<LANES>(items[r].y, 0), dr = sum[r] * items[r].mask;
    if (gate == 0) items[r].d = gru_reset_backward<CELL>(reset, items[r].d + dr * items[r].now);
    items[r].past += dr * reset;
    const S result = S(is_live(lengths, t, items[r].length) ? items[r].d : 0.0f);
    if (real && gate == 0) dz[items[r].at.gate] = result;
    if (real && gate < 2) number_at(vectors, r * ROW, rank * H + unit) = float(result);
  }
}

template <int CELL, int H, int UNITS, int ROWS, int RESIDENT, class Index, class S, class G, class X, class X0, class W,
    class E, class M, class F, class L, class D, class Q, class DG, class DT, class DCT, class DO, class DK, class DC0>
void fused_backward(
    G gates, X states, X0 first, W packed, E extra, M mask, F keeps, L lengths, D dh, Q beside, DG dgates,
    DT dhT, DCT dcT, const constant int* sizes, device S* dz, DO d_out, DK carry, device S* dh0, DC0 dc0,
    threadgroup float4* vectors, uint2 group, uint index, uint threads) {
  constexpr bool TWO = TWO_PRODUCTS<CELL>;
  constexpr int GROUP = LANES * UNITS, FIRST = RUNS_OF<H, GROUP>, RUNS = RUNS_OF<(TWO ? GATES - 1 : GATES) * H, GROUP>;
  constexpr int ROW = GROUP * (TWO ? FIRST : RUNS), HALF = ROWS * ROW, SIZE = HALF + ROWS * GROUP * RUNS;
  Sweep sweep = {};
  read_sizes(sizes, group.y, sweep);
  const int gate = int(index) % LANES, s = int(index) % GROUP, unit = int(index) / LANES;
  const int row = operand_block(CELL, gate), block = gate_block(CELL, gate) == -1 ? row : gate_block(CELL, gate);
  const bool real = H % (32 / LANES) == 0 || unit < H, has_gate = real && (GATES == LANES || gate != LANES - 1);
  const Index step = Index(time_step(sweep, 1, H)), earlier = Index(first_time(sweep)) * step;
  Place<Index> next;
  between_steps<true>(sweep, GATES, H, next);
  const device vec<S, 4>* read =
      vectors_of_lane<UNITS * (RUNS + (TWO ? FIRST : 0)), vec<S, 4>>(packed, sweep.direction, index, threads);
  vec<S, 4> kept[RESIDENT == 0 ? 1 : RESIDENT];
  keep<RESIDENT>(read, kept);
  fill_with_zeros(vectors, SIZE, index, threads);
  const float p = real ? lane_constant<CELL>(extra, sweep.direction, gate, H, unit) : 0.0f;
  Item<Index> items[ROWS];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group.x) * ROWS + r, sweep.B - 1);
    begin_item(sweep, b, GATES, block, H, unit, real, lengths, dhT, dcT, items[r]);
    items[r].now = of_lane<LANES>(real && gate == 0 ? float(states[items[r].at.state + earlier]) : 0.0f, 0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    const int t = time_of(sweep, n);
    threadgroup float4* current = vectors + (TWO ? 0 : n & 1) * HALF;
    float number[ROWS][LANES == 1 ? 4 : 1], sum[ROWS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      items[r].y = has_gate ? value_at(gates, items[r].at.gate + Index(GATES) * earlier, 0.0f) : 0.0f;
      items[r].d = has_gate ? value_at(dgates, items[r].at.gate + Index(GATES) * earlier, 0.0f) : 0.0f;
    }
    read_step<LANES, ROWS>(
        sweep, n, real ? gate : -1, items, earlier, step, states, first, lengths, dh, beside, mask, number);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      const bool live = is_live(lengths, t, items[r].length);
      float seen[4], dc = items[r].dc;
      share_step<LANES>(number[r], dh, beside, mask, items[r], seen);
      const float before = seen[0], factor = value_at(keeps, items[r].at.keep, 1.0f);
      seen[0] *= factor;
      step_back_of_lanes<CELL>(gate, items[r].y, p, seen, items[r].now, items[r].past, dc, items[r].d);
      if (real && gate == 0) store(carry, items[r].at.state, live ? dc + items[r].past : 0.0f);
      items[r].dc = live ? factor * dc : items[r].dc;
      items[r].past *= factor;
      items[r].now = before;
      const S result = S(live ? items[r].d : 0.0f);
      if (has_gate && (!TWO || gate != 0)) dz[items[r].at.gate] = result;
      if (real && (TWO ? gate == LANES - 1 : row >= 0)) {
        store(d_out, items[r].at.gate, float(result));
        number_at(current, r * ROW, (TWO ? 0 : row * H) + unit) = float(result);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if constexpr (TWO) {
      products_of_columns<UNITS, ROWS, FIRST, 0, RESIDENT>(sum, kept, read, current + s);
      reset_back<CELL, H, ROWS, GROUP * RUNS>(items, sum, gate, unit, real, t, lengths, dz, vectors + HALF);
      current = vectors + HALF;
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    products_of_columns<UNITS, ROWS, RUNS, TWO ? FIRST * UNITS : 0, RESIDENT>(sum, kept, read, current + s);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      const float before = sum[r] * items[r].mask + items[r].past;
      items[r].dh = is_live(lengths, t, items[r].length) ? before : items[r].dh;
      advance(items[r].at, next);
    }
    read += unknown_zero(sweep);
  }
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const long item = place_in(sweep, min(int(group.x) * ROWS + r, sweep.B - 1), 1, 0, H, unit);
    if (real && gate == 0) dh0[item] = S(items[r].dh);
    if (real && gate == LANES - 1) store(dc0, item, items[r].dc);
  }
}
