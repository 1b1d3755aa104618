"""Generate the Metal struct of a cell written by the user from the graph of the cell's operations, and compute the
gradients that remain after the backward steps. metal/cell.metal describes the struct. The modules `fused` and
`stepwise` run such a cell like a built-in one.

A graph (`cell.graph`) is a list of nodes. A node is an operation on other nodes; it is named by its number.
graph.forward: the nodes of the new states. graph.saved: the nodes that the forward step saves for the backward step.
graph.gradients(letter): the nodes of the gradients of all inputs with this letter. graph.number: {name of an input: its
node}. graph.apart: whether the cell reads the two parts of a preactivation (from the input, and from the recurrent
product) as two values. An input's name is a letter and a number:

- x: a preactivation; if `apart`, x is its part from the input and p its recurrent part
- s: a state before the step, s0 is h
- u: an input of the step; w: a parameter; d: the gradient of a new state

The generated functions `forward` and `backward` have the parameters that metal/cell.metal lists: p (parameters), u
(inputs of the step), sums (recurrent products), s and ds (states and their gradients), y (preactivations, or saved
values), d (gradients of the preactivations). Variables such as s_in0 have the values of single elements.

lanes: how many GPU threads share a unit, 1 or 4. They divide the unit's costly operations among themselves. A register
is a Metal variable. With four lanes it may hold a different node in each lane: lane k of register j holds node number 4
* j + k of a list.

`Statements` (statements.py) collects the code of nodes in `lines`. divide_work(nodes) writes the costly operations on
which the nodes depend, divided among the lanes. everywhere(n) returns a variable that has node n in all lanes.
in_lanes(nodes) returns the registers that hold the nodes. as_float(n, name) returns the variable as a float.
"""

from functools import lru_cache
from hashlib import blake2b

import mlx.core as mx

from ..cells import PointwiseCell, norm_blocks
from ..directions import half, join_gradients, one_direction, part
from ..ops import sweep as ops
from ..problem import Arrays, Problem
from .kernel import number_of_norm
from .products import column_sums
from .statements import HELPERS, Statements

# --- The generated struct ---


def scatters(cell: PointwiseCell) -> bool:
    """Return whether lane k of a unit's four lanes gets the recurrent product of gate k only. Otherwise all lanes get
    the products of all gates, which takes more additions. A cell that reads the products `apart` needs all of them in
    every lane."""
    return cell.recurrent and cell.gates == 4 and not cell.graph.apart


def grouped(letter: str, nodes: list[int], lanes: int) -> list[tuple[str, list[int]]]:
    """Divide nodes of a cell's graph among registers that hold a different node in each lane. Return pairs (name of a
    register, the node of each lane). Register j has the name `letter` followed by j; in lane k it holds nodes[j * lanes
    + k], or -1 if there is no such node."""
    parts = [nodes[start : start + lanes] for start in range(0, len(nodes), lanes)]
    return [(f"{letter}{j}", [*nodes, *[-1] * (lanes - len(nodes))]) for j, nodes in enumerate(parts)]


@lru_cache(512)
def struct_text(cell: PointwiseCell) -> str:
    """Return the Metal source of a cell's struct, which has the name `Own`, for kernels in which one thread computes
    a unit. metal/cell.metal lists its members."""
    return own_text(cell, helpers_text(cell) + forward_text(cell, 1) + backward_text(cell, 1))


