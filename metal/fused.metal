// What the kernels that run a whole sequence in one launch share: the loop over time, positions in arrays, weights in
// registers.
//
// A threadgroup owns ROWS batch items of one direction and runs all their steps. No other threadgroup needs these
// items. Shapes, with D directions and G gates; the blocks of H on a gate axis have the cell's gate order:
//   z, gates, dz  [T, B, D G H]     h  [T, B, D H]        h0, hT  [B, D H]     lengths   [B]
//   mask          [T or 1, B, D H]  c  [T, B, D H] float  c0, cT  [B, D H]     peephole  [D, 4H]     bhn  [D H]
//   keep          [T, B, D]
//   arranged      [D, simdgroups, COUNT, 32 lanes, 4]: the weights Wh [D, G H, H] in the order in which lanes read
//                 them, written by fused_arrange.metal
//   sizes         start, stop: the steps of this launch, counted in the order of processing; T, B, D;
//                 whether the only direction is the reverse one; whether every step has a mask of its own
// `mask` already includes `keep`. Outputs with a time axis contain only the steps of this launch.
//
// A lane's weights are COUNT vectors of 4, in the order in which the lane needs them. The first RESIDENT vectors stay
// in registers for all steps; the others are read again at every step. Units and numbers past the end are padding:
// their weights are 0 and their results are not stored. In the kernels with the product in lanes, the rows past the
// last batch item repeat this item; both copies write the same results.
//
// Index is the unsigned integer type that counts the elements of a launch's arrays: 32 bits if that is enough, else 64.

// The part of a sequence that one launch processes in one direction. The fields are the values of `sizes`, and the
// direction.
struct Sweep {
  int start, stop, T, B, D, direction;
  bool reverse, masks_differ;
};

inline void read_sizes(const constant int* sizes, uint direction, thread Sweep& sweep) {
  sweep.start = sizes[0], sweep.stop = sizes[1], sweep.T = sizes[2], sweep.B = sizes[3], sweep.D = sizes[4];
  sweep.direction = int(direction), sweep.reverse = direction == 1 || sizes[5] != 0;
  sweep.masks_differ = sizes[6] != 0;
}

// time_of returns the time index of step n; first_time returns the smallest time index of the launch.
inline int time_of(thread const Sweep& sweep, int n) { return sweep.reverse ? sweep.T - 1 - n : n; }
inline int first_time(thread const Sweep& sweep) { return sweep.reverse ? sweep.T - sweep.stop : sweep.start; }

// place_in returns the position of `unit` in H-block `block` of batch item b, in an array [B, D blocks H]. time_step
// returns the distance between neighbouring time indices in an array [T, B, D blocks H].
inline long place_in(thread const Sweep& sweep, int b, int blocks, int block, int H, int unit) {
  return ((long(b) * sweep.D + sweep.direction) * blocks + block) * H + unit;
}
inline long time_step(thread const Sweep& sweep, int blocks, int H) { return long(sweep.B) * sweep.D * blocks * H; }

// Positions of one unit of one batch item in several arrays, at one step. Another object of this type says how far the
// positions move from step to step. `state` ([., B, D H]) and `gate` ([., B, D G H]) are for arrays that contain only
// the launch's own steps; `mask`, `keep` and `q` ([D, T, B, H]) are for arrays with all T steps.
template <class Index>
struct Place {
  Index state, gate, mask, keep, q;
};

// Compute the positions of the launch's first step or, if BACK, of its last step, where the backward pass begins.
template <bool BACK, class Index>
void first_place(
    thread const Sweep& sweep, int b, int blocks, int block, int H, int unit, thread Place<Index>& place) {
  const long row = sweep.reverse != BACK ? sweep.stop - 1 - sweep.start : 0, t = first_time(sweep) + row;
  const long step = time_step(sweep, 1, H), item = place_in(sweep, b, 1, 0, H, unit);
  place.state = Index(row * step + item);
  place.gate = Index(row * blocks * step + place_in(sweep, b, blocks, block, H, unit));
  place.mask = Index((sweep.masks_differ ? t * step : 0) + item);
  place.keep = Index((t * sweep.B + b) * sweep.D + sweep.direction);
  place.q = Index(((sweep.direction * sweep.T + t) * sweep.B + b) * H + unit);
}

