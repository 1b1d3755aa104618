"""Predictions: bytes a launch moves, and how long it takes on a chip. Nobody measured any of this on a Mac.

A launch takes the longest of its instructions, its memory traffic and its loads through the caches, and besides, if it
waits for another one, `DEPENDENT`, else `INDEPENDENT`. A function takes what its launches take one after the other, or
what the host needs to ask for them if that is longer, and `ROUND_TRIP` once: the host prepares a call while the GPU
still works on the one before. The same rule serves `mlx.nn.LSTM`. Recurrences without options only.
"""

from collections.abc import Iterable
from math import ceil, prod
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_lstm.bench.tasks import Size
from mlx_lstm.engines.autodiff import ENGINE_MODULES
from mlx_lstm.engines.cells import Cell, LSTMCell
from mlx_lstm.engines.choice import FUSED_LIMIT, METAL_ENGINES
from mlx_lstm.engines.metal.fused import FusedTiling, fused_tiling
from mlx_lstm.engines.ops.packed import dequantized
from mlx_lstm.engines.packing import WEIGHTS as PACKABLE
from mlx_lstm.engines.packing import Packing
from mlx_lstm.engines.problem import Problem

from . import traffic
from .instructions import WEIGHTS, cycles_of, has_product, reads_packed
from .instructions import counted as counted_line
from .launches import Buffer, Graph, Launch, trace

LSTM = LSTMCell()


class Chip(NamedTuple):
    """GPU cores, clock in Hz; DRAM and system level cache: bytes per second, and bytes of the cache."""

    name: str
    cores: int
    clock: float
    dram: float
    cache: float
    cache_bytes: float

    @property
    def peak(self) -> float:
        """float32 operations per second: 128 multiply-adds per core and cycle."""
        return 256 * self.cores * self.clock


CHIPS = (
    # Cores, clocks, caches: metal-benchmarks (P. Turner); the M4 Max's clock follows from its published 18.4 TFLOP/s.
    # DRAM: Apple. Cache bandwidth of M1: Chips and Cheese; of the others twice that of DRAM, an estimate.
    Chip("M1", 8, 1.278e9, 68e9, 134e9, 8e6),
    Chip("M2 Max", 38, 1.398e9, 400e9, 800e9, 48e6),
    Chip("M4 Max", 40, 1.80e9, 546e9, 1.09e12, 48e6),
)

DEPENDENT = 2.7e-6
"""Seconds from one tiny launch to the next that waits for it: 2.4 to 2.75 us published for MLX on an M3 Ultra
(ml-explore/mlx#4521); other reports say 1.2 to 5.2."""

INDEPENDENT = 0.5e-6
"""The same for a launch that waits for none of those before it; published for one Mac's concurrent encoder."""

HOST = {
    ("fused", "forward"): (81e-6, 0.0),
    ("fused", "backward"): (163e-6, 0.0),
    ("stepwise", "forward"): (50e-6, 3.7e-6),
    ("stepwise", "backward"): (100e-6, 9.2e-6),
    ("mlx.nn.LSTM", "forward"): (0.0, 7.8e-6),
    ("mlx.nn.LSTM", "backward"): (0.0, 26.5e-6),
}
"""Seconds of the host per call and per time step, to build the graph of a pass, "backward" with its forward pass.
Measured at T, B, H = 64, 32, 256 with `python -m mlx_lstm.bench --host` on two cores of an AMD EPYC (Zen 5), mlx
0.32.4, in the quietest of five runs; how a call of `stepwise` divides is assumed; inside `mx.compile` a step is a
fraction of it. No Mac was measured."""

ROUND_TRIP = 0.15e-3
"""Seconds to hand over work and to wait for its end. Assumed."""

REGISTER_FILE = 208 * 1024
"""Bytes of registers of a GPU core, published."""

STEP_LATENCY = 0.6e-6
"""Seconds of a step of `fused` besides its product: a barrier, the activations one after the other. Assumed."""

PRODUCT_LATENCY = 1.2e-6
"""Seconds of the smallest matrix product beyond those of an empty launch. Assumed."""

DRAM, CACHE = 0.8, 0.65
"""Parts of the published bandwidths that a launch gets. Assumed."""

FROM_L2, FROM_L1 = 32, 64
"""Bytes per core and cycle: metal-benchmarks."""

ISSUE = 4
"""SIMD-groups of which a core executes an instruction per cycle, each in a quarter of its own: metal-benchmarks."""

SPILL = 4 * 32
"""Bytes that a SIMD-group moves by a load or store of a spilled register."""

# --- Bytes -----------------------------------------------------------------------------------------------------------


def floor_bytes(launch: Launch, problem: Problem, *, weights: bool = True) -> float:
    """What is needed of each input read once, each output written once; without our kernels' recurrent weights if
    `weights` is false."""
    reads = sum(reads_of(buffer, launch, problem)[0] for buffer in counted(launch, weights))
    return reads + sum(buffer.bytes for buffer in launch.writes)


