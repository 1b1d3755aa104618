"""Collect the arrays that the launches of a `stepwise` pass write, and plan which launches join such arrays into one.

In MLX each launch writes new arrays, so each step writes one separate array, called a row. A last launch copies all
rows into sequences. But Metal binds at most 31 arrays to a launch, so this launch reads at most 20 arrays of rows.

Therefore some launches also copy N arrays of earlier steps into one new array; this is called a join. N is 16 if the
launch has few other arrays, else 8. With N = 16 a pass of up to 320 = 16 * 20 steps copies each row at most once;
longer passes also join arrays that are already joined. A projection writes a second kind of rows; then each kind has 10
of the 20 arrays.

- piece: an array of one or more rows. A plan describes it as a pair (level, number of rows)
- level: how many joins the rows of a piece went through, at most; a new row has level 0
- T: the number of launches of a pass. left: how many pieces may remain at its end. most: N, how many pieces one launch
  can join
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

JOINED = (16, 8)
"""How many arrays one launch can join into one: 16 if Metal can bind them together with the launch's other arrays, else
8."""

BOUND = 31
"""The largest number of arrays that Metal binds to one launch."""

LEFT = 20
"""How many arrays of rows may remain after the last step, because the last launch of a pass reads so many. With a
projection the two kinds of rows have this number together."""


class Join(NamedTuple):
    """A plan to copy successive arrays of rows into one array. first: the index of the first of them among the arrays
    with rows. steps: for each of them its number of rows; a row has one time step."""

    first: int
    steps: tuple[int, ...]


def joined_beside(others: int) -> int:
    """Return how many arrays a launch can join into one if it also binds `others` other arrays: 16, or 8 if Metal
    cannot bind 16 more arrays."""
    return next((count for count in JOINED if count + others <= BOUND), JOINED[-1])


@lru_cache(64)
def joins(T: int, left: int, most: int) -> tuple[tuple[Join | None, ...], tuple[int, ...]]:
    """Plan the joins of a pass of T launches, so that at most `left` arrays remain. Return (joins, sizes): for each
    launch the join that it makes, or None; and for each remaining array how many rows it has.

    The level of an array is how often its rows have been copied, at most. To copy each row as seldom as possible, a
    launch joins only successive arrays of the same level. Near the end, if too many arrays would remain, it joins the
    shortest successive arrays of any level. levels: the smallest number of levels with which at most `left` arrays
    remain.
    """
    levels = next(level for level in range(T) if left * most**level >= T)
    plan: list[Join | None] = []
    pieces: list[tuple[int, int]] = []  # (level, number of rows)
    for to_come in range(T, 0, -1):
        found = due(pieces, to_come, left, levels, most)
        if found is None:
            plan.append(None)
        else:
            first, size = found
            joined = pieces[first : first + size]
            plan.append(Join(first, tuple(steps for _, steps in joined)))
            pieces[first : first + size] = [(1 + max(joined)[0], sum(steps for _, steps in joined))]
        pieces.append((0, 1))
    return tuple(plan), tuple(steps for _, steps in pieces)


def due(pieces: list[tuple[int, int]], to_come: int, left: int, levels: int, most: int) -> tuple[int, int] | None:
    """Return which join the next launch of a pass makes, as (first, count): the index of the first piece to join, and
    how many successive pieces are joined. Return None if the launch joins nothing.

    pieces: (level, number of rows) of each array so far. to_come: how many launches are left, including the next one.
    left: how many arrays may remain after the last launch. levels: how often a row may be copied before the end of the
    pass. most: how many arrays one launch can join.
    """
    count = len(pieces)
    size = min(most, count + to_come - left + 1)  # a join of n arrays into one removes n - 1 arrays
    if size < 2:
        return None
    # If `most` successive pieces have the same level, join them. Near the end fewer of them are joined, if that is
    # enough.
    for first in range(count - most + 1):
        level = pieces[first][0]
        if level < levels and all(other == level for other, _ in pieces[first : first + most]):
            return first, size
    # Otherwise join nothing yet, because a later launch may complete a group of `most` pieces. At the end each level
    # has at most one incomplete group, so the last levels + 1 launches are enough to join these groups.
    if to_come > levels + 1:
        return None
    size = min(size, count)
    windows = range(count - size + 1)
    return min(windows, key=lambda first: sum(steps for _, steps in pieces[first : first + size])), size


class Rows:
    """The arrays that the T launches of a pass write. pieces: the current arrays, in the order of the launches. joins:
    an iterator that yields, for each of the next launches, its join or None. steps: the number of rows that each array
    has at the end."""

    def __init__(self, T: int, left: int):
        """Create the object without arrays and without a plan. left: how many arrays may remain at the end."""
        self.T: int = T
        self.left: int = left
        self.pieces: list[mx.array] = []
        self.joins: Iterator[Join | None] = iter(())
        self.steps: tuple[int, ...] = ()

    def plan(self, most: int) -> None:
        """Plan which launch joins which arrays of rows. A launch joins at most `most` arrays. Later launches read the
        plan from `joins`."""
        plan, self.steps = joins(self.T, self.left, most)
        self.joins = iter(plan)


def starts_of(steps: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return count + 1 numbers for `count` arrays of rows: the index of the first row in each array, counted over all
    arrays, and the index at which the last array ends. steps: the number of rows in each array. If there are fewer than
    `count` arrays, the missing ones count as empty."""
    starts = tuple(accumulate(steps, initial=0))
    return starts + starts[-1:] * (count + 1 - len(starts))
