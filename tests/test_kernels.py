"""The Metal engines, their shaders executed by the emulator, against the float64 oracle. Every output starts as NaN."""

import re
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import patch

import ml_dtypes
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from cases import (
    OPTIONS,
    OUTPUTS,
    ROUNDING_MARGIN,
    combination,
    draw,
    draw_away_from_kinks,
    draw_cotangents,
    run,
    to_mlx,
)
from closeness import assert_close, assert_within, bounds
from hypothesis import given, settings
from hypothesis import strategies as st
from metal_emulator import coverage
from mlx.utils import tree_flatten
from on_metal import WEIGHTS, on_metal
from oracle import ARRAYS, backward, forward

from mlx_lstm import engine_fused, kernels, lstm, recurrence
from mlx_lstm.cells import LSTMCell
from mlx_lstm.engines import FUSED_LIMIT
from mlx_lstm.problem import Problem

ENGINES = ("fused", "stepwise")
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# By batch size the kernels change their ways: rows per threadgroup, and the product in lanes or in matrices.
BATCHES = (1, 2, 9)

SHADERS = {path.name: path.read_text() for path in (Path(__file__).parents[1] / "metal").glob("*.metal")}


def options_at(option, B):
    """An entry of OPTIONS, written for a batch of 2, for a batch of B."""
    options = dict(OPTIONS[option])
    if "lengths" in options:
        options["lengths"] = (options["lengths"] * B)[:B]
    if "mask" in options:
        options["mask"] = tuple(B if size == 2 else size for size in options["mask"])
    return options


def can_run(engine, options):
    return engine == "stepwise" or not options.get("projection")


def pairs(options=OPTIONS):
    return [(engine, option) for engine in ENGINES for option in options if can_run(engine, OPTIONS[option])]


def check(case, engine, cotangents, **emulator):
    """Outputs and gradients within the bounds derived from the case, in float32. Returns them and the launches."""
    case = {n: v.astype(np.float32) if n in ARRAYS and v is not None else v for n, v in case.items()}
    cotangents = {name: value.astype(np.float32) for name, value in cotangents.items()}
    ref = forward(**case) | backward(case, cotangents)
    limit = bounds(case, np.float32, cotangents)
    with on_metal(**emulator) as log:
        outputs, gradients = run(case, engine, np.float32, cotangents)
    assert set(gradients) == {name for name in ARRAYS if case.get(name) is not None}
    for name, value in (outputs | gradients).items():
        assert value.dtype == np.float32, name
        assert_within(name, value, ref[name], limit[name])
    return outputs | gradients, log


@pytest.mark.parametrize("B", BATCHES)
@pytest.mark.parametrize("engine, option", pairs())
def test_each_option_alone(engine, option, B):
    options = options_at(option, B)
    check(*with_engine(engine, draw_away_from_kinks(1, ROUNDING_MARGIN, sizes=(4, B, 3, 2, 3), **options)))


def with_engine(engine, drawn):
    case, cotangents = drawn
    return case, engine, cotangents


TILED = ("plain", "mask_0", "peephole_current", "lengths_reverse", "projection")


@pytest.mark.parametrize("word", HALVES)
@pytest.mark.parametrize(
    "engine, option, B", [(*pair, 2) for pair in pairs()] + [("stepwise", option, 9) for option in TILED]
)
def test_half_precision_is_no_worse_than_twice_its_formula(engine, option, B, word):
    dtype, options = HALVES[word], options_at(option, B)
    case, cotangents = draw_away_from_kinks(5, sizes=(4, B, 3, 5, 3), dtype=dtype, **options)
    ref = forward(**case) | backward(case, cotangents)
    same = forward(**case, dtype=dtype) | backward(case, cotangents, dtype=dtype)
    with on_metal():
        outputs, gradients = run(case, engine, dtype, cotangents)
    for name, value in (outputs | gradients).items():
        assert_close(name, value, same[name], ref[name])


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_output_alone(engine, output):
    """Gradients flow from one output while the others have none."""
    case, cotangents = draw_away_from_kinks(
        2, mask=("P",), peephole=True, lengths=[3, 0], projection=engine == "stepwise"
    )
    check(case, engine, {output: cotangents[output]})


