"""The loops over time of the engine `numpy`: the forward pass and the backward pass of one direction.

Within a step every array is feature-major, [GH, B] or [H, B]. The sequences are views [T, B, .] of any memory order. T:
steps, B: batch items, G: gates, H: units, P: the width of h, I: input features. v holds the arrays of the call, `out`
the memory of the results, dv the cotangents (the gradients that the caller gives for outputs), each by name. With
lengths each batch item has its own number of steps, and has ended after them; the class `Ends` says which items end
when. In reverse an item begins at its own last step.

Options of the call: `keep` [T, B, 1] multiplies h and c before a step; `mask` multiplies the h that enters the
recurrent product. h_prev: h before a step, times `keep`. h_in: h_prev times the mask.

`cell.carried`: how many blocks of H numbers c has. `FEATURE_MAJOR` transposes [T, B, .] to [T, ., B].

`Step.run` and `StepBackward.run` of the module `steps` compute one step. The object `products` of a step computes the
products with x, and holds arrays that the steps use in turn: h_buffers [P, B], h before a step; h_rows [P, B], the h
that Wh multiplies; operands, the arrays that the weights multiply (h_rows, or x, 1 and h). `WeightGradients` sums the
gradients of weights. The classes with Norm in their names are layer normalisations (module `norms`); `of_input` is the
norm of the input's product.

In the backward pass dh and dc are the gradients of the states. If items have different lengths, the list `waiting` has
two pairs of arrays: dh and dc, and for each a second array with the gradients of the items that do not run at the
current step.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..problem import SEQUENCES, Problem
from .norms import InputNorm, InputProductNorm, by_factors, with_centred_weights
from .products import FEATURE_MAJOR, Array, Views, WeightGradients, matrix
from .steps import Step, StepBackward, steps_of


def sweep_forward(problem: Problem, v: Views, out: Views) -> None:
    """Run all steps of one direction. Write the outputs for which `out` has memory: h [T, B, P], c [T, B, H], gates [T,
    B, GH], hT [B, P], cT [B, H] and norms [T, B, .], what the backward pass of layer normalisation reads.

    Every batch item runs at every step, even if it has ended or, in reverse, has not begun. That does no harm, because
    the columns of one item do not affect the columns of others. Afterwards the outputs at these steps are overwritten
    by 0.
    """
    dtype, (T, B), keep, mask = v["x"].dtype, problem[:2], v.get("keep"), step_mask(v, problem)
    step = Step(problem, v, mask, out.get("norms"))
    # enter(t, h, out): writes to `out` the array that Wh multiplies at step t, such as mask * h; None: Wh multiplies h
    # itself. buffers: the arrays of h, which consecutive steps use in turn. block: the number of steps whose products
    # with x are computed at once.
    run, products, enter, ends = step.run, step.products, step.enter, Ends(problem, v)
    buffers, block = products.h_buffers, products.block
    h, (gates, norms) = out["h"], [out[n].transpose(FEATURE_MAJOR) if n in out else None for n in ("gates", "norms")]
    if step.by_factors:  # the norm is a factor on h, which `enter` computes and saves
        norms = None
    # c [T, carried H, B]: the states besides h, one block of H rows each. It is empty for a cell without such a state.
    c = out["c"].transpose(FEATURE_MAJOR) if "c" in out else np.empty((T, 0, B), dtype)
    c_prev = first_state(v, "c0", (c.shape[1], B), dtype)
    c_times_keep = np.empty(c.shape[1:], dtype)
    times, onwards = range(ends.longest), 1
    if problem.reverse:
        times, onwards = times[::-1], -1
    h_prev = buffers[(times[0] if times else 0) % len(buffers)]
    h_prev[...] = v["h0"].T if "h0" in v else 0
    # inputs: the input's part of the preactivations of a block of steps, from `start` to `stop`; inputs_t: of step t.
    # They are None if the product of each step includes this part.
    inputs, start, stop, inputs_t = None, 0, 0, None
    for t in times:
        gates_t, c_t, norms_t = None if gates is None else gates[t], c[t], None if norms is None else norms[t]
        h_new = buffers[(t + onwards) % len(buffers)]  # the array from which the next step reads h
        if not start <= t < stop:  # step t is in another block: load this block; in reverse its last step runs first
            start = t - t % block
            stop = start + block
            inputs = products.load(start)
        if inputs is not None:
            inputs_t = inputs[:, (t - start) * B : (t - start + 1) * B]
        if problem.reverse and (begun := ends.at(t + 1)) is not None:  # items that begin at this step, their last one
            h_prev[:, begun] = v["h0"][begun].T if "h0" in v else 0
            c_prev[:, begun] = v["c0"][begun].T if "c0" in v else 0
        if keep is not None:
            h_prev *= keep[t].T
            c_prev = np.multiply(c_prev, keep[t].T, out=c_times_keep)
        if enter is not None:
            enter(t, h_prev, products.h_rows[t % len(products.h_rows)])
        if "inputs" in v:  # the inputs of a user's cell at this step
            np.copyto(step.us, v["inputs"][t].T)
        # Run the step. It writes h_new, c_t and, unless they are None, gates_t and norms_t.
        run(products.operands[t % len(products.operands)], inputs_t, h_prev, c_prev, gates_t, c_t, h_new, norms_t)
        np.copyto(h[t], h_new.T)
        h_prev, c_prev = h_new, c_t
    last = {"h": h_prev, "c": c_prev}
    if ends.shortest < T:
        last = {name: state.copy() for name, state in last.items()}  # copies, because c_prev is a view of out["c"]
        close_ended(problem, v, out, ends, last)
    for name, state in last.items():
        if f"{name}T" in out:
            out[f"{name}T"][...] = state.T


def close_ended(problem: Problem, v: Views, out: Views, ends: "Ends", last: Views) -> None:
    """Overwrite the padding of the outputs `out` by 0: all steps after the end of a batch item with fewer than T steps.
    Write to `last`, h [P, B] and c [H, B], the states of such an item after its own last step; an item without steps
    gets its first states h0 and c0, from v."""
    for b in np.flatnonzero(ends.lengths < problem.T).tolist():
        length = int(ends.lengths[b])
        for name in {"h", "c"} & out.keys():
            if length == 0:
                last[name][:, b] = v[f"{name}0"][b] if f"{name}0" in v else 0
            elif not problem.reverse:  # in reverse every item ends at step 0, so `last` is right already
                last[name][:, b] = out[name][length - 1, b]
        for name in {"h", "c", "gates", "norms"} & out.keys():
            out[name][length:, b] = 0


class BackwardSweep:
    """The backward pass of one direction. It divides the steps into chunks of time, and processes chunks and steps in
    the opposite order of the forward pass. After the steps of a chunk it computes what they contribute to each weight
    gradient as one matrix product.

    dh [P, B] and dc [H, B] are the gradients of the state after the current step, without the cotangents of the
    outputs h and c at that step. P is the width of h; dc has no rows for a cell without c.
    """

    def __init__(self, problem: Problem, products: WeightGradients, v: Views, saved: Views, dv: Views):
        """Prepare the backward pass of one direction. saved: the outputs h, c, gates and norms of the forward pass."""
        dtype, (_, B, H, P), carried = v["x"].dtype, problem[:4], problem.cell.carried
        if problem.cell.norm is not None:
            # rows: how many numbers the norms saved per step and item, by which `by_factors` knows their method. The
            # backward pass needs the same method and weights.
            rows = saved["norms"].shape[2] if "norms" in saved else 0
            v = with_centred_weights(problem, v, by_factors(problem, rows))
        self.problem, self.v, self.dv, self.h = problem, v, dv, saved["h"]
        self.ends: Ends = Ends(problem, v)
        self.mask: Any = step_mask(v, problem)
        gates_have_cotangents = "gates" in dv
        self.step: StepBackward = StepBackward(problem, v, saved, gates_have_cotangents)
        self.products: WeightGradients = products
        self.out: Views = products.out
        has_c = "c" in saved
        # c_at(t): c after step t, [carried H, B]: the states besides h, one block of H rows each. dh, dc: at first the
        # cotangents of hT and cT.
        self.c_at: Callable[[int], Any] = steps_of(saved["c"]) if has_c else lambda t: None
        self.c0: Any = first_state(v, "c0", (carried * H, B), dtype) if has_c else None
        self.dh: Array = first_state(dv, "hT", (P, B), dtype)
        self.dc: Array = first_state(dv, "cT", (carried * H if has_c else 0, B), dtype)
        # waiting: pairs (dh or dc, a copy of it). While an item does not run, its column of dh and dc is 0, so that it
        # adds nothing to any gradient. When the item begins to run, its column of the copy is written to dh and dc.
        self.waiting: list[tuple[Array, Array]] = []
        if self.ends.shortest < problem.T:
            self.waiting = [(self.dh, self.dh.copy()), (self.dc, self.dc.copy())]
            # idle: the items that do not run at the first step of this pass, which is step 0 in reverse, else T - 1.
            idle = self.ends.lengths < (1 if problem.reverse else problem.T)
            self.dh[:, idle] = self.dc[:, idle] = 0

    def run(self) -> None:
        """Run all steps, and write all gradients for which `out` has memory."""
        T, chunk, out = self.problem.T, self.step.chunk, self.out  # chunk: the number of steps in a chunk
        bounds = [(start, min(start + chunk, T)) for start in range(0, T, chunk)]
        for start, stop in bounds if self.problem.reverse else reversed(bounds):
            self.run_chunk(start, stop)
        # done: the items whose gradients are still in `waiting`. In reverse these are all items, because `run_chunk`
        # moved the gradients there at each item's last step. Forward in time they are the items without steps.
        done = self.ends.lengths < (T + 1 if self.problem.reverse else 1)
        for running, waiting in self.waiting:
            running[:, done] = waiting[:, done]
        for name, d_state in (("h0", self.dh), ("c0", self.dc)):
            if name in out:
                out[name][...] = d_state.T
        for norm in (self.step.norm, self.step.norm_of_c, self.step.of_input):
            if norm is not None and not isinstance(norm, InputNorm):  # which has added its gradients after each chunk
                norm.add_gradients(self.products)
        # params: the name of the array with numbers per unit, "peephole" or "params". Sum its gradient over the batch.
        if (params := self.problem.cell.params) in out:
            self.products.add(params, self.step.dparams.sum(axis=1))

    def run_chunk(self, start: int, stop: int) -> None:
        """Run the steps from `start` to `stop` backward, then add their terms to the weight gradients."""
        problem, v, step, dh, dc = self.problem, self.v, self.step, self.dh, self.dc
        # dv: the cotangents of these steps, with 0 in the padding (steps after an item's end), which may contain NaN.
        dv = {name: self.without_padding(self.dv[name], start, stop) for name in SEQUENCES if name in self.dv}
        keep = self.without_padding(v["keep"], start, stop) if "keep" in v else None
        mask = None if self.mask is None else self.without_padding(self.mask, start, stop)
        h_before = self.h_before(start, stop)  # h before each step, [steps, B, P]
        h_prev = h_before if keep is None else h_before * keep
        h_in = (h_prev if mask is None else h_prev * mask).reshape(-1, problem.P)
        # input_by_step: each step computes the norm of the input's product again, from x.
        x = self.inputs(start, stop) if step.input_by_step else None
        step.begin_chunk(start, h_prev, h_in, x)
        times = range(start, stop)
        for t in times if problem.reverse else reversed(times):
            # k: the step's number in the chunk. columns: where its results lie in the arrays of the chunk, which have
            # one column per step and batch item.
            k, columns = t - start, slice((t - start) * problem.B, (t - start + 1) * problem.B)
            if t >= self.ends.longest:
                step.skip(columns)  # all items have ended before this step
                continue
            # last: the items whose last step in time is t. Forward in time they end here, so this pass, which goes
            # backward, begins with them: their gradients move from `waiting` to dh and dc. In reverse they begin here,
            # so this pass ends with them: further down in this loop their gradients move back to `waiting`, which holds
            # the gradients of items that do not run.
            last = self.ends.at(t + 1)
            if last is not None and not problem.reverse:
                for running, waiting in self.waiting:
                    running[:, last] = waiting[:, last]
            if "h" in dv:
                dh += dv["h"][k].T
            if "c" in dv:
                dc += dv["c"][k].T
            dgates = dv["gates"][k].T if "gates" in dv else None
            c_before: Any = None if self.c0 is None else self.c_before(t)
            c_prev = c_before if c_before is None or keep is None else c_before * keep[k].T
            ended = np.flatnonzero(self.ends.lengths <= t) if t >= self.ends.shortest else None
            step.begin_step(ended)
            # Run the step. In place dh becomes the gradient of h_in, and dc the gradient of c before the step.
            # step.direct becomes the part of the gradient of h_prev that bypasses the recurrent product.
            step.run(step, t, columns, c_prev, self.c_at(t), dh, dc, dgates)
            if step.finishes or ended is not None:  # `finishes`: a user's cell with inputs or parameters
                step.finish(t, columns, ended, self.out)
            if ended is not None:  # their gradients may be NaN: a user's cell may compute NaN from zeros
                for array in (dh, dc) if step.direct is None else (dh, dc, step.direct):
                    array[:, ended] = 0
            if mask is not None:
                self.through_mask(t, mask[k], h_prev[k])
            if step.direct is not None:
                dh += step.direct
            if keep is not None:
                self.through_keep(t, keep[k].T, h_before[k], c_before)
            if last is not None and problem.reverse:
                for running, waiting in self.waiting:
                    waiting[:, last], running[:, last] = running[:, last], 0
        self.add_products(start, stop, h_in)

    def add_products(self, start: int, stop: int, h_in: Array) -> None:
        """Compute the gradient of x for the steps from `start` to `stop`, and add the terms of these steps to the
        gradients of the weights. h_in [steps * B, P]: the h that Wh multiplied."""
        n = (stop - start) * self.problem.B
        dz, x = self.step.dz[:, :n], None  # dz [GH, n]: the gradients of the preactivations
        of_input = self.step.of_input
        # x, with 0 in the padding, is needed for the gradient of Wx (as a product in `out`, or as two `factors`), and
        # for a norm that computes the product x Wx^T again.
        if "Wx" in self.out or "Wx" in self.products.factors or isinstance(of_input, InputNorm | InputProductNorm):
            x = self.inputs(start, stop)
        self.step.end_chunk(self.products, h_in)
        # The gradient of b is the sum of dz over its columns, computed as a product with ones. A norm that runs at
        # every step (`input_by_step`) computes it itself.
        if not self.step.input_by_step:
            self.products.accumulate("b", dz, np.ones(n, dz.dtype))
        if isinstance(of_input, InputProductNorm) and x is not None:
            of_input.back(start, stop, x, dz, self.products)
            return
        if isinstance(of_input, InputNorm) and x is not None:
            of_input.back(x, dz, self.products)
        self.products.write_input(start, stop, dz, self.v.get("Wx"))
        if x is not None:
            self.products.accumulate("Wx", dz, matrix(x))

    def inputs(self, start: int, stop: int) -> Array:
        """Return x of the steps from `start` to `stop`, [steps * B, I], with 0 where a batch item has ended."""
        return self.without_padding(self.v["x"], start, stop).reshape((stop - start) * self.problem.B, -1)

    def through_mask(self, t: int, mask: Array, h_prev: Array) -> None:
        """Turn self.dh [P, B], the gradient of mask * h_prev, into that of h_prev, and add the term of step t to the
        gradient of the mask. mask, h_prev [B, P]."""
        # The gradient of a mask that differs from step to step has a row per step. Any other mask has one gradient, to
        # which every step adds its term.
        dmask = self.out["mask"]
        add_unbroadcast(self.dh.T * h_prev, dmask if dmask.ndim < 3 or dmask.shape[0] == 1 else dmask[t])
        self.dh *= mask.T

    def through_keep(self, t: int, keep: Array, h_before: Array, c_before: Array | None) -> None:
        """Write step t of the gradient of the option `keep`, a factor on the states before a step. Then turn dh and dc,
        the gradients of keep * h and keep * c, into those of h and c. keep [1, B]: the factor at step t. h_before [B,
        P], c_before [H, B]: the states before they are multiplied by it."""
        terms = (self.dh * h_before.T).sum(axis=0)
        if c_before is not None:
            terms += (self.dc * c_before).sum(axis=0)
        self.out["keep"][t, :, 0] = terms
        self.dh *= keep
        self.dc *= keep

    def h_before(self, start: int, stop: int) -> Array:
        """Return h before each of the steps from `start` to `stop`, [steps, B, P], not yet multiplied by `keep` (the
        factor on the states before a step). The result is a view of the saved h, or a copy if it contains the first
        state."""
        problem, states, first = self.problem, self.h, self.v.get("h0", 0)
        if problem.T == 1 and "h0" in self.v:
            return self.v["h0"][None]
        if not problem.reverse and start > 0:
            return states[start - 1 : stop - 1]
        if problem.reverse and stop < self.ends.shortest:  # no item begins within these steps
            return states[start + 1 : stop + 1]
        rows = np.empty((stop - start, *states.shape[1:]), states.dtype)
        if not problem.reverse:
            rows[0] = first
            rows[1:] = states[: stop - 1]
            return rows
        # In reverse the state before step t is the state after step t + 1. `inner` excludes step T - 1, which begins
        # from the first state. A batch item with fewer steps begins at its own last step, where np.copyto writes its
        # first state.
        inner = min(stop, problem.T - 1)
        rows[: inner - start] = states[start + 1 : inner + 1]
        rows[inner - start :] = first
        begins = self.ends.lengths == np.arange(start + 1, stop + 1)[:, None]
        np.copyto(rows, first, where=begins[..., None])
        return rows

    def c_before(self, t: int) -> Array:
        """Return c [H, B] before step t, not yet multiplied by `keep`."""
        problem, last = self.problem, t + 1 if self.problem.reverse else t - 1
        if not 0 <= last < problem.T:
            return self.c0
        c: Any = self.c_at(last)
        if problem.reverse and last >= self.ends.shortest:  # items of length t + 1 begin at step t, from c0
            c = np.where(self.ends.lengths == last, self.c0, c)
        return c

    def without_padding(self, sequence: Array, start: int, stop: int) -> Array:
        """Return the steps from `start` to `stop` of a sequence [T, B, .], with 0 in the padding (steps after a batch
        item's end). The padding may contain NaN, which would make a sum NaN even if it were multiplied by 0."""
        if stop <= self.ends.shortest:
            return sequence[start:stop]
        steps = np.array(sequence[start:stop])
        for b in np.flatnonzero(self.ends.lengths < stop).tolist():
            steps[max(self.ends.lengths[b] - start, 0) :, b] = 0
        return steps


class Ends:
    """The lengths of the batch items [B], the shortest and the longest. Before step `shortest` no item has ended; at
    step `longest` all items have ended."""

    def __init__(self, problem: Problem, v: Views):
        T, given = problem.T, v.get("lengths")
        self.lengths: Array = np.full(problem.B, T) if given is None else given
        self.shortest: int = T if given is None else int(given.min())
        self.longest: int = T if given is None else int(given.max())
        self.by_length: dict[int, list[int]] = {}
        for b, length in enumerate(self.lengths.tolist() if self.shortest < T else []):
            self.by_length.setdefault(length, []).append(b)

    def at(self, length: int) -> list[int] | None:
        """Return the indices of the batch items that have this length, or None if there are none. If all items have T
        steps, return None for every length, because then no item begins or ends alone."""
        return self.by_length.get(length)


def first_state(v: Views, name: str, shape: tuple[int, int], dtype: np.dtype) -> Array:
    """Return the state v[name] [B, .] as a contiguous copy [., B]. If it is absent, return zeros of this shape."""
    return np.array(v[name].T, order="C") if name in v else np.zeros(shape, dtype)


def step_mask(v: Views, problem: Problem) -> Array | None:
    """Return the mask, broadcast to a view [T, B, P] (P: the width of h), or None if the call has no mask."""
    return np.broadcast_to(v["mask"], (problem.T, problem.B, problem.P)) if "mask" in v else None


def add_unbroadcast(term: Array, total: Array) -> None:
    """Add `term` [B, P] to `total`, the gradient of an array that a step broadcasts to [B, P]. Where the array was
    broadcast along an axis, the term is first summed over this axis."""
    lead = total.ndim - 2  # how many axes `total` has before the last two; if negative, how many axes it lacks
    shape = total.shape[lead:] if lead > 0 else (1,) * -lead + total.shape
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)  # the axes along which it was broadcast
    total += term.sum(axis=axes, keepdims=True).reshape(total.shape)
