"""The calls of the Metal kernels that many tests make. A kernel's source depends on the options of a call, on which
arrays it has, on the dtype, and on H in `fused`. So tests that take their calls from here compile few kernels."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from assertions import assert_within
from cases import ROUNDING_MARGIN, draw_away_from_kinks, joined, run, to_mlx
from on_metal import matrices_from, on_metal
from quantized_cases import packed

from mlx_lstm.engines.cells import NormOptions
from mlx_lstm.engines.ops.packed import matrix_for_oracle
from mlx_lstm.engines.problem import limited
from mlx_lstm.oracle import evaluate
from mlx_lstm.oracle.closeness import exact_and_bounds

T, H, P = 6, 12, 13
"""With H = 12, not a multiple of 8, some lanes of the last SIMD group compute no unit. P (the size of h after a
projection) differs from H, so that a kernel that confuses H and P is wrong."""

# --- ROWS: sets of options, one set per call -------------------------------------------------------------------------

ALL = {"mask": ("T", "B", "P"), "keep": True, "lengths": True}
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


def fitted(options, T, B):
    """Return options of ROWS with the arrays and shapes that a batch of B sequences of T steps needs."""
    options = dict(options)
    if options.get("lengths"):
        options["lengths"] = [(T, T // 2, 0, 1, T, T, 2 % (T + 1), max(T - 1, 0), 4 % (T + 1))[n % 9] for n in range(B)]
    if "hold" in options:
        options["hold"] = np.arange(T * B).reshape(T, B) % 4 == 1
    if options.get("mask"):
        options["mask"] = tuple({"T": T, "B": B}.get(size, size) for size in options["mask"])
    return options


def usual_call(engine, name, sizes=(T, 3, 2, H, P), seed=3, **more):
    """Return random (case, cotangents) of a call in float32 with the options `ROWS[name]` and `more`. On an engine, all
    calls with the same row and H, that run by the same kind of product, use the same kernels. An exception is the batch
    size: MLX binds `lengths` of fewer than 8 sequences in Metal's constant address space."""
    options = fitted(options_of(Path(engine, "", False), name) | more, *sizes[:2])
    return draw_away_from_kinks(seed, ROUNDING_MARGIN, sizes=sizes, recurrent=0.3, **options)


def drawn(path, name):
    """Return random (case, cotangents, quantized weights, dtype) for a call with the options `name` of `ROWS`. The
    sizes and the dtype are such that the variant of the kernels `path` computes the call."""
    B = 9 if path.product in ("matrices", "tiles", "packed tiles") else 3
    # For quantized weights H and P are multiples of the group size 16.
    of_units, options, dtype = (16, 32) if "packed" in path.product else (H, P), options_of(path, name), np.float32
    if path.rare:
        # So each cell has both 16-bit dtypes.
        bfloat16 = path.product == "matrices" or (path.engine == "stepwise" and "lanes" in path.product)
        dtype = ml_dtypes.bfloat16 if bfloat16 else np.float16
    sizes, options = (T, B, 2, *of_units), fitted(options, T, B)
    case, cotangents = draw_away_from_kinks(5, 3e-3, sizes=sizes, dtype=dtype, recurrent=0.3, **options)
    weights = {}
    if "packed" in path.product:
        weights = {n: packed(to_mlx(case[n], dtype), 16, 4, "nvfp4") for n in ("Wh", "Wp") if n in case}
        case |= {n: matrix_for_oracle(weight.packing, weight.arrays(n), n) for n, weight in weights.items()}
    return case, cotangents, weights, dtype


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
