"""Engine `stepwise`: the recurrence on the GPU, one launch of a Metal shader per time step and sweep.

A launch computes the recurrent product and the cell of a step, of both directions where both run; a projection is one
launch more. One launch at the end of a sweep lays the steps' results out in time. The products over all T * B rows stay
MLX's own. h and gates are stored in the dtype of the arrays, c in float32; arithmetic is float32. All results are lazy,
so the engine also runs inside `mx.compile` and exports.
"""

from __future__ import annotations

import mlx.core as mx

from ..ops.sweep import gradients_after_sweep
from ..problem import Arrays, Problem
from . import stepwise_launches as kernels
from .gradients import candidates, gradients_in_few_launches, is_plain, recurrent_input, takes_product
from .inputs import contiguous, project, whole_mask
from .stepwise_rows import LEFT, Rows


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """h [T, B, D P], gates [T, B, D G H], hT [B, D P]; of an LSTM c [T, B, D H], cT [B, D H], float32. Gates only if
    the problem keeps them."""
    T, _, H, P = problem[:4]
    cell, Wp = problem.cell, contiguous(arrays.get("Wp"))
    rows, projected = rows_of(problem, Wp)
    mask = whole_mask(problem, arrays.get("mask"))
    z = project(arrays)
    fixed = options(problem, arrays) | {
        "z": z,
        "mask": mask,
        "extra": contiguous(arrays.get("peephole", arrays.get("bhn"))),
        "numbers": mx.array([cell.forget_bias, cell.cell_clip or 0.0], mx.float32) if cell.op == "lstm" else None,
        "sizes": sizes(problem, mask, H, P),
        "Wp": Wp,
        "h_before": None if Wp is None else nothing(kernels.row_type(z.dtype)),
        "before": nothing(kernels.row_type(z.dtype)),
    }
    of_projection = fixed | {"sizes": sizes(problem, mask, P, H)}
    for n in range(T):
        step = {"step": mx.array(n, mx.int32)}
        if kernels.resets_before(problem):
            step["reset_row"] = kernels.stepwise_gru_reset(problem, fixed | step)
            fixed["before"] = kernels.stepwise_gru_candidate(problem, fixed | step, rows)
        else:
            fixed["before"] = kernels.stepwise_forward(problem, fixed | step, rows)
        if Wp is not None:
            given = of_projection | step | {"before": fixed["before"]}
            fixed["h_before"] = kernels.stepwise_project(problem, given, projected)
    names = {"h", "c", "hT", "cT", "gates"} & set(cell.outputs)
    if not (problem.training or problem.return_gates):
        names -= {"gates"}
    kinds = [(rows, H)] if Wp is None else [(rows, H), (projected, P)]
    return kernels.stepwise_outputs(problem, fixed, kinds, names=names)


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """The gradient of every array, from those of the outputs that have one (keys h, c, gates, hT, cT).

    Gates that nobody kept are computed again.
    """
    if saved.get("gates") is None and problem.cell.op != "rnn":
        saved = forward(problem._replace(training=True), arrays)
    few = is_plain(problem, arrays)
    taken = recurrent_input(problem, arrays, saved["h"]) if few or takes_product(problem.cell) else {}
    q = candidates(problem, arrays, taken["h_in"]) if takes_product(problem.cell) else None
    sweep = sweep_backward(problem, arrays, saved, cotangents, q, wants_m=few and "Wp" in arrays)
    if few:
        return gradients_in_few_launches(problem, arrays, sweep | taken)
    return gradients_after_sweep(problem, arrays, saved, sweep)


