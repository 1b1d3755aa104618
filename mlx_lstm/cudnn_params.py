"""cuDNN's parameter buffer: what lies where in it, its size, its conversion from and to one array per gate.

The buffer is dense and one-dimensional. With L layers of D directions (1, or 2: forward, backward) and G gates,
all matrices come first and all biases after them, by layer, in a layer by direction, in a direction

    W_g [H, in] for each gate, R_g [H, S] for each gate, Pr [P, H] with a projection
    bW_g [H]    for each gate, bR_g [H]   for each gate

in is the input's size I for layer 0 (0 with skip_input, which has no matrices there), D S for the others; S, the width
of h, is P = num_proj, or H = num_units without projection. Gates: lstm i, f, c, o; gru r, u, n; rnn_relu and rnn_tanh
their only one. Keras, jax and PyTorch rely on this packing; the original calls the buffer opaque.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import mlx.core as mx

from .checks import FLOATS, check_array, check_integer, check_number, check_option, fail

GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}
INPUT_MODES = ("linear_input", "skip_input", "auto_select")
DIRECTIONS = ("unidirectional", "bidirectional")


class CudnnRNNParamsToCanonicalOutput(NamedTuple):
    """The arrays of a parameter buffer: matrices, and biases [H], in the buffer's order."""

    weights: list[mx.array]
    biases: list[mx.array]


def cudnn_rnn_params_size(
    num_layers: int,
    num_units: int,
    input_size: int,
    *,
    T: mx.Dtype = mx.float32,
    S: mx.Dtype = mx.int32,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    num_proj: int = 0,
) -> mx.array:
    """How many elements the parameter buffer has, as TensorFlow's CudnnRNNParamsSize says it.

    Equals the number of parameters of a `torch.nn.LSTM`, `GRU` or `RNN`; skip_input has no input matrices in layer 0.

    Args:
        num_layers, num_units, input_size (int): L, H, I.
        T (Dtype): that of the parameters. Default: `mlx.core.float32`.
        S (Dtype): that of the result, int32 or int64. Default: `mlx.core.int32`.
        rnn_mode, input_mode, direction, dropout, seed, seed2: as in `cudnn_rnn`. The last three change nothing.
        num_proj (int): P, of an lstm; 0 for no projection. Default: 0.

    Returns:
        array: the size, [1].

    Raises:
        ValueError: a rule on an argument is broken.

    Example:
        >>> from mlx_lstm.cudnn import cudnn_rnn_params_size
        >>> cudnn_rnn_params_size(1, 5, 4).item()
        220
    """
    op = "cudnn_rnn_params_size"
    check_option(op, "T", T, FLOATS)
    check_option(op, "S", S, (mx.int32, mx.int64))
    check_attributes(op, rnn_mode, input_mode, direction, dropout, seed, seed2)
    return mx.array([layout(op, num_layers, num_units, input_size, rnn_mode, input_mode, direction, num_proj).size], S)


def cudnn_rnn_params_to_canonical(
    num_layers: int,
    num_units: int,
    input_size: int,
    params: mx.array,
    num_params: int,
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
) -> CudnnRNNParamsToCanonicalOutput:
    """The buffer as one array per gate: TensorFlow's CudnnRNNParamsToCanonical.

    The arrays are views of the buffer, and differentiable. `cudnn_rnn_canonical_to_params` is the inverse.

    Args:
        num_layers, num_units, input_size (int): L, H, I.
        params (array): the buffer, [params_size].
        num_params (int): how many weights, and how many biases, there are: per layer and direction 8 each for lstm, 6
            for gru, 2 for the others.
        rnn_mode, input_mode, direction, dropout, seed, seed2: as in `cudnn_rnn`. The last three change nothing.

    Returns:
        CudnnRNNParamsToCanonicalOutput: weights, by layer and direction W_g [H, in] of every gate, then R_g [H, S]; and
        biases [H] likewise. With skip_input the W_g of layer 0 are there, [H, 0]; the original fails.

    Raises:
        ValueError: a rule on an argument is broken.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_params_to_canonical
        >>> weights, biases = cudnn_rnn_params_to_canonical(1, 5, 4, mx.zeros((220,)), 8)
        >>> weights[0].shape, weights[4].shape, biases[7].shape
        ((5, 4), (5, 5), (5,))
    """
    op = "cudnn_rnn_params_to_canonical"
    check_attributes(op, rnn_mode, input_mode, direction, dropout, seed, seed2)
    where = layout(op, num_layers, num_units, input_size, rnn_mode, input_mode, direction, 0)
    return to_canonical(op, where, params, {"num_params": num_params}, {"num_params": num_params})


