"""Engine `ops`: the recurrence in plain MLX operations, with forward and backward written out as readable formulas.

The engine runs on any device and inside `mx.compile`, `mx.vmap` and exports. Every function takes and returns MLX
arrays; nothing is evaluated. Two directions run one after the other, each on its part of the arrays. Arrays are in
dicts by the names that `problem` lists: x, Wx, Wh, b, h0, c0 and so on. Sizes: T time steps, B batch items, I input
features, H hidden units, P the width of h (H, or the width of the projection), G gates of the cell, D directions.

These names stand in many functions below:

    z           the input's part of the preactivations, x Wx^T + b; its gradient is dz
    h_in        h times the mask. Its product h_in Wh^T is the recurrent part of the preactivations, with the gradient
                dp. A cell needs both parts as two values if `cell.apart`, such as a GRU, whose gate r multiplies the
                recurrent part of the candidate; for other cells dz is the gradient of both parts
    da          the gradient of the result of a layer normalisation. `norm.of` says what is normalised: the "product"
                h_in Wh^T, or its "sum" with z
    keep        an option: a factor on the states before a step
    carry       the part of a state's gradient that reaches the step before without the recurrent product
    cotangent   the gradient that the caller gives for an output
    saved       the outputs of the forward pass
    sweep       the results of the backward steps, stacked over time
    lengths     the number of steps of each batch item, [B]; live: true for the items that have not ended

A forward step calls the cell's function in `definitions`, and a backward step computes the nodes of the cell's graph.
Both name their inputs by a letter and a number: x0, x1, ... are the preactivations of the gates (or their input part),
p0, ... their recurrent part, s0 and s1 the states h and c, w0, ... the peephole weights, d0, d1 and e0, ... the
gradients of states and gates, k0 and k1 the limits of c and h, i0 is h_in, W0 a second matrix (W0T its transpose), N0
the norm of c.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from .. import definitions
from ..cell_graph import CellGraph, needed
from ..cell_tracer import graph_of, values_of
from ..cells import AnyCell, PointwiseCell, norm_blocks
from ..definitions import ScaledNorm, constant, normalised, widened
from ..directions import by_direction, join, join_gradients
from ..problem import Array, Arrays, Problem
from ..tracing import distinct, split_apart
from .packed import dequantized, times_input
from .pointwise import chosen, gradients_by_mlx, joined, pointwise_step


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """Run the forward pass. Return the cell's outputs by name: h [T, B, D P], gates [T, B, D G H], hT [B, D P]; for
    an LSTM also c [T, B, D H] and cT [B, D H]."""
    # In three cases MLX itself derives the gradient from these operations: the cell is a user's, the call is without
    # training, or the derivative is in forward mode. The gradient then multiplies x, inputs and mask by numbers that
    # are 0 in the padding (steps after an item's end). A NaN times 0 is NaN, so set the padding to 0 first.
    arrays = with_zeros_in_padding(problem, arrays, ("x", "inputs", "mask"))
    z, arrays = project(problem, arrays), dequantized(problem.packing, arrays)
    return join([sweep_forward(own, given, of["z"]) for _, own, (given, of) in by_direction(problem, arrays, {"z": z})])


def with_zeros_in_padding(problem: Problem, arrays: Arrays, names: Sequence[str]) -> Arrays:
    """Return the arrays of a call, with 0 in the padding (the steps after an item's end) of those of `names` with an
    axis of time."""
    if "lengths" not in arrays:
        return arrays
    padded = [name for name in names if name in arrays and arrays[name].ndim == 3]
    padded = [name for name in padded if arrays[name].shape[0] == problem.T]  # leave out a mask [1, B, P]
    return arrays | {name: without_padding(arrays["lengths"], arrays[name]) for name in padded}


def forward_step(problem: Problem, arrays: Arrays) -> Arrays:
    """Run a call of a single step in one direction. Return the cell's outputs by name. x [B, I] and the outputs h [B,
    P] (P: the size of a projected h, else H), gates [B, G H] (G gates) and c [B, H] have no axis of time. The graph is
    about half as large as that of `forward`."""
    h, c = (times_keep(arrays, state, 0) for state in initial_states(problem, arrays))  # 0: the only step
    z = project_rows(problem, arrays, arrays["x"])
    gates, c, h = step(problem, arrays, 0, z, times_mask(arrays, h, 0), h, c)
    outputs = {"h": h, "c": c, "gates": gates, "hT": h, "cT": c}
    return {name: outputs[name] for name in problem.cell.outputs}


def sweep_forward(problem: Problem, arrays: Arrays, z: Array) -> Arrays:
    """Run all steps of one direction. Return the outputs by name. z [T, B, G H]: the input's part of the
    preactivations."""
    z_at = by_time(z)  # a list of z[t]

    # Run step t from the states (h, c) before it. Return the outputs of the step and the states after it.
    def step_at(t: int, state: tuple[Array, Array]) -> tuple[Arrays, tuple[Array, Array]]:
        h, c = (times_keep(arrays, of_state, t) for of_state in state)
        gates, c, h = step(problem, arrays, t, z_at[t], times_mask(arrays, h, t), h, c)
        return {"h": h, "c": c, "gates": gates}, (h, c)

    first = initial_states(problem, arrays)
    by_mlx = isinstance(problem.cell, PointwiseCell)  # whether MLX derives the gradient from the operations below
    outputs, (hT, cT) = over_time(step_at, first, problem.steps(), lambda t: live_items(arrays, t), by_mlx)
    if by_mlx:  # MLX's gradient needs distinct arrays, but a user's cell may return one array as two states
        hT, cT = distinct([hT, cT])
    outputs |= {"hT": hT, "cT": cT}
    return {name: outputs[name] for name in problem.cell.outputs}


def over_time(
    step_at: Callable[[int, Any], tuple[Any, Any]],
    state: Any,
    steps: Iterable[int],
    live_at: Callable[[int], Array | None],
    by_mlx: bool = False,
) -> tuple[Any, Any]:
    """Run `step_at(t, state) -> (output, state)` for each t of `steps`. Return the outputs, stacked to [T, B, .] in
    the order of time, and the last state. Both are arrays or trees of arrays.

    live_at(t): a bool array [B, 1], true for batch items that have not ended at step t; None without lengths. For an
    item that has ended the output is 0 and the state stays unchanged. by_mlx: whether MLX differentiates the steps and
    their derivatives may be infinite, as in a user's cell. Then a gather replaces the values of items that have ended,
    because the gradient of mx.where would be NaN.
    """
    outputs = {}
    for t in steps:
        (output, after), live = step_at(t, state), live_at(t)
        if live is not None:
            # For items that have ended replace the output by zeros, and the new state by the state before the step.
            zeros = tree_map(lambda array: mx.array(0, array.dtype), output)
            output, after = (choose_items(live, *pair, by_mlx) for pair in ((output, zeros), (after, state)))
        outputs[t], state = output, after
    in_time = [outputs[t] for t in range(len(outputs))]  # in the order of time, also if `steps` runs in reverse
    return tree_map(lambda *of_steps: mx.stack(list(of_steps)), *in_time), state


def choose_items(live: Array, tree: Any, other: Any, by_mlx: bool) -> Any:
    """Return `tree`, but with the parts of `other` for all batch items whose entry in `live` [B] is false. `tree` is an
    array [B, .], or a list or dict of such arrays; `other` has the same structure, with arrays or scalars. by_mlx:
    whether MLX differentiates the choice and derivatives may be infinite; the gradient of mx.where would then be
    NaN."""
    if by_mlx:
        return tree_map(lambda a, b: chosen(live, a, b), tree, other)
    return tree_map(lambda a, b: mx.where(live.reshape(-1, *[1] * (a.ndim - 1)), a, b), tree, other)


def live_items(arrays: Arrays, t: int) -> Array | None:
    """Return a bool array [B, 1], true for batch items that have not ended at step t. Return None without lengths."""
    lengths = arrays.get("lengths")
    return None if lengths is None else (lengths > t)[:, None]


def by_time(sequence: Array) -> list[Array]:
    """Split a sequence [T, B, .] into a list of its T steps [B, .]."""
    # Not sequence[t]: under mx.compile(shapeless=True) a later call with another shape would silently use the shape of
    # the first call.
    return [row.squeeze(0) for row in split_apart(sequence, sequence.shape[0])]


def step(
    problem: Problem, arrays: Arrays, t: int, z: Array, h_in: Array, h: Array, c: Array
) -> tuple[Array, Array, Array]:
    """Run step t of the problem's cell. Return (gates, c, h) after the step. The head of this module lists the names of
    the inputs of a cell's definition, such as x0.

    z [B, G H]: the input's part of the preactivations. h_in: h times the mask. h, c: the states before the step; a cell
    without c returns it unchanged.
    """
    if isinstance(problem.cell, PointwiseCell):
        # product: the recurrent part of the preactivations; None if z contains it already (after a norm of the sum), or
        # if the cell does not multiply h by Wh.
        z, product = preactivations(problem.cell, arrays, z, h_in) if problem.cell.recurrent else (z, None)
        inputs = arrays["inputs"][t, ...] if "inputs" in arrays else None
        live = live_items(arrays, t)
        return pointwise_step(problem.cell, z, product, (h, c), inputs, arrays.get("params"), live)
    cell, H, Wh = problem.cell, problem.H, arrays["Wh"]
    # of: the inputs of the cell's definition by name. An input that the call does not have is None.
    of: dict[str, Any] = {"s0": h, "s1": c, "i0": h_in, "W0": arrays.get("Wp")}
    if cell.cell_clip is not None or cell.projection_clip is not None:
        of |= limits_of(cell, c, h)
    if "peephole" in arrays:  # `named` divides an array into w0, w1, ..., one part for each gate
        of |= named("w", cell, arrays["peephole"])
    # Products and sums are separate operations, because MLX 0.32.4 refuses mx.addmm under mx.vmap over x alone.
    if cell.reset == "before":  # a GRU whose candidate multiplies r * h_in by Wh; the products are added below
        of |= named("x", cell, z)
    else:  # one product with all blocks of Wh
        z, product = preactivations(cell, arrays, z, h_in)
        of |= named("x", cell, z if cell.apart or product is None else z + product)
        if cell.apart and product is not None:
            of |= named("p", cell, product)
    if cell.forget_bias:  # f: the name of the forget gate's preactivation, such as "x1"
        f = f"x{cell.gate_order.index('f')}"
        of[f] = of[f] + constant(cell.forget_bias, z)
    if cell.norm is not None and cell.norm.c is not None:
        of["N0"] = norm_of_c(cell, arrays)
    if "bhn" in arrays:  # n: the name of the recurrent part of a GRU's candidate, such as "p2"
        n = f"p{cell.gate_order.index('n')}"
        of[n] = of[n] + arrays["bhn"]
    if cell.reset == "before":  # W0: the candidate's rows of Wh; the definition multiplies them by r * h_in
        of["W0"] = Wh[cell.block("n", H)]
        of |= {f"p{k}": h_in @ Wh[cell.block(gate, H)].T for k, gate in enumerate(cell.gate_order) if gate != "n"}
    states, gates = definitions.step(cell, of)
    # Join the gates, and return c unchanged if the cell has none.
    return joined([gates[gate] for gate in cell.gate_order]), states[1] if len(states) > 1 else c, states[0]


def preactivations(cell: AnyCell, arrays: Arrays, z: Array, h_in: Array) -> tuple[Array, Array | None]:
    """Return both parts of the preactivations, z + product: (z, product) or, if the cell normalises their sum, (the
    normalised sum, None). z [.., G H]: the input's part. h_in [.., P]: h times the mask; its product with Wh, which the
    cell may normalise, is the recurrent part."""
    product = h_in @ arrays["Wh"].T
    if cell.norm is None or cell.norm.of is None:
        return z, product
    norm = norm_of(cell, arrays)
    return (norm(z + product), None) if cell.norm.of == "sum" else (z, norm(product))


def norm_of(cell: AnyCell, arrays: Arrays) -> ScaledNorm:
    """Return the layer normalisation of the recurrent product h_in Wh^T, or of its sum with x Wx^T + b
    (`cell.norm.of`)."""
    assert cell.norm is not None
    return ScaledNorm(norm_blocks(cell), cell.norm.eps, arrays.get("norm_scale"), arrays.get("norm_shift"))


def norm_of_c(cell: AnyCell, arrays: Arrays) -> ScaledNorm:
    """Return the layer normalisation of c."""
    assert cell.norm is not None
    return ScaledNorm(blocks=1, eps=cell.norm.eps, scale=arrays.get("norm_c_scale"), shift=arrays.get("norm_c_shift"))


def limits_of(cell: AnyCell, c: Array | None, h: Array) -> Arrays:
    """Return the limits of the clips of c and of a projected h as the inputs k0 and k1 of a cell's graph, in the dtypes
    of c and h. A limit is left out if the cell does not have it, or if c is None."""
    limits = {"k0": (cell.cell_clip, c), "k1": (cell.projection_clip, h)}
    return {name: constant(limit, a) for name, (limit, a) in limits.items() if limit is not None and a is not None}


def named(letter: str, cell: AnyCell, array: Array) -> Arrays:
    """Return the parts of an array [.., GH] as inputs of a step: one for each gate, with this letter and the number of
    the gate."""
    return dict(zip(definitions.NAMES[letter], split_by_gate(cell, array), strict=False))


def by_gate(cell: AnyCell, array: Array) -> dict[str, Array]:
    """Return a dict from each gate, a letter such as "i", to its part [.., H] of an array [.., GH] with all gates."""
    return dict(zip(cell.gate_order, split_by_gate(cell, array), strict=True))


def split_by_gate(cell: AnyCell, array: Array) -> list[Array]:
    """Split an array [.., GH] into its parts [.., H], one for each gate."""
    # An elementwise operation may have computed the array, such as the sum of both products: see `split_apart`.
    return [array] if cell.gates == 1 else split_apart(array, cell.gates, axis=-1)


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """Return the gradients of all arrays, none of which is quantized.

    saved: the outputs h, c and gates of the forward pass. cotangents: the cotangents of some outputs, by name.
    """
    if isinstance(problem.cell, PointwiseCell):
        return gradients_by_mlx(partial(forward, problem), arrays, cotangents)
    # A second derivative multiplies the mask by a gradient that is 0 in the padding, and NaN times 0 is NaN.
    given, arrays = arrays, with_zeros_in_padding(problem, arrays, ("mask",))
    each = by_direction(problem, arrays, saved, cotangents)
    sweep = join([sweep_backward(own, *values) for _, own, values in each])
    gradients = gradients_after_sweep(problem, arrays, saved, sweep)
    if "mask" in gradients:  # the zeros may have given the mask more rows than the caller's has
        gradients["mask"] = sum_to_shape(gradients["mask"], given["mask"].shape)
    return gradients


def sweep_backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """Run the backward steps of one direction. Return the arrays, by name, from which `gradients_after_sweep` computes
    the gradients; its docstring lists them."""
    h0, c0 = initial_states(problem, arrays)
    # starts: {name: array [T, B, .]}. Each backward step gets its row of these arrays as `before`: the states before
    # the step, and products that are computed here for all steps at once.
    starts = {name: times_keep(arrays, states) for name, states in states_before(problem, arrays, saved).items()}
    norms = normalised_products(problem, arrays, starts["h"])
    starts |= gru_candidates(problem, arrays, starts["h"], norms.get("y")) | norms
    dh, dc = cotangents.get("hT", mx.zeros_like(h0)), cotangents.get("cT", mx.zeros_like(c0))
    by_step: dict[str, dict[int, Array]] = {"dz": {}, "dh": {}, "carry": {}}  # {name of a result: {t: array}}
    step_back = StepBackward(problem, arrays, exposes="gates" in cotangents)
    for t in reversed(problem.steps()):
        # dh_t: the gradient of h after step t. It is the sum of the gradient dh from the step that was processed after
        # step t and the cotangent of the output h[t]. dc_t is the same for c. The index is [t, ...], because in MLX the
        # gradient of indexing with [t] has no forward mode.
        dh_t = dh + cotangents["h"][t, ...] if "h" in cotangents else dh
        dc_t = dc + cotangents["c"][t, ...] if "c" in cotangents else dc
        dgates = cotangents["gates"][t, ...] if "gates" in cotangents else None
        before = {name: states[t, ...] for name, states in starts.items()}
        after = {name: saved[name][t, ...] for name in ("h", "c", "gates") if name in saved}
        if problem.cell.stops_h:  # make the gradient 0 where the clip of a projected h changed h
            dh_t = through_projection_clip(problem.cell, arrays, after, dh_t)
        # found: the results of this step. For an item that has ended they become 0, and the gradients of its states
        # stay unchanged, because the forward step left its states unchanged.
        found, dh_in, dc_prev, direct = step_back(t, before, after, dh_t, dc_t, dgates)
        live = live_items(arrays, t)
        for name, array in (found | {"dh": dh_t}).items():
            by_step.setdefault(name, {})[t] = array if live is None else mx.where(live, array, 0)
        # Compute the gradients of h and c before the step: multiply the gradient of h_in by the mask, add the part that
        # bypasses the recurrent product (`direct`), and multiply by `keep`.
        dh_new = times_mask(arrays, dh_in, t)
        dh_new = dh_new if direct is None else dh_new + direct
        dc_new = dc if dc_prev is None else dc_prev
        if "keep" in arrays:
            carry = direct if dc_prev is None else dc_prev  # a GRU has `direct`, an LSTM has `dc_prev`
            if carry is not None:  # a plain RNN has none
                by_step["carry"][t] = carry if live is None else mx.where(live, carry, 0)
            dh_new, dc_new = times_keep(arrays, dh_new, t), times_keep(arrays, dc_new, t)
        dh, dc = (dh_new, dc_new) if live is None else (mx.where(live, dh_new, dh), mx.where(live, dc_new, dc))
    sweep = {name: mx.stack([steps[t] for t in range(len(steps))]) for name, steps in by_step.items() if steps}
    sweep |= {"y": norms["y"]} if norms else {}
    if problem.cell.carried:
        return sweep | {"dh0": dh, "dc0": dc}
    del sweep["dh"]  # only the gradient of an LSTM's projection reads it
    return sweep | {"dh0": dh}


class StepBackward:
    """Computes the gradients of one step after the other, from the graph of the cell's derivative."""

    def __init__(self, problem: Problem, arrays: Arrays, exposes: bool):
        """Prepare what is the same at all steps. exposes: whether the gates have cotangents."""
        cell, H = problem.cell, problem.H
        self.cell, self.arrays, self.Wh = cell, arrays, arrays["Wh"]
        self.graph = graph = graph_of(cell, arrays, exposes)
        # fixed: the graph's inputs that are the same at every step, by name: peephole weights (w), the matrix of a
        # second product (W0), the norm of c (N0).
        fixed: dict[str, Any] = named("w", cell, arrays["peephole"]) if "peephole" in arrays else {}
        if graph.has_product():
            W = arrays["Wp"] if "Wp" in arrays else self.Wh[cell.block("n", H)]
            fixed |= {"W0": W, "W0T": W.T}
        if graph.has_norm():
            fixed["N0"] = norm_of_c(cell, arrays)
            self.eps: float = fixed["N0"].eps
        # norm: the layer normalisation of the recurrent product or, if `sums`, of its sum with the input's part; or
        # None.
        self.norm, self.sums = None, False
        if cell.norm is not None and cell.norm.of is not None:
            self.norm, self.sums = norm_of(cell, arrays), cell.norm.of == "sum"
        self.fixed_nodes = self.by_node(fixed)
        # of: {name of an input: the node of its gradient}. of_x: the nodes of the gradients of the preactivations or,
        # if the cell reads their two parts separately, of the input's parts. of_p: a pair for each recurrent part: the
        # node of its gradient, and the rows of Wh that compute the part.
        self.of = {name: n for name, n in zip(graph.names, graph.back, strict=True) if name[0] != "w"}
        self.of_x = [self.of[f"x{k}"] for k in range(cell.gates)]
        gates = [(f"p{k}", cell.block(gate, H)) for k, gate in enumerate(cell.gate_order)]
        self.of_p = [(self.of[name], block) for name, block in gates if name in self.of]
        self.order: list[int] = []  # the nodes to compute, the same at every step
        self.constants: dict[mx.Dtype, dict[int, Array]] = {}

    def by_node(self, inputs: Mapping[str, Any]) -> dict[int, Any]:
        """Return {node: value} for {name of an input: value}. Inputs that the graph does not have are left out."""
        number = self.graph.number
        return {number[name]: value for name, value in inputs.items() if name in number}

    def __call__(
        self, t: int, before: Arrays, after: Arrays, dh: Array, dc: Array, dgates: Array | None
    ) -> tuple[Arrays, Array, Array | None, Array | None]:
        """Return (found, dh_in, dc_prev, direct) of step t. found: the step's row of the arrays dz, da, dp, dn and yc
        that `gradients_after_sweep` lists. dh_in [B, P]: the gradient of h_in. dc_prev [B, H]: for an LSTM the gradient
        of c before the step, else None. direct [B, H]: for a GRU the part of the gradient of h before the step that
        bypasses the product with Wh, else None.

        before: the states h and c before the step. For a GRU with reset "after" also q, the candidate's product
        h Wh_n^T + bhn. With a layer normalisation of h_in Wh^T, or of its sum with the input's part, also y and r: the
        numbers before scale and shift, and 1 / sqrt(variance + eps). after: h, c and the gates after the step. dh, dc,
        dgates: the gradients of h (of a projected h before its clip), c and gates in `after`.
        """
        graph, of = self.graph, self.of
        # known: {node: value} for all nodes whose values are known before the backward step computes anything.
        known = self.fixed_nodes | known_after(graph, self.cell, after)
        known |= self.by_node(self.inputs_of(t, before, after, dh, dc, dgates))
        raw, found = None, dict[str, Array]()
        if graph.has_norm():  # raw: c before its normalisation, which the gradient of the normalisation reads
            raw = values_of(graph.nodes, [graph.norm_operand("norm")], known, like=dh)[graph.norm_operand("norm")]
            known[graph.norm_operand("norm")] = raw
        if "Wp" in self.arrays:  # `through_projection_clip` has computed this node: dh is the gradient before the clip
            known[graph.operand("W0")] = dh
        known |= self.constants_of(known, like=dh)
        values = values_of(graph.nodes, of.values(), known, like=dh, order=self.order)
        if raw is not None:
            yc, _ = normalised(raw, blocks=1, eps=self.eps)
            found = {"dn": values[graph.norm_operand("unnorm")], "yc": yc}
        dz = joined([values[n] for n in self.of_x])
        # dh_in: the gradient of h_in. With reset "before" it has three parts: the products with Wh of the gates r and z
        # give one each, and the candidate's product gives the third. The graph computes the third as the gradient of
        # h_in, which it calls i0.
        if "i0" in of:
            dh_in = sum([values[n] @ self.Wh[block] for n, block in self.of_p], values[of["i0"]])
        else:
            dp = joined([values[n] for n, _ in self.of_p]) if self.cell.apart else dz
            if self.norm is not None:
                da, dp = dp, self.norm.before(dp, before["y"], before["r"])
                found |= {"da": da, "dp": dp}
                dz = dp if self.sums else dz
            dh_in = dp @ self.Wh
        dc_prev, direct = values[of["s1"]] if "s1" in of else None, values[of["s0"]] if self.cell.apart else None
        return found | {"dz": dz}, dh_in, dc_prev, direct

    def inputs_of(
        self, t: int, before: Arrays, after: Arrays, dh: Array, dc: Array, dgates: Array | None
    ) -> dict[str, Array]:
        """Return the graph's inputs that differ from step to step, by name. before, after: the states before and after
        step t, by name. dh, dc, dgates: the gradients of h, c and gates after the step."""
        given = {"s0": before["h"], "d0": dh, "d1": dc}
        if "c" in before:
            given["s1"] = before["c"]
        if "i0" in self.of:
            given["i0"] = times_mask(self.arrays, before["h"], t)
        given |= {f"p{k}": before["q"] for k in self.graph.recomputed}
        if dgates is not None:
            given |= named("e", self.cell, dgates)
        if self.cell.stops_c or self.graph.has_norm():  # with a norm of c the graph computes the clipped c again
            given |= limits_of(self.cell, after["c"], dh)
        return given

    def constants_of(self, known: Mapping[int, Array], like: Array) -> dict[int, Array]:
        """Return {node: array} for the constants of the graph, in the dtype of `like`. The first call creates them and
        fills `self.order`, the list of the nodes to compute; both are the same at every step. known: the nodes whose
        values are known."""
        if like.dtype not in self.constants:
            nodes = self.graph.nodes
            every = order_of(self.graph, tuple(self.of.values()), frozenset(known))
            numbers = {n: nodes[n].value for n in every if nodes[n].op == "const"}
            self.constants[like.dtype] = {n: constant(value, like) for n, value in numbers.items()}
            self.order[:] = [n for n in every if n not in numbers]
        return self.constants[like.dtype]


