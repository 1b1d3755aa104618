"""Choose the tests for a slip: those that ran its line in a recorded run, else the test files that use its file, those
that import it most directly first."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .record import KEPT, RECORD, digest

TABLES = ("tests/machine_code/", "tests/mutation/", "tests/test_kernel_mutations.py")
"""Tests that compare the text of the sources with a table. They fail for any change, right or wrong."""


@cache
def module_path(root: Path, name: str) -> str:
    """Return the path of the file of a module's name, or "" if it is not in the repository."""
    parts = name.split(".")
    for folder in (root, root / "tests"):
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if path.exists():
                return str(path.relative_to(root))
    return ""


@cache  # one call of `tests_of` reads every file of the repository
def imports(root: Path, path: str) -> set[str]:
    """Return the paths of the files of the repository that a file imports, or whose shader it names. The name of a
    shader may be composed, as "pointwise" and "_forward", so a word also stands for the names that begin with it."""
    text = (root / path).read_text()
    package, found = Path(path).with_suffix("").parts[:-1], set()
    for node in statements(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    shaders = set()
    if path.startswith("mlx_lstm/engines/metal/"):
        words = set(re.findall(r"""["']([a-z_]+)["']""", text))
        stems = [file.stem for file in root.glob("metal/*.metal")]
        named = [stem for stem in stems if any(stem == word or stem.startswith(f"{word}_") for word in words)]
        shaders = {f"metal/{stem}.metal" for stem in named}
    return {module_path(root, name) for name in found} - {"", path} | shaders


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements within a node, at any depth. `ast.walk` would visit all expressions, too."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def words_of(path: str) -> set[str]:
    """Return the words of a file's name and its folder's, without the s of a plural."""
    words = re.findall("[a-z0-9]+", " ".join(Path(path).with_suffix("").parts[-2:]))
    return {word.rstrip("s") for word in words} - {"test", "metal", "mlx", "lstm"}


def tests_of(root: Path, path: str) -> list[str]:
    """Return the test files for a file of the library. First come its own doctests, then the files whose names share
    most words with its path (test_norm.py with norms.py), then those that reach it by the fewest imports; among equals
    the smallest."""
    every = [str(file.relative_to(root)) for folder in ("tests", "mlx_lstm") for file in (root / folder).rglob("*.py")]
    used = {file: imports(root, file) for file in every}
    distance, front = {path: 0}, {path}
    while front:
        front = {file for file in every if file not in distance and used[file] & front}
        distance |= dict.fromkeys(front, max(distance.values()) + 1)
    tests = [file for file in every if Path(file).name.startswith("test_") and file in distance]
    tests = [file for file in tests if not file.startswith(TABLES)]
    shared = {file: len(words_of(file) & words_of(path)) for file in tests}
    tests.sort(key=lambda file: (-shared[file], distance[file], (root / file).stat().st_size))
    return [path] * (path.endswith(".py") and ">>>" in (root / path).read_text()) + tests


@cache
def recorded() -> dict:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"tests": [], "digests": {}, "lines": {}}


def tests_of_line(root: Path, path: str, line: int) -> list[str]:
    """Return the tests that ran a line when the record was written, in the order to run them. If no test ran it, as it
    runs when the file is imported, return those that ran any line of the file. Return none if the file has another text
    since then. First come the tests whose files share most words with the path, then one of each file, and so on."""
    found = recorded()
    if found["digests"].get(path) != digest((root / path).read_text()):
        return []
    lines = found["lines"][path]
    each = [lines[str(line)]] if str(line) in lines else lines.values()
    ranked = sorted({(rank, number) for tests in each for rank, number in enumerate(tests)})
    tests = list(dict.fromkeys(found["tests"][number] for _, number in ranked))[:KEPT]
    tests = [test for test in tests if not test.startswith(TABLES) and (root / test.partition("::")[0]).exists()]
    shared = {test: len(words_of(test.partition("::")[0]) & words_of(path)) for test in tests}
    return sorted(tests, key=lambda test: -shared[test])
