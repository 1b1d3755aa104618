"""The LSTM cell of the engine `numpy`: one step forward and one step backward, in place, with preallocated scratch
memory.

The equations are those of `engines.ops.cells.lstm_step` and `lstm_step_backward`. Every array of a step is
feature-major, [4H, B] or [H, B], so that each gate is one contiguous block.
"""

from functools import cache
from itertools import groupby

import numpy as np

from ..cells import LSTMCell
from ..problem import Problem
from .activations import ONE, InPlace, activation, gate_blocks, runs
from .arrays import Array, Views, chunk_steps, columns_buffer, matrix, steps_of
from .products import JoinedProduct, SeparateProducts, TransposedProduct, WeightGradients, in_blocks, input_products


@cache
def reciprocal_gates(activations: tuple[str, ...]) -> str:
    """Return the gates for which a step computes the reciprocal, 1 + exp(-z), and then divides by it. This saves a
    pass over memory compared with computing sigmoid(z) and multiplying. The result is "ifo" if these three are
    sigmoids and g is not, else empty."""
    i, f, g, o, _ = activations
    return "ifo" if i == f == o == "sigmoid" != g else ""


def reciprocal_sigmoid(z: Array, out: Array) -> None:
    """Write 1 + exp(-z), the reciprocal of sigmoid(z), to `out`. It is infinite where exp overflows."""
    np.negative(z, out=out)
    np.exp(out, out=out)
    np.add(out, ONE, out=out)


def reciprocal_sigmoid_negated(negated_z: Array, out: Array) -> None:
    """Write 1 + exp(-z) to `out`, from the negated preactivation -z."""
    np.exp(negated_z, out=out)
    np.add(out, ONE, out=out)


def peephole_columns(cell: LSTMCell, v: Views, H: int, B: int) -> dict[str, Array]:
    """Return the peephole weights of each gate, repeated over the batch to contiguous arrays [H, B]. Return an empty
    dict without peepholes."""
    if "peephole" not in v:
        return {}
    return {gate: np.repeat(v["peephole"][cell.block(gate, H), None], B, axis=1) for gate in cell.gate_order}


def changed_by_clip(before: Array, after: Array, limit: float) -> Array:
    """Return where a clip changed an array. `engines.ops.cells.through_clip` says why both arrays are needed."""
    return (np.abs(after) >= limit) & (np.abs(before) != limit)


