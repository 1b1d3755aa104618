"""Random cases of the ops `lstm`, `gru`, `rnn`: tables of options, arrays for them, how an engine runs a case."""

import ml_dtypes
import mlx.core as mx
import numpy as np

from mlx_lstm import recurrence
from mlx_lstm.engines.numpy import gru as numpy_gru
from mlx_lstm.engines.numpy import lstm as numpy_lstm
from mlx_lstm.engines.numpy import memory as numpy_memory
from mlx_lstm.engines.numpy import products as numpy_products
from mlx_lstm.oracle import ARRAYS, activation_arguments, evaluate, forward
from mlx_lstm.oracle import OUTPUTS as OUTPUTS_OF
from mlx_lstm.oracle.arithmetic import Arithmetic
from mlx_lstm.oracle.closeness import SAFETY, TRIALS, Noise, float_of

SIZES = T, B, I, H, P = 4, 2, 3, 2, 3
MASKS = [(T, B, "P"), (B, "P"), (1, "P"), ("P",), (T, 1, 1), (1,), ()]
ACTIVATIONS = ("identity", "relu", "tanh", "sigmoid", "hard_sigmoid", "hard_sigmoid_sixth")
KINK_MARGIN = 1e-2  # how far preactivations stay from a kink: a thousand steps of a finite difference
ROUNDING_MARGIN = 1e-4  # how far they stay from it where only float32 rounding must not cross it

OPTIONS = {
    "plain": {},
    "projected_x": {"projected_x": True},
    "no_bias": {"b": None},
    "no_h0": {"h0": None},
    "no_c0": {"c0": None},
    "peephole_current": {"peephole": True},
    "peephole_previous": {"peephole": True, "output_peephole": "previous"},
    **{f"mask_{n}": {"mask": shape} for n, shape in enumerate(MASKS)},
    "cell_clip": {"cell_clip": 0.4},
    "cell_clip_peephole": {"cell_clip": 0.4, "peephole": True},
    "forget_bias": {"forget_bias": 1.0},
    "reverse": {"reverse": True},
    "lengths": {"lengths": [3, 0]},
    "lengths_reverse": {"lengths": [2, 4], "reverse": True},
    "projection": {"projection": True},
    "gate_order": {"gate_order": "ogfi", "peephole": True},
    **{f"{name}_gates": {"activations": (name,) * 4 + ("tanh",)} for name in ACTIVATIONS},
    **{f"{name}_output": {"activations": ("sigmoid", "sigmoid", "tanh", "sigmoid", name)} for name in ACTIVATIONS},
}

COMMON = {name: OPTIONS[name] for name in ("plain", "projected_x", "no_bias", "no_h0", "reverse")}
COMMON |= {name: OPTIONS[name] for name in OPTIONS if name.startswith(("mask", "lengths"))}

GRU = {
    **COMMON,
    "no_bhn": {"bhn": None},
    "before": {"reset": "before"},
    "before_mask": {"reset": "before", "mask": (T, B, "P")},
    "before_lengths_reverse": {"reset": "before", "lengths": [2, 4], "reverse": True},
    "flip_z": {"flip_z": True},
    "before_flip_z": {"reset": "before", "flip_z": True},
    "zrn": {"gate_order": "zrn"},
    "before_nrz": {"reset": "before", "gate_order": "nrz"},
    **{f"{name}_gates": {"activations": (name, name, "tanh")} for name in ACTIVATIONS},
    **{f"{name}_candidate": {"activations": ("sigmoid", "sigmoid", name)} for name in ACTIVATIONS},
    "before_hard": {"reset": "before", "activations": ("hard_sigmoid", "hard_sigmoid", "relu")},
}
RNN = {**COMMON, **{name: {"activation": name} for name in ACTIVATIONS}}

both = {"bidirectional": True}
SIDE_BY_SIDE = {name: option | both for name, option in COMMON.items() if "reverse" not in name}
BIDIRECTIONAL = {
    "lstm": {
        **SIDE_BY_SIDE,
        **{name: OPTIONS[name] | both for name in ("no_c0", "peephole_current", "peephole_previous", "gate_order")},
        **{name: OPTIONS[name] | both for name in ("cell_clip_peephole", "forget_bias", "projection")},
        "projection_lengths": {"projection": True, "lengths": [3, 1], "mask": (T, 1, "P"), **both},
        "relu_output": OPTIONS["relu_output"] | both,
    },
    "gru": {**SIDE_BY_SIDE, **{name: GRU[name] | both for name in ("no_bhn", "before_mask", "before_flip_z", "zrn")}},
    "rnn": {**SIDE_BY_SIDE, "relu": RNN["relu"] | both},
}

