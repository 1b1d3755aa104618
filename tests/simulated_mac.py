"""Run the tests on Linux as they would run on a Mac: `python -m pytest -p simulated_mac`.

The emulator replaces MLX's Metal kernels, and the CPU replaces the GPU. Tools that exist only on Linux are hidden.
The tests cannot use the emulator directly. Python processes that a test starts are simulated, too: the folder
simulated_mac_children is first on their PYTHONPATH, and Python imports its `sitecustomize` before anything else.
"""

# ctypes.util and urllib.request are imported before the platform is changed. On a Mac they import modules that Linux
# lacks.
import ctypes.util  # noqa: F401
import os
import platform
import subprocess
import sys
import sysconfig
import threading
import urllib.request  # noqa: F401
from pathlib import Path

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
    """A stream that reports the GPU as its device and computes on the CPU."""

    def __init__(self):
        self.device = mx.Device(mx.gpu)
        self.own = new_stream(mx.cpu)


class Within:
    """Replacement for the context manager `mx.stream`. It records whether the GPU was chosen and computes on the
    CPU."""

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
    """An emulated kernel that behaves like MLX's own: it refuses streams of the CPU and can be traced inside
    transformations."""

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
    """Replacement for `subprocess.run`. It answers the commands that ask for a Mac's chip and system version, and runs
    all other commands."""
    if command[0] in ("/usr/sbin/sysctl", "/usr/bin/sw_vers"):
        return subprocess.CompletedProcess(command, 0, stdout="simulated\n", stderr="")
    return run_here(command, *arguments, **options)


def no_emulator(**options):
    raise RuntimeError("a Mac has no emulator")


def pytest_addoption(parser):
    """Simulate the Mac in this process and its children. pytest calls this hook before it imports any test."""
    install()


def install():
    """Simulate the Mac in this process and in the Python processes that it starts. A worker process of pytest-xdist
    calls this function twice, at Python's start and from pytest; the second call does nothing."""
    if sys.platform == "darwin":
        return
    folder = str(Path(__file__).with_name("simulated_mac_children"))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *paths])
    runtime.library(), toolchain.zig()  # load the emulator's tools before they are hidden
    sysconfig.get_config_vars()  # Python caches Linux's values; later it would look for a Mac's, which are missing
    sys.modules["ziglang"] = None
    sys.platform, platform.mac_ver, subprocess.run = "darwin", lambda: ("26.0", ("", "", ""), "arm64"), run
    emulated.__enter__()
    mx.fast.metal_kernel = lambda **definition: Kernel(**{"header": "", **definition})
    sys.modules["metal_emulator"].emulated_metal = no_emulator
    mx.metal.is_available = lambda: True
    mx.is_available = lambda device: True
    mx.default_device, mx.set_default_device, mx.stream = default_device, as_set, Within
    mx.new_stream = lambda device: Stream() if device in (mx.gpu, mx.Device(mx.gpu)) else new_stream(device)