// Compute the distances from one processed step to the next. Index is unsigned, so a negative distance wraps around;
// adding it wraps around again and gives the correct position.
template <bool BACK, class Index>
void between_steps(thread const Sweep& sweep, int blocks, int H, thread Place<Index>& step) {
  const long sign = sweep.reverse != BACK ? -1 : 1, states = sign * time_step(sweep, 1, H);
  step.state = Index(states), step.gate = Index(blocks * states);
  step.mask = Index(sweep.masks_differ ? states : 0), step.q = Index(sign * sweep.B * H);
  step.keep = Index(sign * sweep.B * sweep.D);
}

template <class Index>
void advance(thread Place<Index>& place, thread const Place<Index>& step) {
  place.state += step.state, place.gate += step.gate, place.mask += step.mask, place.q += step.q;
  place.keep += step.keep;
}

// Return whether an item of this length has not ended at time index t.
template <class L> bool is_live(L lengths, int t, int length) { return !is_present(lengths) || t < length; }

// Return a pointer to the first weight vector of lane `index` of a threadgroup of `threads`. The vectors of one lane
// lie 32 apart, because the 32 lanes of a simdgroup read theirs side by side.
template <int COUNT, class V, class W>
const device V* vectors_of_lane(W arranged, int direction, uint index, uint threads) {
  const uint simdgroup = direction * threads / 32 + index / 32;
  return (const device V*)arranged + simdgroup * (32 * COUNT) + index % 32;
}

// Load the first RESIDENT weight vectors into registers, where they stay for all steps.
template <int RESIDENT, class V, int SIZE>
void load_resident(const device V* streamed, thread V (&resident)[SIZE]) {
#pragma clang loop unroll(full)
  for (int n = 0; n < RESIDENT; ++n) resident[n] = streamed[32 * n];
}

// Return 0 (B is never negative) in a way that the compiler cannot predict. The kernels add this 0 to the weight
// pointer after each step, so that weights that are not in registers are read again at each step. Otherwise the
// compiler would move these loads out of the loop over time and spill the registers.
inline int opaque_zero(thread const Sweep& sweep) { return sweep.B >> 31; }

// Return a reference to float number n of the threadgroup memory, counted from vector number `row`.
inline threadgroup float& number_at(threadgroup float4* vectors, int row, int n) {
  return ((threadgroup float*)(vectors + row))[n];
}

template <class V>
void fill_with_zeros(threadgroup V* vectors, int count, uint index, uint threads) {
  for (int n = int(index); n < count; n += int(threads)) vectors[n] = V(0.0f);
}

// N lanes share a unit. Return the value that `mine` has in lane n of them.
template <int N>
float of_lane(float mine, int n) { return N > 1 ? quad_broadcast(mine, ushort(n)) : mine; }

// --- The backward pass of one unit of one batch item: its state, and the values it reads at each step besides the
// gates ---
//
// Arrays in addition to those listed at the top: the cotangents of the outputs (dh, dgates, dhT and, for an LSTM, dc,
// dcT), each in the shape of its output, and
//   states, states0  [T, B, D H] and [B, D H]: c after each step and before the first step; h if there is no c
//   q                [D, T, B, H]: the candidate's recurrent product of a GRU
// At each step a unit reads up to four numbers: the state before the step, dh, dc or q, and the mask. If four lanes
// share a unit, each lane reads one of the numbers and shares it with the others. If a lane has its unit alone, it
// reads all four.
//
// Fields of Item. at: the unit's positions. dh, dc: the gradients from later steps. now: the state after the step. y,
// d: the lane's gate and its gradient. past: the part of the gradient of h_prev that bypasses the product. mask: the
// factor on the product.
template <class Index>
struct Item {
  Place<Index> at;
  int length;
  float dh, dc, now, y, d, past, mask;
};

