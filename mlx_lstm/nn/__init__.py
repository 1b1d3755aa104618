"""Layers for MLX models that replace the recurrent layers of `mlx.nn`.

- `LSTM`, `GRU`, `RNN` equal the layers of the same names in `mlx.nn`. `QuantizedLSTM` and so on have quantized weights.
- `replace` puts these layers into a model. `patched` does so while other code builds a model.
- `stack` runs a list of layers as one: several layers, both directions, lengths, last states.
- `stepper` runs layers one time step at a time.
- `from_weights` makes a layer with any option from weights of any format.
- `Pointwise` is a layer with a cell that the user writes.
- `precision` runs a model in 16 bits. `quantize` quantizes all layers of a model, including the recurrent layers.
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
    """Raise AttributeError for a name that this module does not have. For Keras' name Bidirectional the text says what
    runs both directions here."""
    if name == "Bidirectional":
        both = "mlx_lstm.nn.stack(layers, x, reverse=others) and mlx_lstm.torch.LSTM(..., bidirectional=True)"
        raise AttributeError(f"mlx_lstm.nn has no {name}: {both} run both directions")
    raise AttributeError(f"module 'mlx_lstm.nn' has no attribute {name!r}")
