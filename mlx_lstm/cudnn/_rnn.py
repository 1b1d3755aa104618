"""Run a stack of recurrent layers, forward and backward, as the three versions of TensorFlow's CudnnRNN op do.

Every op makes a `Stack`, which does the work. In the first two versions all sequences of the batch have length T, there
is no projection, and time is the first axis; so they pass None as sequence lengths.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..engines.choice import Engine, Stream
from ._buffer import Attributes
from ._stack import CudnnRNNBackpropOutput, Stack


class CudnnRNNOutput(NamedTuple):
    """Outputs of `cudnn_rnn`: output [T, N, D S], output_h [L D, N, S], output_c [L D, N, H], and reserve_space, one
    array with everything that the backward op reads. If rnn_mode is not lstm, output_c is the scalar 0.

    T: steps, N: batch, L: layers, D: directions, H: units, S: the width of h (H, or the projection's width).
    """

    output: mx.array
    output_h: mx.array
    output_c: mx.array
    reserve_space: mx.array


class CudnnRNNV2Output(NamedTuple):
    """Outputs of `cudnn_rnn_v2` and `cudnn_rnn_v3`: the outputs of `cudnn_rnn`, and host_reserved, an int8 array of
    zeros. TensorFlow's ops have this output; nothing reads it here."""

    output: mx.array
    output_h: mx.array
    output_c: mx.array
    reserve_space: mx.array
    host_reserved: mx.array


def cudnn_rnn(
    input: mx.array,
    input_h: mx.array,
    input_c: mx.array,
    params: mx.array,
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    is_training: bool = True,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> CudnnRNNOutput:
    r"""Run a stack of recurrent layers: TensorFlow's CudnnRNN, which equals `torch.nn.LSTM`, `GRU` or `RNN`. Sizes: T
    steps, N sequences in the batch, I input features, H units, S the width of h (H, because this op has no projection),
    L layers, D directions.

    With weights W, R and biases bW, bR of a layer and direction, for each gate:

    .. math::

        \text{rnn:}\quad & h_t = s(W x_t + b_W + R h_{t-1} + b_R), \quad s = \text{relu or tanh} \\
        \text{lstm:}\quad & i, f, o = \sigma(W_k x_t + b_{W,k} + R_k h_{t-1} + b_{R,k}), \quad
                            c' = \tanh(W_c x_t + b_{W,c} + R_c h_{t-1} + b_{R,c}) \\
                          & c_t = f \odot c_{t-1} + i \odot c', \quad h_t = o \odot \tanh(c_t) \\
        \text{gru:}\quad  & r, u = \sigma(W_k x_t + b_{W,k} + R_k h_{t-1} + b_{R,k}), \quad
                            n = \tanh(W_n x_t + b_{W,n} + r \odot (R_n h_{t-1} + b_{R,n})) \\
                          & h_t = u \odot h_{t-1} + (1 - u) \odot n

    `mx.grad` and `cudnn_rnn_backprop` return the same gradients, in float32 and float64 bit for bit. In 16 bits they
    may differ slightly: the backward op reads gates that were rounded when they were stored in the reserve space.

    Dropout acts on the output of each layer but the last: an element becomes 0 with probability `dropout`, the others
    are divided by 1 - dropout. The random numbers come from `mlx.core.random`; their key is made of seed and seed2. So
    the same seeds drop the same elements in every call. cuDNN has a different generator, and drops different elements
    in each call. To get different elements here, pass a different seed2 in each call.

    Args:
        input (array): [T, N, I]. float32, float16, bfloat16 or float64; all other arrays must have the dtype of input.
        input_h (array): the first h, [L D, N, S]. Layers come in order; in each layer the forward direction comes
            first.
        input_c (array): the first c of an lstm, [L D, N, H]; ignored in other modes, where any value may be passed.
        params (array): all weights and biases, [params_size]; the docstring of `mlx_lstm.convert.cudnn` describes their
            order. A longer array is refused; TensorFlow's op ignores the rest of it.
        rnn_mode (str): `"lstm"`, `"gru"`, `"rnn_tanh"` or `"rnn_relu"`. Default: `"lstm"`.
        input_mode (str): `"linear_input"`: every layer multiplies its input by W. `"skip_input"`: layer 0 has no W and
            uses x_t in place of W x_t; I must equal H. `"auto_select"`: skip_input if I = H, else linear_input.
            Default: `"linear_input"`.
        direction (str): `"unidirectional"` or `"bidirectional"`. Default: `"unidirectional"`.
        dropout (float): the probability that an element is dropped, in [0, 1]. Default: 0.
        seed, seed2 (int): the 64-bit random seed of dropout consists of the low 32 bits of seed, followed by the low 32
            bits of seed2. Default: 0.
        is_training (bool): with `False` nothing is dropped, there is no reserve space, and asking for a gradient raises
            an error. Exception: in a graph that `mx.compile`, `mx.vmap` or an export traces, MLX computes the gradient
            itself. Default: `True`.
        checkpoint_every (int or str, optional): gradient checkpointing for `mx.grad`, in every layer as in
            `mlx_lstm.lstm`; it does not change which elements are dropped. The reserve space is then empty, [0], so the
            backward op cannot be called. Default: `None`.
        engine (str, optional): as in `mlx_lstm.lstm`. Default: the best for the stream's device and the sizes.
        stream (Stream or Device, optional): where to run, as for any MLX op.

    Returns:
        CudnnRNNOutput: output, with both directions side by side and each in the input's time order; output_h and
        output_c, the states after the last step of each direction; reserve_space. float16 and bfloat16 are computed as
        in `mlx_lstm.lstm`.

    Raises:
        ValueError: an argument breaks a rule, a forced engine cannot run, or a gradient was asked for with
            `is_training=False`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn, cudnn_rnn_params_size
        >>> params = mx.zeros((cudnn_rnn_params_size(2, 5, 4).item(),))  # 2 layers, 5 units, input of 4
        >>> h = c = mx.zeros((2, 3, 5))
        >>> out = cudnn_rnn(mx.ones((10, 3, 4)), h, c, params)
        >>> out.output.shape, out.output_h.shape
        ((10, 3, 5), (2, 3, 5))
    """
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2)
    stack = Stack("cudnn_rnn", "CudnnRNN", attributes, engine=engine, stream=stream)
    return CudnnRNNOutput(*stack.forward((input, input_h, input_c, params), None, is_training, checkpoint_every))


def cudnn_rnn_v2(
    input: mx.array,
    input_h: mx.array,
    input_c: mx.array,
    params: mx.array,
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    is_training: bool = True,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> CudnnRNNV2Output:
    """Run `cudnn_rnn` with the same arguments and one more output, host_reserved: TensorFlow's CudnnRNNV2.

    Returns:
        CudnnRNNV2Output: the outputs of `cudnn_rnn`, and host_reserved, int8, of shape [2] in training, else a scalar.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_v2
        >>> state = mx.zeros((1, 3, 5))
        >>> out = cudnn_rnn_v2(mx.ones((10, 3, 4)), state, state, mx.zeros((220,)))
        >>> out.output_c.shape, out.host_reserved.dtype
        ((1, 3, 5), mlx.core.int8)
    """
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2)
    stack = Stack("cudnn_rnn_v2", "CudnnRNNV2", attributes, engine=engine, stream=stream)
    outputs = stack.forward((input, input_h, input_c, params), None, is_training, checkpoint_every)
    return CudnnRNNV2Output(*outputs, mx.zeros((2,) if is_training else (), mx.int8))


def cudnn_rnn_v3(
    input: mx.array,
    input_h: mx.array,
    input_c: mx.array,
    params: mx.array,
    sequence_lengths: mx.array | Sequence[int],
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    num_proj: int = 0,
    is_training: bool = True,
    time_major: bool = True,
    batch_major_states: str = "transpose",
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> CudnnRNNV2Output:
    """Run `cudnn_rnn` with a length per sequence, a projection, and time or batch first: TensorFlow's CudnnRNNV3.

    Sizes: T steps, N sequences in the batch, I input features, H units, S the width of h (num_proj or H), L layers, D
    directions. "The original" is TensorFlow's op.

    Past the length of a sequence its output is 0, its input is never read and the gradient of its input is 0. output_h
    and output_c are the states after the last step of each sequence. The backward direction starts at this step. The
    lengths may be in any order.

    With time_major=False input is [N, T, I], output [N, T, D S], and the states are [N, L D, S] (h) and [N, L D, H]
    (c). The original documents and checks these shapes of the states, but passes the memory of the states to cuDNN as
    if they were [L D, N, S]. So with several sequences and several layers or directions, the original mixes sequences
    and layers.

    Args:
        sequence_lengths (int32 array or list): [N], each in 1..T. The range of an MLX array is not checked under
            `mx.compile`.
        num_proj (int): the width of a projected h, at most H; 0 or H for none; lstm only. Default: 0.
        time_major (bool): whether time comes before the batch. Default: `True`.
        batch_major_states (str): an addition, for time_major=False. `"transpose"`: the states of sequence n are at
            index [n], as the original documents. `"reinterpret"`: the states are the memory of [L D, N, S] in another
            shape, as the original treats them. Default: `"transpose"`.
        All other arguments: the input, first states, parameters and options of `cudnn_rnn`. input_mode="auto_select"
            means skip_input if I = H. With a projection the original compares I with num_proj instead, which
            contradicts its CudnnRNNParamsSize.

    Returns:
        CudnnRNNV2Output: the outputs of `cudnn_rnn`, and host_reserved, which is always the scalar 0.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_v3
        >>> state = mx.zeros((3, 1, 5))
        >>> out = cudnn_rnn_v3(mx.ones((3, 10, 4)), state, state, mx.ones((220,)), [10, 1, 7], time_major=False)
        >>> out.output.shape, out.output[1, 1:].sum().item()
        ((3, 10, 5), 0.0)
    """
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2, num_proj)
    stack = Stack("cudnn_rnn_v3", "CudnnRNNV3", attributes, time_major, batch_major_states, engine, stream)
    outputs = stack.forward((input, input_h, input_c, params), sequence_lengths, is_training, checkpoint_every)
    return CudnnRNNV2Output(*outputs, mx.zeros((), mx.int8))


def cudnn_rnn_backprop(
    input: mx.array,
    input_h: mx.array,
    input_c: mx.array,
    params: mx.array,
    output: mx.array,
    output_h: mx.array,
    output_c: mx.array,
    output_backprop: mx.array,
    output_h_backprop: mx.array,
    output_c_backprop: mx.array,
    reserve_space: mx.array,
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    engine: Engine | None = None,
    stream: Stream = None,
) -> CudnnRNNBackpropOutput:
    """Return the gradient of `cudnn_rnn` from its outputs: TensorFlow's CudnnRNNBackprop.

    No gate is computed again. This op does not change reserve_space (TensorFlow's op writes into it), so two calls
    return the same gradients bit for bit. If `dropout` is not 0, the dropout factors are read from reserve_space.

    Args:
        input, input_h, input_c, params: the arguments of the call of `cudnn_rnn`.
        output, output_h, output_c, reserve_space (array): the outputs of `cudnn_rnn` with is_training. output_h and
            output_c are not read.
        output_backprop, output_h_backprop, output_c_backprop (array): the gradients of the outputs, in their shapes.
            Only an lstm reads output_c_backprop.
        rnn_mode, input_mode, direction, dropout, seed, seed2: the values with which `cudnn_rnn` was called.
        engine, stream: which engine computes, and where, as in `cudnn_rnn`.

    Returns:
        CudnnRNNBackpropOutput: the gradients of input, input_h, input_c and params, in the shapes of these arrays. If
        rnn_mode is not lstm, input_c_backprop is zero.

    Raises:
        ValueError: as in `cudnn_rnn`; or reserve_space comes from a call with `is_training=False` or
            `checkpoint_every`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn, cudnn_rnn_backprop
        >>> inputs = mx.ones((10, 3, 4)), mx.zeros((1, 3, 5)), mx.zeros((1, 3, 5)), mx.ones((220,))
        >>> *outputs, reserve_space = cudnn_rnn(*inputs)
        >>> gradients = [mx.ones_like(output) for output in outputs]
        >>> cudnn_rnn_backprop(*inputs, *outputs, *gradients, reserve_space).params_backprop.shape
        (220,)
    """
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2)
    stack = Stack("cudnn_rnn_backprop", "CudnnRNN", attributes, engine=engine, stream=stream)
    inputs, outputs = (input, input_h, input_c, params), (output, output_h, output_c)
    cotangents = output_backprop, output_h_backprop, output_c_backprop
    return stack.backward(inputs, None, outputs, cotangents, reserve_space)


