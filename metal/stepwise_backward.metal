// One time step of a recurrence, backward, in one launch: the product and the backward step of the cell.
//
//   dh_t = mask_next * (dz_next Wh) + the cotangent of h[t];   dz_t, carry = cell_backward(dh_t, carry_next)
//
// "next" is the step of an item that the forward pass processes after t. At an item's last step there is no next one,
// and dhT replaces the product. With a projection, the kernel stepwise_dh computes dh_t [B, D P], and the product here
// is dm = dh_t Wp. A "row" is the array that one launch writes. The "carries" are the gradients of the states before
// the step that bypass the products: a part of the gradient of h, if the cell reads h besides in the product, and the
// gradients of the other states. Letters count blocks of H numbers: G gates, C states besides h, N carries, K saved
// numbers; in a cell that a user wrote also U inputs of a step and V parameters.
//
//   before    the row that the previous launch wrote, for the step processed after t in the forward pass
//   after     the row that this launch writes, in this order:
//             [B, D N H] float   the carries
//             [B, D N H] float   with the option `keep`: the carries before their multiplication by keep
//             [B, D V H] float   the gradients of the parameters, summed over all steps so far
//             [B, D M H]         dz: the cell's M = GRADIENTS gradients of preactivations, first those of the products
//             [B, D U H]         the gradients of the inputs
//             Past an item's end the second and the last are 0, and the others are copied from `before`
//   dh_now    [B, D P]      a row with dh_t, with a projection only
//   weights   [D, H, K]     the transposed Wh, K = G H, or the transposed Wp, K = P
//   rows      an array with the rows of several forward launches, which contain the gates, if `gates` is absent
//   row       the index of this step's row in `rows`
//   gates     [T, B, D K H]     h, c, h0, c0: the states after each step and the first ones, if the cell reads them
//   q         [D, T, B, H]  the candidate's recurrent products of a GRU        peephole [D, 4H]
//   inputs    [T, B, D U H]     params  [D V H]
//   mask      [T or 1, B, D P], including keep       keep  [T, B, D]  lengths [B]
//   dh, dc, dgates, dhT, dcT    the cotangents of the outputs, each in the shape of its output
//   numbers   [3]: the second is the limit of c, for a clip that stops gradients
//   unclipped [T, B, D P], for stepwise_dh with a clip of a projected h that stops gradients: 0 where it changed h
//
// A threadgroup computes COLUMNS units of Product::ROWS batch items. First all its threads compute the product, into
// `sums` [ROWS][COLUMNS] in threadgroup memory; then every thread computes some cells. The product ends with a barrier
// between the two parts. A "cell" in a loop is one unit of one batch item. Cell is the struct with its equations
// (cell.metal), S the dtype of the arrays, Step s the time step, Index the type that counts elements (stepwise.metal).
// A cotangent is the gradient that the caller gives for an output.

// How the product reads one row of its operand, the row of one batch item. The operand is dz, which the previous launch
// wrote. Exception: with a projection it is dh_t. If the reset of a GRU comes after the candidate's product, the
// gradient of this product is dz_n r. So the numbers of the candidate's dz are multiplied by r when they are read.
template <class S, class Arrays>
struct FollowingRow {
  const device S* dz;
  decltype(Arrays::gates) r;
  bool candidate;
};

// The operand of the product, for all batch items: the gradients dz that the previous launch wrote, or dh_t. find_row
// selects the numbers of one batch item from it. H: how many numbers of dz each gate has.
template <class Cell, class S, class Arrays>
struct Following {
  using Row = FollowingRow<S, Arrays>;
  const device S* dz;
  thread const Arrays* a;
  thread const Step* s;
  int H;
};

// Return the time index of the step of this item that is processed after s in the forward pass, or -1 if there is none.
inline int next_step(thread const Step& s, int length) {
  const int t = s.reverse ? min(s.t, length) - 1 : s.t + 1;
  return t < length ? t : -1;
}

