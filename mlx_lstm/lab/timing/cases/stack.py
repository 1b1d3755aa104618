"""The benchmark cases `cudnn_lstm` and `cudnn_gru`: `mlx_lstm.cudnn` against torch on the CPU, with two bidirectional
layers, LSTM or GRU, that have two biases each.

As in torch, the end of an array's name is its layer and direction: "_l0", "_l0_reverse", "_l1", "_l1_reverse". `fl` is
the arithmetic of the float64 oracle, a `Rounding`: fl(value) rounds the result of one operation to a dtype.
"""

from functools import partial

import mlx.core as mx
import numpy as np

from ....engines.cells import Cell, GRUCell, LSTMCell
from ....oracle.arithmetic import Rounding, Tensors
from ....oracle.recurrence import evaluate as evaluate_case
from ...cases import DTYPES
from ..tasks import Contender, Size, Task, Work
from .lstm import drawn, in_mlx, in_torch

SIZES = (Size(128, 32, 128, 128), Size(64, 16, 256, 256))
CELLS: dict[str, Cell] = {"lstm": LSTMCell(), "gru": GRUCell()}
SUFFIXES = (("_l0", "_l0_reverse"), ("_l1", "_l1_reverse"))
"""The ends of the arrays' names, by layer and direction."""
ALL = tuple(suffix for suffixes in SUFFIXES for suffix in suffixes)
NAMES = {"Wx": "weight_ih", "Wh": "weight_hh", "b": "bias_ih", "bh": "bias_hh"}
"""torch's name for each weight of a direction."""

PASSES = {"forward": ("h",), "backward": ("h", "dx", *(f"d{name}{suffix}" for suffix in ALL for name in NAMES))}

PACKED = [name + suffix for pair in (("Wx", "Wh"), ("b", "bh")) for suffix in ALL for name in pair]
"""The order of the weights in cuDNN's parameter buffer: all matrices by layer and direction, then all biases."""


def draw(cell: str, size: Size, dtype: str) -> Tensors:
    """Return random arrays by name: x [T, B, I], the cotangent dh [T, B, 2H], and for every layer and direction Wx, Wh,
    b, bh in torch's gate order."""
    rows, H, shapes = CELLS[cell].gates * size.H, size.H, {}
    for layer, suffixes in enumerate(SUFFIXES):
        for suffix in suffixes:
            matrices = {f"Wx{suffix}": (rows, 2 * H if layer else size.I), f"Wh{suffix}": (rows, H)}
            shapes |= matrices | {f"b{suffix}": (rows,), f"bh{suffix}": (rows,)}
    return drawn(size, dtype, shapes, directions=2)


# --- In float64 ---


def evaluate(cell: str, numbers: Tensors, fl: Rounding, *, backward: bool) -> Tensors:
    """Return the results of both layers by name: h [T, B, 2H] of the upper layer and, with `backward`, dx and for each
    layer and direction dWx, dWh, db, dbh."""
    lower, upper = (layer(cell, numbers, suffixes, fl) for suffixes in SUFFIXES)
    # `evaluate_case` returns (outputs, gradients) of a layer. The upper layer's x is the lower layer's h, so the
    # gradient of this x is the cotangent for the lower layer.
    upper["x"] = evaluate_case(lower | {"x": numbers["x"]}, None, fl)[0]["h"]
    outputs, above = evaluate_case(upper, {"h": numbers["dh"]} if backward else None, fl)
    results = {"h": outputs["h"]}
    if backward:
        _, below = evaluate_case(lower | {"x": numbers["x"]}, {"h": above["x"]}, fl)
        results["dx"] = below["x"]
        for gradients, suffixes in zip((below, above), SUFFIXES, strict=True):
            results |= gradients_by_direction(gradients, suffixes)
    return results


