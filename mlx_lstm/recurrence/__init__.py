"""THE recurrence: an LSTM, GRU or plain RNN layer over a sequence, with its own gradient. All dialects come here.

The functions `lstm`, `gru` and `rnn` run forward and carry their gradient; `lstm_gradients`, `gru_gradients` and
`rnn_gradients` are that gradient by itself, for callers that kept the outputs. `recurrent` runs a cell of the caller's
own. `by_layer`, `of_layers`, `join_biases` and `join_directions` translate the states, biases and directions that
others' stacks of layers have. A layer that calls `note_engine` after its calls says by the property `engine_used` what
ran. What judges every result itself runs `unguarded`.
"""

from ._call import Call, Lengths, engine_used, note_engine
from ._gru import GRUOutput as GRUOutput
from ._gru import gru, gru_gradients
from ._guard import unguarded
from ._lstm import LSTMOutput as LSTMOutput
from ._lstm import lstm, lstm_gradients
from ._recurrent import recurrent
from ._rnn import RNNOutput as RNNOutput
from ._rnn import rnn, rnn_gradients
from ._stack import by_layer, join_biases, join_directions, of_layers

__all__ = ["Call", "Lengths", "by_layer", "engine_used", "gru", "gru_gradients", "join_biases", "join_directions"]
__all__ += ["lstm", "lstm_gradients", "note_engine", "of_layers", "recurrent", "rnn", "rnn_gradients", "unguarded"]
