"""The function `recurrent`: run a cell that the user wrote in plain MLX over a sequence.

T: time steps, B: batch items. step: the user's function of one time step. A tree is an array, or nested tuples, lists
and dicts of arrays. live [T, B]: whether a batch item runs this step, because the step is not held (option `hold`) and
the item has not ended; None if all items run all steps. before, after [T, B]: factors from the option `keep`, by which
the state is multiplied before and after a step. `filled(tree, arrays)` returns a tree of the same structure with other
arrays. `form` returns a tree of texts with the dtype and shape of each array.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..engines.ops.pointwise import only_live
from ..engines.ops.sweep import by_time, of_live, over_time
from ..engines.problem import Array
from ..engines.tracing import distinct
from ..ground.checks import check_every, check_flag, fail, instead_of
from ._call import Hold, Lengths, whole_lengths
from ._checkpointed import checkpointed, filled, leaves
from ._steps import Steps, factors, whole_steps

OP = "recurrent"
"""The function that error texts begin with."""


def recurrent(
    step: Callable[..., tuple[Any, Any]],
    x: Any,
    state: Any,
    *,
    parameters: Any = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    lengths: Lengths = None,
    reverse: bool = False,
    checkpoint_every: int | str | None = None,
) -> tuple[Any, Any]:
    """Run a cell of your own over a time-major sequence: `output[t], state = step(x[t], state)`, step after step.
    Sizes: T time steps, B batch items.

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
        parameters (tree, optional): arrays that each step gets as a third argument, `step(x_t, state, parameters)`.
            Default: `step` gets two arguments.
        keep (array, optional): factor on the whole state before a step, broadcastable to [T, B]; bool, integers or
            floats. 0 resets an item: pass `keep=~done` if an episode ended before step t. With `reverse` the step
            before t is t+1. An array of the state is multiplied in its own dtype.
        hold (array or list, optional): bool or integers, broadcastable to [T, B]: steps at which an item's state is
            carried unchanged (`keep` still applies), its outputs are 0 and its input is not read: `step` gets zeros
            instead, as past an item's end. Steps past an item's end are not held.
        lengths (integer array or list, optional): [B], the number of steps of each item, 0..T. After the end of an item
            its outputs are 0, its state is carried unchanged and its input is not read: `step` gets zeros instead. For
            zeros the derivatives of `step` by its parameters must be finite. With `reverse` the item starts at its end.
            Under `mx.compile` the range is not checked.
        reverse (bool): process t = T-1 ... 0; outputs stay aligned with the input. Default: `False`. For both
            directions call twice and concatenate the outputs.
        checkpoint_every (int or str, optional): for a gradient, save the states of every K-th step only, and run K
            steps at a time again; `"auto"` takes the square root of T. Then `step` must give the same results when it
            runs again; numbers that it draws from `mx.random` come again, too. It must not assign arrays to a module,
            as `nn.BatchNorm` does in training, nor change them in place, and must not capture arrays of floats. Pass
            these arrays as `parameters`, or hold them in layers (`nn.Module`) that the code of `step` reaches: through
            `self` if it is a method, through variables of enclosing functions, global variables or Python modules that
            it imports itself, or through attributes of these that the code names. Changes in place and other arrays of
            floats are refused, if MLX can export `step`. MLX's jvp and vmap do not support this option. Default:
            `None`, save everything.

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
        >>> def rate(x, h, a):
        ...     h = (1 - a) * h + a * x
        ...     return h, h
        >>> long, first = mx.ones((1000, 2, 3)), mx.zeros((2, 3))
        >>> loss = lambda a: recurrent(rate, long, first, parameters=a, checkpoint_every="auto")[1].sum()
        >>> mx.grad(loss)(mx.array(0.3)).shape
        ()
        >>> mx.grad(lambda x: recurrent(leaky, x, mx.zeros((2, 3)))[1].sum())(mx.ones((10, 2, 3))).shape
        (10, 2, 3)
    """
    if not callable(step):
        fail(OP, "step must be a function, step(x_t, state) -> (output_t, state),", type(step).__name__)
    check_flag(OP, "reverse", reverse)
    every = check_every(OP, checkpoint_every)
    T, B = time_and_batch(x)
    form(x, "x", (T, B))
    state_form = form(state, "state", (B,))  # every later state must have this form, too
    if parameters is not None:
        form(parameters, "parameters", ())
    ends = whole_lengths(OP, lengths, B, T)
    live, before, after = over_steps(keep, hold, T, B, ends, reverse)
    forms: list[Any] = []  # the dtypes and shapes of the outputs of each step so far

    def run(start: int, sequences: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        """Run the steps of a chunk of the sequence, which begins at step `start`. Return (outputs, last state). Items
        that do not run a step (it is held, or the item has ended) are computed, too, because MLX has one graph for the
        whole batch, but must not change any result. So `of_live` replaces their x by zeros, and no NaN of the padding
        is read. `only_live` makes the derivatives of their step 0. `over_time` gives them their old state, and 0 as the
        output."""
        x, live, before = sequences
        # live [T, B]: which items run a step. before [T, B]: the factor on each item's state before the step. x_at,
        # live_at, before_at: x, live and before as lists with one entry per step. third: the third argument of the
        # user's function in a tuple, or ().
        third = () if parameters is None else (parameters,)
        x_at = tree_map(lambda array: by_time(array if live is None else of_live(live, array)), x)
        arrays: Any = tree_flatten(x)  # pairs (key, array)
        steps = len(arrays[0][1])  # the number of steps of this chunk
        live_at = [None] * steps if live is None else by_time(live)
        before_at = None if before is None else by_time(before)

        def at(t: int, state: Any) -> tuple[Any, Any]:
            """Run the user's step t of this chunk, and check what it returns."""
            state = state if before_at is None else multiplied(before_at[t], state)
            # x_at has a list of steps in place of each array of x. So take entry t of each list: the tree of x at t.
            given = tree_map(lambda _, rows: rows[t], x, x_at), state
            # live_at[t]: the items that run this step, or None for all. `only_live` makes the step's derivatives 0 for
            # the others.
            results = step(*filled(given, only_live(live_at[t], leaves(given))), *third)
            check_results(results, state_form, forms, B, start + t)
            return results

        # by_mlx=True: MLX differentiates these steps, so `over_time` must choose between the old and the new state in a
        # way that lets no NaN gradient through.
        return over_time(at, state, range(steps)[:: -1 if reverse else 1], lambda t: live_at[t], by_mlx=True)

    sequences = (x, live, before)
    if every is None:
        outputs, last = run(0, sequences, state, parameters)  # all steps are one chunk, which begins at step 0
        # A step may return one array as two states. `distinct` makes them two arrays, because `mx.vjp` needs this.
        last = filled(last, distinct(leaves(last)))
    else:
        outputs, last = checkpointed(run, every, step, sequences, state, parameters, reverse)
    # Held steps after the last step that ran still multiply the state by their factors `keep`.
    return outputs, last if after is None else multiplied(after[0 if reverse else -1], last)


