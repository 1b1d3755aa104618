// One time step of a cell with layer normalisation: y = (x - mean) / sqrt(variance + eps), result = y scale + shift.
// stepwise.metal explains the names that all kernels of a step share, norm.metal the constants of Norm<Cell>.
//
// A norm needs all units of a batch item, whose products several threadgroups compute. So a step has two launches:
//   forward   stepwise_norm_product: recurrent products      stepwise_norm_forward: norms and cell
//   backward  stepwise_norm_dh: dh_t, the gradient of h      stepwise_norm_backward: gradients in cell and norms
// A projection adds a launch. In the second launch a threadgroup has one batch item, and its thread n has the units n,
// n + 256, ... A thread loops over its units once for the sums of each norm, then for the results. Each loop computes
// the units again, because there may be too many to keep them in registers.
//
// Arrays of the norms, for G gates and R norms (stepwise_forward.metal and stepwise_backward.metal describe the
// others):
//   product      [B, D G H] float: the row of stepwise_norm_product
//   dh_now       the row with dh_t, or with a projection dh_t Wp
//   norm_y, norm_c_y   the normalised gates [T, B, D G H] and the normalised c [T, B, D H], without scale and shift
//   norm_r       [T, B, D R]: 1 / sqrt(variance + eps) of each norm; the norm of c is the last one
//   norm_c       [2, D, H]: norm_c_scale and norm_c_shift in one array, for the backward pass

// How many threads a threadgroup has that computes all units of one batch item, and how many simdgroups (groups of 32
// threads that run together).
constant constexpr int ITEM_THREADS = 256, ITEM_SIMDGROUPS = ITEM_THREADS / 32;

// The moments of a set of numbers that are normalised together, or of a part of the set. count: how many numbers there
// are. mean: their mean. squares: the sum of the squares of their distances from the mean. The variance is squares /
// count.
struct Moments {
  float count, mean, squares;
};

// Update the moments `of` of a set of numbers for one more number x. This is Welford's method. Unlike the formula
// mean(x^2) - mean(x)^2, it never subtracts two large sums that are nearly equal.
inline void add_to(thread Moments& of, float x) {
  const float distance = x - of.mean;
  of.count += 1.0f;
  of.mean += distance / of.count;
  of.squares += distance * (x - of.mean);
}

// Replace the moments `of` of a lane's numbers by the moments of the numbers of all 32 lanes of its simdgroup. A lane's
// sum of squares is about its own mean; about the common mean it is larger by count * (own mean - common mean)^2.
// max(count, 1) avoids a division by 0 if no lane has a number.
inline void merge_in_simdgroup(thread Moments& of) {
  const float count = simd_sum(of.count), mean = simd_sum(of.count * of.mean) / max(count, 1.0f);
  of.squares = simd_sum(of.squares + of.count * (of.mean - mean) * (of.mean - mean));
  of.count = count, of.mean = mean;
}

