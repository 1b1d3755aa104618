"""Tests of `mlx_lstm.recognise`. It returns the source of a call of mlx-lstm that equals a recurrent cell written by
hand, or None if no call equals the cell."""

import re
import warnings
from collections import namedtuple

import mlx.core as mx
import mlx.nn as nn
import near_cells
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lstm
from mlx_lstm import recognise
from mlx_lstm.recurrence import _recognise as recognition

D, H = 3, 5

NEAR = 1e-6
"""The largest error of a right claim, relative to 1 + the value: float32 rounds to 6e-8, about ten times in a step. The
reference itself has 1e-15, MLX's sigmoid in float64 about 1e-7."""


def drawn(*shape):
    return mx.random.uniform(-0.6, 0.6, shape)


class Cell(nn.Module):
    """A module whose attributes are the arrays and layers passed to the constructor."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def lstm_of(gates, state, bias=0.0):
    i, f, g, o = gates
    c = mx.sigmoid(f + bias) * state[1] + mx.sigmoid(i) * mx.tanh(g)
    return mx.sigmoid(o) * mx.tanh(c), c


# Each of the next functions writes a cell by hand, in another way. It returns (module with the parameters, step
# function, source that `recognise` must return).


def joined_weights():
    """Return an LSTM cell in which one linear layer reads x and h side by side, in the gate order i, f, o, g."""
    m = Cell(linear=nn.Linear(D + H, 4 * H))

    def step(x, state):
        i, f, o, g = mx.split(m.linear(mx.concatenate([x, state[0]], axis=-1)), 4, axis=-1)
        return lstm_of((i, f, g, o), state)

    return m, step, "lstm(x, linear.weight[:, :3], linear.weight[:, 3:], b=linear.bias, gate_order='ifog')"


def h_first():
    """Return an LSTM cell with one matrix, which reads h before x. The gate order is f, i, g, o, and 1 is added to
    the argument of the forget gate."""
    m = Cell(kernel=drawn(H + D, 4 * H), bias=drawn(4 * H))

    def step(x, state):
        z = mx.concatenate([state[0], x], axis=-1) @ m.kernel + m.bias
        f, i, g, o = mx.split(z, 4, axis=-1)
        return lstm_of((i, f, g, o), state, 1.0)

    return m, step, "lstm(x, kernel.T[:, 5:], kernel.T[:, :5], b=bias, gate_order='figo', forget_bias=1.0)"


def torch_lstm():
    """Return an LSTM cell with torch's parameter names and two biases."""
    m = Cell(weight_ih=drawn(4 * H, D), weight_hh=drawn(4 * H, H), bias_ih=drawn(4 * H), bias_hh=drawn(4 * H))

    def step(x, state):
        z = x @ m.weight_ih.T + m.bias_ih + state[0] @ m.weight_hh.T + m.bias_hh
        return lstm_of(mx.split(z, 4, axis=-1), state)

    return m, step, "lstm(x, weight_ih, weight_hh, b=bias_ih + bias_hh)"


def keras_lstm():
    """Return an LSTM cell with Keras' parameter names and transposed matrices."""
    m = Cell(kernel=drawn(D, 4 * H), recurrent_kernel=drawn(H, 4 * H), bias=drawn(4 * H))

    def step(x, state):
        return lstm_of(mx.split(x @ m.kernel + state[0] @ m.recurrent_kernel + m.bias, 4, axis=-1), state)

    return m, step, "lstm(x, kernel.T, recurrent_kernel.T, b=bias)"


def linear_per_gate():
    """Return an LSTM cell in which each gate has its own linear layer of x, and its own linear layer of h without a
    bias."""
    parts = {f"x_{gate}": nn.Linear(D, H) for gate in "ofgi"} | {f"h_{gate}": nn.Linear(H, H, False) for gate in "ofgi"}
    m = Cell(**parts)

    def step(x, state):
        return lstm_of([m[f"x_{gate}"](x) + m[f"h_{gate}"](state[0]) for gate in "ifgo"], state)

    joined = [f"mx.concatenate([{', '.join(f'{way}_{gate}.weight' for gate in 'ifgo')}])" for way in "xh"]
    bias = f"b=mx.concatenate([{', '.join(f'x_{gate}.bias' for gate in 'ifgo')}])"
    return m, step, f"lstm(x, {', '.join(joined)}, {bias})"


def no_bias_in_a_list():
    """Return an LSTM cell without a bias, whose layers are in a list. The gate order is g, o, i, f."""
    m = Cell(layers=[nn.Linear(D, 4 * H, False), nn.Linear(H, 4 * H, False)])

    def step(x, state):
        g, o, i, f = mx.split(m.layers[0](x) + m.layers[1](state[0]), 4, axis=-1)
        return lstm_of((i, f, g, o), state)

    return m, step, "lstm(x, layers[0].weight, layers[1].weight, gate_order='goif')"


