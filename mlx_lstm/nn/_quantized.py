"""The layers of `mlx_lstm.nn` on weights as `mx.quantize` packs them, and a whole model quantized."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..checks import fail
from ..recurrence import QuantizedLayer
from ._layers import GRU, LSTM, RNN


class QuantizedLSTM(QuantizedLayer, LSTM):
    """`LSTM` with quantized weights; `mlx.nn.QuantizedLinear` is to `Linear` what this is to `LSTM`.

    Equals the `LSTM` whose weights are what `mx.dequantize` makes of the packed ones, which stay packed: at 4 bits an
    eighth of the bytes of float32. Made by `from_layer(layer, group_size, bits, mode)`, or for a whole model by
    `quantize`; the constructor draws random weights, for a file to be loaded into.

    Parameters: `Wx` and `Wh` as `mx.quantize` packs them, uint32; beside each `Wx_scales`, `Wh_scales` and, in mode
    "affine", `Wx_biases`, `Wh_biases`; `bias` [4H] as it was. A weight keeps its name, as that of
    `mlx.nn.QuantizedLinear` does. All are frozen, as there; after `layer.unfreeze(keys="bias")` the bias is trained.
    Packed weights have no gradient: to ask for one is an error.

    Where D is not a multiple of the group `Wx` stays as it is: it is read once per call, and `Wh` at every step.

    Args:
        input_size, hidden_size, bias, engine: as in `LSTM`.
        layer (Module): of `from_layer`, an `mlx_lstm.nn.LSTM` or `mlx.nn.LSTM`, which stays as it is.
        group_size (int, optional): weights that share a scale; H must be a multiple. Default: that of the mode, 64, or
            of "mxfp4" and "mxfp8" 32, of "nvfp4" 16.
        bits (int, optional): of a weight. Default: that of the mode, 4, or of "mxfp8" 8.
        mode (str): "affine" (groups of 32, 64, 128; 1, 2, 3, 4, 5, 6 or 8 bits), "mxfp4", "mxfp8" or "nvfp4", as of
            `mx.quantize`. Default: `"affine"`.

    Raises:
        ValueError: an argument breaks a rule.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import LSTM, QuantizedLSTM
        >>> layer = QuantizedLSTM.from_layer(LSTM(40, 64), bits=8)
        >>> layer
        QuantizedLSTM(input_dims=40, hidden_size=64, bias=True, group_size=64, bits=8, mode=affine)
        >>> hidden, cell = layer(mx.ones((2, 10, 40)))
        >>> sorted(layer.parameters())
        ['Wh', 'Wh_biases', 'Wh_scales', 'Wx', 'bias']
    """

    op = "nn.QuantizedLSTM"
    of, kinds = LSTM, (LSTM, nn.LSTM)


class QuantizedGRU(QuantizedLayer, GRU):
    """`GRU` with quantized weights, as `QuantizedLSTM` has them.

    Parameters: `Wx`, `Wh` and their scales and biases as there; `b` [3H], `bhn` [H] as they were.

    Args:
        input_size, hidden_size, bias, group_size, bits, mode, engine: as in `QuantizedLSTM`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import GRU, QuantizedGRU
        >>> QuantizedGRU.from_layer(GRU(32, 32), mode="mxfp4")(mx.ones((2, 10, 32))).shape
        (2, 10, 32)
    """

    op = "nn.QuantizedGRU"
    of, kinds = GRU, (GRU, nn.GRU)


class QuantizedRNN(QuantizedLayer, RNN):
    """`RNN` with quantized weights, as `QuantizedLSTM` has them.

    Parameters: `Wxh`, `Whh`, each with `Wxh_scales`, `Wxh_biases` and so on beside it; `bias` [H] as it was.

    Args:
        input_size, hidden_size, bias, nonlinearity, engine: as in `RNN`.
        group_size, bits, mode: as in `QuantizedLSTM`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import RNN, QuantizedRNN
        >>> QuantizedRNN.from_layer(RNN(32, 32), group_size=32)(mx.ones((2, 10, 32))).shape
        (2, 10, 32)
    """

    op = "nn.QuantizedRNN"
    of, kinds = RNN, (RNN, nn.RNN)


def quantize(
    model: nn.Module,
    group_size: int | None = None,
    bits: int | None = None,
    *,
    mode: str = "affine",
    quantize_input: bool = False,
    class_predicate: Callable[[str, nn.Module], bool | dict[str, Any]] | None = None,
) -> None:
    """`mlx.nn.quantize`, which also quantizes our layers: those of `mlx_lstm.nn` and of `mlx_lstm.torch`, no cells.

    Equals `mlx.nn.quantize` in arguments and in what it does with all other layers. That function leaves ours as they
    are, so that a model and its weight files go on fitting one another. Layers of `mlx.nn` itself become ours by
    `replace` first; subclasses of ours, which may compute something else, are left. A layer that several modules share
    stays shared. If anything is refused, the model stays as it was.

    To load quantized weights, quantize a model of the same sizes in the same way first, as with MLX:
    `quantize(model, 64, 4)`, `model.load_weights(file)`.

    Args:
        model (Module): a module that has such layers, in place; for a layer by itself there is `from_layer`.
        group_size (int, optional): as of `mx.quantize`; see `QuantizedLSTM`. Default: that of the mode.
        bits (int, optional): likewise.
        mode (str): likewise. Default: `"affine"`.
        quantize_input (bool): for `mlx.nn.Linear` only, handed on. Default: `False`.
        class_predicate (callable, optional): called with a layer's path and itself; what is `True`, or a dict of
            `group_size`, `bits` and `mode`, is quantized. Default: all that can be.

    Raises:
        ValueError: an argument breaks a rule, or a layer's H is no multiple of the group.

    Example:
        >>> import mlx.nn
        >>> import mlx_lstm.nn
        >>> model = mlx.nn.Sequential(mlx_lstm.nn.GRU(64, 64), mlx.nn.Linear(64, 2))
        >>> mlx_lstm.nn.quantize(model, bits=8)
        >>> [type(layer).__name__ for layer in model.layers]
        ['QuantizedGRU', 'QuantizedLinear']
    """
    if not isinstance(model, nn.Module) or quantizes(model):
        fail("nn.quantize", "model must be a module that has layers", type(model).__name__)
    made: dict[int, nn.Module] = {}
    wanted = class_predicate or (lambda _, layer: quantizes(layer) or hasattr(layer, "to_quantized"))

    def make(path: str, layer: Any) -> None:
        how = quantizes(layer) and wanted(path, layer)
        if how and id(layer) not in made:
            options = {"group_size": group_size, "bits": bits, "mode": mode} if how is True else how
            made[id(layer)] = layer.into_quantized(**options)

    def of_mlx(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        return not quantizes(layer) and wanted(path, layer)

    each = partial(tree_map_with_path, is_leaf=nn.Module.is_module)
    each(make, model.leaf_modules())
    theirs: Any = nn.quantize  # of which MLX's types do not say that a size may be None
    more = {"quantize_input": True} if quantize_input else {}
    theirs(model, group_size, bits, mode=mode, class_predicate=of_mlx, **more)
    model.update_modules(each(lambda _, layer: made.get(id(layer), layer), model.leaf_modules()))


def quantizes(layer: object) -> bool:
    """Whether it is a layer of ours, and of no subclass, that can be quantized."""
    return "into_quantized" in vars(type(layer))
