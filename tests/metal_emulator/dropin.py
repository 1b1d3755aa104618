"""A replacement for `mx.fast.metal_kernel` that runs kernels in the emulator, so that library code needs no changes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import mlx.core as mx
import numpy as np

from .arrays import memory_of, numpy_dtype, to_mlx, to_numpy
from .capture import Captured, capture
from .compiler import compile_kernel
from .findings import Finding, KernelError
from .launch import Buffer, Options, Result, Traffic, launch

_mlx_metal_kernel = mx.fast.metal_kernel


@dataclass(frozen=True)
class Dispatch:
    """A kernel launch in the log. counters: what the launch did, such as the number of barriers. traffic: the bytes
    read and written, by buffer name. text_bytes: the size of the header and body that the library passed to MLX.
    source_bytes: the size of the whole source that MLX generated from them. seconds: how long the launch took."""

    name: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    counters: dict[str, int]
    traffic: dict[str, Traffic]
    findings: list[Finding]
    text_bytes: int
    source_bytes: int
    source: str
    seconds: float

    def device_bytes(self, leave_out: Sequence[str] = ()) -> dict[str, int]:
        """Return {"bytes_read", "bytes_written", "distinct_read", "distinct_written": number of bytes}, summed over
        all buffers except those named in `leave_out`. The values `distinct_...` count each byte once; the other
        values count every access."""
        kept = [t for name, t in self.traffic.items() if name not in leave_out]
        fields = ("bytes_read", "bytes_written", "distinct_read", "distinct_written")
        return {f: sum(getattr(t, f) for t in kept) for f in fields}


@dataclass
class Session:
    """An active `emulated_metal` context: its options and its log."""

    options: Options
    metal_version: int
    raise_on_findings: bool
    unrolls: bool
    log: list[Dispatch]


_active: list[Session] = []
_one_at_a_time = RLock()
"""A lock that a thread holds while it launches a kernel, because the runtime has the state of one launch only."""


class EmulatedKernel:
    """The kernel object that the replaced `metal_kernel` returns. Inside an `emulated_metal` context a call runs in
    the emulator. Outside, a call runs MLX's own kernel."""

    def __init__(self, **definition: Any):
        self.definition = definition
        self.mlx_kernel = _mlx_metal_kernel(**definition)
        self.captured: dict[tuple, Captured] = {}

    def __call__(self, *, inputs: Sequence[Any], **call: Any) -> list[mx.array]:
        if not _active:
            return self.mlx_kernel(inputs=inputs, **call)
        session = _active[-1]
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        mx.eval(arrays)
        # The runtime has the memory and the state of one launch only.
        with _one_at_a_time:
            return self._run(session, arrays, call)

    def _run(self, session: Session, arrays: list[mx.array], call: dict[str, Any]) -> list[mx.array]:
        """Compile the kernel unless it is compiled, launch it once and return its outputs."""
        captured = self._capture(arrays, call)
        fast = (self.definition.get("compile_options") or {}).get("math_mode", "safe") != "safe"
        name = self.definition["name"]
        kernel = compile_kernel(name, captured.source, session.metal_version, fast, session.unrolls)
        buffers = self._input_buffers(arrays, captured) + self._output_buffers(call)
        for buffer, bound in zip(buffers, kernel.buffers, strict=True):
            buffer.name = bound
        grid, threadgroup = tuple(call["grid"]), tuple(call["threadgroup"])
        result = launch(kernel, buffers, grid, threadgroup, session.options)
        self._log(session, captured, grid, threadgroup, result)
        if result.findings and session.raise_on_findings:
            raise KernelError(name, result.findings)
        if not result.outputs:  # a finding prevented the launch
            result.outputs = [np.full(b.size * b.dtype.itemsize, 0xFF, np.uint8) for b in buffers if b.output]
        typed = zip(result.outputs, call["output_shapes"], call["output_dtypes"], strict=True)
        return [to_mlx(raw, tuple(shape), dtype) for raw, shape, dtype in typed]

    def _capture(self, arrays: list[mx.array], call: dict[str, Any]) -> Captured:
        """Return the source that MLX generates for this call. The source depends only on dtypes, on the number of
        dimensions, and on which arrays are small. So one trace serves many calls."""
        template = call.get("template")
        inputs = tuple((str(a.dtype), a.ndim, a.size < 8) for a in arrays)
        key = (inputs, repr(template), repr(call["output_dtypes"]), len(call["output_shapes"]))
        if key not in self.captured:
            known = ("template", "grid", "threadgroup", "output_shapes", "output_dtypes")
            arguments = {k: call[k] for k in known if call.get(k) is not None}
            zeros = [mx.zeros(a.shape, a.dtype) for a in arrays]
            traced = capture(lambda *a: tuple(self.mlx_kernel(inputs=list(a), **arguments)), zeros)
            self.captured[key] = traced
        return self.captured[key]

    def _input_buffers(self, arrays: list[mx.array], captured: Captured) -> list[Buffer]:
        contiguous, buffers = self.definition.get("ensure_row_contiguous", True), []
        for array, infos in zip(arrays, captured.shape_infos, strict=True):
            memory, strides = memory_of(to_numpy(array), contiguous)
            buffers.append(Buffer("", memory.dtype, memory.size, memory, view=True))
            extra = (np.array(array.shape, np.int32), np.array(strides, np.int64), np.array([array.ndim], np.int32))
            wanted = [a for a, use in zip(extra, infos, strict=True) if use and array.ndim]
            buffers += [Buffer("", a.dtype, a.size, a) for a in wanted]
        return buffers

    def _output_buffers(self, call: dict[str, Any]) -> list[Buffer]:
        buffers, start = [], call.get("init_value")
        for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True):
            kind, size = numpy_dtype(dtype), int(np.prod(shape, dtype=np.int64))
            data = None if start is None else np.full(size, start).astype(kind)
            buffers.append(Buffer("", kind, size, data, output=True))
        return buffers

    def _log(self, session: Session, captured: Captured, grid: tuple, threadgroup: tuple, result: Result) -> None:
        text = self.definition.get("header", "") + self.definition["source"]
        dispatch = Dispatch(
            self.definition["name"],
            grid,
            threadgroup,
            result.counters,
            result.traffic,
            result.findings,
            len(text.encode()),
            len(captured.source.encode()),
            captured.source,
            result.seconds,
        )
        session.log.append(dispatch)


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    **options: Any,
) -> EmulatedKernel:
    """Return an emulated kernel. The arguments are those of `mx.fast.metal_kernel`."""
    return EmulatedKernel(
        name=name,
        input_names=input_names,
        output_names=output_names,
        source=source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
        **options,
    )


