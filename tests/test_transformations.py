"""Tests of the recurrence ops under MLX's transformations: grad of grad, jvp, compile, vmap, checkpoint, export."""

import warnings
from pathlib import Path
from threading import Thread

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from cases import EVERY_ARRAY, KINDS, OPTIONS, OUTPUTS_OF, draw_away_from_kinks, run, split, to_mlx
from pairs import pairs

import mlx_lstm.nn
from mlx_lstm import Norm, cells, lstm, pointwise, recurrence
from mlx_lstm.engines.tracing import PLACEHOLDER, is_transforming
from mlx_lstm.ground.checks import forget_warnings

ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


def small(kind, dtype=np.float32):
    """Return (arrays, call, loss) of a small random LSTM, GRU or RNN. `arrays` has all arrays that the cell
    supports, `call` is the op as a function of these arrays, and `loss` is a number computed from the outputs."""
    case, cotangents = draw_away_from_kinks(9, sizes=(2, 2, 2, 2, 3), **EVERY_ARRAY[kind] | {"mask": ("P",)})
    op, arrays, options = split(case)
    weights = {name: to_mlx(array, dtype) for name, array in cotangents.items()}

    def call(*values, **more):
        return getattr(recurrence, op)(**dict(zip(arrays, values, strict=True)), **options, **more)

    def loss(*values, shown=OUTPUTS_OF[op], **more):
        out = call(*values, return_gates="gates" in shown, **more)
        outputs = {name: getattr(out, name) for name in shown}
        return sum((output * weights[name]).sum() for name, output in outputs.items()) + (out.hT * out.hT).sum()

    return [to_mlx(array, dtype) for array in arrays.values()], call, loss


def gradient(loss, count):
    return mx.grad(loss, argnums=tuple(range(count)))


def assert_trees_close(got, expected):
    for left, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.array(left), np.array(right), rtol=2e-5, atol=2e-6)


@ALL_KINDS
def test_gradient_under_mlx_transformations(kind):
    """grad, value_and_grad, checkpoint, vmap of grad, and grad of vmap give the same gradients."""
    arrays, _, loss = small(kind)
    n = len(arrays)
    plain = gradient(loss, n)(*arrays)
    assert_trees_close(mx.value_and_grad(loss, argnums=tuple(range(n)))(*arrays)[1], plain)
    assert_trees_close(gradient(mx.checkpoint(loss), n)(*arrays), plain)
    stack = [mx.stack([array, array]) for array in arrays]
    assert_trees_close([g[1] for g in mx.vmap(gradient(loss, n))(*stack)], plain)
    both = gradient(lambda *stack: mx.vmap(loss)(*stack).sum(), n)(*stack)
    assert_trees_close([g[0] for g in both], plain)