CELLS = {f"gru_{name}": {"op": "gru", **option} for name, option in GRU.items()}
CELLS |= {f"rnn_{name}": {"op": "rnn", **option} for name, option in RNN.items()}
"""Options as those of OPTIONS, of the other two cells."""
BOTH = {
    f"{op}_both_{name}": {"op": op, **option} for op, table in BIDIRECTIONAL.items() for name, option in table.items()
}
"""And of the three cells, with both directions."""

KINDS = {op: {"op": op} for op in ("lstm", "gru", "rnn")}
KINDS |= {f"{op}_both": {"op": op, **both} for op in ("lstm", "gru", "rnn")}
"""Cells, of one direction and of both."""
EVERY_ARRAY = {kind: {"mask": (T, B, "P"), **options} for kind, options in KINDS.items()}
for kind in ("lstm", "lstm_both"):
    EVERY_ARRAY[kind] |= {"projection": True, "peephole": True}

OUTPUTS = OUTPUTS_OF["lstm"]
GATES = {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}


def draw(
    rng,
    *,
    op="lstm",
    sizes=SIZES,
    projection=False,
    projected_x=False,
    peephole=False,
    mask=None,
    bidirectional=False,
    dtype=np.float64,
    **options,
):
    """A case of random arrays; `mask` is the mask's shape, "P" in it the width of h (of both, if both directions)."""
    T, B, I, H, P = sizes
    D, G, own = (2, len(GATES[op]), (2,)) if bidirectional else (1, len(GATES[op]), ())
    width = P if projection else H
    shapes = {"x": (T, B, D * G * H if projected_x else I), "Wh": (*own, G * H, width), "b": (D * G * H,)}
    shapes |= {"h0": (B, D * width)}
    if op == "lstm":
        shapes["c0"] = (B, D * H)
    if op == "gru" and options.get("reset") != "before":
        shapes["bhn"] = (D * H,)
    if not projected_x:
        shapes["Wx"] = (D * G * H, I)
    if projection:
        shapes["Wp"] = (*own, P, H)
    if peephole:
        shapes["peephole"] = (*own, 4 * H)
    if mask is not None:
        shapes["mask"] = tuple(D * width if size == "P" else size for size in mask)
    arrays = {name: rng.normal(0, 0.7, shape).astype(dtype) for name, shape in shapes.items()}
    arrays |= options
    return arrays | {
        name: value for name, value in (("op", op), ("bidirectional", bidirectional)) if value not in ("lstm", False)
    }


def draw_cotangents(rng, outputs, dtype=np.float64):
    return {name: rng.normal(size=value.shape).astype(dtype) for name, value in outputs.items()}


def draw_away_from_kinks(seed, margin=KINK_MARGIN, **options):
    """(case, cotangents), drawn again until no relu or hard_sigmoid is within the margin of its kink."""
    rng = np.random.default_rng(seed)
    dtype = options.get("dtype", np.float64)
    for _ in range(200):
        case = draw(rng, **options)
        if kink_distance(case) > margin:
            return case, draw_cotangents(rng, forward(**case), dtype)
    raise RuntimeError(f"no case of {options} keeps off its kinks")


def kink_distance(case):
    """How near an argument of relu or hard_sigmoid comes to a kink.

    An exact 0 does not count: it comes of a relu or hard sigmoid that is flat there, and no small change moves it.
    """
    seen = [(name, a[a != 0]) for name, a in activation_arguments(**case)]
    kinks = {"relu": [0.0], "hard_sigmoid": [-2.5, 2.5], "hard_sigmoid_sixth": [-3.0, 3.0]}
    distances = (np.abs(a - kink).min(initial=np.inf) for name, a in seen for kink in kinks.get(name, []))
    return min(distances, default=np.inf)


def combination(rng, sizes=SIZES, op="lstm", bidirectional=False):
    """A random choice of every option of an op at once."""
    T, B = sizes[:2]
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    states = ("b", "h0", "c0") if op == "lstm" else ("b", "h0")
    return {
        **({"op": op} if op != "lstm" else {}),
        **({"bidirectional": True} if bidirectional else {}),
        **CHOICES[op](rng, pick),
        "projected_x": pick(False, True),
        "mask": pick(None, (T, B, "P"), (B, "P"), (T, 1, "P"), (B, 1)),
        "reverse": not bidirectional and pick(False, True),
        "lengths": pick(None, rng.integers(0, T + 1, B)),
        **{name: None for name in states if rng.random() < 0.2},
    }


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


