"""Functions that run an LSTM, GRU, plain RNN or a user's cell over a sequence, with gradients. All layers of this
package call them.

For users, and exported by `mlx_lstm`:

- `lstm`, `gru` and `rnn` run forward, and MLX can differentiate them. `lstm_gradients`, `gru_gradients` and
  `rnn_gradients` return the gradients from saved outputs. `recurrent` runs any cell written by the user. `pointwise`
  runs a user's cell on the engines, if its arithmetic treats each hidden unit by itself. `recognise` finds the
  call that equals a cell written by hand.
- `Quantized` is a weight as `mx.quantize` packs it; `join_directions` joins the arrays of two directions.

For the modules above this one, which are the layers and the functions in the style of other libraries:

- `Call` checks arguments, chooses an engine (an implementation of the recurrence) and runs it. `Stepper` runs layers
  one time step at a time. `QuantizedLayer` is the base class of layers with quantized weights. `OwnCell` holds a user's
  cell in a layer. `unguarded` lets Metal kernels run without a prior test run, for commands that check every result.
- All other functions check or convert the states, biases, dtypes and options of layers; their docstrings say how.
"""

from ..engines.packing import Quantized
from ._arguments import common_dtype, in_common_dtype, in_dtype, weight_shapes
from ._call import Call, Hold, Lengths, engine_used, whole_lengths
from ._gru import GRUOutput as GRUOutput
from ._gru import gru, gru_gradients
from ._guard import unguarded
from ._lstm import LSTMOutput as LSTMOutput
from ._lstm import lstm, lstm_gradients
from ._norm import Norm, first_value, layer_norm_arrays, layer_norm_of, norm_given
from ._packed import PackedSequence, check_packed, pack_padded_sequence, pad_packed_sequence
from ._pointwise import OwnCell, apart_again, check_arrays, pointwise, side_by_side
from ._quantized import QUANTIZED, QuantizedLayer
from ._recognise import recognise
from ._recurrent import recurrent
from ._rnn import RNNOutput as RNNOutput
from ._rnn import rnn, rnn_gradients
from ._stack import by_layer, join_biases, join_directions, join_states, of_layers, split_states
from ._stepper import Stepper
from ._steps import whole_steps

__all__ = ["QUANTIZED", "Call", "Hold", "Lengths", "Norm", "PackedSequence", "Quantized", "QuantizedLayer", "Stepper"]
__all__ += ["by_layer", "check_arrays", "check_packed", "common_dtype", "pack_padded_sequence", "pad_packed_sequence"]
__all__ += ["engine_used", "gru", "gru_gradients", "in_dtype", "join_biases", "join_directions", "join_states", "lstm"]
__all__ += ["lstm_gradients", "of_layers", "pointwise", "recognise", "recurrent", "rnn", "rnn_gradients"]
__all__ += ["split_states", "unguarded"]
__all__ += ["in_common_dtype", "weight_shapes", "whole_lengths", "whole_steps"]
__all__ += ["OwnCell", "apart_again", "first_value", "layer_norm_arrays", "layer_norm_of", "norm_given", "side_by_side"]
