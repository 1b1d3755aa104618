"""What was found, for people: a line an engine, a line a size, a line or two a failure; and all of it as a file."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..bench.files import csv_record
from ..bench.report import machine_card, milliseconds, references, spread
from ..bench.rounds import Row, label, ratio
from ..engines import tuning
from .comparison import Finding

WIDTH = 160  # of the first line of an error
SHOWN = 8  # failures of an engine in print; all are in the file


def card(command: str, device: str) -> dict[str, str]:
    """What results depend on besides the code's version."""
    return machine_card(command, device) | tuning.machine()


def card_line(card: dict[str, str]) -> str:
    """The machine, in a line."""
    versions = f"MLX {card['mlx']}, Python {card['python']}, NumPy {card['numpy']}"
    return f"mlx_lstm {card['mlx_lstm']} on {card['chip']}, {card['system']}, {versions}, kernels {card['kernels']}"


def engine_lines(engine: str, found: Sequence[Finding]) -> list[str]:
    """What came of an engine, and below it each failure once."""
    wrong = [finding for finding in found if finding.failure]
    right = [finding for finding in found if not finding.failure]
    dtypes = ", ".join(dict.fromkeys(finding.dtype for finding in found))
    line = f"{engine:11}{len(right)} of {len(found)} problems right, in {dtypes}"
    if right:
        worst = max(right, key=lambda finding: finding.ratio)
        line += f"; largest error {worst.ratio:.2f} of its bound ({worst.tensor} of {worst.problem}, {worst.dtype})"
    if wrong:
        line += f"; {len(wrong)} FAILED:"
    failures = [f"  {text}" for text in failure_lines(wrong)]
    more = [f"  and {len(failures) - SHOWN} other failures: see the file"] if len(failures) > SHOWN else []
    return [line, *failures[:SHOWN], *more]


def failure_lines(wrong: Iterable[Finding]) -> list[str]:
    """Findings with the same text in one line, those that are wrong numbers as one a layer."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in wrong:
        layer = finding.problem.partition(",")[0] if finding.tensor else ""
        groups.setdefault((layer, "" if layer else first_line(finding.failure)), []).append(finding)
    lines = []
    for same in groups.values():
        worst = max(same, key=lambda finding: finding.ratio)
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        lines.append(f"{worst.problem}, {worst.dtype}{more}: {first_line(worst.failure)}")
    return lines


def first_line(text: str) -> str:
    """The line that says most: a compiler's first error, else the first one, with the next if that announces it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    found = next((line for line in lines if "error:" in line), first)
    return found if len(found) <= WIDTH else f"{found[:WIDTH]}..."


def time_line(rows: Sequence[Row]) -> str:
    """The milliseconds of a size and pass."""
    task, compared = rows[0].task, references(rows)
    cells = []
    for row in rows:
        name = label(row.task) if row.task.engine == "-" else row.task.engine
        if not row.samples:
            cells.append(f"{name} not timed: {first_line(row.status)}")
            continue
        found = ratio(row, compared["mlx"]) if "mlx" in compared and row.task.contender != "mlx" else None
        times = f", {text_of(found.value)} that" if found else ""
        cells.append(f"{name} {milliseconds(spread(row)['median'])} ms{times}")
    disturbed = " (disturbed by other processes)" if any(row.disturbed for row in rows) else ""
    return f"{task.size!s:15} {task.which}: {'; '.join(cells)}{disturbed}"


def text_of(ratio: float) -> str:
    """A ratio to be read as a part or a multiple."""
    return f"1/{1 / ratio:.3g} of" if ratio < 1 else f"{ratio:.3g} times"


def write(
    file: Path,
    card: dict[str, str],
    findings: Sequence[Finding],
    times: Sequence[Sequence[Row]],
    more: dict[str, Any],
) -> None:
    """Everything as JSON. OSError if the file cannot be written."""
    rows = [csv_record(row, references(group)) for group in times for row in group]
    content = {"machine": card, "comparisons": [finding._asdict() for finding in findings], "times": rows} | more
    file.write_text(json.dumps(finite(content), indent=1) + "\n")


def finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
