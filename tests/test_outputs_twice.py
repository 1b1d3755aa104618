"""Tests of gradients through functions that return one array as two outputs, an argument unchanged, or the result of
`mx.stop_gradient`. `mx.vjp` gets such outputs wrong if they are no operations of their own."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lstm
from mlx_lstm import cudnn, gru, lstm, mpsgraph, pointwise, recurrent, rnn, tf, torch
from mlx_lstm.engines.tracing import vjp

T, B, I, H = 3, 2, 3, 4


def drawn(*shape, seed=0):
    return mx.array(np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32))


def floats(tree):
    return [array for _, array in tree_flatten(tree) if array is not None and mx.issubdtype(array.dtype, mx.floating)]


def check(function, arrays):
    """Check that `mx.vjp` of a function has the gradients of the sum of all outputs times their cotangents. MLX adds
    the cotangents of an array inside of one graph, so the gradients of the sum are right."""
    outputs = floats(function(*arrays))
    cotangents = [drawn(*output.shape, seed=1 + n) for n, output in enumerate(outputs)]

    def total(*values):
        pairs = zip(floats(function(*values)), cotangents, strict=True)
        return sum((output * d).sum() for output, d in pairs)

    wanted = mx.grad(total, argnums=list(range(len(arrays))))(*arrays)
    found = mx.vjp(lambda *values: floats(function(*values)), list(arrays), cotangents)[1]
    for n, (one, other) in enumerate(zip(wanted, found, strict=True)):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-5, rtol=1e-4, err_msg=f"argument {n}")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [x * y] * 2,
        lambda x, y: [x, x],
        lambda x, y: [mx.broadcast_to(x, x.shape), x.reshape(x.shape), y],
        lambda x, y: [mx.stop_gradient(x), x * y],
        lambda x, y: [mx.stop_gradient(x * y), x * y, x * y],
        lambda x, y: [y, x * y, y],
    ],
)
def test_vjp_counts_every_cotangent(function):
    """The package's `vjp` gives the gradient of all outputs, also if two of them are one array, an argument, or cut off
    from the gradient."""
    x, y = drawn(2, 3), drawn(2, 3, seed=5)
    cotangents = [drawn(2, 3, seed=7 + n) for n in range(len(function(x, y)))]
    total = lambda x, y: sum((o * d).sum() for o, d in zip(function(x, y), cotangents, strict=True))  # noqa: E731
    for one, other in zip(mx.grad(total, (0, 1))(x, y), vjp(function, [x, y], cotangents)[1], strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-6)


def test_no_gradient_is_derived_elsewhere():
    """All modules derive gradients with `vjp` of engines/tracing.py. Exceptions: modules that compare or measure the
    package's functions call `mx.vjp` as users do."""
    package = Path(mlx_lstm.__file__).parent
    callers = {str(file.relative_to(package)) for file in package.rglob("*.py") if "mx.vjp(" in file.read_text()}
    judges = {"lab/cases.py", "recurrence/_judge.py", "lab/timing/cases/lstm.py"}
    assert callers == {"engines/tracing.py", *judges}


# --- Public functions ---


def weights(gates, D=1):
    Wh = drawn(gates * H, H) if D == 1 else drawn(2, gates * H, H)
    return drawn(D * gates * H, I), Wh, drawn(D * gates * H)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("engine", ["numpy", "ops"])
def test_outputs_of_the_recurrences_are_distinct(engine, steps):
    """A call of lstm, gru or rnn returns distinct arrays, also for one step and for the same array as h0 and c0."""
    x, h0 = drawn(steps, B, I), drawn(B, H)
    for options in ({}, {"checkpoint_every": 2}, {"keep": mx.ones((steps, B))}, {"hold": [[True, True]] * steps}):
        run = lambda x, h0, *w: lstm(x, *w, h0=h0, c0=h0, engine=engine, **options)[:5]  # noqa: B023, E731
        check(run, [x, h0, *weights(4)])
        for op, gates in ((gru, 3), (rnn, 1)):
            run = lambda x, h0, *w: op(x, *w, h0=h0, engine=engine, **options)[:4]  # noqa: B023, E731
            check(run, [x, h0, *weights(gates)])


