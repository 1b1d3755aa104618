"""Decide whether results are correct: compare each result with its float64 value, within a bound on its error.

The function `judged` is the only place that refuses a result. It refuses a result that is missing or not expected, that
has a wrong shape or dtype, that is NaN or shares memory with the reference, or whose error is above its bound.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .arithmetic import Array, Tensors

TINY = float(np.finfo(np.float64).tiny)
"""The smallest number by which an error is divided. It replaces a bound of 0."""


class Bound(float):
    """The largest error that a result may have, found by a few evaluations with random errors. `widest()` finds it by
    more evaluations, which takes longer. It is never smaller, so it is needed only for an error above this bound."""

    widest: Callable[[], float]

    def __new__(cls, value: float, widest: Callable[[], float]) -> "Bound":
        bound = super().__new__(cls, value)
        bound.widest = widest
        return bound


def widest(bounds: dict[str, Any]) -> dict[str, Any]:
    """Return the bounds by name, each `Bound` replaced by the bound that all evaluations with random errors find."""
    return {name: bound.widest() if isinstance(bound, Bound) else bound for name, bound in bounds.items()}


class Verdict(NamedTuple):
    """The comparison of one result with its float64 value. refusal: why the result is wrong, or "" if it is correct.
    error, bound: the error and the bound of the element with the largest ratio of error to bound. at: the index of this
    element. first: the index of the first element whose error is above its bound."""

    tensor: str
    error: float = np.inf
    bound: float = 1.0
    refusal: str = ""
    at: tuple[int, ...] = ()
    first: tuple[int, ...] | None = None

    @property
    def ratio(self) -> float:
        return self.error / max(TINY, self.bound)


def judged(
    name: str,
    got: Array | None,
    exact: Array | None,
    bound: Array | float = np.inf,
    dtype: DTypeLike | None = None,
) -> Verdict:
    """Compare a result with its float64 value. bound: one number, or one number per element. With np.inf a result needs
    only the right shape and finite numbers. dtype: the dtype that the result must have; None for any."""
    if got is None or exact is None:
        return Verdict(name, refusal="missing" if got is None else "not expected")
    if got.shape != exact.shape:
        return Verdict(name, refusal=f"shape {list(got.shape)}, expected {list(exact.shape)}")
    if dtype is not None and got.dtype != dtype:
        return Verdict(name, refusal=f"dtype {got.dtype}, expected {np.dtype(dtype)}")
    if np.may_share_memory(got, exact):
        return Verdict(name, refusal="is the reference itself, so nothing is shown")
    if not got.size:
        return Verdict(name, 0.0)
    allowed = np.broadcast_to(bound, got.shape)
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(np.float64) - exact)
        error = np.where(np.isfinite(error) & ~np.isnan(allowed), error, np.inf)
        ratios = np.where(np.isfinite(error), error / np.maximum(allowed, TINY), np.inf)
    at = tuple(int(n) for n in np.unravel_index(np.argmax(ratios), ratios.shape))
    beyond = np.argwhere((error > allowed) | ~np.isfinite(error))
    if not len(beyond):
        return Verdict(name, float(error[at]), float(allowed[at]), "", at)
    # A `Bound` comes from a few evaluations. Its widest form, from all evaluations, is computed only for an error above
    # it.
    if isinstance(bound, Bound) and np.isfinite(error).all():
        return judged(name, got, exact, bound.widest(), dtype)
    refusal = f"error {error[at]:.3g} > bound {allowed[at]:.3g}"
    if not np.isfinite(error[at]):
        refusal = "NaN" if np.isnan(got).any() else "infinite"
    return Verdict(name, float(error[at]), float(allowed[at]), refusal, at, tuple(int(n) for n in beyond[0]))


def largest(array: ArrayLike) -> float:
    """Return the largest absolute value in an array; 0 if the array is empty."""
    return float(np.max(np.abs(array), initial=0.0))


class Judge(NamedTuple):
    """The float64 results of a case by name, and for each result a bound on its error. The methods compare other
    results with them. A bound is one number, or one number per element."""

    exact: Tensors
    bounds: dict[str, Any]

    def verdicts(self, results: Tensors, names: Iterable[str] | None = None) -> list[Verdict]:
        """Compare results with the float64 results. names: the names of the results that must be there; by default all
        that have a float64 value. A result that has no float64 value is refused."""
        names = dict.fromkeys([*(self.exact if names is None else names), *results])
        return [judged(name, results.get(name), self.exact.get(name), self.bounds.get(name, np.inf)) for name in names]

    def judge(self, results: Tensors, names: Iterable[str] | None = None) -> Verdict:
        """Return the worst verdict on these results; its refusal also names the result. Also refuse a result whose
        bound is so wide that an array of zeros would pass, because such a comparison shows nothing."""
        found = self.verdicts(results, names)
        empty = [v for v in found if not v.refusal and not self.shows(v.tensor)]
        wide = [v._replace(refusal=f"bound {v.bound:.3g} would accept zeros, so nothing is shown") for v in empty]
        refused = [v for v in found if v.refusal] or wide
        worst = max(refused or found, key=lambda verdict: verdict.ratio)
        return worst._replace(refusal=worst.refusal and f"{worst.tensor}: {worst.refusal}")

    def shows(self, name: str) -> bool:
        """Return whether the bound of a result is small enough to refuse zeros."""
        return bool(np.max(self.bounds[name]) < largest(self.exact[name]))
