"""Format the report of the command `compare`: the machine, which implementations agree, which results differ and where.
Also write the plot and the JSON file."""

import math
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import __version__
from ...engines.choice import has_metal
from ...ground.machine import chip, installed_version, system
from ..report import json_text, table
from .measure import SEQUENCES, ComparisonRow

LEGEND = """\
error/bound: the largest error of an element divided by its allowed error; up to 1 is right.
oracle: float64."""
LEGEND_OF_TWO = "The bound between two contenders is twice that against the oracle, as the errors of both count."


def machine_card() -> dict[str, str]:
    """Return a dict of the facts about this machine that results depend on: chip, system and versions, by name."""
    packages = ("mlx", "numpy", "torch", "pyobjc-core", "pyobjc-framework-MetalPerformanceShadersGraph")
    card = {"chip": chip(), "system": system(), "macOS build": macos_build(), "python": platform.python_version()}
    card |= {"mlx_lstm": __version__} | {package: installed_version(package) for package in packages}
    return card | {"metal": "yes" if has_metal() else "no"}


def macos_build() -> str:
    """Return the build number of macOS, such as 25A354; "-" on another system."""
    if sys.platform != "darwin":
        return "-"
    return subprocess.run(["/usr/bin/sw_vers", "-buildVersion"], capture_output=True, text=True).stdout.strip()


def card_text(card: dict[str, str]) -> str:
    """Return the description of the machine as one line of text, without packages that are not installed."""
    named = [f"{name} {value}" for name, value in card.items() if value not in ("-", "not installed")]
    return ", ".join(named).removeprefix("chip ").replace(", system ", ", ")


def summary_text(rows: Sequence[ComparisonRow], cases: int) -> str:
    """Return the verdict of all comparisons as one line of text."""
    differ = sum(row.failed and not row.is_failed_call for row in rows)
    failed = sum(row.is_failed_call for row in rows)
    words = [f"{differ} differ{'s' if differ == 1 else ''}" if differ else ""]
    words += [f"{failed} call{'s' if failed > 1 else ''} failed" if failed else ""]
    verdict = ", ".join(word for word in words if word) or "all agree"
    return f"{cases} case{'s' if cases > 1 else ''}, {len(rows) - failed} comparisons: {verdict}"


def pairs_text(rows: Sequence[ComparisonRow]) -> str:
    """Return a line for each pair of implementations: the number of comparisons, how many differ, and the worst one."""
    lines = [["pair", "comparisons", "differ", "error/bound", "worst"]]
    for pair in dict.fromkeys(row.pair for row in rows if not row.is_failed_call):
        mine = [row for row in rows if row.pair == pair and not row.is_failed_call]
        worst = max(mine, key=severity)  # a wrong result if there is one, else the largest ratio
        differ = str(sum(row.failed for row in mine))
        lines.append([pair, str(len(mine)), differ, figure(worst.over_bound), f"{worst.tensor} of {worst.case}"])
    return table(lines)


def failures_text(rows: Sequence[ComparisonRow]) -> str:
    """Return the failures as text. First come the calls that failed, in one entry per pair of implementations. Then
    comes a table of the results that differ, with a row for each tensor and pair of implementations: the number of
    cases, the worst case with its error, and the place of its first wrong value."""
    lines = []
    for pair in dict.fromkeys(row.pair for row in rows if row.is_failed_call):
        failed = [row for row in rows if row.pair == pair and row.is_failed_call]
        texts = {brief(row.verdict) for row in failed}
        others = f", {len(texts) - 1} other messages" if len(texts) > 1 else ""
        cases = f"{len(failed)} case{'s' if len(failed) > 1 else ''}"
        lines.append(f"{pair} failed in {cases}{others}; first in {failed[0].case}:")
        lines.append(brief(failed[0].verdict))
    found: dict[tuple[str, str], list[ComparisonRow]] = {}
    # An implementation that differs from the oracle also differs from the other implementations. So `told` leaves out
    # its differences from them. row.pair: "implementation - oracle" or "implementation - other implementation".
    wrong = {(row.case, row.tensor, row.pair.split(" - ")[0]) for row in rows if row.failed and "oracle" in row.pair}
    for row in rows:
        told = "oracle" not in row.pair and any((row.case, row.tensor, one) in wrong for one in row.pair.split(" - "))
        if row.failed and not row.is_failed_call and not told:
            found.setdefault((row.pair, row.tensor), []).append(row)
    differing = [["tensor", "pair", "cases", "worst", "error/bound", "max abs", "verdict", "first at", "step"]]
    for (pair, tensor), group in found.items():
        worst = max(group, key=severity)
        figures = [figure(worst.over_bound), figure(worst.max_abs)]
        differing.append([tensor, pair, str(len(group)), worst.case, *figures, worst.verdict, *beginning(worst)])
    return "\n".join([*lines, *([table(differing)] if found else [])])


