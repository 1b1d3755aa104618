"""Convert the weights of the ONNX nodes LSTM, GRU and RNN to `Weights` and back.

A node has a type, arrays as inputs, and attributes (options by name). The arrays are W [D, GH, I] (input weights), R
[D, GH, H] (recurrent weights), B [D, 2GH] (both biases side by side) and P [D, 3H] (peephole weights), for D
directions, G gates, H units and I input features. In `Weights` one direction's arrays are Wx, Wh, bx, bh and peephole.
"""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import mlx.core as mx

from ..engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from ..engines.problem import Arrays
from ..ground.checks import check_array, check_option, fail
from .weights import (
    CELLS,
    OURS,
    Format,
    Weights,
    as_stored,
    checked,
    evened,
    from_peepholes,
    peepholes,
    reorder,
    rows_reordered,
    to_mlx,
    two_biases,
)

OPS = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn"}
"""The types of nodes, and this package's names of their cells."""

PEEPHOLES = "iof"
"""The gates that have peephole weights in ONNX, in the order of the array P."""

DIRECTIONS = ("forward", "reverse", "bidirectional")
"""The values of the attribute `direction`."""

DEFAULTS = {"lstm": ("Sigmoid", "Tanh", "Tanh"), "gru": ("Sigmoid", "Tanh"), "rnn": ("Tanh",)}
"""ONNX' default activations of one direction, in ONNX' order: for an LSTM of the gates i, f and o, of the candidate, of
the output; for a GRU of the gates r and z, of the candidate."""

ACTIVATIONS = {
    "identity": ("Affine", 1.0, 0.0),
    "relu": ("Relu", None, None),
    "tanh": ("Tanh", None, None),
    "sigmoid": ("Sigmoid", None, None),
    "hard_sigmoid": ("HardSigmoid", 0.2, 0.5),
    "hard_sigmoid_sixth": ("HardSigmoid", 1 / 6, 0.5),
}
"""ONNX' name, alpha and beta by our name of an activation; None: the activation has no such parameter."""

ORDERS = {"lstm": "iofg", "gru": "zrn", "rnn": "h"}
"""The gate order of each cell in ONNX, in our letters: ONNX calls g c, and n h."""

FORMAT = Format(ORDERS, options=True, nonlinearity=tuple(ACTIVATIONS), reset=("after", "before"), reverse=True)
"""What ONNX' nodes can store. `Format` has no field for a clip and for a peephole that reads the old c; `to_onnx`
refuses both."""


def from_onnx(
    op_type: str, W: Any, R: Any, B: Any = None, P: Any = None, attributes: Mapping[str, Any] | None = None
) -> Weights:
    """Return the weights of an ONNX node. `sequence_lens`, `initial_h` and `initial_c` are no weights; pass them to a
    call.

    Args:
        op_type (str): `"LSTM"`, `"GRU"` or `"RNN"`.
        W, R (array): [D, GH, I], [D, GH, H]; gates in the order i, o, f, c of an LSTM and z, r, h of a GRU.
        B (array, optional): both biases side by side, [D, 2GH].
        P (array, optional): peepholes of i, o, f, [D, 3H].
        attributes (dict, optional): the node's attributes. A ValueError names an attribute that this package does not
            support: `clip`, `input_forget`, activations that `mlx_lstm.lstm` does not have or that differ by direction.
            `layout` has no effect on the weights.

    Returns:
        Weights: of one layer. With `linear_before_reset=0`, ONNX' default, the reset gate of a GRU multiplies h before
            the recurrent product.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert, torch
        >>> given = {"direction": "bidirectional", "hidden_size": 4, "linear_before_reset": 1}
        >>> weights = convert.from_onnx("GRU", mx.ones((2, 12, 3)), mx.ones((2, 12, 4)), attributes=given)
        >>> torch.from_weights(weights)
        GRU(3, 4, bias=False, bidirectional=True)
    """
    if not isinstance(attributes, Mapping | None):
        fail("from_onnx", "attributes must be a dict", type(attributes).__name__)
    # The last argument: error texts call the arrays by their letters, W, R, B and P.
    return from_node("from_onnx", op_type, {"W": W, "R": R, "B": B, "P": P}, attributes or {}, lambda letter: letter)


