"""Tests of `mlx_lstm.nn`: LSTM, GRU and RNN have the same parameters, shapes, values, gradients and weight files as
the layers of mlx.nn."""

import itertools
import warnings

import mlx.core as mx
import mlx.nn as reference
import mlx.optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten
from pairs import pairs

import mlx_lstm.nn as nn
from mlx_lstm import torch
from mlx_lstm.engines.at_once import by_numpy
from mlx_lstm.engines.cell_tracer import cached_trace

D, H = 3, 4
SHAPES = [(2, 5, D), (5, D), (1, 5, D), (2, 1, D), (1, 1, D), (1, D), (2, 3, 4, D), (20, 30, D)]
STATES = [(), ("hidden",), ("cell",), ("hidden", "cell")]


def pair(bias=True, **options):
    """Return (our LSTM layer, the LSTM layer of mlx.nn with the same parameters)."""
    ours, theirs = nn.LSTM(D, H, bias, **options), reference.LSTM(D, H, bias)
    theirs.update(ours.parameters())
    return ours, theirs


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


def loss_and_gradients(layer, x, states, cotangents, call=None):
    """Return the loss and the gradients of all parameters, of x and of the states. The loss is the sum of all
    outputs of `call` (by default the layer), weighted with `cotangents`."""

    def loss(parameters, x, states):
        layer.update(parameters)
        found = as_tuple((call or layer)(x, **states))
        return sum((out * weight).sum() for out, weight in zip(found, cotangents, strict=True))

    value, gradients = mx.value_and_grad(loss, argnums=(0, 1, 2))(layer.trainable_parameters(), x, states)
    return dict(tree_flatten([value, gradients]))


