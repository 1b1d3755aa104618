"""The equations of the built-in cells, each written once, in MLX. The engine `ops` calls these functions. The function
`graph_of` of `engines.cell_tracer` traces them as graphs, from which the engine `numpy` generates its code. The float64
reference (`oracle`) and the Metal shaders have their own equations.

A definition is called as lstm(cell, a, v, s):

    cell    the options of the cell: gate order, activations, clips and others (`engines.cells`)
    a       the preactivations by gate
    v       the other inputs by name; None where the call lacks one. h, c: the states before the step. h_in: h times the
            mask. W: the matrix of a second product, which is the projection Wp of an LSTM or the candidate's rows of Wh
            of a GRU. peephole: the weights p by gate. limit, projection limit: of the clips of c and of a projected h.
            norm: a function, the layer normalisation of c
    s       the activations and other functions by name. The functions in `FUNCTIONS` compute values; those that
            `engines.cell_tracer` passes write a graph

and returns ([h, c], gates), with the states after the step, h first, and the gates by letter. `known(engine, s, name)`
returns s[name], or raises an error that names the engine if there is no such activation.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from .cells import HARD_SIGMOIDS, GRUCell, LSTMCell, RNNCell, known
from .problem import HALVES, Array

UNBOUNDED = ("identity", "relu")
"""The names of the activations whose output may be infinite."""


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), precise to the dtype of x. For float64 it is computed with cosh and sinh, because MLX
    0.32.4 computes mx.sigmoid and mx.exp of float64 only to the precision of float32."""
    if x.dtype != mx.float64:
        return mx.sigmoid(x)
    negative = x < 0
    # size is |x|, but not by mx.abs, whose derivative at 0 is 0: the derivative of the sigmoid at 0 is 1/4. The limit
    # is 709 because for larger x cosh overflows, and exp(-x) is too small for a normal number.
    size = mx.minimum(mx.where(negative, -x, x), 709)
    # exp(size) = cosh(size) + sinh(size), so this is sigmoid(-size). NaN stays NaN.
    small = mx.where(size >= 709, 0, 1 / (1 + mx.cosh(size) + mx.sinh(size)))
    return mx.where(negative, small, 1 - small)


def hard_sigmoid(rise: float, x: Array) -> Array:
    """Return clip(rise x + 0.5, 0, 1), a hard sigmoid with the slope `rise` between its two limits."""
    return mx.clip(constant(rise, x) * x + 0.5, 0, 1)


def constant(value: float, like: Array) -> Array:
    """Return a scalar array in the dtype of `like`. MLX 0.32.0 would round a Python float to float32, even next to a
    float64 array."""
    return mx.array(value, like.dtype)


def widened(array: Array) -> Array:
    """Return a 16-bit array as float32, because sums need float32. Return any other array unchanged."""
    return array.astype(mx.float32) if array.dtype in HALVES else array


def clipped(x: Array, limit: Array, gradient: str) -> Array:
    """Return clip(x, -limit, limit). If `gradient` is "through", the gradient passes to x unchanged, as in TensorFlow's
    block ops, except that it is 0 where x is infinite. If `gradient` is "zero", the gradient is 0 where the clip
    changed x, as in torch.clamp."""
    inside = mx.stop_gradient(mx.clip(x, -limit, limit))
    if gradient == "zero":  # `inside` is a constant for MLX, so its gradient is 0
        return mx.where(mx.abs(x) <= limit, x, inside)
    return inside + mx.where(mx.isinf(x), 0, x - mx.stop_gradient(x))  # adds 0, which has the gradient of x


def normalised(a: Array, blocks: int, eps: float) -> tuple[Array, Array]:
    """Return (y, r) of the array a [.., n], whose last axis is divided into `blocks` blocks of the same size.

    y [.., n] is (a - mean) r, with the mean of a block. r [.., blocks] is 1 / sqrt(variance + eps), with the variance
    of all numbers of a block (divided by their number, as in torch).
    """
    parts = mx.unflatten(a, -1, (blocks, -1))
    centred = parts - parts.mean(axis=-1, keepdims=True)
    # The variance as mean(a^2) - mean(a)^2 would lose all digits where the mean is large.
    r = 1 / mx.sqrt((centred * centred).mean(axis=-1, keepdims=True) + constant(eps, a))
    return (centred * r).flatten(-2), r.squeeze(-1)


