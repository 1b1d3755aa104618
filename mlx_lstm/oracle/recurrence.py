"""The ops of `mlx_lstm.recurrence` in NumPy float64. The code is slow and simple, and shares no code with the engines.

It uses four modules: `case` defines the arguments, `cells` one time step of each cell, `pointwise` one time step of a
cell that the user wrote, and `arithmetic` the rounded operations: `fl(value)` rounds the result of one operation to a
dtype. T: time steps, B: sequences, I: input features, H: units, P: the width of h, G: gates, D: directions.

A case is a dict of an op's arguments, arrays and options. `sides(case)` divides it into directions, and `complete`
fills in the defaults. The result p is one direction, with all arguments and sizes as attributes. s is a `Step`: the
values of one time step. The tape, a dict {t: Step}, stores them for the gradient. p.alive[t] [B, 1]: which sequences
have not ended before step t; p.active[t]: which of these run step t, because they are not held. keep: a factor on the
states before a step; hold: the steps that leave the states unchanged. A cotangent is an output's incoming gradient.
"""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .arithmetic import Array, Rounding, Tensors
from .case import Call, Cotangents, OneDirection, Step, complete, half, join_sides, sides
from .cells import block, gru_step, gru_step_back, lstm_step, lstm_step_back, rnn_step, rnn_step_back
from .pointwise import graph_step, graph_step_back, jumps

STEPS = {
    "lstm": (lstm_step, lstm_step_back),
    "gru": (gru_step, gru_step_back),
    "rnn": (rnn_step, rnn_step_back),
    "pointwise": (graph_step, graph_step_back),
}
"""The functions that run one time step of each op, forward and backward."""


def forward(*, dtype: DTypeLike = np.float64, frozen_clip: Tensors | None = None, **case: Any) -> Tensors:
    """Return the outputs of the op: h [T,B,DP], gates [T,B,DGH], hT [B,DP], and for an LSTM c and cT. D is the
    number of directions, P the width of h, G the number of gates. Every operation is rounded to `dtype`.

    The arrays "c" [T,B,DH] and "h" [T,B,DP] of `frozen_clip` are added to c and h in place of clipping. Tests by finite
    differences need them if gradients pass through the clips, because the gradient then treats clipping as the addition
    of a constant. So they compute these constants once by `clip_shift`, and add the same constants at all points.
    """
    fl = Rounding(dtype)
    return fl.store(evaluate(case, cotangents=None, fl=fl, frozen_clip=frozen_clip)[0])


def backward(case: Call, cotangents: Cotangents, *, dtype: DTypeLike = np.float64) -> Tensors:
    """Return the gradients of the arrays in `case`, by argument name, each in its argument's shape.

    `cotangents` has the cotangents by output name, each in the shape of the output; an absent cotangent is zero.
    """
    fl = Rounding(dtype)
    return fl.store(evaluate(case, cotangents, fl)[1])


def evaluate(
    case: Call, cotangents: Cotangents | None, fl: Rounding, frozen_clip: Tensors | None = None
) -> tuple[Tensors, Tensors]:
    """Run a case (a dict of an op's arguments) in the arithmetic `fl`. Return (outputs, gradients) as float64 arrays;
    without cotangents there are no gradients. frozen_clip: as in `forward`."""
    results = []  # (outputs, gradients) of each direction
    for d, side in enumerate(sides(case)):
        p = complete(side, fl)
        # `half` returns direction d's part of an array that has both directions side by side.
        p.frozen_clip = frozen_clip and {name: half(case, shift, d) for name, shift in frozen_clip.items()}
        outputs, tape = unroll(p, fl)
        gradients = {}
        if cotangents is not None:
            here = {name: half(case, value, d) for name, value in cotangents.items() if value is not None}
            gradients = unroll_back(p, tape, here, fl)
        results.append((outputs, gradients))
    return results[0] if len(results) == 1 else join_sides(case, results, fl)


def clip_shift(**case: Any) -> Tensors:
    """Return what clipping added to "c" [T,B,DH] and "h" [T,B,DP] at each step, for `frozen_clip` of `forward`."""
    fl, shifts = Rounding(np.float64), []
    # unroll(...)[1]: {t: the values of time step t}, among them `clip_shift`, what clipping added at this step.
    for p in (complete(side, fl) for side in sides(case)):
        shift = {"c": np.zeros((p.T, p.B, p.H)), "h": np.zeros((p.T, p.B, p.P))}
        for t, s in unroll(p, fl)[1].items():
            for name, change in s.clip_shift.items():
                shift[name][t] = np.where(p.active[t], change, 0.0)
        shifts.append(shift)
    return {name: np.concatenate([shift[name] for shift in shifts], axis=-1) for name in ("c", "h")}


