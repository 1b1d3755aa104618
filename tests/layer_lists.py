"""Random lists of recurrent layers of every kind, and a reference for them: plain loops in MLX, written without any
function of `mlx_lstm`.

A layer is described by a `Spec`: its kind, its arrays, and the form in which the library gets it (a layer of `mlx.nn`,
a dict, a layer with a cell of one's own, and so on). The reference reads the arrays, never the layer.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn
import numpy as np

import mlx_lstm.nn
import mlx_lstm.torch

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
FUNCTIONS = {"tanh": mlx.nn.tanh, "relu": mlx.nn.relu, "sigmoid": mx.sigmoid}


def sigmoid(x):
    """Return the sigmoid. In float64 MLX's exp and sigmoid are as inexact as in float32, but its tanh is exact."""
    return 0.5 + 0.5 * mx.tanh(0.5 * x) if x.dtype == mx.float64 else mx.sigmoid(x)


ACTS = {"tanh": mx.tanh, "relu": lambda x: mx.maximum(x, 0), "sigmoid": sigmoid}

# --- Cells of one's own, each with the options of its layer. The reference calls them, too ---------------------------


def leaky(a, state, w):
    return (mx.tanh(a[0] + w * state[0]),)


def gated(a, state):
    u = sigmoid(a[0]) * state[1] + (1 - sigmoid(a[0])) * mx.tanh(a[1])
    return mx.tanh(u), u


def delayed(a, state):
    """Shift the states: each new state is the old state before it, so the order of writing matters."""
    return mx.tanh(a[0]) + 0.5 * state[2], state[0] * 0.9, state[1] * 1.1


def reset_after(a, state, w):
    (r, z, n), h = [sigmoid(x + p) for x, p in a[:2]] + [a[2]], state[0]
    return (z * h + (1 - z) * mx.tanh(n[0] + r * (n[1] + w)),)


def peeping(a, state, w0, w1):
    c = sigmoid(a[1] + w1 * state[1]) * state[1] + sigmoid(a[0] + w0 * state[1]) * mx.tanh(a[2])
    return sigmoid(a[3]) * mx.tanh(c), c


def attended(a, state, u, v):
    return mx.tanh(a[0]) * u + (1 - u) * state[0] + v * 0.1, state[1] * 0.5 + u * state[0]


OWN = {
    leaky: {"gates": 1, "params": 1},
    gated: {"gates": 2, "states": 2},
    delayed: {"gates": 1, "states": 3},
    reset_after: {"gates": 3, "params": 1, "apart": True},
    peeping: {"gates": 4, "states": 2, "params": 2},
}
FREE = {leaky: OWN[leaky], gated: OWN[gated]}
"""Cells that also run without recurrent weights, each unit by itself."""

WITH_INPUTS = {attended: {"gates": 1, "states": 2, "inputs": 2}}


# --- The reference ---------------------------------------------------------------------------------------------------


def step_of(spec, p, x, states, inputs):
    """Return the new states of one step. p: the arrays of one direction. x [B, D], states: a list of arrays [B, H]."""
    z = x @ p["Wx"].T
    z = z + p["b"] if "b" in p else z
    q = states[0] @ p["Wh"].T if "Wh" in p else mx.zeros_like(z)
    if spec.kind == "own":
        options = (OWN | WITH_INPUTS)[spec.cell]
        zs, qs = (mx.split(each, options["gates"], axis=-1) for each in (z, q))
        both = list(zip(zs, qs, strict=True)) if options.get("apart") else [a + b for a, b in zip(zs, qs, strict=True)]
        return list(spec.cell(both, states, *inputs, *(p[f"w{n}"] for n in range(options.get("params", 0)))))
    if spec.kind == "lstm":
        i, f, g, o = mx.split(z + q, 4, axis=-1)
        c = sigmoid(f) * states[1] + sigmoid(i) * mx.tanh(g)
        h = sigmoid(o) * mx.tanh(c)
        return [h @ p["Wp"].T if "Wp" in p else h, c]
    if spec.kind == "gru":
        (zr, zz, zn), (qr, qz, qn) = mx.split(z, 3, axis=-1), mx.split(q, 3, axis=-1)
        r, u = sigmoid(zr + qr), sigmoid(zz + qz)
        return [(1 - u) * mx.tanh(zn + r * (qn + p["bhn"] if "bhn" in p else qn)) + u * states[0]]
    return [ACTS[spec.cell](z + q)]


