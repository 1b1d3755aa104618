"""Weights of Keras' LSTM, GRU, SimpleRNN and Bidirectional layers as ours, and back: nothing but transposes, reordered
gates and joined directions.

Arrays whose shapes do not fit raise a ValueError.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .checks import check_array, check_flag, fail
from .engines.directions import join, part
from .engines.problem import Arrays

__all__ = ["bidirectional_from_keras", "bidirectional_to_keras", "gru_from_keras", "gru_to_keras", "lstm_from_keras"]
__all__ += ["lstm_to_keras", "rnn_from_keras", "rnn_to_keras"]


def lstm_from_keras(kernel: Any, recurrent_kernel: Any, bias: Any = None) -> Arrays:
    """The weights of a `keras.layers.LSTM` as arguments of `mlx_lstm.lstm` and `mlx_lstm.nn.LSTM`.

    Keras' order i, f, c, o is the default `gate_order` here; its kernels are transposed; `unit_forget_bias` is in the
    bias. For `block_lstm_v2` nothing changes: w = [kernel; recurrent_kernel], b = bias.

    Args:
        kernel, recurrent_kernel, bias (array): `layer.get_weights()`: [I, 4H], [H, 4H], [4H] or absent.

    Returns:
        dict: `Wx` [4H, I], `Wh` [4H, H] and, if there is a bias, `b` [4H], each in the dtype given: float32, unless the
        layer has another. With float64 MLX computes on the CPU only.

    Example:
        >>> import numpy as np
        >>> from mlx_lstm import keras, nn
        >>> shapes = (3, 16), (4, 16), (16,)
        >>> weights = [np.ones(shape, np.float32) for shape in shapes]  # keras_layer.get_weights()
        >>> Wx, Wh, b = keras.lstm_from_keras(*weights).values()
        >>> layer = nn.LSTM(3, 4).update({"Wx": Wx, "Wh": Wh, "bias": b})
    """
    weights = check_keras("lstm_from_keras", 4, kernel, recurrent_kernel, bias, [4])
    return from_keras("ifgo", "ifgo", weights) | ({} if bias is None else {"b": weights["bias"]})


def lstm_to_keras(Wx: mx.array, Wh: mx.array, b: mx.array | None = None) -> list[np.ndarray]:
    """The way back from `lstm_from_keras`: what `keras_layer.set_weights` takes, in float32; float64 stays.

    Args:
        Wx, Wh, b (array): [4H, I], [4H, H], [4H], gate order i, f, g, o; `None` for a layer with `use_bias=False`.

    Returns:
        list: kernel [I, 4H], recurrent_kernel [H, 4H] and, if given, bias [4H].
    """
    check_ours("lstm_to_keras", 4, Wx, Wh, {"b": b})
    return [to_numpy(Wx).T, to_numpy(Wh).T] + ([] if b is None else [to_numpy(b)])


def gru_from_keras(kernel: Any, recurrent_kernel: Any, bias: Any = None) -> Arrays:
    """The weights of a `keras.layers.GRU` as arguments of `mlx_lstm.gru`, and of `mlx.nn.GRU`.

    For a layer with `reset_after=True`, Keras' default, call `gru` as it is; for one with `reset_after=False` call it
    with `reset="before"`. Keras' order z, r, h becomes r, z, n. With `reset_after=True` the two biases of z and r,
    which only their sum counts of, become one.

    Args:
        kernel, recurrent_kernel, bias (array): `layer.get_weights()`: [I, 3H], [H, 3H]; [2, 3H], with
            `reset_after=False` [3H], or absent.

    Returns:
        dict: `Wx` [3H, I], `Wh` [3H, H]; if there is a bias, `b` [3H], and with `reset_after=True` `bhn` [H]; in dtypes
        as `lstm_from_keras` returns them.

    Example:
        >>> import mlx.core as mx, numpy as np
        >>> from mlx_lstm import gru, keras
        >>> shapes = (3, 12), (4, 12), (2, 12)
        >>> weights = [np.ones(shape, np.float32) for shape in shapes]  # keras_layer.get_weights()
        >>> gru(mx.ones((10, 2, 3)), **keras.gru_from_keras(*weights)).h.shape
        (10, 2, 4)
    """
    weights = check_keras("gru_from_keras", 3, kernel, recurrent_kernel, bias, [3], [2, 3])
    found = from_keras("zrn", "rzn", weights)
    if bias is None:
        return found
    bias = reorder(weights["bias"], "zrn", "rzn")
    if bias.ndim == 1:
        return found | {"b": bias}
    H = bias.shape[1] // 3
    recurrent = mx.concatenate([bias[1, : 2 * H], mx.zeros((H,), bias.dtype)])
    return found | {"b": bias[0] + recurrent, "bhn": bias[1, 2 * H :]}


def gru_to_keras(
    Wx: mx.array, Wh: mx.array, b: mx.array | None = None, bhn: mx.array | None = None, *, reset_after: bool = True
) -> list[np.ndarray]:
    """The way back from `gru_from_keras`: what `keras_layer.set_weights` takes, in float32; float64 stays.

    With `reset_after=True` the bias of z and r goes into Keras' first bias, the second is 0 there; so a bias that came
    from Keras may return otherwise divided, with the same outputs.

    Args:
        Wx, Wh, b, bhn (array): [3H, I], [3H, H], [3H], [H], gate order r, z, n; both biases `None` for a layer with
            `use_bias=False`.
        reset_after (bool): that of the layer. Default: `True`.

    Returns:
        list: kernel [I, 3H], recurrent_kernel [H, 3H] and, if a bias is given, bias [2, 3H] or [3H].

    Raises:
        ValueError: the shapes do not fit, or bhn is given with `reset_after=False`.
    """
    check_ours("gru_to_keras", 3, Wx, Wh, {"b": b, "bhn": bhn})
    check_flag("gru_to_keras", "reset_after", reset_after)
    if bhn is not None and not reset_after:
        fail("gru_to_keras", "bhn must be None with reset_after=False", "an array")
    kernels = [to_numpy(reorder(W.T, "rzn", "zrn")) for W in (Wx, Wh)]
    if b is None and bhn is None:
        return kernels
    bias = np.zeros((2, Wh.shape[0]), kernels[0].dtype)
    if b is not None:
        bias[0] = to_numpy(reorder(b, "rzn", "zrn"))
    if bhn is not None:
        bias[1, -bhn.size :] = to_numpy(bhn)
    return [*kernels, bias if reset_after else bias[0]]


def rnn_from_keras(kernel: Any, recurrent_kernel: Any, bias: Any = None) -> Arrays:
    """The weights of a `keras.layers.SimpleRNN` as arguments of `mlx_lstm.rnn`, whose `activation` is the layer's.

    Args:
        kernel, recurrent_kernel, bias (array): `layer.get_weights()`: [I, H], [H, H], [H] or absent.

    Returns:
        dict: `Wx` [H, I], `Wh` [H, H] and, if there is a bias, `b` [H], in dtypes as `lstm_from_keras` returns them. In
        `mlx_lstm.nn.RNN` they are `Wxh`, `Whh` and `bias`.

    Example:
        >>> import mlx.core as mx, numpy as np
        >>> from mlx_lstm import keras, rnn
        >>> shapes = (3, 4), (4, 4), (4,)
        >>> weights = [np.ones(shape, np.float32) for shape in shapes]  # keras_layer.get_weights()
        >>> rnn(mx.ones((10, 2, 3)), **keras.rnn_from_keras(*weights)).h.shape
        (10, 2, 4)
    """
    weights = check_keras("rnn_from_keras", 1, kernel, recurrent_kernel, bias, [1])
    return from_keras("h", "h", weights) | ({} if bias is None else {"b": weights["bias"]})


def rnn_to_keras(Wx: mx.array, Wh: mx.array, b: mx.array | None = None) -> list[np.ndarray]:
    """The way back from `rnn_from_keras`: what `keras_layer.set_weights` takes, in float32; float64 stays.

    Args:
        Wx, Wh, b (array): [H, I], [H, H], [H]; `None` for a layer with `use_bias=False`.

    Returns:
        list: kernel [I, H], recurrent_kernel [H, H] and, if given, bias [H].
    """
    check_ours("rnn_to_keras", 1, Wx, Wh, {"b": b})
    return [to_numpy(Wx).T, to_numpy(Wh).T] + ([] if b is None else [to_numpy(b)])


def bidirectional_from_keras(convert: Callable[..., Arrays], weights: Sequence[Any]) -> Arrays:
    """The weights of a `keras.layers.Bidirectional` as arguments of `lstm`, `gru` or `rnn` with `bidirectional=True`.

    Their output h is that of a layer with `return_sequences=True` and Keras' default, `merge_mode="concat"`. For the
    other modes add, average or multiply its halves. Without `return_sequences` it is hT.

    Args:
        convert (callable): `lstm_from_keras`, `gru_from_keras` or `rnn_from_keras`, whichever fits the wrapped layer.
        weights (sequence of arrays): `layer.get_weights()`: those of the forward layer, then those of the other, in the
            same shapes.

    Returns:
        dict: as `convert` has them, joined: `Wx` [2GH, I], `Wh` [2, GH, H], `b` [2GH], `bhn` [2H].

    Example:
        >>> import mlx.core as mx, numpy as np
        >>> from mlx_lstm import keras, lstm
        >>> shapes = [(3, 16), (4, 16), (16,)] * 2
        >>> weights = [np.ones(shape, np.float32) for shape in shapes]  # keras_layer.get_weights()
        >>> arrays = keras.bidirectional_from_keras(keras.lstm_from_keras, weights)
        >>> lstm(mx.ones((10, 2, 3)), **arrays, bidirectional=True).h.shape
        (10, 2, 8)
    """
    weights, n = list(weights), len(weights) // 2
    shapes = [np.shape(array) for array in weights]
    if not n or shapes[:n] != shapes[n:]:
        fail("bidirectional_from_keras", "weights must be those of two layers of the same shapes", f"shapes {shapes}")
    return join([convert(*weights[:n]), convert(*weights[n:])])


def bidirectional_to_keras(convert: Callable[..., list[np.ndarray]], arrays: Arrays) -> list[np.ndarray]:
    """The way back from `bidirectional_from_keras`: what `keras_layer.set_weights` takes.

    Args:
        convert (callable): `lstm_to_keras`, `gru_to_keras` (with `reset_after=False` bound, if that is the layer's) or
            `rnn_to_keras`.
        arrays (dict): by name, as `bidirectional_from_keras` returns them.

    Returns:
        list: what `convert` makes of the forward direction, then what it makes of the other.
    """
    check_array("bidirectional_to_keras", "Wh", arrays.get("Wh"), [2, "G * H", "H"])
    return [array for d in range(2) for array in convert(**part(arrays, d))]


def check_keras(op: str, G: int, kernel: Any, recurrent_kernel: Any, bias: Any, *biases: list[int]) -> Arrays:
    """kernel [I, GH], recurrent_kernel [H, GH]; the bias in one of the shapes, whose last number counts H. Returns what
    is there as MLX arrays."""
    shapes = [np.shape(array) for array in (kernel, recurrent_kernel, bias)]
    H = shapes[1][0] if len(shapes[1]) == 2 else 0
    if len(shapes[0]) != 2 or shapes[0][1] != G * H or shapes[1] != (H, G * H):
        rule = f"kernel and recurrent_kernel must have shapes [I, {times(G)}] and [H, {times(G)}]"
        fail(op, rule, f"shapes {list(shapes[0])} and {list(shapes[1])}")
    if bias is not None and shapes[2] not in [(*shape[:-1], shape[-1] * H) for shape in biases]:
        rule = " or ".join(f"[{', '.join([*map(str, shape[:-1]), times(shape[-1])])}]" for shape in biases)
        fail(op, f"bias must have shape {rule}", f"shape {list(shapes[2])}")
    given = {"kernel": kernel, "recurrent_kernel": recurrent_kernel} | ({} if bias is None else {"bias": bias})
    weights = {name: to_mlx(array) for name, array in given.items()}
    for name, array in weights.items():
        check_array(op, name, array, array.shape)
    return weights


def check_ours(op: str, G: int, Wx: mx.array, Wh: mx.array, biases: dict[str, mx.array | None]) -> None:
    """Wx [GH, I], Wh [GH, H]; of the biases that are there b [GH], bhn [H]."""
    check_array(op, "Wx", Wx, [times(G), "I"])
    H = Wx.shape[0] // G
    check_array(op, "Wh", Wh, [G * H, H])
    for name, bias in biases.items():
        if bias is not None:
            check_array(op, name, bias, [H if name == "bhn" else G * H])


def times(G: int) -> str:
    """A multiple of H, as errors have it."""
    return "H" if G == 1 else f"{G}H"


def from_keras(theirs: str, ours: str, weights: Arrays) -> Arrays:
    """Wx and Wh in our gate order."""
    kernel, recurrent_kernel = (reorder(weights[name], theirs, ours).T for name in ("kernel", "recurrent_kernel"))
    return {"Wx": kernel, "Wh": recurrent_kernel}


def reorder(array: mx.array, before: str, after: str) -> mx.array:
    """The gates' blocks on the last axis in another order."""
    if before == after:
        return array
    blocks = dict(zip(before, mx.split(array, len(before), axis=-1), strict=True))
    return mx.concatenate([blocks[gate] for gate in after], axis=-1)


def to_mlx(array: Any) -> mx.array:
    """An array of Keras or NumPy in its dtype, or an MLX array as it is."""
    if isinstance(array, mx.array):
        return array
    array = np.asarray(array)
    return mx.array(array, mx.float64 if array.dtype == np.float64 else None)  # which would be float32 unless told


def to_numpy(array: mx.array) -> np.ndarray:
    """As NumPy float32, or float64 if it is that."""
    return np.array(array if array.dtype == mx.float64 else array.astype(mx.float32))
