"""What an engine is told: a recurrence's arrays by name, and all about it that is no array.

Of one direction, with T time, B batch, I input, H hidden, P the width of h (H, or the projection's), G gates:

    x [T, B, I], or [T, B, G H] without Wx   Wx [G H, I]   Wh [G H, P]   b [G H]   bhn [H]   peephole [4H]   Wp [P, H]
    h0 [B, P]   c0 [B, H]   mask, which broadcasts to [T, B, P]   keep [T, B, 1]
    results: h [T, B, P]   c [T, B, H]   gates [T, B, G H]   hT [B, P]   cT [B, H]; a gradient has its array's shape

Wx, Wh and Wp may be packed: then they are what `packing.Quantized` calls packed, and `Wh_scales`, `Wh_biases` beside
them. An array that the caller does not have is missing. How two directions share these arrays: `directions`.
"""

from typing import NamedTuple

import mlx.core as mx

from .cells import Cell
from .packing import Packing

Array = mx.array
Arrays = dict[str, Array]
"""Arguments, results, cotangents or gradients, by the names above."""


class Cut(NamedTuple):
    """How `fused` cuts a problem, as measured: the batch rows of a threadgroup, 8 in matrices; how many registers of a
    thread it keeps no weights in, besides those it needs."""

    rows: int
    spare: int = 0


class Problem(NamedTuple):
    """Sizes T, B, H, P (the width of h: H, or the projection's) of one direction, cell, direction, lengths ([B] int32
    or None); whether the caller wants the gates, which an engine else keeps to itself; whether to keep them for a
    gradient; whether both directions run, whose arrays `directions` lays out; how `fused` shall cut it, else by its own
    rules; how the weights are packed that are."""

    T: int
    B: int
    H: int
    P: int
    cell: Cell
    reverse: bool = False
    lengths: mx.array | None = None
    return_gates: bool = False
    training: bool = True
    bidirectional: bool = False
    cut: Cut | None = None
    packing: Packing | None = None

    @property
    def directions(self) -> int:
        """1 or 2: the factor on the width of every array both directions share."""
        return 2 if self.bidirectional else 1

    def steps(self) -> range:
        """The time indices in the order they are processed, of one direction."""
        return range(self.T - 1, -1, -1) if self.reverse else range(self.T)

    def live(self, t: int) -> mx.array | None:
        """[B, 1]: which items have not ended at step t. None without lengths."""
        return None if self.lengths is None else (self.lengths > t)[:, None]


def masks_differ(arrays: Arrays) -> bool:
    """Whether there is a mask, and each step has one of its own."""
    mask = arrays.get("mask")
    return mask is not None and mask.ndim == 3 and mask.shape[0] > 1
