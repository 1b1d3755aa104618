"""Run the forward or backward pass of one direction over sequences of different lengths, without the steps of sequences
that have ended.

The steps are divided into segments. A segment runs only the batch items that have not ended before its first step, as a
smaller call with these items' parts of the arrays. Items that end within the segment run on until its last step. The
module `passes` keeps the results of these additional steps out of the outputs and gradients.

T: steps, B: batch items, G: gates, H: hidden units, P: the width of h. v holds the arrays of the call by name (x, Wh,
lengths and so on), `out` the memory of the results, dv the cotangents (the gradients that the caller gives for
outputs). h0, c0: the first states; hT, cT: the last ones. `FEATURE_MAJOR` transposes [T, B, .] to [T, ., B], the memory
order of c and gates. lengths [B]: the number of steps of each item.
"""

from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from ..directions import state_before
from ..problem import Problem
from .passes import BackwardSweep, sweep_forward
from .products import FEATURE_MAJOR, WIDE_BATCH, Array, Views, WeightGradients, transposed

ENDED = 4
"""The number of batch items that must have ended in a segment before a new segment starts. In a batch of fewer than 8 *
ENDED items an eighth of the items is enough."""

SAVED = 0.1
"""The smallest fraction of the work (pairs of step and batch item) that segments must save. If they save less, copying
the arrays takes longer than the saved steps."""


class Segment(NamedTuple):
    """The steps from `start` to `stop` for those batch items that have not ended before step `start`. items: their
    indices in the batch, or a slice if these are neighbours."""

    start: int
    stop: int
    items: Any

    def sizes(self, B: int) -> tuple[int, int]:
        """Return (number of steps, number of batch items) of this segment. B: the items of the whole batch."""
        items = self.items
        return self.stop - self.start, len(range(B)[items]) if isinstance(items, slice) else len(items)

    def of_steps(self, sequence: Array) -> Array:
        """Return a sequence [T, B, .] restricted to the steps and batch items of this segment."""
        return sequence[self.start : self.stop][:, self.items]

    def of_features(self, sequence: Array) -> Array:
        """Do the same as `of_steps` for a sequence that is feature-major in memory. In the result, too, each step is
        contiguous as [., B]."""
        steps = sequence[self.start : self.stop].transpose(FEATURE_MAJOR)
        if isinstance(self.items, slice):
            return steps[:, :, self.items].transpose(FEATURE_MAJOR)
        return np.take(steps, self.items, axis=2).transpose(FEATURE_MAJOR)

    def write(self, sequence: Array, part: Array) -> None:
        """Write `part`, the results of this segment, into its place in a sequence [T, B, .]. If the sequence is
        feature-major in memory, NumPy writes it in the order of its memory."""
        target, source = sequence[self.start : self.stop], part
        if target.strides[1] < target.strides[2]:  # feature-major: two items are closer than two features
            target.transpose(FEATURE_MAJOR)[:, :, self.items] = source.transpose(FEATURE_MAJOR)
        else:
            target[:, self.items] = source

    def index(self, array: Array) -> tuple[Any, ...]:
        """Return the index that selects the steps and batch items of this segment in an array that broadcasts to [T, B,
        .], such as a mask. An axis of size 1 is taken whole."""
        whole = slice(None)
        steps, items = slice(self.start, self.stop), self.items
        # sizes: the shape of the array, extended to three axes.
        sizes = (1,) * (3 - array.ndim) + array.shape
        index = (steps if sizes[0] > 1 else whole, items if sizes[1] > 1 else whole, whole)
        return index[3 - array.ndim :]  # leave out the axes that the array does not have


def segments(problem: Problem, v: Views) -> list[Segment]:
    """Divide a call with lengths into segments, and return them in the order of time. Return an empty list if the
    segments would save too little (`SAVED`): one pass over all steps and items is then as good."""
    T, B = problem[:2]
    if T == 1:
        return []
    # A longer segment wastes more time on items that have ended within it, but each segment costs as much as one or two
    # steps more, because its arrays are copied. The sum of both costs is smallest near sqrt(T) steps.
    shortest, enough = isqrt(T), min(ENDED, B / 8)
    lengths, found, start = v["lengths"], [], 0
    live = np.flatnonzero(lengths > 0)  # the items of the current segment
    for stop in sorted(set(lengths[live].tolist())):
        left = np.flatnonzero(lengths > stop)
        # left: the items that go on after step `stop`. End the segment there if it has at least `shortest` steps and
        # `enough` of its items have ended by then, or if no item is left.
        if len(left) == 0 or (len(live) - len(left) >= enough and stop - start >= shortest):
            # If the items are neighbours, use a slice instead of indices: NumPy then makes views, not copies.
            first, last = int(live[0]), int(live[-1]) + 1
            found.append(Segment(start, stop, slice(first, last) if last - first == len(live) else live))
            start, live = stop, left
    # run: how many pairs of step and item the segments compute, of T * B pairs in all.
    run = sum([steps * items for steps, items in [segment.sizes(B) for segment in found]])
    return found if run <= (1 - SAVED) * T * B else []


def part_of_call(problem: Problem, v: Views, segment: Segment) -> tuple[Problem, Views]:
    """Return the problem and the arrays of one segment, which can then run like a whole call. Its h0 and c0 are those
    of the whole call, for the items of the segment; the caller replaces them by the states before the segment's first
    step."""
    start, stop, items = segment
    part = dict(v)
    for name in {"x", "keep", "inputs"} & v.keys():
        part[name] = segment.of_steps(v[name])
    if "mask" in v:
        part["mask"] = v["mask"][segment.index(v["mask"])]
    for name in {"h0", "c0"} & v.keys():
        part[name] = v[name][items]
    part["lengths"] = np.minimum(v["lengths"][items] - start, stop - start)
    return problem._replace(T=stop - start, B=len(part["lengths"])), part


