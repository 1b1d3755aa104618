// Layer normalisation in the whole-sequence kernels with the product in lanes; norm.metal has its options.
//
// The numbers that are normalised together lie in all simdgroups of a threadgroup. So each simdgroup first sums up its
// own numbers and writes the sums to threadgroup memory. A barrier follows. Then every simdgroup adds up the sums of
// all simdgroups. For this each lane reads the sums of one simdgroup. If each gate is normalised by itself, there are
// fewer lanes for each norm, and a lane reads the sums of a few simdgroups.
//
// Mean and variance are computed without E[x^2] - E[x]^2, which loses all digits if the mean is large. A simdgroup
// computes its own mean and the sum of squares of the distances from it. For n_s numbers with the mean m_s and this sum
// v_s in simdgroup s, the variance of all N numbers is the sum of v_s + n_s (m_s - mean)^2, divided by N.
//
// Barriers: one for each norm of a step, between the writes of the simdgroups' sums and their reads. The step's last
// barrier separates these reads from the writes of the next step. Each norm has its own part of the memory, because no
// barrier separates the reads of one from the writes of the other.
//
// Template parameters: H units, of which a simdgroup has 32 / LANES; LANES lanes per unit; ROWS batch items of a
// threadgroup; EVERY: every EVERY-th lane has numbers of the same norm (1: all lanes), LANES if each gate has its norm.
// Norm<Cell> (norm.metal) holds the options, Lanes<Cell> (fused_lanes.metal) says which lane has which gate, and
// sum_of_every<EVERY> sums over the lanes of one norm. A cotangent is the gradient that the caller gives for an output.

// How the lanes read the sums of all simdgroups. Every EVERY-th lane of a simdgroup has numbers of the same norm; PEERS
// is the number of these lanes. They divide the simdgroups among themselves: each lane reads the sums of TURNS
// simdgroups, whose numbers are PEERS apart. The sums lie in memory as [EVERY][PLACES][ROWS] pairs. If the number of
// simdgroups divides PEERS, each sum is read by several lanes: by COPIES lanes.
template <int H, int LANES, int EVERY>
struct Peers {
  enum { UNITS = 32 / LANES, SIMDGROUPS = (H + UNITS - 1) / UNITS, PEERS = 32 / EVERY };
  enum { TURNS = (SIMDGROUPS + PEERS - 1) / PEERS, PLACES = PEERS * TURNS };
  enum { IS_WHOLE = H % UNITS == 0, REPEATS = IS_WHOLE && PEERS % SIMDGROUPS == 0 };
  enum { IS_EVEN = REPEATS || (IS_WHOLE && SIMDGROUPS == PLACES), COPIES = REPEATS ? PEERS / SIMDGROUPS : 1 };

  // Return the number of the simdgroup whose sums the lane with this number reads first.
  static uint first(uint lane) { return REPEATS ? lane / EVERY % SIMDGROUPS : lane / EVERY; }

  // Return which part of all units one simdgroup has; 0 past the last one. own: this part for simdgroup number first().
  static float part(uint simdgroup, float own, int turn) {
    if (IS_EVEN) return 1.0f / PLACES;
    return TURNS == 1 ? own : part_of(int(simdgroup) + PEERS * turn);
  }
  static float part_of(int simdgroup) { return float(clamp(H - UNITS * simdgroup, 0, int(UNITS))) * (1.0f / H); }

  // Return the factor of the squares of a simdgroup, so that their sum over all lanes is a part of the variance of N
  // numbers. If all parts are 1 / PLACES, the lanes multiply by this part after the sum, and the factor contains PLACES.
  // COPIES lanes add the squares of one simdgroup.
  static constexpr float squares(int N) { return float(IS_EVEN ? PLACES : 1) / (float(COPIES) * N); }

  // Return 1 / (the number of units of this simdgroup): UNITS, or fewer in the last one if H is not a multiple of
  // UNITS. At least 1, so that a simdgroup of padding lanes does not divide by 0.
  static float share(uint simdgroup) {
    return IS_WHOLE ? 1.0f / UNITS : 1.0f / float(clamp(H - UNITS * int(simdgroup), 1, int(UNITS)));
  }
};

