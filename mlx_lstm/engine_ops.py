"""Engine `ops`: the recurrence in plain MLX, forward and backward written out. The readable definition.

Runs on any device and inside `mx.compile`, `mx.vmap` and exports. Sizes: T time, B batch, I input, H hidden, P the
width of h (H, or the projection's). Every function here takes and returns MLX arrays; nothing is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .cells import LSTMCell
from .problem import Problem

Arrays = dict[str, mx.array]


# --- The cell: the one place where its equations stand in Python -----------------------------------------------------


def activate(name: str, x: mx.array) -> mx.array:
    """One of `cells.ACTIVATIONS`. The sigmoid goes through tanh: that MLX computes in true float64, exp it does not."""
    if name == "tanh":
        return mx.tanh(x)
    if name == "sigmoid":
        return 0.5 + 0.5 * mx.tanh(0.5 * x)
    if name == "hard_sigmoid":
        return mx.clip(constant(0.2, x) * x + 0.5, 0, 1)
    return mx.maximum(x, 0) if name == "relu" else x


def slope(name: str, y: mx.array) -> mx.array:
    """An activation's derivative, written in its output y."""
    if name == "tanh":
        return 1 - y * y
    if name == "sigmoid":
        return y * (1 - y)
    if name == "hard_sigmoid":
        return constant(0.2, y) * ((y > 0) & (y < 1)).astype(y.dtype)
    return (y > 0).astype(y.dtype) if name == "relu" else mx.ones_like(y)


def constant(value: float, like: mx.array) -> mx.array:
    """A scalar in the dtype of `like`: beside a float64 array MLX 0.32.0 rounds a Python float to float32."""
    return mx.array(value, like.dtype)


def clip_straight_through(c: mx.array, limit: float) -> mx.array:
    """clip(c, -limit, limit) whose gradient is that of c, as TensorFlow's block ops have it."""
    bound = constant(limit, c)
    return mx.stop_gradient(mx.clip(c, -bound, bound)) + (c - mx.stop_gradient(c))


def lstm_step(
    cell: LSTMCell, a: mx.array, c_prev: mx.array, peephole: mx.array | None
) -> tuple[mx.array, mx.array, mx.array]:
    """One step: preactivations a [B, 4H] and c_prev [B, H] to (gates [B, 4H], c [B, H], m [B, H]).

    i = s_i(a_i + p_i c_prev)   f = s_f(a_f + forget_bias + p_f c_prev)   g = s_g(a_g + p_g c_prev)
    c = f c_prev + i g, clipped                  o = s_o(a_o + p_o c)  or  s_o(a_o + p_o c_prev)
    m = o s_output(c)
    """
    a = dict(zip(cell.gate_order, mx.split(a, 4, axis=-1), strict=True))
    p = {} if peephole is None else dict(zip(cell.gate_order, mx.split(peephole, 4), strict=True))
    if cell.forget_bias:
        a["f"] = a["f"] + constant(cell.forget_bias, a["f"])
    current = "o" if cell.output_peephole == "current" else ""
    y = {}
    for gate in "ifgo":
        if p and gate != current:
            a[gate] = a[gate] + p[gate] * c_prev
    for gate in "ifg":
        y[gate] = activate(cell.activation(gate), a[gate])
    c = y["f"] * c_prev + y["i"] * y["g"]
    if cell.cell_clip is not None:
        c = clip_straight_through(c, cell.cell_clip)
    if p and current:
        a["o"] = a["o"] + p["o"] * c
    y["o"] = activate(cell.activation("o"), a["o"])
    m = y["o"] * activate(cell.activation("output"), c)
    return mx.concatenate([y[gate] for gate in cell.gate_order], axis=-1), c, m


