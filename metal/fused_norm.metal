// Layer normalisation in the kernels that run all time steps in one launch and divide the product among lanes. It
// computes y = (x - mean) / sqrt(variance + eps), and the result y scale + shift. x is the recurrent product, the sum
// of this product and the input's part z, or c (norm.metal). fused.metal explains the names that all these kernels use.
//
// The numbers that are normalised together are spread over all simdgroups of a threadgroup. Each simdgroup adds up its
// own numbers and writes the sums to threadgroup memory. After a barrier every simdgroup adds up the sums of all
// simdgroups. So a norm takes one barrier per step. The last barrier of the step separates these reads from the writes
// of the next step. Each norm has its own memory.
//
// A simdgroup computes its own mean and the sum of squares of the distances from it, because E[x^2] - E[x]^2 loses all
// digits if the mean is large. For n_s numbers with the mean m_s and this sum v_s in simdgroup s, the variance of all N
// numbers is the sum of v_s + n_s (m_s - mean)^2, divided by N.
//
//   LANES        how many lanes share a unit: 4, or 1 for the plain RNN. Each lane has one gate
//   EVERY        every EVERY-th lane has numbers of the same norm: LANES if each gate has its own norm, else 1 (all)
//   index        a thread's number in the threadgroup; its simdgroup has the number index / 32
//   part         the part n_s / N of all units that a simdgroup has
//   P = Peers    the constants and functions that say which sums a lane reads
//   M = NormMemory   the layout of the sums in threadgroup memory
//   N = Norm<Cell>   what the cell normalises (norm.metal)

// Which simdgroups' sums a lane reads from threadgroup memory. A simdgroup has UNITS units, and PEERS of its lanes have
// numbers of the same norm. These lanes divide the sums of all SIMDGROUPS simdgroups among themselves: a lane reads the
// sums of every PEERS-th simdgroup, TURNS of them. EVERY: every EVERY-th lane has numbers of the same norm. The sums
// lie in memory as [EVERY][PLACES][ROWS] pairs of floats, for ROWS batch items; a pair has the two sums that a norm
// needs. PLACES: one place per simdgroup, and places with zeros up to a multiple of PEERS.
//
// IS_WHOLE: every simdgroup has UNITS units. REPEATS: PEERS is a multiple of the number of simdgroups, so that COPIES
// lanes read the sums of each simdgroup. IS_EVEN: all sums that are read stand for the same number of units.
template <int H, int LANES, int EVERY>
struct Peers {
  enum { UNITS = 32 / LANES, SIMDGROUPS = (H + UNITS - 1) / UNITS, PEERS = 32 / EVERY };
  enum { TURNS = (SIMDGROUPS + PEERS - 1) / PEERS, PLACES = PEERS * TURNS };
  enum { IS_WHOLE = H % UNITS == 0, REPEATS = IS_WHOLE && PEERS % SIMDGROUPS == 0 };
  enum { IS_EVEN = REPEATS || (IS_WHOLE && SIMDGROUPS == PLACES), COPIES = REPEATS ? PEERS / SIMDGROUPS : 1 };

  // Return the number of the simdgroup whose sums a lane (0 ... 31) reads first. Successive lanes of a norm read the
  // sums of successive simdgroups; with REPEATS they begin again after the last simdgroup.
  static uint first(uint lane) { return REPEATS ? lane / EVERY % SIMDGROUPS : lane / EVERY; }

  // part_of returns the fraction of all H units that a simdgroup has, 0 past the last simdgroup. This fraction is the
  // weight of its mean in the mean of all units. A lane reads the means of several simdgroups, one per turn; part
  // returns the weight of the mean that it reads in turn number `turn`. simdgroup: the simdgroup whose sums the lane
  // reads first. own: part_of(simdgroup), which a launch computes once.
  static float part(uint simdgroup, float own, int turn) {
    if (IS_EVEN) return 1.0f / PLACES;
    return TURNS == 1 ? own : part_of(int(simdgroup) + PEERS * turn);
  }
  static float part_of(int simdgroup) { return float(clamp(H - UNITS * simdgroup, 0, int(UNITS))) * (1.0f / H); }

