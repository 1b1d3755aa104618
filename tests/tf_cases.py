"""Random cases for TensorFlow's block ops, and functions that run them with TensorFlow, `mlx_lstm` and the oracle.

A case is a dict of NumPy arrays and attributes under the argument names of TensorFlow's op. For sequence ops, x, the
saved outputs and the cotangents are NaN at steps t >= seq_len_max, so that an op that reads these steps fails the
test.
"""

import os

import mlx.core as mx
import numpy as np
from cases import device_of, to_mlx, to_numpy

from mlx_lstm import tf
from mlx_lstm.engines import METAL_ENGINES, choose
from mlx_lstm.engines.cells import GRUCell, LSTMCell

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
    """Return a random case of the forward op. Arguments given in `fixed` are not random."""
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
    """Return random cotangents by name: for the outputs named in `outputs`, or by default for the cotangents that
    the gradient op takes."""
    rng = np.random.default_rng(1000 + seed)
    like = case["h_prev"] if op not in SEQUENCE_OPS else np.zeros((len(case["x"]), *case["h_prev"].shape))
    given = {name: rng.normal(size=like.shape).astype(case["x"].dtype) for name in outputs or gradients_of(op)}
    for gradient in given.values() if op in SEQUENCE_OPS else ():
        gradient[case["seq_len_max"] :] = np.nan
    return given


def gradients_of(op):
    return ("d_h",) if op == "gru_block_cell" else ("cs_grad", "h_grad")


def gradient_case(op, case, outputs, given):
    """Return the arguments of the gradient op: the arrays of the forward op, those outputs of the forward op that
    the gradient op reads (NaN at steps t >= seq_len_max), and the cotangents."""
    wanted = {"gru_block_cell": "r u c", "lstm_block_cell": "i cs f o ci co"}.get(op, "i cs f o ci co h").split()
    kept = {name: np.array(outputs[name]) for name in wanted}
    if op in SEQUENCE_OPS:
        for array in kept.values():
            array[case["seq_len_max"] :] = np.nan
    found = {name: value for name, value in case.items() if name not in ("forget_bias", "cell_clip")}
    return found | kept | given


