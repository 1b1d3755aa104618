"""The GRU over a sequence (`gru`) and its gradient op (`gru_gradients`). Both work in the same steps as the functions
of `_lstm`; `check_gru` checks the options and returns the cell."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..engines.choice import Engine, Stream
from ..engines.packing import Weight
from ..engines.problem import Arrays
from ._arguments import check_gru
from ._call import Call, Hold, Lengths, given
from ._norm import Norm, with_norm, without_norm


class GRUOutput(NamedTuple):
    """The outputs of `gru`: the sequences h [T, B, H] and gates [T, B, 3H] (None unless `return_gates`), and the last
    state hT [B, H]. T: time steps, B: batch items, H: hidden units.

    With `bidirectional` the last axis of each output is twice as wide: first the forward direction, then the reverse
    one.
    """

    h: mx.array
    gates: mx.array | None
    hT: mx.array


def gru(
    x: mx.array,
    Wx: Weight | None,
    Wh: Weight,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    *,
    bhn: mx.array | None = None,
    gate_order: str = "rzn",
    activations: Sequence[str] = ("sigmoid", "sigmoid", "tanh"),
    reset: str = "after",
    flip_z: bool = False,
    mask: mx.array | None = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    norm: Norm | None = None,
    return_gates: bool = False,
    training: bool = True,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> GRUOutput:
    r"""Run a gated recurrent unit (GRU) layer over a time-major sequence. Sizes: T time steps, B batch items, I input
    features, H hidden units.

    .. math::

        r, z &= s_k(x_t W_{x,k}^T + (m_t \odot h_{t-1}) W_{h,k}^T + b_k), \quad k \in \{r, z\} \\
        n &= s_n(x_t W_{x,n}^T + b_n + r \odot ((m_t \odot h_{t-1}) W_{h,n}^T + b_{hn})) \\
        h_t &= z \odot h_{t-1} + (1 - z) \odot n

    Without options it equals `torch.nn.GRU` with one layer (b = b_ih + b_hh for r and z, b_in for n; bhn = b_hn) and
    `mlx.nn.GRU`. With `reset="before"` the candidate is :math:`n = s_n(x_t W_{x,n}^T + b_n + (r \odot m_t \odot
    h_{t-1}) W_{h,n}^T)`, as in the first version of the paper, in Keras with `reset_after=False` and in TensorFlow's
    GRUBlockCell. The gradient is exact for every array and flows from all outputs. For it the forward pass saves the
    gates.

    Args:
        x (array): input, [T, B, I]; or, with `Wx=None`, the already projected input, [T, B, 3H].
        Wx (array, optional): input weights, [3H, I].
        Wh (array): recurrent weights, [3H, H]. Wx and Wh may be `Quantized`, as in `lstm`.
        b (array, optional): bias, [3H].
        h0 (array, optional): first h, [B, H]. Default: zeros.
        bhn (array, optional): bias of the candidate's recurrent product, [H]; needs `reset="after"`.
        gate_order (str): order of the three H-blocks on every 3H axis, a permutation of reset, update and candidate
            gate. Default: `"rzn"`.
        activations (sequence of str): the activations s of r, z, n, in this order; the names are those of `lstm`.
        reset (str): with `"after"` r multiplies the recurrent product of the candidate; with `"before"` r multiplies
            the h that enters this product. Default: `"after"`.
        flip_z (bool): use z as the weight of n, so that h[t] = (1 - z) h[t-1] + z n. Default: `False`.
        mask (array, optional): m, a factor on h[t-1] as it enters the recurrent products; broadcastable to [B, H], or
            to [T, B, H] for a mask per step. All gates share it. It does not multiply h[t-1] in the term z h[t-1];
            `keep` multiplies h[t-1] everywhere.
        norm (Norm, optional): layer normalisation of the products, as in `lstm`; needs `reset="after"`.
        keep, hold, reverse, bidirectional, lengths, return_gates, training, checkpoint_every, engine, stream: as in
            `lstm`. With both directions Wx is [6H, I], b [6H], Wh [2, 3H, H], bhn [2H], h0 [B, 2H], a projected x
            [T, B, 6H]. Errors are those of `lstm`.

    Returns:
        GRUOutput: h [T, B, H], gates [T, B, 3H] (after activation, in `gate_order`; `None` unless `return_gates`) and
        hT [B, H], in the dtype of x.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import gru
        >>> x = mx.random.normal((10, 2, 3))  # T, B, I
        >>> out = gru(x, mx.zeros((12, 3)), mx.zeros((12, 4)), mx.ones((12,)))
        >>> out.h.shape, out.hT.shape
        ((10, 2, 4), (2, 4))
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, bhn=bhn, mask=mask, keep=keep)
    cell = check_gru(gate_order, activations, reset, flip_z, bhn is not None)
    cell, arrays = with_norm("gru", cell, norm, arrays)
    call = Call(cell, reverse, bidirectional, lengths, engine, stream, hold=hold, checkpoint_every=checkpoint_every)
    return GRUOutput(**call.forward(arrays, return_gates=return_gates, training=training)[0])


@without_norm
def gru_gradients(
    x: mx.array,
    Wx: Weight | None,
    Wh: Weight,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    *,
    gates: mx.array,
    h: mx.array,
    dh: mx.array | None = None,
    dgates: mx.array | None = None,
    dhT: mx.array | None = None,
    bhn: mx.array | None = None,
    gate_order: str = "rzn",
    activations: Sequence[str] = ("sigmoid", "sigmoid", "tanh"),
    reset: str = "after",
    flip_z: bool = False,
    mask: mx.array | None = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> Arrays:
    """Return the gradients of `gru`, computed from the outputs of a forward pass, as `lstm_gradients` does for `lstm`.
    Sizes: T time steps, B batch items, H hidden units.

    Args:
        x, Wx, Wh, b, h0 and all options: as in the call of `gru`.
        gates (array): [T, B, 3H], as `gru` returned them.
        h (array): [T, B, H], as `gru` returned it.
        dh, dgates, dhT (array, optional): the gradients of the outputs, in their shapes. Default: zeros.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import gru, gru_gradients
        >>> x, Wx, Wh = mx.ones((10, 2, 3)), mx.ones((12, 3)), mx.ones((12, 4))
        >>> out = gru(x, Wx, Wh, return_gates=True)
        >>> gru_gradients(x, Wx, Wh, gates=out.gates, h=out.h, dh=mx.ones((10, 2, 4)))["x"].shape
        (10, 2, 3)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, bhn=bhn, mask=mask, keep=keep)
    cell = check_gru(gate_order, activations, reset, flip_z, bhn is not None, op="gru_gradients")
    call = Call(cell, reverse, bidirectional, lengths, engine, stream, hold=hold)
    return call.backward(arrays, given(h=h, gates=gates), given(h=dh, gates=dgates, hT=dhT))
