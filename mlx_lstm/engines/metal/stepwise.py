"""Engine `stepwise`: the recurrence on the GPU, one launch of a Metal shader per time step and sweep.

A launch computes the recurrent product and the cell of a step, of both directions where both run; a projection is one
launch more. One launch at the end of a sweep lays the steps' results out in time. All else is as in `fused`.
"""

import mlx.core as mx

from ..ops.packed import scales_of
from ..ops.sweep import gradients_after_sweep
from ..packing import is_packed
from ..problem import Arrays, Problem
from . import stepwise_launches as kernels
from .gradients import candidates, gradients_in_few_launches, is_plain, recurrent_input, takes_product
from .inputs import constant, contiguous, project, takes_steps, whole_mask
from .stepwise_rows import Rows


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """h [T, B, D P], gates [T, B, D G H], hT [B, D P]; of an LSTM c [T, B, D H], cT [B, D H], float32. Gates only if
    the problem keeps them."""
    T, _, H, P = problem[:4]
    z = project(problem, arrays)
    cell, Wp = problem.cell, contiguous(arrays.get("Wp"))
    rows, projected = rows_of(problem, Wp)
    mask = whole_mask(problem, arrays)
    row = nothing(kernels.row_type(z.dtype))
    fixed = options(problem, arrays) | {
        "z": z,
        "mask": mask,
        "extra": contiguous(arrays.get("peephole", arrays.get("bhn"))),
        "numbers": constant((cell.forget_bias, cell.cell_clip or 0.0), mx.float32) if cell.op == "lstm" else None,
        "sizes": sizes(problem, mask, H, P),
        **packed_parts(arrays, z.dtype),
        "Wp": Wp,
        "h_before": None if Wp is None else row,
        "before": row,
        "reset_row": row,
    }
    if kernels.resets_before(problem):
        reset = kernels.stepwise_gru_reset(problem, fixed)
        candidate = kernels.stepwise_gru_candidate(problem, fixed, rows)
        for n in range(T):
            row = candidate(n, before=row, reset_row=reset(n, before=row))
    elif Wp is None:
        step = kernels.stepwise_forward(problem, fixed, rows)
        for n in range(T):
            row = step(n, before=row)
    else:
        step, h = kernels.stepwise_forward(problem, fixed, rows), row
        project_row = kernels.stepwise_project(problem, fixed | {"sizes": sizes(problem, mask, P, H)}, projected)
        for n in range(T):
            row = step(n, before=row, h_before=h)
            h = project_row(n, before=row)
    keeps_gates = problem.training or problem.return_gates
    names = frozenset(name for name in cell.outputs if name != "gates" or keeps_gates)
    kinds = [(rows, H)] if Wp is None else [(rows, H), (projected, P)]
    return kernels.stepwise_outputs(problem, fixed, kinds, names=names)


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """The gradient of every array, from those of the outputs that have one; gates that nobody kept computed again."""
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
    mask, d = whole_mask(problem, arrays), {name: contiguous(given) for name, given in cotangents.items()}
    state = "c" if cell.op == "lstm" else "h"
    row = nothing(kernels.row_type(arrays["Wh"].dtype))
    before, projects = kernels.resets_before(problem), "Wp" in arrays
    K = (2 if before else cell.gates) * H
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
        "before": row,
        "dh_now": None,
        "weights": transposed(arrays["Wh"]),
        "sizes": sizes(problem, mask, H, K),
    }
    fixed["states0"] = fixed[f"{state}0"]
    rows, dh_rows = rows_of(problem, arrays.get("Wp"))
    of_dh = fixed | {"sizes": sizes(problem, mask, P, K)}
    if before:
        gates = {gate: arrays["Wh"][..., cell.block(gate, H), :] for gate in "rzn"}
        of_dh["weights"] = transposed(mx.concatenate([gates["r"], gates["z"]], axis=-2))
        of_reset = fixed | {"weights": transposed(gates["n"]), "sizes": sizes(problem, mask, H, H), "now_row": row}
        step = kernels.stepwise_backward(problem, fixed | {"weights": of_dh["weights"]})
        reset = kernels.stepwise_gru_reset_backward(problem, of_reset, rows)
        for n in reversed(range(T)):
            row = reset(n, now_row=step(n, before=row))
    elif projects:
        of_m = {"weights": transposed(arrays["Wp"]), "sizes": sizes(problem, mask, H, P), "dh_now": row}
        of_m |= dict.fromkeys(("mask", "dh", "dhT"))
        dh, step = kernels.stepwise_dh(problem, of_dh, dh_rows), kernels.stepwise_backward(problem, fixed | of_m, rows)
        for n in reversed(range(T)):
            row = step(n, before=row, dh_now=dh(n, before=row))
    else:
        step = kernels.stepwise_backward(problem, fixed, rows)
        for n in reversed(range(T)):
            row = step(n, before=row)
    wanted = {"dc0": "c0" in arrays, "d_out": takes_product(cell), "m": wants_m, "carry": fixed["keep"] is not None}
    kinds = [(rows, H), (dh_rows, P)] if projects else [(rows, H)]
    found = kernels.stepwise_gradients(problem, fixed, kinds, names=frozenset(name for name in wanted if wanted[name]))
    if "h0" in arrays:
        last = kernels.stepwise_dh(problem, of_dh | {"dh": None})
        found["dh0"] = last(-1, before=row)[: B * D * P].reshape(B, D * P)
    return found


def rows_of(problem: Problem, Wp: mx.array | None) -> tuple[Rows, Rows]:
    """Where the rows of a sweep's cells go, and those of what a projection makes or gets."""
    left = problem.limits.rows_left if Wp is None else problem.limits.rows_left // 2
    return Rows(problem.T, left), Rows(problem.T, left)


def options(problem: Problem, arrays: Arrays) -> dict[str, mx.array | None]:
    """What both sweeps read."""
    given = {name: contiguous(arrays.get(name)) for name in ("Wh", "h0", "c0")}
    keep = None if problem.cell.op == "rnn" else contiguous(arrays.get("keep"))
    return given | {"keep": keep, "lengths": arrays.get("lengths"), "step": kernels.step_number(0)}


def packed_parts(arrays: Arrays, dtype: mx.Dtype) -> Arrays:
    """What belongs to the packed ones of the weights that the steps read."""
    found: dict[str, mx.array | None] = {}
    for name in ("Wh", "Wp"):
        if is_packed(name, arrays):
            found |= zip((f"{name}_scales", f"{name}_biases"), scales_of(arrays, name, dtype), strict=True)
    return {name: contiguous(array) for name, array in found.items() if array is not None}


def sizes(problem: Problem, mask: mx.array | None, width: int, K: int) -> mx.array:
    """What a launch is told of sizes; metal/stepwise.metal lists them. Fewer than 8, for Metal's constant memory."""
    T, B, D = problem.T, problem.B, problem.directions
    return constant((T, B, width, K, D, problem.reverse, takes_steps(mask)), mx.int32)


def nothing(dtype: mx.Dtype) -> mx.array:
    """What stands for the row before the first, which is never read; made without a launch."""
    return constant((0,) * 8, dtype)


def transposed(weights: mx.array) -> mx.array:
    """[.., n, m] as [.., m, n]."""
    return contiguous(mx.swapaxes(weights, -1, -2))
