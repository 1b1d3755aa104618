"""The launches of the `stepwise` shaders, each function named like the shader."""

from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial, update_wrapper
from typing import Any, NamedTuple

import mlx.core as mx

from ..cells import GRUCell
from ..packing import is_packed
from ..problem import Arrays, Problem
from .inputs import constant
from .launch import Inputs, Launch, Outputs, Present, Template, arguments, cell_number, kept, prepare, present, select
from .stepwise_rows import JOINED, LEFT, Join, Rows, starts_of

Parts = tuple[Problem, str, tuple[str, ...], Present, Outputs, Template]
Kind = tuple[Rows, int]
"""Rows that hold the same, and the width of the units in them."""

LANE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"

UNITS = {"lstm": 8, "gru": 8, "rnn": 32}
"""Hidden units of a threadgroup, forward; as metal/stepwise_cell_*.metal have them."""

SLICES = {8: 4, 16: 2}
"""Simdgroups that share eight columns of the product by tiles, by the columns there are; as its file has it."""

TILES = {8: ((8, 32), (8, 16), (8, 8)), 32: ((32, 32), (16, 32), (16, 16))}
"""Rows and columns of a threadgroup's product by tiles where the cells need one column each, by `stepwise_rows`."""

FEWEST_GROUPS = 32
"""Threadgroups that are worth smaller ones: GPUs have 8 to 40 cores, and a product is a chain of loads, so that a core
without work costs more than operands and weights that are read more often. Not measured."""


def stepwise_rows(B: int) -> int:
    """Batch rows per threadgroup. Below 8 the product runs by lanes, else in 8 x 8 matrices."""
    return 1 if B == 1 else 4 if B < 8 else 8 if B < 32 else 32


def index_bits(problem: Problem) -> int:
    """Bits of an index: 64 where an array may have more elements than 32 count. With those a step takes twice the
    instructions besides its product."""
    width, gates = max(problem.H, problem.P), problem.cell.gates + 3  # a row of 16-bit numbers has two for a float
    largest = problem.directions * gates * width * max(problem.T * problem.B, width)
    return 32 if largest < problem.limits.index else 64


def named(name: str, problem: Problem) -> str:
    """A kernel's name, apart from that of the one with other indices."""
    return name if index_bits(problem) == 32 else f"{name}__64"


def row_type(dtype: mx.Dtype) -> mx.Dtype:
    """What the numbers of a row are that holds floats and arrays of this dtype."""
    return mx.float32 if dtype == mx.float32 else mx.uint16


def row_length(problem: Problem, width: int, arrays: int, carries: bool, dtype: mx.Dtype) -> int:
    """Numbers of a row: `arrays` arrays [B, D width], and one of floats if it carries something. 8 at least, as Metal
    binds fewer in another address space."""
    words = 4 // dtype.size if carries else 0
    return max(8, problem.B * problem.directions * width * (arrays + words))


