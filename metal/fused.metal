// What the kernels that run a whole sequence in one launch share: the loop over time, positions in arrays, weights in
// registers.
//
// A threadgroup owns ROWS batch items of one direction and runs all their steps. No other threadgroup needs these
// items. z is the input's part of the preactivations, dz the gradient of the preactivations. Shapes, with D directions
// and G gates; a gate axis has a block of H numbers per gate, in the cell's gate order:
//   z, gates, dz  [T, B, D G H]     h  [T, B, D H]        h0, hT  [B, D H]     lengths   [B]
//   mask          [T or 1, B, D H]  c  [T, B, D H] float  c0, cT  [B, D H]     peephole  [D, 4H]     bhn  [D H]
//   keep          [T, B, D]
//   arranged      [D, simdgroups, COUNT, 32 lanes, 4]: the weights Wh [D, G H, H] in the order in which lanes read
//                 them, written by fused_arrange.metal
//   sizes         seven integers: start, stop (this launch runs the steps start ... stop - 1, counted in the order of
//                 processing); T; B; D; 1 if the only direction is the reverse one; 1 if each step has its own mask
// `mask` already includes `keep`. Outputs with a time axis contain only the steps of this launch.
//
// A lane's weights are COUNT vectors of 4, in the order in which the lane needs them. The first RESIDENT vectors stay
// in registers for all steps; the others are read again at every step. If H is not a multiple of the units of a
// threadgroup, weights of 0 fill the vectors, and the results of units past H are not stored. In the kernels with the
// product in lanes, a threadgroup with fewer than ROWS items left computes the last item several times; all copies
// write the same results.
//
// Index is the unsigned integer type that counts the elements of a launch's arrays: 32 bits if that is enough, else 64.

// What one launch processes in one direction: the steps start ... stop - 1 of all T steps, counted in the order of
// processing, for B batch items. D: the number of directions. masks_differ: whether each step has its own mask.
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

// place_in returns the position of one number in an array [B, D, blocks, H]: batch item b, this direction, block number
// `block`, unit `unit`. A block is for example a gate. time_step returns the number of elements that one time index of
// an array [T, B, D, blocks, H] has.
inline long place_in(thread const Sweep& sweep, int b, int blocks, int block, int H, int unit) {
  return ((long(b) * sweep.D + sweep.direction) * blocks + block) * H + unit;
}
inline long time_step(thread const Sweep& sweep, int blocks, int H) { return long(sweep.B) * sweep.D * blocks * H; }

// Positions of one unit of one batch item in several arrays, at one step; or the distances by which these positions
// advance from step to step. `state` ([., B, D H]) and `gate` ([., B, D G H]) are for arrays that contain only the
// launch's own steps; `mask`, `keep` and `q` ([D, T, B, H]) are for arrays with all T steps.
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

// Set `distance` to `step`, the distances to the next step, or to 0 if there is no next step. With 0 a kernel that
// reads ahead reads the numbers of the current step again, instead of numbers outside the array.
template <class Index>
void distance_to_next(bool exists, thread const Place<Index>& step, thread Place<Index>& distance) {
  distance.state = exists ? step.state : 0, distance.gate = exists ? step.gate : 0;
  distance.mask = exists ? step.mask : 0, distance.keep = exists ? step.keep : 0;
  distance.q = exists ? step.q : 0;
}

// Return whether an item of this length has not ended at time index t.
template <class L> bool is_live(L lengths, int t, int length) { return !is_present(lengths) || t < length; }

// Return a pointer to the first weight vector of lane `index` of a threadgroup of `threads`. The vectors of one lane
// lie 32 vectors apart, because the vectors that the 32 lanes of a simdgroup read at the same time lie side by side.
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

// Return a reference to one float of the threadgroup memory `vectors`, which consists of vectors of 4 floats: float
// number n, counted from the beginning of vector number `row`.
inline threadgroup float& number_at(threadgroup float4* vectors, int row, int n) {
  return ((threadgroup float*)(vectors + row))[n];
}

template <class V>
void fill_with_zeros(threadgroup V* vectors, int count, uint index, uint threads) {
  for (int n = int(index); n < count; n += int(threads)) vectors[n] = V(0.0f);
}

// N lanes share a unit. Return the value that `mine` has in lane n of these N lanes.
template <int N>
float of_lane(float mine, int n) { return N > 1 ? quad_broadcast(mine, ushort(n)) : mine; }

