"""Random test cases of the ops `lstm`, `gru` and `rnn`. A case is a dict of arrays and options, drawn by
`mlx_lstm.lab.cases`. This file adds helpers that only the tests need."""

from hashlib import sha256
from importlib.util import find_spec
from types import MappingProxyType

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from mlx_lstm import recurrence
from mlx_lstm.engines import METAL_ENGINES
from mlx_lstm.engines.cells import NormOptions
from mlx_lstm.engines.choice import has_metal
from mlx_lstm.engines.numpy import norms as numpy_norms
from mlx_lstm.engines.numpy import products as numpy_products
from mlx_lstm.engines.numpy import steps as numpy_steps
from mlx_lstm.lab import cases
from mlx_lstm.lab.cases import (  # noqa: F401 (other test files import these names from here)
    ACTIVATIONS,
    BOTH,
    CELLS,
    KINK_MARGIN,
    OPTIONS,
    ROUNDING_MARGIN,
    SIZES,
    B,
    T,
    both,
    draw,
    draw_away_from_kinks,
    draw_cotangents,
)
from mlx_lstm.oracle import OUTPUTS as OUTPUTS_OF
from mlx_lstm.oracle import evaluate
from mlx_lstm.oracle.closeness import SAFETY, TRIALS, Changes, exact_and_bounds
from mlx_lstm.oracle.judge import Case
from mlx_lstm.oracle.verdict import Judge

KINDS = {op: {"op": op} for op in ("lstm", "gru", "rnn")}
KINDS |= {f"{op}_both": {"op": op, **both} for op in ("lstm", "gru", "rnn")}
"""The three cells, each with one direction and with both."""
EVERY_ARRAY = {kind: {"mask": (T, B, "P"), **options} for kind, options in KINDS.items()}
for kind in ("lstm", "lstm_both"):
    EVERY_ARRAY[kind] |= {"projection": True, "peephole": True}


def needs(*modules):
    """Skip the test if one of these modules is not installed. The modules are not imported, because only a child
    process uses them."""
    for name in modules:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


GPU = has_metal()
METAL = mx.gpu if GPU else mx.cpu
"""The device of the Metal engines in the tests: the GPU on a Mac, elsewhere the CPU, where the emulator runs."""


def device_of(engine):
    """Return the device (CPU or GPU) on which the tests run an engine."""
    return METAL if engine in METAL_ENGINES else mx.cpu


OUTPUTS = OUTPUTS_OF["lstm"]


def is_in_range(results):
    """Return whether float32 can hold all numbers in `results` and their squares. The results of a GRU with
    unbounded gates can leave this range within five steps."""
    return all(np.abs(value).max(initial=0) < 1e18 for value in results.values())


def combination(rng, sizes=SIZES, op="lstm", bidirectional=False):
    """Return a random value for every option of an op, as a dict {option: value}."""
    T, B = sizes[:2]
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    # A separate generator draws the options that were added later, so that a seed still gives the older options
    # the same values.
    own, later = rng.spawn(2)
    hold = own.random((T, B)) < own.random()
    states = ("b", "h0", "c0") if op == "lstm" else ("b", "h0")
    options = {
        **({"op": op} if op != "lstm" else {}),
        **({"bidirectional": True} if bidirectional else {}),
        **CHOICES[op](rng, pick),
        "projected_x": pick(False, True),
        "mask": pick(None, (T, B, "P"), (B, "P"), (T, 1, "P"), (B, 1)),
        "reverse": not bidirectional and pick(False, True),
        "lengths": pick(None, rng.integers(0, T + 1, B)),
        **{name: None for name in states if rng.random() < 0.2},
        "keep": bool(own.random() < 0.4),
        "hold": hold if own.random() < 0.3 else None,
    }
    if op == "lstm":
        options["clip_gradient"] = ("through", "zero")[own.integers(2)]
        options["projection_clip"] = (None, 0.2, 0.6)[own.integers(3)] if options["projection"] else None
    if later.random() < NORMED_SHARE and options.get("reset") != "before":
        options["norm"] = random_norm(later, op)
    return options


NORMED_SHARE = 0.35
"""The part of all combinations that have layer normalisation."""


def random_norm(rng, op):
    """Return random options of layer normalisation for an op."""
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    of = pick("product", "sum", None) if op == "lstm" else "product" if op == "gru" else pick("product", "sum")
    c = pick("output", "state", *([None] if of else [])) if op == "lstm" else None
    return NormOptions(of, pick("together", "each"), c, pick(1e-5, 1e-3))


def lstm_choice(rng, pick):
    return {
        "projection": pick(False, True),
        "peephole": pick(False, True),
        "output_peephole": pick("current", "previous"),
        "cell_clip": pick(None, 0.3, 1.0),
        "forget_bias": pick(0.0, 1.0, -0.5),
        "gate_order": "".join(rng.permutation(list("ifgo"))),
        "activations": tuple(rng.choice(ACTIVATIONS, 5)),
    }


def gru_choice(rng, pick):
    return {
        "reset": pick("after", "before"),
        "flip_z": pick(False, True),
        "gate_order": "".join(rng.permutation(list("rzn"))),
        "activations": tuple(rng.choice(ACTIVATIONS, 3)),
        **({"bhn": None} if rng.random() < 0.2 else {}),
    }


