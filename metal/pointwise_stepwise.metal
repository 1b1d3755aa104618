// One time step of a cell written by the user, in one launch: forward or backward.
//
// The built-in cells have separate kernels (stepwise_forward.metal, stepwise_backward.metal), because a user's cell may
// have any number of states, inputs and saved blocks, and the built-in cells must not pay for that. Both kinds of
// kernels share the products, the steps and the rows: stepwise_lanes.metal, stepwise_tiles.metal, stepwise.metal,
// stepwise_rows.metal.
//
// pointwise.metal describes the cell's struct, which here has LANES = 1: one thread computes a unit. It also describes
// the arrays. With D directions, an array has the blocks of both directions side by side: z [T, B, D G H],
// c [T, B, D C H] and so on, params [D V H], keep [T, B, D]. Further arrays:
//   before          the row (the array of one launch) that the previous launch wrote
//   after           the row that this launch writes
//   rows, row       an array with the rows of several forward launches, and the index of this step's row in it; a
//                   backward launch reads them if `gates` is absent
//   Wh [D, G H, H], weights [D, H, G H]: the recurrent weights and, for the backward steps, their transpose
//   step, sizes     the number of the step, and the sizes that stepwise.metal lists
//
// A row of the forward pass contains, in this order: c [B, D C H] float; h [B, D H]; if SAVES, the K saved blocks
// [B, D K H]. A row of the backward pass contains:
//   [B, D (C + 1) H] float        the gradients of the states before the step, without the part through the product
//   [B, D V H] float              the gradients of the parameters, summed over all steps so far
//   [B, D (C + 1) H] float        with `keep` only: the gradients of the states before their multiplication by keep
//   d [B, D N H], du [B, D U H]   N = GRADIENTS blocks of gradients of preactivations, and the gradients of the inputs
//
// A threadgroup computes ROWS batch items. In a forward step with a product it computes COLUMNS / G units of each item,
// otherwise COLUMNS units. First all its threads compute the product; then every thread computes some cells. The
// product ends with a barrier between the two parts.

// The layout of Wh for a user's cell: gate number k has block k of the rows.
struct InOrder {
  static constexpr int block(int gate) { return gate; }
};

// A product that computes nothing, for a cell without a recurrent product.
template <int HEIGHT, int WIDTH>
struct NoProduct {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 256 };
};

// Load COUNT numbers, `pitch` elements apart, into values[first], values[first + 1], ... If the array is absent,
// load zeros.
template <int COUNT, class A, int SIZE>
void take_blocks(A array, Index at, int pitch, thread float (&values)[SIZE], int first) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) values[first + k] = value_at(array, at + Index(k) * pitch, 0.0f);
}

// Load or store COUNT floats of a row (the array of one launch) that the next step reads, `pitch` floats apart.
template <int COUNT, class X, int SIZE>
void take_carries(const device X* row, Index at, int pitch, thread float (&values)[SIZE], int first) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) values[first + k] = carry_at(row, at + Index(k) * pitch);
}
template <int COUNT, class X, int SIZE>
void set_carries(device X* row, Index at, int pitch, thread const float (&values)[SIZE], int first) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) set_carry(row, at + Index(k) * pitch, values[first + k]);
}

// Store COUNT numbers, `pitch` elements apart, or zeros if the item has ended.
template <int COUNT, class S, int SIZE>
void store_live(device S* array, Index at, int pitch, bool live, thread const float (&values)[SIZE]) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) array[at + Index(k) * pitch] = S(live ? values[k] : 0.0f);
}

// Load the states before the step, h first. If the item `starts` at this step, they are h0 and c0; otherwise they are
// in `row`, which the previous launch wrote.
template <class Cell, class S, class Arrays, class X>
void take_states(
    thread const Step& s, thread const Arrays& a, bool starts, const device X* row, int b, int j,
    thread float (&state)[Cell::STATES]) {
  constexpr int C = Cell::STATES - 1;
  const Index at = place(s, 0, b, s.H) + j, c_at = place(s, 0, b, C * s.H) + j;
  if (starts) {
    state[0] = float(a.h0[at]);
    take_blocks<C>(a.c0, c_at, s.H, state, 1);
  } else {
    state[0] = float(((const device S*)row + carried<S, true>(Index(s.B) * s.D * C * s.H))[at]);
    take_carries<C>(row, c_at, s.H, state, 1);
  }
}

