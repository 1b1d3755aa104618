"""The implementations that are compared, called contenders: MPSGraph, torch and our engines. Each contender says what
it needs and which cases it can run.

MPSGraph, torch on the device "mps" and our Metal engines run in child processes, because they may end their process.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...engines import METAL_ENGINES
from ...engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from ...engines.choice import on
from ...ground.child import ChildError
from ..cases import DTYPES, hindrance
from ..child import Runner
from . import apple, ours, torch_layer
from .cases import RESULTS, Arrays, CompareCase
from .files import load_case, save_arrays, save_case

PYOBJC = ("Metal", "MetalPerformanceShadersGraph", "objc")  # modules of PyObjC
HOW_TO_GET = {
    "mpsgraph": "a Mac with macOS 12.3 or newer and PyObjC: pip install '.[compare]'",
    "torch-mps": "a Mac with torch, whose layers, stacks of them too, are MPSGraph's there: pip install torch",
    "torch": "torch: pip install torch",
    "fused": "a Mac: MLX has Metal only there",
    "stepwise": "a Mac: MLX has Metal only there",
}
"""What each contender needs, as text for the user."""

HANGS = 3  # a contender (an implementation) that hung in this number of cases is not run again

CELLS: dict[str, Cell] = {"lstm": LSTMCell(), "gru": GRUCell(), "single_gate_rnn": RNNCell()}


class Outcome(NamedTuple):
    """What a contender (an implementation) returned for a case: the results by name, or the problem that prevented
    them. returned: the number of results that MPSGraph's forward op returned."""

    results: Arrays
    problem: str = ""
    returned: int = 0


class Contender(NamedTuple):
    """An implementation to compare. missing() returns what it needs but this machine lacks, or None; hindrance(case)
    returns why it cannot run a case, or None. run(case) runs it. close() ends its child process, if it has one."""

    name: str
    missing: Callable[[], str | None]
    hindrance: Callable[[CompareCase], str | None]
    run: Callable[[CompareCase], Outcome]
    close: Callable[[], None] = lambda: None


def all_contenders() -> dict[str, Contender]:
    """Return all contenders (implementations to compare) by name, in the order of the report."""
    others = [
        in_a_child("mpsgraph", no_pyobjc, lambda case: "an op is one layer" if len(case.layers) > 1 else None),
        in_a_child("torch-mps", no_torch_mps, torch_layer.hindrance),
        Contender("torch", no_torch, torch_layer.hindrance, partial(run_here, "torch")),
    ]
    return {one.name: one for one in [*others, *(engine(word) for word in ("fused", "stepwise", "numpy", "ops"))]}


def no_pyobjc() -> str | None:
    """Return which modules of PyObjC are missing, as text for the user, or None if all are installed."""
    absent = [name for name in PYOBJC if importlib.util.find_spec(name) is None]
    return f"no {', '.join(absent)}" if absent else None


def no_torch() -> str | None:
    return "no torch" if importlib.util.find_spec("torch") is None else None


def no_torch_mps() -> str | None:
    """Return the reason why torch cannot use the device "mps" on this machine, or None if it can."""
    if missing := no_torch():
        return missing
    if sys.platform != "darwin":  # checked before the import of torch, which takes seconds
        return "torch has no MPS here"
    import torch

    return None if torch.backends.mps.is_available() else "torch has no MPS here"


def engine(word: str) -> Contender:
    """Return the contender that runs one of our engines: `numpy` on the CPU, others on the current device."""

    def missing() -> str | None:
        # Ask about sizes that every engine supports, to find out whether the engine runs on this machine at all.
        return hindrance(word, (1, 1, 1, 1), mx.float32, LSTMCell()) or None

    def cannot_run(case: CompareCase) -> str | None:
        source = case.arrays["source"]
        sizes, both = (*source.shape, case.hidden), case.bidirectional
        return hindrance(word, sizes, DTYPES[source.dtype.name], CELLS[case.op], bidirectional=both) or None

    if word in METAL_ENGINES:
        return in_a_child(word, missing, cannot_run)
    return Contender(word, missing, cannot_run, partial(run_here, word))


def run_here(name: str, case: CompareCase) -> Outcome:
    """Run a case (a call of an op with its arrays) on the contender of this name in this process."""
    if name == "mpsgraph":
        return name_lists(case, *apple.run(case))
    if name in ("torch", "torch-mps"):
        return Outcome(torch_layer.run(case, "cpu" if name == "torch" else "mps"))
    with on(mx.Device(mx.cpu) if name == "numpy" else None):  # None: MLX's current device
        return Outcome(ours.run(case, engine=name))


def in_a_child(
    name: str, missing: Callable[[], str | None], hindrance: Callable[[CompareCase], str | None]
) -> Contender:
    """Return a contender that runs its cases in a child process, and in a new one after a crash."""
    # The case and its results are passed in files. hangs: the error texts of cases in which the child hung.
    runner, hangs = Runner("mpsgraph", name), list[str]()

    def run(case: CompareCase) -> Outcome:
        if len(hangs) >= HANGS:
            return Outcome({}, f"not run, as {name} hung {HANGS} times before")
        with tempfile.TemporaryDirectory() as folder:
            given, results = str(Path(folder, "case.npz")), str(Path(folder, "results.npz"))
            save_case(given, case)
            try:
                answer = runner.ask(case=given, results=results)
            except ChildError as error:
                hangs.extend([str(error)] if error.hung else [])
                return Outcome({}, str(error))
            with np.load(results) as data:
                return Outcome(dict(data), **answer)

    return Contender(name, missing, hindrance, run, runner.close)


def name_lists(case: CompareCase, forward: list[np.ndarray], backward: list[np.ndarray]) -> Outcome:
    """Return MPSGraph's results by name. If an op has returned another number of results than Apple documents, it is
    unknown which name belongs to which result: then return a problem. forward, backward: the results of both ops."""
    names = [*RESULTS[case.op]], [f"d{name}" for name in case.gradients]
    counts = [len(forward), len(backward)]
    if counts != [len(part) for part in names]:
        documented = " and ".join(f"[{', '.join(part)}]" for part in names)
        problem = f"returned lists of {counts[0]} and {counts[1]}, not {documented}"
        return Outcome({}, problem, len(forward))
    both = zip([*names[0], *names[1]], [*forward, *backward], strict=True)
    return Outcome(dict(both), returned=len(forward))


def answers(name: str) -> Callable[..., dict[str, Any]]:
    """Return the function that answers a request to a contender in the child process. A request names a file with a
    case to run, and a file to write the results to."""

    def answer(case: str, results: str) -> dict[str, Any]:
        outcome = run_here(name, load_case(case))
        save_arrays(results, outcome.results)
        return {"problem": outcome.problem, "returned": outcome.returned}

    return answer
