// The recurrent product of the whole-sequence kernels, distributed over lanes: which lane has which weights, and sums
// over lanes.
//
// LANES adjacent lanes (4, or 1 for the plain RNN cell) share a hidden unit. A group of GROUP = LANES UNITS adjacent
// lanes shares UNITS units: lane s of a group is lane s % LANES of unit s / LANES. Each row of weights is divided into
// runs of 4 numbers. Lane s has the runs s, s + GROUP, ... of the rows of all units of its group. So only one lane of a
// group reads a number of the vector, and multiplies it by UNITS GATES weights. Then the lanes add up their sums.
//
// A lane has one sum per row, in slots: slot n belongs to unit (n / GATES) ^ (the lane's own unit), an exclusive or.
// When lanes exchange sums, all of them send the same slot number and add to the same slot number. So an addition takes
// one shuffle, and no lane has to select a slot.
//
// Lanes<Cell>, in fused_lstm.metal, fused_gru.metal and fused_rnn.metal, defines how the lanes of a unit compute a
// step:
//   LANES, WRITER     the number of lanes of a unit; the lane that has the unit's state and writes it
//   TWO_PRODUCTS      whether a step has two products, one after the other; FIRST: the first product's gates, as bits
//   gate_block(lane)  the H-block of z, gates, dz that a lane has, or -1
//   operand_block(lane)   in the backward pass, the H-block of the product's operand that a lane writes, or -1
//   slot_block(n, lane)   the H-block of Wh whose row a lane has in slot n of its own unit
//   constant_of       reads a lane's constant (its peephole weight, or bhn), once per launch
//   sum_of_unit       sums over the lanes of a unit
//   forward, backward one step; each lane computes its own gate
template <class Cell> struct Lanes;

template <int LENGTH, int GROUP>
constant constexpr int RUNS_OF = (LENGTH + 4 * GROUP - 1) / (4 * GROUP);

// A lane's share of SLOTS rows of LENGTH weights, stored as COUNT vectors of type V. Of each row the lane has RUNS
// runs of 4 neighbouring numbers. SPAN: how many numbers follow one another before the other lanes' numbers come.
// fused_quantized.metal specializes this struct for quantized weights.
template <class V, int LENGTH, int GROUP, int SLOTS>
struct LaneShare {
  enum { SPAN = 4, RUNS = RUNS_OF<LENGTH, GROUP>, COUNT = RUNS * SLOTS };
};

// Return the position in threadgroup memory of number n of a vector. Each lane of a group has SPAN neighbouring
// numbers. Memory holds the first 4 numbers of every lane, lane after lane, then the next 4 of every lane, and so on.
template <int SPAN, int GROUP>
int place_in_row(int n) { return SPAN == 4 ? n : (n % SPAN / 4 * GROUP + n / SPAN) * 4 + n % 4; }

// SQUASHED: whether the function `squash` can compute the activation of gate GATE, which must be tanh or sigmoid.
// SQUASHES: whether `squash` can compute the activations of the first GATES gates, one gate per lane.
template <int OPTIONS, int GATE>
constant constexpr bool SQUASHED = activation_of(OPTIONS, GATE) == TANH || activation_of(OPTIONS, GATE) == SIGMOID;
template <int OPTIONS, int GATES>
constant constexpr bool SQUASHES = SQUASHED<OPTIONS, 0> && (GATES < 2 || SQUASHED<OPTIONS, 1>) &&
                                   (GATES < 3 || SQUASHED<OPTIONS, 2>) && (GATES < 4 || SQUASHED<OPTIONS, 3>);

// Return whether the activation of a lane's gate is tanh. The function compares the gate's number with constants,
// because shifting OPTIONS by this number would take more instructions.
template <int OPTIONS, int GATES>
bool is_tanh(int gate) {
  bool found = false;
#pragma clang loop unroll(full)
  for (int n = 0; n < GATES; ++n) found = found || (activation_of(OPTIONS, n) == TANH && gate == n);
  return found;
}

// Return the activation of x for a lane's own gate, which is one of the first GATES gates.
template <int OPTIONS, int GATES>
float activate_own(int gate, float x) {
  if constexpr (SQUASHES<OPTIONS, GATES>) return squash(is_tanh<OPTIONS, GATES>(gate), x);
  else return activate(activation_of(OPTIONS, gate), x);
}

// Return the derivative of the activation of a lane's own gate. y is the gate. The derivative is
// 1 - y^2 = (1 - y)(y + 1) for tanh, and (1 - y) y for sigmoid.
template <int OPTIONS, int GATES>
float slope_own(int gate, float y) {
  if constexpr (SQUASHES<OPTIONS, GATES>) return (1.0f - y) * (y + (is_tanh<OPTIONS, GATES>(gate) ? 1.0f : 0.0f));
  else return slope(activation_of(OPTIONS, gate), y);
}

// Add a lane's part of a product to sums[r][slot]: r stands for one of ROWS vectors x in threadgroup memory, STRIDE
// apart, and a slot for one row of weights. The lane has a vector of 4 weights for each slot, and again for each of
// its RUNS runs of 4 numbers, from vector FROM on. Vectors with an index below RESIDENT are in registers; the others
// are read. Slot v is skipped unless bit v % PER of WANTED is set, because not every product needs all gates.
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

// Sum the slots over the lanes of a group of UNITS units with N lanes each. Every lane begins with PER slots for each
// unit. In each round it sends the upper half of its slots, which belong to units of the other lane, and adds what it
// receives to the lower half. At the end it has only the slots of its own unit. Each is a sum over one lane of every
// unit; the N lanes of a unit are added up later.
template <int UNITS, int PER, int WANTED, int N>
void sum_over_units(thread float (&values)[UNITS * PER]) {
#pragma clang loop unroll(full)
  for (int units = UNITS / 2; units >= 1; units /= 2)
#pragma clang loop unroll(full)
    for (int n = 0; n < units * PER; ++n)
      if ((WANTED >> (n % PER)) & 1) values[n] += simd_shuffle_xor(values[n + units * PER], ushort(units * N));
}

// Return the sum of `value` over the N lanes of a unit. All these lanes get the sum.
template <int N>
float sum_over_lanes(float value) {
#pragma clang loop unroll(full)
  for (int distance = N / 2; distance >= 1; distance /= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}
