"""Print predictions for the option --model: the launches of our layers and of `mlx.nn.LSTM`, the bytes they move,
and their time on some Apple chips."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mlx_lstm.engines.choice import LSTM, METAL_ENGINES, Place, choose, obstacles
from mlx_lstm.engines.packing import Packing
from mlx_lstm.engines.problem import Problem
from mlx_lstm.lab.cases import DTYPES
from mlx_lstm.lab.report import table
from mlx_lstm.lab.timing.tasks import Size

from .instructions import counted, has_product
from .launches import Graph, Launch
from .times import (
    CHIPS,
    Chip,
    encoding_seconds,
    evaluation_seconds,
    floor_bytes,
    gpu_parts,
    host_seconds,
    moved_bytes,
    of_mlx,
    ours,
    parts_of,
)

LEGEND = f"""\
Every time is predicted, from published figures of the chips: nobody measured any of them. times.py has the rules.
moved: all loads and stores of device memory, whatever cache serves them; floor: each input read once, each output
written once; apart from weights: moved over floor, without the recurrent weights of our kernels.
bound by: the longest of a launch's times: instructions, counted in the machine code of Mesa's compiler; weights that
one core reads; other loads and spilled registers through caches; memory. For a whole layer also: the gaps between its
launches, and MLX's work to encode them. between launches: these gaps and the round trip to the GPU. building: the
host's work before the evaluation, which a function of mx.compile saves.
{", ".join(f"{chip.name}: {chip.cores} cores, {chip.dram / 1e9:g} GB/s" for chip in CHIPS)}."""


class Prediction(NamedTuple):
    """One printed line: the predicted figures of all launches with the same name, or of a whole layer. moved: the
    bytes moved. floor: the least possible number of bytes. seconds: the predicted time. bound: what limits the time,
    e.g. memory."""

    layer: str
    launch: str
    launches: int
    moved: float
    floor: float
    apart: float  # moved / floor, both without our recurrent weights
    seconds: float
    bound: str


class Asked(NamedTuple):
    """The input of a prediction: the size of a layer, the pass, the dtype, the chip, and how the weights of our
    layers are quantized."""

    size: Size
    which: str
    dtype: str
    chip: Chip
    packing: Packing | None = None

    def graph(self, engine: str) -> tuple[Problem, Graph]:
        """Return the `Problem` and the launches of our layer on an engine. The chip's number of cores decides how
        the work is divided."""
        options = {"packing": self.packing, "cores": self.chip.cores}
        return ours(self.size, DTYPES[self.dtype], engine, self.which, **options)


def predict(asked: Asked, engines: Iterable[str]) -> list[Prediction]:
    """Return the lines of the printed table of predictions, for the layer on each engine and for `mlx.nn.LSTM`. Each
    layer has several lines; its last line holds the figures of the whole layer."""
    lines: list[Prediction] = []
    for engine in engines:
        problem, graph = asked.graph(engine)
        for kind in dict.fromkeys(launch.name for launch in graph.launches):
            alike = [launch for launch in graph.launches if launch.name == kind]
            lines.append(line_of(engine, kind, alike, problem, asked.chip))
        lines += sums(engine, asked, graph, problem)
    problem, graph = of_mlx(asked.size, DTYPES[asked.dtype], asked.which)
    return [*lines, sums("mlx.nn.LSTM", asked, graph, problem)[-1]]


def estimates(asked: Asked, engines: Iterable[str]) -> list[str]:
    """Return one note about each kernel whose instructions were not counted at this size: the note names the kernel
    from which they are estimated."""
    notes: dict[str, None] = {}
    for engine in engines:
        problem, graph = asked.graph(engine)
        for launch in graph.launches:
            if has_product(launch) and not launch.name.endswith("_joining"):
                line, own = counted(launch, problem)
                if not own:
                    where = f"{line.kernel} in {line.dtype} at B = {line.B}, H = {line.H}"
                    notes[f"instructions of {launch.name}: estimated from those of {where}"] = None
    return list(notes)


def line_of(layer: str, kind: str, launches: Sequence[Launch], problem: Problem, chip: Chip) -> Prediction:
    """Return one line of the printed table of predictions: the bytes and seconds of `launches`, added up. `kind` is
    the name of these launches of a layer, or "all"."""
    moved = sum(moved_bytes(launch, problem) for launch in launches)
    floor = sum(floor_bytes(launch, problem) for launch in launches)
    parts = [parts_of(launch, problem, chip) for launch in launches]
    seconds = sum(max(each.values()) for each in parts)
    apart = sum(moved_bytes(launch, problem, weights=False) for launch in launches)
    apart /= sum(floor_bytes(launch, problem, weights=False) for launch in launches)
    return Prediction(layer, kind, len(launches), moved, floor, apart, seconds, longest(parts))


def longest(parts: Iterable[dict[str, float]]) -> str:
    """Return the main cause of the time of several launches: instructions, memory, ... `parts`: for each launch,
    {cause: seconds that the launch takes at least because of it}. The largest of these times is the time of the
    launch and counts for its cause. The result is the cause with the largest sum."""
    total: dict[str, float] = {}
    for each in parts:
        name = max(each, key=each.__getitem__)
        total[name] = total.get(name, 0.0) + each[name]
    return max(total, key=total.__getitem__)


def sums(layer: str, asked: Asked, graph: Graph, problem: Problem) -> tuple[Prediction, Prediction, Prediction]:
    """Return three lines of the printed table of predictions for one layer: the host's time to build the graph, the
    time between the launches, and the figures of the whole layer."""
    work = line_of(layer, "all", graph.launches, problem, asked.chip)
    host = host_seconds(layer, asked.which, problem.T)
    evaluating, encoding = evaluation_seconds(graph, problem, asked.chip), encoding_seconds(graph)
    parts = gpu_parts(graph, problem, asked.chip)
    gpu, most = sum(parts.values()), max(parts, key=parts.__getitem__)
    bound = "building" if host > max(gpu, encoding) else "encoding" if encoding > gpu else most
    building = Prediction(layer, "building", 0, 0, 0, 0, host, "")
    between = building._replace(launch="between launches", seconds=evaluating - work.seconds)
    return building, between, work._replace(seconds=host + evaluating, bound=bound)


def engines_at(size: Size, asked: list[str] | None) -> list[str]:
    """Return the Metal engines that can run a layer of this size. If `asked` is not empty, return only engines in
    it."""
    refused = obstacles(LSTM, size.H, Place("gpu", metal=True, traced=False), False)
    return [engine for engine in METAL_ENGINES if engine not in refused and (not asked or engine in asked)]


def group_text(asked: Asked, lines: list[Prediction]) -> str:
    """Return the printed table of predictions for one size, pass and chip, with a title and notes."""
    cells = [["layer", "launch", "launches", "moved MB", "floor MB", "moved/floor", "apart from weights"]]
    cells[0] += ["predicted ms", "bound by"]
    for line in lines:
        cells.append([line.layer, line.launch, *traffic_cells(line), f"{1e3 * line.seconds:.3f}", line.bound])
    arguments = {"sizes": asked.size, "dtype": DTYPES[asked.dtype], "device": "gpu", "metal": True, "traced": False}
    default = choose(**arguments, packing=asked.packing, cores=asked.chip.cores)
    theirs = lines[-1]
    wholes = [line for line in lines[:-1] if line.launch == "all"]
    notes = estimates(asked, dict.fromkeys(line.layer for line in lines[:-1]))
    notes += [f"{theirs.layer} over {line.layer}, predicted: {theirs.seconds / line.seconds:.1f}" for line in wholes]
    packed = f"   weights of {asked.packing.bits} bits" if asked.packing else ""
    title = f"{asked.chip.name}   T,B,I,H = {asked.size}   {asked.which}   {asked.dtype}{packed}"
    return "\n".join([title, f"default engine {default.engine}: {default.reason}", table(cells, left=2), *notes])


def traffic_cells(line: Prediction) -> list[str]:
    """Return the table cells that a line prints before the columns of times: the number of launches, the megabytes
    moved, the least possible megabytes, the ratio of both, and the same ratio without the recurrent weights. The
    cells are empty if the line has no launches."""
    if not line.floor:
        return [""] * 5
    return [
        str(line.launches),
        f"{line.moved / 1e6:.4g}",
        f"{line.floor / 1e6:.4g}",
        f"{line.moved / line.floor:.2f}",
        f"{line.apart:.2f}",
    ]


def csv_records(asked: Asked, lines: Iterable[Prediction]) -> list[dict[str, object]]:
    """Return the lines of the table of predictions as records for a CSV file. Each record also holds the layer's
    size, dtype and pass, and the chip."""
    about = asked.size._asdict() | {"dtype": asked.dtype, "pass": asked.which, "chip": asked.chip.name}
    records = [about | line._asdict() for line in lines]
    return [record | {"predicted_s": record.pop("seconds")} for record in records]
