// One time step of a GRU whose reset comes before the candidate's product: n = s_n(z_n + (r mask h_before) Wh_n^T).
//
// This product needs the gate r of all units, which several threadgroups compute. So a step has two launches:
//   forward   stepwise_gru_reset: r, z and r mask h_before       stepwise_gru_candidate: n and the new h
//   backward  stepwise_backward: the gradients of z and n        stepwise_gru_reset_backward: those of r and of r h
//
// r, z, n are the gates reset, update and candidate. The array a.z is not the gate z: it is the input's part of the
// preactivations, [T, B, D 3H]. stepwise.metal explains the names that all kernels of a step share,
// stepwise_forward.metal and stepwise_backward.metal the arrays, and Previous, the operand mask h_before.

// First launch of a forward step: compute the gates r and z, and r * mask * h_before, the operand of the candidate's
// product. a.after [3, B, D H] gets r * mask * h_before, r and z, in this order. The second launch reads this array as
// `reset_row`. The product has the columns of the two gates r (number 0) and z, so UNITS is half of COLUMNS. y: the
// gates r and z of a unit.
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
    // h: mask * h_before of this unit, found with find_row (0 is the only segment). At step n = 0 without h0 there is
    // no array to read (product_length is 0), and h is 0.
    float h[1] = {0.0f};
    PreviousRow<S, Arrays> row;
    find_row(x, b, 0, row);
    if (product_length(s, a) > 0) operands_at<1>(row, j, h);
    a.after[at] = S(y[Cell::GATE_R] * h[0]);
  }
  pad_row(a.after, 3 * units, group, 32 * simdgroup + lane);
}

// Second launch of a forward step: compute the candidate n and the new h, and write a.after, the array that this launch
// leaves for the next step: h [B, D H], then, if SAVES, the gates [B, D 3H] for a backward pass. All are 0 past an
// item's end.
//   reset_row   what the first launch wrote, [3, B, D H]: r * mask * h_before (the operand x of the product), r, z
//   N           the candidate's gate number. The product has only the candidate's columns
//   last        h before the step; h: last times `keep`
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

// Second launch of a backward step: compute the gradient of r, and complete the carry of h_before. The product of the
// candidate's dz with Wh_n is the gradient of r mask h_before. From it follow the gradient of r, and a part of the
// gradient of h_before, which is added to its carry.
//   now_row   the row that stepwise_backward wrote for this step: the carry, [B, D H] float (with `keep` a second one,
//             before its multiplication by keep), then dz [B, D 3H], the gradients of the preactivations; for r only
//             the cotangent so far
//   after     a copy of now_row, with the gradient of r and the new carry
//   weights   [D, H, H], the transposed Wh of the candidate, which is not divided by gates (OneBlock)
//   x         the operand: the candidate's dz, in rows of 3H numbers per direction
//   carry     the gradient of h_before without the part that goes through the products of the gates r and z
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
