"""Layers with layer normalisation next to every other feature that takes a layer: a cell of the user's own, and the
built-in LSTM. The reference is loops over numbers in float64, which share nothing with the library."""

import copy

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_lstm import Norm, convert, nn, recognise

L, H, D = 5, 4, 3
X = np.random.default_rng(0).normal(size=(2, L, D))
OWN_NORMS = [Norm(), Norm("recurrent"), Norm("sum"), Norm(gates="each")]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def light(a, state):
    """The tested cell: two gates."""
    (z, n), (h,) = a, state
    return (h + mx.sigmoid(z) * (mx.tanh(n) - h),)


def parted(a, state):
    """The same, but each gate is a pair of the input's part and the recurrent part."""
    ((x, p), (y, q)), (h,) = a, state
    return (h + mx.sigmoid(x + p) * (mx.tanh(y * q) - h),)


def ln(a, blocks, scale=1.0, shift=0.0):
    """Layer normalisation of each of the equal parts of a vector, as sums."""
    parts = []
    for part in a.reshape(blocks, -1):
        mean = sum(part) / len(part)
        parts.append((part - mean) / np.sqrt(sum((part - mean) ** 2) / len(part) + 1e-5))
    return np.concatenate(parts) * scale + shift


def own_reference(layer, x, norm, *, apart=False, reverse=False, of=lambda array: array):
    """Return h of every step of a layer with one direction. of: picks the direction's part of a parameter."""
    p = {name: of(np.array(a, np.float64)) for name, a in tree_flatten(layer.parameters())}
    blocks, out = 2 if norm.gates == "each" else 1, np.zeros((*x.shape[:2], H))
    scale, shift = p.get("norm_scale", 1), p.get("norm_shift", 0)
    for item in range(len(x)):
        h = np.zeros(H)
        for t in reversed(range(L)) if reverse else range(L):
            z, q = p["Wx"] @ x[item, t], p["Wh"] @ h
            z = ln(z, blocks, p["norm_input_scale"]) if norm.of == "products" else z
            q = q if norm.of == "sum" else ln(q, blocks, scale, shift)
            z = z + p["bias"]
            sums = ln(z + q, blocks, scale, shift) if norm.of == "sum" else z + q
            h = h + sigmoid(sums[:H]) * (np.tanh(z[H:] * q[H:] if apart else sums[H:]) - h)
            out[item, t] = h
    return out


def lstm_reference(parameters, x, *, reverse=False):
    """Return h of every step of the LSTM of Ba et al."""
    p = {name: np.array(a, np.float64) for name, a in parameters.items()}
    units, out = p["Wh"].shape[1], []
    for item in range(len(x)):
        h, c, found = np.zeros(units), np.zeros(units), {}
        for t in reversed(range(L)) if reverse else range(L):
            z = ln(p["Wx"] @ x[item, t], 1, p["norm_input_scale"]) + ln(p["Wh"] @ h, 1, p["norm_scale"]) + p["bias"]
            i, f, g, o = z.reshape(4, units)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            found[t] = h = sigmoid(o) * np.tanh(ln(c, 1, p["norm_c_scale"], p["norm_c_shift"]))
        out.append([found[t] for t in range(L)])
    return np.array(out)


def filled(layer, seed=1):
    """Return the layer with random parameters, so that no scale is 1."""
    rng = np.random.default_rng(seed)
    for name, array in layer.parameters().items():
        if isinstance(array, mx.array):
            layer[name] = mx.array(rng.normal(1 if "scale" in name else 0, 0.5, array.shape), mx.float32)
    return layer


def own(norm=True, width=D, cell=light, seed=1, **options):
    """Return a layer with the user's cell."""
    return filled(nn.Pointwise(cell, width, H, gates=2, layer_norm=norm, **options), seed)


def near(found, want):
    """Compare with float64. A norm multiplies the rounding of float32 by at most 1 / sqrt(eps) = 316, at 5 steps."""
    np.testing.assert_allclose(np.array(found), want, rtol=0, atol=1e-4)


def by_steps(layers, x):
    """Return h of every step, one step per call."""
    stepper = nn.stepper(layers, len(x))
    return mx.stack([stepper(x[:, t]) for t in range(L)], axis=1)


