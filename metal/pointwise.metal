// What the forward and the backward whole-sequence kernel in lanes of a cell written by the user share. fused.metal
// describes their arrays, cell.metal the cell's struct `Own`. mlx_lstm/engines/metal/pointwise.py generates this struct
// and Lanes<Own>, which has these members:
//   LANES        the adjacent lanes that share a hidden unit: 4, or 1 for a cell without a product
//   SCATTERS     whether each of the four lanes gets only the recurrent product of one gate (lane k: gate k), in
//                sums[0]; otherwise all lanes get the products of all gates
//   NORMALISES   whether the cell has a layer normalisation
//   TWO_PRODUCTS, slot_block    0, and the block of Wh of the weights in a lane's slot (fused_lanes.metal)
//   forward, backward   one step of one unit of one batch item, like those of the cell, with `lane` as an additional
//                first parameter. The lanes of a unit share the work: register j of a lane holds block 4 j + lane of y
//                and of the gradients d. The unit's states and their gradients are in every lane.
//
// A block of an array is the numbers of all units for one gate, saved value, gradient, input or state. value_at, store:
// read and write one number of an array, which may be absent (arrays.metal). place_of<COUNT, H>(at, k, unit): the
// position of a unit's block k of COUNT blocks (fused.metal).
//
// H: hidden units. ROWS: the batch items of a threadgroup. S: the dtype of the arrays. Index: an unsigned type that
// counts elements. Cell: `Own`, with the numbers of its GATES, of its recurrent PRODUCTS (GATES or 0). Arrays: the
// struct of all arrays. A, V: types of an array and of a vector of weights. ROW: the vectors of 4 floats in a row of
// the product's operands, one row per batch item (fused.metal). `Absent` is the type of an array, or of a norm, that
// the call does not have. SIZE_FOR<N>: N, at least 1, because Metal has no arrays of size 0.

// The number of registers that a lane needs if COUNT values of a unit are divided among LANES lanes, at least 1.
template <int COUNT, int LANES>
constant constexpr int REGISTERS_OF = SIZE_FOR<(COUNT + LANES - 1) / LANES>;

// Overload for a cell without a recurrent product, which has no weights: return a null pointer, which is never read.
template <int COUNT, class V> const device V* vectors_of_lane(Absent, int, uint, uint) { return (const device V*)0; }

// Load a lane's part of the COUNT values that an array has for one unit, step and item; the LANES lanes of a unit share
// these values. values[j] gets value number LANES * j + lane, or the last value if there are fewer, so that no read
// leaves the array. at: the unit's position in an array with one value per unit. lane: the lane's number in its unit.
template <int COUNT, int LANES, int H, class Index, class A>
void load_blocks(A array, Index at, int lane, int unit, thread float (&values)[REGISTERS_OF<COUNT, LANES>]) {
#pragma clang loop unroll(full)
  for (int j = 0; j < REGISTERS_OF<COUNT, LANES>; ++j) {
    const int block = COUNT % LANES == 0 || LANES * j + lane < COUNT ? LANES * j + lane : COUNT - 1;
    values[j] = COUNT == 0 ? 0.0f : value_at(array, place_of<COUNT, H>(at, block, unit), 0.0f);
  }
}

// Store a lane's part of the COUNT values that an array has for one unit, step and item; the LANES lanes of a unit
// share these values. values[j] is value number LANES * j + lane. An array of 0 values is absent, so `store` does
// nothing. at: the unit's position in an array with one value per unit. lane: the lane's number in its unit.
template <int COUNT, int LANES, int H, class Index, class A>
void store_blocks(A array, Index at, int lane, int unit, thread const float* values) {
#pragma clang loop unroll(full)
  for (int j = 0; j < REGISTERS_OF<COUNT, LANES>; ++j)
    if (COUNT % LANES == 0 || LANES * j + lane < COUNT)
      store(array, place_of<COUNT, H>(at, LANES * j + lane, unit), values[j]);
}

// Add up the partial products of a unit's lanes. With SCATTERS each lane gets only the sum of its own gate, in sums[0].
// In this case sums[n] is on entry a part of the sum of gate n ^ lane (exclusive or). So sums[0] belongs to the lane's
// own gate, and one shuffle sends a sum to the lane that needs it: simd_shuffle_xor(x, n) returns the x of lane (own ^
// n). Without SCATTERS all lanes get the sums of all gates.
template <class Cell, int SIZE>
void sum_of_own_unit(thread float (&sums)[SIZE]) {
  if constexpr (Lanes<Cell>::SCATTERS != 0) {
    sums[0] += simd_shuffle_xor(sums[2], 2);
    sums[1] += simd_shuffle_xor(sums[3], 2);
    sums[0] += simd_shuffle_xor(sums[1], 1);
  } else {
#pragma clang loop unroll(full)
    for (int n = 0; n < Cell::PRODUCTS; ++n) sums[n] = sum_over_lanes<Lanes<Cell>::LANES>(sums[n]);
  }
}

