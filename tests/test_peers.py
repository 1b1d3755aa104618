"""Tests that compare outputs and gradients on the CPU with the layers of torch, Keras and jax."""

import os
from functools import cache

import numpy as np
import pytest
from assertions import assert_within, bounds
from cases import draw, run

SIZES = T, B, I, H = 7, 3, 5, 4
ENGINES = ("numpy", "ops")
DIRECTIONS = pytest.mark.parametrize("bidirectional", [False, True], ids=["one", "both"])


def drawn(**options):
    """Return (case, cotangents) for a random LSTM, GRU or RNN in float32. The case is a dict of arrays and options.
    Only the output h has a cotangent."""
    rng = np.random.default_rng(12)
    case = draw(rng, sizes=(*SIZES, H), dtype=np.float32, **options)
    width = case["h0"].shape[-1]
    return case, {"h": rng.normal(size=(T, B, width)).astype(np.float32)}


def assert_equal(engine, case, cotangents, expected, limit):
    """Assert that our results differ from the expected results by at most twice the error bound `limit`, because both
    are float32 results with rounding errors."""
    outputs, gradients = run(case, engine, np.float32, cotangents)
    for name, value in expected.items():
        assert_within(name, (outputs | gradients)[name], np.asarray(value).astype(np.float64), 2 * limit[name])


@cache  # each peer computes a case once for all engines, and so does the reference that gives the bounds
def by_torch(name, lengths, bidirectional):
    """Return (case, cotangents, results of torch, error bounds) for a layer of torch.nn."""
    torch = pytest.importorskip("torch")
    torch_layer = pytest.importorskip("torch_layers").torch_layer
    sizes = (T, B, I, 5) if "projection" in name else SIZES
    options = {"bidirectional": bidirectional, "lengths": lengths and [*lengths], "dtype": torch.float32}
    case, cotangents, expected = torch_layer(name, sizes, **options)
    return case, cotangents, expected, bounds(case, np.float32, cotangents)


@DIRECTIONS
@pytest.mark.parametrize("lengths", [None, (7, 2, 4)], ids=["full", "packed"])
@pytest.mark.parametrize("name", ["lstm", "lstm_projection", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("engine", ENGINES)
def test_torch(engine, name, lengths, bidirectional):
    """Outputs, last states and every gradient agree with all recurrent layers of torch.nn."""
    case, cotangents, expected, limit = by_torch(name, lengths, bidirectional)
    assert set(expected) == {name for name in case if isinstance(case[name], np.ndarray)} | set(cotangents)
    assert_equal(engine, case, cotangents, expected, limit)


def keras_weights(case, d):
    """Return the weights of direction d as Keras stores them: transposed matrices, and for a GRU with reset after
    the product a bias of two rows."""
    both = case.get("bidirectional", False)
    Wh = case["Wh"][d] if both else case["Wh"]
    Wx, b = (np.split(case[name], 1 + both)[d] for name in ("Wx", "b"))
    if "bhn" in case:
        b = np.stack([b, np.concatenate([np.zeros(2 * H), np.split(case["bhn"], 1 + both)[d]])])
    return [Wx.T, Wh.T, b]


HARD = ("hard_sigmoid_sixth", "hard_sigmoid_sixth", "tanh", "hard_sigmoid_sixth", "tanh")
LAYERS = {  # name that begins with Keras' class: (options of the Keras layer, options of our op)
    "LSTM": ({}, {}),
    "GRU": ({}, {"op": "gru", "gate_order": "zrn"}),
    "GRU reset before": ({"reset_after": False}, {"op": "gru", "gate_order": "zrn", "reset": "before"}),
    "SimpleRNN": ({}, {"op": "rnn"}),
    "LSTM hard": ({"recurrent_activation": "hard_sigmoid"}, {"activations": HARD}),
}


WAYS = {"forward": {}, "reverse": {"reverse": True}, "both": {"bidirectional": True}}


@cache
def by_keras(word, way):
    """Return (case, cotangents, h of Keras, error bounds) for a layer of LAYERS in a direction of WAYS."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    theirs, options = LAYERS[word]
    case, cotangents = drawn(**options, **WAYS[way])
    backwards, both = way == "reverse", way == "both"
    layer = getattr(keras.layers, word.split()[0])(H, return_sequences=True, go_backwards=backwards, **theirs)
    layer = keras.layers.Bidirectional(layer) if both else layer
    layer.build((B, T, I))
    layer.set_weights([array for d in range(1 + both) for array in keras_weights(case, d)])
    states = [
        np.split(case[name], 2, axis=-1)[d] if both else case[name]
        for d in range(1 + both)
        for name in ("h0", "c0")
        if name in case
    ]
    h = np.asarray(layer(case["x"].swapaxes(0, 1), initial_state=states)).swapaxes(0, 1)
    return case, cotangents, {"h": h[::-1] if backwards else h}, bounds(case, np.float32, cotangents)


# Of a layer in both directions one runs forward and one in reverse. So a direction alone is tested with one layer.
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("word, way", [*((word, "both") for word in LAYERS), ("GRU", "forward"), ("LSTM", "reverse")])
def test_keras(word, way, engine):
    """Outputs agree with Keras. Keras' gate orders i, f, c, o and z, r, h are called `ifgo` and `zrn` here. With
    go_backwards, Keras returns the outputs in reversed order; our outputs are in the order of time."""
    assert_equal(engine, *by_keras(word, way))


FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options for a short compilation in jax. The default optimisations take seconds."""


@cache
def by_jax():
    """Return (case, cotangents, results of jax, error bounds) for jax's reference implementation of cuDNN's LSTM, in
    both directions and with a length for each sequence."""
    jax = pytest.importorskip("jax")
    rnn = pytest.importorskip("jax.experimental.rnn")
    case, cotangents = drawn(bidirectional=True)
    case |= {"lengths": [7, 2, 4]}
    D = 2

    def parts(array, axis=0):
        return dict(enumerate(jax.numpy.split(array, D, axis=axis)))

    def theirs(x, Wx, Wh, b, h0, c0):
        Wh = dict(enumerate(Wh.reshape(D, 4 * H, H)))
        states = (jax.numpy.stack(list(parts(state, axis=-1).values())) for state in (h0, c0))
        y, _, _ = rnn.lstm_ref(
            x.swapaxes(0, 1),
            *states,
            parts(Wx),
            Wh,
            parts(b),
            parts(0 * b),
            seq_lengths=np.asarray(case["lengths"], np.int32),
            input_size=I,
            hidden_size=H,
            num_layers=1,
            dropout=0.0,
            bidirectional=True,
        )
        return y.swapaxes(0, 1)

    names = ("x", "Wx", "Wh", "b", "h0", "c0")

    def with_gradients(inputs, cotangent):
        h, pull = jax.vjp(theirs, *inputs)
        return h, *pull(cotangent)

    with jax.default_matmul_precision("highest"):
        found = jax.jit(with_gradients, compiler_options=FAST)([case[name] for name in names], cotangents["h"])
        expected = dict(zip(("h", *names), found, strict=True))
    return case, cotangents, expected, bounds(case, np.float32, cotangents)


@pytest.mark.parametrize("engine", ENGINES)
def test_jax(engine):
    """Outputs and gradients agree with jax. In both, outputs after the end of a sequence are 0."""
    assert_equal(engine, *by_jax())
