"""Cases and results as `.npz` files: what a process of its own is handed, and goldens, which a checksum seals."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .cases import Arrays, Case


class Golden(NamedTuple):
    """What a machine computed: its card, who computed it, the cases, and by case name the results."""

    card: dict[str, str]
    contender: str
    cases: list[Case]
    results: dict[str, Arrays]


def save_case(file: str, case: Case) -> None:
    """One case."""
    meta = {"name": case.name, "op": case.op, "descriptor": case.descriptor}
    save_arrays(file, case.arrays | {"meta": as_json(meta)})


def save_arrays(file: str, arrays: dict[str, Any]) -> None:
    """Arrays by name."""
    np.savez(file, **arrays)


def load_case(file: str) -> Case:
    """What `save_case` wrote."""
    with np.load(file) as data:
        arrays = dict(data)
    meta = json.loads(str(arrays.pop("meta")))
    return Case(meta["name"], meta["op"], meta["descriptor"], arrays)


def save_golden(file: str, golden: Golden) -> None:
    """A golden with its checksum."""
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
    """What `save_golden` wrote. ValueError if it is no golden, or was changed since."""
    try:
        with np.load(file) as data:
            arrays = dict(data)
        expected = str(arrays.pop("checksum"))
        meta = json.loads(str(arrays["meta"]))
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is no golden: {error}") from None
    if checksum(arrays) != expected:
        raise ValueError(f"{file} was changed since it was recorded: its checksum is not that of its contents")
    cases, results = [], {}
    for n, entry in enumerate(meta["cases"]):
        parts: dict[str, Arrays] = {"arrays": {}, "results": {}}
        for key, array in arrays.items():
            number, _, rest = key.partition("/")
            kind, _, name = rest.partition("/")
            if number == str(n) and kind in parts:
                parts[kind][name] = array
        cases.append(Case(entry["name"], entry["op"], entry["descriptor"], parts["arrays"]))
        results[entry["name"]] = parts["results"]
    return Golden(meta["card"], meta["contender"], cases, results)


def checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def as_json(value: Any) -> np.ndarray:
    """JSON text as an array."""
    return np.array(json.dumps(value, sort_keys=True))
