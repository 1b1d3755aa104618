"""Base class of the quantized layers of `mlx_lstm.nn` and `mlx_lstm.torch`.

A quantized layer has the parameters of its float layer, but a weight such as `Wh` is packed by `mx.quantize` as up to
three arrays: `Wh` (packed integers of a few bits), `Wh_scales` and `Wh_biases`: a scale and, in mode "affine", a bias
for each group of numbers of a row. The arguments of `mx.quantize` are group_size, bits (of each number) and mode (the
kind of scales). DEFAULTS: {mode: its default (group_size, bits)}. WIDTHS: {mode: (group sizes, bits) that it allows}.

MLX's class of layers, `nn.Module`, is a dict of the layer's parameters. All other attributes are in `vars(self)`.
"""

from inspect import Signature, signature
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from ..engines.packing import DEFAULTS, WIDTHS, Quantized, Weight
from ..ground.checks import fail
from ._arguments import check_packing

Layer = TypeVar("Layer", bound="QuantizedLayer")

RECURRENT = ("Wh", "weight_hh")
"""Prefixes of the parameter names of recurrent weights, in MLX and in torch."""


QUANTIZED: dict[type[nn.Module], type["QuantizedLayer"]] = {}
"""The quantized class of each class of float layers."""


class QuantizedLayer(nn.Module):
    """Base class of quantized layers, which inherit from it first, then from the class of the float layer."""

    op: str  # the layer's name in errors
    of: type[nn.Module]  # the float layer's class
    kinds: tuple[type[nn.Module], ...]  # classes that `from_layer` takes

    def __init_subclass__(cls, **options: Any):
        """Register a new quantized class of this package in QUANTIZED. Give its constructor the signature that help()
        shows: the arguments of the float layer, followed by those of `mx.quantize`."""
        super().__init_subclass__(**options)
        if "of" not in vars(cls):  # a subclass that a user wrote
            return
        QUANTIZED[cls.of] = cls

        # The constructor of the new class. It only calls `QuantizedLayer.__init__`. It exists because help() shows its
        # signature, which is set below.
        def constructor(self: QuantizedLayer, *sizes: Any, **options: Any) -> None:
            QuantizedLayer.__init__(self, *sizes, **options)

        # packing: the parameters group_size, bits and mode, which are the keyword-only ones of `__init__` below.
        packing = [p for p in signature(QuantizedLayer.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        arguments = [*signature(cls.of.__init__).parameters.values(), *packing]
        constructor.__name__, constructor.__qualname__ = "__init__", f"{cls.__qualname__}.__init__"
        setattr(constructor, "__signature__", Signature(arguments))  # noqa: B010 (a function's type does not declare it)
        setattr(cls, "__init__", constructor)  # noqa: B010

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
        """Return a quantized copy of a float layer, which stays unchanged. group_size, bits, mode: as in `mx.quantize`;
        None stands for the default of the mode."""
        if type(layer) not in cls.kinds:  # a subclass may compute something else
            rule = f"layer must be of the class {cls.of.__module__.removesuffix('._layers')}.{cls.of.__name__}"
            fail(cls.op, rule, f"{type(layer).__module__}.{type(layer).__qualname__}")
        new = cls.__new__(cls)  # without the constructor, which would draw parameters
        nn.Module.__init__(new)
        # _no_grad: MLX's set of the names of frozen parameters, which is not copied.
        state = {name: value for name, value in vars(layer).items() if name not in ("_no_grad", "_engine_used")}
        vars(new).update({"engine": None, "checkpoint_every": None} | state)  # MLX's own layers do not have these two
        dict.update(new, layer)  # the parameters
        new.pack(group_size, bits, mode)
        return new

    def dequantize(self) -> nn.Module:
        """Return a float layer with the weights that `mx.dequantize` returns for this layer's weights.

        The float layer has the class that `from_layer` takes, such as `mlx_lstm.nn.LSTM`, and computes the same
        results. All its parameters can be trained. This layer stays unchanged. Quantizing the new layer in the same way
        gives this layer's weights again, up to rounding. The float weights have the dtype of the scales. In modes
        without biases the scales are integer codes, so the float weights are float32.
        """
        new = self.of.__new__(self.of)  # without the constructor, which would draw parameters
        nn.Module.__init__(new)
        # own: the attributes that only this layer has. _no_grad: MLX's set of the names of frozen parameters.
        own = ("group_size", "bits", "mode", "_no_grad", "_engine_used")
        vars(new).update({name: value for name, value in vars(self).items() if name not in own})
        for name, value in self.items():
            if f"{name}_scales" in self:
                scales, biases = self[f"{name}_scales"], self.get(f"{name}_biases")
                dtype = mx.float32 if biases is None else scales.dtype
                packing = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
                new[name] = mx.dequantize(value, scales, biases, **packing, dtype=dtype)
            elif not name.endswith(("_scales", "_biases")):
                new[name] = value
        return new

    def pack(self, group_size: int | None, bits: int | None, mode: str) -> None:
        """Quantize the weights of this layer and freeze all its parameters. group_size, bits: None stands for the
        default of the mode.

        A weight whose number of columns is not a multiple of the group size stays a float matrix; for a recurrent
        weight this is an error.
        """
        # This is not DEFAULTS.get(mode), because a wrong mode without a hash, such as a list, would raise TypeError
        # here; `check_packing` below raises a clear error for it. (64, 4): any numbers, for an unknown mode.
        defaults = next((sizes for name, sizes in DEFAULTS.items() if name == mode), (64, 4))
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
                fits = [size for size in WIDTHS[mode][0] if columns % size == 0]  # [0]: the group sizes of the mode
                advice = f" (group_size={fits[-1]} fits)" if fits else ""
                fail(self.op, f"the columns of {name} must be a multiple of group_size = {group_size}{advice}", columns)
        self.freeze()

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, group_size={self.group_size}, bits={self.bits}, mode={self.mode}"

    def _parameter(self, name: str) -> Weight:
        """Return the parameter `name` of the layer: a `Quantized` object for a quantized weight, else the array."""
        array = cast(Any, super())._parameter(name)  # the method of the float layer, the other base class
        if f"{name}_scales" not in self:
            return array
        scales, biases = self[f"{name}_scales"], self.get(f"{name}_biases")
        return Quantized(array, scales, biases, self.group_size, self.bits, self.mode)
