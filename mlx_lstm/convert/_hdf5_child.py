"""A script that reads an HDF5 file in a child process for `_hdf5`: `_hdf5_child.py MOST [PATH]`. Without PATH it
reads the file from stdin. MOST is the largest number of bytes that all arrays together may have.

HDF5 does not validate its files: a damaged file may make it hang, crash, or take all memory. In a child process none
of these harms the user's process. This script imports nothing from the package, since that import would take longer
than all other work.

The output is a line of JSON, {"attributes": ..., "arrays": ..., "others": ...} or {"error": ...}, then the bytes of
the arrays one after the other. `attributes` maps an object's path and an attribute's name to a list of texts;
`arrays` maps a path to [dtype, shape]; `others` is the number of datasets that hold no numbers.
"""

import io
import json
import resource
import sys
from contextlib import suppress
from math import prod
from typing import Any

import h5py
import numpy as np

ATTRIBUTES = ("model_config", "keras_version", "layer_names", "weight_names", "name")
"""The attributes that are read. Keras splits a long list into several attributes and adds a number to each name."""

LINKS_INSIDE = (0, 1)
"""HDF5's H5L_TYPE_HARD and H5L_TYPE_SOFT: links that stay in the file."""

Texts = dict[str, list[str]]
Contents = tuple[dict[str, Texts], dict[str, np.ndarray], int]


class Refused(ValueError):
    """The error of a file that is valid but must not be read."""


def contents(file: Any, most: int) -> Contents:
    """Return the attributes and the arrays of an HDF5 file by path, and the number of datasets that hold no numbers."""
    # Refuse links to other files first, since h5py would open these files.
    if (path := file.id.links.visit(foreign, info=True)) is not None:
        raise Refused(f"{path.decode(errors='replace')} must lie in the file itself but is a link to another file")
    attributes: dict[str, Texts] = {"/": texts_of(file)}
    arrays: dict[str, np.ndarray] = {}
    others, left = 0, most

    def visit(path: str | bytes, item: Any) -> None:
        nonlocal others, left
        if isinstance(path, bytes):
            raise ValueError(f"{path} is no text")
        if found := texts_of(item):
            attributes[path] = found
        if not isinstance(item, h5py.Dataset):
            return
        if item.external or item.is_virtual:
            raise Refused(f"{path} must lie in the file itself but is read from other files")
        numbers = item.dtype.kind in "fiub" and item.dtype.itemsize <= 8
        if item.shape is None or not (numbers or item.dtype.str == "|V2"):  # V2: bfloat16 as Keras stores it
            others += 1
            return
        # HDF5 allocates memory for the declared sizes, even where the file stores nothing. So these sizes are limited.
        left -= item.nbytes
        if left < 0 or prod(item.chunks or (0,)) * item.dtype.itemsize > most:
            raise Refused(f"{path} must not declare far more bytes than the file has")
        arrays[path] = np.asarray(item[()])

    file.visititems(visit)
    return attributes, arrays, others


def foreign(path: bytes, info: Any) -> bytes | None:
    """Return the path of a link that points to another file, and None for any other link. h5py stops its visit of
    all links as soon as this function returns a path."""
    return None if info.type in LINKS_INSIDE else path


def texts_of(item: Any) -> Texts:
    """Return the attributes in `ATTRIBUTES` of a group or dataset: a list of texts by attribute name."""
    found = {}
    for name in item.attrs:
        if name.rstrip("0123456789") in ATTRIBUTES:
            about = item.attrs.get_id(name)
            if h5py.check_string_dtype(about.dtype) is None and about.dtype.kind != "S":
                continue
            values = np.asarray(item.attrs[name]).reshape(-1)
            found[name] = [each.decode() if isinstance(each, bytes) else str(each) for each in values]
    return found


def answer(source: str | io.BytesIO, most: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the header line of the output, and the arrays whose bytes follow it. `source`: a path or a file in
    memory."""
    try:
        with h5py.File(source, "r") as file:
            attributes, arrays, others = contents(file, most)
        headers = {name: [array.dtype.str, array.shape] for name, array in arrays.items()}
        return {"attributes": attributes, "arrays": headers, "others": others}, list(arrays.values())
    except Refused as error:
        return {"error": str(error)}, []
    except Exception as error:  # any error of HDF5 means a damaged file
        words = (str(error).splitlines() or [type(error).__name__])[0]
        return {"error": f"it is truncated or damaged: {words}"}, []


def main() -> None:
    """Read the HDF5 file and print its contents."""
    most, *path = sys.argv[1:]
    limit = 8 * int(most) + 2**29
    with suppress(ValueError, OSError):  # the system may have a lower limit, or no limits
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    line, arrays = answer(path[0] if path else io.BytesIO(sys.stdin.buffer.read()), int(most))
    out = sys.stdout.buffer
    out.write(json.dumps(line).encode() + b"\n")
    for array in arrays:
        out.write(np.ascontiguousarray(array).tobytes())


if __name__ == "__main__":
    main()
