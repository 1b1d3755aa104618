// The recurrent product of a step for many batch items: the equation of stepwise_lanes.metal, computed with 8 x 8
// matrices.
//
// Each sum has K terms, which are added in turns of 128. In each turn the threads first copy 128 numbers of x of all
// ROWS batch items, as float, into `tiles` in threadgroup memory, because all simdgroups read them. Rows of a tile are
// PITCH floats apart. A weight is used by one simdgroup only, so lanes read their weights from device memory.
// Simdgroup s computes columns 8 s ... 8 s + 7 of all rows. If there are few columns, SLICES simdgroups share eight
// columns; each of these "slices" multiplies a part of the numbers of a turn. The results are sums [SLICES, ROWS,
// COLUMNS]. At the end the slices are added up in the first one. A thread may then read only the sums that it has added
// up itself: those of the cells thread_index, thread_index + THREADS, ...
//
// Terms may be added in any order. So the 128 numbers of a turn are divided among 16 pairs of 8 x 8 matrices (a "quad"
// is four pairs) in an order that gives each lane neighbouring numbers in memory. In pair m of a quad, column c of the
// left matrix (x) and row c of the right matrix (weights) hold number SPAN c + m of the quad. Eight lanes read 8 SPAN
// neighbouring weights. Weights that are not quantized have SPAN = 4, and the quads begin 32 numbers apart.
//
// Barriers: in each turn one between the copies and the products, and one between the products and the next turn's
// copies; at the end one between the writes of all simdgroups and the reads of the sums.
//
// Rows and units past the end repeat the last ones; their results are not used. Numbers past the end of K are zeros.

// The distance between the rows of a tile is 132 instead of 128, so that the rows begin in different banks of
// threadgroup memory.
constant constexpr int TURN = 128, PITCH = TURN + 4;

// A lane holds weights of two columns of the product. columns: pointers to its next weights of both. numbers: its
// weights of one turn (128 numbers of K), QUADS vectors of 4 per column. STEP: the distance between these vectors.
template <class W, int SLICES> struct LaneColumns {};
template <class S, int SLICES> struct LaneColumns<const device S*, SLICES> {
  enum { SPAN = 4, QUADS = 4 / SLICES, STEP = 32 * SLICES };
  const device S* columns[2];
  vec<S, 4> numbers[2][QUADS];
};

// Let column e (0 or 1) of `own` be row `row` of the weights, from `first` on. place: the lane's row in a matrix.
template <int SLICES, class S>
void find_column(
    thread LaneColumns<const device S*, SLICES>& own, const device S* weights, int e, Index row, int K, int first,
    int, int place, int slice) {
  own.columns[e] = weights + row * K + first + 32 * slice + 4 * place;
}

// Read the lane's weights of both columns for a turn (128 numbers of K). Then let the pointers be 128 numbers further.
template <int SLICES, class S>
void load_turn(thread LaneColumns<const device S*, SLICES>& own) {
  using Four = typename Neighbours<S>::four;
#pragma clang loop unroll(full)
  for (int n = 0; n < 4 / SLICES; ++n) {
    own.numbers[0][n] = vec<S, 4>(*(const device Four*)(own.columns[0] + 32 * SLICES * n));
    own.numbers[1][n] = vec<S, 4>(*(const device Four*)(own.columns[1] + 32 * SLICES * n));
  }
  own.columns[0] += TURN;
  own.columns[1] += TURN;
}

// Convert the lane's weights for four 8 x 8 matrices (quad number n) to float. w[column][m]: the weight in matrix m.
template <int SLICES, class S>
void weights_of(thread const LaneColumns<const device S*, SLICES>& own, int n, thread float (&w)[2][4]) {
#pragma clang loop unroll(full)
  for (int part = 0; part < 8; ++part) w[part / 4][part % 4] = float(own.numbers[part / 4][n][part % 4]);
}