def peeping():
    """Return an LSTM cell whose three peepholes are rows of one array. The output gate reads the new c."""
    m = Cell(W=drawn(4 * H, D), U=drawn(4 * H, H), b=drawn(4 * H), p=drawn(3, H))

    def step(x, state):
        i, f, g, o = mx.split(x @ m.W.T + state[0] @ m.U.T + m.b, 4, axis=-1)
        c = mx.sigmoid(f + m.p[1] * state[1]) * state[1] + mx.sigmoid(i + m.p[0] * state[1]) * mx.tanh(g)
        return mx.sigmoid(o + m.p[2] * c) * mx.tanh(c), c

    return m, step, "lstm(x, W, U, b=b, peephole=mx.concatenate([p[0], p[1], mx.zeros(5), p[2]]))"


def torch_gru():
    """Return a GRU cell with torch's parameter names, which applies the reset gate after the product."""
    m = Cell(weight_ih=drawn(3 * H, D), weight_hh=drawn(3 * H, H), bias_ih=drawn(3 * H), bias_hh=drawn(3 * H))

    def step(x, h):
        xr, xz, xn = mx.split(x @ m.weight_ih.T + m.bias_ih, 3, axis=-1)
        hr, hz, hn = mx.split(h @ m.weight_hh.T + m.bias_hh, 3, axis=-1)
        z = mx.sigmoid(xz + hz)
        return (1 - z) * mx.tanh(xn + mx.sigmoid(xr + hr) * hn) + z * h

    b = "b=mx.concatenate([bias_ih[0:5] + bias_hh[0:5], bias_ih[5:10] + bias_hh[5:10], bias_ih[10:15]])"
    return m, step, f"gru(x, weight_ih, weight_hh, {b}, bhn=bias_hh[10:15])"


def keras_gru():
    """Return a GRU cell with Keras' parameter names and gate order, which applies the reset gate after the product.
    Both biases are rows of one array."""
    m = Cell(kernel=drawn(D, 3 * H), recurrent_kernel=drawn(H, 3 * H), bias=drawn(2, 3 * H))

    def step(x, h):
        xz, xr, xn = mx.split(x @ m.kernel + m.bias[0], 3, axis=-1)
        hz, hr, hn = mx.split(h @ m.recurrent_kernel + m.bias[1], 3, axis=-1)
        z = mx.sigmoid(xz + hz)
        return z * h + (1 - z) * mx.tanh(xn + mx.sigmoid(xr + hr) * hn)

    b = "b=mx.concatenate([bias[0][0:5] + bias[1][0:5], bias[0][5:10] + bias[1][5:10], bias[0][10:15]])"
    return m, step, f"gru(x, kernel.T, recurrent_kernel.T, {b}, bhn=bias[1][10:15], gate_order='zrn')"


def gru_before():
    """Return a GRU cell as in a paper: the reset gate is applied before the product, and the gate z multiplies the
    candidate instead of the old h. The candidate has its own linear layer."""
    m = Cell(gates=nn.Linear(D + H, 2 * H), candidate=nn.Linear(D + H, H))

    def step(x, h):
        z, r = mx.split(mx.sigmoid(m.gates(mx.concatenate([x, h], axis=-1))), 2, axis=-1)
        return (1 - z) * h + z * mx.tanh(m.candidate(mx.concatenate([x, r * h], axis=-1)))

    rows = ["gates.weight[5:10, {0}]", "gates.weight[0:5, {0}]", "candidate.weight[:, {0}]"]
    joined = [f"mx.concatenate([{', '.join(rows).format(columns)}])" for columns in (":3", "3:")]
    b = "b=mx.concatenate([gates.bias[5:10], gates.bias[0:5], candidate.bias])"
    return m, step, f"gru(x, {', '.join(joined)}, {b}, reset='before', flip_z=True)"


def elman():
    """Return a plain RNN cell with ReLU and two linear layers with biases."""
    m = Cell(i2h=nn.Linear(D, H), h2h=nn.Linear(H, H))

    def step(x, h):
        return nn.relu(m.i2h(x) + m.h2h(h))

    return m, step, "rnn(x, i2h.weight, h2h.weight, b=i2h.bias + h2h.bias, activation='relu')"


