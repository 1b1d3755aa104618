// The recurrent product of the kernels that run all time steps in one launch, divided among lanes (the 32 threads of a
// simdgroup): which lane has which weights, and how lanes add up their sums.
//
// LANES adjacent lanes (4, or 1 for the plain RNN cell) share a hidden unit. GROUP = LANES * UNITS adjacent lanes form
// a group, which computes UNITS units: lane s of a group is lane s % LANES of unit s / LANES. To divide the product
// among the lanes of a group, each row of weights is cut into runs of 4 numbers. Lane s multiplies the runs s, s +
// GROUP, ... of the rows of all units of its group. Wh multiplies a vector, the operand. Only one lane of a group reads
// a number of the operand; it multiplies this number by the weights of UNITS units and all gates. Then the lanes add up
// their sums.
//
// A lane has an array of partial sums, one for each unit and gate of its group. An index of this array is called a
// slot. Slot n belongs to unit (n / GATES) ^ (the lane's own unit), an exclusive or. So the sums of a lane's own unit
// are in its first slots. If two lanes exchange sums, both send the same slots and add to the same slots:
// simd_shuffle_xor(x, n) returns the x of the lane whose number is (the lane's own number) ^ n.
//
// Lanes<Cell>, in fused_lstm.metal, fused_gru.metal and fused_rnn.metal, says how the lanes of a unit compute a step:
//   LANES, WRITER     the number of lanes of a unit; the lane that has the unit's state and writes it
//   TWO_PRODUCTS      whether a step has two products, one after the other (a GRU whose reset comes before the product)
//   FIRST             the gates of the step's first product, one bit per gate
//   gate_block(lane)  the lane's block of H numbers in z, gates and dz; -1 for a lane without a gate
//   operand_block(lane)   the block that a lane writes in the backward product's operand, or -1
//   slot_block(n, lane)   the block of Wh whose product slot n of the lane's own unit sums
//   constant_of       reads a lane's constant (its peephole weight, or bhn), once per launch
//   sum_of_unit<WANTED>   sums over the lanes of a unit, for the gates whose bit is set in WANTED
//   forward, backward one step; each lane computes its own gate
// fused.metal explains the other names.
template <class Cell> struct Lanes;

// The number of registers that a lane needs if LANES lanes divide COUNT values of a unit among themselves; at least 1.
template <int COUNT, int LANES>
constant constexpr int REGISTERS_OF = SIZE_FOR<(COUNT + LANES - 1) / LANES>;

// How many runs (4 neighbouring numbers) each lane has, if GROUP lanes divide LENGTH numbers among themselves. The
// division is rounded up: zeros fill the last runs.
template <int LENGTH, int GROUP>
constant constexpr int RUNS_OF = (LENGTH + 4 * GROUP - 1) / (4 * GROUP);

// How many weights a lane has. GROUP lanes divide each of SLOTS rows of LENGTH weights among themselves: SPAN
// neighbouring weights belong to one lane, the next SPAN weights to the next lane, and so on. So a lane has RUNS runs
// of 4 neighbouring weights in each row, stored as COUNT vectors of type V. fused_quantized.metal specializes this
// struct for quantized weights.
template <class V, int LENGTH, int GROUP, int SLOTS>
struct LaneShare {
  enum { SPAN = 4, RUNS = RUNS_OF<LENGTH, GROUP>, COUNT = RUNS * SLOTS };
};

// Return the position in threadgroup memory of number n of an operand, a vector that GROUP lanes share. Each lane
// multiplies SPAN neighbouring numbers of it: 4, or more for quantized weights. The memory holds the first 4 numbers of
// each lane, lane after lane, then the next 4 numbers of each lane, and so on. If SPAN is 4, number n is at position n.
template <int SPAN, int GROUP>
int place_in_row(int n) { return SPAN == 4 ? n : (n % SPAN / 4 * GROUP + n / SPAN) * 4 + n % 4; }

