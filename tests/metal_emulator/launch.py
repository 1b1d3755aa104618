"""Launch a kernel: bind buffers, run the threads, and return outputs, findings and counters."""

import ctypes
import re
import time
from dataclasses import dataclass, field

import numpy as np

from . import runtime
from .compiler import CompiledKernel
from .findings import Finding, with_places

_POISON = {2: (np.uint16, 0x7FFF), 4: (np.uint32, 0x7FFFFFFF)}


@dataclass
class Options:
    """The options of the launches inside `emulated_metal`, whose docstring explains them. skew: the number of elements
    by which inputs are moved from a 16-byte boundary, because views of MLX arrays may begin at any element.
    threadgroup_limit: the bytes of threadgroup memory that a threadgroup may use."""

    order: str = "forward"
    seed: int = 1
    noise: bool = False
    skew: int = 0
    strict_exit: bool = True
    require_all_written: bool = True
    threadgroup_limit: int = 32768


@dataclass
class Buffer:
    """An argument of a kernel. data: the initial content, or None for an output, which is filled with NaN. view:
    whether the argument is an array of the caller, which `Options.skew` moves."""

    name: str
    dtype: np.dtype
    size: int
    data: np.ndarray | None = None
    output: bool = False
    view: bool = False


@dataclass(frozen=True)
class Traffic:
    """The bytes that a launch read and wrote in one buffer. The fields `distinct_...` count each byte once; the
    other fields count every access."""

    size: int
    bytes_read: int
    bytes_written: int
    distinct_read: int
    distinct_written: int


@dataclass
class Result:
    """The result of a launch. outputs: raw arrays in binding order; traffic: by buffer name."""

    outputs: list[np.ndarray]
    findings: list[Finding]
    counters: dict[str, int]
    traffic: dict[str, Traffic]
    seconds: float
    aborted: bool = False
    unwritten: dict[str, int] = field(default_factory=dict)


def _bind(kernel: CompiledKernel, buffers: list[Buffer], options: Options) -> list[int]:
    lib, addresses = runtime.library(), []
    for index, buffer in enumerate(buffers):
        item = buffer.dtype.itemsize
        skew = options.skew * item if buffer.view else 0
        filled = buffer.data is not None
        arguments = (index, buffer.name.encode(), buffer.size * item, min(item, 4), not buffer.output, filled, skew)
        address = lib.emu_add_buffer(*arguments)
        if not address:
            raise MemoryError(f"metal_emulator: no room for {buffer.name}")
        if filled and buffer.size:
            ctypes.memmove(address, buffer.data.ctypes.data, buffer.size * item)
        addresses.append(address)
    return addresses


def _array_name(source_line: str, column: int) -> str:
    """Return the name of the array whose index expression is at this column of a source line. The name ends before the
    column or begins at it."""
    before = source_line[: max(column, 1)]
    start = len(before)
    while start > 0 and (before[start - 1].isalnum() or before[start - 1] == "_"):
        start -= 1
    end = start
    while end < len(source_line) and (source_line[end].isalnum() or source_line[end] == "_"):
        end += 1
    return source_line[start:end]


def _findings(kernel: CompiledKernel) -> list[Finding]:
    lib, found, text = runtime.library(), [], kernel.source.split("\n")
    base = kernel.image.low
    for i in range(lib.emu_finding_count()):
        f = lib.emu_finding(i).contents
        line = f.line or kernel.lines.line(f.pc - base - 1)
        other_line = kernel.lines.line(f.other_pc - base - 1) if f.other_pc > base else 0
        name = f.name.decode()
        if f.column and not name and 0 < line <= len(text):
            name = _array_name(text[line - 1], f.column)
        other = ctypes.c_int32(f.other_thread).value
        thread = ctypes.c_int32(f.thread).value
        kind = runtime.KINDS[f.kind]
        found.append(Finding(kind, f.text.decode(), line, other_line, name, f.offset, thread, other, f.group))
    return found


