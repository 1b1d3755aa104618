"""Write the figures of the benchmark to a CSV file and a plot. Both also describe the machine."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .cases import CASES
from .report import build_and_evaluation, references, spread
from .rounds import Measurement, label, name_of, peak_ratio, ratio


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
