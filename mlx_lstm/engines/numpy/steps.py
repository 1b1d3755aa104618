"""The steps of every cell on the engine `numpy`: one step forward and one step backward, generated from the cell's
graph. The code is generated once for each kind of call, and a call gives it the arrays on which it runs.

Every array of a step is feature-major, [n H, B]: n blocks of H units, so that each gate and each state is contiguous. A
value of the graph lies in one block, its `Place` (the array's name, the number of the block). `Writer` (`statements`)
writes the statements of a graph. A plan says how the step of a cell is computed. H: units, B: batch items, G: gates, P:
the width of h, C: states besides h, U, V: the inputs of a step and the parameters of a user's cell. v: the arrays of
the call by name.

Names of the graph's inputs, a letter and a number: x preactivations (or only the input's part, if the cell gets both
parts `apart`), p their recurrent part, s states (s0 is h), u inputs of the step, w parameters, d gradients of the new
states, e gradients of the gates, i0 h times the mask, k limits, W0 the matrix of a second product (W0T its transpose),
N0 the layer normalisation of c. Of a graph: gradients("x"): the nodes of the gradients of these inputs; of_product():
those of the gates' recurrent parts; saved, forward: the nodes that the forward pass saves, and those of the new states.

The arrays of generated code: z preactivations, xs their input's part, y what the forward pass saves, c_prev and c the
states besides h before and after the step, n0 the h after it, us and w the inputs and parameters. Backward: dz, dx,
dc, du, dw gradients of these; the other names are described at `backward_function`. An array of a chunk of steps has
one column per step and batch item; `columns` are those of one step. ALONE: the arrays of one block. WIDE: those as
wide as a projected h. FEATURE_MAJOR transposes [T, B, .] to [T, ., B].
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, lru_cache
from re import findall
from typing import Any

import numpy as np

from ..cell_graph import CellGraph, needed
from ..cell_tracer import graph_of
from ..cells import AnyCell, form_of
from ..problem import Problem
from .norms import (
    InputNorm,
    InputNormOfSteps,
    InputProductNorm,
    Normalisation,
    NormBackward,
    NormByFactors,
    NormOfC,
    RecurrentNorm,
    by_factors,
    input_norm_of,
    kept_rows,
    norm_of_preactivations,
    norm_of_state,
    with_centred_weights,
)
from .products import (
    FEATURE_MAJOR,
    Array,
    JoinedProduct,
    SeparateProducts,
    Views,
    WeightGradients,
    chunk_steps,
    columns_buffer,
    in_blocks,
    input_products,
    matrix,
    transposed_product,
)
from .statements import UFUNCS, Place, Rewrites, Store, Writer, places, quotients

Build = Callable[..., Callable[..., None]]
"""The type of a generated function build(H, B, dtype, ...), which allocates memory and returns the function step."""


@cache
def constant(text: str, dtype: np.dtype) -> Array:
    """Return a number as a NumPy array, which nobody may change. With a Python number instead, NumPy would create an
    array at every call. In a small step this takes half as long as the addition itself. The number is a text, because
    0.0 and -0.0 would be equal keys of the cache."""
    return np.array(float(text), dtype)


FUNCTIONS = (*UFUNCS.values(), "sign", "copyto", "clip", "fmin", "fmod", "remainder", "empty", "matmul")
"""The functions of NumPy that generated code calls."""

NAMES: dict[str, Any] = {"constant": constant} | {name: getattr(np, name) for name in FUNCTIONS}
"""The names that generated code uses."""


def function_of(
    code: Writer, given: str, fixed: Iterable[str], parameters: str, before: Sequence[str], after: Sequence[str] = ()
) -> Build:
    """Return the function build(H, B, dtype, given, more), which returns the function step(parameters). A call of
    `step` runs the statements `before`, those of `code` and `after` on arrays of this dtype with H hidden units and B
    batch items.

    given, fixed: the names of further arrays that the statements use, the same arrays in every call of `step`. Those of
    `given`, divided by commas, are arguments of `build`; those of `fixed` are in its dict `more`, if the call has them.
    parameters: the parameters of `step`, as text.
    """
    lines = [*before, *code.lines, *after]
    # code.views: {(array, first block, last block + 1): the name of this view}. code.scratch: {name: Scratch}.
    # The names in the statements, and the arrays of which they read views: what is not among them is not made.
    words = {*findall(r"\w+", " ".join(lines)), *(array for array, _, _ in code.views)}
    # A view of an array that is the same in every call is made once; the other views are made at every call.
    once, unpacked = list[str](), list[str]()
    own = {*code.scratch, *fixed, *given.split(", ")}
    for (array, start, stop), name in code.views.items():
        (once if array in own else unpacked).append(f"{name} = {array}[{start} * H : {stop} * H]")
    # made: the statements that allocate or fetch arrays, once. body: the statements of each call of `step`.
    made = [f"{name} = more['{name}']" for name in fixed if name in words]
    for name, (n, is_bool, is_wide) in code.scratch.items():  # n blocks; is_wide: as wide as a projected h, P
        rows = "more['P']" if is_wide else f"{n} * H"
        made.append(f"{name} = empty(({rows}, B), {'bool' if is_bool else 'dtype'})")
    made += [f"{name} = constant('{value!r}', dtype)" for name, value in code.constants.items() if name in words]
    body = "\n        ".join([*before, *unpacked, *code.lines, *after, "pass"])
    start = "\n    ".join([*made, *once, ""])
    text = (
        f"def build(H, B, dtype, {given}, more):\n    {start}def step({parameters}):\n        {body}\n    return step\n"
    )
    made_here: dict[str, Any] = {}  # what the text defines: the function `build`
    # The statements were generated from a graph of numbered nodes, so they contain no text that the caller wrote.
    exec(compile(text, "<a cell>", "exec"), NAMES, made_here)  # noqa: S102
    return made_here["build"]


class Plan:
    """What the steps of a cell need to know before they run: the cell's graph, and what was found out about it."""

    def __init__(self, cell: AnyCell, names: Collection[str], exposes: bool):
        """Read the cell's graph. names: which of the arrays "peephole" and "Wp" the call has. exposes: whether the
        caller gets the gates (forward), or whether they have cotangents (backward)."""
        graph = graph_of(cell, names, exposes)
        self.cell, self.graph = cell, graph
        # rows: the blocks of Wh that multiply h. whole: whether these are all blocks, in one product.
        self.rows: list[tuple[int, int]] = rows_of_product(cell) if cell.recurrent else []
        self.whole: bool = cell.recurrent and self.rows == [(0, cell.gates)]
        # second: whether a step has a second product: the one with the projection if `projects`, else with the rows of
        # a GRU's candidate. negatable: the gates whose sigmoid may be computed from -z.
        self.second: bool = graph.has_product()
        self.projects: bool = "Wp" in names
        self.negatable: str = negatable(graph, cell.gate_order) if cell.recurrent else ""
        # The numbers of the gates whose input part and recurrent part have different gradients, such as a GRU's
        # candidate. Both lists below have one node per gate: the gradient of its one part, and that of the other.
        self.other: tuple[int, ...] = tuple(
            [k for k, (x, p) in enumerate(zip(graph.gradients("x"), graph.of_product(), strict=True)) if x != p]
        )
        # passes_h: whether a part of the gradient of h_prev, `direct`, bypasses the recurrent product. reads_h: whether
        # the backward pass reads the h after a step (state 0); holds_h: whether it holds a copy of the h before it.
        direct = graph.nodes[graph.gradients("s")[0]]
        self.passes_h: bool = direct.op != "const" or direct.value != 0
        self.reads_h: bool = graph.reads_after(0)
        self.holds_h: bool = self.passes_h or graph.reads("s0")
        self.recomputed: list[int] = graph.recomputed  # gates whose recurrent product is computed again