class ScaledNorm:
    """Layer normalisation of arrays [.., n]: the last axis has `blocks` equal parts, each normalised by itself. Then
    the array is multiplied by a scale [n], and a shift [n] is added. If `scale` is None, the scale is 1; if `shift` is
    None, the shift is 0. eps: the number that is added to each variance."""

    def __init__(self, blocks: int, eps: float, scale: Array | None, shift: Array | None):
        self.blocks, self.eps, self.scale, self.shift = blocks, eps, scale, shift

    def __call__(self, a: Array) -> Array:
        """Return the normalised, scaled and shifted array."""
        return self.scaled(normalised(a, self.blocks, self.eps)[0])

    def scaled(self, y: Array) -> Array:
        """Return y times the scale plus the shift."""
        y = y if self.scale is None else y * self.scale
        return y if self.shift is None else y + self.shift

    def before(self, d: Array, y: Array, r: Array) -> Array:
        """Return the gradient of the array a, from the gradient d of `self(a)` and the results (y, r) of
        `normalised(a)`. With D = d scale it is r (D - mean(D) - y mean(D y)), with means over a block."""
        D = d if self.scale is None else d * self.scale
        D, y = (mx.unflatten(part, -1, (self.blocks, -1)) for part in (D, y))
        rest = D - D.mean(axis=-1, keepdims=True) - y * (D * y).mean(axis=-1, keepdims=True)
        return (rest * r[..., None]).flatten(-2)

    def back(self, d: Array, a: Array) -> Array:
        """Return the gradient of the array a, from the gradient d of `self(a)`. `normalised(a)` is computed again for
        it."""
        return self.before(d, *normalised(a, self.blocks, self.eps))


Functions = Mapping[str, Callable[..., Array]]
"""The type of a table of functions by name."""

ACTIVATIONS: Functions = {  # HARD_SIGMOIDS: {name: its slope, the `rise`}
    "identity": lambda x: x,
    "relu": lambda x: mx.maximum(x, 0),
    "tanh": mx.tanh,
    "sigmoid": sigmoid,
    **{name: partial(hard_sigmoid, rise) for name, rise in HARD_SIGMOIDS.items()},
}

FUNCTIONS: Functions = {**ACTIVATIONS, "clip": clipped, "where": mx.where, "norm": lambda c, norm: norm(c)}
"""The functions that the definitions call, as s[name]: the activations, the clip of a state, a selection, and the layer
normalisation of c. `engines.cell_tracer` replaces four of them for its graphs."""


def activate(name: str, x: Array) -> Array:
    """Return the activation `name`, applied to x."""
    return known("ops", ACTIVATIONS, name)(x)


Step = tuple[list[Array], dict[str, Array]]
"""The type of a definition's result: (the new states, h first; the gates by name)."""


def lstm(cell: LSTMCell, a: Mapping[str, Array], v: Mapping[str, Any], s: Functions) -> Step:
    """Run one step of an LSTM. Return ([h, c], gates). a: the preactivations of the gates, with the bias, for f also
    the forget bias, but without peepholes. v: the other inputs by name, such as the c before the step. s: the
    activations and other functions by name. In the equations c_prev is the c before the step, p_i the peephole weights
    of the gate i, s_i the activation of this gate, s_output the activation of c.

      i = s_i(a_i + p_i c_prev)   f = s_f(a_f + p_f c_prev)   g = s_g(a_g + p_g c_prev)
      c = f c_prev + i g, clipped if there is a limit; `clipped` defines the gradient of the clip
      o = s_o(a_o + p_o c), or s_o(a_o + p_o c_prev) if `output_peephole` is "previous"
      h = o s_output(c), or its product with Wp, clipped if there is a limit
      With a norm of c: c = norm(c) after its clip ("state"), or only h = o s_output(norm(c)) ("output")
    """
    p, c_prev = v["peephole"], v["c"]

    def gate(name: str, seen: Array) -> Array:  # seen: the c that the gate's peephole multiplies
        return known("ops", s, cell.activation(name))(a[name] + p[name] * seen if p else a[name])

    i, f, g = (gate(name, c_prev) for name in "ifg")
    c = f * c_prev + i * g
    if v["limit"] is not None:
        c = s["clip"](c, v["limit"], cell.clip_gradient)
    # shown: the c from which h is computed, normalised if the cell does so.
    shown = c if v["norm"] is None else s["norm"](c, v["norm"])
    if cell.norm is not None and cell.norm.c == "state":
        c = shown
    o = gate("o", c if cell.output_peephole == "current" else c_prev)
    h = o * known("ops", s, cell.activation("output"))(shown)
    h = h if v["W"] is None else h @ v["W"].T
    if v["projection limit"] is not None:
        h = s["clip"](h, v["projection limit"], cell.clip_gradient)
    return [h, c], {"i": i, "f": f, "g": g, "o": o}


