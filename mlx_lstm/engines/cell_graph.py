"""Graphs of the operations of a recurrent cell, from which every engine generates its own code. `Graph` collects the
operations and rewrites some of them so that results stay precise and finite. `CellGraph` is a cell with its derivative.
`engines.cell_tracer` builds the graphs from functions that use MLX.

A graph is a list of nodes. A node is an operation on other nodes, which it names by their numbers in the list. So the
functions below take and return numbers of nodes. The operations "input" and "const" have a value instead of operands:
the name of the input, or the number.

The name of an input is a letter and a number, from 0 on:

    x  a preactivation; with `apart` (the cell reads its two parts separately) only the input's part, x Wx^T + b
    p  with `apart` the recurrent part of a preactivation, h Wh^T
    s  a state before the step; s0 is h, s1 the c of an LSTM
    u  an input of each step, w  a parameter with one number per unit, such as a peephole weight
    d  the gradient of a new state, e  the gradient of a gate
    i  i0 is h times the mask, which enters the recurrent product
    k  k0 is the limit of c, k1 that of a projected h
    W  W0 is the matrix of a second product in the step: Wp of an LSTM with a projection, or the candidate's rows of Wh
       in a GRU whose reset comes before this product. W0T is its transpose
    N  N0 is the layer normalisation of c

A `CellGraph` has three lists of node numbers. forward: the new states, h first. back: the gradients of the inputs that
`names` lists. saved: what the forward pass saves for the backward pass. A built-in cell is an LSTM, GRU or RNN of this
package.
"""

from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np

CONDITIONS = frozenset(("gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not"))
"""The operations whose results are bool."""

COMMUTES = frozenset(("add", "mul", "eq", "ne", "and", "or"))
"""The operations whose two operands may be exchanged: a + b is b + a."""


class Node(NamedTuple):
    """One operation. op: its name. args: the numbers of the nodes that are its operands. value: the name of an
    "input", or the numeric value of a "const"."""

    op: str
    args: tuple[int, ...] = ()
    value: Any = None


class Graph:
    """A graph to which operations are added one by one. Equal nodes are stored once, and `add` replaces a node by a
    simpler one if a rewrite of the table `REWRITES` applies. nodes: the list of nodes."""

    def __init__(self, is_built_in: bool = False) -> None:
        """Create an empty graph. is_built_in: whether it is the graph of an LSTM, GRU or RNN of this package, to which
        more rewrites apply than to the cell of a user."""
        self.is_built_in = is_built_in
        self.nodes: list[Node] = []
        self.numbers: dict[str, int] = {}  # {text of a node: its number}
        self.derives = False  # whether the operations of the derivative are being added, after those of the cell

    def add(self, op: str, *args: int) -> int:
        """Add the operation `op` on the nodes `args`, and return the number of its node. If a rewrite applies, return
        the number of a simpler node with the same value instead."""
        if op in COMMUTES:  # a + b and b + a become the same node
            args = tuple(sorted(args))
        if repr(Node(op, args)) in self.numbers:
            # The graph has this node already. A rewrite could add another node with the same value, so that the value
            # is computed twice, once by the cell and once by its derivative.
            return self.node(Node(op, args))
        for rewrite in REWRITES.get(op, ()):
            same = rewrite(self, *args)
            if same is not None:
                return same
        return self.node(Node(op, args))

    def input(self, name: str) -> int:
        """Return the number of the node for the input with this name, which is added if it is missing."""
        return self.node(Node("input", (), name))

    def constant(self, value: float) -> int:
        """Return the number of the node for this constant, which is added if it is missing."""
        return self.node(Node("const", (), float(value)))

    def node(self, node: Node) -> int:
        """Return the number of this node. Add the node unless the graph has an equal one."""
        key = repr(node)  # as text: 0.0 == -0.0, but these constants must be different nodes
        if key not in self.numbers:
            self.numbers[key] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[key]

    def normalise(self, x: int, matrix: int) -> int:
        """Return the node that replaces the product of x and `matrix` (the node of the input N0 or N0T), which stands
        for a layer normalisation while a cell is traced.

        MLX traces the normalisation of c as a product c N0 with a matrix N0. MLX's gradient of this product is d N0^T.
        The first product becomes the node "norm" (c, N0), the second one the node "unnorm" (d, c, N0): the gradient of
        c, which depends on c, too.
        """
        if self.nodes[matrix].value == "N0":
            return self.add("norm", x, matrix)
        found = next(node for node in self.nodes if node.op == "norm")  # its operands are c and N0; x is d
        return self.add("unnorm", x, *found.args)

    def value(self, n: int) -> float | None:
        """Return the value of node n if it is a constant, else None."""
        return self.nodes[n].value if self.nodes[n].op == "const" else None


