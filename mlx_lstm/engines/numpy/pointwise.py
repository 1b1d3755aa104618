"""A cell that the user wrote, on the engine `numpy`. The cell's graph is turned into NumPy statements that write in
place; a forward step and a backward step run these statements.

Every array of a step is feature-major, [n H, B], so that each gate and each state is one contiguous block.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..cell_graph import CONDITIONS, CellGraph, Node, needed
from ..cells import PointwiseCell
from ..problem import Problem
from .arrays import Array, Views, chunk_steps, columns_buffer, matrix, steps_of
from .products import JoinedProduct, SeparateProducts, TransposedProduct, WeightGradients, in_blocks, input_products

UFUNCS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negative", "max": "maximum",
    "min": "minimum", "pow": "power", "atan2": "arctan2", "exp": "exp", "expm1": "expm1", "log": "log",
    "log2": "log2", "log10": "log10", "log1p": "log1p", "sqrt": "sqrt", "tanh": "tanh", "abs": "abs", "sign": "sign",
    "floor": "floor", "ceil": "ceil", "round": "rint", "sin": "sin", "cos": "cos", "tan": "tan", "sinh": "sinh",
    "cosh": "cosh", "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh",
    "atanh": "arctanh", "gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "eq": "equal",
    "ne": "not_equal", "and": "logical_and", "or": "logical_or", "not": "logical_not",
}  # fmt: skip
"""For each operation of a graph that is a single NumPy function: the name of the function."""

COMPOSED: dict[str, str] = {
    "sigmoid": "negative({0}, {out}); exp({out}, {out}); add({out}, one, {out}); divide(one, {out}, {out})",
    "sigmoid_of_negated": "exp({0}, {out}); add({out}, one, {out}); divide(one, {out}, {out})",
    "reciprocal": "negative({0}, {out}); exp({out}, {out}); add({out}, one, {out})",  # 1 / sigmoid
    "reciprocal_of_negated": "exp({0}, {out}); add({out}, one, {out})",
    "rsqrt": "sqrt({0}, {out}); divide(one, {out}, {out})",
    "float": "copyto({out}, {0})",
    "select": "copyto({out}, {2}); copyto({out}, {1}, where={0})",
    # A remainder of 0 has the sign of the dividend, as in MLX.
    "rem": "fmod({0}, {1}, t0); remainder({0}, {1}, {out}); copyto({out}, t0, where=logical_not(t0))",
    # logaddexp(a, b) = max(a, b) + log(1 + e) with e = exp(-|a - b|), and log(1 + e) = log(u) + (e - (u - 1)) / u with
    # u = 1 + e. NumPy's own logaddexp is not vectorized. fmin replaces the NaN of two equal infinities by 1.
    "logaddexp": "subtract({0}, {1}, t0); abs(t0, t0); negative(t0, t0); exp(t0, t0); fmin(t0, one, t0); "
    "add(t0, one, t1); maximum({0}, {1}, out={out}); subtract(t1, one, t2); subtract(t0, t2, t0); divide(t0, t1, t0); "
    "log(t1, t1); add({out}, t1, {out}); add({out}, t0, {out})",
}
"""The statements that compute each other operation. {0}, {1}, {2} are the operands, {out} is the result, t0, t1, t2 are
scratch arrays."""


class Code(NamedTuple):
    """Python statements that compute nodes of a graph, and what these statements need. scratch: {name of a scratch
    array: whether its dtype is bool}. constants: {name: value}."""

    lines: tuple[str, ...]
    scratch: dict[str, bool]
    constants: dict[str, float]


class Run(NamedTuple):
    """A group of nodes with the same operation, which one statement computes, because their operands lie side by side
    in one array and their results in another. source, target: Python expressions for the operands' part of the first
    array and the results' part of the second. names: the names of the results, one per node."""

    op: str
    nodes: tuple[int, ...]
    names: tuple[str, ...]
    source: str
    target: str


