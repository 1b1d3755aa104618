"""Prepare layer normalisation for the Metal engines: compute the additional arrays that their kernels read, and rename
the arrays that they write for `engines.ops.sweep.gradients_after_sweep`.

A norm computes y = (x - mean) r with r = 1 / sqrt(variance + eps), and y scale + shift as its result. x is the
recurrent product, or the sum of this product and the input's part of the preactivations, with one norm for all gates or
one per gate. An LSTM may also normalise c. Before the backward steps MLX computes y and r of all steps again, from one
product over all T * B rows. So the forward pass saves nothing for the norms.

- norm_scale, norm_shift [G H], norm_c_scale, norm_c_shift [H]: the arrays that the user passes, for one direction
- norm_y, norm_r: y and r of the product or sum; norm_c_y, norm_c_r: y and r of c
- d_product: the gradient of x. d_norm_c: the gradient of the result of the norm of c

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
"""The names of the arrays with which a call passes the scale and shift of its norms."""

READ = {"forward": (*ARRAYS, "norm_eps"), "backward": (*ARRAYS, "norm_eps", "norm_y", "norm_r", "norm_c_y", "norm_c_r")}
"""The arrays that the kernels of a pass can read in addition if the cell has a norm, in the order of the fields of the
kernels' struct."""


def of_product(cell: AnyCell) -> bool:
    """Return whether the recurrent product, or its sum with the input's part, is normalised."""
    return cell.norm is not None and cell.norm.of is not None


def of_state(cell: AnyCell) -> bool:
    """Return whether c is normalised."""
    return cell.norm is not None and cell.norm.c is not None


def inputs_of(problem: Problem, arrays: Arrays) -> Inputs:
    """Return the inputs that all kernels of a cell with a norm read: scales and shifts, and eps as an array."""
    norm = problem.cell.norm
    assert norm is not None
    inputs: Inputs = {name: contiguous(arrays[name]) for name in ARRAYS if name in arrays}
    return inputs | {"norm_eps": constant((norm.eps,), mx.float32)}


def present(problem: Problem, names: tuple[str, ...], sweep: str) -> set[str]:
    """Return the names of those inputs in READ that the kernels of a pass, "forward" or "backward", get in this call.
    names: the names of the call's arrays."""
    cell = problem.cell
    if cell.norm is None:
        return set()
    found = {"norm_eps", *(name for name in ARRAYS if name in names)}
    if sweep == "backward":
        found |= {"norm_y", "norm_r"} if of_product(cell) else set()
        found |= {"norm_c_y", "norm_c_r"} if of_state(cell) else set()
    return found


def numbers_before_sweep(problem: Problem, arrays: Arrays, saved: Arrays, h_in: mx.array | None) -> Arrays:
    """Compute, before the backward steps, the normalised numbers of all steps, which the backward kernels read. Return
    a dict of float32 arrays (norm_y has the dtype of the call):

    - norm_y [T, B, D G H]: the normalised product or sum, before scale and shift
    - norm_r [T, B, D] or, with a norm of each gate, [T, B, D G]: 1 / sqrt(variance + eps) of this norm
    - norm_c_y [T, B, D H], norm_c_r [T, B, D]: the normalised c, and 1 / sqrt(variance + eps) of this norm
    - q [D, T, B, H], for a GRU with a norm: the candidate's normalised product

    h_in [D, T, B, P]: the input of the recurrent product at each step. Past an item's end all arrays are 0 except q.
    There q is computed from zeros, so it is finite, and no gradient depends on it.
    """
    cell, D, lengths = problem.cell, problem.directions, arrays.get("lengths")
    found: Arrays = {}
    assert cell.norm is not None
    if of_product(cell):
        assert h_in is not None
        _, T, B, P = h_in.shape
        # a: the numbers that the norm gets at each step, for each direction: h_in Wh^T, or this plus the input's part.
        Wh = arrays["Wh"].reshape(D, -1, P).astype(mx.float32)
        a = h_in.reshape(D, T * B, P).astype(mx.float32) @ mx.swapaxes(Wh, 1, 2)
        a = mx.swapaxes(a, 0, 1).reshape(T, B, -1)
        if cell.norm.of == "sum":
            a = a + without_padding(lengths, project(problem, arrays).astype(mx.float32))
        # Each direction's part of the last axis is normalised by itself: as a whole, or each gate by itself.
        y, r = normalised(a, D * norm_blocks(cell), cell.norm.eps)
        if cell.op == "gru":
            found["q"] = candidates(problem, arrays, y)
        found |= {"norm_y": without_padding(lengths, y.astype(h_in.dtype)), "norm_r": without_padding(lengths, r)}
    if of_state(cell):
        y, r = normalised(before_norm_of_c(problem, arrays, saved), D, cell.norm.eps)
        found |= {"norm_c_y": without_padding(lengths, y), "norm_c_r": without_padding(lengths, r)}
    return found


