"""The class `Weights`: a stack of recurrent layers in one form. All conversions between formats go through it. This
module also has the gate orders of all formats.

Sizes: G gates, H units, I input features, D directions; P is the size of h, which is H without a projection. GH rows
are one block of H rows for each gate, in a gate order such as "ifgo". One direction's arrays are a dict with these
names: Wx [GH, I], Wh [GH, P], the biases bx and bh [GH] of the products with Wx and Wh, Wp [P, H] (a projection),
peephole [4H], whose block of the candidate g is 0 where a format has peepholes for i, f and o only.
The functions of this package have a single bias b [GH] instead of bx and bh, and bhn [H], the recurrent bias of a GRU's
candidate n, which the reset gate multiplies. A way is the number of a direction, 0 forward or 1 reverse. op is the
public function with which error texts begin.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..engines.cells import ACTIVATIONS, Cell, GRUCell, LSTMCell, RNNCell
from ..engines.problem import Arrays
from ..ground.budget import shown
from ..ground.checks import FLOATS, check_array, check_limit, check_number, check_option, fail, for_mlx
from ..recurrence import join_biases
from .layers import check_keys, class_of

CELLS: dict[str, type[Cell]] = {"lstm": LSTMCell, "gru": GRUCell, "rnn": RNNCell}
"""The class of each cell, by the name of the function of `mlx_lstm` that runs it."""

OF_GATES = {4: "lstm", 3: "gru", 1: "rnn"}
"""The name of the cell by its number of gates, each of which is a block of H rows of the weights."""

OURS = {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}
"""The gate order of each cell in `Weights`, torch, MLX and cuDNN (which has the letters i, f, c, o and r, u, n). In a
GRU r is the reset gate, z the update gate, n the candidate."""

TF = {"icfo": "igfo", "ifco": "ifgo"}
"""TensorFlow's gate orders of an LSTM, and the same orders in our letters: TensorFlow's c is g here."""

MPSGRAPH = {"lstm": ("ifgo", "igfo"), "gru": ("zrn", "rzn"), "rnn": ("h", "h")}
"""MPSGraph's gate orders of each cell, without and with the flag of the descriptor that changes the order: an LSTM's
`forget_gate_last` or a GRU's `reset_gate_first`."""

CHOICES = {"act": ACTIVATIONS, "reset": ("after", "before"), "output_peephole": ("current", "previous")}
CHOICES |= {"flip_z": (False,), "gate_order": tuple(OURS.values())}
CHOICES["clip_gradient"] = ("through", "zero")
"""The options of a cell that have only a few allowed values, each with these values."""

LIMITS = ("cell_clip", "projection_clip")
"""The options that are limits of an LSTM's clips. A limit of 0 or less means no limit."""


class Format(NamedTuple):
    """What a format can store. The module of each format has an object `FORMAT` of this class; `as_stored` checks
    weights with it.

    orders: the gate order of each kind of cell. options: whether all options of an LSTM and a GRU are stored, such as
    activations, clip and peepholes. nonlinearity: the activations that a plain RNN may have. reset: the values of
    `reset` that a GRU may have. projection: whether a projection is stored. reverse: whether it is stored that a layer
    runs in reverse. is_layer: whether the format is one layer in one direction, of a kind in `orders`.
    """

    orders: Mapping[str, str] = OURS
    options: bool = False
    nonlinearity: Sequence[str] = ("tanh",)
    reset: Sequence[str] = ("after",)
    projection: bool = False
    reverse: bool = False
    is_layer: bool = False


Found = tuple[dict[str, "Weights"], dict[str, Any], dict[str, list[str]], list[str]]
"""What a reader of a file returns: the layers by name, the other arrays by key, the keys of each layer, and notes for
the user."""

Title = Callable[[int, int, str], str]
"""The type of a function (layer, way, word) that returns the name of an array in a format, for error texts. layer, way:
the numbers of the array's layer and direction. word: its name in `Weights`, such as "Wx"."""


