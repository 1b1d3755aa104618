"""Tests of the clips of the cell state and of a projected h, and of their two gradients. torch programs that clamp, and
TensorFlow's cells, are the references."""

import warnings
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
import torch
from assertions import assert_within, bounds, keeps_off_kinks
from cases import device_of, draw, draw_cotangents, run, run_gradients, split
from on_metal import on_metal
from quantized_cases import check_quantized, quantized_case

from mlx_lstm import convert, lstm, lstm_gradients, nn
from mlx_lstm.engines import METAL_ENGINES
from mlx_lstm.oracle import clip_shift

SIZES = (5, 3, 4, 6, 4)
CLIPS = {"cell_clip": 0.5, "projection_clip": 0.15, "clip_gradient": "zero"}
CPU = ("ops", "numpy")


def torch_steps(case):
    """Run an LSTM in torch, step by step, with torch.clamp. `case`: arrays as torch tensors, and options. Return h, c,
    hT and cT. Each sequence runs by itself."""
    H, o_order = case["Wh"].shape[0] // 4, case.get("gate_order", "ifgo")
    T, B = case["x"].shape[:2]
    P = case["Wh"].shape[1]
    rows = {k: slice(o_order.index(k) * H, (o_order.index(k) + 1) * H) for k in "ifgo"}
    every = {"h": [], "c": [], "hT": [], "cT": []}
    zero = lambda width: torch.zeros(width, dtype=torch.float64)  # noqa: E731
    for b in range(B):
        h, c = (case[name][b] if name in case else zero(n) for name, n in (("h0", P), ("c0", H)))
        length = int(case["lengths"][b]) if case.get("lengths") is not None else T
        hs, cs = [zero(P)] * T, [zero(H)] * T
        for t in reversed(range(length)) if case.get("reverse") else range(length):
            if "keep" in case:
                h, c = h * case["keep"][t, b], c * case["keep"][t, b]
            if case.get("hold") is None or not case["hold"][t][b]:
                mask = torch.broadcast_to(case["mask"], (T, B, P))[t, b] if "mask" in case else 1.0
                a = case["x"][t, b] @ case["Wx"].T + (h * mask) @ case["Wh"].T + case["b"]
                p = {k: case["peephole"][rows[k]] if "peephole" in case else 0.0 for k in "ifgo"}
                late = case.get("output_peephole", "current") == "current"
                i, f = (torch.sigmoid(a[rows[k]] + p[k] * c) for k in "if")
                new = f * c + i * torch.tanh(a[rows["g"]] + p["g"] * c)
                if case.get("cell_clip"):
                    new = torch.clamp(new, -case["cell_clip"], case["cell_clip"])
                o = torch.sigmoid(a[rows["o"]] + p["o"] * (new if late else c))
                h, c = o * torch.tanh(new), new
                if "Wp" in case:
                    h = h @ case["Wp"].T
                if case.get("projection_clip"):
                    h = torch.clamp(h, -case["projection_clip"], case["projection_clip"])
            hs[t], cs[t] = h, c
        for name, value in zip(every, (torch.stack(hs), torch.stack(cs), h, c), strict=True):
            every[name].append(value)
    return {name: torch.stack(values, 1 if name in "hc" else 0) for name, values in every.items()}


def by_torch(case, cotangents):
    """Return the outputs and gradients of `torch_steps`, as NumPy arrays by name."""
    arrays = {name: torch.tensor(array, requires_grad=True) for name, array in split(case)[1].items()}
    outputs = torch_steps(case | arrays)
    sum((outputs[name] * torch.tensor(cotangents[name])).sum() for name in outputs).backward()
    return {name: value.detach().numpy() for name, value in outputs.items()} | {
        name: array.grad.numpy() for name, array in arrays.items()
    }


OPTIONS = {
    "cell_clip": {"cell_clip": 0.5},
    "cell_clip, peephole": {"cell_clip": 0.5, "peephole": True, "keep": True, "mask": (5, 3, "P")},
    "cell_clip, previous": {"cell_clip": 0.5, "peephole": True, "output_peephole": "previous", "reverse": True},
    "projection_clip": {"projection": True, "projection_clip": 0.15},
    "both": {**CLIPS, "projection": True, "peephole": True, "mask": (1, "P"), "keep": True},
    "both, lengths": {**CLIPS, "projection": True, "lengths": [5, 0, 3], "gate_order": "ogfi"},
    "both, reverse": {**CLIPS, "projection": True, "lengths": [2, 5, 4], "reverse": True, "keep": True},
    "both, hold": {**CLIPS, "projection": True, "hold": [[0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]]},
}


