// The recurrent product of a step for many batch items, computed with 8 x 8 matrices. As in stepwise_lanes.metal, a
// threadgroup computes ROWS batch items from b0 on, and UNITS units from j0 on of each gate from FIRST on:
//
//   sums[r, n] = sum over k of x(b0 + r, k) weights[row(n), k]
//   row(n) = Gates::block(FIRST + n / UNITS) H + j0 + n % UNITS
//
// Each sum has K terms, which are added in turns of 128. In each turn the threads first copy 128 numbers of x of all
// ROWS batch items, as float, into a tile in threadgroup memory, because all simdgroups read them. The rows of this
// tile are PITCH floats apart. A weight is used by one simdgroup only, so lanes read their weights from device memory.
// Simdgroup s computes columns 8 s ... 8 s + 7 of all rows.
//
// If there are few columns, SLICES simdgroups share eight columns, so that more threads are at work. Each of them (a
// "slice") multiplies a part of the numbers of a turn. The results are sums [SLICES, ROWS, COLUMNS]. At the end the
// sums of the other slices are added to those of the first one. No barrier follows, so a thread may then read only the
// sums that it has added up itself: number thread_index, thread_index + THREADS, ...
//
// Terms may be added in any order. So the 128 numbers of a turn are divided among 16 pairs of 8 x 8 matrices, x and
// weights, in an order that gives each lane neighbouring numbers in memory. Four successive pairs are a "quad". In a
// quad, column c of x and row c of the weights belong to the same numbers k of the sum: pair m has number SPAN c + m,
// counted from the beginning of the quad. SPAN is thus the distance in memory between neighbouring columns of x. It is
// 4 for weights that are not quantized: a lane's numbers of the four pairs are then 4 neighbours, eight lanes read 32
// neighbouring weights, and the quads begin 32 numbers apart. Quantized weights have another SPAN
// (stepwise_quantized.metal).
//
// The sums lie in the memory of the tile, so that a core has memory for more threadgroups.
//
// Barriers: in each turn one between the copies and the products, and one between the products and the next turn's
// copies, or the writes of the sums; at the end one between these writes and the reads of the sums.
//
// Batch items and units past the end repeat the last ones; their results are not used. Terms past K are zeros.
//
// S: the dtype of the arrays. R: a row type of x, see find_row in stepwise.metal. W: the type of the pointer to the
// weights. C: LaneColumns, the struct of the weights that one lane multiplies. QUADS: how many quads of a turn a
// simdgroup multiplies.

// The distance between the rows of a tile is 132 instead of 128, so that the rows begin in different banks of
// threadgroup memory.
constant constexpr int TURN = 128, PITCH = TURN + 4;

// The weights that one lane multiplies: those of two columns of the product, which are two rows of the weight matrix.
// The product adds up its K terms in turns of 128. columns: pointers to the lane's weights of the next turn, one per
// column. numbers: its weights of the current turn, QUADS vectors of 4 per column. STEP: the distance of these vectors
// in memory. SPAN: see the head of this file.
template <class W, int SLICES> struct LaneColumns {};
template <class S, int SLICES> struct LaneColumns<const device S*, SLICES> {
  enum { SPAN = 4, QUADS = 4 / SLICES, STEP = 32 * SLICES };
  const device S* columns[2];
  vec<S, 4> numbers[2][QUADS];
};

// Set the pointer of this lane's column e (0 or 1) to its first weights in row number `row` of the weight matrix, which
// has K numbers per row. first: the index of the product's first number in the row. place: the lane's row in an 8 x 8
// matrix; it selects four of 32 numbers. slice: the simdgroup's number among those that share the terms.
template <int SLICES, class S>
void find_column(
    thread LaneColumns<const device S*, SLICES>& own, const device S* weights, int e, Index row, int K, int first,
    int, int place, int slice) {
  own.columns[e] = weights + row * K + first + 32 * slice + 4 * place;
}

// Read the lane's weights of both columns for the current turn of 128 terms. Then move both pointers to the next turn.
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

