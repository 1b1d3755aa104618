// Layer normalisation in the kernels that run one time step; norm.metal has its options.
//
// A norm needs numbers of all units, which several threadgroups compute in a product. So a step of a cell with a norm
// has two launches (with a projection a third one): the first computes the product, and in the second each threadgroup
// of 256 threads computes all units of one batch item. A thread computes the units number thread, thread + 256, ... A
// launch has several loops over these units: one for the sums of each norm, and one for the results. Each loop computes
// again what it needs, because a thread's number of units depends on H, so the results of all its units cannot stay in
// registers.
//
// Barriers: one for each norm, between the writes of the simdgroups' sums and their reads. Each norm has its own part
// of the threadgroup memory. All threads of a threadgroup have the same batch item, so they all reach a barrier or
// none.
//
// Arrays besides those of stepwise_forward.metal, stepwise_backward.metal and norm.metal:
//   product   [B, D G H] float, a row: the recurrent products of this step, from the first launch
//   norm_y    [T, B, D G H], norm_c_y [T, B, D H] float: the normalised numbers, without scale and shift
//   norm_c    [2, D, H]: the scale and the shift of the norm of c, in the backward pass
//   norm_r    [T, B, D R] float: 1 / sqrt(variance + eps) of each of the R norms; the norm of c is the last one
//   after     the row that a launch writes: forward c, h and the gates, as without a norm. Backward, in this order:
//               [B, D H]    float: the carry, which the step before reads: an LSTM's gradient of c, or the part of a
//                           GRU's or RNN's gradient of h that does not come through the products
//               [B, D H]    float, with `keep` only: the carry before its multiplication by keep
//               [B, D G H]  the gradients of the recurrent products
//               [B, D G H]  if the products are normalised: dz, the gradients of the preactivations
//               [B, D H]    with a norm of c: the gradient of its result

// `Cell` is the struct of a cell (cell.metal), Norm<Cell> its norms (norm.metal): OF says what is normalised, GROUPS
// how many norms the gates have. Letters: D directions, G gates, H units, K the width of h. S is the dtype of the
// arrays. A row is the array that one launch writes; carry_at and set_carry read and write one of its floats.
constant constexpr int ITEM_THREADS = 256, ITEM_SIMDGROUPS = ITEM_THREADS / 32;

// The moments of some numbers: how many they are, their mean, and the sum of the squares of their distances from it.
struct Moments {
  float count, mean, squares;
};

// Add x to the numbers of which these are the moments. Welford's method: it never subtracts two large sums that are
// nearly equal.
inline void include(thread Moments& of, float x) {
  const float distance = x - of.mean;
  of.count += 1.0f;
  of.mean += distance / of.count;
  of.squares += distance * (x - of.mean);
}

// Replace the moments of a lane's numbers by those of all numbers of its simdgroup. The squares of a part count from
// its own mean, so count * (distance of the two means)^2 is added. max(count, 1): no lane may have a number.
inline void over_simdgroup(thread Moments& of) {
  const float count = simd_sum(of.count), mean = simd_sum(of.count * of.mean) / max(count, 1.0f);
  of.squares = simd_sum(of.squares + of.count * (of.mean - mean) * (of.mean - mean));
  of.count = count, of.mean = mean;
}

