"""Engine `stepwise`: the recurrence on the GPU, one launch of a Metal shader per time step and sweep.

A launch computes the recurrent product and the cell of a step, of both directions if both run; a projection is one
launch more. Each launch writes one row, an array of its own (`rows`); one launch at the end of a sweep lays the rows
out in time. All else is as in `fused`.
"""

from collections.abc import Callable, Collection
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..cells import GRUCell
from ..ops.packed import scales_of
from ..ops.sweep import gradients_after_sweep
from ..packing import is_packed
from ..problem import Arrays, Problem
from .kernel import (
    STRUCTS,
    Launch,
    Outputs,
    Template,
    cached,
    cell_number,
    constant,
    contiguous,
    fields_of,
    prepare,
    struct_of,
    whole_mask,
)
from .products import candidates, gradients_in_few_launches, is_plain, project, recurrent_input, takes_product
from .rows import JOINED, LEFT, Join, Rows, starts_of

# --- Sweeps ---


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """Return h [T, B, D P], gates [T, B, D G H], hT [B, D P]; of an LSTM c [T, B, D H], cT [B, D H], float32. Gates
    only if the problem saves or returns them."""
    T, H, P, cell, Wp = problem.T, problem.H, problem.P, problem.cell, arrays.get("Wp")
    mask, z = whole_mask(problem, arrays), project(problem, arrays)
    row = nothing(row_type(z.dtype))
    inputs = options(problem, arrays, ("Wh", "Wp", "peephole", "bhn"))
    inputs |= {"z": z, "mask": mask, "sizes": sizes(problem, mask, H, P), "before": row, "reset_row": row}
    if cell.op == "lstm":
        inputs["numbers"] = constant((cell.forget_bias, cell.cell_clip or 0.0), mx.float32)
    if problem.packing is not None:
        inputs |= quantized_parts(arrays, z.dtype)
    rows, projected = rows_of(problem, Wp is not None)
    if resets_before(problem):
        reset = each_step(gru_reset_kernel, problem, inputs)
        candidate = each_step(gru_candidate_kernel, problem, inputs, rows)
        for n in range(T):
            row = candidate(n, before=row, reset_row=reset(n, before=row))
    elif Wp is None:
        step = each_step(forward_kernel, problem, inputs, rows)
        for n in range(T):
            row = step(n, before=row)
    else:
        step, h = each_step(forward_kernel, problem, inputs | {"h_before": row}, rows), row
        project_row = each_step(project_kernel, problem, inputs | {"sizes": sizes(problem, mask, P, H)}, projected)
        for n in range(T):
            row = step(n, before=row, h_before=h)
            h = project_row(n, before=row)
    kinds = [(rows, H)] if Wp is None else [(rows, H), (projected, P)]
    names = cell.outputs if problem.training or problem.return_gates else [n for n in cell.outputs if n != "gates"]
    return after_sweep(outputs_launch, problem, inputs, kinds, frozenset(names))


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """Return the gradient of every array, from those of the outputs that have one; gates that were not saved are
    computed again."""
    if saved.get("gates") is None and problem.cell.op != "rnn":
        saved = forward(problem._replace(training=True), arrays)
    few, product, mask = is_plain(problem, arrays), takes_product(problem.cell), whole_mask(problem, arrays)
    operand: Arrays = {}
    if few or product:
        operand = recurrent_input(problem, arrays, saved["h"], mask)
    q = candidates(problem, arrays, operand["h_in"]) if product else None
    results = sweep_backward(problem, arrays, saved, cotangents, mask, q, wants_m=few and "Wp" in arrays)
    if few:
        return gradients_in_few_launches(problem, arrays, results | operand)
    return gradients_after_sweep(problem, arrays, saved, results)


