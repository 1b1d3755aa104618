"""Run Apple's singleGateRNN and singleGateRNNGradients of MPSGraph. The docstring of `mlx_lstm.mpsgraph` describes
what all ops of the package have in common.

Each op checks its arguments, converts them to those of `mlx_lstm.rnn` or `rnn_gradients` (`translate`), and returns
Apple's list of results. Sizes: T time, N batch, I input, H hidden. Apple's names are in Python's spelling: source (x),
recurrent_weight (Wh), z_state (zState, an array that the gradient op reads).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .. import recurrence
from ..convert.mpsgraph import activation_names
from ..engines.choice import Engine
from ..engines.tracing import distinct
from ..ground.checks import check_every, check_option
from .layouts import Given, check_descriptor, check_leading_ones, gradient_list, translated

GRADIENTS = {"source": "x", "recurrent_weight": "Wh", "input_weight": "Wx", "bias": "b", "init_state": "h0"}
"""The arguments that have a gradient, in the order of Apple's list of gradients. Each value is the argument's name
in `mlx_lstm.recurrence`."""

WORDS = GRADIENTS | {"mask": "mask", "source_gradient": "dh", "state_gradient": "dhT"}
"""{Apple's name: name in `mlx_lstm.recurrence`} of all arrays that one of the two ops gets, except z_state."""

Z_STATES = {"preactivations": "gates", "activations": "h"}
"""What Apple's zState, an array that the gradient op reads, may hold. Each value is the name of the output of
`recurrence.rnn` with these values."""


@dataclass(kw_only=True, slots=True)
class SingleGateRNNDescriptor:
    """The properties of `MPSGraphSingleGateRNNDescriptor`, with its defaults.

    Args:
        reverse (bool): run from the last time step to the first; results stay aligned with the source. Ignored with
            bidirectional.
        bidirectional (bool): run both directions.
        training (bool): `single_gate_rnn` also returns the array that `single_gate_rnn_gradients` needs.
        activation (str): the activation of h: `"none"`, `"relu"`, `"tanh"`, `"sigmoid"` or `"hard_sigmoid"`. Default:
            `"relu"`, as in Apple's descriptor.
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

    with the descriptor's activation s. Training also returns zState, which holds z or h for the gradient op.

    Args:
        source (array): [T, N, I], T steps, N batch items, I inputs; H units. Without input_weight [T, N, H], which is
            added to z directly.
        recurrent_weight (array): R, [H, H].
        input_weight (array, optional): W, [H, I].
        bias (array, optional): b, [H].
        init_state (array, optional): h before the first step, [N, H] or [1, N, H]. Default: zeros.
        mask (array, optional): m, broadcastable to [N, H].
        descriptor (SingleGateRNNDescriptor, optional): Default: `SingleGateRNNDescriptor()`. With bidirectional the
            arrays also have the weights of the second direction, in the layouts of `mpsgraph.lstm`.
        z_state_holds (str): what zState holds. `"preactivations"`: z, as in the formula. `"activations"`: s(z), as in
            the LSTM. Apple's texts do not say which. On a Mac `python -m mlx_lstm.compare --settle` finds out, by the
            experiment E:single_gate.
        hard_sigmoid, mask_layout (str): the slope of hard_sigmoid and the layout of mask, which Apple's texts do not
            give, as in `mpsgraph.lstm`.
        checkpoint_every, engine, stream: gradient checkpointing, the engine, and where to run, as in `mlx_lstm.lstm`.

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
    # zState may be h, which is also the first result. `distinct` returns it as another array, because `mx.vjp` needs
    # two results to be two arrays.
    return [outputs.h, *(distinct([getattr(outputs, Z_STATES[z_state_holds])]) if training else [])]


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
    `singleGateRNNGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:stateGradient:...`. Sizes: T steps, N
    batch, H units. With bidirectional the gradients of h and z_state are twice as wide.

    Args:
        source, recurrent_weight, input_weight, bias, init_state, mask, descriptor, z_state_holds, hard_sigmoid,
            mask_layout, engine, stream: the values with which `single_gate_rnn` was called. Without input_weight only
            the shape of source is used; training is not used.
        source_gradient (array): the gradient of h, [T, N, H].
        state_gradient (array, optional): a gradient of h, [N, H] or [1, N, H], added at the last step that each
            direction computes.
        z_state (array): the second result of `single_gate_rnn` with training, [T, N, H].
        leading_ones (sequence of str): `("bias",)` returns the gradient of bias with two more axes of size 1 in front.
            Apple does not say which shape its op returns. The program `python -m mlx_lstm.compare --settle` finds out
            on a Mac. Default: none, every gradient has its argument's shape.

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
    """Check Apple's arguments of a single-gate RNN and convert them to arguments of `mlx_lstm.rnn` or `rnn_gradients`.
    arrays: by Apple's names; an array that the caller left out is None. z_state_holds, hard_sigmoid, mask_layout: the
    options of `single_gate_rnn`."""
    check_descriptor(op, descriptor, SingleGateRNNDescriptor)
    check_option(op, "z_state_holds", z_state_holds, tuple(Z_STATES))
    # words: {Apple's name of an array: its name in `mlx_lstm.rnn`}. z_state becomes the argument "gates"
    # (preactivations) or "h" (activations) of `rnn_gradients`.
    words = WORDS | {"z_state": Z_STATES[z_state_holds]}
    (activation,) = activation_names(op, descriptor, ["activation"], hard_sigmoid)
    arguments = translated(op, arrays, G=1, words=words, descriptor=descriptor, mask_layout=mask_layout)
    return arguments | {"activation": activation}
