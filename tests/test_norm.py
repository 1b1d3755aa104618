"""Tests of layer normalisation inside the step, `norm=`: against the published layers, written anew as programs in
PyTorch float64; against the float64 oracle on each engine with every older option; and its refusals.

The programs share no formula with the library or the oracle: PyTorch's autograd differentiates them.
"""

import pickle

import mlx.core as mx
import numpy as np
import pytest
import torch
from assertions import assert_within, keeps_off_kinks
from cases import combination, draw, draw_cotangents, is_in_range, poison_scratch, random_norm

from mlx_lstm import Norm, convert, gru, lstm, lstm_gradients, pointwise, rnn
from mlx_lstm.engines.cells import NormOptions
from mlx_lstm.engines.numpy import norms
from mlx_lstm.lab import cases
from mlx_lstm.nn import GRU, LSTM, RNN, Pointwise, QuantizedLSTM, replace, stack
from mlx_lstm.oracle import evaluate
from mlx_lstm.oracle.arithmetic import Rounding
from mlx_lstm.oracle.case import ARRAYS
from mlx_lstm.oracle.judge import Case

T, B, I, H = 5, 3, 4, 6
ENGINES = ("ops", "numpy")
FUNCTIONS = {"lstm": lstm, "gru": gru, "rnn": rnn}
NORM_NAMES = ("scale", "shift", "c_scale", "c_shift")
INPUTS = ("input_scale", "input_shift")


