"""Run a cell written by the user on the engine `stepwise`, with one launch per time step.

The module `stepwise` builds and runs the launches. Their shaders are in metal/pointwise_stepwise.metal. A shader is a
template over the cell's struct, which holds the cell's arithmetic in Metal; the module `pointwise` generates this
struct. One thread computes one unit. If both directions run, each launch computes one step of both.
"""

from typing import Any

import mlx.core as mx

from ..directions import half, join_gradients, one_direction, part
from ..problem import Arrays, Problem
from .kernel import Outputs, Template, cached, contiguous, fields_of, struct_of, whole_mask
from .pointwise import gradient_nodes, gradients_after, own_cell
from .products import project
from .rows import Rows
from .stepwise import (
    ROWS,
    Layout,
    Sequences,
    StepKernel,
    after_sweep,
    each_step,
    keeps_rows,
    nothing,
    options,
    outputs_launch,
    prepare_sequences,
    row_length,
    row_type,
    sizes,
    step_number,
    stepwise_rows,
    taken_rows,
    tile_of,
    transposed,
)


def forward(problem: Problem, arrays: Arrays) -> dict[str, Any]:
    """Run the forward pass, with D directions. Return h [T, B, D H] and hT [B, D H]; if the cell has states besides
    h, also c and cT.

    In training also return `ROWS`: a list of the arrays that the steps wrote. They contain the K numbers per unit, step
    and item that the backward pass needs. If K is 0, return the empty `gates` [T, B, 0] instead.
    """
    T, B, H, cell = problem.T, problem.B, problem.H, own_cell(problem)
    mask, z = mask_of(problem, arrays), project(problem, arrays)
    row = nothing(row_type(z.dtype))
    inputs = options(problem, arrays, ("Wh", "inputs", "params"))
    inputs |= {"z": z, "mask": mask, "sizes": sizes(problem, mask, H, H), "before": row}
    rows = Rows(T, problem.limits.rows_left)
    step = each_step(forward_kernel, problem, inputs, rows)
    for n in range(T):
        row = step(n, row)
    keeps = keeps_rows(problem, arrays)
    with_gates = cell.kept > 0 and problem.return_gates
    names = frozenset(name for name in cell.outputs if name != "gates" or with_gates)
    results = after_sweep(outputs_launch, problem, inputs, [(rows, H)], names)
    if cell.kept == 0:
        results["gates"] = mx.zeros((T, B, 0), z.dtype)
    return results | {ROWS: rows.pieces} if keeps else results


def backward(problem: Problem, arrays: Arrays, saved: dict[str, Any], cotangents: Arrays) -> Arrays:
    """Run the backward pass. Return the gradients of all arrays, by name. saved: the outputs of the forward pass.
    cotangents: the gradients of some outputs."""
    if saved.get("gates") is None and not saved.get(ROWS):
        saved = forward(problem._replace(training=True), arrays)
    swept, cell = sweep_backward(problem, arrays, saved, cotangents), own_cell(problem)
    saved = {name: saved[name] for name in saved if name != ROWS}
    if not problem.bidirectional:
        return gradients_after(problem, cell, arrays, saved, swept)
    parts = []
    for d in range(2):
        of_direction = part(arrays, d), part(saved, d), {name: half(array, d) for name, array in swept.items()}
        parts.append(gradients_after(one_direction(problem, d), cell, *of_direction))
    return join_gradients(parts, arrays)


def sweep_backward(problem: Problem, arrays: Arrays, saved: dict[str, Any], cotangents: Arrays) -> Arrays:
    """Run the backward steps. Return the results by name. D is the number of directions; a unit has N gradients of
    preactivations, U inputs, C states besides h, and V parameters.

    - d [T, B, D N H], du [T, B, D U H]: the gradients of the preactivations and of the inputs
    - dh0 [B, D H], dc0 [B, D C H]: the gradients of the initial states
    - dw [B, D V H]: the gradients of the parameters, not yet summed over the batch
    - carry [T, B, D (C + 1) H], if the call has `keep`: the gradients of keep * (the states before each step),
      without the part that flows through the recurrent product
    """
    T, B, H, D = problem.T, problem.B, problem.H, problem.directions
    cell, mask = own_cell(problem), mask_of(problem, arrays)
    row = nothing(row_type(saved["h"].dtype))
    inputs = options(problem, arrays, ("inputs", "params"))
    inputs |= {"mask": mask, "sizes": sizes(problem, mask, H, cell.gates * H), "before": row}
    inputs |= {name: contiguous(saved[name]) for name in ("h", "c", "gates") if name in saved and saved[name].size}
    inputs |= {f"d{name}": contiguous(cotangents[name]) for name in cotangents}
    kept = taken_rows(problem, saved)
    inputs |= {"rows": row, "row": step_number(0)} if kept else {}
    if "Wh" in arrays:
        inputs["weights"] = transposed(arrays["Wh"])
    rows = Rows(T, problem.limits.rows_left)
    step = each_step(backward_kernel, problem, inputs, rows)
    for n in reversed(range(T)):
        row = step(n, row, *(kept.pop() if kept else ()))
    results = after_sweep(gradients_launch, problem, inputs, [(rows, H)], frozenset())
    last = each_step(dh0_kernel, problem, inputs)
    results["dh0"] = last(-1, row)[: B * D * H].reshape(B, D * H)
    return results


