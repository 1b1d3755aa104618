"""A sequence in chunks of time, through any engine.

For a gradient that keeps little: the forward pass leaves the states between chunks, and the backward pass computes each
chunk again. And for sequences whose graph, projected input and products over all steps would be too large at once.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import isqrt
from typing import Any

import mlx.core as mx
import numpy as np

from .directions import half, join, join_gradients, one_direction, part
from .ops.packed import dequantized
from .ops.sweep import initial_states
from .problem import Array, Arrays, Chunks, Problem, masks_differ
from .tracing import have_values

LONGEST = {"numpy": 0, "ops": 256, "stepwise": 4096, "fused": 4096}
"""Steps up to which nothing is evaluated while a graph is built; 0: `numpy`, which evaluates in any case. A step of
`ops` takes some 40 KB of the host's memory, forward and back; one of `stepwise` is a launch and a row in each sweep."""

GATES = {"ops": 2**20, "stepwise": 2**24, "fused": 2**24}
"""Gates (steps x batch x G H) of a chunk at most, of longer calls: on the GPU 64 MB in float32. A product for so many
by weights of width 512 takes the smallest GPU 7 ms by its peak, not measured; macOS ends what keeps the GPU from the
display for too long. Of `ops` fewer: while MLX derives a gradient it keeps all of a chunk, some 16 times as much."""

ROWS = 1024
"""Rows (steps x batch) of a chunk that `numpy` computes again, at least: what it prepares for each is then small beside
the steps. Its products take as many at a time, so that fewer would save little."""

SEQUENCES = ("h", "c", "gates")


