"""Run lists of layers as one layer; each layer has the parameters of a recurrent layer of `mlx.nn`."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, overload

import mlx.core as mx
import mlx.nn as nn

from ..checks import ArraySpec, check_array, check_every, check_option, fail, instead_of
from ..engines.at_once import by_mlx, by_numpy, computes_now, derived
from ..engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from ..engines.choice import Engine, check_engine
from ..engines.directions import half, join
from ..engines.packing import Quantized
from ..engines.problem import Arrays
from ..recurrence import (
    Call,
    Hold,
    Lengths,
    QuantizedLayer,
    common_dtype,
    in_dtype,
    join_states,
    split_states,
    whole_lengths,
    whole_steps,
)
from ._layers import GRU, LSTM, RNN, Layer, activation_of

OP = "nn.stack"
KINDS: tuple[type[Layer], ...] = (LSTM, GRU, RNN)

Between = Callable[[int, mx.array], mx.array]
States = tuple[mx.array | None, mx.array | None]


@overload
def stack(
    layers: Sequence[LSTM | nn.LSTM],
    x: mx.array,
    state: States | None = None,
    *,
    reverse: Sequence[LSTM | nn.LSTM] | None = None,
    between: Between | None = None,
    merge: str = "concat",
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
    lengths: Lengths = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
) -> tuple[mx.array, Any]:
    """Run a stack of recurrent layers, in one or both directions, from their parameters.

    The layers may be those of `mlx.nn`, of `mlx_lstm.nn`, or any objects that have such parameters. Use it for models
    that hold their layers in lists or in attributes: the layers stay where they are, so the names in a weight file do
    not change. The result equals a loop that calls each layer with the output of the layer before. With `reverse` the
    two layers of a depth read the same input, and their outputs are concatenated: forward first, reversed second.

    Only the attributes of an object are read; its own `__call__` never runs. An LSTM has `Wx` [4H, D], `Wh` [4H, H] and
    maybe `bias` [4H], gate order i, f, g, o; a GRU `Wx` [3H, D], `Wh` [3H, H] and maybe `b` [3H], `bhn` [H], gate order
    r, z, n; a plain RNN `Wxh` [H, D], `Whh` [H, H], maybe `bias` [H] and `nonlinearity`. An object with other arrays or
    modules is an error. A dict with such arrays is accepted, too. A quantized layer of `mlx_lstm.nn` is run with its
    quantized weights.

    Args:
        layers (list): K layers, all of one kind and one H; the first one reads x. From layer 1 on D is H, or 2H with
            both directions concatenated. The list may be empty if `reverse` is not.
        x (array): [B, T, D]; as in the layers, any number of batch axes, none included.
        state (optional): a tuple (h_0, c_0) for LSTMs, else h_0; each [K, B, H], with both directions [2K, B, H].
            Layers come in order; in each layer the forward direction comes first. Default: zeros.
        reverse (list, optional): K layers that read their input from its end to its start.
        between (callable, optional): `between(n, x)` gets the output of layer n and returns the input of layer n + 1,
            [B, T, D] with D features as that layer reads, for n = 0..K-2: dropout, norms, residual connections.
        merge (str): the output of both directions of a layer is their concatenation, `"concat"`, or their sum, `"sum"`,
            [B, T, H]. Default: `"concat"`.
        lengths (integer array or list, optional): [B], each in 0..T. Past its length an item's output is 0 and its
            input is never read; its last state is the state after its last step (`lengths[n] - 1`), where the reversed
            layers start. The last state of a reversed layer is the state at step 0.
        keep (array, optional): [B, T], a factor on the states of every layer before each step, in the layer's own
            order, as in `mlx_lstm.lstm`: 0 where an episode begins.
        hold (array or list, optional): [B, T], steps that leave the states of every layer as they are, as in
            `mlx_lstm.lstm`.
        checkpoint_every (int or str, optional): in training, save the states of every K-th step only, as in
            `mlx_lstm.lstm`. Default: the layer's own option if it is a layer of `mlx_lstm.nn`, else `None`.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: the layer's own option if it is a layer
            of `mlx_lstm.nn`, else the best for the stream's device.

    Returns:
        tuple: the output [B, T, H], or [B, T, 2H] with both directions concatenated, and the last states, shaped as
        `state`: (h_n, c_n) for LSTMs, else h_n; in the dtype to which x, states and parameters promote.

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
    """
    check_option(OP, "merge", merge, ("concat", "sum"))
    if between is not None and not callable(between):
        fail(OP, "between must be a function, between(n, x) -> x,", type(between).__name__)
    every, engine = check_every(OP, checkpoint_every), check_engine(OP, engine)
    depths = read_depths(layers, [] if reverse is None else reverse, engine, merge, between is not None)
    cell, D = depths[0].cell, depths[0].arrays["Wx"].shape[1]
    K, directions, H = len(depths), (2 if layers and reverse else 1), depths[0].arrays["Wh"].shape[-1]
    check_x(x, D)
    batch, T = x.shape[:-2], x.shape[-2]
    names = ("h", "c") if isinstance(cell, LSTMCell) else ("h",)
    first = first_states(state, names, (directions * K, *batch, H))
    dtype = common_dtype([x, *first.values(), *(array for depth in depths for array in depth.arrays.values())])
    sums = directions == 2 and merge == "sum"
    width = directions * H if merge == "concat" else H
    if 0 in batch:
        states = [mx.zeros((directions * K, *batch, H), dtype) for _ in names]
        return mx.zeros((*batch, T, width), dtype), tuple(states) if len(states) == 2 else states[0]
    # The recurrence has one batch axis: x becomes [B, T, D], and the states of a layer become [B, H] or [B, 2H].
    small = by_numpy if computes_now(depths[0].engine) else by_mlx
    is_flat = len(batch) == 1
    x = x if is_flat else small(methodcaller("reshape", (-1, T, D)), x)
    steps = whole_steps(OP, keep, hold, (*batch, T), "[B, T]")
    steps = {name: array.reshape(-1, T) for name, array in steps.items()}
    options = {"reverse": not layers, "bidirectional": directions == 2, "hold": steps.pop("hold", None)}
    options |= {"lengths": whole_lengths(OP, lengths, x.shape[0], T), "lengths_checked": True, "batch_first": True}
    rows = {name: small(partial(split_states, directions), array) for name, array in first.items()}
    last: list[dict[str, mx.array]] = []
    for n, depth in enumerate(depths):
        arrays = depth.arrays | {"x": x} | {f"{name}0": array[n] for name, array in rows.items()}
        options |= {"checkpoint_every": depth.every if every is None else every, "engine": depth.engine}
        call = Call(depth.cell, **options)
        outputs, choice = call.forward(in_dtype(arrays, dtype) | steps, return_gates=False, training=depth.training)
        last.append({name: outputs[f"{name}T"] for name in names})
        for side in (layers, reverse):
            if side and isinstance(side[n], Layer):
                vars(side[n])["_engine_used"] = choice
        x = half(outputs["h"], 0) + half(outputs["h"], 1) if sums else outputs["h"]
        if between is not None and n < K - 1:
            x = call_between(between, n, x, (*batch, T), depths[n + 1].arrays["Wx"].shape[1])
    whole = partial(join_states, directions, (-1, *batch, H))
    states = [small(whole, *(state[name] for state in last)) for name in names]
    x = x if is_flat else small(methodcaller("reshape", (*batch, T, -1)), x)
    return x, tuple(states) if len(states) == 2 else states[0]


def check_x(x: object, D: int) -> None:
    """Check that x is [..., T, D], with at least one step."""
    if not isinstance(x, mx.array):
        fail(OP, f"x must be an mlx.core.array{instead_of(x)}", type(x).__name__)
    if x.dtype == mx.complex64:
        fail(OP, "x must be real", x.dtype)
    if x.ndim < 2 or x.shape[-1] != D or 0 in x.shape[-2:]:
        fail(OP, f"x must have shape [B, T, D = {D}] with at least one step", f"shape {list(x.shape)}")


def call_between(between: Between, n: int, x: mx.array, axes: tuple[int, ...], D: int) -> mx.array:
    """Call the caller's function `between` with the output x of layer n. Return its result, which is the input of
    the next layer, as [B, T, D]. axes: the sizes of all axes of x but the last."""
    result: object = between(n, x.reshape(*axes, -1))
    if not isinstance(result, mx.array) or result.shape != (*axes, D) or not mx.issubdtype(result.dtype, mx.floating):
        kind = f"{result.dtype}, shape {list(result.shape)}" if isinstance(result, mx.array) else type(result).__name__
        fail(OP, f"between({n}, x) must return floats of shape {[*axes, D]}, which layers[{n + 1}] reads,", kind)
    return result.reshape(-1, *result.shape[-2:])


class Depth(NamedTuple):
    """One layer, or the two directions of one layer joined; the arrays have the names of the recurrence's arguments."""

    kind: type[Layer]
    cell: Cell
    arrays: dict[str, Any]
    training: bool
    engine: Engine | None
    every: int | str | None


