"""Tests of `mlx_lstm.nn.stack`, which runs a list of recurrent layers. Outputs, states and gradients equal those of
a loop over the layers, and wrong arguments raise an error."""

from types import SimpleNamespace
from unittest.mock import patch

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from clients import CLIENTS, D, H, Predictor, assert_by_differences, assert_same, predicted
from mlx.utils import tree_flatten, tree_map

import mlx_lstm.nn
import mlx_lstm.torch
from mlx_lstm import convert
from mlx_lstm.nn import stack
from mlx_lstm.recurrence import Call

T = 5
KINDS = ["LSTM", "GRU", "RNN"]


def run(model, call, x):
    """Return all outputs of `call` and the gradients of x and of all parameters, by name."""

    def loss(parameters, x):
        model.update(parameters)
        found = call(model, x)
        return sum((out * mx.cos(mx.arange(out.size)).reshape(out.shape)).sum() for out in found), found

    parameters = model.parameters()
    (_, found), gradients = mx.value_and_grad(loss, argnums=(0, 1))(parameters, x)
    model.update(parameters)
    return {name: np.array(array) for name, array in tree_flatten([*found, *gradients])}


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("client", CLIENTS)
def test_in_place_of_a_client_s_loop(client, B):
    mx.random.seed(3)
    build, one_line = CLIENTS[client]
    model, x = build(), mx.random.normal((B, T, D))
    rounded, got = run(model, build.__call__, x), run(model, one_line, x)
    model.set_dtype(mx.float64)
    assert_same(got, rounded, run(model, build.__call__, x.astype(mx.float64)))


def test_a_batch_where_a_client_s_loop_runs_through_it():
    """`stack` is right for any batch size. The loop in the transducer model, which `stack` replaces, takes the batch
    axis for the time axis, so it is right only for a batch of one sequence."""
    mx.random.seed(3)
    model, x = Predictor(right=False), mx.random.normal((3, T, D))
    alone = [model(x[n : n + 1])[0] for n in range(3)]
    for n in range(3):
        np.testing.assert_allclose(np.array(predicted(model, x)[0][n]), np.array(alone[n][0]), rtol=0, atol=1e-6)
    assert np.abs(np.array(model(x)[0][1] - alone[1][0])).max() > 1e-2


def layers_of(kind, package=mlx.nn, ways=1, bias=True):
    mx.random.seed(5)
    return [[getattr(package, kind)(ways * H if n else D, H, bias) for n in range(2)] for _ in range(ways)]