// What a lane needs for the norms. scale, shift: of the lane's gate. c_scale, c_shift: of its unit. counts: 1 if the
// lane has a number of the product, else 0. part, part_of_c: the part of all units that the simdgroup has whose sums
// the lane reads first, in the norm of the product and in that of c. index: the lane's number in the threadgroup.
// memory: the threadgroup memory for the sums, zeros at first.
struct NormLane {
  float scale, shift, c_scale, c_shift, eps, counts, part, part_of_c;
  uint index;
  threadgroup float4* memory;
};

// Where the sums of the two norms lie, in vectors of 4 floats: those of the product's norm from 0, those of c's norm
// from C to END. Each norm, simdgroup and batch item has a pair of floats. Two pairs fill a vector, hence the / 2,
// rounded up. EVERY: the distance of the lanes whose numbers are normalised together.
template <class Cell, int H, int ROWS>
struct NormMemory {
  enum { LANES = Lanes<Cell>::LANES, EVERY = Norm<Cell>::IS_EACH ? int(LANES) : 1 };
  enum { C = Norm<Cell>::OF == NOTHING ? 0 : (EVERY * Peers<H, LANES, EVERY>::PLACES * ROWS + 1) / 2 };
  enum { END = C + (Norm<Cell>::HAS_C ? (Peers<H, LANES, 1>::PLACES * ROWS + 1) / 2 : 0) };
};

// Return the size of the threadgroup memory for the sums, in vectors of 4 floats.
template <class Cell, int H, int ROWS>
int norm_size(thread const NormLane&) { return NormMemory<Cell, H, ROWS>::END; }

// Return what a lane needs for its norms. block: the position of its gate. counts: whether it has a number of the
// product. eps: the array norm_eps. memory: threadgroup memory for the sums.
template <class Cell, int H, class E, class Arrays>
NormLane norm_of_lane(
    E eps, thread const Arrays& a, int direction, int block, int unit, bool counts, uint index,
    threadgroup float4* memory) {
  using M = NormMemory<Cell, H, 1>;
  using P = Peers<H, M::LANES, M::EVERY>;
  using OfC = Peers<H, M::LANES, 1>;
  const long at = (long(Cell::GATES) * direction + block) * H + unit, c_at = long(direction) * H + unit;
  const uint lane = index % 32;
  return {value_at(a.norm_scale, at, 1.0f), value_at(a.norm_shift, at, 0.0f), value_at(a.norm_c_scale, c_at, 1.0f),
      value_at(a.norm_c_shift, c_at, 0.0f), float(eps[0]), counts ? 1.0f : 0.0f, P::part_of(int(P::first(lane))),
      OfC::part_of(int(OfC::first(lane))), index, memory};
}

// Two results of one simdgroup: forward the mean and the squares of the distances from it; backward the sums of d and d
// y, where y is a normalised number and d its gradient.
using Pair = float2;

