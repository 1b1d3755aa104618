// One backward time step of a recurrence in one launch: the product dz Wh and the backward step of the cell.
// stepwise.metal explains the names that all kernels of a step share.
//
//   dh_t = mask_next * (dz_next Wh) + cotangent of h_t;   dz_t, carry_t = cell_backward(dh_t, carry_next)
//
// "next" is the step that the forward pass processes after t; the launch before this one has computed its gradients. At
// an item's last step dhT replaces the product. With a projection h = m Wp^T the kernel stepwise_dh first computes
// dh_t, and the product here is dm = dh_t Wp. A threadgroup computes COLUMNS units of ROWS batch items.
//
//   carry        the gradient of a state before the step, without the part that goes through the product
//   cotangent    the gradient that the caller gives for an output: dh, dc, dgates, dhT, dcT, each in its output's shape
//   weights      [D, H, K]: the transposed Wh with K = G H for G gates, or Wp with K = P, the width of a projected h
//   dh_now       [B, D P]: with a projection a row with dh_t
//   gates        [T, B, D KEPT H]. If the call does not have it, the gates are in `rows`, an array with rows of the
//                forward pass, in the row with the index `row`
//   q            [D, T, B, H]: the recurrent products of a GRU's candidate
//   mask, keep   [T or 1, B, D P], which includes keep; [T, B, D]
// stepwise_forward.metal describes the other arrays.

// One row of the product's operand x: the numbers of one batch item.
//   dz          a pointer to the number that the product reads next: in dz, which the launch before wrote, or with a
//               projection in dh_t
//   candidate   whether the numbers are dz of a GRU's candidate, and the reset comes after the product. In the forward
//               step r multiplied this product, so its gradient is dz r: each number is multiplied by r when it is read
//   r           a pointer to the gate r of the step to which dz belongs; used only for the candidate
template <class S, class Arrays>
struct FollowingRow {
  const device S* dz;
  decltype(Arrays::gates) r;
  bool candidate;
};

// The left operand x of the backward product with Wh, for all batch items: gradients of the step that follows in time.
// The function find_row below selects the row of one item. dz: the gradients of the preactivations that the launch
// before wrote or, with a projection, the gradient of h at this step. a: the arrays, of which find_row reads the gates.
// s: the step. H: how many numbers of dz each gate has. (s.H can be another number: in the kernel stepwise_dh it is P,
// the width of a projected h.)
template <class Cell, class S, class Arrays>
struct Following {
  using Row = FollowingRow<S, Arrays>;
  const device S* dz;
  thread const Arrays* a;
  thread const Step* s;
  int H;
};

// Return the time index of the step that the forward pass processes after step s for this item, or -1 if s is the
// item's last step. In a reverse direction t counts down; if t is past the item's end, the next step is at length - 1,
// the last time index of the item.
inline int next_step(thread const Step& s, int length) {
  const int t = s.reverse ? min(s.t, length) - 1 : s.t + 1;
  return t < length ? t : -1;
}

// Let `row` point to the dz of batch item b in one segment. There are three layouts:
//   1 segment       all gates together, or dh_t. pitch: how many numbers an item has per direction: K, or more if a
//                   user's cell stores gradients that no product reads
//   2 segments      the gates r and z of a GRU whose reset comes before the product. Its candidate has a separate
//                   product
//   3 segments      the gates of a GRU whose reset comes after the product, in the order of memory. Only the dz of the
//                   candidate is multiplied by r, of the step at time index t. If there is no such step (t = -1), the
//                   address must only be valid, because dh_sum does not use the product
template <class Cell, class S, class Arrays>
void find_row(thread const Following<Cell, S, Arrays>& x, int b, int segment, thread FollowingRow<S, Arrays>& row) {
  thread const Step& s = *x.s;
  // This branch is for 1 or 2 segments. A plain RNN has 1 segment and 1 gate, so comparing with GATES is not enough.
  if constexpr (Cell::SEGMENTS == 1 || Cell::SEGMENTS != Cell::GATES) {
    const int pitch = Cell::GRADIENTS == Cell::GATES ? s.K : Cell::GRADIENTS * x.H;
    row.dz = Cell::SEGMENTS == 1 ? x.dz + place(s, 0, b, pitch)
                                 : x.dz + place(s, 0, b, 3 * x.H) + Cell::block(segment) * x.H;
    row.r = x.a->gates;
    row.candidate = false;
  } else {
    const int t = next_step(s, value_at(x.a->lengths, b, s.T));
    row.dz = x.dz + place(s, 0, b, 3 * x.H) + segment * x.H;
    row.r = x.a->gates + place(s, max(t, 0), b, 3 * x.H) + Cell::block(Cell::GATE_R) * x.H;
    row.candidate = t >= 0 && segment == Cell::block(Cell::GATE_N);
  }
}

