"""Calls of the Metal engines with layer normalisation, and their comparison with PyTorch's float64."""

import mlx.core as mx
import norm_reference
import numpy as np
from assertions import assert_within
from cases import METAL
from on_metal import on_metal

from mlx_lstm.engines.autodiff import ENGINE_MODULES
from mlx_lstm.engines.cells import GRUCell, LSTMCell, NormOptions, RNNCell
from mlx_lstm.engines.problem import LIMITS, Cut, Problem

T = 5
ALL = {"mask": True, "keep": True, "lengths": True}
BARE = {"b": False, "h0": False, "c0": False, "bhn": False, "norm_scale": False, "norm_shift": False}
BARE |= {"norm_c_scale": False, "norm_c_shift": False}
SHARP = ("hard_sigmoid", "sigmoid", "tanh", "hard_sigmoid_sixth", "identity")
LSTMS = {
    "product": LSTMCell(norm=NormOptions("product")),
    "sum": LSTMCell(norm=NormOptions("sum", "each"), gate_order="ogfi", activations=SHARP, forget_bias=0.5),
    "output": LSTMCell(norm=NormOptions(None, c="output"), cell_clip=0.4, clip_gradient="zero"),
    "state": LSTMCell(norm=NormOptions("product", "each", "state"), cell_clip=0.4, clip_gradient="zero"),
    "all": LSTMCell(norm=NormOptions("sum", "together", "output"), output_peephole="previous", cell_clip=0.5),
}
OTHERS = {
    "gru": GRUCell(norm=NormOptions("product")),
    "gru each": GRUCell(norm=NormOptions("product", "each"), gate_order="zrn", flip_z=True),
    "rnn": RNNCell(norm=NormOptions("product")),
    "rnn sum": RNNCell("hard_sigmoid", norm=NormOptions("sum", "each")),
}
CELLS = LSTMS | OTHERS
MANY = LIMITS._replace(launch_steps=2, rows_left=4, index=1)
"""Limits with which a call has several launches or joins rows, and counts elements with 64 bits."""

# (engine, cell, sizes B, I, H, P, options of the call). P is 0 without a projection. The sizes make threadgroups of
# 1, 2 or 4 batch items and of one or several simdgroups, with and without lanes that have no unit.
ROWS = [
    ("fused", "product", (3, 3, 5, 0), {"peephole": True, **ALL}),
    ("fused", "sum", (3, 2, 12, 0), {"limits": MANY, "bidirectional": True, "cut": Cut(2), "peephole": True, **ALL}),
    ("fused", "output", (2, 3, 40, 0), {"cut": Cut(2), "peephole": True, "keep": True}),
    ("fused", "state", (3, 3, 7, 0), {"cut": Cut(2), "peephole": True, "limits": MANY, **ALL}),
    ("fused", "all", (1, 3, 3, 0), {"reverse": True, "peephole": True, **BARE}),
    ("fused", "gru", (5, 3, 8, 0), {"cut": Cut(4), "bhn": True, **ALL}),
    ("fused", "gru each", (3, 3, 70, 0), {"cut": Cut(2), "limits": MANY, "bidirectional": True, "bhn": True}),
    ("fused", "rnn", (5, 3, 64, 0), {"cut": Cut(4), **BARE}),
    ("fused", "rnn sum", (3, 3, 37, 0), {"cut": Cut(2), "limits": MANY, "reverse": True, **ALL}),
    ("stepwise", "product", (3, 3, 5, 0), {"peephole": True, **ALL}),
    ("stepwise", "sum", (3, 2, 9, 0), {"limits": MANY, "bidirectional": True, "peephole": True, **ALL}),
    ("stepwise", "output", (9, 3, 12, 13), {"keep": True}),
    ("stepwise", "state", (3, 3, 9, 5), {"limits": MANY, "bidirectional": True, "peephole": True, **ALL}),
    ("stepwise", "all", (1, 3, 3, 0), {"reverse": True, "peephole": True, **BARE}),
    ("stepwise", "gru", (3, 3, 5, 0), {"bhn": True, **BARE}),
    ("stepwise", "gru each", (9, 3, 9, 0), {"limits": MANY, "bidirectional": True, "bhn": True, **ALL}),
    ("stepwise", "rnn", (3, 3, 300, 0), BARE),
    ("stepwise", "rnn sum", (3, 3, 5, 0), {"reverse": True, **ALL}),
]