// For each of N norms replace `of[n]`, the moments of a thread's numbers, by the moments of all numbers in the
// threadgroup. memory: threadgroup memory, with three floats for each norm and simdgroup. Each of the ITEM_SIMDGROUPS =
// 8 simdgroups writes its moments there. After the barrier lane k of every simdgroup reads the moments of simdgroup k,
// and every simdgroup merges all of them. The lanes from 8 on read a valid address, but use 0 as the count, so their
// mean has no weight.
template <int N>
void merge_in_threadgroup(thread Moments (&of)[N], int simdgroup, int lane, threadgroup float* memory) {
  for (int n = 0; n < N; ++n) {
    merge_in_simdgroup(of[n]);
    threadgroup float* own = memory + 3 * (ITEM_SIMDGROUPS * n + simdgroup);
    if (lane == 0) own[0] = of[n].count, own[1] = of[n].mean, own[2] = of[n].squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the sums of all simdgroups from their reads
  for (int n = 0; n < N; ++n) {
    threadgroup const float* read = memory + 3 * (ITEM_SIMDGROUPS * n + min(lane, ITEM_SIMDGROUPS - 1));
    const bool reads = lane < ITEM_SIMDGROUPS;
    of[n].count = reads ? read[0] : 0.0f, of[n].mean = read[1], of[n].squares = reads ? read[2] : 0.0f;
    merge_in_simdgroup(of[n]);
  }
}

// Replace each of a thread's N numbers `of` by its sum over all threads of the threadgroup. First each of the
// ITEM_SIMDGROUPS = 8 simdgroups adds up the numbers of its lanes, and writes the sums to `memory`, threadgroup memory
// with one float for each number and simdgroup. After the barrier lane k of every simdgroup reads the sum of simdgroup
// k (the lanes from 8 on take 0), and every simdgroup adds them up.
template <int N>
void sum_over_threadgroup(thread float (&of)[N], int simdgroup, int lane, threadgroup float* memory) {
  for (int n = 0; n < N; ++n) {
    of[n] = simd_sum(of[n]);
    if (lane == 0) memory[ITEM_SIMDGROUPS * n + simdgroup] = of[n];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the sums of all simdgroups from their reads
  for (int n = 0; n < N; ++n)
    of[n] = simd_sum(lane < ITEM_SIMDGROUPS ? memory[ITEM_SIMDGROUPS * n + min(lane, ITEM_SIMDGROUPS - 1)] : 0.0f);
}

// The first launch of a forward step: compute the recurrent products of all gates and units, x Wh^T with x = mask *
// h_before, and write them to a.after [B, D G H] as floats. width: the number of columns of the product, G H per
// direction. Here the weights are not divided by gates (OneBlock), and a `cell` is one number of the result.
template <class Cell, class Product, class S, class Arrays>
void stepwise_norm_product(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int width = Cell::GATES * s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Block own = {b0, j0, simdgroup, lane, sums};
  const Index start = carried<S>(Cell::CARRIED * (Index(s.B) * s.D * s.H));
  const Previous<S, Arrays> x = {h_of<S>(a.before, start, a.h_before), &a, &s};
  Product::template product<OneBlock, 0, COLUMNS, 1>(
      x, rows_from(a.Wh, Index(s.d) * width, s.K), s.B, width, product_length(s, a), own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b < s.B && j < width) set_carry(a.after, place(s, 0, b, width) + j, sums[cell]);
  }
  pad_row(a.after, carried<S>(Index(s.B) * s.D * width), group, 32 * simdgroup + lane);
}

// Return the number that is normalised for one gate and unit j of batch item b: the recurrent product or, if IS_SUM,
// the sum of this product and z, the input's part of the preactivation. width: how many numbers of gates there are per
// direction.
template <class Cell, class Arrays>
float before_norm(thread const Step& s, thread const Arrays& a, int b, int gate, int j) {
  const int width = Cell::GATES * s.H, block = Cell::block(gate) * s.H + j;
  const float product = carry_at(a.product, place(s, 0, b, width) + block);
  return Norm<Cell>::IS_SUM ? product + float(a.z[place(s, s.t, b, width) + block]) : product;
}

// Compute the step of unit j, but without the norm of c.
//   of       the moments of the gates' norms
//   states   h, then c: on entry those before the step, times `keep`; on return the new ones
//   y        on return the numbers that the cell saves: the gates
//   o        on return the last gate's preactivation without its peephole, for normed_output
// q[gate] becomes the result of the norm, which Cell::forward adds to y[gate]. y is z, the input's part of the
// preactivations, or 0 if q already contains z (IS_SUM). p: the cell's constants, such as peephole weights. u: the
// inputs of a user's cell.
template <class Cell, class Arrays>
void normed_unit(
    thread const Step& s, thread const Arrays& a, int b, int j, thread const Moments (&of)[Norm<Cell>::GROUPS],
    thread float (&states)[Cell::CARRIED + 1], thread float (&y)[VALUES<Cell>], thread float& o) {
  constexpr int GATES = Cell::GATES, INPUTS = Cell::INPUTS;
  float q[GATES], p[SIZE_FOR<Cell::CONSTANTS>], u[SIZE_FOR<INPUTS>] = {};
  for (int gate = 0; gate < GATES; ++gate) {
    const Index block = Cell::block(gate) * s.H + j, at = Index(s.d) * GATES * s.H + block;
    y[gate] = Norm<Cell>::IS_SUM ? 0.0f : float(a.z[place(s, s.t, b, GATES * s.H) + block]);
    q[gate] = before_norm<Cell>(s, a, b, gate, j);
    if constexpr (Norm<Cell>::OF != NOTHING) {
      thread const Moments& m = of[Norm<Cell>::IS_EACH ? gate : 0];
      q[gate] = (q[gate] - m.mean) * rsqrt(m.squares / m.count + float(a.norm_eps[0]));
      q[gate] = q[gate] * value_at(a.norm_scale, at, 1.0f) + value_at(a.norm_shift, at, 0.0f);
    }
  }
  o = y[GATES - 1] + q[GATES - 1];
  take_blocks<INPUTS>(a.inputs, place(s, s.t, b, INPUTS * s.H) + j, s.H, u, 0);
  Cell::template constants<Index>(a, s.d, s.H, j, p);
  Cell::forward(p, u, q, states, y);
}

// Normalise c and return m = o s_output(norm(c)), where s_output is the activation of c; m is h, or what a projection
// multiplies. For an LSTM only, which has 4 gates.
//   o      gate o's preactivation without the peephole term      of   the moments of c
//   c      on entry c before the norm; on return, if IN_STATE, the normalised c
//   seen   norm(c), with scale and shift: the c that the output sees
//   y      the gates. If the peephole of o reads the normalised c, gate o is computed again here, because this c was
//          not known before. Its argument 0.0f is the forget bias, which only gate f has
template <class Cell, class Arrays>
float normed_output(
    thread const Step& s, thread const Arrays& a, int j, float o, thread const Moments& of, thread float& c,
    thread float (&y)[4]) {
  const Index at = Index(s.d) * s.H + j;
  float seen = (c - of.mean) * rsqrt(of.squares / of.count + float(a.norm_eps[0]));
  seen = seen * value_at(a.norm_c_scale, at, 1.0f) + value_at(a.norm_c_shift, at, 0.0f);
  if (Norm<Cell>::IN_STATE) c = seen;
  if constexpr (Norm<Cell>::IN_STATE && Cell::PEEPHOLE == Cell::O_SEES_CURRENT) {
    float p[Cell::CONSTANTS];
    Cell::template constants<Index>(a, s.d, s.H, j, p);
    y[Cell::GATE_O] = Cell::gate(Cell::GATE_O, o, p[Cell::GATE_O], c, 0.0f);
  }
  return y[Cell::GATE_O] * activate(Cell::activation(Cell::OUTPUT), seen);
}

// The second launch of a forward step: compute the norms and the cell, and write the row a.after (the array of this
// launch): c as float, h and, if SAVES, the gates for a backward pass. A cell without norms writes the same row
// (stepwise_forward.metal). The first loop computes the moments of the gates' norms, the second loop those of c, and
// the third loop computes and writes the results. Each norm has its own part of the threadgroup memory `sums`, so one
// barrier per norm is enough.
template <class Cell, class Product, bool SAVES, class S, class Arrays>
void stepwise_norm_forward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  using N = Norm<Cell>;
  constexpr int GATES = Cell::GATES, C = Cell::CARRIED, KEPT = SAVES ? int(Cell::KEPT) : 0;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int H = s.H, b = int(group.y), first = 32 * simdgroup + lane, length = value_at(a.lengths, b, s.T);
  const Index units = Index(s.B) * s.D * H, start = carried<S>(C * units);
  const bool starts = is_first(s, length), live = s.t < length;
  const device S* h = (const device S*)a.before + start;
  Moments of[N::GROUPS] = {}, of_c[1] = {};
  float states[C + 1], y[VALUES<Cell>], o;
  if constexpr (N::OF != NOTHING) {
    for (int j = first; j < H; j += ITEM_THREADS)
      for (int gate = 0; gate < GATES; ++gate) add_to(of[N::IS_EACH ? gate : 0], before_norm<Cell>(s, a, b, gate, j));
    merge_in_threadgroup(of, simdgroup, lane, sums);
  }
  if constexpr (N::HAS_C != 0) {
    for (int j = first; j < H; j += ITEM_THREADS) {
      take_states<Cell, S>(s, a, starts, h, b, j, states);
      normed_unit<Cell>(s, a, b, j, of, states, y, o);
      add_to(of_c[0], states[1]);
    }
    merge_in_threadgroup(of_c, simdgroup, lane, sums + 3 * ITEM_SIMDGROUPS * N::GROUPS);
  }
  device S* arrays = (device S*)a.after + start;
  for (int j = first; j < H; j += ITEM_THREADS) {
    const Index kept_at = place(s, 0, b, KEPT * H) + j;
    take_states<Cell, S>(s, a, starts, h, b, j, states);
    normed_unit<Cell>(s, a, b, j, of, states, y, o);
    if constexpr (N::HAS_C != 0) states[0] = normed_output<Cell>(s, a, j, o, of_c[0], states[1], y);
    for (int k = 0; k <= C; ++k) states[k] = live ? states[k] : 0.0f;
    set_carries<C>(a.after, place(s, 0, b, C * H) + j, H, states, 1);
    arrays[place(s, 0, b, H) + j] = S(states[0]);
    for (int k = 0; k < KEPT; ++k) arrays[units + kept_at + Cell::block(k) * H] = S(live ? y[k] : 0.0f);
  }
  pad_row(a.after, start + units * (1 + KEPT), group, first);
}

