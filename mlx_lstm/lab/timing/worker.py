"""Run one contender (an implementation) in a process that does nothing else. It answers two kinds of requests:

    {"do": "check", "file": F}                   run once, save the results to F (.npz); answer the run's time and
                                                 the peak memory
    {"do": "time", "seconds": S, "warmups": N}   run N times untimed, then timed until S seconds have passed; answer
                                                 each run's seconds and the CPU time of the whole turn

Between requests the process waits in a blocking read. It answers only after SETTLE seconds, when the threads of the
libraries have stopped spinning (waiting in a busy loop), so that they do not disturb the next process. An answer to
"time" also contains the CPU time that this process used while it should have been idle.
"""

import ctypes
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from .cases import CASES, find_contender
from .tasks import Size, Task, Work

SETTLE = 0.25  # seconds until threads sleep; those of OpenBLAS spin for 0.1 s, those of torch for less
SHORT = 3.0  # seconds; a shorter first run is mostly set-up, so a second run is timed


def answers(text: str) -> Callable[..., dict[str, Any]]:
    """Return the function that answers requests about a task. text: the task as JSON."""
    contender, engine, size, *rest = json.loads(text)
    task, workers = Task(contender, engine, Size(*size), *rest), list[Worker]()

    def answer(do: str, **request: Any) -> dict[str, Any]:
        if not workers:  # made at the first request, so that an error becomes an answer
            workers.append(Worker(task))
        return {"check": workers[0].check, "time": workers[0].time}[do](**request)

    return answer


class Worker:
    """A task that is ready to be timed: a run of two time steps has started its libraries' threads."""

    def __init__(self, task: Task):
        contender, draw = find_contender(task.contender, task.case), CASES[task.case].draw
        if contender.needs == "mlx":
            mx.set_default_device(mx.cpu if task.device == "cpu" else mx.gpu)
        start = task._replace(size=task.size._replace(T=2))
        contender.prepare(draw(start.size, task.dtype), start).run()
        self.work: Work = contender.prepare(draw(task.size, task.dtype), task)
        self.idle_since: tuple[float, float] = time.perf_counter(), time.process_time()
        self.idle_wall: float = 0.0
        self.idle_cpu: float = 0.0

    def check(self, file: str) -> dict[str, Any]:
        """Run the task once and save its results to a file. The answer contains the peak of the memory in bytes during
        this run, without the inputs: `peak` for the process, `mlx_peak` as MLX counts it. It also contains `once`, the
        seconds of a run. If the first run is short, it is mostly set-up, and a second run is timed."""
        release_memory()
        memory = PeakMemory()
        once, _, results = self.run()
        peak, mlx_peak = memory.above_start()
        tensors: dict[str, Any] = {**self.work.tensors(results)}
        np.savez(file, **tensors)
        del results
        if once < SHORT:
            once, *_ = self.run()
        answer = {"once": once, "peak": peak, "mlx_peak": mlx_peak, "threads": self.work.threads}
        self.pause()  # the idle time begins here
        return answer

    def time(self, seconds: float, warmups: int) -> dict[str, Any]:
        """Run the task for this number of seconds, at least once, after `warmups` untimed runs. In the answer,
        `samples` has the seconds of each timed run, `builds` the seconds to build its graph, if the task has one, `cpu`
        the CPU time of the whole turn, and `idle_cpu` the CPU time per second between turns."""
        self.resume()
        start = time.process_time()
        for _ in range(warmups):
            self.run()
        samples: list[float] = []
        builds: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or not samples:
            sample, built, _ = self.run()
            samples.append(sample)
            builds += [] if built is None else [built]
        self.pause()
        idle_cpu = self.idle_cpu / self.idle_wall
        return {"samples": samples, "builds": builds, "cpu": time.process_time() - start, "idle_cpu": idle_cpu}

    def run(self) -> tuple[float, float | None, Any]:
        """Run the task once; return (seconds, seconds to build the graph or None, results)."""
        start, built = time.perf_counter(), None
        if self.work.build is None:
            results = self.work.run()
        else:
            results = self.work.build()
            built = time.perf_counter() - start
            mx.eval(results)
        seconds = time.perf_counter() - start
        return seconds if self.work.slept is None else seconds - self.work.slept(), built, results

    def pause(self) -> None:
        """Wait until the threads of the libraries have stopped spinning. Then note the time and the CPU time of this
        process: the idle time begins."""
        time.sleep(SETTLE)
        self.idle_since = time.perf_counter(), time.process_time()

    def resume(self) -> None:
        """End the idle time that began with `pause`: add its length, and the CPU time used in it, to the totals."""
        wall, cpu = self.idle_since
        self.idle_wall += time.perf_counter() - wall
        self.idle_cpu += time.process_time() - cpu


def release_memory() -> None:
    """Return free memory to the system. Otherwise the next run could reuse it and would seem to need less memory. On
    systems without glibc, malloc keeps its free memory."""
    gc.collect()
    mx.clear_cache()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class PeakMemory:
    """Measures two peaks of memory since this object was made: of the process's resident memory, and of MLX's own
    count. On Linux the kernel's peak is reset first. Other systems cannot reset it: there the result is the increase
    over the earlier peak, which may be too small, because building the inputs needed memory for a moment."""

    def __init__(self) -> None:
        mx.reset_peak_memory()
        self.mlx_start: int = mx.get_active_memory()
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # "5" resets the peak, VmHWM
            self.start: int = linux_memory("VmRSS")
        except OSError:
            self.start = highest_resident()

    def above_start(self) -> tuple[int, int]:
        """Return (resident memory, MLX's own count): the peaks since this object was made, minus the values at that
        time, in bytes."""
        return max(highest_resident() - self.start, 0), mx.get_peak_memory() - self.mlx_start


def highest_resident() -> int:
    """Return the peak of resident memory in bytes. On Linux read /proc, because `ru_maxrss` starts at the peak of
    the parent process."""
    try:
        return linux_memory("VmHWM")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def linux_memory(field: str) -> int:
    """Return a memory figure of this process in bytes, such as "VmRSS". field: its name in /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{field}:"))
