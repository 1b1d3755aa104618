"""The command line of `mlx_lstm.check`, which checks that every engine computes right results on this machine."""

import argparse
import shlex
import sys
from itertools import chain
from pathlib import Path

from ..engines import ENGINES, METAL_ENGINES, choice
from ..ground.machine import VERSION, check_files, in_all_digits, on_one_thread, run_command
from ..lab.command import Parser
from ..lab.engines.comparison import Work, findings
from ..lab.engines.grid import GridCase, grid
from ..lab.engines.report import CannotWriteError, Report, engine_lines
from ..lab.progress import Progress
from ..lab.timing import short
from ..lab.timing.tasks import SIZES, parse_size
from . import further


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return the exit code: 0 if all results are right, 1 if a result is wrong or a comparison failed,
    2 if this machine cannot do what the arguments ask for, 130 if Ctrl-C interrupted it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        check_files(options, "file")
        selection = Selection(options)
    except ValueError as error:
        parser.error(str(error))
    in_all_digits()  # no TF32 in MLX's products on the newest chips: its rounding would count as an error
    on_one_thread()  # several threads of NumPy's BLAS would disturb the measured times
    report = Report(options.file, shlex.join(["python", "-m", "mlx_lstm.check", *arguments]), selection.device)
    try:
        report.save()
        check(selection, report, options)
        return conclude(report)
    except CannotWriteError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        report.save()
        done = f"{len(report.findings)} of {len(selection.work)} comparisons"
        print(f"\ninterrupted after {done}: what was found is in {report.file}", file=sys.stderr)
        return 130


class Selection:
    """The cases and engines to check on this machine, selected by the command's options. The constructor raises
    ValueError if no case has one of the requested names, or if this machine cannot run a requested engine."""

    def __init__(self, options: argparse.Namespace):
        self.device: str = choice.current_device()
        self.cases: list[GridCase] = grid(options.full)
        texts = options.problems or [""]
        self.numbers: list[int] = [n for n, case in enumerate(self.cases) if any(text in case.name for text in texts)]
        if not self.numbers:
            raise ValueError(f"no problem has {' or '.join(texts)} in its name")
        self.hindrances: dict[str, str] = {engine: self.hindrance(engine) for engine in ENGINES}
        for engine in options.engines or ():
            if self.hindrances[engine]:
                raise ValueError(f"{engine} cannot run here: {self.hindrances[engine]}")
        self.asked: bool = bool(options.engines)  # whether the user chose engines
        wanted = options.engines or ENGINES
        self.engines: list[str] = [word for word in ENGINES if word in wanted and not self.hindrances[word]]
        pairs = ((n, engine) for n in self.numbers for engine in self.engines)
        self.work: Work = [(n, engine) for n, engine in pairs if not self.cases[n].hindrance(engine)]

    def hindrance(self, engine: str) -> str:
        """Return why an engine can run none of the selected cases, or "" if it can run one."""
        reasons = [self.cases[n].hindrance(engine) for n in self.numbers]
        return reasons[0] if all(reasons) else ""

    def absent(self) -> list[str]:
        """Return a list with one line about the engines that cannot run on this machine and the number of comparisons
        that a Mac would add. The list is empty if the user chose the engines, or if all engines can run."""
        missing = [engine for engine in ENGINES if self.hindrances[engine]]
        if self.asked or not missing:
            return []
        on_a_mac = {"device": "gpu", "metal": True}
        able = [self.cases[n].hindrance(engine, **on_a_mac) for n in self.numbers for engine in missing]
        metal = all(engine in METAL_ENGINES for engine in missing)
        more = f"; a Mac would add them: {able.count('')} comparisons, and their times" if metal else ""
        return [f"not here   {', '.join(missing)}: {self.hindrances[missing[0]]}{more}"]