def theirs(op, case):
    """Run TensorFlow's op and return its outputs by name as NumPy arrays. The op gets copies of the arrays, because
    it may overwrite its arguments."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow

    held = {name: value if name in ATTRIBUTES else tensorflow.constant(value) for name, value in case.items()}
    return {name: value.numpy() for name, value in getattr(tensorflow.raw_ops, RAW[op])(**held)._asdict().items()}


def ours(op, case, engine, stream=None):
    """Run the op of `mlx_lstm.tf` and return its outputs by name as NumPy arrays."""
    with mx.stream(stream or device_of(engine)):
        arrays = {name: as_mlx(name, value) for name, value in case.items()}
        return {name: to_numpy(value) for name, value in getattr(tf, op)(**arrays, engine=engine)._asdict().items()}


def as_mlx(name, value):
    """Convert an argument of a TensorFlow op for our op: a floating-point NumPy array becomes an MLX array. All other
    values, such as the attribute forget_bias, stay as they are."""
    if name in ATTRIBUTES or not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return value
    return to_mlx(value, value.dtype.type)


def ours_by_autodiff(op, case, given, engine, **more):
    """Return the gradients of all arrays of the case, computed by `mx.vjp` of our op from the cotangents `given`.
    `more` are further options of our op."""
    with mx.stream(device_of(engine)):
        arrays = {name: as_mlx(name, value) for name, value in case.items() if name not in ATTRIBUTES}
        options = {name: value for name, value in case.items() if name in ATTRIBUTES} | more

        def outputs_of(*values):
            out = getattr(tf, op)(**dict(zip(arrays, values, strict=True)), **options, engine=engine)._asdict()
            return [out[name] for name in given]

        cotangents = [as_mlx(name, value) for name, value in given.items()]
        _, gradients = mx.vjp(outputs_of, list(arrays.values()), cotangents)
        return dict(zip(arrays, map(to_numpy, gradients), strict=True))


def engines_that_run(op, engines):
    """Return the names in `engines` that support the cell of this op. Metal engines are included if they would
    support it on a Mac."""
    cell = GRUCell(reset="before") if op == "gru_block_cell" else LSTMCell()
    found = []
    for engine in engines:
        device = "gpu" if engine in METAL_ENGINES else "cpu"
        here = {"device": device, "metal": True, "traced": False, "cell": cell, "requested": engine}
        try:
            found.append(choose(sizes=(1, 1, 1, 1), dtype=mx.float32, **here).engine)
        except ValueError:
            continue
    return found


def oracle_case(op, case):
    """Convert a TensorFlow case to the arguments of `mlx_lstm.oracle`."""
    x, I = case["x"], case["x"].shape[-1]
    if op == "gru_block_cell":
        w, b = np.concatenate([case["w_ru"], case["w_c"]], axis=1), np.concatenate([case["b_ru"], case["b_c"]])
        parts = {"x": x[None], "Wx": w[:I].T, "Wh": w[I:].T, "b": b, "h0": case["h_prev"]}
        return parts | {"op": "gru", "reset": "before"}
    w, order = case["w"], order_of(op)
    found = {"Wx": w[:I].T, "Wh": w[I:].T, "b": case["b"], "h0": case["h_prev"], "c0": case["cs_prev"]}
    found |= {"x": x if x.ndim == 3 else x[None], "gate_order": order, "forget_bias": case.get("forget_bias", 0.0)}
    if case["cell_clip"] > 0:
        found["cell_clip"] = case["cell_clip"]
    if op in SEQUENCE_OPS:
        found["lengths"] = [case["seq_len_max"]] * x.shape[1]
    if case["use_peephole"]:
        peepholes = {"i": case["wci"], "f": case["wcf"], "o": case["wco"], "g": np.zeros_like(case["wci"])}
        found["peephole"] = np.concatenate([peepholes[gate] for gate in order])
    return found


def order_of(op):
    return "ifgo" if op == "block_lstm_v2" else "igfo"


def cotangents_for_oracle(op, outputs, given):
    """Convert cotangents of TensorFlow's outputs (`given`) to cotangents of the oracle's outputs. `outputs` are the
    outputs computed by the oracle."""
    given = {name: np.asarray(value, np.float64) for name, value in given.items()}
    if op == "gru_block_cell":
        gates = np.concatenate([given.get(name, 0 * given["h"]) for name in "ruc"], axis=-1)
        return {"h": given["h"][None], "gates": gates[None]}
    rows = {name: value if op in SEQUENCE_OPS else value[None] for name, value in given.items()}
    nothing = np.zeros_like(outputs["c"])
    blocks = {gate: rows.get({"g": "ci"}.get(gate, gate), nothing) for gate in order_of(op)}
    dc = rows.get("cs", nothing) + rows.get("co", nothing) * (1 - np.tanh(outputs["c"]) ** 2)
    return {"h": rows.get("h", nothing), "c": dc, "gates": np.concatenate(list(blocks.values()), axis=-1)}


def gradients_from_oracle(op, gradients):
    """Convert the oracle's gradients to gradients of the op's arrays. Gradients of peepholes are present only if the
    case has peepholes."""
    w = np.concatenate([gradients["Wx"], gradients["Wh"]], axis=1).T
    found = {"x": gradients["x"] if op in SEQUENCE_OPS else gradients["x"][0], "h_prev": gradients["h0"]}
    if op == "gru_block_cell":
        H = gradients["h0"].shape[1]
        b = gradients["b"]
        return found | {"w_ru": w[:, : 2 * H], "w_c": w[:, 2 * H :], "b_ru": b[: 2 * H], "b_c": b[2 * H :]}
    found |= {"cs_prev": gradients["c0"], "w": w, "b": gradients["b"]}
    if "peephole" in gradients:
        blocks = dict(zip(order_of(op), np.split(gradients["peephole"], 4), strict=True))
        found |= {f"wc{gate}": blocks[gate] for gate in "ifo"}
    return found
