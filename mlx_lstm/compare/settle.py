"""Settle a point that Apple's documentation leaves open: compare MPSGraph's result with the prediction of each
reading."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..oracle.arithmetic import Arithmetic
from ..oracle.closeness import bounds_of, largest
from .cases import CompareCase
from .contenders import Outcome
from .judge import evaluated
from .measure import without_leading_ones

Distance = Callable[[Outcome], float]
"""Returns how far an outcome is from a reading, as a part of what rounding explains: up to 1 the reading fits."""


class Experiment(NamedTuple):
    """An experiment: the question, the case that answers it, the reading that `mlx_lstm.mpsgraph` takes by default,
    and all readings."""

    name: str
    question: str
    case: CompareCase
    default: str
    readings: dict[str, Distance]


class Finding(NamedTuple):
    """The answer of an experiment. verdict: the reading that fits, or why none does; confirmed: whether this is the
    default reading; distances: the distance of each reading from the result."""

    name: str
    question: str
    default: str
    verdict: str
    confirmed: bool
    distances: dict[str, float]


def settle(experiment: Experiment, outcome: Outcome) -> Finding:
    """Return the finding: which of an experiment's readings fits an outcome."""
    distances = {reading: distance(outcome) for reading, distance in experiment.readings.items()}
    fits = [reading for reading, distance in distances.items() if distance <= 1]
    if len(fits) == 1:
        verdict = fits[0]
    elif fits:
        verdict = f"undecided: {' or '.join(fits)}"
    elif outcome.problem:
        verdict = f"no answer: {outcome.problem}"
    else:
        nearest = min(distances, key=distances.__getitem__)
        verdict = "none of the readings" + (f"; {nearest} is nearest" if distances[nearest] < np.inf else "")
    known = experiment.name, experiment.question, experiment.default
    return Finding(*known, verdict, verdict == experiment.default, distances)


def value(case: CompareCase, tensor: str, reading: Callable[[Arithmetic], np.ndarray]) -> Distance:
    """Return a function that measures the distance of a result from the values that `reading` computes, as a part of
    the bound derived for this reading."""

    def distance(outcome: Outcome) -> float:
        if tensor not in outcome.results:
            return np.inf
        exact = reading(Arithmetic(np.float64))
        bound = bounds_of(lambda fl: {"": reading(fl)}, case.arrays["source"].dtype)[""]
        got, _ = without_leading_ones(outcome.results[tensor], exact.shape)
        error = largest(got.astype(np.float64) - exact) if got.shape == exact.shape else np.inf
        return error / bound if np.isfinite(error) else np.inf

    return distance


def result(case: CompareCase, tensor: str, **readings: str) -> Distance:
    """Return a function that measures the distance of a result from the oracle's result under these readings."""
    return value(case, tensor, lambda fl: evaluated(case, fl, **readings)[tensor])


def shape(tensor: str, leading: int, case: CompareCase) -> Distance:
    """Return a function of an outcome: 0 if a gradient has its argument's shape after `leading` axes of 1, else
    infinity."""
    wanted = (1,) * leading + case.arrays[tensor.removeprefix("d")].shape
    return lambda outcome: 0.0 if tensor in outcome.results and outcome.results[tensor].shape == wanted else np.inf


def count(results: int) -> Distance:
    """Return a function of an outcome: 0 if the forward op returned this number of results, else infinity."""
    return lambda outcome: 0.0 if len(outcome.lists[0]) == results else np.inf
