// Layer normalisation inside a step: its options, and sums over the lanes of a simdgroup.
//
//   y = (x - mean) / sqrt(variance + eps) * scale + shift
// x is the recurrent product, or the sum of this product and the input's part of the preactivations. Mean and variance
// are taken over all G H numbers of a batch item, or over the H numbers of each gate. An LSTM may also normalise the H
// numbers of c. metal/README.md has the equations of the gradients. fused_norm.metal uses this file for kernels that
// run all time steps in one launch, stepwise_norm.metal for kernels that run one step.
//
// Cell: the struct of a cell (cell.metal), with its options as the integer OPTIONS. G: gates, H: hidden units, D:
// directions. A lane is one of the 32 threads of a simdgroup, which run together. Only kernels of a cell with a norm
// have the array `norm_eps`. The arrays of a norm are:
//   norm_scale, norm_shift  [D, G H]   norm_c_scale, norm_c_shift  [D, H]; a call without them uses scale 1, shift 0
//   norm_eps                [1]
//
// The bits 27 to 30 of OPTIONS hold one number, which is a sum: a value of NormOf (0 to 4); and 5 if only the output h
// is computed from the normalised c, or 10 if the next step gets the normalised c, too.

// Which numbers a cell normalises: none, the recurrent products, or the sums of these products and the input's part.
// With the values that end in OF_EACH each gate has its own mean and variance.
enum NormOf { NOTHING, PRODUCT, PRODUCT_OF_EACH, SUM, SUM_OF_EACH };

// Which numbers a cell normalises, as compile-time constants. The second definition reads them from the OPTIONS of a
// built-in cell. For a cell written by the user, mlx_lstm/engines/metal/pointwise.py generates another specialization.
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

// Return the sum of `value` over every EVERY-th lane of the simdgroup, among them the calling lane. All these lanes get
// the sum. EVERY is a power of two; with 1 the function sums over all 32 lanes.
template <int EVERY>
float sum_of_every(float value) {
  if constexpr (EVERY == 1) return simd_sum(value);
  UNROLL for (int distance = EVERY; distance < 32; distance *= 2) value += simd_shuffle_xor(value, ushort(distance));
  return value;
}