def rnn_choice(rng, pick):
    return {"activation": pick(*ACTIVATIONS)}


CHOICES = {"lstm": lstm_choice, "gru": gru_choice, "rnn": rnn_choice}


def split(case):
    """Split a case (a dict of an op's arguments) into (op, arrays, options)."""
    return Case(case).op, Case(case).arrays, Case(case).options


MLX_DTYPE = {np.float32: mx.float32, np.float64: mx.float64, np.float16: mx.float16, ml_dtypes.bfloat16: mx.bfloat16}


def to_mlx(array, dtype):
    """Convert a NumPy array (also bfloat16) to an MLX array. `dtype` is a NumPy dtype."""
    return cases.to_mlx(array, MLX_DTYPE[dtype])


def to_numpy(array):
    """Convert an MLX array (also bfloat16) to a NumPy array of the same dtype."""
    if array.dtype == mx.bfloat16:
        return np.array(array.astype(mx.float32)).astype(ml_dtypes.bfloat16)
    return np.array(array)


def run(case, engine, dtype, cotangents=None, weights=MappingProxyType({}), device=None):
    """Run a case (a dict of arrays and options) on an engine. Return (outputs, gradients), two dicts of NumPy arrays
    by name.

    With `cotangents` {output name: cotangent}, only these outputs are computed, and the gradients come from these
    cotangents. `weights`: quantized weights that replace the case's weights of the same names. `device`: where to
    run instead of the device that the tests usually choose for this engine.
    """
    with mx.stream(device or device_of(engine)):
        found = cases.run(Case(case, cotangents or {}, weights=weights), engine, dtype=MLX_DTYPE[dtype])
        results = {name: to_numpy(array) for name, array in found.items()}
    gradients = {name[1:]: results.pop(name) for name in [*results] if name not in OUTPUTS}
    return results, gradients


def run_gradients(case, engine, dtype, cotangents, saved=None):
    """Run the op and then its gradient op (`lstm_gradients`, `gru_gradients` or `rnn_gradients`). Return the
    gradients by name, as NumPy arrays. `saved`: names of the outputs of the forward pass that the gradient op
    receives. With layer normalisation, which the gradient ops do not have, MLX computes the gradients."""
    if case.get("norm") is not None:
        return run(case, engine, dtype, cotangents)[1]
    op, arrays, options = split(case)
    saved = saved or {"lstm": ("gates", "c", "h"), "gru": ("gates", "h"), "rnn": ("h",)}[op]
    with mx.stream(device_of(engine)):
        given = {"Wx": None} | {name: to_mlx(array, dtype) for name, array in arrays.items()}
        out = getattr(recurrence, op)(**given, **options, engine=engine, return_gates=True)
        given |= {name: value for name, value in options.items() if name != "forget_bias"}
        given |= {name: getattr(out, name) for name in saved}
        given |= {f"d{name}": to_mlx(array, dtype) for name, array in cotangents.items()}
        gradients = getattr(recurrence, f"{op}_gradients")(**given, engine=engine)
        return {name: to_numpy(gradient) for name, gradient in gradients.items()}


def poison_scratch(monkeypatch):
    """Fill every scratch buffer of engine `numpy` with NaN, so that an element which is read before it is written
    makes the result NaN."""

    allocate = numpy_products.columns_buffer

    def poisoned(*arguments):
        buffer = allocate(*arguments)
        buffer.fill(np.nan)
        return buffer

    for module in (numpy_steps, numpy_products, numpy_norms):
        monkeypatch.setattr(module, "columns_buffer", poisoned)


JUDGED: dict[bytes, Judge] = {}
"""The results of `judge` for the last cases. Several engines run the same case, and the oracle is slower than most."""


def judge(case, dtype, cotangents):
    """Return (exact, bounds), two dicts by name: the oracle's results of a case, and the largest error that each of
    them may have in `dtype`."""
    key = sha256(repr(np.dtype(dtype)).encode())
    for name, value in sorted((case | {f"d{name}": value for name, value in cotangents.items()}).items()):
        array = isinstance(value, np.ndarray)
        key.update(repr((name, value.dtype, value.shape) if array else (name, value)).encode())
        key.update(value.tobytes() if array else b"")
    if key.digest() not in JUDGED:
        while len(JUDGED) >= 32:
            JUDGED.pop(next(iter(JUDGED)))
        JUDGED[key.digest()] = exact_and_bounds(lambda fl: joined(evaluate(case, cotangents, fl)), dtype)
    return JUDGED[key.digest()]


def elementwise_bounds(case, dtype, cotangents):
    """Return a rounding error bound for each element of each result, so that a small element next to a large one
    gets a small bound.

    A bound comes from repeated evaluations with random rounding errors, called trials. In one trial the errors of a
    single element may cancel. Therefore this function runs four times as many trials as `bounds`, which takes the
    largest error of a whole array.
    """
    changes = Changes(lambda fl: joined(evaluate(case, cotangents, fl)), dtype)
    moved = changes.of(4 * TRIALS)
    return {name: SAFETY * moved[name] + changes.floor(np.abs(value)) for name, value in changes.exact.items()}


def joined(results):
    """Merge the pair `results` = (outputs, gradients) into one dict."""
    return results[0] | results[1]
