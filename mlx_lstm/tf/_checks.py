"""Checks of the arguments of `mlx_lstm.tf`: TensorFlow's rules with TensorFlow's error texts, and rules that TensorFlow
does not check.

The rank of an array is the number of its axes. Ranks are checked before sizes, because the size of a missing axis
cannot be read. If the arguments break several rules at once, TensorFlow's error may name another rule than the error of
this package. T: steps, N: batch items (batch_size), I: inputs (input_size), H: units (cell_size). arrays: a dict of the
arrays of a call by TensorFlow's names: x the input, w the weights of x and h, b the bias, wci, wcf, wco the peepholes,
cs_prev and h_prev the states before the first step. A GRU has w_ru, b_ru (reset and update gate) and w_c, b_c
(candidate) in place of w and b.
"""

from math import inf
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from ..engines.problem import Arrays
from ..engines.tracing import have_values
from ..ground.checks import as_float, check_array, check_flag, check_integer, check_number, fail

SAVED = ("i", "cs", "f", "o", "ci", "co")
"""TensorFlow's names of the outputs that its gradient ops read: the gates i, f, o, the candidate ci, the cell state cs,
and co = tanh(cs)."""

PEEPHOLES = ("wci", "wcf", "wco")
"""TensorFlow's names of the peephole weights of i, f and o."""


def check_lstm_block_cell(op: str, arrays: Arrays, use_peephole: bool) -> None:
    """Check the arguments of LSTMBlockCell, or of its gradient op, for which `arrays` also has the forward op's
    outputs, named in `SAVED`."""
    check_flag(op, "use_peephole", use_peephole)
    check_kinds(op, arrays)
    ranks = {"b": 1} | dict.fromkeys(PEEPHOLES, 1)
    check_ranks(op, arrays, ranks, otherwise=2, text="{name}_tensor must be rank {rank} but is rank {got}.")
    N, H = check_cell(op, arrays)
    if 0 in (N, H):
        reject(op, f"cs_prev_tensor is empty, has shape: ({N},{H}).")
    # The arrays that only the gradient op has, each [N, H]. TensorFlow's error texts for the two groups differ.
    check_matrices(op, arrays, SAVED, ".dim_size", N, H)
    check_matrices(op, arrays, ("cs_grad", "h_grad"), "_tensor.dims", N, H)
    if use_peephole:
        check_peepholes(op, arrays, H)


def check_block_lstm(op: str, seq_len_max: object, arrays: Arrays, use_peephole: bool) -> int:
    """Check the arguments of BlockLSTM and BlockLSTMV2; return seq_len_max, the number of steps to run, as an int."""
    check_flag(op, "use_peephole", use_peephole)
    steps = check_steps(op, seq_len_max)
    check_kinds(op, arrays)
    ranks = {"x": 3, "b": 1} | dict.fromkeys(PEEPHOLES, 1)
    check_ranks(op, arrays, ranks, otherwise=2, text="{name} must be {rank}D")
    _, H = check_cell(op, arrays)
    check_peepholes(op, arrays, H)  # also without use_peephole, as in TensorFlow
    return check_range(op, steps, arrays["x"].shape[0])


def check_block_lstm_grad(op: str, seq_len_max: object, arrays: Arrays, use_peephole: bool) -> int:
    """Check the arguments of BlockLSTMGrad and BlockLSTMGradV2; return seq_len_max as an int. arrays: the forward op's
    arguments and outputs, and the gradients cs_grad and h_grad, by TensorFlow's names."""
    check_flag(op, "use_peephole", use_peephole)
    steps = check_steps(op, seq_len_max)
    check_kinds(op, arrays)
    ranks = {"x": 3, "cs_prev": 2, "h_prev": 2, "w": 2, "b": 1} | dict.fromkeys(PEEPHOLES, 1)
    # sequences: the outputs and the gradients, [T, N, H]. TensorFlow's error text for them differs.
    sequences = {name: array for name, array in arrays.items() if name not in ranks}
    others = {name: arrays[name] for name in ranks}
    check_ranks(op, others, ranks, otherwise=3, text="{name} must be rank {rank} but is rank {got}")
    check_ranks(op, sequences, ranks={}, otherwise=3, text="{name} must be rank {rank}. Received: {got}")
    T, N, I = arrays["x"].shape
    rows, columns = arrays["w"].shape
    H = columns // 4
    if columns % 4 or not H:
        reject(op, f"w matrix columns must be a positive multiple of 4, but got {columns}")
    check_size(op, "w matrix rows don't match", I + H, rows)  # TensorFlow's text has the expected size first here
    if arrays["b"].size != 4 * H:
        reject(op, f"w and b cell_size don't match: {H} vs. {arrays['b'].size}")
    check_range(op, steps, T)
    for name in ("cs_prev", "h_prev"):
        check_array(op, name, arrays[name], [N, H])
    for name, array in sequences.items():
        check_array(op, name, array, [T, N, H])
    if use_peephole:
        check_peepholes(op, arrays, H)
    return steps


