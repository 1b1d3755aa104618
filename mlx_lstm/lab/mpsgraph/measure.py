"""Compare one result with another: find their largest difference, how large it may be, and where they first differ."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...oracle.closeness import exact_and_element_bounds
from ...oracle.verdict import judged
from . import judge
from .cases import Arrays, CompareCase
from .contenders import Outcome

SEQUENCES = ("h", "c", "z_state", "dsource")
"""The names of the results whose first axis is time."""

OURS = ("fused", "stepwise", "numpy", "ops")
FROM_OUTSIDE = ("mpsgraph", "torch-mps", "golden", "yours")
"""OURS: our engines. FROM_OUTSIDE: results of MPSGraph, also called by torch, of --golden, and of the user's app."""


class ComparisonRow(NamedTuple):
    """The comparison of one result between two implementations, or a call that failed.

    case: the case's name. tensor: the result's name, "-" for a call that failed. pair: "implementation - reference", of
    a call that failed the implementation alone. verdict: "ok", or what is wrong. max_abs, max_rel, ulp: the largest
    error, absolute, relative, and in units of the last place. over_bound: the largest ratio of an element's error to
    its bound; the result is right up to 1. bound: the bound of this element. first: the index of the first value beyond
    its bound. step: the time step of this value. by_time: `over_bound` of each time step. note: how the shape differs
    from the documented one.
    """

    case: str
    tensor: str
    pair: str
    verdict: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    max_abs: float = np.nan
    max_rel: float = np.nan
    ulp: float = np.nan
    over_bound: float = np.nan
    bound: float = np.nan
    first: tuple[int, ...] | None = None
    step: int | None = None
    by_time: tuple[float, ...] = ()
    note: str = ""

    @property
    def failed(self) -> bool:
        """Return whether the comparison found an error: its verdict is not "ok"."""
        return self.verdict != "ok"

    @property
    def is_failed_call(self) -> bool:
        """Return whether the row says that a call failed, so that no result was compared."""
        return self.tensor == "-"


def rows_of(case: CompareCase, outcomes: dict[str, Outcome]) -> Iterator[ComparisonRow]:
    """Yield the comparisons of all results of a case. Every implementation is compared with the float64 oracle. Each of
    our engines is also compared with the results in FROM_OUTSIDE, which other programs computed."""
    dtype = case.arrays["source"].dtype
    for name, outcome in outcomes.items():
        if outcome.problem:
            yield ComparisonRow(case.name, "-", name, outcome.problem)
    ran = {name: outcome.results for name, outcome in outcomes.items() if not outcome.problem}
    if not ran:
        return
    try:
        exact, bounds = exact_and_element_bounds(lambda fl: judge.evaluated(case, fl), dtype)
    except ValueError as error:  # the mask of a user's dump may have a layout that is not documented
        for name in ran:
            yield ComparisonRow(
                case.name, "-", name, f"not compared, as float64 cannot run the documented case: {error}"
            )
        return
    for name, results in ran.items():
        pair = f"{name} - oracle"
        # torch has no gradients of some arrays, and a recording may hold any results; our engines return all of them.
        missing = [tensor for tensor in exact if tensor not in results and name in OURS]
        for tensor in (*missing, *(tensor for tensor in results if tensor not in exact)):
            found = judged(tensor, results.get(tensor), exact.get(tensor))
            yield ComparisonRow(case.name, tensor, pair, found.refusal)
        for tensor in (tensor for tensor in exact if tensor in results):
            yield compare(case, tensor, pair, results[tensor], exact[tensor], bounds[tensor], dtype)
    for other in (name for name in FROM_OUTSIDE if name in outcomes):
        for name in (name for name in OURS if name in outcomes):
            yield from between(case, name, outcomes[name].results, other, outcomes[other].results, bounds)


def between(
    case: CompareCase, name: str, left: Arrays, other: str, right: Arrays, bounds: Arrays
) -> Iterator[ComparisonRow]:
    """Compare the results that two implementations have in common. The results may differ by twice the error bound,
    since both may have an error."""
    for tensor in (tensor for tensor in left if tensor in right and tensor in bounds):
        value, _ = without_leading_ones(right[tensor], left[tensor].shape)
        dtype = left[tensor].dtype
        yield compare(case, tensor, f"{name} - {other}", left[tensor], value, 2 * bounds[tensor], dtype)


def compare(
    case: CompareCase,
    tensor: str,
    pair: str,
    value: np.ndarray,
    reference: np.ndarray,
    bound: np.ndarray | float,
    dtype: np.dtype,
) -> ComparisonRow:
    """Compare a result with a reference. `bound`, the largest error allowed, is one number or one number per
    element."""
    shape = value.shape  # for the report; axes of size 1 that Apple adds in front are removed for the comparison
    value, note = without_leading_ones(value, reference.shape)
    found = judged(tensor, value, reference, bound, dtype)
    row = ComparisonRow(case.name, tensor, pair, found.refusal or "ok", shape, value.dtype.name, note=note)
    if found.refusal and found.first is None:  # no element is beyond its bound: the shape or the dtype is wrong
        return row
    # Errors beyond the bound are called "differs", as their numbers are in fields of the row.
    error, size = np.abs(value.astype(np.float64) - reference), np.abs(reference.astype(np.float64))
    ratios = np.where(np.isnan(error), np.inf, error / np.maximum(bound, np.finfo(np.float64).tiny))
    return row._replace(
        verdict="differs" if found.refusal else "ok",
        max_abs=float(error.max()),
        max_rel=float((error[size > 0] / size[size > 0]).max(initial=0.0)),
        ulp=float((error / np.spacing(size.astype(dtype)).astype(np.float64)).max()),
        over_bound=found.ratio,
        bound=found.bound,
        first=found.first,
        step=found.first[0] if found.first and tensor in SEQUENCES else None,
        by_time=tuple(float(step.max()) for step in ratios) if tensor in SEQUENCES else (),
    )


def without_leading_ones(value: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """Return (array, note). If an array has the expected `shape` after some axes of size 1, these axes are removed,
    and the note says how many there were; otherwise the note is ""."""
    added = value.ndim - len(shape)
    if added > 0 and value.shape == (1,) * added + tuple(shape):
        return value.reshape(shape), f"{added} leading axes of 1"
    return value, ""