@lru_cache(128)
def order_of(graph: CellGraph, outputs: tuple[int, ...], known: frozenset[int]) -> list[int]:
    """Return the nodes that must be computed to get the outputs, operands first. known: nodes whose values are
    known."""
    return [n for n in needed(graph.nodes, outputs, known) if n not in known]


def known_after(graph: CellGraph, cell: AnyCell, after: Arrays) -> dict[int, Array]:
    """Return {node: value} for the nodes that are known after a step. after: h, c and the gates, or some of them."""
    known = {n: after["hc"[k]] for n, k in graph.known_after().items()}  # k: the number of a state, 0 for h, 1 for c
    if graph.saved and "gates" in after:
        known |= zip(graph.saved, by_gate(cell, after["gates"]).values(), strict=True)
    return known


def through_projection_clip(cell: AnyCell, arrays: Arrays, after: Arrays, dh: Array) -> Array:
    """Return the gradient of a projected h before the clip `projection_clip`: dh [.., P], or 0 where the clip changed
    h. after: h, c and the gates after the step or, with an axis of time, after all steps."""
    # The graph of an LSTM with a projection (Wp), whose gates have no cotangents. d0: the gradient of h.
    graph, Wp = graph_of(cell, ["Wp"], exposes=False), arrays["Wp"]
    given = {"d0": dh, "W0T": Wp.T} | limits_of(cell, None, after["h"])
    known = known_after(graph, cell, after) | {graph.number[name]: array for name, array in given.items()}
    # The forward step multiplies the vector of `projected_vector` by Wp^T ("W0T"). The backward step multiplies the
    # gradient before the clip, the wanted result, by Wp ("W0"): node n.
    known[graph.operand("W0T")] = projected_vector(cell, arrays, after).astype(Wp.dtype)
    n = graph.operand("W0")
    return values_of(graph.nodes, [n], known, like=dh)[n]


