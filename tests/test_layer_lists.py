"""Random lists of layers of every kind through `stack`, `stepper`, `replace`, `from_weights` and the conversions. The
reference in `layer_lists` is a plain loop in MLX that shares no code with the library.

`--fuzz N` runs N cases of each surface, `--fuzz-seed` sets the seed. Without the slow tests a small sample runs.
"""

from collections import Counter
from types import SimpleNamespace

import layer_lists
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from cases import to_numpy
from layer_lists import (
    any_case,
    attended,
    built,
    count_of_states,
    gated,
    known,
    leaky,
    numbers,
    pick,
    reference,
    states_of,
)
from mlx.utils import tree_flatten

import mlx_lstm.nn
import mlx_lstm.torch
from mlx_lstm import convert
from mlx_lstm.oracle.closeness import float_of, largest

PARTS = 20
"""Number of parts into which the slow cases are split, so that several processes can share them."""

ENGINES = (None, None, "numpy", "ops")


def of_kind(arrays, dtype):
    return [{name: array.astype(dtype) for name, array in each.items()} for each in arrays]


def assert_near(got, rounded, exact, dtype, steps=0):
    """Check the results of a case. `rounded` are those of the reference in the case's own dtype; the largest relative
    error among them says how much this case magnifies roundings. Each result may have twice this error, plus 4 eps.
    steps: the number of derivatives of tanh or a sigmoid on the longest path of a gradient. An engine may compute each
    from the rounded output, as 1 - y * y, which is off by 2 eps of 1.
    In float64 the reference itself is rounded, so its float32 error is scaled."""
    scales = [max(1.0, largest(value)) for value in exact]
    eps = float_of(to_numpy(mx.zeros(1, dtype)).dtype).eps
    ratio = eps / float_of(np.float32).eps if dtype == mx.float64 else 1.0
    errors = [largest(one - other) / scale for one, other, scale in zip(rounded, exact, scales, strict=True)]
    level = 2 * ratio * max(errors) + (4 + 2 * steps) * eps
    for n, (value, other, scale) in enumerate(zip(got, exact, scales, strict=True)):
        assert value.shape == other.shape, (n, value.shape, other.shape)
        # The condition is written with `not`: a comparison with NaN is false, so NaN fails, too.
        if not largest(value - other) <= level * scale:
            raise AssertionError(f"result {n} is off by {largest(value - other):.3g}, allowed {level * scale:.3g}")


def plain(arrays):
    return [to_numpy(array).astype(np.float64) for array in arrays]


# --- Stacks ----------------------------------------------------------------------------------------------------------


def stack_of(case, arrays, x, options):
    """Return [output, last states ...] of `stack`, and the objects that it got."""
    objects = [built(spec, each) for spec, each in zip(case.specs, arrays, strict=True)]
    ahead = [each[0] for each in objects]
    reverse = [each[1] for each in objects] if case.apart else ahead if case.back else None
    state = None
    if case.states is not None:
        state = [mx.stack(each).reshape(-1, *case.batch, each[0].shape[-1]) for each in zip(*case.states, strict=True)]
        state = tuple(state) if len(state) > 1 else state[0]
    if case.keep is not None:
        options = options | {"keep": case.keep.reshape(*case.batch, -1)}
    if case.hold is not None:
        options = options | {"hold": mx.array(case.hold).reshape(*case.batch, -1)}
    found = mlx_lstm.nn.stack(
        [] if case.back else ahead,
        x,
        state,
        reverse=reverse,
        merge=case.merge,
        groups=case.groups,
        between=case.between,
        lengths=case.lengths,
        **options,
    )
    output, last = found
    return [output, *(last if isinstance(last, tuple) else [last])]


