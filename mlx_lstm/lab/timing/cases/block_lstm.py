"""The benchmark case `block_lstm`: `mlx_lstm.tf` against TensorFlow's raw ops on the CPU, computing all outputs of
both ops.

The LSTM, its arrays and the comparison with float64 are the same as in the case `lstm`, except that TensorFlow's ops
add 1 to the forget gate's preactivation. There is no clip and no peephole.
"""

import os
from typing import Any

import mlx.core as mx
import numpy as np

from ....oracle.arithmetic import Tensors
from ....oracle.verdict import Judge
from ...cases import DTYPES
from ..judge import judge_layer
from ..tasks import Contender, Size, Task, Work

SIZES = tuple(Size(T, 32, H, H) for T in (64, 256) for H in (128, 256, 512))
FORGET_BIAS = 1.0
ICFO = "igfo"  # TensorFlow calls this gate order icfo (its c is our g)


def judge_block_lstm(numbers: Tensors, dtype: str, *, backward: bool) -> Judge:
    """Return a `Judge`, which compares results with float64. The results are those of the LSTM with the forget bias
    added to b."""
    b = numbers["b"].copy()
    H = len(b) // 4
    b[H : 2 * H] += FORGET_BIAS
    return judge_layer(numbers | {"b": b}, dtype, backward=backward)


def in_order(blocks: np.ndarray, order: str, new_order: str) -> np.ndarray:
    """Return an array whose four gate blocks along axis 0 are moved to another gate order."""
    parts = dict(zip(order, np.split(blocks, 4), strict=True))
    return np.concatenate([parts[gate] for gate in new_order])


def op_arrays(numbers: Tensors) -> Tensors:
    """Return the arguments of the TensorFlow ops: x [T, B, I], w [I + H, 4H], b [4H], zeros as states and peepholes,
    the cotangents."""
    T, B, H = numbers["dh"].shape
    weights = np.concatenate([numbers["Wx"], numbers["Wh"]], axis=1)
    zeros = {name: np.zeros((B, H), np.float32) for name in ("cs_prev", "h_prev")}
    zeros |= {name: np.zeros(H, np.float32) for name in ("wci", "wcf", "wco")}
    w = np.ascontiguousarray(in_order(weights, "ifgo", ICFO).T)
    arrays = {"x": numbers["x"], "w": w, "b": in_order(numbers["b"], "ifgo", ICFO)}
    return arrays | zeros | {"cs_grad": np.zeros((T, B, H), np.float32), "h_grad": numbers["dh"]}


def named_results(h: np.ndarray, gradients: Tensors, width: int) -> Tensors:
    """Return h, dx, dWx, dWh, db by name, in the layouts of the case `lstm`."""
    if not gradients:
        return {"h": h}
    dw = in_order(gradients["w_grad"].T, ICFO, "ifgo")
    db = in_order(gradients["b_grad"], ICFO, "ifgo")
    return {"h": h, "dx": gradients["x_grad"], "dWx": dw[:, :width], "dWh": dw[:, width:], "db": db}


NAMES = ("x", "cs_prev", "h_prev", "w", "wci", "wcf", "wco", "b")
NEEDED = ("x_grad", "w_grad", "b_grad")


def prepare_ours(numbers: Tensors, task: Task) -> Work:
    """Return `mlx_lstm.tf.block_lstm` and `block_lstm_grad`, prepared with the given arrays and ready to run."""
    from mlx_lstm import tf

    arrays = {name: mx.array(array).astype(DTYPES[task.dtype]) for name, array in op_arrays(numbers).items()}
    mx.eval(arrays)
    arguments: dict[str, Any] = {name: arrays[name] for name in NAMES} | {"seq_len_max": task.size.T}
    arguments |= {"use_peephole": False, "engine": task.engine}

    def run() -> tuple[Any, Any]:
        out = tf.block_lstm(**arguments, forget_bias=FORGET_BIAS, cell_clip=0.0)
        gradients = None
        if task.which == "backward":
            cs_grad, h_grad = arrays["cs_grad"], arrays["h_grad"]
            gradients = tf.block_lstm_grad(**arguments, **out._asdict(), cs_grad=cs_grad, h_grad=h_grad)
        mx.eval(out, gradients or ())
        return out, gradients

    def tensors(results: tuple[Any, Any]) -> Tensors:
        out, gradients = results
        needed = {name: getattr(gradients, name) for name in NEEDED if gradients}
        needed = {name: np.array(array.astype(mx.float32)) for name, array in needed.items()}
        return named_results(np.array(out.h.astype(mx.float32)), needed, task.size.I)

    return Work(run, tensors)


def prepare_tensorflow(numbers: Tensors, task: Task) -> Work:
    """Return `tf.raw_ops.BlockLSTM` and `BlockLSTMGrad` on the CPU, prepared with the given arrays and ready to run
    one after the other."""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    dtype = getattr(tf, task.dtype)
    arrays = {name: tf.cast(tf.constant(array), dtype) for name, array in op_arrays(numbers).items()}
    arguments = {name: arrays[name] for name in NAMES} | {"use_peephole": False}
    arguments["seq_len_max"] = tf.constant(task.size.T, tf.int64)

    def run() -> tuple[Any, Any]:
        out = tf.raw_ops.BlockLSTM(**arguments, forget_bias=FORGET_BIAS, cell_clip=0.0)
        if task.which == "forward":
            return out, None
        cotangents = {name: arrays[name] for name in ("cs_grad", "h_grad")}
        return out, tf.raw_ops.BlockLSTMGrad(**arguments, **out._asdict(), **cotangents)

    def tensors(results: tuple[Any, Any]) -> Tensors:
        out, gradients = results
        needed = {name: getattr(gradients, name) for name in NEEDED if gradients}
        needed = {name: tf.cast(array, tf.float32).numpy() for name, array in needed.items()}
        return named_results(tf.cast(out.h, tf.float32).numpy(), needed, task.size.I)

    return Work(run, tensors, tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count())


CONTENDERS = {
    "ours": Contender("mlx_lstm.tf.block_lstm", "mlx_lstm.tf", prepare_ours),
    "tensorflow": Contender("tf.raw_ops.BlockLSTM", "tensorflow", prepare_tensorflow),
}
