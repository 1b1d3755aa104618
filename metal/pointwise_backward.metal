// The backward pass of a cell written by the user, over all time steps in one launch. The lanes of a simdgroup share
// the recurrent product. fused.metal explains the names, pointwise.metal how lanes share a unit.
//
// A preactivation is a recurrent part plus an input part. The letters P, C, U, V and M count numbers per unit:
// recurrent products (P = PRODUCTS is G or 0), states besides h (CARRIED), inputs, parameters (SUMMED), gradients. KEPT
// is the number of values that the forward pass saved in the array gates. The kernel writes (".": the launch's time
// steps):
//   dz           [., B, D M H]: the gradients of all recurrent parts; then the gradients of the input parts, for those
//                gates in which they differ
//   du           [., B, D U H]: the gradients of the inputs of each step
//   dw           [groups, D V H] float: the gradients of the parameters, summed over the steps and items of a
//                threadgroup
//   carry        [., B, D N H] float or absent: the gradients of keep * state without the part that goes through the
//                product, for N states: those in c, and h if it has such a gradient
//   dh0, dc0     the gradients of the first states
// `vectors` in threadgroup memory holds the gradients d of a step's recurrent products, the operand of the product with
// Wh, in a double buffer [2][ROWS][padded G H]. One barrier per step separates writing them from the product that reads
// them.

// The numbers that a lane reads at one backward step, for one unit of one batch item. saved: its part of the values
// that the forward pass saved. inputs: the inputs of the step. before: the states before the step, h first. outside:
// their cotangents, 0 without the array. keep, mask: numbers of these arrays, 1 without them.
template <class Cell>
struct BackwardNumbers {
  float saved[REGISTERS_OF<Cell::KEPT, Lanes<Cell>::LANES>], inputs[SIZE_FOR<Cell::INPUTS>];
  float before[Cell::CARRIED + 1], outside[Cell::CARRIED + 1], keep, mask;
};

// Read the numbers that a lane needs to compute the gradients of step n, for ROWS batch items. n: the number of the
// step in the order of the forward pass. now: where the step begins in an array [T, B, D H], as a number of elements.
// item[r]: the number of the unit's element in an array [B, D H], for batch item r of this threadgroup.
template <class Cell, int H, int ROWS, class Index, class Arrays>
void read_numbers(
    thread const Arrays& a, thread const Sweep& sweep, int n, Index now, thread const Index (&item)[ROWS], uint group,
    int lane, int unit, thread BackwardNumbers<Cell> (&numbers)[ROWS]) {
  constexpr int C = Cell::CARRIED;
  const Index step = Index(time_step(sweep, 1, H));
  // At step 0 there is no step before it. Then the address must only be valid, because use_first_states replaces the
  // numbers that are read there.
  const Index previous = n == 0 ? now : sweep.reverse ? now + step : now - step;
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group) * ROWS + r, sweep.B - 1);
    load_blocks<Cell::KEPT, Lanes<Cell>::LANES, H>(a.gates, now + item[r], lane, unit, numbers[r].saved);
    load_all<Cell::INPUTS, H>(a.inputs, now + item[r], unit, numbers[r].inputs, 0);
    numbers[r].before[0] = value_at(a.h, previous + item[r], 0.0f);
    load_all<C, H>(a.c, previous + item[r], unit, numbers[r].before, 1);
    load_all<1, H>(a.dh, now + item[r], unit, numbers[r].outside, 0);
    load_all<C, H>(a.dc, now + item[r], unit, numbers[r].outside, 1);
    numbers[r].keep = value_at(a.keep, (Index(time_of(sweep, n)) * sweep.B + b) * sweep.D + sweep.direction, 1.0f);
    numbers[r].mask = value_at(a.mask, item[r] + (sweep.masks_differ ? now : 0), 1.0f);
  }
}

// If step n is the first step of its batch item, set the states before the step to h0 and c0. item: the offset of the
// unit's element in an array [B, D H].
template <class Cell, int H, class Index, class Arrays>
void use_first_states(
    thread const Arrays& a, thread const Sweep& sweep, int n, Index item, int length, int unit,
    thread float (&before)[Cell::CARRIED + 1]) {
  // In a reverse direction the first step of an item is at its last time index, which depends on its length. For a
  // shorter item n = 0 is past its end, so it does not matter that the states are set there, too.
  const bool last_index = is_present(a.lengths) && sweep.reverse && time_of(sweep, n) + 1 == length;
  if (n != 0 && !last_index) return;
  before[0] = value_at(a.h0, item, 0.0f);
  load_all<Cell::CARRIED, H>(a.c0, item, unit, before, 1);
}

