"""`--tune`: time the two Metal engines against each other on this Mac, the ways `fused` can cut a problem before that,
and write the table the library then goes by."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from ..engines import tuning
from ..engines.cells import LSTMCell
from ..engines.choice import FUSED_LIMIT, METAL_ENGINES
from ..engines.metal.fused import rows_for
from ..engines.problem import Cut
from ..recurrence import unguarded
from .cases.lstm import draw, prepare_ours
from .judge import appoint
from .tasks import DTYPES, PASSES, Size, Task, Work


class Grid(NamedTuple):
    """What is measured: the largest H of `fused` and some below, batch sizes from which on a row of the table holds,
    dtypes; time steps of a timed run and of the check before; turns of each engine and their seconds."""

    units: tuple[int, ...] = tuple(range(32, FUSED_LIMIT["lstm"] + 1, 32))
    batches: tuple[int, ...] = (1, 8, 32, 128)
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    steps: int = 32
    checked: int = 4
    turns: int = 5
    seconds: float = 0.01


ROWS = (1, 2, 4, 8)
SPARE = (8, 16, 32)
"""Batch rows of a threadgroup of `fused`, 8 in matrices, and registers it may leave without weights: what is tried."""

CUT_AT = 128
"""The H at which the cuts are timed, or the next smaller one: the largest that `fused` is predicted to win."""

WORTH = 0.97
"""Of the time of the cut by rule: what another one must not exceed to take its place, as measurements are noisy."""


def tune(file: str | None, grid: Grid = Grid()) -> int:  # noqa: B008 (a tuple)
    """Measure, print, write. The exit code: 0, or 1 if this is no Mac or the file cannot be written."""
    if not mx.metal.is_available():
        print(
            "nothing to tune: MLX has no Metal back end on this machine, and only Metal has two engines to choose of",
            file=sys.stderr,
        )
        return 1
    path = Path(file) if file else tuning.cache_file()
    print("\n".join(f"{name:13}{value}" for name, value in tuning.machine().items()), flush=True)
    engines: dict[str, dict[int, tuning.Row]] = {dtype: {} for dtype in grid.dtypes}
    measured: list[dict[str, object]] = []
    cuts: list[tuple[str, int, int, int]] = []
    for dtype, B in product(grid.dtypes, grid.batches):
        with unguarded():
            cut = best_cut(dtype, B, grid)
            with tuning.trying(cut):
                found = measure_row(dtype, B, grid)
        cuts += [(dtype, B, cut.rows, cut.spare)] if cut else []
        engines[dtype][B] = row_of(found)
        measured += found
    try:
        write(path, engines, measured, cuts)
    except OSError as error:
        print(f"cannot write {path}: {error}; --tune-file names another place", file=sys.stderr)
        return 1
    tuning.current.cache_clear()
    print(f"\nwritten to {path}: it counts on this machine, with these versions and kernels only")
    if file:
        print(f"for a program to go by it: mlx_lstm.engines.tuning.use({file!r})")
    return 0


def write(
    file: Path,
    engines: dict[str, dict[int, tuning.Row]],
    measured: list[dict[str, object]],
    cuts: list[tuple[str, int, int, int]],
) -> None:
    """Write a table, with what was measured for it. OSError if the file cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": tuning.machine(), "engines": engines, "cuts": cuts, "measured": measured}
    text = json.dumps(content, indent=1)
    part = file.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(file)


def best_cut(dtype: str, B: int, grid: Grid) -> Cut | None:
    """How `fused` is fastest at this batch size: first the rows, then the registers to spare. None: by its rules."""
    H = max((H for H in grid.units if H <= CUT_AT), default=min(grid.units))
    size, best = Size(grid.steps, B, H, H), None
    for step in ("rows", "spare"):
        rows = best.rows if best else rows_for(LSTMCell(), B, H, 1)
        tried = [Cut(rows) for rows in ROWS] if step == "rows" else [Cut(rows, spare) for spare in SPARE]
        times = measure({cut: ("fused", cut) for cut in (best, *tried)}, size, dtype, grid)
        print(
            f"{dtype} B = {B} H = {H}:  " + "  ".join(f"{text_of(cut)} {took(times[cut])}" for cut in times), flush=True
        )
        right = {cut: time for cut, time in times.items() if not isinstance(time, str)}
        fastest = min(right, key=right.__getitem__, default=best)
        if best not in right or right[fastest] <= WORTH * right[best]:
            best = fastest
    return best


