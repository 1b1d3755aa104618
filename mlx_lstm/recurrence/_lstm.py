"""The LSTM over a sequence (`lstm`) and its gradient op (`lstm_gradients`).

T: time steps, B: sequences of the batch, I: input features, H: hidden units, P: the width of h (H, or the width of the
projection). Both functions work in the same steps:

- `given` makes a dict of the arrays that are not None. `check_lstm` checks the options and returns the cell.
- `with_norm` (only `lstm`) adds the options of a `Norm` to the cell, and its arrays to the dict. `without_norm` makes
  the gradient op refuse the argument `norm`.
- `Call` checks the arrays, chooses an engine and runs it. `Call.forward` returns (outputs by name, the chosen engine).
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..engines.choice import Engine, Stream
from ..engines.packing import Weight
from ..engines.problem import Arrays
from ._arguments import Clips, check_lstm
from ._call import Call, Hold, Lengths, given
from ._norm import Norm, with_norm, without_norm


class LSTMOutput(NamedTuple):
    """The outputs of `lstm`: the sequences h [T, B, P], c [T, B, H] and gates [T, B, 4H] (None unless `return_gates`),
    and the last states hT [B, P] and cT [B, H]. P is the width of h: the projection's width, or H without one. T: time
    steps, B: batch items, H: hidden units.

    With `bidirectional` the last axis of each output is twice as wide: first the forward direction, then the reverse
    one.
    """

    h: mx.array
    c: mx.array
    gates: mx.array | None
    hT: mx.array
    cT: mx.array


def lstm(
    x: mx.array,
    Wx: Weight | None,
    Wh: Weight,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    c0: mx.array | None = None,
    *,
    gate_order: str = "ifgo",
    activations: Sequence[str] = ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"),
    peephole: mx.array | None = None,
    output_peephole: str = "current",
    mask: mx.array | None = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    cell_clip: float | None = None,
    projection_clip: float | None = None,
    clip_gradient: str = "through",
    forget_bias: float = 0.0,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    Wp: Weight | None = None,
    norm: Norm | None = None,
    return_gates: bool = False,
    training: bool = True,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> LSTMOutput:
    r"""Run a long short-term memory (LSTM) layer over a time-major sequence. Sizes: T time steps, B batch items, I
    input features, H hidden units, P the width of h.

    .. math::

        a_k &= x_t W_{x,k}^T + (m_t \odot h_{t-1}) W_{h,k}^T + b_k + p_k \odot c_{t-1}, \quad k \in \{i, f, g, o\} \\
        i, f, g, o &= s_i(a_i),\; s_f(a_f + \text{forget\_bias}),\; s_g(a_g),\; s_o(a_o) \\
        c_t &= f \odot c_{t-1} + i \odot g, \text{ clipped to } \pm\text{cell\_clip} \\
        h_t &= \left(o \odot s_{output}(c_t)\right) W_p^T, \text{ clipped to } \pm\text{projection\_clip}

    Without options it equals `torch.nn.LSTM` with one layer (b = b_ih + b_hh) and `mlx.nn.LSTM` on a transposed batch.
    The gradient is exact for every array and flows from all five outputs. It needs the gates and the cell states of all
    steps, which the forward pass saves unless `checkpoint_every` is given.

    Args:
        x (array): input, [T, B, I]; or, with `Wx=None`, the already projected input, [T, B, 4H].
        Wx (array, optional): input weights, [4H, I]. Wx, Wh and Wp may be `Quantized`: the call then equals a call with
            the matrices that `mx.dequantize` returns for them. Quantized weights have no gradient.
        Wh (array): recurrent weights, [4H, P]; P is H, or the projection's width.
        b (array, optional): bias, [4H].
        h0 (array, optional): first h, [B, P]. Default: zeros.
        c0 (array, optional): first c, [B, H]. Default: zeros.
        gate_order (str): order of the four H-blocks on every 4H axis (weights, bias, peephole, gates), a permutation of
            input, forget, candidate and output gate. Default: `"ifgo"`.
        activations (sequence of str): the activations s of i, f, g, o and of the output, in this order, which does not
            depend on `gate_order`. Each is one of `"identity"`, `"relu"`, `"tanh"`, `"sigmoid"`, `"hard_sigmoid"`
            (clip(0.2 x + 0.5, 0, 1)), `"hard_sigmoid_sixth"` (clip(x / 6 + 0.5, 0, 1)).
        peephole (array, optional): peephole weights p, [4H]; zeros for a gate without a peephole.
        output_peephole (str): with `"current"` the peephole of o reads c[t]; with `"previous"` it reads c[t-1].
            Default: `"current"`.
        mask (array, optional): m, a factor on h[t-1] as it enters the recurrent product; broadcastable to [B, P], or to
            [T, B, P] for a mask per step. All gates share it. It does not change the carried state, on which `keep`
            and `hold` act. A mask per gate, as in Keras' recurrent_dropout, needs a product per gate, which the kernels
            do not support: docs/recipes.md shows how to write it.
        keep (array, optional): factor on the carried state before a step: on h[t-1] and c[t-1] wherever the equations
            have them. Broadcastable to [T, B], or with both directions to [T, B, 2], one factor for each; bool,
            integers or floats. 0 resets an item: pass `keep=~done` if an episode ended before step t. The first step's
            factor applies to h0 and c0. With `reverse` the step before t is t+1.
        hold (array or list, optional): bool or integers, broadcastable to [T, B]: steps at which an item's state is
            carried unchanged (`keep` still applies) and its input is not read. h and c repeat the state, gates are 0.
            The other steps are gathered to the front and run with `lengths`, which copies x and each output. Steps
            past an item's end are not held.
        cell_clip (float, optional): limit on |c[t]|; no limit if 0 or less, as in TensorFlow.
        projection_clip (float, optional): limit on the absolute values of a projected h, `proj_clip` of TensorFlow's
            `LSTMCell`; no limit if 0 or less. It needs `Wp`.
        clip_gradient (str): the gradient of both clips. `"through"`: it passes unchanged, as in TensorFlow's block ops.
            `"zero"`: it is 0 where the clip changed the value, as with `torch.clamp` (AllenNLP's ELMo) and in
            TensorFlow's `LSTMCell`. Where a value equals the limit, the gradient passes. With 16 bits `"zero"` rounds
            the limits to the dtype. Default: `"through"`.
        forget_bias (float): a number that is added to the forget gate's preactivation. Default: 0.
        reverse (bool): process t = T-1 ... 0; outputs stay aligned with the input. Default: `False`.
        bidirectional (bool): run both directions. The arrays then hold the forward direction first: Wx [8H, I], b [8H],
            Wh [2, 4H, P], Wp [2, P, H], peephole [2, 4H], h0 [B, 2P], c0 [B, 2H], a mask that is not shared [.., 2P],
            a projected x [T, B, 8H]. All outputs are twice as wide. Default: `False`.
        lengths (integer array or list, optional): [B], the number of steps of each item, 0..T. After the end of an item
            its outputs are 0, its state is carried unchanged and its input is not read. With `reverse` the item starts
            at its end. Under `mx.compile` the range is not checked.
        Wp (array, optional): projection of h, [P, H].
        norm (Norm, optional): layer normalisation inside the step; `mlx_lstm.Norm` has the formulas. The output `gates`
            has the gates after it. `lstm_gradients` does not take it: use `mx.vjp`. Default: `None`.
        return_gates (bool): whether `gates` is returned, else it is `None`. Default: `False`.
        training (bool): `False` for inference. The forward pass then saves nothing for a gradient. If a gradient is
            needed nevertheless, the forward pass runs again. With `False`, a graph that MLX traces does not contain
            this package's gradient, because `mx.export_function` could not write it; MLX differentiates the graph
            itself. Default: `True`.
        checkpoint_every (int or str, optional): gradient checkpointing. In training, save only the states of every
            K-th step; the gradient recomputes K steps at a time. The result is exact. Besides the outputs that the
            caller holds, memory holds the gates and cell states of K steps and the states of T / K steps, not the gates
            and cell states of all steps; docs/training.md shows the time. `"auto"` chooses a K near sqrt(T).
            Exceptions: the engine `"ops"` takes a quarter of sqrt(T); the engine `"numpy"` takes the smaller one of
            1024 / B and T / 8 if this is larger than sqrt(T). Default: `None`, no checkpointing.
        engine (str, optional): `"fused"`, `"stepwise"` (Metal), `"numpy"` or `"ops"` to force an engine. Default: the
            best for the stream's device and the sizes, see `mlx_lstm.engines.choose`.
        stream (Stream or Device, optional): where to run, as for any MLX op.

    Returns:
        LSTMOutput: h [T, B, P], c [T, B, H] (clipped), gates [T, B, 4H] (after activation, in `gate_order`; `None`
        unless `return_gates`), hT [B, P] and cT [B, H] (the state after the last step processed), in the dtype of x.
        float16 and bfloat16 are computed in float32. Engines on the CPU round once, at the outputs; the Metal engines
        keep the projected input, h and the gates in 16 bits, c in float32.

    Raises:
        ValueError: a rule on an argument is broken, or a forced engine cannot run. Nothing has been computed then.
        RuntimeError: a second or a forward-mode derivative was asked of an engine other than `"ops"`, or the gradient
            of quantized weights was asked.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import lstm
        >>> x = mx.random.normal((10, 2, 3))  # T, B, I
        >>> Wx, Wh, b = mx.zeros((16, 3)), mx.zeros((16, 4)), mx.ones((16,))
        >>> out = lstm(x, Wx, Wh, b)
        >>> out.h.shape, out.cT.shape
        ((10, 2, 4), (2, 4))
        >>> mx.grad(lambda Wh: lstm(x, Wx, Wh, b).hT.sum())(Wh).shape
        (16, 4)
        >>> mx.grad(lambda Wh: lstm(x, Wx, Wh, b, checkpoint_every="auto").hT.sum())(Wh).shape
        (16, 4)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, c0=c0, peephole=peephole, mask=mask, keep=keep, Wp=Wp)
    clips = Clips(cell_clip, projection_clip, clip_gradient, Wp is not None)
    cell = check_lstm(gate_order, activations, output_peephole, forget_bias, clips)
    cell, arrays = with_norm("lstm", cell, norm, arrays)
    call = Call(cell, reverse, bidirectional, lengths, engine, stream, hold=hold, checkpoint_every=checkpoint_every)
    return LSTMOutput(**call.forward(arrays, return_gates=return_gates, training=training)[0])


