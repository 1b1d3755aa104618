"""Check results of the benchmark: compute a layer in float64, and a bound for the error of each result.

An implementation may sum the gradient of a weight step by step and store the sum T times. The bounds of the module
`closeness` do not include the rounding of these stores. So this module adds SAFETY u sqrt(T) |sum| to the bound, where
u is the unit roundoff. The factor is sqrt(T), not T, because the rounding errors have different signs.

To save memory, a long sequence is computed in parts of PART steps. Each part passes its last states to the next part,
and the gradients of its first states to the part before.

The bounds come from runs with random errors. These runs take the most time, so they compute the first part only. The
bounds for the whole sequence are derived from the bounds for this part:

- The bounds of h and dx do not depend on the length: with the weights drawn here states decay, so an error disappears
  within some steps.
- The bound of a weight's gradient grows as T sqrt(T). The gradient is a sum over T steps, so the sum of its terms grows
  as T, and the error of the summation is this sum times sqrt(T).
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from ...oracle.arithmetic import Rounding, Tensors
from ...oracle.closeness import SAFETY, exact_and_bounds, float_of, trials_for
from ...oracle.judge import Case
from ...oracle.verdict import Judge, largest, widest

PART = 128


def judge_layer(
    numbers: Tensors, dtype: str, *, backward: bool, evaluate: Callable[..., Tensors] | None = None
) -> Judge:
    """Return a `Judge`, which compares the results of a layer with float64. numbers: the layer's inputs, weights and
    cotangents by name. dtype: the dtype of the results. backward: whether gradients are compared, too. evaluate: a
    function like `evaluate_lstm` that computes the results of another layer; None for an LSTM."""
    T = len(numbers["dh"])
    first = numbers
    if evaluate is None and T > PART:
        first = numbers | {name: numbers[name][:PART] for name in ("x", "dh")}
    values = partial(evaluate or evaluate_lstm, first, backward=backward)
    judge = exact_and_bounds(values, dtype, trials_for(first["dh"].size))  # fewer trials for large, slow arrays
    exact, bounds = judge.exact, widest(judge.bounds)  # widest: one number per result
    if first is not numbers:
        exact = evaluate_in_parts(numbers, backward=backward)
    # The bounds of weights' gradients grow as T sqrt(T) with the length of the sequence. An implementation may store
    # each sum T times, which adds rounding errors of u sqrt(T) |sum|, where u is the unit roundoff.
    stored, growth = float_of(dtype).eps / 2 * np.sqrt(T), (T / len(first["dh"])) ** 1.5
    for name in (name for name in exact if name.startswith(("dW", "db"))):
        bounds[name] = growth * bounds[name] + SAFETY * stored * largest(exact[name])
    return Judge(exact, bounds)


def evaluate_lstm(numbers: Tensors, fl: Rounding, *, backward: bool) -> Tensors:
    """Return the results of an LSTM by name: h, and with `backward` dx, dWx, dWh, db. If `numbers` has first states,
    also hT and cT, and with `backward` dh0 and dc0."""
    call = {name: numbers[name] for name in ("x", "Wx", "Wh", "b", "h0", "c0") if name in numbers}
    cotangents = {name: numbers[f"d{name}"] for name in ("h", "hT", "cT") if backward and f"d{name}" in numbers}
    unwanted = ("c", "gates") if "h0" in numbers else ("c", "gates", "hT", "cT")
    results = Case(call, cotangents).results(fl)
    return {name: array for name, array in results.items() if name not in unwanted}


def evaluate_in_parts(numbers: Tensors, *, backward: bool) -> Tensors:
    """Return what `evaluate_lstm` returns, in float64, computed in parts of PART time steps to save memory. The forward
    pass saves only the states between the parts, and the backward pass computes each part again from them."""
    fl, (T, B, H), weights = Rounding(np.float64), numbers["dh"].shape, {n: numbers[n] for n in ("Wx", "Wh", "b")}
    states, results = dict.fromkeys(("h0", "c0"), np.zeros((B, H))), {"h": np.empty((T, B, H))}
    parts = []
    for start in range(0, T, PART):
        steps = slice(start, start + PART)
        part = weights | states | {name: numbers[name][steps] for name in ("x", "dh")}
        parts.append((steps, part))
        outputs = evaluate_lstm(part, fl, backward=False)
        results["h"][steps] = outputs["h"]
        states = {"h0": outputs["hT"], "c0": outputs["cT"]}
    if not backward:
        return results
    results |= {f"d{name}": np.zeros(numbers[name].shape) for name in ("x", "Wx", "Wh", "b")}
    cotangents: Tensors = {}  # of a part's last states: the gradients of the next part's first states
    for steps, part in reversed(parts):
        gradients = evaluate_lstm(part | cotangents, fl, backward=True)
        cotangents = {"dhT": gradients["dh0"], "dcT": gradients["dc0"]}
        results["dx"][steps] = gradients["dx"]
        for name in ("dWx", "dWh", "db"):
            results[name] += gradients[name]
    return results