MLX_DTYPE = {np.float32: mx.float32, np.float64: mx.float64, np.float16: mx.float16, ml_dtypes.bfloat16: mx.bfloat16}


def to_mlx(array, dtype):
    """A NumPy array (also bfloat16) as an MLX array of this NumPy dtype."""
    wide = np.asarray(array).astype(np.float64 if dtype == np.float64 else np.float32)
    return mx.array(wide, mx.float64 if dtype == np.float64 else mx.float32).astype(MLX_DTYPE[dtype])


def to_numpy(array):
    """An MLX array (also bfloat16) as a NumPy array of the same dtype."""
    if array.dtype == mx.bfloat16:
        return np.array(array.astype(mx.float32)).astype(ml_dtypes.bfloat16)
    return np.array(array)


def split(case):
    """(op, arrays, options) of a case: its name, the arrays it has, the rest."""
    arrays = {name: case[name] for name in ARRAYS if case.get(name) is not None}
    options = {name: value for name, value in case.items() if name not in ARRAYS and name != "op"}
    return case.get("op", "lstm"), arrays, options


def run(case, engine, dtype, cotangents=None):
    """(outputs, gradients) of the case's op by name, as NumPy arrays; only outputs with a cotangent are used."""
    op, arrays, options = split(case)
    names = list(arrays)
    shown = OUTPUTS_OF[op] if cotangents is None else [name for name in OUTPUTS_OF[op] if name in cotangents]

    def outputs_of(*values):
        given = {"Wx": None} | dict(zip(names, values, strict=True)) | options
        out = getattr(recurrence, op)(**given, engine=engine, return_gates="gates" in shown)
        return [getattr(out, name) for name in shown]

    with mx.stream(mx.cpu):
        values = [to_mlx(array, dtype) for array in arrays.values()]
        if cotangents is None:
            return dict(zip(shown, map(to_numpy, outputs_of(*values)), strict=True)), {}
        given = [to_mlx(cotangents[name], dtype) for name in shown]
        outputs, gradients = mx.vjp(outputs_of, values, given)
        named = zip(shown, map(to_numpy, outputs), strict=True), zip(names, map(to_numpy, gradients), strict=True)
        return tuple(map(dict, named))


def run_gradients(case, engine, dtype, cotangents):
    """The gradients of the op `lstm_gradients`, `gru_gradients` or `rnn_gradients` by name, after a forward pass."""
    op, arrays, options = split(case)
    saved = {"lstm": ("gates", "c", "h"), "gru": ("gates", "h"), "rnn": ("h",)}[op]
    with mx.stream(mx.cpu):
        given = {"Wx": None} | {name: to_mlx(array, dtype) for name, array in arrays.items()}
        out = getattr(recurrence, op)(**given, **options, engine=engine, return_gates=True)
        given |= {name: value for name, value in options.items() if name not in ("cell_clip", "forget_bias")}
        given |= {name: getattr(out, name) for name in saved}
        given |= {f"d{name}": to_mlx(array, dtype) for name, array in cotangents.items()}
        gradients = getattr(recurrence, f"{op}_gradients")(**given, engine=engine)
        return {name: to_numpy(gradient) for name, gradient in gradients.items()}


def poison_scratch(monkeypatch):
    """Scratch of the numpy engine starts as NaN: it has to be written before it is read."""

    def poisoned(*arguments):
        buffer = numpy_memory.columns_buffer(*arguments)
        buffer.fill(np.nan)
        return buffer

    for module in (numpy_lstm, numpy_gru, numpy_products):
        monkeypatch.setattr(module, "columns_buffer", poisoned)


def elementwise_bounds(case, dtype, cotangents):
    """`bounds` of each element by itself: what is small beside others must have right digits too.

    An element's moves may cancel in one trial, and no larger neighbour stands in for it: hence more trials.
    """
    exact = joined(evaluate(case, cotangents, Arithmetic(np.float64)))
    moved = {name: np.zeros_like(value) for name, value in exact.items()}
    for trial in range(4 * TRIALS):
        noise = Noise(dtype, seed=trial, systematic=trial % 2 == 1)
        for name, value in joined(evaluate(case, cotangents, noise)).items():
            moved[name] = np.maximum(moved[name], np.abs(value - exact[name]) / noise.gain)
    eps = float_of(dtype).eps
    return {name: SAFETY * moved[name] + eps * np.abs(exact[name]) + noise.underflow for name in exact}


def joined(results):
    """Outputs and gradients in one dict."""
    return results[0] | results[1]
