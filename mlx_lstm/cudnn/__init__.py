"""TensorFlow's CudnnRNN ops, where there is no cuDNN: stacks of lstm, gru or plain layers on the recurrence.

Names, argument order, shapes and outputs are those of the raw ops; attributes are keywords. `checkpoint_every`,
`engine` and `stream` are ours. Sizes: T time, N batch, I input, H num_units, S the width of h (H, or num_proj), L
layers, D directions, G gates. The parameter buffer is described in `convert.cudnn`.

Wrong arguments raise a ValueError. What differs from the original: the length of params is checked; the backward ops
are pure; the random numbers of dropout are MLX's, see `cudnn_rnn`; time_major=False, see `cudnn_rnn_v3`.

The reserve space is one array of the input's dtype. Layer by layer it holds the gates [T, D G H, N] (not of a plain
layer), of an lstm c [T, D H, N], and of every layer but the last h [T, N, D S] and, with dropout, the factors [T, N, D
S] on it. Only the backward ops need it, and nothing changes it. Without training it is a scalar, with
`checkpoint_every` empty, [0].
"""

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

# What the ops return is public, too, but not in this list: help() would have it before the ops.
__all__ = ["cudnn_rnn", "cudnn_rnn_backprop", "cudnn_rnn_backprop_v2", "cudnn_rnn_backprop_v3"]
__all__ += ["cudnn_rnn_canonical_to_params", "cudnn_rnn_canonical_to_params_v2", "cudnn_rnn_params_size"]
__all__ += ["cudnn_rnn_params_to_canonical", "cudnn_rnn_params_to_canonical_v2", "cudnn_rnn_v2", "cudnn_rnn_v3"]
