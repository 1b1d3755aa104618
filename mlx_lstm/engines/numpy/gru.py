"""The GRU and the plain cell of engine `numpy`: one step forward and back each, in place, with all scratch memory.

The equations are those of `engines.ops.cells.gru_step`, `gru_step_backward` and the plain cell's. Every array of a step
is feature-major, [3H, B] and [H, B].
"""

import numpy as np

from ..cells import GRUCell
from ..problem import Problem
from .arrays import Array, Views
from .gates import gate_blocks, gates_of
from .memory import Steps, chunk_steps, columns_buffer, matrix
from .products import Preactivations, WeightGradients


def reset_and_update(blocks: dict[str, slice]) -> list[slice]:
    """The rows of r and z: one slice where they are neighbours, else two."""
    first, second = sorted((blocks["r"], blocks["z"]), key=lambda rows: rows.start)
    return [slice(first.start, second.stop)] if first.stop == second.start else [first, second]


class GRUStep:
    """`engines.ops.cells.gru_step` in place: one step forward with all its scratch memory.

    The rows of the preactivations become the gates.
    """

    def __init__(self, problem: Problem, cell: GRUCell, v: Views, preactivations: Preactivations):
        (_, B, H, _), dtype, order, activations = problem[:4], v["Wh"].dtype, cell.gate_order, cell.activations
        self.preactivations: Preactivations = preactivations
        self.after: bool = cell.reset == "after"
        self.flip: bool = cell.flip_z
        z, self.block = preactivations.z, gate_blocks(order, H)
        self.r, self.update, self.n = (z[self.block[gate]] for gate in "rzn")
        self.rz: list[slice] = reset_and_update(self.block)
        self.early, self.late = (gates_of(order, activations, H, names).on(z) for names in ("rz", "n"))
        self.Wh_n: Array = preactivations.Wh[self.block["n"]]
        self.bhn: Array | None = np.repeat(v["bhn"][:, None], B, axis=1) if "bhn" in v else None
        self.scratch: Array | None = None if self.after else np.empty((H, B), dtype)

    def __call__(self, t: int, h_prev: Array, _c_prev: Array, gates: Array | None, _c: Array, h: Array) -> None:
        """From h_prev [H, B]: gates [3H, B] where they are kept and h [H, B]."""
        preactivations, n, update = self.preactivations, self.n, self.update
        Wh, z = preactivations.Wh, preactivations.z
        h_in, a = preactivations.entering(t, h_prev), preactivations.of_input(t)
        if self.after:
            np.matmul(Wh, h_in, out=z)
        for rows in self.rz:
            if not self.after:
                np.matmul(Wh[rows], h_in, out=z[rows])
            z[rows] += a[rows]
        for activation, rows in self.early:
            activation(rows, rows)
        if self.after:
            if self.bhn is not None:
                n += self.bhn
            n *= self.r
        else:
            np.matmul(self.Wh_n, np.multiply(self.r, h_in, out=self.scratch), out=n)
        n += a[self.block["n"]]
        for activation, rows in self.late:
            activation(rows, rows)
        kept, new = (n, h_prev) if self.flip else (h_prev, n)
        np.subtract(kept, new, out=h)
        h *= update
        h += new
        if gates is not None:
            np.copyto(gates, z)


