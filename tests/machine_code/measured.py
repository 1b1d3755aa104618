"""Print the times that a Mac has measured beside the predicted ones, for the option --model REPORT.

REPORT is the file that `python -m mlx_lstm.check` writes. With --full the file also contains measurements that check
uncertain assumptions of the model (`DOUBTS`).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlx_lstm.lab.cases import DTYPES
from mlx_lstm.lab.report import table
from mlx_lstm.lab.timing.tasks import Size

from .times import CHIPS, Chip, evaluation_seconds, host_seconds, of_mlx, ours

MLX = "mlx.nn.LSTM"


class Time(NamedTuple):
    """The measured and the predicted seconds of one pass of one layer. built, evaluated: the two parts of a call, as
    (measured, predicted); measured is None if the report only has the time of the whole call. total: both parts
    together."""

    size: Size
    which: str
    dtype: str
    layer: str
    built: tuple[float | None, float]
    evaluated: tuple[float | None, float]
    total: tuple[float, float]


def chip_of(machine: Mapping[str, str]) -> tuple[Chip, str]:
    """Return (chip, note) for the machine of a report. The chip has the machine's own number of cores. If the
    machine's chip is not in `CHIPS`, the one with the nearest number of cores replaces it, and the note names it."""
    counted = machine.get("gpu_cores", "")
    cores = int(counted) if re.fullmatch(r"[0-9]+", counted) else None
    name = machine.get("chip", "unknown").removeprefix("Apple ")
    same = next((chip for chip in CHIPS if chip.name == name), None)
    chip = same or min(CHIPS, key=lambda chip: abs(chip.cores - (cores or 10)))
    note = f"{name}: {cores or chip.cores} GPU cores" + ("" if cores else ", not counted")
    return chip._replace(cores=cores or chip.cores), note + (
        "" if same else f"; clock and memory as of the {chip.name}"
    )


def times_of(report: Mapping[str, Any], chip: Chip) -> list[Time]:
    """Return all times in a report that the model can predict: those of our Metal engines and of `mlx.nn.LSTM`."""
    times = []
    for record in report["times"]:
        layer = MLX if record["contender"] == MLX else record["engine"]
        if layer not in ("fused", "stepwise", MLX) or not record["median_s"]:
            continue
        size, which, dtype = Size(*(int(record[name]) for name in "TBIH")), record["pass"], record["dtype"]
        arguments = size, DTYPES[dtype]
        mine = layer != MLX
        problem, graph = ours(*arguments, layer, which, cores=chip.cores) if mine else of_mlx(*arguments, which)
        built, evaluated = host_seconds(layer, which, size.T), evaluation_seconds(graph, problem, chip)
        apart = (record.get("build_s"), built), (record.get("evaluation_s"), evaluated)
        times.append(Time(size, which, dtype, layer, *apart, (record["median_s"], built + evaluated)))
    return times


def text(file: Path) -> str:
    """Return the printed comparison of a report's measured times with the predicted ones."""
    report = json.loads(file.read_text())
    chip, note = chip_of(report["machine"])
    times = times_of(report, chip)
    lines = [["T,B,I,H", "pass", "dtype", "layer"]]
    lines[0] += [f"{part}, {how} ms" for part in ("build", "eval", "total") for how in ("measured", "predicted")]
    lines[0] += ["measured/predicted"]
    for time in times:
        pairs = time.built, time.evaluated, time.total
        figures = [cell(seconds) for pair in pairs for seconds in pair]
        ratio = f"{time.total[0] / time.total[1]:.2f}"
        lines.append([str(time.size), time.which, time.dtype, time.layer, *figures, ratio])
    if not times:
        return f"{note}\nthe report has no times of Metal engines"
    return "\n".join([note, table(lines, left=4), *doubts(times)])


def cell(seconds: float | None) -> str:
    """Return a time in milliseconds as a printed cell, which is empty if there is no time."""
    return "" if seconds is None else f"{1e3 * seconds:.3f}"


# --- Uncertain assumptions -------------------------------------------------------------------------------------------

Find = Callable[..., float | None]
"""A function (size, layer, pass, dtype, part) that returns the seconds of a part of a call: 0 building, 1 evaluating.
It returns None if they are not known."""


def share_of_building(find: Find) -> float | None:
    """Return the time to build the graph of a call as a fraction of the time of the whole call."""
    at = Size(64, 32, 64, 64), "fused", "backward", "float32"
    return quotient(find(*at, 0), total(find(*at, 0), find(*at, 1)))


def step_of_stepwise(find: Find) -> float | None:
    """Return the microseconds of a step of `stepwise`, forward and backward together."""
    seconds = find(Size(256, 32, 256, 256), "stepwise", "backward", "float32", 1)
    return None if seconds is None else 1e6 * seconds / 256


def backward_over_forward(find: Find) -> float | None:
    """Return the time of the backward pass of `fused`, divided by the time of its forward pass."""
    at = Size(1024, 1, 64, 64), "fused"
    forward, both = (find(*at, which, "float32", 1) for which in ("forward", "backward"))
    return None if forward is None or both is None else quotient(both - forward, forward)


def narrow_over_wide(find: Find) -> float | None:
    """Return the time of `fused` in float16, divided by its time in float32."""
    at = Size(64, 32, 128, 128), "fused", "backward"
    return quotient(find(*at, "float16", 1), find(*at, "float32", 1))


DOUBTS = {
    "building over the whole call of fused at 64,32,64,64; small if it overlaps with the GPU": share_of_building,
    "microseconds of a step of stepwise at 256,32,256,256; more if its product waits longer": step_of_stepwise,
    "backward over forward of fused at 1024,1,64,64; more if a step waits for its arrays": backward_over_forward,
    "float16 over float32 of fused at 64,32,128,128; 1 if no more weights stay in registers": narrow_over_wide,
}
"""Uncertain assumptions of the model, as {printed sentence: function that computes the figure to be compared}."""


def doubts(times: Iterable[Time]) -> list[str]:
    """Return one line for each entry of `DOUBTS` (uncertain assumptions of the model) whose figure is in `times`.
    The line gives the measured and the predicted figure."""
    by_key = {(time.size, time.layer, time.which, time.dtype): (time.built, time.evaluated) for time in times}

    def figure(settle: Callable[[Find], float | None], predicted: bool) -> float | None:
        def find(*key: Any) -> float | None:
            parts = by_key.get(key[:-1])
            return parts[key[-1]][predicted] if parts else None

        return settle(find)

    figures = {doubt: (figure(settle, False), figure(settle, True)) for doubt, settle in DOUBTS.items()}
    return [
        f"{doubt}: measured {measured:.2f}, predicted {predicted:.2f}"
        for doubt, (measured, predicted) in figures.items()
        if measured is not None and predicted is not None
    ]


def total(*parts: float | None) -> float | None:
    """Return the sum of the numbers `parts`, or None if one of them is None (not known)."""
    return sum(part or 0.0 for part in parts) if None not in parts else None


def quotient(above: float | None, below: float | None) -> float | None:
    """Return a ratio, or None if one of its parts is not known."""
    return above / below if above is not None and below else None
