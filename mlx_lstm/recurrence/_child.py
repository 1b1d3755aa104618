"""Run trials of Metal kernels (small test runs before the kernels' first use) in a child process.

One child serves all trials of a process, because starting a process takes seconds and the child remembers which
kernels it has already found correct. The child runs `_judge.main`. A `Trial` names an engine and describes the call of
a test run; the child gets it as text. A `Verdict` is the result of a trial; the module `verdicts` stores it in a file.
A trial hangs if the child gives no answer in time. A `ChildError` says how the child ended, or that it hangs.
"""

import re
import signal
import sys
from threading import Lock
from typing import Any, NamedTuple

from ..engines import verdicts
from ..engines.verdicts import Keeping
from ..ground.child import Child, ChildError, ended, shortened
from ._trial import Trial

SECONDS = 20
KERNEL_SECONDS = 2
"""Time limit of a trial in seconds: SECONDS, and KERNEL_SECONDS more for each kernel that the child compiles. If a
trial takes longer, the child process is killed and the kernels are refused. The compiler's time is an estimate."""

PATIENCE = 3
"""Seconds that a call waits for trials before it prints on standard error what it waits for."""

MOST = 600
"""The largest number of characters in a reason for refusing kernels. Longer texts of compilers are shortened."""

ENDED_BY_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP)
"""Signals with which a user or the system ends a process. If the child ends with one of them, this does not mean that
its kernels are wrong."""

WRONG = "its trial on this machine gave wrong numbers"
"""The beginning of the reason for refusing kernels whose results differ from the oracle's."""

LASTING = re.compile(
    r"^(?:\S+:\d+:\d+: )?(?:fatal )?error: "  # a line of the compiler
    # a limit of the pipeline, which Metal finds when it loads or launches the kernel
    r"|(?i:thread ?group (?:memory )?size .*?(?:exceeds|greater than)|exceeds (?:the )?(?:available|maximum))",
    re.MULTILINE,
)
"""The error texts of faults that come again whenever the same kernels are compiled: the compiler refuses the source, or
a kernel needs more registers, threads or memory than the GPU has. All other errors, such as a GPU that is used by
others, a compiler service that cannot be reached or a full memory, may not come again."""

_lock = Lock()
"""The lock of the child process: one thread at a time sends it a request."""

_children: list[Child] = []
"""The child process of this process, if it has one."""

_hung: dict[str, str] = {}
"""{engine: reason for refusing it} for each engine whose trial gave no answer in this process. After one such trial
this process tries no kernels of any engine, because another trial that hangs would take its whole time limit again."""


class Verdict(NamedTuple):
    """The result of a trial, a small test run of an engine's kernels."""

    reason: str  # why the kernels are refused; empty if they are correct
    keeping: Keeping = "always"  # how long the verdict counts: "always", for a "day", or in this "process"


class CannotBegin(Exception):
    """Raised when no child process can test kernels, for example because it cannot import MLX."""


def verdict_of(reason: str) -> Verdict:
    """Return the result of a trial, a test run of kernels. reason: why they are refused, or "". It counts always if
    they are correct, if results were wrong (WRONG), or if the error would occur again (LASTING); else in this process
    only. The text is shortened to MOST characters."""
    comes_again = not reason or reason.startswith(WRONG) or LASTING.search(reason)
    return Verdict(" ".join(shortened(reason, MOST).split()), "always" if comes_again else "process")


def hung(engine: str) -> str | None:
    """Return the reason to try no more kernels of an engine: a trial hung in this process, or a trial of this engine
    hung on this machine within a day. Return None if there is no such reason."""
    if engine in _hung:
        return _hung[engine]
    if _hung:  # a trial of another engine hung
        return f"a trial of engine {next(iter(_hung))!r} hung in this process, so it tries no other kernels"
    return verdicts.find(key_of_hang(engine))


def key_of_hang(engine: str) -> str:
    return f"hang of {engine}"


def forget() -> None:
    """End the child process, and forget which engines hung."""
    _hung.clear()
    while _children:
        _children.pop().end()


def by_child(command: list[str], trials: list[Trial]) -> list[Verdict]:
    """Run trials of one engine in the child process and return their results. The list ends with the first trial that
    ended or blocked the child. Raise `CannotBegin` if no child process can run trials."""
    with _lock:
        for _ in range(2):  # try a second time if a user or the system killed the child
            attempt = Attempt(command, trials)
            try:
                attempt.run()
            except ChildError as end:
                # end.code: the child's exit code; minus the number of the signal that ended it; None if the child has
                # not ended.
                if end.hung:
                    attempt.note_hang(str(end))
                elif end.code is not None and -end.code in ENDED_BY_OTHERS:
                    continue
                else:
                    attempt.note_end(end)
            return attempt.verdicts
    return [Verdict("its trial was ended from outside, twice", "process")]


