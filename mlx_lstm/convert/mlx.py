"""Convert the parameters of MLX's layers, and the arguments of `mlx_lstm.lstm`, `gru` and `rnn`, to `Weights` and
back.

In `Weights` one direction's arrays are Wx, Wh, the biases bx and bh of their products, Wp (a projection) and peephole.
These names are called words. MLX and the functions of this package have a single bias b instead, the sum of bx and bh,
and for a GRU also bhn, the recurrent bias of the candidate n. A way is a direction, 0 forward or 1 reverse.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.nn as nn

from ..engines.cells import ACTIVATIONS
from ..engines.directions import join, part
from ..engines.problem import Arrays
from ..ground.checks import check_array, check_flag, check_option, fail
from ..recurrence import weight_shapes
from .layers import OF_MLX, describe
from .torch import gates_of
from .weights import (
    CELLS,
    OF_GATES,
    OURS,
    Format,
    RNNCell,
    Weights,
    as_stored,
    cell_of,
    check_weights,
    checked,
    evened,
    from_one_bias,
    gate_order,
    one_bias,
    rows_reordered,
)
from .weights import to_mlx as as_mlx

NAMES = {
    "lstm": {"Wx": "Wx", "Wh": "Wh", "bias": "b"},
    "gru": {"Wx": "Wx", "Wh": "Wh", "b": "b", "bhn": "bhn"},
    "rnn": {"Wxh": "Wx", "Whh": "Wh", "bias": "b"},
}
"""For each cell the names of the parameters in MLX's layers, each with the name of the argument of `mlx_lstm.lstm`,
`gru` or `rnn`. Both matrices come first."""

FORMAT = Format(nonlinearity=("tanh", "relu", "sigmoid"), reverse=True)
"""What files with MLX's names can store: no option of an LSTM or GRU; a plain RNN with one of these activations."""

OPS = ("nn.LSTM", "nn.GRU", "nn.RNN")
"""The names of the layers of `mlx_lstm.nn` that have the parameters of a layer of `mlx.nn`."""


def from_mlx(layers: Any, reverse: Any = None, *, nonlinearity: str | None = None) -> Weights:
    """Return the weights of layers of `mlx.nn` or `mlx_lstm.nn`: LSTM, GRU, RNN; or of dicts with such arrays.

    Args:
        layers: one layer, or a list of layers; each reads the output of the layer before.
        reverse (optional): the layers of the second direction, which read their input from the end to the start, one
            for each of `layers`; as in `mlx_lstm.nn.stack`.
        nonlinearity (str, optional): the nonlinearity of plain RNNs given as dicts, as `mlx_lstm.rnn` names it; a layer
            has its own. Default: tanh.

    Returns:
        Weights: the arrays as they are.

    Raises:
        ValueError: an array is missing or is no MLX array, a shape does not fit, or a layer is of another kind, such as
            `Pointwise` or a subclass with its own `__call__`.

    Example:
        >>> import mlx.nn
        >>> from mlx_lstm import convert, torch
        >>> weights = convert.from_mlx([mlx.nn.LSTM(3, 4), mlx.nn.LSTM(4, 4)])
        >>> torch.from_weights(weights)
        LSTM(3, 4, num_layers=2)
    """
    op = "from_mlx"
    arguments = (layers,) if reverse is None else (layers, reverse)
    ways = [way if isinstance(way, (list, tuple)) else [way] for way in arguments]  # the layers of each direction
    if nonlinearity is not None:
        check_option(op, "nonlinearity", nonlinearity, tuple(ACTIVATIONS))
    if not ways[0] or len({len(way) for way in ways}) > 1:
        fail(op, "layers and reverse must be as many, at least one", [len(way) for way in ways])
    # weights: for each layer a list of the arrays of each direction. acts: the activations of all layers. cell: the
    # cell of the first layer, which all layers must have; names: its row of `NAMES`; H: its units.
    names, H, cell, weights, acts = NAMES["lstm"], 0, None, [], []
    for n, directions in enumerate(zip(*ways, strict=True)):
        weights.append([])
        for title, layer in zip(("layers", "reverse"), directions, strict=False):
            parameters, act = arrays_of(op, f"{title}[{n}]", layer)
            acts.append(act or nonlinearity or "tanh")
            if cell is None:  # the first layer, whose Wh shows the cell by its shape
                matrix = next((key for key in ("Wh", "Whh") if key in parameters), None)
                if matrix is None:
                    fail(op, f"{title}[{n}] must hold Wh or Whh", sorted(parameters) or type(layer).__name__)
                cell = CELLS[OF_GATES[gates_of(op, {"Wh": parameters[matrix]}, f"{title}[{n}].{matrix}")]]()
                names, H = NAMES[cell.op], parameters[matrix].shape[1]
            # A layer must have both matrices and no unknown array. A GRU with b must also have bhn.
            for key in [*parameters, *list(names)[:2], *(["bhn"] if "b" in parameters and "bhn" in names else [])]:
                if (key in parameters) != (key in names):
                    why = " (no format holds layer normalisation)" if "norm_scale" in parameters else ""
                    fail(op, f"{title}[{n}] must hold {', '.join(names)}{why}", sorted(parameters))
            words = {names[key]: array for key, array in parameters.items()}
            b, bhn = (words.pop(key, None) for key in ("b", "bhn"))
            if bhn is not None:  # its length would not show in the bias bh, which `checked` sees
                check_array(op, f"{title}[{n}].bhn", bhn, [H])
            weights[-1].append(words | from_one_bias(b, bhn))
    assert cell is not None
    if cell.op == "rnn":
        if len(given := {*acts, nonlinearity or acts[0]}) > 1:
            fail(op, "nonlinearity must be the same for all layers", ", ".join(map(repr, sorted(given))))
        cell = RNNCell(acts[0])
    # theirs: MLX's name by our name of an array, for error texts. bx is called like MLX's single bias, bh like bhn.
    theirs = {ours: key for key, ours in names.items()}
    theirs["bx"] = theirs["b"]
    titles = ("layers", "reverse")
    whole = Weights(cell, weights)
    return checked(op, whole, title=lambda layer, way, word: f"{titles[way]}[{layer}].{theirs.get(word, 'bhn')}")