def candidates(problem: Problem, arrays: Arrays, y: mx.array) -> mx.array:
    """Return q [D, T, B, H], the normalised recurrent product of a GRU's candidate plus its bias bhn. y: the normalised
    products of all gates before scale and shift, [T, B, D 3H]."""
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
    """Return the numbers that the norm of c got at each step, [T, B, D H] in float32: c after its clip. If the
    normalised c is the state, the forward pass saved only the normalised c. Then c is computed again from the gates and
    from the state before the step."""
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
    """Return the arrays of norms for the backward kernels of `stepwise`, with fewer arrays than `numbers`, because
    Metal binds at most 31 arrays to one launch. norm_y and norm_c_y stay as they are. norm_r contains, for each
    direction, norm_r and behind it norm_c_r. norm_c [2, D, H] has the scale and the shift of the norm of c. numbers:
    the result of `numbers_before_sweep`."""
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
    """Return the results of the backward steps, with the arrays of norms under the names that `gradients_after_sweep`
    takes. For the norm of the products these are da (the gradient of its result), dp (the gradient of the products) and
    y (the normalised numbers). For the norm of c they are dn (the gradient of its result) and yc (the normalised c).
    results: the arrays that the backward steps wrote. numbers: the result of `numbers_before_sweep`.

    gates: the gates of a GRU, if the steps did not write d_out. In a GRU the norm's result for the candidate is
    multiplied by the gate r, so da is dz with the candidate's part times r.
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
    """Return dz [T, B, D 3H] of a GRU, with the candidate's block multiplied by the gate r. gates: as dz."""
    cell, (T, B), D, H = problem.cell, dz.shape[:2], problem.directions, problem.H
    r = gates.reshape(T, B, D, 3 * H)[..., cell.block("r", H)]
    factors = [r if gate == "n" else mx.ones_like(r) for gate in cell.gate_order]
    return dz * mx.concatenate(factors, axis=-1).reshape(dz.shape)


def memory_of(cell: AnyCell, H: int, lanes: int, rows: int) -> int:
    """Return how many bytes of threadgroup memory a `fused` kernel needs for norms: its simdgroups exchange sums there.
    Each norm has a pair of floats for each simdgroup and batch item; NormMemory in metal/fused_norm.metal describes the
    layout. H: the number of units. lanes: how many lanes share a unit. rows: the batch items of a threadgroup.

    For example, an LSTM with H = 96 and 4 lanes per unit has 12 simdgroups. With one norm for all gates, all 32 lanes
    of a simdgroup read the sums of this norm, so it has 32 places. With a norm of each gate, 8 lanes read the sums of
    one gate, so there are 4 norms of 16 places."""
    simdgroups = -(-H * lanes // 32)
    # every: every `every`-th lane has numbers of the same norm. It is 1 with one norm for all gates, `lanes` with a
    # norm of each gate.
    every = lanes if norm_blocks(cell) > 1 else 1
    # readers: how many lanes of a simdgroup read the sums of one norm. They divide the simdgroups among themselves.
    readers = 32 // every  # in the example 32, or 8
    places = -(-simdgroups // readers) * readers  # in the example 12, rounded up to 32, or 16
    of_lane = -(-cell.gates // lanes) if every > 1 else 1  # how many gates' norms each lane takes part in
    pairs = of_lane * [every * places] if of_product(cell) else []  # in the example [32], or [4 * 16]
    pairs += [32] if of_state(cell) else []  # the norm of c: one place for each of at most 32 simdgroups
    return sum(-(-count * rows // 2) * 16 for count in pairs)  # two pairs fill a vector of 16 bytes
