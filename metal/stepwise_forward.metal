// One time step of a recurrence, forward, in one launch: the recurrent product and the cell.
//
//   gates, state, h = cell(z_t, (mask_t * h_before) Wh^T, keep_t * state_before);   `mask` already includes `keep`
//
//   z         [T, B, D G H]  the input's part of the preactivations, blocks in the cell's gate order
//   before    the row (the array that one launch writes) of the previous step
//   after     the row that this launch writes: the states besides h, [B, D C H] for C states; then m [B, D H]; then,
//             if SAVES, the K blocks that the cell saves (mostly its gates), [B, D K H]. All are 0 past an item's end.
//             m is h or, with a projection, the vector to be projected
//   h_before  [B, D K]       with a projection only: h of the previous step, from a separate launch. K: the width of h
//   Wh        [D, G H, K]    peephole  [D, 4H]     bhn  [D H]     params  [D V H]     inputs  [T, B, D U H]
//   h0, c0    [B, D K], [B, D C H]: the first states of an item, at t = 0 or, in reverse, at its end
//   mask      [T or 1, B, D K]     keep     [T, B, D]      lengths  [B]      numbers  [3]: forget bias,
//             clip of c, clip of a projected h
//
// The letters count blocks of H numbers: G gates and, in a cell that a user wrote, U inputs and V parameters.
//
// A threadgroup computes all gates of UNITS units of Product::ROWS batch items. First all its threads compute the
// product, into `sums` [ROWS][gates][UNITS] in threadgroup memory; then every thread computes some cells. The product
// ends with a barrier between the two parts. Product is ByLanes, ByTiles, QuantizedByLanes or NoProduct. A "cell" in a
// loop is one unit of one batch item. Cell is the struct with its equations (cell.metal), S the dtype of the arrays,
// Step s the time step, Index the type that counts elements (stepwise.metal).

// How the product reads one row of its operand: mask * h_before of one batch item. At the item's first step h_before is
// h0. Without h0 it is zero: at step n = 0 no product is computed. An item that runs in reverse and is shorter than T
// begins at a later step; before it the launches have written zeros as its h.
template <class S, class Arrays>
struct PreviousRow {
  const device S* h;
  decltype(Arrays::mask) mask;
};

// The operand of the product: mask * h_before of all batch items. find_row selects one item.
template <class S, class Arrays>
struct Previous {
  using Row = PreviousRow<S, Arrays>;
  const device S* h;
  thread const Arrays* a;
  thread const Step* s;
};

// Return h0 if the item `begins`, else h.
template <class S> const device S* first_or(Absent, bool, const device S* h) { return h; }
template <class S> const device S* first_or(const device S* h0, bool begins, const device S* h) {
  return begins ? h0 : h;
}

template <class S, class Arrays>
void find_row(thread const Previous<S, Arrays>& x, int b, int, thread PreviousRow<S, Arrays>& row) {
  thread const Step& s = *x.s;
  row.h = first_or(x.a->h0, is_first(s, value_at(x.a->lengths, b, s.T)), x.h) + place(s, 0, b, s.K);
  row.mask = from(x.a->mask, place(s, s.own_mask * s.t, b, s.K));
}

template <class S, class Arrays>
void move(thread PreviousRow<S, Arrays>& row, int n) {
  row.h += n;
  row.mask = from(row.mask, n);
}

template <int N, class S, class Arrays>
void operands_at(thread const PreviousRow<S, Arrays>& row, int k, thread float (&values)[N]) {
  float factors[N];
  take<N>(row.h, k, 0.0f, values);
  take<N>(row.mask, k, 1.0f, factors);
#pragma clang loop unroll(full)
  for (int e = 0; e < N; ++e) values[e] *= factors[e];
}

// Return how many terms each sum of the product has: K, the width of h. At step n = 0 without h0 return 0, because h
// before the step is zero, and so is the product.
template <class Arrays>
int product_length(thread const Step& s, thread const Arrays& a) { return s.n > 0 || is_present(a.h0) ? s.K : 0; }

// Return a pointer to h of the previous step. Without a projection h begins at element `start` of the row (the array)
// that the previous launch wrote. With a projection it lies in a separate array.
template <class S, class X> const device S* h_of(const device X* row, Index start, Absent) {
  return (const device S*)row + start;
}
template <class S, class X> const device S* h_of(const device X*, Index, const device X* h) {
  return (const device S*)h;
}

