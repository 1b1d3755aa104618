"""The arithmetic of the float64 oracle: operations that are rounded to a dtype, activations and their slopes.

The oracle's formulas take a `Rounding` called `fl`; `fl(value)` rounds the result of one operation. For float64 `fl`
does nothing. For another dtype the same formula is computed in that dtype. To derive bounds on the errors of results,
the module `closeness` passes the subclass `Noise`, which adds random errors. A unit roundoff is the largest relative
error of one rounding: half a unit of the last place.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

Array = np.ndarray
Tensors = dict[str, Array]
"""The type of arrays by name."""

ACTIVATION_UNITS = 8
"""The largest error that an activation function may have before its result is stored, in unit roundoffs: 8 of them are
4 units of the last place."""


class Rounding:
    """The arithmetic of one dtype. Values are float64 arrays, and each operation's result is rounded to `dtype`.

    This gives the same results as computing in `dtype`, because float64 has more than twice the digits of the other
    dtypes. A dot product or a sum is one operation: it is accumulated in float32 (in float64 if `dtype` is float64),
    then rounded once.
    """

    def __init__(self, dtype: DTypeLike):
        """Create the arithmetic of this dtype."""
        self.dtype: np.dtype = np.dtype(dtype)
        self.accumulator: type[np.floating] = np.float64 if self.dtype == np.float64 else np.float32

    def __call__(self, value: Array | float, units: int = 0) -> Array:
        """Round the result of one operation to the dtype. `units`: the operation's own error, counted in unit
        roundoffs of the accumulator's dtype; only the subclass `Noise` uses it."""
        # All values are stored as float64, so convert the rounded result back.
        if self.dtype == np.float64:
            return np.asarray(value, np.float64)
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(self.dtype).astype(np.float64)

    def load(self, value: Array) -> Array:
        """Return an argument of the op, rounded to the dtype. A quantized weight may be complex: its imaginary part
        describes its rounding errors, and only the subclass `Noise` reads it. Here it is dropped."""
        return self(np.real(value))

    def store(self, named: Tensors) -> Tensors:
        """Return a dict of results with every array converted to the dtype."""
        return {name: value.astype(self.dtype) for name, value in named.items()}

    def dot(self, a: Array, b: Array) -> Array:
        """Return the matrix product a [M,K] @ b [K,N], rounded once."""
        return self(a.astype(self.accumulator, copy=False) @ b.astype(self.accumulator, copy=False))

    def total(self, terms: Array, axis: tuple[int, ...]) -> Array:
        """Return the sum of `terms` over the axes `axis`, rounded once. The summed axes stay, with size 1."""
        return self(terms.sum(axis=axis, keepdims=True, dtype=self.accumulator))

    def blend(self, z: Array, a: Array, b: Array) -> Array:
        """Return z a + (1 - z) b, where each operation is rounded."""
        return self(self(z * a) + self(self(1.0 - z) * b))

    def start_step(self) -> None:
        """Do nothing. The oracle calls this method before each time step; the subclass `Noise` overrides it."""


def sigmoid(x: Array, fl: Rounding) -> Array:
    """Return 1 / (1 + exp(-x)), computed from an exponential that cannot overflow."""
    e = fl(np.exp(-np.abs(x)))
    return fl(np.where(x >= 0, 1.0, e) / fl(1.0 + e), ACTIVATION_UNITS)


Activation = Callable[[Array, Rounding], Array]
"""The type of an activation function(x, fl), or of its slope as a function(y, fl) of the activation's result y."""

ACTIVATIONS: dict[str, Activation] = {
    "identity": lambda x, fl: x,
    "relu": lambda x, fl: np.maximum(x, 0.0),
    "tanh": lambda x, fl: fl(np.tanh(x), ACTIVATION_UNITS),
    "sigmoid": sigmoid,
    "hard_sigmoid": lambda x, fl: np.clip(fl(fl(fl(0.2) * x) + 0.5), 0.0, 1.0),
    "hard_sigmoid_sixth": lambda x, fl: np.clip(fl(fl(fl(1 / 6) * x) + 0.5), 0.0, 1.0),
}
"""The activations by name: functions of the preactivation x. `fl` rounds the result of each operation; relu and clip
are exact."""

SLOPES: dict[str, Activation] = {  # derivatives of the activations, as functions of the output y
    "identity": lambda y, fl: np.ones_like(y),
    "relu": lambda y, fl: np.where(y > 0, 1.0, 0.0),
    "tanh": lambda y, fl: fl(1.0 - fl(y * y)),
    "sigmoid": lambda y, fl: fl(y * fl(1.0 - y)),
    "hard_sigmoid": lambda y, fl: np.where((y > 0) & (y < 1), fl(0.2), 0.0),
    "hard_sigmoid_sixth": lambda y, fl: np.where((y > 0) & (y < 1), fl(1 / 6), 0.0),
}