def activation_arguments(*, fl: Rounding | None = None, **case: Any) -> list[tuple[str, Array]]:
    """Return a list of (activation's name, its arguments), one entry for each activation at each time step. A clip that
    stops gradients counts as an activation "clip", with its argument divided by the limit. Sequences that are held at
    the step or have ended are left out."""
    fl, seen = fl or Rounding(np.float64), []
    for p in (complete(side, fl) for side in sides(case)):
        for t, s in unroll(p, fl)[1].items():
            # s.a: the arguments of the activations by gate, and by "output", "clip_c", "clip_h". p.act: the
            # activations' names by the same keys. p.active[t][:, 0]: which sequences run step t.
            seen += [(p.act[k], a[p.active[t][:, 0]]) for k, a in s.a.items()]
    return seen


KINKS = {"relu": (0.0,), "hard_sigmoid": (-2.5, 2.5), "hard_sigmoid_sixth": (-3.0, 3.0), "clip": (-1.0, 1.0)}
"""{activation: the arguments at which its slope jumps}. "clip" is a clip that stops gradients; its argument is divided
by the limit."""


def kink_distance(**case: Any) -> float:
    """Return how near an argument of relu, a hard sigmoid or a clip that stops gradients comes to a kink, where
    rounding can make a gradient jump. In a cell that the user wrote, return how near it comes to any jump (`jumps`).

    Arguments that are exactly 0 are left out: another activation, such as relu, has returned 0 for them, which rounding
    does not change.
    """
    if "graph" in case:
        p = complete(case, Rounding(np.float64))
        tape = unroll(p, Rounding(np.float64))[1]
        # A distance may be NaN, for example at padded steps. Because inf comes first, `min` ignores NaN.
        return float(min([np.inf, *(distance.min() for s in tape.values() for distance in jumps(p, s))]))
    distances = (
        np.abs(argument[argument != 0] - kink).min(initial=np.inf)
        for name, argument in activation_arguments(**case)
        for kink in KINKS.get(name, ())
    )
    return float(min(distances, default=np.inf))


def unroll(p: OneDirection, fl: Rounding) -> tuple[Tensors, dict[int, Step]]:
    """Run one direction of a case over time. Return (outputs, tape). The tape is a dict from t to the values of time
    step t. fl: how results are rounded."""
    step = STEPS[p.op][0]
    widths = {"h": p.P, "c": p.c0.shape[1], "gates": len(p.gate_order) * p.H}
    outputs = {name: np.zeros((p.T, p.B, width)) for name, width in widths.items()}
    tape = {}
    h, c = p.h0, p.c0
    for t in p.times:
        fl.start_step()
        # alive: which sequences have not ended. on: which of these are not held at step t.
        on, alive = p.active[t], p.alive[t]
        # last: the states before they are multiplied by `keep`; the gradient of `keep` reads them.
        x, mask, last = or_zero(on, p.x[t]), None if p.mask is None else or_zero(on, p.mask[t]), (h, c)
        h, c = times_keep(p, t, h, fl), times_keep(p, t, c, fl)
        h_in = h if mask is None else fl(mask * h)
        # s: the results of the step, to which its inputs are added, because the gradient reads both.
        s = step(p, t, x, h_in, h, c, fl)
        s = Step(**vars(s), x=x, mask=mask, last=last, h_in=h_in, h_prev=h, c_prev=c)
        h, c = np.where(on, s.h, h), np.where(on, s.c, c)
        outputs["h"][t], outputs["c"][t] = or_zero(alive, h), or_zero(alive, c)
        outputs["gates"][t] = or_zero(on, s.gates)
        tape[t] = s
    outputs |= {"hT": h, "cT": c}
    return {name: outputs[name] for name in p.outputs}, tape


def or_zero(on: Array, value: Array) -> Array:
    """Return `value` where `on` is true, else 0, also where the value is NaN."""
    return np.where(on, value, 0.0)


def times_keep(p: OneDirection, t: int, value: Array, fl: Rounding) -> Array:
    """Return a state, or its gradient, times the factor `keep` of step t; unchanged for sequences that have ended."""
    return value if p.keep is None else np.where(p.alive[t], fl(p.keep[t] * value), value)