plan_of_form = lru_cache(128)(Plan)
"""`Plan(cell, names, exposes)` with a cache, for a cell without the numbers that generated code gets as arguments."""


@lru_cache(128)
def plan_of(cell: AnyCell, names: tuple[str, ...], exposes: bool) -> Plan:
    """Return the plan of a cell. Cells that differ only in numbers such as their clips share one.

    names: those of the arrays "peephole" and "Wp" that the call has (`graph_arrays`). exposes: for a forward pass,
    whether the caller gets the gates; for a backward pass, whether they have cotangents.
    """
    return plan_of_form(form_of(cell), names, exposes)


def graph_arrays(v: Views) -> tuple[str, ...]:
    """Return the names of those arrays of a call on which the graph of its cell depends."""
    return tuple([name for name in ("peephole", "Wp") if name in v])


def negatable(graph: CellGraph, letters: str) -> str:
    """Return the letters of the gates whose preactivation z is read only by one sigmoid, directly or after something is
    added to it. letters: one for each gate, in order. `JoinedProduct` can compute -z instead of z for these gates. The
    sigmoid 1 / (1 + exp(-z)) then need not negate z, which saves a pass over memory. A graph that reads the two parts
    of z `apart` has no such gates: no product computes both."""
    order, found = needed(graph.nodes, [*graph.forward, *graph.saved]), ""  # order: the nodes of the forward pass
    for k in range(0 if graph.apart else graph.gates):
        # n: a node, first the preactivation of gate k, then the only node that uses it, and so on. ops: what these do.
        n, ops = graph.number.get(f"x{k}"), []
        while n not in (*graph.saved, *graph.forward) and ops[-1:] != ["sigmoid"] and len(ops) < 2:
            # Unless exactly one node uses n, the loop ends: n becomes a new state, which is in graph.forward.
            uses = [m for m in order if n in graph.nodes[m].args]
            n = uses[0] if len(uses) == 1 else graph.forward[0]
            ops.append(graph.nodes[n].op if len(uses) == 1 else "")
        found += letters[k] if ops in (["sigmoid"], ["add", "sigmoid"]) else ""
    return found