class Writer:
    """Generate the statements that compute nodes of a graph. Each node is written into an array: its target, the array
    of an operand that is not needed any more, or a scratch array."""

    def __init__(
        self,
        nodes: tuple[Node, ...],
        known: Mapping[int, str],
        targets: Sequence[tuple[int, str]],
        runs: Sequence[Run] = (),
    ):
        """Generate the statements.

        nodes: the nodes of the graph. known: {node: name of an array that holds the node's value from the beginning}.
        targets: pairs (node, name of the array into which the node shall be computed). A known array that is also a
        target is overwritten only after the last statement that reads its old value. runs: groups of nodes that one
        statement computes.
        """
        self.nodes, self.names, self.lines = nodes, dict(known), list[str]()
        self.scratch: dict[str, bool] = {}
        self.constants: dict[str, float] = {"one": 1.0}
        self.free: dict[bool, list[str]] = {False: [], True: []}
        outputs = [n for n, _ in targets]
        order = [n for n in needed(nodes, outputs, known) if n not in known and nodes[n].op != "const"]
        of_run = {n: run for run in runs for n in run.nodes}
        self.last: dict[int, int] = {k: place for place, n in enumerate(order) for k in nodes[n].args}
        self.last |= dict.fromkeys(outputs, len(order))
        self.read_until = {name: self.last.get(n, -1) for n, name in known.items()}
        into: dict[int, str] = {}
        copies: list[tuple[int, str]] = []
        for n, name in targets:
            if n in of_run and name in of_run[n].names:
                continue
            if n in known or n in into or n in of_run or nodes[n].op == "const":
                copies.append((n, name))
            else:
                into[n] = name
        done: set[Run] = set()
        for place, n in enumerate(order):
            if n not in of_run:
                self.write(place, n, into.get(n), copies)
            elif of_run[n] not in done:
                run = of_run[n]
                done.add(run)
                self.names.update(zip(run.nodes, run.names, strict=True))
                self.lines.append(self.call(run.op, [run.source], run.target))
        self.copy_at_once([(name, self.name(n)) for n, name in copies])

    def name(self, n: int) -> str:
        """Return the name of the array, or of the constant, that has the value of a node."""
        node = self.nodes[n]
        if node.op != "const":
            return self.names[n]
        name = next(
            (name for name, value in self.constants.items() if repr(value) == repr(node.value)),
            f"k{len(self.constants)}",
        )
        self.constants[name] = node.value
        return name

    def call(self, op: str, operands: list[str], out: str) -> str:
        """Return the statement that computes one operation."""
        if op in UFUNCS:
            return f"{UFUNCS[op]}({', '.join(operands)}, out={out})"
        self.scratch |= {name: False for name in ("t0", "t1", "t2") if name in COMPOSED[op]}
        return COMPOSED[op].format(*operands, out=out)

    def write(self, place: int, n: int, target: str | None, copies: list[tuple[int, str]]) -> None:
        """Append the statement that computes node n. place: the node's position in the order of computation. target:
        the array for the result, or None for any scratch array. If a later statement still reads the old content of
        this array, the result goes to a scratch array, and a copy at the end writes the target."""
        node, is_bool = self.nodes[n], self.nodes[n].op in CONDITIONS
        operands = [self.name(k) for k in node.args]
        in_place = node.op in UFUNCS  # a NumPy function may write over its operand
        if target is not None:
            late = self.read_until.get(target, -1)
            if late > place or (late == place and not in_place):
                copies.append((n, target))
                target = None
        # Operands in scratch arrays that no later statement reads. The result may overwrite one of these arrays; the
        # others become free for later results.
        dead = [k for k in dict.fromkeys(node.args) if self.last.get(k) == place and self.names.get(k) in self.scratch]
        out = target
        if out is None and in_place:
            out = next((self.names[k] for k in dead if self.scratch[self.names[k]] == is_bool), None)
        if out is None:
            out = self.free[is_bool].pop() if self.free[is_bool] else f"b{len(self.scratch)}"
            self.scratch.setdefault(out, is_bool)
        self.lines.append(self.call(node.op, operands, out))
        self.names[n] = out
        for k in dead:
            if self.names[k] != out:
                self.free[self.scratch[self.names[k]]].append(self.names[k])

    def copy_at_once(self, copies: list[tuple[str, str]]) -> None:
        """Append statements that copy arrays as if all copies ran at the same time: each target gets the value that its
        source has before the first copy. copies: pairs (target, source).

        A copy runs when no other copy reads its target any more. If only cycles are left, such as two states that
        change places, one target is first saved in a scratch array, from which the other copies then read.
        """
        waiting = [(target, source) for target, source in copies if target != source]
        while waiting:
            sources = [source for _, source in waiting]
            ready = next((copy for copy in waiting if copy[0] not in sources), None)
            if ready is None:
                target = waiting[0][0]
                spare = f"b{len(self.scratch)}"
                self.scratch[spare] = False
                self.lines.append(f"copyto({spare}, {target})")
                waiting = [(to, spare if source == target else source) for to, source in waiting]
            else:
                self.lines.append(f"copyto({ready[0]}, {ready[1]})")
                waiting.remove(ready)

    def code(self) -> Code:
        """Return the generated statements with their scratch arrays and constants."""
        return Code(tuple(self.lines), self.scratch, self.constants)


