"""The judge: the ops of `mlx_lstm.recurrence` in NumPy float64, slow and obvious, with no code of the library.

A *case* is a dict with the argument names of the op and `op`, "lstm" (the default), "gru" or "rnn"; an absent argument
is a missing key or None. `oracle.cells` has the cells and the arithmetic `fl`.

T time, B batch, I input, H hidden, P width of h (H without projection), G gates, D directions; GH axes in `gate_order`.
"""

from types import SimpleNamespace

import numpy as np

from .arithmetic import Arithmetic
from .cells import STEPS, block

ARRAYS = ("x", "Wx", "Wh", "b", "h0", "c0", "peephole", "mask", "Wp", "bhn")
OUTPUTS = {"lstm": ("h", "c", "gates", "hT", "cT"), "gru": ("h", "gates", "hT"), "rnn": ("h", "gates", "hT")}
TAKEN = {  # the arrays each op has
    "lstm": ("x", "Wx", "Wh", "b", "h0", "c0", "peephole", "mask", "Wp"),
    "gru": ("x", "Wx", "Wh", "b", "h0", "mask", "bhn"),
    "rnn": ("x", "Wx", "Wh", "b", "h0", "mask"),
}
OPTIONS = {
    "lstm": {
        "gate_order": "ifgo",
        "activations": ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"),
        "output_peephole": "current",
        "cell_clip": None,
        "forget_bias": 0.0,
    },
    "gru": {
        "gate_order": "rzn",
        "activations": ("sigmoid", "sigmoid", "tanh"),
        "reset": "after",
        "flip_z": False,
    },
    "rnn": {"activation": "tanh"},
}
COMMON = {"reverse": False, "bidirectional": False, "lengths": None, "engine": None}  # an engine is ignored


def forward(*, dtype=np.float64, frozen_clip=None, **case):
    """Outputs of the op with every operation in `dtype`: h [T,B,DP], gates [T,B,DGH], hT [B,DP]; c, cT of an LSTM.

    `frozen_clip` [T,B,DH] replaces clipping by adding this constant: the straight-through gradient is the exact one of
    c + const, so finite differences must freeze the constant at the base point (`clip_shift`).
    """
    fl = Arithmetic(dtype)
    return fl.store(evaluate(case, None, fl, frozen_clip)[0])


def backward(case, cotangents, *, dtype=np.float64):
    """Gradients for the arrays present in `case`, keyed by argument name, each in its argument's shape.

    `cotangents` is keyed by output name, shaped as that output; an absent one is zero.
    """
    fl = Arithmetic(dtype)
    return fl.store(evaluate(case, cotangents, fl)[1])


def evaluate(case, cotangents, fl, frozen_clip=None):
    """(outputs, gradients) in the arithmetic `fl`, as float64 arrays; no gradients if cotangents is None."""
    found = []
    for d, side in enumerate(sides(case)):
        p = complete(side, fl)
        outputs, tape = unroll(p, fl, frozen_clip if frozen_clip is None else half(case, frozen_clip, d))
        gradients = {}
        if cotangents is not None:
            here = {name: half(case, value, d) for name, value in cotangents.items() if value is not None}
            gradients = unroll_back(p, tape, here, fl)
        found.append((outputs, gradients))
    return found[0] if len(found) == 1 else join_sides(case, found, fl)


def clip_shift(**case):
    """[T,B,DH]: what clipping added to c at each step (0 where it did not act)."""
    fl, shifts = Arithmetic(np.float64), []
    for p in (complete(side, fl) for side in sides(case)):
        shift = np.zeros((p.T, p.B, p.H))
        for t, s in unroll(p, fl)[1].items():
            shift[t] = np.where(p.active[t], s.clip_shift, 0.0)
        shifts.append(shift)
    return np.concatenate(shifts, axis=-1)


def activation_arguments(**case):
    """(name of an activation, an array of what it was applied to), over steps and activations; no ended item."""
    fl, seen = Arithmetic(np.float64), []
    for p in (complete(side, fl) for side in sides(case)):
        for t, s in unroll(p, fl)[1].items():
            seen += [(p.act[k], a[p.active[t][:, 0]]) for k, a in s.a.items()]
    return seen


# --- Two directions: the forward one first, then the reverse one -----------------------------------------------------


def sides(case):
    """The case of each direction that runs."""
    if not case.get("bidirectional"):
        return [case]
    return [side_of(case, d) for d in range(2)]


