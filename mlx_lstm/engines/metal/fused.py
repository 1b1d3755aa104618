"""Engine `fused`: run the recurrence on the GPU, with all steps of a pass in one launch of a Metal shader.

A threadgroup computes all steps of a few batch items in one direction and keeps the recurrent weights in its
registers. MLX computes the products over all T * B rows. h and gates are stored in the dtype of the arrays, c in
float32; all arithmetic is in float32. All results are lazy, so the engine also runs inside `mx.compile` and exports.
It does not support a projection. Quantized recurrent weights stay quantized; a kernel that multiplies 8 x 8 matrices
gets dequantized weights instead.
"""

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..cells import AnyCell, norm_blocks
from ..directions import half
from ..ops.packed import matrix, scales_of
from ..ops.sweep import gradients_after_sweep
from ..packing import Packing, field_of, is_packed
from ..problem import CORES, Arrays, Cut, Problem
from . import norms
from .kernel import (
    STRUCTS,
    Inputs,
    Launch,
    Outputs,
    Source,
    Template,
    cached,
    cell_number,
    constant,
    contiguous,
    fields_of,
    layout_number,
    numbers_of,
    prepare,
    struct_of,
    whole_mask,
)
from .products import candidates, gradients_in_few_launches, is_plain, project, recurrent_input, takes_product

SWEEPS = ("forward", "backward")

# --- The forward and the backward pass ---


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """Run the forward pass, with D directions and G gates. Return h [T, B, D H], gates [T, B, D G H] and hT [B, D
    H]; for an LSTM also c [T, B, D H] and cT [B, D H], both in float32. Gates are returned only in training or if
    the caller asks for them."""
    dtype, mask = arrays["x"].dtype, whole_mask(problem, arrays)
    sweep = forward_sweep(problem, dtype, tuple(arrays), mask is not None and mask.shape[0] > 1)
    inputs: Inputs = {"mask": mask, "numbers": sweep.numbers} | norms.inputs_of(problem, arrays)
    for name in sweep.options:
        inputs[name] = contiguous(arrays[name])
    for name in ("h0", "c0", "lengths"):
        if name in arrays:
            inputs[name] = arrays[name]
    inputs["z"] = project(problem, arrays, launches=len(sweep.parts))
    inputs["arranged"] = arrays["arranged"] if "arranged" in arrays else arranged(problem, arrays, sweep)
    return run(problem, sweep.parts, inputs, {"hT": "h0", "cT": "c0"})


def arranged(problem: Problem, arrays: Arrays, sweep: "Sweep | None" = None) -> mx.array:
    """Return the recurrent weights in the order in which the lanes of the forward pass read them. A caller that runs
    many steps one at a time passes the result to `forward` as the array `arranged`. sweep: the launches of the forward
    pass, or None to build them."""
    dtype = arrays["x"].dtype
    sweep = forward_sweep(problem, dtype, tuple(arrays), False) if sweep is None else sweep
    if sweep.quantized:
        scales, biases = scales_of(arrays, "Wh", dtype)
        Wh = [arrays["Wh"], scales] if biases is None else [arrays["Wh"], scales, biases]
    elif problem.packing is not None and is_packed("Wh", arrays):
        Wh = [matrix(problem.packing, arrays, "Wh", dtype)]
    else:
        Wh = [arrays["Wh"]]
    return sweep.arrange(inputs=Wh)[0]


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """Run the backward pass. Return the gradients of all arrays, by name.

    saved: the outputs of the forward pass. cotangents: the gradients of some outputs, with the keys h, c, gates, hT,
    cT. If the gates were not saved, the forward pass runs again to compute them.
    """
    cell, has_c = problem.cell, problem.cell.op == "lstm"
    if saved.get("gates") is None and cell.op != "rnn":
        saved = forward(problem._replace(training=True), arrays)
    mask = whole_mask(problem, arrays)
    differ = mask is not None and mask.shape[0] > 1
    sweep = backward_sweep(problem, arrays["Wh"].dtype, tuple(arrays), differ, tuple(cotangents))
    inputs: Inputs = {"mask": mask, "states": saved["c" if has_c else "h"]} | norms.inputs_of(problem, arrays)
    if cell.op != "rnn":
        inputs["gates"] = saved["gates"]
    for name in sweep.options:
        inputs[name] = contiguous(arrays[name])
    for name, array in (("lengths", "lengths"), ("states0", "c0" if has_c else "h0")):
        if array in arrays:
            inputs[name] = arrays[array]
    for name in cotangents:
        inputs[f"d{name}"] = cotangents[name]
    if sweep.numbers is not None:
        inputs["numbers"] = sweep.numbers
    operand: Arrays = {}
    if sweep.few or sweep.takes_product or norms.of_product(cell):
        operand = recurrent_input(problem, arrays, saved["h"], mask)
    of_norms = norms.numbers_before_sweep(problem, arrays, saved, operand.get("h_in"))
    inputs |= of_norms
    if sweep.takes_product and "q" not in inputs:
        inputs["q"] = candidates(problem, arrays, operand["h_in"])
    if len(sweep.parts) > 1:
        for name in ("gates", "states", "states0", "dh", "dc", "q", "dgates", *of_norms):
            if name in inputs:
                inputs[name] = contiguous(inputs[name])
    inputs["arranged"] = sweep.arrange(inputs=[arrays["Wh"]])[0]
    results = run(problem, sweep.parts, inputs, {"dh0": "dhT", "dc0": "dcT"})
    if sweep.few:
        return gradients_in_few_launches(problem, arrays, results | operand)
    return gradients_after_sweep(problem, arrays, saved, norms.for_gradients(problem, results, of_norms))


