"""Lists of layers with MLX's parameters, run as one."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..checks import Form, check_array, check_every, fail, instead_of
from ..engines.at_once import by_mlx, by_numpy, computes_now, made
from ..engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from ..engines.directions import join
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
    note_engine,
    split_states,
    weight,
    whole_lengths,
    whole_steps,
)
from ._layers import GRU, LSTM, RNN, activation_of

OP = "nn.stack"


class Kind(NamedTuple):
    """H-blocks of a weight; the parameters in MLX's names, weights first, and in the recurrence's; a layer's cell."""

    gates: int
    names: dict[str, str]
    cell: Callable[[Any], Cell]


KINDS = [
    Kind(4, {"Wx": "Wx", "Wh": "Wh", "bias": "b"}, lambda layer: LSTMCell()),
    Kind(3, {"Wx": "Wx", "Wh": "Wh", "b": "b", "bhn": "bhn"}, lambda layer: GRUCell()),
    Kind(
        1,
        {"Wxh": "Wx", "Whh": "Wh", "bias": "b"},
        lambda layer: RNNCell(activation_of(getattr(layer, "nonlinearity", nn.tanh))),
    ),
]


def stack(
    layers: Sequence[Any],
    x: mx.array,
    state: Any = None,
    *,
    reverse: Sequence[Any] | None = None,
    lengths: Lengths = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    checkpoint_every: int | str | None = None,
    engine: str | None = None,
) -> tuple[mx.array, Any]:
    """Layers on layers, from their parameters: those of `mlx.nn`, ours, or any object that has such parameters.

    For models that keep their layers in lists, or in attributes of their own: these stay, and with them the names in a
    weight file. Equals a loop that calls each layer with the output of the one before; where `reverse` is given, too,
    both layers of a depth read the same input, and their outputs are concatenated: forward first, reversed second.
    Layers of different sizes take two calls.

    An object is read as it stands, its own `__call__` never runs: an LSTM has `Wx` [4H, D], `Wh` [4H, H] and maybe
    `bias` [4H], gate order i, f, g, o; a GRU `Wx` [3H, D], `Wh` [3H, H] and maybe `b` [3H], `bhn` [H], gate order r, z,
    n; a plain RNN `Wxh` [H, D], `Whh` [H, H], maybe `bias` [H] and `nonlinearity`. Other arrays or modules in it are an
    error. A dict with such arrays will do. Of a quantized layer of ours the packed weights are read.

    Args:
        layers (list): K of them, all of one kind and one H, the first one reads x; from layer 1 on D is H, or 2H with
            `reverse`. May be empty if `reverse` is not.
        x (array): [B, T, D]; as in the layers, any number of batch axes, none included.
        state (optional): of LSTMs a tuple (h_0, c_0), else h_0; each [K, B, H], with both directions [2K, B, H]: layer
            by layer, the forward one first. Default: zeros.
        reverse (list, optional): K layers that read their input from its end to its start.
        lengths (integer array or list, optional): [B], each in 0..T. Past its end an item's output is 0, its last state
            is that of its end, where the reversed layers start, and its input is never read.
        keep (array, optional): [B, T], a factor on the states of every layer before each step, in its own order, as in
            `mlx_lstm.lstm`: 0 where an episode begins.
        hold (array or list, optional): [B, T], steps that leave the states of every layer as they are, as there.
        checkpoint_every (int or str, optional): in training, keep the states of every so many steps only, as in
            `mlx_lstm.lstm`. Default: that of our layer, else `None`.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: that of our layer, else the best for
            the stream's device.

    Returns:
        tuple: the output [B, T, H], or [B, T, 2H], and the last states, shaped as `state`: of LSTMs (h_n, c_n), else
        h_n; in the dtype that x, states and parameters promote to.

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
    """
    found, every = depths(layers, [] if reverse is None else reverse, engine), check_every(OP, checkpoint_every)
    cell, D = found[0].cell, found[0].arrays["Wx"].shape[1]
    ways, H = (2 if layers and reverse else 1), found[0].arrays["Wh"].shape[-1]
    if not isinstance(x, mx.array):
        fail(OP, f"x must be an mlx.core.array{instead_of(x)}", type(x).__name__)
    if x.dtype == mx.complex64:
        fail(OP, "x must be real", x.dtype)
    if x.ndim < 2 or x.shape[-1] != D or 0 in x.shape[-2:]:
        fail(OP, f"x must have shape [B, T, D = {D}] with at least one step", f"shape {list(x.shape)}")
    batch, T = x.shape[:-2], x.shape[-2]
    names = ("h", "c") if isinstance(cell, LSTMCell) else ("h",)
    first = first_states(state, names, (ways * len(found), *batch, H))
    dtype = common_dtype([x, *first.values(), *(array for each in found for array in each.arrays.values())])
    if 0 in batch:
        last = {name: mx.zeros((ways * len(found), *batch, H), dtype) for name in names}
        return mx.zeros((*batch, T, ways * H), dtype), (last["h"], last["c"]) if "c" in last else last["h"]
    small = by_numpy if computes_now(found[0].engine) else by_mlx
    x, outputs = x if len(batch) == 1 else small(methodcaller("reshape", (-1, T, D)), x), []
    steps = whole_steps(OP, keep, hold, (*batch, T), "[B, T]")
    lengths = whole_lengths(OP, lengths, x.shape[0], T)
    steps = {name: array.reshape(-1, T) for name, array in steps.items()}
    hold = steps.pop("hold", None)
    rows = {name: small(partial(split_states, ways), array) for name, array in first.items()}
    for n, each in enumerate(found):
        arrays = each.arrays | {"x": x} | {f"{name}0": array[n] for name, array in rows.items()}
        arrays = in_dtype(arrays, dtype)
        options = {"reverse": not layers, "bidirectional": ways == 2, "hold": hold}
        options |= {
            "lengths": lengths,
            "lengths_checked": True,
            "checkpoint_every": each.every if every is None else every,
        }
        call = Call(each.cell, **options, engine=each.engine, batch_first=True)
        out, choice = call.forward(arrays | steps, return_gates=False, training=each.training)
        outputs.append({name: out[f"{name}T"] for name in names})
        for layer in (way[n] for way in (layers, reverse) if way):
            if isinstance(layer, (LSTM, GRU, RNN)):
                note_engine(layer, choice)
        x = out["h"]
    join = partial(join_states, ways, (-1, *batch, H))
    last = {name: small(join, *(last[name] for last in outputs)) for name in names}
    x = x if len(batch) == 1 else small(methodcaller("reshape", (*batch, T, -1)), x)
    return x, (last["h"], last["c"]) if "c" in last else last["h"]


