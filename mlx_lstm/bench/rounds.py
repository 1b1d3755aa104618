"""The measurement: every contender in its own process, checked first, then timed in turns, one working at a time."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ..machine import child_environment, module_command
from .cases import CASES, find_contender
from .judge import Judge, Verdict
from .progress import Progress
from .tasks import Size, Task

QUIET = 0.2  # cores that other processes may use in a turn; above, the turn counts as disturbed
CLOCK_TICK = 1 / os.sysconf("SC_CLK_TCK")


LINES = 6
"""How much is kept of what a contender said that fails, of a compiler's page of errors for example."""


class Plan(NamedTuple):
    """How often a contender takes a turn, and what it does in one: untimed runs, then timed ones for some seconds."""

    turns: int
    warmups: int
    seconds: float


class Row(NamedTuple):
    """What was found out about one task. `status` is "timed", "memory only", or why there is no time."""

    task: Task
    status: str
    verdict: Verdict | None = None
    rounds: tuple[tuple[float, ...], ...] = ()  # seconds of the runs in each turn
    peak: int | None = None
    mlx_peak: int | None = None
    threads: int | None = None
    idle_cpu: float = 0.0  # part of a core used while it was to be idle
    disturbed: int = 0  # turns in which other processes used more than QUIET cores

    @property
    def failed(self) -> bool:
        """Whether it could not run, or was refused."""
        return self.status not in ("timed", "memory only")

    @property
    def samples(self) -> list[float]:
        """The seconds of all timed runs."""
        return [seconds for turn in self.rounds for seconds in turn]


class Ratio(NamedTuple):
    """One's median time over the other's: the median over the rounds both took part in, the lowest, the highest."""

    value: float
    low: float
    high: float


def plan(seconds: float, rounds: int, once: float) -> Plan:
    """Turns within a budget of seconds, for a contender that needs `once` for a run.

    One that fits into its share of a round warms up in every turn. A slower one has warmed up by its check run: it runs
    once in a turn, in as many rounds as its budget pays for, and in two at least.
    """
    share = seconds / rounds
    if once <= share:
        return Plan(rounds, 1, share)
    return Plan(min(rounds, max(2, int(seconds / once))), 0, 0.0)


def ratio(row: Row, reference: Row) -> Ratio | None:
    """How many times the reference's time `row` took. None if either was not timed."""
    pairs = zip(row.rounds, reference.rounds, strict=False)
    ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def kept_bytes(size: Size, which: str, dtype: str) -> int:
    """Bytes of what a pass cannot do without: x, gates, h, c and, with `backward`, dx, dWx, dWh, db."""
    T, B, width, H = size
    numbers = T * B * (width + 6 * H)
    if which == "backward":
        numbers += T * B * width + 4 * H * (width + H + 1)
    return numbers * (4 if dtype == "float32" else 2)


def peak_ratio(row: Row) -> float | None:
    """The peak of memory over `kept_bytes`, in the case `lstm`. x is in place before a run starts, so it is added.

    On the GPU the larger of the two counts: resident memory may leave out the GPU's, MLX's own leaves out NumPy's.
    """
    if row.peak is None or row.task.case != "lstm":
        return None
    size, dtype = row.task.size, row.task.dtype
    x = size.T * size.B * size.I * (4 if dtype == "float32" else 2)
    peak = row.peak if row.task.device == "cpu" else max(row.peak, row.mlx_peak or 0)
    return (peak + x) / kept_bytes(size, row.task.which, dtype)