// --- Backward ---

// The argument Cell of the kernel stepwise_dh for a cell with norms. stepwise_dh computes the gradient of h from a row,
// the array that the launch before wrote. In a cell with norms this row has, behind the carries and the other floats,
// the gradients of the products, so stepwise_dh only multiplies them by Wh, in one part (SEGMENTS is 1). For a GRU
// without norms stepwise_dh also multiplies the candidate's dz by the gate r; with norms the launch before has done
// this. ADDS_CARRY: whether stepwise_dh also adds the carry of h (the part of its gradient that does not go through the
// product) to the result, as PASSES_H. CARRIED + PASSES_H is the same as in Cell, so that the row has the same number
// of floats.
template <class Cell, bool ADDS_CARRY>
struct CellForDh {
  enum { GATES = Cell::GATES, PRODUCTS = GATES, GRADIENTS = GATES, SEGMENTS = 1, SUMMED = Cell::SUMMED };
  enum { CARRIED = int(Cell::CARRIED) + int(Cell::PASSES_H) - int(ADDS_CARRY), PASSES_H = ADDS_CARRY };
  static int block(int gate);  // code that never runs with one segment names this function
};

// The first launch of a backward step: compute dh_t [B, D K], the gradient of h of width K, from the gradients that the
// launch before wrote and from the cotangents (the gradients that the caller gives). The argument `false` leaves out
// the carry of h (the part of its gradient that does not go through the product), which the second launch adds.
template <class Cell, class Product, class S, class Arrays>
void stepwise_norm_dh(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  stepwise_dh<CellForDh<Cell, false>, Product, S>(a, sums, group, simdgroup, lane);
}