// Replace the moments of a thread's numbers, for N norms, by those of all numbers of the threadgroup. `memory` has
// three floats for each norm and simdgroup. After the barrier lane n reads those of simdgroup n, and the other lanes
// count 0.
template <int N>
void over_threadgroup(thread Moments (&of)[N], int simdgroup, int lane, threadgroup float* memory) {
  for (int n = 0; n < N; ++n) {
    over_simdgroup(of[n]);
    threadgroup float* own = memory + 3 * (ITEM_SIMDGROUPS * n + simdgroup);
    if (lane == 0) own[0] = of[n].count, own[1] = of[n].mean, own[2] = of[n].squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the sums of all simdgroups from their reads
  for (int n = 0; n < N; ++n) {
    threadgroup const float* read = memory + 3 * (ITEM_SIMDGROUPS * n + min(lane, ITEM_SIMDGROUPS - 1));
    const bool reads = lane < ITEM_SIMDGROUPS;
    of[n].count = reads ? read[0] : 0.0f, of[n].mean = read[1], of[n].squares = reads ? read[2] : 0.0f;
    over_simdgroup(of[n]);
  }
}

// Replace each of a thread's N numbers by its sum over all threads of the threadgroup.
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

// Compute the recurrent product of a step, `after` [B, D G H] float.
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

// Return the number of one gate and unit j that is normalised: the product, or its sum with the input's part.
template <class Cell, class Arrays>
float before_norm(thread const Step& s, thread const Arrays& a, int b, int gate, int j) {
  const int width = Cell::GATES * s.H, block = Cell::block(gate) * s.H + j;
  const float product = carry_at(a.product, place(s, 0, b, width) + block);
  return Norm<Cell>::IS_SUM ? product + float(a.z[place(s, s.t, b, width) + block]) : product;
}

// Compute one unit without the norm of c. of: the moments of the numbers that are normalised. states: on entry those
// before the step, on return the new ones. y: on return the gates. o: on return the last gate's preactivation, without
// peephole.
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

// Normalise c, and compute m = o s_output(norm(c)). o: o's preactivation, without peephole. y: the gates; that of o is
// computed again if its peephole reads the normalised c. of: the moments of c.
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

// The second launch of a forward step: compute the norms and the cell. A threadgroup has one batch item, a thread the
// units first, first + 256, ... SAVES: whether the gates are written for a backward pass.
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
      for (int gate = 0; gate < GATES; ++gate) include(of[N::IS_EACH ? gate : 0], before_norm<Cell>(s, a, b, gate, j));
    over_threadgroup(of, simdgroup, lane, sums);
  }
  if constexpr (N::HAS_C != 0) {
    for (int j = first; j < H; j += ITEM_THREADS) {
      take_states<Cell, S>(s, a, starts, h, b, j, states);
      normed_unit<Cell>(s, a, b, j, of, states, y, o);
      include(of_c[0], states[1]);
    }
    over_threadgroup(of_c, simdgroup, lane, sums + 3 * ITEM_SIMDGROUPS * N::GROUPS);
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

// A cell for the kernel stepwise_dh, which computes dh from rows that hold the gradients of the products. These are one
// operand, and the kernel multiplies none of them by a gate. PASSES: whether to add the part of dh that bypasses the
// products.
template <class Cell, bool PASSES>
struct OfProducts {
  enum { GATES = Cell::GATES, PRODUCTS = GATES, GRADIENTS = GATES, SEGMENTS = 1, SUMMED = Cell::SUMMED };
  enum { CARRIED = int(Cell::CARRIED) + int(Cell::PASSES_H) - int(PASSES), PASSES_H = PASSES };
  static int block(int gate);  // named by code that never runs with one segment
};

// Compute the part of dh_t, the gradient of h, that comes from the products of the next step and from the cotangents.
template <class Cell, class Product, class S, class Arrays>
void stepwise_norm_dh(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  stepwise_dh<OfProducts<Cell, false>, Product, S>(a, sums, group, simdgroup, lane);
}

// Compute dh0, after the backward steps.
template <class Cell, class Product, class S, class Arrays>
void stepwise_norm_dh0(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  stepwise_dh<OfProducts<Cell, Cell::PASSES_H != 0>, Product, S>(a, sums, group, simdgroup, lane);
}

// Compute dm [B, D H] = dh_t Wp, with a projection Wp [K, H]; m is what it multiplies, and K the width of h. `dh_now`
// is the row with dh_t [B, D K].
template <class Product, class S, class Arrays>
void stepwise_norm_dm(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Block own = {b0, j0, simdgroup, lane, sums};
  const Items<S> x = items_of(s, (const device S*)a.dh_now, s.K);
  Product::template product<OneBlock, 0, COLUMNS, 1>(x, a.weights + Index(s.d) * s.H * s.K, s.B, s.H, s.K, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b < s.B && j < s.H) ((device S*)a.after)[place(s, 0, b, s.H) + j] = S(sums[cell]);
  }
  pad_row(a.after, Index(s.B) * s.D * s.H, group, 32 * simdgroup + lane);
}