def arrays_of(seed, **shapes):
    """Return random float64 arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0.3 if "scale" in name else 0, 0.7, shape) for name, shape in shapes.items()}


def judged(program, ours, arrays):
    """Check that `ours` returns what the PyTorch program returns, with all gradients. Each takes the arrays by name and
    returns a list of arrays. The loss is a sum with random factors."""
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    wanted = program(**leaves)
    factors = [np.random.default_rng(n).normal(size=tuple(w.shape)) for n, w in enumerate(wanted)]
    sum((torch.tensor(f) * w).sum() for f, w in zip(factors, wanted, strict=True)).backward()
    names = list(arrays)
    with mx.stream(mx.cpu):
        values = [mx.array(arrays[name], mx.float64) for name in names]
        outputs, gradients = mx.vjp(
            lambda *given: list(ours(**dict(zip(names, given, strict=True)))),
            values,
            [mx.array(f, mx.float64) for f in factors],
        )
        mx.eval(outputs, gradients)
    pairs = [(f"output {n}", o, w.detach()) for n, (o, w) in enumerate(zip(outputs, wanted, strict=True))]
    pairs += [(f"gradient of {n}", g, leaves[n].grad) for n, g in zip(names, gradients, strict=True)]
    for name, got, want in pairs:
        want = want.numpy()
        # Both compute in float64. An error of rounding, 2e-16, grows at each step by the factor 1 / sqrt(variance +
        # eps) of a norm, which is at most 316 at a product that is 0, and near 1 elsewhere.
        np.testing.assert_allclose(np.array(got), want, rtol=0, atol=1e-10 * np.abs(want).max(), err_msg=name)


def ln(a, scale=None, shift=None, eps=1e-5):
    """Layer normalisation of the last axis, from its definition."""
    mean = a.mean(-1, keepdim=True)
    y = (a - mean) / torch.sqrt(((a - mean) ** 2).mean(-1, keepdim=True) + eps)
    y = y if scale is None else y * scale
    return y if shift is None else y + shift


def unrolled(step, x, *states):
    """Run `step(x_t, *states) -> states` over time. Return the first state at every step, and the last states."""
    seen = []
    for x_t in x:
        states = step(x_t, *states)
        seen.append(states[0])
    return [torch.stack(seen), *states]


SHAPES = {"x": (T, B, I), "Wx": (4 * H, I), "Wh": (4 * H, H), "b": (4 * H,), "h0": (B, H), "c0": (B, H)}
OF_NORMS = {"scale": (4 * H,), "input_scale": (4 * H,), "c_scale": (H,), "c_shift": (H,)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("with_shifts", [False, True], ids=["haste", "ba"])
def test_the_lstm_of_ba_and_haste(engine, with_shifts):
    shapes = SHAPES | OF_NORMS | ({"shift": (4 * H,), "input_shift": (4 * H,)} if with_shifts else {})

    def program(x, Wx, Wh, b, h0, c0, scale, input_scale, c_scale, c_shift, shift=None, input_shift=None):
        def step(x, h, c):
            v = ln(x @ Wx.T, input_scale, input_shift) + ln(h @ Wh.T, scale, shift) + b
            i, g, f, o = v.chunk(4, -1)  # haste's order of gates
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(ln(c, c_scale, c_shift)), c

        return unrolled(step, x, h0, c0)

    def ours(x, Wx, Wh, b, h0, c0, **norms):
        out = lstm(x, Wx, Wh, b, h0, c0, gate_order="igfo", norm=Norm(c="output", **norms), engine=engine)
        return out.h, out.hT, out.cT

    judged(program, ours, arrays_of(1, **shapes))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_layer_norm_lstm_of_pytorchs_benchmarks(engine):
    shapes = SHAPES | OF_NORMS | {"shift": (4 * H,), "input_shift": (4 * H,)}

    def program(x, Wx, Wh, b, h0, c0, scale, input_scale, c_scale, c_shift, shift, input_shift):
        def step(x, h, c):
            igates, hgates = ln(x @ Wx.T, input_scale, input_shift), ln(h @ Wh.T, scale, shift)
            i, f, g, o = (igates + hgates + b).chunk(4, 1)
            c = ln(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g), c_scale, c_shift)
            return torch.sigmoid(o) * torch.tanh(c), c

        return unrolled(step, x, h0, c0)

    def ours(x, Wx, Wh, b, h0, c0, **norms):
        out = lstm(x, Wx, Wh, b, h0, c0, norm=Norm(c="state", **norms), engine=engine)
        return out.h, out.hT, out.cT

    judged(program, ours, arrays_of(2, **shapes))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("of_c", [None, "state"], ids=["tflite", "tf1"])
def test_the_layer_norm_lstms_of_tensorflow(engine, of_c):
    """TFLite's LSTM without peepholes, and TF1's LayerNormBasicLSTMCell, which has no bias, adds forget_bias and
    normalises c, too. Each gate is normalised by itself."""
    shapes = {name: shape for name, shape in SHAPES.items() if name != "b"} | {"scale": (4 * H,), "shift": (4 * H,)}
    shapes |= {"c_scale": (H,), "c_shift": (H,)} if of_c else {}
    forget_bias = 1.0 if of_c else 0.0

    def program(x, Wx, Wh, h0, c0, scale, shift, c_scale=None, c_shift=None):
        def step(x, h, c):
            gates = (torch.cat([x, h], 1) @ torch.cat([Wx, Wh], 1).T).chunk(4, 1)
            i, g, f, o = (ln(*each, eps=1e-12) for each in zip(gates, scale.chunk(4), shift.chunk(4), strict=True))
            c = c * torch.sigmoid(f + forget_bias) + torch.sigmoid(i) * torch.tanh(g)
            c = ln(c, c_scale, c_shift, eps=1e-12) if of_c else c
            return torch.tanh(c) * torch.sigmoid(o), c

        return unrolled(step, x, h0, c0)

    def ours(x, Wx, Wh, h0, c0, scale, shift, **norms):
        norm = Norm("sum", scale, shift, c=of_c, gates="each", eps=1e-12, **norms)
        out = lstm(x, Wx, Wh, None, h0, c0, gate_order="igfo", forget_bias=forget_bias, norm=norm, engine=engine)
        return out.h, out.hT, out.cT

    judged(program, ours, arrays_of(3, **shapes))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_layer_norm_gru_of_haste(engine):
    shapes = {"x": (T, B, I), "Wx": (3 * H, I), "Wh": (3 * H, H), "b": (3 * H,), "bh": (3 * H,), "h0": (B, H)}

    def program(x, Wx, Wh, b, bh, h0, scale, input_scale):
        def step(x, h):
            vx, vh = ln(x @ Wx.T, input_scale) + b, ln(h @ Wh.T, scale) + bh
            (xz, xr, xg), (hz, hr, hg) = vx.chunk(3, -1), vh.chunk(3, -1)  # haste's order of gates
            z, r = torch.sigmoid(xz + hz), torch.sigmoid(xr + hr)
            return (z * h + (1 - z) * torch.tanh(xg + r * hg),)

        return unrolled(step, x, h0)

    def ours(x, Wx, Wh, b, bh, h0, **norms):
        first = mx.concatenate([bh[: 2 * H], mx.zeros(H, bh.dtype)])
        norm = Norm(**norms)
        out = gru(x, Wx, Wh, b + first, h0, bhn=bh[2 * H :], gate_order="zrn", norm=norm, engine=engine)
        return out.h, out.hT

    judged(program, ours, arrays_of(4, **shapes, scale=(3 * H,), input_scale=(3 * H,)))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gru_of_dreamer(engine):
    shapes = {"x": (T, B, I), "Wx": (3 * H, I), "Wh": (3 * H, H), "b": (3 * H,), "h0": (B, H)}

    def program(x, Wx, Wh, b, h0, scale, shift):
        def step(x, h):
            parts = ln(torch.cat([x, h], -1) @ torch.cat([Wx, Wh], -1).T + b, scale, shift, eps=1e-3)
            reset, cand, update = parts.chunk(3, -1)
            update = torch.sigmoid(update - 1)
            return (update * torch.tanh(torch.sigmoid(reset) * cand) + (1 - update) * h,)

        return unrolled(step, x, h0)

    def cell(a, state):
        (reset, cand, update), (h,) = a, state
        update = mx.sigmoid(update - 1)
        return (update * mx.tanh(mx.sigmoid(reset) * cand) + (1 - update) * h,)

    def ours(x, Wx, Wh, b, h0, scale, shift):
        h, (hT,) = pointwise(cell, x, Wx, Wh, b, (h0,), norm=Norm("sum", scale, shift, eps=1e-3), engine=engine)
        return h, hT

    # MLX computes the exp of a float64 sigmoid to float32 only, so the cell of this test uses float64's tanh.
    def sigmoid(a):
        return 0.5 + 0.5 * mx.tanh(0.5 * a)

    globals_of = {"mx": type("mx", (), {"sigmoid": staticmethod(sigmoid), "tanh": staticmethod(mx.tanh)})}
    cell = type(cell)(cell.__code__, globals_of)
    judged(program, ours, arrays_of(5, **shapes, scale=(3 * H,), shift=(3 * H,)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plain_rnn_and_an_own_cell_with_separate_parts(engine):
    shapes = {"x": (T, B, I), "Wx": (H, I), "Wh": (H, H), "b": (H,), "h0": (B, H), "scale": (H,), "shift": (H,)}
    shapes |= {"input_scale": (H,), "input_shift": (H,)}

    def program(x, Wx, Wh, b, h0, scale, shift, input_scale, input_shift):
        def step(x, h):
            return (torch.tanh((ln(x @ Wx.T, input_scale, input_shift) + b) * (1 + ln(h @ Wh.T, scale, shift))),)

        return unrolled(step, x, h0)

    def ours(x, Wx, Wh, b, h0, **norms):
        h, (hT,) = pointwise(multiplied, x, Wx, Wh, b, (h0,), apart=True, norm=Norm(**norms), engine=engine)
        return h, hT

    judged(program, ours, arrays_of(6, **shapes))

    def of_rnn(x, Wx, Wh, b, h0, scale, shift, input_scale, input_shift):
        return unrolled(lambda x, h: (torch.tanh(ln(x @ Wx.T + b + h @ Wh.T, scale, shift)),), x, h0)

    def our_rnn(x, Wx, Wh, b, h0, scale, shift, **unused):
        out = rnn(x, Wx, Wh, b, h0, norm=Norm("sum", scale, shift), engine=engine)
        return out.h, out.hT

    arrays = {name: array for name, array in arrays_of(7, **shapes).items() if "input" not in name}
    judged(lambda **a: of_rnn(**a, input_scale=None, input_shift=None), our_rnn, arrays)


def multiplied(a, state):
    """A cell that reads the input's part and the recurrent part of its gate separately."""
    ((x, p),) = a
    return (mx.tanh(x * (1 + p)),)


