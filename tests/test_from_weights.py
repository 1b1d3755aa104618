"""Tests of `mlx_lstm.nn.from_weights`: a stack of layers with any option of the cell gives the same results as one
call of the op per layer with this option."""

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from clients import assert_by_differences
from mlx.utils import tree_flatten

import mlx_lstm.cells
from mlx_lstm import convert, nn
from mlx_lstm.nn import _from_weights
from mlx_lstm.nn._from_weights import Call

T, B, I, H, P = 5, 3, 4, 6, 2
SIGMOIDS = ("hard_sigmoid", "sigmoid", "relu", "sigmoid", "identity")
OPTIONS = {
    "gru that resets before": ("gru", {"reset": "before"}),
    "gru of another order": ("gru", {"gate_order": "zrn", "activations": ("sigmoid", "hard_sigmoid", "relu")}),
    "lstm with all": ("lstm", {"cell_clip": 0.3, "forget_bias": 1.0, "output_peephole": "previous"}),
    "lstm with clips": ("lstm", {"cell_clip": 0.1, "projection_clip": 0.03, "clip_gradient": "zero"}),
    "lstm activations": ("lstm", {"gate_order": "iofg", "activations": SIGMOIDS}),
    "rnn": ("rnn", {"activation": "hard_sigmoid_sixth"}),
}


def arrays_of(op, n, D, options):
    """Return random weights and biases of layer n as arguments of the op."""
    G, own = {"lstm": 4, "gru": 3, "rnn": 1}[op], (2,) if D == 2 else ()
    has_all = "cell_clip" in options
    width = P if has_all else H
    shapes = {"Wx": (D * G * H, D * width if n else I), "Wh": (*own, G * H, width), "b": (D * G * H,)}
    if op == "gru" and options.get("reset") != "before":
        shapes["bhn"] = (D * H,)
    if has_all:
        shapes |= {"Wp": (*own, P, H), "peephole": (*own, 4 * H)}
    return {name: mx.random.uniform(-0.5, 0.5, shape) for name, shape in shapes.items()}