class StepKernel:
    """A shader around a product, the last of `shaders`, with inputs of these names, None for one that is absent.

    It writes an array of `output` numbers. Its threadgroups have units[1] of the units[0] units, and units[2] columns
    of the product. More of them may join arrays of earlier steps.
    """

    def __init__(
        self,
        name: str,
        shaders: tuple[str, ...],
        problem: Problem,
        inputs: Present,
        output: tuple[int, mx.Dtype],
        template: Template,
        units: tuple[int, int, int],
    ):
        self.output: tuple[int, mx.Dtype] = output
        shader, height = shaders[-1], template["ROWS"]
        lanes = height < 8
        slices = 1 if lanes else SLICES.get(units[2], 1)
        self.groups: tuple[int, ...] = -(-units[0] // units[1]), -(-problem.B // height), problem.directions
        packed = [name for name in inputs if is_packed(name, inputs)]
        form = "lanes" if lanes else "tiles"
        self.threads: int = (64 if packed else 256) if lanes else 4 * units[2] * slices
        if packed and problem.packing:
            template = template | {"BITS": problem.packing.bits, "GROUP": problem.packing.group_size}
        product = (f"stepwise_product_by_{form}",)
        if packed:
            product = "packed", "stepwise_packed", f"stepwise_packed_by_{form}", *(() if lanes else product)
        shaders = ("cell", f"stepwise_index_{index_bits(problem)}", *shaders[:-1], *product, shader)
        outputs: Outputs = {"after": ((output[0],), output[1])}
        numbers = ", ".join(name for name in template if name not in ("X", "BITS", "GROUP"))
        shared = f"threadgroup float sums[{slices * height * units[2]}];\n"
        shared += f"threadgroup vec<float, 4> vectors[{1 if lanes else 9 * (height + units[2])}];\n"
        shared += "threadgroup float* tiles = (threadgroup float*)vectors;\n"
        self.before: str = f"{shared}uint3 group = threadgroup_position_in_grid;\n"
        self.call: str = f"{shader}<{numbers}>({call_arguments({**inputs, **outputs})}, sums, tiles, group, {LANE});\n"
        self.parts: Parts = problem, name, shaders, inputs, outputs, template
        body, name = self.before + self.call, named(name, problem)
        self.launch: Launch = prepare(name, shaders, inputs, outputs, template, body, self.groups, self.threads)[0]
        self.joins: dict[tuple[int, ...], tuple[Launch, list[mx.array]]] = {}

    def joining(self, steps: tuple[int, ...]) -> tuple[Launch, list[mx.array]]:
        """The launch that joins arrays of so many rows beside its call, and the sizes it is told."""
        if steps not in self.joins:
            self.joins[steps] = self.prepare_join(steps)
        return self.joins[steps]

    def prepare_join(self, steps: tuple[int, ...]) -> tuple[Launch, list[mx.array]]:
        """`joining`, made."""
        problem, name, shaders, inputs, outputs, template = self.parts
        length, total = self.output[0], sum(steps)
        more = max(1, min(64, length * total // (8 * self.threads)))
        pieces = {f"p{n}": True for n in range(JOINED)}
        starts = constant(tuple(length * start for start in starts_of(steps, JOINED)), mx.int64)
        sizes = {"starts": starts, "first": constant((self.groups[0], self.threads, more * self.threads), mx.uint32)}
        body = f"""{self.before}if (group.x < first[0]) {self.call}else {{
const Pieces<X> pieces = {{{{{", ".join(pieces)}}}}};
stepwise_join(pieces, starts, first, joined, group, thread_index_in_threadgroup);
}}"""
        shaders, groups = (*shaders, "stepwise_join"), (self.groups[0] + more, *self.groups[1:])
        outputs = outputs | {"joined": ((total * length,), self.output[1])}
        inputs = {**inputs, **pieces, **sizes}
        name = named(f"{name}_joining", problem)
        launch, _ = prepare(name, shaders, inputs, outputs, template, body, groups, self.threads)
        return launch, list(sizes.values())


class StepLaunch:
    """The launch of a kernel at every step of a sweep. The arrays it writes become rows of `rows`, some of which it
    joins if that is due."""

    def __init__(self, kernel: StepKernel, inputs: Arrays, rows: Rows | None = None):
        self.kernel: StepKernel = kernel
        self.rows: Rows | None = rows
        self.places: dict[str, int] = {name: n for n, name in enumerate(inputs)}
        self.inputs: list[mx.array] = list(inputs.values())

    def __call__(self, n: int, **changed: mx.array) -> mx.array:
        """The array of step n, with the inputs that are not those of the step before."""
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
        """The array of the step, whose launch makes one of some pieces."""
        due = slice(join.first, join.first + len(join.steps))
        arrays = pieces[due] + pieces[due.stop - 1 : due.stop] * (JOINED - len(join.steps))
        launch, sizes = self.kernel.joining(join.steps)
        row, *pieces[due] = launch(inputs=self.inputs + arrays + sizes)
        return row


def every_step(find: Callable[..., Any], problem: Problem, given: Inputs, rows: Rows | None = None) -> StepLaunch:
    """What launches a kernel at every step: of a problem, given arrays and the rows they become, if any."""
    return StepLaunch(*find(problem, given, rows is not None), rows)


def launched(names: str, way: Callable[..., Any] = every_step) -> Callable[[Callable[..., object]], Callable[..., Any]]:
    """Turns what makes the kernel of a problem, with inputs of these names, into what launches it in this way. A kernel
    is made once."""
    order = tuple(names.split())

    def launching(make: Callable[..., object]) -> Callable[..., Any]:
        @kept
        def kernel(problem: Problem, dtype: mx.Dtype, given: tuple[str, ...], *more: Hashable) -> object:
            known = tuple(name for name in order if name in given or not name.endswith(PARTS))
            return make(problem, dtype, present(known, given), *more)

        def find(problem: Problem, given: Inputs, *more: Hashable) -> tuple[object, Arrays]:
            inputs = {name: array for name in order if (array := given.get(name)) is not None}
            return kernel(problem, dtype_of(given), tuple(inputs), *more), inputs

        return update_wrapper(partial(way, find), make, assigned=("__name__", "__doc__"))

    return launching


PARTS = ("_scales", "_biases")
"""How the names of what belongs to a packed weight end."""


def dtype_of(given: Inputs) -> mx.Dtype:
    """That of the arrays, which packed weights do not have."""
    return given["z" if "z" in given else "Wh"].dtype


def call_arguments(arrays: Mapping[str, object]) -> str:
    """`arguments`, of which the arrays of a packed weight are one."""
    found = []
    for name in arrays:
        if is_packed(name, arrays):
            parts = arguments({part: arrays.get(part) for part in (name, *(f"{name}{end}" for end in PARTS))})
            found.append(f"packed_weights<BITS, GROUP>({parts})")
        elif not name.endswith(PARTS):
            found.append(arguments({name: arrays[name]}))
    return ", ".join(found)


@cache
def step_number(n: int) -> mx.array:
    """The number of a step, as its launch gets it."""
    return mx.array(n, mx.int32)


@launched("step z before h_before Wh Wh_scales Wh_biases h0 c0 extra mask keep lengths sizes numbers")
def stepwise_forward(problem: Problem, dtype: mx.Dtype, inputs: Present, _: bool) -> StepKernel:
    """The row of each step; metal/stepwise_forward.metal has the inputs and what is in it."""
    cell, op = problem.cell, problem.cell.op
    keeps, carries = problem.training or problem.return_gates, "c" in problem.cell.outputs
    template = {"CELL": cell_number(cell, inputs["extra"] is not None), "ROWS": stepwise_rows(problem.B)}
    template |= {"KEEPS": keeps, "S": dtype, "X": row_type(dtype)}
    output = row_length(problem, problem.H, 1 + cell.gates if keeps else 1, carries, dtype), row_type(dtype)
    files = (*cell_files(op, "forward"), "stepwise", "stepwise_previous", f"stepwise_cell_{op}", "stepwise_forward")
    units = problem.H, UNITS[op], UNITS[op] * cell.gates
    return StepKernel(f"{op}_stepwise_forward", files, problem, inputs, output, template, units)


@launched("step z before Wh Wh_scales Wh_biases h0 mask lengths sizes")
def stepwise_gru_reset(problem: Problem, dtype: mx.Dtype, inputs: Present, _: bool) -> StepKernel:
    """r * mask * h_before, r, z [3, B, D H] of each step, flat; metal/stepwise_gru_reset.metal has the inputs."""
    template = {"CELL": cell_number(problem.cell), "ROWS": stepwise_rows(problem.B), "S": dtype}
    output = row_length(problem, problem.H, 3, False, dtype), dtype
    files = (*cell_files("gru", "forward"), "stepwise", "stepwise_previous", "stepwise_gru_reset")
    return StepKernel("stepwise_gru_reset", files, problem, inputs, output, template, (problem.H, 16, 32))


@launched("step z before reset_row Wh Wh_scales Wh_biases h0 keep lengths sizes")
def stepwise_gru_candidate(problem: Problem, dtype: mx.Dtype, inputs: Present, _: bool) -> StepKernel:
    """The row of each step; metal/stepwise_gru_candidate.metal has the inputs and what is in it."""
    keeps = problem.training or problem.return_gates
    template = {"CELL": cell_number(problem.cell), "ROWS": stepwise_rows(problem.B)}
    template |= {"KEEPS": keeps, "S": dtype, "X": row_type(dtype)}
    output = row_length(problem, problem.H, 4 if keeps else 1, False, dtype), row_type(dtype)
    files = (*cell_files("gru", "forward"), "stepwise", "stepwise_gru_candidate")
    return StepKernel("stepwise_gru_candidate", files, problem, inputs, output, template, (problem.H, 32, 32))


@launched("step now_row weights gates states states0 mask keep lengths sizes")
def stepwise_gru_reset_backward(problem: Problem, dtype: mx.Dtype, inputs: Present, _: bool) -> StepKernel:
    """The row of each step back; metal/stepwise_gru_reset_backward.metal has the inputs."""
    tile = tile_of(problem, problem.H)
    template = backward_template(problem, False, dtype, tile)
    output = row_length(problem, problem.H, 3 if inputs["keep"] is None else 4, True, dtype), row_type(dtype)
    files = (*cell_files("gru", "backward"), "stepwise", "stepwise_gru_reset_backward")
    units = problem.H, tile[1], tile[1]
    return StepKernel("stepwise_gru_reset_backward", files, problem, inputs, output, template, units)


@launched("step before Wp Wp_scales Wp_biases sizes")
def stepwise_project(problem: Problem, dtype: mx.Dtype, inputs: Present, _: bool) -> StepKernel:
    """A row with h [B, D P] of each step; metal/stepwise_project.metal has the inputs."""
    tile = tile_of(problem, problem.P)
    template = {"ROWS": tile[0], "COLUMNS": tile[1], "S": dtype, "X": row_type(dtype)}
    output = row_length(problem, problem.P, 1, False, dtype), row_type(dtype)
    files = ("stepwise", "stepwise_project")
    units = problem.P, tile[1], tile[1]
    return StepKernel("lstm_stepwise_project", files, problem, inputs, output, template, units)


@launched("step before dh_now weights gates states states0 q extra mask keep lengths dh dc dgates dhT dcT sizes")
def stepwise_backward(problem: Problem, dtype: mx.Dtype, inputs: Present, _: bool) -> StepKernel:
    """The row of each step back; metal/stepwise_backward.metal has the inputs and what is in it."""
    cell, op, tile = problem.cell, problem.cell.op, tile_of(problem, problem.H)
    template = backward_template(problem, inputs["extra"] is not None, dtype, tile)
    arrays = cell.gates if inputs["keep"] is None else cell.gates + 1
    output = row_length(problem, problem.H, arrays, op != "rnn", dtype), row_type(dtype)
    units = problem.H, tile[1], tile[1]
    files = (*backward_files(problem), "stepwise_backward")
    return StepKernel(f"{op}_stepwise_backward", files, problem, inputs, output, template, units)


@launched("step before weights gates mask lengths dh dhT sizes")
def stepwise_dh(problem: Problem, dtype: mx.Dtype, inputs: Present, has_rows: bool) -> StepKernel:
    """A row with dh_t [B, D P] of each step or, without rows, dh0, flat; metal/stepwise_dh.metal has the inputs."""
    op, tile = problem.cell.op, tile_of(problem, problem.P)
    template = backward_template(problem, False, dtype, tile)
    output = row_length(problem, problem.P, 1, False, dtype), row_type(dtype) if has_rows else dtype
    units = problem.P, tile[1], tile[1]
    files = (*backward_files(problem), "stepwise_dh")
    return StepKernel(f"{op}_stepwise_dh", files, problem, inputs, output, template, units)


def tile_of(problem: Problem, width: int) -> tuple[int, int]:
    """Rows and columns of a threadgroup's product of `width` columns, where the cells need one each: by lanes 8
    columns, else the largest tile that makes enough threadgroups."""
    rows = stepwise_rows(problem.B)
    if rows < 8:
        return rows, 8
    tiles = TILES[rows]
    groups = [-(-problem.B // high) * -(-width // wide) * problem.directions for high, wide in tiles]
    return next((tile for tile, count in zip(tiles, groups, strict=True) if count >= FEWEST_GROUPS), tiles[-1])


def backward_template(problem: Problem, peephole: bool, dtype: mx.Dtype, tile: tuple[int, int]) -> Template:
    """Template numbers of the steps back."""
    rows, columns = tile
    found = {"CELL": cell_number(problem.cell, peephole), "ROWS": rows, "COLUMNS": columns}
    return found | {"S": dtype, "X": row_type(dtype)}


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


class Sequences(NamedTuple):
    """A launch over the rows that a sweep left: the names of its inputs and outputs; what it is told of the rows."""

    launch: Launch
    inputs: list[str]
    outputs: list[str]
    sizes: list[mx.array]


Layout = tuple[tuple[tuple[int, ...], int, int], ...]
"""Of each kind of rows: how many are in each array, the numbers of one, the width of its units."""

Wanted = frozenset[str]


def after_sweep(
    find: Callable[..., Any], problem: Problem, given: Inputs, kinds: list[Kind], *, names: Wanted
) -> Arrays:
    """Launches a kernel once, after a sweep, over all kinds of rows; for the outputs wanted."""
    left = [array for rows, _ in kinds for array in rows.pieces]
    layout = tuple([(rows.steps, rows.pieces[-1].size, width) for rows, width in kinds])
    of_rows, inputs = find(problem, given, layout, names)
    arrays = [inputs[name] for name in of_rows.inputs] + left + left[-1:] * (LEFT - len(left)) + of_rows.sizes
    return dict(zip(of_rows.outputs, of_rows.launch(inputs=arrays), strict=True))


def prepare_sequences(
    name: str,
    shaders: tuple[str, ...],
    problem: Problem,
    layout: Layout,
    inputs: Present,
    outputs: Outputs,
    template: Template,
    calls: list[str],
) -> Sequences:
    """The launch of shaders over rows of all kinds, with a thread per item, unit, step and direction."""
    starts = starts_of(sum((steps for steps, _, _ in layout), ()), LEFT)
    numbers = [number for n, (_, size, width) in enumerate(layout) for number in (size, width, n * problem.T)]
    sizes = {"starts": mx.array(starts, mx.int32), "kinds": mx.array(numbers, mx.int32)}
    pieces = [f"piece{n}" for n in range(LEFT)]
    body = f"const Rows<X> rows = {{{{{', '.join(pieces)}}}}};\n" + "\n".join(calls)
    template = template | {"X": row_type(template["S"])}
    groups = -(-problem.B * max(width for _, _, width in layout) // 256), problem.T, problem.directions
    shaders = ("cell", "store", f"stepwise_index_{index_bits(problem)}", "stepwise", "stepwise_sequences", *shaders)
    every = {**inputs, **dict.fromkeys(pieces, True), **sizes}
    call, _ = prepare(named(name, problem), shaders, every, outputs, template, body, groups, 256)
    given = [name for name, is_there in inputs.items() if is_there]
    return Sequences(call, given, [name for name, output in outputs.items() if output], list(sizes.values()))


@launched("h0 c0 lengths sizes", after_sweep)
def stepwise_outputs(problem: Problem, dtype: mx.Dtype, inputs: Present, layout: Layout, names: Wanted) -> Sequences:
    """Those of h, c, gates, hT, cT in `names`, out of the rows of a sweep: the cells' and, if it projects, h's."""
    (T, B, H, P), D, gates = problem[:4], problem.directions, problem.cell.gates
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
    if len(layout) == 1:
        calls = [f"{start.format('GATES, CARRIES, S')}, {arguments({**inputs, **outputs})}, {end}"]
    else:
        of_cells = arguments({**inputs, **outputs} | dict.fromkeys(("h0", "h", "hT")))
        of_h = arguments({**inputs, **outputs} | dict.fromkeys(("c0", "c", "cT", "gates")))
        calls = [
            f"{start.format('GATES, CARRIES, S')}, {of_cells}, {end}",
            f"{start.format('0, false, S')} + 3, {of_h}, {end}",
        ]
    name = f"{problem.cell.op}_stepwise_outputs" + "_projected" * (len(layout) > 1)
    return prepare_sequences(name, ("stepwise_outputs",), problem, layout, inputs, outputs, template, calls)


@launched("gates states lengths sizes", after_sweep)
def stepwise_gradients(problem: Problem, dtype: mx.Dtype, inputs: Present, layout: Layout, names: Wanted) -> Sequences:
    """dz and those of dc0, d_out, carry in `names`, out of the rows of a sweep back. If it projects also dh, of rows
    of its own, and, if that is in `names`, m: what the projection multiplied."""
    (T, B, H, P), D, cell, projects = problem[:4], problem.directions, problem.cell, len(layout) > 1
    shapes = {
        "dz": ((T, B, D * cell.gates * H), dtype),
        "dc0": ((B, D * H), dtype),
        "d_out": ((T, B, D * cell.gates * H), dtype),
        "carry": ((T, B, D * H), dtype),
        "dh": ((T, B, D * P), dtype),
        "m": ((D, T, B, H), dtype),
    }
    names = names | {"dz"} | ({"dh"} if projects else set())
    outputs = {name: shape if name in names else None for name, shape in shapes.items()}
    inputs = {**inputs, **({} if names & {"d_out", "m"} else {"gates": None})}
    inputs |= {} if "m" in names else {"states": None}
    candidate, reset = (cell.gate_order.index(gate) for gate in "nr") if "d_out" in names else (0, 0)
    template = {"GATES": cell.gates, "CANDIDATE": candidate, "RESET": reset, "CARRIES": cell.op != "rnn", "S": dtype}
    start, end = "stepwise_gradients<{}>(rows, starts, kinds", "thread_position_in_grid);"
    numbers, lengths = "GATES, CANDIDATE, RESET, CARRIES, S", arguments(select(inputs, "lengths"))
    written = arguments(select(outputs, "dz dc0 d_out carry"))
    calls = [f"{start.format(numbers)}, {arguments(select(inputs, 'gates'))}, {lengths}, sizes, {written}, {end}"]
    shaders = ("stepwise_gradients",)
    if projects:
        calls += [
            f"{start.format('1, 0, 0, false, S')} + 3, absent, {lengths}, sizes, dh, absent, absent, absent, {end}"
        ]
    if "m" in names:
        template |= {"CELL": cell_number(cell)}
        calls += [f"stepwise_projected<CELL, S>(gates, states, {lengths}, sizes, m, {end}"]
        shaders = (f"cell_{cell.op}", *shaders, "stepwise_projected")
    name = f"{cell.op}_stepwise_gradients"
    return prepare_sequences(name, shaders, problem, layout, inputs, outputs, template, calls)
