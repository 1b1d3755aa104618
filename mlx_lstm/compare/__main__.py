"""The command line of `mlx_lstm.compare`, which compares the ops of `mlx_lstm.mpsgraph` with Apple's MPSGraph, with
torch and with the float64 oracle."""

import argparse
import sys
from contextlib import suppress
from typing import Any, TextIO

from ..ground.machine import VERSION, check_files, in_all_digits, run_command
from ..lab.command import Parser, check_plot
from ..lab.mpsgraph import judge, report
from ..lab.mpsgraph.cases import GATES, CompareCase, grid
from ..lab.mpsgraph.contenders import HOW_TO_GET, Contender, Outcome, all_contenders
from ..lab.mpsgraph.dump import Dump, load_dump
from ..lab.mpsgraph.files import Golden, load_golden, save_golden
from ..lab.mpsgraph.measure import ComparisonRow, rows_of
from ..lab.progress import Progress
from ..recurrence import unguarded
from .experiments import experiments, settle, settle_text
from .readings import Reading, base_case, search

KINK_MARGIN = 1e-3
"""The smallest allowed distance of an argument of relu or hard_sigmoid from a kink, where the slope jumps. Nearer to a
kink, rounding can change gradients by much."""

APPLY = {
    "arrays": ("op", "descriptor", "contenders", "all", "json", "plot"),
    "settle": ("json",),
    "golden": ("contenders", "cases", "all", "json", "plot", "record"),
}
"""The options --arrays, --settle and --golden (the modes), each with the options that may be combined with it."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return the exit code: 0 if all results agree, 1 if something differs or failed, 2 if the
    arguments are wrong or this machine cannot run what they ask for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        check_options(options)
        contenders = present(options.contenders)
        golden = load_golden(options.golden) if options.golden else None
        dumps = load_dump(options.arrays, options.op, options.descriptor) if options.arrays else []
    except ValueError as error:
        parser.error(str(error))
    in_all_digits()  # no TF32 in the products of MLX on the newest chips
    try:
        with unguarded():  # no trial runs of kernels: the command checks all results
            if options.settle:
                return run_settle(contenders, options)
            return run_arrays(dumps, contenders, options) if dumps else run_compare(contenders, golden, options)
    except KeyboardInterrupt:
        print("\ninterrupted: nothing is kept, because files are written at the end", file=sys.stderr)
        return 130
    finally:
        for contender in contenders.values():
            contender.close()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line's options."""
    parser = Parser(
        "python -m mlx_lstm.compare",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compare mlx_lstm.mpsgraph with Apple's MPSGraph, with torch and with a float64 reference.\n\n"
        "The command runs every option in many small cases. It prints the largest error of\n"
        "each result and gradient, divided by the allowed error, which is derived for each\n"
        "case. MPSGraph runs on a Mac only. On another machine the command compares the\n"
        "other implementations, or arrays that were saved on a Mac.",
        epilog="examples:\n"
        "  only the cases with a mask:\n"
        "    python -m mlx_lstm.compare --cases mask\n"
        "  on a Mac, answer the open questions:\n"
        "    python -m mlx_lstm.compare --settle\n"
        "  arrays that an app has saved:\n"
        "    python -m mlx_lstm.compare --arrays dump.npz --op lstm\n\n"
        "The exit code is 0 if everything agrees, 1 if something differs or failed, and 2\n"
        "if the command cannot do what you asked for.",
    )
    add = parser.add_argument
    names = ", ".join(all_contenders())
    help_ = f"run only these implementations, of {names}; default: all that work on this machine"
    add("--contenders", nargs="+", metavar="NAME", help=help_)
    add("--cases", nargs="+", metavar="TEXT", help="run only the cases whose name contains one of these texts")
    every = "print every result; without it, the worst result for each pair of implementations is printed"
    add("--all", action="store_true", help=every)
    add("--json", metavar="FILE", help="write the report to FILE as JSON; - prints it instead")
    add("--plot", metavar="FILE", help="draw each error divided by the allowed error into FILE; needs matplotlib")
    settle = "answer the questions that Apple's documentation leaves open, by experiments; needs MPSGraph"
    add("--settle", action="store_true", help=settle)
    record = "save all cases and MPSGraph's results in FILE, an .npz; without MPSGraph, the results of the reference"
    add("--record", metavar="FILE", help=record)
    golden = "compare with the results that --record has saved in FILE; works on any machine"
    add("--golden", metavar="FILE", help=golden)
    arrays = "compare with your own arrays: a folder of .npy files, an .npz or a .safetensors file; needs --op"
    add("--arrays", metavar="PATH", help=arrays)
    add("--op", choices=tuple(GATES), help="the operation of MPSGraph that computed your arrays")
    descriptor = (
        "the properties of your operation's descriptor that differ from Apple's defaults, "
        """such as '{"bidirectional": true}'"""
    )
    add("--descriptor", metavar="JSON", help=descriptor)
    parser.add_argument("--version", action="version", version=f"mlx-lstm {VERSION}")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for an option that cannot be used with another option, or that needs a missing package."""
    chosen = [name for name, value in vars(options).items() if value]  # all defaults are None or False
    for mode in (mode for mode in APPLY if mode in chosen):
        for name in chosen:
            if name != mode and name not in APPLY[mode]:
                raise ValueError(f"--{name} does not go with --{mode}")
    if bool(options.arrays) != bool(options.op) or (options.descriptor and not options.arrays):
        raise ValueError(f"--arrays and --op go together, --descriptor with both; --op is one of {', '.join(GATES)}")
    if options.plot:
        check_plot(options.plot, "compare")
    check_files(options, "json", "plot", "record")


def present(names: list[str] | None) -> dict[str, Contender]:
    """Return the contenders (implementations) to run. Raise ValueError if one that the user named cannot run here."""
    everyone = all_contenders()
    if names is None:
        return {name: one for name, one in everyone.items() if one.missing() is None}
    for name in names:
        if name not in everyone:
            raise ValueError(f"no contender {name!r}: there are {', '.join(everyone)}")
        missing = everyone[name].missing()
        if missing:
            raise ValueError(f"{name} cannot run here: {missing}. It needs {HOW_TO_GET.get(name, 'another machine')}")
    return {name: everyone[name] for name in dict.fromkeys(names)}


def absent() -> dict[str, str]:
    """Return {implementation that cannot run here: why, and how to install what is missing}."""
    missing = {name: one.missing() for name, one in all_contenders().items()}
    return {name: f"{why}; it needs {HOW_TO_GET.get(name, '-')}" for name, why in missing.items() if why}


def run_compare(contenders: dict[str, Contender], golden: Golden | None, options: argparse.Namespace) -> int:
    """Run every case on every contender (implementation) and compare the results. Print the report and return the exit
    code. golden: recorded cases and results (option --golden), which are compared with, too; or None."""
    # New cases must keep away from kinks of activations, where rounding can make the gradient jump.
    cases = golden.cases if golden else grid(lambda case: judge.kink_distance(case) > KINK_MARGIN)
    cases = [case for case in cases if not options.cases or any(text in case.name for text in options.cases)]
    if not cases:
        print(f"no case has {' or '.join(options.cases)} in its name", file=sys.stderr)
        return 2
    rows, outcomes = run_cases(cases, contenders, golden)
    show(rows, len(cases), options, golden)
    if options.record:
        record(options.record, cases, outcomes)
    more = {"golden": golden.card if golden else None, "absent": absent()}
    return conclude(rows, any(row.failed for row in rows), options, more)


def run_arrays(dumps: list[Dump], contenders: dict[str, Contender], options: argparse.Namespace) -> int:
    """Compare arrays that a user saved from an app (a dump) with the float64 oracle and the contenders. If they differ,
    print which reading (interpretation of layouts, options and documentation) explains the difference. dumps: one
    `Dump` for each possible choice of sizes, the likeliest first."""
    # case: the call with arrays in the documented layouts. words: texts on the arrays that had another layout.
    case, words = base_case(dumps[0])
    outcomes = {name: attempt(one, case) for name, one in contenders.items() if one.hindrance(case) is None}
    rows = list(rows_of(case, outcomes | {"yours": Outcome(dumps[0].results)}))
    # If an array has another layout than Apple documents, this counts as a difference, even if all results agree.
    wrong = any(row.failed for row in rows) or bool(words)
    # tried_pairs: whether `search` also tried two changes of the interpretation at once.
    reading, tried_pairs = search(dumps) if any(row.failed and "yours" in row.pair for row in rows) else (None, False)
    once = f"this is so once {' and '.join(words)}" if words else ""
    show(rows, 1, options, explanation=reading_text(reading, tried_pairs) if reading else once)
    with suppress(ValueError):  # a case with a mask of an undocumented layout has no arguments of activations
        if judge.kink_distance(case) < KINK_MARGIN:
            print("an argument of relu or hard_sigmoid is near a kink, where a gradient may jump", file=screen(options))
    more = {"read": words, "reading": reading._asdict() | {"case": case.name} if reading else None}
    return conclude(rows, wrong, options, more)


def conclude(rows: list[ComparisonRow], failed: bool, options: argparse.Namespace, more: dict[str, Any]) -> int:
    """Write the plot and the JSON report, if the user asked for them. Return the exit code. failed: whether a result
    differs. more: further entries of the JSON report."""
    card = report.machine_card()
    if options.plot:
        report.plot(options.plot, rows, card)
    if options.json:
        found = {"rows": [row._asdict() for row in rows], "failed": failed}
        report.write_json(options.json, {"card": card} | found | more)
    return 1 if failed else 0


def reading_text(reading: Reading, tried_pairs: bool) -> str:
    """Return a text about the best reading (interpretation) of the saved arrays: that it explains all results, or which
    results it does not explain. tried_pairs: whether two changes of the interpretation at once were tried, too."""
    by_form: dict[str, list[str]] = {}
    for name, form in reading.forms.items():
        if form and reading.distances[name] <= 1:
            by_form.setdefault(form, []).append(name)
    phrases = [f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {form}" for form, names in by_form.items()]
    words = " and ".join([*reading.words, *phrases]) or "everything is as documented"
    left = [name for name, distance in reading.distances.items() if not distance <= 1]  # also NaN
    if not left:
        worst = max(reading.distances.values())
        number = f"all {len(reading.distances)} results agree" if len(reading.distances) > 1 else "the result agrees"
        return f"fits: {number} (error/bound {worst:.2g}) if {words}"
    if reading.fitting:
        agree = f"{reading.fitting} of {len(reading.distances)} results agree"
        return f"nearest: {agree} if {words}; left: {', '.join(left)}"
    tried = "layouts, gate orders, properties and open readings, alone" + (" and in pairs" if tried_pairs else "")
    return f"nothing fits: {tried}, were tried; nearest: {words}"


def screen(options: argparse.Namespace) -> TextIO:
    return sys.stderr if options.json == "-" else sys.stdout


def show(
    rows: list[ComparisonRow],
    cases: int,
    options: argparse.Namespace,
    golden: Golden | None = None,
    explanation: str = "",
) -> None:
    """Print the report: verdict, explanation, machine, compared pairs, differences, legend, and the contenders
    (implementations) that cannot run on this machine. rows: all comparisons. cases: the number of cases."""
    out = screen(options)  # stderr if the JSON goes to stdout
    print(report.summary_text(rows, cases), file=out)
    if explanation:
        print(explanation, file=out)
    print(report.card_text(report.machine_card()), file=out)
    if golden:
        print(f"golden computed by {golden.contender} on {report.card_text(golden.card)}", file=out)
    if any(not row.is_failed_call for row in rows):
        print(f"\n{report.rows_text(rows) if options.all else report.pairs_text(rows)}", file=out)
    if any(row.failed for row in rows):
        print(f"\n{report.failures_text(rows)}", file=out)
    print(report.LEGEND, file=out)
    if any(not row.is_failed_call and "oracle" not in row.pair for row in rows):
        print(report.LEGEND_OF_TWO, file=out)
    missing = absent()
    for why in dict.fromkeys(missing.values()):
        print(f"not here: {', '.join(name for name in missing if missing[name] == why)}: {why}", file=out)


def run_cases(
    cases: list[CompareCase], contenders: dict[str, Contender], golden: Golden | None
) -> tuple[list[ComparisonRow], dict[str, dict[str, Outcome]]]:
    """Run all cases on all implementations and compare. Return (comparisons, {case: {implementation: outcome}})."""
    rows, outcomes = [], {}
    with Progress() as progress:
        for case in progress.each(cases, "cases"):
            mine = {name: attempt(one, case) for name, one in contenders.items() if one.hindrance(case) is None}
            outcomes[case.name] = mine
            recorded = {"golden": Outcome(golden.results[case.name])} if golden else {}
            rows += rows_of(case, mine | recorded)
    return rows, outcomes


def attempt(contender: Contender, case: CompareCase) -> Outcome:
    """Run a case on an implementation. An exception becomes an outcome with a problem."""
    try:
        return contender.run(case)
    except Exception as error:
        return Outcome({}, f"{type(error).__name__}: {error}")


def record(file: str, cases: list[CompareCase], outcomes: dict[str, dict[str, Outcome]]) -> None:
    """Write a golden file, which records results for later comparisons. The results are MPSGraph's if it ran, else
    the float64 oracle's, rounded to the case's dtype."""
    theirs = any("mpsgraph" in mine for mine in outcomes.values())
    results = {}
    for case in cases:
        if theirs:
            results[case.name] = outcomes[case.name].get("mpsgraph", Outcome({})).results
        else:
            dtype = case.arrays["source"].dtype
            results[case.name] = {name: value.astype(dtype) for name, value in judge.expected(case).items()}
    computed = [case for case in cases if results[case.name]]
    save_golden(file, Golden(report.machine_card(), "mpsgraph" if theirs else "oracle", computed, results))


def run_settle(contenders: dict[str, Contender], options: argparse.Namespace) -> int:
    """Run an experiment on MPSGraph for every point that its documentation leaves open, and print the answers. Without
    MPSGraph only list the points. Return the exit code."""
    card, here = report.machine_card(), "mpsgraph" in contenders
    nobody = Outcome({}, "not measured")
    findings, outcomes = [], {}
    with Progress() as progress:
        for experiment in progress.each(list(experiments()), "experiments"):
            case = experiment.case
            if case.name not in outcomes:
                outcomes[case.name] = attempt(contenders["mpsgraph"], case) if here else nobody
            finding = settle(experiment, outcomes[case.name])
            findings.append(finding if here else finding._replace(verdict="not measured", confirmed=False))
    print(f"{report.card_text(card)}\n{settle_text(findings, here)}", file=screen(options))
    if options.json:
        report.write_json(options.json, {"card": card, "findings": [finding._asdict() for finding in findings]})
    if not here:
        print(f"Only a Mac can tell: {absent()['mpsgraph']}", file=screen(options))
        return 2
    return 0 if all(finding.confirmed for finding in findings) else 1


if __name__ == "__main__":
    run_command(main)
