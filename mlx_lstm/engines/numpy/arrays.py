"""The arrays of the engine `numpy` in memory: views of MLX arrays, new arrays, scratch memory and contiguous copies.

Within a step every array is feature-major: [GH, B] or [H, B], with G gates, H hidden units and B batch items.
"""

from collections.abc import Callable
from math import prod

import mlx.core as mx
import numpy as np

from ..problem import Arrays, Problem

Array = np.ndarray
Views = dict[str, Array]
Order = tuple[int, int, int]

TIME_MAJOR, BATCH_MAJOR, FEATURE_MAJOR = (0, 1, 2), (1, 0, 2), (0, 2, 1)  # orders of the axes of [T, B, .] in memory

MLX_ALLOCATES = 2**13
"""New arrays with at least this many elements are allocated by MLX, smaller ones by NumPy and then copied to MLX.
Waiting for an array that MLX allocates takes 20 to 40 us, as long as a small step; the copy takes less."""

CHUNK_ROWS = 1024
"""The largest number of rows (steps x batch) of one matrix product over time in the backward pass. Exception: a step
with more rows is one product. This number limits the scratch memory."""

TRANSPOSED_NUMBERS = 2**18
"""The largest number of elements of a weight matrix of which `transposed` makes a copy. For a larger matrix the copy
takes longer than it saves."""

WIDE_BATCH = 16
"""The smallest size B of a wide batch. With a wide batch the rows of a step's array [4H, B] are so long that products
and elementwise operations are fast if the rows are contiguous."""


def view(array: mx.array | Array) -> Array:
    """Return a NumPy view of the memory of an evaluated MLX array."""
    return np.array(array, copy=False)


def views(arrays: Arrays) -> Views:
    """Evaluate all arrays. Return NumPy views of their memory."""
    mx.eval(list(arrays.values()))
    return {name: np.array(array, copy=False) for name, array in arrays.items()}


class NewArray:
    """A new MLX array that NumPy fills: NumPy writes to `memory`, then `to_mlx` returns the MLX array. It
    contains zeros at first: MLX cannot create an array without writing to its memory."""

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...]):
        self.dtype: mx.Dtype = mx.float64 if dtype == np.float64 else mx.float32
        self.array: mx.array | None = mx.zeros(shape, self.dtype) if prod(shape) >= MLX_ALLOCATES else None
        self.memory: Array = np.zeros(shape, dtype) if self.array is None else view(self.array)

    def to_mlx(self) -> mx.array:
        """Return the MLX array with the contents of `memory`."""
        return mx.array(self.memory, self.dtype) if self.array is None else self.array


class NewSequence(NewArray):
    """A new sequence that NumPy fills. `memory` is a NumPy view [T, B, .]. The MLX array is [T, B, .], or [B, T, .]
    with `batch_first`.

    order: the order of the axes in memory, TIME_MAJOR, BATCH_MAJOR or FEATURE_MAJOR.
    """

    def __init__(self, dtype: np.dtype, shape: tuple[int, int, int], order: Order, batch_first: bool = False):
        T, B, _ = shape
        self.returned: Order = BATCH_MAJOR if batch_first else TIME_MAJOR
        # With B = 1 all three orders of the axes mean the same layout in memory. With T = 1 TIME_MAJOR and BATCH_MAJOR
        # mean the same layout. In these cases take the order that the MLX array will have, so that `to_mlx` need not
        # transpose it.
        self.order: Order = self.returned if B == 1 or (T == 1 and order != FEATURE_MAJOR) else order
        super().__init__(dtype, (shape[self.order[0]], shape[self.order[1]], shape[self.order[2]]))
        self.as_allocated: Array = self.memory
        self.memory = self.memory.transpose(self.order)  # each of the three orders is its own inverse permutation

    def to_mlx(self) -> mx.array:
        """Return the sequence that NumPy has written as an MLX array: [B, T, F] if this object was made with
        `batch_first`, else [T, B, F]. F is the number of features per step."""
        array = mx.array(self.as_allocated, self.dtype) if self.array is None else self.array
        if self.order == self.returned:
            return array
        first, second, third = self.returned
        return mx.transpose(array, [self.order.index(first), self.order.index(second), self.order.index(third)])


def order_of(sequence: Array) -> Order:
    """Return the memory order of a sequence [T, B, .]: BATCH_MAJOR or TIME_MAJOR. The results for a caller with
    batch-major arrays are written batch-major, too, so that the caller gets contiguous arrays."""
    return BATCH_MAJOR if sequence.strides[0] < sequence.strides[1] else TIME_MAJOR


def steps_of(sequence: Array) -> Callable[[int], Array]:
    """Return a function of t that gives step t of a sequence [T, B, .] as a contiguous array [., B]. For a
    feature-major sequence it is a view; else it is a copy that stays valid until step t + 2 or t - 2 is requested."""
    sequence = sequence.transpose(FEATURE_MAJOR)
    if sequence[0].flags.c_contiguous:
        return sequence.__getitem__
    copies, copied = np.empty((2, *sequence.shape[1:]), sequence.dtype), [-1, -1]

    def step(t: int) -> Array:
        if copied[t % 2] != t:
            copies[t % 2], copied[t % 2] = sequence[t], t
        return copies[t % 2]

    return step


def matrix(a: Array) -> Array:
    """Return `a` itself if one of its last two axes is contiguous, so that BLAS can read it. Otherwise return a
    contiguous copy, because NumPy would use a slow loop instead of BLAS."""
    rows, columns = a.strides[-2:]
    size = a.itemsize
    fits = (columns == size and rows >= size * a.shape[-1]) or (rows == size and columns >= size * a.shape[-2])
    return a if fits else np.ascontiguousarray(a)


def transposed(weights: Array, problem: Problem) -> Array:
    """Return the transpose of `weights` [GH, P] for a product at every step (G gates, H hidden units, P the width of
    h). With a contiguous copy of the transpose BLAS runs up to a tenth faster. The copy is made if the batch is wide,
    the matrix is small, and T * B >= 2 P, so that the faster products pay for it; otherwise return a view."""
    often = problem.B >= WIDE_BATCH and 2 * weights.shape[1] <= problem.T * problem.B
    return np.ascontiguousarray(weights.T) if often and weights.size <= TRANSPOSED_NUMBERS else matrix(weights).T


def chunk_steps(problem: Problem) -> int:
    """Return how many time steps the backward pass puts into one matrix product over time."""
    return min(problem.T, max(1, CHUNK_ROWS // problem.B))


def columns_buffer(rows: int, columns: int, B: int, dtype: np.dtype) -> Array:
    """Return scratch memory [rows, columns] that is used B columns at a time. For a wide batch its rows are contiguous;
    for a narrow batch its columns are contiguous."""
    if B >= WIDE_BATCH:
        # 16 extra columns: otherwise rows whose distance is a power of two would share cache sets.
        return np.empty((rows, columns + 16), dtype)[:, :columns]
    return np.empty((columns, rows), dtype).T


def first_state(v: Views, name: str, shape: tuple[int, int], dtype: np.dtype) -> Array:
    """Return the state v[name] [B, .] as a contiguous copy [., B]. If it is absent, return zeros of this shape."""
    return np.array(v[name].T, order="C") if name in v else np.zeros(shape, dtype)