// Write this simdgroup's pairs of sums to memory. After a barrier, read the lane's share of the pairs of all
// simdgroups. P: the struct Peers, which says whose sums a lane reads. index: the thread's number in the threadgroup.
template <class P, int EVERY, int ROWS>
void share(
    thread const Pair (&own)[ROWS], uint index, threadgroup float4* memory, thread Pair (&all)[P::TURNS][ROWS]) {
  const uint lane = index % 32, peer = lane % EVERY * uint(P::PLACES);
  if constexpr (ROWS % 2 == 0) {  // two pairs are one vector
    threadgroup float4* pairs = memory + peer * (ROWS / 2);
    if (lane < EVERY)
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; r += 2)
        pairs[index / 32 * (ROWS / 2) + r / 2] = float4(own[r][0], own[r][1], own[r + 1][0], own[r + 1][1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the sums of all simdgroups from their reads
#pragma clang loop unroll(full)
    for (int n = 0; n < P::TURNS * ROWS; n += 2) {
      const float4 two = pairs[(P::first(lane) + P::PEERS * (n / ROWS)) * (ROWS / 2) + n % ROWS / 2];
      all[n / ROWS][n % ROWS] = float2(two[0], two[1]), all[n / ROWS][n % ROWS + 1] = float2(two[2], two[3]);
    }
  } else {
    threadgroup Pair* pairs = (threadgroup Pair*)memory + peer * ROWS;
    if (lane < EVERY)
#pragma clang loop unroll(full)
      for (int r = 0; r < ROWS; ++r) pairs[index / 32 * ROWS + r] = own[r];
    threadgroup_barrier(mem_flags::mem_threadgroup);  // separates the sums of all simdgroups from their reads
#pragma clang loop unroll(full)
    for (int n = 0; n < P::TURNS * ROWS; ++n)
      all[n / ROWS][n % ROWS] = pairs[(P::first(lane) + P::PEERS * (n / ROWS)) * ROWS + n % ROWS];
  }
}

// Replace own[r], the mean and the squares of one simdgroup, by the mean of all numbers and 1 / sqrt(variance + eps),
// for ROWS batch items. part: the part of all units that the simdgroup has whose sums this lane reads first. The squares
// are multiplied by P::squares(N), N: how many numbers are normalised together.
template <class P, int EVERY, int ROWS>
void moments_of_all(thread Pair (&own)[ROWS], float part, float eps, uint index, threadgroup float4* memory) {
  Pair all[P::TURNS][ROWS];
  share<P, EVERY>(own, index, memory, all);
  const uint first = P::first(index % 32);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    float mean = 0.0f, squares = 0.0f;
#pragma clang loop unroll(full)
    for (int turn = 0; turn < P::TURNS; ++turn) mean += all[turn][r][0] * P::part(first, part, turn);
    mean = sum_of_every<EVERY>(mean);
#pragma clang loop unroll(full)
    for (int turn = 0; turn < P::TURNS; ++turn) {
      const float away = all[turn][r][0] - mean;
      squares += away * away * (P::IS_EVEN ? 1.0f : P::part(first, part, turn)) + all[turn][r][1];
    }
    own[r] = float2(mean, rsqrt(sum_of_every<EVERY>(squares) * (P::IS_EVEN ? 1.0f / P::PLACES : 1.0f) + eps));
  }
}

// Replace x[r] by (x[r] - mean) / sqrt(variance + eps), for ROWS batch items. counts: 1 if the lane's number belongs to
// the norm; otherwise 0, and x[r] must be 0. EVERY: the distance of the lanes whose numbers are normalised together.
// EACH: how many of these numbers a unit has. part: the part of all units that the simdgroup has whose sums this lane
// reads first.
template <int H, int LANES, int EVERY, int EACH, int ROWS>
void standardise(
    thread float (&x)[ROWS], float counts, float part, float eps, uint index, threadgroup float4* memory) {
  using P = Peers<H, LANES, EVERY>;
  Pair own[ROWS];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const float mean = sum_of_every<EVERY>(x[r]) * (P::share(index / 32) * (1.0f / EACH)), away = x[r] - mean * counts;
    own[r] = float2(mean, sum_of_every<EVERY>(away * away) * P::squares(EACH * H));
  }
  moments_of_all<P, EVERY>(own, part, eps, index, memory);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) x[r] = (x[r] - own[r][0]) * own[r][1];
}

// Replace own[r], two sums over one simdgroup, by the sums over all simdgroups, for ROWS batch items. Several lanes may
// read one sum; the result is then the sum times P::COPIES.
template <class P, int EVERY, int ROWS>
void sums_of_all(thread Pair (&own)[ROWS], uint index, threadgroup float4* memory) {
  Pair all[P::TURNS][ROWS];
  share<P, EVERY>(own, index, memory, all);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    Pair sum = all[0][r];
#pragma clang loop unroll(full)
    for (int turn = 1; turn < P::TURNS; ++turn) sum += all[turn][r];
    own[r] = float2(sum_of_every<EVERY>(sum[0]), sum_of_every<EVERY>(sum[1]));
  }
}

