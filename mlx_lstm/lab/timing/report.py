"""Format the results of the benchmark as text, and write them to a CSV file and a plot."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from ..report import table
from .cases import CASES
from .rounds import Measurement, Ratio, label, name_of, peak_ratio, ratio

MIB = 2**20
IDLE_LIMIT = 0.05  # fraction of a core; a note reports a waiting process that uses more
THREADS_HINT = "OPENBLAS_NUM_THREADS=1 lets NumPy's BLAS use one thread, which disturbs less"
PAUSE_HINT = "--patience 60 waits longer until they pause"


def card_text(card: dict[str, str]) -> str:
    """Return the description of the machine as text, one line per entry."""
    return "\n".join(f"{name:12}{value}" for name, value in card.items())


def references(rows: Iterable[Measurement]) -> dict[str, Measurement]:
    """Return by name the measurements of the timed references, by whose times the times of all others are divided."""
    timed = {row.task.contender: row for row in rows if row.samples}
    names = dict.fromkeys(name for row in timed.values() for name in CASES[row.task.case].references)
    return {name: timed[name] for name in names if name in timed}


def group_text(rows: Sequence[Measurement]) -> str:
    """Return the table of all measurements of one size and pass, with a title above and notes below."""
    task, compared = rows[0].task, references(rows)
    times = any(row.samples for row in rows)
    header = ["contender", "engine"]
    if times:
        header += ["median ms", "min", "p20", "p80", "runs", "build ms", "eval ms"]
        header += [f"x {label(row.task)}" for row in compared.values()]
    header += ["peak MiB", "x needed", "mlx MiB", "error/bound", "threads"]
    lines = [header]
    for row in rows:
        cells = [label(row.task), row.task.engine]
        if times:
            cells += [*time_cells(row), *(ratio_cell(ratio(row, reference)) for reference in compared.values())]
        lines.append(cells + check_cells(row))
    title = f"{task.case}   T,B,I,H = {task.size}   {task.which}   {task.dtype}"
    return "\n".join([title, table(lines, left=2), *checkpoint_lines(rows), *notes(rows)])


def time_cells(row: Measurement) -> list[str]:
    """Return the cells of the printed table for the times of a measurement, in milliseconds: median, minimum, 20th and
    80th percentile, the number of runs, and the medians of the time to build a graph and of the time to evaluate it."""
    if not row.samples:
        return ["-"] * 5 + [""] * 2
    cells = [*(milliseconds(seconds) for seconds in spread(row).values()), str(len(row.samples))]
    return cells + [milliseconds(seconds) if seconds is not None else "" for seconds in build_and_evaluation(row)]


def build_and_evaluation(row: Measurement) -> tuple[float, float] | tuple[None, None]:
    """Return the median seconds of building a graph and of evaluating it, (None, None) without a graph."""
    if not row.builds:
        return None, None
    pairs = list(zip(row.samples, row.builds, strict=True))
    return median(row.builds), median(seconds - built for seconds, built in pairs)


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds with four digits, never in exponent notation."""
    return f"{1e3 * seconds:.4g}" if seconds < 10 else f"{1e3 * seconds:.0f}"


def spread(row: Measurement) -> dict[str, float]:
    """Return the median, minimum, 20th and 80th percentile of the seconds of all runs."""
    p20, median, p80 = np.percentile(row.samples, [20, 50, 80])
    return {"median": float(median), "min": min(row.samples), "p20": float(p20), "p80": float(p80)}


def ratio_cell(figures: Ratio | None) -> str:
    """Format a ratio of times and its range over the rounds: "1.23 (1.20-1.31)"."""
    return "-" if figures is None else f"{figures.value:.3g} ({figures.low:.3g}-{figures.high:.3g})"


def check_cells(row: Measurement) -> list[str]:
    """Return the texts for the last columns of a row of the table: the peak memory in MiB, this peak divided by the
    least possible memory, the peak that MLX reports, the largest ratio of an error to its bound, and the number of
    threads."""
    peak, over_needed, verdict = row.peak, peak_ratio(row), row.verdict
    return [
        "-" if peak is None else f"{peak / MIB:.4g}",
        "-" if over_needed is None else f"{over_needed:.2f}",
        f"{row.mlx_peak / MIB:.4g}" if row.mlx_peak else "-",
        "-" if verdict is None else f"{verdict.error / verdict.bound:.2g}",
        str(row.threads or "-"),
    ]


def checkpoint_lines(rows: Sequence[Measurement]) -> list[str]:
    """Return a line of text for each measurement with the option `checkpoint_every`: its memory and time, divided by
    those of the same engine without the option."""
    lines, by_task = [], {row.task: row for row in rows}
    for row in rows:
        whole = by_task.get(row.task._replace(every=None))
        if row.task.every is None or whole is None or not row.peak or not whole.peak:
            continue
        time = ratio(row, whole)
        figures = f"{row.peak / whole.peak:.3f} of the memory"
        figures += f" and {ratio_cell(time)} of the time" if time else ""
        lines.append(f"{label(row.task)} ({row.task.engine}): {figures} of saving every step")
    return lines


