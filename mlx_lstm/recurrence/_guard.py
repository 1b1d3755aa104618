"""The guard: test Metal kernels in a small trial run before their first use on a machine.

A trial runs in a child process. Its verdict stays valid on this machine until the chip, the system, MLX or the
kernels change. An engine whose kernels fail is refused: another engine takes over, with a warning. If the caller
forced the refused engine, the reason is raised as an error.

A `Problem` describes a call without its arrays; `trial_of` makes a `Trial` of it: a small call that runs the same
kernels. The trial's text, a line of JSON, is the key of its result in the module `verdicts`. A reason says why kernels
are refused; "" means that they are correct, None that they were not tested.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from threading import Lock

import mlx.core as mx

from ..engines import METAL_ENGINES, Choice, tuning, verdicts
from ..engines.problem import Problem
from ..ground.checks import forget_warnings, warn_once
from ..ground.machine import child_command, has_interpreter
from . import _child
from ._child import CannotBegin, Verdict, by_child, verdict_of
from ._trial import USUAL, Trial, following, trial_of, without_matrices

_locks: defaultdict[str, Lock] = defaultdict(Lock)
"""{text of a trial: its lock}. The lock makes sure that only one thread runs the trial."""

_lock = Lock()
"""The lock of the dict `_locks`."""

_unguarded: list[bool] = []
"""One entry for each context `unguarded` that is active; while there is one, no kernel is tested."""


def guarded(
    chosen: Choice, problem: Problem, best: Callable[..., Choice], divided: Callable[[Problem, str], Problem]
) -> tuple[Choice, Problem]:
    """Return the choice of an engine whose kernels are correct on this machine, and the problem as that engine runs it:
    `chosen`, or another engine if its kernels are refused. best: chooses again without the `refused` engines; it raises
    ValueError if the caller forced one of them. divided: adds to a problem how an engine divides its sequence in
    time."""
    refused: dict[str, str] = {}  # {engine: reason}
    if _unguarded:
        return chosen, problem
    while chosen.engine in METAL_ENGINES and (reason := refusal(chosen.engine, problem)):
        # Some virtual GPUs run all kernels except those that multiply 8 x 8 matrices. So before the engine is refused,
        # try its kernels without such matrices. in_lanes: the problem with these kernels, or None if the refused
        # kernels multiply no such matrices.
        in_lanes = without_matrices(chosen.engine, problem)
        if in_lanes is not None and not refusal(chosen.engine, in_lanes):
            tell(f"{chosen.engine} with 8 x 8 matrices", f"{chosen.engine} without them", reason)
            return chosen, in_lanes
        refused[chosen.engine] = reason
        before, chosen = chosen, best(refused=refused)
        tell(before.engine, chosen.engine, reason)
        problem = divided(problem, chosen.engine)
    return chosen, problem


def gradient_refusal(chosen: Choice, problem: Problem, is_forced: bool, names: tuple[str, ...]) -> str:
    """Return why the backward kernels of a Metal engine are refused, or "". Kernels that were never tested on this
    machine are tested first. Which kernels run depends on the outputs that the loss uses, so MLX must ask for the
    gradient before they are known. Those for a loss of h alone, and those of a call without training, were tested
    before the forward pass; this function tests all others. is_forced: whether the user forced the engine; then
    ValueError is raised in place of the answer. names: the outputs that have a cotangent (a gradient)."""
    # USUAL: h alone. In this case the kernels were tested before the forward pass.
    if _unguarded or names == USUAL or not problem.training:
        return ""
    # If a last state or the gates have a cotangent, then the forward pass has returned them. Describe this in the
    # problem, too, because it decides which kernels run.
    last = problem.wants_last or not {"hT", "cT"}.isdisjoint(names)
    reason = refusal(chosen.engine, problem._replace(cotangents=names, wants_last=last, return_gates="gates" in names))
    if reason and is_forced:
        raise ValueError(f"[{problem.cell.op}] engine={chosen.engine!r} cannot run: {reason}.")
    if reason:
        tell(chosen.engine, "ops", reason)
    return reason


@contextmanager
def unguarded() -> Iterator[None]:
    """Inside this context run all Metal kernels without a prior test run, in all threads, even kernels that have failed
    one. Commands use it if they compare each result with an oracle themselves, or show the compiler's messages."""
    _unguarded.append(True)
    try:
        yield
    finally:
        _unguarded.pop()


