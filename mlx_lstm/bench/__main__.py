"""The command line of the benchmark, `python -m mlx_lstm.bench`."""

import argparse
import shlex
import sys
from collections.abc import Callable, Collection, Iterable

import mlx.core as mx

from ..engines import ENGINES, choice, choose
from ..engines.choice import has_metal
from ..ground.machine import VERSION, check_files, in_all_digits, run_command
from ..lab.cases import DTYPES
from ..lab.command import Parser, check_plot
from ..lab.progress import Progress
from ..lab.report import machine_card, one_line
from ..lab.timing.cases import CASES, find_contender, is_installed
from ..lab.timing.report import LEGEND, card_text, group_text, plot, records, references, write_csv
from ..lab.timing.rounds import Measurement, label, measure
from ..lab.timing.tasks import MEMORY_SIZE, PASSES, SIZES, Size, Task, parse_size
from .host import HOST_SIZE, host_text, measure_host
from .host import LEGEND as HOST_LEGEND
from .tune import tune

QUICK = {"seconds": 1.0, "rounds": 3}  # defaults of --seconds and --rounds with --quick
FULL = {"seconds": 10.0, "rounds": 5}  # and without --quick

MOST = 86_400
"""The largest value of --seconds and --patience: the seconds of a day, because the system's clocks refuse to wait for
some weeks. It is also the largest value of --rounds."""

PASSES_HELP = (
    "the passes to measure: forward; backward, which includes the forward pass; paced, a step every 3 ms (only with "
    "--case streaming); default: depends on the case"
)
MEASURING = ("case", "sizes", "passes", "contenders", "engine", "device", "dtype", "patience", "csv")
APPLY = {
    "": (*MEASURING, "checkpoint_every", "rounds", "seconds", "quick", "plot"),
    "memory": (*MEASURING, "checkpoint_every"),
    "host": ("case", "sizes", "dtype", "csv"),
    "tune": ("case", "tune_file"),
}
"""The options that may be used in each kind of run. The key is the option that starts this kind of run, or "" for a
measurement of times."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return the exit code: 0 if all is well, 1 if an implementation failed or its results were wrong,
    2 for a wrong option, 130 if Ctrl-C interrupted it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        check_together(options)
        complete(options)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    in_all_digits()  # no TF32 in MLX's products on the newest chips: its rounding would count as an error
    if options.tune or options.host:
        try:
            return tune(options.tune_file) if options.tune else show_host(options)
        except KeyboardInterrupt:
            print("\ninterrupted: nothing is kept, because the file is written at the end", file=sys.stderr)
            return 130
    card = machine_card(shlex.join(["python", "-m", "mlx_lstm.bench", *arguments]), options.device)
    print(card_text(card), flush=True)
    groups: list[list[Measurement]] = []
    try:
        with Progress() as progress:
            run(options, progress, card, groups)
    except KeyboardInterrupt:
        print(interrupted_text(groups, options), file=sys.stderr)
        return 130
    print(f"\n{LEGEND}")
    if options.plot and any(map(references, groups)):
        plot(options.plot, groups, card)
    failures = failures_text(row for rows in groups for row in rows)
    print(failures, end="", file=sys.stderr)
    return 1 if failures else 0


def failures_text(rows: Iterable[Measurement]) -> str:
    """Return a line for each implementation that failed: its first failure, and the number of further ones."""
    failed: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.failed:
            failed.setdefault(f"{label(row.task)} ({row.task.engine})", []).append(row)
    return "".join(
        f"{name} at {first.task.size} {first.task.which}: {one_line(first.status)}"
        + (f" (and {len(others)} more)\n" if others else "\n")
        for name, (first, *others) in failed.items()
    )


def shortened(row: Measurement, printed: Collection[str]) -> Measurement:
    """Return a measurement for printing: a status of several lines that was printed before becomes its first line."""
    return row._replace(status=f"{row.status.splitlines()[0]} (as above)") if row.status in printed else row


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line's options."""
    parser = Parser(
        "python -m mlx_lstm.bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure how fast mlx-lstm, mlx.nn.LSTM, torch and TensorFlow are on this machine.\n\n"
        "All libraries (contenders) get the same numbers. The command compares their\n"
        "results first, and does not time a library whose results are wrong. Each contender\n"
        "runs in a process of its own, and the processes take turns. The command prints\n"
        "milliseconds, and our time divided by the time of each other library.",
        epilog="examples:\n"
        "  a quick look:\n"
        "    python -m mlx_lstm.bench --quick\n"
        "  training at one size:\n"
        "    python -m mlx_lstm.bench --sizes 100,32,64,256 --passes backward\n"
        "  one time step per call:\n"
        "    python -m mlx_lstm.bench --case streaming\n\n"
        "The exit code is 0, or 1 if a contender failed or its results are wrong, or 2 if\n"
        "the command cannot do what you asked for.",
    )
    add_what(parser.add_argument_group("what is measured").add_argument)
    add_how(parser.add_argument_group("how long, and where the figures go").add_argument)
    add = parser.add_argument_group("measure something else instead of times").add_argument
    memory = f"measure the peak memory of a backward pass, at the size {MEMORY_SIZE} or at those of --sizes"
    add("--memory", action="store_true", help=memory)
    add("--host", action="store_true", help="measure how long Python takes to build the graph of a call")
    tune = "on a Mac: measure which Metal engine is faster at which size, and save the result for all later runs"
    add("--tune", action="store_true", help=tune)
    where = "write the result of --tune to FILE; default: the file in your cache folder that the library reads"
    add("--tune-file", metavar="FILE", help=where)
    parser.add_argument("--version", action="version", version=f"mlx-lstm {VERSION}")
    return parser


