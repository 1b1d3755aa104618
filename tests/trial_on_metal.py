"""Child process for tests of the kernel trial, a small run of new kernels before their first real use. `python
trial_on_metal.py FAULT KERNEL` runs the trial on a simulated Mac with a fault in the named kernels. `python
trial_on_metal.py counted FILE` writes the names of all launched kernels to a file."""

import os
import re
import sys
import time
from contextlib import contextmanager
from unittest.mock import patch

import mlx.core as mx
from metal_emulator import KernelError, coverage
from on_metal import on_metal

from mlx_lstm.recurrence import _judge

FAULTS = ("compile", "refused", "wrong", "hangs", "dies")
MATRICES = r"fused_matrix_|ByTiles<"
"""A regular expression found in the names or sources of all kernels that multiply 8 x 8 matrices."""
BUILD_FAILS = "[metal::Device] Unable to build metal library from source"
LAUNCH_FAILS = "[metal_kernel] Thread group size (1024) is greater than the maximum allowed (896)."


@contextmanager
def fault(kind, kernel):
    """Plant a fault in the matching kernels: the source does not compile, the launch raises an error, the results
    are 1 % too large, the launch hangs, or the launch aborts the process. "zeros": kernels that multiply 8 x 8 matrices
    return zeros.

    kernel: a regular expression for the whole name of a kernel, up to `_without_` or `__` if the name contains them.
    """
    real = mx.fast.metal_kernel

    def metal_kernel(**definition):
        if not re.fullmatch(kernel, re.sub(r"_without_.*|__.*", "", definition["name"])):
            return real(**definition)
        if kind == "compile":
            definition |= {"source": f"not_declared = 1;\n{definition['source']}"}
        built = real(**definition)

        def call(**arguments):
            if kind == "refused":
                raise RuntimeError(LAUNCH_FAILS)
            if kind == "hangs":
                time.sleep(3600)
            if kind == "dies":
                print("libc++abi: terminating due to uncaught exception", file=sys.stderr, flush=True)
                os.abort()
            try:
                outputs = built(**arguments)
            except KernelError as error:  # raise what MLX raises for a compiler error
                found = error.findings[0]
                raise RuntimeError(f"{BUILD_FAILS}\nprogram_source:{found.line}:1: error: {found.text}\n") from None
            if kind == "zeros" and re.search(MATRICES, definition["name"] + definition["source"]):
                return [mx.zeros_like(output) for output in outputs]
            return [output * 1.01 for output in outputs] if kind == "wrong" else outputs

        return call

    with patch.object(mx.fast, "metal_kernel", metal_kernel):
        yield


@contextmanager
def counted(file):
    """Append the name of each launched kernel to a file."""
    real = mx.fast.metal_kernel

    def metal_kernel(**definition):
        built = real(**definition)

        def call(**arguments):
            with open(file, "a") as log:
                print(definition["name"], file=log)
            return built(**arguments)

        return call

    with patch.object(mx.fast, "metal_kernel", metal_kernel):
        yield


if __name__ == "__main__":
    coverage.count_lines(False)  # nobody collects the lines that ran in a child process
    with on_metal(), counted(sys.argv[2]) if sys.argv[1] == "counted" else fault(*sys.argv[1:]):
        _judge.main()