def check_results(results: Any, state_form: Any, forms: list[Any], batch: int, t: int) -> None:
    """Check what the user's function returned at step t: (output, state). A form is a tree with the dtype and shape of
    each array. The state must have the form `state_form` of the first state. The output must have the form of the
    outputs of earlier steps, `forms`; its own form is appended to `forms`. batch: the batch size."""
    if not isinstance(results, tuple) or len(results) != 2:
        fail(OP, "step must return a tuple of two, (output_t, state),", shown(results))
    output, state = results
    new_form, where = form(state, "the state that step returns", (batch,)), f"at step {t}"
    if new_form != state_form:
        fail(OP, f"step must return a state like the first, {state_form},", f"{new_form} {where}")
    forms.append(form(output, "the output of step", (batch,)))
    if forms[-1] != forms[0]:
        fail(OP, f"step must return output of the same form each time, {forms[0]},", f"{forms[-1]} {where}")


def over_steps(
    keep: Any, hold: Any, T: int, B: int, ends: mx.array | None, reverse: bool
) -> tuple[Array | None, Array | None, Array | None]:
    """Check `keep` (a factor on the state) and `hold` (steps that leave the state unchanged). Return (live, before,
    after). live, bool [T, B]: which steps run, or None if all do. before, after [T, B]: the factors on the state before
    and after each step, or None. ends [B]: the number of steps of each item, or None. T, B: steps, batch items."""
    options = whole_steps(OP, keep, hold, (T, B), "[T, B]")
    held = options["hold"] != 0 if "hold" in options else None
    steps = Steps(T, B, backwards=(reverse,), batch_first=False, lengths=ends, hold=held)
    live = None if ends is None and held is None else steps.live()
    if "keep" not in options:
        return live, None, None
    keep = options["keep"]
    keep = keep if mx.issubdtype(keep.dtype, mx.floating) else keep.astype(mx.float32)
    keep = keep if ends is None else mx.where(steps.alive(), keep, 1)  # alive: the item has not ended
    if held is None:
        return live, keep, None
    turn = slice(None, None, -1 if reverse else 1)
    # `factors` takes and returns steps in their processing order, so a reversed direction is flipped before and after.
    before, after = (factor[turn] for factor in factors(keep[turn], steps.live()[turn]))
    return live, before, after


def multiplied(keep: Array, state: Any) -> Any:
    """Multiply each array of a state by `keep` [B], one factor per batch item."""
    return tree_map(lambda array: array * keep.reshape(-1, *[1] * (array.ndim - 1)).astype(array.dtype), state)


def time_and_batch(x: Any) -> tuple[int, int]:
    """Return the sizes (T, B) of x, read from its first array."""
    arrays: Any = [array for _, array in tree_flatten(x)]
    if not arrays:
        fail(OP, "x must have an array", x)
    form(x, "x", ("T", "B"))  # two axes of any size
    T, B = arrays[0].shape[:2]
    if T == 0:
        fail(OP, "x must have at least one time step", f"shape {list(arrays[0].shape)}")
    return T, B


def form(tree: Any, name: str, begin: tuple[int | str, ...]) -> Any:
    """Return a tree with the dtype and shape of each array as text. Raise an error if a shape does not begin with
    `begin`, in which a letter stands for any size. name: what the error text calls the tree."""

    # Check one array of the tree, and return its dtype and shape as text. begin[k]: the size that axis k must have, or
    # a letter. sizes[k]: the size that it has.
    def form_of(array: Any) -> str:
        if not isinstance(array, mx.array):
            fail(OP, f"{name} must be an mlx.core.array or a tree of such{instead_of(array)}", type(array).__name__)
        sizes = array.shape[: len(begin)]
        right = len(sizes) == len(begin) and all(
            isinstance(wanted, str) or wanted == size for wanted, size in zip(begin, sizes, strict=True)
        )
        if not right:
            fail(OP, f"{name} must have shape [{', '.join(map(str, begin))}, ...]", f"shape {list(array.shape)}")
        return shown(array)

    return tree_map(form_of, tree)


def shown(value: Any) -> str:
    """Describe a value for an error text: the dtype and shape of an array, or the type of any other value."""
    if not isinstance(value, mx.array):
        return f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}"
    return f"{str(value.dtype).removeprefix('mlx.core.')} {list(value.shape)}"
