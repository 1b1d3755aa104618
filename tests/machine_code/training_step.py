"""Count the launches of one training step of a model with two LSTM layers, and the bytes of their arguments. No GPU is
needed: `PYTHONPATH=tests python -m machine_code --launches` prints the table in docs/predictions.md."""

from collections import Counter
from typing import Any

import mlx.core as mx

from mlx_lstm.engines.autodiff import ENGINE_MODULES
from mlx_lstm.engines.cells import LSTMCell
from mlx_lstm.engines.problem import Arrays, Problem
from mlx_lstm.lab.report import table

from .launches import Graph, trace

SIZES = {"stepwise": (64, 32, 256), "fused": (64, 32, 64)}
"""T, B and H of the model, by engine. The input of both layers has H features."""

COLUMNS = (
    "engine",
    "T,B,H",
    "steps",
    "other kernels",
    "products",
    "other of MLX",
    "views",
    "arrays",
    "constant B",
    "MB",
)


def training_step(engine: str, T: int, B: int, H: int) -> Graph:
    """Return the launches of a forward pass of both layers, of the mean of h squared, and of the gradients of all
    weights and biases."""
    module, problem = ENGINE_MODULES[engine], Problem(T, B, H, H, LSTMCell(), training=True, wants_last=False)

    def step(x: mx.array, *weights: mx.array) -> list[mx.array]:
        # MLX cannot export custom functions, so the engine's passes are called as `mx.value_and_grad` would call them.
        layers, gradients = [dict(zip(("Wx", "Wh", "b"), weights[n : n + 3], strict=True)) for n in (0, 3)], []
        passes: list[tuple[Arrays, Any]] = []
        for layer in layers:
            arrays = {"x": x, **layer}
            passes.append((arrays, module.forward(problem, arrays)))
            x = passes[-1][1]["h"]
        d = x * (2 / x.size)
        for arrays, outputs in reversed(passes):
            of_layer = module.backward(problem, arrays, outputs, {"h": d})
            d = of_layer.pop("x")
            gradients += of_layer.values()
        return [mx.square(x).mean(), *gradients]

    layer = [(4 * H, H), (4 * H, H), (4 * H,)]
    return trace(step, [mx.zeros(shape) for shape in [(T, B, H), *layer, *layer]])


def counted(engine: str, T: int, B: int, H: int) -> tuple[str | int, ...]:
    """Return the row of the table for one engine, in the order of `COLUMNS`. A primitive without a launch is a view."""
    graph = training_step(engine, T, B, H)
    kinds = Counter(
        ("steps" if "stepwise_forward" in launch.name or "stepwise_backward" in launch.name else "ours")
        if launch.ours
        else ("products" if launch.name in ("AddMM", "Matmul") else "other")
        for launch in graph.launches
    )
    buffers = [buffer for launch in graph.launches for buffer in (*launch.reads, *launch.writes)]
    constant = sum(buffer.bytes for buffer in buffers if buffer.constant)
    device = sum(buffer.bytes for buffer in buffers if not buffer.constant)
    numbers = (kinds["steps"], kinds["ours"], kinds["products"], kinds["other"], graph.nodes - len(graph.launches))
    return (engine, f"{T},{B},{H}", *numbers, len(buffers), constant, round(device / 1e6))


def text() -> str:
    """Return the table of all engines."""
    return table([COLUMNS, *([str(cell) for cell in counted(name, *SIZES[name])] for name in SIZES)], left=2)
