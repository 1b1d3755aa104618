"""Turn the graph of a cell into NumPy statements that write in place, such as "multiply(f, c_prev, c)".

A step's arrays are feature-major, [n H, B]: n blocks of H hidden units. A value of the graph lies in one block, its
place (a `Place`: the name of the array, and the row, which is the number of the block). If the same operation is
applied to neighbouring blocks, such as the sigmoid to the gates i and f, one statement computes all of them. Such nodes
are a group.

`lowered` rewrites the graph with operations that NumPy has; `Groups` finds the groups; `Writer` writes the statements.
A graph is a list of nodes. A node has an operation, the numbers of the nodes that are its operands (args), and a value:
the name of an input, or the number of a "const". Variables such as n and k are numbers of nodes.

    known     the places of values that exist before the first statement
    targets   pairs (node, place): where a value shall lie after the last statement. into: {node: place} of these
    order     the nodes to compute, each after its operands
    unit      a group, or one node alone: what one statement computes; t is its number in the order of the units
    last      {node: the number of the last unit that reads it}
    scratch   arrays that only these statements use; their names are b0, b1, ..., for groups g0, g1, ...
    views     {(array, first row, last row + 1): the name that the statements use for these blocks}

The operations of UFUNCS are single functions of NumPy, those of COMPOSED several statements. Operations in OVERWRITES
may write their result over an operand, those in COMMUTES give the same result if their operands are exchanged, and
those in CONDITIONS have bool results.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

from ..cell_graph import COMMUTES, CONDITIONS, Graph, Node, needed

UFUNCS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negative", "max": "maximum",
    "min": "minimum", "pow": "power", "atan2": "arctan2", "exp": "exp", "expm1": "expm1", "log": "log",
    "log2": "log2", "log10": "log10", "log1p": "log1p", "sqrt": "sqrt", "tanh": "tanh", "abs": "abs",
    "floor": "floor", "ceil": "ceil", "round": "rint", "sin": "sin", "cos": "cos", "tan": "tan", "sinh": "sinh",
    "cosh": "cosh", "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh",
    "atanh": "arctanh", "gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "eq": "equal",
    "ne": "not_equal", "and": "logical_and", "or": "logical_or", "not": "logical_not",
}  # fmt: skip
"""{operation of a graph: name of the single NumPy function that computes it}."""

COMPOSED: dict[str, str] = {
    "matmul": "matmul({1}, {0}, {out})",  # arrays are feature-major, so the matrix becomes the left factor
    "norm": "{1}({0}, {out})",  # operands c and N0, an object that normalises c
    "unnorm": "{2}.back({0}, {1}, {out})",  # operands: the gradient of the normalised c, c, and N0
    "float": "copyto({out}, {0})",
    "clip": "clip({0}, -{1}, {1}, {out})",
    # sign(NaN) is 0 in MLX, but NaN in NumPy.
    "sign": "sign({0}, {out}); copyto({out}, 0, where=not_equal({out}, {out}))",
    "select": "copyto({out}, {2}); copyto({out}, {1}, where={0})",
    # In MLX a remainder of 0 has the sign of the dividend. NumPy's fmod has this sign, NumPy's remainder does not.
    "rem": "fmod({0}, {1}, t0); remainder({0}, {1}, {out}); copyto({out}, t0, where=logical_not(t0))",
    # logaddexp(a, b) = max(a, b) + log(1 + e) with e = exp(-|a - b|), and log(1 + e) = log(u) + (e - (u - 1)) / u with
    # u = 1 + e, which is precise for small e. NumPy's own logaddexp is slow, because it is not vectorized. fmin
    # replaces the NaN of inf - inf by 1.
    "logaddexp": "subtract({0}, {1}, t0); abs(t0, t0); negative(t0, t0); exp(t0, t0); fmin(t0, one, t0); "
    "add(t0, one, t1); maximum({0}, {1}, out={out}); subtract(t1, one, t2); subtract(t0, t2, t0); divide(t0, t1, t0); "
    "log(t1, t1); add({out}, t1, {out}); add({out}, t0, {out})",
}
"""{operation of a graph that is no single NumPy function: the statements that compute it}. {0}, {1}, {2} are the
operands, {out} is the result; t0, t1, t2 are scratch arrays, `one` is the number 1."""


OVERWRITES = frozenset((*UFUNCS, "clip", "sign"))
"""The operations whose result may be written to the memory of an operand."""

LIMITS = ("k0", "k1")
"""The names of the limits of c and of a projected h. Each is an array of one number."""

Nodes = list[Node] | tuple[Node, ...]
"""The type of a graph's list of nodes."""

