"""LSTM, GRU and plain RNN layers for Apple Silicon, on MLX.

lstm, gru, rnn               a layer over a sequence as a function; the gradient by itself: lstm_gradients, ...
pointwise, recurrent         run your own cell over a sequence; pointwise generates code for it, recurrent calls it
recognise                    which of these functions computes the same as a cell that you wrote yourself
join_directions, Quantized   make arguments: join two directions; hold quantized weights; Norm: layer normalisation
nn                           layers as in mlx.nn: LSTM, GRU, RNN; replace() puts them into a model, stack() runs lists
torch                        layers as in PyTorch: several layers, both directions, packed sequences as lengths
convert, keras               weights of PyTorch, Keras, ONNX and others into these layers, and back
tf, cudnn, mpsgraph          the recurrent ops of TensorFlow, cuDNN and Apple's MPSGraph, argument by argument
python -m mlx_lstm           lists the commands: check, bench, compare, convert
"""

import sys
from typing import Any

try:
    import mlx.core as _mlx  # noqa: F401
except ImportError as error:
    extra = "." if sys.platform == "darwin" else "'.[cpu]'"
    raise ImportError(f"mlx_lstm needs MLX; in a clone of mlx-lstm: pip install {extra} ({error})") from error

from .ground.machine import VERSION as __version__  # isort: skip
from . import cells, convert, cudnn, keras, mpsgraph, nn, tf, torch
from .recurrence import GRUOutput as GRUOutput
from .recurrence import LSTMOutput as LSTMOutput
from .recurrence import Norm as Norm
from .recurrence import Quantized as Quantized
from .recurrence import RNNOutput as RNNOutput
from .recurrence import (
    gru,
    gru_gradients,
    join_directions,
    lstm,
    lstm_gradients,
    pointwise,
    recognise,
    recurrent,
    rnn,
    rnn_gradients,
)

# The classes of the outputs are public, too, but not in this list: help() would show them before the ops.
__all__ = ["__version__", "gru", "gru_gradients", "join_directions", "lstm", "lstm_gradients", "rnn"]
__all__ += ["cells", "convert", "cudnn", "keras", "mpsgraph", "nn", "pointwise", "recognise", "recurrent"]
__all__ += ["rnn_gradients", "tf", "torch"]


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "GRUOutput", "LSTMOutput", "Norm", "Quantized", "RNNOutput"]


def __getattr__(name: str) -> Any:
    """Raise AttributeError; for LSTM, GRU and RNN the text says which modules have these layers."""
    if name in ("LSTM", "GRU", "RNN"):
        layers = f"mlx_lstm.nn.{name} is the layer as in mlx.nn, mlx_lstm.torch.{name} as in PyTorch"
        raise AttributeError(f"mlx_lstm has no {name}: {layers}; mlx_lstm.{name.lower()} is the function")
    raise AttributeError(f"module 'mlx_lstm' has no attribute {name!r}")