class Process:
    """A worker process; see `worker` for what it may be asked."""

    def __init__(self, task: Task):
        self.said: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (see close)
        self.failed: bool = False
        self.process: subprocess.Popen[str] = subprocess.Popen(
            module_command("mlx_lstm.bench", "--worker", json.dumps(task)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            env=child_environment(),
        )
        assert self.process.stdin and self.process.stdout
        self.requests: IO[str] = self.process.stdin
        self.answers: IO[str] = self.process.stdout

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send one request and wait for the answer. RuntimeError if the worker could not do it."""
        with suppress(BrokenPipeError):  # what it said before it ended follows
            self.requests.write(json.dumps({"do": do, **request}) + "\n")
            self.requests.flush()
        line = self.answers.readline()
        answer = json.loads(line) if line else {"error": f"{ended_by(self.process.wait())}\n{self.heard()}"}
        if "error" in answer:
            self.failed = True
            raise RuntimeError(excerpt(answer["error"]))
        return answer

    def heard(self) -> str:
        """What the worker, which has ended, wrote to stderr."""
        self.said.seek(0)
        return self.said.read()

    def close(self, progress: Progress) -> None:
        """End the worker; one that is in the middle of something is stopped. What it wrote to stderr goes there, unless
        it failed: its row has that."""
        with suppress(BrokenPipeError):
            self.requests.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()
        if not self.failed and self.process.returncode == 0 and (text := self.heard().rstrip()):
            progress.print(text, sys.stderr)
        self.said.close()


def ended_by(code: int) -> str:
    """How a process ended that was not asked to."""
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"the worker ended {how}"


def excerpt(text: str) -> str:
    """At most LINES lines of a text: the first two, those that name an error, else the last ones."""
    lines = [line.rstrip()[:200] for line in text.splitlines() if line.strip()]
    if len(lines) <= LINES:
        return "\n".join(lines)
    named = [line for line in lines[2:] if "error" in line.lower()][: LINES - 3]
    return "\n".join([*lines[:2], *(named or lines[3 - LINES :]), f"... of {len(lines)} lines"])


def measure(
    tasks: list[Task], judge: Judge, *, seconds: float, rounds: int, patience: float, progress: Progress | None = None
) -> list[Row]:
    """Check and time tasks of one size and pass against each other. With rounds = 0: check and memory only."""
    progress = progress or Progress()  # which is silent until it is entered
    rows: dict[Task, Row] = {}
    plans: dict[Task, Plan] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = {}
        for task in tasks:
            progress.say(f"{name_of(task)}: checked")
            processes[task] = Process(task)
            stack.callback(processes[task].close, progress)
            wait_until_quiet(patience)  # the check tells how long a run takes, so how many turns there are
            rows[task], once = check(task, processes[task], judge, str(Path(folder, "results.npz")))
            if not rows[task].failed and rounds:
                plans[task] = plan(seconds, rounds, once)
        for number in range(rounds):
            due = [task for task in plans if number < plans[task].turns and not rows[task].failed]
            for task in due if number % 2 == 0 else reversed(due):
                progress.say(f"{name_of(task)}: timed, round {number + 1} of {rounds}")
                rows[task] = take_turn(rows[task], processes[task], plans[task], patience)
    return [rows[task] for task in tasks]


def name_of(task: Task) -> str:
    """What a task is called in print: its contender, and the engine if it has one."""
    return f"{label(task)} ({task.engine})".removesuffix(" (-)")


def label(task: Task) -> str:
    """What a task's contender is called in print, with its `checkpoint_every` if it has one."""
    name = find_contender(task.contender, task.case).label
    return name if task.every is None else f"{name}, every {task.every}"


def check(task: Task, process: Process, judge: Judge, file: str) -> tuple[Row, float]:
    """Run a task once and judge its results: (row, seconds a run takes)."""
    try:
        answer = process.ask("check", file=file)
    except RuntimeError as error:
        return Row(task, f"failed: {error}"), 0.0
    with np.load(file) as results:
        verdict = judge.judge(dict(results), CASES[task.case].passes[task.which])
    status = f"refused: {verdict.refusal}" if verdict.refusal else "memory only"
    memory = {name: answer[name] for name in ("peak", "mlx_peak", "threads")}
    return Row(task, status, verdict, **memory), answer["once"]


def take_turn(row: Row, process: Process, plan: Plan, patience: float) -> Row:
    """One turn of timed runs."""
    wait_until_quiet(patience)
    wall, busy = time.perf_counter(), busy_seconds()
    try:
        answer = process.ask("time", seconds=plan.seconds, warmups=plan.warmups)
    except RuntimeError as error:
        return row._replace(status=f"failed: {error}", rounds=())
    wall, busy = time.perf_counter() - wall, busy_seconds() - busy
    return row._replace(
        status="timed",
        rounds=(*row.rounds, tuple(answer["samples"])),
        idle_cpu=answer["idle_cpu"],
        disturbed=row.disturbed + (busy - answer["cpu"] > QUIET * wall),
    )


def wait_until_quiet(patience: float) -> None:
    """Wait for other processes to use less than QUIET cores, but no longer than `patience` seconds."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        before = busy_seconds()
        time.sleep(0.1)
        if busy_seconds() - before < QUIET * 0.1 + CLOCK_TICK:
            return


def busy_seconds() -> float:
    """CPU time all processes have used so far, or a hypervisor took away. 0 where the system has no /proc/stat."""
    try:
        with open("/proc/stat") as file:
            user, nice, kernel, _, _, *others = map(int, file.readline().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + kernel + sum(others)) * CLOCK_TICK