def function_of(code: Code, parameters: str, once: Sequence[str], unpacked: Sequence[str]) -> Callable[..., Any]:
    """Return a function build(shape, dtype, fixed), which returns the function step(parameters). A call of `step` runs
    the statements of `code` on arrays of this shape and dtype.

    fixed: a dict of further arrays that the statements use, the same arrays in every call. once, unpacked: statements
    that split arrays such as z into their blocks and name the blocks. `build` runs those of `once`, for the arrays in
    `fixed`; every call of `step` first runs those of `unpacked`, for its parameters.
    """
    body = "\n    ".join([*unpacked, *code.lines, "pass"])
    text = "\n".join([*once, f"def step({parameters}):\n    {body}\n"])
    compiled = compile(text, "<a cell of your own>", "exec")

    def build(shape: tuple[int, int], dtype: np.dtype, fixed: dict[str, Any]) -> Callable[..., None]:
        space: dict[str, Any] = {
            name: getattr(np, name) for name in (*UFUNCS.values(), "copyto", "fmin", "fmod", "remainder")
        }
        space |= {name: np.empty(shape, bool if is_bool else dtype) for name, is_bool in code.scratch.items()}
        space |= {name: np.array(value, dtype) for name, value in code.constants.items()}
        space |= fixed | {"H": shape[0]}
        # The statements were generated from a graph of numbered nodes, so they contain no text that the caller wrote.
        exec(compiled, space)  # nosec B102
        return space["step"]

    return build


def columns(letter: str, count: int) -> list[str]:
    """Return `count` names for the blocks of an array: s0, s1, ... for the letter s."""
    return [f"{letter}{k}" for k in range(count)]


def unpacking(names: Sequence[str], array: str) -> list[str]:
    """Return the statements that assign the n blocks [H, B] of an array [n H, B] to n names. A slice per name takes
    less time than `reshape` and an assignment to all names at once."""
    if len(names) == 1:
        return [f"{names[0]} = {array}"]
    return [f"{name} = {array}[{k} * H : {k + 1} * H]" for k, name in enumerate(names)]


def negatable(graph: CellGraph) -> str:
    """Return the letters of the gates whose preactivation z is read only by one sigmoid. `JoinedProduct` can compute
    -z instead of z for these gates. The sigmoid 1 / (1 + exp(-z)) then need not negate z, which saves a pass over
    memory."""
    if graph.apart:
        return ""
    order = needed(graph.nodes, [*graph.forward, *graph.saved])
    letters = ""
    for k in range(graph.gates):
        uses = [n for n in order if graph.number.get(f"x{k}") in graph.nodes[n].args]
        direct = graph.number.get(f"x{k}") in (*graph.saved, *graph.forward)
        if len(uses) == 1 and graph.nodes[uses[0]].op == "sigmoid" and not direct:
            letters += chr(ord("a") + k)
    return letters


