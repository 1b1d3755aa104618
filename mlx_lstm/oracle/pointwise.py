"""Reference implementation of a cell that a user defines: it runs the cell's graph of operations
(`mlx_lstm.engines.cell_graph.CellGraph`) over a sequence, forward and backward, in NumPy float64. A `Rounding` `fl`
rounds the result of each operation.

Letters in shapes: T time steps, B batch, H hidden units, G gates (blocks of H preactivations), C states besides h, U
inputs of the cell at each step, V parameter vectors.

A graph is a list of nodes; a node has an operation, the numbers of its operands, and a value: an input's name, or the
number of a constant. The name of an input is a letter and a number: x a preactivation (or its input's part), p its
recurrent part if the cell reads both parts `apart`, s a state (s0 is h), u an input of the step, w a parameter, d the
gradient of a new state. graph.number: {name of an input: its node}; graph.forward: the nodes of the new states;
graph.names, graph.back: the inputs that have gradients, and the nodes of these. values: {node: its value [B, H]}.
"""

from collections.abc import Callable, Sequence
from math import erf
from typing import Any

import numpy as np

from .arithmetic import ACTIVATION_UNITS, Array, Rounding, Tensors
from .case import Call, OneDirection, Step
from .cells import joined_parts, through_norm

EXACT: dict[str, Callable[..., Array]] = {
    "neg": np.negative, "max": np.maximum, "min": np.minimum, "abs": np.abs, "sign": np.sign, "floor": np.floor,
    "ceil": np.ceil, "round": np.rint, "select": np.where, "float": lambda a: np.asarray(a, np.float64),
    "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
}  # fmt: skip
"""NumPy functions by the name of the graph's operation. Their results are exact, so they are not rounded."""

ROUNDED: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt,
    "rem": lambda a, b: np.where(np.fmod(a, b) == 0, np.fmod(a, b), np.remainder(a, b)),
}  # fmt: skip
"""NumPy functions by the name of the graph's operation. Their only error is that the result is rounded once."""

FUNCTIONS: dict[str, Callable[..., Array]] = {
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "tanh": np.tanh, "sigmoid": lambda a: np.where(a >= 0, 1, np.exp(-np.abs(a))) / (1 + np.exp(-np.abs(a))),
    "logaddexp": np.logaddexp, "pow": np.power, "rsqrt": lambda a: 1 / np.sqrt(a), "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "atan2": np.arctan2, "erf": np.vectorize(erf),
}  # fmt: skip
"""NumPy functions by the name of the graph's operation. An engine's result may have the error `ACTIVATION_UNITS`,
relative to the result, before it is rounded."""

COMPARISONS = ("gt", "ge", "lt", "le", "max", "min", "eq", "ne")
"""The operations whose result or slope jumps where their two operands are equal."""


