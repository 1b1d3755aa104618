"""Arrays without values, placeholders of MLX's transformations; and `mx.vmap` of what MLX cannot vectorise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


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


def vmap_one_by_one(function: mx.custom_function, first: Callable[[], None] = lambda: None) -> None:
    """Gives a custom function of arrays, in tuples and dicts, the rule: run for each element, stack the results.

    `first` is called when the rule is put to use.
    """

    @function.vmap
    def rule(inputs: Any, axes: Any) -> tuple[Any, Any]:
        first()
        results = [function(*element(inputs, axes, n)) for n in range(length(inputs, axes))]
        return stacked(results)


def element(tree: Any, axes: Any, n: int) -> Any:
    """Number n of every array that has a mapped axis."""
    if isinstance(tree, dict):
        return {name: element(value, axes[name], n) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(element(value, axis, n) for value, axis in zip(tree, axes, strict=True))
    return tree if axes is None else mx.take(tree, n, axis=axes)


def length(tree: Any, axes: Any) -> int | None:
    """The length of the mapped axes."""
    if isinstance(tree, (dict, tuple, list)):
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return next((n for key, value in parts if (n := length(value, axes[key])) is not None), None)
    return None if axes is None else tree.shape[axes]


def stacked(results: list[Any]) -> tuple[Any, Any]:
    """The results as one tree whose arrays have a first axis more, and the tree of those axes: 0."""
    if isinstance(results[0], dict):
        pairs = {name: stacked([result[name] for result in results]) for name in results[0]}
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}
    if isinstance(results[0], (tuple, list)):
        pairs = [stacked(list(parts)) for parts in zip(*results, strict=True)]
        return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    return mx.stack(results), 0
