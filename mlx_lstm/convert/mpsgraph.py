"""Convert weights between the arguments of MPSGraph's ops and `Weights`.

An op of MPSGraph (Apple's framework) gets arrays and a descriptor, an object whose properties are the options of the
cell. Apple calls the arrays input_weight, recurrent_weight, bias, secondary_bias (the recurrent bias of a GRU's
candidate) and peephole; `WORDS` has the names of `mlx_lstm.lstm` and `gru`: Wx, Wh, b, bhn, peephole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..engines.cells import GRUCell, LSTMCell
from ..engines.problem import Arrays
from ..ground.checks import check_option, fail
from .mlx import from_ops, to_ops
from .weights import MPSGRAPH, OURS, Format, Weights, as_stored, rows_reordered

ACTIVATIONS = {
    "none": "identity", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "hard_sigmoid": "hard_sigmoid",
}  # fmt: skip
"""The names of activations in Apple's enum MPSGraphRNNActivation, in its order, each with the name in
`mlx_lstm.lstm`."""

PROPERTIES = {
    "lstm": (*(f"{gate}_gate_activation" for gate in ("input", "forget", "cell", "output")), "activation"),
    "gru": ("reset_gate_activation", "update_gate_activation", "output_gate_activation"),
    "rnn": ("activation",),
}
"""The names of the descriptor's activations, in the order in which `mlx_lstm.lstm` and `gru` take activations."""

FORMAT = Format(options=True, nonlinearity=tuple(ACTIVATIONS.values()), reset=("after", "before"), reverse=True)
"""What the ops can store: options of an LSTM and a GRU, both values of reset, and the reverse direction."""

HARD_SIGMOIDS = {"x/5": "hard_sigmoid", "x/6": "hard_sigmoid_sixth"}
"""The activation that stands for Apple's hard_sigmoid, by the value of the option `hard_sigmoid`, the slope. Apple does
not document the slope."""

WORDS = {"input_weight": "Wx", "recurrent_weight": "Wh", "bias": "b", "secondary_bias": "bhn", "peephole": "peephole"}
"""Apple's names of the arrays, and the names in `mlx_lstm.lstm` and `gru`."""


def from_mpsgraph(
    layers: Sequence[Mapping[str, Any]],
    descriptor: Any,
    *,
    output_peephole: str = "previous",
    hard_sigmoid: str = "x/5",
) -> Weights:
    """Return the weights of a chain of calls of `mlx_lstm.mpsgraph.lstm`, `gru` or `single_gate_rnn`. Each call reads
    the output of the call before.

    A GRU with `flip_z` becomes a GRU without `flip_z`: the weights of the update gate are negated.

    Args:
        layers (list of dict): for each call `input_weight`, `recurrent_weight`, maybe `bias`, `secondary_bias`,
            `peephole`, with the names and shapes that these ops take.
        descriptor: the descriptor of the calls.
        output_peephole (str): the cell state that gate o reads through its peephole, `"previous"` c[t-1] or `"current"`
            c[t]. Default: `"previous"`.
        hard_sigmoid (str): the slope of hard_sigmoid, `"x/5"` or `"x/6"`. Default: `"x/5"`.

    Returns:
        Weights: in the gate order i, f, g, o or r, z, n.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert, mpsgraph, torch
        >>> arrays = {"input_weight": mx.ones((16, 3)), "recurrent_weight": mx.ones((16, 4))}
        >>> weights = convert.from_mpsgraph([arrays], mpsgraph.LSTMDescriptor(forget_gate_last=True))
        >>> torch.from_weights(weights)
        LSTM(3, 4, bias=False)
    """
    op = "from_mpsgraph"
    if not isinstance(layers, Sequence) or not all(isinstance(layer, Mapping) for layer in layers):
        fail(op, "layers must be a list of dicts, one for each call,", type(layers).__name__)
    kinds = {"LSTMDescriptor": "lstm", "GRUDescriptor": "gru", "SingleGateRNNDescriptor": "rnn"}
    check_option(op, "descriptor", type(descriptor).__name__, tuple(kinds))
    kind = kinds[type(descriptor).__name__]
    activations = activation_names(op, descriptor, PROPERTIES[kind], hard_sigmoid)  # in this order
    options: dict[str, Any] = {"activation": activations[0]} if kind == "rnn" else {"activations": activations}
    # flag: the property that selects one of the two gate orders in `MPSGRAPH`. A plain RNN has one gate, so both orders
    # are the same and any property will do.
    flag = getattr(descriptor, {"lstm": "forget_gate_last", "gru": "reset_gate_first", "rnn": "reverse"}[kind])
    if kind == "gru":
        options["reset"] = "after" if descriptor.reset_after else "before"
    calls = []  # for each layer its arrays by the names in `mlx_lstm.lstm`
    for n, layer in enumerate(layers):
        if unknown := layer.keys() - WORDS.keys():
            fail(op, f"layers[{n}] must hold some of {', '.join(WORDS)}", ", ".join(sorted(unknown)))
        calls.append({WORDS[name]: array for name, array in layer.items() if array is not None})
        if kind == "lstm" and "peephole" in calls[-1]:
            options["output_peephole"] = output_peephole
    both = descriptor.bidirectional  # with both directions the op ignores `reverse`
    options |= {"bidirectional": both, "reverse": descriptor.reverse and not both}
    weights = from_ops(kind, calls, gate_order=MPSGRAPH[kind][flag], **options)  # the order (flag off, flag on)[flag]
    if kind != "gru" or not descriptor.flip_z:
        return weights
    # `flipped` is exact for activations f of z with f(-a) = 1 - f(a). Of the activations here these are the sigmoids.
    if "sigmoid" not in activations[1]:
        fail(op, "update_gate_activation must be a sigmoid with flip_z", repr(descriptor.update_gate_activation))
    return weights.map(flipped)