SHAPES = [
    # T, B, I, H, P
    (1, 1, 1, 1, 1),
    (2, 1, 3, 1, 1),
    (1, 3, 2, 5, 2),
    (3, 4, 2, 33, 7),
    (2, 5, 3, 40, 9),
    (2, 8, 3, 9, 3),
    (2, 17, 2, 6, 3),
    (2, 33, 2, 12, 3),
    (2, 66, 2, 5, 3),
    (2, 2, 2, 100, 3),
]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_odd_shapes(engine, sizes):
    """One, primes, one more than a tile's edge, fewer than 8 elements, and every bound of the rows per threadgroup."""
    T, B = sizes[:2]
    options = {"mask": (T, B, "P"), "peephole": True, "reverse": True, "projection": engine == "stepwise"}
    check(*with_engine(engine, draw_away_from_kinks(3, ROUNDING_MARGIN, sizes=sizes, **options)))


@pytest.mark.parametrize("H, dtype", [(128, np.float32), (200, np.float16)])
def test_fused_with_weights_that_do_not_fit_in_registers(H, dtype):
    tiling = kernels.fused_tiling(2, H, np.dtype(dtype).itemsize, backward=False)
    assert tiling.resident < -(-H // (16 * tiling.units))
    rng = np.random.default_rng(0)
    case = draw(rng, sizes=(2, 2, 2, H, H), dtype=dtype)
    case |= {"Wh": (case["Wh"] / np.sqrt(H).astype(dtype)).astype(dtype)}
    cotangents = draw_cotangents(rng, forward(**case), dtype)
    ref = forward(**case) | backward(case, cotangents)
    same = forward(**case, dtype=dtype) | backward(case, cotangents, dtype=dtype)
    with on_metal():
        outputs, gradients = run(case, "fused", dtype, cotangents)
    for name, value in (outputs | gradients).items():
        assert_close(name, value, same[name], ref[name])


sizes = st.tuples(*(st.sampled_from(v) for v in ([1, 2, 3, 5], [1, 2, 3, 8, 17], [1, 3], [1, 2, 5], [1, 3])))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), sizes=sizes, shown=st.sets(st.sampled_from(OUTPUTS), min_size=1))
@pytest.mark.parametrize("engine", ENGINES)
def test_options_in_random_combination(engine, seed, sizes, shown):
    options = combination(np.random.default_rng(seed), sizes)
    options["projection"] &= engine == "stepwise"
    case, cotangents = draw_away_from_kinks(seed, ROUNDING_MARGIN, sizes=sizes, **options)
    check(case, engine, {name: cotangents[name] for name in shown})


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sizes=sizes, shown=st.sets(st.sampled_from(OUTPUTS), min_size=1))
@pytest.mark.parametrize("engine", ENGINES)
def test_options_in_many_random_combinations(engine, seed, sizes, shown):
    test_options_in_random_combination.hypothesis.inner_test(engine, seed, sizes, shown)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, [7, 2, 0]])
def test_fused_in_several_launches(monkeypatch, reverse, lengths):
    monkeypatch.setattr(engine_fused, "LAUNCH_STEPS", 3)
    options = {"sizes": (7, 3, 2, 5, 5), "reverse": reverse, "lengths": lengths, "mask": (7, 3, "P")}
    _, log = check(*with_engine("fused", draw_away_from_kinks(4, **options)))
    assert len(log) == 6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reverse", [False, True])
def test_what_lies_in_the_padding_is_never_used(engine, reverse):
    rng = np.random.default_rng(0)
    projection = engine == "stepwise"
    case = draw(rng, mask=(4, 2, "P"), lengths=[3, 0], reverse=reverse, projection=projection, dtype=np.float32)
    cotangents = draw_cotangents(rng, forward(**case), np.float32)
    with on_metal():
        clean = run(case, engine, np.float32, cotangents)
        for array in (case["x"], case["mask"], *(cotangents[name] for name in ("h", "c", "gates"))):
            array[3:, 0], array[:, 1] = np.nan, np.nan
        spoilt = run(case, engine, np.float32, cotangents)
    for before, after in zip(clean, spoilt, strict=True):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)


# --- Threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("B", (3, 18, 40))
@pytest.mark.parametrize("engine", ENGINES)
def test_the_order_of_threads_does_not_change_a_bit(engine, B):
    rng = np.random.default_rng(7)
    options = {"peephole": True, "mask": ("P",), "lengths": rng.integers(0, 4, B), "projection": engine == "stepwise"}
    case = draw(rng, sizes=(3, B, 2, 10, 4), dtype=np.float32, **options)
    cotangents = draw_cotangents(rng, forward(**case), np.float32)
    seen = []
    for order in ("forward", "reverse", "random", "random"):
        with on_metal(order=order, seed=len(seen)):
            seen.append(run(case, engine, np.float32, cotangents))
    for outputs, gradients in seen[1:]:
        for name, value in (outputs | gradients).items():
            np.testing.assert_array_equal(value, (seen[0][0] | seen[0][1])[name], err_msg=name)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_fused_stays_within_the_limits_of_metal(itemsize):
    """1024 threads and 32 KB of threadgroup memory, for all that the choice of engine lets through."""
    for H in range(1, FUSED_LIMIT + 1):
        for B in (1, 17, 65, 1000):
            for sweep in (False, True):
                tiling = kernels.fused_tiling(B, H, itemsize, backward=sweep)
                assert tiling.threads <= 1024 and 16 * tiling.state <= 32768
                assert tiling.threads * tiling.rows >= 4 * H


