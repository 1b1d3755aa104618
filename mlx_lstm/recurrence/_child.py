"""Run trials of Metal kernels (small test runs before the kernels' first use) in a child process.

One child serves all trials of a process, because starting a process takes seconds and the child remembers which
kernels it has already found correct. The code that runs in the child is `_judge.main`.
"""

import signal
import sys
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

from ..child import Child, ChildError
from ._trial import Trial

SECONDS = 60
"""Time limit of a trial in seconds. If a trial takes longer, the child process is killed and the kernels are refused.
We expect about one second for a trial, but have not measured it."""

PATIENCE = 3
"""Seconds that a call waits for trials before it prints on standard error what it waits for."""

ENDED_BY_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP)
"""Signals with which a user or the system ends a process. If the child ends with one of them, this does not mean that
its kernels are wrong."""

TRANSIENT = ("out of memory", "outofmemory", "insufficient memory", "memoryerror", "unable to allocate", "timeout")
TRANSIENT += ("timed out", "discarded", "victim", "no space left")
"""Words in the error texts of temporary faults. After such an error the kernels are refused in this process only, and
the next process tries them again."""

_lock = Lock()
_children: list[Child] = []
"""The child process of this process, if it has one."""

_hung: dict[str, str] = {}
"""For each engine whose kernels hung in this process: the reason for refusing it. It is not tried again, because
another trial would take a minute."""


class Verdict(NamedTuple):
    """The result of a trial, a small test run of an engine's kernels. reason: why the kernels are refused; empty if
    they are correct. lasting: True if the verdict is stored for this machine, False if only this process uses it.
    """

    reason: str
    lasting: bool = True


class CannotBegin(Exception):
    """Raised when no child process can test kernels, for example because it cannot import MLX."""


def verdict_of(reason: str) -> Verdict:
    """Return the result of a test run of kernels: they are refused for this reason, or correct if it is empty. If the
    reason names a fault that may not come again, such as "out of memory", the verdict is not lasting: it holds in this
    process only."""
    return Verdict(reason, not any(word in reason.lower() for word in TRANSIENT))


def hung(engine: str) -> str | None:
    """Return the reason to refuse an engine whose kernels hung in this process, or None if they did not."""
    return _hung.get(engine)


def forget() -> None:
    """End the child process, and forget which engines hung."""
    _hung.clear()
    while _children:
        _children.pop().end()


def by_child(command: list[str], trials: list[Trial]) -> list[Verdict]:
    """Run trials (small test runs of kernels) of one engine in the child process and return their results. The list
    ends with the first trial that ended or blocked the child. Raise `CannotBegin` if no child process can run trials.
    """
    with _lock:
        for _ in range(2):  # try a second time if a user or the system killed the child
            attempt = Attempt(command, trials)
            try:
                attempt.run()
            except TimeoutError:  # comes first, because it is a subclass of OSError
                attempt.note_hang()
            except OSError as error:
                raise CannotBegin(str(error)) from None
            except ChildError as end:
                if end.code is not None and -end.code in ENDED_BY_OTHERS:
                    continue
                attempt.note_end(end)
            return attempt.verdicts
    return [Verdict("its trial was ended from outside, twice", lasting=False)]


class Attempt:
    """One request to the child process to run some trials (test runs of kernels before their first use).

    verdicts: the results of the trials that have finished. began: whether this child has answered anything, now or
    before. kernels: how many kernels are tested, or None before the child has counted them.
    """

    def __init__(self, command: list[str], trials: list[Trial]):
        self.command, self.trials = command, trials
        self.verdicts: list[Verdict] = []
        self.began = False
        self.kernels: int | None = None
        self.told = False
        self.start = monotonic()

    def run(self) -> None:
        """Run the test runs of kernels in the child process and append the result of each to `verdicts`. Start the
        child first if none is running."""
        self.began = bool(_children and _children[-1].serves())  # a child that serves has answered before
        if not self.began:
            _children[:] = [Child(self.command)]
        child = _children[-1]
        self.kernels = self.ask(child, "count", self.trials).get("kernels")
        for trial in self.trials:
            answer = self.ask(child, "judge", [trial])
            self.verdicts.append(verdict_of(str(answer.get("reason", answer))))

    def ask(self, child: Child, do: str, trials: list[Trial]) -> dict[str, Any]:
        """Return the child's answer to a request, or {"reason": error} if the request failed. Raise ChildError if the
        child ended, and TimeoutError if it gave no answer in time. If the user has waited `PATIENCE` seconds, print
        once that kernels are being tested."""
        child.send(do=do, trials=[trial.text() for trial in trials])
        asked = monotonic()
        limits = [asked + SECONDS] if self.told else [min(self.start + PATIENCE, asked + SECONDS), asked + SECONDS]
        try:
            while True:
                try:
                    answer = child.receive(max(0.0, limits.pop(0) - monotonic()))
                    break
                except TimeoutError:
                    if not limits:
                        raise
                    self.told = True
                    tell_waiting(trials[0].engine, self.kernels)
        except ChildError as error:
            if error.lost:
                raise
            answer = {"reason": f"its trial on this machine failed: {error}"}
        self.began = True
        return answer

    def note_hang(self) -> None:
        """Kill the child, whose current test run of kernels hangs, and append the verdict that these kernels are
        refused. This process does not try the engine again."""
        _children.pop().end()
        engine = self.trials[0].engine
        what = "gave no answer" if self.began else "did not begin"
        _hung[engine] = f"its trial on this machine {what} in {SECONDS} seconds"
        self.verdicts.append(Verdict(_hung[engine], lasting=False))

    def note_end(self, end: ChildError) -> None:
        """Handle the end of the child process during a test run of kernels: append to `self.verdicts` that these
        kernels are refused. If the child exited on its own before its first answer, raise `CannotBegin` instead:
        the child's imports failed, so no kernel is to blame."""
        if not self.began and end.code is not None and end.code >= 0:
            raise CannotBegin(str(end))
        said = _children[-1].said() or "it said nothing"
        how = f"ended with exit code {end.code}: {said.splitlines()[-1]}"
        if end.code is None:
            how = f"gave a broken answer: {str(end).splitlines()[-1]}"
        verdict = verdict_of(f"its trial on this machine {how}")
        self.verdicts.append(verdict if self.began and end.code else verdict._replace(lasting=False))


def tell_waiting(engine: str, kernels: int | None) -> None:
    """Print on standard error that the call waits until an engine's kernels have been tested."""
    what = "the Metal kernels" if kernels is None else f"{kernels} Metal kernel{'s' * (kernels != 1)}"
    text = f"mlx_lstm: trying {what} of engine {engine!r}, once on this machine, before their first use ..."
    print(text, file=sys.stderr, flush=True)
