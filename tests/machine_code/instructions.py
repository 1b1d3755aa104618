"""The instructions of our kernels on an Apple GPU: read the table that `table.py` writes, and find the line of a
launch in it. Mesa's compiler for the M1, not Apple's, made the machine code that was counted."""

import csv
import hashlib
import re
from functools import cache
from math import ceil, log, prod
from pathlib import Path
from typing import NamedTuple

from mlx_lstm.engines.cells import GRUCell
from mlx_lstm.engines.metal.fused import fused_tiling
from mlx_lstm.engines.metal.stepwise import stepwise_rows
from mlx_lstm.engines.problem import Problem

from .launches import Launch

WEIGHTS = {"Wh", "Wp", "arranged", "weights"}
WEIGHTS |= {f"{name}_{part}" for name in ("Wh", "Wp") for part in ("scales", "biases")}
"""Names of a kernel's buffers with recurrent weights, and with the scales and biases of quantized ones."""


KINDS = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}
"""The dtypes of arrays, as the kernels call them."""


def has_product(launch: Launch) -> bool:
    """Return whether the kernel of a launch computes a recurrent product; one that arranges weights does not."""
    reads = any(buffer.name in WEIGHTS for buffer in launch.reads)
    return launch.ours and reads and "_fused_arrange" not in launch.name


def reads_packed(launch: Launch) -> bool:
    """Return whether a kernel with a recurrent product reads quantized weights."""
    return "packed_weights<" in launch.text or "PackedVector<FIELD" in launch.text


class Counted(NamedTuple):
    """A line of the table: a kernel, its dtype, the sizes it was compiled for, and the instructions of one lane.

    per: they are counted per time step of a sweep ("step"), or per iteration of the loop of a product ("turn").
    rows, threads: batch rows and threads of a threadgroup. needed: multiply-adds of a lane's share of one product.
    registers: of 32 bits. scratch: bytes of memory per thread. spills: loads and stores there.
    cycles: of a quarter of a GPU core for `instructions`; outside: those once per launch.
    unknown: inner loops whose number of iterations is not a constant, counted once. text: a hash of the kernel's text.
    """

    kernel: str
    dtype: str
    B: int
    H: int
    per: str
    rows: int
    threads: int
    needed: float
    registers: float
    scratch: int
    instructions: int
    multiply_adds: int
    device_loads: int
    device_stores: int
    local_loads: int
    local_stores: int
    shuffles: int
    transcendental: int
    conversions: int
    integer: int
    selects: int
    moves: int
    spills: int
    control: int
    unknown: int
    cycles: int
    outside: int
    text: str


class Kernel(NamedTuple):
    """The key of a line of the table, computed from a launch; fields as in `Counted`."""

    kernel: str
    dtype: str
    B: int
    H: int
    per: str
    rows: int
    threads: int
    needed: float
    text: str


FILE = Path(__file__).with_name("machine_code.csv")


@cache
def table() -> tuple[Counted, ...]:
    """Return the lines of the table, as `make machine-code` wrote it."""
    with FILE.open(encoding="ascii") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        types = {"kernel": str, "dtype": str, "per": str, "text": str, "needed": float, "registers": float}
        return tuple(Counted(**{name: types.get(name, int)(value) for name, value in line.items()}) for line in lines)


