"""Tests that run every option on every path through the Metal kernels, and compare the results with the oracle.

A path is one way to compute the same recurrence: the kind of the recurrent product, one launch or several, 32-bit or
64-bit indices, one direction or both, float32 or 16 bits.
"""

import re
from contextlib import ExitStack
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from assertions import assert_within
from cases import draw_away_from_kinks, joined, run, to_mlx
from on_metal import matrices_from, on_metal
from quantized_cases import packed

from mlx_lstm.engines.cells import NormOptions
from mlx_lstm.engines.ops.packed import matrix_for_oracle
from mlx_lstm.engines.problem import limited
from mlx_lstm.lab.cases import EVERY_OPTION
from mlx_lstm.lab.cases import T as T_OF_OPTIONS
from mlx_lstm.oracle import evaluate
from mlx_lstm.oracle.closeness import exact_and_bounds

T = 6

# --- ROWS: sets of options, one set per call
# ---------------------------------------------------------------------------

ALL = {"mask": (T, "B", "P"), "keep": True, "lengths": True}
BARE = {"mask": ("P",), "hold": True, "keep": True, "projected_x": True, "b": None, "h0": None}
ROWS: dict[str, dict[str, Any]] = {
    # Each row is a set of options for one call. Options that exclude each other, such as the two kinds of peepholes,
    # are in different rows. Each gate has a different activation, so that a kernel that confuses two gates gives wrong
    # results.
    "lstm": {
        **ALL,
        "peephole": True,
        "cell_clip": 0.4,
        "forget_bias": 0.5,
        "gate_order": "ogfi",
        "activations": ("hard_sigmoid", "sigmoid", "tanh", "hard_sigmoid_sixth", "identity"),
    },
    "lstm, bare": {
        **BARE,
        "c0": None,
        "peephole": True,
        "output_peephole": "previous",
        "cell_clip": 0.6,
        "clip_gradient": "zero",
        "activations": ("sigmoid", "hard_sigmoid_sixth", "relu", "hard_sigmoid", "tanh"),
    },
    "gru": {
        **ALL,
        "flip_z": True,
        "gate_order": "zrn",
        "activations": ("hard_sigmoid", "sigmoid", "identity"),
    },
    "gru, bare": {**BARE, "bhn": None, "activations": ("sigmoid", "hard_sigmoid_sixth", "tanh")},
    "gru_before": {
        **ALL,
        "flip_z": True,
        "gate_order": "zrn",
        "activations": ("hard_sigmoid", "sigmoid", "tanh"),
    },
    "gru_before, bare": {**BARE, "activations": ("sigmoid", "hard_sigmoid_sixth", "relu")},
    "rnn": {**ALL, "activation": "relu"},
    "rnn, bare": {**BARE, "activation": "hard_sigmoid"},
    "lstm, norm": {
        **ALL,
        "peephole": True,
        "cell_clip": 0.4,
        "gate_order": "ogfi",
        "norm": NormOptions("sum", "each", "state"),
    },
    "gru, norm": {**ALL, "flip_z": True, "gate_order": "zrn", "norm": NormOptions("product")},
    "rnn, norm": {**ALL, "norm": NormOptions("product", "each")},
}
# The direction is a run-time argument of the kernels, so these additional rows compile no additional kernels.
ROWS |= {f"{name}, reverse": ROWS[name] | {"reverse": True} for name in ("lstm", "gru", "gru_before", "rnn")}


def cell_of(name):
    """Return the cell of a row of `ROWS`: the part of the row's name before a comma, e.g. "gru" of "gru, bare"."""
    return name.partition(",")[0]


def features(options):
    """Return the names of a case's options, such as {"keep", "no b", "mask of each step"}."""
    found = set()
    for name, value in options.items():
        if name == "mask":
            differs = len(value) == 3 and value[0] in (T, T_OF_OPTIONS)
            found.add("mask of each step" if differs else "mask of all steps")
        elif name == "output_peephole":
            found.add(f"{value} peephole")
        elif value is not False and name not in ("op", "reset", "bidirectional"):
            found.add(f"no {name}" if value is None else name)
    return found


# --- Paths through the kernels ---------------------------------------------------------------------------------------


