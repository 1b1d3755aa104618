"""The launches of the `fused` shaders: one for all cells and both directions, forward and backward each."""

from collections.abc import Collection
from typing import NamedTuple

import mlx.core as mx

from ..cells import Cell, GRUCell
from ..packing import Packing, field_of
from ..problem import Arrays, Cut, Problem
from .launch import Inputs, Launch, Outputs, Template, arguments, cell_number, kept, prepare, present

SWEEPS = ("forward", "backward")

LANES = {"lstm": 4, "gru": 4, "rnn": 1}
"""Lanes of a simdgroup that share a hidden unit; metal/fused_cell_*.metal say what each does."""

ARITHMETIC = {(op, sweep): (f"cell_{op}", f"cell_{op}_{sweep}") for op in ("lstm", "gru") for sweep in SWEEPS}
ARITHMETIC |= {("rnn", sweep): ("cell_rnn",) for sweep in SWEEPS}
"""The files of a cell's arithmetic."""

REGISTERS = {384: 128, 448: 116, 512: 104, 576: 92, 640: 80, 704: 72, 768: 68, 832: 60, 896: 56, 1024: 52}
"""Registers of 32 bits that a thread can have, by the most threads of its threadgroup: published for the M1."""

WORKING_REGISTERS = {
    ("lstm", "forward"): {1: 44, 2: 64, 8: 60},
    ("lstm", "backward"): {1: 44, 2: 64, 8: 64},
    ("gru", "forward"): {1: 40, 2: 56, 4: 84, 8: 60},
    ("gru", "backward"): {1: 52, 2: 72, 4: 108, 8: 64},
    ("rnn", "forward"): {1: 36, 2: 56, 4: 92, 8: 56},
    ("rnn", "backward"): {1: 44, 2: 60, 4: 92, 8: 56},
}
"""What a thread needs beside its weights, by cell, sweep and batch rows of a threadgroup, 8 in matrices: sums,
operands, weights on their way, states, indices. From the machine code of Mesa's compiler for the M1: with as many
weights in registers as it does not spill, this is what remains at H = 96 to 256. Apple's compiler may differ."""

PACKED_REGISTERS = {1: 12, 2: 20, 4: 40}
"""What it needs more where weights are packed, by batch rows, likewise: numbers on their way, sums of x."""

OPTION_REGISTERS = {"mask": 4, "keep": 4, "lengths": 8, "extra": 4}
"""What it needs more for an input that may be absent, likewise."""

MATRIX_BATCH = 65
"""The smallest batch, of both directions together, for the form in 8 x 8 matrices. It needs 8 items per threadgroup, so
smaller batches would leave GPU cores without work. From a model of the hardware, not measured."""

THREADGROUP_BYTES = 32768
"""Metal's limit."""


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


