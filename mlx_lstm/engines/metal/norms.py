"""Layer normalisation in the Metal engines: what their kernels read besides the arrays of other calls, and the names
that `engines.ops.sweep.gradients_after_sweep` has for the arrays that they write.

A norm computes y = (x - mean) r with r = 1 / sqrt(variance + eps), and y scale + shift as its result. x is the
recurrent product, or its sum with the input's part of the preactivations, over all gates or one norm per gate; an LSTM
may also normalise c. The backward pass computes y and r of all steps again before its own steps, as one product over
all T * B rows. So the forward pass saves nothing more.

- norm_scale, norm_shift [G H], norm_c_scale, norm_c_shift [H]: arrays of a call with one direction
- norm_y, norm_r: y and r of the product or sum; norm_c_y, norm_c_r: those of c
- q: the normalised recurrent product of a GRU's candidate, with its bias bhn
- d_product: the gradient of x. d_norm_c: that of the result of the norm of c

T steps, B items, D directions, G gates, H units, P the width of h.
"""

import mlx.core as mx

from ..cells import AnyCell, norm_blocks
from ..definitions import normalised
from ..directions import one_direction, part
from ..ops.sweep import by_gate, states_before, times_keep, without_padding
from ..problem import Arrays, Problem
from .kernel import Inputs, constant, contiguous
from .products import project

ARRAYS = ("norm_scale", "norm_shift", "norm_c_scale", "norm_c_shift")
"""The arrays of a call for its norms."""

READ = {"forward": (*ARRAYS, "norm_eps"), "backward": (*ARRAYS, "norm_eps", "norm_y", "norm_r", "norm_c_y", "norm_c_r")}
"""What the kernels of a pass read if the cell has a norm, in the order of the fields of their struct."""


def of_product(cell: AnyCell) -> bool:
    """Return whether the recurrent product, or its sum with the input's part, is normalised."""
    return cell.norm is not None and cell.norm.of is not None


def of_state(cell: AnyCell) -> bool:
    """Return whether c is normalised."""
    return cell.norm is not None and cell.norm.c is not None


def inputs_of(problem: Problem, arrays: Arrays) -> Inputs:
    """Return the inputs that all kernels of a cell with a norm read: the norms' arrays, and eps as an array of one
    number."""
    norm = problem.cell.norm
    assert norm is not None
    inputs: Inputs = {name: contiguous(arrays[name]) for name in ARRAYS if name in arrays}
    return inputs | {"norm_eps": constant((norm.eps,), mx.float32)}


def present(problem: Problem, names: tuple[str, ...], sweep: str) -> set[str]:
    """Return the names of the inputs in `READ` that the kernels of a pass get. names: the arrays of the call. sweep:
    the pass, "forward" or "backward"."""
    cell = problem.cell
    if cell.norm is None:
        return set()
    found = {"norm_eps", *(name for name in ARRAYS if name in names)}
    if sweep == "backward":
        found |= {"norm_y", "norm_r"} if of_product(cell) else set()
        found |= {"norm_c_y", "norm_c_r"} if of_state(cell) else set()
    return found


