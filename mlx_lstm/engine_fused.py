"""Engine `fused`: the recurrence on the GPU, the whole sequence in one launch of a Metal shader per sweep.

A threadgroup owns a few batch items and walks their steps with the recurrent weights in its registers. The products
over all T * B rows stay MLX's own. h and gates are stored in the dtype of the arrays, c in float32; arithmetic is
float32. All results are lazy, so the engine also runs inside `mx.compile` and exports. There is no projection here.
"""

from __future__ import annotations

import mlx.core as mx

from . import kernels_fused
from .engine_ops import Arrays, gradients_after_sweep, project
from .kernel_inputs import contiguous, whole_mask
from .problem import Problem

LAUNCH_STEPS = 4096
"""Steps of one launch at most: macOS ends a launch that keeps the GPU from the display for too long. At the 1 to 10
microseconds a step is predicted to take this is 4 to 40 ms; not measured."""


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """h [T, B, H], c [T, B, H] float32, gates [T, B, 4H], hT [B, H], cT [B, H] float32."""
    cell = problem.cell
    fixed = options(problem, arrays) | {
        "z": contiguous(project(arrays)),
        "Wh": contiguous(arrays["Wh"]),
        "numbers": mx.array([cell.forget_bias, cell.cell_clip or 0.0], mx.float32),
    }
    h, c, pieces = contiguous(arrays.get("h0")), contiguous(arrays.get("c0")), []
    for start, stop in launches(problem):
        inputs = fixed | {"h0": h, "c0": c, "sizes": sizes(problem, fixed["mask"], start, stop)}
        *sequences, h, c = kernels_fused.lstm_fused_forward(problem, inputs, stop - start)
        pieces.append(sequences)
    in_time = reversed(pieces) if problem.reverse else pieces
    sequences = zip(("h", "c", "gates"), zip(*in_time, strict=True), strict=True)
    return {name: join(parts) for name, parts in sequences} | {"hT": h, "cT": c}


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """The gradient of every array, from those of the outputs that have one (keys h, c, gates, hT, cT)."""
    d = {name: contiguous(cotangent) for name, cotangent in cotangents.items()}
    fixed = options(problem, arrays) | {
        "gates": contiguous(saved["gates"]),
        "c": contiguous(saved["c"]),
        "c0": contiguous(arrays.get("c0")),
        "Wh_T": contiguous(arrays["Wh"].T),
        "dh": d.get("h"),
        "dc": d.get("c"),
        "dgates": d.get("gates"),
    }
    dh, dc, pieces = d.get("hT"), d.get("cT"), []
    for start, stop in reversed(launches(problem)):
        inputs = fixed | {"dhT": dh, "dcT": dc, "sizes": sizes(problem, fixed["mask"], start, stop)}
        dz, dh, dc = kernels_fused.lstm_fused_backward(problem, inputs, stop - start)
        pieces.append(dz)
    dz = join(pieces if problem.reverse else pieces[::-1])
    return gradients_after_sweep(problem, arrays, saved, {"dz": dz, "dh0": dh, "dc0": dc})


def options(problem: Problem, arrays: Arrays) -> dict[str, mx.array | None]:
    """What both sweeps read of the options."""
    peephole, mask = arrays.get("peephole"), arrays.get("mask")
    return {
        "peephole": contiguous(peephole),
        "mask": whole_mask(problem, mask),
        "lengths": problem.lengths,
    }


def launches(problem: Problem) -> list[tuple[int, int]]:
    """(start, stop) of every launch, counted in the order of processing."""
    return [(start, min(start + LAUNCH_STEPS, problem.T)) for start in range(0, problem.T, LAUNCH_STEPS)]


def sizes(problem: Problem, mask: mx.array | None, start: int, stop: int) -> mx.array:
    """What a launch is told of sizes: start, stop, T, B, mask_step."""
    mask_step = problem.B * problem.H if mask is not None and mask.shape[0] > 1 else 0
    return mx.array([start, stop, problem.T, problem.B, mask_step], mx.int32)


def join(pieces: list[mx.array]) -> mx.array:
    """The launches' parts of a sequence as one."""
    return pieces[0] if len(pieces) == 1 else mx.concatenate(list(pieces))
