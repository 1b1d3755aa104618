"""Tests of `Stepper`, which runs one time step per call. They compare outputs and states with the float64 oracle for
every option, change parameters between steps, pass wrong arguments, and count the launches on a GPU."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within
from cases import CELLS, OPTIONS, ROUNDING_MARGIN, draw_away_from_kinks, split, to_mlx
from on_metal import crossed, on_metal
from test_parameter_changes import CHANGES

import mlx_lstm.torch
from mlx_lstm import convert, nn
from mlx_lstm.engines.cells import GRUCell, LSTMCell, RNNCell
from mlx_lstm.engines.numpy import products
from mlx_lstm.oracle import evaluate
from mlx_lstm.oracle.closeness import exact_and_bounds
from mlx_lstm.recurrence import Stepper

T, I, H = 4, 3, 8
CELL = {"lstm": LSTMCell, "gru": GRUCell, "rnn": RNNCell}
WITHOUT = {"projected_x", "mask", "lengths", "hold", "reverse"}  # options of a whole sequence, not of a step
STEP_OPTIONS = {
    name: option for name, option in (OPTIONS | CELLS).items() if not WITHOUT & option.keys() and "both" not in name
}


def drawn(**options):
    """Return a random case (dict of arrays and options). No argument of an activation is so close to a kink, such as
    0 for relu, that rounding could move it across."""
    return draw_away_from_kinks(0, ROUNDING_MARGIN, **options)[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.stepper([nn.LSTM(3, 4), nn.LSTM(7, 4)]),
        lambda: nn.stepper([nn.LSTM(3, 4), nn.GRU(4, 4)]),
        lambda: nn.stepper([]),
        lambda: nn.stepper([1]),
        lambda: nn.stepper([{"Wx": mx.ones((8, 3)), "Wh": mx.ones((5, 5))}]),
        pytest.param(
            lambda: nn.stepper([nn.LSTM(3, 4)], engine="fused"),
            marks=pytest.mark.not_on_a_mac("there the engine runs"),
        ),
    ],
)
def test_an_error_names_the_function_that_was_called(make):
    """The checks of `stack` and of the op name `stepper` where a stepper calls them."""
    with pytest.raises(ValueError, match=r"^\[nn\.stepper\] ") as caught:
        make()
    assert "nn.stack]" not in str(caught.value)


def stepper_of(case, engine, dtype, batch):
    """Return a stepper with the cell, the parameters and the initial states of a case (dict of arrays and options)."""
    op, arrays, options = split(case)
    options = {"act" if name == "activation" else name: value for name, value in options.items()}
    parameters = {name: to_mlx(arrays[name], dtype) for name in arrays if name not in ("x", "h0", "c0", "keep")}
    cell = CELL[op](**options)
    stepper = Stepper("test", lambda: [(cell, parameters, engine)], [parameters], batch=batch, is_stack=False)
    state = stepper.state(as_numpy=True)
    state = [state] if op != "lstm" else list(state)
    first = [arrays.get(name, zeros) for name, zeros in zip(("h0", "c0"), state, strict=False)]
    first = [array.reshape(zeros.shape).astype(np.float64) for array, zeros in zip(first, state, strict=True)]
    stepper.set_state(tuple(first) if op == "lstm" else first[0])
    return stepper


def check_case(case, engine, dtype, batch, name):
    """Run the steps of a case one at a time, and pass x as a NumPy array at every second step. Check that all h and
    the last states differ from the oracle's by at most the error bounds."""
    exact, bounds = exact_and_bounds(lambda fl: evaluate(case, None, fl)[0], dtype)
    stepper = stepper_of(case, engine, dtype, batch)
    assert stepper.engine_used.engine == engine
    outputs = []
    for t, x in enumerate(case["x"]):
        x = x.reshape(*batch, I)
        keep = to_mlx(case["keep"][t].reshape(batch), dtype) if "keep" in case else None
        h = stepper(to_mlx(x, dtype) if t % 2 else x.astype(np.float32 if dtype != np.float64 else dtype), keep=keep)
        assert isinstance(h, mx.array if t % 2 else np.ndarray)
        outputs.append(np.array(h.astype(mx.float32) if isinstance(h, mx.array) and dtype != np.float64 else h))
    assert_within(f"{name} h", np.stack(outputs).reshape(exact["h"].shape), exact["h"], bounds["h"])
    state = stepper.state(as_numpy=True)
    for word, array in zip(("hT", "cT"), state if isinstance(state, tuple) else [state], strict=False):
        assert_within(f"{name} {word}", array.reshape(exact[word].shape), exact[word], bounds[word])