// Copy 128 numbers of COUNT rows of operands into a tile. This simdgroup copies rows `first`, first + STEP, ..., to
// `own`, 4 numbers per lane. Then it moves `rows` on by 128 numbers.
template <int COUNT, int STEP, int OWN, class R>
void copy_turn(thread R (&rows)[OWN], int first, threadgroup float4* own) {
#pragma clang loop unroll(full)
  for (int part = 0; part < OWN; part += 4) {  // four rows at a time: more would take too many registers
    float values[4][4];
#pragma clang loop unroll(full)
    for (int n = 0; n < 4; ++n) {
      if (part + n >= OWN) continue;
      operands_at<4>(rows[part + n], 0, values[n]);
      move(rows[part + n], TURN);
    }
#pragma clang loop unroll(full)
    for (int n = 0; n < 4; ++n) {
      if (part + n >= OWN || (COUNT % STEP != 0 && first + (part + n) * STEP >= COUNT)) continue;
      own[(part + n) * STEP * (PITCH / 4)] = float4(values[n][0], values[n][1], values[n][2], values[n][3]);
    }
  }
}

// Copy the last `left` < 128 numbers of each row into the tile, then zeros up to `end`, rounded up to a multiple of
// 32. A lane copies numbers lane, lane + 32, ... (`rows` point to number 4 lane, so 3 lane is subtracted.)
template <int COUNT, int STEP, int OWN, class R>
void copy_rest(thread const R (&rows)[OWN], int first, int lane, int left, int end, threadgroup float* own) {
  for (int part = 0; part < end; part += 32) {
    float values[OWN][1] = {};
    if (part + lane < left)
#pragma clang loop unroll(full)
      for (int n = 0; n < OWN; ++n) operands_at<1>(rows[n], part - 3 * lane, values[n]);
#pragma clang loop unroll(full)
    for (int n = 0; n < OWN; ++n)
      if (COUNT % STEP == 0 || first + n * STEP < COUNT) own[n * STEP * PITCH + part] = values[n][0];
  }
}

// Multiply all rows of x by eight columns of weights, in four pairs of 8 x 8 matrices (a quad). Lanes share a matrix:
// each holds two neighbouring numbers of one row, of the left matrix (x) and of the right one (w[0][m], w[1][m]).
// `operands` points to the lane's four first numbers, one per left matrix; the second ones lie SPAN numbers further.
template <int ROWS, int SPAN>
void multiply_quad(
    thread const float (&w)[2][4], threadgroup const float4* operands, thread simdgroup_float8x8 (&total)[ROWS / 8]) {
  float4 numbers[ROWS / 8][2];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS / 8; ++r) {
    numbers[r][0] = operands[2 * r * PITCH];
    numbers[r][1] = operands[2 * r * PITCH + SPAN / 4];
  }
  simdgroup_float8x8 left, right;
#pragma clang loop unroll(full)
  for (int m = 0; m < 4; ++m) {
    right.thread_elements()[0] = w[0][m];
    right.thread_elements()[1] = w[1][m];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS / 8; ++r) {
      left.thread_elements()[0] = numbers[r][0][m];
      left.thread_elements()[1] = numbers[r][1][m];
      simdgroup_multiply_accumulate(total[r], left, right, total[r]);
    }
  }
}

// Multiply operands and weights of a whole turn (128 numbers of K).
template <int ROWS, class C>
void multiply_turn(
    thread const C& columns, threadgroup const float4* operands, thread simdgroup_float8x8 (&total)[ROWS / 8]) {
#pragma clang loop unroll(full)
  for (int n = 0; n < C::QUADS; ++n) {
    float w[2][4];
    weights_of(columns, n, w);
    multiply_quad<ROWS, C::SPAN>(w, operands + n * C::STEP / 4, total);
  }
}