def notes(rows: Iterable[Measurement]) -> list[str]:
    """Return a line for each problem with the measurements, such as a disturbance by other processes."""
    lines = []
    for row in rows:
        name = f"{label(row.task)} ({row.task.engine})"
        if row.failed:
            lines.append(f"{name} not timed: {row.status}".replace("\n", "\n    "))
        if row.idle_cpu > IDLE_LIMIT:
            lines.append(f"{name} used {row.idle_cpu:.0%} of a core while others were timed: {THREADS_HINT}")
        if row.disturbed:
            rounds = f"{row.disturbed} of {len(row.rounds)} rounds"
            lines.append(f"{name} was disturbed by other processes in {rounds}: {PAUSE_HINT}")
    return lines


def write_csv(file: str, records: Sequence[Mapping[str, object]]) -> None:
    """Write a CSV file with one line per record, and the keys of the first record as the header."""
    with open(file, "w", newline="") as out:
        writer = csv.DictWriter(out, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def records(groups: Iterable[Sequence[Measurement]]) -> list[dict[str, Any]]:
    """Return the figures of all measurements, one dict per measurement. groups: those of each size and pass."""
    return [record(row, references(rows)) for rows in groups for row in rows]


def record(row: Measurement, compared: dict[str, Measurement]) -> dict[str, Any]:
    """Return the figures of a measurement as a dict {column of the CSV file: value}. compared: the measurements of the
    reference implementations at the same size and pass, by name."""
    task, verdict = row.task, row.verdict
    found: dict[str, Any] = {"case": task.case} | task.size._asdict() | {"dtype": task.dtype, "pass": task.which}
    found |= {"contender": label(task), "engine": task.engine, "status": row.status}
    seconds = spread(row) if row.samples else dict.fromkeys(("median", "min", "p20", "p80"))
    found |= {f"{name}_s": value for name, value in seconds.items()}
    found |= dict(zip(("build_s", "evaluation_s"), build_and_evaluation(row), strict=True))
    found |= {"runs": len(row.samples), "rounds": len(row.rounds)}
    for name in CASES[task.case].references:
        figures = ratio(row, compared[name]) if name in compared else None
        value, low, high = figures or (None,) * 3
        found |= {f"ratio_{name}": value, f"ratio_{name}_low": low, f"ratio_{name}_high": high}
    found |= {"peak_bytes": row.peak, "ratio_needed": peak_ratio(row), "mlx_peak_bytes": row.mlx_peak}
    found |= {"tensor": verdict and verdict.tensor, "error": verdict and verdict.error}
    found |= {"bound": verdict and verdict.bound, "worker_threads": row.threads}
    return found | {"idle_cpu": row.idle_cpu, "disturbed_rounds": row.disturbed}


def plot(file: str, groups: Sequence[Sequence[Measurement]], card: dict[str, str]) -> None:
    """Plot the time of each implementation divided by the time of the first reference, as bars on a logarithmic axis,
    with one panel per pass. groups: the measurements of each size and pass. card: the description of the machine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    passes = list(dict.fromkeys(rows[0].task.which for rows in groups))
    figure, axes = plt.subplots(1, len(passes), figsize=(6 * len(passes), 4.5), squeeze=False, sharey=True)
    for axis, which in zip(axes[0], passes, strict=True):
        drawn = [rows for rows in groups if rows[0].task.which == which and references(rows)]
        names = dict.fromkeys(name_of(row.task) for rows in drawn for row in rows)
        for n, name in enumerate(names):
            points = [
                (place + 0.8 * n / len(names), value)
                for place, rows in enumerate(drawn)
                for row in rows
                if name_of(row.task) == name and (value := ratio(row, next(iter(references(rows).values()))))
            ]
            errors = [[r.value - r.low for _, r in points], [r.high - r.value for _, r in points]]
            places, values = [p for p, _ in points], [r.value for _, r in points]
            bars = axis.bar(places, values, 0.8 / len(names), yerr=errors, label=name)
            axis.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8, padding=2)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=f"{which} pass", xlabel="T,B,I,H", yscale="log")
        axis.margins(y=0.15)
        axis.set_xticks([place + 0.3 for place in range(len(drawn))], [str(rows[0].task.size) for rows in drawn])
    compared = [next(iter(references(rows).values()), None) for rows in groups]
    labels = dict.fromkeys(label(row.task) for row in compared if row)
    axes[0][0].set_ylabel(f"time / time of {' or '.join(labels)}")
    axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{card['chip']}, {card['system']}, mlx {card['mlx']}, torch {card['torch']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(file)


LEGEND = """\
backward includes its forward pass. build: the time in which Python builds MLX's graph; eval: the time in which MLX
computes it. The engine numpy computes while the graph is built.
x NAME: the time of a row divided by the time of NAME, the median over the rounds (lowest round-highest round).
peak: the memory that the first run needed besides its inputs; mlx: the same as MLX counts it, with memory that is
allocated but not in use.
x needed: the memory of x and peak together, divided by that of the arrays that a pass has to hold: x, gates, h, c;
backward also dx, dWx, dWh, db.
every K: only the states of every K-th step are saved; the gradient computes the others again.
error/bound: the largest error, by float64, divided by the allowed error; up to 1 is right. For more than 128 steps the
allowed error is that of the first 128 steps, and for the gradients of weights (T / 128)^1.5 times that."""
