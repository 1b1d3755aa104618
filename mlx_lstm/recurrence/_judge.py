"""Run a trial of Metal kernels (a small test run before their first use) and compare the results with the float64
oracle. The guard starts this module in a child process, because a fault of the GPU may end or hang the process in which
it occurs.

A `Trial` is an engine and a `Problem`: a small call that runs the same kernels as the user's (sizes, cell, options,
names of the arrays). problem.plain: nobody can ask for a gradient, so none is tested. A `Drawn` has the random inputs
twice: `arrays` for MLX, and `case` for the oracle. A cotangent is the gradient of an output, with which the backward
pass begins. A reason says why kernels are refused; it is "" if they are correct.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ..engines.autodiff import run, shown_of
from ..engines.packing import packed_names
from ..engines.problem import Problem
from ..ground.child import serve
from ..oracle.arithmetic import Tensors
from ..oracle.closeness import float_of
from ..oracle.verdict import judged, largest
from ._child import WRONG
from ._draw import Drawn, draw, float64, output_shapes, rounded, to_mlx, zeros
from ._trial import SMALL, USUAL, Trial, dtype_word, trial_from


def main() -> None:
    """In the child process, answer requests of the parent process until it closes the pipe. A request names a method
    of `Trials`, "count" or "judge", and the trials to pass to it."""
    served = Trials()
    mx.fast.metal_kernel = served.recorder.kernel  # all engines make their kernels by this function of MLX
    # `serve` reads each request, {"do": "count" or "judge", "trials": [...]}, calls the lambda and sends its result.
    serve(lambda do, trials: {"count": served.count, "judge": served.judge}[do](*map(trial_from, trials)))


class Trials:
    """Runs trials (test runs of kernels) in the child process, and remembers the kernels that were correct."""

    def __init__(self) -> None:
        self.recorder = Recorder(mx.fast.metal_kernel)
        self.right: set[Text] = set()  # the kernels that were correct

    def count(self, *trials: Trial) -> dict[str, Any]:
        """Return {"kernels": how many different kernels these trials will launch}, without those that earlier trials
        have found correct. No kernel is launched."""
        return {"kernels": len(set[Text]().union(*map(self.recorder.texts_of, trials)) - self.right)}

    def judge(self, trial: Trial) -> dict[str, Any]:
        """Run a trial, unless earlier trials have already found all its kernels correct. Return {"reason": text}: why
        kernels are refused, or an empty text if they are correct."""
        texts = self.recorder.texts_of(trial)  # empty if they could not be recorded; then the trial runs
        reason = "" if texts and texts <= self.right else verdict(trial)
        if not reason:
            self.right |= texts
        return {"reason": reason}


Text = tuple[Any, ...]
"""Everything that determines a compiled kernel: its name, source and header, and for each array the dtype and
whether it has fewer than 8 elements (Metal binds such arrays in another address space)."""


class Recorder:
    """A replacement for `mx.fast.metal_kernel` that can record the sources of all kernels of a test run without
    compiling them."""

    def __init__(self, build: Callable[..., Any]):
        """Create a recorder. build: the original `mx.fast.metal_kernel`."""
        self.build: Callable[..., Any] = build
        self.texts: set[Text] | None = None  # while this is a set, launches are recorded here instead of run
        self.recorded: dict[Trial, set[Text]] = {}  # the results of `texts_of`

    def kernel(self, **definition: Any) -> Callable[..., Any]:
        """Return a function that launches a kernel, which is built at its first launch. While this object records, a
        launch only records the kernel's source, and returns zeros in place of its outputs."""
        built: list[Callable[..., Any]] = []  # empty before the kernel's first launch, then [the kernel]

        # Launch the kernel; while `self.texts` is a set, only record what determines the kernel. inputs, call: the
        # arguments of the launch, among them the shapes and dtypes of the outputs. Metal binds arrays of fewer than
        # SMALL elements in another address space, so such an array makes a different kernel.
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
        """Return the sources of all kernels that a test run would launch; an empty set if they cannot be recorded."""
        if trial not in self.recorded:
            problem, shapes = trial.problem, output_shapes(trial.problem)
            self.texts = texts = set()
            try:
                cotangents = {name: mx.zeros(shapes[name], problem.dtype) for name in cotangents_of(problem)}
                graph(problem, zeros(problem), cotangents, trial.engine)
            except Exception:  # the trial itself will report the error
                texts = set()
            finally:
                self.texts = None
            self.recorded[trial] = texts
        return self.recorded[trial]


def verdict(trial: Trial) -> str:
    """Test kernels: run a trial on random numbers and compare the results with the oracle. Return why its kernels are
    refused, or an empty text if they are correct."""
    problem, rng = trial.problem, np.random.default_rng(0)
    drawn = draw(problem, rng)  # the random arrays for MLX, and the same arrays as a case for the oracle
    shapes = output_shapes(problem)
    cotangents = {name: rounded(rng.normal(size=shapes[name]), problem.dtype) for name in cotangents_of(problem)}
    try:
        got = results(problem, drawn, cotangents, trial.engine)
        if reason := wrong(problem, drawn, cotangents, got):
            return f"{WRONG}: {reason}"
    # The kernels are refused after any error, because a compiler or a driver may raise an error of any type.
    except Exception as error:
        return f"its trial on this machine failed: {type(error).__name__}: {error}"
    return ""


def cotangents_of(problem: Problem) -> tuple[str, ...]:
    """Return the names of the outputs that get a cotangent (an incoming gradient) in a test run of kernels. Return none
    if the problem is `plain`, that is, if nobody can ask for a gradient."""
    if problem.cotangents is not None:  # a gradient op; an empty tuple stands for all outputs that the caller gets
        return problem.cotangents or shown_of(problem)
    # USUAL: h alone, the only output that most losses use.
    return () if problem.plain else USUAL


