"""Random calls of `mlx_lstm.pointwise` as users may write them, and a reference for their results.

The reference shares no code with the library. It calls the cell's function step by step on plain MLX arrays of float64,
and each batch item visits only the steps that run for it. The results are added to one number, so that MLX's gradient
of this number is also right where a cell returns one array as two states, or an input unchanged.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from cases import to_numpy

from mlx_lstm import Norm, pointwise

UNARY = (
    *(
        "mx.tanh({x})",
        "mx.sigmoid({x})",
        "mx.sin({x} + 0.5)",
        "mx.cos({x})",
        "mx.arctan({x})",
        "mx.square({x})",
        "{x} ** 2",
    ),
    *("mx.exp(mx.minimum({x}, 1.0))", "mx.expm1(mx.minimum({x}, 1.0))", "mx.log1p({x} * {x})", "mx.erf({x})"),
    *("mx.rsqrt(1 + {x} * {x})", "mx.sqrt(mx.abs({x}))", "mx.log(mx.abs({x}) + 0.5)", "mx.logaddexp({x}, 0.0)"),
    *("mx.arcsinh({x})", "mx.sinh(mx.clip({x}, -2.0, 2.0))", "mx.arccos(mx.clip({x}, -0.5, 0.5))", "{x} ** 3"),
    *(
        "nn.silu({x})",
        "nn.softplus({x})",
        "nn.leaky_relu({x})",
        "mx.power(mx.abs({x}) + 0.1, 1.5)",
        "1 / (1 + {x} ** 2)",
    ),
)
"""Operations of one number whose results are rounded."""

EXACT_UNARY = (
    *("-{x}", "mx.abs({x})", "mx.sign({x})", "mx.floor({x})", "mx.ceil({x})", "mx.round({x})", "mx.maximum({x}, 0.0)"),
    *("nn.relu({x})", "mx.clip({x}, -1.0, 1.0)", "mx.stop_gradient({x})", "1 - {x}", "0.5 * {x}", "nn.relu6({x})"),
    *("mx.where({x} > 0, {x}, 0.5)", "mx.where({x} == 0, 1.0, {x})", "{x} // 0.5", "{x} % 1.5", "{x} // 1"),
    *("mx.remainder({x}, -1.0)", "mx.where(mx.logical_not({x} >= 0), {x}, -0.5)", "mx.minimum({x}, {x})", "{x} - {x}"),
    *("mx.broadcast_to({x}, {x}.shape)", "({x} != 0) * {x}", "mx.where(({x} > 0) | ({x} < -1), {x}, 1.0)"),
)
EXACT_BINARY = (
    *("{x} + {y}", "{x} - {y}", "mx.maximum({x}, {y})", "mx.minimum({x}, {y})", "mx.where({x} > {y}, {x}, {y})"),
    *("mx.where({x} >= {y}, {x}, -{y})", "mx.where({x} == {y}, {x}, 0.5)", "mx.where(({x} > 0) & ({y} < 1), {x}, {y})"),
    *("{x} * mx.sign({y})", "{x} * ({y} <= 0)", "mx.remainder({x}, mx.abs({y}) + 1)", "{x} // (mx.abs({y}) + 0.5)"),
    *("{x} * 0 + {y}", "mx.maximum({x}, 0.0) - mx.maximum({y}, 0.0)", "mx.where({x}.astype(mx.bool_), {y}, {x})"),
)
"""Operations whose results are exact for small multiples of 1/4, so that ties stay ties on every engine."""

BINARY = (
    *("{x} * {y}", "{x} / (1 + {y} * {y})", "mx.logaddexp({x}, {y})", "mx.arctan2({x}, {y})", "{x} * mx.tanh({y})"),
    *(
        "mx.where({x} > {y}, {x}, {y} * {y})",
        "mx.sigmoid({x}) * {y} + (1 - mx.sigmoid({x})) * {x}",
        "{x} % (1 + {y} ** 2)",
    ),
)

STATES = ("mx.zeros_like({x})", "mx.full({x}.shape, 0.5)", "mx.array(0.5)", "mx.stop_gradient({x})")
"""States that do not depend on the values of a cell, or whose derivative is 0."""


class Case(NamedTuple):
    """A random call. text: the source of the cell. arrays: {name: NumPy array of float64}. places: {argument: name of
    the array passed there}; one array may be passed at several places. exact: whether no operation rounds."""

    text: str
    gates: int
    states: int
    inputs: int
    params: int
    options: dict[str, Any]
    arrays: dict[str, np.ndarray]
    places: dict[str, str]
    cotangents: list[np.ndarray]
    dtype: mx.Dtype
    exact: bool

    @property
    def cell(self):
        space = {"mx": mx, "nn": nn}
        exec(self.text, space)
        return space["cell"]


def draw_text(rng, gates, states, inputs, params, apart, exact):
    """Return the source of a random cell: random operations on random values, then states of every kind: results,
    inputs, parameters, gates, states, constants, and the same array twice."""
    a = [f"a[{k}]{part}" for k in range(gates) for part in (("[0]", "[1]") if apart else ("",))]
    given = [*(f"s[{k}]" for k in range(states)), *(f"more[{k}]" for k in range(inputs + params))]
    values, lines = [*a, *given], ["def cell(a, s, *more):"]
    one, two = (EXACT_UNARY, EXACT_BINARY) if exact else (UNARY + EXACT_UNARY, BINARY * 2 + EXACT_BINARY)
    for k in range(int(rng.integers(0, 5 if exact else 9))):
        x, y = (str(rng.choice(values[-6:] if rng.random() < 0.5 else values)) for _ in "xy")
        op = str(rng.choice(one if rng.random() < 0.45 else two))
        lines.append(f"    v{k} = {op.format(x=x, y=y)}")
        values.append(f"v{k}")
    ends = []
    for _ in range(states):
        kind, x = rng.random(), str(rng.choice(values[-4:]))
        if kind < 0.45:
            ends.append(x if exact or kind < 0.1 else f"mx.tanh({x})")
        elif kind < 0.6 and ends:
            ends.append(str(rng.choice(ends)))
        elif kind < 0.7:
            ends.append(str(rng.choice(STATES)).format(x=x))
        else:
            ends.append(str(rng.choice([*given, *a])))
    # A state that is returned twice is computed once.
    lines += [f"    r{k} = {end}" for k, end in enumerate(dict.fromkeys(ends))]
    names = {end: f"r{k}" for k, end in enumerate(dict.fromkeys(ends))}
    return "\n".join([*lines, f"    return {', '.join(names[end] for end in ends)}{',' * (states == 1)}", ""])


def draw_case(seed):
    """Return the random case with this number."""
    rng = np.random.default_rng(seed)
    exact = bool(rng.random() < 0.4)
    sizes = T, B, _, H = tuple(int(n) for n in rng.integers(1, (4, 4, 4, 5) if exact else (6, 5, 5, 8)))
    counts = tuple(int(n) for n in rng.integers((1, 1, 0, 0), (6, 5, 3, 3)))
    recurrent = bool(rng.random() < 0.8)
    apart, both = recurrent and bool(rng.random() < 0.25), bool(rng.random() < 0.15)
    options = {"apart": apart, "bidirectional": both, "reverse": not both and bool(rng.random() < 0.3)}
    if rng.random() < 0.3:
        options["lengths"] = [int(n) for n in rng.integers(0, T + 1, B)]
    if rng.random() < 0.2:
        options["hold"] = rng.random((T, B)) < 0.4
    if rng.random() < 0.25:
        options["checkpoint_every"] = int(rng.integers(1, 4))
    shapes = shapes_of(sizes, counts, both, projected=rng.random() < 0.2, recurrent=recurrent)
    width = (2 if both else 1) * H
    if recurrent and rng.random() < 0.25:
        shapes["mask"] = [(B, width), (T, B, width), (1, width)][int(rng.integers(3))]
    if rng.random() < 0.25:
        shapes["keep"] = (T, B, 2) if both else (T, B)
    shapes |= {f"u{k}": [(T, B, width), (B, 1), (T, 1, width)][int(rng.integers(3))] for k in range(counts[2])}
    shapes |= {f"w{k}": [(width,), (1,), ()][int(rng.integers(3))] for k in range(counts[3])}
    places = {place: place for place in shapes}
    for k in range(1, counts[1]):
        if rng.random() < 0.15:
            places[f"s{k}"] = places[f"s{int(rng.integers(k))}"]
    dtype = mx.float32 if exact or rng.random() < 0.9 else [mx.float16, mx.bfloat16][int(rng.integers(2))]
    return filled(rng, draw_text(rng, *counts, apart, exact), counts, options, shapes, places, dtype, exact)


def shapes_of(sizes, counts, both, projected=False, recurrent=True):
    """Return the shapes of the arrays of a call by place, without mask and keep. sizes: T, B, I, H. counts: the numbers
    of gates, states, inputs and parameters."""
    (T, B, I, H), (G, states, inputs, params), D = sizes, counts, 2 if both else 1
    shapes = {"x": (T, B, D * G * H)} if projected else {"x": (T, B, I), "Wx": (D * G * H, I), "b": (D * G * H,)}
    if recurrent:
        shapes["Wh"] = (2, G * H, H) if both else (G * H, H)
    shapes |= {f"s{k}": (B, D * H) for k in range(states)} | {f"u{k}": (T, B, D * H) for k in range(inputs)}
    return shapes | {f"w{k}": (D * H,) for k in range(params)}


def filled(rng, text, counts, options, shapes, places, dtype=mx.float32, exact=False):
    """Return a case with random arrays. In an `exact` case all numbers are multiples of 1/2, else some are integers, so
    that there are zeros and ties."""

    def numbers(shape, scale=1.0):
        if exact:
            return rng.integers(-4, 5, shape) / 2.0
        array = np.asarray(rng.normal(size=shape) * scale)
        array = np.where(rng.random(shape) < 0.1, np.rint(array) + 0.0, array)  # + 0.0: MLX's sin loses the sign of -0
        return np.array(mx.array(array).astype(dtype).astype(mx.float64))

    arrays = {}
    for place in shapes:
        if places[place] == place:
            small = place in ("Wx", "Wh") and not exact
            arrays[place] = numbers(shapes[place], 0.7 / np.sqrt(shapes[place][-1]) if small else 1.0)
    outputs = [(*shapes["x"][:2], shapes["s0"][1]), *[shapes["s0"]] * counts[1]]
    cotangents = [np.where(d == 0, 1.0, d) for d in map(numbers, outputs)]
    return Case(text, *counts, options, arrays, places, cotangents, dtype, exact)


# --- The reference ---


def reference(case, dtype=mx.float64, noise=None):
    """Return {result: NumPy array} of the outputs and gradients of a case, from a loop of plain MLX on the CPU.

    noise: a random generator. Each number that enters a step, and each cotangent, is then multiplied by 1 + e, where
    |e| is at most 16 rounding errors of the case's dtype.
    """
    size = 16 * 2.0 ** {mx.float32: -24, mx.float16: -11, mx.bfloat16: -8}[case.dtype]

    def shaken(array):
        return array if noise is None else array * mx.array(1 + size * noise.uniform(-1, 1, array.shape), dtype)

    with mx.stream(mx.cpu):
        names, unused = list(case.arrays), []
        cell = watched(case.cell, unused)

        def loss(*values):
            unused.clear()
            given = {place: values[names.index(name)] for place, name in case.places.items()}
            outputs = both_directions(case, cell, given, shaken)
            pairs = zip(outputs, case.cotangents, strict=True)
            total = sum((o * shaken(mx.array(d, dtype))).sum() for o, d in pairs)
            # The library differentiates every state of every step. If a derivative is infinite there, 0 times it is
            # NaN, also for a state that no later step reads.
            return total + sum((0 * s).sum() for s in unused), outputs

        values = [mx.array(case.arrays[name], dtype) for name in names]
        (_, outputs), gradients = mx.value_and_grad(loss, argnums=tuple(range(len(names))))(*values)
        mx.eval(outputs, gradients)
        found = dict(zip(names_of_outputs(case), outputs, strict=True))
        found |= {f"d{name}": d for name, d in zip(names, gradients, strict=True)}
        return {name: np.array(array.astype(mx.float64)) for name, array in found.items()}


def watched(cell, seen):
    """Return the cell, which also appends its new states to the list `seen`."""

    def call(*arguments):
        states = cell(*arguments)
        seen.extend([states] if isinstance(states, mx.array) else states)
        return states

    return call


def names_of_outputs(case):
    return ["h", *(f"last{k}" for k in range(case.states))]


def both_directions(case, cell, a, shaken):
    """Return [h, *last states]. a: the arrays by place."""
    if not case.options["bidirectional"]:
        return one_direction(case, cell, a, case.options["reverse"], shaken)
    found = []
    for d in range(2):
        shared = ("x",) if "Wx" in a else ()  # both directions read the same x, unless it is already projected
        mine = {place: array if place in shared else of_direction(place, array, d) for place, array in a.items()}
        found.append(one_direction(case, cell, mine, d == 1, shaken))
    return [mx.concatenate(pair, axis=-1) for pair in zip(*found, strict=True)]


def of_direction(place, array, d):
    """Return the part of direction d of an array of both directions: its rows for a weight, else its last axis."""
    if place in ("Wh", "scale", "shift"):
        return array[d]
    axis = 0 if place == "Wx" else -1
    return array if array.ndim == 0 or array.shape[axis] == 1 else mx.split(array, 2, axis=axis)[d]


def one_direction(case, cell, a, reverse, shaken):
    """Return [h, *last states] of one direction. Items that do not run at the same steps run one by one."""
    T, B = case.cotangents[0].shape[:2]
    lengths, hold = case.options.get("lengths", [T] * B), case.options.get("hold", np.zeros((T, B), bool))
    same = "lengths" not in case.options and "hold" not in case.options
    groups = [list(range(B))] if same else [[item] for item in range(B)]
    found = []
    for items in groups:
        at = slice(items[0], items[-1] + 1)
        state = [a[f"s{k}"][at] for k in range(case.states)]
        hs = {t: mx.zeros(state[0].shape, state[0].dtype) for t in range(T)}
        for t in range(T)[:: -1 if reverse else 1]:
            if t >= lengths[items[0]]:
                continue
            if "keep" in a:
                keep = a["keep"][t, at].reshape(len(items), 1)
                state = [s * keep for s in state]
            if not hold[t, items[0]]:
                state = one_step(case, cell, a, t, at, state, shaken)
            hs[t] = state[0]
        found.append([mx.stack([hs[t] for t in range(T)]), *state])
    return [mx.concatenate(each, axis=1 if k == 0 else 0) for k, each in enumerate(zip(*found, strict=True))]


def one_step(case, cell, a, t, at, state, shaken):
    """Return the states after step t of the items `at`."""
    shape = state[0].shape
    state = [shaken(s) for s in state]
    z = a["x"][t, at]
    z = z @ a["Wx"].T if "Wx" in a else z
    z = z + a["b"] if "b" in a else z
    z = mx.split(shaken(z), case.gates, axis=-1)
    if "Wh" in a:
        h = state[0]
        if "mask" in a:
            mask = a["mask"]
            mask = mask[t] if mask.ndim == 3 else mask
            h = h * mx.broadcast_to(mask, (len(a["s0"]), shape[1]))[at]
        product = mx.split(shaken(h @ a["Wh"].T), case.gates, axis=-1)
        norm = case.options.get("norm")
        if norm is not None and norm["of"] == "sum":
            z = normed(case, a, [x + p for x, p in zip(z, product, strict=True)], shaken)
            product = [mx.zeros_like(p) for p in product]
        elif norm is not None:
            product = normed(case, a, product, shaken)
        pairs = list(zip(z, product, strict=True))
        z = pairs if case.options["apart"] else [x + p for x, p in pairs]
    T, B = case.cotangents[0].shape[:2]
    more = [mx.broadcast_to(a[f"u{k}"], (T, B, shape[1]))[t, at] for k in range(case.inputs)]
    more += [mx.broadcast_to(a[f"w{k}"], shape) for k in range(case.params)]
    new = cell(tuple(z), tuple(state), *[shaken(each) for each in more])
    return [mx.broadcast_to(s, shape) for s in ((new,) if isinstance(new, mx.array) else new)]


def normed(case, a, parts, shaken):
    """Return the layer normalisation of a step's product or sum, one array per gate."""
    groups = [[part] for part in parts] if case.options["norm"]["gates"] == "each" else [parts]
    found = []
    for group in groups:
        x = mx.concatenate(group, axis=-1)
        away = x - x.mean(axis=-1, keepdims=True)
        y = away / mx.sqrt((away * away).mean(axis=-1, keepdims=True) + case.options["norm"]["eps"])
        found += mx.split(shaken(y), len(group), axis=-1)
    y = mx.concatenate(found, axis=-1)
    y = y * a["scale"] if "scale" in a else y
    y = y + a["shift"] if "shift" in a else y
    return mx.split(y, case.gates, axis=-1)


