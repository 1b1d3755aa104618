"""Generate the code of one forward and one backward step of a cell for the engine `numpy` from the cell's graph. The
code is generated once for each kind of call; each call passes it the arrays on which it runs.

Every array of a step is feature-major, [n H, B]: n blocks of H units, so that each gate and each state is contiguous. A
value of the graph lies in one block, its `Place` (the array's name, the number of the block). The class `Writer` of
`statements` writes the NumPy statements that compute a graph. A `Plan` says how the step of a cell is computed. H:
units, B: batch items, G: gates, P: the width of h, C: the number of states besides h; U and V: the numbers of inputs of
a step and of parameters of a user's cell. v: the arrays of the call by name.

The name of an input of a graph is a letter and a number: x preactivations (or only their input part, if `apart`: the
cell gets the input's part and the recurrent part as two values), p their recurrent part, s states (s0 is h), u inputs
of the step, w parameters, d gradients of the new states, e gradients of the gates, i0 h times the mask, k limits, W0
the matrix of a second product (W0T its transpose), N0 the layer normalisation of c. A graph has these lists of nodes:
gradients("x"), the gradients of all inputs x; of_product(), the gradients of the gates' recurrent parts; saved, what
the forward pass saves; forward, the new states.

The generated code has these arrays: z preactivations, xs their input part, y what the forward pass saves, c_prev and c
the states besides h before and after the step, n0 the h after it, us and w the inputs and parameters.
`backward_function` lists the arrays of a backward step. An array of a chunk of steps has one column per step and batch
item; `columns` are those of one step. FEATURE_MAJOR transposes [T, B, .] to [T, ., B].
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
    norm_of_preactivations,
    of_stream,
    saved_rows,
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
    """Return a number as a NumPy array, from a cache; nobody may change the array. With a Python number NumPy would
    create an array at every call, which takes half as long as a small addition. The number is passed as text, because
    0.0 and -0.0 would be equal keys of the cache."""
    return np.array(float(text), dtype)


FUNCTIONS = (*UFUNCS.values(), "sign", "copyto", "clip", "fmin", "fmod", "remainder", "empty", "matmul")
"""The functions of NumPy that generated code calls."""

NAMES: dict[str, Any] = {"constant": constant} | {name: getattr(np, name) for name in FUNCTIONS}
"""{name: function} for all functions that generated code calls."""


def function_of(
    code: Writer, given: str, fixed: Iterable[str], parameters: str, before: Sequence[str], after: Sequence[str] = ()
) -> Build:
    """Compile generated statements. Return the function build(H, B, dtype, ..., more), which allocates scratch arrays
    and returns the function step(...). A call of `step` runs the statements `before`, then those of `code`, then
    `after`.

    parameters: the parameters of `step`, as text. given, fixed: the names of arrays that are the same in every call of
    `step`. The arrays `given`, a text with commas between the names, are arguments of `build`; the arrays `fixed` are
    in the dict `more`, if the call has them.
    """
    lines = [*before, *code.lines, *after]
    # words: all names in the statements, and the arrays of which they read views. Other arrays are not allocated.
    # code.views: {(array, first block, last block + 1): name of the view}. code.scratch: {name: Scratch}.
    words = {*findall(r"\w+", " ".join(lines)), *(array for array, _, _ in code.views)}
    # once: the statements that create views of arrays that are the same in every call. unpacked: those that create
    # views of the arguments of `step`, at every call.
    once, unpacked = list[str](), list[str]()
    own = {*code.scratch, *fixed, *given.split(", ")}
    for (array, start, stop), name in code.views.items():
        (once if array in own else unpacked).append(f"{name} = {array}[{start} * H : {stop} * H]")
    # made: the statements that allocate or fetch arrays, once.
    made = [f"{name} = more['{name}']" for name in fixed if name in words]
    for name, (n, is_bool, is_wide) in code.scratch.items():  # n blocks of H rows, or P rows if `is_wide`
        rows = "more['P']" if is_wide else f"{n} * H"
        made.append(f"{name} = empty(({rows}, B), {'bool' if is_bool else 'dtype'})")
    made += [f"{name} = constant('{value!r}', dtype)" for name, value in code.constants.items() if name in words]
    body = "\n        ".join([*before, *unpacked, *code.lines, *after, "pass"])
    start = "\n    ".join([*made, *once, ""])
    text = (
        f"def build(H, B, dtype, {given}, more):\n    {start}def step({parameters}):\n        {body}\n    return step\n"
    )
    made_here: dict[str, Any] = {}  # exec stores here the function `build`, which the text defines
    # The statements come from a graph of numbered nodes, so they contain no text that the caller wrote.
    exec(compile(text, "<a cell>", "exec"), NAMES, made_here)  # noqa: S102
    return made_here["build"]


ALONE = ("s0", "n0", "i0", "d0", "k0", "k1", "W0", "W0T", "N0", "direct", "di", "m", "dh", "operand")
"""The names in generated code of arrays that have one block, or of other values, such as the limit k0."""


class Plan:
    """How the steps of a cell are computed: the cell's graph, and properties of it that decide which code is
    generated."""

    def __init__(self, cell: AnyCell, names: Collection[str], exposes: bool):
        """Read the cell's graph. names: which of the arrays "peephole" and "Wp" the call has. exposes: whether the
        caller gets the gates (forward), or whether they have cotangents (backward)."""
        graph = graph_of(cell, names, exposes)
        self.cell, self.graph = cell, graph
        # rows: (first, last + 1) of each range of blocks of Wh that multiply h. whole: whether this is one range of all
        # blocks, so that a step has one product.
        self.rows: list[tuple[int, int]] = rows_of_product(cell) if cell.recurrent else []
        self.whole: bool = cell.recurrent and self.rows == [(0, cell.gates)]
        # second: whether a step has a second product: with the projection Wp if `projects`, else with the candidate's
        # rows of a GRU's Wh. negatable: the gates whose sigmoid may be computed from -z instead of z.
        self.second: bool = graph.has_product()
        self.projects: bool = "Wp" in names
        self.negatable: str = negatable(graph, cell.gate_order) if cell.recurrent else ""
        # other: the numbers of the gates whose input part and recurrent part have different gradients, such as a GRU's
        # candidate. x and p below are these two gradients, as nodes.
        self.other: tuple[int, ...] = tuple(
            [k for k, (x, p) in enumerate(zip(graph.gradients("x"), graph.of_product(), strict=True)) if x != p]
        )
        # passes_h: whether a part of the gradient of h_prev bypasses the recurrent product. reads_h: whether the
        # backward pass reads the h after a step (state 0). holds_h: whether it may read the h before a step, of which
        # it then has a copy.
        self.passes_h: bool = graph.passes_h
        self.reads_h: bool = graph.reads_after(0)
        self.holds_h: bool = self.passes_h or graph.reads("s0")
        self.recomputed: list[int] = graph.recomputed  # the gates whose recurrent product the backward pass recomputes
        # sizes: {array of the generated code: the number of its blocks}. at: {name of a graph's input: its place}, for
        # the inputs of which a forward and a backward step agree. wide: the arrays that have P rows, the width of a
        # projected h: h after a step, its gradient, and the gradient of h before its clip.
        U, V, C = graph.inputs, graph.params, graph.states - 1
        self.sizes: dict[str, int] = {"y": len(graph.saved), "q": len(self.recomputed), "dx": len(self.other)}
        self.sizes |= dict.fromkeys(("z", "xs", "e", "dz"), graph.gates) | dict.fromkeys(("c", "c_prev", "dc"), C)
        self.sizes |= dict.fromkeys(("us", "du"), U) | dict.fromkeys(("w", "dw"), V) | dict.fromkeys(ALONE, 1)
        self.at: dict[str, Place] = {name: Place(name, 0) for name in ALONE} | inputs_in("us", U, letter="u")
        self.at |= inputs_in("c_prev", C, letter="s", first=1) | inputs_in("w", V, letter="w")
        self.wide: tuple[str, ...] = ("n0", "d0", "dh") if self.projects else ()


plan_of_form = lru_cache(128)(Plan)
"""`Plan(cell, names, exposes)` with a cache. The cell comes from `form_of`, without the numbers that generated code
gets as arguments, so that calls with other numbers share a plan."""


@lru_cache(128)
def plan_of(cell: AnyCell, names: tuple[str, ...], exposes: bool) -> Plan:
    """Return the plan of a cell, from a cache. Cells that differ only in numbers, such as the limits of clips, share a
    plan. names: which of the arrays "peephole" and "Wp" the call has. exposes: for a forward pass, whether the caller
    gets the gates; for a backward pass, whether they have cotangents."""
    return plan_of_form(form_of(cell), names, exposes)


def graph_arrays(v: Views) -> tuple[str, ...]:
    """Return the names of the arrays of a call on which the graph of its cell depends."""
    return tuple([name for name in ("peephole", "Wp") if name in v])


def negatable(graph: CellGraph, letters: str) -> str:
    """Return the letters of the gates whose preactivation z is read only by one sigmoid, directly or after something is
    added to it. letters: one for each gate, in order. For these gates `JoinedProduct` can compute -z instead of z, so
    that the sigmoid 1 / (1 + exp(-z)) need not negate z, which saves a pass over memory. If the graph reads the input's
    part and the recurrent part of z as two values (`apart`), there are no such gates, because no product computes their
    sum."""
    order, found = needed(graph.nodes, [*graph.forward, *graph.saved]), ""  # order: the nodes of the forward pass
    for k in range(0 if graph.apart else graph.gates):
        # Follow the preactivation n of gate k to the only node that reads it, and from there on. ops: the operations of
        # these nodes, at most two.
        n, ops = graph.number.get(f"x{k}"), []
        while n not in (*graph.saved, *graph.forward) and ops[-1:] != ["sigmoid"] and len(ops) < 2:
            # If not exactly one node uses n, end the loop: its condition is false for a node of graph.forward.
            uses = [m for m in order if n in graph.nodes[m].args]
            n = uses[0] if len(uses) == 1 else graph.forward[0]
            ops.append(graph.nodes[n].op if len(uses) == 1 else "")
        found += letters[k] if ops in (["sigmoid"], ["add", "sigmoid"]) else ""
    return found


def rows_of_product(cell: AnyCell) -> list[tuple[int, int]]:
    """Return the ranges of blocks of Wh that multiply h, as (first, last + 1): one range with all gates, or for a GRU
    with reset "before" one or two ranges with the gates r and z."""
    if cell.reset != "before":
        return [(0, cell.gates)]
    # One range if r and z are neighbours in gate_order, else two.
    first, second = sorted(cell.gate_order.index(gate) for gate in "rz")
    return [(first, second + 1)] if second == first + 1 else [(first, first + 1), (second, second + 1)]


def inputs_in(array: str, count: int, letter: str, first: int = 0) -> dict[str, Place]:
    """Return {name of an input: its place} for `count` inputs that lie one after the other in the blocks of an array.
    Their names are the letter and the numbers from `first` on, such as s1, s2."""
    return {f"{letter}{first + k}": place for k, place in enumerate(places(array, count))}


@lru_cache(256)
def forward_function(plan: Plan, order: str, negated: str, saves: bool, adds: bool, bhn: bool, of: str | None) -> Build:
    """Return the function that builds a forward step: step(operand, xs, s0, c_prev, y, c, n0, norms=None).

    The step reads these arrays; z and us are fixed, the same in every call:

        operand        the array that the recurrent weights multiply
        z [G H, B]     scratch memory for the preactivations, or only for their recurrent part if `graph.apart`
        us [U H, B]    the inputs of the step
        xs [G H, B]    the input's part of the preactivations, unless the product with `operand` includes it
        s0, c_prev     h [P, B] and the other states [C H, B] before the step

    and writes

        n0, c          h and the other states after the step
        y              the values that the backward pass needs, if `saves`
        norms          what the backward pass of layer normalisation reads, unless it is None

    order: the letters of the gates in the order of z. negated: the gates whose rows of z hold -z. saves: whether y is
    written. adds: whether the step adds xs to z. bhn: whether bhn is added to the candidate's product. of: what the
    step normalises by the function `normalise`: None, "product" (z before xs is added) or "sum" (z after it). With a
    norm of c the step calls N0.
    """
    graph, letters, carried = plan.graph, plan.cell.gate_order, plan.graph.states - 1
    # x: the array of the preactivations or, with `apart`, of their input parts.
    x = "z" if plan.rows and not graph.apart else "xs"
    at = plan.at | {"i0": Place("operand", 0)}
    for k, letter in enumerate(letters):
        at |= {f"x{k}": Place(x, order.index(letter)), f"p{k}": Place("z", order.index(letter))}
    known = {n: at[name] for name, n in graph.number.items() if name in at}
    targets = [*zip(graph.saved, places("y", len(graph.saved)), strict=True)] if saves else []
    targets += zip(graph.forward, [Place("n0", 0), *places("c", carried)], strict=True)
    # minus: the preactivations whose places hold the negated value. `Store` says which arrays may be overwritten ("z"),
    # which may hold intermediate results ("c", "n0"), and which are as wide as a projected h.
    minus = [graph.number[f"x{k}"] for k, letter in enumerate(letters) if letter in negated]
    store, divided = Store(plan.sizes, ["z"], ["c", "n0"], plan.wide), quotients(graph.nodes, graph.forward)
    code = Writer(graph.nodes, known, targets, store, Rewrites(minus, divided=divided))
    before = [f"matmul(weights{n}, operand, product{n})" for n in range(len(plan.rows))]
    # Before the statements of the graph come the product, then the norm and the addition of xs, in an order that
    # depends on what is normalised, then bhn. A list times a bool is the list itself or [].
    normalise = ["normalise(z, z, norms)"] * (of is not None)
    before += ["add(z, xs, z)"] * adds + normalise if of == "sum" else normalise + ["add(z, xs, z)"] * adds
    before += ["add(z_n, bhn, z_n)"] * bhn  # z_n: the block of z that belongs to a GRU's candidate
    # A GRU with reset "before" may have two products with h: weights0 and product0, weights1 and product1.
    fixed = ["us", "w", "k0", "k1", "W0T", "N0", "weights1", "product1", "z_n", "bhn", "normalise"]
    return function_of(code, "z, weights0, product0", fixed, "operand, xs, s0, c_prev, y, c, n0, norms=None", before)


class Step:
    """One forward step of a cell. `run` is the generated function (see `forward_function`). Before each step of a
    user's cell the caller writes the step's inputs to `us` [U H, B]."""

    def __init__(
        self, problem: Problem, v: Views, mask: Array | None, norms: Array | None = None, streamed: bool = False
    ):
        """Allocate the arrays that every step overwrites. mask [T, B, P]: factors on the h that enters the recurrent
        product, or None. norms [T, B, n]: memory for what the backward pass of norms reads, if it runs. streamed: the
        steps arrive one at a time (`engines.numpy.stream`)."""
        (_, B, H, _, cell), dtype = problem[:5], v["x"].dtype
        plan = plan_of(cell, graph_arrays(v), problem.return_gates)
        self.by_factors: bool = False
        self.enter: Callable[[int, Array, Array], Any] | None = None
        """enter(t, h, out) writes to `out` the array that Wh multiplies at step t, such as h [P, B] times the mask.
        None: Wh multiplies h itself."""
        if mask is not None:
            self.enter = lambda t, h, out: np.multiply(h, mask[t].T, out=out)
        # norm: the norm of the recurrent product, or of its sum with the input's part; of_input, norm_of_c: those of
        # the input's product and of c. of: what the generated step normalises by `norm`; None if nothing, or if the
        # norm is a factor on h, which `enter` applies.
        norm = of_input = norm_of_c = None
        if cell.norm is not None:
            v, norm, of_input = self.prepare_norms(problem, v, streamed, norms)
            norm_of_c = NormOfC(problem, v) if cell.norm.c is not None else None
        of = cell.norm.of if cell.norm is not None and not self.by_factors else None
        # apart: whether the input's part must not be in one product with the recurrent part. negatable: the gates for
        # which a joined product may give -z, the negated preactivation. copies_h: whether Wh multiplies another array
        # than h itself.
        apart = plan.graph.apart or not cell.recurrent or of in ("product", "products") or of_input is not None
        negatable = plan.negatable if norm is None else ""
        copies_h = self.enter is not None
        self.products: Any = (
            SeparateProducts(problem, v, copies_h, of_input)
            if apart
            else input_products(problem, v, copies_h, negatable, streamed)
        )
        products, more = self.products, constants_of(plan, cell, v, B) | {"normalise": norm, "N0": norm_of_c}
        z = np.empty((cell.gates * H, B), dtype)
        # weights: the matrix that multiplies the operand. product: a view of z, divided like the weights.
        weights, product = None, z
        if plan.whole:
            weights = in_blocks(products.weights, B, streamed)
            product = z.reshape(*weights.shape[:-1], -1)  # z, divided like the weights
        elif plan.rows:  # a GRU with reset "before": one or two products, for the rows of the gates r and z
            rows = [slice(start * H, stop * H) for start, stop in plan.rows]
            (weights, product), *others = [(products.weights[of], z[of]) for of in rows]
            more |= {"weights1": others[0][0], "product1": others[0][1]} if others else {}
        if plan.graph.inputs:
            self.us: Array = np.empty((plan.graph.inputs * H, B), dtype)
            more["us"] = self.us
        if "bhn" in v:
            more |= {"z_n": z[cell.block("n", H)], "bhn": np.repeat(v["bhn"][:, None], B, axis=1)}
        # adds: whether the step adds the input's part to z, because no `JoinedProduct` includes it.
        adds = bool(plan.rows) and not plan.graph.apart and not isinstance(products, JoinedProduct)
        saves = problem.training or problem.return_gates
        build = forward_function(plan, products.order, products.negated, saves, adds, "bhn" in v, of)
        self.product: Array = product
        self.run: Callable[..., None] = build(H, B, dtype, z, weights, product, more)

    def prepare_norms(
        self, problem: Problem, v: Views, streamed: bool, norms: Array | None
    ) -> tuple[Views, Normalisation | None, InputNorm | InputNormOfSteps | None]:
        """Return (arrays, norm, of_input): the arrays of the call as the products read them, the norm of the recurrent
        product or of its sum with the input's part, and the norm of the input's product. A norm is None if the step
        does not compute it. streamed: steps arrive one at a time; the caller then computes the input's part."""
        many = of_stream(problem) if streamed else problem
        # rows: how many numbers the norms save per step and item, which says how they are computed (see `saved_rows`).
        rows = 0 if streamed else saved_rows(problem, v) if norms is None else norms.shape[2]
        self.by_factors = by_factors(problem, rows)
        v = with_centred_weights(many, v, self.by_factors)  # so that no step subtracts a mean, if that pays
        if not self.by_factors:
            return v, norm_of_preactivations(many, v), None if streamed else input_norm_of(problem, v)
        # By factors: the norm is a factor on the array that Wh multiplies. This array is h times the mask, so
        # `multiply` applies the mask first.
        forward, multiply = NormByFactors(problem, v, norms, rows), self.enter
        self.enter = forward.enter
        if multiply is not None:
            self.enter = lambda t, h, out: forward.enter(t, multiply(t, h, out), out)
        # If rows is 2, the input's product is normalised by factors, too; x in `forward.arrays` is multiplied by them
        # already.
        return forward.arrays, None, input_norm_of(problem, forward.arrays) if rows == 1 else None


