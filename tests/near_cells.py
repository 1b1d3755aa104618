"""Random recurrent cells for the tests of `recognise`, and a judge of the lines that it returns.

`near(seed)` makes an LSTM, GRU or RNN cell with one slip, such as a limit on c or a factor 0.9999; `equal(seed)` one
that equals a call, written in a random way. The judge evaluates a line in NumPy with the formulas of this file."""

from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

D, H, B, T = 3, 4, 3, 10
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
    p = dict(zip(gate_order, np.split(np.zeros(len(Wh)) if peephole is None else peephole, 4), strict=True))
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


def worst(line, case, D=D, H=H):
    """Return the largest error of a line, relative to 1 + the value, over `T` steps with random numbers of several
    sizes. Each step starts from the states that the cell gave. NaN and infinity have the error infinity. The parameters
    of the case's module are replaced."""
    random, found = np.random.default_rng(5), 0.0
    pair = line.startswith("lstm")
    with mx.stream(mx.cpu):
        for weights, inputs in product(SIZES, SIZES):
            fill(case.module, random, weights)
            mirror = mirrored(case.module)
            names = {"mx": np, "lstm": lstm, "gru": gru, "rnn": rnn, "params": mirror, "module": mirror} | mirror
            states = [random.normal(size=(B, H)) * size for size in (1, inputs)[: 1 + pair]]
            for _ in range(T):
                x = random.normal(size=(B, D)) * inputs
                first = dict(zip(("h0", "c0"), states, strict=False))
                want = eval(f"{line[:-1]}, {', '.join(f'{key}={key}' for key in first)})", names | first | {"x": x})
                got = [double(each) for each in case.plain(*[mx.array(each, mx.float64) for each in (x, *states)])]
                # h + z (n - h) has the error of z times h.
                size = 1 + (0 if pair else np.abs(states[0]))
                for one, other in zip(got, want, strict=True):
                    error = (np.abs(one - other) / (size + np.abs(other))).max()
                    found = max(found, float(error) if np.isfinite(error) else np.inf)
                states = got
    return found


def double(array):
    """Return an MLX array as NumPy's float64."""
    return np.array(array.astype(mx.float64))


def fill(node, random, size):
    """Replace all arrays in a tree of modules, dicts and lists by random ones in float64, except those that MLX does
    not count as parameters: attributes whose names begin with an underscore."""
    for key, child in enumerate(node) if isinstance(node, list) else list(node.items()):
        if isinstance(key, str) and key.startswith("_"):
            continue
        if isinstance(child, mx.array):
            node[key] = mx.array(random.normal(size=child.shape) * size, mx.float64)
        elif isinstance(child, (dict, list)):
            fill(child, random, size)


class Mirror(dict):
    """A dict whose items are attributes, too."""

    __getattr__ = dict.__getitem__


def mirrored(node):
    """Return a tree of modules, dicts, lists and arrays with NumPy arrays."""
    if isinstance(node, mx.array):
        return np.array(node)
    if isinstance(node, list):
        return [mirrored(each) for each in node]
    if isinstance(node, dict):
        return Mirror({key: mirrored(each) for key, each in node.items()})
    return node


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


def slipped(op, place, name, random, activation, k=None):
    """Return an LSTM, GRU or RNN cell as a `Case`, with the slip `name` of a value or of an activation at a place. k:
    the number in the slip. Default: random."""
    table = ACTIVATIONS[op][place] if activation else VALUES
    change, low, high = table[name]
    k = float(np.exp(random.uniform(np.log(low), np.log(high)))) if k is None else k
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


def through(value, k):
    """Return a value clipped to +-k, whose gradient ignores the clip."""
    return value + mx.stop_gradient(mx.clip(value, -k, k) - value)


# How a step may take and return the states. Each entry makes the step for `recognise` of the step (x, *states) -> list.
PAIRS = {
    "(x, (h, c)) -> h, c": lambda plain: lambda x, s: tuple(plain(x, *s)),
    "(x, (h, c)) -> out, (h, c)": lambda plain: lambda x, s: (lambda new: (new[0], tuple(new)))(plain(x, *s)),
    "(x, [c, h]) -> out, [c, h]": lambda plain: lambda x, s: (lambda new: (new[0], new[::-1]))(plain(x, *s[::-1])),
    "((c, h), x) -> (c, h), out": lambda plain: (
        lambda s, x: (lambda new: (tuple(new[::-1]), new[0]))(plain(x, s.h, s.c))
    ),
    "(x, h, c) -> h, c": lambda plain: lambda x, h, c: tuple(plain(x, h, c)),
    "(x, c, h) -> [c, h]": lambda plain: lambda x, c, h: plain(x, h, c)[::-1],
}
SINGLES = {
    "(x, h) -> h": lambda plain: lambda x, h: plain(x, h)[0],
    "(x, h) -> out, h": lambda plain: lambda x, h: tuple(plain(x, h) * 2),
    "(h, x) -> h": lambda plain: lambda h, x: plain(x, h)[0],
    "(x, h) -> [h]": lambda plain: lambda x, h: plain(x, h),
    "(x, h) -> scores, h": lambda plain: lambda x, h: (plain(x, h)[0][:, :1], plain(x, h)[0]),
}


