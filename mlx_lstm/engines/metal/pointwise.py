"""Run a cell written by the user on the engine `fused`. This module generates the cell's Metal struct, which
metal/pointwise.metal describes, from the graph of the cell's operations. It also builds the launches of the forward
and the backward pass.

If a call runs both directions, they run one after the other, each on its part of the arrays.
"""

from collections.abc import Collection
from functools import lru_cache
from hashlib import blake2b

import mlx.core as mx
import numpy as np

from ..cells import PointwiseCell
from ..directions import half, join, join_gradients, one_direction, part
from ..ops import sweep as ops
from ..problem import Arrays, Problem
from .fused import SWEEPS, THREADGROUP_BYTES, FusedTiling, Part, index_of, launches_of_pass, registers_of, run
from .kernel import Inputs, Outputs, Source, Template, cached, contiguous, fields_of, prepare, struct_of, whole_mask
from .products import column_sums, project
from .statements import HELPERS, Statements

WORKING_REGISTERS = {
    "forward": {1: 44, 2: 64, 4: 92},
    "backward": {1: 48, 2: 68, 4: 108},
}
"""The number of registers that a thread needs, by pass and batch items of a threadgroup. It does not include the
registers for resident weights, nor those whose number grows with the cell's states, inputs, gates and parameters:
`tiling_of` adds both. The numbers come from machine code that Mesa's compiler generates for the M1."""

FILES = ("arrays", "cell", "fused", "fused_lanes", "pointwise")

INPUTS = {
    "forward": ("z", "h0", "c0", "arranged", "inputs", "params", "mask", "keep", "lengths", "sizes"),
    "backward": (
        *("gates", "h", "c", "h0", "c0", "arranged", "inputs", "params", "mask", "keep", "lengths"),
        *("dh", "dc", "dhT", "dcT", "sizes"),
    ),
}

# --- The generated struct ---


def lanes_of(cell: PointwiseCell) -> int:
    """Return how many lanes (GPU threads) share a hidden unit: 4, or 1 for a cell without a recurrent product."""
    return 4 if cell.recurrent else 1


def scatters(cell: PointwiseCell, lanes: int = 4) -> bool:
    """Return whether each of a unit's four lanes gets the recurrent product of one gate only: lane k gets the product
    of gate k. Otherwise all lanes get the products of all gates, which takes more additions."""
    return lanes == 4 and cell.recurrent and cell.gates == 4 and not cell.graph.apart


def grouped(letter: str, nodes: list[int], lanes: int) -> list[tuple[str, list[int]]]:
    """Divide nodes of a cell's graph (values that a unit computes) among registers that hold a different node in
    each lane, so that each lane stores only a part of the values. Return pairs (name of the register, the node of
    each lane). The registers are called letter0, letter1, ...; register j holds in lane k the node nodes[j * lanes +
    k], or -1 if there is no such node."""
    parts = [nodes[start : start + lanes] for start in range(0, len(nodes), lanes)]
    return [(f"{letter}{j}", [*nodes, *[-1] * (lanes - len(nodes))]) for j, nodes in enumerate(parts)]


@lru_cache(512)
def struct_text(cell: PointwiseCell, lanes: int) -> str:
    """Return the Metal source of a cell's struct, which has the name `Own`. metal/cell.metal and metal/pointwise.metal
    list the members of this struct. lanes: how many lanes share a unit, 4 or 1."""
    graph = cell.graph
    numbers = {
        "GATES": cell.gates, "CARRIED": cell.carried, "INPUTS": cell.inputs, "SUMMED": cell.summed,
        "CONSTANTS": cell.summed, "KEPT": cell.kept, "GRADIENTS": cell.gradients, "SEGMENTS": 1, "LANES": lanes,
        "PRODUCTS": cell.gates if cell.recurrent else 0, "SCATTERS": int(scatters(cell, lanes)),
        "PASSES_H": int(cell.passes_h),
    }  # fmt: skip
    enum = ", ".join(f"{name} = {value}" for name, value in numbers.items())
    helpers = "".join(text for op, text in HELPERS.items() if any(node.op == op for node in graph.nodes))
    functions = CONSTANTS + forward_text(cell, lanes) + backward_text(cell, lanes)
    return f"struct Own {{\nenum {{ {enum} }};\n{helpers}{functions}}};\n"