NEW = "new"
"""What `Groups.spot` returns instead of the name of an array for a value that has no place yet."""


class Scratch(NamedTuple):
    """A scratch array: its number of blocks, whether its dtype is bool, and whether it has the width of a projected
    h."""

    blocks: int = 1
    is_bool: bool = False
    is_wide: bool = False


class Place(NamedTuple):
    """One block of an array: its name, and the number of the block."""

    array: str
    row: int


def places(array: str, count: int) -> list[Place]:
    """Return the places of all blocks of an array with `count` blocks."""
    return [Place(array, row) for row in range(count)]


# --- The graph in NumPy's operations ---


class Rewrites(NamedTuple):
    """How `lowered` rewrites a graph. negated: nodes whose places hold the negated value. squares: whether y (1 - y) is
    computed as y - y^2; this takes one pass over memory less if one statement squares several gates. divided: {product:
    sigmoid}, from `quotients`: a product x sigmoid(z) is computed as x / (1 + exp(-z)), which also takes one pass
    less."""

    negated: Collection[int] = ()
    squares: bool = False
    divided: Mapping[int, int] = MappingProxyType({})


class Store(NamedTuple):
    """The arrays of a step, and what the statements may do with them. sizes: {array: number of its blocks}. free: the
    arrays whose values may be overwritten. dense: the contiguous arrays into which intermediate results may be written
    before the final result. wide: the arrays that have the width of a projected h."""

    sizes: Mapping[str, int]
    free: Iterable[str] = ()
    dense: Iterable[str] = ()
    wide: Collection[str] = ()


def lowered(
    nodes: Nodes, outputs: Iterable[int], known: Mapping[int, Place], rewrites: Rewrites
) -> tuple[Graph, dict[int, int]]:
    """Rewrite a graph with operations that NumPy has. Return the new graph, and {node: its number in the new graph}.
    Nodes with a known place become inputs of the new graph: node 7 becomes the input "n7", or "-n7" if its place holds
    the negated value."""
    negated, squares, divided = rewrites
    graph, number = Graph(), dict[int, int]()
    one = graph.constant(1)

    # Return the node of -n in the new graph: an input if the place of n holds the negated value (see `signs`), a
    # difference if n is a sum and this holds for one operand, else a negation.
    def negative(n: int) -> int:
        node = graph.nodes[n]
        if node.op == "input" and node.value in signs:
            return graph.input(signs[node.value])
        if node.op == "add":
            for k, other in (node.args, node.args[::-1]):
                if graph.nodes[k].value in signs:
                    return graph.node(Node("sub", (graph.input(signs[graph.nodes[k].value]), other)))
        return graph.node(Node("neg", (n,)))

    signs = {f"n{n}": f"-n{n}" for n in negated}  # {name of an input whose place holds -x: name of -x}
    for n in needed(nodes, outputs, known):  # the nodes from which the outputs are computed, operands first
        node = nodes[n]
        args = [] if n in known else [number[k] for k in node.args]  # the operands of n in the new graph
        if n in known:
            number[n] = graph.input(f"n{n}")
        elif node.op == "sigmoid":  # 1 / u with u = 1 + exp(-x)
            u = graph.node(Node("add", (graph.node(Node("exp", (negative(args[0]),))), one)))
            number[n] = graph.node(Node("div", (one, u)))
        elif n in divided:  # x * sigmoid(z) as x / (1 + exp(-z)): `other` is x, and the sigmoid has the same divisor
            (other,) = (number[k] for k in node.args if k != divided[n])
            number[n] = graph.node(Node("div", (other, graph.nodes[number[divided[n]]].args[1])))
        elif node.op == "rsqrt":
            number[n] = graph.node(Node("div", (one, graph.node(Node("sqrt", (args[0],))))))
        elif node.op == "add" and graph.nodes[args[1]].op == "neg":
            number[n] = graph.node(Node("sub", (args[0], graph.nodes[args[1]].args[0])))
        elif (clipped := before_clip(nodes, node, known)) is not None:
            number[n] = graph.node(Node("clip", (number[clipped], args[1])))
        # Compute y (1 - y) as y - y * y, if `squares`.
        elif squares and node.op == "mul" and graph.nodes[args[1]] == Node("sub", (one, args[0])):
            number[n] = graph.node(Node("sub", (args[0], graph.node(Node("mul", (args[0], args[0]))))))
        else:
            number[n] = graph.node(node._replace(args=tuple(args)))
    return graph, number


