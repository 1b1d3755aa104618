"""TensorFlow's recurrent block ops on MLX arrays, with TensorFlow's results. MLX can differentiate them.

`lstm_block_cell`, `block_lstm`, `block_lstm_v2`, `gru_block_cell` and their gradient ops (names with `_grad`) equal
`tf.raw_ops.LSTMBlockCell` and so on: the same arguments in the same order, also by name, the same defaults, and tuples
of the same outputs. They run on every engine. Sizes are T time, N batch, I input, H cell. The first I rows of an LSTM's
w [I + H, 4H] are the weights of the input, the others of h. The gate order of its columns and of b is i, c, f, o
(ICFO), in the V2 ops i, f, c, o (IFCO); here c is the candidate, `ci` among the outputs.

All ops of this package differ from TensorFlow's ops in these points:

- MLX differentiates the four forward ops; a loss may use any of their outputs.
- Arrays are MLX arrays of one dtype: float32, float16, and as an extension bfloat16 and, on the CPU, float64. Arrays of
  16 bits are multiplied and summed in float32 (TensorFlow on the CPU sums in float16, and has only float32 for GRUs).
- Wrong arguments raise a ValueError, with TensorFlow's text where TensorFlow has one. This includes arguments for which
  TensorFlow ends the process or reads out of bounds: `seq_len_max` out of range, a wrong number of axes, peepholes of a
  wrong length, saved outputs of a wrong size.
- The keywords `engine`, `stream` and, in the ops over a sequence, `checkpoint_every` work as in `mlx_lstm.lstm`.
  TensorFlow's argument `name` is absent.
"""

from typing import Any

from ..ground.advice import missing
from ._gru import GRUBlockCellGradOutput as GRUBlockCellGradOutput
from ._gru import GRUBlockCellOutput as GRUBlockCellOutput
from ._gru import gru_block_cell, gru_block_cell_grad
from ._lstm import BlockLSTMGradOutput as BlockLSTMGradOutput
from ._lstm import BlockLSTMOutput as BlockLSTMOutput
from ._lstm import LSTMBlockCellGradOutput as LSTMBlockCellGradOutput
from ._lstm import block_lstm, block_lstm_grad, block_lstm_grad_v2, block_lstm_v2, lstm_block_cell, lstm_block_cell_grad

# The classes of the outputs are public, too. They are not in this list, because help() would then show them before the
# ops.
__all__ = ["block_lstm", "block_lstm_grad", "block_lstm_grad_v2", "block_lstm_v2", "gru_block_cell"]
__all__ += ["gru_block_cell_grad", "lstm_block_cell", "lstm_block_cell_grad"]


def __getattr__(name: str) -> Any:
    """Raise AttributeError for a name that this module does not have. For TensorFlow's spelling, such as BlockLSTM, the
    text has the name of the function here, block_lstm."""
    raise missing("mlx_lstm.tf", name, __all__)