def sweep_backward(
    problem: Problem,
    arrays: Arrays,
    saved: Arrays,
    cotangents: Arrays,
    mask: mx.array | None,
    q: mx.array | None,
    *,
    wants_m: bool,
) -> Arrays:
    """Return the results of the steps in reverse: dz [T, B, D G H]; dh0 [B, D P] and dc0 [B, D H] if there is an h0, a
    c0; with a projection dh [T, B, D P] and, if wanted, m [D, T, B, H], what it multiplied; of a GRU that resets after
    its product d_out [T, B, D 3H], dz as that product had it."""
    T, B, H, P = problem[:4]
    D, cell = problem.directions, problem.cell
    state, before, projects = "c" if cell.op == "lstm" else "h", resets_before(problem), "Wp" in arrays
    row, K = nothing(row_type(arrays["Wh"].dtype)), (2 if before else cell.gates) * H
    inputs = options(problem, arrays, ("peephole",))
    inputs |= {"mask": mask, "states": contiguous(saved[state]), "q": q, "before": row}
    inputs |= {f"d{name}": contiguous(cotangents[name]) for name in cotangents}
    inputs["gates"] = contiguous(saved["gates"]) if cell.op != "rnn" else None
    inputs["states0"] = inputs.get(f"{state}0")
    inputs |= {"weights": transposed(arrays["Wh"]), "sizes": sizes(problem, mask, H, K)}
    of_dh = inputs | {"sizes": sizes(problem, mask, P, K)}
    rows, dh_rows = rows_of(problem, projects)
    if before:
        gates = {gate: arrays["Wh"][..., cell.block(gate, H), :] for gate in "rzn"}
        inputs["weights"] = of_dh["weights"] = transposed(mx.concatenate([gates["r"], gates["z"]], axis=-2))
        of_reset = inputs | {"weights": transposed(gates["n"]), "sizes": sizes(problem, mask, H, H), "now_row": row}
        step = each_step(backward_kernel, problem, inputs)
        reset = each_step(gru_reset_backward_kernel, problem, of_reset, rows)
        for n in reversed(range(T)):
            row = reset(n, now_row=step(n, before=row))
    elif projects:
        of_m = {"weights": transposed(arrays["Wp"]), "sizes": sizes(problem, mask, H, P), "dh_now": row}
        of_m |= dict.fromkeys(("mask", "dh", "dhT"))
        dh = each_step(dh_kernel, problem, of_dh, dh_rows)
        step = each_step(backward_kernel, problem, inputs | of_m, rows)
        for n in reversed(range(T)):
            row = step(n, before=row, dh_now=dh(n, before=row))
    else:
        step = each_step(backward_kernel, problem, inputs, rows)
        for n in reversed(range(T)):
            row = step(n, before=row)
    wanted = {"dc0": "c0" in arrays, "d_out": takes_product(cell), "m": wants_m, "carry": "keep" in inputs}
    kinds = [(rows, H), (dh_rows, P)] if projects else [(rows, H)]
    results = after_sweep(gradients_launch, problem, inputs, kinds, frozenset(n for n in wanted if wanted[n]))
    if "h0" in arrays:
        last = each_step(dh_kernel, problem, of_dh | {"dh": None})
        results["dh0"] = last(-1, before=row)[: B * D * P].reshape(B, D * P)
    return results


Inputs = dict[str, "mx.array | None"]
"""The inputs of kernels by their names; None, like a missing name, for an array that is absent."""


def options(problem: Problem, arrays: Arrays, more: tuple[str, ...]) -> Inputs:
    """Return what the launches of a sweep read as the caller passed it, in row order. A plain cell has `keep` in the
    mask alone."""
    names = ("h0", "c0", *more) if problem.cell.op == "rnn" else ("h0", "c0", "keep", *more)
    inputs: Inputs = {"step": step_number(0), "lengths": arrays.get("lengths")}
    for name in names:
        if name in arrays:
            inputs[name] = contiguous(arrays[name])
    return inputs


def rows_of(problem: Problem, projects: bool) -> tuple[Rows, Rows]:
    """Return where the rows of a sweep's cells go, and those of what a projection makes or gets."""
    left = problem.limits.rows_left // 2 if projects else problem.limits.rows_left
    return Rows(problem.T, left), Rows(problem.T, left)


