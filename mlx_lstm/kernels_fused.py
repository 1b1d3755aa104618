"""The launches of the `fused` shaders, each function named like the shader."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .kernels import Inputs, Outputs, cell_number, launch, select
from .problem import Problem

RESIDENT_BYTES = 150_000
"""Recurrent weights a GPU core is taken to hold in registers beside the rest; from published register files."""


class FusedTiling(NamedTuple):
    """How `fused` cuts a problem: hidden units that share lanes, batch rows of a threadgroup, threads of it, float4s of
    threadgroup memory, and of the runs of 4 weights that a lane has in a row how many stay in registers."""

    units: int
    rows: int
    threads: int
    state: int
    resident: int


def fused_tiling(B: int, H: int, itemsize: int, *, backward: bool) -> FusedTiling:
    """The tiling of one sweep. More units per group share their loads of h; more rows their launch and weights."""
    units = 4 if backward else 2
    rows = 1 if B <= 16 else 2 if B <= 64 else 4
    runs = -(-(4 * H if backward else H) // (16 * units))
    resident = max(1, min(runs, runs * RESIDENT_BYTES // (4 * H * H * itemsize)))
    threads = 32 * -(-(-(-H // units) * 4 * units) // 32)
    return FusedTiling(units, rows, threads, 2 * rows * 4 * units * runs, resident)


def lstm_fused_forward(problem: Problem, given: Inputs, steps: int) -> list[mx.array]:
    """(h, c float32, gates, hT, cT float32) of the `steps` steps that `sizes` names; see metal/lstm_fused.metal."""
    inputs = select(given, "z h0 c0 Wh peephole mask lengths sizes numbers")
    _, B, H, _ = problem[:4]
    dtype = inputs["z"].dtype
    outputs = {
        "h": ((steps, B, H), dtype),
        "c": ((steps, B, H), mx.float32),
        "gates": ((steps, B, 4 * H), dtype),
        "hT": ((B, H), dtype),
        "cT": ((B, H), mx.float32),
    }
    return launch_fused("lstm_fused_forward", "lstm_cell_forward", problem, inputs, outputs, dtype)


def lstm_fused_backward(problem: Problem, given: Inputs, steps: int) -> list[mx.array]:
    """(dz, dh0, dc0 float32) of the `steps` steps that `sizes` names; see metal/lstm_fused_backward.metal."""
    inputs = select(given, "gates c c0 Wh_T peephole mask lengths dh dc dgates dhT dcT sizes")
    _, B, H, _ = problem[:4]
    dtype = inputs["gates"].dtype
    outputs = {"dz": ((steps, B, 4 * H), dtype), "dh0": ((B, H), dtype), "dc0": ((B, H), mx.float32)}
    return launch_fused("lstm_fused_backward", "lstm_cell_backward", problem, inputs, outputs, dtype)


def launch_fused(
    shader: str, cell: str, problem: Problem, inputs: Inputs, outputs: Outputs, dtype: mx.Dtype
) -> list[mx.array]:
    """Launch a shader over the steps that `sizes` names; `cell` is the file of its arithmetic."""
    tiling = fused_tiling(problem.B, problem.H, dtype.size, backward=shader == "lstm_fused_backward")
    template = {
        "CELL": cell_number(problem.cell, inputs["peephole"] is not None),
        "H": problem.H,
        "UNITS": tiling.units,
        "ROWS": tiling.rows,
        "RESIDENT": tiling.resident,
        "REVERSE": problem.reverse,
        "S": dtype,
    }
    thread = "threadgroup_position_in_grid.x, thread_position_in_threadgroup.x, threads_per_threadgroup.x"
    body = f"""threadgroup vec<float, 4> state[{tiling.state}];
{shader}<{", ".join(template)}>({{arrays}}, state, {thread}, thread_index_in_simdgroup);"""
    shaders = ("cell", "lstm_cell", cell, "lstm_fused", shader)
    groups = (-(-problem.B // tiling.rows), 1)
    return launch(shader, shaders, inputs, outputs, template, body, groups, tiling.threads)
