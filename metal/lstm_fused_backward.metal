// The steps of lstm_fused.metal in reverse: from the gradients that h, c, gates, hT, cT have from outside (dh, dc,
// dgates, dhT, dcT, in the shapes of those) to dz, dh0, dc0. Wh_T [H, 4H] is the transposed Wh.
//
//   dh_t = mask_next * (dz_next Wh) + dh[t];   dz_t, dc_prev = cell_backward(dh_t, dc_t)
//
// dz of a step stands in `state`, [2][ROWS][padded 4H], the two halves by turns. All four lanes of a unit keep its dh,
// dc and c; each of them reads one of c_prev, dh, dc, mask and its own gate.
template <int CELL, int H, int UNITS, int ROWS, int RESIDENT, bool REVERSE, class S, class G, class C, class C0,
    class W, class P, class M, class L, class D, class DC, class DG, class DT, class DCT>
void lstm_fused_backward(
    G gates, C c, C0 c0, W Wh_T, P peephole, M mask, L lengths, D dh, DC dc, DG dgates, DT dhT, DCT dcT,
    const constant int* sizes, device S* dz, device S* dh0, device float* dc0, threadgroup float4* state, uint group,
    uint index, uint threads, uint lane) {
  constexpr int GROUP = 4 * UNITS, RUNS = GROUP * RUNS_OF<4 * H, UNITS>;
  const int start = sizes[0], stop = sizes[1], T = sizes[2], B = sizes[3], mask_step = sizes[4];
  const int s = int(index) % GROUP, gate = s % 4, first_unit = int(index) / GROUP * UNITS, unit = first_unit + s / 4;
  const int place = place_of(CELL, gate) * H + unit, b0 = int(group) * ROWS;
  int rows_at[UNITS], length[ROWS];
  vec<S, 4> kept[UNITS * RESIDENT];
  for (int v = 0; v < UNITS; ++v) {
    rows_at[v] = first_unit + v;
    for (int run = 0; run < RESIDENT; ++run)
      kept[v * RESIDENT + run] = weight_run<S>(Wh_T, rows_at[v], H, 4 * (s + GROUP * run), 4 * H);
  }
  for (int n = int(index); n < 2 * ROWS * RUNS; n += int(threads)) state[n] = float4(0.0f);
  float p[4], dh_now[ROWS], dc_now[ROWS], c_now[ROWS], mask_now[ROWS];
  for (int n = 0; n < 4; ++n) p[n] = unit < H ? value_at(peephole, place_of(CELL, n) * H + unit, 0.0f) : 0.0f;
  for (int r = 0; r < ROWS; ++r) {
    const long at = long(b0 + r) * H + unit, t = REVERSE ? T - stop : stop - 1;
    const bool real = b0 + r < B && unit < H;
    length[r] = b0 + r < B ? value_at(lengths, b0 + r, T) : 0;
    dh_now[r] = real ? value_at(dhT, at, 0.0f) : 0.0f;
    dc_now[r] = real ? value_at(dcT, at, 0.0f) : 0.0f;
    c_now[r] = real ? c[t * B * H + at] : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = stop - 1; n >= start; --n) {
    const int t = REVERSE ? T - 1 - n : n, local = t - (REVERSE ? T - stop : start);
    threadgroup float4* current = state + (n & 1) * ROWS * RUNS;
    for (int r = 0; r < ROWS; ++r) {
      const bool real = b0 + r < B && unit < H, live = t < length[r];
      const long item = long(b0 + r) * H + unit, at = long(t) * B * H + item;
      const long gate_at = 4 * long(b0 + r) * H + place, sequence_at = 4 * long(t) * B * H + gate_at;
      float read = 0.0f, q[4], outside[4], dy[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (real && gate == 0) {
        const bool starts = REVERSE ? t + 1 == length[r] : t == 0;
        const long before = long(REVERSE ? t + 1 : t - 1) * B * H + item;
        read = starts ? value_at(c0, item, 0.0f) : n > 0 ? float(c[before]) : 0.0f;
      }
      if (real && gate == 1) read = value_at(dh, at, 0.0f);
      if (real && gate == 2) read = value_at(dc, at, 0.0f);
      if (real && gate == 3) read = value_at(mask, long(t) * mask_step + item, 1.0f);
      share_in_quad(read, int(lane), outside);
      share_in_quad(real ? float(gates[sequence_at]) : 0.0f, int(lane), q);
      if (is_present(dgates)) share_in_quad(real ? value_at(dgates, sequence_at, 0.0f) : 0.0f, int(lane), dy);
      float dc_prev = dc_now[r] + outside[2];
      lstm_cell_backward<CELL>(q, p, outside[0], c_now[r], dh_now[r] + outside[1], dc_prev, dy);
      const S mine = S(!live ? 0.0f : gate == 0 ? dy[0] : gate == 1 ? dy[1] : gate == 2 ? dy[2] : dy[3]);
      dc_now[r] = live ? dc_prev : dc_now[r];
      c_now[r] = outside[0];
      mask_now[r] = outside[3];
      if (!real) continue;
      dz[4 * long(local) * B * H + gate_at] = mine;
      ((threadgroup float*)current)[r * 4 * RUNS + place] = float(mine);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = 0; r < ROWS; ++r) {
      const float sum =
          product_of_group<UNITS, UNITS, RESIDENT, 4 * H, S>(kept, Wh_T, rows_at, H, current + r * RUNS, s);
      dh_now[r] = t < length[r] ? sum * mask_now[r] : dh_now[r];
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    if (b0 + r >= B || unit >= H) continue;
    if (gate == 0) dh0[long(b0 + r) * H + unit] = S(dh_now[r]);
    if (gate == 1) dc0[long(b0 + r) * H + unit] = dc_now[r];
  }
}