def quantized_parts(arrays: Arrays, dtype: mx.Dtype) -> Inputs:
    """Return the scales and biases of the quantized weights that the steps read."""
    parts: Inputs = {}
    for name in ("Wh", "Wp"):
        if is_packed(name, arrays):
            scales, biases = scales_of(arrays, name, dtype)
            parts |= {f"{name}_scales": contiguous(scales), f"{name}_biases": contiguous(biases)}
    return parts


def sizes(problem: Problem, mask: mx.array | None, width: int, K: int) -> mx.array:
    """Return what a launch is told of sizes; metal/stepwise.metal lists them. Fewer than 8, for Metal's constant
    memory."""
    differ = mask is not None and mask.shape[0] > 1
    return constant((problem.T, problem.B, width, K, problem.directions, problem.reverse, differ), mx.int32)


def nothing(dtype: mx.Dtype) -> mx.array:
    """Return what stands for the row before the first, which is never read; made without a launch."""
    return constant((0,) * 8, dtype)


def transposed(weights: mx.array) -> mx.array | None:
    """Return [.., n, m] as [.., m, n], in row order."""
    return contiguous(mx.swapaxes(weights, -1, -2))


# --- Sizes ---

UNITS = {"lstm": 8, "gru": 8, "rnn": 32}
"""Hidden units of a threadgroup, forward."""

SLICES = {8: 4, 16: 2}
"""Simdgroups that share eight columns of the product in tiles, by the columns there are; as metal/stepwise_tiles.metal
has it."""

TILES = {8: ((8, 32), (8, 16), (8, 8)), 32: ((32, 32), (16, 32), (16, 16))}
"""Rows and columns of a threadgroup's product in tiles if the cells need one column each, by `stepwise_rows`."""

FEWEST_GROUPS = 32
"""Threadgroups that are worth smaller ones: GPUs have 8 to 40 cores, and a product is a chain of loads, so that a core
without work costs more than operands and weights that are read more often. Not measured."""


def stepwise_rows(B: int) -> int:
    """Return the batch rows of a threadgroup. Below 8 the product runs by lanes, else in 8 x 8 matrices."""
    return 1 if B == 1 else 4 if B < 8 else 8 if B < 32 else 32