@lru_cache(256)
def forward_function(cell: PointwiseCell, order: str, negated: str) -> Callable[..., Any]:
    """Return the function that builds a forward step: step(xs, s0, c_prev, y, c, n0).

    The step reads these arrays; z and us are fixed, the same in every call:

        z [G H, B]     the preactivations, or only their recurrent part if `graph.apart`
        us [U H, B]    the inputs of the step
        xs [G H, B]    the input's part of the preactivations, if z does not contain it
        s0, c_prev     h and the other states before the step

    and writes

        n0, c          h and the other states after the step
        y              the values that the backward pass needs

    order: the order of the gates in z. negated: the gates whose rows of z are negated.
    """
    graph = cell.graph
    blocks, kept = preactivations(cell), columns("y", len(graph.saved))
    # Neighbouring gates with the same function are computed by one statement.
    runs: list[tuple[str, list[int], list[int]]] = []  # (op, indices into graph.saved, places of the gates in `order`)
    for k, n in enumerate(graph.saved):
        node = graph.nodes[n]
        gate = graph.nodes[node.args[0]].value if len(node.args) == 1 else None
        if gate is None or gate[0] != "x" or node.op not in ("sigmoid", "tanh", "exp"):
            continue
        place = order.index(chr(ord("a") + int(gate[1:])))
        op = "sigmoid_of_negated" if order[place] in negated else node.op
        if runs and runs[-1][0] == op and runs[-1][1][-1] == k - 1 and runs[-1][2][-1] == place - 1:
            runs[-1][1].append(k)
            runs[-1][2].append(place)
        else:
            runs.append((op, [k], [place]))
    together = []
    of_blocks, of_y = unpacking(columns("a", graph.gates), blocks), unpacking(kept, "y")
    for number, (op, saved, places) in enumerate(runs):
        if len(saved) > 1:
            of_blocks += [f"r{number} = {blocks}[{places[0]} * H : {places[-1] + 1} * H]"]
            of_y += [f"q{number} = y[{saved[0]} * H : {saved[-1] + 1} * H]"]
        source, target = (f"r{number}", f"q{number}") if len(saved) > 1 else (f"a{places[0]}", kept[saved[0]])
        names = tuple(kept[k] for k in saved)
        together.append(Run(op, tuple(graph.saved[k] for k in saved), names, source, target))
    known = known_forward(graph, order)
    targets = [*zip(graph.saved, kept, strict=True), *zip(graph.forward, columns("n", graph.states), strict=True)]
    code = Writer(graph.nodes, known, targets, together).code()
    return forward_of(cell, code, of_blocks, of_y)


def known_forward(graph: CellGraph, order: str) -> dict[int, str]:
    """Return the nodes that a forward step knows from the beginning, with the name of the array or block that has the
    node's value. order: the order of the gates in z."""
    known = {n: name for name, n in graph.number.items() if name[0] in "psuw"}
    gates = {f"x{k}": f"a{order.index(chr(ord('a') + k))}" for k in range(graph.gates)}
    return known | {graph.number[name]: block for name, block in gates.items() if name in graph.number}


def forward_of(cell: PointwiseCell, code: Code, of_blocks: Sequence[str], of_y: Sequence[str]) -> Callable[..., Any]:
    """Return the function that builds a forward step with the statements `code`. of_blocks, of_y: the statements that
    name the blocks of the preactivations and of y."""
    graph = cell.graph
    once = [*unpacking(columns("p", graph.gates * graph.apart), "z"), *unpacking(columns("u", graph.inputs), "us")]
    unpacked = [*of_y, *unpacking(columns("s", graph.states)[1:], "c_prev")]
    unpacked += unpacking(columns("n", graph.states)[1:], "c")
    if preactivations(cell) == "z":
        once += of_blocks
    else:
        unpacked += of_blocks
    return function_of(code, "xs, s0, c_prev, y, c, n0", once, unpacked)


def preactivations(cell: PointwiseCell) -> str:
    """Return the name of the array with the preactivations or, with `graph.apart`, with the input's part of them."""
    return "xs" if cell.graph.apart or not cell.recurrent else "z"


