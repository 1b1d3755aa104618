"""Quantized weights: the class `Quantized`, with which callers pass them, and `Packing`, which tells an engine their
format.

A quantized weight stores each number in a few bits. A group of neighbouring numbers of a row shares a scale and, in
mode "affine", a bias: the number is scale q + bias, with an integer q. The bits are packed into 32-bit integers.
Engines get a weight such as Wh as up to three arrays: `Wh` (the packed integers), `Wh_scales` and `Wh_biases`.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import mlx.core as mx

WIDTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((32, 64, 128), (1, 2, 3, 4, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}
"""{mode of `mx.quantize`: (group sizes, bits per weight) that the mode supports}."""

DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""{mode of `mx.quantize`: (default group size, default bits per weight)}, as in MLX."""

WEIGHTS = ("Wx", "Wh", "Wp")
"""The names of the arrays that may be quantized."""


class Packing(NamedTuple):
    """The format of quantized weights, as in `mx.quantize`. group_size: how many neighbouring weights share a scale.
    bits: the bits per weight. mode: a key of `WIDTHS`, such as "affine"."""

    group_size: int
    bits: int
    mode: str

    def quantize(self, weight: mx.array) -> "Quantized":
        """Return a matrix quantized in this format."""
        return Quantized(*mx.quantize(weight, *self), **self._asdict())


class Quantized(NamedTuple):
    """A weight matrix as `mx.quantize` packs it, for `Wx`, `Wh` and `Wp` of `lstm`, `gru` and `rnn`.

    It stands for the matrix `mx.dequantize(packed, scales, biases, group_size, bits, mode)` with scales and biases in
    float32. The number of columns is a multiple of group_size. `packed` [.., columns * bits / 32] holds unsigned 32-bit
    integers. In mode "affine" `scales` and `biases` [.., columns / group_size] have any float dtype. In the other modes
    `scales` has 8 bits, and there are no biases. All quantized weights of a call have the same format. They have no
    gradient: asking for their gradient raises an error.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import Quantized, lstm
        >>> Wx, Wh = mx.random.normal((256, 32)), mx.random.normal((256, 64))
        >>> packed = Quantized(*mx.quantize(Wh, 32, 8), group_size=32, bits=8)
        >>> packed.shape, lstm(mx.ones((10, 1, 32)), Wx, packed).h.shape
        ((256, 64), (10, 1, 64))
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array | None = None
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized matrix."""
        return *self.packed.shape[:-1], self.packed.shape[-1] * 32 // self.bits

    @property
    def packing(self) -> Packing:
        """The group size, the bits per weight and the mode."""
        return Packing(self.group_size, self.bits, self.mode)

    def arrays(self, name: str) -> dict[str, mx.array]:
        """Return the arrays of the quantized weight by the names that engines use: `name`, `name_scales` and, if it
        has biases, `name_biases`."""
        arrays = {name: self.packed, f"{name}_scales": self.scales, f"{name}_biases": self.biases}
        return {key: array for key, array in arrays.items() if array is not None}


Weight = mx.array | Quantized
"""The type of a weight matrix that may be quantized."""


def is_packed(name: str, arrays: Collection[str]) -> bool:
    """Return whether the weight `name` is quantized. arrays: the names of all arrays of the call."""
    return f"{name}_scales" in arrays


def packed_names(arrays: Mapping[str, object]) -> list[str]:
    """Return the names of all arrays that belong to quantized weights: packed integers, scales and biases."""
    return [name for name in arrays if is_packed(name, arrays) or name.endswith(("_scales", "_biases"))]


def field_of(packing: Packing) -> int:
    """Return how many bits the engine `fused` uses to store one quantized weight, 4 or 8. `fused` copies the weights
    into the order in which its threads read them, and stores each in a field of this size."""
    return 4 if packing.bits <= 4 else 8
