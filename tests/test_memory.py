"""Tests of the peak memory of a training step, measured by the operating system in a child process or by MLX."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn
import pytest
from on_metal import in_turns

import mlx_lstm.nn

STEP = """
import resource, sys
import mlx.core as mx
import mlx_lstm

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def step(T):
    mx.set_default_device(mx.cpu)
    shapes = (T, B, I), (D * G * H, I), (2, G * H, H) if D == 2 else (G * H, H), (D * G * H,)
    arrays = [mx.random.normal(shape, scale=0.1) for shape in shapes]
    dh = mx.random.normal((T, B, D * H))
    mx.eval(arrays, dh)
    op = getattr(mlx_lstm, word)
    outputs, gradients = mx.vjp(lambda *arrays: [op(*arrays, bidirectional=D == 2).h], arrays, [dh])
    mx.eval(outputs, gradients)

T, B, I, H = 512, 32, 128, 128
word, D = sys.argv[1], int(sys.argv[2])
G, kept = {"lstm": (4, 5), "gru": (3, 3), "rnn": (1, 0)}[word]  # kept: the saved widths (gates and c) as multiples of H
step(8)  # warm up: BLAS and MLX allocate their own buffers
before = peak()
step(T)
floats = 2 * T * B * (I + D * H) + T * B * D * kept * H + 2 * D * G * H * (I + H + 1)
print((peak() - before) / (4 * floats))
"""


@pytest.mark.parametrize("word, directions", in_turns([("gru",), ("lstm",), ("rnn",)], [1, 2], others=True))
def test_peak_is_near_what_backpropagation_through_time_must_hold(word, directions):
    """A training step raises the peak memory by at most 1.3 times the size of the arrays that backpropagation needs:
    x, gates, h, c, dx, the weights, their gradients and the cotangent of h."""
    command = [sys.executable, "-c", STEP, word, str(directions)]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True).stdout
    assert float(printed) < 1.3


def peak_of_calls(module, kind, B, H=128, T=20):
    """Return the peak memory, as MLX counts it, of a training step that calls a layer once for each of T steps."""
    layer, x = getattr(module, kind)(H, H), mx.random.normal((T, B, 1, H))
    mx.eval(x, layer.parameters())

    def loss(x):
        states, total = (), mx.array(0.0)
        for t in range(T):
            results = layer(x[t], *states)
            states = tuple([a[:, -1] for a in (results if kind == "LSTM" else (results,))])
            total = total + mx.square(states[0]).mean()
        return total

    step = mlx.nn.value_and_grad(layer, loss)
    mx.eval(step(x))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(step(x))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("kind, B", [("LSTM", 1), ("LSTM", 64), ("GRU", 16), ("RNN", 64)])
def test_peak_of_a_call_for_each_step_is_near_that_of_mlx(kind, B):
    """A program that calls a layer for each step in training needs at most 1.2 times the memory that the layer of
    `mlx.nn` needs."""
    with mx.stream(mx.cpu):
        assert peak_of_calls(mlx_lstm.nn, kind, B) <= 1.2 * peak_of_calls(mlx.nn, kind, B)
