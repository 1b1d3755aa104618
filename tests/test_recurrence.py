"""Tests of the recurrence ops on every CPU engine against the float64 oracle: all options, all outputs, all
gradients."""

import warnings
from functools import cache, partial

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_close, assert_within, keeps_off_kinks
from cases import (
    BOTH,
    CELLS,
    EVERY_ARRAY,
    KINDS,
    OPTIONS,
    OUTPUTS_OF,
    ROUNDING_MARGIN,
    SIZES,
    combination,
    draw,
    draw_away_from_kinks,
    draw_cotangents,
    elementwise_bounds,
    is_in_range,
    judge,
    poison_scratch,
    run,
    run_gradients,
    split,
    to_mlx,
)
from on_metal import crossed, in_turns

from mlx_lstm import lstm, recurrence
from mlx_lstm.engines.definitions import activate
from mlx_lstm.engines.numpy import products as engine_numpy_products
from mlx_lstm.oracle import ARRAYS, backward, forward
from mlx_lstm.oracle.closeness import SAFETY, float_of

ENGINES = ("numpy", "ops")
EVERY_OPTION = OPTIONS | CELLS | BOTH
SEVERAL_OPTIONS = {name: case for name, case in crossed(EVERY_OPTION, 0).items() if name.endswith(".0")}
"""All options but the shapes of masks, several in each case: {name: arguments of `draw`}."""
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SINGLE_AND_DOUBLE = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])


def judged(case, cotangents, dtype):
    """Return (case in `dtype`, cotangents in `dtype`, the oracle's exact results, the allowed rounding errors). A
    case is a dict of arrays and options."""
    case = {n: v.astype(dtype) if n in ARRAYS and v is not None else v for n, v in case.items()}
    cotangents = {name: value.astype(dtype) for name, value in cotangents.items()}
    return case, cotangents, *judge(case, dtype, cotangents)


def check(case, engine, dtype, cotangents):
    """Check that outputs and gradients of a case (dict of arrays and options) differ from the oracle's by at most
    the error bounds."""
    check_judged(judged(case, cotangents, dtype), engine, dtype)


def check_judged(judgement, engine, dtype):
    """Check that the results of mx.vjp and of the gradient ops are within the error bounds. `judgement` is a result
    of `judged`: case, cotangents, exact results and bounds."""
    case, cotangents, ref, limit = judgement
    outputs, gradients = run(case, engine, dtype, cotangents)
    assert set(gradients) == {name for name in ARRAYS if case.get(name) is not None}
    for found in (outputs | gradients, run_gradients(case, engine, dtype, cotangents)):
        assert set(gradients) <= set(found)
        for name, value in found.items():
            assert value.dtype == dtype, name
            assert_within(name, value, ref[name], limit[name])


@cache
def judged_option(option, dtype):
    return judged(*draw_away_from_kinks(1, **EVERY_OPTION[option]), dtype)


