"""Tests of the layer `nn.Pointwise` with every option: both directions, reverse, single steps, steppers, and lists of
layers. The reference in `layer_lists` is a plain loop in MLX."""

from itertools import product

import layer_lists
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from cases import to_numpy
from layer_lists import (
    FREE,
    OWN,
    WITH_INPUTS,
    any_spec,
    attended,
    built,
    delayed,
    gated,
    in_ways,
    leaky,
    one_way,
    peeping,
    reset_after,
)
from mlx.utils import tree_flatten, tree_unflatten
from on_metal import on_metal

from mlx_lstm import nn
from mlx_lstm.nn import Pointwise, stack

B, T, D, H = 3, 4, 2, 3
CELLS = {"leaky": leaky, "gated": gated, "delayed": delayed, "apart": reset_after, "peeping": peeping}
TOLERANCE = {mx.float32: 2.0**-16, mx.float16: 2.0**-3, mx.bfloat16: 1.0}
"""Allowed error: 128 eps of the dtype, for 32 roundings of numbers of size 4, the sums of a few steps. A wrong option
is off by more than 0.1 in float32."""

OPTIONS = {
    "nothing": {},
    "lengths": {"lengths": [4, 0, 2]},
    "keep": {"keep": True},
    "hold": {"hold": True},
    "keep, hold and lengths": {"lengths": [3, 4, 1], "keep": True, "hold": True},
    "a first state": {"state": True},
    "checkpoints": {"checkpoint_every": 2},
    "checkpoints, a state, lengths and keep": {
        **{"checkpoint_every": "auto", "state": True, "lengths": [4, 1, 3], "keep": True}
    },
    "one step": {"T": 1, "state": True, "keep": True},
    "one sequence": {"B": 1, "keep": True, "lengths": [3]},
}
WAYS = {"forward": {}, "reverse": {"reverse": True}, "both": {"bidirectional": True}}
FORMS = {name: (cell, "ours") for name, cell in CELLS.items()}
FORMS |= {"no Wh": (leaky, "free"), "no Wh, two states": (gated, "free"), "inputs": (attended, "ours")}


def drawn(form, way, option, dtype=mx.float32, seed=0):
    """Return (layer, spec, x, arguments of the call): a random layer and call with an option."""
    rng, (cell, kind), two = np.random.default_rng(seed), FORMS[form], way == "both"
    rows, steps = option.get("B", B), option.get("T", T)
    spec = any_spec(rng, "own", cell, kind, 2 if two else 1, D, H, H, 0, seed % 2 == 0, dtype)
    (layer,) = built(spec, spec.arrays)
    layer.reverse = way == "reverse"
    layer.checkpoint_every = option.get("checkpoint_every")
    width, count = H * spec.ways, layer_lists.count_of_states(spec)
    x, given = layer_lists.numbers(rng, (rows, steps, D), dtype), {}
    if "lengths" in option:
        given["lengths"] = option["lengths"]
    if option.get("keep"):
        given["keep"] = mx.array(rng.integers(0, 5, (rows, steps)) / 4, mx.float32)
    if option.get("hold"):
        given["hold"] = mx.array(rng.random((rows, steps)) < 0.4)
    if option.get("state"):
        given["state"] = [layer_lists.numbers(rng, (rows, width), dtype) for _ in range(count)]
    inputs = WITH_INPUTS.get(cell, {}).get("inputs", 0)
    given["inputs"] = [layer_lists.numbers(rng, (rows, steps, width), dtype) for _ in range(inputs)]
    return layer, spec, x, given


def by_loop(spec, arrays, x, given, back, dtype):
    """Return [h, last states ...] of the reference, in this dtype."""
    count, halves = layer_lists.count_of_states(spec), []
    for d, own in enumerate(in_ways(spec, arrays)):
        mine = slice(d * H, (d + 1) * H)
        zeros = [mx.zeros((len(x), 2 * H), dtype)] * count
        first = [state.astype(dtype)[:, mine] for state in given.get("state", zeros)]
        inputs = [each.astype(dtype)[..., mine] for each in given["inputs"]]
        keep = given["keep"].astype(dtype) if "keep" in given else None
        hold = np.array(given["hold"]) if "hold" in given else None
        own = {name: array.astype(dtype) for name, array in own.items()}
        h, last = one_way(spec, own, x.astype(dtype), first, back or d == 1, given.get("lengths"), keep, hold, inputs)
        halves.append([h, *last])
    return [mx.concatenate(each, axis=-1) for each in zip(*halves, strict=True)]


