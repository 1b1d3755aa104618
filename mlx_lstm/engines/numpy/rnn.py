"""One time step of the plain RNN cell in NumPy, forward and backward, in place."""

import numpy as np

from ..cells import RNNCell
from ..problem import Problem
from .arrays import Array, Views
from .gates import activate, slope_from_square
from .memory import Steps, chunk_steps, columns_buffer, matrix, transposed
from .products import JoinedPreactivations, Preactivations, WeightGradients


class RNNStep:
    """`engines.ops.cells.rnn_step` in place."""

    def __init__(
        self, problem: Problem, cell: RNNCell, v: Views, preactivations: Preactivations | JoinedPreactivations
    ):
        self.preactivations, self.name = preactivations, cell.act

    def __call__(self, t: int, h_prev: Array, _c_prev: Array, gates: Array | None, _c: Array, h: Array) -> None:
        """From h_prev [H, B]: h [H, B] and, where it is kept, the preactivation."""
        z = self.preactivations.at(t, h_prev)
        if gates is not None:
            np.copyto(gates, z)
        activate(self.name, z, h)


class RNNStepBackward:
    """`engines.ops.cells.rnn_step_backward` in place: one step back, and what the weights' gradients need of it."""

    direct = None  # h reaches the next step through the recurrent product only

    def __init__(self, problem: Problem, cell: RNNCell, v: Views, saved: Views):
        """saved: h [T, B, H]."""
        (_, B, H, _), dtype = problem[:4], v["Wh"].dtype
        self.name, self.h_at, self.Wh_T = cell.act, Steps(saved["h"]), transposed(v["Wh"], problem)
        self.slope: Array = np.empty((H, B), dtype)
        self.dz: Array = columns_buffer(H, chunk_steps(problem) * B, B, dtype)
        self.by_column: list[Array] = [self.dz]

    def __call__(self, t: int, columns: slice, dh: Array, _dc: Array, dgates: Array | None) -> None:
        """Writes dz; turns dh, the gradient of h, into that of the h that entered the product."""
        h, dz = self.h_at.at(t), self.dz[:, columns]
        np.multiply(h, h, out=self.slope)
        slope_from_square(self.name, h, self.slope)
        np.multiply(dh, self.slope, out=dz)
        if dgates is not None:
            dz += dgates
        np.matmul(self.Wh_T, dz, out=dh)

    def finish(self, products: WeightGradients, h_in: Array) -> None:
        """After the steps of a chunk: the product of the recurrent weights. h_in [n, H]."""
        products.accumulate("Wh", self.dz[:, : len(h_in)], matrix(h_in))