// The gradients of one unit at one step. dz: the gradients of its preactivations. carry: the gradient of c or h before
// the step; that of h leaves out what comes through the products. It is not multiplied by `keep` yet. of_c: the
// gradient of the result of the norm of c.
template <int GATES>
struct UnitGradients {
  float dz[GATES], carry, of_c;
};

// Compute the gradient of the result of the norm of c, `of_c`. It comes from m = o s_output(norm(c)); if the state is
// normalised, also from `carry` and from o's peephole. On return s is s_output(norm(c)), dz[GATE_O] the gradient of o's
// preactivation, and carry is 0 if it is part of of_c.
template <class Cell>
void norm_of_c_backward(
    thread const float (&y)[4], thread const float (&p)[Cell::CONSTANTS], float seen, float dm, thread float& s,
    thread UnitGradients<4>& d) {
  constexpr int O = Cell::GATE_O;
  s = activate(Cell::activation(Cell::OUTPUT), seen);
  d.dz[O] = Cell::gate_backward(d.dz[O], dm, s, slope(Cell::activation(O), y[O]));
  if (Cell::PEEPHOLE == Cell::O_SEES_CURRENT) d.carry += d.dz[O] * p[O];
  d.of_c = Cell::state_backward(Norm<Cell>::IN_STATE ? d.carry : 0.0f, dm, y[O], s);
  if (Norm<Cell>::IN_STATE) d.carry = 0.0f;
}

// Compute the gradients of unit j. in_c: two sums over all units, which the norm of c needs: of g, the gradient of the
// normalised c, and of g times the normalised c. As long as they are not known (`has_sums` is false), compute of_c
// only.
template <class Cell, class S, class Arrays>
void unit_gradients(
    thread const Step& s, thread const Arrays& a, int b, int j, bool starts, bool has_sums,
    thread const float (&in_c)[2], thread UnitGradients<Cell::GATES>& d) {
  constexpr int GATES = Cell::GATES, C = Cell::CARRIED;
  const int H = s.H;
  const Index at = place(s, 0, b, H) + j, now = place(s, s.t, b, H) + j;
  float y[GATES], before[C + 1], after[C + 1], ds[C + 1] = {};
  float p[SIZE_FOR<Cell::CONSTANTS>], u[1], du[1], dp[1];
  for (int gate = 0; gate < GATES; ++gate) {
    const Index gate_now = place(s, s.t, b, GATES * H) + j + Cell::block(gate) * H;
    y[gate] = value_at(a.gates, gate_now, 0.0f), d.dz[gate] = value_at(a.dgates, gate_now, 0.0f);
  }
  d.carry = d.of_c = 0.0f;
  if (CARRIES<Cell>) d.carry = s.n + 1 == s.T ? value_at(a.dcT, at, 0.0f) : carry_at(a.before, at);
  d.carry += value_at(a.dc, now, 0.0f);
  take_both_states<Cell>(s, a, starts, b, j, before, after);
  const float factor = value_at(a.keep, place(s, s.t, b, 1), 1.0f);
  for (int k = 0; k <= C; ++k) before[k] *= factor;
  u[0] = value_at(a.q, place_by_direction(s, b, H) + j, 0.0f);
  const float dh = float(((const device S*)a.dh_now)[at]);
  Cell::template constants<Index>(a, s.d, H, j, p);
  if constexpr (Norm<Cell>::HAS_C != 0) {
    const Index scale_at = Index(s.d) * H + j;
    const float normed = a.norm_c_y[now], scale = float(a.norm_c[scale_at]);
    const float seen = Norm<Cell>::IN_STATE ? after[1] : normed * scale + float(a.norm_c[Index(s.D) * H + scale_at]);
    float output;
    norm_of_c_backward<Cell>(y, p, seen, dh, output, d);
    if (!has_sums) return;
    constexpr int NORMS = Norm<Cell>::OF == NOTHING ? 1 : Norm<Cell>::GROUPS + 1;
    const float of_norm = a.norm_r[place(s, s.t, b, NORMS) + NORMS - 1];
    ds[1] = d.carry + (d.of_c * scale - (in_c[0] + normed * in_c[1]) / H) * of_norm;
    // The clip comes before the norm. If the state is normalised, c before the norm is computed again.
    if (Norm<Cell>::IN_STATE) after[1] = y[Cell::GATE_F] * before[1] + y[Cell::GATE_I] * y[Cell::GATE_G];
    // norm_of_c_backward has used the gradient of m: it is 0 here, and that of o's preactivation stays as it is.
    const float of_o = d.dz[Cell::GATE_O];
    d.dz[Cell::GATE_O] = 0.0f;
    Cell::backward(p, u, y, before, after, ds, d.dz, du, dp);
    d.dz[Cell::GATE_O] = of_o;
    d.carry = ds[1];
    if (Cell::PEEPHOLE == Cell::O_SEES_PREVIOUS) d.carry += of_o * p[Cell::GATE_O];
  } else {
    ds[C] = d.carry;
    ds[0] = Cell::PASSES_H ? dh + d.carry : dh;
    Cell::backward(p, u, y, before, after, ds, d.dz, du, dp);
    d.carry = CARRIES<Cell> ? ds[C] : 0.0f;
  }
}

