"""The report: the machine, what agrees, what differs, a plot, JSON."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from .. import __version__
from ..machine import chip, installed_version, system
from .measure import SEQUENCES, Row
from .settle import Finding

LEGEND = """\
error/bound: the largest error in parts of what rounding explains in this dtype; up to 1 is right. oracle: float64."""
LEGEND_OF_TWO = "The bound between two contenders is twice that against the oracle, as the errors of both count."
T = TypeVar("T")


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
    return subprocess.run(["/usr/bin/sw_vers", "-buildVersion"], capture_output=True, text=True).stdout.strip()


def card_text(card: dict[str, str]) -> str:
    """The card in a line, without what is not there."""
    named = [f"{name} {value}" for name, value in card.items() if value not in ("-", "not installed")]
    return ", ".join(named).removeprefix("chip ").replace(", system ", ", ")


def progress(items: Sequence[T], title: str, stream: Any = None) -> Iterator[T]:
    """The items one by one, counted on stderr if that is a terminal."""
    stream = stream or sys.stderr
    shown = stream.isatty()
    for n, item in enumerate(items):
        if shown:
            print(f"\r{n} of {len(items)} {title}", end="", file=stream, flush=True)
        yield item
    if shown:
        print("\r" + " " * 40, end="\r", file=stream, flush=True)


def summary_text(rows: Sequence[Row], cases: int) -> str:
    """The verdict in a line."""
    differ = sum(row.failed and row.tensor != "-" for row in rows)
    failed = sum(row.tensor == "-" for row in rows)
    words = [f"{differ} differ{'s' if differ == 1 else ''}" if differ else ""]
    words += [f"{failed} call{'s' if failed > 1 else ''} failed" if failed else ""]
    verdict = ", ".join(word for word in words if word) or "all agree"
    return f"{cases} case{'s' if cases > 1 else ''}, {len(rows) - failed} comparisons: {verdict}"


def pairs_text(rows: Sequence[Row]) -> str:
    """A line a pair: how many comparisons, how many differ, and the one closest to its bound, or furthest beyond."""
    lines = [["pair", "comparisons", "differ", "error/bound", "worst"]]
    for pair in dict.fromkeys(row.pair for row in rows if row.tensor != "-"):
        mine = [row for row in rows if row.pair == pair and row.tensor != "-"]
        worst = max(mine, key=severity)
        differ = str(sum(row.failed for row in mine))
        lines.append([pair, str(len(mine)), differ, figure(ratio(worst)), f"{worst.tensor} of {worst.case}"])
    return table(lines)


def failures_text(rows: Sequence[Row]) -> str:
    """Everything that is wrong: by pair what failed, once, and by tensor what differs, and where it begins."""
    lines = []
    for pair in dict.fromkeys(row.pair for row in rows if row.tensor == "-"):
        failed = [row for row in rows if row.pair == pair and row.tensor == "-"]
        texts = {brief(row.verdict) for row in failed}
        others = f", {len(texts) - 1} other messages" if len(texts) > 1 else ""
        lines.append(f"{pair} failed in {len(failed)} cases{others}; first in {failed[0].case}:")
        lines.append(brief(failed[0].verdict))
    found: dict[tuple[str, str], list[Row]] = {}
    # Who differs from the oracle differs from everybody; that is said once.
    wrong = {(row.case, row.tensor, row.pair.split(" - ")[0]) for row in rows if row.failed and "oracle" in row.pair}
    for row in rows:
        told = "oracle" not in row.pair and any((row.case, row.tensor, one) in wrong for one in row.pair.split(" - "))
        if row.failed and row.tensor != "-" and not told:
            found.setdefault((row.pair, row.tensor), []).append(row)
    differing = [["tensor", "pair", "cases", "worst", "error/bound", "max abs", "verdict", "first at", "step"]]
    for (pair, tensor), group in found.items():
        worst = max(group, key=severity)
        figures = [figure(ratio(worst)), figure(worst.max_abs)]
        differing.append([tensor, pair, str(len(group)), worst.case, *figures, worst.verdict, *beginning(worst)])
    return "\n".join([*lines, *([table(differing)] if found else [])])


def beginning(row: Row) -> list[str]:
    """The index and the time step of the first value beyond the bound."""
    return ["" if row.first is None else str(list(row.first)), "" if row.step is None else str(row.step)]


def brief(text: str) -> str:
    """Of an error its first line and, where a compiler speaks, the first line with its "error:"; indented."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [text]
    spoken = [line for line in lines[1:] if "error:" in line][:1]
    return "\n".join(f"  {line[:160]}" for line in [lines[0], *spoken])


def ratio(row: Row) -> float:
    """The error over its bound; NaN where nothing was compared."""
    return row.max_abs / row.bound if row.bound else math.nan if row.max_abs else 0.0


