"""Packed weights in plain MLX: the matrices they stand for."""

import mlx.core as mx
import numpy as np

from ..packing import WEIGHTS, Packing, is_packed, packed_names
from ..problem import Arrays


def dequantized(packing: Packing | None, arrays: Arrays) -> Arrays:
    """The arrays with matrices in the dtype of x in place of packed weights."""
    if packing is None:
        return arrays
    left = packed_names(arrays)
    found = {name: array for name, array in arrays.items() if name not in left}
    dtype = arrays["x"].dtype
    return found | {name: matrix(packing, arrays, name, dtype) for name in WEIGHTS if is_packed(name, arrays)}


def matrix(packing: Packing, arrays: Arrays, name: str, dtype: mx.Dtype) -> mx.array:
    """One of them."""
    scales, biases = scales_of(arrays, name, dtype)
    return mx.dequantize(arrays[name], scales, biases, **packing._asdict(), dtype=dtype)


def judged(packing: Packing, arrays: Arrays, name: str) -> np.ndarray:
    """One of them as the oracle takes it: in mode affine a complex matrix, whose imaginary part is the sum of the
    absolute values of what a kernel may sum apart; metal/packed.metal says how."""
    found = np.array(matrix(packing, arrays, name, mx.float32)).astype(np.float64)
    scales, biases = scales_of(arrays, name, mx.float32)
    if biases is None:
        return found
    scale, bias = (np.repeat(np.array(part), packing.group_size, -1).astype(np.float64) for part in (scales, biases))
    offset = scale * 2**packing.bits
    return found + 1j * (np.abs(found - bias + offset) + np.abs(offset) + np.abs(bias))


def scales_of(arrays: Arrays, name: str, dtype: mx.Dtype) -> tuple[mx.array, mx.array | None]:
    """A packed weight's scales and, where it has some, biases, in this dtype; scales of 8 bits as they are."""
    scales, biases = arrays[f"{name}_scales"], arrays.get(f"{name}_biases")
    return (scales, None) if biases is None else (scales.astype(dtype), biases.astype(dtype))


def times_input(packing: Packing | None, arrays: Arrays, rows: mx.array) -> mx.array:
    """rows Wx^T."""
    if packing is None or not is_packed("Wx", arrays):
        return rows @ arrays["Wx"].T  # not mx.addmm: with mx.vmap over b alone MLX 0.32.4 refuses it
    scales, biases = scales_of(arrays, "Wx", rows.dtype)
    return mx.quantized_matmul(rows, arrays["Wx"], scales, biases, **packing._asdict())
