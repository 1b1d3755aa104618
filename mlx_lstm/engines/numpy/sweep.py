"""Engine `numpy`: the recurrence on the CPU, in place on MLX's own memory, with NumPy's BLAS.

The equations are those of `engines.ops.cells`, here written into preallocated buffers. Within a step every array is
feature-major, [GH, B] and [H, B]: the large matrix then stands first in the recurrent product, which BLAS runs up to
twice as fast, and every gate is one contiguous block. So gates and c are kept as [T, D G H, B] and [T, D H, B] and
leave as transposed views; h leaves in the memory order of x. Each direction writes its own rows and columns of the
arrays that both share. float32 and float64 only: the caller casts.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ..cells import GRUCell, LSTMCell, RNNCell
from ..directions import one_direction, part
from ..packing import is_packed
from ..problem import Arrays, Problem
from .arrays import BATCH_MAJOR, FEATURE_MAJOR, Array, New, NewSequence, Views, order_of, view, views
from .gru import GRUStep, GRUStepBackward
from .lstm import LSTMStep, LSTMStepBackward
from .memory import Ends, chunk_steps, first_state, states_before, step_mask
from .products import JoinedPreactivations, Preactivations, WeightGradients
from .rnn import RNNStep, RNNStepBackward
from .weights import in_floats

Saved = dict[str, mx.array | Array | None]


def forward(problem: Problem, arrays: Arrays, batch_first: bool = False, wants_last: bool = True) -> Saved:
    """The cell's outputs: h [T, B, D P], gates [T, B, D G H], hT [B, D P]; of an LSTM c [T, B, D H], cT [B, D H].

    Gates that the caller does not want stay in NumPy's memory, or are None if there is no training; a plain cell's
    gradient does without. With `batch_first` x and h, c, gates have the batch first; hT and cT only if wanted, and
    of a single step, x [B, I], nothing else.
    """
    v = views(in_floats(problem, arrays))
    single = v["x"].ndim == 2
    if single:
        v["x"] = v["x"][None]
    elif batch_first:
        v["x"] = v["x"].transpose(BATCH_MAJOR)
    dtype, (T, B, H, P), D = v["Wh"].dtype, problem[:4], problem.directions
    widths = {"h": D * P, "c": D * H} if isinstance(problem.cell, LSTMCell) else {"h": D * P}
    last = {f"{name}T": New(dtype, (B, width)) for name, width in widths.items()} if wants_last else {}
    new: dict[str, New] = {}
    if not single:
        new["h"] = NewSequence(dtype, (T, B, D * P), order_of(v["x"]), batch_first)
        if "c" in widths:
            new["c"] = NewSequence(dtype, (T, B, D * H), FEATURE_MAJOR, batch_first)
    rows, hidden = D * problem.cell.gates * H, None
    if problem.return_gates:
        new["gates"] = NewSequence(dtype, (T, B, rows), FEATURE_MAJOR, batch_first)
    elif problem.training and not isinstance(problem.cell, RNNCell):
        # NumPy's own memory where MLX need not see it: MLX would write it once before we do.
        hidden = np.empty((T, rows, B), dtype).transpose(FEATURE_MAJOR)
    memory = {name: room.memory for name, room in new.items()}
    if single:  # its sequences lie where its last states do
        memory |= {name: last[f"{name}T"].memory[None] for name in widths}
    else:
        memory |= {name: room.memory for name, room in last.items()}
    if hidden is not None:
        memory["gates"] = hidden
    each_direction(problem, lambda d, problem: sweep_forward(problem, of_direction(d, v), of_direction(d, memory)))
    outputs: Saved = {"gates": hidden}
    return outputs | {name: room.array() for name, room in (new | last).items()}


def backward(problem: Problem, arrays: Arrays, saved: Saved, cotangents: Arrays) -> Arrays:
    """The gradient of every array that is not packed, from those of the outputs that have one (keys as the
    outputs')."""
    if saved.get("gates") is None and not isinstance(problem.cell, RNNCell):
        saved = forward(problem._replace(training=True), arrays)
    v, given = views(in_floats(problem, arrays)), views(cotangents)
    kept = {name: view(array) for name, array in saved.items() if name in ("h", "c", "gates") and array is not None}
    new = {
        name: New(array.dtype, array.shape)
        for name, array in v.items()
        if name not in ("x", "lengths") and not is_packed(name, arrays)
    }
    new["x"] = NewSequence(v["x"].dtype, v["x"].shape, order_of(v["x"]))
    memory = {name: room.memory for name, room in new.items()}
    for name in {"mask", "keep"} & memory.keys():
        memory[name].fill(0)
    written: set[int] = set()  # the first steps of the chunks of dx to which one direction has come already

    def sweep(d: int | None, problem: Problem) -> None:
        projects = "Wx" in v  # and has no gradient if it is packed
        own = (of_direction(d, values, projects) for values in (v, kept, given, memory))
        BackwardSweep(problem, written, *own).run()

    each_direction(problem, sweep)
    return {name: room.array() for name, room in new.items()}


def each_direction(problem: Problem, sweep: Callable[[int | None, Problem], None]) -> None:
    """Call sweep(d, problem of direction d) for both directions, or once with None.

    One after the other: BLAS has threads of its own. What a thread for each direction would gain: not measured. It
    would have to take turns where both add to dx and to the gradient of a shared mask.
    """
    # Infinity and NaN, of padding or of a limit beyond the dtype, exp's overflow in a sigmoid that is 0, and underflow
    # go through, whatever the caller's np.seterr says, as in MLX's own ops.
    with np.errstate(all="ignore"):
        if not problem.bidirectional:
            sweep(None, problem)
            return
        for d in range(2):
            sweep(d, one_direction(problem, d))


def of_direction(d: int | None, values: Views, projects: bool | None = None) -> Views:
    """Direction d's part of all arrays."""
    return values if d is None else part(values, d, projects)


def sweep_forward(problem: Problem, v: Views, out: Views) -> None:
    """Write h [T, B, P], c [T, B, H], gates [T, B, GH], hT [B, P] and cT [B, H] of `out`, those there are."""
    dtype, (T, B, H, _) = v["Wh"].dtype, problem[:4]
    h, gates = out["h"], out["gates"].transpose(FEATURE_MAJOR) if "gates" in out else None
    joined = not isinstance(problem.cell, GRUCell) and JoinedPreactivations.fits(problem, v)  # a GRU needs its parts
    preactivations = (JoinedPreactivations if joined else Preactivations)(problem, v)
    step = STEPS[type(problem.cell)][0](problem, problem.cell, v, preactivations)
    ends, keep = Ends(problem, v), v.get("keep")
    rooms, onwards = preactivations.rooms, -1 if problem.reverse else 1  # room t: the h that enters step t
    h_prev = rooms[problem.steps()[0] % len(rooms)]
    h_prev[...] = v["h0"].T if "h0" in v else 0
    if "c" in out:
        c, c_prev = out["c"].transpose(FEATURE_MAJOR), first_state(v, "c0", (H, B), dtype)
    else:  # one of width 0
        c, c_prev = np.empty((T, 0, B)), np.empty((0, B))
    c_kept = np.empty(c.shape[1:], dtype)  # keep * c
    ragged = c if "lengths" not in v else np.empty((2, *c.shape[1:]), dtype)  # c where items have ended
    for t in problem.steps():
        gates_t, c_t, h_new = None if gates is None else gates[t], c[t], rooms[(t + onwards) % len(rooms)]
        live = ends.live(t)
        if live is not None and not live.any():
            for output in (h[t], c_t) if gates_t is None else (h[t], c_t, gates_t):
                output[...] = 0
            np.copyto(h_new, h_prev)
            h_prev = h_new
            continue
        if keep is not None:
            h_prev *= keep[t].T
            c_prev = np.multiply(c_prev, keep[t].T, out=c_kept)
        step(t, h_prev, c_prev, gates_t, c_t, h_new)
        np.copyto(h[t], h_new.T)
        if live is None:
            c_prev = c_t
        else:
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
    for name, last in (("hT", h_prev), ("cT", c_prev)):
        if name in out:
            out[name][...] = last.T


class BackwardSweep:
    """The steps in reverse, a chunk of time at a time, and after each chunk the products over its rows.

    Carries dh [P, B] and dc [H, B], or without c [0, B], from step to step.
    """

    def __init__(self, problem: Problem, written: set[int], v: Views, saved: Views, given: Views, out: Views):
        """saved: the outputs h, c, gates; given: the cotangents of outputs; out: the gradients' memory."""
        dtype, (_, B, H, P) = v["Wh"].dtype, problem[:4]
        self.problem, self.v, self.given, self.out, self.h = problem, v, given, out, saved["h"]
        self.ends, self.mask = Ends(problem, v), step_mask(v, problem)
        self.step: StepBackward = STEPS[type(problem.cell)][1](problem, problem.cell, v, saved)
        self.products: WeightGradients = WeightGradients(problem, v, out, written)
        self.dh: Array = first_state(given, "hT", (P, B), dtype)
        self.dc: Array = first_state(given, "cT", (H if "c" in saved else 0, B), dtype)

    def run(self) -> None:
        """All steps, and then the gradients of the first states and the peepholes."""
        T, chunk = self.problem.T, chunk_steps(self.problem)
        bounds = [(start, min(start + chunk, T)) for start in range(0, T, chunk)]
        for start, stop in bounds if self.problem.reverse else reversed(bounds):
            self.run_chunk(start, stop)
        out, ends = self.out, {"h0": self.dh, "c0": self.dc}
        for name in ends.keys() & out.keys():
            out[name][...] = ends[name].T
        if "peephole" in out and isinstance(self.step, LSTMStepBackward):
            np.sum(self.step.dpeephole, axis=1, out=out["peephole"])

    def run_chunk(self, start: int, stop: int) -> None:
        """Steps start..stop back, then their products."""
        B, P, step, ends = self.problem.B, self.problem.P, self.step, self.ends
        before = raw = states_before(self.problem, self.h, self.v.get("h0", 0), self.v.get("lengths"), start, stop)
        if "keep" in self.v:
            before = raw * self.v["keep"][start:stop]
        h_in = before
        if self.mask is not None:
            h_in = before * ends.without_padding(self.mask, start, stop)
        h_in = h_in.reshape(-1, P)
        if isinstance(step, GRUStepBackward):
            step.start(start, before, h_in)
        times = range(start, stop) if self.problem.reverse else range(stop - 1, start - 1, -1)
        for t in times:
            live = ends.live(t)
            columns = slice((t - start) * B, (t - start + 1) * B)
            if live is None:
                self.back(t, columns, (before[t - start], raw[t - start]), self.dh, self.dc)
            elif not live.any():
                for kept in step.by_column:  # no item lives in this step
                    kept[:, columns] = 0
            else:
                self.back_where(live, t, columns, (before[t - start], raw[t - start]))
        step.finish(self.products, h_in)
        self.products.add(start, stop, step.dz[:, : (stop - start) * B])

    def back(
        self, t: int, columns: slice, before: tuple[Array, Array], dh: Array, dc: Array, live: Array | None = None
    ) -> None:
        """Step t back, from keep * h_prev and h_prev [B, P]: dh and dc become the gradients of the state before it."""
        given, step = self.given, self.step
        if "h" in given:
            dh += given["h"][t].T
        if "c" in given:
            dc += given["c"][t].T
        dgates = given["gates"][t].T if "gates" in given else None
        if live is not None:
            dh[:, ~live] = dc[:, ~live] = 0
            dgates = None if dgates is None else np.where(live, dgates, 0)
        step(t, columns, dh, dc, dgates)
        if self.mask is not None:
            dmask, terms = self.out["mask"], dh.T * before[0]
            terms = terms if live is None else np.where(live[:, None], terms, 0)
            add_unbroadcast(terms, dmask if dmask.ndim < 3 or dmask.shape[0] == 1 else dmask[t])
            dh *= self.mask[t].T
        if step.direct is not None:
            dh += step.direct
        if "keep" in self.v:
            terms = (dh * before[1].T).sum(axis=0)
            if isinstance(step, LSTMStepBackward):
                terms += (dc * step.c_before(t)).sum(axis=0)
            self.out["keep"][t, :, 0] = terms if live is None else np.where(live, terms, 0)
            dh *= self.v["keep"][t].T
            dc *= self.v["keep"][t].T

    def back_where(self, live: Array, t: int, columns: slice, before: tuple[Array, Array]) -> None:
        """Step t back for the items that have not ended; the gradients of the others pass it by."""
        dh, dc = self.dh.copy(), self.dc.copy()
        self.back(t, columns, before, dh, dc, live)
        np.copyto(self.dh, dh, where=live)
        np.copyto(self.dc, dc, where=live)


def add_unbroadcast(term: Array, total: Array) -> None:
    """Add term [B, P] to total, summed down to total's shape, which broadcasts to term's."""
    lead = total.ndim - 2
    shape = total.shape[lead:] if lead > 0 else (1,) * -lead + total.shape
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    total += term.sum(axis=axes, keepdims=True).reshape(total.shape)


Step = LSTMStep | GRUStep | RNNStep
StepBackward = LSTMStepBackward | GRUStepBackward | RNNStepBackward

STEPS: dict[type, tuple[Callable[..., Step], Callable[..., StepBackward]]] = {
    LSTMCell: (LSTMStep, LSTMStepBackward),
    GRUCell: (GRUStep, GRUStepBackward),
    RNNCell: (RNNStep, RNNStepBackward),
}
"""Of each cell: its step forward and its step back."""
