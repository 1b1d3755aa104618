"""Random recurrent cells for the tests of `recognise`, and a judge of the lines that it returns.

`near(seed)` makes an LSTM, GRU or RNN cell with one slip, such as a limit on c or a factor 0.9999; `equal(seed)` one
that equals a call, written in a random way. The judge evaluates a line in NumPy with the formulas of this file."""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

D, H, B, T = 3, 4, 3, 30
SIZES = (1, 10, 100)


class Cell(nn.Module):
    """A module whose attributes are the arrays and layers passed to the constructor."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Case(NamedTuple):
    """A cell: the module with its parameters; the step that `recognise` gets; the same step as a function from (x,
    states) to the list of new states; and a text that describes the cell."""

    module: Any
    step: Any
    plain: Any
    text: str


def sigmoid(x):
    """Return the sigmoid of a NumPy array."""
    return np.exp(-np.logaddexp(0, -x))


FUNCTIONS = {"tanh": np.tanh, "sigmoid": sigmoid, "relu": lambda x: np.maximum(x, 0)}


def lstm(
    x, Wx, Wh, b=0.0, *, h0, c0, gate_order="ifgo", forget_bias=0.0, peephole=None, output_peephole="current", **clip
):
    """Compute one step of an LSTM in NumPy. Return [h, c]."""
    z = dict(zip(gate_order, np.split(x @ Wx.T + h0 @ Wh.T + b, 4, axis=-1), strict=True))
    p = dict(zip(gate_order, np.split(np.zeros(4 * H) if peephole is None else peephole, 4), strict=True))
    i, f = sigmoid(z["i"] + p["i"] * c0), sigmoid(z["f"] + p["f"] * c0 + forget_bias)
    c = f * c0 + i * np.tanh(z["g"] + p["g"] * c0)
    if limit := clip.get("cell_clip"):
        c = np.clip(c, -limit, limit)
    o = sigmoid(z["o"] + p["o"] * (c if output_peephole == "current" else c0))
    return [o * np.tanh(c), c]


def gru(x, Wx, Wh, b=0.0, *, h0, gate_order="rzn", reset="after", flip_z=False, bhn=0.0):
    """Compute one step of a GRU in NumPy. Return [h]."""
    zx = dict(zip(gate_order, np.split(x @ Wx.T + b, 3, axis=-1), strict=True))
    W = dict(zip(gate_order, np.split(Wh, 3), strict=True))
    r, z = (sigmoid(zx[gate] + h0 @ W[gate].T) for gate in "rz")
    n = np.tanh(zx["n"] + ((r * h0) @ W["n"].T if reset == "before" else r * (h0 @ W["n"].T + bhn)))
    return [(1 - z) * h0 + z * n if flip_z else z * h0 + (1 - z) * n]


def rnn(x, Wx, Wh, b=0.0, *, h0, activation="tanh"):
    """Compute one step of a plain RNN in NumPy. Return [h]."""
    return [FUNCTIONS[activation](x @ Wx.T + h0 @ Wh.T + b)]


def worst(line, case, seed=0):
    """Return the largest error of a line, relative to 1 + the value, over `T` steps with random numbers of several
    sizes. Each step starts from the states that the cell gave. A line that does not give the cell's states at a size,
    or gives NaN, has the error infinity. The parameters of the case's module are replaced."""
    random, found = np.random.default_rng(seed), 0.0
    pair = line.startswith("lstm")
    shapes = [(key, array.shape) for key, array in parameters(case.module)]
    with mx.stream(mx.cpu):
        for weights in SIZES:
            for inputs in SIZES:
                arrays = {key: random.normal(size=shape) * weights for key, shape in shapes}
                for key, array in arrays.items():
                    put(case.module, key, mx.array(array, mx.float64))
                names = {"mx": np, "lstm": lstm, "gru": gru, "rnn": rnn} | as_numpy(case.module)
                states = [random.normal(size=(B, H)) * size for size in (1, inputs)[: 1 + pair]]
                for _ in range(T):
                    x = random.normal(size=(B, D)) * inputs
                    first = dict(zip(("h0", "c0"), states, strict=False))
                    call = f"{line[:-1]}, {', '.join(f'{key}={key}' for key in first)})"
                    want = eval(call, names | first | {"x": x})
                    given = [mx.array(each, mx.float64) for each in (x, *states)]
                    got = [np.array(each.astype(mx.float64)) for each in case.plain(*given)]
                    size = 1 + (0 if pair else np.abs(states[0]))
                    for one, other in zip(got, want, strict=True):
                        error = (np.abs(one - other) / (size + np.abs(other))).max()
                        found = max(found, float(error) if np.isfinite(error) else np.inf)
                    states = got
    return found