def tile_of(problem: Problem, width: int) -> tuple[int, int]:
    """Return rows and columns of a threadgroup's product of `width` columns, if the cells need one each: by lanes 8
    columns, else the largest tile that makes enough threadgroups."""
    rows = stepwise_rows(problem.B)
    if rows < 8:
        return rows, 8
    tiles = TILES[rows]
    groups = [-(-problem.B // high) * -(-width // wide) * problem.directions for high, wide in tiles]
    return next((tile for tile, count in zip(tiles, groups, strict=True) if count >= FEWEST_GROUPS), tiles[-1])


def index_bits(problem: Problem) -> int:
    """Return the bits of an index: 64 if an array may have more elements than 32 bits count. With those a step takes
    twice the instructions besides its product."""
    width, gates = max(problem.H, problem.P), problem.cell.gates + 3  # a row of 16-bit numbers has two for a float
    largest = problem.directions * gates * width * max(problem.T * problem.B, width)
    return 32 if largest < problem.limits.index else 64


def index_type(problem: Problem) -> str:
    """Return Metal's type of an index."""
    return "int" if index_bits(problem) == 32 else "long"


def named(name: str, problem: Problem) -> str:
    """Return a kernel's name, apart from that of the one with other indices."""
    return name if index_bits(problem) == 32 else f"{name}__64"


def row_type(dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype of a row that holds floats and arrays of this dtype."""
    return mx.float32 if dtype == mx.float32 else mx.uint16


def row_length(problem: Problem, width: int, arrays: int, carries: bool, dtype: mx.Dtype) -> int:
    """Return the numbers of a row: `arrays` arrays [B, D width], and one of floats if it carries something. 8 at least,
    as Metal binds fewer in another address space."""
    words = 4 // dtype.size if carries else 0
    return max(8, problem.B * problem.directions * width * (arrays + words))


def resets_before(problem: Problem) -> bool:
    """Return whether a step is two launches: a GRU whose reset comes before the candidate's product."""
    return isinstance(problem.cell, GRUCell) and problem.cell.reset == "before"


# --- A launch of every step ---


class StepKernel:
    """A shader around a product, which writes an array of `output` numbers; more threadgroups of it may join arrays of
    earlier steps.

    fields: the names of the arrays that the shader may read, of which those in `present` are there; template: its
    numbers, with ROWS and COLUMNS of a threadgroup's product; units: how many there are, and how many a threadgroup
    has; name: the kernel's, if not the shader's.
    """

    def __init__(
        self,
        problem: Problem,
        shader: str,
        fields: str,
        present: Collection[str],
        template: Template,
        units: tuple[int, int],
        output: tuple[int, mx.Dtype],
        *,
        name: str = "",
    ):
        rows, columns = int(template["ROWS"]), int(template["COLUMNS"])
        self.problem, self.name, self.output = problem, name or shader, output
        self.inputs: dict[str, bool] = {field: field in present for field in fields.split()}
        self.names: list[str] = [field for field, is_there in self.inputs.items() if is_there]
        quantized, lanes = any(is_packed(field, present) for field in self.names), rows < 8
        slices = 1 if lanes else SLICES.get(columns, 1)
        self.threads: int = (64 if quantized else 256) if lanes else 4 * columns * slices
        self.groups: tuple[int, ...] = -(-units[0] // units[1]), -(-problem.B // rows), problem.directions
        product = "QuantizedByLanes" if lanes and quantized else "ByLanes" if lanes else "ByTiles"
        arguments = [f"{product}<ROWS, COLUMNS>", *(name for name in template if name in ("SAVES", "S"))]
        if "OPTIONS" in template:
            arguments.insert(0, STRUCTS[problem.cell.op])
        if quantized and problem.packing:
            template = template | {"BITS": problem.packing.bits, "GROUP": problem.packing.group_size}
        self.template: Template = template | {"X": row_type(output_dtype(template))}
        self.files: tuple[str, ...] = ("arrays", "cell", f"cell_{problem.cell.op}", "quantized", "stepwise")
        self.files += ("stepwise_quantized",) if quantized else ()
        self.files += ("stepwise_lanes", "stepwise_tiles", *SHADERS[shader], "stepwise_rows")
        self.arrays: str = struct_of(fields_of((*self.inputs, "after"), {*self.names, "after"}))
        self.arrays += f"threadgroup float sums[{slices * rows * columns}];\n"
        self.arrays += f"threadgroup vec<float, 4> vectors[{1 if lanes else 9 * (rows + columns)}];\n"
        self.arrays += "threadgroup float* tiles = (threadgroup float*)vectors;\n"
        self.arrays += "uint3 group = threadgroup_position_in_grid;\n"
        self.call: str = f"{shader}<{', '.join(arguments)}>(a, sums, tiles, group, {LANE});\n"
        self.launch: Launch = self.prepare(self.name, self.arrays + self.call)
        self.joins: dict[tuple[int, ...], tuple[Launch, list[mx.array]]] = {}

    def prepare(
        self, name: str, body: str, joined: int = 0, more_groups: int = 0, pieces: tuple[str, ...] = ()
    ) -> Launch:
        """Return a launch of the shader; joined: how many numbers it also joins of some pieces, with more groups."""
        outputs: Outputs = {"after": ((self.output[0],), self.output[1])}
        if joined:
            outputs["joined"] = (joined,), self.output[1]
        inputs = self.inputs | dict.fromkeys(pieces, True)
        groups = self.groups[0] + more_groups, *self.groups[1:]
        index, name = index_type(self.problem), named(name, self.problem)
        return prepare(name, self.files, inputs, outputs, self.template, body, groups, self.threads, index)

    def joining(self, steps: tuple[int, ...]) -> tuple[Launch, list[mx.array]]:
        """Return the launch that also joins arrays of so many rows, and the sizes it is told."""
        if steps not in self.joins:
            self.joins[steps] = self.prepare_join(steps)
        return self.joins[steps]

    def prepare_join(self, steps: tuple[int, ...]) -> tuple[Launch, list[mx.array]]:
        """Return `joining`, made."""
        length, total = self.output[0], sum(steps)
        more = max(1, min(64, length * total // (8 * self.threads)))
        pieces = tuple(f"p{n}" for n in range(JOINED))
        starts = constant(tuple(length * start for start in starts_of(steps, JOINED)), mx.int64)
        first = constant((self.groups[0], self.threads, more * self.threads), mx.uint32)
        join = struct_of({name: name for name in ("starts", "first", "joined")}, "Join", "join")
        body = f"""{self.arrays}{join}if (group.x < first[0]) {self.call}else {{
const Pieces<X> pieces = {{{{{", ".join(pieces)}}}}};
stepwise_join(pieces, join, group, thread_index_in_threadgroup);
}}"""
        launch = self.prepare(f"{self.name}_joining", body, total * length, more, (*pieces, "starts", "first"))
        return launch, [starts, first]


SHADERS = {
    "stepwise_forward": ("stepwise_forward",),
    "stepwise_project": ("stepwise_forward",),
    "stepwise_gru_reset": ("stepwise_forward", "stepwise_gru"),
    "stepwise_gru_candidate": ("stepwise_forward", "stepwise_gru"),
    "stepwise_backward": ("stepwise_backward",),
    "stepwise_gru_reset_backward": ("stepwise_gru",),
    "stepwise_dh": ("stepwise_backward",),
}
"""The files of each shader of a step, besides those that all have."""

LANE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"


def output_dtype(template: Template) -> mx.Dtype:
    """Return the dtype S of a template."""
    dtype = template["S"]
    assert isinstance(dtype, mx.Dtype)
    return dtype


class StepLaunch:
    """The launch of a kernel at every step of a sweep. The arrays it writes become rows of `rows`, some of which it
    joins when that is due."""

    def __init__(self, kernel: StepKernel, inputs: list[mx.array], rows: Rows | None = None):
        self.kernel: StepKernel = kernel
        self.rows: Rows | None = rows
        self.places: dict[str, int] = {name: n for n, name in enumerate(kernel.names)}
        self.inputs: list[mx.array] = inputs

    def __call__(self, n: int, **changed: mx.array) -> mx.array:
        """Return the array of step n; `changed`: the inputs that are not those of the step before."""
        inputs, rows = self.inputs, self.rows
        inputs[0] = step_number(n)
        for name, array in changed.items():
            inputs[self.places[name]] = array
        join = next(rows.joins) if rows else None
        row = self.kernel.launch(inputs=inputs)[0] if join is None else self.join(rows.pieces, join)
        if rows:
            rows.pieces.append(row)
        return row

    def join(self, pieces: list[mx.array], join: Join) -> mx.array:
        """Return the array of a step whose launch also makes one array of some pieces, and put that in their place."""
        due = slice(join.first, join.first + len(join.steps))
        arrays = pieces[due] + pieces[due.stop - 1 : due.stop] * (JOINED - len(join.steps))
        launch, sizes = self.kernel.joining(join.steps)
        row, *pieces[due] = launch(inputs=self.inputs + arrays + sizes)
        return row


@cache
def step_number(n: int) -> mx.array:
    """Return the number of a step, as its launch gets it."""
    return mx.array(n, mx.int32)


Make = Callable[[Problem, mx.Dtype, tuple[str, ...], bool], StepKernel]


def each_step(make: Make, problem: Problem, inputs: Inputs, rows: Rows | None = None) -> StepLaunch:
    """Return what launches a kernel at every step, with these inputs; the arrays it writes become `rows`, if any."""
    present: Arrays = {}
    for name, array in inputs.items():
        if array is not None:
            present[name] = array
    dtype = present["z" if "z" in present else "weights"].dtype
    kernel = make(problem, dtype, tuple(present), rows is not None)
    return StepLaunch(kernel, [present[name] for name in kernel.names], rows)


# The kernels of a step. Each function takes the problem, the dtype of the arrays, the names of the arrays that are
# there (of which the shader's fields take those they need), and whether the arrays it writes become rows.


@cached
def forward_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _: bool) -> StepKernel:
    """The row of each step; metal/stepwise_forward.metal has the inputs and what is in it."""
    cell, op = problem.cell, problem.cell.op
    saves, has_c = problem.training or problem.return_gates, "c" in problem.cell.outputs
    template = forward_template(problem, "peephole" in present, UNITS[op] * cell.gates) | {"SAVES": saves, "S": dtype}
    output = row_length(problem, problem.H, 1 + cell.gates if saves else 1, has_c, dtype), row_type(dtype)
    fields = "step z before h_before Wh Wh_scales Wh_biases h0 c0 peephole bhn mask keep lengths sizes numbers"
    units, name = (problem.H, UNITS[op]), f"{op}_stepwise_forward"
    return StepKernel(problem, "stepwise_forward", fields, present, template, units, output, name=name)


@cached
def gru_reset_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _: bool) -> StepKernel:
    """r * mask * h_before, r, z [3, B, D H] of each step, flat; metal/stepwise_gru.metal."""
    template = forward_template(problem, False, 32) | {"S": dtype}
    output = row_length(problem, problem.H, 3, False, dtype), dtype
    fields, name = "step z before Wh Wh_scales Wh_biases h0 mask lengths sizes", "stepwise_gru_reset"
    return StepKernel(problem, name, fields, present, template, (problem.H, 16), output)


@cached
def gru_candidate_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _: bool) -> StepKernel:
    """The row of each step, from that of `gru_reset_kernel`; metal/stepwise_gru.metal."""
    saves = problem.training or problem.return_gates
    template = forward_template(problem, False, 32) | {"SAVES": saves, "S": dtype}
    output = row_length(problem, problem.H, 4 if saves else 1, False, dtype), row_type(dtype)
    fields, name = "step z before reset_row Wh Wh_scales Wh_biases h0 keep lengths sizes", "stepwise_gru_candidate"
    return StepKernel(problem, name, fields, present, template, (problem.H, 32), output)


@cached
def project_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _: bool) -> StepKernel:
    """A row with h [B, D P] of each step; metal/stepwise_forward.metal."""
    rows, columns = tile_of(problem, problem.P)
    template: Template = {"ROWS": rows, "COLUMNS": columns, "S": dtype}
    output = row_length(problem, problem.P, 1, False, dtype), row_type(dtype)
    fields, name, units = "step before Wp Wp_scales Wp_biases sizes", "lstm_stepwise_project", (problem.P, columns)
    return StepKernel(problem, "stepwise_project", fields, present, template, units, output, name=name)


@cached
def backward_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _: bool) -> StepKernel:
    """The row of each step backward; metal/stepwise_backward.metal has the inputs and what is in it."""
    cell, op, tile = problem.cell, problem.cell.op, tile_of(problem, problem.H)
    template = backward_template(problem, "peephole" in present, dtype, tile)
    arrays = cell.gates + 1 if "keep" in present else cell.gates
    output = row_length(problem, problem.H, arrays, op != "rnn", dtype), row_type(dtype)
    fields = (
        "step before dh_now weights gates states states0 q peephole bhn mask keep lengths dh dc dgates dhT dcT sizes"
    )
    units, name = (problem.H, tile[1]), f"{op}_stepwise_backward"
    return StepKernel(problem, "stepwise_backward", fields, present, template, units, output, name=name)


@cached
def gru_reset_backward_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], _: bool) -> StepKernel:
    """The row of each step backward, from that of `backward_kernel`; metal/stepwise_gru.metal."""
    tile = tile_of(problem, problem.H)
    template = backward_template(problem, False, dtype, tile)
    output = row_length(problem, problem.H, 4 if "keep" in present else 3, True, dtype), row_type(dtype)
    fields, name = "step now_row weights gates states states0 mask keep lengths sizes", "stepwise_gru_reset_backward"
    return StepKernel(problem, name, fields, present, template, (problem.H, tile[1]), output, name=name)


