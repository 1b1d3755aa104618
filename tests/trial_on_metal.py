"""A child that runs trials as on a Mac: `python trial_on_metal.py FAULT KERNEL` with a fault in a kernel, or
`python trial_on_metal.py counted FILE` with the names of all launches written to a file."""

import os
import re
import sys
import time
from contextlib import contextmanager
from unittest.mock import patch

import mlx.core as mx
from metal_emulator import KernelError
from on_metal import on_metal

from mlx_lstm.recurrence import _judge

FAULTS = ("compile", "refused", "wrong", "hangs", "dies")
BUILD_FAILS = "[metal::Device] Unable to build metal library from source"
LAUNCH_FAILS = "[metal_kernel] Thread group size (1024) is greater than the maximum allowed (896)."


@contextmanager
def fault(kind, kernel):
    """Plant a fault in a kernel: its text does not compile, its launch is refused, its results are 1 % off, it hangs,
    or it ends the process.

    kernel: a regular expression for the kernel's name without the template.
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
            except KernelError as error:  # as MLX says it
                found = error.findings[0]
                raise RuntimeError(f"{BUILD_FAILS}\nprogram_source:{found.line}:1: error: {found.text}\n") from None
            return [output * 1.01 for output in outputs] if kind == "wrong" else outputs

        return call

    with patch.object(mx.fast, "metal_kernel", metal_kernel):
        yield


@contextmanager
def counted(file):
    """Write the name of each launched kernel to a file."""
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
    with on_metal(), counted(sys.argv[2]) if sys.argv[1] == "counted" else fault(*sys.argv[1:]):
        _judge.main()