def projected_vector(cell: AnyCell, arrays: Arrays, after: Arrays) -> Array:
    """Return the vector [.., H] that an LSTM's projection multiplies by Wp^T: o * activation(c) or, if the call
    normalises c, o * activation(norm(c)). after: h, c and the gates after one step or all steps."""
    graph = graph_of(cell, ["Wp"], exposes=False)  # an LSTM with a projection; its gates have no cotangents
    # n: the node of this vector.
    n, known = graph.operand("W0T"), dict[int, Any](known_after(graph, cell, after))
    if graph.has_norm():
        known[graph.number["N0"]] = norm_of_c(cell, arrays)
    return values_of(graph.nodes, [n], known, like=after["c"])[n]


def gradients_after_sweep(problem: Problem, arrays: Arrays, saved: Arrays, sweep: Arrays) -> Arrays:
    """Return the gradients of all arrays of the call, except lengths. sweep: the results of the backward steps, stacked
    over time. It contains

        dz [T, B, D G H]    the gradient of the preactivations
        dh0, dc0            the gradients of the first states
        dh [T, B, D P]      for an LSTM, the gradient of h, for the gradient of the projection
        da, dp, y           with a norm of the product h Wh^T, or of its sum with the input's part: the gradient of its
                            result, the gradient of the product, and the numbers with mean 0 and variance 1, before
                            scale and shift
        dn, yc              with a norm of c: da and y of this norm
        carry [T, B, D H]   with the option `keep`, a factor on the states: the gradient of keep * c (LSTM), or the part
                            of the gradient of keep * h that bypasses the recurrent product (GRU). A cell written by
                            the user may have both, and several states in c: [T, B, D N H]
    """
    gradients = input_gradients(arrays, sweep["dz"])
    each = by_direction(problem, arrays, saved, sweep)
    gradients |= join_gradients([recurrent_gradients(own, *values) for _, own, values in each], arrays)
    gradients |= {name: sweep[f"d{name}"] for name in ("h0", "c0") if name in arrays}
    return {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items() if name in arrays}


