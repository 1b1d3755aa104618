"""Measure the time to build the graph of a call, for the option `--host`. Nothing in the graph runs. Our layers and
`mlx.nn.LSTM` take turns. On a Mac the GPU waits while the graph is built, unless it has other work.

The measurement needs no Metal. The calls are timed while MLX exports a function, because during an export Metal kernels
can be called on any machine. Building a graph node takes the same time during an export as in a normal call.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median
from time import thread_time
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .. import recurrence
from ..engines import choice
from ..engines.metal import kernel
from ..lab.cases import DTYPES
from ..lab.report import table
from ..lab.timing.tasks import Size

HOST_SIZE = Size(64, 32, 256, 256)
ROUNDS, CALLS = 9, 9
THEIRS = "mlx.nn.LSTM"
LEGEND = f"""\
The table shows how many microseconds the host takes to build a graph, which is not evaluated. Each number is the median
of {ROUNDS} rounds of {CALLS} calls. All layers run in turns in one process, timed by the CPU time of its thread. Where
malloc allows it, memory is mapped before.
over: the time divided by the time of {THEIRS}."""

TRIM_THRESHOLD = -1
"""The number of an option of glibc's function mallopt: how much freed memory malloc keeps. By default malloc keeps
hardly any, and the system maps new memory for every graph, which takes longer than to build a kernel launch."""


class Cost(NamedTuple):
    """The time that the host takes to build the graph of a layer. layer: our engine, or "mlx.nn.LSTM". which: the pass,
    "forward" or "backward". call, step: seconds per call and per time step. over: the time divided by the time of
    `mlx.nn.LSTM`."""

    layer: str
    which: str
    call: float
    step: float
    over: float


def layer_calls(size: Size, dtype: mx.Dtype) -> tuple[dict[str, Callable[..., mx.array]], list[mx.array]]:
    """Return (functions, arrays). functions: by name, a function for each of our Metal engines that can run an LSTM of
    this size, and one for `mlx.nn.LSTM`. arrays: x [T, B, I], Wx, Wh and b, from which each function computes h. The
    function of `mlx.nn.LSTM` takes x as [B, T, I]; `seconds` swaps the axes."""
    T, B, I, H = size
    layer = nn.LSTM(1, 1)  # any sizes, as `theirs` replaces the weights

    def theirs(x: mx.array, Wx: mx.array, Wh: mx.array, b: mx.array) -> mx.array:
        layer.Wx, layer.Wh, layer.bias = Wx, Wh, b
        return layer(x)[0]

    def ours(engine: Any) -> Callable[..., mx.array]:
        return lambda *arrays: recurrence.lstm(*arrays, engine=engine).h

    engines = [engine for engine in ("fused", "stepwise") if engine == "stepwise" or choice.FUSED_LIMIT["lstm"] >= H]
    shapes = (T, B, I), (4 * H, I), (4 * H, H), (4 * H,)
    arrays = [mx.zeros(shape, dtype) for shape in shapes]
    return {engine: ours(engine) for engine in engines} | {THEIRS: theirs}, arrays


def seconds(call: Callable[..., mx.array], which: str, values: list[mx.array]) -> float:
    """Return the seconds of CPU time to build the graph of one pass. call: a function of `layer_calls`. which:
    "forward", or "backward" for a forward pass with the gradients of all arrays. values: the arrays."""
    if call.__name__ == "theirs":  # `mlx.nn.LSTM` takes the batch first; swapping the axes is not timed
        values = [mx.swapaxes(values[0], 0, 1), *values[1:]]
    start = thread_time()
    if which == "forward":
        graph = call(*values)
    else:
        graph = mx.value_and_grad(lambda *values: call(*values).sum(), range(len(values)))(*values)
    passed = thread_time() - start
    del graph
    return passed


@contextmanager
def as_on_a_mac() -> Iterator[None]:
    """Return a context in which the library chooses engines as on a Mac with a GPU. Inside this context kernels have no
    trial run before their first use, and graphs can be built but not evaluated."""
    before = [(choice, "current_device", choice.current_device), (choice, "has_metal", choice.has_metal)]
    choice.current_device = lambda: "gpu"
    choice.has_metal = lambda: True
    kernel.forget()  # the tests cache emulated kernels, which would evaluate their inputs
    try:
        with recurrence.unguarded(), mx.stream(mx.gpu if mx.is_available(mx.gpu) else mx.cpu):
            yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
        kernel.forget()


def measure_host(size: Size, dtype: str) -> list[Cost]:
    """Return the times that the host takes to build the graphs of all layers and both passes. The calls run while MLX
    exports a function: only then can our Metal kernels be called on a machine without Metal."""
    calls, arrays = layer_calls(size, DTYPES[dtype])
    times: dict[tuple[str, str], list[float]] = {
        (name, which): [] for which in ("forward", "backward") for name in calls
    }

    def timed(*values: mx.array) -> list[mx.array]:
        for _ in range(ROUNDS):
            for name, which in times:
                times[name, which] += [seconds(calls[name], which, list(values)) for _ in range(CALLS)]
        return [values[0]]

    # Let malloc keep freed memory. Otherwise most of the measured time would be spent on mapping new memory.
    with suppress(AttributeError):  # only glibc has mallopt
        ctypes.CDLL(None).mallopt(TRIM_THRESHOLD, 2**30)
    with as_on_a_mac():  # so that our layers choose the Metal engines
        mx.export_function(lambda node: None, timed, *arrays)  # the callback discards the export
    middle = {key: median(each) for key, each in times.items()}
    theirs = {which: middle[THEIRS, which] for which in ("forward", "backward")}
    return [Cost(name, which, s, s / size.T, s / theirs[which]) for (name, which), s in middle.items()]


def host_text(size: Size, dtype: str, costs: list[Cost]) -> str:
    """Return a table of the times to build the graphs at one size, as text."""
    cells = [["layer", "pass", "us per call", "us per step", "over"]]
    for cost in costs:
        cells.append([cost.layer, cost.which, f"{1e6 * cost.call:.0f}", f"{1e6 * cost.step:.1f}", f"{cost.over:.2f}"])
    return f"T,B,I,H = {size}   {dtype}\n{table(cells, left=2)}"