class Weights(NamedTuple):
    """The weights of a stack of recurrent layers, in one form for all formats. Each layer reads the output of the layer
    below.

    `cell` has the formula and its options. The gate order is always i, f, g, o or r, z, n.

    `layers[layer][direction]` holds arrays by name, the forward direction first. `Wx` [GH, I] and `Wh` [GH, P] are
    always there; P is the size of h, which is H without a projection. A layer may also have the biases `bx` [GH] of the
    input's product and `bh` [GH] of the recurrent product, the projection `Wp` [P, H], and `peephole` [4H].

    `reverse`: the layers have one direction, which runs from the end to the start.
    """

    cell: Cell
    layers: Sequence[Sequence[Arrays]]
    reverse: bool = False

    def __repr__(self) -> str:
        return f"Weights({describe(self)})"

    @property
    def directions(self) -> int:
        """Return the number of directions: 1 or 2."""
        return len(self.layers[0])

    @property
    def input_size(self) -> int:
        """Return the number of features that the first layer reads."""
        return self.layers[0][0]["Wx"].shape[1]

    @property
    def hidden_size(self) -> int:
        """Return the number of units, H."""
        return self.layers[0][0]["Wx"].shape[0] // self.cell.gates

    @property
    def proj_size(self) -> int:
        """Return the size P of a projected h, or 0 without a projection."""
        return self.layers[0][0]["Wp"].shape[0] if "Wp" in self.layers[0][0] else 0

    @property
    def has_bias(self) -> bool:
        """Return whether any layer has a bias."""
        return any(name in arrays for layer in self.layers for arrays in layer for name in ("bx", "bh"))

    @property
    def options(self) -> dict[str, Any]:
        """Return the keywords of `mlx_lstm.lstm`, `gru` or `rnn` for these weights, without options at their
        default."""
        default = type(self.cell)()
        options = {name: value for name, value in self.cell._asdict().items() if value != getattr(default, name)}
        # The activation of a plain RNN is the field `act` of its cell, but the argument `activation` of `mlx_lstm.rnn`.
        options = {{"act": "activation"}.get(name, name): value for name, value in options.items()}
        options |= {"bidirectional": True} if self.directions == 2 else {}
        return options | ({"reverse": True} if self.reverse else {})

    def map(self, change: Callable[[Arrays], Arrays]) -> "Weights":
        """Return a copy of the weights with the function `change` applied to the arrays of each direction."""
        return self._replace(layers=[[change(arrays) for arrays in layer] for layer in self.layers])

    def each(self) -> list["Weights"]:
        """Return a list with a separate `Weights` for each layer."""
        return [self._replace(layers=[layer]) for layer in self.layers]


def parameters_of(op: str, rule: str, layer: Any, prefix: str = "") -> tuple[Any, Mapping[str, Any]]:
    """Return (named, parameters): the layer of a model that a prefix such as "encoder.lstm." names, and the parameters
    of the model, or the entries of a dict, whose names begin with `prefix`. The names stay unchanged. With an empty
    prefix the named layer is `layer` itself; for a dict it is the dict itself, which has no attributes from which
    options could be read.

    layer: an object with a method `state_dict` or `parameters`, or a dict. op: the public function, for error texts.
    rule: the error text if `layer` is none of these.
    """
    if not isinstance(prefix, str):
        fail(op, "prefix must be a str", repr(prefix))
    named = layer
    for name in prefix.split(".")[:-1]:
        named = getattr(named, name, None)
    class_of(op, "the layer", named)  # raises ValueError for a subclass that may compute something else
    for method in ("state_dict", "parameters"):
        if callable(function := getattr(layer, method, None)):  # a program of torch.export has a dict state_dict
            layer = function()
            break
    if not isinstance(layer, Mapping):
        fail(op, rule, type(layer).__name__)
    check_keys(op, layer)
    return named, {key: value for key, value in layer.items() if key.startswith(prefix)}


def cell_of(op: str, name: str, options: dict[str, Any]) -> Cell:
    """Return a cell with these options. Raise ValueError for an unknown option or a wrong value.

    op: the public function with which error texts begin. name: the kind of cell, "lstm", "gru" or "rnn". options: by
    the names of `Weights.options`, such as reset or activations. A list, which JSON has for a tuple, becomes a tuple.
    """
    # The field of a plain RNN is `act`; the public option of `mlx_lstm.rnn` is `activation`.
    options = {{"activation": "act"}.get(key, key): value for key, value in options.items()}
    if unknown := options.keys() - set(CELLS[name]._fields):
        fail(op, f"options must be those of a {name} cell", ", ".join(sorted(unknown)))
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if options.get("norm") is not None:
        rule = "norm must be None, as no Weights hold layer normalisation (nn.LSTM(layer_norm=) does)"
        fail(op, rule, options["norm"])
    # Check each value by the kind of its option. usual: the default value of the option.
    default = CELLS[name]()
    for key, value in options.items():
        usual = getattr(default, key)
        if isinstance(usual, tuple):  # the activations of the gates
            if not isinstance(value, tuple) or len(value) != len(usual) or not set(value) <= set(ACTIVATIONS):
                fail(op, f"{key} must be {len(usual)} of {', '.join(ACTIVATIONS)}", value)
        elif key in CHOICES:  # an option with a few allowed values
            check_option(op, key, value, CHOICES[key])
        elif key in LIMITS:  # the limit of a clip; 0 or less becomes None
            options[key] = check_limit(op, key, value)
        elif value is not None or usual is not None:  # a number, such as forget_bias
            check_number(op, key, value)
    return CELLS[name](**options)