  // Return the factor by which each simdgroup multiplies its sum of squares. The lanes that read these products add
  // them up, and the total is the part of the variance of N numbers that lies inside the simdgroups. COPIES lanes add
  // the squares of the same simdgroup, so the factor is 1 / (COPIES N). If IS_EVEN, it is PLACES times as large,
  // because moments_of_all divides its sum by PLACES.
  static constexpr float squares(int N) { return float(IS_EVEN ? PLACES : 1) / (float(COPIES) * N); }

  // Return 1 / (the number of units of a simdgroup), with which the sum of its numbers becomes their mean. The last
  // simdgroup has fewer than UNITS units if H is not a multiple of UNITS. The number is at least 1, because a simdgroup
  // that has only lanes past the last unit must not divide by 0.
  static float share(uint simdgroup) {
    return IS_WHOLE ? 1.0f / UNITS : 1.0f / float(clamp(H - UNITS * int(simdgroup), 1, int(UNITS)));
  }
};

// The numbers that a lane needs for its norms. They do not change during a launch.
//   scale, shift      scale and shift of the product's norm, for each of the lane's COUNT gates and its unit
//   counts            1 if the lane has a number of the product for this gate; 0 if it has no unit or no such gate
//   c_scale, c_shift  scale and shift of c's norm, for the lane's unit
//   part, part_of_c   the part of all units that the simdgroup has whose sums the lane reads first, for the product's
//                     norm and for c's norm
//   index             the lane's number in the threadgroup
//   memory            the threadgroup memory for the sums, filled with zeros at first
template <int COUNT>
struct NormLane {
  float scale[COUNT], shift[COUNT], counts[COUNT], c_scale, c_shift, eps, part, part_of_c;
  uint index;
  threadgroup float4* memory;
};

// The layout of the sums in threadgroup memory, in vectors of 4 floats: the sums of the product's norms begin at vector
// 0, those of c's norm at vector C; END is the size. A norm has [EVERY][PLACES][ROWS] pairs of floats, one place per
// simdgroup. EVERY: every EVERY-th lane has numbers of the same norm; for c these are all lanes (1). Two pairs fill a
// vector, so a norm takes SIZE vectors: half the pairs, rounded up. A lane has COUNT gates. If each gate is normalised
// by itself, it computes COUNT norms one after the other, each with its own SIZE vectors.
template <class Cell, int H, int ROWS>
struct NormMemory {
  enum { LANES = Lanes<Cell>::LANES, COUNT = REGISTERS_OF<Cell::GATES, LANES> };
  enum { EVERY = Norm<Cell>::IS_EACH ? int(LANES) : 1, SIZE = (EVERY * Peers<H, LANES, EVERY>::PLACES * ROWS + 1) / 2 };
  enum { C = Norm<Cell>::OF == NOTHING ? 0 : (Norm<Cell>::IS_EACH ? int(COUNT) : 1) * SIZE };
  enum { END = C + (Norm<Cell>::HAS_C ? (Peers<H, LANES, 1>::PLACES * ROWS + 1) / 2 : 0) };
};

// Return the size of the threadgroup memory for the sums of the norms, in vectors of 4 floats. The parameter, the array
// norm_eps, selects this overload for cells with a norm; other cells pass Absent.
template <class Cell, int H, int ROWS, class E> int norm_size(E) { return NormMemory<Cell, H, ROWS>::END; }

