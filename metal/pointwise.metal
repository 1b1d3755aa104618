// The code shared by two kernels of a cell that the user wrote: the forward and the backward kernel that run all time
// steps in one launch and divide the work on a unit among lanes. fused.metal describes their arrays, cell.metal the
// members of the cell's struct `Own`. mlx_lstm/engines/metal/pointwise.py generates this struct and the struct
// Lanes<Own>, which has these members:
//   LANES        the adjacent lanes that share a hidden unit: 4, or 1 for a cell without a product
//   SCATTERS     whether each of the four lanes gets only the recurrent product of one gate (lane k: gate k), in
//                sums[0]; otherwise all lanes get the products of all gates
//   NORMALISES   whether the cell has a layer normalisation
//   TWO_PRODUCTS  always 0: a lane computes one product per step
//   slot_block   the block of rows of Wh whose weights a lane's slot has (fused_lanes.metal)
//   forward, backward   one step of one unit of one batch item, like the functions of the cell, with `lane` as an
//                additional first parameter. The lanes of a unit share the work: register j of a lane holds number
//                4 j + lane of the unit's values y and gradients d. Every lane has the unit's states and their
//                gradients.
//
// fused.metal explains the other names, among them place_of<COUNT, H>(at, k, unit), the position of a unit's number in
// block k of COUNT blocks. SIZE_FOR<N> (cell.metal) is the size to declare for an array of N numbers, at least 1.

// Overload for a cell without a recurrent product, which has no weights. Return a null pointer, which nothing reads.
template <int COUNT, class V> const device V* vectors_of_lane(Absent, int, uint, uint) { return (const device V*)0; }

// Load a lane's part of the COUNT values that an array has for one unit at one step of one batch item. The LANES lanes
// of a unit divide these values among themselves: values[j] gets value number LANES * j + lane, or the last value if
// there is no such number, so that no read leaves the array. at: the position that the unit has in an array with one
// value per unit. lane: the lane's index among those that share its unit.
template <int COUNT, int LANES, int H, class Index, class A>
void load_blocks(A array, Index at, int lane, int unit, thread float (&values)[REGISTERS_OF<COUNT, LANES>]) {
  UNROLL for (int j = 0; j < REGISTERS_OF<COUNT, LANES>; ++j) {
    const int block = COUNT % LANES == 0 || LANES * j + lane < COUNT ? LANES * j + lane : COUNT - 1;
    values[j] = COUNT == 0 ? 0.0f : value_at(array, place_of<COUNT, H>(at, block, unit), 0.0f);
  }
}

// Store a lane's part of the COUNT values that an array has for one unit at one step of one batch item. The LANES lanes
// of a unit divide these values among themselves: values[j] is value number LANES * j + lane. If COUNT is 0, the array
// is absent and `store` does nothing. at: the position that the unit has in an array with one value per unit. lane: the
// lane's index among those that share its unit.
template <int COUNT, int LANES, int H, class Index, class A>
void store_blocks(A array, Index at, int lane, int unit, thread const float* values) {
  UNROLL for (int j = 0; j < REGISTERS_OF<COUNT, LANES>; ++j)
    if (COUNT % LANES == 0 || LANES * j + lane < COUNT)
      store(array, place_of<COUNT, H>(at, LANES * j + lane, unit), values[j]);
}

// Add up the partial sums of a recurrent product over the lanes of a unit. Without SCATTERS all lanes get the sums of
// all gates. With SCATTERS lane k gets only the sum of gate k, in sums[0]. Then on entry sums[n] is a part of the sum
// of gate n ^ lane (exclusive or). So a shuffle sends a part to the lane that needs it: simd_shuffle_xor(x, n) returns
// the x of the lane whose number is (own number) ^ n.
template <class Cell, int SIZE>
void sum_of_own_unit(thread float (&sums)[SIZE]) {
  if constexpr (Lanes<Cell>::SCATTERS != 0) {
    sums[0] += simd_shuffle_xor(sums[2], 2);
    sums[1] += simd_shuffle_xor(sums[3], 2);
    sums[0] += simd_shuffle_xor(sums[1], 1);
  } else {
    UNROLL for (int n = 0; n < Cell::PRODUCTS; ++n) sums[n] = sum_over_lanes<Lanes<Cell>::LANES>(sums[n]);
  }
}