def kernel_of(launch: Launch, problem: Problem) -> Kernel:
    """Return the key in the table of a launch with a recurrent product. A step that also joins rows has the key of
    the step alone. Suffixes distinguish kernels of the same name: for inference, with a projection, and for a GRU
    that resets before the product."""
    name = launch.name.removesuffix("_joining") + "_for_inference" * (not problem.training)
    name += "_projected" * (problem.P != problem.H)
    name += "_reset_before" * (isinstance(problem.cell, GRUCell) and problem.cell.reset == "before")
    weights = next(buffer for buffer in launch.reads if buffer.name in WEIGHTS)
    elements, B, H, packing = prod(weights.shape), problem.B, problem.H, problem.packing
    dtype = "float32" if weights.bytes == 4 * elements else "bfloat16" if "bfloat16_t" in launch.text else "float16"
    per_step = "fused" in name
    if packed := packing if reads_packed(launch) else None:
        name += f"_{packed.mode}_{packed.bits}_bits"
        elements = problem.directions * problem.cell.gates * H * problem.P if per_step else elements * 32 // packed.bits
        dtype = next(word for word, kind in KINDS.items() if f"using S = {kind};" in launch.text)
    if per_step:
        sweep = {"backward": "backward" in name, "directions": problem.directions, "packing": packed}
        rows = fused_tiling(problem.cell, B, H, weights.bytes // elements, **sweep).rows
    else:
        rows = stepwise_rows(B)
    # Threadgroups along the units divide the weights of a product; each threadgroup along the batch reads all of them.
    down = launch.groups[not per_step]
    needed = round(rows * elements * down / prod(launch.groups) / launch.threads, 2)
    per = "step" if per_step else "turn"
    return Kernel(name, dtype, B, H, per, rows, launch.threads, needed, text_hash(launch.text, launch.threads))


@cache
def text_hash(text: str, threads: int) -> str:
    """Return a short hash of what determines a kernel's machine code: its number of threads, and its text without
    comments, line numbers and extra spaces."""
    bare = " ".join(re.sub(r"//.*|^\s*#\s*line\b.*", "", text, flags=re.M).split())
    return hashlib.sha256(f"{bare} {threads}".encode()).hexdigest()[:12]


def counted(launch: Launch, problem: Problem) -> tuple[Counted, bool]:
    """Return the table's line for a launch with a recurrent product, and whether this very text was counted.
    Otherwise the line is the nearest one, by kernel, dtype, rows of a threadgroup, and H."""
    kernel = kernel_of(launch, problem)
    for line in table():
        if line.text == kernel.text:
            return line, True

    def distance(line: Counted) -> tuple[float, ...]:
        other = line.kernel.split("_", 1)[1] != kernel.kernel.split("_", 1)[1], line.kernel != kernel.kernel
        width = (line.dtype == "float32") != (kernel.dtype == "float32"), line.dtype != kernel.dtype
        return *other, *width, abs(log(line.rows / kernel.rows)), abs(log(line.H / kernel.H))

    return min((line for line in table() if line.per == kernel.per), key=distance), False


def products(line: Counted) -> int:
    """Return the multiply-adds of a turn that belong to the product, without those that unpack quantized weights. In
    a product by lanes, a turn takes 16 or 32 weights of each column, as that product's shader says."""
    packed = re.search(r"_(affine|mxfp|nvfp)\d*_(\d)_bits$", line.kernel)
    if not packed:
        return line.multiply_adds
    if line.rows >= 8:
        return 8 * line.rows
    columns = 1 if "_project_" in line.kernel else 3 if line.kernel.startswith("gru") else 4
    return columns * line.rows * (16 if packed[1] == "nvfp" or (line.rows > 1 and int(packed[2]) % 2 == 0) else 32)


def cycles_of(launch: Launch, problem: Problem, steps: int) -> tuple[float, float, Counted, bool]:
    """Return four values for a launch over so many time steps: the cycles that a quarter of a GPU core needs for one
    SIMD-group, the spills among its instructions, the table's line, and whether that line is this kernel's own.

    The line of another size is scaled by the multiply-adds that are needed. Turns over quantized weights are rounded
    up, since a turn takes as long when some lanes have no weights.
    """
    line, own = counted(launch, problem)
    needed = kernel_of(launch, problem).needed
    turns = needed / products(line) if line.per == "turn" else steps * (1 if own else needed / line.needed)
    if line.per == "turn" and line.kernel.endswith("_bits"):
        turns = ceil(turns)
    return line.outside + turns * line.cycles, turns * line.spills, line, own
