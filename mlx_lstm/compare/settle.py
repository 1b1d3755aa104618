"""Settle a point that Apple's documentation leaves open: compare MPSGraph's result with the prediction of each
reading (interpretation) of the documentation."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..lab.mpsgraph.cases import CompareCase
from ..lab.mpsgraph.contenders import Outcome
from ..lab.mpsgraph.measure import without_leading_ones
from ..lab.mpsgraph.report import brief, figure
from ..lab.report import table
from ..oracle.arithmetic import Rounding
from ..oracle.closeness import bounds_of
from ..oracle.verdict import judged
from .forms import predicted

Distance = Callable[[Outcome], float]
"""A function that belongs to a reading (an interpretation of the documentation). For an outcome of MPSGraph it returns
the distance from the reading's prediction, divided by the error that rounding may cause. The reading fits if this is at
most 1."""


class Experiment(NamedTuple):
    """An experiment on an open point of Apple's documentation. name: its name after "E:". question: as text. case: the
    call that answers the question. default: the reading (interpretation) that `mlx_lstm.mpsgraph` takes by default.
    readings: all readings, each with a function that returns at most 1 for MPSGraph's outcome if the reading fits."""

    name: str
    question: str
    case: CompareCase
    default: str
    readings: dict[str, Distance]


class Finding(NamedTuple):
    """The result of an experiment on an open point of Apple's documentation. verdict: the reading (interpretation)
    that fits, or why none fits. confirmed: whether this reading is the default of `mlx_lstm.mpsgraph`. distances: the
    distance of each reading's prediction from MPSGraph's result, divided by its error bound."""

    name: str
    question: str
    default: str
    verdict: str
    confirmed: bool
    distances: dict[str, float]


def settle(experiment: Experiment, outcome: Outcome) -> Finding:
    """Return which reading (interpretation of Apple's documentation) fits the result of running an experiment."""
    distances = {reading: distance(outcome) for reading, distance in experiment.readings.items()}
    fits = [reading for reading, distance in distances.items() if distance <= 1]  # 1: the error bound
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


def value(case: CompareCase, tensor: str, reading: Callable[[Rounding], np.ndarray]) -> Distance:
    """Return a function that takes an outcome (what MPSGraph returned for a case) and returns the error of the result
    `tensor`, divided by its error bound. reading: a function that computes the exact values under one interpretation of
    Apple's documentation, in the arithmetic (`Rounding`) that it gets."""

    def distance(outcome: Outcome) -> float:
        if tensor not in outcome.results:
            return np.inf
        exact = reading(Rounding(np.float64))
        bound = bounds_of(lambda fl: {"": reading(fl)}, case.arrays["source"].dtype)[""]
        got, _ = without_leading_ones(outcome.results[tensor], exact.shape)
        return judged(tensor, got, exact, bound).ratio

    return distance


def result(case: CompareCase, tensor: str, form: str = "", **readings: str) -> Distance:
    """Return a function that takes an outcome of MPSGraph and returns the error of the result `tensor`, divided by its
    error bound. The error is the difference from the float64 oracle. form: another value that MPSGraph may return
    instead of the documented result, by its name in `forms.predicted`. readings: the oracle's choices where Apple's
    documentation leaves the formula open, such as `output_peephole="current"`."""
    return value(case, tensor, lambda fl: predicted(case, fl, readings)[form or tensor])


def shape(tensor: str, leading: int, case: CompareCase) -> Distance:
    """Return a function that takes an outcome (what MPSGraph returned for a case). This function returns 0
    if the gradient `tensor` has `leading` axes of size 1 and then the shape of its argument, else infinity."""
    wanted = (1,) * leading + case.arrays[tensor.removeprefix("d")].shape
    return lambda outcome: 0.0 if tensor in outcome.results and outcome.results[tensor].shape == wanted else np.inf


def count(results: int) -> Distance:
    """Return a function that takes an outcome (what MPSGraph returned for a case). It returns 0 if the forward op
    returned `results` arrays, else infinity. Callers treat this value as an error divided by its bound."""
    return lambda outcome: 0.0 if outcome.returned == results else np.inf


def settle_text(findings: Sequence[Finding], measured: bool) -> str:
    """Return a table of the points that Apple's documentation leaves open, with MPSGraph's answers. If nothing was
    measured, the table has the questions only."""
    if not measured:
        return table([["experiment", "question", "ours"], *([one.name, one.question, one.default] for one in findings)])
    confirmed = sum(one.confirmed for one in findings)
    lines = [["experiment", "question", "verdict", "ours", "error/bound of each reading"]]
    for one in findings:
        readings = "; ".join(f"{name}: {figure(value)}" for name, value in one.distances.items())
        verdict = brief(one.verdict).splitlines()[0].strip()
        lines.append([one.name, one.question, verdict, "the same" if one.confirmed else one.default, readings])
    return f"{len(findings)} open points, {confirmed} as ours reads them\n{table(lines)}"
