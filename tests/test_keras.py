"""Tests of `mlx_lstm.keras`: Keras layers and our layers with the same weights give the same outputs, and weights
convert from Keras to ours and back."""

import os
import re
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from assertions import assert_within, bounds

from mlx_lstm import gru, keras, lstm, nn, recurrence

T, B, I, H = 7, 3, 5, 4
X = np.random.default_rng(5).normal(size=(T, B, I)).astype(np.float32)


def layer_of(name, **options):
    """Return a built Keras layer with random weights and biases. (Keras itself initializes most biases to 0, which
    could hide errors.)"""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    theirs = pytest.importorskip("keras")
    both, name = name.startswith("Bidirectional "), name.removeprefix("Bidirectional ")
    layer = getattr(theirs.layers, name)(H, return_sequences=True, **options)
    layer = theirs.layers.Bidirectional(layer) if both else layer
    layer.build((B, T, I))
    rng = np.random.default_rng(3)
    layer.set_weights([rng.normal(0, 0.5, array.shape).astype(np.float32) for array in layer.get_weights()])
    return layer


def output_of(layer):
    """Return the output of a Keras layer for the input X as a float64 array [T, B, H]."""
    return np.asarray(layer(X.swapaxes(0, 1))).swapaxes(0, 1).astype(np.float64)


def within(got, expected, case):
    """Assert that our output and Keras' output, both float32, differ by at most twice the error bound: each of them
    may have an error as large as the bound."""
    case = {name: np.array(value) if isinstance(value, mx.array) else value for name, value in case.items()} | {"x": X}
    assert_within("h", np.array(got), expected, 2 * bounds(case, np.float32)["h"])


@pytest.mark.parametrize("use_bias", [True, False])
def test_lstm_from_keras_and_back(use_bias):
    layer = layer_of("LSTM", use_bias=use_bias)
    weights = keras.lstm_from_keras(*layer.get_weights())
    assert list(weights) == ["Wx", "Wh", "b"][: 2 + use_bias]
    with mx.stream(mx.cpu):
        within(lstm(mx.array(X), **weights).h, output_of(layer), weights)
        ours = nn.LSTM(I, H, bias=use_bias)
        ours.update({{"b": "bias"}.get(name, name): array for name, array in weights.items()})
        within(mx.swapaxes(ours(mx.array(X.swapaxes(0, 1)))[0], 0, 1), output_of(layer), weights)
        drawn = nn.LSTM(I, H, bias=use_bias)
        layer.set_weights(keras.lstm_to_keras(drawn.Wx, drawn.Wh, drawn.bias))
        weights = {"Wx": drawn.Wx, "Wh": drawn.Wh} | ({"b": drawn.bias} if use_bias else {})
        within(lstm(mx.array(X), **weights).h, output_of(layer), weights)
    for there, here in zip(layer.get_weights(), keras.lstm_to_keras(**weights), strict=True):
        np.testing.assert_array_equal(there, here)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("reset_after", [True, False])
def test_gru_from_keras_and_back(reset_after, use_bias):
    layer = layer_of("GRU", use_bias=use_bias, reset_after=reset_after)
    reset = {"reset": "after" if reset_after else "before"}
    weights = keras.gru_from_keras(*layer.get_weights())
    assert ("bhn" in weights) == (use_bias and reset_after)
    with mx.stream(mx.cpu):
        x, case = mx.array(X), {"op": "gru", **reset}
        within(gru(x, **weights, **reset).h, output_of(layer), weights | case)
        rng = np.random.default_rng(8)
        drawn = {name: mx.array(rng.normal(0, 0.5, array.shape).astype(np.float32)) for name, array in weights.items()}
        layer.set_weights(keras.gru_to_keras(**drawn, reset_after=reset_after))
        within(gru(x, **drawn, **reset).h, output_of(layer), drawn | case)
        if reset_after and use_bias:
            theirs = mlx.nn.GRU(I, H)
            theirs.update(drawn)
            within(mx.swapaxes(theirs(mx.swapaxes(x, 0, 1)), 0, 1), output_of(layer), drawn | case)
    for name, array in keras.gru_from_keras(*layer.get_weights()).items():
        np.testing.assert_array_equal(np.array(array), np.array(drawn[name]), err_msg=name)


