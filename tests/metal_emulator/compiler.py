"""Compile a kernel's source to machine code with checks, and load this code. Results are cached on disk. The cache
key is a hash of everything that the result depends on."""

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from . import runtime
from .block_counts import FunctionBlocks, read_notes
from .findings import KernelError, compile_error, with_places
from .line_table import LineTable, read_line_table
from .lowering import blank_comments, lower_kernel, lower_library
from .msl_rules import ast_rules, diagnostics, forbidden_text
from .preamble import preamble_text
from .toolchain import KEEP_LOOPS, cache_folder, digest, front_end, precompiled_shim, publish, run_tool, zig


@dataclass
class CompiledKernel:
    """A kernel ready to run. buffers: the buffers' names in binding order; counts: whether its machine code has
    counters of executed code. counted: for each function the sums of these counters over all launches."""

    source: str
    path: Path
    buffers: tuple[str, ...]
    counts: bool
    counted: list[np.ndarray] = field(default_factory=list)

    @cached_property
    def image(self) -> runtime.Image:
        """Return the kernel's machine code, loaded into memory."""
        return runtime.image(self.path)

    @cached_property
    def lines(self) -> LineTable:
        """Return the table that maps addresses to lines of the kernel's source."""
        return read_line_table(self.path)

    @cached_property
    def functions(self) -> dict[int, FunctionBlocks]:
        """Return {number: flow graph} for the kernel's functions. clang gives each function its number."""
        return {f.identity: f for f in read_notes(self.path.with_suffix(".gcno"))}

    def executable_lines(self) -> set[int]:
        """Return the lines of the kernel's source for which this instantiation has code."""
        return set().union(*(f.executable() for f in self.functions.values()))

    def executed_lines(self) -> set[int]:
        """Return the lines of the kernel's source that ran in any launch.

        clang counts only some of the jumps between blocks. The other counts follow from equations: a block is left
        as often as it is entered. The sums of the counters over all launches satisfy the same equations, so these
        are solved only once.
        """
        pairs = zip(self.image.counter_arrays(), self.counted, strict=True) if self.counted else ()
        ran = [
            self.functions[n].executed(sums.tolist()) for (n, _), sums in pairs if n in self.functions and sums.any()
        ]
        return set().union(*ran)

    def collect_coverage(self, keep: bool) -> None:
        """Add the counters of executed code, which a launch has changed, to the sums in `counted`. Then set the
        counters to 0. If `keep` is false, for example after an aborted launch, add nothing."""
        live = [values for _, values in self.image.counter_arrays()]
        if keep:
            self.counted = [a + b for a, b in zip(self.counted or [0] * len(live), live, strict=True)]
        for values in live:
            values.fill(0)


@cache
def _options(metal_version: int, fast_math: bool) -> list[str]:
    return front_end(metal_version, fast_math)


@cache
def _shim(metal_version: int, fast_math: bool) -> Path:
    return precompiled_shim(lower_library(preamble_text()), _options(metal_version, fast_math))


@cache
def _rules_text() -> str:
    """Return the source of the modules lowering.py and msl_rules.py. It is part of every cache key, because cached
    results depend on these modules."""
    here = Path(__file__).parent
    return (here / "lowering.py").read_text() + (here / "msl_rules.py").read_text()


_loaded: dict[str, CompiledKernel] = {}
_counting = True


def count_lines(counting: bool) -> bool:
    """Choose whether kernels that are compiled or loaded from now on count the lines that run. Return whether they did
    before. Without counters a kernel compiles in three quarters of the time. But clang then moves and merges loads, so
    a launch may read another number of bytes."""
    global _counting
    before, _counting = _counting, counting
    return before


def _is_built(path: Path) -> bool:
    return path.exists() and path.with_suffix(".json").exists()


def compile_kernel(
    name: str, source: str, metal_version: int = 310, fast_math: bool = False, unrolls: bool = False
) -> CompiledKernel:
    """Compile the source that MLX would pass to Apple's compiler, or load the result from the cache. Raise KernelError
    if the source is not valid in Metal's language (MSL). name: the kernel's name, for the error. metal_version: the
    value of `__METAL_VERSION__`. fast_math: whether math functions are the `fast` ones. unrolls: whether clang unrolls
    loops."""
    shim = _shim(metal_version, fast_math)
    key = digest(source, shim.name, _rules_text(), *["unrolled"] * unrolls)
    counted = cache_folder() / f"{key}.so"
    # A kernel with counters also serves a process that counts nothing.
    counts = _counting or _is_built(counted)
    key += "" if counts else "-uncounted"
    if key in _loaded:
        return _loaded[key]
    path = counted.with_stem(key)
    if _is_built(path):
        buffers = tuple(json.loads(path.with_suffix(".json").read_text()))
    else:
        try:
            options = [*_options(metal_version, fast_math), *([] if unrolls else KEEP_LOOPS), *["--coverage"] * counts]
            buffers = _build(source, path, shim, options)
        except KernelError as error:
            raise KernelError(name, [with_places(finding, source) for finding in error.findings]) from None
    return _loaded.setdefault(key, CompiledKernel(source, path, buffers, counts))