// --- The backward pass of one unit of one batch item: its state, and the values it reads at each step besides the
// gates ---
//
// Arrays in addition to those listed at the top: the cotangents of the outputs (dh, dgates, dhT and, for an LSTM, dc,
// dcT), each in the shape of its output, and
//   states, states0  [T, B, D H] and [B, D H]: c after each step and before the first step; h if there is no c
//   q                [D, T, B, H]: the candidate's recurrent product of a GRU
// At each backward step a unit reads several numbers from memory. If registers are left, the kernel reads them one step
// early, before a product. So they arrive while the product is computed, and no step waits for them.
//
// Fields of Item. at: the unit's positions in the arrays. dh, dc: the gradients from later steps. before: the state
// before the step that was processed last. y: the lane's gate. d: first the cotangent of this gate, then the gradient
// of its preactivation. past: the part of the gradient of h before the step that does not go through the
// recurrent product. mask: the factor on the product.
template <class Index>
struct Item {
  Place<Index> at;
  int length;
  float dh, dc, before, y, d, past, mask;
};

// Whether a step of the cell in reverse uses the state before the step. The plain RNN uses only the state after it.
template <class Cell> constant constexpr bool USES_BEFORE = Cell::CARRIED || Cell::PASSES_H;

// What a unit reads at a step besides the gates: the state that the step uses, the cotangents dh and dc (or q), and the
// factors `mask` and `keep`. If the caller does not have the array of a cotangent, the cotangent is 0; without the
// array of a factor, the factor is 1.
struct StepNumbers {
  float state, dh, dc_or_q, mask, keep;
};

// Compute the position of a batch item, and initialize its dh and dc with the cotangents of the final states. If b is
// past the last batch item, the length is 0, so that every step is past the item's end. If b or the unit is past the
// end (not `real`), the position is that of the last item or of unit 0, whose numbers may be read.
template <class Index, class Arrays>
void begin_item(
    thread const Sweep& sweep, thread const Arrays& a, int b, int gates, int block, int H, int unit, bool real,
    thread Item<Index>& item) {
  const int own = min(b, sweep.B - 1);
  const long place = place_in(sweep, own, 1, 0, H, real ? unit : 0);
  first_place<true>(sweep, own, gates, block, H, real ? unit : 0, item.at);
  item.length = b < sweep.B ? value_at(a.lengths, b, sweep.T) : 0;
  item.dh = real ? value_at(a.dhT, place, 0.0f) : 0.0f;
  item.dc = real ? value_at(a.dcT, place, 0.0f) : 0.0f;
}

// Read what a unit needs at step n besides the gates: a state, cotangents and factors. at: the unit's positions at this
// step. at.state counts from the first time index of the launch, but the arrays `states`, dh and dc begin at time 0.
// earlier: the number of their elements before the launch's first time index. step: the number of their elements from
// one time index to the next.
template <class Cell, class Index, class Arrays>
void read_step(
    thread const Sweep& sweep, thread const Arrays& a, int n, thread const Place<Index>& at, Index earlier, Index step,
    thread StepNumbers& numbers) {
  // The state before the step lies `back` elements from the state after it. At step 0 there is no earlier state: `back`
  // is then 0, so that the address is valid, and use_states replaces the number that was read. `back` is also 0 for
  // cells that do not use the state before.
  const Index back = !USES_BEFORE<Cell> || n == 0 ? Index(0) : sweep.reverse ? step : -step;
  numbers.state = float(a.states[at.state + earlier + back]);
  numbers.dh = value_at(a.dh, at.state + earlier, 0.0f);
  numbers.dc_or_q = is_present(a.q) ? value_at(a.q, at.q, 0.0f) : value_at(a.dc, at.state + earlier, 0.0f);
  numbers.mask = value_at(a.mask, at.mask, 1.0f);
  numbers.keep = value_at(a.keep, at.keep, 1.0f);
}

// Return the state after step n, and set item.before to the state before it. The steps run in reverse, so the state
// after step n is the old item.before. state: the state before the step, as read_step read it.
template <class Cell, class Index, class Arrays>
float use_states(
    thread const Sweep& sweep, thread const Arrays& a, int n, Index step, float state, thread Item<Index>& item) {
  if (!USES_BEFORE<Cell>) return state;
  const int t = time_of(sweep, n);
  const float after = item.before;
  item.before = n == 0 ? 0.0f : state;
  // At an item's first step the state before it is states0. In a reverse direction an item's first step is at its own
  // last time index, which depends on its length. So it is not step n = 0 for every item.
  if (is_present(a.lengths) || is_present(a.states0))
    if (is_present(a.lengths) && sweep.reverse ? t + 1 == item.length : n == 0)
      item.before = value_at(a.states0, item.at.state - Index(t - first_time(sweep)) * step, 0.0f);
  return after;
}
