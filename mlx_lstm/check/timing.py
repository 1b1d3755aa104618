"""The times of an LSTM at the benchmark's sizes, ours and `mlx.nn.LSTM`'s, measured as `mlx_lstm.bench` does."""

from collections.abc import Iterable, Iterator

from ..bench.cases.lstm import draw
from ..bench.judge import appoint
from ..bench.rounds import Row, measure
from ..bench.tasks import PASSES, SIZES, Size, Task
from .grid import Problem

SECONDS, ROUNDS, QUIET = 1.0, 3, 2.0  # of each contender, its turns, how long a turn waits for others to pause


def default_sizes(device: str, full: bool) -> tuple[Size, ...]:
    """All of the benchmark's; on a CPU every other one, as `mlx.nn.LSTM` needs minutes there."""
    return SIZES if full or device == "gpu" else SIZES[::2]


def timed(engines: Iterable[str], sizes: Iterable[Size], device: str, metal: bool, full: bool) -> Iterator[list[Row]]:
    """The rows of each size and pass, results checked first: the backward one, `full` for the forward one, too."""
    for size in sizes:
        judge = appoint(draw(size, "float32"), "float32", backward=True)
        problem = Problem(str(size), "float32", {"sizes": (*size, size.H)})
        able = [engine for engine in engines if not problem.hindrance(engine, device, metal)]
        for which in PASSES if full else ("backward",):
            pairs = [("mlx", "-"), *(("ours", engine) for engine in able)]
            tasks = [Task(*pair, size, which, "float32", device) for pair in pairs]
            yield measure(tasks, judge, seconds=SECONDS, rounds=ROUNDS, patience=QUIET)
