"""Measure the times of contenders (implementations to compare). Each contender runs in a separate process. The results
are checked first; then the contenders are timed in turns, one at a time."""

import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...ground.child import LIMIT, Child, ChildError
from ...oracle.verdict import Judge, Verdict
from ..child import start
from ..progress import Progress
from .cases import CASES, find_contender
from .tasks import Task, needed_bytes

QUIET = 0.2  # number of cores; a turn in which other processes use more is called disturbed
CLOCK_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Plan(NamedTuple):
    """How one implementation is timed. turns: how often each implementation gets its turn. warmups: the number of
    untimed runs at the start of a turn. seconds: the time of the timed runs in a turn; 0 for a single run."""

    turns: int
    warmups: int
    seconds: float


class Measurement(NamedTuple):
    """The results of one task, that is of one implementation at one size. status: "timed", "memory only", or the reason
    why there is no time. verdict: the comparison of its results with float64."""

    task: Task
    status: str
    verdict: Verdict | None = None
    rounds: tuple[tuple[float, ...], ...] = ()  # seconds of the runs in each turn
    peak: int | None = None  # bytes that the first run needed besides its inputs
    mlx_peak: int | None = None  # the same, counted by MLX
    threads: int | None = None  # the number that the framework reports
    idle_cpu: float = 0.0  # fraction of a core used while the process should have been idle
    disturbed: int = 0  # turns in which other processes used more than QUIET cores
    builds: tuple[float, ...] = ()  # seconds of each run to build the graph; empty without a graph
    hung: bool = False  # whether the process gave no answer in time

    @property
    def failed(self) -> bool:
        return self.status not in ("timed", "memory only")

    @property
    def samples(self) -> list[float]:
        return [seconds for turn in self.rounds for seconds in turn]


class Ratio(NamedTuple):
    """The time of one implementation divided by the time of another: the median, lowest and highest ratio over the
    rounds in which both ran."""

    value: float
    low: float
    high: float


def plan(seconds: float, rounds: int, once: float) -> Plan:
    """Plan how to time a contender (an implementation) within `seconds`; it has at most one turn in each of the rounds.
    once: the seconds of one run. If a run fits into seconds / rounds, the contender has a turn in every round, and
    warms up in each. A slower one needs no warm-up, because it has already run once to check its results. It runs once
    per turn, and has as many turns as fit into `seconds`, but at least two."""
    share = seconds / rounds
    if once <= share:
        return Plan(rounds, 1, share)
    return Plan(min(rounds, max(2, int(seconds / once))), 0, 0.0)


def ratio(row: Measurement, reference: Measurement) -> Ratio | None:
    """Return the ratio of the times of `row` and `reference`, or None if one of them was not timed. Turn n of both was
    in round n, so the medians of the same round are divided. If one of them has fewer turns, the later rounds of the
    other are left out."""
    pairs = zip(row.rounds, reference.rounds, strict=False)
    ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def peak_ratio(row: Measurement) -> float | None:
    """Return the peak memory of a task divided by `needed_bytes`, the least number of bytes that its pass must hold.
    Return None if the peak is unknown, or if the task belongs to another benchmark case than `lstm`.

    The measured peak does not include x, which exists before the run, so the size of x is added. On the GPU the peak
    is the larger one of two values: the process's resident memory may not include the GPU's memory, and MLX's own
    count does not include NumPy's memory.
    """
    if row.peak is None or row.task.case != "lstm":
        return None
    size, dtype = row.task.size, row.task.dtype
    x = size.T * size.B * size.I * (4 if dtype == "float32" else 2)
    peak = row.peak if row.task.device == "cpu" else max(row.peak, row.mlx_peak or 0)
    return (peak + x) / needed_bytes(size, row.task.which, dtype)


