"""The recurrent ops of Apple's MPSGraph on MLX arrays: forward and gradient of its LSTM, GRU and single-gate RNN.

Arguments, layouts, defaults, results and their order are as in Apple's header `MPSGraphRNNOps.h`, with names in
Python's spelling. Sizes: T time, N batch, I input, H hidden; every array has the dtype of source. The gradient ops
return what `mx.grad` returns for the forward ops.

Differences from MPSGraph: a descriptor is optional, activations are named by strings, results are MLX arrays, and a
wrong layout raises `ValueError`. Where Apple's texts are unclear, the default is the most literal reading of the text,
and keywords select the other readings. "E:name" in a docstring names an experiment that decides the point on a Mac:
`python -m mlx_lstm.compare --settle` runs all of them. No result has been compared with MPSGraph yet: not measured.

    E:zstate_and_cell  Does zState hold the LSTM's gates after their activations? Is the returned c the cell state
                       before its last activation?
    E:output_count     How many results does training without produce_cell have?
    E:grads            Which shapes do the gradients of bias and states have? Is the gradient of the last state added at
                       the last step that each direction computes?
    E:peephole         Does o read c[t-1] or c[t]? Which shape does the gradient of peephole have?
    E:hard_sigmoid     Which slope does hard_sigmoid have?
    E:mask             Which layouts may a mask have?
    E:forget_gate_last Does forget_gate_last also permute the gates in zState and in all gradients?
    E:reverse          Does the result at index t belong to the source at index t if the op runs in reverse?
    E:relu_at_zero     Is the slope of relu at 0 equal to 0?
    E:single_gate      Does zState of the single-gate RNN hold values before or after the activation?
    E:gru_flavours     What do flip_z, reset_after and reset_gate_first do? What does zState of the GRU hold?
"""

from ._gru import GRUDescriptor, gru, gru_gradients
from ._lstm import LSTMDescriptor, lstm, lstm_gradients
from ._single_gate import SingleGateRNNDescriptor, single_gate_rnn, single_gate_rnn_gradients

__all__ = ["GRUDescriptor", "LSTMDescriptor", "SingleGateRNNDescriptor", "gru", "gru_gradients", "lstm"]
__all__ += ["lstm_gradients", "single_gate_rnn", "single_gate_rnn_gradients"]
