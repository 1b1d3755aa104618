"""Engine `fused`: run the recurrence on the GPU, with all steps of a pass in one launch of a Metal shader.

A threadgroup computes all steps of a few batch items in one direction and keeps the recurrent weights in its registers.
MLX computes the products over all T * B rows. h and gates are stored in the dtype of the arrays, c in float32; all
arithmetic is in float32. All results are lazy, so the engine also runs inside `mx.compile` and exports. It does not
support a projection. Quantized recurrent weights stay quantized, except in kernels that multiply 8 x 8 matrices; these
get dequantized weights. A cell written by the user runs through the same launches, with a generated struct. If its
product is computed in lanes, its kernels use separate shaders.

What the names in this file mean:

- T, B, D, H: time steps, batch items, directions, hidden units. G: the gates of the cell. C: its states besides h
- problem: the sizes and options of a call, without its arrays. arrays: the arrays of the call, by name
- pass: all steps of time, forward or backward. sweep: "forward" or "backward"; a `Sweep` has the launches of one pass
- names, present: the names of the arrays that the call, or a launch, has. In the source of a kernel, an array that is
  not present is `absent`
- lane: one of the 32 threads of a simdgroup. A product is computed "in lanes" (each lane multiplies a part of the
  weights) or with 8 x 8 matrices, which are for wide batches
- tiling: how a pass is divided among threads. units, rows: the hidden units of a group of lanes, the batch items of a
  threadgroup
- packing: the format of quantized weights, or None
- mask, keep: factors on h in the recurrent product, and on all states before a step
- cotangent: the gradient that the caller gives for an output
- q: the recurrent product of a GRU's candidate gate, which the backward steps of some GRUs read
"""

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..cells import AnyCell, PointwiseCell, norm_blocks
from ..directions import half, join, join_gradients, one_direction, part
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
from .pointwise import gradients_after as own_gradients
from .pointwise import lanes_text, name_of, struct_text
from .products import candidates, gradients_in_few_launches, is_plain, project, recurrent_input, takes_product

SWEEPS = ("forward", "backward")

# --- The forward and the backward pass ---


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """Run the forward pass. Return h [T, B, D H] and hT [B, D H]. If the cell has C > 0 states besides h, also return c
    [T, B, D C H] and cT [B, D C H] in float32. In training, or if the caller asks for them, also return gates [T, B, D
    K H]: the K numbers per unit that the backward pass reads, mostly the gates."""
    if runs_apart(problem):
        return join([forward(one_direction(problem, d), part(arrays, d)) for d in range(2)])
    cell = problem.cell
    # The mask is the factor on h in the recurrent product. It has one time index if all steps share it.
    mask = whole_mask(problem, arrays) if cell.recurrent else None
    sweep = forward_sweep(problem, tuple(arrays), mask is not None and mask.shape[0] > 1)
    # numbers: an LSTM's forget bias and the limits of its clips.
    inputs: Inputs = {"mask": mask, "numbers": sweep.numbers}
    if cell.norm is not None:
        inputs |= norms.inputs_of(problem, arrays)
    for name in sweep.options:
        inputs[name] = contiguous(arrays[name])
    for name in ("h0", "c0", "lengths"):
        if name in arrays:
            inputs[name] = arrays[name]
    # Always in float32, because chunks of time and later launches pass c in float32 (cT). So one kernel can read each
    # of them.
    if "c0" in inputs and isinstance(cell, PointwiseCell):
        inputs["c0"] = arrays["c0"].astype(mx.float32)
    # z: the input's part of the preactivations. If several launches read it, it is made contiguous for them.
    inputs["z"] = project(problem, arrays, launches=len(sweep.parts))
    if cell.recurrent:  # a caller of many single steps computes `arranged` once and passes it
        inputs["arranged"] = arrays["arranged"] if "arranged" in arrays else arranged(problem, arrays, sweep)
    results = run(problem, sweep.parts, inputs, {"hT": "h0", "cT": "c0"})
    # No launch writes the gates of a cell that saves no numbers; the caller gets an empty array.
    if cell.kept == 0:
        results["gates"] = mx.zeros((problem.T, problem.B, 0), problem.dtype)
    return results


def runs_apart(problem: Problem) -> bool:
    """Return whether both directions run one after the other, each in separate launches. This is so for a user's cell
    with H < 8. The reason is the trial run of its kernels, which has one direction, because the float64 reference
    computes one. MLX binds an array of fewer than 8 elements in another address space, which changes the kernel's
    source. With H < 8 an array of one direction may be that small, while the array of both directions is not. Then the
    trial run would test another kernel than the call uses."""
    return problem.bidirectional and isinstance(problem.cell, PointwiseCell) and problem.H < 8


