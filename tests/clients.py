"""Models as other programs build them with `mlx.nn`, each with its own loop over layers. For each model, a function
computes the same result with `stack`, which replaces the loop over layers.

All models read x [B, T, D] and return a tuple of arrays. `CLIENTS` maps a name to the model and this function.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from assertions import assert_within
from mlx.utils import tree_flatten, tree_map

from mlx_lstm.nn import stack
from mlx_lstm.oracle.closeness import float_of, largest

D, H = 3, 4
LENGTHS = [5, 2, 4]


class StackedLSTM(nn.Module):
    """A stack of LSTM layers as in an audio codec. The layers are in a list. The model also returns the last states
    of all layers."""

    def __init__(self, layers=2, bias=True):
        super().__init__()
        self.layers = [nn.LSTM(H if n else D, H, bias) for n in range(layers)]

    def __call__(self, x):
        last = []
        for layer in self.layers:
            x, cell = layer(x)
            last.append((x[:, -1], cell[:, -1]))
        return x, *(mx.stack(states) for states in zip(*last, strict=True))


def stacked(model, x):
    output, (h_n, c_n) = stack(model.layers, x)
    return output, h_n, c_n


class VoiceEncoder(nn.Module):
    """A model that computes a speaker's embedding: a stack of layers without biases, then a projection of the last
    h."""

    def __init__(self):
        super().__init__()
        self.lstm, self.proj = StackedLSTM(3, bias=False), nn.Linear(H, 2)

    def __call__(self, x):
        return (self.embed(self.lstm(x)[1]),)

    def embed(self, h_n):
        embedding = self.proj(h_n[-1])
        return embedding / mx.sqrt(1 + (embedding**2).sum(-1, keepdims=True))


class ByName(nn.Module):
    """A model that stores each layer as an attribute with its own name."""

    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.lstm3 = nn.LSTM(D, H), nn.LSTM(H, H), nn.LSTM(H, H)

    def __call__(self, x):
        for layer in (self.lstm1, self.lstm2, self.lstm3):
            x, _ = layer(x)
        return (x,)


class Predictor(nn.Module):
    """The prediction network of a transducer. Its layers are in nested dicts. The network calls the layers step by
    step and passes the states of all layers to the next step.

    The original program has an error, which `right=False` reproduces. The program passes x as [T, B, D] to layers of
    `mlx.nn`, which treat the second-to-last axis as time. With several sequences per batch, these layers therefore
    run along the batch axis.
    """

    def __init__(self, right=True):
        super().__init__()
        self.prediction = {"dec_rnn": {"lstm": [nn.LSTM(D, H), nn.LSTM(H, H)]}}
        self.right = right

    def __call__(self, x):
        layers = self.prediction["dec_rnn"]["lstm"]
        states, outputs = [(None, None)] * len(layers), []
        for t in range(x.shape[1]):
            y, new = x[:, t : t + 1] if self.right else mx.swapaxes(x[:, t : t + 1], 0, 1), []
            for layer, state in zip(layers, states, strict=True):
                y, cell = layer(y, *state)
                new.append((y[..., -1, :], cell[..., -1, :]))
            states = new
            outputs.append(y if self.right else mx.swapaxes(y, 0, 1))
        return mx.concatenate(outputs, axis=1), *(mx.stack(each) for each in zip(*states, strict=True))


def predicted(model, x):
    layers, state, outputs = model.prediction["dec_rnn"]["lstm"], None, []
    for t in range(x.shape[1]):
        y, state = stack(layers, x[:, t : t + 1], state)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), *state


class BLSTM(nn.Module):
    """A music separator: one list of layers per direction, reversed sequences, and a skip connection around both
    layers."""

    def __init__(self):
        super().__init__()
        self.forward_lstms, self.backward_lstms = ([nn.LSTM(D, H), nn.LSTM(2 * H, H)] for _ in range(2))
        self.linear = nn.Linear(2 * H, D)

    def __call__(self, x):
        y = x
        for ahead, back in zip(self.forward_lstms, self.backward_lstms, strict=True):
            y = mx.concatenate([ahead(y)[0], back(y[:, ::-1])[0][:, ::-1]], axis=-1)
        return (self.linear(y) + x,)


class StreamableLSTM(nn.Module):
    """A music generator: its sequences have channels before time, and a skip connection goes around the layers."""

    def __init__(self):
        super().__init__()
        self.lstm = [nn.LSTM(D, D), nn.LSTM(D, D)]

    def __call__(self, x):
        y = mx.swapaxes(mx.swapaxes(x, 1, 2), 1, 2)
        for layer in self.lstm:
            y, _ = layer(y)
        return (mx.swapaxes(y + x, 1, 2),)


class SqueezedGRU(nn.Module):
    """A noise filter: GRU layers between two dense layers. It also returns the last states."""

    def __init__(self):
        super().__init__()
        self.linear_in, self.linear_out = nn.Linear(D, H), nn.Linear(H, D)
        self.gru = {"layers": [nn.GRU(H, H), nn.GRU(H, H, bias=False), nn.GRU(H, H)]}

    def __call__(self, x):
        y, last = nn.relu(self.linear_in(x)), []
        for layer in self.gru["layers"]:
            y = layer(y)
            last.append(y[:, -1])
        return self.linear_out(y) + x, mx.stack(last)


def squeezed(model, x):
    y, h_n = stack(model.gru["layers"], nn.relu(model.linear_in(x)))
    return model.linear_out(y) + x, h_n


class Detector(nn.Module):
    """A voice detector: one layer runs over chunks of two steps. Both states are in one array [2, B, H]."""

    def __init__(self):
        super().__init__()
        self.decoder = {"rnn": nn.LSTM(D, H), "head": nn.Linear(H, 1)}

    def __call__(self, x):
        state, outputs = mx.zeros((2, x.shape[0], H)), []
        for t in range(0, x.shape[1], 2):
            hidden, cell = self.decoder["rnn"](x[:, t : t + 2], state[0], state[1])
            state = mx.stack([hidden[:, -1], cell[:, -1]])
            outputs.append(mx.sigmoid(self.decoder["head"](nn.relu(hidden))).mean(axis=1))
        return mx.concatenate(outputs, axis=-1), state


def detected(model, x):
    state, outputs = None, []
    for t in range(0, x.shape[1], 2):
        hidden, state = stack([model.decoder["rnn"]], x[:, t : t + 2], state)
        outputs.append(mx.sigmoid(model.decoder["head"](nn.relu(hidden))).mean(axis=1))
    return mx.concatenate(outputs, axis=-1), mx.concatenate(state)


class Policy(nn.Module):
    """An actor and a critic that share one GRU layer. Both are nested lists of the form [[shared GRU], linear
    layer]."""

    def __init__(self):
        super().__init__()
        memory = nn.GRU(D, H)
        self.actor, self.critic = [[memory], nn.Linear(H, 2)], [[memory], nn.Linear(H, 1)]

    def __call__(self, x):
        return tuple(head(layers[0](x)) for layers, head in (self.actor, self.critic))


class WorldModel(nn.Module):
    """A plain RNN layer, then a GRU layer that is called step by step. Another RNN layer is a private attribute,
    which MLX leaves out of weight files."""

    def __init__(self):
        super().__init__()
        self.reader, self.belief = nn.RNN(D, H, nonlinearity=nn.relu), nn.GRU(H, H, bias=False)
        self._old_reader = nn.RNN(D, H, False)

    def __call__(self, x):
        y, belief = self.reader(x) - self._old_reader(x), mx.zeros((x.shape[0], H))
        beliefs = []
        for t in range(x.shape[1]):
            belief = self.belief(y[:, t : t + 1], belief)[:, -1]
            beliefs.append(belief)
        return y, mx.stack(beliefs, axis=1)


def believed(model, x):
    y = stack([model.reader], x)[0] - stack([model._old_reader], x)[0]
    return y, stack([model.belief], y)[0]


class Tagger(nn.Module):
    """A bidirectional tagger of words that runs over one sentence at a time, since sentences differ in length."""

    def __init__(self):
        super().__init__()
        self.fwd, self.bwd = nn.LSTM(D, H), nn.LSTM(D, H)

    def __call__(self, x):
        rows = []
        for item, length in zip(x, LENGTHS, strict=False):
            words = item[:length]
            found = mx.concatenate([self.fwd(words)[0], self.bwd(words[::-1])[0][::-1]], axis=-1)
            rows.append(mx.pad(found, ((0, len(item) - length), (0, 0))))
        return (mx.stack(rows),)


class OwnLSTM(nn.Module):
    """An LSTM layer written without `mlx.nn.LSTM`, but with its parameter names. It runs step by step."""

    def __init__(self, D):
        super().__init__()
        self.hidden_size = H
        scale = H**-0.5
        self.Wx = mx.random.uniform(-scale, scale, (4 * H, D))
        self.Wh = mx.random.uniform(-scale, scale, (4 * H, H))
        self.bias = mx.random.uniform(-scale, scale, (4 * H,))

    def __call__(self, x):
        x, hidden, cell, all_hidden = x @ self.Wx.T + self.bias, mx.zeros(H), mx.zeros(H), []
        for t in range(x.shape[1]):
            i, f, g, o = mx.split(x[:, t] + hidden @ self.Wh.T, 4, axis=-1)
            cell = mx.sigmoid(f) * cell + mx.sigmoid(i) * mx.tanh(g)
            hidden = mx.sigmoid(o) * mx.tanh(cell)
            all_hidden.append(hidden)
        return mx.stack(all_hidden, axis=1)


class Codec(nn.Module):
    """An audio codec with two layers of class `OwnLSTM` and a skip connection."""

    def __init__(self):
        super().__init__()
        self.inner, self.lstm = nn.Linear(D, H), [OwnLSTM(H), OwnLSTM(H)]

    def __call__(self, x):
        x = y = self.inner(x)
        for layer in self.lstm:
            y = layer(y)
        return (y + x,)


class TwoBiases(nn.Module):
    """A bidirectional LSTM layer of a speech synthesizer, written without `mlx.nn.LSTM`. Each direction has two biases.
    As in torch, the attribute `bias` says whether there are any."""

    def __init__(self):
        super().__init__()
        self.bias = True
        for way in ("forward", "backward"):
            shapes = {"Wx": (4 * H, D), "Wh": (4 * H, H), "bias_ih": (4 * H,), "bias_hh": (4 * H,)}
            for name, shape in shapes.items():
                self[f"{name}_{way}"] = mx.random.uniform(-0.5, 0.5, shape)

    def one_way(self, x, way):
        layer = OwnLSTM(D)
        layer.update(self.arrays(way))
        return layer(x)

    def __call__(self, x):
        return (mx.concatenate([self.one_way(x, "forward"), self.one_way(x[:, ::-1], "backward")[:, ::-1]], axis=-1),)

    def arrays(self, way):
        bias = self[f"bias_ih_{way}"] + self[f"bias_hh_{way}"]
        return {"Wx": self[f"Wx_{way}"], "Wh": self[f"Wh_{way}"], "bias": bias}


CLIENTS = {
    "codec of mlx.nn": (StackedLSTM, stacked),
    "voice encoder": (VoiceEncoder, lambda model, x: (model.embed(stack(model.lstm.layers, x)[1][0]),)),
    "layers by name": (ByName, lambda model, x: stack([model.lstm1, model.lstm2, model.lstm3], x)[:1]),
    "predictor": (Predictor, predicted),
    "separator": (
        BLSTM,
        lambda model, x: (model.linear(stack(model.forward_lstms, x, reverse=model.backward_lstms)[0]) + x,),
    ),
    "channels first": (StreamableLSTM, lambda model, x: (mx.swapaxes(stack(model.lstm, x)[0] + x, 1, 2),)),
    "noise filter": (SqueezedGRU, squeezed),
    "voice detector": (Detector, detected),
    "policy": (
        Policy,
        lambda model, x: tuple(head(stack(layers, x)[0]) for layers, head in (model.actor, model.critic)),
    ),
    "world model": (WorldModel, believed),
    "tagger": (
        Tagger,
        lambda model, x: stack([model.fwd], x, reverse=[model.bwd], lengths=LENGTHS[: len(x)])[:1],
    ),
    "codec of its own": (Codec, lambda model, x: (stack(model.lstm, model.inner(x))[0] + model.inner(x),)),
    "two biases": (
        TwoBiases,
        lambda model, x: stack([model.arrays("forward")], x, reverse=[model.arrays("backward")])[:1],
    ),
}
OWN = ("codec of its own", "two biases")
"""Names of the models in this file that use no recurrent layer of `mlx.nn`."""


def assert_same(got, rounded, exact):
    """Check that each result in `got` is about as close to the float64 result `exact` as `rounded`, which is the
    same formula computed in the dtype of `got`. The error may be twice that of `rounded`, plus 4 eps times the
    largest exact value, which is taken as at least 1 because terms of size 1 may cancel in a sum."""
    assert got.keys() == rounded.keys() == exact.keys()
    for name, value in exact.items():
        assert got[name].dtype == rounded[name].dtype, name
        floor = 4 * float_of(got[name].dtype).eps * max(1, largest(value))
        assert_within(name, got[name], value, 2 * largest(rounded[name].astype(np.float64) - value) + floor)


def assert_by_differences(loss, values, rng):
    """Check the gradients of `loss`, a scalar function of trees of float64 arrays, against central differences in
    three random directions. The difference between results of a coarse and of a fine step bounds the error of the
    fine one, because the error falls with the square of the step."""
    gradients = mx.grad(lambda values: loss(*values))(values)
    for _ in range(3):
        ways = tree_map(lambda array: mx.array(rng.normal(size=array.shape), mx.float64), values)
        products = tree_map(lambda gradient, way: (gradient * way).sum(), gradients, ways)
        slope = sum(product.item() for _, product in tree_flatten(products))
        coarse, fine = (
            sum(
                sign * loss(*tree_map(lambda array, way, s=sign * step: array + s * way, values, ways)).item()
                for sign in (1, -1)
            )
            / (2 * step)
            for step in (2e-4, 1e-4)
        )
        assert abs(slope) > 1e-3
        # The coarse step is twice the fine step, so its error is about 4 times as large. Hence `coarse - fine` is
        # about 3 times the error of `fine`.
        assert abs(fine - slope) <= abs(coarse - fine) + 1e-9 * abs(slope), (slope, coarse, fine)
