"""Compute the matrix products of the Metal engines that span all time steps, with operations of MLX: the input's
product before the steps, and the gradients of the weights after the backward steps.

The gradients take few launches here: one product per weight, for both directions at once. This does not support a mask,
`keep`, a peephole, a norm, or a GRU whose reset comes before the candidate's product. For these options the engines
call `engines.ops.sweep.gradients_after_sweep`, which supports all options.

- h_in [D, T, B, P]: the vectors that the recurrent product multiplies by Wh, of all steps
- dz [T, B, D G H]: the gradient of the preactivations. d_out: the gradient of the recurrent products, if it differs
- ones [1, T B]: a product with it sums 16-bit rows in float32

T: steps, B: batch items, D: directions, G: gates, H: units, P: the width of h.
"""

from collections.abc import Collection

import mlx.core as mx

from ..cells import AnyCell
from ..ops import sweep as ops
from ..packing import is_packed
from ..problem import Arrays, Problem
from .kernel import Launch, Outputs, Source, cached, constant, contiguous, fields_of, prepare, struct_of

THREADS = 256
"""How many threads a threadgroup of the shader `recurrent_input` has."""


def project(problem: Problem, arrays: Arrays, launches: int = 2) -> mx.array:
    """Return z [T, B, D G H], the input's part of the preactivations: x Wx^T + b or, without Wx, x + b. launches: how
    many launches read z. If there are several, z is made contiguous here, because each would copy an array that is
    not."""
    x, Wx, b = arrays["x"], arrays.get("Wx"), arrays.get("b")
    if Wx is not None and b is not None and (problem.packing is None or not is_packed("Wx", arrays)):
        return mx.addmm(b, x, Wx.T)
    z = ops.project(problem, arrays)
    return contiguous(z) if launches > 1 else z


def is_plain(problem: Problem, names: Collection[str]) -> bool:
    """Return whether `gradients_in_few_launches` can compute the gradients of this call, whose arrays have these
    names."""
    rare = "mask" in names or "keep" in names or "peephole" in names
    return not rare and problem.cell.reset != "before" and problem.cell.norm is None


def takes_product(cell: AnyCell) -> bool:
    """Return whether the backward steps read q, the recurrent product of a GRU's candidate. They do if the reset comes
    after this product: then the gradient of the gate r is q times the gradient of the candidate's preactivation."""
    return cell.reset == "after"


def recurrent_input(problem: Problem, arrays: Arrays, h: mx.array, mask: mx.array | None) -> Arrays:
    """Compute arrays that the gradients after the backward steps need. Return a dict with h_in [D, T, B, P]: at each
    step mask * (h before the step), and 0 past an item's end. If the arrays have 16 bits and there are biases, the dict
    also has `ones`, with which `column_sums` sums 16-bit rows in float32. If the call has lengths and Wx and `is_plain`
    is true, the dict also has x_in [T, B, I]: x with 0 past an item's end.

    h: the output of the forward pass. mask: the factor on h in the recurrent product (it includes `keep`), or None.
    """
    inputs = {"h": h, "h0": arrays.get("h0"), "mask": mask, "lengths": arrays.get("lengths")}
    # Past an item's end x may be NaN. There the gradient is 0, but NaN times 0 is NaN, which would spoil the gradient
    # of Wx. So the launch writes a copy of x with 0 past an item's end.
    copies_x = "lengths" in arrays and "Wx" in arrays and is_plain(problem, arrays)
    inputs["x"] = arrays["x"] if copies_x else None
    sums = h.dtype != mx.float32 and ("b" in arrays or "bhn" in arrays)
    names, values = [], []
    for name, array in inputs.items():
        if array is not None:
            names.append(name)
            values.append(array)
    differ = mask is not None and mask.shape[0] > 1
    width = arrays["x"].shape[-1] if copies_x else 0
    launch, sizes = input_launch(problem, h.dtype, tuple(names), differ, sums, width)
    written = ["h_in", *(["ones"] if sums else []), *(["x_in"] if copies_x else [])]
    return dict(zip(written, launch(inputs=[*values, sizes]), strict=True))


