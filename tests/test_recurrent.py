"""Tests of `recurrent`, which runs a cell written by the user as a step function. They compare cells with the oracle
and with torch, and cover trees of arrays, MLX's transformations, and refused arguments."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import torch
from assertions import assert_within, bounds
from cases import draw_away_from_kinks, split, to_mlx

import mlx_lstm
from mlx_lstm import recurrent
from mlx_lstm.engines.definitions import sigmoid  # MLX's own sigmoid has only float32 accuracy in float64
from mlx_lstm.oracle import evaluate
from mlx_lstm.oracle.arithmetic import Rounding

T, B, I, H = SIZES = 5, 3, 2, 4
LENGTHS = [3, 0, 5]


@pytest.fixture(autouse=True)
def on_cpu():
    """Run every test on the CPU, because a GPU does not support float64."""
    with mx.stream(mx.cpu):
        yield


def lstm_step(Wh):
    def step(z, state):
        h, c = state
        i, f, g, o = mx.split(z + h @ Wh.T, 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * mx.tanh(g)
        h = sigmoid(o) * mx.tanh(c)
        return (h, c), (h, c)

    return step


def gru_step(Wh, bhn):
    def step(z, h):
        (r, z, n), (from_r, from_z, from_n) = mx.split(z, 3, axis=-1), mx.split(h @ Wh.T, 3, axis=-1)
        z = sigmoid(z + from_z)
        h = z * h + (1 - z) * mx.tanh(n + sigmoid(r + from_r) * (from_n + bhn))
        return (h,), h

    return step


def by_steps(op, arrays, **options):
    """Return {name: output} of an LSTM, GRU or RNN, computed by `recurrent` with a step function for this cell."""
    z = arrays["x"] @ arrays["Wx"].T + arrays["b"]
    options |= {"keep": arrays["keep"]} if "keep" in arrays else {}
    if op == "gru":
        (h,), hT = recurrent(gru_step(arrays["Wh"], arrays["bhn"]), z, arrays["h0"], **options)
        return {"h": h, "hT": hT}
    (h, c), (hT, cT) = recurrent(lstm_step(arrays["Wh"]), z, (arrays["h0"], arrays["c0"]), **options)
    return {"h": h, "c": c, "hT": hT, "cT": cT}


def weighed(outputs, weights):
    return sum((outputs[name] * weight).sum() for name, weight in weights.items())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("op", ["lstm", "gru"])
@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
def test_is_the_recurrence_of_the_judge(op, lengths, reverse, keep):
    case, cotangents = draw_away_from_kinks(4, sizes=(*SIZES, H), op=op, lengths=lengths, reverse=reverse, keep=keep)
    cotangents = {name: value for name, value in cotangents.items() if name != "gates"}
    arrays = {name: to_mlx(array, np.float64) for name, array in split(case)[1].items()}
    weights = {name: to_mlx(array, np.float64) for name, array in cotangents.items()}
    got = by_steps(op, arrays, lengths=lengths, reverse=reverse)
    assert got.keys() == weights.keys()
    got |= mx.grad(lambda arrays: weighed(by_steps(op, arrays, lengths=lengths, reverse=reverse), weights))(arrays)
    outputs, gradients = evaluate(case, cotangents, Rounding(np.float64))
    expected, bound = outputs | gradients, bounds(case, np.float64, cotangents)
    for name, value in got.items():
        assert_within(name, np.array(value), expected[name], bound[name])


def test_second_derivative_is_that_of_the_engine_ops():
    case, cotangents = draw_away_from_kinks(5, sizes=(*SIZES, H), lengths=LENGTHS, reverse=True)
    arrays = {name: to_mlx(array, np.float64) for name, array in split(case)[1].items()}
    weight, options = to_mlx(cotangents["h"], np.float64), {"lengths": LENGTHS, "reverse": True}

    def second(h_of):
        first = mx.grad(lambda arrays: (h_of(arrays) * weight).sum())
        return mx.grad(lambda arrays: sum(mx.square(g).sum() for g in first(arrays).values()))(arrays)

    got = second(lambda arrays: by_steps("lstm", arrays, **options)["h"])
    expected = second(lambda arrays: mlx_lstm.lstm(**arrays, **options, engine="ops").h)
    for name, value in got.items():
        np.testing.assert_allclose(np.array(value), np.array(expected[name]), rtol=1e-10, atol=1e-12, err_msg=name)


def normalised_weights(rng):
    shapes = {"Wx": (4 * H, I), "Wh": (4 * H, H), "b": (4 * H,), "scale": (4 * H,), "scale_c": (H,), "b_c": (H,)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def norm(x):
    """Return the layer normalisation of x without weights. `mx.fast.layer_norm` is not used because it has only
    float32 accuracy in float64."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / mx.sqrt(mx.square(centred).mean(axis=-1, keepdims=True) + mx.array(1e-5, x.dtype))