// Compute dh0 [B, D K], the gradient of the first h, once after all backward steps. K: the width of h. If the cell also
// reads h outside the product, as a GRU does (Cell::PASSES_H), that part of its gradient, the carry of h, is added
// here, because no second launch follows.
template <class Cell, class Product, class S, class Arrays>
void stepwise_norm_dh0(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  stepwise_dh<CellForDh<Cell, Cell::PASSES_H != 0>, Product, S>(a, sums, group, simdgroup, lane);
}

// The gradients of one unit at one step.
//   ds         the carries: gradients of the states before the step, without the part through the products, h first
//   unscaled   the carries before their multiplication by `keep`
//   d          the gradients of the preactivations         du   the gradients of a user's cell's inputs
//   dp         the gradients of its parameters, summed over the steps so far
//   of_c       the gradient of the result of the norm of c
template <class Cell>
struct UnitGradients {
  float ds[Cell::CARRIED + 1], unscaled[Cell::CARRIED + 1], dp[SIZE_FOR<Cell::SUMMED>];
  float d[Cell::GRADIENTS], du[SIZE_FOR<Cell::INPUTS>], of_c;
};

// Compute the gradients g of a live unit of an LSTM with a norm of c: m = o s_output(norm(c)). has_sums, c_sums: as in
// unit_gradients. dm: the gradient of m.
//   y, p            the saved gates; the unit's constants
//   before, after   the states before the step, times `keep`, and after it: h first, then c
//   dc              the gradient of the new c without the part that goes through m
//   seen            norm(c), with scale and shift: the c that the output sees
// Cell::backward changes `ds` from the gradients of `after` to those of `before`. u, du and dp are for other cells.
template <class Cell, class S, class Arrays>
void normed_state_backward(
    thread const Step& s, thread const Arrays& a, int b, int j, float dm, bool has_sums,
    thread const float (&c_sums)[2], thread UnitGradients<Cell>& g) {
  constexpr int O = Cell::GATE_O, NORMS = Norm<Cell>::OF == NOTHING ? 1 : Norm<Cell>::GROUPS + 1;
  const Index now = place(s, s.t, b, s.H) + j, scale_at = Index(s.d) * s.H + j;
  float y[Cell::KEPT], before[2], after[2], ds[2] = {}, p[Cell::CONSTANTS], u[1], du[1], dp[1];
  take_saved<Cell, S>(s, a, b, j, y);
  take_both_states<Cell>(s, a, is_first(s, value_at(a.lengths, b, s.T)), b, j, before, after);
  Cell::template constants<Index>(a, s.d, s.H, j, p);
  const float keep = value_at(a.keep, place(s, s.t, b, 1), 1.0f), normed = a.norm_c_y[now];
  const float scale = float(a.norm_c[scale_at]);
  const float seen = Norm<Cell>::IN_STATE ? after[1] : normed * scale + float(a.norm_c[Index(s.D) * s.H + scale_at]);
  const float output = activate(Cell::activation(Cell::OUTPUT), seen);
  float dc = g.ds[1] + value_at(a.dc, now, 0.0f);
  g.d[O] = Cell::gate_backward(g.d[O], dm, output, slope(Cell::activation(O), y[O]));
  if (Cell::PEEPHOLE == Cell::O_SEES_CURRENT) dc += g.d[O] * p[O];
  // If IN_STATE, the next step got norm(c), so dc is a part of the gradient of norm(c). Otherwise dc is the gradient of
  // c before the norm.
  g.of_c = Cell::state_backward(Norm<Cell>::IN_STATE ? dc : 0.0f, dm, y[O], output);
  if (Norm<Cell>::IN_STATE) dc = 0.0f;
  if (!has_sums) return;
  before[1] *= keep;
  const float of_norm = a.norm_r[place(s, s.t, b, NORMS) + NORMS - 1];
  ds[1] = dc + (g.of_c * scale - (c_sums[0] + normed * c_sums[1]) / s.H) * of_norm;
  // Cell::backward must know whether the clip changed c. The clip comes before the norm. If the next step gets the
  // normalised c (IN_STATE), the saved c is the normalised one. So c before clip and norm is computed again.
  if (Norm<Cell>::IN_STATE) after[1] = y[Cell::GATE_F] * before[1] + y[Cell::GATE_I] * y[Cell::GATE_G];
  // The gradients that go through m are known, among them of_o, that of gate o's preactivation. So Cell::backward gets
  // 0 as the gradient of m (ds[0]) and for gate o, and of_o is restored afterwards.
  const float of_o = g.d[O];
  g.d[O] = 0.0f;
  Cell::backward(p, u, y, before, after, ds, g.d, du, dp);
  g.d[O] = of_o;
  if (Cell::PEEPHOLE == Cell::O_SEES_PREVIOUS) ds[1] += of_o * p[O];
  g.unscaled[1] = ds[1], g.ds[1] = ds[1] * keep;
}

