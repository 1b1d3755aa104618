"""Run a recurrence on an engine in chunks of time. The class `Chunked` has the methods `forward` and `backward` like an
engine, so its caller need not know about chunks.

There are two reasons to divide a sequence:

- `checkpoint_every`: the forward pass saves only the states at the start of each chunk, and the backward pass
  runs each chunk forward again before it runs the chunk backward.
- Length: for all steps of a long sequence the graph, the product x Wx^T and the products of the gradients would be
  too large.

Chunks run in one of two modes. If all arrays have values and the sequence is long, each chunk is evaluated before
the next one starts, so that the graph stays small (eager mode). Otherwise, for example in `mx.compile`, all chunks
are parts of one graph. In that graph the input of a chunk waits for the results of the chunk before, so that MLX
does not run chunks side by side.

Arrays are in dicts by name. h0, c0: the states before the first step. hT, cT: the states after the last step. h_starts,
c_starts: the states at the start of each chunk. So `name[0]` is the letter of a state, h or c. A cotangent is the
gradient that the caller gives for an output. `problem.plain`: nobody can ask for a gradient. T: steps, B: batch items,
H: hidden units, P: the width of h, D: directions; d is the number of a direction, 0 or 1. A chunk has the steps from
`start` to `stop` - 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from .definitions import widened
from .directions import by_direction, half, join, join_gradients, state_before
from .ops import sweep as ops
from .ops.packed import dequantized
from .ops.sweep import initial_states
from .packing import packed_names
from .problem import SEQUENCES, Array, Arrays, Chunks, Problem, masks_differ, memory_of
from .tracing import have_values


def for_engine(engine: str, arrays: Arrays) -> Arrays:
    """Return the arrays in the dtypes that the engine reads.

    The Metal shaders read 16-bit arrays, but c and cT (outputs or their cotangents) are float32, because the forward
    pass writes c in float32. The other engines get float32 instead of 16-bit arrays. Quantized weights stay unchanged.
    """
    if engine in ("fused", "stepwise"):
        return {name: array.astype(mx.float32) if name in ("c", "cT") else array for name, array in arrays.items()}
    quantized = packed_names(arrays)
    return {name: array if name in quantized else widened(array) for name, array in arrays.items()}


def divided(problem: Problem, arrays: Arrays, engine: str, module: Any) -> "Chunked | None":
    """Return an object that runs the engine in chunks, or None if dividing the sequence has no benefit.

    There are two benefits: chunks that are evaluated keep the graph small, and a backward pass that recomputes chunks
    saves memory. Without a gradient `numpy` has neither a graph nor a backward pass, so it runs undivided. module: the
    module of the engine, with the functions `forward` and `backward`.
    """
    # chunks.is_long: too many steps for one graph. chunks.recomputes: the caller uses `checkpoint_every`.
    chunks, plain = problem.chunks, problem.plain
    if chunks is None or (plain and engine == "numpy"):
        return None
    evaluates = chunks.is_long and have_values(list(arrays.values()))
    if not evaluates and (plain or not chunks.recomputes):
        return None
    return Chunked(chunks, problem, engine, module, evaluates)


class Chunked:
    """An engine that runs a sequence chunk by chunk. Its methods `forward` and `backward` are called like the functions
    of an engine.

    In addition to the engine's outputs `forward` returns the states at the start of each chunk, from which `backward`
    runs each chunk: h_starts [N, B, D P] and c_starts [N, B, D H], in the order of time, for N chunks, B batch items, D
    directions, the width P of h and the width H of c. If chunks are evaluated, their results have no graph. Then the
    function that MLX differentiates returns only some of them, and arrays of zeros in place of others, which hold the
    place of the results: see `saved_of`, `stand_ins` and `real_sequences`.
    """

    def __init__(self, chunks: Chunks, problem: Problem, engine: str, module: Any, evaluates: bool):
        """Prepare a run in chunks. module: the module of the engine, with the functions `forward` and `backward`.
        evaluates: whether each chunk is evaluated before the next one starts."""
        self.steps: int = chunks.steps
        # Without training a gradient is unlikely, so the forward pass saves no arrays for it. If MLX asks for one after
        # all, the backward pass runs each chunk forward again.
        self.recomputes: bool = chunks.recomputes or not problem.training
        self.engine: str = engine
        self.module: Any = module
        self.evaluates: bool = evaluates
        self.batch_first: bool = problem.batch_first  # whether sequences are batch-major in memory
        # Only the engine `numpy` reads NumPy arrays, and only without quantized weights, which it dequantizes by MLX.
        self.takes_numpy: bool = engine == "numpy" and problem.packing is None
        # State of the current pass. eager: whether each chunk is evaluated. pending: results of the last chunk, for
        # which the next chunk waits if chunks are not evaluated.
        self.eager: bool = evaluates
        self.pending: list[Array] = []
        # held: the sequences that `forward` computed, until the caller gets them; the function that MLX differentiates
        # returns zeros in their place (see `stand_ins`). dtypes: the dtypes of the results of this function.
        self.held: Arrays = {}
        self.dtypes: dict[str, mx.Dtype] = {}

    # --- The results returned to MLX ---------------------------------------------------------------------------------

    def saved_of(self, problem: Problem) -> tuple[list[str], list[str]]:
        """Return two lists of names: the outputs that MLX gets, and the results that only Python saves for the backward
        pass. If chunks are evaluated, Python saves all results that the backward pass reads: they have no graph, so MLX
        could not differentiate them. Otherwise MLX gets these results as additional outputs, because it needs them for
        a second derivative."""
        visible = [name for name in problem.cell.outputs if name != "gates" or problem.return_gates]
        saved = self.results_saved(problem)
        return (visible, saved) if self.evaluates else (visible + saved, [])

    def stand_ins(self, outputs: Arrays, visible: list[str]) -> Arrays:
        """Return the outputs that MLX gets. If chunks are evaluated, each sequence is replaced by a stand-in: an array
        of zeros of the same shape that takes no memory.

        MLX keeps all results of a custom function in memory as long as one of them is in use. With stand-ins each real
        sequence can be freed alone. `held` keeps the real sequences until an identity function after the outputs (a
        tap) returns them to the caller.
        """
        outputs = {name: outputs[name] for name in visible}
        if self.evaluates:
            self.held = {name: outputs[name] for name in SEQUENCES if name in visible}
            outputs |= {name: mx.broadcast_to(mx.array(0, a.dtype), a.shape) for name, a in self.held.items()}
        self.dtypes = {name: array.dtype for name, array in outputs.items()}
        return outputs

    def real_sequences(self, names: list[str], values: list[Array]) -> list[Array]:
        """Return `values`, the outputs of the call with these names, but with the real sequences in place of their
        stand-ins (see `stand_ins`). Each returned sequence is removed from `held`, so that only the caller keeps it.
        Without stand-ins `values` is returned unchanged."""
        if not self.held:
            return values
        return [self.held.pop(name, value) for name, value in zip(names, values, strict=True)]

    # --- The forward and the backward pass ---------------------------------------------------------------------------

    def results_saved(self, problem: Problem) -> list[str]:
        """Return the names of the results of `forward` that `backward` reads."""
        sequences = [] if self.recomputes else [name for name in problem.cell.outputs if name in SEQUENCES]
        return [*sequences, *(f"{name[0]}_starts" for name in states_of(problem))]  # h0: h_starts, c0: c_starts

    def forward(self, problem: Problem, arrays: Arrays) -> Arrays:
        """Run the forward pass. Return the outputs in the dtype of x, with gates only if the caller wants them. Also
        return what the backward pass reads, in the dtype of the engine: the states at the start of each chunk and, if
        chunks are not recomputed, the outputs of all steps."""
        self.eager, self.pending = self.evaluates, []
        if self.engine != "numpy":  # engine `numpy` caches dequantized weights itself
            arrays = dequantized(problem.packing, arrays)
        (T, B, H, P), D, dtype = problem[:4], problem.directions, arrays["x"].dtype
        # `numpy` runs all steps at once: at any length it needs memory only for its outputs. 16-bit arrays (dtype.size
        # 2) are an exception: they are converted to float32, which takes less memory chunk by chunk.
        if self.engine == "numpy" and dtype.size > 2:
            outputs = self.module.forward(problem._replace(training=False, wants_last=True), arrays)
            return outputs | self.starts(problem, arrays, outputs)
        # sequences: for each output with a time axis, a buffer into which the chunks write. widths: the width of its
        # last axis for one direction: c has H numbers for each of the `carried` states besides h, the gates have H for
        # each of the `kept` values that the backward pass reads.
        saved, sequences = self.results_saved(problem) if problem.training else [], {}
        widths = {"h": P, "c": problem.cell.carried * H}
        if problem.return_gates or "gates" in saved:
            widths["gates"] = problem.cell.kept * H
        for name in (name for name in problem.cell.outputs if name in widths):
            # kind: the dtype of this sequence. A saved sequence has the dtype in which the engine returns it, which may
            # be wider than the dtype of x.
            kind = for_engine(self.engine, {name: mx.array(0, dtype)})[name].dtype if name in saved else dtype
            sequences[name] = SequenceBuffer((T, B, D * widths[name]), kind, self.batch_first, self.eager)
        # last: for each direction d its last states. own, own_arrays: the problem and the arrays of this direction.
        with self.beside_the_engine():
            last = [
                self.sweep_forward(d, own, own_arrays, sequences)
                for d, own, (own_arrays,) in by_direction(problem, arrays)
            ]
            results = join(last)
            if self.eager:
                mx.eval(results)
        self.pending = []
        return results | {name: sequence.array for name, sequence in sequences.items()}

    def starts(self, problem: Problem, arrays: Arrays, outputs: Arrays) -> Arrays:
        """Return h_starts and c_starts, read from the outputs of all steps."""
        by_d = []  # for each direction its dict of starts. own: the problem of one direction
        for d, own, (own_arrays,) in by_direction(problem, arrays):
            first: Arrays = dict(zip(("h0", "c0"), initial_states(own, own_arrays), strict=True))
            mx.eval(first)
            starts = {}
            for name in states_of(own):
                states = memory_of(outputs[name[0]])  # h or c of all steps; `half` is this direction's part
                states, first_state = half(states, d) if problem.bidirectional else states, memory_of(first[name])
                lengths, bounds = arrays.get("lengths"), sorted(self.bounds(own))
                lengths = None if lengths is None else memory_of(lengths)
                # rows: the state before each chunk, in the order of time.
                rows = [state_before(own, states, first_state, lengths, *chunk) for chunk in bounds]
                starts[f"{name[0]}_starts"] = copied_to_mlx(np.stack(rows))
            by_d.append(starts)
        return join(by_d)

    def sweep_forward(self, d: int, problem: Problem, arrays: Arrays, sequences: dict[str, "SequenceBuffer"]) -> Arrays:
        """Run the chunks of direction d forward and write their parts of the sequences. Return the last states and the
        states at the start of each chunk. problem, arrays: those of this direction. sequences: the buffers of h, c and
        gates."""
        # shared: arrays that all chunks read as a whole. by_step: arrays with one row per step. starts: {first step of
        # a chunk: the states before it}.
        shared, by_step, starts = self.shared_by_steps(arrays), self.by_step(arrays), {}
        h0, c0 = initial_states(problem, arrays)
        states = {"h0": h0, "c0": widened(c0)}  # c is at least float32, as in the engines' outputs
        # In eager mode `prepared` copies the states, so that MLX can free the graph of the chunk that computed them.
        states = self.prepared({name: states[name] for name in states_of(problem)})
        if self.recomputes:  # `backward` runs each chunk again, so the engine saves nothing
            problem = problem._replace(training=False)
        elif "gates" in sequences:
            problem = problem._replace(return_gates=True)
        for start, stop in self.bounds(problem):
            starts[start] = states
            inputs = lengths_of(shared, start, stop) | self.steps_of(by_step, start, stop) | states
            outputs = self.module.forward(problem._replace(T=stop - start, wants_last=True), inputs)
            states = {name: outputs[f"{name[0]}T"] for name in states}
            self.write(sequences, d, start, stop, outputs, states)
            states = self.prepared(states)
        # Name the results: h0, whose letter is name[0], becomes hT and h_starts.
        last = {f"{name[0]}T": state for name, state in states.items()}
        in_time = [starts[start] for start in sorted(starts)]
        return last | {f"{name[0]}_starts": mx.stack([each[name] for each in in_time]) for name in states}

    def backward(
        self,
        problem: Problem,
        arrays: Arrays,
        saved: dict[str, Any],
        cotangents: Arrays,
        left_out: tuple[str, ...] = (),
    ) -> Arrays:
        """Run the backward pass. Return the gradients of all arrays, each in the dtype of its array. saved: the results
        of `forward` that `results_saved` names. left_out: names of gradients that nobody asks for, which `numpy` does
        not compute."""
        # Chunks are evaluated only if all arrays have values; in a Jacobian by mx.vmap the cotangents have none.
        # transforming=False: `have_values` does nothing to keep the graphs of the arrays that it evaluates, because MLX
        # calls this in a vjp rule, where it keeps these graphs anyway.
        given = [*arrays.values(), *cotangents.values()]
        self.eager, self.pending = self.evaluates and have_values(given, transforming=False), []
        sequences = {}
        # Allocate a gradient for each array that has a time axis, such as x. With two directions the gradient of x may
        # be a sum of two gradients. The sum of 16-bit gradients is computed in float32, so that it is rounded once.
        for name in (name for name in with_steps(arrays) if name not in left_out):
            dtype = widened(arrays[name]).dtype if problem.bidirectional else arrays[name].dtype
            sequences[name] = SequenceBuffer(arrays[name].shape, dtype, self.batch_first, self.eager)
        # by_d: for each direction d its gradients. own: the problem of this direction. own_arrays: its parts of the
        # three dicts arrays, saved, cotangents.
        with self.beside_the_engine():
            parts = by_direction(problem, arrays, saved, cotangents)
            by_d = [
                self.sweep_backward(d, own, sequences, *own_arrays, left_out=left_out) for d, own, own_arrays in parts
            ]
            gradients = join_gradients(by_d, arrays)
            gradients |= {name: sequence.array for name, sequence in sequences.items()}
            self.pending = []
            return {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items()}

    def sweep_backward(
        self,
        d: int,
        problem: Problem,
        sequences: dict[str, "SequenceBuffer"],
        arrays: Arrays,
        saved: Arrays,
        cotangents: Arrays,
        *,
        left_out: tuple[str, ...],
    ) -> Arrays:
        """Run the chunks of direction d backward. Write the gradients of arrays with steps, such as x, to `sequences`,
        and return the gradients of the other arrays. problem, arrays, saved, cotangents: those of this direction.
        left_out: names of gradients that nobody asks for."""
        # starts: {"h0": "h_starts", "c0": "c_starts"}. sums: the gradients of the weights, summed over the chunks so
        # far.
        starts, sums = {name: f"{name[0]}_starts" for name in states_of(problem)}, {}
        # shared: arrays that all chunks read as a whole. by_step and the dicts like it: arrays with one row per step,
        # of which a chunk gets its rows.
        shared = self.shared_by_steps(arrays)
        by_step, d_by_step, saved_by_step = (self.by_step(values) for values in (arrays, cotangents, saved))
        # The cotangents of the states after a chunk. For the last chunk they are the caller's cotangents of hT and cT,
        # for each earlier chunk the gradients of the first states of the chunk after it. In eager mode `prepared`
        # copies them, so that MLX can free the graph that computed them.
        after = self.prepared({name: cotangents[name] for name in ("hT", "cT") if name in cotangents})
        for start, stop in reversed(self.bounds(problem)):
            # n: the number of the chunk in the order of time. Only the last chunk in time may have fewer than
            # self.steps steps.
            chunk, n = problem._replace(T=stop - start), start // self.steps
            inputs = lengths_of(shared, start, stop) | self.steps_of(by_step, start, stop)
            inputs |= {name: saved[of_chunks][n, ...] for name, of_chunks in starts.items()}
            # outputs: the results of the forward pass that the engine's backward pass reads, recomputed or saved.
            if self.recomputes:
                outputs = self.module.forward(chunk._replace(training=True, return_gates=False), inputs)
            else:
                outputs = self.steps_of(saved_by_step, start, stop)
            cotangents_of_chunk = self.steps_of(d_by_step, start, stop) | after
            options = {"left_out": left_out} if left_out else {}  # only engine `numpy` leaves out gradients
            gradients = self.module.backward(chunk, inputs, outputs, cotangents_of_chunk, **options)
            after = {f"{name[0]}T": gradients.pop(name) for name in starts}
            for name, of_chunks in starts.items():
                if of_chunks in cotangents:  # h_starts and c_starts have a cotangent only in a second derivative
                    after[f"{name[0]}T"] += cotangents[of_chunks][n, ...]
            # terms: this chunk's gradients of the arrays without steps, such as weights, whose gradients are sums over
            # all chunks.
            terms = {name: widened(gradient) for name, gradient in gradients.items() if name not in sequences}
            self.write(sequences, d, start, stop, gradients, after | terms)
            after, sums = self.prepared(after), self.added(sums, terms)
        if self.eager:
            sums = {name: mx.array(total, widened(arrays[name]).dtype) for name, total in sums.items()}
        return sums | {name: after[f"{name[0]}T"] for name in starts if name in arrays}

    def bounds(self, problem: Problem) -> list[tuple[int, int]]:
        """Return (start, stop) of each chunk of one direction, in the order in which the chunks are processed."""
        bounds = [(start, min(start + self.steps, problem.T)) for start in range(0, problem.T, self.steps)]
        return bounds[::-1] if problem.reverse else bounds

    # --- How chunks pass arrays on -----------------------------------------------------------------------------------

    @contextmanager
    def beside_the_engine(self) -> Iterator[None]:
        """Return the context in which this class runs its own operations, outside of the engine. With the engine
        `numpy` they run on the CPU, because the arrays may be float64, which a GPU does not support. NumPy's overflow
        warnings are off, because MLX does not warn either."""
        with mx.stream(mx.cpu) if self.engine == "numpy" else nullcontext(), np.errstate(all="ignore"):
            yield

    def shared_by_steps(self, arrays: Arrays) -> Arrays:
        """Return the arrays that are the same at all steps, such as weights, in the dtypes that the engine reads."""
        others = {*with_steps(arrays), "h0", "c0"}
        return self.prepared({name: array for name, array in arrays.items() if name not in others})

    def by_step(self, arrays: Arrays) -> dict[str, Any]:
        """Return the arrays that have one row per step. In eager mode they are NumPy views, which can be sliced without
        a copy."""
        rows = {name: arrays[name] for name in with_steps(arrays)}
        if self.eager:
            mx.eval(rows)
            return {name: memory_of(array) for name, array in rows.items()}
        return rows

    def steps_of(self, by_step: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the steps from `start` to `stop` of the arrays that the method `by_step` returned, in the dtypes that
        the engine reads. The results are NumPy views if the engine accepts these, else MLX arrays."""
        rows = {name: array[start:stop] for name, array in by_step.items()}
        if self.takes_numpy and all(array.itemsize > 2 for array in rows.values()):  # no array has 16 bits
            return rows
        if self.eager:
            rows = {name: copied_to_mlx(array) for name, array in rows.items()}
        elif "x" in rows and self.pending:  # make MLX compute this chunk only after the previous one
            rows["x"] = after_all(rows["x"], self.pending)
        return for_engine(self.engine, rows)

    def prepared(self, arrays: Arrays) -> Arrays:
        """Return the arrays in the dtypes that the engine reads. In eager mode return copies that have no graph: while
        MLX computes a gradient it keeps the graphs of all arrays, so those of all chunks would stay in memory. Engine
        `numpy` needs no copies, because its results have no graph."""
        if self.eager and self.engine != "numpy":
            mx.eval(arrays)
            arrays = {name: copied_to_mlx(memory_of(array)) for name, array in arrays.items()}
        return for_engine(self.engine, arrays)

    def write(
        self, sequences: dict[str, "SequenceBuffer"], d: int, start: int, stop: int, results: Arrays, others: Arrays
    ) -> None:
        """Write the results of one chunk, the steps from `start` to `stop`, into the sequences of direction d. others:
        the chunk's results that are not sequences, such as its last states.

        In eager mode first evaluate all these results. Otherwise note them in `pending`: `steps_of` makes the input of
        the next chunk depend on them.
        """
        rows = {name: results[name].astype(sequence.dtype) for name, sequence in sequences.items()}
        if self.eager:
            mx.eval(rows, others)
        for name, sequence in sequences.items():
            sequence.write(d, start, stop, rows[name])
        if not self.eager:
            self.pending = [*others.values(), *(sequence.memory for sequence in sequences.values())]

    def added(self, sums: dict[str, Any], terms: Arrays) -> dict[str, Any]:
        """Return the sums over chunks, a dict by name, with the terms of one more chunk added. In eager mode the sums
        are NumPy arrays, which are added in place."""
        if not self.eager:
            return {name: term + sums[name] if sums else term for name, term in terms.items()}
        if not sums:
            return {name: np.array(term) for name, term in terms.items()}
        for name, term in terms.items():
            sums[name] += memory_of(term)
        return sums