// The second launch of a backward step. A first loop over the units computes the two sums that the norm of c needs, a
// second loop those of the norms of the products, a third loop the results. of[2 n], of[2 n + 1]: for norm n the sums
// of d and of d y, where y is a normalised number and d its gradient. Past an item's end nothing is summed.
template <class Cell, class Product, class S, class Arrays>
void stepwise_norm_backward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  using N = Norm<Cell>;
  constexpr int GATES = Cell::GATES, NORMS = N::GROUPS + N::HAS_C;
  constexpr bool OF_PRODUCTS = N::OF != NOTHING;
  constexpr int BLOCKS = (OF_PRODUCTS ? 2 : 1) * GATES;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int H = s.H, b = int(group.y), first = 32 * simdgroup + lane, length = value_at(a.lengths, b, s.T);
  const Index units = Index(s.B) * s.D * H, start = carried<S>(floats_of<Cell>(a) * units);
  const bool starts = is_first(s, length), live = s.t < length, begins = s.n + 1 == s.T;
  float in_c[2] = {}, of[2 * N::GROUPS] = {};
  if constexpr (N::HAS_C != 0) {
    for (int j = first; live && j < H; j += ITEM_THREADS) {
      UnitGradients<GATES> d = {};
      unit_gradients<Cell, S>(s, a, b, j, starts, false, in_c, d);
      const float scaled = d.of_c * float(a.norm_c[Index(s.d) * H + j]);
      of[0] += scaled, of[1] += scaled * float(a.norm_c_y[place(s, s.t, b, H) + j]);
    }
    in_c[0] = of[0], in_c[1] = of[1], of[0] = of[1] = 0.0f;
    sum_over_threadgroup(in_c, simdgroup, lane, sums + 2 * ITEM_SIMDGROUPS * N::GROUPS);
  }
  if constexpr (OF_PRODUCTS) {
    for (int j = first; live && j < H; j += ITEM_THREADS) {
      float y[GATES];
      UnitGradients<GATES> d = {};
      unit_gradients<Cell, S>(s, a, b, j, starts, true, in_c, d);
      for (int gate = 0; gate < GATES; ++gate)
        y[gate] = value_at(a.gates, place(s, s.t, b, GATES * H) + Cell::block(gate) * H + j, 0.0f);
      for (int gate = 0; gate < GATES; ++gate) {
        const Index block = Cell::block(gate) * H + j;
        const float scaled =
            Cell::product_gradient(gate, y, d.dz) * value_at(a.norm_scale, Index(s.d) * GATES * H + block, 1.0f);
        const int n = N::IS_EACH ? gate : 0;
        of[2 * n] += scaled, of[2 * n + 1] += scaled * float(a.norm_y[place(s, s.t, b, GATES * H) + block]);
      }
    }
    sum_over_threadgroup(of, simdgroup, lane, sums);
  }
  const device S* rows_before = (const device S*)a.before + start;
  device S* arrays = (device S*)a.after + start;
  const float factor = value_at(a.keep, place(s, s.t, b, 1), 1.0f);
  for (int j = first; j < H; j += ITEM_THREADS) {
    const Index at = place(s, 0, b, H) + j, gates_at = place(s, 0, b, GATES * H) + j;
    UnitGradients<GATES> d = {};
    float y[GATES], carry = 0.0f;
    if (live) unit_gradients<Cell, S>(s, a, b, j, starts, true, in_c, d), carry = d.carry * factor;
    else if (CARRIES<Cell>) carry = begins ? value_at(a.dcT, at, 0.0f) : carry_at(a.before, at);
    for (int gate = 0; gate < GATES; ++gate)
      y[gate] = live ? value_at(a.gates, place(s, s.t, b, GATES * H) + Cell::block(gate) * H + j, 0.0f) : 0.0f;
    for (int gate = 0; gate < GATES; ++gate) {
      const Index block = gates_at + Cell::block(gate) * H;
      float of_product = d.dz[gate];
      if (OF_PRODUCTS && live) {
        const int n = N::IS_EACH ? gate : 0, from = N::IS_EACH ? Cell::block(gate) : 0;
        const Index scale_at = Index(s.d) * GATES * H + Cell::block(gate) * H + j;
        const float normed = value_at(a.norm_y, place(s, s.t, b, GATES * H) + Cell::block(gate) * H + j, 0.0f);
        of_product = Cell::product_gradient(gate, y, d.dz) * value_at(a.norm_scale, scale_at, 1.0f);
        of_product -= (of[2 * n] + normed * of[2 * n + 1]) / (N::IS_EACH ? H : GATES * H);
        of_product *= value_at(a.norm_r, place(s, s.t, b, NORMS) + from, 0.0f);
      }
      if (!live && !begins) of_product = float(rows_before[block]);
      arrays[block] = S(of_product);
      if (OF_PRODUCTS) arrays[units * GATES + block] = S(d.dz[gate]);
    }
    if (CARRIES<Cell>) set_carry(a.after, at, carry);
    if (is_present(a.keep)) set_carry(a.after, units + at, d.carry);
    if (N::HAS_C) arrays[units * BLOCKS + at] = S(d.of_c);
  }
  pad_row(a.after, start + units * (BLOCKS + N::HAS_C), group, first);
}

