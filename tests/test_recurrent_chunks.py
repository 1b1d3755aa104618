"""Tests of `recurrent` with `checkpoint_every`, which saves only the states between chunks of time steps and
computes the other steps again in the gradient. Results must not change, and memory must stay bounded."""

import sys
import warnings
from collections import deque
from functools import lru_cache, partial
from types import ModuleType
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from clients import assert_by_differences
from mlx.utils import tree_flatten, tree_map

from mlx_lstm import lstm, recurrent
from mlx_lstm.ground.checks import forget_warnings
from mlx_lstm.nn import LSTM

T, B, D, H = 7, 3, 2, 4


def numbers(*shape, key):
    return mx.random.normal(shape, key=mx.random.key(key))


class Cell(nn.Module):
    """A cell with a layer norm. Its state is a dict of h and a counter of steps."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(D, H), nn.Linear(H, H, False), nn.LayerNorm(H)

    def step(self, x, state):
        h = self.norm(mx.tanh(self.inner(x["x"]) + self.outer(state["h"])) + 0.5 * state["h"])
        return (h * x["noise"], h[:, :2]), {"h": h, "count": state["count"] + 1}


OPTIONS = {
    "plain": {},
    "reverse": {"reverse": True},
    "lengths": {"lengths": [7, 2, 5]},
    "lengths reverse": {"lengths": [7, 2, 5], "reverse": True},
    "hold": {"hold": np.random.default_rng(0).random((T, B)) < 0.4},
    "all": {"hold": np.random.default_rng(1).random((T, B)) < 0.3, "lengths": [4, 7, 6], "reverse": True},
}


def results(model, every, options, keep=None):
    """Return the outputs, the last state and all gradients of a loss, by name. `every` is the value of
    `checkpoint_every`."""
    x = {"x": numbers(T, B, D, key=1), "noise": numbers(T, B, 1, key=2)}
    first = {"h": numbers(B, H, key=3), "count": mx.zeros((B, 1), mx.int32)}

    def loss(parameters, x, h, keep):
        model.update(parameters)
        more = {} if keep is None else {"keep": keep}
        (a, b), last = recurrent(model.step, x, first | {"h": h}, checkpoint_every=every, **more, **options)
        found = [a, b, last["h"]]
        value = sum((each * mx.cos(mx.arange(each.size)).reshape(each.shape)).sum() for each in found)
        return value, [*found, last["count"]]

    arguments = [model.parameters(), x, first["h"]] + ([] if keep is None else [keep])
    function = loss if keep is not None else lambda parameters, x, h: loss(parameters, x, h, None)
    (_, found), gradients = mx.value_and_grad(function, argnums=tuple(range(len(arguments))))(*arguments)
    model.update(arguments[0])
    return dict(tree_flatten([found, gradients]))


@pytest.mark.parametrize("every", [1, 3, 7, 100, "auto"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_results_are_those_without_chunks(name, every):
    """Results with and without `checkpoint_every` are the same: outputs, last states and the gradients of x, the
    initial state, `keep` (a factor on the carried state) and all parameters of a captured module."""
    mx.random.seed(0)
    model = Cell()
    for keep in (None, mx.random.uniform(shape=(T, B))) if every == 3 else (None,):
        expected, got = (results(model, each, OPTIONS[name], keep) for each in (None, every))
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            assert got[key].dtype == value.dtype
            np.testing.assert_allclose(np.array(got[key]), np.array(value), rtol=0, atol=1e-5, err_msg=key)


class WithTuple(nn.Module):
    """A cell whose arrays of integers in a tuple are no parameters."""

    def __init__(self):
        super().__init__()
        self.W, self.factors = mx.full((H, H), 0.1), (mx.arange(H), mx.array(2))

    def __call__(self, x, h):
        h = mx.tanh(x + h @ self.W) * self.factors[0] / self.factors[1]
        return h, h


def test_a_module_with_arrays_in_a_tuple():
    """Chunks leave the tuple as it is, and do not change the gradients. The global array W of this file, of which the
    cell reads no more than the name, is none that it captures."""
    cell, x = WithTuple(), numbers(T, B, H, key=1)
    tuple_before = cell.factors

    def gradients(every):
        loss = lambda x: recurrent(cell, x, mx.zeros((B, H)), checkpoint_every=every)[0].sum()  # noqa: E731
        return np.array(nn.value_and_grad(cell, loss)(x)[1]["W"])

    expected = gradients(None)
    np.testing.assert_allclose(gradients(2), expected, rtol=0, atol=1e-5)
    assert expected.any() and cell.factors is tuple_before


@pytest.mark.parametrize("output", [(), {}])
def test_outputs_without_arrays(output):
    """A step may return no output: then the loss reads the last state alone. Chunks do not change its gradient."""

    def step(x, h):
        return output, mx.tanh(x + 0.5 * h)

    def loss(x, every):
        outputs, last = recurrent(step, x, mx.zeros((B, H)), checkpoint_every=every)
        assert outputs == output
        return last.sum()

    x = mx.random.uniform(shape=(T, B, H), key=mx.random.key(1))
    expected, got = (np.array(mx.grad(lambda x, every=every: loss(x, every))(x)) for every in (None, 2))
    assert expected.any()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def leaky(x, h, parameters):
    h = mx.tanh(x + h @ parameters["W"].T + parameters["more"][0]) * 0.5 + h * h * 0.1
    return h * h, h


class Holding:
    """An object, no module, that holds a module. Its method is a step."""

    def __init__(self, cell):
        self.cells = {"only": [cell]}

    def step(self, x, h):
        return self.cells["only"][0](x, h)


class Settings:
    """A class that holds a module as an attribute of the class."""

    cell = None

    @property
    def by_property(self):
        return type(self).cell

    def __call__(self, x, h):
        return self.cell(x, h)


class Calling:
    """A class that holds a module. Its `__call__`, which no step calls, leads to much code."""

    cell = None

    def step(self, x, h):
        return self.cell(x, h)

    def __call__(self, x, h):
        return self.step(lstm(x, mx.ones((8, D)), mx.ones((8, 2))).h, h)

    def __getitem__(self, key):
        return self.cell


class Slots:
    """An object without a `__dict__`."""

    __slots__ = ("cell",)

    def __init__(self, cell):
        self.cell = cell

    def step(self, x, h):
        return self.cell(x, h)


class Outside(nn.Module):
    """A module with an object that MLX does not search for parameters."""

    def __init__(self, cell):
        super().__init__()
        self.holding = Holding(cell)

    def __call__(self, x, h):
        return self.holding.step(x, h)


class Private(nn.Module):
    """A module with another one that MLX does not search for parameters, because its name begins with "_"."""

    def __init__(self, cell):
        super().__init__()
        self._cell = cell

    def __call__(self, x, h):
        return self._cell(x, h)


settings, SETTINGS, PACKAGE, calling = Settings(), ModuleType("settings"), ModuleType("package_of_steps"), Calling()


def ways_to_capture(cell):
    """Return {name: step}: steps that hold the same module in each place where Python keeps what a function needs."""

    def in_default(x, h, cell=cell):
        return cell(x, h)

    def in_keyword_default(x, h, *, cell=cell):
        return cell(x, h)

    def in_closure(x, h):
        return cell(x, h)

    def in_inner_function(x, h):
        return (lambda: cell(x, h))()

    def by_argument(cell, x, h):
        return cell(x, h)

    def by_keyword(x, h, *, other):
        return other["cell"](x, h)

    def by_import(x, h):
        import settings_of_steps

        return settings_of_steps.cell(x, h)

    def by_import_of_an_inner_module(x, h):
        import package_of_steps.settings

        return package_of_steps.own(x, h)

    def by_relative_import(line):
        space = {"__package__": "package_of_steps", "__name__": "package_of_steps.own"}
        exec(f"def step(x, h):\n    {line}\n    return cell(x, h)", space)
        return space["step"]

    def by_a_function_of_the_library(x, h):
        outputs, last = recurrent(cell, x[None], h)
        return outputs[0], last

    Settings.cell = SETTINGS.cell = PACKAGE.own = Calling.cell = cell
    cached = lru_cache(lambda: cell)
    weak, queue = ref(cell), deque([cell])
    sys.modules["settings_of_steps"] = sys.modules["package_of_steps.settings"] = SETTINGS
    sys.modules["package_of_steps"] = PACKAGE

    return {
        "an import": by_import,
        "an import of an inner module": by_import_of_an_inner_module,
        "an import from a module of its package": by_relative_import("from .settings import cell"),
        "an import from its package": by_relative_import("from . import own as cell"),
        "a function of the library": by_a_function_of_the_library,
        "a class whose `__call__` runs a layer": Calling().step,
        "[]": lambda x, h: calling[0](x, h),
        "a weak reference": lambda x, h: weak()(x, h),
        "a deque": lambda x, h: queue[0](x, h),
        "a class": lambda x, h: Settings.cell(x, h),
        "an object of this class": Settings(),
        "a property": lambda x, h: settings.by_property(x, h),
        "a slot": Slots(cell).step,
        "a Python module": lambda x, h: SETTINGS.cell(x, h),
        "an attribute of a module that is none of its parameters": Outside(cell),
        "an attribute of a module with a private name": Private(cell),
        "a function with a cache": lambda x, h: cached()(x, h),
        "a default": in_default,
        "a keyword default": in_keyword_default,
        "a closure": in_closure,
        "an inner function": in_inner_function,
        "an argument of partial": partial(by_argument, cell),
        "a keyword of partial": partial(by_keyword, other={"cell": cell}),
        "a method": Holding(cell).step,
        "the module": cell,
    }


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(D, H), nn.Linear(H, H)

    def __call__(self, x, h):
        h = mx.tanh(self.inner(x) + self.outer(h))
        return h, h


@pytest.mark.parametrize("place", ways_to_capture(Small()))
def test_a_module_is_seen_wherever_a_step_holds_it(place):
    """The gradients of a captured module's parameters equal those without chunks: none of them is 0."""
    cell, x, weights = Small(), numbers(T, B, D, key=5), numbers(T, B, H, key=6)
    step = ways_to_capture(cell)[place]

    def loss(every):
        return (recurrent(step, x, mx.zeros((B, H)), checkpoint_every=every)[0] * weights).sum()

    whole, chunks = (nn.value_and_grad(cell, lambda every=every: loss(every))()[1] for every in (None, 3))
    for (name, one), (_, other) in zip(tree_flatten(whole), tree_flatten(chunks), strict=True):
        assert mx.abs(one).max() > 1e-2, name
        np.testing.assert_allclose(np.array(other), np.array(one), rtol=0, atol=1e-5, err_msg=name)