def moved_bytes(launch: Launch, problem: Problem, *, weights: bool = True) -> float:
    """The bytes of all loads from device memory, whatever cache serves them, and of all stores."""
    reads = sum(reads_of(buffer, launch, problem)[1] for buffer in counted(launch, weights))
    return reads + sum(buffer.bytes for buffer in launch.writes)


def counted(launch: Launch, weights: bool) -> list[Buffer]:
    """What a launch reads from device memory."""
    reads = (buffer for buffer in launch.reads if not buffer.constant)
    return [buffer for buffer in reads if weights or buffer.name not in WEIGHTS]


def reads_of(buffer: Buffer, launch: Launch, problem: Problem) -> tuple[float, float]:
    """(bytes needed, bytes of all loads). MLX's kernels count as reading once."""
    if launch.ours and "stepwise" in launch.name:
        return traffic.reads(buffer, launch, problem)
    if has_product(launch) and "fused" in launch.name and buffer.name in WEIGHTS:
        return buffer.bytes, buffer.bytes * times_read(launch, problem)
    if launch.name == "recurrent_input" and buffer.name == "h":  # not the last h
        return traffic.twice(buffer.bytes * (1 - 1 / problem.T))
    return buffer.bytes, buffer.bytes


def times_read(launch: Launch, problem: Problem) -> float:
    """How often a kernel of `fused` reads each of its weights, on average."""
    steps, tiling = launch.writes[0].shape[0], tiling_of(launch, problem, itemsize(launch))
    return ceil(problem.B / tiling.rows) * (tiling.resident_part + (1 - tiling.resident_part) * steps)


def itemsize(launch: Launch) -> int:
    """That of the dtype of the arrays, which is also that of a kernel's first buffer beyond its sizes."""
    first = next(buffer for buffer in launch.reads if not buffer.constant)
    return first.bytes // prod(first.shape)


def tiling_of(launch: Launch, problem: Problem, size: int) -> FusedTiling:
    """Among others the batch rows of a threadgroup, and how much of the recurrent weights it keeps in registers."""
    how = {"backward": "backward" in launch.name, "directions": problem.directions}
    packing = problem.packing if reads_packed(launch) else None
    return fused_tiling(problem.cell, problem.B, problem.H, size, packing=packing, **how)


# --- Seconds ---------------------------------------------------------------------------------------------------------


def parts_of(launch: Launch, problem: Problem, chip: Chip) -> dict[str, float]:
    """Seconds of a launch by itself, if only this bound it; it takes the longest."""
    if has_product(launch):
        return parts_of_product(launch, problem, chip)
    parts = {"memory": memory_seconds(floor_bytes(launch, problem), chip)}
    if launch.name in ("Matmul", "AddMM"):
        rows, K = launch.reads[0].shape[-2:]
        part = 0.75 if rows >= 512 else 0.6 if rows >= 64 else 0.4  # of the peak; reported for fp32 GEMMs: 0.73 to 0.75
        parts["instructions"] = 2 * prod(launch.writes[0].shape) * K / (part * chip.peak)
        parts["latency"] = PRODUCT_LATENCY
    return parts


def memory_seconds(count: float, chip: Chip) -> float:
    """To move bytes from or to memory; what takes less than half of the system level cache stays in it."""
    return count / (CACHE * chip.cache if count < chip.cache_bytes / 2 else DRAM * chip.dram)


def parts_of_product(launch: Launch, problem: Problem, chip: Chip) -> dict[str, float]:
    """Those of a kernel around a recurrent product. The busiest core decides. Its threadgroups share it as long as its
    registers hold theirs; more of them run in turns, each with its own latencies."""
    steps = launch.writes[0].shape[0] if "fused" in launch.name else 1
    cycles, spills, line, _ = cycles_of(launch, problem, steps)
    groups = prod(launch.groups)
    per_core = ceil(groups / chip.cores)
    together = max(1, int(REGISTER_FILE / (4 * line.registers * launch.threads)))
    simdgroups = per_core * launch.threads / 32
    latency = ceil(per_core / together) * (steps * STEP_LATENCY if "fused" in launch.name else PRODUCT_LATENCY)
    others = moved_bytes(launch, problem, weights=False)
    weights = (moved_bytes(launch, problem) - others) * per_core / groups  # through one core
    near = others * per_core / groups + simdgroups * spills * SPILL
    parts = {"instructions": simdgroups * cycles / ISSUE, "weights": weights / FROM_L2, "caches": near / FROM_L1}
    return {name: value / chip.clock + latency for name, value in parts.items()} | {
        "memory": memory_seconds(floor_bytes(launch, problem), chip)
    }


def seconds_of(launch: Launch, problem: Problem, chip: Chip) -> float:
    """Seconds of a launch by itself."""
    return max(parts_of(launch, problem, chip).values())


def gpu_parts(graph: Graph, problem: Problem, chip: Chip) -> dict[str, float]:
    """Seconds of the GPU for a function: of its launches, by what bounds each, and of what lies between them."""
    gaps = DEPENDENT * graph.depth + INDEPENDENT * (len(graph.launches) - graph.depth)
    found = {"launches": gaps}
    for launch in graph.launches:
        parts = parts_of(launch, problem, chip)
        longest = max(parts, key=parts.__getitem__)
        found[longest] = found.get(longest, 0.0) + parts[longest]
    return found


