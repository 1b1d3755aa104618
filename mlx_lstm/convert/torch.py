"""Convert the parameters of torch's layers to `Weights` and back.

torch's name of an array, such as weight_ih_l0_reverse, has three parts: the leaf (weight_ih), the layer's number, and
the direction. The way of an array is the number of its direction: 0 forward, 1 reverse. The word of an array is its
name in `Weights`: Wx, Wh, bx, bh or Wp (a projection).
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx

from ..engines.cells import ACTIVATIONS
from ..engines.problem import Arrays
from ..ground.checks import check_option, fail
from ..ground.files import shown
from .weights import OF_GATES, Format, Title, Weights, as_stored, cell_of, checked, parameters_of, to_mlx, two_biases

NAMES = {"weight_ih": "Wx", "weight_hh": "Wh", "bias_ih": "bx", "bias_hh": "bh", "weight_hr": "Wp"}
"""The leaves of torch's arrays, in torch's order, each with the array's name in `Weights`."""

KEYS = {ours: theirs for theirs, ours in NAMES.items()}
"""The leaf of torch's array by the array's name in `Weights`."""

WAYS = ("", "_reverse")
"""The end of torch's name of an array, by direction."""

FORMAT = Format(nonlinearity=("tanh", "relu"), projection=True)
"""What torch's layers can store: a plain RNN with tanh or relu, and a projection; no other option of a cell."""

SOURCES: dict[str, str] = dict.fromkeys(("_g", "_v"), "call torch.nn.utils.remove_weight_norm before you save")
SOURCES["_orig"] = "call remove of torch.nn.utils.prune, or remove_spectral_norm, before you save"
SOURCES[".original"] = "call torch.nn.utils.parametrize.remove_parametrizations before you save"
SOURCES["_raw"] = "weight drop overwrites the weight of the layer, so put this array in its place"
"""The ends of the names of arrays from which torch computes a weight before each call, by weight norm and the like, and
advice for an error text. With such an array beside it, the weight itself is missing in a file, or it is old: weight
drop leaves the weight of the last training step there, with its zeros."""

SOURCE = re.compile(
    r"(?:parametrizations\.)?((?:weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)_l\d+(?:_reverse)?)"
    rf"({'|'.join(map(re.escape, SOURCES))})\d*"
)
"""Matches the end of the key of such an array, after the path: 1 the name of the weight, 2 the end of the name."""


def from_torch(arrays: Any, *, prefix: str = "", nonlinearity: str = "tanh") -> Weights:
    """Return the weights of a layer of torch: `LSTM`, `GRU` or `RNN`, or a cell such as `LSTMCell`, read as one layer.

    Any number of layers, both directions, a projection, and layers without a bias are read.

    Args:
        arrays: a layer or cell of torch or of `mlx_lstm.torch`; a whole model of torch, with a prefix; or a dict of
            arrays by torch's names: a `state_dict`.
        prefix (str): read only the keys that begin with it, such as `"encoder.lstm."`. Default: all keys.
        nonlinearity (str): the nonlinearity of a plain RNN in a dict of arrays; a layer has it as an attribute.
            Default: `"tanh"`.

    Returns:
        Weights: the arrays as they are, in their dtypes.

    Raises:
        ValueError: a key is missing or is no key of torch, a shape does not fit, a layer of torch, or a class derived
            from one, has its own `forward`, or a plain RNN, such as a traced one, has lost its nonlinearity.

    Example:
        >>> from mlx_lstm import convert, torch
        >>> layer = torch.GRU(3, 4, num_layers=2, bidirectional=True)
        >>> weights = convert.from_torch(layer)  # as torch.nn.GRU's
        >>> convert.to_mlx(weights)[1][0]["bhn"].shape  # of layer 1, forward
        (4,)
    """
    op = "from_torch"
    rule = "arrays must be a layer or a dict of arrays (of a file: mx.load(file), or convert.read(file).layers)"
    _, whole = parameters_of(op, rule, arrays)  # all entries of the layer or dict
    layer, arrays = parameters_of(op, rule, arrays, prefix)
    check_option(op, "nonlinearity", nonlinearity, tuple(ACTIVATIONS))
    nonlinearity = getattr(layer, "nonlinearity", nonlinearity)
    check_forward(op, layer)
    if any(isinstance(value, (dict, list)) for value in whole.values()):  # a module of MLX with modules inside
        rule = "arrays must be a layer, not a model of MLX: pass model.lstm or what the layer is called,"
        fail(op, rule, sorted(whole))
    check_prefix(op, whole, arrays, prefix)
    # Weight drop wraps a layer in a module of its own, which calls the layer `module` and holds the sources.
    for source in filter(None, map(source_of, whole)):
        if source.path in (prefix, prefix.removesuffix("module.")):
            refuse_source(op, source)
    parts: dict[tuple[int, int], dict[str, mx.array]] = {}  # by (layer, direction), the arrays by name
    # The arrays of a cell, such as LSTMCell, have no layer and no direction in their names: two empty groups match.
    is_cell = f"{prefix}weight_hh" in arrays
    ending = "()()" if is_cell else r"_l(\d+)(_reverse)?"
    for key in arrays:
        if f"{key}_scales" in arrays:
            fail(op, f"{key} must not be quantized: mx.dequantize it first,", f"{key}_scales beside it")
        match = re.fullmatch(f"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh){ending}", key[len(prefix) :])
        if match is None:
            fail(op, f"keys must be those of a layer of torch, {prefix}weight_ih_l0 and so on,", repr(key))
        # match: 1 the leaf, 2 the layer's number, 3 "_reverse" or None.
        parts.setdefault((int(match[2] or 0), bool(match[3])), {})[NAMES[match[1]]] = to_mlx(arrays[key])

    # Return torch's name of an array, for error texts. word: its name in `Weights`.
    def title(layer: int, way: int, word: str) -> str:
        return f"{prefix}{KEYS[word]}" + ("" if is_cell else f"_l{layer}{WAYS[way]}")

    weights = assembled(op, parts, title, {"activation": nonlinearity})
    check_nonlinearity(op, layer, weights)
    return weights


