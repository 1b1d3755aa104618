"""Quantizing of a whole model, with the recurrent layers in it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..checks import fail


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
