"""The GRU cell of the engine `numpy`: one step forward and one step backward, in place, with preallocated scratch
memory.

The equations are those of `engines.ops.cells.gru_step` and `gru_step_backward`. Every array of a step is
feature-major, [3H, B] or [H, B], so that each gate is one contiguous block.
"""

import numpy as np

from ..cells import GRUCell
from ..ops.cells import UNBOUNDED
from ..problem import Problem
from .activations import ONE, InPlace, activation, gate_blocks, runs
from .arrays import Array, Views, chunk_steps, columns_buffer, matrix, steps_of
from .products import SeparateProducts, TransposedProduct, WeightGradients, in_blocks


def reset_and_update(blocks: dict[str, slice]) -> list[slice]:
    """Return the rows of the gates r and z: a list of one slice if the two blocks are neighbours, else of two
    slices."""
    first, second = sorted((blocks["r"], blocks["z"]), key=lambda rows: rows.start)
    return [slice(first.start, second.stop)] if first.stop == second.start else [first, second]


class GRUStep:
    """Compute one forward step of a GRU. Calling the object overwrites the preactivations [3H, B] with the gates."""

    def __init__(self, problem: Problem, cell: GRUCell, v: Views, mask: Array | None, streamed: bool = False):
        """Allocate the arrays that every step overwrites. streamed: the steps arrive one at a time
        (`engines.numpy.stream`)."""
        (_, B, H, _), dtype, order, activations = problem[:4], v["Wh"].dtype, cell.gate_order, cell.activations
        # r multiplies the recurrent product of the candidate, or the h that enters it. So this product cannot be joined
        # with the product of the input.
        self.products: SeparateProducts = SeparateProducts(problem, v, mask)
        self.weights: Array = self.products.weights
        self.after: bool = cell.reset == "after"
        self.flip: bool = cell.flip_z
        self.gates: Array = np.empty((3 * H, B), dtype)
        self.block: dict[str, slice] = gate_blocks(order, H)
        self.r, self.z, self.n = (self.gates[self.block[gate]] for gate in "rzn")
        self.rz: list[slice] = reset_and_update(self.block)
        self.early: list[tuple[InPlace, Array]] = [
            (run.activate, self.gates[run.rows]) for run in runs(order, activations, H, "rz")
        ]
        self.activate_n: InPlace = activation(activations[2])[0]
        self.unbounded: bool = activations[2] in UNBOUNDED
        self.Wh_n: Array = self.weights[self.block["n"]]
        if self.after:
            self.weights = in_blocks(self.weights, B, streamed)
        self.product: Array = self.gates.reshape(*self.weights.shape[:-1], -1)  # the gates, divided like the weights
        self.bhn: Array | None = np.repeat(v["bhn"][:, None], B, axis=1) if "bhn" in v else None
        self.scratch: Array | None = None if self.after else np.empty((H, B), dtype)

    def __call__(
        self, h_in: Array, inputs: Array, h_prev: Array, _c_prev: Array, gates: Array | None, _c: Array, h: Array
    ) -> None:
        """Write the new h [H, B] and, unless `gates` is None, the gates [3H, B].

        h_in [H, B]: the h that enters the recurrent product. inputs: the input's part of the preactivations. h_prev
        [H, B]: the h before the step.
        """
        n, z = self.n, self.z
        # Compute r and z. With reset "after" the same product also gives Wh_n h, in the rows of n.
        if self.after:
            np.matmul(self.weights, h_in, out=self.product)
        for rows in self.rz:
            if not self.after:
                np.matmul(self.weights[rows], h_in, out=self.gates[rows])
            self.gates[rows] += inputs[rows]
        for activate, rows in self.early:
            activate(rows, rows)
        # Compute the candidate n.
        if self.after:
            if self.bhn is not None:
                n += self.bhn
            n *= self.r
        else:
            np.matmul(self.Wh_n, np.multiply(self.r, h_in, out=self.scratch), out=n)
        n += inputs[self.block["n"]]
        self.activate_n(n, n)
        # h = z old + (1 - z) new, computed as new + z (old - new), which takes two passes over memory less.
        old, new = (n, h_prev) if self.flip else (h_prev, n)
        np.subtract(old, new, out=h)
        h *= z
        h += new
        if self.unbounded and (infinite := np.isinf(n)).any():  # for infinite n the formula above gives NaN
            np.copyto(h, z * old + (ONE - z) * new, where=infinite)
        if gates is not None:
            np.copyto(gates, self.gates)


