"""Tests of quantized weights in the ops on the CPU engines, in layers and in models. test_quantized_kernels.py has
the tests for the Metal engines."""

import warnings
from contextlib import suppress
from functools import cache
from unittest.mock import patch

import clients
import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from assertions import assert_within
from cases import judge
from mlx.utils import tree_flatten
from quantized_cases import PACKINGS, check_quantized, matrix_of, packed, quantized_case

import mlx_lstm
from mlx_lstm import Quantized, gru_gradients, lstm, lstm_gradients, rnn
from mlx_lstm.engines.cells import NormOptions
from mlx_lstm.engines.numpy import weights
from mlx_lstm.engines.packing import WIDTHS

OPTIONS = {
    "lstm": {"peephole": True, "mask": (3, 2, "P"), "lengths": [3, 1]},
    "lstm_reverse": {"reverse": True, "lengths": [2, 3]},
    "lstm_both": {"bidirectional": True, "mask": (2, "P")},
    "lstm_projection": {"projection": True, "sizes": (3, 2, 5, 64, 32)},
    "lstm_projection_both": {"projection": True, "bidirectional": True, "sizes": (3, 2, 32, 32, 64)},
    "lstm_some": {"projection": True, "quantize": ("Wh",), "sizes": (3, 2, 5, 7, 32)},
    "lstm_projected_x": {"projected_x": True},
    "gru": {"op": "gru", "mask": (3, 2, "P")},
    "gru_before": {"op": "gru", "reset": "before", "lengths": [3, 2]},
    "gru_both": {"op": "gru", "bidirectional": True},
    "rnn": {"op": "rnn", "lengths": [3, 1]},
    "rnn_both": {"op": "rnn", "bidirectional": True},
    "lstm_norm": {"norm": NormOptions("sum", "each", "state"), "peephole": True, "lengths": [3, 1]},
    "lstm_norm_both": {"norm": NormOptions("product", c="output"), "bidirectional": True},
    "gru_norm": {"op": "gru", "norm": NormOptions()},
}
ENGINES = ("numpy", "ops")


@cache
def of_packing(packing):
    group = packing[0]
    return quantized_case(packing, sizes=(2, 2, group, group, group))


@cache
def of_option(option, dtype=np.float32):
    options = OPTIONS[option]
    if options.get("sizes", (0, 0, 32))[2] == 5:
        options = {"quantize": ("Wh", "Wp")} | options
    return quantized_case(dtype=dtype, **options)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_formats_and_defaults_are_those_of_mlx(mode):
    """The library takes every format that `mx.quantize` takes, and no other. Without group size and bits, layers and
    `Quantized` have the format that MLX takes then."""
    matrix, accepted = mx.random.normal((64, 256)), set()
    for packing in [(group, bits) for group in (8, 16, 32, 64, 128, 256) for bits in range(1, 10)]:
        with suppress(ValueError):
            mx.quantize(matrix, *packing, mode)
            accepted.add(packing)
    assert accepted == {(group, bits) for group in WIDTHS[mode][0] for bits in WIDTHS[mode][1]}
    layer = mlx_lstm.nn.LSTM(256, 64)
    quantized = mlx_lstm.nn.QuantizedLSTM.from_layer(layer, mode=mode)
    for part, array in zip(("", "_scales", "_biases"), mx.quantize(layer["Wx"], mode=mode), strict=False):
        np.testing.assert_array_equal(quantized[f"Wx{part}"], array)
    if mode == "affine":
        weight = Quantized(*mx.quantize(matrix))
        np.testing.assert_array_equal(mx.dequantize(*weight[:3], *weight.packing), mx.dequantize(*weight[:3]))
        assert weight.shape == matrix.shape


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_every_mode_width_and_group(engine, packing):
    check_quantized(engine, of_packing(packing))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", OPTIONS)
def test_cells_directions_options(engine, option):
    check_quantized(engine, of_option(option))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", ["lstm_reverse", "lstm_projection_both", "gru_both", "rnn"])