def _unwritten(buffer: Buffer, traffic: runtime.CTraffic) -> list[Finding]:
    granule = min(buffer.dtype.itemsize, 4)
    count = -(-traffic.unwritten * granule // buffer.dtype.itemsize)
    offset = traffic.first_unwritten * granule
    first = offset // buffer.dtype.itemsize
    text = f"{count} of {buffer.size} elements never written, the first is element {first}"
    return [Finding("unwritten", text, name=buffer.name, offset=offset)]


def _poisoned(kernel: CompiledKernel, index: int, buffer: Buffer, values: np.ndarray) -> list[Finding]:
    """Return a finding if an output element has the NaN pattern with which uninitialised memory was filled before
    the launch. Such an element was computed from uninitialised values."""
    is_float = buffer.dtype.kind == "f" or buffer.dtype.name == "bfloat16"
    if not is_float or buffer.dtype.itemsize not in _POISON:
        return []
    kind, pattern = _POISON[buffer.dtype.itemsize]
    hits = np.flatnonzero((values.view(kind) & kind(pattern)) == pattern)
    if not hits.size:
        return []
    offset, thread = int(hits[0]) * buffer.dtype.itemsize, ctypes.c_uint32()
    pc = runtime.library().emu_last_writer(index, offset, ctypes.byref(thread))
    line = kernel.lines.line(pc - kernel.image.low - 1)
    text = f"{hits.size} elements were computed from uninitialised memory, the first is element {hits[0]}"
    return [Finding("uninitialised", text, line, name=buffer.name, offset=offset, thread=thread.value)]


def launch(
    kernel: CompiledKernel, buffers: list[Buffer], grid: tuple[int, ...], threadgroup: tuple[int, ...], options: Options
) -> Result:
    """Run a kernel over a grid of threads and return its outputs, findings and counters."""
    group = [min(g, t) for g, t in zip(grid, threadgroup, strict=True)]
    # A pattern that starts with a word is found many times as fast as one that starts with \b.
    limits = re.findall(r"max_total_threads_per_threadgroup\((\d+)\)", kernel.source)
    most = min([1024, *map(int, limits)])
    if np.prod(group) > most or min(group) < 1:
        finding = Finding("thread-limit", f"threadgroup {tuple(group)}: 1 to {most} threads are allowed")
        return Result([], [finding], {}, {}, 0.0, aborted=True)
    lib = runtime.library()
    kernel.image.reset_runtime()
    order = runtime.ORDERS[options.order]
    lib.emu_options(order, options.seed, options.noise, options.strict_exit, options.threadgroup_limit)
    addresses = _bind(kernel, buffers, options)
    start = time.perf_counter()
    triple = ctypes.c_uint32 * 3
    aborted = bool(lib.emu_run(kernel.image.entry, kernel.image.low, triple(*grid), triple(*threadgroup)))
    seconds = time.perf_counter() - start
    kernel.collect_coverage(keep=not aborted)
    findings, outputs, traffic = _findings(kernel), [], {}
    counters = lib.emu_counters().contents
    for index, (buffer, address) in enumerate(zip(buffers, addresses, strict=True)):
        seen = runtime.CTraffic()
        lib.emu_traffic(index, ctypes.byref(seen))
        size = buffer.size * buffer.dtype.itemsize
        traffic[buffer.name] = Traffic(
            size, seen.bytes_read, seen.bytes_written, seen.distinct_read, seen.distinct_written
        )
        if not buffer.output:
            continue
        values = np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8).copy()
        if seen.unwritten and options.require_all_written and not findings and buffer.data is None:
            findings += _unwritten(buffer, seen)
        elif not findings:
            findings += _poisoned(kernel, index, buffer, values)
        outputs.append(values)
    values = {name: getattr(counters, name) for name, _ in runtime.Counters._fields_}
    findings = [with_places(finding, kernel.source) for finding in findings]
    return Result(outputs, findings, values, traffic, seconds, aborted)
