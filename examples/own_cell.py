"""A cell of your own: sLSTM and LSTM learn the same text as character models.

    python examples/own_cell.py  # writes runs/own_cell.png; needs `pip install matplotlib`

Both recurrences are cells in a few lines of MLX, which `mlx_lstm.nn.Pointwise` runs in generated code. sLSTM is the
cell with exponential gates of xLSTM. The text is a part of Python's documentation (`pydoc_data.topics`, which comes
with every Python); its last tenth is for validation. The last printed line shows the errors of both models on this
last tenth, in bits per character.
"""

import math
import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # set before NumPy is imported: more threads would be slower

from pydoc_data import topics

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from support.command import run_main
from support.curves import draw

from mlx_lstm import cells
from mlx_lstm.nn import Pointwise

CELLS = {"sLSTM": (cells.slstm, 4), "LSTM": (cells.lstm, 2)}  # each cell with its number of states
WINDOW, ROWS, HIDDEN = 64, 16, 96


def text():
    """Return the characters of the text as numbers, and how many different characters it has."""
    whole = "\n".join(topics.topics[name] for name in sorted(topics.topics))[:200_000]
    letters, numbers = np.unique(np.array(list(whole)), return_inverse=True)
    return numbers.astype(np.int32), len(letters)


class Model(nn.Module):
    """An embedding, a recurrent layer with one of the cells, and a linear layer."""

    def __init__(self, cell, states, letters):
        super().__init__()
        self.embedding, self.head = nn.Embedding(letters, 32), nn.Linear(HIDDEN, letters)
        self.recurrent = Pointwise(cell, 32, HIDDEN, gates=4, states=states)
        # The forget gate is gate 1 of both cells. With a bias of 2 it is nearly open when the training begins, so the
        # cell keeps its state over many steps.
        self.recurrent.bias = mx.concatenate([mx.full((HIDDEN,), 2.0 * (gate == 1)) for gate in range(4)])

    def __call__(self, x):
        return self.head(self.recurrent(self.embedding(x))[0])


def bits(model, x, y):
    """Return the error in bits per character."""
    return nn.losses.cross_entropy(model(x), y, reduction="mean") / math.log(2)


def windows(numbers, starts):
    """Return the windows of the text that begin at `starts`, and their targets: the same windows one character
    later."""
    rows = mx.array(numbers[starts[:, None] + np.arange(WINDOW + 1)])
    return rows[:, :-1], rows[:, 1:]


def train(name, numbers, letters, steps):
    """Train a model. Return its validation error after every 20th step."""
    mx.random.seed(0)
    rng, cut = np.random.default_rng(0), len(numbers) * 9 // 10
    model, optimizer = Model(*CELLS[name], letters), optim.Adam(optim.cosine_decay(1e-2, steps))
    step, curve = nn.value_and_grad(model, bits), []
    held_out = windows(numbers, np.arange(cut, len(numbers) - WINDOW - 1, WINDOW)[:128])
    for n in range(1, steps + 1):
        _, gradients = step(model, *windows(numbers, rng.integers(0, cut - WINDOW - 1, ROWS)))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if n % 20 == 0 or n == steps:
            curve.append((n, bits(model, *held_out).item()))
        if n % 100 == 0:
            print(f"{name:5} step {n:3}: {curve[-1][1]:.2f} bits per character")
    return curve


def main(steps):
    numbers, letters = text()
    curves = {name: train(name, numbers, letters, steps) for name in CELLS}
    lines = {name: [error for _, error in curve] for name, curve in curves.items()}
    x = [n for n, _ in curves["LSTM"]]
    draw("own_cell", "Validation error", lines, x, xlabel="step", ylabel="bits per character")
    ends = [f"{name} {errors[-1]:.2f}" for name, errors in lines.items()]
    print(f"validation: {', '.join(ends)} bits per character")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    run_main(lambda: main(400))
