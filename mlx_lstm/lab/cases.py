"""Draw random calls of the ops `lstm`, `gru`, `rnn`, which are called cases, and run them on an engine.

A case is a dict with the keyword arguments of a call, where arrays are NumPy arrays, and with `op`, the op's name
(without it: `lstm`). An object `Case` holds such a dict, a dtype, the cotangents of the outputs, and quantized weights.
Its properties `arrays` and `options` are the two parts of the dict; names(training) returns the names of its results.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .. import recurrence
from ..engines import choice
from ..engines.cells import Cell, NormOptions
from ..oracle import OUTPUTS, forward, kink_distance
from ..oracle.arithmetic import Tensors
from ..oracle.case import NORMS
from ..oracle.judge import Case
from ..oracle.recurrence import KINKS

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

SIZES = T, B, I, H, P = 4, 2, 3, 2, 3  # P: the size of h with a projection
MASKS = [(T, B, "P"), (B, "P"), (1, "P"), ("P",), (T, 1, 1), (1,), ()]
"""Shapes of masks for the argument `mask` of `draw`. "P" stands for the size of h."""
HOLD = [[0, 1], [1, 0], [0, 1], [1, 1]]
"""A value of an op's argument `hold` [T, B]. Where it is 1, the step is skipped: the states do not change."""
ACTIVATIONS = ("identity", "relu", "tanh", "sigmoid", "hard_sigmoid", "hard_sigmoid_sixth")
KINK_MARGIN = 1e-2
"""The smallest allowed distance of a preactivation from a kink of its activation, where the slope jumps. It is a
thousand times the step of the tests' finite differences, so that they do not cross the kink."""
ROUNDING_MARGIN = 1e-4
"""The smallest allowed distance of a preactivation from a kink of its activation, where the slope jumps, in tests
without finite differences. There only float32 rounding moves the preactivations."""

# Each of the following tables maps the name of a test case to options: arguments of `draw`, without sizes and dtype.
# Arrays and shapes in the options are for a batch of 2; `at_batch` converts them to other batch sizes.
OPTIONS: dict[str, dict[str, Any]] = {
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
    "cell_clip_zero": {"cell_clip": 0.4, "clip_gradient": "zero"},
    "cell_clip_zero_peephole": {"cell_clip": 0.4, "clip_gradient": "zero", "peephole": True, "keep": True},
    "projection_clip": {"projection": True, "projection_clip": 0.2},
    "both_clips_zero": {"projection": True, "projection_clip": 0.2, "cell_clip": 0.4, "clip_gradient": "zero"},
    "forget_bias": {"forget_bias": 1.0},
    "reverse": {"reverse": True},
    "lengths": {"lengths": [3, 0]},
    "lengths_reverse": {"lengths": [2, 4], "reverse": True},
    "keep": {"keep": True},
    "keep_reverse": {"keep": True, "mask": (T, 1, "P"), "lengths": [2, 4], "peephole": True, "reverse": True},
    "hold": {"hold": HOLD, "keep": True, "lengths": [4, 3]},
    "projection": {"projection": True},
    "gate_order": {"gate_order": "ogfi", "peephole": True},
    **{f"{name}_gates": {"activations": (name,) * 4 + ("tanh",)} for name in ACTIVATIONS},
    **{f"{name}_output": {"activations": ("sigmoid", "sigmoid", "tanh", "sigmoid", name)} for name in ACTIVATIONS},
}

# Layer normalisation, alone and with options that change what is normalised or where the result is used.
NORMED: dict[str, dict[str, Any]] = {
    "norm": {"norm": NormOptions("product")},
    "norm_each_state": {"norm": NormOptions("product", "each", "state"), "keep": True, "lengths": [3, 4]},
    "norm_sum": {"norm": NormOptions("sum", c="output"), "peephole": True, "cell_clip": 0.4, "clip_gradient": "zero"},
    "norm_sum_each": {"norm": NormOptions("sum", "each", None, 1e-3), "forget_bias": 1.0, "gate_order": "ogfi"},
    "norm_c": {"norm": NormOptions(None, c="state"), "peephole": True, "output_peephole": "previous", "hold": HOLD},
    "norm_projection": {"norm": NormOptions("sum", c="output"), "projection": True, "projection_clip": 0.2},
}
OPTIONS |= NORMED