def from_node(op: str, op_type: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any], name: Any) -> Weights:
    """Return the weights of an ONNX node. op: the public function with which error texts begin. op_type: "LSTM", "GRU"
    or "RNN". inputs: the arrays W, R, B and P by letter, where B and P may be None or missing. attributes: the node's
    options by name. name: a function that returns an array's name in error texts for its letter."""
    check_option(op, "op_type", op_type, tuple(OPS))
    kind = OPS[op_type]  # "lstm", "gru" or "rnn"
    arrays = {letter: to_mlx(array) for letter, array in inputs.items() if array is not None}
    options = {key: value.decode() if isinstance(value, bytes) else value for key, value in attributes.items()}
    # Each attribute that is read below is removed from `options`.
    direction = options.pop("direction", "forward")
    check_option(op, "direction", direction, DIRECTIONS)
    D, G = 2 if direction == "bidirectional" else 1, CELLS[kind].gates
    cell = cell_of_node(op, kind, options, D)
    check_array(op, name("R"), arrays.get("R"), [D, f"{G}H", "H"])  # a text is any size
    H = arrays["R"].shape[2]
    for letter, columns in (("R", H), ("W", "I")):
        check_array(op, name(letter), arrays.get(letter), [D, G * H, columns])
    if options.pop("hidden_size", H) != H:
        rule = f"{name('R')} must have shape [{D}, {G}H, H], where H is the node's hidden_size"
        fail(op, rule, list(arrays["R"].shape))
    # `layout` says whether the batch comes first in x, which does not change the weights. All other attributes that
    # this package supports have been read and removed. So any attribute that is left is not supported.
    options.pop("layout", None)
    if options:
        fail(op, f"the attributes of {op_type} must be those that this package supports", ", ".join(sorted(options)))
    layer = []  # the arrays of each direction, by their names in `Weights`
    for way in range(D):
        words = {"Wx": arrays["W"][way], "Wh": arrays["R"][way]}
        if "B" in arrays:
            check_array(op, name("B"), arrays["B"], [D, 2 * G * H])
            words |= dict(zip(("bx", "bh"), mx.split(arrays["B"][way], 2), strict=True))
        words = rows_reordered(words, ORDERS[kind], OURS[kind])  # from ONNX' gate order to ours
        if "P" in arrays:
            check_array(op, name("P"), arrays["P"], [D, 3 * H])
            parts = dict(zip(PEEPHOLES, mx.split(arrays["P"][way], 3), strict=True))  # by gate: i, o, f
            words["peephole"] = from_peepholes(**parts)
        layer.append(words)
    titles, weights = {"Wx": "W", "Wh": "R", "peephole": "P"}, Weights(cell, [layer], direction == "reverse")
    return checked(op, weights, title=lambda layer, way, word: name(titles.get(word, "B")))


def cell_of_node(op: str, kind: str, attributes: dict[str, Any], D: int) -> Cell:
    """Return the cell that an ONNX node's attributes describe, and remove these attributes from the dict `attributes`.
    kind: "lstm", "gru" or "rnn". D: the number of directions, for each of which ONNX lists the activations."""
    for name in ("clip", "input_forget"):
        if attributes.pop(name, 0):
            fail(op, f"{name} must be absent, as this package has no such option,", "it")
    names = taken(op, attributes, "activations", "names", (str, bytes))
    names = [each.decode() if isinstance(each, bytes) else each for each in names] or list(DEFAULTS[kind] * D)
    # The defaults 0.2 and 0.5 are those of HardSigmoid. ONNX has no defaults for Affine; an Affine with these numbers
    # is refused below, because it is not in `ACTIVATIONS`.
    alphas = parameters(op, attributes, "activation_alpha", names, 0.2)
    betas = parameters(op, attributes, "activation_beta", names, 0.5)
    acts = []  # the activations, by the names in this package
    for name, alpha, beta in zip(names, alphas, betas, strict=True):
        # `ACTIVATIONS` has for each of our names (ONNX' name, alpha, beta).
        act = next((ours for ours, theirs in ACTIVATIONS.items() if same((name, alpha, beta), theirs)), None)
        if act is None:
            fail(op, f"activations must be among {', '.join(sorted({one[0] for one in ACTIVATIONS.values()}))}", name)
        acts.append(act)
    n = len(acts) // D  # the activations of one direction
    if len(acts) != len(DEFAULTS[kind]) * D or (acts[:n] != acts[n:] and D == 2):
        fail(op, f"activations must be {len(DEFAULTS[kind])} for each direction, the same ones,", names)
    if kind == "rnn":
        return RNNCell(acts[0])
    if kind == "gru":
        reset = "after" if attributes.pop("linear_before_reset", 0) else "before"
        return GRUCell(activations=(acts[0], acts[0], acts[1]), reset=reset)  # of r, z, n
    f, g, h = acts[:3]  # of the gates i, f and o, of the candidate g, of the output
    return LSTMCell(activations=(f, f, g, f, h))


def parameters(
    op: str, attributes: dict[str, Any], name: str, activations: list[str], default: float
) -> list[float | None]:
    """Remove the attribute `name`, activation_alpha or activation_beta, from a node's attributes. Return the parameter
    of each activation, or None for one that has none. default: the value of a parameter that the list lacks."""
    values = taken(op, attributes, name, "numbers", Real)
    # In ONNX each activation that has a parameter takes the next number of the list. So the list has no number for an
    # activation without a parameter, such as Tanh.
    left = iter(values)
    found = [next(left, default) if each.lower() in ("hardsigmoid", "affine") else None for each in activations]
    # Another program may have meant a list with an entry for each activation, so such a list is refused if its entries
    # would then belong to other activations.
    if len(values) == len(found) and any(one not in (None, value) for one, value in zip(found, values, strict=True)):
        fail(op, f"{name} must hold numbers for HardSigmoid and Affine only", values)
    return found