// SQUASHED: whether the activation of gate number GATE is tanh or sigmoid. SQUASHES: whether this is true for each of
// the first GATES gates (at most 4). Then lanes with different gates need no branch, because the function `squash`
// computes tanh and sigmoid with the same instructions. OPTIONS: the options of a cell as one integer.
template <int OPTIONS, int GATE>
constant constexpr bool SQUASHED = activation_of(OPTIONS, GATE) == TANH || activation_of(OPTIONS, GATE) == SIGMOID;
template <int OPTIONS, int GATES>
constant constexpr bool SQUASHES = SQUASHED<OPTIONS, 0> && (GATES < 2 || SQUASHED<OPTIONS, 1>) &&
                                   (GATES < 3 || SQUASHED<OPTIONS, 2>) && (GATES < 4 || SQUASHED<OPTIONS, 3>);

// Return whether the activation of the lane's own gate is tanh. gate: the gate's number, less than GATES, which differs
// from lane to lane. The function compares it with constants, because shifting OPTIONS by this number would take more
// instructions.
template <int OPTIONS, int GATES>
bool is_tanh(int gate) {
  bool found = false;
  UNROLL for (int n = 0; n < GATES; ++n) found = found || (activation_of(OPTIONS, n) == TANH && gate == n);
  return found;
}

// Return the activation of x for the lane's own gate. gate: the gate's number, less than GATES. If all these gates have
// the activation tanh or sigmoid, `squash` computes both by one formula, so that the lanes need no branch.
template <int OPTIONS, int GATES>
float activate_own(int gate, float x) {
  if constexpr (SQUASHES<OPTIONS, GATES>) return squash(is_tanh<OPTIONS, GATES>(gate), x);
  else return activate(activation_of(OPTIONS, gate), x);
}

// Return the derivative of the activation of the lane's own gate. gate: the gate's number. y: its value after the
// activation. For tanh the derivative is 1 - y^2 = (1 - y) (y + 1), for sigmoid (1 - y) y: one formula, so that the
// lanes need no branch.
template <int OPTIONS, int GATES>
float slope_own(int gate, float y) {
  if constexpr (SQUASHES<OPTIONS, GATES>) return (1.0f - y) * (y + (is_tanh<OPTIONS, GATES>(gate) ? 1.0f : 0.0f));
  else return slope(activation_of(OPTIONS, gate), y);
}

// Add this lane's part of a product to sums[r][slot]: row number `slot` of the lane's weights, times vector r of the
// ROWS vectors in threadgroup memory. x: where the lane's first 4 numbers of vector 0 begin; the ROWS vectors are
// STRIDE float4 apart.
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
  UNROLL for (int run = 0; run < RUNS; ++run) {
    float4 operands[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) operands[r] = x[r * STRIDE + GROUP * run];
    UNROLL for (int v = 0; v < SLOTS; ++v) {
      if (!((WANTED >> (v % PER)) & 1)) continue;
      const int n = FROM + run * SLOTS + v;
      float4 weights;
      if (n < RESIDENT) weights = float4(resident[n]);
      else weights = float4(streamed[32 * n]);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        sums[r][v] += weights[0] * operands[r][0];
        sums[r][v] += weights[1] * operands[r][1];
        sums[r][v] += weights[2] * operands[r][2];
        sums[r][v] += weights[3] * operands[r][3];
      }
    }
  }
}

// Add up the partial sums of lanes that share a product: UNITS units of N lanes each. On entry a lane has PER sums (one
// per gate) for each of these units, its own unit first. In each round two lanes exchange sums. Each sends the second
// half of its sums, which belong to units of the other lane, and adds the received sums to its first half. On return
// the first PER of `values` are sums of the lane's own unit. The N lanes of a unit still have different parts of them;
// sum_of_unit adds these up later. WANTED: one bit per gate; sums of other gates are skipped.
template <int UNITS, int PER, int WANTED, int N>
void sum_over_units(thread float (&values)[UNITS * PER]) {
  UNROLL for (int units = UNITS / 2; units >= 1; units /= 2)
    UNROLL for (int n = 0; n < units * PER; ++n)
      if ((WANTED >> (n % PER)) & 1) values[n] += simd_shuffle_xor(values[n + units * PER], ushort(units * N));
}

