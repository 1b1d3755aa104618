"""The table of cases: what is measured against what."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ..cells import Cell, LSTMCell
from . import case_block_lstm, case_stack, contenders, judge
from .contenders import Contender, Size
from .judge import Judge


class Case(NamedTuple):
    """One job for several contenders.

    sizes: those measured by default. passes: the tensors that each of "forward" and "backward" computes, by name; the
    default ones are `shown`. contenders: by their name on the command line; references: those whose time every other
    time is divided by. draw(size, dtype): the numbers. appoint(numbers, dtype, backward=): the judge. cell,
    bidirectional: what the library chooses an engine for.
    """

    sizes: tuple[Size, ...]
    passes: dict[str, tuple[str, ...]]
    shown: tuple[str, ...]
    contenders: dict[str, Contender]
    references: tuple[str, ...]
    draw: Callable[..., dict[str, np.ndarray]]
    appoint: Callable[..., Judge]
    cell: Cell = LSTMCell()
    bidirectional: bool = False


def stack(cell: str) -> Case:
    """Two bidirectional layers of a cell."""
    return Case(
        case_stack.SIZES,
        case_stack.PASSES,
        ("backward",),
        case_stack.contenders(cell),
        ("torch",),
        partial(case_stack.draw, cell),
        partial(case_stack.appoint, cell),
        case_stack.CELLS[cell],
        bidirectional=True,
    )


CASES = {
    "lstm": Case(
        contenders.SIZES,
        contenders.PASSES,
        ("forward", "backward"),
        contenders.CONTENDERS,
        ("torch", "mlx"),
        contenders.draw,
        judge.appoint,
    ),
    "block_lstm": Case(
        case_block_lstm.SIZES,
        contenders.PASSES,
        ("backward",),
        case_block_lstm.CONTENDERS,
        ("tensorflow",),
        contenders.draw,
        case_block_lstm.appoint_judge,
    ),
    "cudnn_lstm": stack("lstm"),
    "cudnn_gru": stack("gru"),
}


def find_contender(name: str, case: str = "lstm") -> Contender:
    """A contender by its name in a case's table, or one of yours by "module:attribute"."""
    known = CASES[case].contenders
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"a contender is one of {', '.join(known)} or module:attribute but got {name!r}")
    return getattr(importlib.import_module(module), attribute)


def is_installed(contender: Contender) -> bool:
    """Whether the module it needs is there. Does not import it."""
    return importlib.util.find_spec(contender.needs) is not None
