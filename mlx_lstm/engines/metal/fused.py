"""Engine `fused`: the recurrence on the GPU, the whole sequence in one launch of a Metal shader per sweep.

A threadgroup owns a few batch items of one direction and walks their steps with the recurrent weights in its registers.
The products over all T * B rows stay MLX's own. h and gates are stored in the dtype of the arrays, c in float32;
arithmetic is float32. All results are lazy, so the engine also runs inside `mx.compile` and exports. There is no
projection here. Quantized recurrent weights stay packed, in registers as far as these go, but in matrices.
"""

from collections.abc import Collection

import mlx.core as mx

from ..cells import Cell, LSTMCell, RNNCell
from ..directions import half
from ..ops.packed import matrix, scales_of
from ..ops.sweep import gradients_after_sweep
from ..packing import is_packed
from ..problem import Arrays, Problem
from .fused_launches import fused_backward, fused_forward, fused_pack, fused_pack_words, tiling_of
from .gradients import candidates, gradients_in_few_launches, is_plain, recurrent_input, takes_product
from .inputs import constant, contiguous, project, takes_steps, whole_mask
from .launch import kept

FEWEST_CORES = 8
"""Of the GPUs. Threadgroups beyond the cores wait for each other, so a launch of many has fewer steps."""


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """h [T, B, D H], gates [T, B, D G H], hT [B, D H], of an LSTM c [T, B, D H] and cT [B, D H] in float32; gates only
    if the problem keeps them."""
    dtype, Wh = arrays["x"].dtype, arrays["Wh"]
    bare = bare_of(problem, arrays, dtype)
    if bare.packing is not None:
        packed = fused_pack_words(bare, Wh, *scales_of(arrays, "Wh", dtype))
    elif problem.packing is not None and is_packed("Wh", arrays):
        packed = fused_pack("forward", bare, matrix(problem.packing, arrays, "Wh", dtype))
    else:
        packed = fused_pack("forward", bare, Wh)
    fixed = options(problem, arrays) | {"packed": packed, "numbers": numbers(problem.cell)}
    parts = launches(bare, takes_steps(fixed["mask"]))
    fixed["z"] = project(problem, arrays, launches=len(parts))
    last, pieces = {"hT": arrays.get("h0"), "cT": arrays.get("c0")}, []
    for steps, sizes in parts:
        piece = fused_forward(bare, fixed | {"h0": last["hT"], "c0": last.get("cT"), "sizes": sizes}, steps)
        last = {name: piece.pop(name) for name in ("hT", "cT") if name in piece}
        pieces.append(piece)
    return join(problem, pieces) | last


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """The gradient of every array, from those of the outputs that have one (keys h, c, gates, hT, cT).

    Gates that nobody kept are computed again.
    """
    cell = problem.cell
    if saved.get("gates") is None and not isinstance(cell, RNNCell):
        saved = forward(problem._replace(training=True), arrays)
    bare = bare_of(problem)
    keeps, first = ("c", "c0") if isinstance(cell, LSTMCell) else ("h", "h0")
    few = is_plain(problem, arrays)
    taken = recurrent_input(problem, arrays, saved["h"]) if few or takes_product(cell) else {}
    sequences = {
        "gates": None if isinstance(cell, RNNCell) else saved["gates"],
        "states": saved[keeps],
        "first": arrays.get(first),
        "dh": cotangents.get("h"),
        "beside": candidates(problem, arrays, taken["h_in"]) if takes_product(cell) else cotangents.get("c"),
        "dgates": cotangents.get("gates"),
    }
    fixed = options(problem, arrays) | {"packed": fused_pack("backward", bare, arrays["Wh"])}
    parts = launches(bare, takes_steps(fixed["mask"]))
    fixed |= sequences if len(parts) == 1 else {name: contiguous(array) for name, array in sequences.items()}
    last, pieces = {"dh0": cotangents.get("hT"), "dc0": cotangents.get("cT")}, []
    for steps, sizes in reversed(parts):
        after = {"dhT": last["dh0"], "dcT": last.get("dc0"), "sizes": sizes}
        last = fused_backward(bare, fixed | after, steps, keeps_d=few and takes_product(cell))
        pieces.append({name: last.pop(name) for name in ("dz", "d_out", "carry") if name in last})
    sweep = join(problem, pieces[::-1]) | last
    return (
        gradients_in_few_launches(problem, arrays, sweep | taken)
        if few
        else gradients_after_sweep(problem, arrays, saved, sweep)
    )


def bare_of(problem: Problem, names: Collection[str] = (), dtype: mx.Dtype = mx.float32) -> Problem:
    """What launches need to know of a problem, which are kept by it; forward with the `names` of its arrays. It has a
    packing where they read packed weights. The product in matrices has floats, unpacked once: predicted to take half
    to four fifths of the time. Not for 16 bits, which would round them."""
    if problem.packing is None:
        return problem
    bare = problem._replace(packing=None)
    if not is_packed("Wh", names) or (dtype == mx.float32 and tiling_of("forward", bare, dtype).matrices):
        return bare
    return bare._replace(packing=problem.packing)


def options(problem: Problem, arrays: Arrays) -> dict[str, mx.array | None]:
    """What both sweeps read of the options."""
    return {
        "extra": contiguous(arrays.get("peephole", arrays.get("bhn"))),
        "mask": whole_mask(problem, arrays),
        "keep": None if problem.cell.op == "rnn" else contiguous(arrays.get("keep")),
        "lengths": arrays.get("lengths"),
    }


def numbers(cell: Cell) -> mx.array | None:
    """An LSTM's forget bias and limit."""
    return constant((cell.forget_bias, cell.cell_clip or 0.0), mx.float32) if isinstance(cell, LSTMCell) else None


@kept
def launches(problem: Problem, masks: bool) -> list[tuple[int, mx.array]]:
    """Of every launch, in the order of processing: its steps, and what it is told of sizes; metal/fused.metal lists
    them. Fewer than 8, for Metal's constant memory."""
    T, B, D = problem.T, problem.B, problem.directions
    groups = D * B // tiling_of("forward", problem, mx.float32).rows
    steps = max(1, problem.limits.launch_steps // max(1, groups // FEWEST_CORES))
    parts = [(start, min(start + steps, T)) for start in range(0, T, steps)]
    return [(stop - start, mx.array((start, stop, T, B, D, problem.reverse, masks), mx.int32)) for start, stop in parts]


def join(problem: Problem, parts: list[Arrays]) -> Arrays:
    """Sequences out of the launches' parts of them, these in the order of processing."""
    return parts[0] if len(parts) == 1 else {name: joined(problem, [part[name] for part in parts]) for name in parts[0]}


def joined(problem: Problem, pieces: list[mx.array]) -> mx.array:
    """One sequence."""
    if problem.bidirectional:
        forward, reverse = ([half(piece, d) for piece in pieces] for d in range(2))
        return mx.concatenate([mx.concatenate(forward), mx.concatenate(reverse[::-1])], axis=-1)
    return mx.concatenate(pieces[::-1] if problem.reverse else pieces)
