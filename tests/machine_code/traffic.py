"""Compute how many bytes the kernels of `stepwise` read: for each buffer the bytes that a launch needs, and the
bytes of all its loads.

The figures are averages over the launches of all time steps, since the first step reads less than the others. A
launch gets arrays of whole sequences but reads only one time step of them. The array that the previous step wrote
(`before`) may hold more than this step needs. The buffers' names are those in the shaders.
"""

import re
from math import ceil

from mlx_lstm.engines.metal.stepwise import keeps_rows
from mlx_lstm.engines.problem import Problem

from .instructions import constant_of
from .launches import Buffer, Launch

STATES = {"lstm": (1, 1), "gru": (0, 1), "rnn": (1, 0)}
"""For each cell: whether (1 or 0) a backward step reads the saved state of its own time step, and of the one before."""

CARRIES = {"lstm": 4, "gru": 4, "rnn": 0}
"""For each cell: the bytes per hidden unit that a backward step passes on to the next one, besides dz."""

WEIGHTS = ("Wh", "Wh_scales", "Wh_biases", "weights")


def kind_of(launch: Launch) -> str:
    """Return which `stepwise` shader a launch runs: "forward", "outputs", "backward", "dh" or "gradients"."""
    return re.sub(r".*_stepwise_|_joining|_projected", "", launch.name)


def itemsize(launch: Launch) -> int:
    """Return the bytes per element of a launch's arrays."""
    arrays = {buffer.name: buffer for buffer in (*launch.reads, *launch.writes)}
    found = next(arrays[name] for name in ("z", "Wh", "weights", "h", "dz") if name in arrays)
    elements = 1
    for size in found.shape:
        elements *= size
    return found.bytes // elements


def is_piece(buffer: Buffer) -> bool:
    """Return whether a buffer is one of the inputs that the launch joins into one array. Each of these inputs holds
    the results of some time steps."""
    return re.fullmatch(r"p(iece)?\d+", buffer.name) is not None


def reads(buffer: Buffer, launch: Launch, problem: Problem) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of a buffer that a `stepwise` kernel reads. Loads may read a byte
    more than once."""
    kind = kind_of(launch)
    if buffer.name in ("starts", "kinds"):  # arrays of a few sizes, too small to count
        return 0, 0
    if kind in ("outputs", "gradients"):
        return of_sequences(buffer, launch, kind, problem)
    if buffer.name in WEIGHTS:
        return weights(buffer, launch, problem)
    if buffer.name == "before":
        return row_before(buffer, launch, problem, itemsize(launch))
    if is_piece(buffer):
        return buffer.bytes, buffer.bytes
    return step_of(buffer, launch, problem)


def product(problem: Problem, launch: Launch) -> tuple[int, int, float, float]:
    """Return (threadgroups along the hidden units, threadgroups along the batch, how often each element of the
    operand is read, how often each weight is read) for the matrix product of one time step. The operand is the array
    that the weights multiply, such as h."""
    rows, columns = constant_of(launch, "ROWS", 0), constant_of(launch, "COLUMNS", 0)
    units = columns // (problem.cell.gates if kind_of(launch) == "forward" else 1)
    across, down = ceil(problem.H / units), ceil(problem.B / rows)
    # With fewer than 8 batch rows in a threadgroup, each of its eight SIMD-groups reads the whole operand, so the
    # operand is read 8 times (`readers`). Lanes past the end of the batch or of the units read the last rows and units
    # again, so these reads count, too.
    readers = 8 if rows < 8 else 1
    return across, down, readers * across * down * rows / problem.B, down * across * units / problem.H


def weights(buffer: Buffer, launch: Launch, problem: Problem) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of the recurrent weights. They are averages over all time steps: the
    first step of each pass needs no product, so it reads no weights. (The layers here have no h0.)"""
    *_, times = product(problem, launch)
    steps = (problem.T - 1) / problem.T if kind_of(launch) in ("forward", "backward", "stepwise_gru_reset") else 1
    return steps * buffer.bytes, steps * times * buffer.bytes


def row_before(buffer: Buffer, launch: Launch, problem: Problem, size: int) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of the array that the previous time step wrote. The array holds the
    vector to be multiplied by the weights, and values such as c that are passed on from step to step."""
    op, units, kind = problem.cell.op, problem.B * problem.directions * problem.H, kind_of(launch)
    if buffer.bytes < units * size:  # a tiny placeholder array: the first step has no predecessor
        return 0, 0
    _, _, times, _ = product(problem, launch)
    if kind == "forward":
        carried = {"lstm": 4 * units, "gru": 0, "rnn": 0}[op]
        again = units * size if op == "gru" else 0
        return units * size + carried, units * size * times + carried + again
    operand, carried = problem.cell.gates * units * size, CARRIES[op] * units if kind == "backward" else 0
    return operand + carried, operand * times + carried


def step_of(buffer: Buffer, launch: Launch, problem: Problem) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of an array that holds a whole sequence. A launch reads one time
    step of the array; a backward launch may also read a part of the step before."""
    T, op, kind = problem.T, problem.cell.op, kind_of(launch)
    step, later = buffer.bytes / T, (T - 1) / T
    # A backward step reads only the gates of one time step from the array `rows`. The array also has other results of
    # all forward steps, e.g. c and h, which do not count here.
    if buffer.name == "rows":
        return twice(problem.cell.gates * problem.B * problem.directions * problem.H * itemsize(launch))
    if buffer.name in ("h", "c"):
        own, before = STATES[op]
        return twice((own + before * later) * step)
    if buffer.name == "gates":
        own = step if kind == "backward" else 0
        # A GRU also reads its gate r, a third of the gates. The forward pass reads r of the same step. The backward
        # pass reads r of the step that ran before, and multiplies it by the gradient of the candidate's preactivation.
        extra = step / 3 * (later if kind == "backward" else 1) if op == "gru" else 0
        return own + extra, own + extra * product(problem, launch)[2]
    return step, step


def of_sequences(buffer: Buffer, launch: Launch, kind: str, problem: Problem) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of a buffer for a launch that joins the arrays of all time steps
    into sequences. The launch loads only what becomes part of a sequence, and loads it once. It does not load gates
    that are not returned, or values that one backward step passes to the next one."""
    T, op = problem.T, problem.cell.op
    if kind == "outputs":
        gates = problem.cell.gates if keeps_rows(problem, problem.names) else 0  # gates that the launch does not copy
        own = itemsize(launch) + (4 if op == "lstm" else 0)
        return twice(buffer.bytes * own / (own + gates * itemsize(launch)))
    if buffer.name == "h":
        return twice(buffer.bytes * (T - 1) / T)
    if buffer.name == "gates":  # a GRU needs only the reset gate r
        return twice(buffer.bytes / 3)
    needed, carried = problem.cell.gates * itemsize(launch), CARRIES[op]
    return twice(buffer.bytes * needed / (needed + carried))


def twice(count: float) -> tuple[float, float]:
    """Return the pair (bytes needed, bytes of all loads) of a buffer whose bytes are each loaded once: (count,
    count)."""
    return count, count
