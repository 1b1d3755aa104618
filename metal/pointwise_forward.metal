// The forward pass of a cell written by the user, over all time steps in one launch. The lanes of a simdgroup share the
// recurrent product. fused.metal explains the names, pointwise.metal how lanes share a unit. `vectors` in threadgroup
// memory holds h of all units, times the mask, as a double buffer [2][ROWS][padded H]. If the cell has a recurrent
// product, one barrier per step separates writing h from the next product, which reads h.
//
// Members of the struct Cell (cell.metal) count numbers per unit: GATES preactivations; P = PRODUCTS, those with a
// recurrent product (all or none); C = CARRIED, the states besides h; INPUTS, the inputs of a step; SUMMED, the
// parameters; KEPT, the numbers that the backward pass reads. The array gates holds the last ones, if the call wants
// them.

// The numbers that a lane reads at one forward step, for one unit of one batch item: its part of z, the inputs of the
// step, `keep` of this step, and the mask of the next step, because this step writes its new h times that mask for the
// next product.
template <class Cell>
struct ForwardNumbers {
  float z[REGISTERS_OF<Cell::GATES, Lanes<Cell>::LANES>], inputs[SIZE_FOR<Cell::INPUTS>], keep, mask;
};

// Read the numbers that a lane needs at step n for batch item b. now: the offset of the step's first element in an
// array [T, B, D H]. item: the offset of the unit's element in an array [B, D H]; now + item is the unit's position at
// this step. The last argument of load_all, 0, is the first element of `inputs` to be set.
template <class Cell, int H, class Index, class Arrays>
void read_numbers(
    thread const Arrays& a, thread const Sweep& sweep, int n, Index now, int b, Index item, int lane, int unit,
    thread ForwardNumbers<Cell>& numbers) {
  // The launch's last step has no next step. It reads its own mask again, which is not used.
  const int next = time_of(sweep, min(n + 1, sweep.stop - 1));
  load_blocks<Cell::GATES, Lanes<Cell>::LANES, H>(a.z, now + item, lane, unit, numbers.z);
  load_all<Cell::INPUTS, H>(a.inputs, now + item, unit, numbers.inputs, 0);
  numbers.keep = value_at(a.keep, (Index(time_of(sweep, n)) * sweep.B + b) * sweep.D + sweep.direction, 1.0f);
  numbers.mask = value_at(a.mask, (sweep.masks_differ ? Index(next) * Index(time_step(sweep, 1, H)) : 0) + item, 1.0f);
}

// Store the outputs of one forward step, or zeros if the batch item has ended. at: the unit's position in an array
// [steps, B, D H] with the steps of this launch. s: the states after the step, h first. y: the lane's part of the
// values that the backward pass reads. All lanes of the unit have the states; the last lane writes them.
template <class Cell, int H, class S, class Index, class Arrays>
void store_outputs(
    thread const Arrays& a, bool live, int lane, int unit, Index at, thread const float (&s)[Cell::CARRIED + 1],
    thread float (&y)[REGISTERS_OF<VALUES<Cell>, Lanes<Cell>::LANES>]) {
  constexpr int C = Cell::CARRIED, LANES = Lanes<Cell>::LANES;
  UNROLL for (int j = 0; j < REGISTERS_OF<Cell::KEPT, LANES>; ++j) y[j] = live ? y[j] : 0.0f;
  store_blocks<Cell::KEPT, LANES, H>(a.gates, at, lane, unit, y);
  if (lane != LANES - 1) return;
  a.h[at] = S(live ? s[0] : 0.0f);
  UNROLL for (int k = 0; k < C; ++k) store(a.c, place_of<C, H>(at, k, unit), live ? s[k + 1] : 0.0f);
}

// Compute the recurrent products of ROWS batch items. On return sums[r] has the products of the lane's own unit: those
// of all gates or, with SCATTERS, that of one gate in sums[r][0]. ALL: one bit for each gate with a product, because
// all are needed. x: the operand in threadgroup memory, from the first number that this lane multiplies. In the call of
// add_product, 0 is the lane's first weight vector, and P the number of sums per unit.
template <class Cell, int UNITS, int RUNS, int RESIDENT, int ROWS, int SIZE, class V>
void products_of_unit(
    thread const V* resident, const device V* streamed, threadgroup const float4* x, thread float (&sums)[ROWS][SIZE]) {
  constexpr int P = Cell::PRODUCTS, LANES = Lanes<Cell>::LANES, GROUP = LANES * UNITS, ALL = (1 << P) - 1;
  add_product<ROWS, UNITS * P, RUNS, GROUP, 0, P, ALL, RESIDENT, GROUP * RUNS>(sums, resident, streamed, x);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    sum_over_units<UNITS, P, ALL, LANES>(sums[r]);
    sum_of_own_unit<Cell>(sums[r]);
  }
}