def rows_of_product(cell: AnyCell) -> list[tuple[int, int]]:
    """Return the blocks of Wh that multiply h, as (first, last + 1): all, or those of the gates r and z if the reset
    comes before the candidate's product."""
    if cell.reset != "before":
        return [(0, cell.gates)]
    # r and z may be neighbours in gate_order or not: one range of blocks, or two.
    first, second = sorted(cell.gate_order.index(gate) for gate in "rz")
    return [(first, second + 1)] if second == first + 1 else [(first, first + 1), (second, second + 1)]


def inputs_in(array: str, count: int, letter: str, first: int = 0) -> dict[str, Place]:
    """Return the places of inputs of a graph by name: the `count` inputs with this letter and the numbers from `first`
    on lie in the `count` blocks of the array."""
    return {f"{letter}{first + k}": place for k, place in enumerate(places(array, count))}


ALONE = ("s0", "n0", "i0", "d0", "k0", "k1", "W0", "W0T", "N0", "direct", "di", "m", "dh")
"""The names in generated code that are one block, or no array of blocks at all, such as a limit."""

WIDE = ("n0", "d0", "dh")
"""The arrays that have the width of a projected h: h after a step, its gradient, and this gradient before the clip of
h."""


@lru_cache(256)
def forward_function(plan: Plan, order: str, negated: str, saves: bool, adds: bool, bhn: bool, of: str | None) -> Build:
    """Return the function that builds a forward step: step(operand, xs, s0, c_prev, y, c, n0, kept=None).

    The step reads these arrays; z and us are fixed, the same in every call:

        operand        the array that the recurrent weights multiply
        z [G H, B]     scratch memory for the preactivations, or only for their recurrent part if `graph.apart`
        us [U H, B]    the inputs of the step
        xs [G H, B]    the input's part of the preactivations, unless the product with `operand` includes it
        s0, c_prev     h [P, B] and the other states [C H, B] before the step

    and writes

        n0, c          h and the other states after the step
        y              the values that the backward pass needs, if `saves`
        kept           what the backward pass of layer normalisation needs, unless it is None

    order: the order of the gates in z. negated: the gates whose rows of z are negated. adds: whether xs is added to z
    at once. bhn: whether bhn is added to the candidate's product. of: what the step normalises, as in `NormOptions.of`:
    it calls `normalise` on z before or after xs is added. With a norm of c it calls N0.
    """
    graph, letters, carried = plan.graph, plan.cell.gate_order, plan.graph.states - 1
    # x: where the preactivations (or their input parts) lie. at: {name of an input of the graph: its place}.
    x = "z" if plan.rows and not graph.apart else "xs"
    at = inputs_in("c_prev", carried, letter="s", first=1) | inputs_in("us", graph.inputs, letter="u")
    at |= inputs_in("w", graph.params, letter="w")
    at |= {name: Place(name, 0) for name in ("s0", "k0", "k1", "W0T", "N0")}
    for k, letter in enumerate(letters):
        at |= {f"x{k}": Place(x, order.index(letter)), f"p{k}": Place("z", order.index(letter))}
    at["i0"] = Place("operand", 0)
    known = {n: at[name] for name, n in graph.number.items() if name in at}
    targets = [*zip(graph.saved, places("y", len(graph.saved)), strict=True)] if saves else []
    targets += zip(graph.forward, [Place("n0", 0), *places("c", carried)], strict=True)
    # known: where the graph's inputs lie. targets: where its results shall lie. sizes: the blocks of each array. minus:
    # the inputs of which -x is there. The store's lists: the arrays that may be overwritten, those for intermediate
    # results, and those as wide as a projected h.
    sizes = {"z": graph.gates, "xs": graph.gates, "us": graph.inputs, "w": graph.params, "y": len(graph.saved)}
    sizes |= {"c": carried, "c_prev": carried, "operand": 1} | dict.fromkeys(ALONE, 1)
    minus = [graph.number[f"x{k}"] for k, letter in enumerate(letters) if letter in negated]
    wide = WIDE if plan.projects else ()
    store, divided = Store(sizes, ["z"], ["c", "n0"], wide), quotients(graph.nodes, graph.forward)
    code = Writer(graph.nodes, known, targets, store, Rewrites(minus, divided=divided))
    before = [f"matmul(weights{n}, operand, product{n})" for n in range(len(plan.rows))]
    # The statements before those of the graph: the product, the norm and the sum with xs, in the order that the norm
    # wants, and bhn. A list times a bool is the list or [].
    normalise = ["normalise(z, z, kept)"] * (of is not None)
    before += ["add(z, xs, z)"] * adds + normalise if of == "sum" else normalise + ["add(z, xs, z)"] * adds
    before += ["add(z_n, bhn, z_n)"] * bhn  # z_n: the candidate's block of z
    # The arrays that are the same at every step. weights0 and product0 are the first product, weights1 and product1 a
    # second one, of a GRU with reset "before".
    fixed = ["us", "w", "k0", "k1", "W0T", "N0", "weights1", "product1", "z_n", "bhn", "normalise"]
    return function_of(code, "z, weights0, product0", fixed, "operand, xs, s0, c_prev, y, c, n0, kept=None", before)


