"""Tests of `mlx_lstm.tf` against TensorFlow: outputs, gradient ops and checks of the arguments. Gradients from every
output are compared with the float64 oracle."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within, bounds
from cases import METAL
from on_metal import on_metal
from tf_cases import (
    ATTRIBUTES,
    GRADIENT,
    LSTM_OPS,
    OPS,
    RAW,
    SEQUENCE_OPS,
    cotangents_for_oracle,
    draw,
    draw_gradients,
    engines_that_run,
    gradient_case,
    gradients_from_oracle,
    oracle_case,
    ours,
    ours_by_autodiff,
    theirs,
)

from mlx_lstm import cudnn, tf
from mlx_lstm.engines import ENGINES, METAL_ENGINES
from mlx_lstm.oracle import backward, forward
from mlx_lstm.oracle.closeness import largest

CPU_ENGINES = ("numpy", "ops")
ON_CPU = [(op, engine) for op in OPS for engine in engines_that_run(op, CPU_ENGINES)]
ON_METAL = [(op, engine) for op in OPS for engine in engines_that_run(op, METAL_ENGINES)]


# The Metal engine of each op's default tests. The first two ops have the same gate order, so they share kernels.
TURN = {"lstm_block_cell": "stepwise", "block_lstm": "stepwise", "block_lstm_v2": "fused", "gru_block_cell": "fused"}


def on_metal_in_turns(pairs):
    """Return pytest parameters made of pairs (op, engine). For each op one Metal engine runs by default, and the other
    one is marked slow. A gradient op takes the engine of its forward op, with which it shares kernels."""
    return [
        pytest.param(op, engine, marks=pytest.mark.slow if engine in METAL_ENGINES and engine != TURN[OF[op]] else [])
        for op, engine in pairs
    ]


SEEDS = 30  # number of random cases of an op
ALL_OUTPUTS = {op: ("i", "cs", "f", "o", "ci", "co", "h") for op in LSTM_OPS} | {"gru_block_cell": ("r", "u", "c", "h")}
OF = {gradient: op for op, gradient in GRADIENT.items()} | {op: op for op in OPS}
SMALL = (3, 2, 3, 4)  # T, N, I, H
SIZES_ON_METAL = (3, 2, 1, 5)  # one size of the goldens, so that a kernel is compiled once for all tests of this file


def assert_near(name, got, expected, atol=2e-6, rtol=1e-5):
    assert got.shape == expected.shape and got.dtype == expected.dtype, f"{name}: {got.shape} {got.dtype}"
    np.testing.assert_allclose(got, expected, rtol, atol, err_msg=name, equal_nan=False)


@cache
def recorded(op, seed, dtype=np.float32, sizes=None, fixed=()):
    """Run TensorFlow's op and its gradient op. Return (case, outputs, arguments of the gradient op, gradients).
    fixed: (name, value) of each argument that is not random."""
    case = draw(op, seed, dtype, sizes, **dict(fixed))
    outputs = theirs(op, case)
    given = gradient_case(op, case, outputs, draw_gradients(op, case, seed))
    return case, outputs, given, theirs(GRADIENT[op], given)


def check(op, engine, seed, near=assert_near, **of_case):
    """Check with the comparison `near` that our op and our gradient op agree with TensorFlow's. Our outputs at steps
    t >= seq_len_max must be 0; TensorFlow leaves them undefined."""
    case, outputs, given, gradients = recorded(op, seed, **of_case)
    for name, value in ours(op, case, engine).items():
        steps = case.get("seq_len_max")
        assert steps is None or not value[steps:].any(), name
        near(f"{op} seed {seed}: {name}", value[:steps], outputs[name][:steps])
    for name, value in ours(GRADIENT[op], given, engine).items():
        near(f"{op} seed {seed}: {name}", value, gradients[name])


def test_no_engine_is_left_out():
    """ON_CPU and ON_METAL contain the expected pairs of op and engine. `engines.choose` makes both lists, so an
    engine that it wrongly refused would otherwise lose its tests unnoticed."""
    assert {(op, engine) for op in OPS for engine in CPU_ENGINES} == set(ON_CPU)
    lstm = {(op, engine) for op in LSTM_OPS for engine in METAL_ENGINES}
    assert lstm | {("gru_block_cell", "fused")} <= set(ON_METAL)


@pytest.mark.parametrize("op, engine", ON_CPU)
def test_equals_tensorflow(op, engine):
    """Random cases agree with TensorFlow. They are drawn with and without peephole and clip, with a forget bias, with
    seq_len_max from 0 to T, and with sizes from 1."""
    for seed in range(SEEDS):
        check(op, engine, seed)


@pytest.mark.parametrize("op, engine", on_metal_in_turns(ON_METAL))
def test_equals_tensorflow_on_metal(op, engine):
    """Random cases of each op agree with TensorFlow on Metal engines, which the emulator runs. The LSTM cell runs with
    and without peepholes, the ops over a sequence with peepholes."""
    with on_metal() as log:
        for seed in range(2):
            fixed = {} if op == "gru_block_cell" else {"use_peephole": op != "lstm_block_cell" or seed == 1}
            check(op, engine, seed, sizes=SIZES_ON_METAL, fixed=tuple(fixed.items()))
    assert log


HALF_ON_METAL = [("block_lstm_v2", "fused")]  # test_kernels.py runs all kernels in 16 bits


@pytest.mark.parametrize("op, engine", ON_CPU + HALF_ON_METAL)
def test_half_equals_tensorflow(op, engine):
    """float16 results are close to TensorFlow's. TensorFlow rounds every operation to float16 and sums in float16,
    so our results are more accurate.

    Outputs may differ by 2e-3, or by 2e-3 of the largest output if it is larger than 1. Gradients over a sequence may
    differ by twice the error bound that is derived from the case.
    """

    def near(name, got, expected):
        assert_near(name, got, expected, atol=2e-3 * max(1.0, largest(expected)), rtol=0)

    with on_metal() if engine in METAL_ENGINES else nullcontext():
        for seed in range(2 if engine in METAL_ENGINES else 5):
            if op == "gru_block_cell":
                check_half_of_gru(engine, seed, near)
            else:
                of_case = {"dtype": np.float16, "sizes": (5, 2, 4, 8) if engine in CPU_ENGINES else SIZES_ON_METAL}
                check(op, engine, seed, near_by(limits_of_half(op, seed, of_case), near), **of_case)


def limits_of_half(op, seed, of_case):
    """Return {gradient name: largest allowed difference} for a float16 sequence op: twice the error bound, because
    both results have rounding errors. Return {} for a cell op."""
    if op not in SEQUENCE_OPS:
        return {}
    case, _, given, _ = recorded(op, seed, **of_case)
    said = oracle_case(op, case)
    cotangents = {"cs": given["cs_grad"], "h": given["h_grad"]}
    limit = bounds(said, np.float16, cotangents_for_oracle(op, forward(**said), cotangents))
    found = {"x_grad": limit["x"], "h_prev_grad": limit["h0"], "cs_prev_grad": limit["c0"], "b_grad": limit["b"]}
    found |= dict.fromkeys(("wci_grad", "wcf_grad", "wco_grad"), limit.get("peephole", 0.0))
    return {name: 2 * value for name, value in found.items()} | {"w_grad": 2 * max(limit["Wx"], limit["Wh"])}


def near_by(limits, near):
    """Return a comparison function that uses the tolerance in `limits` for the names in it, and calls `near` for all
    other names."""

    def compare(name, got, expected):
        limit = limits.get(name.split(": ")[1])
        return near(name, got, expected) if limit is None else assert_near(name, got, expected, limit, 0)

    return compare


def check_half_of_gru(engine, seed, near):
    """Compare our float16 GRU cell with TensorFlow's float32 GRU cell on the same numbers, because TensorFlow does
    not support a float16 GRU cell."""
    half = draw("gru_block_cell", seed, np.float16, (1, 2, 4, 8))
    full = {name: array.astype(np.float32) for name, array in half.items()}
    expected = theirs("gru_block_cell", full)
    for name, value in ours("gru_block_cell", half, engine).items():
        near(name, value.astype(np.float32), expected[name])
    kept = {name: expected[name].astype(np.float16) for name in "ruc"}
    given = half | kept | draw_gradients("gru_block_cell", half, seed)
    expected = theirs("gru_block_cell_grad", {name: array.astype(np.float32) for name, array in given.items()})
    for name, value in ours("gru_block_cell_grad", given, engine).items():
        near(name, value.astype(np.float32), expected[name])


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_gradient_of_the_preactivations_equals_to_rounding(engine):
    """dicfo (the gradient of the preactivations) and cs_prev_grad (the gradient of the previous c) agree with
    TensorFlow. Each of them is a sum of products. At most 16 rounding errors per term are allowed, including those
    of tanh."""
    for seed in range(SEEDS):
        _, _, given, gradients = recorded("lstm_block_cell", seed)
        got, sizes = ours("lstm_block_cell_grad", given, engine), sizes_of_terms(given)
        for name, size in sizes.items():
            error = np.abs(got[name].astype(np.float64) - gradients[name])
            assert (error <= 2 * 16 * 2.0**-24 * size).all(), (seed, name)


def sizes_of_terms(given):
    """Return dicfo (the gradient of the preactivations) and cs_prev_grad (the gradient of the previous c), computed
    from the absolute value of every term. Rounding errors are at most a small multiple of these sums, even where terms
    of opposite sign cancel in the result."""
    v = {name: np.abs(np.asarray(value, np.float64)) for name, value in given.items()}
    i, f, o, ci, co = (v[name] for name in ("i", "f", "o", "ci", "co"))
    wci, wcf, wco = (v[name] * v["use_peephole"] for name in ("wci", "wcf", "wco"))
    do = o * (1 + o) * v["h_grad"] * co
    dcs = (1 + co * co) * v["h_grad"] * o + v["cs_grad"] + do * wco
    di, df, dci = i * (1 + i) * dcs * ci, f * (1 + f) * dcs * v["cs_prev"], (1 + ci * ci) * dcs * i
    return {"dicfo": np.concatenate([di, dci, df, do], axis=1), "cs_prev_grad": dcs * f + di * wci + df * wcf}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float64])
def test_dtypes_that_tensorflow_has_not(dtype):
    """The ops support bfloat16 and float64, which TensorFlow's ops do not. The tolerance of 0.05 is chosen for
    bfloat16; other tests check float64 more closely."""
    for op in OPS:
        case, outputs, _, _ = recorded(op, 3)
        with mx.stream(mx.cpu):
            arrays = {name: mx.array(value) if name not in ATTRIBUTES else value for name, value in case.items()}
            arrays = {name: value.astype(dtype) if name not in ATTRIBUTES else value for name, value in arrays.items()}
            got = getattr(tf, op)(**arrays)
            assert {array.dtype for array in got} == {dtype}
            for name, array in got._asdict().items():
                rows = slice(case.get("seq_len_max"))
                np.testing.assert_allclose(np.array(array.astype(mx.float32))[rows], outputs[name][rows], atol=0.05)


@pytest.mark.parametrize("shown", ["each", "all"])
@pytest.mark.parametrize("op, engine", ON_CPU)
def test_gradient_of_every_output(op, engine, shown):
    """mx.vjp in float64 agrees with the oracle within the error bounds, from each output alone and from all outputs
    together."""
    for seed in range(1 if shown == "each" else 3):
        for names in [[name] for name in ALL_OUTPUTS[op]] if shown == "each" else [ALL_OUTPUTS[op]]:
            check_gradients(op, engine, seed, names, np.float64)
        if shown == "all" and op in SEQUENCE_OPS:
            check_gradients(op, engine, seed, ALL_OUTPUTS[op], np.float64, checkpoint_every=1 + seed)


@pytest.mark.parametrize(
    "op, engine",
    [pytest.param(*pair, marks=pytest.mark.slow if pair != ("block_lstm_v2", "fused") else []) for pair in ON_METAL],
)
def test_gradient_of_every_output_on_metal(op, engine):
    again = {"checkpoint_every": 2} if op == "block_lstm_v2" else {}
    check_gradients(op, engine, 0, ALL_OUTPUTS[op], np.float32, SIZES_ON_METAL, **again)


def check_gradients(op, engine, seed, names, dtype, sizes=SMALL, **more):
    """Compare mx.vjp from the outputs `names` with the oracle, for random arguments drawn with `seed`. LSTM cases
    have peepholes and a clip. Ops over a sequence run 3 - seed steps, so that different seeds also test different
    lengths."""
    fixed = {"cell_clip": 0.4, "use_peephole": True} if op in LSTM_OPS else {}
    fixed |= {"seq_len_max": 3 - seed} if op in SEQUENCE_OPS else {}
    case = draw(op, seed, dtype, sizes, **fixed)
    given = draw_gradients(op, case, seed, names)
    if op in SEQUENCE_OPS:  # outputs at t >= seq_len_max are constant 0, so their cotangents have no effect
        given = {name: np.nan_to_num(value) for name, value in given.items()}
    if op == "gru_block_cell":
        given = {"h": np.zeros_like(case["h_prev"])} | given
    said = oracle_case(op, case)
    cotangents = cotangents_for_oracle(op, forward(**said), given)
    expected = gradients_from_oracle(op, backward(said, cotangents))
    limit = bounds(said, dtype, cotangents)
    limits = {"h_prev": "h0", "cs_prev": "c0", "x": "x", "b": "b", "b_ru": "b", "b_c": "b"}
    limits |= dict.fromkeys(("wci", "wcf", "wco"), "peephole")
    with on_metal() if engine in METAL_ENGINES else nullcontext():
        got = ours_by_autodiff(op, case, given, engine, **more)
    assert set(got) == set(expected)
    for name, value in got.items():
        bound = limit[limits[name]] if name in limits else max(limit["Wx"], limit["Wh"])
        assert_within(f"{op} {names} {name}", value, expected[name], bound)


@pytest.mark.parametrize("op, engine", ON_CPU)
def test_gradient_of_every_output_by_finite_differences(op, engine):
    """mx.vjp agrees with central differences along a random direction. The cases have no clip, because the gradient
    ignores clipping, as in TensorFlow."""
    fixed = {"cell_clip": -1.0, "use_peephole": True} if op in LSTM_OPS else {}
    case = draw(op, 5, np.float64, SMALL, **fixed, **({"seq_len_max": 3} if op in SEQUENCE_OPS else {}))
    arrays = [name for name in case if name not in ATTRIBUTES]
    rng = np.random.default_rng(0)
    along = {name: rng.normal(size=case[name].shape) for name in arrays}
    for output in ALL_OUTPUTS[op]:
        given = draw_gradients(op, case, 7, [output])
        step = 1e-5
        ahead, back = (
            (
                ours(op, case | {n: case[n] + side * step * along[n] for n in arrays}, engine)[output] * given[output]
            ).sum()
            for side in (1, -1)
        )
        gradients = ours_by_autodiff(op, case, given, engine)
        slope = sum((gradients[name] * along[name]).sum() for name in arrays)
        assert slope == pytest.approx((ahead - back) / (2 * step), rel=1e-7, abs=1e-8), output


@pytest.mark.parametrize("op, engine", ON_CPU)
def test_gradient_by_mlx_equals_the_gradient_op(op, engine):
    """The gradients that mx.vjp computes for the outputs cs and h agree with TensorFlow's gradients. For an LSTM
    cell op, TensorFlow's gradients are those of its sequence op with one time step. For the GRU cell op, they are
    computed by the formulas of TensorFlow 1."""
    for seed in range(10):
        case, outputs, given, gradients = recorded(op, seed)
        named = {{"d_h": "h"}.get(name, name.removesuffix("_grad")): given[name] for name in GRADIENTS_OF[op]}
        got = ours_by_autodiff(op, case, {name: np.nan_to_num(value) for name, value in named.items()}, engine)
        if op == "lstm_block_cell":
            sequence = {
                name: value[None] if value.ndim == 2 and name not in STATES else value
                for name, value in given.items()
                if isinstance(value, np.ndarray)
            }
            sequence |= {"h": outputs["h"][None], "seq_len_max": 1, "use_peephole": given["use_peephole"]}
            gradients = theirs("block_lstm_grad", sequence)
            gradients["x_grad"] = gradients["x_grad"][0]
        if op == "gru_block_cell":
            gradients = gru_gradients_of_tensorflow_1(given, gradients)
        for name, value in got.items():
            assert_near(f"{op} seed {seed}: {name}", value, gradients[f"{name}_grad"])


GRADIENTS_OF = dict.fromkeys(LSTM_OPS, ("cs_grad", "h_grad")) | {"gru_block_cell": ("d_h",)}
STATES = ("cs_prev", "h_prev", "w")


def gru_gradients_of_tensorflow_1(given, d):
    """Return the gradients of all arguments of GRUBlockCell, computed with the formulas of TensorFlow 1 from the
    outputs `d` of its gradient op."""
    x, h, d_ru, d_c = given["x"], given["h_prev"], d["d_r_bar_u_bar"], d["d_c_bar"]
    found = {"x": d["d_x"], "h_prev": d["d_h_prev"], "b_ru": d_ru.sum(axis=0), "b_c": d_c.sum(axis=0)}
    found["w_ru"] = np.concatenate([x, h], axis=1).T @ d_ru
    found["w_c"] = np.concatenate([x, given["r"] * h], axis=1).T @ d_c
    return {f"{name}_grad": value for name, value in found.items()}


def test_what_tensorflow_makes_of_its_own_gradients():
    """TensorFlow's own gradients behave as our docstrings say: they ignore cotangents of gates, use the formula of
    version 1 for the version 2 op, and are not available for cell ops."""
    tensorflow = pytest.importorskip("tensorflow")

    def tape(op, shown):
        case = draw(op, 1, sizes=SMALL, seq_len_max=3, cell_clip=-1.0, use_peephole=True)
        w = tensorflow.Variable(case["w"])
        with tensorflow.GradientTape() as recording:
            outputs = getattr(tensorflow.raw_ops, RAW[op])(**case | {"w": w})._asdict()
            loss = tensorflow.reduce_sum(outputs[shown])
        given = {name: np.full((3, 2, 4), float(name.startswith(shown)), np.float32) for name in ("h_grad", "cs_grad")}
        gradient_of = gradient_case(op, case, {name: value.numpy() for name, value in outputs.items()}, given)
        return recording.gradient(loss, w).numpy(), gradient_of

    assert not tape("block_lstm", "i")[0].any()
    by_tape, case = tape("block_lstm_v2", "h")
    assert_near("w", by_tape, theirs("block_lstm_grad", case)["w_grad"])
    assert largest(by_tape - theirs("block_lstm_grad_v2", case)["w_grad"]) > 0.1
    for op in ("lstm_block_cell", "gru_block_cell"):
        case = draw(op, 1, sizes=SMALL)
        x = tensorflow.Variable(case["x"])
        with tensorflow.GradientTape() as recording:
            h = getattr(tensorflow.raw_ops, RAW[op])(**case | {"x": x}).h
        with pytest.raises(LookupError):
            recording.gradient(h, x)


def test_forward_and_second_derivatives_through_co():
    """Forward-mode and second derivatives through the output co are right with the engine `ops`. co, which is tanh of
    the cell state, has its own test because it is computed outside the engine."""
    case = draw("block_lstm", 4, np.float64, SMALL, seq_len_max=3, cell_clip=-1.0)
    rng = np.random.default_rng(0)
    weight, along = (rng.normal(size=shape) for shape in ((3, 2, 4), case["w"].shape))
    with mx.stream(mx.cpu):
        weight, along = mx.array(weight, mx.float64), mx.array(along, mx.float64)
        arrays = {n: value if n in ATTRIBUTES else mx.array(value, mx.float64) for n, value in case.items()}

        def loss(w):
            return (tf.block_lstm(**arrays | {"w": w}, engine="ops").co * weight).sum()

        def slope(w):
            return (mx.grad(loss)(w) * along).sum()

        w, step = arrays["w"], 1e-5
        ahead, back = ((f(w + step * along) - f(w - step * along)).item() / (2 * step) for f in (loss, slope))
        assert mx.jvp(loss, [w], [along])[1][0].item() == pytest.approx(ahead, rel=1e-7)
        assert (mx.grad(slope)(w) * along).sum().item() == pytest.approx(back, rel=1e-6)


@pytest.mark.parametrize("op", ["block_lstm"])
def test_under_mlx_compile(op):
    case, given = recorded(op, 3)[::2]
    for name, arguments in ((op, case), (GRADIENT[op], given)):
        arrays = {n: mx.array(np.nan_to_num(value)) for n, value in arguments.items() if n not in ATTRIBUTES}
        options = {n: value for n, value in arguments.items() if n in ATTRIBUTES}
        plain = getattr(tf, name)(**arrays, **options, stream=mx.cpu)
        function = mx.compile(lambda arrays, name=name, options=options: list(getattr(tf, name)(**arrays, **options)))
        with mx.stream(mx.cpu):
            for left, right in zip(function(arrays), plain, strict=True):
                np.testing.assert_allclose(np.array(left), np.array(right), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "op, sizes", [(op, sizes) for op in OPS for sizes in ("T", "N", "H", "I") if sizes != "T" or op in SEQUENCE_OPS]
)
def test_empty_axes(op, sizes):
    """An empty axis (T, N, I or H of 0) is accepted where TensorFlow accepts it. It is refused for N or H in an LSTM
    cell, and for H in the gradient of a sequence op."""
    empty = tuple(0 if name == sizes else size for name, size in zip("TNIH", SMALL, strict=True))
    case = draw(op, 0, sizes=empty, **({"seq_len_max": min(2, empty[0])} if op in SEQUENCE_OPS else {}))
    if op == "lstm_block_cell" and sizes in "NH":
        with pytest.raises(ValueError, match="cs_prev_tensor is empty, has shape: "):
            ours(op, case, None)
        return
    outputs, got = theirs(op, case), ours(op, case, None)
    for name, value in got.items():
        assert_near(name, value[:2] if op in SEQUENCE_OPS else value, outputs[name][:2])
    given = gradient_case(op, case, outputs, draw_gradients(op, case, 0))
    if op in SEQUENCE_OPS and sizes == "H":
        with pytest.raises(ValueError, match="w matrix columns must be a positive multiple of 4, but got 0"):
            ours(GRADIENT[op], given, None)
    else:
        got = ours(GRADIENT[op], given, None)
        for name, value in theirs(GRADIENT[op], given).items():
            unwritten = (name, sizes) in (("w_grad", "N"), ("d_x", "H"))  # TensorFlow leaves this gradient unwritten
            assert_near(name, got[name], 0 * got[name] if unwritten else value)
    gradients = ours_by_autodiff(op, case, draw_gradients(op, case, 0, ["h"]), None)
    assert {name: value.shape for name, value in gradients.items()} == {n: case[n].shape for n in gradients}


@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_seq_len_max_of_every_kind(op):
    case = draw(op, 0, sizes=(4, 2, 3, 4), seq_len_max=2)
    expected = ours(op, case, None)
    kinds = (np.int32(2), np.int64(2), np.array(2), mx.array(2), mx.array(2, mx.int64), mx.array(2, mx.uint8))
    for kind in kinds:
        for name, value in ours(op, case | {"seq_len_max": kind}, None).items():
            np.testing.assert_array_equal(value, expected[name])
    for wrong in (2.0, True, None, mx.array(2.0), np.array(2.5)):
        with pytest.raises(ValueError, match=rf"\[{op}\] seq_len_max must be an integer but got"):
            ours(op, case | {"seq_len_max": wrong}, None)


@pytest.mark.needs_mx_compile
@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_seq_len_max_without_a_value_is_refused(op):
    case = draw(op, 0, sizes=(4, 2, 3, 4), seq_len_max=2)
    with pytest.raises(ValueError, match="seq_len_max must have a value but got a placeholder"):
        arrays = {name: value for name, value in case.items() if name not in ATTRIBUTES}
        arrays = {name: mx.array(value) for name, value in arrays.items()}
        mx.compile(lambda steps: getattr(tf, op)(steps, **arrays).h)(mx.array(2))


@pytest.mark.parametrize("clip", [0, -1, float("nan"), float("inf"), np.float32(0.0)])
def test_clips_that_are_none(clip):
    case = draw("block_lstm", 0, sizes=SMALL, seq_len_max=3, cell_clip=-1.0)
    expected = ours("block_lstm", case, None)
    for name, value in ours("block_lstm", case | {"cell_clip": clip}, None).items():
        np.testing.assert_array_equal(value, expected[name])


def test_defaults_names_and_order_are_the_raw_ops():
    """Each function has the signature of TensorFlow's raw op: the same order of arguments, defaults, and names of
    outputs."""
    tensorflow = pytest.importorskip("tensorflow")
    from inspect import Parameter, signature

    for op, raw in RAW.items():
        here = [p for p in signature(getattr(tf, op)).parameters.values() if p.kind is not Parameter.KEYWORD_ONLY]
        there = [p for p in signature(getattr(tensorflow.raw_ops, raw)).parameters.values() if p.name != "name"]
        assert [(p.name, p.default) for p in here] == [(p.name, p.default) for p in there], op
        case = recorded(op, 0)[0] if op in OPS else recorded(OF[op], 0)[2]
        assert list(ours(op, case, None)) == list(theirs(op, case)), op


CUDNN = {"cudnn_rnn": "CudnnRNN", "cudnn_rnn_v2": "CudnnRNNV2", "cudnn_rnn_v3": "CudnnRNNV3"}
CUDNN |= {op.replace("rnn", "rnn_backprop"): raw.replace("RNN", "RNNBackprop") for op, raw in CUDNN.items()}
CUDNN |= {"cudnn_rnn_params_to_canonical": "CudnnRNNParamsToCanonical"}
CUDNN |= {"cudnn_rnn_canonical_to_params": "CudnnRNNCanonicalToParams"}
CUDNN |= {f"{op}_v2": f"{raw}V2" for op, raw in CUDNN.items() if "canonical" in op}


@pytest.mark.parametrize("op", CUDNN)
def test_defaults_of_the_ops_of_cudnn_are_those_of_the_raw_ops(op):
    tensorflow = pytest.importorskip("tensorflow")
    from inspect import Parameter, signature

    here, there = (signature(each).parameters for each in (getattr(cudnn, op), getattr(tensorflow.raw_ops, CUDNN[op])))
    found = {name: p.default for name, p in here.items() if name in there and p.default is not Parameter.empty}
    assert found == {name: there[name].default for name in found} and {"seed2", "dropout", "rnn_mode"} <= found.keys()


def a_case(op):
    """Return a valid case of any of the eight ops. The LSTM ops use peepholes."""
    of = OF[op]
    fixed = {"use_peephole": True} if of in LSTM_OPS else {}
    fixed |= {"seq_len_max": 3} if of in SEQUENCE_OPS else {}
    case = draw(of, 0, sizes=SMALL, **fixed)
    return case if op == of else gradient_case(of, case, ours(of, case, None), draw_gradients(of, case, 0))


CHANGES = [  # (op, argument, wrong shape) that TensorFlow 2.21 refuses with an error, without crashing the process
    *[("lstm_block_cell", *change) for change in (("cs_prev", (3, 4)), ("h_prev", (3, 4)), ("h_prev", (2, 5)))],
    *[("lstm_block_cell", *change) for change in (("w", (6, 16)), ("w", (7, 15)), ("b", (15,)), ("x", (2, 3, 1)))],
    *[("lstm_block_cell", *change) for change in (("wci", (4, 1)), ("wcf", ()), ("wco", (1, 4)), ("b", (16, 1)))],
    *[("lstm_block_cell_grad", *change) for change in (("cs_prev", (3, 4)), ("h_prev", (2, 5)), ("w", (7, 15)))],
    *[("lstm_block_cell_grad", name, (3, 4)) for name in ("i", "cs", "f", "o", "ci", "co", "cs_grad", "h_grad")],
    *[("lstm_block_cell_grad", name, (2, 5)) for name in ("i", "cs", "o", "ci", "co", "cs_grad", "h_grad")],
    *[(op, name, shape) for op in SEQUENCE_OPS for name, shape in (
        ("x", (3, 2)), ("cs_prev", (4,)), ("cs_prev", (3, 4)), ("h_prev", (4,)), ("h_prev", (3, 4)), ("h_prev", (2, 5)),
        ("w", (7,)), ("w", (6, 16)), ("w", (7, 15)), ("wci", (4, 1)), ("wcf", ()), ("wco", (5,)), ("b", (16, 1)),
        ("b", (15,)),
    )],
    *[(GRADIENT[op], name, shape) for op in SEQUENCE_OPS for name, shape in (
        ("x", (3, 2)), ("cs_prev", (4,)), ("h_prev", (4,)), ("w", (7,)), ("w", (6, 16)), ("wci", (4, 1)), ("wcf", ()),
        ("wco", (4, 1)), ("b", (16, 1)), ("b", (12,)), ("i", (2, 4)), ("cs", (2, 4)), ("f", (4,)), ("o", (2, 4)),
        ("ci", (2, 4)), ("co", (2, 4)), ("h", (2, 4)),
    )],
    *[(op, name, shape) for op in ("gru_block_cell", "gru_block_cell_grad") for name, shape in (
        ("x", (2,)), ("h_prev", (4,)), ("h_prev", (3, 4)), ("w_ru", (8,)), ("w_ru", (6, 8)), ("w_ru", (7, 9)),
        ("w_c", (4,)), ("w_c", (6, 4)), ("w_c", (7, 5)), ("b_ru", (8, 1)), ("b_ru", (7,)), ("b_c", ()), ("b_c", (5,)),
    )],
    *[("gru_block_cell_grad", name, shape) for name in ("r", "u", "d_h") for shape in ((4,), (3, 4), (2, 5))],
    *[("gru_block_cell_grad", "c", shape) for shape in ((3, 4), (2, 5))],
]  # fmt: skip


@pytest.mark.parametrize("op, name, shape", CHANGES, ids=str)
def test_texts_are_tensorflows(op, name, shape):
    """Our error texts equal TensorFlow's. The only difference is TensorFlow's typing error `w_ru_`, which is not
    copied."""
    tensorflow = pytest.importorskip("tensorflow")
    case = a_case(op) | {name: np.ones(shape, np.float32)}
    with pytest.raises(tensorflow.errors.InvalidArgumentError) as there:
        theirs(op, case)
    with pytest.raises(ValueError) as here:
        ours(op, case, None)
    text = str(here.value)
    assert text.startswith(f"[{op}] ")
    assert text.removeprefix(f"[{op}] ") + " [" in there.value.message.replace("w_ru_ ", "w_ru ") + " ["


# Calls on which TensorFlow 2.21 crashes, reads past the end of an array or returns garbage, but which we refuse. The
# error texts are those of newer versions of TensorFlow, if they refuse the call.
STRICTER = [  # (op, changed arguments or shapes, our error text)
    *[(op, {"seq_len_max": steps}, f"seq_len_max must be between 0 and 3 but is {steps}") for op in
      ("block_lstm", "block_lstm_v2", "block_lstm_grad", "block_lstm_grad_v2") for steps in (-1, 4)],
    ("block_lstm", {"seq_len_max": mx.array([3])}, "`seq_len_max_tensor` must be rank 0 but is rank 1"),
    ("block_lstm_grad", {"seq_len_max": np.array([[3]])}, "`seq_len_max_tensor` must be rank 0 but is rank 2"),
    ("lstm_block_cell", {"x": (2,)}, "x_tensor must be rank 2 but is rank 1."),
    ("lstm_block_cell", {"cs_prev": (4,)}, "cs_prev_tensor must be rank 2 but is rank 1."),
    ("lstm_block_cell", {"h_prev": (4,)}, "h_prev_tensor must be rank 2 but is rank 1."),
    ("lstm_block_cell", {"w": (7,)}, "w_tensor must be rank 2 but is rank 1."),
    ("lstm_block_cell", {"wci": (3,)}, "wci.dim_size(0) != cell_size: 3 vs. 4"),
    ("lstm_block_cell_grad", {"wco": (0,)}, "wco.dim_size(0) != cell_size: 0 vs. 4"),
    ("lstm_block_cell_grad", {"f": (2, 5)}, "f.dim_size(1) != cell_size: 5 vs. 4"),
    ("lstm_block_cell_grad", {"i": (4,)}, "i_tensor must be rank 2 but is rank 1."),
    ("block_lstm_grad", {"wcf": (5,)}, "wcf.dim_size(0) != cell_size: 5 vs. 4"),
    ("block_lstm_grad", {"w": (7, 17)}, "w matrix columns must be a positive multiple of 4, but got 17"),
    ("block_lstm_grad", {"b": (17,)}, "w and b cell_size don't match: 4 vs. 17"),
    ("block_lstm_grad", {"cs_prev": (3, 4)}, "cs_prev must have shape [2, 4] but got shape [3, 4]."),
    ("block_lstm_grad_v2", {"f": (2, 2, 4)}, "f must have shape [3, 2, 4] but got shape [2, 2, 4]."),
    ("block_lstm_grad_v2", {"h_grad": (3, 4)}, "h_grad must be rank 3. Received: 2"),
    ("gru_block_cell_grad", {"c": (4,)}, "Rank of c must be 2, got 1"),
]  # fmt: skip


@pytest.mark.parametrize("op, changes, text", STRICTER, ids=str)
def test_more_is_refused_than_by_tensorflow(op, changes, text):
    changes = {name: np.ones(to, np.float32) if isinstance(to, tuple) else to for name, to in changes.items()}
    with pytest.raises(ValueError) as error:
        ours(op, a_case(op) | changes, None)
    assert str(error.value) == f"[{op}] {text}"


@pytest.mark.parametrize("op", RAW)
def test_every_wrong_shape_kind_and_dtype_is_refused(op):
    """An op raises ValueError for an array with one axis too many, one too few, or one axis longer by one. It also
    raises it for an array of another dtype, and for a value that is not an array."""
    case = a_case(op)
    for name, array in case.items():
        if name in ATTRIBUTES:
            continue
        shapes = [array.shape[1:], (*array.shape, 1)]
        free = 1 if name == "x" and op in SEQUENCE_OPS else 0  # axis 0 is free: x may have more steps than seq_len_max
        shapes += [tuple(n + (k == axis) for k, n in enumerate(array.shape)) for axis in range(free, array.ndim)]
        for shape in shapes:
            with pytest.raises(ValueError, match=rf"^\[{op}\] "):
                ours(op, case | {name: np.ones(shape, np.float32)}, None)
        for dtype in (mx.float16, mx.int32):
            with pytest.raises(ValueError, match=rf"^\[{op}\] "):
                ours(op, case | {name: mx.zeros(array.shape, dtype)}, None)
        with pytest.raises(ValueError, match=rf"^\[{op}\] {name} must be an mlx.core.array: .* but got list"):
            ours(op, case | {name: [0.0]}, None)


def test_wrong_attributes():
    for op, attribute, wrong in (
        ("block_lstm", "use_peephole", 1),
        ("block_lstm_grad", "use_peephole", None),
        ("lstm_block_cell_grad", "use_peephole", "yes"),
        ("block_lstm_v2", "cell_clip", None),
        ("block_lstm", "forget_bias", "1"),
        ("lstm_block_cell", "cell_clip", True),
        ("block_lstm", "forget_bias", np.bool_(True)),
        ("block_lstm", "forget_bias", float("nan")),
        ("lstm_block_cell", "forget_bias", float("inf")),
    ):
        with pytest.raises(ValueError, match=rf"^\[{op}\] {attribute} must be "):
            ours(op, a_case(op) | {attribute: wrong}, None)
    with pytest.raises(TypeError, match="use_peephole"):
        tf.block_lstm_grad(**{name: None for name in a_case("block_lstm_grad") if name != "use_peephole"})


@pytest.mark.parametrize("op", RAW)
def test_an_engine_that_was_asked_for_has_to_run(op):
    with pytest.raises(ValueError, match="engine='stepwise' cannot run: Metal shaders run on the GPU"):
        ours(op, a_case(op), "stepwise", mx.cpu)


def test_peepholes_of_any_length_where_they_are_unused():
    case = draw("lstm_block_cell", 0, sizes=SMALL, use_peephole=False)
    short = case | {name: np.ones(2, np.float32) for name in ("wci", "wcf", "wco")}
    for name, value in ours("lstm_block_cell", short, None).items():
        assert_near(name, value, theirs("lstm_block_cell", case)[name])
    outputs = theirs("lstm_block_cell", case)
    given = gradient_case("lstm_block_cell", short, outputs, draw_gradients("lstm_block_cell", case, 0))
    got = ours("lstm_block_cell_grad", given, None)
    assert all(got[f"{name}_grad"].shape == (2,) and not got[f"{name}_grad"].any() for name in ("wci", "wcf", "wco"))


GOLDENS = Path(__file__).parent / "goldens"


WITH_GOLDENS = [(op, engine) for op in RAW for engine in (None, *engines_that_run(OF[op], ENGINES))]


@pytest.mark.parametrize("op, engine", on_metal_in_turns(WITH_GOLDENS))
def test_goldens(op, engine):
    """Our results agree with the TensorFlow results that `goldens/make_tf.py` recorded. Engine None runs on the best
    device of this machine. A Metal engine runs the case with the sizes of the other tests, because the emulator is
    slow."""
    with np.load(GOLDENS / f"tf_{op}.npz") as file:
        recorded = {name: file[name] for name in file.files}
    cases = range(int(recorded["cases"]))
    for n in cases if engine not in METAL_ENGINES else cases[4:5]:
        case, expected = (
            {name.split("/")[2]: value for name, value in recorded.items() if name.startswith(f"{n}/{part}/")}
            for part in ("in", "out")
        )
        case = {name: value.item() if name in ATTRIBUTES else value for name, value in case.items()}
        half = case["x"].dtype == np.float16
        with on_metal() if engine in METAL_ENGINES else nullcontext():
            got = ours(op, case, engine, METAL if engine is None else None)
        assert list(got) == list(expected)
        for name, value in got.items():
            atol = 2e-3 * max(1.0, largest(expected[name])) if half else 2e-6
            assert_near(f"{n} {name}", value, expected[name], atol, 0 if half else 1e-5)