def test_steps_that_a_gradient_computes_again(engine, option):
    """Gradients with `checkpoint_every` are right with quantized weights. The initial states are absent here: their
    default dtype must not be the integer dtype of the quantized weights."""
    case, cotangents, weights, _, _ = of_option(option)
    case = {name: value for name, value in case.items() if name not in ("h0", "c0")}
    exact, limits = judge(case, np.float32, cotangents)
    check_quantized(engine, (case | {"checkpoint_every": 2}, cotangents, weights, exact, limits))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("option", ["lstm_projection", "gru", "rnn_both"])
def test_16_bits(engine, option, dtype):
    check_quantized(engine, of_option(option, dtype), dtype)


def test_ops_compile_and_export(tmp_path):
    case, _, weights, _, _ = of_option("lstm_both")
    arrays = {name: mx.array(case[name], mx.float32) for name in ("x", "b", "h0", "c0")}

    def outputs(x, *parts):
        weights_ = {"Wx": weights["Wx"]._replace(packed=parts[0]), "Wh": weights["Wh"]._replace(packed=parts[1])}
        return lstm(**arrays | {"x": x}, **weights_, bidirectional=True, training=False, engine="ops").h

    given = arrays["x"], weights["Wx"].packed, weights["Wh"].packed
    mx.export_function(str(tmp_path / "f"), outputs, *given)
    for function in (mx.compile(outputs), lambda *given: mx.import_function(str(tmp_path / "f"))(*given)[0]):
        np.testing.assert_allclose(function(*given), outputs(*given), rtol=1e-5, atol=1e-6)


# --- Saved arrays, missing gradients, errors --------------------------------------------------------------------------


def test_dequantized_weights_are_cached_while_they_are_the_same_arrays(monkeypatch):
    made = []
    original = weights.matrix
    monkeypatch.setattr(weights, "_cached", {})  # without entries of other tests, which may end at any moment
    monkeypatch.setattr(weights, "matrix", lambda *arguments: made.append(1) or original(*arguments))
    x, Wh = mx.ones((2, 1, 128)), packed(mx.random.normal((128, 32)), 32, 4, "affine")
    Wh = Wh._replace(biases=mx.array(Wh.biases.astype(mx.bfloat16)), scales=Wh.scales.astype(mx.bfloat16))
    first = lstm(x, None, Wh, engine="numpy").h
    lstm(x, None, Wh, engine="numpy")
    assert len(made) == 1 and len(weights._cached) == 1
    scales = Wh.scales
    scales *= 2  # in place: the same Python object with new values
    biases = Wh.biases
    biases *= 2
    second = lstm(x, None, Wh, engine="numpy").h
    assert len(made) == 2
    np.testing.assert_array_equal(second, lstm(x, None, matrix_of(Wh), engine="numpy").h)
    assert not np.array_equal(first, second)
    del Wh, scales, biases
    assert not weights._cached


