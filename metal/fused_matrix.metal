// The fused kernels for wide batches, in 8 x 8 matrices; fused.metal has the arrays. A threadgroup owns 8 batch items
// of one direction, each of its simdgroups 8 hidden units, whose rows of weights stay in registers as far as they fit.
//
// The product is weights times vectors: the left matrix holds 8 rows of weights, one per unit, the right one 8 numbers
// of each item, and the sum has a unit per row and an item per column. `vectors` is [length, padded to 8][8 items]. A
// lane has one row of a matrix and two neighbouring columns: so one unit of two items, whose cells it computes alone.
// Units and numbers past the end are padding: their weights are 0 and nothing of them is stored.

template <int LENGTH> constant constexpr int PARTS_OF = (LENGTH + 7) / 8;

// Where a lane's two numbers stand in a matrix: its row and the first of its columns.
inline int row_of(int lane) { return (lane >> 2 & 4) + (lane >> 1 & 3); }
inline int column_of(int lane) { return (lane >> 2 & 2) * 2 + (lane & 1) * 2; }

// Two weights from row `row` of [rows, length], 0 where there are none.
template <class S, class W>
vec<S, 2> weight_pair(W weights, int row, int rows, int k, int length) {
  vec<S, 2> pair = vec<S, 2>(S(0.0f));
#pragma clang loop unroll(full)
  for (int n = 0; n < 2; ++n)
    if (row < rows && k + n < length) pair[n] = S(weights[long(row) * length + k + n]);
  return pair;
}

// Adds to total[m CHAINS] ... total[m CHAINS + CHAINS - 1] parts of the product of rows of weights, of which the lane's
// is rows_at[m], with the vectors, for every m whose bit in WANTED is set. The first RESIDENT parts of each row are in
// `kept`, the others are read again.
template <int TILES, int CHAINS, int WANTED, int RESIDENT, int LENGTH, class S, class W>
void product_of_matrices(
    thread simdgroup_float8x8 (&total)[TILES * CHAINS], thread const vec<S, 2>* kept, W weights,
    thread const int (&rows_at)[TILES], int rows, threadgroup const float* vectors, int lane) {
  simdgroup_float8x8 left, right;
#pragma clang loop unroll(full)
  for (int part = 0; part < PARTS_OF<LENGTH>; ++part) {
    simdgroup_load(right, vectors + 64 * part, 8);
#pragma clang loop unroll(full)
    for (int m = 0; m < TILES; ++m) {
      if (!((WANTED >> m) & 1)) continue;
      vec<S, 2> pair;
      if (part < RESIDENT)
        pair = kept[m * RESIDENT + min(part, RESIDENT - 1)];
      else
        pair = weight_pair<S>(weights, rows_at[m], rows, 8 * part + column_of(lane), LENGTH);
      left.thread_elements()[0] = float(pair[0]);
      left.thread_elements()[1] = float(pair[1]);
      const int chain = m * CHAINS + part % CHAINS;
      simdgroup_multiply_accumulate(total[chain], left, right, total[chain]);
    }
  }
}
