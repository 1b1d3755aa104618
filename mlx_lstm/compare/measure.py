"""The comparison of one result with another: how far apart, how far they may be, where they first differ."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from . import judge
from .cases import Arrays, Case
from .contenders import Outcome

SEQUENCES = ("h", "c", "z_state", "dsource")
"""The results whose first axis is time."""

OURS = ("fused", "stepwise", "numpy", "ops")
FROM_OUTSIDE = ("mpsgraph", "torch-mps", "golden", "yours")


class Row(NamedTuple):
    """One result of one pair. `first` is the index of the first value beyond the bound, in the order of memory, and
    `step` its time step; `by_time` the largest error at each time step."""

    case: str
    tensor: str
    pair: str
    verdict: str  # "ok", or what is wrong
    shape: tuple[int, ...] = ()
    dtype: str = ""
    max_abs: float = np.nan
    max_rel: float = np.nan
    ulp: float = np.nan
    bound: float = np.nan
    first: tuple[int, ...] | None = None
    step: int | None = None
    by_time: tuple[float, ...] = ()
    note: str = ""

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return self.verdict != "ok"


def rows_of(case: Case, outcomes: dict[str, Outcome]) -> Iterator[Row]:
    """Every contender against the oracle, and ours against those from outside, whose errors add to ours."""
    dtype = case.arrays["source"].dtype
    for name, outcome in outcomes.items():
        if outcome.problem:
            yield Row(case.name, "-", name, outcome.problem)
    if not any(outcome.results for outcome in outcomes.values()):
        return
    exact, limit = judge.expected(case), judge.limits(case, dtype)
    for name, outcome in outcomes.items():
        for tensor, value in outcome.results.items():
            yield compare(case, tensor, f"{name} - oracle", value, exact[tensor], limit[tensor], dtype)
    for other in (name for name in FROM_OUTSIDE if name in outcomes):
        for name in (name for name in OURS if name in outcomes):
            yield from between(case, name, outcomes[name].results, other, outcomes[other].results, limit)


def between(case: Case, name: str, left: Arrays, other: str, right: Arrays, limit: dict[str, float]) -> Iterator[Row]:
    """The results that two contenders both have."""
    for tensor in (tensor for tensor in left if tensor in right):
        value, _ = without_leading_ones(right[tensor], left[tensor].shape)
        dtype = left[tensor].dtype
        yield compare(case, tensor, f"{name} - {other}", left[tensor], value, 2 * limit[tensor], dtype)


def compare(
    case: Case, tensor: str, pair: str, value: np.ndarray, reference: np.ndarray, bound: float, dtype: np.dtype
) -> Row:
    """One result against another."""
    shape = value.shape
    value, note = without_leading_ones(value, reference.shape)
    row = Row(case.name, tensor, pair, "ok", shape, value.dtype.name, bound=bound, note=note)
    if value.shape != reference.shape:
        return row._replace(verdict=f"shape, expected {list(reference.shape)}")
    if value.dtype != dtype:
        return row._replace(verdict=f"dtype, expected {dtype.name}")
    value, reference = value.astype(np.float64), reference.astype(np.float64)
    error = np.abs(value - reference)
    size = np.abs(reference)
    gap = np.spacing(size.astype(dtype)).astype(np.float64)
    row = row._replace(
        max_abs=float(error.max()),
        max_rel=float((error[size > 0] / size[size > 0]).max(initial=0.0)),
        ulp=float((error / gap).max()),
        by_time=tuple(float(step.max()) for step in error) if tensor in SEQUENCES else (),
    )
    beyond = np.argwhere(~(error <= bound))  # NaN compares false
    if not len(beyond):
        return row
    first = tuple(int(n) for n in beyond[0])
    return row._replace(verdict="differs", first=first, step=first[0] if tensor in SEQUENCES else None)


def without_leading_ones(value: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """The value without axes of 1 that it has ahead of an expected shape, and a note if there were any."""
    added = value.ndim - len(shape)
    if added > 0 and value.shape == (1,) * added + tuple(shape):
        return value.reshape(shape), f"{added} leading axes of 1"
    return value, ""