// Compute g, the gradients of unit j of batch item b at this step; on entry they are zeros. The carries and the sums dp
// continue those that the launch before wrote, from params_at on in its row. The first launch of the pass takes dcT
// instead, the cotangent of the last states besides h. (The cotangent of the last h is already in dh_t.) If the item
// has ended (not `live`), nothing is added. The norm of c needs two sums over all units, c_sums: the sum of
// scale * g.of_c, and the sum of these numbers times norm_c_y. To compute them the kernel first calls this function
// with has_sums = false; then only g.of_c is valid.
template <class Cell, class S, class Arrays>
void unit_gradients(
    thread const Step& s, thread const Arrays& a, int b, int j, bool live, Index params_at, bool has_sums,
    thread const float (&c_sums)[2], thread UnitGradients<Cell>& g) {
  constexpr int C = Cell::CARRIED, N = CARRIES<Cell>, FIRST = FIRST_CARRY<Cell>, SUMMED = Cell::SUMMED;
  const int H = s.H;
  if (s.n + 1 == s.T) {
    take_blocks<C>(a.dcT, place(s, 0, b, C * H) + j, H, g.ds, 1);
  } else {
    take_carries<N>(a.before, place(s, 0, b, N * H) + j, H, g.ds, FIRST);
    take_carries<SUMMED>(a.before, params_at + place(s, 0, b, SUMMED * H) + j, H, g.dp, 0);
  }
  if (!live) return;
  for (int k = 0; k < Cell::GRADIENTS; ++k)
    g.d[k] = value_at(a.dgates, place(s, s.t, b, Cell::GRADIENTS * H) + Cell::block(k) * H + j, 0.0f);
  const float dh = float(((const device S*)a.dh_now)[place(s, 0, b, H) + j]);
  if constexpr (Norm<Cell>::HAS_C != 0) normed_state_backward<Cell, S>(s, a, b, j, dh, has_sums, c_sums, g);
  else live_unit_backward<Cell, S>(s, a, b, j, dh, g.ds, g.unscaled, g.dp, g.d, g.du);
}

