"""How an experiment decides an open point: every reading's distance from what was found, in parts of rounding."""

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
"""How far an outcome is from a reading, in parts of what rounding explains: the reading fits up to 1."""


class Experiment(NamedTuple):
    """What is asked, the case that answers it, the readings, and the one that the dialect has by default."""

    name: str
    question: str
    case: CompareCase
    default: str
    readings: dict[str, Distance]


class Finding(NamedTuple):
    """An experiment's answer: the reading that fits, or why there is none; whether it is the dialect's default; how far
    each reading is off."""

    name: str
    question: str
    default: str
    verdict: str
    confirmed: bool
    distances: dict[str, float]


def settle(experiment: Experiment, outcome: Outcome) -> Finding:
    """Which of the readings fits."""
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
    """A result is what the reading gives; its bound is derived for the reading itself."""

    def distance(outcome: Outcome) -> float:
        if tensor not in outcome.results:
            return np.inf
        exact = reading(Arithmetic(np.float64))
        bound = bounds_of(lambda fl: {"": reading(fl)}, case.arrays["source"].dtype)[""]
        found, _ = without_leading_ones(outcome.results[tensor], exact.shape)
        error = largest(found.astype(np.float64) - exact) if found.shape == exact.shape else np.inf
        return error / bound if np.isfinite(error) else np.inf

    return distance


def result(case: CompareCase, tensor: str, **readings: str) -> Distance:
    """A result is the oracle's, with these readings of the formula."""
    return value(case, tensor, lambda fl: evaluated(case, fl, **readings)[tensor])


def shape(tensor: str, leading: int, case: CompareCase) -> Distance:
    """A gradient has its argument's shape, with so many axes of 1 ahead of it."""
    wanted = (1,) * leading + case.arrays[tensor.removeprefix("d")].shape
    return lambda outcome: 0.0 if tensor in outcome.results and outcome.results[tensor].shape == wanted else np.inf


def count(results: int) -> Distance:
    """The forward op returned so many."""
    return lambda outcome: 0.0 if len(outcome.lists[0]) == results else np.inf