# --- Crossings with every older option ---


def drawn(seed, op, dtype):
    """Return a random case with layer normalisation and its cotangents, away from the kinks of its activations."""
    rng = np.random.default_rng([seed, len(op)])
    while True:
        sizes = (int(rng.integers(1, 6)), int(rng.integers(1, 4)), 3, int(rng.integers(1, 5)), 3)
        options = combination(rng, sizes, op, bidirectional=bool(rng.integers(2)))
        options |= {"reset": "after"} if op == "gru" else {}
        case = draw(rng, sizes=sizes, dtype=dtype, **options | {"norm": random_norm(rng, op)})
        call = {
            name: value if value is None or name not in ARRAYS else np.asarray(value, np.float64)
            for name, value in case.items()
        }
        outputs, _ = evaluate(call, None, Rounding(np.float64))
        if is_in_range(outputs) and keeps_off_kinks(call, dtype):
            return case, draw_cotangents(rng, outputs, dtype)


@pytest.mark.parametrize("op", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, *range(4, 12)))])
def test_a_random_call_is_right_on_each_engine(seed, engine, op, monkeypatch):
    """Values and gradients of random calls with random older options are within the oracle's bounds."""
    poison_scratch(monkeypatch)
    dtype = ("float32", "float32", "float16", "bfloat16")[seed % 4]
    judge_case(*drawn(seed, op, dtype), dtype, engine)


def judge_case(case, cotangents, dtype, engine, checkpoint_every=None, training=True):
    """Check the results of a case on an engine against the float64 oracle and its bounds."""
    options = {"checkpoint_every": checkpoint_every} if checkpoint_every else {}
    judge = Case(case, cotangents, dtype)
    exact, bounds = judge.judge()
    with mx.stream(mx.cpu):
        found = cases.run(Case(case | options, cotangents, dtype), engine, training)
        mx.eval(found)
    for name, array in found.items():
        assert_within(name, np.array(array.astype(mx.float32)), exact[name], bounds[name])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("op", ["lstm", "gru", "rnn"])
def test_chunks_and_inference_and_many_lengths(engine, op):
    """Gradient checkpointing, inference, and a batch whose lengths make the engine `numpy` run it in segments."""
    rng = np.random.default_rng(5)
    norm = NormOptions("product", "together", "state" if op == "lstm" else None)
    options = {"op": op, "sizes": (12, 18, 3, 5, 3), "dtype": "float32", "norm": norm}
    case = draw(rng, lengths=rng.integers(0, 13, 18), mask=(12, 18, "P"), keep=True, **options)
    cotangents = draw_cotangents(rng, evaluate(case, None, Rounding(np.float64))[0], "float32")
    judge_case(case, cotangents, "float32", engine)
    judge_case(case, cotangents, "float32", engine, checkpoint_every=4)
    judge_case(case, cotangents, "float32", engine, training=False)


