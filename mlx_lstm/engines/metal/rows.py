"""The rows that the launches of a sweep write, and which of them are joined when.

Each launch of a sweep writes one row, an array of its own: MLX has no output that several launches write. At the end
one launch lays all rows out in time, but it can read only some 20 arrays, 10 of each kind if a projection makes rows of
another kind. So launches in later steps copy 8 arrays into one, beside their own work, as often as it takes. Every row
is copied about once per level of joins, log8(T / 20) times.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

JOINED = 8
"""Arrays that a launch joins."""

LEFT = 20
"""Arrays that may be left at the end, of all kinds of rows. Metal binds up to 31 to a launch."""


class Join(NamedTuple):
    """The neighbours among the arrays so far that a launch joins: the first, and how many rows each of them has."""

    first: int
    steps: tuple[int, ...]


@lru_cache(64)
def joins(T: int, left: int) -> tuple[tuple[Join | None, ...], tuple[int, ...]]:
    """Return what each of T launches joins, so that at most `left` arrays remain, and how many rows each of these has.

    The level of an array is the number of joins that its oldest rows went through. A launch joins neighbours of one
    level; near the end the shortest neighbours, if too many arrays would be left.
    """
    levels = next(level for level in range(T) if left * JOINED**level >= T)
    plan: list[Join | None] = []
    pieces: list[tuple[int, int]] = []  # level, rows
    for to_come in range(T, 0, -1):
        first = due(pieces, to_come, left, levels)
        if first is None:
            plan.append(None)
        else:
            joined = pieces[first : first + JOINED]
            plan.append(Join(first, tuple(steps for _, steps in joined)))
            pieces[first : first + JOINED] = [(1 + max(joined)[0], sum(steps for _, steps in joined))]
        pieces.append((0, 1))
    return tuple(plan), tuple(steps for _, steps in pieces)


def due(pieces: list[tuple[int, int]], to_come: int, left: int, levels: int) -> int | None:
    """Return where the arrays begin that the next launch joins, if any; `to_come`: launches left, with that one."""
    count = len(pieces)
    for first in range(count - JOINED + 1):
        level = pieces[first][0]
        if level < levels and all(other == level for other, _ in pieces[first : first + JOINED]):
            return first
    if count + to_come <= left or to_come > levels + 1:
        return None
    windows = range(max(count - JOINED, 0) + 1)
    return min(windows, key=lambda first: sum(steps for _, steps in pieces[first : first + JOINED]))


class Rows:
    """The rows of one kind that T launches of a sweep write: `pieces`, arrays of one or more rows, in the order of the
    launches; `joins`, what each launch joins; `steps`, the rows of each array at the end, when `left` may be left."""

    def __init__(self, T: int, left: int = LEFT):
        plan, steps = joins(T, left)
        self.steps: tuple[int, ...] = steps
        self.joins: Iterator[Join | None] = iter(plan)
        self.pieces: list[mx.array] = []


def starts_of(steps: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return count + 1 numbers: the row that each array begins at, and where the last one ends; missing ones are
    empty."""
    starts = tuple(accumulate(steps, initial=0))
    return starts + starts[-1:] * (count + 1 - len(starts))
