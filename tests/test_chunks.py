"""Tests of sequences that are divided into chunks of time steps: gradients that recompute steps, and long sequences
that are evaluated chunk by chunk."""

from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from assertions import assert_close, assert_within
from cases import BOTH, CELLS, KINDS, OPTIONS, combination, draw_away_from_kinks, judge, run, split, to_mlx
from kernel_calls import Path, check, usual_call
from on_metal import BATCHES, in_turns, matrices_from, on_metal, on_one_engine, options_at

from mlx_lstm import cudnn, gru, lstm, mpsgraph, rnn, tf
from mlx_lstm import nn as ours
from mlx_lstm import torch as theirs
from mlx_lstm.engines import METAL_ENGINES, choice, chunks
from mlx_lstm.engines.cells import RNNCell
from mlx_lstm.engines.problem import Problem, limited
from mlx_lstm.lab.timing.worker import PeakMemory, release_memory
from mlx_lstm.oracle import ARRAYS, backward, forward

EVERY_OPTION = OPTIONS | CELLS | BOTH
ENGINES = ["numpy", "ops", "stepwise", "fused"]
WAYS = ["evaluated", "lazy"]


def where(engine):
    """Return a context manager in which an engine can run: the Metal emulator for a Metal engine, otherwise an empty
    context."""
    return on_metal() if engine in METAL_ENGINES else nullcontext()


def evaluating(way):
    """Return a context manager that sets how chunks are evaluated. If `way` is "evaluated", chunks are evaluated one
    by one, even in short sequences. Otherwise all chunks form one lazy graph."""
    return limited(unchunked=0 if way == "evaluated" else 10**6)


def assert_right(case, cotangents, engine, dtype=np.float32, **emulator):
    """Assert that an engine's outputs and gradients agree with the float64 oracle within derived error bounds."""
    case = {n: v.astype(dtype) if n in ARRAYS and v is not None else v for n, v in case.items()}
    cotangents = {name: value.astype(dtype) for name, value in cotangents.items()}
    known = {name: value for name, value in case.items() if name != "checkpoint_every"}
    ref, limit = judge(known, dtype, cotangents)
    outputs, gradients = run(case, engine, dtype, cotangents)
    assert set(gradients) == {name for name in ARRAYS if case.get(name) is not None}
    for name, value in (outputs | gradients).items():
        assert value.dtype == dtype, name
        assert_within(f"{engine}, {name}", value, ref[name], limit[name])


def every_so_many(values, rarely):
    """Return pytest parameters made from tuples of values. A default run takes every `rarely`-th parameter. The
    other parameters are marked slow."""
    return [pytest.param(*v, marks=[] if n % rarely == 0 else pytest.mark.slow) for n, v in enumerate(values)]


RUNS = [("numpy", "evaluated"), ("ops", "evaluated"), ("ops", "lazy")]
TURNS = [(option, *run) for n, option in enumerate(EVERY_OPTION) for run in RUNS[n % 3 :] + RUNS[: n % 3]]


