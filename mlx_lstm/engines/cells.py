"""The options of the three recurrent cells: gate order, activations and others. The cells have no arrays."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

Entry = TypeVar("Entry")

ACTIVATIONS = ("identity", "relu", "tanh", "sigmoid", "hard_sigmoid", "hard_sigmoid_sixth")
"""Names of activations. `hard_sigmoid(x) = clip(0.2 x + 0.5, 0, 1)`; `hard_sigmoid_sixth(x) = clip(x / 6 + 0.5, 0, 1)`
is the one of torch and Keras 3. The slope of relu at 0 is 0."""

HARD_SIGMOIDS = {"hard_sigmoid": 0.2, "hard_sigmoid_sixth": 1 / 6}
"""The slope of each hard sigmoid between its kinks."""


def known(engine: str, table: Mapping[str, Entry], name: str) -> Entry:
    """Return the entry for an activation in `table`, an engine's table of activations. Raise a ValueError if the
    table has no such entry."""
    if name not in table:
        raise ValueError(f"[activation] engine={engine!r} must know the activation but got {name!r}.")
    return table[name]


def gate_block(cell: "Cell", gate: str, hidden: int) -> slice:
    """Return the rows of one gate on an axis that holds all gates, such as the axis 4H of an LSTM."""
    start = cell.gate_order.index(gate) * hidden
    return slice(start, start + hidden)


# These constants are typed here, because an annotation inside a NamedTuple would make a field.
LSTM_OUTPUTS: tuple[str, ...] = ("h", "c", "gates", "hT", "cT")
OUTPUTS: tuple[str, ...] = ("h", "gates", "hT")


class LSTMCell(NamedTuple):
    """The LSTM cell's options. The equations stand in `engines.ops.cells.lstm_step`.

    gate_order: the order of the four H-blocks on every 4H axis.
    activations: of i, f, g, o and the output, in this order, whatever gate_order is.
    output_peephole: whether the peephole of o reads c[t] ("current") or c[t-1] ("previous").
    cell_clip: bound on |c[t]|, or None. forget_bias: added to the preactivation of f.
    """

    gate_order: str = "ifgo"
    activations: tuple[str, str, str, str, str] = ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh")
    output_peephole: str = "current"
    cell_clip: float | None = None
    forget_bias: float = 0.0

    # Every cell has these attributes: the op's name, the number of gates, the names of an engine's outputs.
    op = "lstm"
    gates = 4
    outputs = LSTM_OUTPUTS
    block = gate_block

    def activation(self, gate: str) -> str:
        """Return the name of the activation of gate "i", "f", "g" or "o", or of the "output"."""
        return self.activations[4 if gate == "output" else "ifgo".index(gate)]


class GRUCell(NamedTuple):
    """The GRU cell's options. The equations stand in `engines.ops.cells.gru_step`.

    gate_order: the order of the three H-blocks on every 3H axis: reset r, update z, candidate n.
    activations: of r, z, n, in this order, whatever gate_order is.
    reset: whether r multiplies the candidate's recurrent product ("after") or the h that enters it ("before").
    flip_z: z is the weight of n in h[t]; otherwise it is the weight of h[t-1].
    """

    gate_order: str = "rzn"
    activations: tuple[str, str, str] = ("sigmoid", "sigmoid", "tanh")
    reset: str = "after"
    flip_z: bool = False

    op = "gru"
    gates = 3
    outputs = OUTPUTS
    block = gate_block

    def activation(self, gate: str) -> str:
        """Return the name of the activation of gate "r", "z" or "n"."""
        return self.activations["rzn".index(gate)]


class RNNCell(NamedTuple):
    """The option of the plain RNN cell. Its only "gate" is the preactivation: h = act(gate)."""

    act: str = "tanh"

    op = "rnn"
    gates = 1
    gate_order = "h"
    outputs = OUTPUTS
    block = gate_block


Cell = LSTMCell | GRUCell | RNNCell