def chunks_of(engine: str, problem: Problem, every: int | str | None) -> Chunks | None:
    """How a call is cut, if at all. `every`: the steps that a gradient computes again at a time, if it shall."""
    T, B, width = problem.T, problem.B, problem.cell.gates * problem.H
    if every is not None:
        # Next to sqrt(T) the states at the starts and a chunk are smallest together; a step of `ops` takes most.
        auto = isqrt((T - 1) // (16 if engine == "ops" else 1)) + 1
        if engine == "numpy":  # an eighth of its gates and states is less than half of what h and dx take
            auto = max(auto, min(ROWS // B, T // 8))
        return Chunks(min(auto if isinstance(every, str) else every, T), recomputes=True)
    longest, gates = longest_whole(engine, problem), B * width
    return Chunks(max(1, min(longest, GATES[engine] // gates)), recomputes=False) if 0 < longest < T else None


def longest_whole(engine: str, problem: Problem) -> int:
    """The steps up to which an engine takes a sequence whole."""
    return LONGEST[engine] if problem.limits.unchunked is None else problem.limits.unchunked


def evaluates(engine: str, problem: Problem, values: list[Array]) -> bool:
    """Whether the chunks of a problem are evaluated one by one."""
    return longest_whole(engine, problem) < problem.T and have_values(values)


class Chunked:
    """An engine that takes a sequence chunk by chunk; `forward` and `backward` are an engine's.

    Besides an engine's outputs there are the states that each of N chunks starts from, h_starts [N, B, D P] and
    c_starts [N, B, D H], in the order of time. Where it `evaluates`, and all arrays have values, each chunk is there
    before the next begins, so that no graph grows: what it reads and leaves is copied out of MLX's graph, of which MLX
    keeps all that depends on what it traces, and while it derives a gradient everything. Elsewhere, as in `mx.compile`,
    a chunk's input waits for what the chunk before left.
    """

    def __init__(
        self,
        chunks: Chunks,
        engine: str,
        module: Any,
        for_engine: Callable[[str, Arrays], Arrays],
        *,
        batch_first: bool,
        evaluates: bool,
    ):
        """module: the engine's; for_engine: arrays in the dtype it computes in; batch_first: how sequences lie."""
        self.steps, self.recomputes = chunks
        self.engine: str = engine
        self.module: Any = module
        self.for_engine: Callable[[str, Arrays], Arrays] = for_engine
        self.batch_first: bool = batch_first
        self.evaluates: bool = evaluates
        self.eager: bool = evaluates
        self.takes_numbers: bool = False
        self.left: list[Array] = []

    def kept(self, problem: Problem) -> list[str]:
        """What `backward` reads of the results of `forward`."""
        sequences = [] if self.recomputes else [name for name in problem.cell.outputs if name in SEQUENCES]
        return [*sequences, *(f"{name[0]}_starts" for name in states_of(problem))]

    def forward(self, problem: Problem, arrays: Arrays) -> Arrays:
        """The outputs in the dtype of x, gates only if wanted, and what is `kept`, in that of the engine."""
        self.begin(problem, self.evaluates)
        if self.engine != "numpy":  # which keeps the matrices of packed weights itself
            arrays = dequantized(problem.packing, arrays)
        (T, B, H, P), D, dtype = problem[:4], problem.directions, arrays["x"].dtype
        if self.engine == "numpy" and dtype.size > 2:  # which holds nothing but its outputs, at any length
            outputs = self.module.forward(problem._replace(training=False), arrays)
            return outputs | self.starts(problem, arrays, outputs)
        kept, widths, rooms = self.kept(problem) if problem.training else [], {"h": P, "c": H}, {}
        if problem.return_gates or "gates" in kept:
            widths["gates"] = problem.cell.gates * H
        for name in (name for name in problem.cell.outputs if name in widths):
            kind = self.for_engine(self.engine, {name: mx.array(0, dtype)})[name].dtype if name in kept else dtype
            rooms[name] = Room((T, B, D * widths[name]), kind, self.batch_first, self.eager)
        with self.running():
            sweeps = [self.sweep_forward(d, one, given, rooms) for d, one, (given,) in ways(problem, arrays)]
            last = join(sweeps) if problem.bidirectional else sweeps[0]
            if self.eager:
                mx.eval(last)
        self.left = []
        return last | {name: room.array for name, room in rooms.items()}

    def starts(self, problem: Problem, arrays: Arrays, outputs: Arrays) -> Arrays:
        """The states that chunks start from, out of those after all steps."""
        found = []
        for d, one, (given,) in ways(problem, arrays):
            first: Arrays = dict(zip(("h0", "c0"), initial_states(one, given), strict=True))
            mx.eval(first)
            own = {name: numbers_of(outputs[name[0]]) for name in states_of(one)}
            own = {name: half(states, d) if problem.bidirectional else states for name, states in own.items()}
            starts = {
                n: [
                    before(one, own[n], numbers_of(first[n]), arrays.get("lengths"), *b)
                    for b in sorted(self.bounds(one))
                ]
                for n in own
            }
            found.append({f"{name[0]}_starts": of_numbers(np.stack(rows)) for name, rows in starts.items()})
        return join(found) if problem.bidirectional else found[0]

    def sweep_forward(self, d: int, problem: Problem, arrays: Arrays, rooms: dict[str, "Room"]) -> Arrays:
        """One direction's chunks: writes the sequences; the last states, and those that chunks start from."""
        fixed, rows, starts = self.fixed(arrays), self.by_step(arrays), {}
        h0, c0 = initial_states(problem, arrays)
        states = {"h0": h0, "c0": widened(c0)}  # the engines keep c so
        states = self.settled({name: states[name] for name in states_of(problem)})
        if self.recomputes:
            problem = problem._replace(training=False)
        for start, stop in self.bounds(problem):
            starts[start] = states
            found = self.module.forward(
                problem._replace(T=stop - start), lengths_of(fixed, start, stop) | self.cut(rows, start, stop) | states
            )
            states = {name: found[f"{name[0]}T"] for name in states}
            self.leave(rooms, d, start, stop, found, states)
            states = self.settled(states)
        last = {f"{name[0]}T": state for name, state in states.items()}
        in_time = [starts[start] for start in sorted(starts)]
        return last | {f"{name[0]}_starts": mx.stack([each[name] for each in in_time]) for name in states}

    def backward(self, problem: Problem, arrays: Arrays, saved: dict[str, Any], cotangents: Arrays) -> Arrays:
        """The gradient of every array, in its dtype; `saved`: what is `kept`."""
        self.begin(problem, self.evaluates and have_values([*arrays.values(), *cotangents.values()]))
        rooms = {}
        for name in with_steps(arrays):  # sums of both directions are wide
            dtype = widened(arrays[name]).dtype if problem.bidirectional else arrays[name].dtype
            rooms[name] = Room(arrays[name].shape, dtype, self.batch_first, self.eager)
        with self.running():
            given = ways(problem, arrays, saved, cotangents)
            sweeps = [self.sweep_backward(d, one, rooms, *values) for d, one, values in given]
            gradients = join_gradients(sweeps, arrays) if problem.bidirectional else sweeps[0]
            gradients |= {name: room.array for name, room in rooms.items()}
            self.left = []
            return {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items()}

    def sweep_backward(
        self, d: int, problem: Problem, rooms: dict[str, "Room"], arrays: Arrays, saved: Arrays, cotangents: Arrays
    ) -> Arrays:
        """One direction's chunks in reverse: writes what has a gradient at each step; the gradients of all else."""
        states, sums = {name: f"{name[0]}_starts" for name in states_of(problem)}, {}
        fixed, rows, d_rows, kept_rows = self.fixed(arrays), *map(self.by_step, (arrays, cotangents, saved))
        after = self.settled({name: cotangents[name] for name in ("hT", "cT") if name in cotangents})
        for start, stop in reversed(self.bounds(problem)):
            now, n = problem._replace(T=stop - start), start // self.steps
            given = lengths_of(fixed, start, stop) | self.cut(rows, start, stop)
            given |= {name: saved[starts][n] for name, starts in states.items()}
            if self.recomputes:
                kept = self.module.forward(now._replace(training=True, return_gates=False), given)
            else:
                kept = self.cut(kept_rows, start, stop)
            found = self.module.backward(now, given, kept, self.cut(d_rows, start, stop) | after)
            after = {f"{name[0]}T": found.pop(name) for name in states}
            for name, starts in states.items():
                if starts in cotangents:  # in a second derivative
                    after[f"{name[0]}T"] += cotangents[starts][n]
            shared = {name: widened(gradient) for name, gradient in found.items() if name not in rooms}
            self.leave(rooms, d, start, stop, found, after | shared)
            after, sums = self.settled(after), self.added(sums, shared)
        if self.eager:
            sums = {name: mx.array(total, widened(arrays[name]).dtype) for name, total in sums.items()}
        return sums | {name: after[f"{name[0]}T"] for name in states if name in arrays}

    def bounds(self, problem: Problem) -> list[tuple[int, int]]:
        """The steps from..to of one direction's chunks, in the order they are processed."""
        found = [(start, min(start + self.steps, problem.T)) for start in range(0, problem.T, self.steps)]
        return found[::-1] if problem.reverse else found

    def fixed(self, arrays: Arrays) -> Arrays:
        """Those that all steps share."""
        others = {*with_steps(arrays), "h0", "c0"}
        return self.settled({name: array for name, array in arrays.items() if name not in others})

    def by_step(self, arrays: Arrays) -> dict[str, Any]:
        """Those that have a row for each step; as NumPy's where chunks are evaluated, which cuts them for nothing."""
        rows = {name: arrays[name] for name in with_steps(arrays)}
        if self.eager:
            mx.eval(rows)
            return {name: numbers_of(array) for name, array in rows.items()}
        return rows

    def cut(self, rows: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Steps start..stop, for the engine."""
        part = {name: array[start:stop] for name, array in rows.items()}
        if self.takes_numbers and all(array.itemsize > 2 for array in part.values()):
            return part
        if self.eager:
            part = {name: of_numbers(array) for name, array in part.items()}
        elif "x" in part and self.left:
            part["x"] = following(part["x"], self.left)
        return self.for_engine(self.engine, part)

    def settled(self, arrays: Arrays) -> Arrays:
        """Arrays for the engine; copied where they are to leave a graph, which those of `numpy` are not in."""
        if self.eager and self.engine != "numpy":
            mx.eval(arrays)
            arrays = {name: of_numbers(numbers_of(array)) for name, array in arrays.items()}
        return self.for_engine(self.engine, arrays)

    def begin(self, problem: Problem, eager: bool) -> None:
        """The first chunk comes."""
        self.eager, self.left = eager, []
        self.takes_numbers = self.engine == "numpy" and problem.packing is None

    def leave(self, rooms: dict[str, "Room"], d: int, start: int, stop: int, found: Arrays, others: Arrays) -> None:
        """A chunk of direction d is done: writes its sequences, and evaluates them and the others, or notes them."""
        rows = {name: found[name].astype(room.dtype) for name, room in rooms.items()}
        if self.eager:
            mx.eval(rows, others)
        for name, room in rooms.items():
            room.write(d, start, stop, rows[name])
        if not self.eager:
            self.left = [*others.values(), *(room.memory for room in rooms.values())]

    def added(self, sums: dict[str, Any], gradients: Arrays) -> dict[str, Any]:
        """The sums over chunks: NumPy's arrays where these are evaluated."""
        if not self.eager:
            return {name: gradient + sums[name] if sums else gradient for name, gradient in gradients.items()}
        if not sums:
            return {name: np.array(gradient) for name, gradient in gradients.items()}
        for name, gradient in gradients.items():
            sums[name] += numbers_of(gradient)
        return sums

    def running(self) -> AbstractContextManager[object]:
        """Where all beside the engine runs: with `numpy` on the CPU, as a GPU has no float64."""
        return mx.stream(mx.cpu) if self.engine == "numpy" else nullcontext()


class Room:
    """A sequence [T, B, .] of one direction or both, into which chunks write; batch-major in memory if it shall be.

    `evaluated` rows are written by NumPy, as MLX would copy the whole where it keeps its graph."""

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype, batch_first: bool, evaluated: bool):
        T, B, self.width = shape
        self.swaps: bool = batch_first
        self.dtype: mx.Dtype = dtype
        self.memory: Array = mx.zeros((B, T, self.width) if batch_first else shape, dtype)
        self.numbers: np.ndarray | None = None
        if evaluated:
            mx.eval(self.memory)
            self.numbers = numbers_of(self.memory)

    def write(self, d: int, start: int, stop: int, rows: Array) -> None:
        """What direction d has of steps start..stop: its half, or its part of the sum of what both share."""
        first = 0 if rows.shape[-1] == self.width else d * rows.shape[-1]
        steps, columns = slice(start, stop), slice(first, first + rows.shape[-1])
        at = (slice(None), steps, columns) if self.swaps else (steps, slice(None), columns)
        into: Any = self.memory if self.numbers is None else self.numbers
        part: Any = rows if self.numbers is None else numbers_of(rows)
        part = part.swapaxes(0, 1) if self.swaps else part
        into[at] = into[at] + part if d and not first else part

    @property
    def array(self) -> Array:
        """The sequence."""
        return mx.swapaxes(self.memory, 0, 1) if self.swaps else self.memory


def ways(problem: Problem, *values: Arrays) -> Iterator[tuple[int, Problem, list[Any]]]:
    """Each direction: its number, its problem, its parts of the arrays."""
    if not problem.bidirectional:
        yield 0, problem, list(values)
        return
    for d in range(2):
        yield d, one_direction(problem, d), [part(arrays, d) for arrays in values]


def before(
    problem: Problem, states: np.ndarray, first: np.ndarray, lengths: Array | None, start: int, stop: int
) -> np.ndarray:
    """The state [B, .] that steps start..stop start from, out of those after each step and the first one. Of an item
    that has ended by then anything will do."""
    last = stop if problem.reverse else start - 1
    if not 0 <= last < problem.T:
        return first
    if not problem.reverse or lengths is None:
        return states[last]
    return np.where(np.array(lengths)[:, None] > stop, states[last], first)


def lengths_of(arrays: Arrays, start: int, stop: int) -> Arrays:
    """The arrays with the lengths of steps start..stop: 0 for an item that ended before, all for one that goes on."""
    if "lengths" not in arrays:
        return arrays
    return arrays | {"lengths": mx.clip(arrays["lengths"] - start, 0, stop - start)}


def with_steps(arrays: Arrays) -> list[str]:
    """Which arrays have a row for each step."""
    always = ("x", "keep", *SEQUENCES)
    return [name for name in arrays if name in always or (name == "mask" and masks_differ(arrays))]


def states_of(problem: Problem) -> list[str]:
    """The names of a cell's first states."""
    return ["h0", "c0"] if "c" in problem.cell.outputs else ["h0"]


def widened(array: Array) -> Array:
    """An array of 16 bits in float32, in which sums are made."""
    return array.astype(mx.float32) if array.itemsize == 2 else array


def numbers_of(array: Array) -> np.ndarray:
    """An evaluated array's memory; that of bfloat16, which NumPy does not know, as integers."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array, copy=False)


def of_numbers(numbers: np.ndarray) -> Array:
    """A new array, of no graph, out of what `numbers_of` gave."""
    array = mx.array(numbers, mx.float64 if numbers.dtype == np.float64 else None)
    return array.view(mx.bfloat16) if array.dtype == mx.uint16 else array


def following(array: Array, others: list[Array]) -> Array:
    """The array, once all others are there. Not `mx.depends`, which has no place in `mx.vmap` and `mx.jvp`."""
    seen = mx.stack([other[(0,) * other.ndim].astype(mx.float32) for other in others])
    return mx.where((seen == seen).any(), array, array)