template <class Cell, class Product, bool SAVES, class S, class Arrays>
void pointwise_stepwise_forward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int G = Cell::GATES, P = Cell::PRODUCTS, C = Cell::STATES - 1, K = SAVES ? int(Cell::KEPT) : 0;
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS, UNITS = P == 0 ? COLUMNS : COLUMNS / G;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * UNITS;
  const Index units = Index(B) * s.D * H, start = carried<S, true>(C * units);
  if constexpr (P > 0) {
    const Previous<S, Arrays> x = {(const device S*)a.before + start, &a, &s};
    const Block own = {b0, j0, simdgroup, lane, sums};
    Product::template product<InOrder, 0, UNITS, 1>(x, a.Wh + Index(s.d) * G * H * H, B, H, H, own);
  }
  device S* arrays = (device S*)a.after + start;
  for (int cell = 32 * simdgroup + lane; cell < ROWS * UNITS; cell += Product::THREADS) {
    const int r = int(cell / UNITS), b = b0 + r, j = j0 + int(cell % UNITS);
    if (b >= B || j >= H) continue;
    const int length = value_at(a.lengths, b, s.T);
    const bool live = s.t < length;
    float z[G], products[P == 0 ? 1 : P], state[C + 1], y[REGISTERS_OF<Cell::KEPT, 1>];
    float u[REGISTERS_OF<Cell::INPUTS, 1>], w[REGISTERS_OF<Cell::PARAMS, 1>];
    take_blocks<G>(a.z, place(s, s.t, b, G * H) + j, H, z, 0);
    take_blocks<Cell::INPUTS>(a.inputs, place(s, s.t, b, Cell::INPUTS * H) + j, H, u, 0);
    take_blocks<Cell::PARAMS>(a.params, Index(s.d) * Cell::PARAMS * H + j, H, w, 0);
    take_states<Cell, S>(s, a, is_first(s, length), a.before, b, j, state);
#pragma clang loop unroll(full)
    for (int k = 0; k < P; ++k) products[k] = sums[r * COLUMNS + k * UNITS + cell % UNITS];
    const float factor = value_at(a.keep, place(s, s.t, b, 1), 1.0f);
#pragma clang loop unroll(full)
    for (int k = 0; k <= C; ++k) state[k] *= factor;
    Cell::forward(0, z, products, u, w, state, y);
    // Past an item's end the outputs are 0. They are selected, not multiplied, as the numbers there may be NaN.
    arrays[place(s, 0, b, H) + j] = S(live ? state[0] : 0.0f);
#pragma clang loop unroll(full)
    for (int k = 0; k <= C; ++k) state[k] = live ? state[k] : 0.0f;
    set_carries<C>(a.after, place(s, 0, b, C * H) + j, H, state, 1);
    store_live<K>(arrays + units, place(s, 0, b, K * H) + j, H, live, y);
  }
  pad_row(a.after, start + units * (1 + K), group, 32 * simdgroup + lane);
}

// Compute the product of the backward step: the gradients d that the previous launch wrote, times Wh.
template <class Cell, class Product, class S, class Arrays>
void product_with_d(thread const Step& s, thread const Arrays& a, const device S* d, thread const Block& own) {
  if constexpr (Cell::PRODUCTS > 0) {
    const Items<S> x = items_of(s, d, Cell::GRADIENTS * s.H);
    Product::template product<OneBlock, 0, Product::COLUMNS, 1>(
        x, a.weights + Index(s.d) * s.H * s.K, s.B, s.H, s.K, own);
  }
}

// Return the part of the gradient of h_t that comes through the product of the step after t, or 0 if step t is the
// item's last step. sum: the element of the product for this unit.
template <class Cell, class Arrays>
float through_product(
    thread const Step& s, thread const Arrays& a, threadgroup const float* sum, int length, int b, int j) {
  const int next = next_step(s, length);
  return Cell::PRODUCTS == 0 || next < 0 ? 0.0f : *sum * mask_at(s, a.mask, next, b, j, s.H);
}

// Return how many float values a unit has at the beginning of the array that one backward launch writes: a gradient for
// each state, with `keep` a second one, and a gradient for each parameter.
template <class Cell, class Arrays>
int floats_of(thread const Arrays& a) {
  return (is_present(a.keep) ? 2 : 1) * int(Cell::STATES) + int(Cell::PARAMS);
}

// Load the values of a unit that the forward pass saved for step s.t, from the array `gates` or, if `gates` is absent,
// from the row that the forward launch of this step wrote.
template <class Cell, class S, class Arrays>
void take_saved(
    thread const Step& s, thread const Arrays& a, int b, int j, thread float (&y)[REGISTERS_OF<Cell::KEPT, 1>]) {
  constexpr int C = Cell::STATES - 1, K = Cell::KEPT;
  const Index units = Index(s.B) * s.D * s.H, start = carried<S, true>(C * units);
  const Index length = max(start + units * (1 + K), Index(8));
#pragma clang loop unroll(full)
  for (int k = 0; k < K; ++k) {
    const Index block = Index(k) * s.H + j, at = start + units + place(s, 0, b, K * s.H) + block;
    y[k] = value_at(a.gates, place(s, s.t, b, K * s.H) + block, gate_in_row<S>(a.rows, a.row, length, at));
  }
}