// Convert to float the lane's weights that the next four matrix products need, as w[column][m]: column 0 or 1 of the
// lane, matrix m of the four. n: the number of these four matrices (a quad) in the turn.
template <int SLICES, class S>
void weights_of(thread const LaneColumns<const device S*, SLICES>& own, int n, thread float (&w)[2][4]) {
#pragma clang loop unroll(full)
  for (int part = 0; part < 8; ++part) w[part / 4][part % 4] = float(own.numbers[part / 4][n][part % 4]);
}

// Copy the next 128 numbers of COUNT rows of x into a tile in threadgroup memory. This simdgroup copies the rows number
// first, first + STEP, ..., OWN of them; a lane copies 4 numbers of each. own: where this lane's 4 numbers of the first
// row go. Then advance the pointers in `rows` by 128 numbers. If STEP does not divide COUNT, some simdgroups have a row
// less.
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

// Copy the last `left` < 128 numbers of each row of x into the tile, and zeros behind them, up to number `end` rounded
// up to a multiple of 32. A lane copies the numbers lane, lane + 32, ... of a row. But the pointers in `rows` are set
// for copying 4 numbers per lane, to number 4 lane. So 3 lane is subtracted from the index.
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

// Multiply all rows of x by eight columns of weights, as four products of 8 x 8 matrices (a quad). The lanes share a
// matrix: each holds two neighbouring numbers of a matrix row. Number m of w[0], w[1] are the lane's two numbers of the
// weights in product m. operands[0] holds the lane's first number of x for each of the four products; its second
// numbers lie SPAN numbers further.
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

// Multiply and add up 128 terms of each sum: the x in the tile with the weights that the lanes hold.
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

// Multiply what remains of K after the whole turns of 128: `left` terms. The weights past the end are set to 0, because
// they would belong to the next row. place: the lane's row in an 8 x 8 matrix.
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

// The product of ROWS batch items and COLUMNS columns. A simdgroup (32 threads) computes eight columns, or with SLICES
// > 1 a part of their terms; so there are 32 / 8 = 4 threads for each column and slice.
template <int HEIGHT, int WIDTH, int SLICES>
struct ByTiles {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 4 * WIDTH * SLICES };

  template <class Gates, int FIRST, int UNITS, int SEGMENTS, class X, class W>
  static void product(thread const X& x, W weights, int B, int H, int K, thread const Block& block) {
    using Own = LaneColumns<W, SLICES>;
    constexpr int STEP = THREADS / 32, OWN = (ROWS + STEP - 1) / STEP;
    const int lane = block.lane, simdgroup = block.simdgroup, length = K / SEGMENTS;
    const int slice = SLICES == 1 ? 0 : simdgroup / (COLUMNS / 8), eight = simdgroup - COLUMNS / 8 * slice;
    // `eight` is the number of this simdgroup's group of eight columns. Such a group never contains units of two gates,
    // because UNITS is a multiple of 8. So one gate and the first unit describe it.
    const int first_unit = block.j0 + eight % (UNITS / 8) * 8, gate = Gates::block(FIRST + eight / (UNITS / 8));
    // This lane's position in an 8 x 8 matrix: its row and the first of its two columns.
    const int row = (lane >> 2 & 4) + (lane >> 1 & 3), pair = (lane >> 2 & 2) * 2 + (lane & 1) * 2;
    threadgroup float4* copied = (threadgroup float4*)block.sums + simdgroup * (PITCH / 4) + lane;
    threadgroup const float4* operands =
        (threadgroup const float4*)block.sums + row * (PITCH / 4) + (32 * slice + Own::SPAN * pair) / 4;
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
        // The product with quantized weights reads all 128 numbers of a tile's row, even if fewer are left. So zeros
        // must fill the tile. Other weights read only up to `left`, rounded up to a multiple of 32.
        const int end = Own::SPAN == 4 ? left : TURN;
        copy_rest<ROWS, STEP>(rows, simdgroup, lane, left, end, block.sums + simdgroup * PITCH + lane);
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
