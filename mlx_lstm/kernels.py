"""The launches of the Metal shaders, each function named like the shader. The only place that calls `metal_kernel`.

A kernel's text is the shader files it needs, without comments, and a body of one call. It is built at its first launch
and kept: MLX rebuilds and hashes the text on every call, so that of a launch per time step has to be short.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .cells import ACTIVATIONS, LSTMCell
from .problem import Problem

Inputs = dict[str, "mx.array | None"]
Outputs = dict[str, tuple[tuple[int, ...], mx.Dtype]]

GROUP = "threadgroup_position_in_grid.xy"
LANE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"


# --- Building and launching ------------------------------------------------------------------------------------------


@cache
def shader_file(name: str) -> str:
    """A file of metal/, which lies in the package of a wheel and beside that of a checkout."""
    packaged = files("mlx_lstm") / "metal"
    folder = packaged if packaged.is_dir() else Path(__file__).parents[1] / "metal"
    return (folder / f"{name}.metal").read_text(encoding="ascii")


def header(names: tuple[str, ...]) -> str:
    """These files, one after the other, without comments, blank lines and indentation."""
    text = "\n".join(shader_file(name) for name in names)
    lines = (line.strip() for line in re.sub(r"//.*", "", text).splitlines())
    return "\n".join(line for line in lines if line) + "\n"


@cache
def build(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, shaders: tuple[str, ...]):
    """The kernel of this text; the name tells apart all texts of one shader, as MLX caches compiled code by it."""
    return mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=source, header=header(shaders)
    )


def launch(
    shader: str,
    shaders: tuple[str, ...],
    inputs: Inputs,
    outputs: Outputs,
    template: dict[str, int | bool | mx.Dtype],
    body: str,
    groups: tuple[int, int],
    threads: int,
) -> list[mx.array]:
    """Launch a shader on groups x threads threads.

    `body` is its call, with {arrays} for the inputs in their order and then the outputs; `absent` stands for an input
    that is `None`.
    """
    present = {name: array for name, array in inputs.items() if array is not None}
    missing = [name for name in inputs if name not in present]
    arguments = [name if name in present else "absent" for name in inputs]
    source = body.format(arrays=", ".join([*arguments, *outputs]))
    name = "_".join([shader, "without", *missing]) if missing else shader
    kernel = build(name, tuple(present), tuple(outputs), source, shaders)
    return kernel(
        inputs=list(present.values()),
        template=list(template.items()),
        grid=(groups[0] * threads, groups[1], 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
    )


def select(given: Inputs, names: str) -> Inputs:
    """The inputs of a shader, in the order of its parameters."""
    return {name: given[name] for name in names.split()}


def cell_number(cell: LSTMCell, peephole: bool) -> int:
    """The options of a cell as the template number CELL; metal/lstm_cell.metal has its bits."""
    number = sum(cell.gate_order.index(gate) << 2 * k for k, gate in enumerate("ifgo"))
    number += sum(ACTIVATIONS.index(name) << 8 + 3 * k for k, name in enumerate(cell.activations))
    number += ((1 if cell.output_peephole == "current" else 2) if peephole else 0) << 23
    return number + ((cell.cell_clip is not None) << 25)


# --- stepwise --------------------------------------------------------------------------------------------------------


def stepwise_rows(B: int) -> int:
    """Batch rows per threadgroup. Below 8 the product runs by lanes, else in 8 x 8 matrices."""
    return 1 if B == 1 else 4 if B < 8 else 8 if B < 32 else 32


def launch_step(
    shader: str,
    before: tuple[str, ...],
    inputs: Inputs,
    outputs: Outputs,
    template: dict[str, int | bool | mx.Dtype],
    rows: int,
    columns: int,
    groups: tuple[int, int],
) -> list[mx.array]:
    """Launch a shader that begins with lstm_product; `columns` are its product's, `before` names the files it needs."""
    lanes = rows < 8
    shaders = ("lstm_cell", *before, "lstm_product_by_lanes" if lanes else "lstm_product_by_tiles", shader)
    tiles = 1 if lanes else 36 * (rows + columns)
    body = f"""threadgroup float sums[{rows * columns}], tiles[{tiles}];
{shader}<{", ".join(template)}>({{arrays}}, sums, tiles, {GROUP}, {LANE});"""
    return launch(shader, shaders, inputs, outputs, template, body, groups, 256 if lanes else 128)


def lstm_stepwise_forward(problem: Problem, given: Inputs) -> list[mx.array]:
    """(m [B, H], c [B, H] float32, gates [B, 4H]) of one step; metal/lstm_stepwise_forward.metal has the inputs."""
    inputs = select(given, "step z h_prev c_prev Wh h0 c0 peephole mask lengths sizes numbers")
    _, B, H, _ = problem[:4]
    rows, dtype = stepwise_rows(B), inputs["z"].dtype
    template = {
        "CELL": cell_number(problem.cell, inputs["peephole"] is not None),
        "ROWS": rows,
        "REVERSE": problem.reverse,
        "S": dtype,
    }
    outputs = {"m": ((B, H), dtype), "c": ((B, H), mx.float32), "gates": ((B, 4 * H), dtype)}
    groups = (-(-H // 8), -(-B // rows))
    return launch_step("lstm_stepwise_forward", ("lstm_cell_forward",), inputs, outputs, template, rows, 32, groups)


def lstm_stepwise_backward(problem: Problem, given: Inputs, *, projected: bool) -> list[mx.array]:
    """(dz [B, 4H], dc_prev [B, H] float32) of one step; metal/lstm_stepwise_backward.metal has the inputs."""
    names = "step a weights gates c c_prev c0 peephole mask lengths dh dc dgates dhT dc_next sizes"
    inputs = select(given, names)
    _, B, H, _ = problem[:4]
    rows, dtype = stepwise_rows(B), inputs["gates"].dtype
    units = 8 if rows < 8 else 32
    template = {
        "CELL": cell_number(problem.cell, inputs["peephole"] is not None),
        "ROWS": rows,
        "UNITS": units,
        "REVERSE": problem.reverse,
        "PROJECTED": projected,
        "S": dtype,
    }
    outputs = {"dz": ((B, 4 * H), dtype), "dc_prev": ((B, H), mx.float32)}
    files = ("lstm_cell_backward", "lstm_stepwise_sum")
    groups = (-(-H // units), -(-B // rows))
    return launch_step("lstm_stepwise_backward", files, inputs, outputs, template, rows, units, groups)


def lstm_stepwise_dh(problem: Problem, given: Inputs) -> mx.array:
    """dh_t [B, P] of one step under a projection; metal/lstm_stepwise_backward.metal has the inputs."""
    inputs = select(given, "step a weights mask lengths dh dhT sizes")
    _, B, _, P = problem[:4]
    rows, dtype = stepwise_rows(B), inputs["a"].dtype
    units = 8 if rows < 8 else 32
    template = {"ROWS": rows, "UNITS": units, "REVERSE": problem.reverse, "S": dtype}
    files = ("lstm_stepwise_sum",)
    groups = (-(-P // units), -(-B // rows))
    outputs = {"dh_t": ((B, P), dtype)}
    return launch_step("lstm_stepwise_dh", files, inputs, outputs, template, rows, units, groups)[0]


# --- fused -----------------------------------------------------------------------------------------------------------

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
    shaders = ("lstm_cell", cell, "lstm_fused", shader)
    groups = (-(-problem.B // tiling.rows), 1)
    return launch(shader, shaders, inputs, outputs, template, body, groups, tiling.threads)
