"""Predict how many bytes a launch moves and how long it takes on an Apple chip. No Mac has measured these times.

A launch takes as long as the slowest of these: executing its instructions, moving its data from and to memory, and
loading through caches. A core that runs one threadgroup at a time also waits for loads whose results the threadgroup
needs at once. If a core runs several threadgroups, one computes while another one waits. The gap before a launch is
`DEPENDENT` seconds if it waits for another launch, else `INDEPENDENT`.

A call whose results are evaluated at once takes the sum of three times. First the CPU builds the graph. Then either
the GPU runs all launches, with the gaps, or MLX encodes the launches, whichever takes longer. The third time is
`ROUND_TRIP`. Building and computing do not overlap, because MLX sends nothing to the GPU before the evaluation. The
same rules apply to `mlx.nn.LSTM`.
"""

from math import ceil, prod
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_lstm.engines.autodiff import ENGINE_MODULES
from mlx_lstm.engines.cells import Cell, LSTMCell
from mlx_lstm.engines.choice import FUSED_LIMIT
from mlx_lstm.engines.metal.fused import (
    THREADGROUP_MEMORY,
    FusedTiling,
    LayerSize,
    fits_matrices,
    fused_tiling,
    layer_size,
    rows_for,
)
from mlx_lstm.engines.ops.packed import dequantized
from mlx_lstm.engines.packing import WEIGHTS as PACKABLE
from mlx_lstm.engines.packing import Packing
from mlx_lstm.engines.predicted import predict
from mlx_lstm.engines.problem import CORES, LIMITS, Cut, Problem
from mlx_lstm.lab.timing.tasks import Size

from . import traffic
from .instructions import WEIGHTS, has_product, reads_packed, work_of
from .instructions import counted as counted_line
from .launches import Buffer, Graph, Launch, trace

LSTM = LSTMCell()


class Chip(NamedTuple):
    """An Apple chip. clock: in Hz. dram, cache: bytes per second of DRAM and of the system level cache. cache_bytes:
    the size of this cache."""

    name: str
    cores: int
    clock: float
    dram: float
    cache: float
    cache_bytes: float

    @property
    def peak(self) -> float:
        """Return the peak number of float32 operations per second. A core does 128 multiply-adds per cycle, and each
        multiply-add counts as two operations."""
        return 256 * self.cores * self.clock


CHIPS = (
    # Sources: metal-benchmarks (P. Turner) for clocks and cache sizes of the M1 and the M2 Max, Apple for the
    # bandwidths of DRAM, Chips and Cheese for the M1's cache bandwidth. The clock of the M4s is computed from the
    # 18.4 TFLOP/s that are published for 40 of their cores. Assumed: the M3 Ultra has the clock of the M2 Max, the
    # other cache bandwidths are twice the bandwidth of DRAM, and the M4, the M4 Pro and the M3 Ultra have these cache
    # sizes.
    Chip("M1", 8, 1.278e9, 68e9, 134e9, 8e6),
    Chip("M4", 10, 1.80e9, 120e9, 240e9, 8e6),
    Chip("M4 Pro", 20, 1.80e9, 273e9, 546e9, 24e6),
    Chip("M2 Max", 38, 1.398e9, 400e9, 800e9, 48e6),
    Chip("M3 Ultra", 80, 1.398e9, 819e9, 1.638e12, 96e6),
)

DEPENDENT = 2.7e-6
"""Seconds from one tiny launch to the next one that waits for it. 2.4 to 2.75 us are published for MLX on an M3 Ultra
(ml-explore/mlx#4521); other reports say 1.2 to 5.2 us."""

INDEPENDENT = 0.5e-6
"""Seconds from one tiny launch to the next one if the next one does not wait for it. Published for one Mac."""

