"""The benchmark case `lstm`: one LSTM layer of this package, of MLX and of torch."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ....oracle.arithmetic import Tensors
from ...cases import DTYPES, as_represented
from ..tasks import PASSES, Contender, Size, Task, Work


def draw(size: Size, dtype: str, seed: int = 0) -> Tensors:
    """Return random x, Wx, Wh, b, time-major and in gate order ifgo, and the cotangent dh of h, as float32 arrays
    with values that `dtype` can represent."""
    rng = np.random.default_rng(seed)
    T, B, width, H = size

    def weights(*shape: int) -> np.ndarray:
        return ((2 * rng.random(shape, np.float32) - 1) / np.sqrt(H)).astype(np.float32)

    numbers = {
        "x": rng.standard_normal((T, B, width), np.float32),
        "Wx": weights(4 * H, width),
        "Wh": weights(4 * H, H),
        "b": weights(4 * H),
        "dh": rng.standard_normal((T, B, H), np.float32),
    }
    return as_represented(numbers, dtype)


def prepare_ours(numbers: Tensors, task: Task) -> Work:
    """Return this package's `lstm`, time-major, on the task's engine, ready to run. The pass "forward" is inference."""
    from mlx_lstm import lstm

    def forward(x: mx.array, Wx: mx.array, Wh: mx.array, b: mx.array) -> mx.array:
        training = task.which == "backward"
        return lstm(x, Wx, Wh, b, training=training, engine=task.engine, checkpoint_every=task.every).h

    return mlx_work(forward, numbers, task, batch_major=False)


def prepare_mlx(numbers: Tensors, task: Task) -> Work:
    """Return `mlx.nn.LSTM`, ready to run. It is batch-major: x and dh are converted to [B, T, .] before the timed
    runs."""
    import mlx.nn as nn

    layer = nn.LSTM(task.size.I, task.size.H)

    def forward(x: mx.array, Wx: mx.array, Wh: mx.array, b: mx.array) -> mx.array:
        layer.Wx, layer.Wh, layer.bias = Wx, Wh, b
        return layer(x)[0]

    return mlx_work(forward, numbers, task, batch_major=True)


def mlx_work(forward: Callable[..., mx.array], numbers: Tensors, task: Task, *, batch_major: bool) -> Work:
    """Return an MLX function from (x, Wx, Wh, b) to h, prepared with the given arrays and ready to run. Gradients
    come from `mx.vjp`, without a loss."""
    arrays = {name: numbers[name] for name in ("x", "Wx", "Wh", "b", "dh")}
    if batch_major:
        arrays |= {name: np.ascontiguousarray(arrays[name].swapaxes(0, 1)) for name in ("x", "dh")}
    arrays = {name: mx.array(array).astype(DTYPES[task.dtype]) for name, array in arrays.items()}
    mx.eval(arrays)
    dh = arrays.pop("dh")
    primals = list(arrays.values())

    def build() -> list[mx.array]:
        if task.which == "forward":
            return [forward(*primals)]
        outputs, gradients = mx.vjp(forward, primals, [dh])
        return [*outputs, *gradients]

    def run() -> list[mx.array]:
        results = build()
        mx.eval(results)
        return results

    def tensors(results: list[mx.array]) -> Tensors:
        named = dict(zip(PASSES[task.which], results, strict=True))
        return {
            name: np.array((a.swapaxes(0, 1) if batch_major and name in ("h", "dx") else a).astype(mx.float32))
            for name, a in named.items()
        }

    return Work(run, tensors, build=build)


def prepare_torch(numbers: Tensors, task: Task) -> Work:
    """Return `torch.nn.LSTM` on the CPU, time-major, ready to run. bias_ih = b; bias_hh = 0 and needs no gradient.

    Forward runs under `no_grad`; gradients come from `torch.autograd.grad`, which does not add them to `.grad`.
    """
    import torch

    dtype = getattr(torch, task.dtype)
    layer = torch.nn.LSTM(task.size.I, task.size.H).to(dtype)
    x, Wx, Wh, b, dh = (torch.from_numpy(numbers[name]).to(dtype) for name in ("x", "Wx", "Wh", "b", "dh"))
    with torch.no_grad():
        for name, value in {"weight_ih": Wx, "weight_hh": Wh, "bias_ih": b, "bias_hh": torch.zeros_like(b)}.items():
            getattr(layer, f"{name}_l0").copy_(value)
    layer.bias_hh_l0.requires_grad_(False)
    x.requires_grad_(True)
    inputs: list[Any] = [x, layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0]

    def run() -> list[Any]:
        if task.which == "forward":
            with torch.no_grad():
                return [layer(x)[0]]
        h = layer(x)[0]
        return [h, *torch.autograd.grad(h, inputs, dh)]

    def tensors(results: list[Any]) -> Tensors:
        named = zip(PASSES[task.which], results, strict=True)
        return {name: a.detach().float().numpy() for name, a in named}

    return Work(run, tensors, torch.get_num_threads())


CONTENDERS = {
    "ours": Contender("mlx_lstm.lstm", "mlx", prepare_ours),
    "mlx": Contender("mlx.nn.LSTM", "mlx", prepare_mlx),
    "torch": Contender("torch.nn.LSTM", "torch", prepare_torch),
}