def mask_of(problem: Problem, arrays: Arrays) -> mx.array | None:
    """Return the factor on h in the recurrent product, or None if there is no such factor or no product."""
    return whole_mask(problem, arrays) if own_cell(problem).recurrent else None


# --- Kernels ---


def forward_tile(problem: Problem) -> tuple[int, int, int]:
    """Return how a forward step is divided among threadgroups: the batch items of a threadgroup, the columns of its
    product, and its units. Without a product each thread computes one unit."""
    cell, rows = own_cell(problem), stepwise_rows(problem.B, problem.cut)
    if not cell.recurrent:
        return 1, 256, 256
    units = {1: 32, 2: 16}.get(cell.gates, 8)
    # With 4 batch items a thread has one sum per gate and item, so many gates need too many registers. 8 x 8 matrices
    # replace these sums from 8 items on. With 32 items the sums of many gates exceed the 32 KB of a threadgroup.
    if rows == 4 and cell.gates > 8:
        rows = 1 if problem.cut else 8
    if rows == 32 and cell.gates > 15:
        rows = 16
    return rows, units * cell.gates, units


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return the number of batch items and units of a threadgroup in a backward step."""
    return tile_of(problem, problem.H) if own_cell(problem).recurrent else (1, 256)


@cached
def forward_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _: bool) -> StepKernel:
    """Return the kernel of a forward step. It writes one array per step (a row) with c, h and, in training, the
    numbers for the backward pass. metal/pointwise_stepwise.metal describes its inputs."""
    cell, (rows, columns, units) = own_cell(problem), forward_tile(problem)
    saves = problem.training or problem.return_gates
    length = row_length(problem, problem.H, 1 + cell.kept * saves, cell.carried, dtype)
    return StepKernel(
        *(problem, dtype, present, "pointwise_stepwise_forward"),
        "step before z Wh h0 c0 inputs params mask keep lengths sizes",
        tile=(rows, columns),
        units=(problem.H, units),
        output=(length, row_type(dtype)),
        saves=saves,
    )


@cached
def backward_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _: bool) -> StepKernel:
    """Return the kernel of a backward step. It writes one array per step (a row) with the gradients of the states,
    parameters, preactivations and inputs. metal/pointwise_stepwise.metal describes its inputs."""
    graph, tile = own_cell(problem).graph, backward_tile(problem)
    floats = graph.states * (2 if "keep" in present else 1) + graph.params
    length = row_length(problem, problem.H, len(gradient_nodes(graph)) + graph.inputs, floats, dtype)
    return StepKernel(
        *(problem, dtype, present, "pointwise_stepwise_backward"),
        "step before rows row weights gates h c h0 c0 inputs params mask keep lengths dh dc dhT dcT sizes",
        tile=tile,
        units=(problem.H, tile[1]),
        output=(length, row_type(dtype)),
    )


@cached
def dh0_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _: bool) -> StepKernel:
    """Return the kernel that computes dh0 [B, D H], the gradient of the initial state h0 of all D directions. It
    runs once, after all backward steps."""
    tile = backward_tile(problem)
    return StepKernel(
        *(problem, dtype, present, "pointwise_stepwise_dh0"),
        "step before weights mask keep lengths sizes",
        tile=tile,
        units=(problem.H, tile[1]),
        output=(row_length(problem, problem.H, 1, 0, dtype), dtype),
    )


@cached
def gradients_launch(
    problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], layout: Layout, _: frozenset[str]
) -> Sequences:
    """Return the launch after all backward steps. It copies the gradients from the rows (arrays that the launches
    wrote, one per step) into one array per result: d (gradients of the preactivations), du (of the inputs of each
    step), dw (of the parameters), dc0 and, if the call has the option `keep`, carry (of the states before each
    step)."""
    T, B, H, D, graph = *problem[:3], problem.directions, own_cell(problem).graph
    counts = {"STATES": graph.states, "PARAMS": graph.params}
    counts |= {"GRADIENTS": len(gradient_nodes(graph)), "INPUTS": graph.inputs}

    def array(lead: tuple[int, ...], blocks: int, kind: mx.Dtype) -> tuple[tuple[int, ...], mx.Dtype] | None:
        return ((*lead, D * blocks * H), kind) if blocks else None

    outputs: Outputs = {"d": array((T, B), counts["GRADIENTS"], dtype), "du": array((T, B), graph.inputs, dtype)}
    outputs["carry"] = array((T, B), graph.states, mx.float32) if "keep" in present else None
    outputs |= {"dc0": array((B,), graph.states - 1, mx.float32), "dw": array((B,), graph.params, mx.float32)}
    inputs = {name: name in present for name in ("lengths", "sizes")}
    there = {name for name in outputs if outputs[name]} | {name for name in inputs if inputs[name]}
    template: Template = {**counts}
    body = struct_of(fields_of((*inputs, "starts", "kinds", *outputs), there | {"starts", "kinds"}))
    body += f"pointwise_stepwise_gradients<{', '.join(counts)}, S>(rows, kinds, a, thread_position_in_grid);\n"
    files = ("pointwise_stepwise",)
    name = "pointwise_stepwise_gradients"
    return prepare_sequences(name, problem, dtype, layout, inputs, outputs, template, body, files)