class SequenceBuffer:
    """A sequence [T, B, .] of one direction or of both, into which chunks write their parts.

    memory: the MLX array, [B, T, .] with `batch_first`. view: in eager mode (each chunk is evaluated) a NumPy view of
    this memory, to which NumPy writes the parts, because MLX would copy the whole sequence for each chunk; else None.
    """

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype, batch_first: bool, eager: bool):
        T, B, self.width = shape
        self.batch_first: bool = batch_first
        self.dtype: mx.Dtype = dtype
        self.memory: Array = mx.zeros((B, T, self.width) if batch_first else shape, dtype)
        self.view: np.ndarray | None = None
        if eager:
            mx.eval(self.memory)
            self.view = memory_of(self.memory)

    def write(self, d: int, start: int, stop: int, rows: Array) -> None:
        """Write rows for the steps from `start` to `stop` of direction d into this direction's half of the last axis.
        If both directions share the whole axis, add the rows of the second direction to those of the first."""
        first = 0 if rows.shape[-1] == self.width else d * rows.shape[-1]  # the first column of this direction
        steps, columns = slice(start, stop), slice(first, first + rows.shape[-1])
        at = (slice(None), steps, columns) if self.batch_first else (steps, slice(None), columns)
        target: Any = self.memory if self.view is None else self.view
        source: Any = rows if self.view is None else memory_of(rows)
        source = source.swapaxes(0, 1) if self.batch_first else source
        # If the columns of direction 1 begin at 0, both directions share them, and those of direction 0 are there
        # already.
        target[at] = target[at] + source if d and not first else source

    @property
    def array(self) -> Array:
        """The sequence as an MLX array [T, B, .]."""
        return mx.swapaxes(self.memory, 0, 1) if self.batch_first else self.memory


