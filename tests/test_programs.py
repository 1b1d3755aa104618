"""Tests of programs.py, which contains thirteen programs, each written by hand and with mlx-lstm. Both versions give
the same results, and the version with mlx-lstm has fewer lines."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from programs import PROGRAMS, B, D, H, HandWritten, T, lines_of

from mlx_lstm import recognise


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_s_lines_equal_ours(program):
    """A program written by hand and its version with mlx-lstm give the same outputs and the same gradients of x and
    of all parameters. The version with mlx-lstm has fewer lines."""
    mx.random.seed(1)
    model, x = program(), mx.random.normal((B, T, D))

    def results(method):
        def loss(parameters, x):
            model.update(parameters)
            found = [array for _, array in tree_flatten(method(x))]
            return sum((each * mx.cos(mx.arange(each.size)).reshape(each.shape)).sum() for each in found), found

        (_, found), gradients = mx.value_and_grad(loss, argnums=(0, 1))(model.parameters(), x)
        return dict(tree_flatten([found, gradients]))

    expected, got = results(model.before), results(model.after)
    assert expected.keys() == got.keys() and len(got) > 3
    for key, value in expected.items():
        np.testing.assert_allclose(np.array(got[key]), np.array(value), rtol=0, atol=2e-5, err_msg=key)
    assert lines_of(program.after) < lines_of(program.before)


def test_recognise_returns_the_line_of_the_program():
    model = HandWritten()
    line = recognise(model, model.step, D, H, name="self")
    assert line == ("lstm(x, self.gates.weight[:, :4], self.gates.weight[:, 4:], b=self.gates.bias, gate_order='ifog')")
