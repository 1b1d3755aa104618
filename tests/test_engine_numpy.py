"""Tests that engine `numpy` agrees with engine `ops` up to float64 rounding, for arrays with any strides and any
number of chunks. Other tests check the memory, the cache and the floating-point warnings of engine `numpy`."""

import gc
import sys
import tracemalloc
import weakref
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cases import combination, draw, poison_scratch, run, split
from mlx.nn import value_and_grad
from mlx.utils import tree_flatten

from mlx_lstm import gru, lstm, nn, rnn
from mlx_lstm.engines.cell_graph import Node
from mlx_lstm.engines.cells import HARD_SIGMOIDS, LSTMCell
from mlx_lstm.engines.numpy import passes as engine_numpy_passes
from mlx_lstm.engines.numpy import products as engine_numpy_products
from mlx_lstm.engines.numpy import ragged as engine_numpy_ragged
from mlx_lstm.engines.numpy import statements as engine_numpy_statements
from mlx_lstm.engines.numpy import steps as engine_numpy_steps
from mlx_lstm.engines.numpy import sweep as engine_numpy_sweep
from mlx_lstm.engines.numpy import threads as engine_numpy_threads
from mlx_lstm.engines.problem import Problem
from mlx_lstm.engines.sequences import tanh
from mlx_lstm.lab.cases import as_arguments
from mlx_lstm.oracle import ARRAYS
from mlx_lstm.recurrence import gru_gradients, lstm_gradients, rnn_gradients

OPS = {"lstm": (lstm, lstm_gradients), "gru": (gru, gru_gradients), "rnn": (rnn, rnn_gradients)}
SAVED = {"lstm": ("gates", "c", "h"), "gru": ("gates", "h"), "rnn": ("h",)}


def cut(array):
    """Return the array as a strided view (MLX, float64) of a larger array that has NaN between the elements."""
    wide = np.full([2 * n for n in array.shape], np.nan)
    wide[tuple(slice(None, None, 2) for _ in array.shape)] = array
    return mx.array(wide, mx.float64)[tuple(slice(None, None, 2) for _ in array.shape)]


def whole(array):
    return mx.array(array, mx.float64)


def spoil_padding(sequence, lengths):
    """Overwrite the padding of a sequence [T, B, features] with NaN, because no engine may read the padding."""
    if lengths is not None:
        sequence[np.arange(len(sequence))[:, None] >= np.array(lengths)] = np.nan


