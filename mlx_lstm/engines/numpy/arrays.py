"""How the arrays of engine `numpy` lie in memory: views of MLX's arrays, new arrays, scratch, contiguous copies.

Within a step every array is feature-major, [GH, B] or [H, B]: time, then features, then batch.
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
"""Smallest size, in numbers, of a new array that MLX allocates. A smaller one NumPy allocates and MLX copies, after
which MLX has its values at once: to wait for an array that MLX makes takes 20 to 40 us, as long as a small step."""

CHUNK_ROWS = 1024
"""Rows (steps x batch) that a product over time takes at once in the backward pass. This bounds the scratch memory."""

COPIED_NUMBERS = 2**20
"""Largest size of a weight matrix of which a copy in another layout pays off."""

WIDE_BATCH = 16
"""Smallest batch in which a step's [4H, B] block has rows long enough for BLAS and for contiguous access."""


def view(array: mx.array | Array) -> Array:
    """Return NumPy's view of an evaluated array's memory."""
    return np.array(array, copy=False)


def views(arrays: Arrays) -> Views:
    """Evaluate all arrays, and return NumPy's views of their memory."""
    mx.eval(list(arrays.values()))
    return {name: np.array(array, copy=False) for name, array in arrays.items()}


class NewArray:
    """A new array: NumPy writes its `memory`, then `to_mlx` returns it as an MLX array. Its first contents are
    arbitrary."""

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...]):
        self.dtype: mx.Dtype = mx.float64 if dtype == np.float64 else mx.float32
        self.array: mx.array | None = mx.empty(shape, self.dtype) if prod(shape) >= MLX_ALLOCATES else None
        self.memory: Array = np.empty(shape, dtype) if self.array is None else view(self.array)

    def to_mlx(self) -> mx.array:
        """Return the MLX array."""
        return mx.array(self.memory, self.dtype) if self.array is None else self.array


class NewSequence(NewArray):
    """A new sequence. `memory` is a view [T, B, .] of it; the MLX array is [T, B, .], or [B, T, .] with `batch_first`.

    order: the order of the axes in memory, TIME_MAJOR, BATCH_MAJOR or FEATURE_MAJOR.
    """

    def __init__(self, dtype: np.dtype, shape: tuple[int, int, int], order: Order, batch_first: bool = False):
        T, B, _ = shape
        self.returned: Order = BATCH_MAJOR if batch_first else TIME_MAJOR
        # With a single item, or a single step unless feature-major, both orders are the same memory. The order of the
        # MLX array then saves the transpose.
        self.order: Order = self.returned if B == 1 or (T == 1 and order != FEATURE_MAJOR) else order
        super().__init__(dtype, (shape[self.order[0]], shape[self.order[1]], shape[self.order[2]]))
        self.as_allocated: Array = self.memory
        self.memory = self.memory.transpose(self.order)  # each order is its own inverse

    def to_mlx(self) -> mx.array:
        """Return the MLX array."""
        array = mx.array(self.as_allocated, self.dtype) if self.array is None else self.array
        if self.order == self.returned:
            return array
        first, second, third = self.returned
        return mx.transpose(array, [self.order.index(first), self.order.index(second), self.order.index(third)])


def order_of(sequence: Array) -> Order:
    """Return BATCH_MAJOR or TIME_MAJOR, whichever a sequence [T, B, .] lies in. Results for a caller with batch-major
    arrays are written batch-major, so that none of them is strided."""
    return BATCH_MAJOR if sequence.strides[0] < sequence.strides[1] else TIME_MAJOR


def steps_of(sequence: Array) -> Callable[[int], Array]:
    """Return a function of t that gives step t of a sequence [T, B, .] as a contiguous [., B]: a view if the sequence
    is feature-major, else a copy, valid until step t + 2 or t - 2 is asked for."""
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
    """Return `a` if BLAS can read it, which needs one of the last two axes contiguous; else a copy. Of any other array
    NumPy's product would be a slow loop."""
    rows, columns = a.strides[-2:]
    size = a.itemsize
    fits = (columns == size and rows >= size * a.shape[-1]) or (rows == size and columns >= size * a.shape[-2])
    return a if fits else np.ascontiguousarray(a)


def transposed(weights: Array, problem: Problem) -> Array:
    """Return the transpose of a matrix [GH, P] for a product at every step. It is a copy if it multiplies a wide batch
    often enough to pay for that: BLAS then runs up to a quarter faster."""
    often = problem.B >= WIDE_BATCH and 2 * weights.shape[1] <= problem.T * problem.B
    return np.ascontiguousarray(weights.T) if often and weights.size <= COPIED_NUMBERS else matrix(weights).T


def chunk_steps(problem: Problem) -> int:
    """Return how many steps a product over time takes at once in the backward pass."""
    return min(problem.T, max(1, CHUNK_ROWS // problem.B))


def columns_buffer(rows: int, columns: int, B: int, dtype: np.dtype) -> Array:
    """Return scratch memory [rows, columns], used B columns at a time. In a wide batch its rows are contiguous, in a
    narrow one its columns."""
    if B >= WIDE_BATCH:
        # Without 16 columns more than needed, rows whose distance is a power of two would share cache sets.
        return np.empty((rows, columns + 16), dtype)[:, :columns]
    return np.empty((columns, rows), dtype).T


def first_state(v: Views, name: str, shape: tuple[int, int], dtype: np.dtype) -> Array:
    """Return a contiguous copy [., B] of a state v[name] [B, .], zeros if it is absent."""
    return np.array(v[name].T, order="C") if name in v else np.zeros(shape, dtype)
