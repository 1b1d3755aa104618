"""What a recurrent cell is, apart from its arrays: its gates, their order, their activations, its options."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

Entry = TypeVar("Entry")

ACTIVATIONS = ("identity", "relu", "tanh", "sigmoid", "hard_sigmoid", "hard_sigmoid_sixth")
"""Names an activation may have. `hard_sigmoid(x) = clip(0.2 x + 0.5, 0, 1)`; `hard_sigmoid_sixth(x) =
clip(x / 6 + 0.5, 0, 1)`, that of torch and Keras 3. The slope of relu at 0 is 0."""

HARD_SIGMOIDS = {"hard_sigmoid": 0.2, "hard_sigmoid_sixth": 1 / 6}
"""The slopes of the two."""


def known(engine: str, table: Mapping[str, Entry], name: str) -> Entry:
    """What an engine's own table has for an activation; ValueError where it has nothing."""
    if name not in table:
        raise ValueError(f"[activation] engine={engine!r} must know the activation but got {name!r}.")
    return table[name]


def gate_block(cell: "Cell", gate: str, hidden: int) -> slice:
    """Where a gate's rows lie on a gate axis."""
    start = cell.gate_order.index(gate) * hidden
    return slice(start, start + hidden)


class LSTMCell(NamedTuple):
    """The LSTM cell's options. The equations stand in `engines.ops.cells.lstm_step`.

    gate_order is the order of the four H-blocks on every 4H axis; activations are always those of i, f, g, o and of
    the output; output_peephole says whether o peeps at c[t] ("current") or at c[t-1] ("previous").
    """

    gate_order: str = "ifgo"
    activations: tuple[str, str, str, str, str] = ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh")
    output_peephole: str = "current"
    cell_clip: float | None = None
    forget_bias: float = 0.0

    # What every cell says of itself: the op's name, the blocks of a gate axis, the outputs of an engine.
    op = "lstm"
    gates = 4
    outputs = ("h", "c", "gates", "hT", "cT")
    block = gate_block

    def activation(self, gate: str) -> str:
        """The activation of gate "i", "f", "g" or "o", or of the "output"."""
        return self.activations[4 if gate == "output" else "ifgo".index(gate)]


class GRUCell(NamedTuple):
    """The GRU cell's options. The equations stand in `engines.ops.cells.gru_step`.

    gate_order is the order of the three H-blocks on every 3H axis: reset r, update z, candidate n; activations are
    always those of r, z, n. reset says whether r multiplies the candidate's recurrent product ("after" it) or the h
    that goes into it ("before"). z is the weight of h[t-1] in h[t], or with flip_z that of n.
    """

    gate_order: str = "rzn"
    activations: tuple[str, str, str] = ("sigmoid", "sigmoid", "tanh")
    reset: str = "after"
    flip_z: bool = False

    op = "gru"
    gates = 3
    outputs = ("h", "gates", "hT")
    block = gate_block

    def activation(self, gate: str) -> str:
        """The activation of gate "r", "z" or "n"."""
        return self.activations["rzn".index(gate)]


class RNNCell(NamedTuple):
    """The plain cell's option. Its one "gate" is kept before the activation: h = activation(gate)."""

    act: str = "tanh"

    op = "rnn"
    gates = 1
    gate_order = "h"
    outputs = ("h", "gates", "hT")
    block = gate_block


Cell = LSTMCell | GRUCell | RNNCell