@pytest.mark.parametrize("option, engine, way", every_so_many(TURNS, 3))
def test_each_option_alone(option, engine, way):
    """Each single option gives the right results if the sequence is divided into two or four chunks. The last chunk
    may be shorter than the others."""
    number = list(EVERY_OPTION).index(option)
    case, cotangents = draw_away_from_kinks(1, **EVERY_OPTION[option])
    with evaluating(way):
        assert_right(case | {"checkpoint_every": (3, 1, "auto")[number // 3 % 3]}, cotangents, engine)


@pytest.mark.parametrize("option", every_so_many([(option,) for option in EVERY_OPTION], 11))
def test_each_option_in_sequences_that_are_cut_for_their_length(option):
    """Each option gives the right results in a sequence that the engine divides into chunks because the sequence is
    long. The gradient computes no step again, because each chunk saves all its values."""
    with evaluating("evaluated"), patch.object(choice, "GATES", {"ops": 1}):
        assert_right(*draw_away_from_kinks(1, **EVERY_OPTION[option]), "ops")


# Each cell, norms, one direction and both, each product, each way of the division, a shorter last chunk. Each call is
# one of test_kernel_paths.py, so most of its kernels are compiled once for both files: arrays of chunks of three steps
# have at least 8 elements, too.
@pytest.mark.parametrize(
    "path, row, every, way",
    [
        (Path("fused", "lanes", True), "lstm", 3, "evaluated"),
        (Path("fused", "matrices", False), "lstm", None, "evaluated"),
        (Path("fused", "lanes", False), "gru", 3, "lazy"),
        (Path("fused", "lanes", False), "gru_before", 1, "evaluated"),
        (Path("fused", "lanes", True), "rnn, norm", 3, "lazy"),
        (Path("stepwise", "tiles", False), "rnn", 4, "lazy"),
        (Path("stepwise", "lanes", False), "gru, norm", 3, "evaluated"),
        (Path("stepwise", "tiles", False), "gru_before", None, "evaluated"),
        (Path("stepwise", "lanes", True), "lstm", 3, "evaluated"),
        (Path("stepwise", "packed tiles", False), "lstm", 4, "lazy"),
    ],
    ids=str,
)
def test_options_crossed_on_metal(path, row, every, way):
    """Combined options give the right results on Metal engines, both for chunks that are recomputed and for chunks
    that are saved. The chunks are evaluated together or one by one."""
    few = patch.object(choice, "GATES", {"fused": 24, "stepwise": 24})
    with nullcontext() if every else few, evaluating(way):
        check(path, row, **({"checkpoint_every": every} if every else {}))


@pytest.mark.slow
@pytest.mark.parametrize("engine, option, B", in_turns(on_one_engine(EVERY_OPTION)[::2], BATCHES))
def test_every_second_option_on_metal(engine, option, B):
    """Every second option is right in chunks on one of the engines. All engines share the code that cuts the arrays of
    an option, and `test_each_option_alone` runs each."""
    check_on_metal(list(EVERY_OPTION).index(option) + (engine == "fused"), engine, options_at(option, B), B)


def check_on_metal(number, engine, options, B):
    """Assert that a Metal engine gives the right results. `number` selects how the sequence is divided, and whether
    its chunks are evaluated one by one."""
    case, cotangents = draw_away_from_kinks(1, sizes=(4, B, 3, 2, 3), **options)
    every = (3, 2, None)[number % 3]
    few = patch.object(choice, "GATES", {"fused": 8 * B, "stepwise": 8 * B})
    with on_metal(), matrices_from(9), few, evaluating(WAYS[number % 2] if every else "evaluated"):
        assert_right(case | ({"checkpoint_every": every} if every else {}), cotangents, engine)


DRAWN = [
    pytest.param(kind, engine, seed, marks=pytest.mark.slow if seed or engine in METAL_ENGINES else [])
    for kind in KINDS
    for engine in ENGINES
    for seed in range(1 if engine in METAL_ENGINES else 4)
]


@pytest.mark.parametrize("kind, engine, seed", DRAWN)
def test_random_combinations(kind, engine, seed):
    """Random combinations of options, in chunks of a random length, give the right results."""
    sizes, rng = (5, 3, 2, 3, 3), np.random.default_rng([seed, ENGINES.index(engine), *kind.encode()])
    options = combination(rng, sizes, **KINDS[kind])
    options["activations" if kind[0] != "r" else "activation"] = {
        "lstm": ("sigmoid", "hard_sigmoid", "tanh", "sigmoid", "tanh"),
        "gru": ("sigmoid", "hard_sigmoid", "tanh"),
        "rnn": "sigmoid",
    }[kind[:4].rstrip("_")]
    options |= {"projection": False, "projection_clip": None} if engine == "fused" and kind.startswith("lstm") else {}
    case, cotangents = draw_away_from_kinks(seed, sizes=sizes, **options)
    given = {name: cotangents[name] for name in list(cotangents)[rng.integers(3) :]}
    with where(engine):
        assert_right(case | {"checkpoint_every": int(rng.integers(1, 6))}, given, engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("option", ["plain", "lengths_reverse", "gru", "lstm_both"])
def test_half_precision(option, dtype, engine, way):
    """In float16 and bfloat16, an engine with chunks has at most twice the error of a NumPy computation in the same
    dtype without chunks. The error is the distance from the float64 result."""
    import ml_dtypes

    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    case, cotangents = draw_away_from_kinks(5, dtype=dtype, **(OPTIONS | KINDS)[option])
    ref = forward(**case) | backward(case, cotangents)
    same = forward(**case, dtype=dtype) | backward(case, cotangents, dtype=dtype)
    with evaluating(way):
        outputs, gradients = run(case | {"checkpoint_every": 2}, engine, dtype, cotangents)
    for name, value in (outputs | gradients).items():
        assert_close(name, value, same[name], ref[name])


WHOLE = list(product(["plain", "lengths_reverse", "gru", "rnn", "lstm_both"], ["numpy", "ops"]))


@pytest.mark.parametrize("option, engine", every_so_many(WHOLE, 3))
def test_outputs_are_those_of_one_piece(option, engine):
    """A sequence divided into several launches gives the same outputs as a single launch, up to rounding."""
    case, _ = draw_away_from_kinks(
        3,
        sizes=(7, 3, 2, 5, 5),
        dtype=np.float32,
        **(OPTIONS | KINDS)[option] | ({"lengths": [7, 2, 0]} if "lengths" in option else {}),
    )
    # Not bit for bit: BLAS may round a product of fewer rows differently.
    assert_of_one_piece(case, engine, lambda *given, err_msg: np.testing.assert_allclose(*given, 1e-7, 1e-6))


@pytest.mark.parametrize("engine, row, B", [("fused", "gru", 3), ("stepwise", "rnn", 9)])
def test_outputs_are_those_of_one_piece_to_the_bit(engine, row, B):
    """On Metal they are the same bit for bit. The kernels are those of test_kernel_paths.py."""
    case, _ = usual_call(engine, row, (7, B, 2, 12, 12), dtype=np.float32, reverse=row == "rnn")
    assert_of_one_piece(case, engine, np.testing.assert_array_equal)


def assert_of_one_piece(case, engine, same):
    cotangents = {name: np.ones_like(value, np.float32) for name, value in forward(**case).items()}
    with where(engine):
        whole, _ = run(case, engine, np.float32, cotangents)
        parts, _ = run(case | {"checkpoint_every": 3}, engine, np.float32, cotangents)
        with evaluating("evaluated"), patch.dict(choice.GATES, dict.fromkeys(choice.GATES, 60)):
            long, _ = run(case, engine, np.float32, cotangents)
    for name, value in whole.items():
        same(parts[name], value, err_msg=name)
        same(long[name], value, err_msg=name)


@pytest.mark.parametrize("engine, dtype", [("ops", "float32"), ("numpy", "float16"), ("numpy", "bfloat16")])
def test_a_reversed_view(engine, dtype):
    """A reversed view of x is divided into chunks like any other array. In NumPy such a view has negative strides,
    which MLX does not accept."""
    draw = lambda *shape: mx.random.normal(shape).astype(getattr(mx, dtype))  # noqa: E731
    x, Wx, Wh = draw(7, 2, 3), draw(8, 3), draw(8, 2)
    with mx.stream(mx.cpu), limited(unchunked=0):
        call = lambda x: lstm(x, Wx, Wh, engine=engine, checkpoint_every=3).h.astype(mx.float32).sum()  # noqa: E731
        whole = mx.contiguous(x[::-1])
        for got, expected in ((call(x[::-1]), call(whole)), (mx.grad(call)(x[::-1]), mx.grad(call)(whole))):
            np.testing.assert_array_equal(*(np.array(a.astype(mx.float32)) for a in (got, expected)))


@pytest.mark.filterwarnings("error")
def test_sums_over_chunks_overflow_without_a_warning():
    """The gradients of two chunks, 2e38 each, add up to infinity in float32, and no warning is shown."""
    x, Wx, Wh = mx.ones((2, 1, 1)), mx.ones((1, 1)), mx.zeros((1, 1))
    with mx.stream(mx.cpu), limited(unchunked=0):
        call = lambda W: rnn(x, W, Wh, activation="identity", engine="ops", checkpoint_every=1).h  # noqa: E731
        (gradient,) = mx.vjp(lambda W: [call(W)], [Wx], [mx.full((2, 1, 1), 2e38)])[1]
        assert gradient.item() == np.inf


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ["numpy", "ops", pytest.param("fused", marks=pytest.mark.slow)])
def test_sums_over_chunks_of_16_bits_have_more_digits(engine, way):
    """The gradients of 16-bit weights are added up over chunks in float32. In float16 the sum 2048 + 1 would be
    rounded to 2048. MLX computes the gradients of weights for both Metal engines."""
    cotangent = mx.array([1.0, 1, 1, 1, 2048], mx.float16).reshape(5, 1, 1)  # the backward pass adds 2048 first
    x, Wx, Wh, b = (make(shape, mx.float16) for make, shape in zip(MAKERS, SHAPES, strict=True))
    with where(engine) if engine in METAL_ENGINES else mx.stream(mx.cpu), evaluating(way):
        call = lambda Wx, b: rnn(x, Wx, Wh, b, activation="identity", engine=engine, checkpoint_every=1).h  # noqa: E731
        for gradient in mx.vjp(lambda *arrays: [call(*arrays)], [Wx, b], [cotangent])[1]:
            assert gradient.item() == 2052


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ["numpy", "ops"])
def test_sums_over_chunks_and_directions_have_more_digits(engine, way):
    """Both directions read one mask. The sum of its gradients over the chunks of both is rounded once to 16 bits."""
    # A mask of 0 and a cell without activation: h is x, all ones, and the mask's gradient is the sum of the cotangents
    # after a direction's first step. It is 1 + 2048 for the forward direction and 1 for the other.
    cotangent = mx.array([[0, 0], [1, 1], [2048, 0]], mx.float16)[:, None]
    x, Wx, Wh, mask = (mx.ones(shape, mx.float16) for shape in ((3, 1, 1), (2, 1), (2, 1, 1), (1, 1)))
    options = {"bidirectional": True, "activation": "identity", "engine": engine, "checkpoint_every": 1}
    with mx.stream(mx.cpu), evaluating(way):
        call = lambda mask: rnn(x, Wx, Wh, mask=mask, **options).h  # noqa: E731
        (gradient,) = mx.vjp(lambda mask: [call(mask)], [0 * mask], [cotangent])[1]
        assert gradient.item() == 2050


MAKERS, SHAPES = (mx.ones, mx.ones, mx.zeros, mx.zeros), ((5, 1, 1), (1, 1), (1, 1), (1,))
"""Functions with which the test above makes x, Wx, Wh and b, and the shapes of these arrays."""


@pytest.mark.parametrize("op", ["lstm", "gru", "rnn"])
def test_a_sequence_that_ends_between_two_chunks(op):
    """In the reverse direction, a sequence of the batch starts from its initial state at its last real step. The
    test has sequences whose last real step is inside a chunk, and others where it is the last step of a chunk."""
    case, cotangents = draw_away_from_kinks(6, sizes=(6, 4, 2, 3, 3), op=op, reverse=True, lengths=[2, 4, 6, 3])
    assert_right(case | {"checkpoint_every": 2}, cotangents, "numpy")


# --- MLX's transformations -------------------------------------------------------------------------------------------


def small(kind, **options):
    """Return (arrays, loss) of a small case in float64. `loss` is a function of the arrays that depends on all
    outputs of the recurrence."""
    case, cotangents = draw_away_from_kinks(9, sizes=(4, 2, 2, 2, 2), **KINDS[kind])
    op, arrays, more = split(case)
    weights = {name: to_mlx(array, np.float64) for name, array in cotangents.items() if name != "gates"}

    def loss(*values, **changes):
        given = dict(zip(arrays, values, strict=True)) | more | options | changes
        out = {"lstm": lstm, "gru": gru, "rnn": rnn}[op](**given)
        return sum((getattr(out, name) * weight).sum() for name, weight in weights.items()) + (out.hT * out.hT).sum()

    return [to_mlx(array, np.float64) for array in arrays.values()], loss


def gradient(loss, count):
    return mx.grad(loss, argnums=tuple(range(count)))


def assert_same(got, expected):
    for left, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.array(left), np.array(right), rtol=1e-11, atol=1e-12)


GRAPHS = [(kind, *run) for kind in ("lstm", "gru", "lstm_both") for run in product([2, None], WAYS)]


@pytest.mark.parametrize("kind, every, way", every_so_many(GRAPHS, 3))
def test_transformations_of_ops(kind, every, way):
    """With engine `ops`, a sequence in chunks gives the right results under second derivatives, forward mode,
    compile and checkpoint, and under vmap inside and outside a gradient."""
    with mx.stream(mx.cpu):
        arrays, loss = small(kind, engine="ops")
        n = len(arrays)

        def values(**options):
            one = lambda *a: loss(*a, **options)  # noqa: E731
            first = gradient(one, n)
            steep = lambda *a: sum((g * g).sum() for g in first(*a))  # noqa: E731
            stack = [mx.stack([a, 2 * a]) for a in arrays]
            yield gradient(steep, n)(*arrays)
            yield mx.jvp(one, arrays, [mx.cos(a) for a in arrays])[1]
            yield mx.jvp(first, arrays, [mx.cos(a) for a in arrays])[1]
            yield mx.vmap(first)(*stack)
            yield gradient(lambda *a: mx.vmap(one)(*a).sum(), n)(*stack)
            yield mx.compile(first)(*arrays)
            yield gradient(mx.checkpoint(one), n)(*arrays)

        with evaluating("lazy"):
            expected = list(values())
        with evaluating(way), patch.dict(choice.GATES, {"ops": 1}):
            for got, right in zip(values(checkpoint_every=every), expected, strict=True):
                assert_same(got, right)


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_transformations_of_numpy(kind):
    """With engine `numpy` and a sequence in chunks, gradients, compile and vmap give the right results. Second
    derivatives and forward mode raise an error."""
    with mx.stream(mx.cpu):
        arrays, loss = small(kind)
        n, every = len(arrays), {"checkpoint_every": 2}
        right = gradient(loss, n)(*arrays)
        assert_same(gradient(lambda *a: loss(*a, **every), n)(*arrays), right)
        assert_same(mx.compile(gradient(lambda *a: loss(*a, **every), n))(*arrays), right)
        stack = [mx.stack([2 * a, a]) for a in arrays]
        assert_same([g[1] for g in mx.vmap(gradient(lambda *a: loss(*a, **every), n))(*stack)], right)
        pull = lambda d: mx.vjp(lambda *a: loss(*a, **every), arrays, [d])[1]  # noqa: E731
        assert_same([g[1] for g in mx.vmap(pull)(mx.array([2.0, 1.0], mx.float64))], right)
        steep = lambda *a: sum((g * g).sum() for g in gradient(lambda *a: loss(*a, **every), n)(*a))  # noqa: E731
        with pytest.raises(RuntimeError, match="second derivative"):
            mx.eval(gradient(steep, n)(*arrays))
        with pytest.raises(RuntimeError, match="forward-mode"):
            mx.eval(mx.jvp(lambda *a: loss(*a, **every), arrays, arrays))


# --- Peak memory of calls in chunks ----------------------------------------------------------------------------------


def peak_of(function):
    """Return by how many bytes MLX's peak memory during a call exceeds the memory in use before the call."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(function())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("engine, T", [("numpy", 400), ("ops", 400), ("compiled", 400)])
def test_little_is_kept(engine, T):
    """With `checkpoint_every`, a gradient that needs only h keeps little in memory: h, dx and one chunk of steps.
    The unused output c is freed, except in a compiled graph."""
    B, H, compiled = 8, 16, engine == "compiled"
    x, Wx, Wh, dh = (mx.random.normal(shape) for shape in ((T, B, H), (4 * H, H), (4 * H, H), (T, B, H)))
    mx.eval(x, Wx, Wh, dh)

    def step(every):
        call = lambda *a: lstm(*a, engine="ops" if compiled else engine, checkpoint_every=every).h  # noqa: E731
        pull = lambda *a: mx.vjp(call, list(a), [dh])  # noqa: E731
        return (mx.compile(pull) if compiled else pull)(x, Wx, Wh)

    with mx.stream(mx.cpu):
        few, all_of_it = peak_of(lambda: step("auto")), peak_of(lambda: step(None))
    # The unit of memory is an array of the size of x [T, B, H]. Memory holds h and dx (one unit each), c in a compiled
    # graph (one unit), and one chunk of steps. With `numpy` a chunk has T / 8 steps, and a step has 4 arrays of the
    # size of h: 4 / 8 units. With `ops` a chunk has at most sqrt(T) steps, and a step has 16 arrays that are 4 times as
    # large as h. The factor 1.25 covers all other memory.
    of_chunk = 4 / 8 if engine == "numpy" else 16 * 4 / T**0.5
    assert few < 1.25 * (2 + compiled + of_chunk) * x.nbytes
    # `few` and `all_of_it` are the largest memory with and without `checkpoint_every`. Without it, engine `numpy` saves
    # most arrays in NumPy's memory, which MLX does not count. Therefore this test asks only for a tenth less memory.
    assert few < 0.9 * all_of_it


def test_long_sequences_of_ops_take_little_beside_what_is_kept():
    """Engine `ops` never builds a graph of all steps of a long sequence. The test measures the memory of the whole
    process, because MLX's count does not include the memory of graphs."""
    T = 2000
    x, Wx, Wh = mx.random.normal((T, 1, 2)), mx.random.normal((8, 2)), mx.random.normal((8, 2))
    mx.eval(x, Wx, Wh)
    release_memory()
    memory = PeakMemory()
    with mx.stream(mx.cpu):
        mx.eval(mx.grad(lambda x: lstm(x, Wx, Wh, engine="ops").h.sum())(x))
    assert memory.above_start()[0] < 40e6  # a graph of all steps would take 80 MB


# --- Layers and vendors' ops pass `checkpoint_every` on --------------------------------------------------------------


@pytest.mark.parametrize("make", [ours.LSTM, ours.GRU, ours.RNN, theirs.LSTM, theirs.GRU, theirs.RNN])
def test_layers_pass_it_on(make):
    """Layers pass the option `checkpoint_every` on to the recurrence, whether it is set in the constructor or later.
    The gradients stay the same."""
    mx.random.seed(1)
    layer, x = make(3, 4), mx.random.normal((5, 9, 3))

    def gradients():
        loss = lambda x: mlx.utils.tree_flatten(layer(x))[0][1].sum()  # noqa: E731
        return [mx.grad(loss)(x), *mlx.utils.tree_flatten(mlx.nn.value_and_grad(layer, loss)(x)[1])]

    right, seen, build = gradients(), [], chunks.Chunked.__init__
    layer.checkpoint_every = "auto"
    with patch.object(
        chunks.Chunked, "__init__", lambda self, cut, *a, **b: (seen.append(cut), build(self, cut, *a, **b))[1]
    ):
        found = gradients()
    assert seen and all(cut.recomputes for cut in seen)
    for got, expected in zip(found, right, strict=True):
        got, expected = (pair[1] if isinstance(pair, tuple) else pair for pair in (got, expected))
        np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-5, atol=1e-6)
    assert make(3, 4, checkpoint_every=7).checkpoint_every == 7
    with pytest.raises(ValueError, match=r"checkpoint_every must be a number of steps .* but got 0\."):
        make(3, 4, checkpoint_every=0)