# --- What a launch costs ---------------------------------------------------------------------------------------------


def launches_of(sizes, engine, **options):
    rng = np.random.default_rng(0)
    case = draw(rng, sizes=sizes, dtype=np.float32, **options)
    cotangents = draw_cotangents(rng, forward(**case), np.float32)
    with on_metal() as log:
        run(case, engine, np.float32, {name: cotangents[name] for name in ("h", "hT", "cT")})
    return log


def graph_of(engine, T, projection=False, dtype=mx.float32):
    """Launches of both sweeps by MLX primitive, views left out; a join copies its inputs one by one."""
    B, I, H, P = 2, 3, 8, 4
    width = P if projection else H
    shapes = {"x": (T, B, I), "Wx": (4 * H, I), "Wh": (4 * H, width), "b": (4 * H,), "h0": (B, width), "c0": (B, H)}
    arrays = {
        name: mx.zeros(shape, dtype) for name, shape in shapes.items() | ({"Wp": (P, H)} if projection else {}).items()
    }
    problem, module = Problem(T, B, H, width, LSTMCell()), recurrence.ENGINE_MODULES[engine]

    def sweeps(*values):
        given = dict(zip(arrays, values, strict=True))
        saved = module.forward(problem, given)
        gradients = module.backward(problem, given, saved, {"h": saved["h"]})
        return [*saved.values(), *gradients.values()]

    nodes = []
    kernels.build.cache_clear()
    mx.export_function(nodes.append, sweeps, *arrays.values())
    views = ("Reshape", "Transpose", "Slice", "Squeeze", "ExpandDims", "Broadcast")
    count = Counter()
    for node in nodes:
        if node.get("type") == "primitive" and node["name"] not in views:
            count[node["name"]] += len(node["inputs"]) if node["name"] == "Concatenate" else 1
    return count


def test_launches_of_mlx_and_ours():
    """`fused`: at most 12, whatever T is. `stepwise`: at most 2T + 12, a projection one more per step and sweep, and
    what stacks the steps' outputs into sequences: copies, off the chain of steps that wait for each other."""
    for dtype in (mx.float32, mx.float16):
        assert graph_of("fused", 3, dtype=dtype) == graph_of("fused", 9, dtype=dtype)
        assert graph_of("fused", 9, dtype=dtype).total() <= 12
    for T in (3, 9):
        for projection in (False, True):
            count = graph_of("stepwise", T, projection)
            stacking = (5 if projection else 4) * T
            assert count.total() - stacking <= (4 if projection else 2) * T + 12, count


def test_launches():
    """One for a sweep of `fused`; one a step for `stepwise`, two with a projection, whose forward half is MLX's."""
    assert [len(launches_of((T, 2, 3, 4, 2), "fused")) for T in (1, 9)] == [2, 2]
    assert [len(launches_of((T, 2, 3, 4, 2), "stepwise")) for T in (1, 9)] == [2, 18]
    assert len(launches_of((9, 2, 3, 4, 2), "stepwise", projection=True)) == 27


@pytest.mark.parametrize("B", BATCHES)
def test_text_of_a_step_is_short(B):
    """MLX rebuilds and hashes the text at every call."""
    everything = {"peephole": True, "mask": (2, B, "P"), "lengths": [2] * B, "reverse": True}
    for projection in (False, True):
        log = launches_of((2, B, 3, 4, 2), "stepwise", projection=projection, **everything)
        assert max(launch.text_bytes for launch in log) <= 6 * 1024


@pytest.mark.parametrize("option", ["plain", "mask_0", "peephole_current"])
def test_fused_moves_hardly_more_than_every_array_once(option):
    log = launches_of((64, 2, 3, 32, 3), "fused", **({"mask": (64, 2, "P")} if option == "mask_0" else OPTIONS[option]))
    for launch in log:
        moved = launch.device_bytes(leave_out=WEIGHTS)
        floor = sum(buffer.size for name, buffer in launch.traffic.items() if name not in WEIGHTS)
        assert moved["bytes_read"] + moved["bytes_written"] <= 1.15 * floor, (launch.name, moved, floor)


# --- Around the kernels ----------------------------------------------------------------------------------------------


