// The backward step of a cell written by a user (struct Own), with layer normalisation of the recurrent products, or of
// their sums with the input's part: y = (x - mean) / sqrt(variance + eps), result = y scale + shift.
//
// A step has two launches, as in stepwise_norm.metal: stepwise_norm_dh computes dh_t, the gradient of h; then the
// kernel of this file computes the other gradients. A threadgroup of ITEM_THREADS = 256 threads has one batch item, and
// thread n the units n, n + 256, ... A thread loops over its units twice: for the two sums that each norm needs, then
// for the results. Both loops compute the gradients of the units, because a thread may have too many units to keep them
// in registers.
//
//   a            the struct of all arrays; value_at(array, n, v) is array[n], or v if the call does not have the array
//   row          the array that a launch writes: a.after. a.before: the row of the step processed before this one
//   carry        the gradient of a state, without the part that goes through the product; the next launch reads it
//   s            the step: time t, number n in processing order, direction d, sizes T, B, H, D
//   place(s, t, b, width)   the position of item b at time t in an array [T, B, D width]; t = 0 for an array
//                without T
//   b, j, live   the batch item and the unit; whether the item has not ended at this step
//   Cell         the cell's struct (cell.metal): GATES; INPUTS, numbers that a step reads per unit; SUMMED, parameters
//                that need a gradient; GRADIENTS, how many gradients of preactivations it stores, those of the norm's
//                results first; CARRIED, the states besides h
//   CARRIES<Cell>, FIRST_CARRY<Cell>   how many states have a carry, and the first of them: 0 for h, else 1
//   Norm<Cell>   the norms: GROUPS, how many there are; IS_EACH: one for each gate, else one for all gates
//   a.dh_now     the row with dh_t
//   a.norm_y     the normalised numbers y, [T, B, D G H]
//   a.norm_r     1 / sqrt(variance + eps) of each of R norms, [T, B, D R]
//   a.norm_scale the scale, [D, G H]
//
// The row a.after contains, in this order (N carries, V = SUMMED, G = GATES, U = INPUTS, M = GRADIENTS):
//   [B, D N H]  float: the carries
//   [B, D N H]  float, with `keep` only: the carries before their multiplication by keep
//   [B, D V H]  float: the gradients of the parameters, summed over all steps so far
//   [B, D G H]  the gradients of the recurrent products
//   [B, D U H]  the gradients of the inputs
//   [B, D M H]  the gradients of the preactivations

// The gradients of one unit at one step.
//   ds         the carries (gradients of the states before the step, without the part through the product), h first
//   unscaled   the carries before their multiplication by `keep`
//   dp         the gradients of the parameters, summed over the steps so far
//   d          the gradients of the preactivations         du   the gradients of the inputs
// SIZE_FOR: the size of an array, at least 1, because Metal has no arrays of size 0.
template <class Cell>
struct OwnGradients {
  float ds[Cell::CARRIED + 1], unscaled[Cell::CARRIED + 1], dp[SIZE_FOR<Cell::SUMMED>];
  float d[Cell::GRADIENTS], du[SIZE_FOR<Cell::INPUTS>];
};

// Compute g, the gradients of unit j of batch item b; on entry they are zeros. The carries and the sums dp continue
// those that the launch before wrote. The first launch of the pass takes dcT instead, the cotangent of the last states
// besides h. (The cotangent of the last h is already in dh_t.) If the item has ended (not `live`), nothing is added.
// params_at: where the gradients of the parameters begin in a row. take_carries and take_blocks read numbers of a unit
// that lie H apart; their last argument is the index of the first number to set, for example 1 for the first state
// after h.
template <class Cell, class S, class Arrays>
void own_gradients(
    thread const Step& s, thread const Arrays& a, int b, int j, bool live, Index params_at,
    thread OwnGradients<Cell>& g) {
  constexpr int C = Cell::CARRIED, N = CARRIES<Cell>, FIRST = FIRST_CARRY<Cell>, SUMMED = Cell::SUMMED;
  if (s.n + 1 == s.T) {
    take_blocks<C>(a.dcT, place(s, 0, b, C * s.H) + j, s.H, g.ds, 1);
  } else {
    take_carries<N>(a.before, place(s, 0, b, N * s.H) + j, s.H, g.ds, FIRST);
    take_carries<SUMMED>(a.before, params_at + place(s, 0, b, SUMMED * s.H) + j, s.H, g.dp, 0);
  }
  const float dh = float(((const device S*)a.dh_now)[place(s, 0, b, s.H) + j]);
  if (live) live_unit_backward<Cell, S>(s, a, b, j, dh, g.ds, g.unscaled, g.dp, g.d, g.du);
}