# --- The library, and the comparison ---


def library(case, engine):
    """Return {result: NumPy array} of the outputs and gradients that `pointwise` gives on an engine."""
    names, cell, counts = list(case.arrays), case.cell, (case.states, case.inputs, case.params)

    def outputs_of(*values):
        a = {place: values[names.index(name)] for place, name in case.places.items()}
        states, inputs, params = ([a[f"{p}{k}"] for k in range(n)] for p, n in zip("suw", counts, strict=True))
        options = {"mask": a.get("mask"), "keep": a.get("keep")} | case.options
        if "norm" in options:
            options["norm"] = Norm(**options["norm"], scale=a.get("scale"), shift=a.get("shift"))
        weights = [a.get(name) for name in ("x", "Wx", "Wh", "b")]
        h, last = pointwise(cell, *weights, states, inputs=inputs, params=params, engine=engine, **options)
        return [h, *last]

    values = [mx.array(case.arrays[name]).astype(case.dtype) for name in names]
    outputs, gradients = mx.vjp(outputs_of, values, [mx.array(d).astype(case.dtype) for d in case.cotangents])
    mx.eval(outputs, gradients)
    found = dict(zip(names_of_outputs(case), outputs, strict=True))
    found |= {f"d{name}": d for name, d in zip(names, gradients, strict=True)}
    return {name: to_numpy(array).astype(np.float64) for name, array in found.items()}


