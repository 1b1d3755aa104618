// The forward pass over all time steps in one launch, with the product divided among lanes: each lane multiplies a part
// of the weights, then lanes exchange and add up their sums (fused_lanes.metal). fused.metal explains the names.
//
//   a_t = z_t + (mask_t * h_prev) Wh^T;   gates, state, h = cell(a_t, keep_t * h_prev, keep_t * state)
//
// `vectors` in threadgroup memory is a double buffer [2][ROWS][padded H]. The current step reads the masked h (mask *
// h_prev) from one half, and writes the masked h of the next step into the other. A GRU whose reset comes before the
// product has two products per step. There half 0 holds the masked h, and half 1 the operand of the second product, r *
// mask * h_prev.
//
// Barriers: one per step, after the new h is written and before any lane reads it. The halves alternate, so no lane
// overwrites numbers that another lane still reads. With two products there is a second barrier per step, between
// writing r * mask * h_prev and the product that reads it.

// Compute the recurrent product for ROWS batch items, summed over the GROUP lanes that share it. On return sums[r]
// holds the sums of batch item r and of the lane's own unit; Lanes<Cell>::sum_of_unit says for which gates the lane has
// them. WANTED: the gates to compute, one bit each. x: the operand in threadgroup memory, from the first number that
// this lane multiplies. In the call of add_product, 0 is the lane's first weight vector, and the GATES after it the
// number of sums per unit.
template <class Cell, int UNITS, int ROWS, int RUNS, int WANTED, int RESIDENT, class V>
void add_products(
    thread float (&sums)[ROWS][UNITS * Cell::GATES], thread const V* resident, const device V* streamed,
    threadgroup const float4* x, int lane) {
  constexpr int GATES = Cell::GATES, LANES = Lanes<Cell>::LANES, GROUP = LANES * UNITS;
  add_product<ROWS, UNITS * GATES, RUNS, GROUP, 0, GATES, WANTED, RESIDENT, GROUP * RUNS>(sums, resident, streamed, x);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    sum_over_units<UNITS, GATES, WANTED, LANES>(sums[r]);
    Lanes<Cell>::template sum_of_unit<WANTED>(sums[r], lane);
  }
}

// Read numbers ahead of time: before the product of a step, so that they arrive while the product is computed. First
// copy z of this step, which the call at the step before has read, to y. Then read z and the mask of the next step, and
// `keep` of this step (into factor). The mask of the next step is needed now, because this step writes the new h times
// that mask for the next product. at: the lane's positions in arrays, for each of ROWS batch items. next: the distances
// to the positions at the next step. If the launch has no next step (has_next is false), z and the mask of this step
// are read again.
template <int ROWS, class Index, class Arrays>
void read_ahead(
    thread const Arrays& a, bool has_next, thread const Place<Index> (&at)[ROWS], thread const Place<Index>& next,
    Index earlier, thread float (&y)[ROWS], thread float (&z)[ROWS], thread float (&mask)[ROWS],
    thread float (&factor)[ROWS]) {
  Place<Index> distance;
  distance_to_next(has_next, next, distance);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    y[r] = z[r];
    z[r] = float(a.z[at[r].gate + distance.gate + earlier]);
    mask[r] = value_at(a.mask, at[r].mask + distance.mask, 1.0f);
    factor[r] = value_at(a.keep, at[r].keep, 1.0f);
  }
}

// Write the operand of the second product, for a GRU whose reset comes before the candidate's product. The gate r is
// computed from y (the input's part of its preactivation) and the sums of the first product. Then r times the masked h
// is written to `operand`. h: the masked h in threadgroup memory, with the same layout as `operand`: one row of ROW
// vectors per batch item. writes: whether this lane has the unit's h. own: the unit's position in a row.
template <class Cell, int ROW, int ROWS, int SLOTS>
void write_reset(
    thread const float (&y)[ROWS], thread const float (&sums)[ROWS][SLOTS], bool writes, int own,
    threadgroup float4* h, threadgroup float4* operand) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const float reset = simd_shuffle_xor(Cell::reset(y[r] + sums[r][0]), 2);  // lane 2, which writes, gets r of lane 0
    if (writes) number_at(operand, r * ROW, own) = reset * number_at(h, r * ROW, own);
  }
}

// Write the last states hT and cT of a unit after the launch's last step. first: the threadgroup's first batch item. h,
// c: the states of its ROWS items. In place_in, 1, 0 stands for one block of H numbers per item, block number 0. Only
// an LSTM has cT.
template <class S, int ROWS, class Arrays>
void store_last(
    thread const Sweep& sweep, thread const Arrays& a, int first, int H, int unit, thread const float (&h)[ROWS],
    thread const float (&c)[ROWS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const long item = place_in(sweep, min(first + r, sweep.B - 1), 1, 0, H, unit);
    a.hT[item] = S(h[r]);
    store(a.cT, item, c[r]);
  }
}

