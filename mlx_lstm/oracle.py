"""The judge: the op `mlx_lstm.recurrence.lstm` in NumPy float64, slow and obvious, with no code of the library.

A *case* is a dict with the argument names of the op; an absent argument is a missing key or None.
The formulas are written over an `Arithmetic` called `fl`: `fl(...)` marks one rounded operation. In float64 it does
nothing; in another dtype it rounds: "the same formula in that dtype". `closeness.py` perturbs it to derive tolerances.

T time, B batch, I input, H hidden, P width of h (H without projection); gates i f g o, 4H axes in `gate_order`.
"""

from types import SimpleNamespace

import numpy as np

ARRAYS = ("x", "Wx", "Wh", "b", "h0", "c0", "peephole", "mask", "Wp")
OPTIONS = {"gate_order": "ifgo", "activations": ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh")}
OPTIONS |= {"output_peephole": "current", "cell_clip": None, "forget_bias": 0.0, "reverse": False, "lengths": None}
OPTIONS |= {"engine": None}  # accepted and ignored
ACTIVATION_UNITS = 8  # an activation may be wrong by 4 ulp, which is 8 unit roundoffs, before it is stored


def forward(*, dtype=np.float64, frozen_clip=None, **case):
    """Outputs of the op with every operation in `dtype`: h [T,B,P], c [T,B,H], gates [T,B,4H], hT [B,P], cT [B,H].

    `frozen_clip` [T,B,H] replaces clipping by adding this constant: the straight-through gradient is the exact one of
    c + const, so finite differences must freeze the constant at the base point (`clip_shift`).
    """
    fl = Arithmetic(dtype)
    outputs, _ = unroll(complete(case, fl), fl, frozen_clip)
    return fl.store(outputs)


def backward(case, cotangents, *, dtype=np.float64):
    """Gradients for the arrays present in `case`, keyed by argument name, each in its argument's shape.

    `cotangents` is keyed by output name (h, c, gates, hT, cT), shaped as that output; an absent one is zero.
    """
    fl = Arithmetic(dtype)
    return fl.store(evaluate(case, cotangents, fl)[1])


def evaluate(case, cotangents, fl):
    """(outputs, gradients) in the arithmetic `fl`, as float64 arrays; no gradients if cotangents is None."""
    p = complete(case, fl)
    outputs, tape = unroll(p, fl)
    return outputs, {} if cotangents is None else unroll_back(p, tape, cotangents, fl)


def clip_shift(**case):
    """[T,B,H]: what clipping added to c at each step (0 where it did not act)."""
    fl = Arithmetic(np.float64)
    p = complete(case, fl)
    shift = np.zeros((p.T, p.B, p.H))
    for t, s in unroll(p, fl)[1].items():
        shift[t] = np.where(p.active[t], s.clip_shift, 0.0)
    return shift


class Arithmetic:
    """Arithmetic of one dtype. Values travel as float64 arrays, and each operation's result is rounded to `dtype`.

    This equals computing in `dtype`, as float64 has more than twice the digits of the narrower ones.
    A dot product or a sum is one operation: accumulated in float32 (float64 in float64), then rounded once.
    """

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)
        self.accumulator = np.float64 if self.dtype == np.float64 else np.float32

    def __call__(self, value, units=0):
        """Round one operation's result, which was itself `units` accumulator roundoffs wrong (only `Noise` asks)."""
        if self.dtype == np.float64:
            return np.asarray(value, np.float64)
        with np.errstate(over="ignore"):
            return np.asarray(value).astype(self.dtype).astype(np.float64)

    def load(self, value):
        """An argument as the op receives it."""
        return self(value)

    def store(self, named):
        """A dict of results, in the working dtype."""
        return {name: value.astype(self.dtype) for name, value in named.items()}

    def dot(self, a, b):
        """a [M,K] @ b [K,N]."""
        return self(a.astype(self.accumulator) @ b.astype(self.accumulator))

    def total(self, terms, axis):
        """Sum over `axis`, which is kept with size 1."""
        return self(terms.sum(axis=axis, keepdims=True, dtype=self.accumulator))

    def start_step(self):
        """Called before each time step."""


def sigmoid(x, fl):
    e = fl(np.exp(-np.abs(x)))  # at most 1: never overflows
    return fl(np.where(x >= 0, 1.0, e) / fl(1.0 + e), ACTIVATION_UNITS)


def tanh(x, fl):
    return fl(np.tanh(x), ACTIVATION_UNITS)


def hard_sigmoid(x, fl):
    return np.clip(fl(fl(fl(0.2) * x) + 0.5), 0.0, 1.0)


def hard_sigmoid_sixth(x, fl):
    return np.clip(fl(fl(fl(1 / 6) * x) + 0.5), 0.0, 1.0)


def relu(x, fl):
    return np.maximum(x, 0.0)


def identity(x, fl):
    return x