def input_gradients(arrays: Arrays, dz: Array) -> Arrays:
    """Return the gradients of x, Wx and b, computed from dz [T, B, D G H]. Each is one product or sum over all T * B
    rows."""
    x, Wx = arrays["x"], arrays.get("Wx")
    gradients = {"x": dz}  # without Wx the caller passes the product as x, so dz is the gradient of x
    if Wx is not None:
        gradients = {
            "x": (flat(dz) @ Wx).reshape(x.shape),
            "Wx": flat(dz).T @ flat(without_padding(arrays.get("lengths"), x)),
        }
    if "b" in arrays:
        gradients["b"] = total(flat(dz), axis=0)
    return gradients


def recurrent_gradients(problem: Problem, arrays: Arrays, saved: Arrays, sweep: Arrays) -> Arrays:
    """Return the gradients of Wh, bhn, peephole, mask, keep, Wp and of the norms' arrays for one direction. Each
    gradient is one product or one sum over all T * B rows. saved: the outputs of the forward pass. sweep: the results
    of the backward steps; `gradients_after_sweep` lists them."""
    cell, mask, h, lengths = problem.cell, arrays.get("mask"), saved["h"], arrays.get("lengths")
    # dp: the gradient of the recurrent product. Without a norm it is dz, the gradient of the preactivations.
    dp = sweep.get("dp", sweep["dz"])
    if not {"Wh", "keep"} & arrays.keys():  # only a user's cell may have no recurrent product
        return {}
    before = states_before(problem, arrays, saved)
    h_prev = times_keep(arrays, before["h"])
    h_in = without_padding(lengths, h_prev if mask is None else h_prev * mask)
    dh_in = None  # the gradient of h_in; None if it is not computed yet
    if cell.apart and "dp" not in sweep:  # a GRU, in which the gradient of the candidate's product is dz_n r
        gradients, dh_in = gru_recurrent_gradients(cell, arrays, saved["gates"], h_in, dp)
    elif "Wh" in arrays:
        gradients = {"Wh": flat(dp).T @ flat(h_in)} | norm_gradients(cell, sweep)
    else:
        return {"keep": keep_gradient(cell, before, None, sweep.get("carry"))}
    if "peephole" in arrays:
        of_gates = sweep.get("da", dp)  # with a norm da, because the peephole's term is added to the norm's result
        gradients["peephole"] = peephole_gradient(cell, of_gates, times_keep(arrays, before["c"]), saved["c"])
    if {"mask", "keep"} & arrays.keys():
        # dh_in is the gradient of h_in = mask * keep * h. For a GRU it is computed already. Multiply it by h_prev =
        # keep * h for the gradient of the mask, and by the mask for the gradient of keep * h.
        if dh_in is None:
            dh_in = (flat(dp) @ arrays["Wh"]).reshape(h_prev.shape)
        if mask is not None:
            gradients["mask"], dh_in = sum_to_shape(dh_in * h_prev, mask.shape), dh_in * mask
        if "keep" in arrays:
            gradients["keep"] = keep_gradient(cell, before, without_padding(lengths, dh_in), sweep.get("carry"))
    if "Wp" in arrays:
        m = projected_vector(cell, arrays, saved).astype(h.dtype)
        gradients["Wp"] = flat(sweep["dh"]).T @ flat(m)
    return gradients


