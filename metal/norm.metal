// Layer normalisation inside a step: its options, and sums over the lanes of a simdgroup.
//
//   y = (x - mean) / sqrt(variance + eps) * scale + shift
// x is the recurrent product, or its sum with the input's part of the preactivations ("sum"); mean and variance are
// taken over all G H numbers of a batch item, or over the H numbers of each gate. An LSTM may also normalise the H
// numbers of c. metal/README.md has the equations of the gradients. The whole-sequence kernels use this in
// fused_norm.metal, the kernels of one time step in stepwise_norm.metal.
//
// Cell: the struct of a cell (cell.metal), with its options as the integer OPTIONS. G: gates, H: hidden units, D:
// directions. A lane is one of the 32 threads of a simdgroup, which run together. The kernels of a cell with a norm
// have the array `norm_eps`, which the others lack. Their other arrays:
//   norm_scale, norm_shift  [D, G H]   norm_c_scale, norm_c_shift  [D, H]; without these arrays 1 and 0
//   norm_eps                [1]
//
// Bits 27 to 30 of OPTIONS are one number: 0 to 4 is a value of NormOf, and 5 or 10 are added if c is normalised for
// the output h only, or also in the state that the next step gets.

// What a norm is computed of: nothing, the recurrent products, or their sums with the input's part; in the values that
// end in OF_EACH each gate is normalised by itself.
enum NormOf { NOTHING, PRODUCT, PRODUCT_OF_EACH, SUM, SUM_OF_EACH };

// What a cell normalises, read from its OPTIONS. This general struct is for cells without OPTIONS: for a cell that a
// user wrote, mlx_lstm/engines/metal/pointwise.py generates a specialization. The other one is for built-in cells.
//   OF       a value of NormOf: NOTHING, the product or the sum, of all gates or OF_EACH
//   IS_SUM   the product plus the input's part is normalised, not the product alone
//   IS_EACH  each gate is normalised by itself
//   OF_C     c is normalised for the output h only; IN_STATE: also in the state that the next step gets; HAS_C: either
//   GROUPS   how many norms the gates have
template <class Cell> struct Norm {};
template <template <int> class Kind, int OPTIONS>
struct Norm<Kind<OPTIONS>> {
  enum { NUMBER = (OPTIONS >> 27) & 15, OF = NUMBER % 5, OF_C = NUMBER / 5 == 1, IN_STATE = NUMBER / 5 == 2 };
  enum { IS_SUM = OF == SUM || OF == SUM_OF_EACH, IS_EACH = OF == PRODUCT_OF_EACH || OF == SUM_OF_EACH };
  enum { HAS_C = OF_C || IN_STATE, GROUPS = IS_EACH ? int(Kind<OPTIONS>::GATES) : 1 };
};

// Return the sum of `value` over the lanes of the simdgroup whose numbers have the same remainder, divided by EVERY, as
// the lane's own. All these lanes get the sum. EVERY: a power of two; with 1 the sum is that of all 32 lanes.
template <int EVERY>
float sum_of_every(float value) {
  if constexpr (EVERY == 1) return simd_sum(value);
#pragma clang loop unroll(full)
  for (int distance = EVERY; distance < 32; distance *= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}