def layer(cell: str, numbers: Tensors, suffixes: tuple[str, str], fl: Rounding) -> Tensors:
    """Return one layer's arguments for the float64 oracle, without x. The two biases [2 directions, G H] are added, and
    the sum is rounded like the result of any operation. Only the recurrent bias of a GRU's candidate stays separate."""
    both = {name: [numbers[name + suffix] for suffix in suffixes] for name in NAMES}
    b, bh = (np.stack(both[name]).astype(np.float64) for name in ("b", "bh"))
    case = {"op": cell, "bidirectional": True, "Wx": np.concatenate(both["Wx"]), "Wh": np.stack(both["Wh"])}
    if cell == "gru":
        candidate = 2 * bh.shape[1] // 3  # where the candidate, the last of three gates, begins
        case["bhn"] = bh[:, candidate:].ravel()
        bh = np.concatenate([bh[:, :candidate], 0 * bh[:, candidate:]], axis=1)
    return case | {"b": fl(b + bh).ravel()}


def gradients_by_direction(gradients: Tensors, suffixes: tuple[str, str]) -> Tensors:
    """Split the oracle's gradients of a layer by direction. Return dWx, dWh, db, dbh of each direction, by name."""
    named = {}
    for d, suffix in enumerate(suffixes):
        dWx, db = (np.split(gradients[name], 2)[d] for name in ("Wx", "b"))
        dbh = db  # the gradients of two biases that are added are equal, except for the candidate of a GRU
        if "bhn" in gradients:
            dbhn = np.split(gradients["bhn"], 2)[d]
            dbh = np.concatenate([db[: -len(dbhn)], dbhn])
        values = {"dWx": dWx, "dWh": gradients["Wh"][d], "db": db, "dbh": dbh}
        named |= {name + suffix: value for name, value in values.items()}
    return named


# --- Contenders ---


def to_buffer(arrays: Tensors) -> np.ndarray:
    """Join arrays into cuDNN's parameter buffer, in the order `PACKED`."""
    return np.concatenate([arrays[name].ravel() for name in PACKED])


def from_buffer(buffer: np.ndarray, like: Tensors) -> Tensors:
    """Split cuDNN's parameter buffer into arrays with the names and shapes of `like`."""
    parts = np.split(buffer, np.cumsum([like[name].size for name in PACKED])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(PACKED, parts, strict=True)}


def prepare_ours(cell: str, numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `mlx_lstm.cudnn.cudnn_rnn` with these arrays."""
    from mlx_lstm.cudnn import cudnn_rnn

    training = task.which == "backward"
    options = {"rnn_mode": cell, "direction": "bidirectional", "engine": task.engine, "is_training": training}
    state = mx.zeros((2 * 2, task.size.B, task.size.H), DTYPES[task.dtype])
    mx.eval(state)  # the first h and c of 2 layers in 2 directions

    def output(x: mx.array, params: mx.array) -> mx.array:
        return cudnn_rnn(x, state, state, params, **options).output

    work = in_mlx(output, {"x": numbers["x"], "params": to_buffer(numbers), "dh": numbers["dh"]}, task)

    def tensors(results: list[mx.array]) -> Tensors:
        found = work.tensors(results)
        dparams = {f"d{n}": a for n, a in from_buffer(found.pop("dparams"), numbers).items()} if training else {}
        return found | dparams

    return work._replace(tensors=tensors)


def prepare_torch(cell: str, numbers: Tensors, task: Task) -> Work:
    """Return the `Work` (the function to time) for `torch.nn.LSTM` or `torch.nn.GRU` on the CPU."""
    import torch

    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell]
    layer = layer(task.size.I, task.size.H, num_layers=2, bidirectional=True)
    parameters = {name + suffix: torch_name + suffix for suffix in ALL for name, torch_name in NAMES.items()}
    return in_torch(layer, parameters, numbers, task)


def contenders(cell: str) -> dict[str, Contender]:
    """Return the contenders for a stack of this cell, by name."""
    return {
        "ours": Contender(f"mlx_lstm.cudnn {cell}", "mlx_lstm.cudnn", partial(prepare_ours, cell)),
        "torch": Contender(f"torch.nn.{cell.upper()}", "torch", partial(prepare_torch, cell)),
    }
