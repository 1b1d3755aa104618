"""Tests of `mlx_lstm.nn.precision`, which runs a model in 16 bits while its parameters stay float32."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_lstm.nn import GRU, LSTM, QuantizedGRU, precision


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layers, self.packed = nn.BatchNorm(3), [LSTM(3, 64), GRU(64, 64)], QuantizedGRU(64, 64)

    def __call__(self, x):
        return self.packed(self.layers[1](self.layers[0](self.norm(x))[0]))


def arrays_of(model):
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_gradients_and_parameters_stay_float32(dtype):
    """Inside the block `with precision(model, dtype)` all float parameters have the 16-bit dtype. The gradients are
    float32 and equal those of a model whose parameters were cast to 16 bits. After the block the parameters are
    float32 and unchanged, except for the statistics that batch norm updates."""
    mx.random.seed(0)
    model, other, x = Model(), Model(), mx.random.normal((2, 5, 3)).astype(dtype)
    other.update(model.parameters())
    other.set_dtype(dtype)
    before = arrays_of(model)

    def loss(model):
        with precision(model, dtype):
            assert {array.dtype for array in arrays_of(model).values()} == {dtype, mx.uint32}
            output = model(x)
        return output.astype(mx.float32).square().sum()

    _, gradients = nn.value_and_grad(model, loss)(model)
    _, expected = nn.value_and_grad(other, lambda model: model(x).astype(mx.float32).square().sum())(other)
    pairs = zip(tree_flatten(gradients), tree_flatten(expected), strict=True)
    for (key, got), (_, want) in pairs:
        assert got.dtype == mx.float32, key
        np.testing.assert_array_equal(np.array(got), np.array(want.astype(mx.float32)), err_msg=key)
    after = arrays_of(model)
    changed = {key for key in before if not mx.array_equal(after[key], before[key]).item()}
    assert changed == {"norm.running_mean", "norm.running_var"}  # batch norm assigns these in the block
    assert {after[key].dtype for key in changed} == {mx.float32}
    assert mx.abs(after["norm.running_mean"]).max().item() > 0


def test_an_exception_restores_the_parameters():
    model = Model()
    before = arrays_of(model)
    with pytest.raises(KeyError), precision(model, mx.float16):
        raise KeyError
    assert all(array is before[key] for key, array in arrays_of(model).items())


def test_a_predicate_and_blocks_inside_blocks():
    model = Model()
    with precision(model, predicate=lambda path: path.startswith("layers.1")):
        assert model.layers[1].Wh.dtype == mx.bfloat16 and model.layers[0].Wh.dtype == mx.float32
        with precision(model, mx.float16):
            assert model.layers[1].Wh.dtype == model.norm.weight.dtype == mx.float16
        assert model.layers[1].Wh.dtype == mx.bfloat16
    assert model.layers[1].Wh.dtype == mx.float32


def test_training_in_16_bits():
    """A model trains in bfloat16 with an optimizer that never sees a 16-bit array."""
    mx.random.seed(1)
    model, optimizer = LSTM(3, 8), optim.Adam(1e-2)
    x, target = mx.random.normal((4, 9, 3)), mx.random.normal((4, 9, 8)) * 0.1

    def loss(model):
        with precision(model):
            hidden, _ = model(x.astype(mx.bfloat16))
        return nn.losses.mse_loss(hidden.astype(mx.float32), target)

    losses = []
    for _ in range(20):
        value, gradients = nn.value_and_grad(model, loss)(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(value.item())
    assert losses[-1] < losses[0] / 2
    assert {array.dtype for _, array in tree_flatten(optimizer.state) if array.ndim} == {mx.float32}


BAD = {
    "model": (lambda: precision([LSTM(3, 4)]), "model must be a module but got list"),
    "dtype": (lambda: precision(LSTM(3, 4), mx.int32), "dtype must be mx.bfloat16, mx.float16 or mx.float32 but got"),
    "text": (lambda: precision(LSTM(3, 4), "float16"), "dtype must be mx.bfloat16, mx.float16 or mx.float32 but got"),
    "predicate": (lambda: precision(LSTM(3, 4), predicate="Wh"), "predicate must be a function of a parameter's path"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message), call():
        pass
