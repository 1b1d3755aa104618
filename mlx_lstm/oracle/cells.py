"""One time step of each cell (LSTM, GRU, plain RNN), forward and backward. `recurrence` runs the steps over time.

Letters in shapes: B batch, I input, H hidden, P width of h (H without projection), G gates. The gates are i f g o of an
LSTM and r z n of a GRU; the only gate of a plain RNN is called h; k stands for a gate. An axis GH holds the gates in
the order `gate_order`. p is one direction of a case, with all arguments, sizes and defaults as attributes: p.act[k] is
the name of an activation, p.norm_of says whether the recurrent product or its sum with the input's part is normalised
("product", "sum", None). `fl(value)` rounds the result of one operation. ACTIVATIONS has by name the activations as
functions of the preactivation, SLOPES their derivatives as functions of the result.

All steps have the same arguments: step(p, t, x, h_in, h_prev, c_prev, fl), with t the time index. h_in is h_prev times
the mask; Wh multiplies h_in. p.frozen_clip: arrays that an LSTM adds in place of clipping, or None. A cell without c
returns c_prev unchanged. A step returns a `Step`, its values by name: the states h and c, the gates after their
activations, the preactivations a by gate, and what the gradient reads, among it the values of layer normalisation.

A backward step is called as step_back(p, s, dh, dc, dgates, fl), with the `Step` s of the forward step and the
gradients of its h, c and gates. It returns a `Step` of gradients: dh_in, the gradient of h_in; dh_direct, the part of
the gradient of h_prev that does not come through h_in, or None; dc_prev; and to_sum, the terms of this step that
`recurrence` sums over all steps for the gradients of the arrays.
"""

import numpy as np

from .arithmetic import ACTIVATIONS, SLOPES, Array, Rounding, Tensors
from .case import OneDirection, Step


def block(p: OneDirection, array: Array, gate: str) -> Array:
    """Return the block [..., H] of one gate in an array [..., GH], which holds the blocks of all gates side by side."""
    start = p.H * p.gate_order.index(gate)
    return array[..., start : start + p.H]


def blocks(p: OneDirection, array: Array) -> Tensors:
    """Split an array [..., GH] into a dict from the letter of each gate to the gate's block [..., H]."""
    return {k: block(p, array, k) for k in p.gate_order}


def rows(p: OneDirection, gate: str) -> Array:
    """Return the rows [H,P] of one gate in the recurrent matrix Wh [GH,P], which holds the rows of all G gates."""
    return block(p, p.Wh.T, gate).T


def join(p: OneDirection, named: Tensors) -> Array:
    """Join a dict from the letter of each gate to its block [..., H] into one array [..., GH], in gate_order."""
    return np.concatenate([named[k] for k in p.gate_order], axis=-1)


def input_part(p: OneDirection, x: Array, fl: Rounding) -> Array:
    """Return the input's part of the preactivations: x Wx^T + b [B,GH]. Without Wx, x is already the product x Wx^T."""
    a = x if p.Wx is None else fl.dot(x, p.Wx.T)
    return a if p.b is None else fl(a + p.b)


def normalised(a: Array, count: int, eps: float, fl: Rounding) -> tuple[Array, Array]:
    """Normalise an array a [B,n], which has `count` blocks of n / count numbers side by side: one block of all gates,
    or a block per gate. Return (y, r): y [B,count,width] is a with mean 0 and variance 1 in each block of `width`
    numbers, r [B,count,1] is 1 / sqrt(variance + eps). fl(...) rounds the result of one operation."""
    parts = a.reshape(len(a), count, -1)
    width = parts.shape[-1]
    # (2,): the axis of the numbers of a block, over which `fl.total` sums.
    centred = fl(parts - fl(fl.total(parts, (2,)) / width))
    variance = fl(fl.total(fl(centred * centred), (2,)) / width)
    r = fl(1.0 / fl(np.sqrt(fl(variance + eps))))
    return fl(centred * r), r


def unnormalised(d: Array, y: Array, r: Array, fl: Rounding) -> Array:
    """Return the gradient of an array a [B,n] before its normalisation: `normalised` returned y [B,count,width] and r
    for it, and d [B,n] is the gradient of y. It is r (d - mean(d) - y mean(d y)), with means over each block of `width`
    numbers; fl(...) rounds the result of one operation."""
    d, width = d.reshape(y.shape), y.shape[-1]
    mean, mean_dy = (fl(fl.total(terms, (2,)) / width) for terms in (d, fl(d * y)))
    return fl(fl(fl(d - mean) - fl(y * mean_dy)) * r).reshape(len(d), -1)


