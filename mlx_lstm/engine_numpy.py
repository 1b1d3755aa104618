"""Engine `numpy`: the recurrence on the CPU, in place on MLX's own memory, with NumPy's BLAS.

The equations are those of `engine_ops.lstm_step`, here written into preallocated buffers. Within a step every array is
feature-major, [4H, B] and [H, B]: the large matrix then stands first in the recurrent product, which BLAS runs up to
twice as fast, and every gate is one contiguous block. So gates and c are kept as [T, 4H, B] and [T, H, B] and leave as
transposed views; h leaves in the memory order of x. float32 and float64 only: the caller casts.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .cells import LSTMCell
from .problem import Problem

Arrays = dict[str, mx.array]
Views = dict[str, np.ndarray]
Saved = dict[str, "mx.array | np.ndarray"]

CHUNK_ROWS = 1024  # rows (time steps x batch) that one product of the backward pass takes: bounds the memory of dz
WIDE_BATCH = 16  # from here on a step's [4H, B] block is wide enough for BLAS and for contiguous rows


def forward(problem: Problem, arrays: Arrays) -> Saved:
    """h [T, B, P], c [T, B, H], gates [T, B, 4H], hT [B, P], cT [B, H]; gates in NumPy's memory unless wanted."""
    v = views(arrays)
    dtype, (T, B, H, P) = v["Wh"].dtype, problem[:4]
    shapes = {"h": memory_shape((T, B, P), v["x"]), "c": (T, H, B), "hT": (B, P), "cT": (B, H)}
    if problem.return_gates:
        shapes["gates"] = (T, 4 * H, B)
    outputs, memory = empty(dtype, shapes)
    h, c = memory["h"], memory["c"]
    if h.shape != (T, B, P):
        outputs["h"], h = mx.swapaxes(outputs["h"], 0, 1), h.transpose(1, 0, 2)
    # NumPy's own memory where MLX need not see it: MLX would write it once before we do.
    gates = memory.get("gates", np.empty((T, 4 * H, B), dtype) if "gates" not in memory else None)

    product = (OneProduct if one_product(problem, v) else TwoProducts)(problem, v)
    step, carry = LSTMStep(problem.cell, v, H, B), Carry(problem, v)
    m = np.empty((H, B), dtype)
    for t in problem.steps():
        live = carry.live(t)
        if live is not None and not live.any():
            h[t], c[t], gates[t] = 0, 0, 0
            continue
        product.into(gates[t], t, carry.h)
        step(gates[t], carry.c, c[t], m)
        if "Wp" in v:
            np.matmul(m.T, v["Wp"].T, out=h[t])
        else:
            np.copyto(h[t], m.T)
        carry.advance(live, h[t], c[t], gates[t])
    memory["hT"][...], memory["cT"][...] = carry.h, carry.c.T
    outputs["c"] = mx.swapaxes(outputs["c"], 1, 2)
    gates_out = mx.swapaxes(outputs["gates"], 1, 2) if problem.return_gates else gates.transpose(0, 2, 1)
    return outputs | {"gates": gates_out}


def backward(problem: Problem, arrays: Arrays, saved: Saved, cotangents: Arrays) -> Arrays:
    """The gradient of every array, from those of the outputs that have one (keys h, c, gates, hT, cT)."""
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


# --- The preactivations ----------------------------------------------------------------------------------------------
# Bias and forget bias included, peepholes not. Sigmoid gates get half of theirs, see `Gates.activate`.


def one_product(problem: Problem, v: Views) -> bool:
    """Whether [x_t, h] in one product per step beats the input's product ahead of the steps.

    It saves a pass over the preactivations but copies the weights and cannot use more than B columns.
    """
    T, B, H, _ = problem[:4]
    return "Wx" in v and B >= WIDE_BATCH and T * B >= 512 and v["Wx"].shape[1] <= 2 * H


def bias_column(cell: LSTMCell, v: Views, H: int) -> np.ndarray:
    """[4H]: the bias, the forget bias added."""
    bias = np.array(v["b"]) if "b" in v else np.zeros(4 * H, v["Wh"].dtype)
    bias[cell.block("f", H)] += cell.forget_bias
    return bias


class OneProduct:
    """[Wh | b | Wx] @ [h; 1; x_t], the weights joined and halved in one copy."""

    def __init__(self, problem: Problem, v: Views):
        dtype, (_, B, H, P) = v["Wh"].dtype, problem[:4]
        I = v["Wx"].shape[1]
        self.x, self.mask = v["x"], step_mask(v, problem)
        self.W = np.empty((4 * H, P + 1 + I), dtype)
        self.W[:, :P], self.W[:, P], self.W[:, P + 1 :] = v["Wh"], bias_column(problem.cell, v, H), v["Wx"]
        for rows in Gates(problem.cell, H, "ifgo").sigmoid:
            self.W[rows] *= 0.5
        operand = np.ones((B, P + 1 + I), dtype)
        self.h_part, self.x_part, self.operand = operand[:, :P], operand[:, P + 1 :], operand.T

    def into(self, out: np.ndarray, t: int, h: np.ndarray) -> None:
        """Step t's preactivations into out [4H, B], from h [B, P] before it."""
        np.copyto(self.x_part, self.x[t])
        if self.mask is None:
            np.copyto(self.h_part, h)
        else:
            np.multiply(h, self.mask[t], out=self.h_part)
        np.matmul(self.W, self.operand, out=out)


