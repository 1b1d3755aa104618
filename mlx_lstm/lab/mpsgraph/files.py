"""Write and read cases and results as `.npz` files: for a child process, and as golden files (recorded results) with
a checksum."""

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
    """The contents of a golden file (results recorded for later comparisons). The fields are the machine's
    description, the implementation that computed the results, the cases, and the results by case name."""

    card: dict[str, str]
    contender: str
    cases: list[CompareCase]
    results: dict[str, Arrays]


def save_case(file: str, case: CompareCase) -> None:
    """Write a case (a call of an op with its arrays) to an .npz file."""
    meta = {"name": case.name, "op": case.op, "descriptor": case.descriptor}
    save_arrays(file, case.arrays | {"meta": as_json(meta)})


def save_arrays(file: str, arrays: dict[str, Any]) -> None:
    """Write arrays by name to an .npz file."""
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

    The checksum only detects accidents, since anybody can compute a new one. So the oracle also evaluates each case.
    """
    try:
        # The file may come from anybody: `foreign` limits the memory, and its budget how deeply JSON is nested.
        with foreign(Path(file)) as opened:
            arrays: dict[str, Any] = dict(read_npz(opened, text=True))  # text: the description and the checksum
            sealed = str(arrays.pop("checksum"))
            meta = opened.budget.json(str(arrays["meta"]))
            if checksum(arrays) != sealed:
                raise ValueError("it was changed since it was recorded: its checksum is not that of its contents")
            return golden_of(arrays, meta)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no golden: {shown(str(error).removeprefix(file).lstrip(': '), 300)}") from None


def golden_of(arrays: Arrays, meta: Any) -> Golden:
    """Return the golden in the arrays of a file and in its description `meta`. The keys of the arrays are
    `number/kind/name`: a case's number, "arrays" or "results", and a name. Other keys are ignored. Raise ValueError if
    the oracle, which evaluates every case, would take hours."""
    parts: dict[str, dict[str, Arrays]] = {}
    for key, array in arrays.items():
        number, kind, name = (*key.split("/", 2), "", "")[:3]
        parts.setdefault(number, {"arrays": {}, "results": {}}).get(kind, {})[name] = array
    cases, results, steps = [], {}, 0
    for n, entry in enumerate(meta["cases"]):
        steps += sum(parts[str(n)]["arrays"]["source"].shape[:1])  # 0 for a source without axes, which is refused later
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
"""The largest product of the sizes of source and recurrent weight in a golden file; recorded cases have up to 2**20."""

MOST_STEPS = 2**16
"""The most time steps of all cases in a golden file: the oracle computes them one by one."""


def checked_case(entry: dict[str, Any], arrays: Arrays, results: Arrays) -> CompareCase:
    """Return a case that was read from a golden file. Raise ValueError unless the oracle can compute the case and
    the recorded results have the right shapes."""
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
    except DAMAGE as error:  # the errors that arrays of wrong shapes cause in NumPy
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
