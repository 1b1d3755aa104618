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
// A lane's weights are COUNT vectors of 4, in the order in which it needs them. The first RESIDENT stay in registers for
// all steps, the others are read at every step. Units and numbers past the end are padding: their weights are 0, nothing
// of them is stored. In lanes, batch items past the last one are the last one again, computed twice and written twice.
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

// Return the weight vectors of lane `index` of a threadgroup of `threads`. Neighbours lie 32 apart, as the 32 lanes of a
// simdgroup read theirs side by side.
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