def side_of(case, d):
    """Direction d's part of a bidirectional case.

    x is shared, or [T,B,2GH] once projected; Wx [2GH,I], b [2GH], bhn [2H] hold the directions one after the other;
    Wh [2,GH,P], Wp [2,P,H], peephole [2,4H] on an axis of their own; h0, c0 and a mask that is not shared side by side.
    """
    side = case | {"bidirectional": False, "reverse": d == 1}
    for name in (n for n in ARRAYS if case.get(n) is not None):
        array = np.asarray(case[name])
        if name in ("Wh", "Wp", "peephole"):
            side[name] = array[d]
        elif name in ("Wx", "b", "bhn"):
            side[name] = np.split(array, 2)[d]
        elif not is_shared(case, name):
            side[name] = np.split(array, 2, axis=-1)[d]
    return side


def is_shared(case, name):
    """Whether both directions see the whole of an array: x unless projected, a mask of width 1."""
    if name == "mask":
        return np.ndim(case["mask"]) == 0 or np.shape(case["mask"])[-1] == 1
    return name == "x" and case.get("Wx") is not None


def half(case, array, d):
    """Direction d's half of an output or what belongs to one; all of it if there is one direction."""
    return np.split(np.asarray(array), 2, axis=-1)[d] if case.get("bidirectional") else array


def join_sides(case, found, fl):
    """The outputs side by side, the gradients laid out as the arrays; of a shared array, their sum."""
    (outputs, gradients), (outputs_reverse, gradients_reverse) = found
    outputs = {name: np.concatenate([value, outputs_reverse[name]], axis=-1) for name, value in outputs.items()}
    joined = {}
    for name, value in gradients.items():
        pair = [value, gradients_reverse[name]]
        if is_shared(case, name):
            joined[name] = fl(pair[0] + pair[1])
        elif name in ("Wh", "Wp", "peephole"):
            joined[name] = np.stack(pair)
        else:
            joined[name] = np.concatenate(pair, axis=0 if name in ("Wx", "b", "bhn") else -1)
    return outputs, joined


# --- One direction ---------------------------------------------------------------------------------------------------


def complete(case, fl):
    """The case with sizes and defaults filled in: absent states are 0, an absent mask is 1, absent lengths are T."""
    op = case.get("op", "lstm")
    options = OPTIONS[op] | COMMON
    unknown = set(case) - set(TAKEN[op]) - set(options) - {"op"}
    if unknown:
        raise TypeError(f"[oracle] unknown arguments {sorted(unknown)} of {op}")
    p = SimpleNamespace(**dict.fromkeys(ARRAYS), **options, op=op)
    for name, value in case.items():
        if value is not None:
            setattr(p, name, fl.load(value) if name in ARRAYS else value)
    p.given = [name for name in ARRAYS if case.get(name) is not None]
    if op == "rnn":
        p.gate_order, p.act = "h", {"h": p.activation}
    else:
        names = (*"ifgo", "output") if op == "lstm" else "rzn"
        p.act = dict(zip(names, p.activations, strict=True))
    p.T, p.B = p.x.shape[:2]
    p.H, p.P = p.Wh.shape[0] // len(p.gate_order), p.Wh.shape[1]
    p.h0 = np.zeros((p.B, p.P)) if p.h0 is None else p.h0
    p.c0 = np.zeros((p.B, p.H)) if p.c0 is None else p.c0  # carried along unused where there is no c
    p.mask_shape = np.shape(p.mask)
    p.mask = np.broadcast_to(1.0 if p.mask is None else p.mask, (p.T, p.B, p.P))
    lengths = np.full(p.B, p.T) if p.lengths is None else np.asarray(p.lengths)
    p.active = [(t < lengths)[:, None] for t in range(p.T)]  # T of [B,1]
    p.times = list(range(p.T))[:: -1 if p.reverse else 1]
    return p


