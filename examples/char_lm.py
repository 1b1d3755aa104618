"""A character language model: an embedding, an LSTM and a softmax predict the next character of Python's documentation.

    python examples/char_lm.py                                  # 1.5 minutes on a busy CPU core, less on an idle one
    python examples/char_lm.py --resume                         # continues after Ctrl-C, with the same bits
    python examples/char_lm.py --resume --prompt "The " --temperature 0.5     # a finished run: only samples again
    python examples/char_lm.py --steps 200 --hidden 64 --out runs/small       # sizes are options; see --help
    python examples/char_lm.py --dtype bfloat16                 # weights and activations of 16 bits
    mlx.launch -n 2 -- python examples/char_lm.py --distributed # the same batch, shared by two processes

The text is `pydoc_data.topics`, which comes with every Python (its wording differs between versions). The model trains
on the first nine tenths of the text. The last tenth, one contiguous piece, is for validation. Some documentation topics
repeat passages of others: about one line in ten of the validation text also occurs in the training text. The baseline
is a Kneser-Ney trigram, a model that counts triples of characters, with the same training and validation text. The run
writes checkpoint.safetensors, loss.png and sample.txt into the folder `--out`.

How the sizes were chosen, with MLX's CPU wheel for Linux:

- MLX's matrix product is more than ten times slower there than NumPy's, and twice as slow again with a transposed right
  operand. A plain vocabulary layer would cost more than the LSTM, so `product` uses NumPy.
- In a training step the LSTM takes three quarters of the time, the vocabulary layer with the loss a sixth, AdamW with
  clipping a twelfth.
- In equal time a model of 192 units learns more than one of 128 or 256 units. A batch of 16 rows of text learns more
  than one of 32 rows with half the steps. This was compared on the validation text, so the validation text is not
  entirely unseen; but the advantage over the trigram is far larger than this effect.
- Nothing is compiled: mx.compile would unroll the LSTM's steps into one slow graph.
- NumPy's BLAS has one thread, unless OPENBLAS_NUM_THREADS is set. The products of single time steps are so small that a
  second thread gains a third at best. On a busy machine the threads wait for each other, and a run takes ten times as
  long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # must be set before NumPy is imported; the docstring says why

from pydoc_data import topics

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from support.command import run_main
from support.ranks import Lost, Ranks

from mlx_lstm.nn import LSTM, QuantizedLSTM

CHECKPOINT = "checkpoint.safetensors"
VALIDATION_ROWS = 16  # rows of the validation text, which are read together, each from a zero state
ALONE = Ranks()  # a run with only one process
State = tuple[mx.array, mx.array]


class Settings(NamedTuple):
    """All settings that the result of a run depends on. Checkpoints store them, so --resume needs no other option."""

    steps: int = 2200
    batch: int = 16
    window: int = 64
    embedding: int = 64
    hidden: int = 192
    dropout: float = 0.1
    learning_rate: float = 1e-2
    weight_decay: float = 0.01
    clip: float = 1.0
    evaluations: int = 10
    seed: int = 0
    engine: str | None = None
    dtype: str = "float32"


# {setting that old checkpoints lack: the value that old versions of this program used for it}. `Run.write` does not
# store a setting that has this value.
ADDED = {"dtype": "float32"}
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}  # no float16: it needs a scaled loss, see docs/training.md
RANGES = {  # of each option that is a number: its lowest value, and the limit that it must stay below
    **dict.fromkeys(("batch", "window", "embedding", "hidden", "evaluations"), (1, math.inf)),
    "steps": (1, 2**31),  # the optimizer's schedule gives this number to MLX
    **dict.fromkeys(("learning_rate", "weight_decay", "clip", "seconds", "temperature", "length"), (0, math.inf)),
    "dropout": (0, 1),
    "seed": (0, 2**64),
}
HELP = Settings(
    steps="training steps, one window of every row each",
    batch="number of rows into which the training text is cut; a step trains on all rows",
    window="characters of each row that one step reads; no gradient goes further back",
    embedding="size of a character's vector",
    hidden="number of units of the LSTM",
    dropout="probability with which an output of the LSTM is set to 0 in training",
    learning_rate="AdamW's highest rate, after a warm-up and before a cosine decay",
    weight_decay="AdamW's weight decay",
    clip="largest norm of the gradient",
    evaluations="how often to measure validation and write a checkpoint",
    seed="random seed of weights, dropout and samples",
    engine="the LSTM's engine; without this option the library chooses it",
    dtype="dtype of weights and activations, float32 or bfloat16; the optimizer's arrays and the loss stay float32",
)


# --- The text and its baseline ---------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """The text as codes, which are indices into the alphabet. `split`: the index where the validation text starts."""

    alphabet: str
    codes: np.ndarray
    split: int

    @classmethod
    def of(cls, text: str) -> Corpus:
        """Make a corpus from a text. The last tenth is for validation, in a multiple of VALIDATION_ROWS characters,
        so that every character is scored."""
        alphabet = "".join(sorted(set(text)))
        place = {character: code for code, character in enumerate(alphabet)}
        length = len(text) // 10 // VALIDATION_ROWS * VALIDATION_ROWS
        return cls(alphabet, np.array([place[character] for character in text], np.int32), len(text) - length)

    def encode(self, text: str) -> list[int]:
        if unknown := set(text) - set(self.alphabet):
            raise SystemExit(f"The text has no {''.join(sorted(unknown))!r}, so the model cannot read it.")
        return [self.alphabet.index(character) for character in text]

    def decode(self, codes: list[int]) -> str:
        return "".join(self.alphabet[code] for code in codes)


def documentation() -> str:
    """Return every topic of Python's built-in help, in alphabetical order."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def kneser_ney(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Return Kneser-Ney probabilities from counts [..., V]. A discount is taken from each count. The sum of the
    discounts is distributed in proportion to `lower`, the probabilities of a model that reads one character less."""
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    discount = once / (once + 2 * twice) if once else 0.5
    total, kinds = counts.sum(-1, keepdims=True), (counts > 0).sum(-1, keepdims=True)
    probability = (np.maximum(counts - discount, 0) + discount * kinds * lower) / np.maximum(total, 1)
    return np.where(total > 0, probability, lower)


def trigram(codes: np.ndarray, size: int) -> np.ndarray:
    """Return the probability of each character after two others, [size, size, size], by interpolated Kneser-Ney.

    The trigram falls back to a bigram, the bigram to a unigram, the unigram to a uniform distribution. The bigram
    and the unigram do not count how often a character occurs. They count in how many different contexts it occurs.
    On this text modified Kneser-Ney needs 0.004 bits per character less, Witten-Bell 0.01 more.
    """
    counts = np.zeros((size, size, size))
    np.add.at(counts, (codes[:-2], codes[1:-1], codes[2:]), 1)
    pairs = (counts > 0).sum(0).astype(float)
    unigram = kneser_ney((pairs > 0).sum(0).astype(float), np.full(size, 1 / size))
    return kneser_ney(counts, kneser_ney(pairs, unigram))


def trigram_bits(corpus: Corpus) -> float:
    """Return the trigram's bits per character on the validation text."""
    codes, split = corpus.codes, corpus.split
    probability = trigram(codes[:split], len(corpus.alphabet))
    return float(-np.log2(probability[codes[split - 2 : -2], codes[split - 1 : -1], codes[split:]]).mean())


