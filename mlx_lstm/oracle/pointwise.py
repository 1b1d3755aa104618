"""One time step of a cell that a user wrote, forward and backward. A step computes the cell's graph of operations
(`mlx_lstm.engines.cell_graph.CellGraph`) node by node. `recurrence` runs the steps over time.

Letters in shapes: B batch, H hidden units, G gates (blocks of H preactivations), C states besides h, U inputs of the
cell at each step, V parameter vectors. `p` is one direction of a case; its arrays `inputs` [T, B, U H] and `params`
[V H] belong to such cells only. `fl(value)` rounds the result of one operation.

A graph is a list of nodes; a node has an operation, the numbers of its operands, and a value: an input's name, or the
number of a constant. The name of an input is a letter and a number: x a preactivation, s a state (s0 is h), u an input
of the step, w a parameter, d the gradient of a new state. If graph.apart is true, the cell reads the two parts of a
preactivation as two values: x is then the input's part, and p the recurrent part. graph.number: {name of an input: its
node}; graph.forward: the nodes of the new states; graph.names: the names of the inputs that have gradients; graph.back:
the nodes of these gradients. values: {node: its value [B, H]}.
"""

from collections.abc import Callable, Iterator, Sequence
from math import erf
from typing import Any

import numpy as np

from .arithmetic import ACTIVATION_UNITS, Array, Rounding
from .case import OneDirection, Step
from .cells import input_part, joined_parts, through_norm

EXACT: dict[str, Callable[..., Array]] = {
    "neg": np.negative, "max": np.maximum, "min": np.minimum, "abs": np.abs, "sign": np.sign, "floor": np.floor,
    "ceil": np.ceil, "round": np.rint, "select": np.where, "float": lambda a: np.asarray(a, np.float64),
    "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
}  # fmt: skip
"""{operation of a graph: NumPy function}. The results of these operations are exact, so they are not rounded."""

ROUNDED: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt,
    "rem": lambda a, b: np.where(np.fmod(a, b) == 0, np.fmod(a, b), np.remainder(a, b)),
}  # fmt: skip
"""{operation of a graph: NumPy function}. The only error of these operations is that the result is rounded once. rem:
the remainder, which has the sign of b; but a remainder of 0 has the sign of a."""

FUNCTIONS: dict[str, Callable[..., Array]] = {
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "tanh": np.tanh, "sigmoid": lambda a: np.where(a >= 0, 1, np.exp(-np.abs(a))) / (1 + np.exp(-np.abs(a))),
    "logaddexp": np.logaddexp, "pow": np.power, "rsqrt": lambda a: 1 / np.sqrt(a), "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "atan2": np.arctan2, "erf": np.vectorize(erf),
}  # fmt: skip
"""{operation of a graph: NumPy function}. An engine's function may have a relative error of ACTIVATION_UNITS unit
roundoffs before its result is rounded."""

COMPARISONS = ("gt", "ge", "lt", "le", "max", "min", "eq", "ne")
"""The operations whose result or slope jumps where their two operands are equal."""


def graph_step(p: OneDirection, t: int, x: Array, h_in: Array, h_prev: Array, c_prev: Array, fl: Rounding) -> Step:
    """Run one step of the cell and return its values. x: the input. h_in: h_prev times the mask. c_prev [B, C H], with
    C states besides h: the states besides h. In the result `gates` is the input's part of the preactivations, and
    `values` is {node of the graph: its value}."""
    if p.Wh is None:
        z, products, norm_values = input_part(p, x, fl), [], {}
    else:
        z, product, norm_values = joined_parts(p, x, h_in, fl)
        products = blocks(p, product)
    parts = blocks(p, z)  # for each gate the input's part of its preactivation
    # With `apart` the cell gets both parts of each preactivation. Otherwise it gets only their sums.
    if products and not p.graph.apart:
        parts, products = [fl(a + q) for a, q in zip(parts, products, strict=True)], []
    # Sequences that have ended or are held do not run step t, and may have NaN there. So their inputs are set to 0.
    inputs = [] if p.inputs is None else blocks(p, np.where(p.active[t], p.inputs[t], 0.0))
    params = [] if p.params is None else blocks(p, np.broadcast_to(p.params, (p.B, len(p.params))))
    groups = {"x": parts, "p": products, "s": [h_prev, *blocks(p, c_prev)], "u": inputs, "w": params}
    named = {f"{letter}{k}": value for letter, each in groups.items() for k, value in enumerate(each)}
    # At first `values` has only the nodes that are inputs; `computed` adds the values of other nodes.
    values = {n: named[name] for name, n in p.graph.number.items() if name in named}
    state = np.concatenate(computed(p, values, p.graph.forward, fl), axis=-1)
    return Step(h=state[:, : p.H], c=state[:, p.H :], gates=z, a={}, values=values, **norm_values)


