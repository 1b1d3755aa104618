"""Choose the kernels whose instructions are counted, compile them, and write machine_code.csv."""

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

from pointwise_cases import ZOO

from mlx_lstm.engines import METAL_ENGINES
from mlx_lstm.engines.cells import GRUCell, LSTMCell, NormOptions, RNNCell
from mlx_lstm.engines.metal import fused
from mlx_lstm.engines.metal.fused import FusedTiling, LayerSize
from mlx_lstm.engines.packing import Packing
from mlx_lstm.engines.predicted import WIDEST, predict
from mlx_lstm.engines.problem import Cut
from mlx_lstm.lab.cases import DTYPES
from mlx_lstm.lab.timing.tasks import Size

from . import cells
from .compiler import HERE, machine_code
from .count import WORDS, count
from .instructions import FILE, Counted, Kernel, has_product, kernel_of
from .launches import Launch
from .times import ours

PROCESSES = 2
CELLS = {"lstm": LSTMCell(), "gru": GRUCell(), "rnn": RNNCell(), "gru-before": GRUCell(reset="before")}
NORMS = [("product", "together", None), ("product", "each", None), ("sum", "together", None)]
NORMS += [(None, "together", "output"), ("product", "together", "output"), ("product", "together", "state")]
NORMED = {f"lstm-norm-{n}": LSTMCell(norm=NormOptions(*norm)) for n, norm in enumerate(NORMS)}
NORMED |= {f"gru-norm-{n}": GRUCell(norm=NormOptions(*norm)) for n, norm in enumerate(NORMS[:2])}
NORMED["rnn-norm-0"] = RNNCell(norm=NormOptions())
"""Cells with layer normalisation. The number at the end of a name is the index of the cell's entry in NORMS. An entry
says what is normalised ("product", or "sum": the product plus the input's part), whether the gates are normalised
together or each by itself, and whether c is normalised (for the output, or also in the state)."""
GENERATED = ("generated_lstm", "generated_slstm")
"""The names of the cells of `mlx_lstm.cells` whose generated kernels are counted."""
GENERATED_NORMED = {f"generated_lstm-norm-{n}": ("lstm", NormOptions(*NORMS[n])) for n in range(3)}
GENERATED_NORMED["generated_slstm-norm-0"] = ("slstm", NormOptions("product"))
"""{name: (cell of `mlx_lstm.cells`, its layer normalisation)} for the cells with a norm whose generated kernels are
counted. The number at the end of a name is an index of NORMS."""


class Case(NamedTuple):
    """A layer whose kernels are counted. which: "backward" for both passes of training, "forward" for inference
    only. projected: the size P of a projected h, or 0 without projection. packing: how the weights are quantized, or
    None. rows: the batch items of a threadgroup of `fused`, or 0 for the default number."""

    engine: str
    cell: str
    dtype: str
    B: int
    H: int
    projected: int = 0
    which: str = "backward"
    packing: Packing | None = None
    rows: int = 0


CORES = (7, 8, 10, 14, 16, 18, 19, 20, 24, 30, 32, 38, 40, 60, 64, 76, 80)
"""The numbers of GPU cores of Apple's chips."""

BATCHES = (*range(1, 17), *range(20, 65, 4), 80, 96, 128, 160, 192, 256, 512)
"""The batch sizes for which `defaults` asks whether `fused` is the default engine."""

BATCH_OF_ROWS = {1: 1, 2: 32, 4: 64, 8: 128}
"""{number of batch items that a threadgroup of `fused` computes: a batch size for which this number is usual}."""


@cache
def defaults() -> frozenset[Case]:
    """Return all layers with a multiple of 32 as H for which `fused` is the default engine on a GPU with some number
    of cores."""
    found, divide = set(), fused.fused_tiling

    @cache
    def divided(layer: LayerSize, backward: bool, cut: Cut) -> FusedTiling:
        return divide(layer, backward=backward, cut=cut)

    def shared(layer: LayerSize, *, backward: bool, cut: Cut) -> FusedTiling:
        """Return the division of a layer among threads, computed only once for layers that differ only in B and in the
        number of cores. With a `cut` the division depends on neither. If it did, the None passed here would raise an
        error."""
        return divided(layer._replace(B=None, cores=None), backward, cut)

    with patch.object(fused, "fused_tiling", shared):
        for cell, (dtype, of), H in product(CELLS, DTYPES.items(), range(32, WIDEST + 1, 32)):
            found |= {
                Case("fused", cell, dtype, BATCH_OF_ROWS[rows], H, rows=rows) for rows in default_rows(cell, of.size, H)
            }
    return frozenset(found)


