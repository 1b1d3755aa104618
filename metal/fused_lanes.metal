// The recurrent product of the whole-sequence kernels in lanes: who has which weights, and sums over lanes.
//
// LANES adjacent lanes (4; 1 of a plain cell) share a hidden unit; GROUP = LANES UNITS adjacent lanes share UNITS
// units: lane s of a group is lane s % LANES of unit s / LANES. The lanes of a group split every row of weights that
// their units need into runs of 4: lane s has runs s, s + GROUP, ... So each number of the vector is read by one lane
// of a group, times UNITS GATES weights, and the lanes add up their sums.
//
// A lane's slot n belongs to unit n / GATES ^ (its own unit): exclusive or, not plus. So in every addition the number
// that a lane gives and the number that it takes stand in the same slots of all lanes: one shuffle and one addition.
//
// What the lanes of a unit do with their sums is in Lanes<Cell>, of fused_lstm.metal, fused_gru.metal, fused_rnn.metal:
//   LANES, WRITER     the lanes of a unit; the one that has the unit's state and writes it
//   TWO_PRODUCTS      whether a step has two products, one after the other; FIRST: the gates of the first, by bits
//   gate_block(lane)  the H-block of z, gates, dz that a lane has, or -1
//   operand_block(lane)   backward, the H-block of the product's operand that a lane writes, or -1
//   slot_block(n, lane)   the H-block of Wh whose row a lane has in slot n of its own unit
//   constant          a lane's own number of what a unit reads once per launch
//   sum_of_unit       sums over the lanes of a unit
//   forward, backward a step, each lane its own gate
template <class Cell> struct Lanes;

template <int LENGTH, int GROUP>
constant constexpr int RUNS_OF = (LENGTH + 4 * GROUP - 1) / (4 * GROUP);

// A lane's share of SLOTS rows of LENGTH weights in COUNT vectors V: of every row SPAN neighbours at a time, RUNS runs
// of 4 in all. fused_quantized.metal says it of quantized weights.
template <class V, int LENGTH, int GROUP, int SLOTS>
struct LaneShare {
  enum { SPAN = 4, RUNS = RUNS_OF<LENGTH, GROUP>, COUNT = RUNS * SLOTS };
};

// Return the place in threadgroup memory of number n of a row that lanes share in spans: lane after lane a run of each.
template <int SPAN, int GROUP>
int place_in_row(int n) { return SPAN == 4 ? n : (n % SPAN / 4 * GROUP + n / SPAN) * 4 + n % 4; }

// Whether one `squash` can compute the first GATES gates, each in its own lane.
template <int OPTIONS, int GATE>
constant constexpr bool SQUASHED = activation_of(OPTIONS, GATE) == TANH || activation_of(OPTIONS, GATE) == SIGMOID;
template <int OPTIONS, int GATES>
constant constexpr bool SQUASHES = SQUASHED<OPTIONS, 0> && (GATES < 2 || SQUASHED<OPTIONS, 1>) &&
                                   (GATES < 3 || SQUASHED<OPTIONS, 2>) && (GATES < 4 || SQUASHED<OPTIONS, 3>);

// Return whether a lane's gate is a tanh, by comparisons with constants: cheaper than to shift OPTIONS by the lane.
template <int OPTIONS, int GATES>
bool is_tanh(int gate) {
  bool found = false;
#pragma clang loop unroll(full)
  for (int n = 0; n < GATES; ++n) found = found || (activation_of(OPTIONS, n) == TANH && gate == n);
  return found;
}

// Return the activation of a lane's own gate, one of the first GATES.
template <int OPTIONS, int GATES>
float activate_own(int gate, float x) {
  if constexpr (SQUASHES<OPTIONS, GATES>) return squash(is_tanh<OPTIONS, GATES>(gate), x);
  else return activate(activation_of(OPTIONS, gate), x);
}

// Return its slope, from its output y: 1 - y^2 = (1 - y)(y + 1) of a tanh, (1 - y) y of a sigmoid.
template <int OPTIONS, int GATES>
float slope_own(int gate, float y) {
  if constexpr (SQUASHES<OPTIONS, GATES>) return (1.0f - y) * (y + (is_tanh<OPTIONS, GATES>(gate) ? 1.0f : 0.0f));
  else return slope(activation_of(OPTIONS, gate), y);
}

// Add to sums[row][slot] a lane's share of the product of SLOTS rows of weights with ROWS vectors x in threadgroup
// memory, STRIDE apart. The lane has one vector of weights per run and slot, from its vector FROM on: below RESIDENT in
// registers, the others are read. Of slot v, product v % PER of a unit counts where its bit in WANTED is set.
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

// Add up a group's numbers for UNITS units of N lanes, PER of each unit: a lane gets those of its own unit, summed over
// the lanes that have its place within their units. Halves the slots in each turn: a lane hands the upper half, which
// belongs to units on the other side, to the lane there and adds what it gets to its lower half.
template <int UNITS, int PER, int WANTED, int N>
void sum_over_units(thread float (&values)[UNITS * PER]) {
#pragma clang loop unroll(full)
  for (int units = UNITS / 2; units >= 1; units /= 2)
#pragma clang loop unroll(full)
    for (int n = 0; n < units * PER; ++n)
      if ((WANTED >> (n % PER)) & 1) values[n] += simd_shuffle_xor(values[n + units * PER], ushort(units * N));
}

// Return the sum of a number over the N lanes of a unit, in all of them.
template <int N>
float sum_over_lanes(float value) {
#pragma clang loop unroll(full)
  for (int distance = N / 2; distance >= 1; distance /= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}
