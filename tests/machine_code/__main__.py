"""The command line: `make machine-code`, or for some layers only `python -m machine_code --help`."""

import argparse
from pathlib import Path

from mlx_lstm.bench.model.machine_code import Counted
from mlx_lstm.bench.report import table as in_columns
from mlx_lstm.bench.tasks import DTYPES

from .compiler import machine_code
from .count import WORDS
from .table import CELLS, FILE, Case, cases, kernels, make, write

FIRST = ("kernel", "dtype", "B", "H", "per", "registers", "scratch", "instructions", "multiply_adds", "ratio")
COLUMNS = (*FIRST, *list(WORDS)[1:], "control", "unknown")
LEGEND = """\
Per time step of a sweep (step) or turn of a product's loop (turn), of one lane. ratio: instructions per multiply-add;
spills: stores and loads of registers in memory, scratch: bytes of it; control: branches, barriers, waits for loads;
unknown: loops within that count as one turn."""


def main() -> None:
    """Count and print; without options all of the table, which is written then."""
    parser = argparse.ArgumentParser("python -m machine_code", description="Count the instructions of our kernels.")
    parser.add_argument("--engine", choices=("fused", "stepwise"), default="fused")
    parser.add_argument("--cell", choices=CELLS, default="lstm")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--projected", type=int, default=0, metavar="P", help="width of a projected h")
    parser.add_argument("--size", metavar="B,H", help="count this layer's kernels only, and write no table")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="with --size: write texts and machine code there")
    given = parser.parse_args()
    if not given.size:
        lines = make(cases())
        write(lines)
    else:
        B, H = map(int, given.size.split(","))
        chosen = [Case(given.engine, given.cell, given.dtype, B, H, given.projected)]
        lines = make(chosen)
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            for kernel, launch in kernels(chosen).items():
                (given.keep / f"{kernel.kernel}.metal").write_text(launch.text)
                (given.keep / f"{kernel.kernel}.txt").write_text(machine_code(launch.text, launch.threads))
    print(in_columns([[name.replace("_", " ") for name in COLUMNS], *map(cells_of, lines)]))
    print(LEGEND if given.size else f"{LEGEND}\nWritten to {FILE}.")


def cells_of(line: Counted) -> list[str]:
    """A line as printed."""
    ratio = line.instructions / line.multiply_adds if line.multiply_adds else 0.0
    values = line._asdict() | {"ratio": f"{ratio:.2f}"}
    return [f"{values[name]:g}" if isinstance(values[name], float) else str(values[name]) for name in COLUMNS]


if __name__ == "__main__":
    main()
