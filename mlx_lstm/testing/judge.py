"""Decide whether results are right: compare each tensor with the float64 oracle. The error must be within a bound
that is derived from the inputs alone."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..oracle.arithmetic import Tensors
from ..oracle.closeness import TRIALS, Values, exact_and_bounds, largest

LARGE = 100_000
"""For a tensor with at least this number of elements, FEW evaluations with random errors are enough to find its error
bound."""
FEW = 2


class Verdict(NamedTuple):
    """The outcome of comparing results with the float64 oracle. tensor, error, bound: the tensor with the largest
    ratio of error to bound, with both figures. refusal: why the results are refused, or ""."""

    tensor: str
    error: float
    bound: float
    refusal: str = ""


class Judge(NamedTuple):
    """The float64 results of a case by name, and for each result a bound on its largest error. The methods compare
    other results with them."""

    exact: Tensors
    bounds: dict[str, float]

    def judge(self, results: Tensors, names: Iterable[str]) -> Verdict:
        """Compare the results of these names with the float64 results. A missing result is refused, and one that has no
        float64 result."""
        verdicts = [self.judge_tensor(name, results.get(name)) for name in names]
        verdicts += [Verdict(name, np.inf, 1.0, f"{name}: not expected") for name in results if name not in self.exact]
        refused = [verdict for verdict in verdicts if verdict.refusal]
        return max(refused or verdicts, key=lambda verdict: verdict.error / verdict.bound)

    def judge_tensor(self, name: str, result: np.ndarray | None) -> Verdict:
        """Compare one result with the float64 result. Refuse NaN, another shape, an array that is the float64 result
        itself, and a bound so wide that zeros would pass."""
        exact, bound = self.exact[name], self.bounds[name]
        if result is None or result.shape != exact.shape:
            shape = None if result is None else list(result.shape)
            return Verdict(name, np.inf, bound, f"{name}: shape {shape}, expected {list(exact.shape)}")
        if np.may_share_memory(result, exact):
            return Verdict(name, np.inf, bound, f"{name}: is the reference itself, so nothing is shown")
        error = np.abs(result - exact).max()
        error = float(error) if np.isfinite(error) else np.inf
        if not error <= bound:
            return Verdict(name, error, bound, f"{name}: error {error:.3g} > bound {bound:.3g}")
        if not self.shows(name):
            return Verdict(name, error, bound, f"{name}: bound {bound:.3g} would accept zeros, so nothing is shown")
        return Verdict(name, error, bound)

    def shows(self, name: str) -> bool:
        """Return whether the bound of a result refuses zeros. If not, a comparison with it shows nothing."""
        return bool(self.bounds[name] < largest(self.exact[name]))


def make_judge(values: Values, dtype: DTypeLike, elements: int) -> Judge:
    """Return a `Judge` for the results that `values` computes. `elements`: the number of elements of the largest
    tensor, which decides how many evaluations with random errors are needed."""
    return Judge(*exact_and_bounds(values, dtype, TRIALS if elements < LARGE else FEW))