def stacked(op: str, parts: Sequence[Weights]) -> Weights:
    """Join several `Weights`, the list `parts`, into one stack, in which each layer reads the output of the layer
    before. Raise ValueError if their sizes do not fit. op: the name that the error text begins with."""
    if not isinstance(parts, Sequence) or not parts:
        fail(op, "parts must be a list of at least one Weights", repr(parts))
    first = check_weights(op, parts[0])
    for part in parts[1:]:
        check_weights(op, part)
        if part.cell != first.cell or part.reverse != first.reverse or part.directions != first.directions:
            fail(op, f"layers must all be alike, {describe(first)},", describe(part))
    whole = first._replace(layers=[layer for part in parts for layer in part.layers])
    return checked(op, whole, title=lambda layer, way, word: f"{word} of layer {layer}, direction {way},")


def describe(weights: Weights) -> str:
    """Return a short text that describes weights: cell, sizes, layers, directions, options. For example "LSTM, 3 -> 4,
    2 layers, no bias" reads 3 features and has 4 units."""
    kind = {"lstm": "LSTM", "gru": "GRU", "rnn": "RNN"}[weights.cell.op]
    text = f"{kind}, {weights.input_size} -> {weights.hidden_size}"
    text += f", projected to {weights.proj_size}" if weights.proj_size else ""
    text += f", {len(weights.layers)} layers" if len(weights.layers) > 1 else ""
    text += ", both directions" if weights.directions == 2 else ""
    text += "" if weights.has_bias else ", no bias"
    options = {name: value for name, value in weights.options.items() if name != "bidirectional"}
    return text + "".join(f", {name}={value!r}" for name, value in options.items())


