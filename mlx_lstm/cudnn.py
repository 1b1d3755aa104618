"""TensorFlow's CudnnRNN ops, where there is no cuDNN: stacks of lstm, gru or plain layers on the recurrence.

Names, argument order, shapes and outputs are those of the raw ops; attributes are keywords. `engine` and `stream` are
ours. Sizes: T time, N batch, I input, H num_units, S the width of h (H, or num_proj), L layers, D directions, G gates.
The parameter buffer is described in `cudnn_params`.

What differs from the original: the length of params is checked; the backward ops are pure; the random numbers of
dropout are MLX's, see `cudnn_rnn`; time_major=False, see `cudnn_rnn_v3`.

The reserve space is one array of the input's dtype. Layer by layer it holds the gates [T, D G H, N] (not of a plain
layer), of an lstm c [T, D H, N], and of every layer but the last h [T, N, D S] and, with dropout, the factors [T, N, D
S] on it. Only the backward ops need it, and nothing changes it. Without training it is a scalar.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import NamedTuple

import mlx.core as mx

from . import recurrence
from .checks import check_array, check_flag, check_lengths, check_option, check_sizes, fail
from .cudnn_params import CudnnRNNParamsToCanonicalOutput as CudnnRNNParamsToCanonicalOutput
from .cudnn_params import Layout, check_attributes, check_params, join_layers, layer_arrays, layout
from .cudnn_params import cudnn_rnn_canonical_to_params as cudnn_rnn_canonical_to_params
from .cudnn_params import cudnn_rnn_canonical_to_params_v2 as cudnn_rnn_canonical_to_params_v2
from .cudnn_params import cudnn_rnn_params_size as cudnn_rnn_params_size
from .cudnn_params import cudnn_rnn_params_to_canonical as cudnn_rnn_params_to_canonical
from .cudnn_params import cudnn_rnn_params_to_canonical_v2 as cudnn_rnn_params_to_canonical_v2
from .directions import by_layer, of_layers
from .engines import check_device

Arrays = dict[str, mx.array]

# In the reserve space: as the numpy engine has them in memory, so that packing them is no transposition.
BATCH_LAST = ("gates", "c")


class CudnnRNNOutput(NamedTuple):
    """What `cudnn_rnn` returns: output [T, N, D S], output_h [L D, N, S], output_c [L D, N, H] (of an lstm, else a
    scalar 0), reserve_space."""

    output: mx.array
    output_h: mx.array
    output_c: mx.array
    reserve_space: mx.array


class CudnnRNNV2Output(NamedTuple):
    """What `cudnn_rnn_v2` and `cudnn_rnn_v3` return: as `CudnnRNNOutput`, and host_reserved, int8 zeros, which mean
    nothing here."""

    output: mx.array
    output_h: mx.array
    output_c: mx.array
    reserve_space: mx.array
    host_reserved: mx.array


class CudnnRNNBackpropOutput(NamedTuple):
    """What the backward ops return: the gradients of the four arrays, each in its array's shape."""

    input_backprop: mx.array
    input_h_backprop: mx.array
    input_c_backprop: mx.array
    params_backprop: mx.array