def test_a_stack_of_layers_takes_that_of_each_or_of_the_call():
    layers, x = [ours.GRU(3, 4, checkpoint_every=2), ours.GRU(4, 4)], mx.random.normal((2, 9, 3))
    right, seen, build = mx.grad(lambda x: ours.stack(layers, x)[0].sum())(x), [], chunks.Chunked.__init__
    with patch.object(
        chunks.Chunked, "__init__", lambda self, cut, *a, **b: (seen.append(cut), build(self, cut, *a, **b))[1]
    ):
        for every in (None, 3):
            got = mx.grad(lambda x, every=every: ours.stack(layers, x, checkpoint_every=every)[0].sum())(x)
            np.testing.assert_allclose(np.array(got), np.array(right), rtol=1e-5, atol=1e-6)
    assert [cut.steps for cut in seen] == [2, 3, 3]


T, N, H = 7, 2, 3
DIALECTS = ["block_lstm", "block_lstm_v2", "cudnn_rnn", "cudnn_rnn_v2", "cudnn_rnn_v3"]
DIALECTS += [f"{op}{' training' * training}" for op in ("lstm", "gru", "single_gate_rnn") for training in (0, 1)]


def of_dialect(name):
    """Return (function, op name in error messages) for an op in the style of TensorFlow, cuDNN or MPSGraph. The
    function takes x [T, N, H]; all other arrays of the op are fixed random float64 arrays."""
    rng, (op, _, training) = np.random.default_rng(2), name.partition(" ")
    array = lambda *shape: to_mlx(rng.normal(0, 0.5, shape), np.float64)  # noqa: E731
    if op.startswith("block"):
        given = *array(2, N, H), array(2 * H, 4 * H), *array(3, H), array(4 * H)
        return lambda x, **more: getattr(tf, op)(T - 1, x, *given, cell_clip=0.4, use_peephole=True, **more), op
    if op.startswith("cudnn"):
        given = array(4, N, H), array(4, N, H), array(2 * 8 * H * (2 * H + 1 + 1) + 8 * H * H)
        given += ([T, 2],) * op.endswith("v3")
        more = {"direction": "bidirectional", "dropout": 0.4, "seed": 3}
        return lambda x, **every: getattr(cudnn, op)(x, *given, **more, **every)[:3], op
    G, kind = {"lstm": (4, "LSTM"), "gru": (3, "GRU"), "single_gate_rnn": (1, "SingleGateRNN")}[op]
    descriptor = getattr(mpsgraph, f"{kind}Descriptor")(training=bool(training), bidirectional=True)
    R, given = array(2, G * H, H), {"input_weight": array(2 * G * H, H), "bias": array(2 * G * H)}
    given |= {"mask": mx.abs(array(N, 2 * H)), "descriptor": descriptor}
    return lambda x, **every: getattr(mpsgraph, op)(x, R, **given, **every), f"mpsgraph.{op}"


