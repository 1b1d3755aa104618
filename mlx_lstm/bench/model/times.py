"""Predictions: bytes a launch moves, and how long it takes on a chip. Nobody measured any of this on a Mac.

A roofline with latencies. A function takes what its launches take one after the other, each the longest of its
arithmetic, its memory traffic and its loads through the caches, and besides, for every launch that waits for another
one `DEPENDENT`, for every other one `INDEPENDENT`, for every node of the graph `NODE` on the host, and `ROUND_TRIP`
once. The same rule serves `mlx.nn.LSTM`. Recurrences without options only.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...engines.autodiff import ENGINE_MODULES
from ...engines.cells import Cell, LSTMCell
from ...engines.metal.fused_launches import FusedTiling, fused_tiling
from ...engines.metal.stepwise_launches import stepwise_rows
from ...engines.problem import Problem
from ..tasks import Size
from . import stepwise_traffic
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

NODE = 1e-6
"""Seconds of the host per node of the graph: 0.75 to 1.5 us on an AMD EPYC (Zen 4) with mlx 0.32.4."""

CALL, TEXT = 2.3e-6, 0.4e-9
"""Seconds of the host per launch of a kernel of ours, and per byte of its text, which MLX builds again every time:
2.3 us at 54 bytes, 3.2 at 5 KB, 6.1 at 10 KB on the same machine."""

ROUND_TRIP = 0.15e-3
"""Seconds to hand over work and to wait for its end. Assumed."""

REGISTER_FILE = 208 * 1024
"""Bytes of registers of a GPU core, published."""

STEP_LATENCY = 0.6e-6
"""Seconds of a step of `fused` besides its product: a barrier, the activations one after the other. Assumed."""

PRODUCT_LATENCY = 1.2e-6
"""Seconds of the smallest matrix product beyond those of an empty launch. Assumed."""

LANES, TILES, MATRICES = 0.6, 0.5, 0.8
"""Parts of a core's peak: products by lanes; by simdgroup matrices, staged through threadgroup memory; by those whose
weights stay in registers. Assumed."""

DRAM, CACHE = 0.8, 0.65
"""Parts of the published bandwidths that a launch gets. Assumed."""

FROM_L2, FROM_L1 = 32, 64
"""Bytes per core and cycle: metal-benchmarks."""

WEIGHTS = {"Wh", "weights", "packed"}
"""Names of a kernel's buffers: its recurrent weights."""

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
        return stepwise_traffic.reads(buffer, launch, problem)
    if is_fused_sweep(launch) and buffer.name in WEIGHTS:
        return buffer.bytes, buffer.bytes * times_read(launch, problem)
    if launch.name == "recurrent_input" and buffer.name == "h":  # not the last h
        return (buffer.bytes * (1 - 1 / problem.T),) * 2
    return buffer.bytes, buffer.bytes


def is_fused_sweep(launch: Launch) -> bool:
    """Whether a launch walks the steps of a sequence; `fused_pack` before it does not."""
    return launch.ours and "fused" in launch.name and "pack" not in launch.name


def times_read(launch: Launch, problem: Problem) -> float:
    """How often a kernel of `fused` reads each of its weights, on average."""
    steps, tiling = launch.writes[0].shape[0], tiling_of(launch, problem, itemsize(launch))
    return ceil(problem.B / tiling.rows) * (tiling.kept + (1 - tiling.kept) * steps)


def itemsize(launch: Launch) -> int:
    """That of the dtype of the arrays, which is also that of a kernel's first buffer beyond its sizes."""
    first = next(buffer for buffer in launch.reads if not buffer.constant)
    return first.bytes // prod(first.shape)


def tiling_of(launch: Launch, problem: Problem, size: int) -> FusedTiling:
    """Among others the batch rows of a threadgroup, and how much of the recurrent weights it keeps in registers."""
    backward, D = "backward" in launch.name, problem.directions
    return fused_tiling(problem.cell, problem.B, problem.H, size, backward=backward, directions=D)


# --- Seconds ---------------------------------------------------------------------------------------------------------


def seconds_of(launch: Launch, problem: Problem, chip: Chip) -> float:
    """Seconds of a launch by itself."""
    if is_fused_sweep(launch):
        return fused_seconds(launch, problem, chip)
    if launch.ours and "stepwise" in launch.name:
        return stepwise_seconds(launch, problem, chip)
    seconds = memory_seconds(floor_bytes(launch, problem), chip)
    if launch.name in ("Matmul", "AddMM"):
        rows, K = launch.reads[0].shape[-2:]
        part = 0.75 if rows >= 512 else 0.6 if rows >= 64 else 0.4  # of the peak; reported for fp32 GEMMs: 0.73 to 0.75
        return max(seconds, 2 * prod(launch.writes[0].shape) * K / (part * chip.peak), PRODUCT_LATENCY)
    return seconds