def test_the_same_integers_in_several_formats():
    """Read with 4 bits instead of 8, the same integers are twice as many columns of another matrix. The cache of
    dequantized matrices tells these two apart. An x of 16 bits leaves it the matrix in float32."""
    Wh, (integers, *parts) = mx.zeros((32, 32)), mx.quantize(mx.random.normal((32, 32)), 32, 8)
    halves = [part.astype(mx.float16) for part in parts]
    with mx.stream(mx.cpu):
        for bits, dtype, error in [(8, mx.float16, 2e-2), (8, mx.float32, 1e-5), (4, mx.float32, 1e-5)]:
            packing, x = (256 // bits, bits), mx.random.normal((1, 2, 256 // bits)).astype(dtype)
            matrix = mx.dequantize(integers, *(half.astype(mx.float32) for half in halves), *packing)
            expected = np.tanh(np.array(x[0], np.float64) @ np.array(matrix.T, np.float64))
            got = rnn(x, Quantized(integers, *halves, *packing), Wh.astype(dtype)).h[0]
            np.testing.assert_allclose(got, expected, rtol=0, atol=error)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", ["packed", "scales", "biases"])
def test_gradient_of_packed_weights_is_an_error(engine, part):
    Wh, x = packed(mx.ones((128, 32)), 32, 4, "affine"), mx.ones((2, 1, 128))
    loss = lambda array: lstm(x, None, Wh._replace(**{part: array}), engine=engine).h.sum()  # noqa: E731
    with pytest.raises(RuntimeError, match=r"^\[lstm\] quantized weights have no gradient: freeze them, as layer"):
        mx.eval(mx.grad(loss)(getattr(Wh, part)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", ["lstm_projection_both", "gru"])
def test_gradient_ops(engine, option):
    case, cotangents, weights, exact, limits = of_option(option)
    names = ("x", "b", "h0", "c0", "bhn", "mask")
    given = {name: mx.array(case[name], mx.float32) for name in names if case.get(name) is not None} | weights
    options = {"bidirectional": True} if case.get("bidirectional") else {}
    op = case.get("op", "lstm")
    out = getattr(mlx_lstm, op)(**given, **options, return_gates=True)
    saved = {name: getattr(out, name) for name in (("gates", "c", "h") if op == "lstm" else ("gates", "h"))}
    gradients = {"lstm": lstm_gradients, "gru": gru_gradients}[op](
        **given, **saved, **options, **{f"d{name}": mx.array(d) for name, d in cotangents.items()}, engine=engine
    )
    assert gradients.keys() == given.keys() - weights.keys()
    for name, value in gradients.items():
        assert_within(name, value, exact[name], limits[name])


GOOD = packed(mx.ones((128, 32)), 32, 4, "affine")
MX = packed(mx.ones((128, 32)), 32, 4, "mxfp4")


@pytest.mark.parametrize(
    "weights, message",
    [
        ({"Wh": GOOD._replace(mode="int")}, "mode must be one of 'affine', 'mxfp4', 'mxfp8', 'nvfp4' but got 'int'"),
        ({"Wh": GOOD._replace(bits=7)}, "bits of mode 'affine' must be one of 1, 2, 3, 4, 5, 6, 8 but got 7"),
        ({"Wh": MX._replace(group_size=64)}, "group_size of mode 'mxfp4' must be one of 32 but got 64"),
        (
            {"Wh": GOOD, "Wx": packed(mx.ones((128, 32)), 32, 8, "affine")},
            "all quantized weights must be packed in the",
        ),
        ({"b": GOOD, "Wh": GOOD}, "b must be an mlx.core.array but got Quantized"),
        ({"Wh": GOOD._replace(packed=GOOD.packed.astype(mx.int32))}, "Wh.packed must be uint32, its rows groups of 32"),
        ({"Wh": GOOD._replace(group_size=64)}, "Wh.packed must be uint32, its rows groups of 64 weights of 4 bits but"),
        (
            {"Wh": GOOD._replace(scales=GOOD.scales[:5])},
            r"Wh.scales must have shape \[128, 1\], as its rows .* but got shape \[5, 1\]",
        ),
        ({"Wh": GOOD._replace(scales=None)}, "Wh.scales must be an mlx.core.array but got NoneType"),
        ({"Wh": GOOD._replace(packed=None)}, "Wh.packed must be an mlx.core.array but got NoneType"),
        ({"Wh": GOOD._replace(packed=mx.array(1))}, "Wh.packed must be uint32, its rows groups of 32"),
        ({"Wh": GOOD._replace(group_size=[32])}, r"group_size of mode 'affine' must be one of .* but got \[32\]"),
        ({"Wh": GOOD._replace(biases=None)}, "Wh.biases must be an mlx.core.array but got NoneType"),
        ({"Wh": GOOD._replace(biases=GOOD.biases.astype(mx.float16))}, "Wh.biases must have the dtype of the other"),
        ({"Wh": GOOD._replace(mode="mxfp4")}, "Wh.scales must have the dtype of the other arrays, mlx.core.uint8,"),
        ({"Wh": MX._replace(biases=GOOD.biases)}, "Wh.biases must be None in mode 'mxfp4' but got an array"),
        ({"Wh": packed(mx.ones((100, 32)), 32, 4, "affine")}, r"Wh must have shape \[4H, P\] with Wp, else \[4H, H\]"),
        (
            {"Wh": GOOD, "x": mx.ones((2, 1, 32), mx.float64)},
            "x must be float32, float16 or bfloat16 where weights are",
        ),
    ],
    ids=str,
)
def test_what_is_refused(weights, message):
    given = {"x": mx.ones((2, 1, 32)), "Wx": mx.ones((128, 32))} | weights
    with mx.stream(mx.cpu), pytest.raises(ValueError, match=rf"^\[lstm\] {message}"):
        lstm(**given)


# --- Layers -----------------------------------------------------------------------------------------------------------

LAYERS = {
    "LSTM": lambda: mlx_lstm.nn.LSTM(5, 64),
    "GRU": lambda: mlx_lstm.nn.GRU(32, 32),
    "RNN": lambda: mlx_lstm.nn.RNN(32, 32, nonlinearity=nn.relu),
    "mlx LSTM": lambda: nn.LSTM(32, 32, bias=False),
    "mlx GRU": lambda: nn.GRU(5, 32),
    "mlx RNN": lambda: nn.RNN(5, 32),
    "torch LSTM": lambda: mlx_lstm.torch.LSTM(32, 64, 2, bidirectional=True, proj_size=32, batch_first=True),
    "torch GRU": lambda: mlx_lstm.torch.GRU(5, 32, 2, bidirectional=True),
    "torch RNN": lambda: mlx_lstm.torch.RNN(32, 32, nonlinearity="relu", bias=False),
}


def kind_of(name):
    """Return the quantized class for a layer name such as `LSTM` or `torch LSTM`."""
    module, _, kind = name.rpartition(" ")
    return getattr(mlx_lstm.torch if module == "torch" else mlx_lstm.nn, f"Quantized{kind}")


def float_layer(layer):
    """Replace each matrix of `layer` by the values that it has after quantization to 8 bits in groups of 32. Return
    the layer, whose matrices are float arrays."""
    for name, value in layer.items():
        if isinstance(value, mx.array) and value.ndim == 2 and value.shape[1] % 32 == 0:
            layer[name] = matrix_of(packed(value, 32, 8, "affine"))
    return layer


def arrays_of(result):
    """Return all arrays in the result of a layer as a list."""
    return [array for _, array in tree_flatten(result)]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_on_dequantized_weights(name):
    layer = LAYERS[name]()
    before = dict(layer.parameters())
    quantized = kind_of(name).from_layer(layer, group_size=32, bits=8)
    assert layer.parameters().keys() == before.keys() and all(layer[key] is before[key] for key in before)
    x = mx.random.normal((3, 4, 32 if "32" in repr(layer).split(",")[0] else 5))
    floats = mlx_lstm.nn.replace(layer) if "mlx" in name else layer
    for got, expected in zip(arrays_of(quantized(x)), arrays_of(float_layer(floats)(x)), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert repr(quantized)[:-1] == f"Quantized{repr(floats)[:-1]}, group_size=32, bits=8, mode=affine"
    assert quantized.engine_used.engine == "numpy"


def test_parameters_stay_where_they_are_looked_for(tmp_path):
    """Quantized parameters have the names that MLX uses. They can be saved to a file and loaded into a new quantized
    layer."""
    layer = mlx_lstm.nn.QuantizedLSTM.from_layer(mlx_lstm.nn.LSTM(64, 64).eval(), bits=3)
    assert not layer.training and layer.trainable_parameters() == {}
    parts = [f"{name}{end}" for name in ("Wh", "Wx") for end in ("", "_biases", "_scales")]
    assert set(dict(tree_flatten(layer.parameters()))) == {"bias", *parts}
    file = str(tmp_path / "layer.safetensors")
    layer.save_weights(file)
    other = mlx_lstm.nn.QuantizedLSTM(64, 64, bits=3)
    other.load_weights(file)
    x = mx.random.normal((2, 3, 64))
    np.testing.assert_array_equal(other(x)[0], layer(x)[0])
    fresh = mlx_lstm.torch.QuantizedGRU(64, 64, 2, mode="mxfp8")
    assert set(fresh.parameters()) >= {"weight_hh_l1", "weight_hh_l1_scales", "bias_hh_l1"}
    assert (fresh.group_size, fresh.bits) == (32, 8) and "weight_hh_l1_biases" not in fresh


def test_what_is_not_quantized_is_trained():
    layer = mlx_lstm.nn.QuantizedGRU.from_layer(mlx_lstm.nn.GRU(64, 64))
    x = mx.random.normal((2, 3, 64))
    loss = lambda: layer(x).square().sum()  # noqa: E731
    layer.unfreeze(keys=["b", "bhn"])
    _, gradients = nn.value_and_grad(layer, loss)()
    assert gradients.keys() == {"b", "bhn"} and all(mx.abs(array).max() > 0 for array in gradients.values())
    layer.unfreeze()
    with pytest.raises(RuntimeError, match="quantized weights have no gradient"):
        mx.eval(nn.value_and_grad(layer, loss)())


class Other(mlx_lstm.nn.LSTM):
    """A subclass of our LSTM, which must not be quantized."""


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: mlx_lstm.nn.QuantizedLSTM.from_layer(mlx_lstm.nn.LSTM(64, 100)),
            "the columns of Wh must be a multiple of",
        ),
        (
            lambda: mlx_lstm.torch.QuantizedRNN(64, 48),
            "the columns of weight_hh_l0 must be a multiple of group_size = 64",
        ),
        (
            lambda: mlx_lstm.nn.QuantizedLSTM.from_layer(Other(64, 64)),
            "layer must be of the class mlx_lstm.nn.LSTM but",
        ),
        (
            lambda: mlx_lstm.nn.QuantizedGRU.from_layer(nn.LSTM(64, 64)),
            "layer must be of the class mlx_lstm.nn.GRU but",
        ),
        (
            lambda: mlx_lstm.nn.QuantizedGRU(64, 64, bits=7),
            "bits of mode 'affine' must be one of 1, 2, 3, 4, 5, 6, 8 but",
        ),
        (
            lambda: mlx_lstm.nn.QuantizedGRU(64, 64, mode="q4"),
            "mode must be one of 'affine', 'mxfp4', 'mxfp8', 'nvfp4'",
        ),
        (lambda: mlx_lstm.nn.QuantizedGRU(64, 64, bits=4.0), "bits of mode 'affine' must be one of .* but got 4.0"),
        (lambda: mlx_lstm.nn.QuantizedGRU(64, 64, bits=True), "bits of mode 'affine' must be one of .* but got True"),
        (lambda: mlx_lstm.torch.QuantizedGRU(64, 64, group_size=0), "group_size of mode 'affine' must be .* but got 0"),
        (lambda: mlx_lstm.nn.QuantizedRNN(64, 64, mode=["affine"]), "mode must be one of 'affine', 'mxfp4', 'mxfp8'"),
        (lambda: mlx_lstm.nn.quantize(mlx_lstm.nn.LSTM(64, 64)), "model must be a module that has layers"),
        (lambda: mlx_lstm.nn.quantize(nn.Sequential(), class_predicate=5), "class_predicate must be a function"),
    ],
)
def test_what_layers_refuse(make, message):
    with pytest.raises(ValueError, match=rf"^\[(nn|torch)\.\w+\] {message}"):
        make()


@pytest.mark.parametrize("room", [mlx_lstm.nn, mlx_lstm.torch])
@pytest.mark.parametrize("kind", ["QuantizedLSTM", "QuantizedGRU", "QuantizedRNN"])
def test_constructors_say_which_layer_refuses(room, kind):
    name = f"{room.__name__.removeprefix('mlx_lstm.')}.{kind}"
    for sizes, options in (((0, 64), {}), ((64, 0), {}), ((64, 64), {"checkpoint_every": 0}), ((64, 48), {})):
        with pytest.raises(ValueError, match=rf"^\[{name}\] "):
            getattr(room, kind)(*sizes, **options)


@pytest.mark.parametrize(
    "first, second, message",
    [
        (mlx_lstm.nn.LSTM, mlx_lstm.nn.QuantizedLSTM, "a quantized layer must hold packed weights, uint32: load float"),
        (mlx_lstm.nn.QuantizedLSTM, mlx_lstm.nn.LSTM, "a float layer must hold floats: load packed weights into its"),
    ],
)
def test_weights_of_the_other_kind_are_told_so(first, second, message, tmp_path):
    """MLX can load float weights into a quantized layer, or quantized weights into a float layer, with strict=False.
    The next call of the layer then raises a clear error."""
    first(64, 64).save_weights(file := str(tmp_path / "weights.safetensors"))
    (layer := second(64, 64)).load_weights(file, strict=False)
    with pytest.raises(ValueError, match=rf"^\[nn.{second.__name__}\] {message}"):
        layer(mx.ones((1, 2, 64)))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_stack_reads_packed_weights(kind):
    """A bidirectional stack of quantized layers gives bit for bit the results of float layers with the dequantized
    values. Wx of the first layer stays a float matrix, because 5 columns cannot be quantized."""
    layers = [getattr(mlx_lstm.nn, kind)(D, 32) for D in (5, 64, 5, 64)]
    quantized = [kind_of(kind).from_layer(layer, group_size=32, bits=8) for layer in layers]
    x, floats = mx.random.normal((2, 3, 5)), [float_layer(layer) for layer in layers]
    stack = mlx_lstm.nn.stack
    expected = stack(floats[:2], x, reverse=floats[2:], lengths=[3, 1])
    found = stack(quantized[:2], x, reverse=quantized[2:], lengths=[3, 1])
    for got, exact in zip(arrays_of(found), arrays_of(expected), strict=True):
        np.testing.assert_array_equal(got, exact)
    assert quantized[1].engine_used.engine == "numpy"
    with pytest.raises(ValueError, match=r"^\[nn.stack\] reverse\[0\] must be quantized as layers\[0\] but got float"):
        stack(quantized[:1], x, reverse=floats[2:3])
    with pytest.raises(
        ValueError, match=r"^\[nn.stack\] layers\[1\].Wx\w* must have shape .* but got shape \[\d+, 64\]"
    ):
        stack(quantized[:2], x)


# --- Models -----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A model with our layers and MLX's layers, in which one layer is used in two places."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(7, 64), mlx_lstm.nn.LSTM(64, 64)
        self.heads = [nn.Linear(64, 64), self.lstm, mlx_lstm.torch.GRU(64, 64)]
        self.other = {"theirs": nn.GRU(64, 64), "sub": Other(64, 64)}

    def __call__(self, x):
        return self.heads[0](self.heads[2](self.lstm(self.embed(x))[0])[0])


def test_mlx_leaves_our_layers_alone(tmp_path):
    """mlx.nn.quantize quantizes MLX's layers of a model and leaves ours as they are. mlx_lstm.nn.quantize does the
    same if a predicate excludes our layers. A weight file of one of these models loads into the other."""
    model, x = Model(), mx.array([[1, 2, 3]])
    nn.quantize(model)
    assert type(model.lstm) is mlx_lstm.nn.LSTM and type(model.heads[2]) is mlx_lstm.torch.GRU
    assert type(model.embed) is nn.QuantizedEmbedding and type(model.heads[0]) is nn.QuantizedLinear
    other = Model()
    mlx_lstm.nn.quantize(other, class_predicate=lambda _, layer: isinstance(layer, (nn.Embedding, nn.Linear)))
    for first, second in ((model, other), (other, model)):
        file = str(tmp_path / "weights.safetensors")
        first.save_weights(file)
        second.load_weights(file)
        np.testing.assert_array_equal(second(x), first(x))
        first.lstm.Wh = first.lstm.Wh + 1


def test_quantize_a_model():
    model, x = Model(), mx.array([[1, 2, 3]])
    names = []

    def predicate(name, layer):
        names.append(name)
        return {"group_size": 32, "bits": 8} if name == "heads.2" else name != "embed" and "other" not in name

    mlx_lstm.nn.quantize(model, 64, 4, class_predicate=predicate)
    assert "other.theirs" in names and "heads.2" in names
    assert type(model.lstm) is mlx_lstm.nn.QuantizedLSTM and model.heads[1] is model.lstm
    assert (model.heads[2].group_size, model.heads[2].bits, model.lstm.bits) == (32, 8, 4)
    assert type(model.embed) is nn.Embedding and type(model.other["theirs"]) is nn.GRU
    assert type(model.heads[0]) is nn.QuantizedLinear and model(x).shape == (1, 3, 64)
    mlx_lstm.nn.quantize(model, 64, 4)  # quantized layers and subclasses stay unchanged
    assert type(model.embed) is nn.QuantizedEmbedding and type(model.other["sub"]) is Other and model.lstm.bits == 4


def test_mlx_gets_the_option_quantize_input():
    ours, theirs = (nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(2))
    mlx_lstm.nn.quantize(ours, mode="nvfp4", quantize_input=True)
    nn.quantize(theirs, mode="nvfp4", quantize_input=True)
    assert type(ours.layers[0]) is type(theirs.layers[0]) is not nn.QuantizedLinear


def test_a_model_stays_as_it_was_where_a_layer_is_refused():
    model = nn.Sequential(nn.Linear(64, 64), mlx_lstm.nn.GRU(64, 64), mlx_lstm.nn.GRU(64, 40))
    with pytest.raises(
        ValueError, match=r"columns of Wh must be .* group_size = 64 but got 40. The layer is layers.2 of the model."
    ):
        mlx_lstm.nn.quantize(model)
    assert [type(layer) for layer in model.layers] == [nn.Linear, mlx_lstm.nn.GRU, mlx_lstm.nn.GRU]


@pytest.mark.parametrize("kind", [nn.RNN, mlx_lstm.nn.RNN])
def test_a_nonlinearity_that_no_quantized_layer_has_is_refused_before_the_model_changes(kind):
    rule = r"\[nn.QuantizedRNN\] nonlinearity must be MLX's tanh, relu or sigmoid here, .*"
    layer, ours = kind(64, 64, nonlinearity=nn.silu), mlx_lstm.nn.RNN(64, 64, nonlinearity=nn.silu)
    with pytest.raises(ValueError, match=rule):
        mlx_lstm.nn.QuantizedRNN.from_layer(layer)
    with pytest.raises(ValueError, match=rule):
        mlx_lstm.nn.QuantizedRNN(64, 64, nonlinearity=nn.silu)
    model = nn.Sequential(nn.Linear(64, 64), ours)
    with pytest.raises(ValueError, match=rule + "The layer is layers.1 of the model."):
        mlx_lstm.nn.quantize(model)
    assert [type(layer) for layer in model.layers] == [nn.Linear, mlx_lstm.nn.RNN]


def test_float_layers_that_stay_are_named():
    """`quantize` names recurrent layers that stay in float: layers of MLX, subclasses, cells, and layers of other
    packages, and layers in a tuple. It does not name layers that `class_predicate` leaves out."""
    model = Model()
    model.pair = (mlx_lstm.nn.GRU(64, 64), nn.Linear(64, 64))
    model.more = [clients.TwoBiases(), mlx_lstm.torch.LSTMCell(3, 4), mlx_lstm.nn.QuantizedGRU(64, 64)]
    with pytest.warns(UserWarning) as heard:
        mlx_lstm.nn.quantize(model, 64, 4)
    (warning,) = heard
    assert warning.filename == __file__
    assert str(warning.message) == (
        "[nn.quantize] left in float: other.theirs (mlx.nn.GRU: call mlx_lstm.nn.replace first), "
        "other.sub (Other, a subclass of mlx_lstm.nn.LSTM), "
        "pair.0 (GRU in a tuple, in which MLX finds no layers: use a list), "
        "more.0 (TwoBiases, which has the parameters of an LSTM), more.1 (LSTMCell, which has no quantized kind)."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mlx_lstm.nn.quantize(Model(), class_predicate=lambda path, layer: path == "lstm")


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("module", [mlx_lstm.nn, mlx_lstm.torch], ids=["nn", "torch"])
def test_dequantize_makes_the_float_layer_again(module, kind, mode):
    """`dequantize` returns a layer of the float class that computes the same results. All its parameters are
    trainable, and it is in training or evaluation mode like the original layer. The quantized layer does not change."""
    mx.random.seed(4)
    layer = getattr(module, kind)(64, 64).eval()
    quantized = getattr(module, f"Quantized{kind}").from_layer(layer, mode=mode)
    before = dict(tree_flatten(quantized.parameters()))
    back = quantized.dequantize()
    assert type(back) is type(layer) and repr(back) == repr(layer) and not back.training
    assert back.trainable_parameters().keys() == layer.parameters().keys()
    x = mx.random.normal((3, 5, 64))
    for one, other in zip(tree_flatten(back(x)), tree_flatten(quantized(x)), strict=True):
        np.testing.assert_allclose(np.array(one[1]), np.array(other[1]), rtol=0, atol=1e-5)
    assert all(before[key] is array for key, array in tree_flatten(quantized.parameters()))
    gradients = nn.value_and_grad(back, lambda: back(x)[0].sum())()[1]
    assert all(gradient.abs().max().item() > 0 for _, gradient in tree_flatten(gradients))


@pytest.mark.parametrize("name", [name for name in clients.CLIENTS if name not in clients.OWN])
def test_clients_models(name):
    """The layers of typical models are replaced by ours and then quantized. The outputs of the quantized models equal
    those of the same models with float layers that hold the dequantized weights."""
    with patch.object(clients, "D", 32), patch.object(clients, "H", 32):
        model = clients.CLIENTS[name][0]()
        mlx_lstm.nn.replace(model)
        x = mx.random.normal((3, 5, 32))
        kinds = mlx_lstm.nn.LSTM, mlx_lstm.nn.GRU, mlx_lstm.nn.RNN
        ours = [layer for _, layer in model.named_modules() if isinstance(layer, kinds)]
        mlx_lstm.nn.quantize(model, 32, 8, class_predicate=lambda _, layer: isinstance(layer, kinds))
        got = model(x)
        quantized = [layer for _, layer in model.named_modules() if type(layer).__name__.startswith("Quantized")]
        assert len(quantized) == len(ours) > 0
        for layer in quantized:
            for key in [key for key in layer if f"{key}_scales" in layer]:
                weight = Quantized(layer[key], layer[f"{key}_scales"], layer[f"{key}_biases"], 32, 8)
                layer[key] = matrix_of(weight)
                del layer[f"{key}_scales"], layer[f"{key}_biases"]
        for one, other in zip(got, model(x), strict=True):
            np.testing.assert_array_equal(one, other)


def test_float_layers_pay_nothing():
    """A layer without quantized weights passes its weight arrays to the op without any conversion."""
    layer = mlx_lstm.nn.RNN(3, 4)
    with patch.object(mlx_lstm.recurrence.Call, "forward", side_effect=InterruptedError) as forward:
        with pytest.raises(InterruptedError):
            layer(mx.ones((1, 2, 3)))
        assert forward.call_args.args[0]["Wh"].shape == (4, 4)
    assert rnn(mx.ones((2, 1, 3)), layer.Wxh, layer.Whh).h.shape == (2, 1, 4)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_how_far_a_weight_moves(bits):
    """docs/quantize.md: by less than one step of its group; most weights by at most half a step."""
    W = np.random.default_rng(bits).uniform(-1, 1, (512, 64)).astype(np.float32)
    moved = np.abs(np.array(mx.dequantize(*mx.quantize(mx.array(W), 64, bits), 64, bits)) - W)
    steps = moved / ((W.max(axis=1) - W.min(axis=1)) / (2**bits - 1))[:, None]
    assert 0.5 < steps.max() < 1 and np.mean(steps < 0.501) > 0.9
    assert abs(np.sqrt(np.mean(steps**2)) * np.sqrt(12) - 1) < 0.05


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_vmap_on_the_cpu(mode):
    """docs/limits.md: only the mode affine can be dequantized where MLX has no rule for the quantized product."""
    layer = mlx_lstm.nn.QuantizedLSTM.from_layer(mlx_lstm.nn.LSTM(32, 32, engine="ops"), 32, 4, mode)
    x = mx.random.normal((2, 3, 32))
    with mx.stream(mx.cpu):
        if mode == "affine":
            np.testing.assert_allclose(mx.vmap(lambda x: layer(x)[0])(x), layer(x)[0], atol=1e-5)
        else:
            with pytest.raises(RuntimeError, match="QuantizedMatmul::vmap"):
                mx.eval(mx.vmap(lambda x: layer(x)[0])(x))
