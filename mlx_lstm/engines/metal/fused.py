"""Engine `fused`: the recurrence on the GPU, the whole sequence in one launch of a Metal shader per sweep.

A threadgroup owns a few batch items of one direction and walks their steps with the recurrent weights in its registers.
The products over all T * B rows stay MLX's own. h and gates are stored in the dtype of the arrays, c in float32;
arithmetic is float32. All results are lazy, so the engine also runs inside `mx.compile` and exports. There is no
projection here.
"""

import mlx.core as mx

from ..cells import Cell, LSTMCell, RNNCell
from ..directions import half
from ..ops.sweep import gradients_after_sweep
from ..problem import Arrays, Problem
from .fused_launches import fused_backward, fused_forward, fused_pack, fused_tiling
from .gradients import candidates, gradients_in_few_launches, is_plain, recurrent_input, takes_product
from .inputs import constant, contiguous, project, whole_mask
from .launch import kept

LAUNCH_STEPS = 4096
"""Steps of one launch at most: macOS ends a launch that keeps the GPU from the display for too long. At the 1 to 10
microseconds a step is predicted to take up to H = 128 this is 4 to 40 ms; not measured."""

FEWEST_CORES = 8
"""Of the GPUs. Threadgroups beyond the cores wait for each other, so a launch of many has fewer steps."""


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """h [T, B, D H], gates [T, B, D G H], hT [B, D H], of an LSTM c [T, B, D H] and cT [B, D H] in float32; gates only
    if the problem keeps them."""
    fixed = options(problem, arrays) | {
        "z": project(arrays),
        "packed": fused_pack("forward", problem, contiguous(arrays["Wh"])),
        "numbers": numbers(problem.cell),
    }
    last, pieces = {"hT": contiguous(arrays.get("h0")), "cT": contiguous(arrays.get("c0"))}, []
    for start, stop in launches(problem._replace(lengths=None)):
        inputs = fixed | {"h0": last["hT"], "c0": last.get("cT"), "sizes": sizes(problem, fixed["mask"], start, stop)}
        piece = fused_forward(problem, inputs, stop - start)
        last = {name: piece.pop(name) for name in ("hT", "cT") if name in piece}
        pieces.append(piece)
    return {name: join(problem, [piece[name] for piece in pieces]) for name in pieces[0]} | last


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """The gradient of every array, from those of the outputs that have one (keys h, c, gates, hT, cT).

    Gates that nobody kept are computed again.
    """
    cell = problem.cell
    if saved.get("gates") is None and not isinstance(cell, RNNCell):
        saved = forward(problem._replace(training=True), arrays)
    d = {name: contiguous(cotangent) for name, cotangent in cotangents.items()}
    keeps, first = ("c", "c0") if isinstance(cell, LSTMCell) else ("h", "h0")
    few = is_plain(problem, arrays)
    taken = recurrent_input(problem, arrays, saved["h"]) if few or takes_product(cell) else {}
    fixed = options(problem, arrays) | {
        "gates": None if isinstance(cell, RNNCell) else contiguous(saved["gates"]),
        "states": contiguous(saved[keeps]),
        "first": contiguous(arrays.get(first)),
        "packed": fused_pack("backward", problem, contiguous(arrays["Wh"])),
        "dh": d.get("h"),
        "beside": candidates(problem, arrays, taken["h_in"]) if takes_product(cell) else d.get("c"),
        "dgates": d.get("gates"),
    }
    last, pieces = {"dh0": d.get("hT"), "dc0": d.get("cT")}, []
    for start, stop in reversed(launches(problem._replace(lengths=None))):
        after = {"dhT": last["dh0"], "dcT": last.get("dc0")}
        inputs = fixed | after | {"sizes": sizes(problem, fixed["mask"], start, stop)}
        last = fused_backward(problem, inputs, stop - start, keeps_d=few and takes_product(cell))
        pieces.append({name: last.pop(name) for name in ("dz", "d_out") if name in last})
    sweep = {name: join(problem, [piece[name] for piece in pieces[::-1]]) for name in pieces[0]} | last
    return (
        gradients_in_few_launches(problem, arrays, sweep | taken)
        if few
        else gradients_after_sweep(problem, arrays, saved, sweep)
    )


def options(problem: Problem, arrays: Arrays) -> dict[str, mx.array | None]:
    """What both sweeps read of the options."""
    return {
        "extra": contiguous(arrays.get("peephole", arrays.get("bhn"))),
        "mask": whole_mask(problem, arrays.get("mask")),
        "lengths": problem.lengths,
    }


def numbers(cell: Cell) -> mx.array | None:
    """An LSTM's forget bias and limit."""
    return constant((cell.forget_bias, cell.cell_clip or 0.0), mx.float32) if isinstance(cell, LSTMCell) else None


@kept
def launches(problem: Problem) -> list[tuple[int, int]]:
    """(start, stop) of every launch, counted in the order of processing."""
    T, B, H, D = problem.T, problem.B, problem.H, problem.directions
    groups = D * B // fused_tiling(problem.cell, B, H, 4, backward=False, directions=D).rows
    steps = max(1, LAUNCH_STEPS // max(1, groups // FEWEST_CORES))
    return [(start, min(start + steps, T)) for start in range(0, T, steps)]


def sizes(problem: Problem, mask: mx.array | None, start: int, stop: int) -> mx.array:
    """What a launch is told of sizes; metal/fused.metal lists them. Fewer than 8, for Metal's constant memory."""
    T, B, D = problem.T, problem.B, problem.directions
    return constant((start, stop, T, B, D, problem.reverse, mask is not None and mask.shape[0] > 1), mx.int32)


def join(problem: Problem, pieces: list[mx.array]) -> mx.array:
    """A sequence out of the launches' parts of it, these in the order of processing."""
    if len(pieces) == 1:
        return pieces[0]
    if problem.bidirectional:
        forward, reverse = ([half(piece, d) for piece in pieces] for d in range(2))
        return mx.concatenate([mx.concatenate(forward), mx.concatenate(reverse[::-1])], axis=-1)
    return mx.concatenate(pieces[::-1] if problem.reverse else pieces)