def checked(op: str, weights: Weights, title: Title = lambda layer, way, word: word) -> Weights:
    """Check that the shapes of all arrays fit together, and return the weights. Wh (and Wp) of the first layer define
    the sizes H and P, which all other arrays must have.

    title: a function (layer, way, word) that returns an array's name in the caller's format, for error texts. layer,
    way: the numbers of the array's layer and direction. word: its name in `Weights`, such as "Wx": the default.
    """
    G, D = weights.cell.gates, weights.directions
    first = weights.layers[0][0]  # the forward direction of the first layer, whose sizes all others must have
    if weights.reverse and D == 2:
        fail(op, "reverse must be False for both directions", True)
    if weights.cell.projection_clip is not None and "Wp" not in first:
        fail(op, "projection_clip must be None without a projection", weights.cell.projection_clip)
    matrices = ["Wx", "Wh", *(["Wp"] if "Wp" in first else [])]
    for n, layer in enumerate(weights.layers):
        for way, arrays in enumerate(layer):
            for word in matrices:
                if word not in arrays:
                    fail(op, f"{title(n, way, word)} must be there", "no such array")
    for word in matrices:
        check_array(op, title(0, 0, word), first[word], ["rows", "columns"])  # two axes of any size
    # Wh has GH rows and P columns. With a projection P is the number of rows of Wp, else P is H.
    rows, columns = first["Wh"].shape
    P = first["Wp"].shape[0] if "Wp" in first else rows // G
    blocks = "H" if G == 1 else f"{G}H"
    if rows % G or columns != P or not rows:
        sizes = "" if "Wp" in first else f" = [{G * columns}, {columns}]"
        rule = f"{title(0, 0, 'Wh')} must have shape [{blocks}, {'P' if 'Wp' in first else 'H'}]{sizes}"
        fail(op, rule, f"shape {list(first['Wh'].shape)}")
    # shapes: the shape that each array must have. A layer above the first reads the D P outputs of the layer below.
    shapes: dict[str, list[int | str]] = {"Wh": [rows, P], "bx": [rows], "bh": [rows], "peephole": [rows]}
    shapes["Wp"] = [P, rows // G]
    # others: the arrays that are refused. Only an LSTM may have Wp and peephole, and Wp only if its first layer has Wp.
    others = {"Wp", "peephole"} if weights.cell.op != "lstm" else {"Wp"} - first.keys()
    for n, layer in enumerate(weights.layers):
        shapes["Wx"] = [rows, D * P if n else weights.input_size]
        for way, arrays in enumerate(layer):
            for word, array in arrays.items():
                if word in others:
                    rule = "all layers have it" if weights.cell.op == "lstm" else "the cell is an LSTM"
                    fail(op, f"{title(n, way, word)} must not be there unless {rule}", "this array")
                # Building the title takes longer than this check, so `check_array` is called for a wrong array only.
                is_array = isinstance(array, mx.array) and array.dtype in FLOATS
                if not is_array or list(array.shape) != shapes.get(word):
                    check_option(op, f"the name of an array of layer {n}", word, tuple(shapes))
                    check_array(op, title(n, way, word), array, shapes[word], why=f", as H is {rows // G},")
    return weights


def check_weights(op: str, weights: object) -> Weights:
    """Check that `weights` is a `Weights`, as the readers of this package return it, and return it. A user may have
    made it, or changed its arrays, so check the arrays, too."""
    if not isinstance(weights, Weights):
        rule = "weights must be a Weights, as convert.from_torch, from_mlx and their kin return,"
        fail(op, rule, type(weights).__name__)
    return checked(op, weights)


@contextmanager
def of_layer(name: str) -> Iterator[None]:
    """Return a context that adds the name of a layer to the text of each ValueError raised inside its `with` block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} The layer is {shown(name)}." if name else str(error)) from None


def one_layer(op: str, weights: Weights, kinds: Sequence[str]) -> Weights:
    """Check that the weights are of a single layer in one direction, whose cell is one of `kinds`, such as "lstm".
    Return the weights."""
    check_weights(op, weights)
    if weights.cell.op not in kinds or len(weights.layers) != 1 or weights.directions != 1:
        names = " or ".join(kind.upper() for kind in kinds)
        fail(op, f"weights must be those of one {names} layer in one direction", describe(weights))
    return weights


def as_stored(op: str, weights: Weights, form: Format) -> Weights:
    """Return the weights as a format stores them: with an LSTM's forget bias added to the bias. Raise ValueError if the
    format cannot store an option of the cell. form: what the format can store; `Format` describes its fields."""
    # The first field is the format's gate orders, which make no difference here.
    _, options, nonlinearity, reset, projection, reverse, is_layer = form
    if is_layer:
        one_layer(op, weights, list(form.orders))
    # refused: for each option its value if the format cannot store this value, else a value that counts as false.
    cell, refused = check_weights(op, weights).cell, {}
    if cell.op == "rnn":
        act = cell.activations[0]
        refused["activation"] = act not in nonlinearity and act
    else:
        usual = cell.activations == type(cell)().activations  # whether the activations are the default ones
        refused["activations"] = not options and not usual and cell.activations
    if cell.reset:  # a GRU
        refused["reset"] = cell.reset not in reset and cell.reset
    if isinstance(cell, LSTMCell):  # LIMITS: the options that are limits of clips
        refused |= {name: not options and getattr(cell, name) for name in LIMITS}
        arrays = [arrays for layer in weights.layers for arrays in layer]
        refused["peephole"] = not options and any("peephole" in each for each in arrays) and "an array"
        refused["a projection"] = not projection and weights.proj_size
        # torch and cuDNN have no projection that leaves h as wide as c: cuDNN then turns the projection off.
        wide = weights.proj_size >= weights.hidden_size
        refused["a projection that makes h no narrower"] = projection and wide and weights.proj_size
    refused["reverse"] = not reverse and weights.reverse
    for name, value in refused.items():
        if value:
            others = "to_ops, --to ops and nn.from_weights have"
            fail(op, f"{name} must be the default, as the format has no other ({others}),", repr(value))
    return in_bias(weights)


def in_bias(weights: Weights) -> Weights:
    """Return the weights with an LSTM's option `forget_bias` added to its bias and set to 0. Most formats store only
    the bias, without a separate forget bias."""
    cell = weights.cell
    if not (isinstance(cell, LSTMCell) and cell.forget_bias):
        return weights  # another cell, or a forget bias of 0

    def with_forget_bias(arrays: Arrays) -> Arrays:
        i, f, g, o = mx.split(two_biases(arrays)[0], 4)  # the blocks of bx, by gate
        return arrays | {"bx": mx.concatenate([i, f + cell.forget_bias, g, o])}

    return weights._replace(cell=cell._replace(forget_bias=0.0)).map(with_forget_bias)


def evened(weights: Weights) -> Weights:
    """Return the weights with the same arrays in both directions of each layer. If only one direction has a bias or a
    peephole, the other direction gets zeros. Formats that store both directions in one array need this."""
    layers = []
    for layer in weights.layers:
        zeros = {name: mx.zeros_like(array) for arrays in layer for name, array in arrays.items()}
        layers.append([zeros | arrays for arrays in layer])
    return weights._replace(layers=layers)


def one_bias(cell: Cell, arrays: Arrays) -> Arrays:
    """Return a dict with `b` [GH], the sum of a direction's two biases, or {} if it has no bias. For a GRU that resets
    after the product, the candidate's part of bh is not in the sum, but in the dict as `bhn` [H].

    If one of the two biases is 0, `b` equals the other bias bit for bit.
    """
    if "bx" not in arrays and "bh" not in arrays:
        return {}
    bx, bh = two_biases(arrays)
    resets_after = cell.reset == "after"  # the reset gate then multiplies the candidate's part of bh
    # A 0 in bh is added as -0.0, so that the sum equals bx bit for bit: -0.0 + -0.0 is -0.0, but -0.0 + 0.0 is 0.0.
    b = join_biases(bx, mx.where(bh == 0, mx.array(-0.0, bh.dtype), bh), gru=resets_after)["b"]
    # The candidate is the last of a GRU's three gates.
    return {"b": b} | ({"bhn": bh[bh.shape[0] // 3 * 2 :]} if resets_after else {})


def two_biases(arrays: Arrays) -> tuple[mx.array, mx.array]:
    """Return one direction's biases `bx` [GH] of the input's product and `bh` [GH] of the recurrent product, with zeros
    for a missing bias."""
    zeros = mx.zeros((arrays["Wx"].shape[0],), arrays["Wx"].dtype)
    return arrays.get("bx", zeros), arrays.get("bh", zeros)


def whole_bias(cell: Cell, arrays: Arrays) -> mx.array:
    """Return the sum of a direction's two biases [GH], as `one_bias` does, or zeros if it has no bias."""
    # Without biases `two_biases` returns zeros.
    return one_bias(cell, arrays).get("b", two_biases(arrays)[0])


def peepholes(op: str, arrays: Arrays, who: str) -> Arrays:
    """Return the peephole weights [H] of the gates i, f and o by the gate's letter, for a format in which the candidate
    g cannot have any. arrays: one direction's arrays, with `peephole` [4H]. who: the beginning of a sentence for the
    error text if g has peephole weights, such as "ONNX does not"."""
    parts = dict(zip(OURS["lstm"], mx.split(arrays["peephole"], 4), strict=True))  # OURS["lstm"] is the order "ifgo"
    if mx.any(parts.pop("g")).item():
        fail(op, f"peephole must be 0 for the candidate, which {who} let peep,", "other numbers")
    return parts


def from_peepholes(i: mx.array, f: mx.array, o: mx.array) -> mx.array:
    """Return the array `peephole` [4H], in the gate order i, f, g, o, for the peephole weights [H] of three gates. The
    candidate g gets zeros."""
    return mx.concatenate([i, f, mx.zeros_like(i), o])


def from_one_bias(b: mx.array | None, bhn: mx.array | None) -> Arrays:
    """Convert the biases of the recurrence, `b` [GH] and a GRU's `bhn` [H], to the biases `bx` and `bh` [GH] of
    `Weights`. bx is b. The last part of bh, the candidate's, is bhn; its other parts are 0. None stands for a missing
    bias."""
    biases = {} if b is None else {"bx": b}
    if bhn is None:
        return biases
    zeros = mx.zeros((2 * bhn.shape[0],), bhn.dtype)  # the parts of the gates r and z
    # `Weights` has bx and bh, or neither. So if only bhn is given, bx consists of zeros.
    return {"bx": mx.zeros((3 * bhn.shape[0],), bhn.dtype)} | biases | {"bh": mx.concatenate([zeros, bhn])}


def reorder(array: mx.array, before: str, after: str, axis: int = 0) -> mx.array:
    """Return an array with its blocks for the gates, along `axis`, moved from the gate order `before` to the order
    `after`. A gate order is a text with one letter per gate, such as "ifgo"."""
    if before == after:
        return array
    blocks = dict(zip(before, mx.split(array, len(before), axis=axis), strict=True))
    return mx.concatenate([blocks[gate] for gate in after], axis=axis)


def rows_reordered(arrays: Arrays, before: str, after: str) -> Arrays:
    """Return one direction's arrays with their rows moved from the gate order `before`, such as "ifgo", to `after`.
    `Wp` and `bhn` stay as they are, since they have no blocks for gates."""
    unchanged = ("Wp", "bhn")
    return {name: array if name in unchanged else reorder(array, before, after) for name, array in arrays.items()}


def gate_order(op: str, text: str, usual: str) -> str:
    """Return a vendor's gate order, `text`, in the letters of this package: an LSTM's c or z becomes g; a GRU's u
    becomes z, and its h or c becomes n. Raise ValueError if the text does not name each gate once. usual: the cell's
    gate order in this package, such as "ifgo"."""
    # letters: our letter by a vendor's letter, for the cell with this number of gates.
    letters = {4: {"c": "g", "z": "g"}, 3: {"u": "z", "h": "n", "c": "n"}, 1: {}}[len(usual)]
    order = "".join(letters.get(letter, letter) for letter in text.lower()) if isinstance(text, str) else ""
    if sorted(order) != sorted(usual):
        others = ", ".join(f"{theirs} for {ours}" for theirs, ours in letters.items())
        fail(op, f"the gate order must be a permutation of {usual}{others and f' ({others})'}", repr(text))
    return order


def to_mlx(array: Any) -> mx.array:
    """Convert an array of torch, Keras or NumPy to an MLX array of the same dtype; return an MLX array as it is."""
    if isinstance(array, mx.array):
        return array
    if hasattr(array, "detach"):  # a tensor of torch
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":  # NumPy has no bfloat16
            return mx.array(array.float().numpy()).astype(mx.bfloat16)
    try:
        array = for_mlx(array)
    except ValueError:  # a list of rows of different lengths
        fail("convert", "arrays must hold numbers, in rows of equal length,", type(array).__name__)
    # NumPy's kinds of dtypes: f floats, i and u integers, b bools. MLX has none of more than 8 bytes.
    if (array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16") or array.itemsize > 8:
        fail("convert", "arrays must hold numbers", array.dtype)
    # Without a dtype MLX converts float64 to float32.
    return mx.array(array, mx.float64 if array.dtype == np.float64 else None)


def bits(array: mx.array | np.ndarray) -> bytes:
    """Return the bytes of an array, so that two arrays can be compared bit for bit. NumPy has no bfloat16, so such an
    array is read as 16-bit integers."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def differences(one: Weights, other: Weights) -> list[str]:
    """Return a list of all differences, even of one bit, between two objects `Weights`: names such as "Wh", "bx",
    "activations", or texts such as "float16 is now float32". A missing bias equals a bias of zeros."""
    check_weights("differences", one)
    check_weights("differences", other)
    if (len(one.layers), one.directions) != (len(other.layers), other.directions):
        return [f"{describe(one)} is now {describe(other)}"]
    options = [weights.options for weights in (one, other)]
    changes = [name for name in {**options[0], **options[1]} if options[0].get(name) != options[1].get(name)]
    for layers in zip(one.layers, other.layers, strict=True):
        for ways in zip(*layers, strict=True):
            # ways: one direction's arrays in `one`, and in `other`.
            for name in {**ways[0], **ways[1]}:
                zeros = mx.zeros((ways[0]["Wx"].shape[0],), ways[0]["Wx"].dtype)  # in place of a missing bias
                before, after = (way.get(name, zeros) for way in ways)
                if before.dtype != after.dtype:
                    changes.append(f"{before.dtype} is now {after.dtype}".replace("mlx.core.", ""))
                    before, after = before.astype(mx.float32), after.astype(mx.float32)
                if before.shape != after.shape or bits(before) != bits(after):
                    changes.append(name)
    return list(dict.fromkeys(changes))  # each change once
