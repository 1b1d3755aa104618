"""Random calls of `mlx_lstm.pointwise`, which runs a cell given as a function of one step, and their comparison with
the float64 oracle. The cells are those of `mlx_lstm.cells` and random ones."""

import mlx.core as mx
import numpy as np
from assertions import assert_within
from cases import to_mlx, to_numpy

from mlx_lstm import cells, pointwise, recurrent
from mlx_lstm.check import cells as check_cells
from mlx_lstm.engines.cell_tracer import Counts, traced
from mlx_lstm.oracle import kink_distance
from mlx_lstm.oracle.closeness import exact_and_bounds
from mlx_lstm.oracle.judge import Case


class Form(check_cells.Form):
    """The Python function of a cell, and how many gates, states, inputs per step and parameters it has. The method
    `graph` traces the function."""

    def graph(self, B, H, dtype=mx.float32):
        return traced(self.cell, Counts(self.gates, self.states, self.inputs, self.params), self.apart, (B, H), dtype)


ZOO = {form.cell.__name__: Form(*form) for form in check_cells.FORMS}
SIZES = (5, 3, 2, 7)
NOT_FLOATS = ("lengths", "reverse", "hold")
OPTIONS = {
    "plain": {},
    "no_bias_projected": {"b": None, "Wx": None},
    "mask": {"mask": True},
    "keep": {"keep": True},
    "lengths_reverse": {"lengths": True, "reverse": True},
    "everything": {"mask": True, "keep": True, "lengths": True},
    "hold": {"hold": True, "mask": True, "keep": True, "lengths": True, "reverse": True},
    "chunks": {"checkpoint_every": 2, "lengths": True, "mask": True, "keep": True, "reverse": True},
}


def draw(rng, form, options, sizes=SIZES):
    """Return random (case, cotangents) for a call of a cell: a dict of its arrays and options, and a dict of the
    cotangents of its outputs. The case's arrays are float64 and hold only numbers that float32 has."""
    T, B, I, H = sizes
    G, C = form.gates, form.states - 1
    shapes = {"x": (T, B, I), "Wx": (G * H, I), "Wh": (G * H, H), "b": (G * H,), "h0": (B, H), "c0": (B, C * H)}
    shapes |= {"inputs": (T, B, form.inputs * H), "params": (form.params * H,), "mask": (T, B, H), "keep": (T, B, 1)}
    if "Wx" in options:
        shapes["x"] = (T, B, G * H)
    absent = {name for name in ("Wx", "b") if name in options} | {n for n in ("mask", "keep") if not options.get(n)}
    absent |= {name for name, shape in shapes.items() if 0 in shape} | (set() if form.recurrent else {"Wh", "mask"})
    case = {name: rng.normal(size=shape) for name, shape in shapes.items() if name not in absent}
    for name in {"Wx", "Wh"} & case.keys():
        case[name] /= np.sqrt(case[name].shape[-1])
    if form.cell is cells.slstm:  # state n is a sum of positive gates: start it positive
        case["c0"][:, H : 2 * H] = 1 + np.abs(case["c0"][:, H : 2 * H])
    case = {name: array.astype(np.float32).astype(np.float64) for name, array in case.items()}
    if options.get("lengths"):
        case["lengths"] = rng.integers(0, T + 1, B)
    if options.get("hold"):
        case["hold"] = rng.random((T, B)) < 0.4
    case["reverse"] = bool(options.get("reverse"))
    d = {"h": (T, B, H), "hT": (B, H), "cT": (B, C * H)}
    return case, {name: rng.normal(size=shape).astype(np.float32) for name, shape in d.items() if 0 not in shape}


def run(form, case, cotangents, call, dtype=np.float32):
    """Run `call(form, arrays, case)`, e.g. `by_recurrent`. form: a `Form`, which describes the cell. case: a dict of
    the arrays and options of the call; `arrays` are its arrays as MLX arrays. Return outputs and gradients in one
    dict of NumPy arrays by name."""
    names = [name for name in case if name not in NOT_FLOATS]
    arrays = [to_mlx(case[name], dtype) for name in names]

    def outputs_of(*values):
        h, last = call(form, dict(zip(names, values, strict=True)), case)
        outputs = {"h": h, "hT": last[0]} | ({"cT": mx.concatenate(last[1:], axis=-1)} if len(last) > 1 else {})
        return [outputs[name] for name in cotangents]

    outputs, gradients = mx.vjp(outputs_of, arrays, [to_mlx(d, dtype) for d in cotangents.values()])
    mx.eval(outputs, gradients)
    found = dict(zip(cotangents, map(to_numpy, outputs), strict=True))
    return found | {f"d{name}": to_numpy(g) for name, g in zip(names, gradients, strict=True)}


