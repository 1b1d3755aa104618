"""The recurrent ops of Apple's MPSGraph on MLX arrays: forward and gradient of its LSTM, GRU and single-gate RNN.

Arguments, layouts, defaults, results and their order are as in Apple's header `MPSGraphRNNOps.h`, with names in
Python's spelling. Sizes: T time, N batch, I input, H hidden; every array has the dtype of source. The gradient ops
return what `mx.grad` returns for the forward ops.

Differences from MPSGraph: a descriptor is optional, activations are named by strings, results are MLX arrays, and a
wrong layout raises `ValueError`. Where Apple's texts are unclear, the default is the most literal reading of the text,
and keywords select the other readings. "E:name" in a docstring names an experiment that decides the point on a Mac:
`python -m mlx_lstm.compare --settle` runs all of them. No result has been compared with MPSGraph yet: not measured.

    E:zstate_and_cell  that zState holds the LSTM's activated gates, and the cell states are those before g
    E:output_count     the number of results of training without produce_cell
    E:grads            shapes of the gradients of bias and states; that the gradients of the last states enter at each
                       direction's last step
    E:peephole         whether o reads c[t-1] or c[t]; the shape of the peephole gradient
    E:hard_sigmoid     its slope
    E:mask             the layouts a mask may have
    E:forget_gate_last that it permutes zState and all gradients, too
    E:reverse          that results stay aligned with the source
    E:relu_at_zero     that the slope of relu at 0 is 0
    E:single_gate      whether zState of the single-gate RNN is before or after the activation
    E:gru_flavours     what flip_z, reset_after and reset_gate_first do, what zState of the GRU holds
"""

from ._gru import GRUDescriptor, gru, gru_gradients
from ._lstm import LSTMDescriptor, lstm, lstm_gradients
from ._single_gate import SingleGateRNNDescriptor, single_gate_rnn, single_gate_rnn_gradients

__all__ = ["GRUDescriptor", "LSTMDescriptor", "SingleGateRNNDescriptor", "gru", "gru_gradients", "lstm"]
__all__ += ["lstm_gradients", "single_gate_rnn", "single_gate_rnn_gradients"]