def parameters(module):
    """Return (key, array) for each parameter of a `Cell` or of a dict, without nesting."""
    return [(key, value) for key, value in module.items() if isinstance(value, mx.array)]


def put(module, key, array):
    """Replace a parameter of a `Cell` or of a dict."""
    module[key] = array


def as_numpy(module):
    """Return the names of a line's parameters, as NumPy arrays: those of the module, or the dict `params`."""
    arrays = {key: np.array(array) for key, array in parameters(module)}
    return arrays if isinstance(module, nn.Module) else {"params": arrays}


def limit(value, k):
    return mx.clip(value, -k, k)


# Operations on a value inside of a cell: name -> function of (value, k), with k drawn from (low, high).
VALUES = {
    "clip": (limit, 0.5, 60),
    "one-sided clip": (mx.minimum, 0.5, 60),
    "factor": (lambda v, k: v * k, 0.9, 1.1),
    "0.9999": (lambda v, k: v * 0.9999, 1, 1),
    "1.0001": (lambda v, k: v * 1.0001, 1, 1),
    "added": (lambda v, k: v + k, 0.0001, 0.1),
    "leak": (lambda v, k: mx.where(v < 0, v * (1 - k), v), 0.001, 0.1),
    "rounded": (lambda v, k: mx.round(v * 256) / 256, 1, 1),
    "mask": (lambda v, k: v * (mx.arange(v.shape[-1]) > 0), 1, 1),
    "zeroed above": (lambda v, k: mx.where(mx.abs(v) > k, 0, v), 1, 30),
    "last unit": (lambda v, k: mx.concatenate([v[..., :-1], v[..., -1:] * k], axis=-1), 0.9, 1.1),
    "stopped": (lambda v, k: mx.stop_gradient(v), 1, 1),
    "16 bits": (lambda v, k: v.astype(mx.bfloat16).astype(v.dtype), 1, 1),
    "random": (lambda v, k: v * mx.random.bernoulli(0.98, v.shape), 1, 1),
}
# Functions in place of an activation.
SIGMOIDS = {
    "hard": (lambda v, k: mx.clip(0.2 * v + 0.5, 0, 1), 1, 1),
    "hard/6": (lambda v, k: mx.clip(v / 6 + 0.5, 0, 1), 1, 1),
    "slope": (lambda v, k: mx.sigmoid(v * k), 0.9, 1.1),
    "clipped": (lambda v, k: mx.sigmoid(limit(v, k)), 1, 8),
    "tails": (lambda v, k: mx.where(mx.abs(v) > k, (v > 0).astype(v.dtype), mx.sigmoid(v)), 2, 8),
    "swapped": (lambda v, k: mx.where(mx.abs(v) > k, mx.sigmoid(-v), mx.sigmoid(v)), 2, 8),
    "shifted": (lambda v, k: mx.sigmoid(v) + k, 1e-4, 0.1),
    "softsign": (lambda v, k: 0.5 + 0.5 * v / (2 + mx.abs(v)), 1, 1),
}
TANHS = {
    "scaled": (lambda v, k: 1.7159 * mx.tanh(2 / 3 * v), 1, 1),
    "slope": (lambda v, k: mx.tanh(v * k), 0.9, 1.1),
    "hard": (lambda v, k: mx.clip(v, -1, 1), 1, 1),
    "relu6": (lambda v, k: mx.clip(v, 0, 6), 1, 1),
    "softsign": (lambda v, k: v / (1 + mx.abs(v)), 1, 1),
    "tails": (lambda v, k: mx.where(mx.abs(v) > k, mx.sign(v), mx.tanh(v)), 1, 4),
    "shrunk": (lambda v, k: mx.tanh(v) - 0.01 * v, 1, 1),
}
RELUS = {
    "relu6": (lambda v, k: mx.clip(v, 0, 6), 1, 1),
    "capped": (lambda v, k: mx.clip(v, 0, k), 1, 1000),
    "leaky": (lambda v, k: mx.where(v < 0, v * k, v), 1e-4, 0.1),
    "softplus": (lambda v, k: mx.logaddexp(v, 0), 1, 1),
    "elu": (lambda v, k: mx.where(v < 0, mx.exp(mx.minimum(v, 0)) - 1, v), 1, 1),
    "shifted": (lambda v, k: mx.maximum(v, k) - k, 0.001, 0.1),
}
PLACES = {
    "lstm": ["x", "h", "c", "Wx", "Wh", "b", "z", "zf", "f", "g", "o", "new c", "tanh c", "new h"],
    "gru": ["x", "h", "Wx", "Wh", "b", "z", "r", "n", "rh", "new h"],
    "rnn": ["x", "h", "Wx", "Wh", "b", "z", "new h"],
}
ACTIVATIONS = {
    "lstm": {"i": SIGMOIDS, "f": SIGMOIDS, "g": TANHS, "o": SIGMOIDS, "tanh c": TANHS},
    "gru": {"r": SIGMOIDS, "u": SIGMOIDS, "n": TANHS},
    "rnn": {"tanh": TANHS, "relu": RELUS, "sigmoid": SIGMOIDS},
}
PLAIN = {"tanh": mx.tanh, "relu": lambda v: mx.maximum(v, 0), "sigmoid": mx.sigmoid}


