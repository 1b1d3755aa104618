"""Tests of `mlx_lstm.nn.replace` and `patched`, which exchange the mlx.nn layers of a model for ours, even in the
middle of training."""

import threading
import warnings

import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
from clients import CLIENTS, OWN, Codec, D, H, Policy, StackedLSTM, TwoBiases, assert_same
from mlx.utils import tree_flatten, tree_map

import mlx_lstm.nn
import mlx_lstm.torch
from mlx_lstm.nn import patched, replace

TREES = [name for name in CLIENTS if name not in OWN]
OURS = (mlx_lstm.nn.LSTM, mlx_lstm.nn.GRU, mlx_lstm.nn.RNN)
THEIRS = (mlx.nn.LSTM, mlx.nn.GRU, mlx.nn.RNN)


def recurrent(tree):
    """Return the recurrent layers of a model, including nested layers. A layer used in several places is returned
    several times."""
    if isinstance(tree, (*OURS, *THEIRS)):
        return [tree]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [layer for each in inside for layer in recurrent(each)]


def train(model, optimizer, x, steps):
    """Train the model for some steps. Return by name the losses, the final outputs, the parameters and the state of
    the optimizer."""
    losses = []

    def loss(x):
        return sum((out * mx.cos(mx.arange(out.size)).reshape(out.shape)).sum() for out in model(x))

    for _ in range(steps):
        value, gradients = mlx.nn.value_and_grad(model, loss)(x)
        optimizer.update(model, gradients)
        losses.append(value)
    state = {name: value for name, value in optimizer.state.items() if name not in ("step", "learning_rate")}
    found = {"losses": mx.stack(losses), "outputs": list(model(x)), "parameters": model.parameters(), "state": state}
    return {name: np.array(value) for name, value in tree_flatten(found)}


@pytest.mark.parametrize("client", TREES)
def test_in_the_middle_of_training(client):
    """Training continues with the same results after the layers are replaced. After three steps with momentum and
    frozen parameters, three more steps run with the unchanged model, a float64 copy, and the model with replaced
    layers."""
    mx.random.seed(4)
    model, x = CLIENTS[client][0](), mx.random.normal((3, 5, D))
    layers = recurrent(model)
    layers[0].freeze(keys=["Wh", "Whh"])
    layers[-1].eval()
    optimizer = mlx.optimizers.SGD(0.05, momentum=0.9)
    train(model, optimizer, x, 3)
    start = model.parameters(), optimizer.state

    def back_to_start(dtype):
        parameters, state = tree_map(lambda a: a.astype(dtype) if a.dtype == mx.float32 else a, start)
        model.update(parameters)
        optimizer.state = state | {"learning_rate": mx.array(0.05, dtype)}

    back_to_start(mx.float32)
    expected = train(model, optimizer, x, 3)
    back_to_start(mx.float64)
    exact = train(model, optimizer, x.astype(mx.float64), 3)
    back_to_start(mx.float32)
    before = dict(tree_flatten(model.parameters()))
    trainable = list(dict(tree_flatten(model.trainable_parameters())))
    assert replace(model) is model
    after = dict(tree_flatten(model.parameters()))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert list(dict(tree_flatten(model.trainable_parameters()))) == trainable != list(before)
    assert all(one is other and type(one) in OURS for one, other in zip(recurrent(model), layers, strict=True))
    assert not layers[-1].training and model.training
    assert_same(train(model, optimizer, x, 3), expected, exact)
    back_to_start(mx.float32)
    assert replace(model, back=True) is model and all(type(layer) in THEIRS for layer in recurrent(model))
    again = train(model, optimizer, x, 3)
    assert all(np.array_equal(again[name], expected[name]) for name in expected)


class Scaled(mlx.nn.LSTM):
    """A subclass of mlx.nn.LSTM that computes something else and must not be replaced."""

    def __call__(self, x, hidden=None, cell=None):
        return super().__call__(2 * x, hidden, cell)


class Ours(mlx_lstm.nn.GRU):
    """A subclass of our GRU, which must not be replaced."""


def wave(x):
    return mx.sin(x)


