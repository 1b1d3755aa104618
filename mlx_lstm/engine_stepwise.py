"""Engine `stepwise`: the recurrence on the GPU, one launch of a Metal shader per time step and sweep.

A launch computes the recurrent product and the cell of a step; a projection is one launch more. The products over all
T * B rows stay MLX's own. h and gates are stored in the dtype of the arrays, c in float32; arithmetic is float32. All
results are lazy, so the engine also runs inside `mx.compile` and exports.
"""

from __future__ import annotations

import mlx.core as mx

from . import kernels_stepwise
from .engine_ops import Arrays, gradients_after_sweep, initial_states, project
from .kernel_inputs import contiguous, step_of, whole_mask
from .problem import Problem


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """h [T, B, P], c [T, B, H] float32, gates [T, B, 4H], hT [B, P], cT [B, H] float32."""
    z, Wp = contiguous(project(arrays)), arrays.get("Wp")
    mask = whole_mask(problem, arrays.get("mask"))
    h, c = (contiguous(state) for state in initial_states(problem, arrays))
    c = c.astype(mx.float32)
    resumes = problem.reverse and problem.lengths is not None
    fixed = {
        "Wh": contiguous(arrays["Wh"]),
        "h0": h if resumes else None,
        "c0": c if resumes else None,
        "peephole": contiguous(arrays.get("peephole")),
        "lengths": problem.lengths,
        "sizes": mx.array([problem.T, problem.B, problem.H, problem.P], mx.int32),
        "numbers": mx.array([problem.cell.forget_bias, problem.cell.cell_clip or 0.0], mx.float32),
    }
    rows = [None] * problem.T
    for t in problem.steps():
        step = {"step": mx.array(t, mx.int32), "z": step_of(z, t), "h_prev": h, "c_prev": c, "mask": step_of(mask, t)}
        m, c, gates = kernels_stepwise.lstm_stepwise_forward(problem, step | fixed)
        h = m if Wp is None else m @ Wp.T
        rows[t] = h, c, gates
    sequences = zip(("h", "c", "gates"), zip(*rows, strict=True), strict=True)
    outputs = {name: mx.stack(steps) for name, steps in sequences}
    return outputs | last_states(problem, arrays, outputs, h, c)


def last_states(problem: Problem, arrays: Arrays, outputs: Arrays, h: mx.array, c: mx.array) -> Arrays:
    """hT and cT, where h and c are those of the last step: an item that ended before has its own last step."""
    if problem.lengths is None:
        return {"hT": h, "cT": c}
    h0, c0 = initial_states(problem, arrays)
    if not problem.reverse:
        h, c = (at_last_step(outputs[name], problem.lengths) for name in ("h", "c"))
    ran = (problem.lengths > 0)[:, None]
    return {"hT": mx.where(ran, h, h0), "cT": mx.where(ran, c, c0.astype(mx.float32))}


def at_last_step(sequence: mx.array, lengths: mx.array) -> mx.array:
    """[B, .]: row lengths[b] - 1 of each item, out of [T, B, .]."""
    return mx.take_along_axis(sequence, mx.maximum(lengths - 1, 0)[None, :, None], axis=0).reshape(sequence.shape[1:])


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """The gradient of every array, from those of the outputs that have one (keys h, c, gates, hT, cT)."""
    sweep = sweep_backward(problem, arrays, saved, cotangents)
    return gradients_after_sweep(problem, arrays, saved, sweep)


