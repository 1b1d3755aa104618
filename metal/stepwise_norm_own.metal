// The backward step of a cell written by the user whose products, or their sums with the input's part, are normalised.
// stepwise_norm.metal describes the launches of a step, and the arrays norm_scale, norm_y and norm_r.
//
//   after     the row that this launch writes, in this order. N: number of carries. V: parameters that need a gradient.
//             G: gates. U: inputs of a step. M: gradients of preactivations.
//               [B, D N H]  float: the carries
//               [B, D N H]  float, with `keep` only: the carries before their multiplication by keep
//               [B, D V H]  float: the gradients of the parameters, summed over all steps so far
//               [B, D G H]  the gradients of the recurrent products
//               [B, D U H]  the gradients of the inputs
//               [B, D M H]  the gradients of the preactivations: the first G are those of the norm's results

// Two loops over the units: the first one computes the two sums that each norm needs, the second one the results. Both
// compute the gradients of a unit, because a thread has too many units to keep them. ITEM_THREADS (256) threads share
// one batch item.

// The gradients of one unit at one step. ds: of the states, h first, times `keep`; unscaled: before this
// multiplication. dp: of the parameters, summed over the steps so far. d: of the preactivations. du: of the inputs.
template <class Cell>
struct OwnGradients {
  float ds[Cell::CARRIED + 1], unscaled[Cell::CARRIED + 1], dp[SIZE_FOR<Cell::SUMMED>];
  float d[Cell::GRADIENTS], du[SIZE_FOR<Cell::INPUTS>];
};

// Compute the gradients g of unit j of batch item b, which are zeros on entry. If the item has ended (not `live`), g
// gets only what the launch before has written. of_params: where the gradients of the parameters begin in a row.
template <class Cell, class S, class Arrays>
void own_gradients(
    thread const Step& s, thread const Arrays& a, int b, int j, bool live, Index of_params,
    thread OwnGradients<Cell>& g) {
  constexpr int C = Cell::CARRIED, N = CARRIES<Cell>, FIRST = FIRST_CARRY<Cell>, SUMMED = Cell::SUMMED;
  if (s.n + 1 == s.T) {
    take_blocks<C>(a.dcT, place(s, 0, b, C * s.H) + j, s.H, g.ds, 1);
  } else {
    take_carries<N>(a.before, place(s, 0, b, N * s.H) + j, s.H, g.ds, FIRST);
    take_carries<SUMMED>(a.before, of_params + place(s, 0, b, SUMMED * s.H) + j, s.H, g.dp, 0);
  }
  const float dh = float(((const device S*)a.dh_now)[place(s, 0, b, s.H) + j]);
  if (live) live_unit_backward<Cell, S>(s, a, b, j, dh, g.ds, g.unscaled, g.dp, g.d, g.du);
}

// of[2 n], of[2 n + 1]: for norm n the sums over all units of d and of d y, where y is a normalised number and d its
// gradient.
template <class Cell, class Product, class S, class Arrays>
void stepwise_norm_own_backward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  using Normed = Norm<Cell>;
  constexpr int GATES = Cell::GATES, N = CARRIES<Cell>, FIRST = FIRST_CARRY<Cell>, GRADIENTS = Cell::GRADIENTS;
  constexpr int SUMMED = Cell::SUMMED, INPUTS = Cell::INPUTS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int H = s.H, b = int(group.y), first = 32 * simdgroup + lane;
  const Index units = Index(s.B) * s.D * H, start = carried<S>(floats_of<Cell>(a) * units);
  const Index of_params = (is_present(a.keep) ? 2 : 1) * N * units;
  const bool live = s.t < value_at(a.lengths, b, s.T), begins = s.n + 1 == s.T;
  float of[2 * Normed::GROUPS] = {};
  for (int j = first; live && j < H; j += ITEM_THREADS) {
    OwnGradients<Cell> g = {};
    own_gradients<Cell, S>(s, a, b, j, live, of_params, g);
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
    own_gradients<Cell, S>(s, a, b, j, live, of_params, g);
    set_carries<N>(a.after, ds_at, H, g.ds, FIRST);
    if (is_present(a.keep)) set_carries<N>(a.after, N * units + ds_at, H, g.unscaled, FIRST);
    set_carries<SUMMED>(a.after, of_params + place(s, 0, b, SUMMED * H) + j, H, g.dp, 0);
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