def test_every_line_of_the_shaders_runs():
    """Over what this process has run on the emulator: here, at least one case of each kind."""
    kinds = [(engine, (4, B, 3, 2, 3), options_at(option, B)) for engine, option in pairs() for B in BATCHES]
    for engine, sizes, options in [*kinds, ("fused", (1, 1, 1, 128, 128), {})]:
        case, cotangents = draw_away_from_kinks(1, ROUNDING_MARGIN, sizes=sizes, **options)
        cotangents = {name: value.astype(np.float32) for name, value in cotangents.items()}
        for shown in (OUTPUTS, ("h",)) if not options else (OUTPUTS,):
            with on_metal():
                run(case, engine, np.float32, {name: cotangents[name] for name in shown})
    report = coverage.report(SHADERS)
    assert all(file.executed for file in report.values())
    assert not any(file.missed for file in report.values()), coverage.format_report(report)


def test_kernels_are_in_an_exported_function(tmp_path):
    arrays = [mx.zeros(shape) for shape in ((3, 2, 4), (16, 4), (16, 4), (16,))]
    for engine in ENGINES:
        path = tmp_path / f"{engine}.mlxfn"
        names = exported_kernels(engine, arrays, path)
        assert names and all(name.startswith(f"custom_kernel_lstm_{engine}_forward") for name in names)
        assert f"lstm_{engine}_forward".encode() in path.read_bytes()


def exported_kernels(engine, arrays, path):
    """Writes the op into a file; the names of the kernels in the graph."""

    def op(*arrays):
        return lstm(*arrays, engine=engine, training=False).h

    nodes = []
    with (
        patch.object(recurrence, "current_device", lambda: "gpu"),
        patch.object(mx.metal, "is_available", lambda: True),
    ):
        kernels.build.cache_clear()
        mx.export_function(str(path), op, *arrays)
        mx.export_function(nodes.append, op, *arrays)
    return [node["arguments"][0] for node in nodes if node.get("name") == "CustomKernel"]


@pytest.mark.parametrize("engine", ENGINES)
def test_second_and_forward_mode_derivatives_are_refused(engine):
    case = draw(np.random.default_rng(0), dtype=np.float32)
    x, Wx, Wh = (to_mlx(case[name], np.float32) for name in ("x", "Wx", "Wh"))

    def of_Wh(Wh):
        return lstm(x, Wx, Wh, engine=engine).h.sum()

    with on_metal(), mx.stream(mx.cpu):
        with pytest.raises(RuntimeError, match=f"engine='{engine}' has no second derivative"):
            mx.eval(mx.grad(lambda Wh: (mx.grad(of_Wh)(Wh) ** 2).sum())(Wh))
        with pytest.raises(RuntimeError, match=f"engine='{engine}' has no forward-mode derivative"):
            mx.eval(mx.jvp(of_Wh, [Wh], [Wh]))


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_a_model_are_those_of_the_cpu_engine(engine):
    """The character model of examples/: its logits and every parameter's gradient, judged by the model in float64."""
    pytest.importorskip("rich")
    spec = spec_from_file_location("char_lm", Path(__file__).parents[1] / "examples" / "char_lm.py")
    char_lm = module_from_spec(spec)
    sys.modules["char_lm"] = char_lm  # where its NamedTuples look up their annotations
    spec.loader.exec_module(char_lm)
    char_lm.product = mx.matmul  # its own, through NumPy, would hand float64 back as float32
    rng = np.random.default_rng(0)
    codes, d = mx.array(rng.integers(0, 11, (3, 6))), rng.normal(size=(18, 11))

    def pass_through(word, dtype):
        mx.random.seed(0)
        model = char_lm.CharLM(11, char_lm.Settings(embedding=5, hidden=9, engine=word))
        model.set_dtype(dtype)
        state = tuple(array.astype(dtype) for array in model.zero_state(3))
        gradient = mlx.nn.value_and_grad(model, lambda model: (model(codes, state)[0] * mx.array(d, dtype)).sum())
        value, tree = gradient(model)
        return {"loss": np.array(value)} | {name: np.array(array) for name, array in tree_flatten(tree)}

    with mx.stream(mx.cpu):
        ref, same = pass_through("numpy", mx.float64), pass_through("numpy", mx.float32)
        with on_metal():
            got = pass_through(engine, mx.float32)
    assert len(got) == 7
    for name, value in got.items():
        assert_close(name, value, same[name], ref[name])


def test_metal_kernel_is_called_in_one_place():
    package = Path(kernels.__file__).parent
    calls = [path.name for path in package.rglob("*.py") if re.search(r"metal_kernel\(", path.read_text())]
    assert calls == ["kernels.py"]
