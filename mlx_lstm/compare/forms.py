"""Compute, with the float64 oracle, what MPSGraph or an app may have returned instead of a documented result (another
form of the result), and what it may have done with the arguments. `experiments` and `readings` compare results with
these forms.

`fl` is the oracle's arithmetic: fl(value) rounds the result of one operation to a dtype, and fl.load(array) rounds an
argument of the op. readings are keywords of `judge.options`: the oracle's choices for points that Apple's documentation
leaves open, such as {"hard_sigmoid": "x/6"}.
"""

import numpy as np

from ..lab.mpsgraph.cases import RESULTS, Arrays, CompareCase
from ..lab.mpsgraph.judge import call_of, evaluated, options
from ..oracle.arithmetic import ACTIVATIONS, Rounding
from ..oracle.case import complete, sides
from ..oracle.recurrence import unroll


def predicted(case: CompareCase, fl: Rounding, readings: dict[str, str]) -> Arrays:
    """Return the documented results of a case (a call of an MPSGraph op) by name. Also return other arrays that
    MPSGraph may have returned, or an app may have saved, in place of a documented result:

    - "z_state before": the gates of an LSTM or a GRU before their activations;
    - "z_state after": the gate of a single-gate RNN after its activation;
    - "z_state product": the gates z and r of a GRU, and the candidate's recurrent product, which r multiplies;
    - "c squashed": c of an LSTM after the last activation, whose result the output gate multiplies;
    - "last h", "last c": only the last step of each direction;
    - "h by step" and so on: a result of a reverse layer, in the order from step T - 1 down to step 0;
    - "h halved" and so on: a result of two directions, whose second half, the reverse direction, is in the order from
      step T - 1 down to step 0.

    fl: the arithmetic, which says how results are rounded. readings: the interpretation of each point that Apple's
    documentation leaves open, such as {"hard_sigmoid": "x/6"}.
    """
    results = evaluated(case, fl, **readings)
    more = {"z_state before": preactivations(case, fl, **readings)} if case.op != "single_gate_rnn" else {}
    if case.op == "single_gate_rnn":
        more["z_state after"] = results["h"]
    if case.op == "lstm":
        activation = options(case, **readings)["activations"][-1]
        more["c squashed"] = ACTIVATIONS[activation](results["c"], fl)
    # `with_product` needs the arrays init_state and secondary_bias, and takes no mask.
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
    """Return the preactivations of all gates, [T, N, D G H], computed by the float64 oracle, for T steps, N batch
    items, D directions, G gates and H units."""
    parts = []
    for side in sides(call_of(case, **readings)):  # one direction after the other
        p = complete(side, fl)  # the call, with defaults for missing arguments
        _, tape = unroll(p, fl)  # tape[t]: the values saved in step t; its field `a`: the preactivations by gate
        parts.append(np.stack([np.concatenate([tape[t].a[gate] for gate in p.gate_order], -1) for t in range(p.T)]))
    return np.concatenate(parts, axis=-1)


def with_product(case: CompareCase, fl: Rounding) -> np.ndarray:
    """Return an array [T, N, 3H] with the gates z and r, and the recurrent product of the candidate, which r
    multiplies. The case must be a GRU with reset_after and without a mask."""
    results, H = evaluated(case, fl), case.hidden
    arrays = {name: fl.load(array) for name, array in case.arrays.items()}
    before = np.concatenate([arrays["init_state"][None], results["h"][:-1]])
    product = fl(before @ arrays["recurrent_weight"][2 * H :].T + arrays["secondary_bias"])
    return np.concatenate([results["z_state"][..., : 2 * H], product], axis=-1)


def moved(case: CompareCase) -> CompareCase:
    """Return the case with state_gradient (of the last state) added to source_gradient (of h) at step T - 1: in one
    interpretation of Apple's documentation it is added there even if the op ends at step 0."""
    arrays = {name: array for name, array in case.arrays.items() if name != "state_gradient"}
    arrays["source_gradient"] = case.arrays["source_gradient"].copy()
    arrays["source_gradient"][-1] += case.arrays["state_gradient"]
    return case._replace(arrays=arrays)


def side_by_side(case: CompareCase) -> CompareCase:
    """Return the case with its mask [2, N, H], one block per direction, converted to a mask [N, 2H]."""
    return case._replace(arrays=case.arrays | {"mask": np.concatenate(list(case.arrays["mask"]), axis=-1)})
