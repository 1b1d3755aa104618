// Layer normalisation of a cell written by the user, in the kernels that run all time steps in one launch and divide
// the product among lanes. Each simdgroup adds up its own numbers and writes a Pair of sums to threadgroup memory.
// After a barrier the lanes read the pairs of all simdgroups. The functions for this are in fused_norm.metal;
// norm.metal describes the arrays.
//
//   y = (x - mean) / sqrt(variance + eps), then y scale + shift; x: the recurrent product, or its sum with the input's
//       part
//
//   H            the number of hidden units
//   LANES        how many lanes share a unit: 4. They divide the GATES gates of the unit among themselves
//   COUNT        how many gates a lane has at most: number j of a lane belongs to gate LANES j + lane
//   counts       0 for a number of a lane that has no such gate or no unit, else 1
//   ROWS         the batch items of a threadgroup, counted by r
//   x            the numbers to normalise
//   sums         the recurrent products. With Lanes<Cell>::SCATTERS a lane has the product of its own gate only, in
//                sums[r][0]; otherwise all lanes have the products of all gates
//   EVERY        every EVERY-th lane has numbers of the same norm: LANES if each gate has its own norm, else 1 (all)
//   Norm<Cell>   IS_EACH: each gate has its own norm; IS_SUM: the product plus the input's part is normalised
//   P = Peers    which simdgroups' sums a lane reads (fused_norm.metal)
//   M = OwnNormMemory   the layout of the sums in threadgroup memory
//   Cell         the generated struct of the cell
//   a, Index, S  the struct of all arrays; the type that counts elements; the dtype of the arrays
//   Sweep        what a launch processes (fused.metal)

// The numbers that a lane needs for the norm of its COUNT gates. They do not change during a launch.
//   scale, shift  scale and shift of the norm, for each gate of the lane and its unit
//   counts        1 if the lane has a gate and a unit for this number, else 0
//   part          the part of all units that the simdgroup has whose sums the lane reads first
//   index         the lane's number in the threadgroup
//   memory        the threadgroup memory in which simdgroups exchange their sums
template <int COUNT>
struct OwnNormLane {
  float scale[COUNT], shift[COUNT], counts[COUNT], eps, part;
  uint index;
  threadgroup float4* memory;
};

// The layout of the sums in threadgroup memory, in vectors of 4 floats. A norm has [EVERY][PLACES][ROWS] pairs of
// floats, one place per simdgroup. Two pairs fill a vector, so a norm takes SIZE vectors: half the pairs, rounded up.
// If each gate is normalised by itself, a lane computes COUNT norms one after the other, each with its own SIZE
// vectors. Otherwise all numbers of a lane are in one norm. END: the vectors of all norms.
template <class Cell, int H, int ROWS>
struct OwnNormMemory {
  enum { LANES = Lanes<Cell>::LANES, COUNT = REGISTERS_OF<Cell::GATES, LANES> };
  enum { IS_EACH = Norm<Cell>::IS_EACH, EVERY = IS_EACH ? int(LANES) : 1 };
  enum { SIZE = (EVERY * Peers<H, LANES, EVERY>::PLACES * ROWS + 1) / 2, END = (IS_EACH ? int(COUNT) : 1) * SIZE };
};

// Return the size of the threadgroup memory for the sums, in vectors of 4 floats, if the call has a norm. The
// parameter, the array norm_eps, selects this overload: a call without a norm passes Absent.
template <class Cell, int H, int ROWS, class E> int own_norm_size(E) { return OwnNormMemory<Cell, H, ROWS>::END; }

