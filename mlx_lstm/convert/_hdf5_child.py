"""Script that reads an HDF5 file from stdin and prints its contents. The module `_hdf5` runs it in a child process.

Its arguments are BUDGET STORED LEFT SECONDS. BUDGET is the path of the module `budget`; STORED and LEFT are the
arguments of its class `Budget`: the size of the file and the memory that it may take. SECONDS is the limit of the
process's processor time, which works even if the parent has died.

HDF5 does not validate its files: a damaged file may make it hang, crash, or take all memory. In a child process none of
these harms the user's process. The script imports nothing from mlx_lstm, because this import would take longer than all
other work.

The output is a line of JSON, {"attributes": ..., "arrays": ..., "others": ...} or {"error": ...}, and then the bytes of
all arrays, one array after the other. `attributes` maps an object's path and an attribute's name to a list of texts;
`arrays` maps a path to [dtype, shape]; `others` is the number of datasets that hold no numbers.
"""

import io
import json
import resource
import sys
from contextlib import suppress
from math import prod
from runpy import run_path
from typing import Any

import h5py
import numpy as np

ATTRIBUTES = ("model_config", "keras_version", "layer_names", "weight_names", "name")
"""The attributes that are read. Keras splits a long list into several attributes and adds a number to each name."""

LINKS_INSIDE = (0, 1)
"""HDF5's H5L_TYPE_HARD and H5L_TYPE_SOFT: links that stay in the file."""


class Refused(ValueError):
    """The error of a file that must not be read. The module `budget` raises another class of the same name."""


Texts = dict[str, list[str]]
"""The type of the attributes of one object: lists of texts by attribute name."""

Contents = tuple[dict[str, Texts], dict[str, np.ndarray], int]
"""The type of the contents of a file: the attributes by path, the arrays by path, the number of other datasets."""


def contents(file: Any, budget: Any) -> Contents:
    """Return the attributes and the arrays of an HDF5 file by path, and the number of datasets that hold no numbers.
    budget: an object of the class `Budget`, which raises an error if the file takes too much memory."""

    def wrong(path: bytes, info: Any) -> Exception | None:
        """Return the error of a link that must not be followed, or None. If this function returns an error, h5py stops
        its visit of all links. An error raised here would get lost."""
        try:
            if info.type not in LINKS_INSIDE:
                raise Refused(f"{path.decode()} must lie in the file itself but is a link to another file")
            budget.name(path.decode())  # raises an error for a name that is too long, or if there are too many
        except ValueError as error:
            return error
        return None

    # Refuse links to other files before anything is read, because h5py would open these files.
    if (error := file.id.links.visit(wrong, info=True)) is not None:
        raise error
    attributes: dict[str, Texts] = {"/": texts_of(file, budget)}
    arrays: dict[str, np.ndarray] = {}
    others = 0

    # h5py calls this function with each group and dataset of the file.
    def visit(path: str, item: Any) -> None:
        nonlocal others
        if found := texts_of(item, budget):
            attributes[path] = found
        if not isinstance(item, h5py.Dataset):
            return
        if item.external or item.is_virtual:
            raise Refused(f"{path} must lie in the file itself but is read from other files")
        numbers = item.dtype.kind in "fiub" and item.dtype.itemsize <= 8  # no long double, which MLX lacks
        if item.shape is None or not (numbers or item.dtype.str == "|V2"):  # V2: bytes of no type, bfloat16 in Keras
            others += 1
            return
        # HDF5 allocates memory for the declared sizes, even if the file stores no data. So limit the size of the array
        # and of one chunk (a part that is stored compressed).
        budget.take(prod(item.shape) * item.dtype.itemsize, path)
        budget.check(prod(item.chunks or (0,)) * item.dtype.itemsize, path)
        arrays[path] = np.asarray(item[()])

    file.visititems(visit)
    return attributes, arrays, others


