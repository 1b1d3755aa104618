"""Tests of `mlx_lstm.convert`: conversion to a format and back keeps every bit, converted weights give the outputs
of the original library, and files written by other programs can be read."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import types
import zipfile
from functools import partial
from pathlib import Path

import clients
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from assertions import assert_within, bounds
from cases import needs

import mlx_lstm
from mlx_lstm import convert, cudnn, mpsgraph, nn
from mlx_lstm.convert import _keras_file
from mlx_lstm.convert.__main__ import main
from mlx_lstm.engines.cells import GRUCell, LSTMCell, RNNCell
from mlx_lstm.oracle import evaluate
from mlx_lstm.oracle.closeness import exact_and_bounds

ROOT = Path(__file__).parents[1]
T, B, I, H, P = 5, 3, 6, 4, 2
RNG = np.random.default_rng(0)


def numbers(*shape, dtype=np.float32, rng=RNG):
    return mx.array(rng.normal(0, 0.5, shape).astype(dtype), mx.float64 if dtype == np.float64 else None)


def weights_of(
    cell, layers=1, directions=1, *, biases="xh", proj=0, peephole=False, dtype=np.float32, reverse=False, rng=RNG
):
    """Return random weights of a cell. `biases` names the biases that exist: "x" (added to the input's product), "h"
    (added to the recurrent product), "xh" (both) or "" (none)."""
    rows, found = cell.gates * H, []
    for k in range(layers):
        found.append([])
        for _ in range(directions):
            shapes = {"Wx": (rows, directions * (proj or H) if k else I), "Wh": (rows, proj or H)}
            shapes |= {f"b{letter}": (rows,) for letter in biases} | ({"Wp": (proj, H)} if proj else {})
            arrays = {name: numbers(*shape, dtype=dtype, rng=rng) for name, shape in shapes.items()}
            if peephole:
                p = np.array(numbers(4, H, rng=rng))
                p[2] = 0  # block 2 is the candidate, which has no peephole
                arrays["peephole"] = mx.array(p.reshape(-1))
            found[-1].append(arrays)
    return convert.Weights(cell, found, reverse)


def one_bias(weights):
    """Return the weights with the recurrent bias bh set to 0, as a format with a single bias stores them. A GRU that
    resets after the recurrent product keeps the candidate's part of bh, because this part cannot be added to the
    other bias."""
    gru = isinstance(weights.cell, GRUCell) and weights.cell.reset == "after"

    def change(arrays):
        bh = np.array(arrays.get("bh", mx.zeros((arrays["Wx"].shape[0],))))
        bh[: 2 * H if gru else None] = 0
        return arrays | {"bh": mx.array(bh)}

    return weights.map(change) if weights.has_bias else weights


def assert_same(one, other):
    assert convert.differences(one, other) == []


RELU = LSTMCell(activations=("hard_sigmoid_sixth",) * 2 + ("relu", "hard_sigmoid_sixth", "relu"))
PLAIN = {
    "lstm": weights_of(LSTMCell(), 3, 2),
    "one layer": weights_of(LSTMCell()),
    "no bias": weights_of(LSTMCell(), 2, biases=""),
    "gru": weights_of(GRUCell(), 2, 2),
    "gru, no bias": weights_of(GRUCell(), biases=""),
    "rnn": weights_of(RNNCell("relu"), 2),
}
BEFORE = {"gru before": weights_of(GRUCell(reset="before"), 2, 2, biases="x")}
PROJECTED = {"projected": weights_of(LSTMCell(), 2, 2, proj=P)}
OTHERS = {
    "relu": weights_of(RELU, 1, 2, biases="x"),
    "peephole": weights_of(LSTMCell(), 1, 2, peephole=True),
    "hard gru": weights_of(GRUCell(activations=("hard_sigmoid_sixth",) * 2 + ("relu",)), 1),
    "reverse": weights_of(RNNCell("sigmoid"), reverse=True),
}
EVERY = PLAIN | BEFORE | PROJECTED | OTHERS


def by_mpsgraph(weights):
    layers, properties = convert.to_mpsgraph(weights)
    kind = {"lstm": "LSTM", "gru": "GRU", "rnn": "SingleGateRNN"}[weights.cell.op]
    descriptor = getattr(mpsgraph, f"{kind}Descriptor")(**properties)
    assert len(layers) == len(weights.layers)
    return convert.from_mpsgraph(layers, descriptor, output_peephole="current", hard_sigmoid="x/6")


def by_onnx(weights):
    nodes = convert.to_onnx(weights)
    parts = [convert.from_onnx(op, **arrays, attributes=attributes) for op, arrays, attributes in nodes]
    return convert.stacked("test", parts)


def by_cudnn(weights):
    params, sizes = convert.to_cudnn(weights)
    return convert.from_cudnn(params, **sizes)


def by_mlx(weights):
    layers = convert.to_mlx(weights)
    ways = [[layer[d] for layer in layers] for d in range(weights.directions)]
    return convert.from_mlx(*ways, nonlinearity=getattr(weights.cell, "act", "tanh"))


def by_ops(weights):
    options = {"bidirectional": weights.directions == 2} | weights.options
    return convert.from_ops(weights.cell.op, convert.to_ops(weights), **options)


def by_torch(weights):
    return convert.from_torch(convert.to_torch(weights), nonlinearity=getattr(weights.cell, "act", "tanh"))


def by_layer(weights):
    return convert.from_torch(mlx_lstm.torch.from_weights(weights))


def by_tf(weights, order="icfo"):
    arguments = convert.to_tf(weights, order=order)
    assert arguments["w"].shape == (I + H, 4 * H)
    return convert.from_tf(**arguments, order=order)


TF = weights_of(LSTMCell(forget_bias=1.0, cell_clip=3.0), biases="x", peephole=True)
TRIPS = {
    "torch": (by_torch, PLAIN | PROJECTED, False),
    "layer": (by_layer, PLAIN | PROJECTED, False),
    "cudnn": (by_cudnn, PLAIN | PROJECTED, False),
    "onnx": (by_onnx, PLAIN | BEFORE | OTHERS, False),
    "mlx": (by_mlx, PLAIN, True),
    "ops": (by_ops, EVERY, True),
    "mpsgraph": (by_mpsgraph, PLAIN | BEFORE | OTHERS, True),
    "tf": (by_tf, {"tf": TF, "plain": PLAIN["one layer"]}, True),
    "tf v2": (lambda weights: by_tf(weights, "ifco"), {"tf": TF}, True),
    "tf gru": (
        lambda weights: convert.from_tf_gru(**convert.to_tf_gru(weights)),
        {"gru": weights_of(GRUCell(reset="before"), biases="x")},
        True,
    ),
}


@pytest.mark.parametrize("trip", TRIPS)
def test_there_and_back(trip):
    there_and_back, cases, summed = TRIPS[trip]
    for weights in cases.values():
        weights = one_bias(weights) if summed else weights
        assert_same(weights, there_and_back(weights))


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_dtypes(dtype):
    weights = weights_of(GRUCell(), 2, 2, dtype=dtype)
    with mx.stream(mx.cpu):
        for there_and_back in (by_torch, by_cudnn, by_onnx):
            assert_same(weights, there_and_back(weights))
        again = convert.from_ops("gru", convert.to_ops(weights), bidirectional=True)
        assert again.layers[0][0]["bx"].dtype == weights.layers[0][0]["bx"].dtype


def test_a_bias_of_zero_keeps_the_signs_of_the_other():
    """If one bias is -0 and the other is 0, the converted bias is -0, although the sum -0 + 0 is +0."""
    for cell in (LSTMCell(), GRUCell()):
        zeros = {"bx": -mx.zeros((cell.gates * H,)), "bh": mx.zeros((cell.gates * H,))}
        weights = weights_of(cell, biases="").map(lambda arrays, zeros=zeros: arrays | zeros)
        assert_same(weights, by_mlx(weights))


def test_a_forget_bias_may_be_the_only_bias(tmp_path):
    """An LSTM without biases but with a forget bias becomes a layer with biases, in torch and in Keras."""
    weights = weights_of(LSTMCell(forget_bias=0.5), 2, biases="")
    layer, x = mlx_lstm.torch.from_weights(weights, batch_first=True), numbers(B, T, I)
    np.testing.assert_allclose(np.array(layer(x)[0]), np.array(nn.from_weights(weights)(x)[0]), atol=1e-6)
    pytest.importorskip("h5py")
    convert.write(tmp_path / "m.keras", {"lstm": weights})
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        layers = json.loads(archive.read("config.json"))["config"]["layers"]
    assert [layer["config"]["use_bias"] for layer in layers[1:]] == [True, True]


@pytest.mark.parametrize("biased", [0, 1])
@pytest.mark.parametrize("cell", [LSTMCell(), GRUCell(), RNNCell()])
def test_an_array_that_only_one_direction_has(cell, biased, tmp_path):
    """A bias, or a peephole, that only one direction of a layer has is kept where one array holds both directions."""
    weights, x = weights_of(cell, 1, 2, peephole=cell.op == "lstm"), numbers(B, T, I)
    for word in ("bx", "bh", "peephole"):
        weights.layers[0][1 - biased].pop(word, None)
    wanted = []  # each direction by itself
    for way in range(2):
        layer = nn.from_weights(weights._replace(layers=[[weights.layers[0][way]]], reverse=way == 1))
        wanted.append(layer(x)[0])
    convert.write(tmp_path / "m.npz", {"lstm": weights}, style="ops")
    read = convert.read(tmp_path / "m.npz").layers["lstm"]
    for found in (weights, read, by_mpsgraph(weights), by_onnx(weights)):
        h = nn.from_weights(found)(x)[0]
        np.testing.assert_allclose(np.array(h), np.concatenate(wanted, -1), atol=1e-6)


@pytest.mark.parametrize("op", ["gru", "rnn"])
@pytest.mark.parametrize("word", ["peephole", "Wp"])
def test_arrays_that_only_lstms_have(op, word):
    """A GRU or plain RNN with a peephole or a projection is refused: writers would leave the array out."""
    rows = H * {"gru": 3, "rnn": 1}[op]
    arrays = {"Wx": numbers(rows, I), "Wh": numbers(rows, P if word == "Wp" else H)}
    arrays |= {word: numbers(P, H) if word == "Wp" else numbers(rows)}
    with pytest.raises(ValueError, match=f"{word} must not be there unless the cell is an LSTM"):
        convert.from_ops(op, [arrays])


def test_two_biases_become_their_sum():
    for name in ("lstm", "gru", "rnn"):
        weights = PLAIN[name]
        assert convert.differences(weights, by_mlx(weights)) == ["bx", "bh"]
        arrays, ours = weights.layers[0][0], convert.to_mlx(weights)[0][0]
        total = np.array(arrays["bx"]) + np.array(arrays["bh"])
        if name == "gru":
            total[2 * H :] = np.array(arrays["bx"])[2 * H :]
            np.testing.assert_array_equal(np.array(ours["bhn"]), np.array(arrays["bh"])[2 * H :])
        np.testing.assert_array_equal(np.array(ours["b" if name == "gru" else "bias"]), total)


@pytest.mark.parametrize("name", ["Wx", "Wh", "bx"])
def test_differences_names_a_change_of_one_bit(name):
    def change(arrays):
        array = np.array(arrays[name])
        array.flat[-1] = np.nextafter(array.flat[-1], np.float32(9))
        return arrays | {name: mx.array(array)}

    weights = PLAIN["lstm"]
    assert convert.differences(weights, weights.map(change)) == [name]


def test_names_that_contain_the_word_of_a_direction(tmp_path):
    """Layers named `feedforward` and `feedback` are two layers, not the two directions of one layer."""
    path, layers = (
        tmp_path / "a.safetensors",
        {"feedforward": PLAIN["one layer"], "feedback": PLAIN["no bias"].each()[0]},
    )
    convert.write(path, layers, style="mlx")
    found = convert.read(path).layers
    assert found.keys() == layers.keys()
    assert all(weights.directions == 1 for weights in found.values())


def test_reversed_and_transposed_arrays_of_numpy():
    arrays = {key: np.array(value) for key, value in convert.to_torch(weights_of(LSTMCell())).items()}
    arrays["weight_ih_l0"] = arrays["weight_ih_l0"][:, :1]  # one feature, because NumPy copies no axis of size 1
    # The same numbers, from the last byte to the first in memory, or column by column, or with the other byte order.
    for change in (
        lambda array: array[::-1].copy()[::-1],
        lambda array: array[..., ::-1].copy()[..., ::-1],
        np.asfortranarray,
        lambda array: array.astype(array.dtype.newbyteorder()),
    ):
        found = convert.from_torch({key: change(array) for key, array in arrays.items()})
        assert not convert.differences(convert.from_torch(arrays), found)


# --- Converted weights give the original outputs ---------------------------------------------------------------------


@pytest.mark.parametrize("style", ["torch", "mlx", "two-biases", "keras", "ops"])
def test_names_with_directions_or_numbers_come_back(style, tmp_path):
    one = weights_of(LSTMCell(), biases="")
    two = weights_of(LSTMCell(), layers=2, biases="")
    both = weights_of(LSTMCell(), directions=2)
    names = ["rnn.0", "rnn.1", "back.enc", "a.forward.b", "a.backward.b", "0", ".x", "reverse", "lstm"]
    layers = dict(zip(names, [one, one, two, one, one, one, one, both, two], strict=True))
    for path in (tmp_path / "w.safetensors", tmp_path / "w.npz"):
        convert.write(path, convert.Model(layers, {"rnn.2.scale": np.ones(3)}, {}, [], {}), style=style)
        again = convert.read(path)
        assert set(again.layers) == set(names) and set(again.rest) == {"rnn.2.scale"} and again.metadata == {}
        for name, weights in layers.items():
            assert set(convert.differences(weights, again.layers[name])) <= {"bx", "bh"}


def test_other_arrays_do_not_become_part_of_a_layer(tmp_path):
    layers = {"a": weights_of(LSTMCell(), biases="")}
    convert.write(tmp_path / "w.npz", convert.Model(layers, {"a.bias": np.ones(16)}, {}, [], {}), style="mlx")
    again = convert.read(tmp_path / "w.npz")
    assert not convert.differences(layers["a"], again.layers["a"]) and list(again.rest) == ["a.bias"]
    rest = {f"a.weight_{part}_l0": np.ones((16, 4)) for part in ("ih", "hh")}  # a second layer of this name
    with pytest.raises(ValueError, match="layer and direction of a must be there once"):
        convert.write(tmp_path / "x.npz", convert.Model(layers, rest, {}, [], {}), style="mlx")


@pytest.mark.parametrize("places", ["[]", '{"a.Wx": 1}', '{"a.Wx": ["a", -1, 0]}', '{"a.Wx": ["a", 0, 2]}', "["])
def test_metadata_on_the_places_of_arrays_that_no_program_wrote(places, tmp_path):
    arrays = {"a.Wx": mx.ones((16, 3)), "a.Wh": mx.ones((16, 4))}
    mx.save_safetensors(str(tmp_path / "w.safetensors"), arrays, {"mlx_lstm.layers": places})
    with pytest.raises(ValueError, match="not what this package writes"):
        convert.read(tmp_path / "w.safetensors")


def test_one_layer_that_is_there_twice(tmp_path):
    arrays = {f"weight_{part}_l{n}": np.ones((16, 4), np.float32) for part in ("ih", "hh") for n in ("0", "00")}
    np.savez(tmp_path / "w.npz", **arrays)
    with pytest.raises(ValueError, match="must be there once"):
        convert.read(tmp_path / "w.npz")


def case_of(arrays, one, x):
    """Return one layer as a case for the float64 oracle: a dict of arrays and options. `arrays` are the op's array
    arguments, `one` is the layer's `Weights` with its options, and `x` is the layer's input."""
    return {name: np.array(array) for name, array in arrays.items()} | {"x": x, "op": one.cell.op} | one.options


def through_layers(weights, x, fl):
    """Return {"h": output} of a stack of layers, computed by the oracle. `fl` is the oracle's arithmetic, for example
    that of float64."""
    for arrays, one in zip(convert.to_ops(weights), weights.each(), strict=True):
        x = evaluate(case_of(arrays, one, x), None, fl)[0]["h"]
    return {"h": x}


def assert_outputs(weights, x, expected, states=None):
    """Assert that our output of each layer agrees with `expected`, the outputs of the original library. The input of
    each layer is the original library's output of the layer below.

    Both outputs are float32. Each may differ from the exact output by the error bound that `bounds` derives from
    rounding errors, so they may differ by twice the bound.
    """
    for arrays, one, h in zip(convert.to_ops(weights), weights.each(), expected, strict=True):
        case = case_of(arrays, one, x) | (states or {})
        given = {name: mx.array(array) for name, array in (states or {}).items()}
        with mx.stream(mx.cpu):
            got = getattr(mlx_lstm, weights.cell.op)(mx.array(x), **arrays, **given, **one.options).h
        limit = bounds(case, np.float32)["h"]
        assert_within("h", np.array(got), np.asarray(h).astype(np.float64), 2 * limit)
        x = np.array(h, np.float32)


def test_outputs_of_torch():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    x = np.array(numbers(T, B, I))
    made = [torch.nn.LSTM(I, H, 2, bidirectional=True, proj_size=P), torch.nn.GRU(I, H, 2, bias=False)]
    made += [torch.nn.GRU(I, H, bidirectional=True), torch.nn.RNN(I, H, nonlinearity="relu")]
    for theirs in made:
        weights, expected, K = convert.from_torch(theirs), [], theirs.num_layers
        # To get the output of each layer, run a torch module that has only the layers up to this one.
        for layer in range(1, K + 1):
            options = {"proj_size": P} if theirs.proj_size else {}
            options |= {"nonlinearity": "relu"} if theirs.mode == "RNN_RELU" else {}
            part = type(theirs)(I, H, layer, bias=theirs.bias, bidirectional=theirs.bidirectional, **options)
            part.load_state_dict({key: value for key, value in theirs.state_dict().items() if key in part.state_dict()})
            expected.append(part(torch.from_numpy(x))[0].detach().numpy())
        assert_outputs(weights, x, expected)
        ours = mlx_lstm.torch.from_weights(weights)
        assert repr(ours) == repr(theirs)
        back = {key: torch.from_numpy(np.array(value)) for key, value in convert.to_torch(weights).items()}
        assert all(torch.equal(back[key], value) for key, value in theirs.state_dict().items())
    for cell in (
        torch.nn.LSTMCell(I, H),
        torch.nn.GRUCell(I, H, bias=False),
        torch.nn.RNNCell(I, H, nonlinearity="relu"),
    ):
        weights = convert.from_torch(cell)
        assert weights.options == ({"activation": "relu"} if hasattr(cell, "nonlinearity") else {})
        back = convert.to_torch(weights)
        assert all(np.array_equal(back[f"{key}_l0"], value) for key, value in cell.state_dict().items())
    missing = {key: value for key, value in torch.nn.LSTMCell(I, H).state_dict().items() if key != "bias_hh"}
    with pytest.raises(ValueError, match=r"\[from_torch\] bias_hh must be there"):
        convert.from_torch(missing)

    class Other(torch.nn.LSTM):
        def forward(self, *arguments):
            return 2 * super().forward(*arguments)[0]

    with pytest.raises(ValueError, match=r"what torch.nn.LSTM computes.* but got Other, which redefines forward"):
        convert.from_torch(Other(I, H))
    # In a whole model the layer that the prefix names says what it computes.
    model = torch.nn.Sequential(torch.nn.RNN(I, H, nonlinearity="relu"), torch.nn.ModuleDict({"lstm": Other(I, H)}))
    assert convert.from_torch(model, prefix="0.").options == {"activation": "relu"}
    with pytest.raises(ValueError, match="Other, which redefines forward"):
        convert.from_torch(model, prefix="1.lstm.")
    assert convert.from_torch(type("Same", (torch.nn.LSTM,), {})(I, H)).cell.op == "lstm"
    replaced = torch.nn.LSTM(I, H)
    replaced.forward = lambda *arguments: 0
    with pytest.raises(ValueError, match="LSTM, which redefines forward"):
        convert.from_torch(replaced)
    # `torch.jit.trace` returns an object with the parameters of a layer, but without its nonlinearity.
    states = {"rnn": torch.nn.RNN(I, H, nonlinearity="relu").state_dict(), "lstm": torch.nn.LSTM(I, H).state_dict()}
    traced = {
        kind: type("Traced", (), {"state_dict": lambda _, state=state: state})() for kind, state in states.items()
    }
    with pytest.raises(ValueError, match=r"the layer must have its nonlinearity: .* but got Traced without it"):
        convert.from_torch(traced["rnn"])
    assert convert.from_torch(traced["lstm"]).cell.op == "lstm"
    assert convert.from_torch(states["rnn"], nonlinearity="relu").options == {"activation": "relu"}
    halves = torch.nn.LSTM(I, H).to(torch.bfloat16)
    again = convert.to_torch(convert.from_torch(halves))
    for key, value in halves.state_dict().items():
        assert again[key].dtype == mx.bfloat16
        np.testing.assert_array_equal(np.array(again[key].astype(mx.float32)), value.float().numpy())


def test_outputs_of_mlx():
    x = np.array(numbers(B, T, I))
    ahead, back = ([mlx.nn.GRU(I, H), mlx.nn.GRU(2 * H, H)] for _ in range(2))
    layer = mlx_lstm.torch.from_weights(convert.from_mlx(ahead, back), batch_first=True)
    expected = nn.stack(ahead, mx.array(x), reverse=back)[0]
    np.testing.assert_array_equal(np.array(layer(mx.array(x))[0]), np.array(expected))


def test_outputs_of_tensorflow():
    """Converted weights give the outputs of TensorFlow's own ops, which tests/goldens/make_tf.py recorded."""
    for op in ("block_lstm", "block_lstm_v2", "gru_block_cell"):
        # Only float32 is compared: in 16-bit dtypes TensorFlow adds in another order and rounds differently.
        cases = [case for case in golden(op) if case[0]["x"].dtype == np.float32]
        assert len(cases) > 3
        for given, wanted in cases:
            steps = int(given.pop("seq_len_max", 1))
            states = {"h0": given.pop("h_prev")} | ({"c0": given.pop("cs_prev")} if "cs_prev" in given else {})
            x = given.pop("x")
            x = x[:steps] if x.ndim == 3 else x[None]
            if op == "gru_block_cell":
                weights = convert.from_tf_gru(**given)
            else:
                if not given.pop("use_peephole"):
                    given = {name: value for name, value in given.items() if name not in ("wci", "wcf", "wco")}
                options = {
                    "forget_bias": float(given.pop("forget_bias", 0)),
                    "cell_clip": float(given.pop("cell_clip")),
                }
                order = "ifco" if op.endswith("v2") else "icfo"
                weights = convert.from_tf(**given, **options, order=order)
            if len(x):
                h = wanted["h"][:steps] if wanted["h"].ndim == 3 else wanted["h"][None]
                assert_outputs(weights, x, [h], states)


@pytest.mark.parametrize("kind", ["lstm", "cudnn", "peepholes", "projected", "gru", "rnn"])
def test_checkpoints_of_tensorflow_1(kind):
    """The conversions in docs/tensorflow.md give the outputs of the cells of TensorFlow 1, computed by its equations in
    float64, for sequences of different lengths."""
    rng, sigmoid = np.random.default_rng(5), lambda a: 1 / (1 + np.exp(-a))

    def draw(*shape):
        return rng.normal(0, 0.5, shape)

    width, gates = P if kind == "projected" else H, {"gru": 2, "rnn": 1}.get(kind, 4)
    kernel, bias, inner, inner_bias = draw(I + width, gates * H), draw(gates * H), draw(I + H, H), draw(H)
    projection, diagonals, forget_bias = draw(H, P), draw(3, H) * (kind == "peepholes"), float(kind != "cudnn")

    def step(x, h, c):
        a = np.concatenate([x, h], 1) @ kernel + bias
        if kind == "rnn":
            return np.tanh(a), c
        if kind == "gru":
            r, u = np.split(sigmoid(a), 2, 1)
            return u * h + (1 - u) * np.tanh(np.concatenate([x, r * h], 1) @ inner + inner_bias), c
        i, j, f, o = np.split(a, 4, 1)
        c = sigmoid(f + forget_bias + diagonals[1] * c) * c + sigmoid(i + diagonals[0] * c) * np.tanh(j)
        m = sigmoid(o + diagonals[2] * c) * np.tanh(c)
        return m @ projection if kind == "projected" else m, c

    x, lengths, expected = draw(B, T, I), [T, 2, 4], np.zeros((B, T, width))
    h, c = np.zeros((B, width)), np.zeros((B, H))
    for t in range(T):
        new, runs = step(x[:, t], h, c), (t < np.array(lengths))[:, None]
        h, c = np.where(runs, new[0], h), np.where(runs, new[1], c)
        expected[:, t] = h * runs
    matrices = {"Wx": kernel[:I].T, "Wh": kernel[I:].T, "b": bias}
    weights = {
        "lstm": lambda: convert.from_tf(kernel, bias),
        "cudnn": lambda: convert.from_tf(kernel, bias, forget_bias=0),
        "peepholes": lambda: convert.from_tf(kernel, bias, *diagonals),
        "projected": lambda: convert.from_ops(
            "lstm", [matrices | {"Wp": projection.T}], gate_order="igfo", forget_bias=1.0
        ),
        "gru": lambda: convert.from_tf_gru(kernel, inner, bias, inner_bias),
        "rnn": lambda: convert.from_ops("rnn", [matrices]),
    }[kind]()
    with mx.stream(mx.cpu):
        output, last = nn.from_weights(weights)(mx.array(x, mx.float64), lengths=lengths)
    np.testing.assert_allclose(np.array(output), expected, atol=1e-13)
    np.testing.assert_allclose(np.array(last[0] if gates == 4 else last)[0], h, atol=1e-13)


def golden(op):
    """Return the recorded calls of a TensorFlow op as a list of ({argument: array}, {result: array})."""
    with np.load(ROOT / "tests" / "goldens" / f"tf_{op}.npz") as file:
        found = {}
        for name in file.files:
            if name.count("/") == 2:
                case, way, word = name.split("/")
                found.setdefault(case, ({}, {}))[way == "out"][word] = file[name]
    return list(found.values())


def test_files_of_onnx(tmp_path):
    """`convert.read` reads the LSTM, GRU and RNN test models of the package onnx, and `to_onnx` returns the same
    weights bit for bit. The models take their weights as inputs, so the test first stores the weights in the model
    files, as in files of trained models."""
    onnx, node = pytest.importorskip("onnx"), pytest.importorskip("onnx.backend.test.case.node")
    for name in ("lstm", "gru", "rnn"):
        importlib.import_module(f"onnx.backend.test.case.node.{name}")
    found = [case for case in node._NodeTestCases if case.model.graph.node[0].op_type in ("LSTM", "GRU", "RNN")]
    assert len({case.name for case in found}) == 18
    for case in found:
        model, ((inputs, outputs),) = onnx.ModelProto.FromString(case.model.SerializeToString()), case.data_sets
        graph, node = model.graph, model.graph.node[0]
        given = dict(zip(filter(None, node.input), inputs, strict=True))
        wanted = dict(zip(filter(None, node.output), outputs, strict=True))
        for word in [word for word in given if word in "WRBP"]:
            graph.input.remove(next(each for each in graph.input if each.name == word))
            tensor = onnx.numpy_helper.from_array(given[word], word)
            if word == "R":  # R comes from a Constant node, the other weights from initializers
                graph.node.insert(0, onnx.helper.make_node("Constant", [], [word], value=tensor))
            else:
                graph.initializer.append(tensor)
        graph.initializer.append(onnx.numpy_helper.from_array(np.arange(3), "foreign"))
        onnx.save(model, tmp_path / "m.onnx")
        read = convert.read(tmp_path / "m.onnx")
        (weights,), (keys,) = read.layers.values(), read.keys.values()
        assert keys == [word for word in "WRBP" if word in given] and list(read.rest) == ["foreign"]
        states = {word for word in given if word in ("sequence_lens", "initial_h", "initial_c")}
        assert len(read.notes) == bool(states) and all(word in read.notes[0] for word in states)
        ((op_type, arrays, said),) = convert.to_onnx(weights)
        assert op_type == node.op_type and arrays.keys() == set(keys)
        assert all(np.array(arrays[word]).tobytes() == given[word].tobytes() for word in keys)
        attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        assert said["hidden_size"] == attributes["hidden_size"]
        if "Y" in wanted and not attributes.get("layout") and not states:
            assert_outputs(weights, given["X"], [side_by_side(wanted["Y"])])


def side_by_side(Y):
    """Return ONNX's output [T, D, B, H] as an array [T, B, D * H], with D directions side by side."""
    return np.concatenate(list(np.moveaxis(Y, 1, 0)), axis=-1)


@pytest.mark.parametrize("name", ["lstm", "gru", "no bias", "peephole", "gru before"])
def test_models_of_onnx(name, tmp_path):
    """The ONNX models that `convert.write` writes give the right outputs in ONNX's reference evaluator."""
    reference = pytest.importorskip("onnx.reference")
    weights, path = EVERY[name], tmp_path / "m.onnx"
    other = weights_of(RNNCell(), 2, 2)
    convert.write(path, {"enc.rnn": weights, "other": other})
    again = convert.read(path)
    parts = [again.layers[key] for key in again.layers if key.startswith("enc")]
    assert_same(weights, convert.stacked("test", parts))
    x = np.array(numbers(T, B, I))
    layers = [f"enc.rnn.{n}.h" for n in range(len(weights.layers) - 1)] + ["enc.rnn.h"]
    import onnx

    model = onnx.load(path)
    for each in layers[:-1]:
        model.graph.output.append(onnx.helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, None))
    found = reference.ReferenceEvaluator(model).run(layers, {"enc.rnn.x": x, "other.x": x})
    assert_outputs(weights, x, found)


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("bfloat16", "float16"), ("float16", "float16")])
def test_a_model_of_onnx_has_one_dtype(dtypes, tmp_path):
    """A stack whose arrays differ in dtype becomes a valid model: in ONNX the arrays of a node have one dtype."""
    onnx, path = pytest.importorskip("onnx"), tmp_path / "m.onnx"
    first, second = (getattr(mx, name) for name in dtypes)
    layers = weights_of(LSTMCell(), 2, biases="x").each()
    layers = [
        layer.map(lambda arrays: {name: array.astype(first) for name, array in arrays.items()}) for layer in layers
    ]
    layers[0] = layers[0].map(lambda arrays: arrays | {"bx": arrays["bx"].astype(second)})
    convert.write(path, {"mixed": convert.stacked("test", layers)})
    onnx.checker.check_model(onnx.load(path), full_check=True)  # also infers the types
    expected = [] if first == second else [f"{dtypes[0]} is now float32"]
    assert convert.differences(layers[1], convert.read(path).layers["mixed.1"]) == expected


