"""Convert the weights of Keras' layers to `Weights` and back.

Keras' arrays of one direction are kernel [I, GH] (input weights), recurrent_kernel [H, GH] and bias [GH], for I input
features, G gates and H units. A GRU with reset_after has two biases in one array, [2, 3H]. `Weights` has the transposed
matrices Wx and Wh, and the biases bx and bh.

A way is a direction of a layer. A config is a layer as Keras serializes it: a dict with its class_name and with config,
the dict of its options. A slope says which hard_sigmoid a version of Keras has: "x/5" (Keras 2) or "x/6" (Keras 3).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..engines.cells import GRUCell, LSTMCell, RNNCell
from ..engines.problem import Arrays
from ..ground.checks import check_array, fail
from .weights import CELLS, OURS, Format, Weights, as_stored, checked, reorder, stacked, to_mlx, two_biases, whole_bias

KINDS = {"LSTM": "lstm", "GRU": "gru", "SimpleRNN": "rnn", "LSTMCell": "lstm", "GRUCell": "gru", "SimpleRNNCell": "rnn"}
KINDS |= {"CuDNNLSTM": "lstm", "CuDNNGRU": "gru"}
"""Keras' classes of layers and cells, and this package's names of the cells. The last two are in Keras 2 only."""

PACKAGES = ("keras", "keras_core", "tf_keras", "tensorflow")
"""The packages whose layers are Keras'. Layers of other packages are classes of a user."""

NAMES = ("kernel", "recurrent_kernel", "bias")
"""The names that Keras gives to the arrays of one direction, in the order of its `get_weights`."""

