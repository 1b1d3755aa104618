"""A problem's arrays as the Metal kernels read them: row-contiguous, masks at full width, one step's slice."""

from __future__ import annotations

import mlx.core as mx

from .problem import Problem


def contiguous(array: mx.array | None) -> mx.array | None:
    """The array in row order, copied once where every launch would copy it; `mx.contiguous` cannot be exported."""
    return None if array is None else array.reshape(-1).reshape(array.shape)


def whole_mask(problem: Problem, mask: mx.array | None) -> mx.array | None:
    """The mask as [T, B, D P], or as [1, B, D P] where all steps share it."""
    if mask is None:
        return None
    steps = mask.shape[0] if mask.ndim == 3 else 1
    return contiguous(mx.broadcast_to(mask, (steps, problem.B, problem.directions * problem.P)))


def step_of(array: mx.array | None, t: int) -> mx.array | None:
    """Step t of a sequence; an array of one step serves all."""
    if array is None:
        return None
    t = t if array.shape[0] > 1 else 0
    # A slice is a view; array[t] would be a launch.
    row = array[t : t + 1].reshape(array.shape[1:])
    # Fewer than 8 elements go to Metal's constant memory, where an offset has to be a multiple of 4 bytes.
    return row if row.nbytes % 4 == 0 else row + 0
