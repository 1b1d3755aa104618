"""Activations of engine `numpy` and their slopes, in place."""

from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ..cells import HARD_SIGMOIDS, known

ONE = np.ones((), np.float32)
"""1 as an operand of NumPy. It would turn Python's 1 into an array at every call, which takes half as long as the
addition itself in a small step."""

InPlace = Callable[[np.ndarray, np.ndarray], object]
"""A function that reads its first array and writes its second one, which may be the same."""


def sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    """Write 1 / (1 + exp(-x)). Through tanh a nearly closed gate would lose all its digits."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, ONE, out=out)
    np.divide(ONE, out, out=out)  # vectorised, which np.reciprocal is not


def hard_sigmoid(rise: float, x: np.ndarray, out: np.ndarray) -> None:
    """Write clip(rise x + 0.5, 0, 1)."""
    np.multiply(x, rise, out=out)
    out += 0.5
    np.clip(out, 0, 1, out=out)


def hard_sigmoid_slope(rise: float, y: np.ndarray, out: np.ndarray) -> None:
    """Write the slope of `hard_sigmoid` where its output is y."""
    np.copyto(out, (y > 0) & (y < 1))
    out *= rise


ACTIVATIONS: dict[str, tuple[InPlace, InPlace]] = {
    "identity": (lambda x, out: np.copyto(out, x), lambda y, out: out.fill(1)),
    "relu": (lambda x, out: np.maximum(x, 0, out=out), lambda y, out: np.copyto(out, y > 0)),
    "tanh": (np.tanh, lambda y, out: np.subtract(ONE, out, out=out)),
    "sigmoid": (sigmoid, lambda y, out: np.subtract(y, out, out=out)),
    **{name: (partial(hard_sigmoid, rise), partial(hard_sigmoid_slope, rise)) for name, rise in HARD_SIGMOIDS.items()},
}
"""Each activation and its slope. A slope is computed from the activation's output y, with y * y already in `out`."""


@cache
def activation(name: str) -> tuple[InPlace, InPlace]:
    """Return the activation of this name and its slope, as `ACTIVATIONS` has them."""
    return known("numpy", ACTIVATIONS, name)


class Run(NamedTuple):
    """Neighbouring gates with the same activation, and their rows on an axis of all gates."""

    name: str
    activate: InPlace
    slope: InPlace
    rows: slice


@cache
def runs(order: str, activations: tuple[str, ...], H: int, gates: str) -> list[Run]:
    """Return the runs of the gates in `gates`, which may be a part of a cell's gates.

    order: the cell's gates as they lie on the axis, such as "ifgo". activations: one per gate, in the order i, f, g, o
    or r, z, n. No other option of the cell is an argument, so that one that changes at every call does not fill the
    cache.
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
    """Return the rows of each gate on an axis of all gates."""
    return {gate: slice(n * H, (n + 1) * H) for n, gate in enumerate(order)}