COMMON = {name: OPTIONS[name] for name in ("plain", "projected_x", "no_bias", "no_h0", "reverse", "keep", "hold")}
COMMON |= {name: OPTIONS[name] for name in OPTIONS if name.startswith(("mask", "lengths"))}

GRU = {
    **COMMON,
    "no_bhn": {"bhn": None},
    "before": {"reset": "before"},
    "before_mask": {"reset": "before", "mask": (T, B, "P")},
    "before_lengths_reverse": {"reset": "before", "lengths": [2, 4], "reverse": True},
    "before_keep": {"reset": "before", "keep": True},
    "flip_z": {"flip_z": True},
    "before_flip_z": {"reset": "before", "flip_z": True},
    "zrn": {"gate_order": "zrn"},
    "before_nrz": {"reset": "before", "gate_order": "nrz"},
    **{f"{name}_gates": {"activations": (name, name, "tanh")} for name in ACTIVATIONS},
    **{f"{name}_candidate": {"activations": ("sigmoid", "sigmoid", name)} for name in ACTIVATIONS},
    "before_hard": {"reset": "before", "activations": ("hard_sigmoid", "hard_sigmoid", "relu")},
    "norm": NORMED["norm"],
    "norm_each": {"norm": NormOptions("product", "each"), "mask": (T, B, "P"), "flip_z": True, "gate_order": "zrn"},
}
RNN = {**COMMON, **{name: {"activation": name} for name in ACTIVATIONS}, "norm": NORMED["norm"]}
RNN["norm_sum_each"] = {"norm": NormOptions("sum", "each"), "keep": True, "lengths": [2, 4], "reverse": True}

both = {"bidirectional": True}
SIDE_BY_SIDE = {name: option | both for name, option in COMMON.items() if "reverse" not in name}
BIDIRECTIONAL = {
    "lstm": {
        **SIDE_BY_SIDE,
        **{name: OPTIONS[name] | both for name in ("no_c0", "peephole_current", "peephole_previous", "gate_order")},
        **{name: OPTIONS[name] | both for name in ("cell_clip_peephole", "forget_bias", "projection")},
        **{name: OPTIONS[name] | both for name in ("cell_clip_zero_peephole", "both_clips_zero")},
        "projection_lengths": {"projection": True, "lengths": [3, 1], "mask": (T, 1, "P"), **both},
        **{name: OPTIONS[name] | both for name in ("relu_output", "norm_each_state", "norm_sum")},
    },
    "gru": {
        **SIDE_BY_SIDE,
        **{name: GRU[name] | both for name in ("no_bhn", "before_mask", "before_flip_z", "zrn", "norm_each")},
    },
    "rnn": {**SIDE_BY_SIDE, "relu": RNN["relu"] | both, "norm": RNN["norm"] | both},
}

CELLS = {f"gru_{name}": {"op": "gru", **option} for name, option in GRU.items()}
CELLS |= {f"rnn_{name}": {"op": "rnn", **option} for name, option in RNN.items()}
"""The options with which tests draw calls of a GRU and a plain RNN, as {name: arguments of `draw`}. `OPTIONS` has the
options for an LSTM."""
BOTH = {
    f"{op}_both_{name}": {"op": op, **option} for op, table in BIDIRECTIONAL.items() for name, option in table.items()
}
"""The options with which tests draw calls of bidirectional layers of all cells, as {name: arguments of `draw`}."""
EVERY_OPTION = OPTIONS | CELLS | BOTH

GATES = {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}  # the gates of each op, a letter for each