def scaled(y: Array, scale: Array | None, shift: Array | None, fl: Rounding) -> Array:
    """Return y, the result of `normalised`, times a scale plus a shift, if they are given. y [B,count,width] has a
    block of numbers for each mean; scale, shift and the result [B,n] have all n = count * width numbers side by
    side."""
    y = y.reshape(len(y), -1)
    y = y if scale is None else fl(y * scale)
    return y if shift is None else fl(y + shift)


def joined_parts(p: OneDirection, x: Array, h_in: Array, fl: Rounding) -> tuple[Array, Array, Tensors]:
    """Return both parts of the preactivations [B,GH], x Wx^T + b and h_in Wh^T, after layer normalisation if there is
    one, and what its gradient needs, by name. If the sum of both parts is normalised, the first part is the normalised
    sum and the second is 0."""
    z, product = input_part(p, x, fl), fl.dot(h_in, p.Wh.T)
    if p.norm_of is None:
        return z, product, {}
    # count: the number of blocks that are normalised by themselves: one per gate, or one for all gates "together".
    count = len(p.gate_order) if p.norm_gates == "each" else 1
    a = fl(z + product) if p.norm_of == "sum" else product
    y, r = normalised(a, count, p.norm_eps, fl)
    result = scaled(y, p.norm_scale, p.norm_shift, fl)
    norm_values = {"norm_y": y, "norm_r": r}
    return (result, np.zeros_like(result), norm_values) if p.norm_of == "sum" else (z, result, norm_values)


def through_norm(p: OneDirection, s: Step, dinput: Array, drecurrent: Array, fl: Rounding) -> Tensors:
    """Compute the backward pass of layer normalisation at one step. Return by name the gradients of the input's part
    ("da") and of the recurrent product ("drecurrent"), and this step's terms of the gradients of scale and shift.
    dinput, drecurrent [B,GH]: the gradients of both parts after it. s: the values of the forward step."""
    if p.norm_of is None:
        return dict(da=dinput, drecurrent=drecurrent)
    # back: the gradient before the normalisation. It is computed from drecurrent, the gradient of the norm's result.
    back = unnormalised(drecurrent if p.norm_scale is None else fl(drecurrent * p.norm_scale), s.norm_y, s.norm_r, fl)
    terms = fl(drecurrent * s.norm_y.reshape(drecurrent.shape))  # the scale multiplies norm_y
    da = back if p.norm_of == "sum" else dinput
    return dict(da=da, drecurrent=back, dnorm_scale=terms, dnorm_shift=drecurrent)


def through(p: OneDirection, gate: str, y: Array, gradient: Array, dgates: Array, fl: Rounding) -> Array:
    """Return the gradient of a gate's preactivation, from the gradient of the gate's value y after its activation:
    `gradient` plus this gate's columns of `dgates` [B,GH], the cotangent of the output `gates`."""
    return fl(fl(gradient + block(p, dgates, gate)) * SLOPES[p.act[gate]](y, fl))


