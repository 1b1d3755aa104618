"""MLX's arrays as NumPy sees them, and new ones, of engine `numpy`."""

from math import prod

import mlx.core as mx
import numpy as np

from ..problem import Arrays

Array = np.ndarray
Views = dict[str, Array]
Order = tuple[int, int, int]

TIME_MAJOR, BATCH_MAJOR, FEATURE_MAJOR = (0, 1, 2), (1, 0, 2), (0, 2, 1)  # orders of the axes of [T, B, .] in memory
COPIED = 2**13  # numbers of a new array from which on MLX makes it


def view(array: mx.array | Array) -> Array:
    """An evaluated array's memory, without a copy."""
    return np.array(array, copy=False)


def views(arrays: Arrays) -> Views:
    """All arrays evaluated and viewed."""
    mx.eval(list(arrays.values()))
    return {name: view(array) for name, array in arrays.items()}


class New:
    """A new array, its contents arbitrary: NumPy's memory now, MLX's array once that is written.

    A small one MLX copies then, and has a value at once: to wait for MLX takes 20 to 40 us, a step of a small layer as
    long.
    """

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...]):
        self.kind: mx.Dtype = mx.float64 if dtype == np.float64 else mx.float32
        self.held: mx.array | None = mx.empty(shape, self.kind) if prod(shape) >= COPIED else None
        self.memory: Array = np.empty(shape, dtype) if self.held is None else view(self.held)

    def array(self) -> mx.array:
        """MLX's array."""
        return mx.array(self.memory, self.kind) if self.held is None else self.held


class NewSequence(New):
    """A new sequence of this shape [T, B, .], as which `memory` has it; `array` also does, or with `batch_first` as
    [B, T, .]. `order`: its axes as they lie in memory, one of those that are named here."""

    def __init__(self, dtype: np.dtype, shape: tuple[int, int, int], order: Order, batch_first: bool = False):
        T, B, _ = shape
        self.wanted: Order = BATCH_MAJOR if batch_first else TIME_MAJOR
        # Where these sizes are 1 the orders are one in memory.
        self.order: Order = self.wanted if B == 1 or (T == 1 and order != FEATURE_MAJOR) else order
        super().__init__(dtype, tuple([shape[axis] for axis in self.order]))
        self.lies, self.memory = self.memory, self.memory.transpose(self.order)  # each order is its own inverse

    def array(self) -> mx.array:
        """MLX's array."""
        array = mx.array(self.lies, self.kind) if self.held is None else self.held
        if self.order == self.wanted:
            return array
        return mx.transpose(array, [self.order.index(axis) for axis in self.wanted])


def order_of(sequence: Array) -> Order:
    """Whether a sequence [T, B, .] lies batch-major, as a batch-major caller hands it over, who then gets no strided
    result, or time-major."""
    return BATCH_MAJOR if sequence.strides[0] < sequence.strides[1] else TIME_MAJOR