def texts_of(item: Any, budget: Any) -> Texts:
    """Return the attributes of a group or dataset that Keras needs (`ATTRIBUTES`): a list of texts by attribute name.
    `budget.check` raises an error before a text that is too long is read; `budget.take` counts the memory of the
    texts."""
    found = {}
    for name in item.attrs:
        if name.rstrip("0123456789") in ATTRIBUTES:  # layer_names0, layer_names1, ...: parts of a long list
            about = item.attrs.get_id(name)  # the attribute's shape and dtype, without its values
            kind = h5py.check_string_dtype(about.dtype)
            if kind is None:  # no texts
                continue
            # size: the largest number of bytes that the texts may have. kind.length: the length of each text, or None
            # if the lengths differ. Texts of different lengths may share bytes of the file, so each of them may be as
            # long as the whole file.
            size = prod(about.shape or (1,)) * (about.dtype.itemsize if kind.length else budget.stored)
            if size > budget.left and name in ("layer_names", "weight_names"):  # read the names from the tree instead
                found[name] = names_below(item, name)
            else:
                budget.check(size, name)
                values = np.asarray(item.attrs[name]).reshape(-1)
                found[name] = [each.decode() if isinstance(each, bytes) else str(each) for each in values]
            budget.take(len(json.dumps(found[name])), name)
    return found


def names_below(group: Any, name: str) -> list[str]:
    """Return what the attribute `name` of a group would contain, found out from the paths below the group: the names of
    the layers of a model, or of the arrays of a layer. This replaces reading an attribute that may take too much
    memory. The order of the texts may differ, which changes nothing."""
    found: list[str] = []

    def visit(path: str, item: Any) -> None:
        # Keras gives the group of each layer an attribute weight_names (or weight_names0, ... if it is long). The group
        # top_level_model_weights also has this attribute, but is no layer.
        is_layer = path != "top_level_model_weights" and any(each.startswith("weight_names") for each in item.attrs)
        if (name == "layer_names" and is_layer) or (name == "weight_names" and isinstance(item, h5py.Dataset)):
            found.append(path)

    group.visititems(visit)
    return found


def answer(source: Any, budget: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Read the file and return (header, arrays): the JSON object for the first line of the output, and the arrays whose
    bytes follow. source: a file object that can seek."""
    try:
        with h5py.File(source, "r") as file:
            attributes, arrays, others = contents(file, budget)
        headers = {name: [array.dtype.str, array.shape] for name, array in arrays.items()}
        return {"attributes": attributes, "arrays": headers, "others": others}, list(arrays.values())
    except Exception as error:  # any other error of HDF5 means a damaged file
        words = (str(error).splitlines() or [type(error).__name__])[0]
        # Compare the names, because the module `budget` raises its own class `Refused`, which this script cannot
        # import.
        refused = type(error).__name__ == Refused.__name__
        return {"error": words if refused else f"it is truncated or damaged: {words}"}, []


def limit_memory(budget: Any) -> None:
    """Limit the memory of this process, because a compressed chunk may be longer than it declares and HDF5 does not
    check this. The limit is the memory that the process uses now, twice the memory that the file may take (once in
    HDF5, once as the bytes that are printed), and 2^25 bytes for h5py."""
    with suppress(ValueError, OSError):  # the system may have a lower limit, or no limits, as macOS
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[5]) * resource.getpagesize()  # field 5: the data and the stack, in pages
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (now + 2 * budget.left + 2**25, hard))


def main() -> None:
    """Read the HDF5 file and print its contents."""
    module, stored, left, seconds = sys.argv[1:]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    budget = run_path(module)["Budget"](int(stored), int(left))
    limit_memory(budget)
    file = sys.stdin.buffer
    line, arrays = answer(file if file.seekable() else io.BytesIO(file.read()), budget)
    out = sys.stdout.buffer
    out.write(json.dumps(line).encode() + b"\n")
    for array in arrays:
        out.write(np.ascontiguousarray(array).tobytes())


if __name__ == "__main__":
    main()
