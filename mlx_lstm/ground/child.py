"""Run code in a child process and send it requests. If the code crashes or a kernel hangs, only the child is lost.

Requests and answers are JSON objects, one per line, on the child's standard input and output. Each request has a
number, which its answer repeats. A child ends when its parent closes the pipe or ends. `Child` is the parent's side,
`serve` the child's. Times such as `until` are times of the clock `monotonic`, in seconds.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import IO, Any, cast

from .machine import child_environment

LIMIT = 120.0
"""How many seconds a parent waits for an answer of a child process, unless it passes another limit. After this time the
child counts as hung and is killed."""

MOST = 1000
"""The largest number of characters that an error text quotes from the output of a failed child. A compiler may have
printed pages."""

STDERR_BYTES = 500_000
"""How many of the first and how many of the last bytes of a child's stderr are stored."""


class ChildError(RuntimeError):
    """A request to a child process failed, for the reason in the text.

    lost: whether the child ended or hangs, so that it can answer no more requests. code: the exit code of a child
    that ended (the negative number of a signal), else None. hung: whether the child gave no answer in time.
    """

    def __init__(self, text: str, lost: bool = False, code: int | None = None, hung: bool = False):
        super().__init__(text)
        self.lost = lost
        self.code = code
        self.hung = hung


class NoAnswer(Exception):
    """Raised when a child has not answered in time. It is a class of its own, so that an exception that a signal
    handler raises cannot be mistaken for it."""