# Places of norms: (op, what is normalised with which gates and with c, the number of batch items).
PLACES = [
    ("lstm", ("product", "together", "output"), 2),
    ("lstm", ("product", "each", None), 2),
    ("lstm", ("product", "together", "state"), 1),
    ("lstm", ("sum", "together", "state"), 1),
    ("lstm", ("sum", "each", None), 2),
    ("lstm", (None, "together", "output"), 2),
    ("gru", ("product", "each", None), 2),
    ("gru", ("product", "together", None), 1),
    ("rnn", ("sum", "each", None), 2),
]


@pytest.mark.parametrize("left_out", ["scale shift", "scale", "shift"])
@pytest.mark.parametrize(("op", "norm", "B"), PLACES)
def test_norms_without_scale_or_shift(op, norm, B, left_out):
    """Values and gradients are within the oracle's bounds if a norm has no scale, no shift or neither."""
    rng = np.random.default_rng(6)
    case = draw(rng, op=op, sizes=(3, B, 3, 4, 4), dtype="float32", norm=NormOptions(*norm))
    case = {name: value for name, value in case.items() if not name.endswith(tuple(left_out.split()))}
    cotangents = draw_cotangents(rng, evaluate(case, None, Rounding(np.float64))[0], "float32")
    exact, bounds = Case(case, cotangents, "float32").judge()
    for engine in ENGINES:
        with mx.stream(mx.cpu):
            found = cases.run(Case(case, cotangents, "float32"), engine)
            mx.eval(found)
        for name, array in found.items():
            assert_within(f"{engine} {name}", np.array(array), exact[name], bounds[name])


def test_a_large_mean_does_not_cost_digits():
    """The variance of numbers with a large mean: E[x^2] - E[x]^2 would lose all digits."""
    x = mx.array(np.random.default_rng(0).normal(1e4, 1, (3, 2, 16)), mx.float32)
    Wh = mx.zeros((16, 4))
    with mx.stream(mx.cpu):
        for engine in ENGINES:
            out = lstm(x, None, Wh, norm=Norm("sum", gates="each"), engine=engine, return_gates=True)
            wide = np.array(x).astype(np.float64).reshape(3, 2, 4, 4)
            want = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
            got = np.array(out.gates).reshape(3, 2, 4, 4)[:, :, 2]
            # x has 24 bits, of which its mean takes 14: a number near 1 is known to 2^-10.
            np.testing.assert_allclose(got, np.tanh(want[:, :, 2]), rtol=0, atol=2e-3)


# --- Layers ---

NORMS = {
    "ba": True,
    "benchmark": Norm(c="state"),
    "tf1": Norm("sum", c="state", gates="each"),
    "c": Norm(None, c="output"),
    "recurrent": Norm("recurrent", gates="each"),
    "sum": Norm("sum"),
}


def layers_with_norms():
    """Yield layers of each kind with each layer normalisation, with random parameters of it."""
    for name, norm in NORMS.items():
        kinds = [lambda n: LSTM(3, 32, layer_norm=n)]
        if norm is True or norm.c is None:
            kinds += [lambda n: RNN(3, 32, layer_norm=n), lambda n: Pointwise(light, 3, 32, gates=2, layer_norm=n)]
            kinds += [lambda n: GRU(3, 32, layer_norm=n)] if norm is True or norm.of != "sum" else []
        for make in kinds:
            layer = make(norm)
            rng = np.random.default_rng(len(name))
            for key, array in layer.parameters().items():
                if key.startswith("norm"):
                    layer[key] = array + mx.array(rng.normal(0, 0.3, array.shape), mx.float32)
            yield layer


def light(a, state):
    """A minimal gated cell."""
    (z, n), (h,) = a, state
    z = 0.5 + 0.5 * mx.tanh(0.5 * z)
    return (h + z * (mx.tanh(n) - h),)


def first(results):
    """Return the h of a layer's results."""
    return results[0] if isinstance(results, tuple) else results


def near(one, other):
    """Compare two results of the same formula in float32: each may be off by rounding, which a norm of a product near 0
    amplifies by at most 1 / sqrt(eps) = 316 units of the last place, 2e-5."""
    np.testing.assert_allclose(np.array(one), np.array(other), rtol=0, atol=4e-5)