def cudnn_rnn_backprop_v2(
    input: mx.array,
    input_h: mx.array,
    input_c: mx.array,
    params: mx.array,
    output: mx.array,
    output_h: mx.array,
    output_c: mx.array,
    output_backprop: mx.array,
    output_h_backprop: mx.array,
    output_c_backprop: mx.array,
    reserve_space: mx.array,
    host_reserved: mx.array,
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    engine: Engine | None = None,
    stream: Stream = None,
) -> CudnnRNNBackpropOutput:
    """Return the gradient of `cudnn_rnn_v2` from its outputs: TensorFlow's CudnnRNNBackpropV2.

    Args:
        host_reserved (array): the output host_reserved of `cudnn_rnn_v2`. Its values are not used; TensorFlow's op has
            this argument.
        All other arguments: the arguments and outputs of the call of `cudnn_rnn_v2`, the gradients of its outputs, and
            engine and stream, as in `cudnn_rnn_backprop`.

    Returns:
        CudnnRNNBackpropOutput: the gradients of input, input_h, input_c and params, in the shapes of these arrays.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_backprop_v2, cudnn_rnn_v2
        >>> inputs = mx.ones((10, 3, 4)), mx.zeros((1, 3, 5)), mx.zeros((1, 3, 5)), mx.ones((220,))
        >>> *outputs, reserve_space, host_reserved = cudnn_rnn_v2(*inputs)
        >>> gradients = [mx.ones_like(output) for output in outputs]
        >>> cudnn_rnn_backprop_v2(*inputs, *outputs, *gradients, reserve_space, host_reserved).input_backprop.shape
        (10, 3, 4)
    """
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2)
    stack = Stack("cudnn_rnn_backprop_v2", "CudnnRNNV2", attributes, engine=engine, stream=stream)
    inputs, outputs = (input, input_h, input_c, params), (output, output_h, output_c)
    cotangents = output_backprop, output_h_backprop, output_c_backprop
    return stack.backward(inputs, None, outputs, cotangents, reserve_space)