def arrays_of(op: str, name: str, layer: Any) -> tuple[Arrays, str | None]:
    """Return (arrays, nonlinearity) of a layer of `mlx.nn` or `mlx_lstm.nn`, of another module with such arrays, or of
    a dict. arrays: by the names that they have there; {} for any other object. nonlinearity: the activation of a plain
    RNN, or None if the layer does not name it. name: the layer's name in error texts, such as "layers[0]"."""
    if not isinstance(layer, (Mapping, nn.Module)):
        return {}, None
    # found.known: the layer's class if it is a class of MLX or of this package, else None. found.others: attributes
    # that hold arrays in a list or a dict. `OF_MLX` and `OPS` list the classes that can be converted.
    found = describe(op, name, layer if isinstance(layer, nn.Module) else dict(layer))
    if found.known not in (None, *OF_MLX) and getattr(found.known, "op", "") not in OPS:
        advice = ": layer.dequantize() returns one," if hasattr(layer, "dequantize") else ""
        fail(op, f"{name} must be an LSTM, GRU or RNN of mlx.nn or mlx_lstm.nn{advice}", type(layer).__name__)
    if found.others:
        fail(op, f"{name} must hold its arrays one by one", found.shapes)
    if isinstance(layer, nn.Module):
        arrays = found.arrays
        for key, value in found.strays.items():
            check_array(op, f"{name}.{key}", value, shape=None)  # raises the error
    else:  # values that `as_mlx` converts: arrays of other packages, and lists of numbers
        arrays = {key: array for key, array in layer.items() if array is not None and key != "nonlinearity"}
    return {key: as_mlx(array) for key, array in arrays.items()}, found.nonlinearity


def to_mlx(weights: Weights) -> list[list[Arrays]]:
    """Return the parameters of layers of `mlx.nn` and `mlx_lstm.nn`, for `layer.update`.

    Two biases become their sum, which cannot be split again. A GRU has the candidate's second bias as a separate array,
    `bhn`.

    Args:
        weights (Weights): of a cell that MLX has. Pass the nonlinearity of a plain RNN to the layer yourself.

    Returns:
        list: a list per layer, with a dict per direction. An LSTM has `Wx`, `Wh` and, if there is a bias, `bias`; a GRU
        has `Wx`, `Wh`, `b`, `bhn`; a plain RNN has `Wxh`, `Whh`, `bias`.

    Raises:
        ValueError: MLX's layers have no place for an option of the cell, or the weights are those of layers that run in
            reverse.
    """
    if check_weights("to_mlx", weights).reverse:
        rule = "reverse must be False, as layers of MLX run forward: convert weights._replace(reverse=False), and run"
        fail("to_mlx", f"{rule} the layers on the reversed sequence,", True)
    return by_names(weights)


def by_names(weights: Weights) -> list[list[Arrays]]:
    """Return the arrays of each layer and direction by MLX's names. Unlike `to_mlx` this function also takes layers
    that run in reverse, because a file stores this option in its metadata."""
    weights = as_stored("to_mlx", weights, FORMAT)  # refuses options that MLX's layers do not have
    names = NAMES[weights.cell.op].items()  # (MLX's name, ours)
    with_b = weights.map(lambda arrays: arrays | one_bias(weights.cell, arrays))  # adds b and maybe bhn
    return [
        [{key: arrays[word] for key, word in names if word in arrays} for arrays in layer] for layer in with_b.layers
    ]


