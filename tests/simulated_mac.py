"""`python -m pytest -p simulated_mac`, on Linux: the tests as a Mac runs them. The emulator is in place of MLX's own
Metal kernels, the CPU of the GPU behind them; what only Linux has is hidden, and nobody else gets at the emulator."""

import platform
import subprocess
import sys
import sysconfig
import threading
import urllib.request  # noqa: F401 (a Mac's has parts that are not here)

import mlx.core as mx
from metal_emulator import dropin, runtime, toolchain

stream, new_stream, run_here = mx.stream, mx.new_stream, subprocess.run
local = threading.local()
default = mx.Device(mx.gpu)
emulated = dropin.emulated_metal()


def default_device():
    return getattr(local, "device", default)


def as_set(device):
    global default
    default = mx.Device(device) if isinstance(device, mx.DeviceType) else device


class Stream:
    """A stream of the GPU: work is the CPU's."""

    def __init__(self):
        self.device = mx.Device(mx.gpu)
        self.own = new_stream(mx.cpu)


class Within:
    """`mx.stream`."""

    def __init__(self, where):
        self.gpu = isinstance(where, Stream) or where in (mx.gpu, mx.Device(mx.gpu))
        self.context = stream(where.own if isinstance(where, Stream) else mx.cpu if self.gpu else where)

    def __enter__(self):
        self.before = dict(local.__dict__)
        local.device = mx.Device(mx.gpu if self.gpu else mx.cpu)
        return self.context.__enter__()

    def __exit__(self, *error):
        local.__dict__.clear()
        local.__dict__.update(self.before)
        return self.context.__exit__(*error)


class Kernel(dropin.EmulatedKernel):
    """Refuses the CPU's streams and lets itself be traced, as MLX's own."""

    def __call__(self, **call):
        if call.get("stream", default_device()) not in (mx.gpu, mx.Device(mx.gpu)):
            raise ValueError("[metal_kernel] Only supports the GPU.")
        try:
            return super().__call__(**call)
        except ValueError as error:
            if "during function transformations" not in str(error):
                raise
            return self.mlx_kernel(**call)


def run(command, *arguments, **options):
    """`subprocess.run`, but what names a Mac is not here."""
    if command[0] in ("/usr/sbin/sysctl", "/usr/bin/sw_vers"):
        return subprocess.CompletedProcess(command, 0, stdout="simulated\n", stderr="")
    return run_here(command, *arguments, **options)


def no_emulator(**options):
    raise RuntimeError("a Mac has no emulator")


def pytest_addoption(parser):
    """Called before anything of the tests is imported."""
    runtime.library(), toolchain.zig()  # what stands for the GPU keeps its tools
    sysconfig.get_config_vars()  # a Mac's are not here
    sys.modules["ziglang"] = None
    sys.platform, platform.mac_ver, subprocess.run = "darwin", lambda: ("26.0", ("", "", ""), "arm64"), run
    emulated.__enter__()
    mx.fast.metal_kernel = lambda **definition: Kernel(**{"header": "", **definition})
    sys.modules["metal_emulator"].emulated_metal = no_emulator
    mx.metal.is_available = lambda: True
    mx.is_available = lambda device: True
    mx.default_device, mx.set_default_device, mx.stream = default_device, as_set, Within
    mx.new_stream = lambda device: Stream() if device in (mx.gpu, mx.Device(mx.gpu)) else new_stream(device)
