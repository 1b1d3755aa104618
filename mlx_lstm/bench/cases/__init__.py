"""The table of cases: what is measured against what."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ...engines.cells import Cell, LSTMCell
from ...oracle.arithmetic import Tensors
from .. import judge
from ..judge import Judge
from ..tasks import PASSES, SIZES, Contender, Size
from . import block_lstm, lstm, stack, stack_judge, streaming

__all__ = ["CASES", "Case", "find_contender", "is_installed"]


class Case(NamedTuple):
    """One job for several contenders.

    sizes: those measured by default. passes: the tensors that each of "forward" and "backward" computes, by name, where
    there is such a pass; the default ones are `shown`. contenders: by their name on the command line; references: those
    whose time every other time is divided by. draw(size, dtype): the numbers. appoint(numbers, dtype, backward=): the
    judge. cell, bidirectional: what the library chooses an engine for.
    """

    sizes: tuple[Size, ...]
    passes: dict[str, tuple[str, ...]]
    shown: tuple[str, ...]
    contenders: dict[str, Contender]
    references: tuple[str, ...]
    draw: Callable[..., Tensors]
    appoint: Callable[..., Judge]
    cell: Cell = LSTMCell()
    bidirectional: bool = False


def two_layers(cell: str) -> Case:
    """Two bidirectional layers of a cell."""
    return Case(
        stack.SIZES,
        stack.PASSES,
        ("backward",),
        stack.contenders(cell),
        ("torch",),
        partial(stack.draw, cell),
        partial(stack_judge.appoint, cell),
        stack.CELLS[cell],
        bidirectional=True,
    )


CASES = {
    "lstm": Case(
        SIZES,
        PASSES,
        ("forward", "backward"),
        lstm.CONTENDERS,
        ("torch", "mlx"),
        lstm.draw,
        judge.appoint,
    ),
    "block_lstm": Case(
        block_lstm.SIZES,
        PASSES,
        ("backward",),
        block_lstm.CONTENDERS,
        ("tensorflow",),
        lstm.draw,
        block_lstm.appoint_judge,
    ),
    "streaming": Case(
        streaming.SIZES,
        streaming.PASSES,
        ("forward",),
        streaming.CONTENDERS,
        ("torch", "mlx"),
        lstm.draw,
        judge.appoint,
    ),
    "cudnn_lstm": two_layers("lstm"),
    "cudnn_gru": two_layers("gru"),
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
