"""The float64 judge of two bidirectional layers, LSTM or GRU, in the form of torch and cuDNN, with two biases each.

Bounds are those of `judge`: every operation is moved by the error that the dtype allows it. A layer and direction is
named as torch names it: "_l0", "_l0_reverse", "_l1", "_l1_reverse".
"""

from __future__ import annotations

import numpy as np

from . import judge
from .judge import Judge, Rounding, Tensors

SUFFIXES = (("_l0", "_l0_reverse"), ("_l1", "_l1_reverse"))


def appoint(cell: str, numbers: Tensors, dtype: str, *, backward: bool) -> Judge:
    """The judge of a stack of this cell, "lstm" or "gru"."""

    def evaluate_stack(numbers: Tensors, fl: Rounding, *, backward: bool) -> Tensors:
        return evaluate(cell, numbers, fl, backward=backward)

    return judge.appoint(numbers, dtype, backward=backward, of=evaluate_stack)


def evaluate(cell: str, numbers: Tensors, fl: Rounding, *, backward: bool) -> Tensors:
    """h [T, B, 2H] of the upper layer and, with `backward`, dx and dWx, dWh, db, dbh of every layer and direction."""
    numbers = {name: array.astype(np.float64) for name, array in numbers.items()}
    forward, gradients_of = LAYERS[cell]
    x, kept = numbers["x"], {}
    for suffixes in SUFFIXES:
        outputs = []
        for suffix in suffixes:
            weights = {name: numbers[name + suffix] for name in ("Wx", "Wh", "b", "bh")}
            kept[suffix] = forward(weights | {"x": in_time(x, suffix)}, fl)
            outputs.append(in_time(kept[suffix]["h"], suffix))
        x = np.concatenate(outputs, axis=-1)
    results, dh = {"h": x}, numbers["dh"]
    if not backward:
        return results
    for suffixes in reversed(SUFFIXES):
        dx = 0.0
        for suffix, part in zip(suffixes, np.split(dh, 2, axis=-1), strict=True):
            gradients = gradients_of(kept[suffix] | {"dh": in_time(part, suffix)}, fl)
            dx = fl.move(dx + in_time(gradients.pop("dx"), suffix), 0.0)
            results |= {name + suffix: value for name, value in gradients.items()}
        dh = dx
    return results | {"dx": dh}


def in_time(sequence: np.ndarray, suffix: str) -> np.ndarray:
    """The sequence as the direction sees it, or back."""
    return sequence[::-1] if suffix.endswith("_reverse") else sequence


def before_each_step(h: np.ndarray) -> np.ndarray:
    """h of the step before, from zeros."""
    return np.concatenate([np.zeros_like(h[:1]), h[:-1]])


def products_after_sweep(kept: Tensors, da: np.ndarray, da_h: np.ndarray, fl: Rounding) -> Tensors:
    """The gradients of x, weights and biases from those of the two parts of the preactivations."""
    x, ones = kept["x"], np.ones((*kept["x"].shape[:2], 1))
    return {
        "dx": fl.dot(da.reshape(-1, da.shape[-1]), kept["Wx"]).reshape(x.shape),
        "dWx": judge.sum_of_products(da, x, fl),
        "dWh": judge.sum_of_products(da_h, before_each_step(kept["h"]), fl),
        "db": judge.sum_of_products(da, ones, fl)[:, 0],
        "dbh": judge.sum_of_products(da_h, ones, fl)[:, 0],
    }


# --- LSTM: that of `judge` with b + bh as its bias -------------------------------------------------------------------


def lstm_forward(numbers: Tensors, fl: Rounding) -> Tensors:
    """h, c, gates beside the numbers."""
    h, c, gates = judge.forward(numbers | {"b": fl.move(numbers["b"] + numbers["bh"], 0.0)}, fl)
    return numbers | {"h": h, "c": c, "gates": gates}


def lstm_gradients(kept: Tensors, fl: Rounding) -> Tensors:
    """dx, dWx, dWh, db, dbh."""
    dz = judge.sweep_backward(kept, kept["c"], kept["gates"], fl)
    return products_after_sweep(kept, dz, dz, fl)


# --- GRU: gates r, z, n; the reset gate multiplies the recurrent product ---------------------------------------------


def gru_forward(numbers: Tensors, fl: Rounding) -> Tensors:
    """h, the gates r, z, n, and the recurrent part q of n's preactivation, beside the numbers."""
    x, Wx, Wh, b, bh = (numbers[name] for name in ("x", "Wx", "Wh", "b", "bh"))
    T, B, H = *x.shape[:2], Wh.shape[1]
    a = fl.move(fl.dot(x.reshape(T * B, -1), Wx.T).reshape(T, B, -1) + b, 0.0)
    r, z, n, q, h = (np.zeros((T + 1, B, H)) for _ in range(5))
    for t in range(T):
        fl.start_step()
        product = fl.move(fl.dot(h[t - 1], Wh.T) + bh, 0.0)
        for gate, block in ((r, 0), (z, 1)):
            part = slice(block * H, (block + 1) * H)
            gate[t] = fl.move(0.5 + 0.5 * np.tanh(0.5 * fl.move(a[t][:, part] + product[:, part], 0.0)), 8 * fl.v)
        q[t] = product[:, 2 * H :]
        n[t] = fl.move(np.tanh(fl.move(a[t][:, 2 * H :] + r[t] * q[t], fl.u * np.abs(r[t] * q[t]))), 8 * fl.v)
        terms = np.abs(z[t] * h[t - 1]) + (1 + z[t]) * np.abs(n[t])
        h[t] = fl.move(z[t] * h[t - 1] + (1 - z[t]) * n[t], fl.u * terms)
    # Row T, still zero, stood in for t = -1.
    kept = {"r": r, "z": z, "n": n, "q": q, "h": h}
    return numbers | {name: array[:T] for name, array in kept.items()}


def gru_gradients(kept: Tensors, fl: Rounding) -> Tensors:
    """dx, dWx, dWh, db, dbh."""
    Wh, u = kept["Wh"], fl.u
    T, B, H = kept["h"].shape
    h_before = before_each_step(kept["h"])
    da, da_h = np.empty((T, B, 3 * H)), np.empty((T, B, 3 * H))
    dh = np.zeros((B, H))
    for t in reversed(range(T)):
        fl.start_step()
        r, z, n, q, h_prev = (array[t] for array in (kept["r"], kept["z"], kept["n"], kept["q"], h_before))
        dh = fl.move(dh + kept["dh"][t], 0.0)
        # Slopes 1 - y y and y (1 - y) round at 1 and at y: their limits are relative to that, not to the slope.
        dn = fl.move(dh * (1 - z) * (1 - n * n), 4 * u * np.abs(dh))
        dz = fl.move(dh * (h_prev - n) * z * (1 - z), 4 * u * np.abs(dh * z) * (np.abs(h_prev) + np.abs(n)))
        dr = fl.move(dn * q * r * (1 - r), 4 * u * np.abs(dn * q * r))
        da[t] = np.concatenate([dr, dz, dn], axis=-1)
        da_h[t] = np.concatenate([dr, dz, fl.move(dn * r, 0.0)], axis=-1)
        dh = fl.move(dh * z + fl.dot(da_h[t], Wh), u * np.abs(dh * z))
    return products_after_sweep(kept, da, da_h, fl)


LAYERS = {"lstm": (lstm_forward, lstm_gradients), "gru": (gru_forward, gru_gradients)}
