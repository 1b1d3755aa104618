"""Tests of `mlx_lstm.pointwise`, which runs a cell given as a Python function, on the CPU engines. Results are
compared with the float64 oracle, plain MLX and independent implementations. Wrong arguments raise an error."""

from contextlib import nullcontext

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from cases import to_mlx, to_numpy
from on_metal import in_turns, on_metal
from pointwise_cases import (
    NOT_FLOATS,
    OPTIONS,
    ZOO,
    Form,
    assert_right,
    by_pointwise,
    by_recurrent,
    draw,
    draw_smooth,
    judged,
    run,
)
from slstm_reference import draw_extreme, slstm_by_softmax

from mlx_lstm import cells, lstm, pointwise
from mlx_lstm.nn import Pointwise
from mlx_lstm.oracle import kink_distance


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("cell", ZOO)
def test_every_engine_of_the_cpu_is_right(cell, option):
    """Every cell of `mlx_lstm.cells` gives right outputs and right gradients of all arrays with every set of
    options. The same cells are also checked with `recurrent`, which loops over plain MLX operations, each with half of
    the options."""
    form, options = ZOO[cell], OPTIONS[option]
    case, cotangents = draw_smooth(np.random.default_rng(1), form, options)
    exact, bounds = judged(form, case, cotangents)
    every = {name: options[name] for name in ("checkpoint_every",) if name in options}
    for engine in ("numpy", "ops"):
        assert_right(run(form, case, cotangents, by_pointwise(engine, **every)), exact, bounds, engine)
    if list(ZOO).index(cell) % 2 == list(OPTIONS).index(option) % 2:
        assert_right(run(form, case, cotangents, by_recurrent), exact, bounds, "recurrent")


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 3, 4), (20, 17, 3, 6), (3, 33, 5, 2), (9, 1, 2, 3)])
def test_odd_sizes_are_right(sizes):
    """Results are right if T, B or H is 1, and for larger sizes, at which the engine `numpy` divides its matrix
    products in another way."""
    for cell in ("lstm", "gru", "slstm", "indrnn"):
        case, cotangents = draw_smooth(np.random.default_rng(2), ZOO[cell], {"lengths": True}, sizes)
        exact, bounds = judged(ZOO[cell], case, cotangents)
        for engine in ("numpy", "ops"):
            assert_right(run(ZOO[cell], case, cotangents, by_pointwise(engine)), exact, bounds, f"{cell} {engine}")


@pytest.mark.parametrize("cell, sizes", in_turns([(cell,) for cell in ZOO], [(5, 3, 2, 7), (35, 17, 3, 6)]))
def test_inference_on_numpy_is_right(cell, sizes):
    """The outputs of a call without a gradient are right on the engine `numpy`, which then saves nothing for a backward
    pass and computes some gates in another way. The second size is one at which each step computes the products with x
    and with h as one product."""
    form = ZOO[cell]
    case, cotangents = draw_smooth(np.random.default_rng(8), form, {"keep": True, "lengths": True}, sizes)
    exact, bounds = judged(form, case, cotangents)
    arrays = {name: to_mlx(array, np.float32) for name, array in case.items() if name not in NOT_FLOATS}
    h, last = by_pointwise("numpy")(form, arrays, case)
    found = {"h": h, "hT": last[0]} | ({"cT": mx.concatenate(last[1:], axis=-1)} if len(last) > 1 else {})
    names = found.keys()
    assert_right(
        {name: to_numpy(found[name]) for name in names}, {n: exact[n] for n in names}, {n: bounds[n] for n in names}
    )


def folded(a, state):
    """A cell of 40 steps, each of which reads the result of the step before it twice."""
    h = a[0]
    for _ in range(40):
        h = (h + mx.sin(h)) / 2
    return (mx.where(h > 0, h, state[0]),)


# {name: (function of a preactivation, the preactivation, its distance from the nearest jump)}
JUMPS = {
    "abs": (mx.abs, -0.3, 0.3),
    "sign": (mx.sign, -0.7, 0.7),
    "floor": (mx.floor, 2.3, 0.3),
    "ceil": (mx.ceil, 2.8, 0.2),
    "round": (mx.round, 2.3, 0.2),
    "round a negative number": (mx.round, -1.1, 0.4),
    "rem": (lambda a: mx.remainder(a, 2), 4.5, 0.25),
    "maximum": (lambda a: mx.maximum(a, 0.5), 0.8, 0.3),
    "minimum": (lambda a: mx.minimum(a, -0.5), -0.8, 0.3),
    "a comparison": (lambda a: mx.where(a >= 1, a, 0), 0.9, 0.1),
    "none": (mx.tanh, 0.0, np.inf),
}


