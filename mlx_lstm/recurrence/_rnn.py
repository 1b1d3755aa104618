"""The plain RNN over a sequence (`rnn`) and its gradient op (`rnn_gradients`). Both work in the same steps as the
functions of `_lstm`; `check_rnn` checks the activation and returns the cell."""

from typing import NamedTuple

import mlx.core as mx

from ..engines.choice import Engine, Stream
from ..engines.packing import Weight
from ..engines.problem import Arrays
from ._arguments import check_rnn
from ._call import Call, Hold, Lengths, given
from ._norm import Norm, with_norm, without_norm


class RNNOutput(NamedTuple):
    """The outputs of `rnn`: the sequences h and gates, both [T, B, H], and the last state hT [B, H]. `gates` has the
    preactivations, or is None unless `return_gates`. T: time steps, B: batch items, H: hidden units.

    With `bidirectional` the last axis of each output is twice as wide: first the forward direction, then the reverse
    one.
    """

    h: mx.array
    gates: mx.array | None
    hT: mx.array


def rnn(
    x: mx.array,
    Wx: Weight | None,
    Wh: Weight,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    *,
    activation: str = "tanh",
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
) -> RNNOutput:
    r"""Run a plain recurrent layer over a time-major sequence. Sizes: T time steps, B batch items, I input features, H
    hidden units.

    It equals `torch.nn.RNN` with one layer (b = b_ih + b_hh) and `mlx.nn.RNN`.

    .. math:: h_t = s(x_t W_x^T + (m_t \odot h_{t-1}) W_h^T + b)

    s is the activation, m_t the mask (1 without a mask).

    Args:
        x (array): input, [T, B, I]; or, with `Wx=None`, the already projected input, [T, B, H].
        Wx (array, optional): input weights, [H, I].
        Wh (array): recurrent weights, [H, H]. Wx and Wh may be `Quantized`; such weights have no gradient.
        b (array, optional): bias, [H].
        h0 (array, optional): first h, [B, H]. Default: zeros.
        activation (str): the activation of h; the names are those of `lstm`. Default: `"tanh"`.
        norm (Norm, optional): layer normalisation of the products, as in `lstm`.
        mask, keep, hold, reverse, bidirectional, lengths, training, checkpoint_every, engine, stream: as in `lstm`,
            with the same errors. mask is a factor on h in the product with Wh; keep is a factor on h before a step;
            hold marks steps that leave h unchanged; lengths has the steps of each sequence. With both directions Wx is
            [2H, I], b [2H], Wh [2, H, H], h0 [B, 2H], a projected x [T, B, 2H].
        return_gates (bool): whether `gates`, here the preactivations, is returned. Default: `False`.

    Returns:
        RNNOutput: h [T, B, H], gates [T, B, H] (before activation; `None` unless `return_gates`) and hT [B, H], in the
        dtype of x.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import rnn
        >>> rnn(mx.ones((10, 2, 3)), mx.zeros((4, 3)), mx.zeros((4, 4)), activation="relu").h.shape
        (10, 2, 4)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, mask=mask, keep=keep)
    cell, arrays = with_norm("rnn", check_rnn(activation), norm, arrays)
    call = Call(cell, reverse, bidirectional, lengths, engine, stream, hold=hold, checkpoint_every=checkpoint_every)
    return RNNOutput(**call.forward(arrays, return_gates=return_gates, training=training)[0])


@without_norm
def rnn_gradients(
    x: mx.array,
    Wx: Weight | None,
    Wh: Weight,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    *,
    h: mx.array | None = None,
    gates: mx.array | None = None,
    dh: mx.array | None = None,
    dgates: mx.array | None = None,
    dhT: mx.array | None = None,
    activation: str = "tanh",
    mask: mx.array | None = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> Arrays:
    """Return the gradients of `rnn`, computed from the outputs of a forward pass: a dict with a gradient for each array
    argument that was passed, under the argument's name and in its shape. They equal the gradients that `mx.vjp`
    returns. Sizes: T time steps, B batch items, H hidden units.

    Args:
        x, Wx, Wh, b, h0 and all options: as in the call of `rnn`.
        h, gates (array): [T, B, H], as `rnn` returned them. One of the two is enough.
        dh, dgates, dhT (array, optional): the gradients of the outputs, in their shapes. Default: zeros.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import rnn, rnn_gradients
        >>> x, Wx, Wh = mx.ones((10, 2, 3)), mx.ones((4, 3)), mx.ones((4, 4))
        >>> rnn_gradients(x, Wx, Wh, h=rnn(x, Wx, Wh).h, dh=mx.ones((10, 2, 4)))["Wh"].shape
        (4, 4)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, mask=mask, keep=keep)
    cell = check_rnn(activation, op="rnn_gradients")
    call = Call(cell, reverse, bidirectional, lengths, engine, stream, hold=hold)
    return call.backward(arrays, given(h=h, gates=gates), given(h=dh, gates=dgates, hT=dhT))
