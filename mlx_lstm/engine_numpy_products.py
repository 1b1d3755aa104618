"""The memory and the matrix products of engine `numpy`: MLX's arrays as NumPy sees them, and BLAS over many rows.

A step's preactivations come from `Preactivations`, the gradients of the weights from `WeightGradients`.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .cells import LSTMCell
from .engine_numpy_cell import Gates
from .problem import Problem

Arrays = dict[str, mx.array]
Views = dict[str, np.ndarray]

CHUNK_ROWS = 1024  # rows (time steps x batch) that one product takes: bounds the memory of dz
AHEAD_ROWS = 256  # rows of the input's product over a wide batch: still in the cache when their steps come
WIDE_BATCH = 16  # from here on a step's [4H, B] block is wide enough for BLAS and for contiguous rows


# --- Memory shared with MLX ------------------------------------------------------------------------------------------


def view(array: mx.array | np.ndarray) -> np.ndarray:
    """An evaluated array's memory, without a copy."""
    return np.array(array, copy=False)


def views(arrays: Arrays) -> Views:
    """All arrays evaluated and viewed."""
    mx.eval(list(arrays.values()))
    return {name: view(array) for name, array in arrays.items()}


def empty(dtype: np.dtype, shapes: dict[str, tuple[int, ...]]) -> tuple[Arrays, Views]:
    """New MLX arrays, not yet written, and NumPy's views of them."""
    kind = mx.float64 if dtype == np.float64 else mx.float32
    arrays = {name: mx.empty(shape, kind) for name, shape in shapes.items()}
    return arrays, views(arrays)


def memory_shape(shape: tuple[int, int, int], like: np.ndarray) -> tuple[int, int, int]:
    """The shape [T, B, .] in memory, [B, T, .] if `like` lies so: a batch-major caller then gets no strided result."""
    T, B, width = shape
    return (B, T, width) if B > 1 and T > 1 and like.strides[0] < like.strides[1] else shape


def matrix(a: np.ndarray) -> np.ndarray:
    """`a` as BLAS can take it: one of the last two axes contiguous. A copy only where it is not (NumPy would loop)."""
    rows, columns = a.strides[-2:]
    size = a.itemsize
    fits = (columns == size and rows >= size * a.shape[-1]) or (rows == size and columns >= size * a.shape[-2])
    return a if fits else np.ascontiguousarray(a)


