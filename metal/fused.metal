// Code that the whole-sequence kernels share. These kernels run all time steps of a pass in one launch. This file has
// what a launch processes, the positions of numbers in arrays from step to step, and the loads of weights. A
// threadgroup computes all steps of ROWS batch items in one direction.
//
// T: time steps, B: batch items, D: directions, G: gates, H: hidden units. An axis G H has a block of H numbers for
// each gate, in the cell's gate order.
//   z, gates, dz    [T, B, D G H]  the input's part of the preactivations; the gates; the preactivations' gradients
//   h, c            [T, B, D H]    the states after each step (c of an LSTM only, in float)
//   h0, c0, hT, cT  [B, D H]       the states before the first step and after the last one
//   mask            [T or 1, B, D H]  the factor on h in the recurrent product; it includes `keep`
//   keep  [T, B, D]  the factor on all states before a step      lengths  [B]  the steps of an item; then it has ended
//   q  [D, T, B, H]  the recurrent product of a GRU's candidate, for the backward pass      bhn  [D H]  its bias
//   peephole  [D, 4H] of an LSTM
//   dh, dc, dgates, dhT, dcT  cotangents: the gradients that the caller gives for the outputs
//   arranged  the weights Wh [D, G H, H], in the order in which lanes read them (fused_arrange.metal)
//   sizes     seven integers: start, stop (this launch runs the steps start ... stop - 1, in the order of processing);
//             T; B; D; 1 if the only direction is the reverse one; 1 if each step has its own mask
// An output with a time axis contains only the steps of this launch. For a cell written by the user some arrays have
// other numbers of blocks:
//   gates [T, B, D K H] (K saved numbers)   dz [T, B, D M H] (M gradients of preactivations)   params [D V H]
//   c [T, B, D C H] (C states besides h)    inputs [T, B, D U H] (U inputs of a step)
//
// The other files fused*.metal and pointwise*.metal use the names of this list, too. A lane is one of the 32 threads of
// a simdgroup.
//   Cell, Lanes<Cell>  the struct of a cell (cell.metal): GATES is G, CARRIED is C, INPUTS is U; how lanes share a unit
//   a            the struct of all arrays; value_at, store and is_present work for absent arrays, too (arrays.metal)
//   S, Index     the dtype of the arrays; the unsigned type that counts elements. A, B, L, W: types of arrays
//   r            the number of a batch item, 0 ... ROWS - 1. If fewer than ROWS items are left, a threadgroup computes
//                the last one several times
//   live         whether the batch item has not ended at this step. Past its end outputs are 0, and states stay as they
//                are
//   group, index, threads   the threadgroup's index along the batch, and the direction; the thread's index in the
//                threadgroup, and how many threads there are
//   LANES, UNITS, GROUP   how many adjacent lanes share a unit; how many units share a product; LANES * UNITS lanes,
//                which compute these units' products together
//   s, lane, unit   the lane's index among the GROUP lanes; its index among those that share its unit; this unit
//   real         whether the lane has a unit; a lane past H only takes part in the product. If the units fill whole
//                simdgroups, every lane has one, and the compiler drops the comparison with H
//   V            a vector of 4 weights. Of its COUNT vectors a lane keeps the first RESIDENT in registers (`resident`),
//                and reads the others from memory at every step (`streamed`)
//   RUNS, ROW    how many runs of 4 neighbouring numbers of an operand a lane multiplies; how many vectors of 4 floats
//                the operand of one item has
//   vectors      threadgroup memory: operands of the products, then the memory of the norms. HALF: the vectors (with
//                matrices the floats) of one half of a double buffer
//   earlier      how many elements of h come before the launch's first time index. Outputs begin at this time index,
//                inputs at time index 0
//   block        H numbers of an array, for example those of one gate

// What one launch processes in one direction: the steps start ... stop - 1 of all T steps, for B batch items. Steps are
// counted in the order of processing. direction: 0 or 1, the direction of this threadgroup. reverse: whether it runs
// from the last time index to the first. masks_differ: whether each step has its own mask.
struct Sweep {
  int start, stop, T, B, D, direction;
  bool reverse, masks_differ;
};

// Fill `sweep` from the array `sizes`. direction: 0 or 1, the direction of the threadgroup. If there are two
// directions, number 1 always runs in reverse.
inline void read_sizes(const constant int* sizes, uint direction, thread Sweep& sweep) {
  sweep.start = sizes[0], sweep.stop = sizes[1], sweep.T = sizes[2], sweep.B = sizes[3], sweep.D = sizes[4];
  sweep.direction = int(direction), sweep.reverse = direction == 1 || sizes[5] != 0;
  sweep.masks_differ = sizes[6] != 0;
}

