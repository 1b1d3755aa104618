"""Layer normalisation in the steps of the engine `numpy`, forward and backward.

Every array of a step is feature-major, [n, B]: n = G H or H numbers for each of B batch items. It is divided into
blocks of rows, and each is normalised by itself: y = (a - mean) r with r = 1 / sqrt(variance + eps). The result is y
times a scale plus a shift.
"""

import numpy as np

from ..cells import norm_blocks
from ..problem import Problem
from .products import Array, Views, WeightGradients, bias_of, columns_buffer, matrix


class Normalisation:
    """The layer normalisation of arrays [n, B], with scratch memory for one step."""

    def __init__(
        self, sizes: tuple[int, int, int], eps: float, dtype: np.dtype, scale: Array | None, shift: Array | None
    ):
        """Allocate the memory. sizes: (blocks, n, B). scale, shift: [n], or None for 1 and 0."""
        blocks, n, B = sizes
        self.shape: tuple[int, int, int] = (blocks, n // blocks, B)
        # A mean is a product with this row, because BLAS computes it faster than NumPy a sum.
        self.row: Array = np.full((1, n // blocks), blocks / n, dtype)
        self.eps: Array = np.array(eps, dtype)
        self.scale: Array | None = None if scale is None else np.repeat(scale[:, None], B, axis=1)
        self.shift: Array | None = None if shift is None else np.repeat(shift[:, None], B, axis=1)
        self.mean, self.spread = (np.empty((blocks, 1, B), dtype) for _ in range(2))
        self.scratch: Array = np.empty((n, B), dtype)

    def normalise(self, a: Array, y: Array) -> Array:
        """Write to y [n, B] the array a, with mean 0 and variance 1 in each block. Return r [blocks, 1, B]. y may be a
        itself."""
        parts, out, scratch = a.reshape(self.shape), y.reshape(self.shape), self.scratch.reshape(self.shape)
        np.matmul(self.row, parts, out=self.mean)
        np.subtract(parts, self.mean, out)
        np.multiply(out, out, scratch)
        r = np.matmul(self.row, scratch, out=self.spread)
        np.add(r, self.eps, r)
        np.sqrt(r, r)
        np.reciprocal(r, r)
        np.multiply(out, r, out)
        return r

    def __call__(self, a: Array, out: Array) -> None:
        """Write the result for a [n, B] to `out`, which may be a itself."""
        self.normalise(a, out)
        if self.scale is not None:
            np.multiply(out, self.scale, out)
        if self.shift is not None:
            np.add(out, self.shift, out)

    def before(self, d: Array, y: Array, r: Array, out: Array) -> None:
        """Write to `out` the gradient of a. d [n, B]: the gradient of the result. y [n, B], r [blocks, 1, B]: what
        `normalise` made of a. `out` is another array than d and y."""
        shape, scratch = self.shape, self.scratch.reshape(self.shape)
        if self.scale is None:
            np.copyto(out, d)
        else:
            np.multiply(d, self.scale, out)
        outs, ys = out.reshape(shape), y.reshape(shape)
        np.multiply(outs, ys, scratch)
        np.matmul(self.row, scratch, out=self.mean)
        np.multiply(ys, self.mean, scratch)
        np.matmul(self.row, outs, out=self.mean)
        np.subtract(outs, scratch, outs)
        np.subtract(outs, self.mean, outs)
        np.multiply(outs, r, outs)


class NormOfC(Normalisation):
    """The layer normalisation of c. It sums the gradients of its scale and shift over the steps."""

    def __init__(self, problem: Problem, v: Views):
        """Allocate the memory for arrays [H, B]. v: the arrays of the call."""
        (_, B, H, _, cell), dtype = problem[:5], v["x"].dtype
        assert cell.norm is not None
        super().__init__((1, H, B), cell.norm.eps, dtype, v.get("norm_c_scale"), v.get("norm_c_shift"))
        self.y: Array = np.empty((H, B), dtype)
        self.dscale, self.dshift = (np.zeros((H, B), dtype) for _ in range(2))

    def back(self, d: Array, c: Array, out: Array) -> None:
        """Write to `out` the gradient of c [H, B], from the gradient d of the result. Both are other arrays than c."""
        r = self.normalise(c, self.y)
        self.before(d, self.y, r, out)
        self.dshift += d
        np.multiply(d, self.y, self.scratch)
        self.dscale += self.scratch

    def add_gradients(self, products: WeightGradients) -> None:
        """Add the gradients of scale and shift, summed over the batch, to those of the call."""
        for name, d in (("norm_c_scale", self.dscale), ("norm_c_shift", self.dshift)):
            if name in products.out:
                products.add(name, d.sum(axis=1))


def norm_of_preactivations(problem: Problem, v: Views) -> Normalisation | None:
    """Return the layer normalisation of the recurrent product, or of its sum with the input's part. Return None if the
    cell has none. An LSTM's forget bias is added after the norm: with the sum it is a part of the shift."""
    (_, B, H, _, cell), dtype = problem[:5], v["x"].dtype
    if cell.norm is None or cell.norm.of is None:
        return None
    shift, n = v.get("norm_shift"), cell.gates * H
    if cell.norm.of == "sum" and cell.forget_bias:
        shift = np.zeros(n, dtype) if shift is None else shift.copy()
        shift[cell.block("f", H)] += cell.forget_bias
    return Normalisation((norm_blocks(cell), n, B), cell.norm.eps, dtype, v.get("norm_scale"), shift)


def norm_of_input(problem: Problem, v: Views, bias: Array | None) -> Normalisation:
    """Return the layer normalisation of the input's product, with the bias [G H], or None, as a part of its shift."""
    (_, B, H, _, cell), dtype = problem[:5], v["Wx"].dtype
    assert cell.norm is not None
    shift = v.get("norm_input_shift")
    shift = bias if shift is None else shift if bias is None else shift + bias
    sizes = (norm_blocks(cell), cell.gates * H, B)
    return Normalisation(sizes, cell.norm.eps, dtype, v.get("norm_input_scale"), shift)


class NormBackward:
    """The layer normalisation of the recurrent product or of the sum in the backward pass of one direction.

    The forward pass saves nothing for it: y and r of all steps of a chunk are computed again, from one product. `dp`
    [G H, n] collects the gradients of the recurrent product at the n = steps x batch columns of a chunk.
    """

    def __init__(self, problem: Problem, v: Views, norm: Normalisation, columns: int):
        """Allocate the memory for a chunk. columns: how many columns the largest chunk has."""
        (_, B, H, _, cell), dtype = problem[:5], v["x"].dtype
        self.problem, self.v, self.norm, self.B = problem, v, norm, B
        self.sums: bool = cell.norm is not None and cell.norm.of == "sum"
        rows = cell.gates * H
        self.dp, self.y = (columns_buffer(rows, columns, B, dtype) for _ in range(2))
        blocks, size, _ = norm.shape
        self.row: Array = np.full((1, size), 1 / size, dtype)
        self.r: Array = np.empty((blocks, 1, columns), dtype)
        self.bias: Array | None = bias_of(problem, v) if self.sums else None

    def begin_chunk(self, h_in: Array, x: Array | None) -> None:
        """Compute y and r of a chunk. h_in [n, P]: the h that enters the recurrent product at each step and item. x [n,
        I]: the input there, if the sum is normalised."""
        n, v, (blocks, size, _) = len(h_in), self.v, self.norm.shape
        y = self.y[:, :n]
        np.matmul(matrix(v["Wh"]), matrix(h_in).T, out=y)
        if x is not None:
            y += x.T if "Wx" not in v else np.matmul(matrix(v["Wx"]), matrix(x).T)
            if self.bias is not None:
                y += self.bias[:, None]
        for k in range(blocks):
            part, r = y[k * size : (k + 1) * size], self.r[k, :, :n]
            part -= np.matmul(self.row, part)
            np.add(np.matmul(self.row, part * part), self.norm.eps, r)
            np.sqrt(r, r)
            np.reciprocal(r, r)
            part *= r

    def product(self, k: int, out: Array) -> None:
        """Write to `out` [H, n] the normalised, scaled and shifted product of gate k at all steps of the chunk."""
        norm, rows, columns = self.norm, slice(k * len(out), (k + 1) * len(out)), out.shape[1]
        np.copyto(out, self.y[rows, :columns])
        if norm.scale is not None:
            out *= norm.scale[rows, :1]
        if norm.shift is not None:
            out += norm.shift[rows, :1]

    def through(self, dz: Array, columns: slice) -> Array:
        """Return the gradient of the recurrent product of one step, `columns` of `dp`. dz [G H, B]: the gradient of the
        norm's result."""
        dp = self.dp[:, columns]
        self.norm.before(dz, self.y[:, columns], self.r[:, :, columns], dp)
        return dp

    def end_chunk(self, products: WeightGradients, dz: Array) -> None:
        """Add the terms of a chunk to the gradients of scale and shift. dz [G H, n]: the gradient of the norm's result
        at all steps of the chunk."""
        n = dz.shape[1]
        if "norm_scale" in products.out:
            products.add("norm_scale", np.einsum("ij,ij->i", dz, self.y[:, :n]))
        products.accumulate("norm_shift", dz, np.ones(n, dz.dtype))