def lstm_step(w, at, act, x, h, c):
    """Run one step of an LSTM. at(place, value) may change a value; act(place, name, value) applies an activation."""
    x, h, c = at("x", x), at("h", h), at("c", c)
    z = at("z", x @ at("Wx", w.Wx).T + h @ at("Wh", w.Wh).T + at("b", w.b))
    i, f, g, o = mx.split(z, 4, axis=-1)
    i, f = act("i", "sigmoid", i), at("f", act("f", "sigmoid", at("zf", f)))
    c = at("new c", f * c + i * at("g", act("g", "tanh", g)))
    return [at("new h", at("o", act("o", "sigmoid", o)) * at("tanh c", act("tanh c", "tanh", c))), c]


def gru_step(w, at, act, x, h):
    """Run one step of a GRU, as `lstm_step` does for an LSTM."""
    x, h = at("x", x), at("h", h)
    a = at("z", x @ at("Wx", w.Wx).T + at("b", w.b))
    W = mx.split(at("Wh", w.Wh), 3)
    xr, xz, xn = mx.split(a, 3, axis=-1)
    r, z = at("r", act("r", "sigmoid", xr + h @ W[0].T)), act("u", "sigmoid", xz + h @ W[1].T)
    n = at("n", act("n", "tanh", xn + at("rh", r * (h @ W[2].T))))
    return [at("new h", z * h + (1 - z) * n)]


def rnn_step(w, at, act, x, h, activation="relu"):
    """Run one step of a plain RNN, as `lstm_step` does for an LSTM."""
    z = at("z", at("x", x) @ at("Wx", w.Wx).T + at("h", h) @ at("Wh", w.Wh).T + at("b", w.b))
    return [at("new h", act(activation, activation, z))]


STEPS = {"lstm": (lstm_step, 4), "gru": (gru_step, 3), "rnn": (rnn_step, 1)}


def near(seed):
    """Return a random cell with one slip as a `Case`."""
    random = np.random.default_rng([seed, 1])
    op = str(random.choice(["lstm", "lstm", "gru", "rnn"]))
    if random.random() < 0.6:
        place, table = str(random.choice(PLACES[op])), VALUES
    else:
        place = str(random.choice(list(ACTIVATIONS[op])))
        table = ACTIVATIONS[op][place]
    return slipped(op, place, str(random.choice(list(table))), random, table is not VALUES)


def slipped(op, place, name, random, activation):
    """Return an LSTM, GRU or RNN cell as a `Case`, with the slip `name` of a value or of an activation at a place."""
    table = ACTIVATIONS[op][place] if activation else VALUES
    change, low, high = table[name]
    k = float(np.exp(random.uniform(np.log(low), np.log(high))))
    step, gates = STEPS[op]
    w = Cell(Wx=mx.zeros((gates * H, D)), Wh=mx.zeros((gates * H, H)), b=mx.zeros(gates * H))

    def at(where, value):
        return change(value, k) if where == place and not activation else value

    def act(where, kind, value):
        return change(value, k) if where == place and activation else PLAIN[kind](value)

    more = [place if activation else str(random.choice(list(PLAIN)))] if op == "rnn" else []

    def plain(x, *states):
        return step(w, at, act, x, *states, *more)

    def as_tuple(x, state):
        new = plain(x, *(state if op == "lstm" else [state]))
        return tuple(new) if op == "lstm" else new[0]

    kind = "activation" if activation else "value"
    return Case(w, as_tuple, plain, f"{op} {' '.join(more)} {kind} {place}: {name} {k:.6g}")