def drawn(cell, sizes, options, dtype, seed=0):
    """Return random arrays of a call, as MLX arrays. options: names of arrays that the call has or lacks."""
    (B, width, H, P), D, G, rng = (
        sizes,
        2 if options.get("bidirectional") else 1,
        cell.gates,
        np.random.default_rng(seed),
    )
    own = (D,) if D > 1 else ()
    shapes = {"x": (T, B, width), "Wx": (D * G * H, width), "Wh": (*own, G * H, P or H), "b": (D * G * H,)}
    shapes |= {"h0": (B, D * (P or H))} | ({"c0": (B, D * H)} if cell.op == "lstm" else {})
    shapes |= {"norm_scale": (*own, G * H), "norm_shift": (*own, G * H)} if cell.norm.of else {}
    shapes |= {"norm_c_scale": (*own, H), "norm_c_shift": (*own, H)} if cell.norm.c else {}
    shapes |= {"Wp": (*own, P, H)} if P else {}
    more = {"bhn": (D * H,), "peephole": (*own, 4 * H), "mask": (T, B, D * (P or H)), "keep": (T, B, D)}
    shapes |= {name: shape for name, shape in more.items() if options.get(name)}
    values = {name: rng.normal(size=shape) for name, shape in shapes.items() if options.get(name, True)}
    for name in values.keys() & {"Wx", "Wh", "Wp"}:
        values[name] /= np.sqrt(values[name].shape[-1])
    for name in values.keys() & {"norm_scale", "norm_c_scale"}:
        values[name] = 1 + 0.3 * values[name]
    for name in values.keys() & {"mask", "keep"}:
        values[name] = rng.uniform(0.5, 1.0, values[name].shape)
    arrays = {name: mx.array(value.astype(np.float32)).astype(dtype) for name, value in values.items()}
    if options.get("lengths"):
        arrays["lengths"] = mx.array([T, 2, 0, 1, T, T, 3, 4, T][:B], mx.int32)
    return arrays


def check(engine, cell, sizes, options, dtype=mx.float32, seed=0):
    """Run a call, forward and backward, and compare all results with PyTorch's. Return the log of launches."""
    B, _, H, P = sizes
    ways = {name: options.get(name, False) for name in ("reverse", "bidirectional")}
    arrays, word = drawn(cell, sizes, options, dtype, seed), str(dtype).removeprefix("mlx.core.")
    problem = Problem(T, B, H, P or H, cell, dtype, tuple(arrays), "mask" in arrays, **ways, return_gates=True)
    problem = problem._replace(cut=options.get("cut"), limits=options.get("limits", LIMITS))
    rng, module = np.random.default_rng(1), ENGINE_MODULES[engine]
    with on_metal() as log, mx.stream(METAL):
        saved = module.forward(problem, arrays)
        cotangents = {
            name: mx.array(rng.normal(size=saved[name].shape).astype(np.float32)).astype(dtype) for name in cell.outputs
        }
        gradients = module.backward(problem, arrays, dict(saved), cotangents)
        found = {name: saved[name] for name in cell.outputs} | {f"d{name}": d for name, d in gradients.items()}
        found = {name: np.array(array.astype(mx.float32)) for name, array in found.items()}
        as_numbers = {name: np.array(a if name == "lengths" else a.astype(mx.float32)) for name, a in arrays.items()}
        of_outputs = {name: np.array(d.astype(mx.float32)) for name, d in cotangents.items()}
    exact, bounds = norm_reference.exact_and_bounds(cell, as_numbers, of_outputs, word, **ways)
    assert found.keys() == exact.keys()
    for name, value in found.items():
        assert_within(f"{engine} {name}", value, exact[name], bounds[name])
    return log
