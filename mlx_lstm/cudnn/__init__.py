"""TensorFlow's CudnnRNN ops without cuDNN: stacks of LSTM, GRU or plain RNN layers.

Names, argument order, shapes and outputs are as in TensorFlow's raw ops (called "the original" here). TensorFlow's
attributes are keywords. `checkpoint_every`, `engine` and `stream` are additions. Sizes: T time, N batch, I input, H
num_units, S the width of h (H, or num_proj), L layers, D directions, G gates. All weights and biases are in one array,
the parameter buffer `params`; `convert.cudnn` describes its layout.

Wrong arguments raise a ValueError. Four things differ from the original: the length of params is checked; the backward
ops are pure functions; dropout uses MLX's random numbers (see `cudnn_rnn`); and states have another layout with
time_major=False (see `cudnn_rnn_v3`).

The reserve space is one array of the input's dtype, in which a forward op saves what the backward op needs. It has, for
one layer after the other: the gates [T, D G H, N] of an LSTM or GRU, c [T, D H, N] of an LSTM and, except for the last
layer, h [T, N, D S] and the dropout factors on this h [T, N, D S], if there is dropout. No op changes the reserve
space. Without training it is a scalar; with `checkpoint_every` it is empty, [0].
"""

from typing import Any

from ..ground.advice import missing
from ._params import CudnnRNNParamsToCanonicalOutput as CudnnRNNParamsToCanonicalOutput
from ._params import (
    cudnn_rnn_canonical_to_params,
    cudnn_rnn_canonical_to_params_v2,
    cudnn_rnn_params_size,
    cudnn_rnn_params_to_canonical,
    cudnn_rnn_params_to_canonical_v2,
)
from ._rnn import CudnnRNNOutput as CudnnRNNOutput
from ._rnn import CudnnRNNV2Output as CudnnRNNV2Output
from ._rnn import (
    cudnn_rnn,
    cudnn_rnn_backprop,
    cudnn_rnn_backprop_v2,
    cudnn_rnn_backprop_v3,
    cudnn_rnn_v2,
    cudnn_rnn_v3,
)
from ._stack import CudnnRNNBackpropOutput as CudnnRNNBackpropOutput

# The classes of the outputs are public, too. They are not in this list, because help() would then show them before the
# ops.
__all__ = ["cudnn_rnn", "cudnn_rnn_backprop", "cudnn_rnn_backprop_v2", "cudnn_rnn_backprop_v3"]
__all__ += ["cudnn_rnn_canonical_to_params", "cudnn_rnn_canonical_to_params_v2", "cudnn_rnn_params_size"]
__all__ += ["cudnn_rnn_params_to_canonical", "cudnn_rnn_params_to_canonical_v2", "cudnn_rnn_v2", "cudnn_rnn_v3"]


def __getattr__(name: str) -> Any:
    """Raise AttributeError for a name that this module does not have. For TensorFlow's spelling, such as CudnnRNN, the
    text has the name of the function here."""
    raise missing("mlx_lstm.cudnn", name, __all__)
