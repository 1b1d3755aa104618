"""One problem on one engine, held against float64: all outputs and gradients, and the outputs without training."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .. import recurrence
from ..bench.judge import FEW, SMALL, Judge
from ..bench.tasks import DTYPES
from ..engines.choice import on
from ..oracle import OUTPUTS, evaluate
from ..oracle.arithmetic import Arithmetic, Tensors
from ..oracle.closeness import TRIALS, exact_and_bounds
from ..recurrence import Quantized
from .cases import Case, run, split, to_mlx
from .grid import Problem


class Finding(NamedTuple):
    """What was found: the tensor closest to its bound, or furthest beyond, its error and bound; seconds of the first
    run, compilation included; why it failed, "" if it did not; whether it took its process with it."""

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
        """The error in parts of its bound."""
        return self.error / self.bound


class Prepared(NamedTuple):
    """A problem with its arrays, and what its results should be."""

    problem: Problem
    case: Case
    cotangents: Tensors
    judge: Judge
    weights: dict[str, Quantized]


def prepare(problem: Problem) -> Prepared:
    """Draw a problem and evaluate it exactly."""
    case, cotangents = problem.draw()
    case, weights = problem.packed(case)

    def values(fl: Arithmetic) -> Tensors:
        outputs, gradients = evaluate(case, cotangents, fl)
        return outputs | {f"d{name}": gradient for name, gradient in gradients.items()}

    trials = TRIALS if max(array.size for array in split(case)[1].values()) < SMALL else FEW
    return Prepared(problem, case, cotangents, Judge(*exact_and_bounds(values, problem.dtype, trials)), weights)


def compare(prepared: Prepared, engine: str) -> Finding:
    """Run a problem on an engine and judge it; an error is a finding, too."""
    problem, case, cotangents, judge, weights = prepared
    finding, dtype = Finding(problem.name, problem.dtype, engine), DTYPES[problem.dtype]
    start = time.perf_counter()
    try:
        with problem.indices(), on(mx.Device(mx.cpu) if engine == "numpy" else None):
            outputs, gradients = run(case, engine, dtype, cotangents, weights)
            results = as_numpy(outputs | {f"d{name}": gradient for name, gradient in gradients.items()})
            seconds = time.perf_counter() - start
            inferred = as_numpy(infer(case, engine, dtype, weights))
    # Whatever a compiler or a driver raises is what we want to know.
    except Exception as error:
        return finding._replace(failure=f"{type(error).__name__}: {error}")
    without = [name for name in OUTPUTS[problem.op] if name != "gates"]
    verdict = judge.judge(results, [*cotangents, *(f"d{name}" for name in split(case)[1] if name not in weights)])
    if not verdict.refusal and (refused := judge.judge(inferred, without)).refusal:
        verdict = refused._replace(refusal=f"without training, {refused.refusal}")
    return finding._replace(
        seconds=seconds, tensor=verdict.tensor, error=verdict.error, bound=verdict.bound, failure=verdict.refusal
    )


def infer(
    case: Case, engine: str, dtype: mx.Dtype, weights: Mapping[str, Quantized] = MappingProxyType({})
) -> dict[str, mx.array]:
    """The outputs of a call that nobody will ask a gradient of."""
    op, arrays, options = split(case)
    floats = {name: to_mlx(array, dtype) for name, array in arrays.items() if name not in weights}
    given: dict[str, Any] = {"Wx": None, **floats, **options, **weights}
    out = getattr(recurrence, op)(**given, engine=engine, training=False)
    return {name: getattr(out, name) for name in OUTPUTS[op] if name != "gates"}


def as_numpy(arrays: Mapping[str, mx.array]) -> Tensors:
    """The arrays, computed, in float32."""
    mx.eval(list(arrays.values()))
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}