def stacked_matrices():
    """Return an LSTM cell in bfloat16 with one matrix per gate, stacked in arrays of three axes. Another layer of
    the module is not part of the cell."""
    m = Cell(W=drawn(4, D, H), U=drawn(4, H, H), b=drawn(4, H), head=nn.Linear(H, 2))
    m.set_dtype(mx.bfloat16)

    def step(x, state):
        return lstm_of([x @ m.W[k] + state[0] @ m.U[k] + m.b[k] for k in (1, 0, 2, 3)], state)

    order = (1, 0, 2, 3)
    joined = [f"mx.concatenate([{', '.join(f'{name}[{k}].T' for k in order)}])" for name in "WU"]
    return m, step, f"lstm(x, {', '.join(joined)}, b=mx.concatenate([{', '.join(f'b[{k}]' for k in order)}]))"


CELLS = [joined_weights, h_first, torch_lstm, no_bias_in_a_list, peeping]
CELLS += [keras_gru, gru_before, elman, stacked_matrices]
ALIKE = [keras_lstm, linear_per_gate, torch_gru]  # each differs little from cells in CELLS and FORMS
CELLS += [pytest.param(cell, marks=pytest.mark.slow) for cell in ALIKE]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_finds_the_call_that_equals_a_cell_written_by_hand(cell):
    """`recognise` returns the expected source of a call and leaves the module's parameters as they are. The
    evaluated call, with initial states, gives the same h over a sequence as a loop over the cell's steps."""
    mx.random.seed(1)
    module, step, expected = cell()
    before = [array for _, array in tree_flatten(module.parameters())]
    line = recognise(module, step, D, H)
    assert line == expected
    after = [array for _, array in tree_flatten(module.parameters())]
    assert len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))

    module.set_dtype(mx.float32)
    pair = line.startswith("lstm")
    x, *first = (mx.random.normal(shape) for shape in [(6, 2, D), *[(2, H)] * (1 + pair)])
    state, steps = tuple(first) if pair else first[0], []
    for x_t in x:
        state = step(x_t, state)
        steps.append(state[0] if pair else state)
    names = {"x": x, "mx": mx, "h0": first[0], "c0": first[-1]} | vars(mlx_lstm) | dict(module)
    got = eval(line[:-1] + (", h0=h0, c0=c0)" if pair else ", h0=h0)"), names).h
    np.testing.assert_allclose(np.array(got), np.array(mx.stack(steps)), rtol=0, atol=2e-6)


# The next functions write cells in forms that are common in public programs. Each returns (module, step, plain, text):
# `plain` is the step as a function (x, *states) -> list of new states, and `text` is a part of the returned line.


def torch_like():
    """Return an LSTM cell in the style of torch's tutorials: two linear layers with biases, `return out, (h, c)`."""
    m = Cell(i2h=nn.Linear(D, 4 * H), h2h=nn.Linear(H, 4 * H))

    def step(x, state):
        h, c = state
        i, f, g, o = mx.split(m.i2h(x) + m.h2h(h), 4, axis=1)
        c_next = mx.sigmoid(f) * c + mx.sigmoid(i) * mx.tanh(g)
        h_next = mx.sigmoid(o) * mx.tanh(c_next)
        return h_next, (h_next, c_next)

    return m, step, lambda x, h, c: list(step(x, (h, c))[1]), "b=i2h.bias + h2h.bias"


def flax_like():
    """Return an LSTM cell in the style of Flax: the carry (c, h) comes first, each gate has two dense layers."""
    m = Cell(
        **{f"i{gate}": nn.Linear(D, H, bias=False) for gate in "ifgo"},
        **{f"h{gate}": nn.Linear(H, H) for gate in "ifgo"},
    )

    def step(carry, inputs):
        c, h = carry
        i, f, o = (mx.sigmoid(m["i" + gate](inputs) + m["h" + gate](h)) for gate in "ifo")
        c = f * c + i * mx.tanh(m.ig(inputs) + m.hg(h))
        h = o * mx.tanh(c)
        return (c, h), h

    return m, step, lambda x, h, c: list(step((c, h), x)[0][::-1]), "[ii.weight, module['if'].weight"


def tensorflow_like():
    """Return an LSTM cell in the style of TensorFlow 1: one kernel, the order i, j, f, o, a forget bias of 1, the state
    (c, h) by names, `return out, state`."""
    m = Cell(kernel=drawn(D + H, 4 * H), bias=drawn(4 * H))

    def step(inputs, state):
        i, j, f, o = mx.split(mx.concatenate([inputs, state.h], 1) @ m.kernel + m.bias, 4, axis=1)
        new_c = state.c * mx.sigmoid(f + 1.0) + mx.sigmoid(i) * mx.tanh(j)
        new_h = mx.tanh(new_c) * mx.sigmoid(o)
        return new_h, type(state)(c=new_c, h=new_h)

    state = namedtuple("state", ["c", "h"])
    return m, step, lambda x, h, c: list(step(x, state(c, h))[1][::-1]), "gate_order='igfo', forget_bias=1.0"