def stacks(rng):
    """Check the outputs, the last states and all gradients of a random list of layers in `stack`."""
    case = any_case(rng)
    options = {"engine": pick(rng, ENGINES), "checkpoint_every": pick(rng, (None, None, 1, 2, "auto"))}
    if case.dtype == mx.float64 and case.specs[0].kind == "own":
        options["engine"] = pick(rng, (None, "numpy", "ops"))
    quantized = case.specs[0].form == "quantized"
    keys = [(n, name) for n, spec in enumerate(case.specs) for name in spec.arrays] if not quantized else []
    B, T = int(np.prod(case.batch)), case.x.shape[-2]

    def by_stack(x, *values):
        arrays = [dict(spec.arrays) for spec in case.specs]
        for (n, name), value in zip(keys, values, strict=True):
            arrays[n][name] = value
        return stack_of(case, arrays, x, options)

    def by_loop(dtype, x, *values):
        arrays = [dict(known(spec, spec.arrays)) for spec in case.specs]
        for (n, name), value in zip(keys, values, strict=True):
            arrays[n][name] = value
        keep = None if case.keep is None else case.keep.astype(dtype)
        rows = x.astype(dtype).reshape(B, T, -1)
        found = reference(case, of_kind(arrays, dtype), rows, states_of(case, dtype), keep)
        return [each.reshape(*s, each.shape[-1]) for each, s in zip(found, leads, strict=True)]

    values = [case.x, *(case.specs[n].arrays[name] for n, name in keys)]
    outputs = by_stack(*values)
    rows = len(case.specs) * case.ways
    leads = [(*case.batch, T)] + [(rows, *case.batch)] * count_of_states(case.specs[0])
    assert all(each.dtype == case.dtype for each in outputs)
    weights = [numbers(rng, each.shape, case.dtype) for each in outputs]
    results = {}
    rough = mx.float32 if case.dtype == mx.float64 else case.dtype
    for name, call, dtype in (
        ("got", by_stack, case.dtype),
        ("rounded", by_loop, rough),
        ("exact", by_loop, mx.float64),
    ):
        function = call if name == "got" else (lambda *values, call=call, dtype=dtype: call(dtype, *values))
        # Gradients have the dtypes of their arrays. A float64 call has no rounded one, so float32 stands for it.
        given = [value.astype(dtype) for value in values] if name == "exact" or dtype != case.dtype else values
        found, gradients = mx.vjp(function, given, [each.astype(dtype) for each in weights])
        results[name] = plain([*found, *gradients])
    # An inference is another path than a call with a gradient.
    results["got"][: len(outputs)] = plain(outputs) if rng.random() < 0.5 else results["got"][: len(outputs)]
    steps = T * len(case.specs) // case.groups
    assert_near(results["got"], results["rounded"], results["exact"], case.dtype, steps)
    return "stack of " + "/".join(sorted({f"{spec.kind} {spec.form}" for spec in case.specs}))


# --- Steppers --------------------------------------------------------------------------------------------------------


def in_numpy(rng, array):
    """Return the numbers of an array in a NumPy array of a random memory order, byte order and width."""
    array = to_numpy(array)
    array = array if array.dtype == np.float64 else array.astype(np.float32)
    form = rng.integers(6) if array.ndim else 4
    if form == 0:
        return array.astype(np.longdouble)
    if form == 1:
        return array.astype(array.dtype.newbyteorder(">"))
    if form == 2:
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    if form == 3:
        return np.asfortranarray(array)
    if form == 4:
        return array.astype(np.float64)
    return np.repeat(array, 2, axis=-1)[..., ::2]


def stepper_of(case, objects, engine, inputs):
    """Return a stepper of the layers: made by the only layer itself where it can, else by `nn.stepper`."""
    if len(objects) == 1 and (inputs or (hasattr(objects[0], "stepper") and engine is not None)):
        layer = objects[0]
        layer.engine = engine
        return layer.stepper(case.batch, **({"inputs": inputs} if inputs else {})), False
    return mlx_lstm.nn.stepper(objects, case.batch, engine=engine), True


