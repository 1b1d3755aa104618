// The recurrent product of the whole-sequence kernels, distributed over lanes: which lane has which weights, and sums
// over lanes.
//
// LANES adjacent lanes (4, or 1 for the plain RNN cell) share a hidden unit. GROUP = LANES * UNITS adjacent lanes form
// a group, which computes UNITS units: lane s of a group is lane s % LANES of unit s / LANES. To divide the product
// among the lanes of a group, each row of weights is cut into runs of 4 numbers. Lane s multiplies the runs s, s +
// GROUP, ... of the rows of all units of its group. So each number of the vector is read by only one lane of the group,
// which multiplies it by the weights of UNITS units and all gates. Then the lanes add up their sums.
//
// A lane has an array of partial sums, one per unit and gate of its group. The index is called a slot: slot n belongs
// to unit (n / GATES) ^ (the lane's own unit), an exclusive or. So the sums of a lane's own unit are in the first
// slots, and two lanes that exchange sums use the same slots: simd_shuffle_xor(x, n) returns the x of the lane whose
// number is the own number ^ n.
//
// Lanes<Cell>, in fused_lstm.metal, fused_gru.metal and fused_rnn.metal, says how the lanes of a unit compute a step:
//   LANES, WRITER     the number of lanes of a unit; the lane that has the unit's state and writes it
//   TWO_PRODUCTS      whether a step has two products, one after the other (a GRU whose reset comes before the product)
//   FIRST             the gates of the step's first product, one bit per gate
//   gate_block(lane)  the lane's block of H numbers in z, gates and dz; -1 for a lane without a gate
//   operand_block(lane)   the block that a lane writes in the backward product's operand, or -1
//   slot_block(n, lane)   the block of Wh of the weights in slot n of the lane's own unit
//   constant_of       reads a lane's constant (its peephole weight, or bhn), once per launch
//   sum_of_unit       sums over the lanes of a unit
//   forward, backward one step; each lane computes its own gate
//
// Cell: the struct of a cell, OPTIONS: its options as one integer; activation_of(OPTIONS, n): the activation of gate n,
// such as TANH; activate, slope: activations and derivatives (cell.metal). ROWS: the batch items of a threadgroup.
// Arrays, Item, StepNumbers, Index: fused.metal. H: the units. S: the dtype of the arrays. Absent: the type of what a
// call does not have (arrays.metal).
template <class Cell> struct Lanes;

// How many runs of 4 numbers a lane has, if the GROUP lanes of a group divide LENGTH numbers among themselves. The
// division is rounded up: zeros fill the last runs.
template <int LENGTH, int GROUP>
constant constexpr int RUNS_OF = (LENGTH + 4 * GROUP - 1) / (4 * GROUP);

// Which weights a lane has. GROUP lanes divide each of SLOTS rows of LENGTH weights among themselves: SPAN neighbouring
// weights belong to one lane, the next SPAN weights to the next lane of the group, and so on. So a lane has RUNS runs
// of 4 neighbouring weights of each row. They are stored as COUNT vectors of type V. fused_quantized.metal specializes
// this struct for quantized weights.
template <class V, int LENGTH, int GROUP, int SLOTS>
struct LaneShare {
  enum { SPAN = 4, RUNS = RUNS_OF<LENGTH, GROUP>, COUNT = RUNS * SLOTS };
};

// Return the position in threadgroup memory of number n of a vector that GROUP lanes share. Each lane has SPAN
// neighbouring numbers: 4, or more for quantized weights. Memory holds the first 4 numbers of every lane, lane after
// lane, then the next 4 of every lane, and so on. With SPAN = 4 this is the order of the numbers.
template <int SPAN, int GROUP>
int place_in_row(int n) { return SPAN == 4 ? n : (n % SPAN / 4 * GROUP + n / SPAN) * 4 + n % 4; }

// SQUASHED: whether the activation of gate GATE is tanh or sigmoid. The function `squash` computes both with the same
// instructions, so lanes with different gates need no branch. SQUASHES: whether this holds for each of the first GATES
// gates (at most 4). OPTIONS: the options of a cell as one integer.
template <int OPTIONS, int GATE>
constant constexpr bool SQUASHED = activation_of(OPTIONS, GATE) == TANH || activation_of(OPTIONS, GATE) == SIGMOID;
template <int OPTIONS, int GATES>
constant constexpr bool SQUASHES = SQUASHED<OPTIONS, 0> && (GATES < 2 || SQUASHED<OPTIONS, 1>) &&
                                   (GATES < 3 || SQUASHED<OPTIONS, 2>) && (GATES < 4 || SQUASHED<OPTIONS, 3>);