class LSTMStep:
    """Compute one forward step of an LSTM. Calling the object overwrites the preactivations z [4H, B] with the
    gates, or with the reciprocals of gates."""

    def __init__(self, problem: Problem, cell: LSTMCell, v: Views, mask: Array | None, streamed: bool = False):
        """Allocate the arrays that every step overwrites. streamed: the steps arrive one at a time
        (`engines.numpy.stream`)."""
        (_, B, H, _), dtype = problem[:4], v["Wh"].dtype
        reciprocal = reciprocal_gates(cell.activations)
        self.products: JoinedProduct | SeparateProducts = input_products(problem, v, mask, reciprocal, streamed)
        order, negated = self.products.order, self.products.negated
        self.weights: Array = in_blocks(self.products.weights, B, streamed)
        self.z: Array = np.empty((4 * H, B), dtype)
        self.product: Array = self.z.reshape(*self.weights.shape[:-1], -1)  # z, divided like the weights
        self.scratch: Array = np.empty((H, B), dtype)
        # If `reciprocal` is not empty, a step computes 1 + exp(-z), which is 1 / sigmoid(z), for the gates i, f, o.
        # This takes one pass over memory less than sigmoid(z). The step then divides by this number where it would
        # otherwise multiply by the gate.
        self.apply_gate: np.ufunc = np.divide if reciprocal else np.multiply
        blocks = gate_blocks(order, H)
        self.gate: dict[str, Array] = {gate: self.z[rows] for gate, rows in blocks.items()}
        self.peephole: dict[str, Array] = peephole_columns(cell, v, H, B)
        for gate in negated if self.peephole else "":
            np.negative(self.peephole[gate], out=self.peephole[gate])
        # If gate o has a peephole that reads the new c, o is computed late: after c, not with the other gates.
        late = "o" if self.peephole and cell.output_peephole == "current" else ""
        self.early: list[tuple[InPlace, Array]] = self.activations(cell, order, "ifg" if late else "ifgo")
        self.late: list[tuple[InPlace, Array]] = self.activations(cell, order, late)
        self.peeps_early: str = ("ifg" if late else "ifgo") if self.peephole else ""
        self.clip: float | None = cell.cell_clip
        self.projection_clip: float | None = cell.projection_clip
        self.output: InPlace = activation(cell.activations[4])[0]
        # Where to copy the gates from z, for the backward pass: tuples (whether these rows of z hold 1 / gate and must
        # be inverted, the rows of z, the rows of the saved gates). The saved gates are in the cell's own gate order.
        self.saves: list[tuple[bool, Array, slice]] = []
        own = gate_blocks(cell.gate_order, H)
        for inverse, run in groupby(cell.gate_order, key=lambda gate: gate in reciprocal):
            first, *_, last = [*run] * 2
            rows = slice(blocks[first].start, blocks[last].stop)
            self.saves.append((inverse, self.z[rows], slice(own[first].start, own[last].stop)))
        self.Wp: Array | None = matrix(v["Wp"]) if "Wp" in v else None
        if self.Wp is not None:
            self.m: Array = np.empty((H, B), dtype)  # o * output(c), which Wp projects to h

    def activations(self, cell: LSTMCell, order: str, gates: str) -> list[tuple[InPlace, Array]]:
        """Return pairs (function, rows of z). Each function overwrites its rows of z, which hold preactivations, with
        gates. Exception: if `apply_gate` is a division, the rows of a sigmoid gate become 1 / gate = 1 + exp(-z), which
        is faster to compute. The step then divides by these rows instead of multiplying by the gate."""
        sigmoid = reciprocal_sigmoid_negated if self.products.negated else reciprocal_sigmoid
        reciprocal = self.apply_gate is np.divide
        return [
            (sigmoid if reciprocal and run.name == "sigmoid" else run.activate, self.z[run.rows])
            for run in runs(order, cell.activations, len(self.scratch), gates)
        ]

    def __call__(
        self,
        operand: Array,
        inputs: Array | None,
        _h_prev: Array,
        c_prev: Array,
        gates: Array | None,
        c: Array,
        h: Array,
    ) -> None:
        """Write the new c [H, B] and h [P, B] and, unless `gates` is None, the gates [4H, B]. P is the width of h: H,
        or the width of the projection.

        operand: the array that `weights` multiplies. inputs: the input's part of the preactivations; None if `weights`
        contains Wx, so that the product with `operand` includes this part. c_prev [H, B]: the c before the step.
        """
        gate, scratch, apply_gate = self.gate, self.scratch, self.apply_gate
        # Compute the preactivations z. Below, each activation overwrites its rows of z with its gate, or with 1 / gate
        # if `apply_gate` divides by these rows.
        np.matmul(self.weights, operand, out=self.product)
        if inputs is not None:
            self.z += inputs
        for name in self.peeps_early:
            gate[name] += np.multiply(self.peephole[name], c_prev, out=scratch)
        for activate, rows in self.early:
            activate(rows, rows)
        # c = f c_prev + i g
        apply_gate(c_prev, gate["f"], out=c)
        c += apply_gate(gate["g"], gate["i"], out=scratch)
        if self.clip is not None:
            np.clip(c, -self.clip, self.clip, out=c)
        for activate, rows in self.late:
            rows += np.multiply(self.peephole["o"], c, out=scratch)
            activate(rows, rows)
        # h is the gate o times the activation `output` of c. With a projection h is Wp times this product.
        self.output(c, scratch)
        if self.Wp is None:
            apply_gate(scratch, gate["o"], out=h)
        else:
            np.matmul(self.Wp, apply_gate(scratch, gate["o"], out=self.m), out=h)
            if self.projection_clip is not None:
                np.clip(h, -self.projection_clip, self.projection_clip, out=h)
        if gates is not None:
            for inverse, rows, block in self.saves:
                if inverse:
                    np.divide(ONE, rows, out=gates[block])
                else:
                    np.copyto(gates[block], rows)


