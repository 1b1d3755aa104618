"""Read machine_code.csv, the table of instructions of our kernels on an Apple GPU. Find the line of the table for a
kernel launch. The instructions were counted in machine code of Mesa's compiler for the M1, not of Apple's compiler."""

import csv
import hashlib
import re
from functools import cache
from math import ceil, log, prod
from pathlib import Path
from typing import NamedTuple

from mlx_lstm.engines.cells import GRUCell
from mlx_lstm.engines.problem import Problem

from .launches import Launch

WEIGHTS = {"Wh", "Wp", "arranged", "weights"}
WEIGHTS |= {f"{name}_{part}" for name in ("Wh", "Wp") for part in ("scales", "biases")}
"""Names of the buffers that hold recurrent weights, or scales and biases of quantized recurrent weights."""

KINDS = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}
"""The name of each dtype in the source of our Metal kernels."""


def has_product(launch: Launch) -> bool:
    """Return whether the launch runs one of our kernels that multiply by the recurrent weights. The kernel that only
    rearranges weights for `fused` is not one of them."""
    reads = any(buffer.name in WEIGHTS for buffer in launch.reads)
    return launch.ours and reads and "_fused_arrange" not in launch.name


def reads_packed(launch: Launch) -> bool:
    """Return whether the kernel of this launch reads quantized weights. The launch must be one with a recurrent
    product."""
    return "packed_weights<" in launch.text or "PackedVector<FIELD" in launch.text


class Counted(NamedTuple):
    """A line of machine_code.csv: a kernel, its dtype, the sizes it was compiled for, and the instructions of one
    lane.

    per: what one iteration of the counted loop is: a time step ("step"), or one turn of the loop over a product's
    terms ("turn"). rows, threads: batch rows and threads of a threadgroup. needed: multiply-adds of a lane's share
    of one product. registers: registers of 32 bits per thread. scratch: bytes of memory per thread for registers
    that did not fit. spills: loads and stores of that memory. cycles: how many cycles a quarter of a GPU core needs
    to execute `instructions` for one SIMD-group. outside: cycles of the instructions that run once per launch.
    unknown: inner loops whose number of iterations is not a constant; their instructions are counted once. text: a
    hash of the kernel's source and of its number of threads per threadgroup.
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
    """The columns of machine_code.csv that identify a kernel, computed from a launch. They show whether the table has
    a line for this kernel. `Counted` describes the columns."""

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
    """Return the lines of machine_code.csv."""
    with FILE.open(encoding="ascii") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        types = {"kernel": str, "dtype": str, "per": str, "text": str, "needed": float, "registers": float}
        return tuple(Counted(**{name: types.get(name, int)(value) for name, value in line.items()}) for line in lines)


def kernel_of(launch: Launch, problem: Problem) -> Kernel:
    """Return the key in machine_code.csv of a launch with a recurrent product.

    A stepwise kernel that also joins arrays of earlier time steps (`_joining`) gets the key of the kernel that joins
    nothing. Suffixes distinguish kernels of the same name: for inference, with a projection, for a GRU that resets
    before the product, with layer normalisation, and with quantized weights.
    """
    name = launch.name.removesuffix("_joining") + "_for_inference" * (not problem.training)
    name += "_projected" * (problem.P != problem.H)
    name += "_reset_before" * (isinstance(problem.cell, GRUCell) and problem.cell.reset == "before")
    name += "".join(f"_{word}" for word in ("norm", *problem.cell.norm[:3]) if word) if problem.cell.norm else ""
    weights = next(buffer for buffer in launch.reads if buffer.name in WEIGHTS)
    elements, B, H, packing = prod(weights.shape), problem.B, problem.H, problem.packing
    dtype = "float32" if weights.bytes == 4 * elements else "bfloat16" if "bfloat16_t" in launch.text else "float16"
    per_step = "fused" in name
    if packed := packing if reads_packed(launch) else None:
        name += f"_{packed.mode}_{packed.bits}_bits"
        elements = problem.directions * problem.cell.gates * H * problem.P if per_step else elements * 32 // packed.bits
        dtype = next(word for word, kind in KINDS.items() if f"using S = {kind};" in launch.text)
    rows = constant_of(launch, "ROWS", 8)  # kernels of 8 x 8 products do not define ROWS
    # `needed`: the multiply-adds of one lane. Threadgroups along the hidden units divide the weights among them. But
    # each threadgroup along the batch multiplies by all weights, so the number of these, `down`, is a factor.
    # Threadgroups along the batch are on axis 0 of the grid of `fused`, and on axis 1 for `stepwise`.
    down = launch.groups[not per_step]
    needed = round(rows * elements * down / prod(launch.groups) / launch.threads, 2)
    per = "step" if per_step else "turn"
    return Kernel(name, dtype, B, H, per, rows, launch.threads, needed, text_hash(launch.text, launch.threads))


def constant_of(launch: Launch, name: str, absent: int) -> int:
    """Return the integer that the source of a launch's kernel defines under this name, or `absent` if the source does
    not define it. Only the source says how large a tile is."""
    return constants_of(launch.text).get(name, absent)


@cache
def constants_of(text: str) -> dict[str, int]:
    """Return the integers that a kernel's source defines as constants, by name."""
    found: list[tuple[str, str]] = re.findall(r"^constexpr int (\w+) = (\d+);", text, flags=re.M)
    return {name: int(digits) for name, digits in found}


