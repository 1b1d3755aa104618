"""Measure which engines are fastest on this Mac, for the option `--tune`. First, time the engine `fused` with several
cuts. A cut says how many sequences of the batch a threadgroup computes, and how many registers of a thread hold no
weights. Then time the Metal engines `fused` and `stepwise`. Write the results to a table, by which the library chooses
the engine."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..engines import tuning
from ..engines.cells import LSTMCell
from ..engines.choice import FUSED_LIMIT, METAL_ENGINES, has_metal
from ..engines.metal.fused import LayerSize, rows_for
from ..engines.problem import Cut
from ..ground.files import new_mode, write_whole
from ..lab.cases import DTYPES
from ..lab.timing.cases.lstm import draw, prepare_ours
from ..lab.timing.judge import judge_layer
from ..lab.timing.tasks import PASSES, Size, Task, Work
from ..recurrence import unguarded


class Grid(NamedTuple):
    """What the command `--tune` measures, to compare the speed of the Metal engines `fused` and `stepwise`.

    units: the numbers of hidden units H, up to the largest H that `fused` can run. batches: the batch sizes B; the
    engine that is faster at a B is also used for larger batches, up to the next B. steps, checked: the time steps of a
    timed run, and of the check before it. turns, seconds: how many times each engine is timed, and for how many seconds
    each time.
    """

    units: tuple[int, ...] = tuple(range(32, FUSED_LIMIT["lstm"] + 1, 32))
    batches: tuple[int, ...] = (1, 8, 32, 128)
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    steps: int = 32
    checked: int = 4
    turns: int = 5
    seconds: float = 0.01


ROWS = (1, 2, 4, 8)
SPARE = (8, 16, 32)
"""The cuts of `fused` to try. ROWS: the sequences that a threadgroup computes (for 8 it uses matrix instructions).
SPARE: the registers of a thread that hold no weights."""

CUT_AT = 128
"""The number of hidden units H at which the cuts of `fused` are timed. If this H is not measured, the next smaller H is
used."""

WORTH = 0.97
"""A measured cut of `fused` replaces the built-in cut if it takes at most this fraction of the built-in cut's time. The
fraction is below 1, because measured times vary."""


def tune(file: str | None, grid: Grid = Grid()) -> int:  # noqa: B008 (the default is a tuple and never changes)
    """Measure which Metal engine is faster, print the measurements and write the table to `file` (None: the one that
    the library reads). Return the exit code: 0, or 2 if there is no Metal or the file cannot be written."""
    if not has_metal():
        print(
            "nothing to tune: MLX has no Metal back end on this machine, and only Metal has two engines to choose from",
            file=sys.stderr,
        )
        return 2
    path = Path(file) if file else tuning.cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new_mode(path.parent)  # creates a file for a moment, to find out now whether the folder is writable
    except OSError as error:
        print(cannot_write(path, error), file=sys.stderr)
        return 2
    print("\n".join(f"{name:13}{value}" for name, value in tuning.machine().items()), flush=True)
    engines: dict[str, dict[int, tuning.Row]] = {dtype: {} for dtype in grid.dtypes}
    measured: list[dict[str, object]] = []
    cuts: list[tuple[str, int, int, int]] = []
    for dtype, B in product(grid.dtypes, grid.batches):
        with unguarded():  # no trial runs of kernels: each measurement checks the results
            cut = best_cut(dtype, B, grid)
            with tuning.trying(cut):
                points = measure_row(dtype, B, grid)
        cuts += [(dtype, B, cut.rows, cut.spare)] if cut else []
        engines[dtype][B] = row_of(points)
        measured += points
    try:
        write(path, engines, measured, cuts)
    except OSError as error:
        print(cannot_write(path, error), file=sys.stderr)
        return 2
    tuning.current.cache_clear()
    print(f"\nwritten to {path}: it counts on this machine, with these versions and kernels only")
    if file:
        print(f"for a program to go by it: mlx_lstm.engines.tuning.use({file!r})")
    return 0


def cannot_write(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error}; --tune-file names another place"


def write(
    file: Path,
    engines: dict[str, dict[int, tuning.Row]],
    measured: list[dict[str, object]],
    cuts: list[tuple[str, int, int, int]],
) -> None:
    """Write the table and the measurements to a file. engines: the table, by dtype and B. measured: the measurement of
    each size, as `measure_point` returns it. cuts: those that beat the built-in cut, as (dtype, B, rows, spare)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": tuning.machine(), "engines": engines, "cuts": cuts, "measured": measured}
    text = json.dumps(content, indent=1) + "\n"
    write_whole(file, lambda partial: partial.write_text(text), force=True)  # replaces an older table


def best_cut(dtype: str, B: int, grid: Grid) -> Cut | None:
    """Return the fastest cut of `fused` at this batch size, or None if no cut is faster than the one that the library
    chooses by its own rule (`rows_for`). A cut has two numbers: rows, the sequences that a threadgroup computes, and
    spare, the registers that hold no weights. The rows are chosen first, then the registers. A cut replaces the best
    cut so far only if its time is at most `WORTH` times that cut's time, or if that cut failed."""
    H = max((H for H in grid.units if H <= CUT_AT), default=min(grid.units))
    size, best = Size(grid.steps, B, H, H), None
    layer = LayerSize(LSTMCell(), B, H, DTYPES[dtype].size, directions=1, cores=tuning.gpu_cores())
    for step in ("rows", "spare"):
        rows = best.rows if best else rows_for(layer)  # as in the built-in cut
        tried = [Cut(rows) for rows in ROWS] if step == "rows" else [Cut(rows, spare) for spare in SPARE]
        times = measure({cut: ("fused", cut) for cut in (best, *tried)}, size, dtype, grid)
        words = {cut: f"rows {cut.rows} spare {cut.spare}" if cut else "by rule" for cut in times}
        shown = "  ".join(f"{words[cut]} {took(times[cut])}" for cut in times)
        print(f"{dtype} B = {B} H = {H}:  {shown}", flush=True)
        right = {cut: time for cut, time in times.items() if not isinstance(time, str)}
        fastest = min(right, key=right.__getitem__, default=best)
        if best not in right or right[fastest] <= WORTH * right[best]:
            best = fastest
    return best


