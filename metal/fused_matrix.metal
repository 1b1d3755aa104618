// The fused kernels for wide batches, in 8 x 8 matrices; fused.metal has the arrays. A threadgroup owns 8 batch items
// of one direction, each of its simdgroups 8 hidden units.
//
// The product is weights times vectors: the left matrix holds 8 rows of weights, one per unit, the right one 8 numbers
// of each item, and the sum has a unit per row and an item per column. `vectors` is [length, padded to 8][8 items]. A
// lane has one row of a matrix and two neighbouring columns: so one unit of two items, whose cells it computes alone.
// A vector of its weights serves two matrices, one after the other.

template <int LENGTH> constant constexpr int PARTS_OF = (LENGTH + 7) / 8;

// Where a lane's two numbers stand in a matrix: its row and the first of its columns.
inline int row_of(int lane) { return (lane >> 2 & 4) + (lane >> 1 & 3); }
inline int column_of(int lane) { return (lane >> 2 & 2) * 2 + (lane & 1) * 2; }

// Adds to total[m CHAINS] ... total[m CHAINS + CHAINS - 1] parts of the product of 8 rows of weights, the m-th of
// TILES, with the vectors.
template <int TILES, int CHAINS, int RESIDENT, int LENGTH, class V>
void product_of_matrices(
    thread simdgroup_float8x8 (&total)[TILES * CHAINS], thread const V* kept, const device V* read,
    threadgroup const float* vectors) {
  constexpr int PARTS = PARTS_OF<LENGTH>;
  simdgroup_float8x8 left, right[2];
#pragma clang loop unroll(full)
  for (int part = 0; part < PARTS; part += 2) {
    simdgroup_load(right[0], vectors + 64 * part, 8);
    if (part + 1 < PARTS) simdgroup_load(right[1], vectors + 64 * (part + 1), 8);
#pragma clang loop unroll(full)
    for (int m = 0; m < TILES; ++m) {
      const int n = part / 2 * TILES + m, first = m * CHAINS + part % CHAINS, second = m * CHAINS + (part + 1) % CHAINS;
      float4 weights;
      if (n < RESIDENT) weights = float4(kept[n]);
      else weights = float4(read[32 * n]);
      left.thread_elements()[0] = weights[0];
      left.thread_elements()[1] = weights[1];
      simdgroup_multiply_accumulate(total[first], left, right[0], total[first]);
      if (part + 1 >= PARTS) continue;
      left.thread_elements()[0] = weights[2];
      left.thread_elements()[1] = weights[3];
      simdgroup_multiply_accumulate(total[second], left, right[1], total[second]);
    }
  }
}