def sweep_backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """The steps in reverse: dz [T, B, 4H], dh0 [B, P], dc0 [B, H]; with a projection dh [T, B, P]."""
    gates, c = (contiguous(saved[name]) for name in ("gates", "c"))
    d = {name: contiguous(cotangent) for name, cotangent in cotangents.items()}
    c0 = contiguous(initial_states(problem, arrays)[1]).astype(mx.float32)
    peephole, mask = contiguous(arrays.get("peephole")), whole_mask(problem, arrays.get("mask"))
    launch = launch_backward_projected if "Wp" in arrays else launch_backward
    weights = {name: contiguous(arrays[name].T) for name in ("Wh", "Wp") if name in arrays}
    T, B, H, _ = problem[:4]
    order, rows = list(problem.steps()), {"dz": [None] * T, "dh": [None] * T}
    zeros = mx.zeros((4, B, H), mx.float32)
    dz, dc = zeros.reshape(B, 4 * H).astype(gates.dtype), d.get("cT", step_of(zeros, 0))
    for n in reversed(range(T)):
        t, following = order[n], order[min(n + 1, T - 1)]
        outside = {
            "mask": step_of(mask, following),
            "lengths": problem.lengths,
            "dh": step_of(d.get("h"), t),
            "dhT": d.get("hT"),
        }
        cell = {
            "gates": step_of(gates, t),
            "c": step_of(c, t),
            "c_prev": step_of(c, order[n - 1]) if n else c0,
            "c0": c0 if problem.reverse and problem.lengths is not None else None,
            "peephole": peephole,
            "dc": step_of(d.get("c"), t),
            "dgates": step_of(d.get("gates"), t),
            "dc_next": dc,
        }
        dz, dc, dh = launch(problem, mx.array(t, mx.int32), dz, weights, outside, cell)
        rows["dz"][t], rows["dh"][t] = dz, dh
    stacked = {name: mx.stack(steps) for name, steps in rows.items() if steps[0] is not None}
    return stacked | {"dh0": first_dh(problem, arrays, stacked["dz"], d.get("hT")), "dc0": dc}


def launch_backward(problem: Problem, step: mx.array, dz: mx.array, weights: Arrays, outside: Arrays, cell: Arrays):
    """(dz, dc_prev, None) of one step, in one launch."""
    sizes = mx.array([problem.T, problem.B, problem.H, 4 * problem.H], mx.int32)
    inputs = {"step": step, "a": dz, "weights": weights["Wh"], **cell, **outside, "sizes": sizes}
    return *kernels_stepwise.lstm_stepwise_backward(problem, inputs, projected=False), None


def launch_backward_projected(
    problem: Problem, step: mx.array, dz: mx.array, weights: Arrays, outside: Arrays, cell: Arrays
):
    """(dz, dc_prev, dh) of one step, in two launches: dh [B, P], then the rest with dm = dh Wp as the product."""
    T, B, H, P = problem[:4]
    sizes = [mx.array([T, B, *pair], mx.int32) for pair in ((P, 4 * H), (H, P))]
    dh = kernels_stepwise.lstm_stepwise_dh(
        problem, {"step": step, "a": dz, "weights": weights["Wh"], **outside, "sizes": sizes[0]}
    )
    nothing = dict.fromkeys(("mask", "dh", "dhT"))
    inputs = {"step": step, "a": dh, "weights": weights["Wp"], **cell, **outside, **nothing, "sizes": sizes[1]}
    return *kernels_stepwise.lstm_stepwise_backward(problem, inputs, projected=True), dh


def first_dh(problem: Problem, arrays: Arrays, dz: mx.array, dhT: mx.array | None) -> mx.array:
    """dh0 [B, P]: the product of the first step of each item; dhT for an item without steps."""
    mask, lengths = whole_mask(problem, arrays.get("mask")), problem.lengths
    first = problem.steps()[0]
    if problem.reverse and lengths is not None:
        dz = at_last_step(dz, lengths)
        mask = mask if mask is None or mask.shape[0] == 1 else at_last_step(mask, lengths)[None]
    else:
        dz = step_of(dz, first)
        mask = None if mask is None else step_of(mask, first)
    dh = dz @ arrays["Wh"]
    if mask is not None:
        dh = dh * mask.reshape(dh.shape)
    if lengths is None:
        return dh
    return mx.where((lengths > 0)[:, None], dh, mx.zeros_like(dh) if dhT is None else dhT)
