"""The benchmark case `streaming`: inference of T steps in T calls. Each call continues from the states of the call
before.

The results of each call are evaluated before the next call. In the pass `paced` each frame (the input of one step)
arrives `PAUSE` seconds after the results of the frame before, as from a microphone. The measured time does not include
the pauses. T single steps must give the result of the whole sequence, so the LSTM, its arrays and the comparison with
float64 are the same as in the case `lstm`.
"""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ....oracle.arithmetic import Array, Tensors
from ...cases import DTYPES
from ..tasks import Contender, Size, Task, Work

SIZES = tuple(Size(100, 1, H, H) for H in (64, 128, 256, 640))
PASSES = {"forward": ("h",), "paced": ("h",)}

PAUSE = 0.003
"""The pause before each frame in the pass `paced`, in seconds. In such a pause the threads of the libraries fall
asleep, and the caches of the CPU lose data."""


def streamed(
    frames: list[Any],
    call: Callable[..., tuple[Any, Any]],
    state: Any,
    as_numpy: Callable[[Any], Array],
    task: Task,
    wait: Callable[..., object] = lambda *results: None,
) -> Work:
    """Return a task that runs one time step per call. frames: the inputs of the steps. call: a function (frame, state)
    -> (h, next state) that runs one step. state: the first state of each run. as_numpy: converts h to NumPy. wait: a
    function that waits until the results of a call are computed. In the pass "paced" a run sleeps before each frame."""
    pause, slept = PAUSE if task.which == "paced" else 0.0, [0.0]

    def run() -> list[Any]:
        outputs, now, slept[0] = [], state, 0.0
        for frame in frames:
            if pause:
                start = time.perf_counter()
                time.sleep(pause)
                slept[0] += time.perf_counter() - start
            h, now = call(frame, now)
            wait(h, now)
            outputs.append(h)
        return outputs

    def tensors(outputs: list[Any]) -> Tensors:
        return {"h": np.stack([as_numpy(h) for h in outputs]).reshape(len(outputs), task.size.B, -1)}

    return Work(run, tensors, slept=lambda: slept[0])


def in_mlx(layer: Any, weights: Tensors, call: Any, state: Any, numbers: Tensors, task: Task, axis: int | None) -> Work:
    """Return the `Work` (the function to time) for an MLX layer with these weights, which runs one time step per call.
    call: a function (frame, states) -> (h, new states) that runs one step. state: the shape of h and of c. axis: the
    position of the time axis of size 1 that `call` needs in a frame (the input of one step), or None."""
    layer.update({name: mx.array(array) for name, array in weights.items()})
    layer.set_dtype(DTYPES[task.dtype])
    layer.eval()
    steps = numbers["x"] if axis is None else [np.expand_dims(x, axis) for x in numbers["x"]]
    frames = [mx.array(x).astype(DTYPES[task.dtype]) for x in steps]
    zeros = tuple(mx.zeros(state, DTYPES[task.dtype]) for _ in range(2))
    mx.eval(layer.parameters(), frames, zeros)
    # astype: NumPy has no bfloat16.
    return streamed(frames, call, zeros, lambda h: np.array(h.astype(mx.float32)), task, wait=mx.eval)


def prepare_ours(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `mlx_lstm.nn.LSTM`. Its method `step` computes one time step per
    call."""
    from mlx_lstm.nn import LSTM

    layer = LSTM(task.size.I, task.size.H, engine=task.engine)

    def call(frame: mx.array, state: tuple[mx.array, mx.array]) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        hidden, cell = layer.step(frame, *state)
        return hidden, (hidden, cell)

    return in_mlx(layer, mlx_weights(numbers), call, (task.size.B, task.size.H), numbers, task, axis=None)


def prepare_stepper(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for a stepper of `mlx_lstm.nn.LSTM`. A stepper holds its states, so it
    is reset before each run. It is made once, at the first run, so that the time of making it is not measured."""
    from mlx_lstm.nn import LSTM, Stepper

    layer = LSTM(task.size.I, task.size.H)
    made: list[Stepper] = []

    def call(frame: mx.array, state: tuple[mx.array, ...]) -> tuple[mx.array, tuple[mx.array, ...]]:
        if state:  # only the first call of a run gets a state: then reset the stepper
            made[:] = made or [layer.stepper(task.size.B)]
            made[0].reset()
        return made[0](frame), ()

    return in_mlx(layer, mlx_weights(numbers), call, (task.size.B, task.size.H), numbers, task, axis=None)


def prepare_mlx(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `mlx.nn.LSTM`. This layer returns the states of all its time steps;
    the states of the last step are passed to the next call."""
    from mlx.nn import LSTM

    layer = LSTM(task.size.I, task.size.H)

    def call(frame: mx.array, state: tuple[mx.array, mx.array]) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        hidden, cell = layer(frame, *state)
        return hidden, (hidden[:, -1], cell[:, -1])

    return in_mlx(layer, mlx_weights(numbers), call, (task.size.B, task.size.H), numbers, task, axis=1)


def mlx_weights(numbers: Tensors) -> Tensors:
    """Return the weights by the names of the parameters of `mlx.nn.LSTM`."""
    return {"Wx": numbers["Wx"], "Wh": numbers["Wh"], "bias": numbers["b"]}


def torch_weights(numbers: Tensors) -> Tensors:
    """Return the weights by the names of torch's parameters. torch's second bias, bias_hh, is 0."""
    b = numbers["b"]
    return {"weight_ih_l0": numbers["Wx"], "weight_hh_l0": numbers["Wh"], "bias_ih_l0": b, "bias_hh_l0": 0 * b}


def prepare_ours_torch(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `mlx_lstm.torch.LSTM` on the engine that the layer chooses."""
    from mlx_lstm.torch import LSTM

    layer = LSTM(task.size.I, task.size.H)
    state = (1, task.size.B, task.size.H)  # layers and directions, batch, units
    return in_mlx(layer, torch_weights(numbers), layer, state, numbers, task, axis=0)


def prepare_torch(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `torch.nn.LSTM` on the CPU, under `inference_mode`, ready to run one
    time step per call."""
    import torch

    dtype = getattr(torch, task.dtype)
    layer = torch.nn.LSTM(task.size.I, task.size.H)
    layer.load_state_dict({name: torch.from_numpy(array) for name, array in torch_weights(numbers).items()})
    layer = layer.to(dtype).eval()
    frames = [torch.from_numpy(x[None]).to(dtype) for x in numbers["x"]]
    zeros = tuple(torch.zeros(1, task.size.B, task.size.H, dtype=dtype) for _ in range(2))
    work = streamed(frames, layer, zeros, lambda h: h.float().numpy(), task)
    return work._replace(run=torch.inference_mode()(work.run), threads=torch.get_num_threads())


CONTENDERS = {
    "ours": Contender("mlx_lstm.nn.LSTM", "mlx", prepare_ours),
    "stepper": Contender("mlx_lstm.nn.LSTM.stepper", "mlx", prepare_stepper),
    "ours_torch": Contender("mlx_lstm.torch.LSTM", "mlx", prepare_ours_torch),
    "mlx": Contender("mlx.nn.LSTM", "mlx", prepare_mlx),
    "torch": Contender("torch.nn.LSTM", "torch", prepare_torch),
}
