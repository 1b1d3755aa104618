"""Convert the weights of Keras' LSTM, GRU, SimpleRNN and Bidirectional layers, array by array, and back.

`mlx_lstm.convert` converts whole layers, stacks and files. Arrays whose shapes do not fit raise a ValueError.

G: gates, H: units, I: input features. Keras' arrays are kernel [I, GH] (the input's weights), recurrent_kernel [H, GH]
and bias, [GH] or, in a GRU, [2, 3H]. The arguments of `mlx_lstm.lstm`, `gru` and `rnn` are Wx [GH, I], Wh [GH, H], b
[GH] and, in a GRU, bhn [H], the recurrent bias of the candidate.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .convert.keras import arrays_of, direction, times
from .convert.weights import CELLS, from_one_bias, one_bias, to_mlx
from .engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from .engines.directions import join, part
from .engines.problem import Arrays
from .ground.checks import check_array, check_flag, check_option, fail
from .recurrence import weight_shapes

__all__ = ["bidirectional_from_keras", "bidirectional_to_keras", "gru_from_keras", "gru_to_keras", "lstm_from_keras"]
__all__ += ["lstm_to_keras", "rnn_from_keras", "rnn_to_keras"]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)


def __getattr__(name: str) -> Any:
    """Raise AttributeError for a name that this module does not have. For the name of a Keras layer the text says which
    modules have this layer."""
    layers = {"LSTM": "LSTM", "GRU": "GRU", "SimpleRNN": "RNN", "Bidirectional": "LSTM(..., bidirectional=True)"}
    if name in layers:
        others = f"mlx_lstm.torch.{layers[name]}" + ("" if "(" in layers[name] else f" and mlx_lstm.nn.{layers[name]}")
        raise AttributeError(f"mlx_lstm.keras converts weights and has no layers such as {name}: use {others}")
    raise AttributeError(f"module 'mlx_lstm.keras' has no attribute {name!r}")


def lstm_from_keras(kernel: Any, recurrent_kernel: Any = None, bias: Any = None, *more: Any) -> dict[str, Any]:
    """Return the weights of a `keras.layers.LSTM` as arguments of `mlx_lstm.lstm` and `mlx_lstm.nn.LSTM`. I: input
    features, H: units.

    Keras' gate order i, f, c, o is the default `gate_order` here. The kernels are transposed. The effect of
    `unit_forget_bias` is in the bias already. `mlx_lstm.tf.block_lstm_v2` takes Keras' arrays as they are: w =
    [kernel; recurrent_kernel], b = bias.

    Args:
        kernel, recurrent_kernel, bias (array): `layer.get_weights()`: [I, 4H], [H, 4H] and maybe [4H].
        more: further arrays, which raise an error: use `bidirectional_from_keras` for the arrays of both directions.

    Returns:
        dict: `Wx` [4H, I], `Wh` [4H, H] and, if there is a bias, `b` [4H], each in the dtype of Keras' array. MLX
        computes with float64 on the CPU only.

    Example:
        >>> import numpy as np
        >>> from mlx_lstm import keras, nn
        >>> shapes = (3, 16), (4, 16), (16,)
        >>> weights = [np.ones(shape, np.float32) for shape in shapes]  # keras_layer.get_weights()
        >>> Wx, Wh, b = keras.lstm_from_keras(*weights).values()
        >>> layer = nn.LSTM(3, 4).update({"Wx": Wx, "Wh": Wh, "bias": b})
    """
    return one_direction("lstm_from_keras", "lstm", (kernel, recurrent_kernel, bias, *more), [4])  # bias [4H]


def lstm_to_keras(Wx: mx.array, Wh: mx.array, b: mx.array | None = None) -> list[np.ndarray]:
    """Return the list for `keras_layer.set_weights`, the inverse of `lstm_from_keras`. The arrays are float32; float64
    stays float64. I: input features, H: units.

    Args:
        Wx, Wh, b (array): [4H, I], [4H, H], [4H], gate order i, f, g, o; `None` for a layer with `use_bias=False`.

    Returns:
        list: kernel [I, 4H], recurrent_kernel [H, 4H] and, if given, bias [4H].
    """
    return into_keras("lstm_to_keras", LSTMCell(), Wx, Wh, {"b": b})


def gru_from_keras(kernel: Any, recurrent_kernel: Any = None, bias: Any = None, *more: Any) -> dict[str, Any]:
    """Return the weights of a `keras.layers.GRU` as arguments of `mlx_lstm.gru`, and of `mlx_lstm.nn.GRU`. I: input
    features, H: units.

    A layer with `reset_after=True`, Keras' default, equals `gru` with default options; a layer with `reset_after=False`
    equals `gru` with `reset="before"`. Keras' gate order z, r, h becomes r, z, n. With `reset_after=True` Keras has two
    biases; for z and r only the sum of both is used, so that they become one bias.

    Args:
        kernel, recurrent_kernel, bias (array): `layer.get_weights()`. kernel is [I, 3H], recurrent_kernel [H, 3H], bias
            [2, 3H], or [3H] with `reset_after=False`, or absent.
        more: further arrays, which raise an error: use `bidirectional_from_keras` for the arrays of both directions.

    Returns:
        dict: `Wx` [3H, I] and `Wh` [3H, H]. If there is a bias, also `b` [3H] and, with `reset_after=True`, `bhn` [H].
        Each array has the dtype of Keras' array.

    Example:
        >>> import mlx.core as mx, numpy as np
        >>> from mlx_lstm import gru, keras
        >>> shapes = (3, 12), (4, 12), (2, 12)
        >>> weights = [np.ones(shape, np.float32) for shape in shapes]  # keras_layer.get_weights()
        >>> gru(mx.ones((10, 2, 3)), **keras.gru_from_keras(*weights)).h.shape
        (10, 2, 4)
    """
    arrays = kernel, recurrent_kernel, bias, *more
    return one_direction("gru_from_keras", "gru", arrays, [3], [2, 3])  # bias [3H] or [2, 3H]


def gru_to_keras(
    Wx: mx.array, Wh: mx.array, b: mx.array | None = None, bhn: mx.array | None = None, *, reset_after: bool = True
) -> list[np.ndarray]:
    """Return the list for `keras_layer.set_weights`, the inverse of `gru_from_keras`. The arrays are float32; float64
    stays float64. I: input features, H: units.

    With `reset_after=True` the bias of z and r is stored in the first of Keras' two biases, and the second is 0 for
    z and r. So the two biases of a Keras layer may come back as other numbers with the same sum, and the same outputs.

    Args:
        Wx, Wh, b, bhn (array): [3H, I], [3H, H], [3H], [H], gate order r, z, n; both biases `None` for a layer with
            `use_bias=False`.
        reset_after (bool): as in the Keras layer. Default: `True`.

    Returns:
        list: kernel [I, 3H], recurrent_kernel [H, 3H] and, if a bias is given, bias [2, 3H] or [3H].

    Raises:
        ValueError: the shapes do not fit, or bhn is given with `reset_after=False`.
    """
    check_flag("gru_to_keras", "reset_after", reset_after)
    if bhn is not None and not reset_after:
        fail("gru_to_keras", "bhn must be None with reset_after=False", "an array")
    cell = GRUCell(reset="after" if reset_after else "before")
    return into_keras("gru_to_keras", cell, Wx, Wh, {"b": b, "bhn": bhn})


def rnn_from_keras(kernel: Any, recurrent_kernel: Any = None, bias: Any = None, *more: Any) -> dict[str, Any]:
    """Return the weights of a `keras.layers.SimpleRNN` as arguments of `mlx_lstm.rnn`, to which you also pass the
    layer's `activation`. I: input features, H: units.

    Args:
        kernel, recurrent_kernel, bias (array): `layer.get_weights()`: [I, H], [H, H] and maybe [H].
        more: further arrays, which raise an error: use `bidirectional_from_keras` for the arrays of both directions.

    Returns:
        dict: `Wx` [H, I], `Wh` [H, H] and, if there is a bias, `b` [H], each in the dtype of Keras' array. In
        `mlx_lstm.nn.RNN` they are `Wxh`, `Whh` and `bias`.

    Example:
        >>> import mlx.core as mx, numpy as np
        >>> from mlx_lstm import keras, rnn
        >>> shapes = (3, 4), (4, 4), (4,)
        >>> weights = [np.ones(shape, np.float32) for shape in shapes]  # keras_layer.get_weights()
        >>> rnn(mx.ones((10, 2, 3)), **keras.rnn_from_keras(*weights)).h.shape
        (10, 2, 4)
    """
    return one_direction("rnn_from_keras", "rnn", (kernel, recurrent_kernel, bias, *more), [1])  # bias [H]


def rnn_to_keras(Wx: mx.array, Wh: mx.array, b: mx.array | None = None) -> list[np.ndarray]:
    """Return the list for `keras_layer.set_weights`, the inverse of `rnn_from_keras`. The arrays are float32; float64
    stays float64. I: input features, H: units.

    Args:
        Wx, Wh, b (array): [H, I], [H, H], [H]; `None` for a layer with `use_bias=False`.

    Returns:
        list: kernel [I, H], recurrent_kernel [H, H] and, if given, bias [H].
    """
    return into_keras("rnn_to_keras", RNNCell(), Wx, Wh, {"b": b})


def bidirectional_from_keras(convert: Callable[..., dict[str, Any]], weights: Sequence[Any]) -> dict[str, Any]:
    """Return the weights of a `keras.layers.Bidirectional` as arguments of `lstm`, `gru` or `rnn` with
    `bidirectional=True`. I: input features, G: gates, H: units.

    The h of `lstm`, `gru` or `rnn` then equals the output of a layer with `return_sequences=True` and Keras' default,
    `merge_mode="concat"`. For the other modes add, average or multiply the halves of h. Without `return_sequences` the
    output is hT.

    Args:
        convert (callable): `lstm_from_keras`, `gru_from_keras` or `rnn_from_keras`, for the wrapped layer.
        weights (sequence of arrays): `layer.get_weights()`: the arrays of the forward layer, then those of the backward
            layer, in the same shapes.

    Returns:
        dict: the arrays of both directions, joined: `Wx` [2GH, I], `Wh` [2, GH, H], `b` [2GH], `bhn` [2H].

    Example:
        >>> import mlx.core as mx, numpy as np
        >>> from mlx_lstm import keras, lstm
        >>> shapes = [(3, 16), (4, 16), (16,)] * 2
        >>> weights = [np.ones(shape, np.float32) for shape in shapes]  # keras_layer.get_weights()
        >>> arrays = keras.bidirectional_from_keras(keras.lstm_from_keras, weights)
        >>> lstm(mx.ones((10, 2, 3)), **arrays, bidirectional=True).h.shape
        (10, 2, 8)
    """
    op = "bidirectional_from_keras"
    check_function(op, convert)
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        fail(op, "weights must be the list that layer.get_weights() returns", type(weights).__name__)
    n = len(weights) // 2  # the arrays of one direction
    weights = [to_mlx(array) for array in weights]
    shapes = [array.shape for array in weights]
    if not n or shapes[:n] != shapes[n:]:
        fail(op, "weights must be those of two layers of the same shapes", f"shapes {shapes}")
    return join([convert(*weights[:n]), convert(*weights[n:])])  # both directions in one array per name


def bidirectional_to_keras(convert: Callable[..., list[np.ndarray]], arrays: Arrays) -> list[np.ndarray]:
    """Return the list for `keras_layer.set_weights`, the inverse of `bidirectional_from_keras`.

    Args:
        convert (callable): `lstm_to_keras`, `rnn_to_keras` or `gru_to_keras`; for a layer with `reset_after=False`
            `functools.partial(gru_to_keras, reset_after=False)`.
        arrays (dict): by name, as `bidirectional_from_keras` returns them.

    Returns:
        list: the arrays of the forward layer, then those of the backward layer.
    """
    op = "bidirectional_to_keras"
    check_function(op, convert)
    if not isinstance(arrays, dict):
        fail(op, "arrays must be a dict, as bidirectional_from_keras returns it,", type(arrays).__name__)
    Wh: Any = arrays.get("Wh")
    check_array(op, "Wh", Wh, [2, "G * H", "H"])
    H, given = Wh.shape[2], {name: array for name, array in arrays.items() if array is not None}
    shapes = weight_shapes(Wh.shape[1] // max(H, 1), ("I", H, H), D=2)
    for name, array in given.items():  # `part` would drop the last row of an odd number of rows
        check_option(op, "the name of an array", name, ("Wx", "Wh", "b", "bhn"))
        check_array(op, name, array, shapes[name])
    return [array for way in range(2) for array in convert(**part(given, way))]  # part: one direction's arrays


def one_direction(op: str, kind: str, weights: Sequence[Any], *biases: list[int]) -> Arrays:
    """Return Keras' weights of one direction as arguments of `mlx_lstm.lstm`, `gru` or `rnn`.

    op: the name of the public function, for errors. kind: "lstm", "gru" or "rnn". weights: the arrays that the user
    passed; a missing one is None. biases: the allowed shapes of the bias, with the last axis counted in H; for a GRU
    [3] means the shape [3H], [2, 3] means [2, 3H].
    """
    if len(weights) > 3:
        rule = f"the arrays must be those of one layer (bidirectional_from_keras({op}, weights) takes both directions),"
        fail(op, rule, f"{len(weights)} arrays")
    if weights[1] is None:
        rule = f"the arguments must be the arrays of a layer, as in {op}(*layer.get_weights()),"
        fail(op, rule, type(weights[0]).__name__)
    arrays = direction(op, kind, weights, biases=biases)  # Wx, Wh and maybe the biases bx and bh of their products
    # A GRU has two biases exactly if it has reset_after=True. CELLS: {kind: class of its cell}.
    cell = GRUCell(reset="after" if "bh" in arrays else "before") if kind == "gru" else CELLS[kind]()
    return {name: arrays[name] for name in ("Wx", "Wh")} | one_bias(cell, arrays)  # b, and bhn with reset_after


def into_keras(op: str, cell: Cell, Wx: mx.array, Wh: mx.array, biases: dict[str, mx.array | None]) -> list[np.ndarray]:
    """Check the shapes of weights in the layout of this package: Wx [GH, I], Wh [GH, H], and in `biases` b [GH] and for
    a GRU bhn [H], which may be None. Return [kernel, recurrent kernel, bias] in Keras' layout, without the bias if both
    are None. G: gates, H: units. op: the public function's name, for errors."""
    G = cell.gates
    check_array(op, "Wx", Wx, [times(G), "I"])
    H, more = divmod(Wx.shape[0], G)
    if more or not H:
        fail(op, f"Wx must have shape [{times(G)}, I]", f"shape {list(Wx.shape)}")
    check_array(op, "Wh", Wh, [G * H, H])
    for name, bias in biases.items():
        if bias is not None:
            check_array(op, name, bias, [H if name == "bhn" else G * H])
    # `from_one_bias` turns b and bhn into the biases of x Wx^T and h Wh^T, which Keras' layout has.
    both = from_one_bias(biases["b"], biases.get("bhn"))
    return arrays_of(cell, {"Wx": Wx, "Wh": Wh} | both, use_bias=bool(both))


def check_function(op: str, convert: object) -> None:
    """Check that the argument `convert` of a bidirectional conversion is a function. op: bidirectional_from_keras or
    bidirectional_to_keras."""
    if not callable(convert):
        which = f"lstm_{op[14:]}, gru_{op[14:]} or rnn_{op[14:]}"  # [14:]: without "bidirectional_"
        fail(op, f"convert must be {which}", repr(convert))