// Multiply the last `left` numbers of K, which are fewer than 128. place: the lane's row in an 8 x 8 matrix.
template <int ROWS, class S, int SLICES>
void multiply_rest(
    thread LaneColumns<const device S*, SLICES>& own, int left, int place, int slice,
    threadgroup const float4* operands, thread simdgroup_float8x8 (&total)[ROWS / 8]) {
  const int end = left - 32 * slice - 4 * place;  // the end of K, counted from the lane's first number
  for (int part = 0; part + 32 * slice < left; part += 32 * SLICES) {
    float w[2][4] = {};
#pragma clang loop unroll(full)
    for (int m = 0; m < 4; ++m) {
      if (part + m >= end) continue;
      w[0][m] = float(own.columns[0][part + m]);
      w[1][m] = float(own.columns[1][part + m]);
    }
    multiply_quad<ROWS, 4>(w, operands + part / 4, total);
  }
}

template <int HEIGHT, int WIDTH, int SLICES>
struct ByTiles {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 4 * WIDTH * SLICES };

  template <class Gates, int FIRST, int UNITS, int SEGMENTS, class X, class W>
  static void product(thread const X& x, W weights, int B, int H, int K, thread const Block& block) {
    using Own = LaneColumns<W, SLICES>;
    constexpr int STEP = THREADS / 32, OWN = (ROWS + STEP - 1) / STEP;
    const int lane = block.lane, simdgroup = block.simdgroup, length = K / SEGMENTS;
    const int slice = SLICES == 1 ? 0 : simdgroup / (COLUMNS / 8), eight = simdgroup - COLUMNS / 8 * slice;
    // The eight columns of this simdgroup belong to one gate.
    const int first_unit = block.j0 + eight % (UNITS / 8) * 8, gate = Gates::block(FIRST + eight / (UNITS / 8));
    // This lane's position in an 8 x 8 matrix: its row and the first of its two columns.
    const int row = (lane >> 2 & 4) + (lane >> 1 & 3), pair = (lane >> 2 & 2) * 2 + (lane & 1) * 2;
    threadgroup float4* copied = (threadgroup float4*)block.tiles + simdgroup * (PITCH / 4) + lane;
    threadgroup const float4* operands =
        (threadgroup const float4*)block.tiles + row * (PITCH / 4) + (32 * slice + Own::SPAN * pair) / 4;
    simdgroup_float8x8 total[ROWS / 8];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS / 8; ++r) total[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int segment = 0; segment < SEGMENTS; ++segment) {
      typename X::Row rows[OWN];
      Own columns;
#pragma clang loop unroll(full)
      for (int n = 0; n < OWN; ++n) {
        find_row(x, min(block.b0 + simdgroup + n * STEP, B - 1), segment, rows[n]);
        move(rows[n], 4 * lane);
      }
#pragma clang loop unroll(full)
      for (int e = 0; e < 2; ++e) {
        const Index weight_row = Index(gate) * H + min(first_unit + pair + e, H - 1);
        find_column(columns, weights, e, weight_row, K, segment * length, lane, row, slice);
      }
      int left = length;
      for (; left >= TURN; left -= TURN) {
        load_turn(columns);
        copy_turn<ROWS, STEP>(rows, simdgroup, copied);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_turn<ROWS>(columns, operands, total);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (left > 0) {
        // Each quad of quantized weights reads from the whole tile (128 numbers per row), so zeros must fill it.
        const int end = Own::SPAN == 4 ? left : TURN;
        copy_rest<ROWS, STEP>(rows, simdgroup, lane, left, end, block.tiles + simdgroup * PITCH + lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_rest<ROWS>(columns, left, row, slice, operands, total);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS / 8; ++r)
      simdgroup_store(total[r], block.sums + (slice * ROWS + 8 * r) * COLUMNS + 8 * eight, COLUMNS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if constexpr (SLICES > 1) {  // a thread adds up the sums of the cells it will compute
      for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += THREADS) {
#pragma clang loop unroll(full)
        for (int n = 1; n < SLICES; ++n) block.sums[cell] += block.sums[n * ROWS * COLUMNS + cell];
      }
    }
  }
};