@pytest.mark.parametrize("name", JUMPS)
def test_how_near_a_cell_comes_to_a_jump(name):
    """Rounding can move a number across a jump of an operation. The distance is what a reader finds by hand."""
    function, number, distance = JUMPS[name]
    form = Form(lambda a, state: (function(a[0]),), gates=1, states=1)
    case = {"x": np.full((1, 1, 1), number), "Wx": np.ones((1, 1)), "Wh": np.zeros((1, 1)), "h0": np.ones((1, 1))}
    found = kink_distance(op="pointwise", graph=form.graph(1, 1), **case)
    np.testing.assert_allclose(found, distance, rtol=1e-9)


def test_a_value_that_is_read_twice_is_visited_once():
    """The oracle finds how near a cell comes to a jump in time that grows with the cell's operations, not with the ways
    through them, of which this cell has 2^40."""
    case, _ = draw(np.random.default_rng(4), form := Form(folded, gates=1, states=1), {}, (2, 1, 1, 3))
    h = case["x"] @ case["Wx"].T + case["b"]
    assert (
        0
        < kink_distance(op="pointwise", graph=form.graph(1, 3), **case)
        <= np.abs(h[0] + case["h0"] @ case["Wh"].T).min()
    )


def test_a_cell_that_reads_h_in_several_places():
    """The gradient of the first state equals a complex step of the same cell in NumPy: the imaginary part of a result
    for h + 1e-30 i is the derivative times 1e-30."""

    def cell(a, state, library=mx):
        h = state[0]
        return (library.tanh(a[0]) * library.sin(h) * library.cos(h) + 0.125 * h * h,)

    rng = np.random.default_rng(0)
    x, h0 = rng.normal(size=(4, 3, 5)), rng.normal(size=(3, 5))
    h = h0 + 1e-30j
    for step in x:
        (h,) = cell([step], [h], np)
    with mx.stream(mx.cpu):
        x, h0 = (mx.array(array, mx.float64) for array in (x, h0))
        for engine in ("numpy", "ops"):

            def last(h0, engine=engine):
                return pointwise(cell, x, None, None, None, [h0], engine=engine)[1][0]

            (got,), (slope,) = mx.vjp(last, [h0], [mx.ones_like(h0)])
            # MLX's functions have an error of about 1e-7, also in float64.
            np.testing.assert_allclose(got, h.real, rtol=0, atol=1e-6)
            np.testing.assert_allclose(slope, h.imag / 1e-30, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes_are_right(dtype):
    """Results of the engine `numpy` in float16 and in float64 have the dtype of the arguments and are within the
    error bounds of this dtype."""
    case, cotangents = draw_smooth(np.random.default_rng(3), ZOO["slstm"], {"lengths": True})
    rounded = {n: a if n in ("lengths", "reverse") else a.astype(dtype).astype(np.float64) for n, a in case.items()}
    cotangents = {name: d.astype(dtype) for name, d in cotangents.items()}
    exact, bounds = judged(ZOO["slstm"], rounded, cotangents, np.dtype(dtype).name)
    got = run(ZOO["slstm"], rounded, cotangents, by_pointwise("numpy"), dtype)
    assert {array.dtype for array in got.values()} == {np.dtype(dtype)}
    assert_right(got, exact, bounds)


def test_both_directions_are_two_calls():
    """A bidirectional call gives exactly the results of two calls, one of them with `reverse`, side by side."""
    rng, H = np.random.default_rng(4), 3
    form = Form(cells.zoneout_lstm, 4, 2, inputs=2)
    pairs = [draw(rng, form, {"keep": True}, (4, 2, 3, H))[0] for _ in range(2)]
    one, other = ({n: mx.array(a.astype(np.float32)) for n, a in case.items() if n != "reverse"} for case in pairs)

    def both(name, axis):
        return mx.concatenate([one[name], other[name]], axis=axis)

    inputs = [mx.concatenate([case["inputs"][..., k * H : (k + 1) * H] for case in (one, other)], -1) for k in range(2)]
    Wh, keep = mx.stack([one["Wh"], other["Wh"]]), both("keep", 2)
    for engine in ("numpy", "ops"):
        h, last = pointwise(
            *(form.cell, one["x"], both("Wx", 0), Wh, both("b", 0), (both("h0", 1), both("c0", 1))),
            **{"inputs": inputs, "keep": keep, "bidirectional": True, "lengths": [4, 2], "engine": engine},
        )
        for d, case in enumerate((one, other)):
            half = slice(d * H, (d + 1) * H)
            h_d, last_d = pointwise(
                *(form.cell, one["x"], case["Wx"], case["Wh"], case["b"], (case["h0"], case["c0"])),
                **{"inputs": mx.split(case["inputs"], 2, axis=-1), "keep": case["keep"][..., 0]},
                **{"lengths": [4, 2], "reverse": d == 1, "engine": engine},
            )
            for got, wanted in zip((h, *last), (h_d, *last_d), strict=True):
                assert mx.allclose(got[..., half], wanted, rtol=0, atol=0)


def test_an_lstm_of_ones_own_equals_lstm():
    """`pointwise` with the LSTM cell of `mlx_lstm.cells` gives the same outputs and gradients as `lstm`, with all
    options that both of them accept."""
    rng = np.random.default_rng(5)
    T, B, I, H = 6, 4, 3, 5
    a = {"x": (T, B, I), "Wx": (4 * H, I), "Wh": (4 * H, H), "b": (4 * H,), "h0": (B, H), "c0": (B, H)}
    a = {name: mx.array(rng.normal(size=shape).astype(np.float32)) for name, shape in a.items()}
    mask, keep = mx.array(rng.normal(size=(T, B, H)), mx.float32), mx.array(rng.normal(size=(T, B)), mx.float32)
    options = {"mask": mask, "keep": keep, "hold": mx.array(rng.random((T, B)) < 0.4), "lengths": [6, 2, 0, 5]}

    def own(*values):
        x, Wx, Wh, b, *state = values
        h, last = pointwise(cells.lstm, x, Wx, Wh, b, state, **options, reverse=True)
        return [h, *last]

    def ours(*values):
        out = lstm(*values, **options, reverse=True)
        return [out.h, out.hT, out.cT]

    d = [mx.array(rng.normal(size=shape), mx.float32) for shape in ((T, B, H), (B, H), (B, H))]
    (got, d_got), (wanted, d_wanted) = (mx.vjp(f, list(a.values()), d) for f in (own, ours))
    for one, other in zip(got + d_got, wanted + d_wanted, strict=True):
        # `pointwise` and `lstm` round differently, so allow a difference of 64 float32 roundings.
        assert np.abs(to_numpy(one) - to_numpy(other)).max() <= 64 * 2.0**-23 * (1 + np.abs(to_numpy(other)).max())


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_slstm_equals_a_loop_of_the_papers_equations():
    """The sLSTM in `mlx_lstm.cells` equals a float64 loop of the paper's equations from zero states. The loop does
    not use the paper's stabiliser, an additional state that prevents overflow."""
    rng, (T, B, I, H) = np.random.default_rng(6), (7, 3, 2, 4)
    x, Wx, Wh, b = (rng.normal(size=s) for s in ((T, B, I), (4 * H, I), (4 * H, H), (4 * H,)))
    zeros = [mx.zeros((B, H), mx.float64)] * 4
    h, (_, c, n, m) = pointwise(cells.slstm, *(mx.array(a, mx.float64) for a in (x, Wx, Wh, b)), zeros)
    h_t, c_t, n_t = np.zeros((3, B, H))
    for t in range(T):
        i, f, z, o = np.split(x[t] @ Wx.T + h_t @ Wh.T + b, 4, axis=-1)
        c_t = sigmoid(f) * c_t + np.exp(i) * np.tanh(z)
        n_t = sigmoid(f) * n_t + np.exp(i)
        h_t = sigmoid(o) * c_t / n_t
        np.testing.assert_allclose(np.array(h)[t], h_t, rtol=1e-12, atol=1e-14)
    scale = np.exp(np.array(m))
    np.testing.assert_allclose(np.array(c) * scale, c_t, rtol=1e-12)
    np.testing.assert_allclose(np.array(n) * scale, n_t, rtol=1e-12)


@pytest.mark.parametrize("seed, lengths", [(0, False), (1, True)])
def test_extreme_input_gates_of_slstm(seed, lengths):
    """From states of 0 and after a reset by `keep`, outputs and gradients of the sLSTM are right for preactivations of
    the input gate from -1000 to 1000."""
    case, cotangents = draw_extreme(np.random.default_rng(seed), (7, 3, 4), lengths)
    exact = slstm_by_softmax(case, cotangents)
    bounds = judged(ZOO["slstm"], case, cotangents)[1]
    for call in (by_pointwise("numpy"), by_pointwise("ops"), by_recurrent):
        got = run(ZOO["slstm"], case, cotangents, call)
        assert_right({name: got[name] for name in exact}, exact, bounds)


def test_zoneout_equals_a_loop_of_the_papers_equations():
    """The zoneout LSTM in `mlx_lstm.cells` equals a float64 loop of the paper's equations."""
    rng, (T, B, I, H) = np.random.default_rng(7), (6, 2, 3, 5)
    x, Wx, Wh, b = (rng.normal(size=s) for s in ((T, B, I), (4 * H, I), (4 * H, H), (4 * H,)))
    holds = (rng.random((2, T, B, H)) < 0.3).astype(np.float64)
    zeros = [mx.zeros((B, H), mx.float64)] * 2
    arrays = [mx.array(a, mx.float64) for a in (x, Wx, Wh, b)]
    h, last = pointwise(cells.zoneout_lstm, *arrays, zeros, inputs=[mx.array(a, mx.float64) for a in holds])
    h_t, c_t = np.zeros((2, B, H))
    for t in range(T):
        i, f, g, o = np.split(x[t] @ Wx.T + h_t @ Wh.T + b, 4, axis=-1)
        c_new = sigmoid(f) * c_t + sigmoid(i) * np.tanh(g)
        h_t = np.where(holds[0, t], h_t, sigmoid(o) * np.tanh(c_new))
        c_t = np.where(holds[1, t], c_t, c_new)
        np.testing.assert_allclose(np.array(h)[t], h_t, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.array(last[1]), c_t, rtol=1e-12)


def loss(values, engine=None):
    x, Wx, Wh, b, *state = values
    h, last = pointwise(cells.slstm, x, Wx, Wh, b, state, engine=engine)
    return (h * h).sum() + last[1].sum()


def call_of_slstm():
    rng = np.random.default_rng(8)
    shapes = [(4, 2, 3), (12, 3), (12, 3), (12,), (2, 3), (2, 3), (2, 3), (2, 3)]
    arrays = [mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    arrays[6] = 1 + mx.abs(arrays[6])
    return arrays


@pytest.mark.filterwarnings("ignore:inside mx.compile")
def test_mlx_transforms_it():
    """Inside mx.compile and mx.checkpoint a call of `pointwise` gives the same value and gradients as outside of them.
    Inside mx.vmap it gives the same value."""
    arrays = call_of_slstm()
    value, gradients = mx.value_and_grad(loss)(arrays)
    for transformed in (mx.compile(mx.value_and_grad(loss)), mx.value_and_grad(mx.checkpoint(loss))):
        again, d = transformed(arrays)
        assert mx.allclose(again, value)
        assert all(mx.allclose(one, other, atol=1e-5) for one, other in zip(d, gradients, strict=True))
    many = mx.vmap(lambda x: loss([x, *arrays[1:]]))(mx.stack([arrays[0], 2 * arrays[0]]))
    assert mx.allclose(many[0], value)


def test_a_function_traced_first_inside_mx_compile_is_right():
    """A cell gives right results even if its first call is inside mx.compile. The library then traces the cell's
    function while MLX traces the compiled function."""
    arrays = call_of_slstm()

    def own(a, state):
        return cells.slstm(a, state)

    def call(x):
        return pointwise(own, x, *arrays[1:4], arrays[4:], engine="ops")[0]

    assert mx.allclose(mx.compile(call)(arrays[0]), call(arrays[0]), atol=1e-6)


def test_ops_has_every_derivative_and_the_others_refuse():
    """`pointwise` on the engine `ops` has second derivatives and forward mode. On `numpy` a second derivative raises
    an error."""
    arrays = call_of_slstm()
    second = mx.grad(lambda Wh: mx.grad(lambda W: loss([*arrays[:2], W, *arrays[3:]], "ops"))(Wh).sum())(arrays[2])
    assert mx.isfinite(second).all() and mx.abs(second).max() > 0
    _, tangents = mx.jvp(lambda x: loss([x, *arrays[1:]], "ops"), [arrays[0]], [mx.ones_like(arrays[0])])
    assert mx.allclose(tangents[0], mx.grad(lambda x: loss([x, *arrays[1:]], "numpy"))(arrays[0]).sum(), rtol=1e-4)
    with pytest.raises(RuntimeError, match="no second derivative"):
        mx.grad(lambda W: mx.grad(lambda V: loss([*arrays[:2], V, *arrays[3:]], "numpy"))(W).sum())(arrays[2])


def test_padding_is_not_read():
    """Outputs and gradients are right although x and the inputs per step are NaN after the end of each sequence."""
    rng = np.random.default_rng(9)
    for cell in ("zoneout_lstm", "augru", "indrnn", "slstm"):
        form = ZOO[cell]
        case, cotangents = draw_smooth(rng, form, {"lengths": True})
        case["lengths"] = np.array([5, 2, 0])
        exact, bounds = judged(form, case, cotangents)
        for name in {"x", "inputs"} & case.keys():
            case[name][2:, 1] = case[name][:, 2] = np.nan
        for engine in ("numpy", "ops"):
            assert_right(run(form, case, cotangents, by_pointwise(engine)), exact, bounds, f"{cell} {engine}")


def singular_at_zero(a, state, u):
    """A cell with a derivative that is NaN where both u and the previous c are 0, as in padding filled with 0."""
    return mx.tanh(a[0] + mx.arctan2(u, state[1])), mx.maximum(state[1] - 1, 0.0)


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"mask": True, "keep": True}])
def test_padding_does_not_reach_a_singular_derivative(options):
    """Gradients are finite and right on `numpy` and `ops` although the cell's derivative is NaN at 0. A padded step
    with an input of 0 and the last state would be such a place."""
    form = Form(singular_at_zero, gates=1, states=2, inputs=1)
    case, cotangents = draw(np.random.default_rng(12), form, {"lengths": True, **options}, (4, 4, 3, 5))
    case["c0"] = np.abs(case["c0"]) + 1.25
    case["lengths"] = np.array([1, 0, 4, 2])
    case["c0"][2] += 4
    exact, bounds = judged(form, case, cotangents)
    assert all(np.isfinite(value).all() for value in exact.values())
    for name in {"x", "inputs"} & case.keys():
        for b, length in enumerate(case["lengths"]):
            case[name][length:, b] = np.nan
    for engine in ("numpy", "ops"):
        assert_right(run(form, case, cotangents, by_pointwise(engine)), exact, bounds, engine)


