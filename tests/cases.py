"""Random cases of the op `lstm`: the table of options, arrays to go with them, and how an engine runs a case."""

import ml_dtypes
import mlx.core as mx
import numpy as np

from mlx_lstm import lstm
from mlx_lstm.oracle import ARRAYS, Arithmetic, complete, forward, unroll

SIZES = T, B, I, H, P = 4, 2, 3, 2, 3
MASKS = [(T, B, "P"), (B, "P"), (1, "P"), ("P",), (T, 1, 1), (1,), ()]
ACTIVATIONS = ("identity", "relu", "tanh", "sigmoid", "hard_sigmoid", "hard_sigmoid_sixth")
KINK_MARGIN = 1e-2  # how far preactivations stay from a kink: a thousand steps of a finite difference
ROUNDING_MARGIN = 1e-4  # how far they stay from it where only float32 rounding must not cross it

OPTIONS = {
    "plain": {},
    "projected_x": {"projected_x": True},
    "no_bias": {"b": None},
    "no_h0": {"h0": None},
    "no_c0": {"c0": None},
    "peephole_current": {"peephole": True},
    "peephole_previous": {"peephole": True, "output_peephole": "previous"},
    **{f"mask_{n}": {"mask": shape} for n, shape in enumerate(MASKS)},
    "cell_clip": {"cell_clip": 0.4},
    "cell_clip_peephole": {"cell_clip": 0.4, "peephole": True},
    "forget_bias": {"forget_bias": 1.0},
    "reverse": {"reverse": True},
    "lengths": {"lengths": [3, 0]},
    "lengths_reverse": {"lengths": [2, 4], "reverse": True},
    "projection": {"projection": True},
    "gate_order": {"gate_order": "ogfi", "peephole": True},
    **{f"{name}_gates": {"activations": (name,) * 4 + ("tanh",)} for name in ACTIVATIONS},
    **{f"{name}_output": {"activations": ("sigmoid", "sigmoid", "tanh", "sigmoid", name)} for name in ACTIVATIONS},
}


OUTPUTS = ("h", "c", "gates", "hT", "cT")


def draw(
    rng, *, sizes=SIZES, projection=False, projected_x=False, peephole=False, mask=None, dtype=np.float64, **options
):
    """A case of random arrays; `mask` is the mask's shape, "P" in it the width of h."""
    T, B, I, H, P = sizes
    width = P if projection else H
    shapes = {"x": (T, B, 4 * H if projected_x else I), "Wh": (4 * H, width), "b": (4 * H,)}
    shapes |= {"h0": (B, width), "c0": (B, H)}
    if not projected_x:
        shapes["Wx"] = (4 * H, I)
    if projection:
        shapes["Wp"] = (P, H)
    if peephole:
        shapes["peephole"] = (4 * H,)
    if mask is not None:
        shapes["mask"] = tuple(width if size == "P" else size for size in mask)
    return {name: rng.normal(0, 0.7, shape).astype(dtype) for name, shape in shapes.items()} | options


def draw_cotangents(rng, outputs, dtype=np.float64):
    return {name: rng.normal(size=value.shape).astype(dtype) for name, value in outputs.items()}


def draw_away_from_kinks(seed, margin=KINK_MARGIN, **options):
    """(case, cotangents), drawn again until no relu or hard_sigmoid is within the margin of its kink."""
    rng = np.random.default_rng(seed)
    dtype = options.get("dtype", np.float64)
    for _ in range(200):
        case = draw(rng, **options)
        if kink_distance(case, exact_zero=margin == KINK_MARGIN) > margin:
            return case, draw_cotangents(rng, forward(**case), dtype)
    raise RuntimeError(f"no case of {options} keeps off its kinks")


def kink_distance(case, exact_zero=True):
    """How near an argument of relu or hard_sigmoid comes to a kink. A 0 that any rounding leaves 0 need not count."""
    fl = Arithmetic(np.float64)
    p = complete(case, fl)
    seen = [(p.act["output"], s.c) for s in unroll(p, fl)[1].values()]
    seen += [(p.act[k], s.a[k]) for s in unroll(p, fl)[1].values() for k in "ifgo"]
    seen = [(name, a if exact_zero else a[a != 0]) for name, a in seen]
    kinks = {"relu": [0.0], "hard_sigmoid": [-2.5, 2.5], "hard_sigmoid_sixth": [-3.0, 3.0]}
    distances = (np.abs(a - kink).min(initial=np.inf) for name, a in seen for kink in kinks.get(name, []))
    return min(distances, default=np.inf)


def combination(rng, sizes=SIZES):
    """A random choice of every option at once."""
    T, B = sizes[:2]
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    return {
        "projection": pick(False, True),
        "projected_x": pick(False, True),
        "peephole": pick(False, True),
        "output_peephole": pick("current", "previous"),
        "mask": pick(None, (T, B, "P"), (B, "P"), (T, 1, "P"), (B, 1)),
        "cell_clip": pick(None, 0.3, 1.0),
        "forget_bias": pick(0.0, 1.0, -0.5),
        "reverse": pick(False, True),
        "lengths": pick(None, rng.integers(0, T + 1, B)),
        "gate_order": "".join(rng.permutation(list("ifgo"))),
        "activations": tuple(rng.choice(ACTIVATIONS, 5)),
        **{name: None for name in ("b", "h0", "c0") if rng.random() < 0.2},
    }


# --- Running a case on an engine -------------------------------------------------------------------------------------

MLX_DTYPE = {np.float32: mx.float32, np.float64: mx.float64, np.float16: mx.float16, ml_dtypes.bfloat16: mx.bfloat16}


def to_mlx(array, dtype):
    """A NumPy array (also bfloat16) as an MLX array of this NumPy dtype."""
    wide = np.asarray(array).astype(np.float64 if dtype == np.float64 else np.float32)
    return mx.array(wide, mx.float64 if dtype == np.float64 else mx.float32).astype(MLX_DTYPE[dtype])


def to_numpy(array):
    """An MLX array (also bfloat16) as a NumPy array of the same dtype."""
    if array.dtype == mx.bfloat16:
        return np.array(array.astype(mx.float32)).astype(ml_dtypes.bfloat16)
    return np.array(array)


def run(case, engine, dtype, cotangents=None):
    """(outputs, gradients) of `mlx_lstm.lstm` by name, as NumPy arrays; only outputs with a cotangent are used."""
    options = {name: value for name, value in case.items() if name not in ARRAYS}
    arrays = {name: case[name] for name in ARRAYS if case.get(name) is not None}
    names = list(arrays)
    shown = OUTPUTS if cotangents is None else [name for name in OUTPUTS if name in cotangents]

    def outputs_of(*values):
        given = {"Wx": None} | dict(zip(names, values, strict=True)) | options
        out = lstm(**given, engine=engine, return_gates="gates" in shown)
        return [getattr(out, name) for name in shown]

    with mx.stream(mx.cpu):
        values = [to_mlx(array, dtype) for array in arrays.values()]
        if cotangents is None:
            return dict(zip(shown, map(to_numpy, outputs_of(*values)), strict=True)), {}
        given = [to_mlx(cotangents[name], dtype) for name in shown]
        outputs, gradients = mx.vjp(outputs_of, values, given)
        named = zip(shown, map(to_numpy, outputs), strict=True), zip(names, map(to_numpy, gradients), strict=True)
        return tuple(map(dict, named))