@ALL_KINDS
def test_vmap_over_one_argument(kind):
    """mx.vmap over any single argument, while the others are shared, gives the outputs of separate calls."""
    arrays, call, _ = small(kind)
    case, _ = draw_away_from_kinks(9, sizes=(2, 2, 2, 2, 3), **EVERY_ARRAY[kind] | {"mask": ("P",)})
    expected = np.array(call(*arrays).h)
    for n, name in enumerate(split(case)[1]):
        many = mx.vmap(lambda array, n=n: call(*arrays[:n], array, *arrays[n + 1 :]).h)
        got = many(mx.stack([2 * arrays[n], arrays[n]]))
        np.testing.assert_allclose(np.array(got[1]), expected, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("kind, training, engine", pairs(kind=KINDS, training=[True, False], engine=[None, "ops"]))
def test_vmap_over_lengths(kind, training, engine):
    """mx.vmap over lengths, alone or together with x, gives the outputs of separate calls. vmap of grad and grad of
    vmap give the gradients of separate calls."""
    arrays, call, _ = small(kind)
    lengths = mx.array([[2, 1], [0, 2], [1, 1]])

    def outputs(x, lengths):
        return call(x, *arrays[1:], lengths=lengths, training=training, engine=engine).h

    def loss(x, lengths):
        return (outputs(x, lengths) ** 2).sum()

    x, many = arrays[0], mx.stack([arrays[0], 2 * arrays[0], arrays[0] - 1])
    each = [(many[n], lengths[n]) for n in range(3)]
    assert_trees_close(mx.vmap(outputs, (None, 0))(x, lengths), [outputs(x, row) for row in lengths])
    assert_trees_close(mx.vmap(outputs)(many, lengths), [outputs(*row) for row in each])
    expected = [mx.grad(loss)(*row) for row in each]
    assert_trees_close(mx.vmap(mx.grad(loss))(many, lengths), expected)
    assert_trees_close(mx.grad(lambda many: mx.vmap(loss)(many, lengths).sum())(many), expected)


@pytest.mark.parametrize("training", [True, False])
@ALL_KINDS
def test_a_backward_pass_of_which_only_the_gradient_is_traced(kind, training):
    """A backward pass is right if the forward pass already ran on the CPU and only the cotangents are traced. This
    happens when mx.vmap computes a Jacobian row by row, and when only the backward pass is compiled."""
    arrays, call, _ = small(kind)

    def pull(cotangent):
        return mx.vjp(lambda *values: call(*values, training=training).hT, arrays, [cotangent])[1]

    cotangents = mx.random.normal((3, *call(*arrays).hT.shape))
    expected = [pull(row) for row in cotangents]
    for array, rows in zip(mx.vmap(pull)(cotangents), zip(*expected, strict=True), strict=True):
        assert_trees_close(array, rows)
    assert_trees_close(mx.compile(pull)(cotangents[1]), expected[1])


def test_what_is_evaluated(monkeypatch):
    """The engine `ops` does not evaluate arrays. The only exception is a call with training=False inside a
    transformation, which evaluates its arguments."""
    asked = []
    for name in ("eval", "async_eval"):
        real = getattr(mx, name)
        monkeypatch.setattr(mx, name, lambda *arrays, real=real: (asked.append(arrays), real(*arrays))[1])

    def call(training):
        return lstm(mx.ones((3, 2, 4)), mx.ones((8, 4)), mx.ones((8, 2)), engine="ops", training=training)

    out = call(training=True)
    mx.grad(lambda h0: lstm(out.h, mx.ones((8, 2)), mx.ones((8, 2)), h0=h0, engine="ops").h.sum())(out.hT)
    assert not asked
    call(training=False)
    asked = [arrays for arrays in asked if arrays[0] is not PLACEHOLDER]
    assert not asked
    mx.grad(lambda x: (call(training=False), x)[1])(mx.ones(()))
    assert [len(arrays[0]) for arrays in asked if arrays[0] is not PLACEHOLDER] == [3]


TRANSFORMATIONS = {
    "vjp": lambda f: mx.vjp(lambda x: [f(x)], [mx.ones(1)], [mx.ones(1)]),
    "jvp": lambda f: mx.jvp(lambda x: [f(x)], [mx.ones(1)], [mx.ones(1)]),
    "grad": lambda f: mx.grad(lambda x: f(x).sum())(mx.ones(1)),
    "grad of grad": lambda f: mx.grad(lambda x: mx.grad(lambda y: (y * f(x)).sum())(x).sum())(mx.ones(1)),
    "checkpoint": lambda f: mx.grad(lambda x: mx.checkpoint(f)(x).sum())(mx.ones(1)),
    "vmap": lambda f: mx.vmap(f)(mx.ones(1)),
    "compile": lambda f: mx.compile(f)(mx.ones(1)),
    "shapeless": lambda f: mx.compile(f, shapeless=True)(mx.ones(1)),
    "grad of compile": lambda f: mx.grad(lambda x: mx.compile(f)(x).sum())(mx.ones(1)),
    "export": lambda f: mx.export_function(lambda node: None, f, mx.ones(1)),
}


NEEDS_COMPILE = pytest.mark.needs_mx_compile


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NEEDS_COMPILE if name in ("compile", "shapeless") else []) for name in TRANSFORMATIONS],
)
def test_whether_mlx_transforms_is_known(name):
    """`is_transforming` is true inside each of MLX's transformations and false after it, also in a new thread."""
    found = []
    TRANSFORMATIONS[name](lambda x: (found.append(is_transforming()), x)[1])
    assert found and all(found)
    assert not is_transforming()

    def in_thread():
        found.append(is_transforming())
        TRANSFORMATIONS[name](lambda x: (found.append(is_transforming()), x)[1])

    found.clear()
    thread = Thread(target=in_thread)
    thread.start()
    thread.join()
    assert found[0] is False and len(found) > 1 and all(found[1:])


