"""Layer normalisation in the steps of the engine `numpy`, forward and backward.

An array of a step has one column per batch item, [n, B]: n = G H numbers (G gates, H units), or n = H numbers of c. Its
rows are one block, or one block per gate. Each block of a column is normalised by itself: y = (a - mean) r with r = 1 /
sqrt(variance + eps). The result is y times a scale plus a shift; d is the gradient of this result. The forward pass
writes y and r to the memory `saved`, from which the backward pass reads them. An array of many steps has N columns, one
for each step and batch item. A chunk is a range of steps that the backward pass processes together.

`NormOptions.of` says what is normalised: "product": the recurrent product h Wh^T; "products": also the input's product
x Wx^T, by itself; "sum": the sum of both products and the bias. The scale and shift of the recurrent product or the sum
are the arrays `norm_scale`, `norm_shift`; those of the input's product `norm_input_...`; those of c `norm_c_...`. v
holds the arrays of the call by name; P is the width of h, I that of x, T the number of steps. `products` is an object
that sums the gradients of weights (`WeightGradients`); its `out` is the memory of the requested gradients. h_in: the h
that Wh multiplies. Wx is None if the caller passes the product x Wx^T as x. bhn [H]: the bias of the recurrent product
of a GRU's candidate, added after the norm.

There are two methods. `Normalisation` computes mean and variance of a product at each step. The method "by factors" is
faster for one block and many steps. It needs weights W whose columns have a mean of 0. Then the normalised product is W
(r u), where u is the vector that W multiplies, so only u is multiplied by r. `Factor` computes r from a small
triangular matrix instead of the product. `ProductNorm` is the backward pass of this method. Its W [GH, K] and columns u
[K, N] are Wh and h_in, or Wx and x. With D = d * scale, E = W^T D, m = mean(D y) and c = r^2 m, the gradient of u is
r E - c (W^T W u).

Most functions write their result into memory that was allocated before: an argument `out`, which is the last argument
of a NumPy function. A batch is wide from WIDE_BATCH (16) items on. A mean is computed as a product with `row`, a row of
equal numbers, because BLAS (the library that multiplies matrices) is faster than NumPy's sum. `centred`: the means are
0 already, because they were subtracted from the weights.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
from numpy import dot

from ..cells import NormOptions, norm_blocks
from ..problem import Problem
from .products import AHEAD_ROWS, WIDE_BATCH, Array, Views, WeightGradients, bias_of, columns_buffer, matrix


def norm_options(problem: Problem) -> NormOptions:
    """Return the options of the cell's layer normalisation, which it has wherever this function is called."""
    assert problem.cell.norm is not None
    return problem.cell.norm