// Return whether the activation of a lane's gate is tanh. gate: the gate's number, one of the first GATES. The function
// compares it with constants, because shifting OPTIONS by this number would take more instructions.
template <int OPTIONS, int GATES>
bool is_tanh(int gate) {
  bool found = false;
#pragma clang loop unroll(full)
  for (int n = 0; n < GATES; ++n) found = found || (activation_of(OPTIONS, n) == TANH && gate == n);
  return found;
}

// Return the activation of x for a lane's own gate. gate: its number, below GATES. If the activations of all these
// gates are tanh or sigmoid, `squash` computes both by one formula, so that the lanes need no branch.
template <int OPTIONS, int GATES>
float activate_own(int gate, float x) {
  if constexpr (SQUASHES<OPTIONS, GATES>) return squash(is_tanh<OPTIONS, GATES>(gate), x);
  else return activate(activation_of(OPTIONS, gate), x);
}

// Return the derivative of the activation of a lane's own gate. gate: its number, y: its value after the activation.
// The derivative is 1 - y^2 = (1 - y)(y + 1) for tanh, and (1 - y) y for sigmoid.
template <int OPTIONS, int GATES>
float slope_own(int gate, float y) {
  if constexpr (SQUASHES<OPTIONS, GATES>) return (1.0f - y) * (y + (is_tanh<OPTIONS, GATES>(gate) ? 1.0f : 0.0f));
  else return slope(activation_of(OPTIONS, gate), y);
}