class LSTMStepBackward:
    """Compute one backward step of an LSTM, and collect what the gradients of the recurrent weights need.

    The steps run in chunks of time, with n = steps x B columns. `dz` [4H, n] collects the gradient of the
    preactivations of a chunk. `by_column` lists all arrays with these n columns.
    """

    direct: Array | None = None
    """The part of the gradient of h_prev that bypasses the recurrent product. An LSTM has none."""

    def __init__(self, problem: Problem, cell: LSTMCell, v: Views, saved: Views):
        """Allocate the arrays that every backward step overwrites. saved: outputs of the forward pass, among them the
        gates [T, B, 4H]."""
        (_, B, H, P), dtype = problem[:4], v["Wh"].dtype
        self.gates_at = steps_of(saved["gates"])
        # The limits of the clips that stop gradients.
        self.clip: float | None = cell.cell_clip if cell.stops_c else None
        self.projection_clip: float | None = cell.projection_clip if cell.stops_h else None
        if cell.stops_h:
            self.h_at = steps_of(saved["h"])
        self.through_Wh = TransposedProduct(v["Wh"], problem)
        self.block: dict[str, slice] = gate_blocks(cell.gate_order, H)
        self.runs = runs(cell.gate_order, cell.activations, H, "ifgo")
        self.output, self.output_slope = activation(cell.activations[4])
        self.o_sees_current: bool = cell.output_peephole == "current"
        self.peephole: dict[str, Array] = peephole_columns(cell, v, H, B)
        if self.peephole:
            self.dpeephole: Array = np.zeros((4 * H, B), dtype)  # it is summed over the batch after the last step
        self.slopes: Array = np.empty((4 * H, B), dtype)  # the derivatives of the gates' activations
        self.dy: Array = np.empty((4 * H, B), dtype)  # the gradient of the gates
        self.dy_i, self.dy_f, self.dy_g, self.dy_o = (self.dy[self.block[gate]] for gate in "ifgo")
        self.s: Array = np.empty((H, B), dtype)  # output(c)
        self.scratch: Array = np.empty((H, B), dtype)
        columns = chunk_steps(problem) * B
        self.dz: Array = columns_buffer(4 * H, columns, B, dtype)
        self.by_column: list[Array] = [self.dz]
        self.Wp_T: Array | None = matrix(v["Wp"]).T if "Wp" in v else None
        if self.Wp_T is not None:
            self.dm: Array = np.empty((H, B), dtype)
            self.dh: Array = columns_buffer(P, columns, B, dtype)
            self.m: Array = columns_buffer(H, columns, B, dtype)
            self.by_column += [self.dh, self.m]

    def __call__(
        self, t: int, columns: slice, c_prev: Array, c: Array, dh: Array, dc: Array, dgates: Array | None
    ) -> None:
        """Compute step t backward and write its columns of dz. Overwrite dh [P, B], the gradient of the new h, with
        the gradient of the h that entered the recurrent product. Overwrite dc [H, B], the gradient of the new c, with
        the gradient of c_prev.

        P is the width of h. c_prev, c [H, B]: the c before and after the step. dgates [4H, B]: the cotangent of the
        gates, or None.
        """
        gates, block, s, slopes, dy, scratch = self.gates_at(t), self.block, self.s, self.slopes, self.dy, self.scratch
        i, f, g, o = gates[block["i"]], gates[block["f"]], gates[block["g"]], gates[block["o"]]
        np.multiply(gates, gates, out=slopes)
        for _, _, slope, rows in self.runs:
            slope(gates[rows], slopes[rows])
        # Compute s = output(c) and dm, the gradient of m = o * s. h is m or, with a projection, Wp m.
        self.output(c, s)
        dm = dh
        if self.Wp_T is not None:
            m = np.multiply(s, o, out=self.m[:, columns])
            if self.projection_clip is not None:
                dh[changed_by_clip(self.Wp_T.T @ m, self.h_at(t), self.projection_clip)] = 0
            dm = np.matmul(self.Wp_T, dh, out=self.dm)
            self.dh[:, columns] = dh
        # Propagate dm, the gradient of m, to gate o and to c.
        np.multiply(dm, s, out=self.dy_o)
        np.multiply(s, s, out=scratch)
        self.output_slope(s, scratch)
        scratch *= o
        dc += np.multiply(scratch, dm, out=scratch)
        if self.peephole and self.o_sees_current:
            dz_o = self.dy_o if dgates is None else self.dy_o + dgates[block["o"]]
            dc += dz_o * slopes[block["o"]] * self.peephole["o"]
        if self.clip is not None:
            dc[changed_by_clip(f * c_prev + i * g, c, self.clip)] = 0
        # Propagate the gradient of c = f c_prev + i g to the gates and to c_prev.
        np.multiply(dc, g, out=self.dy_i)
        np.multiply(dc, c_prev, out=self.dy_f)
        np.multiply(dc, i, out=self.dy_g)
        if dgates is not None:
            dy += dgates
        dz = self.dz[:, columns]
        np.multiply(dy, slopes, out=dz)
        dc *= f
        if self.peephole:
            self.through_peepholes(dz, c_prev, c, dc)
        self.through_Wh(dz, dh)

    def through_peepholes(self, dz: Array, c_prev: Array, c: Array, dc: Array) -> None:
        """Add this step's terms to the peephole gradient, and add to dc the gradient of c_prev that comes through
        the peepholes."""
        for gate, rows in self.block.items():
            current = gate == "o" and self.o_sees_current
            self.dpeephole[rows] += np.multiply(dz[rows], c if current else c_prev, out=self.scratch)
            if not current:
                dc += np.multiply(dz[rows], self.peephole[gate], out=self.scratch)

    def end_chunk(self, products: WeightGradients, h_in: Array) -> None:
        """Add the terms of one chunk of time steps to the weight gradients in `products`. h_in [n, P]: the h that
        entered the recurrent product, with one row for each of the n pairs (step, batch item) of the chunk. P is the
        width of h."""
        n = len(h_in)
        products.accumulate("Wh", self.dz[:, :n], matrix(h_in))
        if self.Wp_T is not None:
            products.accumulate("Wp", self.dh[:, :n], self.m[:, :n].T)
