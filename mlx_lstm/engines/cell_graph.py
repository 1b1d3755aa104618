"""Pointwise functions as graphs of operations. `Graph` collects the operations and rewrites them so that results stay
precise and finite. `CellGraph` is a recurrent cell with its derivative. `engines.cell_tracer` builds the graphs from
functions that use MLX. Every engine generates its own code from a graph.

A graph is a list of nodes. A node is an operation on other nodes, which it names by their numbers in the list. So the
functions below take and return numbers of nodes. The operations "input" and "const" have a value instead of operands:
the name of the input, or the number.

The name of an input is a letter and a number, from 0 on:

    x  a preactivation, or only its part from the input if the cell reads both parts `apart`
    p  the recurrent part of a preactivation, if `apart`
    s  a state before the step; s0 is h, s1 the c of an LSTM
    u  an input of each step, w  a parameter with one number per unit, such as a peephole weight
    d  the gradient of a new state, e  the gradient of a gate
    i  i0 is h times the mask, which enters the recurrent product
    k  k0 is the limit of c, k1 that of a projected h
    W  W0 is the matrix of a second product in the step: Wp of an LSTM with a projection, or the candidate's rows of Wh
       in a GRU whose reset comes before this product. W0T is its transpose
    N  N0 is the layer normalisation of c

The lists of a `CellGraph` are node numbers, too. forward: the new states, h first. back: the gradients of the inputs
that `names` lists. saved: what the forward pass saves for the backward pass. A built-in cell is an LSTM, GRU or RNN of
this package; the gradient is added to the graph after the cell itself. CONDITIONS: the operations with bool results.
COMMUTES: those whose two operands may change places.
"""

from collections.abc import Callable, Collection, Iterable
from copy import copy
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np

CONDITIONS = frozenset(("gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not"))
"""The operations whose results are bool."""

COMMUTES = frozenset(("add", "mul", "eq", "ne", "and", "or"))
"""The operations of two operands whose order has no effect."""


class Node(NamedTuple):
    """One operation. op: its name. args: the numbers of the nodes that are its operands. value: the name of an
    "input", or the number of a "const"."""

    op: str
    args: tuple[int, ...] = ()
    value: Any = None


class Graph:
    """A graph under construction. Equal nodes are stored once, and `add` rewrites nodes as the table `REWRITES`
    says. nodes: the list of nodes. numbers: the number of each node by its text."""

    def __init__(self, is_built_in: bool = False) -> None:
        """Create an empty graph. is_built_in: whether it is that of a built-in cell, to which more rewrites apply."""
        self.is_built_in = is_built_in
        self.nodes: list[Node] = []
        self.numbers: dict[str, int] = {}  # {text of a node: its number}
        self.derives = False  # whether the operations of the derivative are being added, after those of the cell

    def add(self, op: str, *args: int) -> int:
        """Add the operation `op` on the nodes `args`, and return the number of its node. If a rewrite applies, return
        the number of a simpler node with the same value instead."""
        if op in COMMUTES:  # such as a + b and b + a, which become the same node
            args = tuple(sorted(args))
        if repr(Node(op, args)) in self.numbers:
            # The graph has this operation, so the new node is the old one: the derivative reads the value that the cell
            # has computed. A rewrite could find another node with the same value, which would be computed in addition.
            return self.node(Node(op, args))
        for rewrite in REWRITES.get(op, ()):
            same = rewrite(self, *args)
            if same is not None:
                return same
        return self.node(Node(op, args))

    def input(self, name: str) -> int:
        """Return the number of the node for the input with this name. Add the node if it is missing."""
        return self.node(Node("input", (), name))

    def constant(self, value: float) -> int:
        """Return the number of the node for this constant. Add the node if it is missing."""
        return self.node(Node("const", (), float(value)))

    def node(self, node: Node) -> int:
        """Return the number of this node. Add the node unless the graph has an equal one."""
        key = repr(node)  # the constants 0.0 and -0.0 are equal, but not the same
        if key not in self.numbers:
            self.numbers[key] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[key]

    def normalise(self, x: int, matrix: int) -> int:
        """Return the node of the layer normalisation of x, or of its derivative at the same numbers, applied to x.
        matrix: the input N0 or N0T.

        When MLX traces a cell, a product c N0 with a matrix N0 stands for the normalisation of c. MLX's gradient of
        this product is d N0^T. Both products become nodes: "norm" (c, N0) and, for the gradient, "unnorm" (d, c, N0).
        The second one has c as an operand, because the derivative of a normalisation depends on what was normalised.
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
# of a simpler node with the same value, or None if the rewrite does not apply. `graph.value(n)` is the number of a
# constant, None for another node. `graph.derives` says whether the new node is one of the derivative.
# tests/test_cell_graphs.py compares every rewrite with the original operation in plain MLX.
#
# A rewrite that may change the sign of a zero applies only to operations that only the derivative has: in the cell
# itself arctan2 and 1 / x make two very different numbers of the two zeros.


def add_zero(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite x + 0 as x in a derivative. In the cell itself the sum stays: -0 + 0 is 0, not -0."""
    if not graph.derives:
        return None
    return b if graph.value(a) == 0 else a if graph.value(b) == 0 else None


