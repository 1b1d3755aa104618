"""Comparisons in a process of their own, where a crash or a kernel that hangs does no harm: the next one goes on."""

import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any

from ..machine import child_environment, module_command
from ..recurrence import unguarded
from .comparison import Finding, compare, prepare
from .grid import Problem, grid

Work = list[tuple[int, str]]
"""Numbers of problems in the grid, each with an engine."""

PATIENCE = (
    180.0  # seconds to wait for a comparison; Apple's compiler takes parts of one, the emulator of the tests some
)
LOSSES = 3  # processes that an engine may cost


def findings(work: Work, problems: list[Problem], full: bool, patience: float = PATIENCE) -> Iterator[Finding]:
    """What came of each comparison, in this order. An engine whose process ended too often is not run again."""
    left, lost = list(work), Counter[str]()
    while left:
        process = Process(left, full)
        while left:
            answer = process.answer(patience)
            n, engine = left[0]
            if answer is None:
                lost[engine] += 1
                yield Finding(problems[n].name, problems[n].dtype, engine, failure=process.end(patience), lost=True)
                left = left[1:]
                break
            yield Finding(**answer)
            left = left[1:]
        process.close()
        for n, engine in [pair for pair in left if lost[pair[1]] >= LOSSES]:
            why = f"not run, as {engine} ended {LOSSES} processes before"
            yield Finding(problems[n].name, problems[n].dtype, engine, failure=why, lost=True)
        left = [pair for pair in left if lost[pair[1]] < LOSSES]


class Process:
    """A process that compares one after the other."""

    def __init__(self, work: Work, full: bool):
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self.process: subprocess.Popen[str] = subprocess.Popen(
            module_command("mlx_lstm.check", "--worker", json.dumps([full, work])),
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.lines: Queue[str | None] = Queue()
        Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Hand on what it says, and that it ended."""
        for line in self.process.stdout or ():
            self.lines.put(line)
        self.lines.put(None)

    def answer(self, patience: float) -> dict[str, Any] | None:
        """The next finding; None if it ended or took too long."""
        try:
            line = self.lines.get(timeout=patience)
        except Empty:
            return None
        return None if line is None else json.loads(line)

    def end(self, patience: float) -> str:
        """How it ended, with its last words; what still runs is stopped."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return f"no answer after {patience:g} seconds"
        self.errors.seek(0)
        words = self.errors.read().decode(errors="replace").strip()
        return f"the process ended with exit code {code}: {words or 'it said nothing'}"

    def close(self) -> None:
        """Stop it, if it still runs."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def serve(text: str) -> None:
    """The process's side: a finding a line, as JSON. What libraries print goes to stderr."""
    full, work = json.loads(text)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    problems, number, prepared = grid(full), None, None
    with unguarded():
        for n, engine in work:
            if prepared is None or n != number:
                number, prepared = n, prepare(problems[n])
            print(json.dumps(compare(prepared, engine)._asdict()), file=out, flush=True)
