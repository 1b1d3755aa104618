"""The scratch memory of engine `numpy`, sequences step by step, where items end."""

import numpy as np

from ..problem import Problem
from .arrays import FEATURE_MAJOR, Array, Views

CHUNK_ROWS = 1024  # rows (time steps x batch) that one product takes: bounds the memory of dz
COPIED_NUMBERS = 2**20  # of weights up to which a copy pays that BLAS multiplies with faster
WIDE_BATCH = 16  # from here on a step's [4H, B] block is wide enough for BLAS and for contiguous rows


class Steps:
    """A sequence [T, B, .] read step by step as contiguous [., B]: as it lies, or two copied steps at a time."""

    def __init__(self, sequence: Array):
        self.sequence: Array = sequence.transpose(FEATURE_MAJOR)
        self.copies: Array | None = None
        self.held: list[int] = [-1, -1]
        if not self.sequence[0].flags.c_contiguous:
            self.copies = np.empty((2, *self.sequence.shape[1:]), sequence.dtype)

    def at(self, t: int) -> Array:
        """Step t; a copy holds until step t + 2 or t - 2 is asked for."""
        if self.copies is None:
            return self.sequence[t]
        slot = t % 2
        if self.held[slot] != t:
            self.copies[slot], self.held[slot] = self.sequence[t], t
        return self.copies[slot]


def matrix(a: Array) -> Array:
    """`a` as BLAS can take it: one of the last two axes contiguous. A copy only where it is not (NumPy would loop)."""
    rows, columns = a.strides[-2:]
    size = a.itemsize
    fits = (columns == size and rows >= size * a.shape[-1]) or (rows == size and columns >= size * a.shape[-2])
    return a if fits else np.ascontiguousarray(a)


def transposed(weights: Array, problem: Problem) -> Array:
    """The transpose of a matrix [GH, P] for a product at every step: a copy where it multiplies a wide batch often
    enough, as BLAS then runs up to a quarter faster."""
    often = problem.B >= WIDE_BATCH and 2 * weights.shape[1] <= problem.T * problem.B
    return np.ascontiguousarray(weights.T) if often and weights.size <= COPIED_NUMBERS else matrix(weights).T


def chunk_steps(problem: Problem) -> int:
    """How many steps the products over time and batch take at once."""
    return min(problem.T, max(1, CHUNK_ROWS // problem.B))


def columns_buffer(rows: int, columns: int, B: int, dtype: np.dtype) -> Array:
    """Scratch [rows, columns] used B columns at a time: feature-major where such a block is wide, else transposed."""
    if B >= WIDE_BATCH:
        # Sixteen columns more than needed keep the rows from falling on the same cache sets.
        return np.empty((rows, columns + 16), dtype)[:, :columns]
    return np.empty((columns, rows), dtype).T


def step_mask(v: Views, problem: Problem) -> Array | None:
    """The mask on h[t-1] as [T, B, P], a broadcast view."""
    return np.broadcast_to(v["mask"], (problem.T, problem.B, problem.P)) if "mask" in v else None


class Ends:
    """Where the items of a batch end."""

    def __init__(self, problem: Problem, v: Views):
        self.shortest: int = problem.T
        if "lengths" in v:
            self.lengths: Array = v["lengths"]
            self.shortest = int(self.lengths.min())

    def live(self, t: int) -> Array | None:
        """[B]: which items have not ended at step t; None if all go on."""
        return None if t < self.shortest else self.lengths > t

    def without_padding(self, sequence: Array, start: int, stop: int) -> Array:
        """Steps start..stop of a sequence [T, B, .], 0 where an item has ended: 0 * NaN would spoil a sum."""
        part = sequence[start:stop]
        if stop <= self.shortest:
            return part
        live = np.arange(start, stop)[:, None] < self.lengths
        return np.where(live[..., None], part, 0)


def states_before(
    problem: Problem, states: Array, first: Array | int, lengths: Array | None, start: int, stop: int
) -> Array:
    """[steps, B, .]: the state that each of steps start..stop started from, given that after each step and the first.

    A view where no first state is among them.
    """
    if not problem.reverse and start > 0:
        return states[start - 1 : stop - 1]
    if problem.reverse and stop < problem.T and lengths is None:
        return states[start + 1 : stop + 1]
    rows = np.empty((stop - start, *states.shape[1:]), states.dtype)
    if not problem.reverse:
        rows[0] = first
        rows[1:] = states[: stop - 1]
        return rows
    inner = min(stop, problem.T - 1)
    rows[: inner - start] = states[start + 1 : inner + 1]
    rows[inner - start :] = first
    if lengths is not None:
        starts = lengths == np.arange(start + 1, stop + 1)[:, None]
        np.copyto(rows, first, where=starts[..., None])
    return rows


def first_state(v: Views, name: str, shape: tuple[int, int], dtype: np.dtype) -> Array:
    """h0 or c0 as a new array [., B], zeros where absent."""
    return np.array(v[name].T, order="C") if name in v else np.zeros(shape, dtype)