// Replace d[r], the gradient of y[r] = (x - mean) / sqrt(variance + eps), by the gradient of x. d[r] must be 0 if the
// lane's number does not belong to the norm. factor[r]: 1 / sqrt(variance + eps). N: how many numbers are normalised
// together. If several lanes have a copy of one number, each copy counts.
template <int H, int LANES, int EVERY, int N, int ROWS>
void standardise_backward(
    thread float (&d)[ROWS], thread const float (&y)[ROWS], thread const float (&factor)[ROWS], uint index,
    threadgroup float4* memory) {
  using P = Peers<H, LANES, EVERY>;
  Pair own[ROWS];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) own[r] = float2(sum_of_every<EVERY>(d[r]), sum_of_every<EVERY>(d[r] * y[r]));
  sums_of_all<P, EVERY>(own, index, memory);
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    d[r] -= (own[r][0] + y[r] * own[r][1]) * (1.0f / (N * P::COPIES));
    d[r] *= factor[r];
  }
}

// Normalise the product or its sum with y, the input's part of the preactivations. On return the sums of each lane's
// own gate, sums[r], have the result, and y is 0 if it is part of the sum. The product of a lane's gate is in
// sums[r][0]; that of a GRU's candidate, its last gate, in sums[r][LAST]. `always`: every lane has a number, so that
// the compiler can leave out the test of norm.counts.
template <class Cell, int H, int ROWS, int SLOTS>
void normalise(
    thread const NormLane& norm, int lane, thread float (&y)[ROWS], thread float (&sums)[ROWS][SLOTS]) {
  using N = Norm<Cell>;
  using M = NormMemory<Cell, H, ROWS>;
  if constexpr (N::OF != NOTHING) {
    constexpr int GATES = Cell::GATES, LAST = GATES - 1;
    const bool last = GATES < M::LANES && lane == LAST, always = GATES == M::LANES && H % (32 / M::LANES) == 0;
    float x[ROWS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      x[r] = (last ? sums[r][LAST] : sums[r][0]) + (N::IS_SUM ? y[r] : 0.0f);
      x[r] = always ? x[r] : norm.counts == 0.0f ? 0.0f : x[r];
    }
    standardise<H, M::LANES, M::EVERY, N::IS_EACH ? 1 : GATES>(
        x, always ? 1.0f : norm.counts, norm.part, norm.eps, norm.index, norm.memory);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      sums[r][0] = sums[r][LAST] = x[r] * norm.scale + norm.shift;
      if (N::IS_SUM) y[r] = 0.0f;
    }
  }
}

// Normalise c of an LSTM and compute m = o s_output(norm(c)). writes: whether the lane has the state of a unit. given:
// the preactivations, without peephole and forget bias. p: the lane's peephole weight. y: the lane's gate; that of o
// is computed again if its peephole reads the normalised c.
template <class Cell, int H, int ROWS>
void normalise_states(
    thread const NormLane& norm, bool writes, thread const float (&given)[ROWS], float p, thread float (&state)[ROWS],
    thread float (&y)[ROWS], thread float (&m)[ROWS]) {
  using N = Norm<Cell>;
  if constexpr (N::HAS_C != 0) {
    float x[ROWS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) x[r] = writes ? state[r] : 0.0f;
    threadgroup float4* memory = norm.memory + NormMemory<Cell, H, ROWS>::C;
    standardise<H, Lanes<Cell>::LANES, 1, 1>(
        x, writes ? 1.0f : 0.0f, norm.part_of_c, norm.eps, norm.index, memory);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      const float seen = x[r] * norm.c_scale + norm.c_shift;
      if (N::IN_STATE) state[r] = seen;
      if (N::IN_STATE && Cell::PEEPHOLE == Cell::O_SEES_CURRENT && writes)
        y[r] = Cell::gate(Cell::GATE_O, given[r], p, seen, 0.0f);
      m[r] = y[r] * activate(Cell::activation(Cell::OUTPUT), seen);
    }
  }
}

