"""Options of the whole test run, also of one in several processes (`-n 2`)."""

import json
import tempfile
from pathlib import Path

import pytest

SHADERS = Path(__file__).parents[1] / "metal"

FROM_WORKERS = []
"""What the emulator ran of metal/ in the processes of a run with -n: a file each."""


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="fail if a test was skipped: here every oracle must run")
    parser.addoption(
        "--shader-coverage", action="store_true", help="report which lines of metal/ ran; fail if one did not"
    )


def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):
        if config.getoption("--shader-coverage"):
            config.workeroutput["shader_coverage"] = dump_coverage()
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if config.getoption("--no-skips") and skipped and session.exitstatus == 0:
        session.exitstatus = 1
        for report in skipped:
            reporter.write_line(f"skipped, which --no-skips forbids: {report.nodeid}", red=True)
    if config.getoption("--shader-coverage") and session.exitstatus == 0:
        text, missed = shader_coverage()
        reporter.write_line(f"\n{text}", red=missed)
        session.exitstatus = 1 if missed else 0


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Called where a worker of a run with -n has ended."""
    if path := getattr(node, "workeroutput", {}).get("shader_coverage"):
        FROM_WORKERS.append(Path(path))


def dump_coverage():
    """A new file with what the emulator ran in this process: its path."""
    from metal_emulator import coverage

    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(coverage.collected(), file)
    return file.name


def shader_coverage():
    """What the emulator ran of metal/: (a line per file, whether a line is missing)."""
    from metal_emulator import coverage

    files = {path.name: path.read_text() for path in sorted(SHADERS.glob("*.metal"))}
    found = coverage.report(files, coverage.merge(FROM_WORKERS) if FROM_WORKERS else None)
    for path in FROM_WORKERS:
        path.unlink()
    return coverage.format_report(found), any(file.missed for file in found.values())
