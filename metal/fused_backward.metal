// The backward pass over all time steps in one launch, with the product divided among lanes. It computes dz, dh0 and
// dc0 from the cotangents (the gradients that the caller gives) of h, c, gates, hT and cT. fused.metal explains the
// names.
//
//   dh_t = mask_next * (d_next Wh) + keep_next * (the part that does not go through the product) + dh[t]
//   d_t, ... = cell_backward(dh_t, ...)
//
// "next" is the step that the forward pass processes after t. dz is the gradient of the preactivations. d is the
// gradient of the recurrent products. It equals dz, except for a GRU's candidate n, whose product is multiplied by the
// gate r: there d is dz_n r.
//
// `vectors` in threadgroup memory holds d of the current step, the operand of the product with Wh, in a double buffer
// [2][ROWS][padded G H]. A GRU whose reset comes before the product has two products per step. There `vectors` has two
// other parts: dz_n [ROWS][padded H] for the first product, from which the gradient of r is computed; then dz_r and
// dz_z [ROWS][padded 2 H] for the second product.
//
// Barriers: one per step, between writing d and the product that reads it. The halves of the double buffer alternate,
// so no lane overwrites numbers that another lane still reads. With two products there is a second barrier, between
// writing the gradient of r and the second product.
//
// Each of the LANES lanes of a unit has its own gate, and in items[r] a copy of the unit's dh, dc and states. C =
// CARRIED is 1 for an LSTM, else 0. norm, of_norm: the numbers that a lane needs for layer normalisation
// (fused_norm.metal); without it `absent`.

// Compute the backward product for ROWS batch items: their gradients x, in threadgroup memory, times columns of Wh.
//   sum[r]   the result for batch item r and the lane's unit; all lanes of the unit get it
//   x        points to the first number that this lane multiplies
//   FROM     the number of the lane's first weight vector for this product
// The arguments 1, 1 of add_product and sum_over_units: a unit has one sum, not one per gate, and its bit in the set of
// wanted sums is 1.
template <class Cell, int UNITS, int ROWS, int RUNS, int FROM, int RESIDENT, class V>
void products_of_columns(
    thread float (&sum)[ROWS], thread const V* resident, const device V* streamed, threadgroup const float4* x) {
  constexpr int LANES = Lanes<Cell>::LANES, GROUP = LANES * UNITS;
  float sums[ROWS][UNITS] = {};
  add_product<ROWS, UNITS, RUNS, GROUP, FROM, 1, 1, RESIDENT, GROUP * RUNS>(sums, resident, streamed, x);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    sum_over_units<UNITS, 1, 1, LANES>(sums[r]);
    sum[r] = sum_over_lanes<LANES>(sums[r][0]);
  }
}

// Compute the gradient of the gate r, for a GRU whose reset comes before the product; the function runs between the two
// products of a backward step. sum: the result of the first product, which is the gradient of r * mask * h_prev (`mask`
// includes keep). d_rh: the gradient of r * h_prev. From it the function computes the gradient of r's preactivation,
// and adds r d_rh, a part of the gradient of h_prev, to items[r].past. h_prev is in states[0]. Then lanes 0 and 1 of a
// unit write the gradients of r and z to `vectors` [ROWS][ROW], the operand of the second product. The gate axis of Wh
// has a block for the candidate n, too, but this operand has not. So gates behind n move up by one block (`rank`).
// real: whether the lane has a unit. t: the step's time index.
template <class Cell, int H, int ROWS, int ROW, class S, class Index, class Arrays>
void reset_back(
    thread Item<Cell, Index> (&items)[ROWS], thread const float (&sum)[ROWS], int lane, int unit, bool real, int t,
    thread const Arrays& a, threadgroup float4* vectors) {
  constexpr int LANES = Lanes<Cell>::LANES;
  const int row = Lanes<Cell>::operand_block(lane), rank = row > Lanes<Cell>::operand_block(LANES - 1) ? row - 1 : row;
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const float reset = of_lane<LANES>(items[r].y, 0), d_rh = sum[r] * items[r].mask;
    if (lane == 0) items[r].d = Cell::reset_backward(reset, items[r].d + d_rh * items[r].states[0]);
    items[r].past += d_rh * reset;
    const S result = S(is_live(a.lengths, t, items[r].length) ? items[r].d : 0.0f);
    if (real && lane == 0) a.dz[items[r].at.gate] = result;
    if (real && lane < 2) number_at(vectors, r * ROW, rank * H + unit) = float(result);
  }
}