HOST = {
    ("fused", "forward"): (58e-6, 0.0),
    ("fused", "backward"): (126e-6, 0.0),
    ("stepwise", "forward"): (50e-6, 2.7e-6),
    ("stepwise", "backward"): (100e-6, 6.7e-6),
    ("mlx.nn.LSTM", "forward"): (0.0, 6.8e-6),
    ("mlx.nn.LSTM", "backward"): (0.0, 21.9e-6),
}
"""(seconds per call, seconds per time step) that the host needs to build the graph of a pass; "backward" includes the
forward pass. Measured at T, B, H = 64, 32, 256 with `python -m mlx_lstm.bench --host` on two cores of an AMD EPYC (Zen
5), mlx 0.32.4, in the quietest of three runs. How the time of `stepwise` divides into call and steps is assumed. Inside
`mx.compile` a step takes only a fraction of this time. No Mac was measured."""

ENCODE, ENCODE_CHARACTER = 1.0e-6, 0.05e-9
"""Seconds of the host to encode one launch when MLX evaluates a graph, and for each character of a custom kernel's
source. 0.5 to 0.6 us are published for a launch in Metal alone; MLX's share is assumed. At each launch MLX hashes the
source: 17,000 characters take 0.8 us on an AMD EPYC."""

ROUND_TRIP = 0.15e-3
"""Seconds to submit work to the GPU and to wait for its end. Assumed, not measured."""

REGISTER_FILE = 208 * 1024
"""Bytes of registers in one GPU core, as published."""

STEP_LATENCY = 0.6e-6
"""Seconds that a time step of `fused` takes besides its product, for a barrier and the activations. Assumed."""

PRODUCT_LATENCY = 1.2e-6
"""Seconds that the smallest matrix product takes longer than an empty launch. Assumed."""

L2_BYTES = 768e3
"""The size of the L2 cache of the M1's GPU, as published. The other chips have 0.5 to 1 MB."""

WAITS = {"L2": 76e-9, "cache": 266e-9, "DRAM": 311e-9}
"""Seconds from a load to its value, by where the value lies. Measured on an M1 by Chips and Cheese; other chips are
assumed to be equal."""

DRAM, CACHE = 0.8, 0.65
"""The fractions of the published bandwidths of DRAM and cache that a launch reaches. Assumed."""

FROM_L2, FROM_L1 = 32, 64
"""Bytes per cycle that a GPU core loads from its L2 and L1 caches (published in metal-benchmarks)."""

ISSUE = 4
"""Instructions per cycle that a GPU core executes: one SIMD-group in each quarter of the core (metal-benchmarks)."""

GEMM_TILE, GEMM_DEPTH, GEMM_PART = 64, 16, 0.75
"""Figures of MLX's product of matrices. GEMM_TILE: the rows and columns that a threadgroup computes. GEMM_DEPTH: the
terms that one iteration of its loop adds up. GEMM_PART: the part of a core's peak that the arithmetic reaches. The
sizes come from MLX's source. The part is published as 0.73 to 0.75."""

GEMM_TOGETHER = 4
"""How many threadgroups of MLX's product of matrices a core runs at the same time. Assumed."""

SPILL = 4 * 32
"""Bytes that one load or store of a spilled register moves: 4 bytes for each of the 32 lanes of a SIMD-group."""

# --- Bytes -----------------------------------------------------------------------------------------------------------


def floor_bytes(launch: Launch, problem: Problem, *, weights: bool = True) -> float:
    """Return the smallest number of bytes that a launch must move: the needed part of each input is read once, each
    output is written once. `weights`: whether to include our kernels' recurrent weights."""
    reads = sum(reads_of(buffer, launch, problem)[0] for buffer in counted(launch, weights))
    return reads + sum(buffer.bytes for buffer in launch.writes)


def moved_bytes(launch: Launch, problem: Problem, *, weights: bool = True) -> float:
    """Return the bytes of all loads and stores of a launch, whether or not a cache serves the loads. `weights`:
    whether to include our kernels' recurrent weights."""
    reads = sum(reads_of(buffer, launch, problem)[1] for buffer in counted(launch, weights))
    return reads + sum(buffer.bytes for buffer in launch.writes)


def counted(launch: Launch, weights: bool) -> list[Buffer]:
    """Return the buffers that a launch reads from device memory, which excludes Metal's constant memory. `weights`:
    whether to include recurrent weights."""
    reads = (buffer for buffer in launch.reads if not buffer.constant)
    return [buffer for buffer in reads if weights or buffer.name not in WEIGHTS]