// Add this lane's part of a product to sums[r][slot]: row number `slot` of its weights times the r-th of ROWS vectors
// in threadgroup memory. x: where the lane's first run of vector 0 begins; the ROWS vectors are STRIDE float4 apart.
//   RUNS      how many runs of 4 neighbouring weights the lane has of each row; it reads run after run
//   GROUP     how many lanes share the product, so a lane's runs are GROUP runs apart
//   FROM      the number of the lane's first weight vector for this product; each run has one vector per slot
//   RESIDENT  so many of the lane's first weight vectors are in registers (`resident`). It reads the others from memory
//             (`streamed`), 32 vectors apart, because those of the simdgroup's other lanes lie between them
//   PER       the slots of one unit, one per gate
//   WANTED    one bit per gate. The function skips a slot whose bit (slot % PER) is 0: not every product needs all
template <int ROWS, int SLOTS, int RUNS, int GROUP, int FROM, int PER, int WANTED, int RESIDENT, int STRIDE, class V>
void add_product(
    thread float (&sums)[ROWS][SLOTS], thread const V* resident, const device V* streamed,
    threadgroup const float4* x) {
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
      if (n < RESIDENT) weights = float4(resident[n]);
      else weights = float4(streamed[32 * n]);
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

// Add up the partial sums of the UNITS units of a group of lanes. A unit has N lanes. On entry a lane has PER sums (one
// per gate, of which those with a bit in WANTED are needed) for each unit of the group, its own unit first. In each
// round two lanes exchange sums: each sends the second half of its sums, because these belong to the other lane's
// units, and adds the received sums to its first half. On return the first PER of `values` are the sums of the lane's
// own unit, added up over one lane of each unit. The N lanes of a unit still have different parts; sum_of_unit adds
// them up later.
template <int UNITS, int PER, int WANTED, int N>
void sum_over_units(thread float (&values)[UNITS * PER]) {
#pragma clang loop unroll(full)
  for (int units = UNITS / 2; units >= 1; units /= 2)
#pragma clang loop unroll(full)
    for (int n = 0; n < units * PER; ++n)
      if ((WANTED >> (n % PER)) & 1) values[n] += simd_shuffle_xor(values[n + units * PER], ushort(units * N));
}

// Return the sum of `value` over the N lanes (a power of two) of a unit. All these lanes get the sum.
template <int N>
float sum_over_lanes(float value) {
#pragma clang loop unroll(full)
  for (int distance = N / 2; distance >= 1; distance /= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}

// --- Layer normalisation ---
//
// The kernels call the functions below for every cell. For a cell without a norm they do nothing: the array norm_eps,
// from which norm_of_lane makes what a lane needs, is then `absent`, and each function has an overload for the type
// Absent. fused_norm.metal has the overloads for the other cells, with the names of the parameters.

// Without a norm (the array norm_eps is absent), return `absent` in place of what a lane needs for it. The other
// parameters are those of the overload in fused_norm.metal.
template <class Cell, int H, class Arrays>
Absent norm_of_lane(Absent, thread const Arrays&, int, int, int, bool, uint, threadgroup float4*) { return absent; }

// norm_size returns the size of the threadgroup memory that a norm needs, norm_numbers what its backward step reads.
// Without a norm these are 0 and nothing.
template <class Cell, int H, int ROWS> int norm_size(Absent) { return 0; }
template <int ROWS> Absent norm_numbers(Absent) { return absent; }

// Without a norm of the product, leave the sums of the product unchanged. The parameters without a name are those of
// the overload in fused_norm.metal; Absent stands for what a norm needs.
template <class Cell, int H, int ROWS, int SLOTS>
void normalise(Absent, int, thread float (&)[ROWS], thread float (&)[ROWS][SLOTS]) {}

// Without a norm of c, leave the states unchanged. The parameters without a name are those of the overload in
// fused_norm.metal; Absent stands for what a norm needs.
template <class Cell, int H, int ROWS>
void normalise_states(
    Absent, bool, thread const float (&)[ROWS], float, thread float (&)[ROWS], thread float (&)[ROWS],
    thread float (&)[ROWS]) {}

// Without a norm, read nothing for it. The parameters without a name are those of the overload in fused_norm.metal;
// Absent stands for what a norm needs.
template <class Cell, int ROWS, class Index, class Arrays>
void read_norm(thread const Arrays&, thread const Item<Cell, Index> (&)[ROWS], Index, int, Absent) {}

// Without a norm of c, leave the gradient of c unchanged. The parameters without a name are those of the overload in
// fused_norm.metal; Absent stands for what a norm needs.
template <class Cell, int H, int ROWS, class Index, class Arrays>
void states_backward(
    Absent, Absent, thread const Arrays&, int, float, thread const Item<Cell, Index> (&)[ROWS],
    thread const StepNumbers<Cell> (&)[ROWS], thread const float (&)[ROWS][Cell::CARRIED + 1],
    thread float (&)[ROWS]) {}

// Run the cell of one lane in reverse. The parameters without a name are for cells with a norm. lane: the lane's number
// in its unit. p: its constant (a peephole weight, or bhn). limit: the limit of c. after: c after the step. numbers:
// what the step read. dc: on entry the gradient of c from later steps, on return that of c before the step. item.d and
// item.past change as `d` and `dh` of Lanes<Cell>::backward do. An LSTM (CARRIED is 1) needs the cotangent of c; a GRU
// (CARRIED is 0) gets its candidate's recurrent product q in the same parameter.
template <class Cell, class Index>
void unit_backward(
    Absent, int, int lane, float p, float limit, float after, thread const StepNumbers<Cell>& numbers,
    thread Item<Cell, Index>& item, thread float& dc) {
  constexpr int C = Cell::CARRIED;
  const float dc_or_q = C > 0 ? numbers.ds[C] : numbers.u[0];
  Lanes<Cell>::backward(
      lane, item.y, p, numbers.keep * item.states[C], dc_or_q, after, limit, item.past, dc, item.d);
}

// Write one number of the operand of the next product. With a norm of the products, products_backward does this
// instead.
template <class Cell> void write_operand(Absent, threadgroup float& operand, float value) { operand = value; }

// Without a norm of the product, do nothing: the gradients of the products are known, and write_operand has written
// them. The parameters without a name are those of the overload in fused_norm.metal; Absent stands for what a norm
// needs.
template <class Cell, int H, int ROW, class S, int ROWS, class Index, class Arrays>
void products_backward(
    Absent, Absent, thread const Arrays&, int, int, int, thread const Item<Cell, Index> (&)[ROWS],
    threadgroup float4*) {}
