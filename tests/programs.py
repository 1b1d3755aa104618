"""Thirteen small models whose recurrent parts are like those of real programs. Each model has two methods that
compute the same result from the same parameters: `before` has the lines that such a program writes by hand, and
`after` uses mlx-lstm.

`python tests/programs.py` prints the number of lines of both methods.
"""

import inspect
import textwrap

import mlx.core as mx
import mlx.nn as nn

import mlx_lstm.torch
from mlx_lstm import lstm
from mlx_lstm.nn import stack

B, T, D, H = 3, 6, 4, 4
LENGTHS = mx.array([6, 2, 5])


def holder(layer):
    """Return an `nn.Module` that has the parameters of `layer` but not its methods, like a program's own class."""
    module = nn.Module()
    for name, array in layer.parameters().items():
        module[name] = array
    return module


class Speakers(nn.Module):
    """Speaker segmentation: a bidirectional LSTM of three layers with torch's parameter names."""

    def __init__(self):
        super().__init__()
        self.lstm = holder(mlx_lstm.torch.LSTM(D, H, 3, bidirectional=True))

    def before(self, x):
        for n in range(3):
            outputs = []
            for way, turn in (("", 1), ("_reverse", -1)):
                cell = nn.LSTM(x.shape[-1], H)
                cell.Wx, cell.Wh = self.lstm[f"weight_ih_l{n}{way}"], self.lstm[f"weight_hh_l{n}{way}"]
                cell.bias = self.lstm[f"bias_ih_l{n}{way}"] + self.lstm[f"bias_hh_l{n}{way}"]
                outputs.append(cell(x[:, ::turn])[0][:, ::turn])
            x = mx.concatenate(outputs, axis=-1)
        return x

    def after(self, x):
        return stack([self.lstm], x)[0]