def reads_of(buffer: Buffer, launch: Launch, problem: Problem) -> tuple[float, float]:
    """Return (bytes needed, bytes of all loads) of a buffer that a launch reads. MLX's own kernels are assumed to
    read a buffer once."""
    if launch.ours and "stepwise" in launch.name:
        return traffic.reads(buffer, launch, problem)
    if has_product(launch) and "fused" in launch.name and buffer.name in WEIGHTS:
        return buffer.bytes, buffer.bytes * times_read(launch, problem)
    if has_product(launch) and "_fused_" in launch.name and buffer.name in SEQUENCES:
        return buffer.bytes, sequence_reads(buffer, launch, problem)
    if launch.name == "recurrent_input" and buffer.name == "h":  # reads every time step of h except the last
        return traffic.twice(buffer.bytes * (1 - 1 / problem.T))
    return buffer.bytes, buffer.bytes


SEQUENCES = ("z", "gates", "dgates", "h", "c", "dh", "dc", "q")
"""The names of the arrays with a time axis that a `fused` kernel reads."""


def sequence_reads(buffer: Buffer, launch: Launch, problem: Problem) -> float:
    """Return the bytes that all threads of a `fused` kernel load from an array with a time axis. All lanes of a hidden
    unit load the unit's numbers, and lanes without a unit load as many. A kernel that loads the numbers of a step early
    loads those of its last step twice. Of h and c it loads one state more than it has steps."""
    tiling = tiling_of(launch, problem, itemsize(launch))
    each, back = tiling.rows, "backward" in launch.name
    if tiling.matrices:  # a lane computes all gates of two batch items
        each = 2 * (problem.cell.gates if buffer.name in ("z", "gates", "dgates") else 1)
    twice = reads_ahead(tiling) and (back or not tiling.matrices)
    steps = launch.writes[0].shape[0] + twice + (buffer.name in ("h", "c"))
    return launch.threads * prod(launch.groups) * each * steps * buffer.bytes / prod(buffer.shape)


def reads_ahead(tiling: FusedTiling) -> bool:
    """Return whether a `fused` kernel loads the numbers of a step before a product and uses them after it. The kernel
    of 8 x 8 matrix products does so only if it has registers left for weights."""
    return not tiling.matrices or tiling.resident > 0


def times_read(launch: Launch, problem: Problem) -> float:
    """Return how often a `fused` kernel reads each weight, on average. A threadgroup reads its resident weights
    once, and all others once per time step. The weights are read again for every group of batch rows."""
    steps, tiling = launch.writes[0].shape[0], tiling_of(launch, problem, itemsize(launch))
    return ceil(problem.B / tiling.rows) * (tiling.resident_part + (1 - tiling.resident_part) * steps)


def itemsize(launch: Launch) -> int:
    """Return the bytes per element of a launch's arrays. All arrays have the dtype of the first buffer that is not
    in constant memory."""
    first = next(buffer for buffer in launch.reads if not buffer.constant)
    return first.bytes // prod(first.shape)


def tiling_of(launch: Launch, problem: Problem, size: int) -> FusedTiling:
    """Return the tiling of a `fused` kernel: batch rows per threadgroup, and the part of the weights that is
    resident in registers. `size`: bytes per element of the arrays."""
    layer = layer_size(problem)._replace(itemsize=size, packing=problem.packing if reads_packed(launch) else None)
    return fused_tiling(layer, backward="backward" in launch.name, cut=problem.cut)


# --- Seconds ---------------------------------------------------------------------------------------------------------


