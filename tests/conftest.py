"""Options of the whole test run."""

from pathlib import Path

SHADERS = Path(__file__).parents[1] / "metal"
NOTHING_RUNS = ("lstm_cell.metal", "gru_cell.metal")  # options only


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="fail if a test was skipped: here every oracle must run")
    parser.addoption(
        "--shader-coverage", action="store_true", help="report which lines of metal/ ran; fail if one did not"
    )


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if session.config.getoption("--no-skips") and skipped and session.exitstatus == 0:
        session.exitstatus = 1
        for report in skipped:
            reporter.write_line(f"skipped, which --no-skips forbids: {report.nodeid}", red=True)
    if session.config.getoption("--shader-coverage") and session.exitstatus == 0:
        text, missed = shader_coverage()
        reporter.write_line(f"\n{text}", red=missed)
        session.exitstatus = 1 if missed else 0


def shader_coverage():
    """What the emulator ran of metal/ in this process: (a line per file, whether a line is missing)."""
    from metal_emulator import coverage

    found = coverage.report({path.name: path.read_text() for path in sorted(SHADERS.glob("*.metal"))})
    used = {name: file for name, file in found.items() if name not in NOTHING_RUNS}
    return coverage.format_report(found), any(file.missed or not file.executed for file in used.values())
