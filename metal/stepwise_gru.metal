// One step of a GRU whose reset comes before the candidate's product: n = s_n(z_n + (r mask h_before) Wh_n^T).
//
// The product needs the gate r of all units, which several threadgroups compute. So a step has two launches:
//   forward   stepwise_gru_reset: r, z and r mask h_before       stepwise_gru_candidate: n and the new h
//   backward  stepwise_backward: the gradients of z and n        stepwise_gru_reset_backward: those of r and of r h
//
// A threadgroup computes some units of ROWS batch items. First its threads compute the product together, then, behind a
// barrier, each some `cells` (one unit of one item each).
//
//   r, z, n   the gates: reset, update, candidate. a.z is another z: [T, B, D 3H], the input's part of the
//             preactivations
//   a         the struct of all arrays; value_at(array, n, v) is array[n], or v if the call lacks the array
//   row       the array that a launch writes: a.after. a.before: the row of the step processed before this one
//   s         the step (Step): time t, number n in processing order, direction d, sizes T, B, H, K, D
//   b, j      batch item, unit. length: the item's steps; live: it has not ended at time t
//   place(s, t, b, width)   position of item b at time t in [T, B, D width]; t = 0: an array without T
//   at        the position of a unit's number in [B, D H]      units   how many numbers such an array has
//   b0, j0    the threadgroup's first item and unit            group   its number: along units, items, directions
//   Cell      the GRU's struct: GATE_R, GATE_Z, GATE_N number the gates; block(gate) is the position of its H numbers
//   Product   ROWS and COLUMNS of a threadgroup's product, its number of THREADS, and its function product<Gates,
//             FIRST, UNITS, SEGMENTS>(x, weights, B, H, K, own): x times the transposed weights of the gates from FIRST
//             on, UNITS columns each, into own.sums [ROWS][COLUMNS]; own: the threadgroup's part
//   S         the dtype of the arrays      Index   the integer type that counts elements
//   pad_row   fills a row of fewer than 8 elements with zeros: Metal would bind it in another address space
//
//   Wh  [D, 3H, H]     h0  [B, D H]     keep  [T, B, D]     mask  [T or 1, B, D H], including keep     lengths  [B]
// stepwise_forward.metal and stepwise_backward.metal describe the other arrays and Previous, the operand mask h_before.

// First launch of a forward step: compute r, z, and r * mask * h_before, the operand of the candidate's product. It
// writes all three: `after` [3, B, D H]. The second launch reads this array as `reset_row`. The product has the columns
// of two gates, from number 0 (r) on, so UNITS is half of COLUMNS; each sum is added up in 1 segment. x: the operand
// mask * h_before. y: the gates r and z of a unit.
template <class Cell, class Product, class S, class Arrays>
void stepwise_gru_reset(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS, UNITS = COLUMNS / 2;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * UNITS;
  const Index units = Index(B) * s.D * H;
  const Previous<S, Arrays> x = {(const device S*)a.before, &a, &s};
  const Block own = {b0, j0, simdgroup, lane, sums};
  Product::template product<Cell, 0, UNITS, 1>(
      x, rows_from(a.Wh, Index(3) * s.d * H, H), B, H, product_length(s, a), own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * UNITS; cell += Product::THREADS) {
    const int r = int(cell / UNITS), b = b0 + r, j = j0 + int(cell % UNITS);
    if (b >= B || j >= H) continue;
    const Index at = place(s, 0, b, H) + j;
    float y[2];
    for (int gate = Cell::GATE_R; gate < Cell::GATE_N; ++gate) {
      const float of_input = float(a.z[place(s, s.t, b, 3 * H) + Cell::block(gate) * H + j]);
      y[gate] = activate(Cell::activation(gate), of_input + sums[r * COLUMNS + gate * UNITS + cell % UNITS]);
      a.after[(1 + gate) * units + at] = S(y[gate]);
    }
    // h: mask * h_before of this unit, through find_row (in segment 0, the only one). At the first step without h0
    // there is no array to read (product_length is 0), and h is 0.
    float h[1] = {0.0f};
    PreviousRow<S, Arrays> row;
    find_row(x, b, 0, row);
    if (product_length(s, a) > 0) operands_at<1>(row, j, h);
    a.after[at] = S(y[Cell::GATE_R] * h[0]);
  }
  pad_row(a.after, 3 * units, group, 32 * simdgroup + lane);
}

