"""The recurrence: an LSTM, GRU or plain RNN layer over a sequence, with its own gradient. All dialects call it.

The functions `lstm`, `gru` and `rnn` run forward and carry their gradient; `lstm_gradients`, `gru_gradients` and
`rnn_gradients` are that gradient as an op, for callers that saved the outputs. `recurrent` runs a cell written by the
user.

For the layers and dialects above this module:

- `Call` is one call with its options; `note_engine` and `engine_used` store and show the engine of a layer's last call.
- `by_layer`, `of_layers`, `split_states`, `join_states`, `join_biases` and `join_directions` translate the states,
  biases and directions of stacks of layers. `whole_steps` and `whole_lengths` check a layer's keep, hold and lengths.
- `Quantized` is a weight as `mx.quantize` packs it. `QuantizedLayer` is the base of layers with such weights; `weight`
  reads a layer's weight; `common_dtype` and `in_dtype` promote and cast arrays and quantized weights together.
- `unguarded` lets kernels run without a trial, for commands that judge every result themselves.
"""

from ..engines.packing import Quantized
from ._call import Call, Hold, Lengths, engine_used, note_engine, whole_lengths
from ._gru import GRUOutput as GRUOutput
from ._gru import gru, gru_gradients
from ._guard import unguarded
from ._lstm import LSTMOutput as LSTMOutput
from ._lstm import lstm, lstm_gradients
from ._quantized import QuantizedLayer, common_dtype, in_dtype, weight
from ._recurrent import recurrent
from ._rnn import RNNOutput as RNNOutput
from ._rnn import rnn, rnn_gradients
from ._stack import by_layer, join_biases, join_directions, join_states, of_layers, split_states
from ._steps import whole_steps

__all__ = ["Call", "Hold", "Lengths", "Quantized", "QuantizedLayer", "by_layer", "common_dtype", "engine_used", "gru"]
__all__ += ["gru_gradients", "in_dtype", "join_biases", "join_directions", "join_states", "lstm", "lstm_gradients"]
__all__ += ["note_engine", "of_layers", "recurrent", "rnn", "rnn_gradients", "split_states", "unguarded", "weight"]
__all__ += ["whole_lengths", "whole_steps"]