ALONE = [
    (option, engine, (np.float32, np.float64)[n // 2 % 2])
    for n, option in enumerate(EVERY_OPTION)
    for e, engine in enumerate(ENGINES)
    if option not in BOTH or n % 2 == e
]
"""Each option of one direction on both engines, and of both directions on one of them. The options take turns with the
dtypes, because one dtype or the other changes no code of an option. The random combinations run all options on both
engines and in both dtypes."""


@pytest.mark.parametrize("option, engine, dtype", ALONE)
def test_each_option_alone(option, engine, dtype):
    check_judged(judged_option(option, dtype), engine, dtype)


@pytest.mark.parametrize("engine", ["ops", "numpy"])
@pytest.mark.parametrize("case", SEVERAL_OPTIONS)
def test_options_in_a_single_step(case, engine):
    """A call with one time step returns the right results with all options. Engine `ops` builds a different, smaller
    graph for such a call than for several steps."""
    options = SEVERAL_OPTIONS[case] | {"sizes": (1, *SIZES[1:])}
    if "lengths" in options:
        options["lengths"] = [min(length, 1) for length in options["lengths"]]
    if "hold" in options:
        options["hold"] = options["hold"][:1]
    if "mask" in options:
        options["mask"] = tuple([1 if size == SIZES[0] else size for size in options["mask"]])
    case, cotangents = draw_away_from_kinks(3, **options)
    check(case, engine, np.float32, cotangents)


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_step_with_large_weights(kind, masked, dtype):
    """For a single step with large weights `numpy` returns the gradients of the weights as two factors. Without a mask
    a factor is the caller's x or h0."""
    options = {**EVERY_ARRAY[kind], "mask": (2, "P") if masked else None, "sizes": (1, 2, 91, 92, 90)}
    case, cotangents = draw_away_from_kinks(4, ROUNDING_MARGIN, recurrent=0.1, **options)
    check_judged(judged(case, cotangents, dtype), "numpy", dtype)


@pytest.mark.parametrize(
    "kind, output", [(kind, n) for kind, o in KINDS.items() for n in OUTPUTS_OF[o.get("op", "lstm")]]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_output_alone(engine, kind, output):
    """Gradients are right when only one output has a cotangent. Each output is tested in turn, also with a
    projection and a mask."""
    case, cotangents = draw_away_from_kinks(2, **EVERY_ARRAY[kind])
    check(case, engine, np.float32, {output: cotangents[output]})


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (1, 3, 2, 5, 2), (3, 1, 2, 3, 4), (2, 2, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_smallest_sizes(engine, kind, sizes):
    mask = (*sizes[:2], "P")
    check(*with_engine(draw_away_from_kinks(5, sizes=sizes, **EVERY_ARRAY[kind] | {"mask": mask}), engine))


DRAWN_SIZES = ([1, 2, 3, 5], [1, 2, 3, 16, 17], [1, 3, 8], [1, 2, 5], [1, 3])
"""The values of T, B, I, H and P from which random cases are drawn."""


def check_combinations(kind, dtype, seeds):
    """Check a random combination of options, sizes and outputs with a cotangent for each seed on both engines."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        sizes = tuple(int(rng.choice(values)) for values in DRAWN_SIZES)
        options = combination(rng, sizes, **KINDS[kind])
        case, cotangents = draw_away_from_kinks(seed, ROUNDING_MARGIN, sizes=sizes, **options)
        given = {name: value for name, value in cotangents.items() if rng.random() < 0.5}
        judgement = judged(case, given or cotangents, dtype)
        for engine in ENGINES if is_in_range(judgement[2]) else ():
            try:
                check_judged(judgement, engine, dtype)
            except AssertionError as error:
                if keeps_off_kinks(judgement[0], dtype):
                    raise AssertionError(f"seed {seed}, engine {engine}") from error


@pytest.mark.parametrize(
    "kind, dtype", [("lstm", np.float64), *[(kind, np.float64 if "both" in kind else np.float32) for kind in KINDS]]
)
def test_options_in_random_combination(kind, dtype):
    check_combinations(kind, dtype, range(10))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_options_in_many_random_combinations(kind, request):
    first = 1000 * request.config.getoption("--fuzz-seed")
    check_combinations(kind, np.float32, range(first, first + 150))


@cache
def in_half(option, word):
    rng, dtype = np.random.default_rng(5), HALVES[word]
    case = draw(rng, dtype=dtype, **SMOOTH[option])
    cotangents = draw_cotangents(rng, forward(**case), dtype)
    ref = forward(**case) | backward(case, cotangents)
    return case, cotangents, ref, forward(**case, dtype=dtype) | backward(case, cotangents, dtype=dtype)


SMOOTH = {
    name: {key: value for key, value in case.items() if not key.startswith("activation")}
    for name, case in SEVERAL_OPTIONS.items()
}
SMOOTH |= {
    name: case
    for name, case in EVERY_OPTION.items()
    if {"activation", "activations"} & case.keys() and "relu" not in name and "hard" not in name
}
"""All options, several in each case, and each smooth activation. Activations with kinks are left out: rounding to 16
bits moves arguments across a kink in any implementation."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option, word", in_turns([(name,) for name in SMOOTH], [*HALVES], others=True))
def test_half_precision_is_no_worse_than_twice_its_formula(option, engine, word):
    """The error in a 16-bit dtype is at most about twice the error of the oracle's formula computed in this dtype."""
    case, cotangents, ref, same = in_half(option, word)
    outputs, gradients = run(case, engine, HALVES[word], cotangents)
    for name, value in (outputs | gradients).items():
        assert_close(name, value, same[name], ref[name])
    # Check the gradient ops, too. Their arguments are saved outputs, rounded to 16 bits. The oracle computes in 16
    # bits, so it also rounds these outputs.
    for name, value in run_gradients(case, engine, HALVES[word], cotangents).items():
        assert_close(name, value, same[name], ref[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_lengths_of_nothing_and_of_all_steps(engine, kind):
    """A sequence whose length is T gives bit for bit the result without lengths. A sequence of length 0 returns its
    initial state, and the gradient of its last state passes through unchanged."""
    case, cotangents = draw_away_from_kinks(3, **KINDS[kind])
    T, B = case["x"].shape[:2]
    whole, whole_lengths = (run(case | given, engine, np.float64, cotangents) for given in ({}, {"lengths": [T] * B}))
    for name, value in (whole[0] | whole[1]).items():
        np.testing.assert_array_equal((whole_lengths[0] | whole_lengths[1])[name], value, err_msg=name)
    outputs, gradients = run(case | {"lengths": [0] * B}, engine, np.float64, cotangents)
    states = [(outputs.pop("hT"), "h0", "hT")] + ([(outputs.pop("cT"), "c0", "cT")] if "cT" in outputs else [])
    for last, first, name in states:
        np.testing.assert_array_equal(last, case[first])
        np.testing.assert_array_equal(gradients.pop(first), cotangents[name])
    assert not any(value.any() for value in (outputs | gradients).values())


WITHOUT_H = [name for name in OPTIONS if name.endswith("_output")] + ["gate_order", "lstm_both_relu_output"]
WITHOUT_H += [f"rnn_{name}" for name in ("relu", "sigmoid", "lengths", "both_relu")]


@pytest.mark.parametrize("option", WITHOUT_H)
def test_gradient_ops_make_h_themselves_where_it_is_not_given(option):
    """Without the argument h, a gradient op recomputes h. For an LSTM it uses the cell state and the output gate, for
    a plain RNN the preactivations."""
    case, cotangents, ref, limit = judged_option(option, np.float64)
    saved = ("gates",) if case.get("op") == "rnn" else ("gates", "c")
    for name, value in run_gradients(case, "numpy", np.float64, cotangents, saved).items():
        assert_within(name, value, ref[name], limit[name])


@pytest.mark.parametrize("lengths", [None, "some"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("B", [3, 20])
def test_numpy_engine_in_chunks_of_time(monkeypatch, B, reverse, lengths):
    """Results are right when the engine `numpy` splits its matrix products into several chunks of time steps, the
    last one shorter. Narrow and wide batches are tested, with a mask."""
    monkeypatch.setattr(engine_numpy_products, "CHUNK_ROWS", 3 * B)
    sizes = (7, B, 2, 3, 2)
    lengths = None if lengths is None else np.arange(B) % 8
    options = {"sizes": sizes, "reverse": reverse, "lengths": lengths, "projection": True, "mask": (7, B, "P")}
    check(*with_engine(draw_away_from_kinks(3, **options)))


@pytest.mark.parametrize("activations", [None, ("relu", "sigmoid", "tanh", "identity", "hard_sigmoid")])
@pytest.mark.parametrize("T", [1, 33, 31], ids=["one step", "Wx copied", "Wx read"])
def test_numpy_engine_over_a_wide_batch(T, activations):
    """Results are right above and below 512 rows (time steps times batch). From 512 rows on, the engine `numpy`
    joins Wx and the bias in a copy."""
    options = {} if activations is None else {"activations": activations}
    drawn = draw_away_from_kinks(4, ROUNDING_MARGIN, sizes=(T, 16, 3, 5, 5), forget_bias=0.5, mask=("P",), **options)
    check(*with_engine(drawn))


def with_engine(drawn, engine="numpy"):
    case, cotangents = drawn
    return case, engine, np.float64, cotangents


def test_batch_major_memory_comes_back_as_it_went_in():
    """If x is a transposed view, with the batch axis first in memory, it is read without a copy. h and dx are
    written in the same memory order as x."""
    rng = np.random.default_rng(0)
    case = draw(rng, sizes=(5, 3, 4, 2, 2))
    x = mx.swapaxes(mx.contiguous(mx.swapaxes(to_mlx(case["x"], np.float32), 0, 1)), 0, 1)
    rest = [to_mlx(case[name], np.float32) for name in ("Wx", "Wh", "b")]
    (h,), (dx,) = mx.vjp(lambda x: [lstm(x, *rest, engine="numpy").h], [x], [mx.ones((5, 3, 2))])
    for array in (h, dx):
        mx.eval(array)
        view = np.array(array, copy=False)
        assert view.strides[0] < view.strides[1] and view.transpose(1, 0, 2).flags.c_contiguous
    np.testing.assert_array_equal(np.array(h), np.array(lstm(mx.contiguous(x), *rest, engine="numpy").h))


@pytest.mark.parametrize("reverse", [False, True])
def test_scratch_of_the_numpy_engine_is_written_before_it_is_read(monkeypatch, reverse):
    """Results of the engine `numpy` are right although its scratch memory is filled with NaN before the call. At
    some time steps all sequences of the batch have ended."""
    poison_scratch(monkeypatch)
    options = {"projection": True, "lengths": [2, 0], "mask": ("P",), "reverse": reverse}
    check(*with_engine(draw_away_from_kinks(3, **options)))


@cache
def nearly_closed(op, dtype, sizes):
    """Return (case, cotangents, exact results, elementwise error bounds) for a case (dict of arrays and options)
    whose sigmoid gates are nearly closed: their biases are between -30 and -8. The c0 of an LSTM is of the size 1e4."""
    rng, gates = np.random.default_rng(7), {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}[op]
    case = draw(rng, op=op, sizes=sizes, **({"activation": "sigmoid"} if op == "rnn" else {}))
    closed = np.repeat([gate not in "gn" for gate in gates], sizes[3])
    case["b"][closed] = rng.permutation(np.linspace(-30, -8, closed.sum()))
    if op == "lstm":
        case["c0"] *= 1e4
    case, cotangents, ref, _ = judged(case, draw_cotangents(rng, forward(**case)), dtype)
    # The engines compute 16-bit arrays in float32 and round only the results to 16 bits. So the bounds are those of
    # float32 plus one rounding to 16 bits.
    half = dtype in HALVES.values()
    limit = elementwise_bounds(case, np.float32 if half else dtype, cotangents)
    if half:
        limit = {name: value + float_of(dtype).eps / 2 * np.abs(ref[name]) for name, value in limit.items()}
    # Check that the bounds are small relative to the gates, although these are as small as exp(-30). Three additions
    # give the argument of a gate, which is near -30. Each addition changes the gate by up to 30 times the relative
    # rounding error eps / 2. The activation's own error is 12 times eps / 2. Together this is 3 * 30 + 12, less than 3
    # * 40.
    sigmoids, allowed = (np.abs(values["h" if op == "rnn" else "gates"][..., closed]) for values in (ref, limit))
    assert (allowed < SAFETY * 3 * 40 * float_of(dtype).eps / 2 * sigmoids).all() and sigmoids.min() < 1e-11
    return case, cotangents, ref, limit


@pytest.mark.parametrize(
    "dtype, sizes",
    [
        (np.float32, (4, 3, 2, 5, 5)),
        (np.float64, (9, 58, 3, 2, 2)),
        (HALVES["bfloat16"], (4, 3, 2, 5, 5)),
        pytest.param(np.float32, (9, 58, 3, 2, 2), marks=pytest.mark.slow),
    ],
    ids=["float32, narrow", "float64, wide", "bfloat16, narrow", "float32, wide"],
)
@pytest.mark.parametrize("op", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_nearly_closed_gate_lets_through_has_all_its_digits(engine, op, dtype, sizes):
    """If gates are nearly closed, outputs and all gradients are accurate element by element, even where an element
    is 1e-13 times its neighbours."""
    case, cotangents, ref, limit = nearly_closed(op, dtype, sizes)
    outputs, gradients = run(case, engine, dtype, cotangents)
    for name, value in (outputs | gradients).items():
        assert_within(name, value, ref[name], limit[name])


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("engine", ENGINES)
def test_gates_closed_beyond_the_range_of_exp(engine, dtype):
    """Results are right and NumPy does not warn that exp overflowed if the arguments of gates are -1e4. The initial
    c is -1e4, too, because the backward pass evaluates a sigmoid of c again."""
    case, cotangents = draw_away_from_kinks(3, activations=("sigmoid", "sigmoid", "tanh", "sigmoid", "sigmoid"))
    case |= {"b": np.full_like(case["b"], -1e4), "c0": np.full_like(case["c0"], -1e4)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(case, engine, dtype, cotangents)


@pytest.mark.parametrize("way", [*ENGINES, "compiled"])
def test_a_cell_state_that_is_infinite_is_clipped(way):
    """cell_clip clips an infinite c, whether c0 is infinite or c overflows within a step. NaN stays NaN."""
    options = {"cell_clip": 1.5, "training": way != "compiled", "engine": None if way == "compiled" else way}

    def cells(x, c0, **more):
        return lstm(x, None, mx.zeros((4, 1)), c0=c0, **options, **more).c[..., 0]

    def overflowing(x, c0):
        return cells(x, c0, activations=("identity",) * 5)

    call = mx.compile if way == "compiled" else lambda function: function
    with mx.stream(mx.cpu):
        given = call(cells)(mx.zeros((2, 3, 4)), mx.array([[np.inf], [-np.inf], [np.nan]]))
        found = call(overflowing)(mx.full((1, 3, 4), 3e38), mx.array([[0], [3e38], [np.nan]]))
    np.testing.assert_array_equal(np.array(given), [[1.5, -1.5, np.nan], [0.75, -0.75, np.nan]])
    np.testing.assert_array_equal(np.array(found), [[1.5, 1.5, np.nan]])


def test_sigmoid_of_engine_ops_in_float64():
    """The float64 sigmoid of the engine `ops` and its derivatives are accurate. Derivatives are tested because MLX
    differentiates the formula itself for forward mode and second order."""
    x = np.concatenate([np.linspace(-150, 0, 997), np.linspace(0, 40, 101)])
    e = np.exp(-np.abs(x))
    s, rest = np.where(x < 0, e, 1) / (1 + e), np.where(x < 0, 1, e) / (1 + e)
    with mx.stream(mx.cpu):
        point, sigmoid = mx.array(x, mx.float64), partial(activate, "sigmoid")
        slope = mx.grad(lambda x: sigmoid(x).sum())
        along = mx.jvp(sigmoid, [point], [mx.ones_like(point)])[1][0]
        second = mx.grad(lambda x: slope(x).sum())(point)
        found = sigmoid(point), along, slope(point), second
    # Allow 16 rounding errors of each value. One exception: for the second derivative s (1 - s) (1 - 2 s) allow 16
    # rounding errors of s (1 - s). Near s = 1/2 the factor 1 - 2 s is tiny, but has the rounding error of numbers near
    # 1. `rest` is 1 - s.
    expected = s, s * rest, s * rest, s * rest * (rest - s)
    for got, exact, size in zip(found, expected, (s, *[s * rest] * 3), strict=True):
        assert_within("sigmoid", np.array(got), exact, 16 * 2.0**-53 * size)


def cut(array):
    """Return an MLX array with the same values that is a view of a larger array. Its elements are every second one
    along each axis, so they are not adjacent in memory."""
    wide = np.full([2 * n for n in array.shape], np.nan)
    wide[tuple(slice(None, None, 2) for _ in array.shape)] = array
    return mx.array(wide, mx.float64)[tuple(slice(None, None, 2) for _ in array.shape)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_strided_arguments(monkeypatch, engine, kind):
    case, cotangents = draw_away_from_kinks(6, **EVERY_ARRAY[kind])
    monkeypatch.setattr("cases.to_mlx", lambda array, dtype: cut(array))
    check(case, engine, np.float64, cotangents)


@pytest.mark.parametrize("kind", [*KINDS, "lstm reverse"])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_lies_in_the_padding_is_never_read(engine, kind):
    rng = np.random.default_rng(0)
    options = {"reverse": True} if "reverse" in kind else KINDS[kind]
    case = draw(rng, mask=(4, 2, "P"), lengths=[3, 0], **options)
    cotangents = draw_cotangents(rng, forward(**case))
    clean = run(case, engine, np.float64, cotangents), run_gradients(case, engine, np.float64, cotangents)
    sequences = (name for name in ("h", "c", "gates") if name in cotangents)
    for array in (case["x"], case["mask"], *(cotangents[name] for name in sequences)):
        array[3:, 0], array[:, 1] = np.nan, np.nan
    spoilt = run(case, engine, np.float64, cotangents), run_gradients(case, engine, np.float64, cotangents)
    for before, after in zip((*clean[0], clean[1]), (*spoilt[0], spoilt[1]), strict=True):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_truly_double(kind):
    case, cotangents = draw_away_from_kinks(8, sizes=(20, 3, 4, 5, 5), **KINDS[kind])
    ref = forward(**case) | backward(case, cotangents)
    for engine in ENGINES:
        outputs, gradients = run(case, engine, np.float64, cotangents)
        for name, value in (outputs | gradients).items():
            assert_within(name, value, ref[name], 1e-12 * max(1, np.abs(ref[name]).max()))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_the_docstring(kind):
    T, B, _, H, P = SIZES
    case = draw(np.random.default_rng(0), **EVERY_ARRAY[kind])
    D, G = 2 if "both" in kind else 1, {"lstm": 4, "gru": 3, "rnn": 1}[kind.split("_")[0]]
    P = P if "Wp" in case else H
    shapes = {"h": (T, B, D * P), "c": (T, B, D * H), "gates": (T, B, D * G * H), "hT": (B, D * P), "cT": (B, D * H)}
    for engine in ENGINES:
        found = {name: value.shape for name, value in run(case, engine, np.float32)[0].items()}
        assert found == {name: shapes[name] for name in OUTPUTS_OF[case.get("op", "lstm")]}


@pytest.mark.parametrize("op", OUTPUTS_OF)
def test_two_directions_are_joined(op):
    """`join_directions` of the results of two runs, one per direction, equals bit for bit the results of a
    bidirectional call. Gradients agree to rounding."""
    rng, more = np.random.default_rng(7), {"projection": True, "peephole": True} if op == "lstm" else {}
    pair = [split(draw(rng, op=op, mask=(*SIZES[:2], "P"), **more))[1] for _ in range(2)]
    x = to_mlx(pair[0].pop("x"), np.float64)
    del pair[1]["x"]
    ways = [{name: to_mlx(array, np.float64) for name, array in arrays.items()} for arrays in pair]
    run, back = getattr(recurrence, op), getattr(recurrence, f"{op}_gradients")
    with mx.stream(mx.cpu):
        options = {"engine": "ops", "return_gates": True}
        found = [run(x, **way, **options, reverse=d == 1)._asdict() for d, way in enumerate(ways)]
        arrays = recurrence.join_directions(*ways)
        got, expected = run(x, **arrays, **options, bidirectional=True)._asdict(), recurrence.join_directions(*found)
        assert got.keys() == expected.keys() and all(mx.array_equal(got[name], expected[name]) for name in got)
        kept = {"lstm": ("gates", "c", "h"), "gru": ("gates", "h"), "rnn": ("h",)}[op]
        given = [{name: way[name] for name in kept} | {"dh": way["h"], "dhT": way["hT"]} for way in found]
        parts = [back(x, **ways[d], **given[d], engine="ops", reverse=d == 1) for d in range(2)]
        dx = parts[0].pop("x") + parts[1].pop("x")
        whole = back(x, **arrays, **recurrence.join_directions(*given), engine="ops", bidirectional=True)
        expected = recurrence.join_directions(*parts) | {"x": dx}
        for name, gradient in whole.items():
            # Allow rounding errors: the bidirectional call computes one matrix product for both directions, so its
            # sums have another order.
            np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-13, err_msg=name)


def test_what_cannot_be_joined_is_refused():
    one, mask = {"Wh": mx.zeros((16, 4)), "b": mx.zeros((16,)), "h0": None}, mx.zeros((2, 1))
    for one_way, other_way, rule in [
        (one, one | {"b": None}, r"forward and reverse must have the same arrays but got \['Wh', 'b'\] and \['Wh'\]\."),
        (one, one | {"b": mx.zeros((15,))}, r"b of reverse must have shape \[16\] but got shape \[15\]"),
        (one, one | {"b": mx.zeros((16,), mx.float16)}, "b of reverse must have the dtype"),
        ({"bias": mask}, {"bias": mask}, "arrays must be those of one direction: .* but got 'bias'"),
        ({"x": mask, "Wx": mask}, {"x": mask, "Wx": mask}, "x without Wx, but got 'x'"),
        (one | {"mask": mask}, one | {"mask": mask}, r"mask must be as wide as h, .* but got shape \[2, 1\]"),
        (one, None, "reverse must be a dict of arrays but got NoneType"),
        ({"b": np.zeros(3)}, {"b": np.zeros(3)}, "b of forward must be an mlx.core.array"),
    ]:
        with pytest.raises(ValueError, match=rf"^\[join_directions\] .*{rule}"):
            recurrence.join_directions(one_way, other_way)
    thin = {"Wh": mx.zeros((4, 1)), "mask": mask}
    assert recurrence.join_directions(thin, thin)["mask"].shape == (2, 2)


def test_gates_are_returned_on_request_only():
    case = draw(np.random.default_rng(0))
    assert lstm(*(to_mlx(case[name], np.float32) for name in ("x", "Wx", "Wh"))).gates is None
