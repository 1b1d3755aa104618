// What the kernels that run a whole sequence in one launch share: the loop over time, positions in arrays, weights in
// registers.
//
// A threadgroup owns ROWS batch items of one direction and runs all their steps. No other threadgroup needs these
// items. z is the input's part of the preactivations, dz the gradient of the preactivations. Shapes, with D directions
// and G gates; a gate axis has a block of H numbers per gate, in the cell's gate order:
//   z, gates, dz  [T, B, D G H]     h  [T, B, D H]        h0, hT  [B, D H]     lengths   [B]
//   mask          [T or 1, B, D H]  c  [T, B, D H] float  c0, cT  [B, D H]     peephole  [D, 4H]     bhn  [D H]
//   keep          [T, B, D]
//   The letters count blocks of H numbers. A cell that a user wrote has any number of blocks in some arrays: C states
//   besides h, U inputs of a step, V parameters, K saved numbers, M stored gradients of preactivations:
//   gates  [T, B, D K H]  dz  [T, B, D M H]  c, c0, cT  [., B, D C H]  inputs  [T, B, D U H]  params  [D V H]
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
// Cell is the struct of a cell (cell.metal): GATES is the number G, CARRIED the number of states besides h. S is the
// dtype of the arrays, V a vector of 4 weights. In a simdgroup 32 lanes run together. A cotangent is the gradient that
// the caller gives for an output.

// What one launch processes in one direction: the steps start ... stop - 1 of all T steps, counted in the order of
// processing, for B batch items. D: the number of directions. masks_differ: whether each step has its own mask.
struct Sweep {
  int start, stop, T, B, D, direction;
  bool reverse, masks_differ;
};

// Fill `sweep` from the array `sizes`, which the head of this file describes. Direction 1 always runs in reverse.
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

// The positions of one unit of one batch item in several arrays, at one step. A second Place holds distances: by how
// much each position grows from one step to the next. D: directions. G: gates. The arrays and their shapes:
//   state  h, c and their gradients [steps, B, D H], the launch's own steps only
//   gate   z, gates and dz [steps, B, D G H], the launch's own steps only
//   mask   [T, B, D H], keep [T, B, D] and q [D, T, B, H]: all T steps. q is the candidate's recurrent product of a GRU
template <class Index>
struct Place {
  Index state, gate, mask, keep, q;
};

// Compute the positions of the launch's first step or, if BACK, of its last step, where the backward pass begins. They
// are those of unit `unit` of batch item b. In arrays with several blocks of H numbers per item, `blocks` blocks such
// as an LSTM's four gates, they are in block `block`.
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

// Move the positions of a unit to the next processed step.
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

// Return the position of one block of a unit in an array whose rows have COUNT blocks of H numbers. at: the position of
// the same row and unit in an array whose rows have H numbers. The compiler computes the term after + once, so a step
// costs one multiply-add.
template <int COUNT, int H, class Index>
Index place_of(Index at, int block, int unit) { return at * COUNT + Index(block * H + unit - COUNT * unit); }

// Load all COUNT values that an array has for one unit, step and item: value k into values[first + k].
template <int COUNT, int H, class Index, class A, int SIZE>
void load_all(A array, Index at, int unit, thread float (&values)[SIZE], int first) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) values[first + k] = value_at(array, place_of<COUNT, H>(at, k, unit), 0.0f);
}

// Store COUNT values of one unit, step and item: values[first + k] as value k.
template <int COUNT, int H, class Index, class A>
void store_all(A array, Index at, int unit, thread const float* values) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) store(array, place_of<COUNT, H>(at, k, unit), values[k]);
}

// Return whether an item of this length has not ended at time index t.
template <class L> bool is_live(L lengths, int t, int length) { return !is_present(lengths) || t < length; }

// Return a pointer to the first weight vector of lane `index` of a threadgroup of `threads`. The vectors of one lane
// lie 32 vectors apart, because the vectors that the 32 lanes of a simdgroup read at the same time lie side by side.
// COUNT: how many vectors a lane has.
template <int COUNT, class V, class W>
const device V* vectors_of_lane(W arranged, int direction, uint index, uint threads) {
  const uint simdgroup = direction * threads / 32 + index / 32;
  return (const device V*)arranged + simdgroup * (32 * COUNT) + index % 32;
}

// Load the first RESIDENT weight vectors of a lane into registers, where they stay for all steps. streamed: the lane's
// vectors in memory, 32 vectors apart, because those of the simdgroup's other lanes lie between them.
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

// Set `count` vectors of threadgroup memory to 0. All threads of the threadgroup call this function. index: the number
// of the calling thread. threads: how many there are.
template <class V>
void fill_with_zeros(threadgroup V* vectors, int count, uint index, uint threads) {
  for (int n = int(index); n < count; n += int(threads)) vectors[n] = V(0.0f);
}

// N lanes (1 or 4) share a unit. Return the value that `mine` has in lane n of these N lanes.
template <int N>
float of_lane(float mine, int n) { return N > 1 ? quad_broadcast(mine, ushort(n)) : mine; }

// --- The backward pass of one unit of one batch item: its state, and the values it reads at each step besides the
// gates ---
//
// Arrays in addition to those listed at the top: the cotangents of the outputs (dh, dgates, dhT and, for states besides
// h, dc, dcT), each in the shape of its output, and
//   q   [D, T, B, H]: the candidate's recurrent product of a GRU
// (a cotangent is the gradient that the caller gives for an output). The kernels read the states h, c after each step,
// and the first ones h0, c0. A state that the cell's backward step does not read is absent. At each backward step a
// unit reads several numbers from memory. If registers are left, the kernel reads the numbers of the next step before
// the product of the present one. So these numbers arrive while the product is computed, and no step waits for them.
//
// Fields of Item. at: the unit's positions in the arrays. ds: the gradients of the states from later steps. states: the
// states before the step that was processed last. In all three the first number belongs to h. y: the lane's gate. d:
// first the cotangent of this gate, then the gradient of its preactivation. past: the part of the gradient of h before
// the step that does not go through the recurrent product. mask: the factor on the product.
template <class Cell, class Index>
struct Item {
  Place<Index> at;
  int length;
  float ds[Cell::CARRIED + 1], states[Cell::CARRIED + 1], y, d, past, mask;
};