class Attempt:
    """One attempt to run some trials (test runs of kernels) in the child process, and the verdicts on them."""

    def __init__(self, command: list[str], trials: list[Trial]):
        """Prepare a request. command: what starts the child process."""
        self.command, self.trials = command, trials
        self.verdicts: list[Verdict] = []  # the results of the trials that have finished
        self.began = False  # whether the child has ever answered a request
        self.kernels: int | None = None  # the number of kernels to test; None before the child has counted them
        self.told = False  # whether the user has been told that the call waits

    def run(self) -> None:
        """Run the test runs of kernels in the child process and append the result of each to `verdicts`. Start the
        child first if none is running."""
        self.began = bool(_children and _children[-1].serves())  # a child that still serves has answered before
        if not self.began:
            try:
                _children[:] = [Child(self.command)]
            except OSError as error:
                if error.errno is None:  # not the system's error, but one that a signal handler of the user raised
                    raise
                raise CannotBegin(str(error)) from None
        child = _children[-1]
        self.kernels = self.ask(child, "count", self.trials).get("kernels")
        for trial in self.trials:
            answer = self.ask(child, "judge", [trial])
            # An answer without a reason is a fault of the child. Then the whole answer is the reason for refusing.
            self.verdicts.append(verdict_of(str(answer.get("reason", answer))))

    def ask(self, child: Child, do: str, trials: list[Trial]) -> dict[str, Any]:
        """Return the child's answer to a request, or {"reason": error} if the request failed. do: "count" counts the
        kernels of the trials, "judge" runs them. Raise ChildError if the child ended or gave no answer in time. If the
        user has waited `PATIENCE` seconds for one answer, print once that kernels are being tested."""
        limit = SECONDS + KERNEL_SECONDS * (self.kernels or 0)  # seconds; kernels is None until they are counted
        notice = None if self.told else (PATIENCE, self.tell_waiting)  # `child.ask` calls it after these seconds
        try:
            answer = child.ask(limit, notice, do=do, trials=[trial.text() for trial in trials])
        except ChildError as error:
            if error.lost:  # the child has ended or hangs; otherwise only this request has failed
                raise
            answer = {"reason": f"its trial on this machine failed: {error}"}
        self.began = True  # also after a failure: the child answers, so the kernels are the cause if it hangs later
        return answer

    def tell_waiting(self) -> None:
        """Print on standard error that the call waits until an engine's kernels have been tested."""
        self.told = True
        count = self.kernels
        what = "the Metal kernels" if count is None else f"{count} Metal kernel{'s' * (count != 1)}"
        engine = self.trials[0].engine
        text = f"mlx_lstm: trying {what} of engine {engine!r}, once on this machine, before their first use ..."
        print(text, file=sys.stderr, flush=True)

    def note_hang(self, text: str) -> None:
        """Append the verdict that the kernels of the current trial, which gave no answer, are refused. This process
        tries no more kernels. If the child had answered before, this machine tries no kernels of this engine for a day.
        text: such as "no answer after 20 seconds"."""
        engine = self.trials[0].engine
        reason = f"its trial on this machine {'gave' if self.began else 'did not begin:'} {text}"
        _hung[engine] = reason
        if self.began:
            verdicts.record(key_of_hang(engine), reason, "day")
        self.verdicts.append(Verdict(reason, "day" if self.began else "process"))

    def note_end(self, end: ChildError) -> None:
        """Add to `verdicts` that the kernels of the trial in which the child ended are refused. If the child exited on
        its own before its first answer, raise `CannotBegin` instead: its imports failed, so no kernel is to blame."""
        if not self.began and end.code is not None and end.code >= 0:
            raise CannotBegin(str(end))
        # If the child never answered, or ended without an error, the kernels may not be the cause. So the verdict
        # counts in this process only.
        said = _children[-1].said() or "it said nothing"  # what the child printed on standard error
        how = f"failed: {end}" if end.code is None else f"ended {ended(end.code)}: {said}"
        verdict = verdict_of(f"its trial on this machine {how}")
        self.verdicts.append(verdict if self.began and end.code else verdict._replace(keeping="process"))
