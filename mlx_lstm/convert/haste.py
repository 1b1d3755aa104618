"""Convert weights between the layers of `haste_pytorch`, LMNT's package haste for torch, and `Weights`.

haste's arrays are kernel [I, G H] (input weights), recurrent_kernel [H, G H], bias [G H] and, of a GRU, recurrent_bias
[3H], for I input features, H units and G gates. An IndRNN, whose units are independent of each other, has
recurrent_scale [H] instead of recurrent_kernel. `Weights` has the transposed matrices Wx and Wh, and the biases bx and
bh.
"""

from typing import Any

import mlx.core as mx

from ..engines.cells import GRUCell, LSTMCell
from ..engines.problem import Arrays
from ..ground.checks import check_array, fail
from .keras import direction
from .weights import OURS, Format, Weights, as_stored, checked, parameters_of, reorder, to_mlx, two_biases, whole_bias

FORMAT = Format({"lstm": "igfo", "gru": "zrn"}, is_layer=True)
"""What a layer of haste can store: one layer in one direction, with these gate orders in our letters."""

NAMES = {
    "LSTM": ("kernel", "recurrent_kernel", "bias"),
    "GRU": ("kernel", "recurrent_kernel", "bias", "recurrent_bias"),
    "IndRNN": ("kernel", "recurrent_scale", "bias"),
}
"""The classes of `haste_pytorch` without layer normalisation, and the names of their parameters."""


def from_haste(layer: Any, *, prefix: str = "") -> Weights:
    """Return the weights of an `LSTM` or a `GRU` of `haste_pytorch`.

    haste stores an LSTM's gates in the order i, g, f, o and a GRU's in the order z, r, h. A GRU of haste applies its
    reset gate after the product, as ours does. The forget bias of an LSTM of haste is part of `bias`.

    Args:
        layer: a layer of `haste_pytorch`, or a dict of arrays by its names: `kernel` [I, G H], `recurrent_kernel` [H, G
            H], `bias` [G H] and, of a GRU, `recurrent_bias` [3H].
        prefix (str): read only the keys that begin with it, such as `"encoder."`. Default: all keys.

    Returns:
        Weights: of one layer, in the gate order i, f, g, o or r, z, n.

    Raises:
        ValueError: a key is missing or unknown, a shape does not fit, the layer is normalised, or its option `zoneout`
            is not 0. Zoneout is no weight: for a layer with zoneout pass `layer.state_dict()`, and run the weights with
            `mlx_lstm.cells.zoneout_lstm`. haste applies zoneout to h only, so pass that cell `hold_c` = 0.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert
        >>> arrays = {"kernel": mx.ones((3, 16)), "recurrent_kernel": mx.ones((4, 16)), "bias": mx.zeros(16)}
        >>> convert.from_haste(arrays)
        Weights(LSTM, 3 -> 4)
    """
    op = "from_haste"
    arrays = arrays_of(op, layer, prefix)
    if "recurrent_scale" in arrays:
        fail(op, "layer must be an LSTM or a GRU; from_haste_indrnn reads an IndRNN,", "recurrent_scale")
    cell = GRUCell() if "recurrent_bias" in arrays else LSTMCell()
    order, ours = FORMAT.orders[cell.op], OURS[cell.op]  # haste's gate order, and the order of `Weights`
    check_names(op, arrays, cell.op.upper())  # "LSTM" or "GRU", a key of `NAMES`
    # haste's matrices have the layout of Keras, so `direction`, Keras' reader, transposes and reorders them. Both
    # biases are separate arrays in haste, so the next lines convert them; biases=[] says that none is passed here.
    found = direction(op, cell.op, [arrays["kernel"], arrays["recurrent_kernel"]], biases=[], order=order)
    for theirs, word in (("bias", "bx"), ("recurrent_bias", "bh")):
        if theirs in arrays:
            check_array(op, theirs, arrays[theirs], [found["Wx"].shape[0]])
            found[word] = reorder(arrays[theirs], order, ours)
    return checked(op, Weights(cell, [[found]]))


def to_haste(weights: Weights, *, prefix: str = "") -> Arrays:
    """Return the parameters of an `LSTM` or a `GRU` of `haste_pytorch` by name.

    The two biases of an LSTM become their sum. To load the arrays, make each one `torch.from_numpy(np.array(array))`
    and call the layer's `load_state_dict`.

    Args:
        weights (Weights): of one layer in one direction.
        prefix (str): is put before each name. Default: an empty string.

    Raises:
        ValueError: the weights are of several layers, both directions or a plain RNN, or haste lacks an option of the
            cell.
    """
    op = "to_haste"
    weights = as_stored(op, weights, FORMAT)  # refuses what haste cannot hold, such as several layers
    cell, arrays = weights.cell, weights.layers[0][0]  # layers[layer][direction]
    order, ours = FORMAT.orders[cell.op], OURS[cell.op]  # haste's gate order and that of `Weights`
    found = {"kernel": arrays["Wx"].T, "recurrent_kernel": arrays["Wh"].T}
    if cell.op == "gru":
        found |= zip(("bias", "recurrent_bias"), two_biases(arrays), strict=True)  # a missing bias is zeros
    else:
        found["bias"] = whole_bias(cell, arrays)  # the sum of both
    # In haste's arrays the blocks of the gates lie on the last axis.
    return {f"{prefix}{name}": reorder(array, ours, order, axis=-1) for name, array in found.items()}