def parts_of(launch: Launch, problem: Problem, chip: Chip) -> dict[str, float]:
    """Return {cause: predicted seconds} of a launch. Each value is the time that the launch takes at least because
    of one cause: its instructions, its memory traffic, its latency, ... The launch takes the longest of these times."""
    if has_product(launch):
        return parts_of_product(launch, problem, chip)
    parts = {"memory": memory_seconds(floor_bytes(launch, problem), chip)}
    if launch.name in ("Matmul", "AddMM"):
        *_, rows, columns = launch.writes[0].shape
        if min(rows, columns) > 1:  # the product of a matrix and a vector only waits for memory
            parts["instructions"] = PRODUCT_LATENCY + gemm_seconds(launch, chip)
        parts["latency"] = PRODUCT_LATENCY
    return parts


def gemm_seconds(launch: Launch, chip: Chip) -> float:
    """Return the predicted seconds of MLX's product of matrices without the time for its memory traffic. MLX divides
    the product into tiles, one per threadgroup, and the core with most tiles decides the time. For the smallest
    products MLX divides each sum among several threadgroups, which this prediction takes into account."""
    *batch, rows, columns = launch.writes[0].shape
    K = launch.reads[0].shape[-1]
    tiles = prod(batch) * ceil(rows / GEMM_TILE) * ceil(columns / GEMM_TILE)
    blocks, depth = prod(batch) * ceil(rows / 16) * ceil(columns / 16), K // 16
    if blocks <= 32 and depth >= 8:
        parts = 2 if depth < 16 else 4 if depth < 32 else 8 if depth < 64 else 16
        tiles, K = tiles * parts, K / parts
    high, wide = min(rows, GEMM_TILE), min(columns, GEMM_TILE)
    work = high * wide * K / (128 * GEMM_PART * chip.clock)
    waits = K / GEMM_DEPTH * wait_seconds(sum(buffer.bytes for buffer in launch.reads), chip)
    return busiest(ceil(tiles / chip.cores), GEMM_TOGETHER, work, waits)


def busiest(groups: int, together: int, work: float, waits: float) -> float:
    """Return the seconds that a core needs for `groups` threadgroups, of which it runs at most `together` at the
    same time. work: seconds for which one threadgroup keeps the core busy. waits: seconds for which one threadgroup
    waits for loads and barriers; meanwhile the core works for the other threadgroups."""
    return max(groups * work, ceil(groups / together) * (work + waits))


def wait_seconds(count: float, chip: Chip) -> float:
    """Return the seconds from a load until its value arrives. Kernels load `count` bytes again and again, so `count`
    decides which cache, or DRAM, the value comes from."""
    return WAITS["L2" if count <= L2_BYTES else "cache" if count < chip.cache_bytes / 2 else "DRAM"]


def memory_seconds(count: float, chip: Chip) -> float:
    """Return the predicted seconds to move `count` bytes. Arrays smaller than half of the system level cache are
    read from the cache, others from DRAM."""
    return count / (CACHE * chip.cache if count < chip.cache_bytes / 2 else DRAM * chip.dram)