def arranged(problem: Problem, arrays: Arrays, sweep: "Sweep | None" = None) -> mx.array:
    """Return the recurrent weights in the order in which the lanes of the forward pass read them. A caller that runs
    many single steps calls this function once, and passes the result to `forward` as the array `arranged`. sweep: the
    launches of the forward pass, or None to build them."""
    # False stands for "all steps share one mask". The order of the weights does not depend on it.
    sweep = forward_sweep(problem, tuple(arrays), False) if sweep is None else sweep
    if sweep.quantized:
        scales, biases = scales_of(arrays, "Wh", problem.dtype)
        Wh = [arrays["Wh"], scales] if biases is None else [arrays["Wh"], scales, biases]
    elif problem.packing is not None and is_packed("Wh", arrays):
        Wh = [matrix(problem.packing, arrays, "Wh", problem.dtype)]
    else:
        Wh = [arrays["Wh"]]
    assert sweep.arrange is not None
    return sweep.arrange(inputs=Wh)[0]


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """Run the backward pass. Return the gradients of all arrays, by name.

    saved: the outputs of the forward pass. cotangents: the gradients that the caller gives for some outputs, with the
    keys h, c, gates, hT, cT. If the gates were not saved, the forward pass runs again to compute them. Before the
    backward steps MLX computes h_in (the input of the recurrent product), q and the normalised numbers (`of_norms`) of
    all steps at once. After the steps it computes the gradients of the weights as products over all steps.
    """
    cell = problem.cell
    if saved.get("gates") is None and cell.reads_kept:
        saved = forward(problem._replace(training=True), arrays)
    if runs_apart(problem):
        each = [[part(values, d) for values in (arrays, saved, cotangents)] for d in range(2)]
        return join_gradients([backward(one_direction(problem, d), *values) for d, values in enumerate(each)], arrays)
    mask = whole_mask(problem, arrays) if cell.recurrent else None
    differ = mask is not None and mask.shape[0] > 1
    sweep = backward_sweep(problem, tuple(arrays), differ, tuple(cotangents))
    inputs = backward_inputs(problem, arrays, saved, cotangents, sweep) | {"mask": mask}
    operand: Arrays = {}  # h_in, if weight gradients, q or the norms' numbers are computed from it below
    if sweep.few or sweep.takes_product or norms.of_product(cell):
        operand = recurrent_input(problem, arrays, saved["h"], mask)
    of_norms: Arrays = {}  # the arrays that the norms of the backward steps read
    if cell.norm is not None:
        of_norms = norms.numbers_before_sweep(problem, arrays, saved, operand.get("h_in"))
        inputs |= norms.inputs_of(problem, arrays) | of_norms
    if sweep.takes_product and "q" not in inputs:
        inputs["q"] = candidates(problem, arrays, operand["h_in"])
    if len(sweep.parts) > 1:  # several launches read these arrays, and each would copy one that is not contiguous
        for name in ("gates", "h", "c", "h0", "c0", "dh", "dc", "q", "dgates", *of_norms):
            if name in inputs:
                inputs[name] = contiguous(inputs[name])
    if sweep.arrange is not None:
        inputs["arranged"] = sweep.arrange(inputs=[arrays["Wh"]])[0]
    results = run(problem, sweep.parts, inputs, {"dh0": "dhT", "dc0": "dcT"})
    if isinstance(cell, PointwiseCell):
        return own_gradients(problem, arrays, saved, norms.for_gradients(problem, results, of_norms))
    if sweep.few:
        return gradients_in_few_launches(problem, arrays, results | operand)
    return gradients_after_sweep(problem, arrays, saved, norms.for_gradients(problem, results, of_norms))


def backward_inputs(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays, sweep: "Sweep") -> Inputs:
    """Return the arrays that the launches of a backward pass read, apart from the mask, the weights, and the arrays of
    norms. A cotangent has the name of its output with a d before it. sweep: the launches. Optional arrays of the call
    are made contiguous here. `backward` does the same with other arrays if several launches read them, because each
    launch would copy an array that is not contiguous."""
    cell = problem.cell
    inputs: Inputs = {name: saved[name] for name in states_of(cell)}
    if cell.reads_kept and cell.kept:
        inputs["gates"] = saved["gates"]
    for name in sweep.options:
        inputs[name] = contiguous(arrays[name])
    for name in ("lengths", *(f"{state}0" for state in states_of(cell))):
        if name in arrays:
            inputs[name] = arrays[name]
    if "c0" in inputs and isinstance(cell, PointwiseCell):  # in float32, as in `forward`
        inputs["c0"] = arrays["c0"].astype(mx.float32)
    for name in cotangents:
        inputs[f"d{name}"] = cotangents[name]
    if sweep.numbers is not None:
        inputs["numbers"] = sweep.numbers
    return inputs


def states_of(cell: AnyCell) -> tuple[str, ...]:
    """Return the names of the arrays of states that the backward steps of a cell read: "h", if they read h, and "c",
    which holds all states besides h, if there are any."""
    return (("h",) if cell.reads_h else ()) + (("c",) if cell.carried else ())


class Part(NamedTuple):
    """One launch of a forward or backward pass. It runs a range of the steps.

    launch: a function from the list of its input arrays to the list of its outputs. sizes: an input array of seven
    integers: the first step, the step after the last one, T, B, D, whether the only direction is reverse, and whether
    each step has its own mask. inputs, outputs: the names of the input and output arrays, in order.
    """

    launch: Launch
    sizes: mx.array
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Sweep(NamedTuple):
    """The launches of a forward or backward pass. First the launch `arrange` copies Wh into the order in which lanes
    read it; for a cell without Wh it is None. Then the launches `parts` follow, each of which runs a range of the time
    steps. A backward pass begins with the last steps.

    options: the names of the optional arrays of the call that the launches read. numbers: the array of an LSTM's forget
    bias and limits, if the launches read it. quantized: whether the launches read quantized weights. few: whether the
    weight gradients after the backward steps take one product per weight for both directions (`is_plain`); rare options
    need more products. takes_product: whether the backward steps read q, the recurrent product of a GRU's candidate.
    """

    arrange: Launch | None
    parts: tuple[Part, ...]
    options: tuple[str, ...]
    numbers: mx.array | None = None
    quantized: bool = False
    few: bool = False
    takes_product: bool = False


def run(problem: Problem, parts: tuple[Part, ...], inputs: Inputs, carried: dict[str, str]) -> Arrays:
    """Run the launches `parts` of a pass, one after the other, and return the results of the whole pass by name. A
    sequence is joined from the sequences of all launches. carried: {result of a launch: input of the next launch}; for
    example, hT becomes h0. These results are returned as the last launch wrote them."""
    pieces: list[Arrays] = []
    for each in parts:
        inputs["sizes"] = each.sizes
        values = each.launch(inputs=[inputs[name] for name in each.inputs])
        pieces.append(dict(zip(each.outputs, values, strict=True)))
        for name, as_input in carried.items():
            if name in each.outputs:
                inputs[as_input] = pieces[-1][name]
    results = pieces[-1]
    if len(pieces) > 1:
        in_order = pieces[::-1] if "dh0" in results else pieces  # in the order of the forward steps
        for name in results:
            if name not in carried:
                results[name] = joined(problem, [piece[name] for piece in in_order])
    return results


def joined(problem: Problem, pieces: list[mx.array]) -> mx.array:
    """Return a whole sequence, joined from its pieces in the order of the forward steps. A reverse direction processes
    time backward, so there the pieces are joined in the opposite order."""
    if problem.bidirectional:
        forward, reverse = ([half(piece, d) for piece in pieces] for d in range(2))
        return mx.concatenate([mx.concatenate(forward), mx.concatenate(reverse[::-1])], axis=-1)
    return mx.concatenate(pieces[::-1] if problem.reverse else pieces)


# --- Launches ---

