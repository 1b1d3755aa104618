"""Convert weights of recurrent layers between formats: torch, MLX, Keras, TensorFlow, cuDNN, ONNX, MPSGraph, haste,
FlashRNN.

Every reader, `from_...`, returns an object `Weights`: the arrays of one or more layers, with the same names, shapes and
gate order for every format. Every writer, `to_...`, takes `Weights`. Conversions reorder gates, transpose matrices, and
add two biases if the target format has one. If a format cannot hold an option of a layer, a ValueError names the
option. `mlx_lstm.torch.from_weights` makes a layer from `Weights`. `read` and `write` convert files, as does the
command `python -m mlx_lstm.convert SRC DST`.
"""

from ._files import Model, read, write
from ._keys import from_names
from .cudnn import from_cudnn, to_cudnn
from .flashrnn import from_flashrnn, from_flashrnn_slstm, to_flashrnn, to_flashrnn_slstm
from .haste import from_haste, from_haste_indrnn, to_haste, to_haste_indrnn
from .keras import from_keras, to_keras
from .mlx import from_mlx, from_ops, to_mlx, to_ops
from .mpsgraph import from_mpsgraph, to_mpsgraph
from .onnx import from_onnx, to_onnx
from .tf import from_tf, from_tf_gru, to_tf, to_tf_gru
from .torch import from_torch, to_torch
from .weights import Weights, differences, stacked

__all__ = ["Model", "Weights", "differences", "from_cudnn", "from_keras", "from_mlx", "from_mpsgraph", "from_names"]
__all__ += ["from_onnx", "from_ops", "from_tf", "from_tf_gru", "from_torch", "read", "stacked", "to_cudnn", "to_keras"]
__all__ += ["from_flashrnn", "from_flashrnn_slstm", "from_haste", "from_haste_indrnn"]
__all__ += ["to_flashrnn", "to_flashrnn_slstm", "to_haste", "to_haste_indrnn"]
__all__ += ["to_mlx", "to_mpsgraph", "to_onnx", "to_ops", "to_tf", "to_tf_gru", "to_torch", "write"]
