"""Tests of the conversion from and to haste and FlashRNN. Neither package runs without CUDA, so the expected outputs
come from loops in NumPy that follow the equations and layouts of their sources (haste 0.5, FlashRNN 1.0.5)."""

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_close

import mlx_lstm
from mlx_lstm import cells, convert
from mlx_lstm.convert.__main__ import main
from mlx_lstm.nn import Pointwise, stack

T, B, I, H, N = 6, 3, 5, 4, 2
RNG = np.random.default_rng(7)

HASTE = {
    "lstm": {"kernel": (I, 4 * H), "recurrent_kernel": (H, 4 * H), "bias": (4 * H,)},
    "gru": {"kernel": (I, 3 * H), "recurrent_kernel": (H, 3 * H), "bias": (3 * H,), "recurrent_bias": (3 * H,)},
    "indrnn": {"kernel": (I, H), "recurrent_scale": (H,), "bias": (H,)},
}
"""The shapes of the parameters of `haste_pytorch`'s layers."""

GATES = {"lstm": (4, 4), "gru": (3, 4), "elman": (1, 1), "slstm": (4, 4)}
"""{function of FlashRNN: (number of gates in W and in R, number of biases per unit in b)}. A GRU's candidate has two
biases: one for the input's product and one for the recurrent product."""


def numbers(*shape):
    return RNG.normal(0, 0.5, shape).astype(np.float32)


def drawn(shapes):
    return {name: numbers(*shape) for name, shape in shapes.items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def loop_of_haste(kind, x, arrays, zoneout=0.0):
    """Return haste's output [T, B, H] in inference, computed in the dtype of x."""
    p = {name: array.astype(x.dtype) for name, array in arrays.items()}
    h = c = np.zeros((x.shape[1], H), x.dtype)
    outputs = []
    for x_t in x:
        a = x_t @ p["kernel"]
        if kind == "lstm":
            i, g, f, o = np.split(h @ p["recurrent_kernel"] + a + p["bias"], 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            new = sigmoid(o) * np.tanh(c)
        elif kind == "gru":
            xz, xr, xg = np.split(a + p["bias"], 3, axis=1)
            hz, hr, hg = np.split(h @ p["recurrent_kernel"] + p["recurrent_bias"], 3, axis=1)
            z = sigmoid(xz + hz)
            new = z * h + (1 - z) * np.tanh(xg + sigmoid(xr + hr) * hg)
        else:
            new = np.tanh(a + p["bias"] + h * p["recurrent_scale"])
        h = (zoneout * h + (1 - zoneout) * new).astype(x.dtype)
        outputs.append(h)
    return np.stack(outputs)


def loop_of_flashrnn(function, x, W, R, b):
    """Return h [T, B, N, D] (N heads of D units) and the last states by FlashRNN's equations in NumPy, computed in
    the dtype of x. FlashRNN itself has no input weights: `W` belongs to a linear layer that computes FlashRNN's
    input from x."""
    W, R, b = (array.astype(x.dtype) for array in (W, R, b))
    N, D = R.shape[1:3]
    first = np.zeros((x.shape[1], N, D), x.dtype)
    h, c, n, m = first, first, first, first
    outputs = []
    for x_t in x:
        a = np.einsum("gndi,bi->gbnd", W, x_t)
        r = np.einsum("gndp,bnp->gbnd", R, h)
        if function == "gru":  # gate order of R: n, r, z; of W: r, z, n; of b: n (recurrent), r, z, n (input)
            bias = b[:, None]
            reset, update = sigmoid(a[0] + r[1] + bias[1]), sigmoid(a[1] + r[2] + bias[2])
            candidate = np.tanh(a[2] + bias[3] + reset * (r[0] + bias[0]))
            h = update * h + (1 - update) * candidate
        elif function == "elman":
            h = np.tanh(a[0] + r[0] + b[0])
        else:
            i, f, z, o = a + r + b[:, None]
            if function == "lstm":
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(z)
                h = sigmoid(o) * np.tanh(c)
            else:
                log_f = -np.log1p(np.exp(-f)) + m
                m = i if (n == 0).all() else np.maximum(i, log_f)
                i, f = np.exp(i - m), np.exp(log_f - m)
                c, n = f * c + i * np.tanh(z), np.maximum(f * n + i, 1)
                h = sigmoid(o) * c / n
        outputs.append(h)
    return np.stack(outputs), (h, c, n, m)


def assert_equals(got, loop, x):
    """Assert that our float32 output `got` is close to the exact one, which `loop` gives for x in float64. `loop`
    computes the original library's equations in NumPy. The error of `got` may be twice the error of `loop` in
    float32."""
    assert_close("h", np.array(got), loop(x), loop(x.astype(np.float64)))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_outputs_of_haste(kind):
    """The converted weights of haste's LSTM and GRU give the outputs that haste's equations give."""
    arrays, x = drawn(HASTE[kind]), numbers(T, B, I)
    weights = convert.from_haste({f"rnn.{name}": array for name, array in arrays.items()}, prefix="rnn.")
    h = getattr(mlx_lstm, kind)(mx.array(x), **convert.to_ops(weights)[0], **weights.options).h
    assert_equals(h, lambda x: loop_of_haste(kind, x, arrays), x)
    again = convert.to_haste(weights, prefix="rnn.")
    assert again.keys() == {f"rnn.{name}" for name in arrays}
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.array(again[f"rnn.{name}"]), array)


def test_zoneout_of_haste_is_zoneout_of_h():
    """haste's LSTM with zoneout in inference equals `cells.zoneout_lstm` with the zoneout rate as `hold_h` and 0 as
    `hold_c`."""
    arrays, x = drawn(HASTE["lstm"]), numbers(T, B, I)
    a = convert.to_ops(convert.from_haste(arrays))[0]
    hold = (mx.array(0.3), mx.array(0.0))
    state = (mx.zeros((B, H)), mx.zeros((B, H)))
    h, _ = mlx_lstm.pointwise(cells.zoneout_lstm, mx.array(x), a["Wx"], a["Wh"], a["b"], state, inputs=hold)
    assert_equals(h, lambda x: loop_of_haste("lstm", x, arrays, x.dtype.type(np.float32(0.3))), x)


def test_outputs_of_hastes_indrnn():
    """A layer `Pointwise` with the converted parameters of haste's IndRNN and tanh gives haste's outputs."""

    def indrnn_tanh(a, state, u):
        return (mx.tanh(a[0] + u * state[0]),)

    arrays, x = drawn(HASTE["indrnn"]), numbers(T, B, I)
    layer = Pointwise(indrnn_tanh, I, H, gates=1, params=1, recurrent=False)
    layer.update(convert.from_haste_indrnn(arrays))
    h, _ = layer(mx.array(x.swapaxes(0, 1)))
    assert_equals(mx.swapaxes(h, 0, 1), lambda x: loop_of_haste("indrnn", x, arrays), x)
    again = convert.to_haste_indrnn(layer)
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.array(again[name]), array)
    without_bias = {"Wx": mx.ones((H, I)), "params": [mx.ones(H)]}
    assert not mx.any(convert.to_haste_indrnn(without_bias)["bias"]).item()


