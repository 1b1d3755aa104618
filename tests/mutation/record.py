"""A plugin of pytest (`-p mutation.record`) that writes which tests run which lines of the library and of the shaders.

coverage.py records the lines of Python, a context per test. Its context does not reach child processes, so lines that
run only in a child have no test here. The emulator counts the lines of a kernel over all launches of a process, so a
test has all lines of each kernel that it launches.
"""

import ast
import hashlib
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "build" / "tests_by_line.json"
PARTS = RECORD.with_suffix("")
"""The folder of the files that the worker processes of one run write."""
KEPT = 100
"""The most tests that the record keeps for a line."""
IMPORT = {"tensorflow": 6.0, "torch": 2.0, "jax": 1.0, "keras": 6.0}
"""About how many seconds the import of a framework takes."""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Recorder:
    """What one process records."""

    def __init__(self, number: str):
        import coverage

        PARTS.mkdir(parents=True, exist_ok=True)
        self.part = PARTS / number
        self.lines = coverage.Coverage(f"{self.part}.coverage", config_file=False, source=[str(ROOT / "mlx_lstm")])
        self.seconds: dict[str, float] = {}
        self.launched: dict[str, set[int]] = defaultdict(set)
        self.test = ""
        self.lines.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.test = item.nodeid
        self.lines.switch_context(item.nodeid)
        result = yield
        self.lines.switch_context("")
        self.test = ""
        return result

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def watch_launches(self) -> None:
        """Note the test for each kernel that the emulator runs."""
        from metal_emulator.compiler import CompiledKernel

        collect = CompiledKernel.collect_coverage

        def noting(kernel, keep):
            if self.test:
                self.launched[self.test].add(id(kernel))
            collect(kernel, keep)

        CompiledKernel.collect_coverage = noting

    def finish(self) -> None:
        from metal_emulator.compiler import compiled_kernels
        from metal_emulator.source_lines import map_lines

        self.lines.stop()
        self.lines.save()
        files = {path.name: path.read_text() for path in (ROOT / "metal").glob("*.metal")}
        tests_of = defaultdict(set)
        for test, kernels in self.launched.items():
            for kernel in kernels:
                tests_of[kernel].add(test)
        shaders = defaultdict(set)
        for kernel in compiled_kernels():
            if kernel.counts and (tests := tests_of.get(id(kernel))):
                places = map_lines(kernel.source, files)
                for name, line in {places[n] for n in kernel.executed_lines() if n in places}:
                    shaders[f"metal/{name}:{line}"] |= tests
        found = {"seconds": self.seconds, "shaders": {place: sorted(tests) for place, tests in shaders.items()}}
        self.part.with_suffix(".json").write_text(json.dumps(found))


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.recorder = Recorder(config.workerinput["workerid"])
        config.pluginmanager.register(config.recorder)
        sys.path.insert(0, str(ROOT / "tests"))
        if sys.platform != "darwin":
            config.recorder.watch_launches()


def pytest_sessionfinish(session):
    if recorder := getattr(session.config, "recorder", None):
        recorder.finish()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Join what the workers have recorded."""
    if hasattr(config, "workerinput"):
        return
    import coverage

    seconds, tests_of = {}, defaultdict(set)
    for part in PARTS.glob("*.json"):
        found = json.loads(part.read_text())
        seconds |= found["seconds"]
        for place, tests in found["shaders"].items():
            tests_of[place] |= set(tests)
    for part in PARTS.glob("*.coverage"):
        data = coverage.CoverageData(part)
        data.read()
        for file in data.measured_files():
            name = Path(file).relative_to(ROOT)
            for line, tests in data.contexts_by_lineno(file).items():
                tests_of[f"{name}:{line}"] |= set(tests) - {""}
    write(seconds, tests_of)


def write(seconds: dict[str, float], tests_of: dict[str, set[str]]) -> None:
    """Write the record: the digest of each file, and for each line the numbers of its tests in the order to run."""
    imports = {name: import_seconds(ROOT / name) for name in {test.partition("::")[0] for test in seconds}}
    cost = {test: time + imports[test.partition("::")[0]] for test, time in seconds.items()}
    names = sorted(cost)
    number = {name: n for n, name in enumerate(names)}
    lines = defaultdict(dict)
    for place, tests in tests_of.items():
        path, _, line = place.rpartition(":")
        if tests:
            lines[path][line] = [number[test] for test in in_order(tests, cost)][:KEPT]
    digests = {path: digest((ROOT / path).read_text()) for path in lines}
    RECORD.write_text(json.dumps({"tests": names, "digests": digests, "lines": lines}))


def import_seconds(path: Path) -> float:
    """Return about how long the import of the frameworks takes that a test file names."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        named |= {word for name in found for word in re.split(r"[._]", name)}
    return sum(IMPORT.get(word, 0.0) for word in named)


def in_order(tests: set[str], cost: dict[str, float]) -> list[str]:
    """Sort tests: first the quickest one of each file, then the second of each, and so on. In a file come first the
    quickest case of each test function, then the second case of each."""
    cases, ranked = defaultdict(int), list[tuple[str, int, float, str]]()
    for test in sorted((test for test in tests if test in cost), key=lambda test: (cost[test], test)):
        function = test.partition("[")[0]
        ranked.append((function.partition("::")[0], cases[function], cost[test], test))
        cases[function] += 1
    of_file, ordered = defaultdict(int), list[tuple[int, float, str]]()
    for file, _, time, test in sorted(ranked):
        ordered.append((of_file[file], time, test))
        of_file[file] += 1
    return [test for _, _, test in sorted(ordered)]