// Let `row` point to the dz of batch item b in one segment: the product adds up its terms segment by segment. A cell
// with one segment has all gates in it; behind them are the gradients that no product reads. A GRU has one segment per
// gate, in the order of memory, so that only the candidate's dz is multiplied by r. If its reset comes before the
// product, it has segments for r and z only.
template <class Cell, class S, class Arrays>
void find_row(thread const Following<Cell, S, Arrays>& x, int b, int segment, thread FollowingRow<S, Arrays>& row) {
  thread const Step& s = *x.s;
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

template <class S, class Arrays>
void move(thread FollowingRow<S, Arrays>& row, int n) {
  row.dz += n;
  row.r = from(row.r, n);
}

template <int N, class S, class Arrays>
void operands_at(thread const FollowingRow<S, Arrays>& row, int k, thread float (&values)[N]) {
  take<N>(row.dz, k, 0.0f, values);
  if (!row.candidate) return;
  float r[N];
  take<N>(row.r, k, 1.0f, r);
#pragma clang loop unroll(full)
  for (int e = 0; e < N; ++e) values[e] *= r[e];
}

// Return the array that is multiplied for the gradient of h: dh_now, the row with dh_t, if it is present (a call with a
// projection), else dz.
template <class S>
const device S* either(Absent, const device S* dz) { return dz; }
template <class S, class X>
const device S* either(const device X* row, const device S*) { return (const device S*)row; }

// Return the gradient of h_t[b, j] without the carry. It is a sum: the part from the product of the next step (at the
// item's last step dhT), plus the cotangent dh of step t.
template <class Cell, class Arrays>
float dh_sum(
    thread const Step& s, thread const Arrays& a, threadgroup const float* sum, int length, int b, int j, int width) {
  const float outside = value_at(a.dh, place(s, s.t, b, width) + j, 0.0f);
  const int next = next_step(s, length);
  if (next < 0) return outside + value_at(a.dhT, place(s, 0, b, width) + j, 0.0f);
  return Cell::PRODUCTS == 0 ? outside : outside + *sum * mask_at(s, a.mask, next, b, j, width);
}

// Return how many floats a unit has at the beginning of a row.
template <class Cell, class Arrays>
int floats_of(thread const Arrays& a) { return (is_present(a.keep) ? 2 : 1) * CARRIES<Cell> + int(Cell::SUMMED); }

// Compute the product of a backward step with dz, which the previous launch wrote, or with dh_t. width: the columns of
// the result, units or numbers of h. gate_width: how many numbers of dz each gate has. own: the part of a threadgroup.
template <class Cell, class Product, class S, class Arrays>
void product_with_dz(
    thread const Step& s, thread const Arrays& a, const device S* dz, int width, int gate_width,
    thread const Block& own) {
  const Following<Cell, S, Arrays> x = {dz, &a, &s, gate_width};
  if constexpr (Cell::PRODUCTS != 0)
    Product::template product<OneBlock, 0, Product::COLUMNS, Cell::SEGMENTS>(
        x, a.weights + Index(s.d) * width * s.K, s.B, width, s.K, own);
}

// Return one number of the gates that the forward pass computed. `rows` is an array with the rows (c, h and gates) that
// several forward launches wrote; `row` is the number of this step's row in it, `length` the number of elements of a
// row, and `at` the position of the gate in the row. Return 0 if there are no rows.
template <class S> float gate_in_row(Absent, Absent, Index, Index) { return 0.0f; }
template <class S, class X, class R>
float gate_in_row(const device X* rows, R row, Index length, Index at) {
  return float(((const device S*)rows)[row * length + at]);
}

// Load what a unit saved for step s.t: its numbers in `gates`, or, without this array, in the row of the forward
// launch.
template <class Cell, class S, class Arrays>
void take_saved(thread const Step& s, thread const Arrays& a, int b, int j, thread float (&y)[SIZE_FOR<Cell::KEPT>]) {
  constexpr int KEPT = Cell::KEPT;
  const Index units = Index(s.B) * s.D * s.H, behind = carried<S>(Cell::CARRIED * units) + units;
#pragma clang loop unroll(full)
  for (int k = 0; k < KEPT; ++k) {
    const Index block = j + Cell::block(k) * s.H;
    const float in_row = gate_in_row<S>(
        a.rows, a.row, max(behind + KEPT * units, Index(8)), behind + place(s, 0, b, KEPT * s.H) + block);
    y[k] = value_at(a.gates, place(s, s.t, b, KEPT * s.H) + block, in_row);
  }
}

// Load those states of a unit whose bits in READ are 1, h first: h from row t of one array, the others from row t of
// another one. The other states, and those of an absent array, become 0.
template <class Cell, int READ, class A, class B>
void take_needed(
    thread const Step& s, A h, B others, int t, int b, int j, thread float (&states)[Cell::CARRIED + 1]) {
  constexpr int C = Cell::CARRIED;
  states[0] = READ & 1 ? value_at(h, place(s, t, b, s.H) + j, 0.0f) : 0.0f;
#pragma clang loop unroll(full)
  for (int k = 1; k <= C; ++k)
    states[k] = (READ >> k) & 1 ? value_at(others, place(s, t, b, C * s.H) + (k - 1) * s.H + j, 0.0f) : 0.0f;
}

// Load the states before step s.t and after it, as far as the cell reads them. starts: this is the item's first step,
// so the states before it are h0 and c0.
template <class Cell, class Arrays>
void take_both_states(
    thread const Step& s, thread const Arrays& a, bool starts, int b, int j,
    thread float (&before)[Cell::CARRIED + 1], thread float (&after)[Cell::CARRIED + 1]) {
  constexpr int BEFORE = Cell::READS_BEFORE, AFTER = Cell::READS_AFTER;
  if (starts) take_needed<Cell, BEFORE>(s, a.h0, a.c0, 0, b, j, before);
  else take_needed<Cell, BEFORE>(s, a.h, a.c, s.reverse ? s.t + 1 : s.t - 1, b, j, before);
  take_needed<Cell, AFTER>(s, a.h, a.c, s.t, b, j, after);
}

// Compute one step of one unit backward, for an item that has not ended. dh: the gradient of h without the carry. ds:
// on entry the carries, on return those for the previous step; unscaled: the latter before their multiplication by
// keep. d: on entry the cotangents of the gates, on return the gradients of the preactivations. du: those of the inputs
// of the step. dp: the gradients of the parameters are added to it.
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
#pragma clang loop unroll(full)
  for (int k = 0; k <= C; ++k) {
    if (k > 0) ds[k] += dc[k];
    before[k] *= factor;
  }
  Cell::backward(p, u, y, before, after, ds, d, du, dp_now);
#pragma clang loop unroll(full)
  for (int k = 0; k <= C; ++k) unscaled[k] = ds[k], ds[k] *= factor;
#pragma clang loop unroll(full)
  for (int k = 0; k < Cell::SUMMED; ++k) dp[k] += dp_now[k];
}