def norm_gradients(cell: AnyCell, sweep: Arrays) -> Arrays:
    """Return the gradients of the scale and shift of each norm, and of bhn, which a GRU adds to the norm's result.
    sweep: da and dn are the gradients of the norms' results, y and yc the numbers before scale and shift."""
    gradients: Arrays = {}
    for name, d, y in (("norm", "da", "y"), ("norm_c", "dn", "yc")):
        if d in sweep:
            gradients[f"{name}_scale"] = total(sweep[d] * sweep[y], axis=(0, 1))
            gradients[f"{name}_shift"] = total(sweep[d], axis=(0, 1))
    if cell.op == "gru" and "da" in sweep:
        gradients["bhn"] = total(by_gate(cell, sweep["da"])["n"], axis=(0, 1))
    return gradients


def keep_gradient(cell: AnyCell, before: Arrays, dh: Array | None, carry: Array | None) -> Array:
    """Return the gradient of the option `keep`, [T, B, 1].

    before: the states h and c before each step. dh [T, B, P]: the gradient of keep * h through the recurrent product,
    None without a product. carry [T, B, N H]: the gradients of keep * state for the N states that a step also reads
    outside of the product: h if the cell `passes_h`, and all states in c.
    """
    gradient = mx.zeros(before["h"].shape[:2]) if dh is None else total(dh * before["h"], axis=-1)
    if carry is not None:
        states = [before[name] for name in "hc" if name in before and (name == "c" or cell.passes_h)]
        gradient = gradient + total(carry * joined(states), axis=-1)
    return gradient[..., None]


