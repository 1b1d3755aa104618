"""Options of the whole test run."""


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="fail if a test was skipped: here every oracle must run")


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if session.config.getoption("--no-skips") and skipped and session.exitstatus == 0:
        session.exitstatus = 1
        for report in skipped:
            reporter.write_line(f"skipped, which --no-skips forbids: {report.nodeid}", red=True)
