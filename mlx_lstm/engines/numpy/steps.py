"""The steps of every cell on the engine `numpy`: one step forward and one step backward, generated from the cell's
graph. The code is generated once for each kind of call, and a call gives it the arrays on which it runs.

Every array of a step is feature-major, [n H, B], so that each gate and each state is one contiguous block.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from re import findall
from typing import Any

import numpy as np

from ..cell_graph import CellGraph, needed
from ..cell_tracer import graph_of
from ..cells import AnyCell
from ..problem import Problem
from .arrays import Array, Views, chunk_steps, columns_buffer, matrix, steps_of
from .products import JoinedProduct, SeparateProducts, TransposedProduct, WeightGradients, in_blocks, input_products
from .statements import UFUNCS, Place, Writer, places, with_reciprocals

Build = Callable[..., Callable[..., None]]


@cache
def constant(value: float, dtype: np.dtype) -> Array:
    """Return a number as a NumPy array, which nobody may change. With a Python number instead, NumPy would create an
    array at every call. In a small step this takes half as long as the addition itself."""
    return np.array(value, dtype)


def function_of(code: Writer, parameters: str, fixed: Iterable[str], before: Sequence[str] = ()) -> Build:
    """Return the function build(H, B, dtype, fixed), which returns the function step(parameters). A call of `step` runs
    the statements `before` and those of `code` on arrays of this dtype with H hidden units and B batch items.

    fixed: the names of further arrays that the statements use, the same arrays in every call of `step`.
    """
    words = {*findall(r"\w+", " ".join([*code.lines, *before])), *(array for array, _, _ in code.views)}
    once, unpacked, own = list[str](), list[str](), {*code.scratch, *fixed}
    for (array, start, stop), name in code.views.items():
        (once if array in own else unpacked).append(f"{name} = {array}[{start} * H : {stop} * H]")
    made = [f"{name} = empty(({n} * H, B), {'bool' if b else 'dtype'})" for name, (n, b) in code.scratch.items()]
    made += [f"{name} = constant({value!r}, dtype)" for name, value in code.constants.items() if name in words]
    given = [f"{name} = fixed['{name}']" for name in fixed if name in words]
    body = "\n        ".join([*unpacked, *before, *code.lines, "pass"])
    start = "\n    ".join([*given, *made, *once])
    text = f"def build(H, B, dtype, fixed):\n    {start}\n    def step({parameters}):\n        {body}\n    return step\n"
    space: dict[str, Any] = {name: getattr(np, name) for name in (*UFUNCS.values(), "copyto", "fmin", "empty", "matmul")}
    space |= {"constant": constant, "inf": np.inf, "nan": np.nan}
    # The statements were generated from a graph of numbered nodes, so they contain no text that the caller wrote.
    exec(compile(text, "<a cell>", "exec"), space)  # nosec B102
    return space["build"]


def negatable(graph: CellGraph, letters: str) -> str:
    """Return the letters of the gates whose preactivation z is read only by one sigmoid, before or after something is
    added to it. `JoinedProduct` can compute -z instead of z for these gates. The sigmoid 1 / (1 + exp(-z)) then need
    not negate z, which saves a pass over memory."""
    order = needed(graph.nodes, [*graph.forward, *graph.saved])
    found = ""
    for k in range(0 if graph.apart else graph.gates):
        n = graph.number.get(f"x{k}")
        for op in ("add", "sigmoid"):
            uses = [m for m in order if n in graph.nodes[m].args]
            if n in (*graph.saved, *graph.forward) or len(uses) != 1 or graph.nodes[uses[0]].op not in (op, "sigmoid"):
                break
            n = uses[0]
            if graph.nodes[n].op == "sigmoid":
                found += letters[k]
                break
    return found


@lru_cache(256)
def forward_function(
    graph: CellGraph, letters: str, order: str, negated: str, saves: bool, recurrent: bool, streamed: bool, before: tuple[str, ...]
) -> Build:
    """Return the function that builds a forward step: step(operand, xs, s0, c_prev, y, c, n0).

    The step reads these arrays; z and us are fixed, the same in every call:

        z [G H, B]     the preactivations, or only their recurrent part if `graph.apart`
        us [U H, B]    the inputs of the step
        xs [G H, B]    the input's part of the preactivations, if z does not contain it
        s0, c_prev     h and the other states before the step

    and writes

        n0, c          h and the other states after the step
        y              the values that the backward pass needs, if `saves`

    letters, order: the gates in the order of the cell, and in their order in z. negated: the gates whose rows of z are
    negated. recurrent: whether h is multiplied by Wh. streamed: whether c is the same array as c_prev. before: the
    statements that compute z.

    Without `saves` no backward pass follows. Such a step takes less time, because it divides by 1 / sigmoid(z) = 1 +
    exp(-z) where it would otherwise multiply by sigmoid(z).
    """
    nodes = graph.nodes if saves else with_reciprocals(graph.nodes, graph.forward)
    z = "xs" if graph.apart or not recurrent else "z"
    at = {f"x{k}": Place(z, order.index(letter)) for k, letter in enumerate(letters)}
    at |= {f"p{k}": Place("z", order.index(letter)) for k, letter in enumerate(letters)}
    states = [Place("s0", 0), *places("c" if streamed else "c_prev", graph.states - 1)]
    at |= {f"s{k}": place for k, place in enumerate(states)}
    at |= {f"u{k}": place for k, place in enumerate(places("us", graph.inputs))}
    at |= {f"w{k}": place for k, place in enumerate(places("w", graph.params))}
    at |= {name: Place(name, 0) for name in ("i0", "k0", "W0", "W0T")}
    known = {n: at[name] for name, n in graph.number.items() if name in at}
    targets = [*zip(graph.saved, places("y", len(graph.saved)), strict=True)] if saves else []
    targets += zip(graph.forward, [Place("n0", 0), *places("c", graph.states - 1)], strict=True)
    carried = graph.states - 1
    sizes = {"z": graph.gates, "xs": graph.gates, "us": graph.inputs, "w": graph.params, "y": len(graph.saved)}
    sizes |= {"c": carried, "c_prev": carried} | dict.fromkeys(("s0", "n0", "i0", "k0", "W0", "W0T"), 1)
    minus = [graph.number[f"x{k}"] for k, letter in enumerate(letters) if letter in negated]
    code = Writer(nodes, known, targets, sizes, ["z"], ["c", "n0"], minus)
    fixed = ["z", "us", "w", "k0", "W0T", "weights", "product", "weights1", "product1", "z_n", "bhn"]
    return function_of(code, f"{'i0' if 'i0' in graph.number else 'operand'}, xs, s0, c_prev, y, c, n0", fixed, before)


class Step:
    """One forward step of a cell. `run` is the generated function (see `forward_function`). Before each step of a user's
    cell the caller writes the step's inputs to `us` [U H, B]: U inputs for each of H hidden units and B batch items."""

    def __init__(self, problem: Problem, v: Views, mask: Array | None, streamed: bool = False):
        """Allocate the arrays that every step overwrites. streamed: the steps arrive one at a time
        (`engines.numpy.stream`)."""
        cell, (_, B, H, _), dtype = problem.cell, problem[:4], v["x"].dtype
        graph = graph_of(cell, v, problem.return_gates)
        letters, recurrent = cell.gate_order, cell.recurrent
        negated = negatable(graph, letters) if recurrent else ""
        self.apart: bool = graph.apart
        self.products: JoinedProduct | SeparateProducts = (
            SeparateProducts(problem, v, mask) if graph.apart else input_products(problem, v, mask, negated, streamed)
        )
        z = np.empty((cell.gates * H, B), dtype)
        self.us: Array = np.empty((graph.inputs * H, B), dtype)
        fixed: dict[str, Any] = {"z": z, "us": self.us} | constants_of(graph, cell, v, B)
        before = []
        if recurrent:
            for n, rows in enumerate(rows_of_product(cell, H)):
                weights = in_blocks(self.products.weights[rows], B, streamed)
                name = str(n or "")
                fixed |= {f"weights{name}": weights, f"product{name}": z[rows].reshape(*weights.shape[:-1], -1)}
                before.append(f"matmul(weights{name}, operand, product{name})")
            if not graph.apart and isinstance(self.products, SeparateProducts):
                before.append("add(z, xs, z)")
        if "bhn" in v:
            fixed |= {"z_n": z[cell.block("n", H)], "bhn": np.repeat(v["bhn"][:, None], B, axis=1)}
            before.append("add(z_n, bhn, z_n)")
        if "i0" in graph.number:
            before = [line.replace("operand", "i0") for line in before]
        saves = problem.training or problem.return_gates
        order, negated = self.products.order, self.products.negated
        build = forward_function(graph, letters, order, negated, saves, recurrent, streamed, tuple(before))
        self.run: Callable[..., None] = build(H, B, dtype, fixed)


