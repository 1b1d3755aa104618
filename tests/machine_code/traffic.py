"""Compute the bytes that the kernels of `stepwise` read: for each buffer, the bytes that a launch needs and the
bytes of all its loads.

The figures are averages over the launches of a sweep, since only the first step differs. A launch gets whole
sequences but reads one step of them. A row, which the step before wrote, holds more than a step needs. The shaders
define the names of the arrays.
"""

import re
from math import ceil

from mlx_lstm.engines.metal.stepwise import UNITS, stepwise_rows, tile_of
from mlx_lstm.engines.problem import Problem

from .launches import Buffer, Launch

STATES = {"lstm": (1, 1), "gru": (0, 1), "rnn": (1, 0)}
"""For each cell: whether a backward step reads its own state, and the state before it."""

CARRIES = {"lstm": 4, "gru": 4, "rnn": 0}
"""For each cell: the bytes per unit that a backward step passes on besides dz."""

WEIGHTS = ("Wh", "Wh_scales", "Wh_biases", "weights")


def kind_of(launch: Launch) -> str:
    """Return the shader of a launch: "forward", "outputs", "backward", "dh" or "gradients"."""
    return re.sub(r".*_stepwise_|_joining|_projected", "", launch.name)


def itemsize(launch: Launch) -> int:
    """Return the bytes of an element of the arrays."""
    arrays = {buffer.name: buffer for buffer in (*launch.reads, *launch.writes)}
    found = next(arrays[name] for name in ("z", "Wh", "weights", "h", "dz") if name in arrays)
    elements = 1
    for size in found.shape:
        elements *= size
    return found.bytes // elements


def is_piece(buffer: Buffer) -> bool:
    """Return whether a buffer is one of the arrays of rows that a launch joins into a sequence."""
    return re.fullmatch(r"p(iece)?\d+", buffer.name) is not None


def reads(buffer: Buffer, launch: Launch, problem: Problem) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of a buffer."""
    kind = kind_of(launch)
    if buffer.name in ("starts", "kinds"):  # a few sizes
        return 0, 0
    if kind in ("outputs", "gradients"):
        return of_sequences(buffer, launch, kind, problem)
    if buffer.name in WEIGHTS:
        return weights(buffer, kind, problem)
    if buffer.name == "before":
        return row_before(buffer, kind, problem, itemsize(launch))
    if is_piece(buffer):
        return buffer.bytes, buffer.bytes
    return step_of(buffer, kind, problem)


def product(problem: Problem, kind: str) -> tuple[int, int, float, float]:
    """Return how a step's product is divided: threadgroups along the units and along the batch, and how often each
    element of the operand and each weight is read."""
    forward = stepwise_rows(problem.B), UNITS[problem.cell.op]
    rows, units = forward if kind == "forward" else tile_of(problem, problem.H)
    across, down = ceil(problem.H / units), ceil(problem.B / rows)
    # In a product by lanes, each of eight simdgroups reads the operand. Lanes past the end read the last rows and
    # units again.
    readers = 8 if rows < 8 else 1
    return across, down, readers * across * down * rows / problem.B, down * across * units / problem.H


def weights(buffer: Buffer, kind: str, problem: Problem) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of the weights. The first backward step has no product."""
    *_, times = product(problem, kind)
    steps = (problem.T - 1) / problem.T if kind == "backward" else 1
    return steps * buffer.bytes, steps * times * buffer.bytes


def row_before(buffer: Buffer, kind: str, problem: Problem, size: int) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of the row that the step before wrote: the product's operand, and
    the values passed on."""
    op, units = problem.cell.op, problem.B * problem.directions * problem.H
    if buffer.bytes < units * size:  # the first step has no row before it
        return 0, 0
    _, _, times, _ = product(problem, kind)
    if kind == "forward":
        carried = {"lstm": 4 * units, "gru": 0, "rnn": 0}[op]
        again = units * size if op == "gru" else 0
        return units * size + carried, units * size * times + carried + again
    operand, carried = problem.cell.gates * units * size, CARRIES[op] * units if kind == "backward" else 0
    return operand + carried, operand * times + carried


def step_of(buffer: Buffer, kind: str, problem: Problem) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of a sequence: this step, and for a backward step what it needs of
    the step before."""
    T, op = problem.T, problem.cell.op
    step, later = buffer.bytes / T, (T - 1) / T
    if buffer.name == "states":
        own, before = STATES[op]
        return twice((own + before * later) * step)
    if buffer.name == "gates":
        own = step if kind == "backward" else 0
        # The products of a GRU read the candidate's dz times r.
        extra = step / 3 * (later if kind == "backward" else 1) if op == "gru" else 0
        return own + extra, own + extra * product(problem, kind)[2]
    return step, step


def of_sequences(buffer: Buffer, launch: Launch, kind: str, problem: Problem) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of a launch that joins rows into sequences. It reads everything
    once, except the values that backward steps pass on."""
    T, op = problem.T, problem.cell.op
    if kind == "outputs":
        return buffer.bytes, buffer.bytes
    if buffer.name == "h":
        return twice(buffer.bytes * (T - 1) / T)
    if buffer.name == "gates":  # a GRU needs r
        return twice(buffer.bytes / 3)
    needed, carried = problem.cell.gates * itemsize(launch), CARRIES[op]
    return twice(buffer.bytes * needed / (needed + carried))


def twice(count: float) -> tuple[float, float]:
    """Return the pair (bytes needed, bytes of all loads) for bytes that are loaded once."""
    return count, count