ACTIVATIONS = {f.__name__: f for f in (identity, relu, tanh, sigmoid, hard_sigmoid, hard_sigmoid_sixth)}
SLOPES = {  # derivative of each activation, from its output y
    "identity": lambda y, fl: np.ones_like(y),
    "relu": lambda y, fl: np.where(y > 0, 1.0, 0.0),
    "tanh": lambda y, fl: fl(1.0 - fl(y * y)),
    "sigmoid": lambda y, fl: fl(y * fl(1.0 - y)),
    "hard_sigmoid": lambda y, fl: np.where((y > 0) & (y < 1), fl(0.2), 0.0),
    "hard_sigmoid_sixth": lambda y, fl: np.where((y > 0) & (y < 1), fl(1 / 6), 0.0),
}


def complete(case, fl):
    """The case with sizes and defaults filled in: absent states are 0, an absent mask is 1, absent lengths are T."""
    unknown = set(case) - set(ARRAYS) - set(OPTIONS)
    if unknown:
        raise TypeError(f"[oracle] unknown arguments {sorted(unknown)}")
    p = SimpleNamespace(**dict.fromkeys(ARRAYS), **OPTIONS)
    for name, value in case.items():
        if value is not None:
            setattr(p, name, fl.load(value) if name in ARRAYS else value)
    p.given = [name for name in ARRAYS if case.get(name) is not None]
    p.T, p.B = p.x.shape[:2]
    p.H, p.P = p.Wh.shape[0] // 4, p.Wh.shape[1]
    p.h0 = np.zeros((p.B, p.P)) if p.h0 is None else p.h0
    p.c0 = np.zeros((p.B, p.H)) if p.c0 is None else p.c0
    p.mask_shape = np.shape(p.mask)
    p.mask = np.broadcast_to(1.0 if p.mask is None else p.mask, (p.T, p.B, p.P))
    lengths = np.full(p.B, p.T) if p.lengths is None else np.asarray(p.lengths)
    p.active = [(t < lengths)[:, None] for t in range(p.T)]  # T of [B,1]
    p.times = list(range(p.T))[:: -1 if p.reverse else 1]
    p.act = dict(zip(("i", "f", "g", "o", "output"), p.activations, strict=True))
    p.peeping_back = "ifgo" if p.output_peephole == "previous" else "ifg"  # the gates that see c_prev
    return p


def block(p, array, gate):
    """The [..., H] block of `gate` in a [..., 4H] array."""
    start = p.H * p.gate_order.index(gate)
    return array[..., start : start + p.H]


def join(p, blocks):
    """[..., 4H] in gate_order from a dict of [..., H] by gate."""
    return np.concatenate([blocks[k] for k in p.gate_order], axis=-1)


def unroll(p, fl, frozen_clip=None):
    """Run the recurrence; returns the outputs and the tape, a dict from t to what `step` saw and made there."""
    widths = {"h": p.P, "c": p.H, "gates": 4 * p.H}
    outputs = {name: np.zeros((p.T, p.B, width)) for name, width in widths.items()}
    tape = {}
    h, c = p.h0, p.c0
    for t in p.times:
        fl.start_step()
        on = p.active[t]
        s = step(
            p, padded(on, p.x[t]), padded(on, p.mask[t]), h, c, fl, None if frozen_clip is None else frozen_clip[t]
        )
        for name in outputs:
            outputs[name][t] = padded(on, {"h": s.h, "c": s.c, "gates": join(p, s.gates)}[name])
        h, c = np.where(on, s.h, h), np.where(on, s.c, c)
        tape[t] = s
    return {**outputs, "hT": h, "cT": c}, tape


def padded(on, value):
    """`value` where the item is still running, 0 where it has ended: whatever lies in the padding is never read."""
    return np.where(on, value, 0.0)


def step(p, x, mask, h_prev, c_prev, fl, frozen_shift=None):
    """One time step: x [B,I] (or [B,4H] if projected already), mask [B,P], h_prev [B,P], c_prev [B,H]."""
    h_in = fl(mask * h_prev)
    a = preactivations(p, x, h_in, c_prev, fl)
    gates = {k: ACTIVATIONS[p.act[k]](a[k], fl) for k in "ifg"}
    c_raw = fl(fl(gates["f"] * c_prev) + fl(gates["i"] * gates["g"]))
    c = clip(p, c_raw, fl) if frozen_shift is None else c_raw + frozen_shift
    if p.peephole is not None and p.output_peephole == "current":
        a["o"] = fl(a["o"] + fl(block(p, p.peephole, "o") * c))
    gates["o"] = ACTIVATIONS[p.act["o"]](a["o"], fl)
    squashed = ACTIVATIONS[p.act["output"]](c, fl)
    m = fl(gates["o"] * squashed)
    h = m if p.Wp is None else fl.dot(m, p.Wp.T)
    made = dict(h_in=h_in, a=a, gates=gates, c=c, clip_shift=c - c_raw, squashed=squashed, m=m, h=h)
    return SimpleNamespace(x=x, mask=mask, h_prev=h_prev, c_prev=c_prev, **made)