def character_rnn():
    """Return a plain RNN of characters: it returns scores and h; the output matrix is not part of the recurrence."""
    m = Cell(Wxh=drawn(H, D), Whh=drawn(H, H), Why=drawn(7, H), bh=drawn(1, H), by=drawn(1, 7))

    def step(x, h):
        h = mx.tanh((m.Wxh @ x.T).T + (m.Whh @ h.T).T + m.bh)
        return h @ m.Why.T + m.by, h

    return m, step, lambda x, h: [step(x, h)[1]], "rnn(x, Wxh, Whh, b=bh[0])"


def haste_like():
    """Return a GRU cell in the style of haste: kernels of rows per input, the order z, r, g, two biases."""
    m = Cell(kernel=drawn(D, 3 * H), recurrent_kernel=drawn(H, 3 * H), bias=drawn(3 * H), recurrent_bias=drawn(3 * H))

    def step(x, h):
        v, q = x @ m.kernel + m.bias, h @ m.recurrent_kernel + m.recurrent_bias
        z, r = mx.sigmoid(v[:, :H] + q[:, :H]), mx.sigmoid(v[:, H : 2 * H] + q[:, H : 2 * H])
        g = mx.tanh(v[:, 2 * H :] + r * q[:, 2 * H :])
        return z * h + (1 - z) * g

    return m, step, lambda x, h: [step(x, h)], "bhn=recurrent_bias[10:15], gate_order='zrn'"


def mlx_like():
    """Return an LSTM cell in the style of MLX: the projected input by `addmm`, parameters Wx, Wh and bias."""
    m = Cell(Wx=drawn(4 * H, D), Wh=drawn(4 * H, H), bias=drawn(4 * H))

    def step(x, hidden, cell):
        ifgo = mx.addmm(mx.addmm(m.bias, x, m.Wx.T), hidden, m.Wh.T)
        i, f, g, o = mx.split(ifgo, 4, axis=-1)
        cell = mx.sigmoid(f) * cell + mx.sigmoid(i) * mx.tanh(g)
        return mx.sigmoid(o) * mx.tanh(cell), cell

    return m, step, lambda x, h, c: list(step(x, h, c)), "lstm(x, Wx, Wh, b=bias)"


def gru_of_a_paper():
    """Return a GRU cell with one matrix per gate and letter, whose z is the weight of the candidate."""
    m = Cell(
        **{f"W{g}": drawn(D, H) for g in "zrh"},
        **{f"U{g}": drawn(H, H) for g in "zrh"},
        **{f"b{g}": drawn(H) for g in "zrh"},
    )

    def step(x, h):
        z = mx.sigmoid(x @ m.Wz + h @ m.Uz + m.bz)
        r = mx.sigmoid(x @ m.Wr + h @ m.Ur + m.br)
        return h + z * (mx.tanh(x @ m.Wh + (r * h) @ m.Uh + m.bh) - h)

    return m, step, lambda x, h: [step(x, h)], "reset='before', flip_z=True"


def gru_without_a_recurrent_candidate():
    """Return a GRU cell whose candidate reads x only."""
    m = Cell(gate=nn.Linear(D + H, H), candidate=nn.Linear(D, H))

    def step(x, h):
        z = mx.sigmoid(m.gate(mx.concatenate([x, h], -1)))
        return z * h + (1 - z) * mx.tanh(m.candidate(x))

    return m, step, lambda x, h: [step(x, h)], "mx.zeros((5, 5)), gate.weight[:, 3:], mx.zeros((5, 5))"


def one_of_several_layers():
    """Return the second of two LSTM cells in a list, which a loop over the layers calls."""
    cells = [Cell(W=drawn(4 * H, width + H), b=drawn(4 * H)) for width in (7, D)]
    m = Cell(cells=cells)

    def run(cell, x, state):
        z = mx.concatenate([x, state[0]], axis=-1) @ cell.W.T + cell.b
        h, c = lstm_of(mx.split(z, 4, axis=-1), state)
        return h, (h, c)

    def step(x, state):
        return run(m.cells[1], x, state)

    return (
        m,
        step,
        lambda x, h, c: list(step(x, (h, c))[1]),
        "lstm(x, cells[1].W[:, :3], cells[1].W[:, 3:], b=cells[1].b)",
    )


class Called(nn.Module):
    """An LSTM cell as a module that is called, with one linear layer for three gates and one for the candidate."""

    def __init__(self):
        super().__init__()
        self.gates, self.candidate = nn.Linear(D + H, 3 * H), nn.Linear(D + H, H)

    def __call__(self, x, state):
        hx = mx.concatenate([state[0], x], axis=-1)
        f, i, o = mx.split(mx.sigmoid(self.gates(hx)), 3, axis=-1)
        c = f * state[1] + i * mx.tanh(self.candidate(hx))
        return o * mx.tanh(c), c


