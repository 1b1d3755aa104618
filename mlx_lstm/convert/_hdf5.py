"""Read HDF5 files in a child process, because HDF5 itself may hang or crash at a damaged file.

An HDF5 file is a tree of groups (folders) and datasets (arrays). A path such as model_weights/lstm/kernel names a group
or a dataset. Both may have attributes, which are lists of texts in Keras files. The child process runs the script
`_hdf5_child.py`, which reads the file and prints its contents.
"""

import importlib.util
import signal
import subprocess
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..ground import budget as limits
from ..ground.budget import Budget
from ..ground.files import array_in, as_bfloat16, broken
from ..ground.machine import child_command, child_environment, has_interpreter

WAIT = 6
"""The limit of a child process's elapsed time, divided by its limit of processor time. On a busy machine the process
waits for a processor, which takes elapsed time only."""


class Contents(NamedTuple):
    """The contents of an HDF5 file. attributes: lists of texts, by path and by the attribute's name; arrays: by path;
    notes: texts that say what was not read."""

    attributes: dict[str, dict[str, list[str]]]
    arrays: dict[str, Any]
    notes: list[str]

    def texts(self, path: str, name: str) -> list[str]:
        """Return the texts of the attribute `name` of the group or dataset at `path`; [] if there is none. Keras splits
        a long list into numbered attributes: name0, name1 and so on."""
        here = self.attributes.get(path, {})
        if name in here:
            return here[name]
        joined, n = [], 0
        while f"{name}{n}" in here:
            joined += here[f"{name}{n}"]
            n += 1
        return joined


def check_h5py() -> None:
    """Raise ImportError if the package h5py is missing."""
    if importlib.util.find_spec("h5py") is None:
        raise ImportError(".keras and .h5 files need the package h5py: pip install '.[convert]'")


def read(source: BinaryIO | bytearray, budget: Budget) -> Contents:
    """Return the contents of an HDF5 file. `source` is the open file or, from inside a .keras zip, its bytes. Raise
    ValueError if the file is damaged, or takes more memory or time than `budget` has."""
    if not has_interpreter():
        raise ValueError("it is read in a process of its own, and no Python can be started here")
    script = str(Path(__file__).with_name("_hdf5_child.py"))
    # The child process runs the script whose path is its first argument; `child_command` adds "import sys". words: the
    # arguments of the script: the path of the module `budget`, the size of the file, the memory and the seconds that it
    # may take.
    code = "from runpy import run_path; run_path(sys.argv.pop(1), run_name='__main__')"
    words = [str(limits.__file__), str(budget.stored), str(budget.left), str(int(budget.seconds) + 1)]
    given: dict[str, Any] = {"input": source} if isinstance(source, bytearray) else {"stdin": source}
    # A file may name a compression filter for which HDF5 would load a library. The value "::" forbids this. NumPy's
    # BLAS gets one thread, because each further thread takes memory, which is limited.
    environment = child_environment() | {"HDF5_PLUGIN_PRELOAD": "::", "OPENBLAS_NUM_THREADS": "1"}
    command = child_command(code, script, *words)
    endless = f"HDF5 does not come to an end, after {budget.seconds:.0f} seconds"
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=WAIT * budget.seconds, **given)
    except subprocess.TimeoutExpired:
        broken(endless)
    if done.returncode == -signal.SIGXCPU:  # the child's own limit of processor time
        broken(endless)
    if done.returncode:
        broken(f"HDF5 ended with exit code {done.returncode}")
    return parsed(done.stdout, budget)


def parsed(output: bytes, budget: Budget) -> Contents:
    """Return the contents in the output of the child process: a line of JSON, then the bytes of all arrays. The JSON
    has either "error" (a text), or "attributes", "arrays" ([dtype, shape] by path, in the order of the bytes) and
    "others" (the number of datasets that contain no numbers)."""
    budget.take(len(output), "its contents")
    # start, stop: the positions of an array's first byte in the output and of the byte after its last.
    start = output.index(b"\n") + 1
    about = budget.json(output[:start])
    if "error" in about:
        raise ValueError(about["error"])
    arrays: dict[str, Any] = {}
    for path, (code, shape) in about["arrays"].items():
        # Neither HDF5 nor NumPy supports bfloat16. Each number is stored as two bytes of no type, dtype V2.
        dtype = np.dtype("<u2" if code == "|V2" else code)
        stop = start + prod(shape) * dtype.itemsize
        array = array_in(output, budget.name(path), dtype, tuple(shape), start, stop)
        arrays[path] = as_bfloat16(array) if code == "|V2" else array
        start = stop
    others = about["others"]
    return Contents(about["attributes"], arrays, [f"{others} datasets without numbers are left out"] if others else [])
