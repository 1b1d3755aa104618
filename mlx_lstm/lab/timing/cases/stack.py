"""The benchmark cases `cudnn_lstm` and `cudnn_gru`: two bidirectional layers, `mlx_lstm.cudnn` against torch on the
CPU."""

from typing import Any

import mlx.core as mx
import numpy as np

from ....engines.cells import Cell, GRUCell, LSTMCell
from ....oracle.arithmetic import Tensors
from ...cases import DTYPES, as_represented
from ..tasks import Contender, Size, Task, Work
from .stack_judge import SUFFIXES

SIZES = (Size(128, 32, 128, 128), Size(64, 16, 256, 256))
CELLS: dict[str, Cell] = {"lstm": LSTMCell(), "gru": GRUCell()}
ALL = tuple(suffix for suffixes in SUFFIXES for suffix in suffixes)
PASSES = {
    "forward": ("h",),
    "backward": ("h", "dx", *(f"{name}{suffix}" for suffix in ALL for name in ("dWx", "dWh", "db", "dbh"))),
}


def draw(cell: str, size: Size, dtype: str, seed: int = 0) -> Tensors:
    """Return random x [T, B, I], dh [T, B, 2H], and for every layer and direction Wx, Wh, b, bh in torch's gate
    order."""
    rng = np.random.default_rng(seed)
    T, B, width, H = size
    G = CELLS[cell].gates
    numbers = {"x": rng.standard_normal((T, B, width), np.float32)}
    for layer, suffixes in enumerate(SUFFIXES):
        shapes = {"Wx": (G * H, 2 * H if layer else width), "Wh": (G * H, H), "b": (G * H,), "bh": (G * H,)}
        for suffix in suffixes:
            for name, shape in shapes.items():
                numbers[name + suffix] = ((2 * rng.random(shape, np.float32) - 1) / np.sqrt(H)).astype(np.float32)
    numbers["dh"] = rng.standard_normal((T, B, 2 * H), np.float32)
    return as_represented(numbers, dtype)


def to_buffer(arrays: Tensors) -> np.ndarray:
    """Join arrays into cuDNN's parameter buffer: all matrices by layer and direction, then all biases."""
    parts = [(name, suffix) for pair in (("Wx", "Wh"), ("b", "bh")) for suffix in ALL for name in pair]
    return np.concatenate([arrays[name + suffix].ravel() for name, suffix in parts])


def from_buffer(buffer: np.ndarray, like: Tensors) -> Tensors:
    """Split cuDNN's parameter buffer into arrays with the names and shapes of `like`."""
    arrays, start = {}, 0
    for pair in (("Wx", "Wh"), ("b", "bh")):
        for name in (name + suffix for suffix in ALL for name in pair):
            shape = like[name].shape
            arrays[name] = buffer[start : start + np.prod(shape)].reshape(shape)
            start += np.prod(shape)
    return arrays


def prepare_ours(cell: str, numbers: Tensors, task: Task) -> Work:
    """Return `mlx_lstm.cudnn.cudnn_rnn`, prepared with the given arrays and ready to run. Gradients come from
    `mx.vjp`."""
    from mlx_lstm.cudnn import cudnn_rnn

    state = np.zeros((4, task.size.B, task.size.H), np.float32)
    arrays = {"x": numbers["x"], "state": state, "params": to_buffer(numbers), "dh": numbers["dh"]}
    arrays = {name: mx.array(array).astype(DTYPES[task.dtype]) for name, array in arrays.items()}
    mx.eval(arrays)
    training = task.which == "backward"
    options = {"rnn_mode": cell, "direction": "bidirectional", "engine": task.engine, "is_training": training}

    def output(x: mx.array, params: mx.array) -> list[mx.array]:
        return [cudnn_rnn(x, arrays["state"], arrays["state"], params, **options).output]

    def build() -> list[mx.array]:
        inputs = [arrays["x"], arrays["params"]]
        if not training:
            return output(*inputs)
        outputs, gradients = mx.vjp(output, inputs, [arrays["dh"]])
        return [*outputs, *gradients]

    def run() -> list[mx.array]:
        results = build()
        mx.eval(results)
        return results

    def tensors(results: list[mx.array]) -> Tensors:
        h, *gradients = (np.array(array.astype(mx.float32)) for array in results)
        if not gradients:
            return {"h": h}
        return {"h": h, "dx": gradients[0]} | {f"d{n}": a for n, a in from_buffer(gradients[1], numbers).items()}

    return Work(run, tensors, build=build)


TORCH_NAMES = {"Wx": "weight_ih", "Wh": "weight_hh", "b": "bias_ih", "bh": "bias_hh"}


def prepare_torch(cell: str, numbers: Tensors, task: Task) -> Work:
    """Return `torch.nn.LSTM` or `torch.nn.GRU` on the CPU, time-major, ready to run."""
    import torch

    dtype = getattr(torch, task.dtype)
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell]
    layer = layer(task.size.I, task.size.H, num_layers=2, bidirectional=True).to(dtype)
    names = {name + suffix: torch_name + suffix for suffix in ALL for name, torch_name in TORCH_NAMES.items()}
    with torch.no_grad():
        for name, torch_name in names.items():
            getattr(layer, torch_name).copy_(torch.from_numpy(numbers[name]))
    x, dh = (torch.from_numpy(numbers[name]).to(dtype) for name in ("x", "dh"))
    x.requires_grad_(True)
    weights = [getattr(layer, torch_name) for torch_name in names.values()]

    def run() -> list[Any]:
        if task.which == "forward":
            with torch.no_grad():
                return [layer(x)[0]]
        h = layer(x)[0]
        return [h, *torch.autograd.grad(h, [x, *weights], dh)]

    def tensors(results: list[Any]) -> Tensors:
        keys = ("h", "dx", *(f"d{name}" for name in names))
        return {key: array.detach().float().numpy() for key, array in zip(keys, results, strict=False)}

    return Work(run, tensors, torch.get_num_threads())


def contenders(cell: str) -> dict[str, Contender]:
    """Return the contenders for a stack of this cell, by name."""

    def ours(numbers: Tensors, task: Task) -> Work:
        return prepare_ours(cell, numbers, task)

    def torch(numbers: Tensors, task: Task) -> Work:
        return prepare_torch(cell, numbers, task)

    return {
        "ours": Contender(f"mlx_lstm.cudnn {cell}", "mlx_lstm.cudnn", ours),
        "torch": Contender(f"torch.nn.{cell.upper()}", "torch", torch),
    }
