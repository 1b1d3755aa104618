"""Convert between MLX arrays and the raw memory that a kernel reads and writes."""

import ml_dtypes
import mlx.core as mx
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    """Return the NumPy type of an MLX type; bfloat16 comes from ml_dtypes."""
    if dtype == mx.bfloat16:
        return _BFLOAT16
    return np.dtype(str(dtype).split(".")[-1].removesuffix("_"))


def to_numpy(array: mx.array) -> np.ndarray:
    """Return the array's values: a view with MLX's own strides where NumPy can make one, otherwise a copy."""
    if array.dtype == mx.bfloat16:
        return (
            np.array(array.view(mx.uint16), copy=False).view(_BFLOAT16)
            if array.ndim
            else np.array(array.astype(mx.float32)).astype(_BFLOAT16)
        )
    return np.array(array, copy=False)


def memory_of(values: np.ndarray, row_contiguous: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the values as a kernel finds them in memory: (elements in memory order, strides in elements).
    row_contiguous: whether the values are copied into row-major order first. Otherwise a view keeps its strides, and
    the bytes between its values are filled with 0xFF."""
    if row_contiguous or values.size == 0:
        values = np.ascontiguousarray(values)
        return values.reshape(-1), tuple(s // values.itemsize for s in values.strides)
    strides = tuple(s // values.itemsize for s in values.strides)
    if min(strides, default=0) < 0:
        raise ValueError(f"[metal_emulator] strides must not be negative but are {strides}")
    extent = 1 + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
    memory = np.frombuffer(b"\xff" * (extent * values.itemsize), dtype=values.dtype).copy()
    np.lib.stride_tricks.as_strided(memory, values.shape, values.strides)[...] = values
    return memory, strides


def to_mlx(raw: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return an MLX array of this shape and dtype whose memory holds the bytes in `raw`."""
    if dtype == mx.bfloat16:
        return mx.array(raw.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(raw.view(numpy_dtype(dtype)).reshape(shape))
