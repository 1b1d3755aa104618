"""The machine and the figures, as text. No figure goes without its machine."""

import os
import platform
from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from .. import __version__
from ..machine import chip, installed_version, system
from .cases import CASES
from .rounds import Ratio, Row, label, peak_ratio, ratio

MIB = 2**20
THREAD_SETTINGS = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "LD_PRELOAD",
)
IDLE_LIMIT = 0.05  # part of a core that a waiting process may use before the report says so


def machine_card(command: str, device: str) -> dict[str, str]:
    """What a figure depends on besides the code: chip, cores, system, versions, threads, load, command."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    set_here = [f"{name}={os.environ[name]}" for name in THREAD_SETTINGS if name in os.environ]
    return {
        "chip": chip(),
        "cores": str(os.cpu_count()),
        "system": system(),
        "python": platform.python_version(),
        "mlx_lstm": __version__,
        "mlx": installed_version("mlx"),
        "device": device,
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}{blas_kernel()}",
        "torch": installed_version("torch"),
        "tensorflow": installed_version("tensorflow", "tensorflow-cpu"),
        "threads": ", ".join(set_here) or "defaults",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "command": command,
    }


def blas_kernel() -> str:
    """The kernel that NumPy's BLAS has chosen for this machine, as `threadpoolctl` finds it, if that is installed."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return ", kernel unknown without threadpoolctl"
    kernels = {f", kernel {found['architecture']}" for found in threadpool_info() if "architecture" in found}
    return "".join(sorted(kernels))


def default_device() -> str:
    """The word for the device MLX uses unless told otherwise."""
    return "cpu" if mx.default_device() == mx.cpu else "gpu"


def card_text(card: dict[str, str]) -> str:
    """The card, a line an entry."""
    return "\n".join(f"{name:12}{value}" for name, value in card.items())


def references(rows: Iterable[Row]) -> dict[str, Row]:
    """The timed rows that others are compared with, by contender."""
    timed = {row.task.contender: row for row in rows if row.samples}
    names = dict.fromkeys(name for row in timed.values() for name in CASES[row.task.case].references)
    return {name: timed[name] for name in names if name in timed}


def group_text(rows: Sequence[Row]) -> str:
    """The table of one size and pass, with a line above it and notes below."""
    task, compared = rows[0].task, references(rows)
    times = any(row.samples for row in rows)
    header = ["contender", "engine"]
    if times:
        header += ["median ms", "min", "p20", "p80", "runs"] + [f"x {label(row.task)}" for row in compared.values()]
    header += ["peak MiB", "x kept", "mlx MiB", "error/bound", "threads"]
    lines = [header]
    for row in rows:
        cells = [label(row.task), row.task.engine]
        if times:
            cells += [*time_cells(row), *(ratio_cell(ratio(row, reference)) for reference in compared.values())]
        lines.append(cells + check_cells(row))
    title = f"{task.case}   T,B,I,H = {task.size}   {task.which}   {task.dtype}"
    return "\n".join([title, table(lines), *against_keeping_all(rows), *notes(rows)])


def time_cells(row: Row) -> list[str]:
    """Milliseconds: median, least, 20th and 80th percentile; how many runs."""
    if not row.samples:
        return ["-"] * 5
    return [*(milliseconds(seconds) for seconds in spread(row).values()), str(len(row.samples))]


def milliseconds(seconds: float) -> str:
    """Four digits, never as a power of ten."""
    return f"{1e3 * seconds:.4g}" if seconds < 10 else f"{1e3 * seconds:.0f}"


def spread(row: Row) -> dict[str, float]:
    """Of the seconds of all runs: median, min, p20, p80."""
    p20, median, p80 = np.percentile(row.samples, [20, 50, 80])
    return {"median": float(median), "min": min(row.samples), "p20": float(p20), "p80": float(p80)}


def ratio_cell(found: Ratio | None) -> str:
    """ "1.23 (1.20-1.31)": the ratio and its range over the rounds."""
    return "-" if found is None else f"{found.value:.3g} ({found.low:.3g}-{found.high:.3g})"


def check_cells(row: Row) -> list[str]:
    """Memory, the largest error in parts of its bound, threads."""
    peak, kept, verdict = row.peak, peak_ratio(row), row.verdict
    return [
        "-" if peak is None else f"{peak / MIB:.4g}",
        "-" if kept is None else f"{kept:.2f}",
        f"{row.mlx_peak / MIB:.4g}" if row.mlx_peak else "-",
        "-" if verdict is None else f"{verdict.error / verdict.bound:.2g}",
        str(row.threads or "-"),
    ]


def against_keeping_all(rows: Sequence[Row]) -> list[str]:
    """A line for every row whose gradient computes steps again: its memory and its time in parts of those of the same
    engine without."""
    lines, by_task = [], {row.task: row for row in rows}
    for row in rows:
        whole = by_task.get(row.task._replace(every=None))
        if row.task.every is None or whole is None or not row.peak or not whole.peak:
            continue
        time = ratio(row, whole)
        said = f"{row.peak / whole.peak:.3f} of the memory" + (f" and {ratio_cell(time)} of the time" if time else "")
        lines.append(f"{label(row.task)} ({row.task.engine}): {said} of keeping all")
    return lines


def notes(rows: Iterable[Row]) -> list[str]:
    """A line for everything that is not as it should be."""
    lines = []
    for row in rows:
        name = f"{label(row.task)} ({row.task.engine})"
        if row.failed:
            lines.append(f"{name} not timed: {row.status}".replace("\n", "\n    "))
        if row.idle_cpu > IDLE_LIMIT:
            lines.append(f"{name} used {row.idle_cpu:.0%} of a core while others were timed")
        if row.disturbed:
            lines.append(f"{name} was disturbed by other processes in {row.disturbed} of {len(row.rounds)} rounds")
    return lines


def table(lines: list[list[str]]) -> str:
    """Cells as aligned columns: the first two to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if n < 2 else c.rjust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True)))
        for cells in lines
    )


LEGEND = """\
backward includes its forward pass. x NAME: times NAME's time, the median over rounds (lowest-highest round).
peak: memory of the first run above its inputs; mlx: MLX's own count of it, with what is allocated and not yet used.
x kept: peak and x, over x, gates, h, c and, backward, dx, dWx, dWh, db.
every K: of the states every K-th step is kept for the gradient, which computes the others again.
error/bound: the largest error of all results against float64, in parts of what rounding explains. Above 128 steps that
follows from the first 128: for h and dx as much, for the gradients of weights (T / 128)^1.5 times as much."""