class GRUStepBackward:
    """Compute one backward step of a GRU, and collect the arrays from which the gradients of the weights are computed
    after each chunk of time steps.

    Each of these arrays has one column for each step and batch item of the chunk; `by_column` lists them:

        dz [3H, columns]     the gradients of the preactivations of r, z and the candidate
        inner [H, columns]   the candidate's product q = Wh_n h + bhn (reset "after"), or r * h (reset "before")
        dz_n [H, columns]    the gradient of the candidate's preactivation

    With reset "after" the candidate's preactivation contains r * q, so the gradient of q differs from the gradient of
    the preactivation. The products with Wh need the gradient of q: the candidate's rows of `dz` hold it first, and
    `end_chunk` then overwrites them with `dz_n`.
    """

    def __init__(self, problem: Problem, cell: GRUCell, v: Views, saved: Views):
        """Allocate the arrays that every backward step overwrites. saved: outputs of the forward pass, among them the
        gates [T, B, 3H]."""
        (_, B, H, _), dtype = problem[:4], v["Wh"].dtype
        self.after: bool = cell.reset == "after"
        self.flip: bool = cell.flip_z
        self.gates_at = steps_of(saved["gates"])
        self.runs = runs(cell.gate_order, cell.activations, H, "rzn")
        self.block: dict[str, slice] = gate_blocks(cell.gate_order, H)
        self.rz: list[slice] = reset_and_update(self.block)
        Wh = matrix(v["Wh"])
        self.Wh_T, self.Wh_n, self.bhn = Wh.T, Wh[self.block["n"]], v.get("bhn")
        if self.after:
            self.through_Wh = TransposedProduct(Wh, problem)
        self.slopes: Array = np.empty((3 * H, B), dtype)  # the derivatives of the gates' activations
        self.dy: Array = np.empty((3 * H, B), dtype)  # the gradient of the gates
        self.dy_r, self.dy_z, self.dy_n = (self.dy[self.block[gate]] for gate in "rzn")
        self.direct: Array = np.empty((H, B), dtype)  # the part of the gradient of h_prev that bypasses the product
        self.scratch: Array = np.empty((H, B), dtype)
        columns = chunk_steps(problem) * B
        self.dz: Array = columns_buffer(3 * H, columns, B, dtype)
        self.dz_n: Array = columns_buffer(H, columns, B, dtype) if self.after else self.dz[self.block["n"]]
        self.inner: Array = columns_buffer(H, columns, B, dtype)
        self.by_column: list[Array] = [self.dz, self.dz_n, self.inner]

    def begin_chunk(self, start: int, h_prev: Array, h_in: Array) -> None:
        """Set the states before the steps of a chunk that begins at step `start`: h_prev [steps, B, H], and h_in
        [steps * B, H], which is h_prev times the mask. If the reset comes after the candidate's product, compute this
        product, q = Wh_n h_in + bhn, for all steps of the chunk."""
        self.start, self.h_prev, self.h_in = start, h_prev, h_in
        if self.after:
            q = np.matmul(self.Wh_n, matrix(h_in).T, out=self.inner[:, : len(h_in)])
            if self.bhn is not None:
                q += self.bhn[:, None]

    def __call__(
        self,
        t: int,
        columns: slice,
        _c_prev: Array | None,
        _c: Array | None,
        dh: Array,
        _dc: Array,
        dgates: Array | None,
    ) -> None:
        """Compute step t backward: write its columns of dz, and `direct`, the part of the gradient of h_prev that
        bypasses the product. Overwrite dh [H, B], the gradient of the new h, with the gradient of the h in the
        recurrent product.

        dgates [3H, B]: the cotangent of the gates, or None.
        """
        gates, block, h_prev = self.gates_at(t), self.block, self.h_prev[t - self.start].T
        r, z, n = gates[block["r"]], gates[block["z"]], gates[block["n"]]
        slopes = self.slopes
        np.multiply(gates, gates, out=slopes)
        for _, _, slope, rows in self.runs:
            slope(gates[rows], slopes[rows])
        # Propagate the gradient of h = new + z (old - new) to z, n and h_prev. Here old is h_prev, and new is the
        # candidate n. With `flip` they are swapped, because then z is the factor of n.
        np.subtract(*((n, h_prev) if self.flip else (h_prev, n)), out=self.dy_z)
        self.dy_z *= dh
        to_old, to_new = (self.dy_n, self.direct) if self.flip else (self.direct, self.dy_n)
        np.multiply(dh, z, out=to_old)
        np.subtract(dh, to_old, out=to_new)
        if dgates is not None:
            for gate, dy in (("z", self.dy_z), ("n", self.dy_n)):
                dy += dgates[block[gate]]
        # Propagate the gradient of n to r and, with reset "before", to the h in the candidate's product.
        dz, dz_n, inner = self.dz[:, columns], self.dz_n[:, columns], self.inner[:, columns]
        np.multiply(self.dy_n, slopes[block["n"]], out=dz_n)
        if self.after:
            np.multiply(dz_n, inner, out=self.dy_r)
            np.multiply(dz_n, r, out=dz[block["n"]])
        else:
            h_in = self.h_in[columns].T
            reset = np.matmul(self.Wh_n.T, dz_n, out=self.scratch)
            np.multiply(reset, h_in, out=self.dy_r)
            np.multiply(r, h_in, out=inner)
            reset *= r
        if dgates is not None:
            self.dy_r += dgates[block["r"]]
        for rows in self.rz:
            np.multiply(self.dy[rows], slopes[rows], out=dz[rows])
        if self.after:
            self.through_Wh(dz, dh)
        else:
            dh[...] = self.scratch
            for rows in self.rz:
                dh += np.matmul(self.Wh_T[:, rows], dz[rows], out=self.scratch)

    def end_chunk(self, products: WeightGradients, h_in: Array) -> None:
        """Add the terms of one chunk of time steps to the weight gradients in `products`. h_in [n, H]: the h that
        entered the recurrent product at each step of the chunk."""
        n, rows = len(h_in), self.block["n"]
        dz, h_in = self.dz[:, :n], matrix(h_in)
        if self.after:
            products.accumulate("Wh", dz, h_in)
            if self.bhn is not None:
                products.accumulate("bhn", dz[rows], np.ones(n, dz.dtype))
            dz[rows] = self.dz_n[:, :n]
        else:
            for early in self.rz:
                products.accumulate("Wh", dz[early], h_in, early)
            products.accumulate("Wh", dz[rows], self.inner[:, :n].T, rows)
