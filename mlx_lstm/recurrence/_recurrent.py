"""A recurrence of any step: cells that are none of the three, in plain MLX."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..checks import check_flag, fail, instead_of
from ..engines.ops.sweep import by_time, over_time, without_padding
from ._call import Lengths, whole_lengths

OP = "recurrent"


def recurrent(
    step: Callable[[Any, Any], tuple[Any, Any]], x: Any, state: Any, *, lengths: Lengths = None, reverse: bool = False
) -> tuple[Any, Any]:
    """A cell of your own over a time-major sequence: `output[t], state = step(x[t], state)`, one step after the other.

    It is what `lstm`, `gru` and `rnn` do with their steps in the engine `"ops"`, for whatever step is written in MLX's
    ops. Open, but slow: no kernel runs, MLX builds and keeps a graph of T times the step, and derives the gradient
    itself, of any order, with respect to x, state and all that `step` reads from around it. Products of the input alone
    are faster outside: pass `x @ Wx.T`; padding then has to be finite, as it enters that product's gradient.
    Runs on any device and in `mx.compile`, `mx.vmap` and `mx.checkpoint`.

    A tree is an array, or tuples, lists and dicts of arrays, nested at will.

    Args:
        step (callable): `step(x_t, state) -> (output_t, state)`, on plain MLX. It takes x at a step, [B, ...] for each
            array, and the state, and returns a tree of arrays [B, ...], of the same shapes at each step, and the next
            state, in the structure, shapes and dtypes of the first. Items of a batch must not mix there.
        x (tree): arrays [T, B, ...] of any dtype. What differs by step may be part of it: masks, noise.
        state (tree): the first state, arrays [B, ...] of any dtype.
        lengths (integer array or list, optional): [B], each in 0..T. Past its end an item's outputs are 0, its state is
            carried unchanged and its input never read: `step` sees zeros there, at which its derivative must be finite;
            with `reverse` the item starts at its end. The range goes unchecked under `mx.compile`.
        reverse (bool): process t = T-1 ... 0; outputs stay aligned with the input. Default: `False`. For both
            directions call twice, and put the outputs side by side.

    Returns:
        tuple: the outputs, a tree of arrays [T, B, ...], and the state after the last step processed.

    Raises:
        ValueError: a rule on an argument, or on what `step` returns, is broken.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import recurrent
        >>> def leaky(x, h):
        ...     h = 0.9 * h + 0.1 * x
        ...     return mx.tanh(h), h
        >>> outputs, last = recurrent(leaky, mx.ones((10, 2, 3)), mx.zeros((2, 3)), lengths=[10, 4])
        >>> outputs.shape, last.shape, outputs[4:, 1].max().item()
        ((10, 2, 3), (2, 3), 0.0)
        >>> mx.grad(lambda x: recurrent(leaky, x, mx.zeros((2, 3)))[1].sum())(mx.ones((10, 2, 3))).shape
        (10, 2, 3)
    """
    if not callable(step):
        fail(OP, "step must be a function, step(x_t, state) -> (output_t, state),", type(step).__name__)
    check_flag(OP, "reverse", reverse)
    T, B = time_and_batch(x)
    form(x, "x", (T, B))
    before = form(state, "state", (B,))
    ends = whole_lengths(OP, lengths, B, T)
    x_at = tree_map(lambda array: by_time(without_padding(ends, array)), x)
    forms = []

    def at(t: int, state: Any) -> tuple[Any, Any]:
        """The step at t, and its rules."""
        found = step(tree_map(lambda _, rows: rows[t], x, x_at), state)
        if not isinstance(found, tuple) or len(found) != 2:
            fail(OP, "step must return a tuple of two, (output_t, state),", shown(found))
        output, state = found
        after = form(state, "the state that step returns", (B,))
        if after != before:
            fail(OP, f"step must return a state like the first, {before},", f"{after} at step {t}")
        forms.append(form(output, "the output of step", (B,)))
        if forms[-1] != forms[0]:
            fail(OP, f"step must return output of the same form each time, {forms[0]},", f"{forms[-1]} at step {t}")
        return output, state

    return over_time(at, state, range(T)[::-1] if reverse else range(T), ends)


def time_and_batch(x: Any) -> tuple[int, int]:
    """(T, B) of x, of which the first array tells."""
    arrays: Any = [array for _, array in tree_flatten(x)]
    if not arrays:
        fail(OP, "x must have an array", x)
    form(x, "x", ("T", "B"))
    T, B = arrays[0].shape[:2]
    if T == 0:
        fail(OP, "x must have at least one time step", f"shape {list(arrays[0].shape)}")
    return T, B


def form(tree: Any, name: str, begin: tuple[int | str, ...]) -> Any:
    """The tree of words `float32 [B, ...]` for a tree of arrays, whose shapes begin so (a letter: any size)."""

    def of(array: Any) -> str:
        if not isinstance(array, mx.array):
            fail(OP, f"{name} must be an mlx.core.array or a tree of such{instead_of(array)}", type(array).__name__)
        sizes = array.shape[: len(begin)]
        right = len(sizes) == len(begin) and all(
            isinstance(n, str) or n == m for n, m in zip(begin, sizes, strict=True)
        )
        if not right:
            fail(OP, f"{name} must have shape [{', '.join(map(str, begin))}, ...]", f"shape {list(array.shape)}")
        return shown(array)

    return tree_map(of, tree)


def shown(value: Any) -> str:
    """An array's dtype and shape, else a type."""
    if not isinstance(value, mx.array):
        return f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}"
    return f"{str(value.dtype).removeprefix('mlx.core.')} {list(value.shape)}"