def activation_names(op: str, descriptor: Any, names: Sequence[str], hard_sigmoid: str) -> tuple[str, ...]:
    """Return the activations that a descriptor names, by their names in `mlx_lstm.lstm` and `gru`. names: the
    properties of the descriptor that hold activations. hard_sigmoid: the slope of Apple's hard_sigmoid, "x/5" or
    "x/6"."""
    check_option(op, "hard_sigmoid", hard_sigmoid, tuple(HARD_SIGMOIDS))
    words = ACTIVATIONS | {"hard_sigmoid": HARD_SIGMOIDS[hard_sigmoid]}  # Apple's names, and ours
    return tuple(words[getattr(descriptor, name)] for name in names)


def flipped(arrays: Arrays) -> Arrays:
    """Return a GRU's arrays with the rows of the update gate negated. This turns z into 1 - z, since sigmoid(-a) is
    1 - sigmoid(a). Each array has three blocks of rows, for r, z and n."""
    parts = {name: mx.split(array, 3) for name, array in arrays.items()}
    return {name: mx.concatenate([r, -z, n]) for name, (r, z, n) in parts.items()}


def to_mpsgraph(weights: Weights) -> tuple[list[Arrays], dict[str, Any]]:
    """Return for each layer the arrays for a call of Apple's op, and the properties of the descriptor that differ from
    the default.

    The gates have Apple's default order, i, f, z, o or z, r, o. `mpsgraph.LSTMDescriptor(**properties)` makes the
    descriptor of an LSTM. A descriptor does not hold the option output_peephole, nor the slope of hard_sigmoid: pass
    the keywords `output_peephole` and `hard_sigmoid` to `from_mpsgraph` and to the functions of `mlx_lstm.mpsgraph`.

    Returns:
        tuple: (list of dict by Apple's names, dict of properties).

    Raises:
        ValueError: Apple's ops have no place for an option of the cell.
    """
    op = "to_mpsgraph"
    weights = as_stored(op, weights, FORMAT)  # refuses options that `FORMAT` does not list, such as a projection
    cell = weights.cell
    if cell.cell_clip:
        fail(op, "cell_clip must be the default, as the op has no place for another,", cell.cell_clip)
    if {"hard_sigmoid", "hard_sigmoid_sixth"} <= {*cell.activations}:
        fail(op, "activations must have one slope of hard_sigmoid, as the op has one,", cell.activations)
    names = {ours: theirs for theirs, ours in WORDS.items()}
    # Apple's default gate order, that of a descriptor whose forget_gate_last or reset_gate_first is off. In a GRU n is
    # the last gate, as in our order: `to_ops` relies on it.
    order = MPSGRAPH[cell.op][0]
    ordered = weights.map(lambda arrays: rows_reordered(arrays, OURS[cell.op], order))
    layers = [{names[name]: array for name, array in arrays.items()} for arrays in to_ops(ordered)]
    # default: the activations of a descriptor that does not set any; for Apple's plain RNN this is relu.
    default = {"lstm": LSTMCell().activations, "gru": GRUCell().activations, "rnn": ("relu",)}[cell.op]
    activations = cell.activations
    # apple: Apple's name of an activation by our name. Apple has a single hard_sigmoid and does not document its slope.
    apple = {ours: theirs for theirs, ours in ACTIVATIONS.items()} | {"hard_sigmoid_sixth": "hard_sigmoid"}
    triples = zip(PROPERTIES[cell.op], activations, default, strict=True)
    properties: dict[str, Any] = {name: apple[act] for name, act, usual in triples if act != usual}
    properties |= {"bidirectional": True} if weights.directions == 2 else {}
    properties |= {"reverse": True} if weights.reverse else {}
    return layers, properties | ({"reset_after": True} if cell.reset == "after" else {})
