"""Check the ops' attributes and the size of the parameter buffer, one array with all weights and biases.
`convert.cudnn` describes the buffer's layout."""

from typing import NamedTuple

import mlx.core as mx

from ..convert.cudnn import GATES, Layout
from ..ground.checks import check_array, check_integer, check_option, check_probability, fail


class Attributes(NamedTuple):
    """The attributes that all ops of `mlx_lstm.cudnn` have, as the caller passed them."""

    rnn_mode: str  # "lstm", "gru", "rnn_tanh" or "rnn_relu"
    input_mode: str  # "linear_input", "skip_input": layer 0 has no input matrices, "auto_select": skip_input if I = H
    direction: str  # "unidirectional" or "bidirectional"
    dropout: float  # the probability that an element of a layer's output is dropped, between layers
    seed: int  # its low 32 bits are the high half of the 64-bit random seed of dropout
    seed2: int  # its low 32 bits are the low half of this 64-bit seed
    num_proj: int = 0  # the width of a projected h; 0 without a projection

    @property
    def D(self) -> int:
        """Return the number of directions."""
        return 2 if self.direction == "bidirectional" else 1


def layout(op: str, num_layers: int, num_units: int, input_size: int, attributes: Attributes) -> Layout:
    """Check the sizes and attributes of a call. Return the layout of the parameter buffer `params` that these layers
    have. Raise ValueError if the sizes and attributes do not fit together."""
    check_attributes(op, attributes)
    rnn_mode, input_mode, num_proj = attributes.rnn_mode, attributes.input_mode, attributes.num_proj
    counts = {"num_layers": num_layers, "num_units": num_units, "input_size": input_size}
    L, H, I = (count(op, name, value, least=1) for name, value in counts.items())
    P = count(op, "num_proj", num_proj, least=0)
    if P and rnn_mode != "lstm":
        fail(op, f"num_proj must be 0 with rnn_mode={rnn_mode!r}", P)
    if P > H:
        fail(op, f"num_proj must be at most num_units = {H}", P)
    P = P if P < H else 0  # cuDNN turns off a projection that makes h no narrower, so params has no matrix of it
    if input_mode == "skip_input" and I != H:
        fail(op, f"input_size must be num_units = {H} with input_mode='skip_input'", I)
    skip = input_mode == "skip_input" or (input_mode == "auto_select" and I == H)
    return Layout(rnn_mode, L, attributes.D, I, H, P, skip)


def check_attributes(op: str, attributes: Attributes) -> None:
    """Check the attributes of an op of `mlx_lstm.cudnn`, except num_proj, whose rule depends on the sizes. The keys of
    `GATES` are the values of rnn_mode."""
    check_option(op, "rnn_mode", attributes.rnn_mode, tuple(GATES))
    check_option(op, "input_mode", attributes.input_mode, ("linear_input", "skip_input", "auto_select"))
    check_option(op, "direction", attributes.direction, ("unidirectional", "bidirectional"))
    check_probability(op, "dropout", attributes.dropout)
    check_integer(op, "seed", attributes.seed)
    check_integer(op, "seed2", attributes.seed2)


def check_params(op: str, where: Layout, params: mx.array, dtype: mx.Dtype | None = None) -> None:
    """Check the size of the parameter buffer `params`, and that it has this dtype. TensorFlow's op does not check the
    size, and ignores the rest of a longer buffer."""
    check_array(op, "params", params, ["params_size"], dtype)
    if params.shape[0] != where.size:
        D = "both directions" if where.D == 2 else "one direction"
        rule = f"params must have {where.size} elements for {where.L} layers of {D} of {where.mode}"
        rule += f", input_size {where.I}, num_units {where.H}" + (f", num_proj {where.P}" if where.P else "")
        rule += ", skip_input" if where.skip else ""
        longer = f": pass params[:{where.size}]," if params.shape[0] > where.size else ""
        fail(op, rule + longer, f"{params.shape[0]} elements")


def count(op: str, name: str, value: object, *, least: int) -> int:
    """Check that a value is an integer, or an integer array of one element. Return it as an int. name: the argument's
    name, for error texts. least: the smallest value that is allowed."""
    if isinstance(value, mx.array) and value.size == 1 and mx.issubdtype(value.dtype, mx.integer):
        value = value.item()
    # most=None: no upper limit, because `cudnn_rnn_params_size` computes sizes also for layers that fit in no memory.
    return check_integer(op, name, value, least=least, most=None)