def of_flashrnn(function):
    G, biases = GATES[function]
    return numbers(G, N, H, I), numbers(G, N, H, H), numbers(biases, N, H)


@pytest.mark.parametrize("function", ["lstm", "gru", "elman"])
def test_outputs_of_flashrnn(function):
    """The heads of FlashRNN, run by `stack` as groups, give the outputs that FlashRNN's equations give."""
    W, R, b = of_flashrnn(function)
    x = numbers(T, B, I)
    heads = convert.from_flashrnn(W, R, b, function=function)
    layers = [convert.to_mlx(head)[0][0] for head in heads]
    h, _ = stack(layers, mx.tile(mx.array(x.swapaxes(0, 1)), (1, 1, N)), groups=N)
    h = mx.swapaxes(h, 0, 1).reshape(T, B, N, H)
    assert_equals(h, lambda x: loop_of_flashrnn(function, x, W, R, b)[0], x)
    for got, array in zip(convert.to_flashrnn(heads).values(), (W, R, b), strict=True):
        np.testing.assert_array_equal(np.array(got), array)


def test_outputs_of_flashrnns_slstm():
    """The heads of FlashRNN's sLSTM, run by `cells.slstm`, give FlashRNN's h: from states of 0, and from the last
    states that FlashRNN returns."""
    W, R, b = of_flashrnn("slstm")
    b[1] += 2  # the forget gates are nearly open, so that log f + m exceeds i at some steps and not at others
    x = numbers(2 * T, B, I)
    heads = convert.from_flashrnn_slstm(W, R, b)
    layers = [Pointwise(cells.slstm, I, H, gates=4, states=4).update(head) for head in heads]

    def whole(x):
        return loop_of_flashrnn("slstm", x, W, R, b)[0]

    def run(x, states):
        by_head = [layer(mx.array(x.swapaxes(0, 1)), state)[0] for layer, state in zip(layers, states, strict=True)]
        return mx.swapaxes(mx.stack(by_head, axis=2), 0, 1)

    assert_equals(run(x, [None] * N), whole, x)
    last = loop_of_flashrnn("slstm", x[:T], W, R, b)[1]
    states = [[mx.array(np.ascontiguousarray(array[:, n])) for array in last] for n in range(N)]
    assert_equals(run(x[T:], states), lambda x2: whole(x.astype(x2.dtype))[T:], x[T:])
    for got, array in zip(convert.to_flashrnn_slstm(heads).values(), (W, R, b), strict=True):
        np.testing.assert_array_equal(np.array(got), array)
    without_input = convert.from_flashrnn_slstm(None, R, b)
    assert without_input[0].keys() == {"Wh", "bias"}
    assert convert.to_flashrnn_slstm(without_input)["W"] is None