class Path(NamedTuple):
    """A way through the kernels of an engine. product: how the recurrent product is computed. rare: whether the call
    needs code that most calls do not need.

    A rare call has 64-bit indices, 16-bit arrays and both directions. A rare call of `fused` also has several launches
    per pass. A rare call of `stepwise` also has launches that concatenate arrays of earlier steps.
    """

    engine: str
    product: str
    rare: bool

    def __str__(self):
        return f"{self.engine}, {self.product}{', rare' if self.rare else ''}"


PATHS = [Path("fused", product, rare) for product in ("lanes", "matrices") for rare in (False, True)]
PATHS += [Path("stepwise", product, rare) for product in ("lanes", "tiles") for rare in (False, True)]
# Quantized ("packed") weights only change how a product reads its weights. So one path for each kind of product is
# enough, instead of one with `rare` and one without.
PATHS += [Path("fused", "packed lanes", True), Path("stepwise", "packed lanes", True)]
PATHS += [Path("stepwise", "packed tiles", True)]

NEVER = {("matrices", "gru_before"): "two products per step leave no registers for matrices"}
"""{(product, cell): reason why no call has this combination}. Matrices also have no layer normalisation: its sums over
all units are written for lanes only."""
NEVER_OPTION = {("fused", name): "`fused` has no projection" for name in ("projection", "projection_clip")}
"""{(engine, option): reason why no call has this combination}."""


LANES, TILES = ("lanes", "tiles")
TURNS = {
    # {row: (is its call on `fused` by lanes a rare one, (product, rare) of its calls on `stepwise`)}. Of two products
    # of a row one is in a rare call. The functions of `fused` for lanes and for matrices are apart, so each row runs by
    # both, if it can. On `stepwise` one function computes a step; the product is an argument of its template. So it is
    # enough that each cell, and each option that several cells have, meets both products, and rare and usual calls.
    # The options of an LSTM alone are in two rows, so these run with both products.
    "lstm": (True, [(LANES, True), (TILES, False)]),
    "lstm, bare": (False, [(LANES, False), (TILES, True)]),
    "gru": (True, [(LANES, True)]),
    "gru, bare": (False, [(TILES, False)]),
    "gru_before": (True, [(TILES, True)]),
    "gru_before, bare": (False, [(LANES, False)]),
    "rnn": (True, [(TILES, False)]),
    "rnn, bare": (False, [(LANES, True)]),
    "lstm, norm": (True, [(TILES, True)]),
    "gru, norm": (False, [(LANES, False)]),
    "rnn, norm": (True, [(LANES, True)]),
}


def cases():
    """Return pytest parameters (path, name). A path of `PATHS` is a variant of the kernels; a name is the key of a
    set of options in `ROWS`.

    The default tests run the calls of `TURNS`. A row with `reverse` uses the kernels of the row without it. The code
    that reads quantized weights is the same for all options. So each path with quantized weights runs only one set of
    options per cell; other cells than LSTM are slow tests here, because test_quantized_kernels.py runs them.
    """
    found = []
    for path in PATHS:
        for name in ROWS:
            row = name.removesuffix(", reverse")
            packed, lanes_rare, calls = "packed" in path.product, *TURNS[row]
            if packed:
                turn, may_run = name == "lstm", name == cell_of(name)
            elif path.engine == "fused":
                turn, may_run = (path.product == "lanes") == (lanes_rare == path.rare), True
            else:
                turn, may_run = (path.product, path.rare) in calls, True
            never = (path.product, cell_of(name)) in NEVER or (path.product == "matrices" and "norm" in ROWS[name])
            if may_run and not never and (turn or row == name):
                found.append(pytest.param(path, name, marks=[] if turn else pytest.mark.slow))
    return found


def test_every_option_is_in_a_row():
    """Each option of the tables in `mlx_lstm.lab.cases` is in a row of ROWS, so that the tests below run it on
    every path. A new option must be added to a row."""
    wanted, found = {}, {}
    for options in EVERY_OPTION.values():
        cell = options.get("op", "lstm") + ("_before" if options.get("reset") == "before" else "")
        wanted.setdefault(cell, set()).update(features(options))
    for engine in ("fused", "stepwise"):
        for name in ROWS:
            found.setdefault((engine, cell_of(name)), set()).update(
                features(options_of(Path(engine, "lanes", False), name))
            )
        for cell, names in wanted.items():
            left_out = {option for left, option in NEVER_OPTION if left == engine}
            assert names - found[engine, cell] <= left_out, (engine, cell)