def constants_of(plan: Plan, cell: AnyCell, v: Views, B: int) -> dict[str, Any]:
    """Return the arrays that a step reads and that are the same at every step: w, the parameters per unit, repeated
    over the batch; k0 and k1, the limits of c and of a projected h; the matrix W0 of a second product with its
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
    """Return a function that returns step t of a sequence [T, B, .] as a contiguous array [., B]. If the sequence is
    feature-major in memory, the array is a view. Otherwise it is a copy that is valid until step t + 2 or t - 2 is
    requested."""
    sequence = sequence.transpose(FEATURE_MAJOR)
    if sequence[0].flags.c_contiguous:
        return sequence.__getitem__
    # copies: two steps, because a backward step reads the steps t and t - 1 (or t + 1). copied: their numbers.
    copies, copied = np.empty((2, *sequence.shape[1:]), sequence.dtype), [-1, -1]

    def step(t: int) -> Array:
        if copied[t % 2] != t:
            copies[t % 2], copied[t % 2] = sequence[t], t
        return copies[t % 2]

    return step


@lru_cache(128)
def backward_function(plan: Plan, with_input: bool, by_weights: bool) -> Build:
    """Return the function that builds a backward step: step(own, t, columns, c_prev, c, d0, dc, e). with_input: whether
    the step computes the backward pass of a norm of the input's product. by_weights: whether the backward pass of the
    norm of the recurrent product runs after the product with Wh^T (`RecurrentNorm`) instead of before (`NormBackward`).

    H: units, B: batch items, P: the width of h, C: the states besides h, G: the gates; U and V: the inputs of a step
    and the parameters per unit of a user's cell. `plan.other`: the gates whose input part and recurrent part have
    different gradients, such as a GRU's candidate. The arrays dz, dx, m, q and dh are columns of larger arrays, which
    have one column for each step and batch item of a chunk; the slice `columns` selects those of step t. Exception:
    with a `NormBackward` dz is an array of one step, and if `with_input` dx, too. The step reads

        c_prev, c    the states other than h [C H, B] before and after step t
        d0, dc       the gradients of h [P, B] and of the other states [C H, B] after the step
        e            the cotangents of the gates [G H, B], if the caller gives any
        q            the recurrent products of the gates in `plan.recomputed` (H rows each)
        own          the object of class `StepBackward` with the other arrays

    and writes

        d0, dc       the gradients of the h in the recurrent product, and of the other states before the step
        dz, dx       the gradients of the recurrent parts of all gates [G H, B], and of the input parts of the gates in
                     `plan.other` (H rows each)
        direct       the part of the gradient of the h before the step that bypasses the recurrent product [H, B]
        di           the part of the gradient of mask * h that bypasses the product [H, B]
        m            the array that the step's second product multiplies by its weight [H, B]: by a projection Wp, or
                     by the candidate's rows of a GRU's Wh
        dh           the gradient of a projected h before its clip [P, B]
        du, dw       the gradients of the inputs [U H, B] and of the parameters [V H, B]

    The last statements write Wh^T dz to d0: by through_Wh(dz, d0), or by own.through_rows if only some rows of Wh
    multiply h. The function through_norm, the backward pass of the norm of the recurrent product, runs before or after
    this.
    """
    graph, carried, other = plan.graph, plan.graph.states - 1, plan.other
    at = plan.at | inputs_in("dc", carried, letter="d", first=1) | inputs_in("e", graph.gates, letter="e")
    at |= {f"p{k}": Place("q", row) for row, k in enumerate(plan.recomputed)}
    # at: {name of a graph's input: its place}. known: {node: its place} for all values that exist before the step: the
    # states after the step, what the forward pass saved, and the inputs.
    known = {n: Place("c", k - 1) if k else Place("n0", 0) for n, k in graph.known_after().items()}
    known |= dict(zip(graph.saved, places("y", len(graph.saved)), strict=True))
    known |= {n: at[name] for name, n in graph.number.items() if name in at}
    # targets: (node of a gradient, the place to which it is written).
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
    squares = plan.cell.op != "pointwise"  # compute y (1 - y) as y - y^2, for neighbouring gates by one statement
    store = Store(plan.sizes, ["dc", "d0"], ["dc", "direct", "di"], plan.wide)
    code = Writer(graph.nodes, known, targets, store, Rewrites(squares=squares))
    # read: {array: the statement that fetches it at each step}. Only arrays that occur in the statements (`words`) are
    # fetched. all_dz and the like: the arrays of the whole chunk. saved_at, h_at: functions that return step t of the
    # arrays that the forward pass saved.
    words = findall(r"\w+", " ".join([*code.lines, *(array for array, _, _ in code.views)]))
    read = {
        "y": "y = saved_at(t)", "n0": "n0 = h_at(t)", "i0": "i0 = own.h_in[columns].T",
        "s0": "s0 = own.h_prev[t - own.start].T", "us": "copyto(us, own.inputs[t].T)",
        **{name: f"{name} = all_{name}[:, columns]" for name in ("dz", "dx", "m", "q", "dh")},
    }  # fmt: skip
    copies_s0 = words.count("s0") > 1
    if copies_s0:  # read more than once: make a contiguous copy, because operations on the view are slower
        read["s0"] = "copyto(s0, own.h_prev[t - own.start].T)"
    normalises = plan.cell.norm is not None and plan.cell.norm.of is not None and not by_weights
    for name in [*["dz"] * normalises, *["dx"] * with_input]:
        read.pop(name)  # not columns of the chunk, but an array of one step, which `NormBackward` has
    # before: the first statements of a step. N0 is the norm of c. Setting N0.is_current to False tells it that the
    # numbers it holds belong to another step.
    before = [line for name, line in read.items() if name in words] + ["N0.is_current = False"] * ("N0" in words)
    fixed = ["us", "du", "w", "dw", "direct", "di", "W0", "W0T", "N0", "k0", "k1"]
    fixed += ["all_dx", "all_m", "all_q", "all_dh", "through_norm"]
    fixed += ["s0"] * copies_s0 + ["dz"] * normalises + ["dx"] * with_input
    # after: the last statements, which compute in d0 the gradient of the h that Wh multiplied.
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
    """One backward step of a cell, which also collects the arrays of which the weight gradients are products. `run` is
    the generated function (see `backward_function`).

    A preactivation is the sum of a recurrent part (Wh h) and an input part (Wx x). `dz` [G H, n] collects the gradients
    of the recurrent parts of G gates with H units each. It has n columns, one for each step and batch item of a chunk.
    For some gates, such as a GRU's candidate, the input part has another gradient, which `dx` collects. After the steps
    of a chunk `end_chunk` computes the gradient of Wh from `dz`. Then it copies `dx` to the rows of these gates in
    `dz`, from which the caller computes the gradients of Wx and x.

    A projection, or the candidate's product of a GRU with reset "before", is a second product in the step. `m` [H, n]
    collects the array that this product multiplies by its weight, and `dh` [P, n] the gradient of the projected h.
    """

    direct: Array | None = None
    """The part of the gradient of h_prev that bypasses the recurrent product, [H, B]; None if there is no such part."""
    q: Array | None = None
    """The recurrent products that the backward pass computes again, at each step of a chunk: the product of a GRU's
    candidate. None if there are none."""

    def __init__(self, problem: Problem, v: Views, saved: Views, exposes: bool):
        """Allocate the arrays that every backward step overwrites. saved: the outputs h, c and gates of the forward
        pass. `gates` [T, B, K H] has the K numbers per unit that the backward pass reads; in a built-in cell these are
        the gates. exposes: whether the gates have cotangents."""
        (_, B, H, P, cell), dtype = problem[:5], v["x"].dtype
        plan = self.plan = plan_of(cell, graph_arrays(v), exposes)
        # more: {name: array} for the generated code.
        graph, more = plan.graph, constants_of(plan, cell, v, B)
        self.chunk: int = chunk_steps(problem)  # the number of steps in a chunk
        n = self.chunk * B  # the columns of a chunk
        self.cell, self.H = cell, H
        self.dz: Array = columns_buffer(cell.gates * H, n, B, dtype)
        # by_column: all arrays that have a column for each step and batch item of a chunk. norm: the norm of the
        # recurrent product, or of its sum with the input's part. of_input: the norm of the input's product. Each is
        # None without such a norm.
        self.by_column: list[Array] = [self.dz]
        self.norm: NormBackward | RecurrentNorm | None = None
        self.of_input: Any = None
        self.norm_of_c: NormOfC | None = None
        if cell.norm is not None:
            self.norm_of_c = NormOfC(problem, v) if cell.norm.c is not None else None
            if cell.norm.of is not None:
                more |= self.prepare_norms(problem, v, saved["norms"])
        self.input_by_step: bool = isinstance(self.of_input, InputNormOfSteps)  # whether `of_input` runs at every step
        # widths: the number of rows of the arrays dx, m and dh, which the class describes; 0 or False: the call does
        # not have this array. A norm of the input's product that runs at every step has a dx of its own. The generated
        # code gets the arrays as all_dx and so on, and reads the columns of one step from them.
        widths = {"dx": 0 if self.input_by_step else len(plan.other) * H, "m": H * plan.second, "dh": P * plan.projects}
        for name, width in widths.items():
            if width:
                more[f"all_{name}"] = columns_buffer(width, n, B, dtype)
                self.by_column.append(more[f"all_{name}"])
        self.dx, self.m, self.dh = map(more.get, ("all_dx", "all_m", "all_dh"))
        self.Wh: Any = matrix(v["Wh"]) if plan.rows else None
        by_weights = isinstance(self.norm, RecurrentNorm)
        if isinstance(self.norm, RecurrentNorm):  # use Wh with its rows multiplied by the scale of the norm
            self.Wh = self.norm.norm.scaled
        if plan.recomputed:
            self.q = more["all_q"] = columns_buffer(len(plan.recomputed) * H, n, B, dtype)
        self.bhn: Array | None = v.get("bhn")
        more["N0"] = self.norm_of_c
        if plan.passes_h:
            self.direct = more["direct"] = np.empty((H, B), dtype)
        if plan.holds_h:  # memory for a contiguous copy of the h before a step
            more["s0"] = np.empty((H, B), dtype)
        self.finishes: bool = graph.inputs + graph.params > 0  # whether the caller must call `finish` after every step
        if self.finishes:
            self.inputs: Any = v.get("inputs")
            us, self.du = (np.empty((graph.inputs * H, B), dtype) for _ in range(2))
            self.dw: Array = np.empty((graph.params * H, B), dtype)
            self.dparams: Array = np.zeros((graph.params * H, B), dtype)  # summed over the batch after the last step
            more |= {"us": us, "du": self.du, "dw": self.dw}
        through = transposed_product(self.Wh, problem) if plan.whole else None
        if plan.rows and not plan.whole:  # a GRU with reset "before"; di: the gradient through the candidate's product
            self.di = more["di"] = np.empty((H, B), dtype)
        saved_at = steps_of(saved["gates"]) if "gates" in saved and graph.saved else None
        h_at = steps_of(saved["h"]) if plan.reads_h else None
        # `run` gets this object as an argument at each call. If the function held a reference to the object, both would
        # form a cycle, and their arrays would be freed only by the garbage collector.
        self.run: Callable[..., None] = backward_function(plan, self.input_by_step, by_weights)(
            H, B, dtype, saved_at, h_at, self.dz, through, more
        )

    def prepare_norms(self, problem: Problem, v: Views, saved: Array) -> dict[str, Any]:
        """Create the objects for the backward pass of the norms of the recurrent product (or of its sum with the
        input's part) and of the input's product. Return what the generated code uses of them, by name: the function
        `through_norm`, and its arrays. saved [T, B, .]: what the forward pass saved of the norms.

        There are two methods. In general the forward pass saves the normalised product y and its factor r = 1 /
        sqrt(variance + eps), and `NormBackward` computes the gradients from them. With the method "by factors" it saves
        only r, because the normalised product W u is W (r u): one number per item and step for the recurrent product,
        and a second one if the input's product is normalised by factors, too.
        """
        saved_norms = saved.transpose(FEATURE_MAJOR)
        # norm.c, norm.dp: arrays with a column per step and batch item of a chunk, like all arrays in `by_column`.
        if by_factors(problem, saved.shape[2]):
            norm = self.norm = RecurrentNorm(problem, v, saved_norms, self.chunk)
            self.by_column.append(norm.c)
            if saved_norms.shape[1] == 2:
                self.of_input = InputProductNorm(v, saved_norms)
            elif problem.cell.norm is not None and problem.cell.norm.of == "products":
                self.of_input = InputNorm(problem, v)
            return {"through_norm": norm.through}
        self.of_input, of_z = input_norm_of(problem, v), norm_of_preactivations(problem, v)
        assert of_z is not None
        norm = self.norm = NormBackward(problem, v, of_z, self.of_input, self.plan.other, saved_norms, self.dz)
        self.by_column.append(norm.dp)
        # The generated code writes the gradients of one step to norm.d and norm.dx; then `through_norm` writes the
        # columns of the chunk.
        return {"through_norm": norm.through, "dz": norm.d, "dx": norm.dx}

    def through_rows(self, dz: Array, dh: Array) -> None:
        """Write to dh [H, B] the gradient of mask * h, the array that Wh multiplies, for a GRU with reset "before". It
        is the sum of `di`, the part that comes through the candidate's matrix product, and of the parts that come
        through the matrix products of the gates r and z. dz [G H, B]: the gradients of the preactivations of this
        step."""
        np.copyto(dh, self.di)
        for start, stop in self.plan.rows:
            rows = slice(start * self.H, stop * self.H)
            dh += np.matmul(self.Wh[rows].T, dz[rows])

    def begin_chunk(self, start: int, h_prev: Array, h_in: Array, x: Array | None) -> None:
        """Begin a chunk of steps, the first of which is step `start`: compute everything that one product can compute
        for all of its steps. These are q = Wh_n h_in + bhn, the recurrent part of a GRU's candidate, which may be
        normalised, and arrays of the norms. h_prev [steps, B, H]: h before each step. h_in [steps * B, H]: h_prev times
        the mask. x [steps * B, I]: the input, if each step normalises the input's product; else None."""
        self.start, self.h_prev, self.h_in = start, h_prev, h_in
        if isinstance(self.of_input, InputNormOfSteps) and x is not None:
            self.of_input.begin_chunk(x)
        if isinstance(self.norm, RecurrentNorm):
            self.norm.begin_chunk(start, h_in)
        if self.q is not None:
            for row, k in enumerate(self.plan.recomputed):  # k: the number of a gate; row: the number of its block in q
                out = self.q[row * self.H : (row + 1) * self.H, : len(h_in)]
                if self.norm is None:
                    np.matmul(self.Wh[k * self.H : (k + 1) * self.H], matrix(h_in).T, out=out)
                elif isinstance(self.norm, RecurrentNorm):
                    self.norm.product(k, out, h_in)
                else:  # a `NormBackward`, which reads the normalised product that the forward pass saved
                    self.norm.product(k, out, start)
                if self.bhn is not None:
                    out += self.bhn[:, None]

    def begin_step(self, ended: Array | None) -> None:
        """Begin a step. ended: the indices of the batch items that have ended before this step, or None. A
        `NormBackward` sets the gradients of these items to 0, because they may be NaN."""
        if isinstance(self.norm, NormBackward):
            self.norm.ended = ended

    def skip(self, columns: slice) -> None:
        """Set the results of a step to 0, because all batch items have ended before it. columns: the columns of this
        step in the arrays of the chunk."""
        for array in self.by_column:
            array[:, columns] = 0

    def finish(self, t: int, columns: slice, ended: Array | None, out: Views) -> None:
        """Finish step t: set the gradients of ended batch items to 0, because the computed values may be NaN. For a
        user's cell also write the gradient of the step's inputs to `out`, and add the step's term to the gradient of
        the parameters. columns: the columns of this step in the arrays of the chunk. ended: the indices of the batch
        items that have ended, or None."""
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
        if isinstance(self.norm, RecurrentNorm):  # a `RecurrentNorm` computes the gradient of Wh itself
            self.norm.end_chunk(self.dz[:, :n], h_in, products)
        else:
            # dp: the gradients of the recurrent products. Without a norm they are dz.
            dp = self.dz if self.norm is None else self.norm.dp
            for start, stop in self.plan.rows:  # each range of blocks of Wh that multiply h
                rows = slice(None) if (start, stop) == (0, cell.gates) else slice(start * H, stop * H)
                products.accumulate("Wh", dp[rows, :n], h_in, rows)
        # Add the gradient of the weights of a step's second product: of the projection, or of the candidate's rows of
        # Wh.
        if self.m is not None and self.dh is not None:
            products.accumulate("Wp", self.dh[:, :n], self.m[:, :n].T)
        elif self.m is not None:
            rows = cell.block("n", H)
            products.accumulate("Wh", self.dz[rows, :n], self.m[:, :n].T, rows)
        if self.bhn is not None and not self.input_by_step:  # if `input_by_step`, `NormBackward` computes this gradient
            products.accumulate("bhn", self.dz[cell.block("n", H), :n], np.ones(n, self.dz.dtype))
        if self.dx is not None:  # from now on dz has the gradients of the input parts, which the caller reads
            for place, k in enumerate(self.plan.other):
                self.dz[k * H : (k + 1) * H, :n] = self.dx[place * H : (place + 1) * H, :n]
