// The steps of fused_matrix_forward.metal in reverse: arrays and equation are those of fused_backward.metal.
//
// d stands in `vectors`, [VECTORS][padded G H][8 items]: two by turns, or one where two do not fit, which costs a
// second barrier per step. The product's parts are summed in 4 chains, as none waits for another.
template <int CELL, int H, int RESIDENT, int VECTORS, class S, class G, class X, class X0, class W, class E, class M,
    class L, class D, class Q, class DG, class DT, class DCT, class DO, class DC0>
void fused_matrix_backward(
    G gates, X states, X0 first, W Wh_T, E extra, M mask, L lengths, D dh, Q beside, DG dgates, DT dhT, DCT dcT,
    const constant int* sizes, device S* dz, DO d_out, device S* dh0, DC0 dc0, threadgroup float* vectors, uint2 group,
    uint index, uint threads, uint lane) {
  constexpr int K = GATES * H, HALF = 64 * PARTS_OF<K>;
  Sweep sweep = {};
  read_sizes(sizes, group.y, H, sweep);
  const int unit = int(index) / 32 * 8 + row_of(int(lane)), column = column_of(int(lane));
  const int b0 = int(group.x) * 8 + column, rows_at[1] = {unit};
  const long step = time_step(sweep, 1, H), gate_step = GATES * step;
  const W weights = Wh_T + long(sweep.direction) * GATES * H * H;
  vec<S, 2> kept[RESIDENT];
#pragma clang loop unroll(full)
  for (int part = 0; part < RESIDENT; ++part) kept[part] = weight_pair<S>(weights, unit, H, 8 * part + column, K);
  for (int n = int(index); n < VECTORS * HALF; n += int(threads)) vectors[n] = 0.0f;
  int length[2];
  float p[LANES], dh_now[2], dc_now[2], now[2], mask_now[2], direct[2];
  for (int m = 0; m < LANES; ++m) p[m] = unit < H ? lane_constant<CELL>(extra, sweep.direction, m, H, unit) : 0.0f;
  for (int e = 0; e < 2; ++e) {
    const long at = place_in(sweep, b0 + e, 1, 0, H, unit);
    const bool real = b0 + e < sweep.B && unit < H;
    length[e] = b0 + e < sweep.B ? value_at(lengths, b0 + e, sweep.T) : 0;
    dh_now[e] = real ? value_at(dhT, at, 0.0f) : 0.0f;
    dc_now[e] = real ? value_at(dcT, at, 0.0f) : 0.0f;
    now[e] = real ? float(states[time_of(sweep, sweep.stop - 1) * step + at]) : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = sweep.stop - 1; n >= sweep.start; --n) {
    const int t = time_of(sweep, n), local = t - first_time(sweep);
    threadgroup float* current = vectors + (VECTORS > 1 ? n & 1 : 0) * HALF;
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) {
      if (b0 + e >= sweep.B || unit >= H) continue;
      const bool live = t < length[e];
      float seen[4], y[LANES], d[LANES], dc = dc_now[e];
      read_step<1, APART>(sweep, n, 0, b0 + e, H, unit, length[e], states, first, dh, beside, mask, seen);
      for (int m = 0; m < LANES; ++m) {
        const int block = gate_block(CELL, m);
        const long at = t * gate_step + place_in(sweep, b0 + e, GATES, block, H, unit);
        y[m] = block < 0 ? 0.0f : value_at(gates, at, 0.0f);
        d[m] = block < 0 ? 0.0f : value_at(dgates, at, 0.0f);
      }
      direct[e] = dh_now[e] + seen[1];
      step_back_of_lanes<CELL>(y, p, seen, now[e], direct[e], dc, d);
      dc_now[e] = live ? dc : dc_now[e];
      now[e] = seen[0];
      mask_now[e] = seen[3];
      for (int m = 0; m < LANES; ++m) {
        const S result = S(live ? d[m] : 0.0f);
        const int block = gate_block(CELL, m), row = weight_block(CELL, m);
        if (block >= 0) dz[local * gate_step + place_in(sweep, b0 + e, GATES, block, H, unit)] = result;
        if (row < 0) continue;
        store(d_out, local * gate_step + place_in(sweep, b0 + e, GATES, row, H, unit), float(result));
        current[8 * (row * H + unit) + column + e] = float(result);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 total[4];
#pragma clang loop unroll(full)
    for (int m = 0; m < 4; ++m) total[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    product_of_matrices<1, 4, 1, RESIDENT, K, S>(total, kept, weights, rows_at, H, current, int(lane));
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; ++e) {
      float sum = 0.0f;
#pragma clang loop unroll(full)
      for (int m = 0; m < 4; ++m) sum += total[m].thread_elements()[e];
      const bool live = b0 + e < sweep.B && unit < H && t < length[e];
      if (live) dh_now[e] = sum * mask_now[e] + direct[e];
    }
    if (VECTORS == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int e = 0; e < 2; ++e) {
    if (b0 + e >= sweep.B || unit >= H) continue;
    dh0[place_in(sweep, b0 + e, 1, 0, H, unit)] = S(dh_now[e]);
    store(dc0, place_in(sweep, b0 + e, 1, 0, H, unit), dc_now[e]);
  }
}
