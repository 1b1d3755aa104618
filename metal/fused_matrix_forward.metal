// A recurrence over a whole sequence, forward, in matrices: the equation of fused_forward.metal.
//
// The masked h of the step before stands in `vectors`, [2][padded H][8 items], the two halves by turns.
template <int CELL, int H, int RESIDENT, class Index, class S, class Z, class H0, class C0, class W, class E, class M,
    class F, class L, class N, class C, class G, class CT>
void fused_matrix_forward(
    Z z, H0 h0, C0 c0, W packed, E extra, M mask, F keeps, L lengths, const constant int* sizes, N numbers,
    device S* h, C c, G gates, device S* hT, CT cT, threadgroup float* vectors, uint2 group, uint index, uint threads, uint lane) {
  constexpr int HALF = 64 * PARTS_OF<H>, COUNT = (PARTS_OF<H> + 1) / 2 * PRODUCTS;
  Sweep sweep = {};
  read_sizes(sizes, group.y, sweep);
  const float forget_bias = value_at(numbers, 0, 0.0f), limit = value_at(numbers, 1, 0.0f);
  const int unit = int(index) / 32 * 8 + row_of(int(lane)), column = column_of(int(lane));
  const int b0 = int(group.x) * 8 + column;
  const Index earlier = Index(first_time(sweep) * time_step(sweep, GATES, H));
  Place<Index> next;
  between_steps<false>(sweep, GATES, H, next);
  const device vec<S, 4>* read = vectors_of_lane<COUNT, vec<S, 4>>(packed, sweep.direction, index, threads);
  vec<S, 4> kept[RESIDENT == 0 ? 1 : RESIDENT];
  keep<RESIDENT>(read, kept);
  fill_with_zeros(vectors, 2 * HALF, index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int length[2];
  float p[LANES], h_now[2], c_now[2];
  bool real[2];
  Place<Index> at[2];
#pragma clang loop unroll(full)
  for (int m = 0; m < LANES; ++m) p[m] = unit < H ? lane_constant<CELL>(extra, sweep.direction, m, H, unit) : 0.0f;
#pragma clang loop unroll(full)
  for (int e = 0; e < 2; ++e) {
    const long item = place_in(sweep, b0 + e, 1, 0, H, unit);
    real[e] = b0 + e < sweep.B && unit < H;
    first_place<false>(sweep, b0 + e, GATES, 0, H, unit, at[e]);
    length[e] = b0 + e < sweep.B ? value_at(lengths, b0 + e, sweep.T) : 0;
    h_now[e] = real[e] ? value_at(h0, item, 0.0f) : 0.0f;
    c_now[e] = real[e] ? value_at(c0, item, 0.0f) : 0.0f;
    if (real[e])
      vectors[(sweep.start & 1) * HALF + 8 * unit + column + e] = h_now[e] * value_at(mask, at[e].mask, 1.0f);
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
      const bool live = is_live(lengths, time_of(sweep, n), length[e]);
      const float factor = value_at(keeps, at[e].keep, 1.0f);
      float y[LANES], sums[PRODUCTS], state = factor * c_now[e];
#pragma clang loop unroll(full)
      for (int m = 0; m < GATES; ++m) y[m] = float(z[at[e].gate + earlier + gate_block(CELL, m) * H]);
#pragma clang loop unroll(full)
      for (int m = 0; m < PRODUCTS; ++m) sums[m] = total[m].thread_elements()[e];
      const S result = S(step_of_unit<CELL>(sums, p, forget_bias, limit, factor * h_now[e], state, y));
      h_now[e] = live ? float(result) : h_now[e];
      c_now[e] = live ? state : c_now[e];
#pragma clang loop unroll(full)
      for (int m = 0; m < GATES; ++m) store(gates, at[e].gate + gate_block(CELL, m) * H, live ? y[m] : 0.0f);
      store(c, at[e].state, live ? state : 0.0f);
      h[at[e].state] = live ? result : S(0.0f);
      advance(at[e], next);
      if (!is_present(mask) || n + 1 < sweep.stop)
        vectors[(~n & 1) * HALF + 8 * unit + column + e] = h_now[e] * value_at(mask, at[e].mask, 1.0f);
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