def test_a_layer_inside_the_step_warns_of_nothing():
    """The listing of what a step reads runs the step once more without values, about which an engine would warn."""
    layer, x = LSTM(D, H), numbers(T, B, 5, D, key=5)

    def step(x, state):
        h = layer(x)[0][:, -1]
        return h, state + h

    forget_warnings()
    with mx.stream(mx.cpu), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs, _ = recurrent(step, x, mx.zeros((B, H)), checkpoint_every=3)
        np.testing.assert_allclose(np.array(outputs), np.array(layer(x)[0][:, :, -1]), rtol=0, atol=1e-6)
    assert not caught


def test_a_step_with_dropout_draws_the_same_numbers():
    """With chunks, a step draws the random numbers that a loop without this package draws, also when the gradient runs
    it again. The next draw is the same, too. A compiled function with the state of the random numbers draws new ones in
    each call, and is right, too, if the loss or its gradient is compiled. A second derivative is right."""
    inner, drop, x = nn.Linear(D, D), nn.Dropout(0.5), numbers(T, B, D, key=1)

    def step(x, h):
        h = mx.tanh(inner(drop(x)) + h)
        return h, h

    def loss(x):
        return recurrent(step, x, mx.zeros((B, D)), checkpoint_every=2)[0].sum()

    def loop(x):
        h, total = mx.zeros((B, D)), 0.0
        for t in range(T):
            h, _ = step(x[t], h)
            total = total + h.sum()
        return total

    random_too = partial(mx.compile, inputs=mx.random.state, outputs=mx.random.state)
    both = mx.value_and_grad(loss)
    found = []
    for function in (mx.value_and_grad(loop), both, random_too(both), mx.value_and_grad(random_too(loss))):
        mx.random.seed(3)
        found.append([np.concatenate([np.array(each).ravel() for each in function(x)]) for _ in range(2)])
        found[-1].append(mx.random.uniform().item())
        for got, expected in zip(found[-1], found[0], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert found[0][0][0] != found[0][1][0]
    second = []
    for function in (loop, loss):
        mx.random.seed(3)
        second.append(np.array(mx.grad(lambda x, function=function: (mx.grad(function)(x) ** 2).sum())(x)))
    assert second[0].any()
    np.testing.assert_allclose(second[1], second[0], rtol=1e-4, atol=1e-6)


def test_compiled_gradients_of_arrays_that_elementwise_operations_compute():
    """MLX cannot compile two equal splits of such an array, and each chunk runs in both passes. Also without chunks a
    function may run over the same array twice, in both directions."""
    x, h = numbers(T, B, H, key=1), mx.zeros((B, H))

    def chunks(x):
        return recurrent(lambda x, h: (h, mx.tanh(x + h)), x * 3, h, lengths=[7, 2, 5], checkpoint_every=3)[0].sum()

    def directions(x):
        x = x * 3
        return sum(
            recurrent(lambda x, h: (h, mx.tanh(x + h)), x, h, reverse=reverse)[0].sum() for reverse in (False, True)
        )

    for loss in (chunks, directions):
        expected, got = (np.array(function(x)) for function in (mx.grad(loss), mx.compile(mx.grad(loss))))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_gradients_by_finite_differences():
    """With chunks of three steps, the gradients of x, the state and the parameters equal central differences in
    float64."""
    rng = np.random.default_rng(2)
    shapes = {"W": (H, H), "more": [(H,)]}
    parameters = {key: each for key, each in shapes.items()}
    parameters = {"W": mx.array(rng.normal(size=(H, H)) * 0.3, mx.float64)}
    parameters["more"] = [mx.array(rng.normal(size=H), mx.float64)]
    x, h = (mx.array(rng.normal(size=shape), mx.float64) for shape in ((T, B, H), (B, H)))

    def loss(parameters, x, h):
        outputs, last = recurrent(leaky, x, h, parameters=parameters, lengths=[7, 1, 4], checkpoint_every=3)
        return (outputs * outputs).sum() + last.sum()

    assert_by_differences(loss, (parameters, x, h), rng)


def test_second_derivatives_compile_and_16_bits():
    parameters = {"W": numbers(H, H, key=4) * 0.3, "more": [numbers(H, key=5)]}
    x, h = numbers(T, B, H, key=6), numbers(B, H, key=7)

    def loss(every):
        def of(parameters, x):
            outputs, last = recurrent(leaky, x, h, parameters=parameters, checkpoint_every=every)
            return (outputs * mx.cos(mx.arange(outputs.size)).reshape(outputs.shape)).sum() + (last * last).sum()

        return of

    def penalty(every):
        inner = mx.grad(loss(every), argnums=1)
        return mx.grad(lambda parameters, x: (inner(parameters, x) ** 2).sum(), argnums=(0, 1))

    for make in (penalty, lambda every: mx.compile(mx.grad(loss(every), argnums=(0, 1)))):
        expected, got = (tree_flatten(make(every)(parameters, x)) for every in (None, 2))
        for (key, value), (_, other) in zip(expected, got, strict=True):
            np.testing.assert_allclose(np.array(other), np.array(value), rtol=0, atol=2e-4, err_msg=key)
    short = tree_map(lambda array: array.astype(mx.bfloat16), parameters)
    gradient = mx.grad(loss(3), argnums=(0, 1))(short, x.astype(mx.bfloat16))
    assert {array.dtype for _, array in tree_flatten(gradient)} == {mx.bfloat16}
    np.testing.assert_allclose(loss(3)(parameters, x).item(), loss(None)(parameters, x).item(), rtol=1e-6)


def test_memory_is_bounded():
    """With `checkpoint_every=20`, a gradient over 400 steps takes less than a third of the memory that it takes
    without checkpoints."""
    W, x, h = numbers(32, 32, key=8) * 0.1, numbers(400, 64, 32, key=9), mx.zeros((64, 32))

    def step(x, h, W):
        for _ in range(4):
            h = mx.tanh(x + h @ W) + 0.1 * h
        return h[:, :1], h

    peaks = []
    for every in (None, 20):

        def loss(x, W, every=every):
            return recurrent(step, x, h, parameters=W, checkpoint_every=every)[0].sum()

        mx.eval(x, W, h)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(loss, argnums=(0, 1))(x, W))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < peaks[0] / 3, peaks