def states_of(problem: Problem, v: Views, end: str, dtype: np.dtype, has_c: bool) -> Views:
    """Return {"h": [B, P]} and, if `has_c`, {"c": [B, C H]} with the C states besides h: copies of the arrays of v with
    these names plus `end`, such as h0 and c0, or zeros."""
    widths = {"h": problem.P, "c": problem.cell.carried * problem.H} if has_c else {"h": problem.P}
    zeros = {name: np.zeros((problem.B, width), dtype) for name, width in widths.items()}
    return {name: np.array(v.get(name + end, zero)) for name, zero in zeros.items()}


def forward_in_segments(problem: Problem, parts: list[Segment], v: Views, out: Views, hidden: list[Views]) -> None:
    """Run one direction forward, one segment after the other, and write the outputs for which `out` has memory. This
    memory must contain zeros, which remain at the steps after an item's end.

    hidden: for each segment a dict with the memory for results that only the backward pass reads, such as gates [steps,
    items, GH].
    """
    (_, _, H, P), dtype, cell = problem[:4], v["x"].dtype, problem.cell
    # states: the current states of all items. Each segment reads and replaces the states of its own items.
    states = states_of(problem, v, "0", dtype, has_c="c" in out)
    # one: the problem of a segment. own: its arrays, with the current states of its items as h0 and c0. c has `carried`
    # blocks of H numbers (the states besides h), gates have `kept` blocks.
    order = range(len(parts))
    for n in reversed(order) if problem.reverse else order:
        segment = parts[n]
        one, own = part_of_call(problem, v, segment)
        own |= {f"{name}0": state[segment.items] for name, state in states.items()}
        results: Views = {"h": np.empty((one.T, one.B, P), dtype)}
        for name, width in (("c", cell.carried * H), ("gates", cell.kept * H)):
            if name in out:
                results[name] = np.empty((one.T, width, one.B), dtype).transpose(FEATURE_MAJOR)
        results |= hidden[n]
        results |= {f"{name}T": np.empty((one.B, state.shape[1]), dtype) for name, state in states.items()}
        sweep_forward(one, own, results)
        for name, state in states.items():
            state[segment.items] = results[f"{name}T"]
        for name in {"h", "c", "gates"} & out.keys():
            segment.write(out[name], results[name])
    for name, state in states.items():
        if f"{name}T" in out:
            out[f"{name}T"][...] = state


def backward_in_segments(
    problem: Problem,
    parts: list[Segment],
    products: WeightGradients,
    v: Views,
    saved: Views,
    hidden: list[Views],
    dv: Views,
) -> None:
    """Run one direction backward, one segment after the other. Write every gradient for which `products.out` has
    memory. This memory must contain zeros, which remain in the gradient of x at the steps after an item's end.

    products: sums the gradients of the weights. saved: the outputs of the forward pass. hidden: for each segment a dict
    of what the forward pass saved for it alone, such as gates.
    """
    out, dtype = products.out, v["x"].dtype
    d_states = states_of(problem, dv, "T", dtype, has_c="c" in saved)
    # With a wide batch the steps read Wh fastest if Wh^T is contiguous. So copy it once for all segments.
    ordered = {"Wh": transposed(v["Wh"], problem).T} if "Wh" in v else {}
    adds = "Wx" in v and bool(products.written)  # whether the other direction has written its gradient of x already
    # d_states: the gradients of the current states of all items. A segment reads those of its items as cotangents of
    # its last states, and replaces them by the gradients of its first states. own_...: the arrays of one segment.
    order = range(len(parts))
    for n in order if problem.reverse else reversed(order):
        segment = parts[n]
        start, stop, items = segment
        one, own = part_of_call(problem, v, segment)
        if one.B >= WIDE_BATCH:
            own |= ordered
        own_saved = {name: segment.of_features(saved[name]) for name in {"c", "gates"} & saved.keys()}
        own_saved["h"] = segment.of_steps(saved["h"])
        own_saved |= hidden[n]
        own_dv = {name: segment.of_steps(dv[name]) for name in {"h", "c", "gates"} & dv.keys()}
        own_out = {name: np.zeros_like(own[name]) for name in {"mask", "keep", "inputs"} & out.keys()}
        if "x" in out:
            own_out["x"] = np.empty(own["x"].shape, dtype)
        for name, d_state in d_states.items():
            first = v.get(f"{name}0", np.zeros_like(d_state))
            own[f"{name}0"] = state_before(problem, saved[name], first, v["lengths"], start, stop)[items]
            own_dv[f"{name}T"], own_out[f"{name}0"] = d_state[items], np.empty((one.B, d_state.shape[1]), dtype)
        BackwardSweep(one, products.of_segment(own_out), own, own_saved, own_dv).run()
        for name, d_state in d_states.items():
            d_state[items] = own_out[f"{name}0"]
        if "x" in out:
            segment.write(out["x"], own_out["x"] + segment.of_steps(out["x"]) if adds else own_out["x"])
        for name in {"keep", "inputs"} & out.keys():
            segment.write(out[name], own_out[name])
        if "mask" in out:
            out["mask"][segment.index(out["mask"])] += own_out["mask"]
    for name, d_state in d_states.items():
        if f"{name}0" in out:
            out[f"{name}0"][...] = d_state
    products.written.add(0)  # the other direction, if it runs later, must add to the gradient of x