def rounded_down(a, state):
    """A cell whose second state has the derivative 0. The derivative of h by this state is NaN where it is 0."""
    return mx.arctan2(mx.tanh(state[1]), state[1]), mx.floor(a[0])


@pytest.mark.parametrize("options", [{}, {"lengths": [2, 2]}, {"lengths": [2, 1]}, {"lengths": [2, 1], "keep": True}])
@pytest.mark.parametrize("engine", ["numpy", "ops"])
def test_a_derivative_that_is_nan_stays_where_it_is(engine, options):
    """A NaN in the gradient of a state does not reach other arrays if the derivative of this state is 0. Batch items
    that end and a reverse sequence change nothing. The first state has the derivative (y'x - yx') / (x^2 + y^2)."""
    start = np.array([[1.0, -0.5, 2.0], [0.25, 1.5, -3.0]])
    given = options | ({"keep": mx.ones((2, 2))} if "keep" in options else {})

    def total(x, c):
        h, last = pointwise(rounded_down, x, None, None, None, (mx.ones((2, 3)), c), engine=engine, **given)
        return (h[0] * mx.array([[2.0, -3.0, 5.0]])).sum() + h[1].sum() + last[1].sum()

    x = mx.full((2, 2, 3), 0.5)  # floor is 0 there
    dx, dc = mx.grad(total, argnums=(0, 1))(x, mx.array(start, mx.float32))
    y = np.tanh(start)
    slope = ((1 - y * y) * start - y) / (start**2 + y**2)
    np.testing.assert_allclose(np.array(dc), slope * [[2.0, -3.0, 5.0]], rtol=1e-5)
    assert not np.array(dx).any()


