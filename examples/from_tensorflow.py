"""Keras to MLX and back: Keras trains an LSTM on TensorFlow, then MLX trains it further.

    python examples/from_tensorflow.py                      # needs tensorflow and keras
    python examples/from_tensorflow.py --hidden 256 --steps 400

The model predicts the next character of Python's documentation (`pydoc_data.topics`, which comes with every Python): it
has an embedding, an LSTM and a dense layer. Keras trains it for `--steps` steps. Then its weights move into MLX layers,
which compute the same logits, and MLX trains the model for the same number of steps. At the end the weights go back to
Keras, which computes the same loss as MLX. Training reads the first nine tenths of the text; the loss is measured on
the last tenth.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pydoc_data import topics
from typing import NamedTuple

os.environ["KERAS_BACKEND"] = "tensorflow"  # read when keras is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the products of single steps are too small for two threads

import keras
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import tensorflow
from support.command import run_main

import mlx_lstm
from mlx_lstm.keras import lstm_from_keras, lstm_to_keras


class Settings(NamedTuple):
    """Sizes of the model and options of its training, for both Keras and MLX."""

    steps: int = 150
    batch: int = 32
    window: int = 48
    embedding: int = 32
    hidden: int = 96
    learning_rate: float = 5e-3
    seed: int = 0


class Text(NamedTuple):
    """The text as codes; `held_out` [n, window + 1] has windows of the last tenth of the text."""

    size: int
    codes: np.ndarray
    held_out: np.ndarray

    @classmethod
    def of(cls, text: str, window: int) -> Text:
        alphabet = {character: code for code, character in enumerate(sorted(set(text)))}
        codes = np.array([alphabet[character] for character in text], np.int32)
        split = len(codes) * 9 // 10
        n = min(64, (len(codes) - split) // (window + 1))
        return cls(len(alphabet), codes[:split], codes[split : split + n * (window + 1)].reshape(n, window + 1))

    def windows(self, settings: Settings, seed: int) -> Iterator[np.ndarray]:
        """Yield as many batches [batch, window + 1] as settings.steps, from random places of the text."""
        rng = np.random.default_rng(seed)
        for _ in range(settings.steps):
            starts = rng.integers(0, len(self.codes) - settings.window, (settings.batch, 1))
            yield self.codes[starts + np.arange(settings.window + 1)]


# --- In Keras --------------------------------------------------------------------------------------------------------


def train_in_keras(text: Text, settings: Settings) -> keras.Model:
    """Train a new Keras model and return it."""
    keras.utils.set_random_seed(settings.seed)
    model = keras.Sequential(
        [
            keras.layers.Embedding(text.size, settings.embedding),
            keras.layers.LSTM(settings.hidden, return_sequences=True),
            keras.layers.Dense(text.size),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(settings.learning_rate), loss)
    for batch in text.windows(settings, settings.seed):
        model.train_on_batch(batch[:, :-1], batch[:, 1:])
    return model


def loss_in_keras(model: keras.Model, windows: np.ndarray) -> float:
    return float(model.evaluate(windows[:, :-1], windows[:, 1:], batch_size=len(windows), verbose=0))


# --- In MLX ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """The Keras model's layers in MLX. Input: codes [B, T]; output: logits [B, T, size]."""

    def __init__(self, size: int, settings: Settings):
        super().__init__()
        self.embedding = nn.Embedding(size, settings.embedding)
        self.lstm = mlx_lstm.nn.LSTM(settings.embedding, settings.hidden)
        self.dense = nn.Linear(settings.hidden, size)

    def __call__(self, codes: mx.array) -> mx.array:
        return self.dense(self.lstm(self.embedding(codes))[0])


def from_keras(theirs: keras.Model, text: Text, settings: Settings) -> Model:
    """Return an MLX model with the weights of the Keras model."""
    embedding, lstm, dense = (layer.get_weights() for layer in theirs.layers)
    weights = lstm_from_keras(*lstm)
    model = Model(text.size, settings)
    model.embedding.weight = mx.array(embedding[0])
    model.lstm.update({"Wx": weights["Wx"], "Wh": weights["Wh"], "bias": weights["b"]})
    model.dense.update({"weight": mx.array(dense[0].T), "bias": mx.array(dense[1])})
    return model


