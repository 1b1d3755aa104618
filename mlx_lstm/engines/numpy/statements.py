"""Turn the graph of a cell into NumPy statements that write in place, such as "multiply(f, c_prev, c)".

A step's arrays are feature-major, [n H, B]: n blocks of H hidden units side by side. A value of the graph lies in one
block, its place (a `Place`: the array's name and the row, which is the block's number in it). Where the same operation
is applied to neighbouring blocks, such as the sigmoid to the gates i and f, one statement computes all of them (a
group).

`lowered` rewrites the graph in operations that NumPy has; `Groups` finds the groups; `Writer` writes the statements. A
graph is a list of nodes. A node has an operation, the numbers of the nodes that are its operands (args), and a value:
an input's name, or the number of a "const". Letters such as n and k are numbers of nodes.

    known     the places of values that exist before the first statement
    targets   pairs (node, place): where a value shall lie after the last statement; into: those as a dict
    order     the nodes to compute, each after its operands
    unit      a group, or one node alone: what one statement computes; t is its number in the order of the units
    last      {node: the number of the last unit that reads it}
    scratch   arrays that only these statements use; their names are b0, b1, ..., for groups g0, g1, ...
    views     {(array, first row, last row + 1): the name that the statements use for these blocks}

Operations: UFUNCS are single functions of NumPy, COMPOSED several statements; OVERWRITES may overwrite an operand, the
operands of COMMUTES may change places, and CONDITIONS have bool results.
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
"""For each operation of a graph that is a single NumPy function: the name of the function."""

COMPOSED: dict[str, str] = {
    "matmul": "matmul({1}, {0}, {out})",  # arrays are feature-major, so the matrix is the left factor
    "norm": "{1}({0}, {out})",  # operands c and N0, an object that normalises c
    "unnorm": "{2}.back({0}, {1}, {out})",  # operands: the gradient of the normalised c, c, and N0
    "float": "copyto({out}, {0})",
    "clip": "clip({0}, -{1}, {1}, {out})",
    # MLX's sign of NaN is 0, NumPy's is NaN.
    "sign": "sign({0}, {out}); copyto({out}, 0, where=not_equal({out}, {out}))",
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


OVERWRITES = frozenset((*UFUNCS, "clip", "sign"))
"""The operations whose result may lie in the memory of an operand."""

LIMITS = ("k0", "k1")
"""The arrays of one number: the limit of c, and that of a projected h."""

Nodes = list[Node] | tuple[Node, ...]
"""The type of a graph's list of nodes."""

