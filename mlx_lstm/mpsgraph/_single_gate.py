"""Run Apple's singleGateRNN and singleGateRNNGradients of MPSGraph. The docstring of `mlx_lstm.mpsgraph` describes
what all ops of the package have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .. import recurrence
from ..checks import check_every, check_option
from ..convert.mpsgraph import activation_names
from ..engines.choice import Engine
from .layouts import Given, check_descriptor, check_leading_ones, gradient_list, translated

GRADIENTS = {"source": "x", "recurrent_weight": "Wh", "input_weight": "Wx", "bias": "b", "init_state": "h0"}
"""The arguments that have a gradient, in the order of Apple's list of gradients. Each value is the argument's name
in `mlx_lstm.recurrence`."""

WORDS = GRADIENTS | {"mask": "mask", "source_gradient": "dh", "state_gradient": "dhT"}
Z_STATES = {"preactivations": "gates", "activations": "h"}
"""What Apple's zState, an array that the gradient op reads, may hold. Each value is the name of the output of
`recurrence.rnn` with these values."""


@dataclass(kw_only=True)
class SingleGateRNNDescriptor:
    """The properties of `MPSGraphSingleGateRNNDescriptor`, with its defaults.

    Args:
        reverse, bidirectional (bool): as in `LSTMDescriptor`.
        training (bool): `single_gate_rnn` also returns the array that `single_gate_rnn_gradients` needs.
        activation (str): the activation of h, as in `LSTMDescriptor`. Default: `"relu"`, as in Apple's descriptor.
    """

    reverse: bool = False
    bidirectional: bool = False
    training: bool = False
    activation: str = "relu"


def single_gate_rnn(
    source: mx.array,
    recurrent_weight: mx.array,
    *,
    input_weight: mx.array | None = None,
    bias: mx.array | None = None,
    init_state: mx.array | None = None,
    mask: mx.array | None = None,
    descriptor: SingleGateRNNDescriptor | None = None,
    z_state_holds: str = "preactivations",
    hard_sigmoid: str = "x/5",
    mask_layout: str = "channels",
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    r"""Run a plain RNN over a sequence. Apple's name of the op is
    `singleGateRNNWithSourceTensor:recurrentWeight:inputWeight:bias:initState:mask:descriptor:name:`.

    .. math::

        z_t &= x_t W^T + (h_{t-1} \odot m) R^T + b \\
        h_t &= s(z_t)

    Args:
        source, recurrent_weight, input_weight, bias, init_state, mask: as in `mpsgraph.lstm`, with H for every 4H and
            2H for every 8H.
        descriptor (SingleGateRNNDescriptor, optional): Default: `SingleGateRNNDescriptor()`.
        z_state_holds (str): what zState holds. `"preactivations"`: z, as in the formula. `"activations"`: s(z), as in
            the LSTM. The experiment E:single_gate decides, see `mlx_lstm.mpsgraph`.
        hard_sigmoid, mask_layout, checkpoint_every, engine, stream: as in `mpsgraph.lstm`.

    Returns:
        list: h [T, N, H]; with training zState [T, N, H]. Both are twice as wide with bidirectional.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import mpsgraph
        >>> source, R, W = mx.ones((5, 2, 3)), mx.ones((4, 4)), mx.ones((4, 3))  # T 5, N 2, I 3, H 4
        >>> [array.shape for array in mpsgraph.single_gate_rnn(source, R, input_weight=W)]
        [(5, 2, 4)]
    """
    op, descriptor = "mpsgraph.single_gate_rnn", SingleGateRNNDescriptor() if descriptor is None else descriptor
    arrays = {"source": source, "recurrent_weight": recurrent_weight, "input_weight": input_weight, "bias": bias}
    arrays |= {"init_state": init_state, "mask": mask}
    call = translate(op, arrays, descriptor, z_state_holds, hard_sigmoid, mask_layout)
    training, options = descriptor.training, {"engine": engine, "stream": stream}
    options |= {"checkpoint_every": check_every(op, checkpoint_every)}
    outputs = recurrence.rnn(**call, return_gates=training, training=training, **options)
    return [outputs.h, *([getattr(outputs, Z_STATES[z_state_holds])] if training else [])]


def single_gate_rnn_gradients(
    source: mx.array,
    recurrent_weight: mx.array,
    source_gradient: mx.array,
    z_state: mx.array,
    *,
    state_gradient: mx.array | None = None,
    input_weight: mx.array | None = None,
    bias: mx.array | None = None,
    init_state: mx.array | None = None,
    mask: mx.array | None = None,
    descriptor: SingleGateRNNDescriptor | None = None,
    z_state_holds: str = "preactivations",
    hard_sigmoid: str = "x/5",
    mask_layout: str = "channels",
    leading_ones: Sequence[str] = (),
    engine: Engine | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    """Return the gradients of `single_gate_rnn`. Apple's name of the op is
    `singleGateRNNGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:stateGradient:...`.

    Args:
        source, recurrent_weight, input_weight, bias, init_state, mask, descriptor, z_state_holds, hard_sigmoid,
            mask_layout, engine, stream: the arguments of `single_gate_rnn`. Without input_weight only the shape of
            source is used; training is not used.
        source_gradient, state_gradient: as in `mpsgraph.lstm_gradients`.
        z_state (array): the second result of `single_gate_rnn` with training, [T, N, H]; twice as wide with
            bidirectional.
        leading_ones (sequence of str): `("bias",)` if the gradient of bias is to get two leading axes of 1.
            The experiment E:single_gate decides, see `mlx_lstm.mpsgraph`. Default: none, every gradient has its
            argument's shape.

    Returns:
        list: the gradients of source, recurrent_weight, input_weight, bias, init_state, in this order, without
        gradients of arguments that are None. mask has no gradient. The gradient of init_state is [N, H], as in
        `mpsgraph.lstm_gradients`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import mpsgraph
        >>> source, R, b = mx.ones((5, 2, 4)), mx.ones((4, 4)), mx.ones((4,))  # T 5, N 2, H 4; projected already
        >>> descriptor = mpsgraph.SingleGateRNNDescriptor(training=True)
        >>> h, z = mpsgraph.single_gate_rnn(source, R, bias=b, descriptor=descriptor)
        >>> [array.shape for array in mpsgraph.single_gate_rnn_gradients(source, R, mx.ones(h.shape), z, bias=b)]
        [(5, 2, 4), (4, 4), (4,)]
    """
    op = "mpsgraph.single_gate_rnn_gradients"
    descriptor = SingleGateRNNDescriptor() if descriptor is None else descriptor
    arrays = {"source": source, "recurrent_weight": recurrent_weight, "input_weight": input_weight, "bias": bias}
    arrays |= {"init_state": init_state, "mask": mask}
    saved = {"source_gradient": source_gradient, "z_state": z_state, "state_gradient": state_gradient}
    check_leading_ones(op, leading_ones, ("bias",))
    call = translate(op, arrays | saved, descriptor, z_state_holds, hard_sigmoid, mask_layout)
    gradients = recurrence.rnn_gradients(**call, engine=engine, stream=stream)
    return gradient_list(gradients, GRADIENTS, arrays, leading_ones)


def translate(
    op: str, arrays: Given, descriptor: SingleGateRNNDescriptor, z_state_holds: str, hard_sigmoid: str, mask_layout: str
) -> dict[str, Any]:
    """Check Apple's arguments of a single-gate RNN and convert them to arguments of `mlx_lstm.recurrence`."""
    check_descriptor(op, descriptor, SingleGateRNNDescriptor)
    check_option(op, "z_state_holds", z_state_holds, tuple(Z_STATES))
    words = WORDS | {"z_state": Z_STATES[z_state_holds]}
    (activation,) = activation_names(op, descriptor, ["activation"], hard_sigmoid)
    return translated(op, arrays, 1, words, descriptor, mask_layout) | {"activation": activation}
