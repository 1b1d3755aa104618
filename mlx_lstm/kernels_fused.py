"""The launches of the `fused` shaders: one for all cells and both directions, forward and backward each."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .cells import Cell
from .kernels import Inputs, Outputs, cell_number, launch, select
from .problem import Problem

Arrays = dict[str, mx.array]

SWEEPS = ("forward", "backward")

LANES = {"lstm": 4, "gru": 4, "rnn": 1}
"""Lanes of a simdgroup that share a hidden unit; metal/*_fused_cell.metal say what each does."""

ARITHMETIC = {(op, sweep): (f"{op}_cell", f"{op}_cell_{sweep}") for op in ("lstm", "gru") for sweep in SWEEPS}
ARITHMETIC |= {("rnn", sweep): ("rnn_cell",) for sweep in SWEEPS}
"""The files of a cell's arithmetic."""

RESIDENT_BYTES = 150_000
"""Recurrent weights a GPU core is taken to hold in registers beside the rest; from published register files."""


class FusedTiling(NamedTuple):
    """How `fused` cuts a problem: hidden units that share lanes, batch rows of a threadgroup, threads of it, float4s of
    threadgroup memory, and of the runs of 4 weights that a lane has in a row how many stay in registers."""

    units: int
    rows: int
    threads: int
    vectors: int
    resident: int


def fused_tiling(cell: Cell, B: int, H: int, itemsize: int, *, backward: bool) -> FusedTiling:
    """The tiling of one sweep. More units per group share their loads of h; more rows their launch and weights."""
    lanes, gates = LANES[cell.op], cell.gates
    units = 8 // lanes * (2 if backward and lanes > 1 else 1)
    rows = 1 if B <= 16 else 2 if B <= 64 else 4
    group = lanes * units
    runs = -(-(gates * H if backward else H) // (4 * group))
    resident = max(1, min(runs, runs * RESIDENT_BYTES // (gates * H * H * itemsize)))
    threads = 32 * -(-(-(-H // units) * group) // 32)
    return FusedTiling(units, rows, threads, 2 * rows * group * runs, resident)


def fused_forward(problem: Problem, given: Inputs, steps: int) -> Arrays:
    """h, gates, hT and, of an LSTM, c and cT of the `steps` steps that `sizes` names, sequences of that many.

    Gates only if the problem keeps them; c and cT are float32. metal/fused.metal has the arrays.
    """
    inputs = select(given, "z h0 c0 Wh extra mask lengths sizes numbers")
    (_, B, H, _), D, cell = problem[:4], problem.directions, problem.cell
    dtype, has_c = inputs["z"].dtype, "c" in cell.outputs
    outputs = {
        "h": ((steps, B, D * H), dtype),
        "c": ((steps, B, D * H), mx.float32) if has_c else None,
        "gates": ((steps, B, D * cell.gates * H), dtype) if problem.training or problem.return_gates else None,
        "hT": ((B, D * H), dtype),
        "cT": ((B, D * H), mx.float32) if has_c else None,
    }
    return launch_fused("forward", problem, inputs, outputs, dtype)


def fused_backward(problem: Problem, given: Inputs, steps: int) -> Arrays:
    """dz, dh0 and, of an LSTM, dc0, float32, of the `steps` steps that `sizes` names; metal/fused_backward.metal."""
    inputs = select(given, "gates states first Wh_T extra mask lengths dh beside dgates dhT dcT sizes")
    (_, B, H, _), D, cell = problem[:4], problem.directions, problem.cell
    dtype = inputs["Wh_T"].dtype
    outputs = {
        "dz": ((steps, B, D * cell.gates * H), dtype),
        "dh0": ((B, D * H), dtype),
        "dc0": ((B, D * H), mx.float32) if "c" in cell.outputs else None,
    }
    return launch_fused("backward", problem, inputs, outputs, dtype)


def launch_fused(sweep: str, problem: Problem, inputs: Inputs, outputs: Outputs, dtype: mx.Dtype) -> Arrays:
    """Launch fused_forward or fused_backward over the steps that `sizes` names."""
    op, back = problem.cell.op, sweep == "backward"
    tiling = fused_tiling(problem.cell, problem.B, problem.H, dtype.size, backward=back)
    template = {
        "CELL": cell_number(problem.cell, inputs["extra"] is not None),
        "H": problem.H,
        "UNITS": tiling.units,
        "ROWS": tiling.rows,
        "RESIDENT": tiling.resident,
        "S": dtype,
    }
    threads = "thread_position_in_threadgroup.x, threads_per_threadgroup.x, thread_index_in_simdgroup"
    body = f"""threadgroup vec<float, 4> vectors[{tiling.vectors}];
fused_{sweep}<{", ".join(template)}>({{arrays}}, vectors, threadgroup_position_in_grid.xy, {threads});"""
    own = (f"{op}_fused_cell", f"{op}_fused_cell_backward") if back else (f"{op}_fused_cell",)
    shaders = ("cell", *ARITHMETIC[op, sweep], "fused", *own, f"fused_{sweep}")
    groups = (-(-problem.B // tiling.rows), problem.directions)
    names = [name for name, output in outputs.items() if output is not None]
    results = launch(f"{op}_fused_{sweep}", shaders, inputs, outputs, template, body, groups, tiling.threads)
    return dict(zip(names, results, strict=True))