// --- Backward ---
//
// The kernel reads, computed before by MLX for all steps, and writes
//   norm_y [T, B, D G H], norm_r [T, B, D] or, for a norm of each gate, [T, B, D G]: the normalised numbers, without
//           scale and shift, and 1 / sqrt(variance + eps)
//   norm_c_y [T, B, D H] float, norm_c_r [T, B, D] float: the same for c
//   d_product [., B, D G H], output: the gradient of the product
//   d_norm_c  [., B, D H] float, output: the gradient of the normalised c; absent without a norm of c

// What the backward step of a lane needs for its norms. y: its normalised product or sum. r: 1 / sqrt(variance + eps)
// of this norm. c_y, c_r: the same for the norm of c. They are loaded one step early, before a product, so that they
// arrive while it is computed. The function states_backward replaces c_y by the activation s_output of the normalised
// c.
template <int ROWS>
struct NormNumbers {
  float y[ROWS], r[ROWS], c_y[ROWS], c_r[ROWS];
};

template <int ROWS>
NormNumbers<ROWS> norm_numbers(thread const NormLane&) { return {}; }

// Read the numbers of ROWS items at one step. block: the position of the lane's gate. earlier: the number of elements
// of norm_c_y before the launch's first time index; norm_y has GATES times as many.
template <class Cell, int ROWS, class Index, class Arrays>
void read_norm(
    thread const Arrays& a, thread const Item<Cell, Index> (&items)[ROWS], Index earlier, int block,
    thread NormNumbers<ROWS>& numbers) {
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) {
    const Place<Index> at = items[r].at;
    numbers.y[r] = value_at(a.norm_y, at.gate + Index(Cell::GATES) * earlier, 0.0f);
    numbers.r[r] = value_at(a.norm_r, Norm<Cell>::IS_EACH ? at.keep * Cell::GATES + block : at.keep, 0.0f);
    numbers.c_y[r] = value_at(a.norm_c_y, at.state + earlier, 0.0f);
    numbers.c_r[r] = value_at(a.norm_c_r, at.keep, 0.0f);
  }
}

// Compute the gradient dc[r] of c before its norm. On entry dc is the gradient that later steps send back. after: c
// after the step. The gradient of the normalised c comes from m = o s_output(norm(c)); with a norm of the state also
// from dc, from the cotangent of c and from o's peephole.
template <class Cell, int H, int ROWS, class Index, class Arrays>
void states_backward(
    thread const NormLane& norm, thread NormNumbers<ROWS>& saved, thread const Arrays& a, int t, float p,
    thread const Item<Cell, Index> (&items)[ROWS], thread const StepNumbers<Cell> (&numbers)[ROWS],
    thread const float (&after)[ROWS][Cell::CARRIED + 1], thread float (&dc)[ROWS]) {
  using N = Norm<Cell>;
  if constexpr (N::HAS_C != 0) {
    constexpr int LANES = Lanes<Cell>::LANES, O = Cell::GATE_O;
    const int lane = int(norm.index % LANES), unit = int(norm.index / LANES);
    const bool real = H % (32 / LANES) == 0 || unit < H;
    float d[ROWS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      const float seen = N::IN_STATE ? after[r][1] : saved.c_y[r] * norm.c_scale + norm.c_shift, dm = items[r].past;
      const float s = activate(Cell::activation(Cell::OUTPUT), seen);
      dc[r] += numbers[r].ds[1];
      d[r] = Cell::state_backward(N::IN_STATE ? dc[r] : 0.0f, dm, of_lane<LANES>(items[r].y, O), s);
      if constexpr (Cell::PEEPHOLE == Cell::O_SEES_CURRENT) {
        const float of_o = of_lane<LANES>(
            p * Cell::gate_backward(items[r].d, dm, s, slope(Cell::activation(O), items[r].y)), O);
        if (N::IN_STATE) d[r] += of_o;
        else dc[r] += of_o;
      }
      d[r] = is_live(a.lengths, t, items[r].length) ? d[r] : 0.0f;
      if (real && lane == 0) a.d_norm_c[items[r].at.state] = d[r];
      d[r] = real ? d[r] * norm.c_scale : 0.0f;
    }
    threadgroup float4* memory = norm.memory + NormMemory<Cell, H, ROWS>::C;
    standardise_backward<H, LANES, 1, LANES * H>(d, saved.c_y, saved.c_r, norm.index, memory);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      dc[r] = N::IN_STATE ? d[r] : dc[r] + d[r];
      saved.c_y[r] = activate(
          Cell::activation(Cell::OUTPUT), N::IN_STATE ? after[r][1] : saved.c_y[r] * norm.c_scale + norm.c_shift);
    }
  }
}

