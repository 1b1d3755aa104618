"""The types of the benchmark: sizes, tasks and contenders (implementations to measure). Also the passes and sizes of
the benchmark case `lstm`."""

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ...oracle.arithmetic import Tensors

PASSES = {"forward": ("h",), "backward": ("h", "dx", "dWx", "dWh", "db")}
"""The passes of the benchmark case `lstm`, each with the names of the results that it computes. The pass `backward`
includes the forward pass."""


class Size(NamedTuple):
    """The sizes of a problem: T time steps, B sequences in a batch, I inputs, H hidden units."""

    T: int
    B: int
    I: int
    H: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


def parse_size(text: str) -> Size:
    """Parse a size written as "T,B,I,H". For a wrong text, or a size whose arrays are larger than this machine's memory
    even in 16 bits, raise the class of errors whose text argparse prints."""
    try:
        size = Size(*map(int, text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"a size is four numbers T,B,I,H but got {text!r}") from None
    if min(size) < 1:
        raise argparse.ArgumentTypeError(f"the numbers of a size must be at least 1 but got {text!r}")
    if needed_bytes(size, "backward", "float16") > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise argparse.ArgumentTypeError(f"the arrays of a size must fit into this machine's memory but got {text!r}")
    return size


def needed_bytes(size: Size, which: str, dtype: str) -> int:
    """Return the smallest possible memory of a pass in bytes: that of x, the four gates, h and c, and in the pass
    "backward" also of dx, dWx, dWh, db."""
    T, B, I, H = size
    numbers = T * B * (I + 6 * H)
    if which == "backward":
        numbers += T * B * I + 4 * H * (I + H + 1)
    return numbers * (4 if dtype == "float32" else 2)


SIZES = (Size(64, 32, 128, 128), Size(128, 32, 256, 256), Size(100, 1, 512, 512), Size(64, 64, 512, 512))
MEMORY_SIZE = Size(1024, 32, 128, 128)  # the default of `bench --memory`


class Task(NamedTuple):
    """One measurement to make: a contender's name, its engine ("-" if it has none), the size, the pass, the dtype."""

    contender: str
    engine: Any  # one of `ENGINES`, or "-"
    size: Size
    which: str  # the pass, one of PASSES
    dtype: str = "float32"
    device: str = "cpu"  # device of the MLX contenders
    case: str = "lstm"  # one of cases.CASES
    # The option `checkpoint_every` of our layer: a number of steps, "auto", or None.
    every: int | str | None = None


class Work(NamedTuple):
    """A task that is ready to run in this process. run: runs it once and returns when every result is computed. build:
    the first part of `run`, which builds the graph that `mx.eval` then computes; None for a library without a graph.
    tensors: converts the results of `run` to float32 NumPy arrays with the names in the case's `passes`; in the case
    `lstm` these are h [T, B, H], dx [T, B, I], dWx [4H, I], dWh [4H, H], db [4H]. threads: the number that the
    framework reports. slept: returns the seconds that the latest run slept, which do not count as its time."""

    run: Callable[[], Any]
    tensors: Callable[[Any], Tensors]
    threads: int | None = None
    build: Callable[[], Any] | None = None
    slept: Callable[[], float] | None = None


class Contender(NamedTuple):
    """An implementation to measure. label: its printed name. needs: the module that must be installed. prepare: a
    function that takes the random inputs and a task, and returns the task ready to run."""

    label: str
    needs: str
    prepare: Callable[[Tensors, Task], Work]
