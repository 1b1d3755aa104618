"""The cells in plain MLX operations, one step forward and one step backward. These functions are the Python
definition of the equations."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from ..cells import HARD_SIGMOIDS, GRUCell, LSTMCell, RNNCell, known
from ..problem import Array


class StepGradients(NamedTuple):
    """The gradients that the backward pass of one step computes, for B batch items, H hidden units, G gates and h of
    width P.

    dz [B, GH]: the gradient of the input's part of the preactivations. dh [B, P]: the gradient of mask * h_prev, which
    enters the recurrent product. dc [B, H]: the gradient of c_prev, for an LSTM only. direct [B, H]: for a GRU only,
    the part of the gradient of h_prev that bypasses the product.
    """

    dz: Array
    dh: Array
    dc: Array | None = None
    direct: Array | None = None


def activate(name: str, x: Array) -> Array:
    """Return the activation `name`, applied to x."""
    return known("ops", ACTIVATIONS, name)[0](x)


def slope(name: str, y: Array) -> Array:
    """Return the derivative of the activation `name`, computed from its output y."""
    return known("ops", ACTIVATIONS, name)[1](y)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), precise to the dtype of x."""
    return double_sigmoid(x) if x.dtype == mx.float64 else mx.sigmoid(x)


def double_sigmoid(x: Array) -> Array:
    """Return the sigmoid of a float64 array, computed with cosh and sinh, because MLX 0.32.4 computes mx.sigmoid and
    mx.exp of float64 only to the precision of float32."""
    negative = x < 0
    # mx.abs has the derivative 0 at x = 0. The derivative of the sigmoid would then be 0 there, but it is 1/4. The
    # limit is 709: for larger x cosh overflows, and exp(-x) is too small for a normal number.
    size = mx.minimum(mx.where(negative, -x, x), 709)
    small = mx.where(size >= 709, 0, 1 / (1 + mx.cosh(size) + mx.sinh(size)))  # NaN stays NaN
    return mx.where(negative, small, 1 - small)


def hard_sigmoid(rise: float, x: Array) -> Array:
    """Return clip(rise x + 0.5, 0, 1)."""
    return mx.clip(constant(rise, x) * x + 0.5, 0, 1)


def hard_sigmoid_slope(rise: float, y: Array) -> Array:
    """Return the derivative of `hard_sigmoid`, computed from its output y."""
    return constant(rise, y) * ((y > 0) & (y < 1)).astype(y.dtype)


ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "identity": (lambda x: x, mx.ones_like),
    "relu": (lambda x: mx.maximum(x, 0), lambda y: (y > 0).astype(y.dtype)),
    "tanh": (mx.tanh, lambda y: 1 - y * y),
    "sigmoid": (sigmoid, lambda y: y * (1 - y)),
    **{name: (partial(hard_sigmoid, rise), partial(hard_sigmoid_slope, rise)) for name, rise in HARD_SIGMOIDS.items()},
}
"""For each name (activation, derivative). The derivative is a function of the activation's output."""

UNBOUNDED = ("identity", "relu")
"""The names of the activations whose output may be infinite."""


def constant(value: float, like: Array) -> Array:
    """Return a scalar array in the dtype of `like`. MLX 0.32.0 would round a Python float to float32, even next to a
    float64 array."""
    return mx.array(value, like.dtype)


def clipped(x: Array, limit: float, gradient: str) -> Array:
    """Return clip(x, -limit, limit). The gradient ignores the clip if `gradient` is "through", as in TensorFlow's block
    ops: it passes to x unchanged, except that it is 0 where x is infinite. If `gradient` is "zero", it is 0 where the
    clip changed x, as in torch.clamp."""
    bound = constant(limit, x)
    inside = mx.stop_gradient(mx.clip(x, -bound, bound))
    if gradient == "zero":
        return mx.where(mx.abs(x) <= bound, x, inside)
    return inside + mx.where(mx.isinf(x), 0, x - mx.stop_gradient(x))  # adds 0, but with the gradient of x


def through_clip(limit: float, before: Array, after: Array, gradient: Array) -> Array:
    """Return the gradient of an array before a clip that stops gradients: 0 where the clip changed the array, else
    `gradient`. before: the array before the clip, computed again, so it may be rounded differently. after: the
    clipped array. Both are needed: `after` says exactly which numbers are below the limit, and `before` finds those
    that were equal to the limit before the clip, which the clip did not change."""
    bound = constant(limit, after)
    return mx.where((mx.abs(after) < bound) | (mx.abs(before) == bound), gradient, 0)


def by_gate(cell: LSTMCell | GRUCell, array: Array | None) -> dict[str, Array]:
    """Return a dict from each gate to its part of an array [.., GH] with all gates. Return an empty dict if the
    array is None."""
    return {} if array is None else dict(zip(cell.gate_order, mx.split(array, cell.gates, axis=-1), strict=True))