def from_ops(
    op: str, layers: Sequence[Mapping[str, Any]], *, bidirectional: bool = False, reverse: bool = False, **options: Any
) -> Weights:
    """Return `Weights` made from the arguments of calls of `mlx_lstm.lstm`, `gru` or `rnn`, one call per layer.

    Args:
        op (str): the function that was called, `"lstm"`, `"gru"` or `"rnn"`.
        layers (list of dict): for each layer `Wx`, `Wh`, maybe `b`, `bhn`, `Wp`, `peephole`, both directions in one
            array.
        bidirectional, reverse, options: the keywords of the call, `gate_order` included.

    Returns:
        Weights: in the gate order i, f, g, o or r, z, n.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert
        >>> arrays = {"Wx": mx.ones((16, 3)), "Wh": mx.ones((16, 4)), "b": mx.zeros((16,))}
        >>> list(convert.to_torch(convert.from_ops("lstm", [arrays], gate_order="igfo")))
        ['weight_ih_l0', 'weight_hh_l0', 'bias_ih_l0', 'bias_hh_l0']
    """
    name = "from_ops"  # error texts begin with it; here `op` is the user's argument, a kind of cell
    check_option(name, "op", op, tuple(CELLS))
    check_flag(name, "bidirectional", bidirectional)
    check_flag(name, "reverse", reverse)
    if not isinstance(layers, Sequence) or not layers or not all(isinstance(layer, Mapping) for layer in layers):
        kinds = [type(layer).__name__ for layer in layers] if isinstance(layers, Sequence) else type(layers).__name__
        fail(name, "layers must be a list of dicts, one for each layer,", kinds)
    order = gate_order(name, options.pop("gate_order", OURS[op]), OURS[op])
    cell = cell_of(name, op, options)
    weights = []
    for n, arrays in enumerate(layers):
        words = {key: as_mlx(array) for key, array in arrays.items() if array is not None}
        allowed = ("Wx", "Wh", "b", "bhn", "Wp", "peephole")
        if not {"Wx", "Wh"} <= words.keys() <= set(allowed):
            fail(name, f"layers[{n}] must hold Wx, Wh and maybe {', '.join(allowed[2:])}", sorted(words))
        check_array(name, f"layers[{n}]: Wh", words["Wh"], ["2", "rows", "P"] if bidirectional else ["rows", "P"])
        # H: the number of units. Check all shapes before the rows of the arrays are reordered.
        H = words["Wh"].shape[-2] // len(order)
        shapes = weight_shapes(len(order), ("I", H, "P"), 1 + bidirectional)
        for key, array in words.items():
            check_array(name, f"layers[{n}]: {key}", array, shapes[key])
        directions = []
        for arrays_of_way in [part(words, way) for way in range(2)] if bidirectional else [words]:
            ours = rows_reordered(arrays_of_way, order, OURS[op])
            b, bhn = (ours.pop(key, None) for key in ("b", "bhn"))
            directions.append(ours | from_one_bias(b, bhn))
        weights.append(directions)
    return checked(name, Weights(cell, weights, reverse), title=lambda layer, way, word: f"layers[{layer}]: {word}")


def to_ops(weights: Weights) -> list[Arrays]:
    """Return the arguments of `mlx_lstm.lstm`, `gru` or `rnn` by layer; `weights.options` are the keywords for them.

    Returns:
        list of dict: `Wx`, `Wh` and, where the layer has them, `b`, `bhn`, `Wp`, `peephole`. Two directions are joined
        as `bidirectional=True` takes them. Any `Weights` can be converted. Two biases become their sum.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert, gru, torch
        >>> weights = convert.from_torch(torch.GRU(3, 4, bidirectional=True))
        >>> gru(mx.ones((10, 2, 3)), **convert.to_ops(weights)[0], **weights.options).h.shape
        (10, 2, 8)
    """
    words = ("Wx", "Wh", "b", "bhn", "Wp", "peephole")
    # `evened` gives both directions the same arrays. `one_bias` returns b, the sum of both biases, and maybe bhn.
    # `join` puts both directions into one array per name.
    with_b = evened(check_weights("to_ops", weights)).map(lambda arrays: arrays | one_bias(weights.cell, arrays))
    layers = [[{word: way[word] for word in words if word in way} for way in layer] for layer in with_b.layers]
    return [join(layer) if len(layer) == 2 else layer[0] for layer in layers]
