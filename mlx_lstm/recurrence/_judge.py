"""Run a trial of Metal kernels (a small test run before their first use) and compare the results with the float64
oracle.

The guard starts this module in a child process, because a fault of the GPU may end or hang the process in which it
occurs.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from ..engines.autodiff import run, shown_of
from ..engines.packing import packed_names
from ..engines.problem import Problem
from ..oracle import evaluate
from ..oracle.arithmetic import Arithmetic, Array, Tensors
from ..oracle.closeness import TRIALS, exact_and_bounds, float_of, largest
from ._child import ANSWER, STARTED
from ._draw import Drawn, draw, float64, rounded
from ._trial import SMALL, Trial, dtype_word, trial_from


def main() -> None:
    """Read one trial per line from standard input, run it and print its verdict, until the input closes. A trial is
    not run if earlier trials have found all its kernels correct."""
    recorder = Recorder(mx.fast.metal_kernel)
    mx.fast.metal_kernel = recorder.kernel
    right: set[Text] = set()
    for line in sys.stdin:
        trial = trial_from(line)
        print(STARTED, flush=True)
        texts = recorder.texts_of(trial)
        reason = "" if texts and texts <= right else verdict(trial)
        if not reason:
            right |= texts
        print(ANSWER + json.dumps(reason), flush=True)


Text = tuple[Any, ...]
"""Everything that determines a compiled kernel: its name, source and header, and for each array the dtype and
whether it has fewer than 8 elements (Metal binds such arrays in another address space)."""


class Recorder:
    """A replacement for `mx.fast.metal_kernel` that can record the sources of all kernels of a trial without
    compiling them."""

    def __init__(self, build: Callable[..., Any]):
        """Create a recorder. build: the original `mx.fast.metal_kernel`."""
        self.build: Callable[..., Any] = build
        self.texts: set[Text] | None = None

    def kernel(self, **definition: Any) -> Callable[..., Any]:
        """Return a kernel that is built at its first launch. While the recorder records, a launch only records the
        kernel's source and returns zeros."""
        built: list[Callable[..., Any]] = []

        def launch(*, inputs: list[Any], **call: Any) -> Any:
            if self.texts is not None:
                arrays = tuple((array.dtype, array.size < SMALL) for array in inputs)
                text = definition["name"], definition["source"], definition.get("header", "")
                self.texts.add((*text, arrays, tuple(call["output_dtypes"])))
                pairs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
                return [mx.zeros(shape, dtype) for shape, dtype in pairs]
            if not built:
                built.append(self.build(**definition))
            return built[0](inputs=inputs, **call)

        return launch

    def texts_of(self, trial: Trial) -> set[Text]:
        """Return the sources of all kernels that a trial launches, without launching any. Return an empty set if
        recording fails."""
        with self.recording() as texts:
            drawn = draw(trial.problem, np.random.default_rng(0))
            outputs, _ = evaluate(drawn.case, None, Arithmetic(np.float64))
            for names in sets_of_cotangents(trial.problem):
                try:
                    results(trial.problem, drawn, {name: outputs[name] for name in names}, trial.engine)
                except Exception:  # the trial itself will report the error
                    return set()
        return texts

    @contextmanager
    def recording(self) -> Iterator[set[Text]]:
        """Record the sources of all kernels launched inside this context."""
        self.texts = texts = set()
        try:
            yield texts
        finally:
            self.texts = None


def verdict(trial: Trial) -> str:
    """Run a trial. Return why its kernels are refused, or an empty text if they are correct."""
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
    # The kernels are refused after any error, because a compiler or a driver may raise an error of any type.
    except Exception as error:
        return f"its trial on this machine failed: {first_lines(error)}"
    return ""


def first_lines(error: Exception) -> str:
    """Return the first line of an error's text, and the first line with a compiler's error message if the text has
    one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    compiler_lines = [line for line in lines[1:] if "error:" in line][:1]
    return " ".join([f"{type(error).__name__}:", lines[0], *compiler_lines])


def sets_of_cotangents(problem: Problem) -> list[tuple[str, ...]]:
    """Return the sets of outputs that get a gradient (a cotangent) in a trial: all outputs, and h alone, as in most
    losses.

    A trial does not cover kernels that run only for another set of outputs.
    """
    shown = shown_of(problem)
    if problem.cotangents is not None:
        return [problem.cotangents or shown]
    return [shown, ("h",)] if problem.training and not problem.plain else [shown]


def results(problem: Problem, drawn: Drawn, cotangents: Tensors, engine: str) -> Tensors:
    """Run the problem on an engine. Return the outputs named in `cotangents`, and the gradients under names such as
    "dWx". For inference without a gradient (`plain`) return the outputs only."""
    packed = {name: drawn.arrays[name] for name in packed_names(drawn.arrays)}  # quantized weights have no gradient
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
        in_dtype = [mx.array(array.astype(np.float32)).astype(problem.dtype) for array in cotangents.values()]
        as_outputs = [swapped(d) if name in sequences else d for name, d in zip(cotangents, in_dtype, strict=True)]
        outputs, gradients = mx.vjp(outputs_of, list(arrays.values()), as_outputs)
    mx.eval(outputs, gradients)
    values = dict(zip(cotangents, outputs, strict=True))
    values |= dict(zip([f"d{name}" for name in arrays], gradients, strict=not problem.plain))
    sequences += ("dx",) if problem.batch_first else ()
    return {name: float64(swapped(value) if name in sequences else value) for name, value in values.items()}


def wrong(problem: Problem, drawn: Drawn, cotangents: Tensors, got: Tensors, bounds: dict[str, float]) -> str:
    """Return a text that describes the first wrong result, with its error, or an empty text if all results are
    right.

    A result is wrong if its error exceeds both its error bound and twice the error of the engine `ops`. The second
    condition is needed because MLX's own products, which both engines use, are less precise than float32 on some
    GPUs. The first call, for a loss of all outputs, fills `bounds`. Later calls reuse the bounds, because the
    gradients of fewer outputs have smaller rounding errors.
    """
    gradients = drawn.smooth and not problem.plain

    def values(fl: Arithmetic) -> Tensors:
        outputs, exact_gradients = evaluate(drawn.case, cotangents if gradients else None, fl)
        by_name = {f"d{name}": d for name, d in exact_gradients.items() if f"d{name}" in got}
        return {name: outputs[name] for name in cotangents} | by_name

    if bounds:
        exact = values(Arithmetic(np.float64))
    else:
        # The error bounds come from repeated evaluations with random rounding. Two evaluations are enough if every
        # array has at least 64 elements.
        few = min(array.size for array in got.values()) >= 64
        exact, limits = exact_and_bounds(values, dtype_word(problem), 2 if few else TRIALS)
        bounds |= limits
    # A gradient near a kink of an activation has no error bound. It must at least not be NaN.
    for name in got.keys() - exact.keys():
        if np.isnan(got[name]).any():
            return f"{name}: NaN"
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
    """Return the largest absolute difference of two arrays, or infinity if their shapes differ."""
    return largest(got - exact) if got.shape == exact.shape else np.inf
