"""A first model: an LSTM learns, character by character, to write like Python's documentation.

    python examples/beginner.py        # half a minute
    python examples/beginner.py 2000   # more steps: better text

The training text comes with every Python, so nothing is downloaded. The last printed line compares the model with a
table that counts which character follows which. The unit is bits per character. A lower number is better: with one bit
less the model gives the right character twice the probability, on average. examples/char_lm.py is a more complete
program, with checkpoints and validation.
"""

import os
from pydoc_data.topics import topics

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # set before NumPy is imported: more threads would be slower

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from support.command import numbers, run_main
from support.curves import draw

from mlx_lstm.nn import LSTM

TEXT = "\n".join(topics[name] for name in sorted(topics))
ALPHABET = sorted(set(TEXT))
CODES = np.array([ALPHABET.index(character) for character in TEXT])  # a number for each character
TRAINING, TEST = CODES[:-20_000], CODES[-20_000:]

BATCH, LENGTH, HIDDEN = 32, 50, 128


class Model(nn.Module):
    """A model that reads characters and returns a score for each possible next character."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 32)
        self.lstm = LSTM(32, HIDDEN)
        self.head = nn.Linear(HIDDEN, len(ALPHABET))

    def __call__(self, codes, state=(None, None)):
        hidden, cell = self.lstm(self.embedding(codes), *state)  # both at every step: [batch, steps, HIDDEN]
        return self.head(hidden), (hidden[:, -1], cell[:, -1])


def bits(model, inputs, targets):
    """Return the mean cross entropy of the targets in bits per character."""
    return nn.losses.cross_entropy(model(inputs)[0], targets, reduction="mean") / np.log(2)


def train(steps):
    """Train a new model on random pieces of the training text; return it and the bits of every step."""
    model, rng, curve = Model(), np.random.default_rng(0), []
    optimizer = optim.Adam(optim.cosine_decay(1e-2, steps))
    loss_and_gradients = nn.value_and_grad(model, bits)
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(TRAINING) - LENGTH, BATCH)
        pieces = mx.array(TRAINING[starts[:, None] + np.arange(LENGTH + 1)])
        loss, gradients = loss_and_gradients(model, pieces[:, :-1], pieces[:, 1:])  # the target is the next character
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)  # MLX is lazy: it computes here
        curve.append(loss.item())
        if step % 50 == 0 or step == steps:
            print(f"step {step:4}: {loss.item():.2f} bits")
    return model.eval(), curve


def write(model, text, length=300):
    """Return the text and its continuation: each character is drawn at random and becomes the next input."""
    logits, state = model(mx.array([[ALPHABET.index(character) for character in text]]))
    for _ in range(length):
        code = mx.random.categorical(logits[:, -1] / 0.7)  # a temperature below 1: likelier characters
        text += ALPHABET[code.item()]
        logits, state = model(code[None], state)
    return text


def pairs():
    """Return the bits per character of a table that predicts each character from the character before it."""
    counts = np.ones((len(ALPHABET), len(ALPHABET)))
    np.add.at(counts, (TRAINING[:-1], TRAINING[1:]), 1)
    return -np.log2((counts / counts.sum(axis=1, keepdims=True))[TEST[:-1], TEST[1:]]).mean()


def main(steps=500):
    """Train the model, write a text, compare the model with a table of pairs, and draw the curve."""
    mx.random.seed(0)
    model, curve = train(steps)
    print(write(model, "The "))
    test = mx.array(TEST[: len(TEST) // 100 * 100].reshape(100, -1))
    ours, table = bits(model, test[:, :-1], test[:, 1:]).item(), pairs()
    print(f"on text it never saw: {ours:.2f} bits per character; a table of pairs: {table:.2f}")
    lines = {"LSTM, training text": curve, "table of pairs, test text": float(table)}
    draw("beginner", "A character model learns", lines, xlabel="step", ylabel="bits per character")


if __name__ == "__main__":
    run_main(lambda: main(*numbers(__doc__)))