def silently(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **options)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_model_itself_with_what_was_set_on_it(kind):
    layer = getattr(mlx.nn, kind)(D, H, bias=False)
    layer.word = "client's"
    layer.freeze()
    text, x = repr(layer), mx.random.normal((2, 5, D))
    expected = layer(x)
    assert silently(replace, layer) is layer and type(layer) is getattr(mlx_lstm.nn, kind)
    assert (layer.word, repr(layer)) == ("client's", text) and not layer.trainable_parameters()
    found = layer(x)
    pairs = zip(found, expected, strict=True) if kind == "LSTM" else [(found, expected)]
    assert all(mx.allclose(one, other, atol=4e-6).item() for one, other in pairs)
    assert silently(replace, layer, engine="ops").engine == "ops"  # a second call only changes the engine
    assert silently(replace, layer).engine == "ops"
    silently(replace, layer, back=True)
    assert type(layer) is getattr(mlx.nn, kind) and not hasattr(layer, "engine") and repr(layer) == text


def test_containers_shared_layers_and_circles():
    policy = Policy()
    policy._self = policy
    # `value_and_grad` gets the model before `replace` changes its layers. The function that it returns must work
    # afterwards, too.
    step = mlx.nn.value_and_grad(policy, lambda x: sum(out.sum() for out in policy(x)))
    models = {"policy": policy, "more": (StackedLSTM(), [mlx.nn.Sequential(mlx.nn.RNN(D, H))])}
    assert silently(replace, models, engine="ops") is models
    (memory,), (same,) = policy.actor[0], policy.critic[0]
    assert memory is same and type(memory) is mlx_lstm.nn.GRU
    assert len(recurrent(models["more"])) == 3
    assert all(type(layer) in OURS and layer.engine == "ops" for layer in recurrent(models["more"]))
    step(mx.zeros((2, 5, D)))
    assert "actor.0.0.Wx" in dict(tree_flatten(policy.parameters()))


def test_what_is_left_is_named():
    foreign = mlx.nn.RNN(D, H, nonlinearity=wave)
    model = mlx.nn.Sequential(Scaled(D, D), mlx.nn.LSTM(D, D), foreign)
    with pytest.warns(UserWarning) as heard:
        replace({"net": model, "head": mlx.nn.RNN(D, H, nonlinearity=mlx.nn.PReLU())})
    (warning,) = heard
    text = str(warning.message)
    assert text.startswith("[nn.replace] left as they are: net.layers.0 (Scaled, a subclass of mlx.nn.LSTM), ")
    assert (
        "net.layers.2 (mlx.nn.RNN with nonlinearity=<function wave" in text
        and "head (mlx.nn.RNN with nonlinearity=PReLU())" in text
    )
    assert warning.filename == __file__
    assert [type(layer) for layer in model.layers] == [Scaled, mlx_lstm.nn.LSTM, mlx.nn.RNN]
    with pytest.warns(UserWarning, match=r"left as they are: the model \(Ours, a subclass of mlx_lstm.nn.GRU\)"):
        replace(Ours(D, H), back=True)
    with pytest.warns(UserWarning, match=r"found no mlx.nn.GRU or mlx.nn.LSTM or mlx.nn.RNN in the model"):
        replace(mlx.nn.Sequential(mlx.nn.Linear(D, H)))