def add_what(add: Callable[..., object]) -> None:
    """Add the options that select what is measured, by the method `add_argument` of a group."""
    cases = (
        "the computation to measure. lstm (the default): an LSTM layer in one direction; block_lstm: TensorFlow's "
        "BlockLSTM; streaming: an LSTM that runs one time step per call; cudnn_lstm, cudnn_gru: TensorFlow's CudnnRNN "
        "with two bidirectional layers"
    )
    add("--case", choices=CASES, metavar="CASE", help=cases)
    sizes = (
        "the sizes to measure: time steps, sequences in a batch, inputs, hidden units; default for lstm: "
        f"{' '.join(map(str, SIZES))}"
    )
    add("--sizes", nargs="+", type=parse_size, metavar="T,B,I,H", help=sizes)
    add("--passes", nargs="+", choices=(*PASSES, "paced"), metavar="PASS", help=PASSES_HELP)
    names = "; ".join(f"{case}: {', '.join(CASES[case].contenders)}" for case in CASES)
    contenders = (
        f"the libraries (contenders) to compare, by case. {names}. module:attribute names a Contender of your own; "
        "default: all that are installed"
    )
    add("--contenders", nargs="+", metavar="NAME", help=contenders)
    engines = f"our engines (implementations) to time, of {', '.join(ENGINES)}; default: what a layer would use here"
    add("--engine", nargs="+", choices=ENGINES, metavar="ENGINE", help=engines)
    every = (
        "in the backward pass of --case lstm also measure our layer with the option checkpoint_every=K, which needs "
        "less memory and more time; K may be auto"
    )
    add("--checkpoint-every", nargs="+", type=every_option, metavar="K", help=every)
    add("--device", choices=("cpu", "gpu"), help="the device of contenders that use MLX; default: MLX's default device")
    add("--dtype", choices=DTYPES, help="the dtype of the arrays; default: float32")


def add_how(add: Callable[..., object]) -> None:
    """Add the options that say how long to measure, and which files to write."""
    add("--quick", action="store_true", help="fewer sizes, rounds and seconds, unless you set them yourself")
    add("--rounds", type=int, metavar="N", help=f"how many turns each contender has; default: {FULL['rounds']}")
    seconds = f"seconds for each contender, size and pass, all rounds together; default: {FULL['seconds']:g}"
    add("--seconds", type=float, metavar="S", help=seconds)
    patience = "how many seconds to wait before a turn until other programs pause; default: 2"
    add("--patience", type=float, metavar="S", help=patience)
    add("--csv", metavar="FILE", help="also write the figures and the machine's description to FILE")
    add("--plot", metavar="FILE", help="also draw the ratios into FILE; needs matplotlib")


def every_option(text: str) -> int | str:
    """Parse the value of --checkpoint-every: a number of steps or "auto"."""
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"K must be a number of at least 1 or auto but got {text!r}")
    return text if text == "auto" else int(text)


def check_together(options: argparse.Namespace) -> None:
    """Raise ValueError if an option cannot be used in this kind of run (measurement, --tune or --host)."""
    kinds = [name for name in APPLY if name and getattr(options, name)]
    if len(kinds) > 1:
        raise ValueError(f"one of {' and '.join(f'--{name}' for name in kinds)} at a time")
    kind = kinds[0] if kinds else ""  # "": a measurement of times
    chosen = [name for name, value in vars(options).items() if value not in (None, False) and name != kind]
    if idle := [f"--{dashed(name)}" for name in chosen if name not in APPLY[kind]]:
        raise ValueError(f"{', '.join(idle)}: of no use {f'with --{kind}' if kind else 'without --tune'}")
    if kind and options.case not in (None, "lstm"):
        raise ValueError(f"--{kind} is about the case lstm but got --case {options.case}")
    for name in ("engine", "checkpoint_every"):
        if getattr(options, name) and options.contenders and "ours" not in options.contenders:
            raise ValueError(f"--{dashed(name)} is about the contender ours, which is not among --contenders")
    if options.checkpoint_every and (options.case not in (None, "lstm") or options.passes == ["forward"]):
        raise ValueError("--checkpoint-every is about the case lstm and its backward pass")
    check_files(options, "csv", "plot")


def dashed(name: str) -> str:
    return name.replace("_", "-")


