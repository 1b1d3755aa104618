"""The trial of a call's kernels: the smallest call that runs them, forward and backward, judged by the float64 oracle.

It runs in a process of its own, as a GPU's error may end the process, or never come.
"""

import json
import sys

import mlx.core as mx
import numpy as np

from ..engines.autodiff import run, shown_of
from ..engines.packing import packed_names
from ..engines.problem import Problem
from ..oracle import evaluate
from ..oracle.arithmetic import Arithmetic, Array, Tensors
from ..oracle.closeness import TRIALS, exact_and_bounds, float_of, largest
from ._form import Trial, dtype_word, trial_from
from ._trial_case import Drawn, draw, float64, rounded

STARTED, ANSWER = "trial started", "trial says "
"""What the process prints: where the trial begins, and how its verdict does."""


def main() -> None:
    """Run the trial that the standard input describes and print the verdict."""
    trial = trial_from(sys.stdin.read())
    print(STARTED, flush=True)
    print(ANSWER + json.dumps(verdict(trial)), flush=True)


def verdict(trial: Trial) -> str:
    """Why the kernels are refused, or nothing."""
    problem, rng = trial.problem, np.random.default_rng(0)
    drawn = draw(problem, rng)
    outputs, _ = evaluate(drawn.case, None, Arithmetic(np.float64))
    cotangents = {name: rounded(rng.normal(size=value.shape), problem.dtype) for name, value in outputs.items()}
    bounds: dict[str, float] = {}
    try:
        for names in sets_of_cotangents(problem):
            wanted = {name: cotangents[name] for name in names}
            got = results(problem, drawn, wanted, trial.engine)
            if reason := wrong(problem, drawn, wanted, got, bounds):
                return f"its trial on this machine gave wrong numbers: {reason}"
    # Whatever a compiler or a driver raises, the engine is not for this machine.
    except Exception as error:
        return f"its trial on this machine failed: {first_lines(error)}"
    return ""


def first_lines(error: Exception) -> str:
    """The first line of an error and that of the compiler's first error, which is another one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    compilers = [line for line in lines[1:] if "error:" in line][:1]
    return " ".join([f"{type(error).__name__}:", lines[0], *compilers])


def sets_of_cotangents(problem: Problem) -> list[tuple[str, ...]]:
    """The outputs that have a gradient: in a loss of all outputs, and in one of h alone, as most are. A kernel whose
    inputs are others, with some of these, is not tried."""
    shown = shown_of(problem)
    if problem.cotangents is not None:
        return [problem.cotangents or shown]
    return [shown, ("h",)] if problem.training and not problem.plain else [shown]


def results(problem: Problem, drawn: Drawn, cotangents: Tensors, engine: str) -> Tensors:
    """The outputs that have a cotangent and, of a form with a gradient, the gradients, as d and the array's name."""
    packed = {name: drawn.arrays[name] for name in packed_names(drawn.arrays)}  # which have no gradient
    arrays = {name: array for name, array in drawn.arrays.items() if name not in packed}
    lengths = {"lengths": mx.array(drawn.case["lengths"], mx.int32)} if "lengths" in problem.names else {}
    sequences = ("h", "c", "gates") if problem.batch_first else ()

    def swapped(array: mx.array) -> mx.array:
        return mx.swapaxes(array, 0, 1)

    def outputs_of(*values: mx.array) -> list[mx.array]:
        outputs = run(problem, dict(zip(arrays, values, strict=True)) | packed | lengths, engine)
        return [outputs[name] for name in cotangents]

    if problem.batch_first:
        arrays["x"] = swapped(arrays["x"])
    if problem.plain:
        outputs, gradients = outputs_of(*arrays.values()), []
    else:
        given = [mx.array(array.astype(np.float32)).astype(problem.dtype) for array in cotangents.values()]
        given = [swapped(d) if name in sequences else d for name, d in zip(cotangents, given, strict=True)]
        outputs, gradients = mx.vjp(outputs_of, list(arrays.values()), given)
    mx.eval(outputs, gradients)
    found = dict(zip(cotangents, outputs, strict=True))
    found |= dict(zip([f"d{name}" for name in arrays], gradients, strict=not problem.plain))
    sequences += ("dx",) if problem.batch_first else ()
    return {name: float64(swapped(value) if name in sequences else value) for name, value in found.items()}


def wrong(problem: Problem, drawn: Drawn, cotangents: Tensors, got: Tensors, bounds: dict[str, float]) -> str:
    """What is further from float64 than its derived bound and than twice what `ops` is: on some GPUs MLX's own products
    are less precise than float32, which both engines share. `bounds` are those of all outputs, once these were judged:
    a loss of fewer outputs has a part of its roundings."""
    gradients = drawn.smooth and not problem.plain

    def values(fl: Arithmetic) -> Tensors:
        outputs, found = evaluate(drawn.case, cotangents if gradients else None, fl)
        found = {f"d{name}": d for name, d in found.items() if f"d{name}" in got}
        return {name: outputs[name] for name in cotangents} | found

    if bounds:
        exact = values(Arithmetic(np.float64))
    else:
        # Two trials move 64 elements as often as eight move those of the smallest cases.
        few = min(array.size for array in got.values()) >= 64
        exact, limits = exact_and_bounds(values, dtype_word(problem), 2 if few else TRIALS)
        bounds |= limits
    suspects = {name: error for name in exact if not (error := distance(got[name], exact[name])) <= bounds[name]}
    if not suspects:
        return ""
    others = results(problem, drawn, cotangents, "ops")
    for name, error in suspects.items():
        allowed = 2 * distance(others[name], exact[name]) + 4 * float_of(dtype_word(problem)).eps * largest(exact[name])
        if not error <= allowed:
            return f"{name}: error {error:.3g} > bound {bounds[name]:.3g}"
    return ""


def distance(got: Array, exact: Array) -> float:
    """The largest error; infinite for another shape."""
    return largest(got - exact) if got.shape == exact.shape else np.inf
