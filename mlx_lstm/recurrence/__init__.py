"""THE recurrence: an LSTM, GRU or plain RNN layer over a sequence, with its own gradient. All dialects come here.

The functions `lstm`, `gru` and `rnn` run forward and carry their gradient; `lstm_gradients`, `gru_gradients` and
`rnn_gradients` are that gradient by itself, for callers that kept the outputs.
"""

from ._call import Lengths as Lengths
from ._gru import GRUOutput as GRUOutput
from ._gru import gru as gru
from ._gru import gru_gradients as gru_gradients
from ._lstm import LSTMOutput as LSTMOutput
from ._lstm import lstm as lstm
from ._lstm import lstm_gradients as lstm_gradients
from ._rnn import RNNOutput as RNNOutput
from ._rnn import rnn as rnn
from ._rnn import rnn_gradients as rnn_gradients
from ._stack import by_layer as by_layer
from ._stack import join_biases as join_biases
from ._stack import of_layers as of_layers
