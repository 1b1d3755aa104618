"""The float64 judge of two bidirectional layers, LSTM or GRU, in the form of torch and cuDNN, with two biases each.

A layer and direction is named as torch names it: "_l0", "_l0_reverse", "_l1", "_l1_reverse".
"""

from functools import partial

import numpy as np

from ...oracle.arithmetic import Arithmetic, Tensors
from ...oracle.recurrence import evaluate as evaluate_case
from .. import judge
from ..judge import Judge

SUFFIXES = (("_l0", "_l0_reverse"), ("_l1", "_l1_reverse"))


def appoint(cell: str, numbers: Tensors, dtype: str, *, backward: bool) -> Judge:
    """The judge of a stack of this cell, "lstm" or "gru"."""
    return judge.appoint(numbers, dtype, backward=backward, of=partial(evaluate, cell))


def evaluate(cell: str, numbers: Tensors, fl: Arithmetic, *, backward: bool) -> Tensors:
    """h [T, B, 2H] of the upper layer and, with `backward`, dx and dWx, dWh, db, dbh of every layer and direction."""
    lower, upper = (layer(cell, numbers, suffixes, fl) for suffixes in SUFFIXES)
    upper["x"] = evaluate_case(lower | {"x": numbers["x"]}, None, fl)[0]["h"]
    outputs, above = evaluate_case(upper, {"h": numbers["dh"]} if backward else None, fl)
    results = {"h": outputs["h"]}
    if backward:
        _, below = evaluate_case(lower | {"x": numbers["x"]}, {"h": above["x"]}, fl)
        results["dx"] = below["x"]
        for gradients, suffixes in zip((below, above), SUFFIXES, strict=True):
            results |= gradients_by_direction(gradients, suffixes)
    return results


def layer(cell: str, numbers: Tensors, suffixes: tuple[str, str], fl: Arithmetic) -> Tensors:
    """A layer as the oracle takes it, but for x. Of its two biases a GRU keeps the candidate's apart."""
    of_both = {name: [numbers[name + suffix] for suffix in suffixes] for name in ("Wx", "Wh", "b", "bh")}
    b, bh = (np.stack(of_both[name]).astype(np.float64) for name in ("b", "bh"))
    case = {"op": cell, "bidirectional": True, "Wx": np.concatenate(of_both["Wx"]), "Wh": np.stack(of_both["Wh"])}
    if cell == "gru":
        candidate = 2 * bh.shape[1] // 3
        case["bhn"] = bh[:, candidate:].ravel()
        bh = np.concatenate([bh[:, :candidate], 0 * bh[:, candidate:]], axis=1)
    return case | {"b": fl(b + bh).ravel()}


def gradients_by_direction(gradients: Tensors, suffixes: tuple[str, str]) -> Tensors:
    """dWx, dWh, db, dbh of each direction, from a layer's gradients as the oracle gives them."""
    found = {}
    for d, suffix in enumerate(suffixes):
        dWx, db = (np.split(gradients[name], 2)[d] for name in ("Wx", "b"))
        dbh = db
        if "bhn" in gradients:
            dbhn = np.split(gradients["bhn"], 2)[d]
            dbh = np.concatenate([db[: -len(dbhn)], dbhn])
        named = {"dWx": dWx, "dWh": gradients["Wh"][d], "db": db, "dbh": dbh}
        found |= {name + suffix: value for name, value in named.items()}
    return found
