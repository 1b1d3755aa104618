"""`mlx_lstm.lstm` against the LSTMs people come from: torch, keras and jax, values and gradients, on the CPU."""

import os

import mlx.core as mx
import numpy as np
import pytest

from mlx_lstm import lstm
from mlx_lstm.closeness import assert_within, bounds

T, B, I, H = 7, 3, 5, 4
ENGINES = ("numpy", "ops")


def draw():
    rng = np.random.default_rng(12)
    shapes = {"x": (T, B, I), "Wx": (4 * H, I), "Wh": (4 * H, H), "b": (4 * H,), "h0": (B, H), "c0": (B, H)}
    case = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    return case, rng.normal(size=(T, B, H)).astype(np.float32)


def ours(case, dh, engine, **options):
    """h and the gradient of every array, by name."""
    names = list(case)
    (h,), gradients = mx.vjp(
        lambda *arrays: [lstm(**dict(zip(names, arrays, strict=True)), **options, engine=engine).h],
        [mx.array(array) for array in case.values()],
        [mx.array(dh)],
    )
    return {"h": np.array(h)} | {name: np.array(gradient) for name, gradient in zip(names, gradients, strict=True)}


def assert_equal(got, expected, case, dh, **options):
    """Each of two float32 results may be as far from the truth as the bound says."""
    options = {name: value for name, value in options.items() if value is not None}
    limit = bounds(case | options, np.float32, {"h": dh})
    for name, value in expected.items():
        assert_within(name, got[name], np.asarray(value).astype(np.float64), 2 * limit[name])


@pytest.mark.parametrize("engine", ENGINES)
def test_torch(engine):
    torch = pytest.importorskip("torch")
    case, dh = draw()
    layer = torch.nn.LSTM(I, H)
    names = {"Wx": "weight_ih_l0", "Wh": "weight_hh_l0", "b": "bias_ih_l0"}
    with torch.no_grad():
        for name, theirs in names.items():
            getattr(layer, theirs).copy_(torch.from_numpy(case[name]))
        layer.bias_hh_l0.zero_()
    x, h0, c0 = (torch.tensor(case[name], requires_grad=True) for name in ("x", "h0", "c0"))
    h, _ = layer(x, (h0[None], c0[None]))
    h.backward(torch.from_numpy(dh))
    expected = {"h": h.detach(), "x": x.grad, "h0": h0.grad, "c0": c0.grad}
    expected |= {name: getattr(layer, theirs).grad for name, theirs in names.items()}
    assert_equal(ours(case, dh, engine), {name: value.numpy() for name, value in expected.items()}, case, dh)


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("engine", ENGINES)
def test_keras(engine, backwards):
    """Keras' gate order i, f, c, o is ifgo here; its kernels are transposed; going backwards it does not realign."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    case, dh = draw()
    layer = keras.layers.LSTM(H, return_sequences=True, go_backwards=backwards)
    layer.build((B, T, I))
    layer.set_weights([case["Wx"].T, case["Wh"].T, case["b"]])
    h = np.asarray(layer(case["x"].swapaxes(0, 1), initial_state=[case["h0"], case["c0"]])).swapaxes(0, 1)
    got = ours(case, dh, engine, reverse=backwards)
    assert_equal(got, {"h": h[::-1] if backwards else h}, case, dh, reverse=backwards)


@pytest.mark.parametrize("lengths", [None, [7, 2, 4]], ids=["full", "ragged"])
@pytest.mark.parametrize("engine", ENGINES)
def test_jax(engine, lengths):
    """jax's plain reference of cuDNN's LSTM, with its flat weights; its padding is zero too."""
    jax = pytest.importorskip("jax")
    rnn = pytest.importorskip("jax.experimental.rnn")
    case, dh = draw()

    def theirs(x, Wx, Wh, b, h0, c0):
        weights = ({0: Wx}, {0: Wh}, {0: b}, {0: 0 * b})
        y, _, _ = rnn.lstm_ref(
            x.swapaxes(0, 1),
            h0[None],
            c0[None],
            *weights,
            seq_lengths=np.asarray(lengths or [T] * B, np.int32),
            input_size=I,
            hidden_size=H,
            num_layers=1,
            dropout=0.0,
            bidirectional=False,
        )
        return y.swapaxes(0, 1)

    names = ("x", "Wx", "Wh", "b", "h0", "c0")
    with jax.default_matmul_precision("highest"):
        h, pull = jax.vjp(theirs, *(case[name] for name in names))
        expected = {"h": h} | dict(zip(names, pull(dh), strict=True))
    assert_equal(ours(case, dh, engine, lengths=lengths), expected, case, dh, lengths=lengths)