def cudnn_rnn_params_to_canonical_v2(
    num_layers: int,
    num_units: int,
    input_size: int,
    params: mx.array,
    num_params_weights: int,
    num_params_biases: int,
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    num_proj: int = 0,
) -> CudnnRNNParamsToCanonicalOutput:
    """`cudnn_rnn_params_to_canonical` with a projection: TensorFlow's CudnnRNNParamsToCanonicalV2.

    Args:
        num_params_weights (int): how many weights there are; an lstm with projection has 9 per layer and direction.
        num_params_biases (int): how many biases there are.
        num_proj (int): P, of an lstm; 0 for no projection, which the original refuses. Default: 0.
        num_layers, num_units, input_size, params and the other attributes: as in `cudnn_rnn_params_to_canonical`.

    Returns:
        CudnnRNNParamsToCanonicalOutput: as there; Pr [P, H] follows the R_g of its layer and direction.

    Raises:
        ValueError: a rule on an argument is broken.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_params_size, cudnn_rnn_params_to_canonical_v2
        >>> params = mx.zeros((cudnn_rnn_params_size(1, 5, 4, num_proj=2).item(),))
        >>> cudnn_rnn_params_to_canonical_v2(1, 5, 4, params, 9, 8, num_proj=2).weights[-1].shape
        (2, 5)
    """
    op = "cudnn_rnn_params_to_canonical_v2"
    check_attributes(op, rnn_mode, input_mode, direction, dropout, seed, seed2)
    where = layout(op, num_layers, num_units, input_size, rnn_mode, input_mode, direction, num_proj)
    counts = {"num_params_weights": num_params_weights}, {"num_params_biases": num_params_biases}
    return to_canonical(op, where, params, *counts)


def cudnn_rnn_canonical_to_params(
    num_layers: int,
    num_units: int,
    input_size: int,
    weights: Sequence[mx.array],
    biases: Sequence[mx.array],
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
) -> mx.array:
    """The buffer out of one array per gate: TensorFlow's CudnnRNNCanonicalToParams.

    Args:
        num_layers, num_units, input_size (int): L, H, I.
        weights, biases (sequence of arrays): as `cudnn_rnn_params_to_canonical` returns them. Only the number of
            elements of each counts, not its shape.
        rnn_mode, input_mode, direction, dropout, seed, seed2: as in `cudnn_rnn`. The last three change nothing.

    Returns:
        array: params, [params_size].

    Raises:
        ValueError: a rule on an argument is broken.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_canonical_to_params
        >>> weights = [mx.zeros((5, 4))] * 4 + [mx.zeros((5, 5))] * 4
        >>> cudnn_rnn_canonical_to_params(1, 5, 4, weights, [mx.zeros((5,))] * 8).shape
        (220,)
    """
    op = "cudnn_rnn_canonical_to_params"
    check_attributes(op, rnn_mode, input_mode, direction, dropout, seed, seed2)
    where = layout(op, num_layers, num_units, input_size, rnn_mode, input_mode, direction, 0)
    return from_canonical(op, where, weights, biases)


def cudnn_rnn_canonical_to_params_v2(
    num_layers: int,
    num_units: int,
    input_size: int,
    weights: Sequence[mx.array],
    biases: Sequence[mx.array],
    *,
    rnn_mode: str = "lstm",
    input_mode: str = "linear_input",
    direction: str = "unidirectional",
    dropout: float = 0.0,
    seed: int = 0,
    seed2: int = 0,
    num_proj: int = 0,
) -> mx.array:
    """`cudnn_rnn_canonical_to_params` with a projection: TensorFlow's CudnnRNNCanonicalToParamsV2.

    Args:
        num_proj (int): P, of an lstm; 0 for no projection. Default: 0.
        All others: as in `cudnn_rnn_canonical_to_params`.

    Returns:
        array: params, [params_size].

    Raises:
        ValueError: a rule on an argument is broken.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_canonical_to_params_v2
        >>> weights = [mx.zeros((5, 4))] * 4 + [mx.zeros((5, 2))] * 4 + [mx.zeros((2, 5))]
        >>> cudnn_rnn_canonical_to_params_v2(1, 5, 4, weights, [mx.zeros((5,))] * 8, num_proj=2).shape
        (170,)
    """
    op = "cudnn_rnn_canonical_to_params_v2"
    check_attributes(op, rnn_mode, input_mode, direction, dropout, seed, seed2)
    where = layout(op, num_layers, num_units, input_size, rnn_mode, input_mode, direction, num_proj)
    return from_canonical(op, where, weights, biases)


