"""The report of the command `check`: printed lines about each engine and each failure, and a file with all findings."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...engines import tuning
from ...ground.files import write_whole
from ..report import json_text, machine_card, one_line, without_names
from ..timing.report import records
from ..timing.rounds import Measurement
from .comparison import Finding

SHOWN = 8  # the largest number of failures printed per engine; the file has all failures
EVERY = 2.0  # seconds between two writes of the file


class CannotWriteError(Exception):
    """The error if the file of the report cannot be written. Its text says why."""


class Report:
    """The report of the command `check`: it collects all findings and times, and `save` writes them to a file."""

    def __init__(self, file: Path, command: str, device: str):
        self.file = file
        # `tuning.machine` adds the GPU's architecture and a hash of the kernels.
        self.machine: dict[str, str] = machine_card(command, device) | tuning.machine()
        self.findings: list[Finding] = []
        self.times: list[list[Measurement]] = []  # for each size and pass the times of all implementations
        self.more: dict[str, Any] = {}  # the results of the other commands of --full, by name
        self.verdict: str = "unfinished"
        self.written: float = 0.0  # when `save` last wrote the file

    def add(self, finding: Finding) -> None:
        """Add a finding; write the file unless it was written a moment ago."""
        self.findings.append(finding)
        if time.monotonic() - self.written > EVERY:
            self.save()

    def save(self) -> None:
        """Write all findings to the file as JSON. If the write is interrupted, the file's old contents remain."""
        comparisons = [finding._asdict() for finding in self.findings]
        content = {"machine": self.machine, "verdict": self.verdict, "comparisons": comparisons}
        text = json_text(content | {"times": records(self.times)} | self.more) + "\n"
        try:
            write_whole(self.file, lambda partial: partial.write_text(text), force=True)
        except OSError as error:
            raise CannotWriteError(f"cannot write {self.file}: {error}; --file names another place") from None
        self.written = time.monotonic()

    def reasons(self) -> list[str]:
        """Return a list of what is wrong; it is empty if all results are right."""
        reasons = []
        if wrong := [finding for finding in self.findings if finding.failure]:
            engines = ", ".join(dict.fromkeys(finding.engine for finding in wrong))
            reasons.append(f"{len(wrong)} of {len(self.findings)} comparisons failed, of {engines}")
        # Only our engines count: the layer of mlx.nn, which is timed for comparison, may fail.
        ours = [row for rows in self.times for row in rows if row.failed and row.task.contender == "ours"]
        reasons += [f"{row.task.engine} failed at {row.task.size}" for row in ours]
        return [*dict.fromkeys(reasons + [f"{name} failed" for name, result in self.more.items() if result["failed"]])]


def engine_lines(engine: str, findings: Sequence[Finding]) -> list[str]:
    """Return a line that summarises the findings of an engine, and one line for each different failure."""
    wrong = [finding for finding in findings if finding.failure]
    right = [finding for finding in findings if not finding.failure]
    dtypes = ", ".join(dict.fromkeys(finding.dtype for finding in findings))
    line = f"{engine:11}{len(right)} of {len(findings)} problems right, in {dtypes}"
    if right:
        worst = max(right, key=lambda finding: finding.ratio)
        line += f"; largest error {worst.ratio:.2f} of its bound ({worst.tensor} of {worst.problem}, {worst.dtype})"
    if wrong:
        line += f"; {len(wrong)} FAILED:"
    failures = [f"  {text}" for text in failure_lines(wrong)]
    more = [f"  and {len(failures) - SHOWN} other failures: see the file"] if len(failures) > SHOWN else []
    return [line, *failures[:SHOWN], *more]


def failure_lines(wrong: Iterable[Finding]) -> list[str]:
    """Return the failures as lines of text. All findings with the same error share a line, and so do all wrong results
    of a kind of layer."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in wrong:
        # A finding that names a tensor is a wrong result; any other is an error. A problem's name, such as "lstm, 4
        # items", begins with the kind of layer.
        layer = finding.problem.partition(",")[0] if finding.tensor else ""
        groups.setdefault((layer, "" if layer else one_line(without_names(finding.failure))), []).append(finding)
    lines = []
    for same in groups.values():
        worst = max(same, key=lambda finding: finding.ratio)
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        lines.append(f"{worst.problem}, {worst.dtype}{more}: {one_line(worst.failure)}")
    return lines