CELLS = {
    "the same result twice": lambda a, s, u, w: (c := mx.tanh(a[0] + s[0] * w), c),
    "one input twice": lambda a, s, u, w: (u, u),
    "one state twice": lambda a, s, u, w: (s[1], s[1]),
    "a parameter and an input": lambda a, s, u, w: (w, u),
    "a delay": lambda a, s, u, w: (mx.tanh(a[0] + s[1] * w), u),
    "changed places": lambda a, s, u, w: (s[1], s[0]),
    "unchanged": lambda a, s, u, w: s,
    "a preactivation": lambda a, s, u, w: (a[0], a[0]),
    "a constant": lambda a, s, u, w: (mx.tanh(a[0] + s[1]), mx.zeros_like(u)),
    "cut off": lambda a, s, u, w: (mx.stop_gradient(mx.tanh(a[0])), s[1] * mx.tanh(a[0])),
    "cut off from its equal": lambda a, s, u, w: (mx.tanh(w), mx.stop_gradient(mx.tanh(w))),
}


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_may_return_any_arrays(name, every):
    """A cell of `pointwise` may return one array as two states, and states that are inputs, parameters or states
    before the step. Each gradient is that of a loop in plain MLX."""
    cell, x, u = CELLS[name], drawn(T, B, I), drawn(T, B, H)
    arrays = [x, drawn(H, I), drawn(H, H) / 2, drawn(B, H), drawn(B, H, seed=9), u, drawn(H)]

    def by_loop(x, Wx, Wh, h, c, u, w):
        hs, state = [], (h, c)
        for t in range(T):
            state = cell([x[t] @ Wx.T + state[0] @ Wh.T], state, u[t], mx.broadcast_to(w, h.shape))
            hs.append(state[0])
        return [mx.stack(hs), *state]

    cotangents = [drawn(T, B, H, seed=21), drawn(B, H, seed=22), drawn(B, H, seed=23)]
    pairs = lambda *values: zip(by_loop(*values), cotangents, strict=True)  # noqa: E731
    wanted = mx.grad(lambda *values: sum((o * d).sum() for o, d in pairs(*values)), list(range(7)))(*arrays)
    for engine in ("numpy", "ops"):

        def outputs(x, Wx, Wh, h, c, u, w, engine=engine):
            every_of = {"checkpoint_every": every}
            last = pointwise(cell, x, Wx, Wh, None, (h, c), inputs=(u,), params=(w,), engine=engine, **every_of)
            return [last[0], *last[1]]

        for n, (one, other) in enumerate(zip(wanted, mx.vjp(outputs, arrays, cotangents)[1], strict=True)):
            np.testing.assert_allclose(np.array(one), np.array(other), atol=2e-5, err_msg=f"{engine} {n}")


def test_a_compiled_cell_may_return_one_array_twice():
    """`mx.compile` does not join the states that a cell returns twice."""
    cell = lambda a, s: (c := mx.tanh(a[0] + s[1]), c)  # noqa: E731
    run = lambda x, h: pointwise(cell, x, None, None, None, (h, h), engine="ops")  # noqa: E731
    check(mx.compile(run), [drawn(T, B, H), drawn(B, H)])


@pytest.mark.parametrize("every", [None, 2])
def test_a_step_of_recurrent_may_return_one_array_twice(every):
    """A step of `recurrent` may return one array as its output and as several states, or a state unchanged."""

    def step(x, state):
        h = mx.tanh(x + state["a"] * state["b"])
        return (h, mx.stop_gradient(h), h), {"a": h, "b": h, "c": state["c"]}

    def run(x, h):
        return recurrent(step, x, {"a": h, "b": h, "c": h}, checkpoint_every=every)

    def by_loop(x, h):
        a, hs = h, []
        for t in range(T):
            a = mx.tanh(x[t] + (a * h if t == 0 else a * a))
            hs.append(a)
        hs = mx.stack(hs)
        return [hs, mx.stop_gradient(hs), hs, a, a, h]

    x, h = drawn(T, B, H), drawn(B, H)
    check(run, [x, h])
    cotangents = [drawn(*o.shape, seed=1 + n) for n, o in enumerate(floats(run(x, h)))]
    sums = lambda f: lambda x, h: sum((o * d).sum() for o, d in zip(floats(f(x, h)), cotangents, strict=True))  # noqa: E731
    for one, other in zip(mx.grad(sums(by_loop), (0, 1))(x, h), mx.grad(sums(run), (0, 1))(x, h), strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_outputs_of_other_interfaces_are_distinct(steps):
    """The layers and ops of the other interfaces return distinct arrays, also for a single step."""
    x, h = drawn(steps, B, I), drawn(1, B, H)
    lstm_layer, cell = torch.LSTM(I, H), torch.LSTMCell(I, H)
    check(lambda x, h: lstm_layer(x, (h, h)), [x, h])
    check(torch.GRU(I, H), [x, h])
    check(torch.RNN(I, H), [x, h])
    check(lambda x, h: cell(x[0], (h[0], h[0])), [x, h])
    W, b, p = drawn(I + H, 4 * H), drawn(4 * H), drawn(H)
    check(lambda x, h: tf.lstm_block_cell(x[0], h[0], h[0], W, p, p, p, b), [x, h])
    check(lambda x, h: tf.block_lstm(steps, x, h[0], h[0], W, p, p, p, b), [x, h])
    params = drawn(cudnn.cudnn_rnn_params_size(1, H, I).item())
    check(lambda x, h, params: cudnn.cudnn_rnn(x, h, h, params)[:3], [x, h, params])
    Wx, Wh, _ = weights(4)
    training = mpsgraph.LSTMDescriptor(training=True)
    more = {"init_state": h[0], "init_cell": h[0], "descriptor": training}
    check(lambda x, Wh: mpsgraph.lstm(x, Wh, input_weight=Wx, **more), [x, Wh])
    check(lambda x, Wh: mpsgraph.gru(x, Wh[: 3 * H], input_weight=Wx[: 3 * H]), [x, Wh])
    for holds in ("preactivations", "activations"):  # with the activations, h and zState are equal
        more = {"z_state_holds": holds, "descriptor": mpsgraph.SingleGateRNNDescriptor(training=True)}
        check(lambda x, R: mpsgraph.single_gate_rnn(x, R, input_weight=Wx[:H], **more), [x, Wh[:H]])  # noqa: B023