def a_called_module():
    """Return a module whose call is the step."""
    m = Called()
    return m, m, lambda x, h, c: list(m(x, (h, c))), "gates.weight[5:10, 5:]"


def dict_of_parameters():
    """Return an LSTM cell whose parameters are in a plain dict, one matrix per gate for both x and h."""
    p = {f"W{gate}": drawn(D + H, H) for gate in "fico"} | {f"b{gate}": drawn(1, H) for gate in "fico"}

    def step(x, h, c):
        z = mx.concatenate([h, x], axis=1)
        f, i, o = (1 / (1 + mx.exp(-(z @ p["W" + gate] + p["b" + gate]))) for gate in "fio")
        c = f * c + i * mx.tanh(z @ p["Wc"] + p["bc"])
        return o * mx.tanh(c), c

    return p, step, lambda x, h, c: list(step(x, h, c)), "params['Wf'].T[:, 5:]"


def dicts_in_a_module():
    """Return a plain RNN cell whose module has a dict in a list, and an array that is no parameter: MLX and `recognise`
    leave attributes alone whose names begin with an underscore."""
    m = Cell(layers=[{"w": {"in.x": drawn(H, D), "in.h": drawn(H, H)}}], _kept=mx.ones(H))

    def step(x, h):
        w = m.layers[0]["w"]
        h = mx.maximum(x @ w["in.x"].T + (h * m._kept) @ w["in.h"].T, 0)
        return h, h

    text = "rnn(x, layers[0]['w']['in.x'], layers[0]['w']['in.h'], activation='relu')"
    return m, step, lambda x, h: [step(x, h)[1]], text


def fused_gates():
    """Return an LSTM cell with peepholes on the old c, one sigmoid for three gates and a limit on c."""
    m = Cell(W=drawn(4 * H, D), U=drawn(4 * H, H), b=drawn(4 * H), peep=drawn(3 * H))

    def step(x, state):
        z = x @ m.W.T + state[0] @ m.U.T + m.b
        i, f, o = mx.split(mx.sigmoid(z[:, : 3 * H] + m.peep * mx.tile(state[1], (1, 3))), 3, axis=-1)
        c = f * state[1] + i * mx.tanh(z[:, 3 * H :])
        c = c + mx.stop_gradient(mx.clip(c, -3.3, 3.3) - c)
        return o * mx.tanh(c), (o * mx.tanh(c), c)

    return (
        m,
        step,
        lambda x, h, c: list(step(x, (h, c))[1]),
        "gate_order='ifog', cell_clip=3.3, output_peephole='previous'",
    )