def test_whether_mlx_transforms_is_known_where_nothing_is_compiled():
    seen = []
    mx.disable_compile()
    try:
        assert not is_transforming()
        mx.grad(lambda x: (seen.append(is_transforming()), x.sum())[1])(mx.ones((2,)))
        assert not is_transforming()
    finally:
        mx.enable_compile()
    assert seen == [True] and not is_transforming()


def test_whether_mlx_transforms_is_known_in_a_new_stream():
    """`is_transforming` is right in a new stream. MLX compiles its test function again in each stream, and then Python
    runs, although no transformation runs."""
    seen = []
    for _ in range(2):
        with mx.stream(mx.new_stream(mx.cpu)):
            seen.append(is_transforming())
        with mx.stream(mx.new_stream(mx.cpu)):
            mx.grad(lambda x: (seen.append(not is_transforming()), x.sum())[1])(mx.ones((2,)))
            seen.append(is_transforming())
    assert len(seen) == 6 and not any(seen)


@NEEDS_COMPILE
@ALL_KINDS
def test_compiled_for_any_shape_is_refused(kind):
    """MLX raises an error for a recurrence compiled with shapeless=True, because it cannot infer the output shapes.
    It never returns a wrong shape."""
    arrays, call, _ = small(kind)
    compiled = mx.compile(lambda x: call(x, *arrays[1:], training=False).h, shapeless=True)
    with pytest.raises(ValueError, match="cannot infer output shapes"):
        mx.eval(compiled(arrays[0]), compiled(mx.concatenate([arrays[0], arrays[0]])))


@NEEDS_COMPILE
@pytest.mark.parametrize("axis", [0, 1])
@ALL_KINDS
def test_a_single_step_compiled_for_any_shape_is_refused(kind, axis):
    """A single step compiled with shapeless=True raises an error if it is called with more steps or more batch
    items. It never returns a wrong shape."""
    arrays, call, _ = small(kind)
    x = arrays[0][:1]
    compiled = mx.compile(lambda x: call(x, *arrays[1:], training=False).h, shapeless=True)
    with pytest.raises(ValueError, match=r"cannot infer output shapes|Cannot reshape"):
        mx.eval(compiled(x), compiled(mx.concatenate([x, x], axis)))


def test_vmap_of_the_gradient_of_an_own_cell():
    """MLX maps an operation that adds two axes at once to wrong axes, such as the gradient of a squeeze of two axes."""
    rng = np.random.default_rng(0)
    arrays = [mx.array(rng.normal(size=(3, *shape)).astype(np.float32)) for shape in ((2, 2, 1), (4, 1), (2, 4), (4,))]

    def loss(x, Wx, h, u):
        return pointwise(cells.indrnn, x, Wx, None, None, (h,), params=(u,), engine="ops")[0].square().sum()

    mapped = mx.vmap(gradient(loss, 4))(*arrays)
    for n in range(3):
        assert_trees_close([d[n] for d in mapped], gradient(loss, 4)(*(array[n] for array in arrays)))


def test_vmap_over_the_bias_of_a_plain_layer_alone():
    x, Wx, Wh = mx.random.normal((3, 2, 4)), mx.random.normal((8, 4)), mx.random.normal((8, 2))
    biases = mx.random.normal((3, 8))
    got = mx.vmap(lambda b: lstm(x, Wx, Wh, b).h)(biases)
    assert_trees_close(got, [lstm(x, Wx, Wh, b).h for b in biases])


@ALL_KINDS
def test_compiled_with_lengths_as_an_argument(kind):
    """A compiled function may take lengths as an argument that changes from call to call. Inside the compiled
    function the range of lengths is not checked, because a traced array has no values."""
    arrays, _, loss = small(kind)
    count = len(arrays)
    compiled = mx.compile(lambda n, *arrays: gradient(lambda *a: loss(*a, lengths=n), count)(*arrays))
    for lengths in ([2, 1], [0, 2]):
        expected = gradient(lambda *a, n=lengths: loss(*a, lengths=n), count)(*arrays)
        assert_trees_close(compiled(mx.array(lengths), *arrays), expected)