// Return the numbers that a lane needs for its norms. eps: the array norm_eps, with one number. block: the position of
// the lane's first gate on a gate axis. counts: whether the lane has a number of this gate's product. A lane may have
// fewer gates than COUNT. For each j past its last gate norm.counts[j] is 0; there the lane reads the scale and the
// shift of the cell's last gate, whose values have no effect. If the call has no norm_scale, the scale is 1; if it has
// no norm_shift, the shift is 0. M: NormMemory for 1 batch item; its members that are used here are the same for any
// number of items.
template <class Cell, int H, class E, class Arrays>
NormLane<NormMemory<Cell, H, 1>::COUNT> norm_of_lane(
    E eps, thread const Arrays& a, int direction, int block, int unit, bool counts, uint index,
    threadgroup float4* memory) {
  using M = NormMemory<Cell, H, 1>;
  using P = Peers<H, M::LANES, M::EVERY>;
  using OfC = Peers<H, M::LANES, 1>;
  constexpr int GATES = Cell::GATES;
  NormLane<M::COUNT> norm;  // every member is set below
  UNROLL for (int j = 0; j < M::COUNT; ++j) {
    const int gate = j == 0 ? block : min(block + M::LANES * j, GATES - 1);
    const long at = (long(GATES) * direction + gate) * H + unit;
    norm.scale[j] = value_at(a.norm_scale, at, 1.0f), norm.shift[j] = value_at(a.norm_shift, at, 0.0f);
    norm.counts[j] = counts && (j == 0 || block + M::LANES * j < GATES) ? 1.0f : 0.0f;
  }
  const long c_at = long(direction) * H + unit;
  norm.c_scale = value_at(a.norm_c_scale, c_at, 1.0f), norm.c_shift = value_at(a.norm_c_shift, c_at, 0.0f);
  norm.eps = float(eps[0]), norm.part = P::part_of(int(P::first(index % 32)));
  norm.part_of_c = OfC::part_of(int(OfC::first(index % 32))), norm.index = index, norm.memory = memory;
  return norm;
}

// Two results of one simdgroup for one norm. Forward: the mean of its numbers, and the sum of squares of the distances
// from it. Backward: the sums of d and of d y, where y is a normalised number and d its gradient.
using Pair = float2;