class GRUStepBackward:
    """`engines.ops.cells.gru_step_backward` in place: one step back, and what the weights' gradients need of it.

    With reset "after" dz holds, during the steps of a chunk, the gradient of the recurrent product: in the rows of n
    that of q = Wh_n h + bhn, which one product per chunk computes again. `finish` puts dz_n in their place.
    """

    def __init__(self, problem: Problem, cell: GRUCell, v: Views, saved: Views):
        """saved: gates [T, B, 3H]."""
        (_, B, H, _), dtype = problem[:4], v["Wh"].dtype
        self.after: bool = cell.reset == "after"
        self.flip: bool = cell.flip_z
        self.gates_at, self.gates = Steps(saved["gates"]), gates_of(cell.gate_order, cell.activations, H, "rzn")
        self.block: dict[str, slice] = gate_blocks(cell.gate_order, H)
        self.rz: list[slice] = reset_and_update(self.block)
        Wh = matrix(v["Wh"])
        self.Wh_T, self.Wh_n, self.bhn = Wh.T, Wh[self.block["n"]], v.get("bhn")
        self.slopes: Array = np.empty((3 * H, B), dtype)
        self.dy: Array = np.empty((3 * H, B), dtype)
        self.dy_r, self.dy_z, self.dy_n = (self.dy[self.block[gate]] for gate in "rzn")
        self.slopes_n: Array = self.slopes[self.block["n"]]
        self.direct: Array = np.empty((H, B), dtype)
        self.scratch: Array = np.empty((H, B), dtype)
        columns = chunk_steps(problem) * B
        self.dz: Array = columns_buffer(3 * H, columns, B, dtype)
        # With reset "after" dz_n and q, else only r h.
        self.dz_n: Array = columns_buffer(H, columns, B, dtype) if self.after else self.dz[self.block["n"]]
        self.inner: Array = columns_buffer(H, columns, B, dtype)
        self.by_column: list[Array] = [self.dz, self.dz_n, self.inner]

    def start(self, start: int, before: Array, h_in: Array) -> None:
        """Before the steps of a chunk: `before` [steps, B, H] is the h they start from, h_in [n, H] the masked one."""
        self.first, self.before, self.h_in = start, before, h_in
        if self.after:
            q = np.matmul(self.Wh_n, matrix(h_in).T, out=self.inner[:, : len(h_in)])
            if self.bhn is not None:
                q += self.bhn[:, None]

    def __call__(self, t: int, columns: slice, dh: Array, _dc: Array, dgates: Array | None) -> None:
        """Writes dz; turns dh, the gradient of h, into that of the h that entered the product. What reaches h_prev
        past the product goes to self.direct."""
        gates, h_prev = self.gates_at.at(t), self.before[t - self.first].T
        r, z, n = gates[self.block["r"]], gates[self.block["z"]], gates[self.block["n"]]
        self.gates.slopes(gates, self.slopes)
        np.subtract(*((n, h_prev) if self.flip else (h_prev, n)), out=self.dy_z)
        self.dy_z *= dh
        through_z, past_z = (self.dy_n, self.direct) if self.flip else (self.direct, self.dy_n)
        np.multiply(dh, z, out=through_z)
        np.subtract(dh, through_z, out=past_z)
        if dgates is not None:
            for gate, dy in (("z", self.dy_z), ("n", self.dy_n)):
                dy += dgates[self.block[gate]]
        dz, dz_n, inner = self.dz[:, columns], self.dz_n[:, columns], self.inner[:, columns]
        np.multiply(self.dy_n, self.slopes_n, out=dz_n)
        if self.after:
            np.multiply(dz_n, inner, out=self.dy_r)
            np.multiply(dz_n, r, out=dz[self.block["n"]])
        else:
            h_in = self.h_in[columns].T
            reset = np.matmul(self.Wh_n.T, dz_n, out=self.scratch)
            np.multiply(reset, h_in, out=self.dy_r)
            np.multiply(r, h_in, out=inner)
            reset *= r
        if dgates is not None:
            self.dy_r += dgates[self.block["r"]]
        for rows in self.rz:
            np.multiply(self.dy[rows], self.slopes[rows], out=dz[rows])
        if self.after:
            np.matmul(self.Wh_T, dz, out=dh)
        else:
            dh[...] = self.scratch
            for rows in self.rz:
                dh += np.matmul(self.Wh_T[:, rows], dz[rows], out=self.scratch)

    def finish(self, products: WeightGradients, h_in: Array) -> None:
        """After the steps of a chunk: the products of the recurrent weights. h_in [n, H]."""
        n, rows = len(h_in), self.block["n"]
        dz, h_in = self.dz[:, :n], matrix(h_in)
        if self.after:
            products.accumulate("Wh", dz, h_in)
            if self.bhn is not None:
                products.accumulate("bhn", dz[rows], np.ones(n, dz.dtype))
            dz[rows] = self.dz_n[:, :n]
            return
        for early in self.rz:
            products.accumulate("Wh", dz[early], h_in, early)
        products.accumulate("Wh", dz[rows], self.inner[:, :n].T, rows)
