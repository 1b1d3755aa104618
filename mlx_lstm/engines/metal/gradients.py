"""The gradients after a sweep of the Metal engines in few launches: a product per weight, for both directions at once.

`engines.ops.sweep.gradients_after_sweep` is their definition. It also serves what is rarer: a mask, `keep`, a peephole,
a GRU whose reset comes before the candidate's product.
"""

import mlx.core as mx

from ..cells import Cell, GRUCell
from ..ops.sweep import flat, input_gradients
from ..problem import Arrays, Problem
from .inputs import constant, takes_steps, whole_mask
from .launch import Launch, Outputs, arguments, kept, prepare, present

THREADS = 256


def is_plain(problem: Problem, arrays: Arrays) -> bool:
    """Whether `gradients_in_few_launches` has the gradients of all arrays."""
    rare = {"mask", "keep", "peephole"} & arrays.keys()
    return not rare and (not isinstance(problem.cell, GRUCell) or takes_product(problem.cell))


def takes_product(cell: Cell) -> bool:
    """Whether the sweep back needs the candidate's recurrent product: that of a GRU which resets after it."""
    return isinstance(cell, GRUCell) and cell.reset == "after"


def recurrent_input(problem: Problem, arrays: Arrays, h: mx.array) -> Arrays:
    """h_in [D, T, B, P]: what went into the recurrent product of every step, mask * keep * h_prev; 0 past its end.
    And ones [1, T * B] where sums of 16-bit rows will be products with them."""
    T, B, P, D = problem.T, problem.B, problem.P, problem.directions
    mask = whole_mask(problem, arrays)
    inputs = {"h": h, "h0": arrays.get("h0"), "mask": mask, "lengths": arrays.get("lengths")}
    inputs["sizes"] = constant((T, B, D, P, problem.reverse, takes_steps(mask)), mx.int32)
    given = {name: array for name, array in inputs.items() if array is not None}
    sums = h.dtype != mx.float32 and ("b" in arrays or "bhn" in arrays)
    call = prepared_input((D, T, B, P), h.dtype, tuple(given), sums)
    return dict(zip(("h_in", "ones"), call(inputs=list(given.values())), strict=False))


@kept
def prepared_input(shape: tuple[int, int, int, int], dtype: mx.Dtype, given: tuple[str, ...], sums: bool) -> Launch:
    """The launch of `recurrent_input` with inputs of these names; `sums`: with ones."""
    D, T, B, P = shape
    inputs = present(("h", "h0", "mask", "lengths", "sizes"), given)
    outputs: Outputs = {"h_in": (shape, dtype), "ones": ((1, T * B), dtype) if sums else None}
    body = f"recurrent_input<S>({arguments({**inputs, **outputs})}, thread_position_in_grid);"
    groups = (-(-B * P // THREADS), T, D)
    shaders = ("cell", "store", "recurrent_input")
    return prepare("recurrent_input", shaders, inputs, outputs, {"S": dtype}, body, groups, THREADS)[0]


def candidates(problem: Problem, arrays: Arrays, h_in: mx.array) -> mx.array:
    """[D, T, B, H]: what r multiplies in a GRU, of every step."""
    D, T, B, H = h_in.shape
    Wh, bhn = arrays["Wh"].reshape(D, 3 * H, H), arrays.get("bhn")
    rows, Wh_n = h_in.reshape(D, T * B, H), mx.swapaxes(Wh[:, problem.cell.block("n", H)], 1, 2)
    q = rows @ Wh_n if bhn is None else mx.addmm(bhn.reshape(D, 1, H), rows, Wh_n)
    return q.reshape(h_in.shape)


def gradients_in_few_launches(problem: Problem, arrays: Arrays, sweep: Arrays) -> Arrays:
    """The gradient of every array, from what `recurrent_input` gives, dz and d_out [T, B, D G H], dz as the recurrent
    product had it, dh0, dc0; of a projection dh [T, B, D P] and m [D, T, B, H], what it multiplied."""
    (D, T, B, P), H, ones = sweep["h_in"].shape, problem.H, sweep.get("ones")
    d = sweep.get("d_out", sweep["dz"]).reshape(T * B, D, -1)
    gradients = input_gradients(problem, {name: array for name, array in arrays.items() if name != "b"}, sweep["dz"])
    gradients["Wh"] = (d.transpose(1, 2, 0) @ sweep["h_in"].reshape(D, T * B, P)).reshape(arrays["Wh"].shape)
    if "b" in arrays:
        gradients["b"] = column_sums(flat(sweep["dz"]), ones)
    if "bhn" in arrays:
        gradients["bhn"] = column_sums(d[..., problem.cell.block("n", H)].reshape(T * B, D * H), ones)
    if "Wp" in arrays:
        dh = sweep["dh"].reshape(T * B, D, P)
        gradients["Wp"] = (dh.transpose(1, 2, 0) @ sweep["m"].reshape(D, T * B, H)).reshape(arrays["Wp"].shape)
    gradients |= {name: sweep[f"d{name}"] for name in ("h0", "c0") if name in arrays}
    return {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items() if name in arrays}


def column_sums(rows: mx.array, ones: mx.array | None) -> mx.array:
    """The sums of all rows, accumulated in float32. Those of 16-bit numbers are a product with `ones` [1, rows], which
    needs no copy of them."""
    return rows.sum(axis=0) if ones is None else (ones @ rows).reshape(-1)
