"""Tests of `mlx_lstm.recognise`. It returns the source of a call of mlx-lstm that equals a recurrent cell written by
hand, or None if no call equals the cell."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lstm
from mlx_lstm import recognise

D, H = 3, 5


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


CELLS = [joined_weights, h_first, torch_lstm, keras_lstm, linear_per_gate, no_bias_in_a_list, peeping, torch_gru]
CELLS += [keras_gru, gru_before, elman, stacked_matrices]


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


OTHERS = [coupled, normalised, minimal_gated, residual, stopped, compiled, one_hidden_weight_per_unit]


@pytest.mark.parametrize("cell", OTHERS, ids=lambda cell: cell.__name__)
def test_no_call_equals_another_cell(cell):
    assert recognise(*cell(), D, H) is None


def wrong_sizes():
    module, step, _ = joined_weights()
    return recognise(module, step, D + 1, H)


MODULE, STEP, _ = joined_weights()
BAD = {
    "module": (lambda: recognise({}, STEP, D, H), "module must be a module that holds .* but got dict"),
    "step": (lambda: recognise(MODULE, None, D, H), r"step must be a function, step\(x, state\) -> state, but got"),
    "D": (lambda: recognise(MODULE, STEP, 0, H), "D must be an integer"),
    "H": (lambda: recognise(MODULE, STEP, D, 1), "H must be an integer"),
    "sizes": (wrong_sizes, r"step must run for x \[B, D\] and the state \(h, c\) or h, each \[B, H\], but got"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()