CONSTANTS = """\
static constexpr int block(int k) { return k; }
template <class Index, class Arrays>
static void constants(thread const Arrays& a, int direction, int H, int unit, thread float* p) {
for (int k = 0; k < SUMMED; ++k) p[k] = value_at(a.params, (Index(SUMMED) * direction + k) * H + unit, 0.0f);
}
"""
"""The members of a generated struct that say where a unit's numbers are, and load its parameters."""


def function_text(head: str, lines: list[str]) -> str:
    """Return the source of a static Metal function. head: its name and parameters. lines: its statements."""
    return "static void " + head + " {\n" + "\n".join(lines) + "\n}\n"


def of_lane(names: list[str], lanes: int) -> str:
    """Return the Metal expression that has the value names[k] in lane k."""
    code = names[-1]
    for k in reversed(range(len(names) - 1)):
        code = f"lane == {k} ? {names[k]} : {code}" if lanes > 1 else names[0]
    return code


def name_of(text: str) -> str:
    """Return the name with which the kernels of a generated struct begin. MLX caches compiled code by the kernel's
    name, so the name contains a hash of the struct's source."""
    return f"pointwise_{blake2b(text.encode(), digest_size=8).hexdigest()}"


def forward_text(cell: PointwiseCell, lanes: int) -> str:
    """Return the source of the Metal function that computes one forward step; metal/cell.metal lists its
    parameters."""
    graph = cell.graph
    lines: list[str] = []
    number, gates = graph.number, [graph.number.get(f"x{k}", -1) for k in range(graph.gates)]
    uniform = {n: f"{name[0]}_in{name[1:]}" for name, n in number.items() if name[0] in "suw"}
    arrays = {"s": "s", "u": "u", "w": "p"}
    lines += [f"const float {name} = {arrays[name[0]]}[{name[4:]}];" for name in uniform.values()]
    count = -(-graph.gates // lanes)
    for j in range(count):
        own = [f"sums[{k}]" for k in range(lanes * j, min(lanes * (j + 1), graph.gates))]
        product = (
            ""
            if not cell.recurrent or graph.apart
            else " + sums[0]"
            if scatters(cell, lanes)
            else f" + ({of_lane(own, lanes)})"
        )
        lines.append(f"const float a{j} = y[{j}]{product};")
    if graph.apart:
        uniform |= {number[f"p{k}"]: f"sums[{k}]" for k in range(graph.gates) if f"p{k}" in number}
    code = Statements(graph, lanes, uniform, grouped("a", gates, lanes))
    code.divide_work([*graph.forward, *graph.saved])
    new = [code.as_float(n, code.everywhere(n)) for n in graph.forward]
    saved = code.in_lanes(graph.saved)
    lines += [*code.lines, *(f"y[{j}] = {name};" for j, name in enumerate(saved))]
    lines += [f"s[{k}] = {name};" for k, name in enumerate(new)]
    head = "forward(int lane, " if lanes > 1 else "forward("
    head += "thread const float* p, thread const float* u, thread const float* sums, thread float* s, thread float* y)"
    return function_text(head, lines)


def backward_text(cell: PointwiseCell, lanes: int) -> str:
    """Return the source of the Metal function that computes one backward step; metal/cell.metal lists its
    parameters."""
    graph = cell.graph
    after, number = graph.known_after(), graph.number
    uniform = {n: f"n_in{k}" for n, k in after.items()}
    lines = [f"const float n_in{k} = after[{k}];" for k in after.values()]
    uniform |= {n: f"{name[0]}_in{name[1:]}" for name, n in number.items() if name[0] in "uwd"}
    arrays = {"u": "u", "w": "p", "d": "ds"}
    lines += [f"const float {n[0]}_in{n[1:]} = {arrays[n[0]]}[{n[1:]}];" for n in number if n[0] in "uwd"]
    states = [k for k in range(graph.states) if f"s{k}" in number]
    lines += [f"const float s_in{k} = before[{k}];" for k in states]
    uniform |= {number[f"s{k}"]: f"s_in{k}" for k in states}
    lines += [f"const float y{j} = y[{j}];" for j in range(-(-len(graph.saved) // lanes))]
    code = Statements(graph, lanes, uniform, grouped("y", list(graph.saved), lanes))
    code.divide_work(graph.back)
    results = {"d": code.in_lanes(graph.stored_gradients)}
    for letter, name in (("s", "ds"), ("u", "du"), ("w", "dp")):
        results[name] = [code.as_float(n, code.everywhere(n)) for n in graph.gradients(letter)]
    lines += code.lines
    lines += [f"{name}[{k}] = {value};" for name, values in results.items() for k, value in enumerate(values)]
    head = "backward(int lane, " if lanes > 1 else "backward("
    head += "thread const float* p, thread const float* u, thread const float* y, thread const float* before, "
    head += "thread const float* after, thread float* ds, thread float* d, thread float* du, thread float* dp)"
    return function_text(head, lines)


# --- Tiling ---


@lru_cache(1024)
def tiling_of(sweep: str, cell: PointwiseCell, B: int, H: int, itemsize: int) -> FusedTiling:
    """Return how a pass with this cell is divided among threads: lanes per unit, batch items per threadgroup, weights
    in registers and so on. sweep: "forward" or "backward"."""
    lanes, back, G = lanes_of(cell), sweep == "backward", cell.gates
    if not cell.recurrent:
        threads = 32 * -(-H // 32)
        return FusedTiling(False, 1, 1, threads, 1, 16, 0, 0, 1.0, WORKING_REGISTERS[sweep][1])
    units = 4 if back else 2
    threads = 32 * -(-(-(-H // units) * lanes * units) // 32)
    most = registers_of(threads)

    def working(rows: int) -> int:
        per_row = 2 * max(0, cell.carried - 1) + cell.graph.inputs + 2 * max(0, G - 4)
        return WORKING_REGISTERS[sweep][rows] + rows * per_row + cell.graph.params

    length, group = G * H if back else H, 4 * lanes * units
    runs = -(-length // group)
    rows = 1 if B <= 16 else 2 if B <= 64 else 4
    while rows > 1 and (working(rows) > most or 8 * rows * group * runs > THREADGROUP_BYTES):
        rows //= 2
    weights = runs * units * (1 if back else G)
    resident = max(0, min(weights, (most - working(rows)) // itemsize))
    used = working(rows) + resident * itemsize
    size = 4 * rows * group * runs
    return FusedTiling(False, units, rows, threads, 2, 2 * size, weights, resident, resident / weights, used)


@lru_cache(256)
def arrangement(sweep: str, cell: PointwiseCell, H: int, tiling: FusedTiling) -> mx.array:
    """Return an array of indices that bring the recurrent weights into the order in which the lanes read them. Entry
    n is the index, in the flattened Wh [G H, H], of the weight that is number n in this order, which
    metal/fused_lanes.metal describes. Padding has the index G H H, one past the last weight; the caller appends a
    zero there."""
    back, G = sweep == "backward", cell.gates
    lanes, units = lanes_of(cell), tiling.units
    index, vector, e = np.ogrid[: tiling.threads, : tiling.weights, :4]
    s, per = index % (lanes * units), 1 if back else G
    slot, run_ = vector % (units * per), vector // (units * per)
    unit = index // (lanes * units) * units + ((slot // per) ^ (s // lanes))
    gate = slot % per ^ (s % lanes) if scatters(cell) and not back else slot % per
    k = 4 * (s + lanes * units * run_) + e
    place = k * H + unit if back else (gate * H + unit) * H + k
    place = np.where((unit < H) & (k < (G * H if back else H)), place, G * H * H)
    shape = (tiling.threads // 32, 32, tiling.weights, 4)
    return mx.array(place.reshape(shape).transpose(0, 2, 1, 3).reshape(-1).astype(np.uint32))


def arranged(sweep: str, problem: Problem, Wh: mx.array) -> mx.array:
    """Return the recurrent weights Wh in the order in which the lanes of a pass read them, with zeros as padding."""
    cell = own_cell(problem)
    tiling = tiling_of(sweep, cell, problem.B, problem.H, Wh.dtype.size)
    padded = mx.concatenate([Wh.reshape(-1), mx.zeros((1,), Wh.dtype)])
    return padded[arrangement(sweep, cell, problem.H, tiling)]


def own_cell(problem: Problem) -> PointwiseCell:
    """Return the problem's cell, which must be a cell written by the user (a `PointwiseCell`)."""
    assert isinstance(problem.cell, PointwiseCell)
    return problem.cell


# --- Launches ---


def division(problem: Problem, masks_differ: bool) -> list[tuple[int, mx.array]]:
    """Divide the steps of a pass with a user's cell into launches. Return (number of steps, array of sizes) for each
    launch, in the order in which the forward pass runs them."""
    tilings = [tiling_of(sweep, own_cell(problem), problem.B, problem.H, problem.dtype.size) for sweep in SWEEPS]
    return launches_of_pass(problem, tilings, masks_differ)


def outputs_of(sweep: str, problem: Problem, dtype: mx.Dtype, steps: int, names: Collection[str]) -> Outputs:
    """Return the shape and dtype of each output of a launch by name, or None for an output that is not written.
    steps: the number of steps that the launch runs. names: the names of the launch's inputs."""
    cell, B, H, floats = own_cell(problem), problem.B, problem.H, mx.float32
    graph, C = cell.graph, cell.carried

    def array(lead: tuple[int, ...], blocks: int, kind: mx.Dtype) -> tuple[tuple[int, ...], mx.Dtype] | None:
        return ((*lead, blocks * H), kind) if blocks else None

    h, c = ((B, H), dtype), array((B,), C, floats)
    if sweep == "forward":
        saves = problem.training or problem.return_gates
        kept = array((steps, B), cell.kept, dtype) if saves else None
        return {"h": ((steps, B, H), dtype), "c": array((steps, B), C, floats), "gates": kept, "hT": h, "cT": c}
    groups = -(-B // tiling_of(sweep, cell, B, H, dtype.size).rows)
    outputs: Outputs = {"dz": array((steps, B), cell.gradients, dtype)}
    outputs |= {"du": array((steps, B), graph.inputs, dtype), "dw": array((groups,), graph.params, floats)}
    outputs["carry"] = array((steps, B), C + cell.passes_h, floats) if "keep" in names else None
    return outputs | {"dh0": h, "dc0": c}


@cached
def sweep_of(sweep: str, problem: Problem, dtype: mx.Dtype, names: tuple[str, ...], differ: bool) -> tuple[Part, ...]:
    """Return the launches of a forward or backward pass. names: the names of the inputs that this call has. differ:
    whether each step has its own mask."""
    back, pieces = sweep == "backward", division(problem, differ)
    first = {*names, "sizes"}
    later = (
        first | ({"dhT", "dcT"} if back else {"h0", "c0"})
        if problem.cell.carried
        else first | {"dhT" if back else "h0"}
    )
    ordered = reversed(pieces) if back else pieces
    return tuple(
        prepared_part(sweep, problem, dtype, later if n else first, steps, sizes)
        for n, (steps, sizes) in enumerate(ordered)
    )


def prepared_part(
    sweep: str, problem: Problem, dtype: mx.Dtype, present: Collection[str], steps: int, sizes: mx.array
) -> Part:
    """Return one launch that runs `steps` steps of a forward or backward pass, with its array `sizes` and the names
    of its inputs and outputs. present: the names of the arrays that the launch gets."""
    cell = own_cell(problem)
    text, tiling = struct_text(cell, lanes_of(cell)), tiling_of(sweep, cell, problem.B, problem.H, dtype.size)
    inputs = {name: name in present for name in INPUTS[sweep]}
    outputs = outputs_of(sweep, problem, dtype, steps, present)
    written = [name for name, output in outputs.items() if output is not None]
    fields = fields_of((*inputs, *outputs), {*present, *written})
    template: Template = {"H": problem.H, "UNITS": tiling.units, "ROWS": tiling.rows, "RESIDENT": tiling.resident}
    template |= {"Index": index_of(problem), "S": dtype}
    body = struct_of(fields) + f"threadgroup vec<float, 4> vectors[{max(1, tiling.bytes // 16)}];\n"
    body += f"pointwise_{sweep}<Own, {', '.join(template)}>(a, vectors, threadgroup_position_in_grid.xy, "
    body += "thread_position_in_threadgroup.x, threads_per_threadgroup.x);"
    source = Source(f"{name_of(text)}_fused_{sweep}", (*FILES, f"pointwise_{sweep}"), body, own=text)
    groups = (-(-problem.B // tiling.rows), 1)
    launch = prepare(source, template, inputs, outputs, groups, tiling.threads)
    return Part(launch, sizes, tuple(name for name in inputs if inputs[name]), tuple(written))


# --- The forward and the backward pass ---


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """Run the forward pass. Return h [T, B, D H], hT [B, D H], and gates [T, B, D K H]: the K numbers per unit that
    the backward pass needs. If the cell has states besides h, also return them as c and cT."""
    if problem.bidirectional:
        return join([forward(one_direction(problem, d), part(arrays, d)) for d in range(2)])
    mask = whole_mask(problem, arrays)
    inputs: Inputs = given(problem, arrays, mask)
    inputs["z"] = project(problem, arrays)
    if "Wh" in arrays:
        # A stepper passes the weights in this order, so that they are arranged only once.
        inputs["arranged"] = arrays["arranged"] if "arranged" in arrays else arranged("forward", problem, arrays["Wh"])
    names = tuple(name for name, array in inputs.items() if array is not None)
    parts = sweep_of("forward", problem, arrays["x"].dtype, names, mask is not None and mask.shape[0] > 1)
    results = run(problem, parts, inputs, {"hT": "h0", "cT": "c0"})
    if own_cell(problem).kept == 0:
        results["gates"] = mx.zeros((problem.T, problem.B, 0), arrays["x"].dtype)
    return results


def given(problem: Problem, arrays: Arrays, mask: mx.array | None) -> Inputs:
    """Return a dict of the arrays that the kernels of both passes read, under the names that the kernels use. mask:
    the factor on h in the recurrent product (mask times `keep`), or None."""
    inputs: Inputs = {"mask": mask}
    for name in ("h0", "inputs", "params", "lengths"):
        if name in arrays:
            inputs[name] = contiguous(arrays[name])
    if "c0" in arrays:
        inputs["c0"] = arrays["c0"].astype(mx.float32)
    if "keep" in arrays:
        inputs["keep"] = contiguous(arrays["keep"].reshape(problem.T, problem.B))
    return inputs


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """Run the backward pass. Return the gradients of all arrays, by name. saved: the outputs of the forward pass.
    cotangents: the gradients of some outputs."""
    if saved.get("gates") is None:
        saved = forward(problem._replace(training=True), arrays)
    if problem.bidirectional:
        each = [[part(values, d) for values in (arrays, saved, cotangents)] for d in range(2)]
        return join_gradients([backward(one_direction(problem, d), *values) for d, values in enumerate(each)], arrays)
    mask = whole_mask(problem, arrays)
    inputs = given(problem, arrays, mask)
    for name in ("h", "c", "gates") if problem.cell.reads_h else ("c", "gates"):
        if name in saved and saved[name].size:
            inputs[name] = contiguous(saved[name])
    for name in cotangents:
        inputs[f"d{name}"] = contiguous(cotangents[name])
    if "Wh" in arrays:
        inputs["arranged"] = arranged("backward", problem, arrays["Wh"])
    names = tuple(name for name, array in inputs.items() if array is not None)
    parts = sweep_of("backward", problem, arrays["x"].dtype, names, mask is not None and mask.shape[0] > 1)
    results = run(problem, parts, inputs, {"dh0": "dhT", "dc0": "dcT"})
    return gradients_after(problem, arrays, saved, results)


def gradients_after(problem: Problem, arrays: Arrays, saved: Arrays, swept: Arrays) -> Arrays:
    """Return the gradients of all arrays. They are computed from the results of the backward kernels (`swept`) with
    products and sums over all steps. saved: the outputs of the forward pass."""
    if problem.bidirectional:
        parts = []
        for d in range(2):
            of_direction = part(arrays, d), part(saved, d), {name: half(array, d) for name, array in swept.items()}
            parts.append(gradients_after(one_direction(problem, d), *of_direction))
        return join_gradients(parts, arrays)
    cell = own_cell(problem)
    graph, G, H = cell.graph, cell.gates, problem.H
    d, stored = swept["dz"], graph.stored_gradients
    x = [stored.index(n) for n in graph.gradients("x")]
    dz = d if x == list(range(len(stored))) else mx.concatenate([d[..., k * H : (k + 1) * H] for k in x], axis=-1)
    gradients = ops.input_gradients(problem, {n: a for n, a in arrays.items() if n != "b"}, dz)
    if "b" in arrays:
        rows = ops.flat(dz)
        gradients["b"] = column_sums(rows, None if rows.dtype == mx.float32 else mx.ones((1, len(rows)), rows.dtype))
    before = {}
    if {"Wh", "keep"} & arrays.keys():
        before = ops.states_before(problem, arrays, saved)
    if "Wh" in arrays:
        dp = ops.flat(d[..., : G * H])
        gradients |= product_gradients(problem, arrays, before["h"], dp)
    if "keep" in arrays:
        names = [name for name in ("h", "c") if name in before and (name == "c" or cell.passes_h)]
        total = mx.zeros((problem.T, problem.B, 1))
        if names:
            states = mx.concatenate([before[name].astype(mx.float32) for name in names], axis=-1)
            states = ops.without_padding(arrays.get("lengths"), states)
            total = (swept["carry"] * states).sum(axis=-1, keepdims=True)
        gradients["keep"] = total + gradients.pop("keep", 0)
    if "inputs" in arrays:
        gradients["inputs"] = swept["du"]
    if "params" in arrays:
        gradients["params"] = swept["dw"].sum(axis=0)
    gradients |= {name: swept[f"d{name}"] for name in ("h0", "c0") if name in arrays}
    return {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items() if name in arrays}


def product_gradients(problem: Problem, arrays: Arrays, h: mx.array, dp: mx.array) -> Arrays:
    """Return the gradients of Wh and mask, and the part of the gradient of `keep` (the factor on the states) that
    flows through the recurrent product. h [T, B, H]: h before each step. dp [T B, G H]: the gradient of the
    recurrent product."""
    lengths, mask = arrays.get("lengths"), arrays.get("mask")
    h = ops.without_padding(lengths, h)
    kept = ops.times_keep(arrays, h)
    gradients = {"Wh": dp.T @ ops.flat(kept if mask is None else kept * mask)}
    if {"mask", "keep"} & arrays.keys():
        dh = (dp @ arrays["Wh"]).reshape(h.shape)
        if mask is not None:
            gradients["mask"], dh = ops.sum_to_shape(dh * kept, mask.shape), dh * mask
        if "keep" in arrays:
            gradients["keep"] = (dh * h).astype(mx.float32).sum(axis=-1, keepdims=True)
    return gradients
