"""Write and read cases and results as `.npz` files. Two kinds of files are written: files for a child process, and
golden files, which hold recorded results and a checksum."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...ground.budget import shown
from ...ground.files import DAMAGE, foreign, named, read_npz
from .cases import GATES, Arrays, CompareCase
from .dump import read_descriptor
from .judge import expected


class Golden(NamedTuple):
    """The contents of a golden file, which holds results recorded for later comparisons. card: the description of the
    machine. contender: the implementation that computed the results. results: the results by the case's name."""

    card: dict[str, str]
    contender: str
    cases: list[CompareCase]
    results: dict[str, Arrays]


def save_case(file: str, case: CompareCase) -> None:
    """Write a case (a call of an op with its arrays) to an .npz file."""
    meta = {"name": case.name, "op": case.op, "descriptor": case.descriptor}
    save_arrays(file, case.arrays | {"meta": as_json(meta)})


def save_arrays(file: str, arrays: dict[str, Any]) -> None:
    np.savez(file, **arrays)


def load_case(file: str) -> CompareCase:
    """Read a case from a file that `save_case` wrote."""
    with np.load(file) as data:
        arrays = dict(data)
    meta = json.loads(str(arrays.pop("meta")))
    return CompareCase(meta["name"], meta["op"], meta["descriptor"], arrays)


def save_golden(file: str, golden: Golden) -> None:
    """Write a golden file, which holds recorded results, with a checksum."""
    arrays: dict[str, Any] = {}
    meta = []
    for n, case in enumerate(golden.cases):
        meta.append({"name": case.name, "op": case.op, "descriptor": case.descriptor})
        arrays |= {f"{n}/arrays/{name}": array for name, array in case.arrays.items()}
        arrays |= {f"{n}/results/{name}": array for name, array in golden.results[case.name].items()}
    arrays["meta"] = as_json({"card": golden.card, "contender": golden.contender, "cases": meta})
    arrays["checksum"] = np.array(checksum(arrays))
    with open(file, "wb") as out:
        np.savez_compressed(out, **arrays)


def load_golden(file: str) -> Golden:
    """Read a golden file, which holds recorded results. Raise ValueError if the file is not a golden file or was
    changed.

    The checksum detects only accidental changes, since anybody can compute a new checksum. So the float64 oracle must
    also be able to compute each case.
    """
    try:
        # The file may come from anybody: `foreign` limits the memory, and `budget.json` refuses deeply nested JSON.
        with foreign(Path(file)) as opened:
            arrays: dict[str, Any] = dict(read_npz(opened, text=True))  # texts: description, checksum
            sealed = str(arrays.pop("checksum"))
            meta = opened.budget.json(str(arrays["meta"]))
            if checksum(arrays) != sealed:
                raise ValueError("it was changed since it was recorded: its checksum is not that of its contents")
            return golden_of(arrays, meta)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no golden: {shown(str(error).removeprefix(file).lstrip(': '), 300)}") from None


def golden_of(arrays: Arrays, meta: Any) -> Golden:
    """Return the contents of a golden file as a `Golden`. arrays: by keys `number/kind/name`, which consist of a case's
    number, "arrays" or "results", and an array's name; other keys are ignored. meta: the file's description of the
    machine and the cases. Raise ValueError if the oracle, which computes every case, would take hours."""
    parts: dict[str, dict[str, Arrays]] = {}
    for key, array in arrays.items():
        number, kind, name = (*key.split("/", 2), "", "")[:3]
        parts.setdefault(number, {"arrays": {}, "results": {}}).get(kind, {})[name] = array
    cases, results, steps = [], {}, 0
    for n, entry in enumerate(meta["cases"]):
        steps += sum(parts[str(n)]["arrays"]["source"].shape[:1])  # 0 for a source without axes; refused below
        if steps > MOST_STEPS:
            raise ValueError(f"its cases must have at most {MOST_STEPS} steps together")
        case = checked_case(entry, **parts[str(n)])
        if case.name in results:
            raise ValueError(f"two cases are called {case.name}")
        cases.append(case)
        results[case.name] = parts[str(n)]["results"]
    card = {shown(name): shown(value) for name, value in meta["card"].items()}
    return Golden(card, shown(meta["contender"]), cases, results)


MOST_NUMBERS = 2**22
"""The largest allowed product of the numbers of elements of source and recurrent weight in a golden file, so that the
oracle does not take too long. In the files that `compare --record` writes it is at most 2**20."""

MOST_STEPS = 2**16
"""The largest allowed number of time steps of all cases in a golden file. The oracle computes them one by one."""


def checked_case(entry: dict[str, Any], arrays: Arrays, results: Arrays) -> CompareCase:
    """Return a case that was read from a golden file (recorded results). Raise ValueError unless the float64 oracle can
    compute the case and the recorded results have the right shapes. entry: the file's description of the case."""
    name, op = shown(entry["name"], 200), entry["op"]
    if op not in GATES:
        raise ValueError(f"case {name} has the unknown op {shown(op)}")
    case = CompareCase(name, op, read_descriptor(op, json.dumps(entry["descriptor"])), arrays)
    if any(array.dtype not in (np.float32, np.float16) for array in (arrays | results).values()):
        raise ValueError(f"the arrays of {name} must be float32 or float16")
    if arrays["source"].size * arrays["recurrent_weight"].size > MOST_NUMBERS:  # too large for the oracle
        raise ValueError(f"case {name} is too large")
    try:
        shapes = {result: array.shape for result, array in expected(case).items()}
    except DAMAGE as error:  # NumPy's errors for arrays of wrong shapes
        raise ValueError(f"the oracle cannot compute {name}: {named(error)}") from None
    for result, array in results.items():
        if array.shape != shapes.get(result):
            raise ValueError(f"{shown(result)} of {name} has shape {list(array.shape)}, not {shapes.get(result)}")
    return case


def checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of the arrays' names, dtypes, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def as_json(value: Any) -> np.ndarray:
    """Return a value as JSON text in a NumPy array, which an .npz file can hold."""
    return np.array(json.dumps(value, sort_keys=True))
