"""Quantized weights of 8 and 4 bits, one step at a time: time, memory and error of a model.

    python examples/quantized_streaming.py            # two LSTM layers of 640 units
    python examples/quantized_streaming.py 2 256

The example measures two LSTM layers with weights of 32, 8 and 4 bits: the time of a step, the memory, and the error of
the outputs. Each number of bits runs in a separate process. On a CPU the engine `numpy` dequantizes the weights once
and caches the matrices, so memory holds both the quantized weights and the matrices. The Metal engines read the
quantized weights themselves.
"""

import os
import subprocess
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # set before NumPy is imported: more threads would be slower

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from support.command import numbers, run_main

from mlx_lstm.nn import LSTM, quantize

STEPS = 200


class Stack(nn.Module):
    """A stack of LSTM layers; each layer reads the output of the layer before it."""

    def __init__(self, layers, units):
        super().__init__()
        self.layers = [LSTM(units, units) for _ in range(layers)]

    def __call__(self, x, states):
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            x, cell = layer.step(x, *state)
            after.append((x, cell))
        return x, after


def stream(model, x):
    """Call the model once per step; return the outputs [steps, units] and the milliseconds of each call."""
    states, outputs, times = [(None, None)] * len(model.layers), [], [time.perf_counter()]
    for frame in x:
        y, states = model(frame, states)
        mx.eval(y, states)
        outputs.append(np.array(y))
        times.append(time.perf_counter())
    return np.stack(outputs), 1000 * np.diff(times)


def main(layers=2, units=640, bits=0):
    """Measure the model with weights of `bits` bits; without `bits` measure weights of 32, 8 and 4 bits, each in a
    separate process."""
    if units % 32:
        sys.exit(f"units must be a multiple of 32, a group of weights, but are {units}.")
    if not bits:
        print("bits   weights   all arrays   a step   one in a hundred   off by", flush=True)  # children print rows
        for bits in (32, 8, 4):
            if code := subprocess.call([sys.executable, __file__, str(layers), str(units), str(bits)]):
                return code  # the child has said what is wrong
        return 0
    mx.random.seed(0)
    model = Stack(layers, units).eval()
    x = mx.random.normal((STEPS, units))
    exact, _ = stream(model, x)
    if bits < 32:
        quantize(model, group_size=64 if units % 64 == 0 else 32, bits=bits)
    stream(model, x[:10])
    outputs, times = stream(model, x)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters())) / 1e6
    middle, late = np.quantile(times, [0.5, 0.99])
    line = f"{bits:4d}{weights:7.1f} MB{mx.get_active_memory() / 1e6:10.1f} MB{middle:6.2f} ms{late:16.2f} ms"
    print(f"{line}{np.abs(outputs - exact).max():9.0e}", flush=True)
    return 0


if __name__ == "__main__":
    run_main(lambda: main(*numbers(__doc__, most=3)))
