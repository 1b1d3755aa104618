"""Whether results may be compared at all: each against the float64 oracle, within a bound of `closeness`.

A contender may add a gradient of weights up in its own way, time step by time step, and store the sum each time. That
is not among the operations of `closeness`: a sum stored T times adds u sqrt(T) |sum| to its bound, roundings not being
all of one sign.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from ..oracle import evaluate as evaluate_case
from ..oracle.arithmetic import Arithmetic, Tensors
from ..oracle.closeness import SAFETY, TRIALS, exact_and_bounds, float_of, largest

SMALL = 100_000  # elements of h: of more than these a maximum is well sampled in FEW trials
FEW = 2


class Verdict(NamedTuple):
    """The tensor closest to its bound, or furthest beyond it; its error, the bound; "" if the contender agrees."""

    tensor: str
    error: float
    bound: float
    refusal: str = ""


class Judge(NamedTuple):
    """The float64 results of a problem, and the bound on the max-norm error of each."""

    exact: Tensors
    bounds: dict[str, float]

    def judge(self, got: Tensors, names: Iterable[str]) -> Verdict:
        """Compare one contender's tensors of these names; a missing one is a refusal."""
        verdicts = [self.judge_tensor(name, got.get(name)) for name in names]
        refused = [verdict for verdict in verdicts if verdict.refusal]
        return max(refused or verdicts, key=lambda verdict: verdict.error / verdict.bound)

    def judge_tensor(self, name: str, got: np.ndarray | None) -> Verdict:
        """Compare one tensor. NaN, another shape, or a bound that would accept zeros, is a refusal."""
        exact, bound = self.exact[name], self.bounds[name]
        if got is None or got.shape != exact.shape:
            shape = None if got is None else list(got.shape)
            return Verdict(name, np.inf, bound, f"{name}: shape {shape}, expected {list(exact.shape)}")
        error = np.abs(got - exact).max()
        error = float(error) if np.isfinite(error) else np.inf
        if not error <= bound:
            return Verdict(name, error, bound, f"{name}: error {error:.3g} > bound {bound:.3g}")
        if not bound < largest(exact):
            return Verdict(name, error, bound, f"{name}: bound {bound:.3g} would accept zeros, so nothing is shown")
        return Verdict(name, error, bound)


def appoint(numbers: Tensors, dtype: str, *, backward: bool, of: Callable[..., Tensors] | None = None) -> Judge:
    """The judge of a problem: evaluates it exactly, and a few times with errors. `of` does if it is not an LSTM."""
    values = partial(of or evaluate, numbers, backward=backward)
    trials = TRIALS if numbers["dh"].size < SMALL else FEW
    exact, bounds = exact_and_bounds(values, dtype, trials)
    stored = float_of(dtype).eps / 2 * np.sqrt(len(numbers["dh"]))
    for name in (name for name in exact if name.startswith(("dW", "db"))):
        bounds[name] += SAFETY * stored * largest(exact[name])
    return Judge(exact, bounds)


def evaluate(numbers: Tensors, fl: Arithmetic, *, backward: bool) -> Tensors:
    """The LSTM of `numbers` from zero states: h and, with `backward`, dx, dWx, dWh, db."""
    case = {name: numbers[name] for name in ("x", "Wx", "Wh", "b")}
    outputs, gradients = evaluate_case(case, {"h": numbers["dh"]} if backward else None, fl)
    return {"h": outputs["h"]} | {f"d{name}": gradient for name, gradient in gradients.items()}
