// The whole-sequence kernels for wide batches, with products of 8 x 8 matrices. fused.metal describes the arrays.
//
// A threadgroup owns 8 batch items of one direction; each of its simdgroups owns 8 hidden units. The product is weights
// times vectors. The left matrix holds 8 rows of weights, one per unit; the right matrix holds 8 numbers of each item.
// So the result has one row per unit and one column per item. The lanes of a simdgroup share each matrix: a lane holds
// two neighbouring numbers of one row (row_of, column_of). In the result a lane's two numbers belong to one unit of two
// items, and the lane computes the cell of this unit for both items. The index e, 0 or 1, says which of the two. A
// vector of 4 weights contains the lane's numbers of two successive left matrices. `vectors` in threadgroup memory
// holds the right side of the product, [length, padded to 8][8 items].

template <int LENGTH> constant constexpr int PARTS_OF = (LENGTH + 7) / 8;

// Whether the kernels read ahead: they load the numbers that they use after the product already before it. These
// numbers then take registers during the product. If no register is left for weights (RESIDENT is 0), there is none for
// these numbers either.
template <int RESIDENT> constant constexpr bool READS_AHEAD = RESIDENT > 0;

// row_of and column_of return the position of a lane's two numbers in an 8 x 8 matrix: the row, and the first of two
// columns.
inline int row_of(int lane) { return (lane >> 2 & 4) + (lane >> 1 & 3); }
inline int column_of(int lane) { return (lane >> 2 & 2) * 2 + (lane & 1) * 2; }