def test_two_biases_become_their_sum():
    """haste's LSTM and FlashRNN's LSTM have one bias per gate, so torch's two biases become their sum. haste's GRU has
    two biases per gate, so the weights do not change. FlashRNN's GRU has two biases for n only, so the biases of r
    and z become their sums."""
    weights = convert.from_torch(mlx_lstm.torch.LSTM(I, H))
    a = weights.layers[0][0]
    assert mx.array_equal(convert.to_flashrnn([weights])["b"].reshape(-1), a["bx"] + a["bh"])
    again = convert.from_haste(convert.to_haste(weights))
    assert convert.differences(weights, again) == ["bx", "bh"]
    gru = convert.from_torch(mlx_lstm.torch.GRU(I, H))
    assert convert.differences(gru, convert.from_haste(convert.to_haste(gru))) == []
    assert convert.differences(gru, convert.from_flashrnn(**convert.to_flashrnn([gru]), function="gru")[0])


def test_files_of_haste(tmp_path, capsys):
    """The convert command reads haste's LSTM with `--order igfo`, and finds haste's GRU by its second bias. It refuses
    layer normalisation."""
    lstm, gru = drawn(HASTE["lstm"]), drawn(HASTE["gru"])
    path, target = tmp_path / "haste.safetensors", tmp_path / "torch.safetensors"
    for name, arrays, options in (("enc", lstm, ["--order", "igfo"]), ("dec", gru, [])):
        keys = {f"{name}.{key}": mx.array(array) for key, array in arrays.items()}
        mx.save_safetensors(str(path), keys)
        assert main([str(path), str(target), "--force", *options]) == 0
        assert convert.differences(convert.read(target).layers[name], convert.from_haste(arrays)) == []
    capsys.readouterr()
    normalised = {"x.gamma": mx.ones((2, 4 * H))} | {f"x.{key}": mx.array(array) for key, array in lstm.items()}
    mx.save_safetensors(str(path), normalised)
    assert main([str(path), str(target), "--force"]) == 2
    assert "x.gamma must not be there: no format holds layer normalisation" in capsys.readouterr().err


class Haste:
    """A stand-in for a layer of haste: its parameters and its option zoneout."""

    def __init__(self, arrays, zoneout=0.0):
        self.arrays, self.zoneout = arrays, zoneout

    def state_dict(self):
        return self.arrays


class Model:
    """A stand-in for a whole model with a layer of haste: its attribute `lstm`."""

    def __init__(self, lstm):
        self.lstm = lstm

    def state_dict(self):
        return {f"lstm.{name}": array for name, array in self.lstm.state_dict().items()}