def lstm_step(cell: LSTMCell, a: Array, c_prev: Array, peephole: Array | None) -> tuple[Array, Array, Array]:
    """Run one step of an LSTM. Return the gates [B, 4H], the new c [B, H] and m [B, H]; m is h, or the vector that is
    projected to h.

    a [B, 4H]: the preactivations. c_prev [B, H]: the c before the step. In the equations s_i, ..., s_output are the
    activations of the gates and of the output, and p_i, ... are the peephole weights (0 if there are none). forget_bias
    is an option of the cell (0 by default).

      i = s_i(a_i + p_i c_prev)   f = s_f(a_f + forget_bias + p_f c_prev)   g = s_g(a_g + p_g c_prev)
      c = f c_prev + i g, clipped if `cell_clip` is given; `clipped` defines the gradient of the clip
      o = s_o(a_o + p_o c), or s_o(a_o + p_o c_prev) if `output_peephole` is "previous"
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
        c = clipped(c, cell.cell_clip, cell.clip_gradient)
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
    """Run one step of an LSTM backward. Return dz [B, 4H], the gradient of the preactivations, and the gradient of
    c_prev [B, H].

    dm [B, H]: the gradient of m = o * output(c), which is h unless there is a projection. dc [B, H], dgates [B, 4H]:
    the gradients of the new c and of the gates.
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
    if cell.cell_clip is not None and cell.stops_c:
        dc = through_clip(cell.cell_clip, y["f"] * c_prev + y["i"] * y["g"], c, dc)
    dz["i"] = through("i", dc * y["g"])
    dz["f"] = through("f", dc * c_prev)
    dz["g"] = through("g", dc * y["i"])
    dc = dc * y["f"]
    for gate in "ifgo" if p and cell.output_peephole == "previous" else "ifg" if p else "":
        dc = dc + dz[gate] * p[gate]
    return mx.concatenate([dz[gate] for gate in cell.gate_order], axis=-1), dc


def gru_step(cell: GRUCell, a: Array, h_in: Array, h: Array, Wh: Array, bhn: Array | None) -> tuple[Array, Array]:
    """Run one step of a GRU. Return the gates [B, 3H] and the new h [B, H].

    a [B, 3H]: the input's part of the preactivations. h_in [B, H]: h times the mask.

      r = s_r(a_r + h_in Wh_r^T)   z = s_z(a_z + h_in Wh_z^T)
      n = s_n(a_n + r (h_in Wh_n^T + bhn))  or, with reset "before",  s_n(a_n + (r h_in) Wh_n^T)
      h_new = z h + (1 - z) n,  or with flip_z  (1 - z) h + z n
    """
    z, y, H = by_gate(cell, a), {}, h.shape[-1]
    if cell.reset == "after":  # one product with all three blocks of Wh
        products = by_gate(cell, h_in @ Wh.T)
    else:
        products = {gate: h_in @ Wh[cell.block(gate, H)].T for gate in "rz"}
    for gate in "rz":
        y[gate] = activate(cell.activation(gate), z[gate] + products[gate])
    if cell.reset == "after":
        recurrent = y["r"] * (products["n"] if bhn is None else products["n"] + bhn)
    else:
        recurrent = (y["r"] * h_in) @ Wh[cell.block("n", H)].T
    n = y["n"] = activate(cell.activation("n"), z["n"] + recurrent)
    old, new = (n, h) if cell.flip_z else (h, n)
    h_new = new + y["z"] * (old - new)
    if cell.activation("n") in UNBOUNDED:  # for an infinite n the line above gives inf - inf = NaN
        h_new = mx.where(mx.isinf(n), y["z"] * old + (1 - y["z"]) * new, h_new)
    return mx.concatenate([y[gate] for gate in cell.gate_order], axis=-1), h_new


def gru_step_backward(
    cell: GRUCell, gates: Array, h_in: Array, h: Array, Wh: Array, q: Array | None, dh: Array, dgates: Array | None
) -> StepGradients:
    """Return the gradients of one GRU step, computed from dh [B, H] and dgates [B, 3H], the gradients of the new h and
    of the gates.

    h [B, H]: the state before the step. h_in [B, H]: h times the mask, which enters the recurrent products. q [B, H]:
    the candidate's product h_in Wh_n^T + bhn, if the reset gate multiplies its result (reset "after"); None if the
    reset gate multiplies h_in before the product (reset "before").
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
    """Run one step of a plain RNN. Return the preactivation and h = s(a + h_in Wh^T), both [B, H].

    a [B, H]: the input's part of the preactivation. h_in [B, H]: h_prev times the mask.
    """
    a = a + h_in @ Wh.T
    return a, activate(cell.act, a)


def rnn_step_backward(cell: RNNCell, h: Array, Wh: Array, dh: Array, dgates: Array | None) -> StepGradients:
    """Return the gradients of one step of a plain RNN. dh, dgates [B, H]: the gradients of the new h and of the
    preactivation."""
    dz = dh * slope(cell.act, h)
    dz = dz if dgates is None else dz + dgates
    return StepGradients(dz, dz @ Wh)
