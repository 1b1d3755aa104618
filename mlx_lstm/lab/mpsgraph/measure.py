"""Compare the results of two implementations: find the largest difference, the largest allowed difference, and the
first element that differs by more."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from ...oracle.closeness import exact_and_element_bounds
from ...oracle.verdict import judged
from . import judge
from .cases import CompareCase
from .contenders import Outcome

SEQUENCES = ("h", "c", "z_state", "dsource")
"""The names of the results whose first axis is time."""

OURS = ("fused", "stepwise", "numpy", "ops")
FROM_OUTSIDE = ("mpsgraph", "torch-mps", "golden", "yours")
"""OURS: our engines. FROM_OUTSIDE: names of results that other programs computed: MPSGraph, torch on top of MPSGraph,
the file of --golden, and the user's app."""


class ComparisonRow(NamedTuple):
    """The comparison of one result of two implementations, or the report of a call that failed.

    case: the case's name. tensor: the result's name; "-" for a failed call. pair: "implementation - reference"; for a
    failed call only the implementation. verdict: "ok", or what is wrong. max_abs, max_rel, ulp: the largest error,
    absolute, relative, and in units of the last place. over_bound: the largest ratio of an element's error to its error
    bound; up to 1 the result is right. bound: the bound of this element. first: the index of the first element whose
    error exceeds its bound. step: the time step of this element. by_time: the largest ratio in each time step. note:
    how the shape differs from the documented shape.
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
        return self.verdict != "ok"

    @property
    def is_failed_call(self) -> bool:
        """Return whether the row reports a call that failed, so that no result was compared."""
        return self.tensor == "-"


def rows_of(case: CompareCase, outcomes: dict[str, Outcome]) -> Iterator[ComparisonRow]:
    """Yield the comparisons of all results of a case. Every implementation is compared with the float64 oracle. Each of
    our engines is also compared with the results of other programs (`FROM_OUTSIDE`). outcomes: the results of each
    implementation, by its name."""
    dtype = case.arrays["source"].dtype
    for name, outcome in outcomes.items():
        if outcome.problem:
            yield ComparisonRow(case.name, "-", name, outcome.problem)
    ran = {name: outcome.results for name, outcome in outcomes.items() if not outcome.problem}
    if not ran:
        return
    try:
        exact, bounds = exact_and_element_bounds(lambda fl: judge.evaluated(case, fl), dtype)
    except ValueError as error:  # the mask of a user's arrays may have an undocumented layout
        why = f"not compared, as float64 cannot run the documented case: {error}"
        yield from (ComparisonRow(case.name, "-", name, why) for name in ran)
        return
    for name, results in ran.items():
        pair = f"{name} - oracle"
        # Only our engines must return all results: torch lacks some gradients, and a file may hold any results.
        missing = [tensor for tensor in exact if tensor not in results and name in OURS]
        for tensor in (*missing, *(tensor for tensor in results if tensor not in exact)):
            found = judged(tensor, results.get(tensor), exact.get(tensor))
            yield ComparisonRow(case.name, tensor, pair, found.refusal)
        for tensor in (tensor for tensor in exact if tensor in results):
            yield compare(case, tensor, pair, results[tensor], exact[tensor], bounds[tensor], dtype)
    for other, name in product(FROM_OUTSIDE, OURS):
        if other not in outcomes or name not in outcomes:
            continue
        left, right = outcomes[name].results, outcomes[other].results
        for tensor in (tensor for tensor in left if tensor in right and tensor in bounds):
            value, _ = without_leading_ones(right[tensor], left[tensor].shape)
            pair, bound = f"{name} - {other}", 2 * bounds[tensor]  # twice the bound, as both results may have an error
            yield compare(case, tensor, pair, left[tensor], value, bound, left[tensor].dtype)


def compare(
    case: CompareCase,
    tensor: str,
    pair: str,
    value: np.ndarray,
    reference: np.ndarray,
    bound: np.ndarray | float,
    dtype: np.dtype,
) -> ComparisonRow:
    """Compare a result with `reference`. tensor: the result's name. pair: the names of both implementations, for
    reports. bound: the largest allowed error, one number or one per element. dtype: the dtype of the computation."""
    shape = value.shape  # reported with the leading axes of size 1 that Apple may add
    value, note = without_leading_ones(value, reference.shape)
    found = judged(tensor, value, reference, bound, dtype)
    row = ComparisonRow(case.name, tensor, pair, found.refusal or "ok", shape, value.dtype.name, note=note)
    if found.refusal and found.first is None:  # no element is beyond its bound: the shape or the dtype is wrong
        return row
    # The verdict of an error beyond the bound is only "differs", because the numbers are in other fields of the row.
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