def check_nonlinearity(op: str, layer: object, weights: Weights) -> None:
    """Raise ValueError for a plain RNN that is an object without the attribute `nonlinearity`, such as a traced layer.
    layer: the layer; None or a dict if the caller passed a dict, whose nonlinearity is an argument."""
    is_told = layer is None or isinstance(layer, Mapping) or hasattr(layer, "nonlinearity")
    if weights.cell.op == "rnn" and not is_told:
        rule = "the layer must have its nonlinearity: pass its state_dict() and nonlinearity=,"
        fail(op, rule, f"{type(layer).__name__} without it")


class Source(NamedTuple):
    """An array from which torch computes a weight of a layer: its key, the path of the layer with a dot at its end, the
    weight's name, such as weight_hh_l0, and the end of the array's name, one of `SOURCES`."""

    key: str
    path: str
    weight: str
    end: str


def source_of(key: str) -> Source | None:
    """Return the parts of a key if it is that of an array from which torch computes a weight; else None."""
    # The name follows the last dot, or, as in parametrizations.weight_hh_l0.original0, the last but two. The pattern is
    # not searched in the whole key, because a foreign file may have very long keys.
    for parts in (1, 3):
        tail = ".".join(key.rsplit(".", parts)[-parts:])
        if match := SOURCE.fullmatch(tail):
            return Source(key, key[: len(key) - len(tail)], match[1], match[2])
    return None


def refuse_source(op: str, source: Source) -> NoReturn:
    """Raise ValueError for an array from which torch computes a weight of a layer."""
    fail(op, f"{source.weight} must not be computed from another array: {SOURCES[source.end]},", shown(source.key))


def check_forward(op: str, layer: object) -> None:
    """Raise ValueError for a layer whose class derives from a layer of torch and has its own `forward`, or for a layer
    of torch with a `forward` of its own: its parameters do not say what it computes. torch's classes are recognised by
    their module's name, so torch need not be installed."""
    own: Any = type(layer)
    base: Any = next((kind for kind in own.__mro__ if kind.__module__ == "torch.nn.modules.rnn"), None)
    if base is not None and (own.forward is not base.forward or "forward" in vars(layer)):
        rule = f"the layer must compute what torch.nn.{base.__name__} computes: pass its state_dict() if it does,"
        fail(op, rule, f"{own.__name__}, which redefines forward")


def check_prefix(op: str, whole: Mapping[str, Any], arrays: Mapping[str, Any], prefix: str) -> None:
    """Raise ValueError if the prefix does not select exactly one layer of a model; the error text lists the prefixes of
    all layers. whole: all entries of the model, by key. arrays: the entries whose keys begin with the prefix."""
    # found: the prefixes of all layers, each once: the keys of a dict, because a dict keeps their order.
    found = {key[: match.start()]: None for key in whole if (match := re.search(r"weight_ih(_l0)?$", key))}
    prefixes = ", ".join(repr(shown(name)) for name in found if name != prefix)
    if prefixes and prefix not in found:
        rule = f"prefix must be that of a layer: layers found: {prefixes}; pass prefix=,"
        fail(op, rule, repr(prefix))
    # A key with a dot after the prefix belongs to a layer inside, so the prefix selects several layers.
    if len(found) > 1 and any("." in key[len(prefix) :] for key in arrays):
        rule = f"prefix must select one layer: layers found: {', '.join(map(repr, map(shown, found)))},"
        fail(op, rule, repr(prefix))


