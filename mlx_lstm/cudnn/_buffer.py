"""cuDNN's parameter buffer: what lies where in it, its size, its conversion from and to one array per gate.

The buffer is dense and one-dimensional. With L layers of D directions (1, or 2: forward, backward) and G gates,
all matrices come first and all biases after them, by layer, in a layer by direction, in a direction

    W_g [H, in] for each gate, R_g [H, S] for each gate, Pr [P, H] with a projection
    bW_g [H]    for each gate, bR_g [H]   for each gate

in is the input's size I for layer 0 (0 with skip_input, which has no matrices there), D S for the others; S, the width
of h, is P = num_proj, or H = num_units without projection. Gates: lstm i, f, c, o; gru r, u, n; rnn_relu and rnn_tanh
their only one. Keras, jax and PyTorch rely on this packing; the original calls the buffer opaque.
"""

from itertools import accumulate
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ..checks import check_array, check_integer, check_number, check_option, fail

GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}
INPUT_MODES = ("linear_input", "skip_input", "auto_select")
DIRECTIONS = ("unidirectional", "bidirectional")


class Attributes(NamedTuple):
    """The attributes all these ops have, as the caller gave them."""

    rnn_mode: str
    input_mode: str
    direction: str
    dropout: float
    seed: int
    seed2: int
    num_proj: int = 0

    @property
    def D(self) -> int:
        """Directions."""
        return 2 if self.direction == "bidirectional" else 1


class Layout(NamedTuple):
    """What a stack of layers is, and so its buffer: rnn_mode, L layers, D directions, sizes I and H, the projection's P
    or 0; skip: layer 0 has no input matrices."""

    mode: str
    L: int
    D: int
    I: int
    H: int
    P: int
    skip: bool

    @property
    def G(self) -> int:
        """Gates."""
        return GATES[self.mode]

    @property
    def S(self) -> int:
        """The width of h, of one direction."""
        return self.P or self.H

    def columns(self, layer: int) -> int:
        """Those of a layer's input matrices."""
        return self.D * self.S if layer else 0 if self.skip else self.I

    def matrices(self, layer: int) -> list[tuple[int, int]]:
        """The shapes of one direction's matrices, those of all gates as one: W [G H, in], R [G H, S], Pr [P, H]."""
        rows = self.G * self.H
        return [(rows, self.columns(layer)), (rows, self.S)] + ([(self.P, self.H)] if self.P else [])

    def canonical(self) -> tuple[list[tuple[int, int]], list[tuple[int]]]:
        """The shapes of all matrices and all biases, one per gate, in the buffer's order."""
        weights = []
        for layer in range(self.L):
            W, R, *projection = self.matrices(layer)
            gates = [(self.H, columns) for _, columns in (W, R) for _ in range(self.G)]
            weights += (gates + projection) * self.D
        return weights, [(self.H,)] * (self.L * self.D * 2 * self.G)

    @property
    def counts(self) -> tuple[int, int]:
        """How many matrices and how many biases `canonical` has."""
        return self.L * self.D * (2 * self.G + bool(self.P)), self.L * self.D * 2 * self.G

    @property
    def size(self) -> int:
        """The number of elements. All layers but the first are alike, so that a wrong number of them costs nothing."""
        first, other = (sum(map(prod, self.matrices(layer))) for layer in range(2))
        return self.D * (first + (self.L - 1) * other) + self.counts[1] * self.H


def layout(op: str, num_layers: int, num_units: int, input_size: int, attributes: Attributes) -> Layout:
    """The layout these arguments describe, once they are found right."""
    check_attributes(op, attributes)
    rnn_mode, input_mode, num_proj = attributes.rnn_mode, attributes.input_mode, attributes.num_proj
    counts = {"num_layers": num_layers, "num_units": num_units, "input_size": input_size}
    L, H, I = (count(op, name, value, least=1) for name, value in counts.items())
    P = count(op, "num_proj", num_proj, least=0)
    if P and rnn_mode != "lstm":
        fail(op, f"num_proj must be 0 with rnn_mode={rnn_mode!r}", P)
    if P > H:
        fail(op, f"num_proj must be at most num_units = {H}", P)
    if input_mode == "skip_input" and I != H:
        fail(op, f"input_size must be num_units = {H} with input_mode='skip_input'", I)
    skip = input_mode == "skip_input" or (input_mode == "auto_select" and I == H)
    return Layout(rnn_mode, L, attributes.D, I, H, P, skip)


