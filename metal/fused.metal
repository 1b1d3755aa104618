// A recurrence over a whole sequence in one launch. A threadgroup owns ROWS batch items of one direction, which no
// other one needs, and walks all their steps.
//
// With D directions and G gates, in blocks of the cell's gate order:
//   z, gates, dz  [T, B, D G H]     h  [T, B, D H]        h0, hT  [B, D H]     lengths  [B]
//   mask          [T or 1, B, D H]  c  [T, B, D H] float  c0, cT  [B, D H]     extra  peephole [D, 4H] or bhn [D H]
//   keeps         [T, B, D]
//   packed        [D, simdgroups, COUNT, 32 lanes, 4]: Wh [D, G H, H] as fused_pack.metal lays it out
//   sizes         start, stop: the steps of this launch, counted in the order of processing; T, B, D;
//                 whether the only direction is the reverse one; whether every step has a mask of its own
// The outputs with a time axis hold the launch's own steps only.
//
// GROUP = LANES UNITS adjacent lanes share UNITS hidden units, LANES lanes each; lane s is lane s % LANES of unit
// s / LANES. The lanes split every row of weights their group needs into runs of 4: lane s has runs s, s + GROUP, ... A
// step sums a row's parts over the group. LANES, G (GATES), the PRODUCTS of a unit and what a lane does with a step are
// in fused_cell_*.metal.
//
// A lane's weights are COUNT vectors of 4, in the order in which it needs them. The first RESIDENT stay in registers,
// the others are read at every step. Units and runs past the end are padding: their weights are 0, nothing of them is
// stored. Past the last batch item the last one is computed again, which writes the same numbers to the same places.
//
// Index is the unsigned integer that counts elements of a launch's arrays: of 32 bits, where that is enough.

template <int LENGTH, int GROUP>
constant constexpr int RUNS_OF = (LENGTH + 4 * GROUP - 1) / (4 * GROUP);

// What a lane has of SLOTS rows of that length, in COUNT vectors V: of every row SPAN neighbours at a time, RUNS runs in
// all. fused_packed.metal says it of packed weights.
template <class V, int LENGTH, int GROUP, int SLOTS>
struct LaneShare {
  enum { SPAN = 4, RUNS = RUNS_OF<LENGTH, GROUP>, COUNT = RUNS * SLOTS };
};

// Where number n of a row that lanes share in spans stands in threadgroup memory: lane after lane a run of each.
template <int SPAN, int GROUP>
int place_in_row(int n) { return SPAN == 4 ? n : (n % SPAN / 4 * GROUP + n / SPAN) * 4 + n % 4; }

// A launch's way through a sequence, in one direction; `sizes`, and the direction.
struct Sweep {
  int start, stop, T, B, D, direction;
  bool reverse, masks_differ;
};

inline void read_sizes(const constant int* sizes, uint direction, thread Sweep& sweep) {
  sweep.start = sizes[0], sweep.stop = sizes[1], sweep.T = sizes[2], sweep.B = sizes[3], sweep.D = sizes[4];
  sweep.direction = int(direction), sweep.reverse = direction == 1 || sizes[5] != 0;
  sweep.masks_differ = sizes[6] != 0;
}

// The time index of step n, and that of the launch's first time index.
inline int time_of(thread const Sweep& sweep, int n) { return sweep.reverse ? sweep.T - 1 - n : n; }
inline int first_time(thread const Sweep& sweep) { return sweep.reverse ? sweep.T - sweep.stop : sweep.start; }

// Where H-block `block` of `blocks`, `unit` of it, stands in [B, D blocks H] and what lies between two time indices.
inline long place_in(thread const Sweep& sweep, int b, int blocks, int block, int H, int unit) {
  return ((long(b) * sweep.D + sweep.direction) * blocks + block) * H + unit;
}
inline long time_step(thread const Sweep& sweep, int blocks, int H) { return long(sweep.B) * sweep.D * blocks * H; }

// Where the numbers of a unit of a batch item stand at a step, or how far they are from those of the step before: in
// arrays of the launch's own steps, `state` [., B, D H] and `gate` [., B, D G H]; in `mask`; in `keeps`; in `apart`
// [D, T, B, H].
template <class Index>
struct Place {
  Index state, gate, mask, keep, apart;
};

// That of the launch's first step, or of its last one BACK.
template <bool BACK, class Index>
void first_place(
    thread const Sweep& sweep, int b, int blocks, int block, int H, int unit, thread Place<Index>& place) {
  const long row = sweep.reverse != BACK ? sweep.stop - 1 - sweep.start : 0, t = first_time(sweep) + row;
  const long step = time_step(sweep, 1, H), item = place_in(sweep, b, 1, 0, H, unit);
  place.state = Index(row * step + item);
  place.gate = Index(row * blocks * step + place_in(sweep, b, blocks, block, H, unit));
  place.mask = Index((sweep.masks_differ ? t * step : 0) + item);
  place.keep = Index((t * sweep.B + b) * sweep.D + sweep.direction);
  place.apart = Index(((sweep.direction * sweep.T + t) * sweep.B + b) * H + unit);
}

template <bool BACK, class Index>
void between_steps(thread const Sweep& sweep, int blocks, int H, thread Place<Index>& step) {
  const long sign = sweep.reverse != BACK ? -1 : 1, states = sign * time_step(sweep, 1, H);
  step.state = Index(states), step.gate = Index(blocks * states);
  step.mask = Index(sweep.masks_differ ? states : 0), step.apart = Index(sign * sweep.B * H);
  step.keep = Index(sign * sweep.B * sweep.D);
}

template <class Index>
void advance(thread Place<Index>& place, thread const Place<Index>& step) {
  place.state += step.state, place.gate += step.gate, place.mask += step.mask, place.apart += step.apart;
  place.keep += step.keep;
}