def assembled(
    op: str, parts: Mapping[tuple[int, int], Arrays], title: Title, options: Mapping[str, Any], *, lenient: bool = False
) -> Weights:
    """Build the `Weights` of a stack from its arrays: parts[layer, direction] is a dict of arrays by their names in
    `Weights`. The number of gates, which follows from the shape of Wh, says which cell it is.

    title: a function (layer, way, word) that returns the name of an array for error texts. options: options of the
    cell by name; options that this cell does not have are ignored. lenient: accept a stack in which some layers have a
    bias and others none, as MLX allows it.
    """
    # K, D: the number of layers and of directions: the largest number that occurs, plus one.
    K, D = (max((layer_and_way[n] for layer_and_way in parts), default=0) + 1 for n in range(2))
    # needed: the names in `Weights` of the arrays that every layer must have: both matrices, and each array that any
    # layer has. If any layer has one of the biases, all layers need both.
    needed = {word for arrays in parts.values() for word in arrays} | {"Wx", "Wh"}
    needed |= {"bx", "bh"} if needed & {"bx", "bh"} else set()
    for layer_and_way in ((layer, way) for layer in range(K) for way in range(D)):
        for word in KEYS:
            may_lack = lenient and word in ("bx", "bh")
            if word in needed and word not in parts.get(layer_and_way, {}) and not may_lack:
                fail(op, f"{title(*layer_and_way, word)} must be there", "no such key")
    kind = OF_GATES[gates_of(op, parts[0, 0], title(0, 0, "Wh"))]  # "lstm", "gru" or "rnn"
    # foreign: options that this cell does not have, and the two options that concern the directions, not the cell.
    own = {"lstm": set(), "gru": {"reset"}, "rnn": {"activation"}}[kind]
    foreign = {"bidirectional", "reverse", "reset", "activation"} - own
    cell = cell_of(op, kind, {name: value for name, value in options.items() if name not in foreign})
    layers = [[parts[layer, way] for way in range(D)] for layer in range(K)]
    return checked(op, Weights(cell, layers, bool(options.get("reverse", False))), title)


def gates_of(op: str, arrays: Mapping[str, mx.array], name: str) -> int:
    """Return the number of gates, 4, 3 or 1, from the shape of Wh, which has a block of H rows for each gate. Raise
    ValueError if no cell has this number of gates. arrays: the arrays of one direction. name: Wh's name in the error
    text."""
    # H is the number of columns of Wh or, with a projection, of Wp [P, H]. If Wh is no matrix, 0 rows cause the error.
    rows, H = arrays["Wh"].shape if arrays["Wh"].ndim == 2 else (0, 1)
    if "Wp" in arrays and arrays["Wp"].ndim == 2:
        H = arrays["Wp"].shape[1]
    if not H or rows % H or rows // H not in OF_GATES:
        rule = f"{name} must have shape [4H, H], [3H, H] or [H, H]" + (", or [4H, P]" if "Wp" in arrays else "")
        fail(op, rule, f"shape {list(arrays['Wh'].shape)}")
    return rows // H


def to_torch(weights: Weights, *, prefix: str = "") -> dict[str, mx.array]:
    """Return the parameters of a layer of `mlx_lstm.torch`, and of torch, by their names.

    A single bias becomes `bias_ih`, and `bias_hh` is 0. In a GRU `bias_hh` holds the candidate's second bias, which the
    reset gate multiplies. Arrays stay as they are; TensorFlow's forget bias is added to the bias.

    Args:
        weights (Weights): of a cell that torch has.
        prefix (str): is put before each name. Default: an empty string.

    Returns:
        dict: arrays by torch's names, for `layer.load_weights(list(found.items()))`; for torch's own
        `load_state_dict` make each one `torch.from_numpy(np.array(array))`.

    Raises:
        ValueError: torch's layers have no place for an option of the cell.
    """
    return by_names("to_torch", weights, prefix)


def by_names(op: str, weights: Weights, prefix: str = "") -> dict[str, mx.array]:
    """Return the parameters of a torch layer by name, as `to_torch` does. op: the name that error texts begin with.
    prefix: the beginning of each name."""
    parameters = {}
    for k, layer in enumerate(with_both_biases(op, weights).layers):
        for ending, arrays in zip(WAYS, layer, strict=False):  # ending: "" or "_reverse"
            named = {leaf: arrays[word] for leaf, word in NAMES.items() if word in arrays}
            parameters |= {f"{prefix}{leaf}_l{k}{ending}": array for leaf, array in named.items()}
    return parameters


def with_both_biases(op: str, weights: Weights) -> Weights:
    """Return the weights as torch stores them: all directions of all layers have both biases, or none has any. Raise
    ValueError for options that torch's layers do not have."""
    weights = as_stored(op, weights, FORMAT)
    if not weights.has_bias:
        return weights
    return weights.map(lambda arrays: arrays | dict(zip(("bx", "bh"), two_biases(arrays), strict=True)))