def exported(layer, x, path):
    """Export the layer as a function, and call it."""
    mx.export_function(path, lambda x: layer(x)[0], x)
    return mx.import_function(path)(x)[0]


def loaded(layer, path):
    """Save the parameters, and load them into a new layer."""
    layer.save_weights(path)
    fresh = nn.Pointwise(light, D, H, gates=2, layer_norm=True)
    fresh.load_weights(path)
    return fresh


CROSSINGS = {
    "mx.compile": lambda layer, x, _: mx.compile(lambda x: layer(x)[0])(x),
    "mx.vmap": lambda layer, x, _: mx.vmap(lambda x: layer(x[None])[0][0])(x),
    "mx.checkpoint": lambda layer, x, _: mx.checkpoint(lambda x: layer(x)[0])(x),
    "export": lambda layer, x, path: exported(layer, x, f"{path}/f.mlxfn"),
    "stack": lambda layer, x, _: nn.stack([layer], x)[0],
    "stepper": lambda layer, x, _: by_steps([layer], x),
    "copy": lambda layer, x, _: copy.deepcopy(layer)(x)[0],
    "file": lambda layer, x, path: loaded(layer, f"{path}/w.safetensors")(x)[0],
}


@pytest.mark.filterwarnings("ignore:inside mx.compile")
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_an_own_cell_with_norms_crosses(crossing, tmp_path):
    layer = own()
    with mx.stream(mx.cpu):
        near(CROSSINGS[crossing](layer, mx.array(X, mx.float32), tmp_path), own_reference(layer, X, Norm()))


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("norm", OWN_NORMS, ids=repr)
@pytest.mark.parametrize("batch", [1, H + 1])
def test_a_stepper_with_each_norm_and_a_wide_batch(batch, norm, engine):
    """A stepper may subtract the means from the weights instead of from each product, for example with a wide batch."""
    x = np.random.default_rng(1).normal(size=(batch, L, D))
    with mx.stream(mx.cpu):
        layer, lstm = own(norm, engine=engine), filled(nn.LSTM(D, H, layer_norm=True, engine=engine))
        near(by_steps([layer], mx.array(x, mx.float32)), own_reference(layer, x, norm))
        near(by_steps([lstm], mx.array(x, mx.float32)), lstm_reference(lstm.parameters(), x))


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("norm", OWN_NORMS, ids=repr)
def test_each_norm_of_an_own_cell_in_each_direction(norm, engine):
    """Forward, in reverse, in both directions, with checkpoints, and with separate parts of each gate."""
    x = mx.array(X, mx.float32)
    with mx.stream(mx.cpu):
        for options in ({}, {"reverse": True}, {"checkpoint_every": 2}):
            layer = own(norm, engine=engine, **options)
            near(layer(x)[0], own_reference(layer, X, norm, reverse="reverse" in options))
        layer, halves = own(norm, engine=engine, bidirectional=True), []
        for d in range(2):
            of = lambda a, d=d: a[d] if len(a) == 2 else np.split(a, 2)[d]  # noqa: E731
            halves.append(own_reference(layer, X, norm, reverse=d == 1, of=of))
        near(layer(x)[0], np.concatenate(halves, axis=-1))
        if norm.of != "sum":
            layer = own(norm, cell=parted, apart=True, engine=engine)
            near(layer(x)[0], own_reference(layer, X, norm, apart=True))


def test_lists_of_layers_with_norms():
    """Layers one after the other with different norms, and layers that run in reverse beside others."""
    x = mx.array(X, mx.float32)
    with mx.stream(mx.cpu):
        first, other, second = own(), own(seed=2), own(Norm("sum"), H, seed=3)
        want = own_reference(first, X, Norm())
        back = own_reference(other, X, Norm(), reverse=True)
        near(nn.stack([first], x, reverse=[other])[0], np.concatenate([want, back], axis=-1))
        want = own_reference(second, want, Norm("sum"))
        near(nn.stack([first, second], x)[0], want)
        near(by_steps([first, second], x), want)
        lstms = [filled(nn.LSTM(D, H, layer_norm=True), n) for n in (4, 5)] + [filled(nn.LSTM(H, H, layer_norm=True))]
        want = lstm_reference(lstms[0].parameters(), X)
        back = lstm_reference(lstms[1].parameters(), X, reverse=True)
        near(nn.stack([lstms[0]], x, reverse=[lstms[1]])[0], np.concatenate([want, back], axis=-1))
        near(by_steps([lstms[0], lstms[2]], x), lstm_reference(lstms[2].parameters(), want))