def one_way(spec, p, x, states, back, lengths=None, keep=None, hold=None, inputs=()):
    """Run one direction over x [B, T, D]. Return its output [B, T, P] and its last states."""
    B, T, _ = x.shape
    out = [None] * T
    for t in reversed(range(T)) if back else range(T):
        ended = mx.array(np.zeros(B, bool) if lengths is None else np.array(lengths) <= t)[:, None]
        held = ended if hold is None else ended | mx.array(hold[:, t])[:, None]
        kept = states
        if keep is not None:
            kept = [mx.where(ended, state, state * keep[:, t, None]) for state in states]
        new = step_of(spec, p, x[:, t], kept, [each[:, t] for each in inputs])
        states = [mx.where(held, old, each) for old, each in zip(kept, new, strict=True)]
        out[t] = mx.where(ended, mx.zeros_like(states[0]), states[0])
    return mx.stack(out, axis=1), states


def in_ways(spec, arrays):
    """Return the arrays of each direction of a layer, which are drawn under the names Wx0, Wx1 and so on."""
    return [{name[:-1]: array for name, array in arrays.items() if name[-1] == str(d)} for d in range(spec.ways)]


def reference(case, arrays, x, states, keep=None, inputs=()):
    """Return [output, last states ...] of a list of layers, in the dtype of the arguments. arrays: a list of dicts, one
    per layer. states: for each layer and direction a list of arrays [B, H]."""
    G, last = case.groups, []
    for n in range(0, len(case.specs), G):
        outputs = []
        for g, part in enumerate(mx.split(x, G, axis=-1) if G > 1 else [x]):
            spec = case.specs[n + g]
            ways = in_ways(spec, arrays[n + g])
            found = []
            for d, p in enumerate(ways):
                first = states[len(last)]
                back = bool(d) or case.back
                y, end = one_way(spec, p, part, first, back, case.lengths, keep, case.hold, inputs)
                found.append(y)
                last.append(end)
            outputs.append(sum(found[1:], found[0]) if case.merge == "sum" else mx.concatenate(found, axis=-1))
        x = mx.concatenate(outputs, axis=-1)
        if case.between is not None and n + G < len(case.specs):
            x = case.between(n // G, x)
    return [x, *(mx.stack(each) for each in zip(*last, strict=True))]


# --- The layers that the library gets --------------------------------------------------------------------------------


class Spec(NamedTuple):
    """A layer. kind: lstm, gru, rnn or own. cell: the activation of a plain RNN or the function of one's own. ways: the
    number of directions that `arrays` has. arrays: {name and direction: array}, such as Wx0."""

    kind: str
    form: str
    cell: Any
    ways: int
    H: int
    arrays: dict
    bits: int = 0


class Foreign(mlx.nn.Module):
    """A module of another package with the parameter names of `mlx.nn`."""

    def __init__(self, arrays):
        super().__init__()
        self.hidden_size, self.name, self.sizes = 3, "foreign", [1, 2]
        for name, array in arrays.items():
            self[name] = array

    def __call__(self, x):
        raise NotImplementedError


OF_MLX = {"lstm": ("Wx", "Wh", "bias"), "gru": ("Wx", "Wh", "b"), "rnn": ("Wxh", "Whh", "bias")}


def named(spec, arrays, d):
    """Return the arrays of one direction by the names of `mlx.nn`."""
    names = dict(zip(("Wx", "Wh", "b"), OF_MLX[spec.kind], strict=True)) | {"bhn": "bhn"}
    own = in_ways(spec, arrays)[d]
    return {names[name]: array for name, array in own.items()}


def two_biases(own, kind):
    """Return the biases of torch's formats: of the input's product and of the recurrent product."""
    if "b" not in own:
        return {}
    zeros = mx.zeros_like(own["b"])
    bhn = mx.concatenate([zeros[: -own["bhn"].shape[0]], own["bhn"]]) if kind == "gru" else 0.25 * own["b"]
    return {"bias_ih": own["b"] if kind == "gru" else 0.75 * own["b"], "bias_hh": bhn}


def built(spec, arrays):
    """Return the layers of one `Spec` for the library, made of these arrays: one object, or one per direction."""
    ways = in_ways(spec, arrays)
    if spec.kind == "own":
        return [own_layer(spec, ways)]
    if spec.form == "torch":
        words = {}
        for own, end in zip(ways, ("", "_reverse"), strict=False):
            each = {"weight_ih": own["Wx"], "weight_hh": own["Wh"], **two_biases(own, spec.kind)}
            each |= {"weight_hr": own["Wp"]} if "Wp" in own else {}
            words |= {f"{name}_l0{end}": array for name, array in each.items()}
        options = {"nonlinearity": spec.cell} if spec.kind == "rnn" else {}
        options |= {"proj_size": ways[0]["Wp"].shape[0]} if "Wp" in ways[0] else {}
        kind = getattr(mlx_lstm.torch, spec.kind.upper())
        sizes = ways[0]["Wx"].shape[1], spec.H
        layer = kind(*sizes, bias="b" in ways[0], bidirectional=spec.ways == 2, dropout=0.5, **options)
        for name, array in words.items():
            assert layer[name].shape == array.shape, name
            layer[name] = array
        return [layer.eval() if spec.bits % 2 else layer]  # dropout acts between layers only
    return [one_object(spec, named(spec, arrays, d), ways[d]) for d in range(spec.ways)]


def one_object(spec, words, own):
    """Return an object with the arrays of one direction, in the form that `spec` names."""
    act = {"nonlinearity": FUNCTIONS[spec.cell]} if spec.kind == "rnn" else {}
    if spec.form == "dict":
        return words | act
    if spec.form == "object":
        return SimpleNamespace(**words, **act, title="client", forget_bias=0.0, _hidden=[mx.ones(3)])
    if spec.form == "foreign":
        layer = Foreign(words)
        if act:
            layer.nonlinearity = act["nonlinearity"]
        return layer
    if spec.form == "two biases" and "b" in own:
        return {"Wx": own["Wx"], "Wh": own["Wh"], **two_biases(own, spec.kind), **act}
    package = mlx_lstm.nn if spec.form in ("ours", "quantized") else mlx.nn
    D = own["Wx"].shape[1]
    layer = getattr(package, spec.kind.upper())(D, spec.H, "b" in own, **act)
    for name, array in words.items():
        assert layer[name].shape == array.shape, name
        layer[name] = array
    if spec.form == "quantized":
        layer = getattr(mlx_lstm.nn, f"Quantized{spec.kind.upper()}").from_layer(layer, 32, 8)
    return layer


def own_layer(spec, ways):
    """Return a layer `Pointwise` with the arrays of one or both directions."""
    options = dict((OWN | WITH_INPUTS)[spec.cell])
    options.pop("inputs", None)
    more = {"bias": "b" in ways[0], "recurrent": "Wh" in ways[0], "bidirectional": spec.ways == 2}
    layer = mlx_lstm.nn.Pointwise(spec.cell, ways[0]["Wx"].shape[1], spec.H, **options, **more)
    join = {"Wx": mx.concatenate, "Wh": mx.stack, "b": mx.concatenate}
    for name, function in join.items():
        if name in ways[0]:
            array = ways[0][name] if spec.ways == 1 else function([own[name] for own in ways])
            layer["bias" if name == "b" else name] = array
    layer.params = [
        mx.concatenate([own[f"w{n}"] for own in ways]) if spec.ways == 2 else ways[0][f"w{n}"]
        for n in range(options.get("params", 0))
    ]
    return layer


# --- Random cases ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A list of layers with the options of a call of `stack`. back: all layers run in reverse. apart: with both
    directions, whether `stack` gets two lists of layers."""

    specs: list
    x: mx.array
    batch: tuple
    states: list | None
    ways: int
    back: bool
    groups: int
    merge: str
    between: Any
    lengths: list | None
    keep: Any
    hold: Any
    apart: bool
    dtype: Any


def pick(rng, values):
    return values[rng.integers(len(values))]


def numbers(rng, shape, dtype, scale=1.0):
    """Return random normal numbers that the dtype holds exactly."""
    return mx.array(rng.normal(size=shape) * scale, mx.float64).astype(dtype)


FORMS = ("mlx", "ours", "dict", "object", "foreign", "two biases", "torch")
DTYPES = (mx.float32,) * 6 + (mx.float16, mx.bfloat16, mx.float64)


def any_spec(rng, kind, cell, form, ways, D, H, width, P, bias, dtype):
    """Return a layer. D: the features that it reads; width: those of h, which Wh reads; P: the width of a projection or
    0. bias: whether it has one."""
    gates = OWN[cell]["gates"] if kind == "own" and cell in OWN else GATES.get(kind) or WITH_INPUTS[cell]["gates"]
    shapes = {"Wx": (gates * H, D), "Wh": (gates * H, width), "b": (gates * H,)}
    shapes |= {"bhn": (H,)} if kind == "gru" else {}
    shapes |= {"Wp": (P, H)} if P else {}
    if kind == "own":
        options = (OWN | WITH_INPUTS)[cell]
        shapes |= {f"w{n}": (H,) for n in range(options.get("params", 0))}
        if form == "free":
            del shapes["Wh"]
    if not bias:
        shapes = {name: shape for name, shape in shapes.items() if name not in ("b", "bhn")}
    arrays = {
        f"{name}{d}": numbers(rng, shape, dtype, 0.6 / shape[-1] ** 0.5 if len(shape) == 2 else 0.4)
        for d in range(ways)
        for name, shape in shapes.items()
    }
    return Spec(kind, form, cell, ways, H, arrays, int(rng.integers(10)))


def known(spec, arrays):
    """Return the arrays as the reference reads them: quantized weights as the numbers that they stand for."""
    if spec.form != "quantized":
        return arrays
    packs = [name for name, array in arrays.items() if name[0] == "W" and array.shape[-1] % 32 == 0]
    whole = {name: mx.dequantize(*mx.quantize(arrays[name], 32, 8), group_size=32, bits=8) for name in packs}
    return arrays | whole


def any_case(rng, streams=False):
    """Return a random `Case`. streams: only what a stepper runs: one direction, forward, no groups, nothing between."""
    kind = pick(rng, ("lstm", "lstm", "gru", "rnn", "own", "own"))
    quantized = kind != "own" and rng.random() < 0.1
    ways = 1 if streams else pick(rng, (1, 1, 2))
    back = not streams and ways == 1 and rng.random() < 0.2
    H = 32 if quantized else pick(rng, (1, 2, 3, 5))
    K, G = pick(rng, (1, 1, 2, 3)), 1 if streams else pick(rng, (1, 1, 1, 2))
    P = 1 if kind == "lstm" and H > 1 and not quantized and rng.random() < 0.15 else 0
    width, merge = P or H, "sum" if not streams and rng.random() < 0.3 else "concat"
    D, batch, T = pick(rng, (1, 2, 4)), pick(rng, ((), (1,), (2,), (3,), (2, 2))), pick(rng, (1, 2, 3, 5))
    if quantized and rng.random() < 0.5:
        D = 32
    both = pick(rng, DTYPES)
    mixed = rng.random() < 0.2
    dtypes = (mx.float32, mx.float32) if quantized else (mx.float16, mx.bfloat16, mx.float32)
    of_layer = (lambda: pick(rng, dtypes)) if mixed or quantized else (lambda: both)
    read = width * (ways if merge == "concat" else 1)
    # A layer of torch holds both directions in one object; `stack` takes no list that mixes it with other layers then.
    all_torch = ways == 2 and not quantized and kind != "own" and (P > 0 or rng.random() < 0.25)
    specs = []
    count = pick(rng, (1, 2, 2, 3))
    cells = [cell for cell in OWN if OWN[cell].get("states", 1) == count]
    for n in range(K * G):
        cell = pick(rng, cells) if kind == "own" else pick(rng, list(ACTS)) if kind == "rnn" else None
        form = "quantized" if quantized else "torch" if P else pick(rng, FORMS)
        form = "ours" if kind == "own" else form
        if kind == "own" and cell in FREE and rng.random() < 0.2:
            form = "free"
        if kind != "own" and not quantized and ways == 2:
            form = "torch" if all_torch else pick(rng, FORMS[:-1])
        if form == "torch" and cell == "sigmoid":
            cell = "tanh"
        if form == "two biases" and kind == "rnn":
            form = "ours"
        bias = rng.random() < 0.7
        specs.append(any_spec(rng, kind, cell, form, ways, D if n < G else read, H, width, P, bias, of_layer()))
    x = numbers(rng, (*batch, T, D * G), mx.float32 if quantized else pick(rng, dtypes) if mixed else both)
    B = int(np.prod(batch))
    arrays = [array for spec in specs for array in spec.arrays.values()]
    dtype = mx.result_type(x, *arrays)
    widths = [width] + [H] * (count_of_states(specs[0]) - 1)
    states = (
        [[numbers(rng, (B, w), dtype) for w in widths] for _ in range(K * G * ways)] if rng.random() < 0.6 else None
    )
    lengths = rng.integers(0, T + 1, B).tolist() if not streams and len(batch) == 1 and rng.random() < 0.3 else None
    keep = mx.array(rng.integers(0, 5, (B, T)) / 4, mx.float32) if rng.random() < 0.3 else None
    hold = rng.random((B, T)) < 0.3 if not streams and rng.random() < 0.2 else None
    between = None if streams else pick(rng, (None, None, lambda n, x: x + x * x, lambda n, x: 2 * x))
    apart = ways == 2 and kind != "own" and not all_torch
    if streams:
        dtype = mx.result_type(*arrays)
        x = x.astype(dtype)
        states = None if states is None else [[state.astype(dtype) for state in way] for way in states]
    return Case(specs, x, batch, states, ways, back, G, merge, between, lengths, keep, hold, apart, dtype)


def count_of_states(spec):
    """Return the number of states of a layer."""
    return (OWN | WITH_INPUTS)[spec.cell].get("states", 1) if spec.kind == "own" else 1 + (spec.kind == "lstm")


def states_of(case, dtype):
    """Return the first states for the reference: zeros where the case has none."""
    if case.states is not None:
        return [[state.astype(dtype) for state in way] for way in case.states]
    B, spec = int(np.prod(case.batch)), case.specs[0]
    width = spec.arrays["Wp0"].shape[0] if "Wp0" in spec.arrays else spec.H
    widths = [width] + [spec.H] * (count_of_states(spec) - 1)
    return [[mx.zeros((B, w), dtype) for w in widths] for _ in range(len(case.specs) * case.ways)]
