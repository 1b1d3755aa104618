"""The activations of engine `numpy`, in place. Arrays are feature-major, [GH, B]: a gate is a block of rows."""

from collections.abc import Callable
from functools import cache, partial
from itertools import groupby

import numpy as np

from ..cells import HARD_SIGMOIDS, Cell, LSTMCell, known

ONE = np.ones((), np.float32)
"""As an operand: Python's 1 becomes an array at every call, which takes half as long as a small step's addition."""

InPlace = Callable[[np.ndarray, np.ndarray], object]
"""Reads the first array, writes the second."""


class Gates:
    """Which rows of a GH axis share an activation: neighbouring gates of the same one are a run."""

    def __init__(self, activations: list[str | None], H: int):
        """activations: one per gate, in the order of the axis; None leaves a gate alone."""
        self.runs: list[tuple[str, slice]] = []
        stop = 0
        for name, gates in groupby(activations):
            start, stop = stop, stop + H * len(list(gates))
            if name is not None:
                self.runs.append((name, slice(start, stop)))

    def on(self, z: np.ndarray, sigmoid: InPlace | None = None) -> list[tuple[InPlace, np.ndarray]]:
        """Each run's activation, or what takes the sigmoid's place, and its rows of z, which every step writes anew."""
        return [
            (sigmoid if sigmoid and name == "sigmoid" else known("numpy", ACTIVATIONS, name)[0], z[run])
            for name, run in self.runs
        ]

    def slopes(self, y: np.ndarray, out: np.ndarray) -> None:
        """The activations' derivatives, from their outputs y."""
        np.multiply(y, y, out=out)
        for name, run in self.runs:
            slope_from_square(name, y[run], out[run])


@cache
def gates_of(order: str, activations: tuple[str, ...], H: int, names: str) -> Gates:
    """Those gates of a cell, of which order and activations are given, that `names` names. Built once each."""
    activation = dict(zip("ifgo" if len(order) == 4 else "rzn", activations, strict=False))
    return Gates([activation[gate] if gate in names else None for gate in order], H)


@cache
def reciprocal_gates(cell: Cell) -> str:
    """The gates of an LSTM of which a step makes the reciprocal, 1 + exp(-z), to divide by: one pass less than to make
    sigmoid(z) and multiply. Only all or none of them."""
    if not isinstance(cell, LSTMCell) or cell.activation("g") == "sigmoid":
        return ""
    return "ifo" if all(cell.activation(gate) == "sigmoid" for gate in "ifo") else ""


@cache
def gate_blocks(order: str, H: int) -> dict[str, slice]:
    """Each gate's rows of a GH axis. Built once each."""
    return {gate: slice(n * H, (n + 1) * H) for n, gate in enumerate(order)}


def activate(name: str, x: np.ndarray, out: np.ndarray) -> None:
    """One activation of `cells.ACTIVATIONS` into out."""
    known("numpy", ACTIVATIONS, name)[0](x, out)


def slope_from_square(name: str, y: np.ndarray, out: np.ndarray) -> None:
    """The derivative of an activation written in its output y; on entry out holds y * y."""
    known("numpy", ACTIVATIONS, name)[1](y, out)


def sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    """1 / (1 + exp(-x)). Not through tanh, which leaves of a nearly closed gate no digit."""
    reciprocal_sigmoid(x, out)
    np.divide(ONE, out, out=out)  # vectorised, as np.reciprocal is not


def reciprocal_sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    """1 + exp(-x), infinite where exp overflows, as the caller lets it."""
    np.negative(x, out=out)
    reciprocal_sigmoid_of_negative(out, out)


def reciprocal_sigmoid_of_negative(x: np.ndarray, out: np.ndarray) -> None:
    """1 + exp(x)."""
    np.exp(x, out=out)
    np.add(out, ONE, out=out)


def hard_sigmoid(rise: float, x: np.ndarray, out: np.ndarray) -> None:
    """clip(rise x + 0.5, 0, 1)."""
    np.multiply(x, rise, out=out)
    out += 0.5
    np.clip(out, 0, 1, out=out)


def hard_sigmoid_slope(rise: float, y: np.ndarray, out: np.ndarray) -> None:
    """Its derivative from its output."""
    np.copyto(out, (y > 0) & (y < 1))
    out *= rise


ACTIVATIONS: dict[str, tuple[InPlace, InPlace]] = {
    "identity": (lambda x, out: np.copyto(out, x), lambda y, out: out.fill(1)),
    "relu": (lambda x, out: np.maximum(x, 0, out=out), lambda y, out: np.copyto(out, y > 0)),
    "tanh": (lambda x, out: np.tanh(x, out=out), lambda y, out: np.subtract(ONE, out, out=out)),
    "sigmoid": (sigmoid, lambda y, out: np.subtract(y, out, out=out)),
    **{name: (partial(hard_sigmoid, rise), partial(hard_sigmoid_slope, rise)) for name, rise in HARD_SIGMOIDS.items()},
}
"""Of each activation, itself and its derivative, in place."""
