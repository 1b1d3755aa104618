"""Compare derivatives of a recurrence inside any nesting of MLX's transformations with those of the same recurrence
written as a loop in plain MLX.

A `loss` is a function of one vector, theta. All arrays of the recurrence are slices of theta, so that each array is
computed inside the transformation. A wrapper applies one of MLX's transformations to a loss and returns a new loss.
A nesting is a list of wrappers, the innermost first.
"""

import mlx.core as mx
import numpy as np

from mlx_lstm import recurrence

REFUSALS = r"use engine='ops'|engine='numpy' cannot run: inside mx.compile, mx.vmap or an export"


def sigmoid(a):
    return 0.5 * (1 + mx.tanh(a * mx.array(0.5, a.dtype)))


def lstm_step(z, h, c, a):
    i, f, g, o = mx.split(z + h @ a["Wh"].T + a["b"], 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * mx.tanh(g)
    return sigmoid(o) * mx.tanh(c), c


def gru_step(z, h, c, a):
    (z_r, z_z, z_n), (r_r, r_z, r_n) = (mx.split(m, 3, axis=-1) for m in (z + a["b"], h @ a["Wh"].T))
    r, u = sigmoid(z_r + r_r), sigmoid(z_z + r_z)
    n = mx.tanh(z_n + r * (r_n + a["bhn"]))
    return u * h + (1 - u) * n, c


def rnn_step(z, h, c, a):
    return mx.tanh(z + h @ a["Wh"].T + a["b"]), c


STEPS = {"lstm": (lstm_step, 4), "gru": (gru_step, 3), "rnn": (rnn_step, 1)}


class Model:
    """A small LSTM, GRU or RNN with random arrays. Its sizes are (time steps T, batch B, input I, hidden H). `loss`
    computes a scalar loss with `mlx_lstm`, and `plain` computes the same loss by a loop in plain MLX."""

    def __init__(self, op="lstm", sizes=(3, 2, 2, 2), reverse=False, lengths=None, seed=0):
        T, B, I, H = sizes
        self.op, self.sizes, self.reverse, self.lengths = op, sizes, reverse, lengths
        (self.step, G), rng = STEPS[op], np.random.default_rng(seed)
        self.shapes = {"x": (T, B, I), "Wx": (G * H, I), "Wh": (G * H, H), "b": (G * H,), "h0": (B, H)}
        self.shapes |= {"c0": (B, H)} if op == "lstm" else {"bhn": (H,)} if op == "gru" else {}
        count = sum(int(np.prod(shape)) for shape in self.shapes.values())
        draw = lambda *shape: mx.array(rng.normal(size=shape), mx.float64)  # noqa: E731
        self.theta, self.tangent, self.weights, self.dh = 0.5 * draw(count), draw(count), draw(count), draw(T, B, H)

    def arrays(self, theta):
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])[:-1].tolist()
        return {n: part.reshape(s) for (n, s), part in zip(self.shapes.items(), mx.split(theta, ends), strict=True)}

    def number(self, h, hT):
        return (h * h * self.dh).sum() + (hT * hT).sum()

    def loss(self, **options):
        """Return a function of theta: the loss, computed by `mlx_lstm` with these options."""
        options |= {"reverse": self.reverse, "lengths": self.lengths}

        def loss(theta):
            out = getattr(recurrence, self.op)(**self.arrays(theta), **options)
            return self.number(out.h, out.hT)

        return loss

    def plain(self, theta):
        """Return the loss, computed by a loop in plain MLX. The loop uses no indexing, because MLX has no
        forward-mode derivative of the gradient of indexing."""
        a, T = self.arrays(theta), self.sizes[0]
        rows = [row.squeeze(0) @ a["Wx"].T for row in mx.split(a["x"], T)]
        h, c, hs = a["h0"], a.get("c0", a["h0"]), {}
        for t in reversed(range(T)) if self.reverse else range(T):
            h_new, c_new = self.step(rows[t], h, c, a)
            live = mx.array([[1.0]] * self.sizes[1] if self.lengths is None else [[n > t] for n in self.lengths])
            live = live.astype(mx.float64)
            hs[t], h, c = live * h_new, live * h_new + (1 - live) * h, live * c_new + (1 - live) * c
        return self.number(mx.stack([hs[t] for t in range(T)]), h)

    def other(self, theta):
        """Return a number that is computed from theta without the recurrence. Tests combine it with `loss`, so that MLX
        also differentiates something besides the recurrence."""
        return 0.1 * (mx.sin(theta) * theta * self.weights).sum()


def jacobian_rows(loss, theta):
    """Return two rows: the gradient of the function `loss` at the vector `theta`, and half of this gradient. They are
    the results of one backward pass for the cotangents 1 and 0.5, over which mx.vmap maps."""
    pull = lambda d: mx.vjp(lambda theta: [loss(theta)], [theta], [d])[1][0]  # noqa: E731
    return mx.vmap(pull)(mx.array([1.0, 0.5], mx.float64))


def value_and_gradient(model, loss, theta):
    value, gradient = mx.value_and_grad(loss)(theta)
    return value * value + (gradient * model.weights).sum()


WRAPPERS = {
    "grad": lambda m, s: lambda v: (mx.grad(s)(v) * mx.sin(m.weights * v)).sum(),
    "vjp": lambda m, s: lambda v: (mx.vjp(lambda v: [s(v)], [v], [mx.sin(v).sum()])[1][0] * m.weights).sum(),
    "value_and_grad": lambda m, s: lambda v: value_and_gradient(m, s, v),
    "jvp": lambda m, s: lambda v: mx.jvp(s, [v], [m.tangent])[1][0],
    "jvp along itself": lambda m, s: lambda v: mx.jvp(s, [v], [mx.cos(v)])[1][0],
    "vmap": lambda m, s: lambda v: (mx.vmap(s)(mx.stack([v, 0.5 * v])) * mx.array([1.0, 2.0], mx.float64)).sum(),
    "vmap of a factor": lambda m, s: lambda v: mx.vmap(lambda k: s(k * v))(mx.array([1.0, 0.5], mx.float64)).sum(),
    "jacobian": lambda m, s: lambda v: mx.square(jacobian_rows(s, v)).sum(),
    "checkpoint": lambda m, s: lambda v: mx.checkpoint(s)(v),
    "compile": lambda m, s: lambda v: mx.compile(s)(v),
    "twice": lambda m, s: lambda v: s(v * mx.cos(s(v))),
    "after another": lambda m, s: lambda v: s(v * mx.cos(m.other(v))),
}


def nested(model, loss, names):
    for name in names:
        loss = WRAPPERS[name](model, loss)
    return loss