def check_gru_block_cell(op: str, arrays: Arrays) -> None:
    """Check the arguments of GRUBlockCell, or of its gradient op if `arrays` also has r, u, c and d_h: the forward op's
    outputs r, u, c and the gradient of h."""
    check_kinds(op, arrays)
    check_ranks(op, arrays, {"b_ru": 1, "b_c": 1}, otherwise=2, text="Rank of {name} must be {rank}, got {got}")
    N, I = arrays["x"].shape
    H = arrays["h_prev"].shape[1]
    check_size(op, "h_prev.dims(0) != batch_size", arrays["h_prev"].shape[0], N)
    for name, width, text in (("w_ru", 2 * H, "cell_size * 2"), ("w_c", H, "cell_size")):
        check_size(op, f"{name}.dim_size(0) != input_size + cell_size", arrays[name].shape[0], I + H)
        check_size(op, f"{name}.dim_size(1) != {text}", arrays[name].shape[1], width)
    check_size(op, "b_ru.dim_size(0) != cell_size * 2", arrays["b_ru"].size, 2 * H)
    check_size(op, "b_c.dim_size(0) != cell_size", arrays["b_c"].size, H)
    check_matrices(op, arrays, ("r", "u", "c", "d_h"), ".dims", N, H)


def reject(op: str, text: str) -> NoReturn:
    """Raise a ValueError with TensorFlow's text."""
    raise ValueError(f"[{op}] {text}")


def check_size(op: str, rule: str, got: int, expected: int) -> None:
    """Check that the size `got` equals `expected`. The error text has TensorFlow's form: rule, size, expected size."""
    if got != expected:
        reject(op, f"{rule}: {got} vs. {expected}")


def check_kinds(op: str, arrays: Arrays) -> None:
    """Check that all arrays are MLX arrays of one floating dtype."""
    dtype = None
    for name, array in arrays.items():
        check_array(op, name, array, None, dtype)  # None: any shape
        dtype = array.dtype


def check_ranks(op: str, arrays: Arrays, ranks: dict[str, int], otherwise: int, text: str) -> None:
    """Check that the rank of every array is `ranks[name]`, or `otherwise` if `ranks` lacks the name. `text` is the
    template of the error text, in which {name}, {rank} and {got} are replaced."""
    for name, array in arrays.items():
        rank = ranks.get(name, otherwise)
        if array.ndim != rank:
            reject(op, text.format(name=name, rank=rank, got=array.ndim))


def check_matrices(op: str, arrays: Arrays, names: tuple[str, ...], dims: str, N: int, H: int) -> None:
    """Check that the arrays of these names have shape [N, H]; names without an array are skipped. dims: what
    TensorFlow's error texts for this op write between the name of the array and the axis, such as ".dim_size" in
    "cs_prev.dim_size(0)". N, H: batch items, units."""
    for name in (name for name in names if name in arrays):
        check_size(op, f"{name}{dims}(0) != batch_size", arrays[name].shape[0], N)
        check_size(op, f"{name}{dims}(1) != cell_size", arrays[name].shape[1], H)


def check_cell(op: str, arrays: Arrays) -> tuple[int, int]:
    """Check the shapes of an LSTM's cs_prev [N, H], h_prev [N, H], w [I + H, 4H] and b [4H]. Return (N, H). N and I are
    read from x, [N, I] or [T, N, I]; H is read from cs_prev. The error texts are TensorFlow's. T, N, I, H: steps, batch
    items, inputs, units."""
    (N, I), H = arrays["x"].shape[-2:], arrays["cs_prev"].shape[1]
    check_size(op, "cs_prev.dims(0) != batch_size", arrays["cs_prev"].shape[0], N)
    check_size(op, "h_prev.dims(0) != batch_size", arrays["h_prev"].shape[0], N)
    check_size(op, "h_prev.dims(1) != cell_size", arrays["h_prev"].shape[1], H)
    rows, columns = arrays["w"].shape
    check_size(op, "w.dim_size(0) != input_size + cell_size", rows, I + H)
    check_size(op, "w.dim_size(1) != cell_size * 4", columns, 4 * H)
    check_size(op, "b.dim_size(0) != cell_size * 4", arrays["b"].size, 4 * H)
    return N, H


def check_peepholes(op: str, arrays: Arrays, H: int) -> None:
    """Check that the peepholes wci, wcf and wco are [H]. TensorFlow checks this in BlockLSTM only; its other ops read
    beyond the end of a shorter array. H: the number of units."""
    for name in PEEPHOLES:
        check_size(op, f"{name}.dim_size(0) != cell_size", arrays[name].size, H)


def check_steps(op: str, seq_len_max: object) -> int:
    """Return seq_len_max, an integer or an integer array of rank 0, as an int."""
    if isinstance(seq_len_max, (mx.array, np.ndarray)):
        if seq_len_max.ndim:
            reject(op, f"`seq_len_max_tensor` must be rank 0 but is rank {seq_len_max.ndim}")
        if isinstance(seq_len_max, mx.array) and not have_values([seq_len_max]):
            fail(op, "seq_len_max must have a value", "a placeholder of mx.compile or mx.vmap")
        seq_len_max = seq_len_max.item()
    return check_integer(op, "seq_len_max", seq_len_max)


def check_range(op: str, steps: int, T: int) -> int:
    """Check that 0 <= steps <= T and return steps. For other values TensorFlow (up to 2.21) ends the process."""
    if not 0 <= steps <= T:
        reject(op, f"seq_len_max must be between 0 and {T} but is {steps}")
    return steps


def check_attributes(op: str, forget_bias: object, cell_clip: object) -> dict[str, Any]:
    """Check that forget_bias is a finite number and that cell_clip is a number. Return both as options of
    `mlx_lstm.lstm`. As in TensorFlow, a cell_clip that is infinite, 0, negative or NaN means no clip, None."""
    clip = as_float(cell_clip)  # None if it is no number
    if clip is None:
        fail(op, "cell_clip must be a number", repr(cell_clip))
    return {"forget_bias": check_number(op, "forget_bias", forget_bias), "cell_clip": clip if 0 < clip < inf else None}
