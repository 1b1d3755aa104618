"""Start a child process of this package and send it requests. If code crashes or a kernel hangs, only the child is
lost.

Requests and answers are JSON objects, one per line, on the child's standard input and output.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any

from ..machine import child_environment, module_command

LINES = 6
"""The largest number of lines quoted from what a failed child printed. A compiler may have printed pages."""


class ChildError(RuntimeError):
    """A request to a child process failed, for the reason in the text. `lost`: the child ended or hangs, so it can
    answer no more requests."""

    def __init__(self, text: str, lost: bool = False):
        super().__init__(text)
        self.lost = lost


class Child:
    """A child process that runs `python -m MODULE ARGUMENTS`. The module has to call `serve`. The child ends when
    the parent calls `close` or ends."""

    def __init__(self, module: str, *arguments: str):
        self.errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (see close)
        self.process: subprocess.Popen[str] = subprocess.Popen(
            module_command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=child_environment(),
        )
        assert self.process.stdin and self.process.stdout
        self.requests: IO[str] = self.process.stdin
        self.answers: IO[str] = self.process.stdout
        self.lines: Queue[str] = Queue()
        self.reader = Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Put each line of the child's output into the queue `lines`, and "" when the child has ended. A thread runs
        this, because a pipe has no read with a time limit."""
        for line in self.answers:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, patience: float | None = None, **request: Any) -> dict[str, Any]:
        """Send a request to the child and return the answer. Raise ChildError if the child could not do it, ended,
        or has not answered after `patience` seconds; a child that ended or hangs is closed."""
        with suppress(BrokenPipeError):  # the child ended: `read` says so
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()
        try:
            line = self.lines.get(timeout=patience)
        except Empty:
            self.close()
            raise ChildError(f"no answer after {patience:g} seconds", lost=True) from None
        if not line:
            how = ended(self.process.wait())
            text = excerpt(f"the process ended {how}:\n{self.said() or 'it said nothing'}")
            self.close()
            raise ChildError(text, lost=True)
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(excerpt(reply["error"]))
        return reply["answer"]

    def said(self) -> str:
        """Return the text that the child has written to stderr."""
        self.errors.seek(0)
        return self.errors.read().strip()

    def close(self) -> str:
        """End the child process and return what it wrote to stderr. A child that is still working is killed."""
        if self.errors.closed:
            return ""
        with suppress(BrokenPipeError):
            self.requests.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # even a killed process may not end while it waits for the GPU
                self.process.wait(timeout=5)
        self.reader.join(timeout=1)
        if not self.reader.is_alive():
            self.answers.close()
        said = self.said()
        self.errors.close()
        return said


def ended(code: int) -> str:
    """Return as text how a process ended: its exit code, or the signal that killed it."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def excerpt(text: str) -> str:
    """Return at most LINES lines of a text: the first two, then lines that name an error, else the last lines."""
    lines = [line.rstrip()[:200] for line in text.splitlines() if line.strip()]
    if len(lines) <= LINES:
        return "\n".join(lines)
    named = [line for line in lines[2:] if "error" in line.lower()][: LINES - 3]
    return "\n".join([*lines[:2], *(named or lines[3 - LINES :]), f"... of {len(lines)} lines"])


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """In the child process, answer the parent's requests until it closes the pipe. What libraries print goes to
    stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = {"answer": answer(**json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out, flush=True)
