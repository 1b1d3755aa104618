// Compute the recurrent product of one time step for many batch items, as a sum of products of 8 x 8 matrices.
// stepwise_lanes.metal has the formula of `sums`, stepwise.metal explains the operand x and the functions that read it.
//
// A threadgroup computes ROWS batch items from b0 on and COLUMNS columns: UNITS units from j0 on, for each gate from
// FIRST on. Simdgroup s (32 lanes) computes the columns 8 s ... 8 s + 7. The K terms of a sum are added in turns of
// TURN = 128 terms. In a turn the threads first copy 128 numbers of x of all items, as float, into a "tile" in
// threadgroup memory, because all simdgroups read them. A weight is used by one simdgroup only, so lanes read weights
// from device memory.
//
//   slice        if there are few columns, SLICES simdgroups share eight columns, so that more threads are at work.
//                Each multiplies a part of every turn. The results are sums [SLICES, ROWS, COLUMNS]; at the end the
//                sums of all slices are added to those of the first one
//   quad         four of the 16 pairs of 8 x 8 matrices (x, weights) of a turn. The terms of a sum may be added in any
//                order. So column c of the matrix of x and row c of the matrix of weights in pair m hold term SPAN c +
//                m, counted from the beginning of the quad. Then a lane's numbers for the four pairs are neighbours in
//                memory
//   SPAN         4; for quantized weights 16 (stepwise_quantized.metal)
//   QUADS, STEP  how many quads a simdgroup multiplies per turn; how many numbers apart they begin
//   w            [column][m]: a lane's two weights in pair m of a quad
//   total        a simdgroup's sums, ROWS / 8 matrices
// Batch items and units past the end are computed from the numbers of the last ones, and their results are not used.
// Terms past K are zeros.

// TURN: how many terms of each sum are added in one turn. PITCH: the distance between two rows of the tile in
// threadgroup memory, in floats. It is 132 instead of 128, so that the rows begin in different banks of this memory.
constant constexpr int TURN = 128, PITCH = TURN + 4;

// The weights that one lane multiplies, of two columns of the product, which are two rows of the weight matrix. This
// specialization is for weights that are not quantized.
//   columns       pointers to the lane's weights of the next turn, one per column
//   numbers       its weights of the current turn: QUADS vectors of 4 neighbouring weights per column
// Eight lanes read 32 neighbouring weights of a row, one quad. The SLICES simdgroups that share a turn (128 terms that
// are added at once) take quads in rotation, so the quads of one simdgroup are 32 * SLICES numbers apart.
template <class W, int SLICES> struct LaneColumns {};
template <class S, int SLICES> struct LaneColumns<const device S*, SLICES> {
  enum { SPAN = 4, QUADS = 4 / SLICES, STEP = 32 * SLICES };
  const device S* columns[2];
  vec<S, 4> numbers[2][QUADS];
};

// Set the pointer of this lane's column e (0 or 1) to its first weights in row number `row` of the weight matrix, which
// has K numbers per row. first: the number within the row at which the product begins. place: the lane's row in an 8 x
// 8 matrix, which decides which 4 of 32 numbers the lane has. slice: the number of this simdgroup among the SLICES
// simdgroups that share a turn. The parameter without a name is the lane's number, which only quantized weights need.
template <int SLICES, class S>
void find_column(
    thread LaneColumns<const device S*, SLICES>& own, const device S* weights, int e, Index row, int K, int first,
    int, int place, int slice) {
  own.columns[e] = weights + row * K + first + 32 * slice + 4 * place;
}

// Read the lane's weights of both columns for the current turn of 128 terms, then move both pointers to the next turn.
// Four: a vector type for four numbers of type S at any address.
template <int SLICES, class S>
void load_turn(thread LaneColumns<const device S*, SLICES>& own) {
  using Four = typename Neighbours<S>::four;
  UNROLL for (int n = 0; n < 4 / SLICES; ++n) {
    own.numbers[0][n] = vec<S, 4>(*(const device Four*)(own.columns[0] + 32 * SLICES * n));
    own.numbers[1][n] = vec<S, 4>(*(const device Four*)(own.columns[1] + 32 * SLICES * n));
  }
  own.columns[0] += TURN;
  own.columns[1] += TURN;
}

// Convert the lane's weights for quad n of the turn (four pairs of 8 x 8 matrices) to float, as w[e][m]: column e (0 or
// 1) of the lane, pair m of the quad.
template <int SLICES, class S>
void weights_of(thread const LaneColumns<const device S*, SLICES>& own, int n, thread float (&w)[2][4]) {
  UNROLL for (int part = 0; part < 8; ++part) w[part / 4][part % 4] = float(own.numbers[part / 4][n][part % 4]);
}