// Move both pointers of the row, to dz and to r, forward by n numbers.
template <class S, class Arrays>
void move(thread FollowingRow<S, Arrays>& row, int n) {
  row.dz += n;
  row.r = from(row.r, n);
}

// Read N numbers of the row as float, from number k on, counted from the row's pointers. If they belong to a GRU's
// candidate, multiply them by r.
template <int N, class S, class Arrays>
void operands_at(thread const FollowingRow<S, Arrays>& row, int k, thread float (&values)[N]) {
  take<N>(row.dz, k, 0.0f, values);
  if (!row.candidate) return;
  float r[N];
  take<N>(row.r, k, 1.0f, r);
  UNROLL for (int e = 0; e < N; ++e) values[e] *= r[e];
}

// Return the operand of the product: with a projection dh_t, which is the row dh_now (first argument); without one
// (Absent) dz of the launch before.
template <class S>
const device S* dh_or_dz(Absent, const device S* dz) { return dz; }
template <class S, class X>
const device S* dh_or_dz(const device X* row, const device S*) { return (const device S*)row; }

// Return the gradient of h_t[b, j] without the carry (the part that does not go through the recurrent product): the
// cotangent dh of step t, plus the gradient that comes from the next step. This is `sum`, a number of the product,
// times the mask of the next step, because the forward product multiplied mask * h. At the item's last step it is dhT.
// For a cell without a product (PRODUCTS = 0) it is 0. width: the width of h.
template <class Cell, class Arrays>
float dh_sum(
    thread const Step& s, thread const Arrays& a, threadgroup const float* sum, int length, int b, int j, int width) {
  const float outside = value_at(a.dh, place(s, s.t, b, width) + j, 0.0f);
  const int next = next_step(s, length);
  if (next < 0) return outside + value_at(a.dhT, place(s, 0, b, width) + j, 0.0f);
  return Cell::PRODUCTS == 0 ? outside : outside + *sum * mask_at(s, a.mask, next, b, j, width);
}

// Return how many floats a unit has at the beginning of a row (the array that a launch writes): its carries, the parts
// of the states' gradients that do not go through the product; if the call has `keep`, also the carries before their
// multiplication by keep, from which the gradient of keep is computed; and the gradients of SUMMED parameters.
template <class Cell, class Arrays>
int floats_of(thread const Arrays& a) { return (is_present(a.keep) ? 2 : 1) * CARRIES<Cell> + int(Cell::SUMMED); }

// Compute the product of `dz` (dz of the launch before or, with a projection, dh_t) with the weights, into `own.sums`.
// For a cell without a recurrent product do nothing.
//   width        how many columns the result has: units or, in stepwise_dh, numbers of h
//   gate_width   how many numbers of dz each gate has
// The weights are not divided by gates (OneBlock).
template <class Cell, class Product, class S, class Arrays>
void product_of_gradients(
    thread const Step& s, thread const Arrays& a, const device S* dz, int width, int gate_width,
    thread const Block& own) {
  const Following<Cell, S, Arrays> x = {dz, &a, &s, gate_width};
  if constexpr (Cell::PRODUCTS != 0)
    Product::template product<OneBlock, 0, Product::COLUMNS, Cell::SEGMENTS>(
        x, a.weights + Index(s.d) * width * s.K, s.B, width, s.K, own);
}