def lstm_step(p: OneDirection, t: int, x: Array, h_in: Array, h_prev: Array, c_prev: Array, fl: Rounding) -> Step:
    """Run one LSTM step and return its values. Inputs are x [B,I] (or x Wx^T [B,4H]), h_in [B,P], which is h_prev times
    the mask, and c_prev [B,H]. p.frozen_clip: None, or arrays whose rows of step t are added to c and h in place of
    clipping them. Tests by finite differences use it if clip_gradient is "through", because the gradient then treats
    clipping as the addition of a constant. t is read only for this. h_prev is not read.

    c = clip(f c_prev + i g)     h = clip(m Wp^T), or clip(m) without Wp     m = o act_output(c)
    """
    z, product, norm_values = joined_parts(p, x, h_in, fl)
    a = blocks(p, fl(z + product))
    a["f"] = fl(a["f"] + fl(p.forget_bias))
    for k in peeping_back(p):
        a[k] = fl(a[k] + fl(block(p, p.peephole, k) * c_prev))
    gates = {k: ACTIVATIONS[p.act[k]](a[k], fl) for k in "ifg"}
    c_raw = fl(fl(gates["f"] * c_prev) + fl(gates["i"] * gates["g"]))
    c = unclipped = clipped(c_raw, p.cell_clip, fl) if p.frozen_clip is None else c_raw + p.frozen_clip["c"][t]
    shown = c  # the c from which h is computed
    if p.norm_c is not None:
        norm_values["norm_c_y"], norm_values["norm_c_r"] = normalised(c, count=1, eps=p.norm_eps, fl=fl)
        shown = scaled(norm_values["norm_c_y"], p.norm_c_scale, p.norm_c_shift, fl)
        c = shown if p.norm_c == "state" else c  # with "output" the next step gets c without the norm
    if peeps_ahead(p):  # the output gate's peephole multiplies the new c
        a["o"] = fl(a["o"] + fl(block(p, p.peephole, "o") * c))
    gates["o"] = ACTIVATIONS[p.act["o"]](a["o"], fl)
    # squashed: act_output of c. m: h before the projection Wp. h_raw, c_raw: values before a clip.
    squashed = ACTIVATIONS[p.act["output"]](shown, fl)
    m = fl(gates["o"] * squashed)
    h_raw = m if p.Wp is None else fl.dot(m, p.Wp.T)
    h = clipped(h_raw, p.projection_clip, fl) if p.frozen_clip is None else h_raw + p.frozen_clip["h"][t]
    # made: the values of this step that its gradient reads. clip_shift: what clipping added to c and h.
    made = dict(h=h, c=c, gates=join(p, gates), squashed=squashed, m=m)
    made |= dict(h_raw=h_raw, c_raw=c_raw, clip_shift={"c": unclipped - c_raw, "h": h - h_raw}) | norm_values
    # limits: for each clip its argument and its limit. stopping: for the clips that stop gradients, the argument
    # divided by the limit. Its kinks, where the gradient jumps, are -1 and 1 (see `kink_distance`).
    limits = {"clip_c": (c_raw, p.cell_clip), "clip_h": (h_raw, p.projection_clip)}
    stopping = {k: raw / limit for k, (raw, limit) in limits.items() if stops(p, limit)}
    return Step(a=a | {"output": shown} | stopping, **made)


def clipped(raw: Array, limit: float | None, fl: Rounding) -> Array:
    """Return the array, limited to [-limit, limit]. If `limit` is None, 0 or negative, return it unchanged."""
    return fl(np.clip(raw, -limit, limit)) if limit and limit > 0 else raw


def stops(p: OneDirection, limit: float | None) -> bool:
    """Return whether the case has a clip with this limit, whose gradient is 0 where it changes its argument."""
    return p.clip_gradient == "zero" and limit is not None and limit > 0


def before_clip(p: OneDirection, raw: Array, limit: float | None, gradient: Array) -> Array:
    """Return the gradient of `raw`, the argument of a clip, from that of the clip's result: the same, but 0 where a
    clip that stops gradients changed the argument. At the limit itself it passes, as in torch.clamp."""
    return np.where(np.abs(raw) <= limit, gradient, 0.0) if stops(p, limit) else gradient


def peeps_ahead(p: OneDirection) -> bool:
    """Return whether the LSTM's output gate has a peephole to the c of the same time step."""
    return p.peephole is not None and p.output_peephole == "current"


def peeping_back(p: OneDirection) -> str:
    """Return the letters of the gates that have a peephole to the previous step's c."""
    return "" if p.peephole is None else "ifgo" if p.output_peephole == "previous" else "ifg"


