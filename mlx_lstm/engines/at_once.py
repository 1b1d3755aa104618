"""Let NumPy compute the small operations of a layer before and after its recurrence, if the recurrence itself runs on
the CPU immediately. MLX computes each operation in another thread, and waking this thread takes as long as one step of
a small layer.

A caller asks `computes_now` once, and then calls `by_numpy` or `by_mlx` with each function.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from . import choice
from .numpy.sweep import LARGE_SIZE, view
from .numpy.weights import cached
from .tracing import is_transforming

Run = Callable[..., Any]
"""The type of `by_mlx` and `by_numpy`, which are called with a function and arrays, and return the function's
results."""


def computes_now(engine: str | None) -> bool:
    """Return whether NumPy may compute the small operations before and after a recurrence on this engine. There are two
    conditions. First, the engine itself computes with NumPy on the CPU, so that its results exist when the call
    returns. Second, MLX is not transforming a function: to differentiate or compile a function, MLX must see all its
    operations. engine: a name, or None for the best engine, which under these two conditions is `numpy`."""
    return choice.may_be_numpy(engine) and choice.current_device() == "cpu" and not is_transforming()


def by_mlx(function: Run, *arrays: mx.array) -> Any:
    """Return function(*arrays), computed by MLX. Has the same signature as `by_numpy`."""
    return function(*arrays)


def by_numpy(function: Run, *arrays: mx.array) -> Any:
    """Return function(*arrays). NumPy computes the function on views of the arrays if these are small and all have the
    dtype float32 or all float64; otherwise MLX computes it. The function must accept both kinds of arrays."""
    # MLX computes the function for all other dtypes: NumPy has no bfloat16 and is slow in float16, and arrays of
    # different dtypes may have results of different dtypes, while `to_mlx` gives all results one dtype.
    dtypes, dtype = [array.dtype for array in arrays], arrays[0].dtype
    if dtypes.count(dtype) < len(dtypes) or dtype not in (mx.float32, mx.float64):
        return function(*arrays)
    # From LARGE_SIZE elements on, copying the results to MLX takes longer than waking MLX's thread.
    if sum([array.size for array in arrays]) >= LARGE_SIZE:
        return function(*arrays)
    mx.eval(arrays)
    with np.errstate(all="ignore"):  # infinity and NaN go through without NumPy's warnings, as in MLX
        return to_mlx(function(*map(view, arrays)), dtype)


def to_mlx(results: Any, dtype: mx.Dtype) -> Any:
    """Return `results`, an array or nested lists and dicts of arrays, with each NumPy array copied to an MLX array. A
    view is first copied to a contiguous array, because MLX does not accept every view. dtype: the dtype of the MLX
    arrays."""
    if isinstance(results, np.ndarray):
        return mx.array(np.ascontiguousarray(results), dtype)
    if isinstance(results, dict):
        return {name: to_mlx(array, dtype) for name, array in results.items()}
    return [to_mlx(array, dtype) for array in results]


def derived(now: bool, kind: str, parameters: Any, derive: Callable[[Any], Any]) -> Any:
    """Return `derive(parameters)`, such as a sum of two biases. parameters: arrays in nested lists and dicts. now:
    whether NumPy computes now (`computes_now`); the result then comes from a cache. kind: a part of the cache's key,
    because the same parameters may have several results."""
    return cached(kind, parameters, derive) if now else derive(parameters)