// Compute the gradients of a live unit and, from them, `scaled`: for each gate the gradient of the result of its norm
// times the norm's scale.
template <class Cell, class S, class Arrays>
void scaled_gradients(
    thread const Step& s, thread const Arrays& a, int b, int j, thread const UnitGradients<Cell>& g,
    thread float (&scaled)[Cell::GATES]) {
  float y[SIZE_FOR<Cell::KEPT>];
  take_saved<Cell, S>(s, a, b, j, y);
  for (int gate = 0; gate < Cell::GATES; ++gate) {
    const Index scale_at = (Index(s.d) * Cell::GATES + Cell::block(gate)) * s.H + j;
    scaled[gate] = Cell::product_gradient(gate, y, g.d) * value_at(a.norm_scale, scale_at, 1.0f);
  }
}

// The second launch of a backward step: compute the gradients in the cell and in the norms. The first loop over the
// units adds up the two sums for the norm of c, in of[0] and of[1] and not in c_sums, because c_sums is a const
// parameter of unit_gradients, which the loop calls. The second loop adds up the sums for the norms of the gates: of[2
// n] is the sum of g, and of[2 n + 1] the sum of g y, over the numbers of norm n. g is the gradient of the norm's
// result times its scale (`scaled`). Each norm has its own part of the threadgroup memory `sums`. The third loop
// computes the gradient of x, (g - mean(g) - y mean(g y)) / sqrt(variance + eps), and writes the row a.after, the array
// of this launch (N carries, which are the parts of the states' gradients that do not go through the products; V =
// SUMMED, G = GATES, U = INPUTS, M = GRADIENTS):
//   [B, D N H]  float: the carries, which the launch of the step before reads
//   [B, D N H]  float, with `keep` only: the carries before their multiplication by keep
//   [B, D V H]  float: the gradients of the parameters, summed over all steps so far
//   [B, D G H]  the gradients of the recurrent products
//   [B, D U H]  the gradients of the inputs
//   [B, D M H]  if the gates have norms: the gradients of the preactivations, those of the norms' results first
//   [B, D H]    with a norm of c: the gradient of the result of this norm
// For an item that has ended (not `live`) the loops add nothing to the sums, and its carries and its gradients of
// products are copied from a.before. In the first launch of the pass (`begins`), which has no row before it, the
// gradients of products are 0.
// params_at: where the gradients of the parameters begin in a row.
template <class Cell, class Product, class S, class Arrays>
void stepwise_norm_backward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  using Normed = Norm<Cell>;
  constexpr int GATES = Cell::GATES, N = CARRIES<Cell>, FIRST = FIRST_CARRY<Cell>, SUMMED = Cell::SUMMED;
  constexpr int INPUTS = Cell::INPUTS, NORMS = Normed::GROUPS + Normed::HAS_C;
  constexpr bool OF_PRODUCTS = Normed::OF != NOTHING;
  constexpr int GRADIENTS = OF_PRODUCTS ? int(Cell::GRADIENTS) : 0, BLOCKS = GATES + INPUTS + GRADIENTS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int H = s.H, b = int(group.y), first = 32 * simdgroup + lane;
  const Index units = Index(s.B) * s.D * H, start = carried<S>(floats_of<Cell>(a) * units);
  const Index params_at = (is_present(a.keep) ? 2 : 1) * N * units;
  const bool live = s.t < value_at(a.lengths, b, s.T), begins = s.n + 1 == s.T;
  float c_sums[2] = {}, of[2 * Normed::GROUPS] = {}, scaled[GATES];
  if constexpr (Normed::HAS_C != 0) {
    for (int j = first; live && j < H; j += ITEM_THREADS) {
      UnitGradients<Cell> g = {};
      unit_gradients<Cell, S>(s, a, b, j, live, params_at, false, c_sums, g);
      const float of_c = g.of_c * float(a.norm_c[Index(s.d) * H + j]);
      of[0] += of_c, of[1] += of_c * float(a.norm_c_y[place(s, s.t, b, H) + j]);
    }
    c_sums[0] = of[0], c_sums[1] = of[1], of[0] = of[1] = 0.0f;
    sum_over_threadgroup(c_sums, simdgroup, lane, sums + 2 * ITEM_SIMDGROUPS * Normed::GROUPS);
  }
  if constexpr (OF_PRODUCTS) {
    for (int j = first; live && j < H; j += ITEM_THREADS) {
      UnitGradients<Cell> g = {};
      unit_gradients<Cell, S>(s, a, b, j, live, params_at, true, c_sums, g);
      scaled_gradients<Cell, S>(s, a, b, j, g, scaled);
      for (int gate = 0; gate < GATES; ++gate) {
        const int n = Normed::IS_EACH ? gate : 0;
        const Index at = place(s, s.t, b, GATES * H) + Cell::block(gate) * H + j;
        of[2 * n] += scaled[gate], of[2 * n + 1] += scaled[gate] * float(a.norm_y[at]);
      }
    }
    sum_over_threadgroup(of, simdgroup, lane, sums);
  }
  const device S* products_before = (const device S*)a.before + start;
  device S* arrays = (device S*)a.after + start;
  for (int j = first; j < H; j += ITEM_THREADS) {
    const Index ds_at = place(s, 0, b, N * H) + j, products_at = place(s, 0, b, GATES * H) + j;
    UnitGradients<Cell> g = {};
    unit_gradients<Cell, S>(s, a, b, j, live, params_at, true, c_sums, g);
    if (OF_PRODUCTS && live) scaled_gradients<Cell, S>(s, a, b, j, g, scaled);
    set_carries<N>(a.after, ds_at, H, g.ds, FIRST);
    if (is_present(a.keep)) set_carries<N>(a.after, N * units + ds_at, H, g.unscaled, FIRST);
    set_carries<SUMMED>(a.after, params_at + place(s, 0, b, SUMMED * H) + j, H, g.dp, 0);
    for (int gate = 0; gate < GATES; ++gate) {
      const int block = Cell::block(gate) * H;
      float d = live ? g.d[gate] : begins ? 0.0f : float(products_before[products_at + block]);
      if (OF_PRODUCTS && live) {
        const int n = Normed::IS_EACH ? gate : 0, place_of_norm = Normed::IS_EACH ? Cell::block(gate) : 0;
        const float normed = value_at(a.norm_y, place(s, s.t, b, GATES * H) + block + j, 0.0f);
        d = scaled[gate] - (of[2 * n] + normed * of[2 * n + 1]) / (Normed::IS_EACH ? H : GATES * H);
        d *= value_at(a.norm_r, place(s, s.t, b, NORMS) + place_of_norm, 0.0f);
      }
      arrays[products_at + block] = S(d);
    }
    for (int k = 0; k < INPUTS; ++k) arrays[units * GATES + place(s, 0, b, INPUTS * H) + k * H + j] = S(g.du[k]);
    for (int k = 0; k < GRADIENTS; ++k)
      arrays[units * (GATES + INPUTS) + place(s, 0, b, GRADIENTS * H) + Cell::block(k) * H + j] = S(g.d[k]);
    if (Normed::HAS_C) arrays[units * BLOCKS + place(s, 0, b, H) + j] = S(g.of_c);
  }
  pad_row(a.after, start + units * (BLOCKS + Normed::HAS_C), group, first);
}