def with_inputs(rng, case):
    """Return the case with one layer whose cell reads two inputs of each step, and these inputs [B, T, H]."""
    D, H = case.x.shape[-1], int(rng.integers(1, 5))
    spec = layer_lists.any_spec(rng, "own", attended, "ours", 1, D, H, H, 0, rng.random() < 0.7, case.dtype)
    B, T = int(np.prod(case.batch)), case.x.shape[-2]
    each = [mx.array(rng.integers(0, 5, (B, T, H)) / 4, mx.float32).astype(case.dtype) for _ in range(2)]
    return case._replace(specs=[spec], states=None), each


def state_of(case, states, batch, is_stack):
    """Return states [B, width] of all layers as a stepper takes them."""
    whole = [mx.stack(each).reshape(-1, *batch, each[0].shape[-1]) for each in zip(*states, strict=True)]
    whole = whole if is_stack else [each[0] for each in whole]
    return tuple(whole) if len(whole) > 1 else whole[0]


def steppers(rng):
    """Check every step, and the last states, of a stepper of random layers."""
    case, inputs = any_case(rng, streams=True), []
    if case.specs[0].kind == "own" and rng.random() < 0.25:
        case, inputs = with_inputs(rng, case)
    B, T = int(np.prod(case.batch)), case.x.shape[-2]
    objects = [built(spec, spec.arrays)[0] for spec in case.specs]
    stepper, is_stack = stepper_of(case, objects, pick(rng, ENGINES), len(inputs))
    if case.states is not None:
        stepper.set_state(state_of(case, case.states, case.batch, is_stack or case.specs[0].form == "torch"))
    keep = None if case.keep is None else case.keep.reshape(*case.batch, T)
    shaped = [each.reshape(*case.batch, T, -1) for each in inputs]
    outputs = []
    for t in range(T):
        x, more = case.x[..., t, :], {}
        if keep is not None:
            more["keep"] = in_numpy(rng, keep[..., t]) if rng.random() < 0.5 else keep[..., t]
        if inputs:
            more["inputs"] = [in_numpy(rng, each[..., t, :]) if t % 2 else each[..., t, :] for each in shaped]
        y = stepper(in_numpy(rng, x) if rng.random() < 0.5 else x, **more)
        outputs.append(plain([mx.array(y) if isinstance(y, np.ndarray) and y.dtype == np.float32 else y])[0])
        if rng.random() < 0.2:
            state = stepper.state(as_numpy=True)
            stepper.reset()
            stepper.set_state(state)
    last = stepper.state()
    last = last if isinstance(last, tuple) else (last,)
    got = [np.stack(outputs, axis=-2), *plain(last)]
    results = {}
    rough = mx.float32 if case.dtype == mx.float64 else case.dtype
    for name, dtype in (("rounded", rough), ("exact", mx.float64)):
        rows = case.x.astype(dtype).reshape(B, T, -1)
        factors = None if case.keep is None else case.keep.astype(dtype)
        each = [array.astype(dtype) for array in inputs]
        arrays = of_kind([known(spec, spec.arrays) for spec in case.specs], dtype)
        found = plain(reference(case, arrays, rows, states_of(case, dtype), factors, each))
        results[name] = [one.reshape(other.shape) for one, other in zip(found, got, strict=True)]
    assert_near(got, results["rounded"], results["exact"], case.dtype)
    return "stepper of " + "/".join(sorted({f"{spec.kind} {spec.form}" for spec in case.specs}))


# --- Replaced layers, conversions, layers from weights ---------------------------------------------------------------


def random_layers(rng, package):
    """Return (layers, kind, activation): one to three layers of `mlx.nn` or `mlx_lstm.nn` with random parameters."""
    kind, H, D = pick(rng, ("LSTM", "GRU", "RNN")), int(rng.integers(1, 6)), int(rng.integers(1, 4))
    act = pick(rng, list(layer_lists.FUNCTIONS))
    options = {"nonlinearity": layer_lists.FUNCTIONS[act]} if kind == "RNN" else {}
    layers = [
        getattr(package, kind)(D if n == 0 else H, H, bool(rng.random() < 0.8), **options)
        for n in range(rng.integers(1, 4))
    ]
    return layers, kind, act