class Pitch(nn.Module):
    """Pitch estimation: a bidirectional GRU with torch's parameter names and two biases per direction."""

    def __init__(self):
        super().__init__()
        self.gru = holder(mlx_lstm.torch.GRU(D, H, bidirectional=True))

    def before(self, x):
        outputs = []
        for way, turn in (("", 1), ("_reverse", -1)):
            Wx, Wh, b, c = (self.gru[f"{name}_l0{way}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            cell = nn.GRU(D, H)
            cell.Wx, cell.Wh, cell.bhn = Wx, Wh, c[2 * H :]
            cell.b = b + mx.concatenate([c[: 2 * H], mx.zeros(H)])
            outputs.append(cell(x[:, ::turn])[:, ::turn])
        return mx.concatenate(outputs, axis=-1)

    def after(self, x):
        return stack([self.gru], x)[0]


class Encoder(nn.Module):
    """The encoder of a variational autoencoder: a linear layer reads the last states of two LSTM layers."""

    def __init__(self):
        super().__init__()
        self.layers, self.mean = [nn.LSTM(D, H), nn.LSTM(H, H)], nn.Linear(2 * H, 2)

    def before(self, x):
        states = []
        for layer in self.layers:
            x, _ = layer(x)
            states.append(x[:, -1])
        return self.mean(mx.concatenate(states, axis=-1))

    def after(self, x):
        _, (h_n, _) = stack(self.layers, x)
        return self.mean(mx.concatenate(list(h_n), axis=-1))


class Voice(nn.Module):
    """Speech synthesis: LSTM layers with a layer normalization and a residual connection between them."""

    def __init__(self):
        super().__init__()
        self.layers, self.norms = [nn.LSTM(D, H) for _ in range(3)], [nn.LayerNorm(H) for _ in range(2)]

    def before(self, x):
        for n, layer in enumerate(self.layers):
            h, _ = layer(x)
            x = h + self.norms[n](h) if n < 2 else h
        return x

    def after(self, x):
        return stack(self.layers, x, between=lambda n, h: h + self.norms[n](h))[0]


class Transducer(nn.Module):
    """The prediction network of a transducer: it runs one time step per call and passes the states of all layers on."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.LSTM(D, H), nn.LSTM(H, H)]

    def before(self, x):
        outputs, h, c = [], [None] * 2, [None] * 2
        for t in range(T):
            y = x[:, t : t + 1]
            for n, layer in enumerate(self.layers):
                hidden, cell = layer(y, h[n], c[n])
                y, h[n], c[n] = hidden, hidden[:, -1], cell[:, -1]
            outputs.append(y)
        return mx.concatenate(outputs, axis=1)

    def after(self, x):
        outputs, state = [], None
        for t in range(T):
            y, state = stack(self.layers, x[:, t : t + 1], state)
            outputs.append(y)
        return mx.concatenate(outputs, axis=1)


class Groups(nn.Module):
    """Noise reduction: each layer is two GRUs, one for each half of the features. The features are shuffled between
    the layers."""

    def __init__(self):
        super().__init__()
        self.grus = [[nn.GRU(D // 2, H // 2) for _ in range(2)] for _ in range(2)]

    def shuffle(self, n, x):
        return x.reshape(*x.shape[:2], -1, 2).swapaxes(2, 3).reshape(x.shape)

    def before(self, x):
        for n, groups in enumerate(self.grus):
            parts = mx.split(x, 2, axis=-1)
            outputs = [gru(part) for gru, part in zip(groups, parts, strict=True)]
            x = mx.concatenate(outputs, axis=-1)
            if n < 1:
                x = self.shuffle(n, x)
        return x

    def after(self, x):
        return stack([gru for groups in self.grus for gru in groups], x, groups=2, between=self.shuffle)[0]


class Squeezed(nn.Module):
    """Noise reduction: two GRU layers between two linear layers, with a skip connection around all of them. The
    model also returns the last states of the GRU layers."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(D, H), nn.Linear(H, D)
        self.layers = [nn.GRU(H, H), nn.GRU(H, H)]

    def before(self, x):
        y, states = nn.relu(self.inner(x)), []
        for layer in self.layers:
            y = layer(y)
            states.append(y[:, -1])
        return nn.relu(self.outer(y)) + x, mx.stack(states)

    def after(self, x):
        y, states = stack(self.layers, nn.relu(self.inner(x)))
        return nn.relu(self.outer(y)) + x, states


class Separator(nn.Module):
    """Source separation: two bidirectional LSTM layers with a layer normalization between them."""

    def __init__(self):
        super().__init__()
        self.ahead, self.back = ([nn.LSTM(D, H // 2), nn.LSTM(H, H // 2)] for _ in range(2))
        self.norm = nn.LayerNorm(H)

    def before(self, x):
        for n, (ahead, back) in enumerate(zip(self.ahead, self.back, strict=True)):
            hidden, _ = ahead(x)
            backward, _ = back(x[:, ::-1])
            x = mx.concatenate([hidden, backward[:, ::-1]], axis=-1)
            if n < 1:
                x = self.norm(x)
        return x

    def after(self, x):
        return stack(self.ahead, x, reverse=self.back, between=lambda n, x: self.norm(x))[0]


class Classifier(nn.Module):
    """A classifier of padded texts. A linear layer reads the sum of the last states of both directions. The padding has
    no effect."""

    def __init__(self):
        super().__init__()
        self.ahead, self.back, self.head = nn.GRU(D, H), nn.GRU(D, H), nn.Linear(H, 2)

    def before(self, x):
        rows = []
        for row, length in zip(x, LENGTHS.tolist(), strict=True):
            real = row[None, :length]
            rows.append(self.ahead(real)[0, -1] + self.back(real[:, ::-1])[0, -1])
        return self.head(mx.stack(rows))

    def after(self, x):
        return self.head(stack([self.ahead], x, reverse=[self.back], lengths=LENGTHS)[1].sum(axis=0))


class HandWritten(nn.Module):
    """A classifier with a hand-written LSTM. `before` computes the time steps in a loop, `after` calls `lstm` instead.
    `step` computes one time step. From `step`, `recognise` finds the call of `lstm` in `after`."""

    def __init__(self):
        super().__init__()
        self.gates, self.head = nn.Linear(D + H, 4 * H), nn.Linear(H, 2)

    def step(self, x, state):
        h, c = state
        i, f, o, g = mx.split(self.gates(mx.concatenate([x, h], axis=-1)), 4, axis=-1)
        c = mx.sigmoid(f) * c + mx.sigmoid(i) * mx.tanh(g)
        return mx.sigmoid(o) * mx.tanh(c), c

    def before(self, x):
        h = c = mx.zeros((x.shape[0], H))
        for t in range(T):
            i, f, o, g = mx.split(self.gates(mx.concatenate([x[:, t], h], axis=-1)), 4, axis=-1)
            c = mx.sigmoid(f) * c + mx.sigmoid(i) * mx.tanh(g)
            h = mx.sigmoid(o) * mx.tanh(c)
        return self.head(h)

    def after(self, x):
        W, x = self.gates.weight, mx.swapaxes(x, 0, 1)
        return self.head(lstm(x, W[:, :D], W[:, D:], b=self.gates.bias, gate_order="ifog").hT)


class LanguageModel(nn.Module):
    """A language model: dropout between the LSTM layers. The states pass from one window of the text to the next."""

    def __init__(self):
        super().__init__()
        self.layers, self.dropout = [nn.LSTM(D, H), nn.LSTM(H, H)], nn.Dropout(0.5)
        self.eval()

    def before(self, x):
        state, outputs = [(None, None)] * 2, []
        for window in mx.split(x, 2, axis=1):
            for n, layer in enumerate(self.layers):
                window, cell = layer(window, *state[n])
                state[n] = window[:, -1], cell[:, -1]
                window = self.dropout(window) if n < 1 else window
            outputs.append(window)
        return mx.concatenate(outputs, axis=1)

    def after(self, x):
        state, outputs = None, []
        for window in mx.split(x, 2, axis=1):
            y, state = stack(self.layers, window, state, between=lambda n, y: self.dropout(y))
            outputs.append(y)
        return mx.concatenate(outputs, axis=1)


class Spans(nn.Module):
    """Extraction of names from padded texts: an LSTM in both directions, whose output is 0 in the padding."""

    def __init__(self):
        super().__init__()
        self.ahead, self.back = nn.LSTM(D, H), nn.LSTM(D, H)

    def before(self, x):
        rows = []
        for row, length in zip(x, LENGTHS.tolist(), strict=True):
            real = row[None, :length]
            hidden, _ = self.ahead(real)
            backward, _ = self.back(real[:, ::-1])
            both = mx.concatenate([hidden, backward[:, ::-1]], axis=-1)[0]
            rows.append(mx.pad(both, ((0, T - length), (0, 0))))
        return mx.stack(rows)

    def after(self, x):
        return stack([self.ahead], x, reverse=[self.back], lengths=LENGTHS)[0]


class Music(nn.Module):
    """Source separation: two lists of layers, one for each direction, and a skip connection."""

    def __init__(self):
        super().__init__()
        self.forward_lstms, self.backward_lstms = ([nn.LSTM(d, H) for d in (D, 2 * H)] for _ in range(2))
        self.linear = nn.Linear(2 * H, D)

    def before(self, x):
        y = x
        for ahead, back in zip(self.forward_lstms, self.backward_lstms, strict=True):
            hidden, _ = ahead(y)
            backward, _ = back(y[:, ::-1])
            y = mx.concatenate([hidden, backward[:, ::-1]], axis=-1)
        return self.linear(y) + x

    def after(self, x):
        return self.linear(stack(self.forward_lstms, x, reverse=self.backward_lstms)[0]) + x


PROGRAMS = (Speakers, Pitch, Encoder, Voice, Transducer, Groups, Squeezed, Separator, Classifier, HandWritten)
PROGRAMS += (LanguageModel, Spans, Music)


def lines_of(method):
    """Return the number of lines of a method's body."""
    return len(textwrap.dedent(inspect.getsource(method)).strip().splitlines()) - 1


def main():
    """Print two numbers for each program: the lines of its method `before` (written by hand) and of `after` (with
    mlx-lstm)."""
    for program in PROGRAMS:
        print(f"{program.__name__:14} {lines_of(program.before):3} -> {lines_of(program.after)}")
    before, after = (sum(lines_of(getattr(each, way)) for each in PROGRAMS) for way in ("before", "after"))
    print(f"{'all':14} {before:3} -> {after}")


if __name__ == "__main__":
    main()