class Step:
    """One forward step of a cell. `run` is the generated function (see `forward_function`). Before each step of a
    user's cell the caller writes the step's inputs to `us` [U H, B]: U inputs for each of H hidden units and B batch
    items."""

    def __init__(
        self, problem: Problem, v: Views, mask: Array | None, norms: Array | None = None, streamed: bool = False
    ):
        """Allocate the arrays that every step overwrites. mask [T, B, P]: factors on the h that enters the recurrent
        product, or None. norms [T, B, n]: memory for the n numbers per step and item that the backward pass of norms
        reads, if it runs. streamed: the steps arrive one at a time (`engines.numpy.stream`)."""
        (_, B, H, _, cell), dtype = problem[:5], v["x"].dtype
        # plan: how the step of the cell is computed; it depends on whether the call has peephole weights and Wp.
        plan = plan_of(cell, graph_arrays(v), problem.return_gates)
        self.apart: bool = plan.graph.apart
        self.by_factors: bool = False
        self.enter: Callable[[int, Array, Array], Any] | None = None
        """Writes to its last argument what h [P, B] of step t becomes when it enters the product; None: h itself."""
        if mask is not None:
            self.enter = lambda t, h, out: np.multiply(h, mask[t].T, out=out)
        # norm: of the recurrent product or the sum; of_input: of the input's product; norm_of_c: of c. `of` says what
        # the generated step normalises by `norm`; None: nothing, because there is no norm or it is a factor on h.
        norm = of_input = norm_of_c = None
        if cell.norm is not None:
            v, norm, of_input = self.prepare_norms(problem, v, streamed, norms)
            norm_of_c = norm_of_state(problem, v)
        of = cell.norm.of if cell.norm is not None and not self.by_factors else None
        # apart: the input's part must not be in one product with the recurrent part. negatable: the gates for which
        # this product may be -z. copies_h: whether the h that enters the product is another array than h.
        apart = self.apart or not cell.recurrent or of in ("product", "products") or of_input is not None
        negatable = plan.negatable if norm is None else ""
        copies_h = self.enter is not None
        self.products: Any = (
            SeparateProducts(problem, v, copies_h, of_input)
            if apart
            else input_products(problem, v, copies_h, negatable, streamed)
        )
        products, more = self.products, constants_of(plan, cell, v, B) | {"normalise": norm, "N0": norm_of_c}
        z = np.empty((cell.gates * H, B), dtype)
        # weights, product: the matrix that multiplies the operand, and where its product goes, a view of z.
        weights, product = None, z
        if plan.whole:
            weights = in_blocks(products.weights, B, streamed)
            product = z.reshape(*weights.shape[:-1], -1)  # z, divided like the weights
        elif plan.rows:  # a GRU with reset "before": one or two products, without the rows of the candidate
            rows = [slice(start * H, stop * H) for start, stop in plan.rows]
            (weights, product), *others = [(products.weights[of], z[of]) for of in rows]
            more |= {"weights1": others[0][0], "product1": others[0][1]} if others else {}
        if plan.graph.inputs:
            self.us: Array = np.empty((plan.graph.inputs * H, B), dtype)
            more["us"] = self.us
        if "bhn" in v:
            more |= {"z_n": z[cell.block("n", H)], "bhn": np.repeat(v["bhn"][:, None], B, axis=1)}
        # adds: whether the step adds the input's part to z. A `JoinedProduct` includes it already.
        adds = bool(plan.rows) and not self.apart and not isinstance(products, JoinedProduct)
        saves = problem.training or problem.return_gates
        build = forward_function(plan, products.order, products.negated, saves, adds, "bhn" in v, of)
        self.product: Array = product
        self.run: Callable[..., None] = build(H, B, dtype, z, weights, product, more)

    def prepare_norms(
        self, problem: Problem, v: Views, streamed: bool, norms: Array | None
    ) -> tuple[Views, Normalisation | None, InputNorm | InputNormOfSteps | None]:
        """Return the arrays as the products read them, and the norms of the preactivations and of the input's product,
        if the step computes them. In a stream the caller computes the input's part."""
        # A stream uses its weights so often that it pays to centre them: `centres` gets P as the number of steps.
        many = problem._replace(T=problem.P) if streamed else problem
        # rows: how many numbers the norms save per step and item. They tell by which of two ways the norms are
        # computed.
        rows = 0 if streamed else kept_rows(problem, v) if norms is None else norms.shape[2]
        self.by_factors = by_factors(problem, rows)
        v = with_centred_weights(many, v, self.by_factors)  # so that no step subtracts a mean, if that pays
        if not self.by_factors:
            return v, norm_of_preactivations(many, v), None if streamed else input_norm_of(problem, v)
        # By factors: the norm is a factor on the h that enters the product. multiply: the function that applies the
        # mask, or None; the factor is computed after it.
        forward, multiply = NormByFactors(problem, v, norms, rows), self.enter
        self.enter = forward.enter
        if multiply is not None:
            self.enter = lambda t, h, out: forward.enter(t, multiply(t, h, out), out)
        # rows: 2 if the input's product is normalised by factors, too, on x; 1 if not.
        return forward.arrays, None, input_norm_of(problem, forward.arrays) if rows == 1 else None


