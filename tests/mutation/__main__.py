"""The command line of this package: `PYTHONPATH=tests python -m mutation --since COMMIT --number N --seed S`."""

import argparse
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path

from .choice import tests_of, tests_of_line
from .record import PARTS
from .slips import Slip, compiles, slips

ROOT = Path(__file__).parents[2]
OPTIONS = ("-x", "-q", "--tb=no", "-p", "no:cacheprovider")
OPTIONS += ("-o", "faulthandler_timeout=60", "-o", "faulthandler_exit_on_timeout=true")  # a hang ends pytest
FUZZ = ("--fuzz=400", "--fuzz-seed=1")  # pytest knows them only if it runs a file of tests/


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def changed(since: str) -> list[tuple[str, int]]:
    """Return (path, line) of all lines of the library and the shaders that have changed since a commit."""
    found, path = [], ""
    for line in git("diff", "-U0", since, "--", "mlx_lstm/*.py", "metal/*.metal").splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            found += [(path, int(hunk[1]) + n) for n in range(int(hunk[2] or 1))]
    return found


@cache
def slips_at(path: str) -> dict[int, list[Slip]]:
    """Return {line: slips} of a file."""
    found: dict[int, list[Slip]] = {}
    for slip in slips(path, (ROOT / path).read_text()):
        found.setdefault(slip.line, []).append(slip)
    return found


def drawn(since: str, number: int, seed: int) -> list[tuple[str, int, int]]:
    """Draw places (path, line, number of the slip in the line): one slip in each of some random changed lines."""
    rng, lines, found = random.Random(seed), changed(since), list[tuple[str, int, int]]()
    rng.shuffle(lines)
    for path, line in lines:
        # Only the slips of the drawn lines are compiled: to compile those of the whole package takes minutes.
        numbers = [n for n, slip in enumerate(slips_at(path).get(line, [])) if compiles(path, slip.text)]
        found += [(path, line, rng.choice(numbers))] if numbers else []
        if len(found) == number:
            break
    return found


def copy_to(folder: Path) -> None:
    """Copy the files that git tracks, as they are in the checkout."""
    for name in git("ls-files", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def write(copy: Path, path: str, text: str) -> None:
    (copy / path).write_text(text)
    Path(cache_from_source(str(copy / path))).unlink(missing_ok=True)  # it may have the same size and second


def pytest(copy: Path, words: list[str], limit: float) -> str | None:
    """Run pytest in a copy. Return "" if all tests pass, the first that fails or what happened, None if time is up."""
    options = [*OPTIONS, *FUZZ] if any(word.startswith("tests/") for word in words) else OPTIONS
    command = [sys.executable, "-m", "pytest", *options, *words]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(max(limit, 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also the processes that a test has started
            process.wait()
            return None
        output.seek(0)
        said = output.read()
        failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", said, re.MULTILINE)
    if code == 4:
        # A slip may change the names of a test's cases, such as a size in a name. Then all cases of the test run.
        tests = [word.partition("[")[0] for word in words]
        if tests == words:
            raise RuntimeError(f"pytest refuses its arguments: {said}")
        return pytest(copy, tests, limit)
    return "" if code in (0, 5) else failed[1] if failed else "a hang or a crash"  # 5: a file without default tests


@cache
def fails_anyway(copy: Path, test: str) -> bool:
    """Return whether a test fails in the copy without any slip."""
    words = [test] if "::" in test else ["--collect-only", test]
    return bool(Path(copy, test.partition("::")[0]).exists() and pytest(copy, words, 120))


def notice(copy: Path, path: str, line: int, text: str, limit: float) -> tuple[str, int, bool]:
    """Run the tests of a line that has a slip. Return (first test that fails or "", how many ran, time was up)."""
    end, right, ran, known = time.monotonic() + limit, (copy / path).read_text(), 0, list[str]()
    words = tests_of_line(copy, path, line)
    size = 8 if words else 1  # few first, because an import of a large framework takes seconds
    words += tests_of(copy, path)
    while ran < len(words):
        write(copy, path, text)
        try:
            found = pytest(copy, [*words[ran : ran + size], *known], end - time.monotonic())
        finally:
            write(copy, path, right)
        if found is None:
            return "", ran, True
        if found and not fails_anyway(copy, found):
            return found, ran, False
        if found:
            known += ["--deselect", found]
        else:
            ran, size = ran + size, 2 * size
    return "", len(words), False


def record() -> int:
    """Run all tests and write which of them run which line, for the slips that are planted afterwards."""
    shutil.rmtree(PARTS, ignore_errors=True)  # an earlier run may have had more workers
    words = ["-n", "auto", "--dist", "worksteal", "-q", "-p", "mutation.record"]
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT).returncode


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=sys.modules[__package__].__doc__)
    parser.add_argument("--since", default="HEAD~1", metavar="COMMIT", help="plant slips in lines changed since then")
    parser.add_argument("--number", type=int, default=20, metavar="N", help="how many slips")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--seconds", type=float, default=180, metavar="LIMIT", help="time for the tests of one slip")
    parser.add_argument("--slip", metavar="PATH:LINE:NUMBER", help="only this slip, as the report names it")
    parser.add_argument("--record", action="store_true", help="run all tests first and note which lines each test runs")
    given = parser.parse_args(arguments)
    if given.record and (code := record()):
        return code
    places = drawn(given.since, given.number, given.seed)
    if given.slip:
        path, line, number = given.slip.rsplit(":", 2)
        places = [(path, int(line), int(number))]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        for path, line, number in places:
            slip, place = slips_at(path)[line][number], f"{path}:{line}:{number}"
            noticed, ran, late = notice(Path(folder), path, line, slip.text, given.seconds)
            if noticed:
                print(f"noticed   {place}: {slip.what} ({noticed})", flush=True)
                continue
            survivors += 1
            print(f"SURVIVED  {place}: {slip.what} ({ran} tests or test files{', then time was up' if late else ''})")
            lines = (ROOT / path).read_text().splitlines(), slip.text.splitlines()
            print("\n".join(difflib.unified_diff(*lines, path, path, lineterm="", n=2)))
            print(f"  PYTHONPATH=tests python -m mutation --slip {place}", flush=True)
    print(f"{len(places)} slips, {survivors} survived")
    return survivors > 0


if __name__ == "__main__":
    sys.exit(main())