// Return the numbers that a lane needs for the norm of its gates. eps: the array norm_eps, with one number. lane: the
// lane's index among those that share its unit. real: whether the lane has a unit. If a lane has fewer gates than
// COUNT, it reads the scale of the last gate, and counts[j] is 0. M is only used for members that do not depend on the
// number of batch items, so this number is 1.
template <class Cell, int H, class E, class Arrays>
OwnNormLane<OwnNormMemory<Cell, H, 1>::COUNT> own_norm_of_lane(
    E eps, thread const Arrays& a, int direction, int lane, int unit, bool real, uint index,
    threadgroup float4* memory) {
  using M = OwnNormMemory<Cell, H, 1>;
  using P = Peers<H, M::LANES, M::EVERY>;
  OwnNormLane<M::COUNT> norm = {};
#pragma clang loop unroll(full)
  for (int j = 0; j < M::COUNT; ++j) {
    const int gate = min(M::LANES * j + lane, int(Cell::GATES) - 1);
    const long at = (long(Cell::GATES) * direction + gate) * H + unit;
    norm.scale[j] = value_at(a.norm_scale, at, 1.0f), norm.shift[j] = value_at(a.norm_shift, at, 0.0f);
    norm.counts[j] = real && M::LANES * j + lane < Cell::GATES ? 1.0f : 0.0f;
  }
  norm.eps = float(eps[0]), norm.part = P::part_of(int(P::first(index % 32)));
  norm.index = index, norm.memory = memory;
  return norm;
}

// take_number copies number j of each batch item from x to `one`, an array with one number per batch item; put_number
// copies them back. The functions of fused_norm.metal need such an array.
template <int ROWS, int COUNT>
void take_number(thread const float (&x)[ROWS][COUNT], int j, thread float (&one)[ROWS]) {
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) one[r] = x[r][j];
}
template <int ROWS, int COUNT>
void put_number(thread const float (&one)[ROWS], int j, thread float (&x)[ROWS][COUNT]) {
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) x[r][j] = one[r];
}

// Replace x, a lane's COUNT numbers (one per gate) for each batch item, by (x - mean) / sqrt(variance + eps). Numbers
// for which the lane has no gate or no unit (norm.counts is 0) must be 0. If each gate is normalised by itself
// (IS_EACH), every number of a lane belongs to another norm, whose sums take M::SIZE vectors of memory. Otherwise all
// numbers belong to one norm, and a lane first adds up its own numbers.
template <class Cell, int H, int ROWS, int COUNT>
void standardise_gates(thread const OwnNormLane<COUNT>& norm, thread float (&x)[ROWS][COUNT]) {
  using M = OwnNormMemory<Cell, H, ROWS>;
  using P = Peers<H, M::LANES, M::EVERY>;
  if constexpr (M::IS_EACH != 0) {
#pragma clang loop unroll(full)
    for (int j = 0; j < COUNT; ++j) {
      float one[ROWS];
      take_number(x, j, one);
      standardise<H, M::LANES, M::EVERY, 1>(
          one, norm.counts[j], norm.part, norm.eps, norm.index, norm.memory + j * M::SIZE);
      put_number(one, j, x);
    }
  } else {
    constexpr int GATES = Cell::GATES;
    Pair own[ROWS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      float sum = 0.0f, squares = 0.0f;
#pragma clang loop unroll(full)
      for (int j = 0; j < COUNT; ++j) sum += x[r][j];
      const float mean = simd_sum(sum) * (P::share(norm.index / 32) * (1.0f / GATES));
#pragma clang loop unroll(full)
      for (int j = 0; j < COUNT; ++j) {
        const float away = x[r][j] - mean * norm.counts[j];
        squares += away * away;
      }
      own[r] = float2(mean, simd_sum(squares) * P::squares(GATES * H));
    }
    moments_of_all<P, 1>(own, norm.part, norm.eps, norm.index, norm.memory);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r)
#pragma clang loop unroll(full)
      for (int j = 0; j < COUNT; ++j) x[r][j] = (x[r][j] - own[r][0]) * own[r][1];
  }
}

// Normalise the recurrent products of all gates or, if IS_SUM, the sums of these products and the input's parts
// numbers[r].z. On return `sums` has the results; if they contain z, z becomes 0. lane: the lane's index among those
// that share its unit. With SCATTERS a lane has the product of one gate, in sums[r][0]. Otherwise it has the products
// of all gates: it normalises those of its own gates, and of_lane sends the results to all lanes of the unit. The loops
// over k compare the lane's number with constants, so that the compiler knows every register index.
template <class Cell, int H, int ROWS, class Numbers, int SIZE, int COUNT>
void normalise_gates(
    thread const OwnNormLane<COUNT>& norm, int lane, thread Numbers (&numbers)[ROWS],
    thread float (&sums)[ROWS][SIZE]) {
  constexpr int LANES = Lanes<Cell>::LANES, GATES = Cell::GATES;
  float x[ROWS][COUNT];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r)