LAUNCH_CYCLES = 0.02 * 1.278e9
"""The longest time that a launch may take by our prediction, in GPU cycles: 20 ms at the clock of an M1. MLX puts 40 to
50 operations into one command buffer, and macOS ends a command buffer that keeps the GPU from the display for too
long."""

VECTOR = "PackedVector<FIELD, GROUP, BIASED>"
"""The Metal type in which lanes read quantized weights. `packing_template` returns its template arguments."""

LANE_FILES, QUANTIZED_FILES = ("fused_lanes",), ("quantized", "fused_quantized")
"""LANE_FILES: the shader files for a product in lanes, in which each lane multiplies a part of the weights.
QUANTIZED_FILES: the additional files for quantized weights."""

NORM_FILES = ("norm", "fused_norm")
OWN_NORM_FILES = (*NORM_FILES, "fused_norm_own")
"""NORM_FILES: the additional shader files for a built-in cell with layer normalisation. OWN_NORM_FILES: those for a
user's cell with layer normalisation."""

ARRANGE_FILES = ("fused_matrix", "fused_arrange")
"""The additional shader files of the launches that copy weights into the order in which lanes read them, for products
in lanes and for products of 8 x 8 matrices."""

INPUTS = {
    "forward": (
        *("z", "h0", "c0", "arranged", "peephole", "bhn", "inputs", "params", "mask", "keep", "lengths", "sizes"),
        "numbers",
    ),
    "backward": (
        *("gates", "h", "c", "h0", "c0", "arranged", "peephole", "bhn", "inputs", "params", "mask", "keep", "lengths"),
        *("dh", "dc", "q", "dgates", "dhT", "dcT", "sizes", "numbers"),
    ),
}
"""The names of the arrays that the shader of each pass can read, in the order of the fields of its struct of arrays."""


@cached
def forward_sweep(problem: Problem, names: tuple[str, ...], masks_differ: bool) -> Sweep:
    """Return the launches of the forward pass for a call whose arrays have these names. masks_differ: whether each step
    has its own mask. present: the names of the arrays that the first launch has. later: those of the other launches,
    which also get the states that the launch before returned."""
    bare, cell = readable(problem, names), problem.cell
    there = {name: name in names for name in ("h0", "c0", "lengths")}
    # The mask on h includes `keep` (a factor on the states before a step). numbers: the forget bias and the limits of
    # the clips, which only an LSTM has.
    there |= {"z": True, "arranged": cell.recurrent, "sizes": True}
    there |= {"mask": cell.recurrent and ("mask" in names or "keep" in names), "numbers": cell.op == "lstm"}
    present = {name for name in there if there[name]} | {*options_of(problem, names)}
    present |= norms.present(problem, names, "forward")
    later = present | ({"h0", "c0"} if cell.carried else {"h0"})
    parts = tuple(
        prepared_part("forward", bare, later if n else present, steps, sizes)
        for n, (steps, sizes) in enumerate(division(bare, masks_differ))
    )
    quantized = bare.packing is not None
    arrange = arrange_quantized(bare, names) if quantized else arrange_launch("forward", bare)
    return Sweep(arrange, parts, options_of(problem, names), numbers_of(problem.cell), quantized)


@cached
def backward_sweep(problem: Problem, names: tuple[str, ...], masks_differ: bool, cotangents: tuple[str, ...]) -> Sweep:
    """Return the launches of the backward pass for a call whose arrays and cotangents have these names. The first
    launch runs the last steps. masks_differ, present, later: as in `forward_sweep`; the later launches get the
    gradients of the states (dhT, dcT) from the launch before. few, product: the fields few and takes_product of the
    result. saves_d: whether the kernel also writes d_out, the gradients of the recurrent products. In a GRU that reads
    q they differ from dz, the gradients of the preactivations. Without d_out `gradients_after_sweep` computes them from
    dz and r. The array numbers has the limit of c, which the kernel needs if the clip of c stops gradients."""
    cell, bare = problem.cell, readable(problem)
    few, product = is_plain(problem, names) and not isinstance(cell, PointwiseCell), takes_product(cell)
    saves_d = product and (few or norms.of_product(cell))
    there = {"arranged": cell.recurrent, "sizes": True, "lengths": "lengths" in names, "q": product}
    there |= {"mask": cell.recurrent and ("mask" in names or "keep" in names)}
    there |= {"gates": cell.reads_kept and cell.kept > 0, "numbers": cell.stops_c}
    for state in states_of(cell):
        there |= {state: True, f"{state}0": f"{state}0" in names}
    there |= {f"d{name}": True for name in cotangents}
    present = {name for name in there if there[name]} | {*options_of(problem, names)}
    present |= norms.present(problem, names, "backward")
    later = present | ({"dhT", "dcT"} if cell.carried else {"dhT"})
    parts = tuple(
        prepared_part("backward", bare, later if n else present, steps, sizes, saves_d=saves_d)
        for n, (steps, sizes) in enumerate(reversed(division(bare, masks_differ)))
    )
    arrange = arrange_launch("backward", bare)
    numbers = numbers_of(cell) if there["numbers"] else None
    return Sweep(arrange, parts, options_of(problem, names), numbers, few=few, takes_product=product)


def options_of(problem: Problem, names: Collection[str]) -> tuple[str, ...]:
    """Return the names of the optional arrays that the kernels of both passes read, as far as they are in `names`:
    peephole, bhn (a GRU's bias of the candidate's recurrent product), inputs and params (of a user's cell) and keep
    (factors on the states). A plain RNN does not read keep: its only state is h, and the mask on h already includes
    keep."""
    options = ("peephole", "bhn", "inputs", "params", *(() if problem.cell.op == "rnn" else ("keep",)))
    return tuple(name for name in options if name in names)


def readable(problem: Problem, names: Collection[str] = ()) -> Problem:
    """Return the problem, but without its packing if the kernels of a pass cannot read quantized weights. They then get
    weights that are dequantized once per pass. names: the names of the arrays of a forward pass. Without `names` the
    result is for a backward pass, which never reads quantized weights.

    A kernel that multiplies 8 x 8 matrices cannot read quantized weights. For float32 arrays it is used nevertheless:
    with dequantized weights it takes, by our prediction, a half to four fifths of the time of a kernel that reads
    quantized weights. For 16-bit arrays dequantizing would round the weights. So these arrays use the product in lanes,
    which reads quantized weights.
    """
    if problem.packing is None:
        return problem
    bare = problem._replace(packing=None)
    if not is_packed("Wh", names) or (problem.dtype == mx.float32 and tiling_of("forward", bare).matrices):
        return bare
    return problem


