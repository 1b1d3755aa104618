"""`mlx_lstm.lstm` on every CPU engine against the float64 oracle: all options, all outputs, all gradients."""

import ml_dtypes
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from cases import (
    OPTIONS,
    OUTPUTS,
    ROUNDING_MARGIN,
    SIZES,
    combination,
    draw,
    draw_away_from_kinks,
    draw_cotangents,
    run,
    to_mlx,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_lstm import engine_numpy_cell, engine_numpy_memory, lstm, recurrence
from mlx_lstm.closeness import assert_close, assert_within, bounds
from mlx_lstm.oracle import ARRAYS, backward, forward

ENGINES = ("numpy", "ops")
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def check(case, engine, dtype, cotangents):
    """Outputs and gradients within the bounds derived from the case."""
    case = {
        name: value.astype(dtype) if name in ARRAYS and value is not None else value for name, value in case.items()
    }
    cotangents = {name: value.astype(dtype) for name, value in cotangents.items()}
    ref = forward(**case) | backward(case, cotangents)
    limit = bounds(case, dtype, cotangents)
    outputs, gradients = run(case, engine, dtype, cotangents)
    assert set(gradients) == {name for name in ARRAYS if case.get(name) is not None}
    for name, value in (outputs | gradients).items():
        assert value.dtype == dtype, name
        assert_within(name, value, ref[name], limit[name])


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_alone(option, engine, dtype):
    case, cotangents = draw_away_from_kinks(1, **OPTIONS[option])
    check(case, engine, dtype, cotangents)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_output_alone(engine, output):
    """Gradients flow from one output while the others have none; a projection and a mask take their own ways."""
    case, cotangents = draw_away_from_kinks(2, projection=True, mask=("P",), peephole=True)
    check(case, engine, np.float32, {output: cotangents[output]})


sizes = st.tuples(
    *(st.sampled_from(values) for values in ([1, 2, 3, 5], [1, 2, 3, 16, 17], [1, 3, 8], [1, 2, 5], [1, 3]))
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), sizes=sizes, shown=st.sets(st.sampled_from(OUTPUTS), min_size=1))
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("engine", ENGINES)
def test_options_in_random_combination(engine, dtype, seed, sizes, shown):
    rng = np.random.default_rng(seed)
    case, cotangents = draw_away_from_kinks(seed, ROUNDING_MARGIN, sizes=sizes, **combination(rng, sizes))
    check(case, engine, dtype, {name: cotangents[name] for name in shown})


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sizes=sizes, shown=st.sets(st.sampled_from(OUTPUTS), min_size=1))
@pytest.mark.parametrize("engine", ENGINES)
def test_options_in_many_random_combinations(engine, seed, sizes, shown):
    test_options_in_random_combination.hypothesis.inner_test(engine, np.float32, seed, sizes, shown)