@pytest.mark.parametrize("layer", list(layers_with_norms()), ids=lambda layer: repr(layer).partition("layer_norm=")[2])
def test_a_layer_equals_the_function_step_stepper_stack_and_ops(layer):
    """A call of the layer, its steps, a stepper, a stack and the engine `ops` give the same."""
    x = mx.array(np.random.default_rng(0).normal(size=(2, 5, 3)), mx.float32)
    with mx.stream(mx.cpu):
        h = first(layer(x))
        stepper, state, layer.engine = layer.stepper(2), None, None
        for t in range(5):
            args = (state,) if isinstance(layer, Pointwise) or not isinstance(state, tuple) else state
            state = layer.step(x[:, t], *args)
            near(first(state), h[:, t])
            near(stepper(x[:, t]), h[:, t])
        near(stack([layer], x)[0], h)
        layer.engine = "ops"
        near(first(layer(x)), h)
        on_ops = layer.stepper(2)
        for t in range(5):
            near(on_ops(x[:, t]), h[:, t])
        layer.engine = None
        padded = mx.where(mx.arange(5)[None, :, None] < mx.array([5, 2])[:, None, None], x, mx.nan)
        gradient = lambda x: mx.grad(lambda x: first(layer(x, lengths=mx.array([5, 2]))).sum())(x)  # noqa: E731
        near(first(layer(padded, lengths=[5, 2]))[1, :2], h[1, :2])
        assert not mx.isnan(gradient(padded)).any()


def test_the_repr_of_a_loaded_layer_shows_the_options_that_a_user_has_set():
    for layer in (LSTM(3, 4, layer_norm=True), GRU(3, 4, layer_norm=Norm("recurrent", eps=1e-3))):
        assert repr(pickle.loads(pickle.dumps(layer))) == repr(layer)
    assert repr(layer).endswith("layer_norm=Norm(of='recurrent', eps=0.001))")


def test_layers_are_quantized_replaced_and_refused_with_their_norm():
    layer = LSTM(32, 32, layer_norm=True)
    x = mx.random.normal((2, 5, 32))
    with mx.stream(mx.cpu):
        packed = QuantizedLSTM.from_layer(layer, bits=8, group_size=32)
        assert "norm_scale" in packed.parameters()
        near(first(packed(x)), first(packed.dequantize()(x)))
    with pytest.warns(UserWarning, match="with layer_norm"):
        replace(layer, back=True)
    assert type(layer) is LSTM
    with pytest.raises(ValueError, match="must hold"):
        convert.from_mlx(layer)
    with pytest.raises(ValueError, match=r"nn\.LSTM\(layer_norm=\)"):
        convert.from_ops("lstm", [{"Wx": mx.ones((4, 1)), "Wh": mx.ones((4, 1))}], norm=Norm())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda a: lstm(**a, norm=True), r"norm must be a mlx_lstm.Norm, such as .* but got bool"),
        (lambda a: lstm(**a, norm=Norm("product")), "norm.of must be"),
        (lambda a: lstm(**a, norm=Norm(None)), "norm must normalise something"),
        (lambda a: lstm(**a, norm=Norm(eps=0.0)), "norm.eps must be above 0"),
        (lambda a: lstm(**a, norm=Norm(gates="all")), "norm.gates must be"),
        (lambda a: lstm(**a, norm=Norm(scale=mx.ones(4))), r"norm_scale must .*\[8\]"),
        (
            lambda a: lstm(**a, norm=Norm("sum", input_scale=mx.ones(8))),
            "must be None unless norm.of is 'products' but got an array",
        ),
        (
            lambda a: lstm(**a, norm=Norm(c_scale=mx.ones(2))),
            "norm.c_scale must be None unless norm.c is 'output' or 'state'",
        ),
        (
            lambda a: lstm(**a, norm=Norm(None, mx.ones(8), c="output")),
            "norm.scale must be None unless norm.of is 'prod",
        ),
        (lambda a: rnn(a["x"], a["Wx"][:2], a["Wh"][:2], norm=Norm(c="state")), "norm.c must be None"),
        (lambda a: lstm_gradients(norm=Norm()), "None, as MLX's mx.vjp of lstm has its gradient, but got Norm"),
        (lambda a: gru(a["x"], a["Wx"][:6], a["Wh"][:6], norm=Norm("sum")), "the candidate's parts are apart"),
        (lambda a: gru(a["x"], a["Wx"][:6], a["Wh"][:6], reset="before", norm=Norm()), "the candidate's parts are"),
        (lambda a: LSTM(3, 4, layer_norm=Norm(scale=mx.ones(16))), "a Norm without arrays"),
        (lambda a: LSTM(3, 4, layer_norm="pre"), "layer_norm must be True, False or"),
        (lambda a: lstm(**a, norm=Norm(), engine=mx.zeros(2)), r"\[lstm\] engine must be one of .* but got array"),
        (lambda a: lstm(**a, norm=Norm("sum"), engine="metal"), "engine must be one of .* but got 'metal'"),
    ],
)
def test_a_wrong_norm_is_refused(call, text):
    arrays = {"x": mx.ones((3, 2, 3)), "Wx": mx.ones((8, 3)), "Wh": mx.ones((8, 2))}
    with pytest.raises(ValueError, match=text):
        call(arrays)


