"""Engine `ops`: the recurrence in plain MLX, forward and backward written out. The readable definition.

Runs on any device and inside `mx.compile`, `mx.vmap` and exports. Sizes: T time, B batch, I input, H hidden, P the
width of h (H, or the projection's), G gates of the cell. Two directions run one after the other, each on its part of
the arrays. Every function here takes and returns MLX arrays; nothing is evaluated.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..cells import GRUCell, LSTMCell
from ..directions import half, join, join_gradients, one_direction, part
from ..problem import Array, Arrays, Problem
from . import cells
from .packed import dequantized, times_input


def forward(problem: Problem, arrays: Arrays) -> Arrays:
    """The cell's outputs: h [T, B, D P], gates [T, B, D G H], hT [B, D P]; of an LSTM c [T, B, D H], cT [B, D H]."""
    z, arrays = project(problem, arrays), dequantized(problem.packing, arrays)
    if not problem.bidirectional:
        return sweep_forward(problem, arrays, z)
    sweeps = (sweep_forward(one_direction(problem, d), part(arrays, d), half(z, d)) for d in range(2))
    return join(list(sweeps))


def sweep_forward(problem: Problem, arrays: Arrays, z: Array) -> Arrays:
    """The steps of one direction."""
    z_at = by_time(z)

    def at(t: int, state: tuple[Array, Array]) -> tuple[Arrays, tuple[Array, Array]]:
        h, c = (times_keep(arrays, of_state, t) for of_state in state)
        gates, c, h = step(problem, arrays, z_at[t], recurrent_input(arrays, h, t), h, c)
        return {"h": h, "c": c, "gates": gates}, (h, c)

    kept, (h, c) = over_time(at, initial_states(problem, arrays), problem.steps(), lambda t: live_items(arrays, t))
    outputs = kept | {"hT": h, "cT": c}
    return {name: outputs[name] for name in problem.cell.outputs}


def over_time(
    at: Callable[[int, Any], tuple[Any, Any]], state: Any, steps: Iterable[int], live_at: Callable[[int], Array | None]
) -> tuple[Any, Any]:
    """Whatever `at(t, state) -> output, state` returns, step after step: the outputs [T, B, .] and the last state, each
    an array or a tree of such. Of items [B] that are not live at t the output is 0, the state carried; None: all are.
    """
    outputs = {}
    for t in steps:
        (output, after), live = at(t, state), live_at(t)
        if live is not None:
            output, after = where(live, output, tree_map(zero, output)), where(live, after, state)
        outputs[t], state = output, after
    return tree_map(lambda *of_steps: mx.stack(list(of_steps)), *(outputs[t] for t in range(len(outputs)))), state


def live_items(arrays: Arrays, t: int) -> Array | None:
    """[B, 1]: whether each item has not ended at step t; None without lengths."""
    lengths = arrays.get("lengths")
    return None if lengths is None else (lengths > t)[:, None]


def where(items: Array, tree: Any, other: Any) -> Any:
    """The arrays [B, .] of a tree for the items [B] that are true, of the other tree for the rest."""
    return tree_map(lambda a, b: mx.where(items.reshape(-1, *[1] * (a.ndim - 1)), a, b), tree, other)


def zero(array: Array) -> Array:
    """0, of an array's dtype."""
    return mx.array(0, array.dtype)


def by_time(sequence: Array) -> list[Array]:
    """[B, .] for each step of [T, B, .]."""
    # Not sequence[t], of which mx.compile(shapeless=True) would keep the first call's shape without a word.
    return [row.squeeze(0) for row in mx.split(sequence, sequence.shape[0])]


def stacked(steps: dict[int, Array]) -> Array:
    """[T, B, .]: what each step left, in the order of time."""
    return mx.stack([steps[t] for t in range(len(steps))])


def step(problem: Problem, arrays: Arrays, z: Array, h_in: Array, h: Array, c: Array) -> tuple[Array, Array, Array]:
    """(gates, c, h) of a step of whichever cell, from z, the masked h_in, h and c. A cell without c passes it on."""
    cell, Wh, Wp = problem.cell, arrays["Wh"], arrays.get("Wp")
    if isinstance(cell, LSTMCell):
        # Not mx.addmm, here and in the cells: with vmap over x alone MLX 0.32.4 refuses it.
        gates, c, m = cells.lstm_step(cell, z + h_in @ Wh.T, c, arrays.get("peephole"))
        return gates, c, m if Wp is None else m @ Wp.T
    if isinstance(cell, GRUCell):
        gates, h = cells.gru_step(cell, z, h_in, h, Wh, arrays.get("bhn"))
        return gates, c, h
    gates, h = cells.rnn_step(cell, z, h_in, Wh)
    return gates, c, h


def backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """The gradient of every array, none of them packed, from those of the outputs that have one (keys as theirs)."""
    if problem.bidirectional:
        given = ([part(values, d) for values in (arrays, saved, cotangents)] for d in range(2))
        sweeps = (sweep_backward(one_direction(problem, d), *values) for d, values in enumerate(given))
        sweep = join(list(sweeps))
    else:
        sweep = sweep_backward(problem, arrays, saved, cotangents)
    return gradients_after_sweep(problem, arrays, saved, sweep)


def sweep_backward(problem: Problem, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
    """One direction's steps in reverse: dz [T, B, G H], dh0 [B, P]; of an LSTM dh [T, B, P] and dc0 [B, H]. With `keep`
    and a cell other than the plain one also carry [T, B, H]: the gradient of keep * c, or of keep * h past products.
    """
    h0, c0 = initial_states(problem, arrays)
    starts = {name: times_keep(arrays, states) for name, states in states_before(problem, arrays, saved).items()}
    starts |= gru_candidates(problem, arrays, starts["h"])
    dh, dc = cotangents.get("hT", mx.zeros_like(h0)), cotangents.get("cT", mx.zeros_like(c0))
    kept: dict[str, dict[int, Array]] = {"dz": {}, "dh": {}, "carry": {}}
    for t in reversed(problem.steps()):
        dh_t = dh + cotangents["h"][t] if "h" in cotangents else dh
        dc_t = dc + cotangents["c"][t] if "c" in cotangents else dc
        dgates = cotangents["gates"][t] if "gates" in cotangents else None
        before = {name: states[t] for name, states in starts.items()}
        after = {name: saved[name][t] for name in ("h", "c", "gates") if name in saved}
        back = step_backward(problem, arrays, t, before, after, dh_t, dc_t, dgates)
        live, dz = live_items(arrays, t), back.dz
        if live is not None:
            dz, dh_t = mx.where(live, dz, 0), mx.where(live, dh_t, 0)
        kept["dz"][t], kept["dh"][t] = dz, dh_t
        dh_new = recurrent_input(arrays, back.dh, t)
        dh_new = dh_new if back.direct is None else dh_new + back.direct
        dc_new = dc if back.dc is None else back.dc
        if "keep" in arrays:
            carry = back.direct if back.dc is None else back.dc
            if carry is not None:
                kept["carry"][t] = carry if live is None else mx.where(live, carry, 0)
            dh_new, dc_new = times_keep(arrays, dh_new, t), times_keep(arrays, dc_new, t)
        dh, dc = (dh_new, dc_new) if live is None else (mx.where(live, dh_new, dh), mx.where(live, dc_new, dc))
    found = {name: stacked(steps) for name, steps in kept.items() if steps} | {"dh0": dh, "dc0": dc}
    others = () if isinstance(problem.cell, LSTMCell) else ("dh", "dc0")
    return {name: array for name, array in found.items() if name not in others}


def step_backward(
    problem: Problem, arrays: Arrays, t: int, before: Arrays, after: Arrays, dh: Array, dc: Array, dgates: Array | None
) -> cells.StepGradients:
    """One step of whichever cell back; `before` and `after` are its state then, and `gru_candidates`; its gates."""
    cell, Wh, Wp = problem.cell, arrays["Wh"], arrays.get("Wp")
    if isinstance(cell, LSTMCell):
        dm = dh if Wp is None else dh @ Wp
        peephole = arrays.get("peephole")
        dz, dc = cells.lstm_step_backward(cell, after["gates"], before["c"], after["c"], peephole, dm, dc, dgates)
        return cells.StepGradients(dz, dz @ Wh, dc)
    if isinstance(cell, GRUCell):
        h_in = recurrent_input(arrays, before["h"], t)
        return cells.gru_step_backward(cell, after["gates"], h_in, before["h"], Wh, before.get("q"), dh, dgates)
    return cells.rnn_step_backward(cell, after["h"], Wh, dh, dgates)


def gradients_after_sweep(problem: Problem, arrays: Arrays, saved: Arrays, sweep: Arrays) -> Arrays:
    """The gradient of every array, from dz [T, B, D G H], dh0, dc0 and, for a projection, dh [T, B, D P], for `keep`
    carry [T, B, D H]."""
    gradients = input_gradients(problem, arrays, sweep["dz"])
    if problem.bidirectional:
        given = ([part(values, d) for values in (arrays, saved, sweep)] for d in range(2))
        parts = [recurrent_gradients(one_direction(problem, d), *values) for d, values in enumerate(given)]
        gradients |= join_gradients(parts, arrays)
    else:
        gradients |= recurrent_gradients(problem, arrays, saved, sweep)
    gradients |= {name: sweep[f"d{name}"] for name in ("h0", "c0") if name in arrays}
    return {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items() if name in arrays}


def input_gradients(problem: Problem, arrays: Arrays, dz: Array) -> Arrays:
    """The gradients of x, Wx, b from dz [T, B, D G H]: one matrix product each over all T * B rows."""
    x, Wx = arrays["x"], arrays.get("Wx")
    gradients = {"x": dz}
    if Wx is not None:
        gradients = {
            "x": (flat(dz) @ Wx).reshape(x.shape),
            "Wx": flat(dz).T @ flat(without_padding(arrays.get("lengths"), x)),
        }
    if "b" in arrays:
        gradients["b"] = total(flat(dz), axis=0)
    return gradients


def recurrent_gradients(problem: Problem, arrays: Arrays, saved: Arrays, sweep: Arrays) -> Arrays:
    """One direction's gradients of Wh, bhn, peephole, mask, keep, Wp: a product over all T * B rows or a sum each."""
    cell, mask, h, dz = problem.cell, arrays.get("mask"), saved["h"], sweep["dz"]
    before = states_before(problem, arrays, saved)
    h_prev = times_keep(arrays, before["h"])
    h_in = without_padding(arrays.get("lengths"), h_prev if mask is None else h_prev * mask)
    if isinstance(cell, GRUCell):
        found = gru_recurrent_gradients(cell, arrays, saved["gates"], h_in, dz)
    else:
        found = {"Wh": flat(dz).T @ flat(h_in)}
    if isinstance(cell, LSTMCell) and "peephole" in arrays:
        found["peephole"] = peephole_gradient(cell, dz, times_keep(arrays, before["c"]), saved["c"])
    if {"mask", "keep"} & arrays.keys():
        dh_in = found.pop("h_in") if "h_in" in found else (flat(dz) @ arrays["Wh"]).reshape(h_prev.shape)
        if mask is not None:
            found["mask"], dh_in = sum_to_shape(dh_in * h_prev, mask.shape), dh_in * mask
        if "keep" in arrays:
            found["keep"] = keep_gradient(before, without_padding(arrays.get("lengths"), dh_in), sweep.get("carry"))
    if isinstance(cell, LSTMCell) and "Wp" in arrays:
        output = cells.activate(cell.activation("output"), saved["c"])
        m = (saved["gates"][..., cell.block("o", problem.H)] * output).astype(h.dtype)
        found["Wp"] = flat(sweep["dh"]).T @ flat(m)
    return found


def keep_gradient(before: Arrays, dh: Array, carry: Array | None) -> Array:
    """[T, B, 1], from the states `before` each step and what reaches keep times them, by the product and past it."""
    found = total(dh * before["h"], axis=-1)
    if carry is not None:
        found = found + total(carry * before["c" if "c" in before else "h"], axis=-1)
    return found[..., None]


def gru_recurrent_gradients(cell: GRUCell, arrays: Arrays, gates: Array, h_in: Array, dz: Array) -> Arrays:
    """Of a GRU: the gradients of Wh, bhn and, where a mask or `keep` asks for it, of h_in [T, B, H]."""
    d, r = cells.by_gate(cell, dz), cells.by_gate(cell, gates)["r"]
    seen = dict.fromkeys("rz", h_in) | {"n": h_in if cell.reset == "after" else r * h_in}
    if cell.reset == "after":
        d["n"] = d["n"] * r
    found = {"Wh": mx.concatenate([flat(d[gate]).T @ flat(seen[gate]) for gate in cell.gate_order])}
    if "bhn" in arrays:
        found["bhn"] = total(flat(d["n"]), axis=0)
    if {"mask", "keep"} & arrays.keys():
        Wh = {gate: arrays["Wh"][cell.block(gate, h_in.shape[-1])] for gate in "rzn"}
        terms = {gate: (flat(d[gate]) @ Wh[gate]).reshape(h_in.shape) for gate in "rzn"}
        found["h_in"] = terms["r"] + terms["z"] + (terms["n"] if cell.reset == "after" else r * terms["n"])
    return found


def gru_candidates(problem: Problem, arrays: Arrays, h_prev: Array) -> Arrays:
    """Of a GRU that resets after the product q [T, B, H], that product at every step; one over all T * B rows."""
    cell = problem.cell
    if not isinstance(cell, GRUCell) or cell.reset != "after":
        return {}
    h_in = h_prev * arrays["mask"] if "mask" in arrays else h_prev
    Wh_n = arrays["Wh"][cell.block("n", problem.H)]
    return {"q": cells.gru_candidate(flat(h_in), Wh_n, arrays.get("bhn")).reshape(h_prev.shape)}


def without_padding(lengths: Array | None, sequence: Array) -> Array:
    """A sequence [T, B, .], 0 where an item has ended: what lies there must not reach a sum, 0 * NaN would spoil it."""
    if lengths is None:
        return sequence
    return of_live(mx.arange(sequence.shape[0])[:, None] < lengths, sequence)


def of_live(live: Array, sequence: Array) -> Array:
    """A sequence [T, B, .] where its steps [T, B] are live, else 0."""
    return mx.where(live.reshape(*live.shape, *[1] * (sequence.ndim - 2)), sequence, zero(sequence))


def project(problem: Problem, arrays: Arrays) -> Array:
    """The input's part of the preactivations, [T, B, D G H]: one matrix product over all T * B rows."""
    x, b = arrays["x"], arrays.get("b")
    if "Wx" not in arrays:
        return x if b is None else x + b
    z = times_input(problem.packing, arrays, flat(x))
    return (z if b is None else z + b).reshape(*x.shape[:2], -1)


def peephole_gradient(cell: LSTMCell, dz: Array, c_prev: Array, c: Array) -> Array:
    """[4H], in gate order: the sum over steps and batch of dz times the cell state each gate peeped at."""
    seen = {gate: c if gate == "o" and cell.output_peephole == "current" else c_prev for gate in "ifgo"}
    return mx.concatenate([total(block * seen[gate], axis=(0, 1)) for gate, block in cells.by_gate(cell, dz).items()])


def initial_states(problem: Problem, arrays: Arrays) -> tuple[Array, Array]:
    """(h0 [B, P], c0 [B, H]), zeros where absent."""
    B, dtype, widths = problem.B, arrays["x"].dtype, {"h0": problem.P, "c0": problem.H}
    h0, c0 = (arrays[name] if name in arrays else mx.zeros((B, width), dtype) for name, width in widths.items())
    return h0, c0


def states_before(problem: Problem, arrays: Arrays, saved: Arrays) -> Arrays:
    """h [T, B, P] and, of an LSTM, c [T, B, H] before each step, which multiplies them by `keep`."""
    first = dict(zip("hc", initial_states(problem, arrays), strict=True))
    lengths = arrays.get("lengths")
    return {name: before_each_step(problem, saved[name], first[name], lengths) for name in "hc" if name in saved}


def times_keep(arrays: Arrays, states: Array, t: int | slice = slice(None)) -> Array:
    """States before step t or, [T, B, .], before each step, as the cell gets them; so do their gradients leave it."""
    return states * arrays["keep"][t] if "keep" in arrays else states


def before_each_step(problem: Problem, states: Array, first: Array, lengths: Array | None) -> Array:
    """[T, B, .]: the state each step started from, given the state after each step and the first one."""
    first = first[None]
    if not problem.reverse:
        return mx.concatenate([first, states[:-1]])
    shifted = mx.concatenate([states[1:], first])
    if lengths is None:
        return shifted
    starts = mx.arange(problem.T)[:, None, None] == lengths[:, None] - 1
    return mx.where(starts, first, shifted)


def recurrent_input(arrays: Arrays, h: Array, t: int) -> Array:
    """h as it enters step t's product, times the mask, where there is one; so does the gradient leave it."""
    if "mask" not in arrays:
        return h
    mask = arrays["mask"]  # for all steps ([B, P] or less) or one per step ([T or 1, B or 1, P or 1])
    return h * (mask if mask.ndim < 3 else mask[t if mask.shape[0] > 1 else 0])


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """The adjoint of broadcasting: x summed down to `shape`."""
    added = x.ndim - len(shape)
    axes = [added + axis for axis, size in enumerate(shape) if size == 1 and x.shape[added + axis] > 1]
    return total(x, axis=[*range(added), *axes]).reshape(shape) if added or axes else x


def total(x: Array, axis: int | Sequence[int]) -> Array:
    """The sum over axes, of 16-bit numbers in float32."""
    return (x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x).sum(axis=axis)


def flat(x: Array) -> Array:
    """[T, B, .] as rows [T * B, .]."""
    return x.reshape(-1, x.shape[-1])