def chunk_steps(problem: Problem) -> int:
    """How many steps the products over time and batch take at once."""
    return min(problem.T, max(1, CHUNK_ROWS // problem.B))


def columns_buffer(rows: int, columns: int, B: int, dtype: np.dtype) -> np.ndarray:
    """Scratch [rows, columns] used B columns at a time: feature-major where such a block is wide, else transposed."""
    if B >= WIDE_BATCH:
        # Sixteen columns more than needed keep the rows from falling on the same cache sets.
        return np.empty((rows, columns + 16), dtype)[:, :columns]
    return np.empty((columns, rows), dtype).T


def step_mask(v: Views, problem: Problem) -> np.ndarray | None:
    """The mask on h[t-1] as [T, B, P], a broadcast view."""
    return np.broadcast_to(v["mask"], (problem.T, problem.B, problem.P)) if "mask" in v else None


# --- The preactivations ----------------------------------------------------------------------------------------------
# Bias and forget bias included, peepholes not. Sigmoid gates get half of theirs, see `Gates.activate`.


class Preactivations:
    """Wx @ x for a chunk of steps ahead, one product; then, step by step, Wh @ h added to it.

    Over wide batches the weights are copied once, sigmoid rows halved and the bias as one more column of Wx, which
    saves two passes per step. Narrow ones read the weights as they are: copying them would cost more.
    """

    def __init__(self, problem: Problem, v: Views):
        dtype, (T, B, H, P) = v["Wh"].dtype, problem[:4]
        self.x, self.mask, self.B = v["x"], step_mask(v, problem), B
        self.Wh, self.Wx = matrix(v["Wh"]), matrix(v["Wx"]) if "Wx" in v else None
        self.halved, bias = Gates(problem.cell, H, "ifgo").sigmoid, bias_column(problem.cell, v, H)
        self.chunk = min(T, max(1, AHEAD_ROWS // B)) if B >= WIDE_BATCH else chunk_steps(problem)
        self.padded = self.bias = self.start = None
        if "Wx" in v and B >= WIDE_BATCH and T * B >= 2 * AHEAD_ROWS:
            self.Wx, self.Wh = np.concatenate([self.Wx, bias[:, None]], axis=1), self.Wh.copy()
            for rows in self.halved:
                self.Wx[rows] *= 0.5
                self.Wh[rows] *= 0.5
            self.halved = []
            self.padded = np.ones((self.chunk, B, self.Wx.shape[1]), dtype)
        elif bias.any():
            self.bias = np.repeat(bias[:, None], B, axis=1)
        if self.Wx is not None:
            self.ahead = columns_buffer(4 * H, self.chunk * B, B, dtype)
        self.z = np.empty((4 * H, B), dtype)
        self.masked = None if self.mask is None else np.empty((B, P), dtype)

    def at(self, t: int, h: np.ndarray) -> np.ndarray:
        """[4H, B]: step t's preactivations, from h [B, P] before it. The next call overwrites them."""
        if self.mask is not None:
            h = np.multiply(h, self.mask[t], out=self.masked)
        z = np.matmul(self.Wh, h.T, out=self.z)
        z += self.of_input(t)
        if self.bias is not None:
            z += self.bias
        for rows in self.halved:
            z[rows] *= 0.5
        return z

    def of_input(self, t: int) -> np.ndarray:
        """[4H, B]: the input's part at step t."""
        if self.Wx is None:
            return self.x[t].T
        start = t - t % self.chunk
        if start != self.start:
            rows = self.x[start : start + self.chunk]
            if self.padded is not None:
                self.padded[: len(rows), :, :-1] = rows
                rows = self.padded[: len(rows)]
            rows = matrix(rows.reshape(-1, rows.shape[-1]))
            np.matmul(self.Wx, rows.T, out=self.ahead[:, : len(rows)])
            self.start = start
        return self.ahead[:, (t - start) * self.B : (t - start + 1) * self.B]


def bias_column(cell: LSTMCell, v: Views, H: int) -> np.ndarray:
    """[4H]: the bias, the forget bias added."""
    bias = np.array(v["b"]) if "b" in v else np.zeros(4 * H, v["Wh"].dtype)
    bias[cell.block("f", H)] += cell.forget_bias
    return bias


# --- The gradients of the weights ------------------------------------------------------------------------------------


class WeightGradients:
    """The products over time steps x batch: gradients of x, Wx, Wh, b, Wp, summed over chunks of rows."""

    def __init__(self, problem: Problem, v: Views, h: np.ndarray):
        self.problem, self.v, self.h = problem, v, h
        shapes = {name: v[name].shape for name in ("Wx", "Wh", "b", "Wp") if name in v}
        shapes["x"] = memory_shape(v["x"].shape, v["x"])
        self.outputs, self.sums = empty(v["Wh"].dtype, shapes)
        self.dx = self.sums.pop("x")
        if self.dx.shape != v["x"].shape:
            self.outputs["x"], self.dx = mx.swapaxes(self.outputs["x"], 0, 1), self.dx.transpose(1, 0, 2)
        self.first = True
        self.mask = step_mask(v, problem)

    def add(self, start: int, stop: int, dz: np.ndarray, dh: np.ndarray | None, m: np.ndarray | None) -> None:
        """One chunk: dz [4H, n], and with a projection dh [P, n] and m [H, n]."""
        v, dx = self.v, self.dx[start:stop]
        if "Wx" in v:
            x = matrix(self.without_padding(v["x"], start, stop).reshape(dz.shape[1], -1))
            if dx.flags.c_contiguous:
                np.matmul(dz.T, matrix(v["Wx"]), out=dx.reshape(dz.shape[1], -1))
            else:
                dx[...] = np.matmul(dz.T, matrix(v["Wx"])).reshape(dx.shape)
            self.accumulate("Wx", dz, x)
        else:
            dx[...] = dz.T.reshape(dx.shape)
        self.accumulate("Wh", dz, self.recurrent_inputs(start, stop))
        if "b" in v:
            self.accumulate("b", dz, np.ones(dz.shape[1], dz.dtype))
        if "Wp" in v:
            self.accumulate("Wp", dh, m.T)
        self.first = False

    def accumulate(self, name: str, left: np.ndarray, right: np.ndarray) -> None:
        """Add left @ right to a gradient; the first chunk writes it."""
        if self.first:
            np.matmul(left, right, out=self.sums[name])
        else:
            self.sums[name] += np.matmul(left, right)

    def recurrent_inputs(self, start: int, stop: int) -> np.ndarray:
        """[n, P]: h as it entered each step's product."""
        T, B, _, P = self.problem[:4]
        rows = np.empty((stop - start, B, P), self.h.dtype)
        h0 = self.v.get("h0", 0)
        if self.problem.reverse:
            inner = min(stop, T - 1)
            rows[: inner - start] = self.h[start + 1 : inner + 1]
            rows[inner - start :] = h0
            if self.problem.lengths is not None:
                starts = np.array(self.problem.lengths) == np.arange(start + 1, stop + 1)[:, None]
                np.copyto(rows, h0, where=starts[..., None])
        else:
            inner = max(start, 1)
            rows[: inner - start] = h0
            rows[inner - start :] = self.h[inner - 1 : stop - 1]
        if self.mask is not None:
            rows *= self.without_padding(self.mask, start, stop)
        return rows.reshape(-1, P)

    def without_padding(self, sequence: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Steps start..stop of a sequence [T, B, .], 0 where an item has ended: 0 * NaN would spoil a sum."""
        part, lengths = sequence[start:stop], self.problem.lengths
        if lengths is None:
            return part
        live = np.arange(start, stop)[:, None] < np.array(lengths)
        return part if live.all() else np.where(live[..., None], part, 0)