def options_of(path, name):
    """Return the options of a call: the options `ROWS[name]`, and those that a variant of the kernels (`path`) needs
    in addition. In engine `stepwise` every LSTM also has a projection with a clip, which `fused` does not support."""
    options = dict(ROWS[name]) | {"op": name[:4] if name.startswith("lstm") else name[:3]}
    if cell_of(name) == "gru_before":
        options["reset"] = "before"
    if path.engine == "stepwise" and options["op"] == "lstm":
        options |= {"projection": True, "projection_clip": 0.8}
    if path.rare and not options.get("reverse"):
        options["bidirectional"] = True
    return options


def drawn(path, name):
    """Return random (case, cotangents, quantized weights, dtype) for a call with the options `name` of `ROWS`. The
    sizes and the dtype are such that the variant of the kernels `path` computes the call."""
    B = 9 if path.product in ("matrices", "tiles", "packed tiles") else 3
    # With H = 12, not a multiple of 8, some lanes of the last SIMD group compute no unit. P (the size of h after a
    # projection) differs from H, so that a kernel that confuses H and P is wrong. For quantized weights both are
    # multiples of the group size 16.
    H, P = (16, 32) if "packed" in path.product else (12, 13)
    options, dtype = options_of(path, name), np.float32
    if path.rare:
        dtype = ml_dtypes.bfloat16 if cell_of(name) == "rnn" else np.float16
    if "lengths" in options:
        options["lengths"] = [T, 3, 0, 1, T, T, 2, 5, 4][:B]
    if "hold" in options:
        options["hold"] = np.arange(T * B).reshape(T, B) % 4 == 1
    if "mask" in options:
        options["mask"] = tuple(B if size == "B" else size for size in options["mask"])
    case, cotangents = draw_away_from_kinks(5, 3e-3, sizes=(T, B, 2, H, P), dtype=dtype, recurrent=0.3, **options)
    weights = {}
    if "packed" in path.product:
        weights = {n: packed(to_mlx(case[n], dtype), 16, 4, "nvfp4") for n in ("Wh", "Wp") if n in case}
        case |= {n: matrix_for_oracle(weight.packing, weight.arrays(n), n) for n, weight in weights.items()}
    return case, cotangents, weights, dtype


@pytest.mark.parametrize(
    "path, name", cases(), ids=lambda value: "-".join(map(str, value)) if value in PATHS else value
)
def test_every_option_on_every_path(path, name):
    assert_on_path(path, check(path, name))


def check(path, name, **in_chunks):
    """Compare the results of a call with the oracle. Return the log of its kernel launches. in_chunks: the option
    `checkpoint_every`, which changes no result."""
    case, cotangents, weights, dtype = drawn(path, name)
    with ExitStack() as stack:
        log = stack.enter_context(on_metal())
        stack.enter_context(matrices_from(1 if path.product == "matrices" else 100))
        if path.rare:
            stack.enter_context(limited(index=1, launch_steps=2, rows_left=4))
        found = joined(run(case | in_chunks, path.engine, dtype, cotangents, weights))
    exact, limit = exact_and_bounds(lambda fl: joined(evaluate(case, cotangents, fl)), dtype)
    for array, value in found.items():
        assert value.dtype == dtype
        label = f"{path.engine}, {'backward, gradient of' if array in case else 'forward'} {array}"
        assert_within(label, value, exact[array], limit[array])
    return log


def assert_on_path(path, log):
    """Check in the log of kernel launches that a call ran the variant of the kernels that `path` describes."""
    passes = [launch for launch in log if re.search("fused_.*ward|stepwise", launch.name)]
    index = "ulong|long" if path.rare else "uint|int"
    assert passes and all(re.search(rf"Index = ({index});", launch.source) for launch in passes)
    if path.engine == "fused":
        assert {"matrix" in launch.name for launch in passes} == {path.product == "matrices"}
        assert len(passes) == (6 if path.rare else 2)
        assert any("quantized" in launch.name for launch in log) == ("packed" in path.product)
    else:
        assert any("_joining" in launch.name for launch in passes) == path.rare
        assert any("simdgroup_multiply" in launch.source for launch in passes) == ("tiles" in path.product)
        assert any("packed_weights" in launch.source for launch in passes) == ("packed" in path.product)