def drawn(option, dtype=np.float64, seed=0, sizes=SIZES):
    """Return (case, cotangents) in which both clips change values, if the option has them, and none comes near its
    limit."""
    rng = np.random.default_rng(seed)
    while True:
        case = draw(rng, sizes=sizes, dtype=dtype, **OPTIONS[option] | {"clip_gradient": "zero"})
        shifts = clip_shift(**case)
        changed = {"c": case.get("cell_clip"), "h": case.get("projection_clip")}
        if keeps_off_kinks(case, dtype) and all(shifts[name].any() for name in changed if changed[name]):
            outputs = {"h": (5, 3, sizes[4]), "c": (5, 3, sizes[3]), "hT": (3, sizes[4]), "cT": (3, sizes[3])}
            widths = {"h": case["Wh"].shape[1], "c": sizes[3]}
            outputs = {name: np.zeros((*shape[:-1], widths[name[0]])) for name, shape in outputs.items()}
            return case, draw_cotangents(rng, outputs, dtype)


def assert_equal(got, expected, limit, what=""):
    for name in expected:
        assert_within(f"{what} {name}", got[name], expected[name], limit[name])


@pytest.mark.parametrize("option", OPTIONS)
def test_equals_torch_programs_that_clamp(option):
    """Outputs and gradients of the engines of the CPU equal those of a loop in torch with torch.clamp, in float64, also
    with checkpoints, and also those of `lstm_gradients`."""
    case, cotangents = drawn(option)
    expected, limit = by_torch(case, cotangents), bounds(case, np.float64, cotangents)
    for engine in CPU:
        for more in ({}, {"checkpoint_every": 2}):
            outputs, gradients = run(case | more, engine, np.float64, cotangents)
            assert_equal(outputs | gradients, expected, limit, engine)
        again = run_gradients(case, engine, np.float64, cotangents)
        assert_equal(again, {name: expected[name] for name in again}, limit, engine)


@pytest.mark.parametrize(
    "engine, option",
    [
        ("fused", "cell_clip, peephole"),
        pytest.param("fused", "cell_clip, previous", marks=pytest.mark.slow),
        ("stepwise", "both, reverse"),
    ],
)
def test_kernels_equal_torch_programs_that_clamp(engine, option):
    """Outputs and gradients of the kernels equal those of a loop in torch with torch.clamp. `fused` has no
    projection. The kernels of both engines call one function for the clip of c."""
    case, cotangents = drawn(option, np.float32)
    wide = {name: array.astype(np.float64) if isinstance(array, np.ndarray) else array for name, array in case.items()}
    expected = by_torch(wide, {name: d.astype(np.float64) for name, d in cotangents.items()})
    limit = bounds(case, np.float32, cotangents)
    with on_metal():
        outputs, gradients = run(case, engine, np.float32, cotangents)
        again = run_gradients(case, engine, np.float32, cotangents)
    assert_equal(outputs | gradients, expected, limit, engine)
    assert_equal(again, {name: expected[name] for name in again}, limit, engine)


@pytest.mark.parametrize("engine", [*CPU, *METAL_ENGINES])
def test_values_at_the_limit(engine):
    """The gradient passes a value that equals the limit, as in torch.clamp, and stops at a value just above it. All
    numbers are exact: c = x, the preactivation of g, because i = 1 and f = 0; h is o = 1 times c, projected by 1."""
    x = np.array([0.5, -0.5, 0.5 + 2**-20, -0.5 - 2**-20, 0.25, 2.0], np.float32)[None, :, None]
    arrays = {"x": np.concatenate([np.ones_like(x), np.zeros_like(x), x, np.ones_like(x)], -1), "Wh": np.zeros((4, 1))}
    exact = {"activations": ("identity",) * 5, "clip_gradient": "zero"}
    ways = {"cell_clip": 0.5}, {"projection_clip": 0.5, "Wp": mx.ones((1, 1))}
    # `fused` has no projection. `stepwise` clips c by the same function of the shaders as `fused`.
    for options in {"fused": ways[:1], "stepwise": ways[1:]}.get(engine, ways):
        with mx.stream(device_of(engine)), on_metal() if engine in METAL_ENGINES else nullcontext():
            values = [mx.array(array, mx.float32) for array in arrays.values()]
            f = lambda x, Wh, options=options: lstm(x, None, Wh, **exact, **options, engine=engine).h.sum()  # noqa: E731
            got = np.array(mx.grad(f)(*values))[0, :, 2]
        assert got.tolist() == [1, 1, 0, 0, 1, 0], options


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("limit", [0.3, 0.7])
def test_16_bits_do_not_confuse_clipped_values(dtype, limit):
    """A value that was clipped and then rounded to 16 bits counts as clipped, whether the dtype rounds the limit up or
    down. The gradient op gets c and h in 16 bits."""
    x = mx.full((3, 2, 12), 3.0, dtype)
    Wh, Wp = mx.zeros((12, 3), dtype), mx.eye(3, dtype=dtype)
    for options in ({"cell_clip": limit}, {"projection_clip": limit * limit, "Wp": Wp}):
        options |= {"clip_gradient": "zero"}
        for engine in CPU:
            with mx.stream(mx.cpu):
                out = lstm(x, None, Wh, **options, engine=engine, return_gates=True)
                saved = {"gates": out.gates, "c": out.c, "h": out.h, "dh": mx.ones_like(out.h)}
                of_op = lstm_gradients(x, None, Wh, **options, **saved, engine=engine)["x"]
                f = lambda x, o=options, e=engine: lstm(x, None, Wh, **o, engine=e).h.sum()  # noqa: E731
                of_call = mx.grad(f)(x)
                # Only o gets a gradient where c is clipped, and nothing where h is clipped.
                for d in (of_op, of_call):
                    assert not mx.any(d[..., :9]).item() and mx.any(d[..., 9:]).item() == ("cell_clip" in options)


