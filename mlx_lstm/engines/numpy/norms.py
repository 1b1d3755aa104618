"""Layer normalisation in the steps of the engine `numpy`, forward and backward.

An array of a step has one column per batch item, [n, B]: n = G H numbers (G gates, H units), or n = H numbers of c. Its
rows are one block, or one block per gate. Each block is normalised by itself: y = (a - mean) r with
r = 1 / sqrt(variance + eps). The result is y times a scale plus a shift.
"""

from math import sqrt
from typing import Any

import numpy as np
from numpy import dot

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
        # A mean is a product with this row, because BLAS computes a product faster than NumPy a sum.
        self.row: Array = np.full((1, n // blocks), blocks / n, dtype)
        self.eps: Array = np.array(eps, dtype)
        self.scale: Array | None = None if scale is None else np.repeat(scale[:, None], B, axis=1)
        self.shift: Array | None = None if shift is None else np.repeat(shift[:, None], B, axis=1)
        self.mean, self.other_mean, self.spread = (np.empty((blocks, 1, B), dtype) for _ in range(3))
        self.scratch, self.scaled = (np.empty((n, B), dtype) for _ in range(2))

    def normalise(self, a: Array, y: Array) -> Any:
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

    def before(self, d: Array, y: Array, r: Any, out: Array) -> None:
        """Write to `out` the gradient of a. d [n, B]: the gradient of the result. y [n, B], r [blocks, 1, B]: what
        `normalise` made of a. `out` is another array than d and y.

        The gradient is r (d scale - mean(d scale) - y mean(d scale y)), with the means over a block.
        """
        shape, scaled = self.shape, self.scaled  # contiguous, unlike d: the operations below read it faster
        if self.scale is None:
            np.copyto(scaled, d)
        else:
            np.multiply(d, self.scale, scaled)
        np.multiply(scaled, y, self.scratch)
        ys, scratch = y.reshape(shape), self.scratch.reshape(shape)
        np.matmul(self.row, scratch, out=self.mean)
        np.matmul(self.row, scaled.reshape(shape), out=self.other_mean)
        np.multiply(ys, self.mean, scratch)
        np.add(scratch, self.other_mean, scratch)
        np.subtract(scaled, self.scratch, self.scratch)
        np.multiply(scratch, r, out.reshape(shape))


class OneColumn(Normalisation):
    """The layer normalisation of arrays [n, 1] in one block. Vector operations such as np.dot then take less time."""

    def normalise(self, a: Array, y: Array) -> Any:
        """Write to y [n, 1] the array a with mean 0 and variance 1. Return r as a number. y may be a itself."""
        a, y = a[:, 0], y[:, 0]
        np.subtract(a, dot(self.row[0], a), y)
        r = 1 / sqrt(dot(y, y) / len(y) + self.eps)
        np.multiply(y, r, y)
        return r

    def before(self, d: Array, y: Array, r: Any, out: Array) -> None:
        """Write to `out` the gradient of a, as `Normalisation.before` does. r: a number."""
        row, scratch = self.row[0], self.scratch[:, 0]
        scaled = d if self.scale is None else np.multiply(d, self.scale, self.scaled)
        d, y = scaled[:, 0], y[:, 0]
        np.multiply(d, y, scratch)
        np.multiply(y, dot(row, scratch), scratch)
        np.add(scratch, dot(row, d), scratch)
        np.subtract(scaled, self.scratch, out)
        np.multiply(out, r, out)


def normalisation_of(
    sizes: tuple[int, int, int], eps: float, dtype: np.dtype, scale: Array | None, shift: Array | None
) -> Normalisation:
    """Return a `Normalisation` with these arguments, of the class that takes the least time."""
    kind = OneColumn if sizes[0] == sizes[2] == 1 else Normalisation
    return kind(sizes, eps, dtype, scale, shift)


class NormOfC:
    """The layer normalisation of c. It sums the gradients of its scale and shift over the steps."""

    def __init__(self, problem: Problem, v: Views):
        """Allocate the memory for arrays [H, B]. v: the arrays of the call."""
        (_, B, H, _, cell), dtype = problem[:5], v["x"].dtype
        assert cell.norm is not None
        arrays = v.get("norm_c_scale"), v.get("norm_c_shift")
        self.norm: Normalisation = normalisation_of((1, H, B), cell.norm.eps, dtype, *arrays)
        self.y, self.scratch = (np.empty((H, B), dtype) for _ in range(2))
        self.dscale, self.dshift = (np.zeros((H, B), dtype) for _ in range(2))

    def __call__(self, c: Array, out: Array) -> None:
        """Write the normalised, scaled and shifted c [H, B] to `out`."""
        self.norm(c, out)

    def back(self, d: Array, c: Array, out: Array) -> None:
        """Write to `out` the gradient of c [H, B], from the gradient d of the result. Both are other arrays than c."""
        r = self.norm.normalise(c, self.y)
        self.norm.before(d, self.y, r, out)
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
    return normalisation_of((norm_blocks(cell), n, B), cell.norm.eps, dtype, v.get("norm_scale"), shift)


def norm_of_input(problem: Problem, v: Views, bias: Array | None) -> Normalisation:
    """Return the layer normalisation of the input's product, with the bias [G H], or None, as a part of its shift."""
    (_, B, H, _, cell), dtype = problem[:5], v["Wx"].dtype
    assert cell.norm is not None
    shift = v.get("norm_input_shift")
    shift = bias if shift is None else shift if bias is None else shift + bias
    sizes = (norm_blocks(cell), cell.gates * H, B)
    return normalisation_of(sizes, cell.norm.eps, dtype, v.get("norm_input_scale"), shift)


class InputNorm:
    """The layer normalisation of the input's product at many steps at once, with the bias as a part of its shift.

    Arrays [G H, n] have one column for each of n = steps x batch rows of x, and any memory order.
    """

    def __init__(self, problem: Problem, v: Views):
        """Prepare the weights and the shift of one direction."""
        cell, dtype, n = problem.cell, v["x"].dtype, problem.cell.gates * problem.H
        assert cell.norm is not None
        blocks = norm_blocks(cell)
        self.blocks: int = blocks
        self.row: Array = np.full((1, n // blocks), blocks / n, dtype)
        self.eps: Array = np.array(cell.norm.eps, dtype)
        self.scale: Array | None = v.get("norm_input_scale")
        shift, bias = v.get("norm_input_shift"), bias_of(problem, v)
        self.shift: Array | None = bias if shift is None else shift if bias is None else shift + bias
        self.Wx: Array | None = matrix(v["Wx"]) if "Wx" in v else None
        # With a mean of 0 over the rows of the weights the product has a mean of 0, too. For few rows of x it takes
        # less time to subtract the mean from the product.
        self.centred: bool = self.Wx is not None and self.Wx.shape[1] <= problem.T * problem.B
        if self.Wx is not None and self.centred:
            parts = self.Wx.reshape(blocks, n // blocks, -1)
            self.Wx = (parts - np.matmul(self.row, parts)).reshape(n, -1)

    def normalise(self, x: Array, y: Array) -> Array:
        """Write to y [G H, n] the normalised product of x [n, I]. Return r [blocks, 1, n]."""
        if self.Wx is None:
            y[...] = x.T
        else:
            np.matmul(self.Wx, matrix(x).T, out=y)
        parts = self.divided(y)
        if not self.centred:
            parts -= np.matmul(self.row, parts)
        r = np.einsum("kin,kin->kn", parts, parts)[:, None]
        r /= self.eps.dtype.type(parts.shape[1])
        r += self.eps
        np.sqrt(r, r)
        np.reciprocal(r, r)
        parts *= r
        return r

    def divided(self, a: Array) -> Array:
        """Return a view of a [G H, n], divided into the blocks that are normalised: [blocks, G H / blocks, n]."""
        return a.reshape(self.blocks, -1, a.shape[1])

    def __call__(self, x: Array, out: Array) -> None:
        """Write to `out` [G H, n] the normalised, scaled and shifted product of x [n, I]."""
        self.normalise(x, out)
        if self.scale is not None:
            out *= self.scale[:, None]
        if self.shift is not None:
            out += self.shift[:, None]

    def back(self, x: Array, d: Array, products: WeightGradients) -> None:
        """Turn d [G H, n], the gradient of the result for x [n, I], into that of the product before the norm. Add the
        terms of these rows to the gradients of scale and shift."""
        y = np.empty_like(d)
        r = self.normalise(x, y)
        if "norm_input_scale" in products.out:
            products.add("norm_input_scale", np.einsum("rn,rn->r", d, y))
        products.accumulate("norm_input_shift", d, np.ones(d.shape[1], d.dtype))
        if self.scale is not None:
            d *= self.scale[:, None]
        parts, ys = self.divided(d), self.divided(y)
        ys *= np.einsum("kin,kin->kn", parts, ys)[:, None] / self.eps.dtype.type(parts.shape[1])
        parts -= np.matmul(self.row, parts)
        parts -= ys
        parts *= r


class NormBackward:
    """The layer normalisation of the recurrent product or of the sum in the backward pass of one direction.

    The forward pass saves nothing for it: what was normalised is computed again, from one product for all steps of a
    chunk. `dp` [G H, n] collects the gradients of the recurrent product at the n = steps x batch columns of a chunk.
    """

    def __init__(self, problem: Problem, v: Views, norm: Normalisation, steps: int):
        """Allocate the memory for a chunk. steps: how many steps the largest chunk has."""
        (_, B, H, _, cell), dtype = problem[:5], v["x"].dtype
        self.norm, self.B = norm, B
        self.sums: bool = cell.norm is not None and cell.norm.of == "sum"
        rows = cell.gates * H
        self.dp: Array = columns_buffer(rows, steps * B, B, dtype)
        self.y: Array = np.empty((steps, rows, B), dtype)
        self.r: Any = np.empty((steps, norm.shape[0], 1, B), dtype)  # or a list of numbers
        self.weights: Array = matrix(v["Wh"])
        self.has_Wx: bool = self.sums and "Wx" in v
        if self.has_Wx:
            self.weights = np.concatenate([v["Wx"], v["Wh"]], axis=1)
        bias = bias_of(problem, v) if self.sums else None
        self.bias: Array | None = None if bias is None else bias[:, None]

    def begin_chunk(self, h_in: Array, x: Array | None) -> None:
        """Compute again what the forward pass normalised at each step of a chunk. h_in [n, P]: the h that enters the
        recurrent product, one row for each step and batch item. x: the same rows of the input; None if not needed."""
        operand = matrix(h_in) if x is None or not self.has_Wx else np.concatenate([x, h_in], axis=1)
        steps = len(operand) // self.B
        y = self.y[:steps]
        if self.B == 1:
            np.matmul(operand, self.weights.T, out=y[:, :, 0])
        else:
            np.matmul(self.weights, operand.reshape(steps, self.B, -1).transpose(0, 2, 1), out=y)
        if x is not None and not self.has_Wx:
            y += x.reshape(steps, self.B, -1).transpose(0, 2, 1)
        if self.bias is not None:
            y += self.bias
        if self.B == 1:  # a step is so short that one operation for all steps takes less time than one for each
            blocks, size, _ = self.norm.shape
            parts = y.reshape(steps, blocks, size)
            parts -= np.matmul(parts, self.norm.row.T)
            r = 1 / np.sqrt(np.einsum("tkn,tkn->tk", parts, parts) / parts.dtype.type(size) + self.norm.eps)
            parts *= r[..., None]
            self.r = r.ravel().tolist() if isinstance(self.norm, OneColumn) else r[..., None, None]
        else:
            for t in range(steps):
                self.r[t] = self.norm.normalise(y[t], y[t])

    def product(self, k: int, out: Array) -> None:
        """Write to `out` [H, n] the normalised, scaled and shifted product of gate k at all steps of the chunk."""
        norm, rows = self.norm, slice(k * len(out), (k + 1) * len(out))
        for t in range(out.shape[1] // self.B):
            result = self.y[t, rows]
            result = result if norm.scale is None else result * norm.scale[rows]
            out[:, t * self.B : (t + 1) * self.B] = result if norm.shift is None else result + norm.shift[rows]

    def through(self, dz: Array, columns: slice) -> Array:
        """Return the gradient of the recurrent product of one step, `columns` of `dp`. dz [G H, B]: the gradient of the
        norm's result."""
        dp, t = self.dp[:, columns], columns.start // self.B
        self.norm.before(dz, self.y[t], self.r[t], dp)
        return dp

    def end_chunk(self, products: WeightGradients, dz: Array) -> None:
        """Add the terms of a chunk to the gradients of scale and shift. dz [G H, n]: the gradient of the norm's result
        at all steps of the chunk."""
        rows, n = dz.shape
        if "norm_scale" in products.out:
            steps = n // self.B
            y = self.y[:steps].transpose(1, 0, 2)
            products.add("norm_scale", np.einsum("rtb,rtb->r", dz.reshape(rows, steps, self.B), y))
        products.accumulate("norm_shift", dz, np.ones(n, dz.dtype))