@cached
def dh_kernel(problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], has_rows: bool) -> StepKernel:
    """A row with dh_t [B, D P] of each step or, without rows, dh0, flat; metal/stepwise_backward.metal."""
    tile = tile_of(problem, problem.P)
    template = backward_template(problem, False, dtype, tile)
    output = row_length(problem, problem.P, 1, False, dtype), row_type(dtype) if has_rows else dtype
    fields, units = "step before weights gates mask lengths dh dhT sizes", (problem.P, tile[1])
    name = f"{problem.cell.op}_stepwise_dh"
    return StepKernel(problem, "stepwise_dh", fields, present, template, units, output, name=name)


def forward_template(problem: Problem, peephole: bool, columns: int) -> Template:
    """Return template numbers of the steps forward."""
    return {"OPTIONS": cell_number(problem.cell, peephole), "ROWS": stepwise_rows(problem.B), "COLUMNS": columns}


def backward_template(problem: Problem, peephole: bool, dtype: mx.Dtype, tile: tuple[int, int]) -> Template:
    """Return template numbers of the steps backward."""
    rows, columns = tile
    return {"OPTIONS": cell_number(problem.cell, peephole), "ROWS": rows, "COLUMNS": columns, "S": dtype}


# --- The launch after a sweep ---

Kind = tuple[Rows, int]
"""Rows that hold the same, and the width of the units in them."""