def bits_of(tree):
    return {name: (str(array.dtype), to_numpy(array).tobytes()) for name, array in tree_flatten(tree)}


def same_parameters(one, other):
    assert bits_of(one) == bits_of(other)


def replaced(rng):
    """Check that `replace` and its way back keep every bit, and that the layers compute the same as MLX's."""
    layers, kind, act = random_layers(rng, mlx.nn)
    dtype = pick(rng, (mx.float32, mx.float16, mx.bfloat16))
    model = {"a": layers, "b": (mlx.nn.Linear(1, 1), [layers[0]])}
    for layer in layers:
        layer.set_dtype(dtype)
    old = [layer.parameters() for layer in layers]
    x = numbers(rng, (2, 4, layers[0].Wx.shape[1] if kind != "RNN" else layers[0].Wxh.shape[1]), dtype)

    def outputs():
        y = x
        for layer in layers:
            y = layer(y)
            y = y[0] if isinstance(y, tuple) else y
        return plain([y])

    theirs, exact = outputs(), x.astype(mx.float64)
    spec = SimpleNamespace(kind=kind.lower(), cell=act)
    for layer in layers:
        names = {"Wxh": "Wx", "Whh": "Wh", "bias": "b"}
        arrays = {names.get(name, name): array.astype(mx.float64) for name, array in layer.parameters().items()}
        zeros = [mx.zeros((2, layer.hidden_size), mx.float64)] * (2 if kind == "LSTM" else 1)
        exact = layer_lists.one_way(spec, arrays, exact, zeros, False)[0]
    mlx_lstm.nn.replace(model)
    assert all(type(layer).__module__.startswith("mlx_lstm") for layer in layers)
    same_parameters([layer.parameters() for layer in layers], old)
    assert_near(outputs(), theirs, plain([exact]), dtype)
    mlx_lstm.nn.replace(model, back=True)
    assert all(type(layer).__module__.startswith("mlx.nn") for layer in layers)
    same_parameters([layer.parameters() for layer in layers], old)
    return f"replace of {kind}"


def converted(rng):
    """Check that weights go from a list of layers into other formats and back bit for bit, and that `from_weights`
    computes what `stack` of the layers computes."""
    package = pick(rng, (mlx.nn, mlx_lstm.nn))
    layers, kind, act = random_layers(rng, package)
    biased = kind != "GRU" or all(layer.b is not None for layer in layers) or all(layer.b is None for layer in layers)
    for layer in layers:
        layer.set_dtype(pick(rng, (mx.float32, mx.float32, mx.float16, mx.bfloat16)))
    dtypes = {str(array.dtype) for layer in layers for _, array in tree_flatten(layer.parameters())}
    weights = convert.from_mlx(layers)
    assert kind != "RNN" or weights.cell.act == act
    back = [ways[0] for ways in convert.to_mlx(weights)]
    same_parameters(back, [layer.parameters() for layer in layers])
    formats = {"ops": lambda w: convert.from_ops(w.cell.op, convert.to_ops(w), **w.options)}
    if act != "sigmoid" and biased and len({layer.get("bias", layer.get("b")) is None for layer in layers}) == 1:
        torch = lambda w: convert.from_torch(convert.to_torch(w), nonlinearity=act)  # noqa: E731
        formats |= {"torch": torch, "layer": lambda w: convert.from_torch(mlx_lstm.torch.from_weights(w))}
    for _ in range(2):
        name = pick(rng, list(formats))
        weights = formats[name](weights)
        assert weights.cell.op != "rnn" or weights.cell.act == act
    same_parameters([ways[0] for ways in convert.to_mlx(weights)], [layer.parameters() for layer in layers])
    x = mx.array(rng.normal(size=(2, 3, weights.input_size)), mx.float32)
    engine = pick(rng, ("numpy", "ops"))
    one = mlx_lstm.nn.from_weights(weights, engine=engine)(x)
    other = mlx_lstm.nn.stack(layers, x, engine=engine)
    for a, b in zip(tree_flatten(one), tree_flatten(other), strict=True):
        np.testing.assert_array_equal(to_numpy(a[1]), to_numpy(b[1]))
    return f"conversions of {kind}, {len(dtypes)} dtypes"


