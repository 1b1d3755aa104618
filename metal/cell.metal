// What all cells share: the options in one integer, the activations, and the members that a cell's struct must have.
//
// A cell is a struct template with one integer parameter, OPTIONS, which mlx_lstm/engines/metal/kernel.py:cell_number
// computes:
//   bits 0-7    the position of each gate's block on a gate axis, two bits per gate
//   bits 8-22   the activation of each gate, then the activation of the output, three bits each
//   bits 23-    the cell's own options, listed in its file
// Gates are numbered in the order i, f, g, o (LSTM) or r, z, n (GRU). The plain RNN cell has one gate, number 0.
//
// A cell that a user wrote is a struct `Own` without parameter, which mlx_lstm/engines/metal/pointwise.py generates.
//
// Kernels are templates over the struct, called Cell there. A unit has one number in each block of H numbers of an
// array. Kernels use these members:
//   GATES          the number of preactivations; block(gate) is the position of a gate's block
//   PRODUCTS       how many of them have a recurrent product: GATES, or 0 for a cell without one
//   CARRIED        the number of states besides h (1 for c of an LSTM), which are stored in float
//   PASSES_H       whether a step reads h, besides in the recurrent product
//   READS_BEFORE, READS_AFTER   which states a backward step reads before and after the step: one bit per state, h first
//   KEPT           how many numbers of a unit the forward pass saves for the backward pass (the gates)
//   GRADIENTS      how many gradients of preactivations the backward pass stores, those of the products first
//   INPUTS         how many numbers a unit reads at each step besides the preactivations (0 for the built-in cells)
//   CONSTANTS      how many numbers p a unit reads once per launch; constants(...) reads them
//   SUMMED         how many of them have a gradient that the backward pass sums over the steps
//   forward        one step of one unit of one batch item, with the parameters
//                    p     the constants        u   the inputs of the step
//                    sums  the recurrent products
//                    s     the states, h first: on entry those before the step, times `keep`; on return the new ones
//                    y     on entry the input's parts of the preactivations, on return the numbers to save
//   backward       the same step in reverse, with p, u, the saved numbers y and
//                    before, after   the states before the step, times `keep`, and those after it
//                    ds    on entry the gradients of the new states; on return those of `before`, without the part that
//                          goes through the recurrent product
//                    d     on entry the cotangents of y, on return the gradients of the preactivations
//                    du    the gradients of u                 dp  the gradients of the SUMMED constants
//                  A GRU, which has no inputs, gets in u[0] the recurrent product q of its candidate
//   SEGMENTS       the number of parts into which the backward step divides the product dz Wh: 1 for all gates
//                  together, or one part for each gate that has weights in this product
//   product_gradient   the gradient of a gate's recurrent product; for a GRU's candidate it differs from the gradient
//                      of the preactivation
// All arithmetic is in float, even if the arrays store 16-bit numbers. A cotangent is the gradient that the caller
// gives for an output of the call, such as the gates; the backward step adds it to what the equations give.

// The size of an array for COUNT numbers. It is at least 1, because Metal has no arrays of size 0.
template <int COUNT> constant constexpr int SIZE_FOR = COUNT == 0 ? 1 : COUNT;

// CARRIES: the number of states whose gradients bypass the recurrent product, because a step reads these states besides
// in the product. FIRST_CARRY: the first of these states, 0 (h) or 1.
template <class Cell> constant constexpr int CARRIES = int(Cell::CARRIED) + int(Cell::PASSES_H);
template <class Cell> constant constexpr int FIRST_CARRY = 1 - int(Cell::PASSES_H);

// The numbers of a unit that pass through `y` of a cell's forward step: preactivations, then saved numbers.
template <class Cell> constant constexpr int VALUES = Cell::GATES > Cell::KEPT ? int(Cell::GATES) : int(Cell::KEPT);

enum Activation { IDENTITY, RELU, TANH, SIGMOID, HARD_SIGMOID, HARD_SIGMOID_SIXTH };

// Read a cell's template parameter OPTIONS: the position of a gate's block (bits 0-7, two per gate), and the Activation
// of a gate (from bit 8 on, three bits each).
constexpr int block_of(int options, int gate) { return (options >> (2 * gate)) & 3; }
constexpr int activation_of(int options, int gate) { return (options >> (8 + 3 * gate)) & 7; }

// Return the slope of the linear part of a hard sigmoid: 0.2 or 1/6. name: the number of the activation.
inline float rise(int name) { return name == HARD_SIGMOID ? 0.2f : 1.0f / 6.0f; }

// Return x, limited to the range from `least` to `most`. If x is NaN, return NaN. Metal's functions clamp and max are
// not used, because they would replace NaN by a number.
inline float within(float least, float x, float most) { return x < least ? least : x > most ? most : x; }

// Return tanh(x) if is_tanh, else sigmoid(x). One formula with one exp2 and one reciprocal serves both, so neighbouring
// lanes can compute different functions without a branch: sigmoid(x) = 1 / (1 + 2^(-x log2 e)) and tanh(x) = 2
// sigmoid(2 x) - 1. Near 0 the formula of tanh loses digits, so a polynomial replaces it there. The error is at most 4
// units in the last place (ulp). Exception: for a sigmoid with x < -4 it is up to |x| ulp, because the argument of exp2
// is rounded.
inline float squash(bool is_tanh, float x) {
  const float power = x * (is_tanh ? -2.88539008f : -1.44269504f);  // -2 log2 e and -log2 e
  // The exponent is limited to 126, because the reciprocal of numbers above 2^126 may be inexact. NaN stays NaN.
  const float y = fast::divide(1.0f, 1.0f + exp2(power > 126.0f ? 126.0f : power));
  const float z = x * x;
  const float near = x + x * z * (-0.333329466f + z * (0.13320725f + z * (-0.0526718108f + z * 0.0164375759f)));
  const float far = is_tanh ? 2.0f * y - 1.0f : y;
  return is_tanh && z < 0.3f ? near : far;
}

// Return the activation of x. name: a value of the enum Activation.
inline float activate(int name, float x) {
  switch (name) {
    case IDENTITY: return x;
    case RELU: return x < 0.0f ? 0.0f : x;
    case TANH: return squash(true, x);
    case SIGMOID: return squash(false, x);
    default: return within(0.0f, rise(name) * x + 0.5f, 1.0f);
  }
}

// Return the derivative of an activation, computed from its output y. name: a value of the enum Activation.
inline float slope(int name, float y) {
  switch (name) {
    case IDENTITY: return 1.0f;
    case RELU: return y > 0.0f ? 1.0f : 0.0f;
    case TANH: return 1.0f - y * y;
    case SIGMOID: return y * (1.0f - y);
    default: return y > 0.0f && y < 1.0f ? rise(name) : 0.0f;
  }
}