NEW = "new"
"""What `Groups.spot` returns instead of an array's name for a value that has no place yet."""


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
    computed as y - y^2, which takes one pass over memory less if the squares of several gates are computed together.
    divided: {product: sigmoid}: a product x sigmoid(z) is computed as x / (1 + exp(-z)), one pass less
    (`quotients`)."""

    negated: Collection[int] = ()
    squares: bool = False
    divided: Mapping[int, int] = MappingProxyType({})


class Store(NamedTuple):
    """The arrays of a step. sizes: the number of blocks of each array. free: the arrays whose values may be
    overwritten. dense: the contiguous arrays, into which intermediate results may be written. wide: the arrays that
    have the width of a projected h."""

    sizes: Mapping[str, int]
    free: Iterable[str] = ()
    dense: Iterable[str] = ()
    wide: Collection[str] = ()


def lowered(
    nodes: Nodes, outputs: Iterable[int], known: Mapping[int, Place], rewrites: Rewrites
) -> tuple[Graph, dict[int, int]]:
    """Return the graph in operations that NumPy has, and for each node its number there. outputs: the nodes that are
    computed. Nodes in `known`, whose values exist already, become inputs: node 7 becomes the input "n7", or "-n7" if
    its place holds the negated value. rewrites: which of the changes below apply."""
    negated, squares, divided = rewrites
    graph, number = Graph(), dict[int, int]()  # the new graph; number: {node: its number in the new graph}
    one = graph.constant(1)

    # Return the node of -n. It needs no operation if the place of n holds the negated value already (`signs` below),
    # and it is a difference if this is so for one operand of a sum n.
    def negative(n: int) -> int:
        node = graph.nodes[n]
        if node.op == "input" and node.value in signs:
            return graph.input(signs[node.value])
        if node.op == "add":
            for k, other in (node.args, node.args[::-1]):
                if graph.nodes[k].value in signs:
                    return graph.node(Node("sub", (graph.input(signs[graph.nodes[k].value]), other)))
        return graph.node(Node("neg", (n,)))

    signs = {f"n{n}": f"-n{n}" for n in negated}  # for an input whose place holds -x: the name of -x
    for n in needed(nodes, outputs, known):  # all nodes that the outputs need, operands first
        node = nodes[n]
        args = [] if n in known else [number[k] for k in node.args]  # its operands in the new graph
        if n in known:
            number[n] = graph.input(f"n{n}")
        elif node.op == "sigmoid":  # 1 / u with u = 1 + exp(-x)
            u = graph.node(Node("add", (graph.node(Node("exp", (negative(args[0]),))), one)))
            number[n] = graph.node(Node("div", (one, u)))
        elif n in divided:  # x * sigmoid(z) as x / (1 + exp(-z)): `other` is x, and the divisor is that of the sigmoid
            (other,) = (number[k] for k in node.args if k != divided[n])
            number[n] = graph.node(Node("div", (other, graph.nodes[number[divided[n]]].args[1])))
        elif node.op == "rsqrt":
            number[n] = graph.node(Node("div", (one, graph.node(Node("sqrt", (args[0],))))))
        elif node.op == "add" and graph.nodes[args[1]].op == "neg":
            number[n] = graph.node(Node("sub", (args[0], graph.nodes[args[1]].args[0])))
        elif (clipped := before_clip(nodes, node, known)) is not None:
            number[n] = graph.node(Node("clip", (number[clipped], args[1])))
        # y (1 - y) as y - y * y
        elif squares and node.op == "mul" and graph.nodes[args[1]] == Node("sub", (one, args[0])):
            number[n] = graph.node(Node("sub", (args[0], graph.node(Node("mul", (args[0], args[0]))))))
        else:
            number[n] = graph.node(node._replace(args=tuple(args)))
    return graph, number


def before_clip(nodes: Nodes, node: Node, known: Mapping[int, Place]) -> int | None:
    """Return the node x if `node` is min(max(x, -k), k) and k is the limit of c or h, else None. One call of NumPy's
    clip then computes both operations. known: the places of values, by which a limit is recognised (`LIMITS`)."""
    if node.op == "min" and (limit := known.get(node.args[1])) is not None and limit.array in LIMITS:
        inner = nodes[node.args[0]]
        if inner.op == "max" and nodes[inner.args[1]] == Node("neg", node.args[1:]):
            return inner.args[0]
    return None


def quotients(nodes: Nodes, outputs: Sequence[int]) -> dict[int, int]:
    """Return {product: sigmoid} for all products that are computed as quotients: x * sigmoid(z) as x / (1 + exp(-z)).
    The step then need not compute the sigmoid, unless it is saved. A sigmoid is chosen if the graph uses it only as a
    factor of products."""
    found, order = dict[int, int](), needed(nodes, outputs)
    for n in order:
        # uses: the nodes that read n. factor: whether each of them is a product with n as one factor, and is not yet
        # computed as the quotient of another sigmoid.
        uses = [k for k in order if n in nodes[k].args]
        factor = all(nodes[k].op == "mul" and nodes[k].args.count(n) == 1 and k not in found for k in uses)
        if nodes[n].op == "sigmoid" and factor and n not in outputs:
            found |= dict.fromkeys(uses, n)
    return found


# --- Groups ---


class Groups:
    """The groups of a graph: tuples of nodes with the same operation that one statement may compute, because their
    operands lie in neighbouring blocks and their results, too. `block` says for a node of a group where it lies:
    (array, row) of a scratch array that only groups use."""

    def __init__(
        self,
        nodes: Nodes,
        order: Sequence[int],
        known: Mapping[int, Place],
        into: Mapping[int, Place],
        lengths: Mapping[str, int],
    ):
        """Find the groups. order: the nodes to compute. known: the places of values that exist already. into: where
        other nodes shall lie. lengths: the number of blocks of each array."""
        # of: {node: its group}. sizes: {scratch array of groups: number of its blocks}. uses: {node: nodes that read
        # it}.
        self.nodes, self.order, self.known, self.into = nodes, order, known, into
        # block: {node: where its value is stored: a block of a scratch array that only groups use, or the block of a
        # preactivation, which is overwritten because nothing reads it later}.
        self.of: dict[int, tuple[int, ...]] = {}
        self.block: dict[int, Place] = {}
        self.sizes: dict[str, int] = {}
        # For each node that is a function of one block of the known arrays: the row of the block, and the function as
        # text, such as "mul(y,y)". Nodes with the same text and neighbouring rows may be one group.
        self.by_row: dict[int, tuple[int, str]] = {
            n: (place.row, place.array) for n, place in known.items() if lengths[place.array] > 1
        }
        self.uses: dict[int, list[int]] = {}
        for n in order:
            for k in nodes[n].args:
                self.uses.setdefault(k, []).append(n)
        # First group nodes that read successive blocks of one array. An array of one block has no neighbours, so it is
        # not in by_row.
        self.along_gates()
        # Then group nodes whose results shall lie in successive blocks of one array: row - position is the same number.
        # item: (position, (place, node)).
        targets = sorted((place, n) for n, place in into.items())
        for _, run in groupby(enumerate(targets), key=lambda item: (item[1][0].array, item[1][0].row - item[0])):
            self.side_by_side([n for _, (_, n) in run])

    def along_gates(self) -> None:
        """Group nodes that compute the same function of neighbouring blocks of known arrays (values that exist before
        the statements), such as the derivatives of the gates' activations: one statement then computes all of them,
        with one call of NumPy and one pass over memory. A block's row is its number in its array."""
        found: dict[str, list[tuple[int, int]]] = {}  # the function as text: pairs (row, node)
        for n in self.order:
            op, args = self.nodes[n].op, self.nodes[n].args
            varying = [k for k in args if self.nodes[k].op != "const"]
            if op not in UFUNCS or op in CONDITIONS or not varying:  # only single functions of NumPy with float results
                continue
            if all(k in self.by_row for k in varying) and len({self.by_row[k][0] for k in varying}) == 1:
                # All operands are functions of one row, so node n is one, too.
                texts = [self.by_row[k][1] if k in self.by_row else str(self.nodes[k].value) for k in args]
                text = f"{op}({','.join(sorted(texts) if op in COMMUTES else texts)})"
                self.by_row[n] = self.by_row[varying[0]][0], text
                found.setdefault(text, []).append((self.by_row[n][0], n))
            elif (z := self.preactivation_in(n, varying)) is not None:
                # A preactivation plus something else, such as a peephole's term: the sum takes the place of the
                # preactivation. What else is in it does not matter to the nodes that read it.
                self.block[n], self.by_row[n] = self.known[z], (self.known[z].row, "a sum")
        for pairs in found.values():
            # Divide the pairs into runs of successive rows, for which row - position is the same number. Their results
            # must also have places in successive blocks of one array (`offset`), or none of them has a place. item:
            # (position, (row, node)).
            numbered = enumerate(sorted(pairs))
            for _, run in groupby(numbered, key=lambda item: (self.offset(item[1][1]), item[1][0] - item[0])):
                self.group([n for _, (_, n) in run])

    def preactivation_in(self, n: int, args: list[int]) -> int | None:
        """Return the preactivation (a block of the array z) to which node n adds something else, if nothing else reads
        this preactivation, else None. The sum can then take its place. args: the operands of n without constants."""
        found = [k for k in args if k in self.known and self.known[k].array == "z" and self.uses[k] == [n]]
        return found[0] if len(found) == 1 and len(args) == 2 and n not in self.into else None

    def offset(self, n: int) -> Any:
        """Return what all nodes of one group have in common: the array in which they shall lie, and their distance
        from the block that they are computed from."""
        return (self.into[n].array, self.into[n].row - self.by_row[n][0]) if n in self.into else None

    def group(self, members: list[int]) -> None:
        """Make groups of these nodes, as large as possible: all at once, unless one depends on another. members: nodes
        with the same operation, in the order of their rows."""
        while members:
            # n: how many of the first members can be one group.
            n = next(n for n in range(len(members), 0, -1) if n == 1 or self.is_possible(members[:n]))
            if n > 1:
                self.of.update(dict.fromkeys(members[:n], tuple(members[:n])))
            members = members[n:]

    def is_possible(self, members: Sequence[int]) -> bool:
        """Return whether the nodes `members` can be computed at once: all statements can then be ordered so that each
        follows those whose results it reads."""
        groups = self.of | dict.fromkeys(members, tuple(members))
        return ordered(self.nodes, self.order, groups, self.known) is not None

    def side_by_side(self, members: list[int]) -> None:
        """Make groups of neighbouring nodes whose operands are in neighbouring blocks or can be computed there.
        members: nodes whose results shall lie in neighbouring blocks, in this order."""
        while members:
            # count: how many of the first members are one group. placed: their operands that need neighbouring blocks.
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
        """Return the operands of these nodes that must be computed into neighbouring blocks: a list of nodes for the
        first operand, and one for the second if it must be, too. Return None if the nodes cannot be one group."""
        op, wanted = self.nodes[members[0]].op, list[list[int]]()  # wanted: the result
        if op not in UFUNCS or op in CONDITIONS or any(n in self.of or self.nodes[n].op != op for n in members):
            return None
        # rows: the operands of each node. kinds: for each of them its array, its value, or NEW. An operation whose
        # operands may change places gets them in the order of the first node's.
        rows = [list(self.nodes[n].args) for n in members]
        kinds = [[self.spot(k)[0] for k in row] for row in rows]
        for row, of_row in zip(rows, kinds, strict=True):
            if op in COMMUTES and of_row != kinds[0] and of_row[::-1] == kinds[0]:
                row.reverse()
        for column in zip(*rows, strict=True):  # the first operands of all nodes, then the second ones
            # Neighbours have the same array, and rows that grow by 1; a constant or a new value has the row -1.
            spots = [self.spot(k) for k in column]
            found = {(kind, row - n) if row >= 0 else (kind, row) for n, (kind, row) in enumerate(spots)}
            # A new value can be computed into one block only, so it must not be the operand of two nodes.
            is_new = spots[0] == (NEW, -1)
            if len(found) > 1 or (is_new and len({*column}) < len(column)):
                return None
            wanted += [list(column)] if is_new else []
        return wanted

    def spot(self, n: int) -> tuple[Any, int]:
        """Return how a group can read an operand: (array, row) for a block, (value, -1) for a constant, (NEW, -1) for a
        new value, which can be computed into any block."""
        if self.nodes[n].op == "const":
            return self.nodes[n].value, -1
        place = self.known.get(n) or self.into.get(n) or self.block.get(n)
        # A function of one row (`by_row`) has no place yet, but the row says which nodes are its neighbours.
        return place or (("", self.by_row[n][0]) if n in self.by_row else (NEW, -1))


