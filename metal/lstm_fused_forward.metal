// The LSTM over a whole sequence, forward; lstm_fused.metal has the arrays and the arrangement of the threads.
//
//   a_t = z_t + (mask_t * h_prev) Wh^T;   gates, c, h = cell(a_t, c_prev)
//
// Lane s of a group computes gate s % 4 of its unit. The masked h of the step before stands in `state`,
// [2][ROWS][padded H], the two halves by turns. Wh [4H, H].
template <int CELL, int H, int UNITS, int ROWS, int RESIDENT, bool REVERSE, class S, class Z, class H0, class C0,
    class W, class P, class M, class L>
void lstm_fused_forward(
    Z z, H0 h0, C0 c0, W Wh, P peephole, M mask, L lengths, const constant int* sizes, const constant float* numbers,
    device S* h, device float* c, device S* gates, device S* hT, device float* cT, threadgroup float4* state,
    uint group, uint index, uint threads, uint lane) {
  constexpr int GROUP = 4 * UNITS, RUNS = GROUP * RUNS_OF<H, UNITS>;
  const int start = sizes[0], stop = sizes[1], T = sizes[2], B = sizes[3], mask_step = sizes[4];
  const float forget_bias = numbers[0], limit = numbers[1];
  const int s = int(index) % GROUP, gate = s % 4, first_unit = int(index) / GROUP * UNITS, unit = first_unit + s / 4;
  const int place = place_of(CELL, gate) * H + unit, b0 = int(group) * ROWS;
  int rows_at[GROUP], length[ROWS];
  vec<S, 4> kept[GROUP * RESIDENT];
  for (int v = 0; v < GROUP; ++v) {
    const bool padding = first_unit + v / 4 >= H;
    rows_at[v] = padding ? 4 * H : place_of(CELL, v % 4) * H + first_unit + v / 4;
    for (int run = 0; run < RESIDENT; ++run)
      kept[v * RESIDENT + run] = weight_run<S>(Wh, rows_at[v], 4 * H, 4 * (s + GROUP * run), H);
  }
  for (int n = int(index); n < 2 * ROWS * RUNS; n += int(threads)) state[n] = float4(0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float p = unit < H ? value_at(peephole, place, 0.0f) : 0.0f;
  float h_now[ROWS], c_now[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    const long at = long(b0 + r) * H + unit;
    const bool real = b0 + r < B && unit < H;
    length[r] = b0 + r < B ? value_at(lengths, b0 + r, T) : 0;
    h_now[r] = real ? value_at(h0, at, 0.0f) : 0.0f;
    c_now[r] = real ? value_at(c0, at, 0.0f) : 0.0f;
    if (real && gate == 0) {
      const long step = REVERSE ? T - 1 - start : start;
      ((threadgroup float*)state)[((start & 1) * ROWS + r) * 4 * RUNS + unit] =
          h_now[r] * value_at(mask, step * mask_step + at, 1.0f);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = start; n < stop; ++n) {
    const int t = REVERSE ? T - 1 - n : n, local = t - (REVERSE ? T - stop : start);
    threadgroup const float4* before = state + (n & 1) * ROWS * RUNS;
    threadgroup float* after = (threadgroup float*)(state + (~n & 1) * ROWS * RUNS);
    for (int r = 0; r < ROWS; ++r) {
      const bool real = b0 + r < B && unit < H;
      const long item = long(b0 + r) * H + unit, at = long(local) * B * H + item;
      const long gate_at = 4 * long(b0 + r) * H + place;
      float a = real ? float(z[4 * long(t) * B * H + gate_at]) : 0.0f, q[4];
      a += product_of_group<UNITS, GROUP, RESIDENT, H, S>(kept, Wh, rows_at, 4 * H, before + r * RUNS, s);
      float y = lstm_gate<CELL>(gate, a, p, c_now[r], forget_bias);
      share_in_quad(y, int(lane), q);
      const float state_now = lstm_state<CELL>(q[GATE_I], q[GATE_F], q[GATE_G], c_now[r], limit);
      if constexpr (PEEPHOLE<CELL> == O_SEES_CURRENT) {
        if (gate == GATE_O) y = lstm_gate<CELL>(GATE_O, a, p, state_now, forget_bias);
        share_in_quad(y, int(lane), q);
      }
      const bool live = t < length[r];
      const S m = S(q[GATE_O] * activate(activation_of(CELL, OUTPUT), state_now));
      h_now[r] = live ? float(m) : h_now[r];
      c_now[r] = live ? state_now : c_now[r];
      if (!real) continue;
      gates[4 * long(local) * B * H + gate_at] = live ? S(y) : S(0.0f);
      if (gate == 1) c[at] = live ? state_now : 0.0f;
      if (gate != 0) continue;
      h[at] = live ? m : S(0.0f);
      if (n + 1 < stop) {
        const long next = (REVERSE ? t - 1 : t + 1) * long(mask_step) + item;
        after[r * 4 * RUNS + unit] = h_now[r] * value_at(mask, next, 1.0f);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int r = 0; r < ROWS; ++r) {
    if (b0 + r >= B || unit >= H) continue;
    if (gate == 0) hT[long(b0 + r) * H + unit] = S(h_now[r]);
    if (gate == 1) cT[long(b0 + r) * H + unit] = c_now[r];
  }
}