class Depth(NamedTuple):
    """A layer, or both of a depth side by side, as the recurrence has them."""

    kind: Kind
    cell: Cell
    arrays: dict[str, Any]
    training: bool
    engine: str | None
    every: int | str | None


def depths(layers: Sequence[Any], reverse: Sequence[Any], engine: str | None) -> list[Depth]:
    """All layers, found to fit on one another; `engine`: for all of them."""
    for word, way in (("layers", layers), ("reverse", reverse)):
        if not isinstance(way, (list, tuple)):
            fail(OP, f"{word} must be a list of layers", type(way).__name__)
    if not (layers or reverse):
        fail(OP, "layers must hold at least one layer", "none")
    if layers and reverse and len(layers) != len(reverse):
        fail(OP, f"reverse must hold as many layers as layers, {len(layers)},", len(reverse))
    ways = [(word, list(way)) for word, way in (("layers", layers), ("reverse", reverse)) if way]
    found: list[Depth] = []
    for n in range(len(ways[0][1])):
        each = [read(f"{word}[{n}]", way[n]) for word, way in ways]
        one, first = each[0], (found or each)[0]
        H = first.arrays["Wh"].shape[-1]
        D = len(ways) * H if n else one.arrays["Wx"].shape[1]
        for (word, _), other in zip(ways, each, strict=True):
            if other.kind is not first.kind:
                fail(OP, f"{word}[{n}] must be of the kind of the first layer, {first.cell.op},", other.cell.op)
            if other.cell != one.cell or other.arrays.keys() != one.arrays.keys():
                rule = f"reverse[{n}] must have the nonlinearity and the parameters of layers[{n}]"
                fail(OP, rule, f"{other.cell} and {', '.join(other.arrays)}")
            if packings(other) != packings(one):
                fail(OP, f"reverse[{n}] must be quantized as layers[{n}]", packings(other) or "float weights")
            check_parameters(f"{word}[{n}]", other, D, H)
        one, arrays = one._replace(engine=one.engine if engine is None else engine), [other.arrays for other in each]
        both = made(computes_now(one.engine), "stack", arrays, partial(join, arrays)) if len(each) == 2 else one.arrays
        found.append(one._replace(arrays=both, training=all(other.training for other in each)))
    return found