// Copy COUNT blocks from the rows of a backward pass into a sequence [T, B, D COUNT width], where width is the number
// of units; write 0 past an item's end. The blocks begin at block number FIRST behind the FLOATS floats of a unit. kind
// and row_of: see stepwise_rows.metal; kind[1] is the width. The backward pass runs from the last step to the first, so
// step n is in row T - 1 - n.
template <int COUNT, int FIRST, int FLOATS, class S, class X, class Arrays, class A>
void stepwise_norm_gradients(
    thread const Rows<X>& rows, const constant int* kind, thread const Arrays& a, A sequence, uint3 thread_index) {
  const Step s = step_of(int(thread_index.y), a.sizes, thread_index.z);
  const int width = kind[1], b = int(thread_index.x) / width, j = int(thread_index.x) % width;
  if (b >= s.B) return;
  const Index units = Index(s.B) * s.D * width;
  const device S* arrays =
      (const device S*)row_of(rows, a.starts, kind, s.T - 1 - s.n) + carried<S>(FLOATS * units) + FIRST * units;
  const bool live = s.t < value_at(a.lengths, b, s.T);
  for (int n = 0; n < COUNT; ++n)
    sequence[place(s, s.t, b, COUNT * width) + n * width + j] =
        live ? arrays[place(s, 0, b, COUNT * width) + n * width + j] : S(0.0f);
}