def ordered(
    nodes: Nodes, order: Sequence[int], groups: Mapping[int, tuple[int, ...]], known: Mapping[int, Any]
) -> list[tuple[int, ...]] | None:
    """Return the groups, and the other nodes as groups of one, in an order in which they can be computed. Return None
    if there is none. groups: {node: its group}. known: the nodes whose values exist already."""
    # found: the result. state: {group: whether it is in the result}. A group that is visited again while its state is
    # false depends on itself, so there is no order.
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
    """Return the statement that computes an operation. operands, out: the names of arrays, for the result `out`."""
    if op not in UFUNCS:
        return COMPOSED[op].format(*operands, out=out)
    # `out` as a position takes less time than a keyword, but NumPy deprecates it for these two functions.
    return f"{UFUNCS[op]}({', '.join(operands)}, {'out=' if op in ('max', 'min') else ''}{out})"


class Writer:
    """Write the statements that compute nodes of a graph. Each value is written to its target, over an operand that no
    later statement reads, or to a scratch array."""

    def __init__(
        self,
        nodes: Nodes,
        known: Mapping[int, Place],
        targets: Sequence[tuple[int, Place]],
        store: Store,
        rewrites: Rewrites,
    ):
        """Write the statements.

        known: the places that hold a node's value from the beginning. targets: pairs (node, place into which it shall
        be computed). A known place that is also a target is overwritten only after the last statement that reads its
        old value. store: the arrays of the step, and which of them may be overwritten. rewrites: how the graph is
        rewritten first.
        """
        # sizes: {array: number of its blocks}. self.free: {kind of scratch array: names of those that nobody reads any
        # more}. self.constants: {name in the statements: number}. self.copies: pairs (node, place) to be copied last.
        # self.dense: the contiguous arrays, into which intermediate results may be written.
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
        # The inputs of the rewritten graph are named "n5" for node 5, or "-n5" if its place holds the negated value.
        # at: {name of what a place holds: the place}. An input "n5" of a negated value has no place: nobody reads it.
        at = {f"-n{n}" if n in rewrites.negated else f"n{n}": place for n, place in known.items()}
        self.place: dict[int, Place] = {
            n: at[str(node.value)] for n, node in enumerate(self.nodes) if node.op == "input" and node.value in at
        }
        # wide: the nodes whose values have the width of a projected h. They are inputs of this width, results of the
        # product with the projection (W0T), and results of these in operations that do not change the width.
        self.wide: set[int] = set()
        for n, node in enumerate(self.nodes):
            array = self.place[n].array if n in self.place else ""
            product = bool(wide) and node.op == "matmul" and self.place[node.args[1]].array == "W0T"
            if array in wide or product or (node.op != "matmul" and not self.wide.isdisjoint(node.args)):
                self.wide.add(n)
        # A target is computed into its place, or copied there last: if its value exists already, if it is a constant,
        # or if it has another target, too.
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
        # Targets are read after the last unit.
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
                self.scratch[spare] = Scratch()
                self.lines.append(f"copyto({spare}, {target})")
                waiting = [(to, spare if source == target else source) for to, source in waiting]
            else:
                self.lines.append(f"copyto({ready[0]}, {ready[1]})")
                waiting.remove(ready)

    def text(self, blocks: Sequence[Place]) -> str:
        """Return the name of neighbouring blocks of one array: of the array itself, or of a view, which is noted in
        `views`."""
        array, start, stop = blocks[0].array, blocks[0].row, blocks[-1].row + 1
        # The blocks 1 and 2 of z have the name z_1_3, block 1 alone has z_1.
        if stop - start == self.sizes[array]:
            return array
        name = f"{array}_{start}" if stop == start + 1 else f"{array}_{start}_{stop}"
        self.views[array, start, stop] = name
        return name

    def operand(self, nodes: Sequence[int]) -> str:
        """Return the name of a constant, or of the neighbouring blocks that hold these nodes."""
        node = self.nodes[nodes[0]]
        if node.op != "const":
            return self.text([self.place[n] for n in nodes])
        # By repr, because 0.0 and -0.0 are equal but not the same constant.
        equal = [name for name, value in self.constants.items() if repr(value) == repr(node.value)]
        name = equal[0] if equal else f"c{len(self.constants)}"
        self.constants[name] = node.value
        return name

    def is_neighbourly(self, column: Sequence[int]) -> bool:
        """Return whether one statement can read these nodes: they are the same constant, or they lie in neighbouring
        blocks."""
        if self.nodes[column[0]].op == "const":
            return all(n == column[0] for n in column)
        return all(n in self.place for n in column) and self.are_neighbours([self.place[n] for n in column])

    def are_neighbours(self, blocks: Sequence[Place]) -> bool:
        """Return whether these blocks follow one another in one array."""
        array, start = blocks[0]
        return all(block == Place(array, start + k) for k, block in enumerate(blocks))

    def can_write(self, t: int, unit: Sequence[int], n: int, place: Place) -> bool:
        """Return whether unit t (a group or one node) can write node n to this place: no later statement reads what
        lies there now, and unit t reads it only for the node n itself, in a NumPy function, which may overwrite its
        operand."""
        old = self.holds.get(place)  # the node whose value would be overwritten
        if old is None or self.last.get(old, -1) < t:
            return True
        readers = [k for k in unit if old in self.nodes[k].args]
        return self.last[old] == t and readers == [n] and self.nodes[n].op in OVERWRITES

    def write(self, t: int, unit: tuple[int, ...]) -> None:
        """Append the statement of unit t, or a statement for each of its nodes if their operands or results are not
        neighbours after all."""
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
        """Return neighbouring blocks for the results of a group (`unit`, number t), or None if there are none. In this
        order: the targets; a scratch array of groups; the blocks of an operand; a new scratch array."""
        if unit[0] in self.into:
            found = [self.into[n] for n in unit]
            fits = self.are_neighbours(found) and all(map(lambda n, p: self.can_write(t, unit, n, p), unit, found))
            return found if fits else None
        candidates = [[self.block[n] for n in unit]] if all(n in self.block for n in unit) else []
        args = [self.nodes[n].args for n in unit]  # the operands of each node
        for column in zip(*args, strict=True):
            if self.nodes[column[0]].op != "const" and self.overwritable(self.place[column[0]]):
                candidates.append([self.place[n] for n in column])
        for found in candidates:
            if self.are_neighbours(found) and all(map(lambda n, p: self.can_write(t, unit, n, p), unit, found)):
                return found
        # No place fits, so make a scratch array.
        name = f"b{len(self.scratch)}"
        self.scratch[name], self.sizes[name] = Scratch(len(unit)), len(unit)
        return places(name, len(unit))

    def overwritable(self, place: Place) -> bool:
        """Return whether the statements may overwrite this place's array with other values: it is a scratch array, or
        the caller allows it."""
        return place.array in self.scratch or place.array in self.may_overwrite

    def write_one(self, t: int, n: int, unit: Sequence[int]) -> None:
        """Append the statement of node n, which belongs to the group `unit`, number t. Its result goes to its target;
        else over an operand that no later statement reads; else to a scratch array."""
        # kind: the scratch array that the result would need: one block, bool or float, as wide as h or not.
        node, kind = self.nodes[n], Scratch(1, self.nodes[n].op in CONDITIONS, n in self.wide)
        place = self.into.get(n)
        if place is not None and not self.can_write(t, unit, n, place):
            self.copies.append((n, place))
            place = None
        # Operands in scratch arrays of one block that no later statement reads. The result may overwrite one of these
        # arrays; the others become free for later results.
        dead = [k for k in dict.fromkeys(node.args) if self.last.get(k) == t and k in self.place]
        if len(unit) > 1:
            dead = []  # another node of the group may still read them
        if place is None and not kind.is_bool:
            # own: the places of operands that the result may overwrite.
            own = [self.place[k] for k in dead if self.overwritable(self.place[k])] if node.op in OVERWRITES else []
            # An array that is no scratch array has floats, as Scratch() says.
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
        # The statements of a composed operation use up to three arrays of their own, t0 to t2.
        self.scratch |= {name: Scratch() for name in ("t0", "t1", "t2") if name in COMPOSED.get(node.op, "")}
        self.lines.append(call(node.op, operands, out))
        self.note_places([n], [place])
        for k in dead:  # Scratch(0) stands for an array that is no scratch array
            found = self.scratch.get(self.place[k].array, Scratch(0))
            if found.blocks == 1 and self.holds.get(self.place[k]) == k:
                self.free.setdefault(found, []).append(self.place[k].array)

    def hint(self, n: int) -> Place | None:
        """Return the target of the only node that reads node n, or of the node after that one, and so on, if each of
        them can overwrite its operand: all of them can then be computed in this place. Return None otherwise, or if the
        target is not in an array for intermediate results (`dense`)."""
        while len(readers := self.readers.get(n, [])) == 1 and self.nodes[n := readers[0]].op in OVERWRITES:
            if n in self.into:
                return self.into[n] if self.into[n].array in self.dense else None
        return None

    def note_places(self, nodes: Sequence[int], blocks: Sequence[Place]) -> None:
        """Note that the values of these nodes now lie in these blocks, one after the other."""
        self.place.update(zip(nodes, blocks, strict=True))
        self.holds.update(zip(blocks, nodes, strict=True))