def beginning(row: ComparisonRow) -> list[str]:
    """Return the index and the time step, as texts, of the first element whose error exceeds its bound. If there is no
    such element, return two empty texts."""
    return ["" if row.first is None else str(list(row.first)), "" if row.step is None else str(row.step)]


def brief(text: str) -> str:
    """Return two lines of an error text, indented and cut after 160 characters: its first line, and its first line with
    a compiler's error. If the first line ends with a colon, the next line is joined to it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [text]
    compilers = [line for line in lines[1:] if "error:" in line][:1]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return "\n".join(f"  {line[:160]}" for line in [first, *compilers])


def severity(row: ComparisonRow) -> tuple[bool, float]:
    """Return a sort key: right results before wrong ones, then by the ratio of error to bound."""
    return row.failed, math.inf if math.isnan(row.over_bound) else row.over_bound


def rows_text(rows: Sequence[ComparisonRow]) -> str:
    """Return a table of all comparisons with all figures."""
    names = ["tensor", "pair", "case", "shape", "dtype", "max abs", "max rel", "ULP", "error/bound"]
    lines = [[*names, "verdict", "first at", "step", "note"]]
    for row in rows:
        figures = [figure(value) for value in (row.max_abs, row.max_rel, row.ulp, row.over_bound)]
        place = [brief(row.verdict).splitlines()[0].strip(), *beginning(row), row.note]
        lines.append([row.tensor, row.pair, row.case, str(list(row.shape)), row.dtype, *figures, *place])
    return table(lines)


def figure(value: float) -> str:
    """Format a number with two digits; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.2g}"


def write_json(file: str, content: dict[str, Any]) -> None:
    """Write the report as JSON to a file; "-" is stdout."""
    if file == "-":
        print(json_text(content))
        return
    with open(file, "w") as out:
        out.write(json_text(content) + "\n")


def plot(file: str, rows: Sequence[ComparisonRow], card: dict[str, str]) -> None:
    """Draw the ratios of error to bound, with a line at 1, into a picture file. Bars show the worst ratio of each
    result and pair of implementations. Below them, curves show the ratio at each time step in the longest cases."""
    from matplotlib.figure import Figure

    longest = max((len(row.by_time) for row in rows), default=0)
    shown = [row for row in rows if row.by_time and len(row.by_time) == longest]
    cases = list(dict.fromkeys(row.case for row in shown))[:4]  # at most four, for the size of the picture
    pairs = list(dict.fromkeys(row.pair for row in rows if not row.is_failed_call))
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
                values = np.maximum(row.by_time, 1e-4)  # a logarithmic axis has no 0; NaN leaves a gap
                axis.semilogy(values, label=row.pair, color=colors[row.pair], linewidth=1, marker=".")
            axis.axhline(1, color="black", linewidth=1)
            axis.set(title=tensor, xlabel="time step")
            axis.xaxis.get_major_locator().set_params(integer=True)
    drawing.suptitle(card_text(card), fontsize=8)
    drawing.savefig(file, dpi=100)


def bars(axis: Any, rows: Sequence[ComparisonRow], colors: dict[str, str]) -> None:
    """Draw the worst ratio of error to bound of each result, one bar per pair of implementations."""
    tensors = list(dict.fromkeys(row.tensor for row in rows if not row.is_failed_call))
    for n, (pair, color) in enumerate(colors.items()):
        worst = {}
        for row in (row for row in rows if row.pair == pair and not math.isnan(row.over_bound)):
            worst[row.tensor] = max(worst.get(row.tensor, 0.0), row.over_bound)
        places = [tensors.index(tensor) + 0.8 * (n + 0.5) / len(colors) - 0.4 for tensor in worst]
        drawn = axis.bar(places, np.maximum(list(worst.values()), 1e-3), 0.8 / len(colors), label=pair, color=color)
        axis.bar_label(drawn, [figure(value) for value in worst.values()], fontsize=7, rotation=90, padding=2)
    axis.axhline(1, color="black", linewidth=1)
    axis.set(yscale="log", ylabel="error / bound", title="Worst error over bound of each tensor: right up to 1")
    axis.margins(y=0.25)
    axis.set_xlim(-0.5, len(tensors) - 0.5)
    axis.set_xticks(range(len(tensors)), tensors, rotation=20)
    axis.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
