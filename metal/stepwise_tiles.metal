// The recurrent product of a step for many batch items, by products of 8 x 8 matrices:
//
//   sums[r, n] = sum over k of x(b0 + r, k) weights[row(n), k],   k = 0 ... K - 1
//   row(n) = Gates::block(FIRST + n / UNITS) H + j0 + n % UNITS
//
// A threadgroup computes ROWS batch items from b0 on, and UNITS units from j0 on of each gate from FIRST on (COLUMNS
// columns). Simdgroup s (32 lanes) computes the columns 8 s ... 8 s + 7. The K terms are added in turns of TURN = 128.
// In a turn the threads first copy 128 numbers of x of all items, as float, into a "tile" in threadgroup memory,
// because all simdgroups read them. A weight is used by one simdgroup only: lanes read weights from device memory.
//
//   slice    if there are few columns, SLICES simdgroups share eight columns, so that more threads are at work; each
//            multiplies a part of every turn. The results are sums [SLICES, ROWS, COLUMNS]; then those of the other
//            slices are added to the first
//   quad     four of the 16 pairs of 8 x 8 matrices (x, weights) of a turn. Terms may be added in any order, so a quad
//            takes its terms such that each lane has neighbouring numbers in memory: column c of x and row c of the
//            weights in pair m are number SPAN c + m of the quad. QUADS: how many quads a simdgroup multiplies per
//            turn; STEP: how far apart they begin
//   SPAN     4; for quantized weights 16 (stepwise_quantized.metal)
//   PITCH    the distance of the tile's rows in floats
//   x, row   the operand, a row of numbers per batch item. find_row(x, b, segment, row) lets `row` point to item b's
//            numbers in one of SEGMENTS parts; operands_at<N>(row, k, values) reads N numbers from number k on;
//            move(row, n) goes n numbers further. R: the type of row
//   LaneColumns   the weights of one lane: of two columns, which are two rows of the weight matrix
//   w        [column][m]: a lane's two weights in pair m of a quad       total   a simdgroup's sums, ROWS / 8 matrices
//   S, W, Index   the dtype of the arrays; a pointer to weights; the integer type that counts elements
//   block    a threadgroup's part of the result: b0, j0, simdgroup, lane; `sums`, which shares the memory of the tile
//
// Items and units past the end repeat the last ones; their results are not used. Terms past K are zeros.

// PITCH is 132 instead of 128, so that the rows of a tile begin in different banks of threadgroup memory.
constant constexpr int TURN = 128, PITCH = TURN + 4;

// The weights that one lane multiplies: those of two columns of the product, which are two rows of the weight matrix.
//   columns       pointers to the lane's weights of the next turn, one per column
//   numbers       its weights of the current turn: QUADS vectors of 4 neighbouring weights per column
//   SPAN, QUADS, STEP   see the head of this file
// Eight lanes with neighbouring vectors read 32 neighbouring weights, so quads begin 32 numbers apart, times SLICES.
template <class W, int SLICES> struct LaneColumns {};
template <class S, int SLICES> struct LaneColumns<const device S*, SLICES> {
  enum { SPAN = 4, QUADS = 4 / SLICES, STEP = 32 * SLICES };
  const device S* columns[2];
  vec<S, 4> numbers[2][QUADS];
};

// Set the pointer of this lane's column e (0 or 1) to its first weights in row number `row` of the weight matrix, which
// has K numbers per row. first: the number within the row at which the product begins. place: the lane's row in an 8 x
// 8 matrix; it selects four of 32 numbers. slice: which of the simdgroups that share a turn. The parameter without a
// name is the lane's number, which only quantized weights need.
template <int SLICES, class S>
void find_column(
    thread LaneColumns<const device S*, SLICES>& own, const device S* weights, int e, Index row, int K, int first,
    int, int place, int slice) {
  own.columns[e] = weights + row * K + first + 32 * slice + 4 * place;
}

// Read the lane's weights of both columns for the current turn, then move both pointers to the next turn. Four: a
// vector of four S at any address.
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

// Convert to float the lane's weights for quad n of the turn, as w[column][m]: column 0 or 1 of the lane, pair m of the
// quad.
template <int SLICES, class S>
void weights_of(thread const LaneColumns<const device S*, SLICES>& own, int n, thread float (&w)[2][4]) {
#pragma clang loop unroll(full)
  for (int part = 0; part < 8; ++part) w[part / 4][part % 4] = float(own.numbers[part / 4][n][part % 4]);
}

// Copy the next 128 numbers of COUNT rows of x into the tile. This simdgroup copies the rows first, first + STEP, ...,
// at most OWN rows; a lane copies 4 neighbouring numbers of each.
//   rows   pointers to the lane's next 4 numbers in these rows; on return 128 numbers further
//   own    where the lane's 4 numbers of the first row go. It counts float4, so rows are PITCH / 4 apart
// If STEP does not divide COUNT, some simdgroups have a row less. All reads of four rows come before the writes, so
// that they overlap.
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
// up to a multiple of 32. The caller gives TURN as `end` if the weights multiply a whole turn (quantized weights), else
// `left`. A lane copies the numbers lane, lane + 32, ... of a row. The pointers in `rows`, which copy_turn uses, are at
// number 4 lane instead: so 3 lane is subtracted from the index. The others are as in copy_turn, but own counts floats.
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

// Add to `total` the products of one quad: all ROWS rows of x times eight columns of weights, as four products of 8 x 8
// matrices. A lane holds two neighbouring numbers of a row of each matrix.
//   w          w[0][m], w[1][m]: the lane's two numbers of the weights in pair m
//   operands   where the lane's numbers of x begin in the tile: its first number for each of the four pairs; the second
//              ones lie SPAN numbers further. It counts float4, so eight rows of the tile are 2 PITCH apart
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

// Add to `total` the products of a whole turn: the x in the tile times the weights that the lanes hold. operands: where
// the lane's numbers of x begin in the tile.
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

// Multiply what remains of K after the whole turns: `left` < 128 terms. Weights past the end are replaced by 0, because
// in memory the next row of weights follows there. place: the lane's row in an 8 x 8 matrix. 4 is SPAN.
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

// The product of HEIGHT = ROWS batch items and WIDTH = COLUMNS columns. A simdgroup of 32 threads computes eight
// columns, or one of SLICES parts of their terms: 4 threads for each column and slice.
template <int HEIGHT, int WIDTH, int SLICES>
struct ByTiles {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 4 * WIDTH * SLICES };

  // Compute `block.sums`. x is read in SEGMENTS parts of K / SEGMENTS = `length` numbers, each in turns.
  //   STEP, OWN   the number of simdgroups; how many rows of the tile each copies
  //   copied, operands   where this thread's numbers begin in the tile, to write them and to read them
  // Barriers: in each turn one between the copies and the products, and one between the products and the next copies,
  // or the writes of the sums, which lie in the same memory; at the end one between these writes and their reads. With
  // slices a thread then adds up only the sums of its own cells, thread, thread + THREADS, ..., and no barrier follows:
  // a caller may read only those.
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
