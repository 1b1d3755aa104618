"""Run lists of layers as one layer; each layer has the parameters of a recurrent layer of `mlx.nn`.

- B: sequences, T: steps, D: features that a layer reads, H: units, P: the width of h (H, or the width of a projection),
  K: layers.
- A side is one direction of all layers: the list `layers` (forward) or the list `reverse`. A way is one direction of
  one layer.
- A depth is the list of the layers that read the same output of the layer before. It has one layer, or with `groups`
  several that run side by side, each on its part of the features.
- arrays: a dict by the argument names of `mlx_lstm.lstm`, `gru` and `rnn`: Wx, Wh, b, bhn, Wp.
- now: the call computes immediately, so converted arrays may come from a cache.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, overload

import mlx.core as mx
import mlx.nn as nn

from ..convert import Weights, from_names
from ..convert.layers import Description, describe
from ..engines.at_once import by_mlx, by_numpy, computes_now, derived
from ..engines.cells import ACTIVATIONS, Cell, RNNCell
from ..engines.choice import Engine, check_engine
from ..engines.directions import half, join, part
from ..engines.packing import Quantized
from ..engines.problem import Arrays
from ..engines.tracing import split_apart
from ..ground.checks import ArraySpec, check_array, check_every, check_integer, check_option, fail, instead_of
from ..recurrence import (
    Call,
    Hold,
    Lengths,
    OwnCell,
    QuantizedLayer,
    apart_again,
    common_dtype,
    in_dtype,
    join_biases,
    join_states,
    norm_given,
    side_by_side,
    split_states,
    weight_shapes,
    whole_lengths,
    whole_steps,
)
from ._layers import GRU, LSTM, RNN, Layer
from ._pointwise import Pointwise

OP = "nn.stack"  # the name of the function in error texts
KINDS: tuple[type[Layer], ...] = (LSTM, GRU, RNN)
"""The classes of `mlx_lstm.nn`. Their parameters have the names of the parameters in `mlx.nn`, such as Wx and bias. An
object is compared with each class, to find out what kind of layer it is."""

Depths = list[list["StackedLayer"]]
"""A list with one entry per layer, in the order in which the layers run. From `read_depths` an entry is the list of the
layer's groups, which run side by side; without `groups` it has one element. From `read` it is the list of the layer's
directions."""

Between = Callable[[int, mx.array], mx.array]
"""The type of the option `between`: between(n, output of layer n) returns the input of the next layer."""


@overload
def stack(
    layers: Sequence[LSTM | nn.LSTM],
    x: mx.array,
    state: tuple[mx.array | None, mx.array | None] | None = None,
    *,
    reverse: Sequence[LSTM | nn.LSTM] | None = None,
    between: Between | None = None,
    merge: str = "concat",
    groups: int = 1,
    lengths: Lengths = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
) -> tuple[mx.array, tuple[mx.array, mx.array]]: ...


@overload
def stack(
    layers: Sequence[GRU | RNN | nn.GRU | nn.RNN],
    x: mx.array,
    state: mx.array | None = None,
    *,
    reverse: Sequence[GRU | RNN | nn.GRU | nn.RNN] | None = None,
    between: Between | None = None,
    merge: str = "concat",
    groups: int = 1,
    lengths: Lengths = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
) -> tuple[mx.array, mx.array]: ...


@overload
def stack(
    layers: Sequence[Any],
    x: mx.array,
    state: Any = None,
    *,
    reverse: Sequence[Any] | None = None,
    between: Between | None = None,
    merge: str = "concat",
    groups: int = 1,
    lengths: Lengths = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
) -> tuple[mx.array, Any]: ...


def stack(
    layers: Sequence[Any],
    x: mx.array,
    state: Any = None,
    *,
    reverse: Sequence[Any] | None = None,
    between: Between | None = None,
    merge: str = "concat",
    groups: int = 1,
    lengths: Lengths = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
) -> tuple[mx.array, Any]:
    """Run a stack of recurrent layers, in one or both directions, from their parameters. Sizes: B sequences, T time
    steps, D features, H hidden units.

    The layers may be those of `mlx.nn`, of `mlx_lstm.nn`, or any objects that have such parameters. Use this function
    for models that hold their layers in lists or in attributes: the layers stay where they are, so the names in a
    weight file do not change. The result equals a loop that calls each layer with the output of the layer before. With
    `reverse` the n-th layers of both lists read the same input, and their outputs are concatenated: forward first,
    reversed second.

    Only the attributes of an object are read; its own `__call__` never runs. So a subclass of a layer of `mlx.nn` or
    `mlx_lstm` that redefines `__call__` or `step` is an error. An attribute that changes the formula is an error, too,
    such as `forget_bias=1.0`; to run the usual formula, pass a dict of the parameters. An LSTM has `Wx` [4H, D], `Wh`
    [4H, H] and maybe `bias` [4H], gate order i, f, g, o; a GRU `Wx` [3H, D], `Wh` [3H, H] and maybe `b` [3H], `bhn`
    [H], gate order r, z, n; a plain RNN `Wxh` [H, D], `Whh` [H, H], maybe `bias` [H] and `nonlinearity`. Arrays may
    also have any names that `mlx_lstm.convert.from_names` reads, in the gate order of their format: torch's
    `weight_ih_l0`, Keras' `kernel`, two biases `bias_ih` and `bias_hh`, both directions in one object as `Wx_forward`
    and `Wx_backward`. A dict with these arrays is accepted in place of an object. Further arrays, lists of arrays or
    modules are an error. A quantized layer of `mlx_lstm.nn` is run with its quantized weights. `Pointwise` layers run
    with their own cells, which may differ but must all have the same number of states, and take no further inputs at a
    step; one with `reverse=True` belongs into `reverse`.

    Args:
        layers (list): K layers, all of one kind and one H; the first one reads x. From layer 1 on D is H, or 2H with
            both directions concatenated. The list may be empty if `reverse` is not. One object may have the arrays of
            several layers; it then stands for these layers. One object may also have the arrays of both directions;
            then `reverse` must be `None`.
        x (array): [B, T, D]. As in the layers, there may be several batch axes, or none.
        state (optional): a tuple (h_0, c_0) for LSTMs, a tuple of all states, h_0 first, for `Pointwise` layers with
            several, else h_0; each [K, B, H], with both directions [2K, B, H], with groups G times as many. Layers come
            in order, in each layer its groups, in each group the forward direction first. Default: zeros.
        reverse (list, optional): K layers that read their input from its end to its start.
        between (callable, optional): `between(n, x)` gets the output of layer n and returns the input of layer n + 1,
            [B, T, D] with D features as that layer reads, for n = 0..K-2: dropout, norms, residual connections.
        merge (str): the output of both directions of a layer is their concatenation, `"concat"`, or their sum, `"sum"`,
            [B, T, H]. Default: `"concat"`.
        groups (int): G, the number of layers side by side, as in a grouped GRU: each reads its own G-th part of the
            features, and their outputs are concatenated. `layers` then holds K G layers: first the G groups of layer 0,
            then those of layer 1. `between(n, x)` gets and returns the features of all groups. Default: 1.
        lengths (integer array or list, optional): [B], the number of steps of each sequence, in 0..T. Past the end of
            sequence n its output is 0 and its input is never read; its last state is the state after step `lengths[n] -
            1`, where the reversed layers start. The last state of a reversed layer is the state at step 0.
        keep (array, optional): [B, T], a factor on the states of every layer before each step, as in `mlx_lstm.lstm`: 0
            where an episode begins. The reversed layers run through the factors in reverse.
        hold (array or list, optional): [B, T], true at steps that leave the states of every layer unchanged, as in
            `mlx_lstm.lstm`.
        checkpoint_every (int or str, optional): in training, save the states of every n-th step only, as in
            `mlx_lstm.lstm`. Default: the layer's own option if it is a layer of `mlx_lstm.nn`, else `None`.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: the layer's own option if it is a layer
            of `mlx_lstm.nn`, else the best for the stream's device.

    Returns:
        tuple: the output [B, T, H], or [B, T, 2H] with both directions concatenated, with groups G times as wide; and
        the last states, shaped as `state`: (h_n, c_n) for LSTMs, h_n and the others for `Pointwise`, else h_n. Their
        dtype is that to which x, states and parameters promote.

    Raises:
        ValueError: an argument breaks a rule.

    Example:
        >>> import mlx.core as mx
        >>> import mlx.nn
        >>> from mlx_lstm.nn import stack
        >>> ahead, back = ([mlx.nn.LSTM(3, 4), mlx.nn.LSTM(8, 4)] for _ in range(2))
        >>> output, (h_n, c_n) = stack(ahead, mx.ones((5, 10, 3)), reverse=back, lengths=[10, 2, 7, 1, 10])
        >>> output.shape, h_n.shape
        ((5, 10, 8), (4, 5, 4))
        >>> dropout = mlx.nn.Dropout(0.5)
        >>> output, _ = stack(ahead, mx.ones((5, 10, 3)), reverse=back, between=lambda n, x: dropout(x))
        >>> groups = [mlx.nn.GRU(3, 4), mlx.nn.GRU(3, 4)]  # features 0..2 and 3..5 of x
        >>> stack(groups, mx.ones((5, 10, 6)), groups=2)[0].shape
        (5, 10, 8)
    """
    check_option(OP, "merge", merge, ("concat", "sum"))
    check_integer(OP, "groups", groups, least=1)
    if between is not None and not callable(between):
        fail(OP, "between must be a function, between(n, x) -> x,", type(between).__name__)
    every, engine = check_every(OP, checkpoint_every), check_engine(OP, engine)
    sides = read_sides(layers, [] if reverse is None else reverse, computes_now(engine))
    depths = read_depths(sides, groups, engine, merge, between is not None)
    # one: the first layer; all other layers have the same H and P. rows: the first axis of a state, one entry for each
    # direction of each layer; sides[0] lists all layers of one direction, with all their groups.
    one, directions, rows = depths[0][0], len(sides), len(sides) * len(sides[0])
    check_x(x, groups * one.arrays["Wx"].shape[1])
    batch, T = x.shape[:-2], x.shape[-2]
    # shapes: {name of a state: its shape}. h, the first state, has the width P, all others H.
    shapes = {name: (rows, *batch, one.H if n else one.P) for n, name in enumerate(state_names(one.cell))}
    first = first_states(state, shapes)
    parameters = [array for depth in depths for group in depth for array in group.arrays.values()]
    dtype = common_dtype([x, *first.values(), *parameters])
    if 0 in batch:
        states = [mx.zeros(shape, dtype) for shape in shapes.values()]
        width = groups * one.P * (directions if merge == "concat" else 1)
        return mx.zeros((*batch, T, width), dtype), tuple(states) if len(states) > 1 else states[0]
    # `Call` takes exactly one batch axis: reshape x to [B, T, D], and each layer's states to [B, H] or [B, 2H].
    # run_small(function, array) applies a reshape: by NumPy if the call computes immediately on the CPU, because this
    # is faster there, else by MLX.
    run_small = by_numpy if computes_now(one.engine) else by_mlx
    is_flat = len(batch) == 1
    x = x if is_flat else run_small(methodcaller("reshape", (-1, *x.shape[-2:])), x)
    steps = whole_steps(OP, keep, hold, (*batch, T), "[B, T]")
    steps = {name: array.reshape(-1, T) for name, array in steps.items()}
    # options: the options of `Call` that all layers share. If the list `layers` is empty, only the reversed layers run.
    options = {"reverse": not layers, "bidirectional": directions == 2, "hold": steps.pop("hold", None)}
    options |= {"lengths": whole_lengths(OP, lengths, x.shape[0], T), "lengths_checked": True, "batch_first": True}
    # starts: {name of a state: the first states of each layer}. last: the last states of each layer that has run.
    starts = {name: run_small(partial(split_states, directions), array) for name, array in first.items()}
    last: list[Arrays] = []
    for n, depth in enumerate(depths):
        outputs = []
        for group, own_x in zip(depth, split_apart(x, groups, axis=-1) if groups > 1 else [x], strict=True):
            # len(last): how many layers have run, which is the index of this layer.
            own_states = {name: array[len(last)] for name, array in starts.items()}
            options["checkpoint_every"] = group.every if every is None else every
            found = run_layer(group, in_dtype(group.arrays | {"x": own_x} | own_states, dtype), steps, options)
            last.append({name: found[f"{name}T"] for name in shapes})
            # found["h"] has both directions side by side, which is the result for merge="concat".
            sums = directions == 2 and merge == "sum"
            outputs.append(half(found["h"], 0) + half(found["h"], 1) if sums else found["h"])
        x = mx.concatenate(outputs, axis=-1) if groups > 1 else outputs[0]
        if between is not None and n < len(depths) - 1:
            x = call_between(between, n, x, (*batch, T), groups * depths[n + 1][0].arrays["Wx"].shape[1])
    # whole: {name of a state: function that joins the last states of all layers}.
    whole = {name: partial(join_states, directions, shape) for name, shape in shapes.items()}
    states = [run_small(whole[name], *(state[name] for state in last)) for name in shapes]
    x = x if is_flat else run_small(methodcaller("reshape", (*batch, T, -1)), x)
    return x, tuple(states) if len(states) > 1 else states[0]


def check_x(x: object, D: int) -> None:
    """Check that x is [..., T, D], with at least one step. T: steps, D: features; "...": the batch axes."""
    if not isinstance(x, mx.array):
        fail(OP, f"x must be an mlx.core.array{instead_of(x, 'x')}", type(x).__name__)
    if x.dtype == mx.complex64:
        fail(OP, "x must be real", x.dtype)
    if x.ndim < 2 or x.shape[-1] != D or 0 in x.shape[-2:]:
        fail(OP, f"x must have shape [B, T, D = {D}] with at least one step", f"shape {list(x.shape)}")


def state_names(cell: Cell | OwnCell) -> list[str]:
    """Return the names of the states of a layer: h and, for an LSTM, c, or h, s1, s2, ... for a cell that the user
    wrote."""
    if isinstance(cell, OwnCell):
        return ["h", *(f"s{n}" for n in range(1, cell.states))]
    return ["h", "c"][: 1 + cell.carried]


def run_layer(layer: "StackedLayer", arrays: Arrays, steps: Arrays, options: dict[str, Any]) -> dict[str, Any]:
    """Run one layer, in one or both directions. If several layers stand side by side at one place of the stack
    (groups), `layer` is one of them. Return the outputs by name, such as "h" and "hT".

    arrays: x [B, T, D], the parameters and the first states, by the names of `state_names`. steps: the option `keep`
    [B, T] if there is one. options: the other options of a `Call`, such as lengths. B, T, D: sequences, steps,
    features."""
    names = state_names(layer.cell)
    states = {name: arrays.pop(name) for name in names if name in arrays}
    if isinstance(layer.cell, OwnCell):
        return run_own_layer(layer, layer.cell, arrays, states, steps, options)
    arrays |= {f"{name}0": state for name, state in states.items()} | steps
    call = Call(layer.cell, engine=layer.engine, op=OP, **options)
    outputs, choice = call.forward(arrays, return_gates=False, training=layer.training)
    # owners: the layers of `mlx_lstm.nn` that hold these arrays; their attribute `engine_used` returns this choice.
    for owner in layer.owners:
        vars(owner)["_engine_used"] = choice
    return outputs


def run_own_layer(
    layer: "StackedLayer", own: OwnCell, arrays: Arrays, states: Arrays, steps: Arrays, options: dict[str, Any]
) -> dict[str, Any]:
    """Run a layer whose cell the user wrote, in one or both directions. Return h and the last states by name.

    A `Call` of such a cell takes arrays with the time first, and all states except h joined in one array. The arguments
    here have the batch first, and one array per state. own: the user's cell. states: {name: first state}; a missing
    state is zeros. steps: arrays with values for each step, such as `keep` [B, T]. options: the other options of a
    `Call`, such as lengths. B, T: sequences, steps."""
    x, directions = mx.swapaxes(arrays["x"], 0, 1), 2 if options["bidirectional"] else 1
    zeros = mx.zeros((x.shape[1], directions * layer.H), x.dtype)
    h0, *others = [states.get(name, zeros) for name in state_names(own)]
    in_time = {name: mx.swapaxes(array, 0, 1) for name, array in steps.items()}
    hold = options["hold"]
    options = options | {"batch_first": False, "hold": None if hold is None else mx.swapaxes(hold, 0, 1)}
    others_joined = {"c0": side_by_side(others, directions)} if others else {}  # c0: all states besides h in one array
    given: dict[str, Any] = arrays | {"x": x, "h0": h0} | others_joined | in_time
    call = Call(own.traced(x.shape[1], layer.H, x.dtype), engine=layer.engine, op=OP, **options)
    outputs, _ = call.forward(given, return_gates=False, training=layer.training)
    # last: pairs (name, last state) for all states except h; the names are s1, s2, ...
    last = zip(state_names(own)[1:], apart_again(outputs.get("cT"), len(others), directions), strict=True)
    return {"h": mx.swapaxes(outputs["h"], 0, 1), "hT": outputs["hT"]} | {f"{name}T": array for name, array in last}


def call_between(between: Between, n: int, x: mx.array, axes: tuple[int, ...], D: int) -> mx.array:
    """Call the caller's function `between` with the output x [B, T, .] of layer n. Return its result, which is the
    input of the next layer, as [B, T, D], where D is the number of features that this layer reads. B, T: sequences,
    steps.

    axes: the sizes of the axes before the features in the arrays that the caller passed, (T,) without a batch or (B,
    T). The function gets and returns arrays with these axes.
    """
    result: object = between(n, x.reshape(*axes, -1))
    if not isinstance(result, mx.array) or result.shape != (*axes, D) or not mx.issubdtype(result.dtype, mx.floating):
        kind = f"{result.dtype}, shape {list(result.shape)}" if isinstance(result, mx.array) else type(result).__name__
        fail(OP, f"between({n}, x) must return floats of shape {[*axes, D]}, which layer {n + 1} reads,", kind)
    return result.reshape(-1, *result.shape[-2:])


class StackedLayer(NamedTuple):
    """One direction of one layer, or both directions joined, as it was read from the object that the caller passed.

    name: what error texts call the object that the caller passed, such as "layers[0]". arrays: the weights and biases
    by the argument names of `mlx_lstm.lstm`. titles: what error texts call these arrays, by the same names. P, H: the
    number of features of h (H, or the width of the projection), and of units. engine, every: the options `engine` and
    `checkpoint_every` of a layer of `mlx_lstm.nn`. owners: the layers of `mlx_lstm.nn` that hold the arrays; they note
    which engine ran.
    """

    name: str
    cell: Cell | OwnCell
    arrays: dict[str, Any]
    titles: dict[str, str]
    training: bool
    P: int
    H: int
    engine: Engine | None = None
    every: int | str | None = None
    owners: tuple[Layer, ...] = ()


def read_depths(
    sides: list[list[StackedLayer]], groups: int, engine: Engine | None, merge: str, any_width: bool
) -> Depths:
    """Check that each layer fits the layer before, and that both directions of a layer are alike. Return one entry
    per layer, in which the arrays of both directions are joined. An entry is a list of the layer's groups, which run
    side by side on parts of the features. Without groups it has one element.

    sides: for each direction a list of all layers and groups, the forward direction first. groups: the number of
    groups of a layer. engine: if it is not None, it replaces the engines of the layers. merge: "concat" or "sum", which
    decides how wide a layer's output is. any_width: whether the layers after the first may read any number of
    features, because the caller's function `between` makes them.
    """
    first, count = sides[0][0], len(sides[0])  # count: the layers of one direction, all groups included
    if count % groups:
        fail(OP, f"layers must hold {groups} layers for each of its depths, as groups={groups},", f"{count} layers")
    depths: list[StackedLayer] = []
    for n, pair in enumerate(zip(*sides, strict=True)):
        one = pair[0]  # the layer's forward direction, with which the other direction must agree
        # D: the number of features that the layer must read.
        if n < groups:  # a layer of the first depth reads x
            D = first.arrays["Wx"].shape[1]
        elif not any_width:  # a later layer reads the output of the depth before
            D = first.P * (len(sides) if merge == "concat" else 1)
        else:  # a later layer reads the result of `between`: any D, but the same D in all groups of a depth
            D = (depths[n // groups * groups] if n % groups else one).arrays["Wx"].shape[1]
        for other in pair:
            if other.cell.op != first.cell.op:
                fail(OP, f"{other.name} must be of the kind of the first layer, {first.cell.op},", other.cell.op)
            if isinstance(first.cell, OwnCell) and len(state_names(other.cell)) != first.cell.states:
                rule = f"{other.name} must have as many states as the first layer, {first.cell.states},"
                fail(OP, rule, len(state_names(other.cell)))
            if other.cell != one.cell or other.arrays.keys() != one.arrays.keys():
                what = "cell" if isinstance(other.cell, OwnCell) else "nonlinearity"
                rule = f"{other.name} must have the {what} and the parameters of {one.name}"
                fail(OP, rule, ", ".join([*options_apart(other.cell, one.cell), *other.arrays]))
            if packings(other) != packings(one):
                fail(OP, f"{other.name} must be quantized as {one.name}", packings(other) or "float weights")
            check_parameters(other, D, first)
        # word: the name of the engine that the user forces, or None. arrays: the parameters of each direction.
        word, arrays = one.engine if engine is None else engine, [other.arrays for other in pair]
        # The joined arrays of two directions are cached while the parameters are the same.
        both = derived(computes_now(word), OP, arrays, join) if len(pair) == 2 else one.arrays
        training, owners = all(other.training for other in pair), [layer for other in pair for layer in other.owners]
        depths.append(one._replace(arrays=both, training=training, engine=word, owners=tuple(owners)))
    return [depths[n : n + groups] for n in range(0, count, groups)]


def read_sides(
    layers: Sequence[Any], reverse: Sequence[Any], now: bool, may_drop: bool = False
) -> list[list[StackedLayer]]:
    """Read the parameters of all layers. Return one list of layers per direction, the forward direction first. now: the
    call computes immediately, so converted arrays may come from a cache. may_drop: accept layers with dropout in
    training mode, because the caller applies no dropout."""
    sides: dict[str, list[StackedLayer]] = {"layers": [], "reverse": []}  # the layers of each direction
    for name, side in (("layers", layers), ("reverse", reverse)):
        if not isinstance(side, (list, tuple)):
            fail(OP, f"{name} must be a list of layers", type(side).__name__)
        for n, layer in enumerate(side):
            # ways: the directions of one layer, one or both. An object with both directions adds to both lists in
            # `sides`, so the caller must not pass `reverse`, too.
            for ways in read(f"{name}[{n}]", layer, now, may_drop):
                if len(ways) == 2 and reverse:
                    fail(OP, f"{name}[{n}] must have one direction, as there is reverse,", "an object with both")
                for where, way in zip((name,) if len(ways) == 1 else sides, ways, strict=True):
                    sides[where].append(way)
    ahead, back = sides.values()
    if not (ahead or back):
        fail(OP, "layers must hold at least one layer", "none")
    if ahead and back and len(ahead) != len(back):
        if not reverse:
            fail(OP, "layers must all have one direction, or all both,", f"{len(back)} of {len(ahead)} with both")
        fail(OP, f"reverse must hold as many layers as layers, {len(ahead)},", len(back))
    return [side for side in (ahead, back) if side]


def read(name: str, layer: Any, now: bool, may_drop: bool) -> Depths:
    """Return the layers whose arrays an object holds, each as a list of its directions. Most objects hold one layer.
    The names and shapes of the arrays tell the kind of layer: LSTM, GRU or RNN. name: what error texts call the object.
    now: the call computes immediately, so converted arrays may come from a cache. may_drop: accept a layer with dropout
    in training mode, because the caller applies no dropout."""
    found = describe(OP, name, layer)
    if isinstance(layer, Pointwise):
        return [read_own(name, layer)]
    if found.drops and not may_drop:
        rule = f"{name} must have dropout 0 or be in evaluation mode, as stack drops nothing between its layers,"
        fail(OP, rule, f"dropout={layer.dropout}")
    held = found.arrays
    for key, value in (held | found.strays).items() if not found.others else ():
        if not isinstance(value, mx.array):  # for example an array of NumPy, which `from_names` would take
            check_array(OP, f"{name}.{key}", value, shape=None)  # raises the error
    if isinstance(layer, QuantizedLayer):  # each weight as one `Quantized` object instead of three arrays
        held = {key: layer._parameter(key) for key in held if not key.endswith(("_scales", "_biases"))}
    for kind in KINDS if not found.others else ():  # others: modules and lists of arrays in the object
        depth = read_named(name, kind, layer, held, found)
        if depth is not None:
            return [[depth]]
    act = found.nonlinearity
    try:
        if not held or found.others:
            raise ValueError("Modules and lists of arrays are not read.")
        # `derived` caches the converted arrays under the key in its second argument while the parameters are the same.
        weights = derived(now, f"{OP} {act}", held, partial(in_arguments, act))
    except ValueError as error:
        # kinds, other: parts of the error text, what an object may have. why: the error text of `from_names`.
        kinds = "Wx [4H, D], Wh [4H, H], bias, or Wx [3H, D], Wh [3H, H], b, bhn, or Wxh [H, D], Whh [H, H], bias"
        other = "or arrays that convert.from_names reads, and no other array or module"
        why = str(error).removesuffix(".").replace("; got", ", got")
        fail(OP, f"{name} must hold {kinds}, {other}", f"{found.shapes} ({why})" if found.shapes else found.shapes)
    check_nonlinearity(name, weights.cell, act)
    sizes = weights.proj_size or weights.hidden_size, weights.hidden_size
    # {}: no titles; error texts then say "Wx of layers[0]". each: the arrays of each direction of a layer.
    return [
        [StackedLayer(name, weights.cell, way, {}, found.training, *sizes) for way in each] for each in weights.layers
    ]


def read_named(
    name: str, kind: type[Layer], layer: Any, held: dict[str, Any], found: Description
) -> StackedLayer | None:
    """Read an object whose arrays have the names and shapes of the layer `kind` of `mlx.nn`. Return None if they have
    other names or shapes. name: what error texts call the object `layer`. held: its arrays; a quantized weight is a
    `Quantized`. found: what `describe` has found out about the object, such as its nonlinearity."""
    # Wx, Wh: the shapes of both matrices. kind._names: {name of a parameter: argument}, the matrices first.
    Wx, Wh = (list(held[key].shape) if key in held else [] for key in list(kind._names)[:2])
    norms = layer._norm_arrays() if isinstance(layer, Layer) else {}  # the parameters of layer normalisation
    held = {key: array for key, array in held.items() if key not in norms}
    if not (held.keys() <= kind._names.keys() and len(Wx) == len(Wh) == 2 and Wx[0] == kind._cell_class.gates * Wh[1]):
        return None
    # If bhn is as long as all gates, the object is not in the format of mlx.nn, where bhn is [H]: some formats call
    # a GRU's whole second bias [3H] bhn. Then `from_names` reads the arrays.
    if kind is GRU and "bhn" in held and list(held["bhn"].shape) == Wx[:1]:
        return None
    arrays = {argument: held[key] for key, argument in kind._names.items() if key in held}
    titles = {argument: f"{name}.{key}" for key, argument in kind._names.items()}
    cell: Cell = RNNCell(found.nonlinearity or "tanh") if kind is RNN else kind._cell_class()
    if isinstance(layer, Layer):
        cell, arrays = cell._replace(norm=layer._norm), arrays | norms
    check_nonlinearity(name, cell, found.nonlinearity)
    # own: the last three fields of a `StackedLayer`, engine, every and owners; layers of `mlx.nn` have none.
    own: Any = (layer.engine, layer.checkpoint_every, (layer,)) if isinstance(layer, Layer) else ()
    return StackedLayer(name, cell, arrays, titles, found.training, Wh[1], Wh[0] // cell.gates, *own)


def check_nonlinearity(name: str, cell: Cell, act: str | None) -> None:
    """Check the nonlinearity `act` of the object that the error text calls `name`; None if the object has none. A plain
    RNN may have any known activation, all other cells only tanh."""
    allowed = tuple(ACTIVATIONS) if isinstance(cell, RNNCell) else ("tanh",)
    if act is not None:
        check_option(OP, f"{name}.nonlinearity", act, allowed)


def read_own(name: str, layer: Pointwise) -> list[StackedLayer]:
    """Return the directions of a layer whose cell the user wrote. name: what error texts call it, such as
    "layers[0]"."""
    both, cell = layer._directions == 2, layer._own_cell
    # The name tells where the user passed the layer: "layers[0]" or "reverse[0]".
    if layer.reverse and not name.startswith("reverse"):
        fail(OP, f"{name} must run forward (pass layers that run in reverse as reverse=)", "reverse=True")
    arrays = layer._by_argument()
    titles = {key: f"{name}.{'bias' if key == 'b' else key}" for key in arrays}
    H = layer.hidden_size  # P is H, as there is no projection
    depth = StackedLayer(name, cell, arrays, titles, layer.training, H, H, layer.engine, layer.checkpoint_every)
    return [depth._replace(arrays=part(arrays, d, projects=True)) for d in range(2)] if both else [depth]


def in_arguments(act: str | None, arrays: Arrays) -> Weights:
    """Convert the arrays of a stack, by the names of any format, to the arguments of `mlx_lstm.lstm`, `gru` or `rnn` in
    each layer and direction. act: the nonlinearity of a plain RNN, or None."""
    weights = from_names(arrays, nonlinearity=act)
    return weights.map(partial(as_arguments, weights.cell))


def as_arguments(cell: Cell, arrays: Arrays) -> Arrays:
    """Convert one direction's arrays of `Weights` to the arguments of `mlx_lstm.lstm`, `gru` or `rnn`. Two biases are
    added to one, unless a GRU needs both. MLX differentiates the sum, so both biases get a gradient."""
    biases = {name: arrays[name] for name in ("bx", "bh") if name in arrays}  # of the products x Wx^T and h Wh^T
    others = {name: array for name, array in arrays.items() if name not in biases}
    if not biases:
        return others
    bx, bh = (biases.get(name, mx.zeros_like(next(iter(biases.values())))) for name in ("bx", "bh"))
    # Only a GRU with reset "after" needs both biases. The cells of an LSTM and a plain RNN have reset "".
    return others | join_biases(bx, bh, gru=cell.reset == "after")


def packings(layer: StackedLayer) -> dict[str, tuple[int | str, ...]]:
    """Return for each quantized weight of a layer its group size, bits and mode, by the weight's name."""
    return {name: tuple(array.packing) for name, array in layer.arrays.items() if isinstance(array, Quantized)}