// Run the forward pass. Past an item's end the kernel selects its outputs and states with conditions instead of
// multiplying by 0, because the new states may be NaN there. own: the lane's unit; a lane without one reads the numbers
// of `unit` 0. writes: whether the lane is the one that writes the unit's states. w: the parameters. norm: the numbers
// that a lane needs for layer normalisation (fused_norm_own.metal).
template <class Cell, int H, int UNITS, int ROWS, int RESIDENT, class Index, class S, class V, class Arrays>
void pointwise_forward(thread const Arrays& a, threadgroup float4* vectors, uint2 group, uint index, uint threads) {
  constexpr int P = Cell::PRODUCTS, C = Cell::CARRIED, LANES = Lanes<Cell>::LANES, GROUP = LANES * UNITS;
  using Share = LaneShare<V, H, GROUP, P == 0 ? 1 : UNITS * P>;
  constexpr int RUNS = P == 0 ? 0 : int(Share::RUNS), ROW = GROUP * RUNS, HALF = ROWS * ROW;
  Sweep sweep = {};
  read_sizes(a.sizes, group.y, sweep);
  const int s = int(index) % GROUP, lane = s % LANES, own = int(index) / LANES;
  const bool real = H % (32 / LANES) == 0 || own < H, writes = real && lane == LANES - 1;
  const int unit = real ? own : 0;  // lanes without a unit read the numbers of unit 0
  const int place = place_in_row<Share::SPAN, GROUP>(own);  // of this unit's h in a row of `vectors`
  const device V* streamed = vectors_of_lane<Share::COUNT, V>(a.arranged, sweep.direction, index, threads);
  V resident[RESIDENT == 0 ? 1 : RESIDENT];
  load_resident<RESIDENT>(streamed, resident);
  const auto norm = norm_of_lane<Cell, H>(
      a.norm_eps, a, sweep.direction, min(lane, int(Cell::GATES) - 1), unit, real && lane < Cell::GATES, index,
      vectors + 2 * HALF);
  fill_with_zeros(vectors, 2 * HALF + norm_size<Cell, H, ROWS>(a.norm_eps), index, threads);
  if constexpr (P > 0) threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the zeros from the first h
  const Index step = Index(time_step(sweep, 1, H)), earlier = Index(first_time(sweep)) * step;
  Index item[ROWS];  // the unit's position in an array [B, D H]
  float state[ROWS][C + 1], w[SIZE_FOR<Cell::SUMMED>];
  int length[ROWS];
  load_all<Cell::SUMMED, H>(a.params, Index(sweep.direction * H + unit), unit, w, 0);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group.x) * ROWS + r, sweep.B - 1), t = time_of(sweep, sweep.start);
    item[r] = (Index(b) * sweep.D + sweep.direction) * H + Index(unit);
    length[r] = value_at(a.lengths, b, sweep.T);
    load_states<Cell, H>(a.h0, a.c0, item[r], unit, state[r]);
    const Index at = item[r] + (sweep.masks_differ ? Index(t) * step : 0);
    if (P > 0 && writes)
      number_at(vectors, (sweep.start & 1) * HALF + r * ROW, place) = state[r][0] * value_at(a.mask, at, 1.0f);
  }
  if constexpr (P > 0) threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the first h from the first product
  Index now = Index(time_of(sweep, sweep.start)) * step;  // the step's position in an array [T, B, D H]
  const Index next_now = sweep.reverse ? -step : step;  // Index is unsigned: adding a negative distance wraps around
  for (int n = sweep.start; n < sweep.stop; ++n) {
    threadgroup float4* before = vectors + (n & 1) * HALF;
    threadgroup float4* after = vectors + (~n & 1) * HALF;
    const int t = time_of(sweep, n);
    float sums[ROWS][P == 0 ? 1 : UNITS * P] = {};
    ForwardNumbers<Cell> numbers[ROWS];
    // Read these numbers before the product, so that they arrive while the product is computed.
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const int b = min(int(group.x) * ROWS + r, sweep.B - 1);
      read_numbers<Cell, H>(a, sweep, n, now, b, item[r], lane, unit, numbers[r]);
    }
    if constexpr (P > 0) {
      products_of_unit<Cell, UNITS, RUNS, RESIDENT>(resident, streamed, before + s, sums);
      normalise_gates<Cell, H>(norm, lane, numbers, sums);
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const bool live = is_live(a.lengths, t, length[r]);
      float y[REGISTERS_OF<VALUES<Cell>, LANES>], next[C + 1];
      UNROLL for (int k = 0; k <= C; ++k) next[k] = numbers[r].keep * state[r][k];
      UNROLL for (int j = 0; j < REGISTERS_OF<Cell::GATES, LANES>; ++j) y[j] = numbers[r].z[j];
      Lanes<Cell>::forward(lane, w, numbers[r].inputs, sums[r], next, y);
      // Round h to the dtype of the arrays, so that the next step reads the same h that the caller gets.
      next[0] = float(S(next[0]));
      UNROLL for (int k = 0; k <= C; ++k) state[r][k] = live ? next[k] : state[r][k];
      if (real) store_outputs<Cell, H, S>(a, live, lane, unit, now + (item[r] - earlier), next, y);
      if (P > 0 && writes) number_at(after, r * ROW, place) = state[r][0] * numbers[r].mask;
    }
    if constexpr (P > 0) threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the new h from the next product
    now += next_now;
    streamed += opaque_zero(sweep);
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    if (!writes) continue;
    a.hT[item[r]] = S(state[r][0]);
    store_all<C, H>(a.cT, item[r], unit, state[r] + 1);
  }
}