SINGULAR = {
    "arctan2(0, 0)": (lambda a: mx.arctan2(a, mx.abs(a)), 0.0, mx.nan),
    "sqrt(0)": (mx.sqrt, 0.0, mx.inf),
    "log(0)": (mx.log, 0.0, mx.inf),
    "1 / 0": (lambda a: 1 / a, 0.0, -mx.inf),
    "0 / 0": (lambda a: a / mx.abs(a), 0.0, mx.nan),
    "norm of 0": (lambda a: mx.sqrt(a * a), 0.0, mx.nan),
    "0 to the 0.5": (lambda a: a**0.5, 0.0, mx.inf),
    "-0 to the 0.5": (lambda a: a**0.5, -0.0, mx.inf),
    "-0 to the -0.5": (lambda a: 1 / a**-0.5, -0.0, mx.nan),
    "arccos(1)": (mx.arccos, 1.0, -mx.inf),
    "abs(0)": (mx.abs, 0.0, 0.0),
    "logaddexp of 0 and 0": (lambda a: mx.logaddexp(mx.log(a), mx.log(a)), 0.0, mx.nan),
}
"""Functions, a number at which most of them have no derivative, and what MLX gives for the derivative there."""


@pytest.mark.parametrize("engine", ["numpy", "ops", "stepwise"])
def test_engines_agree_where_there_is_no_derivative(engine):
    """Where a cell has no derivative, or an infinite one, each engine gives the value and the derivative of MLX."""

    def cell(a, state):
        return tuple(function(part) for part, (function, _, _) in zip(a, SINGULAR.values(), strict=True))

    x = mx.array([[[number for _, number, _ in SINGULAR.values()]]])
    first = (mx.zeros((1, 1)),) * len(SINGULAR)

    def states(x):
        return list(pointwise(cell, x, None, None, None, first, engine=engine)[1])

    with on_metal() if engine == "stepwise" else nullcontext():
        values, (dx,) = mx.vjp(states, [x], [mx.ones((1, 1))] * len(SINGULAR))
        mx.eval(values, dx)
    for name, value, slope in zip(SINGULAR, values, dx.reshape(-1).tolist(), strict=True):
        function, number, wanted = SINGULAR[name]
        assert np.array_equal(np.array(value[0, 0]), np.array(function(mx.array(number))), equal_nan=True), name
        assert np.array_equal(slope, wanted, equal_nan=True), (name, slope)