Layout = tuple[tuple[tuple[int, ...], int, int], ...]
"""Of each kind of rows: how many are in each array, the numbers of one, the width of its units."""


class Sequences(NamedTuple):
    """A launch over the rows that a sweep left: the names of its inputs and outputs; what it is told of the rows."""

    launch: Launch
    inputs: list[str]
    outputs: list[str]
    sizes: list[mx.array]


def after_sweep(
    make: Callable[[Problem, mx.Dtype, tuple[str, ...], Layout, frozenset[str]], Sequences],
    problem: Problem,
    inputs: Inputs,
    kinds: list[Kind],
    names: frozenset[str],
) -> Arrays:
    """Return the results of a launch after a sweep over all kinds of rows: those in `names`."""
    left: list[mx.array] = []
    for rows, _ in kinds:
        left += rows.pieces
    layout = tuple([(rows.steps, rows.pieces[-1].size, width) for rows, width in kinds])
    present = tuple([name for name, array in inputs.items() if array is not None])
    dtype = inputs["z" if "z" in present else "weights"].dtype
    sequences = make(problem, dtype, present, layout, names)
    arrays = [inputs[name] for name in sequences.inputs] + left + left[-1:] * (LEFT - len(left)) + sequences.sizes
    return dict(zip(sequences.outputs, sequences.launch(inputs=arrays), strict=True))


