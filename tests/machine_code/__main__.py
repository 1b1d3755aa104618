"""The command line of this package. `make machine-code` counts all kernels and writes machine_code.csv. `python -m
machine_code --help` explains the options that count one layer or predict its time."""

import argparse
from itertools import product
from pathlib import Path

from mlx_lstm.engines import METAL_ENGINES
from mlx_lstm.engines.packing import WIDTHS, Packing
from mlx_lstm.lab.cases import DTYPES
from mlx_lstm.lab.report import table as in_columns
from mlx_lstm.lab.timing.report import write_csv
from mlx_lstm.lab.timing.tasks import PASSES, SIZES, parse_size

from . import measured, predictions, training_step
from .compiler import machine_code
from .count import WORDS
from .instructions import FILE, Counted
from .table import CELLS, GENERATED, NORMED, Case, cases, kernels, make, write
from .times import CHIPS

FIRST = ("kernel", "dtype", "B", "H", "per", "registers", "scratch", "instructions", "multiply_adds", "ratio")
COLUMNS = (*FIRST, *list(WORDS)[1:], "control", "unknown")
LEGEND = """\
Counts of one lane, per time step of a sweep (step) or per iteration of the loop of a product (turn).
ratio: instructions per multiply-add. spills: loads and stores of registers that did not fit; scratch: their bytes.
control: branches, barriers, waits for loads. unknown: inner loops of unknown length, each counted once."""


def main(arguments: list[str] | None = None) -> int:
    """Count the instructions of kernels and print them. Without the option --size count all kernels of the table and
    write machine_code.csv. With --model print predicted times instead."""
    options = make_parser().parse_args(arguments)
    if options.launches:
        print(training_step.text())
        return 0
    if options.model is True:
        return show_predictions(options)
    if options.model:
        print(measured.text(Path(options.model)))
        return 0
    if not options.size:
        lines = make(cases())
        write(lines)
    else:
        B, H = map(int, options.size.split(","))
        chosen = [Case(options.engine or "fused", options.cell, options.dtype, B, H, options.projected)]
        lines = make(chosen)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for kernel, launch in kernels(chosen).items():
                (options.keep / f"{kernel.kernel}.metal").write_text(launch.text)
                (options.keep / f"{kernel.kernel}.txt").write_text(machine_code(launch.text, launch.threads))
    print(in_columns([[name.replace("_", " ") for name in COLUMNS], *map(cells_of, lines)], left=2))
    print(LEGEND if options.size else f"{LEGEND}\nWritten to {FILE}.")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line's options."""
    parser = argparse.ArgumentParser(
        "python -m machine_code",
        description="Count the instructions of our kernels, or (--model) predict the time of a layer on a Mac.",
    )
    add = parser.add_argument
    add("--engine", choices=METAL_ENGINES, help="default: fused; with --model both")
    add("--cell", choices=[*CELLS, *NORMED, *GENERATED], default="lstm")
    add("--dtype", choices=DTYPES, default="float32")
    add("--projected", type=int, default=0, metavar="P", help="width of a projected h")
    add("--size", metavar="B,H", help="count the kernels of this layer only, and write no table")
    add("--keep", type=Path, metavar="FOLDER", help="with --size: write texts and machine code to FOLDER")
    add(
        "--model",
        nargs="?",
        const=True,
        metavar="REPORT",
        help="print launches, bytes, and the times predicted for some Apple chips. With the file that `python -m "
        "mlx_lstm.check` wrote on a Mac, print its measured times beside the predicted ones",
    )
    add("--launches", action="store_true", help="print the number of launches of a training step")
    add("--sizes", nargs="+", type=parse_size, metavar="T,B,I,H", default=SIZES, help="with --model: the layers")
    add("--passes", nargs="+", choices=PASSES, default=[*PASSES], help="with --model; backward includes forward")
    names = [chip.name for chip in CHIPS]
    add("--chips", nargs="+", choices=names, default=["M1", "M2 Max"], help="with --model; default: M1 and M2 Max")
    add("--bits", type=int, choices=WIDTHS["affine"][1], help="with --model: of our weights, in groups of 64")
    add("--csv", metavar="FILE", help="with --model: write the figures to FILE, too")
    return parser


def show_predictions(options: argparse.Namespace) -> int:
    """Print one table of predicted times for every size, pass and chip."""
    records, packing = [], Packing(64, options.bits, "affine") if options.bits else None
    chips = [chip for chip in CHIPS if chip.name in options.chips]
    for size, which, chip in product(options.sizes, options.passes, chips):
        asked = predictions.Asked(size, which, options.dtype, chip, packing)
        lines = predictions.predict(asked, predictions.engines_at(size, options.engine))
        print(f"{predictions.group_text(asked, lines)}\n", flush=True)
        records += predictions.csv_records(asked, lines)
    print(predictions.LEGEND)
    if options.csv:
        write_csv(options.csv, records)
    return 0


def cells_of(line: Counted) -> list[str]:
    """Return the values of one line of machine_code.csv as texts, one for each column of the printed table."""
    ratio = line.instructions / line.multiply_adds if line.multiply_adds else 0.0
    values = line._asdict() | {"ratio": f"{ratio:.2f}"}
    return [f"{values[name]:g}" if isinstance(values[name], float) else str(values[name]) for name in COLUMNS]


if __name__ == "__main__":
    raise SystemExit(main())