def add_difference(graph: Graph, a: int, b: int) -> int | None:
    """Rewrite x + (y - x) as y in a built-in cell, where mx.stop_gradient around the difference gives it the value of y
    and the gradient of x. In a cell of the user's own the sum is rounded, and NaN if x and y are infinite."""
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
    # Both have the same condition p. A selection "x if p else y" is a node select(p, x, y). The sum is simpler if one
    # of x and u, and the other one of y and v, is 0: (x + u) if p else (y + v) then adds nothing.
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
    """Rewrite d / cosh(x)^2, as MLX writes the gradient of tanh, as d (1 - tanh(x)^2). cosh overflows for |x| > 89,
    and tanh(x) is known from the forward pass."""
    product = graph.nodes[b]  # b is cosh(x) * cosh(x), and a is d
    if product.op != "mul" or product.args[0] != product.args[1] or graph.nodes[product.args[0]].op != "cosh":
        return None
    y = graph.add("tanh", *graph.nodes[product.args[0]].args)  # tanh of the operand of cosh
    return graph.add("mul", a, graph.add("sub", graph.constant(1), graph.add("mul", y, y)))


def negate_twice(graph: Graph, x: int) -> int | None:
    """Rewrite -(-x) as x."""
    return graph.nodes[x].args[0] if graph.nodes[x].op == "neg" else None


def small_power(graph: Graph, x: int, exponent: int) -> int | None:
    """Rewrite a power with the exponent 1, 2, 3, 0.5, -0.5, -1 or 0 by products, quotients and roots."""
    power = graph.value(exponent)
    if power == 0:
        return graph.constant(1)
    if power == 1:
        return x
    if power in (2, 3):
        product = graph.add("mul", x, x)
        return product if power == 2 else graph.add("mul", x, product)
    if power in (0.5, -0.5):
        # A power makes a positive number of each zero, sqrt keeps its sign. So add 0, which no rewrite may remove here.
        positive = graph.node(Node("add", tuple(sorted((x, graph.constant(0))))))
        return graph.add("sqrt" if power == 0.5 else "rsqrt", positive)
    return graph.add("div", graph.constant(1), x) if power == -1 else None


def same_branches(graph: Graph, condition: int, x: int, y: int) -> int | None:
    """Rewrite "x if p else x" as x."""
    return x if x == y else None


def after_clip(op: str) -> Callable[..., int | None]:
    """Return the rewrite of x > c (if `op` is "gt") as max(x, c) > c, or as min(x, k) > c with k > c, if this maximum
    or minimum is in the graph; the same for x < c (if `op` is "lt") with max and min exchanged. c and k are constants.
    The slope of a clip is then known from its result. Only a built-in cell is rewritten: its forward pass saves such
    results, the gates. For a user's cell `to_save` chooses what is saved."""
    first, second = ("max", "min") if op == "gt" else ("min", "max")

    # The rewrite gets the operands x and c of the comparison. bound: the number c, None if c is no constant.
    def rewrite(graph: Graph, x: int, c: int) -> int | None:
        bound = graph.value(c)
        for n, node in enumerate(graph.nodes):
            if bound is None or not graph.is_built_in or x not in node.args or node.op not in (first, second):
                continue
            # Node n is max or min of x and k. Return the comparison of node n with c if it gives the same result.
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
"""The operations that are computed at once if all their operands are constants."""

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


