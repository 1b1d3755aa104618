"""The activations of engine `numpy`, in place. Arrays are feature-major, [GH, B]: a gate is a block of rows."""

from __future__ import annotations

from functools import cache

import numpy as np

from .cells import HARD_SIGMOIDS, GRUCell, LSTMCell


@cache
class Gates:
    """Where each gate's rows lie on a GH axis, and which neighbouring rows share an activation. Built once each."""

    def __init__(self, cell: LSTMCell | GRUCell, H: int, names: str):
        self.runs: list[tuple[str, slice]] = []
        for gate in (gate for gate in cell.gate_order if gate in names):
            name, block = cell.activation(gate), cell.block(gate, H)
            if self.runs and self.runs[-1][0] == name and self.runs[-1][1].stop == block.start:
                self.runs[-1] = name, slice(self.runs[-1][1].start, block.stop)
            else:
                self.runs.append((name, block))
        self.smooth: list[slice] = []
        for run in (run for name, run in self.runs if name in ("tanh", "sigmoid")):
            if self.smooth and self.smooth[-1].stop == run.start:
                run = slice(self.smooth.pop().start, run.stop)
            self.smooth.append(run)
        self.sigmoid = [run for name, run in self.runs if name == "sigmoid"]
        self.other = [(name, run) for name, run in self.runs if name not in ("tanh", "sigmoid")]

    def activate(self, z: np.ndarray, out: np.ndarray, halved: bool) -> None:
        """sigmoid(x) = 0.5 + 0.5 tanh(x / 2): with sigmoid gates' rows of z halved one tanh serves all."""
        if not halved:
            for run in self.sigmoid:
                z[run] *= 0.5
        for run in self.smooth:
            np.tanh(z[run], out=out[run])
        for run in self.sigmoid:
            y = out[run]
            y *= 0.5
            y += 0.5
        for name, run in self.other:
            activate(name, z[run], out[run])

    def slopes(self, y: np.ndarray, out: np.ndarray) -> None:
        """The activations' derivatives, from their outputs y."""
        np.multiply(y, y, out=out)
        for name, run in self.runs:
            slope_from_square(name, y[run], out[run])


def activate(name: str, x: np.ndarray, out: np.ndarray) -> None:
    """One activation of `cells.ACTIVATIONS` into out."""
    if name == "tanh":
        np.tanh(x, out=out)
    elif name == "sigmoid":
        np.multiply(x, 0.5, out=out)
        np.tanh(out, out=out)
        out *= 0.5
        out += 0.5
    elif name in HARD_SIGMOIDS:
        np.multiply(x, HARD_SIGMOIDS[name], out=out)
        out += 0.5
        np.clip(out, 0, 1, out=out)
    elif name == "relu":
        np.maximum(x, 0, out=out)
    else:
        np.copyto(out, x)


def slope_from_square(name: str, y: np.ndarray, out: np.ndarray) -> None:
    """The derivative of an activation written in its output y; on entry out holds y * y."""
    if name == "tanh":
        np.subtract(1, out, out=out)
    elif name == "sigmoid":
        np.subtract(y, out, out=out)
    elif name in HARD_SIGMOIDS:
        np.copyto(out, (y > 0) & (y < 1))
        out *= HARD_SIGMOIDS[name]
    elif name == "relu":
        np.copyto(out, y > 0)
    else:
        out.fill(1)