@lru_cache(512)
def lanes_text(cell: PointwiseCell, computes: bool = True) -> str:
    """Return the Metal source of two structs for kernels in which several lanes share a unit: `Own`, without the
    functions of a step, and `Lanes<Own>` with these functions. metal/pointwise.metal lists the members of `Lanes<Own>`.
    slot_block: the gate to which sum number n (slot n) of a lane belongs. With SCATTERS it is gate n ^ lane: slot 0
    belongs to the lane's own gate, and simd_shuffle_xor(sum, n) sends the sum of slot n to the lane of its gate.
    TWO_PRODUCTS is 0; only a GRU whose reset comes before the product has two products. computes: False for launches
    that only copy weights and need no functions."""
    lanes = 4 if cell.recurrent else 1
    enum = f"enum {{ LANES = {lanes}, SCATTERS = {int(scatters(cell))}, TWO_PRODUCTS = 0, "
    enum += f"NORMALISES = {int(cell.norm is not None)} }};\n"
    enum += "static constexpr int slot_block(int n, int lane) { return SCATTERS ? n ^ lane : n; }\n"
    functions = helpers_text(cell) + forward_text(cell, lanes, "int lane, ") + backward_text(cell, lanes, "int lane, ")
    struct = f"{own_text(cell)}\ntemplate <> struct Lanes<Own> {{\n{enum}{functions if computes else ''}}};\n"
    return struct + norm_text(cell) if computes else struct


def own_text(cell: PointwiseCell, functions: str = "") -> str:
    """Return the Metal source of the struct `Own` of a cell. functions: the source of the struct's functions.

    The struct's constants are counts per unit: GATES preactivations, of which PRODUCTS (all or none) have a recurrent
    product; CARRIED states besides h; INPUTS of each step; KEPT saved values; GRADIENTS of preactivations that are
    stored. SUMMED and CONSTANTS are both the number of parameters, because a unit reads only parameters once per
    launch, and each parameter has a gradient. SEGMENTS is 1: the product dz Wh is one sum over all gates. PASSES_H:
    whether a step reads h outside the product. READS_BEFORE and READS_AFTER have one bit per state, h first: whether a
    backward step reads the state before or after the step.
    """
    graph = cell.graph
    numbers = {
        "GATES": cell.gates, "CARRIED": cell.carried, "INPUTS": cell.inputs, "SUMMED": cell.summed,
        "CONSTANTS": cell.summed, "KEPT": cell.kept, "GRADIENTS": cell.gradients, "SEGMENTS": 1,
        "PRODUCTS": cell.gates if cell.recurrent else 0, "PASSES_H": int(cell.passes_h),
        "READS_BEFORE": sum(graph.reads(f"s{k}") << k for k in range(graph.states)),
        "READS_AFTER": sum(graph.reads_after(k) << k for k in range(graph.states)),
    }  # fmt: skip
    enum = ", ".join(f"{name} = {value}" for name, value in numbers.items())
    return f"struct Own {{\nenum {{ {enum} }};\n{MEMBERS}{functions}}};\n"


def norm_text(cell: PointwiseCell) -> str:
    """Return the Metal source of the struct `Norm<Own>`, whose constants say what a cell normalises. Return "" for a
    cell without a norm. metal/norm.metal explains the constants: OF, what is normalised; IS_SUM, whether this is the
    product plus the input's part; IS_EACH, whether each gate has its own norm; GROUPS, the number of norms. OF_C,
    IN_STATE and HAS_C are for a norm of c, which a user's cell does not have."""
    if cell.norm is None:
        return ""
    numbers = {
        "OF": number_of_norm(cell), "OF_C": 0, "IN_STATE": 0, "HAS_C": 0, "IS_SUM": int(cell.norm.of == "sum"),
        "IS_EACH": int(cell.norm.gates == "each"), "GROUPS": norm_blocks(cell),
    }  # fmt: skip
    enum = ", ".join(f"{name} = {value}" for name, value in numbers.items())
    return f"template <> struct Norm<Own> {{\nenum {{ {enum} }};\n}};\n"


def helpers_text(cell: PointwiseCell) -> str:
    """Return the Metal source of the functions in HELPERS that the cell's operations call."""
    return "".join(text for op, text in HELPERS.items() if any(node.op == op for node in cell.graph.nodes))