def lstm_step_backward(
    cell: LSTMCell,
    gates: mx.array,
    c_prev: mx.array,
    c: mx.array,
    peephole: mx.array | None,
    dm: mx.array,
    dc: mx.array,
    dgates: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """One step back: the gradients of m, c and (where given) the gates to (dz [B, 4H], dc_prev [B, H]).

    dz is the gradient of the preactivations. The clip passes gradients straight through.
    """
    order = cell.gate_order
    y = dict(zip(order, mx.split(gates, 4, axis=-1), strict=True))
    p = {} if peephole is None else dict(zip(order, mx.split(peephole, 4), strict=True))
    dy = {} if dgates is None else dict(zip(order, mx.split(dgates, 4, axis=-1), strict=True))

    def through(gate: str, gradient: mx.array) -> mx.array:
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
    return mx.concatenate([dz[gate] for gate in order], axis=-1), dc


# --- The recurrence --------------------------------------------------------------------------------------------------


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """h [T, B, P], c [T, B, H], gates [T, B, 4H], hT [B, P], cT [B, H]."""
    z = project(arrays)
    h, c = initial_states(problem, arrays)
    Wh, Wp, peephole = arrays["Wh"].T, arrays.get("Wp"), arrays.get("peephole")
    rows = [None] * problem.T
    for t in problem.steps():
        a = mx.addmm(z[t], recurrent_input(arrays, h, t), Wh)
        gates, c_new, m = lstm_step(problem.cell, a, c, peephole)
        h_new = m if Wp is None else m @ Wp.T
        live = problem.live(t)
        if live is None:
            rows[t] = h, c, _ = h_new, c_new, gates
        else:
            rows[t] = tuple(mx.where(live, value, 0) for value in (h_new, c_new, gates))
            h, c = mx.where(live, h_new, h), mx.where(live, c_new, c)
    sequences = zip(("h", "c", "gates"), zip(*rows, strict=True), strict=True)
    return {name: mx.stack(steps) for name, steps in sequences} | {"hT": h, "cT": c}


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """The gradient of every array, from those of the outputs that have one (keys h, c, gates, hT, cT)."""
    c_prev = before_each_step(problem, saved["c"], initial_states(problem, arrays)[1])
    sweep = sweep_backward(problem, arrays, saved["gates"], saved["c"], c_prev, cotangents)
    return gradients_after_sweep(problem, arrays, saved, sweep)


def gradients_after_sweep(problem: Problem, arrays: Arrays, saved: Arrays, sweep: Arrays) -> Arrays:
    """The gradient of every array, from dz [T, B, 4H], dh0, dc0 and, for a projection, dh [T, B, P] of the sweep."""
    h, c, gates = saved["h"], saved["c"], saved["gates"]
    h0, c0 = initial_states(problem, arrays)
    h_prev, dz = before_each_step(problem, h, h0), sweep["dz"]
    gradients = weight_gradients(problem, arrays, h_prev, dz)
    if "peephole" in arrays:
        gradients["peephole"] = peephole_gradient(problem.cell, dz, before_each_step(problem, c, c0), c)
    if "mask" in arrays:
        terms = (flat(dz) @ arrays["Wh"]).reshape(h_prev.shape) * h_prev
        gradients["mask"] = sum_to_shape(terms, arrays["mask"].shape)
    if "Wp" in arrays:
        output = activate(problem.cell.activation("output"), c)
        m = (gates[..., problem.cell.block("o", problem.H)] * output).astype(h.dtype)
        gradients["Wp"] = flat(sweep["dh"]).T @ flat(m)
    gradients |= {"h0": sweep["dh0"], "c0": sweep["dc0"]}
    return {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items() if name in arrays}


def sweep_backward(
    problem: Problem,
    arrays: Arrays,
    gates: mx.array,
    c: mx.array,
    c_prev: mx.array,
    cotangents: Arrays,
) -> Arrays:
    """The steps in reverse: dz [T, B, 4H], dh [T, B, P], dh0 [B, P], dc0 [B, H]."""
    Wh, Wp, peephole, mask = (arrays.get(name) for name in ("Wh", "Wp", "peephole", "mask"))
    dh = cotangents.get("hT", mx.zeros((problem.B, problem.P), c.dtype))
    dc = cotangents.get("cT", mx.zeros((problem.B, problem.H), c.dtype))
    kept = {"dz": [None] * problem.T, "dh": [None] * problem.T}
    for t in reversed(problem.steps()):
        dh_t = dh + cotangents["h"][t] if "h" in cotangents else dh
        dc_t = dc + cotangents["c"][t] if "c" in cotangents else dc
        dgates = cotangents["gates"][t] if "gates" in cotangents else None
        dm = dh_t if Wp is None else dh_t @ Wp
        dz, dc_new = lstm_step_backward(problem.cell, gates[t], c_prev[t], c[t], peephole, dm, dc_t, dgates)
        live = problem.live(t)
        if live is not None:
            dz, dh_t = mx.where(live, dz, 0), mx.where(live, dh_t, 0)
        dh_new = dz @ Wh
        kept["dz"][t], kept["dh"][t] = dz, dh_t
        if mask is not None:
            dh_new = dh_new * at_step(mask, t)
        dh, dc = (dh_new, dc_new) if live is None else (mx.where(live, dh_new, dh), mx.where(live, dc_new, dc))
    return {name: mx.stack(rows) for name, rows in kept.items()} | {"dh0": dh, "dc0": dc}


def project(arrays: Arrays) -> mx.array:
    """The input's part of the preactivations, [T, B, 4H]: one matrix product over all T * B rows."""
    x, Wx, b = arrays["x"], arrays.get("Wx"), arrays.get("b")
    if Wx is None:
        return x if b is None else x + b
    z = flat(x) @ Wx.T if b is None else mx.addmm(b, flat(x), Wx.T)
    return z.reshape(*x.shape[:2], -1)


def weight_gradients(problem: Problem, arrays: Arrays, h_prev: mx.array, dz: mx.array) -> Arrays:
    """The gradients of x, Wx, Wh, b from dz [T, B, 4H]: one matrix product each over all T * B rows."""
    x, Wx, mask = arrays["x"], arrays.get("Wx"), arrays.get("mask")
    h_in = h_prev if mask is None else h_prev * mask
    if problem.lengths is not None:
        # What lies in the padding must not reach a sum: 0 * NaN would spoil it.
        running = (mx.arange(problem.T)[:, None] < problem.lengths)[..., None]
        x, h_in = mx.where(running, x, 0), mx.where(running, h_in, 0)
    gradients = {"Wh": flat(dz).T @ flat(h_in), "x": dz}
    if Wx is not None:
        gradients |= {"x": (flat(dz) @ Wx).reshape(x.shape), "Wx": flat(dz).T @ flat(x)}
    if "b" in arrays:
        gradients["b"] = total(flat(dz), axis=0)
    return gradients


def peephole_gradient(cell: LSTMCell, dz: mx.array, c_prev: mx.array, c: mx.array) -> mx.array:
    """[4H], in gate order: the sum over steps and batch of dz times the cell state each gate peeped at."""
    blocks = zip(cell.gate_order, mx.split(dz, 4, axis=-1), strict=True)
    seen = {gate: c if gate == "o" and cell.output_peephole == "current" else c_prev for gate in "ifgo"}
    return mx.concatenate([total(block * seen[gate], axis=(0, 1)) for gate, block in blocks])


def initial_states(problem: Problem, arrays: Arrays) -> tuple[mx.array, mx.array]:
    """(h0 [B, P], c0 [B, H]), zeros where absent."""
    dtype = arrays["Wh"].dtype
    h0, c0 = arrays.get("h0"), arrays.get("c0")
    return (
        mx.zeros((problem.B, problem.P), dtype) if h0 is None else h0,
        mx.zeros((problem.B, problem.H), dtype) if c0 is None else c0,
    )


def before_each_step(problem: Problem, states: mx.array, first: mx.array) -> mx.array:
    """[T, B, .]: the state each step started from, given the state after each step and the first one."""
    first = first[None]
    if not problem.reverse:
        return mx.concatenate([first, states[:-1]])
    shifted = mx.concatenate([states[1:], first])
    if problem.lengths is None:
        return shifted
    starts = mx.arange(problem.T)[:, None, None] == problem.lengths[:, None] - 1
    return mx.where(starts, first, shifted)


def recurrent_input(arrays: Arrays, h: mx.array, t: int) -> mx.array:
    """h as it enters step t's product: times the mask, where there is one."""
    return h * at_step(arrays["mask"], t) if "mask" in arrays else h


def at_step(mask: mx.array, t: int) -> mx.array:
    """The mask of step t, out of one for all steps ([B, P] or less) or one per step ([T or 1, B or 1, P or 1])."""
    return mask if mask.ndim < 3 else mask[t if mask.shape[0] > 1 else 0]


def sum_to_shape(x: mx.array, shape: tuple[int, ...]) -> mx.array:
    """The adjoint of broadcasting: x summed down to `shape`."""
    added = x.ndim - len(shape)
    axes = [added + axis for axis, size in enumerate(shape) if size == 1 and x.shape[added + axis] > 1]
    return total(x, axis=[*range(added), *axes]).reshape(shape) if added or axes else x


def total(x: mx.array, axis: int | Sequence[int]) -> mx.array:
    """The sum over axes, of 16-bit numbers in float32."""
    return (x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x).sum(axis=axis)


def flat(x: mx.array) -> mx.array:
    """[T, B, .] as rows [T * B, .]."""
    return x.reshape(-1, x.shape[-1])
