// What the kernels that run a whole sequence in one launch share: the sweep, places in arrays, weights in registers.
//
// A threadgroup owns ROWS batch items of one direction, which no other threadgroup needs, and walks all their steps.
// With D directions and G gates, the blocks of H on a gate axis in the cell's gate order:
//   z, gates, dz  [T, B, D G H]     h  [T, B, D H]        h0, hT  [B, D H]     lengths   [B]
//   mask          [T or 1, B, D H]  c  [T, B, D H] float  c0, cT  [B, D H]     peephole  [D, 4H]     bhn  [D H]
//   keep          [T, B, D]
//   arranged      [D, simdgroups, COUNT, 32 lanes, 4]: Wh [D, G H, H] in lane order, by fused_arrange.metal
//   sizes         start, stop: the steps of this launch, counted in the order of processing; T, B, D;
//                 whether the only direction is the reverse one; whether every step has a mask of its own
// `mask` already includes `keep`. Outputs with a time axis hold the launch's own steps only.
//
// A lane's weights are COUNT vectors of 4, in the order in which it needs them. The first RESIDENT stay in registers
// for all steps, the others are read at every step. Units and numbers past the end are padding: their weights are 0,
// nothing of them is stored. In lanes, batch items past the last one are the last one again, computed twice and written
// twice.
//
// Index is the unsigned integer that counts the elements of a launch's arrays: of 32 bits, where that is enough.

// A launch's part of a sweep in one direction: what `sizes` says, and the direction.
struct Sweep {
  int start, stop, T, B, D, direction;
  bool reverse, masks_differ;
};

inline void read_sizes(const constant int* sizes, uint direction, thread Sweep& sweep) {
  sweep.start = sizes[0], sweep.stop = sizes[1], sweep.T = sizes[2], sweep.B = sizes[3], sweep.D = sizes[4];
  sweep.direction = int(direction), sweep.reverse = direction == 1 || sizes[5] != 0;
  sweep.masks_differ = sizes[6] != 0;
}

// Return the time index of step n, and the first time index of the launch.
inline int time_of(thread const Sweep& sweep, int n) { return sweep.reverse ? sweep.T - 1 - n : n; }
inline int first_time(thread const Sweep& sweep) { return sweep.reverse ? sweep.T - sweep.stop : sweep.start; }

// Return the place of `unit` in H-block `block` of item b in [B, D blocks H], and the distance of two time indices.
inline long place_in(thread const Sweep& sweep, int b, int blocks, int block, int H, int unit) {
  return ((long(b) * sweep.D + sweep.direction) * blocks + block) * H + unit;
}
inline long time_step(thread const Sweep& sweep, int blocks, int H) { return long(sweep.B) * sweep.D * blocks * H; }

// The places of a unit of a batch item at a step, or their distances from those of the step before. In arrays of the
// launch's own steps: `state` in [., B, D H], `gate` in [., B, D G H]. In arrays of all steps: `mask`, `keep`, and `q`
// in [D, T, B, H].
template <class Index>
struct Place {
  Index state, gate, mask, keep, q;
};

// Find the places of the launch's first step or, BACK, of its last one, where a sweep backward begins.
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

// Find the distances from one processed step to the next. Index is unsigned: a negative distance wraps around, and so
// does the sum, to the right place.
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

// Return the weight vectors of lane `index` of a threadgroup of `threads`. Neighbours lie 32 apart, as the 32 lanes of
// a simdgroup read theirs side by side.
template <int COUNT, class V, class W>
const device V* vectors_of_lane(W arranged, int direction, uint index, uint threads) {
  const uint simdgroup = direction * threads / 32 + index / 32;
  return (const device V*)arranged + simdgroup * (32 * COUNT) + index % 32;
}

// Read the first RESIDENT vectors, which then stay in registers.
template <int RESIDENT, class V, int SIZE>
void load_resident(const device V* streamed, thread V (&resident)[SIZE]) {
#pragma clang loop unroll(full)
  for (int n = 0; n < RESIDENT; ++n) resident[n] = streamed[32 * n];
}

// Return 0 in a form that the compiler cannot know (B is not negative). Added to the weight pointer after each step, so
// that the weights that are not resident are read again each step: loads of a known, unchanged address would be hoisted
// out of the loop over time and their registers spilled.
inline int opaque_zero(thread const Sweep& sweep) { return sweep.B >> 31; }

// Return number n of the vectors in threadgroup memory from `row` on.
inline threadgroup float& number_at(threadgroup float4* vectors, int row, int n) {
  return ((threadgroup float*)(vectors + row))[n];
}

template <class V>
void fill_with_zeros(threadgroup V* vectors, int count, uint index, uint threads) {
  for (int n = int(index); n < count; n += int(threads)) vectors[n] = V(0.0f);
}

// Return what lane n of the N lanes of a unit holds.
template <int N>
float of_lane(float mine, int n) { return N > 1 ? quad_broadcast(mine, ushort(n)) : mine; }

// --- A unit of a batch item in a sweep backward: its state, and what it reads of a step besides the gates ---
//
// Arrays, besides those of fused.metal: the gradients from outside, in the shapes of what they belong to (dh, dgates,
// dhT and of an LSTM dc, dcT), and
//   states, states0  [T, B, D H] and [B, D H]: c after each step and before the first; h of a cell without c
//   q                [D, T, B, H]: the candidate's recurrent product of a GRU
// So a unit reads up to four numbers of a step: the state before it, dh, dc or q, the mask. Each of four lanes reads
// one of them and hands it to the others; a lane that has its unit alone reads all four.
//
// at: the unit's places; dh, dc: the gradients from later steps; now: the state after the step; y, d: a lane's gate and
// its gradient; past: what of dh reaches h_prev past the product; mask: the factor on the product.
template <class Index>
struct Item {
  Place<Index> at;
  int length;
  float dh, dc, now, y, d, past, mask;
};

// Begin with the gradients of the final states. b may be past the last item: then the length is 0, and nothing is live.
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

// Read the numbers of step n of ROWS items: lane k of N reads number k, or the only lane all. earlier: what lies before
// the launch's first time index in [T, B, D H], in which two time indices are `step` apart.
template <int N, int ROWS, class Index, class Arrays>
void read_step(
    thread const Sweep& sweep, thread const Arrays& a, int n, int lane, thread const Item<Index>* items, Index earlier,
    Index step, thread float (*number)[N == 1 ? 4 : 1]) {
  constexpr int OWN = N == 1 ? 1 : 0;
  const int t = time_of(sweep, n);
  const Index before = earlier + (sweep.reverse ? step : -step);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) number[r][0] = 0.0f;
  // The state after the step before.
  if (lane == 0 && n > 0)
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) number[r][0] = float(a.states[items[r].at.state + before]);
  // At an item's first step that is states0: at its last time index where it runs in reverse, which lengths tell.
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

// Give all lanes of a unit the numbers that read_step read: the state before, and dc or q, in `before` and `dc_or_q`.
// Without an array these are 0, the mask is 1.
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
