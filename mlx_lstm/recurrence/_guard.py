"""The guard: before a Metal engine runs kernels that this machine has never run, they are tried.

The trial runs in a process of its own; its verdict counts on this machine until something changes. An engine that fails
is refused: the next one takes over, with a warning; who forced it gets the reason.
"""

import json
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from threading import Lock

import mlx.core as mx

from ..checks import forget_warnings, warn_once
from ..engines import METAL_ENGINES, Choice, tuning, verdicts
from ..engines.problem import Problem
from ..machine import child_command, child_environment, has_interpreter
from ._form import Trial, trial_of

SECONDS = 60
"""After which a trial hangs. It takes about one, of which Apple's compiler has its part: not measured."""

ENDED_BY_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""What ends a process that did nothing wrong."""

_locks: defaultdict[str, Lock] = defaultdict(Lock)
_lock = Lock()
_unguarded: list[bool] = []


def guarded(found: Choice, problem: Problem, best: Callable[..., Choice]) -> Choice:
    """The choice of an engine, once its kernels are found right; else the one that takes over. `best`: the
    choice, but for engines that are `refused`. ValueError if a forced one is."""
    refused: dict[str, str] = {}
    if _unguarded:
        return found
    while found.engine in METAL_ENGINES and (reason := refusal(found.engine, problem)):
        refused[found.engine] = reason
        before, found = found, best(refused=refused)
        tell(before.engine, found.engine, reason)
    return found


@contextmanager
def unguarded() -> Iterator[None]:
    """In here, in every thread, kernels have no trial, and a failed one stops none: for what judges each result itself,
    and is to see what a compiler says."""
    _unguarded.append(True)
    try:
        yield
    finally:
        _unguarded.pop()


@cache
def is_real() -> bool:
    """Whether there is a GPU, and not an emulator's."""
    return mx.is_available(mx.gpu)


@lru_cache(4096)
def refusal(engine: str, problem: Problem) -> str:
    """Why an engine's kernels for a call are refused on this machine, or nothing. A trial is made where nobody knows,
    once, however many threads ask."""
    if not is_real():
        return ""
    trial = trial_of(engine, problem)
    text = trial.text()
    with _lock:
        lock = _locks[text]
    with lock:
        verdict = verdicts.find(text)
        if verdict is None:
            verdict = try_out(trial)
            verdicts.record(text, verdict)
    return verdict


def forget() -> None:
    """Drop what this process knows of verdicts; their file stays."""
    refusal.cache_clear()
    verdicts.forget()
    tell.cache_clear()
    forget_warnings()


@cache
def tell(engine: str, following: str, reason: str) -> None:
    """Warn that an engine is refused, once in a process for each reason."""
    machine = tuning.machine()
    where = f"{machine['chip']}, {machine['system']}, MLX {machine['mlx']}"
    again = f"{verdicts.file()} keeps this verdict: delete it to try again"
    warn_once(f"engine={engine!r} is not used on {where}: {reason}. engine={following!r} takes over. {again}.")


def command() -> list[str] | None:
    """What runs a trial; None where there is no interpreter, as in a frozen application."""
    if not has_interpreter():
        return None
    return child_command("from mlx_lstm.recurrence._trial import main; main()")


def try_out(trial: Trial) -> str:
    """The verdict on a trial, made in another process; in this one where another cannot be started."""
    from ._trial import verdict  # which needs the oracle, and few processes need it

    words = command()
    found = in_a_process(words, trial) if words else None
    if found is None:
        found = verdict(trial)
        return found and f"{found} (tried in this process, as no other could be started)"
    return found


def in_a_process(words: list[str], trial: Trial) -> str | None:
    """The verdict of another process; None if it did not come so far as to begin, or was ended from outside."""
    from ._trial import ANSWER, STARTED

    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(words, text=True, env=child_environment(), stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError:
        return None
    hangs = False
    try:
        printed, errors = process.communicate(trial.text(), timeout=SECONDS)
    except subprocess.TimeoutExpired:
        hangs, printed, errors = True, *ended(process)
    except BaseException:
        process.kill()
        raise
    answer = [line.removeprefix(ANSWER) for line in printed.splitlines() if line.startswith(ANSWER)]
    if answer:
        return json.loads(answer[0])
    if STARTED not in printed:
        return None
    if hangs:
        return f"its trial on this machine gave no answer in {SECONDS} seconds"
    if -process.returncode in ENDED_BY_OTHERS:
        return None
    last = ([line.strip() for line in errors.splitlines() if line.strip()] or ["no message"])[-1]
    return f"its trial on this machine ended with exit code {process.returncode}: {last}"


def ended(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Kills a process that hangs: what it printed. One that waits for its GPU may not even die, and is left alone."""
    process.kill()
    try:
        return process.communicate(timeout=5)
    except subprocess.TimeoutExpired as error:
        return str(error.stdout or ""), str(error.stderr or "")