class Run:
    """A run of a cell's graph over a sequence in one direction. The object holds the arrays in float64, and the values
    that the graph's nodes had at every step."""

    def __init__(self, graph: Any, case: Call, fl: Rounding):
        """Prepare a run of `graph`, a cell with G gates, U inputs and V parameters. fl: how each result is rounded
        (`Rounding`).

        case: a dict of arrays and options. The arrays are x [T, B, I] (without Wx: x Wx^T [T, B, G H]), Wx, Wh, b, h0,
        c0, inputs [T, B, U H] (the cell's inputs at each step), params [V H], mask, and keep [T, B, 1] (factor on the
        carried states). The options are lengths, reverse, hold (bool [T, B]: steps that leave the states unchanged)
        and norm, a tuple: what is normalised ("product" or "sum"), "together" or "each" gate by itself, None, eps.
        (The third is a norm of c, which only a built-in LSTM has.) With a norm there may be norm_scale and norm_shift
        [G H].
        """
        self.graph, self.fl = graph, fl
        load = {name: fl.load(np.asarray(a, np.float64)) for name, a in case.items() if name not in NOT_FLOATS}
        self.a: Tensors = load
        self.T, self.B = load["x"].shape[:2]
        self.H: int = load["h0"].shape[-1]
        lengths = case.get("lengths")
        self.lengths: Array = np.full(self.B, self.T) if lengths is None else np.asarray(lengths)
        self.held: Array = np.zeros((self.T, self.B), bool) if case.get("hold") is None else np.asarray(case["hold"])
        self.times: list[int] = list(range(self.T))[:: -1 if case.get("reverse") else 1]
        self.values: dict[int, dict[int, Array]] = {}  # by step, then by node
        of, gates, _, eps = case.get("norm") or (None, "together", None, 0.0)
        arrays = {name: load.get(name) for name in ("norm_scale", "norm_shift")}
        # The functions of `cells` for layer normalisation read a `OneDirection`; here it has only what they read.
        self.norm = OneDirection(gate_order=range(graph.gates), norm_of=of, norm_gates=gates, norm_eps=eps, **arrays)
        self.normed: dict[int, Step] = {}  # by step what the gradient of the norm reads

    def alive(self, t: int) -> Array:
        """Return for each sequence of the batch whether step t is one of its steps, bool [B, 1]."""
        return (self.lengths > t)[:, None]

    def on(self, t: int) -> Array:
        """Return an array of bools [B, 1]: whether step t runs for each sequence of the batch. It does not run if the
        sequence has ended, or if the option `hold` skips the step."""
        return self.alive(t) & ~self.held[t][:, None]

    def compute(self, values: dict[int, Array], outputs: Sequence[int]) -> None:
        """Compute all nodes of the graph that the nodes `outputs` depend on, and add their values to the dict `values`
        (number of the node: value)."""
        nodes, fl = self.graph.nodes, self.fl
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
                values[n] = np.full((self.B, self.H), value)
            elif op in EXACT:
                values[n] = EXACT[op](*operands)
            else:
                units = 0 if op in ROUNDED else ACTIVATION_UNITS
                values[n] = fl((ROUNDED if op in ROUNDED else FUNCTIONS)[op](*operands), units)

    def blocks(self, array: Array | None, count: int) -> list[Array]:
        """Split the last axis of an array into `count` blocks of H elements. For None return an empty list."""
        return [] if array is None else [array[..., k * self.H : (k + 1) * self.H] for k in range(count)]

    def forward(self) -> Tensors:
        """Run all steps and save the values of each step for `backward`. Return h [T, B, H], hT [B, H] and, if the
        cell has more states than h, c [T, B, C H] and cT [B, C H]."""
        a, fl, graph = self.a, self.fl, self.graph
        c0 = a.get("c0")
        state = [a["h0"], *self.blocks(c0, graph.states - 1)]
        sequence = np.zeros((self.T, self.B, graph.states * self.H))
        for t in self.times:
            fl.start_step()
            on, alive = self.on(t), self.alive(t)
            # before: the states that the step reads, after their multiplication by keep
            before = state if "keep" not in a else [np.where(alive, fl(a["keep"][t] * s), s) for s in state]
            values = self.inputs(t, on, before)
            self.compute(values, graph.forward)
            new = [np.broadcast_to(values[n], (self.B, self.H)) for n in graph.forward]
            self.values[t] = values
            self.before = {**getattr(self, "before", {}), t: (state, before)}
            state = [np.where(on, after, s) for after, s in zip(new, before, strict=True)]
            sequence[t] = np.where(alive, np.concatenate(state, axis=-1), 0)
        outputs = {"h": sequence[..., : self.H], "hT": state[0]}
        if len(state) > 1:
            outputs |= {"c": sequence[..., self.H :], "cT": np.concatenate(state[1:], axis=-1)}
        return outputs

    def inputs(self, t: int, on: Array, state: list[Array]) -> dict[int, Array]:
        """Return {number of the node: value} for the graph's input nodes at step t, which are preactivations,
        recurrent products, states, inputs of the step and parameters. on [B, 1]: the sequences that run this step; the
        input of all others is 0. state: the states before the step."""
        a, fl, graph, G = self.a, self.fl, self.graph, self.graph.gates
        x = np.where(on, a["x"][t], 0)
        z = x if "Wx" not in a else fl.dot(x, a["Wx"].T)
        z = z if "b" not in a else fl(z + a["b"])
        products: list[Array] = []
        if "Wh" in a:
            h_in = state[0] if "mask" not in a else fl(state[0] * self.mask_at(t))
            z, product, norm_values = joined_parts(self.norm, z, fl.dot(h_in, a["Wh"].T), fl)
            products, self.normed[t] = self.blocks(product, G), Step(**norm_values)
        parts = self.blocks(z, G)
        if products and not graph.apart:
            parts, products = [fl(p + q) for p, q in zip(parts, products, strict=True)], []
        steps = self.blocks(np.where(on, a["inputs"][t], 0) if "inputs" in a else None, graph.inputs)
        params = [np.broadcast_to(w, (self.B, self.H)) for w in self.blocks(a.get("params"), graph.params)]
        groups = (("x", parts), ("p", products), ("s", state), ("u", steps), ("w", params))
        named = {f"{letter}{k}": value for letter, each in groups for k, value in enumerate(each)}
        return {n: named[name] for name, n in graph.number.items() if name in named}

    def mask_at(self, t: int) -> Array:
        """Return the mask (the factor on h in the recurrent product) of step t, which broadcasts to [B, H]."""
        mask = self.a["mask"]
        return mask if mask.ndim < 3 else mask[t if len(mask) > 1 else 0]

    def backward(self, cotangents: Tensors) -> Tensors:
        """Run all steps in reverse order. Return the gradients of all arrays, by name.

        d: the gradients of the states from later steps, h first. now: with the cotangents of step t (`outside`, the
        gradients that the caller gives for the outputs) added. row: the gradients of step t by the letter of the input:
        x preactivations, p recurrent products, s states, u inputs of the step, w parameters.
        """
        a, fl, graph, H = self.a, self.fl, self.graph, self.H
        zeros = np.zeros((self.B, H))
        cot = {name: fl.load(value) for name, value in cotangents.items()}
        d = [cot.get("hT", zeros), *self.blocks(cot.get("cT", np.zeros((self.B, H * graph.states))), graph.states - 1)]
        rows: dict[int, Tensors] = {}
        for t in reversed(self.times):
            fl.start_step()
            on, alive, values = self.on(t), self.alive(t), dict(self.values[t])
            outside = [cot["h"][t] if "h" in cot else zeros]
            outside += self.blocks(
                cot["c"][t] if "c" in cot else np.zeros((self.B, H * graph.states)), graph.states - 1
            )
            now = [fl(g + np.where(alive, o, 0)) for g, o in zip(d, outside, strict=True)]
            values |= {graph.number[f"d{k}"]: g for k, g in enumerate(now) if f"d{k}" in graph.number}
            self.compute(values, graph.back)
            back = [np.where(on, np.broadcast_to(values[n], (self.B, H)), 0) for n in graph.back]
            by_letter = {
                letter: [g for name, g in zip(graph.names, back, strict=True) if name[0] == letter]
                for letter in "xpsuw"
            }
            row = {letter: np.concatenate(each, -1) if each else zeros[:, :0] for letter, each in by_letter.items()}
            # A cell that adds input and product has one gradient for both; apart: it gets them as two arguments.
            row["p"] = row["p"] if graph.apart else row["x"]
            if self.norm.norm_of is not None:
                through = through_norm(self.norm, self.normed[t], row["x"], row["p"], fl)
                row |= {"x": through["da"], "p": through["drecurrent"]}
                row |= {name: through[f"d{name}"] for name in ("norm_scale", "norm_shift")}
            # The states before step t without and with the factor `keep`. ds: the gradients of the second ones.
            state, before = self.before[t]
            ds = by_letter["s"]
            if "Wh" in a:
                dh = fl.dot(row["p"], a["Wh"])
                row["mask"] = fl(dh * before[0])
                row["entered"] = np.where(on, before[0] if "mask" not in a else fl(before[0] * self.mask_at(t)), 0)
                ds = [fl(ds[0] + (dh if "mask" not in a else fl(dh * self.mask_at(t)))), *ds[1:]]
            ds = [np.where(on, g, held) for g, held in zip(ds, now, strict=True)]
            if "keep" in a:
                terms = np.concatenate([fl(g * s) for g, s in zip(ds, state, strict=True)], axis=-1)
                row["keep"] = np.where(alive, fl.total(terms, (1,)), 0)
                ds = [fl(g * a["keep"][t]) for g in ds]
            d = [np.where(alive, g, old) for g, old in zip(ds, now, strict=True)]
            rows[t] = row
        return self.collect(rows, d)

    def collect(self, rows: dict[int, Tensors], d: list[Array]) -> Tensors:
        """Return the gradients of the arrays of the call, by name. rows: the gradients of each step by name. d: the
        gradients of the initial states."""
        a, fl = self.a, self.fl
        whole = {name: np.stack([rows[t][name] for t in range(self.T)]) for name in rows[0]}
        live = np.stack([self.on(t) for t in range(self.T)])

        def flat(array: Array) -> Array:
            return array.reshape(-1, array.shape[-1])

        found: Tensors = {"x": whole["x"], "h0": d[0], "inputs": whole["u"]}
        if "Wx" in a:
            found["x"] = fl.dot(flat(whole["x"]), a["Wx"]).reshape(a["x"].shape)
            found["Wx"] = fl.dot(flat(whole["x"]).T, flat(np.where(live, a["x"], 0)))
        if "Wh" in a:
            found["Wh"] = fl.dot(flat(whole["p"]).T, flat(whole["entered"]))
        found["b"] = fl.total(whole["x"], (0, 1))[0, 0]
        found["params"] = fl.total(whole["w"], (0, 1))[0, 0]
        if self.norm.norm_of is not None:
            found |= {name: fl.total(whole[name], (0, 1))[0, 0] for name in ("norm_scale", "norm_shift")}
        if len(d) > 1:
            found["c0"] = np.concatenate(d[1:], axis=-1)
        if "keep" in a:
            found["keep"] = whole["keep"]
        if "mask" in a:
            mask = np.where(live, whole["mask"], 0)
            shape = (1,) * (3 - a["mask"].ndim) + a["mask"].shape
            axes = tuple(n for n in range(3) if shape[n] == 1 and mask.shape[n] > 1)
            found["mask"] = (fl.total(mask, axes) if axes else mask).reshape(a["mask"].shape)
        return {name: gradient for name, gradient in found.items() if name in a}