class Judge:
    """The exact results of a case, and how far a right result may be from them."""

    def __init__(self, case):
        self.case, self.exact = case, reference(case)
        plain = reference(case, mx.float32)
        largest = 65504 if case.dtype == mx.float16 else 1e38
        self.finite = {name for name, array in self.exact.items() if (np.abs(array) < largest).all()}
        self.unit = unit = 2.0 ** {mx.float32: -24, mx.float16: -11, mx.bfloat16: -8}[case.dtype]
        most = {name: np.abs(self.exact[name]).max(initial=0) for name in self.finite}
        # In float32 the plain loop shows what rounding does to this cell. Another order of sums may cost a few times
        # as much. In 16 bits each result and each saved number is rounded further.
        self.bound = {n: 8 * np.abs(plain[n] - self.exact[n]).max(initial=0) + 8 * unit * most[n] for n in self.finite}
        # The numbers of a cell have the size of 1, so if they cancel, their difference knows only roundings of 1. An
        # engine may compute the slope of a function from the function's rounded value, as 1 - y^2 for tanh, so it
        # knows a slope near 0 only to some roundings of 1.
        self.of_slopes = 16 * unit * sum(np.abs(d).sum() for d in case.cotangents)
        self.sure = case.exact and all(np.array_equal(plain[n], self.exact[n]) for n in self.finite)
        self.wide: dict[str, float] | None = None

    def widened(self):
        """Return the bound of each result: the largest error of four loops in float64 whose numbers are shaken before
        each step. It is infinite where a result is not finite, and where rounding may change the outcome of a
        comparison, it is as large as the jump."""
        if self.wide is None:
            shaken = [reference(self.case, noise=np.random.default_rng(k)) for k in range(4)]
            self.wide = {
                name: self.bound[name]
                + 4 * max(np.abs(each[name] - self.exact[name]).max(initial=0) for each in shaken)
                + (16 * self.unit if name in names_of_outputs(self.case) else self.of_slopes)
                for name in self.finite
            }
        return self.wide

    def verdict(self, got):
        """Return "right", "unjudged", or what is wrong."""
        judged, open_ = 0, 0
        for name in self.exact:
            # Where a derivative is infinite, other gradients may be NaN as well, because MLX multiplies by zeros.
            spread = len(self.finite) < len(self.exact) and not np.isfinite(got[name]).all()
            if name not in self.finite or spread:
                open_ += 1
                continue
            if got[name].shape != self.exact[name].shape:
                return f"{name} has shape {got[name].shape}"
            error = np.abs(got[name] - self.exact[name]).max(initial=0)
            if not error <= self.bound[name]:
                bound = self.bound[name] if self.sure else self.widened()[name]
                if not error <= bound and np.isfinite(bound):
                    return f"{name}: error {error:.3g} > bound {bound:.3g}"
                if not bound <= 0.1 * (1 + np.abs(self.exact[name]).max(initial=0)):
                    open_ += 1
                    continue
            judged += 1
        return "right" if judged > open_ else "unjudged"