// Read the numbers of step n for ROWS batch items: the lane's own gate y and its cotangent d, and into `numbers`
// states, other cotangents and factors. `earlier` counts elements of h; arrays of gates have GATES times as many. step:
// how many elements h has per time index.
template <class Cell, int H, int ROWS, class Index, class Arrays>
void read_rows(
    thread const Sweep& sweep, thread const Arrays& a, int n, thread Item<Cell, Index> (&items)[ROWS], Index earlier,
    Index step, int unit, thread StepNumbers<Cell> (&numbers)[ROWS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    items[r].y = value_at(a.gates, items[r].at.gate + Index(Cell::GATES) * earlier, 0.0f);
    items[r].d = value_at(a.dgates, items[r].at.gate + Index(Cell::GATES) * earlier, 0.0f);
    read_step<Cell, H>(sweep, a, n, items[r].at, earlier, step, unit, numbers[r]);
  }
}

// Begin backward step n for ROWS batch items, from the numbers that this step has read. In items[r] replace the states
// after the step by those before it, and set the mask. Set `past` to the whole gradient of h after the step: ds[0],
// which comes from later steps, plus the cotangent numbers[r].ds[0]. after: on return the states after the step. dc: on
// return the gradient of c from later steps, to which the cell's backward step adds the cotangent; only an LSTM uses
// dc. step: how many elements h has per time index.
template <class Cell, int H, int ROWS, class Index, class Arrays>
void begin_step(
    thread const Sweep& sweep, thread const Arrays& a, int n, Index step, int unit,
    thread const StepNumbers<Cell> (&numbers)[ROWS], thread Item<Cell, Index> (&items)[ROWS],
    thread float (&after)[ROWS][Cell::CARRIED + 1], thread float (&dc)[ROWS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    use_states<Cell, H>(sweep, a, n, step, unit, numbers[r].states, items[r], after[r]);
    dc[r] = items[r].ds[Cell::CARRIED];
    items[r].past = items[r].ds[0] + numbers[r].ds[0];
    items[r].mask = numbers[r].mask;
  }
}

// Set items[r].ds[0] to the gradient of h before the step at time index t: the product `sum` times the mask, plus
// `past`, the part that does not go through the product. An item that has ended at t keeps its gradient.
template <class Cell, int ROWS, class Index, class Arrays>
void pass_to_h_before(
    thread const Arrays& a, int t, thread const float (&sum)[ROWS], thread Item<Cell, Index> (&items)[ROWS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const float dh = sum[r] * items[r].mask + items[r].past;
    items[r].ds[0] = is_live(a.lengths, t, items[r].length) ? dh : items[r].ds[0];
  }
}

// Write dh0 and dc0 of a unit, the gradients of its states before the launch's first step, which are in items[r].ds.
// All lanes of the unit have copies of ds: lane 0 writes dh0, the last lane dc0. first: the threadgroup's first batch
// item. The arguments 1 and 0 of place_in say that dh0 and dc0 have one block of H numbers per item, and which one:
// number 0. Only an LSTM has dc0.
template <class Cell, int H, class S, int ROWS, class Index, class Arrays>
void store_first(
    thread const Sweep& sweep, thread const Arrays& a, int first, int lane, int unit,
    thread const Item<Cell, Index> (&items)[ROWS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const long item = place_in(sweep, min(first + r, sweep.B - 1), 1, 0, H, unit);
    if (lane == 0) a.dh0[item] = S(items[r].ds[0]);
    if (lane == Lanes<Cell>::LANES - 1) store(a.dc0, item, items[r].ds[Cell::CARRIED]);
  }
}

