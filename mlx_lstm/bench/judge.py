"""Whether results may be compared at all: each against the float64 oracle, within a bound of `closeness`.

A contender may add a gradient of weights up in its own way, time step by time step, and store the sum each time. That
is not among the operations of `closeness`: a sum stored T times adds u sqrt(T) |sum| to its bound, roundings not being
all of one sign.

Of a long sequence the exact results come in parts of PART steps, with the states and their gradients handed on, so that
the judge holds little besides the results. What costs most, the runs with errors, has the first PART steps only, and
the bounds follow from theirs: an error of h or dx is forgotten within some steps, as the weights drawn here forget, so
it is as large at any length. To a gradient of weights, a sum over T, every step adds its own error; that of a product's
summation is sqrt(T) times the sum of its terms: so such a bound grows as T sqrt(T).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from ..oracle import evaluate as evaluate_case
from ..oracle.arithmetic import Arithmetic, Tensors
from ..oracle.closeness import SAFETY, TRIALS, exact_and_bounds, float_of, largest

SMALL = 100_000  # elements of h: of more than these a maximum is well sampled in FEW trials
FEW = 2
PART = 128


class Verdict(NamedTuple):
    """The tensor closest to its bound, or furthest beyond it; its error, the bound; "" if the contender agrees."""

    tensor: str
    error: float
    bound: float
    refusal: str = ""


class Judge(NamedTuple):
    """The float64 results of a problem, and the bound on the max-norm error of each."""

    exact: Tensors
    bounds: dict[str, float]

    def judge(self, got: Tensors, names: Iterable[str]) -> Verdict:
        """Compare one contender's tensors of these names; a missing one is a refusal."""
        verdicts = [self.judge_tensor(name, got.get(name)) for name in names]
        refused = [verdict for verdict in verdicts if verdict.refusal]
        return max(refused or verdicts, key=lambda verdict: verdict.error / verdict.bound)

    def judge_tensor(self, name: str, got: np.ndarray | None) -> Verdict:
        """Compare one tensor. NaN, another shape, or a bound that would accept zeros, is a refusal."""
        exact, bound = self.exact[name], self.bounds[name]
        if got is None or got.shape != exact.shape:
            shape = None if got is None else list(got.shape)
            return Verdict(name, np.inf, bound, f"{name}: shape {shape}, expected {list(exact.shape)}")
        error = np.abs(got - exact).max()
        error = float(error) if np.isfinite(error) else np.inf
        if not error <= bound:
            return Verdict(name, error, bound, f"{name}: error {error:.3g} > bound {bound:.3g}")
        if not bound < largest(exact):
            return Verdict(name, error, bound, f"{name}: bound {bound:.3g} would accept zeros, so nothing is shown")
        return Verdict(name, error, bound)


def appoint(numbers: Tensors, dtype: str, *, backward: bool, of: Callable[..., Tensors] | None = None) -> Judge:
    """The judge of a problem: evaluates it exactly, and a few times with errors. `of` does if it is not an LSTM."""
    T, part = len(numbers["dh"]), numbers
    if of is None and T > PART:
        part = numbers | {name: numbers[name][:PART] for name in ("x", "dh")}
    trials = TRIALS if part["dh"].size < SMALL else FEW
    exact, bounds = exact_and_bounds(partial(of or evaluate, part, backward=backward), dtype, trials)
    if part is not numbers:
        exact = in_parts(numbers, backward=backward)
    stored, growth = float_of(dtype).eps / 2 * np.sqrt(T), (T / len(part["dh"])) ** 1.5
    for name in (name for name in exact if name.startswith(("dW", "db"))):
        bounds[name] = growth * bounds[name] + SAFETY * stored * largest(exact[name])
    return Judge(exact, bounds)


def evaluate(numbers: Tensors, fl: Arithmetic, *, backward: bool) -> Tensors:
    """The LSTM of `numbers`, from zero states unless there are some: h, with `backward` also dx, dWx, dWh, db and, of
    states given, dh0, dc0."""
    case = {name: numbers[name] for name in ("x", "Wx", "Wh", "b", "h0", "c0") if name in numbers}
    cotangents = {name: numbers[f"d{name}"] for name in ("h", "hT", "cT") if f"d{name}" in numbers}
    outputs, gradients = evaluate_case(case, cotangents if backward else None, fl)
    last = {name: outputs[name] for name in ("hT", "cT") if "h0" in numbers}
    return {"h": outputs["h"]} | last | {f"d{name}": gradient for name, gradient in gradients.items()}


def in_parts(numbers: Tensors, *, backward: bool) -> Tensors:
    """`evaluate` in float64, PART steps at a time: forward, and back with the states that each part started from."""
    fl, (T, B, H), weights = Arithmetic(np.float64), numbers["dh"].shape, {n: numbers[n] for n in ("Wx", "Wh", "b")}
    states, found = dict.fromkeys(("h0", "c0"), np.zeros((B, H))), {"h": np.empty((T, B, H))}
    parts = []
    for start in range(0, T, PART):
        part = weights | states | {name: numbers[name][start : start + PART] for name in ("x", "dh")}
        parts.append((slice(start, start + PART), part))
        results = evaluate(part, fl, backward=False)
        found["h"][parts[-1][0]] = results["h"]
        states = {"h0": results["hT"], "c0": results["cT"]}
    if not backward:
        return found
    found |= {f"d{name}": np.zeros(numbers[name].shape) for name in ("x", "Wx", "Wh", "b")}
    after: Tensors = {}
    for steps, part in reversed(parts):
        results = evaluate(part | after, fl, backward=True)
        after = {"dhT": results["dh0"], "dcT": results["dc0"]}
        found["dx"][steps] = results["dx"]
        for name in ("dWx", "dWh", "db"):
            found[name] += results[name]
    return found
