"""Tests of the cache of arrays derived from parameters. The parameters change in every way that MLX allows, and each
result must equal the result with an empty cache. The models are bidirectional layers of `torch`, bidirectional calls
of `nn.stack`, and quantized layers."""

import gc
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

import mlx_lstm.nn
import mlx_lstm.torch
from mlx_lstm.engines.numpy import weights

KINDS = ("LSTM", "GRU", "RNN")


def torch_layer(rng):
    layer = getattr(mlx_lstm.torch, rng.choice(KINDS))(4, 4, num_layers=int(rng.integers(1, 3)), bidirectional=True)
    return [layer], 4, layer


def stack_of_both_directions(rng):
    layers = [getattr(mlx_lstm.nn, kind)(4, 4) for kind in 2 * [rng.choice(KINDS)]]
    return layers, 4, lambda x: mlx_lstm.nn.stack(layers[:1], x, reverse=layers[1:])


def quantized_layer(rng):
    kind = rng.choice(KINDS)
    layer = getattr(mlx_lstm.nn, kind)(32, 32)
    layer = getattr(mlx_lstm.nn, f"Quantized{kind}").from_layer(layer, group_size=32, bits=8)
    return [layer], 32, layer


def quantized_stack(rng):
    layers = [quantized_layer(np.random.default_rng(seed))[0][0] for seed in 2 * [int(rng.integers(100))]]
    return layers, 32, lambda x: mlx_lstm.nn.stack(layers[:1], x, reverse=layers[1:])


MODELS = (torch_layer, stack_of_both_directions, quantized_layer, quantized_stack)


def transposed(rng, array):
    return array.T


def reversed_rows(rng, array):
    return array[::-1]


def reversed_columns(rng, array):
    return array[..., ::-1]


def first_row_everywhere(rng, array):
    return mx.broadcast_to(array[:1], array.shape)


def first_column_everywhere(rng, array):
    return mx.broadcast_to(array[..., :1], array.shape)


def part_of_a_larger_one(rng, array):
    """Return a view of a larger array that holds the rows of `array` followed by the same rows in reverse order. The
    view has as many rows as `array`: at random the first rows, the rows from the second on, or every second row."""
    wide = mx.concatenate([array, array[::-1]])
    mx.eval(wide)
    return (wide[: len(array)], wide[1 : 1 + len(array)], wide[::2])[rng.integers(3)]


def another_shape(rng, array):
    return array.reshape(*array.shape[1:], array.shape[0], 1)[..., 0] if array.ndim > 1 else array.reshape(2, -1)


