"""The Python interface to the emulator's runtime, a C++ library that runs kernels (runtime/*.h): its structures, its
functions, and the kernels that are loaded into memory."""

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from .toolchain import runtime_library

# {number: name} of the kinds of findings (defects of a kernel). The enum `Kind` in runtime/findings.h must have the
# same order.
KINDS = dict(
    enumerate(
        (
            "out-of-bounds",
            "uninitialised",
            "race",
            "wild-pointer",
            "divergence",
            "threadgroup-memory",
            "arithmetic",
            "read-only",
            "simdgroup",
            "stack",
            "misaligned",
        ),
        start=1,
    )
)
ORDERS = {"forward": 0, "reverse": 1, "random": 2}


class CFinding(ctypes.Structure):
    """A defect that the emulator found in a kernel, as ctypes reads it from the C++ structure `Finding` of
    runtime/findings.h. Both must have the same fields in the same order."""

    _fields_ = [(n, c_uint32) for n in ("kind", "thread", "other_thread", "group", "line", "column")] + [
        ("pc", c_uint64),
        ("other_pc", c_uint64),
        ("offset", c_int64),
        ("name", c_char * 64),
        ("text", c_char * 176),
    ]


class Counters(ctypes.Structure):
    """What a launch did, counted by the runtime and summed over the launch's threadgroups. ctypes reads it from the
    C++ structure `Counters` of runtime/base.h. Both must have the same fields in the same order.

    A threadgroup barrier counts once per threadgroup. Simdgroup barriers, simdgroup operations and matrix operations
    count once per simdgroup. Only threadgroup_bytes is a maximum: the most threadgroup memory that one threadgroup
    used.
    """

    _fields_ = [
        (n, c_uint64)
        for n in (
            "accesses",
            "switches",
            "threadgroups",
            "threads",
            "threadgroup_barriers",
            "simdgroup_barriers",
            "simd_operations",
            "matrix_operations",
            "threadgroup_bytes",
            "threadgroup_bytes_read",
            "threadgroup_bytes_written",
        )
    ]


class CTraffic(ctypes.Structure):
    """The bytes that a launch read and wrote in one buffer, as ctypes reads them from the C++ structure `Traffic` of
    runtime/host.h. Both must have the same fields in the same order."""

    _fields_ = [
        (n, c_uint64)
        for n in ("bytes_read", "bytes_written", "distinct_read", "distinct_written", "unwritten", "first_unwritten")
    ]


class CCoverage(ctypes.Structure):
    """The counters of executed code that clang's option --coverage adds to one function of a kernel. ctypes reads
    them from the C++ structure `CoverageCounters` of runtime/hooks.h. Both must have the same fields in the same
    order."""

    _fields_ = [("values", POINTER(c_uint64)), ("count", c_uint32), ("function", c_uint32)]


@cache
def library() -> ctypes.CDLL:
    """Return the runtime, loaded as a library. Kernels that are loaded later can call its functions."""
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)  # the runtime calls its functions, and is linked to nothing
    lib = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    lib.emu_reset.argtypes = [c_uint64] * 4
    lib.emu_options.argtypes = [c_uint32] * 5
    lib.emu_add_buffer.argtypes = [c_uint32, c_char_p, c_uint64] + [c_uint32] * 4
    lib.emu_add_buffer.restype = c_uint64
    lib.emu_run.argtypes = [c_void_p, c_uint64, c_uint32 * 3, c_uint32 * 3]
    lib.emu_finding.restype = POINTER(CFinding)
    lib.emu_counters.restype = POINTER(Counters)
    lib.emu_traffic.argtypes = [c_uint32, POINTER(CTraffic)]
    lib.emu_last_writer.argtypes = [c_uint32, c_uint64, POINTER(c_uint32)]
    lib.emu_last_writer.restype = c_uint64
    lib.emu_coverage_arrays.argtypes = [POINTER(POINTER(CCoverage))]
    return lib


def _mapped_range(path: Path) -> tuple[int, int]:
    low, high = 0, 0
    for entry in Path("/proc/self/maps").read_text().splitlines():
        if entry.endswith(str(path)):
            start, end = (int(x, 16) for x in entry.split()[0].split("-"))
            low, high = low or start, end
    return low, high


@cache
def _own_range() -> tuple[int, int]:
    library()
    return _mapped_range(runtime_library())


@cache
def image(path: Path) -> "Image":
    """Return a compiled kernel, loaded into memory. A process loads a file only once: when it loads the file again,
    the file's code does not register its counters again."""
    return Image(path)


class Image:
    """A compiled kernel, loaded into memory by `image`."""

    def __init__(self, path: Path):
        lib = library()
        self._dll = ctypes.CDLL(str(path))
        self.low, self.high = _mapped_range(path)
        self.entry = ctypes.cast(self._dll.emu_entry, c_void_p).value
        arrays = POINTER(CCoverage)()
        count = lib.emu_coverage_arrays(ctypes.byref(arrays))
        self._counters = []
        for i in range(count):
            address = ctypes.addressof(arrays[i].values.contents)
            values = (c_uint64 * arrays[i].count).from_address(address)
            self._counters.append((arrays[i].function, np.ctypeslib.as_array(values)))
            # The runtime lets a kernel access the addresses from `low` to `high`, so the counters must lie between
            # them. The counters start as zeros, so the file does not contain them. They lie behind the range that
            # /proc/self/maps lists under the file's name.
            self.high = max(self.high, address + ctypes.sizeof(values))

    def counter_arrays(self) -> list[tuple[int, np.ndarray]]:
        """Return (function number, counters) for every function of the kernel's machine code. The counters say how
        often the parts of this function were executed. The arrays are views of the kernel's memory, so each launch
        changes them."""
        return self._counters

    def reset_runtime(self) -> None:
        """Make the runtime forget the last launch, and let it accept reads of this kernel's constants."""
        if library().emu_reset(self.low, self.high, *_own_range()):
            raise MemoryError("metal_emulator: cannot reserve address space")