@pytest.mark.parametrize(
    "T,B,I,both,has_Wx,gates",
    [
        (55, 20, 3, False, True, "together"),
        (70, 15, 5, True, True, "each"),
        (3, 17, 60, True, True, "together"),
        (3, 17, 4, True, False, "each"),
        (5, 3, 4, False, False, "together"),
        (1, 1, 9, False, True, "each"),
        (1, 20, 30, False, True, "together"),
        (2, 20, 3, True, False, "each"),
    ],
)
def test_numpy_normalises_the_inputs_product_of_many_rows_like_ops(T, B, I, both, has_Wx, gates):
    """The rows fill several blocks and chunks, wide and narrow. Where an item has ended x is NaN."""
    (G, H, D), own, rng = (3, 4, 1 + both), (2,) * both, np.random.default_rng(T)
    shapes = {"x": (T, B, I if has_Wx else D * G * H), "Wh": (*own, G * H, H), "b": (D * G * H,)}
    shapes |= {"Wx": (D * G * H, I)} if has_Wx else {}
    norms = {name: (*own, G * H) for name in ("scale", "shift", "input_scale", "input_shift")}
    lengths = rng.integers(1 if T == 1 else 0, T + 1, B)
    drawn = arrays_of(T, **shapes, **norms)
    drawn["x"][np.arange(T)[:, None] >= lengths] = np.nan
    with mx.stream(mx.cpu):
        values = [mx.array(array, mx.float64) for array in drawn.values()]
        cotangent = mx.array(rng.normal(size=(T, B, D * H)), mx.float64)

        def results(engine):
            def h(*given):
                a = dict(zip(drawn, given, strict=True))
                norm = Norm(gates=gates, **{name: a[name] for name in norms})
                options = {"lengths": lengths.tolist(), "bidirectional": both, "engine": engine}
                return gru(a["x"], a.get("Wx"), a["Wh"], a["b"], norm=norm, **options).h

            outputs, gradients = mx.vjp(h, values, [cotangent])
            return [np.array(array) for array in (*outputs, *gradients)]

        for name, ours, theirs in zip(("h", *drawn), results("numpy"), results("ops"), strict=True):
            # Float64 rounds by 1e-16 of the largest term; T B = 1100 terms and the norms of 70 steps amplify this.
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10 * max(1, np.abs(theirs).max()), err_msg=name)


@pytest.mark.parametrize(
    "T,B,I,few_end", [(9, 20, 5, True), (40, 17, 5, False), (1, 20, 600, False), (1, 30, 20, True)]
)
@pytest.mark.parametrize(
    "norm",
    [Norm(c="output"), Norm("sum"), Norm("sum", gates="each", c="state"), Norm("recurrent", gates="each")],
    ids=["products", "sum", "sum each", "recurrent each"],
)
def test_numpy_normalises_wide_batches_like_ops(norm, T, B, I, few_end):
    """The engine `numpy` gives the weights a mean of 0 if there are enough rows. An item that ends early makes it run
    in one pass, many make it run in segments. The forget bias is added after the norm of a sum."""
    H, rng = 4, np.random.default_rng(T + B)
    shapes = {"x": (T, B, I), "Wx": (4 * H, I), "Wh": (4 * H, H), "b": (4 * H,), "h0": (B, H), "c0": (B, H)}
    shapes |= {"keep": (T, B)}
    norms = {"scale": (4 * H,), "shift": (4 * H,)} | ({"c_scale": (H,), "c_shift": (H,)} if norm.c else {})
    norms |= {"input_scale": (4 * H,), "input_shift": (4 * H,)} if norm.of == "products" else {}
    drawn = arrays_of(T, **shapes, **norms)
    drawn["Wh"] += 3  # a mean of the weights that is not 0
    lengths = rng.integers(0, T + 1, B)
    lengths = np.where(np.arange(B) < 1, 0, T) if few_end else lengths
    drawn["x"][np.arange(T)[:, None] >= lengths] = np.nan
    with mx.stream(mx.cpu):
        values = [mx.array(array, mx.float64) for array in drawn.values()]
        cotangents = [mx.array(rng.normal(size=shape), mx.float64) for shape in ((T, B, H), (B, H), (B, H))]

        def results(engine):
            def outputs(*given):
                a = dict(zip(drawn, given, strict=True))
                own = norm._replace(**{name: a.pop(name) for name in norms})
                found = lstm(**a, norm=own, lengths=lengths.tolist(), forget_bias=1.0, engine=engine)
                return found.h, found.hT, found.cT

            found, gradients = mx.vjp(outputs, values, cotangents)
            return [np.array(array) for array in (*found, *gradients)]

        names = ("h", "hT", "cT", *drawn)
        for name, ours, theirs in zip(names, results("numpy"), results("ops"), strict=True):
            # Float64 rounds by 1e-16 of the largest term; T B = 680 terms and the norms of 40 steps amplify this.
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10 * max(1, np.abs(theirs).max()), err_msg=name)