def fewer_rows(rng, array):
    return array[: (len(array) + 1) // 2]


def new_values(rng, array):
    """Return the rows in reverse order in new memory. The new memory may be memory that the old array has just
    freed."""
    return array[::-1] + mx.zeros_like(array)


def another_dtype(rng, array):
    return array.astype(mx.float16) if array.dtype == mx.float32 else array


CHANGES = (
    transposed,
    reversed_rows,
    reversed_columns,
    first_row_everywhere,
    first_column_everywhere,
    part_of_a_larger_one,
    another_shape,
    fewer_rows,
    new_values,
    another_dtype,
)


def change(rng, modules, old, alone):
    """Change one random parameter of one random module.

    `old` maps (module id, parameter name) to an earlier array, which may be assigned again. `alone` says that no
    other thread reads the module during the change. If it is false, new values are evaluated before they are
    assigned, and the last four kinds of change in this function do not happen.
    """
    module = modules[rng.integers(len(modules))]
    name = str(rng.choice(list(module.parameters())))
    kind = rng.integers(len(CHANGES) + 4 * alone)
    if kind < len(CHANGES):
        array = CHANGES[kind](rng, module[name])
        if not alone:
            mx.eval(array)
        module[name] = array
    elif kind == len(CHANGES):  # in place: the same array object gets new values
        array = module[name]
        array[int(rng.integers(len(array)))] = 1
    elif kind == len(CHANGES) + 1:  # an earlier array of this parameter comes back
        module[name] = old.get((id(module), name), module[name])
    elif kind == len(CHANGES) + 2:  # two parameters are swapped
        own = module.parameters()
        other = str(rng.choice([key for key, array in own.items() if array.ndim == own[name].ndim]))
        module[name], module[other] = module[other], module[name]
    else:  # free the old array first, so that the new one may get its memory
        values = np.array(module[name])
        del module[name]
        gc.collect(0)
        module[name] = mx.array(values[::-1].copy())
    if rng.random() < 0.3:
        old[id(module), name] = module[name]


def result(call, x):
    """Return the output of a call as a NumPy array, or the text of its ValueError."""
    try:
        found = call(x)
        mx.eval(found)
        return np.array(found[0] if isinstance(found, tuple) else found).astype(np.float32)
    except ValueError as error:
        return str(error)


def check_changes(seed, count):
    """Make `count` random changes, some while other threads call the layer. After each change, check that the result
    equals the result with an empty cache."""
    rng = np.random.default_rng(seed)
    with mx.stream(mx.cpu), ThreadPoolExecutor(3) as threads:
        modules, width, call = MODELS[seed % len(MODELS)](rng)
        x, old = mx.array(rng.normal(size=(2, 3, width)), mx.float32), {}
        start = [(module, name, array) for module in modules for name, array in module.parameters().items()]
        for n in range(count):
            if n % 8 == 0:
                for module, name, array in start:
                    module[name] = mx.array(array)
            calls = []
            if rng.random() < 0.1:
                mx.eval([module.parameters() for module in modules])
                calls = [threads.submit(result, call, x) for _ in range(2)]
            change(rng, modules, old, alone=not calls)
            for one in calls:
                one.result()
            got = result(call, x)
            with patch.dict(weights._cached, clear=True):
                expected = result(call, x)
            assert type(got) is type(expected), (seed, n, got, expected)
            if isinstance(got, str):
                assert got == expected and got.startswith("["), (seed, n, got, expected)
            else:
                np.testing.assert_array_equal(got, expected, err_msg=f"{seed, n}")


@pytest.mark.parametrize("seed", range(len(MODELS)))
def test_changed_parameters_are_seen(seed):
    check_changes(seed, 25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_changed_parameters_are_seen(seed):
    check_changes(seed, 500)


def both_directions():
    layer = mlx_lstm.torch.RNN(4, 4, bidirectional=True)
    return layer, mx.random.normal((3, 2, 4))


@pytest.mark.parametrize(
    "name, changed",
    [
        ("weight_hh_l0", lambda w: w.T),
        ("weight_ih_l0_reverse", lambda w: w.T),
        ("bias_hh_l0", lambda b: mx.broadcast_to(b[:1], (4,))),
    ],
)
def test_a_view_of_a_parameter_s_memory_is_another_parameter(name, changed):
    """A view that begins at the same address as a cached parameter does not get the arrays that were cached for the
    parameter."""
    with mx.stream(mx.cpu):
        layer, x = both_directions()
        mx.eval(layer(x))
        layer[name] = changed(layer[name])
        got = layer(x)[0]
        layer.engine = "ops"
        np.testing.assert_allclose(got, layer(x)[0], rtol=0, atol=1e-6)


def test_a_parameter_of_a_wrong_shape_is_refused_whatever_is_cached():
    with mx.stream(mx.cpu):
        layer, x = both_directions()
        mx.eval(layer(x))
        layer.weight_hh_l0 = layer.weight_hh_l0.reshape(2, 8)
        message = r"^\[torch.RNN\] weight_hh_l0 must have shape \[4, 4\] but got shape \[2, 8\]"
        with pytest.raises(ValueError, match=message):
            layer(x)


def test_what_else_is_made_of_the_same_arrays_has_an_entry_of_its_own():
    with mx.stream(mx.cpu):
        arrays = [mx.ones((2, 2)), mx.zeros((2,))]
        first = weights.cached("sum", arrays, lambda arrays: arrays[0] + arrays[1])
        assert weights.cached("sum", arrays, lambda arrays: 1 / 0) is first
        assert weights.cached("difference", arrays, lambda arrays: arrays[0] - arrays[1]) is not first
        assert weights.cached("sum", [*arrays, 3], lambda arrays: arrays[2]) == 3
        # The same memory as numbers of another dtype, and the same arrays under each other's names.
        halves, first = mx.ones((2,), mx.bfloat16), mx.zeros((2,))
        for dtype in (mx.bfloat16, mx.float16):
            found = weights.cached("dtype", [first, halves.view(dtype)], lambda arrays: arrays[1] + 0)
            assert found.dtype == dtype
        for names in ("ab", "ba"):
            named = dict(zip(names, arrays, strict=True))
            assert weights.cached("name", named, lambda arrays: arrays["a"] + 0).shape == named["a"].shape


def test_a_value_is_made_of_the_arrays_its_key_names():
    """A cached value is derived from the arrays as they were at the lookup, even if a parameter changes during the
    derivation."""
    with mx.stream(mx.cpu):
        array = mx.ones((3,))

        def derive(arrays):
            array[0] = 5
            return arrays[0] * 2

        assert weights.cached("twice", [array], derive).tolist() == [2, 2, 2]
        assert weights.cached("twice", [array], derive).tolist() == [10, 2, 2]
