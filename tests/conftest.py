"""pytest's settings for the tests: command line options, the report of which shader lines ran, and the choice of the
tests that run on a Mac. All of them also work if the tests run in several processes (`-n 2`)."""

import gc
import json
import re
import sys
import tempfile
from collections import Counter
from datetime import date
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest

SHADERS = Path(__file__).parents[1] / "metal"
EMULATOR = Path(__file__).parent / "metal_emulator"

collect_ignore = ["keras_files.py", "simulated_mac_children"]
"""Files and folders in which pytest looks for no tests. Only a child process runs keras_files.py, because its import
of TensorFlow takes seconds. A process that imports the module in simulated_mac_children becomes a simulated Mac."""

FROM_WORKERS = []
"""Paths of shader coverage files, one per worker process of pytest-xdist (option -n)."""

LEFT_OUT = Counter()
"""The number of tests deselected on this machine, by reason."""


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="fail if a test was skipped: here every oracle must run")
    parser.addoption(
        "--shader-coverage", action="store_true", help="report which lines of metal/ ran; fail if one did not"
    )
    parser.addoption("--fuzz", type=int, default=2000, metavar="N", help="how many random cases test_fuzz.py runs")
    today = int(f"{date.today():%Y%m%d}")
    parser.addoption("--fuzz-seed", type=int, default=today, metavar="SEED", help="their seed; default: the date")


def pytest_configure(config):
    # Use the CPU on a Mac, too. Tests that need the GPU select it themselves.
    mx.set_default_device(mx.cpu)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep Python's garbage collector from the many objects that collection leaves. They stay until the end, and each
    search for garbage among them takes a good part of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let every second worker process read the test files in the reverse order. pytest rewrites the asserts of each
    file once and keeps the result on disk. So in a fresh clone two workers rewrite one half each."""
    report = yield
    worker = getattr(collector.config, "workerinput", {"workerid": "gw0"})["workerid"]
    if isinstance(collector, pytest.Dir) and int(worker.removeprefix("gw")) % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Sort the tests by file, because all workers must have the same order, and put those that use a large framework
    first, so that the first worker imports it and no other. Deselect the tests that cannot run on this machine and
    count the reasons. `pytest_terminal_summary` prints them."""
    items.sort(key=lambda item: (not uses_a_framework(item.path), str(item.path), isinstance(item, pytest.DoctestItem)))
    kept, left_out = [], []
    for item in items:
        reason = reason_to_leave_out(item)
        (left_out if reason else kept).append(item)
        LEFT_OUT.update([reason] if reason else [])
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def reason_to_leave_out(item):
    """Return why a test cannot run on this machine, or None if it can."""
    if item.get_closest_marker("needs_mx_compile") and not mlx_compiles():
        return "mx.compile does nothing here, because MLX finds no g++"
    if sys.platform != "darwin":
        return None
    mark = item.get_closest_marker("not_on_a_mac")
    return "the emulator's own tests" if item.path.is_relative_to(EMULATOR) else mark and mark.args[0]


@cache
def mlx_compiles():
    """Return whether `mx.compile` traces a function once on the CPU, for which MLX needs the command g++. Without it
    the function runs at each call."""
    runs = []
    function = mx.compile(lambda x: (runs.append(x.shape), x)[1])
    function(mx.zeros(1)), function(mx.zeros(1))
    return len(runs) == 1


@cache
def uses_a_framework(path):
    """Return whether a test file names a framework whose import takes seconds."""
    return path.name.startswith("test_") and bool(
        re.search(r"(import |importorskip\(\")(tensorflow|tf_cases|jax|keras|coremltools)\b", path.read_text())
    )


def pytest_terminal_summary(terminalreporter, config):
    """Print how many random cases the tests tried, and how many tests were deselected on this machine, by reason."""
    tell_of_fuzz(terminalreporter, config.getoption("--fuzz-seed"))
    for reason, count in LEFT_OUT.items():
        terminalreporter.write_line(f"left out here: {count}, {reason}")
    if sys.platform == "darwin" and config.getoption("--shader-coverage"):
        terminalreporter.write_line("lines of metal/ that ran: not counted on a Mac, the emulator does that on Linux")


def tell_of_fuzz(terminalreporter, seed):
    reports = [report for word in ("passed", "failed") for report in terminalreporter.stats.get(word, [])]
    parts = [value for report in reports for name, value in report.user_properties if name == "fuzz"]
    if parts:
        tried, wrong = sum((Counter(counts) for counts, _ in parts), Counter()), sum(failures for _, failures in parts)
        each = ", ".join(f"{name} {count}" for name, count in tried.most_common())
        terminalreporter.write_line(f"fuzz, seed {seed}: {tried.total()} cases right, {wrong} wrong ({each})")


def pytest_sessionfinish(session):
    config, counted = session.config, sys.platform != "darwin" and session.config.getoption("--shader-coverage")
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = dict(LEFT_OUT)
        if counted:
            config.workeroutput["shader_coverage"] = dump_coverage()
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if config.getoption("--no-skips") and skipped and session.exitstatus == 0:
        session.exitstatus = 1
        for report in skipped:
            reporter.write_line(f"skipped, which --no-skips forbids: {report.nodeid}", red=True)
    if counted and session.exitstatus == 0:
        text, missed = shader_coverage()
        reporter.write_line(f"\n{text}", red=missed)
        session.exitstatus = 1 if missed else 0


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Collect the results of a worker process that has ended: its coverage file and its numbers of deselected tests.
    There are worker processes if pytest runs in parallel (option `-n`)."""
    output = getattr(node, "workeroutput", {})
    if path := output.get("shader_coverage"):
        FROM_WORKERS.append(Path(path))
    # Every worker process collects all tests, so all of them report the same numbers of deselected tests. Take the
    # numbers of the last worker instead of adding them.
    LEFT_OUT.clear()
    LEFT_OUT.update(output.get("left_out", {}))


def dump_coverage():
    """Write to a new file which shader lines the emulator executed in this process. Return the file's path."""
    from metal_emulator import coverage

    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(coverage.collected(), file)
    return file.name


def shader_coverage():
    """Return (report, missed): one line of text per file of metal/, and whether any line was not executed."""
    from metal_emulator import coverage

    files = {path.name: path.read_text() for path in sorted(SHADERS.glob("*.metal"))}
    found = coverage.report(files, coverage.merge(FROM_WORKERS) if FROM_WORKERS else None)
    for path in FROM_WORKERS:
        path.unlink()
    return coverage.format_report(found), any(file.missed for file in found.values())