class CellGraph:
    """A recurrent cell as a graph: one step forward and its gradient. The module's docstring lists the names of inputs.
    Only the graph of a built-in cell has the inputs e, i, k, W and N.

    apart: whether the function reads the input's part and the recurrent part of the preactivations separately. forward:
    the nodes of the new states. names: the inputs that are differentiated, x*, p*, s*, u*, w* in this order, and i0.
    back: the nodes of their gradients. saved: the nodes of the forward pass that the backward pass reads, besides the
    states and its own inputs.
    """

    nodes: tuple[Node, ...]
    apart: bool
    forward: tuple[int, ...]
    back: tuple[int, ...]
    saved: tuple[int, ...]
    gates: int
    states: int
    inputs: int
    params: int

    def __init__(
        self,
        nodes: tuple[Node, ...],
        counts: tuple[int, int, int, int],
        apart: bool,
        forward: tuple[int, ...],
        back: tuple[int, ...],
        saved: tuple[int, ...],
        names: tuple[str, ...] | None = None,
    ):
        """Create the graph from its parts. The numbers in forward, back and saved are indices of nodes.

        counts: the numbers of gates, states, inputs of each step and parameters. apart: whether the cell reads the
        input's part and the recurrent part of a preactivation as two values. forward: the new states. back: the
        gradients of the inputs that `names` lists. saved: what the forward pass saves for the backward pass. names: by
        default the inputs of a user's cell that are differentiated; a built-in cell has more of them.
        """
        self.nodes, self.apart, self.forward, self.back, self.saved = nodes, apart, forward, back, saved
        self.gates, self.states, self.inputs, self.params = counts
        # number: {name of an input: its node}
        self.number: dict[str, int] = {node.value: n for n, node in enumerate(nodes) if node.op == "input"}
        self.names: tuple[str, ...] = names or names_of(counts, apart)
        # The user's function. None for a built-in cell, and in a test run of kernels.
        self.function: Callable[..., list[Any]] | None = None
        # A graph is part of the key of every cache, so its hash is computed once. `names` follows from the other parts,
        # and functions with equal graphs compute the same, so both are left out.
        self.content: tuple[Any, ...] = (repr(nodes), counts, apart, forward, back, saved)
        self.hash: int = hash(self.content)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CellGraph) and self.content == other.content)

    def __repr__(self) -> str:
        return f"CellGraph({self.gates} gates, {self.states} states, {len(self.nodes)} nodes)"

    def of_function(self, function: Callable[..., list[Any]] | None) -> "CellGraph":
        """Return a copy of this graph with another `function`."""
        other = copy(self)
        other.function = function
        return other

    def gradients(self, letter: str) -> list[int]:
        """Return the nodes of the gradients of all inputs whose names begin with `letter`: x or p (preactivations), s
        (states), u (inputs of each step) or w (parameters)."""
        return [n for name, n in zip(self.names, self.back, strict=True) if name[0] == letter]

    def of_product(self) -> list[int]:
        """Return one node per preactivation: the gradient of its recurrent part, h Wh^T, or of the whole if the graph
        has no such part."""
        gradients = dict(zip(self.names, self.back, strict=True))
        # The names of inputs: x0 is the first gate's preactivation (or its input's part), p0 its recurrent part.
        return [gradients.get(f"p{k}", gradients[f"x{k}"]) for k in range(self.gates)]  # k: the number of a gate

    @cached_property
    def stored_gradients(self) -> list[int]:
        """Return the nodes of the gradients of preactivations that a backward pass in Metal stores. First come those of
        the recurrent parts of all gates. Then come the gradients of input parts that differ from them; mostly there are
        none."""
        products = self.of_product()
        return [*products, *(n for n in dict.fromkeys(self.gradients("x")) if n not in products)]

    def known_after(self) -> dict[int, int]:
        """Return the new states that the backward pass can read from the outputs: {node: number of the state}. A state
        that is a constant or an unchanged input is left out, because its node says the value already."""
        return {n: k for k, n in enumerate(self.forward) if self.nodes[n].op not in ("const", "input")}

    def reads(self, name: str) -> bool:
        """Return whether the backward pass reads the input `name`. It does not need the input if it can compute all
        gradients from what it has anyway: the nodes that the forward pass saved, and the new states."""
        return name in self.number and self.number[name] in needed(
            self.nodes, self.back, {*self.saved, *self.known_after()}
        )

    def reads_after(self, k: int) -> bool:
        """Return whether the backward pass reads the new state k."""
        # The values that are there without their operands: what the forward pass saved, and the new states.
        leaves = {*self.saved, *self.known_after()}
        # The state is not a constant or an unchanged input, and a gradient is computed from it.
        return self.forward[k] in self.known_after() and self.forward[k] in needed(self.nodes, self.back, leaves)

    def has_product(self) -> bool:
        """Return whether a step has a second product, besides that with Wh: its matrix is the input "W0T"."""
        return "W0T" in self.number

    def has_norm(self) -> bool:
        """Return whether c is normalised: the normalisation is the input "N0"."""
        return "N0" in self.number

    def norm_operand(self, op: str) -> int:
        """Return the node that is normalised ("norm"), or the node of the gradient of its scaled and shifted result
        ("unnorm")."""
        return next(node.args[0] for node in self.nodes if node.op == op)

    def operand(self, matrix: str) -> int:
        """Return the node that a step with a second product multiplies by "W0T" (in the forward pass) or "W0" (in the
        backward pass)."""
        # A product has two operands: what is multiplied, and the matrix.
        products = [node for node in self.nodes if node.op == "matmul" and self.nodes[node.args[1]].value == matrix]
        return products[0].args[0]

    @cached_property
    def recomputed(self) -> list[int]:
        """Return the numbers of the gates whose recurrent product the backward pass reads although it was not saved,
        such as that of a GRU's candidate. The backward pass computes it again."""
        # p and the number of a gate is the name of its recurrent product.
        return [k for k in range(self.gates) if self.reads(f"p{k}")]

    def to_json(self) -> list[Any]:
        """Return the graph as lists and numbers, from which `from_json` makes it again."""
        counts = self.gates, self.states, self.inputs, self.params
        return [[list(node) for node in self.nodes], counts, self.apart, self.forward, self.back, self.saved]