def test_ops_can_be_exported_and_mapped_with_lengths(tmp_path):
    """A call with lengths on `ops` can be exported with its gradient. The gradient of mx.vmap of a call is that of the
    calls."""

    def total(x):
        first = (mx.ones((2, 3)), mx.full((2, 3), 3.0))
        h, last = pointwise(rounded_down, x, None, None, None, first, lengths=[3, 1], engine="ops")
        return (h * x).sum() + last[0].sum()

    x = mx.arange(36.0).reshape(2, 3, 2, 3) / 7
    wanted = [mx.grad(total)(part) for part in x]
    got = mx.grad(lambda x: mx.vmap(total)(x).sum())(x)
    assert all(mx.allclose(one, other) for one, other in zip(got, wanted, strict=True))
    mx.export_function(str(tmp_path / "slope.mlxfn"), lambda x: [mx.grad(total)(x)], x[0])
    (again,) = mx.import_function(str(tmp_path / "slope.mlxfn"))(x[0])
    assert mx.allclose(again, wanted[0])


def test_h_of_the_shape_is_the_callers():
    """A cell's function may read the shapes of its arguments. It sees the batch size and H of the call."""

    def scaled(a, state):
        return (a[0] / state[0].shape[-1] + state[0] / state[0].shape[0],)

    for B, H in ((2, 3), (4, 5)):
        x = mx.ones((1, B, H))
        h, _ = pointwise(scaled, x, None, None, None, (mx.ones((B, H)),))
        assert mx.allclose(h, mx.full((1, B, H), 1 / H + 1 / B))