def before_clip(nodes: Nodes, node: Node, known: Mapping[int, Place]) -> int | None:
    """Return the node x if `node` is min(max(x, -k), k) with k the limit of c or h, else None. Such a node becomes one
    call of NumPy's clip. The limits have places with the names LIMITS."""
    if node.op == "min" and (limit := known.get(node.args[1])) is not None and limit.array in LIMITS:
        inner = nodes[node.args[0]]
        if inner.op == "max" and nodes[inner.args[1]] == Node("neg", node.args[1:]):
            return inner.args[0]
    return None


def quotients(nodes: Nodes, outputs: Sequence[int]) -> dict[int, int]:
    """Return {product: sigmoid} for all products x * sigmoid(z) that are computed as quotients x / (1 + exp(-z)). The
    step then need not compute the sigmoid, unless it is saved. All nodes that read such a sigmoid must be such
    products."""
    found, order = dict[int, int](), needed(nodes, outputs)
    for n in order:
        # uses: the nodes that read n. factor: whether each of them is a product with n as one factor, not yet a
        # quotient.
        uses = [k for k in order if n in nodes[k].args]
        factor = all(nodes[k].op == "mul" and nodes[k].args.count(n) == 1 and k not in found for k in uses)
        if nodes[n].op == "sigmoid" and factor and n not in outputs:
            found |= dict.fromkeys(uses, n)
    return found


# --- Groups ---


