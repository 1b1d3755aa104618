// One time step of a recurrence, backward, in one launch: the product and the backward step of the cell.
//
//   dh_t = mask_next * (dz_next Wh) + the cotangent of h[t];   dz_t, carry = cell_backward(dh_t, carry_next)
//
// "next" is the step of an item that the forward pass processes after t. At an item's last step there is no next one,
// and dhT replaces the product. With a projection, the kernel stepwise_dh computes dh_t [B, D P], and the product here
// is dm = dh_t Wp. A "row" is the array that one launch writes. The "carry" is the gradient of c[t-1], or for a cell
// without c the part of the gradient of h[t-1] that bypasses the products.
//
//   before    the row that the previous launch wrote, for the step processed after t in the forward pass
//   after     the row that this launch writes: the carry [B, D H], then dz [B, D G H]. Past an item's end both are
//             copied from `before`. With the option `keep` a third array [B, D H] follows: the carry before its
//             multiplication by keep; it is 0 past an item's end
//   dh_now    [B, D P]      a row with dh_t, with a projection only
//   weights   [D, H, K]     the transposed Wh, K = G H, or the transposed Wp, K = P
//   rows      an array with the rows of several forward launches, which contain the gates, if `gates` is absent
//   row       the index of this step's row in `rows`
//   gates     [T, B, D G H]     states  [T, B, D H]: c, or h if there is no c     states0  [B, D H]: the first state
//   q         [D, T, B, H]  the candidate's recurrent products of a GRU        peephole [D, 4H]
//   mask      [T or 1, B, D P], including keep       keep  [T, B, D]  lengths [B]
//   dh, dc, dgates, dhT, dcT    the cotangents of the outputs, each in the shape of its output
//   numbers   [3]: the second is the limit of c, for a clip that stops gradients
//   unclipped [T, B, D P], for stepwise_dh with a clip of a projected h that stops gradients: 0 where it changed h
//
// A threadgroup computes COLUMNS units of Product::ROWS batch items. First all its threads compute the product, into
// `sums` [ROWS][COLUMNS] in threadgroup memory; then every thread computes some cells. The product ends with a barrier
// between the two parts.

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
// with one segment has all gates in it. A GRU has one segment per gate, in the order of memory, so that only the
// candidate's dz is multiplied by r. If its reset comes before the product, it has segments for r and z only.
template <class Cell, class S, class Arrays>
void find_row(thread const Following<Cell, S, Arrays>& x, int b, int segment, thread FollowingRow<S, Arrays>& row) {
  thread const Step& s = *x.s;
  if constexpr (Cell::SEGMENTS == 1 || Cell::SEGMENTS != Cell::GATES) {
    row.dz = Cell::SEGMENTS == 1 ? x.dz + place(s, 0, b, s.K)
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

// Return the array dh_now if it is present, else dz.
template <class S>
const device S* either(Absent, const device S* dz) { return dz; }
template <class S, class X>
const device S* either(const device X* row, const device S*) { return (const device S*)row; }

// Return the gradient of h_t[b, j]. It is a sum: the part from the next step (at the item's last step dhT), plus the
// cotangent dh of step t.
template <class Arrays>
float dh_sum(
    thread const Step& s, thread const Arrays& a, threadgroup const float* sum, int length, int b, int j, int width) {
  const float outside = value_at(a.dh, place(s, s.t, b, width) + j, 0.0f);
  const int next = next_step(s, length);
  if (next < 0) return outside + value_at(a.dhT, place(s, 0, b, width) + j, 0.0f);
  return outside + *sum * mask_at(s, a.mask, next, b, j, width);
}

// Return one number of the gates that the forward pass computed. `rows` is an array with the rows (c, h and gates) that
// several forward launches wrote; `row` is the number of this step's row in it, `length` the number of elements of a
// row, and `at` the position of the gate in the row. Return 0 if there are no rows.
template <class S> float gate_in_row(Absent, Absent, Index, Index) { return 0.0f; }
template <class S, class X, class R>
float gate_in_row(const device X* rows, R row, Index length, Index at) {
  return float(((const device S*)rows)[row * length + at]);
}

template <class Cell, class Product, class S, class Arrays>
void stepwise_backward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int GATES = Cell::GATES, ROWS = Product::ROWS, COLUMNS = Product::COLUMNS;
  constexpr bool CARRIES = Cell::HAS_C || Cell::PASSES_H;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(B) * s.D * H, start = carried<S, CARRIES>(units);
  const device S* dz_before = (const device S*)a.before + start;
  const Following<Cell, S, Arrays> x = {either(a.dh_now, dz_before), &a, &s, H};
  const Block own = {b0, j0, simdgroup, lane, sums};
  // The product is dz Wh, with dz of the step that the forward pass processes next. The first launch (`begins`) has no
  // such step, so it skips the product. With a projection every launch needs the product, because it is dh_t Wp
  // instead.
  const bool begins = s.n + 1 == s.T;
  if (!begins || is_present(a.dh_now))
    Product::template product<OneBlock, 0, COLUMNS, Cell::SEGMENTS>(
        x, a.weights + Index(s.d) * H * s.K, B, H, s.K, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= B || j >= H) continue;
    const int length = value_at(a.lengths, b, s.T);
    const Index at = place(s, 0, b, H) + j, now = place(s, s.t, b, H) + j;
    const bool live = s.t < length;
    float y[GATES], dz[GATES], carry = 0.0f, unscaled = 0.0f;
    if (CARRIES) carry = begins ? value_at(a.dcT, at, 0.0f) : carry_at(a.before, at);
    for (int gate = 0; gate < GATES; ++gate) {
      const Index block = j + Cell::block(gate) * H, gate_now = place(s, s.t, b, GATES * H) + block;
      const float in_row = gate_in_row<S>(
          a.rows, a.row, max(start + units * (1 + GATES), Index(8)), start + units + place(s, 0, b, GATES * H) + block);
      y[gate] = live ? value_at(a.gates, gate_now, in_row) : 0.0f;
      dz[gate] = live ? value_at(a.dgates, gate_now, 0.0f)
          : begins    ? 0.0f
                      : float(dz_before[place(s, 0, b, GATES * H) + block]);
    }
    if (live) {
      const Index previous = place(s, s.reverse ? s.t + 1 : s.t - 1, b, H) + j;
      float p[Cell::CONSTANTS];
      float before = is_first(s, length) ? value_at(a.states0, at, 0.0f) : float(a.states[previous]);
      const float dh_t = is_present(a.dh_now) ? sums[cell] : dh_sum(s, a, sums + cell, length, b, j, H);
      const float factor = value_at(a.keep, place(s, s.t, b, 1), 1.0f);
      carry += value_at(a.dc, now, 0.0f);
      if (is_present(a.keep)) before *= factor;
      // `carry` is what reaches the previous step without the recurrent product: dc of an LSTM, or a part of dh of a
      // GRU (PASSES_H). A GRU's part of dh is added to dh_t, because both are gradients of the same h.
      float dh_or_past = Cell::PASSES_H ? carry + dh_t : dh_t;
      Cell::template constants<Index>(a, s.d, H, j, p);
      const float q = value_at(a.q, place_by_direction(s, b, H) + j, 0.0f);
      Cell::backward(
          y, p, before, float(a.states[now]), q, value_at(a.numbers, 1, 0.0f), dh_or_past, carry, dz);
      if (Cell::PASSES_H) carry = dh_or_past;
      if (is_present(a.keep)) unscaled = carry, carry *= factor;
    }
    if (CARRIES) set_carry(a.after, at, carry);
    for (int gate = 0; gate < GATES; ++gate)
      ((device S*)a.after)[start + place(s, 0, b, GATES * H) + j + Cell::block(gate) * H] = S(dz[gate]);
    if (is_present(a.keep)) ((device S*)a.after)[start + units * GATES + at] = S(unscaled);
  }
  pad_row(a.after, start + units * (is_present(a.keep) ? GATES + 1 : GATES), group, 32 * simdgroup + lane);
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
  const Index start = carried<S, Cell::HAS_C || Cell::PASSES_H>(Index(s.B) * s.D * H);
  const Following<Cell, S, Arrays> x = {(const device S*)a.before + start, &a, &s, H};
  const Block own = {b0, j0, simdgroup, lane, sums};
  if (s.n + 1 < s.T)
    Product::template product<OneBlock, 0, COLUMNS, Cell::SEGMENTS>(
        x, a.weights + Index(s.d) * P * s.K, s.B, P, s.K, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= s.B || j >= P) continue;
    const int length = value_at(a.lengths, b, s.T);
    const Index at = place(s, 0, b, P) + j;
    float sum = 0.0f;
    if (s.n < 0 || s.t < length) sum = dh_sum(s, a, sums + cell, length, b, j, P);
    if constexpr (Cell::PASSES_H != 0) sum += carry_at(a.before, at);
    if (is_present(a.unclipped) && float(value_at(a.unclipped, place(s, s.t, b, P) + j, 0.0f)) == 0.0f) sum = 0.0f;
    ((device S*)a.after)[at] = S(sum);
  }
  pad_row(a.after, Index(s.B) * s.D * P, group, 32 * simdgroup + lane);
}