def assert_agrees(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        left, right = np.array(got[name]), np.array(expected[name])
        assert left.shape == right.shape, name
        bound = 1e-12 * max(1, np.abs(right).max(initial=0))
        np.testing.assert_allclose(left, right, rtol=0, atol=bound, err_msg=name)


def check(word, arrays, options, wanted=None, lay=whole, seed=0):
    """Assert that engines `numpy` and `ops` give the same outputs, the same gradients through `mx.vjp`, and the same
    results of the `*_gradients` ops. `wanted` names the outputs that have a cotangent; None means all outputs."""
    op, gradients_of = OPS[word]
    with mx.stream(mx.cpu):
        names, values = list(arrays), [lay(array) for array in arrays.values()]
        results = {}
        for engine in ("ops", "numpy"):
            rng = np.random.default_rng(seed)

            def call(*values, engine=engine):
                inputs = {"Wx": None} | dict(zip(names, values, strict=True))
                shows = wanted is None or "gates" in wanted
                out = op(**as_arguments(inputs | options), engine=engine, return_gates=shows)._asdict()
                return out if wanted is None else {name: out[name] for name in wanted}

            outputs = call(*values)
            cotangents = {name: rng.normal(size=out.shape) for name, out in outputs.items()}
            for name in cotangents.keys() & {"h", "c", "gates"}:
                spoil_padding(cotangents[name], options.get("lengths"))
            cotangents = {name: lay(array) for name, array in cotangents.items()}
            _, gradients = mx.vjp(lambda *values: list(call(*values).values()), values, list(cotangents.values()))
            results[engine] = outputs | {f"d{name}": g for name, g in zip(names, gradients, strict=True)}
            if wanted is None and options.get("norm") is None:  # the `*_gradients` ops have no layer normalisation
                saved = {name: lay(np.array(outputs[name])) for name in SAVED[word]}
                plain = {k: v for k, v in options.items() if k not in ("cell_clip", "forget_bias")}
                inputs = {"Wx": None} | dict(zip(names, values, strict=True)) | saved | plain
                inputs |= {f"d{name}": cotangent for name, cotangent in cotangents.items()}
                again = gradients_of(**inputs, engine=engine)
                results[engine] |= {f"again {name}": gradient for name, gradient in again.items()}
        assert_agrees(results["numpy"], results["ops"])


def every_option(rng, word, sizes):
    """Return a random value for every option of an op. The sequence lengths and the mask's shape are sometimes
    extreme, for example all lengths 0."""
    T, B, *_ = sizes
    options = combination(rng, sizes, word, bidirectional=bool(rng.integers(2)))
    if word == "gru":  # bounded r and z: otherwise h could grow without limit
        options["activations"] = (*rng.choice(["tanh", "sigmoid", *HARD_SIGMOIDS], 2), options["activations"][2])
    for name, limits in {"lengths": ([T] * B, [0] * B), "mask": ((T, 1, 1), ())}.items():
        if rng.random() < 0.4:
            options[name] = limits[rng.integers(2)]
    return options


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("word", OPS)
def test_agrees_with_ops(monkeypatch, word, seed):
    """Engine `numpy` agrees with engine `ops` for random options, narrow and wide batches, several chunks of time,
    and arrays with any strides."""
    rng = np.random.default_rng(seed)
    T, B, I, H = (int(rng.choice(sizes)) for sizes in ([1, 2, 5, 8], [1, 2, 5, 16, 17], [1, 3], [1, 2, 5]))
    monkeypatch.setattr(engine_numpy_products, "CHUNK_ROWS", int(rng.choice([3 * B, 1024])))
    # AHEAD_ROWS is the number of rows of x that are multiplied before their steps run. It also decides whether Wx and
    # Wh are copied into one matrix. Random values test both cases.
    monkeypatch.setattr(engine_numpy_products, "AHEAD_ROWS", int(rng.choice([2 * B, 256])))
    # With 2 to 7 batch items, a product of more than UNPACKED_NUMBERS multiplications is computed in blocks.
    monkeypatch.setattr(engine_numpy_products, "UNPACKED_NUMBERS", int(rng.choice([10, 10**6])))
    poison_scratch(monkeypatch)
    sizes = T, B, I, H, 3
    _, arrays, options = split(draw(rng, sizes=sizes, **every_option(rng, word, sizes)))
    spoil_padding(arrays["x"], options["lengths"])
    wanted = None if rng.random() < 0.6 else ["h"]
    check(word, arrays, options, wanted, cut if rng.random() < 0.5 else whole, seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("word", OPS)
def test_a_shrinking_batch_agrees_with_ops(monkeypatch, word, seed):
    """For sequences of different lengths, engine `numpy` divides the time steps into segments and leaves out the
    sequences that have ended. The results of all options agree with engine `ops`."""
    rng = np.random.default_rng(seed)
    T, B = int(rng.choice([5, 6, 8])), int(rng.choice([2, 3, 9, 33]))
    monkeypatch.setattr(engine_numpy_products, "CHUNK_ROWS", int(rng.choice([2 * B, 1024])))
    poison_scratch(monkeypatch)
    sizes = T, B, 2, 3, 3
    _, arrays, options = split(draw(rng, sizes=sizes, **every_option(rng, word, sizes)))
    # With the option `hold`, the library removes the held steps and gives the engine shorter lengths. The last line of
    # this test compares with the lengths drawn here, so the test does not use `hold`.
    options |= {"hold": None, "lengths": [int(length) for length in rng.integers(0, T, B)]}
    spoil_padding(arrays["x"], options["lengths"])
    ran, sweep = [], engine_numpy_ragged.sweep_forward
    monkeypatch.setattr(engine_numpy_ragged, "sweep_forward", lambda one, *a: [ran.append(one), sweep(one, *a)])
    check(word, arrays, options, None if rng.random() < 0.5 else ["h"], cut if rng.random() < 0.5 else whole, seed)
    assert not any(options["lengths"]) or (all(one.T * one.B < T * B for one in ran) and ran)


@pytest.mark.parametrize("dtype, checkpoint_every", [(mx.float16, None), (mx.bfloat16, 7), (mx.float32, 7)])
@pytest.mark.parametrize("word", OPS)
def test_a_shrinking_batch_agrees_in_16_bits_and_with_checkpoints(word, dtype, checkpoint_every):
    """The gradients of sequences of different lengths agree with engine `ops`, also in 16 bits and with recomputed
    steps (`checkpoint_every`). Both engines compute in float32 and round the results once."""
    rng, (T, B, H) = np.random.default_rng(0), (20, 9, 4)
    lengths, rows = rng.integers(0, T, B).tolist(), {"lstm": 4, "gru": 3, "rnn": 1}[word] * 2 * H
    shapes = (T, B, 3), (rows, 3), (2, rows // 2, H), (rows,)
    arrays = [mx.array(rng.normal(size=shape), dtype) for shape in shapes]
    results = {}
    with mx.stream(mx.cpu):
        for engine in ("ops", "numpy"):

            def loss(*arrays, engine=engine):
                options = {"bidirectional": True, "lengths": lengths, "checkpoint_every": checkpoint_every}
                out = OPS[word][0](*arrays, engine=engine, **options)
                return (out.h.astype(mx.float32) ** 2).sum() + out.hT.astype(mx.float32).sum()

            results[engine] = mx.grad(loss, argnums=(0, 1, 2, 3))(*arrays)
        for got, expected in zip(results["numpy"], results["ops"], strict=True):
            got, expected = (np.array(array.astype(mx.float32)) for array in (got, expected))
            size = {mx.float16: 2**-10, mx.bfloat16: 2**-7, mx.float32: 2**-18}[dtype] * np.abs(expected).max()
            np.testing.assert_allclose(got, expected, rtol=0, atol=2 * size)


@pytest.mark.parametrize("copied", [0, 2**20])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("word", OPS)
def test_wide_batches_agree_with_ops(monkeypatch, word, seed, copied):
    """Engine `numpy` agrees with engine `ops` for wide batches, with and without copied weights. If Wx and Wh are
    copied into one matrix, each step computes one product. Otherwise each step has a recurrent product, and several
    steps share one product of the input."""
    rng = np.random.default_rng(seed)
    T, B, I, H = 5 + seed % 2, 16 + seed % 3, 3, 5
    monkeypatch.setattr(engine_numpy_products, "AHEAD_ROWS", 2 * B)
    monkeypatch.setattr(engine_numpy_products, "COPIED_NUMBERS", copied)
    monkeypatch.setattr(engine_numpy_products, "TRANSPOSED_NUMBERS", copied)
    poison_scratch(monkeypatch)
    sizes = T, B, I, H, 3
    _, arrays, options = split(draw(rng, sizes=sizes, **every_option(rng, word, sizes)))
    spoil_padding(arrays["x"], options["lengths"])
    check(word, arrays, options, ["h"], cut if seed < 2 else whole, seed)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("B", [2, 7])
@pytest.mark.parametrize("word", OPS)
def test_matrices_of_a_narrow_batch_are_divided(monkeypatch, word, B, strided):
    """If the batch has 2 to 7 items, engine `numpy` divides the recurrent weights into blocks. The product of a block
    has at most UNPACKED_NUMBERS multiplications. The results agree with engine `ops`. The number of hidden units is a
    prime, so few numbers of blocks are possible. Contiguous weights and strided views are tested."""
    T, I, H = 3, 2, 7
    # With B = 2 a block has the rows of one gate. With B = 7 it must have fewer, so the 7 rows of a gate are divided.
    largest, shapes, multiply = H * H * B - (B == 7), [], np.matmul
    monkeypatch.setattr(engine_numpy_products, "UNPACKED_NUMBERS", largest)

    def watched(left, right, *args, **kwargs):
        shapes.append((*left.shape, right.shape[-1]))
        return multiply(left, right, *args, **kwargs)

    monkeypatch.setattr(np, "matmul", watched)
    monkeypatch.setitem(engine_numpy_steps.NAMES, "matmul", watched)
    _, arrays, options = split(draw(np.random.default_rng(0), op=word, sizes=(T, B, I, H, H)))
    check(word, arrays, options, ["h"], cut if strided else whole)
    blocks = {"lstm": 4, "gru": 3, "rnn": 1}[word] if B == 2 else H
    divided = [shape for shape in shapes if len(shape) == 4]
    # Two forward passes and one backward pass run, each with one divided product per step. The matrix of an RNN has
    # only one gate. It is small enough, so it is not divided.
    assert len(divided) == (0 if blocks == 1 else 3 * T)
    assert all(shape[0] == blocks and shape[1] * shape[2] * shape[3] <= largest for shape in divided)


def test_only_what_blas_cannot_read_is_copied():
    """BLAS reads a matrix in place if its rows or its columns are contiguous and do not overlap. This test has all
    kinds of views, as matrices and as stacks of matrices. Other views are copied once."""
    numbers = np.arange(48.0).reshape(2, 4, 6)
    row, column = numbers[:, :1], numbers[:, :, :1]
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(12.0), 6)
    fit = [numbers, numbers[:, 1:3], numbers[:, ::2], numbers[:, :, 1:5], numbers[:, ::3, 2:], column]
    fit += [numbers.reshape(2, 6, 4)[:, :, :3]]
    unfit = [numbers[:, :, ::2], numbers[:, ::-1], numbers[:, :, ::-1], numbers[:, ::2, ::2]]
    unfit += [np.broadcast_to(row, numbers.shape), np.broadcast_to(column, numbers.shape)]
    for arrays, fits in ((fit, True), (unfit, False)):
        for array in [*arrays, *(each[0] for each in arrays), *([] if fits else [windows])]:
            for view in (array, array.swapaxes(-1, -2)):
                got = engine_numpy_products.matrix(view)
                assert (got is view) == fits, view.strides
                assert fits or got.flags.c_contiguous
                np.testing.assert_array_equal(got, view)


@pytest.mark.parametrize("T, B", [(1, 32), (2, 16)])
@pytest.mark.parametrize("word", OPS)
def test_few_steps_of_a_wide_batch_agree_with_ops(monkeypatch, word, T, B):
    """Engine `numpy` agrees with engine `ops` for one or two steps of a wide batch. Engine `numpy` writes each
    step's h into the buffer from which the next step's product reads. This test covers buffers that have room for
    one step only."""
    monkeypatch.setattr(engine_numpy_products, "AHEAD_ROWS", 16)
    lengths = np.arange(B) % (T + 1)
    _, arrays, options = split(draw(np.random.default_rng(0), op=word, sizes=(T, B, 3, 5, 5)))
    check(word, arrays, options | {"lengths": [int(n) for n in lengths]})


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("word", OPS)
def test_what_a_step_reads_and_writes_is_contiguous(monkeypatch, word, training):
    """Every array that a step of engine `numpy` reads or writes is contiguous. With strided outputs, activations
    would take up to three times as long."""
    _, drawn, options = split(draw(np.random.default_rng(0), op=word, sizes=(4, 3, 2, 5, 5)))
    contiguous = []

    class Watched(engine_numpy_steps.Step):
        def __init__(self, *given):
            super().__init__(*given)
            run = self.run

            def watched(operand, inputs, *arrays):
                contiguous.extend(array.flags.c_contiguous for array in arrays if array is not None)
                run(operand, inputs, *arrays)

            self.run = watched

    monkeypatch.setattr(engine_numpy_passes, "Step", Watched)
    with mx.stream(mx.cpu):
        arrays = [whole(array) for array in drawn.values()]

        def output(*values):
            return OPS[word][0](**dict(zip(drawn, values, strict=True)), **options, training=training).h.sum()

        mx.eval(mx.grad(output)(*arrays) if training else output(*arrays))
    # The list has one entry per array that a step reads or writes: whether it is contiguous. There are 4 steps. Each
    # has 4 arrays. If gates are saved for the gradient, there is a fifth array; a plain RNN saves no gates.
    assert len(contiguous) == 4 * (5 if training and word != "rnn" else 4) and all(contiguous)


@pytest.mark.parametrize("options", [("lstm", {}), ("gru", {}), ("gru", {"reset": "before"}), ("rnn", {})])
def test_arrays_of_a_call_are_freed_at_once(monkeypatch, options):
    """The arrays of both passes are freed when the call ends, without Python's search for cycles of objects."""
    word, more = options
    alive = []

    def watched(kind):
        class Watched(kind):
            def __init__(self, *given):
                super().__init__(*given)
                alive.append(weakref.ref(self))

        return Watched

    for name in ("Step", "StepBackward"):
        monkeypatch.setattr(engine_numpy_passes, name, watched(getattr(engine_numpy_passes, name)))
    _, drawn, given = split(draw(np.random.default_rng(0), op=word, sizes=(3, 2, 2, 5, 5), **more))
    gc.disable()
    try:
        with mx.stream(mx.cpu):
            arrays = [whole(array) for array in drawn.values()]
            op = {"lstm": lstm, "gru": gru, "rnn": rnn}[word]
            loss = lambda *values: op(**dict(zip(drawn, values, strict=True)), **given, engine="numpy").h.sum()  # noqa: E731
            mx.eval(mx.grad(loss, argnums=range(len(arrays)))(*arrays))
        assert len(alive) == 2 and not any(step() for step in alive)
    finally:
        gc.enable()


def test_a_limit_that_changes_from_call_to_call_leaves_nothing_behind():
    """Calls with a new `cell_clip` or `forget_bias` each time do not fill the engine's cache, because the cache key
    has no number of the cell."""
    _, drawn, _ = split(draw(np.random.default_rng(0), sizes=(2, 1, 2, 2, 2)))
    arrays = {name: whole(array) for name, array in drawn.items()}
    sizes = set()
    for n in range(4):
        with mx.stream(mx.cpu):
            mx.eval(lstm(**arrays, cell_clip=1.0 + n, forget_bias=0.5 * n, engine="numpy").h)
        sizes.add(engine_numpy_steps.plan_of_form.cache_info().currsize)
    assert len(sizes) == 1


@pytest.mark.parametrize("batch_major", [False, True])
@pytest.mark.parametrize("word", OPS)
def test_no_sequence_is_copied(monkeypatch, word, batch_major):
    """In the forward pass and in the gradient, NumPy allocates much less memory than one array of all time steps
    takes, whatever the memory layout of the arguments. Outputs do not count, because they are in MLX's memory."""
    monkeypatch.setattr(engine_numpy_products, "CHUNK_ROWS", 32)
    T, B, I, H = 256, 16, 8, 8
    op, gradients_of = OPS[word]
    _, drawn, options = split(draw(np.random.default_rng(0), op=word, sizes=(T, B, I, H, H), bidirectional=True))

    def lay(array):
        return mx.swapaxes(mx.contiguous(mx.swapaxes(array, 0, 1)), 0, 1) if batch_major else mx.contiguous(array)

    with mx.stream(mx.cpu):
        arrays = {name: lay(whole(array)) if name == "x" else whole(array) for name, array in drawn.items()}
        out = op(**arrays, **options, return_gates=True)
        saved = {name: lay(getattr(out, name)) for name in SAVED[word]}
        mx.eval(arrays, saved)

        def compute():
            mx.eval(op(**arrays, **options, training=False, engine="numpy").h)
            mx.eval(gradients_of(**arrays, **saved, **options, dh=saved["h"], engine="numpy"))

        compute()  # the first call generates the code of the steps
        tracemalloc.start()
        try:
            compute()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 8 * T * B * H / 2  # half the bytes of one direction's h in float64


@pytest.mark.parametrize("word, options", [*((word, {}) for word in OPS), ("gru", {"reset": "before"})], ids=str)
def test_gradients_of_many_calls_are_not_in_memory_at_once(word, options):
    """A loss calls the op once per time step, so each call computes gradients of the weights. The peak memory of engine
    `numpy` is below half of the memory that the gradients of all calls would take together. The peak varies from run
    to run, because another thread of MLX releases arrays. The gradients equal those of engine `ops`."""
    T, H, rng = 40, 384 if word == "rnn" else 256, np.random.default_rng(0)
    G = {"lstm": 4, "gru": 3, "rnn": 1}[word]
    with mx.stream(mx.cpu):
        x, Wx, Wh = (mx.array(rng.normal(size=shape) / 16, mx.float32) for shape in ((T, 2, H), (G * H, H), (G * H, H)))
        mx.eval(x, Wx, Wh)

        def loss(Wx, Wh, engine):
            h, total = None, 0
            for row in x:
                h = OPS[word][0](row[None], Wx, Wh, None, h, engine=engine, **options).hT
                total = total + h.square().sum()
            return total

        gradients = {"ops": mx.grad(loss, argnums=(0, 1))(Wx, Wh, "ops")}
        mx.eval(gradients)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        gradients["numpy"] = mx.grad(loss, argnums=(0, 1))(Wx, Wh, "numpy")
        mx.eval(gradients["numpy"])
        peak = mx.get_peak_memory() - before
        for got, expected in zip(gradients["numpy"], gradients["ops"], strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(np.array(expected)).max())
        assert peak < T * (Wx.nbytes + Wh.nbytes) / 2


def gradients_asked(word, argnums, wrap=lambda loss: loss, **options):
    """Differentiate a loss of two layers with the same weights, to see which gradients engine `numpy` computes.
    Return (left_out, gradients). `left_out` has one entry per backward pass: the names of the gradients that the
    pass does not compute.

    argnums: what to differentiate by; 0 is the input x of the first layer, 1 is Wx. wrap: a function that transforms
    the loss first.
    """
    rng, G, log = np.random.default_rng(0), {"lstm": 4, "gru": 3, "rnn": 1}[word], []
    backward = engine_numpy_sweep.backward

    def watched(*arguments, left_out=(), **named):
        log.append(left_out)
        return backward(*arguments, left_out=left_out, **named)

    with pytest.MonkeyPatch.context() as patch, mx.stream(mx.cpu):
        patch.setattr(engine_numpy_sweep, "backward", watched)
        x, Wx, Wh = (mx.array(rng.normal(size=s), mx.float64) for s in ((3, 2, 4), (G * 4, 4), (G * 4, 4)))

        def loss(x, Wx):
            h = OPS[word][0](x, Wx, Wh, **options).h
            return OPS[word][0](h, Wx, Wh, **options).h.square().sum()

        gradients = mx.value_and_grad(wrap(loss), argnums)(x, Wx)[1]
    return log, gradients if isinstance(gradients, tuple) else (gradients,)


@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 3}], ids=str)
@pytest.mark.parametrize("word", OPS)
def test_the_gradient_of_the_first_layer_s_input_is_computed_only_if_asked_for(word, options):
    """If a loss is differentiated by the weights only, engine `numpy` does not compute the gradient of the first
    layer's input (the data). It does compute the gradient of the second layer's input. All gradients equal those of
    engine `ops`."""
    asked, computed = [(), ("x",)], [(), ()]
    for argnums, wrap, expected in [
        (1, lambda loss: loss, asked),
        ((0, 1), lambda loss: loss, computed),
        (0, lambda loss: loss, computed),
        (1, mx.checkpoint, computed),  # mx.checkpoint asks for all gradients
        (1, lambda loss: lambda x, Wx: loss(x + 0 * Wx.sum(), Wx), computed),
        (1, lambda loss: lambda x, Wx: loss(x + 0 * mx.grad(lambda w: (w * w).sum())(Wx).sum(), Wx), computed),
        (1, lambda loss: lambda x, Wx: loss(x, Wx) * mx.grad(lambda x: (x[0, 0] * Wx).sum())(x).sum(), asked),
    ]:
        left_out, got = gradients_asked(word, argnums, wrap, engine="numpy", **options)
        assert left_out == expected
        _, gradients = gradients_asked(word, argnums, wrap, engine="ops", **options)
        for a, b in zip(got, gradients, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11)