// time_of returns the time index of step n, where steps are counted in the order of processing: in a reverse direction
// step 0 is at the last time index. first_time returns the smallest time index that the launch processes.
inline int time_of(thread const Sweep& sweep, int n) { return sweep.reverse ? sweep.T - 1 - n : n; }
inline int first_time(thread const Sweep& sweep) { return sweep.reverse ? sweep.T - sweep.stop : sweep.start; }

// place_in returns the position of one element in an array [B, D, blocks, H]: the element of batch item b, of the
// threadgroup's direction, of block number `block` and of unit number `unit`. For an array with one number per unit,
// such as h0, blocks is 1 and block is 0. time_step returns how many elements an array [T, B, D, blocks, H] has per
// time index.
inline long place_in(thread const Sweep& sweep, int b, int blocks, int block, int H, int unit) {
  return ((long(b) * sweep.D + sweep.direction) * blocks + block) * H + unit;
}
inline long time_step(thread const Sweep& sweep, int blocks, int H) { return long(sweep.B) * sweep.D * blocks * H; }

// The positions of one unit of one batch item in several arrays, at one step. The same struct also holds distances: by
// how much each position grows from one step to the next.
//   state  in h, c and their gradients [., B, D H], counted from the launch's first time index
//   gate   in z, gates and dz [., B, D G H], counted from the launch's first time index
//   mask   in the array mask [T or 1, B, D H]      keep  in the array keep [T, B, D]
//   q      in the array q [D, T, B, H]
// For inputs, which begin at time index 0, the kernels add `earlier` to state and gate.
template <class Index>
struct Place {
  Index state, gate, mask, keep, q;
};

// Set `place` to the positions of one unit of batch item b at the launch's first step or, if BACK, at its last step,
// where the backward pass begins. place.gate is in block number `block` of `blocks`.
template <bool BACK, class Index>
void first_place(
    thread const Sweep& sweep, int b, int blocks, int block, int H, int unit, thread Place<Index>& place) {
  // t: the time index of this step; row: t minus the launch's smallest time index. The pass begins at the largest time
  // index if the direction is the reverse one or the pass runs backward, but not if both are true.
  const long row = sweep.reverse != BACK ? sweep.stop - 1 - sweep.start : 0, t = first_time(sweep) + row;
  const long step = time_step(sweep, 1, H), item = place_in(sweep, b, 1, 0, H, unit);
  place.state = Index(row * step + item);
  place.gate = Index(row * blocks * step + place_in(sweep, b, blocks, block, H, unit));
  place.mask = Index((sweep.masks_differ ? t * step : 0) + item);
  place.keep = Index((t * sweep.B + b) * sweep.D + sweep.direction);
  place.q = Index(((sweep.direction * sweep.T + t) * sweep.B + b) * H + unit);
}

// Set `step` to the distances between a unit's positions at one processed step and at the next one. blocks: how many
// blocks of H numbers per item the arrays of the field `gate` have. BACK: whether the pass runs backward. Index is
// unsigned, so a negative distance wraps around. Adding it wraps around again and gives the correct position.
template <bool BACK, class Index>
void between_steps(thread const Sweep& sweep, int blocks, int H, thread Place<Index>& step) {
  const long sign = sweep.reverse != BACK ? -1 : 1, states = sign * time_step(sweep, 1, H);
  step.state = Index(states), step.gate = Index(blocks * states);
  step.mask = Index(sweep.masks_differ ? states : 0), step.q = Index(sign * sweep.B * H);
  step.keep = Index(sign * sweep.B * sweep.D);
}

// Move the positions `place` of a unit to the next processed step. step: the distances to that step, which
// between_steps computes.
template <class Index>
void advance(thread Place<Index>& place, thread const Place<Index>& step) {
  place.state += step.state, place.gate += step.gate, place.mask += step.mask, place.q += step.q;
  place.keep += step.keep;
}

// Set `distance` to `step`, the distances to the next step, or to zeros if the next step does not exist. A kernel reads
// the numbers of the next step ahead of time. With zeros it reads those of the current step again, and nothing outside
// the arrays.
template <class Index>
void distance_to_next(bool exists, thread const Place<Index>& step, thread Place<Index>& distance) {
  distance.state = exists ? step.state : 0, distance.gate = exists ? step.gate : 0;
  distance.mask = exists ? step.mask : 0, distance.keep = exists ? step.keep : 0;
  distance.q = exists ? step.q : 0;
}

// Return the position of a unit's number in block `block` of an array whose rows have COUNT blocks of H numbers. at:
// the unit's position in the same row of an array whose rows have one block. If at is row H + unit, the result is row
// COUNT H + block H + unit. The term after `at * COUNT` is the same at all steps, so the compiler computes it once, and
// a step costs one multiply-add. This term may be negative. Index is unsigned, so the term wraps around, and the sum is
// correct again.
template <int COUNT, int H, class Index>
Index place_of(Index at, int block, int unit) { return at * COUNT + Index(block * H + unit - COUNT * unit); }