// Exchange the sums of a norm between simdgroups. Write own[r], the pair of sums of this simdgroup for batch item r, to
// threadgroup memory. After a barrier read the pairs of TURNS simdgroups: all[turn][r]. Lanes with the same lane %
// EVERY belong to one norm and have the same pair, so only the first EVERY lanes write. In memory a norm has one place
// per simdgroup, with ROWS pairs in each place. peer: the first place of the lane's norm. P::first(lane): the simdgroup
// whose pairs the lane reads first. n counts the pairs that it reads: batch item n % ROWS in turn n / ROWS.
template <class P, int EVERY, int ROWS>
void share(
    thread const Pair (&own)[ROWS], uint index, threadgroup float4* memory, thread Pair (&all)[P::TURNS][ROWS]) {
  const uint lane = index % 32, peer = lane % EVERY * uint(P::PLACES);
  if constexpr (ROWS % 2 == 0) {  // two pairs are one vector
    threadgroup float4* pairs = memory + peer * (ROWS / 2);
    if (lane < EVERY)
      UNROLL for (int r = 0; r < ROWS; r += 2)
        pairs[index / 32 * (ROWS / 2) + r / 2] = float4(own[r][0], own[r][1], own[r + 1][0], own[r + 1][1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the sums of all simdgroups from their reads
    UNROLL for (int n = 0; n < P::TURNS * ROWS; n += 2) {
      const float4 two = pairs[(P::first(lane) + P::PEERS * (n / ROWS)) * (ROWS / 2) + n % ROWS / 2];
      all[n / ROWS][n % ROWS] = float2(two[0], two[1]), all[n / ROWS][n % ROWS + 1] = float2(two[2], two[3]);
    }
  } else {
    threadgroup Pair* pairs = (threadgroup Pair*)memory + peer * ROWS;
    if (lane < EVERY)
      UNROLL for (int r = 0; r < ROWS; ++r) pairs[index / 32 * ROWS + r] = own[r];
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the sums of all simdgroups from their reads
    UNROLL for (int n = 0; n < P::TURNS * ROWS; ++n)
      all[n / ROWS][n % ROWS] = pairs[(P::first(lane) + P::PEERS * (n / ROWS)) * ROWS + n % ROWS];
  }
}

// Replace own[r] by the mean of all numbers of the norm and 1 / sqrt(variance + eps). On entry own[r] is the mean m_s
// of one simdgroup s, and its sum of squared distances from m_s times the factor P::squares(N), where N numbers are
// normalised together. n_s of them are in simdgroup s. part: n_s / N of the simdgroup whose sums this lane reads first.
// `mean` is the sum of m_s n_s / N over all simdgroups. `squares` adds up n_s / N (m_s - mean)^2 and the sums of
// squares. If IS_EVEN (every weight n_s / N is 1 / PLACES), both are computed PLACES times as large, and the result is
// divided by PLACES, which saves multiplications.
template <class P, int EVERY, int ROWS>
void moments_of_all(thread Pair (&own)[ROWS], float part, float eps, uint index, threadgroup float4* memory) {
  Pair all[P::TURNS][ROWS];
  share<P, EVERY>(own, index, memory, all);
  const uint first = P::first(index % 32);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    float mean = 0.0f, squares = 0.0f;
    UNROLL for (int turn = 0; turn < P::TURNS; ++turn) mean += all[turn][r][0] * P::part(first, part, turn);
    mean = sum_of_every<EVERY>(mean);
    UNROLL for (int turn = 0; turn < P::TURNS; ++turn) {
      const float away = all[turn][r][0] - mean;
      squares += away * away * (P::IS_EVEN ? 1.0f : P::part(first, part, turn)) + all[turn][r][1];
    }
    own[r] = float2(mean, rsqrt(sum_of_every<EVERY>(squares) * (P::IS_EVEN ? 1.0f / P::PLACES : 1.0f) + eps));
  }
}

// Replace x[r][j], this lane's number j of batch item r, by (x[r][j] - mean) / sqrt(variance + eps). counts[j]: 1 if
// the lane has such a number; otherwise 0, and x[r][j] must be 0. If all lanes are in one norm (EVERY is 1), so are the
// COUNT numbers of a lane, which are TOGETHER. Otherwise each number of a lane belongs to another norm, whose sums have
// their own part of the memory. EACH: how many numbers of a norm a unit has: 1, or GATES if all gates are normalised
// together. The lane first reads the sums of one simdgroup; part: the fraction of all units that this simdgroup has.
// First each simdgroup computes the mean of its own numbers (P::share is 1 / its units) and their sum of squares
// (P::squares is the factor with which it enters the variance).
template <int H, int LANES, int EVERY, int EACH, int ROWS, int COUNT>
void standardise(
    thread float (&x)[ROWS][COUNT], thread const float (&counts)[COUNT], float part, float eps, uint index,
    threadgroup float4* memory) {
  using P = Peers<H, LANES, EVERY>;
  constexpr int TOGETHER = EVERY == 1 ? COUNT : 1, SIZE = (EVERY * P::PLACES * ROWS + 1) / 2;
  UNROLL for (int first = 0; first < COUNT; first += TOGETHER) {
    Pair own[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      float sum = x[r][first], squares = 0.0f;
      UNROLL for (int j = 1; j < TOGETHER; ++j) sum += x[r][first + j];
      const float mean = sum_of_every<EVERY>(sum) * (P::share(index / 32) * (1.0f / EACH));
      UNROLL for (int j = first; j < first + TOGETHER; ++j) {
        const float away = x[r][j] - mean * counts[j];
        squares += away * away;
      }
      own[r] = float2(mean, sum_of_every<EVERY>(squares) * P::squares(EACH * H));
    }
    moments_of_all<P, EVERY>(own, part, eps, index, memory + first * SIZE);
    UNROLL for (int r = 0; r < ROWS; ++r)
      UNROLL for (int j = first; j < first + TOGETHER; ++j) x[r][j] = (x[r][j] - own[r][0]) * own[r][1];
  }
}

// Replace own[r], two sums over one simdgroup, by P::COPIES times the sums over all simdgroups. The factor is there
// because COPIES lanes read each pair of sums; the caller divides by it.
template <class P, int EVERY, int ROWS>
void sums_of_all(thread Pair (&own)[ROWS], uint index, threadgroup float4* memory) {
  Pair all[P::TURNS][ROWS];
  share<P, EVERY>(own, index, memory, all);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Pair sum = all[0][r];
    UNROLL for (int turn = 1; turn < P::TURNS; ++turn) sum += all[turn][r];
    own[r] = float2(sum_of_every<EVERY>(sum[0]), sum_of_every<EVERY>(sum[1]));
  }
}