def numbers_before_sweep(problem: Problem, arrays: Arrays, saved: Arrays, h_in: mx.array | None) -> Arrays:
    """Return what the backward steps read, as float32 except for norm_y:

    - norm_y [T, B, D G H]: the normalised product or sum, before scale and shift
    - norm_r [T, B, D] or, with a norm of each gate, [T, B, D G]: 1 / sqrt(variance + eps) of this norm
    - norm_c_y [T, B, D H], norm_c_r [T, B, D]: the same for c
    - q [D, T, B, H], for a GRU with a norm: the candidate's normalised product

    h_in [D, T, B, P]: the input of the recurrent product at each step. Past an item's end all are 0 except q, which is
    computed from such zeros: it is finite there, and no gradient depends on it.
    """
    cell, D, lengths = problem.cell, problem.directions, arrays.get("lengths")
    found: Arrays = {}
    assert cell.norm is not None
    if of_product(cell):
        assert h_in is not None
        _, T, B, P = h_in.shape
        # a: what the norm gets at each step, h_in Wh^T or its sum with the input's part, for each direction.
        Wh = arrays["Wh"].reshape(D, -1, P).astype(mx.float32)
        a = h_in.reshape(D, T * B, P).astype(mx.float32) @ mx.swapaxes(Wh, 1, 2)
        a = mx.swapaxes(a, 0, 1).reshape(T, B, -1)
        if cell.norm.of == "sum":
            a = a + without_padding(lengths, project(problem, arrays).astype(mx.float32))
        # Each direction's part of the last axis is normalised by itself, in one block or in one per gate.
        y, r = normalised(a, D * norm_blocks(cell), cell.norm.eps)
        if cell.op == "gru":
            found["q"] = candidates(problem, arrays, y)
        found |= {"norm_y": without_padding(lengths, y.astype(h_in.dtype)), "norm_r": without_padding(lengths, r)}
    if of_state(cell):
        y, r = normalised(before_norm_of_c(problem, arrays, saved), D, cell.norm.eps)
        found |= {"norm_c_y": without_padding(lengths, y), "norm_c_r": without_padding(lengths, r)}
    return found


def candidates(problem: Problem, arrays: Arrays, y: mx.array) -> mx.array:
    """Return q [D, T, B, H], the normalised product of a GRU's candidate with its bias, from y [T, B, D 3H]."""
    D, H = problem.directions, problem.H
    n = problem.cell.block("n", H)
    q = y.reshape(*y.shape[:2], D, 3 * H)[..., n]
    if "norm_scale" in arrays:
        q = q * arrays["norm_scale"].reshape(D, 3 * H)[:, n]
    if "norm_shift" in arrays:
        q = q + arrays["norm_shift"].reshape(D, 3 * H)[:, n]
    if "bhn" in arrays:
        q = q + arrays["bhn"].reshape(D, H)
    return q.transpose(2, 0, 1, 3)


def before_norm_of_c(problem: Problem, arrays: Arrays, saved: Arrays) -> mx.array:
    """Return what the norm of c got at each step, [T, B, D H] in float32: c after its clip. If the normalised c is
    the state, only that was saved; so c is computed again from the gates and the state before the step."""
    cell = problem.cell
    assert cell.norm is not None
    if cell.norm.c == "output":
        return saved["c"].astype(mx.float32)
    if problem.bidirectional:
        each = [before_norm_of_c(one_direction(problem, d), part(arrays, d), part(saved, d)) for d in range(2)]
        return mx.concatenate(each, axis=-1)
    gates = {gate: y.astype(mx.float32) for gate, y in by_gate(cell, saved["gates"]).items()}
    before = times_keep(arrays, states_before(problem, arrays, saved)["c"]).astype(mx.float32)
    c = gates["f"] * before + gates["i"] * gates["g"]
    return c if cell.cell_clip is None else mx.clip(c, -cell.cell_clip, cell.cell_clip)


def joined(problem: Problem, arrays: Arrays, numbers: Arrays) -> Arrays:
    """Return norm_y, norm_c_y and two joined arrays: norm_r with norm_c_r behind the numbers of each direction, and
    norm_c [2, D, H], the scale and the shift of the norm of c. The kernels of `stepwise` read them joined, because
    Metal binds at most 31 arrays to one launch. numbers: the result of `numbers_before_sweep`."""
    D, shape = problem.directions, (problem.directions, problem.H)
    parts = [numbers[name] for name in ("norm_r", "norm_c_r") if name in numbers]
    parts = [part.reshape(*part.shape[:2], D, -1) for part in parts]
    found = {name: numbers[name] for name in ("norm_y", "norm_c_y") if name in numbers}
    if of_state(problem.cell):
        dtype = arrays["Wh"].dtype
        scale = arrays.get("norm_c_scale", mx.ones(shape, dtype))
        shift = arrays.get("norm_c_shift", mx.zeros(shape, dtype))
        found["norm_c"] = mx.stack([scale.reshape(shape), shift.reshape(shape)])
    return found | {"norm_r": mx.concatenate(parts, axis=-1)}