def sweep_backward(
    problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays, q: mx.array | None, *, wants_m: bool
) -> Arrays:
    """The steps in reverse: dz [T, B, D G H]; dh0 [B, D P] and dc0 [B, D H] if there is an h0, a c0; with a projection
    dh [T, B, D P] and, if wanted, m [D, T, B, H], what it multiplied; of a GRU that resets after its product d_out
    [T, B, D 3H], dz as that product had it."""
    (T, B, H, P), D, cell = problem[:4], problem.directions, problem.cell
    mask, d = whole_mask(problem, arrays.get("mask")), {name: contiguous(given) for name, given in cotangents.items()}
    state = "c" if cell.op == "lstm" else "h"
    fixed = options(problem, arrays) | {
        "mask": mask,
        "gates": contiguous(saved["gates"]) if cell.op != "rnn" else None,
        "states": contiguous(saved[state]),
        "q": q,
        "extra": contiguous(arrays.get("peephole")),
        "dc": d.get("c"),
        "dgates": d.get("gates"),
        "dcT": d.get("cT"),
        "dh": d.get("h"),
        "dhT": d.get("hT"),
        "before": nothing(kernels.row_type(arrays["Wh"].dtype)),
        "dh_now": None,
        "weights": transposed(arrays["Wh"]),
        "sizes": sizes(problem, mask, H, cell.gates * H),
    }
    before = kernels.resets_before(problem)
    if before:
        gates = {gate: arrays["Wh"][..., cell.block(gate, H), :] for gate in "rzn"}
        fixed |= {"weights": transposed(mx.concatenate([gates["r"], gates["z"]], axis=-2))}
        fixed |= {"sizes": sizes(problem, mask, H, 2 * H)}
        of_reset = fixed | {"weights": transposed(gates["n"]), "sizes": sizes(problem, mask, H, H)}
    fixed["states0"] = fixed[f"{state}0"]
    of_dh = fixed | {"sizes": sizes(problem, mask, P, (2 if before else cell.gates) * H)}
    if "Wp" in arrays:
        fixed |= {"weights": transposed(arrays["Wp"]), "sizes": sizes(problem, mask, H, P)}
        fixed |= dict.fromkeys(("mask", "dh", "dhT"))
    rows, dh_rows = rows_of(problem, arrays.get("Wp"))
    for n in reversed(range(T)):
        step = {"step": mx.array(n, mx.int32)}
        if "Wp" in arrays:
            fixed["dh_now"] = kernels.stepwise_dh(problem, of_dh | step, dh_rows)
        row = kernels.stepwise_backward(problem, fixed | step, None if before else rows)
        if before:
            given = of_reset | step | {"now_row": row, "states0": fixed["states0"]}
            row = kernels.stepwise_gru_reset_backward(problem, given, rows)
        of_dh["before"] = fixed["before"] = row
    wanted = {"dc0": "c0" in arrays, "d_out": takes_product(cell), "m": wants_m}
    kinds = [(rows, H), (dh_rows, P)] if "Wp" in arrays else [(rows, H)]
    found = kernels.stepwise_gradients(problem, fixed, kinds, names={name for name in wanted if wanted[name]})
    if "h0" in arrays:
        last = of_dh | {"step": mx.array(-1, mx.int32), "dh": None}
        found["dh0"] = kernels.stepwise_dh(problem, last)[: B * D * P].reshape(B, D * P)
    return found


def rows_of(problem: Problem, Wp: mx.array | None) -> tuple[Rows, Rows]:
    """Where the rows of a sweep's cells go, and those of what a projection makes or gets."""
    left = LEFT if Wp is None else LEFT // 2
    return Rows(problem.T, left), Rows(problem.T, left)


def options(problem: Problem, arrays: Arrays) -> dict[str, mx.array | None]:
    """What both sweeps read."""
    names = ("Wh", "h0", "c0")
    return {name: contiguous(arrays.get(name)) for name in names} | {"lengths": problem.lengths}


def sizes(problem: Problem, mask: mx.array | None, width: int, K: int) -> mx.array:
    """What a launch is told of sizes; metal/stepwise.metal lists them. Fewer than 8, for Metal's constant memory."""
    T, B, D = problem.T, problem.B, problem.directions
    return mx.array([T, B, width, K, D, problem.reverse, mask is not None and mask.shape[0] > 1], mx.int32)


def nothing(dtype: mx.Dtype) -> mx.array:
    """What stands for the row before the first, which is never read; made without a launch."""
    return mx.array([0] * 8, dtype)


def transposed(weights: mx.array) -> mx.array:
    """[.., n, m] as [.., m, n]."""
    return contiguous(mx.swapaxes(weights, -1, -2))