// Run the cell of one unit in reverse. With a norm of c, the gradient dc is that of c before the norm already.
template <class Cell, int ROWS, class Index>
void unit_backward(
    thread const NormNumbers<ROWS>& saved, int r, int lane, float p, float limit, float after,
    thread const StepNumbers<Cell>& numbers, thread Item<Cell, Index>& item, thread float& dc) {
  using N = Norm<Cell>;
  if constexpr (N::HAS_C != 0) {
    constexpr int LANES = Lanes<Cell>::LANES;
    const float before = numbers.keep * item.states[1];
    // The clip comes before the norm. If the state is normalised, c before the norm is computed again.
    float c = after;
    if constexpr (N::IN_STATE && Cell::STOPS)
      c = of_lane<LANES>(item.y, Cell::GATE_F) * before +
          of_lane<LANES>(item.y, Cell::GATE_I) * of_lane<LANES>(item.y, Cell::GATE_G);
    Lanes<Cell>::gates_backward(lane, item.y, p, before, c, limit, saved.c_y[r], item.past, dc, item.d);
  } else {
    unit_backward<Cell>(absent, r, lane, p, limit, after, numbers, item, dc);
  }
}

// Write an operand of the product with Wh. If the products are normalised, products_backward writes it instead.
template <class Cell>
void write_operand(thread const NormLane&, threadgroup float& operand, float value) {
  if (Norm<Cell>::OF == NOTHING) operand = value;
}

// Compute the gradients of the recurrent products from items[r].d, which is the gradient of the normalised product of
// the lane's gate and unit, for batch item r. Write them to d_product, and to `operands` in threadgroup memory, where
// the product with Wh reads them: an operand is a row of ROW floats, one for each of the ROWS batch items. block: the
// gate's block of H floats in an operand, or -1 for a lane without a gate. A lane `counts` if it has a unit and a gate
// of its own; the other lanes take part in the sums with 0, and write nothing.
template <class Cell, int H, int ROW, class S, int ROWS, class Index, class Arrays>
void products_backward(
    thread const NormLane& norm, thread const NormNumbers<ROWS>& saved, thread const Arrays& a, int t, int block,
    int unit, thread const Item<Cell, Index> (&items)[ROWS], threadgroup float4* operands) {
  using N = Norm<Cell>;
  using M = NormMemory<Cell, H, ROWS>;
  if constexpr (N::OF != NOTHING) {
    const bool counts = (Cell::GATES == M::LANES && H % (32 / M::LANES) == 0) || norm.counts != 0.0f;
    float d[ROWS];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r)
      d[r] = counts && is_live(a.lengths, t, items[r].length) ? items[r].d * norm.scale : 0.0f;
    standardise_backward<H, M::LANES, M::EVERY, N::IS_EACH ? H : int(Cell::GATES) * H>(
        d, saved.y, saved.r, norm.index, norm.memory);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
      if (!counts) continue;
      const S result = S(d[r]);
      a.d_product[items[r].at.gate] = result;
      number_at(operands, r * ROW, block * H + unit) = float(result);
    }
  }
}