def test_look_alikes_are_named_with_the_line_that_runs_them():
    """`replace` warns about layers of other packages that have the parameters of a recurrent layer: a bidirectional
    wrapper with two biases, a GRU with torch's names, an LSTM with MLX's names. For each of them the warning
    contains a call of `stack` that runs the layer."""

    class TorchGRU(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in {"weight_ih": (3 * H, D), "weight_hh": (3 * H, H), "bias_ih": (3 * H,)}.items():
                self[f"{name}_l0"] = mx.random.normal(shape)
            self.bias_hh_l0 = mx.zeros(3 * H)

    both, (codec, linear) = TwoBiases(), (Codec(), mlx.nn.Linear(D, H))
    model = mlx.nn.Module()
    model.both, model.deep, model.linear = both, [{"gru": TorchGRU()}, codec], linear
    model.ours = [mlx.nn.LSTM(D, H), mlx_lstm.torch.GRU(D, H), mlx_lstm.nn.QuantizedGRU(64, 64)]
    with pytest.warns(UserWarning) as heard:
        replace(model)
    (warning,) = heard
    x = mx.random.normal((2, 5, D))
    for path, kind, layer in (
        ("both", "TwoBiases, which has the parameters of an LSTM", both),
        ("deep[0].gru", "TorchGRU, which has the parameters of a GRU", model.deep[0]["gru"]),
        ("deep[1].lstm[0]", "OwnLSTM, which has the parameters of an LSTM", codec.lstm[0]),
    ):
        call = f"if it computes one, mlx_lstm.nn.stack([model.{path}], x) runs it"
        assert f"({kind}: {call})" in str(warning.message)
        assert mlx_lstm.nn.stack([layer], x if layer is not codec.lstm[0] else mx.zeros((2, 5, H)))[0].ndim == 3
    assert str(warning.message).count("which has") == 4  # the three layers above, and codec.lstm[1]
    np.testing.assert_allclose(np.array(mlx_lstm.nn.stack([both], x)[0]), np.array(both(x)[0]), atol=1e-6)
    del model.ours[2]
    silently(replace, model, back=True)


def test_bad_arguments():
    for options, message in (
        ({"model": "net"}, "model must be a module, or a dict, list or tuple of them, but got str"),
        ({"model": Policy(), "back": 1}, "back must be True or False but got 1"),
        ({"model": Policy(), "back": True, "engine": "ops"}, "engine must be None with back=True but got 'ops'"),
    ):
        with pytest.raises(ValueError, match=rf"\[nn.replace\] {message}"):
            replace(**options)

    for block in (lambda: replace(Policy(), engine="abc"), lambda: patched(engine="metal").__enter__()):
        with pytest.raises(ValueError, match=r"\[nn.(replace|patched)\] engine must be one of fused, .* but got '"):
            block()


ImportedBefore = mlx.nn.GRU


def test_patched(tmp_path):
    path = str(tmp_path / "model.safetensors")
    StackedLSTM().save_weights(path)

    def load_model():
        return StackedLSTM().load_weights(path)

    constructors = [kind.__init__ for kind in THEIRS]
    with pytest.warns(UserWarning) as heard, patched(engine="ops"), patched():
        model, layer = load_model(), ImportedBefore(D, H)
        left = [Scaled(D, H), mlx.nn.RNN(D, H, nonlinearity=wave)]
    assert [kind.__init__ for kind in THEIRS] == constructors
    assert [type(each) for each in model.layers] == [mlx_lstm.nn.LSTM] * 2 and type(layer) is mlx_lstm.nn.GRU
    assert [type(each) for each in left] == [Scaled, mlx.nn.RNN]
    assert str(heard[0].message) == "[nn.patched] left as it is: Scaled, a subclass of mlx.nn.LSTM."
    assert mx.array_equal(model.layers[0].Wx, mx.load(path)["layers.0.Wx"]).item()
    with pytest.raises(ZeroDivisionError), patched(engine="ops"):
        layer = mlx.nn.LSTM(D, H, False)
        assert layer.engine == "ops" and layer.bias is None
        1 / 0  # noqa: B018
    assert type(mlx.nn.LSTM(D, H)) is mlx.nn.LSTM


def test_blocks_of_patched_that_overlap():
    """Two `patched` contexts may overlap: one may end before the other, or they may run in two threads. MLX's
    constructors are restored when the last context ends."""
    constructors = [kind.__init__ for kind in THEIRS]
    first, second = patched(engine="numpy"), patched(engine="ops")
    first.__enter__()
    second.__enter__()
    assert mlx.nn.GRU(D, H).engine == "ops"
    first.__exit__(None, None, None)
    layer = mlx.nn.LSTM(D, H)
    assert type(layer) is mlx_lstm.nn.LSTM and layer.engine == "ops"
    second.__exit__(None, None, None)
    assert [kind.__init__ for kind in THEIRS] == constructors and type(mlx.nn.LSTM(D, H)) is mlx.nn.LSTM
    inside, leave = threading.Barrier(3), threading.Event()

    def one_block():
        with patched():
            inside.wait()
            leave.wait()

    threads = [threading.Thread(target=one_block) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    assert type(mlx.nn.RNN(D, H)) is mlx_lstm.nn.RNN
    leave.set()
    for thread in threads:
        thread.join()
    assert [kind.__init__ for kind in THEIRS] == constructors


def test_a_layer_goes_back_as_it_came():
    layer = mlx.nn.LSTM(D, H)
    attributes = set(vars(layer))
    replace(layer)(mx.zeros((2, 5, D)))
    assert layer.engine_used.engine == "numpy"
    assert set(vars(silently(replace, layer, back=True))) == attributes
