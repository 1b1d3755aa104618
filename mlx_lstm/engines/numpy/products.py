"""The matrix products of the engine `numpy` that read arrays of the whole sequence, for one direction.

In the forward pass this is the product of the input x and Wx. `SeparateProducts` computes it for many steps at once,
before these steps run. `JoinedProduct` computes it in each step, in one product with Wh h. In the backward pass these
are the gradients of the weights (`WeightGradients`), each computed as one product over many steps.

T: steps, B: batch items, I: input features, H: hidden units, P: the width of h, G: gates, n: the number of rows of many
steps (steps x batch). v: the arrays of the call by name: x [T, B, I], Wx [G H, I], Wh [G H, P] and so on. Without Wx
the caller passes the product as x, [T, B, G H]. z: a preactivation, x Wx^T + b + h Wh^T; dz: its gradient. In a step
every array is feature-major, [rows, B], so that the weights are the left factor.

BLAS is the library that multiplies matrices. It reads a matrix whose rows or columns are contiguous, and uses several
threads for a large product. A stream runs steps that arrive one at a time. A batch is wide from WIDE_BATCH (16) items
on. A block is a range of steps whose inputs are multiplied or copied before these steps run.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..problem import Problem

Array = np.ndarray
Views = dict[str, Array]
"""The type of arrays by name."""

Order = tuple[int, int, int]
"""The type of an order of the three axes of a sequence: a permutation of 0, 1, 2."""

TIME_MAJOR, BATCH_MAJOR, FEATURE_MAJOR = (0, 1, 2), (1, 0, 2), (0, 2, 1)
"""The orders in which the axes of a sequence [T, B, .] may lie in memory: [T, B, .], [B, T, .] and [T, ., B]."""

CHUNK_ROWS = 1024
"""The largest number of rows (steps x batch) of one matrix product over time in the backward pass, except that a
product has at least one step. The limit keeps the scratch memory small."""

TRANSPOSED_NUMBERS = 2**18
"""The largest number of elements of a weight matrix that `transposed` copies. For a larger matrix the copy takes longer
than it saves."""

WIDE_BATCH = 16
"""The smallest size B of a wide batch. With a wide batch the rows of a step's array [4H, B] are so long that products
and elementwise operations are fast if the rows are contiguous."""


COPIED_NUMBERS = 2**20
"""The largest number of elements that the matrix [Wx Wh] of a `JoinedProduct` may have, except in a stream. For a
larger matrix the copy takes longer than it saves."""

AHEAD_ROWS = 256
"""For a wide batch: how many rows (steps x batch) of x are multiplied or copied at once, before their steps run. They
are so few that the results stay in the CPU's cache until the steps read them."""


QUIET_NUMBERS = 2**18
"""The largest number of multiplications in one product of a stream, whose steps arrive one at a time. For a larger
product OpenBLAS uses all its threads, which then spin for 0.1 s while they wait for more work."""

THREADED_NUMBERS = 2**20
"""The number of multiplications of a product in a stream above which all threads of BLAS compute it, because one thread
would take too long. A stream runs steps that arrive one at a time."""


def matrix(a: Array) -> Array:
    """Return `a` itself if one of its last two axes is contiguous, so that BLAS can read it. Otherwise return a
    contiguous copy, because NumPy would use a slow loop."""
    # rows, columns: the bytes from one row or column to the next. The distance must be at least a whole row or column:
    # BLAS cannot read rows or columns that overlap, as those of a broadcast array do.
    rows, columns = a.strides[-2:]
    size = a.itemsize
    fits = (columns == size and rows >= size * a.shape[-1]) or (rows == size and columns >= size * a.shape[-2])
    return a if fits else np.ascontiguousarray(a)


def transposed(weights: Array, problem: Problem) -> Array:
    """Return the transpose of `weights` [GH, P] for a product at every step (G gates, H hidden units, P the width of
    h). It is a contiguous copy, with which BLAS runs up to a tenth faster, if the batch is wide, the matrix is small,
    and T * B >= 2 P, so that the products save more time than the copy takes. Otherwise it is a view."""
    often = problem.B >= WIDE_BATCH and 2 * weights.shape[1] <= problem.T * problem.B
    return np.ascontiguousarray(weights.T) if often and weights.size <= TRANSPOSED_NUMBERS else matrix(weights).T