def cudnn_rnn_backprop_v3(
    input: mx.array,
    input_h: mx.array,
    input_c: mx.array,
    params: mx.array,
    sequence_lengths: mx.array | Sequence[int],
    output: mx.array,
    output_h: mx.array,
    output_c: mx.array,
    output_backprop: mx.array,
    output_h_backprop: mx.array,
    output_c_backprop: mx.array,
    reserve_space: mx.array,
    host_reserved: mx.array,
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    num_proj: int = 0,
    time_major: bool = True,
    batch_major_states: str = "transpose",
    engine: Engine | None = None,
    stream: Stream = None,
) -> CudnnRNNBackpropOutput:
    """Return the gradient of `cudnn_rnn_v3` from its outputs: TensorFlow's CudnnRNNBackpropV3.

    Args:
        host_reserved (array): the output host_reserved of `cudnn_rnn_v3`. Its values are not used; TensorFlow's op has
            this argument.
        sequence_lengths, num_proj, time_major, batch_major_states: the values with which `cudnn_rnn_v3` was called.
        All other arguments: the arguments and outputs of the call of `cudnn_rnn_v3`, the gradients of its outputs, and
            engine and stream, as in `cudnn_rnn_backprop`.

    Returns:
        CudnnRNNBackpropOutput: the gradients of input, input_h, input_c and params, in the shapes of these arrays.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_backprop_v3, cudnn_rnn_v3
        >>> inputs = mx.ones((10, 3, 4)), mx.zeros((1, 3, 5)), mx.zeros((1, 3, 5)), mx.ones((220,)), [10, 1, 7]
        >>> *outputs, reserve_space, host_reserved = cudnn_rnn_v3(*inputs)
        >>> gradients = [mx.ones_like(output) for output in outputs]
        >>> cudnn_rnn_backprop_v3(*inputs, *outputs, *gradients, reserve_space, host_reserved).input_h_backprop.shape
        (1, 3, 5)
    """
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2, num_proj)
    stack = Stack("cudnn_rnn_backprop_v3", "CudnnRNNV3", attributes, time_major, batch_major_states, engine, stream)
    inputs, outputs = (input, input_h, input_c, params), (output, output_h, output_c)
    cotangents = output_backprop, output_h_backprop, output_c_backprop
    return stack.backward(inputs, sequence_lengths, outputs, cotangents, reserve_space)