def unroll(p, fl, frozen_clip=None):
    """Run the recurrence; returns the outputs and the tape, a dict from t to what the step saw and made there."""
    step = STEPS[p.op][0]
    widths = {"h": p.P, "c": p.H, "gates": len(p.gate_order) * p.H}
    outputs = {name: np.zeros((p.T, p.B, width)) for name, width in widths.items()}
    tape = {}
    h, c = p.h0, p.c0
    for t in p.times:
        fl.start_step()
        on = p.active[t]
        x, mask = padded(on, p.x[t]), padded(on, p.mask[t])
        h_in = fl(mask * h)
        s = step(p, x, h_in, h, c, fl, None if frozen_clip is None else frozen_clip[t])
        s = SimpleNamespace(**vars(s), x=x, mask=mask, h_in=h_in, h_prev=h, c_prev=c)
        for name in outputs:
            outputs[name][t] = padded(on, getattr(s, name))
        h, c = np.where(on, s.h, h), np.where(on, s.c, c)
        tape[t] = s
    outputs |= {"hT": h, "cT": c}
    return {name: outputs[name] for name in OUTPUTS[p.op]}, tape


def padded(on, value):
    """`value` where the item is still running, 0 where it has ended: whatever lies in the padding is never read."""
    return np.where(on, value, 0.0)


def unroll_back(p, tape, cotangents, fl):
    """Backpropagation through time over the tape; returns the gradients of the given arrays."""
    step_back = STEPS[p.op][1]
    cot = {name: fl.load(value) for name, value in cotangents.items()}
    dh = cot.get("hT", np.zeros((p.B, p.P)))
    dc = cot.get("cT", np.zeros((p.B, p.H)))
    rows = []
    for t in reversed(p.times):
        fl.start_step()
        on, s = p.active[t], tape[t]
        dh_t, dc_t, dgates = (padded(on, cot[k][t]) if k in cot else 0.0 for k in ("h", "c", "gates"))
        dgates = np.broadcast_to(dgates, (p.B, len(p.gate_order) * p.H))
        dh_t = fl(dh + dh_t)
        back = step_back(p, s, dh_t, fl(dc + dc_t), dgates, fl)
        dh_prev = fl(back.dh_in * s.mask)
        dh_prev = dh_prev if back.dh_direct is None else fl(dh_prev + back.dh_direct)
        dh, dc = np.where(on, dh_prev, dh), np.where(on, back.dc_prev, dc)
        da = back.to_sum["da"]
        row = back.to_sum | {"dx": da if p.Wx is None else fl.dot(da, p.Wx)}
        row |= {"dmask": fl(back.dh_in * s.h_prev), "dh": dh_t, "x": s.x, "h_in": s.h_in}
        rows.append((t, {name: padded(on, value) for name, value in row.items()}))
    return {name: value for name, value in collect(p, rows, dh, dc, fl).items() if name in p.given}


def collect(p, rows, dh0, dc0, fl):
    """Gradients of all arguments from the rows (t, named [B, ...] arrays) of every step."""

    def sequence(name, width):
        out = np.zeros((p.T, p.B, width))
        for t, row in rows:
            out[t] = row[name]
        return out

    def sum_of_outer_products(left, right):  # sum over t and b of left^T right
        return fl.dot(left.reshape(p.T * p.B, left.shape[-1]).T, right.reshape(p.T * p.B, right.shape[-1]))

    def summed(name, width):  # sum over t and b
        return fl.total(sequence(name, width), (0, 1))[0, 0]

    I, GH = p.x.shape[-1], len(p.gate_order) * p.H
    da, drecurrent, h_in = sequence("da", GH), sequence("drecurrent", GH), sequence("h_in", p.P)
    entered = {k: sequence("entered", p.P) if k == "n" else h_in for k in p.gate_order}
    found = {
        "x": sequence("dx", I),
        "Wx": sum_of_outer_products(da, sequence("x", I)),
        "Wh": np.concatenate([sum_of_outer_products(block(p, drecurrent, k), entered[k]) for k in p.gate_order]),
        "b": summed("da", GH),
        "h0": dh0,
        "c0": dc0,
        "mask": unbroadcast(sequence("dmask", p.P), p.mask_shape, fl),
    }
    if p.peephole is not None:
        found["peephole"] = summed("dpeephole", GH)
    if p.bhn is not None:
        found["bhn"] = summed("dbhn", p.H)
    if p.Wp is not None:
        found["Wp"] = sum_of_outer_products(sequence("dh", p.P), sequence("m", p.H))
    return found


def unbroadcast(gradient, shape, fl):
    """Sum a [T,B,P] gradient over the axes along which an array of `shape` was repeated."""
    aligned = (1,) * (3 - len(shape)) + tuple(shape)
    repeated = tuple(axis for axis in range(3) if aligned[axis] != gradient.shape[axis])
    return (fl.total(gradient, repeated) if repeated else gradient).reshape(shape)
