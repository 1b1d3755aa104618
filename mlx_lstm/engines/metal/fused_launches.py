"""The launches of the `fused` shaders: one for all cells and both directions, forward and backward each."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..cells import Cell, GRUCell
from ..problem import Arrays, Problem
from .launch import Inputs, Outputs, arguments, cell_number, launch, select

SWEEPS = ("forward", "backward")

LANES = {"lstm": 4, "gru": 4, "rnn": 1}
"""Lanes of a simdgroup that share a hidden unit; metal/fused_cell_*.metal say what each does."""

ARITHMETIC = {(op, sweep): (f"cell_{op}", f"cell_{op}_{sweep}") for op in ("lstm", "gru") for sweep in SWEEPS}
ARITHMETIC |= {("rnn", sweep): ("cell_rnn",) for sweep in SWEEPS}
"""The files of a cell's arithmetic."""

REGISTERS = {384: 128, 448: 116, 512: 104, 576: 92, 640: 80, 704: 72, 768: 68, 832: 60, 896: 56, 1024: 52}
"""Registers of 32 bits that a thread can have, by the most threads of its threadgroup: published for the M1."""

WORKING_REGISTERS = {"forward": {1: 44, 2: 64, 4: 96, 8: 60}, "backward": {1: 44, 2: 64, 4: 96, 8: 60}}
"""What a thread needs beside its weights."""

MATRIX_BATCH = 65
"""The smallest batch, of both directions together, for the form in 8 x 8 matrices. It needs 8 items per threadgroup, so
smaller batches would leave GPU cores without work. From a model of the hardware, not measured."""

THREADGROUP_BYTES = 32768
"""Metal's limit."""


INDEX_LIMIT = 2**31
"""Elements of an array of one launch from which on its indices have 64 bits instead of 32."""


class FusedTiling(NamedTuple):
    """How `fused` cuts a problem: whether it multiplies in 8 x 8 matrices; units that share lanes; batch rows of a
    threadgroup, and threads of it; how many vectors of its rows it keeps, and their bytes of threadgroup memory; how
    many vectors of 4 weights a lane has, how many of them stay in registers, and which part of all weights these are;
    the registers of a thread."""

    matrices: bool
    units: int
    rows: int
    threads: int
    vectors: int
    bytes: int
    weights: int
    resident: int
    kept: float
    registers: int


