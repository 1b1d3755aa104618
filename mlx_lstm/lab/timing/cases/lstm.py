"""The benchmark case `lstm`: one LSTM layer of this package, of MLX and of torch."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ....oracle.arithmetic import Array, Tensors
from ...cases import DTYPES, stored
from ..tasks import Contender, Size, Task, Work


def draw(size: Size, dtype: str) -> Tensors:
    """Return random arrays by name: x [T, B, I], Wx, Wh, b in the gate order ifgo, and the cotangent dh of h. They are
    float32 arrays with values that `dtype` can represent."""
    H = size.H
    return drawn(size, dtype, {"Wx": (4 * H, size.I), "Wh": (4 * H, H), "b": (4 * H,)})


def drawn(size: Size, dtype: str, weights: dict[str, tuple[int, ...]], directions: int = 1) -> Tensors:
    """Return random arrays by name: x [T, B, I], the weights, and dh [T, B, directions * H]. They are float32 arrays
    with values that `dtype` can represent. weights: {name: shape}."""
    rng = np.random.default_rng(0)
    T, B, I, H = size
    numbers = {"x": rng.standard_normal((T, B, I), np.float32)}
    for name, shape in weights.items():
        numbers[name] = ((2 * rng.random(shape, np.float32) - 1) / np.sqrt(H)).astype(np.float32)
    numbers["dh"] = rng.standard_normal((T, B, directions * H), np.float32)
    return stored(numbers, dtype)


def prepare_ours(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `mlx_lstm.lstm` on the task's engine. The pass "forward" is
    inference."""
    from mlx_lstm import lstm

    def forward(x: mx.array, Wx: mx.array, Wh: mx.array, b: mx.array) -> mx.array:
        training = task.which == "backward"
        return lstm(x, Wx, Wh, b, training=training, engine=task.engine, checkpoint_every=task.every).h

    return in_mlx(forward, numbers, task)


def prepare_mlx(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `mlx.nn.LSTM`. It takes the batch first, so x and dh are converted
    before the timed runs."""
    import mlx.nn as nn

    layer = nn.LSTM(task.size.I, task.size.H)

    def forward(x: mx.array, Wx: mx.array, Wh: mx.array, b: mx.array) -> mx.array:
        layer.Wx, layer.Wh, layer.bias = Wx, Wh, b
        return layer(x)[0]

    def turned(arrays: Tensors) -> Tensors:
        return {name: a.swapaxes(0, 1) if name in ("x", "h", "dx", "dh") else a for name, a in arrays.items()}

    work = in_mlx(forward, turned(numbers), task)
    return work._replace(tensors=lambda results: turned(work.tensors(results)))


def in_mlx(forward: Callable[..., mx.array], numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for a function of MLX arrays that returns h. numbers: its arguments by
    name, in the order of its parameters, and dh, the cotangent of h. In the pass "backward" `mx.vjp` computes the
    gradients of all arguments."""
    arrays = {n: mx.array(np.ascontiguousarray(array)).astype(DTYPES[task.dtype]) for n, array in numbers.items()}
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

    return Work(
        run, lambda found: h_and_gradients([*arrays], [np.array(a.astype(mx.float32)) for a in found]), build=build
    )


def h_and_gradients(inputs: list[str], results: list[Array]) -> Tensors:
    """Return the results of a pass by name: h and, if there are more, the gradients of `inputs`."""
    return dict(zip(["h", *(f"d{name}" for name in inputs)], results, strict=len(results) > 1))


def prepare_torch(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `torch.nn.LSTM` on the CPU. bias_ih is b; bias_hh is 0, without a
    gradient."""
    import torch

    layer: Any = torch.nn.LSTM(task.size.I, task.size.H)
    torch.nn.init.zeros_(layer.bias_hh_l0).requires_grad_(False)
    return in_torch(layer, {"Wx": "weight_ih_l0", "Wh": "weight_hh_l0", "b": "bias_ih_l0"}, numbers, task)


def in_torch(layer: Any, parameters: dict[str, str], numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for a layer of torch on the CPU. parameters: torch's name for each
    weight. The pass "forward" runs under `no_grad`. In the pass "backward" `torch.autograd.grad`, unlike `backward`,
    spends no time on adding the gradients to `.grad`."""
    import torch

    dtype = getattr(torch, task.dtype)
    layer.to(dtype)
    weights = [getattr(layer, parameter) for parameter in parameters.values()]
    with torch.no_grad():
        for name, weight in zip(parameters, weights, strict=True):
            weight.copy_(torch.from_numpy(numbers[name]))
    x, dh = (torch.from_numpy(numbers[name]).to(dtype) for name in ("x", "dh"))
    x.requires_grad_(True)

    def run() -> list[Any]:
        if task.which == "forward":
            with torch.no_grad():
                return [layer(x)[0]]
        h = layer(x)[0]
        return [h, *torch.autograd.grad(h, [x, *weights], dh)]

    def tensors(results: list[Any]) -> Tensors:
        return h_and_gradients(["x", *parameters], [a.detach().float().numpy() for a in results])

    return Work(run, tensors, torch.get_num_threads())


CONTENDERS = {
    "ours": Contender("mlx_lstm.lstm", "mlx", prepare_ours),
    "mlx": Contender("mlx.nn.LSTM", "mlx", prepare_mlx),
    "torch": Contender("torch.nn.LSTM", "torch", prepare_torch),
}