# --- Rewrites ---
#
# Each function takes a graph and the operands of a new node (numbers of nodes, such as a and b). It returns the number
# of a simpler node with the same value, or None if the rewrite does not apply. `graph.value(n)` is the value of node n
# if it is a constant, None for another node. `graph.derives` says whether the new node is one of the derivative.
# tests/test_cell_graphs.py compares every rewrite with the original operation in plain MLX. A rewrite that may turn 0
# into -0, or -0 into 0, applies only to the operations of the derivative. In the cell itself the sign can matter: 1 / 0
# is inf, and 1 / -0 is -inf.


def add_zero(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite x + 0 as x in a derivative. In the cell itself the sum stays: -0 + 0 is 0, not -0."""
    if not graph.derives:
        return None
    return b if graph.value(a) == 0 else a if graph.value(b) == 0 else None


def add_difference(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite x + (y - x) as y in a built-in cell. There the sum is x + mx.stop_gradient(y - x), which has the value of
    y and the gradient of x. A user's cell is not rewritten: its sum is rounded, and it is NaN if x and y are
    infinite."""
    for x, other in ((a, b), (b, a)):  # other: the node y - x
        if graph.is_built_in and graph.nodes[other].op == "sub" and graph.nodes[other].args[1] == x:
            return graph.nodes[other].args[0]
    return None


def add_branches(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite (x if p else 0) + (0 if p else y) as x if p else y. MLX adds the gradients of both branches of a
    selection in this way."""
    one, other = graph.nodes[a], graph.nodes[b]
    if one.op != "select" or other.op != "select" or one.args[0] != other.args[0]:
        return None
    # one: x if p else y. other: u if p else v. Their sum (x + u) if p else (y + v) needs no addition if x and v are 0,
    # or if y and u are 0.
    (p, x, y), (_, u, v) = one.args, other.args
    zeros = {graph.value(x), graph.value(v)}, {graph.value(y), graph.value(u)}
    return graph.add("select", p, graph.add("add", x, u), graph.add("add", y, v)) if {0.0} in zeros else None


def subtract_zero(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite x - 0 as x, and 0 - x as -x, in a derivative. In the cell itself the difference stays: 0 - 0 is 0, not
    -0."""
    if not graph.derives:
        return None
    return a if graph.value(b) == 0 else graph.add("neg", b) if graph.value(a) == 0 else None


def multiply_by_one(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite x * 1 as x, and x * -1 as -x."""
    for factor, x in ((a, b), (b, a)):
        if graph.value(factor) in (1, -1):
            return x if graph.value(factor) == 1 else graph.add("neg", x)
    return None


def multiply_by_condition(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite float(p) * x, where p is a condition, as x if p else 0, in a derivative. The product would be NaN if p is
    false and x infinite. MLX writes the gradients of maximum and minimum as such products."""
    for factor, x in ((a, b), (b, a)):
        if graph.nodes[factor].op != "float" or not graph.derives:
            continue
        condition = graph.nodes[factor].args[0]
        if graph.nodes[condition].op == "not":  # float(not p) * x is 0 if p else x
            return graph.add("select", graph.nodes[condition].args[0], graph.constant(0), x)
        return graph.add("select", condition, x, graph.constant(0))
    return None


def divide_by_one(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite x / 1 as x."""
    return a if graph.value(b) == 1 else None


def divide_by_cosh(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite d / cosh(x)^2 as d (1 - tanh(x)^2). MLX computes the gradient of tanh by the first formula, but cosh
    overflows for |x| > 89 in float32, and tanh(x) is known from the forward pass."""
    product = graph.nodes[b]  # b is cosh(x) * cosh(x), and a is d
    if product.op != "mul" or product.args[0] != product.args[1] or graph.nodes[product.args[0]].op != "cosh":
        return None
    y = graph.add("tanh", *graph.nodes[product.args[0]].args)  # tanh of the operand of cosh
    return graph.add("mul", a, graph.add("sub", graph.constant(1), graph.add("mul", y, y)))


def negate_twice(graph: Graph, x: int) -> int | None:
    """Rewrite -(-x) as x."""
    return graph.nodes[x].args[0] if graph.nodes[x].op == "neg" else None


def small_power(graph: Graph, x: int, exponent: int) -> int | None:
    """Rewrite a power with the exponent 0, 1, 2, 3, -1, 0.5 or -0.5 as a constant, x, a product, a quotient or a
    root."""
    power = graph.value(exponent)
    if power == 0:
        return graph.constant(1)
    if power == 1:
        return x
    if power in (2, 3):
        product = graph.add("mul", x, x)
        return product if power == 2 else graph.add("mul", x, product)
    if power in (0.5, -0.5):
        # pow(-0, 0.5) is 0, but sqrt(-0) is -0. So take the root of x + 0, which is 0 for both zeros. `graph.node` adds
        # this sum without a rewrite.
        positive = graph.node(Node("add", tuple(sorted((x, graph.constant(0))))))
        return graph.add("sqrt" if power == 0.5 else "rsqrt", positive)
    return graph.add("div", graph.constant(1), x) if power == -1 else None


def same_branches(graph: Graph, condition: int, x: int, y: int) -> int | None:
    """Rewrite "x if p else x" as x."""
    return x if x == y else None


def after_clip(op: str) -> Callable[..., int | None]:
    """Return a rewrite that makes a comparison read the result of a clip instead of its operand x, so that the backward
    pass needs only the result.

    If `op` is "gt", it rewrites x > c as max(x, c) > c, or as min(x, k) > c with k > c, if the graph has this maximum
    or minimum. If `op` is "lt", it rewrites x < c as min(x, c) < c, or as max(x, k) < c with k < c. c and k are
    constants. Only a built-in cell is rewritten: the results of its clips are gates, which its forward pass saves.
    """
    first, second = ("max", "min") if op == "gt" else ("min", "max")

    # x, c: the nodes of the operands of the comparison. bound: the number c, or None if node c is no constant.
    def rewrite(graph: Graph, x: int, c: int) -> int | None:
        bound = graph.value(c)
        for n, node in enumerate(graph.nodes):
            if bound is None or not graph.is_built_in or x not in node.args or node.op not in (first, second):
                continue
            # Node n is max(x, k) or min(x, k). Compare it with c instead of x, if the result is the same.
            k = graph.value(node.args[1] if node.args[0] == x else node.args[0])
            if k is not None and (k == bound if node.op == first else (k > bound if op == "gt" else k < bound)):
                return graph.add(op, n, c)
        return None

    return rewrite


def folded(op: str) -> Callable[..., int | None]:
    """Return the rewrite that replaces the operation `op` on constants by its result, another constant."""
    compute: Callable[..., Any] = FOLDS[op]

    def fold(graph: Graph, *args: int) -> int | None:
        values = [graph.value(n) for n in args]
        if None in values or (op == "div" and values[1] == 0):
            return None
        return graph.constant(float(compute(*values)))

    return fold


FOLDS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative}
"""{operation that a rewrite replaces by its result if all operands are constants: NumPy's function that computes
it}."""

REWRITES: dict[str, tuple[Callable[..., int | None], ...]] = {
    "add": (folded("add"), add_zero, add_difference, add_branches),
    "sub": (folded("sub"), subtract_zero),
    "mul": (folded("mul"), multiply_by_one, multiply_by_condition),
    "div": (folded("div"), divide_by_one, divide_by_cosh),
    "neg": (folded("neg"), negate_twice),
    "pow": (small_power,),
    "select": (same_branches,),
    "gt": (after_clip("gt"),),
    "lt": (after_clip("lt"),),
}
"""The rewrites of each operation, in the order in which they are tried."""


# --- The graph of a cell ---


def needed(nodes: list[Node] | tuple[Node, ...], outputs: Iterable[int], leaves: Collection[int] = ()) -> list[int]:
    """Return the nodes from which the outputs are computed, in an order in which they can be computed. The search stops
    at the nodes in `leaves`, whose values are known without their operands."""
    found: set[int] = set()
    stack = list(outputs)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += [] if n in leaves else nodes[n].args
    return sorted(found)  # a node's operands have smaller numbers


class Counts(NamedTuple):
    """How many gates, states, inputs of each step and parameters a cell has."""

    gates: int
    states: int
    inputs: int
    params: int


@dataclass(eq=False, repr=False)
class CellGraph:
    """A recurrent cell as a graph: one step forward and its gradient. All lists below are numbers of nodes in `nodes`.

    apart: whether the cell reads the input's part and the recurrent part of each preactivation as two values. forward:
    the new states. names: the names of the inputs that are differentiated, such as x0, the first preactivation, or s0,
    the state h; the module's docstring lists them. For a user's cell `names_of` returns them. back: the gradients of
    these inputs. saved: the nodes of the forward pass that the backward pass reads, besides states and inputs.
    """

    nodes: tuple[Node, ...]
    counts: Counts
    apart: bool
    forward: tuple[int, ...]
    back: tuple[int, ...]
    saved: tuple[int, ...]
    names: tuple[str, ...] = ()
    gates: int = field(init=False)
    states: int = field(init=False)
    inputs: int = field(init=False)
    params: int = field(init=False)

    def __post_init__(self) -> None:
        self.gates, self.states, self.inputs, self.params = self.counts
        # number: {name of an input: its node}
        self.number: dict[str, int] = {node.value: n for n, node in enumerate(self.nodes) if node.op == "input"}
        # The user's function. None for a built-in cell, and in the child process that tests kernels before their first
        # use, to which only the graph is sent.
        self.function: Callable[..., list[Any]] | None = None
        # A graph is a part of the key of every cache, so its hash is computed once. `names` and `function` are no part
        # of it: `names` follows from the other parts, and functions with equal graphs compute the same.
        parts = repr(self.nodes), self.counts, self.apart, self.forward, self.back, self.saved
        self.content: tuple[Any, ...] = parts
        self.hash: int = hash(parts)
        self.names = self.names or names_of(self.counts, self.apart)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CellGraph) and self.content == other.content)

    def __repr__(self) -> str:
        return f"CellGraph({self.gates} gates, {self.states} states, {len(self.nodes)} nodes)"

    def of_function(self, function: Callable[..., list[Any]] | None) -> "CellGraph":
        """Return a copy of this graph whose attribute `function` is this function."""
        other = copy(self)
        other.function = function
        return other

    def gradients(self, letter: str) -> list[int]:
        """Return the nodes of the gradients of all inputs whose names begin with `letter`: x or p (preactivations), s
        (states), u (inputs of each step) or w (parameters)."""
        return [n for name, n in zip(self.names, self.back, strict=True) if name[0] == letter]

    def of_product(self) -> list[int]:
        """Return one node per gate: the gradient of the recurrent part h Wh^T of its preactivation. This is the
        gradient of the whole preactivation if the graph does not have the recurrent part as an input of its own."""
        gradients = dict(zip(self.names, self.back, strict=True))
        # k: the number of a gate. p0 is the recurrent part of the first gate's preactivation, x0 the whole or the other
        # part.
        return [gradients.get(f"p{k}", gradients[f"x{k}"]) for k in range(self.gates)]

    @cached_property
    def stored_gradients(self) -> list[int]:
        """The nodes of the gradients of preactivations that a backward pass in Metal stores: those of the recurrent
        parts of all gates, then those of input parts that are different nodes; most cells have none."""
        products = self.of_product()
        return [*products, *(n for n in dict.fromkeys(self.gradients("x")) if n not in products)]

    @cached_property
    def passes_h(self) -> bool:
        """Whether a part of the gradient of h before a step bypasses the product h Wh^T."""
        return self.nodes[self.gradients("s")[0]] != Node("const", (), 0.0)

    def known_after(self) -> dict[int, int]:
        """Return the new states that the backward pass can read from the outputs: {node: number of the state}. A state
        that is a constant or an unchanged input is left out, because its value is known without the outputs."""
        return {n: k for k, n in enumerate(self.forward) if self.nodes[n].op not in ("const", "input")}

    @cached_property
    def read_back(self) -> set[int]:
        """The nodes that the backward pass reads or computes. The nodes that the forward pass saved and the new states
        are known to it, so it does not read their operands."""
        return {*needed(self.nodes, self.back, {*self.saved, *self.known_after()})}

    def reads(self, name: str) -> bool:
        """Return whether the backward pass reads the input `name`."""
        return self.number.get(name, -1) in self.read_back  # -1: the graph has no such input

    def reads_after(self, k: int) -> bool:
        """Return whether the backward pass reads the new state k."""
        return self.forward[k] in self.known_after() and self.forward[k] in self.read_back

    def has_product(self) -> bool:
        """Return whether a step has a second product, besides that with Wh: its matrix is the input "W0T"."""
        return "W0T" in self.number

    def has_norm(self) -> bool:
        """Return whether the cell normalises c. The graph then has an input "N0", which is this normalisation."""
        return "N0" in self.number

    def norm_operand(self, op: str) -> int:
        """Return the number of the node that the layer normalisation of c reads. For op "norm", the forward step, it is
        c; for op "unnorm", the backward step, it is the gradient of the norm's result."""
        return next(node.args[0] for node in self.nodes if node.op == op)

    def operand(self, matrix: str) -> int:
        """Return the node that the step's second product multiplies by `matrix`, the input "W0T" (forward) or "W0"
        (backward)."""
        # The operands of a node "matmul": what is multiplied, then the matrix.
        products = [node for node in self.nodes if node.op == "matmul" and self.nodes[node.args[1]].value == matrix]
        return products[0].args[0]

    @cached_property
    def recomputed(self) -> list[int]:
        """The numbers of the gates whose recurrent product (h Wh^T) the backward pass computes again, because it reads
        the product and the forward pass did not save it. An example is the candidate of a GRU."""
        return [k for k in range(self.gates) if self.reads(f"p{k}")]

    def to_json(self) -> list[Any]:
        """Return the graph as lists and numbers, from which `from_json` makes it again."""
        return [[list(node) for node in self.nodes], self.counts, self.apart, self.forward, self.back, self.saved]


def from_json(content: list[Any]) -> CellGraph:
    """Return the graph that `CellGraph.to_json` wrote."""
    nodes, counts, apart, *lists = content  # lists: forward, back, saved
    forward, back, saved = (tuple(numbers) for numbers in lists)
    made = tuple(Node(op, tuple(args), value) for op, args, value in nodes)
    return CellGraph(made, Counts(*counts), apart, forward, back, saved)


def names_of(counts: Counts, apart: bool) -> tuple[str, ...]:
    """Return the names of the inputs of a user's cell that are differentiated: x0, x1, ... (preactivations), p0, ...
    (their recurrent parts, if `apart`), s0, ... (states), u0, ... (inputs of each step) and w0, ... (parameters).
    apart: whether the cell reads the input's part and the recurrent part of a preactivation as two values."""
    gates, states, inputs, params = counts
    parts = {"x": gates, "p": gates * apart, "s": states, "u": inputs, "w": params}  # gates * False is 0
    return tuple([f"{letter}{k}" for letter, n in parts.items() for k in range(n)])


def cell_graph(
    graph: Graph,
    counts: Counts,
    apart: bool,
    forward: list[int],
    back: list[int],
    saved: list[int] | None = None,
    names: tuple[str, ...] = (),
) -> CellGraph:
    """Return the `CellGraph` of a finished graph. Remove the nodes that neither the new states nor the gradients need,
    and choose the nodes that the forward pass saves for the backward pass.

    apart: whether the cell reads the input's part and the recurrent part of a preactivation as two values. forward: the
    nodes of the new states. back: the nodes of the gradients. saved, names: for a built-in cell the nodes that are
    saved, and the names of the inputs that are differentiated. For a user's cell `to_save` and `names_of` determine
    them.
    """
    whole = needed(graph.nodes, [*forward, *back, *(saved or [])])  # the nodes that remain, by their old numbers
    number = {n: k for k, n in enumerate(whole)}  # {old number of a node: new number}
    nodes = tuple(graph.nodes[n]._replace(args=tuple(number[k] for k in graph.nodes[n].args)) for n in whole)
    results = tuple(number[n] for n in forward), tuple(number[n] for n in back)  # both lists, by the new numbers
    bare = CellGraph(nodes, counts, apart, *results, ())  # the graph with no node saved yet
    chosen = to_save(bare) if saved is None else [number[n] for n in saved]
    return CellGraph(nodes, counts, apart, *results, tuple(chosen), names)


def to_save(cell: CellGraph) -> list[int]:
    """Return the nodes that the forward pass saves for the backward pass.

    The backward pass often needs a preactivation only to compute one other node, such as the gate after its activation.
    Then this node is saved instead. If the backward pass needs that node only to compute a third one, the third one is
    saved, and so on. The new states are not saved, because the outputs contain them. Nodes of the backward pass are not
    saved, because they depend on gradients.
    """
    free, saved = set(cell.known_after()), []  # free: the new states, which the outputs contain
    order = needed(cell.nodes, cell.back, free)  # what the backward pass computes or reads if nothing is saved
    gradients = entered_by_gradients(cell.nodes)  # the nodes of the backward pass
    for name in cell.names:  # names with x are preactivations, names with p their recurrent parts
        if name[0] not in "xp" or cell.number.get(name) not in order:
            continue
        # last: the preactivation, then later nodes through which all paths to gradients lead.
        last = cell.number[name]
        while (after := next_on_all_paths(cell, order, last, free | gradients)) is not None:
            last = after
        if last not in saved:
            saved.append(last)
    # Remove each saved node that the backward pass does not need if it has the others.
    for n in list(saved):
        others = {k for k in saved if k != n}
        if n not in needed(cell.nodes, cell.back, free | others):
            saved.remove(n)
    return saved


def entered_by_gradients(nodes: tuple[Node, ...]) -> set[int]:
    """Return the nodes that depend on a gradient of the new states."""
    found: set[int] = set()
    for n, node in enumerate(nodes):  # inputs d0, d1, ...: gradients of the new states; e0, ...: gradients of the gates
        if (node.op == "input" and node.value[0] in "de") or not found.isdisjoint(node.args):
            found.add(n)
    return found


def next_on_all_paths(cell: CellGraph, order: list[int], n: int, excluded: set[int]) -> int | None:
    """Return a node that the forward pass can save instead of node n: the first node after n through which every path
    from n to a gradient leads; None if there is no such node. order: the nodes from which the gradients are computed,
    in ascending order. excluded: nodes that must not be returned. Nodes with bool values are not returned either,
    because saved numbers are floats."""
    leaves = set(cell.known_after())  # the new states, whose values are known without their operands
    # last: {node: the last node that reads it}. It is infinity for a gradient, which the caller reads at the end.
    last: dict[int, float] = {k: m for m in order if m not in leaves for k in cell.nodes[m].args}
    last |= dict.fromkeys(cell.back, inf)
    # after: n and the nodes up to the current one that depend on n. reach: the last node that reads a node in `after`.
    # All paths from n lead through the candidate if no later node reads a node in `after`.
    after, reach = {n}, last.get(n, inf)
    for candidate in order:
        if candidate in leaves or after.isdisjoint(cell.nodes[candidate].args):
            continue
        if reach <= candidate and candidate not in excluded and cell.nodes[candidate].op not in CONDITIONS:
            return candidate
        after.add(candidate)
        reach = max(reach, last.get(candidate, inf))
    return None
