"""One recurrence to run, apart from its arrays: sizes, cell, direction, lengths. What an engine is told."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .cells import LSTMCell


class Problem(NamedTuple):
    """Sizes T, B, H, P (the width of h: H, or the projection's), cell, direction, lengths ([B] int32 or None);
    whether the caller wants the gates, which an engine else keeps to itself; whether to keep them for a gradient."""

    T: int
    B: int
    H: int
    P: int
    cell: LSTMCell
    reverse: bool = False
    lengths: mx.array | None = None
    return_gates: bool = False
    training: bool = True

    def steps(self) -> range:
        """The time indices in the order they are processed."""
        return range(self.T - 1, -1, -1) if self.reverse else range(self.T)

    def live(self, t: int) -> mx.array | None:
        """[B, 1]: which items have not ended at step t. None without lengths."""
        return None if self.lengths is None else (self.lengths > t)[:, None]
