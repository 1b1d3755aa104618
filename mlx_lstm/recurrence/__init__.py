"""THE recurrence: an LSTM, GRU or plain RNN layer over a sequence, with its own gradient. All dialects come here.

The functions `lstm`, `gru` and `rnn` run forward and carry their gradient; `lstm_gradients`, `gru_gradients` and
`rnn_gradients` are that gradient by itself, for callers that kept the outputs. `recurrent` runs a cell of the caller's
own. `by_layer`, `of_layers`, `split_states`, `join_states`, `join_biases` and `join_directions` translate the states,
biases and directions that others' stacks of layers have. A layer that calls `note_engine` after its calls says by the
property `engine_used` what ran. `Quantized` is a weight as `mx.quantize` packs it; `QuantizedLayer` is what layers with
such weights are, `common_dtype`, `in_dtype` and `in_common_dtype` mix them with arrays; `whole_steps` is a
layer's keep and hold, `whole_lengths` its lengths. What judges every result itself runs `unguarded`.
"""

from ..engines.packing import Quantized
from ._arguments import common_dtype, in_common_dtype, in_dtype
from ._call import Call, Hold, Lengths, engine_used, note_engine, whole_lengths
from ._gru import GRUOutput as GRUOutput
from ._gru import gru, gru_gradients
from ._guard import unguarded
from ._lstm import LSTMOutput as LSTMOutput
from ._lstm import lstm, lstm_gradients
from ._quantized import QuantizedLayer
from ._recurrent import recurrent
from ._rnn import RNNOutput as RNNOutput
from ._rnn import rnn, rnn_gradients
from ._stack import by_layer, join_biases, join_directions, join_states, of_layers, split_states
from ._steps import whole_steps

__all__ = ["Call", "Hold", "Lengths", "Quantized", "QuantizedLayer", "by_layer", "common_dtype", "engine_used", "gru"]
__all__ += ["gru_gradients", "in_dtype", "join_biases", "join_directions", "join_states", "lstm", "lstm_gradients"]
__all__ += ["note_engine", "of_layers", "recurrent", "rnn", "rnn_gradients", "split_states", "unguarded"]
__all__ += ["in_common_dtype", "whole_lengths", "whole_steps"]
