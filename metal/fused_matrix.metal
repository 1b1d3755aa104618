// The kernels that run all time steps in one launch with products of 8 x 8 matrices, for wide batches. fused.metal
// describes the arrays and explains the names.
//
// A threadgroup computes 8 batch items of one direction, and each of its simdgroups 8 hidden units. In a product the
// left matrix holds weights, in one row per unit; the right matrix holds 8 numbers of each item, in one column per
// item. So the result has one row per unit and one column per item. The lanes of a simdgroup share each matrix: a lane
// holds two neighbouring numbers of one row, at the positions that row_of and column_of return, as thread_elements()[0]
// and [1]. In the result these two numbers belong to one unit of two items. So the lane computes the cell of this unit
// for both items; the index e (0 or 1) counts them. `vectors` in threadgroup memory holds the right side of the
// product, [length, padded to 8][8 items].
//
//   m, k         a gate; a state (0 is h) or another number of a unit
//   streamed     here a vector of 4 weights holds the lane's numbers of two successive left matrices
//   y            the numbers of a step that are saved, mostly the gates
//   u, p         the INPUTS of a step; the CONSTANTS of a unit, of which SUMMED have a gradient dp
//   at           a unit's positions in arrays at a step (Place, fused.metal)
//   next, distance   the distances from these positions to those at the next step
//   real         whether the lane's item and unit exist

// How many 8 x 8 matrices, side by side, are needed to hold rows of LENGTH numbers. Each of them is called a part.
template <int LENGTH> constant constexpr int PARTS_OF = (LENGTH + 7) / 8;

// Whether the kernels read ahead: before a product they load the numbers that they need after it, so that the loads
// overlap with the product. These numbers take registers during the product. If no registers are left for weights
// (RESIDENT is 0), there are none for these numbers either.
template <int RESIDENT> constant constexpr bool READS_AHEAD = RESIDENT > 0;

// row_of and column_of return the position of a lane's two numbers in an 8 x 8 matrix: the row, and the first of two
// columns. lane: the lane's number in the simdgroup, 0 ... 31. Metal's simdgroup_float8x8 has this layout on Apple
// GPUs: bits 1, 2 and 4 of `lane` are the row, bits 0 and 3 select the columns.
inline int row_of(int lane) { return (lane >> 2 & 4) + (lane >> 1 & 3); }
inline int column_of(int lane) { return (lane >> 2 & 2) * 2 + (lane & 1) * 2; }

// Multiply TILES matrices of weights, each with 8 rows of LENGTH numbers, by `vectors`, a matrix with LENGTH rows and 8
// columns. Each of them is cut into parts, which are 8 x 8 matrices. A part of `vectors` is 64 floats, in rows of 8.
// The product of weight matrix m has CHAINS partial sums, total[m CHAINS] ... total[m CHAINS + CHAINS - 1], which the
// caller adds up. Successive parts are added to different partial sums, so that an addition need not wait for the
// previous one. A weight vector has the lane's numbers of two parts, so the loop takes two parts at a time. If the
// number of parts is odd, the second half of the last vectors is not used.
template <int TILES, int CHAINS, int RESIDENT, int LENGTH, class V>
void product_of_matrices(
    thread simdgroup_float8x8 (&total)[TILES * CHAINS], thread const V* resident, const device V* streamed,
    threadgroup const float* vectors) {
  constexpr int PARTS = PARTS_OF<LENGTH>;
  simdgroup_float8x8 left, right[2];
  UNROLL for (int part = 0; part < PARTS; part += 2) {
    simdgroup_load(right[0], vectors + 64 * part, 8);
    if (part + 1 < PARTS) simdgroup_load(right[1], vectors + 64 * (part + 1), 8);
    UNROLL for (int m = 0; m < TILES; ++m) {
      const int n = part / 2 * TILES + m, first = m * CHAINS + part % CHAINS, second = m * CHAINS + (part + 1) % CHAINS;
      float4 weights;
      if (n < RESIDENT) weights = float4(resident[n]);
      else weights = float4(streamed[32 * n]);
      left.thread_elements()[0] = weights[0];
      left.thread_elements()[1] = weights[1];
      simdgroup_multiply_accumulate(total[first], left, right[0], total[first]);
      if (part + 1 >= PARTS) continue;
      left.thread_elements()[0] = weights[2];
      left.thread_elements()[1] = weights[3];
      simdgroup_multiply_accumulate(total[second], left, right[1], total[second]);
    }
  }
}