def run_op(op, layers, x, states, D, lengths, keep, options):
    """Return [output, last states] of a stack of layers. Each layer is one call of the op, as in a user's own loop."""
    x, last = mx.swapaxes(x, 0, 1), []
    for n, arrays in enumerate(layers):
        first = {}
        for name, state in states.items():
            first[f"{name}0"] = mx.concatenate(list(state[n * D : (n + 1) * D]), axis=-1)
        out = getattr(mlx_lstm, op)(
            x, **arrays, **first, **options, bidirectional=D == 2, lengths=lengths, keep=keep.T, engine="ops"
        )
        x = out.h
        last.append([state for name in states for state in mx.split(getattr(out, f"{name}T"), D, axis=-1)])
    count = len(states)
    return [mx.swapaxes(x, 0, 1), *(mx.stack([s for n in last for s in n[k * D : (k + 1) * D]]) for k in range(count))]


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("case", OPTIONS)
def test_equals_the_op_with_all_gradients(case, D, engine):
    mx.random.seed(2)
    op, options = OPTIONS[case]
    ops = [arrays_of(op, n, D, options) for n in range(2)]
    weights = convert.from_ops(op, ops, bidirectional=D == 2, **options)
    layer = nn.from_weights(weights, engine=engine)
    # The layer may store the gates in another order than the test's arrays. So the op is called with `weights.options`,
    # which describe the layer's own parameters. "bidirectional" is left out, because `run_op` takes the number of
    # directions D instead.
    keywords = {name: value for name, value in weights.options.items() if name != "bidirectional"}
    widths = {"h": P if "cell_clip" in options else H} | ({"c": H} if op == "lstm" else {})
    states = {name: mx.random.normal((2 * D, B, width)) for name, width in widths.items()}
    x, lengths, keep = mx.random.normal((B, T, I)), [5, 2, 3], mx.random.uniform(0.5, 1.0, (B, T))

    def by_layer(parameters, x, states):
        layer.update(parameters)
        state = tuple(states.values()) if op == "lstm" else states["h"]
        output, last = layer(x, state, lengths=lengths, keep=keep)
        return [output, *(last if op == "lstm" else [last])]

    def by_op(parameters, x, states):
        return run_op(op, parameters["layers"], x, states, D, lengths, keep, keywords)

    def gradients_of(call):
        def loss(*arguments):
            return sum((out * mx.cos(mx.arange(out.size)).reshape(out.shape)).sum() for out in call(*arguments))

        values = call(layer.parameters(), x, states)
        return dict(tree_flatten([values, mx.grad(loss, argnums=(0, 1, 2))(layer.parameters(), x, states)]))

    expected, got = gradients_of(by_op), gradients_of(by_layer)
    assert got.keys() == expected.keys() and layer.engine_used.engine == engine
    for name, value in expected.items():
        np.testing.assert_allclose(np.array(got[name]), np.array(value), rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("case", OPTIONS)
def test_gradients_by_finite_differences(case, engine):
    """The gradients of x and of all parameters of two layers in both directions equal central differences in float64,
    with lengths and `keep`."""
    mx.random.seed(3)
    op, options = OPTIONS[case]
    if "cell_clip" in options:
        options = options | {"cell_clip": 30.0}  # larger than any c, because the gradient ignores clipping
    weights = convert.from_ops(op, [arrays_of(op, n, 2, options) for n in range(2)], bidirectional=True, **options)
    layer, rng = nn.from_weights(weights, engine=engine), np.random.default_rng(3)
    layer.set_dtype(mx.float64)
    x, keep = mx.array(rng.normal(size=(2, 4, I)), mx.float64), mx.array(rng.random((2, 4)), mx.float64)

    def loss(parameters, x, keep):
        layer.update(parameters)
        output, last = layer(x, lengths=[4, 2], keep=keep)
        return (output * output).sum() + sum(state.sum() for _, state in tree_flatten(last))

    assert_by_differences(loss, [layer.parameters(), x, keep], rng)


def test_parameters_files_modes_and_the_reverse_direction(tmp_path):
    op, options = OPTIONS["gru that resets before"]
    arrays = [arrays_of(op, 0, 1, options)]
    layer = nn.from_weights(convert.from_ops(op, arrays, reverse=True, **options))
    assert sorted(dict(tree_flatten(layer.trainable_parameters()))) == ["layers.0.Wh", "layers.0.Wx", "layers.0.b"]
    x = mx.random.normal((B, T, I))
    expected = mlx_lstm.gru(mx.swapaxes(x, 0, 1), **arrays[0], **options, reverse=True)
    output, h_n = layer(x)
    np.testing.assert_allclose(np.array(output), np.array(mx.swapaxes(expected.h, 0, 1)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.array(h_n[0]), np.array(expected.hT), rtol=0, atol=1e-6)
    layer.save_weights(file := str(tmp_path / "layer.safetensors"))
    other = nn.from_weights(convert.from_ops(op, [arrays_of(op, 0, 1, options)], reverse=True, **options))
    other.load_weights(file)
    np.testing.assert_array_equal(np.array(other.eval()(x)[0]), np.array(layer.eval()(x)[0]))
    layer.set_dtype(mx.bfloat16)
    assert layer(x.astype(mx.bfloat16))[0].dtype == mx.bfloat16 and layer(x)[1].dtype == mx.float32


WEIGHTS = convert.from_ops("lstm", [arrays_of("lstm", 0, 1, {})])


def test_checkpoint_every_reaches_the_call(monkeypatch):
    given = []
    monkeypatch.setattr(_from_weights, "Call", lambda *a, **o: (given.append(o["checkpoint_every"]), Call(*a, **o))[1])
    for every in (2, "auto", None):
        nn.from_weights(WEIGHTS, checkpoint_every=every)(mx.zeros((B, T, I)))
    assert given == [2, "auto", None]


@pytest.mark.parametrize("layer", ["from_weights", "pointwise"])
def test_a_frozen_layer_in_a_model_that_is_trained(layer):
    """A layer whose arrays are in a list is frozen, by itself or with the whole model. `mlx.nn.value_and_grad` then
    gives the gradients of the other layers only, and after `unfreeze` those of all arrays."""
    if layer == "pointwise":
        own = nn.Pointwise(mlx_lstm.cells.peephole_lstm, I, H, gates=4, states=2, params=3)
    else:
        layers = [arrays_of("gru", n, 2, {}) for n in range(2)]
        own = nn.from_weights(convert.from_ops("gru", layers, bidirectional=True))
    x, width = mx.random.normal((B, T, I)), own(mx.zeros((B, T, I)))[0].shape[-1]
    model = mlx.nn.Sequential(own, lambda outputs: outputs[0], mlx.nn.Linear(width, 1))
    gradients = mlx.nn.value_and_grad(model, lambda model: model(x).square().sum())
    every, head = {name for name, _ in tree_flatten(model.parameters())}, {"layers.2.weight", "layers.2.bias"}
    key = "params" if layer == "pointwise" else "layers"
    for change, trained in (
        (own.freeze, head),
        (lambda: own.unfreeze(keys=key), head | {name for name in every if name.startswith(f"layers.0.{key}.")}),
        (lambda: (model.freeze(), model.layers[2].unfreeze()), head),
        (model.unfreeze, every),
    ):
        change()
        assert {name for name, _ in tree_flatten(gradients(model)[1])} == trained


def test_the_mode_reaches_the_call_and_the_engine_the_stepper(monkeypatch):
    given, forward = [], Call.forward
    monkeypatch.setattr(Call, "forward", lambda *a, **o: (given.append(o["training"]), forward(*a, **o))[1])
    layer = nn.from_weights(WEIGHTS, engine="ops")
    layer(mx.zeros((B, T, I)))
    layer.eval()(mx.zeros((B, T, I)))
    assert given == [True, False] and layer.stepper().engine_used.engine == "ops"


def test_held_steps_are_as_if_they_were_left_out():
    """Each item alone, without its held steps, has the same last states."""
    layer, rng = nn.from_weights(WEIGHTS), np.random.default_rng(4)
    x, hold = (
        rng.normal(size=(B, T, I)).astype(np.float32),
        np.array([[0, 1, 0, 1, 0], [1, 0, 0, 0, 1], [0, 0, 1, 1, 1]]),
    )
    _, whole = layer(mx.array(x), hold=mx.array(hold))
    for item in range(B):
        _, alone = layer(mx.array(x[item : item + 1, hold[item] == 0]))
        for one, other in zip(whole, alone, strict=True):
            np.testing.assert_allclose(np.array(one)[:, item], np.array(other)[:, 0], rtol=0, atol=1e-6)


BAD = {
    "weights must be a Weights, .* but got dict": lambda: nn.from_weights({}),
    "engine must be one of .* but got 'metal'": lambda: nn.from_weights(WEIGHTS, engine="metal"),
    "checkpoint_every must be": lambda: nn.from_weights(WEIGHTS, checkpoint_every=0),
    r"x must have shape \[B, T, 4\] but got shape \[5, 4\]": lambda: nn.from_weights(WEIGHTS)(mx.zeros((T, I))),
    "x must have at least one item and one step": lambda: nn.from_weights(WEIGHTS)(mx.zeros((0, T, I))),
    "state must be a tuple": lambda: nn.from_weights(WEIGHTS)(mx.zeros((B, T, I)), mx.zeros((1, B, H))),
    r"h_0 must have shape \[1, 3, 6\]": lambda: nn.from_weights(WEIGHTS)(mx.zeros((B, T, I)), (mx.zeros((B, H)), None)),
    "lengths must lie in 0..5": lambda: nn.from_weights(WEIGHTS)(mx.zeros((B, T, I)), lengths=[6, 1, 1]),
}


@pytest.mark.parametrize("rule", BAD)
def test_bad_arguments(rule):
    with pytest.raises(ValueError, match=rf"^\[nn.from_weights\] {rule}"):
        BAD[rule]()


CHANGES = {
    r"layers\[0\]: b must be an mlx.core.array but got NoneType": {"b": None},
    r"layers\[0\]: Wx must be an mlx.core.array: .* but got list": {"Wx": [[1.0]]},
    r"layers\[0\]: Wh must have 2 axes but got shape \[\]": {"Wh": mx.array(1.0)},
    r"layers\[0\] must hold Wx, Wh and maybe b, .* but got \['Wh', 'Wx', 'b', 'bias'\]": {"bias": mx.zeros(4 * H)},
}


@pytest.mark.parametrize("rule", CHANGES)
def test_parameters_that_a_user_has_changed(rule):
    """A call, a new stepper and an older one refuse a parameter that is no array of its number of axes, or unknown."""
    layer = nn.from_weights(convert.from_ops("lstm", [arrays_of("lstm", 0, 1, {})]))
    stepper = layer.stepper()
    layer.layers[0].update(CHANGES[rule])
    for call in (lambda: layer(mx.zeros((B, T, I))), layer.stepper, lambda: stepper(mx.zeros(I))):
        with pytest.raises(ValueError, match=rf"^\[nn.from_weights\] {rule}"):
            call()
