"""The oracle's arithmetic: one rounded operation in a dtype; activations and their slopes.

The formulas are written with an `Arithmetic` called `fl`: `fl(...)` marks one rounded operation. In float64 it does
nothing. In another dtype it rounds, so that the same formula is computed in that dtype. `closeness` passes an
`Arithmetic` that adds random errors, in order to derive bounds.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

Array = np.ndarray
Tensors = dict[str, Array]

ACTIVATION_UNITS = 8
"""Unit roundoffs by which an activation may be wrong before it is stored: 4 units of the last place."""


class Arithmetic:
    """Arithmetic of one dtype. Values are float64 arrays, and each operation's result is rounded to `dtype`.

    This equals computing in `dtype`, since float64 has more than twice the digits of the other dtypes. A dot product or
    a sum is one operation: accumulated in float32 (in float64 if `dtype` is float64), then rounded once.
    """

    def __init__(self, dtype: DTypeLike):
        self.dtype: np.dtype = np.dtype(dtype)
        self.accumulator: type[np.floating] = np.float64 if self.dtype == np.float64 else np.float32

    def __call__(self, value: Array | float, units: int = 0) -> Array:
        """Round the result of one operation to the dtype. Only `Noise` uses `units`, the operation's own error in
        roundoffs of the accumulator."""
        if self.dtype == np.float64:
            return np.asarray(value, np.float64)
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(self.dtype).astype(np.float64)

    def load(self, value: Array) -> Array:
        """Return an argument rounded to the dtype, as the op receives it. Only bounds use the imaginary part of a
        weight (see `closeness.bounds`)."""
        return self(np.real(value))

    def store(self, named: Tensors) -> Tensors:
        """Convert a dict of results to the dtype."""
        return {name: value.astype(self.dtype) for name, value in named.items()}

    def dot(self, a: Array, b: Array) -> Array:
        """Return a [M,K] @ b [K,N]."""
        return self(a.astype(self.accumulator, copy=False) @ b.astype(self.accumulator, copy=False))

    def total(self, terms: Array, axis: tuple[int, ...]) -> Array:
        """Return the sum over `axis`, rounded once; the axis stays, with size 1."""
        return self(terms.sum(axis=axis, keepdims=True, dtype=self.accumulator))

    def blend(self, z: Array, a: Array, b: Array) -> Array:
        """Return z a + (1 - z) b, each operation rounded."""
        return self(self(z * a) + self(self(1.0 - z) * b))

    def start_step(self) -> None:
        """Do nothing. `Noise` overrides this method, which is called before each time step."""


def sigmoid(x: Array, fl: Arithmetic) -> Array:
    """Return 1 / (1 + exp(-x)), computed from an exponential that cannot overflow."""
    e = fl(np.exp(-np.abs(x)))
    return fl(np.where(x >= 0, 1.0, e) / fl(1.0 + e), ACTIVATION_UNITS)


Activation = Callable[[Array, Arithmetic], Array]
ACTIVATIONS: dict[str, Activation] = {
    "identity": lambda x, fl: x,
    "relu": lambda x, fl: np.maximum(x, 0.0),
    "tanh": lambda x, fl: fl(np.tanh(x), ACTIVATION_UNITS),
    "sigmoid": sigmoid,
    "hard_sigmoid": lambda x, fl: np.clip(fl(fl(fl(0.2) * x) + 0.5), 0.0, 1.0),
    "hard_sigmoid_sixth": lambda x, fl: np.clip(fl(fl(fl(1 / 6) * x) + 0.5), 0.0, 1.0),
}
SLOPES: dict[str, Activation] = {  # from the activation's output y
    "identity": lambda y, fl: np.ones_like(y),
    "relu": lambda y, fl: np.where(y > 0, 1.0, 0.0),
    "tanh": lambda y, fl: fl(1.0 - fl(y * y)),
    "sigmoid": lambda y, fl: fl(y * fl(1.0 - y)),
    "hard_sigmoid": lambda y, fl: np.where((y > 0) & (y < 1), fl(0.2), 0.0),
    "hard_sigmoid_sixth": lambda y, fl: np.where((y > 0) & (y < 1), fl(1 / 6), 0.0),
}
