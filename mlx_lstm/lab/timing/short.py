"""The short benchmark of the command `check`: it measures the time of a training step of our layer and of `mlx.nn.LSTM`
at a few sizes."""

from collections.abc import Iterator, Sequence

from ...engines.cells import LSTMCell
from ..cases import DTYPES, hindrance
from ..progress import Progress
from ..report import one_line
from .cases.lstm import draw
from .judge import judge_layer
from .report import milliseconds, references, spread
from .rounds import Measurement, label, measure, ratio
from .tasks import PASSES, Size, Task

SETTLING = (
    # Each entry checks one assumption of the model that predicts times. The first assumption: the GPU waits while the
    # host builds the graph. So the time to build the graph and the time to evaluate it are measured separately.
    (Size(64, 32, 64, 64), "fused", ("backward",), ("float32",)),
    # The model assumes that a step of `stepwise` waits for the weights of its matrix product. To check this, compare
    # the measured time of a step at this size with the predicted one.
    (Size(256, 32, 256, 256), "stepwise", ("backward",), ("float32",)),
    # The model assumes that a backward step of `fused` waits for the arrays that it reads. To check this, divide the
    # time of the backward pass by the time of the forward pass, and compare with the predicted ratio.
    (Size(1024, 1, 64, 64), "fused", ("forward", "backward"), ("float32",)),
    # The model assumes that weights of 16 bits leave room for more weights in registers. To check this, divide the time
    # in float16 by the time in float32, and compare with the predicted ratio.
    (Size(64, 32, 128, 128), "fused", ("backward",), ("float32", "float16")),
)
"""The measurements that check the model in tests/machine_code, which predicts times on a Mac's GPU: (size, engine,
passes, dtypes). The option `--full` makes them."""


SECONDS, ROUNDS, QUIET = 1.0, 3, 2.0
"""SECONDS: how long each implementation is timed. ROUNDS: its number of turns. QUIET: the seconds that a turn waits
until other processes pause."""


def measure_sizes(
    engines: Sequence[str], sizes: Sequence[Size], device: str, progress: Progress
) -> Iterator[list[Measurement]]:
    """Check the results and measure the times of `engines` and of `mlx.nn.LSTM`. Yield the measurements of each size
    and pass. An engine that hung at one size is left out at the next, because each wait takes minutes."""
    hung: set[str] = set()
    for n, size in enumerate(sizes):
        progress.count(n, len(sizes))
        progress.title = f"timing, size {n + 1} of {len(sizes)}: {size}"
        progress.say("computing the float64 reference")
        judge = judge_layer(draw(size, "float32"), "float32", backward=True)
        able = [word for word in engines if not hindrance(word, size, DTYPES["float32"], LSTMCell(), device=device)]
        for which in PASSES:
            pairs = [("mlx", "-"), *(("ours", engine) for engine in able)]  # "-": mlx.nn.LSTM has no engines
            tasks = [Task(*pair, size, which, "float32", device) for pair in pairs if pair[1] not in hung]
            rows = measure(tasks, judge, seconds=SECONDS, rounds=ROUNDS, patience=QUIET, progress=progress)
            hung |= {row.task.engine for row in rows if row.hung}
            if rows:
                yield rows
    progress.title = ""


def settle(engines: Sequence[str], progress: Progress) -> Iterator[list[Measurement]]:
    """Yield the measurements in `SETTLING`, each of which checks an assumption of the model in tests/machine_code."""
    for size, engine, passes, dtypes in SETTLING:
        for dtype in dtypes if engine in engines else ():
            progress.title = f"timing, for the model: {size}"
            judge = judge_layer(draw(size, dtype), dtype, backward="backward" in passes)
            for which in passes:
                task = Task("ours", engine, size, which, dtype, "gpu")
                yield measure([task], judge, seconds=SECONDS, rounds=ROUNDS, patience=QUIET, progress=progress)
    progress.title = ""


def time_line(rows: Sequence[Measurement]) -> str:
    """Return one line of text with the times of one size and pass in milliseconds."""
    task, compared = rows[0].task, references(rows)
    cells = []
    for row in rows:
        name = label(row.task) if row.task.engine == "-" else row.task.engine
        if not row.samples:
            cells.append(f"{name} not timed: {one_line(row.status)}")
            continue
        times = ""
        if "mlx" in compared and row.task.contender != "mlx" and (figures := ratio(row, compared["mlx"])):
            part = f"1/{1 / figures.value:.3g} of" if figures.value < 1 else f"{figures.value:.3g} times"
            times = f", {part} that"
        cells.append(f"{name} {milliseconds(spread(row)['median'])} ms{times}")
    disturbed = " (other processes ran at the same time)" if any(row.disturbed for row in rows) else ""
    dtype = "" if task.dtype == "float32" else f" {task.dtype}"
    which = "forward and gradient" if task.which == "backward" else task.which
    return f"{task.size!s:15} {which}{dtype}: {'; '.join(cells)}{disturbed}"
