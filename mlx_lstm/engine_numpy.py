"""Engine `numpy`: the recurrence on the CPU, in place on MLX's own memory, with NumPy's BLAS.

The equations are those of `engine_ops.lstm_step`, here written into preallocated buffers. Within a step every array is
feature-major, [4H, B] and [H, B]: the large matrix then stands first in the recurrent product, which BLAS runs up to
twice as fast, and every gate is one contiguous block. So gates and c are kept as [T, 4H, B] and [T, H, B] and leave as
transposed views; h leaves in the memory order of x. float32 and float64 only: the caller casts.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .engine_numpy_cell import LSTMStep, LSTMStepBackward
from .engine_numpy_products import (
    Arrays,
    Preactivations,
    Views,
    WeightGradients,
    chunk_steps,
    columns_buffer,
    empty,
    matrix,
    memory_shape,
    step_mask,
    view,
    views,
)
from .problem import Problem

Saved = dict[str, "mx.array | np.ndarray | None"]


def forward(problem: Problem, arrays: Arrays) -> Saved:
    """h [T, B, P], c [T, B, H], gates [T, B, 4H], hT [B, P], cT [B, H].

    Gates that the caller does not want stay in NumPy's memory, or are None if there is no training.
    """
    v = views(arrays)
    dtype, (T, B, H, P) = v["Wh"].dtype, problem[:4]
    shapes = {"h": memory_shape((T, B, P), v["x"]), "c": (T, H, B), "hT": (B, P), "cT": (B, H)}
    if problem.return_gates:
        shapes["gates"] = (T, 4 * H, B)
    outputs, memory = empty(dtype, shapes)
    h, c = memory["h"], memory["c"]
    if h.shape != (T, B, P):
        outputs["h"], h = mx.swapaxes(outputs["h"], 0, 1), h.transpose(1, 0, 2)
    keep = problem.training or problem.return_gates
    # NumPy's own memory where MLX need not see it: MLX would write it once before we do.
    gates = memory["gates"] if problem.return_gates else np.empty((T if keep else 1, 4 * H, B), dtype)

    preactivations, step, carry = Preactivations(problem, v), LSTMStep(problem.cell, v, H, B), Carry(problem, v)
    m = np.empty((H, B), dtype)
    for t in problem.steps():
        h_t, c_t, gates_t, live = h[t], c[t], gates[t if keep else 0], carry.live(t)
        if live is not None and not live.any():
            h_t[...], c_t[...], gates_t[...] = 0, 0, 0
            continue
        step(preactivations.at(t, carry.h), carry.c, gates_t, c_t, m)
        if "Wp" in v:
            np.matmul(m.T, v["Wp"].T, out=h_t)
        else:
            np.copyto(h_t, m.T)
        carry.advance(live, h_t, c_t, gates_t)
    memory["hT"][...], memory["cT"][...] = carry.h, carry.c.T
    outputs["c"] = mx.swapaxes(outputs["c"], 1, 2)
    if problem.return_gates:
        return outputs | {"gates": mx.swapaxes(outputs["gates"], 1, 2)}
    return outputs | {"gates": gates.transpose(0, 2, 1) if keep else None}


def backward(problem: Problem, arrays: Arrays, saved: Saved, cotangents: Arrays) -> Arrays:
    """The gradient of every array, from those of the outputs that have one (keys h, c, gates, hT, cT)."""
    if saved["gates"] is None:
        saved = forward(problem._replace(training=True), arrays)
    v, given = views(arrays), views(cotangents)
    h, c, gates = (view(saved[name]) for name in ("h", "c", "gates"))
    sweep = BackwardSweep(problem, v, h, c.transpose(0, 2, 1), gates.transpose(0, 2, 1), given)
    products = WeightGradients(problem, v, h)
    chunk = chunk_steps(problem)
    bounds = [(start, min(start + chunk, problem.T)) for start in range(0, problem.T, chunk)]
    for start, stop in bounds if problem.reverse else reversed(bounds):
        rows = sweep.run(start, stop)
        products.add(start, stop, *rows)
    return products.outputs | sweep.finish()


# --- The state between steps -----------------------------------------------------------------------------------------


class Carry:
    """The state a step starts from: h [B, P] and c [H, B]. Items that have ended keep theirs."""

    def __init__(self, problem: Problem, v: Views):
        dtype, (_, B, H, P) = v["Wh"].dtype, problem[:4]
        self.lengths = None if problem.lengths is None else np.array(problem.lengths)
        self.h = matrix(v["h0"]) if "h0" in v else np.zeros((B, P), dtype)
        self.c = np.ascontiguousarray(v["c0"].T) if "c0" in v else np.zeros((H, B), dtype)
        self.spare = None
        if self.lengths is not None:
            self.spare = [(np.empty((B, P), dtype), np.empty((H, B), dtype)) for _ in range(2)]

    def live(self, t: int) -> np.ndarray | None:
        """[B]: which items have not ended at step t; None if all go on."""
        if self.lengths is None:
            return None
        live = self.lengths > t
        return None if live.all() else live

    def advance(self, live: np.ndarray | None, h: np.ndarray, c: np.ndarray, gates: np.ndarray) -> None:
        """Take over step t's h and c where items live; where they have ended, zero its outputs."""
        if live is None:
            self.h, self.c = h, c
            return
        self.spare.reverse()
        h_next, c_next = self.spare[0]
        np.copyto(h_next, self.h)
        np.copyto(c_next, self.c)
        np.copyto(h_next, h, where=live[:, None])
        np.copyto(c_next, c, where=live)
        self.h, self.c = h_next, c_next
        h[~live] = 0
        c[:, ~live] = 0
        gates[:, ~live] = 0


