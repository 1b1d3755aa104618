"""LSTM layers for Apple Silicon on MLX: one recurrence with its own gradient, and the layers and dialects on it."""

from . import nn as nn
from .recurrence import LSTMOutput as LSTMOutput
from .recurrence import lstm as lstm

__version__ = "0.1.0"