@cache
def default_rows(cell: str, itemsize: int, H: int) -> frozenset[int]:
    """Return the numbers of batch items of a threadgroup for which `fused` is the default engine, over all batches
    and numbers of cores. Of the dtype only the size matters, here and for `predict`."""
    dtype = next(dtype for dtype in DTYPES.values() if dtype.size == itemsize)
    found = set()
    for B, cores in product(BATCHES, CORES):
        rows = fused.rows_for(LayerSize(CELLS[cell], B, H, itemsize, 1, cores))
        if rows not in found and predict(CELLS[cell], dtype, B, H, cores).engine == "fused":
            found.add(rows)
        if len(found) == 3:  # 1, 2 and either 4 or 8
            break
    return frozenset(found)


def cases() -> Iterator[Case]:
    """Yield the layers whose kernels are counted. Among them are all layers for which `fused` is the default engine,
    and larger LSTMs with `fused`, which show that larger kernels are slower or spill registers."""
    yield from sorted(defaults(), key=lambda case: (case.cell, case.dtype, case.rows, case.H))
    wide = [(rows, H) for rows in (1, 2, 8) for H in (64, 96, 112, 128, 160, 192, 224, 256)]
    at = BATCH_OF_ROWS
    for dtype in ("float32", "float16"):
        yield from (Case("fused", "lstm", dtype, at[rows], H, rows=rows) for rows, H in wide)
    inference = [(rows, H) for rows in (1, 2) for H in (64, 128)] + [(8, 128)]
    yield from (Case("fused", "lstm", "float32", at[rows], H, which="forward", rows=rows) for rows, H in inference)
    for dtype in DTYPES:
        yield from (Case("stepwise", "lstm", dtype, B, 256) for B in (1, 4, 16, 32))
    yield from (Case("stepwise", "lstm", "float32", B, 512) for B in (1, 4, 32))
    yield from (Case("stepwise", "lstm", "float32", B, 256, which="forward") for B in (1, 4, 32))
    for cell in ("gru", "rnn", "gru-before"):
        yield from (Case("stepwise", cell, dtype, B, 256) for dtype in ("float32", "float16") for B in (1, 4, 32))
    yield from (Case("stepwise", "lstm", "float32", B, 256, projected=128) for B in (1, 4, 32))
    packings = [Packing(64, bits, "affine") for bits in (1, 2, 3, 4, 5, 6, 8)]
    packings += [Packing(32, 4, "mxfp4"), Packing(32, 8, "mxfp8"), Packing(16, 4, "nvfp4")]
    packed = [(1, packing) for packing in packings] + [(4, packing) for packing in packings[2:8]]
    packed += [(32, packings[3]), (32, packings[6])]
    for B, packing in packed:
        yield Case("stepwise", "lstm", "float32", B, 256, which="forward", packing=packing)
    few = [(B, H, packings[n]) for B in (1, 32) for H in (64, 128, 192, 256) for n in (3, 6)]
    few += [(1, H, Packing(32, bits, "affine")) for H in (96, 160, 224) for bits in (4, 8)]
    few += [(1, 128, packing) for packing in (packings[2], packings[4], *packings[7:])]
    for B, H, packing in few:
        yield Case("fused", "lstm", "float32", B, H, which="forward", packing=packing, rows=1 if B == 1 else 2)
    yield from (Case("fused", "lstm", "float16", 1, H, which="forward", packing=packings[3]) for H in (128, 192))
    for cell in ("gru", "gru-before", "rnn"):
        for rows in (1, 2):
            yield Case("fused", cell, "float32", at[rows], 128, which="forward", packing=packings[3], rows=rows)
    for cell in NORMED:
        yield Case("fused", cell, "float32", 32, 128, rows=2)
    yield from (Case("fused", cell, "float16", 1, 128, rows=1) for cell in ("lstm-norm-0", "gru-norm-0"))
    yield from (Case("stepwise", cell, "float32", 32, 256) for cell in ("lstm-norm-4", "gru-norm-0"))
    for cell, engine, (B, H) in product(GENERATED, METAL_ENGINES, cells.SIZES):
        yield Case(engine, cell, "float32", B, H, rows=0 if engine == "stepwise" else 1 if B == 1 else 2)
    yield from (Case("fused", cell, "float32", at[8], 128, rows=8) for cell in GENERATED)
    yield from (Case("fused", cell, "float32", 32, 128, rows=2) for cell in GENERATED_NORMED)
    yield from (Case("stepwise", cell, "float32", 32, 128) for cell in ("lstm-norm-0", *GENERATED_NORMED))
    yield Case("stepwise", "lstm", "float16", 1, 256, which="forward", packing=packings[3])
    yield Case("stepwise", "gru", "float32", 1, 256, which="forward", packing=packings[3])


