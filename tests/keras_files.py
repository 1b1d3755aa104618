"""Write Keras models and their outputs for tests: `python tests/keras_files.py FOLDER`. Keras has one backend per
process, so this file runs in a separate process.

The command saves a model with every recurrent layer of Keras as files, and the output of each layer. It also runs
the models `ours_*` (written by `mlx_lstm`) of the folder, and converts Keras layers to ours and back.
`test_convert.py` reads the results.
"""

import sys
from pathlib import Path

import keras
import mlx.core as mx
import numpy as np

from mlx_lstm import convert, nn, torch

T, B, I, H = 5, 3, 6, 4
layers = keras.layers


def draw(layer, seed=3):
    """Set the float32 weights of a layer to random numbers. Keras itself initializes most biases to 0, which would
    hide errors."""
    rng = np.random.default_rng(seed)
    arrays = [
        rng.normal(0, 0.5, array.shape).astype("float32") if array.dtype == np.float32 else array
        for array in layer.get_weights()
    ]
    layer.set_weights(arrays)


def whole():
    """Return two models with the same weights: the complete model, and a model that returns a dict {layer name:
    output}."""
    more = {"return_sequences": True}
    inner = [
        layers.Bidirectional(layers.GRU(H, **more), name="both"),
        layers.Bidirectional(layers.GRU(H, use_bias=False, **more), name="no_bias"),
    ]
    inner = keras.Sequential([keras.Input((T, H)), *inner], name="inner")
    chain = [layers.LSTM(H, name="lstm1", **more), layers.Dropout(0.1), layers.LSTM(H, name="lstm2", **more), inner]
    chain += [layers.GRU(H, reset_after=False, recurrent_activation="hard_sigmoid", name="before", **more)]
    chain += [layers.SimpleRNN(H, activation="relu", name="plain", **more)]
    chain += [layers.RNN(layers.LSTMCell(H), name="of_cell", **more)]
    chain += [layers.TimeDistributed(layers.Dense(2), name="head")]
    x = y = keras.Input((T, I))
    outputs = {}
    for layer in chain:
        if layer is inner:
            outputs["both"] = inner.layers[0](y)
        y = layer(y)
        outputs["no_bias" if layer is inner else layer.name] = y
    model = keras.Model(x, y, name="whole")
    draw(model)
    return model, keras.Model(x, {name: y for name, y in outputs.items() if not name.startswith(("dropout", "head"))})


def time_first(array):
    return np.asarray(array).swapaxes(0, 1)


def there_and_back():
    """Convert two Keras layers into one of ours and back. Check that the weights stay the same. Return a list: our
    layer's repr, then the error message for each layer that cannot be converted."""
    stack = [layers.Bidirectional(layers.GRU(H, return_sequences=True)) for _ in range(2)]
    stack[1](stack[0](np.zeros((B, T, I), np.float32)))
    for n, layer in enumerate(stack):
        draw(layer, n)
    ours = torch.from_weights(convert.from_keras(*stack), batch_first=True)
    for layer, arrays in zip(stack, convert.to_keras(convert.from_torch(ours)), strict=True):
        for one, other in zip(layer.get_weights(), arrays, strict=True):
            np.testing.assert_array_equal(one, other)
    odd = layers.LSTM(3, activation="gelu", name="odd")
    odd.build((B, T, I))
    backwards, forwards = (layers.GRU(I, return_sequences=True, go_backwards=way) for way in (True, False))
    x = np.random.default_rng(1).normal(0, 0.5, (B, T, I)).astype("float32")
    theirs = forwards(backwards(x))  # the outputs of both are in the reverse order
    h = nn.from_weights(convert.from_keras(backwards, forwards))(mx.array(x))[0]
    np.testing.assert_allclose(np.array(h)[:, ::-1], np.asarray(theirs), atol=1e-6)
    rnn = [layers.RNN(layers.LSTMCell(H, activation=act), go_backwards=act == "relu") for act in ("tanh", "relu")]
    unlike = layers.Bidirectional(rnn[0], backward_layer=rnn[1], name="both")
    leaky = layers.LSTM(3, activation=layers.LeakyReLU(), name="leaky")
    for layer in (unlike, leaky):
        layer.build((B, T, I))
    said = [repr(ours)]
    wrongs = [[], [layers.Dense(3)], [layers.LSTM(3, name="new")], [stack[0], stack[0]], [odd], [backwards] * 2]
    wrongs += [[unlike], [leaky]]
    for wrong in wrongs:
        try:
            convert.from_keras(*wrong)
        except ValueError as error:
            said.append(str(error))
    return said


def main(folder):
    """Write the model files and the outputs of all layers into `folder`."""
    x = np.random.default_rng(0).normal(0, 0.5, (B, T, I)).astype("float32")
    model, every = whole()
    for name in ("m.keras", "m.h5"):
        model.save(folder / name)
    model.save_weights(folder / "m.weights.h5")
    found = {"x": time_first(x)} | {f"m/{name}": time_first(y) for name, y in every(x, training=False).items()}
    for path in sorted(folder.glob("ours_*.keras")) + sorted(folder.glob("ours_*.h5")):
        if path.name.endswith(".weights.h5"):
            continue
        loaded = keras.models.load_model(path)
        for stack in [inner for inner in loaded.layers if isinstance(inner, keras.Sequential)] or [loaded]:
            y = x
            for n, layer in enumerate(stack.layers):
                y = layer(y)
                found[f"{path.name}/{stack.name}/{n}"] = time_first(y)
        loaded.load_weights(path.with_name(f"{path.stem}.weights.h5"))
    np.savez(folder / "outputs.npz", **found, said=there_and_back(), backend=keras.backend.backend())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
