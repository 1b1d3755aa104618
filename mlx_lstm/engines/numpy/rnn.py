"""The plain RNN cell of the engine `numpy`: one step forward and one step backward, in place.

The equations are those of `engines.ops.cells.rnn_step` and `rnn_step_backward`. Every array of a step is
feature-major, [H, B].
"""

import numpy as np

from ..cells import RNNCell
from ..problem import Problem
from .activations import InPlace, activation
from .arrays import Array, Views, chunk_steps, columns_buffer, matrix, steps_of
from .products import JoinedProduct, SeparateProducts, TransposedProduct, WeightGradients, in_blocks, input_products


class RNNStep:
    """Compute one forward step of a plain RNN: h = s(preactivation)."""

    def __init__(self, problem: Problem, cell: RNNCell, v: Views, mask: Array | None, streamed: bool = False):
        """Allocate the arrays that every step overwrites. streamed: the steps arrive one at a time
        (`engines.numpy.stream`)."""
        self.products: JoinedProduct | SeparateProducts = input_products(problem, v, mask, "", streamed)
        self.weights: Array = in_blocks(self.products.weights, problem.B, streamed)
        self.z: Array = np.empty((problem.H, problem.B), v["Wh"].dtype)
        self.product: Array = self.z.reshape(*self.weights.shape[:-1], -1)  # z, divided like the weights
        self.activate: InPlace = activation(cell.act)[0]

    def __call__(
        self,
        operand: Array,
        inputs: Array | None,
        _h_prev: Array,
        _c_prev: Array,
        gates: Array | None,
        _c: Array,
        h: Array,
    ) -> None:
        """Write the new h [H, B] and, unless `gates` is None, the preactivation [H, B] to `gates`.

        operand: the array that `weights` multiplies. inputs: the input's part of the preactivation; None if `weights`
        contains Wx, so that the product with `operand` includes this part.
        """
        z = self.z
        np.matmul(self.weights, operand, out=self.product)
        if inputs is not None:
            z += inputs
        if gates is not None:
            np.copyto(gates, z)
        self.activate(z, h)


class RNNStepBackward:
    """Compute one backward step of a plain RNN, and collect what the gradient of the recurrent weights needs.

    The steps run in chunks of time, with n = steps x B columns. `dz` [H, n] collects the gradient of the
    preactivations of a chunk.
    """

    direct: Array | None = None
    """The part of the gradient of h_prev that bypasses the recurrent product. A plain RNN has none."""

    def __init__(self, problem: Problem, cell: RNNCell, v: Views, saved: Views):
        """Allocate the arrays that every backward step overwrites. saved: outputs of the forward pass, among them h
        [T, B, H]."""
        (_, B, H, _), dtype = problem[:4], v["Wh"].dtype
        self.activation_slope: InPlace = activation(cell.act)[1]
        self.h_at = steps_of(saved["h"])
        self.through_Wh = TransposedProduct(v["Wh"], problem)
        self.slope: Array = np.empty((H, B), dtype)
        self.dz: Array = columns_buffer(H, chunk_steps(problem) * B, B, dtype)
        self.by_column: list[Array] = [self.dz]

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
        """Compute step t backward and write its columns of `dz`, the gradient of the preactivation. Overwrite dh [H,
        B], the gradient of the h after the step, with the gradient of the h that entered the recurrent product (the
        masked h before the step).

        columns: the columns of `dz` that belong to step t. dgates [H, B]: the cotangent of the preactivation, or None.
        """
        h, dz = self.h_at(t), self.dz[:, columns]
        np.multiply(h, h, out=self.slope)
        self.activation_slope(h, self.slope)
        np.multiply(dh, self.slope, out=dz)
        if dgates is not None:
            dz += dgates
        self.through_Wh(dz, dh)

    def end_chunk(self, products: WeightGradients, h_in: Array) -> None:
        """Add the term of one chunk of time steps to the gradient of Wh in `products`. h_in [n, H]: the h that
        entered the recurrent product at each step of the chunk."""
        products.accumulate("Wh", self.dz[:, : len(h_in)], matrix(h_in))
