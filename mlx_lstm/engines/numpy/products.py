"""The matrix products of engine `numpy` over many rows, of one direction.

A step's preactivations come from `Preactivations`, of small weights from `JoinedPreactivations`; the gradients of the
weights from `WeightGradients`.
"""

import numpy as np

from ..cells import Cell, LSTMCell
from ..problem import Problem
from .gates import reciprocal_gates
from .memory import COPIED_NUMBERS, WIDE_BATCH, Ends, Views, chunk_steps, columns_buffer, matrix, step_mask

AHEAD_ROWS = 256  # rows of the input's product over a wide batch: still in the cache when their steps come


class Preactivations:
    """Wx @ x for a chunk of steps ahead, one product; then, step by step, Wh @ h. Bias and forget bias included,
    peepholes not.

    Over wide batches Wx is copied once with the bias, where there is one, as one more column, which saves a pass per
    step. Narrow ones read it as it is: copying it would cost more.
    """

    def __init__(self, problem: Problem, v: Views):
        dtype, (T, B, H, P), cell = v["Wh"].dtype, problem[:4], problem.cell
        rows = cell.gates * H
        self.order: str = cell.gate_order  # of the gates in z
        self.negative: str = ""  # those with the other sign
        self.x: np.ndarray = v["x"]
        self.B = B
        self.start: int = -1
        self.mask: np.ndarray | None = step_mask(v, problem)
        self.Wh: np.ndarray = matrix(v["Wh"])
        Wx = matrix(v["Wx"]) if "Wx" in v else None
        self.bias = bias_column(cell, v, H, rows)
        self.chunk: int = min(T, max(1, AHEAD_ROWS // B)) if B >= WIDE_BATCH else chunk_steps(problem)
        self.padded: np.ndarray | None = None
        if Wx is not None and self.bias is not None and B >= WIDE_BATCH and T * B >= 2 * AHEAD_ROWS:
            Wx = np.concatenate([Wx, self.bias[:, None]], axis=1)
            self.padded, self.bias = np.ones((self.chunk, B, Wx.shape[1]), dtype), None
        self.Wx = Wx
        if Wx is not None:
            self.ahead: np.ndarray = columns_buffer(rows, self.chunk * B, B, dtype)
        elif self.bias is not None:
            self.bias, self.ahead = np.repeat(self.bias[:, None], B, axis=1), np.empty((rows, B), dtype)
        self.z: np.ndarray = np.empty((rows, B), dtype)
        self.masked: np.ndarray | None = None if self.mask is None else np.empty((P, B), dtype)
        self.rooms: list[np.ndarray] = rooms(P, B, dtype)

    def at(self, t: int, h: np.ndarray) -> np.ndarray:
        """[GH, B]: step t's preactivations, from h [P, B] before it. The next call overwrites them."""
        z = np.matmul(self.Wh, self.entering(t, h), out=self.z)
        z += self.of_input(t)
        return z

    def entering(self, t: int, h: np.ndarray) -> np.ndarray:
        """h [P, B] as it enters step t's product: times the mask."""
        return h if self.mask is None else np.multiply(h, self.mask[t].T, out=self.masked)

    def of_input(self, t: int) -> np.ndarray:
        """[GH, B]: the input's part at step t, the bias included."""
        if self.Wx is None:
            x = self.x[t].T
            return x if self.bias is None else np.add(x, self.bias, out=self.ahead)
        start = t - t % self.chunk
        if start != self.start:
            rows = self.x[start : start + self.chunk]
            if self.padded is not None:
                self.padded[: len(rows), :, :-1] = rows
                rows = self.padded[: len(rows)]
            rows = matrix(rows.reshape(-1, rows.shape[-1]))
            ahead = np.matmul(self.Wx, rows.T, out=self.ahead[:, : len(rows)])
            if self.bias is not None:
                ahead += self.bias[:, None]
            self.start = start
        return self.ahead[:, (t - start) * self.B : (t - start + 1) * self.B]


class JoinedPreactivations:
    """[Wx b Wh] @ [x; 1; h], step by step one product: as `Preactivations.at`, for weights that are small enough.

    The rows of the copied weights, and so of z, lie in the order that a step likes best: gates of which it makes the
    reciprocal first, and with the sign that exp takes. Without a mask a step's h is written where the next multiplies.
    """

    def __init__(self, problem: Problem, v: Views):
        (T, B, H, P), cell, x, Wx = problem[:4], problem.cell, v["x"], v["Wx"]
        bias = bias_column(cell, v, H, len(Wx))
        self.negative: str = reciprocal_gates(cell)
        self.order: str = "".join(sorted(cell.gate_order, key=lambda gate: gate not in self.negative))
        self.weights: np.ndarray = np.empty((len(Wx), Wx.shape[1] + (bias is not None) + P), Wx.dtype)
        for n, gate in enumerate(self.order):
            rows, own = self.weights[n * H : (n + 1) * H], cell.block(gate, H)
            parts = [Wx[own], *([] if bias is None else [bias[own, None]]), v["Wh"][own]]
            np.concatenate(parts, axis=1, out=rows)
            if gate in self.negative:
                np.negative(rows, out=rows)
        self.mask: np.ndarray | None = step_mask(v, problem)
        self.x: np.ndarray = x
        self.start: int = -1
        self.columns: np.ndarray = np.ones((max(2, min(T, AHEAD_ROWS // B)), self.weights.shape[1], B), Wx.dtype)
        self.of_x: np.ndarray = self.columns[:, : x.shape[2]]
        self.of_h: np.ndarray = self.columns[:, -P:]
        self.z: np.ndarray = np.empty((len(Wx), B), Wx.dtype)
        self.rooms: list[np.ndarray] = [*self.of_h] if self.mask is None else rooms(P, B, Wx.dtype)

    @staticmethod
    def fits(problem: Problem, v: Views) -> bool:
        """Whether it is the faster: the batch is wide, and there are rows enough to pay for the copy of the weights."""
        T, B = problem[:2]
        if "Wx" not in v or B < WIDE_BATCH:
            return False
        width = v["Wx"].shape[1] + v["Wh"].shape[1]
        return 2 * max(AHEAD_ROWS, width) <= T * B and len(v["Wx"]) * width <= COPIED_NUMBERS

    def at(self, t: int, h: np.ndarray) -> np.ndarray:
        """[GH, B]: step t's preactivations, from h [P, B] before it. The next call overwrites them."""
        slot = t % len(self.columns)
        if t - slot != self.start:
            self.start = t - slot
            rows = self.x[self.start : self.start + len(self.columns)]
            np.copyto(self.of_x[: len(rows)], rows.transpose(0, 2, 1))
        if self.mask is not None:
            np.multiply(h, self.mask[t].T, out=self.of_h[slot])
        return np.matmul(self.weights, self.columns[slot], out=self.z)


def rooms(P: int, B: int, dtype: np.dtype) -> list[np.ndarray]:
    """Memory for the h of a step and of the next."""
    return [np.empty((P, B), dtype) for _ in range(2)]


def bias_column(cell: Cell, v: Views, H: int, rows: int) -> np.ndarray | None:
    """[GH]: the bias, an LSTM's forget bias added; None if there is none."""
    forget = cell.forget_bias if isinstance(cell, LSTMCell) else 0
    if not forget:
        return v.get("b")
    bias = np.array(v["b"]) if "b" in v else np.zeros(rows, v["Wh"].dtype)
    bias[cell.block("f", H)] += forget
    return bias


class WeightGradients:
    """The products over time steps x batch of one direction: gradients of x, Wx, b, and through `accumulate` of the
    others, summed over chunks of rows."""

    def __init__(self, problem: Problem, v: Views, out: Views, written: set[int]):
        """out: the gradients' memory; written: the first steps of the chunks of dx that the other direction wrote."""
        self.v: Views = v
        self.out: Views = out
        self.ends: Ends = Ends(problem, v)
        self.written: set[int] = written
        self.begun: set[tuple[str, int]] = set()

    def add(self, start: int, stop: int, dz: np.ndarray) -> None:
        """One chunk: dz [GH, n], n = steps x B, of the input's part of the preactivations."""
        v, dx, n = self.v, self.out["x"][start:stop], dz.shape[1]
        if "Wx" not in v:
            dx[...] = dz.T.reshape(dx.shape)
        else:
            self.add_to_input(dx, start, dz, matrix(v["Wx"]))
            x = matrix(self.ends.without_padding(v["x"], start, stop).reshape(n, -1))
            self.accumulate("Wx", dz, x)
        if "b" in v:
            self.accumulate("b", dz, np.ones(n, dz.dtype))

    def add_to_input(self, dx: np.ndarray, start: int, dz: np.ndarray, Wx: np.ndarray) -> None:
        """dx [steps, B, I] of the chunk that begins at `start`: written by the first direction, the other adds."""
        if start in self.written:
            dx += np.matmul(dz.T, Wx).reshape(dx.shape)
        elif dx.flags.c_contiguous:
            np.matmul(dz.T, Wx, out=dx.reshape(dz.shape[1], -1))
        else:
            dx[...] = np.matmul(dz.T, Wx).reshape(dx.shape)
        self.written.add(start)

    def accumulate(self, name: str, left: np.ndarray, right: np.ndarray, rows: slice = slice(None)) -> None:
        """Add left @ right to rows of a gradient, where that is wanted; the first chunk writes them."""
        if name not in self.out:
            return
        into = self.out[name][rows]
        if (name, rows.start) in self.begun:
            into += np.matmul(left, right)
        else:
            np.matmul(left, right, out=into)
            self.begun.add((name, rows.start))