# --- What is refused -------------------------------------------------------------------------------------------------


class OwnCall(mlx.nn.LSTM):
    def __call__(self, x, *states):
        return super().__call__(2 * x, *states)


class OwnStep(mlx_lstm.nn.GRU):
    def step(self, x, hidden=None, *, keep=None):
        return super().step(2 * x, hidden, keep=keep)


class OwnCellOfPointwise(mlx_lstm.nn.Pointwise):
    def __call__(self, x, state=None, **options):
        return super().__call__(2 * x, state, **options)


class OwnTorch(mlx_lstm.torch.LSTM):
    def __call__(self, input, *states, **options):
        return super().__call__(2 * input, *states, **options)


def with_attribute(rng, **more):
    """Return an object, a dict or a module with the arrays of a random layer and one attribute more."""
    words = dict(pick(rng, (mlx.nn.LSTM, mlx.nn.GRU, mlx.nn.RNN))(2, 3).parameters()) | more
    return pick(rng, (lambda: words, lambda: SimpleNamespace(**words), lambda: layer_lists.Foreign(words)))()


def pointwise(**options):
    return mlx_lstm.nn.Pointwise(gated, 2, 3, gates=2, states=2, **options)


STACK, STEPPER, MLX, METHOD = "stack", "stepper", "from_mlx", "the method stepper"
REFUSED = {
    "a list of arrays": (lambda rng: [with_attribute(rng, more=[mx.ones(3)])], (STACK, STEPPER, MLX)),
    "a nested dict": (lambda rng: [with_attribute(rng, more={"a": [1, (mx.ones(3),)]})], (STACK, STEPPER, MLX)),
    "a module": (lambda rng: [with_attribute(rng, more=mlx.nn.Linear(3, 3))], (STACK, STEPPER, MLX)),
    "one more array": (lambda rng: [with_attribute(rng, more=mx.ones(3))], (STACK, STEPPER, MLX)),
    "a NumPy array": (lambda rng: [with_attribute(rng, more=np.ones(3, np.float32))], (STACK, STEPPER, MLX)),
    "forget_bias": (lambda rng: [with_attribute(rng, forget_bias=1.0)], (STACK, STEPPER, MLX)),
    "cell_clip": (lambda rng: [with_attribute(rng, cell_clip=3.0)], (STACK, STEPPER, MLX)),
    "reset": (lambda rng: [with_attribute(rng, reset="before")], (STACK, STEPPER, MLX)),
    "go_backwards": (lambda rng: [with_attribute(rng, go_backwards=True)], (STACK, STEPPER, MLX)),
    "activation": (lambda rng: [with_attribute(rng, activation=mlx.nn.gelu)], (STACK, STEPPER, MLX)),
    "nonlinearity": (lambda rng: [with_attribute(rng, nonlinearity=mlx.nn.gelu)], (STACK, STEPPER, MLX)),
    "a subclass with its own call": (lambda rng: [OwnCall(2, 3)], (STACK, STEPPER, MLX)),
    "a subclass with its own step": (lambda rng: [OwnStep(2, 3)], (STACK, STEPPER, MLX, METHOD)),
    "a subclass of Pointwise": (
        lambda rng: [OwnCellOfPointwise(gated, 2, 3, gates=2, states=2)],
        (STACK, STEPPER, METHOD),
    ),
    "a subclass of torch's": (lambda rng: [OwnTorch(2, 3)], (STACK, STEPPER, METHOD)),
    "dropout": (lambda rng: [mlx_lstm.torch.GRU(2, 3, num_layers=2, dropout=0.1)], (STACK,)),
    "Pointwise": (lambda rng: [pointwise()], (MLX,)),
    "Pointwise without params": (lambda rng: [mlx_lstm.nn.Pointwise(gated, 2, 3, gates=4, states=2)], (MLX,)),
    "a reversed layer": (lambda rng: [pointwise(reverse=True)], (STACK, STEPPER)),
    "both directions": (lambda rng: [pointwise(bidirectional=True)], (STEPPER,)),
    "states differ": (
        lambda rng: [pointwise(), mlx_lstm.nn.Pointwise(leaky, 3, 3, gates=1, params=1)],
        (STACK, STEPPER),
    ),
    "kinds differ": (lambda rng: [mlx.nn.LSTM(2, 3), pointwise()], (STACK, STEPPER)),
    "inputs": (lambda rng: [mlx_lstm.nn.Pointwise(attended, 2, 3, gates=1, states=2)], (STACK, STEPPER)),
    "options of weights": (
        lambda rng: [mlx_lstm.nn.from_weights(convert.from_mlx(mlx.nn.LSTM(2, 3)))],
        (STACK, STEPPER, MLX),
    ),
    "no units": (lambda rng: [{"Wx": mx.zeros((0, 2)), "Wh": mx.zeros((0, 0))}], (STACK, STEPPER)),
    "no features": (lambda rng: [{"Wx": mx.zeros((12, 0)), "Wh": mx.zeros((12, 3))}], (STACK, STEPPER)),
}