def layer_arrays(where: Layout, params: mx.array) -> list[dict[str, mx.array]]:
    """Each layer's arrays as the recurrence takes them, with the biases in two parts: `Wx` (unless skipped), `Wh`, `Wp`
    (with a projection), `bW` and `bR` [D, G H].

    Views of the buffer, but for the `Wx` of two directions, between which the other matrices lie.
    """
    D, GH = where.D, where.G * where.H
    blocks = [[prod(shape) for shape in where.matrices(layer)] for layer in range(where.L)]
    *layers, biases = mx.split(params, list(accumulate(D * sum(sizes) for sizes in blocks)))
    biases = biases.reshape(where.L, D, 2, GH)
    found = []
    for layer, sizes in enumerate(blocks):
        Wx, *rest = mx.split(layers[layer].reshape(D, -1), list(accumulate(sizes))[:-1], axis=1)
        arrays = {} if not sizes[0] else {"Wx": Wx.reshape(D * GH, -1)}
        for name, part, shape in zip(("Wh", "Wp"), rest, where.matrices(layer)[1:], strict=False):
            arrays[name] = part.reshape(shape if D == 1 else (D, *shape))
        found.append(arrays | {"bW": biases[layer, :, 0], "bR": biases[layer, :, 1]})
    return found


def join_layers(where: Layout, layers: list[dict[str, mx.array]]) -> mx.array:
    """The buffer out of arrays as `layer_arrays` has them: of gradients, for one. One copy."""
    D = where.D
    rows = ([arrays[name].reshape(D, -1) for name in ("Wx", "Wh", "Wp") if name in arrays] for arrays in layers)
    matrices = [part[d] for parts in rows for d in range(D) for part in parts]
    return mx.concatenate(matrices + [mx.stack([a["bW"], a["bR"]], axis=1).reshape(-1) for a in layers])


def check_attributes(op: str, attributes: Attributes) -> None:
    """All but the projection's width, which depends on the sizes."""
    check_option(op, "rnn_mode", attributes.rnn_mode, tuple(GATES))
    check_option(op, "input_mode", attributes.input_mode, INPUT_MODES)
    check_option(op, "direction", attributes.direction, DIRECTIONS)
    if not 0 <= check_number(op, "dropout", attributes.dropout) <= 1:
        fail(op, "dropout must lie in [0, 1]", attributes.dropout)
    check_integer(op, "seed", attributes.seed)
    check_integer(op, "seed2", attributes.seed2)


def check_params(op: str, where: Layout, params: mx.array, dtype: mx.Dtype | None = None) -> None:
    """The buffer has the right size, which the original does not check: of a longer one it ignores the rest."""
    check_array(op, "params", params, ["params_size"], dtype)
    if params.shape[0] != where.size:
        D = "both directions" if where.D == 2 else "one direction"
        rule = f"params must have {where.size} elements for {where.L} layers of {D} of {where.mode}"
        rule += f", input_size {where.I}, num_units {where.H}" + (f", num_proj {where.P}" if where.P else "")
        rule += ", skip_input" if where.skip else ""
        longer = f": pass params[:{where.size}]," if params.shape[0] > where.size else ""
        fail(op, rule + longer, f"{params.shape[0]} elements")


def count(op: str, name: str, value: object, *, least: int) -> int:
    """An integer, given as such or as a scalar array."""
    if isinstance(value, mx.array) and value.size == 1 and mx.issubdtype(value.dtype, mx.integer):
        value = value.item()
    return check_integer(op, name, value, least=least)
