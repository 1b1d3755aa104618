"""The first model to read: it learns, character by character, to write like Python's documentation.

    python examples/beginner.py        # half a minute
    python examples/beginner.py 2000   # more steps: better text

The text is part of every Python, so nothing is downloaded. The last figures compare with a table of which character
follows which: `bits` says how many yes-or-no questions the next character would still take. A real run, with
checkpoints, validation on the way and a better baseline, is examples/char_lm.py.
"""

import os
import sys
from pydoc_data.topics import topics

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: its threads would wait for each other at every step

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mlx_lstm.nn import LSTM

TEXT = "\n".join(topics[name] for name in sorted(topics))
ALPHABET = sorted(set(TEXT))
CODES = np.array([ALPHABET.index(character) for character in TEXT])  # a number for each character
TRAINING, TEST = CODES[:-20_000], CODES[-20_000:]

BATCH, LENGTH, HIDDEN = 32, 50, 128


class Model(nn.Module):
    """Characters in, a score for each possible next character out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 32)
        self.lstm = LSTM(32, HIDDEN)
        self.head = nn.Linear(HIDDEN, len(ALPHABET))

    def __call__(self, codes, state=(None, None)):
        hidden, cell = self.lstm(self.embedding(codes), *state)  # both at every step: [batch, steps, HIDDEN]
        return self.head(hidden), (hidden[:, -1], cell[:, -1])


def bits(model, inputs, targets):
    """How surprised the model is by the characters that did come, on average."""
    return nn.losses.cross_entropy(model(inputs)[0], targets, reduction="mean") / np.log(2)


def train(steps):
    """A new model, after so many steps on random pieces of the training text."""
    model, rng = Model(), np.random.default_rng(0)
    optimizer = optim.Adam(optim.cosine_decay(1e-2, steps))
    loss_and_gradients = nn.value_and_grad(model, bits)
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(TRAINING) - LENGTH, BATCH)
        pieces = mx.array(TRAINING[starts[:, None] + np.arange(LENGTH + 1)])
        loss, gradients = loss_and_gradients(model, pieces[:, :-1], pieces[:, 1:])  # the next one is the target
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)  # MLX computes here
        if step % 50 == 0 or step == steps:
            print(f"step {step:4}: {loss.item():.2f} bits")
    return model.eval()


def write(model, text, length=300):
    """The text, and what the model makes of it: each character is drawn, and read as the next input."""
    logits, state = model(mx.array([[ALPHABET.index(character) for character in text]]))
    for _ in range(length):
        code = mx.random.categorical(logits[:, -1] / 0.7)  # below 1: more careful
        text += ALPHABET[code.item()]
        logits, state = model(code[None], state)
    return text


def pairs():
    """The table's bits on the test text: how often did a character follow another one in training?"""
    counts = np.ones((len(ALPHABET), len(ALPHABET)))
    np.add.at(counts, (TRAINING[:-1], TRAINING[1:]), 1)
    return -np.log2((counts / counts.sum(axis=1, keepdims=True))[TEST[:-1], TEST[1:]]).mean()


def main(steps=500):
    """Train, write, compare."""
    mx.random.seed(0)
    model = train(steps)
    print(write(model, "The "))
    test = mx.array(TEST[: len(TEST) // 100 * 100].reshape(100, -1))
    ours, table = bits(model, test[:, :-1], test[:, 1:]).item(), pairs()
    print(f"on text it never saw: {ours:.2f} bits per character; a table of pairs: {table:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:])) if all(map(str.isdigit, sys.argv[1:])) else sys.exit(__doc__)
