"""Run Apple's GRU and GRUGradients of MPSGraph. The docstring of `mlx_lstm.mpsgraph` describes what all ops of the
package have in common.

Each op checks its arguments, converts them to those of `mlx_lstm.gru` or `gru_gradients` (`translate`), and returns
Apple's list of results. Sizes: T time, N batch, I input, H hidden. Apple's names are in Python's spelling: source (x),
recurrent_weight (Wh), secondary_bias (bhn), z_state (zState, the gates), output_fwd (h). Apple's gate o is the gate n
of `mlx_lstm.gru`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .. import recurrence
from ..convert.mpsgraph import PROPERTIES, activation_names
from ..convert.weights import MPSGRAPH
from ..engines.choice import Engine
from ..ground.checks import check_every, fail
from .layouts import Given, check_descriptor, check_leading_ones, gradient_list, title, translated

GRADIENTS = {"source": "x", "recurrent_weight": "Wh", "input_weight": "Wx", "bias": "b"}
GRADIENTS |= {"init_state": "h0", "secondary_bias": "bhn"}
"""The arguments that have a gradient, in the order of Apple's list of gradients. Each value is the argument's name in
`mlx_lstm.recurrence`."""

WORDS = GRADIENTS | {"mask": "mask", "source_gradient": "dh", "z_state": "gates", "output_fwd": "h"}
WORDS |= {"state_gradient": "dhT"}
"""{Apple's name: name in `mlx_lstm.recurrence`} of all arrays that one of the two ops gets."""


@dataclass(kw_only=True, slots=True)
class GRUDescriptor:
    """The properties of `MPSGraphGRUDescriptor`, with its defaults.

    Args:
        reverse (bool): run from the last time step to the first; results stay aligned with the source. Ignored with
            bidirectional.
        bidirectional (bool): run both directions.
        training (bool): `gru` also returns the array that `gru_gradients` needs.
        reset_gate_first (bool): the gate order on every axis of three blocks is r, z, o, not z, r, o.
        reset_after (bool): r multiplies the recurrent product of o, not the h that enters it.
        flip_z (bool): z is the weight of o, not of h[t-1]. Apple's text on the op says so, and so do users of the op;
            Apple's text on the property says the opposite. On a Mac `python -m mlx_lstm.compare --settle`
            finds out what MPSGraph computes, by the experiment E:gru_flavours.
        update_gate_activation, reset_gate_activation, output_gate_activation (str): the activations of z, r, o, each
            one of `"none"`, `"relu"`, `"tanh"`, `"sigmoid"`, `"hard_sigmoid"`.
    """

    reverse: bool = False
    bidirectional: bool = False
    training: bool = False
    reset_gate_first: bool = False
    reset_after: bool = False
    flip_z: bool = False
    update_gate_activation: str = "sigmoid"
    reset_gate_activation: str = "sigmoid"
    output_gate_activation: str = "tanh"


def gru(
    source: mx.array,
    recurrent_weight: mx.array,
    *,
    input_weight: mx.array | None = None,
    bias: mx.array | None = None,
    init_state: mx.array | None = None,
    mask: mx.array | None = None,
    secondary_bias: mx.array | None = None,
    descriptor: GRUDescriptor | None = None,
    hard_sigmoid: str = "x/5",
    mask_layout: str = "channels",
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    r"""Run a GRU over a sequence. Apple's name of the op is
    `GRUWithSourceTensor:recurrentWeight:inputWeight:bias:initState:mask:secondaryBias:descriptor:name:`.

    .. math::

        z, r &= s_k\left((h_{t-1} \odot m) R_k^T + x_t W_k^T + b_k\right) \\
        o &= s_o\left((h_{t-1} \odot r \odot m) R_o^T + x_t W_o^T + b_o\right) \\
        h_t &= z \odot h_{t-1} + (1 - z) \odot o

    with reset_after :math:`o = s_o(((h_{t-1} \odot m) R_o^T + b_2) \odot r + x_t W_o^T + b_o)`, and with flip_z
    :math:`h_t = (1 - z) \odot h_{t-1} + z \odot o`. To compute a `torch.nn.GRU` of one layer, set reset_gate_first and
    reset_after, and pass [b_ir + b_hr, b_iz + b_hz, b_in] as bias and b_hn as secondary_bias.

    Args:
        source (array): [T, N, I], T steps, N batch items, I inputs; H units. Without input_weight [T, N, 3H], which is
            added to the gates directly.
        recurrent_weight (array): R, [3H, H]. The order of the gates in R, W and b is z, r, o; with reset_gate_first it
            is r, z, o.
        input_weight (array, optional): W, [3H, I].
        bias (array, optional): b, [3H].
        init_state (array, optional): h before the first step, [N, H] or [1, N, H]. Default: zeros.
        mask (array, optional): m, broadcastable to [N, H].
        secondary_bias (array, optional): b2, [H], with bidirectional [2H]. Refused without reset_after, where it has
            no effect.
        descriptor (GRUDescriptor, optional): Default: `GRUDescriptor()`. With bidirectional the arrays also have the
            weights of the second direction, in the layouts of `mpsgraph.lstm`.
        hard_sigmoid, mask_layout (str): the slope of hard_sigmoid and the layout of mask, which Apple's texts do not
            give, as in `mpsgraph.lstm`.
        checkpoint_every, engine, stream: gradient checkpointing, the engine, and where to run, as in `mlx_lstm.lstm`.

    Returns:
        list: h [T, N, H]; with training zState, the gates after their activations [T, N, 3H]. Both are twice as wide
        with bidirectional. Apple does not say what its zState holds, so pass it to `gru_gradients` only. On a Mac
        `python -m mlx_lstm.compare --settle` finds out what MPSGraph returns, by the experiment E:gru_flavours.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import mpsgraph
        >>> source, R, W = mx.ones((5, 2, 3)), mx.ones((12, 4)), mx.ones((12, 3))  # T 5, N 2, I 3, H 4
        >>> [array.shape for array in mpsgraph.gru(source, R, input_weight=W)]
        [(5, 2, 4)]
    """
    op, descriptor = "mpsgraph.gru", GRUDescriptor() if descriptor is None else descriptor
    arrays = {"source": source, "recurrent_weight": recurrent_weight, "input_weight": input_weight, "bias": bias}
    arrays |= {"init_state": init_state, "mask": mask, "secondary_bias": secondary_bias}
    call = translate(op, arrays, descriptor, hard_sigmoid, mask_layout)
    training, options = descriptor.training, {"engine": engine, "stream": stream}
    options |= {"checkpoint_every": check_every(op, checkpoint_every)}
    outputs = recurrence.gru(**call, return_gates=training, training=training, **options)
    return [outputs.h, *([] if outputs.gates is None else [outputs.gates])]


def gru_gradients(
    source: mx.array,
    recurrent_weight: mx.array,
    source_gradient: mx.array,
    z_state: mx.array,
    output_fwd: mx.array,
    *,
    state_gradient: mx.array | None = None,
    input_weight: mx.array | None = None,
    bias: mx.array | None = None,
    init_state: mx.array | None = None,
    mask: mx.array | None = None,
    secondary_bias: mx.array | None = None,
    descriptor: GRUDescriptor | None = None,
    hard_sigmoid: str = "x/5",
    mask_layout: str = "channels",
    leading_ones: Sequence[str] = (),
    engine: Engine | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    """Return the gradients of `gru`. Apple's name of the op is
    `GRUGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:outputFwd:stateGradient:...`. Sizes: T steps, N
    batch, H units. With bidirectional the gradients of h, z_state and output_fwd are twice as wide.

    Args:
        source, recurrent_weight, input_weight, bias, init_state, mask, secondary_bias, descriptor, hard_sigmoid,
            mask_layout, engine, stream: the values with which `gru` was called. Without input_weight only the shape of
            source is used; training is not used.
        source_gradient (array): the gradient of h, [T, N, H].
        state_gradient (array, optional): a gradient of h, [N, H] or [1, N, H], added at the last step that each
            direction computes.
        z_state (array): the second result of `gru` with training, [T, N, 3H].
        output_fwd (array): the first result of `gru`, [T, N, H].
        leading_ones (sequence of str): names out of `"bias"`, `"secondary_bias"`. The gradients of these arguments are
            returned with two more axes of size 1 in front. Apple does not say which shapes its op returns. The program
            `python -m mlx_lstm.compare --settle` finds out on a Mac. Default: none, every gradient has its argument's
            shape.

    Returns:
        list: the gradients of source, recurrent_weight, input_weight, bias, init_state, secondary_bias, in this order,
        without gradients of arguments that are None. mask has no gradient. The gradient of init_state is [N, H], as in
        `mpsgraph.lstm_gradients`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import mpsgraph
        >>> source, R, b = mx.ones((5, 2, 12)), mx.ones((12, 4)), mx.ones((12,))  # T 5, N 2, H 4; projected already
        >>> h, z = mpsgraph.gru(source, R, bias=b, descriptor=mpsgraph.GRUDescriptor(training=True))
        >>> [array.shape for array in mpsgraph.gru_gradients(source, R, mx.ones(h.shape), z, h, bias=b)]
        [(5, 2, 12), (12, 4), (12,)]
    """
    op, descriptor = "mpsgraph.gru_gradients", GRUDescriptor() if descriptor is None else descriptor
    arrays = {"source": source, "recurrent_weight": recurrent_weight, "input_weight": input_weight, "bias": bias}
    arrays |= {"init_state": init_state, "mask": mask, "secondary_bias": secondary_bias}
    saved = {"source_gradient": source_gradient, "z_state": z_state, "output_fwd": output_fwd}
    check_leading_ones(op, leading_ones, ("bias", "secondary_bias"))
    call = translate(op, arrays | saved | {"state_gradient": state_gradient}, descriptor, hard_sigmoid, mask_layout)
    gradients = recurrence.gru_gradients(**call, engine=engine, stream=stream)
    return gradient_list(gradients, GRADIENTS, arrays, leading_ones)


def translate(op: str, arrays: Given, descriptor: GRUDescriptor, hard_sigmoid: str, mask_layout: str) -> dict[str, Any]:
    """Check Apple's arguments of a GRU and convert them to arguments of `mlx_lstm.gru` or `gru_gradients`. arrays: by
    Apple's names; an array that the caller left out is None. hard_sigmoid, mask_layout: the options of `gru`."""
    check_descriptor(op, descriptor, GRUDescriptor)
    # `translated` returns the arrays by the names of `mlx_lstm.gru`; WORDS is the dict {Apple's name: this name}.
    arguments = translated(op, arrays, G=3, words=WORDS, descriptor=descriptor, mask_layout=mask_layout)
    if "bhn" in arguments and not descriptor.reset_after:
        # title: the argument's name in Python, and Apple's spelling.
        fail(op, f"{title('secondary_bias')} must be None without descriptor.reset_after", "an array")
    return arguments | {
        # MPSGRAPH["gru"]: the gate orders with reset_gate_first False and True.
        "gate_order": MPSGRAPH["gru"][descriptor.reset_gate_first],
        "activations": activation_names(op, descriptor, PROPERTIES["gru"], hard_sigmoid),  # of r, z, n
        "reset": "after" if descriptor.reset_after else "before",
        "flip_z": descriptor.flip_z,
    }