def constants_of(plan: Plan, cell: AnyCell, v: Views, B: int) -> dict[str, Any]:
    """Return the arrays that a step reads and that are the same at every step: w [V H, B], the V parameters per unit,
    repeated over the batch; k0 and k1, the limits of c and of a projected h; the matrix W0 of a second product with its
    transpose W0T; and the number P, the width of a projected h."""
    found: dict[str, Any] = {}
    if plan.graph.params:
        found["w"] = np.repeat(v[cell.params][:, None], B, axis=1)
    limits = {"k0": cell.cell_clip, "k1": cell.projection_clip}
    found |= {name: np.array(limit, v["x"].dtype) for name, limit in limits.items() if limit is not None}
    if plan.projects:
        found["P"] = len(v["Wp"])
    if plan.second:
        found["W0T"] = matrix(v["Wp"]) if plan.projects else matrix(v["Wh"])[cell.block("n", v["Wh"].shape[1])]
        found["W0"] = found["W0T"].T
    return found


def steps_of(sequence: Array) -> Callable[[int], Array]:
    """Return a function of t that gives step t of a sequence [T, B, .] as a contiguous array [., B]. For a
    feature-major sequence it is a view; else it is a copy that stays valid until step t + 2 or t - 2 is requested."""
    sequence = sequence.transpose(FEATURE_MAJOR)
    if sequence[0].flags.c_contiguous:
        return sequence.__getitem__
    # Two copies, of the steps `copied`; -1: none yet. Two, because a backward step reads steps t and t - 1 (or t + 1).
    copies, copied = np.empty((2, *sequence.shape[1:]), sequence.dtype), [-1, -1]

    def step(t: int) -> Array:
        if copied[t % 2] != t:
            copies[t % 2], copied[t % 2] = sequence[t], t
        return copies[t % 2]

    return step