#pragma clang loop unroll(full)
    for (int j = 0; j < COUNT; ++j) {
      float product = sums[r][Lanes<Cell>::SCATTERS ? 0 : LANES * j];
#pragma clang loop unroll(full)
      for (int k = 1; k < LANES && !Lanes<Cell>::SCATTERS; ++k)
        product = lane == k ? sums[r][min(LANES * j + k, GATES - 1)] : product;
      x[r][j] = norm.counts[j] == 0.0f ? 0.0f : Norm<Cell>::IS_SUM ? product + numbers[r].z[j] : product;
    }
  standardise_gates<Cell, H>(norm, x);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r)
#pragma clang loop unroll(full)
    for (int j = 0; j < COUNT; ++j) {
      const float result = x[r][j] * norm.scale[j] + norm.shift[j];
      if (Norm<Cell>::IS_SUM) numbers[r].z[j] = 0.0f;
      if (Lanes<Cell>::SCATTERS) sums[r][0] = result;
#pragma clang loop unroll(full)
      for (int k = 0; k < LANES && LANES * j + k < GATES && !Lanes<Cell>::SCATTERS; ++k)
        sums[r][LANES * j + k] = of_lane<LANES>(result, k);
    }
}

// --- Backward ---
//
// The backward kernel reads two arrays that MLX has computed for all steps, and writes one:
//   norm_y  [T, B, D G H]: the normalised numbers, without scale and shift
//   norm_r  [T, B, D] or, for a norm of each gate, [T, B, D G]: 1 / sqrt(variance + eps)
//   d_product [., B, D G H]: the gradient of the recurrent product, for the steps of the launch

// The numbers that a lane needs at one backward step for the norms of its COUNT gates, for each of ROWS batch items. y:
// the normalised numbers. r: 1 / sqrt(variance + eps) of their norms. d: at first the gradients of the norms' results,
// then those of the products.
template <int ROWS, int COUNT>
struct OwnNormNumbers {
  float y[ROWS][COUNT], r[ROWS][COUNT], d[ROWS][COUNT];
};

// Return empty OwnNormNumbers. The parameter selects this overload for cells with a norm; other cells pass Absent.
template <int ROWS, int COUNT>
OwnNormNumbers<ROWS, COUNT> own_norm_numbers(thread const OwnNormLane<COUNT>&) { return {}; }

// Read the normalised numbers y and the factors r of step n, for ROWS batch items. now: the offset of the step's first
// element in an array [T, B, D H]. item[r]: the offset of the unit's element of batch item r in an array [B, D H].
// group: the threadgroup's index along the batch. lane: the lane's index among those that share its unit. at: the
// position of this step and item in an array [T, B, D].
template <class Cell, int H, int ROWS, int COUNT, class Index, class Arrays>
void read_gates(
    thread const Arrays& a, thread const Sweep& sweep, int n, Index now, thread const Index (&item)[ROWS], uint group,
    int lane, int unit, thread OwnNormNumbers<ROWS, COUNT>& numbers) {
  constexpr int LANES = Lanes<Cell>::LANES, GATES = Cell::GATES;
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group) * ROWS + r, sweep.B - 1);
    const Index at = (Index(time_of(sweep, n)) * sweep.B + b) * sweep.D + sweep.direction;
    load_blocks<GATES, LANES, H>(a.norm_y, now + item[r], lane, unit, numbers.y[r]);
#pragma clang loop unroll(full)
    for (int j = 0; j < COUNT; ++j)
      numbers.r[r][j] = a.norm_r[Norm<Cell>::IS_EACH ? at * GATES + min(LANES * j + lane, GATES - 1) : at];
  }
}