class Tiles:
    """Repeats a row [1, B] 8 times, to combine it with a contiguous array [n, B] that is viewed as [n / 8, 8 B]:
    NumPy's loops are then fewer and longer. With several blocks, a row [blocks, 1, B] has one row for each, and the
    view is [blocks, n / 8, 8 B]."""

    def __init__(self, n: int, B: int, dtype: np.dtype, blocks: int = 1):
        """Allocate the memory of the repeated row, for arrays [n, B] per block."""
        # The row is not repeated if 8 does not divide n, or if B is 1: NumPy's loops are then long without it.
        times = 8 if n % 8 == 0 and B > 1 else 1
        self.shape: tuple[int, int, int] = (blocks, n // times, times * B)
        self.repeats: bool = times > 1
        self.wide: Array = np.empty((blocks, 1, times * B), dtype)
        self.rows: Array = self.wide.reshape(blocks, times, B)  # a view of the same memory

    def __call__(self, row: Array) -> Array:
        """Return the repeated row. It is valid until the next call."""
        if not self.repeats:
            return row
        np.copyto(self.rows, row)
        return self.wide


def to_factors(variance: Array, eps: Array) -> None:
    """Turn variances into the factors 1 / sqrt(variance + eps), in place."""
    np.add(variance, eps, variance)
    np.sqrt(variance, variance)
    np.reciprocal(variance, variance)


class Normalisation:
    """The layer normalisation of arrays [n, B], with scratch memory for one step.

    centred: whether the arrays have a mean of 0 in each block already, because the columns of the weights have a mean
    of 0 in each block, too (`with_centred_weights`). Then no means of the arrays and of the gradients are computed. The
    result of `before` lacks the subtraction of one number per block and column. This is corrected after all steps, when
    `centre_gradients` subtracts the means of the weight gradients.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        eps: float,
        dtype: np.dtype,
        scale: Array | None,
        shift: Array | None,
        centred: bool = False,
    ):
        """Allocate the memory. sizes: (blocks, n, B), for arrays [n, B] with so many blocks. scale, shift: [n]; None
        stands for a scale of 1 and a shift of 0."""
        blocks, n, B = sizes
        self.shape: tuple[int, int, int] = (blocks, n // blocks, B)
        self.centred: bool = centred
        # row, scaled_row: a product with them is the mean over a block of an array, or of the array times the scale.
        self.row: Array = np.full((1, n // blocks), blocks / n, dtype)
        self.scaled_row: Array = self.row
        if scale is not None:
            self.scaled_row = scale.reshape(blocks, 1, -1) * self.row if blocks > 1 else scale * self.row
        self.eps: Array = np.array(eps, dtype)
        # The scale and the shift are repeated to [n, B], so that no step needs a broadcast.
        self.scale: Array | None = None if scale is None else np.repeat(scale[:, None], B, axis=1)
        self.shift: Array | None = None if shift is None else np.repeat(shift[:, None], B, axis=1)
        # spread: memory for r if a call passes none, as in a forward pass without training.
        self.mean, self.other_mean, self.spread = (np.empty((blocks, 1, B), dtype) for _ in range(3))
        self.tiles: Tiles = Tiles(n // blocks, B, dtype, blocks)
        self.use_scratch(np.empty((n, B), dtype))

    def use_scratch(self, scratch: Array) -> None:
        """Use this array [n, B] as scratch memory. wide_scratch: its view as `Tiles` needs it."""
        self.scratch: Array = scratch
        self.wide_scratch: Array = scratch.reshape(self.tiles.shape)

    def means(self, row: Array, a: Array, out: Array) -> None:
        """Write to `out` [blocks, 1, B] the product of `row` with each block of a [n, B]. `dot` takes less time than
        `matmul`, but it computes a single block only."""
        if self.shape[0] == 1:
            dot(row, a, out=out[0])
        else:
            np.matmul(row, a.reshape(self.shape), out=out)

    def normalise(self, a: Array, y: Array, r: Array) -> None:
        """Write to y [n, B] the array a, normalised to mean 0 and variance 1 in each block, and to r [blocks, 1, B] the
        factors 1 / sqrt(variance + eps). y is contiguous; it may be a itself."""
        # parts, out: a and y as `Tiles` needs them. If a is not contiguous, such as some columns of c, parts is a copy.
        tiles, scratch = self.tiles, self.wide_scratch
        parts, out = a.reshape(tiles.shape), y.reshape(tiles.shape)
        if not self.centred:
            self.means(self.row, a, self.mean)
            parts = np.subtract(parts, tiles(self.mean), out)
        np.multiply(parts, parts, scratch)
        self.means(self.row, self.scratch, r)  # r is at first the variance: the mean of the squares
        to_factors(r, self.eps)
        np.multiply(parts, tiles(r), out)

    def __call__(self, a: Array, out: Array, saved: Array | None = None) -> None:
        """Normalise a [n, B], scale and shift it, and write the result to `out`, which may be a itself. saved [n +
        blocks, B]: memory for the normalised numbers y and their factors r, which `before` reads in the backward pass;
        None without a backward pass."""
        y, r = (out, self.spread) if saved is None else self.divided(saved)
        self.normalise(a, y, r)
        if self.scale is not None:
            np.multiply(y, self.scale, out)
        elif saved is not None and self.shift is None:  # y is in `saved`, and no operation below writes to `out`
            np.copyto(out, y)
        if self.shift is not None:
            np.add(y if self.scale is None else out, self.shift, out)

    def divided(self, saved: Array) -> tuple[Array, Array]:
        """Return y [n, B] and r [blocks, 1, B] as views of `saved` [n + blocks, B], the memory of one step."""
        n = len(self.scratch)
        return saved[:n], saved[n:, None]

    def before(self, d: Array, y: Array, r: Array, out: Array) -> None:
        """Write to `out` the gradient of a, the array before the normalisation, and add this step's terms to the sums
        dscale and dshift, the gradients of scale and shift. d [n, B]: the gradient of the scaled and shifted result. y
        [n, B], r [blocks, 1, B]: the results of `normalise` for a. `out` must not be d or y. `prepare_backward` must
        run once before.

        The gradient is r (d * scale - mean(d * scale) - y mean(d * scale * y)), with the means over a block. If
        `centred`, the term mean(d * scale) is left out: `centre_gradients` removes it from all gradients at the end.
        """
        # scratch [n, B] is at first d * y, later what is subtracted from d * scale: y mean(d * scale * y) +
        # mean(d * scale).
        tiles, shape, scratch = self.tiles, self.tiles.shape, self.wide_scratch
        dy = np.multiply(d, y, self.scratch)
        self.means(self.scaled_row, dy, self.mean)  # mean(d * scale * y)
        for total, terms in ((self.dscale, dy), (self.dshift, d)):
            if total is not None:
                np.add(total, terms, total)
        np.multiply(y.reshape(shape), tiles(self.mean), scratch)
        if not self.centred:
            self.means(self.scaled_row, d, self.other_mean)  # mean(d * scale)
            np.add(scratch, tiles(self.other_mean), scratch)
        scaled = d if self.scale is None else np.multiply(d, self.scale, self.scaled)
        np.subtract(scaled, self.scratch, self.scratch)
        if out.flags.c_contiguous:
            np.multiply(scratch, tiles(r), out.reshape(shape))
        else:  # `out` is some columns of the array of a chunk
            np.multiply(self.scratch.reshape(self.shape), r, out.reshape(self.shape))

    def prepare_backward(self, scaled: Array, scale: bool, shift: bool) -> None:
        """Prepare calls of `before`. scaled [n, B]: memory for d times the scale; it may be d itself, which `before`
        then overwrites. scale, shift: whether their gradients are wanted."""
        self.scaled = scaled
        # The sums are [n, B]: summing over the batch at every step would take longer. `add_gradients` does it at the
        # end.
        self.dscale, self.dshift = (np.zeros_like(scaled) if wanted else None for wanted in (scale, shift))

    def add_gradients(self, products: WeightGradients, scale: str, shift: str) -> None:
        """Add the gradients of the scale and the shift, summed over the batch, to those that `products` collects.
        scale, shift: the names of these two arrays in the call."""
        for name, d in ((scale, self.dscale), (shift, self.dshift)):
            if d is not None and name in products.out:
                products.add(name, d.sum(axis=1))


class OneColumn(Normalisation):
    """The layer normalisation of arrays [n, 1] in one block, for B = 1. It uses operations on vectors such as np.dot,
    which take less time."""

    def normalise(self, a: Array, y: Array, r: Array) -> None:
        """Do the same as `Normalisation.normalise` for a, y [n, 1] and r [1, 1, 1]."""
        a, y = a[:, 0], y[:, 0]
        if not self.centred:
            a = np.subtract(a, dot(self.row[0], a), y)
        factor = 1 / sqrt(dot(a, a) / len(a) + self.eps)
        r[0, 0, 0] = factor
        np.multiply(a, factor, y)

    def before(self, d: Array, y: Array, r: Array, out: Array) -> None:
        """Do the same as `Normalisation.before` for d, y, out [n, 1] and r [1, 1, 1]."""
        # scratch is at first d * y, later what is subtracted from d * scale: y mean(d * scale * y) +
        # mean(d * scale).
        row, scratch, y = self.scaled_row[0], self.scratch[:, 0], y[:, 0]
        dy = np.multiply(d[:, 0], y, scratch)
        mean = dot(row, dy)  # mean(d * scale * y)
        if self.dscale is not None:
            self.dscale += self.scratch
        if self.dshift is not None:
            self.dshift += d
        np.multiply(y, mean, scratch)
        if not self.centred:
            np.add(scratch, dot(row, d[:, 0]), scratch)  # mean(d * scale)
        scaled = d if self.scale is None else np.multiply(d, self.scale, self.scaled)
        np.subtract(scaled, self.scratch, self.scratch)
        np.multiply(self.scratch, r.item(), out)


def kind_for(sizes: tuple[int, int, int]) -> type[Normalisation]:
    """Return the class that normalises arrays of these sizes in the least time: (blocks that are normalised each by
    itself, n rows, B batch items)."""
    blocks, _, B = sizes
    return OneColumn if blocks == B == 1 else Normalisation


class NormOfC:
    """The layer normalisation of c. In the backward pass it sums the gradients of its scale and shift."""

    def __init__(self, problem: Problem, v: Views):
        """Allocate the memory for arrays [H, B]."""
        (_, B, H, _, _), dtype = problem[:5], v["x"].dtype
        arrays = v.get("norm_c_scale"), v.get("norm_c_shift")
        sizes = (1, H, B)  # (blocks, n, B)
        self.norm: Normalisation = kind_for(sizes)(sizes, norm_options(problem).eps, dtype, *arrays)
        self.saved: Array = np.empty((H + 1, B), dtype)
        self.is_current: bool = False  # whether `saved` belongs to the current step, which first sets this to False
        self.norm.prepare_backward(scaled=np.empty((H, B), dtype), scale=True, shift=True)

    def __call__(self, c: Array, out: Array) -> None:
        """Write the normalised, scaled and shifted c [H, B] to `out`."""
        self.norm(c, out, self.saved)
        self.is_current = True

    def back(self, d: Array, c: Array, out: Array) -> None:
        """Write to `out` [H, B] the gradient of c from d, the gradient of the norm's result. `out` and d must not be c
        itself."""
        y, r = self.norm.divided(self.saved)
        # With `Norm(c="state")` the forward pass saved the norm's result, so the backward step has not called the norm.
        if not self.is_current:
            self.norm.normalise(c, y, r)
        self.norm.before(d, y, r, out)

    def add_gradients(self, products: WeightGradients) -> None:
        self.norm.add_gradients(products, "norm_c_scale", "norm_c_shift")


def centred(blocks: int, array: Array) -> Array:
    """Return weights or a bias [n, .], minus the mean over the rows of each block."""
    parts = array.reshape(blocks, len(array) // blocks, -1)
    row = np.full((1, parts.shape[1]), 1 / parts.shape[1], array.dtype)
    return (parts - np.matmul(row, parts)).reshape(array.shape)


CENTRED = {"product": ("Wh",), "products": ("Wh", "Wx"), "sum": ("Wh", "Wx", "b")}
"""{value of `NormOptions.of`: the weights and bias that the normalised product or sum contains}. Their means may be
subtracted before the steps (`centres`)."""


def centres(problem: Problem, v: Views) -> bool:
    """Return whether the means over the rows of each block are subtracted from the weights of a call. The products then
    have a mean of 0, too, so that no step need subtract a mean.

    This is faster if there are at least as many rows (steps x batch) as columns in the weights. It is impossible if the
    sum is normalised and the caller passes x Wx^T as x, whose mean is not 0.
    """
    norm = norm_options(problem)
    return (
        norm.of is not None
        and (norm.of != "sum" or "Wx" in v)
        and max([v[name].shape[1] for name in ("Wh", "Wx") if name in v]) <= problem.T * problem.B
    )


def of_stream(problem: Problem) -> Problem:
    """Return the problem of a single step as that of a stream. `centres` decides by the number of steps whether centred
    weights (minus their mean, so that no step subtracts a mean) save time. A stream has many steps in all, so it gets P
    as the number of steps, which is enough."""
    return problem._replace(T=problem.P)


def with_centred_weights(problem: Problem, v: Views, by_factors: bool = False) -> Views:
    """Return the arrays of a call, with the weights and bias of CENTRED centred if `centres` says that this is faster.
    by_factors: whether the class `NormByFactors` computes the norms; it needs centred weights in any case."""
    norm = norm_options(problem)
    if norm.of is None or not (by_factors or centres(problem, v)):
        return v
    return v | {name: centred(norm_blocks(problem.cell), v[name]) for name in CENTRED[norm.of] if name in v}


FACTOR_ROWS = 4
"""The smallest number of rows (steps x batch) per column of a weight for which norms are computed by factors
(`Factor`). For fewer rows the square matrices of this method would cost more time than they save."""

FACTOR_TYPES = (np.float32,)
"""The dtypes of calls whose norms may be computed by factors. The triangular matrix of `Factor` is computed in float64,
which is precise enough for float32 only."""


def saved_rows(problem: Problem, v: Views) -> int:
    """Return how many numbers of the norms the forward pass saves for each step and batch item. This number also says
    by which method the norms are computed (`by_factors`).

    0: no product is normalised. 1 or 2: the method by factors (`ProductNorm`), which saves only r = 1 / sqrt(variance +
    eps) of the recurrent product, and with 2 that of the input's product. More: the normalised numbers y and the
    factors r of the recurrent product or of its sum with the input's part.
    """
    norm, (T, B, H, P), cell = norm_options(problem), problem[:4], problem.cell
    rows, blocks = cell.gates * H, norm_blocks(cell)
    if norm.of is None:
        return 0
    # The method by factors needs a square matrix as wide as h. It pays if the product with this matrix costs at most
    # half of the recurrent product, and there are at least FACTOR_ROWS rows (steps x batch) per column. With lengths
    # the matrix would be computed for each segment. A call with T = 1 returns each weight gradient as two factors,
    # which `ProductNorm` does not compute.
    pays = rows >= 2 * P and FACTOR_ROWS * P <= T * B and T > 1
    pays = pays and v["x"].dtype in FACTOR_TYPES and "lengths" not in v
    # With this method the norm's shift becomes a part of the bias, which belongs to the input's part. That would be
    # wrong for a user's cell that reads the input's part and the recurrent part as two values (`apart`).
    if norm.of == "sum" or blocks > 1 or not pays or (cell.op == "pointwise" and cell.apart and "norm_shift" in v):
        return rows + blocks
    # width: the size of the square matrix of the input's product; without this product the condition below is false.
    width = v["Wx"].shape[1] if norm.of == "products" and "Wx" in v else rows
    return 2 if 2 * width <= rows and FACTOR_ROWS * width <= T * B else 1


def by_factors(problem: Problem, rows: int) -> bool:
    """Return whether the norms are computed by factors (see the head of this module). rows: what `saved_rows`
    returned."""
    return 0 < rows < problem.cell.gates * problem.H + norm_blocks(problem.cell)


def centre_gradients(problem: Problem, out: Views) -> None:
    """Subtract from the gradients of weights and bias in `out` their means over the rows of each block, which the steps
    have left out if the weights were centred. The true gradients have a mean of 0, because a norm subtracts the
    mean."""
    norm, blocks = norm_options(problem), norm_blocks(problem.cell)
    for name in CENTRED[norm.of] if norm.of is not None else ():
        if name in out:
            out[name][...] = centred(blocks, out[name])


def norm_of_preactivations(problem: Problem, v: Views) -> Normalisation | None:
    """Return the layer normalisation of the recurrent product or of its sum with the input's part, or None if only c is
    normalised. An LSTM's forget bias is added after the norm; if the sum is normalised, it becomes a part of the
    shift."""
    (_, B, H, _, cell), dtype, norm = problem[:5], v["x"].dtype, norm_options(problem)
    if norm.of is None:
        return None
    shift, n = v.get("norm_shift"), cell.gates * H
    if norm.of == "sum" and cell.forget_bias:
        shift = np.zeros(n, dtype) if shift is None else shift.copy()
        shift[cell.block("f", H)] += cell.forget_bias
    sizes = (norm_blocks(cell), n, B)
    return kind_for(sizes)(sizes, norm.eps, dtype, v.get("norm_scale"), shift, centres(problem, v))


def shift_of_input(problem: Problem, v: Views) -> Array | None:
    """Return the shift of the norm of the input's product [G H], with the bias as a part of it; None without both."""
    shift, bias = v.get("norm_input_shift"), bias_of(problem, v)
    return bias if shift is None else shift if bias is None else shift + bias


def norm_of_input(problem: Problem, v: Views) -> Normalisation:
    """Return the layer normalisation of the input's product at one step, with the bias as a part of its shift. v: the
    arrays of the call, from `with_centred_weights`."""
    (_, B, H, _, cell), dtype = problem[:5], v["Wh"].dtype
    scale, shift = v.get("norm_input_scale"), shift_of_input(problem, v)
    sizes = (norm_blocks(cell), cell.gates * H, B)
    is_centred = "Wx" in v and centres(problem, v)  # whether the products have a mean of 0 already
    return kind_for(sizes)(sizes, norm_options(problem).eps, dtype, scale, shift, is_centred)


class InputNormOfSteps:
    """The layer normalisation of the input's product, one step at a time, with the bias as a part of its shift. It is
    used for a wide batch: the arrays of a step are then so large that NumPy's overhead at each step matters little."""

    def __init__(self, problem: Problem, v: Views):
        """Allocate the memory for arrays [G H, B]. v: the arrays of the call, from `with_centred_weights`."""
        self.Wx: Array | None = matrix(v["Wx"]) if "Wx" in v else None
        self.norm: Normalisation = norm_of_input(problem, v)
        rows, dtype = problem.cell.gates * problem.H, v["x"].dtype
        # y: the product, overwritten by the result. r: the factors, for the backward pass.
        self.y: Array = np.empty((rows, problem.B), dtype)
        self.r: Array = np.empty((self.norm.shape[0], 1, problem.B), dtype)
        # ahead: the products of some steps, about AHEAD_ROWS columns. The backward pass computes them at once, so that
        # the CPU's cache need not hold Wx at every step.
        self.ahead: Array = np.empty((min(problem.T, max(1, AHEAD_ROWS // problem.B)), *self.y.shape), dtype)
        self.d: Array = np.empty((rows, problem.B), dtype)  # in the backward pass the gradient of the norm's result
        # The bias is a part of the shift, so both have the same gradient.
        has_shift = bool({"norm_input_shift", "b"} & v.keys())
        self.norm.prepare_backward(scaled=self.d, scale="norm_input_scale" in v, shift=has_shift)

    def __call__(self, x: Array) -> Array:
        """Return the normalised, scaled and shifted product of x [B, I]. It is valid until the next call."""
        self.products(x[None], self.y[None])  # None: an axis of one step
        self.norm(self.y, self.y)
        return self.y

    def products(self, x: Array, out: Array) -> None:
        """Write to `out` [steps, G H, B] the products of Wx and the input x [steps, B, I] of some steps."""
        if self.Wx is None:  # the caller passes the product as x
            np.copyto(out, x.transpose(0, 2, 1))
        else:
            np.matmul(self.Wx, matrix(x).transpose(0, 2, 1), out=out)

    def begin_chunk(self, x: Array) -> None:
        """Begin a chunk of the backward pass. x [steps * B, I]: the input of its steps."""
        self.x: Array = x.reshape(-1, self.y.shape[1], x.shape[1])  # [steps, B, I]
        self.group: int = -1  # the number of the group of steps whose products `ahead` holds; -1: none yet

    def back(self, k: int, out: Array) -> None:
        """Write to `out` [G H, B] the gradient of the input's product at step k of the chunk. The caller has written
        the gradient of the norm's result to `self.d`."""
        steps = len(self.ahead)  # the number of steps in a group
        group, n = divmod(k, steps)  # step k is number n of this group
        if group != self.group:
            x = self.x[group * steps : (group + 1) * steps]
            self.products(x, self.ahead[: len(x)])
            self.group = group
        y = self.ahead[n]  # the product, which the next line normalises in place
        self.norm.normalise(y, y, self.r)
        self.norm.before(self.d, y, self.r, out)

    def add_gradients(self, products: WeightGradients) -> None:
        self.norm.add_gradients(products, "norm_input_scale", "norm_input_shift")
        if self.norm.dshift is not None and "b" in products.out:  # b is a part of the shift: the same gradient
            products.add("b", self.norm.dshift.sum(axis=1))


def input_norm_of(problem: Problem, v: Views) -> "InputNormOfSteps | InputNorm | None":
    """Return the layer normalisation of the input's product, or None if it is not normalised by itself. v: the arrays
    of the call, from `with_centred_weights`."""
    if norm_options(problem).of != "products":
        return None
    return InputNormOfSteps(problem, v) if problem.B >= WIDE_BATCH else InputNorm(problem, v)


class InputNorm:
    """The layer normalisation of the input's product at many steps at once, with the bias as a part of its shift.
    Arrays [G H, N] have any memory order. r [blocks, 1, N]."""

    def __init__(self, problem: Problem, v: Views):
        """Prepare the weights and the shift. v: the arrays of the call, from `with_centred_weights`."""
        dtype, n, blocks = v["x"].dtype, problem.cell.gates * problem.H, norm_blocks(problem.cell)
        self.blocks: int = blocks
        self.row: Array = np.full((1, n // blocks), blocks / n, dtype)
        self.eps: Array = np.array(norm_options(problem).eps, dtype)
        self.scale: Array | None = v.get("norm_input_scale")
        self.shift: Array | None = shift_of_input(problem, v)
        self.Wx: Array | None = matrix(v["Wx"]) if "Wx" in v else None
        self.centred: bool = self.Wx is not None and centres(problem, v)

    def normalise(self, x: Array, y: Array) -> Array:
        """Write to y [G H, N] the normalised product of x [N, I] and Wx. Return the factors r."""
        if self.Wx is None:  # the caller passes the product as x
            y[...] = x.T
        else:
            np.matmul(self.Wx, matrix(x).T, out=y)
        parts = self.divided(y)  # a view, so the statements below change y
        if not self.centred:
            parts -= np.matmul(self.row, parts)
        # r is at first the variance: the sum of squares over the rows i of each block k, divided by the number of rows.
        r = np.einsum("kin,kin->kn", parts, parts)[:, None]
        r /= parts.shape[1]
        to_factors(r, self.eps)
        parts *= r
        return r

    def divided(self, a: Array) -> Array:
        """Return a view of a [G H, N] by block: [blocks, G H / blocks, N]."""
        return a.reshape(self.blocks, -1, a.shape[1])

    def __call__(self, x: Array, out: Array) -> None:
        """Write to `out` [G H, N] the normalised, scaled and shifted product of x [N, I]."""
        self.normalise(x, out)
        if self.scale is not None:
            out *= self.scale[:, None]
        if self.shift is not None:
            out += self.shift[:, None]

    def back(self, x: Array, d: Array, products: WeightGradients) -> None:
        """Turn d [G H, N], the gradient of the norm's result for the rows x [N, I], into the gradient of the product,
        in place. Add the terms of these rows to the gradients of scale and shift; the caller computes that of the bias.
        With D = d * scale and means over a block, the gradient of the product is r (D - mean(D) - y mean(D y))."""
        y = np.empty_like(d)
        r = self.normalise(x, y)
        if "norm_input_scale" in products.out:
            products.add("norm_input_scale", np.einsum("rn,rn->r", d, y))
        products.accumulate("norm_input_shift", d, np.ones(d.shape[1], d.dtype))  # d times ones: the sum of its columns
        if self.scale is not None:
            d *= self.scale[:, None]
        # Views of d and y by block: `parts` becomes the result, and `ys` becomes y mean(D y).
        parts, ys = self.divided(d), self.divided(y)
        ys *= np.einsum("kin,kin->kn", parts, ys)[:, None] / parts.shape[1]
        parts -= np.matmul(self.row, parts)
        parts -= ys
        parts *= r


SMALLEST = 1e-30
"""A number that is added to the diagonal of W^T W, so that the matrix has a Cholesky factor even if W is 0."""


class Factor:
    """Computes the factor r = 1 / sqrt(variance + eps) of the layer normalisation of a product W u in one block,
    without computing the product. The weights W [n, K] have a mean of 0 over their rows, so the normalised product is r
    W u = W (r u).

    The variance is |W u|^2 / n = |R u|^2 with the triangular matrix R [K, K] for which R^T R = W^T W / n. |R u|^2 is as
    precise as |W u|^2, while u (W^T W u) would have only half as many correct digits.
    """

    def __init__(self, W: Array, eps: float, B: int = 1):
        """Compute the triangular matrix R from the weights W [n, K]. B: the number of columns of u, the array that W
        multiplies, in a call of this object."""
        wide = W.astype(np.float64)
        square = wide.T @ wide  # W^T W
        # The Cholesky factor exists only if rounding does not make the matrix indefinite. `error` bounds the rounding
        # errors of the matrix and of its factor in float64. Four times this bound and SMALLEST are added to the
        # diagonal. This is far less than the rounding of W itself, which is float32.
        error = np.finfo(np.float64).eps * sum(W.shape) * np.trace(square)
        square[np.diag_indices_from(square)] += 4 * error + SMALLEST
        try:
            self.R: Array = np.ascontiguousarray(np.linalg.cholesky(square).T / np.sqrt(len(W)), W.dtype)
        except np.linalg.LinAlgError:  # infinity or NaN among the weights
            self.R = np.full_like(square, np.nan, W.dtype)
        self.eps: float = eps
        self.wide_eps: Array = np.array(eps, W.dtype)  # as an array of the dtype of W, for NumPy's functions
        self.row: Array = np.ones((1, len(square)), W.dtype)  # a product with this row sums over K
        self.scratch: Array = np.empty((len(square), B), W.dtype)
        self.tiles: Tiles = Tiles(len(square), B, W.dtype)  # repeats r, so that NumPy multiplies u by r in longer loops

    def __call__(self, u: Array, r: Array, out: Array) -> None:
        """Write the factors of the columns u [K, B] to r [1, B], and r u to `out`, which may be u itself."""
        if u.shape[1] == 1:
            a = dot(self.R, u[:, 0])
            r[0, 0] = factor = 1 / sqrt(dot(a, a) + self.eps)
            np.multiply(u, factor, out)
            return
        a = np.matmul(self.R, u, out=self.scratch)
        np.matmul(self.row, np.multiply(a, a, a), out=r)  # the variances
        to_factors(r, self.wide_eps)
        if u.flags.c_contiguous and out.flags.c_contiguous:
            shape = self.tiles.shape
            np.multiply(u.reshape(shape), self.tiles(r), out.reshape(shape))
        else:
            np.multiply(u, r, out)

    def of_rows(self, x: Array) -> Array:
        """Return r [T, B], the factor for each x [T, B, K]."""
        a = x.reshape(-1, x.shape[2]) @ self.R.T
        r = np.einsum("nk,nk->n", a, a)
        to_factors(r, self.wide_eps)
        return r.reshape(x.shape[:2])


class NormByFactors:
    """The forward pass of a call whose norms are computed by factors. The steps compute no norm: they read `arrays`,
    the arrays of the call with the scales as a part of the weights and the shifts as a part of the bias, and at each
    step `enter` multiplies h by its factor r = 1 / sqrt(variance + eps)."""

    def __init__(self, problem: Problem, v: Views, norms: Array | None, rows: int):
        """Prepare `arrays`. v: the arrays of the call, from `with_centred_weights`. norms [T, B, rows]: memory for the
        factors, or None without a backward pass. rows: the number of factors per step and item: 1 for h, and a second
        one if the input's product is normalised by factors, too."""
        (T, B, _, _, cell), eps, dtype = problem[:5], norm_options(problem).eps, v["x"].dtype
        self.of_h: Factor = Factor(v["Wh"], eps, B)
        # r: for each step the memory of its factors [1, B]: a view of `norms`, or the same memory for all steps.
        self.r: Any = [np.empty((1, B), dtype)] * T if norms is None else norms.transpose(0, 2, 1)[:, :1]
        # The norm's result is scale W (r u) + shift. So multiply the rows of the weights by the scale, and add the
        # shift to the bias.
        arrays = with_shift(v, "norm_shift", cell.block("n", problem.H) if cell.op == "gru" else None)
        if "norm_scale" in v:
            arrays["Wh"] = v["Wh"] * v["norm_scale"][:, None]
        if rows == 2:
            arrays = with_shift(arrays, "norm_input_shift")
            r = Factor(v["Wx"], eps).of_rows(v["x"])
            arrays["x"] = v["x"] * r[:, :, None]
            if "norm_input_scale" in v:
                arrays["Wx"] = v["Wx"] * v["norm_input_scale"][:, None]
            if norms is not None:
                norms[:, :, 1] = r
        self.arrays: Views = arrays

    def enter(self, t: int, h: Array, out: Array) -> None:
        """Write to `out` [P, B] the array that Wh multiplies at step t: h [P, B] times its factors."""
        self.of_h(h, self.r[t], out)


def with_shift(v: Views, name: str, candidate: slice | None = None) -> Views:
    """Return the arrays v with the shift `name` of a normalised product added to the bias b. candidate: for the
    recurrent product of a GRU, the rows of its candidate. Their shift is added to bhn instead, because the reset gate
    multiplies both."""
    v = dict(v)
    if name not in v:
        return v
    shift = v[name]
    if candidate is not None:
        v["bhn"] = v["bhn"] + shift[candidate] if "bhn" in v else shift[candidate]
        shift = shift.copy()
        shift[candidate] = 0
    v["b"] = v["b"] + shift if "b" in v else shift
    return v


class ProductNorm:
    """The backward pass of the layer normalisation of a product W u in one block, if `Factor` computed the forward
    pass. It does not compute the product.

    The weights W [GH, K] have a mean of 0 over their rows, so the normalised product is y = r W u. Let d be the
    gradient of the norm's result, D = d * scale, and E = W^T D. The gradient of the product is r (D - m y) minus its
    mean, with m = mean(D y). It is never computed, because every gradient needs only its product with W or u:

        m = r (u E) / GH, summed over K         du = r E - c (W^T W u)
        dW = scale A - W S                      dscale = the sum of A W over K
        A = d (r u)^T                           S = (c u) u^T
    """

    def __init__(self, W: Array, scale: Array | None):
        self.W: Array = W
        self.scale: Array | None = scale
        self.scaled: Array = W if scale is None else W * scale[:, None]  # E = scaled^T d
        self.square: Array = W.T @ W  # [K, K]
        # row: a product with this row sums over K and divides by GH.
        self.row: Array = np.full((1, W.shape[1]), 1 / len(W), W.dtype)
        # A = d (r u)^T and S = (c u) u^T, summed over all columns.
        self.A: Array = np.zeros((len(W), W.shape[1]), W.dtype)
        self.S: Array = np.zeros_like(self.square)

    def through(
        self, u: Array, square_u: Array, r: Array, E: Array, c: Array, scratch: Array, tiles: Tiles | None = None
    ) -> None:
        """Turn E = W^T D [K, N] into the gradient of u [K, N], r E - c (W^T W u), in place. Also write c [1, N], which
        is r^2 m with m = r (u E) / GH, where u E is summed over K. square_u [K, N]: W^T W u. r [1, N]: the factors.
        scratch [K, N]: memory that is overwritten. tiles: repeats rows for arrays that are all contiguous, or None."""
        np.matmul(self.row, np.multiply(u, E, scratch), out=c)  # m / r
        repeat, shape = (np.asarray, E.shape) if tiles is None else (tiles, tiles.shape)
        E, square_u, scratch = E.reshape(shape), square_u.reshape(shape), scratch.reshape(shape)
        np.multiply(E, repeat(r), E)
        c *= r * r * r  # c = r^2 m
        np.subtract(E, np.multiply(square_u, repeat(c), scratch), E)

    def through_column(self, u: Array, square_u: Array, r: Array, E: Array, c: Array, scratch: Array) -> None:
        """Do the same as `through` for one column, N = 1, in less time."""
        u, E, scratch, factor = u[:, 0], E[:, 0], scratch[:, 0], r.item()
        c[0, 0] = times = factor**3 / len(self.W) * float(dot(u, E))
        np.multiply(E, factor, E)
        np.subtract(E, np.multiply(square_u[:, 0], times, scratch), E)

    def add(self, d: Array, u: Array, r: Array, c: Array) -> None:
        """Add the terms of some columns to A and S. d [GH, N]: the gradient of the norm's result. u [N, K]: the rows
        that W multiplied. r [N, 1]: their factors. c [N, 1]: what `through` has written."""
        self.A += d @ (u * r)
        self.S += (u * c).T @ u

    def add_gradients(self, products: WeightGradients, weights: str, scale: str) -> None:
        """Add the gradients of W and of the scale to those that `products` collects. weights, scale: their names in the
        call."""
        if scale in products.out:
            products.add(scale, np.einsum("rk,rk->r", self.A, self.W))  # the sum of A W over K
        if weights in products.out:  # dW = scale A - W S
            scaled = self.A if self.scale is None else self.A * self.scale[:, None]
            products.add(weights, scaled - self.W @ self.S)


class RecurrentNorm:
    """The backward pass of the layer normalisation of the recurrent product, by factors: a `ProductNorm` with W = Wh
    and u = h_in, for one direction. N = steps x batch: the columns of a chunk."""

    def __init__(self, problem: Problem, v: Views, saved: Array, chunk: int):
        """Allocate the memory. saved [T, 1 or 2, B]: the factors r = 1 / sqrt(variance + eps) of the norm of the
        recurrent product, in the first row. chunk: the largest number of steps in a chunk."""
        (_, B, _, P), dtype = problem[:4], v["x"].dtype
        self.norm: ProductNorm = ProductNorm(matrix(v["Wh"]), v.get("norm_scale"))
        self.shift: Array | None = v.get("norm_shift")
        self.r: Array = saved[:, :1]  # [T, 1, B]
        self.h: Array = np.empty((chunk, P, B), dtype)  # h_in of each step of a chunk, feature-major
        self.c: Array = np.empty((1, chunk * B), dtype)  # c = r^2 m for each column of a chunk
        self.scratch: Array = np.empty((P, B), dtype)
        # through_step: the function that turns E = Wh^T D into the gradient of h_in at one step.
        by_columns = partial(self.norm.through, tiles=Tiles(P, B, dtype))
        self.through_step: Callable[..., None] = by_columns if B > 1 else self.norm.through_column

    def begin_chunk(self, start: int, h_in: Array) -> None:
        """Begin a chunk, whose first step is `start`: compute square_h = Wh^T Wh h_in, which the gradient of h_in
        needs. h_in [N, P]: the h that Wh multiplied."""
        P, B = self.h.shape[1:]
        self.start, self.steps = start, len(h_in) // B
        # square_h is [steps, P, B]. With one batch item the rows of h_in are the steps, so one product computes all of
        # them. With more items a product per step is needed, because the [P, B] of each step shall be contiguous.
        if B == 1:
            self.square_h: Array = (h_in @ self.norm.square)[:, :, None]
        np.copyto(self.h[: self.steps], h_in.reshape(-1, B, P).transpose(0, 2, 1))
        if B > 1:
            self.square_h = self.norm.square @ self.h[: self.steps]

    def product(self, k: int, out: Array, h_in: Array) -> None:
        """Write to `out` [H, N] the normalised, scaled and shifted product of gate number k. h_in [N, P]: the h that Wh
        multiplied."""
        rows = slice(k * len(out), (k + 1) * len(out))
        np.matmul(self.norm.scaled[rows], matrix(h_in).T, out=out)
        out *= self.r_of_chunk()
        if self.shift is not None:
            out += self.shift[rows, None]

    def r_of_chunk(self) -> Array:
        """Return the factors r [N] of the columns of the chunk."""
        return self.r[self.start : self.start + self.steps].reshape(-1)

    def through(self, t: int, columns: slice, dh: Array) -> None:
        """Turn `dh` [P, B] into the gradient of h_in at step t, in place. At first `dh` is (scale Wh)^T d, where d is
        the gradient of the norm's result. columns: the columns of this step in the chunk."""
        k = t - self.start  # the number of the step in the chunk
        self.through_step(self.h[k], self.square_h[k], self.r[t], dh, self.c[:, columns], self.scratch)

    def end_chunk(self, dz: Array, h_in: Array, products: WeightGradients) -> None:
        """Add the terms of a chunk to the gradients of Wh, scale and shift. dz [GH, N]: the gradients of the norm's
        results. h_in [N, P]: the h that Wh multiplied."""
        N = len(h_in)
        self.norm.add(dz, h_in, self.r_of_chunk()[:, None], self.c[0, :N, None])
        products.accumulate("norm_shift", dz, np.ones(N, dz.dtype))  # the product with ones is the sum over the columns

    def add_gradients(self, products: WeightGradients) -> None:
        self.norm.add_gradients(products, "Wh", "norm_scale")


class InputProductNorm:
    """The backward pass of the layer normalisation of the input's product, by factors: a `ProductNorm` with W = Wx and
    u = x. saved [T, 2, B]: the factors r = 1 / sqrt(variance + eps) of the norms of the recurrent product and of the
    input's product."""

    def __init__(self, v: Views, saved: Array):
        self.norm: ProductNorm = ProductNorm(matrix(v["Wx"]), v.get("norm_input_scale"))
        self.r: Array = saved[:, 1]

    def back(self, start: int, stop: int, x: Array, d: Array, products: WeightGradients) -> None:
        """Write the gradient of x for the steps from `start` to `stop`, and add the terms of these steps to the
        gradients of Wx, scale and shift. x [N, I]: the input of these steps. d [GH, N]: the gradient of the norm's
        result."""
        # E = (scale Wx)^T d [N, I], which `through` turns into the gradient of x. `through` takes columns: transposed
        # views.
        E, r, c = d.T @ self.norm.scaled, self.r[start:stop].reshape(1, -1), np.empty((1, len(x)), x.dtype)
        x = matrix(x)
        self.norm.through(x.T, self.norm.square @ x.T, r, E.T, c, np.empty_like(E).T)
        self.norm.add(d, x, r.T, c.T)
        products.add_input(start, stop, E)
        products.accumulate("norm_input_shift", d, np.ones(d.shape[1], d.dtype))  # the sum of d over its columns

    def add_gradients(self, products: WeightGradients) -> None:
        self.norm.add_gradients(products, "Wx", "norm_input_scale")


class NormBackward:
    """The backward pass of the layer normalisation of the recurrent product, or of its sum with the input's part, for
    one direction. A step writes the gradient of the norm's result to `d`. Then `through` computes the gradient of the
    recurrent product."""

    def __init__(
        self,
        problem: Problem,
        v: Views,
        norm: Normalisation,
        of_input: "InputNormOfSteps | InputNorm | None",
        other: Sequence[int],
        saved: Array,
        dz: Array,
    ):
        """Allocate the memory. norm: the norm of the recurrent product, or of its sum with the input's part. of_input:
        the norm of the input's product, or None. saved [T, G H + blocks, B]: the normalised numbers y and the factors r
        of each step. dz [G H, N]: memory for the gradients of the input's part at the steps of a chunk. other: the
        numbers of the gates whose input part and recurrent part have different gradients, such as a GRU's candidate."""
        (_, B, H, _, cell), dtype = problem[:5], v["x"].dtype
        self.norm, self.saved, self.dz, rows = norm, saved, dz, len(dz)
        # dp: the gradients of the recurrent product at the steps of a chunk; if the sum is normalised, also those of
        # the input's part. d: the gradient of the norm's result at one step.
        self.dp: Array = dz if norm_options(problem).of == "sum" else columns_buffer(rows, dz.shape[1], B, dtype)
        self.d: Array = np.zeros((rows, B), dtype)
        # of_input: the norm of the input's product, if each step computes it. Then `dz` gets the gradients of this
        # product.
        self.of_input: InputNormOfSteps | None = of_input if isinstance(of_input, InputNormOfSteps) else None
        # A GRU's bhn is added after the norm, like the shift, so the gradient of the shift contains that of bhn.
        has_shift = bool({"norm_shift", "bhn"} & v.keys())
        norm.prepare_backward(scaled=self.d, scale="norm_scale" in v, shift=has_shift)
        self.ended: Array | None = None  # the indices of the batch items that have ended before this step, or None
        if self.of_input is not None:
            self.of_input.norm.use_scratch(norm.scratch)  # so that the CPU's cache holds fewer arrays
        self.candidate: slice = cell.block("n", problem.H) if "bhn" in v else slice(0)  # the rows of a GRU's candidate
        # dx: the gradients of the input's part of the gates in `other`. self.other: for each of them its rows in `d`
        # and its part of `dx`. Only a step that computes the norm of the input's product uses both.
        self.dx: Array = np.empty((len(other) * H, B), dtype)
        self.other: list[tuple[slice, Array]] = [
            (slice(k * H, (k + 1) * H), self.dx[row * H : (row + 1) * H]) for row, k in enumerate(other)
        ]

    def product(self, k: int, out: Array, start: int) -> None:
        """Write to `out` [H, N] the normalised, scaled and shifted product of gate number k at the steps from `start`
        on, from the normalised numbers y that the forward pass saved. N = steps x batch."""
        norm, rows, B = self.norm, slice(k * len(out), (k + 1) * len(out)), self.saved.shape[2]
        for t in range(out.shape[1] // B):
            result = self.saved[start + t, rows]
            result = result if norm.scale is None else result * norm.scale[rows]
            out[:, t * B : (t + 1) * B] = result if norm.shift is None else result + norm.shift[rows]

    def through(self, t: int, columns: slice) -> Array:
        """Compute the gradient of the recurrent product at step t from `self.d`. Write it to `self.dp` and return it.
        Also write the gradient of the input's part to `self.dz`. columns: the columns of this step in the chunk."""
        dp = self.dp[:, columns]
        if self.ended is not None:  # set the gradients of items that have ended to 0, because they may be NaN
            self.d[:, self.ended] = self.dx[:, self.ended] = 0
        if self.of_input is not None:  # this step also computes the gradient of the input's product before its norm
            of_input = self.of_input
            np.copyto(of_input.d, self.d)
            for rows, dx in self.other:  # the gates whose input part and recurrent part have different gradients
                of_input.d[rows] = dx
            of_input.back(columns.start // self.d.shape[1], self.dz[:, columns])  # first the step's number in the chunk
        elif self.dz is not self.dp:
            np.copyto(self.dz[:, columns], self.d)
        self.norm.before(self.d, *self.norm.divided(self.saved[t]), dp)
        return dp

    def add_gradients(self, products: WeightGradients) -> None:
        """Sum the gradients of scale, shift and bhn over the batch. Add the sums to the gradients that `products`
        collects."""
        self.norm.add_gradients(products, "norm_scale", "norm_shift")
        # Usually `StepBackward.end_chunk` computes the gradient of bhn as the sum of `dz`. But if each step computes
        # the norm of the input's product, `dz` has other gradients. Then the sum of `d` is used, which is `dshift`.
        if self.of_input is not None and self.norm.dshift is not None and "bhn" in products.out:
            products.add("bhn", self.norm.dshift[self.candidate].sum(axis=1))