NOT_FLOATS = ("lengths", "reverse", "hold", "norm", "graph")
"""The entries of a case that are no arrays of floats."""


def evaluate_graph(graph: Any, case: Call, cotangents: Tensors | None, fl: Rounding) -> tuple[Tensors, Tensors]:
    """Run a cell's graph over a sequence in one direction. Return (outputs, gradients) as dicts of float64 arrays. The
    outputs are h [T, B, H], hT [B, H] and, if the cell has C states besides h, c [T, B, C H] and cT [B, C H]. There is
    one gradient for each array of the case, and none if `cotangents` is None.

    graph: a `CellGraph`. case: a dict of the call's arrays and options, such as x, Wh and lengths. fl: how results are
    rounded (`Rounding`).
    """
    with np.errstate(all="ignore"):
        run = Run(graph, case, fl)
        outputs = run.forward()
        return outputs, {} if cotangents is None else run.backward(cotangents)


def comparison_distance(graph: Any, case: Call) -> float:
    """Return how near a call comes to a point where rounding can make a result or its slope jump. The distance is
    the smallest of these: the difference between the two operands of a comparison, a maximum or a minimum; the
    distance from the argument of floor, ceil, round, sign or abs, or from the quotient of a remainder's operands, to
    the nearest point where this function or its slope jumps."""
    with np.errstate(all="ignore"):
        run = Run(graph, case, Rounding(np.float64))
        run.forward()
        nearest = np.inf
        for values in run.values.values():
            # Also compute the nodes that only the gradient needs, but none that depends on a gradient.
            run.compute(values, [n for n in range(len(graph.nodes)) if not reads_gradient(graph, n)])
            for n, (op, args, _) in enumerate(graph.nodes):
                if n in values and op in COMPARISONS:
                    nearest = min(nearest, np.abs(values[args[0]] - values[args[1]]).min())
                elif n in values and op in ("floor", "ceil"):
                    nearest = min(nearest, np.abs(values[args[0]] - np.rint(values[args[0]])).min())
                elif n in values and op == "round":
                    nearest = min(nearest, np.abs(values[args[0]] - np.floor(values[args[0]]) - 0.5).min())
                elif n in values and op in ("sign", "abs"):
                    nearest = min(nearest, np.abs(values[args[0]]).min())
                elif n in values and op == "rem":
                    quotient = values[args[0]] / values[args[1]]
                    nearest = min(nearest, np.abs(quotient - np.rint(quotient)).min())
        return float(nearest)


def reads_gradient(graph: Any, n: int) -> bool:
    """Return whether node n depends on a gradient of the new states, which is known in the backward pass only."""
    op, args, value = graph.nodes[n]
    return (op == "input" and value[0] == "d") or any(reads_gradient(graph, k) for k in args)
