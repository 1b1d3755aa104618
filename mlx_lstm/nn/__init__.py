"""Layers that drop into any MLX model, in the place of those of `mlx.nn`.

`replace` puts them there in a model that exists, `patched` in one that other code builds. `stack` runs lists of such
layers, whoever wrote them, as one: layers on layers, both directions, lengths, last states. `quantize` packs the
weights of a model's layers, ours among them.
"""

from ._layers import GRU, LSTM, NONLINEARITIES, RNN, QuantizedGRU, QuantizedLSTM, QuantizedRNN
from ._quantize import quantize
from ._replace import patched, replace
from ._stack import stack

__all__ = ["GRU", "LSTM", "NONLINEARITIES", "RNN", "QuantizedGRU", "QuantizedLSTM", "QuantizedRNN", "patched"]
__all__ += ["quantize", "replace", "stack"]