// Return the position of a unit's number k in an array with COUNT blocks of H numbers per batch item. at: the unit's
// positions; at.gate is in block 0. If COUNT is the number of gates, the position is at.gate plus a distance; any other
// COUNT, which only a user's cell has, takes a multiplication. A user's cell has number k in block k, a built-in cell
// in the block of gate k. earlier: 0 for an output.
template <class Cell, int COUNT, int H, class Index>
Index block_place(thread const Place<Index>& at, int k, int unit, Index earlier = 0) {
  return COUNT == Cell::GATES ? at.gate + Index(COUNT) * earlier + Cell::block(k) * H
                              : place_of<COUNT, H>(at.state + earlier, k, unit);
}

// Read the numbers that a forward step needs for the two batch items of a lane: z of all gates into y, the inputs u of
// the step, `keep` of this step into factor, and the mask of the next step, which lies `distance` away. The step needs
// the next mask, because it writes its new h times that mask for the next product. The last argument of load_all, 0, is
// the first element of u[e] to be set.
template <class Cell, int H, class Index, class Arrays>
void read_inputs(
    thread const Arrays& a, thread const Place<Index> (&at)[2], thread const Place<Index>& distance, Index earlier,
    int unit, thread float (&y)[2][VALUES<Cell>], thread float (&u)[2][SIZE_FOR<Cell::INPUTS>],
    thread float (&mask)[2], thread float (&factor)[2]) {
  UNROLL for (int e = 0; e < 2; ++e) {
    UNROLL for (int m = 0; m < Cell::GATES; ++m)
      y[e][m] = float(a.z[at[e].gate + Index(Cell::GATES) * earlier + Cell::block(m) * H]);
    load_all<Cell::INPUTS, H>(a.inputs, at[e].state + earlier, unit, u[e], 0);
    mask[e] = value_at(a.mask, at[e].mask + distance.mask, 1.0f);
    factor[e] = value_at(a.keep, at[e].keep, 1.0f);
  }
}