// Run the backward pass. TWO: whether a step has two products; FIRST: how many runs of 4 numbers a lane multiplies in
// the first one, whose operand has H numbers. has_gate: whether the lane also has a gate (lane 3 of a GRU has none).
// row: the block of the operand that the lane writes, or -1. block: the block of the arrays that it reads, that of its
// gate; lane 3 of a GRU reads that of the candidate. p: the lane's constant, a peephole weight or bhn. limit: the limit
// of c. SIZE: how many vectors the whole buffer of operands has. Besides dz, dh0 and dc0 the kernel writes two arrays,
// which may be absent:
//   d_out  [., B, D G H]       d, if it differs from dz
//   carry  [., B, D H] float   for an LSTM the gradient of keep * c; for the other cells the part of the gradient of
//                              keep * h that does not go through the product
template <class Cell, int H, int UNITS, int ROWS, int RESIDENT, class Index, class S, class Arrays>
void fused_backward(
    thread const Arrays& a, threadgroup float4* vectors, uint2 group, uint index, uint threads) {
  using Unit = Lanes<Cell>;
  constexpr int GATES = Cell::GATES, C = Cell::CARRIED, LANES = Unit::LANES, GROUP = LANES * UNITS;
  constexpr bool TWO = Unit::TWO_PRODUCTS != 0;
  constexpr int FIRST = RUNS_OF<H, GROUP>, RUNS = RUNS_OF<(TWO ? GATES - 1 : GATES) * H, GROUP>;
  constexpr int ROW = GROUP * (TWO ? FIRST : RUNS), HALF = ROWS * ROW, SIZE = HALF + ROWS * GROUP * RUNS;
  Sweep sweep = {};
  read_sizes(a.sizes, group.y, sweep);
  const int lane = int(index) % LANES, s = int(index) % GROUP, unit = int(index) / LANES;
  const int row = Unit::operand_block(lane), block = Unit::gate_block(lane) == -1 ? row : Unit::gate_block(lane);
  const bool real = H % (32 / LANES) == 0 || unit < H, has_gate = real && (GATES == LANES || lane != LANES - 1);
  // The argument 1 of time_step: the array h has one block of H numbers per item
  const Index step = Index(time_step(sweep, 1, H)), earlier = Index(first_time(sweep)) * step;
  const auto norm = norm_of_lane<Cell, H>(
      a.norm_eps, a, sweep.direction, block, real ? unit : 0, real && row >= 0, index, vectors + SIZE);
  Place<Index> next;
  between_steps<true>(sweep, GATES, H, next);
  const device vec<S, 4>* streamed =
      vectors_of_lane<UNITS * (RUNS + (TWO ? FIRST : 0)), vec<S, 4>>(a.arranged, sweep.direction, index, threads);
  vec<S, 4> resident[RESIDENT == 0 ? 1 : RESIDENT];
  load_resident<RESIDENT>(streamed, resident);
  fill_with_zeros(vectors, SIZE + norm_size<Cell, H, ROWS>(a.norm_eps), index, threads);
  const float p = real ? Unit::constant_of(a, sweep.direction, lane, H, unit) : 0, limit = value_at(a.numbers, 1, 0.0f);
  Item<Cell, Index> items[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r)
    begin_item<Cell, H>(sweep, a, min(int(group.x) * ROWS + r, sweep.B - 1), block, unit, real, earlier, items[r]);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the zeros that all threads write from the first d
  StepNumbers<Cell> numbers[ROWS];
  auto of_norm = norm_numbers<ROWS>(norm);
  const int read = real ? unit : 0;  // a lane without a unit reads the numbers of unit 0
  read_rows<Cell, H>(sweep, a, sweep.stop - 1, items, earlier, step, read, numbers);
  read_norm<Cell>(a, items, earlier, block, of_norm);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    const int t = time_of(sweep, n);
    threadgroup float4* current = vectors + (TWO ? 0 : n & 1) * HALF;
    float sum[ROWS], after[ROWS][C + 1], dc[ROWS];
    begin_step<Cell, H>(sweep, a, n, step, read, numbers, items, after, dc);
    states_backward<Cell, H>(norm, of_norm, a, t, p, items, numbers, after, dc);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const bool live = is_live(a.lengths, t, items[r].length);
      const float factor = numbers[r].keep;
      unit_backward<Cell>(of_norm, r, lane, p, limit, after[r][C], numbers[r], items[r], dc[r]);
      if (real && lane == 0) store(a.carry, items[r].at.state, live ? (C > 0 ? dc[r] : items[r].past) : 0.0f);
      // The forward step multiplied the states by `keep`, so their gradients are multiplied by it, too.
      if (C > 0) items[r].ds[C] = live ? factor * dc[r] : items[r].ds[C];
      items[r].past *= factor;
      const S result = S(live ? items[r].d : 0.0f);
      if (has_gate && (!TWO || lane != 0)) a.dz[items[r].at.gate] = result;
      if (real && (TWO ? lane == LANES - 1 : row >= 0)) {
        store(a.d_out, items[r].at.gate, float(result));
        write_operand<Cell>(norm, number_at(current, r * ROW, (TWO ? 0 : row * H) + unit), float(result));
      }
    }
    if constexpr (TWO) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the writes of dz_n from the product that reads it
      products_of_columns<Cell, UNITS, ROWS, FIRST, 0, RESIDENT>(sum, resident, streamed, current + s);
      reset_back<Cell, H, ROWS, GROUP * RUNS, S>(items, sum, lane, unit, real, t, a, vectors + HALF);
      current = vectors + HALF;
    }
    products_backward<Cell, H, ROW, S>(norm, of_norm, a, t, row, unit, items, current);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the writes of d from the product that reads it
    const int ahead = max(n - 1, sweep.start);
    Place<Index> distance;
    distance_to_next(ahead != n, next, distance);
    UNROLL for (int r = 0; r < ROWS; ++r) advance(items[r].at, distance);
    read_rows<Cell, H>(sweep, a, ahead, items, earlier, step, read, numbers);  // the last step reads its own again
    read_norm<Cell>(a, items, earlier, block, of_norm);
    constexpr int FROM = TWO ? FIRST * UNITS : 0;
    products_of_columns<Cell, UNITS, ROWS, RUNS, FROM, RESIDENT>(sum, resident, streamed, current + s);
    pass_to_h_before(a, t, sum, items);
    streamed += opaque_zero(sweep);
  }
  if (real) store_first<Cell, H, S>(sweep, a, int(group.x) * ROWS, lane, unit, items);
}
