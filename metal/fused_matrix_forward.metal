// A recurrence over a whole sequence, forward, in matrices: the equation of fused_forward.metal.
//
// The masked h of the step before stands in `vectors`, [2][padded H][8 items], the two halves by turns.
template <int CELL, int H, int RESIDENT, class Index, class S, class Z, class H0, class C0, class W, class E, class M,
    class L, class N, class C, class G, class CT>
void fused_matrix_forward(
    Z z, H0 h0, C0 c0, W packed, E extra, M mask, L lengths, const constant int* sizes, N numbers, device S* h, C c,
    G gates, device S* hT, CT cT, threadgroup float* vectors, uint2 group, uint index, uint threads, uint lane) {
  constexpr int HALF = 64 * PARTS_OF<H>, COUNT = (PARTS_OF<H> + 1) / 2 * PRODUCTS;
  Sweep sweep = {};
  read_sizes(sizes, group.y, sweep);
  const float forget_bias = value_at(numbers, 0, 0.0f), limit = value_at(numbers, 1, 0.0f);
  const int unit = int(index) / 32 * 8 + row_of(int(lane)), column = column_of(int(lane));
  const int b0 = int(group.x) * 8 + column;
  const long step = time_step(sweep, 1, H), gate_step = GATES * step, first_at = first_time(sweep);
  const long first_row = sweep.reverse ? sweep.stop - 1 - sweep.start : 0;
  const Index earlier_gates = Index(first_at * gate_step);
  const device vec<S, 4>* read = vectors_of_lane<COUNT, S>(packed, sweep.direction, index, threads);
  vec<S, 4> kept[RESIDENT > 0 ? RESIDENT : 1];
#pragma clang loop unroll(full)
  for (int n = 0; n < RESIDENT; ++n) kept[n] = read[32 * n];
  for (int n = int(index); n < 2 * HALF; n += int(threads)) vectors[n] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int length[2];
  float p[LANES], h_now[2], c_now[2];
  bool real[2];
  Index at[2], gate_at[2], mask_at[2];
  const Index stride = Index(sweep.reverse ? -step : step), mask_stride = sweep.masks_differ ? stride : 0;
#pragma clang loop unroll(full)
  for (int m = 0; m < LANES; ++m) p[m] = unit < H ? lane_constant<CELL>(extra, sweep.direction, m, H, unit) : 0.0f;
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    const long item = place_in(sweep, b0 + e, 1, 0, H, unit);
    real[e] = b0 + e < sweep.B && unit < H;
    at[e] = Index(first_row * step + item);
    gate_at[e] = Index(first_row * gate_step + place_in(sweep, b0 + e, GATES, 0, H, unit));
    mask_at[e] = Index((sweep.masks_differ ? (first_at + first_row) * step : 0) + item);
    length[e] = b0 + e < sweep.B ? value_at(lengths, b0 + e, sweep.T) : 0;
    h_now[e] = real[e] ? value_at(h0, item, 0.0f) : 0.0f;
    c_now[e] = real[e] ? value_at(c0, item, 0.0f) : 0.0f;
    if (real[e])
      vectors[(sweep.start & 1) * HALF + 8 * unit + column + e] = h_now[e] * value_at(mask, mask_at[e], 1.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.start; n < sweep.stop; ++n) {
    simdgroup_float8x8 total[PRODUCTS];
#pragma clang loop unroll(full)
    for (int m = 0; m < PRODUCTS; ++m) total[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    product_of_matrices<PRODUCTS, 1, RESIDENT, H>(total, kept, read, vectors + (n & 1) * HALF);
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) {
      if (!real[e]) continue;
      const bool live = !is_present(lengths) || time_of(sweep, n) < length[e];
      float y[LANES], sums[PRODUCTS], state = c_now[e];
#pragma clang loop unroll(full)
      for (int m = 0; m < GATES; ++m) y[m] = float(z[gate_at[e] + earlier_gates + gate_block(CELL, m) * H]);
#pragma clang loop unroll(full)
      for (int m = 0; m < PRODUCTS; ++m) sums[m] = total[m].thread_elements()[e];
      const S result = S(step_of_unit<CELL>(sums, p, forget_bias, limit, h_now[e], state, y));
      h_now[e] = live ? float(result) : h_now[e];
      c_now[e] = live ? state : c_now[e];
#pragma clang loop unroll(full)
      for (int m = 0; m < GATES; ++m) store(gates, gate_at[e] + gate_block(CELL, m) * H, live ? y[m] : 0.0f);
      store(c, at[e], live ? state : 0.0f);
      h[at[e]] = live ? result : S(0.0f);
      at[e] += stride;
      gate_at[e] += Index(GATES) * stride;
      mask_at[e] += mask_stride;
      if (!is_present(mask) || n + 1 < sweep.stop)
        vectors[(~n & 1) * HALF + 8 * unit + column + e] = h_now[e] * value_at(mask, mask_at[e], 1.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    read += unknown_zero(sweep);
  }
  for (int e = 0; e < 2; ++e) {
    if (!real[e]) continue;
    hT[place_in(sweep, b0 + e, 1, 0, H, unit)] = S(h_now[e]);
    store(cT, place_in(sweep, b0 + e, 1, 0, H, unit), c_now[e]);
  }
}