def for_gradients(problem: Problem, results: Arrays, numbers: Arrays, gates: mx.array | None = None) -> Arrays:
    """Return what the backward steps wrote (`results`) and what they read (`numbers`) under the names that
    `gradients_after_sweep` takes: da, the gradient of the result of the norm of the products, dp, that of the
    products themselves, and y; dn and yc, for c, the gradient of the result and y.

    gates: those of a GRU, if the steps did not write d_out. The norm's result of its candidate is multiplied by r, so
    da is dz with the candidate's part times r.
    """
    cell = problem.cell
    if cell.norm is None:
        return results
    found = results.copy()
    if cell.op == "pointwise":  # `pointwise.gradients_after` reads the other results under the kernels' names
        return found | {"y": numbers["norm_y"]}
    if of_product(cell):
        da = results.get("d_out", results["dz"])
        if cell.op == "gru" and gates is not None:
            da = times_reset(problem, da, gates)
        found |= {"da": da, "dp": results["d_product"], "y": numbers["norm_y"]}
        if cell.norm.of == "sum":  # the input's part is a term of what is normalised, so both have the same gradient
            found["dz"] = found["dp"]
    if of_state(cell):
        found |= {"dn": results["d_norm_c"], "yc": numbers["norm_c_y"]}
    return found


def times_reset(problem: Problem, dz: mx.array, gates: mx.array) -> mx.array:
    """Return dz [T, B, D 3H] of a GRU with the candidate's block times the gate r. gates: those of all steps, in the
    shape of dz."""
    cell, (T, B), D, H = problem.cell, dz.shape[:2], problem.directions, problem.H
    r = gates.reshape(T, B, D, 3 * H)[..., cell.block("r", H)]
    factors = [r if gate == "n" else mx.ones_like(r) for gate in cell.gate_order]
    return dz * mx.concatenate(factors, axis=-1).reshape(dz.shape)


def memory_of(cell: AnyCell, H: int, lanes: int, rows: int) -> int:
    """Return the bytes of threadgroup memory in which the simdgroups of a `fused` kernel exchange the sums of the
    norms. metal/fused_norm.metal describes it (NormMemory): each norm has a pair of floats for each simdgroup and
    batch item. H: the units. lanes: the lanes of a unit. rows: the batch items of a threadgroup.

    For example, an LSTM with H = 96 and 4 lanes per unit has 12 simdgroups. With one norm all 32 lanes of a simdgroup
    read sums, so there are 32 places. With a norm of each gate 8 lanes read those of one gate: 4 norms of 16 places."""
    simdgroups = -(-H * lanes // 32)
    # every: every `every`-th lane has numbers of the same norm. It is 1 (all lanes), or with a norm per gate `lanes`.
    every = lanes if norm_blocks(cell) > 1 else 1
    # The lanes that read one norm in a simdgroup divide the sums of all simdgroups among themselves.
    readers = 32 // every  # in the example 32, or 8
    places = -(-simdgroups // readers) * readers  # in the example 12, rounded up to 32, or 16
    of_lane = -(-cell.gates // lanes) if every > 1 else 1  # how many gates' norms each lane takes part in
    pairs = of_lane * [every * places] if of_product(cell) else []  # in the example [32], or [4 * 16]
    pairs += [32] if of_state(cell) else []  # of c: one place for each of the at most 32 simdgroups
    return sum(-(-count * rows // 2) * 16 for count in pairs)  # two pairs fill a vector of 16 bytes
