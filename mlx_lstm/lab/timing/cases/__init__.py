"""All benchmark cases, each with its sizes, passes and contenders (implementations to measure)."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ....engines.cells import Cell, LSTMCell
from ....oracle.arithmetic import Tensors
from ....oracle.verdict import Judge
from ..judge import judge_layer
from ..tasks import PASSES, SIZES, Contender, Size
from . import block_lstm, lstm, stack, streaming

__all__ = ["CASES", "BenchCase", "find_contender", "is_installed"]


class BenchCase(NamedTuple):
    """A benchmark case: one computation that several contenders (implementations) run.

    sizes: the sizes measured by default.
    passes: the passes of the case, such as "forward", each with the names of the results that it computes.
    default_passes: the passes measured by default.
    contenders: the implementations, by their name on the command line.
    references: the contenders by whose times the times of all others are divided.
    draw: draw(size, dtype) returns random inputs.
    judge: judge(inputs, dtype, backward=) returns a `Judge`, which compares results with float64.
    cell, bidirectional: the cell, and whether there are two directions. The choice of an engine depends on both.
    """

    sizes: tuple[Size, ...]
    passes: dict[str, tuple[str, ...]]
    default_passes: tuple[str, ...]
    contenders: dict[str, Contender]
    references: tuple[str, ...]
    draw: Callable[..., Tensors]
    judge: Callable[..., Judge]
    cell: Cell = LSTMCell()
    bidirectional: bool = False


def two_layers(cell: str) -> BenchCase:
    """Return the case of a stack of two bidirectional layers with this cell, "lstm" or "gru"."""
    return BenchCase(
        stack.SIZES,
        stack.PASSES,
        default_passes=("backward",),
        contenders=stack.contenders(cell),
        references=("torch",),
        draw=partial(stack.draw, cell),
        judge=partial(judge_layer, evaluate=partial(stack.evaluate, cell)),
        cell=stack.CELLS[cell],
        bidirectional=True,
    )


CASES = {
    "lstm": BenchCase(
        SIZES, PASSES, ("forward", "backward"), lstm.CONTENDERS, ("torch", "mlx"), lstm.draw, judge_layer
    ),
    "block_lstm": BenchCase(
        block_lstm.SIZES,
        PASSES,
        ("backward",),
        block_lstm.CONTENDERS,
        ("tensorflow",),
        lstm.draw,
        block_lstm.judge_block_lstm,
    ),
    "streaming": BenchCase(
        streaming.SIZES,
        streaming.PASSES,
        ("forward", "paced"),
        streaming.CONTENDERS,
        ("torch", "mlx"),
        lstm.draw,
        judge_layer,
    ),
    "cudnn_lstm": two_layers("lstm"),
    "cudnn_gru": two_layers("gru"),
}


def find_contender(name: str, case: str = "lstm") -> Contender:
    """Return the contender (implementation to measure) with this name. It is a contender of a benchmark case or, for a
    name "module:attribute", an object `Contender` in a module of the user."""
    known = CASES[case].contenders
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"a contender is one of {', '.join(known)} or module:attribute but got {name!r}")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, Contender):
        raise ValueError(f"{name} must be a Contender but is of type {type(found).__name__}")
    return found


def is_installed(contender: Contender) -> bool:
    """Return whether the module that a contender needs is installed; the module is not imported."""
    return importlib.util.find_spec(contender.needs) is not None