# --- The model -------------------------------------------------------------------------------------------------------


@mx.custom_function
def product(x: mx.array, weight: mx.array) -> mx.array:
    """Return x @ weight, and its gradients, by NumPy's matrix product, which is much faster than MLX's on a CPU
    under Linux."""
    return rounded(in_numpy(x) @ in_numpy(weight), x)


@product.vjp
def product_vjp(primals: State, cotangent: mx.array, output: mx.array) -> State:
    x, weight, cotangent = (in_numpy(array) for array in (*primals, cotangent))
    return rounded(cotangent @ weight.T, primals[0]), rounded(x.T @ cotangent, primals[1])


def in_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), copy=False)  # NumPy has no bfloat16


def rounded(array: np.ndarray, like: mx.array) -> mx.array:
    return mx.array(array).astype(like.dtype)


class Vocabulary(nn.Module):
    """A linear layer from [N, H] to logits [N, V]."""

    def __init__(self, hidden: int, size: int):
        super().__init__()
        scale = 1 / math.sqrt(hidden)
        self.weight = mx.random.uniform(-scale, scale, (hidden, size))
        self.bias = mx.zeros(size)

    def __call__(self, x: mx.array) -> mx.array:
        multiply = product if mx.default_device() == mx.Device(mx.cpu) else mx.matmul
        return multiply(x, self.weight) + self.bias


