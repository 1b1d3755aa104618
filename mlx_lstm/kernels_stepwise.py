"""The launches of the `stepwise` shaders, each function named like the shader."""

from __future__ import annotations

import mlx.core as mx

from .kernels import Inputs, Outputs, cell_number, launch, select
from .problem import Problem

GROUP = "threadgroup_position_in_grid.xy"
LANE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"


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
    shaders = ("cell", "lstm_cell", *before, "lstm_product_by_lanes" if lanes else "lstm_product_by_tiles", shader)
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