def read(name: str, layer: Any) -> Depth:
    """A layer by itself, of the kind that its parameters show."""
    every: dict[str, Any] = getattr(layer, "__dict__", {}) | (layer if isinstance(layer, dict) else {})
    held = {key: value for key, value in every.items() if isinstance(value, (mx.array, nn.Module)) and key[0] != "_"}
    if isinstance(layer, QuantizedLayer):
        held = {key: weight(layer, key) for key in held if not key.endswith(("_scales", "_biases"))}
    shapes: dict[str, Any] = {
        key: "module" if isinstance(value, nn.Module) else list(value.shape) for key, value in held.items()
    }
    for kind in KINDS:
        Wx, Wh = (shapes.get(key, ()) for key in list(kind.names)[:2])
        if held.keys() <= kind.names.keys() and len(Wx) == len(Wh) == 2 and Wx[0] == kind.gates * Wh[1]:
            for theirs in kind.names.keys() - held.keys():
                if every.get(theirs) is not None:
                    check_array(OP, f"{name}.{theirs}", every[theirs], ())
            arrays = {ours: held[theirs] for theirs, ours in kind.names.items() if theirs in held}
            own = (layer.engine, layer.checkpoint_every) if isinstance(layer, (LSTM, GRU, RNN)) else (None, None)
            return Depth(kind, kind.cell(layer), arrays, getattr(layer, "training", True), *own)
    kinds = "Wx [4H, D], Wh [4H, H], bias, or Wx [3H, D], Wh [3H, H], b, bhn, or Wxh [H, D], Whh [H, H], bias"
    fail(OP, f"{name} must hold {kinds}, and no other array or module", shapes)


def packings(layer: Depth) -> dict[str, tuple[int | str, ...]]:
    """Group size, bits and mode of each quantized weight."""
    return {name: tuple(array.packing) for name, array in layer.arrays.items() if isinstance(array, Quantized)}


def check_parameters(name: str, layer: Depth, D: int, H: int) -> None:
    """Their shapes are those of a layer that reads D features."""
    rows = layer.kind.gates * H
    shapes = {"Wx": [rows, D], "Wh": [rows, H], "b": [rows], "bhn": [H]}
    for theirs, ours in layer.kind.names.items():
        if ours in layer.arrays:
            array = layer.arrays[ours]
            array = Form(array.shape, mx.float32) if isinstance(array, Quantized) else array
            check_array(OP, f"{name}.{theirs}", array, shapes[ours])


def first_states(state: Any, names: tuple[str, ...], shape: tuple[int, ...]) -> Arrays:
    """The caller's states by name, as far as there are any."""
    if len(names) == 1 or state is None:
        state = [state] * len(names)
    elif not isinstance(state, (tuple, list)) or len(state) != 2:
        fail(OP, "state must be a tuple (h_0, c_0)", type(state).__name__)
    found = {name: array for name, array in zip(names, state, strict=True) if array is not None}
    for name, array in found.items():
        check_array(OP, f"{name}_0", array, shape)
    return found