class Part(NamedTuple):
    """One launch of a forward or backward pass, which runs some of its steps: the launch, its array of sizes, and
    the names of its inputs and outputs."""

    launch: Launch
    sizes: mx.array
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Sweep(NamedTuple):
    """The launches of a forward or backward pass. First `arrange` copies Wh into the order in which lanes read it.
    Then the launches `parts` follow; each of them runs a range of the time steps. A backward pass begins with the
    last steps.

    options: the names of the caller's arrays that the launches read as contiguous arrays. numbers: the array of an
    LSTM's forget bias and limits, if the launches read it. quantized: whether the launches read quantized weights. few:
    whether few launches can compute the gradients of the weights after the backward steps. takes_product: whether the
    backward steps read the recurrent product of a GRU's candidate.
    """

    arrange: Launch
    parts: tuple[Part, ...]
    options: tuple[str, ...]
    numbers: mx.array | None = None
    quantized: bool = False
    few: bool = False
    takes_product: bool = False


def run(problem: Problem, parts: tuple[Part, ...], inputs: Inputs, carried: dict[str, str]) -> Arrays:
    """Run the launches `parts` of a pass, one after the other, and return the results of the whole pass. carried:
    which result of a launch is an input of the next launch, as a dict from the result's name to the input's name."""
    pieces: list[Arrays] = []
    for part in parts:
        inputs["sizes"] = part.sizes
        values = part.launch(inputs=[inputs[name] for name in part.inputs])
        pieces.append(dict(zip(part.outputs, values, strict=True)))
        for name, as_input in carried.items():
            if name in part.outputs:
                inputs[as_input] = pieces[-1][name]
    results = pieces[-1]
    if len(pieces) > 1:
        in_order = pieces[::-1] if "dh0" in results else pieces  # the order of the forward steps
        for name in results:
            if name not in carried:
                results[name] = joined(problem, [piece[name] for piece in in_order])
    return results


def joined(problem: Problem, pieces: list[mx.array]) -> mx.array:
    """Return the whole sequence, joined from the pieces that the launches of a pass returned. `pieces` are in the
    order of the forward steps, which is the reverse of the order of time in a reverse direction."""
    if problem.bidirectional:
        forward, reverse = ([half(piece, d) for piece in pieces] for d in range(2))
        return mx.concatenate([mx.concatenate(forward), mx.concatenate(reverse[::-1])], axis=-1)
    return mx.concatenate(pieces[::-1] if problem.reverse else pieces)


# --- Launches ---

LAUNCH_CYCLES = 0.02 * 1.278e9
"""The longest predicted time of a launch in GPU cycles: 20 ms at the clock of an M1. MLX puts 40 to 50 operations into
one command buffer, and macOS ends a command buffer that keeps the GPU from the display for too long."""

LANES = {"lstm": 4, "gru": 4, "rnn": 1}
"""The number of lanes of a simdgroup that share a hidden unit, by op. metal/fused_lstm.metal, fused_gru.metal and
fused_rnn.metal say what each lane does."""

VECTOR = "PackedVector<FIELD, GROUP, BIASED>"
"""The name of the Metal type in which lanes read quantized weights."""

LANE_FILES, QUANTIZED_FILES = ("fused_lanes",), ("quantized", "fused_quantized")
"""The shader files of the product in lanes (each lane multiplies a part of the weights), and the additional files for
quantized weights."""

