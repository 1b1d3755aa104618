// A recurrence over a whole sequence in one launch. A threadgroup owns ROWS batch items of one direction, which no
// other one needs, and walks all their steps; the recurrent weights stay in registers as far as they fit.
//
// With D directions and G gates, in blocks of the cell's gate order:
//   z, gates, dz  [T, B, D G H]     h  [T, B, D H]        h0, hT  [B, D H]     Wh  [D, G H, H]     lengths  [B]
//   mask          [T or 1, B, D H]  c  [T, B, D H] float  c0, cT  [B, D H]     extra  peephole [D, 4H] or bhn [D H]
//   sizes         start, stop: the steps of this launch, counted in the order of processing; T, B, D;
//                 whether the only direction is the reverse one; whether every step has a mask of its own
// The outputs with a time axis hold the launch's own steps only.
//
// GROUP = LANES UNITS adjacent lanes share UNITS hidden units, LANES lanes each; lane s is lane s % LANES of unit
// s / LANES. The lanes split every row of weights their group needs into runs of 4: lane s has runs s, s + GROUP, ... A
// step sums a row's parts over the group. Units and runs past the end are padding: their weights are 0 and nothing of
// them is stored. LANES, G (GATES) and what a lane does with a step are in *_fused_cell.metal.

template <int LENGTH, int GROUP>
constant constexpr int RUNS_OF = (LENGTH + 4 * GROUP - 1) / (4 * GROUP);

// A launch's way through a sequence, in one direction; `sizes`, and the direction.
struct Sweep {
  int start, stop, T, B, D, direction;
  bool reverse;
  long mask_step;
};

inline void read_sizes(const constant int* sizes, uint direction, int H, thread Sweep& sweep) {
  sweep.start = sizes[0], sweep.stop = sizes[1], sweep.T = sizes[2], sweep.B = sizes[3], sweep.D = sizes[4];
  sweep.direction = int(direction), sweep.reverse = direction == 1 || sizes[5] != 0;
  sweep.mask_step = sizes[6] ? long(sweep.B) * sweep.D * H : 0;
}

// The time index of step n, and that of the launch's first time index.
inline int time_of(thread const Sweep& sweep, int n) { return sweep.reverse ? sweep.T - 1 - n : n; }
inline int first_time(thread const Sweep& sweep) { return sweep.reverse ? sweep.T - sweep.stop : sweep.start; }

// Where H-block `block` of `blocks`, `unit` of it, stands in [B, D blocks H] and what lies between two time indices.
inline long place_in(thread const Sweep& sweep, int b, int blocks, int block, int H, int unit) {
  return ((long(b) * sweep.D + sweep.direction) * blocks + block) * H + unit;
}
inline long time_step(thread const Sweep& sweep, int blocks, int H) { return long(sweep.B) * sweep.D * blocks * H; }

inline bool is_present(Absent) { return false; }
template <class A>
bool is_present(A) { return true; }

// The row of [blocks H, .] that is `unit` of H-block `block`; past the end for padding, or where there is no block.
inline int weight_row(int block, int unit, int blocks, int H) {
  return block < 0 || unit >= H ? blocks * H : block * H + unit;
}

// Four weights from row `row` of [rows, length], 0 where there are none.
template <class S, class W>
vec<S, 4> weight_run(W weights, int row, int rows, int k, int length) {
  vec<S, 4> run = vec<S, 4>(S(0.0f));
#pragma clang loop unroll(full)
  for (int n = 0; n < 4; ++n)
    if (row < rows && k + n < length) run[n] = S(weights[long(row) * length + k + n]);
  return run;
}

// A GRU's, in cell_gru_*.metal; no other cell calls them.
template <int CELL> float gru_reset(float a);
template <int CELL> float gru_reset_backward(float r, float dr);