// Multiply TILES matrices, each with 8 rows of weights, by `vectors`, a matrix with LENGTH rows and 8 columns. The
// terms are added in parts of 8 x 8 matrices. The product of tile m is the sum of CHAINS partial sums, total[m CHAINS]
// ... total[m CHAINS + CHAINS - 1]. Successive parts are added to different partial sums, so that an addition need not
// wait for the previous one.
template <int TILES, int CHAINS, int RESIDENT, int LENGTH, class V>
void product_of_matrices(
    thread simdgroup_float8x8 (&total)[TILES * CHAINS], thread const V* resident, const device V* streamed,
    threadgroup const float* vectors) {
  constexpr int PARTS = PARTS_OF<LENGTH>;
  simdgroup_float8x8 left, right[2];
#pragma clang loop unroll(full)
  for (int part = 0; part < PARTS; part += 2) {
    simdgroup_load(right[0], vectors + 64 * part, 8);
    if (part + 1 < PARTS) simdgroup_load(right[1], vectors + 64 * (part + 1), 8);
#pragma clang loop unroll(full)
    for (int m = 0; m < TILES; ++m) {
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

// Read what a forward step needs for the two batch items of a lane: z, into y; `keep` as factor; and the mask of the
// next step, which lies `distance` away. earlier: the number of elements of z before the launch's first time index.
template <class Cell, int H, class Index, class Arrays>
void read_inputs(
    thread const Arrays& a, thread const Place<Index> (&at)[2], thread const Place<Index>& distance, Index earlier,
    thread float (&y)[2][Cell::GATES], thread float (&mask)[2], thread float (&factor)[2]) {
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
#pragma clang loop unroll(full)
    for (int m = 0; m < Cell::GATES; ++m) y[e][m] = float(a.z[at[e].gate + earlier + Cell::block(m) * H]);
    mask[e] = value_at(a.mask, at[e].mask + distance.mask, 1.0f);
    factor[e] = value_at(a.keep, at[e].keep, 1.0f);
  }
}

// The forward pass: h = cell(z_t + (mask_t * h_prev) Wh^T, ...). `vectors` is a double buffer [2][padded H][8 items],
// for the 8 batch items of a threadgroup: one half holds the masked h that the current step reads, the other the masked
// h that it writes for the next step. One barrier per step separates the writes from the reads.
template <class Cell, int H, int RESIDENT, class Index, class S, class Arrays>
void fused_matrix_forward(
    thread const Arrays& a, threadgroup float* vectors, uint2 group, uint index, uint threads, uint lane) {
  constexpr int GATES = Cell::GATES, HALF = 64 * PARTS_OF<H>, COUNT = (PARTS_OF<H> + 1) / 2 * GATES;
  constexpr bool AHEAD = READS_AHEAD<RESIDENT>;
  Sweep sweep = {};
  read_sizes(a.sizes, group.y, sweep);
  const int unit = int(index) / 32 * 8 + row_of(int(lane)), column = column_of(int(lane));
  const int b0 = int(group.x) * 8 + column;
  const Index earlier = Index(first_time(sweep) * time_step(sweep, GATES, H));
  Place<Index> next;
  between_steps<false>(sweep, GATES, H, next);
  const device vec<S, 4>* streamed = vectors_of_lane<COUNT, vec<S, 4>>(a.arranged, sweep.direction, index, threads);
  vec<S, 4> resident[RESIDENT == 0 ? 1 : RESIDENT];
  load_resident<RESIDENT>(streamed, resident);
  fill_with_zeros(vectors, 2 * HALF, index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the zeros of all threads from the units' own h
  int length[2];
  float p[SIZE_FOR<Cell::CONSTANTS>] = {}, h_now[2], c_now[2];
  bool real[2];
  Place<Index> at[2];
  if (unit < H) Cell::template constants<long>(a, sweep.direction, H, unit, p);
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    const long item = place_in(sweep, b0 + e, 1, 0, H, unit);
    real[e] = b0 + e < sweep.B && unit < H;
    // A lane without an item reads the numbers of the last item, and a lane without a unit those of unit 0.
    first_place<false>(sweep, min(b0 + e, sweep.B - 1), GATES, 0, H, unit < H ? unit : 0, at[e]);
    length[e] = b0 + e < sweep.B ? value_at(a.lengths, b0 + e, sweep.T) : 0;
    h_now[e] = real[e] ? value_at(a.h0, item, 0.0f) : 0.0f;
    c_now[e] = real[e] ? value_at(a.c0, item, 0.0f) : 0.0f;
    if (real[e])
      vectors[(sweep.start & 1) * HALF + 8 * unit + column + e] = h_now[e] * value_at(a.mask, at[e].mask, 1.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the first h from the first product
  for (int n = sweep.start; n < sweep.stop; ++n) {
    simdgroup_float8x8 total[GATES];
    float y[2][GATES], mask[2], factor[2];
    Place<Index> distance;
    distance_to_next(n < sweep.stop - 1, next, distance);
    if (AHEAD) read_inputs<Cell, H>(a, at, distance, earlier, y, mask, factor);
#pragma clang loop unroll(full)
    for (int m = 0; m < GATES; ++m) total[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    product_of_matrices<GATES, 1, RESIDENT, H>(total, resident, streamed, vectors + (n & 1) * HALF);
    if (!AHEAD) read_inputs<Cell, H>(a, at, distance, earlier, y, mask, factor);
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) {
      if (!real[e]) continue;
      const bool live = is_live(a.lengths, time_of(sweep, n), length[e]);
      float sums[GATES], states[2] = {factor[e] * h_now[e], factor[e] * c_now[e]};
#pragma clang loop unroll(full)
      for (int m = 0; m < GATES; ++m) sums[m] = total[m].thread_elements()[e];
      Cell::forward(p, p, sums, states, y[e]);
      const S result = S(states[0]);
      h_now[e] = live ? float(result) : h_now[e];
      c_now[e] = live ? states[1] : c_now[e];
#pragma clang loop unroll(full)
      for (int m = 0; m < GATES; ++m) store(a.gates, at[e].gate + Cell::block(m) * H, live ? y[e][m] : 0.0f);
      store(a.c, at[e].state, live ? states[1] : 0.0f);
      a.h[at[e].state] = live ? result : S(0.0f);
      vectors[(~n & 1) * HALF + 8 * unit + column + e] = h_now[e] * mask[e];
    }
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) advance(at[e], next);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the new h of all units from the next step's product
    streamed += opaque_zero(sweep);
  }
  for (int e = 0; e < 2; ++e) {
    if (!real[e]) continue;
    a.hT[place_in(sweep, b0 + e, 1, 0, H, unit)] = S(h_now[e]);
    store(a.cT, place_in(sweep, b0 + e, 1, 0, H, unit), c_now[e]);
  }
}

// Multiply `vectors`, LENGTH numbers of each of 8 batch items, by the columns of Wh that belong to the 8 units of this
// simdgroup. sum[e]: the result for the lane's unit and for the first or second of its two batch items. The function
// computes four independent sums and adds them at the end, so that no addition waits for another.
template <int RESIDENT, int LENGTH, class V>
void product_of_columns(
    thread float (&sum)[2], thread const V* resident, const device V* streamed, threadgroup const float* vectors) {
  simdgroup_float8x8 total[4];
#pragma clang loop unroll(full)
  for (int m = 0; m < 4; ++m) total[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  product_of_matrices<1, 4, RESIDENT, LENGTH>(total, resident, streamed, vectors);
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    sum[e] = 0.0f;
#pragma clang loop unroll(full)
    for (int m = 0; m < 4; ++m) sum[e] += total[m].thread_elements()[e];
  }
}

// Read what the lane needs at step n for its two batch items: the gates y, their cotangents d, and in `numbers` a
// state, cotangents and factors (see read_step, which also describes earlier and step).
template <class Cell, int H, class Index, class Arrays>
void read_items(
    thread const Sweep& sweep, thread const Arrays& a, int n, thread const Item<Index> (&items)[2], Index earlier,
    Index step, thread float (&y)[2][Cell::GATES], thread float (&d)[2][Cell::GATES],
    thread StepNumbers (&numbers)[2]) {
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    read_step<Cell>(sweep, a, n, items[e].at, earlier, step, numbers[e]);
#pragma clang loop unroll(full)
    for (int m = 0; m < Cell::GATES; ++m) {
      const Index at = items[e].at.gate + Index(Cell::GATES) * earlier + Cell::block(m) * H;
      y[e][m] = value_at(a.gates, at, 0.0f);
      d[e][m] = value_at(a.dgates, at, 0.0f);
    }
  }
}

// The backward pass; fused_backward.metal describes its arrays and equation. `vectors` [VECTORS][padded G H][8 items]
// holds the gradients d of the recurrent products at the current step, the operand of the product with Wh. VECTORS is 2
// (a double buffer), or 1 if threadgroup memory has no space for two. Barriers: one per step, between writing d and the
// product; with a single buffer a second one, between the product and the writes of the next step.
template <class Cell, int H, int RESIDENT, int VECTORS, class Index, class S, class Arrays>
void fused_matrix_backward(
    thread const Arrays& a, threadgroup float* vectors, uint2 group, uint index, uint threads, uint lane) {
  constexpr int GATES = Cell::GATES, K = GATES * H, HALF = 64 * PARTS_OF<K>, COUNT = (PARTS_OF<K> + 1) / 2;
  constexpr bool AHEAD = READS_AHEAD<RESIDENT>;
  Sweep sweep = {};
  read_sizes(a.sizes, group.y, sweep);
  const int unit = int(index) / 32 * 8 + row_of(int(lane)), column = column_of(int(lane));
  const int b0 = int(group.x) * 8 + column;
  const Index step = Index(time_step(sweep, 1, H)), earlier = Index(first_time(sweep)) * step;
  Place<Index> next;
  between_steps<true>(sweep, GATES, H, next);
  const device vec<S, 4>* streamed = vectors_of_lane<COUNT, vec<S, 4>>(a.arranged, sweep.direction, index, threads);
  vec<S, 4> resident[RESIDENT == 0 ? 1 : RESIDENT];
  load_resident<RESIDENT>(streamed, resident);
  fill_with_zeros(vectors, VECTORS * HALF, index, threads);
  float p[SIZE_FOR<Cell::CONSTANTS>] = {};
  bool real[2];
  Item<Index> items[2];
  if (unit < H) Cell::template constants<long>(a, sweep.direction, H, unit, p);
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    real[e] = b0 + e < sweep.B && unit < H;
    begin_item(sweep, a, b0 + e, GATES, 0, H, unit, real[e], items[e]);
    items[e].before = float(a.states[items[e].at.state + earlier]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the zeros of all threads from d of the units
  float y[2][GATES], d[2][GATES];
  StepNumbers numbers[2];
  if (AHEAD) read_items<Cell, H>(sweep, a, sweep.stop - 1, items, earlier, step, y, d, numbers);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    threadgroup float* current = vectors + (VECTORS > 1 ? n & 1 : 0) * HALF;
    if (!AHEAD) read_items<Cell, H>(sweep, a, n, items, earlier, step, y, d, numbers);
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) {
      if (!real[e]) continue;
      const bool live = is_live(a.lengths, time_of(sweep, n), items[e].length);
      const Index at = items[e].at.gate;
      const float after = use_states<Cell>(sweep, a, n, step, numbers[e].state, items[e]), factor = numbers[e].keep;
      const float before[2] = {factor * items[e].before, factor * items[e].before}, now[2] = {after, after};
      const float q[1] = {numbers[e].dc_or_q};
      float ds[2] = {items[e].dh + numbers[e].dh, items[e].dc + (Cell::CARRIED ? numbers[e].dc_or_q : 0.0f)}, none[1];
      items[e].mask = numbers[e].mask;
      Cell::backward(p, q, y[e], before, now, ds, d[e], none, none);
      store(a.carry, items[e].at.state, live ? ds[1] + ds[0] : 0.0f);
      items[e].dc = live ? factor * ds[1] : items[e].dc;
      items[e].past = ds[0] * factor;
#pragma clang loop unroll(full)
      for (int m = 0; m < GATES; ++m) {
        const int block = Cell::block(m) * H;
        const S result = S(live ? d[e][m] : 0.0f);
        const S operand = S(live ? Cell::product_gradient(m, y[e], d[e]) : 0.0f);
        a.dz[at + block] = result;
        store(a.d_out, at + block, float(operand));
        current[8 * (block + unit) + column + e] = float(operand);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates d of all units from the product that reads it
    // Read the numbers of the next step. At the launch's last step, read the numbers of this step again.
    const int ahead = max(n - 1, sweep.start);
    Place<Index> distance;
    distance_to_next(ahead != n, next, distance);
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) advance(items[e].at, distance);
    if (AHEAD) read_items<Cell, H>(sweep, a, ahead, items, earlier, step, y, d, numbers);
    float sum[2];
    product_of_columns<RESIDENT, K>(sum, resident, streamed, current);
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) {
      const bool live = is_live(a.lengths, time_of(sweep, n), items[e].length);
      if (real[e] && live) items[e].dh = sum[e] * items[e].mask + items[e].past;
    }
    if (VECTORS == 1) threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the product from the next d
    streamed += opaque_zero(sweep);
  }
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    if (!real[e]) continue;
    a.dh0[place_in(sweep, b0 + e, 1, 0, H, unit)] = S(items[e].dh);
    store(a.dc0, place_in(sweep, b0 + e, 1, 0, H, unit), items[e].dc);
  }
}
