"""The rows that the launches of a `stepwise` pass write, and the plan that says which launches join rows.

In MLX each launch writes new arrays, so each step writes one separate array, called a row. A last launch copies all
rows into sequences. But Metal binds at most 31 arrays to a launch, so this launch reads at most 20 arrays of rows.

Therefore some launches of later steps also join N arrays into one. N is 16 if the launch has few other arrays, else 8.
With N = 16 a pass of up to 320 = 16 * 20 steps joins each row at most once; longer passes join arrays that are already
joined. A projection writes a second kind of row; then each kind has 10 of the 20 arrays.

- piece: an array of one or more rows; written (level, number of rows) while a pass is planned
- level: how many joins the rows of a piece went through, at most; a new row has level 0
- T: the launches of a pass. left: how many pieces may remain at its end. most: how many a launch can join, N
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

JOINED = (16, 8)
"""How many arrays one launch joins: 16 if Metal can bind them beside the launch's other arrays, else 8."""

BOUND = 31
"""The largest number of arrays that Metal binds to one launch."""

LEFT = 20
"""How many arrays of rows may remain after the last step. With a projection both kinds of rows share this number."""


class Join(NamedTuple):
    """A plan to join neighbouring arrays of rows into one array: the index of the first array, and the number of rows
    in each of the arrays."""

    first: int
    steps: tuple[int, ...]


def joined_beside(others: int) -> int:
    """Return how many arrays a launch can join into one if it also binds `others` other arrays: 16, or 8 if 16 and
    the others are more than Metal binds."""
    return next((count for count in JOINED if count + others <= BOUND), JOINED[-1])


@lru_cache(64)
def joins(T: int, left: int, most: int) -> tuple[tuple[Join | None, ...], tuple[int, ...]]:
    """Plan the joins of a pass of T launches that each write one row, so that at most `left` arrays remain. Return
    (joins, sizes): the join of each launch, or None; and how many rows each remaining array has. A join has at most
    `most` arrays.

    To copy each row as seldom as possible, a launch joins only neighbouring arrays of the same level (how many joins
    their rows went through, at most). `levels`: the least number of levels with which at most `left` arrays remain.
    Only near the end, if too many arrays would remain, it joins the shortest neighbouring arrays of any level.
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
    """Return (first, count): the index of the first piece that the next launch joins, and how many neighbouring
    pieces it joins. Return None if it joins none.

    pieces: (level, number of rows) of each array so far. to_come: how many launches are left, including the next one.
    left: how many arrays may remain after the last launch. levels: how often a row may be copied before the end of the
    pass. most: how many arrays one launch can join.
    """
    count = len(pieces)
    size = min(most, count + to_come - left + 1)  # a join of n arrays into one removes n - 1 arrays
    if size < 2:
        return None
    # A whole group of pieces of the same level is due. Near the end fewer of them are joined, if that is enough.
    for first in range(count - most + 1):
        level = pieces[first][0]
        if level < levels and all(other == level for other, _ in pieces[first : first + most]):
            return first, size
    # Otherwise wait: a later launch may complete a group. At the end each level has at most one incomplete group, so
    # the last levels + 1 launches suffice to join these.
    if to_come > levels + 1:
        return None
    size = min(size, count)
    windows = range(count - size + 1)
    return min(windows, key=lambda first: sum(steps for _, steps in pieces[first : first + size])), size


class Rows:
    """The arrays that the T launches of a pass write, one row (the results of one step) per launch. Some launches
    also join earlier arrays into one, so that at most `left` arrays remain after the last launch.

    pieces: the current arrays, each with one or more rows, in the order of the launches. joins: an iterator over the
    joins of the next launches; None is a launch without a join. steps: the number of rows that each array has at the
    end.
    """

    def __init__(self, T: int, left: int):
        """Create the object without arrays and without a plan. T: the launches of the pass. left: how many arrays may
        remain after the last one."""
        self.T: int = T
        self.left: int = left
        self.pieces: list[mx.array] = []
        self.joins: Iterator[Join | None] = iter(())
        self.steps: tuple[int, ...] = ()

    def plan(self, most: int) -> None:
        """Plan which launch copies which arrays of rows into one larger array, so that at most `left` arrays remain
        at the end. A launch copies at most `most` arrays. Later launches read the plan from `joins`."""
        plan, self.steps = joins(self.T, self.left, most)
        self.joins = iter(plan)


def starts_of(steps: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return count + 1 numbers: the index of the first row in each array, and the index at which the last array
    ends. steps: the number of rows in each array. If there are fewer than `count` arrays, the missing ones are
    empty."""
    starts = tuple(accumulate(steps, initial=0))
    return starts + starts[-1:] * (count + 1 - len(starts))