@cache
def is_real() -> bool:
    """Return whether this machine has a GPU that MLX can use. The emulated GPU of the tests is not such a GPU."""
    return mx.is_available(mx.gpu)


@lru_cache(4096)
def refusal(engine: str, problem: Problem) -> str:
    """Return why this machine refuses an engine's kernels for a problem, or "". Kernels that were never tested here are
    tested now, only once, however many threads or processes ask at the same time."""
    if not is_real():  # there is no GPU, only one that tests emulate
        return ""
    trial = trial_of(engine, problem)
    text = trial.text()
    with _lock:
        lock = _locks[text]  # each trial has its own lock: threads wait only for a trial of the same kernels
    with lock:
        reason = known(engine, text)
        if reason is None:
            with one_process_at_a_time():
                reason = known(engine, text)  # another process may have tested the kernels meanwhile
                if reason is None:
                    # In the same request test the kernels of calls that will probably follow this one.
                    reason = tried(trial, following(engine, problem))
    return reason


def known(engine: str, text: str) -> str | None:
    """Return what earlier trials have shown about an engine's kernels: why they are refused, an empty text if they are
    correct, or None if they have to be tried. text: the trial as a line of JSON."""
    reason = verdicts.find(text)
    return _child.hung(engine) if reason is None else reason


def tried(trial: Trial, others: list[Trial]) -> str:
    """Run a trial and store its result. Return why the kernels are refused, or "" if they are correct. others: trials
    for calls that the user will probably make next; if they have no stored result, run them in the same request."""
    trials = [trial, *(other for other in others if verdicts.find(other.text()) is None)]
    found = try_out(trials)
    for each, verdict in zip(trials, found, strict=False):  # `found` is shorter if a trial has ended the child
        verdicts.record(each.text(), verdict.reason, verdict.keeping)
    return found[0].reason


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Return a context that holds a file lock, so that only one process of the user tests kernels at a time. A process
    that waited reads the results from the file of verdicts. Without file locks the context does nothing."""
    try:
        import fcntl

        path = verdicts.file().with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_NONBLOCK: a pipe in the file's place raises an error; without it, opening the pipe would wait forever.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666), "w")
    except (ImportError, OSError):  # no file locks, or no folder to write to
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno is None:  # not the system's error, but one that a signal handler of the user raised
                raise
        try:
            yield
        finally:
            # A process that the user's program has forked meanwhile has the file open, too. So closing it here does not
            # release the lock.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def forget() -> None:
    """Forget all results of test runs of kernels that this process has cached, and end the child process that runs
    them. The file with the results stays."""
    refusal.cache_clear()
    verdicts.forget()
    tell.cache_clear()
    forget_warnings()
    _child.forget()


@cache
def tell(engine: str, following: str, reason: str) -> None:
    """Warn that an engine is refused and which one, `following`, takes over, once per process for each reason."""
    machine = tuning.machine()
    where = f"{machine['chip']}, {machine['system']}, MLX {machine['mlx']}"
    lasts = verdicts.keeping_of(reason)  # how long the stored verdict counts, "always" or "for a day"; "" if not stored
    again = "It counts in this process"
    if lasts:
        long = "" if lasts == "always" else f" {lasts}"
        again = f"{verdicts.file()} keeps this verdict{long}: delete it to try again"
    text = f"engine={engine!r} is not used on {where}: {reason.rstrip('.')}. engine={following!r} takes over. {again}."
    warn_once(text)


def command() -> list[str] | None:
    """Return the command that starts the child process in which kernels are tested. Return None if the executable is
    not a Python interpreter, as in a frozen application."""
    if not has_interpreter():
        return None
    return child_command("from mlx_lstm.recurrence._judge import main; main()")


def try_out(trials: list[Trial]) -> list[Verdict]:
    """Run trials (test runs) of one engine's kernels in the child process. Return their results, up to a trial that
    ended or blocked it. If no child process can run, run the first trial in this process and return only its result."""
    words = command()  # the child's command line, or None if no child can be started
    if words:
        with suppress(CannotBegin):
            return by_child(words, trials)
    from ._judge import verdict as judge  # imported here: few processes need the oracle

    reason = judge(trials[0])
    # `and`: an empty reason (correct kernels) stays empty.
    return [verdict_of(reason and f"{reason} (tried in this process, as no other could be started)")]
