"""`recurrent`: run a cell written by the user, in plain MLX, over a sequence."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..checks import check_flag, fail, instead_of
from ..engines.ops.sweep import by_time, of_live, over_time
from ..engines.problem import Array
from ._call import Hold, Lengths, whole_lengths
from ._steps import Steps, factors, whole_steps

OP = "recurrent"


def recurrent(
    step: Callable[[Any, Any], tuple[Any, Any]],
    x: Any,
    state: Any,
    *,
    keep: mx.array | None = None,
    hold: Hold = None,
    lengths: Lengths = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Run a cell of your own over a time-major sequence: `output[t], state = step(x[t], state)`, step after step.

    `step` may use any operation of MLX. No kernel of this package runs: MLX builds a graph of T times the step, which
    is slower than `lstm`, `gru` and `rnn`. MLX differentiates it, to any order, with respect to x, the state and all
    arrays that `step` captures. Compute products of the input alone outside, for all steps at once: pass `x @ Wx.T` as
    x. Padding must then be finite, since it enters the gradient of that product. `recurrent` runs on any device and
    inside `mx.compile`, `mx.vmap` and `mx.checkpoint`.

    A tree is an array, or nested tuples, lists and dicts of arrays.

    Args:
        step (callable): `step(x_t, state) -> (output_t, state)`. It takes x at a step, arrays [B, ...], and the state.
            It returns a tree of arrays [B, ...], of the same shapes at each step, and the next state, with the
            structure, shapes and dtypes of the first. It must not mix the items of a batch.
        x (tree): arrays [T, B, ...] of any dtype; masks or noise that differ by step may be among them.
        state (tree): the first state, arrays [B, ...] of any dtype.
        keep (array, optional): factor on the whole state before a step, broadcastable to [T, B]; bool, integers or
            floats. 0 resets an item: pass `keep=~done` if an episode ended before step t. With `reverse` the step
            before t is t+1. An array of the state is multiplied in its own dtype.
        hold (array or list, optional): bool or integers, broadcastable to [T, B]: steps at which an item's state is
            carried unchanged (`keep` still applies), its outputs are 0 and its input is not read. Steps past an item's
            end are not held.
        lengths (integer array or list, optional): [B], each in 0..T. Past its end an item's outputs are 0, its state is
            carried unchanged and its input is not read: `step` gets zeros there, at which its derivative must be
            finite. With `reverse` the item starts at its end. Under `mx.compile` the range is not checked.
        reverse (bool): process t = T-1 ... 0; outputs stay aligned with the input. Default: `False`. For both
            directions call twice and concatenate the outputs.

    Returns:
        tuple: the outputs, a tree of arrays [T, B, ...], and the state after the last step processed.

    Raises:
        ValueError: a rule on an argument or on the results of `step` is broken.

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
    first = form(state, "state", (B,))
    ends = whole_lengths(OP, lengths, B, T)
    live, before, after = over_steps(keep, hold, T, B, ends, reverse)
    x_at = tree_map(lambda array: by_time(array if live is None else of_live(live, array)), x)
    live_at = [None] * T if live is None else by_time(live)
    order, forms = range(T)[::-1] if reverse else range(T), []

    def at(t: int, state: Any) -> tuple[Any, Any]:
        """Run the user's step at time t and check what it returns."""
        state = state if before is None else times(before[t], state)
        results = step(tree_map(lambda _, rows: rows[t], x, x_at), state)
        if not isinstance(results, tuple) or len(results) != 2:
            fail(OP, "step must return a tuple of two, (output_t, state),", shown(results))
        output, state = results
        state_form = form(state, "the state that step returns", (B,))
        if state_form != first:
            fail(OP, f"step must return a state like the first, {first},", f"{state_form} at step {t}")
        forms.append(form(output, "the output of step", (B,)))
        if forms[-1] != forms[0]:
            fail(OP, f"step must return output of the same form each time, {forms[0]},", f"{forms[-1]} at step {t}")
        return output, state

    outputs, last = over_time(at, state, order, lambda t: live_at[t])
    return outputs, last if after is None else times(after[order[-1]], last)


def over_steps(
    keep: Any, hold: Any, T: int, B: int, ends: mx.array | None, reverse: bool
) -> tuple[Array | None, list[Array] | None, list[Array] | None]:
    """Return (live, before, after). live, bool [T, B]: which steps run, or None if all do. before, after: lists of T
    factors [B], by which the state is multiplied before and after each step, or None."""
    options = whole_steps(OP, keep, hold, (T, B), "[T, B]")
    held = options["hold"] != 0 if "hold" in options else None
    steps = Steps(T, B, (reverse,), False, ends, held)
    live = None if ends is None and held is None else steps.live()
    if "keep" not in options:
        return live, None, None
    keep = options["keep"]
    keep = keep if mx.issubdtype(keep.dtype, mx.floating) else keep.astype(mx.float32)
    keep = keep if ends is None else mx.where(steps.alive(), keep, 1)
    if held is None:
        return live, by_time(keep), None
    turn = slice(None, None, -1 if reverse else 1)
    # `factors` takes and returns steps in their processing order, so a reversed direction is flipped before and after.
    before, after = (by_time(factor[turn]) for factor in factors(keep[turn], steps.live()[turn]))
    return live, before, after


def times(keep: Array, state: Any) -> Any:
    """Multiply each array of a state by `keep` [B], one factor per batch item."""
    return tree_map(lambda array: array * keep.reshape(-1, *[1] * (array.ndim - 1)).astype(array.dtype), state)


def time_and_batch(x: Any) -> tuple[int, int]:
    """Return the sizes (T, B) of x, read from its first array."""
    arrays: Any = [array for _, array in tree_flatten(x)]
    if not arrays:
        fail(OP, "x must have an array", x)
    form(x, "x", ("T", "B"))
    T, B = arrays[0].shape[:2]
    if T == 0:
        fail(OP, "x must have at least one time step", f"shape {list(arrays[0].shape)}")
    return T, B


def form(tree: Any, name: str, begin: tuple[int | str, ...]) -> Any:
    """Return a tree with the dtype and shape of each array as text. Raise an error if a shape does not begin with
    `begin`, in which a letter stands for any size."""

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
    """Describe a value for an error text: the dtype and shape of an array, or the type of any other value."""
    if not isinstance(value, mx.array):
        return f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}"
    return f"{str(value.dtype).removeprefix('mlx.core.')} {list(value.shape)}"