// Replace d[r][j], the gradient of y[r][j] = (x - mean) / sqrt(variance + eps), by the gradient of x:
//   factor (d - (sum of d) / N - y (sum of d y) / N)   with factor[r][j] = 1 / sqrt(variance + eps)
// d[r][j] must be 0 if the lane has no number j. N: how many numbers are normalised together. If several lanes have a
// copy of one number, N counts each copy. The sums are divided by COPIES, too, because COPIES lanes read the sums of
// each simdgroup, so sums_of_all returns COPIES times the sums. As in standardise, COUNT numbers of a lane are TOGETHER
// in one norm, or each in another one.
template <int H, int LANES, int EVERY, int N, int ROWS, int COUNT>
void standardise_backward(
    thread float (&d)[ROWS][COUNT], thread const float (&y)[ROWS][COUNT], thread const float (&factor)[ROWS][COUNT],
    uint index, threadgroup float4* memory) {
  using P = Peers<H, LANES, EVERY>;
  constexpr int TOGETHER = EVERY == 1 ? COUNT : 1, SIZE = (EVERY * P::PLACES * ROWS + 1) / 2;
  UNROLL for (int first = 0; first < COUNT; first += TOGETHER) {
    Pair own[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      float sum = d[r][first], product = d[r][first] * y[r][first];
      UNROLL for (int j = first + 1; j < first + TOGETHER; ++j) sum += d[r][j], product += d[r][j] * y[r][j];
      own[r] = float2(sum_of_every<EVERY>(sum), sum_of_every<EVERY>(product));
    }
    sums_of_all<P, EVERY>(own, index, memory + first * SIZE);
    UNROLL for (int r = 0; r < ROWS; ++r)
      UNROLL for (int j = first; j < first + TOGETHER; ++j) {
        d[r][j] -= (own[r][0] + y[r][j] * own[r][1]) * (1.0f / (N * P::COPIES));
        d[r][j] *= factor[r][j];
      }
  }
}

// Normalise the recurrent product of each lane's own gate or, if IS_SUM, the sum of this product and y, the input's
// part of the preactivation. For batch item r the lane's product is in sums[r][0]; the product of a GRU's candidate,
// its last gate, is in sums[r][LAST]. The result is written to both places. If it includes y, y becomes 0, because the
// cell's step adds y to the sum. lane: the lane's index among those that share its unit; it is the number of the lane's
// gate. last: whether this is the lane of a GRU's candidate. always: whether every lane has a number, so that the
// compiler can leave out the test of norm.counts.
template <class Cell, int H, int ROWS, int SLOTS>
void normalise(
    thread const NormLane<1>& norm, int lane, thread float (&y)[ROWS], thread float (&sums)[ROWS][SLOTS]) {
  using N = Norm<Cell>;
  using M = NormMemory<Cell, H, ROWS>;
  if constexpr (N::OF != NOTHING) {
    constexpr int GATES = Cell::GATES, LAST = GATES - 1;
    const bool last = GATES < M::LANES && lane == LAST, always = GATES == M::LANES && H % (32 / M::LANES) == 0;
    const float counts[1] = {always ? 1.0f : norm.counts[0]};
    float x[ROWS][1];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      x[r][0] = (last ? sums[r][LAST] : sums[r][0]) + (N::IS_SUM ? y[r] : 0.0f);
      x[r][0] = counts[0] == 0.0f ? 0.0f : x[r][0];
    }
    standardise<H, M::LANES, M::EVERY, N::IS_EACH ? 1 : GATES>(
        x, counts, norm.part, norm.eps, norm.index, norm.memory);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      sums[r][0] = sums[r][LAST] = x[r][0] * norm.scale[0] + norm.shift[0];
      if (N::IS_SUM) y[r] = 0.0f;
    }
  }
}