class Groups:
    """Finds the groups of a graph: tuples of nodes with the same operation that one statement may compute, because
    their operands lie in neighbouring blocks, and so do their results.

    of: {node: its group}. block: {node: where its value is stored}, for nodes that a group reads or writes: a block of
    a scratch array that only groups use, or the block of a preactivation, which is overwritten because nothing reads it
    later. sizes: {scratch array of groups: number of its blocks}. uses: {node: the nodes that read it}.
    """

    def __init__(
        self,
        nodes: Nodes,
        order: Sequence[int],
        known: Mapping[int, Place],
        into: Mapping[int, Place],
        lengths: Mapping[str, int],
    ):
        """Find the groups: nodes that one statement can compute together. into: {node: its place} of results. lengths:
        {array: number of its blocks}."""
        self.nodes, self.order, self.known, self.into = nodes, order, known, into
        self.of: dict[int, tuple[int, ...]] = {}
        self.block: dict[int, Place] = {}
        self.sizes: dict[str, int] = {}
        # by_row: {node: (row, function as text)} for each node that is a function of one block of a known array, such
        # as (2, "mul(y,y)") for the square of block 2 of y. An array of one block is left out, because its block has no
        # neighbours.
        self.by_row: dict[int, tuple[int, str]] = {
            n: (place.row, place.array) for n, place in known.items() if lengths[place.array] > 1
        }
        self.uses: dict[int, list[int]] = {}
        for n in order:
            for k in nodes[n].args:
                self.uses.setdefault(k, []).append(n)
        # First group nodes that read successive blocks of one array.
        self.along_gates()
        # Then group nodes whose results shall lie in successive blocks of one array: the row minus the position in the
        # sorted list is constant. item: (position, (place, node)).
        targets = sorted((place, n) for n, place in into.items())
        for _, run in groupby(enumerate(targets), key=lambda item: (item[1][0].array, item[1][0].row - item[0])):
            self.side_by_side([n for _, (_, n) in run])

    def along_gates(self) -> None:
        """Group nodes that compute the same function of neighbouring blocks of known arrays, such as the derivatives of
        the gates' activations."""
        found: dict[str, list[tuple[int, int]]] = {}  # {function as text: pairs (row, node)}
        for n in self.order:
            op, args = self.nodes[n].op, self.nodes[n].args
            varying = [k for k in args if self.nodes[k].op != "const"]
            if op not in UFUNCS or op in CONDITIONS or not varying:  # groups have single functions with float results
                continue
            if all(k in self.by_row for k in varying) and len({self.by_row[k][0] for k in varying}) == 1:
                texts = [self.by_row[k][1] if k in self.by_row else str(self.nodes[k].value) for k in args]
                text = f"{op}({','.join(sorted(texts) if op in COMMUTES else texts)})"
                self.by_row[n] = self.by_row[varying[0]][0], text
                found.setdefault(text, []).append((self.by_row[n][0], n))
            elif (z := self.preactivation_in(n, varying)) is not None:
                # Node n adds something to a preactivation, such as a peephole's term, and is stored in its place. All
                # such sums get the same text: a later node such as the sigmoid of the sum computes the same function of
                # each.
                self.block[n], self.by_row[n] = self.known[z], (self.known[z].row, "a sum")
        for pairs in found.values():
            # pairs: (row, node) of all nodes that compute the same function, each of the block in this row. Divide them
            # into runs of successive rows (row minus position in the sorted list is constant), whose results lie in
            # successive blocks of one array (`offset` is the same) or have no target. item: (position, (row, node)).
            numbered = enumerate(sorted(pairs))
            for _, run in groupby(numbered, key=lambda item: (self.offset(item[1][1]), item[1][0] - item[0])):
                self.group([n for _, (_, n) in run])

    def preactivation_in(self, n: int, args: list[int]) -> int | None:
        """Return the preactivation (a block of the array z) that is one operand of node n, if only n reads it, so that
        n can overwrite it; else None. args: the operands of n without constants."""
        found = [k for k in args if k in self.known and self.known[k].array == "z" and self.uses[k] == [n]]
        return found[0] if len(found) == 1 and len(args) == 2 and n not in self.into else None

    def offset(self, n: int) -> Any:
        """Return the array in which the result of node n shall lie, and the distance of its row from the row that n
        reads, which is the same for all nodes of a group; None if the result has no target."""
        return (self.into[n].array, self.into[n].row - self.by_row[n][0]) if n in self.into else None

    def group(self, members: list[int]) -> None:
        """Make groups of these nodes, each as large as possible. Nodes that depend on one another cannot be in one
        group. members: nodes with the same operation, in the order of the blocks that they read or write."""
        while members:
            n = next(n for n in range(len(members), 0, -1) if n == 1 or self.is_possible(members[:n]))
            if n > 1:
                self.of.update(dict.fromkeys(members[:n], tuple(members[:n])))
            members = members[n:]

    def is_possible(self, members: Sequence[int]) -> bool:
        """Return whether one statement can compute the nodes `members`: whether all statements can then be ordered."""
        groups = self.of | dict.fromkeys(members, tuple(members))
        return ordered(self.nodes, self.order, groups, self.known) is not None

    def side_by_side(self, members: list[int]) -> None:
        """Make groups of nodes whose results shall lie in neighbouring blocks of an array. Their operands must also lie
        in neighbouring blocks, or be computed there. members: the nodes, in the order of the blocks of their
        results."""
        while members:
            # count: how many of the first members are one group. placed: lists of operands that need neighbouring
            # blocks.
            count, placed = 1, list[list[int]]()
            for n in range(2, len(members) + 1):
                columns = self.columns(members[:n])
                if columns is None or not self.is_possible(members[:n]):
                    break
                count, placed = n, columns
            if count > 1:
                self.of.update(dict.fromkeys(members[:count], tuple(members[:count])))
                for column in placed:
                    array = f"g{len(self.sizes)}"
                    self.sizes[array] = len(column)
                    self.block.update({n: Place(array, row) for row, n in enumerate(column)})
                    self.side_by_side(column)
            members = members[count:]

    def columns(self, members: Sequence[int]) -> list[list[int]] | None:
        """Return the operands of these nodes that must still be computed into neighbouring blocks, if the nodes shall
        be one group: a list of all first operands, a list of all second operands, both, or none. Return None if they
        cannot be one group."""
        op, wanted = self.nodes[members[0]].op, list[list[int]]()
        if op not in UFUNCS or op in CONDITIONS or any(n in self.of or self.nodes[n].op != op for n in members):
            return None
        # rows: for each node its operands. kinds: for each operand the array in which it lies, the value of a constant,
        # or NEW. Exchange the operands of a sum if they then match those of the first node.
        rows = [list(self.nodes[n].args) for n in members]
        kinds = [[self.spot(k)[0] for k in row] for row in rows]
        for row, of_row in zip(rows, kinds, strict=True):
            if op in COMMUTES and of_row != kinds[0] and of_row[::-1] == kinds[0]:
                row.reverse()
        for column in zip(*rows, strict=True):  # the first operands of all nodes, then the second ones
            # Operands are neighbours if they lie in one array and the numbers of their blocks grow by 1 from node to
            # node: then `found` has one entry. For a constant or a new value the number of the block is -1.
            spots = [self.spot(k) for k in column]
            found = {(kind, row - n) if row >= 0 else (kind, row) for n, (kind, row) in enumerate(spots)}
            # A new value can be computed into one block only, so it must not be the operand of two nodes.
            is_new = spots[0] == (NEW, -1)
            if len(found) > 1 or (is_new and len({*column}) < len(column)):
                return None
            wanted += [list(column)] if is_new else []
        return wanted

    def spot(self, n: int) -> tuple[Any, int]:
        """Return where a group finds node n as an operand: (array, row) of a block, (value, -1) for a constant, (NEW,
        -1) for a value without a place, which can be computed into any block."""
        if self.nodes[n].op == "const":
            return self.nodes[n].value, -1
        place = self.known.get(n)
        # A node in `by_row`, a function of one block of an array, has no place yet. But nodes of neighbouring blocks
        # will get neighbouring places, so the number of the block stands for the place.
        return place or (("", self.by_row[n][0]) if n in self.by_row else (NEW, -1))


