// The steps of fused_matrix_forward.metal in reverse: arrays and equation are those of fused_backward.metal.
//
// d stands in `vectors`, [VECTORS][padded G H][8 items]: two by turns, or one where two do not fit, which costs a
// second barrier per step. The product's parts are summed in 4 chains, as none waits for another.

// Sums of products of the columns of 8 units with the vectors: of a lane's unit and two items.
template <int RESIDENT, int LENGTH, class V>
void product_of_columns(
    thread float (&sum)[2], thread const V* kept, const device V* read, threadgroup const float* vectors) {
  simdgroup_float8x8 total[4];
#pragma clang loop unroll(full)
  for (int m = 0; m < 4; ++m) total[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  product_of_matrices<1, 4, RESIDENT, LENGTH>(total, kept, read, vectors);
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    sum[e] = 0.0f;
#pragma clang loop unroll(full)
    for (int m = 0; m < 4; ++m) sum[e] += total[m].thread_elements()[e];
  }
}

template <int CELL, int H, int RESIDENT, int VECTORS, class Index, class S, class G, class X, class X0, class W,
    class E, class M, class F, class L, class D, class Q, class DG, class DT, class DCT, class DO, class DK, class DC0>
void fused_matrix_backward(
    G gates, X states, X0 first, W packed, E extra, M mask, F keeps, L lengths, D dh, Q beside, DG dgates,
    DT dhT, DCT dcT, const constant int* sizes, device S* dz, DO d_out, DK carry, device S* dh0, DC0 dc0,
    threadgroup float* vectors, uint2 group, uint index, uint threads, uint lane) {
  constexpr int K = GATES * H, HALF = 64 * PARTS_OF<K>, COUNT = (PARTS_OF<K> + 1) / 2;
  Sweep sweep = {};
  read_sizes(sizes, group.y, sweep);
  const int unit = int(index) / 32 * 8 + row_of(int(lane)), column = column_of(int(lane));
  const int b0 = int(group.x) * 8 + column;
  const Index step = Index(time_step(sweep, 1, H)), earlier = Index(first_time(sweep)) * step;
  Place<Index> next;
  between_steps<true>(sweep, GATES, H, next);
  const device vec<S, 4>* read = vectors_of_lane<COUNT, vec<S, 4>>(packed, sweep.direction, index, threads);
  vec<S, 4> kept[RESIDENT == 0 ? 1 : RESIDENT];
  keep<RESIDENT>(read, kept);
  fill_with_zeros(vectors, VECTORS * HALF, index, threads);
  float p[LANES];
  bool real[2];
  Item<Index> items[2];
#pragma clang loop unroll(full)
  for (int m = 0; m < LANES; ++m) p[m] = unit < H ? lane_constant<CELL>(extra, sweep.direction, m, H, unit) : 0.0f;
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    real[e] = b0 + e < sweep.B && unit < H;
    begin_item(sweep, b0 + e, GATES, 0, H, unit, real[e], lengths, dhT, dcT, items[e]);
    items[e].now = real[e] ? float(states[items[e].at.state + earlier]) : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    const int t = time_of(sweep, n);
    threadgroup float* current = vectors + (VECTORS > 1 ? n & 1 : 0) * HALF;
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) {
      if (!real[e]) continue;
      const bool live = is_live(lengths, t, items[e].length);
      const Index at = items[e].at.gate;
      float seen[4], number[1][4], y[LANES] = {}, d[LANES] = {}, dc = items[e].dc;
      read_step<1, 1>(sweep, n, 0, items + e, earlier, step, states, first, lengths, dh, beside, mask, number);
      share_step<1>(number[0], dh, beside, mask, items[e], seen);
#pragma clang loop unroll(full)
      for (int m = 0; m < GATES; ++m) {
        y[m] = value_at(gates, at + Index(GATES) * earlier + gate_block(CELL, m) * H, 0.0f);
        d[m] = value_at(dgates, at + Index(GATES) * earlier + gate_block(CELL, m) * H, 0.0f);
      }
      const float before = seen[0], factor = value_at(keeps, items[e].at.keep, 1.0f);
      seen[0] *= factor;
      step_back_of_unit<CELL>(y, p, seen, items[e].now, items[e].past, dc, d);
      store(carry, items[e].at.state, live ? dc + items[e].past : 0.0f);
      items[e].dc = live ? factor * dc : items[e].dc;
      items[e].past *= factor;
      items[e].now = before;
#pragma clang loop unroll(full)
      for (int m = 0; m < LANES; ++m) {
        const S result = S(live ? d[m] : 0.0f);
        const int block = gate_block(CELL, m), row = operand_block(CELL, m);
        if (block >= 0) dz[at + block * H] = result;
        if (row < 0) continue;
        store(d_out, at + row * H, float(result));
        current[8 * (row * H + unit) + column + e] = float(result);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum[2];
    product_of_columns<RESIDENT, K>(sum, kept, read, current);
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) {
      if (real[e] && is_live(lengths, t, items[e].length)) items[e].dh = sum[e] * items[e].mask + items[e].past;
      advance(items[e].at, next);
    }
    if (VECTORS == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    read += unknown_zero(sweep);
  }
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    if (!real[e]) continue;
    dh0[place_in(sweep, b0 + e, 1, 0, H, unit)] = S(items[e].dh);
    store(dc0, place_in(sweep, b0 + e, 1, 0, H, unit), items[e].dc);
  }
}