class CharLM(nn.Module):
    """A model that reads codes [B, T] and a state, and returns logits [B * T, V] and the next state, in float32.
    Inside, it computes in `dtype`."""

    def __init__(self, size: int, settings: Settings):
        super().__init__()
        self.embedding = nn.Embedding(size, settings.embedding)
        self.embedding.weight = mx.random.normal((size, settings.embedding))  # larger than MLX's default: learns faster
        self.lstm = LSTM(settings.embedding, settings.hidden, engine=settings.engine)
        self.lstm.bias[settings.hidden : 2 * settings.hidden] += 1  # forget gates start open: faster at first
        self.vocabulary = Vocabulary(settings.hidden, size)
        self.dtype = DTYPES[settings.dtype]

    def zero_state(self, batch: int) -> State:
        return tuple(mx.zeros((batch, self.lstm.hidden_size)) for _ in range(2))

    def __call__(self, codes: mx.array, state: State, dropped: mx.array | None = None) -> tuple[mx.array, State]:
        """Return logits and state. `dropped` [B, 1, H] is the dropout mask of the LSTM's outputs, the same at all
        steps."""
        if self.dtype == mx.float32:
            return self.forward(codes, state, dropped)
        weights = self.parameters()  # kept in float32, restored below: the optimizer's steps are too small for 16 bits
        self.set_dtype(self.dtype)
        dropped = None if dropped is None else dropped.astype(self.dtype)
        logits, state = self.forward(codes, tuple(array.astype(self.dtype) for array in state), dropped)
        self.update(weights)
        return logits.astype(mx.float32), tuple(array.astype(mx.float32) for array in state)

    def forward(self, codes: mx.array, state: State, dropped: mx.array | None) -> tuple[mx.array, State]:
        """Return logits and state in the dtype that the weights have now."""
        hidden, cell = self.lstm(self.embedding(codes), *state)
        state = mx.contiguous(hidden[:, -1]), mx.contiguous(cell[:, -1])
        hidden = hidden if dropped is None else hidden * dropped
        return self.vocabulary(hidden.reshape(-1, hidden.shape[-1])), state


def window_loss(model: CharLM, codes: mx.array, targets: mx.array, *rest) -> tuple[mx.array, State]:
    """Return the mean cross entropy of a window of steps in nats, and the state after the window."""
    logits, state = model(codes, *rest)
    return nn.losses.cross_entropy(logits, targets.reshape(-1), reduction="mean"), state


def validation_bits(model: CharLM, corpus: Corpus, window: int = 256, ranks: Ranks = ALONE) -> float:
    """Return the bits per character over the whole validation text, without dropout; each process reads its share of
    the rows."""
    own = ranks.share(VALIDATION_ROWS)
    inputs = mx.array(corpus.codes[corpus.split - 1 : -1].reshape(VALIDATION_ROWS, -1)[own])
    targets = mx.array(corpus.codes[corpus.split :].reshape(VALIDATION_ROWS, -1)[own])
    state, total = model.zero_state(len(inputs)), 0.0
    for start in range(0, inputs.shape[1] if len(inputs) else 0, window):
        piece = slice(start, start + window)
        loss, state = window_loss(model, inputs[:, piece], targets[:, piece], state)
        total += loss.item() * targets[:, piece].size
        mx.eval(state)
    return ranks.sum(mx.array(total)).item() / (len(corpus.codes) - corpus.split) / math.log(2)