def parts_of_product(launch: Launch, problem: Problem, chip: Chip) -> dict[str, float]:
    """Return {cause: predicted seconds} of a launch with a recurrent product. Each value is the time that the launch
    takes at least because of one cause: instructions, weights, caches or memory.

    The core that gets the most threadgroups determines these times. It runs as many threadgroups at the same time as
    fit in its registers and in its threadgroup memory.
    """
    steps = launch.writes[0].shape[0] if "fused" in launch.name else 1
    work = work_of(launch, problem, steps)
    groups, simdgroups = prod(launch.groups), launch.threads / 32
    per_core = ceil(groups / chip.cores)
    by_registers = int(REGISTER_FILE / (4 * work.line.registers * launch.threads))
    together = max(1, min(by_registers, THREADGROUP_MEMORY // max(1, launch.memory)))
    others = moved_bytes(launch, problem, weights=False)
    weights = (moved_bytes(launch, problem) - others) / groups  # bytes that one threadgroup loads
    near = others / groups + simdgroups * work.spills * SPILL
    # A quarter of a core executes one SIMD-group's instructions, so fewer than four SIMD-groups leave quarters idle.
    cycles = {"instructions": max(simdgroups / ISSUE, 1) * work.cycles}
    cycles |= {"weights": weights / FROM_L2, "caches": near / FROM_L1}
    own = cycles["instructions"] / chip.clock / steps
    waits = waits_of_product(launch, problem, chip, steps, work.turns, own)
    parts = {name: busiest(per_core, together, count / chip.clock, waits) for name, count in cycles.items()}
    return parts | {"memory": memory_seconds(floor_bytes(launch, problem), chip)}


def waits_of_product(
    launch: Launch, problem: Problem, chip: Chip, steps: int, turns: float, instructions: float
) -> float:
    """Return the seconds in which one threadgroup waits for loads and barriers and computes nothing. The threadgroup
    belongs to a kernel with a recurrent product. turns: how often the loop of the product runs in a launch of
    `stepwise`. instructions: the seconds of the instructions of one step.

    A kernel of `fused` loads the numbers of a step early. The forward pass has a whole step until it uses them, so
    they are never late. The backward pass and the product of 8 x 8 matrices load them before a product and use them
    after it, so they arrive during the instructions of a step. Kernels without registers for this load them late.
    """
    if "fused" in launch.name:
        sequences = sum(buffer.bytes for buffer in counted(launch, weights=False))
        late = wait_seconds(max(sequences, L2_BYTES + 1), chip)
        if launch.name.endswith("_fused_forward"):
            late = 0.0
        elif reads_ahead(tiling_of(launch, problem, itemsize(launch))):
            late = max(0.0, late - instructions)
        return steps * (STEP_LATENCY + late)
    weights = sum(buffer.bytes for buffer in launch.reads if buffer.name in WEIGHTS)
    return PRODUCT_LATENCY + turns * wait_seconds(weights, chip)


def seconds_of(launch: Launch, problem: Problem, chip: Chip) -> float:
    """Return the predicted seconds of a launch on a chip."""
    return max(parts_of(launch, problem, chip).values())


def gpu_parts(graph: Graph, problem: Problem, chip: Chip) -> dict[str, float]:
    """Return {cause: predicted seconds} of the GPU for all launches of a graph. The time of each launch is added to
    the cause that determines this time: instructions, memory, ... The key "launches" holds the time of the gaps
    between launches."""
    gaps = DEPENDENT * graph.depth + INDEPENDENT * (len(graph.launches) - graph.depth)
    seconds = {"launches": gaps}
    for launch in graph.launches:
        parts = parts_of(launch, problem, chip)
        longest = max(parts, key=parts.__getitem__)
        seconds[longest] = seconds.get(longest, 0.0) + parts[longest]
    return seconds


def host_seconds(layer: str, which: str, T: int) -> float:
    """Return the seconds that the CPU needs to build the graph of a pass. layer: "fused", "stepwise" or
    "mlx.nn.LSTM". which: the pass."""
    call, step = HOST[layer, which]
    return call + T * step


def encoding_seconds(graph: Graph) -> float:
    """Return the seconds that the CPU needs to encode all launches when MLX evaluates the graph."""
    return sum(ENCODE + ENCODE_CHARACTER * len(launch.text) for launch in graph.launches)


def evaluation_seconds(graph: Graph, problem: Problem, chip: Chip) -> float:
    """Return the predicted seconds to evaluate a graph that is already built. The GPU computes the first launches
    while the CPU encodes the others."""
    return max(sum(gpu_parts(graph, problem, chip).values()), encoding_seconds(graph)) + ROUND_TRIP


def total_seconds(graph: Graph, problem: Problem, chip: Chip, host: float) -> float:
    """Return the predicted seconds from the call of a function to the end of its evaluation. host: the seconds that
    the CPU needs to build the graph. The GPU has no work in this time."""
    return host + evaluation_seconds(graph, problem, chip)


# --- Layers to predict -----------------------------------------------------------------------------------------------


def ours(
    size: Size,
    dtype: mx.Dtype,
    engine: str,
    which: str,
    cell: Cell = LSTM,
    bidirectional: bool = False,
    projected: int = 0,
    packing: Packing | None = None,
    cores: int = CORES,
    rows: int = 0,
) -> tuple[Problem, Graph]:
    """Return the `Problem` (sizes and options) and the launches of one layer on one of our engines. which: the pass;
    "backward" includes the forward pass. projected: the size P of a projected h, or 0 without projection. packing: how
    the weights are quantized. cores: the number of GPU cores. rows: the batch items of a threadgroup of `fused`, or 0
    for the default number."""
    T, B, width, H = size
    D, own, gates = (2, (2,), 2 * cell.gates * H) if bidirectional else (1, (), cell.gates * H)
    P = projected or H
    shapes = {"x": (T, B, width), "Wx": (gates, width), "Wh": (*own, cell.gates * H, P), "b": (gates,)}
    shapes |= {"Wp": (*own, P, H)} if projected else {}
    if cell.norm is not None and cell.norm.of is not None:
        shapes["norm_scale"] = (*own, cell.gates * H)
    if cell.norm is not None and cell.norm.c is not None:
        shapes |= {"norm_c_scale": (*own, H), "norm_c_shift": (*own, H)}
    given: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {name: (shape, dtype) for name, shape in shapes.items()}
    for name in [name for name in PACKABLE if packing and name in shapes]:
        given |= packed_shapes(name, *given[name], packing)
    backward = which == "backward"
    options = {
        "training": backward,
        "bidirectional": bidirectional,
        "packing": packing,
        "limits": LIMITS._replace(cores=cores),
    }
    problem = Problem(T, B, H, P, cell, dtype, cut=Cut(rows) if rows else None, **options)
    module = ENGINE_MODULES[engine]

    # MLX cannot export a function that contains our custom gradient, so call the forward and backward pass directly.
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
    """Return {name: (shape, dtype)} of the arrays of a quantized weight. A weight is not quantized if its row length
    is not a multiple of the group size."""
    if packing is None or shape[-1] % packing.group_size:
        return {name: (shape, dtype)}
    groups, affine = (*shape[:-1], shape[-1] // packing.group_size), packing.mode == "affine"
    arrays = {name: ((*shape[:-1], shape[-1] * packing.bits // 32), mx.uint32)}
    arrays[f"{name}_scales"] = groups, dtype if affine else mx.uint8
    return arrays | ({f"{name}_biases": (groups, dtype)} if affine else {})


def of_mlx(size: Size, dtype: mx.Dtype, which: str) -> tuple[Problem, Graph]:
    """Return the `Problem` and the launches of one layer of `mlx.nn.LSTM`. which: the pass; "backward" includes the
    forward pass."""
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


def step_seconds(
    dtype: mx.Dtype, B: int, H: int, chip: Chip, engine: str, rows: int = 0, cell: Cell = LSTM, T: int = 6
) -> float | None:
    """Return the predicted seconds of T steps, forward and backward, without the constant time that each call takes in
    addition. rows: the batch items of a threadgroup of `fused`, or 0 for the default number. Return None if a kernel
    spills registers."""
    problem, graph = ours(Size(T, B, H, H), dtype, engine, "backward", cell, cores=chip.cores, rows=rows)
    if any(counted_line(launch, problem)[0].spills for launch in graph.launches if has_product(launch)):
        return None
    return sum(gpu_parts(graph, problem, chip).values()) + T * HOST[engine, "backward"][1]


def default_over_best(dtype: mx.Dtype, B: int, H: int, chip: Chip, cell: Cell = LSTM) -> float:
    """Return the predicted time of the default engine with its default division of work, divided by the shortest
    predicted time of all engines and divisions."""
    times: dict[tuple[str, int], float | None] = {("stepwise", 0): step_seconds(dtype, B, H, chip, "stepwise", 0, cell)}
    for rows in (1, 2, 8 if fits_matrices(cell, H) else 4) if FUSED_LIMIT[cell.op] >= H else ():
        times["fused", rows] = step_seconds(dtype, B, H, chip, "fused", rows, cell)
    engine = predict(cell, dtype, B, H, chip.cores).engine
    default = times[engine, rows_for(LayerSize(cell, B, H, dtype.size, 1, chip.cores)) if engine == "fused" else 0]
    return default / min(filter(None, times.values())) if default else float("inf")
