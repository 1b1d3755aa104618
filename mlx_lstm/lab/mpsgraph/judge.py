"""Compute the exact results of a case (a call of an op) with the float64 oracle.

fl is the arithmetic of the oracle: fl(value) rounds the result of one operation to a dtype, or adds a random error.
readings are keywords of `options`: they say how to interpret points that Apple's documentation leaves open, for example
`hard_sigmoid="x/6"`.
"""

from typing import Any

import numpy as np

from ...oracle import kink_distance as distance
from ...oracle.arithmetic import Rounding
from ...oracle.judge import Case
from .cases import ACTIVATION_PROPERTIES, Arrays, CompareCase, through_layers

WORDS = {"source": "x", "recurrent_weight": "Wh", "input_weight": "Wx", "bias": "b", "init_state": "h0"}
WORDS |= {"init_cell": "c0", "peephole": "peephole", "mask": "mask", "secondary_bias": "bhn"}
"""The oracle's name for each argument of MPSGraph. For two directions, the oracle and MPSGraph use the same layouts."""

OUTPUTS = {"h": "h", "c": "c", "z_state": "gates"}  # the oracle's name for each result of MPSGraph
# For each cotangent of MPSGraph the oracle's name of the result to which it belongs.
COTANGENTS = {"source_gradient": "h", "state_gradient": "hT", "cell_gradient": "cT"}
HARD_SIGMOIDS = {"x/5": "hard_sigmoid", "x/6": "hard_sigmoid_sixth"}  # the oracle's name by slope


def expected(case: CompareCase, **readings: str) -> Arrays:
    """Return all results of a case in float64, by name, in MPSGraph's layouts. readings: answers to questions that
    Apple's documentation leaves open, as keywords of `options`."""
    return evaluated(case, Rounding(np.float64), **readings)


def evaluated(case: CompareCase, fl: Rounding, **readings: str) -> Arrays:
    """Return all results of a case (a call of an op with its arrays), computed by the float64 oracle in the arithmetic
    `fl`, which rounds the result of each operation. readings: answers to questions that Apple's documentation leaves
    open, as keywords of `options`."""
    return through_layers(case, lambda layer: of_layer(layer, fl, **readings))


def of_layer(case: CompareCase, fl: Rounding, **readings: str) -> Arrays:
    """Return the results of a case with one layer, computed like those of `evaluated`."""
    cotangents = {COTANGENTS[name]: array for name, array in case.arrays.items() if name in COTANGENTS}
    found = Case(call_of(case, **readings), cotangents).results(fl)
    results = {name: found[word] for name, word in OUTPUTS.items() if word in found}
    return results | {f"d{name}": found[f"d{WORDS[name]}"] for name in case.gradients}


def kink_distance(case: CompareCase, **readings: str) -> float:
    """Return the smallest distance of an argument of relu or hard_sigmoid in a case from a kink. At a kink the slope
    jumps, so near it a rounding error can change gradients by much."""
    return distance(**call_of(case, **readings))


def call_of(case: CompareCase, **readings: str) -> dict[str, Any]:
    """Return a case as keyword arguments of the float64 oracle. readings: answers to questions that Apple's
    documentation leaves open, as keywords of `options`."""
    arrays = {WORDS[name]: array for name, array in case.arrays.items() if name in WORDS}
    bidirectional, reverse = case.bidirectional, case.descriptor.get("reverse", False)
    directions = {"bidirectional": bidirectional, "reverse": reverse and not bidirectional}
    return arrays | directions | options(case, **readings)


def options(
    case: CompareCase, *, output_peephole: str = "previous", hard_sigmoid: str = "x/5", gate_order: str = ""
) -> dict[str, Any]:
    """Convert the descriptor of a case to options of the float64 oracle. The keywords interpret three points that
    Apple's documentation leaves open. output_peephole: the cell state that gate o reads, "previous" or "current".
    hard_sigmoid: its slope, "x/5" or "x/6". gate_order: the gate order of an LSTM, or "" for the documented one."""
    descriptor, words = case.descriptor, {"none": "identity", "hard_sigmoid": HARD_SIGMOIDS[hard_sigmoid]}
    # named: the oracle's name for the activation in each property of the descriptor.
    chosen = {name: descriptor.get(name, default) for name, default in ACTIVATION_PROPERTIES[case.op].items()}
    named = {name: words.get(word, word) for name, word in chosen.items()}
    if case.op == "lstm":  # the properties are in the order of the oracle: i, f, g, o, output
        order = gate_order or ("igfo" if descriptor.get("forget_gate_last") else "ifgo")
        of_lstm = {"gate_order": order, "output_peephole": output_peephole}
        return {"op": "lstm", "activations": tuple(named.values())} | of_lstm
    if case.op == "gru":
        z, r, n = named.values()
        return {
            "op": "gru",
            "gate_order": "rzn" if descriptor.get("reset_gate_first") else "zrn",
            "activations": (r, z, n),
            "reset": "after" if descriptor.get("reset_after") else "before",
            "flip_z": descriptor.get("flip_z", False),
        }
    return {"op": "rnn"} | named