// Second launch of a forward step: compute n and the new h, and write the row `after`: h [B, D H] and, if SAVES, the
// gates [B, D 3H] behind it, for a backward pass; 0 past an item's end.
//   reset_row   what the first launch wrote, each [B, D H]: r * mask * h_before, the operand x of the product; then r,
//               z
//   N           the candidate's number. The product has its columns only, each sum in 1 segment; rows_from: the rows of
//               Wh of this direction, which has 3 H
//   last, h     h before the step, and times `keep`
template <class Cell, class Product, bool SAVES, class S, class Arrays>
void stepwise_gru_candidate(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS, N = Cell::GATE_N;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(B) * s.D * H;
  const Items<S> x = items_of(s, a.reset_row, H);
  const Block own = {b0, j0, simdgroup, lane, sums};
  device S* arrays = (device S*)a.after;
  Product::template product<Cell, N, COLUMNS, 1>(x, rows_from(a.Wh, Index(3) * s.d * H, H), B, H, H, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= B || j >= H) continue;
    const int length = value_at(a.lengths, b, s.T);
    const bool live = s.t < length;
    const Index at = place(s, 0, b, H) + j;
    const float last = is_first(s, length) ? value_at(a.h0, at, 0.0f) : float(((const device S*)a.before)[at]);
    const float h = last * value_at(a.keep, place(s, s.t, b, 1), 1.0f);
    float y[3] = {float(a.reset_row[units + at]), float(a.reset_row[2 * units + at]), 0.0f};
    const float of_input = float(a.z[place(s, s.t, b, 3 * H) + Cell::block(N) * H + j]);
    y[N] = Cell::candidate(of_input, y[Cell::GATE_R], sums[cell]);
    arrays[at] = S(live ? Cell::state(y[Cell::GATE_Z], y[N], h) : 0.0f);
    for (int gate = 0; SAVES && gate < 3; ++gate)
      arrays[units + place(s, 0, b, 3 * H) + Cell::block(gate) * H + j] = S(live ? y[gate] : 0.0f);
  }
  pad_row(a.after, units * (SAVES ? 4 : 1), group, 32 * simdgroup + lane);
}

// Second launch of a backward step. The candidate's dz times Wh_n gives d(r mask h_before). From it compute the
// gradient of r, and what h_before gets through r h, which is added to its carry.
//   now_row   the row that stepwise_backward wrote for this step: the carry, [B, D H] float (with `keep` a second one,
//             before its multiplication by keep), then dz [B, D 3H], the gradients of the preactivations; for r only
//             the cotangent so far
//   after     a copy of it with both gradients
//   weights   [D, H, H], the transposed Wh of the candidate: one block (OneBlock)
//   x         the operand: the candidate's dz, from items_of, in rows of 3H numbers per direction
//   carry     the part of the gradient of h_before that bypasses the products of the other gates
//   start     where dz begins in a row, behind the floats
// An item that has ended (t >= length) keeps its numbers.
template <class Cell, class Product, class S, class Arrays>
void stepwise_gru_reset_backward(
    thread const Arrays& a, threadgroup float* sums, uint3 group, int simdgroup, int lane) {
  constexpr int ROWS = Product::ROWS, COLUMNS = Product::COLUMNS, R = Cell::GATE_R;
  const Step s = step_of(a.step, a.sizes, group.z);
  const int B = s.B, H = s.H, b0 = int(group.y) * ROWS, j0 = int(group.x) * COLUMNS;
  const Index units = Index(B) * s.D * H, start = carried<S>(floats_of<Cell>(a) * units);
  const device S* dz = (const device S*)a.now_row + start;
  const Items<S> x = items_of(s, dz + Cell::block(Cell::GATE_N) * H, 3 * H);
  const Block own = {b0, j0, simdgroup, lane, sums};
  Product::template product<OneBlock, 0, COLUMNS, 1>(x, a.weights + Index(s.d) * H * H, B, H, H, own);
  for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += Product::THREADS) {
    const int b = b0 + int(cell / COLUMNS), j = j0 + int(cell % COLUMNS);
    if (b >= B || j >= H) continue;
    const int length = value_at(a.lengths, b, s.T), block = Cell::block(R) * H + j;
    const Index at = place(s, 0, b, H) + j, gates_at = place(s, 0, b, 3 * H);
    float carry = carry_at(a.now_row, at), dr = float(dz[gates_at + block]);
    if (s.t < length) {
      const Index previous = place(s, s.reverse ? s.t + 1 : s.t - 1, b, H) + j;
      const float h = is_first(s, length) ? value_at(a.h0, at, 0.0f) : float(a.h[previous]);
      const float r = float(a.gates[place(s, s.t, b, 3 * H) + block]), m = mask_at(s, a.mask, s.t, b, j, H);
      dr = Cell::reset_backward(r, dr + sums[cell] * h * m);
      carry += sums[cell] * r * m;
    }
    set_carry(a.after, at, carry);
    if (is_present(a.keep)) set_carry(a.after, units + at, carry_at(a.now_row, units + at));
    for (int gate = 0; gate < 3; ++gate) {
      const Index gate_at = gates_at + Cell::block(gate) * H + j;
      ((device S*)a.after)[start + gate_at] = gate == R ? S(dr) : dz[gate_at];
    }
  }
  pad_row(a.after, start + 3 * units, group, 32 * simdgroup + lane);
}