def preactivations(p, x, h_in, c_prev, fl):
    """a [B,H] by gate, all but the output gate's peep at the current c."""
    a = x if p.Wx is None else fl.dot(x, p.Wx.T)
    a = fl(a + fl.dot(h_in, p.Wh.T))
    a = a if p.b is None else fl(a + p.b)
    a = {k: block(p, a, k) for k in "ifgo"}
    a["f"] = fl(a["f"] + fl(p.forget_bias))
    if p.peephole is not None:
        for k in p.peeping_back:
            a[k] = fl(a[k] + fl(block(p, p.peephole, k) * c_prev))
    return a


def clip(p, c, fl):
    return fl(np.clip(c, -p.cell_clip, p.cell_clip)) if p.cell_clip else c


def unroll_back(p, tape, cotangents, fl):
    """Backpropagation through time over the tape; returns the gradients of the given arrays."""
    cot = {name: fl.load(value) for name, value in cotangents.items() if value is not None}
    dh = cot.get("hT", np.zeros((p.B, p.P)))
    dc = cot.get("cT", np.zeros((p.B, p.H)))
    rows = []
    for t in reversed(p.times):
        fl.start_step()
        on = p.active[t]
        dh_t, dc_t, dgates = (padded(on, cot[k][t]) if k in cot else 0.0 for k in ("h", "c", "gates"))
        dgates = np.broadcast_to(dgates, (p.B, 4 * p.H))
        s = step_back(p, tape[t], fl(dh + dh_t), fl(dc + dc_t), dgates, fl)
        dh, dc = np.where(on, s.dh_prev, dh), np.where(on, s.dc_prev, dc)
        rows.append((t, {name: padded(on, value) for name, value in vars(s).items()}))
    return {name: value for name, value in collect(p, rows, dh, dc, fl).items() if name in p.given}


def step_back(p, s, dh, dc, dgates, fl):
    """Gradients of one step from the total dh [B,P], dc [B,H] arriving at its h and c, and dgates [B,4H] at its gates.

    h = m Wp^T      m = o act_out(c)      o = act(a_o + p_o c)      c = f c_prev + i g      (clip: straight through)
    """

    def da(k, dgate):
        return fl(fl(dgate + block(p, dgates, k)) * SLOPES[p.act[k]](gates[k], fl))

    gates, d = s.gates, {}
    dm = dh if p.Wp is None else fl.dot(dh, p.Wp)
    d["o"] = da("o", fl(dm * s.squashed))
    dc = fl(dc + fl(fl(dm * gates["o"]) * SLOPES[p.act["output"]](s.squashed, fl)))
    if p.peephole is not None and p.output_peephole == "current":
        dc = fl(dc + fl(block(p, p.peephole, "o") * d["o"]))
    d["i"] = da("i", fl(dc * gates["g"]))
    d["f"] = da("f", fl(dc * s.c_prev))
    d["g"] = da("g", fl(dc * gates["i"]))
    dc_prev = fl(dc * gates["f"])
    if p.peephole is not None:
        for k in p.peeping_back:
            dc_prev = fl(dc_prev + fl(block(p, p.peephole, k) * d[k]))
    d = join(p, d)
    dh_in = fl.dot(d, p.Wh)
    seen = join(p, {k: s.c_prev if k in p.peeping_back else s.c for k in "ifgo"})  # what each peephole looked at
    dx = d if p.Wx is None else fl.dot(d, p.Wx)
    to_sum = dict(da=d, dx=dx, dmask=fl(dh_in * s.h_prev), dpeephole=fl(d * seen), dh=dh, x=s.x, h_in=s.h_in, m=s.m)
    return SimpleNamespace(dh_prev=fl(dh_in * s.mask), dc_prev=dc_prev, **to_sum)


def collect(p, rows, dh0, dc0, fl):
    """Gradients of all arguments from the rows (t, named [B, ...] arrays) of every step."""

    def sequence(name, width):
        out = np.zeros((p.T, p.B, width))
        for t, row in rows:
            out[t] = row[name]
        return out

    def sum_of_outer_products(left, right):  # sum over t and b of left^T right
        return fl.dot(left.reshape(p.T * p.B, left.shape[-1]).T, right.reshape(p.T * p.B, right.shape[-1]))

    I = p.x.shape[-1]
    da = sequence("da", 4 * p.H)
    return {
        "x": sequence("dx", I),
        "Wx": sum_of_outer_products(da, sequence("x", I)),
        "Wh": sum_of_outer_products(da, sequence("h_in", p.P)),
        "b": fl.total(da, (0, 1))[0, 0],
        "h0": dh0,
        "c0": dc0,
        "peephole": fl.total(sequence("dpeephole", 4 * p.H), (0, 1))[0, 0],
        "mask": unbroadcast(sequence("dmask", p.P), p.mask_shape, fl),
        "Wp": sum_of_outer_products(sequence("dh", p.P), sequence("m", p.H)),
    }


def unbroadcast(gradient, shape, fl):
    """Sum a [T,B,P] gradient over the axes along which an array of `shape` was repeated."""
    aligned = (1,) * (3 - len(shape)) + tuple(shape)
    repeated = tuple(axis for axis in range(3) if aligned[axis] != gradient.shape[axis])
    return (fl.total(gradient, repeated) if repeated else gradient).reshape(shape)
