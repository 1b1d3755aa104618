"""The rows that the launches of a `stepwise` pass write, and the plan that says which launches join rows.

In MLX each launch writes new arrays, so each step writes one separate array, called a row. A last launch copies all
rows into sequences. But this launch can read only some 20 arrays (10 of each kind if a projection writes a second
kind of row). Therefore some launches of later steps also join 8 arrays into one. Each number is copied about log8(T
/ 20) times.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

JOINED = 8
"""How many arrays one launch joins."""

LEFT = 20
"""How many arrays may be left after the last step, with rows of all kinds. Metal binds up to 31 arrays to a launch."""


class Join(NamedTuple):
    """A join of neighbouring arrays: the index of the first array, and the number of rows of each."""

    first: int
    steps: tuple[int, ...]


@lru_cache(64)
def joins(T: int, left: int) -> tuple[tuple[Join | None, ...], tuple[int, ...]]:
    """Plan the joins of T launches, so that at most `left` arrays remain. Return the join of each launch (None for
    no join), and the number of rows in each remaining array.

    The level of an array is the number of joins that its oldest rows went through. A launch joins neighbours of the
    same level. Near the end it joins the shortest neighbours if too many arrays would remain.
    """
    levels = next(level for level in range(T) if left * JOINED**level >= T)
    plan: list[Join | None] = []
    pieces: list[tuple[int, int]] = []  # (level, number of rows)
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
    """Return the index of the first array that the next launch joins, or None if it joins nothing. to_come: how many
    launches are left, including the next one."""
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
    """The rows of one kind (one array per launch) that T launches of a pass write. pieces: arrays of one or more
    rows, in the order of the launches. joins: what each launch joins. steps: the number of rows in each array at the
    end, when at most `left` arrays remain."""

    def __init__(self, T: int, left: int = LEFT):
        plan, steps = joins(T, left)
        self.steps: tuple[int, ...] = steps
        self.joins: Iterator[Join | None] = iter(plan)
        self.pieces: list[mx.array] = []


def starts_of(steps: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return count + 1 numbers: the index of the first row in each array, and the index at which the last array
    ends. If there are fewer than `count` arrays, the missing ones are empty."""
    starts = tuple(accumulate(steps, initial=0))
    return starts + starts[-1:] * (count + 1 - len(starts))
