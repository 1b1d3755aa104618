"""The activations of the engine `numpy` and their derivatives, written into given output arrays."""

from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ..cells import HARD_SIGMOIDS, known

ONE = np.ones((), np.float32)
"""The number 1 as a NumPy array. With Python's 1 instead, NumPy would create an array at every call. In a small step
this takes half as long as the addition itself."""

InPlace = Callable[[np.ndarray, np.ndarray], object]
"""Type of a function that reads its first array and writes its second array. Both may be the same array."""


def sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    """Write 1 / (1 + exp(-x)) to `out`. The formula 0.5 + 0.5 tanh(x / 2) would lose all digits of a nearly closed
    gate."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, ONE, out=out)
    np.divide(ONE, out, out=out)  # np.divide is vectorized, np.reciprocal is not


def hard_sigmoid(rise: float, x: np.ndarray, out: np.ndarray) -> None:
    """Write clip(rise x + 0.5, 0, 1) to `out`."""
    np.multiply(x, rise, out=out)
    out += 0.5
    np.clip(out, 0, 1, out=out)


def hard_sigmoid_slope(rise: float, y: np.ndarray, out: np.ndarray) -> None:
    """Write to `out` the derivative of `hard_sigmoid`, computed from its output y."""
    np.copyto(out, (y > 0) & (y < 1))
    out *= rise


ACTIVATIONS: dict[str, tuple[InPlace, InPlace]] = {
    "identity": (lambda x, out: np.copyto(out, x), lambda y, out: out.fill(1)),
    "relu": (lambda x, out: np.maximum(x, 0, out=out), lambda y, out: np.copyto(out, y > 0)),
    "tanh": (np.tanh, lambda y, out: np.subtract(ONE, out, out=out)),
    "sigmoid": (sigmoid, lambda y, out: np.subtract(y, out, out=out)),
    **{name: (partial(hard_sigmoid, rise), partial(hard_sigmoid_slope, rise)) for name, rise in HARD_SIGMOIDS.items()},
}
"""For each name (activation, derivative). The derivative is computed from the activation's output y; `out` must
already contain y * y."""


@cache
def activation(name: str) -> tuple[InPlace, InPlace]:
    """Return the activation of this name and its derivative, both from `ACTIVATIONS`."""
    return known("numpy", ACTIVATIONS, name)


class Run(NamedTuple):
    """A group of neighbouring gates with the same activation, which one NumPy call can compute. rows: the rows of
    these gates on the gate axis."""

    name: str
    activate: InPlace
    slope: InPlace
    rows: slice


@cache
def runs(order: str, activations: tuple[str, ...], H: int, gates: str) -> list[Run]:
    """Return the groups of neighbouring gates with the same activation, so that one NumPy call computes a whole group.
    gates: the gates to compute, all gates of the cell or some.

    order: the cell's gates in their order in memory, such as "ifgo". activations: one per gate, in the order i, f, g,
    o or r, z, n. `@cache` keeps one result for each combination of arguments. So the other options of a cell, such as
    the limit at which c is clipped, are not arguments: a program may change them at every call.
    """
    activation_of = dict(zip("ifgo" if len(order) == 4 else "rzn", activations, strict=False))
    result, stop = [], 0
    for name, run in groupby(activation_of[gate] if gate in gates else None for gate in order):
        start, stop = stop, stop + H * len(list(run))
        if name is not None:
            result.append(Run(name, *activation(name), slice(start, stop)))
    return result


@cache
def gate_blocks(order: str, H: int) -> dict[str, slice]:
    """Return a dict from each gate to its rows on an axis that holds all gates."""
    return {gate: slice(n * H, (n + 1) * H) for n, gate in enumerate(order)}
