// What all cells (LSTM, GRU, plain RNN) share: their options as one integer, the activation functions, and the list of
// members that the struct of a cell must have.
//
// A cell's struct (Cell in the kernels) computes one step of one hidden unit of one batch item. It has one template
// parameter, the integer OPTIONS. The function cell_number in engines/metal/kernel.py computes this integer:
//   bits 0-7    the position of each gate's block of H numbers (H: units) on a gate axis, two bits per gate
//   bits 8-22   the activation of each gate, then of the output, three bits each
//   bits 23-26  the cell's own options: see its file
//   bits 27-30  its layer normalisation: norm.metal
// Gates are numbered i, f, g, o (LSTM) or r, z, n (GRU); a plain RNN has one, number 0. The struct of a user's cell is
// `Own` (engines/metal/pointwise.py).
//
// Members of a struct, which all cells have, so that every kernel runs every cell (numbers are per unit):
//   GATES        preactivations; block(gate): the position of its block
//   PRODUCTS     how many of them have a recurrent product: all or none
//   CARRIED      states besides h, stored as float (1 for c of an LSTM)
//   PASSES_H     1 if a step reads h outside the recurrent product (GRU)
//   READS_BEFORE, READS_AFTER   states before and after a step that its backward step reads: a bit each, h first
//   KEPT         numbers y that the forward step saves (the gates)
//   GRADIENTS    gradients of preactivations that the backward step stores, those of the products first
//   INPUTS       numbers u that a step also reads; 0 in built-in cells
//   CONSTANTS    numbers p that all steps share, read by constants(...); SUMMED: those with a gradient
//   SEGMENTS     parts of the backward product dz Wh: 1, or one for each gate in it
//   forward(p, u, sums, s, y)   one step. sums: the products. s: the states, h first: on entry the states before the
//       step, times the factor keep that a call may have; on return the new ones. y: on entry the input's parts of the
//       preactivations, on return the saved numbers
//   backward(p, u, y, before, after, ds, d, du, dp)   a step in reverse. before, after: the states before the step,
//       times keep, and after it. ds: their gradients, on entry of `after`, on return of `before`, without the part
//       through the product. d: on entry the cotangents of y (gradients that the caller gives), on return the gradients
//       of the preactivations. du, dp: those of u, p. A GRU has no inputs; its u[0] in the backward step is the
//       recurrent product of its candidate
//   product_gradient   the gradient of a gate's product
//   activation(gate)   the number of a gate's activation function
// All arithmetic is in float.

// The size to declare for an array of COUNT numbers. It is at least 1, because Metal has no arrays of size 0.
template <int COUNT> constant constexpr int SIZE_FOR = COUNT == 0 ? 1 : COUNT;

// CARRIES: how many states have a carry in the backward pass. A carry is the part of a state's gradient that does not
// go through the recurrent product. All states besides h have one; h has one if a step also reads h outside the product
// (PASSES_H). FIRST_CARRY: the index of the first such state in an array of states, in which h is number 0.
template <class Cell> constant constexpr int CARRIES = int(Cell::CARRIED) + int(Cell::PASSES_H);
template <class Cell> constant constexpr int FIRST_CARRY = 1 - int(Cell::PASSES_H);

// The size of the array `y` of a cell's forward step. On entry y holds GATES preactivations, on return the KEPT numbers
// that the backward pass needs.
template <class Cell> constant constexpr int VALUES = Cell::GATES > Cell::KEPT ? int(Cell::GATES) : int(Cell::KEPT);

// The numbers that stand for the activation functions in a cell's OPTIONS. HARD_SIGMOID is 0.2 x + 0.5 and
// HARD_SIGMOID_SIXTH is x / 6 + 0.5; both are limited to the range from 0 to 1.
enum Activation { IDENTITY, RELU, TANH, SIGMOID, HARD_SIGMOID, HARD_SIGMOID_SIXTH };

// Read one entry of a cell's options, which are the bits of one integer. block_of: the position of a gate's H numbers
// on the gate axis (bits 0-7, two per gate). activation_of: the activation of a gate, a value of the enum Activation
// (from bit 8 on, three bits per gate).
constexpr int block_of(int options, int gate) { return (options >> (2 * gate)) & 3; }
constexpr int activation_of(int options, int gate) { return (options >> (8 + 3 * gate)) & 7; }

// Return the slope of the linear part of a hard sigmoid: 0.2 or 1/6. name: HARD_SIGMOID or HARD_SIGMOID_SIXTH.
inline float rise(int name) { return name == HARD_SIGMOID ? 0.2f : 1.0f / 6.0f; }

// Return x, limited to the range from `least` to `most`; if x is NaN, return NaN. (Metal's functions clamp and max
// would replace NaN by a number.)
inline float within(float least, float x, float most) { return x < least ? least : x > most ? most : x; }

// Return tanh(x) if is_tanh, else sigmoid(x). Both are computed by one formula with one exp2 and one reciprocal, so
// neighbouring lanes can compute different functions without a branch: sigmoid(x) = 1 / (1 + 2^(-x log2 e)), and
// tanh(x) = 2 sigmoid(2 x) - 1. Near 0 this tanh loses digits, so for x^2 < 0.3 a polynomial replaces it, with the
// coefficients that make the largest relative error smallest. The error is at most 4 units in the last place (ulp).
// Exception: for a sigmoid with x < -4 it is up to |x| ulp, because the argument of exp2 is rounded.
inline float squash(bool is_tanh, float x) {
  const float power = x * (is_tanh ? -2.88539008f : -1.44269504f);  // -2 log2 e and -log2 e
  // The exponent is limited to 126, because the reciprocal of numbers above 2^126 may be inexact. NaN stays NaN.
  const float y = fast::divide(1.0f, 1.0f + exp2(power > 126.0f ? 126.0f : power));
  const float z = x * x;
  const float near = x + x * z * (-0.333329466f + z * (0.13320725f + z * (-0.0526718108f + z * 0.0164375759f)));
  const float far = is_tanh ? 2.0f * y - 1.0f : y;
  return is_tanh && z < 0.3f ? near : far;
}

// Return the activation function `name` (a value of the enum Activation) of x. The case `default` is for the two hard
// sigmoids.
inline float activate(int name, float x) {
  switch (name) {
    case IDENTITY: return x;
    case RELU: return x < 0.0f ? 0.0f : x;
    case TANH: return squash(true, x);
    case SIGMOID: return squash(false, x);
    default: return within(0.0f, rise(name) * x + 0.5f, 1.0f);
  }
}

// Return the derivative of the activation function `name` (a value of the enum Activation), computed from its output y.
// The case `default` is for the two hard sigmoids: their derivative is 0 where the output is 0 or 1.
inline float slope(int name, float y) {
  switch (name) {
    case IDENTITY: return 1.0f;
    case RELU: return y > 0.0f ? 1.0f : 0.0f;
    case TANH: return 1.0f - y * y;
    case SIGMOID: return y * (1.0f - y);
    default: return y > 0.0f && y < 1.0f ? rise(name) : 0.0f;
  }
}