def assert_close(got, exact, dtype, name):
    for n, (one, other) in enumerate(zip(got, exact, strict=True)):
        error = np.abs(to_numpy(one).astype(np.float64) - to_numpy(other)).max(initial=0)
        assert one.shape == other.shape and error <= TOLERANCE[dtype], (name, n, error)


def check(form, way, option, engine, dtype=mx.float32, seed=0):
    """Check h, the last states and all gradients of a call in one way."""
    layer, spec, x, given = drawn(form, way, option, dtype, seed)
    layer.engine = engine
    rng = np.random.default_rng(1)
    names = list(spec.arrays)

    def ours(x, *values):
        (same,) = built(spec, dict(zip(names, values, strict=True)))
        layer.update(same.parameters())
        h, last = layer(x, **given)
        return [h, *last]

    def loop(x, *values):
        return by_loop(spec, dict(zip(names, values, strict=True)), x, given, way == "reverse", mx.float64)

    values = [x, *spec.arrays.values()]
    weights = [layer_lists.numbers(rng, each.shape, dtype) for each in ours(*values)]
    wide = [[array.astype(mx.float64) for array in each] for each in (values, weights)]
    got, exact = mx.vjp(ours, values, weights), mx.vjp(loop, *wide)
    for one, other in zip(got, exact, strict=True):
        assert_close(one, other, dtype, (form, way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_in_each_direction(option, way):
    """Every option in each direction equals the plain loop, with its gradients. The cells and engines take turns, so
    that each pair of option and direction meets several; the slow test runs all of them."""
    turn = list(product(OPTIONS, WAYS)).index((option, way))
    for n in range(2):
        form = list(FORMS)[(turn + 3 * n) % len(FORMS)]
        check(form, way, OPTIONS[option], ("numpy", "ops")[(turn + n) % 2], seed=turn + n)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("form", FORMS)
def test_all_options_in_each_direction(form, engine):
    for n, (option, way, dtype) in enumerate(product(OPTIONS, WAYS, TOLERANCE)):
        check(form, way, OPTIONS[option], engine, dtype, n)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_16_bits_in_each_direction(dtype, way):
    for engine, form in (("numpy", "peeping"), ("ops", "apart")):
        check(form, way, OPTIONS["keep, hold and lengths"], engine, dtype)


def test_dtypes_promote_as_in_other_layers():
    """The result has the dtype to which x, the parameters and the states promote. `precision` casts all parameters."""
    layer, x = Pointwise(peeping, D, H, gates=4, states=2, params=2), mx.ones((B, T, D))
    assert layer(x.astype(mx.float16))[0].dtype == mx.float32
    with nn.precision(layer, mx.bfloat16):
        assert layer(x.astype(mx.bfloat16))[0].dtype == mx.bfloat16
        assert layer(x)[1][1].dtype == mx.float32
    assert layer.params[1].dtype == mx.float32


def streamed(form, dtype, engine, batch=(B,)):
    """Run a stepper of a layer with NumPy and MLX arrays in turns, and check each step and the states."""
    with mx.stream(mx.cpu):  # a GPU does not support float64
        layer, spec, x, given = drawn(form, "forward", {"keep": True, "state": True}, dtype)
        exact = by_loop(spec, spec.arrays, x, given, False, mx.float64)
    layer.engine = engine
    stepper = layer.stepper(batch, inputs=len(given["inputs"]))
    assert stepper.engine_used.engine == engine
    first = [state.reshape(*batch, -1) for state in given["state"]]
    stepper.set_state(tuple(first) if len(first) > 1 else first[0])
    state = given["state"]
    for t in range(T):
        each, keep = [array[:, t].reshape(*batch, -1) for array in given["inputs"]], given["keep"][:, t]
        row = x[:, t].reshape(*batch, -1)
        as_numpy = t % 2 and dtype == mx.float32
        h = stepper(np.array(row) if as_numpy else row, keep=keep.reshape(batch), inputs=each)
        assert isinstance(h, np.ndarray if as_numpy else mx.array)
        assert_close([mx.array(h).reshape(B, -1)], [exact[0][:, t]], dtype, (form, engine, t))
        state = layer.step(x[:, t], state, inputs=[array[:, t] for array in given["inputs"]], keep=keep)
        assert_close([state[0]], [exact[0][:, t]], dtype, "step")
    last = stepper.state()
    last = [each.reshape(B, -1) for each in (last if isinstance(last, tuple) else [last])]
    assert_close(last, exact[1:], dtype, "the last states")
    assert_close(state, exact[1:], dtype, "the last states of step")


@pytest.mark.parametrize("engine", ["numpy", "ops"])
@pytest.mark.parametrize("form", FORMS)
def test_steppers_and_steps(form, engine):
    for dtype in (mx.float32, mx.bfloat16):
        streamed(form, dtype, engine)
    streamed(form, mx.float32, engine, (3, 1))


KERNELS = [("inputs", "fused"), ("delayed", "stepwise")]
KERNELS += [pytest.param(*pair, marks=pytest.mark.slow) for pair in product(FORMS, ("fused", "stepwise"))]


@pytest.mark.parametrize("form, engine", KERNELS)
def test_steppers_on_a_gpu(form, engine):
    with on_metal():
        streamed(form, mx.float32, engine)


def test_a_stepper_sees_changed_parameters():
    """A new array in the list `params`, a new list, and a change in place are seen, as in other layers."""
    layer, x = Pointwise(peeping, D, H, gates=4, states=2, params=2), mx.ones((D,))
    stepper = layer.stepper()

    def change(n):
        if n == 0:
            layer.params[1] = mx.full((H,), 2.0)
        elif n == 1:
            layer.params = [mx.full((H,), 3.0), layer.params[1]]
        elif n == 2:
            layer.params[0] *= 2
        else:
            layer.update(tree_unflatten([(key, value * 0.5) for key, value in tree_flatten(layer.parameters())]))

    for n in range(4):
        state, old = stepper.state(), layer.stepper()
        change(n)
        fresh = layer.stepper()
        for each in (fresh, old):
            each.set_state(state)
        assert mx.array_equal(stepper(x), fresh(x)), n
    layer.params.append(mx.ones((H,)))
    with pytest.raises(ValueError, match=r"^\[nn.Pointwise\] params must be a list of 2 arrays but got 3"):
        stepper(x)


def test_lists_of_layers_equal_calls_one_by_one():
    """`stack` equals a loop over the layers, in both directions, with one object for both or a list for each."""
    mx.random.seed(4)
    layers = [Pointwise(delayed, D if n == 0 else 2 * H, H, gates=1, states=3, bidirectional=True) for n in range(2)]
    x, rng = mx.random.normal((B, T, D)), np.random.default_rng(4)
    options = {"keep": mx.array(rng.integers(0, 3, (B, T)) / 2, mx.float32), "hold": rng.random((B, T)) < 0.3}
    options |= {"lengths": [4, 1, 3], "hold": mx.array(options["hold"])}
    given = [mx.random.normal((4, B, H)) for _ in range(3)]
    y, each = x, []
    for n, layer in enumerate(layers):  # the states of both directions lie side by side
        first = [mx.concatenate([*state[2 * n : 2 * n + 2]], axis=-1) for state in given]
        y, last = layer(y, first, **options)
        each.append(last)
    output, last = stack(layers, x, tuple(given), **options)
    assert mx.allclose(output, y, atol=1e-6) and len(last) == 3
    for n, state in enumerate(last):
        rows = mx.concatenate([mx.stack(mx.split(states[n], 2, axis=-1)) for states in each])
        assert mx.allclose(state, rows, atol=1e-6)
    ahead, back = Pointwise(leaky, D, H, gates=1, params=1), Pointwise(leaky, D, H, gates=1, params=1, reverse=True)
    output = stack([ahead], x, reverse=[back])[0]
    assert mx.allclose(output, mx.concatenate([ahead(x)[0], back(x)[0]], axis=-1), atol=1e-6)
    assert mx.allclose(stack([], x, reverse=[back])[0], back(x)[0], atol=1e-6)


def test_what_quantize_and_replace_say():
    """`quantize` names the layer that stays in float; `replace` leaves it and sets its engine."""
    model = mlx.nn.Sequential(Pointwise(gated, 2, 3, gates=2, states=2), mlx.nn.GRU(3, 4))
    with pytest.warns(UserWarning, match=r"layers.0 \(Pointwise, which has no quantized kind\)"):
        nn.quantize(model, 32, 8)
    nn.replace(model, engine="ops")
    assert isinstance(model.layers[0], Pointwise) and model.layers[0].engine == model.layers[1].engine == "ops"
    with pytest.raises(ValueError, match=r"weights must be a Weights.* but got Pointwise"):
        nn.from_weights(model.layers[0])


BAD = {
    "reverse and both": (
        lambda: Pointwise(leaky, D, H, gates=1, params=1, reverse=True, bidirectional=True),
        r"\[nn.Pointwise\] reverse must be False with bidirectional=True, which runs both directions, but got True",
    ),
    "a flag": (lambda: Pointwise(leaky, D, H, gates=1, reverse=1), "reverse must be True or False but got 1"),
    "step in reverse": (
        lambda: Pointwise(gated, D, H, gates=2, states=2, reverse=True).step(mx.ones((B, D))),
        r"\[nn.Pointwise.step\] the layer must run forward, because .* but got reverse=True",
    ),
    "a stepper of both": (
        lambda: Pointwise(gated, D, H, gates=2, states=2, bidirectional=True).stepper(B),
        r"\[nn.Pointwise.stepper\] the layer must run forward, because the reverse .* but got both directions",
    ),
    "too few inputs": (
        lambda: Pointwise(attended, D, H, gates=1, states=2).stepper(B, inputs=1),
        "cell must take a, state, 1 inputs of each step and 0 parameters but got missing a required argument: 'v'",
    ),
    "no inputs in a step": (
        lambda: Pointwise(attended, D, H, gates=1, states=2).stepper(B, inputs=2)(mx.ones((B, D))),
        r"\[nn.Pointwise.stepper\] inputs must be a tuple or list of 2 arrays but got 0",
    ),
    "inputs in a layer without": (
        lambda: nn.LSTM(D, H).stepper(B)(mx.ones((B, D)), inputs=[mx.ones((B, H))]),
        r"\[nn.LSTM.stepper\] inputs must be a tuple or list of 0 arrays but got 1",
    ),
    "inputs that are no list in a layer without": (
        lambda: nn.LSTM(D, H).stepper(B)(mx.ones((B, D)), inputs=None),
        r"\[nn.LSTM.stepper\] inputs must be a tuple or list of 0 arrays but got NoneType",
    ),
    "an input's shape": (
        lambda: Pointwise(attended, D, H, gates=1, states=2).stepper(B, inputs=2)(
            mx.ones((B, D)), inputs=[mx.ones((B, 1)), mx.ones((2, 1))]
        ),
        r"inputs\[1\] must broadcast to \[3, 3\] but got shape \[2, 1\]",
    ),
    "the number of states": (
        lambda: Pointwise(delayed, D, H, gates=1, states=3).stepper(B).set_state((mx.zeros((B, H)),)),
        "state must have 3 arrays but got tuple",
    ),
    "the shape of a state": (
        lambda: Pointwise(gated, D, H, gates=2, states=2).stepper(B).set_state((mx.zeros((B, H)), mx.zeros((H,)))),
        r"state\[1\] must have shape \[3, 3\] but got shape \[3\]",
    ),
    "states of a list": (
        lambda: stack([Pointwise(delayed, D, H, gates=1, states=3)], mx.ones((B, T, D)), mx.zeros((1, B, H))),
        r"\[nn.stack\] state must be a tuple \(h_0, s1_0, s2_0\) but got array",
    ),
    "inputs that are no list": (
        lambda: Pointwise(attended, D, H, gates=1, states=2)(mx.ones((B, T, D)), inputs=None),
        r"\[nn.Pointwise\] inputs must be a tuple or list of arrays but got NoneType",
    ),
    "an input that is no array": (
        lambda: Pointwise(attended, D, H, gates=1, states=2)(mx.ones((B, T, D)), inputs=[np.ones((B, T, 1)), 1.0]),
        r"\[nn.Pointwise\] inputs\[0\] must be an mlx.core.array: make one by mx.array.* but got ndarray",
    ),
    "an input of a step": (
        lambda: Pointwise(attended, D, H, gates=1, states=2).step(mx.ones((B, D)), inputs=[1.0, 2.0]),
        r"\[nn.Pointwise.step\] inputs\[0\] must be an mlx.core.array but got float",
    ),
    "a state that is no list": (
        lambda: Pointwise(gated, D, H, gates=2, states=2)(mx.ones((B, T, D)), 5),
        r"\[nn.Pointwise\] state must be a tuple or list of 2 arrays but got int",
    ),
    "parameters": (
        lambda: Pointwise(leaky, D, H, gates=1, params=1).update({"Wh": mx.zeros((H, D))})(mx.ones((B, T, D))),
        r"\[nn.Pointwise\] Wh must have shape \[3, 3\] but got shape \[3, 2\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_every_cell_of_the_lists_is_tested():
    assert {cell for cell, _ in FORMS.values()} == {*OWN, *FREE, *WITH_INPUTS}
