"""The cells in plain MLX, one step forward and one back: the one place where their equations stand in Python."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from ..cells import HARD_SIGMOIDS, GRUCell, LSTMCell, RNNCell, known
from ..problem import Array


class StepGradients(NamedTuple):
    """What one step back finds: dz [B, GH], the gradient of the preactivations' input part; dh [B, P] of the h that
    entered the recurrent product, after the mask; dc [B, H] of c_prev; direct [B, H], what reaches h_prev past it."""

    dz: Array
    dh: Array
    dc: Array | None = None
    direct: Array | None = None


def activate(name: str, x: Array) -> Array:
    """One of `cells.ACTIVATIONS`."""
    return known("ops", ACTIVATIONS, name)[0](x)


def slope(name: str, y: Array) -> Array:
    """An activation's derivative, written in its output y."""
    return known("ops", ACTIVATIONS, name)[1](y)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), to the digits of the dtype."""
    return double_sigmoid(x) if x.dtype == mx.float64 else mx.sigmoid(x)


def double_sigmoid(x: Array) -> Array:
    """The sigmoid of a float64 array. MLX 0.32.4 computes it, and exp, to float32's digits, but not cosh and sinh."""
    negative = x < 0
    # Not mx.abs, whose derivative at 0 is 0. Beyond 709 cosh overflows and exp(-x) leaves the normal numbers.
    size = mx.minimum(mx.where(negative, -x, x), 709)
    small = mx.where(size >= 709, 0, 1 / (1 + mx.cosh(size) + mx.sinh(size)))  # NaN stays
    return mx.where(negative, small, 1 - small)


def hard_sigmoid(rise: float, x: Array) -> Array:
    """clip(rise x + 0.5, 0, 1)."""
    return mx.clip(constant(rise, x) * x + 0.5, 0, 1)


def hard_sigmoid_slope(rise: float, y: Array) -> Array:
    """Its derivative from its output."""
    return constant(rise, y) * ((y > 0) & (y < 1)).astype(y.dtype)


ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "identity": (lambda x: x, mx.ones_like),
    "relu": (lambda x: mx.maximum(x, 0), lambda y: (y > 0).astype(y.dtype)),
    "tanh": (mx.tanh, lambda y: 1 - y * y),
    "sigmoid": (sigmoid, lambda y: y * (1 - y)),
    **{name: (partial(hard_sigmoid, rise), partial(hard_sigmoid_slope, rise)) for name, rise in HARD_SIGMOIDS.items()},
}
"""Each activation and its derivative, written in its output."""

UNBOUNDED = ("identity", "relu")
"""Activations whose output may be infinite."""


def constant(value: float, like: Array) -> Array:
    """A scalar in the dtype of `like`: beside a float64 array MLX 0.32.0 rounds a Python float to float32."""
    return mx.array(value, like.dtype)


def clip_straight_through(c: Array, limit: float) -> Array:
    """clip(c, -limit, limit) whose gradient is that of c, as TensorFlow's block ops have it; 0 where c is infinite."""
    bound = constant(limit, c)
    nothing = mx.where(mx.isinf(c), 0, c - mx.stop_gradient(c))  # infinity less itself is NaN
    return mx.stop_gradient(mx.clip(c, -bound, bound)) + nothing


def by_gate(cell: LSTMCell | GRUCell, array: Array | None) -> dict[str, Array]:
    """The gates' parts of an array that has all of them side by side; nothing where there is none."""
    return {} if array is None else dict(zip(cell.gate_order, mx.split(array, cell.gates, axis=-1), strict=True))


def lstm_step(cell: LSTMCell, a: Array, c_prev: Array, peephole: Array | None) -> tuple[Array, Array, Array]:
    """One step: preactivations a [B, 4H] and c_prev [B, H] to (gates [B, 4H], c [B, H], m [B, H]).

    i = s_i(a_i + p_i c_prev)   f = s_f(a_f + forget_bias + p_f c_prev)   g = s_g(a_g + p_g c_prev)
    c = f c_prev + i g, clipped                  o = s_o(a_o + p_o c)  or  s_o(a_o + p_o c_prev)
    m = o s_output(c)
    """
    z, p, y = by_gate(cell, a), by_gate(cell, peephole), {}
    if cell.forget_bias:
        z["f"] = z["f"] + constant(cell.forget_bias, z["f"])
    current = "o" if cell.output_peephole == "current" else ""
    for gate in "ifgo":
        if p and gate != current:
            z[gate] = z[gate] + p[gate] * c_prev
    for gate in "ifg":
        y[gate] = activate(cell.activation(gate), z[gate])
    c = y["f"] * c_prev + y["i"] * y["g"]
    if cell.cell_clip is not None:
        c = clip_straight_through(c, cell.cell_clip)
    if p and current:
        z["o"] = z["o"] + p["o"] * c
    y["o"] = activate(cell.activation("o"), z["o"])
    m = y["o"] * activate(cell.activation("output"), c)
    return mx.concatenate([y[gate] for gate in cell.gate_order], axis=-1), c, m


