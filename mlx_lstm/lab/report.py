"""Describe this machine, format tables, and write reports as JSON."""

import json
import math
import os
import platform
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import __version__
from ..ground.child import shortened
from ..ground.machine import chip, counted_gpu_cores, installed_version, system

THREAD_SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
THREAD_SETTINGS += ("VECLIB_MAXIMUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "LD_PRELOAD")
"""Environment variables that change the number of threads of libraries, or which code the libraries run. The report
shows the ones that are set."""


def machine_card(command: str, device: str) -> dict[str, str]:
    """Return everything about this machine that measured times depend on, by name."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    set_here = [f"{name}={os.environ[name]}" for name in THREAD_SETTINGS if name in os.environ]
    return {
        "chip": chip(),
        "cores": str(os.cpu_count()),
        "gpu_cores": str(counted_gpu_cores() or "unknown"),
        "system": system(),
        "python": platform.python_version(),
        "mlx_lstm": __version__,
        "mlx": installed_version("mlx"),
        "device": device,
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}{blas_kernel()}",
        "torch": installed_version("torch"),
        "tensorflow": installed_version("tensorflow", "tensorflow-cpu"),
        "threads": ", ".join(set_here) or "defaults",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "command": command,
    }


def blas_kernel() -> str:
    """Return as text which kernel (code for a kind of processor) NumPy's BLAS has selected on this machine. Without the
    package `threadpoolctl` it is unknown."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return ", kernel unknown without threadpoolctl"
    kernels = {f", kernel {library['architecture']}" for library in threadpool_info() if "architecture" in library}
    return "".join(sorted(kernels))


def table(lines: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Format rows of cells as aligned columns; the first row is the header, and empty columns are left out. The
    first `left` columns are aligned to the left, the others to the right; with None all are aligned to the left."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    aligned = []
    for n, column in enumerate(columns):
        width = max(map(len, column))
        aligned.append([cell.ljust(width) if left is None or n < left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*aligned, strict=True))


def json_text(content: Any) -> str:
    """Return a report as JSON text. Numbers that are not finite become null; the user's home folder becomes ~."""
    return json.dumps(printable(content, os.path.expanduser("~")), indent=1)


def printable(value: Any, home: str) -> Any:
    """Return a value of a report with None for numbers that JSON lacks, and with ~ for the path of the home folder,
    which contains the user's name."""
    if isinstance(value, dict):
        return {str(key): printable(part, home) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [printable(part, home) for part in value]
    if isinstance(value, str):
        return value.replace(home, "~") if home not in ("", "/") else value  # "/" is in every path
    return None if isinstance(value, float) and not math.isfinite(value) else value


WIDTH = 400  # the largest number of characters that `one_line` returns


def one_line(text: str) -> str:
    """Return an error text as one line: the whole text, or the most useful parts of a long one."""
    return " ".join(shortened(text, WIDTH).split())


def without_names(text: str) -> str:
    """Return an error text of a compiler without the kernel's name and without line numbers, so that the texts of
    several kernels with the same fault are equal."""
    text = re.sub(r"\S+:\d+:\d+: ", "", text)
    return re.sub(r"\bcustom_kernel_\w+|(?<=\bkernel )\S+|(?<=\bfunction )\S+", "", text)
