"""What quantized layers share, whoever's parameters they have: how their weights are packed, and read again."""

from collections.abc import Iterable
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from ..checks import fail, instead_of
from ..engines.packing import DEFAULTS, Quantized, Weight
from ._arguments import check_packing

Layer = TypeVar("Layer", bound="QuantizedLayer")

RECURRENT = ("Wh", "weight_hh")
"""How the names of recurrent weights begin, in MLX's words and in torch's."""


class QuantizedLayer(nn.Module):
    """What makes a quantized kind of a layer: a subclass of this and of the layer says which one that is."""

    op: str  # in errors
    of: type[nn.Module]  # the layer that the constructor draws
    kinds: tuple[type[nn.Module], ...]  # those that can be quantized

    def __init__(
        self, *sizes: Any, group_size: int | None = None, bits: int | None = None, mode: str = "affine", **options: Any
    ):
        super().__init__(*sizes, **options)
        self.pack(group_size, bits, mode)

    @classmethod
    def from_layer(
        cls: type[Layer],
        layer: nn.Module,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
    ) -> Layer:
        """The quantized layer of another one, which stays as it is."""
        if type(layer) not in cls.kinds:  # a subclass may compute something else
            found = f"{type(layer).__module__}.{type(layer).__qualname__}"
            fail(
                cls.op,
                f"layer must be of the class {cls.of.__module__.removesuffix('._layers')}.{cls.of.__name__}",
                found,
            )
        new = cls.__new__(cls)
        new.take_over(layer)
        new.pack(group_size, bits, mode)
        return new

    def take_over(self, layer: nn.Module) -> None:
        """Become what a layer is, but for what is frozen."""
        nn.Module.__init__(self)
        state = {name: value for name, value in vars(layer).items() if name not in ("_no_grad", "_engine_used")}
        vars(self).update({"engine": None} | state)
        for name, value in layer.items():
            self[name] = value

    def pack(self, group_size: int | None, bits: int | None, mode: str) -> None:
        """Quantize the weights and freeze everything. Of those that are not recurrent one stays as it is whose columns
        are not a multiple of the group."""
        defaults = next((found for name, found in DEFAULTS.items() if name == mode), (64, 4))
        group_size = defaults[0] if group_size is None else group_size
        bits = defaults[1] if bits is None else bits
        check_packing(self.op, group_size, bits, mode)
        group_size, bits = int(group_size), int(bits)
        self.group_size, self.bits, self.mode = group_size, bits, mode
        for name in [name for name, value in self.items() if isinstance(value, mx.array) and value.ndim == 2]:
            columns = self[name].shape[1]
            if columns % group_size == 0:
                packed = mx.quantize(self[name], group_size, bits, mode)
                for part, array in Quantized(*packed, group_size=group_size, bits=bits, mode=mode).arrays(name).items():
                    self[part] = array
            elif name.startswith(RECURRENT):
                fail(self.op, f"the columns of {name} must be a multiple of group_size = {group_size}", columns)
        self.freeze()

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, group_size={self.group_size}, bits={self.bits}, mode={self.mode}"


def weight(layer: nn.Module, name: str) -> Weight:
    """A layer's weight or bias, packed or not."""
    array, scales = layer.get(name), layer.get(f"{name}_scales")
    if not isinstance(array, mx.array):  # a layer of MLX keeps no array of NumPy as a parameter
        found = getattr(layer, name, array)
        fail(cast(Any, layer).op, f"{name} must be an mlx.core.array{instead_of(found)}", type(found).__name__)
    if scales is None:
        return array
    biases = layer.get(f"{name}_biases")
    how: Any = layer
    return Quantized(array, scales, biases, how.group_size, how.bits, how.mode)


def common_dtype(values: Iterable[Any]) -> mx.Dtype:
    """That which arrays and weights promote to: a quantized weight counts as its scales, if these are floats."""
    found = [value.biases if isinstance(value, Quantized) else value for value in values]
    return mx.result_type(*(array for array in found if array is not None))


def in_dtype(values: dict[str, Any], dtype: mx.Dtype) -> dict[str, Any]:
    """Arrays in this dtype; quantized weights as they are."""
    return {name: value if isinstance(value, Quantized) else value.astype(dtype) for name, value in values.items()}