@pytest.mark.parametrize("layers, both", [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_model_of_onnx_takes_and_returns_states(kind, layers, both, tmp_path):
    """A written ONNX model begins from the states that it gets and returns the last ones, in the shapes of torch. So
    a sequence in two parts gives the same as a whole one. Without states it begins from 0."""
    torch, reference = pytest.importorskip("torch"), pytest.importorskip("onnx.reference")
    layer = getattr(torch.nn, kind)(I, H, num_layers=layers, bidirectional=both)
    convert.write(path := tmp_path / "m.onnx", {"": convert.from_torch(layer)})
    assert not convert.read(path).rest
    words = "hc" if kind == "LSTM" else "h"
    x, names = torch.randn(T, B, I), ["h", *(f"{word}T" for word in words)]
    model = reference.ReferenceEvaluator(str(path))

    def ours(x, *states):
        given = {"x": x.numpy()} | {f"{word}0": state for word, state in zip(words, states, strict=False)}
        return model.run(names, given)

    def theirs(x, *states):
        with torch.no_grad():
            h, last = layer(x, *([tuple(states) if words == "hc" else states[0]] if states else []))
        return [array.numpy() for array in (h, *(last if words == "hc" else (last,)))]

    states = [torch.randn(layers * (1 + both), B, H) for _ in words]
    for given in ([], states):
        for found, right in zip(ours(x, *[s.numpy() for s in given]), theirs(x, *given), strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
    if not both:
        h, *middle = ours(x[:2])
        rest, *last = ours(x[2:], *middle)
        for found, right in zip((np.concatenate([h, rest]), *last), ours(x), strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # torch warns about this older ONNX exporter
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_what_torch_exports(kind, tmp_path):
    """ONNX files exported by torch, with one node per layer, can be converted into one stack of layers. The
    converted arrays equal torch's state_dict."""
    torch = pytest.importorskip("torch")
    layer = getattr(torch.nn, kind)(I, H, num_layers=2, bidirectional=True)
    path, target = tmp_path / "m.onnx", tmp_path / "m.safetensors"
    torch.onnx.export(torch.nn.Sequential(layer), (torch.ones(T, B, I),), path, dynamo=False)
    names = f"0.{kind}", f"0.{kind}_1"
    assert main([str(path), str(target), "--stack", ",".join(names), "--prefix", f"{names[0]}=rnn"]) == 0
    found = mx.load(str(target))
    assert found.keys() == {f"rnn.{key}" for key in layer.state_dict()}
    assert all(np.array_equal(found[f"rnn.{key}"], value) for key, value in layer.state_dict().items())


def test_a_node_whose_projection_was_lost(tmp_path):
    """An ONNX LSTM node that lost its projection is refused. The newer exporter of torch 2.13 writes such nodes.
    Their hidden_size is the size of the projection, but their initial cell state has the size of the cell before the
    projection."""
    onnx = pytest.importorskip("onnx")
    shapes = {"W": (1, 4 * P, I), "R": (1, 4 * P, P), "h": (1, B, P), "c": (1, B, H)}
    node = onnx.helper.make_node("LSTM", ["x", "W", "R", "", "", "h", "c"], ["y"], "lstm", hidden_size=P)
    held = [onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in shapes.items()]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy"]
    graph = onnx.helper.make_graph([node], "m", values[:1], values[1:], held)
    onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"initial_c of lstm must be of the width H = 2: was there a projection\?"):
        convert.read(tmp_path / "m.onnx")


def test_nodes_of_one_name_are_all_read(tmp_path):
    onnx = pytest.importorskip("onnx")
    layers = {name: weights_of(RNNCell()) for name in ("a.b", "c.d", "e")}
    convert.write(tmp_path / "m.onnx", layers)
    model = onnx.load(tmp_path / "m.onnx")
    for node in model.graph.node:
        node.name = {"a.b": "a/b", "c.d": "a.b", "e": "a.b"}.get(node.name, node.name)
    onnx.save(model, tmp_path / "m.onnx")
    found = list(convert.read(tmp_path / "m.onnx").layers.values())
    assert [convert.differences(*pair) for pair in zip(layers.values(), found, strict=True)] == [[]] * 3


@pytest.mark.parametrize("ending", [".onnx", ".keras", ".h5", ".weights.h5"])
def test_names_that_a_format_does_not_tell_apart_are_refused(ending, tmp_path):
    needs("onnx" if ending == ".onnx" else "h5py")
    one, two = weights_of(LSTMCell()), weights_of(LSTMCell(), layers=2)
    layers = {"a": two, "a.1": one} if ending == ".onnx" else {"a/b": one, "a.b": one}
    with pytest.raises(ValueError, match=r"names must give a model|names of layers must differ"):
        convert.write(tmp_path / f"m{ending}", layers)


def test_a_note_counts_the_onnx_nodes_that_are_not_read(tmp_path, capsys):
    """Nodes in the graphs of an If, and in functions of the model, are not read. A note tells their number. Another
    note names nodes of a runtime's own types, which hold quantized weights."""
    onnx = pytest.importorskip("onnx")
    path, helper = tmp_path / "m.onnx", onnx.helper
    convert.write(path, {"lstm": weights_of(LSTMCell())})
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.op_type == "LSTM")
    branch = helper.make_graph([node], "branch", [], [])
    choice = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
    model.graph.node.append(choice)
    model.functions.append(helper.make_function("own", "F", ["x"], ["y"], [choice], model.opset_import))
    path.write_bytes(model.SerializeToString())
    found = convert.read(path)
    text = "4 recurrent nodes inside If, Loop, Scan or a function, not read: inline the graph first"
    assert list(found.layers) == ["lstm"] and text in found.notes
    model.graph.node.remove(node)
    model.graph.node.append(helper.make_node("DynamicQuantizeLSTM", node.input, ["q"], domain="com.microsoft"))
    path.write_bytes(model.SerializeToString())
    other = "nodes of the type DynamicQuantizeLSTM are not read, because the type is not ONNX' own"
    said = refusal(capsys, path, tmp_path / "m.npz")
    assert text in said and other in said


def test_what_onnx_has_and_ours_not():
    W, R = numbers(1, 4 * H, I), numbers(1, 4 * H, H)
    for attributes, what in (
        ({"clip": 1.0}, "clip must be absent"),
        ({"input_forget": 1}, "input_forget must be absent"),
        ({"activations": [b"Softsign", b"Tanh", b"Tanh"]}, "activations must be among .* but got Softsign"),
        ({"activations": ["HardSigmoid", "Tanh", "Tanh"], "activation_alpha": [0.3]}, "but got HardSigmoid"),
        ({"activations": ["Sigmoid"]}, "activations must be 3 for each direction"),
        ({"activations": 5}, "activations must be a list of names but got 5"),
        ({"activations": [1.0]}, "activations must be a list of names but got"),
        ({"activation_alpha": None}, "activation_alpha must be a list of numbers but got None"),
        ({"direction": "both"}, "direction must be one of"),
        ({"hidden_size": 3}, "R must have shape"),
        ({"mystery": 1}, "attributes of LSTM .* but got mystery"),
    ):
        with pytest.raises(ValueError, match=rf"\[from_onnx\] .*{what}"):
            convert.from_onnx("LSTM", W, R, attributes=attributes)
    for arrays, what in (
        ({"W": R, "R": W}, r"R must have shape \[16, H\] = \[24, 6\]|W must|R must"),
        ({"W": W, "R": R, "B": numbers(1, 16)}, r"B must have shape \[1, 32\]"),
        ({"W": W, "R": R, "P": numbers(1, 16)}, r"P must have shape \[1, 12\]"),
    ):
        with pytest.raises(ValueError, match=what):
            convert.from_onnx("LSTM", **arrays)
    with pytest.raises(ValueError, match="P must not be there unless the cell is an LSTM"):
        convert.from_onnx("GRU", W[:, :12], R[:, :12], P=numbers(1, 12))


def test_parameters_of_activations_in_onnx():
    """The activations of a node consume the lists of alphas and betas in order. A list with an entry for each
    activation is refused if reading it by position gives other numbers."""
    sixth = np.float32(1 / 6).item()

    def read(activations, alpha):
        given = {"activations": activations, "activation_alpha": alpha}
        return convert.from_onnx("LSTM", numbers(1, 16, 3), numbers(1, 16, 4), attributes=given).cell.activations[:3]

    assert read(["HardSigmoid", "HardSigmoid", "Tanh"], [0.2, sixth]) == ("hard_sigmoid",) * 2 + ("hard_sigmoid_sixth",)
    assert read(["Tanh", "HardSigmoid", "Tanh"], [sixth]) == ("tanh", "tanh", "hard_sigmoid_sixth")
    assert read(["HardSigmoid", "Tanh", "Tanh"], [sixth, 0.0, 0.0]) == ("hard_sigmoid_sixth",) * 2 + ("tanh",)
    assert read(["Sigmoid", "Tanh", "Tanh"], [1.0, 1.0, 1.0]) == ("sigmoid", "sigmoid", "tanh")
    for alphas in ([0.2, sixth, 0.2], [0.0, 0.2, 0.0]):
        with pytest.raises(ValueError, match="activation_alpha must hold numbers for HardSigmoid and Affine only"):
            read(["Tanh", "HardSigmoid", "Tanh"], alphas)


BOTH_SLOPES = ("hard_sigmoid",) * 2 + ("hard_sigmoid_sixth", "hard_sigmoid", "tanh")


def clipped(weights, **options):
    """Return the weights with changed options of their cell."""
    return weights._replace(cell=weights.cell._replace(**options))


def test_the_limits_of_clips():
    """`from_ops` and `from_tf` read a limit of 0 or less as none, as `lstm` and TensorFlow's ops do. They keep the rule
    of the gradient."""
    arrays = [{"Wx": mx.ones((16, 3)), "Wh": mx.ones((16, 2)), "Wp": mx.ones((2, 4))}]
    clips = {"cell_clip": 3.0, "projection_clip": 2.0, "clip_gradient": "zero"}
    assert convert.from_ops("lstm", arrays, **clips).options == clips
    assert convert.from_ops("lstm", arrays, cell_clip=-1, projection_clip=0).options == {}
    assert convert.from_tf(*ones((7, 16), (16,)), forget_bias=0.0, cell_clip=-1).options == {}
    zero = convert.from_tf(*ones((7, 16), (16,)), forget_bias=0.0, cell_clip=2, clip_gradient="zero")
    assert zero.options == {"cell_clip": 2.0, "clip_gradient": "zero"}


def test_what_a_format_cannot_hold():
    for weights, writer, what in (
        (BEFORE["gru before"], convert.to_torch, "reset must be the default"),
        (BEFORE["gru before"], convert.to_mlx, "reset"),
        (OTHERS["peephole"], convert.to_torch, "peephole"),
        (OTHERS["peephole"], convert.to_keras, "peephole"),
        (OTHERS["relu"], convert.to_cudnn, "activations"),
        (OTHERS["reverse"], convert.to_torch, "activation must be the default|reverse"),
        (PROJECTED["projected"], convert.to_onnx, "a projection"),
        (weights_of(LSTMCell(), proj=H), convert.to_torch, "a projection that makes h no narrower"),
        (weights_of(LSTMCell(), proj=H + 1), convert.to_cudnn, "a projection that makes h no narrower"),
        (PROJECTED["projected"], convert.to_mlx, "a projection"),
        (PROJECTED["projected"], convert.to_keras, "a projection"),
        (PROJECTED["projected"], convert.to_mpsgraph, "a projection"),
        (weights_of(LSTMCell(), layers=2, reverse=True), convert.to_keras, "one layer with reverse.*but got 2 layers"),
        (TF, convert.to_onnx, "cell_clip"),
        (TF, convert.to_mpsgraph, "cell_clip"),
        (clipped(PROJECTED["projected"], projection_clip=1.0), convert.to_torch, "projection_clip"),
        (clipped(PROJECTED["projected"], projection_clip=1.0), convert.to_cudnn, "projection_clip"),
        (clipped(TF, clip_gradient="zero"), convert.to_tf, "clip_gradient must be 'through'"),
        (clipped(TF, output_peephole="previous"), convert.to_tf, "output_peephole must be 'current'"),
        (PLAIN["rnn"]._replace(reverse=True), convert.to_mlx, "reverse must be False, as layers of MLX run forward"),
        (clipped(OTHERS["relu"], activations=BOTH_SLOPES), convert.to_mpsgraph, "one slope of hard_sigmoid"),
        (PLAIN["lstm"], convert.to_tf, "one LSTM layer in one direction"),
        (PLAIN["rnn"], convert.to_tf_gru, "one GRU layer"),
    ):
        with pytest.raises(ValueError, match=what):
            writer(weights)


@pytest.mark.parametrize("value", [None, {}, mlx_lstm.nn.LSTM(3, 4)], ids=["None", "dict", "layer"])
def test_what_is_no_weights_is_told_so(value, tmp_path):
    """Every writer with an argument `weights` raises an error for None, a layer or a dict of arrays, because it needs
    a `Weights` object, as readers such as from_torch return."""
    writers = [name for name in dir(convert) if name.startswith("to_")]
    writers = [name for name in writers if "weights" in inspect.signature(getattr(convert, name)).parameters]
    assert len(writers) > 9
    for writer in writers:
        with pytest.raises(
            ValueError, match=rf"^\[{writer}\] weights must be a Weights, as convert.from_torch, .* but got"
        ):
            getattr(convert, writer)(value)
    with pytest.raises(ValueError, match=r"^\[convert\] weights must be a Weights"):
        convert.write(tmp_path / "a.npz", {"lstm": value})


CHANGES = {
    r"bx must be an mlx.core.array: .* but got list": {"bx": [0.5] * 4 * H},
    r"bh must have shape \[\d+\], as H is \d+, but got shape \[1\]": {"bh": mx.ones(1)},
    r"the name of an array of layer 0 must be one of 'Wh', .* but got 'b'": {"b": mx.ones(4 * H)},
}


@pytest.mark.parametrize("rule", CHANGES)
def test_weights_whose_arrays_a_user_has_changed(rule):
    weights = convert.from_torch(mlx_lstm.torch.LSTM(I, H)).map(lambda arrays: arrays | CHANGES[rule])
    for call, op in ((nn.from_weights, "nn.from_weights"), (mlx_lstm.torch.from_weights, "torch.from_weights")):
        with pytest.raises(ValueError, match=rf"^\[{op}\] {rule}"):
            call(weights)
    for call in (convert.to_mlx, convert.to_ops, convert.to_onnx, convert.to_haste, convert.to_cudnn):
        with pytest.raises(ValueError, match=rf"^\[{call.__name__}\] {rule}"):
            call(weights)


@pytest.mark.parametrize("path", [None, 3, b"a.npz", ["a.npz"]], ids=repr)
def test_what_is_no_path_is_refused(path):
    what = rf"^\[convert\] path must be a str or a Path but got {type(path).__name__}\.$"
    for call in (lambda: convert.read(path), lambda: convert.write(path, {})):
        with pytest.raises(ValueError, match=what):
            call()


def test_other_things_than_layers_are_refused(tmp_path):
    class Theirs:
        def parameters(self):
            """Return an iterator over the parameters, as a module of torch does."""
            return iter(())

    with pytest.raises(ValueError, match=r"^\[from_mlx\] layers\[0\] must hold Wh or Whh but got NoneType"):
        convert.from_mlx(None)
    with pytest.raises(ValueError, match=r"^\[from_mlx\] layers\[0\] must hold Wh or Whh but got Theirs"):
        convert.from_mlx(Theirs())
    Theirs.state_dict = {}  # as a program of torch.export has it
    with pytest.raises(ValueError, match=r"^\[from_torch\] arrays must be a layer or a dict of arrays"):
        convert.from_torch(Theirs())
    with pytest.raises(ValueError, match=r"^\[convert\] model must be what convert.read returns, .* but got list"):
        convert.write(tmp_path / "a.npz", [PLAIN["gru"]])


@pytest.mark.parametrize("value", [[0.5] * 4, (), 0.5, True, "b"], ids=repr)
def test_a_bias_that_is_no_array_is_refused(value):
    """Only None and False mean that there is no bias. Any other value of a layer is refused, not ignored."""
    keras = {"kernel": mx.ones((3, 16)), "recurrent_kernel": mx.ones((4, 16)), "bias": value}
    rule = rf"bias must be an mlx.core.array.* but got {type(value).__name__}\.$"
    for layer in (mlx.nn.LSTM(3, 4), nn.LSTM(3, 4), nn.RNN(3, 4)):
        layer.bias = value
        with pytest.raises(ValueError, match=rf"^\[from_mlx\] layers\[0\].{rule}"):
            convert.from_mlx(layer)
    for one in (layer, keras, types.SimpleNamespace(**keras)):
        with pytest.raises(ValueError, match=rf"^\[nn.stack\] layers\[0\].{rule}"):
            nn.stack([one], mx.ones((2, 5, 3)))


@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (5,)], ids=repr)
def test_a_bias_of_the_candidate_has_one_number_for_each_unit(shape):
    arrays = {"Wx": mx.ones((12, 3)), "Wh": mx.ones((12, 4)), "b": mx.ones(12), "bhn": mx.ones(shape)}
    for read, name in ((convert.from_mlx, r"from_mlx\] layers\[0\]."), (convert.from_names, r"convert\] ")):
        with pytest.raises(ValueError, match=rf"^\[{name}bhn must have shape \[4\] but got shape"):
            read(arrays)