NORM_FILES = ("norm", "fused_norm")
"""The additional shader files of a cell with layer normalisation."""

ARRANGE_FILES = ("fused_matrix", "fused_arrange")
"""The shader files of the launches that copy weights into the order in which lanes read them. They serve the product
in lanes and the product of 8 x 8 matrices."""

INPUTS = {
    "forward": ("z", "h0", "c0", "arranged", "peephole", "bhn", "mask", "keep", "lengths", "sizes", "numbers"),
    "backward": (
        *("gates", "states", "states0", "arranged", "peephole", "bhn", "mask", "keep", "lengths"),
        *("dh", "dc", "q", "dgates", "dhT", "dcT", "sizes", "numbers"),
    ),
}
"""The arrays that the shader of the forward and of the backward pass can read, in the order of its fields."""


@cached
def forward_sweep(problem: Problem, dtype: mx.Dtype, names: tuple[str, ...], masks_differ: bool) -> Sweep:
    """Return the launches of the forward pass for arrays of these names. masks_differ: whether each step has its own
    mask."""
    bare, has_c = readable(problem, names, dtype), problem.cell.op == "lstm"
    there = {name: name in names for name in ("h0", "c0", "lengths")} | {"z": True, "arranged": True, "sizes": True}
    there |= {"mask": "mask" in names or "keep" in names, "numbers": has_c}
    present = {name for name in there if there[name]} | {*options_of(problem, names)}
    present |= norms.present(problem, names, "forward")
    later = present | ({"h0", "c0"} if has_c else {"h0"})
    parts = tuple(
        prepared_part("forward", bare, dtype, later if n else present, steps, sizes)
        for n, (steps, sizes) in enumerate(division(bare, masks_differ))
    )
    quantized = bare.packing is not None
    arrange = arrange_quantized(bare, names, dtype) if quantized else arrange_launch("forward", bare, dtype)
    return Sweep(arrange, parts, options_of(problem, names), numbers_of(problem.cell), quantized)


@cached
def backward_sweep(
    problem: Problem, dtype: mx.Dtype, names: tuple[str, ...], masks_differ: bool, cotangents: tuple[str, ...]
) -> Sweep:
    """Return the launches of the backward pass for arrays and cotangents of these names. masks_differ: whether each
    step has its own mask."""
    cell, has_c = problem.cell, problem.cell.op == "lstm"
    few, product, bare = is_plain(problem, names), takes_product(cell), readable(problem)
    saves_d = product and (few or norms.of_product(cell))
    there = {"states": True, "arranged": True, "sizes": True, "lengths": "lengths" in names, "q": product}
    there |= {"mask": "mask" in names or "keep" in names, "gates": cell.op != "rnn"}
    there["numbers"] = cell.stops_c
    there |= {"states0": ("c0" if has_c else "h0") in names} | {f"d{name}": True for name in cotangents}
    present = {name for name in there if there[name]} | {*options_of(problem, names)}
    present |= norms.present(problem, names, "backward")
    later = present | ({"dhT", "dcT"} if has_c else {"dhT"})
    parts = tuple(
        prepared_part("backward", bare, dtype, later if n else present, steps, sizes, saves_d=saves_d)
        for n, (steps, sizes) in enumerate(reversed(division(bare, masks_differ)))
    )
    arrange = arrange_launch("backward", bare, dtype)
    numbers = numbers_of(cell) if there["numbers"] else None
    return Sweep(arrange, parts, options_of(problem, names), numbers, few=few, takes_product=product)


def options_of(problem: Problem, names: Collection[str]) -> tuple[str, ...]:
    """Return the names in `names` of the optional arrays that the kernels of both passes read: peephole, bhn (a
    GRU's bias of the candidate's recurrent product) and keep (factors on the states). A plain RNN does not read
    `keep`: its only state is h, and the mask on h already includes `keep`."""
    options = ("peephole", "bhn") if problem.cell.op == "rnn" else ("peephole", "bhn", "keep")
    return tuple(name for name in options if name in names)


def readable(problem: Problem, names: Collection[str] = (), dtype: mx.Dtype = mx.float32) -> Problem:
    """Return the problem, but without its packing if the forward kernels do not read quantized weights. They then
    get weights that are dequantized once per pass.

    The kernel that multiplies 8 x 8 matrices cannot read quantized weights. It is used for float32 arrays, because
    it is predicted to take a half to four fifths of the time of a kernel that reads quantized weights. For 16-bit
    arrays dequantized weights would be rounded, so these arrays use the product in lanes, which reads quantized
    weights.
    """
    if problem.packing is None:
        return problem
    bare = problem._replace(packing=None)
    if not is_packed("Wh", names) or (dtype == mx.float32 and tiling_of("forward", bare, dtype).matrices):
        return bare
    return problem


