"""Layers for MLX models that take the place of the recurrent layers of `mlx.nn`.

`replace` puts these layers into a model; `patched` does so in a model that other code builds. `stack` runs lists of
layers as one: several layers, both directions, lengths, last states. `from_weights` makes a layer with any option from
weights of any format. `Pointwise` is a layer with a cell of the user's own. `precision` runs a model in 16 bits.
`stepper` runs layers one time step at a time. `quantize` quantizes the layers of a model, recurrent ones included.
"""

from typing import Any

from ..convert.layers import NONLINEARITIES
from ..recurrence import Stepper
from ._from_weights import from_weights
from ._layers import GRU, LSTM, RNN, QuantizedGRU, QuantizedLSTM, QuantizedRNN
from ._pointwise import Pointwise
from ._precision import precision
from ._quantize import quantize
from ._replace import patched, replace
from ._stack import stack
from ._stepper import stepper

__all__ = ["GRU", "LSTM", "NONLINEARITIES", "RNN", "Pointwise", "QuantizedGRU", "QuantizedLSTM", "QuantizedRNN"]
__all__ += ["Stepper", "from_weights", "patched", "precision", "quantize", "replace", "stack", "stepper"]


def __getattr__(name: str) -> Any:
    """Raise AttributeError; for Keras' Bidirectional the text says what runs both directions."""
    if name == "Bidirectional":
        both = "mlx_lstm.nn.stack(layers, x, reverse=others) and mlx_lstm.torch.LSTM(..., bidirectional=True)"
        raise AttributeError(f"mlx_lstm.nn has no {name}: {both} run both directions")
    raise AttributeError(f"module 'mlx_lstm.nn' has no attribute {name!r}")
