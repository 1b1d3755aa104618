// One time step of a recurrence, forward, in one launch: the recurrent product and the cell.
//
//   gates, state, h = cell(z_t, (mask_t * h_before) Wh^T, keep_t * state_before);   `mask` already includes `keep`
//
//   z         [T, B, D G H]  the input's part of the preactivations, blocks in the cell's gate order
//   before    the row (the array that one launch writes) of the previous step
//   after     the row that this launch writes: c [B, D H] if the cell has one; then m [B, D H]; then, if SAVES, the
//             gates [B, D G H]. All are 0 past an item's end. m is h or, with a projection, the vector to be projected
//   h_before  [B, D K]       with a projection only: h of the previous step, from a separate launch. K: the width of h
//   Wh        [D, G H, K]    peephole  [D, 4H]     bhn  [D H]
//   h0, c0    [B, D K], [B, D H]: the first states of an item, at t = 0 or, in reverse, at its end
//   mask      [T or 1, B, D K]     keep     [T, B, D]      lengths  [B]      numbers  [3]: forget bias,
//             clip of c, clip of a projected h
//
// A threadgroup computes all gates of UNITS units of Product::ROWS batch items. First all its threads compute the
// product, into `sums` [ROWS][gates][UNITS] in threadgroup memory; then every thread computes some cells. The product
// ends with a barrier between the two parts. Product is ByLanes, ByTiles or QuantizedByLanes.

// How the product reads one row of its operand: mask * h_before of one batch item. At the item's first step h_before is
// h0. Without h0 it is zero: at step n = 0 no product is computed. An item that runs in reverse and is shorter than T
// begins at a later step; before it the launches have written zeros as its h.
template <class S, class Arrays>
struct PreviousRow {
  const device S* h;
  decltype(Arrays::mask) mask;
};

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

// Return a pointer to h of the previous step. Without a projection h lies behind c in the row (the array) that the
// previous launch wrote. With a projection it lies in a separate array.
template <class S, bool CARRIES, class X>
const device S* h_of(thread const Step& s, const device X* row, Absent) {
  return (const device S*)row + carried<S, CARRIES>(Index(s.B) * s.D * s.H);
}
template <class S, bool CARRIES, class X>
const device S* h_of(thread const Step&, const device X*, const device X* h) { return (const device S*)h; }

template <class Cell, class Product, bool SAVES, class S, class Arrays>
void stepwise_forward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int GATES = Cell::GATES, ROWS = Product::ROWS, COLUMNS = Product::COLUMNS, UNITS = COLUMNS / GATES;
  constexpr bool CARRIES = Cell::HAS_C != 0;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * UNITS;
  const Index units = Index(B) * s.D * H, start = carried<S, CARRIES>(units);
  const Previous<S, Arrays> x = {h_of<S, CARRIES>(s, a.before, a.h_before), &a, &s};
  const Block own = {b0, j0, simdgroup, lane, sums};
  Product::template product<Cell, 0, UNITS, 1>(
      x, rows_from(a.Wh, Index(s.d) * GATES * H, s.K), B, H, product_length(s, a), own);
  device S* arrays = (device S*)a.after + start;
  for (int cell = 32 * simdgroup + lane; cell < ROWS * UNITS; cell += Product::THREADS) {
    const int r = int(cell / UNITS), b = b0 + r, j = j0 + int(cell % UNITS);
    if (b >= B || j >= H) continue;
    const int length = value_at(a.lengths, b, s.T);
    const bool starts = is_first(s, length), live = s.t < length;
    const Index at = place(s, 0, b, H) + j, gates_at = place(s, 0, b, GATES * H) + j;
    float y[GATES], q[GATES], p[Cell::CONSTANTS], state = 0.0f;
    for (int gate = 0; gate < GATES; ++gate) {
      y[gate] = float(a.z[place(s, s.t, b, GATES * H) + Cell::block(gate) * H + j]);
      q[gate] = sums[r * COLUMNS + gate * UNITS + cell % UNITS];
    }
    // `state` is c (LSTM) or h (GRU). A cell reads only one of h_prev and c, so both parameters get `state`.
    if constexpr (CARRIES)
      state = starts ? value_at(a.c0, at, 0.0f) : carry_at(a.before, at);
    else if constexpr (Cell::PASSES_H != 0)
      state = starts ? value_at(a.h0, at, 0.0f) : float(x.h[at]);
    state *= value_at(a.keep, place(s, s.t, b, 1), 1.0f);
    Cell::template constants<Index>(a, s.d, H, j, p);
    const float output = Cell::forward(
        q, p, value_at(a.numbers, 0, 0.0f), value_at(a.numbers, 1, 0.0f), state, state, y);
    if (CARRIES) set_carry(a.after, at, live ? state : 0.0f);
    arrays[at] = S(live ? output : 0.0f);
    for (int gate = 0; SAVES && gate < GATES; ++gate)
      arrays[units + gates_at + Cell::block(gate) * H] = S(live ? y[gate] : 0.0f);
  }
  pad_row(a.after, start + units * (SAVES ? 1 + GATES : 1), group, 32 * simdgroup + lane);
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
  const Items<S> x = items_of(s, (const device S*)a.before + carried<S, true>(Index(s.B) * s.D * s.K), s.K);
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