def test_numpy_leaves_erf_to_ops():
    """NumPy has no erf. So for a cell that uses erf the default engine is `ops`, and a request for `numpy` raises an
    error with this reason."""

    def gelu(a, state):
        return (mlx.nn.gelu(a[0] + state[0]),)

    arguments = (gelu, mx.ones((2, 2, 3)), None, None, None, (mx.zeros((2, 3)),))
    assert pointwise(*arguments)[0].shape == (2, 2, 3)
    with pytest.raises(ValueError, match="NumPy has no erf"):
        pointwise(*arguments, engine="numpy")


def test_the_layer_runs_its_cell():
    """The layer `nn.Pointwise` equals a call of `pointwise` with the layer's parameters, except that x has the batch
    axis first. The layer also accepts cells with inputs per step and without recurrent weights."""
    mx.random.seed(10)
    layer = Pointwise(cells.peephole_lstm, 3, 4, gates=4, states=2, params=3)
    x = mx.random.normal((2, 5, 3))
    h, state = layer(x, lengths=[5, 3], keep=mx.ones((2, 5)), hold=mx.zeros((2, 5), mx.bool_))
    wanted, last = pointwise(
        *(cells.peephole_lstm, mx.swapaxes(x, 0, 1), layer.Wx, layer.Wh, layer.bias, [mx.zeros((2, 4))] * 2),
        **{"params": layer.params, "lengths": [5, 3]},
    )
    assert mx.allclose(h, mx.swapaxes(wanted, 0, 1), atol=1e-6)
    assert all(mx.allclose(one, other, atol=1e-6) for one, other in zip(state, last, strict=True))
    names = dict(mlx.nn.utils.tree_flatten(layer.trainable_parameters()))
    assert sorted(names) == ["Wh", "Wx", "bias", "params.0", "params.1", "params.2"]
    _, gradients = mlx.nn.value_and_grad(layer, lambda x: layer(x)[0].sum())(x)
    assert mx.abs(gradients["params"][0]).max() > 0
    noisy = Pointwise(cells.augru, 3, 4, gates=3, apart=True, bias=False)
    assert noisy(x, inputs=[mx.ones((2, 5, 1))])[0].shape == (2, 5, 4)
    free = Pointwise(cells.minimal_gru, 3, 4, gates=2, recurrent=False).eval()
    assert free(x)[0].shape == (2, 5, 4)