// Whether an item of this length has not ended at time index t.
template <class L> bool is_live(L lengths, int t, int length) { return !is_present(lengths) || t < length; }

// The vectors of weights of lane `index` of a threadgroup of `threads`.
template <int COUNT, class V, class W>
const device V* vectors_of_lane(W packed, int direction, uint index, uint threads) {
  const uint simdgroup = direction * threads / 32 + index / 32;
  return (const device V*)packed + simdgroup * (32 * COUNT) + index % 32;
}

// The first of them, which stay in registers.
template <int RESIDENT, class V, int SIZE>
void keep(const device V* read, thread V (&kept)[SIZE]) {
#pragma clang loop unroll(full)
  for (int n = 0; n < RESIDENT; ++n) kept[n] = read[32 * n];
}

// Number n of a vector in threadgroup memory that begins at `row`.
inline threadgroup float& number_at(threadgroup float4* vectors, int row, int n) {
  return ((threadgroup float*)(vectors + row))[n];
}

template <class V>
void fill_with_zeros(threadgroup V* vectors, int count, uint index, uint threads) {
  for (int n = int(index); n < count; n += int(threads)) vectors[n] = V(0.0f);
}

// 0, but no compiler knows: what is read at an address of which this is a part is read at every step, and not kept for
// all of them, for which there are no registers.
inline int unknown_zero(thread const Sweep& sweep) { return sweep.B >> 31; }

// A GRU's, in cell_gru_*.metal; no other cell calls them.
template <int CELL> float gru_reset(float a);
template <int CELL> float gru_reset_backward(float r, float dr);

// Whether one squash can compute all of the first `gates` gates, each in its own lane; and which of them is a tanh, in
// comparisons with numbers, which cost less than looking it up.
template <int CELL, int GATE>
constant constexpr bool SQUASHED = activation_of(CELL, GATE) == TANH || activation_of(CELL, GATE) == SIGMOID;
template <int CELL, int GATES>
constant constexpr bool SQUASHES = SQUASHED<CELL, 0> && (GATES < 2 || SQUASHED<CELL, 1>) &&
                                   (GATES < 3 || SQUASHED<CELL, 2>) && (GATES < 4 || SQUASHED<CELL, 3>);
template <int CELL, int GATES>
bool is_tanh(int gate) {
  bool found = false;
#pragma clang loop unroll(full)
  for (int n = 0; n < GATES; ++n) found = found || (activation_of(CELL, n) == TANH && gate == n);
  return found;
}

// The activation of a gate of the first GATES, which is the lane's own.
template <int CELL, int GATES>
float activate_own(int gate, float x) {
  if constexpr (SQUASHES<CELL, GATES>) return squash(is_tanh<CELL, GATES>(gate), x);
  else return activate(activation_of(CELL, gate), x);
}

// The slope of a gate of the first GATES, which is the lane's own.
template <int CELL, int GATES>
float slope_own(int gate, float y) {
  if constexpr (SQUASHES<CELL, GATES>) return (1.0f - y) * (y + (is_tanh<CELL, GATES>(gate) ? 1.0f : 0.0f));
  else return slope(activation_of(CELL, gate), y);
}

// Adds to sums[row][slot] a lane's share of the product of SLOTS rows of weights with vectors in threadgroup memory, in
// which batch items lie STRIDE apart. It has one vector of weights per run and slot, from number FROM on; slot v counts
// where bit v % PER of WANTED is set.
template <int ROWS, int SLOTS, int RUNS, int GROUP, int FROM, int PER, int WANTED, int RESIDENT, int STRIDE, class V>
void add_product(
    thread float (&sums)[ROWS][SLOTS], thread const V* kept, const device V* read, threadgroup const float4* x) {
#pragma clang loop unroll(full)
  for (int run = 0; run < RUNS; ++run) {
    float4 operands[ROWS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) operands[r] = x[r * STRIDE + GROUP * run];
#pragma clang loop unroll(full)
    for (int v = 0; v < SLOTS; ++v) {
      if (!((WANTED >> (v % PER)) & 1)) continue;
      const int n = FROM + run * SLOTS + v;
      float4 weights;
      if (n < RESIDENT) weights = float4(kept[n]);
      else weights = float4(read[32 * n]);
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) {
        sums[r][v] += weights[0] * operands[r][0];
        sums[r][v] += weights[1] * operands[r][1];
        sums[r][v] += weights[2] * operands[r][2];
        sums[r][v] += weights[3] * operands[r][3];
      }
    }
  }
}

// Adds up a group's numbers for UNITS units of N lanes, PER of each: a lane gets those of its own unit, summed over the
// lanes that have its place within theirs. Number n of a lane belongs to unit n / PER ^ (the lane's own), so what one
// lane gives and another takes has the same place in all of them.
template <int UNITS, int PER, int WANTED, int N>
void sum_over_units(thread float (&values)[UNITS * PER]) {
#pragma clang loop unroll(full)
  for (int kept = UNITS / 2; kept >= 1; kept /= 2)
#pragma clang loop unroll(full)
    for (int n = 0; n < kept * PER; ++n)
      if ((WANTED >> (n % PER)) & 1) values[n] += simd_shuffle_xor(values[n + kept * PER], ushort(kept * N));
}

// The sum of a number over the N lanes of a unit, in all of them.
template <int N>
float sum_over_lanes(float value) {
#pragma clang loop unroll(full)
  for (int distance = N / 2; distance >= 1; distance /= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}

// What lane n of a unit holds.
template <int N>
float of_lane(float mine, int n) { return N > 1 ? quad_broadcast(mine, ushort(n)) : mine; }
