"""Generate the Metal statements that compute the nodes of a cell's graph, for the lanes (GPU threads) that share a
hidden unit.

All lanes of a unit run the same statements. With four lanes per unit, each lane can compute a costly function of
another value at the same time: the activations of an LSTM's four gates take as long as one activation. A "bundle" is a
register that holds a different node in each lane: lane k holds node number k of a list. Every other variable has the
same value in all lanes of the unit.

A node is an operation of the cell's graph; it is named by its number. In Metal `quad_broadcast(x, n)` returns to all
four lanes the x of lane n, and `simd_shuffle_xor(x, n)` returns to each lane the x of the lane whose number is (own
number) ^ n. CONDITIONS, from `cell_graph`, are the operations with bool results; COMMUTES those whose two operands may
change places.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np

from ..cell_graph import COMMUTES, CONDITIONS, CellGraph, needed

OPERATIONS = {
    "neg": "-{}", "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "pow": "pow({}, {})",
    "rem": "own_remainder({}, {})",
    "max": "own_max({}, {})", "min": "own_min({}, {})", "logaddexp": "own_logaddexp({}, {})",
    "atan2": "atan2({}, {})", "exp": "exp({})", "expm1": "own_expm1({})", "log": "log({})", "log2": "log2({})",
    "log10": "log10({})", "log1p": "own_log1p({})", "sqrt": "sqrt({})", "rsqrt": "rsqrt({})",
    "tanh": "squash(true, {})", "sigmoid": "squash(false, {})", "erf": "own_erf({})", "abs": "fabs({})",
    "sign": "own_sign({})", "floor": "floor({})", "ceil": "ceil({})", "round": "rint({})", "sin": "sin({})",
    "cos": "cos({})", "tan": "tan({})", "sinh": "sinh({})", "cosh": "cosh({})", "asin": "asin({})",
    "acos": "acos({})", "atan": "atan({})", "asinh": "asinh({})", "acosh": "acosh({})", "atanh": "atanh({})",
    "gt": "{} > {}", "ge": "{} >= {}", "lt": "{} < {}", "le": "{} <= {}", "eq": "{} == {}", "ne": "{} != {}",
    "and": "{} && {}", "or": "{} || {}", "not": "!{}", "float": "({} ? 1.0f : 0.0f)", "select": "({} ? {} : {})",
}  # fmt: skip
"""{operation of a graph: its Metal expression}. metal/cell.metal defines the function `squash`. metal/pointwise.metal
defines the functions `own_...`, except for those in `HELPERS`."""

HELPERS = {
    "rem": "static float own_remainder(float a, float b) {\n"
    "const float r = fmod(a, b);\nreturn r != 0.0f && (r < 0.0f) != (b < 0.0f) ? r + b : r;\n}\n",
}
"""{operation of a graph: the source of a Metal function for it}. Only few cells need these functions, so each is
written into the structs of the cells that call it."""

COSTLY = ("tanh", "sigmoid", "exp", "log", "log2", "log10", "log1p", "expm1", "erf", "logaddexp", "pow")
COSTLY += ("sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2")
COSTLY += ("sqrt", "rsqrt", "rem")
"""Operations that take many instructions. The lanes of a unit divide these operations among themselves."""

ALIKE = ({"tanh", "sigmoid"}, *({op} for op in COSTLY if op not in ("tanh", "sigmoid")))
"""Sets of operations that one statement can compute together, each in a different lane. tanh and sigmoid are in one
set, because the function `squash` computes both."""


def literal(value: float) -> str:
    """Return a number as a float literal of Metal."""
    number = np.float32(value)
    if np.isnan(number):
        return "NAN"
    if np.isinf(number):
        return "INFINITY" if number > 0 else "(-INFINITY)"
    text = np.format_float_scientific(number, unique=True, trim="0")
    return f"{text}f" if number >= 0 else f"({text}f)"


class Statements:
    """Generates Metal statements for the lanes of one unit. lanes: 4 or 1. lines: the statements so far."""

    def __init__(self, graph: CellGraph, lanes: int, uniform: dict[int, str], bundles: list[tuple[str, list[int]]]):
        """Create a generator for the nodes of `graph`. uniform: {node whose value all lanes already have: name of the
        variable with this value}. bundles: the registers that hold a different node in each lane, as pairs (name, the
        node of each lane)."""
        self.graph, self.lanes = graph, lanes
        self.uniform, self.bundles = dict(uniform), list(bundles)
        self.lines: list[str] = []
        self.merged: dict[tuple[int | None, ...], str] = {}  # cache of `merge`: {node wanted by each lane: variable}
        self.names = (f"v{n}" for n in count())
        if lanes == 1:  # a register holds one node, so all lanes (the only one) have its value
            self.uniform |= {n: name for name, nodes in bundles for n in nodes[:1]}

    def new(self, n: int, code: str) -> str:
        """Append a statement that declares a variable with the value `code` and the type of node n: bool or float.
        Return the variable's name."""
        name = next(self.names)
        kind = "bool" if self.graph.nodes[n].op in CONDITIONS else "float"
        self.lines.append(f"const {kind} {name} = {code};")
        return name

    def is_known(self, n: int) -> bool:
        """Return whether the value of node n needs no further Metal statement to compute it: n is a constant, or a
        variable has its value in at least one lane."""
        return n in self.uniform or self.graph.nodes[n].op == "const" or self.place(n) is not None

    def place(self, n: int) -> tuple[str, int] | None:
        """Return where a bundle holds node n, as (the register's name, the lane), or None if no bundle holds it."""
        return next(((name, nodes.index(n)) for name, nodes in self.bundles if n in nodes), None)

    def everywhere(self, n: int) -> str:
        """Return a Metal expression that has the value of node n in all lanes: the name of a variable, or a literal. If
        there is no such variable yet, append the statements that compute it."""
        node, place = self.graph.nodes[n], self.place(n)
        if n in self.uniform:
            return self.uniform[n]
        if node.op == "const":
            return literal(node.value)
        if place is not None:
            self.uniform[n] = self.new(n, f"quad_broadcast({place[0]}, ushort({place[1]}))")
        else:
            self.uniform[n] = self.new(n, OPERATIONS[node.op].format(*[self.everywhere(k) for k in node.args]))
        return self.uniform[n]

    def divide_work(self, outputs: Sequence[int]) -> None:
        """Append statements for the costly operations on which the nodes `outputs` depend, so that the lanes divide
        these operations among themselves. The level of a node is how many costly operations follow one after the other
        up to this node. Operations of one level do not depend on each other. So up to four of one kind are computed by
        one statement, one in each lane. An operation that is the only one of its kind on its level is not computed
        here, but where it is needed."""
        if self.lanes == 1:
            return
        nodes, level = self.graph.nodes, dict[int, int]()
        leaves = {*self.uniform, *(n for _, of in self.bundles for n in of)}
        order = needed(nodes, outputs, leaves)
        for n in order:
            below = 0 if n in leaves else max([level[k] for k in nodes[n].args], default=0)
            level[n] = below + (n not in leaves and nodes[n].op in COSTLY)
        costly = [n for n in order if n not in leaves and nodes[n].op in COSTLY]
        for depth in sorted({level[n] for n in costly}):
            for kinds in ALIKE:
                group = [n for n in costly if level[n] == depth and nodes[n].op in kinds]
                while len(group) > 1:
                    self.compute_together(group[:4])
                    group = group[4:]

    def compute_together(self, group: list[int]) -> None:
        """Append one statement that computes the operations `group` (up to four nodes), each in a different lane. If a
        lane already holds an operand of an operation, this lane computes the operation, unless the lane is taken."""
        nodes, lane_of = self.graph.nodes, dict[int, int]()  # lane_of: the node that each lane computes
        for n in group:
            home = self.home(n)
            if home is not None and home not in lane_of:
                lane_of[home] = n
        for n in group:
            if n not in lane_of.values():
                lane_of[next(k for k in range(4) if k not in lane_of)] = n
        wanted = [lane_of.get(k) for k in range(4)]
        arity = len(nodes[group[0]].args)
        operands = [self.merge([None if n is None else nodes[n].args[a] for n in wanted]) for a in range(arity)]
        ops = {k: nodes[n].op for k, n in lane_of.items()}
        if len({*ops.values()}) == 1:
            code = OPERATIONS[nodes[group[0]].op].format(*operands)
        else:
            # A group with several operations has only tanh and sigmoid (ALIKE). `squash` computes tanh if its first
            # argument is true, else sigmoid.
            code = f"squash({self.condition([k for k in ops if ops[k] == 'tanh'])}, {operands[0]})"
        self.bundles.append((self.new(group[0], code), [-1 if n is None else n for n in wanted]))

    def condition(self, lanes: list[int]) -> str:
        """Return a Metal expression that is true in the lanes with these numbers, and false in all other lanes."""
        return " || ".join(f"lane == {k}" for k in lanes)

    def home(self, n: int) -> int | None:
        """Return the number of the lane that should compute node n: a lane that holds a value from which n is computed,
        which then need not be sent to another lane. Return None if no single lane holds such a value.
        """
        for k in needed(self.graph.nodes, [n], self.uniform):
            place = self.place(k)
            if place is not None and k not in self.uniform:
                return place[1]
        return None

    def merge(self, wanted: Sequence[int | None]) -> str:
        """Return the name of a variable that has in each lane k the value of the graph's node wanted[k]. None in
        `wanted` means that lane k may have any value. If no variable has these values, append the statements that
        compute a new one."""
        key = tuple(wanted)
        if key not in self.merged:
            self.merged[key] = self.merge_new(wanted)
        return self.merged[key]

    def merge_new(self, wanted: Sequence[int | None]) -> str:
        """Return what `merge` returns, without its cache."""
        nodes, lanes = self.graph.nodes, [k for k, n in enumerate(wanted) if n is not None]
        of = {k: n for k, n in enumerate(wanted) if n is not None}
        for name, have in self.bundles:
            if all(have[k] == of[k] for k in lanes):
                return name
        first = of[lanes[0]]
        # All lanes want the same node: compute it in all lanes. The exception is a node that only one lane wants, and
        # that is computed from values of single lanes. The code below computes it without sending these values to all
        # lanes.
        if len({*of.values()}) == 1 and (len(lanes) > 1 or self.is_known(first) or self.home(first) is None):
            return self.everywhere(first)
        # All lanes want results of the same operation: merge the operands of all lanes, so that one statement computes
        # the operation in all lanes.
        if (
            len({nodes[n].op for n in of.values()}) == 1
            and nodes[first].args
            and not any(map(self.is_known, of.values()))
        ):
            operands = {k: list(nodes[n].args) for k, n in of.items()}
            if nodes[first].op in COMMUTES:
                self.align(operands)
            merged = [
                self.merge([operands[k][a] if k in of else None for k in range(4)])
                for a in range(len(nodes[first].args))
            ]
            return self.new(first, OPERATIONS[nodes[first].op].format(*merged))
        # No single statement computes the values of all lanes, so the lanes select their values with conditional
        # expressions. Lanes whose values are in one register, or are results of the same operation, form a group with
        # one selection.
        self.exchange(of)
        kinds: dict[object, list[int]] = {}
        for k, n in of.items():
            mine = next((name for name, have in self.bundles if have[k] == n), None)
            kinds.setdefault(mine or (n if self.is_known(n) else nodes[n].op), []).append(k)
        # The largest group is the last alternative of the conditional expression, which needs no comparison.
        groups = sorted(kinds.values(), key=len) if len(kinds) > 1 else [[k] for k in lanes]
        parts = [(group, self.merge([of[k] if k in group else None for k in range(4)])) for group in groups]
        code = parts[-1][1]
        for group, name in parts[:-1]:
            code = f"({self.condition(group)}) ? {name} : {code}"
        return self.new(first, code)

    def exchange(self, of: dict[int, int]) -> None:
        """Append shuffles, with which pairs of lanes exchange the values of one register, if at least two lanes get the
        nodes that they want by one shuffle. For example, the backward pass of an LSTM needs gate g in the lane of gate
        i, and gate i in the lane of gate g: one shuffle replaces two broadcasts. of: {lane: the node that it wants}.
        """
        wanted: dict[tuple[str, int], list[int]] = {}
        for k, n in of.items():
            place = self.place(n)
            if place is not None and n not in self.uniform and not any(have[k] == n for _, have in self.bundles):
                wanted.setdefault((place[0], k ^ place[1]), []).append(k)
        for (name, distance), lanes in wanted.items():
            if len(lanes) > 1:
                have = next(nodes for other, nodes in self.bundles if other == name)
                code = f"simd_shuffle_xor({name}, ushort({distance}))"
                self.bundles.append((self.new(of[lanes[0]], code), [have[k ^ distance] for k in range(4)]))

    def align(self, operands: dict[int, list[int]]) -> None:
        """Swap the two operands of a commutative operation in some lanes, in place, so that fewer statements are needed
        to merge the operands of all lanes. In each lane the operands are swapped if they then have more in common with
        the operands of the first lane (the same node, register or operation). operands: {lane: its two operands}."""
        nodes, (start, first), *others = self.graph.nodes, *operands.items()

        # Return a score for the operands `pair` of lane k. It is higher if merging them with those of the first lane
        # needs fewer statements: none for the same node; no selection for two nodes of one register; one statement for
        # the same operation.
        def likeness(k: int, pair: Sequence[int]) -> int:
            score = 0
            for a, b in zip(first, pair, strict=True):
                same_register = any(have[start] == a and have[k] == b for _, have in self.bundles)
                score += 4 * (a == b) + 3 * same_register + 2 * (nodes[a].op == nodes[b].op)
            return score

        for k, pair in others:
            if likeness(k, pair[::-1]) > likeness(k, pair):
                operands[k] = pair[::-1]

    def in_lanes(self, outputs: Sequence[int]) -> list[str]:
        """Return Metal expressions of registers that together hold the nodes `outputs`: lane k of register j has output
        number lanes * j + k. Append the statements that compute them."""
        if self.lanes == 1:
            return [self.as_float(n, self.everywhere(n)) for n in outputs]
        # A merged variable has the type of its first node, part[0].
        parts = [list(outputs[start : start + 4]) for start in range(0, len(outputs), 4)]
        return [self.as_float(part[0], self.merge([*part, *[None] * (4 - len(part))])) for part in parts]

    def as_float(self, n: int, name: str) -> str:
        """Return the value of node n, which the variable `name` holds, as a Metal expression of type float. A bool
        becomes 1 or 0."""
        return f"({name} ? 1.0f : 0.0f)" if self.graph.nodes[n].op in CONDITIONS else name
