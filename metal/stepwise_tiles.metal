// The recurrent product of a step for many batch items: the equation of stepwise_lanes.metal, computed with 8 x 8
// matrices.
//
// The product proceeds along K in rounds of 32 columns. In each round the threads copy these columns as float into
// `tiles` in threadgroup memory: ROWS rows of operands, then COLUMNS rows of weights, PITCH floats apart. Eight threads
// copy a row, four numbers per thread. Simdgroup s computes columns 8 s ... 8 s + 7 for all rows. If COLUMNS is below
// 32, SLICES simdgroups share a block of eight columns, and each multiplies some of the matrices of every tile. sums is
// [SLICES, ROWS, COLUMNS]; at the end its first slice holds the result. With several slices, a thread may read only the
// sums of the cells thread_index, thread_index + THREADS, ..., because it has added up these itself.
//
// Barriers: in each round one between the copies and the products, and one between the products and the next round's
// copies; at the end one between the writes of all simdgroups and the reads of the sums.
//
// Rows and units past the end repeat the last ones; their results are not used. Numbers past the end of K are zeros.

// The distance between the rows of a tile is 36 instead of 32, so that the rows begin in different banks of threadgroup
// memory.
constant constexpr int PITCH = 36;

// Read four numbers of a row. If the row is not WHOLE, only `left` numbers exist; the others are set to 0.
template <bool WHOLE, class R>
void part_of(thread const R& row, int left, thread float (&values)[4]) {
  if constexpr (WHOLE) {
    operands_at<4>(row, 0, values);
  } else {
#pragma clang loop unroll(full)
    for (int e = 0; e < 4; ++e) {
      float value[1] = {0.0f};
      if (e < left) operands_at<1>(row, e, value);
      values[e] = value[0];
    }
  }
}

// Copy 32 columns of COUNT rows into a tile. A thread copies four numbers of every AT_ONCE-th row, beginning with row
// `first`, to `own`, and advances its rows by 32.
template <bool WHOLE, int COUNT, int AT_ONCE, int OWN, class R>
void copy_tile(thread R (&rows)[OWN], int left, threadgroup float* own, int first) {
#pragma clang loop unroll(full)
  for (int n = 0; n < OWN; ++n) {
    if (COUNT % AT_ONCE != 0 && first + n * AT_ONCE >= COUNT) continue;
    float values[4];
    part_of<WHOLE>(rows[n], left, values);
    move(rows[n], 32);
    *(threadgroup float4*)(own + n * AT_ONCE * PITCH) = float4(values[0], values[1], values[2], values[3]);
  }
}

// Multiply rows 8 r ... 8 r + 7 of the operands with this simdgroup's columns, and add the result to total[r]. A lane
// holds two neighbouring numbers of each 8 x 8 matrix: two of one row of the left matrix, the operands, and two of one
// row of the right matrix, which is the transposed tile of weights. `operands` and `weights` point to the lane's first
// number.
template <int ROWS, int SLICES>
void multiply_tile(
    threadgroup const float* operands, threadgroup const float* weights, thread simdgroup_float8x8 (&total)[ROWS / 8]) {
  simdgroup_float8x8 left, right;
#pragma clang loop unroll(full)
  for (int part = 0; part < 32; part += 8 * SLICES) {
    right.thread_elements()[0] = weights[part];
    right.thread_elements()[1] = weights[PITCH + part];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS / 8; ++r) {
      const float2 neighbours = *(threadgroup const float2*)(operands + 8 * r * PITCH + part);
      left.thread_elements()[0] = neighbours.x;
      left.thread_elements()[1] = neighbours.y;
      simdgroup_multiply_accumulate(total[r], left, right, total[r]);
    }
  }
}

template <int HEIGHT, int WIDTH>
struct ByTiles {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, SLICES = WIDTH == 8 ? 4 : WIDTH == 16 ? 2 : 1, THREADS = 4 * WIDTH * SLICES };

  template <class Gates, int FIRST, int UNITS, int SEGMENTS, class X, class W>
  static void product(thread const X& x, W weights, int B, int H, int K, thread const Block& block) {
    constexpr int AT_ONCE = THREADS / 8, OWN = (ROWS + AT_ONCE - 1) / AT_ONCE;
    constexpr int OWN_COLUMNS = (COLUMNS + AT_ONCE - 1) / AT_ONCE;
    const int lane = block.lane, thread_index = 32 * block.simdgroup + lane, first = thread_index / 8;
    const int k0 = 4 * (lane % 8), length = K / SEGMENTS;
    const int eight = block.simdgroup % (COLUMNS / 8), slice = block.simdgroup / (COLUMNS / 8);
    // This lane's position in an 8 x 8 matrix: its row and the first of its two columns.
    const int row = (lane >> 2 & 4) + (lane >> 1 & 3), pair = (lane >> 2 & 2) * 2 + (lane & 1) * 2;
    threadgroup float* weight_tile = block.tiles + ROWS * PITCH;
    threadgroup const float* own = block.tiles + row * PITCH + 8 * slice + pair;
    threadgroup const float* own_weights = weight_tile + (8 * eight + pair) * PITCH + 8 * slice + row;
    threadgroup float* copied = block.tiles + first * PITCH + k0;
    threadgroup float* copied_weights = weight_tile + first * PITCH + k0;
    simdgroup_float8x8 total[ROWS / 8];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS / 8; ++r) total[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int segment = 0; segment < SEGMENTS; ++segment) {
      typename X::Row rows[OWN];
      typename Columns<W>::Row columns[OWN_COLUMNS];
#pragma clang loop unroll(full)
      for (int n = 0; n < OWN; ++n) {
        find_row(x, min(block.b0 + first + n * AT_ONCE, B - 1), segment, rows[n]);
        move(rows[n], k0);
      }
#pragma clang loop unroll(full)
      for (int n = 0; n < OWN_COLUMNS; ++n) {
        const int column = first + n * AT_ONCE, unit = min(block.j0 + column % UNITS, H - 1);
        const Index weight_row = Index(Gates::block(FIRST + column / UNITS)) * H + unit;
        find_column(weights, weight_row, K, segment * length, k0, lane, columns[n]);
      }
      int left = length;
      for (; left >= 32; left -= 32) {
        copy_tile<true, ROWS, AT_ONCE>(rows, 4, copied, first);
        copy_tile<true, COLUMNS, AT_ONCE>(columns, 4, copied_weights, first);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tile<ROWS, SLICES>(own, own_weights, total);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (left > 0) {
        copy_tile<false, ROWS, AT_ONCE>(rows, left - k0, copied, first);
        copy_tile<false, COLUMNS, AT_ONCE>(columns, left - k0, copied_weights, first);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tile<ROWS, SLICES>(own, own_weights, total);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS / 8; ++r)
      simdgroup_store(total[r], block.sums + (slice * ROWS + 8 * r) * COLUMNS + 8 * eight, COLUMNS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if constexpr (SLICES > 1) {  // a thread adds up the sums of the cells it will compute
      for (int cell = thread_index; cell < ROWS * COLUMNS; cell += THREADS) {
#pragma clang loop unroll(full)
        for (int n = 1; n < SLICES; ++n) block.sums[cell] += block.sums[n * ROWS * COLUMNS + cell];
      }
    }
  }
};