// Compute the gradients of a step and write the row a.after. The first loop adds up two sums over the numbers of norm
// n: of[2 n] is the sum of g, and of[2 n + 1] the sum of g y, where g is the gradient of the norm's result times its
// scale (`scaled`). The second loop computes the gradient of x, (g - mean(g) - y mean(g y)) / sqrt(variance + eps). For
// an item that has ended the gradients of products are copied from a.before; in the first launch of the pass (`begins`)
// they are 0. The parameter Product is not used; all kernels of a step have it.
//   units       how many numbers one block has in a row, B D H
//   start       where the numbers of dtype S begin in a row, behind the floats
//   params_at   where the gradients of the parameters begin
template <class Cell, class Product, class S, class Arrays>
void stepwise_norm_own_backward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  using Normed = Norm<Cell>;
  constexpr int GATES = Cell::GATES, N = CARRIES<Cell>, FIRST = FIRST_CARRY<Cell>, GRADIENTS = Cell::GRADIENTS;
  constexpr int SUMMED = Cell::SUMMED, INPUTS = Cell::INPUTS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int H = s.H, b = int(group.y), first = 32 * simdgroup + lane;
  const Index units = Index(s.B) * s.D * H, start = carried<S>(floats_of<Cell>(a) * units);
  const Index params_at = (is_present(a.keep) ? 2 : 1) * N * units;
  const bool live = s.t < value_at(a.lengths, b, s.T), begins = s.n + 1 == s.T;
  float of[2 * Normed::GROUPS] = {};
  for (int j = first; live && j < H; j += ITEM_THREADS) {
    OwnGradients<Cell> g = {};
    own_gradients<Cell, S>(s, a, b, j, live, params_at, g);
    for (int gate = 0; gate < GATES; ++gate) {
      const int block = gate * H + j, n = Normed::IS_EACH ? gate : 0;
      const float scaled = g.d[gate] * value_at(a.norm_scale, Index(s.d) * GATES * H + block, 1.0f);
      of[2 * n] += scaled, of[2 * n + 1] += scaled * float(a.norm_y[place(s, s.t, b, GATES * H) + block]);
    }
  }
  sum_over_threadgroup(of, simdgroup, lane, sums);
  const device S* products_before = (const device S*)a.before + start;
  device S* arrays = (device S*)a.after + start;
  for (int j = first; j < H; j += ITEM_THREADS) {
    const Index ds_at = place(s, 0, b, N * H) + j, products_at = place(s, 0, b, GATES * H) + j;
    OwnGradients<Cell> g = {};
    own_gradients<Cell, S>(s, a, b, j, live, params_at, g);
    set_carries<N>(a.after, ds_at, H, g.ds, FIRST);
    if (is_present(a.keep)) set_carries<N>(a.after, N * units + ds_at, H, g.unscaled, FIRST);
    set_carries<SUMMED>(a.after, params_at + place(s, 0, b, SUMMED * H) + j, H, g.dp, 0);
    for (int gate = 0; gate < GATES; ++gate) {
      const int block = gate * H + j, n = Normed::IS_EACH ? gate : 0;
      float d = live || begins ? 0.0f : float(products_before[products_at + gate * H]);
      if (live) {
        const float normed = float(a.norm_y[place(s, s.t, b, GATES * H) + block]);
        d = g.d[gate] * value_at(a.norm_scale, Index(s.d) * GATES * H + block, 1.0f);
        d -= (of[2 * n] + normed * of[2 * n + 1]) / (Normed::IS_EACH ? H : GATES * H);
        d *= a.norm_r[place(s, s.t, b, Normed::GROUPS) + n];
      }
      arrays[products_at + gate * H] = S(d);
    }
    for (int k = 0; k < INPUTS; ++k) arrays[units * GATES + place(s, 0, b, INPUTS * H) + k * H + j] = S(g.du[k]);
    for (int k = 0; k < GRADIENTS; ++k)
      arrays[units * (GATES + INPUTS) + place(s, 0, b, GRADIENTS * H) + k * H + j] = S(g.d[k]);
  }
  pad_row(a.after, start + units * (GATES + INPUTS + GRADIENTS), group, first);
}
