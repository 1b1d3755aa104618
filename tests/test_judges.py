"""Tests that the judges of this package refuse lies. A judge decides whether results are right: in the trial of a
kernel, in `check` and `bench`, in `compare`, in `recognise`, after a conversion, and in the tests. Each judge is a
function in JUDGES. Each lie in LIES spoils one result, and each lie in LISTS spoils the list of results. Every judge
must refuse every lie."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_close, assert_within

from mlx_lstm.convert.weights import Weights, differences
from mlx_lstm.engines.cells import GRUCell, LSTMCell
from mlx_lstm.engines.problem import Problem
from mlx_lstm.lab.mpsgraph import measure
from mlx_lstm.lab.mpsgraph.cases import grid
from mlx_lstm.lab.mpsgraph.contenders import Outcome, run_here
from mlx_lstm.lab.mpsgraph.judge import evaluated
from mlx_lstm.oracle.closeness import exact_and_element_bounds
from mlx_lstm.oracle.judge import Case
from mlx_lstm.oracle.verdict import Judge, judged
from mlx_lstm.recurrence import _judge
from mlx_lstm.recurrence import _recognise as recognition
from mlx_lstm.recurrence._draw import draw, output_shapes, rounded
from mlx_lstm.recurrence._trial import Trial

# --- Lies ---


def one(value):
    """Return a lie that replaces the last element of a result."""

    def lie(array):
        array = array.copy()
        array.flat[-1] = value
        return array

    return lie


def only_the_first_item(array):
    """Return a result whose first element is right and whose others have the wrong sign."""
    array = -array
    array.flat[0] *= -1
    return array


# {lie: function that returns a wrong array in place of a right one}
LIES = {
    "NaN": lambda array: np.full_like(array, np.nan),
    "one NaN": one(np.nan),
    "infinite": one(np.inf),
    "negative infinite": one(-np.inf),
    "zeros": np.zeros_like,
    "a shifted row": lambda array: np.roll(array, 1, axis=0 if len(array) > 1 else -1),
    "the first item right": only_the_first_item,
    "1 % too large": lambda array: array * np.asarray(1.01, array.dtype),
    "one element wrong": lambda array: one(array.flat[-1] + 2 * np.abs(array).max() + 1)(array),
    "another number of elements": lambda array: array.reshape(-1)[:-1],
    "another shape": lambda array: array[None, None],
    "a row too many": lambda array: np.concatenate([array, array[-1:]]),
}

# {lie: function that returns a wrong dict of results in place of a right one; name: one of the results}
LISTS = {
    "an output missing": lambda results, name: {key: array for key, array in results.items() if key != name},
    "an output too many": lambda results, name: results | {f"{name}_more": results[name]},
    "nothing": lambda results, name: {},
}

# --- Judges ---

PROBLEM = Problem(3, 2, 9, 9, LSTMCell(), names=("Wh", "Wx", "b", "c0", "h0", "x"))


@cache
def drawn_trial(problem):
    """Return the random numbers of a trial, its cotangents and the results of the engine `ops`."""
    rng = np.random.default_rng(0)
    drawn = draw(problem, rng)
    shapes = output_shapes(problem)
    cotangents = {n: rounded(rng.normal(size=shapes[n]), problem.dtype) for n in _judge.cotangents_of(problem)}
    return drawn, cotangents, _judge.results(problem, drawn, cotangents, "ops")


@cache
def exact_of(problem):
    drawn, cotangents, _ = drawn_trial(problem)
    return drawn.case._replace(cotangents=cotangents).judge()


def in_a_trial(problem):
    """Return (results, judge) of the trial of a kernel. A judge returns why it refuses results, or ""."""
    drawn, cotangents, results = drawn_trial(problem)

    def judge(given):
        # The references are the same for all lies, so they are computed once.
        exact = exact_of(problem)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Case, "judge", lambda *_: exact)
            patch.setattr(_judge, "results", lambda *_: {name: array.copy() for name, array in results.items()})
            return _judge.wrong(problem, drawn, cotangents, given)

    return results, judge


def in_a_command(problem):
    """Return (results, judge) of the commands `check` and `bench`."""
    results = drawn_trial(problem)[2]
    return results, lambda given: exact_of(problem).judge(given, results).refusal


@cache
def compared():
    case = next(case for case in grid(lambda case: True) if case.op == "gru")
    return case, {name: np.array(array) for name, array in run_here("ops", case).results.items()}


def in_compare(_):
    """Return (results, judge) of the command `compare`, for a case of its own."""
    case, results = compared()
    exact = exact_and_element_bounds(lambda fl: evaluated(case, fl), "float32")

    def judge(given):
        # The references are the same for all lies, so they are computed once.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "exact_and_element_bounds", lambda *_: exact)
            rows = [row for row in measure.rows_of(case, {"ops": Outcome(given)}) if row.failed]
        return ", ".join(f"{row.tensor}: {row.verdict}" for row in rows)

    return results, judge


def by_assertions(check):
    """Return a function that returns (results, judge) of an assertion on one result."""

    def judge_of(problem):
        results, (exact, bounds) = drawn_trial(problem)[2], exact_of(problem)
        results = {name: array.astype(np.float32) for name, array in results.items()}

        def judge(given):
            try:
                for name, right in results.items():
                    check(name, given[name], right, exact[name], bounds[name])
                assert given.keys() == results.keys()
            except (AssertionError, KeyError) as error:
                return str(error) or "a list of other results"
            return ""

        return results, judge

    return judge_of


def within(name, got, right, exact, bound):
    assert_within(name, got, exact, bound)


def close(name, got, right, exact, bound):
    assert_close(name, got, right, exact)


def not_missed(name, got, right, exact, bound):
    right = np.asarray(right, np.float64)
    allowed = np.full_like(right, 1e-6 * np.abs(right).max())
    assert recognition.miss(np.asarray(got, np.float64), right, allowed) <= 1, name


def in_conversions(problem):
    """Return (results, judge) of `convert.differences`, which compares the weights before and after a conversion."""
    names = {"lstm": ("Wx", "Wh", "bx"), "gru": ("Wx", "Wh", "bx", "bh")}[problem.cell.op]
    rng, rows = np.random.default_rng(0), problem.cell.gates * problem.H
    shapes = {"Wx": (rows, 4), "Wh": (rows, problem.H), "bx": (rows,), "bh": (rows,)}
    results = {name: rng.normal(size=shapes[name]).astype(np.float32) for name in names}

    def weights(arrays):
        return Weights(problem.cell, [[{name: mx.array(array) for name, array in arrays.items()}]], False)

    def judge(given):
        try:
            return ", ".join(differences(weights(results), weights(given)))
        except (ValueError, KeyError) as error:  # what is no layer at all
            return str(error)

    return results, judge


# {judge: function from a problem to (right results, function that returns why it refuses results, or "")}
JUDGES = {
    "the trial": in_a_trial,
    "check and bench": in_a_command,
    "compare": in_compare,
    "assert_within": by_assertions(within),
    "assert_close": by_assertions(close),
    "recognise": by_assertions(not_missed),
    "convert.differences": in_conversions,
}

# --- Tests ---


GRU = PROBLEM._replace(cell=GRUCell(), names=("Wh", "bhn", "x"))


@pytest.mark.parametrize(
    ("judge", "problem"),
    [pytest.param(judge, PROBLEM, id=judge) for judge in JUDGES]
    + [pytest.param(judge, GRU, id=f"{judge}, gru") for judge in JUDGES if judge != "compare"],
)
def test_a_judge_refuses_every_lie(judge, problem):
    """A judge accepts the right results. It refuses them if any one of them is replaced by a lie."""
    results, refusal = JUDGES[judge](problem)
    assert refusal(results) == "" and len(results) > 2
    accepted = [
        (lie, name)
        for name, array in results.items()
        for lie in LIES
        if not (lie == "another shape" and judge == "compare")  # it allows leading axes of 1, and notes them
        and refusal(results | {name: LIES[lie](array)}) == ""
    ]
    accepted += [(lie, name) for name in results for lie in LISTS if refusal(LISTS[lie](results, name)) == ""]
    assert not accepted


def test_a_difference_in_any_layer_and_direction_is_named():
    """`convert.differences` compares the arrays of every layer and of both directions."""
    rng = np.random.default_rng(0)
    shapes = [{"Wx": (12, I), "Wh": (12, 3), "bx": (12,)} for I in (4, 6)]  # by layer
    places = [(k, d, name) for k in range(2) for d in range(2) for name in shapes[k]]
    arrays = {(k, d, name): rng.normal(size=shapes[k][name]).astype(np.float32) for k, d, name in places}

    def weights(arrays):
        layers = [[{n: mx.array(arrays[k, d, n]) for n in shapes[k]} for d in range(2)] for k in range(2)]
        return Weights(LSTMCell(), layers, False)

    assert differences(weights(arrays), weights(arrays)) == []
    for key, array in arrays.items():
        assert differences(weights(arrays), weights(arrays | {key: one(2.0)(array)})) == [key[2]], key


def test_a_bias_in_one_of_two_weights_and_other_sizes_are_differences():
    """A bias that only one of them has is a difference, unless it is 0. So are sizes, even if the bytes are equal."""

    def weights(H, P, I, **more):
        shapes = {"Wx": (4 * H, I), "Wh": (4 * H, P), "Wp": (P, H)}
        ones = {name: mx.ones(shape) for name, shape in shapes.items()}
        return Weights(LSTMCell(), [[ones | more]], False)

    plain, zeros, ones = weights(4, 1, 2), weights(4, 1, 2, bx=mx.zeros(16)), weights(4, 1, 2, bx=mx.ones(16))
    assert differences(plain, zeros) == differences(zeros, plain) == []
    assert differences(plain, ones) == differences(ones, plain) == ["bx"]
    assert differences(plain, weights(2, 2, 4)) == ["Wx", "Wh", "Wp"]


def test_bounds_at_the_limits():
    """A bound of 0 accepts equal numbers only. Infinity accepts every finite number of the right shape. NaN accepts
    nothing."""
    exact = np.array([1.0, -2.0])
    for bound, right in ((0.0, True), (np.inf, True), (np.nan, False), (np.array([1.0, np.nan]), False)):
        verdict = judged("h", exact.copy(), exact, bound)
        assert (not verdict.refusal, verdict.ratio <= 1) == (right, right), bound
    assert judged("h", exact * 2, exact, np.inf).ratio == 0 and judged("h", exact * 2, exact, 0.0).refusal
    assert judged("h", np.array([1.0, np.nan]), exact, np.inf).refusal == "NaN"
    assert judged("h", np.zeros(0), np.zeros(0), 1.0).refusal == ""
    assert judged("h", exact.astype(np.float32), exact, 1.0, np.float16).refusal == "dtype float32, expected float16"


def test_a_bound_that_would_accept_zeros_shows_nothing():
    exact = np.array([1.0, -2.0])
    for bound, shows in ((1.9, True), (2.0, False), (np.array([0.1, 3.0]), False)):
        verdict = Judge({"h": exact}, {"h": bound}).judge({"h": exact.copy()})
        assert ("would accept zeros" in verdict.refusal) != shows


def test_a_reference_does_not_judge_itself():
    """A result that is the reference array itself, or a part of its memory, shows nothing."""
    judge = exact_of(PROBLEM)
    assert "the reference itself" in judge.judge(judge.exact, judge.exact).refusal
    assert judge.judge({name: array.copy() for name, array in judge.exact.items()}, judge.exact).refusal == ""
    array = judge.exact["h"]
    row = measure.compare(compared()[0], "h", "a - b", array, array, 1.0, array.dtype)
    assert row.verdict.startswith("is the reference itself")


@pytest.mark.parametrize("lie", ["NaN", "zeros", "infinite"])
def test_two_engines_that_lie_alike(lie, monkeypatch):
    """A trial accepts twice the error of the engine `ops`, because MLX's products may be imprecise. It refuses results
    if `ops` is as wrong as they are: a GPU may return zeros for everything."""
    drawn, cotangents, results = drawn_trial(PROBLEM)
    exact = exact_of(PROBLEM)
    monkeypatch.setattr(Case, "judge", lambda *_: exact)
    for name, array in results.items():
        lies = results | {name: LIES[lie](array)}
        monkeypatch.setattr(_judge, "results", lambda *_, lies=lies: lies)
        assert _judge.wrong(PROBLEM, drawn, cotangents, {key: each.copy() for key, each in lies.items()})


def test_how_much_an_imprecise_engine_excuses(monkeypatch):
    """A trial accepts an error above the bound up to twice the error of the engine `ops` plus four roundings of the
    largest number, and not more."""
    drawn, cotangents, results = drawn_trial(PROBLEM)
    exact = exact_of(PROBLEM).exact
    judge = Judge(exact, dict.fromkeys(exact, 0.0))
    monkeypatch.setattr(Case, "judge", lambda *_: judge)
    for of_ops in (0.0, 1e-3):
        monkeypatch.setattr(_judge, "results", lambda *_, error=of_ops: {n: exact[n] + error for n in results})
        for name in results:
            allowed = 2 * of_ops + 4 * 2.0**-23 * np.abs(exact[name]).max()
            for error, is_right in ((0.99 * allowed, True), (1.01 * allowed, False)):
                given = {n: exact[n] + error * (n == name) for n in results}
                assert (_judge.wrong(PROBLEM, drawn, cotangents, given) == "") == is_right, (name, of_ops, error)


def test_gradients_without_bounds_are_finite_and_complete():
    """Next to a kink a gradient has no error bound. It must still be finite and have its shape."""
    drawn, cotangents, results = drawn_trial(PROBLEM)
    rough = drawn._replace(smooth=False)
    assert _judge.wrong(PROBLEM, rough, cotangents, results) == ""
    for lie in ("NaN", "one NaN", "infinite", "negative infinite", "another shape", "a row too many"):
        assert _judge.wrong(PROBLEM, rough, cotangents, results | {"dWh": LIES[lie](results["dWh"])}), lie


def test_what_a_child_process_skips(monkeypatch):
    """The child process skips a trial only if it has found all its kernels right. A trial whose kernels could not be
    recorded runs each time, and so does one that has failed."""
    judge, ran, texts = _judge.Trials(), [], {1: {"a"}, 2: {"a", "b"}, 3: set(), 4: {"b"}}
    reasons = {1: "", 2: "wrong", 3: "", 4: ""}
    monkeypatch.setattr(judge.recorder, "texts_of", lambda trial: texts[trial])
    monkeypatch.setattr(_judge, "verdict", lambda trial: (ran.append(trial), reasons[trial])[1])
    answers = [judge.judge(trial)["reason"] for trial in (3, 3, 2, 1, 1, 2, 4, 2)]
    assert answers == ["", "", "wrong", "", "", "wrong", "", ""]
    assert ran == [3, 3, 2, 1, 2, 4]
    assert judge.count(1, 2) == {"kernels": 0} and judge.count(3) == {"kernels": 0}


def test_a_trial_that_cannot_be_recorded_runs(monkeypatch):
    """If the recording of a trial's kernels fails, also after its first kernel, the trial itself runs and reports the
    error."""
    judge = _judge.Trials()

    def fail_after_a_kernel(*_):
        if judge.recorder.texts is not None:
            judge.recorder.texts.add("a kernel")
        return 1 / 0

    monkeypatch.setattr(_judge, "graph", fail_after_a_kernel)
    trial = Trial("ops", PROBLEM)
    assert judge.recorder.texts_of(trial) == set()
    for _ in range(2):
        assert "ZeroDivisionError" in judge.judge(trial)["reason"]


def test_what_makes_a_kernel_another_one():
    """Two launches run the same kernel only if all that determines its compiled code is equal."""
    recorder = _judge.Recorder(mx.fast.metal_kernel)

    def text(name="k", source="s", header="", dtype=mx.float32, size=8, output=mx.float32):
        recorder.texts = set()
        launch = recorder.kernel(name=name, source=source, header=header)
        launch(inputs=[mx.zeros(size, dtype)], output_shapes=[(2,)], output_dtypes=[output])
        return recorder.texts.pop()

    changes = ({"name": "other"}, {"source": "other"}, {"header": "other"}, {"size": 7})
    changes += ({"dtype": mx.float16}, {"output": mx.float16})
    assert len({text(), *(text(**change) for change in changes)}) == 1 + len(changes)
    assert text(size=9) == text()


def test_the_cotangents_of_a_trial():
    """The trial of a gradient op has the cotangents of the call; a call without any is tried with those of all outputs
    that the caller gets. Other trials have a cotangent of h, and none if nobody can ask for a gradient."""
    for problem, names in (
        (PROBLEM._replace(cotangents=("hT", "gates")), {"hT", "gates"}),
        (PROBLEM._replace(cotangents=(), return_gates=True), {"h", "c", "hT", "cT", "gates"}),
        (PROBLEM, {"h"}),
        (PROBLEM._replace(plain=True), set()),
    ):
        assert {*_judge.cotangents_of(problem)} == names