// Run the forward pass: h = cell(z_t + (mask_t * h_prev) Wh^T, ...). `vectors` is a double buffer [2][padded H][8
// items]: the current step reads the masked h from one half, and writes the masked h of the next step into the other.
// One barrier per step separates these writes from the next reads. column: the index of the lane's first batch item in
// the threadgroup; b0: its index in the batch. read: the unit whose numbers the lane reads. A lane without a unit reads
// those of unit 0, and a lane without an item those of the last item, so that no read leaves the arrays. COUNT: how
// many vectors of 4 weights a lane multiplies at each step. AHEAD: whether a step's numbers are read before the
// product. p: the unit's constants.
template <class Cell, int H, int RESIDENT, class Index, class S, class Arrays>
void fused_matrix_forward(
    thread const Arrays& a, threadgroup float* vectors, uint2 group, uint index, uint threads, uint lane) {
  constexpr int GATES = Cell::GATES, HALF = 64 * PARTS_OF<H>, COUNT = (PARTS_OF<H> + 1) / 2 * GATES;
  constexpr int C = Cell::CARRIED, KEPT = Cell::KEPT;
  constexpr bool AHEAD = READS_AHEAD<RESIDENT>;
  Sweep sweep = {};
  read_sizes(a.sizes, group.y, sweep);
  const int unit = int(index) / 32 * 8 + row_of(int(lane)), column = column_of(int(lane));
  const int b0 = int(group.x) * 8 + column, read = unit < H ? unit : 0;
  const Index earlier = Index(first_time(sweep) * time_step(sweep, 1, H));
  Place<Index> next;
  between_steps<false>(sweep, GATES, H, next);
  const device vec<S, 4>* streamed = vectors_of_lane<COUNT, vec<S, 4>>(a.arranged, sweep.direction, index, threads);
  vec<S, 4> resident[RESIDENT == 0 ? 1 : RESIDENT];
  load_resident<RESIDENT>(streamed, resident);
  fill_with_zeros(vectors, 2 * HALF, index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the zeros that all threads write from the first h
  int length[2];
  float p[SIZE_FOR<Cell::CONSTANTS>], states[2][C + 1];
  bool real[2];
  Place<Index> at[2];
  Cell::template constants<long>(a, sweep.direction, H, read, p);
  UNROLL for (int e = 0; e < 2; ++e) {
    const long item = place_in(sweep, b0 + e, 1, 0, H, unit);
    real[e] = b0 + e < sweep.B && unit < H;
    first_place<false>(sweep, min(b0 + e, sweep.B - 1), GATES, 0, H, read, at[e]);
    length[e] = b0 + e < sweep.B ? value_at(a.lengths, b0 + e, sweep.T) : 0;
    if (!real[e]) continue;
    load_states<Cell, H>(a.h0, a.c0, item, unit, states[e]);
    vectors[(sweep.start & 1) * HALF + 8 * unit + column + e] = states[e][0] * value_at(a.mask, at[e].mask, 1.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the writes of the first h from the first product
  for (int n = sweep.start; n < sweep.stop; ++n) {
    simdgroup_float8x8 total[GATES];
    float y[2][VALUES<Cell>], u[2][SIZE_FOR<Cell::INPUTS>], mask[2], factor[2];
    Place<Index> distance;
    distance_to_next(n < sweep.stop - 1, next, distance);
    if (AHEAD) read_inputs<Cell, H>(a, at, distance, earlier, read, y, u, mask, factor);
    UNROLL for (int m = 0; m < GATES; ++m) total[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    product_of_matrices<GATES, 1, RESIDENT, H>(total, resident, streamed, vectors + (n & 1) * HALF);
    if (!AHEAD) read_inputs<Cell, H>(a, at, distance, earlier, read, y, u, mask, factor);
    UNROLL for (int e = 0; e < 2; ++e) {
      if (!real[e]) continue;
      const bool live = is_live(a.lengths, time_of(sweep, n), length[e]);
      float sums[GATES], next_states[C + 1];
      UNROLL for (int m = 0; m < GATES; ++m) sums[m] = total[m].thread_elements()[e];
      UNROLL for (int k = 0; k <= C; ++k) next_states[k] = factor[e] * states[e][k];
      Cell::forward(p, u[e], sums, next_states, y[e]);
      const S result = S(next_states[0]);
      next_states[0] = float(result);
      UNROLL for (int k = 0; k <= C; ++k) {
        states[e][k] = live ? next_states[k] : states[e][k];
        next_states[k] = live ? next_states[k] : 0.0f;
      }
      UNROLL for (int m = 0; m < KEPT; ++m)
        store(a.gates, block_place<Cell, KEPT, H>(at[e], m, unit), live ? y[e][m] : 0.0f);
      store_all<C, H>(a.c, at[e].state, unit, next_states + 1);
      a.h[at[e].state] = live ? result : S(0.0f);
      vectors[(~n & 1) * HALF + 8 * unit + column + e] = states[e][0] * mask[e];
    }
    UNROLL for (int e = 0; e < 2; ++e) advance(at[e], next);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the writes of the new h from the next step's product
    streamed += opaque_zero(sweep);
  }
  for (int e = 0; e < 2; ++e) {
    if (!real[e]) continue;
    const long item = place_in(sweep, b0 + e, 1, 0, H, unit);
    a.hT[item] = S(states[e][0]);
    store_all<C, H>(a.cT, item, unit, states[e] + 1);
  }
}

// Compute the backward product: `vectors`, LENGTH numbers of each of 8 batch items, times the columns of Wh that belong
// to the 8 units of this simdgroup. sum[e]: the result for the lane's unit and for number e of its two batch items.
// There is one matrix of results, but it has four partial sums, so that no addition waits for the one before (1, 4 in
// product_of_matrices). They are added up at the end.
template <int RESIDENT, int LENGTH, class V>
void product_of_columns(
    thread float (&sum)[2], thread const V* resident, const device V* streamed, threadgroup const float* vectors) {
  simdgroup_float8x8 total[4];
  UNROLL for (int m = 0; m < 4; ++m) total[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  product_of_matrices<1, 4, RESIDENT, LENGTH>(total, resident, streamed, vectors);
  UNROLL for (int e = 0; e < 2; ++e) {
    sum[e] = 0.0f;
    UNROLL for (int m = 0; m < 4; ++m) sum[e] += total[m].thread_elements()[e];
  }
}

// Read the numbers of backward step n for the two batch items of a lane: into y those that the forward pass saved
// (mostly the gates), into d their cotangents, and into `numbers` states, cotangents of states, inputs and factors.
// Only a built-in cell has cotangents d; its KEPT and GRADIENTS equal GATES. step: how many elements h has per time
// index.
template <class Cell, int H, class Index, class Arrays>
void read_items(
    thread const Sweep& sweep, thread const Arrays& a, int n, thread const Item<Cell, Index> (&items)[2],
    Index earlier, Index step, int unit, thread float (&y)[2][SIZE_FOR<Cell::KEPT>],
    thread float (&d)[2][Cell::GRADIENTS], thread StepNumbers<Cell> (&numbers)[2]) {
  constexpr int KEPT = Cell::KEPT;
  UNROLL for (int e = 0; e < 2; ++e) {
    read_step<Cell, H>(sweep, a, n, items[e].at, earlier, step, unit, numbers[e]);
    UNROLL for (int m = 0; m < KEPT; ++m)
      y[e][m] = value_at(a.gates, block_place<Cell, KEPT, H>(items[e].at, m, unit, earlier), 0.0f);
    UNROLL for (int m = 0; m < Cell::GRADIENTS; ++m)
      d[e][m] = value_at(a.dgates, items[e].at.gate + Index(Cell::GATES) * earlier + Cell::block(m) * H, 0.0f);
  }
}

// Compute one backward step of one unit of one batch item, and store its gradients; past the item's end (not `live`)
// they are 0. p: the unit's constants. y: the numbers that the forward pass saved. numbers: the other numbers that this
// step has read. after: the states after the step. d: on entry the cotangents of y, on return the gradients of the
// preactivations. dp: the gradients of the parameters are added to it. item.ds: on entry the gradients of the states
// from later steps; on return those of the states before the step, except for h. item.past: on return the part of the
// gradient of h that does not go through the product.
template <class Cell, int H, class Index, class Arrays>
void unit_backward(
    thread const Arrays& a, bool live, int unit, thread const float* p, thread const float (&y)[SIZE_FOR<Cell::KEPT>],
    thread const StepNumbers<Cell>& numbers, thread const float (&after)[Cell::CARRIED + 1],
    thread Item<Cell, Index>& item, thread float (&d)[Cell::GRADIENTS], thread float (&dp)[SIZE_FOR<Cell::SUMMED>]) {
  constexpr int C = Cell::CARRIED, FIRST = FIRST_CARRY<Cell>;
  float before[C + 1], ds[C + 1], du[SIZE_FOR<Cell::INPUTS>], dp_now[SIZE_FOR<Cell::SUMMED>];
  UNROLL for (int k = 0; k <= C; ++k) {
    before[k] = numbers.keep * item.states[k];
    ds[k] = item.ds[k] + numbers.ds[k];
  }
  item.mask = numbers.mask;
  Cell::backward(p, numbers.u, y, before, after, ds, d, du, dp_now);
  UNROLL for (int m = 0; m < Cell::GRADIENTS; ++m)
    store(a.dz, block_place<Cell, Cell::GRADIENTS, H>(item.at, m, unit), live ? d[m] : 0.0f);
  UNROLL for (int k = 0; k < Cell::INPUTS; ++k)
    store(a.du, place_of<Cell::INPUTS, H>(item.at.state, k, unit), live ? du[k] : 0.0f);
  // The gradient of keep is computed from the array `carry`. `carry` gets the gradients of keep * state, without the
  // part that goes through the product. FIRST: the index of the first state that has such a gradient: 0 (h) if a step
  // reads h outside the product, else 1.
  UNROLL for (int k = FIRST; k <= C; ++k)
    store(a.carry, place_of<CARRIES<Cell>, H>(item.at.state, k - FIRST, unit), live ? ds[k] : 0.0f);
  UNROLL for (int k = 1; k <= C; ++k) item.ds[k] = live ? numbers.keep * ds[k] : item.ds[k];
  UNROLL for (int k = 0; k < Cell::SUMMED; ++k) dp[k] += live ? dp_now[k] : 0.0f;
  item.past = ds[0] * numbers.keep;
}

// Store dp, the gradients of the SUMMED parameters that each unit has, in a.dw [groups, D SUMMED H]. They are summed
// over the steps and the 8 batch items of a threadgroup. group: the threadgroup's number. Four lanes have the same
// unit, each for two items. Their lane numbers differ in bits 0 and 3, so two exchanges over the distances 1 and 8 add
// up their sums. writes: whether this lane is the one of the four that writes.
template <class Cell, int H, class Arrays>
void store_sums(
    thread const Arrays& a, thread const Sweep& sweep, uint group, int unit, bool writes,
    thread float (&dp)[SIZE_FOR<Cell::SUMMED>]) {
  UNROLL for (int k = 0; k < Cell::SUMMED; ++k) {
    dp[k] += simd_shuffle_xor(dp[k], 1);
    dp[k] += simd_shuffle_xor(dp[k], 8);
    if (writes) store(a.dw, place_in(sweep, int(group), Cell::SUMMED, k, H, unit), dp[k]);
  }
}

// Run the backward pass; the head of fused_backward.metal has its equations. `vectors` [VECTORS][padded G H][8 items]
// holds the gradients of the recurrent products at the current step, which are the operand of the product with Wh.
// VECTORS is 2 (a double buffer), or 1 if threadgroup memory has no space for two. Barriers: one per step, between
// writing the operand and the product that reads it; with a single buffer a second one, between the product and the
// writes of the next step. column, b0, read, COUNT: as in the forward pass. K: how many numbers the operand has per
// item. AHEAD: whether a step's numbers are read before the product of the step processed before it.
template <class Cell, int H, int RESIDENT, int VECTORS, class Index, class S, class Arrays>
void fused_matrix_backward(
    thread const Arrays& a, threadgroup float* vectors, uint2 group, uint index, uint threads, uint lane) {
  constexpr int GATES = Cell::GATES, K = GATES * H, HALF = 64 * PARTS_OF<K>, COUNT = (PARTS_OF<K> + 1) / 2;
  constexpr int C = Cell::CARRIED;
  constexpr bool AHEAD = READS_AHEAD<RESIDENT>;
  Sweep sweep = {};
  read_sizes(a.sizes, group.y, sweep);
  const int unit = int(index) / 32 * 8 + row_of(int(lane)), column = column_of(int(lane));
  const int b0 = int(group.x) * 8 + column, read = unit < H ? unit : 0;
  const Index step = Index(time_step(sweep, 1, H)), earlier = Index(first_time(sweep)) * step;
  Place<Index> next;
  between_steps<true>(sweep, GATES, H, next);
  const device vec<S, 4>* streamed = vectors_of_lane<COUNT, vec<S, 4>>(a.arranged, sweep.direction, index, threads);
  vec<S, 4> resident[RESIDENT == 0 ? 1 : RESIDENT];
  load_resident<RESIDENT>(streamed, resident);
  fill_with_zeros(vectors, VECTORS * HALF, index, threads);
  float p[SIZE_FOR<Cell::CONSTANTS>], dp[SIZE_FOR<Cell::SUMMED>] = {};
  bool real[2];
  Item<Cell, Index> items[2];
  Cell::template constants<long>(a, sweep.direction, H, read, p);
  UNROLL for (int e = 0; e < 2; ++e) {
    real[e] = b0 + e < sweep.B && unit < H;
    begin_item<Cell, H>(sweep, a, b0 + e, 0, unit, unit < H, earlier, items[e]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the zeros that all threads write from the first d
  float y[2][SIZE_FOR<Cell::KEPT>], d[2][Cell::GRADIENTS];
  StepNumbers<Cell> numbers[2];
  if (AHEAD) read_items<Cell, H>(sweep, a, sweep.stop - 1, items, earlier, step, read, y, d, numbers);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    threadgroup float* current = vectors + (VECTORS > 1 ? n & 1 : 0) * HALF;
    if (!AHEAD) read_items<Cell, H>(sweep, a, n, items, earlier, step, read, y, d, numbers);
    UNROLL for (int e = 0; e < 2; ++e) {
      if (!real[e]) continue;
      const bool live = is_live(a.lengths, time_of(sweep, n), items[e].length);
      const Index at = items[e].at.gate;
      float after[C + 1];
      use_states<Cell, H>(sweep, a, n, step, read, numbers[e].states, items[e], after);
      unit_backward<Cell, H>(a, live, unit, p, y[e], numbers[e], after, items[e], d[e], dp);
      UNROLL for (int m = 0; m < GATES; ++m) {
        const int block = Cell::block(m) * H;
        const S operand = S(live ? Cell::product_gradient(m, y[e], d[e]) : 0.0f);
        store(a.d_out, at + block, float(operand));
        current[8 * (block + unit) + column + e] = float(operand);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the writes of d from the product that reads it
    // Go to the next step. If AHEAD, read its numbers before the product, so that they arrive while the product is
    // computed. The launch's last step stays where it is, and reads its own numbers again.
    const int ahead = max(n - 1, sweep.start);
    Place<Index> distance;
    distance_to_next(ahead != n, next, distance);
    UNROLL for (int e = 0; e < 2; ++e) advance(items[e].at, distance);
    if (AHEAD) read_items<Cell, H>(sweep, a, ahead, items, earlier, step, read, y, d, numbers);
    float sum[2];
    product_of_columns<RESIDENT, K>(sum, resident, streamed, current);
    UNROLL for (int e = 0; e < 2; ++e) {
      const bool live = is_live(a.lengths, time_of(sweep, n), items[e].length);
      if (real[e] && live) items[e].ds[0] = sum[e] * items[e].mask + items[e].past;
    }
    // A single buffer: the product must have read it before the next step writes it.
    if (VECTORS == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    streamed += opaque_zero(sweep);
  }
  UNROLL for (int e = 0; e < 2; ++e) {
    if (!real[e]) continue;
    const long item = place_in(sweep, b0 + e, 1, 0, H, unit);
    a.dh0[item] = S(items[e].ds[0]);
    store_all<C, H>(a.dc0, item, unit, items[e].ds + 1);
  }
  store_sums<Cell, H>(a, sweep, group.x, unit, column == 0 && unit < H, dp);
}
