"""What layers do around a call, at once where the call computes on the CPU: an operation of MLX wakes a thread, which
takes as long as a step of a small layer."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from . import choice
from .numpy.arrays import MLX_ALLOCATES, view
from .numpy.weights import cached
from .tracing import is_transforming

Run = Callable[..., Any]
"""Called with a function and arrays, it gives what the function gives of them."""


def computes_now(engine: str | None) -> bool:
    """Whether a call on this engine, `None` for the best, computes on the CPU before it returns, and nobody can ask for
    a gradient."""
    return engine in (None, "numpy") and choice.current_device() == "cpu" and not is_transforming()


def by_mlx(function: Run, *arrays: mx.array) -> Any:
    """What the function gives."""
    return function(*arrays)


def by_numpy(function: Run, *arrays: mx.array) -> Any:
    """The same, of NumPy's views of small arrays; the function has to know both kinds. Of others `by_mlx`."""
    dtypes, dtype = [array.dtype for array in arrays], arrays[0].dtype
    if dtypes.count(dtype) < len(dtypes) or dtype not in (mx.float32, mx.float64):
        return function(*arrays)
    if sum([array.size for array in arrays]) >= MLX_ALLOCATES:
        return function(*arrays)
    mx.eval(arrays)
    with np.errstate(all="ignore"):  # infinity and NaN go through without NumPy's warnings, as in MLX
        return copied(function(*map(view, arrays)), dtype)


def copied(found: Any, dtype: mx.Dtype) -> Any:
    """An array, or lists and dicts of them, as MLX's, which does not take every view."""
    if isinstance(found, np.ndarray):
        return mx.array(np.ascontiguousarray(found), dtype)
    if isinstance(found, dict):
        return {name: copied(array, dtype) for name, array in found.items()}
    return [copied(array, dtype) for array in found]


def derived(now: bool, kind: str, parameters: Any, derive: Callable[[Any], Any]) -> Any:
    """Return `derive(parameters)` of a tree of parameters, from a cache where a call computes now. kind: distinguishes
    what is derived in different ways from the same parameters."""
    return cached(kind, parameters, derive) if now else derive(parameters)
