"""The rows that the launches of a sweep write, and how they become few arrays without a launch of their own.

Each launch of a sweep writes one row, an array of its own: MLX has no output that several launches write. At the end
one launch lays all rows out in time, but it can read only some 20 arrays, 10 of each kind where a projection makes
rows of another kind. So launches in later steps copy 8 arrays into one, beside their own work, as often as it takes.
Every row is copied about once per level of this, log8(T / 20) times.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

JOINED = 8
"""Arrays a launch joins."""

LEFT = 20
"""Arrays that may be left at the end, of all kinds of rows. Metal binds up to 31 to a launch."""


class Piece(NamedTuple):
    """An array of `steps` rows, and how many joins its oldest rows went through."""

    array: mx.array | None
    steps: int
    level: int


class Rows:
    """The rows of one kind that T launches of a sweep write, in the order of the launches; `left`: how many arrays they
    may be at the end."""

    def __init__(self, T: int, left: int = LEFT):
        self.pieces: list[Piece] = []
        self.to_come, self.left = T, left
        self.levels = 0
        while left * JOINED**self.levels < T:
            self.levels += 1

    def due(self) -> slice:
        """Which neighbours the next launch shall join: as many of one level as it can; near the end the shortest ones,
        if too many would be left; else none."""
        count = len(self.pieces)
        windows = [slice(start, start + JOINED) for start in range(max(count - JOINED, 0) + 1)]
        for window in windows:
            levels = {piece.level for piece in self.pieces[window]}
            if count >= JOINED and len(levels) == 1 and max(levels) < self.levels:
                return window
        if count + self.to_come <= self.left or self.to_come > self.levels + 1:
            return slice(0, 0)
        return min(windows, key=lambda window: sum(piece.steps for piece in self.pieces[window]))

    def add(self, row: mx.array | None, joined: mx.array | None = None) -> None:
        """The next launch's row and, if something was due, what became of it."""
        due = self.pieces[self.due()]
        if due:
            level = max(piece.level for piece in due) + 1
            self.pieces[self.due()] = [Piece(joined, sum(piece.steps for piece in due), level)]
        self.pieces.append(Piece(row, 1, 0))
        self.to_come -= 1


def starts_of(pieces: list[Piece], count: int) -> list[int]:
    """count + 1 numbers: the row each piece begins at, and where the last one ends; the missing ones are empty."""
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + piece.steps)
    return starts + [starts[-1]] * (count + 1 - len(starts))