FORMS = [flax_like, tensorflow_like, character_rnn, mlx_like, fused_gates, gru_without_a_recurrent_candidate]
FORMS += [one_of_several_layers, a_called_module, dict_of_parameters, dicts_in_a_module]
FORMS += [pytest.param(form, marks=pytest.mark.slow) for form in (torch_like, haste_like, gru_of_a_paper)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_finds_cells_in_the_forms_of_public_programs(form):
    """`recognise` finds the call, and the call evaluated in NumPy with formulas of the tests gives the cell's states at
    all sizes of numbers."""
    module, step, plain, text = form()
    line = recognise(module, step, D, H)
    assert text in line
    assert near_cells.worst(line, near_cells.Case(module, step, plain, text), D, H) < NEAR


def test_the_line_names_the_module():
    module, step, expected = joined_weights()
    assert recognise(module, step, D, H, name="self.cell") == expected.replace("linear", "self.cell.linear")


def test_as_many_features_as_units():
    """`recognise` finds the call if D = H. In this case shapes alone cannot distinguish the matrix of x from that of
    h, nor a matrix from its transpose."""
    m = Cell(one=drawn(4 * H, H), other=drawn(H, 4 * H), b=drawn(4 * H))

    def step(x, state):
        return lstm_of(mx.split(x @ m.other + state[0] @ m.one.T + m.b, 4, axis=-1), state)

    assert recognise(m, step, H, H) == "lstm(x, other.T, one, b=b)"


def coupled():
    """Return an LSTM cell whose input gate is 1 minus its forget gate."""
    m = Cell(linear=nn.Linear(D + H, 3 * H))

    def step(x, state):
        f, g, o = mx.split(m.linear(mx.concatenate([x, state[0]], axis=-1)), 3, axis=-1)
        c = mx.sigmoid(f) * state[1] + (1 - mx.sigmoid(f)) * mx.tanh(g)
        return mx.sigmoid(o) * mx.tanh(c), c

    return m, step


def normalised():
    """Return an LSTM cell with a layer norm between the product and the gates."""
    m = Cell(linear=nn.Linear(D + H, 4 * H), norm=nn.LayerNorm(4 * H))

    def step(x, state):
        z = m.norm(m.linear(mx.concatenate([x, state[0]], axis=-1)))
        return lstm_of(mx.split(z, 4, axis=-1), state)

    return m, step


def minimal_gated():
    """Return a cell in which the same gate serves as reset gate and as update gate."""
    m = Cell(gate=nn.Linear(D + H, H), candidate=nn.Linear(D + H, H))

    def step(x, h):
        f = mx.sigmoid(m.gate(mx.concatenate([x, h], axis=-1)))
        return (1 - f) * h + f * mx.tanh(m.candidate(mx.concatenate([x, f * h], axis=-1)))

    return m, step


def residual():
    """Return an LSTM cell that adds a tenth of the previous h to its output."""
    m = Cell(linear=nn.Linear(D + H, 4 * H))

    def step(x, state):
        z = m.linear(mx.concatenate([x, state[0]], axis=-1))
        h, c = lstm_of(mx.split(z, 4, axis=-1), state)
        return h + 0.1 * state[0], c

    return m, step


def stopped():
    """Return a cell with the outputs of an LSTM, but no gradient passes through h to the previous step."""
    m = Cell(linear=nn.Linear(D + H, 4 * H))

    def step(x, state):
        z = m.linear(mx.concatenate([x, mx.stop_gradient(state[0])], axis=-1))
        return lstm_of(mx.split(z, 4, axis=-1), state)

    return m, step


def compiled():
    """Return an LSTM cell whose step was compiled and called before `recognise`. Its parameters are constants of the
    compiled function, so changes to the module have no effect."""
    module, step, _ = joined_weights()
    fast = mx.compile(step)
    fast(mx.zeros((3, D)), (mx.zeros((3, H)), mx.zeros((3, H))))
    return module, fast


def one_hidden_weight_per_unit():
    """Return an RNN cell in which each unit reads only its own h."""
    m = Cell(W=drawn(H, D), u=drawn(H))

    def step(x, h):
        return mx.tanh(x @ m.W.T + m.u * h)

    return m, step


def skips_padding():
    """Return an LSTM cell that keeps its states where all features of x are 0."""
    m, joined, _ = joined_weights()

    def step(x, state):
        ahead = mx.any(x != 0, axis=1, keepdims=True)
        return tuple(mx.where(ahead, new, old) for new, old in zip(joined(x, state), state, strict=True))

    return m, step


def starts_at_zero():
    """Return an LSTM cell that computes another first step: it adds 1 to the output where h is 0."""
    m, joined, _ = joined_weights()

    def step(x, state):
        h, c = joined(x, state)
        return h + mx.all(state[0] == 0, axis=1, keepdims=True), c

    return m, step


OTHERS = [coupled, normalised, minimal_gated, residual, stopped, one_hidden_weight_per_unit]
OTHERS += [pytest.param(compiled, marks=pytest.mark.needs_mx_compile), skips_padding, starts_at_zero]


@pytest.mark.parametrize("cell", OTHERS, ids=lambda cell: cell.__name__)
def test_no_call_equals_another_cell(cell):
    refused(*cell(), D, H)


# (op, place of the slip, its name in the tables of near_cells, the number in it, a part of the warning)
SLIPS = [
    ("lstm", "new c", "one-sided clip", 20.0, r"lstm\(x, Wx, Wh, b=b\), misses c by"),
    ("lstm", "c", "0.9999", 1, r"forget_bias=-0.0002\), misses c by"),
    ("lstm", "Wh", "clip", 9.0, r"lstm\(x, Wx, Wh, b=b\), misses [hc] by"),
    ("lstm", "z", "clip", 9.0, r"lstm\(x, Wx, Wh, b=b\), misses [hc] by .* x and h 10, c 10"),
    ("lstm", "x", "clip", 2e3, r"lstm\(x, Wx, Wh, b=b\), misses [hc] by"),
    (
        "lstm",
        "zf",
        "added",
        1.00000002,
        "forget_bias=1.0\\), equals it within rounding, but its forget_bias is another",
    ),
    ("lstm", "zf", "added", 0.123456789, "forget_bias, 0.123456. .* no number of at most six digits"),
    ("gru", "h", "clip", 20.0, r"gru\(x, Wx, Wh, b=b\), misses h by"),
    ("rnn relu", "relu", "relu6", 1, r"activation='relu'\), misses h by .* x and h 10"),
    ("rnn sigmoid", "z", "one-sided clip", 12.6, r"activation=.sigmoid.\), misses h by"),
    ("rnn tanh", "new h", "stopped", 1, "misses the gradient of"),
    ("lstm", "g", "random", 1, "It draws random numbers"),
]


def refused(module, step, D=near_cells.D, H=near_cells.H):
    """Return the text of the warning with which `recognise` returns None."""
    with pytest.warns(UserWarning, match=r"\[recognise\] no call equals the step\. ") as warned:
        assert recognise(module, step, D, H) is None
    return str(warned[0].message)


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: f"{slip[0]} {slip[1]}: {slip[2]} {slip[3]}")
def test_a_cell_one_slip_away_is_refused_and_the_nearest_call_named(slip):
    op, place, name, k, text = slip
    random = np.random.default_rng(0)
    case = near_cells.slipped(op.split()[0], place, name, random, place == "relu", k)
    assert re.search(text, refused(case.module, case.step))