def compiled_kernels() -> list[CompiledKernel]:
    """Return all kernels that this process has compiled or loaded."""
    return list(_loaded.values())


def forget(kernel: CompiledKernel) -> None:
    """Remove a kernel from the list of kernels of this process. If the kernel is compiled again, its coverage
    counters start from 0."""
    for key in [key for key, loaded in _loaded.items() if loaded is kernel]:
        del _loaded[key]


_CONSTANT = re.compile(r"^(using \w+|constexpr (?:int|bool) \w+) = [^;]*;", re.M)
_ARRAY = re.compile(
    r"^\s*(?:const )?(?:device|constant) [\w<>]+[*&] \w+ \[\[buffer\(\d+\)\]\],$"  # a parameter of the kernel
    r"|^using \w+ = decltype\(as_field\(.*\)\);$"  # the type of the field that holds the array
    r"|^(?:Absent|(?:Arrays|Join|Projected)_\w+) \w+;$"  # this field
    r"|^const (?:Arrays a|Join join|Projected projected) = \{.*\};$",
    re.M,
)
_COUNT = re.compile(
    r"(?<=\[)\d+(?=\];$)"  # the length of an array in threadgroup memory
    r"|^#(?:define kernel kernel,max_total_threads_per_threadgroup\(\d+\)|undef kernel)$",
    re.M,
)


def _rules_keys(source: str, shim: Path) -> set[str]:
    """Return a cache key for each declaration in a kernel's source (function, class or variable), and for each
    statement of the kernel itself. The keys say which of them the check of the syntax tree (`ast_rules`) has already
    seen.

    Different sources have many declarations in common. So a source is checked only if one of its declarations or
    statements has not been checked yet; checking every kernel would make compilation a quarter slower. Two declarations
    or statements have the same key if they differ only in the kernel's name, in types, in values of constants, in
    lengths of arrays, in the number of threads, in which arrays the kernel has, or in white space.
    """
    code = _COUNT.sub("", _ARRAY.sub("", _CONSTANT.sub(r"\1;", blank_comments(source))))
    code = re.sub(r"^\s*#.*$", "", code, flags=re.M)
    code = re.sub(r"\bcustom_kernel_\w+|\b(?:float|half|bfloat16_t)\b", "", code)
    rules = digest(shim.name, _rules_text())
    return {digest(each, rules) for each in _declarations(" ".join(code.split()))}


def _declarations(code: str) -> set[str]:
    """Return the declarations of a source without comments, and the single statements of the kernel function."""
    found, start, depth = set[str](), 0, 0
    for place in re.finditer(r"[{}();]", code):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(place[0], 0)
        if depth == 0 and place[0] in "};":
            each = code[start : place.end()].strip()
            found |= set(re.split(r"[;{}]", each)) if each.startswith("[[kernel]]") else {each}
            start = place.end()
    return found | {code[start:].strip()}


def _build(source: str, path: Path, shim: Path, options: list[str]) -> tuple[str, ...]:
    if found := forbidden_text(source):
        raise KernelError("", found)
    lowered = lower_kernel(source)
    unchecked = [key for name in _rules_keys(source, shim) if not (key := cache_folder() / f"rules-{name}").exists()]
    with tempfile.TemporaryDirectory(dir=cache_folder()) as name:
        folder = Path(name)
        text, object_file, image = folder / "kernel.clcpp", folder / "kernel.o", folder / "kernel.so"
        text.write_text(lowered.text)
        command = [*options, "-Xclang", "-include-pch", "-Xclang", str(shim), str(text)]
        dump = None
        if unchecked:
            dump_command = [*command, "-w", "-fsyntax-only", "-fno-color-diagnostics", "-Xclang", "-ast-dump"]
            dump = subprocess.Popen(dump_command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        compile_command = [*command, "-c", "-o", str(object_file)]
        compiled = subprocess.run(compile_command, capture_output=True, text=True, cwd=folder)
        tree = dump.communicate()[0] if dump else None
        # clang names the function `emu_entry`, in the file `entry`, if it has put the kernel into this only caller.
        found = diagnostics(re.sub(r"^entry:\d+", "kernel.metal:0", compiled.stderr, flags=re.M))
        if compiled.returncode or found:
            raise KernelError("", found or [compile_error(compiled.stderr.strip())])
        if tree is not None:
            if found := ast_rules(tree):
                raise KernelError("", found)
            for key in unchecked:
                key.touch()
        run_tool([zig(), "ld.lld", "-shared", "--build-id=none", "-o", str(image), str(object_file)], "linking")
        notes, described = folder / "kernel.gcno", folder / "kernel.json"
        described.write_text(json.dumps(lowered.buffers))
        if notes.exists():
            publish(notes, path.with_suffix(".gcno"))
        publish(described, path.with_suffix(".json"))
        publish(image, path)
    return lowered.buffers
