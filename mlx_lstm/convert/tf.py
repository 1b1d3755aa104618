"""Convert weights between the arguments of TensorFlow's block ops and `Weights`.

An LSTM's weight w [I + H, 4H] of TensorFlow contains the transposed input weight (Wx [4H, I] in `Weights`) and, below
it, the transposed recurrent weight (Wh [4H, H]), for I input features and H units. TensorFlow's b is the bias bx of
`Weights`. The gate g of an LSTM has the name c in TensorFlow; the gates r, z, n of a GRU have the names r, u, c.
"""

from typing import Any

import mlx.core as mx

from ..engines.cells import GRUCell, LSTMCell
from ..ground.checks import check_array, check_limit, check_number, check_option, fail
from .weights import (
    OURS,
    TF,
    Format,
    Weights,
    as_stored,
    checked,
    describe,
    from_peepholes,
    one_layer,
    peepholes,
    reorder,
    to_mlx,
    whole_bias,
)

PEEPHOLES = {"i": "wci", "f": "wcf", "o": "wco"}
"""The gates with peephole weights, and TensorFlow's names of these arrays."""

GRU = Format({"gru": OURS["gru"]}, reset=("before",), is_layer=True)
"""What `GRUBlockCell` can store: one layer in one direction, with reset "before"."""


def from_tf(
    w: Any, b: Any, wci: Any = None, wcf: Any = None, wco: Any = None, *, order: str = "icfo",
    forget_bias: float = 1.0, cell_clip: float | None = None, clip_gradient: str = "through",
) -> Weights:  # fmt: skip
    """Return the weights of TensorFlow's `BlockLSTM`, `LSTMBlockCell`, or of TensorFlow 1's `LSTMCell`.

    Args:
        w (array): [I + H, 4H], the rows of the input first: `lstm_cell/kernel`.
        b (array): [4H].
        wci, wcf, wco (array, optional): peepholes of i, f, o, [H]; all or none.
        order (str): `"icfo"`, or `"ifco"`, which the V2 ops have. Default: `"icfo"`.
        forget_bias (float): what the op adds to the forget gate. Default: 1, as in the op; the V2 ops add 0.
        cell_clip (float, optional): the bound on the cell state; none if 0 or less. Default: none; the default of
            TensorFlow's ops is 3.
        clip_gradient (str): `"zero"` if the gradient is 0 where the clip changes the state, as in TensorFlow 1's
            `LSTMCell`. Default: `"through"`, the rule of the block ops.

    Returns:
        Weights: of one layer, in the gate order i, f, g, o. The forget bias is an option of the cell, not part of the
        bias.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert, torch
        >>> weights = convert.from_tf(mx.ones((7, 16)), mx.zeros((16,)))
        >>> torch.from_weights(weights)
        LSTM(3, 4)
    """
    op = "from_tf"
    check_option(op, "order", order, tuple(TF))
    w, b = to_mlx(w), to_mlx(b)
    check_array(op, "b", b, ["4H"])
    H = b.shape[0] // 4
    check_array(op, "w", w, ["I + H", 4 * H])
    if b.shape[0] % 4 or w.shape[0] <= H:
        fail(op, "w and b must have shapes [I + H, 4H] and [4H]", f"shapes {list(w.shape)} and {list(b.shape)}")
    # Move the gates from TensorFlow's order to i, f, g, o. The last H rows of w belong to h.
    ours = [reorder(array, TF[order], OURS["lstm"], axis=-1) for array in (w, b)]
    arrays = {"Wx": ours[0][:-H].T, "Wh": ours[0][-H:].T, "bx": ours[1]}
    given = [to_mlx(array) for array in (wci, wcf, wco) if array is not None]
    if given:
        if len(given) < 3:
            fail(op, "wci, wcf and wco must all be given, or none", f"{len(given)} of them")
        for name, array in zip(PEEPHOLES.values(), given, strict=True):
            check_array(op, name, array, [H])
        arrays["peephole"] = from_peepholes(*given)
    check_option(op, "clip_gradient", clip_gradient, ("through", "zero"))
    bias, clip = check_number(op, "forget_bias", forget_bias), check_limit(op, "cell_clip", cell_clip)
    cell = LSTMCell(forget_bias=bias, cell_clip=clip, clip_gradient=clip_gradient)
    return checked(op, Weights(cell, [[arrays]]))