def gru_recurrent_gradients(
    cell: AnyCell, arrays: Arrays, gates: Array, h_in: Array, dz: Array
) -> tuple[Arrays, Array | None]:
    """Return the gradients of Wh and bhn of a GRU, and the gradient of h_in [T, B, H]. The gradient of h_in is None
    if the call has neither a mask nor `keep`, because only their gradients need it. gates [T, B, 3H]: the outputs of
    the forward pass. h_in: h before each step, times the mask. dz [T, B, 3H]: the gradients of the input parts."""
    d, r = by_gate(cell, dz), by_gate(cell, gates)["r"]
    # seen: the array that each gate's rows of Wh multiply. The gradient of these rows is d^T times `seen`, where d is
    # the gradient of the recurrent product with these rows. The reset gate r multiplies the candidate's product
    # ("after") or the h_in that enters it ("before").
    seen = dict.fromkeys("rz", h_in) | {"n": h_in if cell.reset == "after" else r * h_in}
    if cell.reset == "after":
        d["n"] = d["n"] * r
    gradients = {"Wh": mx.concatenate([flat(d[gate]).T @ flat(seen[gate]) for gate in cell.gate_order])}
    if "bhn" in arrays:
        gradients["bhn"] = total(flat(d["n"]), axis=0)
    if not {"mask", "keep"} & arrays.keys():
        return gradients, None
    Wh = {gate: arrays["Wh"][cell.block(gate, h_in.shape[-1])] for gate in "rzn"}
    terms = {gate: (flat(d[gate]) @ Wh[gate]).reshape(h_in.shape) for gate in "rzn"}
    return gradients, terms["r"] + terms["z"] + (terms["n"] if cell.reset == "after" else r * terms["n"])


