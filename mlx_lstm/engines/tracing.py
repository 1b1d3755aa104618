"""Arrays without values, placeholders of MLX's transformations; and `mx.vmap` of what MLX cannot vectorise."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map, tree_reduce

custom_function: Callable[[Callable[..., Any]], Any] = mx.custom_function
"""`mx.custom_function`, of which MLX's types do not say that what it makes returns what the function returns."""


def are_free(arrays: list[mx.array]) -> bool:
    """Whether no transformation of MLX sees any of these arrays, so that nobody can ask for a gradient through them.
    Sets their evaluation going."""
    try:
        # Of what depends on them, as MLX lets a traced array pass once it has a value.
        mx.async_eval(mx.depends([mx.array(0.0)], arrays))
    except ValueError as error:
        if "inside a graph transformation" not in str(error):
            raise
        return False
    return True


def have_values(arrays: list[mx.array]) -> bool:
    """Evaluates these arrays; whether none is a placeholder of `mx.compile`, `mx.vmap` or an export."""
    try:
        mx.eval(arrays)
    except ValueError as error:
        if "during function transformations" not in str(error):
            raise
        return False
    return True


def one_by_one(function: Callable[..., Any], inputs: Any, axes: Any) -> tuple[Any, Any]:
    """The rule of `mx.vmap` for a function of arrays, in tuples and dicts: run for each element, stack the results."""
    lengths = tree_map(lambda array, axis: 0 if axis is None else array.shape[axis], inputs, axes)
    length: Any = tree_reduce(max, lengths)
    results = [function(*element(inputs, axes, n)) for n in range(length)]
    return tree_map(lambda *rows: mx.stack(list(rows)), *results), tree_map(lambda _: 0, results[0])


def element(tree: Any, axes: Any, n: int) -> Any:
    """Number n of every array that has a mapped axis."""
    return tree_map(lambda array, axis: array if axis is None else mx.take(array, n, axis=axis), tree, axes)