def test_the_forget_bias_goes_into_the_bias():
    weights = TF._replace(cell=LSTMCell(forget_bias=1.0)).map(
        lambda arrays: {name: array for name, array in arrays.items() if name != "peephole"}
    )
    b = np.array(weights.layers[0][0]["bx"])
    b[H : 2 * H] += 1
    np.testing.assert_array_equal(np.array(convert.to_torch(weights)["bias_ih_l0"]), b)


@pytest.mark.parametrize("style", ["torch", "two-biases", "mlx", "keras", "ops"])
@pytest.mark.parametrize("biases", ["", "x"])
def test_a_file_has_the_forget_bias_once(tmp_path, capsys, style, biases):
    """In the bias or, with the names of `lstm`, in the metadata: read back, the layer computes the same."""
    before = weights_of(LSTMCell(forget_bias=1.5), biases=biases)
    convert.write(tmp_path / "a.safetensors", {"a": before, "b": PLAIN["lstm"]}, style="ops")
    assert main([str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")] + ["--to", style]) == 0
    again = convert.read(tmp_path / "b.safetensors").layers["a"]
    assert again.options == ({"forget_bias": 1.5} if style == "ops" else {})
    assert ("  a: the forget bias is a part of the bias now\n" in capsys.readouterr().out) == (style != "ops")
    (Wx, Wh), x = (np.array(before.layers[0][0][name]) for name in ("Wx", "Wh")), np.array(numbers(2, T, I))
    b = np.array(before.layers[0][0].get("bx", np.zeros(4 * H))) + 1.5 * (np.arange(4 * H) // H == 1)
    h = c = np.zeros((2, H))
    for t in range(T):
        i, f, g, o = np.split(x[:, t] @ Wx.T + h @ Wh.T + b, 4, axis=-1)
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
    _, (h_n, _) = mlx_lstm.nn.from_weights(again)(mx.array(x))
    np.testing.assert_allclose(np.array(h_n[0]), h, atol=1e-5)


def test_the_report_tells_where_a_bias_swallows_the_forget_bias(tmp_path, capsys):
    """A forget bias below half a unit in the last place of the bias changes no bit of it."""
    before = weights_of(LSTMCell(forget_bias=1e-12), biases="x").map(lambda way: way | {"bx": mx.ones(4 * H)})
    convert.write(tmp_path / "a.safetensors", {"a": before}, style="ops")
    assert main([str(tmp_path / name) for name in ("a.safetensors", "b.npz")]) == 0
    assert "a: forget_bias is not the same in the new file" in capsys.readouterr().out


# --- Options that the arrays do not show -----------------------------------------------------------------------------


def loop(kind, a, x, act=None):
    """Return h [T, H] of a plain RNN, or of a GRU that resets before its product, by loops in NumPy over its arrays."""
    h, every = np.zeros(H), []
    for t in range(T):
        if kind == "rnn":
            h = act(a["Wx"] @ x[t] + a["bx"] + a["Wh"] @ h)
        else:
            (Wr, Wz, Wn), (Rr, Rz, Rn), (br, bz, bn) = (np.split(a[name], 3) for name in ("Wx", "Wh", "bx"))
            r, z = (1 / (1 + np.exp(-(W @ x[t] + b + R @ h))) for W, b, R in ((Wr, br, Rr), (Wz, bz, Rz)))
            h = (1 - z) * np.tanh(Wn @ x[t] + bn + Rn @ (r * h)) + z * h
        every.append(h)
    return np.array(every)


TOLD = {
    "rnn": (weights_of(RNNCell("relu"), biases="x", rng=np.random.default_rng(1)), lambda a: np.maximum(a, 0)),
    "gru": (weights_of(GRUCell(reset="before"), biases="x", rng=np.random.default_rng(2)), None),
}
"""Layers with an option that their arrays do not show, and the activation."""


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".weights.h5"])
def test_options_that_arrays_do_not_show_are_read_back(ending, kind, tmp_path):
    """With the names of every style, a pattern, and beside a layer with other options; also in reverse."""
    weights, act = TOLD[kind]
    x = np.array(numbers(T, 1, I))
    arrays = {name: np.array(array, np.float64) for name, array in weights.layers[0][0].items()}
    styles = [{}] if ending == ".weights.h5" else [{"style": "ops"}, {"style": "keras"}]
    if kind == "rnn" and ending != ".weights.h5":
        styles += [{"style": "torch"}, {"style": "mlx"}, {"style": "two-biases", "keys": "{array}-{name}"}]
    for style in styles:
        for reverse in (False, True):
            if reverse and style.get("style") in ("torch", "two-biases"):
                continue
            path, pattern = tmp_path / f"a{ending}", {"keys": style["keys"]} if "keys" in style else {}
            layers = {"b": one_bias(PLAIN["one layer"]), "a": weights._replace(reverse=reverse)}
            convert.write(path, layers, force=True, **style)
            again = convert.read(path, **pattern).layers
            assert again["a"].options == layers["a"].options and not again["b"].options, style
            h = mlx_lstm.nn.from_weights(again["a"])(mx.array(x).swapaxes(0, 1))[0][0]
            way = slice(None, None, -1 if reverse else 1)
            np.testing.assert_allclose(np.array(h), loop(kind, arrays, x[way, 0], act)[way], atol=1e-5)


def test_a_gru_without_bias_is_no_other_gru_when_read_back(tmp_path):
    for ending in (".npz", ".weights.h5", ".h5", ".keras"):
        path, layers = tmp_path / f"a{ending}", {"a": weights_of(GRUCell(reset="before"), layers=2)}
        convert.write(path, layers, **({"style": "keras"} if ending == ".npz" else {}))
        assert all(each.options == {"reset": "before"} for each in convert.read(path).layers.values()), ending


def test_other_programs_read_a_file_with_options(tmp_path):
    """The options are in the comment of the zip and in an attribute: no array more."""
    needs("h5py")
    import h5py

    for ending in (".npz", ".weights.h5"):
        convert.write(tmp_path / f"a{ending}", {"a": TOLD["rnn"][0]}, **({"style": "mlx"} if ending == ".npz" else {}))
    layer = mlx.nn.RNN(I, H, nonlinearity=mlx.nn.relu)
    layer.update({name: mx.zeros_like(array) for name, array in layer.items() if isinstance(array, mx.array)})
    layer.load_weights([(key[2:], array) for key, array in mx.load(str(tmp_path / "a.npz")).items()])
    assert mx.array_equal(layer.Wxh, TOLD["rnn"][0].layers[0][0]["Wx"])
    with np.load(tmp_path / "a.npz") as file:
        assert sorted(file.files) == ["a.Whh", "a.Wxh", "a.bias"]
    with h5py.File(tmp_path / "a.weights.h5") as file:
        assert list(file.attrs) == ["model_config"]


@pytest.mark.parametrize("H", [1, 4])
def test_the_class_of_a_users_layer(H):
    """The shape of the recurrent kernel tells from which class of Keras a user's class derives, also with one unit."""
    kinds = {"LSTM": 4 * H, "GRU": 3 * H, "SimpleRNN": H}
    found = {_keras_file.kind_of(np.ones((I, columns)), np.ones((H, columns))): columns for columns in kinds.values()}
    assert found == kinds


@pytest.mark.parametrize("ending", [".npz", ".weights.h5"])
def test_a_note_says_that_options_are_assumed(ending, tmp_path):
    """A note names the layers whose options neither the file nor the caller tells; other layers have none."""
    needs("h5py")
    path, is_npz = tmp_path / f"a{ending}", ending == ".npz"
    convert.write(path, {"odd": TOLD["rnn"][0], "lstm": PLAIN["one layer"]}, **({"style": "mlx"} if is_npz else {}))
    assert convert.read(path).notes == []
    if is_npz:
        mx.savez(str(path), **mx.load(str(path)))  # without the comment
        expected = "odd: the file does not tell the activation: tanh is assumed"
        assert convert.read(path, nonlinearity="relu").notes == []
    else:
        import h5py

        with h5py.File(path, "a") as file:
            del file.attrs["model_config"]
        expected = "odd, lstm: the file does not tell options such as activation and go_backwards: Keras 3's"
    (note,) = convert.read(path).notes
    assert note.startswith(expected)


def test_a_comment_of_a_zip_file(tmp_path):
    """A foreign comment is ignored, a damaged one refused, and one that is too long is not written."""
    path = tmp_path / "a.npz"
    convert.write(path, {"a": PLAIN["one layer"]})
    for comment, what in ((b"by hand", None), (b'{"mlx_lstm":[]}', "is not what"), (b'{"mlx_lstm":', "damaged")):
        with zipfile.ZipFile(path, "a") as file:
            file.comment = comment
        if what:
            with pytest.raises(ValueError, match=what):
                convert.read(path)
        else:
            assert_same(PLAIN["one layer"], convert.read(path).layers["a"])
    many = {f"{'long' * 60}{n}": TOLD["rnn"][0] for n in range(200)}
    with pytest.raises(ValueError, match=r"must take at most 65535 bytes in \.npz: take \.safetensors, but got"):
        convert.write(tmp_path / "b.npz", many)
    assert not (tmp_path / "b.npz").exists()


def with_a_bad_layer(path, ending):
    """Write a file with the layer a, a layer b that cannot be read, and another array; return its error text."""
    if ending == ".safetensors":
        convert.write(path, convert.Model({"a": one_bias(PLAIN["one layer"])}, {"head": mx.ones(3)}, {}, [], {}))
        bad = {f"b.{key}": array for key, array in mlx_lstm.nn.LSTM(3, 4, layer_norm=True).parameters().items()}
        mx.save_safetensors(str(path), {**mx.load(str(path)), **bad})
        return "b.norm_scale must not be there: no format holds layer normalisation"
    convert.write(path, {"a": one_bias(PLAIN["one layer"]), "b": PLAIN["rnn"].each()[0]})
    if ending == ".onnx":
        import onnx

        model = onnx.load(str(path))
        node = next(node for node in model.graph.node if node.op_type == "RNN")
        node.attribute.append(onnx.helper.make_attribute("clip", 1.0))
        onnx.save(model, str(path))
        return "clip"
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    members["config.json"] = members["config.json"].replace(b'"activation": "relu"', b'"activation": "softmax"')
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return "activation of b must be one of"


@pytest.mark.parametrize("ending", [".safetensors", ".keras", ".onnx"])
def test_only_reads_a_layer_beside_one_that_cannot_be_read(ending, tmp_path, capsys):
    needs("h5py", "onnx")
    path = tmp_path / f"a{ending}"
    what = with_a_bad_layer(path, ending)
    assert what in refusal(capsys, path, tmp_path / "b.npz")
    assert what in refusal(capsys, path, tmp_path / "b.npz", "--only", "b")
    assert "no recurrent layer is called 'x'; there are a" in refusal(capsys, path, tmp_path / "b.npz", "--only", "x")
    model = convert.read(path, only=["a"])
    assert list(model.layers) == list(model.keys) == ["a"]
    assert list(model.rest) == (["head"] if ending == ".safetensors" else [])
    assert_same(one_bias(PLAIN["one layer"]), model.layers["a"])
    assert main([str(path), str(tmp_path / "b.npz"), "--only", "a"]) == 0
    assert list(convert.read(tmp_path / "b.npz").layers) == ["a"]
    with pytest.raises(ValueError, match="only must be a list of names of layers but got 'a'"):
        convert.read(path, only="a")


@pytest.mark.parametrize("ways", [("_raw",), ("_g", "_v"), ("_orig", "_mask"), (".original0", ".original1")])
def test_a_weight_that_torch_computes_from_other_arrays_is_refused(ways, tmp_path, capsys):
    """Weight drop leaves the weight of the last training step in a state_dict, with its zeros, beside the whole weight.
    Weight norm, pruning and parametrizations leave no weight there."""
    layer = convert.to_torch(weights_of(LSTMCell(), directions=2), prefix="a.module.")
    weight = layer["a.module.weight_hh_l0_reverse"]
    prefix = "a.module.parametrizations." if "original" in ways[0] else "a.module."
    sources = {f"{prefix}weight_hh_l0_reverse{way}": weight for way in ways}
    if ways == ("_raw",):  # a wrapper around the layer may hold the whole weight
        cases = [layer | sources, layer | {"a.weight_hh_l0_reverse_raw": weight}]
    else:
        cases = [{key: array for key, array in layer.items() if array is not weight} | sources]
        cases.append({key: array for key, array in cases[0].items() if "bias" in key or key in sources})
    other = convert.to_torch(weights_of(LSTMCell()), prefix="b.")
    path, target = tmp_path / "a.safetensors", tmp_path / "b.npz"
    for arrays in cases:
        rule = "weight_hh_l0_reverse must not be computed from another array: .*, but got a[.].*weight_hh_l0_reverse"
        with pytest.raises(ValueError, match=rf"\[from_torch\] {rule}{ways[0]}[.]"):
            convert.from_torch(arrays, prefix="a.module.")
        mx.save_safetensors(str(path), arrays | other)
        assert re.search(rf"\[convert\] {rule}{ways[0]}[.]", refusal(capsys, path, target))
        assert list(convert.read(path, only=["b"]).layers) == ["b"]
        assert convert.from_torch(arrays | other, prefix="b.").hidden_size == H
    mx.save_safetensors(str(path), other | {"weight_hh_g": weight})  # no name of an array of torch's layers
    assert list(convert.read(path).rest) == ["weight_hh_g"]


def test_layers_called_forward_and_backward_may_have_different_sizes(tmp_path):
    """A model with one layer per direction, which joins their outputs itself, may give them different numbers of units.
    Layers of the same size are read as one layer with both directions."""
    sizes = {"fwd": (I, H), "bwd": (I, H + 2)}
    model = mlx.nn.Module()
    for way, (features, units) in sizes.items():
        model[f"lstm_{way}"] = mlx.nn.LSTM(features, units)
    model.save_weights(str(tmp_path / "a.safetensors"))
    layers = convert.read(tmp_path / "a.safetensors").layers
    assert {name: (one.input_size, one.hidden_size, one.directions) for name, one in layers.items()} == {
        f"lstm_{way}": (*size, 1) for way, size in sizes.items()
    }
    for way in sizes:
        theirs, x = model[f"lstm_{way}"], numbers(B, T, I)
        np.testing.assert_allclose(nn.from_weights(layers[f"lstm_{way}"])(x)[0], theirs(x)[0], atol=1e-6)
    model.lstm_bwd = mlx.nn.LSTM(I, H)
    model.save_weights(str(tmp_path / "b.safetensors"))
    assert [one.directions for one in convert.read(tmp_path / "b.safetensors").layers.values()] == [2]


def test_adapters_beside_a_layer_are_named(tmp_path):
    """peft adds the product of two arrays, which lie beside `base_layer`, to a weight of the layer that it calls so;
    several adapters nest. A layer without an adapter, or a name that only resembles peft's, gets no note."""
    layer = convert.to_torch(weights_of(LSTMCell()))
    path = tmp_path / "a.safetensors"

    def notes(prefix, *others):
        arrays = {prefix + key: array for key, array in layer.items()} | dict.fromkeys(others, mx.ones((2, 2)))
        mx.save_safetensors(str(path), arrays)
        return convert.read(path).notes

    rule = "are not read; a layer that uses them computes something else"
    adapter = "lora_A.default.weight"
    for start in ("model.lstm.", ""):
        for inner in ("base_layer.", "base_layer.base_layer."):
            said = f"{start}{inner[:-1]}: the arrays beside its own, {start}{adapter}, {rule}"
            assert notes(start + inner, start + adapter) == [said]
    said = f"a.base_layer.base_layer: the arrays beside its own, a.base_layer.{adapter}, {rule}"
    assert notes("a.base_layer.base_layer.", f"a.base_layer.{adapter}") == [said]
    assert notes("a.base_layer.", "head.weight", f"b.{adapter}", "a.b.c.d.weight") == []
    assert notes("a.my_base_layer.", f"a.{adapter}") == []


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_arrays_beside_those_of_a_layer_are_named(ending, tmp_path, capsys):
    """A layer with other arrays than those that are read may compute something else: layer normalisation written in
    torch, biases with other names. Arrays elsewhere in the model are not named, even if a layer lies at its root."""
    path, plain = tmp_path / f"a.{ending}", {"weight_ih": numbers(4 * H, I), "weight_hh": numbers(4 * H, H)}
    layers = {f"{name}.{key}": array for name in ("enc.a", "b") for key, array in plain.items()} | plain
    beside = ["enc.a.layernorm_i.weight", "enc.a.alpha", "bh", "by", "b.alpha"]
    elsewhere = ["enc.weight", "enc.c.weight", "enc.a.c.d.weight", "head.weight", "ba.weight"]
    arrays = layers | dict.fromkeys(beside + elsewhere, numbers(H))
    convert.write(path, convert.Model({}, arrays, {}, [], {}))
    model = convert.read(path)
    assert sorted(model.layers) == ["", "b", "enc.a"] and model.rest.keys() == {*beside, *elsewhere}
    assert main([str(path), str(tmp_path / "b.npz")]) == 0
    said = capsys.readouterr().out
    for title, names in (("enc.a", beside[:2]), ("(no name)", beside[2:4]), ("b", beside[4:])):
        (note,) = (note for note in model.notes if note.startswith(f"{title}: the arrays beside its own, "))
        listed, rule = note.removeprefix(f"{title}: the arrays beside its own, ").split(", are ")
        assert sorted(listed.split(", ")) == sorted(names) and note in said
        assert rule == "not read; a layer that uses them computes something else"
    assert len(model.notes) == 3 and len(convert.read(path, only=["b"]).notes) == 1


def test_only_leaves_out_layers_that_can_be_read(tmp_path):
    path, layers = tmp_path / "a.npz", {"a": PLAIN["one layer"], "b": PLAIN["gru"], "c.0": PLAIN["no bias"]}
    convert.write(path, convert.Model(layers, {"head": mx.ones(3)}, {}, [], {}))
    model = convert.read(path, only=["c.0", "a"])
    assert list(model.layers) == ["a", "c.0"] and list(model.rest) == ["head"]


# --- MPSGraph and cuDNN: our ops take the converted arrays -----------------------------------------------------------


def test_the_ops_take_what_is_written():
    x = numbers(T, B, I)
    for name in ("lstm", "gru", "rnn"):
        weights = PLAIN[name]
        params, sizes = convert.to_cudnn(weights)
        direction = "bidirectional" if sizes["bidirectional"] else "unidirectional"
        rows = len(weights.layers) * weights.directions
        state = mx.zeros((rows, B, H))
        empty = mx.zeros((0,))
        out = cudnn.cudnn_rnn(
            x, state, state if name == "lstm" else empty, params,
            rnn_mode=sizes["rnn_mode"], direction=direction, is_training=False,
        )  # fmt: skip
        exact, limit = exact_and_bounds(partial(through_layers, weights, np.array(x)), np.float32)
        for got in (out.output, mlx_lstm.torch.from_weights(weights)(x)[0]):
            assert_within(name, np.array(got), exact["h"], limit["h"])
        one = one_bias(weights.each()[0])
        (arrays,), properties = convert.to_mpsgraph(one)
        kind, op = {"lstm": ("LSTM", "lstm"), "gru": ("GRU", "gru"), "rnn": ("SingleGateRNN", "single_gate_rnn")}[name]
        W, R = arrays.pop("input_weight"), arrays.pop("recurrent_weight")
        descriptor = getattr(mpsgraph, f"{kind}Descriptor")(**properties)
        h = getattr(mpsgraph, op)(x, R, input_weight=W, descriptor=descriptor, **arrays)[0]
        assert_outputs(one, np.array(x), [np.array(h)])


def test_an_lstm_without_peepholes_has_no_rule_for_them():
    arrays = {"input_weight": numbers(16, I), "recurrent_weight": numbers(16, H)}
    weights = convert.from_mpsgraph([arrays], mpsgraph.LSTMDescriptor(), output_peephole="previous")
    assert weights.cell.output_peephole == "current" and not weights.options


@pytest.mark.parametrize("layers", [None, 5, "x", [1.0]])
def test_layers_of_mpsgraph_that_are_no_dicts(layers):
    with pytest.raises(ValueError, match=r"\[from_mpsgraph\] layers must be a list of dicts, one for each call, but"):
        convert.from_mpsgraph(layers, mpsgraph.LSTMDescriptor())


def test_flip_z_changes_signs():
    arrays = {"input_weight": numbers(12, I), "recurrent_weight": numbers(12, H), "bias": numbers(12)}
    descriptor = mpsgraph.GRUDescriptor(flip_z=True, reset_gate_first=True)
    x = numbers(T, B, I)
    h = mpsgraph.gru(x, arrays["recurrent_weight"], input_weight=arrays["input_weight"], bias=arrays["bias"],
                     descriptor=descriptor)[0]  # fmt: skip
    assert_outputs(convert.from_mpsgraph([arrays], descriptor), np.array(x), [np.array(h)])
    descriptor.update_gate_activation = "relu"
    with pytest.raises(ValueError, match="update_gate_activation must be a sigmoid"):
        convert.from_mpsgraph([arrays], descriptor)


# --- Writing files and reading them back -----------------------------------------------------------------------------


def same_file(path, layers, **options):
    """Assert that a file contains the weights of these layers in this order. The layers may have any names in the
    file."""
    found = [each for weights in convert.read(path, **options).layers.values() for each in weights.each()]
    wanted = [each for weights in layers.values() for each in weights.each()]
    for one, other in zip(wanted, found, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_files_of_arrays(ending, tmp_path):
    styles = {"torch": PLAIN | PROJECTED, "two-biases": PLAIN | PROJECTED, "mlx": PLAIN, "keras": PLAIN | BEFORE}
    for style, cases in (styles | {"ops": EVERY}).items():
        for n, (name, weights) in enumerate(cases.items()):
            two = style in ("torch", "two-biases") or (style == "keras" and weights.cell.op == "gru")
            weights = weights if two else one_bias(weights)
            path, rest = tmp_path / f"{style}{n}.{ending}", {"head.bias": np.arange(3), "head.weight": numbers(3, 3)}
            model = convert.Model({"enc.rnn": weights}, rest, {}, [], {})
            convert.write(path, model, style=style)
            again = convert.read(path)
            assert list(again.layers) == ["enc.rnn"] and again.rest.keys() == rest.keys(), (style, name)
            assert_same(weights, again.layers["enc.rnn"])
            np.testing.assert_array_equal(again.rest["head.bias"], rest["head.bias"])


def test_all_dtypes_of_safetensors(tmp_path):
    path, halves = tmp_path / "w.safetensors", weights_of(LSTMCell(), biases="x")
    halves = halves.map(lambda arrays: {name: array.astype(mx.bfloat16) for name, array in arrays.items()})
    rest = {kind: np.arange(3).astype(kind) for kind in ("f8", "f4", "f2", "i8", "i4", "u1", "?")}
    convert.write(path, convert.Model({"": halves}, rest | {"b": mx.ones((2,), mx.bfloat16)}, {}, [], {"format": "pt"}))
    again = convert.read(path)
    assert_same(halves, again.layers[""])
    assert again.metadata == {"format": "pt"}
    assert all(again.rest[kind].dtype == np.dtype(kind) and (again.rest[kind] == rest[kind]).all() for kind in rest)
    by_mlx = dict(mlx.nn.LSTM(3, 4).parameters()) | {"x": mx.ones((2,))}
    mx.save_safetensors(str(tmp_path / "mlx.safetensors"), by_mlx)  # this file has "__metadata__": null
    assert convert.read(tmp_path / "mlx.safetensors").rest.keys() == {"x"}
    with pytest.raises(ValueError, match=r"bfloat16, which \.npz does not have"):
        convert.write(tmp_path / "w.npz", {"": halves})


# --- Keras on TensorFlow ---------------------------------------------------------------------------------------------

OURS = {
    "one": {"a.b": one_bias(PLAIN["lstm"])},
    "dots": {"a.0": one_bias(PLAIN["one layer"]), "b.0": PLAIN["gru, no bias"]},
    "two": {"g": PLAIN["gru"], "before": BEFORE["gru before"]},
    "rest": {"relu": OTHERS["relu"], "rnn": one_bias(PLAIN["rnn"]), "bare": PLAIN["no bias"]},
}
"""Models that the tests write for Keras: {model name: {layer name: weights}}."""


SMALL = ["--steps=31", "--batch=8", "--window=12", "--embedding=8", "--hidden=16", "--learning-rate=0.003"]
"""The sizes of the example from_tensorflow in its test."""


@pytest.fixture(scope="module")
def keras(tmp_path_factory):
    """Run tests/keras_files.py, then examples/from_tensorflow.py in the same child process, since both import
    TensorFlow, which takes seconds. keras_files.py reads our files and writes files of its own. The example is the
    last, because it ends the process. Return (folder with the files, {name: output of Keras}, what the example
    printed)."""
    needs("tensorflow", "keras", "h5py")
    folder = tmp_path_factory.mktemp("keras")
    for case, layers in OURS.items():
        for ending in (".keras", ".h5", ".weights.h5"):
            convert.write(folder / f"ours_{case}{ending}", layers)
    runs = [[str(ROOT / "tests/keras_files.py"), str(folder)], [str(ROOT / "examples" / "from_tensorflow.py"), *SMALL]]
    code = f"""
import os, runpy, sys
for sys.argv in {runs!r}:
    sys.path[0] = os.path.dirname(sys.argv[0])  # as if Python had started the script
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:  # the example ends its process
        if end.code:
            raise
"""
    folders = os.pathsep.join([str(ROOT), str(ROOT / "examples")])  # examples import `support` from their folder
    environment = os.environ | {"PYTHONPATH": folders, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("KERAS_BACKEND", None)  # the example chooses the backend
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    with np.load(folder / "outputs.npz") as file:
        return folder, {name: file[name] for name in file.files}, run.stdout


def test_the_example_from_tensorflow(keras):
    """The example's outputs agree with Keras, its loss falls during training, and the weights convert back to Keras."""
    differences = re.findall(r"largest difference (\S+), of numbers up to (\S+)", keras[2])
    assert len(differences) == 2
    for difference, largest in differences:
        assert float(difference) <= 2e-6 + 1e-5 * float(largest)
    at_keras, *in_mlx, back, last = (float(number) for number in re.findall(r": (\d\.\d{4})", keras[2]))
    assert len(in_mlx) == 4 and at_keras > in_mlx[0] > min(in_mlx[1:3])
    assert abs(back - last) <= 1e-4 and last == in_mlx[3]  # the loss after the last training step


LAYERS = ["lstm1", "lstm2", "both", "no_bias", "before", "plain", "of_cell"]


@pytest.mark.parametrize("ending", [".keras", ".h5", ".weights.h5"])
def test_files_of_keras(ending, keras):
    folder, outputs, _ = keras
    assert outputs["backend"] == "tensorflow"
    model = convert.read(folder / f"m{ending}")
    assert set(model.layers) == set(LAYERS) and (ending == ".weights.h5" or list(model.layers) == LAYERS)
    assert sorted(np.shape(array) for array in model.rest.values()) == [(2,), (H, 2)]
    note = "head: TimeDistributed(Dense) is mlx.nn.Linear, whose weight is the transposed kernel"
    assert (note in model.notes) == (ending != ".weights.h5")
    told = not any("of_cell" in note and "does not tell options" in note for note in model.notes)
    assert told == (ending != ".weights.h5")
    x = outputs["x"]
    for name in LAYERS:
        weights = model.layers[name]
        if ending == ".weights.h5" and name in ("before", "plain"):
            # .weights.h5 does not store the activations, so they are taken from the .keras file.
            weights = weights._replace(cell=convert.read(folder / "m.keras").layers[name].cell)
        assert_outputs(weights, x, [outputs[f"m/{name}"]])
        x = outputs[f"m/{name}"]
    again = folder / f"again{ending}"
    convert.write(again, model)
    if ending != ".weights.h5":
        same_file(again, model.layers)


@pytest.mark.parametrize("case", OURS)
@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_keras_runs_what_is_written(case, ending, keras):
    """Keras reads our files and computes the right outputs from them. It also loads our `.weights.h5` files into
    models with the same layers."""
    folder, outputs, _ = keras
    path = folder / f"ours_{case}{ending}"
    assert ending != ".keras" or convert.read(path).layers.keys() == {
        f"{name}_{n}" if len(weights.layers) > 1 else name
        for name, weights in OURS[case].items()
        for n in range(len(weights.layers))
    }
    for name, weights in OURS[case].items():
        found = [outputs[f"{path.name}/{name}_model/{n}"] for n in range(len(weights.layers))]
        assert_outputs(weights, outputs["x"], found)
    same_file(path, OURS[case])
    if ending == ".keras":
        same_file(folder / f"ours_{case}.weights.h5", OURS[case])


def test_a_quantized_layer_is_refused():
    layer = mlx_lstm.torch.QuantizedLSTM.from_layer(mlx_lstm.torch.LSTM(32, 32), 32)
    with pytest.raises(ValueError, match="weight_ih_l0 must not be quantized"):
        convert.from_torch(layer)


def test_keras_layers_after_one_with_go_backwards_run_in_reverse(tmp_path, capsys):
    """Such a layer of Keras returns its outputs in the reverse order. So the next layer reads them from the end to the
    start, or forward if it has go_backwards, too. That is no stack of one direction."""
    needs("h5py")
    whole = weights_of(LSTMCell(), layers=2, biases="x", reverse=True)
    first, second = whole.each()
    path, target = tmp_path / "model.keras", tmp_path / "stack.npz"
    convert.write(path, {"a": first, "b": second._replace(reverse=False)})
    assert main([str(path), str(target), "--stack", "a,b", "--to", "ops"]) == 0
    assert_same(whole, convert.read(target).layers["a"])
    capsys.readouterr()
    convert.write(path, {"a": first, "b": second}, force=True)
    said = refusal(capsys, path, tmp_path / "other.npz", "--stack", "a,b", "--to", "ops")
    assert "[--stack] go_backwards must be False after the first layer but got True for layer 1" in said


def test_layers_of_keras(keras):
    """Keras layers that the child process converts become the right layer of ours. Unsupported Keras layers raise
    clear errors."""
    said = list(keras[1]["said"])
    assert said[0] == "GRU(6, 4, num_layers=2, batch_first=True, bidirectional=True)"
    expected = ["layers must be at least one", "must be LSTM, GRU, SimpleRNN or Bidirectional of Keras but got Dense"]
    expected += ["layers must be built but got new", "Wx of layer 1, direction 0, must have shape [12, 8]"]
    expected += ["activation of odd must be one of linear, relu, tanh, sigmoid, hard_sigmoid but got 'gelu'"]
    expected += ["go_backwards must be False after the first layer but got True for layer 1"]
    expected += ["both directions of both must have the same options but got different ones"]
    expected += ["activation of leaky must be one of linear, relu, tanh, sigmoid, hard_sigmoid but got 'LeakyReLU'"]
    assert len(said) == 9
    for text, what in zip(said[1:], expected, strict=True):
        assert text.startswith("[from_keras] ") and what in text


def spec(kind, name, **options):
    """Return a layer as Keras serializes it."""
    return {"class_name": kind, "config": {"name": name, **options}}


@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_layers_inside_of_other_layers_of_keras_keep_their_options(ending, tmp_path):
    """The layer of a TimeDistributed, the layers of a model inside it, and the cells of an RNN of several cells have
    the options of the configuration. A note names a layer of which the configuration says nothing."""
    h5py = pytest.importorskip("h5py")
    relu = {"units": H, "activation": "relu", "recurrent_activation": "hard_sigmoid", "use_bias": False}
    cells = [spec("LSTMCell", "first", **relu), spec("LSTMCell", "second", units=H, use_bias=False)]
    stack = spec("RNN", "forward_rnn", cell=spec("StackedRNNCells", "cells", cells=cells))
    model = spec("Functional", "encoder", layers=[spec("GRU", "words", reset_after=False, **relu)])
    layers = [spec("TimeDistributed", "td", layer=spec("LSTM", "inner", go_backwards=True, **relu))]
    layers += [spec("TimeDistributed", "td_1", layer=model), spec("Bidirectional", "both", layer=stack)]
    layers += [spec("Own", "own"), spec("GRU", "old", units=H, use_bias=False)]  # old: before Keras had reset_after
    config = spec("Functional", "model", layers=layers)
    # By the layer's name here: the gates, the place of the arrays in a .keras file, and in an .h5 file.
    places = {"inner": (4, "layers/time_distributed/layer", "td/td/inner/lstm_cell")}
    places |= {"words": (3, "layers/time_distributed_1/layer/layers/gru", "td_1/words/gru_cell")}
    for way in ("forward", "backward"):
        for name, number in (("first", ""), ("second", "_1")):
            place = f"layers/bidirectional/{way}_layer/cell/cells/lstm_cell{number}"
            places[f"both.{way}_rnn.{name}"] = 4, place, f"both/both/{way}_rnn/cells/{name}"
    places |= {"hidden": (4, "layers/own/hidden", "own/own/hidden/lstm_cell")}
    places |= {"old": (3, "layers/gru", "old/old/gru_cell")}
    path = tmp_path / f"m{ending}"
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.attrs["model_config"], names = json.dumps(config), {}
        for name, (gates, new, old) in places.items():
            group = old.partition("/")[0]
            for n, word in enumerate(("kernel", "recurrent_kernel")):
                if ending == ".h5":
                    names.setdefault(group, []).append(f"{old.partition('/')[2]}/{word}")
                    file[f"model_weights/{old}/{word}"] = np.ones((H, gates * H), np.float32)
                else:
                    cell = "" if "/cells/" in new else "/cell"
                    file[f"{new}{cell}/vars/{n}"] = np.ones((H, gates * H), np.float32)
            if ending == ".keras":
                file.require_group(f"{new}/vars").attrs["name"] = name.rpartition(".")[2]
        if ending == ".keras":  # two matrices of a layer without a cell
            file["layers/pair/vars/0"], file["layers/pair/vars/1"] = np.ones((H, 3 * H)), np.ones((H, 3 * H))
        if ending == ".h5":
            file["model_weights"].attrs["layer_names"] = list(names)
            for group, words in names.items():
                file[f"model_weights/{group}"].attrs["weight_names"] = words
    if ending == ".keras":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", json.dumps(config))
            archive.write(tmp_path / "m.h5", "model.weights.h5")
    found = convert.read(path)
    r, a = "hard_sigmoid_sixth", "relu"
    odd, gru = {"activations": (r, r, a, r, a)}, {"activations": (r, r, a), "reset": "before"}
    expected = {"inner": odd | {"reverse": True}, "words": gru, "both.forward_rnn.first": odd}
    expected |= {"both.forward_rnn.second": {}, "both.backward_rnn.first": odd | {"reverse": True}}
    expected |= {"both.backward_rnn.second": {}, "hidden": {}, "old": {"reset": "before"}}
    assert {name: weights.options for name, weights in found.layers.items()} == expected
    assert [note for note in found.notes if "hidden" in note] == found.notes
    assert "hidden: the file does not tell options" in found.notes[0]


@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_classes_that_derive_from_those_of_keras(ending, tmp_path):
    """A layer or cell of a user's class that derives from one of Keras is read with the options that the file tells,
    and a note names it, also if the class is called LSTM. A cell with one more array is refused."""
    h5py = pytest.importorskip("h5py")
    options = {"units": H, "recurrent_initializer": "zeros", "activation": "relu"}
    layers = [spec("MyLSTM", "mine", go_backwards=True, **options)]
    layers += [spec("RNN", "rnn", cell=spec("pack>Cell", "cell", **options))]
    layers += [spec("LSTM", "same", **options) | {"module": None, "registered_name": "pack>LSTM"}]
    places = ["layers/my_lstm/cell/vars", "layers/rnn/cell/vars", "layers/lstm/cell/vars"]

    def write(count):
        with h5py.File(tmp_path / "m.h5", "w") as file:
            file.attrs["model_config"] = json.dumps(spec("Sequential", "model", layers=layers))
            for layer, place in zip(layers, places, strict=True):
                name, found = layer["config"]["name"], []
                for n, word in enumerate(("kernel", "recurrent_kernel", "bias", "peephole")[:count]):
                    place = place if ending == ".keras" else f"model_weights/{name}/{name}/c"
                    found.append(f"{name}/c/{word}")
                    array = np.ones((H, 4 * H) if n < 2 else (4 * H,), np.float32)
                    file[f"{place}/{n if ending == '.keras' else word}"] = array
                if ending == ".h5":
                    file[f"model_weights/{name}"].attrs["weight_names"] = found
            if ending == ".h5":
                file["model_weights"].attrs["layer_names"] = [layer["config"]["name"] for layer in layers]
        if ending == ".keras":
            with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
                archive.writestr("config.json", json.dumps(spec("Sequential", "model", layers=layers)))
                archive.write(tmp_path / "m.h5", "model.weights.h5")
        return tmp_path / f"m{ending}"

    relu = {"activations": ("sigmoid", "sigmoid", "relu", "sigmoid", "relu")}
    found = convert.read(write(3))
    read = [weights.options for weights in found.layers.values()]
    assert len(found.notes) == 1 and found.notes[0].count(",") == 3 and "a class of your own" in found.notes[0]
    assert read == [relu | {"reverse": True}, relu, relu]
    with pytest.raises(ValueError, match="must have no arrays but kernel, recurrent_kernel, bias"):
        convert.read(write(4))
    one = convert.read(write(4), only=[])
    assert (one.layers, one.rest, one.notes) == ({}, {}, [])
    layer = type("LSTM", (), {"get_weights": list, "name": "lstm"})()
    with pytest.raises(ValueError, match="Bidirectional of Keras but got LSTM of"):
        convert.from_keras(layer)
    # A cell without the options of Keras' cells may compute anything, such as the cell without tanh of Keras' guide.
    layers[1] = spec("RNN", "rnn", cell=spec("pack>MinimalRNNCell", "cell", units=H))
    with pytest.raises(ValueError, match=r"the cell of rnn must be of a class of Keras .* but got pack>Minimal"):
        convert.read(write(3))
    assert list(convert.read(write(3), only=["mine", "same"]).layers) == ["mine", "same"]


def test_classes_that_derive_from_the_wrappers_of_keras(tmp_path):
    """A class derived from RNN or Bidirectional has the options of the layer or cell inside. A cell of the user's own
    class is refused there, too. A note names any other wrapper, which may change the weights of its layer."""
    h5py = pytest.importorskip("h5py")
    options = {"units": H, "recurrent_initializer": "zeros", "activation": "relu", "use_bias": False}
    lstm, cell = spec("LSTM", "lstm", **options), spec("LSTMCell", "cell", **options)
    layers = [spec("MyRNN", "rnn", cell=cell), spec("MyBoth", "both", layer=lstm, merge_mode="sum")]
    layers += [spec("WeightNorm", "norm", layer=lstm), spec("TimeDistributed", "td", layer=lstm)]
    places = [
        "my_rnn",
        "my_both/forward_layer",
        "my_both/backward_layer",
        "weight_norm/layer",
        "time_distributed/layer",
    ]
    path = tmp_path / "m.keras"

    def read(*names):
        with h5py.File(tmp_path / "m.h5", "w") as file:
            for place in places:
                for n in range(2):
                    file[f"layers/{place}/cell/vars/{n}"] = np.ones((H, 4 * H), np.float32)
            for name, place in zip(("rnn", "both"), places, strict=False):
                file.require_group(f"layers/{place.partition('/')[0]}/vars").attrs["name"] = name
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", json.dumps(spec("Sequential", "model", layers=layers)))
            archive.write(tmp_path / "m.h5", "model.weights.h5")
        return convert.read(path, only=names or None)

    found = read()
    relu = {"activations": ("sigmoid", "sigmoid", "relu", "sigmoid", "relu")}
    expected = {"rnn": relu, "both": relu | {"bidirectional": True}, "norm.lstm": relu, "td.lstm": relu}
    assert {name: weights.options for name, weights in found.layers.items()} == expected
    own = "rnn, both: a class of your own, read as the class of Keras from which it derives"
    merge = "both: merge_mode is sum. A call returns both halves: mlx_lstm.nn.stack(..., merge='sum') adds them"
    assert found.notes == [own, merge, "norm: what its class WeightNorm does to the layer inside is not read"]
    layers[0] = spec("MyRNN", "rnn", cell=spec("MinimalCell", "cell", units=H))
    with pytest.raises(ValueError, match=r"the cell of rnn must be of a class of Keras .* but got MinimalCell"):
        read()
    assert list(read("both").layers) == ["both"]


def test_stacked_cells_of_keras_inside_others(tmp_path):
    """The cells of a StackedRNNCells inside another are read with their options. Only the first cell of all runs in
    reverse, as Keras reverses the input once."""
    h5py = pytest.importorskip("h5py")
    cells = [spec("LSTMCell", name, units=H, activation=act) for name, act in (("a", "tanh"), ("b", "relu"))]
    cells = [spec("StackedRNNCells", "inner", cells=cells), spec("GRUCell", "c", units=H, reset_after=False)]
    rnn = spec("RNN", "rnn", cell=spec("StackedRNNCells", "outer", cells=cells), go_backwards=True)
    places = {"stacked_rnn_cells/cells/lstm_cell": 4, "stacked_rnn_cells/cells/lstm_cell_1": 4, "gru_cell": 3}
    with h5py.File(tmp_path / "m.h5", "w") as file:
        for place, gates in places.items():
            for n in range(2):
                file[f"layers/rnn/cell/cells/{place}/vars/{n}"] = np.ones((H, gates * H), np.float32)
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(spec("Sequential", "model", layers=[rnn])))
        archive.write(tmp_path / "m.h5", "model.weights.h5")
    model = convert.read(tmp_path / "m.keras")
    relu = {"activations": ("sigmoid", "sigmoid", "relu", "sigmoid", "relu")}
    options = [weights.options for weights in model.layers.values()]
    assert (options, model.rest, model.notes) == ([{"reverse": True}, relu, {"reset": "before"}], {}, [])


def test_a_shard_of_keras_is_told_from_a_whole_file(tmp_path):
    """Keras divides a large file into shards, even between the arrays of one layer. A shard with the recurrent kernel
    and both biases of a GRU has no layer, also if two matrices fit by chance."""
    h5py = pytest.importorskip("h5py")

    def read(name, numbers):
        with h5py.File(tmp_path / name, "w") as file:
            for n in numbers:
                file[f"layers/gru/cell/vars/{n}"] = np.ones((2, 6), np.float32)
        return convert.read(tmp_path / name)

    first, second = read("m_00000.weights.h5", (0, 1)), read("m_00001.weights.h5", (1, 2))
    assert (list(first.layers), list(second.layers), len(second.rest)) == (["gru"], [], 2)
    for model in (first, second):
        assert "shard of Keras, whose layers may lack a bias: save without max_shard_size" in model.notes[-1]
    assert not any("shard" in note for note in read("m_0001.weights.h5", (0, 1)).notes)


def test_the_note_on_a_dense_layer_says_that_it_is_quantized(tmp_path):
    h5py = pytest.importorskip("h5py")
    dtype = spec("QuantizedDTypePolicy", "", mode="int8", source_name="float32")
    dense = spec("Dense", "dense", dtype=dtype)
    layers = [dense, spec("TimeDistributed", "td", layer=dense, dtype=spec("DTypePolicy", "float32"))]
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["layers/dense/vars/0"] = np.ones((3, 3), np.int8)
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(spec("Sequential", "model", layers=layers)))
        archive.write(tmp_path / "m.h5", "model.weights.h5")
    notes = convert.read(tmp_path / "m.keras").notes
    assert notes[0] == "dense: Dense is quantized, so its arrays are others than those of a layer of mlx.nn"
    assert notes[1].startswith("td: TimeDistributed(Dense) is quantized")


def test_a_function_of_the_user_is_no_activation_of_keras():
    """Keras writes the mere name of a user's function into a layer's configuration if one of its own functions has the
    same name, such as the hard_sigmoid of Keras 2 in a program for Keras 3."""

    def hard_sigmoid(x):
        return np.clip(0.2 * x + 0.5, 0, 1)

    arrays = [np.ones((I, 4 * H)), np.ones((H, 4 * H)), np.ones(4 * H)]
    config = {"name": "lstm", "recurrent_activation": "hard_sigmoid"}
    made = {"__module__": "keras.src.layers", "get_weights": lambda layer: arrays, "get_config": lambda layer: config}
    layer = type("LSTM", (), made)()
    layer.name, layer.recurrent_activation = "lstm", hard_sigmoid
    with pytest.raises(ValueError, match="activation of lstm must be a function of Keras but got hard_sigmoid of "):
        convert.from_keras(layer)
    layer.cell = type("MyCell", (), {})()
    with pytest.raises(ValueError, match="the cell of lstm must be of a class of Keras but got MyCell of "):
        convert.from_keras(layer)
    del layer.cell
    for module in ("keras.src.activations", "tensorflow.python.ops", None):
        hard_sigmoid.__module__ = module
        assert convert.from_keras(layer).options["activations"][0] == "hard_sigmoid_sixth"


@pytest.mark.parametrize(
    "ways",
    [
        ("forward_lstm/lstm_cell", "backward_lstm/lstm_cell"),
        ("forward_lstm/lstm_cell_1", "backward_lstm/lstm_cell_2"),  # as TensorFlow 2 numbers the cells
        ("forward_lstm/lstm_cell_1", "backward_lstm_5/lstm_cell_2"),  # with a backward_layer of the user
        ("forward_lstm/lstm_cell", "past/lstm_cell"),
    ],
    ids=["one name", "numbered", "backward_layer", "named"],
)
def test_a_file_of_keras_2(ways, tmp_path):
    """A file of Keras 2 is read correctly. Unlike in Keras 3, array names end in :0, the root group lists the
    layers, a long list of names takes several attributes, and hard_sigmoid has another slope."""
    h5py = pytest.importorskip("h5py")
    weights = weights_of(LSTMCell(), 1, 2, biases="x")
    arrays = iter(convert.to_keras(weights)[0])
    config = {"name": "lstm", "units": H, "activation": "tanh", "recurrent_activation": "hard_sigmoid"}
    both = {"name": "bidirectional_1", "layer": {"class_name": "LSTM", "config": config}, "merge_mode": "sum"}
    dense = {"class_name": "Dense", "config": {"name": "head"}}
    steps = {"class_name": "TimeDistributed", "config": {"name": "steps", "layer": {"class_name": "Conv1D"}}}
    with h5py.File(tmp_path / "old.h5", "w") as file:
        layers = [{"class_name": "Bidirectional", "config": both}, steps, *[dense] * 30]
        file.attrs["model_config"] = json.dumps({"class_name": "Sequential", "config": {"name": "s", "layers": layers}})
        file.attrs["keras_version"] = b"2.4.0"
        root = file.create_group("model_weights")
        root.attrs["layer_names"] = [b"bidirectional_1"]
        group = root.create_group("bidirectional_1")
        words = ("kernel", "recurrent_kernel", "bias")
        names = [f"bidirectional_1/{way}/{word}:0" for way in ways for word in words]
        for name in names:
            group[name] = next(arrays)
        for n in range(2):  # a list that is long, in two attributes
            group.attrs[f"weight_names{n}"] = [name.encode() for name in names[3 * n : 3 * n + 3]]
    model = convert.read(tmp_path / "old.h5")
    assert model.notes[0].startswith(
        "bidirectional_1: merge_mode is sum. A call returns both halves: mlx_lstm.nn.stack"
    )
    assert model.notes[1] == "head: Dense is mlx.nn.Linear, whose weight is the transposed kernel"
    assert len(model.notes) == 21 and model.notes[-1] == "and 11 notes more on other layers"
    found = model.layers["bidirectional_1"]
    assert found.options["activations"] == ("hard_sigmoid", "hard_sigmoid", "tanh", "hard_sigmoid", "tanh")
    assert_same(weights, found._replace(cell=LSTMCell()))


def in_cudnn_s_layout(arrays):
    """Return the arrays of one direction in the layout of Keras's CuDNNLSTM and CuDNNGRU: each gate's matrix has
    cuDNN's memory order but the transposed shape."""
    ours, theirs = {4: ("ifgo", "ifgo"), 3: ("rzn", "zrn")}[arrays["Wx"].shape[0] // H]
    blocks = {
        name: dict(zip(ours, np.split(np.array(array), len(ours)), strict=True)) for name, array in arrays.items()
    }
    each = {name: [of[gate] for gate in theirs] for name, of in blocks.items()}
    kernel, recurrent_kernel = (np.hstack([W.reshape(-1, H) for W in each[name]]) for name in ("Wx", "Wh"))
    return [kernel, recurrent_kernel, np.concatenate(each["bx"] + each["bh"])]


def test_a_conv_lstm_in_an_older_file_of_keras_is_no_layer_here(tmp_path):
    """The arrays of a ConvLSTM, which have more axes, do not keep an `.h5` file from being read."""
    h5py = pytest.importorskip("h5py")
    shapes = {"conv": ((3, I, 4 * H), (3, H, 4 * H)), "lstm": ((I, 4 * H), (H, 4 * H))}
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.attrs["layer_names"] = list(shapes)
        for name, pair in shapes.items():
            names = [f"{name}/cell/{word}" for word in ("kernel", "recurrent_kernel")]
            for each, shape in zip(names, pair, strict=True):
                file[f"{name}/{each}"] = np.ones(shape, np.float32)
            file[name].attrs["weight_names"] = names
    found = convert.read(tmp_path / "m.h5")
    assert list(found.layers) == ["lstm"]
    assert sorted(found.rest) == ["conv.cell.kernel", "conv.cell.recurrent_kernel"]


def test_a_file_of_keras_with_many_layers(tmp_path):
    """The lists of names in an `.h5` file are texts of any length, of which each may be as long as the whole file. So
    a long list is not read: the names are those of the groups and arrays."""
    h5py = pytest.importorskip("h5py")
    layers = {f"l{n}": one_bias(PLAIN["rnn" if n else "gru"].each()[0]) for n in range(12)}
    convert.write(path := tmp_path / "a.h5", layers)
    with h5py.File(path, "a") as file:
        top = file["model_weights"].create_group("top_level_model_weights")
        top["state:0"] = np.arange(2)
        top.attrs["weight_names"] = [b"state:0"]
        file["model_weights"].attrs["layer_names"] = list(file["model_weights"].attrs["layer_names"]) * 50
        assert file["model_weights"].attrs["layer_names"].size * path.stat().st_size > 4 * path.stat().st_size + 2**25
    found = convert.read(path)
    assert found.layers.keys() == layers.keys()
    for name, weights in layers.items():
        assert_same(weights, found.layers[name])
    assert [key for key in found.rest if "state" in key] == list(found.rest)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("cell", [LSTMCell(), GRUCell()], ids=["LSTM", "GRU"])
def test_cudnn_layers_of_keras_2(cell, directions, tmp_path):
    h5py = pytest.importorskip("h5py")
    weights = weights_of(cell, 1, directions, reverse=directions == 1)
    kind = "CuDNNLSTM" if cell == LSTMCell() else "CuDNNGRU"
    layer = {"class_name": kind, "config": {"name": "x", "units": H, "go_backwards": weights.reverse}}
    both = {"class_name": "Bidirectional", "config": {"name": "x", "layer": layer, "merge_mode": "concat"}}
    ways = ["x/forward_x/", "x/backward_x/"] if directions == 2 else ["x/"]
    with h5py.File(tmp_path / "old.h5", "w") as file:
        config = {"name": "s", "layers": [both if directions == 2 else layer]}
        file.attrs["model_config"] = json.dumps({"class_name": "Sequential", "config": config})
        file.attrs["keras_version"] = b"2.2.4-tf"
        root = file.create_group("model_weights")
        root.attrs["layer_names"] = [b"x"]
        group, names = root.create_group("x"), []
        for way, arrays in zip(ways, weights.layers[0], strict=True):
            for word, array in zip(("kernel", "recurrent_kernel", "bias"), in_cudnn_s_layout(arrays), strict=True):
                names.append(f"{way}{word}:0")
                group[names[-1]] = array
        group.attrs["weight_names"] = [name.encode() for name in names]
    assert_same(weights, convert.read(tmp_path / "old.h5").layers["x"])


@pytest.mark.slow  # slow because it imports TensorFlow
@pytest.mark.parametrize("cell", [LSTMCell(), GRUCell()], ids=["LSTM", "GRU"])
def test_cudnn_layers_as_keras_2_reads_them(cell):
    """TensorFlow's copy of Keras 2 converts the arrays of a CuDNN layer to the same arrays that `convert.to_keras`
    returns."""
    pytest.importorskip("tensorflow")
    original = importlib.import_module("tensorflow.python.keras.saving.hdf5_format")._convert_rnn_weights
    weights = weights_of(cell)
    target = type("LSTM" if cell == LSTMCell() else "GRU", (), {"reset_after": True})()
    theirs = original(target, in_cudnn_s_layout(weights.layers[0][0]))
    for got, value in zip(*convert.to_keras(weights), theirs, strict=True):
        np.testing.assert_array_equal(got, value.reshape(got.shape))


# --- Weights files of the models in tests/clients.py -----------------------------------------------------------------

KEYS = {
    "codec of mlx.nn": {"layers": 2},
    "voice encoder": {"lstm.layers": 3},
    "layers by name": {"lstm1": 1, "lstm2": 1, "lstm3": 1},
    "predictor": {"prediction.dec_rnn.lstm": 2},
    "separator": {"lstms": 2},
    "noise filter": {"gru.layers": 3},
    "voice detector": {"decoder.rnn": 1},
    "policy": {"actor.0": 1, "critic.0": 1},
    "world model": {"reader": 1, "belief": 1},
    "tagger": {"": 1},
    "codec of its own": {"lstm": 2},
    "two biases": {"": 1},
}
"""For each model in tests/clients.py: {name of a recurrent stack in its weights file: number of layers}."""


@pytest.mark.parametrize("name", KEYS)
def test_files_of_clients(name, tmp_path):
    model = clients.CLIENTS[name][0]()
    path = tmp_path / "client.safetensors"
    model.save_weights(str(path))
    found = convert.read(path)
    assert {key: len(weights.layers) for key, weights in found.layers.items()} == KEYS[name]
    arrays = dict(mx.load(str(path)))
    assert len(arrays) == len(found.rest) + sum(map(len, found.keys.values()))
    both = name in ("separator", "tagger", "two biases")
    assert all(weights.directions == 1 + both for weights in found.layers.values())
    forms = {
        "separator": "{way}_{name}.{layer}.{array}", "tagger": "{way}.{array}", "two biases": "{array}_{way}",
        "policy": "{name}.{layer}.{array}",
    }  # fmt: skip
    style, ways = ("two-biases" if name == "two biases" else "mlx"), ("fwd", "bwd") if name == "tagger" else None
    again = tmp_path / "again.safetensors"
    convert.write(again, found, style=style, keys=forms.get(name), ways=ways)
    back = mx.load(str(again))
    assert back.keys() == arrays.keys()
    assert all(mx.array_equal(back[key], arrays[key]) for key in arrays)


# --- What is refused, and the command --------------------------------------------------------------------------------


def ones(*shapes):
    return [mx.ones(shape) for shape in shapes]


OPS = {"Wx": mx.ones((16, 3)), "Wh": mx.ones((16, 4))}
WRONG = {
    "[from_tf] forget_bias must be a finite number but got 'x'": lambda: convert.from_tf(
        *ones((7, 16), (16,)), forget_bias="x"
    ),
    "[from_tf] cell_clip must be a finite number but got nan": lambda: convert.from_tf(
        *ones((7, 16), (16,)), cell_clip=float("nan")
    ),
    "[from_onnx] W must have shape [1, 16, I] but got shape [1, 17, 3]": lambda: convert.from_onnx(
        "LSTM", *ones((1, 17, 3), (1, 16, 4))
    ),
    "[from_onnx] R must be an mlx.core.array but got NoneType": lambda: convert.from_onnx(
        "LSTM", mx.ones((1, 16, 3)), None
    ),
    "[from_onnx] attributes must be a dict but got str": lambda: convert.from_onnx("LSTM", None, None, attributes="x"),
    "[from_ops] layers must be a list of dicts, one for each layer, but got []": lambda: convert.from_ops("lstm", []),
    "[from_ops] layers must be a list of dicts, one for each layer, but got dict": lambda: convert.from_ops(
        "lstm", OPS
    ),
    "[from_ops] bidirectional must be True or False but got 1": lambda: convert.from_ops(
        "lstm", [OPS], bidirectional=1
    ),
    "[from_ops] reverse must be True or False but got 'x'": lambda: convert.from_ops("lstm", [OPS], reverse="x"),
    "[from_ops] layers[0]: b must have shape [16] but got shape [15]": lambda: convert.from_ops(
        "lstm", [OPS | {"b": mx.ones(15)}]
    ),
    "[from_ops] layers[0]: Wx must have shape [16, I] but got shape [15, 3]": lambda: convert.from_ops(
        "lstm", [OPS | {"Wx": mx.ones((15, 3))}]
    ),
    "[from_ops] layers[0]: bhn must have shape [4] but got shape [12]": lambda: convert.from_ops(
        "gru", [{"Wx": mx.ones((12, 3)), "Wh": mx.ones((12, 4)), "bhn": mx.ones(12)}]
    ),
    "[from_cudnn] bidirectional must be True or False but got 2": lambda: convert.from_cudnn(
        mx.ones(9), num_layers=1, num_units=1, input_size=1, bidirectional=2
    ),
    "[from_torch] prefix must be a str but got None": lambda: convert.from_torch({}, prefix=None),
    "[x] parts must be a list of at least one Weights but got []": lambda: convert.stacked("x", []),
    "[differences] weights must be a Weights": lambda: convert.differences(convert.from_ops("lstm", [OPS]), None),
    "[convert] ways must be two names, one for each direction, but got ('a', 'a')": lambda: convert.read(
        __file__ + ".npz", ways=("a", "a")
    ),
    "[convert] keys must be a form such as": lambda: convert.write("x.npz", {}, keys=3),
    "[convert] force must be True or False but got 'yes'": lambda: convert.write("x.npz", {}, force="yes"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises(ValueError) as error:
        WRONG[message]()
    assert str(error.value).startswith(message)


def saved(path, arrays):
    """Write a file that contains exactly these arrays, and return its path."""
    convert.write(path, convert.Model({}, arrays, {}, [], {}))
    return path


def refusal(capsys, *arguments):
    """Run the convert command, assert that it converts nothing, and return its one-line error message."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("not converted: ") and err.count("\n") == 1
    return err


def test_layers_numbered_from_1_by_a_template(tmp_path, capsys):
    """A template with {layer} reads numbers from 0 on; one without it reads layers with any numbers. A name that ends
    in a digit comes back although its number cannot be told from that of the layer."""
    weights = weights_of(LSTMCell(), 2, biases="x")
    first, second = weights.each()
    path, target = tmp_path / "a.npz", tmp_path / "b.npz"
    convert.write(path, {"lstm1": first, "lstm2": second}, keys="{name}.{array}", style="mlx")
    said = refusal(capsys, path, target, "--from-keys", "{name}{layer}.{array}")
    assert "Wx of layer 0, forward (the numbers begin at 0), must be there but got no such key" in said
    assert_same(weights, convert.stacked("read", list(convert.read(path, keys="{name}.{array}").layers.values())))
    convert.write(target, {"lstm1": weights}, keys="{name}{layer}.{array}", style="mlx")
    assert_same(weights, convert.read(target, keys="{name}{layer}.{array}").layers["lstm1"])


@pytest.mark.parametrize("style", ["keras", "mlx", "torch"])
def test_a_file_of_arrays_holds_no_option(style, tmp_path):
    """A file whose keys name arrays only cannot say that c is clipped, or which activations the gates have."""
    for name, value in (("cell_clip", 1.0), ("activations", ("hard_sigmoid", *LSTMCell().activations[1:]))):
        weights = clipped(weights_of(LSTMCell(), biases="x"), **{name: value})
        with pytest.raises(ValueError, match=f"{name} must be the default, as the format has no other"):
            convert.write(tmp_path / "a.npz", {"lstm": weights}, style=style)
    assert not (tmp_path / "a.npz").exists()


@pytest.mark.parametrize("layer", [0, 1])
def test_an_error_names_the_key_of_a_numbered_layer(layer, tmp_path):
    shapes = {"Wx": (16, 4), "Wh": (16, 4), "bias": (16,)}
    arrays = {f"lstm{n}.{name}": mx.ones(shape) for n in range(2) for name, shape in shapes.items()}
    path = saved(tmp_path / "a.npz", arrays | {f"lstm{layer}.bias": mx.ones(15)})
    with pytest.raises(ValueError, match=rf"lstm{layer}\.bias must have shape \[16\]"):
        convert.read(path, keys="{name}{layer}.{array}")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt, 130, "\nnot converted: interrupted; b.npz is as before\n"),
        (MemoryError, 2, "not converted: a.npz needs more memory than there is\n"),
    ],
)
def test_the_command_says_on_stderr_what_ended_it(monkeypatch, capsys, error, code, said):
    """Ctrl-C and a lack of memory end the command with an exit code and one line on stderr; stdout stays empty."""

    def ended(options):
        raise error

    monkeypatch.setattr("mlx_lstm.convert.__main__.convert", ended)
    assert main(["a.npz", "b.npz"]) == code
    assert capsys.readouterr() == ("", said)


def test_missing_and_surplus_keys_are_named(tmp_path, capsys):
    lstm, gru = (convert.to_torch(PLAIN[name], prefix="enc.") for name in ("lstm", "gru"))
    mlx_gru = {f"g.{key}": array for key, array in convert.to_mlx(PLAIN["gru"])[0][0].items()}
    keras_style = {"k.kernel": numbers(I, 16), "k.recurrent_kernel": numbers(H, 16)}

    def without(arrays, key):
        return {name: array for name, array in arrays.items() if name != key}

    for arrays, what in (
        (without(lstm, "enc.weight_hh_l1_reverse"), "enc.weight_hh_l1_reverse must be there"),
        (without(lstm, "enc.weight_ih_l0"), "enc.weight_ih_l0 must be there"),
        (without(lstm, "enc.bias_hh_l2"), "enc.bias_hh_l2 must be there"),
        ({key: lstm[key] for key in lstm if "l1" not in key}, "enc.weight_ih_l1 must be there"),
        ({key: lstm[key] for key in lstm if "l0_reverse" not in key}, "enc.weight_ih_l0_reverse must be there"),
        (without(mlx_gru, "g.bhn"), "g.bhn must be there"),
        (without(mlx_gru, "g.b"), "g.b must be there"),
        (without(mlx_gru, "g.Wx"), "g.Wx must be there"),
        (mlx_gru | {"g.bias": numbers(12)}, "g.bias must not be there"),
        ({"l.Wx": numbers(16, I), "l.Wh": numbers(16, H), "l.bhn": numbers(4), "l.b": numbers(16)}, "l.bhn must not"),
        ({"l.Wx": numbers(16, I), "l.Wh": numbers(16, H), "l.bias_ih": numbers(16)}, "l.bias_hh must be there"),
        (without(keras_style, "k.kernel"), "k.kernel must be there"),
        (lstm | {"enc.weight_hh_l0_scales": numbers(16, 1)}, "enc.weight_hh_l0 must not be quantized"),
        (lstm | {"enc.weight_hh_l0": numbers(18, H)}, "enc.weight_hh_l0 must have shape [4H, H], [3H, H] or [H, H]"),
        (lstm | {"enc.weight_hh_l0": numbers(16)}, "enc.weight_hh_l0 must have shape [4H, H], [3H, H] or [H, H]"),
        (lstm | {"enc.weight_ih_l1": numbers(16, I)}, "enc.weight_ih_l1 must have shape [16, 8]"),
        (gru | {"enc.bias_ih_l0": numbers(16)}, "enc.bias_ih_l0 must have shape [12]"),
        (
            {"l.Wx": numbers(16, I), "l.Wh": numbers(16, H), "l.bias": mx.ones((16,), mx.int32)},
            "l.bias must be float32",
        ),
    ):
        path = saved(tmp_path / "a.safetensors", arrays)
        target = tmp_path / "b.npz"
        assert what in refusal(capsys, path, target) and not target.exists(), what
        path.unlink()


def test_shuffled_files_are_refused(tmp_path, capsys):
    """Reading a file raises an error if two arrays of different shapes have exchanged their keys, or if the bytes of
    the file are shuffled."""
    arrays = convert.to_torch(weights_of(LSTMCell(), 2, 2))
    keys, told = list(arrays), 0
    for one in keys:
        for other in keys:
            if arrays[one].shape != arrays[other].shape:
                path = saved(tmp_path / "a.safetensors", arrays | {one: arrays[other], other: arrays[one]})
                with pytest.raises(ValueError, match=r"_l[01]"):
                    convert.read(path)
                told += 1
                path.unlink()
    assert told > 100
    rng = np.random.default_rng(0)
    for ending in (".safetensors", ".npz", ".keras", ".h5", ".weights.h5", ".onnx"):
        path = tmp_path / f"b{ending}"
        convert.write(path, {"rnn": PLAIN["one layer"]})
        path.write_bytes(rng.permutation(np.frombuffer(path.read_bytes(), np.uint8)).tobytes())
        assert path.name in refusal(capsys, path, tmp_path / "c.npz")
    assert "gate order must be a permutation of ifgo (c for g, z for g) but got 'iffo'" in refusal(
        capsys, saved(tmp_path / "d.npz", arrays), tmp_path / "c.npz", "--order", "iffo"
    )


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".keras", ".h5", ".weights.h5", ".onnx"])
def test_truncated_files_are_refused(ending, tmp_path, capsys):
    path, target = tmp_path / f"whole{ending}", tmp_path / "c.npz"
    layers = {"rnn": PLAIN["one layer"], "other": PLAIN["gru"]}
    convert.write(path, layers)
    data, cut = path.read_bytes(), tmp_path / f"cut{ending}"
    # Each cut of an HDF5 file starts a child process, so there are fewer.
    starts, places = ((0, 8), 4) if ending.endswith(".h5") else ((0, 1, 7, 8, 9), 12)
    for n in {*starts, *np.linspace(10, len(data) - 1, places).astype(int).tolist()}:
        cut.write_bytes(data[:n])
        said = refusal(capsys, cut, target)
        assert cut.name in said and "truncated or damaged" in said, (n, said)
        assert not target.exists()


def test_a_damaged_name_is_refused(tmp_path, capsys):
    """Files with names that are not valid UTF-8 are refused. The packages onnx and h5py return such names as bytes."""
    for ending, word in ((".onnx", b"hidden_size"), (".weights.h5", b"lstm")):
        path = tmp_path / f"a{ending}"
        convert.write(path, {"rnn": PLAIN["one layer"]})
        data = path.read_bytes()
        assert word in data
        path.write_bytes(data.replace(word, b"\xff" + word[1:]))
        assert f"{path.name} is truncated or damaged" in refusal(capsys, path, tmp_path / "b.npz")


def test_other_refusals(tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.safetensors"
    convert.write(path, {"rnn": PLAIN["gru"]})
    target = tmp_path / "b.npz"
    assert "must end in .safetensors" in refusal(capsys, path, tmp_path / "b.tflite")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").touch()
    for name, way in (
        ("a.ckpt", "torch.load(..., weights_only=True), then safe"),
        ("a.hdf5", "rename it to .h5"),
        ("saved", "of a SavedModel"),
    ):
        assert f".onnx: {way}" in refusal(capsys, path.with_name(name), tmp_path / "b.safetensors")
    assert "safetensors.torch.save_file" in refusal(capsys, tmp_path / "model.pt", target)
    assert "No such file" in refusal(capsys, tmp_path / "none.npz", target)
    assert "is no folder" in refusal(capsys, path, tmp_path / "none" / "b.npz")
    with monkeypatch.context() as patch:  # root may write everywhere, so this test asks no real folder
        patch.setattr(os, "access", lambda folder, mode: (folder, mode) != (tmp_path, os.W_OK))
        text = f"no permission to write {target}, because its folder is read-only"
        assert text in refusal(capsys, path, target)
        with pytest.raises(PermissionError, match=text):
            convert.write(target, {"rnn": PLAIN["gru"]})
    assert "called 'enc'; there are rnn" in refusal(capsys, path, target, "--only", "enc")
    assert "layers must all be alike" in refusal(
        capsys, saved(tmp_path / "two.npz", convert.to_torch(PLAIN["gru"], prefix="g.")
                      | convert.to_torch(PLAIN["lstm"], prefix="l.")), target, "--stack", "g,l")  # fmt: skip
    two = tmp_path / "two.npz"
    assert "must name each layer once but got 'g' twice" in refusal(capsys, two, target, "--stack", "g,g")
    assert "leave all names different but got l twice" in refusal(capsys, two, target, "--prefix", "g=l")
    convert.write(nameless := tmp_path / "nameless.npz", {"": PLAIN["gru"]})
    assert "called 'enc'; there are (no name)" in refusal(capsys, nameless, target, "--only", "enc")
    (folder := tmp_path / "folder.npz").mkdir()
    assert "folder.npz is a folder" in refusal(capsys, path, folder, "--force")
    assert "folder.npz is a folder" in refusal(capsys, folder, target)
    assert "which has no plain RNN, but got 'relu'" in refusal(capsys, path, target, "--nonlinearity", "relu")
    assert "--to must be left out" in refusal(capsys, path, tmp_path / "b.onnx", "--to", "mlx")
    assert "keys must have {array}" in refusal(capsys, path, target, "--keys", "{name}")
    assert "keys must have {layer} and {way}" in refusal(capsys, path, target, "--keys", "{name}.{array}")
    assert "--keys must be left out" in refusal(capsys, path, tmp_path / "b.onnx", "--keys", "{array}")
    assert "holds no LSTM, GRU or RNN layer" in refusal(capsys, saved(tmp_path / "c.npz", {"x": np.ones(2)}), target)
    onnx_file = tmp_path / "r.onnx"
    convert.write(onnx_file, {"rnn": PLAIN["rnn"]})
    assert "order must be left out for r.onnx" in refusal(capsys, onnx_file, target, "--order", "icfo")
    assert "a projection must be the default" in refusal(
        capsys, saved(tmp_path / "p.npz", convert.to_torch(PROJECTED["projected"])), tmp_path / "b.keras"
    )
    target.write_bytes(b"mine")
    assert "exists; --force replaces it" in refusal(capsys, path, target)
    assert target.read_bytes() == b"mine"
    for module, ending in (("h5py", ".keras"), ("onnx", ".onnx")):
        monkeypatch.setitem(sys.modules, module, None)
        assert f"package {module}: pip install '.[convert]'" in refusal(capsys, path, tmp_path / f"x{ending}")
    with pytest.raises(SystemExit) as stopped:
        main([str(path)])
    assert stopped.value.code == 2 and "DST" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "a.safetensors",
        "b.npz",
        "c.npz",
        "folder.npz",
        "nameless.npz",
        "p.npz",
        "r.onnx",
        "saved",
        "two.npz",
    ]


def test_nothing_is_left_where_writing_fails(tmp_path, capsys, monkeypatch):
    from mlx_lstm.convert import _files

    path = tmp_path / "a.safetensors"
    convert.write(path, {"rnn": PLAIN["gru"]})
    before = path.read_bytes()

    def fail_halfway(partial, *_):
        partial.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(_files, "write_safetensors", fail_halfway)
    assert "the disk is full" in refusal(capsys, path, path, "--force", "--to", "mlx")
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"] and path.read_bytes() == before


def test_command(tmp_path):
    """The command, run in its own process, converts a file with torch's array names to MLX's names. It refuses a
    truncated file with a one-line error."""
    path = tmp_path / "torch.safetensors"
    rest = {"decoder.head.weight": numbers(2, 8), "decoder.steps": np.arange(2)}
    model = {"encoder.lstm": PLAIN["lstm"], "encoder.gru": one_bias(PLAIN["gru"])}
    convert.write(path, convert.Model(model, rest, {}, [], {}))

    def run(*arguments):
        command = [sys.executable, "-m", "mlx_lstm.convert", *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)

    done = run("torch.safetensors", "mlx.npz", "--to", "mlx", "--prefix", "encoder.=enc.", "--prefix", "decoder.=")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "enc.lstm: LSTM, 6 -> 4, 3 layers, both directions; from " in done.stdout
    assert "enc.lstm: two biases are one now, their sum" in done.stdout and "enc.gru: two" not in done.stdout
    assert "2 other arrays copied unchanged: head.weight, steps" in done.stdout
    found = convert.read(tmp_path / "mlx.npz")
    gru = convert.weights.describe(model["encoder.gru"])
    assert repr(found).endswith(f"'enc.gru': Weights({gru})}}, 2 other arrays)") and len(repr(found)) < 200
    assert found.layers.keys() == {"enc.lstm", "enc.gru"} and found.rest.keys() == {"head.weight", "steps"}
    assert_same(model["encoder.gru"], found.layers["enc.gru"])
    (tmp_path / "mlx.npz").write_bytes((tmp_path / "mlx.npz").read_bytes()[:1000])
    done = run("mlx.npz", "again.safetensors")
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "again.safetensors").exists()
    assert done.stderr.startswith("not converted: mlx.npz is truncated or damaged") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--prefix", "a.=x.", "--prefix", "b.=x."], "--prefix b.=x. must leave all names different but got x twice"),
        (["--prefix", "e.=k."], "--prefix e.=k. must leave all names different but got k.w twice"),
        (["--prefix", "d.=x."], "--prefix d.=x. must rename a layer or a key but got a, b, c, e.w, k.w"),
        (["--external-data"], "--external-data must be left out for a file that is no .onnx but got a.npz"),
        (["--stack", "a,a"], "--stack must name each layer once but got 'a' twice"),
        (["--stack", "a,b", "--stack", "b,c"], "--stack must name each layer once but got 'b' twice"),
    ],
)
def test_no_option_loses_a_layer_or_an_array(words, rule, tmp_path, capsys):
    layers = {name: weights_of(RNNCell(), layers=2).each()[1] for name in "abc"}
    rest = {"e.w": np.ones(3), "k.w": np.zeros(3)}
    convert.write(tmp_path / "a.npz", convert.Model(layers, rest, {}, [], {}))
    assert main([str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), *words]) == 2
    assert rule in capsys.readouterr().err


@pytest.mark.parametrize("where", ["a.weight_ih_l0", "other"])
def test_the_report_names_float64_arrays_that_mlx_cannot_load(where, tmp_path, capsys):
    arrays = {name: np.array(array) for name, array in convert.to_torch(PLAIN["gru"], prefix="a.").items()}
    wide = {name: array.astype(np.float64) for name, array in arrays.items()} if where in arrays else {}
    np.savez(tmp_path / "a.npz", **arrays | (wide or {"other": np.ones(3)}))
    for name in ("b.npz", "b.safetensors"):
        assert main([str(tmp_path / "a.npz"), str(tmp_path / name)]) == 0
        assert ("it holds float64 arrays" in capsys.readouterr().out) == (name == "b.safetensors")
    with pytest.raises(RuntimeError, match="F64"):
        mx.load(str(tmp_path / "b.safetensors"))


def test_the_arrays_of_other_layers_are_compared_before_the_new_file_gets_its_name(tmp_path, capsys, monkeypatch):
    """A reader that changes the last bit of an array stands for a disk or a program that does."""
    from mlx_lstm.convert import __main__ as command

    def read(path, **options):
        model = convert.read(path, **options)
        return model if path == source else model._replace(rest={"e.w": np.nextafter(model.rest["e.w"], 9)})

    source, target = tmp_path / "a.npz", tmp_path / "b.npz"
    convert.write(source, convert.Model({"a": PLAIN["gru"]}, {"e.w": np.ones(3)}, {}, [], {}))
    monkeypatch.setattr(command, "read", read)
    assert "e.w would not be the same in" in refusal(capsys, source, target) and not target.exists()


def test_a_bidirectional_layer_of_a_keras_file_called_as_its_forward_layer():
    """A Bidirectional called forward_x around a layer x, as Keras writes it into an .h5 file, has two directions."""
    groups = [f"forward_x//sequential/forward_x/{way}_x/lstm_cell" for way in ("forward", "backward")]
    found = _keras_file.names_in_legacy(
        {f"{group}/{name}": None for group in groups for name in ("kernel", "recurrent_kernel")}, []
    )
    assert [(each.name, each.way) for each in found] == [("forward_x", "forward"), ("forward_x", "backward")]


def test_stacks_and_orders(tmp_path, capsys):
    """The command joins single layers into one stack of layers (--stack) and reorders gates that are in TensorFlow's
    order (--order)."""
    layers = {f"lstm{n}": weights for n, weights in enumerate(one_bias(PLAIN["lstm"]).each())}
    path, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    convert.write(path, layers, style="mlx")
    assert main([str(path), str(target), "--stack", "lstm0,lstm1,lstm2", "--prefix", "lstm0=rnn"]) == 0
    assert "read back: the same to the last bit" in capsys.readouterr().out
    assert_same(one_bias(PLAIN["lstm"]), convert.read(target).layers["rnn"])
    ours = convert.to_mlx(one_bias(PLAIN["one layer"]))[0][0]
    blocks = {key: mx.split(array, 4) for key, array in ours.items()}
    theirs = {f"x.{key}": mx.concatenate([i, g, f, o]) for key, (i, f, g, o) in blocks.items()}
    icfo = saved(tmp_path / "c.npz", theirs)
    assert main([str(icfo), str(target), "--order", "icfo", "--force"]) == 0
    assert_same(one_bias(PLAIN["one layer"]), convert.read(target).layers["x"])
    for style in ("mlx", "keras", "torch"):  # a GRU, which has no such order
        convert.write(path, {"enc.a": one_bias(PLAIN["one layer"]), "enc.b": PLAIN["gru"]}, style=style, force=True)
        assert main([str(path), str(target), "--order", "icfo", "--force"]) == 2
        assert "a permutation of rzn" in (said := capsys.readouterr().err) and "The layer is enc.b" in said
        assert "\\x00" not in said


@pytest.mark.parametrize("layers", [1, 2])
def test_mlx_names_are_those_of_two_lists(layers, tmp_path):
    """A model with one list of layers per direction can load the file that `--to mlx` writes. `nn.stack` then
    computes the right output with these layers."""
    path, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    weights = one_bias(weights_of(LSTMCell(), layers, 2))
    convert.write(path, {"encoder": weights})
    assert main([str(path), str(target), "--to", "mlx"]) == 0

    class Encoder(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            self.forward, self.backward = ([nn.LSTM(2 * H if k else I, H) for k in range(layers)] for _ in range(2))

    class Model(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = Encoder()

    model = Model()
    model.load_weights(str(target))
    x = numbers(B, T, I)
    got = nn.stack(model.encoder.forward, x, reverse=model.encoder.backward)[0]
    expected = mlx_lstm.torch.from_weights(weights, batch_first=True)(x)[0]
    np.testing.assert_array_equal(np.array(got), np.array(expected))


def test_options_that_have_no_use_are_refused(tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    convert.write(path, {"rnn": PLAIN["lstm"]})
    target = tmp_path / "b.safetensors"
    assert "--ways must be left out without --keys" in refusal(capsys, path, target, "--ways", "a", "b")
    assert "permutation of ifgo (c for g, z for g) but got 'foo'" in refusal(capsys, path, target, "--order", "foo")


def test_words_for_the_directions_are_those_of_the_forms(tmp_path, capsys):
    path, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    convert.write(path, {"rnn": PLAIN["lstm"]})
    form = ["--from-keys", "{name}.{array}_l{layer}{way}", "--ways", "", "_reverse"]
    assert main([str(path), str(target), *form]) == 0
    assert_same(PLAIN["lstm"], convert.read(target).layers["rnn"])


FORMS = ("{array}_l0{way}", "{array}_{way}", "{way}.{array}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_from_names_reads_arrays_by_any_names(kind, form):
    """`from_names` reads both directions of a layer by torch's names and by the names of other programs."""
    layer = getattr(mlx_lstm.torch, kind)(3, 4, bidirectional=True)
    expected, arrays = convert.from_torch(layer), {}
    for way, words in zip(("", "_reverse"), ("fwd", "bwd"), strict=True):
        for word in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            own = way if "_l0" in form else words
            arrays[form.format(array=word, way=own)] = layer[f"{word}_l0{way}"]
    assert convert.differences(convert.from_names(arrays), expected) == []


def test_from_names_of_a_gru_whose_whole_recurrent_bias_is_called_bhn():
    layer = mlx_lstm.torch.GRU(3, 4)
    arrays = {"Wx": layer.weight_ih_l0, "Wh": layer.weight_hh_l0, "b": layer.bias_ih_l0, "bhn": layer.bias_hh_l0}
    assert convert.differences(convert.from_names(arrays), convert.from_torch(layer)) == []


NOT_A_LAYER = {
    "no arrays": ({}, "must be those of one recurrent layer or stack but got"),
    "a list": ([mx.ones(3)], "arrays must be a dict of arrays by name but got list"),
    "two layers": (
        {f"{name}.{word}": mx.ones((12, 4)) for name in "ab" for word in ("Wx", "Wh")},
        "must be those of one recurrent layer or stack but got a.Wh, a.Wx, b.Wh, b.Wx",
    ),
    "another array": ({"Wx": mx.ones((16, 3)), "Wh": mx.ones((16, 4)), "gain": mx.ones(3)}, "but got Wh, Wx, gain"),
    "both directions in one": (
        {"Wx": mx.array(1.0), "Wh": mx.ones((12, 1, 12))},
        r"Wx must have shape \[rows, ...\], as both directions share arrays, but got shape \[\]",
    ),
}


@pytest.mark.parametrize("case", NOT_A_LAYER)
def test_from_names_refuses_what_is_not_one_layer(case):
    arrays, message = NOT_A_LAYER[case]
    with pytest.raises(ValueError, match=message):
        convert.from_names(arrays)
    with pytest.raises(ValueError, match="nonlinearity must be one of"):
        convert.from_names({}, nonlinearity="cos")