@pytest.mark.parametrize("name", DIALECTS)
def test_dialects_pass_it_on(name):
    """The ops in the style of TensorFlow, cuDNN and MPSGraph pass the option `checkpoint_every` on to the
    recurrence. The gradients equal those without the option, with the same dropout."""
    with mx.stream(mx.cpu):
        (call, op), x, seen, build = of_dialect(name), mx.ones((T, N, H), mx.float64), [], chunks.Chunked.__init__
        loss = lambda x, **more: sum((mx.cos(mx.arange(a.size)) * a.flatten()).sum() for a in call(x, **more))  # noqa: E731
        right = mx.grad(loss)(x)
        with patch.object(
            chunks.Chunked, "__init__", lambda self, cut, *a, **b: (seen.append(cut), build(self, cut, *a, **b))[1]
        ):
            found = [mx.grad(lambda x, every=every: loss(x, checkpoint_every=every))(x) for every in (2, "auto")]
    assert {(cut.steps, cut.recomputes) for cut in seen} == {(2, True), (3, True)}
    assert_same(found, [right, right])
    with pytest.raises(ValueError, match=rf"^\[{op}\] checkpoint_every must be a number of steps .* but got 0\.$"):
        call(x, checkpoint_every=0)


def test_a_stack_of_a_dialect_keeps_little():
    T, N, H, L = 400, 8, 16, 3
    x, states = mx.random.normal((T, N, H)), mx.zeros((L, N, H))
    params = mx.random.normal((cudnn.cudnn_rnn_params_size(L, H, H).item(),))
    mx.eval(x, states, params)

    def step(every):
        call = lambda p: cudnn.cudnn_rnn(x, states, states, p, dropout=0.5, checkpoint_every=every).output.sum()  # noqa: E731
        return mx.grad(call)(params)

    with mx.stream(mx.cpu):
        few, all_of_it = peak_of(lambda: step("auto")), peak_of(lambda: step(None))
    # The unit of memory is an array of the size of h [T, N, H]. Each of the L layers needs three such arrays: h, its
    # gradient and the gradient of the layer's input. Dropout needs three more between two layers. One chunk of T / 8
    # steps needs 4 arrays per step, two of c and two of h: 4 / 8 units. The factor 1.25 covers all other memory.
    assert few < 1.25 * (3 * L + 3 * (L - 1) + 4 / 8) * x.nbytes
    assert few < 0.6 * all_of_it