// Copy the next 128 numbers of each of COUNT rows of the operand x into the tile in threadgroup memory. This simdgroup
// copies the rows first, first + STEP, ..., at most OWN rows; a lane copies 4 neighbouring numbers of each row.
//   rows   pointers to the lane's next 4 numbers in these rows; on return 128 numbers further
//   own    where the lane writes its 4 numbers of the first row. It points to float4, so rows are PITCH / 4 apart
// If STEP does not divide COUNT, some simdgroups copy one row less. Four rows are read before they are written, so that
// the reads overlap.
template <int COUNT, int STEP, int OWN, class R>
void copy_turn(thread R (&rows)[OWN], int first, threadgroup float4* own) {
  UNROLL for (int part = 0; part < OWN; part += 4) {  // four rows at a time: more would take too many registers
    float values[4][4];
    UNROLL for (int n = 0; n < 4; ++n) {
      if (part + n >= OWN) continue;
      operands_at<4>(rows[part + n], 0, values[n]);
      move(rows[part + n], TURN);
    }
    UNROLL for (int n = 0; n < 4; ++n) {
      if (part + n >= OWN || (COUNT % STEP != 0 && first + (part + n) * STEP >= COUNT)) continue;
      own[(part + n) * STEP * (PITCH / 4)] = float4(values[n][0], values[n][1], values[n][2], values[n][3]);
    }
  }
}

// Copy the last `left` numbers (fewer than 128) of each row of the operand x into the tile in threadgroup memory, and
// zeros behind them, up to number `end` rounded up to a multiple of 32. The caller passes 128 as `end` if the weights
// are quantized, because their product reads the whole tile, else `left`. This simdgroup copies the rows first, first +
// STEP, ..., at most OWN of COUNT rows. A lane copies the numbers lane, lane + 32, ... of a row. But the pointers in
// `rows` already point to number 4 * lane, as copy_turn needs them, so 3 * lane is subtracted from the index. own:
// where the lane writes its first number; rows are PITCH floats apart.
template <int COUNT, int STEP, int OWN, class R>
void copy_rest(thread const R (&rows)[OWN], int first, int lane, int left, int end, threadgroup float* own) {
  for (int part = 0; part < end; part += 32) {
    float values[OWN][1] = {};
    if (part + lane < left)
      UNROLL for (int n = 0; n < OWN; ++n) operands_at<1>(rows[n], part - 3 * lane, values[n]);
    UNROLL for (int n = 0; n < OWN; ++n)
      if (COUNT % STEP == 0 || first + n * STEP < COUNT) own[n * STEP * PITCH + part] = values[n][0];
  }
}

// Add to `total` the products of one quad, which are four pairs of 8 x 8 matrices: ROWS rows of x times eight columns
// of weights. A lane holds two neighbouring numbers of a row of each matrix.
//   w          w[0][m], w[1][m]: the lane's two numbers of the weights in pair m
//   operands   where the lane's numbers of x begin in the tile: its first number for each of the four pairs. Its second
//              numbers lie SPAN numbers further. It points to float4, so eight rows of the tile are 2 PITCH apart
template <int ROWS, int SPAN>
void multiply_quad(
    thread const float (&w)[2][4], threadgroup const float4* operands, thread simdgroup_float8x8 (&total)[ROWS / 8]) {
  float4 numbers[ROWS / 8][2];
  UNROLL for (int r = 0; r < ROWS / 8; ++r) {
    numbers[r][0] = operands[2 * r * PITCH];
    numbers[r][1] = operands[2 * r * PITCH + SPAN / 4];
  }
  simdgroup_float8x8 left, right;
  UNROLL for (int m = 0; m < 4; ++m) {
    right.thread_elements()[0] = w[0][m];
    right.thread_elements()[1] = w[1][m];
    UNROLL for (int r = 0; r < ROWS / 8; ++r) {
      left.thread_elements()[0] = numbers[r][0][m];
      left.thread_elements()[1] = numbers[r][1][m];
      simdgroup_multiply_accumulate(total[r], left, right, total[r]);
    }
  }
}

// Add to `total` the products of a whole turn of 128 terms: x in the tile, in threadgroup memory, times the weights
// that the lanes hold in `columns`. operands: where the lane's numbers of x begin in the tile.
template <int ROWS, class C>
void multiply_turn(
    thread const C& columns, threadgroup const float4* operands, thread simdgroup_float8x8 (&total)[ROWS / 8]) {
  UNROLL for (int n = 0; n < C::QUADS; ++n) {
    float w[2][4];
    weights_of(columns, n, w);
    multiply_quad<ROWS, C::SPAN>(w, operands + n * C::STEP / 4, total);
  }
}

// Multiply the last `left` terms (fewer than 128) of the K terms, after the whole turns, and add them to `total`.
// Weights past the end are replaced by 0, because in memory the next row of weights follows there. place: the lane's
// row in an 8 x 8 matrix. slice: the number of this simdgroup among those that share a turn. operands: where the lane's
// numbers of x begin in the tile. (The argument 4 of multiply_quad is SPAN.)
template <int ROWS, class S, int SLICES>
void multiply_rest(
    thread LaneColumns<const device S*, SLICES>& own, int left, int place, int slice,
    threadgroup const float4* operands, thread simdgroup_float8x8 (&total)[ROWS / 8]) {
  const int end = left - 32 * slice - 4 * place;  // the end of K, counted from the lane's first number
  for (int part = 0; part + 32 * slice < left; part += 32 * SLICES) {
    float w[2][4] = {};
    UNROLL for (int m = 0; m < 4; ++m) {
      if (part + m >= end) continue;
      w[0][m] = float(own.columns[0][part + m]);
      w[1][m] = float(own.columns[1][part + m]);
    }
    multiply_quad<ROWS, 4>(w, operands + part / 4, total);
  }
}

