"""Sequences that dialects show beside h: their tanh, and gates joined, in the memory order of the engines."""

import mlx.core as mx
import numpy as np

from . import choice
from .numpy.arrays import NewArray, view
from .tracing import custom_function, have_values


@custom_function
def tanh_by_numpy(x: mx.array) -> mx.array:
    """tanh of a float32 or float64 array that has a value, in its memory order; with all derivatives."""
    mx.eval(x)
    y = view(x)
    order = sorted(range(y.ndim), key=lambda axis: -y.strides[axis])
    y = y.transpose(order)
    new = NewArray(y.dtype, y.shape)
    with np.errstate(all="ignore"):  # as in the engine
        np.tanh(y, out=new.memory)
    return mx.transpose(new.to_mlx(), [order.index(axis) for axis in range(y.ndim)])


tanh_by_numpy.vjp(lambda x, dy, y: dy * (1 - y * y))
tanh_by_numpy.jvp(lambda x, dx: dx * (1 - mx.square(mx.tanh(x))))


def tanh(c: mx.array) -> mx.array:
    """tanh of a sequence that an engine returned, for dialects that show it. MLX's own is slow on the CPU."""
    slow = choice.current_device() == "cpu" and c.dtype in (mx.float32, mx.float64)
    return tanh_by_numpy(c) if slow and have_values([c]) else mx.tanh(c)


def joined(blocks: list[mx.array]) -> mx.array:
    """[T, B, G H]: gates that a dialect has one by one, [T, B, H], in the memory order of this device's engines."""
    if choice.current_device() != "cpu":
        return mx.concatenate(blocks, axis=-1)
    return mx.swapaxes(mx.concatenate([mx.swapaxes(block, 1, 2) for block in blocks], axis=1), 1, 2)