def test_stack_like_elmo():
    """A stack of two layers as in ELMo (both directions apart, cell_clip=3, proj_clip=3, residual sum of the second
    layer) gives torch's gradients. The clips change many values."""
    rng, (T, B, H, P) = np.random.default_rng(2), (6, 2, 5, 3)
    clips = {"cell_clip": 0.5, "projection_clip": 0.3, "clip_gradient": "zero"}
    layers = [
        {"Wx": rng.normal(size=(4 * H, P)), "Wh": rng.normal(size=(4 * H, P)), "b": rng.normal(size=4 * H)}
        | {"Wp": rng.normal(size=(P, H))}
        for _ in range(4)
    ]
    x, d = rng.normal(size=(T, B, P)), rng.normal(size=(2, T, B, P))

    def elmo(run, x, layers):
        ways = []
        for way in range(2):
            below = run(x, layers[2 * way], bool(way))
            ways.append(below + run(below, layers[2 * way + 1], bool(way)))
        return ways

    def ours(x, layer, reverse):
        return lstm(x, **layer, **clips, reverse=reverse, engine=engines[-1]).h

    def theirs(x, layer, reverse):
        return torch_steps(layer | {"x": x, "reverse": reverse} | clips)["h"]

    leaves = [{name: torch.tensor(a, requires_grad=True) for name, a in layer.items()} for layer in layers]
    sum((h * torch.tensor(e)).sum() for h, e in zip(elmo(theirs, torch.tensor(x), leaves), d, strict=True)).backward()
    engines = []
    with mx.stream(mx.cpu):
        x, d = mx.array(x, mx.float64), mx.array(d, mx.float64)
        arrays = [{name: mx.array(a, mx.float64) for name, a in layer.items()} for layer in layers]
        for engine in CPU:
            engines.append(engine)
            gradients = mx.grad(lambda layers: sum((h * d[way]).sum() for way, h in enumerate(elmo(ours, x, layers))))
            for got, wanted in zip(gradients(arrays), leaves, strict=True):
                for name, array in got.items():
                    np.testing.assert_allclose(np.array(array), wanted[name].grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("peephole", [False, True])
def test_equals_tensorflows_cell(peephole):
    """TensorFlow 1's `LSTMCell` with cell_clip, num_proj and proj_clip gives the same outputs and gradients: its
    gradient is 0 where a clip changes a value. Its gate order is icfo."""
    tf = pytest.importorskip("tensorflow")
    from tensorflow.python.keras.layers.legacy_rnn.rnn_cell_impl import LSTMCell

    (_, B, I, H, P), rng = SIZES, np.random.default_rng(0)
    case, cotangents = drawn("both", np.float32)
    case = {name: case[name] for name in ("x", "Wx", "Wh", "b", "h0", "c0", "Wp")} | CLIPS | {"gate_order": "igfo"}
    if peephole:
        case["peephole"] = rng.normal(size=4 * H).astype(np.float32)
        case["peephole"][H : 2 * H] = 0
    cotangents = {name: cotangents[name] for name in "hc"}
    assert keeps_off_kinks(case, np.float32) and all(shift.any() for shift in clip_shift(**case).values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the class is deprecated
        limits = {"cell_clip": case["cell_clip"], "proj_clip": case["projection_clip"]}
        cell = LSTMCell(H, use_peepholes=peephole, num_proj=P, forget_bias=0.0, **limits)
        cell.build(tf.TensorShape([B, I]))
    given = {"kernel": np.concatenate([case["Wx"], case["Wh"]], axis=1).T, "bias": case["b"]}
    if peephole:
        p = dict(zip("icfo", np.split(case["peephole"], 4), strict=True))
        given |= {f"w_{gate}_diag": p[gate] for gate in "ifo"}
    given["projection/kernel"] = case["Wp"].T
    variables = {v.name.partition("/")[2].removesuffix(":0"): v for v in cell.trainable_variables}
    for name, array in given.items():
        variables[name].assign(array)
    states = [tf.Variable(case[name]) for name in ("c0", "h0")]
    with tf.GradientTape() as tape:
        c, h = states
        sequences = {"h": [], "c": []}
        for x_t in case["x"]:
            _, (c, h) = cell(tf.constant(x_t), (c, h))
            sequences["h"].append(h)
            sequences["c"].append(c)
        found = {name: tf.stack(steps) for name, steps in sequences.items()}
        loss = sum(tf.reduce_sum(found[name] * cotangents[name]) for name in found)
    d = dict(zip([*variables, "c0", "h0"], tape.gradient(loss, [*variables.values(), *states]), strict=True))
    d = {name: np.array(gradient) for name, gradient in d.items()}
    expected = {name: np.array(array) for name, array in found.items()} | {name: d[name] for name in ("c0", "h0")}
    expected |= {"Wx": d["kernel"][:I].T, "Wh": d["kernel"][I:].T, "b": d["bias"], "Wp": d["projection/kernel"].T}
    limit = bounds(case, np.float32, cotangents)
    outputs, gradients = run(case, "numpy", np.float32, cotangents)
    if peephole:
        own = np.split(gradients["peephole"], 4)
        gradients |= {f"w_{gate}_diag": own["icfo".index(gate)] for gate in "ifo"}
        expected |= {f"w_{gate}_diag": d[f"w_{gate}_diag"] for gate in "ifo"}
        limit |= {f"w_{gate}_diag": limit["peephole"] for gate in "ifo"}
    for name, array in expected.items():  # both are rounded to float32
        assert_within(name, (outputs | gradients)[name], array.astype(np.float64), 2 * limit[name])


@pytest.mark.parametrize("engine", ["numpy", pytest.param("stepwise", marks=pytest.mark.slow)])
def test_quantized_weights(engine):
    """Clips that stop gradients work with quantized weights."""
    options = {"projection": True, "cell_clip": 0.3, "projection_clip": 0.15, "clip_gradient": "zero"}
    prepared = quantized_case(**options)
    assert all(shift.any() for shift in clip_shift(**prepared[0]).values())
    with on_metal() if engine in METAL_ENGINES else nullcontext():
        check_quantized(engine, prepared)


def test_steppers_and_inference():
    """A stepper and a call for inference clip as a call in training does. The graph of inference, which MLX
    differentiates itself, has the same gradient."""
    case, _ = drawn("both", np.float32)
    arrays = {name: mx.array(case[name]) for name in ("x", "Wx", "Wh", "b", "Wp")}
    weights = convert.from_ops("lstm", [{name: a for name, a in arrays.items() if name != "x"}], **CLIPS)
    with mx.stream(mx.cpu):
        stepper = nn.from_weights(weights).stepper(3)
        out = lstm(**arrays, **CLIPS, engine="ops")
        for x, h in zip(arrays["x"], out.h, strict=True):
            assert mx.allclose(stepper(x), h, rtol=1e-5, atol=1e-6)
        gradients = [
            mx.grad(lambda arrays, training=training: lstm(**arrays, **CLIPS, training=training, engine="ops").h.sum())(
                arrays
            )
            for training in (True, False)
        ]
    for name in arrays:
        assert mx.allclose(gradients[0][name], gradients[1][name], rtol=1e-4, atol=1e-5), name


def test_an_infinite_c_is_clipped():
    """A clip changes an infinite c, and so stops its gradient: no gradient is NaN."""
    x = mx.array(np.array([[[1.0, 1.0, np.inf, 1.0]]], np.float32))
    for engine in CPU:
        with mx.stream(mx.cpu):
            options = {"activations": ("identity",) * 5, "cell_clip": 2.0, "clip_gradient": "zero", "engine": engine}
            out = lstm(x, None, mx.zeros((4, 1)), **options)
            d = mx.grad(lambda x, o=options: lstm(x, None, mx.zeros((4, 1)), **o).h.sum())(x)
        assert out.c.item() == 2 and d[0, 0, 3].item() == 2 and d[0, 0, 2].item() == 0