def flat(found):
    """Return the output and the last states in `found` as one list of NumPy arrays."""
    output, last = found
    return [np.array(array) for array in (output, *(last if isinstance(last, tuple) else [last]))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_whoever_wrote_the_layer(kind, bias):
    """`stack` accepts MLX's layers, our layers, other objects with the same attributes, and dicts of arrays. With
    equal weights all of them give bit for bit the same results."""
    (layers,) = layers_of(kind, bias=bias)
    x = mx.random.normal((2, T, D))
    expected = flat(stack(layers, x))
    ours = layers_of(kind, mlx_lstm.nn, bias=bias)[0]
    objects = [SimpleNamespace(**layer.parameters(), name="client", _kept=x) for layer in layers]
    for others in (ours, objects, [layer.parameters() for layer in layers], tuple(layers)):
        for one, other in zip(flat(stack(others, x)), expected, strict=True):
            np.testing.assert_array_equal(one, other)


def torch_layer(kind, ahead, back):
    """Return a bidirectional layer of `mlx_lstm.torch` with the parameters of the layers `ahead` (forward direction)
    and `back` (reverse direction)."""
    layer = getattr(mlx_lstm.torch, kind)(D, H, 2, batch_first=True, bidirectional=True)
    for n, each in enumerate(zip(ahead, back, strict=True)):
        for one, way in zip(each, ("", "_reverse"), strict=True):
            names = list(one.parameters())
            Wx, Wh = ("Wxh", "Whh") if "Wxh" in names else ("Wx", "Wh")
            b = one["b" if "b" in names else "bias"]
            b_hh = mx.pad(one["bhn"], (2 * H, 0)) if "bhn" in names else mx.zeros_like(b)
            for name, value in {"weight_ih": one[Wx], "weight_hh": one[Wh], "bias_ih": b, "bias_hh": b_hh}.items():
                layer[f"{name}_l{n}{way}"] = value
    return layer


@pytest.mark.parametrize("lengths", [None, [5, 0, 3]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_s_stack_in_both_directions(kind, lengths):
    ahead, back = layers_of(kind, ways=2)
    x = mx.random.normal((3, T, D))
    state = [mx.random.normal((4, 3, H)) for _ in range(2 if kind == "LSTM" else 1)]
    state = tuple(state) if kind == "LSTM" else state[0]
    expected = torch_layer(kind, ahead, back)(x, state, lengths=lengths)
    found = stack(ahead, x, state, reverse=back, lengths=lengths)
    for one, other in zip(flat(found), flat(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    if lengths:  # sequence 1 has length 0: zero outputs, unchanged states
        assert not found[0][1].any()
        np.testing.assert_array_equal(flat(found)[1][:, 1], flat((x, state))[1][:, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_states_go_on_and_reversed_layers_alone(kind):
    (layers,) = layers_of(kind)
    x = mx.random.normal((2, T, D))
    whole, last = stack(layers, x)
    first, state = stack(layers, x[:, :2])
    second, state = stack(layers, x[:, 2:], state)
    for one, other in zip(flat((mx.concatenate([first, second], axis=1), state)), flat((whole, last)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    back, last_of_back = stack([], x[:, ::-1], reverse=layers)
    for one, other in zip(flat((back[:, ::-1], last_of_back)), flat((whole, last)), strict=True):
        np.testing.assert_array_equal(one, other)
    if kind == "LSTM":
        alone = stack(layers, x, (last[0], None))[0]
        np.testing.assert_array_equal(np.array(alone), np.array(stack(layers, x, (last[0], 0 * last[1]))[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_axes(kind):
    ahead, back = layers_of(kind, ways=2)
    x = mx.random.normal((2, 3, T, D))
    output, last = flat(stack(ahead, x, reverse=back))[:2]
    assert output.shape == (2, 3, T, 2 * H) and last.shape == (4, 2, 3, H)
    alone = flat(stack(ahead, x[1, 2], reverse=back))
    assert alone[0].shape == (T, 2 * H) and alone[1].shape == (4, H)
    np.testing.assert_allclose(output[1, 2], alone[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(last[:, 1, 2], alone[1], rtol=0, atol=1e-6)
    again = stack(ahead, x, stack(ahead, x, reverse=back)[1], reverse=back)
    assert again[0].shape == output.shape
    none = [out.shape for out in flat(stack(ahead, x[:0], reverse=back))]
    assert none == [(0, 3, T, 2 * H)] + [(4, 0, 3, H)] * (len(none) - 1)


def test_dtypes_modes_and_engines():
    (layers,) = layers_of("LSTM", mlx_lstm.nn)
    x = mx.random.normal((2, T, D))
    layers[1].set_dtype(mx.bfloat16)
    assert {str(out.dtype) for out in (stack(layers, x)[0], *stack(layers, x)[1])} == {"mlx.core.float32"}
    layers[0].set_dtype(mx.bfloat16)
    output, (h_n, _) = stack(layers, x.astype(mx.bfloat16))
    assert output.dtype == h_n.dtype == mx.bfloat16
    layers[1].engine = "no such"
    with pytest.raises(ValueError, match="engine must be one of"):
        stack(layers, x)
    assert stack(layers, x, engine="ops")[0].shape == (2, T, H)
    with mx.stream(mx.cpu), pytest.raises(ValueError, match=r"\[nn.stack\] engine='fused' cannot run"):
        stack(layers, x, engine="fused")
    relu = [mlx.nn.RNN(D, H, nonlinearity=mlx.nn.relu), mlx.nn.RNN(H, H)]
    np.testing.assert_allclose(np.array(stack(relu, x)[0]), np.array(relu[1](relu[0](x))), rtol=0, atol=4e-6)


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("axes", [(3,), (2, 2), ()], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_between_and_the_sum_of_directions(kind, axes, engine):
    """`stack` with the options `between` and merge='sum' equals a loop over the layers that adds both directions.
    Between the layers, both apply a norm, a residual connection and a wider linear layer. Outputs and gradients are
    compared."""
    mx.random.seed(6)
    sizes = (D, H, H + 2)

    class Model(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            self.ahead, self.back = ([getattr(mlx_lstm.nn, kind)(size, H) for size in sizes] for _ in range(2))
            self.norm, self.wider = mlx.nn.LayerNorm(H), mlx.nn.Linear(H, H + 2)

        def between(self, n, x):
            return x + self.norm(x) if n == 0 else self.wider(x)

        def loop(self, x):
            for n, (ahead, back) in enumerate(zip(self.ahead, self.back, strict=True)):
                h, reversed_h = ahead(x), back(x[..., ::-1, :])
                if kind == "LSTM":
                    h, reversed_h = h[0], reversed_h[0]
                x = h + reversed_h[..., ::-1, :]
                x = x if n == 2 else self.between(n, x)
            return [x]

        def by_stack(self, x):
            return [stack(self.ahead, x, reverse=self.back, merge="sum", between=self.between, engine=engine)[0]]

    model, x = Model(), mx.random.normal((*axes, T, D))
    expected, got = run(model, Model.loop, x), run(model, Model.by_stack, x)
    assert got["0"].shape == (*axes, T, H)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=2e-5, err_msg=name)


class Grouped(mlx.nn.Module):
    """A model of two recurrent layers, each made of G smaller layers (groups) side by side, in one or both
    directions. Each group reads its own part of the features. The features are shuffled between the two layers, as
    in a grouped GRU of a speech enhancer."""

    def __init__(self, kind, G, ways):
        super().__init__()
        self.ways = [[getattr(mlx_lstm.nn, kind)(d, H) for d in (D, ways * H) for _ in range(G)] for _ in range(ways)]
        self.G = G

    def shuffle(self, n, x):
        return x.reshape(*x.shape[:-1], self.G, -1).swapaxes(-1, -2).reshape(x.shape)

    def loop(self, x):
        lasts = []
        for n in range(2):
            outputs = []
            for g, part in enumerate(mx.split(x, self.G, axis=-1)):
                both = []
                for way, layers in enumerate(self.ways):
                    h = layers[n * self.G + g](part[:, ::-1] if way else part)
                    h = h[0] if isinstance(h, tuple) else h
                    lasts.append(h[:, -1])
                    both.append(h[:, ::-1] if way else h)
                outputs += both
            x = mx.concatenate(outputs, axis=-1)
            x = self.shuffle(n, x) if n == 0 else x
        return [x, mx.stack(lasts)]

    def by_stack(self, x):
        reverse = self.ways[1] if len(self.ways) == 2 else None
        output, states = stack(self.ways[0], x, reverse=reverse, groups=self.G, between=self.shuffle)
        return [output, states[0] if isinstance(states, tuple) else states]


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_layers_side_by_side(kind, ways):
    """`stack` with groups=3 equals a loop that runs each group of a layer on its own part of the features. Outputs,
    last states and all gradients are compared."""
    mx.random.seed(7)
    model, x = Grouped(kind, 3, ways), mx.random.normal((2, T, 3 * D))
    expected, got = run(model, Grouped.loop, x), run(model, Grouped.by_stack, x)
    assert got["0"].shape == (2, T, 3 * ways * H) and got["1"].shape == (2 * 3 * ways, 2, H)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=2e-5, err_msg=name)


def test_groups_that_a_compiled_function_runs_twice():
    """Both calls divide the features of x, the result of an elementwise operation, among their groups. MLX cannot
    compile two equal splits of such an array."""
    layers, x = [mlx.nn.GRU(2, 3), mlx.nn.GRU(2, 3)], mx.random.normal((2, 4, 4))

    def both(x):
        x = x * 2
        return stack(layers, x, groups=2)[0] + stack(layers[::-1], x, groups=2)[0]

    np.testing.assert_allclose(np.array(mx.compile(both)(x)), np.array(both(x)), rtol=1e-5, atol=1e-6)


def test_groups_with_states_lengths_and_the_sum_of_directions():
    """With groups=2, each of two groups of layers computes one half of the features. The states of one call can be
    passed to the next call, `lengths` apply to both groups, and merge='sum' adds the two directions of each group."""
    mx.random.seed(8)
    model, x = Grouped("GRU", 2, 1), mx.random.normal((2, T, 2 * D))
    layers = model.ways[0]
    whole, last = stack(layers, x, groups=2)
    begin, state = stack(layers, x[:, :2], groups=2)
    rest, again = stack(layers, x[:, 2:], state, groups=2)
    np.testing.assert_allclose(np.array(mx.concatenate([begin, rest], axis=1)), np.array(whole), atol=1e-6)
    np.testing.assert_allclose(np.array(again), np.array(last), atol=1e-6)
    padded = stack(layers, x, groups=2, lengths=[T, 2])
    np.testing.assert_allclose(np.array(padded[1][:, 1]), np.array(state[:, 1]), atol=1e-6)
    assert padded[0][1, 2:].abs().max().item() == 0
    both = stack(layers[:2], x, reverse=layers[:2], groups=2, merge="sum")[0]
    parts = [stack([layers[g]], x[..., g * D : (g + 1) * D], reverse=[layers[g]], merge="sum")[0] for g in range(2)]
    np.testing.assert_allclose(np.array(both), np.array(mx.concatenate(parts, axis=-1)), atol=1e-6)
    assert stack(layers, x[:0], groups=2)[0].shape == (0, T, 2 * H)


def names_of(kind, style, rng):
    """Return {parameter name: random array} for a layer with both directions and two biases. `style` selects how the
    parameters are named."""
    G = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    shapes = {"weight_ih": (G * H, D), "weight_hh": (G * H, H), "bias_ih": (G * H,), "bias_hh": (G * H,)}
    words = {"weight_ih": "Wx", "weight_hh": "Wh"} if style != "torch" else {}
    ways = {"torch": ("_l0", "_l0_reverse"), "forward": ("_forward", "_backward"), "fwd": ("_fwd", "_bwd")}[style]
    return {
        f"{words.get(name, name)}{way}": mx.array(rng.normal(size=shape) * 0.4, mx.float32)
        for way in ways
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("style", ["torch", "forward", "fwd"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_object_with_both_directions_by_any_names(kind, style):
    """One dict with the arrays of both directions is accepted under torch's names and under names with suffixes such
    as `_forward` or `_fwd`. Outputs and gradients equal those of `mlx_lstm.torch` with the same arrays.
    Outputs are also equal in a second call, when converted arrays are cached."""
    arrays = names_of(kind, style, np.random.default_rng(9))
    x = mx.random.normal((2, T, D), key=mx.random.key(9))
    layer = getattr(mlx_lstm.torch, kind)(D, H, bidirectional=True, batch_first=True)
    layer.load_weights(list(zip(names_of(kind, "torch", np.random.default_rng(9)), arrays.values(), strict=True)))

    def ours(arrays, x):
        output = stack([arrays], x)[0]
        return (output * mx.cos(mx.arange(output.size)).reshape(output.shape)).sum()

    def theirs(arrays, x):
        layer.update(dict(zip(names_of(kind, "torch", np.random.default_rng(9)), arrays.values(), strict=True)))
        output = layer(x)[0]
        return (output * mx.cos(mx.arange(output.size)).reshape(output.shape)).sum()

    got, expected = (mx.grad(loss, argnums=(0, 1))(arrays, x) for loss in (ours, theirs))
    for one, other in zip(tree_flatten(got), tree_flatten(expected), strict=True):
        np.testing.assert_allclose(np.array(one[1]), np.array(other[1]), rtol=0, atol=2e-5, err_msg=one[0])
    layer.update(dict(zip(names_of(kind, "torch", np.random.default_rng(9)), arrays.values(), strict=True)))
    for _ in range(2):
        np.testing.assert_allclose(np.array(stack([arrays], x)[0]), np.array(layer(x)[0]), atol=1e-6)


def test_further_names():
    """`stack` accepts torch's names for several layers and projections, Keras' names, peepholes, and a GRU whose
    recurrent bias for all gates is called `bhn`."""
    mx.random.seed(10)
    x = mx.random.normal((2, T, D))
    deep = mlx_lstm.torch.LSTM(D, H, num_layers=3, bidirectional=True, batch_first=True, proj_size=3)
    output, (h_n, c_n) = stack([dict(deep.parameters())], x)
    expected, (h, c) = deep(x)
    for got, want in ((output, expected), (h_n, h), (c_n, c)):
        np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-6)

    gru = mlx_lstm.torch.GRU(D, H, batch_first=True)
    b, bhn = gru.bias_ih_l0, gru.bias_hh_l0
    whole = {"Wx": gru.weight_ih_l0, "Wh": gru.weight_hh_l0, "b": b, "bhn": bhn}
    np.testing.assert_allclose(np.array(stack([whole], x)[0]), np.array(gru(x)[0]), atol=1e-6)

    kernel, recurrent, bias = (mx.random.normal(shape) for shape in ((D, 4 * H), (H, 4 * H), (4 * H,)))
    keras = {"kernel": kernel, "recurrent_kernel": recurrent, "bias": bias}
    mlx_names = {"Wx": kernel.T, "Wh": recurrent.T, "bias": bias}
    np.testing.assert_allclose(np.array(stack([keras], x)[0]), np.array(stack([mlx_names], x)[0]), atol=1e-6)

    peeping = {"Wx": kernel.T, "Wh": recurrent.T, "b": bias, "peephole": mx.random.normal((4 * H,))}
    expected = mlx_lstm.lstm(mx.swapaxes(x, 0, 1), **peeping).h
    np.testing.assert_allclose(np.array(stack([peeping], x)[0]), np.array(mx.swapaxes(expected, 0, 1)), atol=1e-6)
    relu = mlx_lstm.torch.RNN(D, H, nonlinearity="relu", batch_first=True)
    np.testing.assert_allclose(np.array(stack([relu], x)[0]), np.array(relu(x)[0]), atol=1e-6)


def test_gradients_by_finite_differences():
    """The gradients of `stack` equal central differences in float64 with two step sizes. The stack has groups of
    layers, two biases per direction and a function between the layers. It adds the outputs of both directions."""
    rng = np.random.default_rng(11)
    named = [names_of("GRU", "forward", rng) for _ in range(4)]
    for arrays in named[2:]:
        for way in ("forward", "backward"):
            arrays[f"Wx_{way}"] = mx.array(rng.normal(size=(3 * H, H)) * 0.4)
    parameters = tree_map(lambda array: array.astype(mx.float64), named)
    x = mx.array(rng.normal(size=(2, T, 2 * D)), mx.float64)
    weights = mx.array(rng.normal(size=(2, T, 2 * H)), mx.float64)

    def loss(parameters, x):
        output, h_n = stack(parameters, x, groups=2, merge="sum", between=lambda n, x: x + x * x, lengths=[T, 2])
        return (output * weights).sum() + (h_n * h_n).sum()

    assert_by_differences(loss, (parameters, x), rng)


def test_between_and_sum_of_one_direction_and_an_empty_batch():
    (layers,) = layers_of("GRU")
    x = mx.random.normal((2, T, D))
    one = stack(layers, x, merge="sum")[0]
    np.testing.assert_array_equal(np.array(one), np.array(stack(layers, x, between=lambda n, x: x)[0]))
    assert stack(layers, x[:0], reverse=layers, merge="sum", between=lambda n, x: x)[0].shape == (0, T, H)


def test_a_graph_to_export_in_evaluation_mode(tmp_path):
    (layers,) = layers_of("LSTM")
    x, path = mx.random.normal((2, T, D)), str(tmp_path / "stack.mlxfn")
    mx.eval(layers[0].parameters(), layers[1].parameters())
    for layer in layers:
        layer.eval()
    mx.export_function(path, lambda x: stack(layers, x)[0], x)
    np.testing.assert_allclose(np.array(mx.import_function(path)(x)[0]), np.array(stack(layers, x)[0]), atol=1e-6)


@pytest.mark.parametrize("modes", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_both_directions_train_only_together(modes):
    """A layer of two directions is in training mode only if both are."""
    ahead, back = mlx_lstm.nn.GRU(D, H, engine="ops"), mlx_lstm.nn.GRU(D, H, engine="ops")
    ahead.train(modes[0])
    back.train(modes[1])
    mx.eval(ahead.parameters(), back.parameters())
    seen = []

    def forward(call, arrays, *, training, **options):
        seen.append(training)
        return run_call(call, arrays, training=training, **options)

    run_call = Call.forward
    with patch.object(Call, "forward", forward):
        stack([ahead], mx.ones((2, T, D)), reverse=[back])
    assert seen == [all(modes)]


def test_the_groups_of_a_layer_have_equal_sizes():
    """With a function in between, a layer reads any number of features, but all its groups the same one. The number is
    that of its own first group, not of another layer's."""
    x, widths = mx.ones((2, T, 2 * D)), (D, 6, 5)
    between = lambda n, x: mx.ones((*x.shape[:-1], 2 * widths[n + 1]))  # noqa: E731
    layers = [mlx.nn.GRU(width, H) for width in widths for _ in range(2)]
    expected = layers[4](mx.ones((2, T, 5)))
    output = stack(layers, x, groups=2, between=between)[0]
    np.testing.assert_allclose(np.array(output[..., :H]), np.array(expected), atol=1e-6)
    for n in (3, 5):  # the second group of layer 1, of layer 2
        wrong = [*layers[:n], mlx.nn.GRU(D, H), *layers[n + 1 :]]
        with pytest.raises(ValueError, match=rf"layers\[{n}\].Wx must have shape \[12, {widths[n // 2]}\]"):
            stack(wrong, x, groups=2, between=between)


def test_the_nonlinearity_belongs_to_the_cached_arrays():
    """The same arrays in two objects with other nonlinearities give the numbers of each, in any order of calls."""
    arrays = dict(mlx_lstm.torch.RNN(D, H).parameters())
    x = mx.random.normal((2, T, D), key=mx.random.key(2))
    for name in ("tanh", "relu", "tanh", "sigmoid", "relu"):
        function = {"tanh": mx.tanh, "relu": mlx.nn.relu, "sigmoid": mx.sigmoid}[name]
        words = {"Wxh": "weight_ih_l0", "Whh": "weight_hh_l0"}
        alone = mlx.nn.RNN(D, H, nonlinearity=function)
        alone.update({ours: arrays[theirs] for ours, theirs in words.items()})
        alone.bias = arrays["bias_ih_l0"] + arrays["bias_hh_l0"]
        for act in (name, function):
            output = stack([SimpleNamespace(**arrays, nonlinearity=act)], x)[0]
            np.testing.assert_allclose(np.array(output), np.array(alone(x)), atol=1e-6, err_msg=name)


def test_checkpoints_of_the_layers():
    """The option `checkpoint_every` of each layer, or of the call, reaches the recurrence of this layer."""
    layers, x, seen = [mlx_lstm.nn.GRU(D, H, checkpoint_every=2), mlx_lstm.nn.GRU(H, H), mlx.nn.GRU(H, H)], X, []
    layers.append(mlx_lstm.nn.GRU(H, H, checkpoint_every="auto"))
    run_call = Call.forward

    def forward(call, *arguments, **options):
        seen.append(call.checkpoint_every)
        return run_call(call, *arguments, **options)

    with patch.object(Call, "forward", forward):
        stack(layers, x)
        stack(layers, x, checkpoint_every=3)
        loaded = mlx_lstm.nn.from_weights(convert.from_mlx(layers[1:]), checkpoint_every=4)
        loaded(mx.ones((2, T, H)))
    assert seen == [2, None, None, "auto", 3, 3, 3, 3, 4, 4, 4]
    assert loaded.checkpoint_every == 4


X, LSTM, GRU, RNN = mx.zeros((2, T, D)), mlx.nn.LSTM(D, H), mlx.nn.GRU(D, H), mlx.nn.RNN(D, H)
BAD = {
    "groups": (lambda: stack([GRU, GRU, GRU], X, groups=2), "layers must hold 2 layers for each .* but got 3 layers"),
    "no groups": (lambda: stack([GRU], X, groups=0), "groups must be an integer .* 1 but got 0"),
    "features of groups": (lambda: stack([GRU, GRU], X, groups=2), r"x must have shape \[B, T, D = 6\]"),
    "both and reverse": (
        lambda: stack([mlx_lstm.torch.GRU(D, H, bidirectional=True)], X, reverse=[GRU]),
        r"layers\[0\] must have one direction, as there is reverse, but got an object with both",
    ),
    "one and both": (
        lambda: stack([GRU, mlx_lstm.torch.GRU(H, H, bidirectional=True)], X),
        "layers must all have one direction, or all both, but got 1 of 2 with both",
    ),
    "two kinds of names": (
        lambda: stack([{"Wx": mx.zeros((12, D)), "weight_hh_l0": mx.zeros((12, H))}], X),
        r"layers\[0\] must hold Wx .* no such key",
    ),
    "no layer": (lambda: stack([], X), "layers must hold at least one layer but got none"),
    "one layer": (lambda: stack(LSTM, X), "layers must be a list of layers but got LSTM"),
    "a flag": (lambda: stack([LSTM], X, reverse=True), "reverse must be a list of layers but got bool"),
    "too few reversed": (lambda: stack([LSTM], X, reverse=[LSTM, LSTM]), "as many layers as layers, 1, but got 2"),
    "kinds": (lambda: stack([LSTM, mlx.nn.GRU(H, H)], X), r"layers\[1\] must be of the kind .* lstm, but got gru"),
    "nonlinearity": (
        lambda: stack([RNN], X, reverse=[mlx.nn.RNN(D, H, nonlinearity=mlx.nn.relu)]),
        r"reverse\[0\] must have the nonlinearity",
    ),
    "no bias on one side": (lambda: stack([LSTM], X, reverse=[mlx.nn.LSTM(D, H, False)]), "and the parameters of"),
    "width": (lambda: stack([LSTM, LSTM], X), r"layers\[1\].Wx must have shape \[16, 4\], .* got shape \[16, 3\]"),
    "sizes": (
        lambda: stack([LSTM, mlx.nn.LSTM(H, 5)], X),
        r"layers\[1\].Wx must have shape \[16, 4\], as a layer has the H of the first, 4, and reads the one before,",
    ),
    "merge": (lambda: stack([LSTM], X, merge="mean"), "merge must be one of 'concat', 'sum' but got 'mean'"),
    "between": (
        lambda: stack([LSTM], X, between=[1]),
        r"between must be a function, between\(n, x\) -> x, but got list",
    ),
    "what between returns": (
        lambda: stack([GRU, mlx.nn.GRU(H, H)], X, between=lambda n, x: x[..., :2]),
        r"between\(0, x\) must return floats of shape \[2, 5, 4\], which layer 1 reads, .* shape \[2, 5, 2\]",
    ),
    "nothing between": (
        lambda: stack([GRU, mlx.nn.GRU(H, H)], X, between=lambda n, x: None),
        r"between\(0, x\) must return floats .* but got NoneType",
    ),
    "bias": (lambda: stack([LSTM.parameters() | {"bias": mx.zeros(3)}], X), r"layers\[0\].bias must have shape \[16\]"),
    "more arrays": (
        lambda: stack([LSTM.parameters() | {"gain": mx.zeros(4)}], X),
        r"layers\[0\] must hold Wx .* and no other array or module but got .*'gain': \[4\]",
    ),
    "modules": (lambda: stack([mlx.nn.Sequential(LSTM)], X), r"layers\[0\] must hold Wx"),
    "x": (lambda: stack([LSTM], X[..., :2]), r"x must have shape \[B, T, D = 3\] .* but got shape \[2, 5, 2\]"),
    "NumPy's x": (lambda: stack([LSTM], np.zeros((2, T, D))), r"x must be an mlx.core.array: make one by mx.array"),
    "NumPy's bias": (
        lambda: stack([LSTM.parameters() | {"bias": np.zeros(16)}], X),
        r"layers\[0\].bias must be an mlx.core.array: make one by mx.array\(...\), but got ndarray",
    ),
    "complex x": (lambda: stack([LSTM], X.astype(mx.complex64)), r"\[nn.stack\] x must be real but got"),
    "no engine": (lambda: stack([LSTM], X, engine=""), "engine must be one of fused, stepwise, numpy, ops but got ''"),
    "no steps": (lambda: stack([LSTM], X[:, :0]), "with at least one step"),
    "state": (lambda: stack([LSTM], X, mx.zeros((1, 2, H))), r"state must be a tuple \(h_0, c_0\) but got array"),
    "h alone": (
        lambda: stack([LSTM], X, (mx.zeros((1, 2, H)),)),
        r"state must be a tuple \(h_0, c_0\) but got tuple of 1",
    ),
    "shape of state": (lambda: stack([GRU], X, mx.zeros((2, H))), r"h_0 must have shape \[1, 2, 4\]"),
    "lengths": (lambda: stack([GRU], X, lengths=[6, 1]), r"lengths must lie in 0..5 but got lengths\[0\] = 6"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


def stacked(lengths):
    return mlx_lstm.nn.stack([mlx_lstm.nn.LSTM(3, 4)], mx.ones((2, 5, 3)), lengths=lengths)


def from_weights(lengths):
    weights = convert.from_mlx(mlx_lstm.nn.LSTM(3, 4))
    return mlx_lstm.nn.from_weights(weights)(mx.ones((2, 5, 3)), lengths=lengths)


def by_steps(lengths):
    return mlx_lstm.recurrent(lambda x, h: (x + h, x + h), mx.ones((5, 2, 3)), mx.zeros((2, 3)), lengths=lengths)


def of_torch(lengths):
    return mlx_lstm.torch.LSTM(3, 4)(mx.ones((5, 2, 3)), lengths=lengths)


@pytest.mark.parametrize("run", [stacked, from_weights, by_steps, of_torch])
@pytest.mark.parametrize("lengths", [[5, 6], [-1, 2]])
def test_lengths_out_of_range_are_refused_as_a_list_and_as_an_array(run, lengths):
    """No layer runs lengths beyond the number of steps, whether they come as numbers or as an array of MLX."""
    for given in (lengths, mx.array(lengths)):
        with pytest.raises(ValueError, match=r"lengths must lie in 0\.\.5 "):
            run(given)