def from_haste_indrnn(layer: Any, *, prefix: str = "") -> dict[str, Any]:
    """Return the parameters of an `IndRNN` of `haste_pytorch` for a layer `mlx_lstm.nn.Pointwise`.

    haste's cell is h' = tanh(a + u h). The paper's, which `mlx_lstm.cells.indrnn` computes, has max(a + u h, 0).

    Args:
        layer: a layer of `haste_pytorch`, or a dict of arrays by its names: `kernel` [I, H], `recurrent_scale` [H],
            `bias` [H].
        prefix (str): read only the keys that begin with it. Default: all keys.

    Returns:
        dict: `Wx` [H, I], `bias` [H], and `params`, a list of the array u [H].

    Raises:
        ValueError: an array is missing or unknown, or a shape does not fit.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert
        >>> from mlx_lstm.nn import Pointwise
        >>> def indrnn_tanh(a, state, u):
        ...     return (mx.tanh(a[0] + u * state[0]),)
        >>> arrays = {"kernel": mx.ones((3, 4)), "recurrent_scale": mx.ones(4), "bias": mx.zeros(4)}
        >>> layer = Pointwise(indrnn_tanh, 3, 4, gates=1, params=1, recurrent=False)
        >>> h, state = layer.update(convert.from_haste_indrnn(arrays))(mx.ones((2, 10, 3)))
        >>> h.shape
        (2, 10, 4)
    """
    op = "from_haste_indrnn"
    arrays = arrays_of(op, layer, prefix)
    check_names(op, arrays, "IndRNN")
    check_array(op, "kernel", arrays["kernel"], ["I", "H"])
    H = arrays["kernel"].shape[1]
    for name in ("recurrent_scale", "bias"):
        check_array(op, name, arrays[name], [H])
    return {"Wx": arrays["kernel"].T, "bias": arrays["bias"], "params": [arrays["recurrent_scale"]]}


def to_haste_indrnn(parameters: Any, *, prefix: str = "") -> Arrays:
    """Return the parameters of an `IndRNN` of `haste_pytorch` by name.

    Args:
        parameters: a layer `mlx_lstm.nn.Pointwise` with one gate, one array in `params` and `recurrent=False`, or a
            dict as `from_haste_indrnn` returns it. A missing bias becomes zeros.
        prefix (str): is put before each name. Default: an empty string.

    Raises:
        ValueError: an array is missing or unknown, or a shape does not fit.
    """
    op = "to_haste_indrnn"
    _, arrays = parameters_of(op, "parameters must be a layer or a dict of arrays", parameters)
    params = arrays.get("params")
    is_one = isinstance(params, (list, tuple)) and len(params) == 1
    if not {"Wx", "params"} <= arrays.keys() <= {"Wx", "bias", "params"} or not is_one:
        fail(op, "parameters must hold Wx, one array in params and maybe bias", sorted(arrays))
    check_array(op, "Wx", arrays["Wx"], ["H", "I"])
    Wx, (u,) = arrays["Wx"], arrays["params"]  # u [H]: the recurrent weight of each unit
    found = {"kernel": Wx.T, "recurrent_scale": u, "bias": arrays.get("bias", mx.zeros(Wx.shape[:1], Wx.dtype))}
    for name in ("recurrent_scale", "bias"):
        check_array(op, name, found[name], [Wx.shape[0]])
    return {f"{prefix}{name}": array for name, array in found.items()}


def arrays_of(op: str, layer: Any, prefix: str) -> Arrays:
    """Return the arrays of a layer of haste, or of a dict, whose names begin with `prefix`, by their names without the
    prefix. Raise ValueError for a layer with zoneout."""
    named, found = parameters_of(op, "layer must be a layer of haste_pytorch or a dict of arrays", layer, prefix)
    if zoneout := getattr(named, "zoneout", 0):
        fail(op, "zoneout must be 0, as it is no weight: pass layer.state_dict() and run zoneout yourself,", zoneout)
    return {key[len(prefix) :]: to_mlx(array) for key, array in found.items()}


def check_names(op: str, arrays: Arrays, kind: str) -> None:
    """Check that the arrays are the parameters of a class of haste that has no layer normalisation: "gamma" is the name
    of a normalisation's scale. kind: a key of `NAMES`, such as "LSTM"."""
    if "gamma" in arrays:
        rule = "layer must have no layer normalisation: pass its arrays to mlx_lstm.lstm or gru with norm=,"
        fail(op, rule, "gamma")
    if arrays.keys() != set(NAMES[kind]):
        fail(op, f"the names of an {kind} of haste must be {', '.join(NAMES[kind])}", sorted(arrays))