BOTH = {"bidirectional": True, "state": (mx.zeros((2, 6)),)}
REFUSED = {
    "state must be a tuple or list": {"state": 3},
    "state must have at least one": {"state": ()},
    r"state\[0\] must have shape": {"state": (mx.zeros(3),)},
    r"state\[1\] must have shape \[2, 3\]": {"state": (mx.zeros((2, 3)), mx.zeros((2, 4)))},
    r"inputs\[0\] must broadcast": {"inputs": (mx.zeros((5, 2, 3)),)},
    r"inputs must be a tuple or list": {"inputs": mx.zeros((4, 2, 3))},
    r"params\[0\] must have shape \[3\]": {"params": (mx.zeros(4),)},
    "Wx must have G H rows": {"Wx": mx.zeros((4, 2))},
    "Wx must have 2 G H rows with H = 3": BOTH | {"Wx": mx.zeros((8, 2))},
    "Wx must have shape": {"Wx": mx.zeros((6, 5))},
    "Wh must have shape": {"Wh": mx.zeros((6, 4))},
    "b must have shape": {"b": mx.zeros(5)},
    "apart must be True or False": {"apart": 1},
    "apart must be False where Wh is None": {"apart": True, "Wh": None},
    "mask must be None where Wh is None": {"mask": mx.ones((2, 3)), "Wh": None},
    "x must have G H features": {"Wx": None},
    "checkpoint_every": {"checkpoint_every": 0},
    "engine must be one of": {"engine": "cuda"},
    "the cell must return a tuple of 1 states": {"cell": lambda a, state: (a[0], a[1])},
    "the cell must keep the shape": {"cell": lambda a, state: (a[0][:1],)},
    "cell must be a function": {"cell": 3},
}


@pytest.mark.parametrize("text", REFUSED)
def test_wrong_arguments_are_refused(text):
    """A wrong argument of `pointwise` raises a ValueError that names the argument."""
    given = {"cell": cells.minimal_gru, "x": mx.ones((4, 2, 2)), "Wx": mx.ones((6, 2)), "Wh": mx.ones((6, 3))}
    given |= {"b": mx.ones(6), "state": (mx.zeros((2, 3)),)} | REFUSED[text]
    first = [given.pop(name) for name in ("cell", "x", "Wx", "Wh", "b", "state")]
    with pytest.raises(ValueError, match=r"^\[pointwise\].*" + text):
        pointwise(*first, **given)