def lstm_step_back(p: OneDirection, s: Step, dh: Array, dc: Array, dgates: Array, fl: Rounding) -> Step:
    """Return the gradients of one LSTM step. dh [B,P] and dc [B,H] are the total cotangents of the step's h and c,
    dgates [B,4H] the cotangent of the step's gates.

        h = m Wp^T      m = o act_out(c)      o = act(a_o + p_o c)      c = f c_prev + i g

    s: the values of the forward step. y: the gates by letter. da(k, ...): the gradient of gate k's preactivation.
    dshown: the gradient of the argument of act_out, which is c or the normalised c. to_sum: this step's terms of the
    gradients of the parameters. fl(...) rounds the result of one operation.
    """
    dh = before_clip(p, s.h_raw, p.projection_clip, dh)
    y = blocks(p, s.gates)
    da = lambda k, gradient: through(p, k, y[k], gradient, dgates, fl)  # noqa: E731
    dm = dh if p.Wp is None else fl.dot(dh, p.Wp)
    d = {"o": da("o", fl(dm * s.squashed))}
    dshown, of_norm_c = fl(fl(dm * y["o"]) * SLOPES[p.act["output"]](s.squashed, fl)), {}
    if p.norm_c == "output":
        dshown, of_norm_c = through_norm_of_c(p, s, dshown, fl)
    dc = fl(dc + dshown)
    if peeps_ahead(p):
        dc = fl(dc + fl(block(p, p.peephole, "o") * d["o"]))
    if p.norm_c == "state":
        dc, of_norm_c = through_norm_of_c(p, s, dc, fl)
    dc = before_clip(p, s.c_raw, p.cell_clip, dc)
    d["i"] = da("i", fl(dc * y["g"]))
    d["f"] = da("f", fl(dc * s.c_prev))
    d["g"] = da("g", fl(dc * y["i"]))
    dc_prev = fl(dc * y["f"])
    for k in peeping_back(p):
        dc_prev = fl(dc_prev + fl(block(p, p.peephole, k) * d[k]))
    # seen [B,4H]: for each gate the c that its peephole multiplies. d [B,4H]: the gradients of all preactivations.
    seen = join(p, {k: s.c if k == "o" and peeps_ahead(p) else s.c_prev for k in "ifgo"})
    d = join(p, d)
    to_sum = through_norm(p, s, d, d, fl) | dict(dpeephole=fl(d * seen), dh=dh, m=s.m) | of_norm_c
    return Step(dh_in=fl.dot(to_sum["drecurrent"], p.Wh), dh_direct=None, dc_prev=dc_prev, to_sum=to_sum)


def through_norm_of_c(p: OneDirection, s: Step, d: Array, fl: Rounding) -> tuple[Array, Tensors]:
    """Return the gradient of c [B,H] before its layer normalisation, and by name this step's terms of the gradients of
    scale and shift. d [B,H]: the gradient of the normalised c. s: the values of the forward step."""
    terms = dict(dnorm_c_scale=fl(d * s.norm_c_y.reshape(d.shape)), dnorm_c_shift=d)
    return unnormalised(d if p.norm_c_scale is None else fl(d * p.norm_c_scale), s.norm_c_y, s.norm_c_r, fl), terms


def gru_step(p: OneDirection, t: int, x: Array, h_in: Array, h_prev: Array, c_prev: Array, fl: Rounding) -> Step:
    """Run one GRU step and return its values. Inputs are x [B,I] (or x Wx^T [B,3H]), h_prev [B,H], and h_in, which is
    h_prev times the mask. A GRU has no c and no clip, so c_prev is returned unchanged, and t is not read.

    r, z = act(a + h_in Wh^T)
    n = act(a_n + r (h_in Wh_n^T + bhn)),  or with reset "before"  act(a_n + (r h_in) Wh_n^T)
    h = z h_prev + (1 - z) n,  or with flip_z  (1 - z) h_prev + z n

    with a the input's part of each gate, x Wx^T + b.
    """
    # z: the input's part of all gates (not the gate z). y: the gates after their activations. products: with a norm,
    # the normalised recurrent product of each gate; without a norm it is empty.
    y, norm_values, products = {}, {}, {}
    if p.norm_of is None:
        z = input_part(p, x, fl)
    else:
        z, product, norm_values = joined_parts(p, x, h_in, fl)
        products = blocks(p, product)
    a = blocks(p, z)
    for k in "rz":
        a[k] = fl(a[k] + (products[k] if products else fl.dot(h_in, rows(p, k).T)))
        y[k] = ACTIVATIONS[p.act[k]](a[k], fl)
    entered = h_in if p.reset == "after" else fl(y["r"] * h_in)  # the vector that the candidate's rows of Wh multiply
    q = products["n"] if products else fl.dot(entered, rows(p, "n").T)  # the recurrent part of the candidate n
    q = q if p.bhn is None else fl(q + p.bhn)
    a["n"] = fl(a["n"] + (fl(y["r"] * q) if p.reset == "after" else q))
    y["n"] = ACTIVATIONS[p.act["n"]](a["n"], fl)
    h = fl.blend(y["z"], y["n"], h_prev) if p.flip_z else fl.blend(y["z"], h_prev, y["n"])
    return Step(h=h, c=c_prev, gates=join(p, y), a=a, entered=entered, q=q, **norm_values)