@lru_cache(128)
def backward_function(plan: Plan, with_input: bool, by_weights: bool) -> Build:
    """Return the function that builds a backward step: step(own, t, columns, c_prev, c, d0, dc, e). with_input: whether
    the step computes the layer normalisation of the input's product. by_weights: whether the norm of the recurrent
    product is a `RecurrentNorm`.

    The step reads

        c_prev, c    the states other than h [C H, B] before and after step t
        d0, dc       the gradients of h [P, B] and of the other states [C H, B] after the step
        e            the gradients of the gates [G H, B]
        own          the object of class `StepBackward` with the other arrays

    and writes

        d0, dc       the gradients of the h in the recurrent product, and of the other states before the step
        dz, dx       the gradients of the recurrent parts of all gates [G H, B], and of the input parts of the gates in
                     `plan.other` (H rows each): `columns` of the arrays in `own`
        direct       the part of the gradient of the h before the step that bypasses the recurrent product [H, B]
        di           the part of the gradient of h times the mask that bypasses the product [H, B]
        m            `columns` of the operand of the step's second product [H, B]
        dh           `columns` of the gradient of a projected h before its clip [P, B]
        du, dw       the gradients of the inputs [U H, B] and of the parameters [V H, B]

    Last it calls through_Wh(dz, d0), which writes the product of Wh^T and dz to d0, and through_norm, the gradient of
    the norm of the recurrent product: before this product, or after it for a `RecurrentNorm`. q: the recurrent products
    of the gates in `plan.recomputed` (H rows each).
    """
    graph, carried, other = plan.graph, plan.graph.states - 1, plan.other
    at = inputs_in("c_prev", carried, letter="s", first=1) | inputs_in("dc", carried, letter="d", first=1)
    at |= inputs_in("us", graph.inputs, letter="u") | inputs_in("w", graph.params, letter="w")
    at |= inputs_in("e", graph.gates, letter="e") | {name: Place(name, 0) for name in ALONE}
    at |= {f"p{k}": Place("q", row) for row, k in enumerate(plan.recomputed)}
    # at: {name of an input of the graph: its place}.
    # known: the places of values that exist before the step: new states, what the forward pass saved, and the inputs.
    known = {n: Place("c", k - 1) if k else Place("n0", 0) for n, k in graph.known_after().items()}
    known |= dict(zip(graph.saved, places("y", len(graph.saved)), strict=True))
    known |= {n: at[name] for name, n in graph.number.items() if name in at}
    # targets: (node of a gradient, place into which the statements compute it).
    x, (s0, *others) = graph.gradients("x"), graph.gradients("s")
    targets = [*zip(graph.of_product(), places("dz", graph.gates), strict=True)]
    targets += [(x[k], Place("dx", row)) for row, k in enumerate(other)]
    targets += zip(others, places("dc", carried), strict=True)
    targets += [(s0, Place("direct", 0))] if plan.passes_h else []
    targets += [(n, Place("di", 0)) for n in graph.gradients("i")]
    targets += zip(graph.gradients("u"), places("du", graph.inputs), strict=True)
    targets += zip(graph.gradients("w"), places("dw", graph.params), strict=True)
    targets += [(graph.operand("W0T"), Place("m", 0))] if plan.second else []
    targets += [(graph.operand("W0"), Place("dh", 0))] if plan.projects else []
    sizes = {"y": len(graph.saved), "c_prev": carried, "c": carried, "dc": carried, "us": graph.inputs}
    sizes |= {"du": graph.inputs, "w": graph.params, "dw": graph.params, "e": graph.gates, "dz": graph.gates}
    sizes |= {"dx": len(other), "q": len(plan.recomputed)} | dict.fromkeys(ALONE, 1)
    squares = plan.cell.op != "pointwise"  # y (1 - y) of several gates at once, which a user's cell seldom has
    wide = WIDE if plan.projects else ()
    store = Store(sizes, ["dc", "d0"], ["dc", "direct", "di"], wide)
    code = Writer(graph.nodes, known, targets, store, Rewrites(squares=squares))
    # Fetch only the arrays that occur in the statements. read: the statement that fetches each. all_dz etc.: the arrays
    # of the whole chunk. saved_at, h_at: functions that return step t of what the forward pass saved.
    words = findall(r"\w+", " ".join([*code.lines, *(array for array, _, _ in code.views)]))
    read = {
        "y": "y = saved_at(t)", "n0": "n0 = h_at(t)", "i0": "i0 = own.h_in[columns].T",
        "s0": "s0 = own.h_prev[t - own.start].T", "us": "copyto(us, own.inputs[t].T)",
        **{name: f"{name} = all_{name}[:, columns]" for name in ("dz", "dx", "m", "q", "dh")},
    }  # fmt: skip
    if words.count("s0") > 1:  # a contiguous copy, because every operation on the view would be slower
        read["s0"] = "copyto(s0, own.h_prev[t - own.start].T)"
    normalises = plan.cell.norm is not None and plan.cell.norm.of is not None and not by_weights
    for name in [*["dz"] * normalises, *["dx"] * with_input]:
        read.pop(name)  # an array of one step, which `NormBackward` has
    # N0.is_kept = False: what the norm of c holds belongs to another step.
    before = [line for name, line in read.items() if name in words] + ["N0.is_kept = False"] * ("N0" in words)
    fixed = ["s0", "us", "du", "w", "dw", "direct", "di", "W0", "W0T", "N0", "k0", "k1"]
    fixed += ["all_dx", "all_m", "all_q", "all_dh", "through_norm"]
    fixed += ["dz"] * normalises + ["dx"] * with_input
    if words.count("s0") <= 1:
        fixed.remove("s0")
    # Last, turn the gradients of the recurrent product into the gradient of the h that Wh multiplied, in d0.
    if normalises:
        after = ["through_Wh(through_norm(t, columns), d0)"]
    elif plan.whole:
        after = ["through_Wh(dz, d0)"] + ["through_norm(t, columns, d0)"] * by_weights
    else:
        after = ["own.through_rows(dz, d0)" if plan.rows else "d0.fill(0)"]
    return function_of(
        code, "saved_at, h_at, all_dz, through_Wh", fixed, "own, t, columns, c_prev, c, d0, dc, e", before, after
    )