def install() -> None:
    """Make `mx.fast.metal_kernel` build emulated kernels from now on.

    Use it in a conftest. Kernels that the library builds and caches then work in every later `emulated_metal`
    context, and behave as MLX's own kernels outside of such a context.
    """
    mx.fast.metal_kernel = metal_kernel


@contextlib.contextmanager
def emulated_metal(
    *,
    order: str = "forward",
    seed: int = 1,
    noise: bool = False,
    skew: int = 0,
    strict_exit: bool = True,
    require_all_written: bool = True,
    metal_version: int = 310,
    raise_on_findings: bool = True,
    unrolls: bool = False,
    pretend_available: bool = False,
    on_enter: Sequence[Callable[[], Any]] = (),
) -> Iterator[list[Dispatch]]:
    """Run every `mx.fast.metal_kernel` called inside the context in the emulator. Yield the log of launches.

    A finding is a defect that the emulator found in a kernel.

    Args:
        order: the order in which threads run: "forward", "reverse" or "random" (with `seed`).
        noise: whether results of math functions are changed at random within the error that the specification allows.
        skew: number of elements by which inputs are moved from a 16-byte boundary.
        strict_exit: whether a simdgroup operation after some lanes have returned is a finding.
        require_all_written: whether an unwritten output element is a finding (unless the call has `init_value`).
        metal_version: 310, 320 or 400, the value of `__METAL_VERSION__`.
        raise_on_findings: whether the first launch with findings raises KernelError; else they are only logged.
        unrolls: whether clang unrolls loops, as compilers for GPUs do. It then merges loads of the same element.
        pretend_available: whether `mx.metal.is_available()` returns True inside.
        on_enter: functions to call when the context begins and again when it ends. An example is a function that clears
            a cache of kernels, so that kernels of the emulator are used only inside the context.
    """
    if order not in ("forward", "reverse", "random"):
        raise ValueError(f"[emulated_metal] order must be forward, reverse or random but got {order!r}")
    options = Options(order, seed, noise, skew, strict_exit, require_all_written)
    session = Session(options, metal_version, raise_on_findings, unrolls, [])
    before, available = mx.fast.metal_kernel, mx.metal.is_available
    mx.fast.metal_kernel = metal_kernel
    if pretend_available:
        mx.metal.is_available = lambda: True
    _active.append(session)
    try:
        for hook in on_enter:
            hook()
        yield session.log
    finally:
        _active.pop()
        mx.fast.metal_kernel = before
        mx.metal.is_available = available
        for hook in on_enter:
            hook()
