"""Helpers for the functions with TensorFlow's interface, which return tanh(c) of all steps and take an array per gate.
Both helpers use the memory order of the engine, so that no array is copied. T: steps, B: batch items, G: gates, H:
hidden units.

NumPy can read only arrays that have values; placeholders of mx.compile and mx.vmap have none.
"""

import mlx.core as mx
import numpy as np

from . import choice
from .numpy.sweep import NewArray, view
from .tracing import custom_function, have_values


@custom_function
def tanh_by_numpy(x: mx.array) -> mx.array:
    """Return tanh of a float32 or float64 array that has a value, computed by NumPy in the memory order of this array.
    MLX takes the gradient and the forward-mode derivative from the rules `vjp` and `jvp` below."""
    mx.eval(x)
    y = view(x)
    # The axes in the order of memory, the one with the largest stride first: NumPy then reads and writes in this order.
    order = sorted(range(y.ndim), key=lambda axis: -y.strides[axis])
    y = y.transpose(order)
    new = NewArray(y.dtype, y.shape)  # a new MLX array; `new.memory` is a NumPy view of it
    with np.errstate(all="ignore"):  # underflow is not an error, as in engine `numpy`
        np.tanh(y, out=new.memory)
    return mx.transpose(new.to_mlx(), [order.index(axis) for axis in range(y.ndim)])


tanh_by_numpy.vjp(lambda x, dy, y: dy * (1 - y * y))
tanh_by_numpy.jvp(lambda x, dx: dx * (1 - mx.square(mx.tanh(x))))


def tanh(c: mx.array) -> mx.array:
    """Return tanh of a sequence that an engine returned. On the CPU NumPy computes it, because NumPy is faster than
    MLX there."""
    by_numpy = choice.current_device() == "cpu" and c.dtype in (mx.float32, mx.float64) and have_values([c])
    return tanh_by_numpy(c) if by_numpy else mx.tanh(c)


def joined(blocks: list[mx.array]) -> mx.array:
    """Join the gates, one array [T, B, H] each, into one array [T, B, G H]."""
    if choice.current_device() != "cpu":
        return mx.concatenate(blocks, axis=-1)
    # The engine `numpy` reads gates in the memory order [T, G H, B]. So the blocks are joined in this order, and the
    # result [T, B, G H] is a transposed view, which the engine can read without a copy.
    return mx.swapaxes(mx.concatenate([mx.swapaxes(block, 1, 2) for block in blocks], axis=1), 1, 2)