def test_a_limit_on_c_whose_gradient_is_0():
    """A cell that limits c by mx.clip equals a call with the gradient 0 beyond the limit."""
    case = near_cells.slipped("lstm", "new c", "clip", np.random.default_rng(0), False, 3.0)
    line = recognise(case.module, case.step, near_cells.D, near_cells.H)
    assert line == "lstm(x, Wx, Wh, b=b, cell_clip=3.0, clip_gradient='zero')"


def judged(case):
    """Return "none", or whether the line that `recognise` returns for a cell is "right" or "wrong". A line is wrong if
    its value differs by more than rounding at any size of the numbers, or if its gradient must differ: the slip
    "stopped" stops it, and the slip "clip" makes it 0 beyond the limit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = recognise(case.module, case.step, near_cells.D, near_cells.H)
    if line is None:
        return "none"
    is_zero = ": clip" in case.text or "'clip_gradient': 'zero'" in case.text
    other = "cell_clip" in line and ("clip_gradient='zero'" in line) != is_zero
    return "wrong" if other or ": stopped" in case.text or not near_cells.worst(line, case) < NEAR else "right"


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_no_claim_is_wrong_for_random_cells_one_slip_away(count, request):
    """Random cells one slip away are refused, or the slip has no effect, as a limit of 8 on h, and the claim is
    right."""
    start = request.config.getoption("--fuzz-seed") * 1000
    cases = [near_cells.near(start + n) for n in range(count)]
    found = [judged(case) for case in cases]
    wrong = [case.text for case, answer in zip(cases, found, strict=True) if answer == "wrong"]
    assert not wrong and found.count("none") > count / 2


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_random_cells_that_equal_a_call_are_found(count, request):
    start = request.config.getoption("--fuzz-seed") * 1000
    cases = [near_cells.equal(start + n) for n in range(count)]
    missed = [case.text for case in cases if judged(case) != "right"]
    assert not missed


def test_finds_activations_that_are_written_by_other_functions():
    """The sigmoid of the gates is written with tanh, the tanh of the candidate with a sigmoid."""
    module, _, _ = torch_lstm()

    def step(x, state):
        z = x @ module.weight_ih.T + module.bias_ih + state[0] @ module.weight_hh.T + module.bias_hh
        i, f, g, o = mx.split(z, 4, axis=-1)
        i, f, o = (0.5 * (mx.tanh(0.5 * gate) + 1) for gate in (i, f + 0.1, o))
        c = f * state[1] + i * (2 * mx.sigmoid(2 * g) - 1)
        return o * mx.tanh(c), c

    line = "lstm(x, weight_ih, weight_hh, b=bias_ih + bias_hh, forget_bias=0.1)"
    assert recognise(module, step, D, H) == line


@pytest.mark.parametrize("bias", [7.1, -6.3])
def test_a_forget_bias_is_read_where_the_sigmoid_is_flat(bias):
    """Where the sigmoid of the forget bias is nearly 0 or 1, rounding hides some digits of the bias. `recognise` reads
    the bias anyway."""
    m = Cell(Wx=drawn(4 * H, D), Wh=drawn(4 * H, H))

    def step(x, state):
        return lstm_of(mx.split(x @ m.Wx.T + state[0] @ m.Wh.T, 4, axis=-1), state, bias)

    assert recognise(m, step, D, H) == f"lstm(x, Wx, Wh, forget_bias={bias})"


LIES = {
    "NaN": [np.nan, 2.0],
    "infinity": [np.inf, 2.0],
    "zeros": [0.0, 0.0],
    "the first item right": [1.0, 2.1],
    "an item too many": [1.0, 2.0, 2.0],
    "an item missing": [1.0],
    "nothing": [],
}


@pytest.mark.parametrize("lie", LIES)
def test_the_comparison_refuses(lie):
    """A miss is a number above 1, never NaN: the largest of several misses is the one that counts."""
    want = np.array([1.0, 2.0])
    assert recognition.miss(want.copy(), want, np.full(2, 1e-6)) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert recognition.miss(np.array(LIES[lie]), want, np.full(2, 1e-6)) > 1
    assert recognition.miss(np.array([np.nan]), np.array([np.nan]), np.ones(1)) > 1
    assert recognition.miss(np.array([np.inf]), np.array([np.inf]), np.ones(1)) > 1
    assert recognition.miss(np.zeros(0), np.zeros(0), np.zeros(0)) > 1
    assert recognition.miss(np.zeros(2), np.zeros(2), np.ones(2)) > 1


def test_the_weights_of_a_block_are_no_multiple_of_the_inputs():
    """The inputs and the weights of each block are different random numbers. If the seeds were alike, a block would be
    drawn as the inputs were, up to a factor."""
    trial = recognition.Trial(Cell(Wx=drawn(4 * H, D), Wh=drawn(4 * H, H), b=drawn(4 * H)), None, D, H, "")
    for n in range(len(trial.blocks)):
        ratios = trial.numbers(n).ravel()[:H] / np.concatenate([trial.x, trial.h], axis=None)[:H]
        assert np.ptp(ratios) > 0.1


def test_outputs_of_a_step_that_are_not_h_are_no_claim():
    module, step, _ = joined_weights()

    def scaled(x, state):
        h, c = step(x, state)
        return 2 * h, (h, c)

    text = refused(module, scaled, D, H)
    assert "misses what it returns beside its state and must be h (let step return the state only) by" in text


def test_a_step_that_changes_from_call_to_call_is_refused():
    module, step, _ = joined_weights()
    calls = []

    def changing(x, state):
        calls.append(x)
        h, c = step(x, state)
        return (h, c) if len(calls) < 60 else (h + 0.1, c)

    assert "nearest" in refused(module, changing, D, H)


def test_nan_in_the_tail_of_an_activation_is_refused():
    m = Cell(W=drawn(H, D), U=drawn(H, H))

    def step(x, h):
        e = mx.exp(2 * (x @ m.W.T + h @ m.U.T))
        return (e - 1) / (e + 1)  # infinite / infinite for large arguments

    assert "misses h by nan" in refused(m, step, D, H)


def test_the_error_names_the_two_ways_to_call_a_step_that_does_not_run():
    m = Cell(W=drawn(4 * H, D + H + 1))
    with pytest.raises(ValueError) as caught:
        recognise(m, lambda x, state: mx.concatenate([x, state[0]], axis=-1) @ m.W.T, D, H)
    assert re.search(r"but got step\(x, \(h, c\)\): ValueError: .*; step\(h, x\): ", str(caught.value))


def wrong_sizes():
    module, step, _ = joined_weights()
    return recognise(module, step, D + 1, H)


MODULE, STEP, _ = joined_weights()
BAD = {
    "module": (lambda: recognise({}, STEP, D, H), "module must hold parameters of a float dtype but got a dict"),
    "no module": (
        lambda: recognise(STEP, STEP, D, H),
        "module must be a module or a dict that holds .* but got function",
    ),
    "step": (lambda: recognise(MODULE, None, D, H), r"step must be a function, step\(x, state\) -> state, but got"),
    "D": (lambda: recognise(MODULE, STEP, 0, H), "D must be an integer"),
    "H": (lambda: recognise(MODULE, STEP, D, 1), "H must be an integer"),
    "name": (lambda: recognise(MODULE, STEP, D, H, name=3), "name must be a str but got 3"),
    "sizes": (wrong_sizes, r"step must run for x \[B, D\] and the state \(h, c\) or h, each \[B, H\], but got"),
}


def test_a_step_of_two_equal_widths_gets_x_first():
    """If x is as wide as h, nothing says that a step takes h first, so this GRU is not recognised."""
    m = Cell(inner=nn.Linear(H, 3 * H), outer=nn.Linear(H, 3 * H))

    def step(h, x):
        (r, z, n), (pr, pz, pn) = (mx.split(part, 3, axis=-1) for part in (m.inner(x), m.outer(h)))
        z, n = mx.sigmoid(z + pz), mx.tanh(n + mx.sigmoid(r + pr) * pn)
        return z * h + (1 - z) * n

    assert recognise(m, lambda x, h: step(h, x), H, H).startswith("gru(x, inner.weight, outer.weight")
    with pytest.warns(UserWarning, match="no call equals the step"):
        assert recognise(m, step, H, H) is None


def test_the_smallest_cell():
    m = Cell(inner=nn.Linear(1, 8), outer=drawn(8, 2))

    def step(x, state):
        return lstm_of(mx.split(m.inner(x) + state[0] @ m.outer.T, 4, axis=-1), state)

    assert recognise(m, step, 1, 2) == "lstm(x, inner.weight, outer, b=inner.bias)"


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()