def normalised_products(problem: Problem, arrays: Arrays, h_prev: Array) -> Arrays:
    """Return the normalised recurrent products (or sums with the input's part) of all steps: {"y": the numbers with
    mean 0 and variance 1, before scale and shift [T, B, G H], "r": 1 / sqrt(variance + eps) [T, B, blocks]}. Return an
    empty dict if the cell normalises neither.

    The backward pass computes these arrays with one product over all T * B rows, so that the forward pass need not save
    them. h_prev [T, B, P]: h before each step, times `keep`.
    """
    cell = problem.cell
    if cell.norm is None or cell.norm.of is None:
        return {}
    h_in = h_prev * arrays["mask"] if "mask" in arrays else h_prev
    a = (flat(h_in) @ arrays["Wh"].T).reshape(*h_prev.shape[:2], -1)
    if cell.norm.of == "sum":
        a = a + project(problem, arrays)
    y, r = normalised(without_padding(arrays.get("lengths"), a), norm_blocks(cell), cell.norm.eps)
    return {"y": y, "r": r}


def gru_candidates(problem: Problem, arrays: Arrays, h_prev: Array, y: Array | None) -> Arrays:
    """Return {"q": the recurrent product of the candidate at every step, [T, B, H]}, computed as one product. Return an
    empty dict unless the cell is a GRU whose reset comes after this product. y: the product, if it is normalised."""
    cell = problem.cell
    if cell.reset != "after":
        return {}
    h_in = h_prev * arrays["mask"] if "mask" in arrays else h_prev
    Wh_n = arrays["Wh"][cell.block("n", problem.H)]  # the rows of the candidate n
    # q: the candidate's product or, with a norm, the candidate's part of the scaled and shifted y.
    q = flat(h_in) @ Wh_n.T if y is None else flat(by_gate(cell, norm_of(cell, arrays).scaled(y))["n"])
    return {"q": (q + arrays["bhn"] if "bhn" in arrays else q).reshape(h_prev.shape)}