@pytest.mark.parametrize(
    "shape, given, bias, engine", pairs(shape=SHAPES, given=STATES, bias=[True, False], engine=["numpy", "ops"])
)
def test_values_and_gradients(shape, given, bias, engine):
    mx.random.seed(0)
    ours, theirs = pair(bias, engine=engine)
    x, states = mx.random.normal(shape), {name: mx.random.normal((*shape[:-2], H)) for name in given}
    cotangents = [mx.random.normal((*shape[:-1], H)) for _ in range(2)]
    for left, right in zip(ours(x, **states), theirs(x, **states), strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        np.testing.assert_allclose(np.array(left), np.array(right), rtol=0, atol=4e-6)
    got, expected = (loss_and_gradients(layer, x, states, cotangents) for layer in (ours, theirs))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        # Our layer and MLX's layer add up steps and batch in different orders. The tolerance is a few rounding
        # errors of the largest term.
        scale = max(1.0, np.abs(np.array(value)).max()) * np.sqrt(x.size)
        np.testing.assert_allclose(np.array(got[name]), np.array(value), rtol=0, atol=16 * 1.2e-7 * scale, err_msg=name)


def test_constructor_parameters_and_repr():
    for bias in (True, False):
        mx.random.seed(7)
        ours = nn.LSTM(D, H, bias)
        mx.random.seed(7)
        theirs = reference.LSTM(D, H, bias)
        assert repr(ours) == repr(theirs)
        got, expected = dict(tree_flatten(ours.parameters())), dict(tree_flatten(theirs.parameters()))
        assert got.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(np.array(got[name]), np.array(expected[name]))
    assert nn.LSTM(input_size=D, hidden_size=H, bias=False).bias is None


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_weight_files_load_both_ways(tmp_path, suffix):
    ours, theirs = nn.LSTM(D, H), reference.LSTM(D, H)
    for source, target in itertools.permutations([ours, theirs]):
        path = str(tmp_path / f"weights.{suffix}")
        source.save_weights(path)
        target.load_weights(path)
        np.testing.assert_array_equal(np.array(source.Wx), np.array(target.Wx))


@pytest.mark.parametrize("x", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("parameters", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_dtypes_promote_as_in_mlx(parameters, x):
    """Outputs have the same dtypes as in mlx.nn when the parameters, x and each of the states have different dtypes."""
    ours, theirs = pair()
    ours.set_dtype(parameters)
    theirs.set_dtype(parameters)
    sequence, wide, same = mx.random.normal((2, 3, D)).astype(x), mx.zeros((2, H)), mx.zeros((2, H), x)
    for given in ((), (same, same), (wide,), (None, wide), (same, wide)):
        states = dict(zip(("hidden", "cell"), given, strict=False))
        dtypes = [[out.dtype for out in layer(sequence, **states)] for layer in (ours, theirs)]
        assert dtypes[0] == dtypes[1], given


def test_a_state_broadcasts_over_the_batch():
    ours, theirs = pair()
    x, state = mx.random.normal((3, 5, D)), mx.random.normal((H,))
    rows = mx.broadcast_to(state, (3, H))
    for left, right in zip(ours(x, state, state), theirs(x, rows, rows), strict=True):
        np.testing.assert_allclose(np.array(left), np.array(right), atol=1e-6)


def test_batch_equals_item_by_item_and_sequence_equals_step_by_step():
    layer = nn.LSTM(D, H)
    x = mx.random.normal((3, 6, D))
    hidden, cell = layer(x)
    for n in range(3):
        np.testing.assert_allclose(np.array(layer(x[n])[0]), np.array(hidden[n]), atol=1e-6)
    h = c = None
    for t in range(6):
        all_h, all_c = layer(x[:, t : t + 1], h, c)
        h, c = all_h[:, -1], all_c[:, -1]
        np.testing.assert_allclose(np.array(h), np.array(hidden[:, t]), atol=1e-6)
    np.testing.assert_allclose(np.array(c), np.array(cell[:, -1]), atol=1e-6)


def test_inside_a_model_in_training_compiled_and_exported(tmp_path):
    class Model(reference.Module):
        def __init__(self, layer):
            super().__init__()
            self.lstm, self.head = layer, reference.Linear(H, 1)

        def __call__(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    mx.random.seed(1)
    ours, theirs = (Model(layer) for layer in pair())
    theirs.update(ours.parameters())
    x, y = mx.random.normal((8, 5, D)), mx.random.normal((8, 1))
    curves = []
    for model in (ours, theirs):
        optimizer = mlx.optimizers.Adam(1e-2)
        step = reference.value_and_grad(model, lambda x, y, model=model: ((model(x) - y) ** 2).mean())
        losses = []
        for _ in range(10):
            loss, gradients = step(x, y)
            optimizer.update(model, gradients)
            losses.append(loss.item())
        curves.append(losses)
    np.testing.assert_allclose(*curves, rtol=1e-4)
    assert curves[0][-1] < curves[0][0]
    mx.eval(ours.parameters())  # a compiled function may capture only evaluated arrays
    np.testing.assert_allclose(np.array(mx.compile(ours)(x)), np.array(ours(x)), atol=1e-6)
    ours.eval()
    path = str(tmp_path / "model.mlxfn")
    mx.export_function(path, ours, x)
    np.testing.assert_allclose(np.array(mx.import_function(path)(x)[0]), np.array(ours(x)), atol=1e-6)


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_an_empty_batch(layer):
    """An empty batch gives empty outputs and a zero gradient of every parameter, as in MLX."""
    ours = getattr(nn, layer)(D, H)
    for batch in ((0,), (2, 0)):
        expected = getattr(reference, layer)(D, H)(
            mx.zeros((*batch, 5, D))
        )  # no state is passed: MLX fails for an empty batch with a state
        for states in ((), (mx.zeros((*batch, H)),), (mx.zeros((H,)),)):
            found = ours(mx.zeros((*batch, 5, D)), *states)
            for one, other in zip(*([o] if isinstance(o, mx.array) else o for o in (found, expected)), strict=True):
                assert one.shape == other.shape == (*batch, 5, H) and one.dtype == mx.float32

    def loss(x):
        out = ours(x)
        return out.sum() if isinstance(out, mx.array) else out[0].sum() + out[1].sum()

    gradients = reference.value_and_grad(ours, loss)(mx.zeros((0, 5, D)))[1]
    assert gradients.keys() == ours.parameters().keys()
    for name, value in gradients.items():
        assert value.shape == ours[name].shape and not value.any(), name
    ours.set_dtype(mx.bfloat16)
    out = ours(mx.zeros((0, 5, D), mx.bfloat16))
    assert (out if isinstance(out, mx.array) else out[1]).dtype == mx.bfloat16
    with pytest.raises(ValueError, match=r"hidden must have shape \[0, 4\], as x is .* but got shape \[3, 4\]"):
        ours(mx.zeros((0, 5, D)), mx.zeros((3, H)))
    for shape in ((0, 0, D), (0, 5, 0)):
        with pytest.raises(ValueError, match=rf"\[nn.{layer}\] x must have shape"):
            ours(mx.zeros(shape))


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_numpy_s_integers_are_sizes(layer):
    ours = getattr(nn, layer)(np.int64(D), np.int8(100))
    assert type(ours.hidden_size) is int
    assert repr(ours) == repr(getattr(reference, layer)(D, 100))
    with pytest.raises(ValueError, match="input_size must be an integer of at least 1"):
        getattr(nn, layer)(np.bool_(True), H)


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_lengths_are_those_of_calls_with_each_item_alone(kind, engine):
    """A call with `lengths` gives the same values and gradients as separate calls for each sequence of the batch.
    Outputs after the end of a sequence are 0, and the input there is never read, so it may be NaN."""
    mx.random.seed(3)
    layer = getattr(nn, kind)(D, H, engine=engine)
    names = ("hidden", "cell") if kind == "LSTM" else ("hidden",)
    for batch, lengths in (((4,), [5, 1, 0, 3]), ((2, 2), [[5, 1], [0, 3]]), ((), 3), ((4,), mx.array([5, 1, 0, 3]))):
        x, states = mx.random.normal((*batch, 5, D)), {name: mx.random.normal((*batch, H)) for name in names}
        weights = [mx.random.normal((*batch, 5, H)) for _ in names]
        ends = np.broadcast_to(np.array(lengths), batch)
        padded = np.array(x)
        padded[np.arange(5) >= ends[..., None]] = np.nan

        def alone(x, states=states, ends=ends, batch=batch, **given):
            """Call the layer for each sequence separately, cut to its length, and pad the outputs with zeros."""
            items = []
            for place in np.ndindex(batch):
                n = int(ends[place])
                found = as_tuple(layer(x[place][:n], **{name: given[name][place] for name in given})) if n else None
                items.append(
                    [mx.pad(out, [(0, 5 - n), (0, 0)]) for out in found] if n else [mx.zeros((5, H))] * len(names)
                )
            return tuple(mx.stack(list(outs)).reshape(*batch, 5, H) for outs in zip(*items, strict=True))

        call = lambda x, lengths=lengths, **given: layer(x, lengths=lengths, **given)  # noqa: E731
        for out, exact in zip(as_tuple(call(mx.array(padded), **states)), alone(x, **states), strict=True):
            np.testing.assert_allclose(np.array(out), np.array(exact), rtol=0, atol=1e-6)
        got = loss_and_gradients(layer, mx.array(padded), states, weights, call)
        expected = loss_and_gradients(layer, x, states, weights, alone)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(np.array(got[name]), np.array(value), rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_keep_of_a_step_is_a_factor_on_the_states(kind, engine):
    mx.random.seed(4)
    layer = getattr(nn, kind)(D, H, engine=engine)
    names = ("hidden", "cell") if kind == "LSTM" else ("hidden",)
    for batch in ((3,), (), (2, 3)):
        x, states = mx.random.normal((*batch, D)), {name: mx.random.normal((*batch, H)) for name in names}
        keep, weights = mx.random.uniform(shape=batch), [mx.random.normal((*batch, H)) for _ in names]

        def by_hand(x, keep=keep, **states):
            return layer.step(x, **{name: state * keep[..., None] for name, state in states.items()})

        def step(x, keep=keep, **states):
            return layer.step(x, **states, keep=keep)

        got, expected = (loss_and_gradients(layer, x, states, weights, call) for call in (step, by_hand))
        for name, value in expected.items():
            np.testing.assert_allclose(np.array(got[name]), np.array(value), rtol=0, atol=1e-6, err_msg=name)
        whole = as_tuple(layer(x[..., None, :], **states, keep=keep[..., None]))
        for out, exact in zip(as_tuple(step(x, **states)), whole, strict=True):
            np.testing.assert_array_equal(np.array(out), np.array(exact[..., 0, :]))
        restarted = as_tuple(layer.step(x, **states, keep=mx.zeros(batch, mx.bool_)))
        for out, exact in zip(restarted, as_tuple(layer.step(x)), strict=True):
            np.testing.assert_array_equal(np.array(out), np.array(exact))


QUANTIZED = {f"Quantized{kind}": {"group_size": 32} for kind in ("LSTM", "GRU", "RNN")}


@pytest.mark.parametrize("engine", [None, "ops"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", *QUANTIZED])
def test_a_step_is_the_only_step_of_a_call(kind, engine):
    """`layer.step` gives bit for bit the same values and gradients as a call of the layer on a sequence of one time
    step."""
    mx.random.seed(0)
    H = 32 if kind in QUANTIZED else 4
    layer = getattr(nn, kind)(D, H, **QUANTIZED.get(kind, {}))
    layer.engine = engine
    names = ("hidden", "cell") if "LSTM" in kind else ("hidden",)

    def only_step(x, **states):
        return tuple(out[..., 0, :] for out in as_tuple(layer(x[..., None, :], **states)))

    for batch, given in [((), names), ((1,), ()), ((3,), names[:1]), ((2, 3), names)]:
        x, states = mx.random.normal((*batch, D)), {name: mx.random.normal((*batch, H)) for name in given}
        weights, found = [mx.random.normal((*batch, H)) for _ in names], []
        for call in (layer.step, only_step):
            for training in (True, False):
                layer.train(training)
                gradients = loss_and_gradients(layer, x, states, weights, call)
                found.append(gradients | dict(enumerate(as_tuple(call(x, **states)))))
                assert found[-1][0].shape == (*batch, H) and layer.engine_used.engine == (engine or "numpy")
        for other in found[1:]:
            assert other.keys() == found[0].keys()
            for name, value in other.items():
                np.testing.assert_array_equal(np.array(value), np.array(found[0][name]), err_msg=name)


def test_a_step_is_traced_and_exported(tmp_path):
    layer = nn.LSTM(D, H).eval()
    x, h, c = mx.random.normal((2, D)), mx.random.normal((2, H)), mx.random.normal((2, H))
    mx.eval(layer.parameters())
    mx.export_function(str(tmp_path / "f"), layer.step, x, h, c)
    each = mx.vmap(layer.step)(x, h, c)
    imported = mx.import_function(str(tmp_path / "f"))(x, h, c)
    for found in (mx.compile(layer.step)(x, h, c), each, imported):
        for one, other in zip(found, layer.step(x, h, c), strict=True):
            np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-6)


def test_a_step_of_other_batches_dtypes_and_states():
    layer = nn.LSTM(D, H)
    assert [one.shape for one in layer.step(mx.zeros((0, D)))] == [(0, H)] * 2
    assert nn.GRU(D, H).step(mx.zeros((2, 0, D)), mx.zeros((H,))).shape == (2, 0, H)
    x, row = mx.random.normal((3, D)), mx.random.normal((H,))
    for one, other in zip(layer.step(x, row), layer.step(x, mx.broadcast_to(row, (3, H))), strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    layer.set_dtype(mx.bfloat16)
    assert [one.dtype for one in layer.step(x.astype(mx.bfloat16))] == [mx.bfloat16] * 2
    assert [one.dtype for one in layer.step(x.astype(mx.bfloat16), row)] == [mx.float32] * 2


def set_and_call(layer, **options):
    for name, value in options.items():
        setattr(layer, name, value)
    layer(mx.zeros((2, 5, D)))


BAD = {
    "step: x": (
        lambda layer: layer.step(mx.zeros((2, D + 1))),
        r"\[nn.LSTM\] x must have shape \[..., D = 3\] but got",
    ),
    "step: no axis": (lambda layer: layer.step(mx.array(1.0)), r"x must have shape \[..., D = 3\] but got shape \[\]"),
    "step: a list": (lambda layer: layer.step([1.0] * D), r"x must be an mlx.core.array: make one by mx.array"),
    "step: a state": (
        lambda layer: layer.step(mx.zeros((2, D)), cell=mx.zeros((3, H))),
        r"cell must have shape \[2, 4\], as x is \[batch, features\] = \[2, 3\], but got shape \[3, 4\]\.",
    ),
    "complex x": (lambda layer: layer(mx.zeros((5, D), mx.complex64)), r"\[nn.LSTM\] x must be real but got"),
    "complex state": (
        lambda layer: layer.step(mx.zeros((2, D)), cell=mx.zeros((2, H), mx.complex64)),
        r"\[nn.LSTM\] cell must be real but got mlx.core.complex64",
    ),
    "x rank": (lambda layer: layer(mx.zeros((D,))), r"\[nn.LSTM\] x must have shape \[..., L, D = 3\]"),
    "x features": (lambda layer: layer(mx.zeros((2, 5, D + 1))), r"got shape \[2, 5, 4\]"),
    "no steps": (lambda layer: layer(mx.zeros((2, 0, D))), r"with at least one step"),
    "x is a list": (
        lambda layer: layer([[1.0] * D]),
        r"x must be an mlx.core.array: make one by mx.array\(...\), but got list",
    ),
    "x is NumPy's": (lambda layer: layer(np.ones((2, 5, D))), r"make one by mx.array\(...\), but got ndarray"),
    "layers in a Sequential": (
        lambda layer: mlx.nn.Sequential(layer, layer)(mx.zeros((2, 5, D))),
        r"x must be an mlx.core.array: of what an LSTM returns pass h, or run all layers by mlx_lstm.nn.stack, but got",
    ),
    "states in a tuple": (
        lambda layer: layer(mx.zeros((2, 5, D)), (mx.zeros((2, H)), mx.zeros((2, H)))),
        r"\[nn.LSTM\] hidden must be an mlx.core.array: pass hidden and cell, not a tuple, but got tuple\.",
    ),
    "time first": (
        lambda layer: layer(mx.zeros((5, 2, D)), mx.zeros((2, H))),
        r"hidden must have shape \[5, 4\], as x is \[batch, time, features\] = \[5, 2, 3\], but got shape \[2, 4\]\.",
    ),
    "no batch": (
        lambda layer: layer(mx.zeros((5, D)), mx.zeros((2, H))),
        r"\[4\], as x is \[time, features\] = \[5, 3\] \(layer.step runs one step .*\), but got shape \[2, 4\]",
    ),
    "no units": (
        lambda layer: nn.LSTM(D, 0),
        r"hidden_size must be an integer of at least 1, as weights are drawn from .* but got 0\.",
    ),
    "hidden width": (
        lambda layer: layer(mx.zeros((2, 5, D)), mx.zeros((2, H + 1))),
        r"hidden must have shape \[2, 4\]",
    ),
    "cell batch": (lambda layer: layer(mx.zeros((2, 5, D)), cell=mx.zeros((3, H))), r"cell must have shape \[2, 4\]"),
    "hidden is a number": (lambda layer: layer(mx.zeros((2, 5, D)), 1.0), r"hidden must be an mlx.core.array but got"),
    "sizes": (lambda layer: nn.LSTM(0, H), r"input_size must be an integer of at least 1 but got 0"),
    "size is a float": (lambda layer: nn.LSTM(D, 2.0), r"hidden_size must be an integer"),
    "engine": (lambda layer: nn.LSTM(D, H, engine="metal"), r"\[nn.LSTM\] engine must be one of .* but got 'metal'"),
    "engine later": (lambda layer: set_and_call(layer, engine="gpu"), r"engine must be one of .* but got 'gpu'"),
    "an array as engine": (lambda layer: set_and_call(layer, engine=mx.zeros(2)), r"engine must be one of"),
    "a list of checkpoints": (
        lambda layer: set_and_call(layer, checkpoint_every=[2]),
        r"checkpoint_every must be a number of steps of at least 1, 'auto' or None but got \[2\]",
    ),
    "lengths": (lambda layer: layer(mx.zeros((2, 5, D)), lengths=[5, 6]), r"lengths must lie in 0..5 but got"),
    "lengths of no batch": (lambda layer: layer(mx.zeros((5, D)), lengths=[5]), r"shape \[\], one per item, but got"),
    "lengths of batches": (
        lambda layer: layer(mx.zeros((2, 3, 5, D)), lengths=[[1, 2, 3], [1, 2]]),
        r"\[nn.LSTM\] lengths must have shape \[2, 3\]",
    ),
    "step: keep": (
        lambda layer: layer.step(mx.zeros((2, D)), keep=mx.zeros(3)),
        r"keep must broadcast to \[...\] = \[2\]",
    ),
    **{
        f"torch's {name}": (
            lambda layer, name=name, value=value: nn.LSTM(D, H, **{name: value}),
            rf"\[nn.LSTM\] {name} is no option of this layer: mlx_lstm.torch.LSTM has it, .* but got {name}={value}",
        )
        for name, value in {"num_layers": 2, "bidirectional": True, "dropout": 0.5}.items()
    },
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call(nn.LSTM(D, H))


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN, torch.LSTM, torch.GRU, torch.RNN])
def test_parameters_of_numpy_are_refused(make):
    """A layer raises ValueError if a parameter is not an mx.array. MLX's modules would store such a value as a plain
    attribute, which is no longer a parameter."""
    for name in make(D, H).parameters():
        for wrong, kind in ((np.zeros(3), "ndarray"), ([0.0], "list"), (None, "NoneType")):
            layer = make(D, H)
            setattr(layer, name, wrong)
            if kind == "NoneType" and name.startswith("b") and "torch" not in layer.op:
                continue  # None is allowed here: it means no bias
            with pytest.raises(ValueError, match=rf"{name[0]}\w* must be an mlx.core.array.* but got {kind}"):
                layer(mx.zeros((2, 5, D)))


@pytest.mark.parametrize("run", [lambda layer, x: layer(x), lambda layer, x: layer.step(x[:, 0])], ids=["call", "step"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "QuantizedLSTM", "Pointwise"])
def test_weights_of_another_number_of_axes_are_refused(kind, run):
    make = {"Pointwise": lambda: nn.Pointwise(lambda a, state: (mx.tanh(a[0]),), D, H, gates=1)}
    make["QuantizedLSTM"] = lambda: nn.QuantizedLSTM.from_layer(nn.LSTM(D, 32), 32)
    for name in ("Wxh", "Whh") if kind == "RNN" else ("Wx", "Wh"):
        for change in (mx.flatten, lambda weight: weight[0, 0]):
            layer = make.get(kind, lambda: getattr(nn, kind)(D, H))()
            layer[name] = change(layer[name])
            with pytest.raises(ValueError, match=rf"{name} must have (two axes|shape .*) but got shape"):
                run(layer, mx.zeros((2, 5, D)))


LAYERS = {"GRU": {}, "RNN": {}, "RNN relu": {"nonlinearity": reference.relu}, "RNN tanh": {"nonlinearity": mx.tanh}}


def pair_of(layer, bias=True, **options):
    """Return (our layer, the layer of mlx.nn with the same parameters) for a name in `LAYERS`."""
    ours, theirs = (getattr(package, layer.split()[0])(D, H, bias, **LAYERS[layer]) for package in (nn, reference))
    ours.engine = options.get("engine")
    theirs.update(ours.parameters())
    return ours, theirs


@pytest.mark.parametrize(
    "layer, shape, given, bias, engine",
    pairs(layer=LAYERS, shape=SHAPES, given=STATES[:2], bias=[True, False], engine=["numpy", "ops"]),
)
def test_gru_and_rnn_values_and_gradients(layer, shape, given, bias, engine):
    mx.random.seed(0)
    ours, theirs = pair_of(layer, bias, engine=engine)
    x, states = mx.random.normal(shape), {name: mx.random.normal((*shape[:-2], H)) for name in given}
    weight = mx.random.normal((*shape[:-1], H))
    left, right = ours(x, **states), theirs(x, **states)
    assert left.shape == right.shape and left.dtype == right.dtype
    np.testing.assert_allclose(np.array(left), np.array(right), rtol=0, atol=4e-6)
    found = []
    for module in (ours, theirs):

        def loss(parameters, x, states, module=module):
            module.update(parameters)
            return (module(x, **states) * weight).sum()

        found.append(dict(tree_flatten(mx.grad(loss, argnums=(0, 1, 2))(module.parameters(), x, states))))
    got, expected = found
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, np.abs(np.array(value)).max()) * np.sqrt(x.size)
        np.testing.assert_allclose(np.array(got[name]), np.array(value), rtol=0, atol=16 * 1.2e-7 * scale, err_msg=name)


@pytest.mark.parametrize("layer", LAYERS)
def test_gru_and_rnn_parameters_files_dtypes_and_export(layer, tmp_path):
    for bias in (True, False):
        modules = []
        for package in (nn, reference):
            mx.random.seed(7)
            modules.append(getattr(package, layer.split()[0])(D, H, bias, **LAYERS[layer]))
        assert repr(modules[0]) == repr(modules[1])
        got, expected = (dict(tree_flatten(module.parameters())) for module in modules)
        assert got.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(np.array(got[name]), np.array(expected[name]))
    ours, theirs = pair_of(layer)
    x = mx.random.normal((2, 5, D))
    for source, target in itertools.permutations([ours, theirs]):
        source.save_weights(str(tmp_path / "weights.safetensors"))
        target.load_weights(str(tmp_path / "weights.safetensors"))
    ours.set_dtype(mx.float16)
    theirs.set_dtype(mx.float16)
    assert ours(x.astype(mx.float16)).dtype == theirs(x.astype(mx.float16)).dtype == mx.float16
    assert ours(x).dtype == theirs(x).dtype == mx.float32
    half, wide = x.astype(mx.float16), mx.zeros((2, H))
    assert ours(half, wide).dtype == theirs(half, wide).dtype == mx.float32
    ours.set_dtype(mx.float32)
    mx.eval(ours.parameters())
    np.testing.assert_allclose(np.array(mx.compile(ours)(x)), np.array(ours(x)), atol=1e-6)
    # docs/engines.md cites this error.
    with pytest.raises(ValueError, match="Unable to serialize primitive CustomTransforms"):
        mx.export_function(str(tmp_path / "layer.mlxfn"), ours, x)
    ours.eval()
    mx.export_function(str(tmp_path / "layer.mlxfn"), ours, x)
    (imported,) = mx.import_function(str(tmp_path / "layer.mlxfn"))(x)
    np.testing.assert_allclose(np.array(imported), np.array(ours(x)), atol=1e-6)


def test_gru_and_rnn_bad_arguments():
    for layer in (nn.GRU(D, H), nn.RNN(D, H)):
        word = type(layer).__name__
        with pytest.raises(ValueError, match=rf"\[nn.{word}\] x must have shape \[..., L, D = 3\]"):
            layer(mx.zeros((D,)))
        with pytest.raises(ValueError, match=rf"\[nn.{word}\] hidden must have shape \[2, 4\]"):
            layer(mx.zeros((2, 5, D)), mx.zeros((2, H + 1)))
        with pytest.raises(ValueError, match=rf"\[nn.{word}\] hidden_size must be an integer"):
            type(layer)(D, 0)
    with pytest.raises(ValueError, match=r"\[nn.RNN\] nonlinearity must be a function of an array"):
        nn.RNN(D, H, nonlinearity="tanh")
    layer = nn.RNN(D, H)
    layer.nonlinearity = "tanh"
    with pytest.raises(ValueError, match=r"\[nn.RNN\] nonlinearity must be a function of an array"):
        layer(mx.zeros((2, 5, D)))
    text = r"^\[nn.RNN\] nonlinearity must compute each number by itself \(a step that mixes .*\) but got \w+\.$"
    with pytest.raises(ValueError, match=text):
        nn.RNN(D, H, nonlinearity=mx.softmax)(mx.zeros((2, 5, D)))
    with pytest.raises(ValueError, match=r"^\[nn.RNN\] nonlinearity must keep the shape of state 0, .* but got \["):
        nn.RNN(D, H, nonlinearity=lambda a: a[:, :2])(mx.zeros((2, 5, D)))
    with pytest.raises(ValueError, match=r"^invalid literal") as raised:  # the function's own error keeps its traceback
        nn.RNN(D, H, nonlinearity=lambda a: int("a"))(mx.zeros((2, 5, D)))
    assert raised.traceback[-1].name == "<lambda>"
    with pytest.raises(ValueError, match=r"\[nn.RNN\] nonlinearity must be MLX's tanh, relu or sigmoid here"):
        nn.RNN(D, H, nonlinearity=mx.exp).stepper()


@pytest.mark.parametrize("nonlinearity", [mx.sin, reference.gelu, lambda a: a * 2], ids=["sin", "gelu", "lambda"])
def test_a_nonlinearity_is_traced_once(nonlinearity):
    """The function of an `RNN` is traced at the first call only, as tracing takes far longer than a call."""
    layer, x = nn.RNN(D, H, nonlinearity=nonlinearity), mx.ones((2, 5, D))
    layer(x)
    before = cached_trace.cache_info().misses
    layer(x)
    assert cached_trace.cache_info().misses == before


def test_an_empty_batch_with_any_nonlinearity():
    layer = nn.RNN(D, H, nonlinearity=mx.sin)
    for batch in ((0,), (2, 0)):
        assert layer(mx.zeros((*batch, 5, D))).shape == (*batch, 5, H)
        assert layer.step(mx.zeros((*batch, D))).shape == (*batch, H)


@pytest.mark.parametrize("nonlinearity", [mx.sin, reference.gelu, reference.Tanh()], ids=["sin", "gelu", "module"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_rnn_with_any_nonlinearity(nonlinearity, batch):
    """With a nonlinearity of the user, outputs and gradients equal those of mlx.nn.RNN."""
    ours, theirs = nn.RNN(D, H, nonlinearity=nonlinearity), reference.RNN(D, H, nonlinearity=nonlinearity)
    ours.update(theirs.parameters())
    x, hidden, dh = (mx.random.normal((*batch, *shape)) for shape in ((5, D), (H,), (5, H)))

    def outputs(layer):
        return lambda x, hidden, parameters: (layer.update(parameters), layer(x, hidden) * dh)[1].sum()

    with mx.stream(mx.cpu):
        got, expected = (
            mx.value_and_grad(outputs(layer), (0, 1, 2))(x, hidden, layer.parameters()) for layer in (ours, theirs)
        )
        for (name, one), (_, other) in zip(tree_flatten(got), tree_flatten(expected), strict=True):
            np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-4, err_msg=name)
        np.testing.assert_allclose(
            np.array(ours.step(x[..., 0, :], hidden)), np.array(ours(x[..., :1, :], hidden)[..., 0, :]), atol=1e-6
        )
        whole = [*batch] if batch else []
        lengths = np.broadcast_to(3, whole)
        assert ours(x, lengths=lengths)[..., 3:, :].abs().max().item() == 0
    assert ours.engine_used is None


def test_infinite_biases_are_added_without_a_warning():
    """NumPy adds two biases of a layer at once. The sum of infinities of both signs is NaN, and no warning, as in
    MLX."""
    both = [mx.array([np.inf, 1.0]), mx.array([-np.inf, 2.0])]
    with warnings.catch_warnings(), mx.stream(mx.cpu):
        warnings.simplefilter("error")
        np.testing.assert_array_equal(np.array(by_numpy(lambda one, other: one + other, *both)), [np.nan, 3.0])