// Load the states of unit j of batch item b before the step, times `keep`: states[0] is h, then come the C others, such
// as c of an LSTM. starts: whether this is the first step of the item, whose states are h0 and c0. Otherwise they are
// what the previous launch wrote: `h`, and the floats at the beginning of the row a.before. In all these arrays the
// states of one unit lie H numbers apart.
// The product reads h by itself. So h is loaded here only for a cell whose equations also read it elsewhere
// (PASSES_H), as a GRU does in z h; for other cells states[0] is 0.
template <class Cell, class S, class Arrays>
void take_states(
    thread const Step& s, thread const Arrays& a, bool starts, const device S* h, int b, int j,
    thread float (&states)[Cell::CARRIED + 1]) {
  constexpr int C = Cell::CARRIED;
  const Index at = place(s, 0, b, s.H) + j, c_at = place(s, 0, b, C * s.H) + j;
  states[0] = 0.0f;
  if (starts) {
    if (Cell::PASSES_H) states[0] = value_at(a.h0, at, 0.0f);
    take_blocks<C>(a.c0, c_at, s.H, states, 1);
  } else {
    if (Cell::PASSES_H) states[0] = float(h[at]);
    take_carries<C>(a.before, c_at, s.H, states, 1);
  }
  const float factor = value_at(a.keep, place(s, s.t, b, 1), 1.0f);
#pragma clang loop unroll(full)
  for (int k = 0; k <= C; ++k) states[k] *= factor;
}

// The body of the kernel (the head of this file has its equation and its arrays). SAVES: whether the row gets what a
// backward pass reads. group: the threadgroup's number along units, batch items and directions. b0, j0: its first batch
// item and unit. KEPT: how many blocks of H numbers are saved, mostly the gates.
template <class Cell, class Product, bool SAVES, class S, class Arrays>
void stepwise_forward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int GATES = Cell::GATES, C = Cell::CARRIED, KEPT = SAVES ? int(Cell::KEPT) : 0;
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS, UNITS = Cell::PRODUCTS ? COLUMNS / GATES : COLUMNS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * UNITS;
  const Index units = Index(B) * s.D * H, start = carried<S>(C * units);
  const Previous<S, Arrays> x = {h_of<S>(a.before, start, a.h_before), &a, &s};
  const Block own = {b0, j0, simdgroup, lane, sums};
  if constexpr (Cell::PRODUCTS != 0)
    Product::template product<Cell, 0, UNITS, 1>(
        x, rows_from(a.Wh, Index(s.d) * GATES * H, s.K), B, H, product_length(s, a), own);
  device S* arrays = (device S*)a.after + start;
  for (int cell = 32 * simdgroup + lane; cell < ROWS * UNITS; cell += Product::THREADS) {
    const int r = int(cell / UNITS), b = b0 + r, j = j0 + int(cell % UNITS);
    if (b >= B || j >= H) continue;
    const int length = value_at(a.lengths, b, s.T);
    const bool live = s.t < length;
    const Index kept_at = place(s, 0, b, KEPT * H) + j;
    float y[VALUES<Cell>], products[GATES], p[SIZE_FOR<Cell::CONSTANTS>], u[SIZE_FOR<Cell::INPUTS>], states[C + 1];
    for (int gate = 0; gate < GATES; ++gate) {
      y[gate] = float(a.z[place(s, s.t, b, GATES * H) + Cell::block(gate) * H + j]);
      products[gate] = Cell::PRODUCTS ? sums[r * COLUMNS + gate * UNITS + cell % UNITS] : 0.0f;
    }
    take_states<Cell, S>(s, a, is_first(s, length), x.h, b, j, states);
    take_blocks<Cell::INPUTS>(a.inputs, place(s, s.t, b, Cell::INPUTS * H) + j, H, u, 0);
    Cell::template constants<Index>(a, s.d, H, j, p);
    Cell::forward(p, u, products, states, y);
    // Past an item's end the outputs are 0. They are selected, not multiplied, as the numbers there may be NaN.
    arrays[place(s, 0, b, H) + j] = S(live ? states[0] : 0.0f);
#pragma clang loop unroll(full)
    for (int k = 1; k <= C; ++k) states[k] = live ? states[k] : 0.0f;
    set_carries<C>(a.after, place(s, 0, b, C * H) + j, H, states, 1);
    for (int k = 0; k < KEPT; ++k) arrays[units + kept_at + Cell::block(k) * H] = S(live ? y[k] : 0.0f);
  }
  pad_row(a.after, start + units * (1 + KEPT), group, 32 * simdgroup + lane);
}

// Compute h [B, D P] = m Wp^T of one step, with a projection Wp [D, P, H]: an additional launch of each step. m is read
// from `before`, the array that the step's first launch wrote. If `numbers` is present, h is clipped.
template <class Product, class S, class Arrays>
void stepwise_project(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int P = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Block own = {b0, j0, simdgroup, lane, sums};
  const Items<S> x = items_of(s, (const device S*)a.before + carried<S>(Index(s.B) * s.D * s.K), s.K);
  Product::template product<OneBlock, 0, COLUMNS, 1>(x, rows_from(a.Wp, Index(s.d) * P, s.K), s.B, P, s.K, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= s.B || j >= P) continue;
    const float limit = value_at(a.numbers, 2, 0.0f);
    ((device S*)a.after)[place(s, 0, b, P) + j] =
        S(is_present(a.numbers) ? within(-limit, sums[cell], limit) : sums[cell]);
  }
  pad_row(a.after, Index(s.B) * s.D * P, group, 32 * simdgroup + lane);
}
