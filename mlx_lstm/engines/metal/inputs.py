"""A problem's arrays as the Metal kernels read them: row-contiguous, masks at full width."""

from functools import lru_cache

import mlx.core as mx

from ..ops import sweep as ops
from ..packing import is_packed
from ..problem import Arrays, Problem


@lru_cache(1024)
def constant(numbers: tuple[float, ...], dtype: mx.Dtype) -> mx.array:
    """An array of a few numbers, made once."""
    return mx.array(numbers, dtype)


def contiguous(array: mx.array | None) -> mx.array | None:
    """The array in row order, copied once where every launch would copy it; `mx.contiguous` cannot be exported. MLX
    itself hands a kernel its inputs in row order, so that an array of one launch needs nothing."""
    return None if array is None else array.reshape(-1).reshape(array.shape)


def project(problem: Problem, arrays: Arrays, launches: int = 2) -> mx.array:
    """`engines.ops.sweep.project`, in one launch unless Wx is packed and, where several read it, in row order."""
    x, Wx, b = arrays["x"], arrays.get("Wx"), arrays.get("b")
    if Wx is None or b is None or is_packed("Wx", arrays):
        return contiguous(ops.project(problem, arrays)) if launches > 1 else ops.project(problem, arrays)
    return mx.addmm(b, x, Wx.T)


def whole_mask(problem: Problem, arrays: Arrays) -> mx.array | None:
    """What h is multiplied by as it enters the product, the mask and `keep`, as [T, B, D P], or as [1, B, D P] where
    all steps share it."""
    mask, keep = arrays.get("mask"), arrays.get("keep")
    if keep is not None:
        keep = mx.repeat(keep, problem.P, axis=-1)
        mask = keep if mask is None else keep * mask
    if mask is None:
        return None
    steps = mask.shape[0] if mask.ndim == 3 else 1
    return contiguous(mx.broadcast_to(mask, (steps, problem.B, problem.directions * problem.P)))


def takes_steps(mask: mx.array | None) -> bool:
    """Whether every step has a mask of its own, of a `whole_mask`."""
    return mask is not None and mask.shape[0] > 1