def results(problem: Problem, drawn: Drawn, cotangents: Tensors, engine: str) -> Tensors:
    """Run a recurrence, described by `problem`, on an engine. Return all outputs that a caller gets, and the gradients
    as "dWx". drawn: the random arrays for MLX, and the case for the oracle, from which the lengths are read."""
    lengths = {"lengths": mx.array(drawn.case.call["lengths"], mx.int32)} if "lengths" in problem.names else {}
    in_dtype = {name: to_mlx(array, problem.dtype) for name, array in cotangents.items()}
    values = graph(problem, drawn.arrays | lengths, in_dtype, engine)
    mx.eval(values)
    return {name: float64(value) for name, value in values.items()}


def graph(
    problem: Problem, arrays: dict[str, mx.array], cotangents: dict[str, mx.array], engine: str
) -> dict[str, mx.array]:
    """Run a recurrence, described by `problem`, on an engine. Return its outputs, and the gradients as "dWx", as lazy
    MLX arrays with the time axis first. cotangents: the incoming gradients, by the outputs' names. A `plain` problem
    has no gradients, because nobody can ask for one."""
    # Quantized weights and lengths have no gradient.
    others = {name: array for name, array in arrays.items() if name in (*packed_names(arrays), "lengths")}
    floats = {name: array for name, array in arrays.items() if name not in others}
    sequences = ("h", "c", "gates") if problem.batch_first else ()  # the outputs that have the batch first
    # shown: the outputs to return. Outputs with a cotangent come first, because `mx.vjp` matches the cotangents with
    # the first outputs. The others that a caller gets (`shown_of`) follow.
    shown = [*cotangents, *(name for name in shown_of(problem) if name not in cotangents)]

    def swapped(array: mx.array) -> mx.array:
        return mx.swapaxes(array, 0, 1)

    def outputs_of(*values: mx.array) -> list[mx.array]:
        outputs = run(problem, dict(zip(floats, values, strict=True)) | others, engine)
        return [outputs[name] if name in cotangents else mx.stop_gradient(outputs[name]) for name in shown]

    if problem.batch_first:
        floats["x"] = swapped(floats["x"])
    if problem.plain:
        outputs, gradients = outputs_of(*floats.values()), []
    else:
        as_outputs = [swapped(d) if name in sequences else d for name, d in cotangents.items()]
        # mx.vjp takes no cotangent for the result of mx.stop_gradient, so those outputs stay without one.
        outputs, gradients = mx.vjp(outputs_of, list(floats.values()), as_outputs)
    values = dict(zip(shown, outputs, strict=True))
    # A plain problem has no gradients: `gradients` is empty, so the two lists differ in length and nothing is added.
    values |= dict(zip([f"d{name}" for name in floats], gradients, strict=not problem.plain))
    sequences += ("dx",) if problem.batch_first else ()
    return {name: swapped(value) if name in sequences else value for name, value in values.items()}


def wrong(problem: Problem, drawn: Drawn, cotangents: Tensors, got: Tensors) -> str:
    """Return a text that describes the first wrong result, with its error, or an empty text if all results are
    right. got: the results of the tested kernels, outputs and gradients, by name. drawn: the random inputs, as arrays
    and as a case for the oracle. cotangents: the incoming gradients of outputs.

    A result is wrong if its error exceeds both its error bound and twice the error of the engine `ops`. The second
    condition is needed because MLX's own products, which both engines use, are less precise than float32 on some
    GPUs.
    """
    # floats: the arguments that have a gradient. smooth: no preactivation is near a kink (a jump of its activation's
    # slope), so gradients have error bounds.
    floats = [] if problem.plain else [name for name in drawn.arrays if name not in packed_names(drawn.arrays)]
    judge = drawn.case._replace(cotangents=cotangents if floats and drawn.smooth else {}).judge()
    # Near a kink of an activation (a jump of its slope) a gradient has no error bound: only its shape is checked, and
    # that it is finite. So the argument's own array, which has the right shape, stands in for the exact gradient.
    rough = {f"d{name}": drawn.case.call[name] for name in floats if f"d{name}" not in judge.exact}
    judge = judge._replace(exact=judge.exact | rough)
    names = sorted({*shown_of(problem), *cotangents_of(problem), *(f"d{name}" for name in floats)})
    # beyond: the refused results whose error is finite but too large. All other refused results are missing, not finite
    # or have a wrong shape: return the text on the first of these at once.
    refused = [verdict for verdict in judge.verdicts(got, names) if verdict.refusal]
    beyond = [verdict for verdict in refused if np.isfinite(verdict.error)]
    if len(beyond) < len(refused):
        return next(f"{each.tensor}: {each.refusal}" for each in refused if each not in beyond)
    if not refused:
        return ""
    others = results(problem, drawn, cotangents, "ops")
    for name, error, bound, *_ in beyond:
        size = largest(judge.exact[name])
        allowed = 2 * judged(name, others.get(name), judge.exact[name], judge.bounds[name]).error
        # Add 4 roundings (eps of the dtype) of the largest number, because by chance `ops` may have hardly any error.
        allowed += 4 * float_of(dtype_word(problem)).eps * size
        # allowed >= size: even zeros would be allowed. Then `ops` itself is wrong, and says nothing about the precision
        # of MLX's products.
        if not (error <= allowed and allowed < size):
            return f"{name}: error {error:.3g} > bound {bound:.3g}"
    return ""