def options_apart(cell: Any, other: Any) -> list[str]:
    """Return the options of a cell that have other values in another cell of the same class, as texts for an error."""
    texts: list[str] = []
    for name, value in cell._asdict().items():
        if value != getattr(other, name):
            # The cell's field `norm` is the layer's option `layer_norm`: show it as the `Norm` that a user writes,
            # without arrays ({}).
            option, told = ("layer_norm", value and norm_given(value, {})) if name == "norm" else (name, value)
            texts.append(f"{option}={told!r}")
    return texts


def check_parameters(layer: StackedLayer, D: int, first: StackedLayer) -> None:
    """Check the shapes of the parameters of `layer`, which reads D features. All its other sizes must equal the sizes
    of the layer `first`. layer.titles: what error texts call the parameters."""
    params = layer.cell.params if isinstance(layer.cell, OwnCell) else 0
    shapes = weight_shapes(layer.cell.gates, (D, first.H, first.P), params=params)
    rule = f", as a layer has the H of the first, {first.H}, and reads the one before,"
    why = "" if layer.name == "layers[0]" else rule
    for argument, array in layer.arrays.items():
        title = layer.titles.get(argument, f"{argument} of {layer.name}")
        # A quantized weight is checked as the float matrix that it stands for.
        array = ArraySpec(array.shape, mx.float32) if isinstance(array, Quantized) else array
        check_array(OP, title, array, shapes[argument], why=why)


def first_states(state: Any, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Return the initial states that the caller passed, as a dict by name, after checking their shapes. A state that is
    missing is zeros. shapes: the shape of each state by name."""
    if len(shapes) == 1 or state is None:  # a single state comes without a tuple
        state = [state] * len(shapes)
    elif not isinstance(state, (tuple, list)) or len(state) != len(shapes):
        got = f"{type(state).__name__}{f' of {len(state)}' if isinstance(state, (tuple, list)) else ''}"
        fail(OP, f"state must be a tuple ({', '.join(f'{name}_0' for name in shapes)})", got)
    states = {name: array for name, array in zip(shapes, state, strict=True) if array is not None}
    for name, array in states.items():
        check_array(OP, f"{name}_0", array, shapes[name])
    return states
