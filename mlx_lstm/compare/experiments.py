"""Experiments on points that Apple's documentation leaves open. Each experiment has a case to run on MPSGraph, and for
each reading (interpretation) of the documentation a function that measures how far MPSGraph's results are from the
prediction of this reading.

`fl` is the arithmetic of the float64 oracle, which rounds the result of each operation. Sizes: T steps, N batch items,
I inputs, H units, G gates, D directions. Arrays and properties are named as in `mlx_lstm.mpsgraph`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..lab.mpsgraph.cases import CompareCase, draw
from ..lab.mpsgraph.contenders import Outcome
from ..lab.mpsgraph.judge import evaluated
from ..lab.mpsgraph.measure import without_leading_ones
from ..lab.mpsgraph.report import brief, figure
from ..lab.report import table
from ..oracle.arithmetic import Rounding
from ..oracle.closeness import bounds_of
from ..oracle.verdict import judged
from .forms import moved, predicted, side_by_side

SIZES = (3, 2, 3, 4)  # T, N, I, H

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
    """Return a function of an outcome: the error of the result `tensor`, divided by its bound. reading: computes the
    exact values under one interpretation of Apple's documentation, in the arithmetic that it gets."""

    def distance(outcome: Outcome) -> float:
        if tensor not in outcome.results:
            return np.inf
        exact = reading(Rounding(np.float64))
        bound = bounds_of(lambda fl: {"": reading(fl)}, case.arrays["source"].dtype)[""]
        got, _ = without_leading_ones(outcome.results[tensor], exact.shape)
        return judged(tensor, got, exact, bound).ratio

    return distance


def result(case: CompareCase, tensor: str, form: str = "", **readings: str) -> Distance:
    """Return a function of an outcome: the error of the result `tensor` from the float64 oracle, divided by its bound.
    form: another value that MPSGraph may return instead, by its name in `forms.predicted`. readings: the oracle's
    choices where Apple's documentation leaves the formula open, such as `output_peephole="current"`."""
    return value(case, tensor, lambda fl: predicted(case, fl, readings)[form or tensor])


def shape(tensor: str, leading: int, case: CompareCase) -> Distance:
    """Return a function that takes an outcome (what MPSGraph returned for a case). This function returns 0
    if the gradient `tensor` has `leading` axes of size 1 and then the shape of its argument, else infinity."""
    wanted = (1,) * leading + case.arrays[tensor.removeprefix("d")].shape
    return lambda outcome: 0.0 if tensor in outcome.results and outcome.results[tensor].shape == wanted else np.inf


def count(results: int) -> Distance:
    """Return a function of an outcome: 0 if the forward op returned `results` arrays, else infinity."""
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


def experiments() -> Iterator[Experiment]:
    """Yield all experiments. Their names appear as "E:name" in the docstrings of `mlx_lstm.mpsgraph`."""
    rng = np.random.default_rng(5)
    for group in (of_saved_state, of_gradients, of_formula, of_masks, of_directions, of_single_gate, of_gru):
        yield from group(rng)


def of_saved_state(rng: np.random.Generator) -> Iterator[Experiment]:
    """Yield two experiments on what MPSGraph saves for the gradient: E:zstate_and_cell and E:output_count."""
    case = draw(rng, "lstm", SIZES, name="settle: saved state")
    readings = {
        "after the activations": result(case, "z_state"),
        "before the activations": result(case, "z_state", "z_state before"),
    }
    yield Experiment("zstate_and_cell", "zState holds the gates", case, "after the activations", readings)
    # g is the last activation of an LSTM, which is applied to c.
    readings = {"c": result(case, "c"), "g(c)": result(case, "c", "c squashed")}
    yield Experiment("zstate_and_cell", "the second result is", case, "c", readings)
    absent = ("peephole", "mask", "source_gradient", "state_gradient", "cell_gradient")
    case = draw(rng, "lstm", SIZES, name="settle: output count", absent=absent, produce_cell=False)
    readings = {"h, c, zState": count(3), "h, zState": count(2)}
    yield Experiment("output_count", "training without produceCell gives", case, "h, c, zState", readings)