def read_depths(
    layers: Sequence[Any], reverse: Sequence[Any], engine: Engine | None, merge: str, any_width: bool
) -> list[Depth]:
    """Read the parameters of all layers, and check that each layer fits the layer before.

    `engine` replaces the engines of the layers; with `any_width` the layers from 1 on may read any number of
    features.
    """
    for name, side in (("layers", layers), ("reverse", reverse)):
        if not isinstance(side, (list, tuple)):
            fail(OP, f"{name} must be a list of layers", type(side).__name__)
    if not (layers or reverse):
        fail(OP, "layers must hold at least one layer", "none")
    if layers and reverse and len(layers) != len(reverse):
        fail(OP, f"reverse must hold as many layers as layers, {len(layers)},", len(reverse))
    sides = [(name, side) for name, side in (("layers", layers), ("reverse", reverse)) if side]
    depths: list[Depth] = []
    for n in range(len(sides[0][1])):
        pair = [read(f"{name}[{n}]", side[n]) for name, side in sides]
        one, first = pair[0], (depths or pair)[0]
        H = first.arrays["Wh"].shape[-1]
        D = H * (len(sides) if merge == "concat" else 1) if n else one.arrays["Wx"].shape[1]
        for (name, _), other in zip(sides, pair, strict=True):
            if other.kind is not first.kind:
                fail(OP, f"{name}[{n}] must be of the kind of the first layer, {first.cell.op},", other.cell.op)
            if other.cell != one.cell or other.arrays.keys() != one.arrays.keys():
                rule = f"reverse[{n}] must have the nonlinearity and the parameters of layers[{n}]"
                fail(OP, rule, f"{other.cell} and {', '.join(other.arrays)}")
            if packings(other) != packings(one):
                fail(OP, f"reverse[{n}] must be quantized as layers[{n}]", packings(other) or "float weights")
            check_parameters(f"{name}[{n}]", other, one.arrays["Wx"].shape[1] if any_width else D, H)
        word, arrays = one.engine if engine is None else engine, [other.arrays for other in pair]
        # The joined arrays of two directions are cached while the parameters are the same.
        both = derived(computes_now(word), OP, arrays, join) if len(pair) == 2 else one.arrays
        depths.append(one._replace(arrays=both, training=all(other.training for other in pair), engine=word))
    return depths