def ordered(
    nodes: Nodes, order: Sequence[int], groups: Mapping[int, tuple[int, ...]], known: Mapping[int, Any]
) -> list[tuple[int, ...]] | None:
    """Return all groups, with each other node as a group of its own, in an order in which each follows the groups whose
    results it reads; None if there is no such order. groups: {node: its group}. known: the nodes whose values exist."""
    # state: {group: whether it is in the result `found`}. A group that is visited again while its state is false
    # depends on itself, so there is no order.
    found, state = list[tuple[int, ...]](), dict[tuple[int, ...], bool]()

    def visit(group: tuple[int, ...]) -> bool:
        if group in state:
            return state[group]
        state[group] = False
        for n in group:
            for k in nodes[n].args:
                if k not in known and nodes[k].op != "const" and not visit(groups.get(k, (k,))):
                    return False
        state[group] = True
        found.append(group)
        return True

    return found if all(visit(groups.get(n, (n,))) for n in order) else None


# --- Statements ---


def call(op: str, operands: Sequence[str], out: str) -> str:
    """Return the statement that computes an operation on arrays with these names."""
    if op not in UFUNCS:
        return COMPOSED[op].format(*operands, out=out)
    # Passing `out` by position takes less time than by keyword, but NumPy deprecates it for maximum and minimum.
    return f"{UFUNCS[op]}({', '.join(operands)}, {'out=' if op in ('max', 'min') else ''}{out})"