// Store the results of one backward step of a batch item, or zeros if the item has ended: the gradients d of the
// preactivations, du of the inputs and `back` of the states (in the array carry). at: the unit's position in an array
// [steps, B, D H]. d is rounded to the dtype S first, so that dh is computed from the same dz that the caller gets. The
// first PRODUCTS numbers of d are the gradients of the recurrent products. They are also written to `operand`, the
// item's row of threadgroup memory that the product with Wh reads; with a norm own_products_backward does this. The
// lanes of a unit divide d among themselves, but all have du and `back`, which lane 0 writes.
template <class Cell, int H, class S, class Index, class Arrays>
void store_step(
    thread const Arrays& a, bool live, bool real, int lane, int unit, Index at,
    thread float (&d)[REGISTERS_OF<Cell::GRADIENTS, Lanes<Cell>::LANES>],
    thread const float (&du)[SIZE_FOR<Cell::INPUTS>], thread const float (&back)[Cell::CARRIED + 1],
    threadgroup float4* operand) {
  constexpr int LANES = Lanes<Cell>::LANES;
  UNROLL for (int j = 0; j < REGISTERS_OF<Cell::GRADIENTS, LANES>; ++j) {
    const int block = LANES * j + lane;
    d[j] = float(S(live ? d[j] : 0.0f));
    if (real && block < Cell::PRODUCTS && !Lanes<Cell>::NORMALISES) number_at(operand, 0, block * H + unit) = d[j];
  }
  if (!real) return;
  store_blocks<Cell::GRADIENTS, LANES, H>(a.dz, at, lane, unit, d);
  if (lane != 0) return;
  UNROLL for (int k = 0; k < Cell::INPUTS; ++k)
    store(a.du, place_of<Cell::INPUTS, H>(at, k, unit), live ? du[k] : 0.0f);
  UNROLL for (int k = 0; k < CARRIES<Cell>; ++k)
    store(a.carry, place_of<CARRIES<Cell>, H>(at, k, unit), live ? back[FIRST_CARRY<Cell> + k] : 0.0f);
}

// Store the results of a backward launch: ds, the gradients of the first states, into dh0 and dc0, and the gradients dw
// of the parameters. item[r]: the offset of the unit's element of batch item r in an array [B, D H]. group: the
// position on the first axis of the array dw. writes: whether the lane is the one of its unit that writes.
template <class Cell, int H, int ROWS, class S, class Index, class Arrays>
void store_ends(
    thread const Arrays& a, thread const Sweep& sweep, thread const Index (&item)[ROWS], uint group, bool writes,
    int unit, thread const float (&ds)[ROWS][Cell::CARRIED + 1], thread const float (&dw)[SIZE_FOR<Cell::SUMMED>]) {
  if (!writes) return;
  UNROLL for (int r = 0; r < ROWS; ++r) {
    a.dh0[item[r]] = S(ds[r][0]);
    UNROLL for (int k = 1; k < Cell::CARRIED + 1; ++k)
      store(a.dc0, place_of<Cell::CARRIED, H>(item[r], k - 1, unit), ds[r][k]);
  }
  UNROLL for (int k = 0; k < Cell::SUMMED; ++k)
    store(a.dw, place_in(sweep, int(group), Cell::SUMMED, k, H, unit), dw[k]);
}

// Return the whole sum of the lane's own unit. sums: the lane's partial sums of the UNITS units whose product the lanes
// share, from add_product. The arguments 1, 1 of sum_over_units: a unit has one sum, not one per gate, and its bit in
// the set of wanted sums is 1.
template <int UNITS, int LANES>
float sum_of_unit(thread float (&sums)[UNITS]) {
  sum_over_units<UNITS, 1, 1, LANES>(sums);
  return sum_over_lanes<LANES>(sums[0]);
}