@ALL_KINDS
def test_compiled_with_arrays_that_elementwise_operations_compute(kind):
    """MLX cannot compile two equal splits of such an array, as each step would split the peephole weights."""
    arrays, _, loss = small(kind)
    scaled = gradient(lambda *arrays: loss(*(array * 1.5 for array in arrays)), len(arrays))
    assert_trees_close(mx.compile(scaled)(*arrays), scaled(*arrays))


# The next three tests do not evaluate what they compile: MLX's error comes before, and compiled kernels take long.


def steps_of(function, shapes, **options):
    """Return (arrays, loss): random arrays, and a loss of the arrays that runs `function` on their multiples, which
    elementwise operations compute."""
    rng = np.random.default_rng(0)
    arrays = [mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes]

    def loss(*arrays):
        out = function(*(array * 1.5 for array in arrays), engine="ops", **options)
        return sum((array * array).sum() for array in out[:2] if array is not None)

    return arrays, loss


def test_compiled_gradient_of_an_own_cell_in_chunks():
    """MLX cannot compile some graphs in which the forward pass and its repetition read the same computed array."""

    def call(x, Wx, Wh, b, h, c, **options):
        h, state = pointwise(cells.lstm, x, Wx, Wh, b, (h, c), **options)
        return h, state[1]

    shapes = [(2, 1, 2), (8, 2), (8, 2), (8,), (1, 2), (1, 2)]
    arrays, loss = steps_of(call, shapes, checkpoint_every=1)
    mx.compile(gradient(loss, 6))(*arrays)


def test_a_compiled_function_may_run_an_own_cell_twice():
    """MLX cannot compile two equal splits of the last states, which an elementwise operation computes."""

    def call(x, Wx, Wh, b, *state, **options):
        first, second = (pointwise(cells.slstm, x, Wx, Wh, b, state, **options) for _ in range(2))
        return first[0], first[1][1] + 2 * second[1][2]

    arrays, loss = steps_of(call, [(2, 1, 2), (8, 2), (8, 2), (8,), *[(1, 2)] * 4])
    mx.compile(loss)(*arrays)


@pytest.mark.parametrize("op, G", [("lstm", 4), ("gru", 3)])
def test_a_compiled_gradient_may_run_one_step_twice(op, G):
    """MLX cannot compile two equal splits of the preactivations, which are a sum of two products."""
    arrays, loss = steps_of(getattr(recurrence, op), [(1, 1, 2), (2 * G, 2), (2 * G, 2), (2 * G,)])
    mx.compile(gradient(lambda *arrays: loss(*arrays) + 2 * loss(*arrays), 4))(*arrays)


def test_compiled_derivatives_of_slstm():
    """MLX cannot compile some graphs with three equal operations, so `slstm` computes no comparison twice."""

    def call(*arrays, **options):
        h, state = pointwise(cells.slstm, *arrays[:4], arrays[4:], **options)
        return h, state[1]

    arrays, loss = steps_of(call, [(2, 1, 2), (8, 2), (8, 2), (8,), *[(1, 2)] * 4])
    twice = gradient(lambda *arrays: loss(*arrays) + 2 * loss(*arrays), 8)
    second = gradient(lambda *arrays: sum((d * d).sum() for d in gradient(loss, 8)(*arrays)), 8)
    mx.compile(twice)(*arrays)
    mx.compile(second)(*arrays)


@pytest.mark.parametrize("op, G, options", [("gru", 3, {}), ("lstm", 4, {"checkpoint_every": 1})], ids=["gru", "lstm"])
def test_compiled_second_derivative_with_a_norm(op, G, options):
    """MLX cannot compile equal splits of a normalised product, which its scale multiplies elementwise."""

    def call(x, Wx, Wh, b, scale, **options):
        return getattr(recurrence, op)(x, Wx, Wh, b, norm=Norm("recurrent", scale), **options)

    arrays, loss = steps_of(call, [(2, 1, 2), (2 * G, 2), (2 * G, 2), (2 * G,), (2 * G,)], **options)
    second = gradient(lambda *arrays: sum((d * d).sum() for d in gradient(loss, 5)(*arrays)), 5)
    mx.compile(second)(*arrays)