def kernels(chosen: Iterable[Case]) -> dict[Kernel, Launch]:
    """Return {key: launch} for all kernels with a recurrent product that these layers launch. If a kernel is
    launched several times, the value is its first launch."""
    launches = {}
    for case in chosen:
        if case.cell in (*GENERATED, *GENERATED_NORMED):
            launches |= generated(case)
            continue
        size = Size(3, case.B, 8, case.H)
        options = {"cell": (CELLS | NORMED)[case.cell], "projected": case.projected, "packing": case.packing}
        options |= {"rows": case.rows}
        problem, graph = ours(size, DTYPES[case.dtype], case.engine, case.which, **options)
        for launch in graph.launches:
            if has_product(launch) and not launch.name.endswith("_joining"):
                launches.setdefault(kernel_of(launch, problem), launch)
    return launches


def generated(case: Case) -> dict[Kernel, Launch]:
    """Return {key: launch} for the kernels that are generated for a cell. Without layer normalisation these are the
    kernels that run the time steps of a pass, with it those with a recurrent product. In a key the name of the cell
    replaces the hash in the kernel's name."""
    name, norm = GENERATED_NORMED.get(case.cell, (case.cell.removeprefix("generated_"), None))
    problem, graph = cells.layer_of(ZOO[name], case.engine, case.B, case.H, rows=case.rows, norm=norm)
    found = {}
    for launch in cells.kernels(graph) if norm is None else filter(has_product, graph.launches):
        key = kernel_of(launch, problem)
        named = key._replace(kernel=re.sub(r"^pointwise_[0-9a-f]+", f"generated_{name}", key.kernel))
        found.setdefault(named, launch)
    return found


def make(chosen: Iterable[Case]) -> list[Counted]:
    """Compile the kernels of these layers and return their lines of machine_code.csv. A kernel whose source is the
    same for several sizes is compiled once."""
    by_kernel = kernels(chosen)
    launches = {kernel.text: launch for kernel, launch in by_kernel.items()}
    with ThreadPoolExecutor(PROCESSES) as pool:
        texts = pool.map(lambda launch: machine_code(launch.text, launch.threads), launches.values())
        printed = dict(zip(launches, texts, strict=True))
    return [line_of(kernel, printed[kernel.text]) for kernel in by_kernel]


def line_of(kernel: Kernel, printed: str) -> Counted:
    """Return a kernel's line of machine_code.csv. printed: the compiler's output for the kernel."""
    counts = count(printed)
    kinds = {kind: counts.kinds[kind] for kind in (*WORDS, "control")}
    return Counted(
        **kernel._asdict(),
        **kinds,
        registers=counts.registers,
        scratch=counts.scratch,
        instructions=counts.kinds.total(),
        unknown=counts.unknown,
        cycles=counts.cycles,
        outside=counts.outside,
    )


def tool_hash() -> str:
    """Return a short hash of the files that build the compiler and count the instructions. The header of
    machine_code.csv contains the hash, so that a test notices a table made by older files."""
    text = b"".join((HERE / name).read_bytes() for name in ("build.sh", "compiler.py", "count.py", "shim.h"))
    return hashlib.sha256(text).hexdigest()[:12]


def write(lines: Iterable[Counted]) -> None:
    """Write machine_code.csv: a comment with the hash of the counting tool, the names of the columns, and these
    lines."""
    with FILE.open("w", newline="", encoding="ascii") as file:
        file.write(f"# made by `make machine-code`, a tool of hash {tool_hash()}; instructions.py has the columns\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Counted._fields)
        writer.writerows(lines)