def severity(row: Row) -> tuple[bool, float]:
    """An order: what is wrong first, then by error over bound."""
    found = ratio(row)
    return row.failed, math.inf if math.isnan(found) else found


def rows_text(rows: Sequence[Row]) -> str:
    """Every row with every figure."""
    names = ["tensor", "pair", "case", "shape", "dtype", "max abs", "max rel", "ULP", "error/bound"]
    lines = [[*names, "verdict", "first at", "step", "note"]]
    for row in rows:
        figures = [figure(value) for value in (row.max_abs, row.max_rel, row.ulp, ratio(row))]
        place = [brief(row.verdict).splitlines()[0].strip(), *beginning(row), row.note]
        lines.append([row.tensor, row.pair, row.case, str(list(row.shape)), row.dtype, *figures, *place])
    return table(lines)


def figure(value: float) -> str:
    """Two digits; "-" for what there is not."""
    return "-" if math.isnan(value) else f"{value:.2g}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Cells as aligned columns; empty ones are left out."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    cells = zip(*columns, strict=True)
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def settle_text(findings: Sequence[Finding], measured: bool) -> str:
    """The open points and what MPSGraph does; unmeasured, what is asked."""
    if not measured:
        return table([["E:", "question", "ours"], *([one.name, one.question, one.default] for one in findings)])
    confirmed = sum(one.confirmed for one in findings)
    lines = [["E:", "question", "verdict", "ours", "error/bound of each reading"]]
    for one in findings:
        readings = "; ".join(f"{name}: {figure(value)}" for name, value in one.distances.items())
        verdict = brief(one.verdict).splitlines()[0].strip()
        lines.append([one.name, one.question, verdict, "the same" if one.confirmed else one.default, readings])
    return f"{len(findings)} open points, {confirmed} as ours reads them\n{table(lines)}"


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
    """Error over bound, with a line at 1: bars of the worst of each tensor and pair; below, over time, the cases with
    most steps."""
    from matplotlib.figure import Figure

    longest = max((len(row.by_time) for row in rows), default=0)
    shown = [row for row in rows if row.by_time and len(row.by_time) == longest]
    cases = list(dict.fromkeys(row.case for row in shown))[:4]
    pairs = list(dict.fromkeys(row.pair for row in rows if row.tensor != "-"))
    colors = {pair: f"C{n}" for n, pair in enumerate(pairs)}
    drawing = Figure(figsize=(16, 4.5 + 3.2 * len(cases)), layout="constrained")
    parts = drawing.subfigures(1 + len(cases), 1, squeeze=False, height_ratios=[4.5, *[3.2] * len(cases)])[:, 0]
    bars(parts[0].subplots(), rows, colors)
    for part, case in zip(parts[1:], cases, strict=True):
        mine = [row for row in shown if row.case == case]
        tensors = [tensor for tensor in SEQUENCES if any(row.tensor == tensor for row in mine)]
        part.suptitle(f"{case}: error over bound at each time step", fontsize=12)
        for axis, tensor in zip(part.subplots(1, len(tensors), squeeze=False, sharey=True)[0], tensors, strict=True):
            for row in (row for row in mine if row.tensor == tensor):
                values = np.maximum(np.array(row.by_time) / (row.bound or math.nan), 1e-4)
                axis.semilogy(values, label=row.pair, color=colors[row.pair], linewidth=1, marker=".")
            axis.axhline(1, color="black", linewidth=1)
            axis.set(title=tensor, xlabel="time step")
            axis.xaxis.get_major_locator().set_params(integer=True)
    drawing.suptitle(card_text(card), fontsize=8)
    drawing.savefig(file, dpi=100)


def bars(axis: Any, rows: Sequence[Row], colors: dict[str, str]) -> None:
    """The worst error over bound of each tensor, a bar a pair, its value above it."""
    tensors = list(dict.fromkeys(row.tensor for row in rows if row.tensor != "-"))
    for n, (pair, color) in enumerate(colors.items()):
        worst = {}
        for row in (row for row in rows if row.pair == pair and not math.isnan(ratio(row))):
            worst[row.tensor] = max(worst.get(row.tensor, 0.0), ratio(row))
        places = [tensors.index(tensor) + 0.8 * (n + 0.5) / len(colors) - 0.4 for tensor in worst]
        drawn = axis.bar(places, np.maximum(list(worst.values()), 1e-3), 0.8 / len(colors), label=pair, color=color)
        axis.bar_label(drawn, [figure(value) for value in worst.values()], fontsize=7, rotation=90, padding=2)
    axis.axhline(1, color="black", linewidth=1)
    axis.set(yscale="log", ylabel="error / bound", title="Worst error over bound of each tensor: right up to 1")
    axis.margins(y=0.25)
    axis.set_xlim(-0.5, len(tensors) - 0.5)
    axis.set_xticks(range(len(tensors)), tensors, rotation=20)
    axis.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