def graph_step_back(p: OneDirection, s: Step, dh: Array, dc: Array, dgates: Array, fl: Rounding) -> Step:
    """Return the gradients of one step of the cell. dh [B, H] and dc [B, C H] are the total cotangents of the step's
    states. dgates is not read, because such a cell has no output `gates`."""
    graph = p.graph
    given = {f"d{k}": gradient for k, gradient in enumerate([dh, *blocks(p, dc)])}  # d0 is the gradient of h
    values = s.values | {graph.number[name]: gradient for name, gradient in given.items() if name in graph.number}
    back = list(zip(graph.names, computed(p, values, graph.back, fl), strict=True))  # (name of an input, its gradient)
    # d: {first letter of the inputs' names: the gradients of these inputs, side by side}. none: an array without
    # columns, for a letter without inputs.
    none = np.zeros((p.B, 0))
    d = {k: np.concatenate([none, *(g for name, g in back if name[0] == k)], axis=-1) for k in "xpsuw"}
    # Without `apart` the cell reads the sum of both parts of a preactivation, so both have the same gradient, d["x"].
    of_norm = through_norm(p, s, d["x"], d["p"] if graph.apart else d["x"], fl)
    dh_in = None if p.Wh is None else fl.dot(of_norm["drecurrent"], p.Wh)
    to_sum = of_norm | {"dinputs": d["u"], "dparams": d["w"]}
    return Step(dh_in=dh_in, dh_direct=d["s"][:, : p.H], dc_prev=d["s"][:, p.H :], to_sum=to_sum)


def blocks(p: OneDirection, array: Array) -> list[Array]:
    """Split the last axis of an array into a list of blocks of H elements, such as one per gate, state or input."""
    return [array[..., start : start + p.H] for start in range(0, array.shape[-1], p.H)]


def computed(p: OneDirection, values: dict[int, Array], outputs: Sequence[int], fl: Rounding) -> list[Array]:
    """Return the values [B, H] of these nodes of the graph. Compute all nodes that they depend on, and add their values
    to the dict `values` (number of the node: value)."""
    nodes = p.graph.nodes
    # todo: the nodes that must be computed. In ascending order each node follows its operands, which have smaller
    # numbers.
    todo, stack = set(), list(outputs)
    while stack:
        n = stack.pop()
        if n not in values and n not in todo:
            todo.add(n)
            stack += nodes[n].args
    for n in sorted(todo):
        op, args, value = nodes[n]
        operands = [values[k] for k in args]
        if op == "const":
            values[n] = np.full((p.B, p.H), value)
        elif op in EXACT:
            values[n] = EXACT[op](*operands)
        else:
            units = 0 if op in ROUNDED else ACTIVATION_UNITS  # the error of the function itself
            values[n] = fl((ROUNDED if op in ROUNDED else FUNCTIONS)[op](*operands), units)
    return [np.broadcast_to(values[n], (p.B, p.H)) for n in outputs]


def jumps(p: OneDirection, s: Step) -> Iterator[Array]:
    """Yield for each node the distance to a point where rounding can make its result or its slope jump: for a
    comparison, a maximum or a minimum the difference of the operands; for floor, ceil, round, sign and abs the distance
    of the argument to the nearest such point; for a remainder that of the quotient to the nearest integer."""
    graph, values = p.graph, s.values
    # Also compute the nodes that only the gradient needs, but none that depends on a gradient.
    known = {*range(len(graph.nodes))} - readers_of_gradients(graph)
    computed(p, values, sorted(known), Rounding(np.float64))
    for op, args, _ in (node for n, node in enumerate(graph.nodes) if n in values):
        operands = [values[k] for k in args]
        # floor and ceil jump at integers; np.rint is the nearest one.
        if op in COMPARISONS:
            yield np.abs(operands[0] - operands[1])
        elif op in ("floor", "ceil"):
            yield np.abs(operands[0] - np.rint(operands[0]))
        elif op == "round":
            yield np.abs(operands[0] - np.floor(operands[0]) - 0.5)
        elif op in ("sign", "abs"):
            yield np.abs(operands[0])
        elif op == "rem":
            quotient = operands[0] / operands[1]
            yield np.abs(quotient - np.rint(quotient))


def readers_of_gradients(graph: Any) -> set[int]:
    """Return the nodes that depend on a gradient of the new states, which is known in the backward pass only. Each node
    follows its operands, so one pass over all nodes finds them."""
    found: set[int] = set()
    for n, (op, args, value) in enumerate(graph.nodes):
        if (op == "input" and value[0] == "d") or not found.isdisjoint(args):
            found.add(n)
    return found