// Normalise c of an LSTM and compute m = o s_output(norm(c)), which is the new h. writes: whether the lane has c of a
// unit; this is the lane of gate o. given: the lane's preactivation without peephole term and forget bias. p: its
// peephole weight. state: on entry c after its clip; on return the normalised c, if IN_STATE. y: the lane's gate. If
// IN_STATE and the peephole of o reads the new c (O_SEES_CURRENT), it must read the normalised c, so gate o is computed
// again. (Its argument 0.0f is the forget bias, which o does not have.) A unit has one number in the norm of c, in the
// lane that writes. So x is 0 in all other lanes, and EVERY and EACH of `standardise` are 1.
template <class Cell, int H, int ROWS>
void normalise_states(
    thread const NormLane<1>& norm, bool writes, thread const float (&given)[ROWS], float p,
    thread float (&state)[ROWS], thread float (&y)[ROWS], thread float (&m)[ROWS]) {
  using N = Norm<Cell>;
  if constexpr (N::HAS_C != 0) {
    const float counts[1] = {writes ? 1.0f : 0.0f};
    float x[ROWS][1];
    UNROLL for (int r = 0; r < ROWS; ++r) x[r][0] = writes ? state[r] : 0.0f;
    threadgroup float4* memory = norm.memory + NormMemory<Cell, H, ROWS>::C;
    standardise<H, Lanes<Cell>::LANES, 1, 1>(x, counts, norm.part_of_c, norm.eps, norm.index, memory);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const float seen = x[r][0] * norm.c_scale + norm.c_shift;
      if (N::IN_STATE) state[r] = seen;
      if (N::IN_STATE && Cell::PEEPHOLE == Cell::O_SEES_CURRENT && writes)
        y[r] = Cell::gate(Cell::GATE_O, given[r], p, seen, 0.0f);
      m[r] = y[r] * activate(Cell::activation(Cell::OUTPUT), seen);
    }
  }
}

// --- Backward ---
//
// The launches of the backward pass read four arrays that MLX has computed for all steps, and write two. G: gates, D:
// directions, ".": the time steps of the launch.
//   norm_y    [T, B, D G H]  the normalised numbers, without scale and shift
//   norm_r    [T, B, D] or, for a norm of each gate, [T, B, D G]: 1 / sqrt(variance + eps)
//   norm_c_y  [T, B, D H] float, norm_c_r [T, B, D] float: the normalised numbers and 1 / sqrt(...) for the norm of c
//   d_product [., B, D G H], output: the gradient of the product
//   d_norm_c  [., B, D H] float, output: the gradient of the normalised c; absent without a norm of c

// The numbers that a lane needs for its norms at one backward step, for each of ROWS batch items and each of its COUNT
// gates. y: the normalised product or sum. r: 1 / sqrt(variance + eps) of this norm. d: only a user's cell reads it; it
// is at first the gradient of the norm's result, and is then overwritten by the gradient of the product. c_y, c_r: y
// and r of the norm of c. states_backward replaces c_y by s_output(normalised c), where s_output is the cell's last
// activation, as in h = o * s_output(c).
template <int ROWS, int COUNT>
struct NormNumbers {
  float y[ROWS][COUNT], r[ROWS][COUNT], d[ROWS][COUNT], c_y[ROWS][1], c_r[ROWS][1];
};

// Return NormNumbers that are all 0. The parameter is not read: it selects this overload for cells with a norm. Cells
// without a norm pass Absent and get the other overload.
template <int ROWS, int COUNT> NormNumbers<ROWS, COUNT> norm_numbers(thread const NormLane<COUNT>&) { return {}; }

