"""HDF5 files, read in a child process: HDF5 itself may hang or crash at a damaged file."""

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
"""How long the child may take, and a second more for each 10 MB. It takes half of one for a small file."""


class Contents(NamedTuple):
    """What a HDF5 file holds: by path and name the texts in its attributes, by path its arrays, notes."""

    attributes: dict[str, dict[str, list[str]]]
    arrays: dict[str, Any]
    notes: list[str]

    def texts(self, path: str, name: str) -> list[str]:
        """Return an attribute's texts, which Keras cuts into numbered attributes if there are many."""
        here = self.attributes.get(path, {})
        if name in here:
            return here[name]
        cut, n = [], 0
        while f"{name}{n}" in here:
            cut += here[f"{name}{n}"]
            n += 1
        return cut


def load() -> None:
    """ImportError if h5py is missing."""
    if importlib.util.find_spec("h5py") is None:
        raise ImportError(".keras and .h5 files need the package h5py: pip install '.[convert]'")


def read(source: Path | bytes) -> Contents:
    """Return the contents of a HDF5 file, or of one in memory. ValueError says what is wrong with it."""
    load()
    if not has_interpreter():
        raise ValueError("it is read in a process of its own, and no Python can be started here")
    data = source if isinstance(source, bytes) else b""
    size, path = (len(source), []) if isinstance(source, bytes) else (size_of(source), [str(source)])
    script = str(Path(__file__).with_name("_hdf5_child.py"))
    code = "from runpy import run_path; run_path(sys.argv.pop(1), run_name='__main__')"
    command = child_command(code, script, str(most_bytes(size)), *path)
    # A file may name a filter for which HDF5 would load a library: "::" forbids that.
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
    """Return what the child printed: a line of JSON, then the arrays' bytes."""
    start = output.index(b"\n") + 1
    about = json.loads(output[:start])
    if "error" in about:
        raise ValueError(about["error"])
    arrays: dict[str, Any] = {}
    for path, (dtype, shape) in about["arrays"].items():
        array = np.ndarray(shape, np.dtype(dtype), output, start)
        start += array.nbytes
        # bfloat16, which neither HDF5 nor NumPy has, lies there as two bytes without a meaning.
        short = dtype == "|V2"
        arrays[path] = mx.array(array.view(np.uint16)).view(mx.bfloat16) if short else array
    others = about["others"]
    return Contents(about["attributes"], arrays, [f"{others} datasets without numbers are left out"] if others else [])