def is_possible(option, engine):
    """Return whether an engine can run an option: `fused` does not support a projection."""
    return engine != "fused" or not option.get("projection")


@pytest.mark.parametrize("turn, engine", [(0, "numpy"), (1, "ops")])
@pytest.mark.parametrize("name", STEP_OPTIONS)
def test_every_option_equals_the_oracle(name, turn, engine):
    """Each option is right on both engines of the CPU: without a batch on one, with two batch axes on the other."""
    turn += list(STEP_OPTIONS).index(name)
    check_options(STEP_OPTIONS[name], name, engine, ((), (2, 2))[turn % 2])


CROSSED = {
    engine: crossed({name: case for name, case in STEP_OPTIONS.items() if is_possible(case, engine)}, turn, fewest=2)
    for turn, engine in enumerate(["stepwise", "fused"])
}
"""Cases that have several options each."""

ON_METAL = [("fused", f"{name}.0") for name in ("lstm_1", "lstm_3", "lstm_norm_1", "gru_1", "gru_norm_0")]
ON_METAL += [("stepwise", f"{name}.0") for name in ("lstm_2", "lstm_norm_3", "gru_before_2", "rnn_1")]
"""Cases with all cells, and with nearly all options of a step. Few kernels are compiled for them."""


@pytest.mark.parametrize("engine, name", ON_METAL)
def test_options_on_metal_equal_the_oracle(engine, name):
    check_options(CROSSED[engine][name], name, engine, (3,))


def check_options(options, name, engine, batch):
    case = drawn(sizes=(T, int(np.prod(batch)), I, H, 3), dtype=np.float32, **(options | {"keep": True}))
    with on_metal() if engine in ("fused", "stepwise") else mx.stream(mx.cpu):
        check_case(case, engine, np.float32, batch, name)


@pytest.mark.parametrize(
    "op, engine, dtype",
    [
        *product(CELL, ["numpy", "ops"], [np.float16, ml_dtypes.bfloat16, np.float64]),
        ("lstm", "fused", np.float16),
        ("gru", "stepwise", ml_dtypes.bfloat16),
    ],
)
def test_every_dtype_equals_the_oracle(op, engine, dtype):
    """The results of steps in 16-bit dtypes and float64 differ from the oracle's by at most the error bounds that a
    whole sequence has in this dtype."""
    on_gpu = engine in ("fused", "stepwise")
    case = drawn(op=op, sizes=(T, 2, I, H, H), dtype=dtype if dtype == np.float64 else np.dtype(dtype).name, keep=True)
    with on_metal() if on_gpu else mx.stream(mx.cpu):
        check_case(case, engine, dtype, (2,), op)


def layers_of(kind):
    """Return {name: (layer, batch axes of its stepper, reference)}. The reference is a function (x, state) -> (h,
    state) that runs one time step without a stepper, by `step` or by a call of the layer."""
    as_list = lambda state: [] if state is None else state if isinstance(state, tuple) else [state]  # noqa: E731
    plain, quantized = (
        getattr(nn, kind)(I, 32),
        getattr(nn, f"Quantized{kind}").from_layer(getattr(nn, kind)(I, 32), 32),
    )
    stack = [getattr(nn, kind)(I, 32), getattr(nn, f"Quantized{kind}").from_layer(getattr(nn, kind)(32, 32), 32)]
    torch = getattr(mlx_lstm.torch, kind)(I, 32, num_layers=2).eval()
    cell = getattr(mlx_lstm.torch, f"{kind}Cell")(I, 32)
    weights = convert.from_torch(torch)
    loaded = nn.from_weights(weights)

    def by_step(layer):
        def call(x, state):
            state = layer.step(x, *as_list(state))
            return as_list(state)[0], state

        return call

    def in_time(layer, axis):
        def call(x, state):
            h, state = layer(mx.expand_dims(x, axis), state)
            return h.reshape(*x.shape[:-1], -1), state

        return call

    return {
        "layer": (plain, (2,), by_step(plain)),
        "without batch": (plain, (), by_step(plain)),
        "two axes": (plain, (2, 1), by_step(plain)),
        "quantized": (quantized, (2,), by_step(quantized)),
        "stack": (stack, (2,), in_time(lambda x, state: nn.stack(stack, x, state), -2)),
        "torch": (torch, (2,), in_time(torch, 0)),
        "torch cell": (cell, (2,), lambda x, state: (as_list(state := cell(x, state))[0], state)),
        "from_weights": (loaded, (2,), in_time(loaded, 1)),
    }


