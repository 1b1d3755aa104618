"""`--host`: what a call costs before anything runs: building the graph, ours and that of `mlx.nn.LSTM` in turns.

Needs no Metal. MLX calls custom kernels without it only while it traces for an export, so the calls are timed in there;
their own nodes cost what they cost anywhere. On a Mac this is time in which the GPU waits, unless it has work to do.
"""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack, suppress
from statistics import median
from time import thread_time
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

from .. import recurrence
from ..engines import choice
from ..engines.metal import kernel
from .report import table
from .tasks import DTYPES, Size

HOST_SIZE = Size(64, 32, 256, 256)
ROUNDS, CALLS = 9, 9
THEIRS = "mlx.nn.LSTM"
LEGEND = f"""\
Microseconds of the host until the graph is built; nothing runs. Medians of {ROUNDS} rounds of {CALLS} calls, all in
turns in one process, on the thread's own clock, which stands while other processes have the core. What the system
takes to map memory is left out. over: how many times that of {THEIRS}."""

TRIM_THRESHOLD = -1
"""The number of glibc's option: how much freed memory it keeps. By default hardly any, so that every graph would be
built in memory that the system has to map again; for a launch of ours that takes twice its own time."""


class Cost(NamedTuple):
    """Seconds of a layer's whole call, per step, and how many times what `mlx.nn.LSTM` takes."""

    layer: str
    which: str
    call: float
    step: float
    over: float


def calls_of(size: Size, dtype: mx.Dtype) -> tuple[dict[str, Callable[..., mx.array]], list[mx.array]]:
    """Each layer's h from x, Wx, Wh and b, and these arrays."""
    T, B, width, H = size
    layer = nn.LSTM(1, 1)

    def theirs(x: mx.array, Wx: mx.array, Wh: mx.array, b: mx.array) -> mx.array:
        layer.Wx, layer.Wh, layer.bias = Wx, Wh, b
        return layer(x)[0]

    def of(engine: str) -> Callable[..., mx.array]:
        return lambda *arrays: recurrence.lstm(*arrays, engine=engine).h

    engines = [engine for engine in ("fused", "stepwise") if engine == "stepwise" or choice.FUSED_LIMIT["lstm"] >= H]
    shapes = (T, B, width), (4 * H, width), (4 * H, H), (4 * H,)
    return {engine: of(engine) for engine in engines} | {THEIRS: theirs}, [mx.zeros(shape, dtype) for shape in shapes]


def seconds(call: Callable[..., mx.array], which: str, values: list[mx.array]) -> float:
    """The time it takes to build a forward pass, or one and the gradient of all arrays."""
    if call.__name__ == "theirs":  # batch first
        values = [mx.swapaxes(values[0], 0, 1), *values[1:]]
    start = thread_time()
    if which == "forward":
        built = call(*values)
    else:
        built = mx.value_and_grad(lambda *values: call(*values).sum(), range(len(values)))(*values)
    taken = thread_time() - start
    del built
    return taken


def measure_host(size: Size, dtype: str, rounds: int = ROUNDS) -> list[Cost]:
    """The costs of all layers, both passes."""
    calls, arrays = calls_of(size, DTYPES[dtype])
    passes = ("forward", "backward")
    found: dict[tuple[str, str], list[float]] = {(name, which): [] for which in passes for name in calls}

    def timed(*values: mx.array) -> list[mx.array]:
        for _ in range(rounds):
            for name, which in found:
                found[name, which] += [seconds(calls[name], which, list(values)) for _ in range(CALLS)]
        return [values[0]]

    with suppress(AttributeError):  # macOS has no such option
        ctypes.CDLL(None).mallopt(TRIM_THRESHOLD, 2**30)
    with ExitStack() as stack:
        stack.enter_context(patch.object(choice, "current_device", lambda: "gpu"))
        stack.enter_context(patch.object(mx.metal, "is_available", lambda: True))
        kernel.forget()  # a kernel that the tests' emulator built would evaluate its inputs
        stack.callback(kernel.forget)
        stack.enter_context(mx.stream(mx.gpu if mx.is_available(mx.gpu) else mx.cpu))
        mx.export_function(lambda node: None, timed, *arrays)
    middle = {key: median(times) for key, times in found.items()}
    return [
        Cost(name, which, value, value / size.T, value / middle[THEIRS, which])
        for (name, which), value in middle.items()
    ]


def host_text(size: Size, dtype: str, costs: list[Cost]) -> str:
    """The table of a size."""
    cells = [["layer", "pass", "us per call", "us per step", "over"]]
    for cost in costs:
        cells.append([cost.layer, cost.which, f"{1e6 * cost.call:.0f}", f"{1e6 * cost.step:.1f}", f"{cost.over:.2f}"])
    return f"T,B,I,H = {size}   {dtype}\n{table(cells)}"