def factor_calls():
    """Yield (function, sizes T B I H P, options) of calls whose norms the engine `numpy` may compute by factors."""
    masked = {"mask": True, "keep": True}
    yield lstm, (40, 3, 5, 4, 0), {"peephole": True, "forget_bias": 1.0, **masked}
    yield lstm, (55, 20, 3, 4, 3), {"bidirectional": True, "c": "state", **masked}
    yield lstm, (30, 1, 6, 4, 0), {"reverse": True, "c": "output", "bare": True}
    yield lstm, (9, 17, 40, 3, 0), {"reverse": True}
    yield lstm, (9, 17, 0, 3, 0), {"c": "output"}
    yield lstm, (30, 3, 2, 4, 0), {"of": "recurrent", "cell_clip": 0.4}
    yield gru, (40, 20, 5, 4, 0), {"bhn": True, **masked}
    yield gru, (40, 3, 5, 4, 0), {"bidirectional": True, "bare": True}
    yield gru, (30, 1, 40, 4, 0), {}
    yield gru, (9, 17, 3, 4, 0), {"of": "recurrent", "reverse": True}
    yield pointwise, (30, 3, 4, 4, 0), {}
    yield pointwise, (9, 17, 4, 4, 0), {"reverse": True, "bare": True}


@pytest.mark.parametrize("function,sizes,options", list(factor_calls()))
def test_numpy_computes_norms_by_factors_like_ops(function, sizes, options, monkeypatch):
    """In float64, so that a wrong term shows. Weights have columns that are 0 or nearly equal, with a large mean."""
    monkeypatch.setattr(norms, "FACTOR_TYPES", (np.float32, np.float64))
    monkeypatch.setattr(norms, "FACTOR_ROWS", 0)
    used, factor = [], norms.Factor.__init__
    monkeypatch.setattr(norms.Factor, "__init__", lambda *a: used.append(1) or factor(*a))
    options, (T, B, I, H, P) = dict(options), sizes
    both, bare, of, c = (options.pop(n, None) for n in ("bidirectional", "bare", "of", "c"))
    G, D, own, width = {lstm: 4, gru: 3, pointwise: 2}[function], 2 if both else 1, (2,) if both else (), P or H
    shapes = {"x": (T, B, I or D * G * H), "Wh": (*own, G * H, width), "h0": (B, D * width)}
    shapes |= {"Wx": (D * G * H, I)} if I else {}
    shapes |= {"Wp": (*own, P, H)} if P else {}
    flags = {"mask": (T, B, D * width), "keep": (T, B, D), "peephole": (*own, 4 * H), "bhn": (D * H,)}
    shapes |= {name: shape for name, shape in flags.items() if options.pop(name, False)}
    shapes |= {} if bare else {"b": (D * G * H,), "scale": (*own, G * H), "shift": (*own, G * H)}
    shapes |= {} if bare or of else {"input_scale": (*own, G * H), "input_shift": (*own, G * H)}
    shapes |= {"c_scale": (*own, H), "c_shift": (*own, H)} if c else {}
    drawn = arrays_of(T + B, **shapes)
    drawn["Wh"] += 3
    if not bare:
        drawn["scale"][..., 0] = 0
    if I:
        drawn["Wx"][:, 0] = 0
        drawn["Wx"][:, -1] = 5
    options |= {"bidirectional": True} if both else {}
    with mx.stream(mx.cpu):
        values = [mx.array(array, mx.float64) for array in drawn.values()]

        def results(engine):
            def outputs(*given):
                a = {"Wx": None} | dict(zip(drawn, given, strict=True))
                norm = Norm(of or "products", c=c, **{n: a.pop(n) for n in (*NORM_NAMES, *INPUTS) if n in a})
                if function is pointwise:
                    given = [a.pop(n, None) for n in ("x", "Wx", "Wh", "b", "h0")]
                    h, (hT,) = pointwise(light, *given[:4], given[4:], norm=norm, engine=engine, **options)
                    return h, hT
                found = function(**a, norm=norm, engine=engine, **options)
                return found.h, found.hT

            rng = np.random.default_rng(0)
            cotangents = [mx.array(rng.normal(size=a.shape), mx.float64) for a in outputs(*values)]
            found, gradients = mx.vjp(outputs, values, cotangents)
            return [np.array(array) for array in (*found, *gradients)]

        for name, ours, theirs in zip(("h", "hT", *drawn), results("numpy"), results("ops"), strict=True):
            # The root of a square matrix has 1e-12 of its largest number; a product is a tenth of this number or more,
            # which enters the variance squared: 1e-10. The norms of 70 steps amplify this.
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-8 * max(1, np.abs(theirs).max()), err_msg=name)
    assert used


@pytest.mark.parametrize("op", ["lstm", "gru"])
def test_norms_by_factors_are_within_the_bounds_of_float32(op):
    rng = np.random.default_rng(6)
    case = draw(rng, op=op, sizes=(16, 3, 4, 5, 3), dtype="float32", keep=True, norm=NormOptions("product"))
    cotangents = draw_cotangents(rng, evaluate(case, None, Rounding(np.float64))[0], "float32")
    judge_case(case, cotangents, "float32", "numpy")
    judge_case(case, cotangents, "float32", "numpy", checkpoint_every=9)


