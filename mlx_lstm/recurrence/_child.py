"""The child process that runs trials of Metal kernels: small test runs before the kernels' first use on a machine.

One child serves all trials of a process, because starting a process takes seconds and the child remembers which
kernels it has already found correct. It reads one trial per line from its standard input. It ends when this input
closes, at the latest when its parent ends. The code that runs in the child is `_judge.main`.
"""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import IO, NamedTuple

from ..machine import child_environment

STARTED, ANSWER = "trial started", "trial says "
"""The beginnings of lines that the child process prints: STARTED before it runs a trial (a small test run of kernels),
ANSWER before the result of the trial."""

SECONDS = 60
"""Time limit of a trial in seconds. If a trial takes longer, the child process is killed and the kernels are refused.
We expect about one second for a trial, but have not measured it."""

PATIENCE = 3
"""Seconds that a call waits for a trial before it prints on standard error what it waits for."""

ENDED_BY_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP)
"""Signals with which a user or the system ends a process. If the child ends with one of them, this does not mean that
its kernels are wrong."""

TRANSIENT = ("out of memory", "outofmemory", "insufficient memory", "memoryerror", "unable to allocate", "timeout")
TRANSIENT += ("timed out", "discarded", "victim", "no space left")
"""Words in the error texts of temporary faults. After such an error the kernels are refused in this process only, and
the next process tries them again."""


class Verdict(NamedTuple):
    """The result of a trial of an engine's kernels. reason: why the kernels are refused; empty if they are correct.
    lasting: True if the verdict is stored for this machine, False if it counts only in this process."""

    reason: str
    lasting: bool = True


def verdict_of(reason: str) -> Verdict:
    """Return the verdict with this reason. It is not lasting if the reason names a fault that may not come again,
    such as "out of memory"."""
    return Verdict(reason, not any(word in reason.lower() for word in TRANSIENT))


class Ended(Exception):
    """Raised when the child process ended before it gave an answer. `began`: whether the trial had already started."""

    def __init__(self, code: int, message: str, began: bool):
        super().__init__(message)
        self.code, self.message, self.began = code, message, began


class Hangs(Exception):
    """Raised when the child process gave no answer in time and was killed. `began`: whether the trial had already
    started."""

    def __init__(self, began: bool):
        super().__init__()
        self.began = began


class Child:
    """A running child process for trials. Creating it raises OSError if the process cannot be started."""

    def __init__(self, command: list[str]):
        pipe = subprocess.PIPE
        self.owner: int = os.getpid()
        self.process: subprocess.Popen[str] = subprocess.Popen(
            command, text=True, errors="replace", env=child_environment(), stdin=pipe, stdout=pipe, stderr=pipe
        )
        self.lines: Queue[str | None] = Queue()
        self.errors: deque[str] = deque(maxlen=20)
        # Two threads read the pipes, because a read from a pipe has no time limit. None in the queue marks the end of
        # the output.
        self.readers: list[Thread] = [Thread(target=read, daemon=True) for read in (self.read_lines, self.read_errors)]
        for reader in self.readers:
            reader.start()

    def read_lines(self) -> None:
        """Put the child's standard output into the queue `lines`, line by line, and None at the end of the output."""
        for line in output(self.process.stdout):
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def read_errors(self) -> None:
        """Store the last non-blank lines of the child's standard error in `errors`."""
        self.errors.extend(line.strip() for line in output(self.process.stderr) if line.strip())

    def serves(self) -> bool:
        """Return whether the child can take a trial: it still runs, and this process started it. After a fork the
        child belongs to the parent process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, engine: str, trial: str) -> str:
        """Send a trial to the child. Return the reason to refuse its kernels, or an empty text if they are correct.

        Raises `Ended` if the child ends before it answers, and `Hangs` if the answer takes too long.
        """
        began = False
        try:
            stdin = self.process.stdin
            assert stdin is not None
            stdin.write(trial + "\n")
            stdin.flush()
        except OSError:
            pass  # the child has ended: reading its output below finds the exit code
        asked, told = monotonic(), False
        while True:
            limit = SECONDS if told else min(PATIENCE, SECONDS)
            try:
                line = self.lines.get(timeout=max(0.0, asked + limit - monotonic()))
            except Empty:
                if limit == SECONDS:
                    self.kill()
                    raise Hangs(began) from None
                told = True
                tell_waiting(engine)
                continue
            if line is None:
                code = self.kill()
                raise Ended(code, (list(self.errors) or ["no message"])[-1], began)
            if line.startswith(ANSWER):
                return str(json.loads(line.removeprefix(ANSWER)))
            if line.startswith(STARTED):
                began = True

    def kill(self) -> int:
        """Kill the child process. Return its exit code, or 0 if it cannot be killed because it waits for its GPU."""
        if self.process.poll() is None and self.lines.empty():
            self.process.kill()
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return 0
        for reader in self.readers:
            reader.join(timeout=1)
        return code


def output(pipe: IO[str] | None) -> IO[str]:
    """Return the pipe. It is never None, because the process was started with pipes; the type checker cannot know
    this."""
    assert pipe is not None
    return pipe


def tell_waiting(engine: str) -> None:
    """Print on standard error that the call waits for the trial of an engine's kernels."""
    text = f"mlx_lstm: trying the Metal kernels of engine {engine!r}, once on this machine, before their first use ..."
    print(text, file=sys.stderr, flush=True)
