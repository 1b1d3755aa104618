"""Run one step of TensorFlow's GRU block cell, or compute its gradient.

Each op checks its arguments, converts them to those of `mlx_lstm.gru` or `gru_gradients`, and converts the results
back. These functions take sequences with time first: array[None] is a sequence of one step, and array[0] is this step.

N batch items, I inputs, H units. Names are TensorFlow's: r is the reset gate, u the update gate (z in `mlx_lstm.gru`),
c the candidate (n in `mlx_lstm.gru`). The first I rows of w_ru [I + H, 2H] and w_c [I + H, H] are weights of the input,
the others of h. b_ru [2H] and b_c [H] are biases.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from ..engines.choice import Engine, Stream, on
from ..engines.problem import Arrays
from ..engines.sequences import joined
from ..recurrence import gru, gru_gradients
from ._checks import check_gru_block_cell


class GRUBlockCellOutput(NamedTuple):
    """Outputs of `gru_block_cell`: r, u, c, h, each [N, H] (N batch items, H units). The gates r, u and the candidate c
    are values after activation."""

    r: mx.array
    u: mx.array
    c: mx.array
    h: mx.array


class GRUBlockCellGradOutput(NamedTuple):
    """Outputs of `gru_block_cell_grad`: d_x [N, I], d_h_prev [N, H], and the gradients of the preactivations, d_c_bar
    [N, H] and d_r_bar_u_bar [N, 2H]. N: batch items, I: inputs, H: units."""

    d_x: mx.array
    d_h_prev: mx.array
    d_c_bar: mx.array
    d_r_bar_u_bar: mx.array


def gru_block_cell(
    x: mx.array,
    h_prev: mx.array,
    w_ru: mx.array,
    w_c: mx.array,
    b_ru: mx.array,
    b_c: mx.array,
    *,
    engine: Engine | None = None,
    stream: Stream = None,
) -> GRUBlockCellOutput:
    """Run one step of a GRU whose reset gate r multiplies h_prev before the product; equals `tf.raw_ops.GRUBlockCell`.

        r, u = sigmoid([x, h_prev] w_ru + b_ru)      c = tanh([x, r h_prev] w_c + b_c)      h = u h_prev + (1 - u) c

    The gradient is exact for a loss of any of the four outputs. TensorFlow 2 has no gradient for this op; for a loss of
    h alone, the gradient equals the one that TensorFlow 1 had registered.

    Args:
        x (array): the input, [N, I], for N batch items and I inputs.
        h_prev (array): h of the step before, [N, H], for H units.
        w_ru (array): the weights of r and u, [I + H, 2H], the columns of r first. The first I rows multiply x.
        w_c (array): the weights of c, [I + H, H].
        b_ru (array): the biases of r and u, [2H].
        b_c (array): the bias of c, [H].
        engine (str, optional): force an engine, as in `mlx_lstm.gru`. Default: the best for the stream's device.
        stream (Stream or Device, optional): where to run, as for any MLX op.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import tf
        >>> weights = mx.ones((7, 8)), mx.ones((7, 4)), mx.ones((8,)), mx.zeros((4,))
        >>> tf.gru_block_cell(mx.ones((2, 3)), mx.zeros((2, 4)), *weights).h.shape
        (2, 4)
    """
    given = {"x": x, "h_prev": h_prev, "w_ru": w_ru, "w_c": w_c, "b_ru": b_ru, "b_c": b_c}
    check_gru_block_cell("gru_block_cell", given)
    with on(stream, "gru_block_cell"):
        if h_prev.size == 0:  # N = 0 or H = 0
            return GRUBlockCellOutput(*[mx.zeros_like(h_prev)] * 4)  # 4: the number of outputs
        out = gru(**gru_arguments(given), return_gates=True, engine=engine)._asdict()
        r, u, c = mx.split(out["gates"][0], 3, axis=-1)  # gates [1, N, 3H]
        return GRUBlockCellOutput(r, u, c, out["h"][0])


def gru_block_cell_grad(
    x: mx.array,
    h_prev: mx.array,
    w_ru: mx.array,
    w_c: mx.array,
    b_ru: mx.array,
    b_c: mx.array,
    r: mx.array,
    u: mx.array,
    c: mx.array,
    d_h: mx.array,
    *,
    engine: Engine | None = None,
    stream: Stream = None,
) -> GRUBlockCellGradOutput:
    """Return the gradient of `gru_block_cell`; equals `tf.raw_ops.GRUBlockCellGrad`. N: batch items, H: units.

    The op returns no gradients of weights and biases. TensorFlow 1 computed these gradients as d_w_ru = [x, h_prev]^T
    d_r_bar_u_bar, d_w_c = [x, r h_prev]^T d_c_bar, and the sums over N of d_r_bar_u_bar and d_c_bar; `mx.grad` of
    `gru_block_cell` returns them. With H = 0 d_x is 0; TensorFlow leaves d_x unwritten.

    Args:
        x, h_prev, w_ru, w_c, b_ru, b_c: the arguments of `gru_block_cell`. Only the shapes of x, b_ru, b_c are used.
        r, u, c (array): the outputs of `gru_block_cell`, [N, H].
        d_h (array): the gradient of h, [N, H].
        engine, stream: as in `gru_block_cell`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import tf
        >>> arrays = mx.ones((2, 3)), mx.ones((2, 4)), mx.ones((7, 8)), mx.ones((7, 4)), mx.ones((8,)), mx.zeros((4,))
        >>> r, u, c, h = tf.gru_block_cell(*arrays)
        >>> tf.gru_block_cell_grad(*arrays, r, u, c, d_h=h).d_x.shape
        (2, 3)
    """
    given = {"x": x, "h_prev": h_prev, "w_ru": w_ru, "w_c": w_c, "b_ru": b_ru, "b_c": b_c}
    check_gru_block_cell("gru_block_cell_grad", given | {"r": r, "u": u, "c": c, "d_h": d_h})
    I, H = x.shape[1], h_prev.shape[1]
    with on(stream, "gru_block_cell_grad"):
        if h_prev.size == 0:  # N = 0 or H = 0: all gradients are 0
            d_h_prev = mx.zeros_like(h_prev)
            return GRUBlockCellGradOutput(mx.zeros_like(x), d_h_prev, d_h_prev, mx.concatenate([d_h_prev] * 2, axis=1))
        arrays = gru_arguments(given)
        Wx, gates = arrays["Wx"], joined([array[None] for array in (r, u, c)])
        # With Wx=None, `gru_gradients` takes x as the projected input x Wx^T, so the gradient of x is the gradient of
        # the preactivations, which this op returns and from which d_x follows. It then reads only the shape of x and,
        # for one step, only the shape of h. So pass any arrays of these shapes: `gates` as x and `d_h` as h.
        arrays |= {"x": gates, "Wx": None}
        d = gru_gradients(**arrays, gates=gates, h=d_h[None], dh=d_h[None], engine=engine)
        d_preactivations = d["x"][0]  # [N, 3H], in the order r, u, c
        d_x = d_preactivations @ Wx if I else mx.zeros_like(x)
        return GRUBlockCellGradOutput(d_x, d["h0"], d_preactivations[:, 2 * H :], d_preactivations[:, : 2 * H])


def gru_arguments(given: Arrays) -> dict[str, Any]:
    """Convert the dict `given` of TensorFlow's arrays to the arguments of `mlx_lstm.gru` for one step. Wx and Wh are
    views of w: its first I rows are the weights of x, and its columns are in the order r, u, c."""
    x, I = given["x"], given["x"].shape[-1]
    w = mx.concatenate([given["w_ru"], given["w_c"]], axis=1)
    arrays = {"x": x[None], "Wx": w[:I].T, "Wh": w[I:].T, "h0": given["h_prev"]}
    if I == 0:
        # Without Wx, `gru` takes x [1, N, 3H] as the input's part of the preactivations, which is 0 here.
        arrays |= {"x": mx.zeros((1, x.shape[0], w.shape[1]), x.dtype), "Wx": None}
    # "rzn": the letters of `mlx_lstm.gru` for r, u, c. "before": r multiplies h before the recurrent product.
    return arrays | {"b": mx.concatenate([given["b_ru"], given["b_c"]]), "gate_order": "rzn", "reset": "before"}