@pytest.mark.parametrize("word", HALVES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", [name for name in OPTIONS if not name.startswith(("relu", "hard_sigmoid"))])
def test_half_precision_is_no_worse_than_twice_its_formula(option, engine, word):
    """Activations with kinks are left out: rounding to half moves arguments across them, in the formula as in ours."""
    dtype = HALVES[word]
    rng = np.random.default_rng(5)
    case = draw(rng, dtype=dtype, **OPTIONS[option])
    cotangents = draw_cotangents(rng, forward(**case), dtype)
    ref = forward(**case) | backward(case, cotangents)
    same = forward(**case, dtype=dtype) | backward(case, cotangents, dtype=dtype)
    outputs, gradients = run(case, engine, dtype, cotangents)
    for name, value in (outputs | gradients).items():
        assert_close(name, value, same[name], ref[name])


# --- Sizes at which the numpy engine changes its ways ----------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, "some"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("B", [3, 20])
def test_numpy_engine_in_chunks_of_time(monkeypatch, B, reverse, lengths):
    """Products over several chunks, the last one shorter, for narrow and wide batches; the mask enters the sums."""
    monkeypatch.setattr(engine_numpy_memory, "CHUNK_ROWS", 3 * B)
    sizes = (7, B, 2, 3, 2)
    lengths = None if lengths is None else np.arange(B) % 8
    options = {"sizes": sizes, "reverse": reverse, "lengths": lengths, "projection": True, "mask": (7, B, "P")}
    check(*with_engine(draw_away_from_kinks(3, **options)))


@pytest.mark.parametrize("activations", [None, ("relu", "sigmoid", "tanh", "identity", "hard_sigmoid")])
@pytest.mark.parametrize("T", [1, 33, 31], ids=["one step", "weights copied", "weights read"])
def test_numpy_engine_over_a_wide_batch(T, activations):
    """From 512 rows on it joins and halves the weights in a copy."""
    options = {} if activations is None else {"activations": activations}
    drawn = draw_away_from_kinks(4, ROUNDING_MARGIN, sizes=(T, 16, 3, 5, 5), forget_bias=0.5, mask=("P",), **options)
    check(*with_engine(drawn))


def with_engine(drawn):
    case, cotangents = drawn
    return case, "numpy", np.float64, cotangents


def test_batch_major_memory_comes_back_as_it_went_in():
    """A transposed x costs no copy on the way in, and h and dx leave in the same memory order."""
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


@pytest.mark.parametrize("engine", ENGINES)
def test_strided_arguments(engine):
    """Every array cut out of a larger one, so that no stride is trivial."""
    case, cotangents = draw_away_from_kinks(6, projection=True, peephole=True, mask=(4, 2, "P"), sizes=(4, 2, 3, 2, 3))

    def cut(array):
        wide = np.zeros([2 * n for n in array.shape])
        wide[tuple(slice(None, None, 2) for _ in array.shape)] = array
        return to_mlx(wide, np.float64)[tuple(slice(None, None, 2) for _ in array.shape)]

    with mx.stream(mx.cpu):
        arrays = {name: cut(case[name]) for name in ARRAYS if name in case}
        names = list(arrays)
        outputs, gradients = mx.vjp(
            lambda *values: list(lstm(**dict(zip(names, values, strict=True)), engine=engine, return_gates=True)),
            list(arrays.values()),
            [cut(cotangents[name]) for name in OUTPUTS],
        )
        got = dict(zip(OUTPUTS, outputs, strict=True)) | dict(zip(names, gradients, strict=True))
        ref = forward(**case) | backward(case, cotangents)
        limit = bounds(case, np.float64, cotangents)
        for name, value in got.items():
            assert_within(name, np.array(value), ref[name], limit[name])


@pytest.mark.parametrize("reverse", [False, True])
def test_scratch_of_the_numpy_engine_is_written_before_it_is_read(monkeypatch, reverse):
    """Steps that every item has left behind included: scratch starts as NaN here."""
    original = engine_numpy_cell.columns_buffer

    def poisoned(*arguments):
        buffer = original(*arguments)
        buffer.fill(np.nan)
        return buffer

    monkeypatch.setattr(engine_numpy_cell, "columns_buffer", poisoned)
    options = {"projection": True, "lengths": [2, 0], "mask": ("P",), "reverse": reverse}
    check(*with_engine(draw_away_from_kinks(3, **options)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reverse", [False, True])
def test_what_lies_in_the_padding_is_never_read(engine, reverse):
    rng = np.random.default_rng(0)
    case = draw(rng, mask=(4, 2, "P"), lengths=[3, 0], reverse=reverse)
    cotangents = draw_cotangents(rng, forward(**case))
    clean = run(case, engine, np.float64, cotangents)
    for array in (case["x"], case["mask"], *(cotangents[name] for name in ("h", "c", "gates"))):
        array[3:, 0], array[:, 1] = np.nan, np.nan
    for before, after in zip(clean, run(case, engine, np.float64, cotangents), strict=True):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)


# --- MLX's transformations -------------------------------------------------------------------------------------------


def small(dtype=mx.float32):
    """x, Wx, Wh, b of sizes T 3, B 2, I 2, H 2, and a loss over (h, hT, cT)."""
    rng = np.random.default_rng(9)
    arrays = [mx.array(rng.normal(size=shape), dtype) for shape in ((3, 2, 2), (8, 2), (8, 2), (8,))]
    weight = mx.array(rng.normal(size=(3, 2, 2)), dtype)

    def loss(*arrays, engine=None):
        out = lstm(*arrays, engine=engine)
        return (out.h * weight).sum() + (out.hT * weight[0]).sum() + (out.cT * out.cT).sum()

    return arrays, loss


def assert_trees_close(got, expected):
    for left, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.array(left), np.array(right), rtol=2e-5, atol=1e-6)


def test_gradient_under_mlx_transformations():
    """grad, value_and_grad, checkpoint, compile, vmap of grad and grad of vmap agree."""
    arrays, loss = small()
    plain = mx.grad(loss, argnums=(0, 1, 2, 3))(*arrays)
    assert_trees_close(mx.value_and_grad(loss, argnums=(0, 1, 2, 3))(*arrays)[1], plain)
    assert_trees_close(mx.grad(mx.checkpoint(loss), argnums=(0, 1, 2, 3))(*arrays), plain)
    assert_trees_close(mx.compile(mx.grad(loss, argnums=(0, 1, 2, 3)))(*arrays), plain)
    stack = [mx.stack([array, array]) for array in arrays]
    assert_trees_close([g[1] for g in mx.vmap(mx.grad(loss, argnums=(0, 1, 2, 3)))(*stack)], plain)
    untrained = mx.grad(lambda *arrays: lstm(*arrays, training=False).h.sum(), argnums=(0, 1, 2, 3))
    assert_trees_close(mx.compile(untrained)(*arrays), untrained(*arrays))
    both = mx.grad(lambda *stack: mx.vmap(loss)(*stack).sum(), argnums=(0, 1, 2, 3))(*stack)
    assert_trees_close([g[0] for g in both], plain)


def test_export_and_import(tmp_path):
    arrays, _ = small()
    path = str(tmp_path / "loss.mlxfn")
    mx.export_function(path, lambda *arrays: lstm(*arrays, training=False).h, *arrays)
    assert_trees_close(mx.import_function(path)(*arrays), [lstm(*arrays).h])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", ["plain", "lengths_reverse", "projection"])
def test_inference_gives_the_same_and_its_gradient_too(option, engine):
    case, cotangents = draw_away_from_kinks(3, **OPTIONS[option])
    for shown in (OUTPUTS, ("h", "cT")):
        given = {name: cotangents[name] for name in shown}
        trained, inferred = (run(case | {"training": flag}, engine, np.float64, given) for flag in (True, False))
        for before, after in zip(trained, inferred, strict=True):
            for name in before:
                np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_second_derivative_is_right_or_refused():
    arrays, loss = small()

    def slope(Wh, engine):
        return (mx.grad(lambda Wh: loss(arrays[0], arrays[1], Wh, arrays[3], engine=engine))(Wh) ** 2).sum()

    second = np.array(mx.grad(lambda Wh: slope(Wh, "ops"))(arrays[2]))
    step, direction = 1e-2, mx.array(np.random.default_rng(1).normal(size=(8, 2)), mx.float32)
    ahead, back = (slope(arrays[2] + side * step * direction, "ops").item() for side in (1, -1))
    assert (second * np.array(direction)).sum() == pytest.approx((ahead - back) / (2 * step), rel=1e-2)
    with pytest.raises(RuntimeError, match="second derivative"):
        mx.eval(mx.grad(lambda Wh: slope(Wh, "numpy"))(arrays[2]))


def test_gradient_of_the_gradient_op_is_right_or_refused():
    """Of `lstm_gradients`, which is linear in dh."""
    (x, Wx, Wh, _), _ = small()
    with mx.stream(mx.cpu):
        out = lstm(x, Wx, Wh, return_gates=True)

        def dx(dh, engine):
            saved = {"gates": out.gates, "c": out.c, "h": out.h}
            return recurrence.lstm_gradients(x, Wx, Wh, **saved, dh=dh, engine=engine)["x"].sum()

        dh = mx.ones((3, 2, 2))
        along = (mx.grad(lambda dh: dx(dh, "ops"))(dh) * dh).sum()
        assert_trees_close([along], [dx(dh, "ops")])
        with pytest.raises(RuntimeError, match="second derivative"):
            mx.eval(mx.grad(lambda dh: dx(dh, "numpy"))(dh))


def test_forward_mode_is_right_or_refused():
    arrays, loss = small()
    tangent = mx.array(np.random.default_rng(2).normal(size=(8, 2)), mx.float32)
    of_Wh = lambda engine: lambda Wh: loss(arrays[0], arrays[1], Wh, arrays[3], engine=engine)  # noqa: E731
    _, (along,) = mx.jvp(of_Wh("ops"), [arrays[2]], [tangent])
    np.testing.assert_allclose(along.item(), (mx.grad(of_Wh("ops"))(arrays[2]) * tangent).sum().item(), rtol=1e-4)
    with pytest.raises(RuntimeError, match="forward-mode"):
        mx.eval(mx.jvp(of_Wh("numpy"), [arrays[2]], [tangent]))


def test_two_gradients_of_one_forward():
    """A vjp called twice on one call's outputs, each time with other outputs used."""
    arrays, _ = small()

    def both(Wh):
        out = lstm(arrays[0], arrays[1], Wh, arrays[3], engine="numpy")
        return out.h.sum(), out.cT.sum()

    first, second = (mx.grad(lambda Wh, n=n: both(Wh)[n])(arrays[2]) for n in (0, 1))
    _, (total,) = mx.vjp(lambda Wh: list(both(Wh)), [arrays[2]], [mx.array(1.0), mx.array(1.0)])
    assert_trees_close([total], [first + second])


def test_bits_are_reproducible():
    arrays, loss = small()
    runs = [mx.grad(loss, argnums=(0, 1, 2, 3))(*arrays) for _ in range(2)]
    for left, right in zip(*runs, strict=True):
        np.testing.assert_array_equal(np.array(left), np.array(right))


def test_float64_is_truly_double():
    case, cotangents = draw_away_from_kinks(8, sizes=(20, 3, 4, 5, 5))
    ref = forward(**case) | backward(case, cotangents)
    for engine in ENGINES:
        outputs, gradients = run(case, engine, np.float64, cotangents)
        for name, value in (outputs | gradients).items():
            assert_within(name, value, ref[name], 1e-12 * max(1, np.abs(ref[name]).max()))


def test_sizes_are_those_of_the_docstring():
    T, B, _, H, P = SIZES
    case = draw(np.random.default_rng(0), projection=True)
    shapes = {"h": (T, B, P), "c": (T, B, H), "gates": (T, B, 4 * H), "hT": (B, P), "cT": (B, H)}
    for engine in ENGINES:
        assert {name: value.shape for name, value in run(case, engine, np.float32)[0].items()} == shapes
    assert lstm(*(to_mlx(case[name], np.float32) for name in ("x", "Wx")), mx.zeros((4 * H, H))).gates is None


def test_works_under_nn_value_and_grad():
    class Model(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            (_, self.Wx, self.Wh, self.b), _ = small()

        def __call__(self, x):
            return lstm(x, self.Wx, self.Wh, self.b).h

    model, (arrays, _) = Model(), small()
    _, gradients = mlx.nn.value_and_grad(model, lambda x: model(x).sum())(arrays[0])
    expected = mx.grad(lambda Wh: lstm(arrays[0], arrays[1], Wh, arrays[3]).h.sum())(arrays[2])
    assert_trees_close([gradients["Wh"]], [expected])