// Return one number of the gates from a row (the array of one step) that a forward launch wrote. Return 0 if the call
// has no such rows (Absent).
//   rows     an array of several rows, each with c, h and the gates of one step
//   row      the index of this step's row in the array `rows`
//   length   how many elements a row has         at   the position in its row of the number to return
template <class S> float gate_in_row(Absent, Absent, Index, Index) { return 0.0f; }
template <class S, class X, class R>
float gate_in_row(const device X* rows, R row, Index length, Index at) {
  return float(((const device S*)rows)[row * length + at]);
}

// Load into y the KEPT numbers (mostly the gates) that the forward step saved for unit j of batch item b. They are in
// a.gates or, without this array, in the row of the forward launch. There they begin at `behind`, after the floats (c)
// and h. A row has at least 8 elements.
template <class Cell, class S, class Arrays>
void take_saved(thread const Step& s, thread const Arrays& a, int b, int j, thread float (&y)[SIZE_FOR<Cell::KEPT>]) {
  constexpr int KEPT = Cell::KEPT;
  const Index units = Index(s.B) * s.D * s.H, behind = carried<S>(Cell::CARRIED * units) + units;
  UNROLL for (int k = 0; k < KEPT; ++k) {
    const Index block = j + Cell::block(k) * s.H;
    const float in_row = gate_in_row<S>(
        a.rows, a.row, max(behind + KEPT * units, Index(8)), behind + place(s, 0, b, KEPT * s.H) + block);
    y[k] = value_at(a.gates, place(s, s.t, b, KEPT * s.H) + block, in_row);
  }
}

// Load the states of unit j of batch item b at time index t. states[0] is h, from the array `h`; the C other states are
// from the array `others`. Only those states are loaded that the cell's backward step reads: bit k of READ says whether
// it reads states[k]. A state whose bit in READ is not set, or whose array is absent, becomes 0.
template <class Cell, int READ, class A, class B>
void take_needed(
    thread const Step& s, A h, B others, int t, int b, int j, thread float (&states)[Cell::CARRIED + 1]) {
  constexpr int C = Cell::CARRIED;
  states[0] = READ & 1 ? value_at(h, place(s, t, b, s.H) + j, 0.0f) : 0.0f;
  UNROLL for (int k = 1; k <= C; ++k)
    states[k] = (READ >> k) & 1 ? value_at(others, place(s, t, b, C * s.H) + (k - 1) * s.H + j, 0.0f) : 0.0f;
}

// Load the states of unit j of batch item b before and after the step, as far as the cell's backward step reads them
// (READS_BEFORE and READS_AFTER have one bit per state). starts: whether this is the item's first step; then the states
// before it are h0 and c0. Otherwise they are those of the step before in processing order.
template <class Cell, class Arrays>
void take_both_states(
    thread const Step& s, thread const Arrays& a, bool starts, int b, int j,
    thread float (&before)[Cell::CARRIED + 1], thread float (&after)[Cell::CARRIED + 1]) {
  constexpr int BEFORE = Cell::READS_BEFORE, AFTER = Cell::READS_AFTER;
  if (starts) take_needed<Cell, BEFORE>(s, a.h0, a.c0, 0, b, j, before);
  else take_needed<Cell, BEFORE>(s, a.h, a.c, s.reverse ? s.t + 1 : s.t - 1, b, j, before);
  take_needed<Cell, AFTER>(s, a.h, a.c, s.t, b, j, after);
}

