"""What MPSGraph or an app may have returned in place of a documented result, and what it may have done with the
arguments, computed by the float64 oracle. `experiments` and `readings` compare results with these forms.

`fl` is the oracle's arithmetic: fl(value) rounds the result of one operation to a dtype, and fl.load(array) an argument
of the op. readings: what the oracle takes for the points that Apple's documentation leaves open, such as
{"hard_sigmoid": "x/6"}; keywords of `judge.options`.
"""

import numpy as np

from ..lab.mpsgraph.cases import RESULTS, Arrays, CompareCase
from ..lab.mpsgraph.judge import call_of, evaluated, options
from ..oracle.arithmetic import ACTIVATIONS, Rounding
from ..oracle.case import complete, sides
from ..oracle.recurrence import unroll


def predicted(case: CompareCase, fl: Rounding, readings: dict[str, str]) -> Arrays:
    """Return by name the documented results of a case. Return also arrays that MPSGraph or an app may have returned in
    place of a result: "z_state before" or "after" the activations, "c squashed" by the last activation, "z_state
    product" (see `with_product`), the "last" h or c alone, a result of a reverse layer "by step" (in the order of the
    steps), one of two directions "halved" (the second half in the order of its steps)."""
    results = evaluated(case, fl, **readings)
    more = {"z_state before": preactivations(case, fl, **readings)} if case.op != "single_gate_rnn" else {}
    if case.op == "single_gate_rnn":
        more["z_state after"] = results["h"]
    if case.op == "lstm":
        activation = options(case, **readings)["activations"][-1]
        more["c squashed"] = ACTIVATIONS[activation](results["c"], fl)
    # `with_product` needs these two arrays and takes no mask.
    if case.op == "gru" and {"init_state", "secondary_bias"} <= set(case.arrays) and "mask" not in case.arrays:
        more["z_state product"] = with_product(case, fl)
    reverse = case.descriptor.get("reverse", False) and not case.bidirectional
    for name in RESULTS[case.op]:
        value = results[name]
        half = value.shape[-1] // 2
        if reverse:
            more[f"{name} by step"] = value[::-1]
        if case.bidirectional:
            more[f"{name} halved"] = np.concatenate([value[..., :half], value[::-1, :, half:]], axis=-1)
        if name != "z_state":
            ends = value[-1, :, :half], value[0, :, half:]
            more[f"last {name}"] = np.concatenate(ends, -1) if case.bidirectional else value[0 if reverse else -1]
    return results | more


def preactivations(case: CompareCase, fl: Rounding, **readings: str) -> np.ndarray:
    """Return the preactivations of the gates, [T, N, D G H], computed by the oracle. T: steps, N: batch, D:
    directions, G: gates, H: units."""
    parts = []
    for side in sides(call_of(case, **readings)):  # one direction after the other
        p = complete(side, fl)  # the call with defaults for what it leaves out
        _, tape = unroll(p, fl)  # what each step saves for the backward pass; `a`: its preactivations by gate
        parts.append(np.stack([np.concatenate([tape[t].a[gate] for gate in p.gate_order], -1) for t in range(p.T)]))
    return np.concatenate(parts, axis=-1)


def with_product(case: CompareCase, fl: Rounding) -> np.ndarray:
    """Return [T, N, 3H]: the gates z and r, and the recurrent product of the candidate. The case is a GRU without
    mask that resets after the product."""
    results, H = evaluated(case, fl), case.hidden
    arrays = {name: fl.load(array) for name, array in case.arrays.items()}
    before = np.concatenate([arrays["init_state"][None], results["h"][:-1]])
    product = fl(before @ arrays["recurrent_weight"][2 * H :].T + arrays["secondary_bias"])
    return np.concatenate([results["z_state"][..., : 2 * H], product], axis=-1)


def moved(case: CompareCase) -> CompareCase:
    """Return the case with the array state_gradient (the gradient of the last state) added to source_gradient (the
    gradient of h) at the last time step. One interpretation of Apple's documentation adds it there, also if the op
    runs in reverse."""
    arrays = {name: array for name, array in case.arrays.items() if name != "state_gradient"}
    arrays["source_gradient"] = case.arrays["source_gradient"].copy()
    arrays["source_gradient"][-1] += case.arrays["state_gradient"]
    return case._replace(arrays=arrays)


def side_by_side(case: CompareCase) -> CompareCase:
    """Return the case with a mask [2, N, H] of both directions as a mask [N, 2H]."""
    return case._replace(arrays=case.arrays | {"mask": np.concatenate(list(case.arrays["mask"]), axis=-1)})