def draw(
    rng: np.random.Generator,
    *,
    op: str = "lstm",
    sizes: tuple[int, int, int, int, int] = SIZES,
    projection: bool = False,
    projected_x: bool = False,
    peephole: bool = False,
    mask: tuple[int | str, ...] | None = None,
    keep: bool = False,
    bidirectional: bool = False,
    dtype: DTypeLike = np.float64,
    recurrent: float = 0.7,
    norm: NormOptions | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return a case (a dict of random arrays and options for the op). dtype: a NumPy dtype, or the name of an MLX
    dtype; then the arrays are float32 with values that it can represent. sizes: T time steps, B sequences, I inputs, H
    hidden units, P numbers in a projected h. projection, peephole: whether to add these arrays. projected_x: x is the
    input's part of the preactivations, and there is no Wx. mask: the shape of the mask, a factor on the h that a step
    reads; "P" stands for the size of h (of both directions). keep: whether to add an array `keep` (factors on the
    states), some of whose values are 0 and 1. recurrent: the standard deviation of Wh. norm: the kind of layer
    normalisation, whose arrays are then added. options: other arguments of the op; None, such as b=None, removes an
    array."""
    T, B, I, H, P = sizes
    # D: directions, G: gates. own: the size of the first axis of arrays that have an axis for the direction, else ().
    # P: from here on the numbers in the h of one direction, with or without a projection.
    D, G, own = (2, len(GATES[op]), (2,)) if bidirectional else (1, len(GATES[op]), ())
    P = P if projection else H
    shapes = {"x": (T, B, D * G * H if projected_x else I), "Wh": (*own, G * H, P), "b": (D * G * H,)}
    shapes |= {"h0": (B, D * P)}
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
    if norm is not None:
        names = {"norm": G * H if norm.of else 0, "norm_c": H if norm.c else 0}
        shapes |= {f"{name}_{part}": (*own, n) for name, n in names.items() if n for part in ("scale", "shift")}
        options["norm"] = norm
    if mask is not None:
        shapes["mask"] = tuple(D * P if size == "P" else int(size) for size in mask)
    deviations = dict.fromkeys(shapes, 0.7) | {"Wh": recurrent}
    arrays = {name: rng.normal(0, deviations[name], shape) for name, shape in shapes.items()}
    if keep:
        # A 0 in keep makes the state 0, so that an argument of relu may lie exactly on the kink. Draw no 0 with relu.
        kinked = KINKS.keys() & {*options.get("activations", ()), options.get("activation")}
        factors = [1, *rng.uniform(-1, 1.5, 4), *([] if kinked else [0])]
        arrays["keep"] = rng.choice(factors, (T, B, 2) if bidirectional else (T, B))
    # The defaults are left out: the op `lstm` and one direction.
    options |= ({} if op == "lstm" else {"op": op}) | ({"bidirectional": True} if bidirectional else {})
    return stored(arrays, dtype) | options


def stored(arrays: Tensors, dtype: DTypeLike) -> Tensors:
    """Return the arrays converted to a dtype. If `dtype` is the name of an MLX dtype, the arrays are float32 with
    values that the MLX dtype can represent."""
    if not isinstance(dtype, str):
        return {name: array.astype(dtype) for name, array in arrays.items()}
    return {name: np.array(to_mlx(array, DTYPES[dtype]).astype(mx.float32)) for name, array in arrays.items()}


def draw_cotangents(
    rng: np.random.Generator, outputs: Mapping[str, np.ndarray], dtype: DTypeLike = np.float64
) -> dict[str, np.ndarray]:
    """Return a random cotangent for each output, by name."""
    return stored({name: rng.normal(size=value.shape) for name, value in outputs.items()}, dtype)


def draw_away_from_kinks(
    seed: int, margin: float = KINK_MARGIN, **options: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Draw random pairs (case, cotangents) and return the first one in which no argument of relu, of hard_sigmoid or of
    a clip that stops gradients is closer than `margin` to a kink, across which a rounding error could move it."""
    rng = np.random.default_rng(seed)
    dtype = options.get("dtype", np.float64)
    for _ in range(200):
        case = draw(rng, **options)
        if kink_distance(**case) > margin:
            return case, draw_cotangents(rng, forward(**case), dtype)
    raise RuntimeError(f"no case of {options} keeps off its kinks")


def at_batch(options: Mapping[str, Any], B: int) -> dict[str, Any]:
    """Convert a dict of options for `draw` from a batch of 2 to a batch of B. The values of `lengths` [B] and `hold`
    [T, B] are repeated for further sequences of the batch."""
    changed = dict(options)
    if "lengths" in changed:
        changed["lengths"] = (changed["lengths"] * B)[:B]
    if "mask" in changed:  # in the shapes of `MASKS` only the batch size is 2
        changed["mask"] = tuple(B if size == 2 else size for size in changed["mask"])
    if "hold" in changed:
        changed["hold"] = [(row * B)[:B] for row in changed["hold"]]
    return changed


def to_mlx(array: ArrayLike, dtype: mx.Dtype) -> mx.array:
    """Return a NumPy array as an MLX array of this dtype. Values for a 16-bit dtype are rounded to float32 first."""
    wide = np.asarray(array).astype(np.float64 if dtype == mx.float64 else np.float32)
    return mx.array(wide, mx.float64 if dtype == mx.float64 else mx.float32).astype(dtype)


def as_arguments(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case as the keyword arguments of a public function, with its layer normalisation as an object `Norm`."""
    rest = {name: value for name, value in case.items() if name not in (*NORMS, "norm")}
    if case.get("norm") is not None:
        of_norm = {name: case[name] for name in NORMS if name in case}
        rest["norm"] = recurrence.norm_given(NormOptions(*case["norm"]), of_norm)  # may be a plain tuple
    return rest


def run(case: Case, engine: str, training: bool = True, dtype: mx.Dtype | None = None) -> dict[str, mx.array]:
    """Run a case on an engine. Return its outputs and, with training, its gradients, as lazy arrays by name. Quantized
    weights replace the arrays of the same names and have no gradient. dtype: of the arrays; None: the case's."""
    dtype = dtype or DTYPES[case.dtype]
    arrays = {name: to_mlx(array, dtype) for name, array in case.arrays.items() if name not in case.weights}
    # In a case without Wx the op needs Wx=None. In other cases the array Wx replaces this None.
    options = {"Wx": None, **case.options, **case.weights, **({} if training else {"training": False})}
    wanted = [name for name in case.names(training) if name in OUTPUTS[case.op]]

    def outputs_of(*values: mx.array) -> list[mx.array]:
        arguments = as_arguments(options | dict(zip(arrays, values, strict=True)))
        out = getattr(recurrence, case.op)(**arguments, engine=engine, return_gates="gates" in wanted)
        return [getattr(out, name) for name in wanted]

    if not training or not case.cotangents:
        return dict(zip(wanted, outputs_of(*arrays.values()), strict=True))
    cotangents = [to_mlx(case.cotangents[name], dtype) for name in wanted]
    outputs, gradients = mx.vjp(outputs_of, list(arrays.values()), cotangents)
    return dict(zip(case.names(), [*outputs, *gradients], strict=True))


def hindrance(engine: str, sizes: tuple[int, int, int, int], dtype: mx.Dtype, cell: Cell, **options: Any) -> str:
    """Return why an engine cannot run a recurrence of these sizes (T, B, I, H) on this machine, or "". options:
    arguments of `engines.choose`. By default `device` and `metal` describe this machine (for `numpy` always the CPU),
    and the call is not `traced` (it is outside of transformations such as `mx.compile`)."""
    options = {"device": choice.current_device(), "metal": choice.has_metal(), "traced": False} | options
    options |= {"device": "cpu"} if engine == "numpy" else {}
    try:
        choice.choose(sizes=sizes, dtype=dtype, cell=cell, requested=engine, **options)
    except ValueError as error:  # its text is "[op] engine='fused' cannot run: REASON."
        return str(error).partition("cannot run: ")[2].rstrip(".") or str(error)
    return ""
