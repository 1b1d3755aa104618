"""The LSTM cell of engine `numpy`: one step forward and back, in place, with all its scratch memory.

The equations are those of `engines.ops.cells.lstm_step` and `lstm_step_backward`. Every array of a step is
feature-major, [4H, B] and [H, B], so that each gate is one contiguous block.
"""

from itertools import groupby

import numpy as np

from ..cells import LSTMCell, known
from ..problem import Problem
from .arrays import Array, Views
from .gates import (
    ACTIVATIONS,
    ONE,
    Gates,
    activate,
    gate_blocks,
    gates_of,
    reciprocal_gates,
    reciprocal_sigmoid,
    reciprocal_sigmoid_of_negative,
    slope_from_square,
)
from .memory import Ends, Steps, chunk_steps, columns_buffer, first_state, matrix, transposed
from .products import JoinedPreactivations, Preactivations, WeightGradients


def peephole_columns(cell: LSTMCell, v: Views, H: int, B: int) -> dict[str, Array]:
    """Each gate's peephole weights, repeated over the batch to [H, B]: contiguous operands for every step."""
    if "peephole" not in v:
        return {}
    return {gate: np.repeat(v["peephole"][cell.block(gate, H), None], B, axis=1) for gate in cell.gate_order}


class LSTMStep:
    """`engines.ops.cells.lstm_step` in place: one step forward with all its scratch memory.

    The gates' rows of the preactivations become the gates, or of sigmoids the reciprocals, by which a step divides.
    """

    def __init__(
        self, problem: Problem, cell: LSTMCell, v: Views, preactivations: Preactivations | JoinedPreactivations
    ):
        (_, B, H, _), dtype, order = problem[:4], v["Wh"].dtype, preactivations.order
        self.preactivations, self.Wp = preactivations, matrix(v["Wp"]) if "Wp" in v else None
        self.peephole: dict[str, Array] = peephole_columns(cell, v, H, B)
        for gate in preactivations.negative if self.peephole else "":
            np.negative(self.peephole[gate], out=self.peephole[gate])
        late = "o" if self.peephole and cell.output_peephole == "current" else ""
        reciprocal, z = reciprocal_gates(cell), preactivations.z
        self.by = np.divide if reciprocal else np.multiply
        sigmoid = reciprocal_sigmoid_of_negative if preactivations.negative else reciprocal_sigmoid
        blocks = gate_blocks(order, H)
        self.gate: dict[str, Array] = {gate: z[rows] for gate, rows in blocks.items()}
        self.early, self.late = (
            gates_of(order, cell.activations, H, names).on(z, sigmoid if reciprocal else None)
            for names in ("ifg" if late else "ifgo", late)
        )
        self.clip, self.output = cell.cell_clip, known("numpy", ACTIVATIONS, cell.activation("output"))[0]
        self.kept: list[tuple[bool, Array, slice]] = []  # runs of gates: whether a reciprocal, of z, where kept
        for inverse, run in groupby(cell.gate_order, key=lambda gate: gate in reciprocal):
            first, *_, last = [*run] * 2
            rows, kept = (slice(of[first].start, of[last].stop) for of in (blocks, gate_blocks(cell.gate_order, H)))
            self.kept.append((inverse, z[rows], kept))
        self.scratch: Array = np.empty((H, B), dtype)
        if self.Wp is not None:
            self.m: Array = np.empty((H, B), dtype)

    def __call__(self, t: int, h_prev: Array, c_prev: Array, gates: Array | None, c: Array, h: Array) -> None:
        """From h_prev [P, B] and c_prev [H, B]: gates [4H, B] where they are kept, c [H, B] and h [P, B]."""
        gate, scratch, by = self.gate, self.scratch, self.by
        self.preactivations.at(t, h_prev)
        if self.peephole:
            for name in "ifg" if self.late else "ifgo":
                gate[name] += np.multiply(self.peephole[name], c_prev, out=scratch)
        for activation, rows in self.early:
            activation(rows, rows)
        by(c_prev, gate["f"], out=c)
        c += by(gate["g"], gate["i"], out=scratch)
        if self.clip is not None:
            np.clip(c, -self.clip, self.clip, out=c)
        for activation, rows in self.late:
            rows += np.multiply(self.peephole["o"], c, out=scratch)
            activation(rows, rows)
        self.output(c, scratch)
        m = by(scratch, gate["o"], out=h if self.Wp is None else self.m)
        if self.Wp is not None:
            np.matmul(self.Wp, m, out=h)
        if gates is not None:
            for inverse, rows, block in self.kept:
                if inverse:
                    np.divide(ONE, rows, out=gates[block])
                else:
                    np.copyto(gates[block], rows)


