"""The command line: `python -m mlx_lstm.check --help`."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..bench.__main__ import size_option
from ..bench.rounds import Row
from ..engines import METAL_ENGINES, choice
from ..engines.choice import ENGINES
from ..machine import in_all_digits, run_command
from . import further
from .comparison import Finding
from .grid import Problem, grid
from .process import Work, findings, serve
from .report import card, card_line, engine_lines, time_line, write
from .timing import default_sizes, timed


def main(arguments: list[str] | None = None) -> int:
    """Run the command. The exit code is 0, 1 if something is wrong or failed, 2 for what cannot be done here."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.worker is not None:
        serve(options.worker)
        return 0
    try:
        here = Here(options)
    except ValueError as error:
        parser.error(str(error))
    in_all_digits()
    about = card(shlex.join(["python", "-m", "mlx_lstm.check", *arguments]), here.device)
    print(card_line(about), flush=True)
    found = list(shown(findings(here.work, here.problems, options.full), len(here.work)))
    for engine in here.engines:
        print("\n".join(engine_lines(engine, [finding for finding in found if finding.engine == engine])), flush=True)
    for line in here.absent():
        print(line)
    times = list(show_times(here, found, options))
    more: dict[str, Any] = {}
    for name, command in further.commands(here.metal).items() if options.full else ():
        line, more[name] = further.run(name, command)
        print(line, flush=True)
    return conclude(options.file, about, found, times, more)


class Here:
    """What is checked on this machine. ValueError if what was asked for cannot be."""

    def __init__(self, options: argparse.Namespace):
        self.device: str = choice.current_device()
        self.metal: bool = mx.metal.is_available()
        self.problems: list[Problem] = grid(options.full)
        texts = options.problems or [""]
        self.numbers: list[int] = [n for n, one in enumerate(self.problems) if any(text in one.name for text in texts)]
        if not self.numbers:
            raise ValueError(f"no problem has {' or '.join(texts)} in its name")
        self.hindrances: dict[str, str] = {word: self.hindrance(word) for word in ENGINES}
        for word in options.engines or ():
            if self.hindrances[word]:
                raise ValueError(f"{word} cannot run here: {self.hindrances[word]}")
        self.asked: bool = bool(options.engines)
        words = options.engines or ENGINES
        self.engines: list[str] = [word for word in ENGINES if word in words and not self.hindrances[word]]
        pairs = ((n, word) for n in self.numbers for word in self.engines)
        self.work: Work = [(n, word) for n, word in pairs if not self.refuses(n, word)]

    def refuses(self, n: int, engine: str) -> str:
        """Why an engine cannot run a problem here."""
        return self.problems[n].hindrance(engine, self.device, self.metal)

    def hindrance(self, engine: str) -> str:
        """Why an engine can run none of the problems."""
        reasons = [self.refuses(n, engine) for n in self.numbers]
        return reasons[0] if all(reasons) else ""

    def absent(self) -> list[str]:
        """What another machine would add."""
        missing = [word for word in ENGINES if self.hindrances[word]]
        if self.asked or not missing:
            return []
        able = [self.problems[n].hindrance(word, "gpu", metal=True) for n in self.numbers for word in missing]
        metal = all(word in METAL_ENGINES for word in missing)
        more = f"; a Mac would add them: {able.count('')} comparisons, and their times" if metal else ""
        return [f"not here   {', '.join(missing)}: {self.hindrances[missing[0]]}{more}"]


def shown(found: Iterable[Finding], count: int) -> Iterator[Finding]:
    """The findings, with their number on a terminal's last line while they come."""
    terminal = sys.stderr.isatty()
    for n, finding in enumerate(found, 1):
        if terminal:
            print(f"\r{n} of {count} comparisons", end="" if n < count else "\r\033[K", file=sys.stderr, flush=True)
        yield finding


def show_times(here: Here, found: list[Finding], options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of each size and pass, printed; without engines whose process ended or hung."""
    sizes = default_sizes(here.device, options.full) if options.sizes is None else options.sizes
    lost = {finding.engine for finding in found if finding.lost}
    ours = METAL_ENGINES if here.metal and here.device == "gpu" else ("numpy" if here.device == "cpu" else "ops",)
    engines = [word for word in ours if word in here.engines and word not in lost]
    for rows in timed(engines, sizes, here.device, here.metal, options.full):
        print(time_line(rows), flush=True)
        yield rows


def conclude(
    file: Path, about: dict[str, str], found: list[Finding], times: list[list[Row]], more: dict[str, Any]
) -> int:
    """Write the file, print the verdict; the exit code."""
    try:
        write(file, about, found, times, more)
    except OSError as error:
        print(f"cannot write {file}: {error}; --file names another place", file=sys.stderr)
        more = more | {"file": {"failed": True}}
    else:
        print(f"written to {file}: please attach it to an issue, whatever the verdict")
    reasons = []
    if wrong := [finding for finding in found if finding.failure]:
        engines = ", ".join(dict.fromkeys(finding.engine for finding in wrong))
        reasons.append(f"{len(wrong)} of {len(found)} comparisons failed, of {engines}")
    for row in (row for rows in times for row in rows if row.failed and row.task.contender == "ours"):
        reasons.append(f"{row.task.engine} failed at {row.task.size}")
    reasons += [f"{name} failed" for name, result in more.items() if result["failed"]]
    if reasons:
        print(f"verdict: WRONG: {'; '.join(dict.fromkeys(reasons))}")
        return 1
    print(f"verdict: RIGHT: all {len(found)} comparisons are within their bounds")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        "python -m mlx_lstm.check",
        description="Compile every kernel of this package, compare what each engine computes with float64, time it "
        "against mlx.nn.LSTM, and write a file to attach to an issue. Exit code 1 if something is wrong.",
    )
    add = parser.add_argument
    add("--full", action="store_true", help="every option, all sizes and passes; --tune, and compare where PyObjC is")
    add("--engines", nargs="+", choices=ENGINES, help="those that have to be checked; default: all that run here")
    add("--problems", nargs="+", metavar="TEXT", help="only problems with one of these texts in their name")
    add("--sizes", nargs="*", type=size_option, metavar="T,B,I,H", help="what is timed; without one, nothing")
    add("--file", metavar="FILE", type=Path, default=Path("mlx-lstm-check.json"), help="default: mlx-lstm-check.json")
    add("--worker", metavar="WORK", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    run_command(main)
