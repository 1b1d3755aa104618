"""The report: the machine, tables, a plot, JSON."""

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import __version__
from ..machine import chip, installed_version, system
from .measure import SEQUENCES, Row
from .settle import Finding

WIDTH = 190  # of tables that do not go to a terminal


def machine_card() -> dict[str, str]:
    """What results depend on besides the code."""
    packages = ("mlx", "numpy", "torch", "pyobjc-core", "pyobjc-framework-MetalPerformanceShadersGraph")
    card = {"chip": chip(), "system": system(), "macOS build": macos_build(), "python": sys.version.split()[0]}
    card |= {"mlx-lstm": __version__} | {package: installed_version(package) for package in packages}
    return card | {"metal": "yes" if mx.metal.is_available() else "no"}


def macos_build() -> str:
    """Such as 25A354; "-" elsewhere."""
    if sys.platform != "darwin":
        return "-"
    return subprocess.run(["sw_vers", "-buildVersion"], capture_output=True, text=True).stdout.strip()


def console(json_file: str | None) -> Console:
    """Where the report for people goes: stdout, or stderr where stdout is for the JSON."""
    stderr = json_file == "-"
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, markup=False, highlight=False, width=None if terminal else WIDTH)


def progress(items: Sequence[Any], title: str) -> Iterable[Any]:
    """The items one by one, with a bar on stderr."""
    return track(items, title, transient=True, console=Console(stderr=True))


def card_table(card: dict[str, str], title: str = "machine") -> Table:
    """The card, a line an entry."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in card.items():
        table.add_row(name, value)
    return table


def summary_table(rows: Sequence[Row]) -> Table:
    """Of every tensor and pair the row closest to its bound, or furthest beyond."""
    worst: dict[tuple[str, str], Row] = {}
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        key = row.tensor, row.pair
        counts[key] = counts.get(key, 0) + 1
        if key not in worst or severity(row) > severity(worst[key]):
            worst[key] = row
    return rows_table([worst[key] for key in sorted(worst)], "worst case of each tensor", counts)


def failure_table(rows: Sequence[Row]) -> Table:
    """Everything that is wrong, and where it begins."""
    return rows_table([row for row in rows if row.failed], "what differs")


def severity(row: Row) -> tuple[bool, float]:
    """An order: what is wrong first, then by error over bound."""
    ratio = row.max_abs / row.bound if row.bound else 0.0
    return row.failed, math.inf if math.isnan(ratio) else ratio


def rows_table(rows: Iterable[Row], title: str, counts: dict[tuple[str, str], int] | None = None) -> Table:
    """Rows with every figure."""
    table = Table(title=title, title_justify="left")
    for name in ("tensor", "pair", *(["cases"] if counts else []), "case", "shape", "dtype"):
        table.add_column(name)
    for name in ("max abs", "max rel", "ULP", "error/bound"):
        table.add_column(name, justify="right")
    for name in ("verdict", "first at", "step", "note"):
        table.add_column(name)
    for row in rows:
        known = [str(counts[row.tensor, row.pair])] if counts else []
        figures = [
            figure(value) for value in (row.max_abs, row.max_rel, row.ulp, row.max_abs / (row.bound or math.nan))
        ]
        first = "" if row.first is None else str(list(row.first))
        place = [first, "" if row.step is None else str(row.step), row.note]
        style = "red" if row.failed else None
        cells = [row.tensor, row.pair, *known, row.case, str(list(row.shape)), row.dtype, *figures, row.verdict, *place]
        table.add_row(*cells, style=style)
    return table


def figure(value: float) -> str:
    """Two digits; "-" for what there is not."""
    return "-" if math.isnan(value) else f"{value:.2g}"


def settle_table(findings: Sequence[Finding]) -> Table:
    """The open points and what MPSGraph does."""
    table = Table(title="open points: error of each reading in parts of what rounding explains", title_justify="left")
    for name in ("E:", "question", "verdict", "ours", "readings"):
        table.add_column(name)
    for finding in findings:
        readings = "; ".join(f"{name}: {figure(value)}" for name, value in finding.distances.items())
        ours = "the same" if finding.confirmed else finding.default
        style = None if finding.confirmed else "red"
        table.add_row(finding.name, finding.question, finding.verdict, ours, readings, style=style)
    return table


def write_json(file: str, content: dict[str, Any]) -> None:
    """The report for machines; "-" is stdout. What is not finite becomes null."""
    text = json.dumps(finite(content), indent=1)
    if file == "-":
        print(text)
        return
    with open(file, "w") as out:
        out.write(text + "\n")


def finite(value: Any) -> Any:
    """The same with null for what JSON cannot say."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(file: str, rows: Sequence[Row], card: dict[str, str]) -> None:
    """The error of h, c, z_state and dsource over time, at the case with most steps, a line a pair."""
    from matplotlib.figure import Figure

    longest = max((len(row.by_time) for row in rows), default=0)
    shown = [row for row in rows if row.by_time and len(row.by_time) == longest]
    cases = list(dict.fromkeys(row.case for row in shown))
    drawing = Figure(figsize=(4 * len(SEQUENCES), 3 * max(len(cases), 1)), layout="constrained")
    axes = drawing.subplots(max(len(cases), 1), len(SEQUENCES), squeeze=False)
    for line, case in zip(axes, cases, strict=False):
        for axis, tensor in zip(line, SEQUENCES, strict=True):
            for row in (row for row in shown if (row.case, row.tensor) == (case, tensor)):
                axis.semilogy(np.maximum(row.by_time, 1e-12), label=row.pair)
            axis.set(title=f"{case}: {tensor}", xlabel="time step", ylabel="largest error")
            if axis.lines:
                axis.legend(fontsize=6)
            else:
                axis.set_visible(False)
    drawing.suptitle(", ".join(f"{name} {card[name]}" for name in ("chip", "system", "mlx")), fontsize=8)
    drawing.savefig(file)