class TwoProducts:
    """Wx @ x for a whole chunk of steps ahead, then Wh @ h step by step; no copy of weights."""

    def __init__(self, problem: Problem, v: Views):
        dtype, (_, B, H, P) = v["Wh"].dtype, problem[:4]
        self.x, self.mask, self.B, self.chunk = v["x"], step_mask(v, problem), B, chunk_steps(problem)
        self.Wh, self.Wx = matrix(v["Wh"]), matrix(v["Wx"]) if "Wx" in v else None
        if self.Wx is not None:
            self.ahead = columns_buffer(4 * H, self.chunk * B, B, dtype)
        self.start = None
        self.recurrent = np.empty((4 * H, B), dtype)
        self.masked = np.empty((B, P), dtype) if self.mask is not None else None
        bias = bias_column(problem.cell, v, H)
        self.bias = np.repeat(bias[:, None], B, axis=1) if bias.any() else None
        self.halved = Gates(problem.cell, H, "ifgo").sigmoid

    def into(self, out: np.ndarray, t: int, h: np.ndarray) -> None:
        """Step t's preactivations into out [4H, B], from h [B, P] before it."""
        if self.mask is not None:
            h = np.multiply(h, self.mask[t], out=self.masked)
        np.matmul(self.Wh, h.T, out=self.recurrent)
        np.add(self.recurrent, self.of_input(t), out=out)
        if self.bias is not None:
            out += self.bias
        for rows in self.halved:
            out[rows] *= 0.5

    def of_input(self, t: int) -> np.ndarray:
        """[4H, B]: the input's part at step t."""
        if self.Wx is None:
            return self.x[t].T
        start = t - t % self.chunk
        if start != self.start:
            rows = self.x[start : start + self.chunk]
            rows = matrix(rows.reshape(-1, rows.shape[-1]))
            np.matmul(self.Wx, rows.T, out=self.ahead[:, : rows.shape[0]])
            self.start = start
        return self.ahead[:, (t - start) * self.B : (t - start + 1) * self.B]


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


def step_mask(v: Views, problem: Problem) -> np.ndarray | None:
    """The mask on h[t-1] as [T, B, P], a broadcast view."""
    return np.broadcast_to(v["mask"], (problem.T, problem.B, problem.P)) if "mask" in v else None


def previous(problem: Problem, t: int) -> int | None:
    """The step whose state step t starts from; None at the first one."""
    last = t + 1 if problem.reverse else t - 1
    return last if 0 <= last < problem.T else None


# --- The cell, one step at a time ------------------------------------------------------------------------------------


class Gates:
    """Where each gate's rows lie on a 4H axis, and which neighbouring rows share an activation."""

    def __init__(self, cell: LSTMCell, H: int, names: str):
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
        self.other = [(name, run) for name, run in self.runs if name in ("relu", "hard_sigmoid")]

    def activate(self, z: np.ndarray) -> None:
        """In place. sigmoid(x) = 0.5 + 0.5 tanh(x / 2): with sigmoid gates halved on entry one tanh serves all."""
        for run in self.smooth:
            np.tanh(z[run], out=z[run])
        for run in self.sigmoid:
            y = z[run]
            y *= 0.5
            y += 0.5
        for name, run in self.other:
            activate(name, z[run], z[run])

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
    elif name == "hard_sigmoid":
        np.multiply(x, 0.2, out=out)
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
    elif name == "hard_sigmoid":
        np.copyto(out, (y > 0) & (y < 1))
        out *= 0.2
    elif name == "relu":
        np.copyto(out, y > 0)
    else:
        out.fill(1)


def peephole_columns(cell: LSTMCell, v: Views, H: int, B: int) -> dict[str, np.ndarray]:
    """Each gate's peephole weights, repeated over the batch to [H, B]: contiguous operands for every step."""
    if "peephole" not in v:
        return {}
    return {gate: np.repeat(v["peephole"][cell.block(gate, H), None], B, axis=1) for gate in cell.gate_order}