// Load the COUNT values that an array has for one unit at one step of one batch item, which lie H elements apart. Value
// k goes to values[first + k]; it is 0 if the call does not have the array. at: the position that the unit has in an
// array with one value per unit.
template <int COUNT, int H, class Index, class A, int SIZE>
void load_all(A array, Index at, int unit, thread float (&values)[SIZE], int first) {
  UNROLL for (int k = 0; k < COUNT; ++k) values[first + k] = value_at(array, place_of<COUNT, H>(at, k, unit), 0.0f);
}

// Store the COUNT values that an array has for one unit, where load_all loads them: values[k] becomes value k.
template <int COUNT, int H, class Index, class A>
void store_all(A array, Index at, int unit, thread const float* values) {
  UNROLL for (int k = 0; k < COUNT; ++k) store(array, place_of<COUNT, H>(at, k, unit), values[k]);
}

// Return whether a batch item has not yet ended at time index t. length: the item's number of steps. If the call does
// not have the array `lengths`, no item ends early, and the compiler drops the comparison.
template <class L> bool is_live(L lengths, int t, int length) { return !is_present(lengths) || t < length; }

// Return a pointer to the first weight vector of one lane. COUNT: how many vectors a lane has. They lie 32 vectors
// apart, because the vectors that the 32 lanes of a simdgroup read at the same time lie side by side. arranged: the
// weights of all directions, in this order.
template <int COUNT, class V, class W>
const device V* vectors_of_lane(W arranged, int direction, uint index, uint threads) {
  const uint simdgroup = direction * threads / 32 + index / 32;
  return (const device V*)arranged + simdgroup * (32 * COUNT) + index % 32;
}