// Compute one step of one unit backward, for an item that has not ended. ds: on entry the gradients of the states after
// the step, on return the gradients of the states before it. unscaled: ds before the multiplication by keep. dw: the
// gradients of the parameters are added to it. d, du: on return the gradients of the preactivations and of the inputs.
template <class Cell, class S, class Arrays>
void live_unit_backward(
    thread const Step& s, thread const Arrays& a, int length, int b, int j, thread float (&ds)[Cell::STATES],
    thread float (&unscaled)[Cell::STATES], thread float (&dw)[REGISTERS_OF<Cell::PARAMS, 1>],
    thread float (&d)[Cell::GRADIENTS], thread float (&du)[REGISTERS_OF<Cell::INPUTS, 1>]) {
  constexpr int C = Cell::STATES - 1;
  const int H = s.H, t = s.t, previous = s.reverse ? t + 1 : t - 1;
  const Index at = place(s, t, b, H) + j, c_at = place(s, t, b, C * H) + j;
  const float factor = value_at(a.keep, place(s, t, b, 1), 1.0f);
  float y[REGISTERS_OF<Cell::KEPT, 1>], u[REGISTERS_OF<Cell::INPUTS, 1>], w[REGISTERS_OF<Cell::PARAMS, 1>];
  float before[C + 1], now[C + 1], outside[C + 1], dw_now[REGISTERS_OF<Cell::PARAMS, 1>];
  if (is_first(s, length)) {
    take_blocks<1>(a.h0, place(s, 0, b, H) + j, H, before, 0);
    take_blocks<C>(a.c0, place(s, 0, b, C * H) + j, H, before, 1);
  } else {
    take_blocks<1>(a.h, place(s, previous, b, H) + j, H, before, 0);
    take_blocks<C>(a.c, place(s, previous, b, C * H) + j, H, before, 1);
  }
  take_saved<Cell, S>(s, a, b, j, y);
  take_blocks<Cell::INPUTS>(a.inputs, place(s, t, b, Cell::INPUTS * H) + j, H, u, 0);
  take_blocks<Cell::PARAMS>(a.params, Index(s.d) * Cell::PARAMS * H + j, H, w, 0);
  take_blocks<1>(a.h, at, H, now, 0);
  take_blocks<C>(a.c, c_at, H, now, 1);
  take_blocks<1>(a.dh, at, H, outside, 0);
  take_blocks<C>(a.dc, c_at, H, outside, 1);
#pragma clang loop unroll(full)
  for (int k = 0; k <= C; ++k) unscaled[k] = ds[k] + outside[k];
  Cell::backward(0, y, before, factor, u, w, now, unscaled, d, du, dw_now);
#pragma clang loop unroll(full)
  for (int k = 0; k <= C; ++k) ds[k] = factor * unscaled[k];
#pragma clang loop unroll(full)
  for (int k = 0; k < Cell::PARAMS; ++k) dw[k] += dw_now[k];
}

template <class Cell, class Product, class S, class Arrays>
void pointwise_stepwise_backward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int C = Cell::STATES - 1, N = Cell::GRADIENTS, U = Cell::INPUTS, V = Cell::PARAMS;
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(B) * s.D * H, start = carried<S, true>(floats_of<Cell>(a) * units);
  const device S* before = (const device S*)a.before + start;
  const bool begins = s.n + 1 == s.T;  // then there is no previous launch whose d the product could read
  const Block own = {b0, j0, simdgroup, lane, sums};
  if (!begins) product_with_d<Cell, Product>(s, a, before, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= B || j >= H) continue;
    const int length = value_at(a.lengths, b, s.T);
    const bool live = s.t < length;
    const Index ds_at = place(s, 0, b, (C + 1) * H) + j, d_at = place(s, 0, b, N * H) + j;
    const Index dw_at = (C + 1) * units + place(s, 0, b, V * H) + j;
    float ds[C + 1], unscaled[C + 1] = {}, dw[REGISTERS_OF<V, 1>] = {}, d[N] = {}, du[REGISTERS_OF<U, 1>] = {};
    if (begins) {
      take_blocks<1>(a.dhT, place(s, 0, b, H) + j, H, ds, 0);
      take_blocks<C>(a.dcT, place(s, 0, b, C * H) + j, H, ds, 1);
    } else {
      take_carries<C + 1>(a.before, ds_at, H, ds, 0);
      take_carries<V>(a.before, dw_at, H, dw, 0);
      take_blocks<N>(before, d_at, H, d, 0);
    }
    if (live) {
      ds[0] += through_product<Cell>(s, a, sums + cell, length, b, j);
      live_unit_backward<Cell, S>(s, a, length, b, j, ds, unscaled, dw, d, du);
    }
    set_carries<C + 1>(a.after, ds_at, H, ds, 0);
    set_carries<V>(a.after, dw_at, H, dw, 0);
    if (is_present(a.keep)) set_carries<C + 1>(a.after, (C + 1 + V) * units + ds_at, H, unscaled, 0);
    device S* arrays = (device S*)a.after + start;
    store_live<N>(arrays, d_at, H, true, d);  // past an item's end d stays, because dh0 reads it
    store_live<U>(arrays + N * units, place(s, 0, b, U * H) + j, H, true, du);
  }
  pad_row(a.after, start + units * (N + U), group, 32 * simdgroup + lane);
}

