// The LSTM over a whole sequence in one launch. A threadgroup owns ROWS batch items, which no other one needs, and
// walks all their steps; the recurrent weights stay in registers as far as they fit. One barrier per step.
//
//   z, gates, dz  [T, B, 4H]   blocks in the cell's gate order     peephole  [4H]     lengths  [B]
//   h             [T, B, H]    c  [T, B, H] float                  h0, hT  [B, H]     c0, cT  [B, H]
//   mask          [T or 1, B, H]; mask_step is B H or 0
//   sizes         start, stop: the steps of this launch, counted in the order of processing; T, B, mask_step
// The outputs with a time axis hold the launch's own steps only.
//
// GROUP = 4 UNITS adjacent lanes share UNITS hidden units; lane s is gate s % 4 of unit s / 4. The lanes split every
// row of weights their group needs into runs of 4: lane s has runs s, s + GROUP, ... A step sums a row's parts over the
// group. Units and runs past the end are padding: their weights are 0 and nothing of them is stored.

template <int LENGTH, int UNITS>
constant constexpr int RUNS_OF = (LENGTH + 16 * UNITS - 1) / (16 * UNITS);

inline bool is_present(Absent) { return false; }
template <class A>
bool is_present(A) { return true; }

// Four weights from row `row` of [rows, length], 0 where there are none.
template <class S, class W>
vec<S, 4> weight_run(W weights, int row, int rows, int k, int length) {
  vec<S, 4> run = vec<S, 4>(S(0.0f));
  for (int n = 0; n < 4; ++n)
    if (row < rows && k + n < length) run[n] = S(weights[long(row) * length + k + n]);
  return run;
}

// What the four lanes of a quad hold, in the order of the lanes.
inline void share_in_quad(float mine, int lane, thread float (&values)[4]) {
  for (int n = 0; n < 4; ++n) values[n] = simd_shuffle(mine, ushort((lane & ~3) + n));
}

// The sums over the lanes of a group of their VALUES numbers: lane s gets that of number s VALUES / (4 UNITS).
template <int UNITS, int VALUES>
float sum_over_group(thread float (&values)[VALUES], int s) {
  int distance = 2 * UNITS;
#pragma clang loop unroll(full)
  for (int kept = VALUES / 2; kept >= 1; kept /= 2) {
    const bool upper = (s & distance) != 0;
#pragma clang loop unroll(full)
    for (int n = 0; n < kept; ++n) {
      const float mine = upper ? values[n + kept] : values[n];
      const float given = upper ? values[n] : values[n + kept];
      values[n] = mine + simd_shuffle_xor(given, ushort(distance));
    }
    distance /= 2;
  }
#pragma clang loop unroll(full)
  for (int rest = 2 * UNITS / VALUES; rest >= 1; rest /= 2) values[0] += simd_shuffle_xor(values[0], ushort(rest));
  return values[0];
}

// One lane's share of the product of a group's VALUES rows of weights with a vector in threadgroup memory, summed over
// the group: lane s gets row s VALUES / (4 UNITS). The first RESIDENT runs are in `kept`, the others are read again.
template <int UNITS, int VALUES, int RESIDENT, int LENGTH, class S, class W>
float product_of_group(
    thread const vec<S, 4>* kept, W weights, thread const int* rows_at, int rows,
    threadgroup const float4* x, int s) {
  float parts[VALUES];
  for (int v = 0; v < VALUES; ++v) parts[v] = 0.0f;
#pragma clang loop unroll(full)
  for (int run = 0; run < RUNS_OF<LENGTH, UNITS>; ++run) {
    const int k = s + 4 * UNITS * run;
    const float4 operand = x[k];
#pragma clang loop unroll(full)
    for (int v = 0; v < VALUES; ++v) {
      if (run < RESIDENT)
        parts[v] += dot(float4(kept[v * RESIDENT + min(run, RESIDENT - 1)]), operand);
      else
        parts[v] += dot(float4(weight_run<S>(weights, rows_at[v], rows, 4 * k, LENGTH)), operand);
    }
  }
  return sum_over_group<UNITS, VALUES>(parts, s);
}