@lru_cache(256)
def inference_function(cell: PointwiseCell, order: str, negated: str) -> Callable[..., Any]:
    """Return the function that builds a forward step after which no backward pass follows: the same as
    `forward_function`, but the step does not write y. It takes less time, because activations overwrite z, and because
    the step divides by 1 / sigmoid(z) = 1 + exp(-z) where it would otherwise multiply by sigmoid(z)."""
    graph, blocks = cell.graph, preactivations(cell)
    nodes, order_of_nodes = with_reciprocals(graph), needed(graph.nodes, graph.forward)
    of_blocks = unpacking(columns("a", graph.gates), blocks)
    # Neighbouring gates with the same function are computed by one statement.
    runs: list[tuple[str, list[int], list[int]]] = []  # (op, nodes, places of the gates in `order`)
    for place, letter in enumerate(order if blocks == "z" else ""):
        x = graph.number.get(f"x{ord(letter) - ord('a')}")
        uses = [n for n in order_of_nodes if x in nodes[n].args]
        if len(uses) != 1 or x in graph.forward or nodes[uses[0]].op not in ("sigmoid", "reciprocal", "tanh", "exp"):
            continue
        op = nodes[uses[0]].op + "_of_negated" * (letter in negated)
        if runs and runs[-1][0] == op and runs[-1][2][-1] == place - 1:
            runs[-1][1].append(uses[0])
            runs[-1][2].append(place)
        else:
            runs.append((op, [uses[0]], [place]))
    together = []
    for number, (op, of_run, places) in enumerate(runs):
        of_blocks += [f"r{number} = z[{places[0]} * H : {places[-1] + 1} * H]"]
        together.append(Run(op, tuple(of_run), tuple(f"a{k}" for k in places), f"r{number}", f"r{number}"))
    targets = [*zip(graph.forward, columns("n", graph.states), strict=True)]
    code = Writer(nodes, known_forward(graph, order), targets, together).code()
    return forward_of(cell, code, of_blocks, [])


def with_reciprocals(graph: CellGraph) -> tuple[Node, ...]:
    """Return the nodes of a graph, changed for the forward pass: if the graph uses a sigmoid only as a factor of
    products, the node of the sigmoid becomes its reciprocal, and the products become quotients."""
    nodes, order = list(graph.nodes), needed(graph.nodes, graph.forward)
    for n in order:
        uses = [k for k in order if n in nodes[k].args]
        factor = all(nodes[k].op == "mul" and nodes[k].args.count(n) == 1 for k in uses)
        if nodes[n].op == "sigmoid" and factor and n not in graph.forward:
            nodes[n] = nodes[n]._replace(op="reciprocal")
            for k in uses:
                (other,) = (a for a in nodes[k].args if a != n)
                nodes[k] = nodes[k]._replace(op="div", args=(other, n))
    return tuple(nodes)


class PointwiseStep:
    """Compute one forward step of a cell that the user wrote. Before each step the caller writes the step's inputs to
    `us` [U H, B]: U inputs for each of H hidden units and B batch items."""

    def __init__(self, problem: Problem, cell: PointwiseCell, v: Views, mask: Array | None, streamed: bool = False):
        """Allocate the arrays that every step overwrites. streamed: the steps arrive one at a time
        (`engines.numpy.stream`)."""
        (_, B, H, _), dtype, graph = problem[:4], v["x"].dtype, cell.graph
        negated = negatable(graph) if cell.recurrent else ""
        self.products: JoinedProduct | SeparateProducts = (
            SeparateProducts(problem, v, mask)
            if graph.apart or not cell.recurrent
            else input_products(problem, v, mask, negated, streamed)
        )
        self.apart: bool = graph.apart
        self.weights: Array | None = self.products.weights
        self.z: Array = np.empty((cell.gates * H, B), dtype)
        if self.weights is not None:
            self.weights = in_blocks(self.weights, B, streamed)
            self.product: Array = self.z.reshape(*self.weights.shape[:-1], -1)  # z, divided like the weights
        self.us: Array = np.empty((graph.inputs * H, B), dtype)
        saves = problem.training or problem.return_gates
        build = (forward_function if saves else inference_function)(cell, self.products.order, self.products.negated)
        fixed = params_of(graph, v, H, B) | {"z": self.z, "us": self.us}
        self.step: Callable[..., None] = build((H, B), dtype, fixed)

    def __call__(
        self,
        operand: Array,
        inputs: Array | None,
        h_prev: Array,
        c_prev: Array,
        saved: Array | None,
        c: Array,
        h: Array,
    ) -> None:
        """Write the new h [H, B] and the other new states c [C H, B], for H hidden units, B batch items and C states
        besides h. In training write the K values per unit that the backward pass needs to `saved` [K H, B].

        operand: the array that the recurrent weights multiply. inputs: the input's part of the preactivations of the G
        gates, [G H, B]; None if the weights contain Wx, so that the product with `operand` includes this part. h_prev,
        c_prev: the states before the step.
        """
        if self.weights is not None:
            np.matmul(self.weights, operand, out=self.product)
            if inputs is not None and not self.apart:
                self.z += inputs
        self.step(inputs, h_prev, c_prev, saved, c, h)