def complete(options: argparse.Namespace) -> None:
    """Set every option that the user left out to its default. Raise ValueError if a value is wrong."""
    options.case = options.case or "lstm"
    case = CASES[options.case]
    one = MEMORY_SIZE if options.memory else HOST_SIZE
    sizes = [one] if options.memory or options.host else list(case.sizes[::2] if options.quick else case.sizes)
    defaults = (QUICK if options.quick else FULL) | {"sizes": sizes, "dtype": "float32", "patience": 2.0}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not (1 <= options.rounds <= MOST and 0 < options.seconds <= MOST):
        raise ValueError(f"--rounds must be at least 1, --seconds greater than 0, and both at most {MOST}")
    if not 0 <= options.patience <= MOST:
        raise ValueError(f"--patience must be at least 0 and at most {MOST}")
    options.passes = options.passes or (["backward"] if options.memory else list(case.default_passes))
    if missing := set(options.passes) - set(case.passes):
        raise ValueError(f"--passes: the case {options.case} has no {missing.pop()}")
    options.device = options.device or choice.current_device()
    if options.host or options.tune:
        return
    for size in options.sizes:
        engines_for(size, options)  # raises an error for a requested engine that cannot run
    if options.device == "gpu" and not (has_metal() or mx.is_available(mx.gpu)):
        raise ValueError("--device gpu: MLX has no GPU on this machine")
    if options.contenders is None:
        options.contenders = [name for name, contender in case.contenders.items() if is_installed(contender)]
    for name in options.contenders:
        contender = find_contender(name, options.case)
        if not is_installed(contender):
            raise ValueError(f"{name} needs the package {contender.needs}, which is not installed")
    if options.plot and not set(case.references) & set(options.contenders):
        raise ValueError(f"--plot draws ratios: add one of {', '.join(case.references)} to --contenders")
    if options.plot:
        check_plot(options.plot, "examples")


def show_host(options: argparse.Namespace) -> int:
    """Print, for every size, the time that the host takes to build the graph of a call."""
    lines = []
    with Progress() as progress:
        for size in options.sizes:
            progress.say(f"graphs at {size}")
            costs = measure_host(size, options.dtype)
            progress.print(f"{host_text(size, options.dtype, costs)}\n")
            lines += [size._asdict() | {"dtype": options.dtype} | cost._asdict() for cost in costs]
    print(HOST_LEGEND)
    if options.csv:
        write_csv(options.csv, lines)
    return 0


def engines_for(size: Size, options: argparse.Namespace) -> list[str]:
    """Return the names of the engines to measure at a size. These are the engines of the option --engine or, without
    this option, the one engine that the library chooses. Raise ValueError if a requested engine cannot run."""
    case = CASES[options.case]
    # traced=False: the timed calls are not inside a transformation such as `mx.compile`.
    where = {"sizes": size, "dtype": DTYPES[options.dtype], "device": options.device, "traced": False}
    where |= {"metal": has_metal(), "cell": case.cell, "bidirectional": case.bidirectional}
    return [choose(requested=word, **where).engine for word in dict.fromkeys(options.engine or [None])]


def interrupted_text(groups: list[list[Measurement]], options: argparse.Namespace) -> str:
    """Return the text to print after Ctrl-C: how many tables are complete, and where they are."""
    done = f"{len(groups)} of {len(options.sizes) * len(options.passes)} tables"
    kept = f"they are in {options.csv}" if options.csv else "they are printed above; --csv FILE would keep them"
    return f"\ninterrupted after {done}" + (f": {kept}" if groups else ": nothing is kept")


def run(options: argparse.Namespace, progress: Progress, card: dict[str, str], groups: list[list[Measurement]]) -> None:
    """Measure every size and pass, and add the measurements to `groups`. Print each result when it is done and add it
    to the CSV file. The errors of an implementation are printed in full only once."""
    case, printed = CASES[options.case], set[str]()
    for size in options.sizes:
        progress.title = f"{len(groups) + 1} of {len(options.sizes) * len(options.passes)}: {size}"
        progress.say("computing the float64 reference")
        judge = case.judge(case.draw(size, options.dtype), options.dtype, backward="backward" in options.passes)
        for which in options.passes:
            everies: list[int | str | None] = [None]
            if which == "backward" and options.checkpoint_every:
                everies += [*dict.fromkeys(options.checkpoint_every)]
            tasks = [
                Task(contender, engine, size, which, options.dtype, options.device, options.case, every)
                for contender in dict.fromkeys(options.contenders)
                for engine in (engines_for(size, options) if contender == "ours" else ["-"])
                for every in (everies if contender == "ours" else [None])
            ]
            rounds = 0 if options.memory else options.rounds
            progress.count(len(groups), len(options.sizes) * len(options.passes))
            progress.title = f"{len(groups) + 1} of {len(options.sizes) * len(options.passes)}: {size} {which}"
            times = {"seconds": options.seconds, "rounds": rounds, "patience": options.patience}
            rows = measure(tasks, judge, progress=progress, **times)
            groups.append(rows)
            progress.print(f"\n{group_text([shortened(row, printed) for row in rows])}")
            if options.csv:
                write_csv(options.csv, [record | card for record in records(groups)])
            printed.update(row.status for row in rows if "\n" in row.status)


if __name__ == "__main__":
    run_command(main)
