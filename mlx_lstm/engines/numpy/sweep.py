"""Engine `numpy`: run the recurrence on the CPU with NumPy's BLAS, writing directly into the memory of MLX arrays.

The equations are those of `engines.ops.cells`, written into preallocated buffers. Within a step every array is
feature-major, [GH, B] or [H, B]. The large matrix is then the left factor of the recurrent product, which runs up to
twice as fast in BLAS, and every gate is one contiguous block. Therefore gates and c are allocated as [T, D G H, B]
and [T, D H, B], and callers get transposed views of them; h has the memory order of x. Each direction writes its own
rows and columns of the arrays that both share. Only float32 and float64 are supported: the caller casts.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ..cells import GRUCell, LSTMCell, PointwiseCell, RNNCell
from ..directions import one_direction, part
from ..packing import is_packed
from ..problem import Arrays, Problem
from .arrays import (
    BATCH_MAJOR,
    FEATURE_MAJOR,
    Array,
    NewArray,
    NewSequence,
    Views,
    chunk_steps,
    first_state,
    matrix,
    order_of,
    steps_of,
    view,
    views,
)
from .gru import GRUStep, GRUStepBackward
from .lstm import LSTMStep, LSTMStepBackward
from .pointwise import PointwiseStep, PointwiseStepBackward
from .products import WeightGradients, factored_names
from .rnn import RNNStep, RNNStepBackward
from .weights import with_float_weights

Saved = dict[str, mx.array | Array | None]

STEPS: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    LSTMCell: (LSTMStep, LSTMStepBackward),
    GRUCell: (GRUStep, GRUStepBackward),
    RNNCell: (RNNStep, RNNStepBackward),
    PointwiseCell: (PointwiseStep, PointwiseStepBackward),
}
"""For each cell the class of a forward step and the class of a backward step."""


def forward(problem: Problem, arrays: Arrays, batch_first: bool = False, wants_last: bool = True) -> Saved:
    """Run the forward pass. Return the cell's outputs by name: h [T, B, D P], gates [T, B, D G H], hT [B, D P]; for
    an LSTM also c [T, B, D H] and cT [B, D H].

    If the caller does not request gates but trains, `gates` is a NumPy array for the backward pass; it is None for
    inference and for a plain RNN, whose gradient does not need it. With `batch_first` x, h, c and gates are [B, T,
    .]. Without `wants_last`, hT and cT are missing. For a single step, x [B, I], the only outputs are hT and cT.
    """
    packing = problem.packing
    v = views(arrays if packing is None else with_float_weights(packing, arrays))
    single = v["x"].ndim == 2
    if single:
        v["x"] = v["x"][None]
    elif batch_first:
        v["x"] = v["x"].transpose(BATCH_MAJOR)
    dtype, (T, B, H, P), D, cell = v["x"].dtype, problem[:4], problem.directions, problem.cell
    widths = {"h": D * P, "c": D * cell.carried * H} if cell.carried else {"h": D * P}
    last = {f"{name}T": NewArray(dtype, (B, width)) for name, width in widths.items()} if wants_last else {}
    sequences: dict[str, NewArray] = {}
    if not single:
        sequences["h"] = NewSequence(dtype, (T, B, D * P), order_of(v["x"]), batch_first)
        if "c" in widths:
            sequences["c"] = NewSequence(dtype, (T, B, widths["c"]), FEATURE_MAJOR, batch_first)
    rows, hidden = D * cell.kept * H, None
    if problem.return_gates:
        sequences["gates"] = NewSequence(dtype, (T, B, rows), FEATURE_MAJOR, batch_first)
    elif problem.training and not isinstance(cell, RNNCell):
        # MLX initializes the memory of its arrays, which costs an additional write. Gates that MLX need not see are
        # therefore allocated by NumPy.
        hidden = np.empty((T, rows, B), dtype).transpose(FEATURE_MAJOR)
    out = {name: array.memory for name, array in sequences.items()}
    if hidden is not None:
        out["gates"] = hidden
    if single:  # h and c have one step and share the memory of hT and cT
        out |= {name: last[f"{name}T"].memory[None] for name in widths}
    else:
        out |= {name: array.memory for name, array in last.items()}
    with np.errstate(all="ignore"):  # see `each_direction`
        for d, one in each_direction(problem):
            sweep_forward(one, of_direction(d, v), of_direction(d, out))
    return {"gates": hidden} | {name: array.to_mlx() for name, array in (sequences | last).items()}


def backward(problem: Problem, arrays: Arrays, saved: Saved, cotangents: Arrays, as_factors: bool = False) -> Arrays:
    """Return the gradients of all arrays except quantized weights.

    saved: what `forward` returned. cotangents: those of some outputs, by output name. as_factors: return some weight
    gradients as two factors, which `multiplied` then multiplies.
    """
    if saved.get("gates") is None and not isinstance(problem.cell, RNNCell):
        saved = forward(problem._replace(training=True), arrays)
    packing = problem.packing
    v, dv = views(arrays if packing is None else with_float_weights(packing, arrays)), views(cotangents)
    outputs = {name: view(array) for name, array in saved.items() if name in ("h", "c", "gates") and array is not None}
    wanted = [name for name in v if name not in ("x", "lengths") and not (packing and is_packed(name, arrays))]
    factored = [name for name in factored_names(problem, v) if name in wanted] if as_factors else []
    new = {name: NewArray(v[name].dtype, v[name].shape) for name in wanted if name not in factored}
    new["x"] = NewSequence(v["x"].dtype, v["x"].shape, order_of(v["x"]))
    out = {name: array.memory for name, array in new.items()}
    for name in {"mask", "keep", "inputs"} & out.keys():
        out[name].fill(0)  # the steps add to the mask's gradient, and write keep's only where a step runs
    projects = "Wx" in v  # read from v: among the gradients Wx is missing if it is quantized
    written: set[int] = set()
    factors: Arrays = {}
    with np.errstate(all="ignore"):
        for d, one in each_direction(problem):
            own = (of_direction(d, values, projects) for values in (v, outputs, dv, out))
            sweep = BackwardSweep(one, written, factored, *own)
            sweep.run()
            for name, blocks in sweep.products.factors.items():
                each = [factor for row in sorted(blocks) for factor in blocks[row]]
                factors |= {f"{name} {n}": mx.array(factor) for n, factor in enumerate(each)}
    return factors | {name: array.to_mlx() for name, array in new.items()}


def multiplied(gradients: Arrays) -> Arrays:
    """Return the gradients, with each pair of factors from `backward` replaced by a lazy MLX product.

    The factors are named "Wh 0", "Wh 1" and so on: left [n, rows] and right [n, columns] in turn, one pair for each
    block of the gradient's rows. A program that calls a layer at every time step sums the gradients of all calls.
    MLX computes lazy products one by one while it sums them; products computed immediately would all be in memory at
    once.
    """
    blocks: dict[str, list[mx.array]] = {}
    factors = iter([name for name in gradients if " " in name])
    for left, right in zip(factors, factors, strict=True):
        blocks.setdefault(left.partition(" ")[0], []).append(gradients[left].T @ gradients[right])
    products = {name: each[0] if len(each) == 1 else mx.concatenate(each) for name, each in blocks.items()}
    return products | {name: gradient for name, gradient in gradients.items() if " " not in name}


def each_direction(problem: Problem) -> list[tuple[int | None, Problem]]:
    """Return [(0, problem of direction 0), (1, problem of direction 1)], or [(None, problem)] for a single
    direction.

    Callers run the directions one after the other, because BLAS uses threads itself. The gain from one thread per
    direction is not measured; the threads would have to take turns where both add to dx and to the gradient of a
    shared mask.

    Callers run them under `np.errstate(all="ignore")`, whatever the user's np.seterr says. Infinity and NaN in
    padding, overflow of exp in a sigmoid that is 0, and underflow are no errors, as in MLX's own operations.
    """
    return [(d, one_direction(problem, d)) for d in range(2)] if problem.bidirectional else [(None, problem)]


def of_direction(d: int | None, values: Views, projects: bool | None = None) -> Views:
    """Return direction d's part of all arrays, or all arrays unchanged if d is None. projects: whether the call has
    a Wx; None if Wx would be among these arrays."""
    return values if d is None else part(values, d, projects)


def sweep_forward(problem: Problem, v: Views, out: Views) -> None:
    """Run all steps of one direction. Write the outputs that `out` contains: h [T, B, P], c [T, B, H], gates [T, B,
    GH], hT [B, P] and cT [B, H]."""
    dtype, (T, B, H, _), keep, mask = v["x"].dtype, problem[:4], v.get("keep"), step_mask(v, problem)
    step = STEPS[type(problem.cell)][0](problem, problem.cell, v, mask)
    products, (lengths, shortest) = step.products, ends(problem, v)
    buffers, block = products.h_buffers, products.block
    h, gates = out["h"], out["gates"].transpose(FEATURE_MAJOR) if "gates" in out else None
    if "c" in out:
        c, c_prev = out["c"].transpose(FEATURE_MAJOR), first_state(v, "c0", (problem.cell.carried * H, B), dtype)
    else:  # of width 0, so that the loop below serves every cell
        c, c_prev = np.empty((T, 0, B)), np.empty((0, B))
    c_kept = np.empty(c.shape[1:], dtype)  # keep * c_prev
    ragged = c if shortest == T else np.empty((2, *c.shape[1:]), dtype)  # c after a step, ended items included
    times, onwards = problem.steps(), -1 if problem.reverse else 1
    h_prev = buffers[times[0] % len(buffers)]
    h_prev[...] = v["h0"].T if "h0" in v else 0
    inputs, start, stop, inputs_t = None, 0, 0, None
    for t in times:
        gates_t, c_t = None if gates is None else gates[t], c[t]
        h_new = buffers[(t + onwards) % len(buffers)]  # the array from which the next step reads h
        live = None if t < shortest else lengths > t  # [B]: items that have not ended; None: all
        if live is not None and not live.any():
            for output in (h[t], c_t) if gates_t is None else (h[t], c_t, gates_t):
                output[...] = 0
            np.copyto(h_new, h_prev)
            h_prev = h_new
            continue
        if not start <= t < stop:  # load another block; in reverse its last step comes first
            start = t - t % block
            stop = start + block
            inputs = products.load(start)
        if inputs is not None:
            inputs_t = inputs[:, (t - start) * B : (t - start + 1) * B]
        if keep is not None:
            h_prev *= keep[t].T
            c_prev = np.multiply(c_prev, keep[t].T, out=c_kept)
        if mask is not None:
            np.multiply(h_prev, mask[t].T, out=products.h_rows[t % len(products.h_rows)])
        if "inputs" in v and isinstance(step, PointwiseStep):
            np.copyto(step.us, v["inputs"][t].T)
        step(products.operands[t % len(products.operands)], inputs_t, h_prev, c_prev, gates_t, c_t, h_new)
        np.copyto(h[t], h_new.T)
        if live is None:
            c_prev = c_t
        else:  # items that have ended keep their state, and their outputs are 0
            ended = ~live
            np.copyto(h_new, h_prev, where=ended)
            h[t][ended] = 0
            if gates_t is not None:
                gates_t[:, ended] = 0
            np.copyto(ragged[t % 2], c_prev)
            c_prev = ragged[t % 2]
            np.copyto(c_prev, c_t, where=live)
            c_t[:, ended] = 0
        h_prev = h_new
    for name, state in (("hT", h_prev), ("cT", c_prev)):
        if name in out:
            out[name][...] = state.T


class BackwardSweep:
    """The backward pass of one direction: it runs the steps in reverse in chunks of time, and after each chunk the
    matrix products over its steps.

    The steps carry dh [P, B] and dc [H, B] ([0, B] for a cell without c): the gradients of the state after a step,
    without the cotangents of the outputs h and c at that step.
    """

    def __init__(
        self,
        problem: Problem,
        written: set[int],
        factored: list[str],
        v: Views,
        saved: Views,
        dv: Views,
        out: Views,
    ):
        """Prepare the backward pass of one direction. v: the arrays of the call. saved: the outputs h, c and gates
        of the forward pass. dv: the cotangents of some outputs. out: the memory for the gradients. written,
        factored: see `WeightGradients`."""
        dtype, (_, B, H, P), carried = v["x"].dtype, problem[:4], problem.cell.carried
        self.problem, self.v, self.dv, self.out, self.h = problem, v, dv, out, saved["h"]
        self.lengths, self.shortest = ends(problem, v)
        self.mask: Any = step_mask(v, problem)
        self.step: Any = STEPS[type(problem.cell)][1](problem, problem.cell, v, saved)
        self.products: WeightGradients = WeightGradients(out, written, factored)
        has_c = "c" in saved
        self.c_at: Callable[[int], Any] = steps_of(saved["c"]) if has_c else lambda t: None
        self.c0: Any = first_state(v, "c0", (carried * H, B), dtype) if has_c else None
        self.dh: Array = first_state(dv, "hT", (P, B), dtype)
        self.dc: Array = first_state(dv, "cT", (carried * H if has_c else 0, B), dtype)

    def run(self) -> None:
        """Run all steps, then write the gradients of the first states and of the peephole weights."""
        T, chunk, out = self.problem.T, chunk_steps(self.problem), self.out
        bounds = [(start, min(start + chunk, T)) for start in range(0, T, chunk)]
        for start, stop in bounds if self.problem.reverse else reversed(bounds):
            self.run_chunk(start, stop)
        for name, d_state in (("h0", self.dh), ("c0", self.dc)):
            if name in out:
                out[name][...] = d_state.T
        if "peephole" in out and isinstance(self.step, LSTMStepBackward):
            np.sum(self.step.dpeephole, axis=1, out=out["peephole"])
        if "params" in out and isinstance(self.step, PointwiseStepBackward):
            np.sum(self.step.dparams, axis=1, out=out["params"])

    def run_chunk(self, start: int, stop: int) -> None:
        """Run the steps from `start` to `stop` backward, then add their weight gradients."""
        problem, v, dv, step, dh, dc, keep = (
            self.problem,
            self.v,
            self.dv,
            self.step,
            self.dh,
            self.dc,
            self.v.get("keep"),
        )
        h_before = self.h_before(start, stop)  # [steps, B, P]
        h_prev = h_before if keep is None else h_before * keep[start:stop]
        h_in = h_prev if self.mask is None else h_prev * self.without_padding(self.mask, start, stop)
        h_in = h_in.reshape(-1, problem.P)
        if isinstance(step, (GRUStepBackward, PointwiseStepBackward)):
            step.begin_chunk(start, h_prev, h_in)
        times = range(start, stop)
        for t in times if problem.reverse else reversed(times):
            columns = slice((t - start) * problem.B, (t - start + 1) * problem.B)
            live = None if t < self.shortest else self.lengths > t  # [B]: items that have not ended; None: all
            if live is not None and not live.any():
                for array in step.by_column:
                    array[:, columns] = 0
                continue
            # An ended item skips this step: its gradients are saved here and restored after the step.
            passing: Any = None if live is None else (dh.copy(), dc.copy())
            if "h" in dv:
                dh += dv["h"][t].T
            if "c" in dv:
                dc += dv["c"][t].T
            dgates = dv["gates"][t].T if "gates" in dv else None
            if live is not None:
                dh[:, ~live] = dc[:, ~live] = 0
                dgates = None if dgates is None else np.where(live, dgates, 0)
            c_before: Any = None if self.c0 is None else self.c_before(t)
            c_prev = c_before if c_before is None or keep is None else c_before * keep[t].T
            step(t, columns, c_prev, self.c_at(t), dh, dc, dgates)
            if isinstance(step, PointwiseStepBackward):
                step.finish(t, columns, live, self.out)
            if self.mask is not None:
                self.through_mask(t, h_prev[t - start], live)
            if step.direct is not None:
                dh += step.direct
            if keep is not None:
                self.through_keep(t, h_before[t - start], c_before, live)
            if live is not None:
                np.copyto(dh, passing[0], where=~live)
                np.copyto(dc, passing[1], where=~live)
        step.end_chunk(self.products, h_in)
        n = (stop - start) * problem.B
        dz = step.dz[:, :n]  # [GH, n]
        self.products.write_input(start, stop, dz, v.get("Wx"))
        if "Wx" in self.out or "Wx" in self.products.factors:
            x = self.without_padding(v["x"], start, stop).reshape(n, -1)
            self.products.accumulate("Wx", dz, matrix(x))
        self.products.accumulate("b", dz, np.ones(n, dz.dtype))

    def through_mask(self, t: int, h_prev: Array, live: Array | None) -> None:
        """Turn dh, the gradient of mask * h_prev, into the gradient of h_prev [B, P], and add this step's term to
        the gradient of the mask."""
        dmask, terms = self.out["mask"], self.dh.T * h_prev
        terms = terms if live is None else np.where(live[:, None], terms, 0)
        add_unbroadcast(terms, dmask if dmask.ndim < 3 or dmask.shape[0] == 1 else dmask[t])
        self.dh *= self.mask[t].T

    def through_keep(self, t: int, h_before: Array, c_before: Array | None, live: Array | None) -> None:
        """Multiply dh and dc, the gradients of keep * state, by keep, so that they become the gradients of the state
        before the step. Write step t of the gradient of `keep`."""
        keep, terms = self.v["keep"][t].T, (self.dh * h_before.T).sum(axis=0)
        if c_before is not None:
            terms += (self.dc * c_before).sum(axis=0)
        self.out["keep"][t, :, 0] = terms if live is None else np.where(live, terms, 0)
        self.dh *= keep
        self.dc *= keep

    def h_before(self, start: int, stop: int) -> Array:
        """Return h before each of the steps from `start` to `stop`, [steps, B, P]. The option `keep` (a factor on
        the state before a step) is not applied yet. The result is a view of the saved h, or a copy if it contains
        the first state."""
        problem, states, first = self.problem, self.h, self.v.get("h0", 0)
        if not problem.reverse and start > 0:
            return states[start - 1 : stop - 1]
        if problem.reverse and stop < self.shortest:  # no item starts within these steps
            return states[start + 1 : stop + 1]
        rows = np.empty((stop - start, *states.shape[1:]), states.dtype)
        if not problem.reverse:
            rows[0] = first
            rows[1:] = states[: stop - 1]
            return rows
        # In reverse an item begins with its own last step, which is earlier than step T - 1 if the item is shorter.
        inner = min(stop, problem.T - 1)
        rows[: inner - start] = states[start + 1 : inner + 1]
        rows[inner - start :] = first
        begins = self.lengths == np.arange(start + 1, stop + 1)[:, None]
        np.copyto(rows, first, where=begins[..., None])
        return rows

    def c_before(self, t: int) -> Array:
        """Return c [H, B] before step t. The option `keep` (a factor on the state before a step) is not applied yet."""
        problem, last = self.problem, t + 1 if self.problem.reverse else t - 1
        if not 0 <= last < problem.T:
            return self.c0
        c: Any = self.c_at(last)
        if problem.reverse and last >= self.shortest:  # items of length t + 1 start with step t
            c = np.where(self.lengths == last, self.c0, c)
        return c

    def without_padding(self, sequence: Array, start: int, stop: int) -> Array:
        """Return the steps from `start` to `stop` of a sequence [T, B, .], with 0 where a batch item has ended. A
        NaN in the padding would spoil a sum even if it were multiplied by 0."""
        if stop <= self.shortest:
            return sequence[start:stop]
        live = np.arange(start, stop)[:, None] < self.lengths
        return np.where(live[..., None], sequence[start:stop], 0)


def ends(problem: Problem, v: Views) -> tuple[Array, int]:
    """Return (lengths, shortest): the length of each batch item, [B], and the smallest of these lengths. Before step
    `shortest` no item has ended."""
    if "lengths" not in v:
        return np.full(problem.B, problem.T), problem.T
    return v["lengths"], int(v["lengths"].min())


def step_mask(v: Views, problem: Problem) -> Array | None:
    """Return the mask on h_prev as a view [T, B, P], or None if the call has no mask."""
    return np.broadcast_to(v["mask"], (problem.T, problem.B, problem.P)) if "mask" in v else None


def add_unbroadcast(term: Array, total: Array) -> None:
    """Sum `term` [B, P] over the axes along which `total` would broadcast to [B, P], and add the sum to `total`."""
    lead = total.ndim - 2
    shape = total.shape[lead:] if lead > 0 else (1,) * -lead + total.shape
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    total += term.sum(axis=axes, keepdims=True).reshape(total.shape)
