"""Compute in float64 the results of two bidirectional layers, LSTM or GRU, with two biases each as in torch and
cuDNN.

The names of arrays end as in torch, to say the layer and direction: "_l0", "_l0_reverse", "_l1", "_l1_reverse".
"""

from functools import partial

import numpy as np

from ....oracle.arithmetic import Rounding, Tensors
from ....oracle.recurrence import evaluate as evaluate_case
from ....oracle.verdict import Judge
from ..judge import judge_layer

SUFFIXES = (("_l0", "_l0_reverse"), ("_l1", "_l1_reverse"))


def judge_stack(cell: str, numbers: Tensors, dtype: str, *, backward: bool) -> Judge:
    """Return a `Judge`, which compares results with float64, for two bidirectional layers of this cell, "lstm" or
    "gru"."""
    return judge_layer(numbers, dtype, backward=backward, evaluate=partial(evaluate, cell))


def evaluate(cell: str, numbers: Tensors, fl: Rounding, *, backward: bool) -> Tensors:
    """Return h [T, B, 2H] of the upper layer and, with `backward`, dx and dWx, dWh, db, dbh by layer and direction."""
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


def layer(cell: str, numbers: Tensors, suffixes: tuple[str, str], fl: Rounding) -> Tensors:
    """Return the arguments for the float64 oracle of one layer, without x. The two biases are added, except the
    recurrent bias of a GRU's candidate, which stays separate."""
    both = {name: [numbers[name + suffix] for suffix in suffixes] for name in ("Wx", "Wh", "b", "bh")}
    b, bh = (np.stack(both[name]).astype(np.float64) for name in ("b", "bh"))
    case = {"op": cell, "bidirectional": True, "Wx": np.concatenate(both["Wx"]), "Wh": np.stack(both["Wh"])}
    if cell == "gru":
        candidate = 2 * bh.shape[1] // 3
        case["bhn"] = bh[:, candidate:].ravel()
        bh = np.concatenate([bh[:, :candidate], 0 * bh[:, candidate:]], axis=1)
    return case | {"b": fl(b + bh).ravel()}


def gradients_by_direction(gradients: Tensors, suffixes: tuple[str, str]) -> Tensors:
    """Return dWx, dWh, db, dbh of each direction by name, from the oracle's gradients of a layer."""
    named = {}
    for d, suffix in enumerate(suffixes):
        dWx, db = (np.split(gradients[name], 2)[d] for name in ("Wx", "b"))
        dbh = db
        if "bhn" in gradients:
            dbhn = np.split(gradients["bhn"], 2)[d]
            dbh = np.concatenate([db[: -len(dbhn)], dbhn])
        values = {"dWx": dWx, "dWh": gradients["Wh"][d], "db": db, "dbh": dbh}
        named |= {name + suffix: value for name, value in values.items()}
    return named