def into_keras(model: Model, theirs: keras.Model) -> None:
    """Copy the weights of the MLX model into the Keras model."""
    embedding, lstm, dense = theirs.layers
    embedding.set_weights([np.array(model.embedding.weight)])
    lstm.set_weights(lstm_to_keras(model.lstm.Wx, model.lstm.Wh, model.lstm.bias))
    dense.set_weights([np.array(model.dense.weight).T, np.array(model.dense.bias)])


def loss_in_mlx(model: Model, windows: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(windows[:, :-1]), windows[:, 1:], reduction="mean")


def train_in_mlx(model: Model, text: Text, settings: Settings) -> list[float]:
    """Train the MLX model further; return the loss on the held-out text, before and during training."""
    optimizer, gradient = optim.Adam(settings.learning_rate), nn.value_and_grad(model, loss_in_mlx)
    held_out = mx.array(text.held_out)
    losses = [loss_in_mlx(model, held_out).item()]
    report = max(1, settings.steps // 3)
    for step, batch in enumerate(text.windows(settings, settings.seed + 1), start=1):
        _, gradients = gradient(model, mx.array(batch))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if step % report == 0 or step == settings.steps:
            losses.append(loss_in_mlx(model, held_out).item())
            print(f"  after {step:4} steps in MLX: {losses[-1]:.4f}", flush=True)
    return losses


# --- The same numbers ------------------------------------------------------------------------------------------------


def compare_models(theirs: keras.Model, ours: Model, codes: np.ndarray) -> None:
    """Print the largest difference between the logits of both models."""
    expected, got = np.asarray(theirs(codes)), np.array(ours(mx.array(codes)))
    print(
        f"logits: largest difference {np.abs(got - expected).max():.1e}, of numbers up to {np.abs(expected).max():.1f}"
    )


def compare_ops(theirs: keras.Model, codes: np.ndarray) -> None:
    """Print the largest difference between the results of TensorFlow's BlockLSTMV2 and of our op. The op's argument w
    is both kernels of Keras, joined."""
    embedding, lstm, _ = theirs.layers
    kernel, recurrent_kernel, bias = lstm.get_weights()
    x = np.asarray(embedding(codes)).swapaxes(0, 1)
    state, peephole = np.zeros((len(codes), lstm.units), np.float32), np.zeros(lstm.units, np.float32)
    arguments = {"x": x, "cs_prev": state, "h_prev": state, "w": np.concatenate([kernel, recurrent_kernel]), "b": bias}
    arguments |= dict.fromkeys(("wci", "wcf", "wco"), peephole)
    expected = tensorflow.raw_ops.BlockLSTMV2(**arguments, seq_len_max=len(x))
    got = mlx_lstm.tf.block_lstm_v2(**{name: mx.array(array) for name, array in arguments.items()}, seq_len_max=len(x))
    pairs = [(np.array(ours), theirs.numpy()) for ours, theirs in zip(got, expected, strict=True)]
    print_difference("BlockLSTMV2, all seven outputs", *(np.stack(arrays) for arrays in zip(*pairs, strict=True)))


def print_difference(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    print(
        f"{what}: largest difference {np.abs(got - expected).max():.1e}, of numbers up to {np.abs(expected).max():.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in Settings()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    options = vars(parser.parse_args())
    for name, value in options.items():
        if name != "seed" and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0 but is {value}.")
    settings = Settings(**options)
    text = Text.of("\n".join(topics.topics[name] for name in sorted(topics.topics)), settings.window)

    print(f"Keras {keras.__version__} trains for {settings.steps} steps ...", flush=True)
    theirs = train_in_keras(text, settings)
    print(f"  loss on the text held out: {loss_in_keras(theirs, text.held_out):.4f}")
    ours = from_keras(theirs, text, settings)
    compare_models(theirs, ours, text.held_out[:, :-1])
    compare_ops(theirs, text.held_out[:, :-1])
    print(f"MLX trains for {settings.steps} steps more ...")
    losses = train_in_mlx(ours, text, settings)
    into_keras(ours, theirs)
    print(f"back in Keras: {loss_in_keras(theirs, text.held_out):.4f}, as in MLX: {losses[-1]:.4f}")


if __name__ == "__main__":
    run_main(main)