GRUS = [("GRU", "gru", {}, {}), ("GRU", "gru", {"reset_after": False}, {"reset": "before"})]
WRAPPED = [
    ("LSTM", "lstm", {"use_bias": False}, {}),
    ("SimpleRNN", "rnn", {"activation": "relu"}, {"activation": "relu"}),
]
WRAPPED += [pytest.param(*gru, marks=pytest.mark.slow) for gru in GRUS]


@pytest.mark.parametrize("name, op, theirs, ours", WRAPPED)
def test_bidirectional_from_keras_and_back(name, op, theirs, ours):
    """Bidirectional layers of Keras convert to ours and back without any change, and the outputs agree. Each
    direction is converted as one layer, so this also tests `rnn_from_keras`."""
    layer, from_keras = layer_of(f"Bidirectional {name}", **theirs), getattr(keras, f"{op}_from_keras")
    weights, options = keras.bidirectional_from_keras(from_keras, layer.get_weights()), ours | {"bidirectional": True}
    assert "b" in weights or not theirs.get("use_bias", True)
    with mx.stream(mx.cpu):
        h = getattr(recurrence, op)(mx.array(X), **weights, **options).h
        within(h, output_of(layer), weights | options | {"op": op})
    to_keras = getattr(keras, f"{op}_to_keras")
    to_keras = partial(to_keras, reset_after="reset" not in ours) if op == "gru" else to_keras
    layer.set_weights(keras.bidirectional_to_keras(to_keras, weights))
    for name, array in keras.bidirectional_from_keras(from_keras, layer.get_weights()).items():
        np.testing.assert_array_equal(np.array(array), np.array(weights[name]), err_msg=name)


MASKED = [("LSTM", {}), ("LSTM", {"go_backwards": True}), ("Bidirectional LSTM", {})]
RARER = [("LSTM", {"zero_output_for_mask": True}), ("GRU", {}), ("SimpleRNN", {"go_backwards": True})]
MASKED += [pytest.param(*case, marks=pytest.mark.slow) for case in [*RARER, ("Bidirectional GRU", {})]]


@pytest.mark.parametrize("name, options", MASKED, ids=str)
def test_steps_masked_in_the_middle(name, options):
    """With the option `hold` (steps that keep the state), our ops give the same outputs as Keras' masking by an
    embedding with `mask_zero`. Masked steps come before the first word and between words; one text has no words.
    Without `hold` the outputs differ."""
    layer, theirs = layer_of(name, **options), pytest.importorskip("keras")
    words = np.array([[0, 3, 0, 0, 5, 1, 0], [2, 2, 0, 6, 0, 4, 4], [0] * T])
    embedding = theirs.layers.Embedding(7, I, mask_zero=True)
    model = theirs.Sequential([theirs.Input((T,), dtype="int32"), embedding, layer])
    expected = np.asarray(model.predict(words, verbose=0)).swapaxes(0, 1).astype(np.float64)
    op = {"LSTM": "lstm", "GRU": "gru", "SimpleRNN": "rnn"}[name.removeprefix("Bidirectional ")]
    convert, both = getattr(keras, f"{op}_from_keras"), "Bidirectional" in name
    weights = layer.get_weights()
    weights = keras.bidirectional_from_keras(convert, weights) if both else convert(*weights)
    case = {"op": op, "bidirectional": both, "reverse": "go_backwards" in options, "hold": words.T == 0}
    x = np.asarray(embedding(words)).swapaxes(0, 1)
    call = partial(getattr(recurrence, op), mx.array(x), **weights)
    with mx.stream(mx.cpu):
        h, free = (np.array(call(**(dict(list(case.items())[1:]) | given)).h) for given in ({}, {"hold": None}))
    case |= {name: np.array(value) for name, value in weights.items()} | {"x": x}
    limit = 2 * bounds(case, np.float32)["h"]
    # Keras returns 0 at masked steps if zero_output_for_mask is set. Its Bidirectional always sets this option.
    zeroed = (words.T == 0)[..., None] & (both or "zero_output_for_mask" in options)
    # A reversed layer of Keras returns the last time step first. Our op returns the first time step first.
    turn = -1 if case["reverse"] else 1
    assert_within("h", np.where(zeroed, 0, h)[::turn], expected, limit)
    assert np.abs(free[::turn] - expected).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name, order", [("LSTM", "ifgo"), ("GRU", "zrn")])
