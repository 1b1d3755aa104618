"""Random cases of TensorFlow's block ops: arguments by the raw op's names, what TensorFlow makes of them, and what we do.

A case is a dict of NumPy arrays and attributes. What lies at t >= seq_len_max in x, in what the forward op kept and in
the gradients given is NaN: nothing there may be read.
"""

import os

import mlx.core as mx
import numpy as np
from cases import to_mlx, to_numpy

from mlx_lstm import tf

SEQUENCE_OPS = ("block_lstm", "block_lstm_v2")
LSTM_OPS = ("lstm_block_cell", *SEQUENCE_OPS)
GRADIENT = {
    "lstm_block_cell": "lstm_block_cell_grad",
    "block_lstm": "block_lstm_grad",
    "block_lstm_v2": "block_lstm_grad_v2",
    "gru_block_cell": "gru_block_cell_grad",
}
OPS = tuple(GRADIENT)
RAW = {
    "lstm_block_cell": "LSTMBlockCell",
    "lstm_block_cell_grad": "LSTMBlockCellGrad",
    "block_lstm": "BlockLSTM",
    "block_lstm_grad": "BlockLSTMGrad",
    "block_lstm_v2": "BlockLSTMV2",
    "block_lstm_grad_v2": "BlockLSTMGradV2",
    "gru_block_cell": "GRUBlockCell",
    "gru_block_cell_grad": "GRUBlockCellGrad",
}
ATTRIBUTES = ("seq_len_max", "forget_bias", "cell_clip", "use_peephole")


def draw(op, seed, dtype=np.float32, sizes=None, **fixed):
    """A case of the forward op; options not `fixed` are drawn."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    T, N, I, H = sizes or (pick(1, 2, 6), pick(1, 2, 3, 8), pick(1, 3, 5, 16), pick(1, 2, 5, 17))
    if op == "gru_block_cell":
        shapes = {
            "x": (N, I),
            "h_prev": (N, H),
            "w_ru": (I + H, 2 * H),
            "w_c": (I + H, H),
            "b_ru": (2 * H,),
            "b_c": (H,),
        }
        options = {}
    else:
        shapes = {"x": (N, I) if op == "lstm_block_cell" else (T, N, I), "cs_prev": (N, H), "h_prev": (N, H)}
        shapes |= {"w": (I + H, 4 * H), "wci": (H,), "wcf": (H,), "wco": (H,), "b": (4 * H,)}
        options = {"cell_clip": pick(-1.0, 0.0, 0.1, 0.5, 3.0), "use_peephole": pick(False, True)}
    if op in SEQUENCE_OPS:
        options["seq_len_max"] = int(rng.integers(0, T + 1))
    if op in ("lstm_block_cell", "block_lstm"):
        options["forget_bias"] = pick(0.0, 1.0, -0.5)
    case = {name: rng.normal(0, 0.5, shape).astype(dtype) for name, shape in shapes.items()} | options | fixed
    if op in SEQUENCE_OPS:
        case["x"][case["seq_len_max"] :] = np.nan
    return case


def draw_gradients(op, case, seed, outputs=None):
    """Gradients of outputs, by name, not zero: those that the gradient op takes, or those named."""
    rng = np.random.default_rng(1000 + seed)
    like = case["h_prev"] if op not in SEQUENCE_OPS else np.zeros((len(case["x"]), *case["h_prev"].shape))
    given = {name: rng.normal(size=like.shape).astype(case["x"].dtype) for name in outputs or gradients_of(op)}
    for gradient in given.values() if op in SEQUENCE_OPS else ():
        gradient[case["seq_len_max"] :] = np.nan
    return given


def gradients_of(op):
    return ("d_h",) if op == "gru_block_cell" else ("cs_grad", "h_grad")


def gradient_case(op, case, outputs, given):
    """The case of the gradient op: no attributes but use_peephole; the outputs it wants, NaN where none ran."""
    wanted = {"gru_block_cell": "r u c", "lstm_block_cell": "i cs f o ci co"}.get(op, "i cs f o ci co h").split()
    kept = {name: np.array(outputs[name]) for name in wanted}
    if op in SEQUENCE_OPS:
        for array in kept.values():
            array[case["seq_len_max"] :] = np.nan
    found = {name: value for name, value in case.items() if name not in ("forget_bias", "cell_clip")}
    return found | kept | given


def theirs(op, case):
    """TensorFlow's outputs by name, NumPy arrays. Its ops may reuse the memory of their arguments: it gets copies."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow

    held = {name: value if name in ATTRIBUTES else tensorflow.constant(value) for name, value in case.items()}
    return {name: value.numpy() for name, value in getattr(tensorflow.raw_ops, RAW[op])(**held)._asdict().items()}


def ours(op, case, engine, stream=mx.cpu):
    """Our outputs by name, NumPy arrays."""
    with mx.stream(stream or mx.default_device()):
        arrays = {name: as_mlx(name, value) for name, value in case.items()}
        return {name: to_numpy(value) for name, value in getattr(tf, op)(**arrays, engine=engine)._asdict().items()}


def as_mlx(name, value):
    return value if name in ATTRIBUTES else to_mlx(value, value.dtype.type)


def ours_by_autodiff(op, case, given, engine):
    """The gradients of all arrays of the case by `mx.vjp`, from those of the outputs named."""
    with mx.stream(mx.cpu):
        arrays = {name: as_mlx(name, value) for name, value in case.items() if name not in ATTRIBUTES}
        options = {name: value for name, value in case.items() if name in ATTRIBUTES}

        def outputs_of(*values):
            out = getattr(tf, op)(**dict(zip(arrays, values, strict=True)), **options, engine=engine)._asdict()
            return [out[name] for name in given]

        cotangents = [as_mlx(name, value) for name, value in given.items()]
        _, gradients = mx.vjp(outputs_of, list(arrays.values()), cotangents)
        return dict(zip(arrays, map(to_numpy, gradients), strict=True))