def from_json(content: list[Any]) -> CellGraph:
    """Return the graph that `CellGraph.to_json` wrote."""
    nodes, counts, apart, *lists = content  # lists: forward, back, saved
    gates, states, inputs, params = counts
    forward, back, saved = (tuple(numbers) for numbers in lists)
    made = tuple(Node(op, tuple(args), value) for op, args, value in nodes)
    return CellGraph(made, (gates, states, inputs, params), apart, forward, back, saved)


def names_of(counts: tuple[int, int, int, int], apart: bool) -> tuple[str, ...]:
    """Return the names of the inputs of a user's cell that are differentiated: x0, x1, ... (preactivations), p0, ...
    (their recurrent parts, if they are separate), s0, ... (states), u0, ... (inputs of each step) and w0, ...
    (parameters)."""
    gates, states, inputs, params = counts
    parts = {"x": gates, "p": gates * apart, "s": states, "u": inputs, "w": params}  # gates * False is 0
    return tuple([f"{letter}{k}" for letter, n in parts.items() for k in range(n)])


def cell_graph(
    graph: Graph,
    counts: tuple[int, int, int, int],
    apart: bool,
    forward: list[int],
    back: list[int],
    saved: list[int] | None = None,
    names: tuple[str, ...] | None = None,
) -> CellGraph:
    """Return the graph of a cell. Nodes that neither its results nor its gradients need are removed, and the nodes that
    the forward pass saves for the backward pass are chosen, unless they are given as `saved`. counts: the numbers of
    gates, states, inputs of each step and parameters. apart: whether the cell reads both parts of a preactivation.
    forward: the nodes of the new states. back: those of the gradients of the inputs `names`. `saved` and `names` are
    given for a built-in cell. For a user's cell both are None, and the inputs are those of `names_of`."""
    whole = needed(graph.nodes, [*forward, *back, *(saved or [])])  # the nodes that remain, by their old numbers
    number = {n: k for k, n in enumerate(whole)}  # {old number of a node: new number}
    nodes = tuple(graph.nodes[n]._replace(args=tuple(number[k] for k in graph.nodes[n].args)) for n in whole)
    results = tuple(number[n] for n in forward), tuple(number[n] for n in back)  # both lists, by the new numbers
    if saved is not None:
        return CellGraph(nodes, counts, apart, *results, tuple(number[n] for n in saved), names)
    # `to_save` chooses the nodes to save from the same graph with nothing saved, ().
    bare = CellGraph(nodes, counts, apart, *results, ())
    return CellGraph(nodes, counts, apart, *results, tuple(to_save(bare)))