def test_compiled_gradient_without_training():
    """With training=False, the compiled gradient equals the eager gradient. The compiled gradient is MLX's own
    derivative of the graph."""
    arrays, call, _ = small("rnn")
    untrained = gradient(lambda *arrays: call(*arrays, training=False).h.sum(), len(arrays))
    assert_trees_close(mx.compile(untrained)(*arrays), untrained(*arrays))


@ALL_KINDS
def test_export_and_import(tmp_path, kind):
    arrays, call, _ = small(kind)
    path = str(tmp_path / "loss.mlxfn")
    mx.export_function(path, lambda *arrays: call(*arrays, training=False).h, *arrays)
    assert_trees_close(mx.import_function(path)(*arrays), [call(*arrays).h])


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("option", ["plain", "lengths_reverse", "projection", "gru", "rnn", "lstm_both"])
def test_inference_gives_the_same_and_its_gradient_too(option, engine):
    case, cotangents = draw_away_from_kinks(3, **(OPTIONS | KINDS)[option])
    for shown in (cotangents, ("h", "hT")):
        given = {name: cotangents[name] for name in shown}
        trained, inferred = (run(case | {"training": flag}, engine, np.float64, given) for flag in (True, False))
        for before, after in zip(trained, inferred, strict=True):
            for name in before:
                np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.parametrize("shown", [None, ("h",)], ids=["every output", "h"])
@ALL_KINDS
def test_second_derivative_is_right_or_refused(kind, shown):
    """The derivative of the sum of all squared gradients is right with the engine `ops` and refused with `numpy`. The
    test runs with a loss of all outputs, and with a loss of h alone. With the loss of h alone, the other outputs have
    no gradient in the first derivative, but have one in the second."""
    options = {} if shown is None else {"shown": shown}
    rng = np.random.default_rng(1)
    with mx.stream(mx.cpu):
        arrays, _, loss = small(kind, np.float64)

        def steepness(*arrays, engine):
            gradients = gradient(lambda *arrays: loss(*arrays, engine=engine, **options), len(arrays))(*arrays)
            return sum((g * g).sum() for g in gradients)

        direction = [to_mlx(rng.normal(size=array.shape), np.float64) for array in arrays]
        second = gradient(lambda *arrays: steepness(*arrays, engine="ops"), len(arrays))(*arrays)
        along = sum((g * d).sum().item() for g, d in zip(second, direction, strict=True))
        far_below, below, above, far_above = (
            steepness(*(a + k * 1e-4 * d for a, d in zip(arrays, direction, strict=True)), engine="ops").item()
            for k in (-2, -1, 1, 2)
        )
        assert along == pytest.approx((8 * (above - below) - (far_above - far_below)) / 12e-4, rel=1e-8)
        with pytest.raises(RuntimeError, match="second derivative"):
            mx.eval(gradient(lambda *arrays: steepness(*arrays, engine="numpy"), len(arrays))(*arrays))


@ALL_KINDS
def test_gradient_of_the_gradient_op_is_right_or_refused(kind):
    """The gradient ops `lstm_gradients`, `gru_gradients` and `rnn_gradients` can be differentiated by dh with the
    engine `ops`, and refuse it with `numpy`."""
    case, _ = draw_away_from_kinks(9, **EVERY_ARRAY[kind])
    op, arrays, options = split(case)
    with mx.stream(mx.cpu):
        given = {name: to_mlx(array, np.float64) for name, array in arrays.items()} | options
        out = getattr(recurrence, op)(**given, return_gates=True)
        saved = {name: getattr(out, name) for name in ("h", "c", "gates") if hasattr(out, name)}
        dh, seen = (to_mlx(np.random.default_rng(n).normal(size=out.h.shape), np.float64) for n in range(2))

        def number(dh, engine):
            gradients = getattr(recurrence, f"{op}_gradients")(**given, **saved, dh=dh, engine=engine)
            return sum((gradient * gradient).sum() for gradient in gradients.values())

        along = (mx.grad(lambda dh: number(dh, "ops"))(dh) * seen).sum().item()
        step = lambda k: number(dh + k * seen, "ops").item()  # noqa: E731
        # `step` is a quadratic function of k, so its central difference has no error besides rounding.
        assert along == pytest.approx((step(1) - step(-1)) / 2, rel=1e-9)
        with pytest.raises(RuntimeError, match="second derivative"):
            mx.eval(mx.grad(lambda dh: number(dh, "numpy"))(dh))


