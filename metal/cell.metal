// What all cells share: their options as one number, their activations, and what a cell's struct must have.
//
// A cell is a struct template with one number, OPTIONS; mlx_lstm/engines/metal/kernel.py:cell_number writes it:
//   bits 0-7    the block of each gate among the blocks of H on a gate axis, two bits a gate
//   bits 8-22   the activation of each gate, then that of the output, three bits each
//   bits 23-    the cell's own options, listed in its file
// Gates count in the order i, f, g, o (LSTM), r, z, n (GRU); the plain cell has the one gate 0.
//
// Kernels are templates over the struct, here called Cell, and use of it
//   GATES          the number of gates; a gate axis has GATES blocks of H numbers
//   block(gate)    the block that holds a gate
//   HAS_C          whether the cell has a state c besides h
//   PASSES_H       whether a part of h reaches the next h past the products
//   CONSTANTS      numbers that a unit reads once per launch (peephole, bhn); constants(...) reads them
//   forward        one step of one unit of one batch item: sums of products, preactivations -> gates, state, h
//   backward       the same step in reverse: gradients of h and c -> those of the preactivations and of the state
//            before
//   SEGMENTS       parts in which a step backward multiplies dz with Wh: 1, all gates at once, or one part a gate
//   product_gradient   the gradient of a gate's recurrent product, where it is not that of the preactivation
// All arithmetic is float, whatever the arrays store.

enum Activation { IDENTITY, RELU, TANH, SIGMOID, HARD_SIGMOID, HARD_SIGMOID_SIXTH };

constexpr int block_of(int options, int gate) { return (options >> (2 * gate)) & 3; }
constexpr int activation_of(int options, int gate) { return (options >> (8 + 3 * gate)) & 7; }

// The slope of a hard sigmoid.
inline float rise(int name) { return name == HARD_SIGMOID ? 0.2f : 1.0f / 6.0f; }

// Clamp x. NaN stays NaN, which Metal's own clamp and max would drop.
inline float within(float least, float x, float most) { return x < least ? least : x > most ? most : x; }

// Return sigmoid(x), or tanh(x) if is_tanh. Both take one exp2 and one reciprocal, and neighbouring lanes may differ in
// is_tanh without a branch: sigmoid(x) = 1 / (1 + 2^(-x log2 e)), tanh(x) = 2 sigmoid(2 x) - 1. Near 0 the latter loses
// digits, so there tanh is a polynomial fitted to it. Either is right to about 3 units in the last place.
inline float squash(bool is_tanh, float x) {
  const float power = x * (is_tanh ? -2.88539008f : -1.44269504f);
  // 126: above 2^126 a reciprocal need not be right. NaN stays NaN.
  const float y = fast::divide(1.0f, 1.0f + exp2(power > 126.0f ? 126.0f : power));
  const float z = x * x;
  const float near = x + x * z * (-0.333329466f + z * (0.13320725f + z * (-0.0526718108f + z * 0.0164375759f)));
  const float far = is_tanh ? 2.0f * y - 1.0f : y;
  return is_tanh && z < 0.3f ? near : far;
}

inline float activate(int name, float x) {
  switch (name) {
    case IDENTITY: return x;
    case RELU: return x < 0.0f ? 0.0f : x;
    case TANH: return squash(true, x);
    case SIGMOID: return squash(false, x);
    default: return within(0.0f, rise(name) * x + 0.5f, 1.0f);
  }
}

// Return the derivative of an activation, computed from its output y.
inline float slope(int name, float y) {
  switch (name) {
    case IDENTITY: return 1.0f;
    case RELU: return y > 0.0f ? 1.0f : 0.0f;
    case TANH: return 1.0f - y * y;
    case SIGMOID: return y * (1.0f - y);
    default: return y > 0.0f && y < 1.0f ? rise(name) : 0.0f;
  }
}
