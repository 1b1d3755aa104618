"""LSTM layers for Apple Silicon on MLX: one recurrence with its own gradient, and the layers and dialects on it."""

from . import cudnn as cudnn
from . import keras as keras
from . import mpsgraph as mpsgraph
from . import nn as nn
from . import tf as tf
from . import torch as torch
from .recurrence import GRUOutput as GRUOutput
from .recurrence import LSTMOutput as LSTMOutput
from .recurrence import RNNOutput as RNNOutput
from .recurrence import gru as gru
from .recurrence import lstm as lstm
from .recurrence import rnn as rnn

__version__ = "0.1.0"