W = mx.ones((H, H))


def global_array(x, h):
    return h, mx.tanh(x + h @ W)


def capturing(arrays):
    def inner(h):
        return h @ arrays["recurrent"][0]

    return lambda x, h: (h, mx.tanh(x + inner(h)))


class Holder:
    def __init__(self):
        self.scale = mx.ones(H)

    def step(self, x, h):
        return h, self.scale * mx.tanh(x + h)


class Counting(nn.Module):
    """A module that assigns an array to itself at each step."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(H, H)

    def step(self, x, h):
        self.count = mx.zeros(1, mx.int32)
        return h, self.inner(x) + h


def by_helper(holder, x):
    """Call a module in an attribute of the argument. The step's code does not name the attribute."""
    return holder.layer(x)


class OfClass:
    """A class that holds a module."""

    layer = nn.Linear(H, H)


class Averaging(nn.Module):
    """A module that keeps a running mean, which is no parameter, and counts its steps in place."""

    def __init__(self):
        super().__init__()
        self.count, self._mean = mx.zeros(1), mx.zeros(H)

    def counting(self, x, h):
        self.count += 1
        return h, x + h

    def averaging(self, x, h):
        self._mean = 0.9 * self._mean + h.mean(axis=0)
        return h, x + h


SETTINGS.weight, SETTINGS.weights, leaky.weight, QUEUE = W, {"all": [W]}, W, deque([W])
MEANS = nn.BatchNorm(H)