def to_save(cell: CellGraph) -> list[int]:
    """Return the nodes that the forward pass saves for the backward pass.

    The backward pass often needs a preactivation only through a node computed from it, such as the gate after its
    activation. For each preactivation the last such node is saved; for an LSTM these nodes are the gates. The graph
    also contains the nodes of the backward pass. They depend on a gradient, which the forward pass does not know, so
    they are never saved. The new states need not be saved, because the outputs contain them.
    """
    free, saved = set(cell.known_after()), []  # free: the new states, which need not be saved
    order = needed(cell.nodes, cell.back, free)  # what the backward pass computes or reads if nothing is saved
    gradients = entered_by_gradients(cell.nodes)  # the nodes of the backward pass
    for name in cell.names:  # x: preactivations, p: their recurrent parts
        if name[0] not in "xp" or cell.number.get(name) not in order:
            continue
        # last: the preactivation, then the last node after it through which every path to a gradient leads.
        last = cell.number[name]
        while (after := next_on_all_paths(cell, order, last, free | gradients)) is not None:
            last = after
        if last not in saved:
            saved.append(last)
    # Remove each saved node that the backward pass does not need if it has the other saved nodes. The loop runs over a
    # copy of the list, because it changes the list.
    for n in list(saved):
        others = {k for k in saved if k != n}
        if n not in needed(cell.nodes, cell.back, free | others):
            saved.remove(n)
    return saved


def entered_by_gradients(nodes: tuple[Node, ...]) -> set[int]:
    """Return the nodes that depend on a gradient of the new states."""
    found: set[int] = set()
    for n, node in enumerate(nodes):  # inputs d*, e*: the gradients of the new states and of the gates
        if (node.op == "input" and node.value[0] in "de") or not found.isdisjoint(node.args):
            found.add(n)
    return found


def next_on_all_paths(cell: CellGraph, order: list[int], n: int, excluded: set[int]) -> int | None:
    """Return a node that the forward pass can save instead of node n, because the backward pass needs n only to compute
    this node: the first node after n through which every path from n to a gradient leads. Return None if there is none.
    order: the nodes from which the gradients are computed, in ascending order. Nodes in `excluded` are not returned,
    nor nodes with bool values (conditions): saved numbers are floats."""
    leaves = set(cell.known_after())  # the new states, whose values are known without their operands
    # last: for each node the last one that reads it. The gradients themselves are read after all nodes.
    last: dict[int, float] = {k: m for m in order if m not in leaves for k in cell.nodes[m].args}
    last |= dict.fromkeys(cell.back, inf)
    # after: n and the nodes that depend on it, as far as the loop has come. reach: the last node that reads one of
    # them. All paths lead through the candidate if no node behind it reads one of them.
    after, reach = {n}, last.get(n, inf)
    for candidate in order:
        if candidate in leaves or after.isdisjoint(cell.nodes[candidate].args):
            continue
        if reach <= candidate and candidate not in excluded and cell.nodes[candidate].op not in CONDITIONS:
            return candidate
        after.add(candidate)
        reach = max(reach, last.get(candidate, inf))
    return None