def memory_seconds(count: float, chip: Chip) -> float:
    """To move bytes from or to memory; what takes less than half of the system level cache stays in it."""
    return count / (CACHE * chip.cache if count < chip.cache_bytes / 2 else DRAM * chip.dram)


def fused_seconds(launch: Launch, problem: Problem, chip: Chip) -> float:
    """Threadgroups share a core as long as its registers hold what each needs; more of them run in turns."""
    steps = launch.writes[0].shape[0]
    tiling = tiling_of(launch, problem, itemsize(launch))
    rows, kept, part = tiling.rows, tiling.kept, MATRICES if tiling.matrices else LANES
    weights = sum(buffer.bytes for buffer in launch.reads if buffer.name in WEIGHTS) / problem.directions
    per_core = ceil(prod(launch.groups) / chip.cores)
    needed = 4 * tiling.registers * tiling.threads
    together = min(per_core, max(1, int(REGISTER_FILE / needed)))
    arithmetic = together * rows * weights / itemsize(launch) / (128 * part * chip.clock)
    stream = together * (1 - kept) * weights / (FROM_L2 * chip.clock)
    first = per_core * kept * weights / (FROM_L2 * chip.clock)
    sweep = first + steps * ceil(per_core / together) * (max(arithmetic, stream) + STEP_LATENCY)
    return max(sweep, memory_seconds(floor_bytes(launch, problem), chip))


def stepwise_seconds(launch: Launch, problem: Problem, chip: Chip) -> float:
    """The slowest of: arithmetic of the busiest core, loads, the stream of weights, the other arrays."""
    groups, size = prod(launch.groups), stepwise_traffic.itemsize(launch)
    weights = sum(buffer.bytes for buffer in launch.reads if buffer.name in WEIGHTS)
    rows = stepwise_rows(problem.B)
    products = rows * ceil(problem.B / rows) * weights / size / problem.directions / groups  # of a threadgroup
    rate = 128 * (LANES if rows < 8 else TILES) * chip.clock
    return max(
        ceil(groups / chip.cores) * products / rate,
        moved_bytes(launch, problem) / (min(groups, chip.cores) * FROM_L1 * chip.clock),
        memory_seconds(weights, chip),
        memory_seconds(floor_bytes(launch, problem, weights=False), chip),
        PRODUCT_LATENCY if weights else 0,
    )


def total_seconds(graph: Graph, problem: Problem, chip: Chip, *, host: bool = True) -> float:
    """Seconds of a function from its call to its end; without `host` those of the GPU alone."""
    gpu = sum(seconds_of(launch, problem, chip) for launch in graph.launches)
    gpu += DEPENDENT * graph.depth + INDEPENDENT * (len(graph.launches) - graph.depth)
    if not host:
        return gpu
    text = sum(CALL + TEXT * launch.text_bytes for launch in graph.launches if launch.ours)
    return gpu + NODE * graph.nodes + text + ROUND_TRIP


# --- What is predicted -----------------------------------------------------------------------------------------------


def ours(
    size: Size, dtype: mx.Dtype, engine: str, which: str, cell: Cell = LSTM, bidirectional: bool = False
) -> tuple[Problem, Graph]:
    """The problem and the launches of a layer on an engine; `which` pass, "backward" with the forward pass it needs."""
    T, B, width, H = size
    D, own, rows = (2, (2,), 2 * cell.gates * H) if bidirectional else (1, (), cell.gates * H)
    shapes = {"x": (T, B, width), "Wx": (rows, width), "Wh": (*own, cell.gates * H, H), "b": (rows,)}
    problem = Problem(T, B, H, H, cell, training=which == "backward", bidirectional=bidirectional)
    module = ENGINE_MODULES[engine]

    # MLX cannot write down a function with our gradient in it, so the sweeps are called one by one.
    def sweeps(dh: mx.array, *values: mx.array) -> list[mx.array]:
        arrays = dict(zip(shapes, values, strict=True))
        saved = module.forward(problem, arrays)
        if which == "forward":
            return [saved["h"]]
        return [saved["h"], *module.backward(problem, arrays, saved, {"h": dh}).values()]

    return problem, trace(sweeps, [mx.zeros(shape, dtype) for shape in ((T, B, D * H), *shapes.values())])


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