def test_norms_by_factors_pass_on_nan_and_weights_of_0():
    with mx.stream(mx.cpu):
        x, Wx = mx.ones((40, 2, 3)), mx.zeros((16, 3))
        zero = mx.grad(lambda Wh: lstm(x, Wx, Wh, norm=Norm(), engine="numpy").h.sum())(mx.zeros((16, 4)))
        spoilt = lstm(x, Wx, mx.full((16, 4), np.nan), norm=Norm(), engine="numpy").h
        assert bool(mx.isfinite(zero).all()) and bool(mx.isnan(spoilt).all())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("op", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("seed", range(2))
def test_the_norm_of_the_input_next_to_every_option(seed, op, engine):
    """With both products normalised, a call equals one that gets the normalised product of x, written here, and
    normalises the recurrent product, which the oracle judges."""
    rng = np.random.default_rng([seed, len(op)])
    sizes = (int(rng.integers(1, 6)), int(rng.choice([1, 3, 17])), 3, int(rng.integers(1, 5)), 3)
    options = combination(rng, sizes, op, bidirectional=bool(rng.integers(2)))
    options |= {"activations": ("sigmoid", "tanh", "tanh", "sigmoid", "tanh")[: {"lstm": 5, "gru": 3}.get(op, 0)]}
    options |= {"reset": "after"} if op == "gru" else {"activation": "tanh"} if op == "rnn" else {}
    options.pop("activations" if op == "rnn" else "activation", None)
    norm = random_norm(rng, op)._replace(of="product", eps=1e-2)
    case = draw(rng, sizes=sizes, **options | {"norm": norm})
    D, G = 2 if "bidirectional" in options else 1, {"lstm": 4, "gru": 3, "rnn": 1}[op]
    own = {name: rng.normal(0.5, 0.5, case["norm_scale"].shape) for name in ("input_scale", "input_shift")}
    arrays = {n: a for n, a in case.items() if isinstance(a, np.ndarray) and a.dtype == np.float64} | own
    rest = {n: a for n, a in case.items() if n not in (*arrays, "norm", "op")} | {"engine": engine}
    every = {"checkpoint_every": 2} if seed % 2 else {}

    def whole(**a):
        given = {n: a.pop(n) for n in own} | {n: a.pop(f"norm_{n}") for n in NORM_NAMES if f"norm_{n}" in a}
        told = Norm("products", c=norm.c, gates=norm.gates, eps=norm.eps, **given)
        return FUNCTIONS[op](**{"Wx": None} | a, norm=told, **rest, **every)

    def apart(**a):
        Wx = a.pop("Wx", None)
        z = a.pop("x") if Wx is None else a.pop("x") @ Wx.T
        parts = z.reshape(*z.shape[:2], D * (G if norm.gates == "each" else 1), -1)
        parts = parts - parts.mean(axis=-1, keepdims=True)
        z = (parts / mx.sqrt((parts * parts).mean(axis=-1, keepdims=True) + norm.eps)).reshape(z.shape)
        z = z * a.pop("input_scale").reshape(-1) + a.pop("input_shift").reshape(-1)
        given = {n: a.pop(f"norm_{n}") for n in NORM_NAMES if f"norm_{n}" in a}
        told = Norm("recurrent", c=norm.c, gates=norm.gates, eps=norm.eps, **given)
        return FUNCTIONS[op](x=z, Wx=None, **a, norm=told, **rest | {"engine": "ops"})

    with mx.stream(mx.cpu):
        values = [mx.array(a, mx.float64) for a in arrays.values()]
        outputs = ("h", "hT", "cT") if op == "lstm" else ("h", "hT")
        shapes = [getattr(apart(**dict(zip(arrays, values, strict=True))), n).shape for n in outputs]
        cotangents = [mx.array(rng.normal(size=shape), mx.float64) for shape in shapes]
        found = []
        for way in (whole, apart):
            call = lambda *v, way=way: [getattr(way(**dict(zip(arrays, v, strict=True))), n) for n in outputs]  # noqa: E731
            found.append([np.array(a) for each in mx.vjp(call, values, cotangents) for a in each])
    for name, ours, theirs in zip((*outputs, *arrays), *found, strict=True):
        # Float64 rounds by 1e-16; five steps and norms with eps = 0.01 amplify this by less than 10^5.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11 * max(1, np.abs(theirs).max()), err_msg=name)


def test_a_jacobian_of_numpy_goes_through_the_norm_of_the_input():
    """mx.vmap gives the backward pass cotangents without values, so `ops` computes these gradients."""
    drawn = arrays_of(3, x=(2, 2, 3), Wx=(8, 3), Wh=(8, 2), scale=(8,))
    with mx.stream(mx.cpu):
        values = [mx.array(array, mx.float64) for array in drawn.values()]
        units = mx.eye(8, dtype=mx.float64).reshape(8, 2, 2, 2)

        def jacobian(engine):
            def h(x, Wx, Wh, scale):
                return lstm(x, Wx, Wh, norm=Norm(input_scale=scale, c="output"), engine=engine).h

            return mx.vmap(lambda unit: mx.vjp(h, values, [unit])[1])(units)

        for ours, theirs in zip(jacobian("numpy"), jacobian("ops"), strict=True):
            np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=0, atol=1e-12)
