"""The launches of the `stepwise` shaders, each function named like the shader."""

from __future__ import annotations

import mlx.core as mx

from ..cells import GRUCell
from ..problem import Arrays, Problem
from .launch import Inputs, Outputs, cell_number, launch, select
from .stepwise_rows import JOINED, LEFT, Rows, starts_of

Kind = tuple[Rows, int]
"""Rows that hold the same, and the width of the units in them."""

LANE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"

UNITS = {"lstm": 8, "gru": 8, "rnn": 32}
"""Hidden units of a threadgroup, forward; as metal/stepwise_cell_*.metal have them."""


def stepwise_rows(B: int) -> int:
    """Batch rows per threadgroup. Below 8 the product runs by lanes, else in 8 x 8 matrices."""
    return 1 if B == 1 else 4 if B < 8 else 8 if B < 32 else 32


def row_type(dtype: mx.Dtype) -> mx.Dtype:
    """What the numbers of a row are that holds floats and arrays of this dtype."""
    return mx.float32 if dtype == mx.float32 else mx.uint16


def row_length(problem: Problem, width: int, arrays: int, carries: bool, dtype: mx.Dtype) -> int:
    """Numbers of a row: `arrays` arrays [B, D width], and one of floats if it carries something. 8 at least, as Metal
    binds fewer in another address space."""
    words = 4 // dtype.size if carries else 0
    return max(8, problem.B * problem.directions * width * (arrays + words))


# --- A launch per step -----------------------------------------------------------------------------------------------