// Run the backward pass. If fewer than ROWS items are left, the last one is added to the sum dw only once. own: the
// lane's unit; a lane without one reads the numbers of `unit` 0. ds: the gradients of the states from later steps. now:
// the states after the step. back: at first the gradients of the states after the step, then those of the states before
// it. w, dw: the parameters and their gradients. ND, V, U: the sizes of d, dw and du. norm: the numbers for layer
// normalisation that stay the same in a launch; of_norm: those of one step (fused_norm_own.metal).
template <class Cell, int H, int UNITS, int ROWS, int RESIDENT, class Index, class S, class Arrays>
void pointwise_backward(thread const Arrays& a, threadgroup float4* vectors, uint2 group, uint index, uint threads) {
  constexpr int P = Cell::PRODUCTS, C = Cell::CARRIED, LANES = Lanes<Cell>::LANES, GROUP = LANES * UNITS;
  constexpr int RUNS = P == 0 ? 0 : RUNS_OF<P * H, GROUP>, ROW = GROUP * RUNS, HALF = ROWS * ROW;
  constexpr int ND = REGISTERS_OF<Cell::GRADIENTS, LANES>, V = SIZE_FOR<Cell::SUMMED>, U = SIZE_FOR<Cell::INPUTS>;
  Sweep sweep = {};
  read_sizes(a.sizes, group.y, sweep);
  const int s = int(index) % GROUP, lane = s % LANES, own = int(index) / LANES;
  const bool real = H % (32 / LANES) == 0 || own < H;
  const int unit = real ? own : 0;
  const device vec<S, 4>* streamed =
      vectors_of_lane<P == 0 ? 1 : RUNS * UNITS, vec<S, 4>>(a.arranged, sweep.direction, index, threads);
  vec<S, 4> resident[RESIDENT == 0 ? 1 : RESIDENT];
  load_resident<RESIDENT>(streamed, resident);
  fill_with_zeros(vectors, 2 * HALF + norm_size<Cell, H, ROWS>(a.norm_eps), index, threads);
  const Index step = Index(time_step(sweep, 1, H)), earlier = Index(first_time(sweep)) * step;
  Index item[ROWS];  // the unit's position in an array [B, D H]
  float w[V], dw[V] = {}, ds[ROWS][C + 1], now[ROWS][C + 1];
  int length[ROWS];
  load_all<Cell::SUMMED, H>(a.params, Index(sweep.direction * H + unit), unit, w, 0);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group.x) * ROWS + r, sweep.B - 1), t = time_of(sweep, sweep.stop - 1);
    item[r] = Index(place_in(sweep, b, 1, 0, H, unit));
    length[r] = value_at(a.lengths, b, sweep.T);
    load_states<Cell, H>(a.dhT, a.dcT, item[r], unit, ds[r]);
    load_states<Cell, H>(a.h, a.c, Index(t) * step + item[r], unit, now[r]);
  }
  if constexpr (P > 0) threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the zeros from the first d
  Index now_at = Index(time_of(sweep, sweep.stop - 1)) * step;  // the step's position in an array [T, B, D H]
  const Index next_now = sweep.reverse ? step : -step;  // Index is unsigned: adding a negative distance wraps around
  const auto norm = norm_of_lane<Cell, H>(
      a.norm_eps, a, sweep.direction, min(lane, int(Cell::GATES) - 1), unit, real && lane < Cell::GATES, index,
      vectors + 2 * HALF);
  BackwardNumbers<Cell> numbers[ROWS];
  auto of_norm = norm_numbers<ROWS>(norm);
  read_numbers<Cell, H>(a, sweep, sweep.stop - 1, now_at, item, group.x, lane, unit, numbers);
  read_gates<Cell, H>(a, sweep, sweep.stop - 1, now_at, item, group.x, lane, unit, of_norm);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    const int t = time_of(sweep, n);
    threadgroup float4* current = vectors + (n & 1) * HALF;
    float mask[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const bool live = is_live(a.lengths, t, length[r]);
      thread BackwardNumbers<Cell>& mine = numbers[r];
      float d[ND] = {}, du[U] = {}, dw_now[V] = {}, back[C + 1], before[C + 1];
      use_first_states<Cell, H>(a, sweep, n, item[r], length[r], unit, mine.before);
      UNROLL for (int k = 0; k <= C; ++k) back[k] = ds[r][k] + mine.outside[k], before[k] = mine.keep * mine.before[k];
      Lanes<Cell>::backward(lane, w, mine.inputs, mine.saved, before, now[r], back, d, du, dw_now);
      UNROLL for (int k = 0; k <= C; ++k) now[r][k] = mine.before[k];
      keep_gradients(live, r, d, of_norm);
      store_step<Cell, H, S>(a, live, real, lane, unit, now_at + (item[r] - earlier), d, du, back, current + r * ROW);
      UNROLL for (int k = 0; k < Cell::SUMMED; ++k)
        dw[k] += live && int(group.x) * ROWS + r < sweep.B ? dw_now[k] : 0.0f;
      UNROLL for (int k = 0; k <= C; ++k) ds[r][k] = live ? mine.keep * back[k] : ds[r][k];
      mask[r] = mine.mask;
    }
    own_products_backward<Cell, H, ROW, S>(norm, of_norm, a, now_at, earlier, item, lane, unit, current);
    if constexpr (P > 0) threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the writes of d from the product
    if (n > sweep.start) now_at += next_now;
    // Read the numbers of the next step before the product, so that they arrive while the product is computed. The
    // launch's last step reads its own numbers again.
    read_numbers<Cell, H>(a, sweep, max(n - 1, sweep.start), now_at, item, group.x, lane, unit, numbers);
    read_gates<Cell, H>(a, sweep, max(n - 1, sweep.start), now_at, item, group.x, lane, unit, of_norm);
    if constexpr (P > 0) {
      float sums[ROWS][UNITS] = {};
      add_product<ROWS, UNITS, RUNS, GROUP, 0, 1, 1, RESIDENT, ROW>(sums, resident, streamed, current + s);
      UNROLL for (int r = 0; r < ROWS; ++r)
        ds[r][0] += is_live(a.lengths, t, length[r]) ? sum_of_unit<UNITS, LANES>(sums[r]) * mask[r] : 0.0f;
    }
    streamed += opaque_zero(sweep);
  }
  store_ends<Cell, H, ROWS, S>(a, sweep, item, group.x, real && lane == 0, unit, ds, dw);
}