@pytest.mark.parametrize("every", [0, -1, True, 2.0, "sqrt", [3]])
def test_a_wrong_number_is_refused(every):
    for op in (lstm, gru, rnn):
        with pytest.raises(
            ValueError, match=r"^\[\w+\] checkpoint_every must be a number of steps of at least 1, 'auto'"
        ):
            op(mx.ones((3, 2, 1)), None, mx.ones((1, 1)), checkpoint_every=every)


def test_what_auto_is():
    """The value "auto" of `checkpoint_every` divides T time steps into chunks of about sqrt(T) steps. With engine
    `ops`, a chunk has a quarter of these steps. With engine `numpy`, a chunk has max(sqrt(T), min(n, T / 8)) steps,
    where n is the number of steps that fill one matrix product."""

    def chosen(engine, T, B, width, every):
        """Return the chunks that are chosen for a plain RNN cell (one gate) whose input and hidden size are `width`."""
        return choice.chunks_of(engine, Problem(T, B, width, width, RNNCell()), every)

    assert [chosen("fused", T, 2, 8, "auto").steps for T in (1, 2, 9, 10, 4096)] == [1, 2, 3, 4, 64]
    numpy = [chosen("numpy", T, B, 8, "auto").steps for T, B in [(9, 1), (512, 16), (512, 64), (9000, 1)]]
    assert numpy == [3, 64, 23, 1024]
    assert chosen("numpy", 5, 2, 8, 9).steps == 5
    assert chosen("ops", 4096, 2, 8, "auto").steps == 16
    assert [chosen(engine, 4096, 2, 8, None) for engine in ("numpy", "stepwise", "fused")] == [None] * 3
    assert chosen("fused", 10**5, 4, 2**12, None) == (1024, False, True)