def of_gradients(rng: np.random.Generator) -> Iterator[Experiment]:
    """Yield the experiments on gradients (named E:grads and E:peephole in the documentation). They find out which
    shapes Apple's gradients have, and to which time step Apple adds the gradient of the last state."""
    for word, flags in {"one direction": {}, "both directions": {"bidirectional": True}}.items():
        case = draw(rng, "lstm", SIZES, name=f"settle: gradients, {word}", absent=("mask",), **flags)
        for tensor, name in {"dbias": "grads", "dpeephole": "peephole"}.items():
            readings = {"its argument's": shape(tensor, 0, case), "two axes of 1 more": shape(tensor, 2, case)}
            readings["one axis of 1 more"] = shape(tensor, 1, case)
            yield Experiment(name, f"shape of {tensor}, {word}", case, "its argument's", readings)
    case = draw(rng, "lstm", SIZES, name="settle: gradients, states of three axes")
    states = {name: case.arrays[name][None] for name in ("init_state", "init_cell", "state_gradient", "cell_gradient")}
    three_axes = case._replace(arrays=case.arrays | states)
    for tensor in ("dinit_state", "dinit_cell"):
        readings = {"[N, H]": shape(tensor, 0, case), "[1, N, H]": shape(tensor, 1, case)}
        yield Experiment("grads", f"shape of {tensor} where the state is [1, N, H]", three_axes, "[N, H]", readings)
    absent = ("peephole", "mask", "cell_gradient")
    case = draw(rng, "lstm", SIZES, name="settle: gradients, reverse", reverse=True, absent=absent)
    readings = {"the last step processed, time 0": result(case, "dsource"), "time T-1": result(moved(case), "dsource")}
    default = "the last step processed, time 0"
    yield Experiment("grads", "with reverse, stateGradient enters at", case, default, readings)


def of_formula(rng: np.random.Generator) -> Iterator[Experiment]:
    """Yield the experiments on the formula of the LSTM: E:peephole (does the output gate read c before or after the
    step?), E:hard_sigmoid (which slope does hard_sigmoid have?) and E:forget_gate_last (in which order are the gates
    with this property?)."""
    case = draw(rng, "lstm", SIZES, name="settle: peephole", absent=("mask",))
    for tensor in ("h", "dsource", "dpeephole"):
        readings = {"c[t-1]": result(case, tensor), "c[t]": result(case, tensor, output_peephole="current")}
        yield Experiment("peephole", f"the output gate peeps at, by {tensor}", case, "c[t-1]", readings)
    names = ("input_gate_activation", "forget_gate_activation", "output_gate_activation")
    gates: dict[str, Any] = dict.fromkeys(names, "hard_sigmoid")
    case = draw(rng, "lstm", SIZES, name="settle: hard sigmoid", **gates)
    for tensor in ("h", "dsource"):
        readings = {"1/5": result(case, tensor), "1/6": result(case, tensor, hard_sigmoid="x/6")}
        yield Experiment("hard_sigmoid", f"slope of hardSigmoid, by {tensor}", case, "1/5", readings)
    case = draw(rng, "lstm", SIZES, name="settle: forget gate last", forget_gate_last=True)
    for tensor, axis in {"z_state": -1, "drecurrent_weight": 0, "dbias": 0}.items():
        readings = {
            "i, z, f, o": result(case, tensor),
            "i, f, z, o": value(case, tensor, lambda fl, t=tensor, a=axis: swapped_2_3(evaluated(case, fl)[t], a)),
            # Apple calls the gate z that the oracle calls g.
            "i, z, o, f": result(case, tensor, gate_order="igof"),
        }
        yield Experiment("forget_gate_last", f"order of the blocks of {tensor}", case, "i, z, f, o", readings)


def swapped_2_3(array: np.ndarray, axis: int) -> np.ndarray:
    """Return an array with four blocks along `axis`, one per gate, whose second and third block are exchanged."""
    one, two, three, four = np.split(array, 4, axis=axis)
    return np.concatenate([one, three, two, four], axis=axis)


