// A recurrence over a whole sequence, forward, in matrices: the equation of fused_forward.metal.
//
// The masked h of the step before stands in `vectors`, [2][padded H][8 items], the two halves by turns.
template <int CELL, int H, int RESIDENT, class S, class Z, class H0, class C0, class W, class E, class M, class L,
    class N, class C, class G, class CT>
void fused_matrix_forward(
    Z z, H0 h0, C0 c0, W Wh, E extra, M mask, L lengths, const constant int* sizes, N numbers, device S* h, C c,
    G gates, device S* hT, CT cT, threadgroup float* vectors, uint2 group, uint index, uint threads, uint lane) {
  constexpr int HALF = 64 * PARTS_OF<H>;
  Sweep sweep = {};
  read_sizes(sizes, group.y, H, sweep);
  const float forget_bias = value_at(numbers, 0, 0.0f), limit = value_at(numbers, 1, 0.0f);
  const int unit = int(index) / 32 * 8 + row_of(int(lane)), column = column_of(int(lane));
  const int b0 = int(group.x) * 8 + column;
  const long step = time_step(sweep, 1, H), gate_step = GATES * step;
  const W weights = Wh + long(sweep.direction) * GATES * H * H;
  int rows_at[LANES], length[2];
  float p[LANES], h_now[2], c_now[2];
  vec<S, 2> kept[LANES * RESIDENT];
#pragma clang loop unroll(full)
  for (int m = 0; m < LANES; ++m) {
    rows_at[m] = weight_row(weight_block(CELL, m), unit, GATES, H);
    p[m] = unit < H ? lane_constant<CELL>(extra, sweep.direction, m, H, unit) : 0.0f;
#pragma clang loop unroll(full)
    for (int part = 0; part < RESIDENT; ++part)
      kept[m * RESIDENT + part] = weight_pair<S>(weights, rows_at[m], GATES * H, 8 * part + column, H);
  }
  for (int n = int(index); n < 2 * HALF; n += int(threads)) vectors[n] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = 0; e < 2; ++e) {
    const bool real = b0 + e < sweep.B && unit < H;
    const long at = place_in(sweep, b0 + e, 1, 0, H, unit);
    length[e] = b0 + e < sweep.B ? value_at(lengths, b0 + e, sweep.T) : 0;
    h_now[e] = real ? value_at(h0, at, 0.0f) : 0.0f;
    c_now[e] = real ? value_at(c0, at, 0.0f) : 0.0f;
    if (real)
      vectors[(sweep.start & 1) * HALF + 8 * unit + column + e] =
          h_now[e] * value_at(mask, time_of(sweep, sweep.start) * sweep.mask_step + at, 1.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.start; n < sweep.stop; ++n) {
    const int t = time_of(sweep, n), local = t - first_time(sweep);
    simdgroup_float8x8 total[LANES];
#pragma clang loop unroll(full)
    for (int m = 0; m < LANES; ++m) total[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    product_of_matrices<LANES, 1, FIRST_PRODUCT<CELL>, RESIDENT, H, S>(
        total, kept, weights, rows_at, GATES * H, vectors + (n & 1) * HALF, int(lane));
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) {
      if (b0 + e >= sweep.B || unit >= H) continue;
      const bool live = t < length[e];
      const long item = place_in(sweep, b0 + e, 1, 0, H, unit), at = local * step + item;
      float y[LANES], sums[LANES], state = c_now[e];
#pragma clang loop unroll(full)
      for (int m = 0; m < LANES; ++m) {
        const int block = gate_block(CELL, m);
        y[m] = block < 0 ? 0.0f : float(z[t * gate_step + place_in(sweep, b0 + e, GATES, block, H, unit)]);
        sums[m] = total[m].thread_elements()[e];
      }
      const S result = S(step_of_unit<CELL>(sums, p, forget_bias, limit, h_now[e], state, y));
      h_now[e] = live ? float(result) : h_now[e];
      c_now[e] = live ? state : c_now[e];
      for (int m = 0; m < GATES; ++m) {
        const long place = place_in(sweep, b0 + e, GATES, gate_block(CELL, m), H, unit);
        store(gates, local * gate_step + place, live ? y[m] : 0.0f);
      }
      store(c, at, live ? state : 0.0f);
      h[at] = live ? result : S(0.0f);
      if (n + 1 < sweep.stop)
        vectors[(~n & 1) * HALF + 8 * unit + column + e] =
            h_now[e] * value_at(mask, time_of(sweep, n + 1) * sweep.mask_step + item, 1.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int e = 0; e < 2; ++e) {
    if (b0 + e >= sweep.B || unit >= H) continue;
    hT[place_in(sweep, b0 + e, 1, 0, H, unit)] = S(h_now[e]);
    store(cT, place_in(sweep, b0 + e, 1, 0, H, unit), c_now[e]);
  }
}