def measure_row(dtype: str, B: int, grid: Grid) -> list[dict[str, object]]:
    """Measure both Metal engines for one dtype and batch size, at each H in ascending order. Stop when `stepwise` was
    faster at two H in a row: it is then assumed to be faster at all larger H. A single H could be chance."""
    points: list[dict[str, object]] = []
    for H in grid.units:
        points.append(measure_point(Size(grid.steps, B, H, H), dtype, grid))
        each = "  ".join(f"{engine} {took(points[-1][engine])}" for engine in METAL_ENGINES)
        print(f"{dtype} B = {B} H = {H}:  {each}  ->  {points[-1]['engine']}", flush=True)
        if [point["engine"] for point in points[-2:]] == ["stepwise"] * 2:
            break
    return points


def measure_point(size: Size, dtype: str, grid: Grid) -> dict[str, object]:
    """Measure both Metal engines at one size. Return a dict with the dtype, B, H, the faster engine, and for each
    engine the milliseconds of a forward and backward pass, or the reason why the engine was discarded."""
    cut = tuning.cut(DTYPES[dtype], size.B)  # the cut that `tune` has selected
    times = measure({engine: (engine, cut) for engine in METAL_ENGINES}, size, dtype, grid)
    right = {engine: time for engine, time in times.items() if not isinstance(time, str)}
    fastest = min(right, key=right.__getitem__, default="ops")  # plain MLX, if both kernels were discarded
    return {"dtype": dtype, "B": size.B, "H": size.H, **times, "engine": fastest}


Name = TypeVar("Name")


def measure(
    contenders: Mapping[Name, tuple[str, Cut | None]], size: Size, dtype: str, grid: Grid
) -> dict[Name, float | str]:
    """Time engines in turns. contenders: {name: (engine, cut)}; None is the built-in cut. Return for each name the
    milliseconds of a forward and backward pass, or why it was discarded."""
    times: dict[Name, float | str] = {}
    ready: dict[Name, Work] = {}
    for name, (engine, cut) in contenders.items():
        try:
            with tuning.trying(cut):
                # Check the results first, over few steps, because the float64 reference takes long.
                refusal = refusal_of(engine, size._replace(T=grid.checked), dtype)
                if not refusal:
                    ready[name] = prepare(engine, size, dtype)
                    ready[name].run()
        # Catch every exception, because a compiler or a driver may raise any class. The engine then does not work on
        # this machine at this size.
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}".splitlines()[0]
            ready.pop(name, None)
        times[name] = f"discarded: {refusal}"  # without a refusal the time replaces this text
    turns: dict[Name, list[float]] = {name: [] for name in ready}
    for _ in range(grid.turns):
        for name, work in ready.items():
            with tuning.trying(contenders[name][1]):
                turns[name].append(seconds_per_run(work.run, grid.seconds))
    return times | {name: round(1e3 * statistics.median(each), 4) for name, each in turns.items()}


def refusal_of(engine: str, size: Size, dtype: str) -> str:
    """Return what is wrong with an engine's results, or "" if they are right. Each result may differ from float64 by
    its error bound, and from the result of the engine `ops` by twice the bound, because both engines have errors."""
    numbers = draw(size, dtype)
    judge = judge_layer(numbers, dtype, backward=True)
    names = PASSES["backward"]
    results, others = (work.tensors(work.run()) for work in (prepare(word, size, dtype) for word in (engine, "ops")))
    verdict = judge.judge(results, names)
    if verdict.refusal:
        return verdict.refusal
    against_ops = judge._replace(exact=others, bounds={name: 2 * bound for name, bound in judge.bounds.items()})
    refusal = against_ops.judge(results, names).refusal
    return f"against ops: {refusal}" if refusal else ""


def prepare(engine: str, size: Size, dtype: str) -> Work:
    return prepare_ours(draw(size, dtype), Task("ours", engine, size, "backward", dtype, "gpu"))


def seconds_per_run(run: Callable[[], Any], seconds: float) -> float:
    """Call `run` as often as fits into `seconds`, at least once, and return the mean time of a call."""
    start, runs = time.perf_counter(), 0
    while not runs or time.perf_counter() - start < seconds:
        run()
        runs += 1
    return (time.perf_counter() - start) / runs


def row_of(points: Sequence[Mapping[str, Any]]) -> tuning.Row:
    """Return the fastest engine for each range of H at one batch size, as pairs (largest H of the range, engine).
    points: the measurements in ascending order of H."""
    pairs = [(point["H"], point["engine"]) for point in points]
    following = [engine for _, engine in pairs[1:]] + [""]
    return tuple((H, engine) for (H, engine), after in zip(pairs, following, strict=True) if engine != after)


def took(time: object) -> str:
    return time if isinstance(time, str) else f"{time:.3f} ms"