def gru_step_back(p: OneDirection, s: Step, dh: Array, dc: Array, dgates: Array, fl: Rounding) -> Step:
    """Return the gradients of one GRU step. dh [B,H] is the total cotangent of its h, dgates [B,3H] the cotangent of
    its gates. A GRU has no c: it passes dc on unchanged. s: the values of the forward step. y: the gates by letter.
    da(k, ...): the gradient of gate k's preactivation. h is z h_prev + (1 - z) n. So to_h, the part of the gradient of
    h_prev outside the products, is dh z, and to_n, the gradient of n, is dh (1 - z). With flip_z the factors change
    places."""
    y = blocks(p, s.gates)
    da = lambda k, gradient: through(p, k, y[k], gradient, dgates, fl)  # noqa: E731
    of_z, of_rest = fl(dh * y["z"]), fl(dh * fl(1.0 - y["z"]))
    to_n, to_h = (of_z, of_rest) if p.flip_z else (of_rest, of_z)
    difference = fl(y["n"] - s.h_prev) if p.flip_z else fl(s.h_prev - y["n"])
    d = {"z": da("z", fl(dh * difference)), "n": da("n", to_n)}
    # s.q: the recurrent part of the candidate, its product plus bhn. drecurrent_n: its gradient. dentered: the gradient
    # of r h_in, which the candidate's rows of Wh multiply with reset "before".
    if p.reset == "after":
        d["r"] = da("r", fl(d["n"] * s.q))
        drecurrent_n = fl(d["n"] * y["r"])
        dh_in = fl.dot(drecurrent_n, rows(p, "n"))
    else:
        dentered = fl.dot(d["n"], rows(p, "n"))
        d["r"] = da("r", fl(dentered * s.h_in))
        drecurrent_n = d["n"]
        dh_in = fl(dentered * y["r"])
    for k in "rz":
        dh_in = fl(dh_in + fl.dot(d[k], rows(p, k)))
    # d: the gradients of the gates' preactivations, which are also the gradients of their recurrent products. Only the
    # candidate's product may have another gradient, drecurrent_n: with reset "after" r multiplies this product.
    of_norm = through_norm(p, s, join(p, d), join(p, d | {"n": drecurrent_n}), fl)
    if p.norm_of is not None:  # with a norm of the product compute dh_in from the gradient before the norm
        dh_in = fl.dot(of_norm["drecurrent"], p.Wh)
    to_sum = of_norm | dict(entered=s.entered, dbhn=drecurrent_n)
    return Step(dh_in=dh_in, dh_direct=to_h, dc_prev=dc, to_sum=to_sum)


def rnn_step(p: OneDirection, t: int, x: Array, h_in: Array, h_prev: Array, c_prev: Array, fl: Rounding) -> Step:
    """Run one step of a plain RNN and return its values. Inputs are x [B,I] (or x Wx^T [B,H]) and h_in [B,H], h_prev
    times the mask. In the result, `gates` is the preactivation. There is no c, so c_prev is returned unchanged."""
    z, product, norm_values = joined_parts(p, x, h_in, fl)
    a = fl(z + product)
    return Step(h=ACTIVATIONS[p.activation](a, fl), c=c_prev, gates=a, a={"h": a}, **norm_values)


def rnn_step_back(p: OneDirection, s: Step, dh: Array, dc: Array, dgates: Array, fl: Rounding) -> Step:
    """Return the gradients of one step of a plain RNN. dh [B,H] is the total cotangent of its h, dgates [B,H] that of
    the preactivation. There is no c, so dc is returned unchanged."""
    d = fl(fl(dh * SLOPES[p.activation](s.h, fl)) + dgates)
    to_sum = through_norm(p, s, d, d, fl)
    return Step(dh_in=fl.dot(to_sum["drecurrent"], p.Wh), dh_direct=None, dc_prev=dc, to_sum=to_sum)