def launch_step(
    name: str,
    shaders: tuple[str, ...],
    problem: Problem,
    inputs: Inputs,
    output: tuple[int, mx.Dtype],
    template: dict[str, int | bool | mx.Dtype],
    units: tuple[int, int, int],
    pieces: Rows | None = None,
) -> mx.array:
    """Launch a shader around a product, the last of `shaders`; it writes an array of `output` numbers.

    Its threadgroups have units[1] of the units[0] units, and units[2] columns of the product. The array becomes a row
    of `pieces`, some of which threadgroups of their own join if that is due.
    """
    shader, rows = shaders[-1], stepwise_rows(problem.B)
    lanes = rows < 8
    threads = 256 if lanes else 4 * units[2]
    tiles = 1 if lanes else 36 * (rows + units[2])
    groups = -(-units[0] // units[1]), -(-problem.B // rows), problem.directions
    numbers = ", ".join(name for name in template if name != "X")
    call = f"{shader}<{numbers}>({{arrays}}, sums, tiles, group, {LANE});"
    product = f"stepwise_product_by_{'lanes' if lanes else 'tiles'}"
    shaders = ("cell", *shaders[:-1], product, shader)
    outputs: Outputs = {"after": ((output[0],), output[1])}
    due = pieces.pieces[pieces.due()] if pieces else []
    beside, joined, body = {}, {}, call
    if due:
        beside, joined, body, more = join_beside(due, output, call, groups, threads)
        groups, shaders = (groups[0] + more, *groups[1:]), (*shaders, "stepwise_join")
    body = f"""threadgroup float sums[{rows * units[2]}], tiles[{tiles}];
uint3 group = threadgroup_position_in_grid;
{body}"""
    name = f"{name}_joining" if due else name
    results = launch(name, shaders, inputs, outputs, template, body, groups, threads, beside, joined)
    if pieces:
        pieces.add(*results)
    return results[0]


def join_beside(
    due: list, output: tuple[int, mx.Dtype], call: str, groups: tuple[int, int, int], threads: int
) -> tuple[Inputs, Outputs, str, int]:
    """Inputs, outputs and body of a launch that joins pieces beside its call, and the groups that takes along x."""
    length, steps = output[0], sum(piece.steps for piece in due)
    more = max(1, min(64, length * steps // (8 * threads)))
    arrays = [piece.array for piece in due] + [due[-1].array] * (JOINED - len(due))
    inputs = {f"p{n}": array for n, array in enumerate(arrays)}
    names = ", ".join(inputs)
    starts = [length * start for start in starts_of(due, JOINED)]
    first = [groups[0], threads, more * threads]
    inputs |= {"starts": mx.array(starts, mx.int64), "first": mx.array(first, mx.uint32)}
    body = f"""if (group.x < first[0]) {call}
else {{{{
const Pieces<X> pieces = {{{{{{{{{names}}}}}}}}};
stepwise_join(pieces, starts, first, joined, group, thread_index_in_threadgroup);
}}}}"""
    return inputs, {"joined": ((steps * length,), output[1])}, body, more


def stepwise_forward(problem: Problem, given: Inputs, pieces: Rows) -> mx.array:
    """The row of one step; metal/stepwise_forward.metal has the inputs and what is in it."""
    inputs = select(given, "step z before h_before Wh h0 c0 extra mask lengths sizes numbers")
    cell, op, dtype = problem.cell, problem.cell.op, inputs["z"].dtype
    keeps, carries = problem.training or problem.return_gates, "c" in problem.cell.outputs
    template = {
        "CELL": cell_number(cell, inputs["extra"] is not None),
        "ROWS": stepwise_rows(problem.B),
        "KEEPS": keeps,
        "S": dtype,
        "X": row_type(dtype),
    }
    length = row_length(problem, problem.H, 1 + cell.gates if keeps else 1, carries, dtype)
    files = (*cell_files(op, "forward"), "stepwise", "stepwise_previous", f"stepwise_cell_{op}", "stepwise_forward")
    units = problem.H, UNITS[op], UNITS[op] * cell.gates
    return launch_step(
        f"{op}_stepwise_forward", files, problem, inputs, (length, row_type(dtype)), template, units, pieces
    )


def stepwise_gru_reset(problem: Problem, given: Inputs) -> mx.array:
    """r * mask * h_before, r, z [3, B, D H] of one step, flat; metal/stepwise_gru_reset.metal has the inputs."""
    inputs = select(given, "step z before Wh h0 mask lengths sizes")
    dtype = inputs["z"].dtype
    template = {"CELL": cell_number(problem.cell), "ROWS": stepwise_rows(problem.B), "S": dtype}
    output = row_length(problem, problem.H, 3, False, dtype), dtype
    files = (*cell_files("gru", "forward"), "stepwise", "stepwise_previous", "stepwise_gru_reset")
    return launch_step("stepwise_gru_reset", files, problem, inputs, output, template, (problem.H, 16, 32))


def stepwise_gru_candidate(problem: Problem, given: Inputs, pieces: Rows) -> mx.array:
    """The row of one step; metal/stepwise_gru_candidate.metal has the inputs and what is in it."""
    inputs = select(given, "step z before reset_row Wh h0 lengths sizes")
    dtype, keeps = inputs["z"].dtype, problem.training or problem.return_gates
    template = {"CELL": cell_number(problem.cell), "ROWS": stepwise_rows(problem.B), "KEEPS": keeps, "S": dtype}
    output = row_length(problem, problem.H, 4 if keeps else 1, False, dtype), row_type(dtype)
    files = (*cell_files("gru", "forward"), "stepwise", "stepwise_gru_candidate")
    template |= {"X": row_type(dtype)}
    return launch_step("stepwise_gru_candidate", files, problem, inputs, output, template, (problem.H, 32, 32), pieces)


def stepwise_gru_reset_backward(problem: Problem, given: Inputs, pieces: Rows) -> mx.array:
    """The row of one step back; metal/stepwise_gru_reset_backward.metal has the inputs."""
    inputs = select(given, "step now_row weights gates states states0 mask lengths sizes")
    dtype, columns = inputs["weights"].dtype, columns_of(problem.B)
    template = backward_template(problem, False, dtype) | {"X": row_type(dtype)}
    output = row_length(problem, problem.H, 3, True, dtype), row_type(dtype)
    files = (*cell_files("gru", "backward"), "stepwise", "stepwise_gru_reset_backward")
    units = problem.H, columns, columns
    return launch_step("stepwise_gru_reset_backward", files, problem, inputs, output, template, units, pieces)


def stepwise_project(problem: Problem, given: Inputs, pieces: Rows) -> mx.array:
    """A row with h [B, D P] of one step; metal/stepwise_project.metal has the inputs."""
    inputs = select(given, "step before Wp sizes")
    dtype = inputs["Wp"].dtype
    columns = columns_of(problem.B)
    template = {"ROWS": stepwise_rows(problem.B), "COLUMNS": columns, "S": dtype, "X": row_type(dtype)}
    output = row_length(problem, problem.P, 1, False, dtype), row_type(dtype)
    files = ("stepwise", "stepwise_project")
    units = problem.P, columns, columns
    return launch_step("lstm_stepwise_project", files, problem, inputs, output, template, units, pieces)


def stepwise_backward(problem: Problem, given: Inputs, pieces: Rows | None) -> mx.array:
    """The row of one step back; metal/stepwise_backward.metal has the inputs and what is in it."""
    names = "step before dh_now weights gates states states0 q extra mask lengths dh dc dgates dhT dcT sizes"
    inputs = select(given, names)
    cell, op, dtype = problem.cell, problem.cell.op, inputs["weights"].dtype
    columns = columns_of(problem.B)
    template = backward_template(problem, inputs["extra"] is not None, dtype) | {"X": row_type(dtype)}
    output = row_length(problem, problem.H, cell.gates, op != "rnn", dtype), row_type(dtype)
    units = problem.H, columns, columns
    files = (*backward_files(problem), "stepwise_backward")
    return launch_step(f"{op}_stepwise_backward", files, problem, inputs, output, template, units, pieces)


def stepwise_dh(problem: Problem, given: Inputs, pieces: Rows | None = None) -> mx.array:
    """A row with dh_t [B, D P] of one step or, without pieces, dh0, flat; metal/stepwise_dh.metal has the inputs."""
    inputs = select(given, "step before weights gates mask lengths dh dhT sizes")
    op, dtype = problem.cell.op, inputs["weights"].dtype
    columns = columns_of(problem.B)
    template = backward_template(problem, False, dtype) | {"X": row_type(dtype)}
    output = row_length(problem, problem.P, 1, False, dtype), row_type(dtype) if pieces else dtype
    units = problem.P, columns, columns
    return launch_step(
        f"{op}_stepwise_dh", (*backward_files(problem), "stepwise_dh"), problem, inputs, output, template, units, pieces
    )


def columns_of(B: int) -> int:
    """Columns of a threadgroup's product where the cells need one each."""
    return 8 if stepwise_rows(B) < 8 else 32


def backward_template(problem: Problem, peephole: bool, dtype: mx.Dtype) -> dict[str, int | bool | mx.Dtype]:
    """Template numbers of the steps back."""
    columns = columns_of(problem.B)
    return {
        "CELL": cell_number(problem.cell, peephole),
        "ROWS": stepwise_rows(problem.B),
        "COLUMNS": columns,
        "S": dtype,
    }


def cell_files(op: str, sweep: str) -> tuple[str, ...]:
    """The files of a cell's arithmetic."""
    return ("cell_rnn",) if op == "rnn" else (f"cell_{op}", f"cell_{op}_{sweep}")


def backward_files(problem: Problem) -> tuple[str, ...]:
    """The files of a step back, before the shader."""
    op = problem.cell.op
    own = "gru_before" if resets_before(problem) else op
    return *cell_files(op, "backward"), "stepwise", "stepwise_following", f"stepwise_cell_{own}_backward"


def resets_before(problem: Problem) -> bool:
    """Whether a step is two launches for its cell's sake: a GRU whose reset comes before the candidate's product."""
    return isinstance(problem.cell, GRUCell) and problem.cell.reset == "before"


# --- A launch per sweep ----------------------------------------------------------------------------------------------


def launch_sequences(
    name: str,
    shaders: tuple[str, ...],
    problem: Problem,
    kinds: list[Kind],
    inputs: Inputs,
    outputs: Outputs,
    template: dict[str, int | bool | mx.Dtype],
    calls: list[str],
) -> Arrays:
    """Launch shaders over the rows that are left of all kinds, with a thread per item, unit, step and direction."""
    pieces = [piece for rows, *_ in kinds for piece in rows.pieces]
    left = [piece.array for piece in pieces]
    arrays = {f"piece{n}": array for n, array in enumerate(left + left[-1:] * (LEFT - len(left)))}
    numbers = [(rows.pieces[-1].array.size, width, n * problem.T) for n, (rows, width) in enumerate(kinds)]
    more = {"starts": mx.array(starts_of(pieces, LEFT), mx.int32), "kinds": mx.array(sum(numbers, ()), mx.int32)}
    body = f"const Rows<X> rows = {{{{{{{{{', '.join(arrays)}}}}}}}}};\n" + "\n".join(calls)
    template = template | {"X": left[-1].dtype}
    groups = -(-problem.B * max(width for _, width in kinds) // 256), problem.T, problem.directions
    shaders = ("cell", "store", "stepwise", "stepwise_sequences", *shaders)
    found = launch(name, shaders, inputs, outputs, template, body, groups, 256, arrays | more)
    return dict(zip((name for name, output in outputs.items() if output), found, strict=True))


def stepwise_outputs(problem: Problem, given: Inputs, kinds: list[Kind], *, names: set[str]) -> Arrays:
    """Those of h, c, gates, hT, cT in `names`, out of the rows of a sweep: the cells' and, if it projects, h's."""
    inputs = select(given, "h0 c0 lengths sizes")
    (T, B, H, P), D, gates = problem[:4], problem.directions, problem.cell.gates
    dtype = given["Wh"].dtype
    shapes = {
        "c": ((T, B, D * H), mx.float32),
        "cT": ((B, D * H), mx.float32),
        "h": ((T, B, D * P), dtype),
        "hT": ((B, D * P), dtype),
        "gates": ((T, B, D * gates * H), dtype),
    }
    outputs = {name: shape if name in names else None for name, shape in shapes.items()}
    template = {"GATES": gates if "gates" in names else 0, "CARRIES": "c" in names, "S": dtype}
    start, end = "stepwise_outputs<{}>(rows, starts, kinds", "thread_position_in_grid);"
    if len(kinds) == 1:
        calls = [f"{start.format('GATES, CARRIES, S')}, {{arrays}}, {end}"]
    else:
        of_cells = "absent, {c0}, {lengths}, sizes, {c}, {cT}, absent, absent, {gates}"
        of_h = "{h0}, absent, {lengths}, sizes, absent, absent, {h}, {hT}, absent"
        calls = [
            f"{start.format('GATES, CARRIES, S')}, {of_cells}, {end}",
            f"{start.format('0, false, S')} + 3, {of_h}, {end}",
        ]
    name = f"{problem.cell.op}_stepwise_outputs" + "_projected" * (len(kinds) > 1)
    return launch_sequences(name, ("stepwise_outputs",), problem, kinds, inputs, outputs, template, calls)


def stepwise_gradients(problem: Problem, given: Inputs, kinds: list[Kind], *, names: set[str]) -> Arrays:
    """dz and those of dc0, d_out in `names`, out of the rows of a sweep back. If it projects also dh, out of rows of
    its own, and, if that is in `names`, m: what the projection multiplied."""
    inputs = select(given, "gates states lengths sizes")
    (T, B, H, P), D, cell = problem[:4], problem.directions, problem.cell
    dtype, projects = given["Wh"].dtype, len(kinds) > 1
    shapes = {
        "dz": ((T, B, D * cell.gates * H), dtype),
        "dc0": ((B, D * H), dtype),
        "d_out": ((T, B, D * cell.gates * H), dtype),
        "dh": ((T, B, D * P), dtype),
        "m": ((D, T, B, H), dtype),
    }
    names = names | {"dz"} | ({"dh"} if projects else set())
    outputs = {name: shape if name in names else None for name, shape in shapes.items()}
    inputs |= {} if names & {"d_out", "m"} else {"gates": None}
    inputs |= {} if "m" in names else {"states": None}
    candidate, reset = (cell.gate_order.index(gate) for gate in "nr") if "d_out" in names else (0, 0)
    template = {"GATES": cell.gates, "CANDIDATE": candidate, "RESET": reset, "CARRIES": cell.op != "rnn", "S": dtype}
    start, end = "stepwise_gradients<{}>(rows, starts, kinds", "thread_position_in_grid);"
    numbers = "GATES, CANDIDATE, RESET, CARRIES, S"
    calls = [f"{start.format(numbers)}, {{gates}}, {{lengths}}, sizes, dz, {{dc0}}, {{d_out}}, {end}"]
    shaders = ("stepwise_gradients",)
    if projects:
        calls += [f"{start.format('1, 0, 0, false, S')} + 3, absent, {{lengths}}, sizes, dh, absent, absent, {end}"]
    if "m" in names:
        template |= {"CELL": cell_number(cell)}
        calls += [f"stepwise_projected<CELL, S>(gates, states, {{lengths}}, sizes, m, {end}"]
        shaders = (f"cell_{cell.op}", *shaders, "stepwise_projected")
    name = f"{cell.op}_stepwise_gradients"
    return launch_sequences(name, shaders, problem, kinds, inputs, outputs, template, calls)
