"""The gradients after a sweep of the Metal engines in few launches: a product per weight, for both directions at once.

`engine_ops.gradients_after_sweep` is their definition. It also serves what is rarer: a mask, a peephole, a projection,
a GRU whose reset comes before the candidate's product.
"""

from __future__ import annotations

import mlx.core as mx

from .cells import Cell, GRUCell
from .engine_ops import Arrays, flat, input_gradients
from .kernel_inputs import contiguous, whole_mask
from .kernels import launch
from .problem import Problem

THREADS = 256


def is_plain(problem: Problem, arrays: Arrays) -> bool:
    """Whether `gradients_in_few_launches` has the gradients of all arrays."""
    rare = {"mask", "peephole", "Wp"} & arrays.keys()
    return not rare and (not isinstance(problem.cell, GRUCell) or takes_product(problem.cell))


def takes_product(cell: Cell) -> bool:
    """Whether the sweep back needs the candidate's recurrent product: that of a GRU which resets after it."""
    return isinstance(cell, GRUCell) and cell.reset == "after"


def recurrent_input(problem: Problem, arrays: Arrays, h: mx.array) -> mx.array:
    """[D, T, B, H]: what went into the recurrent product of every step, mask * h_prev; 0 past an item's end."""
    T, B, H, D = *problem[:3], problem.directions
    mask = whole_mask(problem, arrays.get("mask"))
    each = mask is not None and mask.shape[0] > 1
    inputs = {
        "h": contiguous(h),
        "h0": contiguous(arrays.get("h0")),
        "mask": mask,
        "lengths": problem.lengths,
        "sizes": mx.array([T, B, D, H, problem.reverse, each], mx.int32),
    }
    outputs = {"h_in": ((D, T, B, H), h.dtype)}
    body = "recurrent_input<S>({arrays}, thread_position_in_grid.x);"
    groups = (-(-D * T * B * H // THREADS), 1)
    return launch(
        "recurrent_input", ("cell", "recurrent_input"), inputs, outputs, {"S": h.dtype}, body, groups, THREADS
    )[0]


def candidates(problem: Problem, arrays: Arrays, h_in: mx.array) -> mx.array:
    """[D, T, B, H]: what r multiplies in a GRU, of every step."""
    D, T, B, H = h_in.shape
    Wh, bhn = arrays["Wh"].reshape(D, 3 * H, H), arrays.get("bhn")
    rows, Wh_n = h_in.reshape(D, T * B, H), mx.swapaxes(Wh[:, problem.cell.block("n", H)], 1, 2)
    q = rows @ Wh_n if bhn is None else mx.addmm(bhn.reshape(D, 1, H), rows, Wh_n)
    return q.reshape(h_in.shape)


def gradients_in_few_launches(problem: Problem, arrays: Arrays, sweep: Arrays, h_in: mx.array) -> Arrays:
    """The gradient of every array, from dz and d_out [T, B, D G H], dz as the recurrent product had it, dh0, dc0."""
    D, T, B, H = h_in.shape
    d = sweep.get("d_out", sweep["dz"]).reshape(T * B, D, -1)
    gradients = input_gradients(problem, {name: array for name, array in arrays.items() if name != "b"}, sweep["dz"])
    gradients["Wh"] = (d.transpose(1, 2, 0) @ h_in.reshape(D, T * B, H)).reshape(arrays["Wh"].shape)
    if "b" in arrays:
        gradients["b"] = column_sums(flat(sweep["dz"]))
    if "bhn" in arrays:
        gradients["bhn"] = column_sums(d[..., problem.cell.block("n", H)].reshape(T * B, D * H))
    gradients |= {name: sweep[f"d{name}"] for name in ("h0", "c0") if name in arrays}
    return {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items() if name in arrays}


def column_sums(rows: mx.array) -> mx.array:
    """The sums of all rows, accumulated in float32: of 16-bit numbers by a product, which needs no copy of them."""
    if rows.dtype == mx.float32:
        return rows.sum(axis=0)
    return (mx.ones((1, rows.shape[0]), rows.dtype) @ rows).reshape(-1)