def to_tf(weights: Weights, *, order: str = "icfo") -> dict[str, Any]:
    """Return a dict of TensorFlow's arrays and options, the arguments of `from_tf`: `w`, `b`, the peepholes if the
    layer has any, `forget_bias`, `cell_clip`.

    Raises:
        ValueError: the weights are not of one LSTM layer in one direction, or the block ops lack an option of the
            layer.
    """
    op = "to_tf"
    check_option(op, "order", order, tuple(TF))
    cell: Any = one_layer(op, weights, ["lstm"]).cell
    if cell.activations != LSTMCell().activations or weights.proj_size or weights.reverse:
        fail(op, "weights must have the usual activations, no projection and no reverse", describe(weights))
    if cell.stops_c:  # where the clip changes c, the gradient is 0
        fail(op, "clip_gradient must be 'through', as in the block ops,", repr(cell.clip_gradient))
    arrays = weights.layers[0][0]
    w = mx.concatenate([arrays["Wx"].T, arrays["Wh"].T])
    # Move the gates from our order to TensorFlow's. `whole_bias` returns the sum of both biases.
    arguments: dict[str, Any] = {
        "w": reorder(w, OURS["lstm"], TF[order], axis=-1),
        "b": reorder(whole_bias(cell, arrays), OURS["lstm"], TF[order]),
    }
    if "peephole" in arrays:
        if cell.output_peephole != "current":
            fail(op, "output_peephole must be 'current', as in the block ops,", repr(cell.output_peephole))
        parts = peepholes(op, arrays, "the ops do not")  # by gate; the text completes an error
        arguments |= {name: parts[gate] for gate, name in PEEPHOLES.items()}
    return arguments | {"forget_bias": cell.forget_bias, "cell_clip": cell.cell_clip}


def from_tf_gru(w_ru: Any, w_c: Any, b_ru: Any, b_c: Any) -> Weights:
    """Return the weights of TensorFlow's `GRUBlockCell`, a GRU that resets before the recurrent product.

    Args:
        w_ru, w_c (array): [I + H, 2H], [I + H, H], the rows of the input first.
        b_ru, b_c (array): [2H], [H].
    """
    op = "from_tf_gru"
    w_ru, w_c, b_ru, b_c = (to_mlx(array) for array in (w_ru, w_c, b_ru, b_c))
    check_array(op, "b_c", b_c, ["H"])
    H = b_c.shape[0]
    check_array(op, "w_c", w_c, ["I + H", H])
    check_array(op, "w_ru", w_ru, [w_c.shape[0], 2 * H])
    check_array(op, "b_ru", b_ru, [2 * H])
    # The columns of w are in the gate order of `Weights`, r, z, n (r, u, c in TensorFlow). The last H rows belong to h.
    w = mx.concatenate([w_ru, w_c], axis=1)
    arrays = {"Wx": w[:-H].T, "Wh": w[-H:].T, "bx": mx.concatenate([b_ru, b_c])}
    return checked(op, Weights(GRUCell(reset="before"), [[arrays]]))


def to_tf_gru(weights: Weights) -> dict[str, mx.array]:
    """Return a dict of TensorFlow's arrays, the arguments of `from_tf_gru`: `w_ru`, `w_c`, `b_ru`, `b_c`."""
    weights = as_stored("to_tf_gru", weights, GRU)  # refuses what `GRU` does not list, such as several layers
    arrays, width_ru = weights.layers[0][0], weights.hidden_size * 2  # [layer][direction]; r and u have 2H columns
    b = whole_bias(weights.cell, arrays)  # the sum of both biases
    w = mx.concatenate([arrays["Wx"].T, arrays["Wh"].T])
    return {"w_ru": w[:, :width_ru], "w_c": w[:, width_ru:], "b_ru": b[:width_ru], "b_c": b[width_ru:]}
