"""Who takes part: MPSGraph, torch, our engines. What each needs, which cases it can run, and how it runs one."""

import importlib.util
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..engines import choice, choose
from ..engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from ..machine import child_environment, module_command
from . import apple, ours, torch_layer
from .cases import RESULTS, Arrays, Case
from .files import load_case, save_arrays, save_case

PYOBJC = ("Metal", "MetalPerformanceShadersGraph", "objc")
HOW_TO_GET = {
    "mpsgraph": "a Mac with macOS 12.3 or newer and PyObjC: pip install '.[compare]'",
    "torch-mps": "a Mac with torch, whose layers, stacks of them too, are MPSGraph's there: pip install torch",
    "torch": "torch: pip install torch",
    "fused": "a Mac: MLX has Metal only there",
    "stepwise": "a Mac: MLX has Metal only there",
}
TIMEOUT = 300  # seconds; MPSGraph compiles a graph in less than one

CELLS: dict[str, Cell] = {"lstm": LSTMCell(), "gru": GRUCell(), "single_gate_rnn": RNNCell()}


class Outcome(NamedTuple):
    """What running a case gave: the forward op's list and the gradient op's, or results by name; or why neither."""

    results: Arrays
    problem: str = ""
    lists: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])


class Contender(NamedTuple):
    """`missing` says what it lacks on this machine, or None; `hindrance` why it cannot run a case, or None."""

    name: str
    missing: Callable[[], str | None]
    hindrance: Callable[[Case], str | None]
    run: Callable[[Case], Outcome]


def all_contenders() -> dict[str, Contender]:
    """By name, in the order of the report."""
    isolated = [
        Contender("mpsgraph", no_pyobjc, no_stack, lambda case: in_a_process("mpsgraph", case)),
        Contender("torch-mps", no_torch_mps, torch_layer.hindrance, lambda case: in_a_process("torch-mps", case)),
        Contender("torch", no_torch, torch_layer.hindrance, lambda case: Outcome(torch_layer.run(case, "cpu"))),
    ]
    return {one.name: one for one in [*isolated, *(engine(word) for word in ("fused", "stepwise", "numpy", "ops"))]}


def no_pyobjc() -> str | None:
    """Which module of PyObjC is missing."""
    absent = [name for name in PYOBJC if importlib.util.find_spec(name) is None]
    return f"no {', '.join(absent)}" if absent else None


def no_stack(case: Case) -> str | None:
    """Why MPSGraph's ops cannot run a case."""
    return "an op is one layer" if len(case.layers) > 1 else None


def no_torch() -> str | None:
    """Whether torch is missing."""
    return "no torch" if importlib.util.find_spec("torch") is None else None


def no_torch_mps() -> str | None:
    """Whether torch has no MPS."""
    if no_torch():
        return no_torch()
    import torch

    return None if torch.backends.mps.is_available() else "torch has no MPS here"


def engine(word: str) -> Contender:
    """One of our engines; numpy on the CPU, the others on the device in effect."""

    def run(case: Case) -> Outcome:
        with mx.stream(mx.cpu if word == "numpy" else mx.default_device()):
            return Outcome(ours.run(case, word))

    def hindrance(case: Case) -> str | None:
        source = case.arrays["source"]
        dtype = {"float32": mx.float32, "float16": mx.float16}[source.dtype.name]
        return reason(word, (*source.shape, case.hidden), dtype, CELLS[case.op], case.bidirectional)

    return Contender(word, lambda: reason(word, (1, 1, 1, 1), mx.float32, LSTMCell(), False), hindrance, run)


def reason(word: str, sizes: tuple[int, int, int, int], dtype: mx.Dtype, cell: Cell, both: bool) -> str | None:
    """Why an engine cannot run here."""
    device = "cpu" if word == "numpy" else choice.current_device()
    options = {"device": device, "metal": mx.metal.is_available(), "traced": False, "requested": word}
    try:
        choose(sizes=sizes, dtype=dtype, cell=cell, bidirectional=both, **options)
    except ValueError as error:
        return str(error).partition("cannot run: ")[2].rstrip(".") or str(error)
    return None


def in_a_process(name: str, case: Case) -> Outcome:
    """Run a case where a crash does no harm."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = str(Path(folder, "case.npz")), str(Path(folder, "results.npz"))
        save_case(given, case)
        command = module_command("mlx_lstm.compare", "--worker", name, given, found)
        try:
            done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return Outcome({}, f"no answer after {TIMEOUT} seconds")
        if done.returncode != 0 or not Path(found).exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return Outcome({}, f"ended with exit code {done.returncode}: {last}")
        with np.load(found) as data:
            arrays = dict(data)
    if name != "mpsgraph":
        return Outcome(arrays)
    lists = tuple([arrays[key] for key in numbered(arrays, kind)] for kind in ("forward", "backward"))
    return name_lists(case, *lists)


def numbered(arrays: Arrays, kind: str) -> list[str]:
    """The keys "forward 0", "forward 1" ... in order."""
    return sorted((key for key in arrays if key.startswith(kind)), key=lambda key: int(key.split()[1]))


def name_lists(case: Case, forward: list[np.ndarray], backward: list[np.ndarray]) -> Outcome:
    """Results by name, where the lists are as long as Apple documents them."""
    names = [*RESULTS[case.op]], [f"d{name}" for name in case.gradients]
    found = [len(forward), len(backward)]
    if found != [len(part) for part in names]:
        wanted = " and ".join(f"[{', '.join(part)}]" for part in names)
        return Outcome({}, f"returned lists of {found[0]} and {found[1]}, not {wanted}", (forward, backward))
    both = zip([*names[0], *names[1]], [*forward, *backward], strict=True)
    return Outcome(dict(both), "", (forward, backward))


def serve(name: str, given: str, found: str) -> None:
    """The process's side: run the case in one file, write the results to the other."""
    case = load_case(given)
    if name == "torch-mps":
        save_arrays(found, torch_layer.run(case, "mps"))
        return
    forward, backward = apple.run(case)
    lists = {"forward": forward, "backward": backward}
    save_arrays(found, {f"{kind} {n}": array for kind, arrays in lists.items() for n, array in enumerate(arrays)})
