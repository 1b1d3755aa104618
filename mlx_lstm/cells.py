"""What a recurrent cell is, apart from its arrays: its gates, their order, their activations, its options."""

from __future__ import annotations

from typing import NamedTuple

ACTIVATIONS = ("identity", "relu", "tanh", "sigmoid", "hard_sigmoid")
"""Names an activation may have. `hard_sigmoid(x) = clip(0.2 x + 0.5, 0, 1)`; the slope of relu at 0 is 0."""


class LSTMCell(NamedTuple):
    """The LSTM cell's options. The equations stand in `engine_ops.lstm_step`.

    gate_order is the order of the four H-blocks on every 4H axis; activations are always those of i, f, g, o and of
    the output; output_peephole says whether o peeps at c[t] ("current") or at c[t-1] ("previous").
    """

    gate_order: str = "ifgo"
    activations: tuple[str, str, str, str, str] = ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh")
    output_peephole: str = "current"
    cell_clip: float | None = None
    forget_bias: float = 0.0

    def activation(self, gate: str) -> str:
        """The activation of gate "i", "f", "g" or "o", or of the "output"."""
        return self.activations[4 if gate == "output" else "ifgo".index(gate)]

    def block(self, gate: str, hidden: int) -> slice:
        """Where a gate's rows lie on a 4H axis."""
        start = self.gate_order.index(gate) * hidden
        return slice(start, start + hidden)