def previous(problem: Problem, t: int) -> int | None:
    """The step whose state step t starts from; None at the first one."""
    last = t + 1 if problem.reverse else t - 1
    return last if 0 <= last < problem.T else None


# --- The backward pass -----------------------------------------------------------------------------------------------


class BackwardSweep:
    """The steps in reverse, a chunk of time at a call. Carries dh [P, B] and dc [H, B] from chunk to chunk."""

    def __init__(self, problem: Problem, v: Views, h: np.ndarray, c: np.ndarray, gates: np.ndarray, given: Views):
        """h [T, B, P], c [T, H, B], gates [T, 4H, B]; given: the cotangents of the outputs."""
        dtype, (_, B, H, P) = v["Wh"].dtype, problem[:4]
        self.problem, self.given = problem, given
        self.h, self.c, self.gates = h, c, gates
        self.lengths = None if problem.lengths is None else np.array(problem.lengths)
        self.step = LSTMStepBackward(problem.cell, v, H, B)
        self.dh = np.array(given["hT"].T, order="C") if "hT" in given else np.zeros((P, B), dtype)
        self.dc = np.array(given["cT"].T, order="C") if "cT" in given else np.zeros((H, B), dtype)
        self.h0 = v.get("h0", np.zeros((B, P), dtype))
        self.c0 = np.ascontiguousarray(v["c0"].T) if "c0" in v else np.zeros((H, B), dtype)
        self.Wh_T = matrix(v["Wh"]).T
        self.Wp_T = matrix(v["Wp"]).T if "Wp" in v else None
        self.mask = step_mask(v, problem)
        self.dmask = np.zeros(v["mask"].shape, dtype) if "mask" in v else None
        self.dm = np.empty((H, B), dtype) if "Wp" in v else None
        columns = chunk_steps(problem) * B
        self.dz = columns_buffer(4 * H, columns, B, dtype)
        self.dh_kept, self.m = (columns_buffer(rows, columns, B, dtype) if "Wp" in v else None for rows in (P, H))

    def run(self, start: int, stop: int) -> tuple[np.ndarray | None, ...]:
        """Steps start..stop back; returns dz [4H, n] and, with a projection, dh [P, n] and m [H, n], n = steps x B."""
        B = self.problem.B
        times = range(start, stop) if self.problem.reverse else range(stop - 1, start - 1, -1)
        for t in times:
            columns = slice((t - start) * B, (t - start + 1) * B)
            live = None if self.lengths is None else self.lengths > t
            if live is None or live.all():
                self.back(t, columns, self.dh, self.dc)
            elif not live.any():
                for kept in (self.dz, self.dh_kept, self.m):
                    if kept is not None:
                        kept[:, columns] = 0
            else:
                self.back_where(live, t, columns)
        n = (stop - start) * B
        return tuple(None if kept is None else kept[:, :n] for kept in (self.dz, self.dh_kept, self.m))

    def back(self, t: int, columns: slice, dh: np.ndarray, dc: np.ndarray, live: np.ndarray | None = None) -> None:
        """Step t back: dh and dc become the gradients of the state before it."""
        given, gates, dz = self.given, self.gates[t], self.dz[:, columns]
        if "h" in given:
            dh += given["h"][t].T
        if "c" in given:
            dc += given["c"][t].T
        if live is not None:
            dh[:, ~live], dc[:, ~live] = 0, 0
        dm = dh if self.Wp_T is None else np.matmul(self.Wp_T, dh, out=self.dm)
        dgates = given["gates"][t].T if "gates" in given else None
        if dgates is not None and live is not None:
            dgates = np.where(live, dgates, 0)
        c_prev, h_prev = self.states_before(t)
        self.step(gates, c_prev, self.c[t], dm, dc, dgates, dz)
        if self.Wp_T is not None:
            self.dh_kept[:, columns] = dh
            np.multiply(self.step.s, gates[self.step.block["o"]], out=self.m[:, columns])
        np.matmul(self.Wh_T, dz, out=dh)
        if self.mask is not None:
            term = self.dmask if self.dmask.ndim < 3 or self.dmask.shape[0] == 1 else self.dmask[t]
            terms = dh.T * h_prev
            add_unbroadcast(terms if live is None else np.where(live[:, None], terms, 0), term)
            dh *= self.mask[t].T

    def back_where(self, live: np.ndarray, t: int, columns: slice) -> None:
        """Step t back for the items that have not ended; the gradients of the others pass it by."""
        dh, dc = self.dh.copy(), self.dc.copy()
        self.back(t, columns, dh, dc, live)
        np.copyto(self.dh, dh, where=live)
        np.copyto(self.dc, dc, where=live)

    def states_before(self, t: int) -> tuple[np.ndarray, np.ndarray | None]:
        """(c [H, B], h [B, P]) that step t started from. h only where a mask needs it."""
        last = previous(self.problem, t)
        c = self.c0 if last is None else self.c[last]
        h = None if self.mask is None else self.h0 if last is None else self.h[last]
        if last is not None and self.problem.reverse and self.lengths is not None:
            starts = self.lengths == t + 1
            c = np.where(starts, self.c0, c)
            h = None if h is None else np.where(starts[:, None], self.h0, h)
        return c, h

    def finish(self) -> Arrays:
        """The gradients that the sweep itself holds: h0, c0 and where present peephole and mask."""
        found = {"h0": self.dh.T, "c0": self.dc.T}
        if self.step.dpeephole is not None:
            found["peephole"] = self.step.dpeephole.sum(axis=1)
        if self.dmask is not None:
            found["mask"] = self.dmask
        arrays, memory = empty(self.dh.dtype, {name: gradient.shape for name, gradient in found.items()})
        for name, gradient in found.items():
            memory[name][...] = gradient
        return arrays


def add_unbroadcast(term: np.ndarray, total: np.ndarray) -> None:
    """Add term [B, P] to total, summed down to total's shape, which broadcasts to term's."""
    lead = total.ndim - 2
    shape = total.shape[lead:] if lead > 0 else (1,) * -lead + total.shape
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    total += term.sum(axis=axes, keepdims=True).reshape(total.shape)