# --- A graph that MLX can differentiate ------------------------------------------------------------------------------


def plain_outputs(problem: Problem, arrays: Arrays, chunked: Chunked) -> Arrays:
    """Return the outputs of the engine `ops` as a graph that MLX can differentiate. If `chunked` does not evaluate its
    chunks, it is the graph of the chunks. Evaluated chunks leave no graph, so the graph then has all steps at once;
    `chunked.dtypes` has the dtypes of the call's outputs."""
    if not chunked.evaluates:
        return chunked.forward(problem, arrays)
    outputs = ops.forward(problem, for_engine("ops", arrays))
    return {name: outputs[name].astype(dtype) for name, dtype in chunked.dtypes.items()}


def plain_gradients(problem: Problem, arrays: Arrays, cotangents: Arrays) -> Arrays:
    """Return the gradients that the engine `ops` computes, as a graph of all steps. Each gradient has the dtype of
    its array."""
    inputs = for_engine("ops", arrays)
    gradients = ops.backward(problem, inputs, ops.forward(problem, inputs), for_engine("ops", cotangents))
    return {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items()}


# --- Parts of arrays -------------------------------------------------------------------------------------------------


def lengths_of(arrays: Arrays, start: int, stop: int) -> Arrays:
    """Return the arrays with `lengths` counted within the steps from `start` to `stop`: 0 for a batch item that ended
    before `start`, stop - start for an item that goes on."""
    if "lengths" not in arrays:
        return arrays
    return arrays | {"lengths": mx.clip(arrays["lengths"] - start, 0, stop - start)}