def prepare_sequences(
    name: str,
    problem: Problem,
    layout: Layout,
    inputs: dict[str, bool],
    outputs: Outputs,
    template: Template,
    body: str,
) -> Sequences:
    """Return the launch of shaders over rows of all kinds, with a thread per item, unit, step and direction."""
    starts = starts_of(sum((steps for steps, _, _ in layout), ()), LEFT)
    numbers = [number for n, (_, size, width) in enumerate(layout) for number in (size, width, n * problem.T)]
    sizes = {"starts": mx.array(starts, mx.int32), "kinds": mx.array(numbers, mx.int32)}
    pieces = [f"piece{n}" for n in range(LEFT)]
    body = f"const Rows<X> rows = {{{{{', '.join(pieces)}}}}};\n{body}"
    template = template | {"X": row_type(output_dtype(template))}
    groups = -(-problem.B * max(width for _, _, width in layout) // 256), problem.T, problem.directions
    shaders = ("arrays", "cell", f"cell_{problem.cell.op}", "stepwise", "stepwise_rows")
    every = inputs | dict.fromkeys((*pieces, *sizes), True)
    index = index_type(problem)
    launch = prepare(named(name, problem), shaders, every, outputs, template, body, groups, 256, index)
    written = [name for name, output in outputs.items() if output is not None]
    given = [name for name, is_there in inputs.items() if is_there]
    return Sequences(launch, given, written, list(sizes.values()))


@cached
def outputs_launch(
    problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], layout: Layout, names: frozenset[str]
) -> Sequences:
    """Those of h, c, gates, hT, cT in `names`, out of the rows of a sweep: the cells' and, if it projects, h's."""
    (T, B, H, P), D, gates = problem[:4], problem.directions, problem.cell.gates
    shapes = {
        "c": ((T, B, D * H), mx.float32),
        "cT": ((B, D * H), mx.float32),
        "h": ((T, B, D * P), dtype),
        "hT": ((B, D * P), dtype),
        "gates": ((T, B, D * gates * H), dtype),
    }
    outputs: Outputs = {name: shape if name in names else None for name, shape in shapes.items()}
    template: Template = {"GATES": gates if "gates" in names else 0, "CARRIES": "c" in names, "S": dtype}
    inputs = {name: name in present for name in ("h0", "c0", "lengths", "sizes")}
    fields = fields_of((*inputs, "starts", "kinds", *outputs), {*present, *names, "starts", "kinds"})
    end = "thread_position_in_grid);\n"
    if len(layout) == 1:
        body = struct_of(fields) + f"stepwise_outputs<GATES, CARRIES, S>(rows, kinds, a, {end}"
    else:
        # Rows of the cells have all but h, rows of the projection nothing but h.
        body = struct_of(fields | dict.fromkeys(("h0", "h", "hT"), "absent"))
        body += struct_of(fields | dict.fromkeys(("c0", "c", "cT", "gates"), "absent"), "Projected", "projected")
        body += f"stepwise_outputs<GATES, CARRIES, S>(rows, kinds, a, {end}"
        body += f"stepwise_outputs<0, false, S>(rows, kinds + 3, projected, {end}"
    name = f"{problem.cell.op}_stepwise_outputs" + "_projected" * (len(layout) > 1)
    return prepare_sequences(name, problem, layout, inputs, outputs, template, body)


