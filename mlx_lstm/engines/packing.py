"""Weights as `mx.quantize` packs them: what a caller hands over, and what an engine is told of it."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import mlx.core as mx

WIDTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((32, 64, 128), (1, 2, 3, 4, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}
"""The modes of `mx.quantize`; of each the sizes of a group and the bits of a weight."""

DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""Group size and bits of each mode where none are given, as MLX has them."""

WEIGHTS = ("Wx", "Wh", "Wp")
"""The arrays that may be packed."""


class Packing(NamedTuple):
    """How weights are packed: so many weights share a scale, so many bits are one weight, a mode of `WIDTHS`."""

    group_size: int
    bits: int
    mode: str


class Quantized(NamedTuple):
    """A weight matrix as `mx.quantize` packs it, for `Wx`, `Wh` and `Wp` of `lstm`, `gru` and `rnn`.

    Equals the matrix `mx.dequantize(packed, scales, biases, group_size, bits, mode)`, scales and biases in float32.
    Its rows are a multiple of group_size long. `packed` [.., columns * bits / 32] holds unsigned integers of 32 bits;
    `scales` and, in mode "affine", `biases` [.., columns / group_size] are of any float dtype, in the other modes of 8
    bits, without biases. All quantized weights of a call are packed in the same way. They have no gradient: to ask for
    one is an error.

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
        """That of the matrix."""
        return *self.packed.shape[:-1], self.packed.shape[-1] * 32 // self.bits

    @property
    def packing(self) -> Packing:
        """How it is packed."""
        return Packing(self.group_size, self.bits, self.mode)

    def arrays(self, name: str) -> dict[str, mx.array]:
        """Its arrays, by the names an engine has for them where the matrix has this one."""
        found = {name: self.packed, f"{name}_scales": self.scales, f"{name}_biases": self.biases}
        return {key: array for key, array in found.items() if array is not None}


Weight = mx.array | Quantized
"""A matrix, packed or not."""


def is_packed(name: str, arrays: Collection[str]) -> bool:
    """Whether an array is packed; `arrays`: the names of all."""
    return f"{name}_scales" in arrays


def packed_names(arrays: Mapping[str, object]) -> list[str]:
    """The names of all arrays that packed weights are made of."""
    return [name for name in arrays if is_packed(name, arrays) or name.endswith(("_scales", "_biases"))]


def field_of(packing: Packing) -> int:
    """The bits that a lane of `fused` has for each weight, which it packs anew."""
    return 4 if packing.bits <= 4 else 8