// Return the sum of `value` over the N lanes that share a unit. All N lanes get the sum. N is a power of two.
template <int N>
float sum_over_lanes(float value) {
  UNROLL for (int distance = N / 2; distance >= 1; distance /= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}

// --- Layer normalisation ---
//
// The kernels call the functions below for every cell. These are the overloads for a cell without a norm; all but
// unit_backward and write_operand do nothing. Such a cell has `absent`, of type Absent, in place of the array norm_eps
// and of everything that is computed from it, and this type selects them. fused_norm.metal has the overloads for cells
// with a norm, which say what the functions do and name the parameters.

template <class Cell, int H, class Arrays>
Absent norm_of_lane(Absent, thread const Arrays&, int, int, int, bool, uint, threadgroup float4*) { return absent; }

template <class Cell, int H, int ROWS> int norm_size(Absent) { return 0; }
template <int ROWS> Absent norm_numbers(Absent) { return absent; }

template <class Cell, int H, int ROWS, int SLOTS>
void normalise(Absent, int, thread float (&)[ROWS], thread float (&)[ROWS][SLOTS]) {}

template <class Cell, int H, int ROWS>
void normalise_states(
    Absent, bool, thread const float (&)[ROWS], float, thread float (&)[ROWS], thread float (&)[ROWS],
    thread float (&)[ROWS]) {}

template <class Cell, int ROWS, class Index, class Arrays>
void read_norm(thread const Arrays&, thread const Item<Cell, Index> (&)[ROWS], Index, int, Absent) {}

template <class Cell, int H, int ROWS, class Index, class Arrays>
void states_backward(
    Absent, Absent, thread const Arrays&, int, float, thread const Item<Cell, Index> (&)[ROWS],
    thread const StepNumbers<Cell> (&)[ROWS], thread const float (&)[ROWS][Cell::CARRIED + 1],
    thread float (&)[ROWS]) {}

// Compute the gradients of one step of the lane's unit, for a cell without layer normalisation. Only the overload for
// cells with it reads the parameters that have no name here. lane: the lane's index among those that share its unit. p:
// its constant (a peephole weight, or bhn). limit: the limit of c. after: c after the step. numbers: the numbers that
// this step has read. dc: on entry the gradient of c from later steps, on return the gradient of c before the step.
// item.d: on return the gradient of the preactivation of the lane's gate. item.past: on entry the gradient of h, on
// return the part of it that bypasses the product. Lanes<Cell>::backward calls these two d and dh. It has one parameter
// for two uses, dc_or_q: an LSTM (CARRIED is 1) passes the cotangent of c there, a GRU (CARRIED is 0) its candidate's
// recurrent product q.
template <class Cell, class Index>
void unit_backward(
    Absent, int, int lane, float p, float limit, float after, thread const StepNumbers<Cell>& numbers,
    thread Item<Cell, Index>& item, thread float& dc) {
  constexpr int C = Cell::CARRIED;
  const float dc_or_q = C > 0 ? numbers.ds[C] : numbers.u[0];
  Lanes<Cell>::backward(
      lane, item.y, p, numbers.keep * item.states[C], dc_or_q, after, limit, item.past, dc, item.d);
}

// Write one number of the operand of the next product, for a cell without layer normalisation. (With a norm of the
// products, products_backward writes the operand instead.)
template <class Cell> void write_operand(Absent, threadgroup float& operand, float value) { operand = value; }

// (write_operand has already written the gradients of the products.)
template <class Cell, int H, int ROW, class S, int ROWS, class Index, class Arrays>
void products_backward(
    Absent, Absent, thread const Arrays&, int, int, int, thread const Item<Cell, Index> (&)[ROWS],
    threadgroup float4*) {}