// Copy the gradients d of batch item number r to `numbers`, from which own_products_backward computes the gradients of
// the products. d holds the gradients of preactivations; the first ones, one per gate of the lane, are those of the
// norm's results, and only these are copied. If the item has ended (not `live`), they become 0.
template <int ROWS, int COUNT, int SIZE>
void keep_gradients(bool live, int r, thread const float (&d)[SIZE], thread OwnNormNumbers<ROWS, COUNT>& numbers) {
#pragma clang loop unroll(full)
  for (int j = 0; j < COUNT; ++j) numbers.d[r][j] = live ? d[j] : 0.0f;
}

// Replace numbers.d, the gradients of the normalised numbers y, by the gradients of the numbers before the norm: r (d -
// (sum of d) / N - y (sum of d y) / N), where N numbers are normalised together. Gradients for which the lane has no
// gate or no unit must be 0. If each gate is normalised by itself (IS_EACH), every number of a lane belongs to another
// norm. The sums are divided by COPIES, too, because sums_of_all returns COPIES times the sums.
template <class Cell, int H, int ROWS, int COUNT>
void standardise_gates_backward(thread const OwnNormLane<COUNT>& norm, thread OwnNormNumbers<ROWS, COUNT>& numbers) {
  using M = OwnNormMemory<Cell, H, ROWS>;
  using P = Peers<H, M::LANES, M::EVERY>;
  if constexpr (M::IS_EACH != 0) {
#pragma clang loop unroll(full)
    for (int j = 0; j < COUNT; ++j) {
      float d[ROWS], y[ROWS], factor[ROWS];
      take_number(numbers.d, j, d), take_number(numbers.y, j, y), take_number(numbers.r, j, factor);
      standardise_backward<H, M::LANES, M::EVERY, H>(d, y, factor, norm.index, norm.memory + j * M::SIZE);
      put_number(d, j, numbers.d);
    }
  } else {
    Pair own[ROWS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      Pair sum = 0.0f;
#pragma clang loop unroll(full)
      for (int j = 0; j < COUNT; ++j) sum += float2(numbers.d[r][j], numbers.d[r][j] * numbers.y[r][j]);
      own[r] = float2(simd_sum(sum[0]), simd_sum(sum[1]));
    }
    sums_of_all<P, 1>(own, norm.index, norm.memory);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r)
#pragma clang loop unroll(full)
      for (int j = 0; j < COUNT; ++j) {
        const float sums = own[r][0] + numbers.y[r][j] * own[r][1];
        numbers.d[r][j] = (numbers.d[r][j] - sums * (1.0f / (int(Cell::GATES) * H * P::COPIES))) * numbers.r[r][j];
      }
  }
}

// Compute the gradients of the recurrent products from the gradients of the norms' results in numbers.d. Write them to
// a.d_product, and to `operands` in threadgroup memory, where the product with Wh reads them. `operands` has one row
// per batch item, of ROW vectors of 4 floats. now: the offset of the step's first element in an array [T, B, D H].
// item[r]: the offset of the unit's element of batch item r in an array [B, D H]. earlier: how many elements of an
// array [T, B, D H] come before the launch's first time index. The output d_product begins at this time index, so
// `earlier` is subtracted. lane: the lane's index among the LANES lanes that share the unit.
template <class Cell, int H, int ROW, class S, int ROWS, int COUNT, class Index, class Arrays>
void own_products_backward(
    thread const OwnNormLane<COUNT>& norm, thread OwnNormNumbers<ROWS, COUNT>& numbers, thread const Arrays& a,
    Index now, Index earlier, thread const Index (&item)[ROWS], int lane, int unit, threadgroup float4* operands) {
  constexpr int LANES = Lanes<Cell>::LANES;
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r)
#pragma clang loop unroll(full)
    for (int j = 0; j < COUNT; ++j)
      numbers.d[r][j] = norm.counts[j] == 0.0f ? 0.0f : numbers.d[r][j] * norm.scale[j];
  standardise_gates_backward<Cell, H>(norm, numbers);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r)
#pragma clang loop unroll(full)
    for (int j = 0; j < COUNT; ++j) {
      if (norm.counts[j] == 0.0f) continue;
      const S result = S(numbers.d[r][j]);
      a.d_product[place_of<Cell::GATES, H>(now + (item[r] - earlier), LANES * j + lane, unit)] = result;
      number_at(operands, r * ROW, (LANES * j + lane) * H + unit) = float(result);
    }
}
