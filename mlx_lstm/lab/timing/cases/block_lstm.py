"""The benchmark case `block_lstm`: `mlx_lstm.tf` against TensorFlow's raw ops on the CPU. All outputs of the forward op
and of the gradient op are computed.

The LSTM, its arrays and the comparison with float64 are the same as in the case `lstm`, except that TensorFlow's ops
add 1 to the forget gate's preactivation. There is no clip and no peephole.
"""

import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ....oracle.arithmetic import Array, Tensors
from ....oracle.verdict import Judge
from ...cases import DTYPES
from ..judge import judge_layer
from ..tasks import Contender, Size, Task, Work

SIZES = tuple(Size(T, B=32, I=H, H=H) for T in (64, 256) for H in (128, 256, 512))
FORGET_BIAS = 1.0
ICFO = "igfo"  # TensorFlow calls this gate order icfo (its c is our g)
Op = Callable[..., Any]


def judge_block_lstm(numbers: Tensors, dtype: str, *, backward: bool) -> Judge:
    """Return a `Judge` whose exact results are those of an LSTM with the forget bias added to b."""
    b = numbers["b"].copy()
    H = len(b) // 4
    b[H : 2 * H] += FORGET_BIAS
    return judge_layer(numbers | {"b": b}, dtype, backward=backward)


def in_order(blocks: np.ndarray, order: str, new_order: str) -> np.ndarray:
    """Return an array whose four blocks along axis 0 are moved from one gate order to another."""
    parts = dict(zip(order, np.split(blocks, 4), strict=True))
    return np.concatenate([parts[gate] for gate in new_order])


def op_arrays(numbers: Tensors) -> Tensors:
    """Return the arrays that TensorFlow's ops take, by name: x [T, B, I], w [I + H, 4H], b [4H], zeros for states and
    peepholes, and the cotangents."""
    T, B, H = numbers["dh"].shape
    weights = np.concatenate([numbers["Wx"], numbers["Wh"]], axis=1)
    zeros = {name: np.zeros((B, H), np.float32) for name in ("cs_prev", "h_prev")}
    zeros |= {name: np.zeros(H, np.float32) for name in ("wci", "wcf", "wco")}
    w = np.ascontiguousarray(in_order(weights, "ifgo", ICFO).T)
    arrays = {"x": numbers["x"], "w": w, "b": in_order(numbers["b"], "ifgo", ICFO)}
    return arrays | zeros | {"cs_grad": np.zeros((T, B, H), np.float32), "h_grad": numbers["dh"]}


def prepare(ops: tuple[Op, Op], given: dict[str, Any], as_numpy: Callable[[Any], Array], task: Task) -> Work:
    """Return a task that runs a forward op and then its gradient op. given: the arrays of `op_arrays` in the framework
    of the ops, and other arguments of both. as_numpy: converts an array to NumPy."""
    cotangents = {name: given.pop(name) for name in ("cs_grad", "h_grad")}
    given |= {"use_peephole": False}

    def run() -> tuple[Any, Any]:
        out = ops[0](**given, forget_bias=FORGET_BIAS, cell_clip=0.0)
        return out, None if task.which == "forward" else ops[1](**given, **out._asdict(), **cotangents)

    def tensors(results: tuple[Any, Any]) -> Tensors:
        out, gradients = results
        if gradients is None:
            return {"h": as_numpy(out.h)}
        dx, dw, db = (as_numpy(getattr(gradients, name)) for name in ("x_grad", "w_grad", "b_grad"))
        dw, db = in_order(dw.T, ICFO, "ifgo"), in_order(db, ICFO, "ifgo")
        return {"h": as_numpy(out.h), "dx": dx, "dWx": dw[:, : task.size.I], "dWh": dw[:, task.size.I :], "db": db}

    return Work(run, tensors)


def prepare_ours(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `mlx_lstm.tf.block_lstm` and `block_lstm_grad` with these arrays."""
    from mlx_lstm import tf

    arrays = {name: mx.array(array).astype(DTYPES[task.dtype]) for name, array in op_arrays(numbers).items()}
    mx.eval(arrays)
    given = arrays | {"seq_len_max": task.size.T, "engine": task.engine}
    work = prepare((tf.block_lstm, tf.block_lstm_grad), given, lambda a: np.array(a.astype(mx.float32)), task)

    def run() -> tuple[Any, Any]:
        results = work.run()
        mx.eval([result for result in results if result])
        return results

    return work._replace(run=run)


def prepare_tensorflow(numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `tf.raw_ops.BlockLSTM` and `BlockLSTMGrad` on the CPU with these
    arrays."""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    arrays = {name: tf.cast(tf.constant(array), getattr(tf, task.dtype)) for name, array in op_arrays(numbers).items()}
    given = arrays | {"seq_len_max": tf.constant(task.size.T, tf.int64)}
    ops = tf.raw_ops.BlockLSTM, tf.raw_ops.BlockLSTMGrad
    work = prepare(ops, given, lambda a: tf.cast(a, tf.float32).numpy(), task)
    return work._replace(threads=tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count())


CONTENDERS = {
    "ours": Contender("mlx_lstm.tf.block_lstm", "mlx_lstm.tf", prepare_ours),
    "tensorflow": Contender("tf.raw_ops.BlockLSTM", "tensorflow", prepare_tensorflow),
}