def constants_of(graph: CellGraph, cell: AnyCell, v: Views, B: int) -> dict[str, Any]:
    """Return the arrays that a step reads and that are the same at every step: w [V H, B], the parameters repeated over
    the batch, k0, the limit of c, and the matrix W0 with its transpose."""
    found: dict[str, Any] = {"w": np.repeat(v[cell.params][:, None], B, axis=1)} if graph.params else {}
    if "k0" in graph.number:
        found["k0"] = np.array(cell.cell_clip, v["x"].dtype)
    if graph.operand() is not None:
        found["W0T"] = matrix(v["Wp"]) if "Wp" in v else matrix(v["Wh"])[cell.block("n", len(v["Wh"]) // 3)]
        found["W0"] = found["W0T"].T
    return found


def rows_of_product(cell: AnyCell, H: int) -> list[slice]:
    """Return the rows of Wh that multiply h: all, or those of the gates r and z if the reset comes before the
    candidate's product. Two blocks that are neighbours are one slice."""
    if cell.op != "gru" or cell.reset == "after":
        return [slice(0, cell.gates * H)]
    first, second = sorted((cell.block("r", H), cell.block("z", H)), key=lambda rows: rows.start)
    return [slice(first.start, second.stop)] if first.stop == second.start else [first, second]


@lru_cache(256)
def backward_function(graph: CellGraph, is_users: bool) -> tuple[Build, tuple[int, ...]]:
    """Return (build, other). build: a function that builds a backward step. other: the numbers of the gates whose
    input part and recurrent part have different gradients, such as a GRU's candidate (only if `graph.apart`).

    The built function is step(y, s0, c_prev, n0, c, d0, dc, dz, dx, e, m, q, i0). The arrays us, du, dw, direct and di
    are fixed: they are the same in every call. The function reads

        y            the values that the forward pass saved
        s0, c_prev   h and the other states before the step
        n0, c        h and the other states after the step
        us           the inputs of the step
        d0, dc       the gradients of h and of the other states after the step
        e            the gradients of the gates
        q            the recurrent products of the gates in `graph.recomputed()`
        i0           h times the mask

    and writes

        dz, dx       the gradients of the recurrent parts of all gates, and of the input parts of the gates in `other`
        direct       the part of the gradient of the h before the step that bypasses the recurrent product
        di           the part of the gradient of h times the mask that bypasses the product
        dc           the gradients of the other states before the step
        m            the operand of the step's second product
        du, dw       the gradients of the inputs and of the parameters

    and may overwrite d0.
    """
    carried = graph.states - 1
    at = {f"{letter}0": Place(f"{letter}0", 0) for letter in "sdikW"} | {"W0T": Place("W0T", 0)}
    for letter, array, first, count in (
        *(("s", "c_prev", 1, carried), ("d", "dc", 1, carried), ("u", "us", 0, graph.inputs)),
        *(("w", "w", 0, graph.params), ("e", "e", 0, graph.gates)),
    ):
        at |= {f"{letter}{first + place.row}": place for place in places(array, count)}
    at |= {f"p{k}": Place("q", place) for place, k in enumerate(graph.recomputed())}
    known = {n: Place("c", k - 1) if k else Place("n0", 0) for n, k in graph.known_after().items()}
    known |= dict(zip(graph.saved, places("y", len(graph.saved)), strict=True))
    known |= {n: at[name] for name, n in graph.number.items() if name in at}
    x, p = graph.gradients("x"), graph.of_product()
    other = tuple(k for k in range(graph.gates) if x[k] != p[k])
    targets = [*zip(p, places("dz", graph.gates), strict=True)]
    targets += [(x[k], Place("dx", place)) for place, k in enumerate(other)]
    targets += zip(graph.gradients("s")[1:], places("dc", carried), strict=True)
    targets += [(graph.gradients("s")[0], Place("direct", 0))] if passes_h(graph) else []
    targets += [(n, Place("di", 0)) for n in graph.gradients("i")]
    targets += zip(graph.gradients("u"), places("du", graph.inputs), strict=True)
    targets += zip(graph.gradients("w"), places("dw", graph.params), strict=True)
    targets += [(n, Place("m", 0)) for n in [graph.operand()] if n is not None]
    sizes = {"y": len(graph.saved), "c_prev": carried, "c": carried, "dc": carried, "us": graph.inputs}
    sizes |= {"du": graph.inputs, "w": graph.params, "dw": graph.params, "e": graph.gates, "dz": graph.gates}
    sizes |= {"dx": len(other), "q": len(graph.recomputed())}
    sizes |= dict.fromkeys(("s0", "d0", "i0", "k0", "W0", "W0T", "n0", "direct", "di", "m"), 1)
    code = Writer(graph.nodes, known, targets, sizes, ["dc", "d0"], ["dc", "direct", "di"], squares=not is_users)
    fixed = ["us", "du", "w", "dw", "direct", "di", "W0", "W0T", "k0"]
    return function_of(code, "y, s0, c_prev, n0, c, d0, dc, dz, dx, e, m, q, i0", fixed), other


def passes_h(graph: CellGraph) -> bool:
    """Return whether a part of the gradient of h_prev bypasses the recurrent product."""
    node = graph.nodes[graph.gradients("s")[0]]
    return node.op != "const" or node.value != 0


class StepBackward:
    """One backward step of a cell. It also collects what the weight gradients need.

    A preactivation is the sum of a recurrent part (Wh h) and an input part (Wx x). `dz` [G H, n] collects the gradients
    of the recurrent parts of G gates with H units each. It has n columns, one for each step and batch item of a chunk.
    For some gates, such as a GRU's candidate, the gradient of the input part is a different one, and `dx` collects it.
    First `end_chunk` computes the gradient of Wh from `dz`. Then it copies `dx` to these gates' rows of `dz`, from
    which the gradients of Wx and x are computed.

    A projection, or the candidate's product of a GRU with reset "before", is a second product in the step. `m` collects
    what its weight multiplies.
    """

    def __init__(self, problem: Problem, v: Views, saved: Views, exposes: bool):
        """Allocate the arrays that every backward step overwrites. saved: the outputs h, c and gates [T, B, K H] of the
        forward pass. exposes: whether the gates have cotangents."""
        cell, (_, B, H, P), dtype = problem.cell, problem[:4], v["x"].dtype
        graph = graph_of(cell, v, exposes)
        build, self.other = backward_function(graph, cell.op == "pointwise")
        self.H, self.inputs, self.params = H, v.get("inputs"), cell.params
        self.reads_h: bool = graph.reads("s0") or "i0" in graph.number
        self.saved_at: Callable[[int], Any] = steps_of(saved["gates"]) if "gates" in saved else lambda t: None
        self.h_at: Callable[[int], Any] = steps_of(saved["h"]) if graph.reads_after(0) else lambda t: None
        n = chunk_steps(problem) * B
        self.dz: Array = columns_buffer(cell.gates * H, n, B, dtype)
        self.dx: Array = columns_buffer(len(self.other) * H, n, B, dtype)
        self.m: Array | None = columns_buffer(H, n, B, dtype) if graph.operand() is not None else None
        self.dh: Array | None = columns_buffer(P, n, B, dtype) if "Wp" in v else None
        self.q: Array | None = columns_buffer(len(graph.recomputed()) * H, n, B, dtype) if graph.recomputed() else None
        self.by_column: list[Array] = [a for a in (self.dz, self.dx, self.m, self.dh, self.q) if a is not None]
        self.rows: list[slice] = rows_of_product(cell, H) if cell.recurrent else []
        Wh: Any = matrix(v["Wh"]) if cell.recurrent else None
        self.through_Wh = TransposedProduct(Wh, problem) if self.rows == [slice(0, cell.gates * H)] else None
        self.Wh_T: list[Array] = [Wh[rows].T for rows in self.rows]
        self.n: slice = cell.block("n", H) if cell.op == "gru" else slice(0, 0)
        self.Wh_n, self.bhn = Wh[self.n] if self.q is not None else None, v.get("bhn")
        fixed = constants_of(graph, cell, v, B)
        self.direct: Array | None = np.empty((H, B), dtype) if passes_h(graph) else None
        self.di: Array | None = np.empty((H, B), dtype) if graph.gradients("i") else None
        self.us, self.du = (np.empty((graph.inputs * H, B), dtype) for _ in range(2))
        self.dw: Array = np.empty((graph.params * H, B), dtype)
        self.dparams: Array = np.zeros((graph.params * H, B), dtype)  # it is summed over the batch after the last step
        fixed |= {"us": self.us, "du": self.du, "dw": self.dw, "direct": self.direct, "di": self.di}
        self.step: Callable[..., None] = build(H, B, dtype, fixed)

    def begin_chunk(self, start: int, h_prev: Array, h_in: Array) -> None:
        """Begin a chunk of steps, the first of which is step `start`. h_prev [steps, B, H]: h before each step. h_in
        [steps * B, H]: h_prev times the mask. If the backward pass reads the candidate's product q = Wh_n h_in + bhn,
        compute it for all steps of the chunk."""
        self.start, self.h_prev, self.h_in = start, h_prev, h_in
        if self.q is not None:
            q = np.matmul(self.Wh_n, matrix(h_in).T, out=self.q[:, : len(h_in)])
            if self.bhn is not None:
                q += self.bhn[:, None]

    def __call__(
        self, t: int, columns: slice, c_prev: Array | None, c: Array | None, dh: Array, dc: Array, dgates: Array | None
    ) -> None:
        """Compute step t backward. Write its columns of dz and dx (the gradients of the preactivations) and `direct`,
        the part of the gradient of h_prev that bypasses the recurrent product.

        Overwrite dh, the gradient of the h after the step, with the gradient of the h that entered the recurrent
        product. Overwrite dc, the gradients of the other states after the step, with those before it. c_prev, c: the
        other states before and after the step. dgates: the gradients of the gates, or None.
        """
        s0 = i0 = m = q = dx = None
        if self.reads_h:
            s0, i0 = self.h_prev[t - self.start].T, self.h_in[columns].T
        if self.inputs is not None:
            np.copyto(self.us, self.inputs[t].T)
        if self.other:
            dx = self.dx[:, columns]
        if self.m is not None:
            m = self.m[:, columns]
        if self.q is not None:
            q = self.q[:, columns]
        if self.dh is not None:
            self.dh[:, columns] = dh
        dz = self.dz[:, columns]
        self.step(self.saved_at(t), s0, c_prev, self.h_at(t), c, dh, dc, dz, dx, dgates, m, q, i0)
        if self.through_Wh is not None:
            self.through_Wh(dz, dh)
            return
        dh[...] = 0 if self.di is None else self.di
        for rows, Wh_T in zip(self.rows, self.Wh_T, strict=True):
            dh += np.matmul(Wh_T, dz[rows])

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
        """Add the terms of one chunk of time steps to the weight gradients in `products`. h_in [n, P]: the h that
        entered the recurrent product at each step of the chunk."""
        n, H, h_in = len(h_in), self.H, matrix(h_in)
        for rows in self.rows:
            whole = rows.stop == len(self.dz) and rows.start == 0
            products.accumulate("Wh", self.dz[rows, :n], h_in, *([] if whole else [rows]))
        if self.m is not None and self.dh is None:
            products.accumulate("Wh", self.dz[self.n, :n], self.m[:, :n].T, self.n)
        elif self.m is not None and self.dh is not None:
            products.accumulate("Wp", self.dh[:, :n], self.m[:, :n].T)
        if self.bhn is not None:
            products.accumulate("bhn", self.dz[self.n, :n], np.ones(n, self.dz.dtype))
        for place, k in enumerate(self.other):
            self.dz[k * H : (k + 1) * H, :n] = self.dx[place * H : (place + 1) * H, :n]
