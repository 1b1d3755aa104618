"""LSTM layers for Apple Silicon on MLX: one recurrence with its own gradient, and the layers and dialects on it."""

from . import cudnn, keras, mpsgraph, nn, tf, torch
from .recurrence import GRUOutput, LSTMOutput, RNNOutput, gru, lstm, rnn

__version__ = "0.1.0"

__all__ = ["GRUOutput", "LSTMOutput", "RNNOutput", "__version__", "gru", "lstm", "rnn"]
__all__ += ["cudnn", "keras", "mpsgraph", "nn", "tf", "torch"]


def __dir__() -> list[str]:
    """What is public."""
    return __all__