def taken(op: str, attributes: dict[str, Any], name: str, words: str, kind: Any) -> list[Any]:
    """Remove the attribute `name`, a list, from a node's attributes, and return it; return [] if it is missing. Raise
    ValueError if its entries are not of the class `kind`; `words` describes this class in the error text."""
    value = attributes.pop(name, [])
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, kind) for each in value):
        fail(op, f"{name} must be a list of {words}", repr(value))
    return list(value)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two activations (name, alpha, beta) are equal. alpha and beta may be None. They may differ by a
    rounding error, because ONNX stores them in float32."""
    pairs = zip(one[1:], other[1:], strict=True)
    near = (a == b or (a is not None and b is not None and abs(a - b) < 1e-7) for a, b in pairs)
    return one[0].lower() == other[0].lower() and all(near)


def to_onnx(weights: Weights) -> list[tuple[str, dict[str, mx.array], dict[str, Any]]]:
    """Return for each layer the node's type, its arrays W, R, and maybe B and P, and its attributes.

    Raises:
        ValueError: ONNX' nodes have no place for an option of the cell: a projection, a clipped cell.
    """
    op = "to_onnx"
    # `as_stored` refuses options that `FORMAT` does not list, such as a projection. `evened` adds zeros if only one
    # direction has an array, because a node has arrays of both directions.
    weights = evened(as_stored(op, weights, FORMAT))
    cell = weights.cell
    attributes: dict[str, Any] = {"hidden_size": weights.hidden_size}
    # "bidirectional", else "reverse" or "forward".
    attributes["direction"] = DIRECTIONS[2 if weights.directions == 2 else int(weights.reverse)]
    if cell.reset:  # "after" or "before" in a GRU, else ""
        attributes["linear_before_reset"] = int(cell.reset == "after")
    attributes |= activation_attributes(cell, weights.directions)
    if cell.cell_clip or cell.output_peephole == "previous":  # a GRU or RNN has no such option: None and ""
        fail(op, "cell_clip and output_peephole must be the default, as ONNX has no place for others,", cell)
    op_type = next(name for name, kind in OPS.items() if kind == cell.op)
    nodes = []
    for layer in weights.layers:
        # directions: W, R, B, P of each direction. In a node the first axis of an array is the direction.
        directions = [node_arrays(cell.op, arrays, weights.has_bias) for arrays in layer]
        arrays = {letter: mx.stack([one[letter] for one in directions]) for letter in directions[0]}
        nodes.append((op_type, arrays, dict(attributes)))
    return nodes


def activation_attributes(cell: Cell, D: int) -> dict[str, Any]:
    """Return the attributes of an ONNX node that name the cell's activations; an empty dict if they are the defaults.
    D: the number of directions, for each of which ONNX lists the activations."""
    acts = cell.activations
    # ONNX has one activation for all gates, one for the candidate and, for an LSTM, one for the output. acts has the
    # activations of (i, f, g, o, output), (r, z, n) or a plain RNN, so take the first, the third and the fifth.
    chosen = [acts[0], *acts[2::2]]
    # All gates must have the same activation: acts must be (r, r, n) in a GRU, (i, i, g, i, output) in an LSTM.
    if len(chosen) > 1 and acts != (chosen[0], chosen[0], chosen[1], chosen[0], chosen[-1])[: len(acts)]:
        which = "both" if cell.op == "gru" else "all"
        fail("to_onnx", f"activations must be the same for {which} gates, as ONNX has them,", acts)
    theirs = [ACTIVATIONS[act] for act in chosen] * D  # (ONNX' name, alpha, beta)
    if tuple(one[0] for one in theirs) == DEFAULTS[cell.op] * D:  # Sigmoid and Tanh, which have no alpha and beta
        return {}
    attributes: dict[str, Any] = {"activations": [one[0] for one in theirs]}
    if alphas := [one[1] for one in theirs if one[1] is not None]:
        attributes |= {"activation_alpha": alphas, "activation_beta": [one[2] for one in theirs if one[2] is not None]}
    return attributes


def node_arrays(kind: str, arrays: Arrays, use_bias: bool) -> Arrays:
    """Return one direction's arrays W, R and maybe B and P, in ONNX' gate order. kind: "lstm", "gru" or "rnn". arrays:
    the direction's arrays in `Weights`. use_bias: whether the node has B; a missing bias then becomes zeros."""
    ours, theirs = OURS[kind], ORDERS[kind]  # gate orders such as "ifgo"
    inputs = {"W": reorder(arrays["Wx"], ours, theirs), "R": reorder(arrays["Wh"], ours, theirs)}
    if use_bias:
        inputs["B"] = mx.concatenate([reorder(b, ours, theirs) for b in two_biases(arrays)])
    if "peephole" in arrays:
        parts = peepholes("to_onnx", arrays, "ONNX does not")
        inputs["P"] = mx.concatenate([parts[gate] for gate in PEEPHOLES])
    return inputs