// What a lane reads of step n, the others 0: number k of the state before it, dh, beside, the mask is lane k's. A lane
// that is the only one of its unit reads all. beside is [T, B, D H], or [D, T, B, H] where the directions lie APART.
template <int N, bool APART, class Way, class X, class X0, class D, class Q, class M>
void read_step(
    thread const Way& sweep, int n, int lane, int b, int H, int unit, int length, X states, X0 first, D dh, Q beside,
    M mask, thread float (&read)[4]) {
  const int t = time_of(sweep, n);
  const bool starts = sweep.reverse ? t + 1 == length : t == 0;
  const long step = time_step(sweep, 1, H), item = place_in(sweep, b, 1, 0, H, unit), at = t * step + item;
  const long before = time_of(sweep, n - 1) * step + item;
  const long apart = ((long(sweep.direction) * sweep.T + t) * sweep.B + b) * H + unit;
  if (N == 1 || lane == 0) read[0] = starts ? value_at(first, item, 0.0f) : n > 0 ? float(states[before]) : 0.0f;
  if (N == 1 || lane == 1) read[1] = value_at(dh, at, 0.0f);
  if (N == 1 || lane == 2) read[2] = value_at(beside, APART ? apart : at, 0.0f);
  if (N == 1 || lane == 3) read[3] = value_at(mask, t * sweep.mask_step + item, 1.0f);
}

// The first COUNT runs of ROWS rows of weights that a lane has, [ROWS][COUNT].
template <int ROWS, int COUNT, int GROUP, class S, class W, class V>
void keep_runs(
    W weights, thread const int (&rows_at)[ROWS], int rows, int length, int s, thread V (&kept)[ROWS * COUNT]) {
#pragma clang loop unroll(full)
  for (int v = 0; v < ROWS; ++v)
#pragma clang loop unroll(full)
    for (int run = 0; run < COUNT; ++run)
      kept[v * COUNT + run] = weight_run<S>(weights, rows_at[v], rows, 4 * (s + GROUP * run), length);
}

// What the lanes of a unit hold: values[n] is `mine` of its lane n.
template <int N>
void share(float mine, int lane, thread float (&values)[N]) {
  for (int n = 0; n < N; ++n) values[n] = N > 1 ? simd_shuffle(mine, ushort(lane / N * N + n)) : mine;
}

// array[index] for all lanes of a unit, read by its lane 0 where `real`, else 0.
template <int N, class A>
float read_once(A array, long index, bool real, int lane) {
  float values[N];
  share(real && lane % N == 0 ? float(array[index]) : 0.0f, lane, values);
  return values[0];
}

// values[n] is mine[n] of a unit's lane n, where a unit has N = 4 lanes; with one lane it is its own.
template <int N>
void share_each(thread const float (&mine)[4], int lane, thread float (&values)[4]) {
  for (int n = 0; n < 4; ++n) values[n] = N > 1 ? simd_shuffle(mine[n], ushort(lane / N * N + n)) : mine[n];
}

// values[n], without a loop over registers.
template <int N>
float pick(thread const float (&values)[N], int n) {
  float picked = values[0];
  for (int k = 1; k < N; ++k) picked = n == k ? values[k] : picked;
  return picked;
}

// The sums over the lanes of a group of their VALUES numbers: lane s gets that of number s VALUES / GROUP.
template <int GROUP, int VALUES>
float sum_over_group(thread float (&values)[VALUES], int s) {
  int distance = GROUP / 2;
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
  for (int rest = GROUP / 2 / VALUES; rest >= 1; rest /= 2) values[0] += simd_shuffle_xor(values[0], ushort(rest));
  return values[0];
}

// One lane's share of the product of a group's VALUES rows of weights with a vector in threadgroup memory, summed over
// the group: lane s gets row s VALUES / GROUP. Row v counts where bit v % N of WANTED is set, else its product is 0.
// The first RESIDENT runs are in `kept`, the others are read again.
template <int GROUP, int N, int VALUES, int WANTED, int RESIDENT, int LENGTH, class S, class W>
float product_of_group(
    thread const vec<S, 4>* kept, W weights, thread const int* rows_at, int rows,
    threadgroup const float4* x, int s) {
  float parts[VALUES];
  for (int v = 0; v < VALUES; ++v) parts[v] = 0.0f;
#pragma clang loop unroll(full)
  for (int run = 0; run < RUNS_OF<LENGTH, GROUP>; ++run) {
    const int k = s + GROUP * run;
    const float4 operand = x[k];
#pragma clang loop unroll(full)
    for (int v = 0; v < VALUES; ++v) {
      if (!((WANTED >> (v % N)) & 1)) continue;
      if (run < RESIDENT)
        parts[v] += dot(float4(kept[v * RESIDENT + min(run, RESIDENT - 1)]), operand);
      else
        parts[v] += dot(float4(weight_run<S>(weights, rows_at[v], rows, 4 * k, LENGTH)), operand);
    }
  }
  return sum_over_group<GROUP, VALUES>(parts, s);
}