def test_the_recipe_of_a_mask_for_each_gate(name, order):
    """The code of docs/recipes.md for one dropout mask per gate gives the outputs of a Keras layer in training with
    the same weights and masks."""
    layer, op = layer_of(name, recurrent_dropout=0.5), name.lower()
    masks = {
        gate: mask.astype(np.float32)
        for gate, mask in zip(order, np.random.default_rng(6).integers(0, 3, (len(order), B, H)), strict=True)
    }
    layer.cell.get_recurrent_dropout_mask = lambda h: list(masks.values())
    expected = np.asarray(layer(X.swapaxes(0, 1), training=True)).swapaxes(0, 1).astype(np.float64)
    case = {"op": op}

    def recorded(x, Wx, Wh, b, **options):
        case.update(Wx=Wx, Wh=Wh, b=b, **options)
        return getattr(recurrence, op)(x, Wx, Wh, b, **options)

    scope = getattr(keras, f"{op}_from_keras")(*layer.get_weights()) | {"x": mx.array(X), op: recorded, "B": B, "H": H}
    scope["masks"] = mx.array(np.stack([masks[gate] for gate in sorted(order, key="ifgorzn".index)], axis=1))
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
    block = next(text for text in page.split("```python\n") if f"import {op}\n" in text and "\nmasks = " in text)
    after = re.split(r"\nmasks = .*", block)[1]
    exec(f"import mlx.core as mx\n{after.partition('h = ')[0]}", scope)
    h = bounds({n: np.array(v) if isinstance(v, mx.array) else v for n, v in case.items()} | {"x": X}, np.float32)["h"]
    assert_within("h", np.array(scope["outputs"]), expected, 2 * h)
    assert np.abs(expected - output_of(layer)).max() > 0.01  # without the masks the output differs


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_dtypes_stay(dtype):
    """Weights convert from Keras and back without any change. The conversion to Keras widens 16-bit weights to
    float32."""
    rng, back = np.random.default_rng(1), np.promote_types(dtype, np.float32)
    shapes = {"lstm": [(I, 4 * H), (H, 4 * H), (4 * H,)], "rnn": [(I, H), (H, H), (H,)]}
    shapes["gru"] = [(I, 3 * H), (H, 3 * H), (3 * H,)]
    for word, three in shapes.items():
        weights = [rng.normal(size=shape).astype(dtype) for shape in three]
        with mx.stream(mx.cpu):
            found = getattr(keras, f"{word}_from_keras")(*weights)
            assert all(np.array(array).dtype == dtype for array in found.values())
            again = getattr(keras, f"{word}_to_keras")(**found, **({"reset_after": False} if word == "gru" else {}))
        for one, other in zip(weights, again, strict=True):
            assert other.dtype == back
            np.testing.assert_array_equal(one, other)
    both = keras.gru_from_keras(*weights[:2], np.stack([weights[2], weights[2]]))
    assert np.array(both["b"]).dtype == np.array(both["bhn"]).dtype == dtype