// Compute dh0 [B, D H], the gradient of the initial h, from the array that the last backward launch wrote. The backward
// steps are counted down to n = 0, so this launch has the step number -1.
template <class Cell, class Product, class S, class Arrays>
void pointwise_stepwise_dh0(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(s.B) * s.D * H;
  const Block own = {b0, j0, simdgroup, lane, sums};
  product_with_d<Cell, Product>(
      s, a, (const device S*)a.before + carried<S, true>(floats_of<Cell>(a) * units), own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= s.B || j >= H) continue;
    const float part = through_product<Cell>(s, a, sums + cell, value_at(a.lengths, b, s.T), b, j);
    ((device S*)a.after)[place(s, 0, b, H) + j] = S(part + carry_at(a.before, place(s, 0, b, Cell::STATES * H) + j));
  }
  pad_row(a.after, units, group, 32 * simdgroup + lane);
}

// Copy COUNT blocks of an item from `row` [B, D COUNT H] to step t of `array` [T, B, D COUNT H]. If the item has ended,
// copy zeros instead.
template <int COUNT, class A, class S>
void copy_blocks(thread const Step& s, A array, const device S* row, bool live, int b, int j) {
  const Index from = place(s, 0, b, COUNT * s.H) + j, now = place(s, s.t, b, COUNT * s.H) + j;
  for (int k = 0; k < COUNT; ++k) store(array, now + Index(k) * s.H, live ? float(row[from + Index(k) * s.H]) : 0.0f);
}

// Copy the results of a backward pass from its rows: d [T, B, D N H]; du [T, B, D U H]; carry [T, B, D (C + 1) H], the
// gradients of the states before their multiplication by keep; dc0 [B, D C H]; dw [B, D V H], the gradients of the
// parameters, summed over the steps of each item. For the forward pass stepwise_outputs copies the results.
template <int STATES, int PARAMS, int GRADIENTS, int INPUTS, class S, class X, class Arrays>
void pointwise_stepwise_gradients(
    thread const Rows<X>& rows, const constant int* kind, thread const Arrays& a, uint3 thread_index) {
  const Step s = step_of(int(thread_index.y), a.sizes, thread_index.z);
  const int H = s.H, b = int(thread_index.x) / H, j = int(thread_index.x) % H;
  if (b >= s.B) return;
  const Index units = Index(s.B) * s.D * H, ds_at = place(s, 0, b, STATES * H) + j;
  const int floats = (is_present(a.carry) ? 2 : 1) * STATES + PARAMS;
  const device X* row = row_of(rows, a.starts, kind, s.T - 1 - s.n);
  const device S* arrays = (const device S*)row + carried<S, true>(floats * units);
  const bool live = s.t < value_at(a.lengths, b, s.T);
  copy_blocks<GRADIENTS>(s, a.d, arrays, live, b, j);
  copy_blocks<INPUTS>(s, a.du, arrays + GRADIENTS * units, live, b, j);
  if (is_present(a.carry))
    for (int k = 0; k < STATES; ++k)
      store(a.carry, place(s, s.t, b, STATES * H) + k * H + j,
          live ? carry_at(row, (STATES + PARAMS) * units + ds_at + k * H) : 0.0f);
  if (s.n != 0) return;
  for (int k = 1; k < STATES; ++k)
    store(a.dc0, place(s, 0, b, (STATES - 1) * H) + (k - 1) * H + j, carry_at(row, ds_at + k * H));
  for (int k = 0; k < PARAMS; ++k) {
    const Index at = place(s, 0, b, PARAMS * H) + k * H + j;
    store(a.dw, at, carry_at(row, STATES * units + at));
  }
}