@cache
def text_hash(text: str, threads: int) -> str:
    """Return a short hash of what determines a kernel's machine code: the number of threads per threadgroup, and the
    source without comments, line numbers and extra spaces."""
    bare = " ".join(re.sub(r"//.*|^\s*#\s*line\b.*", "", text, flags=re.M).split())
    return hashlib.sha256(f"{bare} {threads}".encode()).hexdigest()[:12]


def counted(launch: Launch, problem: Problem) -> tuple[Counted, bool]:
    """Return (line, own) for a launch with a recurrent product. If machine_code.csv has a line for exactly this
    kernel, `line` is this line and `own` is True. Otherwise `line` is the line of the most similar kernel, and `own`
    is False. Kernels are compared by name, dtype, batch rows per threadgroup, and H."""
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
    """Return how many multiply-adds of one loop iteration belong to the matrix product. Multiply-adds that unpack
    quantized weights are left out. Kernels for few batch rows multiply 16 or 32 weights of each column per iteration;
    the shader defines whether it is 16 or 32."""
    packed = re.search(r"_(affine|mxfp|nvfp)\d*_(\d)_bits$", line.kernel)
    if not packed:
        return line.multiply_adds
    if line.rows >= 8:
        return 32 * line.rows
    columns = 1 if "_project_" in line.kernel else 3 if line.kernel.startswith("gru") else 4
    return columns * line.rows * (16 if packed[1] == "nvfp" or (line.rows > 1 and int(packed[2]) % 2 == 0) else 32)


class Work(NamedTuple):
    """What one SIMD-group executes in a launch. cycles: the cycles that a quarter of a GPU core needs for the
    SIMD-group's instructions. spills: the number of loads and stores of spilled registers. turns: how many iterations
    the loop over time steps, or over a product's terms, has. line: the line of machine_code.csv from which the
    instructions come. own: whether this line belongs to exactly this kernel, not to a similar one."""

    cycles: float
    spills: float
    turns: float
    line: Counted
    own: bool


def work_of(launch: Launch, problem: Problem, steps: int) -> Work:
    """Return what one SIMD-group executes in a launch over `steps` time steps, from the instructions that
    machine_code.csv lists for the kernel.

    If the table has only a similar kernel, for example for another H, its cycles are scaled by the number of
    multiply-adds that this launch needs. With quantized weights the number of loop iterations is rounded up. The
    last iteration takes as long as the others, although some lanes may have no weights left.
    """
    line, own = counted(launch, problem)
    needed = kernel_of(launch, problem).needed
    turns = needed / products(line) if line.per == "turn" else steps * (1 if own else needed / line.needed)
    if line.per == "turn" and line.kernel.endswith("_bits"):
        turns = ceil(turns)
    return Work(line.outside + turns * line.cycles, turns * line.spills, turns, line, own)