def params_of(graph: CellGraph, v: Views, H: int, B: int) -> dict[str, Array]:
    """Return the parameters by the names of the graph's inputs, each repeated over the batch to [H, B]."""
    names = columns("w", graph.params)
    return {name: np.repeat(v["params"][k * H : (k + 1) * H, None], B, axis=1) for k, name in enumerate(names)}


@lru_cache(256)
def backward_function(cell: PointwiseCell) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """Return (build, other). build: a function that builds a backward step. other: the numbers of the gates whose
    input part and recurrent part have different gradients, such as a GRU's candidate (only if `graph.apart`).

    The built function is step(y, s0, c_prev, n0, c, d0, dc, dz, dx, direct). The arrays us, du and dw are fixed: they
    are the same in every call. The function reads

        y            the values that the forward pass saved
        s0, c_prev   h and the other states before the step
        n0, c        h and the other states after the step
        us           the inputs of the step
        d0, dc       the gradients of h and of the other states after the step

    and writes

        dz, dx       the gradients of the recurrent parts of all gates, and of the input parts of the gates in `other`
        direct       the part of the gradient of the h before the step that bypasses the recurrent product
        dc           the gradients of the other states before the step
        du, dw       the gradients of the inputs and of the parameters
    """
    graph = cell.graph
    known = dict(zip(graph.saved, columns("y", len(graph.saved)), strict=True))
    known |= {n: f"n{k}" for n, k in graph.known_after().items() if n not in known}
    known |= {n: name for name, n in graph.number.items() if name[0] in "suwd"}
    x, p = graph.gradients("x"), graph.of_product()
    other = tuple(k for k in range(graph.gates) if x[k] != p[k])
    targets = [*zip(p, columns("z", graph.gates), strict=True)]
    targets += [(x[k], f"q{place}") for place, k in enumerate(other)]
    states = zip(graph.gradients("s"), ["direct", *columns("d", graph.states)[1:]], strict=True)
    targets += [(n, name) for n, name in states if name != "direct" or passes_h(graph)]
    targets += [*zip(graph.gradients("u"), columns("v", graph.inputs), strict=True)]
    targets += [*zip(graph.gradients("w"), columns("g", graph.params), strict=True)]
    code = Writer(graph.nodes, known, targets).code()
    once = [*unpacking(columns("u", graph.inputs), "us"), *unpacking(columns("v", graph.inputs), "du")]
    once += unpacking(columns("g", graph.params), "dw")
    unpacked = [*unpacking(columns("y", len(graph.saved)), "y"), *unpacking(columns("s", graph.states)[1:], "c_prev")]
    unpacked += [*unpacking(columns("n", graph.states)[1:], "c"), *unpacking(columns("d", graph.states)[1:], "dc")]
    unpacked += [*unpacking(columns("z", graph.gates), "dz"), *unpacking(columns("q", len(other)), "dx")]
    return function_of(code, "y, s0, c_prev, n0, c, d0, dc, dz, dx, direct", once, unpacked), other


def passes_h(graph: CellGraph) -> bool:
    """Return whether a part of the gradient of h_prev bypasses the recurrent product."""
    node = graph.nodes[graph.gradients("s")[0]]
    return node.op != "const" or node.value != 0


