"""Run Apple's LSTM and LSTMGradients of MPSGraph. The docstring of `mlx_lstm.mpsgraph` describes what all ops of the
package have in common.

Each op checks its arguments, converts them to those of `mlx_lstm.lstm` or `lstm_gradients` (`translate`), and returns
Apple's list of results. Sizes: T time, N batch, I input, H hidden. Apple's names are in Python's spelling: source (x),
recurrent_weight (Wh), z_state (zState, the gates), cell_output_fwd (c). Apple's gate z is the gate g of
`mlx_lstm.lstm`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .. import recurrence
from ..convert.mpsgraph import PROPERTIES, activation_names
from ..convert.weights import MPSGRAPH
from ..engines.choice import Engine
from ..ground.checks import check_every, check_flag, check_option
from .layouts import Given, check_descriptor, check_leading_ones, gradient_list, translated

GRADIENTS = {"source": "x", "recurrent_weight": "Wh", "input_weight": "Wx", "bias": "b"}
GRADIENTS |= {"peephole": "peephole", "init_state": "h0", "init_cell": "c0"}
"""The arguments that have a gradient, in the order of Apple's list of gradients. Each value is the argument's name
in `mlx_lstm.recurrence`."""

WORDS = GRADIENTS | {"mask": "mask", "source_gradient": "dh", "z_state": "gates", "cell_output_fwd": "c"}
WORDS |= {"state_gradient": "dhT", "cell_gradient": "dcT"}
"""{Apple's name: name in `mlx_lstm.recurrence`} of all arrays that one of the two ops gets."""


@dataclass(kw_only=True, slots=True)
class LSTMDescriptor:
    """The ten properties of `MPSGraphLSTMDescriptor`, with its defaults.

    Args:
        reverse (bool): run from the last time step to the first; results stay aligned with the source. Ignored with
            bidirectional.
        bidirectional (bool): run both directions.
        produce_cell (bool): `lstm` returns the cell states, too.
        training (bool): `lstm` also returns the arrays that `lstm_gradients` needs.
        forget_gate_last (bool): the gate order on every axis of four blocks is i, z, f, o, not i, f, z, o.
        input_gate_activation, forget_gate_activation, cell_gate_activation, output_gate_activation, activation (str):
            the activations of the gates i, f, z and o, and (`activation`) of c in h = o activation(c). Each is one of
            `"none"`, `"relu"`, `"tanh"`, `"sigmoid"`, `"hard_sigmoid"`.
    """

    reverse: bool = False
    bidirectional: bool = False
    produce_cell: bool = False
    training: bool = False
    forget_gate_last: bool = False
    input_gate_activation: str = "sigmoid"
    forget_gate_activation: str = "sigmoid"
    cell_gate_activation: str = "tanh"
    output_gate_activation: str = "sigmoid"
    activation: str = "tanh"


def lstm(
    source: mx.array,
    recurrent_weight: mx.array,
    *,
    input_weight: mx.array | None = None,
    bias: mx.array | None = None,
    init_state: mx.array | None = None,
    init_cell: mx.array | None = None,
    mask: mx.array | None = None,
    peephole: mx.array | None = None,
    descriptor: LSTMDescriptor | None = None,
    output_peephole: str = "previous",
    hard_sigmoid: str = "x/5",
    mask_layout: str = "channels",
    training_returns_cell: bool = True,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    r"""Run an LSTM over a sequence. Apple's name of the op is
    `LSTMWithSourceTensor:recurrentWeight:inputWeight:bias:initState:initCell:mask:peephole:descriptor:name:`.

    .. math::

        [i, f, z, o]_t &= s\left((h_{t-1} \odot m) R^T + x_t W^T + b + p \odot c_{t-1}\right) \\
        c_t &= f_t \odot c_{t-1} + i_t \odot z_t \\
        h_t &= o_t \odot g(c_t)

    Apple's texts leave some points unclear. "E:peephole decides" means: on a Mac `python -m mlx_lstm.compare --settle`
    finds out what MPSGraph computes, by the experiment with the name E:peephole.

    Args:
        source (array): [T, N, I], T steps, N batch items, I inputs; H units. Without input_weight [T, N, 4H], which is
            added to the gates directly.
        recurrent_weight (array): R, [4H, H].
        input_weight (array, optional): W, [4H, I].
        bias (array, optional): [4H].
        init_state (array, optional): h before the first step, [N, H] or [1, N, H]. Default: zeros.
        init_cell (array, optional): c before the first step, in the same shapes. Default: zeros.
        mask (array, optional): m, broadcastable to [N, H]; multiplies the h that enters the recurrent product, and
            nothing else.
        peephole (array, optional): p, [4H].
        descriptor (LSTMDescriptor, optional): Default: `LSTMDescriptor()`. With bidirectional, the forward direction
            first: source without input_weight [T, N, 8H], recurrent_weight [2, 4H, H], input_weight [8H, I], bias [8H],
            states [N, 2H], mask broadcastable to [N, 2H], peephole [2, 4H].
        output_peephole (str): the cell state that o reads. `"previous"`: c[t-1], as in Apple's formula. `"current"`:
            c[t], as in Apple's older MPSLSTMDescriptor. E:peephole decides.
        hard_sigmoid (str): the formula of hard_sigmoid, which MPSGraph's texts do not give. `"x/5"`: clip(x/5 + 0.5,
            0, 1), as in Apple's other frameworks. `"x/6"`: clip(x/6 + 0.5, 0, 1). E:hard_sigmoid decides.
        mask_layout (str): the layout of mask, which Apple's texts do not give. `"channels"`: as described under mask.
            `"directions"`: with bidirectional, broadcastable to [2, N, H]. `"steps"`: broadcastable to [T, N, H] or [T,
            N, 2H], one per step. The last two need a mask. E:mask decides.
        training_returns_cell (bool): whether, with training, the cell states are returned even without produce_cell.
            Apple's texts contradict one another; the texts about the gradient op mean `True`. E:output_count decides.
        checkpoint_every, engine, stream: as in `mlx_lstm.lstm`. checkpoint_every is for `mx.grad`; c and zState take
            memory as long as the caller holds them.

    Returns:
        list: h [T, N, H]; with produce_cell or training the cell states c [T, N, H], before g; with training zState,
        the gates after their activations [T, N, 4H]. All are twice as wide with bidirectional, the forward half first.

    Raises:
        ValueError: a layout, dtype or option is wrong, or a forced engine cannot run. Nothing is computed then.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import mpsgraph
        >>> source, R, W = mx.ones((5, 2, 3)), mx.ones((16, 4)), mx.ones((16, 3))  # T 5, N 2, I 3, H 4
        >>> descriptor = mpsgraph.LSTMDescriptor(training=True)
        >>> [array.shape for array in mpsgraph.lstm(source, R, input_weight=W, descriptor=descriptor)]
        [(5, 2, 4), (5, 2, 4), (5, 2, 16)]
    """
    op, descriptor = "mpsgraph.lstm", LSTMDescriptor() if descriptor is None else descriptor
    arrays = {"source": source, "recurrent_weight": recurrent_weight, "input_weight": input_weight, "bias": bias}
    arrays |= {"init_state": init_state, "init_cell": init_cell, "mask": mask, "peephole": peephole}
    check_flag(op, "training_returns_cell", training_returns_cell)
    call = translate(op, arrays, descriptor, output_peephole, hard_sigmoid, mask_layout)
    training, options = descriptor.training, {"engine": engine, "stream": stream}
    options |= {"checkpoint_every": check_every(op, checkpoint_every)}
    outputs = recurrence.lstm(**call, return_gates=training, training=training, **options)
    returns_cell = descriptor.produce_cell or (training and training_returns_cell)
    return [outputs.h, *([outputs.c] if returns_cell else []), *([] if outputs.gates is None else [outputs.gates])]


def lstm_gradients(
    source: mx.array,
    recurrent_weight: mx.array,
    source_gradient: mx.array,
    z_state: mx.array,
    cell_output_fwd: mx.array,
    *,
    state_gradient: mx.array | None = None,
    cell_gradient: mx.array | None = None,
    input_weight: mx.array | None = None,
    bias: mx.array | None = None,
    init_state: mx.array | None = None,
    init_cell: mx.array | None = None,
    mask: mx.array | None = None,
    peephole: mx.array | None = None,
    descriptor: LSTMDescriptor | None = None,
    output_peephole: str = "previous",
    hard_sigmoid: str = "x/5",
    mask_layout: str = "channels",
    leading_ones: Sequence[str] = (),
    engine: Engine | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    """Return the gradients of `lstm`. Apple's name of the op is
    `LSTMGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:cellOutputFwd:stateGradient:cellGradient:...`.

    Only two results of the forward pass are needed, z_state and cell_output_fwd. No gate is computed again. Sizes: T
    steps, N batch items, H units.

    Args:
        source, recurrent_weight, input_weight, bias, init_state, init_cell, mask, peephole, descriptor,
            output_peephole, hard_sigmoid, mask_layout, engine, stream: the arguments of `lstm`. Without input_weight
            only the shape of source is used; produce_cell and training are not used.
        source_gradient (array): the gradient of h, [T, N, H]. This array and the following arrays are twice as wide
            with bidirectional.
        z_state (array): the third result of `lstm` with training, [T, N, 4H].
        cell_output_fwd (array): the second result of `lstm`, the cell states, [T, N, H].
        state_gradient (array, optional): a gradient of h, [N, H] or [1, N, H], added at the last step that each
            direction computes. This step is the last time step; for a reverse direction it is the first time step.
        cell_gradient (array, optional): a gradient of c, in the shape and at the steps of state_gradient.
        leading_ones (sequence of str): names out of `"bias"`, `"peephole"`: the gradients of these arguments get two
            leading axes of size 1. Apple does not say which shapes its op returns. PyTorch receives [1, 1, 8H] for bias
            with bidirectional, and squeezes it; with one direction it takes any shape. On a Mac `python -m
            mlx_lstm.compare --settle` finds out, by the experiments E:grads and E:peephole. Default: none, every
            gradient has its argument's shape.

    Returns:
        list: the gradients of source, recurrent_weight, input_weight, bias, peephole, init_state, init_cell, in this
        order, without gradients of arguments that are None. mask has no gradient. The gradients of the states are [N,
        H] even if the states are [1, N, H], as PyTorch receives them from Apple's op.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import mpsgraph
        >>> source, R, b = mx.ones((5, 2, 16)), mx.ones((16, 4)), mx.ones((16,))  # T 5, N 2, H 4; projected already
        >>> h, c, z = mpsgraph.lstm(source, R, bias=b, descriptor=mpsgraph.LSTMDescriptor(training=True))
        >>> [array.shape for array in mpsgraph.lstm_gradients(source, R, mx.ones(h.shape), z, c, bias=b)]
        [(5, 2, 16), (16, 4), (16,)]
    """
    op, descriptor = "mpsgraph.lstm_gradients", LSTMDescriptor() if descriptor is None else descriptor
    arrays = {"source": source, "recurrent_weight": recurrent_weight, "input_weight": input_weight, "bias": bias}
    arrays |= {"init_state": init_state, "init_cell": init_cell, "mask": mask, "peephole": peephole}
    saved = {"source_gradient": source_gradient, "z_state": z_state, "cell_output_fwd": cell_output_fwd}
    saved |= {"state_gradient": state_gradient, "cell_gradient": cell_gradient}
    check_leading_ones(op, leading_ones, ("bias", "peephole"))
    call = translate(op, arrays | saved, descriptor, output_peephole, hard_sigmoid, mask_layout)
    gradients = recurrence.lstm_gradients(**call, engine=engine, stream=stream)
    return gradient_list(gradients, GRADIENTS, arrays, leading_ones)


def translate(
    op: str, arrays: Given, descriptor: LSTMDescriptor, output_peephole: str, hard_sigmoid: str, mask_layout: str
) -> dict[str, Any]:
    """Check Apple's arguments of an LSTM and convert them to arguments of `mlx_lstm.lstm` or `lstm_gradients`. arrays:
    by Apple's names; an array that the caller left out is None. output_peephole, hard_sigmoid, mask_layout: the options
    of `lstm`."""
    check_descriptor(op, descriptor, LSTMDescriptor)
    check_option(op, "output_peephole", output_peephole, ("previous", "current"))
    # `translated` returns the arrays by the names of `mlx_lstm.lstm`; WORDS is the dict {Apple's name: this name}.
    arguments = translated(op, arrays, G=4, words=WORDS, descriptor=descriptor, mask_layout=mask_layout)
    return arguments | {
        # MPSGRAPH["lstm"]: the gate orders with forget_gate_last False and True.
        "gate_order": MPSGRAPH["lstm"][descriptor.forget_gate_last],
        "activations": activation_names(op, descriptor, PROPERTIES["lstm"], hard_sigmoid),  # of i, f, g, o, output
        "output_peephole": output_peephole,
    }