def chunk_steps(problem: Problem) -> int:
    """Return how many time steps the backward pass puts into one matrix product over time."""
    return min(problem.T, max(1, CHUNK_ROWS // problem.B))


def columns_buffer(rows: int, columns: int, B: int, dtype: np.dtype) -> Array:
    """Return scratch memory [rows, columns]. Each step uses B columns of it. For a wide batch the rows are contiguous,
    because a loop over B numbers is then fast. For a narrow batch the columns are contiguous, so that the B columns of
    a step are one block of memory."""
    if B >= WIDE_BATCH:
        # Allocate 16 more columns than are used. Otherwise the distance of two rows may be a power of two, and all rows
        # would use the same few sets of the CPU's cache.
        return np.empty((rows, columns + 16), dtype)[:, :columns]
    return np.empty((columns, rows), dtype).T


def input_products(
    problem: Problem, v: Views, copies_h: bool, negatable: str, streamed: bool = False
) -> "JoinedProduct | SeparateProducts":
    """Return an object that computes x Wx^T + h Wh^T at each step: a `JoinedProduct` or a `SeparateProducts`, the
    faster one. copies_h: whether the product reads another array than h itself, such as mask * h. negatable: the gates
    of which the step reads z only as exp(-z); a `JoinedProduct` negates their weights.

    A `JoinedProduct` copies both weights into one matrix when it is created. It is returned in two cases: if steps
    arrive one at a time (`streamed`); or if the batch is wide, the matrix is not too large, and there are so many rows
    (steps x batch) that the products save more time than the copy takes.
    """
    T, B = problem[:2]
    if streamed:
        return JoinedProduct(problem, v, copies_h, negatable)
    if "Wx" in v and "Wh" in v and B >= WIDE_BATCH:
        # width: the number of columns of [Wx Wh]. A call must have at least two blocks of AHEAD_ROWS rows, and two rows
        # (steps x batch) for each column of the copy.
        width = v["Wx"].shape[1] + v["Wh"].shape[1]
        if 2 * max(AHEAD_ROWS, width) <= T * B and len(v["Wx"]) * width <= COPIED_NUMBERS:
            return JoinedProduct(problem, v, copies_h, negatable)
    return SeparateProducts(problem, v, copies_h)


UNPACKED_NUMBERS = 10**6
"""The largest number of multiplications in a product for which OpenBLAS reads both matrices directly. For a larger
product it first copies both matrices into its own layout."""

NARROW_BATCH = 8
"""A batch is narrow if it has at least 2 and fewer than NARROW_BATCH items. For such a batch OpenBLAS takes longer to
copy the recurrent weights than to multiply by them."""


def in_blocks(weights: Array, B: int, streamed: bool = False) -> Array:
    """Divide the rows of a matrix into n blocks of the same size: from [rows, K] to [n, rows / n, K]. Return the
    matrix unchanged if blocks would not make its product faster.

    At every step the matrix is multiplied by an array [K, B]. If it is divided, NumPy multiplies one block after the
    other on the calling thread. Two kinds of matrices are divided:

    - A matrix of a stream (`streamed`: steps arrive one at a time), unless its product is so large that all threads
      should compute it. Otherwise the other threads of BLAS would spin during each pause between two steps.
    - A contiguous matrix for a narrow batch, so that BLAS need not copy it at every step. For B = 1 the array is a
      vector, and BLAS does not copy the matrix.
    """
    # numbers: the multiplications of the product. largest: how many the product of one block may have: above
    # QUIET_NUMBERS OpenBLAS uses all threads, and above UNPACKED_NUMBERS it copies both matrices.
    numbers, largest = weights.size * B, QUIET_NUMBERS if streamed else UNPACKED_NUMBERS
    divides = numbers <= THREADED_NUMBERS if streamed else 1 < B < NARROW_BATCH and weights.flags.c_contiguous
    if numbers <= largest or not divides:
        return weights
    rows, fewest = len(weights), -(-numbers // largest)  # fewest: numbers / largest, rounded up
    # n: the smallest number of blocks that is sufficient and divides the rows evenly. It is 1 if no number below 4 *
    # fewest does.
    n = next((n for n in range(fewest, 4 * fewest) if rows % n == 0), 1)
    return weights.reshape(n, rows // n, -1)


def transposed_product(Wh: Array, problem: Problem) -> Callable[[Array, Array], Any]:
    """Return the function multiply(dz, out), which every step of the backward pass calls with dz [GH, B]. It writes
    Wh^T @ dz, the gradient of the h that Wh [GH, P] multiplied, to `out` [P, B].

    For a narrow batch (`NARROW_BATCH`) the rows of a large Wh are divided into blocks, because BLAS would copy the
    whole matrix at every step, which takes longer than the product. The products of all blocks are added.
    """
    blocks = in_blocks(Wh, problem.B)
    if blocks.ndim < 3:  # Wh is not divided
        return partial(np.matmul, transposed(Wh, problem))
    # weights [blocks, P, rows of a block]; terms [blocks, P, B]: memory for the product of each block.
    weights, terms = blocks.transpose(0, 2, 1), np.empty((len(blocks), blocks.shape[2], problem.B), Wh.dtype)

    def multiply(dz: Array, out: Array) -> None:
        np.matmul(weights, dz.reshape(len(terms), -1, dz.shape[1]), out=terms)
        np.add.reduce(terms, axis=0, out=out)

    return multiply


class SeparateProducts:
    """Compute Wx @ x for all steps of a block as one product, before these steps run. Each step then computes Wh @ h
    and adds its own part of the first product.

    Block n has the steps from n * block to (n + 1) * block - 1. The caller calls `load` before the first step of each
    block. There are B batch items, G gates with H units each, and P is the width of h. A step t uses, with i = t %
    len(h_buffers):

        h_buffers[i] [P, B]   h before the step; the previous step writes it there
        h_rows[i] [P, B]      the array that Wh multiplies: h, or another one such as mask * h. If it is h itself, it is
                              the same array as h_buffers[i]
        operands[i] [P, B]    the array that `weights` [GH, P] multiplies. Here it is the same array as h_rows[i]; in
                              `JoinedProduct` it is a larger array that contains h_rows[i].
    """

    negated: str = ""
    """The letters of the gates whose rows of `weights` are negated: none. A `JoinedProduct` may have some."""

    def __init__(self, problem: Problem, v: Views, copies_h: bool, norm: Any = None):
        """Copy or view Wx and Wh, and allocate the buffers. copies_h: whether Wh multiplies another array than h
        itself, such as mask * h. norm: None, or an `InputNorm` or `InputNormOfSteps`, which then computes the input's
        part with the bias."""
        dtype, (T, B, H, P), cell = v["x"].dtype, problem[:4], problem.cell
        rows = cell.gates * H
        self.order: str = cell.gate_order  # the order of the gates' rows in `weights`
        self.x: Array = v["x"]
        self.weights: Any = matrix(v["Wh"]) if "Wh" in v else None  # None if the cell does not multiply h
        self.norm: Any = norm
        Wx = bias = None
        if norm is None:
            Wx, bias = matrix(v["Wx"]) if "Wx" in v else None, bias_of(problem, v)
        self.by_step: bool = norm is not None and B >= WIDE_BATCH  # whether the norm is an `InputNormOfSteps`
        # block: for how many steps one call of `load` computes the input's part. It is 1 without a product, or if the
        # norm takes one step at a time. For a wide batch the results of a block stay in the CPU's cache (AHEAD_ROWS).
        self.block: int = chunk_steps(problem) if B < WIDE_BATCH else min(T, max(1, AHEAD_ROWS // B))
        if (Wx is None and norm is None) or self.by_step:
            self.block = 1
        # For many rows of a wide batch append the bias to Wx as one more column, and ones to x. So the product includes
        # the bias, which saves a pass over the preactivations. For fewer rows copying Wx would cost more time.
        self.padded: Array | None = None  # [block, B, I + 1]: x with a column of ones
        if Wx is not None and bias is not None and B >= WIDE_BATCH and T * B >= 2 * AHEAD_ROWS:
            Wx = np.concatenate([Wx, bias[:, None]], axis=1)
            self.padded, bias = np.ones((self.block, B, Wx.shape[1]), dtype), None
        self.Wx: Array | None = Wx
        self.bias: Array | None = bias  # [GH]; without Wx it is repeated to [GH, B], the shape of x[t].T
        if Wx is not None or (norm is not None and not self.by_step):
            self.ahead: Array = columns_buffer(rows, self.block * B, B, dtype)  # the input parts of a block of steps
        elif bias is not None:
            self.bias, self.ahead = np.repeat(bias[:, None], B, axis=1), np.empty((rows, B), dtype)
        # h_buffers: h before a step and after it, in turn.
        self.h_buffers: list[Array] = [np.empty((P, B), dtype) for _ in range(2)]
        # h_rows: if `copies_h`, one more array, which only the step that writes it reads.
        self.h_rows: list[Array] = 2 * [np.empty((P, B), dtype)] if copies_h else self.h_buffers
        self.operands: list[Array] = self.h_rows

    def load(self, start: int) -> Array:
        """Return the input's part of the preactivations [GH, n B], bias included, for the block of n steps that begins
        at `start`."""
        if self.by_step:
            return self.norm(self.x[start])
        if self.norm is not None:
            x = self.x[start : start + self.block]
            x = x.reshape(-1, x.shape[-1])
            ahead = self.ahead[:, : len(x)]
            self.norm(x, ahead)
            return ahead
        if self.Wx is None:
            x = self.x[start].T
            return x if self.bias is None else np.add(x, self.bias, out=self.ahead)
        x = self.x[start : start + self.block]
        if self.padded is not None:
            self.padded[: len(x), :, :-1] = x
            x = self.padded[: len(x)]
        x = matrix(x.reshape(-1, x.shape[-1]))
        ahead = np.matmul(self.Wx, x.T, out=self.ahead[:, : len(x)])
        if self.bias is not None:
            ahead += self.bias[:, None]
        return ahead


class JoinedProduct:
    """Compute the preactivations [Wx b Wh] @ [x; 1; h] as one product per step. It is faster than `SeparateProducts` if
    the weights are small.

    Callers use it like `SeparateProducts`, except that an operand is an array [x; 1; h], whose last rows are h.
    """

    def __init__(self, problem: Problem, v: Views, copies_h: bool, negated: str):
        """Copy Wx, the bias and Wh into one matrix [Wx b Wh], and allocate the operand [x; 1; h] for each step of a
        block. copies_h: whether Wh multiplies another array than h itself, such as mask * h. negated: the letters of
        the gates whose rows of the matrix are negated, so that the product is -z, because the step computes 1 +
        exp(-z)."""
        (T, B, H, P), cell, Wx, bias = problem[:4], problem.cell, v["Wx"], bias_of(problem, v)
        self.negated: str = negated
        # order: the gates in the order of the rows of `weights`. Those in `negated` come first, so that they are
        # contiguous in z.
        self.order: str = "".join(sorted(cell.gate_order, key=lambda gate: gate not in negated))
        self.weights: Array = np.empty((len(Wx), Wx.shape[1] + (bias is not None) + P), Wx.dtype)
        for n, gate in enumerate(self.order):
            rows, block = self.weights[n * H : (n + 1) * H], cell.block(gate, H)
            parts = [Wx[block], *([] if bias is None else [bias[block, None]]), v["Wh"][block]]
            np.concatenate(parts, axis=1, out=rows)
            if gate in negated:
                np.negative(rows, out=rows)
        self.x: Array = v["x"]
        # A block has about AHEAD_ROWS rows (steps x batch), but at least two steps: a step writes the new h into the
        # operand of the next step while it still reads its own operand.
        self.block: int = max(2, min(T, AHEAD_ROWS // B))
        # columns: the operand [x; 1; h] of each step of a block.
        columns = np.ones((self.block, self.weights.shape[1], B), Wx.dtype)
        self.x_rows: Array = columns[:, : Wx.shape[1]]
        self.operands: list[Array] = [*columns]
        self.h_rows: list[Array] = [*columns[:, -P:]]
        self.h_buffers: list[Array] = [np.empty((P, B), Wx.dtype) for _ in range(2)] if copies_h else self.h_rows

    def load(self, start: int) -> None:
        """Copy x of the block of steps that begins at `start` into these steps' operands [x; 1; h]. Return None instead
        of the input's part of the preactivations, which the product of each step includes."""
        x = self.x[start : start + self.block]
        np.copyto(self.x_rows[: len(x)], x.transpose(0, 2, 1))


def bias_of(problem: Problem, v: Views) -> Array | None:
    """Return the bias [GH] with an LSTM's forget bias added, or None if the call has neither. If the sum is normalised,
    the forget bias is not added here, because it follows the norm."""
    cell, H = problem.cell, problem.H
    forget_bias = cell.forget_bias
    if not forget_bias or (cell.norm is not None and cell.norm.of == "sum"):
        return v.get("b")
    bias = np.array(v["b"]) if "b" in v else np.zeros(cell.gates * H, v["Wh"].dtype)
    bias[cell.block("f", H)] += forget_bias
    return bias


FACTORED_NUMBERS = 2**13
"""The smallest number of elements of a weight gradient that may be returned as two factors instead of their product."""


def factored_names(problem: Problem, v: Views) -> list[str]:
    """Return the names of the weights whose gradients are returned as two factors instead of their product. The factors
    have one row per batch item.

    This is done for a call of a single step, to save memory: a program that makes one call per time step holds the
    gradients of all calls until it sums them. The factors of dWx and dWh are dz [B, GH] and x or h0, which is in memory
    already; both factors of dWp are new. The new factors must be smaller than the product. A call of several steps
    returns the product, because MLX would multiply the factors later on one thread, which takes 2 to 4 times as long as
    NumPy.
    """
    if problem.bidirectional or problem.T > 1:
        return []
    large = [name for name in ("Wx", "Wh", "Wp") if name in v and v[name].size >= FACTORED_NUMBERS]
    # new: how many numbers per batch item the new factors have.
    new = {name: sum(v[name].shape) if name == "Wp" else len(v[name]) for name in large}
    return [name for name in large if problem.B * new[name] < v[name].size]


class WeightGradients:
    """Collects the weight gradients of one direction. A gradient is a sum over chunks of time: each chunk adds one
    matrix product over its steps and batch items."""

    def __init__(self, out: Views, written: set[int], factored: Sequence[str] = ()):
        """Prepare the gradients of one direction. out: the memory of the requested gradients. written: the first steps
        of the chunks for which the gradient of x is written already. Both directions share this set, so that the second
        direction adds its gradient to that of the first. factored: the names of weights whose gradient is returned as a
        pair of matrices instead of their product; the call then has one step."""
        self.out: Views = out
        self.written: set[int] = written
        # factors: {name: {first row of a block: (left [n, rows of the block], right [n, columns])}} for n batch items,
        # with left^T right as the block of rows of the gradient.
        self.factors: dict[str, dict[int, tuple[Array, Array]]] = {name: {} for name in factored}
        self.left: Array | None = None  # the latest left factor, which the next gradient may have, too
        self.begun: set[tuple[str, int | None]] = set()  # (name, first row) of each block that has been written

    def accumulate(self, name: str, left: Array, right: Array, rows: slice = slice(None)) -> None:
        """Add left [rows, n] @ right [n, columns] to these rows of the gradient `name`, if this gradient is requested.
        The first chunk writes its product. If the gradient is returned as two factors, store both instead; such a call
        has a single chunk."""
        if name in self.factors:
            left = np.array(left.T, order="C")  # a copy: `left` is dz, which `StepBackward.end_chunk` overwrites
            # The gradients of Wx and Wh usually have the same left factor, dz, which is then stored once.
            if self.left is None or not np.array_equal(left, self.left):
                self.left = left
            self.factors[name][rows.start or 0] = self.left, right
            return
        if name not in self.out:
            return
        gradient = self.out[name][rows]
        if (name, rows.start) in self.begun:
            gradient += np.matmul(left, right)
        else:
            np.matmul(left, right, out=gradient)
            self.begun.add((name, rows.start))

    def of_segment(self, own: Views) -> "WeightGradients":
        """Return an object that adds the weight gradients of a segment (some steps of some batch items) to those of
        `self`. own: memory for the gradients that belong to the segment alone, such as that of x."""
        part = WeightGradients(self.out | own, written=set())  # the segment's own gradient of x is not written yet
        part.begun = self.begun
        return part

    def add(self, name: str, term: Array) -> None:
        """Add a term of its shape to the gradient `name`. The first term is written to the gradient's memory."""
        if (name, None) in self.begun:  # None: the gradient as a whole, not a block of its rows
            self.out[name] += term
        else:
            self.out[name][...] = term
            self.begun.add((name, None))

    def add_input(self, start: int, stop: int, term: Array) -> None:
        """Write the gradient of x for the steps from `start` to `stop`, if this gradient is requested. term [n, I]: the
        gradient of one direction, with n = steps x batch. The direction that runs second adds its gradient to that of
        the first."""
        if "x" in self.out:
            dx = self.out["x"][start:stop]
            np.add(dx, term.reshape(dx.shape), dx) if start in self.written else np.copyto(dx, term.reshape(dx.shape))
            self.written.add(start)

    def write_input(self, start: int, stop: int, dz: Array, Wx: Array | None) -> None:
        """Write the gradient of x for the steps from `start` to `stop`, if this gradient is requested. dz [GH, n]: the
        gradient of the preactivations of G gates with H units each, with n = steps x batch.

        With Wx the gradient is dz^T Wx. Without Wx the caller passes x Wx^T in the place of x: each direction has its
        own part of it, and the gradient of this part is dz.
        """
        if "x" not in self.out:
            return
        dx = self.out["x"][start:stop]
        if Wx is None:
            dx[...] = dz.T.reshape(dx.shape)
        elif start not in self.written and dx.flags.c_contiguous:
            np.matmul(dz.T, matrix(Wx), out=dx.reshape(dz.shape[1], -1))
            self.written.add(start)
        else:
            self.add_input(start, stop, np.matmul(dz.T, matrix(Wx)))