// Layer normalisation. The kernels call the functions below for every cell. These are the overloads for a cell without
// a norm; they do nothing. Such a cell has `absent`, of type Absent, in place of the array norm_eps and of everything
// that is computed from it, and this type selects them. fused_norm_own.metal has the overloads for cells with a norm,
// which say what the functions do and name the parameters.

template <class Cell, int H, int ROWS, class Numbers, int SIZE>
void normalise_gates(Absent, int, thread Numbers (&)[ROWS], thread float (&)[ROWS][SIZE]) {}

template <class Cell, int H, int ROWS, class Index, class Arrays>
void read_gates(
    thread const Arrays&, thread const Sweep&, int, Index, thread const Index (&)[ROWS], uint, int, int, Absent) {}

template <int SIZE> void keep_gradients(bool, int, thread const float (&)[SIZE], Absent) {}

// Nothing is left to do without a norm: store_step (pointwise_backward.metal) has stored the gradients of the products.
template <class Cell, int H, int ROW, class S, int ROWS, class Index, class Arrays>
void own_products_backward(
    Absent, Absent, thread const Arrays&, Index, Index, thread const Index (&)[ROWS], int, int, threadgroup float4*) {}

// The functions below compute operations of MLX that Metal lacks, or that Metal computes with a larger error.

// Return the sign of x as MLX does: 1 or -1; 0 for NaN; for a zero the zero itself, with its sign.
inline float own_sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f; }

// Return the maximum of a and b as MLX does: NaN if one of them is NaN. Metal's max would return the other number.
inline float own_max(float a, float b) { return a > b || a != a ? a : b; }

// Return the minimum of a and b as MLX does: NaN if one of them is NaN. Metal's min would return the other number.
inline float own_min(float a, float b) { return a < b || a != a ? a : b; }

// Return log(1 + x) by Kahan's method, which is accurate for small x, too: the rounding error of u = 1 + x cancels in
// log(u) x / (u - 1). If u is infinite or NaN (then u - u is not 0), the result is log(u). If u is 1, it is x.
inline float own_log1p(float x) {
  const float u = 1.0f + x;
  return u == 1.0f || u - u != 0.0f ? (u == 1.0f ? x : log(u)) : log(u) * (x / (u - 1.0f));
}

// Return exp(x) - 1. Near 0 the subtraction would lose digits. So for |x| < 0.2 the Taylor polynomial with the terms
// x^k / k! up to k = 6 is used. There the terms left out are less than half a unit in the last place.
inline float own_expm1(float x) {
  const float tail = 0.0416666667f + x * (8.33333333e-3f + x * 1.38888889e-3f);
  const float near = x + x * x * (0.5f + x * (0.166666667f + x * tail));
  return x * x < 0.04f ? near : exp(x) - 1.0f;
}

// Return log(exp(a) + exp(b)) without overflow: the larger number plus log(1 + exp(least - most)). If one number is
// infinite or NaN (x - x is then not 0), the result is `most`, which is NaN if a or b is NaN.
inline float own_logaddexp(float a, float b) {
  const float most = own_max(a, b), least = own_min(a, b);
  return least - least != 0.0f || most - most != 0.0f ? most : most + own_log1p(exp(least - most));
}

// Return the error function of x. For |x| < 1 it is a Taylor series, otherwise 1 - exp(-x^2) times a continued fraction
// (Abramowitz and Stegun, 7.1.5 and 7.1.14). 12 terms of the series and 28 terms of the fraction reach the precision of
// float. near: the series without its factor 2 / sqrt(pi) = 1.128...; far: the fraction without its first level 1 / (t
// + far), computed from its end. The fraction has the factor 1 / sqrt(pi) = 0.564...
inline float own_erf(float x) {
  const float s = x * x, t = fabs(x);
  float near = 0.0f, term = 1.0f, far = 0.0f;
  for (int n = 0; n < 12; ++n) near += term / float(2 * n + 1), term *= -s / float(n + 1);
  for (int n = 28; n >= 1; --n) far = 0.5f * float(n) / (t + far);
  return copysign(t < 1.0f ? 1.12837917f * t * near : 1.0f - exp(-s) * 0.564189584f / (t + far), x);
}
