"""Measure, for `--host`, the time that building the graph of a call takes, before anything runs. Our layers and
`mlx.nn.LSTM` take turns.

This needs no Metal: while MLX traces for an export, custom kernels can be called without Metal, so the calls are timed
during an export. Building a graph node takes the same time during an export as in a normal call. On a Mac the GPU waits
while the graph is built, unless it has other work.
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
Microseconds of the host until the graph is built; nothing runs. Medians of {ROUNDS} rounds of {CALLS} calls, all in
turns in one process, by the CPU time of the thread. Memory is mapped before, as far as malloc lets us.
over: how many times that of {THEIRS}."""

TRIM_THRESHOLD = -1
"""The number of the option in glibc's function mallopt that sets how much freed memory malloc keeps. By default malloc
keeps hardly any. The system then maps new memory for every graph, which takes longer than to build a kernel launch."""


class Cost(NamedTuple):
    """The time that the host takes to build a layer's graph. layer: our engine or THEIRS. which: the pass. call, step:
    seconds per call and seconds per time step. over: the time divided by the time of `mlx.nn.LSTM`."""

    layer: str
    which: str
    call: float
    step: float
    over: float


def layer_calls(size: Size, dtype: mx.Dtype) -> tuple[dict[str, Callable[..., mx.array]], list[mx.array]]:
    """Return (functions, arrays). `functions` has a function for each of our engines that can run an LSTM of this size,
    and one for `mlx.nn.LSTM` (THEIRS), by name. Each computes h from x [T, B, width], Wx, Wh and b; only the last takes
    x as [B, T, width], which `seconds` passes to it."""
    T, B, width, H = size
    layer = nn.LSTM(1, 1)  # of any size: `theirs` replaces its weights

    def theirs(x: mx.array, Wx: mx.array, Wh: mx.array, b: mx.array) -> mx.array:
        layer.Wx, layer.Wh, layer.bias = Wx, Wh, b
        return layer(x)[0]

    def ours(engine: Any) -> Callable[..., mx.array]:
        return lambda *arrays: recurrence.lstm(*arrays, engine=engine).h

    engines = [engine for engine in ("fused", "stepwise") if engine == "stepwise" or choice.FUSED_LIMIT["lstm"] >= H]
    shapes = (T, B, width), (4 * H, width), (4 * H, H), (4 * H,)
    arrays = [mx.zeros(shape, dtype) for shape in shapes]
    return {engine: ours(engine) for engine in engines} | {THEIRS: theirs}, arrays


def seconds(call: Callable[..., mx.array], which: str, values: list[mx.array]) -> float:
    """Return the CPU time to build the graph of one pass. The pass is a forward pass, or a forward pass with the
    gradients of all arrays."""
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
    """Return a context in which engines are chosen as on a Mac with a GPU. Normally a kernel is tested before its first
    use. Inside this context there are no tests, and graphs can only be built, not evaluated."""
    before = [(choice, "current_device", choice.current_device), (choice, "has_metal", choice.has_metal)]
    choice.current_device = lambda: "gpu"
    choice.has_metal = lambda: True
    kernel.forget()  # drop cached kernels: kernels of the tests' emulator would evaluate their inputs
    try:
        with recurrence.unguarded(), mx.stream(mx.gpu if mx.is_available(mx.gpu) else mx.cpu):
            yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
        kernel.forget()


def measure_host(size: Size, dtype: str) -> list[Cost]:
    """Return, for all layers and both passes, the time that the host takes to build the graph of a call. The calls run
    while MLX exports a function: only then can our Metal kernels be called on a machine without Metal."""
    calls, arrays = layer_calls(size, DTYPES[dtype])
    times: dict[tuple[str, str], list[float]] = {
        (name, which): [] for which in ("forward", "backward") for name in calls
    }

    def timed(*values: mx.array) -> list[mx.array]:
        for _ in range(ROUNDS):
            for name, which in times:
                times[name, which] += [seconds(calls[name], which, list(values)) for _ in range(CALLS)]
        return [values[0]]

    # Let malloc keep freed memory; otherwise mapping new memory for each graph would be most of what is measured.
    with suppress(AttributeError):  # only glibc has mallopt
        ctypes.CDLL(None).mallopt(TRIM_THRESHOLD, 2**30)
    with as_on_a_mac():  # so that our layers choose the Metal engines
        mx.export_function(lambda node: None, timed, *arrays)  # the callback drops what MLX would export
    middle = {key: median(each) for key, each in times.items()}
    return [
        Cost(name, which, value, value / size.T, value / middle[THEIRS, which])
        for (name, which), value in middle.items()
    ]


def host_text(size: Size, dtype: str, costs: list[Cost]) -> str:
    """Return a table of the times to build the graphs at one size, as text."""
    cells = [["layer", "pass", "us per call", "us per step", "over"]]
    for cost in costs:
        cells.append([cost.layer, cost.which, f"{1e6 * cost.call:.0f}", f"{1e6 * cost.step:.1f}", f"{cost.over:.2f}"])
    return f"T,B,I,H = {size}   {dtype}\n{table(cells, left=2)}"
