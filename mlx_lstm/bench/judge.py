"""Whether results may be compared at all: each against a plain float64 LSTM, within a bound derived from the numbers.

The bound is how far a right implementation may be off. Every operation has a known error limit in the dtype; what the
limits do to the results is sampled: the float64 LSTM is evaluated again with each result moved up or down by a random
half to whole of its limit (the CESTAC method). A bound from absolute values alone would grow exponentially in T.
With u the unit roundoff of the dtype and v that of float32 (the accumulator of half types):

    storing, + - *       u |result|
    activation           4 ulp of 1 = 8 v, then stored: a sigmoid written as 0.5 + 0.5 tanh rounds at 1
    dot of K terms       v sqrt(K) |row| |column|, in any order; |row| |column| >= sum of |terms| (Cauchy-Schwarz)

The largest move over the trials is about twice the root of the sum of squares of all contributions; SAFETY times it
leaves room for an order of summation that is against us throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SUBNORMAL = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
SAFETY = 4
CHUNKS = 8  # the sums over time are moved this many times on the way

Tensors = dict[str, np.ndarray]


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
    of = of or evaluate
    exact = of(numbers, Rounding(), backward=backward)
    moved = dict.fromkeys(exact, 0.0)
    for trial in range(8 if exact["h"].size < 100_000 else 2):
        rounding = Rounding(dtype, seed=trial, systematic=trial % 2 == 1)
        for name, value in of(numbers, rounding, backward=backward).items():
            moved[name] = max(moved[name], largest(value - exact[name]))
    return Judge(exact, {name: SAFETY * moved[name] + 2 * UNIT[dtype] * largest(exact[name]) for name in exact})


def largest(array: np.ndarray) -> float:
    """Max norm."""
    return float(np.abs(array).max())


class Rounding:
    """Moves float64 results by a random part of the error that a dtype allows them; without a dtype leaves them."""

    def __init__(self, dtype: str | None = None, seed: int = 0, systematic: bool = False):
        self.u = UNIT[dtype] if dtype else 0.0
        self.v = min(self.u, UNIT["float32"])
        self.tiny = SUBNORMAL[dtype] if dtype else 0.0
        self.seed, self.systematic = seed, systematic
        self.rng = np.random.default_rng(seed)

    def start_step(self) -> None:
        """A systematic error makes the same moves at every step, as an activation's bias would."""
        if self.systematic:
            self.rng = np.random.default_rng(self.seed)

    def move(self, value: np.ndarray, limit: np.ndarray | float) -> np.ndarray:
        """`value` off by a random half to whole of `limit`, and as it is stored."""
        if not self.u:
            return value
        part = self.rng.random(value.shape, np.float32) - np.float32(0.5)
        part += np.copysign(np.float32(0.5), part)
        return value + part * (limit + self.u * np.abs(value) + self.tiny)

    def dot_limit(self, a: np.ndarray, b: np.ndarray) -> np.ndarray | float:
        """The limit of a [m, K] @ b [K, n]."""
        if not self.u:
            return 0.0
        norms = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)
        return self.v * np.sqrt(a.shape[1]) * norms

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a [m, K] @ b [K, n]."""
        return self.move(a @ b, self.dot_limit(a, b))


def evaluate(numbers: Tensors, fl: Rounding, *, backward: bool) -> Tensors:
    """The LSTM of `numbers` from zero states: h and, with `backward`, dx, dWx, dWh, db."""
    numbers = {name: array.astype(np.float64) for name, array in numbers.items()}
    h, c, gates = forward(numbers, fl)
    if not backward:
        return {"h": h}
    x, Wx = numbers["x"], numbers["Wx"]
    dz = sweep_backward(numbers, c, gates, fl)
    h_prev = np.concatenate([np.zeros_like(h[:1]), h[:-1]])
    ones = np.ones((*x.shape[:2], 1))
    return {
        "h": h,
        "dx": fl.dot(dz.reshape(-1, dz.shape[-1]), Wx).reshape(x.shape),
        "dWx": sum_of_products(dz, x, fl),
        "dWh": sum_of_products(dz, h_prev, fl),
        "db": sum_of_products(dz, ones, fl)[:, 0],
    }


def forward(numbers: Tensors, fl: Rounding) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """h and c [T, B, H], gates [T, B, 4H]."""
    x, Wx, Wh, b = (numbers[name] for name in ("x", "Wx", "Wh", "b"))
    T, B, H = *x.shape[:2], Wh.shape[1]
    z = fl.dot(x.reshape(T * B, -1), Wx.T).reshape(T, B, -1)
    z = fl.move(z + b, 0.0)
    h, c, gates = (np.zeros((T + 1, B, width)) for width in (H, H, 4 * H))
    for t in range(T):
        fl.start_step()
        a = fl.move(z[t] + h[t - 1] @ Wh.T, fl.dot_limit(h[t - 1], Wh.T))
        y = fl.move(np.where(candidate(H), np.tanh(a), 0.5 + 0.5 * np.tanh(0.5 * a)), 8 * fl.v)
        i, f, g, o = np.split(y, 4, axis=-1)
        c[t] = fl.move(f * c[t - 1] + i * g, fl.u * (np.abs(f * c[t - 1]) + np.abs(i * g)))
        h[t] = fl.move(o * np.tanh(c[t]), (8 * fl.v + fl.u) * np.abs(o))
        gates[t] = y
    # Row T, still zero, stood in for t = -1.
    return h[:T], c[:T], gates[:T]


def candidate(H: int) -> np.ndarray:
    """Which entries of [4H] belong to g, the gate with tanh."""
    return np.repeat([False, False, True, False], H)


def sweep_backward(numbers: Tensors, c: np.ndarray, gates: np.ndarray, fl: Rounding) -> np.ndarray:
    """dz [T, B, 4H]: the gradient of the preactivations."""
    Wh, u = numbers["Wh"], fl.u
    T, B, H = c.shape
    dz = np.empty(gates.shape)
    dh, dc = np.zeros((B, H)), np.zeros((B, H))
    for t in reversed(range(T)):
        fl.start_step()
        i, f, g, o = np.split(gates[t], 4, axis=-1)
        c_prev = c[t - 1] if t else np.zeros((B, H))
        s = fl.move(np.tanh(c[t]), 8 * fl.v)
        dh = fl.move(dh + numbers["dh"][t], 0.0)
        # Slopes 1 - y y and y (1 - y) round at 1 and at y: their limits are relative to that, not to the slope.
        dc = fl.move(dc + dh * o * (1 - s * s), u * (np.abs(dc) + 4 * np.abs(dh * o)))
        exact = [dc * g * i * (1 - i), dc * c_prev * f * (1 - f), dc * i * (1 - g * g), dh * s * o * (1 - o)]
        limits = [np.abs(dc * g * i), np.abs(dc * c_prev * f), np.abs(dc * i), np.abs(dh * s * o)]
        dz[t] = fl.move(np.concatenate(exact, axis=-1), 4 * u * np.concatenate(limits, axis=-1))
        dc = fl.move(dc * f, 0.0)
        dh = fl.dot(dz[t], Wh)
    return dz


def sum_of_products(dz: np.ndarray, rows: np.ndarray, fl: Rounding) -> np.ndarray:
    """The sum over t of dz[t]^T rows[t], moved on the way: it may be added term by term, or stored at every step."""
    total = np.zeros((dz.shape[-1], rows.shape[-1]))
    for steps in reversed(np.array_split(np.arange(len(dz)), min(CHUNKS, len(dz)))):
        a, b = (array[steps].reshape(-1, array.shape[-1]) for array in (dz, rows))
        total = total + a.T @ b
        limit = fl.dot_limit(a.T, b) + (fl.v * np.sqrt(len(a)) + fl.u * np.sqrt(len(steps))) * np.abs(total)
        total = fl.move(total, limit)
    return total