@cached
def input_launch(
    problem: Problem, dtype: mx.Dtype, names: tuple[str, ...], masks_differ: bool, sums: bool, width: int
) -> tuple[Launch, mx.array]:
    """Return the launch of the shader `recurrent_input`, and its input array `sizes`; metal/recurrent_input.metal
    describes both. names: which of the arrays h, h0, mask, lengths and x the launch has. masks_differ: whether each
    step has its own mask. sums: whether the shader also writes `ones`. width: the number of features of x, or 0 if the
    launch does not copy x."""
    T, B, P, D = problem.T, problem.B, problem.P, problem.directions
    inputs = {name: name in (*names, "sizes") for name in ("h", "h0", "mask", "lengths", "x", "sizes")}
    outputs: Outputs = {"h_in": ((D, T, B, P), dtype), "ones": ((1, T * B), dtype) if sums else None}
    outputs["x_in"] = ((T, B, width), dtype) if width else None
    present = [*names, "sizes", *(name for name in outputs if outputs[name] is not None)]
    body = struct_of(fields_of((*inputs, *outputs), present))
    body += "recurrent_input<S>(a, thread_position_in_grid);"
    groups = (-(-B * P // THREADS), T, D)
    source = Source("recurrent_input", ("arrays", "recurrent_input"), body)
    launch = prepare(source, {"S": dtype}, inputs, outputs, groups, THREADS)
    return launch, constant((T, B, D, P, problem.reverse, masks_differ, width), mx.int32)


def candidates(problem: Problem, arrays: Arrays, h_in: mx.array) -> mx.array:
    """Return q [D, T, B, H], the recurrent product of a GRU's candidate at all steps: h_in times the candidate's rows
    of Wh, plus the bias bhn, if the call has it. The gate r is not yet a factor of q."""
    D, T, B, H = h_in.shape
    Wh, bhn = arrays["Wh"].reshape(D, 3 * H, H), arrays.get("bhn")
    rows, Wh_n = h_in.reshape(D, T * B, H), mx.swapaxes(Wh[:, problem.cell.block("n", H)], 1, 2)
    q = rows @ Wh_n if bhn is None else mx.addmm(bhn.reshape(D, 1, H), rows, Wh_n)
    return q.reshape(h_in.shape)


def gradients_in_few_launches(problem: Problem, arrays: Arrays, sweep: Arrays) -> Arrays:
    """Return the gradients of all arrays, by name.

    sweep: the results of `recurrent_input` and of the backward steps, by name. These are h_in, dz, dh0 and dc0. Some
    calls also have ones and x_in; d_out; and with a projection h = m Wp^T also dh [T, B, D P] and m [D, T, B, H].
    """
    (D, T, B, P), H, ones = sweep["h_in"].shape, problem.H, sweep.get("ones")
    d = sweep.get("d_out", sweep["dz"]).reshape(T * B, D, -1)  # the gradients of the recurrent products
    gradients = {"Wh": (d.transpose(1, 2, 0) @ sweep["h_in"].reshape(D, T * B, P)).reshape(arrays["Wh"].shape)}
    if "b" in arrays:
        gradients["b"] = column_sums(sweep["dz"].reshape(T * B, -1), ones)
    if "bhn" in arrays:
        gradients["bhn"] = column_sums(d[..., problem.cell.block("n", H)].reshape(T * B, D * H), ones)
    if "Wp" in arrays:
        dh = sweep["dh"].reshape(T * B, D, P)
        gradients["Wp"] = (dh.transpose(1, 2, 0) @ sweep["m"].reshape(D, T * B, H)).reshape(arrays["Wp"].shape)
    for name in ("h0", "c0"):
        if name in arrays:
            gradients[name] = sweep[f"d{name}"]
    without_b = arrays.copy()
    without_b.pop("b", None)
    if "x_in" in sweep:
        without_b["x"] = sweep["x_in"]
        del without_b["lengths"]  # x_in is already 0 past an item's end
    gradients |= ops.input_gradients(without_b, sweep["dz"])
    for name in gradients:
        gradients[name] = gradients[name].astype(arrays[name].dtype)
    return gradients


def column_sums(rows: mx.array, ones: mx.array | None) -> mx.array:
    """Return the sum of all rows, accumulated in float32. For 16-bit rows the sum is a product with `ones` [1, number
    of rows], so that no float32 copy of the rows is made. For float32 rows `ones` is None."""
    return rows.sum(axis=0) if ones is None else (ones @ rows).reshape(-1)