LSTM, GRU = drawn(HASTE["lstm"]), drawn(HASTE["gru"])
W, R, b = of_flashrnn("lstm")
HEAD = convert.from_flashrnn_slstm(W, R, b)[0]
PLAIN = convert.from_ops("rnn", [{"Wx": mx.ones((H, I)), "Wh": mx.ones((H, H))}])
WRONG = {
    "[from_haste] zoneout must be 0, as it is no weight": lambda: convert.from_haste(Haste(LSTM, 0.1)),
    "[from_haste] zoneout must be 0, as it is no": lambda: convert.from_haste(Model(Haste(LSTM, 0.1)), prefix="lstm."),
    "[from_haste] prefix must be a str but got None": lambda: convert.from_haste(LSTM, prefix=None),
    "[from_haste] layer must be a layer of haste_pytorch or a dict": lambda: convert.from_haste(3),
    "[from_haste] layer must have no layer normalisation": lambda: convert.from_haste(LSTM | {"gamma": b}),
    "[from_haste] layer must be an LSTM or a GRU": lambda: convert.from_haste(drawn(HASTE["indrnn"])),
    "[from_haste] the names of an LSTM of haste must be kernel": lambda: convert.from_haste({"kernel": W}),
    "[from_haste] recurrent_bias must have shape [12]": lambda: convert.from_haste(GRU | {"recurrent_bias": b[0, 0]}),
    "[from_haste] kernel and recurrent_kernel must have shapes": lambda: convert.from_haste(LSTM | {"kernel": b}),
    "[to_haste] weights must be those of one LSTM or GRU layer": lambda: convert.to_haste(PLAIN),
    "[from_haste_indrnn] bias must have shape [4]": lambda: convert.from_haste_indrnn(
        drawn(HASTE["indrnn"]) | {"bias": numbers(3)}
    ),
    "[to_haste_indrnn] parameters must be a layer or a dict": lambda: convert.to_haste_indrnn(None),
    "[to_haste_indrnn] parameters must hold Wx, one array in params": lambda: convert.to_haste_indrnn(
        Pointwise(cells.slstm, I, H, gates=4, states=4)
    ),
    "[from_flashrnn] function must be lstm, gru or elman; from_flashrnn_slstm": lambda: convert.from_flashrnn(
        W, R, b, function="slstm"
    ),
    "[from_flashrnn] function must be one of 'lstm', 'gru', 'elman'": lambda: convert.from_flashrnn(
        W, R, b, function="rnn"
    ),
    "[from_flashrnn] R must have shape [3, N, D, D] but": lambda: convert.from_flashrnn(W, R, b, function="gru"),
    "[from_flashrnn] R must have shape [4, 2, 4, 4] but": lambda: convert.from_flashrnn(W, R[..., 1:], b),
    "[from_flashrnn] b must have shape [4, 2, 4] but": lambda: convert.from_flashrnn(W, R, b[:3]),
    "[from_flashrnn] W must have shape [4, 2, 4, I] but": lambda: convert.from_flashrnn(W[:, 1:], R, b),
    "[from_flashrnn] W must be an mlx.core.array but got NoneType": lambda: convert.from_flashrnn(None, R, b),
    "[from_flashrnn] R must have no empty axis": lambda: convert.from_flashrnn(W, R[:, :0], b),
    "[to_flashrnn] heads must be a list of at least one Weights": lambda: convert.to_flashrnn([]),
    "[to_flashrnn] weights must be a Weights": lambda: convert.to_flashrnn([3]),
    "[to_flashrnn] heads must be single layers in one direction": lambda: convert.to_flashrnn(
        [PLAIN, *convert.from_flashrnn(W, R, b)]
    ),
    "[to_flashrnn_slstm] heads must be a list of at least one dict": lambda: convert.to_flashrnn_slstm([3]),
    "[to_flashrnn_slstm] heads[1] must hold Wh, bias": lambda: convert.to_flashrnn_slstm([HEAD, {"Wh": HEAD["Wh"]}]),
    "[to_flashrnn_slstm] heads[0]: bias must have shape [16]": lambda: convert.to_flashrnn_slstm(
        [HEAD | {"bias": mx.ones(3)}]
    ),
    "[to_flashrnn_slstm] heads[0]: Wh must be an mlx": lambda: convert.to_flashrnn_slstm([HEAD | {"Wh": 3}]),
    "[to_flashrnn_slstm] heads[0]: Wh must have no empty axis": lambda: convert.to_flashrnn_slstm(
        [HEAD | {"Wh": mx.ones((0, 0))}]
    ),
    "[to_haste_indrnn] parameters must hold Wx, one array": lambda: convert.to_haste_indrnn({"Wx": W, "params": 3}),
    "[convert] arrays must hold numbers, in rows of equal": lambda: convert.from_haste(LSTM | {"bias": [[1], [1, 2]]}),
    "[from_haste] the keys of arrays must be texts but got 1.": lambda: convert.from_haste({1: b}),
    "[to_flashrnn_slstm] the keys of arrays must be": lambda: convert.to_flashrnn_slstm([HEAD | {1: b}]),
    "[from_names] the keys of arrays must be texts": lambda: convert.from_names({1: b}),
    "[from_mlx] the keys of arrays must be texts": lambda: convert.from_mlx({1: b, "Wh": b}),
    "[convert] names of layers must be texts but got 1.": lambda: convert.write("a.npz", {1: PLAIN}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(message):
    with pytest.raises(ValueError) as error:
        WRONG[message]()
    assert str(error.value).startswith(message)