class LSTMStepBackward:
    """`engines.ops.cells.lstm_step_backward` in place: one step back, and what the weights' gradients need of it."""

    direct = None  # h reaches the next step through the recurrent product only

    def __init__(self, problem: Problem, cell: LSTMCell, v: Views, saved: Views):
        """saved: c [T, B, H], gates [T, B, 4H]."""
        (_, B, H, P), dtype = problem[:4], v["Wh"].dtype
        self.problem, self.ends = problem, Ends(problem, v)
        self.c, self.gates_at = Steps(saved["c"]), Steps(saved["gates"])
        self.c0: Array = first_state(v, "c0", (H, B), dtype)
        self.keep: Array | None = v.get("keep")
        self.Wh_T, self.Wp_T = transposed(v["Wh"], problem), matrix(v["Wp"]).T if "Wp" in v else None
        self.output, self.o_sees_current = cell.activation("output"), cell.output_peephole == "current"
        self.block: dict[str, slice] = gate_blocks(cell.gate_order, H)
        self.gates: Gates = gates_of(cell.gate_order, cell.activations, H, "ifgo")
        self.peephole: dict[str, Array] = peephole_columns(cell, v, H, B)
        if self.peephole:
            self.dpeephole: Array = np.zeros((4 * H, B), dtype)
        self.slopes: Array = np.empty((4 * H, B), dtype)
        self.dy: Array = np.empty((4 * H, B), dtype)
        self.dy_i, self.dy_f, self.dy_g, self.dy_o = (self.dy[self.block[gate]] for gate in "ifgo")
        self.s: Array = np.empty((H, B), dtype)
        self.scratch: Array = np.empty((H, B), dtype)
        columns = chunk_steps(problem) * B
        self.dz: Array = columns_buffer(4 * H, columns, B, dtype)
        self.by_column: list[Array] = [self.dz]
        if self.Wp_T is not None:
            self.dm, self.dh_kept = np.empty((H, B), dtype), columns_buffer(P, columns, B, dtype)
            self.m: Array = columns_buffer(H, columns, B, dtype)
            self.by_column += [self.dh_kept, self.m]

    def __call__(self, t: int, columns: slice, dh: Array, dc: Array, dgates: Array | None) -> None:
        """Writes dz [4H, B]; turns dh, the gradient of h, into that of the h that entered the product, dc, that of c,
        into that of c_prev."""
        gates, dz, c, c_prev = self.gates_at.at(t), self.dz[:, columns], self.c.at(t), self.c_before(t)
        if self.keep is not None:
            c_prev = c_prev * self.keep[t].T
        block, s, scratch, output = self.block, self.s, self.scratch, self.output
        i, f, g, o = gates[block["i"]], gates[block["f"]], gates[block["g"]], gates[block["o"]]
        activate(output, c, s)
        dm = dh
        if self.Wp_T is not None:
            dm = np.matmul(self.Wp_T, dh, out=self.dm)
            self.dh_kept[:, columns] = dh
            np.multiply(s, o, out=self.m[:, columns])
        self.gates.slopes(gates, self.slopes)
        np.multiply(dm, s, out=self.dy_o)
        np.multiply(s, s, out=scratch)
        slope_from_square(output, s, scratch)
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
        np.matmul(self.Wh_T, dz, out=dh)

    def finish(self, products: WeightGradients, h_in: Array) -> None:
        """After the steps of a chunk: the products of the recurrent weights and the projection. h_in [n, P]."""
        n = len(h_in)
        products.accumulate("Wh", self.dz[:, :n], matrix(h_in))
        if self.Wp_T is not None:
            products.accumulate("Wp", self.dh_kept[:, :n], self.m[:, :n].T)

    def c_before(self, t: int) -> Array:
        """The c [H, B] that step t started from, before it was multiplied by keep."""
        problem, last = self.problem, t + 1 if self.problem.reverse else t - 1
        if not 0 <= last < problem.T:
            return self.c0
        c = self.c.at(last)
        if problem.reverse and last >= self.ends.shortest:
            c = np.where(self.ends.lengths == last, self.c0, c)
        return c

    def through_peepholes(self, dz: Array, c_prev: Array, c: Array, dc: Array) -> None:
        """What the gates that peeped at c_prev send back to it, and every gate's term of the peephole gradient."""
        for gate, rows in self.block.items():
            current = gate == "o" and self.o_sees_current
            self.dpeephole[rows] += np.multiply(dz[rows], c if current else c_prev, out=self.scratch)
            if not current:
                dc += np.multiply(dz[rows], self.peephole[gate], out=self.scratch)
