"""Quantized weights in plain MLX operations: dequantize them, or multiply by them directly.

A quantized weight such as Wh is up to three arrays of the call: `Wh` (packed integers q of a few bits each),
`Wh_scales` and, in mode "affine", `Wh_biases`. Each number is scale q + bias; a group of numbers shares a scale and a
bias. packing: group size, bits and mode; None if no weight is quantized. arrays: the arrays of the call by name.
"""

import mlx.core as mx
import numpy as np

from ..packing import WEIGHTS, Packing, field_of, is_packed, packed_names
from ..problem import Arrays
from ..tracing import have_values, is_transforming


def dequantized(packing: Packing | None, arrays: Arrays) -> Arrays:
    """Return the arrays with each quantized weight (integers, scales and biases) replaced by its dequantized matrix
    in the dtype of x."""
    if packing is None:
        return arrays
    dtype, quantized = arrays["x"].dtype, packed_names(arrays)
    floats = {name: array for name, array in arrays.items() if name not in quantized}
    return floats | {name: matrix(packing, arrays, name, dtype) for name in WEIGHTS if is_packed(name, arrays)}


def matrix(packing: Packing, arrays: Arrays, name: str, dtype: mx.Dtype) -> mx.array:
    """Return the dequantized matrix of the quantized weight `name`, in this dtype."""
    scales, biases = scales_of(arrays, name, dtype)
    # The fields of `packing` are the keywords group_size, bits and mode.
    return mx.dequantize(arrays[name], scales, biases, **packing._asdict(), dtype=dtype)


def matrix_for_oracle(packing: Packing, arrays: Arrays, name: str) -> np.ndarray:
    """Return the matrix of one quantized weight for the oracle, the float64 reference with which tests compare.

    In mode "affine" the matrix is complex. Its real part is the weight, scale q + bias. Its imaginary part tells the
    oracle how large the additional rounding errors of a kernel may be. At the first weight of each group it is the
    factor derived below, at the other weights 0. A kernel puts the f bits of q (`field_of`) into the mantissa of a
    float16, which is then the number 2^f + q. So it computes scale (S - 2^f s) + bias s, where S is the sum of (2^f +
    q) x and s the sum of x over a group. Both terms are larger than the result, so they have larger rounding errors.
    The factor is sqrt((2 scale 2^f)^2 + (scale 2^f + |bias|)^2), as `closeness.exact_and_bounds` derives. It is never
    0, because the oracle finds the first weight of a group by it.
    """
    values = np.array(matrix(packing, arrays, name, mx.float32)).astype(np.float64)
    scales, biases = scales_of(arrays, name, mx.float32)
    if biases is None:
        return values
    scale, bias = (np.abs(np.array(part).astype(np.float64)) for part in (scales, biases))
    offset = scale * 2 ** field_of(packing)  # scale 2^f
    factors = np.zeros(values.shape)
    factors[..., :: packing.group_size] = np.maximum(np.hypot(2 * offset, offset + bias), np.finfo(np.float64).tiny)
    return values + 1j * factors


def scales_of(arrays: Arrays, name: str, dtype: mx.Dtype) -> tuple[mx.array, mx.array | None]:
    """Return the scales and biases of a quantized weight, cast to this dtype. In a mode without biases the scales
    are 8-bit codes and are not cast."""
    scales, biases = arrays[f"{name}_scales"], arrays.get(f"{name}_biases")
    return (scales, None) if biases is None else (scales.astype(dtype), biases.astype(dtype))


def times_input(packing: Packing | None, arrays: Arrays, rows: mx.array) -> mx.array:
    """Return rows @ Wx^T, for a float matrix Wx or a quantized one."""
    if packing is None or not is_packed("Wx", arrays):
        return rows @ arrays["Wx"].T  # mx.addmm could add b, too, but MLX 0.32.4 refuses it under mx.vmap over b alone
    scales, biases = scales_of(arrays, "Wx", rows.dtype)
    # mx.vmap does not support quantized products, so the weight is dequantized first if the arrays have no values, as
    # inside mx.vmap. This slows down mx.compile and an export, too, in which arrays have no values either. So it is
    # done only on the CPU (on a GPU mx.vmap raises MLX's error), and only in mode "affine", because an export cannot
    # write the dequantization of the other modes.
    traced = packing.mode == "affine" and mx.default_device() == mx.cpu and is_transforming()
    # weight: Wx, its scales and its biases.
    weight = (array for name, array in arrays.items() if name.startswith("Wx"))
    if traced and not have_values([rows, *weight]):
        return rows @ matrix(packing, arrays, "Wx", rows.dtype).T
    return mx.quantized_matmul(rows, arrays["Wx"], scales, biases, **packing._asdict())
