"""The classes of the recurrent cells. A cell holds the options of an LSTM, GRU, RNN or user's cell, such as its gate
order and activations, but no arrays. H: hidden units. Every cell has these attributes, most of which say which arrays
an engine needs for it:

    op            the name of the user's function: "lstm", "gru", "rnn" or "pointwise"
    gates         the number of preactivations; gate_order: one letter for each, in the order of the weights' rows
    carried       how many blocks of H numbers the state c has
    kept          how many blocks of H numbers the output `gates` has; reads_kept: whether the backward pass reads it
    outputs       the names of an engine's outputs: h, c and gates of all steps; hT and cT after the last step
    apart         whether a step reads the input's part and the recurrent part of a preactivation as two values
    recurrent     whether h is multiplied by Wh
    params        the name of the array with numbers per unit that a step reads; "" for none
    inputs        how many blocks of H numbers a step reads besides the preactivations
    gradients     how many gradients of preactivations a kernel's backward pass stores per unit and step
    summed        the number of parameters per unit whose gradients a kernel sums over the steps
    passes_h      whether a step reads h itself, not only its product with Wh
    reads_h       whether the gradient of a step reads h before or after the step
    stops_c       whether the clip of c makes gradients 0 where it changed c; stops_h: likewise for a projected h
    block         called with (gate, H), it returns the gate's rows in the weights (`gate_block`)

Every cell also has the options of all other cells, such as `reset` and `forget_bias`. An option that a cell does not
use is 0, "", None or False.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from .cell_graph import CellGraph, needed

Entry = TypeVar("Entry")

ACTIVATIONS = ("identity", "relu", "tanh", "sigmoid", "hard_sigmoid", "hard_sigmoid_sixth")
"""The names of the activations. `hard_sigmoid(x) = clip(0.2 x + 0.5, 0, 1)`; `hard_sigmoid_sixth(x) = clip(x / 6 + 0.5,
0, 1)` is the hard sigmoid of torch and Keras 3. The slope of relu at 0 is 0."""

HARD_SIGMOIDS = {"hard_sigmoid": 0.2, "hard_sigmoid_sixth": 1 / 6}
"""The slope of each hard sigmoid between the two points where it is clipped."""


def known(engine: str, table: Mapping[str, Entry], name: str) -> Entry:
    """Return the entry for the activation `name` in `table`, a table of activations. Raise a ValueError that names the
    engine if the table has no such entry."""
    if name not in table:
        raise ValueError(f"[activation] engine={engine!r} must know the activation but got {name!r}.")
    return table[name]


def gate_block(cell: "AnyCell", gate: str, hidden: int) -> slice:
    """Return the slice of one gate on an axis that holds all gates side by side, such as the axis 4H of an LSTM.
    hidden: the number of hidden units H."""
    start = cell.gate_order.index(gate) * hidden
    return slice(start, start + hidden)


# Constants of the classes below. They are defined outside of the classes, because inside a NamedTuple their types
# (annotations) would make them fields.
LSTM_OUTPUTS: tuple[str, ...] = ("h", "c", "gates", "hT", "cT")
OUTPUTS: tuple[str, ...] = ("h", "gates", "hT")
"""LSTM_OUTPUTS, OUTPUTS: the attribute `outputs` of cells with and without c."""

NO_BIAS: float = 0.0
"""The `forget_bias` of cells without this option."""


class NormOptions(NamedTuple):
    """How a cell's step uses layer normalisation. `engines.definitions` has the equations.

    of: what is normalised: "product", the recurrent product h Wh^T; "products", h Wh^T and x Wx^T, each by itself;
    "sum", the sum h Wh^T + x Wx^T + b; None, nothing of these. Only the engine `numpy` gets "products": for the other
    engines `input_norm` normalises x Wx^T before the steps. gates: whether mean and variance are those of the numbers
    of all gates "together", or of the H numbers of "each" gate. c: where an LSTM's c is normalised: only for the
    "output" h, or also in the "state" that the next step gets; None if nowhere. eps: the number that is added to each
    variance.
    """

    of: str | None = "product"
    gates: str = "together"
    c: str | None = None
    eps: float = 1e-5


class LSTMCell(NamedTuple):
    """The options of an LSTM cell. `engines.definitions.lstm` has the equations.

    gate_order: the order of the gates' blocks of H numbers on every axis of size 4H.
    activations: the activations of i, f, g, o and the output, in this order for every gate_order.
    output_peephole: whether the peephole of o reads c[t] ("current") or c[t-1] ("previous").
    cell_clip: the largest |c[t]|, or None for no limit. forget_bias: a number added to the preactivation of f.
    projection_clip: the largest absolute value of a projected h, or None for no limit. clip_gradient: whether gradients
    pass "through" both clips unchanged, or are "zero" where a clip changed the value. norm: the layer normalisation.
    """

    gate_order: str = "ifgo"
    activations: tuple[str, str, str, str, str] = ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh")
    output_peephole: str = "current"
    cell_clip: float | None = None
    forget_bias: float = 0.0
    projection_clip: float | None = None
    clip_gradient: str = "through"
    norm: NormOptions | None = None

    # Every cell has these attributes, which the head of this file explains.
    op = "lstm"
    gates = gradients = 4
    carried = 1
    kept = 4
    inputs = summed = 0
    apart = passes_h = reads_h = False
    recurrent = reads_kept = True
    params = "peephole"
    reset = ""
    outputs = LSTM_OUTPUTS
    block = gate_block

    def activation(self, gate: str) -> str:
        """Return the name of the activation of gate "i", "f", "g" or "o", or of c in h = o act(c), called "output"."""
        return self.activations[4 if gate == "output" else "ifgo".index(gate)]

    @property
    def stops_c(self) -> bool:
        """Whether the clip of c stops gradients: the gradient is 0 where the clip changed c."""
        return self.cell_clip is not None and self.clip_gradient == "zero"

    @property
    def stops_h(self) -> bool:
        """Whether the clip of a projected h stops gradients: the gradient is 0 where the clip changed h."""
        return self.projection_clip is not None and self.clip_gradient == "zero"


class GRUCell(NamedTuple):
    """The options of a GRU cell. `engines.definitions.gru` has the equations.

    gate_order: the order of the blocks of reset r, update z and candidate n on every axis of size 3H.
    activations: the activations of r, z, n, in this order for every gate_order.
    reset: whether r multiplies the candidate's recurrent product ("after") or the h that enters it ("before").
    flip_z: z is the weight of n in h[t]; otherwise it is the weight of h[t-1].
    norm: the layer normalisation.
    """

    gate_order: str = "rzn"
    activations: tuple[str, str, str] = ("sigmoid", "sigmoid", "tanh")
    reset: str = "after"
    flip_z: bool = False
    norm: NormOptions | None = None

    # Every cell has these attributes, which the head of this file explains.
    op = "gru"
    gates = gradients = 3
    carried = inputs = summed = 0
    kept = 3
    apart = recurrent = reads_kept = passes_h = reads_h = True
    params = output_peephole = ""
    forget_bias = NO_BIAS
    cell_clip = projection_clip = None
    clip_gradient = "through"
    stops_c = stops_h = False
    outputs = OUTPUTS
    block = gate_block

    def activation(self, gate: str) -> str:
        """Return the name of the activation of gate "r", "z" or "n"."""
        return self.activations["rzn".index(gate)]


class RNNCell(NamedTuple):
    """The options of the plain RNN cell. Its only "gate" is the preactivation: h = act(gate). act: the name of the
    activation. norm: the layer normalisation."""

    act: str = "tanh"
    norm: NormOptions | None = None

    # Every cell has these attributes, which the head of this file explains. reads_kept is false: the gradient of a
    # step reads only its h, because the derivative of the activation is a function of its result.
    op = "rnn"
    gates = gradients = 1
    carried = inputs = summed = 0
    kept = 1
    recurrent = reads_h = True
    apart = reads_kept = passes_h = stops_c = stops_h = False
    params = reset = output_peephole = ""
    forget_bias = NO_BIAS
    cell_clip = projection_clip = None
    clip_gradient = "through"
    gate_order = "h"
    outputs = OUTPUTS
    block = gate_block

    @property
    def activations(self) -> tuple[str, ...]:
        """The name of the activation in a tuple, because the other cells have a tuple of names."""
        return (self.act,)


class PointwiseCell(NamedTuple):
    """A cell that the user wrote. Its state c holds all states except h, side by side: [B, carried * H].

    graph: the operations of the user's function, which was traced. recurrent: whether a step multiplies h by Wh; if
    not, the units are independent. norm: the layer normalisation of the preactivations.
    """

    graph: CellGraph
    recurrent: bool = True
    norm: NormOptions | None = None

    # Every cell has the attributes below, which the head of this file explains. A cell that the user wrote has no
    # activations with names, and its gates have the letters a, b, c, ...
    op = "pointwise"
    reads_kept = True
    params = "params"
    reset = output_peephole = ""
    forget_bias = NO_BIAS
    cell_clip = projection_clip = None
    clip_gradient = "through"
    stops_c = stops_h = False
    block = gate_block

    @property
    def activations(self) -> tuple[str, ...]:
        return ()

    @property
    def apart(self) -> bool:
        return self.graph.apart

    @property
    def gates(self) -> int:
        return self.graph.gates

    @property
    def gate_order(self) -> str:
        return "".join(chr(ord("a") + k) for k in range(self.graph.gates))

    @property
    def carried(self) -> int:
        return self.graph.states - 1

    @property
    def kept(self) -> int:
        return len(self.graph.saved)

    @property
    def gradients(self) -> int:
        return len(self.graph.stored_gradients)

    @property
    def inputs(self) -> int:
        return self.graph.inputs

    @property
    def summed(self) -> int:
        return self.graph.params

    @property
    def passes_h(self) -> bool:
        graph = self.graph
        # s0: the name of h before the step. forward: whether the new states are computed from s0. -1: no node has this
        # number, so the result is false if s0 is no input of the graph.
        forward = graph.number.get("s0", -1) in needed(graph.nodes, graph.forward)
        return forward or graph.passes_h

    @property
    def reads_h(self) -> bool:
        return self.graph.reads("s0") or self.graph.reads_after(0)

    @property
    def outputs(self) -> tuple[str, ...]:
        return LSTM_OUTPUTS if self.graph.states > 1 else OUTPUTS


Cell = LSTMCell | GRUCell | RNNCell
AnyCell = Cell | PointwiseCell


def normalises_input(cell: AnyCell) -> bool:
    """Return whether the cell normalises both x Wx^T and h Wh^T, each by itself."""
    return cell.norm is not None and cell.norm.of == "products"


def norm_blocks(cell: AnyCell) -> int:
    """Return into how many blocks the norm divides the axis of all gates: a block per gate if each gate has its own
    mean and variance, else 1."""
    return cell.gates if cell.norm is not None and cell.norm.gates == "each" else 1


def form_of(cell: AnyCell) -> Any:
    """Return the cell with fixed values in place of the numbers that generated code gets as arguments: the forget bias
    is 0, and the limits of the clips and the eps of a norm are 1. Caches of generated code use the result as a key, so
    that cells that differ only in these numbers share their code."""
    if cell.norm is not None:
        cell = cell._replace(norm=cell.norm._replace(eps=1.0))
    limits = {name: 1.0 for name in ("cell_clip", "projection_clip") if getattr(cell, name) is not None}
    whole: Any = cell  # the same cell, for the type checker
    return whole._replace(forget_bias=0.0, **limits) if limits or cell.forget_bias else cell
