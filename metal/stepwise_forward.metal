// One forward time step of a recurrence in one launch: the recurrent product and the cell. stepwise.metal explains the
// names that all kernels of a step share.
//
//   gates, states = cell(z_t, (mask_t * h_before) Wh^T, keep_t * states_before);   `mask` already includes `keep`
//
// A threadgroup computes all gates of UNITS units of ROWS batch items. A row contains, in this order: the C states
// besides h, [B, D C H], as float; m [B, D H]; if SAVES, the numbers that the backward pass needs (mostly the gates),
// [B, D KEPT H]. All are 0 past an item's end. m is h or, with a projection, the vector from which a separate launch
// computes h = m Wp^T.
//
// The arrays, for G gates:
//   z            the input's part of the preactivations, [T, B, D G H]
//   Wh [D, G H, K]   Wp [D, K, H]   h0 [B, D K]   c0 [B, D C H]   lengths [B]   keep [T, B, D]   mask [T or 1, B, D K]
//   h_before     with a projection h of the previous step, [B, D K]
//   inputs       the inputs of a user's cell, [T, B, D INPUTS H]
//   numbers      [3]: the forget bias, the limit of c, the limit of a projected h

// One row of the product's operand mask * h_before, the numbers of one batch item. h, mask: pointers to the numbers
// that the product reads next. If the call has no mask, `mask` has the type Absent.
template <class S, class Arrays>
struct PreviousRow {
  const device S* h;
  decltype(Arrays::mask) mask;
};

// The operand of the product: mask * h_before of all batch items. h: where h of the previous step begins. a: the
// arrays, for h0 and the mask. s: the step. The function find_row below selects the row of one item.
template <class S, class Arrays>
struct Previous {
  using Row = PreviousRow<S, Arrays>;
  const device S* h;
  thread const Arrays* a;
  thread const Step* s;
};

// Return the h before a step: h0 if the step is the first one of the item (`begins`), else h, which the launch of the
// step before wrote. Without h0 (Absent) return h in both cases; at step n = 0 nothing reads this pointer, because no
// product is computed. In reverse an item shorter than T begins at a later step; the launches before have written zeros
// as its h.
template <class S> const device S* first_or(Absent, bool, const device S* h) { return h; }
template <class S> const device S* first_or(const device S* h0, bool begins, const device S* h) {
  return begins ? h0 : h;
}

// Let `row` point to h_before and the mask of batch item b. This product has only one segment. If all steps share one
// mask (own_mask is 0), the array of masks has only time index 0.
template <class S, class Arrays>
void find_row(thread const Previous<S, Arrays>& x, int b, int, thread PreviousRow<S, Arrays>& row) {
  thread const Step& s = *x.s;
  row.h = first_or(x.a->h0, is_first(s, value_at(x.a->lengths, b, s.T)), x.h) + place(s, 0, b, s.K);
  row.mask = from(x.a->mask, place(s, s.own_mask * s.t, b, s.K));
}

// Move both pointers of the row, to h and to the mask, forward by n numbers.
template <class S, class Arrays>
void move(thread PreviousRow<S, Arrays>& row, int n) {
  row.h += n;
  row.mask = from(row.mask, n);
}

// Read N numbers mask * h_before as float, from number k on, counted from the row's pointers. Without a mask the
// factors are 1.
template <int N, class S, class Arrays>
void operands_at(thread const PreviousRow<S, Arrays>& row, int k, thread float (&values)[N]) {
  float factors[N];
  take<N>(row.h, k, 0.0f, values);
  take<N>(row.mask, k, 1.0f, factors);
  UNROLL for (int e = 0; e < N; ++e) values[e] *= factors[e];
}

// Return how many terms each sum of the product has: K, the width of h. But return 0 at step n = 0 without h0. There h
// before the step is zero, and no array may exist to read it from.
template <class Arrays>
int product_length(thread const Step& s, thread const Arrays& a) { return s.n > 0 || is_present(a.h0) ? s.K : 0; }

// Return a pointer to h of the previous step. Without a projection h begins at element `start` of the row before (the
// array that the launch of the previous step wrote), behind the states that are stored as float. With a projection h is
// in a separate array, the last argument.
template <class S, class X> const device S* h_of(const device X* row, Index start, Absent) {
  return (const device S*)row + start;
}
template <class S, class X> const device S* h_of(const device X*, Index, const device X* h) {
  return (const device S*)h;
}

// Load the states of unit j of batch item b before the step, times `keep`: states[0] is h, then come the C others, such
// as c of an LSTM. starts: whether this is the item's first step. If so, the states are in h0 and c0, otherwise in the
// array that the launch of the previous step wrote. h: points to h in that array. states[0] is loaded only if the cell
// reads h outside its product (PASSES_H). take_blocks and take_carries read numbers that lie H apart
// into states[1], states[2], ...
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
  UNROLL for (int k = 0; k <= C; ++k) states[k] *= factor;
}

// The kernel of a forward step: compute the product and the cell, and write a.after, the row (the array of this
// launch). SAVES: whether the row also gets the numbers that a backward pass reads.
//   r         the index of the item in `sums` [items][gate][unit], the sums of the product
//   y, products, p, u, states   what Cell::forward reads, see cell.metal: y is the input's part of the preactivations,
//                               p the unit's constants, u the inputs of a user's cell. It returns the new states and,
//                               in y, the numbers to save
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
  // The product x Wh^T for all gates of the cell, from gate 0 on, with UNITS columns per gate. Each sum is computed in
  // one part (1 segment). rows_from returns the rows of Wh that belong to this direction.
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
    // Past an item's end the outputs are 0. They are selected with a condition, not multiplied by 0, because the
    // numbers there may be NaN.
    arrays[place(s, 0, b, H) + j] = S(live ? states[0] : 0.0f);
    UNROLL for (int k = 1; k <= C; ++k) states[k] = live ? states[k] : 0.0f;
    set_carries<C>(a.after, place(s, 0, b, C * H) + j, H, states, 1);
    for (int k = 0; k < KEPT; ++k) arrays[units + kept_at + Cell::block(k) * H] = S(live ? y[k] : 0.0f);
  }
  pad_row(a.after, start + units * (1 + KEPT), group, 32 * simdgroup + lane);
}

// Compute h [B, D P] = m Wp^T of one step, for a projection Wp [D, P, H]. This kernel is the last launch of each step.
// Here s.H is P, the number of columns of the product, and s.K is the number of units. m is in a.before, the row of the
// launch before, behind its FLOATS floats per unit (c). The weights Wp are not divided by gates (OneBlock), and each
// sum is computed in one part (1 segment). The launch has a.numbers only if h is clipped, to the range from -numbers[2]
// to numbers[2]. The backward step of a cell with a norm launches this kernel, too, with the transposed Wp: then it
// computes dm [B, D H] = dh Wp from the row with dh [B, D P], in which FLOATS is 0.
template <class Product, int FLOATS, class S, class Arrays>
void stepwise_project(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int P = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Block own = {b0, j0, simdgroup, lane, sums};
  const Items<S> x = items_of(s, (const device S*)a.before + carried<S>(FLOATS * (Index(s.B) * s.D * s.K)), s.K);
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
