"""Compare an engine with the float64 oracle (the reference) in a case: all outputs and gradients with training, and all
outputs without training.

The comparisons run in a child process, because a GPU driver may end the process and a kernel may hang.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...engines.choice import on
from ...ground.child import LIMIT, ChildError, shortened
from ...oracle.arithmetic import Tensors
from ...oracle.judge import Case
from ...oracle.verdict import Judge
from ..cases import run
from ..child import Runner
from .grid import GridCase, grid

LOSSES = 3
"""An engine that has crashed this number of child processes is not run again. An engine that has blocked one child
process is not run again either, because each wait takes minutes."""

SEEDS = (1, 2, 3, 4, 5)
"""The seeds with which a case is drawn, one after the other, until every result is larger than its error bound. A
result of few elements may be all zeros, for example after a relu, or smaller than the rounding errors of 16 bits."""

Work = list[tuple[int, str]]
"""The comparisons to make, each as (number of a case in the grid, engine)."""


class Finding(NamedTuple):
    """The result of comparing an engine with float64 in a case. problem: the case's name. tensor, error, bound: the
    name of the result with the largest ratio of error to bound, its error and its bound. seconds: the time of the first
    run, with compilation. failure: why the comparison failed, or "". lost: whether the child process ended or hung."""

    problem: str
    dtype: str
    engine: str
    seconds: float = 0.0
    tensor: str = ""
    error: float = 0.0
    bound: float = 1.0
    failure: str = ""
    lost: bool = False

    @property
    def ratio(self) -> float:
        return self.error / self.bound


Prepared = tuple[GridCase, Case, Judge]
"""A case of the command `check`, ready to run: its description, its arrays, and its float64 results with bounds."""


def prepare(grid_case: GridCase) -> Prepared:
    """Draw the arrays of a case with the first seed with which every result is larger than its error bound: otherwise
    an engine that returns zeros would pass. If there is none, take the last; the judge then refuses its results."""
    for seed in SEEDS:
        case = grid_case.draw(seed)
        judge = case.judge()
        if all(map(judge.shows, {*case.names(), *case.names(training=False)})):
            break
    return grid_case, case, judge


def compare(prepared: Prepared, engine: str) -> Finding:
    """Run a case on an engine and compare the results with float64. An exception of the engine is a `Finding`, too."""
    grid_case, case, judge = prepared
    finding = Finding(grid_case.name, grid_case.dtype, engine)
    start = time.perf_counter()
    try:
        # limits() makes kernels use 64-bit indices, if the case needs them. The engine `numpy` runs on the CPU only.
        with grid_case.limits(), on(mx.Device(mx.cpu) if engine == "numpy" else None):
            results = as_numpy(run(case, engine))
            seconds = time.perf_counter() - start
            without_training = as_numpy(run(case, engine, training=False))
    # Catch everything: the user wants to see any error of a compiler or a driver.
    except Exception as error:
        return finding._replace(failure=shortened(f"{type(error).__name__}: {error}"))
    # The finding shows the errors of the run with training. The run without training matters only if it is wrong.
    verdict = judge.judge(results, case.names())
    if not verdict.refusal and (refused := judge.judge(without_training, case.names(training=False))).refusal:
        verdict = refused._replace(refusal=f"without training, {refused.refusal}")
    found = {"tensor": verdict.tensor, "error": verdict.error, "bound": verdict.bound, "failure": verdict.refusal}
    return finding._replace(seconds=seconds, **found)


def as_numpy(arrays: Mapping[str, mx.array]) -> Tensors:
    """Evaluate MLX arrays and return them as float32 NumPy arrays."""
    mx.eval(list(arrays.values()))
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}


def findings(work: Work, cases: list[GridCase], full: bool, limit: float = LIMIT) -> Iterator[Finding]:
    """Yield the finding of each comparison (number of a case, engine) in `work`. After a crash or a hang, the next
    comparison runs in a new child process."""
    runner, lost = Runner("engines", "full" if full else "default"), Counter[str]()
    try:
        for n, engine in work:
            finding = Finding(cases[n].name, cases[n].dtype, engine)
            if lost[engine] >= LOSSES:
                why = f"not run, as {engine} ended {LOSSES} processes or blocked one before"
                yield finding._replace(failure=why, lost=True)
                continue
            try:
                yield Finding(**runner.ask(limit, n=n, engine=engine))
            except ChildError as error:
                # A hang counts as LOSSES crashes, because each wait takes minutes.
                lost[engine] += LOSSES if error.hung else error.lost
                yield finding._replace(failure=str(error), lost=error.lost)
    finally:
        runner.close()


def answers(which: str) -> Callable[..., dict[str, Any]]:
    """Return the function that answers a request in the child process: it compares an engine with float64 in case n of
    the grid. which: the grid of cases, "full" or "default"."""
    cases, prepared = grid(full=which == "full"), dict[int, Prepared]()

    def answer(n: int, engine: str) -> dict[str, Any]:
        if n not in prepared:
            prepared.clear()  # requests for one case come one after another, so older cases are not needed
            prepared[n] = prepare(cases[n])
        return compare(prepared[n], engine)._asdict()

    return answer