def fused_tiling(cell: Cell, B: int, H: int, itemsize: int, *, backward: bool, directions: int = 1) -> FusedTiling:
    """The tiling of one sweep. More units per group share their loads of h; more rows their launch and weights."""
    lanes, gates = LANES[cell.op], cell.gates
    matrices, before = in_matrices(cell, directions * B, H), two_products(cell)
    # The length of each product, and how many rows of weights a lane has in it.
    lengths = [H, 2 * H] if backward and before else [gates * H if backward else H]
    if matrices:
        units, rows, threads, piece = 8, 8, 32 * -(-H // 8), 8
        slots = 1 if backward else gates
        weights = -(-lengths[0] // 16) * slots
    else:
        units = 8 // lanes * (2 if backward and lanes > 1 else 1)
        rows = 1 if B <= 16 else 2 if B <= 64 else 4
        threads, piece = 32 * -(-(-(-H // units) * lanes * units) // 32), 4 * lanes * units
        slots = units * (1 if backward else gates)
        weights = slots * sum(-(-length // piece) for length in lengths)
    one = 4 * rows * piece * sum(-(-length // piece) for length in lengths)
    vectors = 1 if backward and (before or matrices and 2 * one > THREADGROUP_BYTES) else 2
    # A vector of 4 weights takes as many registers as a weight has bytes.
    free = registers_of(threads) - WORKING_REGISTERS["backward" if backward else "forward"][rows]
    resident = max(0, min(weights, free // itemsize))
    return FusedTiling(matrices, units, rows, threads, vectors, vectors * one, weights, resident, resident / weights, 0)


def tiling_of(sweep: str, problem: Problem, dtype: mx.Dtype) -> FusedTiling:
    """The tiling of a sweep of a problem."""
    sizes = problem.B, problem.H, dtype.size
    return fused_tiling(problem.cell, *sizes, backward=sweep == "backward", directions=problem.directions)


def two_products(cell: Cell) -> bool:
    """Whether a step has two products, one after the other: a GRU whose reset comes before the candidate's."""
    return isinstance(cell, GRUCell) and cell.reset == "before"


def registers_of(threads: int) -> int:
    """What a thread can have in a threadgroup of so many."""
    return REGISTERS[min(most for most in REGISTERS if most >= threads)]


def in_matrices(cell: Cell, B: int, H: int) -> bool:
    """Whether `fused` multiplies in matrices. A threadgroup has at most 32 simdgroups, of 8 units each; a GRU whose
    reset comes before the candidate's product has two products per step, which only the other form knows."""
    return B >= MATRIX_BATCH and H <= 256 and not two_products(cell)


def fused_forward(problem: Problem, given: Inputs, steps: int) -> Arrays:
    """h, gates, hT and, of an LSTM, c and cT of the `steps` steps that `sizes` names, sequences of that many.

    Gates only if the problem keeps them; c and cT are float32. metal/fused.metal has the arrays.
    """
    inputs = select(given, "z h0 c0 packed extra mask lengths sizes numbers")
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


def fused_backward(problem: Problem, given: Inputs, steps: int, *, keeps_d: bool) -> Arrays:
    """dz, dh0 and, of an LSTM, dc0, float32, of the `steps` steps that `sizes` names; metal/fused_backward.metal.

    If wanted also d_out [steps, B, D G H]: dz as the recurrent product had it.
    """
    inputs = select(given, "gates states first packed extra mask lengths dh beside dgates dhT dcT sizes")
    (_, B, H, _), D, cell = problem[:4], problem.directions, problem.cell
    dtype = inputs["packed"].dtype
    outputs = {
        "dz": ((steps, B, D * cell.gates * H), dtype),
        "d_out": ((steps, B, D * cell.gates * H), dtype) if keeps_d else None,
        "dh0": ((B, D * H), dtype),
        "dc0": ((B, D * H), mx.float32) if "c" in cell.outputs else None,
    }
    return launch_fused("backward", problem, inputs, outputs, dtype)


def fused_pack(sweep: str, problem: Problem, Wh: mx.array) -> mx.array:
    """Wh as the lanes of a sweep read it, [D, simdgroups, vectors, 32, 4]; metal/fused_pack.metal."""
    op, D, tiling = problem.cell.op, problem.directions, tiling_of(sweep, problem, Wh.dtype)
    outputs = {"packed": ((D, tiling.threads // 32, tiling.weights, 32, 4), Wh.dtype)}
    template = {"CELL": cell_number(problem.cell), "H": problem.H, "UNITS": tiling.units}
    template |= {"COUNT": tiling.weights, "BACK": sweep == "backward", "MATRICES": tiling.matrices, "S": Wh.dtype}
    body = f"fused_pack<{', '.join(template)}>({{arrays}}, thread_position_in_grid.xy, threads_per_threadgroup.x);"
    shaders = ("cell", *ARITHMETIC[op, "forward"], "fused", "fused_matrix", f"{op}_fused_cell", "fused_pack")
    groups = (tiling.weights, D)
    return launch(f"{op}_fused_pack", shaders, {"Wh": Wh}, outputs, template, body, groups, tiling.threads)[0]


def launch_fused(sweep: str, problem: Problem, inputs: Inputs, outputs: Outputs, dtype: mx.Dtype) -> Arrays:
    """Launch fused_forward or fused_backward over the steps that `sizes` names."""
    op, D, back = problem.cell.op, problem.directions, sweep == "backward"
    tiling = tiling_of(sweep, problem, dtype)
    steps = next(iter(outputs.values()))[0][0]
    elements = steps * problem.B * D * problem.cell.gates * problem.H
    template = {"CELL": cell_number(problem.cell, inputs["extra"] is not None), "H": problem.H}
    if tiling.matrices:
        form, element = "matrix_", "float"
        template |= {"RESIDENT": tiling.resident} | ({"VECTORS": tiling.vectors} if back else {})
    else:
        form, element = "", "vec<float, 4>"
        template |= {"UNITS": tiling.units, "ROWS": tiling.rows, "RESIDENT": tiling.resident}
    template |= {"Index": mx.uint32 if elements < INDEX_LIMIT else mx.uint64, "S": dtype}
    function, size = f"fused_{form}{sweep}", tiling.bytes // (4 if tiling.matrices else 16)
    threads = "thread_position_in_threadgroup.x, threads_per_threadgroup.x"
    threads += ", thread_index_in_simdgroup" if tiling.matrices else ""
    arrays = arguments(inputs | outputs)
    body = f"""threadgroup {element} vectors[{size}];
{function}<{", ".join(template)}>({arrays}, vectors, threadgroup_position_in_grid.xy, {threads});"""
    own = (f"fused_cell_{op}", f"fused_cell_{op}_backward") if back else (f"fused_cell_{op}",)
    common = ("fused", "fused_matrix") if tiling.matrices else ("fused",)
    shaders = ("cell", "store", *ARITHMETIC[op, sweep], *common, *own, function)
    groups = (-(-problem.B // tiling.rows), D)
    names = [name for name, output in outputs.items() if output is not None]
    results = launch(f"{op}_{function}", shaders, inputs, outputs, template, body, groups, tiling.threads)
    return dict(zip(names, results, strict=True))