ACTIVATIONS = {"linear": "identity", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid"}
ACTIVATIONS |= {"hard_sigmoid": "hard_sigmoid_sixth"}
"""Keras' names of activations, and ours. The slope of hard_sigmoid is 1/6 in Keras 3, 0.2 in Keras 2."""

ORDERS = {"lstm": "ifgo", "gru": "zrn", "rnn": "h"}
"""Keras' gate orders, in our letters: Keras calls g c, and n h."""

EVERY = (*ACTIVATIONS.values(), "hard_sigmoid")
"""The activations that some version of Keras has."""

FORMAT = Format(ORDERS, options=True, nonlinearity=EVERY, reset=("after", "before"), reverse=True)
NAMED = FORMAT._replace(options=False, nonlinearity=("tanh", "relu", "sigmoid"))
"""FORMAT: what Keras' layers can store. NAMED: what a file of arrays with Keras' names can store, which has no
options."""


def from_keras(*layers: Any) -> Weights:
    """Return the weights of a stack of Keras layers: `LSTM`, `GRU`, `SimpleRNN`, `Bidirectional`.

    Args:
        layers: built layers of Keras 3, all of one kind; each reads the output of the layer before. The package `keras`
            is not imported. If the first layer has go_backwards, all layers run in reverse: Keras passes the outputs
            of such a layer on in the reverse order. So a later layer must not have go_backwards.

    Returns:
        Weights: in the dtypes of the layers; the two biases of a GRU stay separate.

    Raises:
        ValueError: a layer of another class, an activation that this package lacks or that is a function of the user's
            own, layers whose sizes do not fit, or a later layer with go_backwards.
    """
    op = "from_keras"
    if not layers:
        fail(op, "layers must be at least one", "none")
    parts = []
    for layer in layers:
        kind = type(layer).__name__
        is_own = type(layer).__module__.partition(".")[0] not in PACKAGES  # a user's class may be called LSTM, too
        if kind not in (*KINDS, "Bidirectional") or is_own or not hasattr(layer, "get_weights"):
            is_read = hasattr(layer, "layers") or kind == "RNN"  # an RNN of Keras' cells
            whole = ": convert.read takes a file with all layers," if is_read else ""
            whole = ": pass the layers one by one," if isinstance(layer, (list, tuple)) else whole
            got = f"{kind} of {type(layer).__module__}" if is_own and kind in KINDS else kind
            fail(op, f"layers must be LSTM, GRU, SimpleRNN or Bidirectional of Keras{whole}", got)
        config = {"class_name": kind, "config": layer.get_config()}
        both = [layer.forward_layer, layer.backward_layer] if kind == "Bidirectional" else [layer]
        check_functions(op, both, layer.name)
        ways = [way.get_weights() for way in both]  # the arrays of each direction
        if not all(ways):
            fail(op, "layers must be built", f"{layer.name} without weights")
        parts.append(from_arrays(op, ways, config, layer.name))
    return stack(op, parts)


def check_functions(op: str, layers: Sequence[Any], name: str) -> None:
    """Raise ValueError if an activation of a layer is a user's own function: Keras writes only the name of a function
    into a layer's configuration if one of its own functions has this name, too, such as hard_sigmoid. Raise it also for
    a cell of the user's own class, which the configuration of an LSTM does not tell. layers: the layers of both
    directions, or one layer. name: the layer's name, for the error text."""
    for layer in layers:
        kind = type(getattr(layer, "cell", layer))
        if kind.__module__.partition(".")[0] not in PACKAGES:
            fail(op, f"the cell of {name} must be of a class of Keras", f"{kind.__name__} of {kind.__module__}")
        for option in ("activation", "recurrent_activation"):
            function = getattr(layer, option, None)
            # Functions written in C have no module.
            module = getattr(function, "__module__", None) or "keras"
            if module.partition(".")[0] not in (*PACKAGES, "jax", "torch"):
                called = getattr(function, "__name__", type(function).__name__)
                fail(op, f"{option} of {name} must be a function of Keras", f"{called} of {module}")


def stack(op: str, parts: Sequence[Weights]) -> Weights:
    """Join the `Weights` of several Keras layers, each of which reads the output of the layer before. In `parts`,
    reverse means that the layer has go_backwards.

    Keras returns the outputs of a layer with go_backwards in the order in which it computes them, from the last step to
    the first. So each later layer with one direction runs in reverse, too; one with both directions reads them in any
    order. A later layer that has go_backwards itself is refused with a ValueError.
    """
    first, *others = parts
    for n, part in enumerate(others, 1):
        if part.reverse:
            fail(op, "go_backwards must be False after the first layer", f"True for layer {n}")
    return stacked(op, [first, *(part._replace(reverse=first.reverse and part.directions == 1) for part in others)])


def from_arrays(
    op: str, ways: Sequence[Sequence[Any]], config: Mapping[str, Any] | None, name: str, *, slope: str = "x/6"
) -> Weights:
    """Return the weights of a Keras layer. ways: for each direction a list of its kernel, recurrent_kernel and, if
    there is one, bias. config: the layer as Keras serialized it; if None, the shapes of the arrays say which cell it
    is. name: the layer's name, for error texts. slope: the slope of hard_sigmoid, "x/5" (Keras 2) or "x/6" (Keras
    3)."""
    # inner: the configuration with the cell's options, without a Bidirectional around it. cudnn: for each direction the
    # arrays of a CuDNNLSTM or CuDNNGRU in the layout of an LSTM or GRU, or None for other layers. Their bias is [2,
    # GH]. This is the usual bias of a GRU that resets after the product, so only the LSTM needs a special case below.
    inner = None if config is None else wrapped(op, config, name)
    if (most := max(map(len, ways))) > len(NAMES):
        fail(op, f"{name} must have no arrays but {', '.join(NAMES)}", f"{most} arrays")
    cudnn = [of_cudnn(*arrays) for arrays in ways]
    ways = [arrays for arrays in cudnn if arrays] if all(cudnn) else ways
    shape = np.shape(ways[0][1])  # of recurrent_kernel, [H, GH]
    if inner is None:
        G = shape[1] // shape[0] if len(shape) == 2 and shape[0] else 0
        by_gates = {cell.gates: cell for cell in CELLS.values()}
        if len(shape) != 2 or G * shape[0] != shape[1] or G not in by_gates:
            rule = f"recurrent_kernel of {name} must have shape [H, 4H], [H, 3H] or [H, H]"
            fail(op, rule, f"shape {list(shape)}")
        cell = by_gates[G]()
        if cell.op == "gru" and len(ways[0]) > 2 and np.ndim(ways[0][2]) == 1:  # a single bias: reset_after is False
            cell = GRUCell(reset="before")
    else:
        cell = cell_of_config(op, inner, name, slope)
    # biases: the allowed shapes of the bias, with the last size in multiples of H: [2, 4] means [2, 4H].
    has_two = cell.reset == "after" or (cell.op == "lstm" and all(cudnn))
    biases = [[2, cell.gates] if has_two else [cell.gates]]
    of = f" of {name}" if name else ""
    layer = [direction(op, cell.op, arrays, biases=biases, of=of) for arrays in ways]
    titles = {"Wx": "kernel", "Wh": "recurrent_kernel"}  # Keras' names; both biases are called bias
    # In a Bidirectional go_backwards is an option of the layers inside, which `wrapped` checks.
    reverse = config is not None and len(ways) == 1 and bool(config["config"].get("go_backwards"))
    return checked(op, Weights(cell, [layer], reverse), title=lambda layer, way, word: titles.get(word, "bias") + of)


def of_cudnn(kernel: Any, recurrent_kernel: Any, bias: Any = None) -> list[Any] | None:
    """Convert the arrays of a CuDNNLSTM or CuDNNGRU to the layout of an LSTM or GRU; return None for any other layer.
    These two classes join both biases into one row. The block of each gate contains the numbers of a matrix [H, I], row
    by row, although its shape is [I, H]."""
    shape = np.shape(recurrent_kernel)
    H, columns = shape if len(shape) == 2 else (0, 0)
    # Only these two classes have a bias with one axis and two numbers for each column of the kernels.
    if not H or columns not in (3 * H, 4 * H) or [np.shape(kernel)[1:], np.shape(bias)] != [(columns,), (2 * columns,)]:
        return None
    # by_gate: for both kernels a list of one block per gate. Each block's numbers are read as [H, I], then transposed.
    by_gate = [np.split(np.asarray(array), columns // H, axis=1) for array in (kernel, recurrent_kernel)]
    kernels = [np.hstack([block.reshape(H, -1).T for block in blocks]) for blocks in by_gate]
    return [*kernels, np.asarray(bias).reshape(2, -1)]


def wrapped(op: str, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the configuration that contains the cell's options. It is `config` itself, or the configuration of the
    layer or cell inside a Bidirectional or RNN. Raise ValueError if the options of both directions differ. name: the
    layer's name, for error texts."""
    if config["class_name"] == "Bidirectional":
        inner = config["config"]
        # Without a "backward_layer" Keras makes a copy of "layer" for the reverse direction.
        forward, backward = inner["layer"], inner.get("backward_layer") or inner["layer"]
        # The other options, such as units, are checked by the shapes of the arrays.
        keys = ("activation", "recurrent_activation", "reset_after")
        # cells: the options of both directions' cells. If a direction is an RNN, they are in its cell's configuration.
        cells = [wrapped(op, each, name)["config"] for each in (forward, backward)]
        if [cells[0].get(key) for key in keys] != [cells[1].get(key) for key in keys]:
            fail(op, f"both directions of {name} must have the same options", "different ones")
        if forward["config"].get("go_backwards"):
            fail(op, f"the first direction of {name} must go forward", "go_backwards=True")
        return wrapped(op, forward, name)
    if config["class_name"] == "RNN":
        return wrapped(op, config["config"]["cell"], name)
    if config["class_name"] not in KINDS or not is_of_keras(config):
        fail(op, f"{name} must be LSTM, GRU or SimpleRNN of Keras", config["class_name"])
    return config


def is_of_keras(spec: Mapping[str, Any]) -> bool:
    """Return whether a serialized layer or cell has a class of Keras, not a user's class of the same name. Old files do
    not contain the class's module; in these files a user's class has a registered name, and Keras' own classes have
    none."""
    module = spec.get("module")
    return spec.get("registered_name") is None if module is None else str(module).partition(".")[0] in PACKAGES


def cell_of_config(op: str, config: Mapping[str, Any], name: str, slope: str) -> Any:
    """Return the cell that a layer's configuration describes. name: the layer's name, for error texts. slope: the slope
    of hard_sigmoid, "x/5" or "x/6"."""
    # words: our name by Keras' name of an activation; hard_sigmoid with the slope of the file's version of Keras.
    words = ACTIVATIONS | ({"hard_sigmoid": "hard_sigmoid"} if slope == "x/5" else {})

    # Return our name of the activation that the configuration has under `key`, or of Keras' default activation. Keras
    # may serialize a function as a dict that contains its name.
    def activation(key: str, default: str) -> str:
        word = config["config"].get(key, default)
        if isinstance(word, Mapping):  # "config" holds the name of a function, or the options of an activation layer
            word = word["config"] if isinstance(word.get("config"), str) else word.get("class_name")
        if word not in words:
            fail(op, f"{key} of {name} must be one of {', '.join(words)}", repr(word))
        return words[word]

    # a: the activation of the candidate and of an LSTM's output; r: the activation of the other gates.
    a = activation("activation", "tanh")
    kind = KINDS[config["class_name"]]  # "lstm", "gru" or "rnn"
    if kind == "rnn":
        return RNNCell(a)
    r = activation("recurrent_activation", "sigmoid")
    if kind == "lstm":
        return LSTMCell(activations=(r, r, a, r, a))  # of i, f, g, o and the output
    # With reset_after the reset gate multiplies the recurrent product, not h. Versions of Keras without this option
    # computed as with reset_after=False; a CuDNNGRU always computes as with reset_after=True.
    after = config["config"].get("reset_after", config["class_name"] == "CuDNNGRU")
    return GRUCell(activations=(r, r, a), reset="after" if after else "before")


def direction(
    op: str,
    kind: str,
    arrays: Sequence[Any],
    *,
    biases: Sequence[Sequence[int]],
    of: str = "",
    order: str | None = None,
) -> Arrays:
    """Return one direction's arrays for `Weights`: Wx, Wh and, with a bias, bx and maybe bh. Check their shapes first.

    kind: "lstm", "gru" or "rnn". arrays: Keras' kernel [I, GH], recurrent_kernel [H, GH] and maybe bias. biases: the
    allowed shapes of the bias, with the last size in multiples of H: [3] means the shape [3H], [2, 3] means [2, 3H].
    of: words such as " of lstm_1" after an array's name in error texts. order: the gate order of the arrays, or None
    for Keras' order.
    """
    G = CELLS[kind].gates
    whole = [*arrays, None][:3]  # a missing bias is None
    kernel, recurrent_kernel, bias = (None if array is None else to_mlx(array) for array in whole)
    shapes = [() if array is None else array.shape for array in (kernel, recurrent_kernel, bias)]
    H = shapes[1][0] if len(shapes[1]) == 2 else 0
    if len(shapes[0]) != 2 or shapes[0][1] != G * H or shapes[1] != (H, G * H):
        rule = f"kernel and recurrent_kernel{of} must have shapes [I, {times(G)}] and [H, {times(G)}]"
        fail(op, rule, f"shapes {list(shapes[0])} and {list(shapes[1])}")
    if bias is not None and shapes[2] not in [(*shape[:-1], shape[-1] * H) for shape in biases]:
        rule = " or ".join(f"[{', '.join([*map(str, shape[:-1]), times(shape[-1])])}]" for shape in biases)
        fail(op, f"bias{of} must have shape {rule}", f"shape {list(shapes[2])}")
    named = zip(NAMES, (kernel, recurrent_kernel, bias), strict=True)
    given = {name: array for name, array in named if array is not None}
    for name, array in given.items():
        check_array(op, name + of, array, array.shape)  # checks the dtype only
    # Move the gates from Keras' order (FORMAT.orders) to the order of `Weights` (OURS).
    given = {name: reorder(array, order or FORMAT.orders[kind], OURS[kind], axis=-1) for name, array in given.items()}
    found = {"Wx": given["kernel"].T, "Wh": given["recurrent_kernel"].T}
    if bias is None:
        return found
    b = given["bias"]  # [GH], or both biases [2, GH]
    return found | ({"bx": b} if b.ndim == 1 else {"bx": b[0], "bh": b[1]})


def times(G: int) -> str:
    """Return G times H as a text for errors: "H", "3H" or "4H"."""
    return "H" if G == 1 else f"{G}H"


def to_keras(weights: Weights) -> list[list[np.ndarray]]:
    """Return for each layer the arrays that `keras_layer.set_weights` takes: float64 stays, all other dtypes become
    float32.

    A layer with both directions is a `Bidirectional`. A GRU that resets after the product has two biases in Keras; a
    single bias becomes the first. In all other cells two biases become their sum.

    Raises:
        ValueError: Keras' layers have no place for an option of the cell, or several layers run in reverse.
    """
    weights = as_stored("to_keras", weights, FORMAT)  # refuses options that no layer of Keras holds
    if weights.reverse and len(weights.layers) > 1:
        # A layer with go_backwards returns its outputs in the reverse order, so a second layer with go_backwards would
        # run forward.
        rule = "weights must have one layer with reverse: convert those of weights.each(), and in Keras set"
        fail("to_keras", f"{rule} go_backwards for the first layer only,", f"{len(weights.layers)} layers")
    cell, use_bias = weights.cell, weights.has_bias
    if cell.op == "lstm":
        # `activations` has the order i, f, g, o, output. Keras has two activations: its `recurrent_activation` r for i,
        # f and o, and its `activation` a for g and the output.
        r, a = cell.activations[0], cell.activations[2]
        if cell.cell_clip or any("peephole" in way for layer in weights.layers for way in layer):
            fail("to_keras", "cell_clip and peephole must be the default, as Keras has no place for them,", "others")
        if cell.activations != (r, r, a, r, a):
            fail("to_keras", "activations must be r, r, a, r, a, as Keras has them,", cell.activations)
    if cell.op == "gru" and cell.activations[0] != cell.activations[1]:
        fail("to_keras", "activations must be r, r, a, as Keras has them,", cell.activations)
    # way: the arrays of one direction of a layer.
    return [[array for way in layer for array in arrays_of(cell, way, use_bias)] for layer in weights.layers]


def arrays_of(cell: Any, arrays: Arrays, use_bias: bool) -> list[np.ndarray]:
    """Return one direction's kernel [I, GH], recurrent_kernel [H, GH] and, with `use_bias`, bias in Keras' gate order.
    A missing bias becomes zeros. arrays: the direction's arrays in `Weights`."""
    ours, theirs = OURS[cell.op], FORMAT.orders[cell.op]  # the gate orders of `Weights` and Keras, such as "ifgo"
    matrices = [to_numpy(reorder(arrays[name].T, ours, theirs, axis=-1)) for name in ("Wx", "Wh")]
    if not use_bias:
        return matrices
    if cell.reset == "after":  # a GRU with reset_after has both biases
        bias = mx.stack([reorder(b, ours, theirs) for b in two_biases(arrays)])
    else:  # any other cell has one bias: the sum
        bias = reorder(whole_bias(cell, arrays), ours, theirs)
    return [*matrices, to_numpy(bias)]


def to_numpy(array: mx.array) -> np.ndarray:
    """Return an array as a NumPy array: float64 stays, any other dtype becomes float32."""
    return np.array(array if array.dtype == mx.float64 else array.astype(mx.float32))