def refused(rng, reason=None, how=None):
    """Check that a list of layers with one slip is refused by a ValueError with the name of the function."""
    reason = reason or pick(rng, list(REFUSED))
    make, ways = REFUSED[reason]
    layers, how = make(rng), how or pick(rng, ways)
    call = {
        STACK: lambda: mlx_lstm.nn.stack(layers, mx.ones((2, 3, 2))),
        STEPPER: lambda: mlx_lstm.nn.stepper(layers, 2),
        MLX: lambda: convert.from_mlx(layers),
        METHOD: lambda: layers[0].stepper(2),
    }[how]
    with pytest.raises(ValueError, match=r"^\[[a-z_.A-Z]+\] .* but got "):
        call()
    return f"refused: {reason}"


# --- Running the random cases ----------------------------------------------------------------------------------------

SURFACES = {"stacks": stacks, "steppers": steppers, "replaced": replaced, "converted": converted, "refused": refused}


def run_cases(surface, seed, numbers_of_cases):
    """Run random cases of one surface. Return how many were right by kind, and the failures."""
    tried, failures = Counter(), []
    for number in numbers_of_cases:
        try:
            tried[SURFACES[surface](np.random.default_rng([seed, number]))] += 1
        except Exception as error:
            failures.append(f"{surface} ({seed}, {number}): {type(error).__name__}: {error}")
    return tried, failures


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("surface", SURFACES)
def test_random_lists_of_layers(request, record_property, surface, part):
    seed, count = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz") // 4
    tried, failures = run_cases(surface, seed, range(part, count, PARTS))
    record_property("fuzz", [dict(tried), len(failures)])
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("surface", ["stacks", "steppers", "replaced", "converted"])
def test_some_lists_of_layers(surface):
    """A few random cases of each surface are right."""
    _, failures = run_cases(surface, 1, range(12))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("reason", REFUSED)
def test_a_slip_is_refused(reason):
    """Each function that reads layers refuses a list with one slip."""
    for how in REFUSED[reason][1]:
        for seed in range(3):
            refused(np.random.default_rng(seed), reason, how)
