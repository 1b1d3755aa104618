"""Start a child process of this package and send it requests. If code crashes or a kernel hangs, only the child is
lost.

Requests and answers are JSON objects, one per line, on the child's standard input and output. A child ends when its
parent closes the pipe or ends.
"""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any, cast

from .machine import child_environment

LINES = 6
"""The largest number of lines that an error text quotes from a failed child. A compiler may have printed pages."""

KEPT = 5000
"""How many of the first and of the last lines of a child's stderr are stored."""


class ChildError(RuntimeError):
    """A request to a child process failed, for the reason in the text.

    lost: whether the child ended or hangs, so that it can answer no more requests. code: the exit code of a child
    that ended (the negative number of a signal), else None.
    """

    def __init__(self, text: str, lost: bool = False, code: int | None = None):
        super().__init__(text)
        self.lost = lost
        self.code = code


class Child:
    """A running child process that answers requests by `serve`. Creating it raises OSError if the process cannot be
    started."""

    def __init__(self, command: list[str]):
        pipe = subprocess.PIPE
        self.owner: int = os.getpid()
        self.process: subprocess.Popen[str] = subprocess.Popen(
            command, text=True, errors="replace", env=child_environment(), stdin=pipe, stdout=pipe, stderr=pipe
        )
        self.requests, self.answers, self.stderr = (
            cast(IO[str], stream) for stream in (self.process.stdin, self.process.stdout, self.process.stderr)
        )
        self.lines: Queue[str] = Queue()
        self.first_errors: list[str] = []
        self.last_errors: deque[str] = deque(maxlen=KEPT)
        # Two threads read the pipes, because a read from a pipe has no time limit.
        self.readers = [Thread(target=read, daemon=True) for read in (self.read_answers, self.read_errors)]
        for reader in self.readers:
            reader.start()

    def read_answers(self) -> None:
        """Put each line of the child's standard output into the queue `lines`, and "" when the output has ended."""
        for line in self.answers:
            self.lines.put(line)
        self.lines.put("")

    def read_errors(self) -> None:
        """Store the first and the last lines of the child's standard error."""
        for line in self.stderr:
            (self.first_errors if len(self.first_errors) < KEPT else self.last_errors).append(line)

    def serves(self) -> bool:
        """Return whether the child can take a request: it still runs, and this process started it. After a fork the
        child belongs to the parent process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def send(self, **request: Any) -> None:
        """Send a request to the child. If the child has ended, this raises no error: the next `receive` raises it."""
        with suppress(OSError):
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()

    def receive(self, patience: float | None = None) -> dict[str, Any]:
        """Return the child's answer to the request sent before. Raise TimeoutError if there is none after `patience`
        seconds; the child may still answer later. Raise ChildError if the request failed or the child ended."""
        try:
            line = self.lines.get(timeout=patience)
        except Empty:
            raise TimeoutError from None
        if not line:
            self.lines.put("")  # the next call finds the end of the output again
            code = self.end()
            text = excerpt(f"the process ended {ended(code)}:\n{self.said() or 'it said nothing'}")
            raise ChildError(text, lost=True, code=code)
        try:
            reply = json.loads(line)
            return reply["answer"] if "answer" in reply else fail(reply["error"])
        except (ValueError, KeyError, TypeError):
            self.end()
            raise ChildError(excerpt(f"the process gave a broken answer:\n{line}"), lost=True) from None

    def ask(self, patience: float | None = None, **request: Any) -> dict[str, Any]:
        """Send a request to the child and return the answer. Raise ChildError if the request failed, if the child
        ended, or if it has not answered after `patience` seconds. A child that hangs is killed."""
        self.send(**request)
        try:
            return self.receive(patience)
        except TimeoutError:
            self.end()
            raise ChildError(f"no answer after {patience:g} seconds", lost=True) from None

    def said(self) -> str:
        """Return the text that the child has written to stderr. Lines in the middle of a long text are missing."""
        return "".join([*self.first_errors, *self.last_errors]).strip()

    def end(self, patience: float = 0.0) -> int:
        """End the child: close its input, and kill it if it still runs after `patience` seconds. Return its exit code,
        or 0 if even a killed process does not end, because it waits for the GPU."""
        with suppress(OSError):
            self.requests.close()
        if not self.readers[0].is_alive():
            patience = max(patience, 1.0)  # the child has closed its output, so it is about to end
        for wait in (patience, 5.0):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=wait)
                break
            self.process.kill()
        for reader in self.readers:
            reader.join(timeout=1)
        return self.process.returncode or 0

    def close(self) -> str:
        """End the child process and return what it wrote to stderr. A child that still runs after two seconds is
        killed."""
        self.end(patience=2)
        for reader, stream in zip(self.readers, (self.answers, self.stderr), strict=True):
            if not reader.is_alive():
                stream.close()
        return self.said()


def fail(error: object) -> dict[str, Any]:
    """Raise a ChildError with the error text that a child sent as its answer."""
    raise ChildError(excerpt(str(error)))


def ended(code: int) -> str:
    """Return as text how a process ended: its exit code, or the signal that killed it."""
    if code >= 0:
        return f"with exit code {code}"
    return f"by {signal.Signals(-code).name}" if -code in [*signal.Signals] else f"by signal {-code}"


def excerpt(text: str) -> str:
    """Return at most LINES lines of a text: the first two, then lines that contain "error" or, if there are
    none, the last lines."""
    lines = [line.rstrip()[:200] for line in text.splitlines() if line.strip()]
    if len(lines) <= LINES:
        return "\n".join(lines)
    named = [line for line in lines[2:] if "error" in line.lower()][: LINES - 3]
    return "\n".join([*lines[:2], *(named or lines[3 - LINES :]), f"... of {len(lines)} lines"])


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """In the child process, answer the parent's requests by the function `answer` until the parent closes the pipe.
    What libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = {"answer": answer(**json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out, flush=True)
