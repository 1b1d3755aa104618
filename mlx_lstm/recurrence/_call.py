"""From a call of a recurrence to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..checks import check_flag, check_lengths
from ..engines import choice, tuning
from ..engines.autodiff import run, run_backward
from ..engines.cells import Cell, RNNCell
from ..engines.choice import Stream, on
from ..engines.ops.cells import activate
from ..engines.problem import Arrays, Problem
from ..engines.tracing import are_free, have_values
from ._arguments import check_arrays, check_sequences

Lengths = mx.array | Sequence[int] | None


class Call(NamedTuple):
    """A call's cell and options, as the caller gave them: checks them with the arrays, chooses an engine and runs."""

    cell: Cell
    reverse: bool = False
    bidirectional: bool = False
    lengths: Lengths = None
    engine: str | None = None
    stream: Stream = None

    def forward(self, arrays: Arrays, *, return_gates: bool, training: bool) -> dict[str, Any]:
        """The outputs, with their gradient; gates None unless wanted."""
        op = self.cell.op
        problem = self.check(arrays, op, return_gates, training)
        with on(self.stream):
            problem, engine, plain = self.choose(problem, arrays, [], op)
            return run(problem, arrays, engine, plain)

    def backward(self, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
        """The gradients of the arrays."""
        op = f"{self.cell.op}_gradients"
        problem = self.check(arrays, op)
        check_sequences(problem, arrays, saved, cotangents, op)
        with on(self.stream):
            problem, engine, _ = self.choose(problem, arrays, [*saved.values(), *cotangents.values()], op)
            if "h" not in saved:
                saved = saved | {"h": h_of(problem, saved)}
            return run_backward(problem, arrays, saved, cotangents, engine)

    def check(self, arrays: Arrays, op: str, return_gates: bool = False, training: bool = True) -> Problem:
        """The problem, but for its lengths, once arrays and flags are found right."""
        flags = {"reverse": self.reverse, "bidirectional": self.bidirectional}
        for name, flag in (flags | {"return_gates": return_gates, "training": training}).items():
            check_flag(op, name, flag)
        return Problem(
            *check_arrays(arrays, self.cell, self.bidirectional, op),
            cell=self.cell,
            reverse=self.reverse and not self.bidirectional,
            return_gates=return_gates,
            training=training,
            bidirectional=self.bidirectional,
        )

    def choose(self, problem: Problem, arrays: Arrays, others: list[mx.array], op: str) -> tuple[Problem, str, bool]:
        """The problem with its lengths, the engine's word, whether the engine can do without a gradient: if nobody can
        ask for it, or to leave a traced graph in inference plain. Nothing is evaluated for an engine that trains and
        does without."""
        if self.lengths is not None:
            traced = isinstance(self.lengths, mx.array) and not have_values([self.lengths])
            lengths = check_lengths(op, self.lengths, problem.B, problem.T, traced=traced)
            problem, others = problem._replace(lengths=lengths), [*others, lengths]
        metal, on_cpu = mx.metal.is_available(), choice.current_device() == "cpu"
        numpy = on_cpu and self.engine in (None, "numpy")
        looks, given = numpy or not problem.training, [*arrays.values(), *others]
        free = looks and are_free(given)
        traced = looks and not (free and not numpy) and not have_values(given)
        word = choice.choose(
            sizes=(problem.T, problem.B, arrays["x"].shape[-1], problem.H),
            dtype=arrays["x"].dtype,
            cell=self.cell,
            bidirectional=self.bidirectional,
            projection="Wp" in arrays,
            device="cpu" if on_cpu else "gpu",
            metal=metal,
            traced=traced,
            requested=self.engine,
            table=tuning.current() if metal else tuning.PREDICTED,
            op=op,
        ).engine
        if free:
            return problem._replace(training=False), word, True
        return problem, word, traced and not problem.training


def given(**arrays: Any) -> Arrays:
    """The arrays that are not None; x and Wh have to be there, which is checked later."""
    return {name: array for name, array in arrays.items() if name in ("x", "Wh") or array is not None}


def h_of(problem: Problem, saved: Arrays) -> mx.array:
    """[T, B, D H]: h out of an LSTM's gates and c, where nothing is projected, or of a plain cell's preactivations."""
    cell, D, H, gates = problem.cell, problem.directions, problem.H, saved["gates"]
    if isinstance(cell, RNNCell):
        return activate(cell.act, gates)
    c = saved["c"]
    blocks = gates.reshape(*gates.shape[:2], D, 4 * H)[..., cell.block("o", H)]
    return (blocks.reshape(c.shape) * activate(cell.activation("output"), c)).astype(gates.dtype)