// Run the forward pass of one direction for ROWS batch items. A lane computes at most one gate of one hidden unit.
//   V            the type of a vector of 4 weights, or of 4 words with quantized weights
//   a.numbers    the forget bias and the limit of c of an LSTM
//   TWO          whether a step has two products: those of a GRU whose reset comes before the candidate's product
//   before, after   where in `vectors`, which has two halves, the masked h of this step and of the next step lie: in
//                different halves. If TWO, both lie in half 0, and r times the masked h lies in half 1. The second
//                product is for the candidate n only, gate 2, so its argument WANTED (one bit per gate) is 1 << 2 = 4
//   block        the index of the lane's gate on the gate axis; -1 if the lane has no gate
//   own          the position of the unit's h in a row of an operand
//   writes       whether the lane has the states of a unit; h_now and c_now are valid only there
//   y            before Unit::forward the input's part of the preactivation of the lane's gate; after it the gate (of a
//                plain RNN the preactivation)
//   m            the new h, valid in the lane that writes
template <class Cell, int H, int UNITS, int ROWS, int RESIDENT, class Index, class S, class V, class Arrays>
void fused_forward(
    thread const Arrays& a, threadgroup float4* vectors, uint2 group, uint index, uint threads) {
  using Unit = Lanes<Cell>;
  constexpr int GATES = Cell::GATES, LANES = Unit::LANES, GROUP = LANES * UNITS;
  using Share = LaneShare<V, H, GROUP, UNITS * GATES>;
  constexpr int RUNS = Share::RUNS, ROW = GROUP * RUNS, HALF = ROWS * ROW;
  constexpr bool TWO = Unit::TWO_PRODUCTS != 0;
  Sweep sweep = {};
  read_sizes(a.sizes, group.y, sweep);
  const float forget_bias = value_at(a.numbers, 0, 0.0f), limit = value_at(a.numbers, 1, 0.0f);
  const int s = int(index) % GROUP, lane = s % LANES, unit = int(index) / LANES, block = Unit::gate_block(lane);
  const int own = place_in_row<Share::SPAN, GROUP>(unit);
  const bool real = H % (32 / LANES) == 0 || unit < H, writes = real && lane == Unit::WRITER;
  const bool has_gate = real && (GATES == LANES || block >= 0);
  const Index earlier = Index(first_time(sweep) * time_step(sweep, GATES, H));
  const auto norm = norm_of_lane<Cell, H>(
      a.norm_eps, a, sweep.direction, max(block, 0), real ? unit : 0, has_gate, index, vectors + 2 * HALF);
  Place<Index> next;
  between_steps<false>(sweep, GATES, H, next);
  const device V* streamed = vectors_of_lane<Share::COUNT, V>(a.arranged, sweep.direction, index, threads);
  V resident[RESIDENT == 0 ? 1 : RESIDENT];
  load_resident<RESIDENT>(streamed, resident);
  fill_with_zeros(vectors, 2 * HALF + norm_size<Cell, H, ROWS>(a.norm_eps), index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the zeros that all threads write from the first h
  const float p = real ? Unit::constant_of(a, sweep.direction, lane, H, unit) : 0.0f;  // a peephole weight or bhn
  float h_now[ROWS], c_now[ROWS], z[ROWS];
  int length[ROWS];
  Place<Index> at[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group.x) * ROWS + r, sweep.B - 1);
    const long item = place_in(sweep, b, 1, 0, H, unit);
    // A lane without a gate or unit reads those of block 0 or unit 0, so that no read leaves the arrays.
    first_place<false>(sweep, b, GATES, max(block, 0), H, real ? unit : 0, at[r]);
    z[r] = float(a.z[at[r].gate + earlier]);
    length[r] = value_at(a.lengths, b, sweep.T);
    h_now[r] = writes ? value_at(a.h0, item, 0.0f) : 0.0f;
    c_now[r] = writes ? value_at(a.c0, item, 0.0f) : 0.0f;
    const int row = (TWO ? 0 : sweep.start & 1) * HALF + r * ROW;
    if (writes) number_at(vectors, row, own) = h_now[r] * value_at(a.mask, at[r].mask, 1.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the writes of the first h from the first product
  for (int n = sweep.start; n < sweep.stop; ++n) {
    threadgroup float4* before = vectors + (TWO ? 0 : n & 1) * HALF;
    threadgroup float4* after = vectors + (TWO ? 0 : ~n & 1) * HALF;
    float y[ROWS], mask[ROWS], factor[ROWS], given[ROWS], m[ROWS], states[ROWS], sums[ROWS][UNITS * GATES] = {};
    read_ahead(a, n < sweep.stop - 1, at, next, earlier, y, z, mask, factor);
    add_products<Cell, UNITS, ROWS, RUNS, Unit::FIRST, RESIDENT>(sums, resident, streamed, before + s, lane);
    if constexpr (TWO) {
      write_reset<Cell, ROW>(y, sums, writes, own, before, vectors + HALF);
      threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the writes of r h from the product that reads them
      add_products<Cell, UNITS, ROWS, RUNS, 4, RESIDENT>(sums, resident, streamed, vectors + HALF + s, lane);
    }
    normalise<Cell, H>(norm, lane, y, sums);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      // given: the gate's preactivation, because normalise_states may have to compute gate o again. states: on entry of
      // Unit::forward c times keep, on return the new c.
      given[r] = y[r] + sums[r][0];
      states[r] = factor[r] * c_now[r];
      m[r] = Unit::forward(lane, p, forget_bias, limit, factor[r] * h_now[r], sums[r], states[r], y[r]);
    }
    normalise_states<Cell, H>(norm, writes, given, p, states, y, m);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const bool live = is_live(a.lengths, time_of(sweep, n), length[r]);
      const S output = S(m[r]);
      // Past an item's end the state stays and outputs are 0. Values are selected, not multiplied, as they may be NaN.
      h_now[r] = live ? float(output) : h_now[r];
      c_now[r] = live ? states[r] : c_now[r];
      if (has_gate) store(a.gates, at[r].gate, live ? y[r] : 0.0f);
      if (writes) store(a.c, at[r].state, live ? states[r] : 0.0f);
      if (writes) a.h[at[r].state] = live ? output : S(0.0f);
      if (writes) number_at(after, r * ROW, own) = h_now[r] * mask[r];
      advance(at[r], next);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the writes of the new h from the next step's product
    streamed += opaque_zero(sweep);
  }
  if (writes) store_last<S>(sweep, a, int(group.x) * ROWS, H, unit, h_now, c_now);
}