BAD = {
    "a dict of a Python module": (lambda x, h: (h, h @ SETTINGS.weights["all"][0]), "but got SETTINGS.weights.all.0"),
    "a function's": (lambda x, h: (h, h @ leaky.weight), r"in a module, but got leaky\.weight"),
    "in a deque": (lambda x, h: (h, h @ QUEUE[0]), "in a module, but got QUEUE.0"),
    "a Python module's": (lambda x, h: (h, mx.tanh(x + h @ SETTINGS.weight)), r"but got SETTINGS.weight\."),
    "a global array": (global_array, "or hold them in a module, but got W"),
    "inside a closure": (capturing({"recurrent": [W]}), r"in a module, but got arrays\.recurrent\.0"),
    "an object's": (Holder().step, "or hold them in a module, but got self.scale"),
    "assigned": (Counting().step, "must not assign arrays to a module with checkpoint_every.*but got Counting.count"),
    "changed in place": (Averaging().counting, "assign arrays to a module .*but got Averaging.count"),
    "no parameter": (Averaging().averaging, "assign arrays to a module .*but got Averaging._mean"),
    "running means": (lambda x, h: (h, MEANS(x) + h), "assign arrays to a module .*but got BatchNorm.running_mean"),
    "by a helper": (lambda x, h: (h, by_helper(OfClass, x) + h), "but got an array of shape"),
    "by a computed name": (lambda x, h: (h, getattr(OfClass, "LAYER".lower())(x) + h), "but got an array of shape"),
    "no number": (lambda x, h: (h, h), "checkpoint_every must be a number of steps of at least 1", 0),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    step, message, *every = BAD[case]
    with pytest.raises(ValueError, match=message):
        recurrent(step, mx.ones((T, B, H)), mx.zeros((B, H)), checkpoint_every=every[0] if every else 2)