// Whether a step of the cell in reverse uses states before the step. The plain RNN uses only the state after it.
template <class Cell> constant constexpr bool USES_BEFORE = Cell::READS_BEFORE != 0;

// What a unit reads at a step besides the gates: the states that the step uses, the cotangents of all states (ds), the
// inputs of the step (or q), and the factors `mask` and `keep`. If the caller does not have the array of a cotangent,
// the cotangent is 0; without the array of a factor, the factor is 1.
template <class Cell>
struct StepNumbers {
  float states[Cell::CARRIED + 1], ds[Cell::CARRIED + 1], u[SIZE_FOR<Cell::INPUTS>], mask, keep;
};

// Load the states of a unit from two arrays: h, and the CARRIED others side by side. at: the unit's position in h.
template <class Cell, int H, class Index, class A, class B>
void load_states(A h, B c, Index at, int unit, thread float (&states)[Cell::CARRIED + 1]) {
  load_all<1, H>(h, at, unit, states, 0);
  load_all<Cell::CARRIED, H>(c, at, unit, states, 1);
}

// Compute the position of a batch item, and initialize its ds with the cotangents of the final states, and its states
// with those after the last step. If b is past the last batch item, the length is 0, so that every step is past the
// item's end. If b or the unit is past the end (not `real`), the position is that of the last item or of unit 0, whose
// numbers may be read. earlier: the number of elements of h before the launch's first time index.
template <class Cell, int H, class Index, class Arrays>
void begin_item(
    thread const Sweep& sweep, thread const Arrays& a, int b, int block, int unit, bool real, Index earlier,
    thread Item<Cell, Index>& item) {
  const int own = min(b, sweep.B - 1), own_unit = real ? unit : 0;
  const long place = place_in(sweep, own, 1, 0, H, own_unit);
  first_place<true>(sweep, own, Cell::GATES, block, H, own_unit, item.at);
  item.length = b < sweep.B ? value_at(a.lengths, b, sweep.T) : 0;
  load_states<Cell, H>(a.dhT, a.dcT, place, own_unit, item.ds);
#pragma clang loop unroll(full)
  for (int k = 0; k <= Cell::CARRIED; ++k) item.ds[k] = real ? item.ds[k] : 0.0f;
  load_states<Cell, H>(a.h, a.c, item.at.state + earlier, own_unit, item.states);
}

// Read what a unit needs at step n besides the gates: states, cotangents, inputs and factors. at: the unit's positions
// at this step. at.state counts from the first time index of the launch, but the arrays of states and cotangents begin
// at time 0. earlier: the number of their elements before the launch's first time index. step: the number of their
// elements from one time index to the next. Both count an array with one block per unit.
template <class Cell, int H, class Index, class Arrays>
void read_step(
    thread const Sweep& sweep, thread const Arrays& a, int n, thread const Place<Index>& at, Index earlier, Index step,
    int unit, thread StepNumbers<Cell>& numbers) {
  // The states before the step lie `back` elements from those after it. At step 0 there are no earlier states: `back`
  // is then 0, so that the address is valid, and use_states replaces the numbers that were read. `back` is also 0 for
  // cells that do not use the states before.
  const Index now = at.state + earlier, back = !USES_BEFORE<Cell> || n == 0 ? Index(0) : sweep.reverse ? step : -step;
  load_states<Cell, H>(a.h, a.c, now + back, unit, numbers.states);
  load_states<Cell, H>(a.dh, a.dc, now, unit, numbers.ds);
  load_all<Cell::INPUTS, H>(a.inputs, now, unit, numbers.u, 0);
  if (Cell::INPUTS == 0) numbers.u[0] = value_at(a.q, at.q, 0.0f);
  numbers.mask = value_at(a.mask, at.mask, 1.0f);
  numbers.keep = value_at(a.keep, at.keep, 1.0f);
}

// Set `after` to the states after step n, and item.states to those before it. The steps run in reverse, so the states
// after step n are the old item.states. states: the states before the step, as read_step read them.
template <class Cell, int H, class Index, class Arrays>
void use_states(
    thread const Sweep& sweep, thread const Arrays& a, int n, Index step, int unit,
    thread const float (&states)[Cell::CARRIED + 1], thread Item<Cell, Index>& item,
    thread float (&after)[Cell::CARRIED + 1]) {
  const int t = time_of(sweep, n);
#pragma clang loop unroll(full)
  for (int k = 0; k <= Cell::CARRIED; ++k) {
    after[k] = USES_BEFORE<Cell> ? item.states[k] : states[k];
    item.states[k] = n == 0 ? 0.0f : states[k];
  }
  // At an item's first step the states before it are h0 and c0. In a reverse direction an item's first step is at its
  // own last time index, which depends on its length. So it is not step n = 0 for every item.
  if (USES_BEFORE<Cell> && (is_present(a.lengths) || is_present(a.h0) || is_present(a.c0)))
    if (is_present(a.lengths) && sweep.reverse ? t + 1 == item.length : n == 0)
      load_states<Cell, H>(a.h0, a.c0, item.at.state - Index(t - first_time(sweep)) * step, unit, item.states);
}