@pytest.mark.parametrize("word", OPS)
def test_a_small_step_in_a_gradient_runs_on_ops(word):
    """Inside a gradient, a single time step of a small layer runs on engine `ops` and gives the gradients of engine
    `numpy`. A large step, several steps, and a step outside of a gradient run on engine `numpy`."""
    layer_of, engines = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[word], {}
    for H, B, T in [(4, 3, 1), (4, 3, 2), (100, 16, 1), (256, 65, 1)]:
        layer, x = layer_of(4, H), mx.random.normal((B, T, 4))

        def loss(layer, x):
            hidden = layer(x)
            return (hidden[0] if isinstance(hidden, tuple) else hidden).square().sum()

        with mx.stream(mx.cpu):
            _, gradients = value_and_grad(layer, loss)(layer, x)
            engines[H, T] = layer.engine_used.engine
            layer.engine = "numpy"
            _, expected = value_and_grad(layer, loss)(layer, x)
            for (name, got), (_, right) in zip(tree_flatten(gradients), tree_flatten(expected), strict=True):
                np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5, err_msg=name)
            layer.engine = None
            layer(x)
            assert layer.engine_used.engine == "numpy"
    assert engines == {(4, 1): "ops", (4, 2): "numpy", (100, 1): "ops", (256, 1): "numpy"}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("word", OPS)