// Load the first RESIDENT weight vectors of a lane into registers, where they stay for all steps. streamed: the lane's
// vectors in memory, 32 vectors apart.
template <int RESIDENT, class V, int SIZE>
void load_resident(const device V* streamed, thread V (&resident)[SIZE]) {
  UNROLL for (int n = 0; n < RESIDENT; ++n) resident[n] = streamed[32 * n];
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

// Set `count` vectors of threadgroup memory to 0. All threads of the threadgroup call this function and divide the
// work.
template <class V>
void fill_with_zeros(threadgroup V* vectors, int count, uint index, uint threads) {
  for (int n = int(index); n < count; n += int(threads)) vectors[n] = V(0.0f);
}

// Return the value that `mine` has in lane n of the N lanes (1 or 4) that share a hidden unit. All N lanes get this
// value. Metal's quad_broadcast does this for 4 lanes.
template <int N>
float of_lane(float mine, int n) { return N > 1 ? quad_broadcast(mine, ushort(n)) : mine; }

// The numbers that the backward pass keeps for one unit of one batch item from step to step. It processes the steps of
// the forward pass in reverse. In ds and states, number 0 belongs to h, and the next CARRIED numbers belong to the
// other states (c of an LSTM).
//   at      the unit's positions in the arrays
//   length  the number of the item's steps
//   ds      the gradients of the states, summed over the steps that were processed so far
//   states  the states between two steps: after the step that is processed next, before the one that was processed last
//   y       the gate that this lane computes
//   d       the cotangent of this gate, then the gradient of its preactivation
//   past    at first the whole gradient of h after the step; once the cell's step is computed, the part of the gradient
//           of h before the step that does not go through the recurrent product
//   mask    the factor on h in the recurrent product of the step
template <class Cell, class Index>
struct Item {
  Place<Index> at;
  int length;
  float ds[Cell::CARRIED + 1], states[Cell::CARRIED + 1], y, d, past, mask;
};

// Whether a backward step of the cell reads any state before the step. READS_BEFORE has one bit per such state. It is 0
// for the plain RNN, which reads only h after the step.
template <class Cell> constant constexpr bool USES_BEFORE = Cell::READS_BEFORE != 0;

// The numbers that one unit reads at one backward step, besides its gates. The order of the states is as in Item.
//   states  the states before the step, or those after it if the step reads only these (USES_BEFORE is false)
//   ds      the cotangents of the outputs h and c at this step; 0 if the caller gives none
//   u       the inputs of the step of a user's cell; for a GRU u[0] is the recurrent product of its candidate
//   mask, keep   numbers of these arrays; 1 without them
template <class Cell>
struct StepNumbers {
  float states[Cell::CARRIED + 1], ds[Cell::CARRIED + 1], u[SIZE_FOR<Cell::INPUTS>], mask, keep;
};

// Load the states of one unit, or their gradients, from two arrays: states[0] is read from `h` [steps, B, D H], the
// CARRIED other states from `c` [steps, B, D CARRIED H]. at: the unit's position in h.
template <class Cell, int H, class Index, class A, class B>
void load_states(A h, B c, Index at, int unit, thread float (&states)[Cell::CARRIED + 1]) {
  load_all<1, H>(h, at, unit, states, 0);
  load_all<Cell::CARRIED, H>(c, at, unit, states, 1);
}

// Prepare the backward pass of one unit of batch item b: set its positions in arrays, its length, its states and their
// gradients `ds`. The states are those after the launch's last step. ds gets the cotangents of the last states (dhT,
// dcT) or, if a pass has several launches, the gradients that the launch before returned. block: the position of the
// lane's gate on the gate axis.
//
// If b is past the last batch item, the length is 0, so that the item has ended at every step. Then the positions are
// those of the last item (`own`). If the unit does not exist (real is false), they are those of unit 0 (`own_unit`),
// and ds is 0. So every read stays inside the arrays.
template <class Cell, int H, class Index, class Arrays>
void begin_item(
    thread const Sweep& sweep, thread const Arrays& a, int b, int block, int unit, bool real, Index earlier,
    thread Item<Cell, Index>& item) {
  const int own = min(b, sweep.B - 1), own_unit = real ? unit : 0;
  const long place = place_in(sweep, own, 1, 0, H, own_unit);
  first_place<true>(sweep, own, Cell::GATES, block, H, own_unit, item.at);
  item.length = b < sweep.B ? value_at(a.lengths, b, sweep.T) : 0;
  load_states<Cell, H>(a.dhT, a.dcT, place, own_unit, item.ds);
  UNROLL for (int k = 0; k <= Cell::CARRIED; ++k) item.ds[k] = real ? item.ds[k] : 0.0f;
  load_states<Cell, H>(a.h, a.c, item.at.state + earlier, own_unit, item.states);
}

// Read the numbers that a unit needs at backward step n besides the gates, into `numbers`. at: the unit's positions at
// this step. step: how many elements h has per time index.
template <class Cell, int H, class Index, class Arrays>
void read_step(
    thread const Sweep& sweep, thread const Arrays& a, int n, thread const Place<Index>& at, Index earlier, Index step,
    int unit, thread StepNumbers<Cell>& numbers) {
  // back: the distance from the states after the step to the states before it, which lie one time index earlier, or
  // later in a reverse direction. Step 0 has no states before it in these arrays. Then back is 0, so that the address
  // is valid, and use_states replaces the numbers. For cells that need only the states after the step, back is 0, too.
  const Index now = at.state + earlier, back = !USES_BEFORE<Cell> || n == 0 ? Index(0) : sweep.reverse ? step : -step;
  load_states<Cell, H>(a.h, a.c, now + back, unit, numbers.states);
  load_states<Cell, H>(a.dh, a.dc, now, unit, numbers.ds);
  load_all<Cell::INPUTS, H>(a.inputs, now, unit, numbers.u, 0);
  // Built-in cells have no inputs of a step. A GRU gets q in this place, the recurrent product of its candidate.
  if (Cell::INPUTS == 0) numbers.u[0] = value_at(a.q, at.q, 0.0f);
  numbers.mask = value_at(a.mask, at.mask, 1.0f);
  numbers.keep = value_at(a.keep, at.keep, 1.0f);
}

// Set `after` to the states after step n, and item.states to the states before it. states: what read_step has read for
// this step: the states before it. (If USES_BEFORE is false it has read the states after it; then item.states is not
// used.) The steps run in reverse. So on entry item.states has the states before step n + 1, which are those after step
// n. The states before step 0 are h0 and c0, or 0 without these arrays. step: how many elements h has per time index.
template <class Cell, int H, class Index, class Arrays>
void use_states(
    thread const Sweep& sweep, thread const Arrays& a, int n, Index step, int unit,
    thread const float (&states)[Cell::CARRIED + 1], thread Item<Cell, Index>& item,
    thread float (&after)[Cell::CARRIED + 1]) {
  const int t = time_of(sweep, n);
  UNROLL for (int k = 0; k <= Cell::CARRIED; ++k) {
    after[k] = USES_BEFORE<Cell> ? item.states[k] : states[k];
    item.states[k] = n == 0 ? 0.0f : states[k];
  }
  // At an item's first step the states before it are h0 and c0. In a reverse direction this step is at the item's last
  // time index, which depends on the item's length. So it need not be step n = 0.
  if (USES_BEFORE<Cell> && (is_present(a.lengths) || is_present(a.h0) || is_present(a.c0)))
    if (is_present(a.lengths) && sweep.reverse ? t + 1 == item.length : n == 0)
      load_states<Cell, H>(a.h0, a.c0, item.at.state - Index(t - first_time(sweep)) * step, unit, item.states);
}