MEMBERS = """\
static constexpr int block(int k) { return k; }
template <class Index, class Arrays>
static void constants(thread const Arrays& a, int direction, int H, int unit, thread float* p) {
for (int k = 0; k < SUMMED; ++k) p[k] = value_at(a.params, (Index(SUMMED) * direction + k) * H + unit, 0.0f);
}
static float product_gradient(int k, thread const float*, thread const float* d) { return d[k]; }
"""
"""The Metal source of members that are the same in all generated structs. `block` returns the position of block k on a
gate axis, which is k for a user's cell. `constants` reads a unit's parameters p from the array params [D, SUMMED H].
`product_gradient` returns the gradient of the recurrent product of gate k, which is d[k], the gradient of its
preactivation."""


def function_text(head: str, lines: list[str]) -> str:
    """Return the Metal source of a static function. head: its name and parameters."""
    return "static void " + head + " {\n" + "\n".join(lines) + "\n}\n"


def of_lane(names: list[str], lanes: int) -> str:
    """Return a Metal expression that has in lane k the value of the variable names[k]. If there are more lanes than
    names, the remaining lanes get the last one. With one lane the expression is names[0]."""
    code = names[-1]
    for k in reversed(range(len(names) - 1)):
        code = f"lane == {k} ? {names[k]} : {code}" if lanes > 1 else names[0]
    return code


def name_of(text: str) -> str:
    """Return how the names of all kernels with a generated struct begin. text: the struct's source. MLX caches compiled
    code by the kernel's name, so the name contains a hash of the source."""
    return f"pointwise_{blake2b(text.encode(), digest_size=8).hexdigest()}"