def fused_tiling(
    cell: Cell,
    B: int,
    H: int,
    itemsize: int,
    *,
    backward: bool,
    directions: int = 1,
    more: int = 0,
    cut: Cut | None = None,
    packing: Packing | None = None,
) -> FusedTiling:
    """The tiling of one sweep. `more`: registers that its options need; `cut`: as it was measured; `packing`: how the
    weights are packed, forward, where a vector is four words of them."""
    lanes, gates = LANES[cell.op], cell.gates
    sweep = "backward" if backward else "forward"
    wanted = cut.rows if cut else rows_for(cell, B, H, directions)
    matrices = wanted == 8 and fits_matrices(cell, H) and packing is None
    # The length of each product of a step.
    lengths = [H, 2 * H] if backward and two_products(cell) else [gates * H if backward else H]
    if matrices:
        units, rows, threads, piece, slots = 8, 8, 32 * -(-H // 8), 8, 1 if backward else gates
        weights = -(-lengths[0] // 16) * slots
    else:
        units = 8 // lanes * (2 if backward and lanes > 1 else 1)
        threads, piece = 32 * -(-(-(-H // units) * lanes * units) // 32), 4 * lanes * units
        rows = rows_of(cell, sweep, min(wanted, 4), threads, packing is not None)
        slots = units * (1 if backward else gates)
        weights = slots * sum(-(-length // piece) for length in lengths)
    if packing:
        span, weights = packed_share(packing, H, lanes * units, slots)
        lengths, itemsize = [span * lanes * units], 4
        # Sums of a group beside those of all; what is kept between two products.
        more += slots * rows * (span > packing.group_size) + 8 * two_products(cell)
    one = 4 * rows * piece * sum(-(-length // piece) for length in lengths)
    vectors = 1 if len(lengths) > 1 or (matrices and backward and 2 * one > THREADGROUP_BYTES) else 2
    # A vector of 4 weights takes as many registers as a weight has bytes.
    working = working_registers(cell, sweep, rows, packing is not None) + more
    resident = max(0, min(weights, (registers_of(threads) - working - (cut.spare if cut else 0)) // itemsize))
    used = working + resident * itemsize
    return FusedTiling(
        matrices, units, rows, threads, vectors, vectors * one, weights, resident, resident / weights, used
    )


def packed_share(packing: Packing, H: int, lanes: int, slots: int) -> tuple[int, int]:
    """What a lane has of rows of packed weights that so many lanes share: the weights of each row, and the vectors of
    all; metal/fused_packed.metal has the same rule."""
    span = max(8, 2 ** (-(-H // lanes) - 1).bit_length())
    pieces = max(1, span // packing.group_size)
    words = span * field_of(packing) // 32 + pieces * (2 if packing.mode == "affine" else 1)
    return span, -(-slots * words // 4)


def rows_for(cell: Cell, B: int, H: int, directions: int) -> int:
    """Batch rows of a threadgroup, 8 in matrices: more share a stream of weights, as far as there are items for all
    cores."""
    matrices = directions * B >= MATRIX_BATCH and fits_matrices(cell, H)
    return 8 if matrices else 1 if B <= 16 else 2 if B <= 64 else 4


def rows_of(cell: Cell, sweep: str, wanted: int, threads: int, packed: bool) -> int:
    """Batch rows of a threadgroup that multiplies in lanes: as far as there are registers."""
    most = registers_of(threads)
    possible = [rows for rows in WORKING_REGISTERS[cell.op, sweep] if rows <= wanted]
    return max(rows for rows in possible if rows == 1 or working_registers(cell, sweep, rows, packed) <= most)


def working_registers(cell: Cell, sweep: str, rows: int, packed: bool) -> int:
    """What a thread needs beside its weights, without options."""
    return WORKING_REGISTERS[cell.op, sweep][rows] + (PACKED_REGISTERS[rows] if packed else 0)


def tiling_of(sweep: str, problem: Problem, dtype: mx.Dtype, given: Collection[str] = ()) -> FusedTiling:
    """The tiling of a sweep of a problem; with its inputs' names that of the very launch, as they need registers."""
    more = sum(count for name, count in OPTION_REGISTERS.items() if name in given)
    how = {"backward": sweep == "backward", "directions": problem.directions, "more": more, "cut": problem.cut}
    packing = problem.packing if sweep == "forward" else None
    return fused_tiling(problem.cell, problem.B, problem.H, dtype.size, packing=packing, **how)


def two_products(cell: Cell) -> bool:
    """Whether a step has two products, one after the other: a GRU whose reset comes before the candidate's."""
    return isinstance(cell, GRUCell) and cell.reset == "before"


def registers_of(threads: int) -> int:
    """What a thread can have in a threadgroup of so many."""
    return REGISTERS[min(most for most in REGISTERS if most >= threads)]


def fits_matrices(cell: Cell, H: int) -> bool:
    """Whether `fused` can multiply in matrices. A threadgroup has at most 32 simdgroups, of 8 units each; a GRU whose
    reset comes before the candidate's product has two products per step, which only the other form knows."""
    return H <= 256 and not two_products(cell)


def fused_forward(problem: Problem, given: Inputs, steps: int) -> Arrays:
    """h, gates, hT and, of an LSTM, c and cT of the `steps` steps that `sizes` names, sequences of that many.

    Gates only if the problem keeps them; c and cT are float32. metal/fused.metal has the arrays.
    """
    return launch_fused("forward", problem, given, steps)


def fused_backward(problem: Problem, given: Inputs, steps: int, *, keeps_d: bool) -> Arrays:
    """dz, dh0 and, of an LSTM, dc0, float32, of the `steps` steps that `sizes` names; metal/fused_backward.metal.

    If wanted also d_out [steps, B, D G H]: dz as the recurrent product had it; with `keep` carry [steps, B, D H], as in
    `engines.ops.sweep.sweep_backward`.
    """
    return launch_fused("backward", problem, given, steps, keeps_d)


def index_of(problem: Problem) -> mx.Dtype:
    """The integers that count the elements of a launch's arrays, of which those with all gates are the largest."""
    elements = problem.T * problem.B * problem.directions * problem.cell.gates * problem.H
    return mx.uint32 if elements < problem.limits.index else mx.uint64


def fused_pack_words(problem: Problem, Wh: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
    """Packed Wh as the lanes of the sweep forward read it, [D, simdgroups, vectors, 32, 4 words];
    metal/fused_pack_words.metal."""
    arrays = [Wh, scales] if biases is None else [Wh, scales, biases]
    return prepared_pack_words(problem, scales.dtype)(inputs=arrays)[0]


@kept
def prepared_pack_words(problem: Problem, dtype: mx.Dtype) -> Launch:
    """The launch that packs words of weights whose scales have this dtype."""
    op, D, tiling = problem.cell.op, problem.directions, tiling_of("forward", problem, dtype)
    packed = packed_template(problem)
    inputs = {"Wh": True, "scales": True, "biases": True if packed["BIASED"] else None}
    outputs: Outputs = {"packed": ((D, tiling.threads // 32, tiling.weights, 32, 4), mx.uint32)}
    template = {"CELL": cell_number(problem.cell), "H": problem.H, "UNITS": tiling.units, "COUNT": tiling.weights}
    weights = f"packed_weights<BITS, SIZE>({arguments(inputs)})"
    threads = "thread_position_in_grid.xy, threads_per_threadgroup.x"
    body = f"fused_pack_words<{', '.join(template)}, FIELD, {VECTOR}>({weights}, packed, {threads});"
    shaders = "cell", *ARITHMETIC[op, "forward"], "fused", "packed", "fused_packed", "fused_matrix", f"fused_cell_{op}"
    shaders += ("fused_pack", "fused_pack_words")
    template |= packed | {"BITS": problem.packing.bits if problem.packing else 32, "S": dtype}
    groups = (tiling.weights, D)
    return prepare(f"{op}_fused_pack_words", shaders, inputs, outputs, template, body, groups, tiling.threads)[0]


def packed_template(problem: Problem) -> Template:
    """How weights are packed, as template numbers."""
    packing = problem.packing or Packing(1, 32, "")
    return {"FIELD": field_of(packing), "SIZE": packing.group_size, "BIASED": packing.mode == "affine"}


VECTOR = "PackedVector<FIELD, SIZE, BIASED>"
"""What the lanes of a sweep read packed weights as."""


def fused_pack(sweep: str, problem: Problem, Wh: mx.array) -> mx.array:
    """Wh as the lanes of a sweep read it, [D, simdgroups, vectors, 32, 4]; metal/fused_pack.metal."""
    return prepared_pack(sweep, problem, Wh.dtype)(inputs=[Wh])[0]


@kept
def prepared_pack(sweep: str, problem: Problem, dtype: mx.Dtype) -> Launch:
    """The launch that packs a sweep's weights."""
    op, D, tiling = problem.cell.op, problem.directions, tiling_of(sweep, problem, dtype)
    outputs: Outputs = {"packed": ((D, tiling.threads // 32, tiling.weights, 32, 4), dtype)}
    template = {"CELL": cell_number(problem.cell), "H": problem.H, "UNITS": tiling.units}
    template |= {"COUNT": tiling.weights, "BACK": sweep == "backward", "MATRICES": tiling.matrices, "S": dtype}
    body = f"fused_pack<{', '.join(template)}>(Wh, packed, thread_position_in_grid.xy, threads_per_threadgroup.x);"
    shaders = ("cell", *ARITHMETIC[op, "forward"], "fused", "fused_matrix", f"fused_cell_{op}", "fused_pack")
    groups = (tiling.weights, D)
    return prepare(f"{op}_fused_pack", shaders, {"Wh": True}, outputs, template, body, groups, tiling.threads)[0]


INPUTS = {
    sweep: tuple(names.split())
    for sweep, names in {
        "forward": "z h0 c0 packed extra mask keep lengths sizes numbers",
        "backward": "gates states first packed extra mask keep lengths dh beside dgates dhT dcT sizes",
    }.items()
}
"""Those of a sweep's shader, in its order."""


def outputs_of(
    sweep: str, problem: Problem, dtype: mx.Dtype, given: Collection[str], steps: int, keeps_d: bool
) -> Outputs:
    """Those of a sweep's shader, in its order; None for what it shall not write."""
    (_, B, H, _), D, cell = problem[:4], problem.directions, problem.cell
    wide, all_gates = (steps, B, D * H), ((steps, B, D * cell.gates * H), dtype)
    h, c, has_c = ((B, D * H), dtype), ((B, D * H), mx.float32), "c" in cell.outputs
    found: Outputs
    if sweep == "backward":
        carry = (wide, mx.float32) if "keep" in given else None
        found = {"dz": all_gates, "d_out": all_gates if keeps_d else None, "carry": carry}
        return found | {"dh0": h, "dc0": c if has_c else None}
    found = {"h": (wide, dtype), "c": (wide, mx.float32) if has_c else None}
    found["gates"] = all_gates if problem.training or problem.return_gates else None
    return found | {"hT": h, "cT": c if has_c else None}


def launch_fused(sweep: str, problem: Problem, inputs: Inputs, steps: int, keeps_d: bool = False) -> Arrays:
    """Launch fused_forward or fused_backward over the steps that `sizes` names."""
    given = {name: array for name in INPUTS[sweep] if (array := inputs[name]) is not None}
    dtype = given["z" if sweep == "forward" else "packed"].dtype
    call, names = prepared_sweep(sweep, problem, dtype, tuple(given), steps, keeps_d)
    return dict(zip(names, call(inputs=list(given.values())), strict=True))


@kept
def prepared_sweep(
    sweep: str, problem: Problem, dtype: mx.Dtype, given: tuple[str, ...], steps: int, keeps_d: bool
) -> tuple[Launch, list[str]]:
    """The launch of a sweep's shader over so many steps with the inputs that are `given`; the names of its outputs."""
    inputs = present(INPUTS[sweep], given)
    outputs = outputs_of(sweep, problem, dtype, given, steps, keeps_d)
    op, D, back = problem.cell.op, problem.directions, sweep == "backward"
    tiling = tiling_of(sweep, problem, dtype, given)
    template: Template = {"CELL": cell_number(problem.cell, "extra" in given), "H": problem.H}
    if tiling.matrices:
        form, element = "matrix_", "float"
        template |= {"RESIDENT": tiling.resident} | ({"VECTORS": tiling.vectors} if back else {})
    else:
        form, element = "", "vec<float, 4>"
        template |= {"UNITS": tiling.units, "ROWS": tiling.rows, "RESIDENT": tiling.resident}
    template |= {"Index": index_of(problem), "S": dtype}
    numbers, own = list(template), (f"fused_cell_{op}",)
    if back:
        own += f"fused_cell_{op}_backward", "fused_item"
    elif not tiling.matrices:
        numbers.append(VECTOR if problem.packing else "vec<S, 4>")
        if problem.packing:
            template |= packed_template(problem)
            own = "packed", "fused_packed", *own
    function, size = f"fused_{form}{sweep}", tiling.bytes // (4 if tiling.matrices else 16)
    threads = "thread_position_in_threadgroup.x, threads_per_threadgroup.x"
    threads += ", thread_index_in_simdgroup" if tiling.matrices else ""
    arrays = arguments({**inputs, **outputs})
    body = f"""threadgroup {element} vectors[{size}];
{function}<{", ".join(numbers)}>({arrays}, vectors, threadgroup_position_in_grid.xy, {threads});"""
    common = ("fused", "fused_matrix") if tiling.matrices else ("fused",)
    shaders = ("cell", "store", *ARITHMETIC[op, sweep], *common, *own, function)
    groups = (-(-problem.B // tiling.rows), D)
    launch, _ = prepare(f"{op}_{function}", shaders, inputs, outputs, template, body, groups, tiling.threads)
    return launch, [name for name, output in outputs.items() if output is not None]
