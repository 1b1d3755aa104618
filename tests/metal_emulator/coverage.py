"""Line coverage of shader files, over everything this process has run on the emulator.

Executable lines of a file are
  - the lines for which some compiled instantiation has a basic block, and
  - the first line of every statement of which no line is in any instantiation (templates that are never instantiated,
    branches of `if constexpr` nobody takes): see `source_lines.statements` for what counts as a statement.
Executed are the lines of the blocks that ran, counted before any optimisation. A launch that was stopped by a finding
does not count.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .compiler import compiled_kernels, forget
from .source_lines import map_lines, statements


@dataclass
class FileCoverage:
    """Lines of one shader file."""

    executed: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)


def collected() -> dict[str, dict[str, list[int]]]:
    """Returns what this process has run: kernel text -> executable and executed lines of it."""
    found: dict[str, dict[str, list[int]]] = {}
    for kernel in compiled_kernels():
        entry = {"executable": sorted(kernel.executable_lines()), "executed": sorted(kernel.executed_lines())}
        found = _union(found, {kernel.source: entry})
    return found


@contextmanager
def set_aside() -> Iterator[None]:
    """What runs inside does not count: for texts that are wrong on purpose."""
    before = {id(kernel): kernel.counted for kernel in compiled_kernels()}
    yield
    for kernel in compiled_kernels():
        if id(kernel) in before:
            kernel.counted = before[id(kernel)]
        else:
            forget(kernel)


def dump(path: Path) -> None:
    """Writes what this process has run, for `merge` in another one."""
    path.write_text(json.dumps(collected()))


def merge(paths: Iterable[Path]) -> dict[str, dict[str, list[int]]]:
    """Returns the union of several dumps."""
    found: dict[str, dict[str, list[int]]] = {}
    for path in paths:
        found = _union(found, json.loads(path.read_text()))
    return found


def _union(a: dict, b: dict) -> dict:
    result = dict(a)
    for source, entry in b.items():
        old = result.get(source, {"executable": [], "executed": []})
        result[source] = {k: sorted({*old[k], *entry[k]}) for k in old}
    return result


def report(files: dict[str, str], data: dict[str, dict[str, list[int]]] | None = None) -> dict[str, FileCoverage]:
    """Attributes lines of kernel texts to the files they were assembled from.

    Args:
        files: name -> text of the shader files.
        data: of `merge`; by default what this process has run.
    """
    executable: dict[str, set[int]] = {name: set() for name in files}
    executed: dict[str, set[int]] = {name: set() for name in files}
    for source, entry in (collected() if data is None else data).items():
        places = map_lines(source, files)
        for lines, target in ((entry["executable"], executable), (entry["executed"], executed)):
            for file, line in (places[n] for n in lines if n in places):
                target[file].add(line)
    result = {}
    for name, text in files.items():
        for first, last in statements(text):
            if not executable[name].intersection(range(first, last + 1)):
                executable[name].add(first)
        result[name] = FileCoverage(executed[name], executable[name] - executed[name])
    return result


def format_report(coverage: dict[str, FileCoverage]) -> str:
    """Returns one line per file: share of executed lines and the missed ones."""
    lines = []
    for name, c in coverage.items():
        total = len(c.executed) + len(c.missed)
        share = 100 * len(c.executed) / total if total else 100.0
        missed = ", ".join(map(str, sorted(c.missed))) or "-"
        lines.append(f"{name}: {len(c.executed)}/{total} lines ({share:.1f} %), missed: {missed}")
    return "\n".join(lines)