def check(selection: Selection, report: Report, options: argparse.Namespace) -> None:
    """Compare all engines with float64, measure their times, and with `--full` run the other commands. Print a line
    about each, and add the findings to the report."""
    card = report.machine
    versions = f"MLX {card['mlx']}, Python {card['python']}, NumPy {card['numpy']}, kernels {card['kernels']}"
    print(f"mlx_lstm {card['mlx_lstm']} on {card['chip']}, {card['system']}, {versions}", flush=True)
    with Progress() as progress:
        found = findings(selection.work, selection.cases, options.full)
        for _ in progress.each(selection.work, "comparisons"):
            report.add(next(found))
        for engine in selection.engines:
            mine = [finding for finding in report.findings if finding.engine == engine]
            progress.print("\n".join(engine_lines(engine, mine)))
        for line in selection.absent():
            progress.print(line)
        report.save()
        time_engines(selection, report, options, progress)
        for name, command in further.commands(choice.has_metal()).items() if options.full else ():
            progress.say(f"{name}, which is a command of its own")
            line, report.more[name] = further.run(name, command)
            progress.print(line)
            report.save()


def time_engines(selection: Selection, report: Report, options: argparse.Namespace, progress: Progress) -> None:
    """Measure the time of a training step at each size. Skip engines whose process ended or hung during the comparisons
    with float64. With --full also make the measurements that check the model of times in tests/machine_code."""
    # On a CPU measure every second size only, because `mlx.nn.LSTM` takes minutes there.
    default = SIZES if options.full or selection.device == "gpu" else SIZES[::2]
    sizes = default if options.sizes is None else options.sizes
    lost = {finding.engine for finding in report.findings if finding.lost}
    on_gpu = choice.has_metal() and selection.device == "gpu"
    ours = METAL_ENGINES if on_gpu else ("numpy" if selection.device == "cpu" else "ops",)
    engines = [engine for engine in ours if engine in selection.engines and engine not in lost]
    groups = short.measure_sizes(engines, sizes, selection.device, progress)
    if options.full and on_gpu:
        groups = chain(groups, short.settle(engines, progress))
    for rows in groups:
        report.times.append(rows)
        progress.print(short.time_line(rows))
        report.save()


def conclude(report: Report) -> int:
    """Write the report and print the verdict. Return the exit code: 0 if all comparisons are right, else 1."""
    reasons = report.reasons()
    right = f"RIGHT: all {len(report.findings)} comparisons are within their bounds"
    report.verdict = f"WRONG: {'; '.join(reasons)}" if reasons else right
    report.save()
    print(f"written to {report.file}: please attach it to an issue, whatever the verdict")
    print(f"verdict: {report.verdict}")
    return 1 if reasons else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line's options."""
    parser = Parser(
        "python -m mlx_lstm.check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Check that mlx-lstm computes correct results on this machine.\n\n"
        "The command runs small problems on every engine (implementation) that works\n"
        "here. It compares all results and gradients with a float64 reference. Then it\n"
        "measures the time of a training step, of our layer and of mlx.nn.LSTM. It writes\n"
        "a report, which you can attach to an issue.",
        epilog="examples:\n"
        "  the usual check, but no times:\n"
        "    python -m mlx_lstm.check --sizes\n"
        "  only LSTMs, on one engine:\n"
        "    python -m mlx_lstm.check --sizes --engines numpy --problems lstm\n\n"
        "The exit code is 0 if every result is right, 1 if a result is wrong or a\n"
        "comparison failed, and 2 if the command cannot do what you asked for.",
    )
    add = parser.add_argument
    add(
        "--full",
        action="store_true",
        help="compare every option of every cell, too, and measure all sizes. On a Mac also measure which engine is "
        "faster at which size, and compare with MPSGraph",
    )
    engines = (
        f"check these engines only, of {', '.join(ENGINES)}; the exit code is 2 if one cannot run on this machine; "
        "default: all that can run"
    )
    add("--engines", nargs="+", choices=ENGINES, metavar="ENGINE", help=engines)
    add("--problems", nargs="+", metavar="TEXT", help="run only the problems whose name contains one of these texts")
    sizes = (
        "measure the time at these sizes: time steps, sequences in a batch, inputs, hidden units; "
        "--sizes without a value measures no time"
    )
    add("--sizes", nargs="*", type=parse_size, metavar="T,B,I,H", help=sizes)
    file = Path("mlx-lstm-check.json")
    add("--file", metavar="FILE", type=Path, default=file, help=f"write the report to FILE; default: {file}")
    parser.add_argument("--version", action="version", version=f"mlx-lstm {VERSION}")
    return parser


if __name__ == "__main__":
    run_command(main)