def normalised_by_torch(x, h, c, w, lengths, reverse):
    """Return (outputs, last h, last c) of an LSTM with layer normalisation of its products and of c. torch computes
    one sequence and one step at a time."""
    norm = torch.nn.functional.layer_norm
    outputs, states = torch.zeros(T, B, H, dtype=torch.float64), []
    for n, length in enumerate(lengths):
        h_n, c_n = h[n], c[n]
        for t in reversed(range(length)) if reverse else range(length):
            z = norm(w["Wx"] @ x[t, n], [4 * H], bias=w["b"]) + norm(w["Wh"] @ h_n, [4 * H], w["scale"])
            i, f, g, o = z.chunk(4)
            c_n = f.sigmoid() * c_n + i.sigmoid() * g.tanh()
            h_n = o.sigmoid() * norm(c_n, [H], w["scale_c"], w["b_c"]).tanh()
            outputs = outputs.index_put((torch.tensor(t), torch.tensor(n)), h_n)
        states.append((h_n, c_n))
    return outputs, *(torch.stack(rows) for rows in zip(*states, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
def test_layer_normalisation_as_in_torch(reverse):
    rng = np.random.default_rng(6)
    arrays = {"x": rng.normal(size=(T, B, I)), "h": rng.normal(size=(B, H)), "c": rng.normal(size=(B, H))}
    arrays |= normalised_weights(rng)
    weights = [rng.normal(size=shape) for shape in ((T, B, H), (B, H), (B, H))]

    def ours(x, h, c, w):
        def step(z, state):
            i, f, g, o = mx.split(z + norm(state["h"] @ w["Wh"].T) * w["scale"], 4, axis=-1)
            c = sigmoid(f) * state["c"] + sigmoid(i) * mx.tanh(g)
            state = {"h": sigmoid(o) * mx.tanh(norm(c) * w["scale_c"] + w["b_c"]), "c": c}
            return state["h"], state

        z = norm(x @ w["Wx"].T) + w["b"]
        outputs, last = recurrent(step, z, {"h": h, "c": c}, lengths=LENGTHS, reverse=reverse)
        return outputs, last["h"], last["c"]

    def loss(arrays):
        given = dict(arrays)
        outputs = ours(*(given.pop(name) for name in "xhc"), given)
        return sum(
            (output * mx.array(weight, mx.float64)).sum() for output, weight in zip(outputs, weights, strict=True)
        )

    got, gradients = mx.value_and_grad(loss)({name: mx.array(array, mx.float64) for name, array in arrays.items()})
    theirs = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    given = dict(theirs)
    outputs = normalised_by_torch(*(given.pop(name) for name in "xhc"), given, LENGTHS, reverse)
    expected = sum((output * torch.tensor(weight)).sum() for output, weight in zip(outputs, weights, strict=True))
    expected.backward()
    np.testing.assert_allclose(got.item(), expected.item(), rtol=1e-10)
    for name, gradient in gradients.items():
        found = theirs[name].grad.numpy()
        np.testing.assert_allclose(np.array(gradient), found, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.fixture
def case():
    """Return (arrays, loss) for a cell whose step function also multiplies the input by weights."""
    rng = np.random.default_rng(7)
    shapes = {"x": (T, B, I), "Wx": (H, I), "Wh": (H, H), "h0": (B, H)}
    arrays = {name: mx.array(rng.normal(size=shape), mx.float32) for name, shape in shapes.items()}

    def loss(arrays, lengths=LENGTHS, wrapped=lambda step: step):
        @wrapped
        def cell(x, h, Wx, Wh):
            return mx.tanh(x @ Wx.T + h @ Wh.T)

        def step(x, h):
            h = cell(x, h, arrays["Wx"], arrays["Wh"])
            return h, h

        h, hT = recurrent(step, arrays["x"], arrays["h0"], lengths=lengths, reverse=True)
        return mx.square(h).sum() + hT.sum()

    return arrays, loss


def assert_same(got, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(np.array(got[name]), np.array(value), rtol=2e-5, atol=2e-5, err_msg=name)


def test_what_lies_past_an_end_reaches_nothing(case):
    arrays, loss = case
    ended = mx.arange(T)[:, None, None] >= mx.array(LENGTHS)[:, None]
    arrays["x"] = mx.where(ended, 0, arrays["x"])
    poisoned = arrays | {"x": mx.where(ended, mx.nan, arrays["x"])}

    def second(arrays):
        return mx.square(mx.grad(loss)(arrays)["Wh"]).sum()

    for function in (loss, second):
        value, gradients = mx.value_and_grad(function)(arrays)
        again, found = mx.value_and_grad(function)(poisoned)
        assert again.item() == value.item() and all(mx.array_equal(found[name], gradients[name]) for name in arrays)
        assert mx.any(found["x"]) and not mx.any(mx.where(ended, found["x"], 0))


def test_under_mlx_transformations(case):
    arrays, loss = case
    gradient, lengths, other = mx.grad(loss), mx.array(LENGTHS), mx.array([5, 2, 1])
    plain = gradient(arrays)
    assert_same(mx.compile(gradient)(arrays, lengths), plain)
    assert_same(mx.grad(mx.checkpoint(loss))(arrays), plain)
    assert_same(gradient(arrays, wrapped=mx.checkpoint), plain)
    twice = {name: 2 * array for name, array in arrays.items()}
    stacked = [mx.stack([arrays[name], twice[name]]) for name in arrays]
    each = mx.vmap(lambda ends, *values: gradient(dict(zip(arrays, values, strict=True)), ends))
    found = each(mx.stack([lengths, other]), *stacked)
    for n, expected in enumerate((plain, gradient(twice, other))):
        assert_same({name: value[n] for name, value in found.items()}, expected)
    over_x = mx.vmap(lambda x: loss(arrays | {"x": x}))(stacked[0])
    np.testing.assert_allclose(over_x[0].item(), loss(arrays).item(), rtol=1e-5)


HOLD = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [0, 0, 0]])


def item_by_item(step, x, state, keep, lengths, reverse):
    """Return the outputs and states that the documentation of `recurrent` specifies for `keep` (a factor on the
    previous state) and `hold` (steps at which the cell does not run). They are computed by loops over the sequences
    and their steps."""
    outputs, last, nothing = [], [], mx.zeros((1, H), mx.float64)
    for n, length in enumerate(lengths):
        of_item, (h, count), found = x[:, n : n + 1], [array[n : n + 1] for array in state], {}
        for t in range(T)[::-1] if reverse else range(T):
            if t < length:
                h, count = h * keep[t, n], count * keep[t, n].astype(count.dtype)
                if not HOLD[t, n]:
                    found[t], (h, count) = step(of_item[t], (h, count))
        outputs.append(mx.stack([found.get(t, nothing) for t in range(T)]))
        last.append((h, count))
    return mx.concatenate(outputs, axis=1), [mx.concatenate(arrays) for arrays in zip(*last, strict=True)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("whole", [False, True], ids=["factors", "bool"])
def test_keep_and_hold_are_a_loop_over_the_steps_that_run(whole, lengths, reverse):
    """`keep` (a factor on the previous state) and `hold` (steps at which the cell does not run) give the results of
    a loop that skips held steps. The input is NaN at held steps and after the end of a sequence, so these steps must
    not be read."""
    rng = np.random.default_rng(10)
    factors = rng.integers(0, 3, (T, B)) / 2
    x, h, keep = (
        mx.array(array, mx.float64) for array in (rng.normal(size=(T, B, H)), rng.normal(size=(B, H)), factors)
    )
    count, ends = mx.array([3, 1, 2]), [T] * B if lengths is None else lengths
    unread = (HOLD != 0) | (np.arange(T)[:, None] >= ends)
    weights = [mx.array(rng.normal(size=size), mx.float64) for size in ((T, B, H), (B, H))]

    def step(x, state):
        h, count = state
        h = mx.tanh(x + 0.7 * h)
        return h * h, (h, count + 1)

    def run(x, h, keep, loop):
        if loop:
            return item_by_item(step, x, (h, count), keep, ends, reverse)
        x = mx.where(mx.array(unread)[..., None], mx.nan, x)
        return recurrent(step, x, (h, count), keep=keep, hold=HOLD.tolist(), lengths=lengths, reverse=reverse)

    keep = keep > 0 if whole else keep
    (got, (hT, cT)), (expected, (h_loop, c_loop)) = (run(x, h, keep, loop) for loop in (False, True))
    assert mx.array_equal(cT, c_loop) and hT.dtype == mx.float64
    pairs = [(got, expected), (hT, h_loop)]

    def gradients(loop):
        def loss(*values):
            found, (last, _) = run(*values, *([keep] if whole else []), loop)
            return (found * weights[0]).sum() + (last * weights[1]).sum()

        values = [x, h] if whole else [x, h, keep]
        return mx.grad(loss, argnums=tuple(range(len(values))))(*values)

    for left, right in [*pairs, *zip(gradients(False), gradients(True), strict=True)]:
        np.testing.assert_allclose(np.array(left), np.array(right), rtol=1e-13, atol=1e-14)


SINGULAR = {
    "root of x": lambda x, h: mx.sqrt(x) + mx.tanh(h),
    "log of x": lambda x, h: mx.log(x) * mx.tanh(h),
    "x over its norm": lambda x, h: x / mx.linalg.norm(x, axis=-1, keepdims=True) + h,
    "h over its norm": lambda x, h: x + h / mx.linalg.norm(h, axis=-1, keepdims=True),
    "NaN in a state": lambda x, h: mx.floor(x) + mx.arctan2(h, mx.tanh(h)),
}
"""New states whose derivative is infinite or NaN where x or the previous state is 0."""


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("name", SINGULAR)
def test_padding_does_not_reach_a_singular_derivative(name, every):
    """Gradients are those of a loop over the steps that run, although the derivative of the step is not finite at the
    zeros that it gets for padding, and at the state of a sequence that is empty."""
    rng, lengths = np.random.default_rng(3), [4, 2, 0]
    x = mx.array(rng.uniform(0.5, 0.9, (4, 3, 2)), mx.float64)
    first = mx.array(rng.uniform(0.5, 2, (3, 2)) * [[1], [1], [0]], mx.float64)
    weights = [mx.array(rng.normal(size=shape), mx.float64) for shape in ((4, 3, 2), (3, 2))]

    def step(x, h):
        h = SINGULAR[name](x, h)
        return h, h

    def loss(x, h):
        outputs, last = recurrent(step, x, h, lengths=lengths, checkpoint_every=every)
        return (outputs * weights[0]).sum() + (last * weights[1]).sum()

    def by_hand(x, h):
        total = mx.array(0.0, mx.float64)
        for n, length in enumerate(lengths):
            of_item = h[n]
            for t in range(length):
                of_item = SINGULAR[name](x[t, n], of_item)
                total = total + (of_item * weights[0][t, n]).sum()
            total = total + (of_item * weights[1][n]).sum()
        return total

    with mx.stream(mx.cpu):
        pairs = zip(*(mx.grad(f, argnums=(0, 1))(x, first) for f in (loss, by_hand)), strict=True)
        for got, wanted in pairs:
            assert mx.isfinite(wanted).all()
            np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-6)


class State(NamedTuple):
    """A state of three arrays: the sum so far, the number of steps, and the flag of the latest step."""

    total: mx.array
    count: mx.array
    any: list


@pytest.mark.parametrize("reverse", [False, True])
def test_trees_of_any_dtype_and_rank(reverse):
    """`recurrent` computes running sums over trees of arrays with any dtype and rank. Outputs and last states equal
    NumPy's."""
    rng = np.random.default_rng(8)
    image, token = rng.normal(size=(T, B, 2, 3, 1)).astype(np.float16), rng.integers(1, 9, (T, B))

    def step(x, state):
        state = State(state.total + x["image"], state.count + x["more"][0], [x["more"][1]])
        return {"seen": (state.count, x["more"][1]), "total": state.total * 1}, state

    x = {"image": mx.array(image), "more": [mx.array(token), mx.array(token > 4)]}
    first = State(mx.zeros((B, 2, 3, 1), mx.float16), mx.zeros((B,), mx.int64), [mx.zeros((B,), mx.bool_)])
    outputs, last = recurrent(step, x, first, lengths=LENGTHS, reverse=reverse)
    assert isinstance(last, State) and outputs["total"].dtype == mx.float16
    assert outputs["seen"][1].dtype == last.any[0].dtype == mx.bool_
    order = range(T)[::-1] if reverse else range(T)
    for n, length in enumerate(LENGTHS):
        total, count, flag = np.zeros((2, 3, 1), np.float16), 0, False
        for t in order:
            live = t < length
            if live:
                total, count, flag = total + image[t, n], count + token[t, n], token[t, n] > 4
            assert outputs["seen"][0][t, n].item() == (count if live else 0)
            assert outputs["seen"][1][t, n].item() == (live and flag)
            assert np.array_equal(outputs["total"][t, n], total if live else 0 * total)
        assert np.array_equal(last.total[n], total) and last.count[n].item() == count
        assert last.any[0][n].item() == flag


def test_pieces_are_the_whole():
    rng = np.random.default_rng(9)
    z, Wh, *state = (mx.array(rng.normal(size=size)) for size in ((T, B, 4 * H), (4 * H, H), (B, H), (B, H)))
    whole, last = recurrent(lstm_step(Wh), z, state := tuple(state))
    found = []
    for piece in (z[:1], z[1:4], z[4:]):
        outputs, state = recurrent(lstm_step(Wh), piece, state)
        found.append(outputs[0])
    assert mx.array_equal(mx.concatenate(found), whole[0]) and mx.array_equal(state[1], last[1])


def keep(x, h):
    return x, h


X, H0 = mx.zeros((T, B, I)), mx.zeros((B, H))
WRONG = [
    ("step must be a function", {"step": 3}),
    ("reverse must be True or False but got 1", {"reverse": 1}),
    ("x must have an array", {"x": []}),
    ("x must be an mlx.core.array or a tree of such: make one", {"x": np.zeros((T, B))}),
    (r"x must have shape \[T, B, ...\] but got shape \[5\]", {"x": mx.zeros((T,))}),
    (r"x must have shape \[5, 3, ...\] but got shape \[4, 3\]", {"x": [X, X[:4, :, 0]]}),
    (r"x must have at least one time step but got shape \[0, 3, 2\]", {"x": X[:0]}),
    ("state must be an mlx.core.array or a tree of such but got NoneType", {"state": None}),
    (r"state must have shape \[3, ...\] but got shape \[2, 4\]", {"state": (H0, H0[:2])}),
    (r"state must have shape \[3, ...\] but got shape \[\]", {"state": mx.array(0)}),
    (r"lengths must have shape \[3\]", {"lengths": [1, 2]}),
    (r"lengths must lie in 0..5 but got lengths\[2\] = 6", {"lengths": [1, 2, 6]}),
    ("lengths must be integers", {"lengths": [1.5, 2, 3]}),
    (r"keep must broadcast to \[T, B\] = \[5, 3\] but got shape \[5, 3, 1\]", {"keep": mx.ones((5, 3, 1))}),
    ("keep must be an mlx.core.array: make one by", {"keep": np.ones((5, 3))}),
    ("keep must be real", {"keep": mx.ones((5, 3), mx.complex64)}),
    (r"hold must broadcast to \[T, B\] = \[5, 3\] but got shape \[3, 5\]", {"hold": HOLD.T}),
    ("hold must be bool or integers", {"hold": mx.ones((5, 3))}),
    (r"step must return a tuple of two, .* but got float32 \[3, 4\]", {"step": lambda x, h: h}),
    ("step must return a tuple of two, .* but got tuple of 3", {"step": lambda x, h: (x, h, h)}),
    (
        r"a state like the first, float32 \[3, 4\], but got float16 \[3, 4\] at step 0",
        {"step": lambda x, h: (x, h.astype(mx.float16))},
    ),
    (r"a state like the first, .* but got float32 \[3, 2\] at step 4", {"step": lambda x, h: (x, x), "reverse": True}),
    (r"a state like the first, .* but got \('float32 \[3, 4\]',\) at step 0", {"step": lambda x, h: (x, (h,))}),
    ("the state that step returns must be an mlx.core.array", {"step": lambda x, h: (x, None)}),
    ("the output of step must be an mlx.core.array or a tree of such but got float", {"step": lambda x, h: (0.0, h)}),
    (r"the output of step must have shape \[3, ...\] but got shape \[\]", {"step": lambda x, h: (x.sum(), h)}),
]


@pytest.mark.parametrize("rule, wrong", WRONG, ids=[rule for rule, _ in WRONG])
def test_wrong_calls(rule, wrong):
    with pytest.raises(ValueError, match=rf"^\[recurrent\] .*{rule}.*\.$"):
        recurrent(**{"step": keep, "x": X, "state": H0} | wrong)


def test_outputs_that_differ_by_step():
    widths = iter((2, 2, 3, 2, 2))
    with pytest.raises(ValueError, match=r"of the same form each time, float32 \[3, 2\], but got .*3, 3\] at step 2"):
        recurrent(lambda x, h: (h[:, : next(widths)], h), X, H0)