def of_masks(rng: np.random.Generator) -> Iterator[Experiment]:
    """Yield the experiments E:mask, one for each layout of a mask: does MPSGraph accept it, and multiply h[t-1] by it?
    Each possible answer (reading) has a function, which returns 0 if the answer fits, and infinity if it does not."""
    # taken: whether `mlx_lstm.mpsgraph` accepts masks of a shape: those that broadcast to [N, DH]. In a shape DH is H
    # times the number of directions.
    taken: dict[tuple[int | str, ...], bool] = {("N", "DH"): True, ("DH",): True, (1, "DH"): True}
    taken |= {(1, "N", "DH"): True, ("T", "N", "DH"): False}
    each_direction = (2, "N", "H")  # a mask per direction, in an axis of its own
    masks = [(letters, both) for both in (False, True) for letters in taken] + [(each_direction, True)]
    for letters, both in masks:
        layout = f"[{', '.join(map(str, letters))}]".replace("DH", "2H" if both else "H")
        layout += " of both directions" if letters == each_direction else ""
        flags: dict[str, Any] = {"bidirectional": True} if both else {}
        name = f"settle: mask {layout}"
        case = draw(rng, "lstm", SIZES, name=name, absent=("peephole",), mask_shape=letters, **flags)
        as_factor = result(side_by_side(case) if letters == each_direction else case, "h")
        readings: dict[str, Distance] = {
            "a factor on h[t-1]": as_factor,
            "something else": lambda outcome, of=as_factor: 0.0 if outcome.results and of(outcome) > 1 else np.inf,
            "rejected": lambda outcome: 0.0 if outcome.problem else np.inf,
        }
        default = "a factor on h[t-1]" if taken.get(letters) else "rejected"
        yield Experiment("mask", f"a mask {layout} is", case, default, readings)


def of_directions(rng: np.random.Generator) -> Iterator[Experiment]:
    """Yield the experiments E:reverse: with `reverse`, are the results in the order of the source (the input), or in
    the order in which the steps are computed?"""
    case = draw(rng, "lstm", SIZES, name="settle: reverse", reverse=True)
    for tensor in ("h", "c", "z_state"):
        readings = {"the source": result(case, tensor), "the steps": result(case, tensor, f"{tensor} by step")}
        yield Experiment("reverse", f"with reverse, {tensor} is aligned with", case, "the source", readings)


def of_single_gate(rng: np.random.Generator) -> Iterator[Experiment]:
    """Yield the experiments on the single-gate RNN: E:single_gate and E:relu_at_zero."""
    case = draw(rng, "single_gate_rnn", SIZES, name="settle: single gate", activation="tanh")
    readings = {
        "before the activation": result(case, "z_state"),
        "after the activation": result(case, "z_state", "z_state after"),
    }
    yield Experiment("single_gate", "zState of the single gate is", case, "before the activation", readings)
    readings = {"its argument's": shape("dbias", 0, case), "two axes of 1 more": shape("dbias", 2, case)}
    yield Experiment("single_gate", "shape of dbias", case, "its argument's", readings)
    absent = ("input_weight", "bias", "init_state", "state_gradient", "mask")
    case = draw(rng, "single_gate_rnn", (1, 2, 3, 4), name="settle: relu at 0", absent=absent)
    case.arrays["source"][:] = 0  # without weights and states the source is the preactivation
    gradient = case.arrays["source_gradient"]
    readings = {
        f"{slope:g}": value(case, "dsource", lambda fl, s=slope: s * fl.load(gradient)) for slope in (0.0, 0.5, 1.0)
    }
    yield Experiment("relu_at_zero", "the slope of relu at 0 is", case, "0", readings)


def of_gru(rng: np.random.Generator) -> Iterator[Experiment]:
    """Yield the experiments called E:gru_flavours. They ask three questions about Apple's GRU: which formula do its
    eight variants compute, what does zState hold, and which shapes do the gradients of the biases have?"""
    names = ("reset_gate_first", "reset_after", "flip_z")
    for number in range(8):  # bit n of the number is the value of flag n
        flags: dict[str, Any] = {name: bool(number >> n & 1) for n, name in enumerate(names)}
        word = ", ".join(name for name, flag in flags.items() if flag) or "no flag"
        case = draw(rng, "gru", SIZES, name=f"settle: gru, {word}", **flags)
        other = case._replace(descriptor=case.descriptor | {"flip_z": not flags["flip_z"]})
        # Apple's text on the op and Apple's text on the property flipZ contradict each other.
        for tensor in ("h", "dsource"):
            readings = {"that on the op": result(case, tensor), "that on the property": result(other, tensor)}
            question = f"flipZ is as in the text, by {tensor} with {word}"
            yield Experiment("gru_flavours", question, case, "that on the op", readings)
    case = draw(rng, "gru", SIZES, name="settle: gru, saved state", reset_after=True)
    readings = {
        "z, r, o": result(case, "z_state"),
        "z, r and what r multiplies": result(case, "z_state", "z_state product"),
    }
    yield Experiment("gru_flavours", "zState of the GRU holds", case, "z, r, o", readings)
    for tensor in ("dbias", "dsecondary_bias"):
        readings = {"its argument's": shape(tensor, 0, case), "two axes of 1 more": shape(tensor, 2, case)}
        yield Experiment("gru_flavours", f"shape of {tensor}", case, "its argument's", readings)
