"""The cell of engine `numpy`: one step forward and back, in place, with all its scratch memory.

The equations are those of `engine_ops.lstm_step` and `lstm_step_backward`. Every array of a step is feature-major,
[4H, B] and [H, B], so that each gate is one contiguous block.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .cells import HARD_SIGMOIDS, LSTMCell

Views = dict[str, np.ndarray]


@cache
class Gates:
    """Where each gate's rows lie on a 4H axis, and which neighbouring rows share an activation. Built once each."""

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
        self.other = [(name, run) for name, run in self.runs if name not in ("tanh", "sigmoid")]

    def activate(self, z: np.ndarray, out: np.ndarray) -> None:
        """sigmoid(x) = 0.5 + 0.5 tanh(x / 2): with sigmoid gates halved on entry one tanh serves all."""
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

    def __call__(self, z: np.ndarray, c_prev: np.ndarray, gates: np.ndarray, c: np.ndarray, m: np.ndarray) -> None:
        """From the preactivations z [4H, B], which are spoiled, and c_prev: gates [4H, B], c and m [H, B]."""
        block, peephole, scratch = self.block, self.peephole, self.scratch
        if peephole:
            for gate in "ifg" if self.late.runs else "ifgo":
                z[block[gate]] += np.multiply(peephole[gate], c_prev, out=scratch)
        self.early.activate(z, gates)
        np.multiply(gates[block["f"]], c_prev, out=c)
        c += np.multiply(gates[block["i"]], gates[block["g"]], out=scratch)
        if self.clip is not None:
            np.clip(c, -self.clip, self.clip, out=c)
        if self.late.runs:
            z[block["o"]] += np.multiply(peephole["o"], c, out=scratch)
            self.late.activate(z, gates)
        activate(self.output, c, scratch)
        np.multiply(scratch, gates[block["o"]], out=m)


class LSTMStepBackward:
    """`engine_ops.lstm_step_backward` in place: one step back, and the sums of the peephole gradient."""

    def __init__(self, cell: LSTMCell, v: Views, H: int, B: int):
        dtype = v["Wh"].dtype
        self.output, self.o_sees_current = cell.activation("output"), cell.output_peephole == "current"
        self.block = {gate: cell.block(gate, H) for gate in "ifgo"}
        self.gates = Gates(cell, H, "ifgo")
        self.peephole = peephole_columns(cell, v, H, B)
        self.dpeephole = np.zeros((4 * H, B), dtype) if self.peephole else None
        self.slopes, self.dy = np.empty((4 * H, B), dtype), np.empty((4 * H, B), dtype)
        self.dy_i, self.dy_f, self.dy_g, self.dy_o = (self.dy[self.block[gate]] for gate in "ifgo")
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
        block, scratch, output = self.block, self.scratch, self.output
        i, f, g, o = gates[block["i"]], gates[block["f"]], gates[block["g"]], gates[block["o"]]
        activate(output, c, self.s)
        self.gates.slopes(gates, self.slopes)
        np.multiply(dm, self.s, out=self.dy_o)
        np.multiply(self.s, self.s, out=scratch)
        slope_from_square(output, self.s, scratch)
        scratch *= o
        dc += np.multiply(scratch, dm, out=scratch)
        if self.peephole and self.o_sees_current:
            dz_o = self.dy_o if dgates is None else self.dy_o + dgates[block["o"]]
            dc += dz_o * self.slopes[block["o"]] * self.peephole["o"]
        np.multiply(dc, g, out=self.dy_i)
        np.multiply(dc, c_prev, out=self.dy_f)
        np.multiply(dc, i, out=self.dy_g)
        if dgates is not None:
            self.dy += dgates
        np.multiply(self.dy, self.slopes, out=dz)
        dc *= f
        if self.peephole:
            self.through_peepholes(dz, c_prev, c, dc)

    def through_peepholes(self, dz: np.ndarray, c_prev: np.ndarray, c: np.ndarray, dc: np.ndarray) -> None:
        """What the gates that peeped at c_prev send back to it, and every gate's term of the peephole gradient."""
        for gate, rows in self.block.items():
            current = gate == "o" and self.o_sees_current
            self.dpeephole[rows] += np.multiply(dz[rows], c if current else c_prev, out=self.scratch)
            if not current:
                dc += np.multiply(dz[rows], self.peephole[gate], out=self.scratch)