class PointwiseStepBackward:
    """Compute one backward step of a cell that the user wrote, and collect what the weight gradients need.

    A preactivation is the sum of a recurrent part (Wh h) and an input part (Wx x). `dz` [G H, n] collects the gradients
    of the recurrent parts of G gates with H units each. It has n columns, one for each step and batch item of a chunk.
    For some gates, such as a GRU's candidate, the gradient of the input part is a different one, and `dx` collects it.
    First `end_chunk` computes the gradient of Wh from `dz`. Then it copies `dx` to these gates' rows of `dz`, from
    which the gradients of Wx and x are computed.
    """

    def __init__(self, problem: Problem, cell: PointwiseCell, v: Views, saved: Views):
        """Allocate the arrays that every backward step overwrites. saved: the outputs h, c and gates [T, B, K H] of the
        forward pass."""
        (_, B, H, _), dtype, graph = problem[:4], v["x"].dtype, cell.graph
        build, self.other = backward_function(cell)
        self.H, self.recurrent, self.inputs = H, cell.recurrent, v.get("inputs")
        self.through_Wh = TransposedProduct(v["Wh"], problem) if cell.recurrent else None
        self.reads_h: bool = graph.reads("s0")
        self.saved_at = steps_of(saved["gates"])
        self.h_at: Callable[[int], Any] = steps_of(saved["h"]) if graph.reads_after(0) else lambda t: None
        n = chunk_steps(problem) * B
        self.dz: Array = columns_buffer(cell.gates * H, n, B, dtype)
        self.dx: Array = columns_buffer(len(self.other) * H, n, B, dtype)
        self.by_column: list[Array] = [self.dz, self.dx]
        self.direct: Array | None = np.empty((H, B), dtype) if passes_h(graph) else None
        self.s0: Array = np.empty((H, B), dtype)
        self.us, self.du = (np.empty((graph.inputs * H, B), dtype) for _ in range(2))
        self.dw: Array = np.empty((graph.params * H, B), dtype)
        self.dparams: Array = np.zeros((graph.params * H, B), dtype)  # it is summed over the batch after the last step
        fixed = params_of(graph, v, H, B) | {"us": self.us, "du": self.du, "dw": self.dw}
        self.step: Callable[..., None] = build((H, B), dtype, fixed)

    def begin_chunk(self, start: int, h_prev: Array, h_in: Array) -> None:
        """Begin a chunk of steps, the first of which is step `start`. h_prev [steps, B, H]: h before each step. h_in is
        not used here."""
        self.start, self.h_prev = start, h_prev

    def __call__(
        self, t: int, columns: slice, c_prev: Array | None, c: Array | None, dh: Array, dc: Array, dgates: Array | None
    ) -> None:
        """Compute step t backward. Write its columns of dz and dx (the gradients of the preactivations) and `direct`,
        the part of the gradient of h_prev that bypasses the recurrent product.

        Overwrite dh, the gradient of the h after the step, with the gradient of the h that entered the recurrent
        product. Overwrite dc, the gradients of the other states after the step, with those before it. c_prev, c: the
        other states before and after the step. dgates: always None, because callers cannot get a user's gates.
        """
        if self.reads_h:
            np.copyto(self.s0, self.h_prev[t - self.start].T)
        if self.inputs is not None:
            np.copyto(self.us, self.inputs[t].T)
        dz, saved = self.dz[:, columns], self.saved_at(t)
        dx = self.dx[:, columns] if self.other else self.dx
        self.step(saved, self.s0, c_prev, self.h_at(t), c, dh, dc, dz, dx, self.direct)
        if self.through_Wh is None:
            dh.fill(0)
        else:
            self.through_Wh(dz, dh)

    def finish(self, t: int, columns: slice, ended: Array | None, out: Views) -> None:
        """Write the gradient of the inputs of step t, and add the step's term to the gradient of the parameters. ended:
        the indices of the batch items that have ended, or None. Their gradients become 0, because the computed values
        may be NaN."""
        if ended is not None:
            for array in self.by_column:
                array[:, columns][:, ended] = 0
            self.du[:, ended] = self.dw[:, ended] = 0
        if "inputs" in out:
            np.copyto(out["inputs"][t], self.du.T)
        if len(self.dw):
            self.dparams += self.dw

    def end_chunk(self, products: WeightGradients, h_in: Array) -> None:
        """Add the terms of one chunk of time steps to the weight gradients in `products`. h_in [n, H]: the h that
        entered the recurrent product at each step of the chunk."""
        n, H = len(h_in), self.H
        if self.recurrent:
            products.accumulate("Wh", self.dz[:, :n], matrix(h_in))
        for place, k in enumerate(self.other):
            self.dz[k * H : (k + 1) * H, :n] = self.dx[place * H : (place + 1) * H, :n]