def division(problem: Problem, masks_differ: bool) -> list[tuple[int, mx.array]]:
    """Divide the steps of a pass with a built-in cell into launches. Return, for each launch, the number of its
    steps and its input array `sizes`, which metal/fused.metal describes."""
    tilings = [tiling_of(sweep, problem, problem.dtype) for sweep in SWEEPS]
    return launches_of_pass(problem, tilings, masks_differ)


def launches_of_pass(
    problem: Problem, tilings: "Iterable[FusedTiling]", masks_differ: bool
) -> list[tuple[int, mx.array]]:
    """Return, for each launch in the order of processing, its number of steps and its array of sizes.
    metal/fused.metal lists the sizes. The array has fewer than 8 elements, so that MLX binds it in constant memory.

    tilings: the tilings of the forward and of the backward pass; both passes are divided into the same launches.
    masks_differ: whether each step has its own mask.
    """
    T, B, D, size = problem.T, problem.B, problem.directions, problem.dtype.size
    groups = [(tiling, D * -(-B // tiling.rows)) for tiling in tilings]
    cycles = max(pass_cycles(tiling, count, problem.cores, size, problem.packing) for tiling, count in groups)
    steps = max(1, min(problem.limits.launch_steps, int(LAUNCH_CYCLES / cycles)))
    bounds = [(start, min(start + steps, T)) for start in range(0, T, steps)]
    sizes = [(start, stop, T, B, D, problem.reverse, masks_differ) for start, stop in bounds]
    return [(stop - start, mx.array(numbers, mx.int32)) for (start, stop), numbers in zip(bounds, sizes, strict=True)]


def index_of(problem: Problem) -> mx.Dtype:
    """Return the dtype that kernels use for indices into a launch's arrays: 64 bits if the largest array, the one
    with all gates, has too many elements for 32 bits."""
    elements = problem.T * problem.B * problem.directions * problem.cell.gates * problem.H
    return mx.uint32 if elements < problem.limits.index else mx.uint64


def outputs_of(sweep: str, problem: Problem, dtype: mx.Dtype, keep: bool, steps: int, saves_d: bool) -> Outputs:
    """Return the shape and dtype of each output of the kernel of a pass, in the order of the kernel's struct of
    arrays. An entry is None if the launch does not write this output.

    keep: whether the call has the option `keep`. The backward pass then also writes `carry` [steps, B, D H]: the
    gradient of the carried state (c, or h if there is no c), without the part that flows through the recurrent
    product. saves_d: whether the backward pass writes d_out [steps, B, D G H], the gradient of the recurrent
    product. D is the number of directions, G the number of gates.
    """
    B, H, D, cell = problem.B, problem.H, problem.directions, problem.cell
    wide, all_gates = (steps, B, D * H), ((steps, B, D * cell.gates * H), dtype)
    h, c, has_c = ((B, D * H), dtype), ((B, D * H), mx.float32), "c" in cell.outputs
    outputs: Outputs
    if sweep == "backward":
        carry = (wide, mx.float32) if keep else None
        outputs = {"dz": all_gates, "d_out": all_gates if saves_d else None, "carry": carry}
        if cell.norm is not None:
            outputs["d_product"] = all_gates if norms.of_product(cell) else None
            outputs["d_norm_c"] = (wide, mx.float32) if norms.of_state(cell) else None
        return outputs | {"dh0": h, "dc0": c if has_c else None}
    outputs = {"h": (wide, dtype), "c": (wide, mx.float32) if has_c else None}
    outputs["gates"] = all_gates if problem.training or problem.return_gates else None
    return outputs | {"hT": h, "cT": c if has_c else None}


def prepared_part(
    sweep: str,
    problem: Problem,
    dtype: mx.Dtype,
    present: Collection[str],
    steps: int,
    sizes: mx.array,
    *,
    saves_d: bool = False,
) -> Part:
    """Return one launch that runs `steps` steps of a forward or backward pass. present: the names of the inputs that
    this call has."""
    has_norm = problem.cell.norm is not None
    inputs = {name: name in present for name in (*INPUTS[sweep], *(norms.READ[sweep] if has_norm else ()))}
    outputs = outputs_of(sweep, problem, dtype, "keep" in present, steps, saves_d)
    op, D, back = problem.cell.op, problem.directions, sweep == "backward"
    tiling, quantized = tiling_of(sweep, problem, dtype, present), problem.packing is not None and not back
    template: Template = {"OPTIONS": cell_number(problem.cell, "peephole" in present), "H": problem.H}
    if tiling.matrices:
        shader, element, files = f"fused_matrix_{sweep}", "float", ("fused_matrix",)
        template |= {"RESIDENT": tiling.resident} | ({"VECTORS": tiling.vectors} if back else {})
    else:
        shader, element = f"fused_{sweep}", "vec<float, 4>"
        files = (*LANE_FILES, *(QUANTIZED_FILES if quantized else ()), f"fused_{op}")
        files += (*(NORM_FILES if has_norm else ()), shader)
        template |= {"UNITS": tiling.units, "ROWS": tiling.rows, "RESIDENT": tiling.resident}
    template |= {"Index": index_of(problem), "S": dtype}
    arguments = [STRUCTS[op], *list(template)[1:]]
    if not back and not tiling.matrices:
        arguments.append(VECTOR if quantized else "vec<S, 4>")
    if quantized:
        template |= packing_template(problem)
    written = [name for name, output in outputs.items() if output is not None]
    fields = fields_of((*inputs, *outputs), {*present, *written})
    body = struct_of(fields if has_norm or tiling.matrices else fields | {"norm_eps": "absent"})
    body += f"threadgroup {element} vectors[{tiling.bytes // (4 if tiling.matrices else 16)}];\n"
    threads = "thread_position_in_threadgroup.x, threads_per_threadgroup.x"
    threads += ", thread_index_in_simdgroup" if tiling.matrices else ""
    body += f"{shader}<{', '.join(arguments)}>(a, vectors, threadgroup_position_in_grid.xy, {threads});"
    groups = (-(-problem.B // tiling.rows), D)
    source = Source(f"{op}_{shader}", ("arrays", "cell", f"cell_{op}", "fused", *files), body)
    launch = prepare(source, template, inputs, outputs, groups, tiling.threads)
    return Part(launch, sizes, tuple(name for name in inputs if inputs[name]), tuple(written))


def packing_template(problem: Problem) -> Template:
    """Return the template arguments that say how weights are quantized."""
    packing = problem.packing or Packing(1, 32, "")
    return {"FIELD": field_of(packing), "GROUP": packing.group_size, "BIASED": packing.mode == "affine"}


def arrange(sweep: str, problem: Problem, Wh: mx.array) -> mx.array:
    """Return Wh, copied into the order in which lanes (threads of a simdgroup) read it. The axes of the result are:
    directions, simdgroups, vectors of a lane, the 32 lanes of a simdgroup, the 4 weights of a vector."""
    return arrange_launch(sweep, problem, Wh.dtype)(inputs=[Wh])[0]


@cached
def arrange_launch(sweep: str, problem: Problem, dtype: mx.Dtype) -> Launch:
    """Return the launch that copies the weights of a forward or backward pass into the order in which lanes read
    them."""
    op, D, tiling = problem.cell.op, problem.directions, tiling_of(sweep, problem, dtype)
    outputs: Outputs = {"arranged": ((D, tiling.threads // 32, tiling.weights, 32, 4), dtype)}
    template: Template = {"OPTIONS": layout_number(problem.cell), "UNITS": 1 if tiling.matrices else tiling.units}
    template |= {"BACK": sweep == "backward", "MATRICES": tiling.matrices, "S": dtype}
    body = struct_of({name: name for name in ("Wh", "sizes", "arranged")})
    arguments = ", ".join([STRUCTS[op], *list(template)[1:]])
    body += f"fused_arrange<{arguments}>(a, thread_position_in_grid.xy, threads_per_threadgroup.x);"
    files = ("arrays", "cell", f"cell_{op}", "fused", *LANE_FILES, f"fused_{op}", *ARRANGE_FILES)
    source, inputs = Source(f"{op}_fused_arrange", files, body), {"Wh": True, "sizes": True}
    launch = prepare(source, template, inputs, outputs, (tiling.weights, D), tiling.threads)
    sizes = constant((problem.H, tiling.weights), mx.int32)
    return lambda inputs: launch(inputs=[*inputs, sizes])


@cached
def arrange_quantized(problem: Problem, names: tuple[str, ...], dtype: mx.Dtype) -> Launch:
    """Return the launch that copies quantized weights into the order in which lanes read them. The axes of the copy
    are: directions, simdgroups, vectors of a lane, the 32 lanes of a simdgroup, the 4 words of a vector. A word has 32
    bits. metal/fused_quantized.metal describes what a lane's words contain."""
    op, D, tiling = problem.cell.op, problem.directions, tiling_of("forward", problem, dtype)
    inputs = {"Wh": True, "Wh_scales": True, "Wh_biases": "Wh_biases" in names}
    outputs: Outputs = {"arranged": ((D, tiling.threads // 32, tiling.weights, 32, 4), mx.uint32)}
    template: Template = {"OPTIONS": cell_number(problem.cell), "H": problem.H, "UNITS": tiling.units}
    template |= {"COUNT": tiling.weights, "BITS": problem.packing.bits if problem.packing else 32}
    template |= packing_template(problem) | {"S": dtype}
    present = [*(name for name in inputs if inputs[name]), "arranged"]
    body = struct_of(fields_of((*inputs, "arranged"), present))
    arguments = f"{STRUCTS[op]}, H, UNITS, COUNT, FIELD, {VECTOR}"
    body += f"fused_arrange_quantized<{arguments}>(a, thread_position_in_grid.xy, threads_per_threadgroup.x);"
    files = ("arrays", "cell", f"cell_{op}", "fused", *LANE_FILES, *QUANTIZED_FILES, f"fused_{op}", *ARRANGE_FILES)
    source = Source(f"{op}_fused_arrange_quantized", files, body)
    return prepare(source, template, inputs, outputs, (tiling.weights, D), tiling.threads)


# --- Tiling ---

REGISTERS = {384: 128, 448: 116, 512: 104, 576: 92, 640: 80, 704: 72, 768: 68, 832: 60, 896: 56, 1024: 52}
"""How many 32-bit registers each thread can have, by the largest number of threads of a threadgroup. These numbers are
published for the M1."""

WORKING_REGISTERS = {
    ("lstm", "forward"): {1: 44, 2: 64, 8: 62},
    ("lstm", "backward"): {1: 46, 2: 68, 8: 74},
    ("gru", "forward"): {1: 40, 2: 58, 4: 88, 8: 60},
    ("gru", "backward"): {1: 52, 2: 76, 4: 118, 8: 70},
    ("rnn", "forward"): {1: 40, 2: 60, 4: 98, 8: 56},
    ("rnn", "backward"): {1: 44, 2: 60, 4: 96, 8: 56},
}
"""The number of registers that a thread needs besides its resident weights, by cell, pass and batch items of a
threadgroup (8: it multiplies 8 x 8 matrices). They hold sums, operands, loaded weights, states and indices. The
numbers come from machine code that Mesa's compiler generates for the M1, at H = 96 to 256. Apple's compiler may
differ."""

PACKED_REGISTERS = {1: 12, 2: 20, 4: 40}
"""The number of additional registers of a thread if weights are quantized, by batch items of a threadgroup. They
hold loaded values and sums of x. The numbers come from the same source as WORKING_REGISTERS."""

OPTION_REGISTERS = {"mask": 4, "keep": 4, "lengths": 8, "peephole": 4, "bhn": 4, "norm_eps": 8, "norm_c_r": 8}
"""The number of additional registers of a thread for each optional input. The numbers come from the same source as
WORKING_REGISTERS."""

EACH_REGISTERS = 4
"""The number of additional registers of a thread if each gate is normalised by itself. From the same source."""

WIDEST_MATRICES = {4: 192, 2: 224}
"""The largest H for which 8 x 8 matrices are multiplied by default, by bytes per element. For larger H the registers
of a thread do not suffice, and the kernel would spill some of them to memory."""

CYCLES = {"lanes": 0.018, "packed": 0.028, "matrices": 0.013}
"""Cycles of a GPU core per weight and batch item of a step, for three kinds of products: "lanes" is the product in
lanes, "packed" the product in lanes with quantized weights, "matrices" the product of 8 x 8 matrices. The numbers come
from machine code that Mesa's compiler generates for the M1."""

WAIT = 840
"""The assumed number of cycles that a threadgroup waits at each step, for a barrier and for the cell: 0.6 us."""

REGISTER_BYTES, BYTES_PER_CYCLE = 208 * 1024, 32
"""Published for the M1: the bytes of all registers of a GPU core, and the bytes that a core loads per cycle from its
L2 cache."""

SIMPLER = 1.05
"""Predicted times are not exact. So the simplest division of work is chosen whose predicted time is at most this many
times the shortest one. Fewer batch items per threadgroup are simpler."""

THREADGROUP_MEMORY = 60 * 1024
"""Bytes of threadgroup memory in a GPU core, which its threadgroups share. About 60 KB by public measurements."""

THREADGROUP_BYTES = 32768
"""Metal's limit on the memory of one threadgroup, in bytes."""


class FusedTiling(NamedTuple):
    """How `fused` divides a recurrence among threads.

    matrices: whether the kernel multiplies 8 x 8 matrices. units: the number of hidden units that share a group of
    lanes. rows, threads: the batch items and the threads of a threadgroup. vectors: how many buffers in threadgroup
    memory hold the operand of the product (2: a double buffer). bytes: the size of these buffers. weights: how many
    vectors of 4 weights a lane multiplies at each step. resident: how many of these vectors stay in registers.
    resident_part: resident / weights. registers: the registers that a thread uses.
    """

    matrices: bool
    units: int
    rows: int
    threads: int
    vectors: int
    bytes: int
    weights: int
    resident: int
    resident_part: float
    registers: int


class LayerSize(NamedTuple):
    """What the division of a layer among threads depends on. H: the hidden units. itemsize: the bytes of a number.
    cores: the number of GPU cores. packing: how the weights of a forward pass are quantized, or None."""

    cell: AnyCell
    B: int
    H: int
    itemsize: int
    directions: int = 1
    cores: int = CORES
    packing: Packing | None = None


def fused_tiling(layer: LayerSize, *, backward: bool, more: int = 0, cut: Cut | None = None) -> FusedTiling:
    """Return how one pass is divided among threads: batch items per threadgroup, weights in registers and so on.

    more: how many more registers a thread needs for the call's optional inputs. cut: the batch items per threadgroup
    and the registers to keep free, as a measurement chose them, or None to predict them. A lane reads weights in
    vectors of four: four weights or, if they are quantized, four 32-bit words of packed weights.
    """
    cell, H, itemsize, packing = layer.cell, layer.H, layer.itemsize, layer.packing
    lanes, gates = LANES[cell.op], cell.gates
    sweep = "backward" if backward else "forward"
    wanted = cut.rows if cut else rows_for(layer)
    matrices = wanted == 8 and fits_matrices(cell, H) and packing is None
    # lengths: for each product of a step, how many terms one output sums. The first product backward of a GRU whose
    # reset comes before the candidate's product has one gate (H terms), the second one two gates (2 H terms).
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
        # If a lane has several quantization groups, it needs registers for the sums of one group (the first term). If a
        # step has two products, a few values stay in registers between them (the second term).
        more += slots * rows * (span > packing.group_size) + 8 * two_products(cell)
    one = 4 * rows * piece * sum(-(-length // piece) for length in lengths)
    vectors = 1 if len(lengths) > 1 or (matrices and backward and 2 * one > THREADGROUP_BYTES) else 2
    # The free registers hold resident vectors of 4 weights. A register has 4 bytes, so such a vector takes as many
    # registers as a weight has bytes; hence the division by itemsize.
    working = working_registers(cell, sweep, rows, packing is not None) + more
    resident = max(0, min(weights, (registers_of(threads) - working - (cut.spare if cut else 0)) // itemsize))
    used = working + resident * itemsize
    memory = vectors * one + norms.memory_of(cell, H, lanes, rows)
    return FusedTiling(matrices, units, rows, threads, vectors, memory, weights, resident, resident / weights, used)


def packed_share(packing: Packing, H: int, lanes: int, slots: int) -> tuple[int, int]:
    """Return (span, vectors): how many weights of one row a lane gets, and how many vectors of four words it gets for
    all its rows together. lanes: how many lanes share each row of the quantized weights. slots: how many rows each lane
    works on. metal/fused_quantized.metal computes the same numbers."""
    span = max(8, 2 ** (-(-H // lanes) - 1).bit_length())
    pieces = max(1, span // packing.group_size)
    words = span * field_of(packing) // 32 + pieces * (2 if packing.mode == "affine" else 1)
    return span, -(-slots * words // 4)


@lru_cache(4096)
def rows_for(layer: LayerSize) -> int:
    """Return how many batch items a threadgroup computes; 8 means that it multiplies 8 x 8 matrices.

    If a threadgroup computes more items, each weight that it loads serves more items. If it computes fewer, there are
    more threadgroups, so that all cores have work. The result is the smallest number of items whose predicted time is
    nearly the shortest (see SIMPLER).
    """
    fits = fits_matrices(layer.cell, layer.H) and WIDEST_MATRICES[layer.itemsize] >= layer.H
    matrices = fits and layer.packing is None
    times = {rows: step_cycles(layer, rows) for rows in (1, 2, 8 if matrices else 4)}
    return next(rows for rows, time in times.items() if time <= SIMPLER * min(times.values()))


def step_cycles(layer: LayerSize, rows: int) -> float:
    """Return the predicted cycles of a GPU core for one time step, forward and backward, if a threadgroup computes
    `rows` batch items. Quantized weights have no backward pass, so only the forward pass is counted."""
    total = 0.0
    for backward in (False,) if layer.packing else (False, True):
        tiling = fused_tiling(layer, backward=backward, cut=Cut(rows))
        groups = layer.directions * -(-layer.B // tiling.rows)
        numbers = layer.cell.gates * layer.H**2 if layer.packing else None
        total += pass_cycles(tiling, groups, layer.cores, layer.itemsize, layer.packing, numbers)
    return total


def pass_cycles(
    tiling: FusedTiling, groups: int, cores: int, itemsize: int, packing: Packing | None, numbers: int | None = None
) -> float:
    """Return the predicted cycles of one time step of one pass, which `groups` threadgroups compute. numbers: how many
    weights a threadgroup multiplies, or None for all that its lanes hold, padding included.

    The core that gets the most threadgroups determines the time. It runs as many threadgroups at the same time as fit
    in its registers and in its threadgroup memory. While one threadgroup waits, another one computes.
    """
    form = "matrices" if tiling.matrices else "packed" if packing else "lanes"
    held = 4 * tiling.threads * tiling.weights
    loaded = held * (4 if packing else itemsize) * (1 - tiling.resident_part)
    work = max(CYCLES[form] * (numbers or held) * tiling.rows, loaded / BYTES_PER_CYCLE)
    each = -(-groups // cores)
    return max(each * work, -(-each // groups_at_once(tiling)) * (work + WAIT))


def groups_at_once(tiling: FusedTiling) -> int:
    """Return how many threadgroups a core runs at the same time: as many as fit in its registers and in its threadgroup
    memory."""
    by_registers = REGISTER_BYTES // (4 * tiling.registers * tiling.threads)
    return max(1, min(by_registers, THREADGROUP_MEMORY // tiling.bytes))


def rows_of(cell: AnyCell, sweep: str, wanted: int, threads: int, packed: bool) -> int:
    """Return how many batch items a threadgroup computes if it multiplies in lanes: `wanted`, or fewer if the
    registers do not suffice for that many."""
    most = registers_of(threads)
    possible = [rows for rows in WORKING_REGISTERS[cell.op, sweep] if rows <= wanted]
    return max(rows for rows in possible if rows == 1 or working_registers(cell, sweep, rows, packed) <= most)


def working_registers(cell: AnyCell, sweep: str, rows: int, packed: bool) -> int:
    """Return the number of registers that a thread needs besides those for resident weights and optional inputs."""
    return WORKING_REGISTERS[cell.op, sweep][rows] + (PACKED_REGISTERS[rows] if packed else 0)


def tiling_of(sweep: str, problem: Problem, dtype: mx.Dtype, names: Collection[str] = ()) -> FusedTiling:
    """Return how a pass of this problem is divided among threads. names: the names of a launch's inputs. Optional
    inputs need additional registers, so the division depends on them."""
    more = sum(count for name, count in OPTION_REGISTERS.items() if name in names)
    more += EACH_REGISTERS if norm_blocks(problem.cell) > 1 else 0
    packing = problem.packing if sweep == "forward" else None
    layer = layer_size(problem, dtype.size)._replace(packing=packing)
    return fused_tiling(layer, backward=sweep == "backward", more=more, cut=problem.cut)


def layer_size(problem: Problem, itemsize: int) -> LayerSize:
    """Return the size of a problem's layer, whose numbers have `itemsize` bytes."""
    cell, B, H = problem.cell, problem.B, problem.H
    return LayerSize(cell, B, H, itemsize, problem.directions, problem.cores, problem.packing)


def two_products(cell: AnyCell) -> bool:
    """Return whether a step has two products, one after the other, as in a GRU whose reset comes before the
    candidate's product."""
    return cell.reset == "before"


def registers_of(threads: int) -> int:
    """Return the number of registers that each thread can have in a threadgroup of `threads` threads."""
    return REGISTERS[min(most for most in REGISTERS if most >= threads)]


def fits_matrices(cell: AnyCell, H: int) -> bool:
    """Return whether `fused` can multiply 8 x 8 matrices for this cell and H. A threadgroup has at most 32
    simdgroups with 8 units each. A GRU whose reset comes before the candidate's product is not supported, because it
    has two products per step; nor is a cell with a norm, whose sums over all units are written for lanes only."""
    return H <= 256 and not two_products(cell) and cell.norm is None