def test_wrong_shapes_and_integers_are_refused():
    kernel, recurrent, bias = np.ones((I, 4 * H)), np.ones((H, 4 * H)), np.ones(4 * H)
    for wrong in ((kernel.T, recurrent), (kernel, recurrent[1:]), (kernel[0], recurrent), (kernel, recurrent[0])):
        with pytest.raises(
            ValueError, match=r"\[lstm_from_keras\] kernel and recurrent_kernel must have shapes \[I, 4H"
        ):
            keras.lstm_from_keras(*wrong)
    with pytest.raises(ValueError, match=r"bias must have shape \[4H\] but got shape \[15\]"):
        keras.lstm_from_keras(kernel, recurrent, bias[1:])
    for n, word in enumerate(("kernel", "recurrent_kernel", "bias")):
        weights = [np.ones(array.shape, int if n == k else float) for k, array in enumerate((kernel, recurrent, bias))]
        with mx.stream(mx.cpu), pytest.raises(ValueError, match=rf"\[lstm_from_keras\] {word} must be float32.*int64"):
            keras.lstm_from_keras(*weights)
    kernel, recurrent = np.ones((I, 3 * H)), np.ones((H, 3 * H))
    with pytest.raises(ValueError, match=r"bias must have shape \[3H\] or \[2, 3H\] but got shape \[3, 12\]"):
        keras.gru_from_keras(kernel, recurrent, np.ones((3, 3 * H)))
    weights = keras.gru_from_keras(kernel, recurrent, np.ones((2, 3 * H)))
    with pytest.raises(ValueError, match="bhn must be None with reset_after=False"):
        keras.gru_to_keras(**weights, reset_after=False)
    with pytest.raises(ValueError, match=r"Wh must have shape \[12, 4\]"):
        keras.gru_to_keras(weights["Wx"], weights["Wx"])
    kernel, recurrent = np.ones((I, H)), np.ones((H, H))
    with pytest.raises(ValueError, match=r"\[rnn_from_keras\] .* shapes \[I, H\] and \[H, H\] but got shapes \[4, 5\]"):
        keras.rnn_from_keras(kernel.T, recurrent)
    with pytest.raises(ValueError, match=r"bias must have shape \[H\] but got shape \[1, 4\]"):
        keras.rnn_from_keras(kernel, recurrent, np.ones((1, H)))
    for name, G in (("rnn", 1), ("gru", 3), ("lstm", 4)):  # a Bidirectional, with and without biases
        one = [np.ones((I, G * H)), np.ones((H, G * H)), np.ones(G * H)]
        for way in (one, one[:2]):
            rule = (
                rf"^\[{name}_from_keras\] the arrays must be those of one layer \(bidirectional_from_keras\({name}_from"
            )
            with pytest.raises(ValueError, match=rule):
                getattr(keras, f"{name}_from_keras")(*way, *way)
    for weights in ([kernel, recurrent, kernel], [kernel, recurrent, recurrent, kernel], []):
        with pytest.raises(ValueError, match="weights must be those of two layers of the same shapes but got shapes"):
            keras.bidirectional_from_keras(keras.rnn_from_keras, weights)
    for make, message in (
        (
            lambda: keras.lstm_to_keras(mx.ones((17, I)), mx.ones((16, H))),
            r"Wx must have shape \[4H, I\] but got shape",
        ),
        (
            lambda: keras.bidirectional_from_keras("lstm", [kernel] * 4),
            "convert must be lstm_from_keras, gru_from_keras or",
        ),
        (lambda: keras.bidirectional_from_keras(keras.rnn_from_keras, None), "weights must be the list that"),
        (
            lambda: keras.bidirectional_to_keras(None, {}),
            "convert must be lstm_to_keras, gru_to_keras or rnn_to_keras but",
        ),
        (
            lambda: keras.bidirectional_to_keras(keras.rnn_to_keras, [kernel]),
            "arrays must be a dict, as .* but got list",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(ValueError, match=r"Wh must have shape \[2, G \* H, H\] but got shape \[4, 4\]"):
        keras.bidirectional_to_keras(keras.rnn_to_keras, keras.rnn_from_keras(kernel, recurrent))


def test_arrays_of_both_directions_are_checked_before_they_are_parted():
    arrays = {"Wx": mx.ones((8 * H, I)), "Wh": mx.ones((2, 4 * H, H)), "b": mx.ones(8 * H)}
    for name, value, rule in (
        ("b", mx.ones(8 * H + 1), r"b must have shape \[32\] but got shape \[33\]"),
        ("Wx", mx.ones((8 * H + 1, I)), r"Wx must have shape \[32, I\] but got shape \[33, "),
        ("b", [1.0] * 8 * H, "b must be an mlx.core.array: .* but got list"),
        ("bias", mx.ones(8 * H), "the name of an array must be one of 'Wx', .* but got 'bias'"),
    ):
        with pytest.raises(ValueError, match=rf"^\[bidirectional_to_keras\] {rule}"):
            keras.bidirectional_to_keras(keras.lstm_to_keras, arrays | {name: value})
    rule = r"^\[convert\] arrays must hold numbers, in rows of equal length,"
    for call in (keras.lstm_from_keras, lambda *a: keras.bidirectional_from_keras(keras.lstm_from_keras, a)):
        with pytest.raises(ValueError, match=rule):
            call([[1.0], [1.0, 2.0]], np.ones((H, 4 * H)))
