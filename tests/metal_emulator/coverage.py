"""Line coverage of shader files, over all kernels that this process has run in the emulator.

Executable lines of a file are
  - the lines for which some compiled instantiation has a basic block, and
  - the first line of every statement that no instantiation has code for (templates that are never instantiated,
    branches of `if constexpr` that are never taken). `source_lines.statements` defines what counts as a statement.

Executed lines are the lines of the blocks that ran, counted before any optimisation. If the emulator stops a launch
because it found an error in the kernel, this launch does not count.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .compiler import compiled_kernels, count_lines, forget
from .source_lines import map_lines, statements


@dataclass
class FileCoverage:
    """The executed and the missed lines of one shader file."""

    executed: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)


def collected() -> dict[str, dict[str, list[int]]]:
    """Return {kernel text: {"executable": lines, "executed": lines}} for all kernels that this process has run, except
    those without counters."""
    found: dict[str, dict[str, list[int]]] = {}
    for kernel in (kernel for kernel in compiled_kernels() if kernel.counts):
        entry = {"executable": sorted(kernel.executable_lines()), "executed": sorted(kernel.executed_lines())}
        found = _union(found, {kernel.source: entry})
    return found


@contextmanager
def set_aside() -> Iterator[None]:
    """Exclude launches inside the context from the coverage. This is meant for kernels that a test damages on
    purpose."""
    before = {id(kernel): kernel.counted for kernel in compiled_kernels()}
    counting = count_lines(False)
    try:
        yield
    finally:
        count_lines(counting)
        for kernel in compiled_kernels():
            if id(kernel) in before:
                kernel.counted = before[id(kernel)]
            else:
                forget(kernel)


def dump(path: Path) -> None:
    """Write the coverage of this process to a file that another process reads with `merge`."""
    path.write_text(json.dumps(collected()))


def merge(paths: Iterable[Path]) -> dict[str, dict[str, list[int]]]:
    """Return the union of the coverage in several files written by `dump`."""
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
    """Return the coverage of each shader file, by file name. The lines of kernel sources are assigned to the shader
    files from which the sources were assembled.

    Args:
        files: name -> text of the shader files.
        data: result of `merge`; by default the coverage of this process.
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
    """Return one line of text per file: the share of executed lines, and the missed lines."""
    lines = []
    for name, c in coverage.items():
        total = len(c.executed) + len(c.missed)
        share = 100 * len(c.executed) / total if total else 100.0
        missed = ", ".join(map(str, sorted(c.missed))) or "-"
        lines.append(f"{name}: {len(c.executed)}/{total} lines ({share:.1f} %), missed: {missed}")
    return "\n".join(lines)