def weights_of(random, gates):
    """Return (module, weight, text): the parameters of a cell with these gates in a random layout, and a function
    weight(kind, gate) of kind "x", "h", "b" or "bh", which returns one gate's block or 0."""
    n, layout = len(gates), str(random.choice(["joined", "separate", "one per gate", "stacked"]))
    order = "".join(random.permutation(list(gates)))
    turned, h_first, biases = random.random() < 0.5, random.random() < 0.5, int(random.integers(3))
    shapes = {"x": (H, D), "h": (H, H), "b": (H,), "bh": (H,)}
    kinds = ["x", "h", "b", "bh"][: 2 + biases]
    if layout == "joined":
        kinds, shapes["xh"] = ["xh", *kinds[2:]], (H, D + H)
    if layout == "one per gate":
        arrays = {f"{kind}_{gate}": shapes[kind] for kind in kinds for gate in gates}
    elif layout == "stacked":
        arrays = {f"W{kind}": (n, *shapes[kind]) for kind in kinds}
    else:
        arrays = {f"W{kind}": (n * shapes[kind][0], *shapes[kind][1:]) for kind in kinds}
    one = layout in ("stacked", "one per gate")  # the array, or each of its items, is the matrix of one gate
    for key, shape in arrays.items():
        if turned and "b" not in key:
            arrays[key] = (*shape[:-2], *shape[-2:][::-1])
    matrices = {key: mx.zeros(shape) for key, shape in arrays.items()}
    module = Cell(**matrices) if random.random() < 0.7 else matrices

    def weight(kind, gate):
        """Return the block of a gate, [H, D], [H, H] or [H], or 0 if there is none."""
        stored = "xh" if layout == "joined" and kind in "xh" else kind
        if stored not in kinds:
            return 0
        row = order.index(gate)
        array = module[f"{stored}_{gate}" if layout == "one per gate" else f"W{stored}"]
        array = array[row] if layout == "stacked" else array
        array = array.T if turned and array.ndim > 1 else array
        array = array if one else array[row * H : (row + 1) * H]
        first, width = ("h", H) if h_first else ("x", D)
        if stored != "xh":
            return array
        return array[:, :width] if kind == first else array[:, width:]

    return module, weight, f"{layout} {order} turned={turned} h_first={h_first} biases={biases}"


def equal(seed):
    """Return a random cell that equals a call of `lstm`, `gru` or `rnn` as a `Case`."""
    random = np.random.default_rng([seed, 2])
    op = str(random.choice(["lstm", "lstm", "gru", "rnn"]))
    module, weight, text = weights_of(random, {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}[op])
    absent = {("h", str(random.choice(list("ifgorzn"))))} if random.random() < 0.3 else set()

    def part(kind, gate, value=None):
        """Return the part of a preactivation that comes from x or h, with its bias."""
        bias = weight("b" if kind == "x" else "bh", gate)
        return bias if (kind, gate) in absent else value @ weight(kind, gate).T + bias

    options: dict[str, Any] = {}
    if op == "lstm":
        options["bias"] = float(random.choice([0, 1, -0.5, 2.25, 0.1]))
        options["clip"] = float(random.choice([0, 0, 0.7, 3, 50]))
        if peep := str(random.choice(["", "", "old", "new"])):
            for gate in "ifo":
                module[f"p_{gate}"] = mx.zeros(H)
        options["clip_gradient"] = str(random.choice(["through", "zero"]))

        def plain(x, h, c):
            z = {gate: part("x", gate, x) + part("h", gate, h) for gate in "ifgo"}
            look = lambda gate, c: module[f"p_{gate}"] * c if peep else 0  # noqa: E731
            new = mx.sigmoid(z["f"] + options["bias"] + look("f", c)) * c
            new = new + mx.sigmoid(z["i"] + look("i", c)) * mx.tanh(z["g"])
            clipped = through if options["clip_gradient"] == "through" else limit
            new = clipped(new, options["clip"]) if options["clip"] else new
            return [mx.sigmoid(z["o"] + look("o", c if peep == "old" else new)) * mx.tanh(new), new]

        options["peephole"] = peep
    elif op == "gru":
        options["before"], options["flip"] = random.random() < 0.5, random.random() < 0.5

        def plain(x, h):
            r, z = (mx.sigmoid(part("x", gate, x) + part("h", gate, h)) for gate in "rz")
            inner = part("h", "n", r * h) if options["before"] else r * part("h", "n", h)
            n = mx.tanh(part("x", "n", x) + inner)
            return [h + z * (n - h) if options["flip"] else z * h + (1 - z) * n]
    else:
        options["activation"] = str(random.choice(list(PLAIN)))

        def plain(x, h):
            return [PLAIN[options["activation"]](part("x", "h", x) + part("h", "h", h))]

    forms = PAIRS if op == "lstm" else SINGLES
    form = str(random.choice(list(forms)))
    return Case(module, forms[form](plain), plain, f"{op} {options} {text} absent={absent} {form}")
