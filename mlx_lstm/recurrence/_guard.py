"""The guard: test Metal kernels in a small trial run before their first use on a machine.

A trial runs in a child process. Its verdict stays valid on this machine until the chip, the system, MLX or the
kernels change. An engine whose kernels fail is refused: another engine takes over, with a warning. If the caller
forced the refused engine, the reason is raised as an error.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from threading import Lock

import mlx.core as mx

from ..checks import forget_warnings, warn_once
from ..engines import METAL_ENGINES, Choice, tuning, verdicts
from ..engines.problem import Problem
from ..machine import child_command, has_interpreter
from . import _child
from ._child import ENDED_BY_OTHERS, Child, Ended, Hangs, Verdict, verdict_of
from ._trial import Trial, trial_of

_locks: defaultdict[str, Lock] = defaultdict(Lock)
_lock = Lock()
_child_lock = Lock()
_children: list[Child] = []
_unguarded: list[bool] = []
_hung: dict[str, str] = {}
"""For each engine whose kernels hung in this process: the reason for refusing it. It is not tried again, because
another trial would take a minute."""


def guarded(chosen: Choice, problem: Problem, best: Callable[..., Choice]) -> Choice:
    """Return the choice of an engine whose kernels are correct on this machine: `chosen`, or another engine if
    `chosen` is refused.

    best: a function that chooses again without the `refused` engines. It raises ValueError if the caller forced one
    of them.
    """
    refused: dict[str, str] = {}
    if _unguarded:
        return chosen
    while chosen.engine in METAL_ENGINES and (reason := refusal(chosen.engine, problem)):
        refused[chosen.engine] = reason
        before, chosen = chosen, best(refused=refused)
        tell(before.engine, chosen.engine, reason)
    return chosen


@contextmanager
def unguarded() -> Iterator[None]:
    """Run Metal kernels without a trial inside this context, in all threads, even kernels whose trial failed.

    It is for commands that compare each result with an oracle themselves, or that show the compiler's messages.
    """
    _unguarded.append(True)
    try:
        yield
    finally:
        _unguarded.pop()


@cache
def is_real() -> bool:
    """Return whether this machine has a GPU that MLX can use. The emulated GPU of the tests does not count."""
    return mx.is_available(mx.gpu)


@lru_cache(4096)
def refusal(engine: str, problem: Problem) -> str:
    """Return why this machine refuses an engine's kernels for a problem, or an empty text if it does not.

    Kernels without a verdict are tried once, however many threads or processes ask at the same time.
    """
    if not is_real():
        return ""
    trial = trial_of(engine, problem)
    text = trial.text()
    with _lock:
        lock = _locks[text]
    with lock:
        reason = verdicts.find(text)
        if reason is None and engine in _hung:
            reason = _hung[engine]
        elif reason is None:
            with one_process_at_a_time():
                reason = verdicts.find(text)  # another process may have tried meanwhile
                if reason is None:
                    verdict = try_out(trial)
                    reason = verdict.reason
                    if verdict.lasting:
                        verdicts.record(text, reason)
    return reason


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Hold a file lock, so that the processes of a user run their trials one after the other. Without file locks on
    this system, do nothing."""
    try:
        import fcntl

        path = verdicts.file().with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except (ImportError, OSError):  # no file locks, or no folder to write to
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def forget() -> None:
    """Clear all verdicts that this process has cached, and end its child process. The file of verdicts stays."""
    refusal.cache_clear()
    verdicts.forget()
    tell.cache_clear()
    forget_warnings()
    _hung.clear()
    while _children:
        _children.pop().kill()


@cache
def tell(engine: str, following: str, reason: str) -> None:
    """Warn that an engine is refused and which engine takes over. The warning appears once per process for each
    reason."""
    machine = tuning.machine()
    where = f"{machine['chip']}, {machine['system']}, MLX {machine['mlx']}"
    lasts = verdicts.is_recorded(reason)
    again = f"{verdicts.file()} keeps this verdict: delete it to try again" if lasts else "It counts in this process"
    text = f"engine={engine!r} is not used on {where}: {reason.rstrip('.')}. engine={following!r} takes over. {again}."
    warn_once(text)


def command() -> list[str] | None:
    """Return the command that starts the child process for trials. Return None if the executable is not a Python
    interpreter, as in a frozen application."""
    if not has_interpreter():
        return None
    return child_command("from mlx_lstm.recurrence._judge import main; main()")


def try_out(trial: Trial) -> Verdict:
    """Run a trial in the child process and return its verdict. If no child can be started, run the trial in this
    process."""
    words = command()
    verdict = by_child(words, trial) if words else None
    if verdict is None:
        from ._judge import verdict as judge  # imported here: few processes need the oracle

        reason = judge(trial)
        verdict = verdict_of(reason and f"{reason} (tried in this process, as no other could be started)")
    return verdict


def by_child(words: list[str], trial: Trial) -> Verdict | None:
    """Return the verdict of the child process on a trial. Return None if no child can be started, or if the child
    ends before it begins the trial."""
    for _ in range(2):  # try a second time if a user or the system killed the child
        with _child_lock:
            new = not (_children and _children[-1].serves())
            try:
                return asked(words, trial)
            except OSError:
                return None
            except Ended as end:
                _children.clear()
                if -end.code in ENDED_BY_OTHERS or not (new or end.began):
                    continue
                if not end.began:
                    return None
                return verdict_of(f"its trial on this machine ended with exit code {end.code}: {end.message}")
    return Verdict("its trial was ended from outside, twice", lasting=False)


def asked(words: list[str], trial: Trial) -> Verdict:
    """Send a trial to the child of this process and return the verdict. Start the child first if none is running."""
    if not (_children and _children[-1].serves()):
        _children[:] = [Child(words)]
    try:
        return verdict_of(_children[-1].ask(trial.engine, trial.text()))
    except Hangs as hang:
        _children.clear()
        # The reason is stored in `_hung`, so that this process does not try again kernels that hang.
        what = "gave no answer" if hang.began else "did not begin"
        _hung[trial.engine] = f"its trial on this machine {what} in {_child.SECONDS} seconds"
        return Verdict(_hung[trial.engine], lasting=False)
