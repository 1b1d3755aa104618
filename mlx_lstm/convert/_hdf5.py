"""Read HDF5 files in a child process, because HDF5 itself may hang or crash at a damaged file."""

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..files import most_bytes, size_of
from ..machine import child_command, child_environment, has_interpreter

SECONDS = 10
"""Time limit of the child process in seconds; one second is added for each 10 MB. A small file takes half a second."""


class Contents(NamedTuple):
    """The contents of an HDF5 file. attributes: texts by path and attribute name; arrays: by path; notes: texts on
    what was not read."""

    attributes: dict[str, dict[str, list[str]]]
    arrays: dict[str, Any]
    notes: list[str]

    def texts(self, path: str, name: str) -> list[str]:
        """Return the texts of an object's attribute. Keras splits a long list into several numbered attributes."""
        here = self.attributes.get(path, {})
        if name in here:
            return here[name]
        cut, n = [], 0
        while f"{name}{n}" in here:
            cut += here[f"{name}{n}"]
            n += 1
        return cut


def load() -> None:
    """Raise ImportError if the package h5py is missing."""
    if importlib.util.find_spec("h5py") is None:
        raise ImportError(".keras and .h5 files need the package h5py: pip install '.[convert]'")


def read(source: Path | bytes) -> Contents:
    """Return the contents of an HDF5 file. `source` is a path or the file's bytes. Raise ValueError if the file is
    damaged."""
    load()
    if not has_interpreter():
        raise ValueError("it is read in a process of its own, and no Python can be started here")
    data = source if isinstance(source, bytes) else b""
    size, path = (len(source), []) if isinstance(source, bytes) else (size_of(source), [str(source)])
    script = str(Path(__file__).with_name("_hdf5_child.py"))
    code = "from runpy import run_path; run_path(sys.argv.pop(1), run_name='__main__')"
    command = child_command(code, script, str(most_bytes(size)), *path)
    # A file may name a compression filter for which HDF5 would load a library. The value "::" forbids this.
    environment = child_environment() | {"HDF5_PLUGIN_PRELOAD": "::", "OPENBLAS_NUM_THREADS": "1"}
    limit = SECONDS + size / 10_000_000
    try:
        done = subprocess.run(command, env=environment, input=data, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"it is truncated or damaged: HDF5 does not come to an end, after {limit:.0f} seconds"
        ) from None
    if done.returncode:
        raise ValueError(f"it is truncated or damaged: HDF5 ended with exit code {done.returncode}")
    return parsed(done.stdout)


def parsed(output: bytes) -> Contents:
    """Parse the output of the child process: a line of JSON, then the arrays' bytes."""
    start = output.index(b"\n") + 1
    about = json.loads(output[:start])
    if "error" in about:
        raise ValueError(about["error"])
    arrays: dict[str, Any] = {}
    for path, (dtype, shape) in about["arrays"].items():
        array = np.ndarray(shape, np.dtype(dtype), output, start)
        start += array.nbytes
        # Neither HDF5 nor NumPy supports bfloat16. Each number is stored as two bytes of no type, dtype V2.
        short = dtype == "|V2"
        arrays[path] = mx.array(array.view(np.uint16)).view(mx.bfloat16) if short else array
    others = about["others"]
    return Contents(about["attributes"], arrays, [f"{others} datasets without numbers are left out"] if others else [])
