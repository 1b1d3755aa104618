"""Quantize a whole model, including its recurrent layers. The path of a layer is its name in the model, such as
"layers.0"."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..ground.checks import fail
from ..recurrence import QUANTIZED, QuantizedLayer
from ._from_weights import Recurrence
from ._replace import OURS, THEIRS, kind_of_parameters, look_alike, modules_of, name_of


def quantize(
    model: nn.Module,
    group_size: int | None = None,
    bits: int | None = None,
    *,
    mode: str = "affine",
    quantize_input: bool = False,
    class_predicate: Callable[[str, nn.Module], bool | dict[str, Any]] | None = None,
) -> None:
    """Quantize a model in place, as `mlx.nn.quantize`, including the layers of `mlx_lstm.nn` and `mlx_lstm.torch`.

    This function has the arguments of `mlx.nn.quantize` and does the same with all other layers. `mlx.nn.quantize`
    itself leaves the layers of `mlx_lstm` unchanged, so that weight files still fit the model. Some recurrent layers
    stay in float: the cells of `mlx_lstm.torch`, the layers of `mlx.nn` (call `replace` first), the layers of other
    packages, layers in tuples, in which MLX finds none, and subclasses, because they may compute something else. A
    warning names these layers, except those that `class_predicate` leaves out. A layer that several modules share stays
    shared. If this function raises an error for a layer of `mlx_lstm`, the model stays as it was. `layer.dequantize()`
    makes a float layer again.

    To load quantized weights, first quantize a model of the same sizes in the same way, as with MLX:
    `quantize(model, 64, 4)`, `model.load_weights(file)`.

    Args:
        model (Module): a module that has such layers; to quantize a single layer use `from_layer` of its quantized
            class.
        group_size (int, optional): the number of weights that share a scale. Default: depends on the mode.
        bits (int, optional): bits of a weight. Default: depends on the mode.
        mode (str): "affine", "mxfp4", "mxfp8" or "nvfp4", as in `mx.quantize`; `QuantizedLSTM` lists the sizes of each
            mode. Default: `"affine"`.
        quantize_input (bool): is passed to `mlx.nn.quantize`, where it acts on `mlx.nn.Linear` only. Default: `False`.
        class_predicate (callable, optional): called with a layer's path and the layer. The layer is quantized if the
            result is `True`, or a dict of `group_size`, `bits` and `mode`. Default: all layers that can be quantized.

    Raises:
        ValueError: an argument breaks a rule, a layer's H is not a multiple of the group, or an `RNN` has another
            nonlinearity than MLX's tanh, relu or sigmoid. The text names the layer.

    Example:
        >>> import mlx.nn
        >>> import mlx_lstm.nn
        >>> model = mlx.nn.Sequential(mlx_lstm.nn.GRU(64, 64), mlx.nn.Linear(64, 2))
        >>> mlx_lstm.nn.quantize(model, bits=8)
        >>> [type(layer).__name__ for layer in model.layers]
        ['QuantizedGRU', 'QuantizedLinear']
    """
    if not isinstance(model, nn.Module) or quantizes(model):
        kind = type(model).__name__
        advice = f" (of one layer, Quantized{kind}.from_layer makes another)" if quantizes(model) else ""
        fail("nn.quantize", f"model must be a module that has layers{advice}", kind)
    if class_predicate is not None and not callable(class_predicate):
        fail("nn.quantize", "class_predicate must be a function of a path and a layer", type(class_predicate).__name__)
    quantized: dict[int, nn.Module] = {}  # {id of a float layer: its quantized copy}
    # predicate(path, layer): returns whether to quantize the layer, or a dict of the options with which to quantize it.
    predicate = class_predicate or (lambda _, layer: quantizes(layer) or hasattr(layer, "to_quantized"))

    # If the predicate selects this layer of this package, store a quantized copy of it in `quantized`.
    def quantize_ours(path: str, layer: Any) -> None:
        result = quantizes(layer) and predicate(path, layer)  # True, or a dict of options, or neither
        if result and id(layer) not in quantized:
            options = {"group_size": group_size, "bits": bits, "mode": mode} if result is True else result
            try:
                quantized[id(layer)] = QUANTIZED[type(layer)].from_layer(layer, **options)
            except ValueError as error:
                raise ValueError(f"{error} The layer is {path} of the model.") from None

    # The predicate for `mlx.nn.quantize`, which quantizes all other layers.
    def is_of_mlx(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        return not quantizes(layer) and predicate(path, layer)

    # Quantize the layers of `mlx_lstm` first, because they may raise an error. The model is then still unchanged.
    # each(function, tree): calls the function with the path and the layer, for each layer that holds no other layers.
    each = partial(tree_map_with_path, is_leaf=nn.Module.is_module)
    each(quantize_ours, model.leaf_modules())
    quantize_mlx: Any = nn.quantize  # Any: MLX's type annotations do not allow None for a size
    more = {"quantize_input": True} if quantize_input else {}  # passed only if wanted
    quantize_mlx(model, group_size, bits, mode=mode, class_predicate=is_of_mlx, **more)
    model.update_modules(each(lambda _, layer: quantized.get(id(layer), layer), model.leaf_modules()))
    left = []  # the layers that stay in float, for a warning
    for path, layer in modules_of(model, "", set()):
        if (reason := float_layer(path, layer)) and (class_predicate is None or class_predicate(path, layer)):
            left.append(f"{path or 'the model'} ({reason})")
    if left:
        warnings.warn(f"[nn.quantize] left in float: {', '.join(left)}.", stacklevel=2)


def float_layer(path: str, layer: nn.Module) -> str:
    """Return the reason why a recurrent layer stays in float, for a warning. Return an empty text for a layer that is
    quantized or not recurrent. path: the layer's name in the model."""
    if type(layer) in OURS:
        return f"{name_of(type(layer))}: call mlx_lstm.nn.replace first"
    if isinstance(layer, QuantizedLayer):
        return ""
    if quantizes(layer):  # `quantize` has quantized all such layers that MLX finds
        return f"{type(layer).__name__} in a tuple, in which MLX finds no layers: use a list"
    for kind in (*OURS, *THEIRS):
        if isinstance(layer, kind):
            return f"{type(layer).__name__}, a subclass of {name_of(kind)}"
    if type(layer).__module__.startswith("mlx_lstm.") and (isinstance(layer, Recurrence) or kind_of_parameters(layer)):
        return f"{type(layer).__name__}, which has no quantized kind"
    return look_alike(path, layer).partition(":")[0]  # without the advice after the colon


def quantizes(layer: object) -> bool:
    """Return whether this is a layer of `mlx_lstm` that can be quantized. An instance of a subclass cannot, because it
    may compute something else than the quantized class."""
    return type(layer) in QUANTIZED