# --- Forward ---------------------------------------------------------------------------------------------------------


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
    engine: str | None = None,
    stream: recurrence.Stream = None,
) -> CudnnRNNOutput:
    r"""A stack of recurrent layers: TensorFlow's CudnnRNN, which equals `torch.nn.LSTM`, `GRU` or `RNN`.

    With weights W, R and biases bW, bR of a layer and direction, for each gate:

    .. math::

        \text{rnn:}\quad & h_t = s(W x_t + b_W + R h_{t-1} + b_R), \quad s = \text{relu or tanh} \\
        \text{lstm:}\quad & i, f, o = \sigma(W_k x_t + b_{W,k} + R_k h_{t-1} + b_{R,k}), \quad
                            c' = \tanh(W_c x_t + b_{W,c} + R_c h_{t-1} + b_{R,c}) \\
                          & c_t = f \odot c_{t-1} + i \odot c', \quad h_t = o \odot \tanh(c_t) \\
        \text{gru:}\quad  & r, u = \sigma(W_k x_t + b_{W,k} + R_k h_{t-1} + b_{R,k}), \quad
                            n = \tanh(W_n x_t + b_{W,n} + r \odot (R_n h_{t-1} + b_{R,n})) \\
                          & h_t = u \odot h_{t-1} + (1 - u) \odot n

    `mx.grad` gives what `cudnn_rnn_backprop` makes of the outputs: the same bits in float32 and float64; in 16 bits
    the latter reads gates that the reserve space has rounded.

    Dropout acts on what goes from one layer into the next, both directions of it: an element is dropped with
    probability `dropout`, the kept ones are divided by 1 - dropout. The choice comes from `mlx.core.random` with a key
    made of seed and seed2 and a key of it per layer: the same seeds give the same choice in every call. cuDNN's
    generator, whose numbers are others, goes on from call to call; for that, pass another seed2 every time.

    Args:
        input (array): [T, N, I]. float32, float16, bfloat16 or float64; the others have its dtype.
        input_h (array): the first h, [L D, N, S]; layer by layer, in a layer the forward direction first.
        input_c (array): of an lstm the first c, [L D, N, H]; else ignored, and may be anything.
        params (array): all weights and biases, [params_size], see `cudnn_params`.
        rnn_mode (str): `"lstm"`, `"gru"`, `"rnn_tanh"` or `"rnn_relu"`. Default: `"lstm"`.
        input_mode (str): `"linear_input"`; `"skip_input"`, where layer 0 has no W, takes x_t for every W x_t and needs
            I = H; `"auto_select"`, which is skip_input where I = H and else linear_input. Default: `"linear_input"`.
        direction (str): `"unidirectional"` or `"bidirectional"`. Default: `"unidirectional"`.
        dropout (float): the probability to drop, in [0, 1). Default: 0.
        seed, seed2 (int): their low 32 bits are the high and the low half of dropout's seed. Default: 0.
        is_training (bool): `False` drops nothing, keeps no reserve space and has no gradient (but MLX's own where
            `mx.compile`, `mx.vmap` or an export traces the graph). Default: `True`.
        engine (str, optional): as in `mlx_lstm.lstm`. Default: the best for the stream's device and the sizes.
        stream (Stream or Device, optional): where to run, as for any MLX op.

    Returns:
        CudnnRNNOutput: output, both directions side by side at their own time; output_h, output_c, the states after the
        last step processed; reserve_space. float16 and bfloat16 are computed and kept as in `mlx_lstm.lstm`.

    Raises:
        ValueError: a rule on an argument is broken, or a forced engine cannot run, or a gradient was asked for with
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
    attributes = rnn_mode, input_mode, direction, dropout, seed, seed2
    stack = Stack("cudnn_rnn", "CudnnRNN", *attributes, engine=engine, stream=stream)
    return CudnnRNNOutput(*stack.forward(input, input_h, input_c, params, None, is_training))


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
    engine: str | None = None,
    stream: recurrence.Stream = None,
) -> CudnnRNNV2Output:
    """`cudnn_rnn` with one more output, host_reserved: TensorFlow's CudnnRNNV2.

    Args:
        All: as in `cudnn_rnn`.

    Returns:
        CudnnRNNV2Output: as `cudnn_rnn`; host_reserved is int8, [2] in training and else a scalar.

    Raises:
        ValueError: as `cudnn_rnn`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_v2
        >>> state = mx.zeros((1, 3, 5))
        >>> out = cudnn_rnn_v2(mx.ones((10, 3, 4)), state, state, mx.zeros((220,)))
        >>> out.output_c.shape, out.host_reserved.dtype
        ((1, 3, 5), mlx.core.int8)
    """
    attributes = rnn_mode, input_mode, direction, dropout, seed, seed2
    stack = Stack("cudnn_rnn_v2", "CudnnRNNV2", *attributes, engine=engine, stream=stream)
    outputs = stack.forward(input, input_h, input_c, params, None, is_training)
    return CudnnRNNV2Output(*outputs, mx.zeros((2,) if is_training else (), mx.int8))


def cudnn_rnn_v3(
    input: mx.array,
    input_h: mx.array,
    input_c: mx.array,
    params: mx.array,
    sequence_lengths: recurrence.Lengths,
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
    engine: str | None = None,
    stream: recurrence.Stream = None,
) -> CudnnRNNV2Output:
    """`cudnn_rnn` with a length per item, a projection and both layouts: TensorFlow's CudnnRNNV3.

    Past its length an item's output is 0, its input is never read and its gradient is 0; output_h and output_c are
    those after its own last step, and the backward direction starts there. The lengths need no order.

    With time_major=False input and output are [N, T, I] and [N, T, D S], and input_h, input_c, output_h and output_c
    are [N, L D, S], [N, L D, H]. The original documents the latter and checks it, but passes their memory to cuDNN as
    if it were [L D, N, S]: with more than one layer or direction and more than one item, items and layers mix.

    Args:
        sequence_lengths (int32 array or list): [N], each in 1..T. The range of an array of MLX goes unchecked under
            `mx.compile`.
        num_proj (int): the width of a projected h, at most H; 0 for none; lstm only. Default: 0.
        time_major (bool): whether time comes before the batch. Default: `True`.
        batch_major_states (str): ours; the states with time_major=False are those of item n at [n], as documented,
            `"transpose"`, or the memory of [L D, N, S] in another shape, as the original treats them,
            `"reinterpret"`. Default: `"transpose"`.
        All others: as in `cudnn_rnn`. The original's auto_select compares I with num_proj where there is one, at odds
            with its CudnnRNNParamsSize; here it is always H.

    Returns:
        CudnnRNNV2Output: as `cudnn_rnn_v2`; host_reserved is always a scalar.

    Raises:
        ValueError: as `cudnn_rnn`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_v3
        >>> state = mx.zeros((3, 1, 5))
        >>> out = cudnn_rnn_v3(mx.ones((3, 10, 4)), state, state, mx.ones((220,)), [10, 1, 7], time_major=False)
        >>> out.output.shape, out.output[1, 1:].sum().item()
        ((3, 10, 5), 0.0)
    """
    attributes = rnn_mode, input_mode, direction, dropout, seed, seed2, num_proj, time_major, batch_major_states
    stack = Stack("cudnn_rnn_v3", "CudnnRNNV3", *attributes, engine, stream)
    outputs = stack.forward(input, input_h, input_c, params, sequence_lengths, is_training)
    return CudnnRNNV2Output(*outputs, mx.zeros((), mx.int8))


# --- Backward --------------------------------------------------------------------------------------------------------


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
    engine: str | None = None,
    stream: recurrence.Stream = None,
) -> CudnnRNNBackpropOutput:
    """The gradient of `cudnn_rnn` from its outputs: TensorFlow's CudnnRNNBackprop.

    Nothing is computed again, and reserve_space stays as it is: two calls give the same bits. (The original writes into
    it.) Whether there is dropout decides `dropout`; its factors are in reserve_space.

    Args:
        input, input_h, input_c, params: as `cudnn_rnn` had them.
        output, output_h, output_c, reserve_space (array): what it returned, with is_training. output_h and output_c say
            nothing new and are not read.
        output_backprop, output_h_backprop, output_c_backprop (array): the gradients of the outputs, in their shapes;
            the last is ignored where there is no c.
        The attributes, engine, stream: as `cudnn_rnn` had them.

    Returns:
        CudnnRNNBackpropOutput: the gradients; that of params packed as params. Without a c, input_c_backprop is zero.

    Raises:
        ValueError: as `cudnn_rnn`; or reserve_space is that of `is_training=False`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn, cudnn_rnn_backprop
        >>> inputs = mx.ones((10, 3, 4)), mx.zeros((1, 3, 5)), mx.zeros((1, 3, 5)), mx.ones((220,))
        >>> *outputs, reserve_space = cudnn_rnn(*inputs)
        >>> gradients = [mx.ones_like(output) for output in outputs]
        >>> cudnn_rnn_backprop(*inputs, *outputs, *gradients, reserve_space).params_backprop.shape
        (220,)
    """
    attributes = rnn_mode, input_mode, direction, dropout, seed, seed2
    stack = Stack("cudnn_rnn_backprop", "CudnnRNN", *attributes, engine=engine, stream=stream)
    cotangents = output_backprop, output_h_backprop, output_c_backprop
    outputs = output, output_h, output_c
    return stack.backward(input, input_h, input_c, params, None, *outputs, cotangents, reserve_space)


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
    engine: str | None = None,
    stream: recurrence.Stream = None,
) -> CudnnRNNBackpropOutput:
    """The gradient of `cudnn_rnn_v2` from its outputs: TensorFlow's CudnnRNNBackpropV2.

    Args:
        host_reserved (array): what `cudnn_rnn_v2` returned; not read.
        All others: as in `cudnn_rnn_backprop`.

    Returns:
        CudnnRNNBackpropOutput: as `cudnn_rnn_backprop`.

    Raises:
        ValueError: as `cudnn_rnn_backprop`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_backprop_v2, cudnn_rnn_v2
        >>> inputs = mx.ones((10, 3, 4)), mx.zeros((1, 3, 5)), mx.zeros((1, 3, 5)), mx.ones((220,))
        >>> *outputs, reserve_space, host_reserved = cudnn_rnn_v2(*inputs)
        >>> gradients = [mx.ones_like(output) for output in outputs]
        >>> cudnn_rnn_backprop_v2(*inputs, *outputs, *gradients, reserve_space, host_reserved).input_backprop.shape
        (10, 3, 4)
    """
    attributes = rnn_mode, input_mode, direction, dropout, seed, seed2
    stack = Stack("cudnn_rnn_backprop_v2", "CudnnRNNV2", *attributes, engine=engine, stream=stream)
    cotangents = output_backprop, output_h_backprop, output_c_backprop
    outputs = output, output_h, output_c
    return stack.backward(input, input_h, input_c, params, None, *outputs, cotangents, reserve_space)


def cudnn_rnn_backprop_v3(
    input: mx.array,
    input_h: mx.array,
    input_c: mx.array,
    params: mx.array,
    sequence_lengths: recurrence.Lengths,
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
    engine: str | None = None,
    stream: recurrence.Stream = None,
) -> CudnnRNNBackpropOutput:
    """The gradient of `cudnn_rnn_v3` from its outputs: TensorFlow's CudnnRNNBackpropV3.

    Args:
        host_reserved (array): what `cudnn_rnn_v3` returned; not read.
        sequence_lengths, num_proj, time_major, batch_major_states: as `cudnn_rnn_v3` had them.
        All others: as in `cudnn_rnn_backprop`.

    Returns:
        CudnnRNNBackpropOutput: as `cudnn_rnn_backprop`, each gradient in its array's layout.

    Raises:
        ValueError: as `cudnn_rnn_backprop`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_backprop_v3, cudnn_rnn_v3
        >>> inputs = mx.ones((10, 3, 4)), mx.zeros((1, 3, 5)), mx.zeros((1, 3, 5)), mx.ones((220,)), [10, 1, 7]
        >>> *outputs, reserve_space, host_reserved = cudnn_rnn_v3(*inputs)
        >>> gradients = [mx.ones_like(output) for output in outputs]
        >>> cudnn_rnn_backprop_v3(*inputs, *outputs, *gradients, reserve_space, host_reserved).input_h_backprop.shape
        (1, 3, 5)
    """
    attributes = rnn_mode, input_mode, direction, dropout, seed, seed2, num_proj, time_major, batch_major_states
    stack = Stack("cudnn_rnn_backprop_v3", "CudnnRNNV3", *attributes, engine, stream)
    cotangents = output_backprop, output_h_backprop, output_c_backprop
    outputs = output, output_h, output_c
    return stack.backward(input, input_h, input_c, params, sequence_lengths, *outputs, cotangents, reserve_space)


# --- From a call to the recurrence, layer by layer -------------------------------------------------------------------


class Stack(NamedTuple):
    """A call's attributes, as the caller gave them: checks them with the arrays and runs the layers.

    Inside, all is time-major, and states are [L, N, D S]: both directions of a layer side by side, as the recurrence
    has them.
    """

    op: str
    original: str
    rnn_mode: str
    input_mode: str
    direction: str
    dropout: float
    seed: int
    seed2: int
    num_proj: int = 0
    time_major: bool = True
    batch_major_states: str = "transpose"
    engine: str | None = None
    stream: recurrence.Stream = None

    def forward(
        self,
        input: mx.array,
        input_h: mx.array,
        input_c: mx.array,
        params: mx.array,
        sequence_lengths: recurrence.Lengths,
        is_training: bool,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """(output, output_h, output_c, reserve_space)."""
        check_flag(self.op, "is_training", is_training)
        with recurrence.on(self.stream):
            where, lengths = self.check(input, input_h, input_c, params, sequence_lengths)
            x, states = self.time_first(input), self.by_layer(where, input_h, input_c)
            factors = self.dropout_factors(where, x) if is_training else {}
            last, kept = [], []
            for layer, weights in enumerate(layer_arrays(where, params)):
                arrays = layer_arguments(where, layer, weights, x, states)
                out = run_layer(where, arrays, self.options(where, lengths), is_training)
                last.append(out)
                x = out.h * factors[layer] if layer in factors else out.h
                kept.append(out._asdict() | {"factors": factors.get(layer)})
            output, output_h = self.time_first(x), self.in_layout(where, [out.hT for out in last])
            lstm = where.mode == "lstm"
            output_c = self.in_layout(where, [out.cT for out in last]) if lstm else mx.zeros((), input.dtype)
            if is_training:
                return output, output_h, output_c, pack(self.reserved(where, *x.shape[:2]), kept, input.dtype)
            # A plain graph can be exported.
            if not recurrence.is_traced([input, input_h, params], wait=False):
                output, output_h, output_c = without_gradient(self.original, output, output_h, output_c)
            return output, output_h, output_c, mx.zeros((), input.dtype)

    def backward(
        self,
        input: mx.array,
        input_h: mx.array,
        input_c: mx.array,
        params: mx.array,
        sequence_lengths: recurrence.Lengths,
        output: mx.array,
        output_h: mx.array,
        output_c: mx.array,
        cotangents: tuple[mx.array, mx.array, mx.array],
        reserve_space: mx.array,
    ) -> CudnnRNNBackpropOutput:
        """The gradients of the four arrays, from those of output, output_h and output_c."""
        with recurrence.on(self.stream):
            where, lengths = self.check(input, input_h, input_c, params, sequence_lengths)
            self.check_outputs(where, input, (output, output_h, output_c), cotangents)
            x, states = self.time_first(input), self.by_layer(where, input_h, input_c)
            saved = self.unpack(where, reserve_space, *x.shape[:2], x.dtype)
            saved[-1]["h"] = self.time_first(output)
            dh, dlast = self.time_first(cotangents[0]), self.by_layer(where, *cotangents[1:])
            weights, found = layer_arrays(where, params), [None] * where.L
            for layer in reversed(range(where.L)):
                below = saved[layer - 1] if layer else {"h": x}
                inputs = below["h"] * below["factors"] if "factors" in below else below["h"]
                arrays = layer_arguments(where, layer, weights[layer], inputs, states)
                given = {f"d{name}": rows[layer] for name, rows in dlast.items()} | {"dh": dh}
                given |= {name: value for name, value in saved[layer].items() if name != "factors"}
                found[layer] = run_layer_backward(where, arrays, self.options(where, lengths), given)
                dh = found[layer]["x"] * below["factors"] if "factors" in below else found[layer]["x"]
            if where.skip:
                dh = dh.reshape(*dh.shape[:2], -1, where.H).sum(axis=2)
            dh0 = self.in_layout(where, [gradients["h0"] for gradients in found])
            if where.mode == "lstm":
                dc0 = self.in_layout(where, [gradients["c0"] for gradients in found])
            else:
                dc0 = mx.zeros_like(input_c) if isinstance(input_c, mx.array) else mx.zeros((), input.dtype)
            dparams = join_layers(where, [buffer_gradients(where, gradients) for gradients in found])
            return CudnnRNNBackpropOutput(self.time_first(dh), dh0, dc0, dparams)

    # Layouts

    def time_first(self, sequence: mx.array) -> mx.array:
        """[T, N, .] out of the caller's layout, and back."""
        return sequence if self.time_major else mx.swapaxes(sequence, 0, 1)

    def by_layer(self, where: Layout, h: mx.array, c: mx.array) -> Arrays:
        """hT and, of an lstm, cT: [L, N, D S] and [L, N, D H] out of states in the caller's layout."""
        states = {"hT": h, "cT": c} if where.mode == "lstm" else {"hT": h}
        N = h.shape[1 if self.time_major else 0]
        found = {}
        for name, state in states.items():
            if not self.time_major and self.batch_major_states == "transpose":
                state = mx.swapaxes(state, 0, 1)
            found[name] = by_layer(state.reshape(where.L * where.D, N, -1), where.D)
        return found

    def in_layout(self, where: Layout, rows: list[mx.array]) -> mx.array:
        """States in the caller's layout, out of each layer's [N, D S]."""
        state = of_layers(rows, where.D)
        if self.time_major:
            return state
        if self.batch_major_states == "transpose":
            return mx.swapaxes(state, 0, 1)
        return state.reshape(state.shape[1], where.L * where.D, -1)

    def reserved(self, where: Layout, T: int, N: int) -> list[dict[str, tuple[int, int, int]]]:
        """The reserve space's arrays in their order: of each layer, shapes by name."""
        widths = {} if where.mode.startswith("rnn") else {"gates": where.D * where.G * where.H}
        if where.mode == "lstm":
            widths["c"] = where.D * where.H
        between = {"h": where.D * where.S} | ({"factors": where.D * where.S} if self.dropout else {})
        layers = [widths | between] * (where.L - 1) + [widths]
        return [{n: (T, w, N) if n in BATCH_LAST else (T, N, w) for n, w in layer.items()} for layer in layers]

    def unpack(self, where: Layout, reserve_space: mx.array, T: int, N: int, dtype: mx.Dtype) -> list[Arrays]:
        """Each layer's arrays in the reserve space, as views."""
        if isinstance(reserve_space, mx.array) and reserve_space.ndim == 0:
            raise ValueError(f"To use {self.original} in gradients, is_training must be set to True.")
        shapes = self.reserved(where, T, N)
        sizes = [prod(shape) for layer in shapes for shape in layer.values()]
        check_array(self.op, "reserve_space", reserve_space, [sum(sizes)], dtype)
        parts = iter(mx.split(reserve_space, list(accumulate(sizes))[:-1]) if sizes else ())
        arrays = [{name: next(parts).reshape(shape) for name, shape in layer.items()} for layer in shapes]
        return [{n: mx.swapaxes(a, 1, 2) if n in BATCH_LAST else a for n, a in layer.items()} for layer in arrays]

    def options(self, where: Layout, lengths: mx.array | None) -> dict[str, object]:
        """What every layer is run with."""
        options = {"bidirectional": where.D == 2, "lengths": lengths, "engine": self.engine}
        return options | ({"activation": where.mode.removeprefix("rnn_")} if where.G == 1 else {})

    def dropout_factors(self, where: Layout, x: mx.array) -> Arrays:
        """By layer, all but the last: what its h [T, N, D S] is multiplied with on the way up, 0 or 1 / (1 - p)."""
        if not self.dropout or where.L == 1:
            return {}
        high, low = (int(seed) % 2**32 for seed in (self.seed, self.seed2))
        keep = 1 - float(self.dropout)
        shape, scale = (*x.shape[:2], where.D * where.S), mx.array(1 / keep, x.dtype)
        keys = mx.random.split(mx.random.key(high << 32 | low), where.L - 1)
        kept = [mx.random.bernoulli(keep, shape, key) for key in keys]
        return {layer: mask.astype(x.dtype) * scale for layer, mask in enumerate(kept)}

    # Checks

    def check(
        self, input: object, input_h: object, input_c: object, params: object, sequence_lengths: recurrence.Lengths
    ) -> tuple[Layout, mx.array | None]:
        """What the arrays are, once they and the attributes are found right; the lengths, None where all are T."""
        op = self.op
        check_attributes(op, *self[2:8])
        check_flag(op, "time_major", self.time_major)
        check_option(op, "batch_major_states", self.batch_major_states, ("transpose", "reinterpret"))
        check_array(op, "input", input, ["T", "N", "I"] if self.time_major else ["N", "T", "I"])
        check_sizes(op, "input", input)
        check_device(op, input.dtype, recurrence.current_device())
        T, N, I = self.sizes(input)
        D = 1 + (self.direction == "bidirectional")
        first = input_c if self.rnn_mode == "lstm" else input_h
        name = "input_c" if self.rnn_mode == "lstm" else "input_h"
        check_array(op, name, first, ["L * D", N, "H"] if self.time_major else [N, "L * D", "H"], input.dtype)
        check_sizes(op, name, first)
        LD, H = first.shape[0 if self.time_major else 1], first.shape[2]
        if LD % D:
            fail(
                op, f"{name} must have two rows per layer with direction='bidirectional'", f"shape {list(first.shape)}"
            )
        where = layout(op, LD // D, H, I, self.rnn_mode, self.input_mode, self.direction, self.num_proj)
        check_array(op, "input_h", input_h, self.state_shape(where, N, where.S), input.dtype)
        check_params(op, where, params, input.dtype)
        if self.original != "CudnnRNNV3":
            return where, None
        traced = isinstance(sequence_lengths, mx.array) and recurrence.is_traced([sequence_lengths], wait=True)
        lengths = check_lengths(op, sequence_lengths, N, T, traced=traced, name="sequence_lengths", shortest=1)
        return where, lengths if traced or (lengths < T).any().item() else None

    def check_outputs(
        self, where: Layout, input: mx.array, outputs: tuple[object, ...], cotangents: tuple[object, ...]
    ) -> None:
        """A forward pass's outputs and their gradients have the outputs' shapes."""
        T, N, _ = self.sizes(input)
        width = where.D * where.S
        shapes = {"output": [T, N, width] if self.time_major else [N, T, width]}
        shapes["output_h"] = self.state_shape(where, N, where.S)
        if where.mode == "lstm":
            shapes["output_c"] = self.state_shape(where, N, where.H)
        for suffix, arrays in (("", outputs), ("_backprop", cotangents)):
            for (name, shape), array in zip(shapes.items(), arrays, strict=False):
                check_array(self.op, name + suffix, array, shape, input.dtype)

    def sizes(self, input: mx.array) -> tuple[int, int, int]:
        """(T, N, I)."""
        first, second, I = input.shape
        return (first, second, I) if self.time_major else (second, first, I)

    def state_shape(self, where: Layout, N: int, width: int) -> list[int]:
        """Of a state in the caller's layout."""
        rows = where.L * where.D
        return [rows, N, width] if self.time_major else [N, rows, width]


def pack(shapes: list[dict], kept: list[dict], dtype: mx.Dtype) -> mx.array:
    """The reserve space, out of each layer's arrays by name."""
    named = [(name, arrays[name]) for layer, arrays in zip(shapes, kept, strict=True) for name in layer]
    parts = [(mx.swapaxes(array, 1, 2) if name in BATCH_LAST else array).reshape(-1) for name, array in named]
    return mx.concatenate(parts) if parts else mx.zeros((0,), dtype)


def layer_arguments(where: Layout, layer: int, weights: Arrays, x: mx.array, states: Arrays) -> dict:
    """A layer's arrays as the recurrence names them. The recurrence has one bias, but for a GRU's candidate."""
    bW, bR, H = weights["bW"], weights["bR"], where.H
    arrays = {name: weights[name] for name in ("Wh", "Wp") if name in weights}
    if where.mode == "gru":
        arrays["bhn"] = bR[:, 2 * H :].reshape(-1)
        arrays["b"] = mx.concatenate([bW[:, : 2 * H] + bR[:, : 2 * H], bW[:, 2 * H :]], axis=1).reshape(-1)
    else:
        arrays["b"] = (bW + bR).reshape(-1)
    skips = where.skip and layer == 0
    arrays |= {"x": mx.tile(x, (1, 1, where.D * where.G)) if skips else x, "Wx": None if skips else weights["Wx"]}
    return arrays | {name: states[last][layer] for name, last in (("h0", "hT"), ("c0", "cT")) if last in states}


def run_layer(where: Layout, arrays: dict, options: dict, is_training: bool) -> NamedTuple:
    """The recurrence's outputs."""
    ops = {"lstm": recurrence.lstm, "gru": recurrence.gru}
    keeps = is_training and where.G > 1
    return ops.get(where.mode, recurrence.rnn)(**arrays, **options, return_gates=keeps, training=is_training)


def run_layer_backward(where: Layout, arrays: dict, options: dict, given: Arrays) -> Arrays:
    """The recurrence's gradients, from what it kept and the gradients of its outputs."""
    ops = {"lstm": recurrence.lstm_gradients, "gru": recurrence.gru_gradients}
    return ops.get(where.mode, recurrence.rnn_gradients)(**arrays, **options, **given)


def buffer_gradients(where: Layout, gradients: Arrays) -> Arrays:
    """A layer's gradients as the buffer has its arrays: bW and bR were added, all but those of a GRU's candidate."""
    db = gradients["b"].reshape(where.D, -1)
    found = {name: gradients[name] for name in ("Wx", "Wh", "Wp") if name in gradients} | {"bW": db, "bR": db}
    if where.mode == "gru":
        found["bR"] = mx.concatenate([db[:, : 2 * where.H], gradients["bhn"].reshape(where.D, -1)], axis=1)
    return found


def without_gradient(original: str, *arrays: mx.array) -> tuple[mx.array, ...]:
    """The arrays, whose gradient is TensorFlow's refusal."""

    @mx.custom_function
    def identity(*arrays: mx.array) -> tuple[mx.array, ...]:
        return arrays

    @identity.vjp
    def refuse(primals, cotangents, outputs):
        raise ValueError(f"To use {original} in gradients, is_training must be set to True.")

    return identity(*arrays)