// Initialize dh and dc of a batch item with the cotangents of the final states. If b is past the last batch item, the
// length is 0, so that every step is past the item's end.
template <class Index, class Arrays>
void begin_item(
    thread const Sweep& sweep, thread const Arrays& a, int b, int gates, int block, int H, int unit, bool real,
    thread Item<Index>& item) {
  const long place = place_in(sweep, b, 1, 0, H, unit);
  first_place<true>(sweep, b, gates, block, H, unit, item.at);
  item.length = b < sweep.B ? value_at(a.lengths, b, sweep.T) : 0;
  item.dh = real ? value_at(a.dhT, place, 0.0f) : 0.0f;
  item.dc = real ? value_at(a.dcT, place, 0.0f) : 0.0f;
}

// Read the numbers of step n for ROWS items. If N lanes share a unit, lane k reads number k; if N is 1, the lane reads
// all four. earlier: the number of elements before the launch's first time index in an array [T, B, D H]. step: the
// distance between two time indices there.
template <int N, int ROWS, class Index, class Arrays>
void read_step(
    thread const Sweep& sweep, thread const Arrays& a, int n, int lane, thread const Item<Index>* items, Index earlier,
    Index step, thread float (*number)[N == 1 ? 4 : 1]) {
  constexpr int OWN = N == 1 ? 1 : 0;
  const int t = time_of(sweep, n);
  const Index before = earlier + (sweep.reverse ? step : -step);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) number[r][0] = 0.0f;
  // Lane 0 reads the state before this step. At steps after the first it is the state that the previous step stored.
  if (lane == 0 && n > 0)
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][0] = float(a.states[items[r].at.state + before]);
  // At a batch item's first step, the state before the step is states0. In reverse an item's first step is at its own
  // last time index, which depends on its length. So the first step is not n = 0 for every item.
  if (lane == 0 && (is_present(a.lengths) || (is_present(a.states0) && n == 0)))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r)
      if (is_present(a.lengths) && sweep.reverse ? t + 1 == items[r].length : n == 0)
        number[r][0] = value_at(a.states0, items[r].at.state - Index(t - first_time(sweep)) * step, 0.0f);
  if (is_present(a.dh) && lane == (N == 1 ? 0 : 1))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][OWN] = value_at(a.dh, items[r].at.state + earlier, 0.0f);
  if (is_present(a.dc) && lane == (N == 1 ? 0 : 2))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][2 * OWN] = value_at(a.dc, items[r].at.state + earlier, 0.0f);
  if (is_present(a.q) && lane == (N == 1 ? 0 : 2))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][2 * OWN] = value_at(a.q, items[r].at.q, 0.0f);
  if (is_present(a.mask) && lane == (N == 1 ? 0 : 3))
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][3 * OWN] = value_at(a.mask, items[r].at.mask, 1.0f);
}

// Share the numbers that read_step has read with all lanes of the unit. On return `before` is the state before the
// step, and `dc_or_q` is dc or q. A number whose array is absent is 0; an absent mask is 1.
template <int N, class Index, class Arrays>
void share_step(
    thread const float (&number)[N == 1 ? 4 : 1], thread const Arrays& a, thread Item<Index>& item,
    thread float& before, thread float& dc_or_q) {
  constexpr int OWN = N == 1 ? 1 : 0;
  before = of_lane<N>(number[0], 0);
  dc_or_q = is_present(a.dc) || is_present(a.q) ? of_lane<N>(number[2 * OWN], 2) : 0.0f;
  item.past = item.dh + (is_present(a.dh) ? of_lane<N>(number[OWN], 1) : 0.0f);
  item.mask = is_present(a.mask) ? of_lane<N>(number[3 * OWN], 3) : 1.0f;
}
