"""Prepare the arguments of the float64 oracle. A *case* is a dict with the argument names of the op `lstm`, `gru` or
`rnn` as keys. Its key `op` names the op (default: "lstm"); "pointwise" is a cell that the user wrote, which has one
direction. An absent argument is a missing key or None. This module splits a case into its directions and fills in the
defaults; `recurrence` then runs each direction.

Letters in shapes: T time, B batch, I input, H hidden, P width of h (H without projection), G gates, D directions. An
axis GH holds the gates in the order `gate_order`. OPTIONS and COMMON: the options of each op and of all ops, with their
defaults.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from .arithmetic import Array, Rounding, Tensors

Call = Mapping[str, Any]
Cotangents = Mapping[str, Array | None]
OneDirection = SimpleNamespace  # one direction of a case, with all arguments, sizes and defaults as attributes
Step = SimpleNamespace  # the inputs and results of one time step

ARRAYS = ("x", "Wx", "Wh", "b", "h0", "c0", "peephole", "mask", "keep", "Wp", "bhn")
NORMS = ("norm_scale", "norm_shift", "norm_c_scale", "norm_c_shift")  # scales and shifts of layer normalisation
ARRAYS += NORMS
ARRAYS += ("inputs", "params")  # of a cell that the user wrote: inputs of each step [T,B,U H], parameters [V H]
OWN_AXIS = ("Wh", "Wp", "peephole", *NORMS)  # arrays whose first axis is the direction if there are two
OUTPUTS = {"lstm": ("h", "c", "gates", "hT", "cT"), "gru": ("h", "gates", "hT"), "rnn": ("h", "gates", "hT")}
TAKEN = {  # the names of the arrays that each op takes
    "lstm": ("x", "Wx", "Wh", "b", "h0", "c0", "peephole", "mask", "keep", "Wp", *NORMS),
    "gru": ("x", "Wx", "Wh", "b", "h0", "mask", "keep", "bhn", *NORMS[:2]),
    "rnn": ("x", "Wx", "Wh", "b", "h0", "mask", "keep", *NORMS[:2]),
    "pointwise": ("x", "Wx", "Wh", "b", "h0", "c0", "mask", "keep", "inputs", "params", *NORMS[:2]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "lstm": {
        "gate_order": "ifgo",
        "activations": ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"),
        "output_peephole": "current",
        "cell_clip": None,
        "forget_bias": 0.0,
        "projection_clip": None,
        "clip_gradient": "through",
        "norm": None,  # or a tuple (of, gates, c, eps), as `NormOptions` of the engines
    },
    "gru": {
        "gate_order": "rzn",
        "activations": ("sigmoid", "sigmoid", "tanh"),
        "reset": "after",
        "flip_z": False,
        "norm": None,
    },
    "rnn": {"activation": "tanh", "norm": None},
    "pointwise": {"graph": None, "norm": None},  # graph: a `CellGraph` of the engines, of a cell that the user wrote
}
# engine: the oracle accepts an engine's name but ignores it.
COMMON = {"reverse": False, "bidirectional": False, "lengths": None, "hold": None, "engine": None}


def sides(case: Call) -> list[Call]:
    """Split a case into one case per direction: two if it is bidirectional, else one."""
    return [side_of(case, d) for d in range(2)] if case.get("bidirectional") else [case]


def side_of(case: Call, d: int) -> Call:
    """Return the part of a bidirectional case that belongs to direction d.

    - One half of axis 0 belongs to each direction: Wx [2GH,I], b [2GH], bhn [2H].
    - The first axis has size 2, one entry per direction: Wh [2,GH,P], Wp [2,P,H], peephole [2,4H], norm_scale [2,GH],
      norm_shift [2,GH], norm_c_scale [2,H], norm_c_shift [2,H].
    - One half of the last axis belongs to each direction: h0, c0, an x [T,B,2GH] that is already projected, a mask
      wider than 1, a keep [T,B,2].
    - Both directions share the array: any other x, a mask of width 1, a keep [T,B], hold [T,B].

    G: gates; H: units; P: the width of h; keep: a factor on the states before a step; hold: the steps that leave the
    states unchanged.
    """
    side = {**case, "bidirectional": False, "reverse": d == 1}
    for name in (n for n in ARRAYS if case.get(n) is not None):
        array = np.asarray(case[name])
        if name in OWN_AXIS:
            side[name] = array[d]
        elif name in ("Wx", "b", "bhn"):
            side[name] = np.split(array, 2)[d]
        elif not is_shared(case, name):
            side[name] = np.split(array, 2, axis=-1)[d]
    return side


def is_shared(case: Call, name: str) -> bool:
    """Return whether both directions use the array `name` as a whole. Such arrays are x, if the case has a Wx; a mask
    of width 1; and `keep` (a factor on the states before a step) of shape [T,B]."""
    if name == "keep":
        return np.ndim(case["keep"]) == 2
    if name == "mask":
        return np.ndim(case["mask"]) == 0 or np.shape(case["mask"])[-1] == 1
    return name == "x" and case.get("Wx") is not None


def half(case: Call, array: Array, d: int) -> Array:
    """Return the part of an output, or of an array with the same layout, that belongs to direction d: a half of its
    last axis, or with one direction the whole array."""
    return np.split(np.asarray(array), 2, axis=-1)[d] if case.get("bidirectional") else array


def join_sides(case: Call, results: list[tuple[Tensors, Tensors]], fl: Rounding) -> tuple[Tensors, Tensors]:
    """Join the (outputs, gradients) of both directions. Outputs are joined along the last axis; each gradient gets
    the layout of its argument. The gradient of an array that both directions share is the sum of both gradients."""
    (outputs, gradients), (outputs_reverse, gradients_reverse) = results
    outputs = {name: np.concatenate([value, outputs_reverse[name]], axis=-1) for name, value in outputs.items()}
    joined = {}
    for name, value in gradients.items():
        pair = [value, gradients_reverse[name]]
        if is_shared(case, name):
            joined[name] = fl(pair[0] + pair[1])
        elif name in OWN_AXIS:
            joined[name] = np.stack(pair)
        else:
            joined[name] = np.concatenate(pair, axis=0 if name in ("Wx", "b", "bhn") else -1)
    return outputs, joined


def complete(case: Call, fl: Rounding) -> OneDirection:
    """Return a case of one direction as an object with all arguments, sizes and defaults as attributes. An absent state
    is 0, absent lengths are T, and an absent mask is 1 (but None for a cell that the user wrote, which may have no Wh).
    Without `hold` no step is held; a held step leaves the states unchanged."""
    op = case.get("op", "lstm")
    options = OPTIONS[op] | COMMON
    unknown = set(case) - set(TAKEN[op]) - set(options) - {"op"}
    if unknown:
        raise TypeError(f"[oracle] unknown arguments {sorted(unknown)} of {op}")
    p = OneDirection(**dict.fromkeys(ARRAYS), **options, op=op, outputs=OUTPUTS.get(op))
    for name, value in case.items():
        if value is not None:
            setattr(p, name, fl.load(value) if name in ARRAYS else value)
    p.given = [name for name in ARRAYS if case.get(name) is not None]
    carried = 1  # how many blocks of H numbers c has
    if op == "pointwise":
        p.gate_order, p.act, carried = range(p.graph.gates), {}, p.graph.states - 1
        p.outputs = ("h", "c", "hT", "cT") if carried else ("h", "hT")
    elif op == "rnn":
        p.gate_order, p.act = "h", {"h": p.activation}
    else:
        names = (*"ifgo", "output") if op == "lstm" else "rzn"
        p.act = dict(zip(names, p.activations, strict=True))
        # `kink_distance` treats a clip as an activation, because a clip, too, has kinks, where its slope jumps.
        p.act |= {"clip_c": "clip", "clip_h": "clip"} if op == "lstm" else {}
    p.T, p.B = p.x.shape[:2]
    # A cell that the user wrote may have no Wh; it always has h0.
    p.P = p.h0.shape[1] if p.Wh is None else p.Wh.shape[1]
    p.H = p.P if p.Wh is None else p.Wh.shape[0] // len(p.gate_order)
    p.h0 = np.zeros((p.B, p.P)) if p.h0 is None else p.h0
    p.c0 = np.zeros((p.B, carried * p.H)) if p.c0 is None else p.c0  # cells without c have a c0 of zeros, too
    p.mask_shape = np.shape(p.mask)
    if p.mask is not None or op != "pointwise":
        p.mask = np.broadcast_to(1.0 if p.mask is None else p.mask, (p.T, p.B, p.P))
    p.frozen_clip = None  # or the arrays that are added to c and h in place of clipping them; `evaluate` sets it
    p.keep_shape = np.shape(p.keep)
    p.keep = None if p.keep is None else p.keep.reshape(p.T, p.B, 1)
    lengths = np.full(p.B, p.T) if p.lengths is None else np.asarray(p.lengths)
    hold = np.zeros((p.T, p.B)) if p.hold is None else np.asarray(p.hold)
    p.alive = [(t < lengths)[:, None] for t in range(p.T)]  # for each t [B,1]: whether the sequence has not ended
    # For each t [B,1]: whether the sequence has not ended and is not held.
    p.active = [alive & (hold[t] == 0)[:, None] for t, alive in enumerate(p.alive)]
    p.norm_of, p.norm_gates, p.norm_c, p.norm_eps = p.norm or (None, "together", None, 0.0)
    p.times = list(range(p.T))[:: -1 if p.reverse else 1]
    return p