def sample(model: CharLM, corpus: Corpus, prompt: str, length: int, temperature: float, seed: int) -> str:
    """Return the prompt, continued by `length` characters. At temperature 0 each of them is the likeliest character."""
    codes, key, state = corpus.encode(prompt), mx.random.key(seed), model.zero_state(1)
    fresh = mx.array([codes])
    for _ in range(length):
        logits, state = model(fresh, state)
        key, draw = mx.random.split(key)
        row = logits[-1:]
        code = mx.random.categorical(row / temperature, key=draw) if temperature > 0 else mx.argmax(row, axis=-1)
        mx.eval(code, state)
        codes.append(code.item())
        fresh = code[None]
    return corpus.decode(codes)


# --- Training --------------------------------------------------------------------------------------------------------


class Run:
    """A training run: the model and everything else that the next step depends on; `save` and `load` store all of
    it. With several processes (`ranks`) each has a complete copy, and computes its own rows of each batch."""

    def __init__(self, settings: Settings, corpus: Corpus, ranks: Ranks = ALONE):
        self.settings, self.corpus, self.ranks = settings, corpus, ranks
        mx.random.seed(settings.seed)
        self.model = CharLM(len(corpus.alphabet), settings)
        warm = max(1, settings.steps // 20)
        rise = optim.linear_schedule(settings.learning_rate / warm, settings.learning_rate, warm)
        fall = optim.cosine_decay(settings.learning_rate, max(1, settings.steps - warm), settings.learning_rate / 50)
        rate = optim.join_schedules([rise, fall], [warm])
        self.optimizer = optim.AdamW(rate, weight_decay=settings.weight_decay, bias_correction=True)
        self.optimizer.init(self.model.trainable_parameters())
        columns = (corpus.split - 1) // settings.batch
        if columns < settings.window or corpus.split < 3:
            raise ValueError(f"the training text is too short for {settings.batch} rows of {settings.window}.")
        if ranks.size > settings.batch:
            fewer = f"start at most {settings.batch}, or choose a larger --batch"
            raise ValueError(f"{ranks.size} processes cannot share {settings.batch} rows: {fewer}.")
        used = settings.batch * columns
        self.inputs = mx.array(corpus.codes[:used].reshape(settings.batch, -1))
        self.targets = mx.array(corpus.codes[1 : used + 1].reshape(settings.batch, -1))
        self.step = self.position = 0  # position: the column where the next window starts
        self.saved: int | None = None  # the step of the latest checkpoint
        self.key = mx.random.key(settings.seed)
        self.state = self.model.zero_state(settings.batch)
        self.losses: list[float] = []  # bits per character of every step's window
        self.validation: list[tuple[int, float]] = []  # (step, bits per character)
        self.wish: Callable[[], bool] = lambda: False  # whether this process wants to end after the current step
        self.stop = False  # whether any process wanted to end after the latest step
        self.gradient = nn.value_and_grad(self.model, window_loss)

    def train_step(self) -> float:
        """Train on the next window of the training text; return the loss in bits. The text is cut into `batch` rows,
        and one step reads a window of every row.

        The state continues from window to window, and is zero at the start of an epoch. If another process is lost,
        the exception `Lost` leaves the run as it was before the step.
        """
        settings, own = self.settings, self.ranks.share(self.settings.batch)
        position, state, key, dropped = self.position, self.state, self.key, None
        if position + settings.window > self.inputs.shape[1]:
            position, state = 0, self.model.zero_state(settings.batch)
        window = slice(position, position + settings.window)
        if settings.dropout:
            key, draw = mx.random.split(key)
            keep = 1 - settings.dropout
            dropped = (mx.random.bernoulli(keep, (settings.batch, 1, settings.hidden), draw) / keep)[own]
        inputs, targets = self.inputs[own, window], self.targets[own, window]
        found = self.gradient(self.model, inputs, targets, tuple(array[own] for array in state), dropped)
        (loss, state), gradient = found
        means = loss, mx.array(float(self.wish())), gradient
        means, state = self.ranks.join(means, state, settings.batch, count=inputs.size)
        loss, stop, gradient = means
        gradient, _ = optim.clip_grad_norm(gradient, settings.clip)
        self.optimizer.update(self.model, gradient)
        self.state, self.key = tuple(mx.stop_gradient(array) for array in state), key
        mx.eval(self.model.parameters(), self.optimizer.state, self.state, self.key)
        self.stop = stop.item() > 0
        self.step += 1
        self.position = position + settings.window
        self.losses.append(loss.item() / math.log(2))
        return self.losses[-1]

    def evaluate(self) -> float:
        """Compute the validation bits per character after this step and append them to the history."""
        self.validation.append((self.step, validation_bits(self.model, self.corpus, ranks=self.ranks)))
        return self.validation[-1][1]

    def arrays(self) -> dict[str, mx.array]:
        arrays = dict(tree_flatten({"model": self.model.parameters(), "optimizer": self.optimizer.state}))
        return arrays | {"state.hidden": self.state[0], "state.cell": self.state[1], "key": self.key}

    def numbers(self) -> dict[str, int | str | list]:
        text = f"{len(self.corpus.codes)} characters, CRC {zlib.crc32(self.corpus.codes.tobytes()):08x}"
        place = {"step": self.step, "position": self.position, "text": text}
        return place | {"losses": self.losses, "validation": self.validation}

    def save(self, path: Path) -> None:
        """Write a checkpoint under another name, then rename it, so that `path` is always a complete checkpoint, old
        or new.

        Until it is renamed, the new file is next to `path`, in a folder that no other user can open.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
            partial = Path(folder) / path.name
            try:
                self.write(partial)
            except RuntimeError as error:  # MLX has no other error for a full disk
                raise OSError(error) from None
            os.replace(partial, path)
        self.saved = self.step

    def write(self, path: Path) -> None:
        settings = {name: value for name, value in self.settings._asdict().items() if ADDED.get(name, ...) != value}
        about = {"settings": json.dumps(settings), "run": json.dumps(self.numbers())}
        mx.save_safetensors(str(path), self.arrays(), about)

    @classmethod
    def load(cls, path: Path, corpus: Corpus, engine: str | None = None, ranks: Ranks = ALONE) -> Run:
        """Return the run that `save` wrote. The engine is the only setting that may change.

        A ValueError says what is wrong with a damaged file, and what to do.
        """
        try:
            return cls.read(path, corpus, engine, ranks)
        except ValueError as error:
            advice = "start again without --resume, or with another --out"
            raise ValueError(f"cannot go on from {path}: {str(error).rstrip('.')}; {advice}.") from None

    @classmethod
    def read(cls, path: Path, corpus: Corpus, engine: str | None, ranks: Ranks) -> Run:
        arrays, settings, numbers = read_checkpoint(path)
        check_sizes(arrays, settings, len(corpus.alphabet))
        run = cls(settings._replace(engine=engine) if engine else settings, corpus, ranks)
        check_alike("number", numbers, run.numbers(), lambda value: type(value).__name__)
        check_progress(numbers, settings.steps, run.inputs.shape[1])
        if numbers["text"] != run.numbers()["text"]:
            raise ValueError(f"it was trained on another text (another Python?): {numbers['text']}")
        check_alike("array", arrays, run.arrays(), lambda array: f"{array.dtype} {list(array.shape)}")
        run.state, run.key = (arrays.pop("state.hidden"), arrays.pop("state.cell")), arrays.pop("key")
        trees = tree_unflatten(list(arrays.items()))
        run.model.update(trees["model"])
        run.optimizer.state = trees["optimizer"]
        run.step, run.position, run.losses = numbers["step"], numbers["position"], numbers["losses"]
        run.saved = run.step
        run.validation = [tuple(point) for point in numbers["validation"]]
        return run


def read_checkpoint(path: Path) -> tuple[dict[str, mx.array], Settings, dict]:
    """Return the arrays of a checkpoint by name, its settings, and its numbers as `Run.numbers` returns them. Raise
    ValueError if one of them is missing."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe might never end
            raise ValueError("no regular file")
        arrays, about = mx.load(str(path), return_metadata=True)
        mx.eval(arrays)  # read all now, since the file may be removed
        settings, numbers = (dict(json.loads(about[name])) for name in ("settings", "run"))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise ValueError(f"it is no whole checkpoint ({type(error).__name__}: {text})") from None
    settings = ADDED | settings
    any_engine = Settings()._replace(engine=settings.get("engine"))._asdict()
    check_alike("setting", settings, any_engine, lambda value: type(value).__name__)
    for name, rule in broken_ranges(settings):
        raise ValueError(f"setting {name} {rule}")
    return arrays, Settings(**settings), numbers


def check_sizes(arrays: dict[str, mx.array], settings: Settings, symbols: int) -> None:
    """Raise ValueError unless a checkpoint's arrays have the sizes in its settings. This runs before a model of
    these sizes is allocated."""
    H = settings.hidden
    shapes = {"model.embedding.weight": [symbols, settings.embedding], "model.lstm.Wh": [4 * H, H]}
    for name, shape in (shapes | {"state.hidden": [settings.batch, H]}).items():
        if name not in arrays:
            raise ValueError(f"array {name} is missing")
        if list(arrays[name].shape) != shape:
            found = f"{arrays[name].dtype} {list(arrays[name].shape)}"
            raise ValueError(f"array {name} must be {mx.float32} {shape} but is {found}")


def check_progress(numbers: dict, steps: int, columns: int) -> None:
    """Raise ValueError if the numbers in a checkpoint are impossible for a run of `steps` training steps on a text
    that is cut into rows of `columns` characters."""
    for name, limit in {"step": steps, "position": columns}.items():
        if not 0 <= numbers[name] <= limit:
            raise ValueError(f"number {name} must lie in 0..{limit} but is {numbers[name]}")
    if len(numbers["losses"]) != numbers["step"] or not all(isinstance(loss, float) for loss in numbers["losses"]):
        raise ValueError(f"number losses must be {numbers['step']} numbers, one for each step")
    for point in numbers["validation"]:
        if not isinstance(point, list) or [type(value) for value in point] != [int, float]:
            raise ValueError("number validation must be pairs of a step and its bits per character")


def check_alike(kind: str, found: dict, expected: dict, form: Callable[[Any], str]) -> None:
    """Raise ValueError unless two dicts have the same names, and `form` returns the same text for the two values of
    each name. `form` returns for example the type of a value, or the dtype and shape of an array."""
    for name in sorted(found.keys() ^ expected.keys()):
        raise ValueError(f"{kind} {name} is {'unknown' if name in found else 'missing'}")
    for name, value in found.items():
        if form(value) != form(expected[name]):
            raise ValueError(f"{kind} {name} must be {form(expected[name])} but is {form(value)}")


def broken_ranges(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting with a wrong value, and the rule that it breaks."""
    if (value := values.get("dtype", "float32")) not in DTYPES:
        yield "dtype", f"must be one of {', '.join(DTYPES)} but is {value}."
    for name, (lowest, limit) in RANGES.items():
        if (value := values.get(name)) is not None and not lowest <= value < limit:
            yield name, f"must lie in [{lowest}, {limit}) but is {value}."


@contextlib.contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """Return a context in which the first Ctrl-C only sets an event, so that no step is interrupted; a second Ctrl-C
    interrupts. SIGTERM, which a launcher sends to all processes when one has died, has the same effect."""
    pressed = threading.Event()
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

    def note(signum, frame):
        pressed.set()
        signal.signal(signum, defaults[signum])

    before = {number: signal.signal(number, note) for number in defaults}
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(run: Run, checkpoint: Path, console: Console, seconds: float | None = None) -> bool:
    """Train to the last step, or until `seconds` have passed, and return True; return False after Ctrl-C. In each case
    write a checkpoint.

    All processes stop at the same step, and the first one writes. If a process is lost, which may be the first one,
    every other process writes the checkpoint and raises `Lost`.
    """

    def save() -> None:
        if run.ranks.rank == 0:
            run.save(checkpoint)

    settings, start, first, busy = run.settings, time.perf_counter(), run.step, 0.0
    every = math.ceil(settings.steps / settings.evaluations)
    columns = "{task.fields[loss]:.3f} bits/char  {task.fields[speed]:,.0f} char/s"
    bar = Progress(BarColumn(), MofNCompleteColumn(), TextColumn(columns), TimeRemainingColumn(), console=console)
    with ctrl_c() as pressed, bar:
        loss = np.mean(run.losses[-20:]) if run.losses else None
        shown = math.nan if loss is None else loss
        task = bar.add_task("training", total=settings.steps, completed=run.step, loss=shown, speed=0)
        limit = math.inf if seconds is None else seconds
        run.stop, run.wish = False, lambda: pressed.is_set() or time.perf_counter() - start > limit
        try:
            while run.step < settings.steps and not run.stop:
                begin = time.perf_counter()
                bits = run.train_step()
                busy += time.perf_counter() - begin
                loss = bits if loss is None else 0.95 * loss + 0.05 * bits
                speed = (run.step - first) * settings.batch * settings.window / busy
                bar.update(task, completed=run.step, loss=loss, speed=speed)
                if run.step % every == 0 or run.step == settings.steps:
                    line = f"step {run.step:5d}   training {loss:.3f}   validation {run.evaluate():.3f} bits/char"
                    bar.console.print(f"{line}   {speed:,.0f} char/s")
                    save()
        except Lost:  # the failed step has not changed the run, which is complete in each process
            run.save(checkpoint)
            raise
        save()
        return not pressed.is_set()


# --- The command -----------------------------------------------------------------------------------------------------


def plot(run: Run, baseline: float, path: Path) -> None:
    """Write the loss curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    width = max(1, len(run.losses) // 100)
    means = np.array(run.losses[: len(run.losses) // width * width]).reshape(-1, width).mean(axis=1)
    axes.plot(width * (np.arange(len(means)) + 1), means, label="training")
    if run.validation:
        axes.plot(*zip(*run.validation, strict=True), marker="o", markersize=3, label="validation")
    axes.axhline(baseline, color="gray", linestyle="--", label="trigram, validation")
    axes.set(xlabel="step", ylabel="bits per character", title=f"Character LSTM, H = {run.settings.hidden}")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, Settings | None]:
    """Return (options, settings). The settings are those of a new run. With --resume they are None, since the
    checkpoint contains them."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in Settings._field_defaults.items():
        kind = str if default is None else type(default)
        text = getattr(HELP, name) + ("" if default is None else f" (default: {default})")
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--seconds", type=float, help="stop the training after this time, and write a sample")
    parser.add_argument("--distributed", action="store_true", help="share each batch with the processes of mlx.launch")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("runs/char_lm"), help="folder of the results")
    sizes = (2, 3, 4, 5, 6, 8)
    text = "after training, also validate with the LSTM's weights quantized to these numbers of bits"
    parser.add_argument("--quantize", type=int, nargs="+", choices=sizes, metavar="BITS", help=text)
    parser.add_argument("--prompt", default="The ", help="what the sampled text starts with")
    text = "temperature of the sampling; 0 takes the likeliest character"
    parser.add_argument("--temperature", type=float, default=0.7, help=text)
    parser.add_argument("--length", type=int, default=400, help="characters to sample")
    options = parser.parse_args(argv)
    given = {name: value for name, value in vars(options).items() if name in Settings._fields}
    for name, rule in broken_ranges(vars(options)):
        parser.error(f"--{name.replace('_', '-')} {rule}")
    if not options.prompt:
        parser.error("--prompt must have a character to start from.")
    if not options.resume:
        return options, Settings(**given)
    if fixed := sorted(given.keys() - {"engine"}):
        parser.error(f"--resume takes {', '.join(fixed)} from the checkpoint.")
    if not (options.out / CHECKPOINT).exists() and not options.distributed:  # distributed: only process 0 reads it
        parser.error(f"--resume found no {options.out / CHECKPOINT}.")
    return options, None


def report(run: Run, baseline: float, options: argparse.Namespace, console: Console) -> None:
    """Write the plot and a sampled text, and print the bits per character of the model and of the baseline."""
    plot(run, baseline, options.out / "loss.png")
    measured = run.validation and run.validation[-1][0] == run.step
    bits = run.validation[-1][1] if measured else validation_bits(run.model, run.corpus)
    text = sample(run.model, run.corpus, options.prompt, options.length, options.temperature, run.settings.seed)
    (options.out / "sample.txt").write_text(text + "\n", encoding="utf-8")
    console.rule(f"sample, temperature {options.temperature:g}")
    console.print(text)
    console.rule()
    console.print(f"validation: LSTM    {bits:.3f} bits per character")
    for size, other in quantized_bits(run, options.quantize or []):
        console.print(f"validation: LSTM    {other:.3f} bits per character, its weights in {size} bits each")
    console.print(f"validation: trigram {baseline:.3f} bits per character")
    console.print(f"wrote {CHECKPOINT}, loss.png and sample.txt to {options.out}")


def quantized_bits(run: Run, sizes: list[int]) -> Iterator[tuple[int, float]]:
    """Quantize the LSTM's weights to each size in bits, and yield (size, validation bits per character)."""
    trained, group = run.model.lstm, 64 if run.settings.hidden % 64 == 0 else 32
    for size in sizes:
        run.model.lstm = QuantizedLSTM.from_layer(trained, group, size)
        yield size, validation_bits(run.model, run.corpus)
    run.model.lstm = trained


def start(settings: Settings | None, checkpoint: Path, corpus: Corpus, engine: str | None, ranks: Ranks) -> Run:
    """Return a new training run, or continue the run that a checkpoint stored. All processes return the same run, but
    only the first one reads the file."""
    if ranks.rank == 0:
        run = Run(settings, corpus, ranks) if settings else Run.load(checkpoint, corpus, engine, ranks)
        if ranks.size == 1:
            return run
    with tempfile.TemporaryDirectory() as folder:
        sent = Path(folder) / CHECKPOINT
        if ranks.rank == 0:
            run.write(sent)
            ranks.first(sent.read_bytes())
            return run
        sent.write_bytes(ranks.first())
        try:
            return Run.read(sent, corpus, engine, ranks)
        except ValueError as error:
            raise ValueError(f"process {ranks.rank} cannot do as the first one does: {error}") from None


def main(argv: list[str] | None = None) -> int:
    options, settings = arguments(argv)
    corpus, checkpoint = Corpus.of(documentation()), options.out / CHECKPOINT
    try:
        ranks = Ranks(options.distributed)
        run = start(settings, checkpoint, corpus, getattr(options, "engine", None), ranks)
        run.model(mx.zeros((1, 1), mx.int32), run.model.zero_state(1))
        if options.quantize:
            QuantizedLSTM.from_layer(run.model.lstm, 32)  # raises an error now if the layer cannot be quantized
        if ranks.rank == 0:
            options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, Lost) as error:  # a wrong checkpoint, engine or folder
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    corpus.encode(options.prompt)
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=ranks.rank > 0)
    baseline = trigram_bits(corpus)
    weights = sum(array.size for _, array in tree_flatten(run.model.parameters()))
    held_out = len(corpus.codes) - corpus.split
    console.print(f"{corpus.split:,} characters to train on, the last {held_out:,} for validation")
    console.print(f"{len(corpus.alphabet)} symbols, {weights:,} weights, trigram baseline {baseline:.3f} bits/char")
    command = f"python {os.path.relpath(__file__)} --resume --out {shlex.quote(str(options.out))}"
    try:
        went_on = train(run, checkpoint, console, options.seconds)
        if ranks.rank == 0:
            report(run, baseline, options, console) if went_on else plot(run, baseline, options.out / "loss.png")
    except (Lost, OSError) as error:  # another process, or the disk that the checkpoint or the results need
        last = "nothing was saved" if run.saved is None else f"go on from step {run.saved} with:  {command}"
        print(f"{Path(__file__).name}: error: {error}; {last}", file=sys.stderr)
        return 1
    if run.step < run.settings.steps:
        console.print(f"stopped at step {run.step} of {run.settings.steps}; go on with:  {command}")
    return 0 if went_on else 130


if __name__ == "__main__":
    run_main(main)