// Read the numbers that a lane needs for its norms at one backward step, for ROWS batch items. items[r].at: the unit's
// positions in arrays at this step. block: the position of the lane's gate on the gate axis. norm_r and norm_c_r have
// one number per time index, item and direction. The array `keep` has the same shape, so at.keep is the position in
// them. With a norm of each gate norm_r has GATES numbers per position.
template <class Cell, int ROWS, class Index, class Arrays>
void read_norm(
    thread const Arrays& a, thread const Item<Cell, Index> (&items)[ROWS], Index earlier, int block,
    thread NormNumbers<ROWS, 1>& numbers) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Place<Index> at = items[r].at;
    numbers.y[r][0] = value_at(a.norm_y, at.gate + Index(Cell::GATES) * earlier, 0.0f);
    numbers.r[r][0] = value_at(a.norm_r, Norm<Cell>::IS_EACH ? at.keep * Cell::GATES + block : at.keep, 0.0f);
    numbers.c_y[r][0] = value_at(a.norm_c_y, at.state + earlier, 0.0f);
    numbers.c_r[r][0] = value_at(a.norm_c_r, at.keep, 0.0f);
  }
}

// Compute dc[r], the gradient of c before its norm, for ROWS batch items. On entry dc is the gradient of c from later
// steps. t: the step's time index. p: the lane's peephole weight. numbers[r].ds[1] is the cotangent of c, the gradient
// that the caller gives for it. after[r][1] is c after the step. On return saved.c_y[r] is s_output(normalised c),
// which unit_backward needs; s_output is the activation of the factor of gate o in m = o s_output(c). Also write the
// gradient of the normalised c to a.d_norm_c, from which MLX computes the gradients of scale and shift.
template <class Cell, int H, int ROWS, class Index, class Arrays>
void states_backward(
    thread const NormLane<1>& norm, thread NormNumbers<ROWS, 1>& saved, thread const Arrays& a, int t, float p,
    thread const Item<Cell, Index> (&items)[ROWS], thread const StepNumbers<Cell> (&numbers)[ROWS],
    thread const float (&after)[ROWS][Cell::CARRIED + 1], thread float (&dc)[ROWS]) {
  using N = Norm<Cell>;
  if constexpr (N::HAS_C != 0) {
    constexpr int LANES = Lanes<Cell>::LANES, O = Cell::GATE_O;
    const int lane = int(norm.index % LANES), unit = int(norm.index / LANES);
    const bool real = H % (32 / LANES) == 0 || unit < H;
    float d[ROWS][1];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      // seen: the normalised c, from which the output m = o s_output(seen) is computed. dm: the gradient of m, which is
      // h. d: the gradient of `seen`. It comes from m and, if the next step gets `seen` (IN_STATE), also from later
      // steps and from the cotangent of c.
      const float of_state = saved.c_y[r][0] * norm.c_scale + norm.c_shift;
      const float seen = N::IN_STATE ? after[r][1] : of_state, dm = items[r].past;
      const float s = activate(Cell::activation(Cell::OUTPUT), seen);
      dc[r] += numbers[r].ds[1];
      d[r][0] = Cell::state_backward(N::IN_STATE ? dc[r] : 0.0f, dm, of_lane<LANES>(items[r].y, O), s);
      // of_o: the gradient that comes through the peephole of gate o, if the peephole reads the new c. If IN_STATE, the
      // peephole reads `seen`, else c before the norm.
      if constexpr (Cell::PEEPHOLE == Cell::O_SEES_CURRENT) {
        const float of_o = of_lane<LANES>(
            p * Cell::gate_backward(items[r].d, dm, s, slope(Cell::activation(O), items[r].y)), O);
        if (N::IN_STATE) d[r][0] += of_o;
        else dc[r] += of_o;
      }
      d[r][0] = is_live(a.lengths, t, items[r].length) ? d[r][0] : 0.0f;
      if (real && lane == 0) a.d_norm_c[items[r].at.state] = d[r][0];
      d[r][0] = real ? d[r][0] * norm.c_scale : 0.0f;
    }
    threadgroup float4* memory = norm.memory + NormMemory<Cell, H, ROWS>::C;
    // All LANES lanes of a unit have a copy of its number, so the norm has LANES * H numbers. All lanes are in one
    // norm, so EVERY is 1.
    standardise_backward<H, LANES, 1, LANES * H>(d, saved.c_y, saved.c_r, norm.index, memory);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const float of_state = saved.c_y[r][0] * norm.c_scale + norm.c_shift;
      dc[r] = N::IN_STATE ? d[r][0] : dc[r] + d[r][0];
      saved.c_y[r][0] = activate(Cell::activation(Cell::OUTPUT), N::IN_STATE ? after[r][1] : of_state);
    }
  }
}

