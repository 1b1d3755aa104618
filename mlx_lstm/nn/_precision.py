"""Run a model in 16 bits while its parameters stay float32. The path of a parameter is its name in the model, such as
"layers.0.Wh"."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..ground.checks import fail

OP = "nn.precision"  # the name of the function in error texts

DTYPES = (mx.bfloat16, mx.float16, mx.float32)
"""The dtypes to which parameters may be cast."""


@contextmanager
def precision(
    model: nn.Module, dtype: mx.Dtype = mx.bfloat16, *, predicate: Callable[[str], bool] | None = None
) -> Iterator[None]:
    """Cast the float parameters of a model to `dtype` inside the block, and restore them when it ends.

    Use it for training in mixed precision: the forward pass runs in the block, on 16-bit copies. The gradients flow
    through the cast, so they are gradients of the float32 parameters, in float32. The optimizer updates the float32
    parameters. After the block, even if it ended by an exception, the model has its old parameters again, the same
    arrays. Exception: if code in the block assigned a new array to a parameter, such as the running mean of a
    `BatchNorm`, the new array stays, cast to the dtype of the old one. A change in place, such as `self.mean += x`, is
    lost, because it changes the copy.

    The input must be cast, too: a layer computes in the dtype to which x and its parameters promote. float16 needs a
    scaled loss; the guide on training has an example.

    Args:
        model (Module): the model.
        dtype (Dtype): `mx.bfloat16`, `mx.float16` or `mx.float32`. Default: `mx.bfloat16`.
        predicate (callable, optional): called with the path of a parameter, such as `"layers.0.Wh"`; the parameter is
            cast if the result is true. Default: all float parameters are cast.

    Raises:
        ValueError: an argument breaks a rule.

    Example:
        >>> import mlx.core as mx
        >>> import mlx.nn as nn
        >>> from mlx_lstm.nn import LSTM, precision
        >>> model, x = LSTM(3, 4), mx.ones((2, 10, 3))
        >>> def loss(model):
        ...     with precision(model, mx.bfloat16):
        ...         hidden, cell = model(x.astype(mx.bfloat16))
        ...     return hidden.astype(mx.float32).square().mean()
        >>> value, gradients = nn.value_and_grad(model, loss)(model)
        >>> gradients["Wh"].dtype, model.Wh.dtype
        (mlx.core.float32, mlx.core.float32)
    """
    if not isinstance(model, nn.Module):
        fail(OP, "model must be a module", type(model).__name__)
    if not isinstance(dtype, mx.Dtype) or dtype not in DTYPES:
        fail(OP, "dtype must be mx.bfloat16, mx.float16 or mx.float32", dtype)
    if predicate is not None and not callable(predicate):
        fail(OP, "predicate must be a function of a parameter's path", type(predicate).__name__)
    # floats: {path: parameter} of all float parameters. old: the parameters to cast. new: their copies in `dtype`.
    floats = {key: array for key, array in flat(model) if mx.issubdtype(array.dtype, mx.floating)}
    old = {key: array for key, array in floats.items() if predicate is None or predicate(key)}
    new = {key: array.astype(dtype) for key, array in old.items()}
    # tree_unflatten makes the nested dicts of a model's parameters from pairs (path, array).
    model.update(tree_unflatten(list(new.items())))
    try:
        yield
    finally:
        now = dict(flat(model))
        # If code inside the `with` block assigned a new array to a parameter, this array stays in the model, in the old
        # dtype. All other parameters become the old arrays again.
        back = {key: old[key] if now[key] is new[key] else now[key].astype(old[key].dtype) for key in old if key in now}
        model.update(tree_unflatten(list(back.items())))


def flat(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the parameters of a model as pairs (path, array); a path is such as "layers.0.Wh"."""
    found: Any = tree_flatten(model.parameters())
    return found