// Compute one backward step of unit j of batch item b, which has not ended at this step.
//   dh         the gradient of h without the carry
//   ds         the carries (gradients of the states without the part through the product), h first: on entry those from
//              the next step, on return those for the step before
//   unscaled   on return ds before the multiplication by `keep` (`factor`): the gradient of keep needs it
//   dp         the sums of the parameters' gradients; this step's are added
//   d          on entry the cotangents of the gates, on return the gradients of the preactivations
//   du         on return the gradients of the step's inputs
// y, before, after, p and u are arguments of Cell::backward: saved numbers, states before and after the step,
// constants, and inputs of a user's cell. A GRU has no inputs; it gets q in u[0], the recurrent product of its
// candidate.
template <class Cell, class S, class Arrays>
void live_unit_backward(
    thread const Step& s, thread const Arrays& a, int b, int j, float dh, thread float (&ds)[Cell::CARRIED + 1],
    thread float (&unscaled)[Cell::CARRIED + 1], thread float (&dp)[SIZE_FOR<Cell::SUMMED>],
    thread float (&d)[Cell::GRADIENTS], thread float (&du)[SIZE_FOR<Cell::INPUTS>]) {
  constexpr int C = Cell::CARRIED;
  const int H = s.H, length = value_at(a.lengths, b, s.T);
  float y[SIZE_FOR<Cell::KEPT>], before[C + 1], after[C + 1], dc[C + 1] = {};
  float p[SIZE_FOR<Cell::CONSTANTS>], u[SIZE_FOR<Cell::INPUTS>], dp_now[SIZE_FOR<Cell::SUMMED>];
  take_saved<Cell, S>(s, a, b, j, y);
  take_both_states<Cell>(s, a, is_first(s, length), b, j, before, after);
  take_blocks<C>(a.dc, place(s, s.t, b, C * H) + j, H, dc, 1);
  take_blocks<Cell::INPUTS>(a.inputs, place(s, s.t, b, Cell::INPUTS * H) + j, H, u, 0);
  if (Cell::INPUTS == 0) u[0] = value_at(a.q, place_by_direction(s, b, H) + j, 0.0f);
  Cell::template constants<Index>(a, s.d, H, j, p);
  const float factor = value_at(a.keep, place(s, s.t, b, 1), 1.0f);
  ds[0] = Cell::PASSES_H ? ds[0] + dh : dh;
  UNROLL for (int k = 0; k <= C; ++k) {
    if (k > 0) ds[k] += dc[k];
    before[k] *= factor;
  }
  Cell::backward(p, u, y, before, after, ds, d, du, dp_now);
  UNROLL for (int k = 0; k <= C; ++k) unscaled[k] = ds[k], ds[k] *= factor;
  UNROLL for (int k = 0; k < Cell::SUMMED; ++k) dp[k] += dp_now[k];
}

// The kernel of a backward step. It writes the row a.after (the array of this launch), in this order (N carries, V =
// SUMMED, M = GRADIENTS, U = INPUTS):
//   [B, D N H] float   the carries
//   [B, D N H] float   with `keep` only: the carries before their multiplication by keep; 0 past an item's end
//   [B, D V H] float   the gradients of the parameters, summed over all steps so far
//   [B, D M H]         dz, the gradients of preactivations; those of the products first
//   [B, D U H]         the gradients of the inputs; 0 past an item's end
// Past an item's end the other numbers are copied from a.before. The reason: in a reverse direction the backward pass
// reaches the steps past an item's end after the item's own steps, and dh0 and dc0 are computed from the last row.
//   params_at   where the parameters' gradients begin in a row
//   begins      whether this is the first launch of the pass
template <class Cell, class Product, class S, class Arrays>
void stepwise_backward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int C = Cell::CARRIED, N = CARRIES<Cell>, FIRST = FIRST_CARRY<Cell>, GRADIENTS = Cell::GRADIENTS;
  constexpr int SUMMED = Cell::SUMMED, INPUTS = Cell::INPUTS, ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(B) * s.D * H, start = carried<S>(floats_of<Cell>(a) * units);
  const Index params_at = (is_present(a.keep) ? 2 : 1) * N * units;
  const device S* dz_before = (const device S*)a.before + start;
  device S* dz_after = (device S*)a.after + start;
  const Block own = {b0, j0, simdgroup, lane, sums};
  // Without a projection the product is dz Wh, with dz of the launch before. The first launch (`begins`) has no launch
  // before it, so it skips the product. With a projection the product is dh_t Wp, which every launch needs.
  const bool begins = s.n + 1 == s.T;
  if (!begins || is_present(a.dh_now))
    product_of_gradients<Cell, Product, S>(s, a, dh_or_dz(a.dh_now, dz_before), H, H, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= B || j >= H) continue;
    const int length = value_at(a.lengths, b, s.T);
    const bool live = s.t < length;
    const Index ds_at = place(s, 0, b, N * H) + j, dp_at = params_at + place(s, 0, b, SUMMED * H) + j;
    const Index dz_at = place(s, 0, b, GRADIENTS * H) + j, now = place(s, s.t, b, GRADIENTS * H) + j;
    float ds[C + 1] = {}, unscaled[C + 1] = {}, dp[SIZE_FOR<SUMMED>] = {}, d[GRADIENTS], du[SIZE_FOR<INPUTS>] = {};
    if (begins) {
      take_blocks<C>(a.dcT, place(s, 0, b, C * H) + j, H, ds, 1);
    } else {
      take_carries<N>(a.before, ds_at, H, ds, FIRST);
      take_carries<SUMMED>(a.before, dp_at, H, dp, 0);
    }
    for (int k = 0; k < GRADIENTS; ++k) {
      const int block = Cell::block(k) * H;
      d[k] = live ? value_at(a.dgates, now + block, 0.0f) : begins ? 0.0f : float(dz_before[dz_at + block]);
    }
    if (live) {
      const float dh = is_present(a.dh_now) ? sums[cell] : dh_sum<Cell>(s, a, sums + cell, length, b, j, H);
      live_unit_backward<Cell, S>(s, a, b, j, dh, ds, unscaled, dp, d, du);
    }
    set_carries<N>(a.after, ds_at, H, ds, FIRST);
    if (is_present(a.keep)) set_carries<N>(a.after, N * units + ds_at, H, unscaled, FIRST);
    set_carries<SUMMED>(a.after, dp_at, H, dp, 0);
    for (int k = 0; k < GRADIENTS; ++k) dz_after[dz_at + Cell::block(k) * H] = S(d[k]);
    for (int k = 0; k < INPUTS; ++k) dz_after[units * GRADIENTS + place(s, 0, b, INPUTS * H) + k * H + j] = S(du[k]);
  }
  pad_row(a.after, start + units * (GRADIENTS + INPUTS), group, 32 * simdgroup + lane);
}

