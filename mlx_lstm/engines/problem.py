"""One recurrence to run, apart from its arrays: sizes, cell, direction, lengths. What an engine is told."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .cells import Cell

Arrays = dict[str, mx.array]
"""Arrays by name: a recurrence's arguments, outputs, gradients."""


class Problem(NamedTuple):
    """Sizes T, B, H, P (the width of h: H, or the projection's) of one direction, cell, direction, lengths ([B] int32
    or None); whether the caller wants the gates, which an engine else keeps to itself; whether to keep them for a
    gradient; whether both directions run, whose arrays `directions` lays out."""

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
