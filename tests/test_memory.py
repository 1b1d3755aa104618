"""Peak memory of a training step, measured by the operating system in a process of its own."""

import subprocess
import sys
from pathlib import Path

STEP = """
import resource, sys
import mlx.core as mx
from mlx_lstm import lstm

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def step(T):
    x, Wx, Wh, b = (mx.random.normal(shape) for shape in ((T, B, I), (4 * H, I), (4 * H, H), (4 * H,)))
    dh = mx.random.normal((T, B, H))
    mx.eval(x, Wx, Wh, b, dh)
    outputs, gradients = mx.vjp(lambda *arrays: [lstm(*arrays).h], [x, Wx, Wh, b], [dh])
    mx.eval(outputs, gradients)

T, B, I, H = 1024, 32, 128, 128
step(8)  # BLAS and MLX take what they need for themselves
before = peak()
step(T)
floats = T * B * (I + 4 * H + H + H) + T * B * I + 2 * 4 * H * (I + H + 1) + T * B * H
print((peak() - before) / (4 * floats))
"""


def test_peak_is_near_what_backpropagation_through_time_must_hold():
    """x, gates, h, c, dx, the weights with their gradients, and the cotangent of h that the caller holds."""
    root = Path(__file__).parents[1]
    printed = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, cwd=root, check=True).stdout
    assert float(printed) < 1.5