def peephole_gradient(cell: AnyCell, dz: Array, c_prev: Array, c: Array) -> Array:
    """Return the gradient of the peephole weights [4H], in gate order. For each gate it is the sum, over steps and
    batch, of its part of dz [T, B, 4H] times the c that its peephole reads: c_prev [T, B, H] before the step or, for o
    by default, c after it. All four gates have peephole weights; they are 0 for a gate without a peephole."""
    seen = {gate: c if gate == "o" and cell.output_peephole == "current" else c_prev for gate in "ifgo"}
    return mx.concatenate([total(block * seen[gate], axis=(0, 1)) for gate, block in by_gate(cell, dz).items()])


def project(problem: Problem, arrays: Arrays) -> Array:
    """Return the input's part of the preactivations [T, B, D G H], computed as one product over all T * B rows."""
    x = arrays["x"]
    return project_rows(problem, arrays, flat(x)).reshape(*x.shape[:2], -1)


def project_rows(problem: Problem, arrays: Arrays, rows: Array) -> Array:
    """Return the input's part of the preactivations, [n, D G H]. rows: rows of x, one for each step and batch item, [n,
    I]; without Wx they are the products x Wx^T, [n, D G H]."""
    z = times_input(problem.packing, arrays, rows) if "Wx" in arrays else rows
    return z + arrays["b"] if "b" in arrays else z


def initial_states(problem: Problem, arrays: Arrays) -> tuple[Array, Array]:
    """Return h0 [B, P] and c0 [B, C H] of a cell with C states besides h (C = 1 for an LSTM). A state that the call
    does not have is zeros. A cell without c gets a c0 [B, H], which nobody reads, so that all callers get two
    states."""
    B, dtype, widths = problem.B, arrays["x"].dtype, {"h0": problem.P, "c0": (problem.cell.carried or 1) * problem.H}
    h0, c0 = (arrays[name] if name in arrays else mx.zeros((B, width), dtype) for name, width in widths.items())
    return h0, c0


def states_before(problem: Problem, arrays: Arrays, saved: Arrays) -> Arrays:
    """Return h [T, B, P] and, for an LSTM, c [T, B, H] before each step, not yet multiplied by `keep`."""
    first = dict(zip("hc", initial_states(problem, arrays), strict=True))
    lengths = arrays.get("lengths")
    return {name: before_each_step(problem, saved[name], first[name], lengths) for name in "hc" if name in saved}


def before_each_step(problem: Problem, states: Array, first: Array, lengths: Array | None) -> Array:
    """Return the state before each step, [T, B, .]. states [T, B, .]: the state after each step. first [B, .]: the
    first state."""
    first = first[None]  # [1, B, .]
    if not problem.reverse:
        return mx.concatenate([first, states[:-1]])
    shifted = mx.concatenate([states[1:], first])
    if lengths is None:
        return shifted
    # In reverse a batch item begins at its own last step, lengths - 1, with its first state.
    begins = mx.arange(problem.T)[:, None, None] == lengths[:, None] - 1
    return mx.where(begins, first, shifted)


def times_keep(arrays: Arrays, states: Array, t: int | slice = slice(None)) -> Array:
    """Return the states times `keep`, or unchanged without this option: [B, .] at step t, or [T, B, .] for all steps.
    The derivative of this function is the same product, so the backward pass calls it with gradients of the states."""
    return states * arrays["keep"][t, ...] if "keep" in arrays else states


def times_mask(arrays: Arrays, h: Array, t: int) -> Array:
    """Return h [B, P] times the mask of step t, or h unchanged without a mask. The derivative of this function is the
    same product, so the backward pass calls it with the gradient of h."""
    if "mask" not in arrays:
        return h
    mask = arrays["mask"]  # at most two axes: the same mask at all steps; else [T or 1, B or 1, P or 1]
    return h * (mask if mask.ndim < 3 else mask[t if mask.shape[0] > 1 else 0, ...])


def without_padding(lengths: Array | None, sequence: Array) -> Array:
    """Return a sequence [T, B, .] with 0 where a batch item has ended. The padding after its end may contain NaN, which
    would make a sum NaN even if it were multiplied by 0."""
    if lengths is None:
        return sequence
    return of_live(mx.arange(sequence.shape[0])[:, None] < lengths, sequence)  # true where step t < the item's length


def of_live(live: Array, sequence: Array) -> Array:
    """Return a sequence [T, B, .] with 0 at every step and item for which the bool array `live` [T, B] is false."""
    return mx.where(live.reshape(*live.shape, *[1] * (sequence.ndim - 2)), sequence, mx.array(0, sequence.dtype))


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Return x, summed to this shape over the axes that `shape` lacks, or in which its size is 1, as for the gradient
    of a broadcast."""
    added = x.ndim - len(shape)  # how many axes `shape` lacks in front
    axes = [added + axis for axis, size in enumerate(shape) if size == 1 and x.shape[added + axis] > 1]
    return total(x, axis=[*range(added), *axes]).reshape(shape) if added or axes else x


def total(x: Array, axis: int | Sequence[int]) -> Array:
    """Return the sum of x over `axis`. 16-bit numbers are summed in float32."""
    return widened(x).sum(axis=axis)


def flat(x: Array) -> Array:
    """Reshape [T, B, .] to rows [T * B, .]."""
    return x.reshape(-1, x.shape[-1])