NAMES = ["layer", "without batch", "two axes", "quantized", "stack", "torch", "torch cell", "from_weights"]


def made(layer, batch):
    """Return the stepper of a layer or of a list of layers."""
    return nn.stepper(layer, batch) if isinstance(layer, list) else layer.stepper(batch)


def assert_close(one, other):
    for a, b in zip(*([s] if isinstance(s, mx.array) else s for s in (one, other)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_equals_step_in_every_layer(kind, name):
    """A stepper gives the same outputs and states as the layer's own steps, in the same shapes and dtypes. After
    `reset` it continues from zero states, after `set_state` from the given state."""
    mx.random.seed(3)
    with mx.stream(mx.cpu):
        layer, batch, call = layers_of(kind)[name]
        stepper, frames, state = made(layer, batch), mx.random.normal((5, *batch, I)), None
        for x in frames:
            h, state = call(x, state)
            assert_close(stepper(x), h)
            assert_close(stepper.state(), state)
        stepper.reset()
        assert_close(stepper(frames[0]), call(frames[0], None)[0])
        as_numpy = np.array(state) if isinstance(state, mx.array) else tuple(map(np.array, state))
        for given in (state, as_numpy):
            stepper.set_state(given)
            assert_close(stepper.state(), state)
            assert_close(stepper(frames[0]), call(frames[0], state)[0])


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_a_layer_without_any_array_of_floats(mode):
    """Without a bias all arrays of a layer that is quantized in these modes are integers. Its stepper computes in
    float32."""
    for package in (nn, mlx_lstm.torch):
        layer = package.QuantizedGRU.from_layer(package.GRU(32, 32, bias=False), mode=mode)
        assert all(not mx.issubdtype(array.dtype, mx.floating) for array in layer.parameters().values())
        stepper, frames = layer.stepper(2), mx.random.normal((3, 2, 32))
        got = [stepper(frame) for frame in frames]
        expected = layer(frames)[0] if package is mlx_lstm.torch else layer(frames.swapaxes(0, 1)).swapaxes(0, 1)
        assert_close(got, list(expected))


@pytest.mark.parametrize(
    "kind, name",
    [
        *product(["LSTM"], ["layer", "quantized", "stack", "torch", "from_weights"]),
        *product(["GRU"], ["layer", "torch"]),  # the only cell with a second bias
        ("RNN", "quantized"),
    ],
)
def test_changed_parameters_are_seen(kind, name):
    """After any change of a parameter, the next step gives the same result as a new stepper in the same state, or
    raises an error."""
    mx.random.seed(4)
    rng = np.random.default_rng(4)
    with mx.stream(mx.cpu):
        layer, batch, _ = layers_of(kind)[name]
        holders = layer if isinstance(layer, list) else getattr(layer, "layers", [layer])
        stepper, x = made(layer, batch), mx.random.normal((*batch, I))
        for holder in holders:
            for key in list(holder):
                for change in (*CHANGES, None):
                    old, state = mx.array(holder[key]), stepper.state()
                    if change is None:
                        holder[key][0] = 1  # changes the parameter in place
                    else:
                        holder[key] = change(rng, holder[key])
                    got = outcome(lambda: stepper(x))
                    new = outcome(lambda: made(layer, batch))
                    if isinstance(new, str):
                        assert isinstance(got, str) and got.startswith("["), (key, change)
                    else:
                        new.set_state(state)
                        assert isinstance(got, str) or mx.array_equal(got, new(x)), (key, change)
                    holder[key] = old
                    assert isinstance(outcome(lambda: stepper(x)), mx.array)


def outcome(call):
    """Return the result of a call, or the text of its ValueError."""
    try:
        return call()
    except ValueError as error:
        return str(error)


def test_a_bias_that_comes_or_goes_is_seen():
    layer, x = nn.LSTM(I, H), mx.ones((I,))
    with mx.stream(mx.cpu):
        stepper = layer.stepper()
        bias, layer.bias = layer.bias, None
        assert mx.array_equal(stepper(x), layer.stepper()(x))
        stepper.reset()
        layer.bias = bias
        assert mx.array_equal(stepper(x), layer.stepper()(x))


def test_what_is_refused():
    """Wrong arguments, MLX's transformations and reverse layers raise the expected ValueError. The states remain
    unchanged."""
    layer = nn.LSTM(I, H)
    both = mlx_lstm.torch.LSTM(I, H, bidirectional=True)
    with mx.stream(mx.cpu):
        stepper = layer.stepper(2)
        stepper(mx.ones((2, I)))
        before = stepper.state()
        name, x = "[nn.LSTM.stepper] ", mx.ones((2, I))
        for call, text in [
            (lambda: stepper(mx.ones((I,))), "x must have shape [2, 3] (stepper(batch=()) takes [3]) but got"),
            (
                lambda: stepper([1.0]),
                "x must be an mlx.core.array or a NumPy array: make one by mx.array(...), but got",
            ),
            (lambda: stepper(x.astype(mx.complex64)), "x must be real but got mlx.core.complex64."),
            (lambda: stepper(np.ones((2, I), complex)), "x must be real but got complex128."),
            (lambda: stepper(x, keep=mx.ones((3,))), "keep must broadcast to [2] but got shape [3]."),
            (lambda: stepper(x, keep=mx.ones((2,), mx.complex64)), "keep must be real but got mlx.core.complex64."),
            (lambda: stepper(x, keep=0.5), "keep must be an mlx.core.array or a NumPy array but got float."),
            (lambda: stepper.set_state(before[0]), "state must be a tuple (hidden, cell) but got array."),
            (lambda: stepper.set_state((before[0], x)), "cell must have shape [2, 8] but got shape [2, 3]."),
            (lambda: mx.grad(lambda x: stepper(x).sum())(x), "a stepper has no gradient and must be called outside of"),
            (lambda: layer.stepper(0), "batch: each size must be an integer of at least 1 but got 0."),
            (lambda: layer.stepper("2"), "batch: each size must be an integer of at least 1 but got '2'."),
            (lambda: both.stepper(), "bidirectional must be False, because the reverse direction starts at the end"),
            (lambda: nn.from_weights(convert.from_torch(both)).stepper(), "layers must run forward, because the rev"),
            (lambda: nn.stepper([]), "layers must hold at least one layer but got none."),
            (lambda: nn.stepper([layer, nn.LSTM(I, H)]), "layers[1].Wx must have shape [32, 8], as a layer has the H"),
        ]:
            with pytest.raises(ValueError) as error:
                call()
            assert str(error.value).partition("] ")[2].startswith(text), error.value
        assert_close(stepper.state(), before)
        layer.Wx = mx.ones((4 * H, I + 1))
        with pytest.raises(ValueError) as error:
            stepper(x)
        rule = "parameters may change their values, but not the sizes of x and the states: make a new stepper,"
        assert str(error.value) == f"{name}{rule} but got x [2, 4] and states [(2, 8)]."


@pytest.mark.needs_mx_compile
def test_a_compiled_stepper_is_refused():
    with mx.stream(mx.cpu):
        stepper = nn.LSTM(I, H).stepper(2)
        with pytest.raises(ValueError, match="a stepper has no gradient and must be called outside of"):
            mx.compile(stepper)(mx.ones((2, I)))


def test_any_memory_order_and_dtype_of_x():
    """x may be strided or an unevaluated array of MLX, and may have an integer or any float dtype. The result has
    the dtype of the parameters."""
    rng = np.random.default_rng(5)
    whole = rng.integers(-2, 3, (I, 4)).astype(np.float32)
    with mx.stream(mx.cpu):
        layer = nn.GRU(I, H)
        expected = layer.stepper(2)(np.ascontiguousarray(whole[:, ::2].T))
        for x in (
            whole[:, ::2].T,
            whole[:, ::2].T.astype(np.float64),
            whole[:, ::2].T.astype(np.int32),
            mx.array(whole)[:, ::2].T,
            mx.array(whole)[:, ::2].T.astype(mx.bfloat16),
            mx.array(whole)[:, ::2].T.astype(mx.int16),
        ):
            h = layer.stepper(2)(x)
            assert isinstance(h, type(x)) and np.array(h).dtype == np.float32
            np.testing.assert_array_equal(np.array(h), expected)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_products_in_blocks_equal_whole_products(kind, monkeypatch):
    """A step whose matrix product is computed in blocks of rows gives the same numbers, to rounding, as a step with
    one whole product."""
    monkeypatch.setattr(products, "QUIET_NUMBERS", 50)
    with mx.stream(mx.cpu):
        layer, x = getattr(nn, kind)(I, H), mx.random.normal((2, I))
        blocks = layer.stepper(2)
        assert blocks._stream.layers[0].step.product.ndim == 3
        monkeypatch.undo()
        whole = layer.stepper(2)
        assert whole._stream.layers[0].step.product.ndim == 2
        for _ in range(3):
            np.testing.assert_allclose(np.array(blocks(x)), np.array(whole(x)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", ["fused", "stepwise"])
def test_a_step_on_a_gpu_takes_one_launch_per_layer(engine):
    """On a GPU a step launches our kernels once per layer with `fused` and twice with `stepwise`. The kernel that
    rearranges the weights runs before the first step only. A step after a change of the weights uses the new values."""
    with on_metal() as log:
        layers = [nn.LSTM(I, H, engine=engine), nn.LSTM(H, H, engine=engine)]
        stepper, x = nn.stepper(layers, 2), mx.ones((2, I))
        mx.eval(stepper(x))
        log.clear()
        for _ in range(3):
            mx.eval(stepper(x), stepper.state())
        names = [launch.name for launch in log]
        assert not [name for name in names if "arrange" in name]
        assert len(names) == (6 if engine == "fused" else 12), names
        layers[1].Wh *= 2
        stepper.reset()
        h = stepper(x)
        fresh = nn.stepper(layers, 2)
        assert mx.array_equal(h, fresh(x))


FRAMES = """
import resource, sys
import mlx.core as mx
import numpy as np
from mlx_lstm import nn

mx.set_default_device(mx.cpu)
stepper = nn.stepper([nn.LSTM(64, 64), nn.LSTM(64, 64)])
frames = [mx.ones((64,)), np.ones(64, np.float32)]

def held():
    mx.clear_cache()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, mx.get_active_memory()

for n in range(1000):
    stepper(frames[n % 2])
peak, active = held()
for n in range(int(sys.argv[1])):
    stepper(frames[n % 2])
new_peak, new_active = held()
print(new_peak - peak, new_active - active)
"""


@pytest.mark.parametrize("count", [10_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_streamed_frames_are_flat_in_memory(count):
    """Memory does not grow over many frames (calls of one time step). A leak of one state (256 bytes) per frame
    would make the process grow by at least 2,500 KiB, and the test allows 1,000 KiB."""
    command = [sys.executable, "-c", FRAMES, str(count)]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True).stdout
    peak, active = map(int, printed.split())
    assert peak < 1000 * 1024 and active == 0, printed


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_keep_acts_on_every_layer(kind, engine):
    """After `keep=0` a step of a list of layers equals the first step of new steppers, in every layer."""
    mx.random.seed(8)
    layers = [getattr(nn, kind)(I if n == 0 else H, H) for n in range(3)]
    with mx.stream(mx.cpu):
        stepper, fresh = (nn.stepper(layers, 2, engine=engine) for _ in range(2))
        for x in mx.random.normal((3, 2, I)):
            stepper(x)
        x = mx.random.normal((2, I))
        assert_close(stepper(x, keep=mx.zeros(2)), fresh(x))
        assert_close(stepper.state(), fresh.state())
        half = [state * 0.5 for state in as_tuple(stepper.state())]
        fresh.set_state(tuple(half) if len(half) > 1 else half[0])
        assert_close(stepper(x, keep=mx.full((2,), 0.5)), fresh(x))
        assert_close(stepper.state(), fresh.state())


@pytest.mark.parametrize("engine", ["fused", "stepwise"])
def test_keep_acts_on_every_layer_on_a_gpu(engine):
    with on_metal():
        layers = [nn.GRU(I, H), nn.GRU(H, H)]
        stepper, fresh = (nn.stepper(layers, 2, engine=engine) for _ in range(2))
        stepper(mx.ones((2, I)))
        x = mx.full((2, I), 0.5)
        assert_close(stepper(x, keep=mx.zeros(2)), fresh(x))
        assert_close(stepper.state(), fresh.state())


def as_tuple(state):
    return state if isinstance(state, tuple) else (state,)


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("is_list", [False, True], ids=["a layer", "a list"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_the_states_are_copies(kind, is_list, engine):
    """Neither a later step changes the arrays that `state` returned, nor does writing to them change the stepper."""
    layer = getattr(nn, kind)(I, H, engine=engine)
    with mx.stream(mx.cpu):
        stepper, x = nn.stepper([layer], 2) if is_list else layer.stepper(2), mx.ones((2, I))
        for _ in range(2):  # a stepper on `numpy` has two buffers for h
            stepper(x)
            states, as_mlx = as_tuple(stepper.state(as_numpy=True)), as_tuple(stepper.state())
            copies = [state.copy() for state in states]
            stepper(x)
            for state, copy, other in zip(states, copies, as_mlx, strict=True):
                np.testing.assert_array_equal(state, copy)
                np.testing.assert_array_equal(np.array(other), copy)
            before = [state.copy() for state in as_tuple(stepper.state(as_numpy=True))]
            for state in (*as_tuple(stepper.state(as_numpy=True)), *states):
                state[...] = 7
            for state, copy in zip(as_tuple(stepper.state(as_numpy=True)), before, strict=True):
                np.testing.assert_array_equal(state, copy)
            given = [state.copy() for state in before]
            stepper.set_state(tuple(given) if len(given) > 1 else given[0])
            for state in given:
                state[...] = 9
            for state, copy in zip(as_tuple(stepper.state(as_numpy=True)), before, strict=True):
                np.testing.assert_array_equal(state, copy)


FORMS_OF_NUMPY = {
    "reversed": lambda array: np.ascontiguousarray(array[..., ::-1])[..., ::-1],
    "big-endian": lambda array: array.astype(">f4"),
    "big-endian integers": lambda array: array.astype(">i2"),
    "big-endian float16": lambda array: array.astype(">f2"),
    "long double": lambda array: array.astype(np.longdouble),
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "bool": lambda array: array > 0,
}


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("form", FORMS_OF_NUMPY)
def test_any_array_of_numpy(form, engine):
    """x, keep and the states may have any byte order, memory order and width; the numbers are the same ones."""
    change, rng = FORMS_OF_NUMPY[form], np.random.default_rng(3)
    x, h, c, keep = (rng.integers(0, 2, shape).astype(np.float32) for shape in ((2, I), (2, H), (2, H), (2,)))
    with mx.stream(mx.cpu):
        layer = nn.LSTM(I, H, engine=engine)
        one, other = layer.stepper(2), layer.stepper(2)
        one.set_state((change(h), change(c)))
        other.set_state((h, c))
        np.testing.assert_array_equal(one(change(x), keep=change(keep)), other(x, keep=keep))
        for name, kind in (("object", object), ("datetime64[s]", "M8[s]"), ("<U32", "U32")):
            with pytest.raises(ValueError, match=r"x must be real but got ") as error:
                one(np.zeros((2, I)).astype(kind))
            assert name in str(error.value)


def test_any_array_of_numpy_on_a_gpu():
    with on_metal():
        stepper = nn.GRU(I, H).stepper(2)
        x = np.ones((2, I), np.float32)
        expected = stepper(x)
        for change in FORMS_OF_NUMPY.values():
            stepper.reset()
            np.testing.assert_array_equal(stepper(change(x)), expected)


@pytest.mark.parametrize("engine", ["numpy", "ops"])
def test_a_reversed_view_of_one_number(engine):
    """x and the states may be slices of a reversed array, also slices of a single number."""
    with mx.stream(mx.cpu):
        stepper = nn.GRU(1, 1, engine=engine).stepper()
        signal = np.arange(3, dtype=np.float32)
        stepper.set_state(signal[::-1][:1])
        one = stepper(signal[::-1][1:2])
        stepper.set_state(signal[2:])
        np.testing.assert_array_equal(stepper(signal[1:2]), one)
