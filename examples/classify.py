"""Text classification with padding: a bidirectional LSTM classifies sequences of many lengths in one batch.

    python examples/classify.py  # half a minute; an optional argument is the number of steps

The model reads the name of a Unicode character and predicts the character's category. For example, GREEK SMALL LETTER
ALPHA is a lower-case letter. The argument `lengths` says where each name ends, so the LSTM never reads the padding. The
last printed line compares the model with a naive Bayes classifier on names that neither has seen.
"""

import os
import re
import unicodedata
from collections import Counter

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # set before NumPy is imported: more threads would be slower

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from support.command import numbers, run_main
from support.curves import draw

from mlx_lstm.nn import LSTM, stack

LETTERS = " -0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LONGEST, BATCH, HIDDEN, TEST = 40, 64, 64, 2000


def data():
    """Return the examples (name, category) of characters in random order, and the 10 most frequent categories."""
    found = [(unicodedata.name(chr(n), ""), unicodedata.category(chr(n))) for n in range(0x110000)]
    number = re.compile(r"-[0-9A-F]{4,}$|^HANGUL SYLLABLE")
    found = [(name, kind) for name, kind in found if 0 < len(name) <= LONGEST and not number.search(name)]
    kinds = [kind for kind, _ in Counter(kind for _, kind in found).most_common(10)]
    return [found[n] for n in np.random.default_rng(0).permutation(len(found)) if found[n][1] in kinds], kinds


class Classifier(nn.Module):
    """A model that reads the letters of names, as numbers, and returns a score for each category of characters."""

    def __init__(self, kinds):
        super().__init__()
        self.embedding, self.head = nn.Embedding(len(LETTERS), 16), nn.Linear(2 * HIDDEN, kinds)
        self.ahead, self.back = LSTM(16, HIDDEN), LSTM(16, HIDDEN)

    def __call__(self, codes, lengths):
        _, (h_n, _) = stack([self.ahead], self.embedding(codes), reverse=[self.back], lengths=lengths)
        return self.head(mx.concatenate([h_n[0], h_n[1]], axis=-1))  # the last state of each direction


def batch_of(examples, kinds):
    """Return the names' letters as numbers [B, LONGEST], padded at the end, the lengths [B] and the categories [B]."""
    codes = mx.array([[LETTERS.index(letter) for letter in name.ljust(LONGEST)] for name, _ in examples])
    return codes, mx.array([len(name) for name, _ in examples]), mx.array([kinds.index(kind) for _, kind in examples])


def loss(model, codes, lengths, kinds):
    return nn.losses.cross_entropy(model(codes, lengths), kinds, reduction="mean")


def train(model, examples, kinds, steps):
    optimizer, curve = optim.Adam(optim.cosine_decay(5e-3, steps)), []
    loss_and_gradients = nn.value_and_grad(model, loss)
    for step in range(1, steps + 1):
        start = step * BATCH % (len(examples) - BATCH)
        value, gradients = loss_and_gradients(model, *batch_of(examples[start : start + BATCH], kinds))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        curve.append(value.item())
        if step % 100 == 0 or step == steps:
            print(f"step {step:4}: loss {value.item():.3f}")
    return curve


def naive_bayes(training, test, kinds):
    """Return the share of test names that a naive Bayes classifier of their words gets right."""
    words, prior = {kind: Counter() for kind in kinds}, Counter(kind for _, kind in training)
    for name, kind in training:
        words[kind].update(name.split())
    totals = {kind: words[kind].total() + len(set().union(*words.values())) for kind in kinds}
    score = lambda name, k: np.log(prior[k]) + sum(np.log((words[k][w] + 1) / totals[k]) for w in name)  # noqa: E731
    return np.mean([max(kinds, key=lambda kind: score(name.split(), kind)) == truth for name, truth in test])


def main(steps=1000):
    """Train the model, compare it with naive Bayes, and draw the loss."""
    mx.random.seed(0)
    examples, kinds = data()
    training, test = examples[:-TEST], examples[-TEST:]
    print(f"{len(training)} names of {len(kinds)} kinds, such as: {', '.join(name for name, _ in training[:3])}")
    model = Classifier(len(kinds))
    draw("classify", "A classifier learns", {"loss": train(model, training, kinds, steps)}, xlabel="step")
    codes, lengths, truth = batch_of(test, kinds)
    right, bayes = mx.mean(model.eval()(codes, lengths).argmax(axis=-1) == truth), naive_bayes(training, test, kinds)
    print(f"right, of {len(test)} other names: {right.item():.1%}; naive Bayes: {bayes:.1%}")


if __name__ == "__main__":
    run_main(lambda: main(*numbers(__doc__)))