def host_seconds(layer: str, which: str, T: int) -> float:
    """Seconds of the host for a pass of an engine or of `mlx.nn.LSTM`."""
    call, step = HOST[layer, which]
    return call + T * step


def total_seconds(graph: Graph, problem: Problem, chip: Chip, host: float) -> float:
    """Seconds of a function from its call to its end, where the host needs so many."""
    return max(sum(gpu_parts(graph, problem, chip).values()), host) + ROUND_TRIP


# --- What is predicted -----------------------------------------------------------------------------------------------


def ours(
    size: Size,
    dtype: mx.Dtype,
    engine: str,
    which: str,
    cell: Cell = LSTM,
    bidirectional: bool = False,
    projected: int = 0,
    packing: Packing | None = None,
) -> tuple[Problem, Graph]:
    """The problem and the launches of a layer on an engine; `which` pass, "backward" with the forward pass it needs;
    `projected` is the width of its h if that is projected, `packing` how its weights are packed."""
    T, B, width, H = size
    D, own, rows = (2, (2,), 2 * cell.gates * H) if bidirectional else (1, (), cell.gates * H)
    P = projected or H
    shapes = {"x": (T, B, width), "Wx": (rows, width), "Wh": (*own, cell.gates * H, P), "b": (rows,)}
    shapes |= {"Wp": (*own, P, H)} if projected else {}
    given: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {name: (shape, dtype) for name, shape in shapes.items()}
    for name in [name for name in PACKABLE if packing and name in shapes]:
        given |= packed_shapes(name, *given[name], packing)
    backward = which == "backward"
    problem = Problem(T, B, H, P, cell, training=backward, bidirectional=bidirectional, packing=packing)
    module = ENGINE_MODULES[engine]

    # MLX cannot write down a function with our gradient in it, so the sweeps are called one by one.
    def sweeps(dh: mx.array, *values: mx.array) -> list[mx.array]:
        arrays = dict(zip(given, values, strict=True))
        saved = module.forward(problem, arrays)
        if which == "forward":
            return [saved["h"]]
        return [saved["h"], *module.backward(problem, dequantized(packing, arrays), saved, {"h": dh}).values()]

    return problem, trace(sweeps, [mx.zeros((T, B, D * P), dtype), *(mx.zeros(*form) for form in given.values())])


def packed_shapes(
    name: str, shape: tuple[int, ...], dtype: mx.Dtype, packing: Packing | None
) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    """The arrays of a packed weight, if its rows are whole groups; else the weight itself."""
    if packing is None or shape[-1] % packing.group_size:
        return {name: (shape, dtype)}
    groups, affine = (*shape[:-1], shape[-1] // packing.group_size), packing.mode == "affine"
    found = {name: ((*shape[:-1], shape[-1] * packing.bits // 32), mx.uint32)}
    found[f"{name}_scales"] = groups, dtype if affine else mx.uint8
    return found | ({f"{name}_biases": (groups, dtype)} if affine else {})


def of_mlx(size: Size, dtype: mx.Dtype, which: str) -> tuple[Problem, Graph]:
    """The same of `mlx.nn.LSTM`."""
    T, B, width, H = size
    layer = nn.LSTM(1, 1)

    def forward(x: mx.array, Wx: mx.array, Wh: mx.array, b: mx.array) -> mx.array:
        layer.Wx, layer.Wh, layer.bias = Wx, Wh, b
        return layer(x)[0]

    def both(dh: mx.array, *values: mx.array) -> list[mx.array]:
        if which == "forward":
            return [forward(*values)]
        outputs, gradients = mx.vjp(forward, list(values), [dh])
        return [*outputs, *gradients]

    shapes = (B, T, H), (B, T, width), (4 * H, width), (4 * H, H), (4 * H,)
    return Problem(T, B, H, H, LSTM), trace(both, [mx.zeros(shape, dtype) for shape in shapes])


def fused_wins(
    dtype: mx.Dtype, B: int, H: int, T: int = 32, which: str = "backward", packing: Packing | None = None
) -> bool:
    """Return whether `fused` is predicted to take no longer than `stepwise` for a pass of an LSTM on two of the three
    chips; False where one of its kernels spills."""
    layers = {engine: ours(Size(T, B, H, H), dtype, engine, which, packing=packing) for engine in METAL_ENGINES}
    problem, graph = layers["fused"]
    if any(counted_line(launch, problem)[0].spills for launch in graph.launches if has_product(launch)):
        return False
    wins = 0
    for chip in CHIPS:
        seconds = {
            engine: total_seconds(graph, problem, chip, host_seconds(engine, which, T))
            for engine, (problem, graph) in layers.items()
        }
        wins += seconds["fused"] <= seconds["stepwise"]
    return wins >= 2


def fused_until(dtype: mx.Dtype, batches: Iterable[int]) -> int:
    """Return the largest multiple of 32 up to which `fused` wins a training step at each of these batch sizes."""
    largest = 0
    while largest < FUSED_LIMIT["lstm"] and all(fused_wins(dtype, B, largest + 32) for B in batches):
        largest += 32
    return largest