def blocks(array, count):
    return mx.split(array, count, axis=-1) if count else []


def arguments(form, a):
    """Return the arguments of `pointwise` for the arrays `a` of a case: ([x, Wx, Wh, b], states, other arguments by
    name)."""
    state = (a["h0"], *blocks(a.get("c0"), form.states - 1))
    names = ("x", "Wx", "Wh", "b")
    given = [a.get(name) for name in names]
    return (
        given,
        state,
        {"inputs": blocks(a.get("inputs"), form.inputs), "params": blocks(a.get("params"), form.params)},
    )


def by_pointwise(engine, **options):
    def call(form, a, case):
        given, state, more = arguments(form, a)
        more |= {
            "mask": a.get("mask"),
            "keep": a.get("keep"),
            "lengths": case.get("lengths"),
            "hold": case.get("hold"),
            "reverse": case["reverse"],
        }
        return pointwise(form.cell, *given, state, **more, apart=form.apart, engine=engine, **options)

    return call


def by_recurrent(form, a, case):
    """Compute a recurrence with `mlx_lstm.recurrent`, which runs the cell `form.cell` step by step as a graph of
    plain MLX. a: the MLX arrays by name. case: a dict that also has the options `lengths`, `hold` and `reverse`. Return
    (h, last states)."""
    (x, Wx, Wh, b), state, more = arguments(form, a)
    z = x if Wx is None else x @ Wx.T
    z = z if b is None else z + b
    mask = a.get("mask", mx.ones((*z.shape[:2], state[0].shape[-1]), z.dtype))

    hold = mx.array(case.get("hold", np.zeros(z.shape[:2], bool)))[..., None]

    def step(of_step, state):
        z, mask, hold, *inputs = of_step
        parts = blocks(z, form.gates)
        if Wh is not None:
            products = blocks((state[0] * mask) @ Wh.T, form.gates)
            pairs = list(zip(parts, products, strict=True))
            parts = pairs if form.apart else [p + q for p, q in pairs]
        new = form.cell(tuple(parts), state, *inputs, *more["params"])
        new = tuple(mx.broadcast_to(array, state[0].shape) for array in new)  # a new state may be a parameter [H]
        new = tuple(mx.where(hold, old, array) for old, array in zip(state, new, strict=True))
        return new[0], new

    keep = a["keep"][..., 0] if "keep" in a else None
    return recurrent(
        step, (z, mask, hold, *more["inputs"]), state, keep=keep, lengths=case.get("lengths"), reverse=case["reverse"]
    )


def judged(form, case, cotangents, dtype="float32", trials=8):
    """Return (exact results, error bounds) of a case, two dicts by name. trials: the number of evaluations with
    random rounding errors from which the bounds are derived."""
    graph = form.graph(case["h0"].shape[0], case["h0"].shape[1])

    def values(fl):
        results = Case(case | {"op": "pointwise", "graph": graph}, cotangents).results(fl)
        return {name: array for name, array in results.items() if name in cotangents or name.startswith("d")}

    return exact_and_bounds(values, dtype, trials)


def assert_right(got, exact, bounds, what=""):
    """Assert that each result differs from the exact result by at most its error bound."""
    assert got.keys() == exact.keys()
    for name in exact:
        assert_within(f"{what} {name}", got[name], exact[name], bounds[name])


def is_smooth(form, case, margin=1e-3):
    """Return whether all comparisons in the cell (e.g. of a maximum) have operands that differ by more than
    `margin`, so that rounding cannot change the outcome."""
    return kink_distance(op="pointwise", graph=form.graph(*case["h0"].shape), **case) > margin


def draw_smooth(rng, form, options, sizes=SIZES):
    """Return random (case, cotangents) for which rounding cannot change the outcome of a comparison in the cell."""
    while True:
        case, cotangents = draw(rng, form, options, sizes)
        if is_smooth(form, case, 1e-4):
            return case, cotangents