// Layer normalisation. The kernels call the functions below for every cell. For a cell without a norm they do nothing:
// the array norm_eps, from which own_norm_of_lane makes what a lane needs, is then `absent`, and each function has an
// overload for the type Absent. fused_norm_own.metal has the overloads for the other cells, with named parameters.

// Without a norm (the array norm_eps is absent), return `absent` in place of what a lane needs for it. The other
// parameters are those of the overload in fused_norm_own.metal.
template <class Cell, int H, class Arrays>
Absent own_norm_of_lane(Absent, thread const Arrays&, int, int, int, bool, uint, threadgroup float4*) { return absent; }

// own_norm_size returns the size of the threadgroup memory that a norm needs, own_norm_numbers what its backward step
// reads. Without a norm these are 0 and nothing.
template <class Cell, int H, int ROWS> int own_norm_size(Absent) { return 0; }
template <int ROWS> Absent own_norm_numbers(Absent) { return absent; }

// Without a norm, leave the sums of the products unchanged. The parameters without a name are those of the overload in
// fused_norm_own.metal; Absent stands for what a norm needs.
template <class Cell, int H, int ROWS, class Numbers, int SIZE>
void normalise_gates(Absent, int, thread Numbers (&)[ROWS], thread float (&)[ROWS][SIZE]) {}

// Without a norm, read nothing for it. The parameters without a name are those of the overload in fused_norm_own.metal;
// Absent stands for what a norm needs.
template <class Cell, int H, int ROWS, class Index, class Arrays>
void read_gates(
    thread const Arrays&, thread const Sweep&, int, Index, thread const Index (&)[ROWS], uint, int, int, Absent) {}

// Without a norm, copy nothing: own_products_backward does not need the gradients. The parameters without a name are
// those of the overload in fused_norm_own.metal; Absent stands for what a norm needs.
template <int SIZE> void keep_gradients(bool, int, thread const float (&)[SIZE], Absent) {}

// Without a norm, do nothing: store_step has stored the gradients of the products. The parameters without a name are
// those of the overload in fused_norm_own.metal; Absent stands for what a norm needs.
template <class Cell, int H, int ROW, class S, int ROWS, class Index, class Arrays>
void own_products_backward(
    Absent, Absent, thread const Arrays&, Index, Index, thread const Index (&)[ROWS], int, int, threadgroup float4*) {}

// The functions below compute operations of MLX that Metal lacks, or that Metal computes with a larger error.

// Return the sign of x: 1 or -1; 0 for NaN, and for a zero this zero with its sign, as MLX does.
inline float own_sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f; }

// Return the maximum, or NaN if a or b is NaN, as MLX does; Metal's max would return the number.
inline float own_max(float a, float b) { return a > b || a != a ? a : b; }

// Return the minimum, or NaN if a or b is NaN, as MLX does; Metal's min would return the number.
inline float own_min(float a, float b) { return a < b || a != a ? a : b; }

// Return log(1 + x) by Kahan's method: the rounding error of u = 1 + x cancels in log(u) x / (u - 1). u - u is not 0
// for an infinite or NaN u; log(u) is then the result.
inline float own_log1p(float x) {
  const float u = 1.0f + x;
  return u == 1.0f || u - u != 0.0f ? (u == 1.0f ? x : log(u)) : log(u) * (x / (u - 1.0f));
}

// Return exp(x) - 1. Near 0 this difference would lose digits, so a Taylor polynomial replaces it there: its terms are
// x^k / k! up to k = 6. For |x| < 0.2 the terms left out are less than half a unit in the last place.
inline float own_expm1(float x) {
  const float tail = 0.0416666667f + x * (8.33333333e-3f + x * 1.38888889e-3f);
  const float near = x + x * x * (0.5f + x * (0.166666667f + x * tail));
  return x * x < 0.04f ? near : exp(x) - 1.0f;
}

// Return log(exp(a) + exp(b)) without overflow: the larger number plus log(1 + exp(-distance)), where the distance is
// most - least. If one of them is infinite or NaN (x - x is then not 0), the larger number, or NaN, is the result.
inline float own_logaddexp(float a, float b) {
  const float most = own_max(a, b), least = own_min(a, b);
  return least - least != 0.0f || most - most != 0.0f ? most : most + own_log1p(exp(least - most));
}

// Return erf(x): a Taylor series up to |x| = 1, then 1 - exp(-x^2) times a continued fraction. (Abramowitz and Stegun,
// 7.1.5 and 7.1.14.) 12 terms of the series and 28 of the fraction reach the precision of float; 1.128... is 2 /
// sqrt(pi), 0.564... half of it. near: the series without this factor; far: the fraction, computed from its end.
inline float own_erf(float x) {
  const float s = x * x, t = fabs(x);
  float near = 0.0f, term = 1.0f, far = 0.0f;
  for (int n = 0; n < 12; ++n) near += term / float(2 * n + 1), term *= -s / float(n + 1);
  for (int n = 28; n >= 1; --n) far = 0.5f * float(n) / (t + far);
  return copysign(t < 1.0f ? 1.12837917f * t * near : 1.0f - exp(-s) * 0.564189584f / (t + far), x);
}