// of_params: where the gradients of the parameters begin in a row; start: where dz begins, in elements of S. FIRST: the
// first state with a carry, h (0) or the one after it (1); C: the states besides h.
template <class Cell, class Product, class S, class Arrays>
void stepwise_backward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int C = Cell::CARRIED, N = CARRIES<Cell>, FIRST = FIRST_CARRY<Cell>, GRADIENTS = Cell::GRADIENTS;
  constexpr int SUMMED = Cell::SUMMED, INPUTS = Cell::INPUTS, ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(B) * s.D * H, start = carried<S>(floats_of<Cell>(a) * units);
  const Index of_params = (is_present(a.keep) ? 2 : 1) * N * units;
  const device S* dz_before = (const device S*)a.before + start;
  device S* dz_after = (device S*)a.after + start;
  const Block own = {b0, j0, simdgroup, lane, sums};
  // The product is dz Wh, with dz of the step that the forward pass processes next. The first launch (`begins`) has no
  // such step, so it skips the product. With a projection every launch needs the product, because it is dh_t Wp
  // instead.
  const bool begins = s.n + 1 == s.T;
  if (!begins || is_present(a.dh_now))
    product_with_dz<Cell, Product, S>(s, a, either(a.dh_now, dz_before), H, H, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= B || j >= H) continue;
    const int length = value_at(a.lengths, b, s.T);
    const bool live = s.t < length;
    const Index ds_at = place(s, 0, b, N * H) + j, dp_at = of_params + place(s, 0, b, SUMMED * H) + j;
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

// Compute dh_t [B, D P], the gradient of h_t (D directions, P numbers of h), from the dz that the previous launch
// wrote. A cell with a projection launches this kernel at every step. All cells launch it once after the backward
// steps, with step number n = -1: dh_t is then dh0. The result has the dtype S; it is 0 past an item's end.
template <class Cell, class Product, class S, class Arrays>
void stepwise_dh(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  constexpr int PRODUCT_GATES = Cell::SEGMENTS == 1 ? int(Cell::GATES) : int(Cell::SEGMENTS);
  const Step s = step_of(a.step, a.sizes, group.z);
  const int P = s.H, H = s.K / PRODUCT_GATES, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const device S* dz = (const device S*)a.before + carried<S>(floats_of<Cell>(a) * (Index(s.B) * s.D * H));
  const Block own = {b0, j0, simdgroup, lane, sums};
  if (s.n + 1 < s.T) product_with_dz<Cell, Product>(s, a, dz, P, H, own);
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