@pytest.mark.parametrize("kind", ("lstm", "gru", "rnn"))
def test_the_padding_does_not_enter_a_derivative_that_mlx_derives(kind):
    """NaN in the padding of x and of the mask changes no derivative: neither the gradient without training inside a
    transformation, which MLX derives from the operations of `ops`, nor one in forward mode, nor a second one."""
    op, gates = getattr(recurrence, kind), {"lstm": 4, "gru": 3, "rnn": 1}[kind]
    rng = np.random.default_rng(2)
    weights = [to_mlx(rng.normal(size=(gates * 2, size)), np.float32) for size in (3, 2)]
    drawn, ended, found = rng.normal(size=(2, 3, 2, 2)), np.arange(3)[:, None, None] >= [[2], [0]], []
    for padding in (0, np.nan):
        mask, x = (to_mlx(np.where(ended, padding, array), np.float32) for array in drawn)
        x = mx.concatenate([x, x[..., :1]], axis=-1)  # I = 3, H = 2

        def loss(x, Wx, Wh, mask=mask, training=False):
            return (op(x, Wx, Wh, mask=mask, lengths=[2, 0], training=training, engine="ops").h ** 2).sum()

        def steepness(*arrays):
            gradients = mx.grad(lambda *arrays: loss(*arrays, training=True), argnums=(0, 1, 2))(*arrays)
            return sum((g * g).sum() for g in gradients)

        # vmap is an example of a transformation in which the arrays have no values.
        traced = mx.vmap(mx.grad(loss, argnums=(0, 1, 2)), in_axes=(0, None, None))(x[None], *weights)
        forward = mx.jvp(loss, (x, *weights), (mx.ones_like(x), *weights))[1]
        second = mx.grad(steepness, argnums=(0, 1, 2))(x, *weights)
        found.append([*traced, *forward, *second])
    for zero, nan in zip(*found, strict=True):
        np.testing.assert_array_equal(np.array(zero), np.array(nan))


@ALL_KINDS
def test_forward_mode_is_right_or_refused(kind):
    rng = np.random.default_rng(2)
    with mx.stream(mx.cpu):
        arrays, _, loss = small(kind, np.float64)
        tangents = [to_mlx(rng.normal(size=array.shape), np.float64) for array in arrays]
        _, (along,) = mx.jvp(lambda *arrays: loss(*arrays, engine="ops"), arrays, tangents)
        gradients = gradient(loss, len(arrays))(*arrays)
        expected = sum((g * t).sum().item() for g, t in zip(gradients, tangents, strict=True))
        assert along.item() == pytest.approx(expected, rel=1e-12)
        with pytest.raises(RuntimeError, match="forward-mode"):
            mx.eval(mx.jvp(lambda *arrays: loss(*arrays, engine="numpy"), arrays, tangents))


@ALL_KINDS
def test_two_gradients_of_one_forward(kind):
    """If two functions use outputs of one call (h and hT), the gradient of x for both is the sum of the gradients
    for each of them alone."""
    arrays, call, _ = small(kind)

    def both(x):
        out = call(x, *arrays[1:])
        return out.h.sum(), (out.hT * out.hT).sum()

    first, second = (mx.grad(lambda x, n=n: both(x)[n])(arrays[0]) for n in (0, 1))
    _, (total,) = mx.vjp(lambda x: list(both(x)), [arrays[0]], [mx.array(1.0), mx.array(1.0)])
    assert_trees_close([total], [first + second])