def read(name: str, layer: Any) -> Depth:
    """Return a layer's parameters and its kind (LSTM, GRU or RNN), which their names and shapes show. `name` is for
    error texts."""
    attributes: dict[str, Any] = getattr(layer, "__dict__", {}) | (layer if isinstance(layer, dict) else {})
    held = {key: value for key, value in attributes.items() if isinstance(value, (mx.array, nn.Module))}
    held = {key: value for key, value in held.items() if key[0] != "_"}
    if isinstance(layer, QuantizedLayer):
        held = {key: layer._parameter(key) for key in held if not key.endswith(("_scales", "_biases"))}
    shapes: dict[str, Any] = {
        key: "module" if isinstance(value, nn.Module) else list(value.shape) for key, value in held.items()
    }
    for kind in KINDS:
        Wx, Wh = (shapes.get(key, ()) for key in list(kind._names)[:2])
        if held.keys() <= kind._names.keys() and len(Wx) == len(Wh) == 2 and Wx[0] == kind._gates * Wh[1]:
            for key in kind._names.keys() - held.keys():
                if attributes.get(key) is not None:  # raise an error for it: it may be a NumPy array
                    check_array(OP, f"{name}.{key}", attributes[key], ())
            arrays = {argument: held[key] for key, argument in kind._names.items() if key in held}
            own = (layer.engine, layer.checkpoint_every) if isinstance(layer, Layer) else (None, None)
            return Depth(kind, cell_of(kind, layer), arrays, getattr(layer, "training", True), *own)
    kinds = "Wx [4H, D], Wh [4H, H], bias, or Wx [3H, D], Wh [3H, H], b, bhn, or Wxh [H, D], Whh [H, H], bias"
    fail(OP, f"{name} must hold {kinds}, and no other array or module", shapes)


def cell_of(kind: type[Layer], layer: Any) -> Cell:
    """Return the cell of a layer, which may be a layer of MLX or of another package."""
    if kind is RNN:
        return RNNCell(activation_of(getattr(layer, "nonlinearity", nn.tanh)))
    return LSTMCell() if kind is LSTM else GRUCell()


def packings(layer: Depth) -> dict[str, tuple[int | str, ...]]:
    """Return a dict from the name of each quantized weight to its group size, bits and mode."""
    return {name: tuple(array.packing) for name, array in layer.arrays.items() if isinstance(array, Quantized)}


def check_parameters(name: str, layer: Depth, D: int, H: int) -> None:
    """Check the shapes of the parameters of a layer that reads D features and has H units."""
    rows = layer.kind._gates * H
    shapes = {"Wx": [rows, D], "Wh": [rows, H], "b": [rows], "bhn": [H]}
    why = "" if name == "layers[0]" else f", as a layer has the H of the first, {H}, and reads the one before,"
    for key, argument in layer.kind._names.items():
        if argument in layer.arrays:
            array = layer.arrays[argument]
            array = ArraySpec(array.shape, mx.float32) if isinstance(array, Quantized) else array
            check_array(OP, f"{name}.{key}", array, shapes[argument], why=why)


def first_states(state: Any, names: tuple[str, ...], shape: tuple[int, ...]) -> Arrays:
    """Return the first states that the caller passed, as a dict by name, after checking their shapes."""
    if len(names) == 1 or state is None:
        state = [state] * len(names)
    elif not isinstance(state, (tuple, list)) or len(state) != 2:
        fail(OP, "state must be a tuple (h_0, c_0)", type(state).__name__)
    states = {name: array for name, array in zip(names, state, strict=True) if array is not None}
    for name, array in states.items():
        check_array(OP, f"{name}_0", array, shape)
    return states
