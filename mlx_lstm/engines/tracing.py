"""Arrays without values, placeholders of MLX's transformations; and `mx.vmap` of what MLX cannot vectorise."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map, tree_reduce

custom_function: Callable[[Callable[..., Any]], Any] = mx.custom_function
"""`mx.custom_function`, of which MLX's types do not say that what it makes returns what the function returns."""


_ran = [object()]
"""A new one each time that Python runs `note_run`."""


def note_run(array: mx.array) -> list[mx.array]:
    """Returns nothing."""
    _ran[0] = object()
    return []


compiled = mx.compile(note_run)


def is_traced(array: mx.array) -> bool:
    """Whether MLX traces an array: then it runs what was compiled in Python, as it also does once in every thread."""
    for _ in range(2):
        before = _ran[0]
        compiled(array)
        if _ran[0] is before:
            return False
    return True


@cache
def leftover() -> mx.array | None:
    """An array of a derivative that is over, which MLX takes for traced where it traces any; None if it does not."""
    found: list[mx.array] = []

    def trace(x: mx.array) -> mx.array:
        found.append(x + 0)
        return x if is_traced(found[0]) else found.pop()

    mx.vjp(trace, [mx.array(0.0)], [mx.array(0.0)])
    return found[0] if found else None


def is_transforming() -> bool:
    """Whether MLX may be deriving, mapping, compiling or exporting in this thread. It does not say; to ask takes a
    microsecond, where an evaluation wakes another thread. Nobody knows where `mx.disable_compile()` holds."""
    array = leftover()
    return array is None or is_traced(array)


def are_free(arrays: list[mx.array]) -> bool:
    """Whether no transformation of MLX sees any of these arrays, so that nobody can ask for a gradient through them."""
    if not is_transforming():
        return True
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