def test_what_numpy_shall_do_of_an_error_is_the_caller_s_affair(word, both):
    """Underflow in products and in tanh raises no error, even if the caller has set np.errstate(all="raise")."""
    case = draw(np.random.default_rng(0), op=word, bidirectional=both)
    case = {name: value * 1e-25 if name in ARRAYS else value for name, value in case.items()}
    with np.errstate(all="raise"):
        outputs, gradients = run(case, "numpy", np.float32, {"h": np.full((4, 2, 2 * (1 + both)), 1e-25)})
        assert all(np.isfinite(array).all() for array in (outputs | gradients).values())
        with mx.stream(mx.cpu):
            assert tanh(mx.array([2.0**-149, 0])).tolist() == [2.0**-149, 0]


LIMITS = [
    ("lstm", {"cell_clip": 1e300}),
    ("lstm", {"cell_clip": 1e300, "clip_gradient": "zero"}),
    ("lstm", {"forget_bias": 1e300}),
    *((word, {}) for word in OPS),
]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("padding", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("word, options", LIMITS, ids=lambda value: str(value))
def test_infinity_and_nan_raise_no_warning(word, options, both, padding):
    """Infinity or NaN in the padding raises no warning. A `cell_clip` or `forget_bias` that is too large for float32
    raises no warning either."""
    rng, lengths = np.random.default_rng(4), [2, 5, 0, 4]
    _, drawn, both = split(draw(rng, op=word, sizes=(5, 4, 3, 6, 6), bidirectional=both))
    drawn["x"][np.arange(5)[:, None] >= lengths] = padding
    options = options | both | {"lengths": lengths, "engine": "numpy"}
    with mx.stream(mx.cpu):
        names, values = list(drawn), [mx.array(array, mx.float32) for array in drawn.values()]
        outputs = lambda *values: list(OPS[word][0](**dict(zip(names, values, strict=True)), **options)[:1])  # noqa: E731
        results = mx.vjp(outputs, values, [mx.ones(outputs(*values)[0].shape)])
        assert all(mx.isfinite(array).all() for arrays in results for array in arrays)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("flip_z", [False, True])
@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("activation", ["identity", "relu"])
def test_an_infinite_candidate_makes_an_infinite_h(engine, activation, flip_z):
    """An infinite candidate n of a GRU gives an infinite h, because the engines compute z h + (1 - z) n. The formula
    n + z (h - n) would give NaN."""
    with mx.stream(mx.cpu):
        x = mx.array([[[0.5, 0.5, np.inf]]])
        options = {"flip_z": flip_z, "activations": ("sigmoid", "sigmoid", activation)}
        for h0 in (None, mx.array([[-2.0]])):
            out = gru(x, None, mx.zeros((3, 1)), h0=h0, engine=engine, **options)
            assert out.h.item() == np.inf


@pytest.fixture
def blas(monkeypatch):
    """Replace OpenBLAS's functions for its number of threads. Return the list of the numbers: the last is the current
    one."""
    numbers = [8]
    fake = engine_numpy_threads.Threads(lambda: numbers[-1], numbers.append)
    monkeypatch.setattr(engine_numpy_threads, "openblas", lambda: fake)
    return numbers


@pytest.mark.parametrize(
    ("sizes", "is_small"),
    [((64, 32, 128), True), ((128, 32, 256), False), ((64, 512, 128), False), ((1, 1, 32), False)],
)
@pytest.mark.parametrize("both", [False, True])
def test_small_products_run_on_one_thread(sizes, is_small, both, blas, monkeypatch):
    """The rule reads the weights of one direction. Calls without any product that OpenBLAS would divide leave its
    threads alone."""
    T, B, H = sizes
    problem = Problem(T, B, H, H, LSTMCell(), bidirectional=both)
    D = 1 + both
    arrays = {"x": mx.ones((T, B, H)), "Wx": mx.ones((D * 4 * H, H)), "Wh": mx.ones((2, 4 * H, H)[1 - both :])}
    seen = []
    monkeypatch.setattr(engine_numpy_sweep, "sweep_forward", lambda *_: seen.append(blas[-1]))
    engine_numpy_sweep.forward(problem, arrays)
    assert seen == [1 if is_small else 8] * D
    assert blas[-1] == 8


def test_calls_in_two_threads_restore_the_threads_of_blas_once(blas):
    first, second = (engine_numpy_threads.one_thread() for _ in range(2))
    with pytest.raises(ZeroDivisionError), first:
        second.__enter__()
        raise ZeroDivisionError  # the first call ends, also by an error, while the second still runs
    assert blas == [8, 1]
    second.__exit__(None, None, None)
    assert blas == [8, 1, 8]


@pytest.mark.not_on_a_mac("NumPy uses Apple's Accelerate there")
def test_the_functions_of_openblas_are_found():
    """The functions set and return the number of threads of the BLAS that NumPy uses."""
    found = engine_numpy_threads.openblas()
    before = found.get()
    try:
        found.set(1)
        assert found.get() == 1
    finally:
        found.set(before)
    assert found.get() == before


def test_a_call_without_a_norm_enters_no_code_of_norms():
    """Neither a call, nor its gradient, nor a stepper."""
    entered = set()
    layer, x = nn.LSTM(3, 4, engine="numpy"), mx.ones((2, 5, 3))
    sys.setprofile(lambda frame, event, _: entered.add(Path(frame.f_code.co_filename).name))
    try:
        mx.eval(mx.grad(lambda x: layer(x)[0].sum())(x), layer.stepper(batch=2)(x[:, 0]))
    finally:
        sys.setprofile(None)
    assert "passes.py" in entered and "norms.py" not in entered


def test_two_neighbours_are_computed_at_once():
    """Two products of neighbouring blocks whose results are neighbours, too, are one group."""
    nodes = [*(Node("input", value=f"x{k}") for k in range(4)), Node("mul", (0, 2)), Node("mul", (1, 3))]
    z, h = (engine_numpy_statements.places(*block) for block in (("z", 4), ("h", 2)))
    groups = engine_numpy_statements.Groups(
        nodes, [4, 5], dict(enumerate(z)), dict(zip((4, 5), h, strict=True)), {"z": 4, "h": 2}
    )
    assert groups.of == {4: (4, 5), 5: (4, 5)}


def test_operands_of_neighbours_are_computed_into_neighbouring_blocks():
    """The sums, which no statement computes at once, are written side by side, so that one statement can read both."""
    nodes = [*(Node("input", value=f"x{k}") for k in range(4)), Node("add", (0, 3)), Node("add", (1, 2))]
    nodes += [Node("exp", (4,)), Node("exp", (5,))]
    y, h = (engine_numpy_statements.places(*block) for block in (("y", 4), ("h", 2)))
    groups = engine_numpy_statements.Groups(
        nodes, [4, 5, 6, 7], dict(enumerate(y)), dict(zip((6, 7), h, strict=True)), {"y": 4, "h": 2}
    )
    assert groups.of == {6: (6, 7), 7: (6, 7)} and groups.sizes == {"g0": 2}
    assert groups.block == dict(zip((4, 5), engine_numpy_statements.places("g0", 2), strict=True))


def test_the_preactivations_of_a_sigmoid_keep_their_sign():
    """For many rows the engine computes -z instead of the preactivation z that only a sigmoid reads, but not if the
    caller gets z, as the gates of an RNN."""
    rng = np.random.default_rng(0)
    x, Wx, Wh = (rng.normal(size=shape) for shape in ((20, 32, 3), (4, 3), (4, 4)))
    arrays = [mx.array(array, mx.float32) for array in (x, Wx, Wh)]
    with mx.stream(mx.cpu):
        out = rnn(*arrays, activation="sigmoid", return_gates=True, engine="numpy")
    h = np.zeros((32, 4))
    for t in range(20):
        z = x[t] @ Wx.T + h @ Wh.T
        h = 1 / (1 + np.exp(-z))
        np.testing.assert_allclose(np.array(out.gates[t]), z, atol=1e-5)