class Writer:
    """Writes the statements that compute the nodes of a graph. The result of a statement is written to its target if it
    has one, else over an operand that no later statement reads, else to a scratch array."""

    def __init__(
        self,
        nodes: Nodes,
        known: Mapping[int, Place],
        targets: Sequence[tuple[int, Place]],
        store: Store,
        rewrites: Rewrites,
    ):
        """Write the statements.

        known: {node: its place} of values that exist before the first statement. targets: pairs (node, place to which
        its value is written). A known place that is also a target is overwritten only after the last statement that
        reads its old value.
        """
        # free: {kind of scratch array: names of such arrays that are free for new results}. constants: {name in the
        # statements: number}. copies: pairs (node, place): values that are copied to a place last.
        sizes, free, dense, wide = store
        graph, number = lowered(nodes, [n for n, _ in targets], known, rewrites)
        self.nodes: list[Node] = graph.nodes
        self.sizes: dict[str, int] = dict(sizes)
        self.lines: list[str] = []
        self.views: dict[tuple[str, int, int], str] = {}
        self.scratch: dict[str, Scratch] = {}
        self.constants: dict[str, float] = {"one": 1.0}
        self.free: dict[Scratch, list[str]] = {}
        self.may_overwrite: set[str] = {*free}
        self.dense: set[str] = {*dense}
        # at: {name of an input of the rewritten graph: its place}. If a place holds the negated value of node 5, the
        # input is "-n5", and nothing reads "n5".
        at = {f"-n{n}" if n in rewrites.negated else f"n{n}": place for n, place in known.items()}
        self.place: dict[int, Place] = {
            n: at[str(node.value)] for n, node in enumerate(self.nodes) if node.op == "input" and node.value in at
        }
        # wide: the nodes whose values have the width of a projected h: inputs of this width, products with the
        # projection (W0T), and results of other operations on such nodes.
        self.wide: set[int] = set()
        for n, node in enumerate(self.nodes):
            array = self.place[n].array if n in self.place else ""
            product = bool(wide) and node.op == "matmul" and self.place[node.args[1]].array == "W0T"
            if array in wide or product or (node.op != "matmul" and not self.wide.isdisjoint(node.args)):
                self.wide.add(n)
        # A node is computed directly into its target, unless its value exists already, is a constant, or has another
        # target, too. Then its value is copied to the target last.
        goals = [(number[n], place) for n, place in targets]
        into: dict[int, Place] = {}
        self.copies: list[tuple[int, Place]] = []
        for n, place in goals:
            if n in self.place or n in into or self.nodes[n].op == "const":
                self.copies.append((n, place))
            else:
                into[n] = place
        order = [n for n in needed(self.nodes, [n for n, _ in goals], self.place) if n not in self.place]
        order = [n for n in order if self.nodes[n].op != "const"]
        groups = Groups(self.nodes, order, self.place, into, sizes)
        self.into, self.block = into, groups.block
        self.scratch |= {name: Scratch(count) for name, count in groups.sizes.items()}
        self.sizes |= groups.sizes
        self.units: list[tuple[int, ...]] = ordered(self.nodes, order, groups.of, self.place) or []
        # last: {node: the number of the last unit that reads it}. A unit is a group of nodes that one statement
        # computes, or a single node. Targets are read after all units.
        self.last: dict[int, float] = {
            k: t for t, unit in enumerate(self.units) for n in unit for k in self.nodes[n].args
        }
        self.last |= {n: inf for n, _ in goals}
        # holds: {place: the node whose value lies there now}. readers: {node: the nodes that read it}.
        self.holds: dict[Place, int] = {place: n for n, place in self.place.items()}
        self.readers: dict[int, list[int]] = groups.uses
        for t, unit in enumerate(self.units):
            self.write(t, unit)
        self.copy_at_once([(self.text([place]), self.operand([n])) for n, place in self.copies])

    def copy_at_once(self, copies: list[tuple[str, str]]) -> None:
        """Append statements that copy arrays as if all copies ran at the same time. copies: pairs (target, source).

        A copy runs as soon as no waiting copy reads its target. If only cycles are left, such as two states that are
        exchanged, one target is first copied to a scratch array, from which the other copies then read.
        """
        waiting = [(target, source) for target, source in copies if target != source]
        while waiting:
            sources = [source for _, source in waiting]
            ready = next((copy for copy in waiting if copy[0] not in sources), None)
            if ready is None:
                target = waiting[0][0]
                spare = f"b{len(self.scratch)}"
                self.scratch[spare] = Scratch()
                self.lines.append(f"copyto({spare}, {target})")
                waiting = [(to, spare if source == target else source) for to, source in waiting]
            else:
                self.lines.append(f"copyto({ready[0]}, {ready[1]})")
                waiting.remove(ready)

    def text(self, blocks: Sequence[Place]) -> str:
        """Return the name of neighbouring blocks of one array in the statements: the array's name if they are all its
        blocks, else the name of a view, which is added to `views`: z_1 for block 1 of z, z_1_3 for blocks 1 and 2."""
        array, start, stop = blocks[0].array, blocks[0].row, blocks[-1].row + 1
        if stop - start == self.sizes[array]:
            return array
        name = f"{array}_{start}" if stop == start + 1 else f"{array}_{start}_{stop}"
        self.views[array, start, stop] = name
        return name

    def operand(self, nodes: Sequence[int]) -> str:
        """Return the name by which a statement reads these nodes: that of a constant, or of their neighbouring
        blocks."""
        node = self.nodes[nodes[0]]
        if node.op != "const":
            return self.text([self.place[n] for n in nodes])
        # Compare by repr, because 0.0 == -0.0, but they are different constants.
        equal = [name for name, value in self.constants.items() if repr(value) == repr(node.value)]
        name = equal[0] if equal else f"c{len(self.constants)}"
        self.constants[name] = node.value
        return name

    def is_neighbourly(self, column: Sequence[int]) -> bool:
        """Return whether one statement can read these nodes as one operand: the same constant, or neighbouring
        blocks."""
        if self.nodes[column[0]].op == "const":
            return all(n == column[0] for n in column)
        return all(n in self.place for n in column) and self.are_neighbours([self.place[n] for n in column])

    def are_neighbours(self, blocks: Sequence[Place]) -> bool:
        """Return whether these blocks follow one another in one array."""
        array, start = blocks[0]
        return all(block == Place(array, start + k) for k, block in enumerate(blocks))

    def can_write(self, t: int, unit: Sequence[int], n: int, place: Place) -> bool:
        """Return whether unit t can write node n to this place. It can if neither this unit nor a later one reads the
        value that lies there, or if only node n reads it, by a function that may overwrite its operand."""
        old = self.holds.get(place)  # the node whose value would be overwritten; None if there is none
        if old is None or self.last.get(old, -1) < t:
            return True
        readers = [k for k in unit if old in self.nodes[k].args]
        return self.last[old] == t and readers == [n] and self.nodes[n].op in OVERWRITES

    def write(self, t: int, unit: tuple[int, ...]) -> None:
        """Append the statement of unit t, or a statement for each of its nodes if their operands or results do not lie
        in neighbouring blocks."""
        if len(unit) == 1:
            self.write_one(t, unit[0], unit)
            return
        # columns: the first operands of all nodes, then their second operands.
        columns = [*zip(*[self.nodes[n].args for n in unit], strict=True)]
        out = self.destination(t, unit) if all(self.is_neighbourly(column) for column in columns) else None
        if out is None:
            for n in unit:
                self.write_one(t, n, unit)
            return
        self.lines.append(call(self.nodes[unit[0]].op, [*map(self.operand, columns)], self.text(out)))
        self.note_places(unit, out)

    def destination(self, t: int, unit: tuple[int, ...]) -> list[Place] | None:
        """Return neighbouring blocks for the results of a group (`unit`, number t): its targets or, if it has none, the
        first of these that can be written: its blocks in `self.block`, the blocks of an operand, a new scratch array.
        Return None if the targets cannot be written."""
        if unit[0] in self.into:
            found = [self.into[n] for n in unit]
            fits = self.are_neighbours(found) and all(map(lambda n, p: self.can_write(t, unit, n, p), unit, found))
            return found if fits else None
        candidates = [[self.block[n] for n in unit]] if all(n in self.block for n in unit) else []
        args = [self.nodes[n].args for n in unit]
        for column in zip(*args, strict=True):
            if self.nodes[column[0]].op != "const" and self.overwritable(self.place[column[0]]):
                candidates.append([self.place[n] for n in column])
        for found in candidates:
            if self.are_neighbours(found) and all(map(lambda n, p: self.can_write(t, unit, n, p), unit, found)):
                return found
        # No place can be written, so make a new scratch array.
        name = f"b{len(self.scratch)}"
        self.scratch[name], self.sizes[name] = Scratch(len(unit)), len(unit)
        return places(name, len(unit))

    def overwritable(self, place: Place) -> bool:
        """Return whether the statements may overwrite the array of this place."""
        return place.array in self.scratch or place.array in self.may_overwrite

    def write_one(self, t: int, n: int, unit: Sequence[int]) -> None:
        """Append the statement of node n, which belongs to the group `unit`, number t."""
        # kind: which scratch array the result needs.
        node, kind = self.nodes[n], Scratch(1, self.nodes[n].op in CONDITIONS, n in self.wide)
        place = self.into.get(n)
        if place is not None and not self.can_write(t, unit, n, place):
            self.copies.append((n, place))
            place = None
        # dead: the operands that no later statement reads. The result may overwrite one of them; scratch arrays of the
        # others become free for later results.
        dead = [k for k in dict.fromkeys(node.args) if self.last.get(k) == t and k in self.place]
        if len(unit) > 1:
            dead = []  # another node of this group may still read them
        if place is None and not kind.is_bool:
            # own: the places of operands that the result may overwrite.
            own = [self.place[k] for k in dead if self.overwritable(self.place[k])] if node.op in OVERWRITES else []
            # An array that is no scratch array has floats, like `Scratch()`.
            own = [p for p in own if not self.scratch.get(p.array, Scratch()).is_bool]
            for p in [*filter(None, [self.block.get(n), self.hint(n)]), *own]:
                if self.can_write(t, unit, n, p):
                    place = p
                    break
        if place is None:
            name = self.free[kind].pop() if self.free.get(kind) else f"b{len(self.scratch)}"
            self.scratch[name], self.sizes[name] = kind, 1
            place = Place(name, 0)
        operands, out = [self.operand([k]) for k in node.args], self.text([place])
        # Allocate the scratch arrays t0 to t2, if the statements of a composed operation use them.
        self.scratch |= {name: Scratch() for name in ("t0", "t1", "t2") if name in COMPOSED.get(node.op, "")}
        self.lines.append(call(node.op, operands, out))
        self.note_places([n], [place])
        for k in dead:  # Scratch(0): the array is no scratch array
            found = self.scratch.get(self.place[k].array, Scratch(0))
            if found.blocks == 1 and self.holds.get(self.place[k]) == k:
                self.free.setdefault(found, []).append(self.place[k].array)

    def hint(self, n: int) -> Place | None:
        """Return a place for node n from which it need not be moved: the target of the only node that reads n, or of
        the only node that reads that node, and so on, if each of these nodes can overwrite its operand. Return None if
        there is no such target, or if its array may not hold intermediate results (is not in `dense`)."""
        while len(readers := self.readers.get(n, [])) == 1 and self.nodes[n := readers[0]].op in OVERWRITES:
            if n in self.into:
                return self.into[n] if self.into[n].array in self.dense else None
        return None

    def note_places(self, nodes: Sequence[int], blocks: Sequence[Place]) -> None:
        """Store that the values of these nodes now lie in these blocks."""
        self.place.update(zip(nodes, blocks, strict=True))
        self.holds.update(zip(blocks, nodes, strict=True))