def test_a_quantized_lstm_with_norms():
    """Many rows, so that the engine `numpy` computes the norms by factors; few rows; and step by step."""
    layer = nn.QuantizedLSTM.from_layer(filled(nn.LSTM(32, 32, layer_norm=True)), bits=8, group_size=32)
    x = np.random.default_rng(2).normal(size=(30, L, 32)) / 8
    want = lstm_reference(layer.dequantize().parameters(), x)
    with mx.stream(mx.cpu):
        many = mx.array(x, mx.float32)
        near(layer(many)[0], want)
        near(layer(many[:2])[0], want[:2])
        near(nn.stack([layer], many)[0], want)
        near(by_steps([layer], many), want)


class Normalised(mlx.nn.Module):
    """One step of an LSTM that a user wrote, with an `nn.LayerNorm` for each of its two products."""

    def __init__(self):
        super().__init__()
        self.Wx, self.Wh = mlx.nn.Linear(D, 4 * H, bias=False), mlx.nn.Linear(H, 4 * H, bias=False)
        self.of_x, self.of_h = mlx.nn.LayerNorm(4 * H), mlx.nn.LayerNorm(4 * H)

    def __call__(self, x, state):
        h, c = state
        i, f, g, o = mx.split(self.of_x(self.Wx(x)) + self.of_h(self.Wh(h)), 4, axis=-1)
        c = mx.sigmoid(f) * c + mx.sigmoid(i) * mx.tanh(g)
        return mx.sigmoid(o) * mx.tanh(c), c


def test_recognise_says_what_it_does_not_find():
    module = Normalised()
    with pytest.warns(UserWarning, match=r"holds an nn.LayerNorm.* pass norm=mlx_lstm.Norm"):
        assert recognise(module, module, D, H) is None


def tree(layer):
    """Return the parameters of a model with this layer, by key."""
    return {f"rnn.{name}": array for name, array in tree_flatten(layer.parameters())}


REFUSALS = {
    "convert.from_mlx": (lambda: convert.from_mlx(own()), "must be an LSTM, GRU or RNN .* got Pointwise"),
    "convert.from_mlx LSTM": (lambda: convert.from_mlx(nn.LSTM(D, H, layer_norm=True)), "no format holds layer norm"),
    "convert.from_mlx GRU": (lambda: convert.from_mlx(nn.GRU(D, H, layer_norm=True)), "no format holds layer norm"),
    "convert.from_mlx RNN": (lambda: convert.from_mlx(nn.RNN(D, H, layer_norm=True)), "no format holds layer norm"),
    "convert.from_names": (lambda: convert.from_names(tree(own())), "no format holds layer normalisation"),
    "a quantized own cell": (lambda: nn.QuantizedLSTM.from_layer(own()), "must be of the class mlx_lstm.nn.LSTM"),
    "other norms beside": (
        lambda: nn.stack([own()], mx.ones((2, L, D)), reverse=[own(Norm("sum"))]),
        r"must have the cell and .* but got layer_norm=Norm\(of='sum'\), Wx",
    ),
    "no norm beside": (
        lambda: nn.stack([own()], mx.ones((2, L, D)), reverse=[own(False)]),
        "must have the cell and .* but got layer_norm=None, Wx",
    ),
    "a layer of torch": (lambda: __import__("mlx_lstm").torch.LSTM(D, H, layer_norm=True), "no option of this layer"),
}


@pytest.mark.parametrize("crossing", REFUSALS)
def test_a_crossing_that_cannot_work_is_refused(crossing):
    call, text = REFUSALS[crossing]
    with pytest.raises(ValueError, match=text):
        call()