class LSTMStep:
    """`engine_ops.lstm_step` in place: one step forward with all its scratch memory."""

    def __init__(self, cell: LSTMCell, v: Views, H: int, B: int):
        self.block = {gate: cell.block(gate, H) for gate in "ifgo"}
        self.peephole = peephole_columns(cell, v, H, B)
        for gate, columns in self.peephole.items():
            columns *= 0.5 if cell.activation(gate) == "sigmoid" else 1  # as the preactivations
        late = "o" if self.peephole and cell.output_peephole == "current" else ""
        self.early = Gates(cell, H, "ifgo".replace(late, "") if late else "ifgo")
        self.late = Gates(cell, H, late)
        self.clip, self.output = cell.cell_clip, cell.activation("output")
        self.scratch = np.empty((H, B), v["Wh"].dtype)

    def __call__(self, gates: np.ndarray, c_prev: np.ndarray, c: np.ndarray, m: np.ndarray) -> None:
        """Turns gates [4H, B], on entry the preactivations, into the gates; writes c and m [H, B]."""
        block, peephole, scratch = self.block, self.peephole, self.scratch
        if peephole:
            for gate in "ifg" if self.late.runs else "ifgo":
                gates[block[gate]] += np.multiply(peephole[gate], c_prev, out=scratch)
        self.early.activate(gates)
        np.multiply(gates[block["f"]], c_prev, out=c)
        c += np.multiply(gates[block["i"]], gates[block["g"]], out=scratch)
        if self.clip is not None:
            np.clip(c, -self.clip, self.clip, out=c)
        if self.late.runs:
            gates[block["o"]] += np.multiply(peephole["o"], c, out=scratch)
            self.late.activate(gates)
        activate(self.output, c, scratch)
        np.multiply(scratch, gates[block["o"]], out=m)


class LSTMStepBackward:
    """`engine_ops.lstm_step_backward` in place: one step back, and the sums of the peephole gradient."""

    def __init__(self, cell: LSTMCell, v: Views, H: int, B: int):
        dtype = v["Wh"].dtype
        self.cell = cell
        self.block = {gate: cell.block(gate, H) for gate in "ifgo"}
        self.gates = Gates(cell, H, "ifgo")
        self.peephole = peephole_columns(cell, v, H, B)
        self.dpeephole = np.zeros((4 * H, B), dtype) if self.peephole else None
        self.slopes, self.dy = np.empty((4 * H, B), dtype), np.empty((4 * H, B), dtype)
        self.s, self.scratch = np.empty((H, B), dtype), np.empty((H, B), dtype)

    def __call__(
        self,
        gates: np.ndarray,
        c_prev: np.ndarray,
        c: np.ndarray,
        dm: np.ndarray,
        dc: np.ndarray,
        dgates: np.ndarray | None,
        dz: np.ndarray,
    ) -> None:
        """Writes dz [4H, B]; turns dc, the gradient of c, into that of c_prev. Leaves s_output(c) in self.s."""
        block, dy, scratch = self.block, self.dy, self.scratch
        i, f, g, o = (gates[block[gate]] for gate in "ifgo")
        output = self.cell.activation("output")
        activate(output, c, self.s)
        self.gates.slopes(gates, self.slopes)
        np.multiply(dm, self.s, out=dy[block["o"]])
        np.multiply(self.s, self.s, out=scratch)
        slope_from_square(output, self.s, scratch)
        scratch *= o
        dc += np.multiply(scratch, dm, out=scratch)
        if self.peephole and self.cell.output_peephole == "current":
            dz_o = dy[block["o"]] if dgates is None else dy[block["o"]] + dgates[block["o"]]
            dc += dz_o * self.slopes[block["o"]] * self.peephole["o"]
        np.multiply(dc, g, out=dy[block["i"]])
        np.multiply(dc, c_prev, out=dy[block["f"]])
        np.multiply(dc, i, out=dy[block["g"]])
        if dgates is not None:
            dy += dgates
        np.multiply(dy, self.slopes, out=dz)
        dc *= f
        if self.peephole:
            self.through_peepholes(dz, c_prev, c, dc)

    def through_peepholes(self, dz: np.ndarray, c_prev: np.ndarray, c: np.ndarray, dc: np.ndarray) -> None:
        """What the gates that peeped at c_prev send back to it, and every gate's term of the peephole gradient."""
        for gate, rows in self.block.items():
            current = gate == "o" and self.cell.output_peephole == "current"
            self.dpeephole[rows] += np.multiply(dz[rows], c if current else c_prev, out=self.scratch)
            if not current:
                dc += np.multiply(dz[rows], self.peephole[gate], out=self.scratch)


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
                for kept in (self.dz, self.dh_kept):
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


def add_unbroadcast(term: np.ndarray, total: np.ndarray) -> None:
    """Add term [B, P] to total, summed down to total's shape, which broadcasts to term's."""
    lead = total.ndim - 2
    shape = total.shape[lead:] if lead > 0 else (1,) * -lead + total.shape
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    total += term.sum(axis=axes, keepdims=True).reshape(total.shape)