class Child:
    """A running child process that answers requests by `serve`. Creating it raises OSError if the process cannot be
    started.

    No second thread reads the pipes: a signal handler may raise an exception at any moment, also inside Python's queues
    and locks between threads, which then raise other errors.
    """

    def __init__(self, command: list[str]):
        pipe = subprocess.PIPE
        self.owner: int = os.getpid()  # only this process may use the pipes, not a process that is forked from it
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command, env=child_environment(), stdin=pipe, stdout=pipe, stderr=pipe
        )
        self.requests, self.answers, self.stderr = (
            cast(IO[bytes], stream) for stream in (self.process.stdin, self.process.stdout, self.process.stderr)
        )
        self.pipes: list[IO[bytes]] = [self.answers, self.stderr]  # the pipes that the child has not closed
        self.unread: bytes = b""  # what was read from the pipe of answers, but not yet returned as an answer
        self.asked: int = 0  # the number of the last request
        self.ended: bool = False  # whether `end` was called
        # The first and the last STDERR_BYTES bytes that the child wrote to stderr.
        self.first_errors: bytes = b""
        self.last_errors: bytes = b""

    def receive(self, until: float) -> bool:
        """Wait until the child writes to one of its open pipes or closes one, and store what it wrote. Return False if
        it did neither before the time `until`. Of a long text on stderr only the first and the last STDERR_BYTES bytes
        are stored, because they usually contain the reason of an error. So a child that writes without end does not
        fill the memory."""
        with DefaultSelector() as selector:
            for stream in self.pipes:
                selector.register(stream, EVENT_READ)
            ready = selector.select(max(0.0, until - monotonic()))
        for key, _ in ready:
            text = os.read(key.fd, 65536)  # read at most so many bytes; this does not wait, because the pipe is ready
            if not text:  # the child closed the pipe
                self.pipes = [stream for stream in self.pipes if stream.fileno() != key.fd]
            elif key.fd == self.answers.fileno():
                self.unread += text
            elif len(self.first_errors) < STDERR_BYTES:
                self.first_errors += text
            else:
                self.last_errors = (self.last_errors + text)[-STDERR_BYTES:]
        return bool(ready)

    def serves(self) -> bool:
        """Return whether the child can take a request: it still runs, and this process started it. A process that was
        forked from this one must not use the child."""
        return not self.ended and self.owner == os.getpid() and self.process.poll() is None

    def ask(
        self, limit: float = LIMIT, notice: tuple[float, Callable[[], None]] | None = None, **request: Any
    ) -> dict[str, Any]:
        """Send a request to the child and return the answer. Raise ChildError if the request failed, if the child
        ended, or if it has not answered after `limit` seconds. A child that hangs is killed.

        notice: (seconds, function): the function is called once if there is no answer after this time. A signal handler
        may raise an exception here at any moment. Then the child is ended, because its answer would otherwise be taken
        for the answer to a later request.
        """
        self.asked += 1
        begin = monotonic()
        try:
            with suppress(BrokenPipeError):  # the child has ended, which `answer` notices
                self.requests.write(json.dumps({"number": self.asked, "request": request}).encode() + b"\n")
                self.requests.flush()
            if notice is not None and notice[0] < limit:
                with suppress(NoAnswer):
                    return self.answer(begin + notice[0])
                notice[1]()
            return self.answer(begin + limit)
        except NoAnswer:
            self.end()
            raise ChildError(f"no answer after {limit:g} seconds", lost=True, hung=True) from None
        except ChildError:
            raise
        except BaseException:
            self.end()
            raise

    def answer(self, until: float) -> dict[str, Any]:
        """Return the answer to the last request. Raise ChildError if the request failed or the child ended, and
        NoAnswer if there is no answer at the time `until`."""
        while True:
            line, newline, rest = self.unread.partition(b"\n")
            if not newline:
                if self.answers not in self.pipes:
                    code = self.end()
                    text = shortened(f"the process ended {ended(code)}:\n{self.said() or 'it said nothing'}")
                    raise ChildError(text, lost=True, code=code)
                # A child may write to stderr without end, so that `receive` always returns True. So after the time
                # `until` read only once more, and give up if there is still no whole answer.
                late = monotonic() > until
                if not self.receive(until) or (late and b"\n" not in self.unread):
                    raise NoAnswer
                continue
            self.unread = rest
            try:
                reply = json.loads(line)
                # Skip the answer to an earlier request, for which the parent no longer waits.
                if reply["number"] == self.asked:
                    # `fail` raises a ChildError. The `except` below does not catch it.
                    return reply["answer"] if "answer" in reply else fail(reply["error"])
            except (ValueError, KeyError, TypeError):
                self.end()
                text = shortened(f"the process gave a broken answer:\n{line.decode(errors='replace')}")
                raise ChildError(text, lost=True) from None

    def said(self) -> str:
        """Return the text that the child has written to stderr. The middle of a long text is missing."""
        return (self.first_errors + self.last_errors).decode(errors="replace").strip()

    def end(self, patience: float = 0.0) -> int:
        """End the child: close its input, and kill it if it still runs after `patience` seconds. Return its exit code,
        or 0 if even a killed process does not end, because it waits for the GPU."""
        self.ended = True  # set first: if an exception interrupts the lines below, the child must get no more requests
        with suppress(OSError):
            self.requests.close()
        if self.answers not in self.pipes:
            patience = max(patience, 1.0)  # the child has closed its output, so it will end soon by itself
        for seconds in (patience, 5.0):  # wait `patience` seconds, kill the child, wait 5 seconds for its end
            if self.wait(seconds):
                break
            self.process.kill()
        # Read the rest of the output for at most a second, because the child's own children may keep the pipes open.
        until = monotonic() + 1
        while self.pipes and monotonic() < until and self.receive(until):
            pass
        self.pipes = []
        self.answers.close()
        self.stderr.close()
        return self.process.returncode or 0

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the child and return whether it has ended. Read its pipes meanwhile, because a child
        cannot end while it writes to a full pipe."""
        until = monotonic() + seconds
        while self.pipes and self.process.poll() is None and (now := monotonic()) < until:
            self.receive(min(until, now + 0.02))
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(0.0, until - monotonic()))
        return self.process.returncode is not None

    def close(self) -> str:
        """End the child process and return what it wrote to stderr. A child that still runs after two seconds is
        killed."""
        self.end(patience=2)
        return self.said()


def fail(error: object) -> dict[str, Any]:
    """Raise a ChildError with the error text that a child sent as its answer."""
    raise ChildError(shortened(str(error)))


def ended(code: int) -> str:
    """Return as text how a process ended: its exit code, or the signal that killed it."""
    if code >= 0:
        return f"with exit code {code}"
    return f"by {signal.Signals(-code).name}" if -code in [*signal.Signals] else f"by signal {-code}"


def shortened(text: str, most: int = MOST) -> str:
    """Return a text without empty lines. If it has more than `most` characters, return three parts of it, each a third
    of `most` long: its beginning, the text around the first "error:" after that, and its end."""
    text = "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
    if len(text) <= most:
        return text
    part = most // 3
    rest = text[part:-part]
    error = rest.find("error:")
    # Begin the part a little before "error:", because a compiler writes the file and the line there.
    middle = [rest[max(0, error - part // 4) :][:part]] if error >= 0 else []
    return " ... ".join([text[:part], *middle, text[-part:]])


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """Answer the parent's requests in the child process, until the parent closes the pipe. answer: the function that
    gets the fields of a request as keywords and returns the answer. What libraries print goes to stderr."""
    # Answers go to a copy of stdout (file descriptor 1). Then descriptor 1 becomes stderr (2), so that nothing that a
    # library prints gets between the answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            reply = {"answer": answer(**message["request"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"number": message["number"]} | reply), file=out, flush=True)
