"""Tests of layer normalisation inside the step, `norm=`: against the published layers, written anew as programs in
PyTorch float64; against the float64 oracle on each engine with every older option; and its refusals.

The programs share no formula with the library or the oracle: PyTorch's autograd differentiates them.
"""

import mlx.core as mx
import numpy as np
import pytest
import torch

from mlx_lstm import Norm, gru, lstm, pointwise, rnn

T, B, I, H = 5, 3, 4, 6
ENGINES = ("ops", "numpy")


def arrays_of(seed, **shapes):
    """Return random float64 arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0.3 if "scale" in name else 0, 0.7, shape) for name, shape in shapes.items()}


def judged(program, ours, arrays):
    """Check that `ours` returns what the PyTorch program returns, with all gradients. Each takes the arrays by name and
    returns a list of arrays. The loss is a sum with random factors."""
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    wanted = program(**leaves)
    factors = [np.random.default_rng(n).normal(size=tuple(w.shape)) for n, w in enumerate(wanted)]
    sum((torch.tensor(f) * w).sum() for f, w in zip(factors, wanted, strict=True)).backward()
    names = list(arrays)
    with mx.stream(mx.cpu):
        values = [mx.array(arrays[name], mx.float64) for name in names]
        outputs, gradients = mx.vjp(
            lambda *given: list(ours(**dict(zip(names, given, strict=True)))),
            values,
            [mx.array(f, mx.float64) for f in factors],
        )
        mx.eval(outputs, gradients)
    pairs = [(f"output {n}", o, w.detach()) for n, (o, w) in enumerate(zip(outputs, wanted, strict=True))]
    pairs += [(f"gradient of {n}", g, leaves[n].grad) for n, g in zip(names, gradients, strict=True)]
    for name, got, want in pairs:
        want = want.numpy()
        # Both compute in float64. An error of rounding, 2e-16, grows at each step by the factor 1 / sqrt(variance +
        # eps) of a norm, which is at most 316 at a product that is 0, and near 1 elsewhere.
        np.testing.assert_allclose(np.array(got), want, rtol=0, atol=1e-10 * np.abs(want).max(), err_msg=name)


def ln(a, scale=None, shift=None, eps=1e-5):
    """Layer normalisation of the last axis, from its definition."""
    mean = a.mean(-1, keepdim=True)
    y = (a - mean) / torch.sqrt(((a - mean) ** 2).mean(-1, keepdim=True) + eps)
    y = y if scale is None else y * scale
    return y if shift is None else y + shift


def unrolled(step, x, *states):
    """Run `step(x_t, *states) -> states` over time. Return the first state at every step, and the last states."""
    seen = []
    for x_t in x:
        states = step(x_t, *states)
        seen.append(states[0])
    return [torch.stack(seen), *states]


SHAPES = {"x": (T, B, I), "Wx": (4 * H, I), "Wh": (4 * H, H), "b": (4 * H,), "h0": (B, H), "c0": (B, H)}
OF_NORMS = {"scale": (4 * H,), "input_scale": (4 * H,), "c_scale": (H,), "c_shift": (H,)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("with_shifts", [False, True], ids=["haste", "ba"])
def test_the_lstm_of_ba_and_haste(engine, with_shifts):
    shapes = SHAPES | OF_NORMS | ({"shift": (4 * H,), "input_shift": (4 * H,)} if with_shifts else {})

    def program(x, Wx, Wh, b, h0, c0, scale, input_scale, c_scale, c_shift, shift=None, input_shift=None):
        def step(x, h, c):
            v = ln(x @ Wx.T, input_scale, input_shift) + ln(h @ Wh.T, scale, shift) + b
            i, g, f, o = v.chunk(4, -1)  # haste's order of gates
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(ln(c, c_scale, c_shift)), c

        return unrolled(step, x, h0, c0)

    def ours(x, Wx, Wh, b, h0, c0, **norms):
        out = lstm(x, Wx, Wh, b, h0, c0, gate_order="igfo", norm=Norm(c="output", **norms), engine=engine)
        return out.h, out.hT, out.cT

    judged(program, ours, arrays_of(1, **shapes))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_layer_norm_lstm_of_pytorchs_benchmarks(engine):
    shapes = SHAPES | OF_NORMS | {"shift": (4 * H,), "input_shift": (4 * H,)}

    def program(x, Wx, Wh, b, h0, c0, scale, input_scale, c_scale, c_shift, shift, input_shift):
        def step(x, h, c):
            igates, hgates = ln(x @ Wx.T, input_scale, input_shift), ln(h @ Wh.T, scale, shift)
            i, f, g, o = (igates + hgates + b).chunk(4, 1)
            c = ln(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g), c_scale, c_shift)
            return torch.sigmoid(o) * torch.tanh(c), c

        return unrolled(step, x, h0, c0)

    def ours(x, Wx, Wh, b, h0, c0, **norms):
        out = lstm(x, Wx, Wh, b, h0, c0, norm=Norm(c="state", **norms), engine=engine)
        return out.h, out.hT, out.cT

    judged(program, ours, arrays_of(2, **shapes))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("of_c", [None, "state"], ids=["tflite", "tf1"])
def test_the_layer_norm_lstms_of_tensorflow(engine, of_c):
    """TFLite's LSTM without peepholes, and TF1's LayerNormBasicLSTMCell, which has no bias, adds forget_bias and
    normalises c, too. Each gate is normalised by itself."""
    shapes = {name: shape for name, shape in SHAPES.items() if name != "b"} | {"scale": (4 * H,), "shift": (4 * H,)}
    shapes |= {"c_scale": (H,), "c_shift": (H,)} if of_c else {}
    forget_bias = 1.0 if of_c else 0.0

    def program(x, Wx, Wh, h0, c0, scale, shift, c_scale=None, c_shift=None):
        def step(x, h, c):
            gates = (torch.cat([x, h], 1) @ torch.cat([Wx, Wh], 1).T).chunk(4, 1)
            i, g, f, o = (ln(*each, eps=1e-12) for each in zip(gates, scale.chunk(4), shift.chunk(4), strict=True))
            c = c * torch.sigmoid(f + forget_bias) + torch.sigmoid(i) * torch.tanh(g)
            c = ln(c, c_scale, c_shift, eps=1e-12) if of_c else c
            return torch.tanh(c) * torch.sigmoid(o), c

        return unrolled(step, x, h0, c0)

    def ours(x, Wx, Wh, h0, c0, scale, shift, **norms):
        norm = Norm("sum", scale, shift, c=of_c, gates="each", eps=1e-12, **norms)
        out = lstm(x, Wx, Wh, None, h0, c0, gate_order="igfo", forget_bias=forget_bias, norm=norm, engine=engine)
        return out.h, out.hT, out.cT

    judged(program, ours, arrays_of(3, **shapes))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_layer_norm_gru_of_haste(engine):
    shapes = {"x": (T, B, I), "Wx": (3 * H, I), "Wh": (3 * H, H), "b": (3 * H,), "bh": (3 * H,), "h0": (B, H)}

    def program(x, Wx, Wh, b, bh, h0, scale, input_scale):
        def step(x, h):
            vx, vh = ln(x @ Wx.T, input_scale) + b, ln(h @ Wh.T, scale) + bh
            (xz, xr, xg), (hz, hr, hg) = vx.chunk(3, -1), vh.chunk(3, -1)  # haste's order of gates
            z, r = torch.sigmoid(xz + hz), torch.sigmoid(xr + hr)
            return (z * h + (1 - z) * torch.tanh(xg + r * hg),)

        return unrolled(step, x, h0)

    def ours(x, Wx, Wh, b, bh, h0, **norms):
        first = mx.concatenate([bh[: 2 * H], mx.zeros(H, bh.dtype)])
        norm = Norm(**norms)
        out = gru(x, Wx, Wh, b + first, h0, bhn=bh[2 * H :], gate_order="zrn", norm=norm, engine=engine)
        return out.h, out.hT

    judged(program, ours, arrays_of(4, **shapes, scale=(3 * H,), input_scale=(3 * H,)))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gru_of_dreamer(engine):
    shapes = {"x": (T, B, I), "Wx": (3 * H, I), "Wh": (3 * H, H), "b": (3 * H,), "h0": (B, H)}

    def program(x, Wx, Wh, b, h0, scale, shift):
        def step(x, h):
            parts = ln(torch.cat([x, h], -1) @ torch.cat([Wx, Wh], -1).T + b, scale, shift, eps=1e-3)
            reset, cand, update = parts.chunk(3, -1)
            update = torch.sigmoid(update - 1)
            return (update * torch.tanh(torch.sigmoid(reset) * cand) + (1 - update) * h,)

        return unrolled(step, x, h0)

    def cell(a, state):
        (reset, cand, update), (h,) = a, state
        update = mx.sigmoid(update - 1)
        return (update * mx.tanh(mx.sigmoid(reset) * cand) + (1 - update) * h,)

    def ours(x, Wx, Wh, b, h0, scale, shift):
        h, (hT,) = pointwise(cell, x, Wx, Wh, b, (h0,), norm=Norm("sum", scale, shift, eps=1e-3), engine=engine)
        return h, hT

    # MLX computes the exp of a float64 sigmoid to float32 only, so the cell of this test uses float64's tanh.
    def sigmoid(a):
        return 0.5 + 0.5 * mx.tanh(0.5 * a)

    globals_of = {"mx": type("mx", (), {"sigmoid": staticmethod(sigmoid), "tanh": staticmethod(mx.tanh)})}
    cell = type(cell)(cell.__code__, globals_of)
    judged(program, ours, arrays_of(5, **shapes, scale=(3 * H,), shift=(3 * H,)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plain_rnn_and_an_own_cell_with_separate_parts(engine):
    shapes = {"x": (T, B, I), "Wx": (H, I), "Wh": (H, H), "b": (H,), "h0": (B, H), "scale": (H,), "shift": (H,)}
    shapes |= {"input_scale": (H,), "input_shift": (H,)}

    def program(x, Wx, Wh, b, h0, scale, shift, input_scale, input_shift):
        def step(x, h):
            return (torch.tanh((ln(x @ Wx.T, input_scale, input_shift) + b) * (1 + ln(h @ Wh.T, scale, shift))),)

        return unrolled(step, x, h0)

    def ours(x, Wx, Wh, b, h0, **norms):
        h, (hT,) = pointwise(multiplied, x, Wx, Wh, b, (h0,), apart=True, norm=Norm(**norms), engine=engine)
        return h, hT

    judged(program, ours, arrays_of(6, **shapes))

    def of_rnn(x, Wx, Wh, b, h0, scale, shift, input_scale, input_shift):
        return unrolled(lambda x, h: (torch.tanh(ln(x @ Wx.T + b + h @ Wh.T, scale, shift)),), x, h0)

    def our_rnn(x, Wx, Wh, b, h0, scale, shift, **unused):
        out = rnn(x, Wx, Wh, b, h0, norm=Norm("sum", scale, shift), engine=engine)
        return out.h, out.hT

    arrays = {name: array for name, array in arrays_of(7, **shapes).items() if "input" not in name}
    judged(lambda **a: of_rnn(**a, input_scale=None, input_shift=None), our_rnn, arrays)


def multiplied(a, state):
    """A cell that reads the input's part and the recurrent part of its gate separately."""
    ((x, p),) = a
    return (mx.tanh(x * (1 + p)),)