@without_norm
def lstm_gradients(
    x: mx.array,
    Wx: Weight | None,
    Wh: Weight,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    c0: mx.array | None = None,
    *,
    gates: mx.array,
    c: mx.array,
    h: mx.array | None = None,
    dh: mx.array | None = None,
    dc: mx.array | None = None,
    dgates: mx.array | None = None,
    dhT: mx.array | None = None,
    dcT: mx.array | None = None,
    gate_order: str = "ifgo",
    activations: Sequence[str] = ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"),
    peephole: mx.array | None = None,
    output_peephole: str = "current",
    mask: mx.array | None = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    cell_clip: float | None = None,
    projection_clip: float | None = None,
    clip_gradient: str = "through",
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    Wp: Weight | None = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> Arrays:
    """Return the gradients of `lstm`, computed from the outputs of a forward pass. Sizes: T time steps, B batch items,
    H hidden units, P the width of h.

    The results equal the gradients that `mx.vjp` returns for the same arguments. No gate is recomputed. Wrong arguments
    raise the same errors as in `lstm`.

    Args:
        x, Wx, Wh, b, h0, c0 and all options: as in the call of `lstm`, except forget_bias: the formulas of the gradient
            do not contain it. The clips cell_clip and projection_clip change the gradients only if clip_gradient is
            `"zero"`. With `Wx=None` only the shape of x matters.
        gates (array): [T, B, 4H], as `lstm` returned them.
        c (array): [T, B, H], as `lstm` returned it.
        h (array, optional): [T, B, P], as `lstm` returned it. Required with a projection. Default: computed from
            gates and c.
        dh, dc, dgates, dhT, dcT (array, optional): the gradients of the outputs, in their shapes. Default: zeros.

    Returns:
        dict: a gradient for each array argument that was passed, under the argument's name and in its shape: `"x"`,
        `"Wx"`, `"Wh"`, `"b"`, `"h0"`, `"c0"`, `"peephole"`, `"mask"`, `"keep"` (if it has floats), `"Wp"`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import lstm, lstm_gradients
        >>> x, Wx, Wh = mx.ones((10, 2, 3)), mx.ones((16, 3)), mx.ones((16, 4))
        >>> out = lstm(x, Wx, Wh, return_gates=True)
        >>> lstm_gradients(x, Wx, Wh, gates=out.gates, c=out.c, h=out.h, dh=mx.ones((10, 2, 4)))["Wh"].shape
        (16, 4)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, c0=c0, peephole=peephole, mask=mask, keep=keep, Wp=Wp)
    clips = Clips(cell_clip, projection_clip, clip_gradient, Wp is not None)
    # 0.0: forget_bias, which the formulas of the gradient do not contain.
    cell = check_lstm(gate_order, activations, output_peephole, 0.0, clips, op="lstm_gradients")
    call = Call(cell, reverse, bidirectional, lengths, engine, stream, hold=hold)
    return call.backward(arrays, given(h=h, c=c, gates=gates), given(h=dh, c=dc, gates=dgates, hT=dhT, cT=dcT))