def measure(
    tasks: list[Task], judge: Judge, *, seconds: float, rounds: int, patience: float, progress: Progress | None = None
) -> list[Measurement]:
    """Check the results of `tasks`, then time them in turns: in each round every task runs once for a while. All tasks
    must have the same size and the same pass (forward or backward). With rounds = 0 only check the results and measure
    the memory. seconds: how long each task is timed, all rounds together. patience: how many seconds a turn may wait
    until other processes pause."""
    progress = progress or Progress()  # a Progress that is not entered by `with` prints nothing
    rows: dict[Task, Measurement] = {}
    plans: dict[Task, Plan] = {}
    turn_seconds: dict[Task, float] = {}  # expected seconds of a turn, to estimate the time left
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        children: dict[Task, Child] = {}
        for task in tasks:
            progress.say(f"comparing {name_of(task)} with float64")
            children[task] = start("timing", json.dumps(task))
            stack.callback(close, task, children[task], rows, progress)
            wait_until_quiet(patience)  # the check measures how long a run takes, which decides the number of turns
            rows[task], once = check(task, children[task], judge, str(Path(folder, "results.npz")))
            if not rows[task].failed and rounds:
                plans[task] = plan(seconds, rounds, once)
                turn_seconds[task] = max(plans[task].seconds + plans[task].warmups * once, once)
        for number in range(rounds):
            # In every second round the tasks run in the reverse order, so that no task is always first.
            due = [task for task in plans if number < plans[task].turns and not rows[task].failed]
            for task in due if number % 2 == 0 else reversed(due):
                left = sum(turn_seconds[one] * (plans[one].turns - len(rows[one].rounds)) for one in plans)
                progress.say(f"timing {name_of(task)}, round {number + 1} of {rounds}", left)
                rows[task] = take_turn(rows[task], children[task], plans[task], patience)
    return [rows[task] for task in tasks]


def close(task: Task, child: Child, rows: dict[Task, Measurement], progress: Progress) -> None:
    """End the child process of a task. Print what the child wrote to stderr, unless the task failed: then the
    measurement already contains this text."""
    said = child.close()
    if said and task in rows and not rows[task].status.startswith("failed"):
        progress.print(said, sys.stderr)


def name_of(task: Task) -> str:
    """Return the name of a task for printing: its contender, and its engine if it has one."""
    return f"{label(task)} ({task.engine})".removesuffix(" (-)")


def label(task: Task) -> str:
    """Return the name of a task's contender for printing, with the value of `checkpoint_every` if the task has one."""
    name = find_contender(task.contender, task.case).label
    return name if task.every is None else f"{name}, every {task.every}"


def check(task: Task, child: Child, judge: Judge, file: str) -> tuple[Measurement, float]:
    """Run a task once and compare the results with float64. Return (the measurement, the seconds of one run)."""
    try:
        answer = child.ask(limit_of(task), do="check", file=file)
    except ChildError as error:
        return Measurement(task, f"failed: {error}", hung=error.hung), 0.0  # 0.0 is not used
    with np.load(file) as results:
        verdict = judge.judge(dict(results), CASES[task.case].passes[task.which])
    status = f"refused: {verdict.refusal}" if verdict.refusal else "memory only"  # until it is timed
    memory = {name: answer[name] for name in ("peak", "mlx_peak", "threads")}
    return Measurement(task, status, verdict, **memory), answer["once"]


def limit_of(task: Task) -> float:
    """Return the number of seconds after which a run of a task counts as hung: LIMIT, plus the time of a very slow
    machine, which needs 10 ms for each step and computes 1e9 multiplications and additions per second."""
    T, B, I, H = task.size
    products = 3 * 2 * T * B * 4 * H * (I + H)  # of an LSTM: forward, and twice as many backward
    return LIMIT + 0.01 * T + products / 1e9


def take_turn(row: Measurement, child: Child, plan: Plan, patience: float) -> Measurement:
    """Time an implementation for one more turn. Return the measurement with the new times added."""
    wait_until_quiet(patience)
    wall, busy = time.perf_counter(), busy_seconds()  # busy: CPU time of all processes
    try:
        limit = plan.seconds + limit_of(row.task)
        answer = child.ask(limit, do="time", seconds=plan.seconds, warmups=plan.warmups)
    except ChildError as error:
        return row._replace(status=f"failed: {error}", rounds=(), hung=error.hung)
    wall, busy = time.perf_counter() - wall, busy_seconds() - busy
    return row._replace(
        status="timed",
        rounds=(*row.rounds, tuple(answer["samples"])),
        builds=(*row.builds, *answer.get("builds", ())),
        idle_cpu=answer["idle_cpu"],
        disturbed=row.disturbed + (busy - answer["cpu"] > QUIET * wall),
    )


def wait_until_quiet(patience: float) -> None:
    """Wait until other processes use less than QUIET cores for 0.1 s, but no longer than `patience` seconds. One clock
    tick more is allowed, because the system counts CPU time in ticks."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        before = busy_seconds()
        time.sleep(0.1)
        if busy_seconds() - before < QUIET * 0.1 + CLOCK_TICK:
            return


def busy_seconds() -> float:
    """Return the CPU time of all processes so far, with the time that a hypervisor took; 0 without /proc/stat."""
    try:
        with open("/proc/stat") as file:
            # The two values that are left out are the idle time and the time of waiting for a disk.
            user, nice, kernel, _, _, *others = map(int, file.readline().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + kernel + sum(others)) * CLOCK_TICK