# --- The layout ------------------------------------------------------------------------------------------------------


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
    def size(self) -> int:
        """The number of elements."""
        weights, biases = self.canonical()
        return sum(map(prod, weights + biases))


def layout(
    op: str,
    num_layers: int,
    num_units: int,
    input_size: int,
    rnn_mode: str,
    input_mode: str,
    direction: str,
    num_proj: int,
) -> Layout:
    """The layout these arguments describe. `check_attributes` has seen the words."""
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
    return Layout(rnn_mode, L, 1 + (direction == "bidirectional"), I, H, P, skip)


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


def to_canonical(
    op: str, where: Layout, params: mx.array, weights: dict[str, int], biases: dict[str, int]
) -> CudnnRNNParamsToCanonicalOutput:
    """The buffer's arrays; `weights` and `biases` are the counts the caller expects, by the argument's name."""
    check_params(op, where, params)
    shapes = where.canonical()
    for given, found in zip((weights, biases), shapes, strict=True):
        ((name, number),) = given.items()
        if number != len(found):
            fail(op, f"{name} must be {len(found)} for these layers", repr(number))
    every = [*shapes[0], *shapes[1]]
    parts = mx.split(params, list(accumulate(map(prod, every)))[:-1])
    arrays = [part.reshape(shape) for part, shape in zip(parts, every, strict=True)]
    return CudnnRNNParamsToCanonicalOutput(arrays[: len(shapes[0])], arrays[len(shapes[0]) :])


def from_canonical(op: str, where: Layout, weights: Sequence[mx.array], biases: Sequence[mx.array]) -> mx.array:
    """The buffer out of its arrays."""
    for name, arrays, shapes in zip(("weights", "biases"), (weights, biases), where.canonical(), strict=True):
        if not isinstance(arrays, Sequence) or len(arrays) != len(shapes):
            number = len(arrays) if isinstance(arrays, Sequence) else type(arrays).__name__
            fail(op, f"{name} must be {len(shapes)} arrays for these layers", number)
        for n, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
            check_array(
                op, f"{name}[{n}]", array, list(getattr(array, "shape", ())), getattr(weights[0], "dtype", None)
            )
            if array.size != prod(shape):
                fail(op, f"{name}[{n}] must have {prod(shape)} elements, {list(shape)},", f"shape {list(array.shape)}")
    return mx.concatenate([array.reshape(-1) for array in (*weights, *biases)])


# --- Checks ----------------------------------------------------------------------------------------------------------


def check_attributes(
    op: str, rnn_mode: object, input_mode: object, direction: object, dropout: object, seed: object, seed2: object
) -> None:
    """The attributes all these ops have."""
    check_option(op, "rnn_mode", rnn_mode, tuple(GATES))
    check_option(op, "input_mode", input_mode, INPUT_MODES)
    check_option(op, "direction", direction, DIRECTIONS)
    if not 0 <= check_number(op, "dropout", dropout) < 1:
        fail(op, "dropout must lie in [0, 1)", dropout)
    check_integer(op, "seed", seed)
    check_integer(op, "seed2", seed2)


def check_params(op: str, where: Layout, params: object, dtype: mx.Dtype | None = None) -> None:
    """The buffer has the right size, which the original does not check."""
    check_array(op, "params", params, ["params_size"], dtype)
    if params.shape[0] != where.size:
        D = "both directions" if where.D == 2 else "one direction"
        rule = f"params must have {where.size} elements for {where.L} layers of {D} of {where.mode}"
        rule += f", input_size {where.I}, num_units {where.H}" + (f", num_proj {where.P}" if where.P else "")
        fail(op, rule + (", skip_input" if where.skip else ""), params.shape[0])


def count(op: str, name: str, value: object, *, least: int) -> int:
    """An integer, given as such or as a scalar array."""
    if isinstance(value, mx.array) and value.size == 1 and mx.issubdtype(value.dtype, mx.integer):
        value = value.item()
    return check_integer(op, name, value, least=least)
