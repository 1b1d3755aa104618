"""What selects the kernels of a call, and the smallest call that runs the same ones."""

import json
from typing import NamedTuple

import mlx.core as mx

from ..engines.cells import Cell, LSTMCell
from ..engines.chunks import Chunks
from ..engines.metal import fused, stepwise
from ..engines.metal.fused_launches import SWEEPS, index_of, tiling_of
from ..engines.metal.stepwise_launches import index_bits, stepwise_rows, tile_of
from ..engines.packing import Packing, is_packed
from ..engines.problem import Cut, Problem

STEPS = 3
JOINING_STEPS, JOINING_LEFT = 10, 9
"""Of a trial with joins: its steps, and how many rows may be left, so that one launch joins as many as it can."""

SMALL = 8
"""Arrays of fewer elements lie in another address space of Metal, which makes another kernel."""

BATCHES = (1, 3, 9, 17, 31, 33, 65, 128, 256, 512, 1024)
"""Those of trials: one from every range in which the kernels stay the same, mostly one more than its edge."""


class Form(NamedTuple):
    """A call, but for the numbers in its arrays. `names`: of the arrays it has; `masks`: whether each step has a mask
    of its own; `plain`: whether it has no gradient; `cut`: how `fused` shall cut it; `cotangents`: of a gradient op,
    the outputs that have one; `chunks`: how its steps are cut; `packing`: how the
    weights are packed that are."""

    T: int
    B: int
    H: int
    P: int
    cell: Cell
    dtype: mx.Dtype
    names: tuple[str, ...]
    masks: bool
    lengths: bool
    reverse: bool
    bidirectional: bool
    batch_first: bool
    training: bool
    plain: bool
    cut: Cut | None
    return_gates: bool
    wants_last: bool
    cotangents: tuple[str, ...] | None
    chunks: Chunks | None = None
    packing: Packing | None = None

    def problem(self, lengths: mx.array | None = None) -> Problem:
        """What the engine is told."""
        how = (self.reverse, lengths, self.return_gates, self.training, self.bidirectional, self.cut, self.packing)
        return Problem(self.T, self.B, self.H, self.P, self.cell, *how)

    @property
    def word(self) -> str:
        """The name of the dtype."""
        return str(self.dtype).removeprefix("mlx.core.")


class Trial(NamedTuple):
    """A call to be tried, the smallest that runs the kernels of another one on this engine. Sizes alone would not
    select some of them: `wide` says that the indices have 64 bits, `parts` that a sweep is several launches of `fused`,
    `joins` that launches of `stepwise` join rows."""

    engine: str
    form: Form
    wide: bool
    parts: bool
    joins: bool

    def text(self) -> str:
        """All of it in one line."""
        form = self.form._asdict() | {"dtype": self.form.word, "cell": [self.form.cell.op, *self.form.cell]}
        return json.dumps(self._asdict() | {"form": form})


def trial_of(engine: str, form: Form) -> Trial:
    """The trial that stands for a call. Of chunks it has two, each the smallest that runs the same kernels."""
    if form.chunks is not None:
        one = trial_of(engine, form._replace(T=form.chunks.steps, chunks=None))
        T = one.form.T
        return one._replace(form=one.form._replace(T=2 * T, chunks=form.chunks._replace(steps=T)))
    problem = form.problem()
    if engine == "fused":
        wide, joins = index_of(problem) == mx.uint64, False
        parts = len(fused.launches(problem, form.masks)) > 1
        sizes = smallest_fused(form)
    else:
        form, wide, parts = form._replace(cut=None), index_bits(problem) == 64, False
        left = stepwise.LEFT // 2 if "Wp" in form.names else stepwise.LEFT
        joins = left < form.T
        sizes = smallest_stepwise(form)
    small = form.B * min(form.H, form.P) < SMALL
    T = JOINING_STEPS if joins else min(form.T, SMALL) if small else STEPS
    B, H, P = sizes
    if "keep" in form.names:
        T = as_small(form.T * form.B * problem.directions, B * problem.directions, T)
    names = tuple(sorted(form.names))
    tried = form._replace(T=T, B=B, H=H, P=P, cell=without_numbers(form.cell), names=names)
    return Trial(engine, tried, wide, parts, joins)


def as_small(size: int, each: int, steps: int) -> int:
    """So many steps, or such that an array of `each` numbers a step lies where one of this size does."""
    if (size < SMALL) == (steps * each < SMALL):
        return steps
    return max(1, (SMALL - 1) // each) if size < SMALL else SMALL


def without_numbers(cell: Cell) -> Cell:
    """The cell with numbers of ours for those that kernels are told when they run."""
    if not isinstance(cell, LSTMCell):
        return cell
    clip, bias = (0.5 if cell.cell_clip is not None else None), (-0.25 if cell.forget_bias else 0.0)
    return cell._replace(cell_clip=clip, forget_bias=bias)


def smallest_fused(form: Form) -> tuple[int, int, int]:
    """B, H, P: the smallest batch that is cut in the same way."""
    problem = fused.bare_of(form.problem(), form.names, form.dtype)
    extra = {"extra"} if {"peephole", "bhn"} & set(form.names) else set()
    given = extra | ({"mask", "keep"} & set(form.names)) | ({"lengths"} if form.lengths else set())
    if "keep" in given:  # which a plain cell's kernels have in the mask alone
        given = given - ({"keep"} if form.cell.op == "rnn" else set()) | {"mask"}

    def tilings(B: int) -> list[object]:
        return [tiling_of(sweep, problem._replace(B=B), form.dtype, given) for sweep in SWEEPS]

    wanted = tilings(form.B)
    return next((B for B in batches(form) if B > 1 and tilings(B) == wanted), form.B), form.H, form.P


def smallest_stepwise(form: Form) -> tuple[int, int, int]:
    """B, H, P of the fewest elements whose products are cut in the same way."""
    problem = form.problem()

    def smallest(B: int, width: int, weight: str) -> int | None:
        """The width of the same remainder whose product has the same tile; of packed rows, whole groups."""
        group = form.packing.group_size if form.packing and is_packed(weight, form.names) else 1
        wanted, least = tile_of(problem, width), width % 32 + (32 if width % 32 < SMALL else 0)
        widths = [width] if width < 32 else [*(w for w in range(least, width, 32) if w % group == 0), width]
        return next((w for w in widths if tile_of(problem._replace(B=B), w) == wanted), None)

    same = [B for B in batches(form) if stepwise_rows(B) == stepwise_rows(form.B)]
    of_h = "Wp" if "Wp" in form.names else "Wh"  # whose rows are H long
    found = [(B, smallest(B, form.H, of_h), smallest(B, form.P, "Wh")) for B in same]
    fitting = [(B, H, P) for B, H, P in found if H is not None and P is not None]
    own = form.B, form.H, form.P
    return min(fitting, key=lambda sizes: sizes[0] * (sizes[1] + sizes[2]), default=own)


def batches(form: Form) -> list[int]:
    """Those that a trial may have: only the call's own where that makes small arrays."""
    if form.B < SMALL and min(form.H, form.P) < SMALL:
        return [form.B]
    return [B for B in BATCHES if not form.lengths or (B < SMALL) == (form.B < SMALL)]