// The threads of a threadgroup compute the recurrent products of HEIGHT batch items for WIDTH columns. A simdgroup of
// 32 threads computes eight columns of one slice. So there are 4 threads for each column and slice.
template <int HEIGHT, int WIDTH, int SLICES>
struct ByTiles {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 4 * WIDTH * SLICES };

  // Write the recurrent products of x and the weights to `block.sums`: for each batch item and column the sum of K
  // terms. The K terms consist of SEGMENTS parts of `length` terms each, and a part is added in turns of 128 terms. In
  // a turn the threads first copy 128 numbers of each batch item into the tile, threadgroup memory [ROWS][PITCH] that
  // later holds the sums.
  //   STEP, OWN   the number of simdgroups; how many rows of the tile (batch items) each simdgroup copies
  //   copied, operands   where this thread's numbers begin in the tile, to write them and to read them
  // Barriers: each turn has one barrier between the copies and the products, and one between the products and the next
  // writes to this memory, which are the copies of the next turn or the sums. At the end one barrier separates the
  // writes of the sums from their reads. If SLICES > 1, SLICES simdgroups (slices) each compute a part of the same
  // sums, so each element of the result has one sum per slice. A thread then adds these up only for the elements that
  // it reads afterwards: those with the indices i, i + THREADS, ..., where i is the thread's index in the threadgroup.
  // No barrier follows, so the thread must not read other elements.
  template <class Gates, int FIRST, int UNITS, int SEGMENTS, class X, class W>
  static void product(thread const X& x, W weights, int B, int H, int K, thread const Block& block) {
    using Own = LaneColumns<W, SLICES>;
    constexpr int STEP = THREADS / 32, OWN = (ROWS + STEP - 1) / STEP;
    const int lane = block.lane, simdgroup = block.simdgroup, length = K / SEGMENTS;
    const int slice = SLICES == 1 ? 0 : simdgroup / (COLUMNS / 8), eight = simdgroup - COLUMNS / 8 * slice;
    // eight: the index of the group of eight columns that this simdgroup computes. The eight columns never belong to
    // two gates, because UNITS is a multiple of 8. So one gate and the first unit describe them.
    const int first_unit = block.j0 + eight % (UNITS / 8) * 8, gate = Gates::block(FIRST + eight / (UNITS / 8));
    // This lane's position in an 8 x 8 matrix: its row and the first of its two columns.
    const int row = (lane >> 2 & 4) + (lane >> 1 & 3), pair = (lane >> 2 & 2) * 2 + (lane & 1) * 2;
    threadgroup float4* copied = (threadgroup float4*)block.sums + simdgroup * (PITCH / 4) + lane;
    threadgroup const float4* operands =
        (threadgroup const float4*)block.sums + row * (PITCH / 4) + (32 * slice + Own::SPAN * pair) / 4;
    simdgroup_float8x8 total[ROWS / 8];
    UNROLL for (int r = 0; r < ROWS / 8; ++r) total[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int segment = 0; segment < SEGMENTS; ++segment) {
      typename X::Row rows[OWN];
      Own columns;
      UNROLL for (int n = 0; n < OWN; ++n) {
        find_row(x, min(block.b0 + simdgroup + n * STEP, B - 1), segment, rows[n]);
        move(rows[n], 4 * lane);
      }
      UNROLL for (int e = 0; e < 2; ++e) {
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
        // The product with quantized weights (SPAN is not 4) reads all 128 numbers of a tile's row, even if fewer are
        // left, so zeros must fill the row. The product with other weights reads only up to `left`, rounded up to a
        // multiple of 32.
        const int end = Own::SPAN == 4 ? left : TURN;
        copy_rest<ROWS, STEP>(rows, simdgroup, lane, left, end, block.sums + simdgroup * PITCH + lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_rest<ROWS>(columns, left, row, slice, operands, total);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
    UNROLL for (int r = 0; r < ROWS / 8; ++r)
      simdgroup_store(total[r], block.sums + (slice * ROWS + 8 * r) * COLUMNS + 8 * eight, COLUMNS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if constexpr (SLICES > 1) {  // a thread adds up the sums of the cells that it computes later
      for (int cell = 32 * simdgroup + lane; cell < ROWS * COLUMNS; cell += THREADS) {
        UNROLL for (int n = 1; n < SLICES; ++n) block.sums[cell] += block.sums[n * ROWS * COLUMNS + cell];
      }
    }
  }
};