def with_steps(arrays: Arrays) -> list[str]:
    """Return the names of the arrays that have one row per step. A mask is one of them only if it differs from step to
    step (`masks_differ`)."""
    always = ("x", "keep", "inputs", *SEQUENCES)
    return [name for name in arrays if name in always or (name == "mask" and masks_differ(arrays))]


def states_of(problem: Problem) -> list[str]:
    """Return the names of the first states of a cell: h0 and, for an LSTM, c0."""
    return ["h0", "c0"] if "c" in problem.cell.outputs else ["h0"]


def copied_to_mlx(memory: np.ndarray) -> Array:
    """Copy a NumPy view that `memory_of` made of an MLX array to a new MLX array, which belongs to no graph."""
    if any(stride < 0 for stride in memory.strides):  # MLX does not accept a reversed view
        memory = memory.copy()
    array = mx.array(memory, mx.float64 if memory.dtype == np.float64 else None)
    return array.view(mx.bfloat16) if array.dtype == mx.uint16 else array


def after_all(array: Array, others: list[Array]) -> Array:
    """Return a copy of the array that MLX computes only after the other arrays, so that MLX does not run chunks side
    by side. `mx.depends` would do the same, but mx.jvp does not support it."""
    # Both branches of the selection below are `array`, so its condition has no effect on the result. But MLX must
    # compute the other arrays to know the condition. It reads their sum instead of `any`, because MLX cannot compute a
    # third forward-mode derivative of `any`.
    first = mx.stack([other[(0,) * other.ndim].astype(mx.float32) for other in others]).sum()
    return mx.where(first == first, array, array)
