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

// Adds to total[m CHAINS] ... total[m CHAINS + CHAINS - 1] parts of the product of 8 rows of weights, the m-th of TILES,
// with the vectors.
template <int TILES, int CHAINS, int RESIDENT, int LENGTH, class V>
void product_of_matrices(
    thread simdgroup_float8x8 (&total)[TILES * CHAINS], thread const V* kept, const device V* read,
    threadgroup const float* vectors) {
  constexpr int PARTS = PARTS_OF<LENGTH>;
  simdgroup_float8x8 left, right;
#pragma clang loop unroll(full)
  for (int part = 0; part < PARTS; part += 2) {
    float4 weights[TILES];
#pragma clang loop unroll(full)
    for (int m = 0; m < TILES; ++m) {
      const int n = part / 2 * TILES + m;
      if (n < RESIDENT) weights[m] = float4(kept[n]);
      else weights[m] = float4(read[32 * n]);
    }
#pragma clang loop unroll(full)
    for (int next = 0; next < 2; ++next) {
      if (part + next >= PARTS) continue;
      simdgroup_load(right, vectors + 64 * (part + next), 8);
#pragma clang loop unroll(full)
      for (int m = 0; m < TILES; ++m) {
        left.thread_elements()[0] = weights[m][2 * next];
        left.thread_elements()[1] = weights[m][2 * next + 1];
        const int chain = m * CHAINS + (part + next) % CHAINS;
        simdgroup_multiply_accumulate(total[chain], left, right, total[chain]);
      }
    }
  }
}