def gru(cell: GRUCell, a: Mapping[str, Any], v: Mapping[str, Any], s: Functions) -> Step:
    """Run one step of a GRU. Return ([h], gates). v: the other inputs by name: h before the step, h_in (h times the
    mask) and, with reset "before", W, the candidate's rows of Wh. s: the activations and other functions by name. In
    the equations s_r, s_z and s_n are the activations of the gates.

    a: for each gate the pair (x, p), with x the input's part of the preactivation and p = h_in Wh^T the recurrent part,
    to which bhn is added for n. With reset "before" n has no p; its product is computed here, because it reads r.

      r = s_r(x_r + p_r)   z = s_z(x_z + p_z)
      n = s_n(x_n + r p_n)  or, with reset "before",  s_n(x_n + (r h_in) Wh_n^T)
      h_new = z h + (1 - z) n,  or with flip_z  (1 - z) h + z n
    """
    r, z = (known("ops", s, cell.activation(gate))(a[gate][0] + a[gate][1]) for gate in "rz")
    # inner: the recurrent part of the candidate. With reset "before" W has the candidate's rows of Wh.
    inner = r * a["n"][1] if cell.reset == "after" else (r * v["h_in"]) @ v["W"].T
    n = known("ops", s, cell.activation("n"))(a["n"][0] + inner)
    old, new = (n, v["h"]) if cell.flip_z else (v["h"], n)  # the step computes z * old + (1 - z) * new
    h = new + z * (old - new)
    if cell.activation("n") in UNBOUNDED:  # where n is infinite, h = new + z * (old - new) is inf - inf = NaN
        h = s["where"]((n == mx.inf) | (n == -mx.inf), z * old + (1 - z) * new, h)
    return [h], {"r": r, "z": z, "n": n}


def rnn(cell: RNNCell, a: Mapping[str, Array], v: Mapping[str, Any], s: Functions) -> Step:
    """Run one step of a plain RNN. Return ([h], gates) with h = activation(a). The only gate, "h", is the preactivation
    a itself. v is not read."""
    return [known("ops", s, cell.act)(a["h"])], dict(a)


DEFINITIONS: dict[str, Callable[..., Step]] = {"lstm": lstm, "gru": gru, "rnn": rnn}
"""The definition of each built-in cell, by `cell.op`."""


NAMES = {letter: tuple([f"{letter}{k}" for k in range(4)]) for letter in "xpwe"}
"""The names of a graph's inputs that exist once per gate, such as "x0" to "x3". x: a preactivation, or the input's part
of it. p: its recurrent part. w: a peephole weight. e: the gradient of a gate."""


def step(cell: Any, of: Mapping[str, Any], s: Functions = FUNCTIONS) -> Step:
    """Run one step of a built-in cell: collect the arguments of its definition, and call the definition. of: the inputs
    by name. A name is a letter and a number, such as x0; the numbers of x, p and w count the gates in `gate_order`. An
    input that the call lacks is None or missing. s: the functions that the definition calls.

        x   the preactivation; if `cell.apart` (a GRU) only its input part, x Wx^T + b
        p   if `cell.apart`: the recurrent part of the preactivation, h_in Wh^T
        w   the peephole weights
        s0, s1, i0   h, c and h_in before the step
        W0, N0   the matrix of a second product; the layer normalisation of c
        k0, k1   the limits of c and of a projected h
    """
    gates, get = cell.gate_order, of.get
    a = {g: of[x] for g, x in zip(gates, NAMES["x"], strict=False)}
    if cell.apart:  # the definition gets pairs (input part, recurrent part) instead of their sum
        a = {g: (a[g], get(p)) for g, p in zip(gates, NAMES["p"], strict=False)}
    p = {g: of[w] for g, w in zip(gates, NAMES["w"], strict=False)} if "w0" in of else None
    v = {"h": of["s0"], "c": get("s1"), "h_in": get("i0"), "W": get("W0"), "peephole": p, "norm": get("N0")}
    return DEFINITIONS[cell.op](cell, a, v | {"limit": get("k0"), "projection limit": get("k1")}, s)