def lstm_step_backward(
    cell: LSTMCell,
    gates: Array,
    c_prev: Array,
    c: Array,
    peephole: Array | None,
    dm: Array,
    dc: Array,
    dgates: Array | None,
) -> tuple[Array, Array]:
    """One step back: the gradients of m, c and (where given) the gates to (dz [B, 4H], dc_prev [B, H]).

    dz is the gradient of the preactivations. The clip passes gradients straight through.
    """
    y, p, dy = by_gate(cell, gates), by_gate(cell, peephole), by_gate(cell, dgates)

    def through(gate: str, gradient: Array) -> Array:
        return (gradient + dy[gate] if dy else gradient) * slope(cell.activation(gate), y[gate])

    output = cell.activation("output")
    s = activate(output, c)
    dz = {"o": through("o", dm * s)}
    dc = dc + dm * y["o"] * slope(output, s)
    if p and cell.output_peephole == "current":
        dc = dc + dz["o"] * p["o"]
    dz["i"] = through("i", dc * y["g"])
    dz["f"] = through("f", dc * c_prev)
    dz["g"] = through("g", dc * y["i"])
    dc = dc * y["f"]
    for gate in "ifgo" if p and cell.output_peephole == "previous" else "ifg" if p else "":
        dc = dc + dz[gate] * p[gate]
    return mx.concatenate([dz[gate] for gate in cell.gate_order], axis=-1), dc


def gru_step(cell: GRUCell, a: Array, h_in: Array, h: Array, Wh: Array, bhn: Array | None) -> tuple[Array, Array]:
    """One step: the input's part a [B, 3H], the masked h_in and h itself [B, H] to (gates [B, 3H], h [B, H]).

    r = s_r(a_r + h_in Wh_r^T)   z = s_z(a_z + h_in Wh_z^T)
    n = s_n(a_n + r (h_in Wh_n^T + bhn))  or, with reset "before",  s_n(a_n + (r h_in) Wh_n^T)
    h = z h + (1 - z) n,  or with flip_z  (1 - z) h + z n
    """
    z, y, H = by_gate(cell, a), {}, h.shape[-1]
    for gate in "rz":
        y[gate] = activate(cell.activation(gate), z[gate] + h_in @ Wh[cell.block(gate, H)].T)
    Wh_n = Wh[cell.block("n", H)]
    after = cell.reset == "after"
    recurrent = y["r"] * gru_candidate(h_in, Wh_n, bhn) if after else (y["r"] * h_in) @ Wh_n.T
    n = y["n"] = activate(cell.activation("n"), z["n"] + recurrent)
    old, new = (n, h) if cell.flip_z else (h, n)
    h_new = new + y["z"] * (old - new)
    if cell.activation("n") in UNBOUNDED:  # of an infinite n the form above makes inf - inf
        h_new = mx.where(mx.isinf(n), y["z"] * old + (1 - y["z"]) * new, h_new)
    return mx.concatenate([y[gate] for gate in cell.gate_order], axis=-1), h_new


def gru_candidate(h_in: Array, Wh_n: Array, bhn: Array | None) -> Array:
    """h_in Wh_n^T + bhn: what r multiplies where the reset comes after the product."""
    return h_in @ Wh_n.T if bhn is None else h_in @ Wh_n.T + bhn


def gru_step_backward(
    cell: GRUCell, gates: Array, h_in: Array, h: Array, Wh: Array, q: Array | None, dh: Array, dgates: Array | None
) -> StepGradients:
    """One step back: the gradients of the new h and (where given) of the gates to those of a step.

    h_in and h are what the step started from; q is `gru_candidate` where the reset comes after the product.
    """
    y, dy = by_gate(cell, gates), by_gate(cell, dgates)
    W = {gate: Wh[cell.block(gate, h.shape[-1])] for gate in "rzn"}

    def through(gate: str, gradient: Array) -> Array:
        return (gradient + dy[gate] if dy else gradient) * slope(cell.activation(gate), y[gate])

    z, n, r = y["z"], y["n"], y["r"]
    dz = {"z": through("z", dh * (n - h) if cell.flip_z else dh * (h - n))}
    dz["n"] = through("n", dh * z if cell.flip_z else dh * (1 - z))
    direct = dh * (1 - z) if cell.flip_z else dh * z
    if q is not None:
        dz["r"] = through("r", dz["n"] * q)
        dh_in = (dz["n"] * r) @ W["n"]
    else:
        reset = dz["n"] @ W["n"]
        dz["r"] = through("r", reset * h_in)
        dh_in = reset * r
    dh_in = dh_in + dz["r"] @ W["r"] + dz["z"] @ W["z"]
    return StepGradients(mx.concatenate([dz[gate] for gate in cell.gate_order], axis=-1), dh_in, direct=direct)


def rnn_step(cell: RNNCell, a: Array, h_in: Array, Wh: Array) -> tuple[Array, Array]:
    """One step: the input's part a and the masked h_in, both [B, H], to (preactivation, h): h = s(a + h_in Wh^T)."""
    a = a + h_in @ Wh.T
    return a, activate(cell.act, a)


def rnn_step_backward(cell: RNNCell, h: Array, Wh: Array, dh: Array, dgates: Array | None) -> StepGradients:
    """One step back: the gradients of the new h and (where given) of the preactivation to those of a step."""
    dz = dh * slope(cell.act, h)
    dz = dz if dgates is None else dz + dgates
    return StepGradients(dz, dz @ Wh)