def text_of(cut: Cut | None) -> str:
    """A cut in words."""
    return f"rows {cut.rows} spare {cut.spare}" if cut else "by rule"


def measure_row(dtype: str, B: int, grid: Grid) -> list[dict[str, object]]:
    """Each H of one dtype and batch size, ascending, until `fused` has lost twice in a row."""
    found: list[dict[str, object]] = []
    for H in grid.units:
        found.append(measure_point(Size(grid.steps, B, H, H), dtype, grid))
        print(point_text(found[-1]), flush=True)
        if [point["engine"] for point in found[-2:]] == ["stepwise"] * 2:
            break
    return found


def measure_point(size: Size, dtype: str, grid: Grid) -> dict[str, object]:
    """Milliseconds of each engine for forward and backward, or why it does not count; the faster one's word."""
    cut = tuning.cut(DTYPES[dtype], size.B)
    times = measure({engine: (engine, cut) for engine in METAL_ENGINES}, size, dtype, grid)
    right = {engine: time for engine, time in times.items() if not isinstance(time, str)}
    fastest = min(right, key=right.__getitem__, default="ops")
    return {"dtype": dtype, "B": size.B, "H": size.H, **times, "engine": fastest}


Name = TypeVar("Name")


def measure(
    contenders: Mapping[Name, tuple[str, Cut | None]], size: Size, dtype: str, grid: Grid
) -> dict[Name, float | str]:
    """Milliseconds of each engine, cut as it says, for forward and backward, in turns; or why it does not count."""
    times: dict[Name, float | str] = {}
    ready: dict[Name, Work] = {}
    for name, (engine, cut) in contenders.items():
        try:
            with tuning.trying(cut):
                refusal = refusal_of(engine, size._replace(T=grid.checked), dtype)
                if not refusal:
                    ready[name] = prepare(engine, size, dtype)
                    ready[name].run()
        # Whatever a compiler or a driver raises, the engine is not for this machine at this size.
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}".splitlines()[0]
            ready.pop(name, None)
        times[name] = f"discarded: {refusal}"
    turns: dict[Name, list[float]] = {name: [] for name in ready}
    for _ in range(grid.turns):
        for name, work in ready.items():
            with tuning.trying(contenders[name][1]):
                turns[name].append(seconds_per_run(work.run, grid.seconds))
    return times | {name: round(1e3 * statistics.median(each), 4) for name, each in turns.items()}


def refusal_of(engine: str, size: Size, dtype: str) -> str:
    """What is wrong with an engine's results: each within its bound of float64, and within both bounds of `ops`."""
    numbers = draw(size, dtype)
    judge = appoint(numbers, dtype, backward=True)
    names = PASSES["backward"]
    results, others = (of.tensors(of.run()) for of in (prepare(word, size, dtype) for word in (engine, "ops")))
    verdict = judge.judge(results, names)
    if verdict.refusal:
        return verdict.refusal
    against_ops = judge._replace(exact=others, bounds={name: 2 * bound for name, bound in judge.bounds.items()})
    refusal = against_ops.judge(results, names).refusal
    return f"against ops: {refusal}" if refusal else ""


def prepare(engine: str, size: Size, dtype: str) -> Work:
    """A layer's forward and backward pass on an engine."""
    return prepare_ours(draw(size, dtype), Task("ours", engine, size, "backward", dtype, "gpu"))


def seconds_per_run(run: Callable[[], Any], seconds: float) -> float:
    """The mean over as many runs as `seconds` have room for, one at least."""
    start, runs = time.perf_counter(), 0
    while not runs or time.perf_counter() - start < seconds:
        run()
        runs += 1
    return (time.perf_counter() - start) / runs


def row_of(found: Sequence[Mapping[str, Any]]) -> tuning.Row:
    """The row of a table: of neighbours with the same engine the largest H."""
    points = [(point["H"], point["engine"]) for point in found]
    following = [engine for _, engine in points[1:]] + [""]
    return tuple((H, engine) for (H, engine), after in zip(points, following, strict=True) if engine != after)


def point_text(point: dict[str, object]) -> str:
    """A line of what was measured."""
    each = "  ".join(f"{engine} {took(point[engine])}" for engine in METAL_ENGINES)
    return f"{point['dtype']} B = {point['B']} H = {point['H']}:  {each}  ->  {point['engine']}"


def took(time: object) -> str:
    """Milliseconds, or why there are none."""
    return time if isinstance(time, str) else f"{time:.3f} ms"