@pytest.mark.parametrize("kind, training", [(kind, n % 2 == 0) for n, kind in enumerate(KINDS)])
def test_weights_that_have_values_inside_a_gradient_still_get_theirs(kind, training):
    """Weights get their gradients although they were evaluated inside the gradient function. After an evaluation MLX
    no longer marks them as traced. The weights are used twice and mixed with constants."""
    arrays, _, loss = small(kind)

    def twice(*values, engine=None):
        mx.eval(*values)
        return loss(*values, training=training, engine=engine) + loss(*values, training=training, engine=engine)

    for n in range(len(arrays)):  # the gradient by one array, while the others are constants
        one = mx.grad(twice, argnums=n)(*arrays)
        assert_trees_close([one], [mx.grad(lambda *v: twice(*v, engine="ops"), argnums=n)(*arrays)])


@ALL_KINDS
def test_bits_are_reproducible(kind):
    arrays, _, loss = small(kind)
    runs = [gradient(loss, len(arrays))(*arrays) for _ in range(2)]
    for left, right in zip(*runs, strict=True):
        np.testing.assert_array_equal(np.array(left), np.array(right))


def test_works_under_nn_value_and_grad():
    x, *weights = (mx.array(np.random.default_rng(9).normal(size=s), mx.float32) for s in ((3, 2, 2), (8, 2), (8, 2)))

    class Model(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            self.Wx, self.Wh = weights

        def __call__(self, x):
            return lstm(x, self.Wx, self.Wh).h

    model = Model()
    _, gradients = mlx.nn.value_and_grad(model, lambda x: model(x).sum())(x)
    expected = mx.grad(lambda Wh: lstm(x, weights[0], Wh).h.sum())(weights[1])
    assert_trees_close([gradients["Wh"]], [expected])


@NEEDS_COMPILE
def test_on_the_cpu_a_compiled_function_warns_once_and_mlx_can_let_it_run_as_it_is():
    """A compiled function on the CPU warns once, at the line of the caller, and does not warn if the caller
    requested the engine `ops`. With mx.disable_compile(), the engine `numpy` runs."""
    forget_warnings()
    arrays, call, _ = small("lstm")

    def warned(run):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        return [(Path(warning.filename).name, "mx.disable_compile()" in str(warning.message)) for warning in caught]

    layer = mlx_lstm.nn.LSTM(3, 2)
    compiled = mx.compile(lambda x: layer(x)[0])
    assert warned(lambda: call(*arrays)) == []
    assert warned(lambda: mx.compile(lambda x: call(x, *arrays[1:], engine="ops").h)(arrays[0])) == []
    assert warned(lambda: compiled(mx.ones((2, 2, 3)))) == [(Path(__file__).name, True)]
    assert warned(lambda: mx.vmap(lambda x: call(x, *arrays[1:]).h)(mx.stack([arrays[0]] * 2))) == []
    assert layer.engine_used.engine == "ops"
    try:
        mx.disable_compile()
        compiled(mx.ones((2, 2, 3)))
    finally:
        mx.enable_compile()
    assert layer.engine_used.engine == "numpy"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTM with a norm"])
def test_an_inner_vjp_of_an_array_keeps_the_graph_of_a_layer(kind, dtype):
    """A function derives something by an array with mx.vjp, then a layer reads the same array, and an outer mx.grad
    derives the result. MLX has removed the tracer mark of the array, so what the layer computes from it before an
    engine runs, such as another order of axes, keeps its graph only if the layer asks for that."""
    layer = mlx_lstm.nn.GRU(3, 5) if kind == "GRU" else mlx_lstm.nn.LSTM(3, 5, layer_norm="norm" in kind)
    layer.set_dtype(dtype)
    x = mx.random.normal((2, 7, 3), key=mx.random.key(0)).astype(dtype)

    def loss(x):
        y = mx.sin(x) * 2
        factor = mx.stop_gradient(mx.vjp(lambda z: z * y, [y], [mx.ones_like(y)])[1][0])
        out = layer(y)
        h = out[0] if isinstance(out, tuple) else out
        return (h.astype(mx.float32) ** 2).sum() + (factor * y).astype(mx.float32).sum()

    gradients = []
    for engine in ("numpy", "ops"):
        layer.engine = engine
        gradients.append(mx.grad(loss)(x).astype(mx.float32))
    scale = mx.abs(gradients[1]).max().item()
    assert mx.abs(gradients[0] - gradients[1]).max().item() < (1e-5 if dtype == mx.float32 else 1e-2) * scale