def unroll_back(p: OneDirection, tape: dict[int, Step], cotangents: Tensors, fl: Rounding) -> Tensors:
    """Run backpropagation through time over the tape (the values of each time step). Return by name the gradients of
    the arrays that the caller passed. dh, dc: the gradients of h and c that come from later steps. dh_t, dc_t: dh and
    dc plus the cotangents of the outputs of step t."""
    step_back = STEPS[p.op][1]  # the function that computes the gradients of one step
    cot = {name: fl.load(value) for name, value in cotangents.items()}
    dh = cot.get("hT", np.zeros((p.B, p.P)))
    dc = cot.get("cT", np.zeros(p.c0.shape))
    rows = []
    for t in reversed(p.times):
        fl.start_step()
        on, alive, s = p.active[t], p.alive[t], tape[t]
        dh_t, dc_t = (or_zero(alive, cot[k][t]) if k in cot else 0.0 for k in ("h", "c"))
        dgates = or_zero(on, cot["gates"][t]) if "gates" in cot else 0.0
        dgates = np.broadcast_to(dgates, (p.B, len(p.gate_order) * p.H))
        dh_t, dc_t = fl(dh + dh_t), fl(dc + dc_t)
        # dh_prev: the gradient of h before the step. One part comes through the product and the mask (a user's cell may
        # have no product), another part directly (in a GRU or a user's cell). For items that do not run this step the
        # gradients stay unchanged. Last they are multiplied by `keep`.
        back = step_back(p, s, dh_t, dc_t, dgates, fl)
        dh_prev = back.dh_in if s.mask is None else fl(back.dh_in * s.mask)
        if back.dh_direct is not None:
            dh_prev = back.dh_direct if dh_prev is None else fl(dh_prev + back.dh_direct)
        dh_prev, dc_prev = np.where(on, dh_prev, dh_t), np.where(on, back.dc_prev, dc_t)
        dh, dc = times_keep(p, t, dh_prev, fl), times_keep(p, t, dc_prev, fl)
        da = back.to_sum["da"]  # the gradient of the preactivations
        # row: the gradients of this step, and the arrays with which they are multiplied for the gradients of weights.
        row = back.to_sum | {"dx": da if p.Wx is None else fl.dot(da, p.Wx)}
        row |= {"x": s.x, "h_in": s.h_in} | ({} if s.mask is None else {"dmask": fl(back.dh_in * s.h_prev)})
        row = {name: or_zero(on, value) for name, value in row.items()}
        if p.keep is not None:  # its gradient is a sum, because one factor multiplies all numbers of h and c of an item
            terms = np.concatenate([fl(dh_prev * s.last[0]), fl(dc_prev * s.last[1])], axis=1)
            row["dkeep"] = or_zero(alive, fl.total(terms, (1,)))
        rows.append((t, row))
    return {name: value for name, value in collect(p, rows, dh, dc, fl).items() if name in p.given}


def collect(p: OneDirection, rows: list[tuple[int, Tensors]], dh0: Array, dc0: Array, fl: Rounding) -> Tensors:
    """Return the gradients of all arguments: sums over the time steps. rows: for each time step a pair (t, arrays [B,
    ...] of this step by name): da (the gradient of the preactivations), drecurrent (of the recurrent product), dx (of
    the input) and so on. dh0, dc0: the gradients of the first states. `entered`: what the candidate's rows of a GRU's
    Wh multiply, h_in or r h_in; all other rows multiply h_in."""

    # Return the entry `name` of all rows as one array [T, B, width].
    def sequence(name: str, width: int) -> Array:
        out = np.zeros((p.T, p.B, width))
        for t, row in rows:
            out[t] = row[name]
        return out

    def sum_of_outer_products(left: Array, right: Array) -> Array:  # sum over t and b of left^T right
        return fl.dot(left.reshape(p.T * p.B, left.shape[-1]).T, right.reshape(p.T * p.B, right.shape[-1]))

    def summed(name: str, width: int) -> Array:  # sum over t and b; fl.total keeps these axes, with size 1
        return fl.total(sequence(name, width), (0, 1))[0, 0]

    I, GH = p.x.shape[-1], len(p.gate_order) * p.H
    da, drecurrent, h_in = sequence("da", GH), sequence("drecurrent", GH), sequence("h_in", p.P)
    entered = {k: sequence("entered", p.P) if k == "n" else h_in for k in p.gate_order}
    gradients = {
        "x": sequence("dx", I),
        "Wx": sum_of_outer_products(da, sequence("x", I)),
        "Wh": np.concatenate([sum_of_outer_products(block(p, drecurrent, k), entered[k]) for k in p.gate_order]),
        "b": summed("da", GH),
        "h0": dh0,
        "c0": dc0,
    }
    if p.mask is not None:
        gradients["mask"] = unbroadcast(sequence("dmask", p.P), p.mask_shape, fl)
    if p.keep is not None:
        gradients["keep"] = sequence("dkeep", 1).reshape(p.keep_shape)
    for name in ("peephole", "bhn", "norm_scale", "norm_shift", "norm_c_scale", "norm_c_shift", "params"):
        if name in p.given:
            gradients[name] = summed(f"d{name}", len(getattr(p, name)))
    if p.inputs is not None:
        gradients["inputs"] = sequence("dinputs", p.inputs.shape[-1])
    if p.Wp is not None:
        gradients["Wp"] = sum_of_outer_products(sequence("dh", p.P), sequence("m", p.H))
    return gradients


def unbroadcast(gradient: Array, shape: tuple[int, ...], fl: Rounding) -> Array:
    """Return the gradient of an array of this `shape` that was broadcast to the three axes of `gradient`: the sum over
    the axes along which it was repeated."""
    aligned = (1,) * (3 - len(shape)) + tuple(shape)
    repeated = tuple(axis for axis in range(3) if aligned[axis] != gradient.shape[axis])
    return (fl.total(gradient, repeated) if repeated else gradient).reshape(shape)