// Compute dh_t [B, D P], the gradient of h_t, from the dz that the launch before wrote. Here s.H is P, the width of h;
// H is the number of units, K / PRODUCT_GATES, where PRODUCT_GATES is the number of gates in this product. A cell with
// a projection launches this kernel at every step. The first launch of a pass (n + 1 = T) has no dz before it, so it
// computes no product, and dh_sum takes dhT instead. All cells launch the kernel once after the backward steps, with
// step number n = -1: then dh_t is dh0. This launch has neither dh nor `unclipped`, because t is no time index. If the
// cell also reads h outside the product (PASSES_H, a GRU), this launch adds the carry of h (the part of its gradient
// that does not go through the product). The result is 0 past an item's end, and where `unclipped` [T, B, D P] is 0:
// there a clip changed the projected h and stops its gradient.
template <class Cell, class Product, class S, class Arrays>
void stepwise_dh(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  constexpr int PRODUCT_GATES = Cell::SEGMENTS == 1 ? int(Cell::GATES) : int(Cell::SEGMENTS);
  const Step s = step_of(a.step, a.sizes, group.z);
  const int P = s.H, H = s.K / PRODUCT_GATES, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const device S* dz = (const device S*)a.before + carried<S>(floats_of<Cell>(a) * (Index(s.B) * s.D * H));
  const Block own = {b0, j0, simdgroup, lane, sums};
  if (s.n + 1 < s.T) product_of_gradients<Cell, Product>(s, a, dz, P, H, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= s.B || j >= P) continue;
    const int length = value_at(a.lengths, b, s.T);
    const Index at = place(s, 0, b, P) + j;
    float sum = 0.0f;
    if (s.n < 0 || s.t < length) sum = dh_sum<Cell>(s, a, sums + cell, length, b, j, P);
    if constexpr (Cell::PASSES_H != 0) sum += carry_at(a.before, place(s, 0, b, CARRIES<Cell> * P) + j);
    if (is_present(a.unclipped) && float(value_at(a.unclipped, place(s, s.t, b, P) + j, 0.0f)) == 0.0f) sum = 0.0f;
    ((device S*)a.after)[at] = S(sum);
  }
  pad_row(a.after, Index(s.B) * s.D * P, group, 32 * simdgroup + lane);
}