def division(problem: Problem, masks_differ: bool) -> list[tuple[int, mx.array]]:
    """Divide the steps of a pass into launches, because macOS ends a launch that keeps the GPU from the display for too
    long. Return, for each launch in the order of processing, the number of its steps and its input array `sizes`. Both
    passes are divided into the same launches. masks_differ: whether each step has its own mask.

    A launch has so many steps that it takes, by our prediction, at most LAUNCH_CYCLES in the slower of the two passes.
    It has at most `limits.launch_steps` steps. groups: for each pass its tiling and the number of its threadgroups.
    """
    # `sizes` has fewer than 8 elements, because MLX then binds it in Metal's address space `constant`.
    tilings = [tiling_of(sweep, problem) for sweep in SWEEPS]
    T, B, D, size = problem.T, problem.B, problem.directions, problem.dtype.size
    groups = [(tiling, D * -(-B // tiling.rows)) for tiling in tilings]
    cycles = max(pass_cycles(tiling, count, problem.cores, size, problem.packing) for tiling, count in groups)
    steps = max(1, min(problem.limits.launch_steps, int(LAUNCH_CYCLES / cycles)))
    bounds = [(start, min(start + steps, T)) for start in range(0, T, steps)]
    sizes = [(start, stop, T, B, D, problem.reverse, masks_differ) for start, stop in bounds]
    return [(stop - start, mx.array(numbers, mx.int32)) for (start, stop), numbers in zip(bounds, sizes, strict=True)]


def index_of(problem: Problem) -> mx.Dtype:
    """Return the dtype that kernels use for indices into a launch's arrays: 64 bits if the largest array has too many
    elements for 32 bits. An array [T, B, D n H] has n blocks of H numbers, for example one block for each gate. The
    largest array is the one with the most blocks."""
    cell = problem.cell
    # The output carry has a block for each state: h and the `carried` others.
    blocks = max(cell.gates, cell.kept, cell.gradients, cell.inputs, cell.carried + 1)
    elements = problem.T * problem.B * problem.directions * blocks * problem.H
    return mx.uint32 if elements < problem.limits.index else mx.uint64


def outputs_of(sweep: str, problem: Problem, keep: bool, steps: int, saves_d: bool) -> Outputs:
    """Return the shape and dtype of each output of the kernel of a pass, in the order of the kernel's struct of
    arrays. An entry is None if the launch does not write this output.

    keep: whether the call has the option `keep`. saves_d: whether the backward pass writes d_out. steps: the number of
    time steps of the launch. The function `array` returns the shape and dtype of an array with the axes `lead` and then
    `blocks` numbers per unit, or None for 0 blocks. The outputs of the backward pass are gradients:

    - dz: of the preactivations. d_out: of the recurrent products, if these gradients differ from dz
    - carry [steps, B, D N H], with `keep`: of the N states, without the part through the recurrent product
    - d_product: of the numbers that the norm of the products gets. d_norm_c: of the result of the norm of c
    - du, dw: of the inputs and of the parameters of a user's cell. dw [threadgroups, D V H] has one sum over batch
      items for each threadgroup; MLX adds up these sums later
    """
    B, H, D, cell, dtype = problem.B, problem.H, problem.directions, problem.cell, problem.dtype

    def array(lead: tuple[int, ...], blocks: int, kind: mx.Dtype) -> tuple[tuple[int, ...], mx.Dtype] | None:
        return ((*lead, D * blocks * H), kind) if blocks else None

    wide, h, c = (steps, B), array((B,), 1, dtype), array((B,), cell.carried, mx.float32)
    if sweep == "backward":
        outputs: Outputs = {"dz": array(wide, cell.gradients, dtype), "d_out": None, "carry": None}
        if saves_d:
            outputs["d_out"] = array(wide, cell.gates, dtype)
        if keep:
            outputs["carry"] = array(wide, cell.carried + cell.passes_h, mx.float32)
        if cell.norm is not None:
            outputs["d_product"] = array(wide, cell.gates, dtype) if norms.of_product(cell) else None
            outputs["d_norm_c"] = array(wide, 1, mx.float32) if norms.of_state(cell) else None
        groups = -(-B // tiling_of(sweep, problem).rows)
        outputs |= {"du": array(wide, cell.inputs, dtype), "dw": array((groups,), cell.summed, mx.float32)}
        return outputs | {"dh0": h, "dc0": c}
    kept = cell.kept if problem.training or problem.return_gates else 0
    outputs = {"h": array(wide, 1, dtype), "c": array(wide, cell.carried, mx.float32)}
    return outputs | {"gates": array(wide, kept, dtype), "hT": h, "cT": c}


class Shader(NamedTuple):
    """The parts of a kernel's source that depend on the cell.

    struct: the Metal type of the cell, which is the first template argument of a shader: for example
    "LSTMCell<OPTIONS>", or "Own" for a cell written by the user. files: the shader files that the struct needs, such as
    "cell_lstm". own: the generated source of the struct of a user's cell; "" for a built-in cell, whose struct is in a
    file. name: the beginning of the kernel's name: for example "lstm", or for a user's cell a name with a hash of its
    source.
    """

    struct: str
    files: tuple[str, ...]
    own: str
    name: str


def shader_of(cell: AnyCell, lanes: bool, computes: bool = True) -> Shader:
    """Return the parts of a kernel's source that depend on the cell. lanes: whether the product is computed in lanes;
    then lanes also share the other work on a unit, and the struct `Lanes<Cell>` says how. computes: whether the kernel
    computes steps; a kernel that only copies weights needs less generated source."""
    if isinstance(cell, PointwiseCell):
        own = lanes_text(cell, computes) if lanes else struct_text(cell)
        files = (*LANE_FILES, "pointwise") if lanes else ("pointwise",)
        return Shader("Own", ("arrays", "cell", "fused", *files), own, name_of(own))
    files = ("arrays", "cell", f"cell_{cell.op}", "fused", *((*LANE_FILES, f"fused_{cell.op}") if lanes else ()))
    return Shader(STRUCTS[cell.op], files, "", cell.op)


def prepared_part(
    sweep: str,
    problem: Problem,
    present: Collection[str],
    steps: int,
    sizes: mx.array,
    *,
    saves_d: bool = False,
) -> Part:
    """Return one launch that runs `steps` steps of a pass ("forward" or "backward"). present: the names of the inputs
    that this launch has. sizes: its array of seven integers (`division`). saves_d: whether the backward pass writes
    d_out.

    The kernel's body declares the struct of its arrays and the threadgroup memory `vectors`, and calls the shader.
    options, template: the constants that the source declares before the body; UNITS, ROWS, RESIDENT, VECTORS are fields
    of `FusedTiling`. arguments: the template arguments of the shader, in order."""
    has_norm = problem.cell.norm is not None
    inputs = {name: name in present for name in (*INPUTS[sweep], *(norms.READ[sweep] if has_norm else ()))}
    outputs = outputs_of(sweep, problem, "keep" in present, steps, saves_d)
    cell, back = problem.cell, sweep == "backward"
    tiling, quantized = tiling_of(sweep, problem, present), problem.packing is not None and not back
    struct, files, own, name = shader_of(cell, lanes=not tiling.matrices)
    options: Template = {} if own else {"OPTIONS": cell_number(cell, "peephole" in present)}
    template: Template = {"H": problem.H}
    if tiling.matrices:
        shader, element, files = f"fused_matrix_{sweep}", "float", (*files, "fused_matrix")
        template |= {"RESIDENT": tiling.resident} | ({"VECTORS": tiling.vectors} if back else {})
    else:
        shader, element = f"{'pointwise' if own else 'fused'}_{sweep}", "vec<float, 4>"
        of_norm = (OWN_NORM_FILES if own else NORM_FILES) if has_norm else ()
        files = (*files, *(QUANTIZED_FILES if quantized else ()), *of_norm, shader)
        template |= {"UNITS": tiling.units, "ROWS": tiling.rows, "RESIDENT": tiling.resident}
    template |= {"Index": index_of(problem), "S": problem.dtype}
    arguments = [struct, *template]
    if not back and not tiling.matrices:
        arguments.append(VECTOR if quantized else "vec<S, 4>")
    template = options | template | (packing_template(problem) if quantized else {})
    written = [name for name, output in outputs.items() if output is not None]
    fields = fields_of((*inputs, *outputs), {*present, *written})
    body = struct_of(fields if has_norm or tiling.matrices else fields | {"norm_eps": "absent"})
    body += f"threadgroup {element} vectors[{max(1, tiling.bytes // (4 if tiling.matrices else 16))}];\n"
    threads = "thread_position_in_threadgroup.x, threads_per_threadgroup.x"
    threads += ", thread_index_in_simdgroup" if tiling.matrices else ""
    body += f"{shader}<{', '.join(arguments)}>(a, vectors, threadgroup_position_in_grid.xy, {threads});"
    groups = (-(-problem.B // tiling.rows), problem.directions)
    source = Source(f"{name}_{shader.replace('pointwise', 'fused')}", files, body, own=own)
    launch = prepare(source, template, inputs, outputs, groups=groups, threads=tiling.threads)
    return Part(launch, sizes, tuple(name for name in inputs if inputs[name]), tuple(written))


def packing_template(problem: Problem) -> Template:
    """Return the template arguments for the format of quantized weights. FIELD: how many bits a weight takes in the
    copy that lanes read. GROUP: how many neighbouring weights of a row share a scale. BIASED: whether they also share a
    bias. For a problem without quantized weights the numbers are not used."""
    packing = problem.packing or Packing(1, 32, "")
    return {"FIELD": field_of(packing), "GROUP": packing.group_size, "BIASED": packing.mode == "affine"}


@cached
def arrange_launch(sweep: str, problem: Problem) -> Launch | None:
    """Return the launch that copies the weights Wh into the order in which lanes read them in a pass. sweep: this pass,
    "forward" or "backward"; the two passes read them in different orders. Return None if the cell has no Wh. The axes
    of the copy are: directions, simdgroups, vectors of a lane, the 32 lanes of a simdgroup, the 4 weights of a vector.
    The launch has one thread for each vector; metal/fused_arrange.metal explains its template arguments. OPTIONS has
    only the bits on which the order depends, so that cells with different activations share this kernel."""
    if not problem.cell.recurrent:
        return None
    D, tiling, dtype = problem.directions, tiling_of(sweep, problem), problem.dtype
    # lanes=True (include the struct `Lanes`) also if MATRICES is true: the shader has code for the order of lanes and
    # for that of 8 x 8 matrices, and the first names `Lanes`, so it must be declared.
    struct, files, own, name = shader_of(problem.cell, lanes=True, computes=False)
    outputs: Outputs = {"arranged": ((D, tiling.threads // 32, tiling.weights, 32, 4), dtype)}
    template: Template = {"UNITS": 1 if tiling.matrices else tiling.units}
    template |= {"BACK": sweep == "backward", "MATRICES": tiling.matrices, "S": dtype}
    body = struct_of({name: name for name in ("Wh", "sizes", "arranged")})
    arguments = ", ".join([struct, *template])
    if not own:
        template = {"OPTIONS": layout_number(problem.cell)} | template
    body += f"fused_arrange<{arguments}>(a, thread_position_in_grid.xy, threads_per_threadgroup.x);"
    source = Source(f"{name}_fused_arrange", (*files, *ARRANGE_FILES), body, own=own)
    inputs = {"Wh": True, "sizes": True}
    launch = prepare(source, template, inputs, outputs, groups=(tiling.weights, D), threads=tiling.threads)
    sizes = constant((problem.H, tiling.weights), mx.int32)
    return lambda inputs: launch(inputs=[*inputs, sizes])


@cached
def arrange_quantized(problem: Problem, names: tuple[str, ...]) -> Launch:
    """Return the launch that copies quantized weights into the order in which lanes read them. The axes of the copy
    are: directions, simdgroups, vectors of a lane, the 32 lanes of a simdgroup, the 4 words of a vector. A word has 32
    bits. The words of a lane hold its weights and, behind the weights of each quantization group, the group's scale and
    bias. names: the names of the call's arrays. metal/fused_arrange.metal explains the template arguments."""
    D, tiling = problem.directions, tiling_of("forward", problem)
    struct, files, own, name = shader_of(problem.cell, lanes=True, computes=False)
    inputs = {"Wh": True, "Wh_scales": True, "Wh_biases": "Wh_biases" in names}
    outputs: Outputs = {"arranged": ((D, tiling.threads // 32, tiling.weights, 32, 4), mx.uint32)}
    template: Template = {} if own else {"OPTIONS": cell_number(problem.cell)}
    template |= {"H": problem.H, "UNITS": tiling.units}
    template |= {"COUNT": tiling.weights, "BITS": problem.packing.bits if problem.packing else 32}
    template |= packing_template(problem) | {"S": problem.dtype}
    present = [*(name for name in inputs if inputs[name]), "arranged"]
    body = struct_of(fields_of((*inputs, "arranged"), present))
    arguments = f"{struct}, H, UNITS, COUNT, FIELD, {VECTOR}"
    body += f"fused_arrange_quantized<{arguments}>(a, thread_position_in_grid.xy, threads_per_threadgroup.x);"
    source = Source(f"{name}_fused_arrange_quantized", (*files, *QUANTIZED_FILES, *ARRANGE_FILES), body, own=own)
    return prepare(source, template, inputs, outputs, groups=(tiling.weights, D), threads=tiling.threads)


# --- Tiling ---

REGISTERS = {384: 128, 448: 116, 512: 104, 576: 92, 640: 80, 704: 72, 768: 68, 832: 60, 896: 56, 1024: 52}
"""{threads of a threadgroup, at most: how many 32-bit registers each of them can have}. These numbers are published for
the M1."""

WORKING_REGISTERS = {
    ("lstm", "forward"): {1: 44, 2: 64, 8: 62},
    ("lstm", "backward"): {1: 46, 2: 68, 8: 74},
    ("gru", "forward"): {1: 40, 2: 58, 4: 88, 8: 60},
    ("gru", "backward"): {1: 52, 2: 76, 4: 118, 8: 70},
    ("rnn", "forward"): {1: 40, 2: 60, 4: 98, 8: 56},
    ("rnn", "backward"): {1: 44, 2: 60, 4: 96, 8: 56},
    ("pointwise", "forward"): {1: 44, 2: 64, 4: 92, 8: 62},
    ("pointwise", "backward"): {1: 48, 2: 68, 4: 108, 8: 74},
}
"""{(op of a cell, pass): {batch items of a threadgroup: how many registers a thread needs}}. With 8 batch items the
kernel multiplies 8 x 8 matrices. These registers hold sums, operands, loaded weights, states and indices, but not the
weights that stay in registers for all steps. The numbers come from machine code that Mesa's compiler generates for the
M1, at H = 96 to 256. Apple's compiler may need other numbers. A user's cell needs more registers, which `own_registers`
counts."""

PACKED_REGISTERS = {1: 12, 2: 20, 4: 40}
"""{batch items of a threadgroup: how many more registers a thread needs if weights are quantized}. They hold loaded
values and sums of the operand. The numbers come from machine code that Mesa's compiler generates for the M1."""

OPTION_REGISTERS = {"mask": 4, "keep": 4, "lengths": 8, "peephole": 4, "bhn": 4, "norm_eps": 8, "norm_c_r": 8}
"""{name of an optional input: how many more registers a thread needs for it}. The numbers come from machine code that
Mesa's compiler generates for the M1."""

EACH_REGISTERS = 4
"""How many more registers a thread needs if each gate has its own norm, by machine code that Mesa's compiler generates
for the M1."""

WIDEST_MATRICES = {4: 192, 2: 224}
"""{bytes per element: the largest H for which a kernel with 8 x 8 matrices is chosen by default}. For larger H a thread
does not have enough registers, and the kernel would spill some of them to memory."""

CYCLES = {"lanes": 0.018, "packed": 0.028, "matrices": 0.013}
"""{kind of product: the cycles that a GPU core needs per weight and batch item of a step}. The kinds are "lanes" (the
product in lanes), "packed" (the product in lanes with quantized weights) and "matrices" (the product of 8 x 8
matrices). The numbers come from machine code that Mesa's compiler generates for the M1."""

WAIT = 840
"""The assumed number of cycles that a threadgroup waits at each step, for a barrier and for the cell: 0.6 us."""

REGISTER_BYTES, BYTES_PER_CYCLE = 208 * 1024, 32
"""REGISTER_BYTES: the size of all registers of a GPU core. BYTES_PER_CYCLE: how many bytes a core loads per cycle from
the L2 cache. Both numbers are published for the M1."""

SIMPLER = 1.05
"""The factor by which a predicted time may exceed the shortest predicted time. Predicted times are not exact, so the
smallest number of batch items per threadgroup is chosen whose time is within this factor."""

THREADGROUP_MEMORY = 60 * 1024
"""How many bytes of threadgroup memory a GPU core has, which its threadgroups share: about 60 KB by public
measurements."""

THREADGROUP_BYTES = 32768
"""Metal's limit on the memory of one threadgroup, in bytes."""


class FusedTiling(NamedTuple):
    """How the engine `fused` divides the work of a pass among threads.

    matrices: whether the kernel multiplies 8 x 8 matrices, else it multiplies in lanes. units: how many hidden units
    share a group of lanes, which compute their products together. rows, threads: the batch items and the threads of a
    threadgroup. vectors: how many buffers in threadgroup memory hold the operand of the product (2: a double buffer).
    bytes: the size of the threadgroup memory. weights: how many vectors of 4 weights a lane multiplies at each step.
    resident: how many of these vectors stay in registers. resident_part: resident / weights. registers: how many
    registers a thread uses.
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
    """The sizes of a layer on which its division among threads depends. B: the batch items. H: the hidden units.
    itemsize: the bytes of a number. directions: 1 or 2. cores: the number of GPU cores. packing: the format of the
    quantized weights of a forward pass, or None."""

    cell: AnyCell
    B: int
    H: int
    itemsize: int
    directions: int = 1
    cores: int = CORES
    packing: Packing | None = None


def fused_tiling(layer: LayerSize, *, backward: bool, more: int = 0, cut: Cut | None = None) -> FusedTiling:
    """Return how one pass is divided among threads: batch items per threadgroup, weights in registers and so on.

    more: how many registers a thread needs for the call's optional inputs. cut: the batch items per threadgroup and the
    registers to keep free, if a measurement has chosen them, or None to predict them. A lane reads weights in vectors
    of four: four weights or, if they are quantized, four 32-bit words.

    -(-a // b) is a / b, rounded up. lanes: how many lanes share a unit, 1 or 4. group: how many lanes share the product
    of `units` units. piece: how many terms of a sum a group multiplies at once. slots: how many rows of weights a lane
    works on. weights: how many vectors of four a lane has. one: the bytes of one buffer.
    """
    cell, H, itemsize, packing = layer.cell, layer.H, layer.itemsize, layer.packing
    lanes, gates = lanes_of(cell), cell.gates
    sweep = "backward" if backward else "forward"
    if not cell.recurrent:  # one lane per unit, one item per threadgroup, the least memory, and no weights
        used = working_registers(cell, sweep, rows=1, packed=False)
        return FusedTiling(
            matrices=False, units=1, rows=1, threads=32 * -(-H // 32), vectors=1, bytes=16,
            weights=0, resident=0, resident_part=1.0, registers=used,
        )  # fmt: skip
    wanted = cut.rows if cut else rows_for(layer)
    matrices = wanted == 8 and fits_matrices(cell, H) and packing is None
    # lengths: for each product of a step, how many terms one result sums. In the backward pass a GRU whose reset comes
    # before the candidate's product has two products: one for the candidate (H terms), one for two gates (2 H terms).
    lengths = [H, 2 * H] if backward and two_products(cell) else [gates * H if backward else H]
    if matrices:
        # A simdgroup has 8 units and 8 items. A vector of 4 weights covers 16 columns (two 8 x 8 matrices) of one gate.
        units, rows, threads, piece, slots = 8, 8, 32 * -(-H // 8), 8, 1 if backward else gates
        weights = -(-lengths[0] // 16) * slots
    else:
        # A group of 8 lanes shares the rows of weights of its units. In the backward pass a unit has only one row, so a
        # group has 16 lanes. A lane takes 4 numbers of each `piece` of the operand, and multiplies them by the weights
        # of all rows.
        group = 16 if backward and lanes > 1 else 8
        units, piece = group // lanes, 4 * group
        groups = -(-H // units)
        threads = 32 * -(-groups * group // 32)
        # Where registers suffice for several rows, the threadgroup memory does, too.
        rows = rows_of(cell, sweep, min(wanted, 4), threads, packing is not None)
        slots = units * (1 if backward else gates)
        weights = slots * sum(-(-length // piece) for length in lengths)
        if packing:
            span, weights = packed_share(packing, H, group, slots)
            lengths, itemsize = [span * group], 4
            # First term: a lane with several quantization groups also needs registers for the sums of one group. Second
            # term: with two products per step, a few values stay in registers between the products.
            more += slots * rows * (span > packing.group_size) + 8 * two_products(cell)
    one = 4 * rows * piece * sum(-(-length // piece) for length in lengths)
    vectors = 1 if len(lengths) > 1 or (matrices and backward and 2 * one > THREADGROUP_BYTES) else 2
    # The free registers hold resident vectors of 4 weights. A register has 4 bytes, so a vector of 4 weights takes as
    # many registers as a weight has bytes. So the number of registers is divided by itemsize.
    working = working_registers(cell, sweep, rows, packing is not None) + more
    resident = max(0, min(weights, (registers_of(threads) - working - (cut.spare if cut else 0)) // itemsize))
    used = working + resident * itemsize
    memory = vectors * one + norms.memory_of(cell, H, lanes, rows)
    return FusedTiling(matrices, units, rows, threads, vectors, memory, weights, resident, resident / weights, used)


def packed_share(packing: Packing, H: int, lanes: int, slots: int) -> tuple[int, int]:
    """Return how quantized weights are divided among lanes, as (span, vectors): how many weights of one row a lane
    gets, and how many vectors of four words it gets for all its rows together. lanes: how many lanes share each row of
    weights. slots: how many rows each lane works on. metal/fused_quantized.metal computes the same numbers.

    span is H / lanes, rounded up to a power of two and to at least 8, because lanes read eight weights at a time. The
    size of a quantization group (`group_size`) is a power of two, too. So a lane's weights lie in one group or fill
    whole groups. `-(-a // b)` is a / b, rounded up. A word has 32 bits; a weight takes `field_of(packing)` of them, 4
    or 8. pieces: how many groups of a row a lane has. Each group has a scale and, in mode affine, a bias; each takes
    one word.
    """
    span = max(8, 2 ** (-(-H // lanes) - 1).bit_length())
    pieces = max(1, span // packing.group_size)
    words = span * field_of(packing) // 32 + pieces * (2 if packing.mode == "affine" else 1)
    return span, -(-slots * words // 4)


@lru_cache(4096)
def rows_for(layer: LayerSize) -> int:
    """Return how many batch items a threadgroup computes: 1, 2, 4 or 8. With 8 items it multiplies 8 x 8 matrices.

    With more items per threadgroup, each weight that is loaded serves more items. With fewer items there are more
    threadgroups, so that all cores have work. The result is the smallest number of items whose predicted time is nearly
    the shortest (see SIMPLER). The candidates are 1, 2 and 8 items, if 8 x 8 matrices support the cell and H and a
    thread then has enough registers; otherwise they are 1, 2 and 4. A cell without a recurrent product has no weights
    to share, so 1 item is enough.
    """
    if not layer.cell.recurrent:
        return 1
    # widest: the largest H for 8 x 8 matrices. It is larger for 16-bit weights, because these take fewer registers.
    widest = WIDEST_MATRICES[layer.itemsize]
    fits = fits_matrices(layer.cell, layer.H) and widest >= layer.H
    # least: how many registers a thread must have. An LSTM with H = widest, which has 4 * widest threads (32 for 8
    # units), has just enough registers. A user's cell needs some more.
    least = registers_of(4 * widest) + own_registers(layer.cell, rows=8)
    matrices = fits and layer.packing is None and registers_of(32 * -(-layer.H // 8)) >= least
    times = {rows: step_cycles(layer, rows) for rows in (1, 2, 8 if matrices else 4)}
    return next(rows for rows, time in times.items() if time <= SIMPLER * min(times.values()))


def step_cycles(layer: LayerSize, rows: int) -> float:
    """Return the predicted cycles of a GPU core for one time step, forward and backward together, if a threadgroup
    computes `rows` batch items. With quantized weights only the forward pass is counted, and no padding."""
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
    """Return the predicted cycles of one time step of one pass. tiling: how the pass is divided among threads. groups:
    the number of threadgroups. cores: the number of GPU cores. itemsize: the bytes of a weight. numbers: how many
    weights a threadgroup multiplies, or None for all weights that its lanes hold, padding included.

    The core with the most threadgroups determines the time. It runs as many threadgroups at the same time as fit in its
    registers and in its threadgroup memory. While one threadgroup waits at a barrier, another one computes.
    """
    form = "matrices" if tiling.matrices else "packed" if packing else "lanes"
    # held: how many weights the lanes of a threadgroup hold, padding included. loaded: how many bytes a threadgroup
    # reads from memory at each step. work: the cycles of a step of one threadgroup, limited by arithmetic (CYCLES per
    # weight and item) or by these reads. each: the threadgroups of the core with the most threadgroups. WAIT: the
    # cycles that a threadgroup waits at each step.
    held = 4 * tiling.threads * tiling.weights
    loaded = held * (4 if packing else itemsize) * (1 - tiling.resident_part)
    work = max(CYCLES[form] * (numbers or held) * tiling.rows, loaded / BYTES_PER_CYCLE)
    each = -(-groups // cores)
    return max(each * work, -(-each // groups_at_once(tiling)) * (work + WAIT))


def groups_at_once(tiling: FusedTiling) -> int:
    """Return how many threadgroups a GPU core runs at the same time: as many as fit in its registers and in its
    threadgroup memory, but at least 1."""
    by_registers = REGISTER_BYTES // (4 * tiling.registers * tiling.threads)
    return max(1, min(by_registers, THREADGROUP_MEMORY // tiling.bytes))


def rows_of(cell: AnyCell, sweep: str, wanted: int, threads: int, packed: bool) -> int:
    """Return how many batch items a threadgroup of `threads` threads computes if it multiplies in lanes: `wanted`, or
    fewer if a thread does not have enough registers. The table WORKING_REGISTERS has the possible numbers."""
    most = registers_of(threads)
    possible = [rows for rows in WORKING_REGISTERS[cell.op, sweep] if rows <= wanted]
    return max(rows for rows in possible if rows == 1 or working_registers(cell, sweep, rows, packed) <= most)


def working_registers(cell: AnyCell, sweep: str, rows: int, packed: bool) -> int:
    """Return how many registers a thread needs, without those for weights that stay in registers and for optional
    inputs. packed: whether the weights are quantized."""
    packs = PACKED_REGISTERS[rows] if packed else 0
    return WORKING_REGISTERS[cell.op, sweep][rows] + own_registers(cell, rows) + packs


def own_registers(cell: AnyCell, rows: int) -> int:
    """Return how many more registers a thread needs for the states, inputs, gates and parameters of a user's cell.
    WORKING_REGISTERS already counts one state besides h, and four gates. rows: the batch items of a threadgroup, all of
    which a thread computes. With 8 rows the kernel multiplies 8 x 8 matrices; then a thread computes 2 of 8 items, and
    also holds the states of the next step. each: the registers for one batch item: 2 per further state (4 with
    matrices), 1 per input, 2 per further gate. The sums of the parameters' gradients (`summed`) serve all items."""
    if not isinstance(cell, PointwiseCell):
        return 0
    each = (4 if rows == 8 else 2) * max(0, cell.carried - 1) + cell.inputs + 2 * max(0, cell.gates - 4)
    return (2 if rows == 8 else rows) * each + cell.summed


def lanes_of(cell: AnyCell) -> int:
    """Return how many lanes of a simdgroup share a hidden unit: 4, or 1 for a plain RNN and for a cell without a
    recurrent product. metal/fused_lanes.metal and metal/pointwise.metal say what each lane does."""
    return 4 if cell.recurrent and cell.op != "rnn" else 1


def tiling_of(sweep: str, problem: Problem, names: Collection[str] = ()) -> FusedTiling:
    """Return how a pass ("forward" or "backward") of this problem is divided among threads. names: the names of a
    launch's inputs. The division depends on optional inputs and on norms of single gates, because they need additional
    registers. Only a forward pass reads quantized weights."""
    more = sum(count for name, count in OPTION_REGISTERS.items() if name in names)
    more += EACH_REGISTERS if norm_blocks(problem.cell) > 1 else 0
    layer = layer_size(problem) if sweep == "forward" else layer_size(problem)._replace(packing=None)
    return fused_tiling(layer, backward=sweep == "backward", more=more, cut=problem.cut)


def layer_size(problem: Problem) -> LayerSize:
    """Return the sizes of a problem's layer."""
    cell, B, H = problem.cell, problem.B, problem.H
    return LayerSize(cell, B, H, problem.dtype.size, problem.directions, problem.cores, problem.packing)


def two_products(cell: AnyCell) -> bool:
    """Return whether a step has two products, one after the other, as in a GRU whose reset comes before the
    candidate's product."""
    return cell.reset == "before"


def registers_of(threads: int) -> int:
    """Return how many registers each thread can have in a threadgroup of `threads` threads. REGISTERS has the numbers
    of some sizes of threadgroups; the next larger size counts."""
    return REGISTERS[min(most for most in REGISTERS if most >= threads)]


def fits_matrices(cell: AnyCell, H: int) -> bool:
    """Return whether `fused` can multiply 8 x 8 matrices for this cell and H; otherwise single threads (lanes)
    multiply.

    A threadgroup has at most 32 simdgroups with 8 units each: 32 * 8 = 256 units. Its 32 KB of memory hold, in float32,
    1024 gradients of gates for each of 8 batch items. So H <= 256 and G H <= 1024. A cell without a recurrent product
    has nothing to multiply. Two kinds of cells are not supported: a GRU whose reset comes before the candidate's
    product, because it has two products per step, and a cell with a norm, because the code for norms exists for lanes
    only.
    """
    return H <= 256 and cell.gates * H <= 1024 and cell.recurrent and not two_products(cell) and cell.norm is None