@cached
def gradients_launch(
    problem: Problem, dtype: mx.Dtype, present: tuple[str, ...], layout: Layout, names: frozenset[str]
) -> Sequences:
    """dz and those of dc0, d_out, carry in `names`, out of the rows of a sweep backward. If it projects also dh, of
    rows of its own, and, if that is in `names`, m: what the projection multiplied."""
    (T, B, H, P), D, cell, projects = problem[:4], problem.directions, problem.cell, len(layout) > 1
    shapes = {
        "dz": ((T, B, D * cell.gates * H), dtype),
        "dc0": ((B, D * H), dtype),
        "d_out": ((T, B, D * cell.gates * H), dtype),
        "carry": ((T, B, D * H), dtype),
        "dh": ((T, B, D * P), dtype),
        "m": ((D, T, B, H), dtype),
    }
    names = names | {"dz"} | ({"dh"} if projects else frozenset())
    outputs: Outputs = {name: shape if name in names else None for name, shape in shapes.items()}
    read = (
        {"lengths", "sizes"}
        | ({"gates"} if names & {"d_out", "m"} else set())
        | ({"states"} if "m" in names else set())
    )
    inputs = {name: name in read and name in present for name in ("gates", "states", "lengths", "sizes")}
    candidate, reset = (cell.gate_order.index(gate) for gate in "nr") if "d_out" in names else (0, 0)
    template: Template = {"GATES": cell.gates, "CANDIDATE": candidate, "RESET": reset}
    template |= {"CARRIES": cell.op != "rnn", "S": dtype}
    there = {*names, "starts", "kinds", *(name for name in inputs if inputs[name])}
    fields = fields_of((*inputs, "starts", "kinds", *outputs), there)
    start, end = "stepwise_gradients<{}>(rows, kinds", "thread_position_in_grid);\n"
    body = struct_of(fields) + f"{start.format('GATES, CANDIDATE, RESET, CARRIES, S')}, a, {end}"
    if projects:
        # dh lies in rows of its own, as dz of a single gate.
        of_dh = fields | dict.fromkeys(("gates", "dc0", "d_out", "carry", "m"), "absent") | {"dz": "dh"}
        body += struct_of(of_dh, "Projected", "projected")
        body += f"{start.format('1, 0, 0, false, S')} + 3, projected, {end}"
    if "m" in names:
        template |= {"OPTIONS": cell_number(cell)}
        body += f"stepwise_projected<{STRUCTS[cell.op]}, S>(a, {end}"
    return prepare_sequences(f"{cell.op}_stepwise_gradients", problem, layout, inputs, outputs, template, body)