// Compute one step of one unit of batch item r in reverse, for a cell with a norm. p: the lane's peephole weight.
// limit: the limit of c. after: c after the step. dc: on entry the gradient of c or, with a norm of c, the gradient of
// c before the norm, from states_backward; on return the gradient of c before the step. item.d: on return the gradient
// of the lane's preactivation. item.past: on return the part of the gradient of h before the step that does not go
// through the product.
template <class Cell, int ROWS, class Index>
void unit_backward(
    thread const NormNumbers<ROWS, 1>& saved, int r, int lane, float p, float limit, float after,
    thread const StepNumbers<Cell>& numbers, thread Item<Cell, Index>& item, thread float& dc) {
  using N = Norm<Cell>;
  if constexpr (N::HAS_C != 0) {
    constexpr int LANES = Lanes<Cell>::LANES;
    const float before = numbers.keep * item.states[1];
    // The clip comes before the norm, and its gradient needs the clipped c. `after` is the clipped c, unless the state
    // is the normalised c (IN_STATE). Then the clipped c is unknown here, and f c + i g, which is c before the clip,
    // takes its place. This is enough: if it is below the limit, the clip changed nothing; otherwise clip_backward
    // compares f c + i g with the limit anyway.
    float c = after;
    if constexpr (N::IN_STATE && Cell::STOPS)
      c = of_lane<LANES>(item.y, Cell::GATE_F) * before +
          of_lane<LANES>(item.y, Cell::GATE_I) * of_lane<LANES>(item.y, Cell::GATE_G);
    Lanes<Cell>::gates_backward(lane, item.y, p, before, c, limit, saved.c_y[r][0], item.past, dc, item.d);
  } else {
    unit_backward<Cell>(absent, r, lane, p, limit, after, numbers, item, dc);
  }
}

// Write one number of the operand of the product with Wh, unless the products are normalised. Then products_backward
// writes it, because the gradient must first go through the norm. The parameter without a name selects this overload
// for cells with a norm; other cells pass Absent.
template <class Cell>
void write_operand(thread const NormLane<1>&, threadgroup float& operand, float value) {
  if (Norm<Cell>::OF == NOTHING) operand = value;
}

// Compute the gradients of the recurrent products from items[r].d, the gradient of the normalised product of the lane's
// gate and unit, for ROWS batch items. Write them to a.d_product, and to `operands` in threadgroup memory, where the
// product with Wh reads them. `operands` has one row per batch item, of ROW vectors of 4 floats. t: the step's time
// index. block: the gate's block of H floats in a row, or -1 for a lane without a gate. counts: whether the lane has a
// unit and a gate of its own; other lanes add 0 to the sums and write nothing.
template <class Cell, int H, int ROW, class S, int ROWS, class Index, class Arrays>
void products_backward(
    thread const NormLane<1>& norm, thread const NormNumbers<ROWS, 1>& saved, thread const Arrays& a, int t,
    int block, int unit, thread const Item<Cell, Index> (&items)[ROWS], threadgroup float4* operands) {
  using N = Norm<Cell>;
  using M = NormMemory<Cell, H, ROWS>;
  if constexpr (N::OF != NOTHING) {
    const bool counts = (Cell::GATES == M::LANES && H % (32 / M::LANES) == 0) || norm.counts[0] != 0.0f;
    float d[ROWS][1];
    UNROLL for (int r = 0; r < ROWS; ++r)
      d[r][0] = counts && is_live(a.lengths, t, items[r].length) ? items[r].d * norm.scale[0] : 0.0f;
    standardise_backward<H, M::LANES, M::EVERY, N::IS_EACH ? H : int(Cell::GATES) * H>(
        d, saved.y, saved.r, norm.index, norm.memory);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      if (!counts) continue;
      const S result = S(d[r][0]);
      a.d_product[items[r].at.gate] = result;
      number_at(operands, r * ROW, block * H + unit) = float(result);
    }
  }
}
