"""LSTM layers for Apple Silicon on MLX: one recurrence with its own gradient, and the layers and dialects on it."""

import sys

try:
    import mlx.core as _mlx  # noqa: F401
except ImportError as error:
    extra = "." if sys.platform == "darwin" else "'.[cpu]'"
    raise ImportError(f"mlx_lstm needs MLX; in a clone of mlx-lstm: pip install {extra} ({error})") from error

from .machine import VERSION as __version__  # isort: skip
from . import convert, cudnn, keras, mpsgraph, nn, tf, torch
from .recurrence import GRUOutput as GRUOutput
from .recurrence import LSTMOutput as LSTMOutput
from .recurrence import Quantized as Quantized
from .recurrence import RNNOutput as RNNOutput
from .recurrence import gru, gru_gradients, join_directions, lstm, lstm_gradients, recurrent, rnn, rnn_gradients

# Their classes are public, too, but not in this list: help() would have them before the ops.
__all__ = ["__version__", "gru", "gru_gradients", "join_directions", "lstm", "lstm_gradients", "rnn"]
__all__ += ["convert", "cudnn", "keras", "mpsgraph", "nn", "recurrent", "rnn_gradients", "tf", "torch"]


def __dir__() -> list[str]:
    """What is public."""
    return [*__all__, "GRUOutput", "LSTMOutput", "Quantized", "RNNOutput"]