class StepBackward:
    """One backward step of a cell. It also collects what the weight gradients need. `run` is the generated function
    (see `backward_function`).

    A preactivation is the sum of a recurrent part (Wh h) and an input part (Wx x). `dz` [G H, n] collects the gradients
    of the recurrent parts of G gates with H units each. It has n columns, one for each step and batch item of a chunk.
    For some gates, such as a GRU's candidate, the gradient of the input part is a different one, and `dx` collects it.
    First `end_chunk` computes the gradient of Wh from `dz`. Then it copies `dx` to these gates' rows of `dz`, from
    which the gradients of Wx and x are computed.

    A projection, or the candidate's product of a GRU with reset "before", is a second product in the step. `m` [H, n]
    collects what its weight multiplies, and `dh` [P, n] the gradient of the projected h.
    """

    direct: Array | None = None
    """The part of the gradient of h_prev that bypasses the recurrent product, if there is one."""
    q: Array | None = None
    """The recurrent products of the gates in `plan.recomputed` at each step of a chunk: a GRU's candidate has one."""

    def __init__(self, problem: Problem, v: Views, saved: Views, exposes: bool):
        """Allocate the arrays that every backward step overwrites. saved: the outputs h, c and gates of the forward
        pass. gates [T, B, K H] has the K numbers per unit that this pass reads, mostly those of the gates. exposes:
        whether the gates have cotangents."""
        (_, B, H, P, cell), dtype = problem[:5], v["x"].dtype
        plan = self.plan = plan_of(cell, graph_arrays(v), exposes)
        # more: the arrays that the generated code gets by name.
        graph, more = plan.graph, constants_of(plan, cell, v, B)
        self.chunk: int = chunk_steps(problem)  # how many steps the arrays by column have room for
        n = self.chunk * B  # the columns of a chunk
        self.cell, self.H = cell, H
        self.dz: Array = columns_buffer(cell.gates * H, n, B, dtype)
        # by_column: all arrays with these columns. norm: of the recurrent product or the sum; of_input: of the input's
        # product. Each is None without such a norm.
        self.by_column: list[Array] = [self.dz]
        self.norm: NormBackward | RecurrentNorm | None = None
        self.of_input: Any = None
        self.norm_of_c: NormOfC | None = None
        if cell.norm is not None:
            self.norm_of_c = norm_of_state(problem, v)
            if cell.norm.of is not None:
                more |= self.prepare_norms(problem, v, saved["norms"])
        self.input_by_step: bool = isinstance(self.of_input, InputNormOfSteps)  # its norm runs at every step
        # The rows of each array: a False counts as 0, which means that the call does not have this array. dx: the
        # gradients of input parts that differ from `dz` (a norm that runs at every step has its own array for them); m,
        # dh: for the second product (see the class). The generated code gets the arrays as all_dx and so on, and reads
        # the columns of one step from them.
        widths = {"dx": 0 if self.input_by_step else len(plan.other) * H, "m": H * plan.second, "dh": P * plan.projects}
        for name, width in widths.items():
            if width:
                more[f"all_{name}"] = columns_buffer(width, n, B, dtype)
                self.by_column.append(more[f"all_{name}"])
        self.dx, self.m, self.dh = map(more.get, ("all_dx", "all_m", "all_dh"))
        self.Wh: Any = matrix(v["Wh"]) if plan.rows else None
        by_weights = isinstance(self.norm, RecurrentNorm)
        if isinstance(self.norm, RecurrentNorm):  # the scale of the norm is a factor on the rows of Wh
            self.Wh = self.norm.norm.scaled
        if plan.recomputed:
            self.q = more["all_q"] = columns_buffer(len(plan.recomputed) * H, n, B, dtype)
        self.bhn: Array | None = v.get("bhn")
        more["N0"] = self.norm_of_c
        if plan.passes_h:
            self.direct = more["direct"] = np.empty((H, B), dtype)
        if plan.holds_h:  # a contiguous copy of the h before a step
            more["s0"] = np.empty((H, B), dtype)
        self.finishes: bool = graph.inputs + graph.params > 0  # whether `finish` has work at every step
        if self.finishes:
            self.inputs: Any = v.get("inputs")
            us, self.du = (np.empty((graph.inputs * H, B), dtype) for _ in range(2))
            self.dw: Array = np.empty((graph.params * H, B), dtype)
            self.dparams: Array = np.zeros((graph.params * H, B), dtype)  # summed over the batch after the last step
            more |= {"us": us, "du": self.du, "dw": self.dw}
        through = transposed_product(self.Wh, problem) if plan.whole else None
        if plan.rows and not plan.whole:  # a GRU with reset "before": the gradient through the candidate's product
            self.di = more["di"] = np.empty((H, B), dtype)
        saved_at = steps_of(saved["gates"]) if "gates" in saved and graph.saved else None
        h_at = steps_of(saved["h"]) if plan.reads_h else None
        # The function gets this object as an argument. If it held the object, both would be a cycle, and the arrays
        # would be freed much later.
        self.run: Callable[..., None] = backward_function(plan, self.input_by_step, by_weights)(
            H, B, dtype, saved_at, h_at, self.dz, through, more
        )

    def prepare_norms(self, problem: Problem, v: Views, saved: Array) -> dict[str, Any]:
        """Make the layer normalisations of the recurrent product and of the input's product. Return the names that the
        code of a step uses: the function `through_norm`, and its arrays. saved: what the forward pass saved of the
        norms, [T, B, .].

        There are two ways. In general the forward pass saves the normalised product y and its factor r = 1 /
        sqrt(variance + eps), and `NormBackward` computes the gradients from them. In the way "by factors" it saves r
        only, because the norm of the product W u is W (r u): one number per item and step for the recurrent product,
        and a second one if the input's product is normalised in this way, too.
        """
        kept = saved.transpose(FEATURE_MAJOR)
        # norm.c, norm.dp: arrays with a column per step, of which `by_column` makes views for each chunk of steps.
        if by_factors(problem, saved.shape[2]):
            norm = self.norm = RecurrentNorm(problem, v, kept, self.chunk)
            self.by_column.append(norm.c)
            if kept.shape[1] == 2:
                self.of_input = InputProductNorm(v, kept)
            elif problem.cell.norm is not None and problem.cell.norm.of == "products":
                self.of_input = InputNorm(problem, v)
            return {"through_norm": norm.through}
        self.of_input, of_z = input_norm_of(problem, v), norm_of_preactivations(problem, v)
        assert of_z is not None
        norm = self.norm = NormBackward(problem, v, of_z, self.of_input, self.plan.other, kept, self.dz)
        self.by_column.append(norm.dp)
        # The code writes the gradients of one step to these arrays; `through_norm` then writes the columns of the
        # chunk.
        return {"through_norm": norm.through, "dz": norm.d, "dx": norm.dx}

    def through_rows(self, dz: Array, dh: Array) -> None:
        """Write to dh [H, B] the gradient of h times the mask, for a GRU whose reset comes before the candidate's
        product: the part through that second product (`di`), plus those of the gates r and z, whose rows of Wh multiply
        h. dz [G H, B]: the gradients of the preactivations of this step."""
        np.copyto(dh, self.di)
        for start, stop in self.plan.rows:
            rows = slice(start * self.H, stop * self.H)
            dh += np.matmul(self.Wh[rows].T, dz[rows])

    def begin_chunk(self, start: int, h_prev: Array, h_in: Array, x: Array | None) -> None:
        """Begin a chunk of steps, the first of which is step `start`. h_prev [steps, B, H]: h before each step. h_in
        [steps * B, H]: h_prev times the mask. If the backward pass reads the candidate's product q = Wh_n h_in + bhn,
        compute it for all steps of the chunk, with its norm if it has one. x [steps * B, I]: the input, if each step
        normalises its product."""
        self.start, self.h_prev, self.h_in = start, h_prev, h_in
        if isinstance(self.of_input, InputNormOfSteps) and x is not None:
            self.of_input.begin_chunk(x)
        if isinstance(self.norm, RecurrentNorm):
            self.norm.begin_chunk(start, h_in)
        if self.q is not None:
            for row, k in enumerate(self.plan.recomputed):  # k: the number of the gate; row: its block in q
                out = self.q[row * self.H : (row + 1) * self.H, : len(h_in)]
                if self.norm is None:
                    np.matmul(self.Wh[k * self.H : (k + 1) * self.H], matrix(h_in).T, out=out)
                elif isinstance(self.norm, RecurrentNorm):
                    self.norm.product(k, out, h_in)
                else:  # it reads the normalised product, which the forward pass saved
                    self.norm.product(k, out, start)
                if self.bhn is not None:
                    out += self.bhn[:, None]

    def begin_step(self, ended: Array | None) -> None:
        """Begin a step. ended: the indices of the batch items that have ended before it, or None. Only a `NormBackward`
        needs them: the numbers of these items may be NaN."""
        if isinstance(self.norm, NormBackward):
            self.norm.ended = ended

    def skip(self, columns: slice) -> None:
        """Set the results of a step (`columns` of the arrays of the chunk) to 0, because all batch items have ended."""
        for array in self.by_column:
            array[:, columns] = 0

    def finish(self, t: int, columns: slice, ended: Array | None, out: Views) -> None:
        """Write the gradient of the inputs of step t, and add the step's term to the gradient of the parameters, if the
        cell has any (`finishes`). ended: the indices of the batch items that have ended, or None. Their gradients
        become 0, because the computed values may be NaN."""
        if ended is not None:
            for array in self.by_column:
                array[:, columns][:, ended] = 0
        if not self.finishes:
            return
        if ended is not None:
            self.du[:, ended] = self.dw[:, ended] = 0
        if "inputs" in out:
            np.copyto(out["inputs"][t], self.du.T)
        self.dparams += self.dw

    def end_chunk(self, products: WeightGradients, h_in: Array) -> None:
        """Add the terms of one chunk of time steps to the weight gradients in `products`. h_in [n, P]: the h that
        entered the recurrent product, with n = steps x batch of the chunk."""
        n, H, cell, h_in = len(h_in), self.H, self.cell, matrix(h_in)
        if isinstance(self.norm, RecurrentNorm):  # it computes the gradient of Wh itself
            self.norm.end_chunk(self.dz[:, :n], h_in, products)
        else:
            # dp: the gradients of the recurrent products; with a norm they are others than dz.
            dp = self.dz if self.norm is None else self.norm.dp
            for start, stop in self.plan.rows:  # the blocks of Wh that multiply h: all, or those of a GRU's r and z
                rows = slice(None) if (start, stop) == (0, cell.gates) else slice(start * H, stop * H)
                products.accumulate("Wh", dp[rows, :n], h_in, rows)
        # The second product of a step: with the projection, or with the candidate's rows of Wh.
        if self.m is not None and self.dh is not None:
            products.accumulate("Wp", self.dh[:, :n], self.m[:, :n].T)
        elif self.m is not None:
            rows = cell.block("n", H)
            products.accumulate("Wh", self.dz[rows, :n], self.m[:, :n].T, rows)
        if self.bhn is not None and not self.input_by_step:  # else a norm sums the gradient of bhn
            products.accumulate("bhn", self.dz[cell.block("n", H), :n], np.ones(n, self.dz.dtype))
        if self.dx is not None:  # from now on dz has the gradients of the input parts
            for place, k in enumerate(self.plan.other):
                self.dz[k * H : (k + 1) * H, :n] = self.dx[place * H : (place + 1) * H, :n]