def forward_text(cell: PointwiseCell, lanes: int, first: str = "") -> str:
    """Return the source of the Metal function `forward`, which computes one step. lanes: how many lanes share a unit.
    first: the declaration of an additional first parameter.

    In the code below `uniform` is {node: variable}, for the values that all lanes of a unit have. The Metal variables
    a0, a1, ... are registers with the preactivations: y, the input's part, plus the recurrent product. With `scatters`
    the product of a lane's own gate is in sums[0], otherwise the product of gate k is in sums[k]. If the graph reads
    both parts of a preactivation `apart`, the product is not added.
    """
    graph = cell.graph
    lines: list[str] = []
    # gates: the nodes of the preactivations; -1 if the cell does not read a preactivation.
    number, gates = graph.number, [graph.number.get(f"x{k}", -1) for k in range(graph.gates)]
    uniform = {n: f"{name[0]}_in{name[1:]}" for name, n in number.items() if name[0] in "suw"}
    arrays = {"s": "s", "u": "u", "w": "p"}
    lines += [f"const float {n[0]}_in{n[1:]} = {arrays[n[0]]}[{n[1:]}];" for n in number if n[0] in "suw"]
    count = -(-graph.gates // lanes)
    for j in range(count):
        own = [f"sums[{k}]" for k in range(lanes * j, min(lanes * (j + 1), graph.gates))]
        product = "sums[0]" if lanes > 1 and scatters(cell) else f"({of_lane(own, lanes)})"
        adds = cell.recurrent and not graph.apart
        lines.append(f"const float a{j} = y[{j}]{f' + {product}' if adds else ''};")
    if graph.apart:
        uniform |= {number[f"p{k}"]: f"sums[{k}]" for k in range(graph.gates) if f"p{k}" in number}
    code = Statements(graph, lanes, uniform, grouped("a", gates, lanes))
    code.divide_work([*graph.forward, *graph.saved])
    new = [code.as_float(n, code.everywhere(n)) for n in graph.forward]
    saved = code.in_lanes(graph.saved)
    lines += [*code.lines, *(f"y[{j}] = {name};" for j, name in enumerate(saved))]
    lines += [f"s[{k}] = {name};" for k, name in enumerate(new)]
    head = f"forward({first}"
    head += "thread const float* p, thread const float* u, thread const float* sums, thread float* s, thread float* y)"
    return function_text(head, lines)


def backward_text(cell: PointwiseCell, lanes: int, first: str = "") -> str:
    """Return the source of the Metal function `backward`, which computes one step in reverse; metal/cell.metal explains
    its parameters. lanes: how many lanes share a unit. first: the declaration of an additional first parameter.

    In the code below `uniform` is {node: variable}, for the values that all lanes of a unit have: the inputs of the
    step, and the new states (n_in0, ...), which are read from the outputs instead of being computed again. The Metal
    variables y0, y1, ... are registers with the saved values.
    """
    graph = cell.graph
    after, number = graph.known_after(), graph.number  # {node of a new state: number of the state}, {input: node}
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
    head = f"backward({first}thread const float* p, thread const float* u, thread const float* y, "
    head += "thread const float* before, thread const float* after, "
    head += "thread float* ds, thread float* d, thread float* du, thread float* dp)"
    return function_text(head, lines)


# --- The gradients after the backward steps ---


def gradients_after(problem: Problem, arrays: Arrays, saved: Arrays, swept: Arrays) -> Arrays:
    """Return the gradients of all arrays of a call, by name. They are products and sums over all steps of the results
    of the backward kernels. saved: the outputs of the forward pass. swept: the results of the backward kernels by name:
    dz, du and dw (gradients of preactivations, inputs and parameters), dh0, dc0, with `keep` also carry (the gradients
    of the states without the part that goes through the recurrent product), and with a norm d_product and y.

    Two directions are computed one after the other. G: gates, H: units. stored_d: swept["dz"] [T, B, M H], in the order
    of graph.stored_gradients: first the gradients of the G recurrent products, then those gradients of the input's
    parts that differ from them. dz: the gradients of the input's parts only. With a norm the first G blocks of stored_d
    are the gradients of the norm's results; d_product [T, B, G H] has the gradients of the recurrent products, and y
    the normalised numbers. If the product plus the input's part is normalised, d_product is also dz.
    """
    if problem.bidirectional:
        parts = []
        for d in range(2):
            of_direction = part(arrays, d), part(saved, d), {name: half(array, d) for name, array in swept.items()}
            parts.append(gradients_after(one_direction(problem, d), *of_direction))
        return join_gradients(parts, arrays)
    cell = problem.cell
    assert isinstance(cell, PointwiseCell)
    graph, G, H, stored_d = cell.graph, cell.gates, problem.H, swept["dz"]
    of_products = swept.get("d_product", stored_d[..., : G * H])
    stored = graph.stored_gradients
    x = [stored.index(n) for n in graph.gradients("x")]
    dz = stored_d
    if x != list(range(len(stored))):
        dz = mx.concatenate([stored_d[..., k * H : (k + 1) * H] for k in x], axis=-1)
    if cell.norm is not None and cell.norm.of == "sum":
        dz = of_products
    sweep = {name: swept[name] for name in ("y", "carry", "dh0", "dc0") if name in swept}
    sweep |= {"dz": dz, "dp": of_products}
    if cell.norm is not None:
        sweep["da"] = stored_d[..., : G * H]
    # The gradients of inputs and params are computed here, because built-in cells do not have them. So is the gradient
    # of b, to avoid a float32 copy of 16-bit rows.
    own = {"inputs": lambda: swept["du"], "params": lambda: swept["dw"].sum(axis=0), "b": lambda: bias_gradient(dz)}
    shared = {name: array for name, array in arrays.items() if name not in own}
    gradients = ops.gradients_after_sweep(problem, shared, saved, sweep)
    return gradients | {name: own[name]().astype(arrays[name].dtype) for name in own if name in arrays}


def bias_gradient(dz: mx.array) -> mx.array:
    """Return the gradient of the bias b: the sum of dz [T, B, .] over all steps and batch items. 16-bit rows are summed
    in float32 by a product with ones (`column_sums`)."""
    rows = ops.flat(dz)
    return column_sums(rows, None if rows.dtype == mx.float32 else mx.ones((1, len(rows)), rows.dtype))
