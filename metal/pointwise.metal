// Whole-sequence kernels of a cell of the user's own: what its forward and its backward pass share.
//
// The cell is a struct that mlx_lstm/engines/metal/pointwise.py generates from the traced function. Shapes, for one
// direction and with the numbers of the struct (G gates, C = STATES - 1 states besides h, U inputs of each step, V
// parameters, K saved blocks, D blocks of gradients):
//   z       [T, B, G H]      h     [T, B, H]         h0, hT  [B, H]        inputs  [T, B, U H]   lengths  [B]
//   gates   [T, B, K H]      c     [T, B, C H] float c0, cT  [B, C H] float params [V H]         keep     [T, B]
//   mask    [T or 1, B, H], which already includes `keep`
//   arranged, sizes          as in fused.metal, with one direction
//
// Members of a cell's struct:
//   GATES, STATES, INPUTS, PARAMS, KEPT, GRADIENTS   the numbers G, C + 1, U, V, K, D
//   LANES      the lanes of a unit: 4, or 1 for a cell without a product
//   PRODUCTS   the gates that have a recurrent product: GATES or 0
//   SCATTERS   whether each lane gets the sum of its own gate only, in sums[0]; else all lanes get all sums
//   READS_H    whether the backward pass reads h before or after a step
//   forward, backward   one step of one unit of one batch item. The lanes of a unit share the work: an array of blocks
//              (z, gates, c, gradients) has block LANES j + lane in register j of a lane. All lanes have all states.
// A threadgroup owns ROWS batch items, as in fused.metal; rows past the last item repeat it.

// The number of registers in which a lane has its share of COUNT blocks; at least 1, because arrays of size 0 are not
// allowed.
template <int COUNT, int LANES>
constant constexpr int REGISTERS_OF = COUNT == 0 ? 1 : (COUNT + LANES - 1) / LANES;

// A cell without a product has no weights: the pointer is never read.
template <int COUNT, class V> const device V* vectors_of_lane(Absent, int, uint, uint) { return (const device V*)0; }

// Return the position of `unit` in block `block` of a row of an array [rows, COUNT H]. at: the unit's position in the
// same row of an array [rows, H]. One multiply-add per access: what is added is the same at all steps.
template <int COUNT, int H, class Index>
Index place_of(Index at, int block, int unit) { return at * COUNT + Index(block * H + unit - COUNT * unit); }

// Load a lane's blocks of a row. Lanes past the last block load the last one.
template <int COUNT, int LANES, int H, class Index, class A>
void load_blocks(A array, Index at, int lane, int unit, thread float (&values)[REGISTERS_OF<COUNT, LANES>]) {
#pragma clang loop unroll(full)
  for (int j = 0; j < REGISTERS_OF<COUNT, LANES>; ++j) {
    const int block = COUNT % LANES == 0 || LANES * j + lane < COUNT ? LANES * j + lane : COUNT - 1;
    values[j] = COUNT == 0 ? 0.0f : value_at(array, place_of<COUNT, H>(at, block, unit), 0.0f);
  }
}

// Store a lane's blocks to a row.
template <int COUNT, int LANES, int H, class Index, class A>
void store_blocks(A array, Index at, int lane, int unit, thread const float (&values)[REGISTERS_OF<COUNT, LANES>]) {
#pragma clang loop unroll(full)
  for (int j = 0; j < REGISTERS_OF<COUNT, LANES>; ++j)
    if (COUNT % LANES == 0 || LANES * j + lane < COUNT)
      store(array, place_of<COUNT, H>(at, LANES * j + lane, unit), values[j]);
}

// Load all COUNT blocks of a row into every lane.
template <int COUNT, int H, class Index, class A, int SIZE>
void load_all(A array, Index at, int unit, thread float (&values)[SIZE], int first) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) values[first + k] = value_at(array, place_of<COUNT, H>(at, k, unit), 0.0f);
}

// Give a lane the sums of its unit. With SCATTERS, slot n of a lane belongs to gate n ^ lane, and sums[0] becomes the
// whole sum of the lane's own gate; else every sum becomes whole in all lanes.
template <class Cell, int SIZE>
void sum_of_own_unit(thread float (&sums)[SIZE]) {
  if constexpr (Cell::SCATTERS != 0) {
    sums[0] += simd_shuffle_xor(sums[2], 2);
    sums[1] += simd_shuffle_xor(sums[3], 2);
    sums[0] += simd_shuffle_xor(sums[1], 1);
  } else {
#pragma clang loop unroll(full)
    for (int n = 0; n < Cell::PRODUCTS; ++n) sums[n] = sum_over_lanes<Cell::LANES>(sums[n]);
  }
}

// Functions of MLX that Metal lacks, or computes with a larger error.

inline float own_sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

inline float own_max(float a, float b) { return a > b || a != a ? a : b; }

inline float own_min(float a, float b) { return a < b || a != a ? a : b; }

// Kahan's log(1 + x): the rounding error of 1 + x is divided out.
inline float own_log1p(float x) {
  const float u = 1.0f + x;
  return u == 1.0f || u - u != 0.0f ? (u == 1.0f ? x : log(u)) : log(u) * (x / (u - 1.0f));
}

// A Taylor polynomial near 0, where exp(x) - 1 loses digits.
inline float own_expm1(float x) {
  const float tail = 0.0416666667f + x * (8.33333333e-3f + x * 1.38888889e-3f);
  const float near = x + x * x * (0.5f + x * (0.166666667f + x * tail));
  return x * x < 0.04f ? near : exp(x) - 1.0f;
}

inline float own_logaddexp(float a, float b) {
  const float most = own_max(a, b), least = own_min(a, b);
  return least - least != 0.0f || most - most != 0.0f ? most : most + own_log1p(exp(least - most));
}

// erf: a Taylor series up to |x| = 1, then 1 - exp(-x^2) times a continued fraction. (Abramowitz and Stegun, 7.1.5 and
// 7.1.14.)
inline float own_erf(float x) {
  const float s = x * x, t = fabs(x);
  float near = 0.0f, term = 1.0f, far = 0.0f;
  for (int n = 0; n < 12; ++n) near += term / float(2 * n + 1), term *= -s / float(n + 1);
  for (int n = 28; n >= 1; --n) far = 0.5f * float(n) / (t + far);
  far = 1.0f - exp(-s) * 0.564189584f / (t + far);
  return t < 1.0f ? 1.12837917f * x * near : t > 4.0f ? (x < 0.0f ? -1.0f : 1.0f) : x < 0.0f ? -far : far;
}
