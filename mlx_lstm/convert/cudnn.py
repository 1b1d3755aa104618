"""cuDNN's parameter buffer: its layout, its reader and its writer.

The buffer is dense and one-dimensional, for L layers of D directions (1, or 2: forward, backward) and G gates. All
matrices come first, then all biases. Both are ordered by layer, and within a layer by direction. One direction has the
matrices of the first line and the biases of the second:

    W_g [H, in] for each gate, R_g [H, S] for each gate, Pr [P, H] with a projection
    bW_g [H]    for each gate, bR_g [H]   for each gate

The number of columns `in` is the input size I for layer 0 (0 with skip_input, where layer 0 has no input matrices), and
D S for the other layers. S, the size of h in one direction, is P = num_proj, or H = num_units without a projection. The
gates of an lstm are i, f, c, o, of a gru r, u, n; rnn_relu and rnn_tanh have one gate. Keras, jax and PyTorch rely on
this layout; TensorFlow's documentation calls the buffer opaque.

This package joins the matrices W_g of all gates into one array Wx, and R_g, bW_g, bR_g into Wh, bW, bR; Pr is Wp. In
`Weights` the biases are called bx and bh.
"""

from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from ..engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from ..engines.directions import part
from ..engines.tracing import split_apart
from ..ground.checks import check_array, check_flag, check_integer, check_option, fail
from .weights import Format, Weights, as_stored, checked, to_mlx, two_biases

GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}
"""The number of gates by rnn_mode."""

FORMAT = Format(nonlinearity=("tanh", "relu"), projection=True)
"""What the buffer can store: a plain RNN with tanh or relu, and a projection; no other option of a cell."""

CELLS: dict[str, Cell] = {"lstm": LSTMCell(), "gru": GRUCell(), "rnn_relu": RNNCell("relu"), "rnn_tanh": RNNCell()}
"""The cell that each rnn_mode runs, with its options."""


class Layout(NamedTuple):
    """The layout of a parameter buffer. mode: cuDNN's rnn_mode; L, D: the numbers of layers and directions; I: the
    input size; H: the number of units; P: the size of a projected h, or 0; skip: whether layer 0 has no input
    matrices."""

    mode: str
    L: int
    D: int
    I: int
    H: int
    P: int
    skip: bool

    @property
    def G(self) -> int:
        """Return the number of gates."""
        return GATES[self.mode]

    @property
    def S(self) -> int:
        """Return the size of h in one direction: P with a projection, else H."""
        return self.P or self.H

    def columns(self, layer: int) -> int:
        """Return the number of columns of the input matrices of the layer with the number `layer`. A layer above layer
        0 reads h of all D directions of the layer below, S numbers each."""
        return self.D * self.S if layer else 0 if self.skip else self.I

    def matrices(self, layer: int) -> list[tuple[int, int]]:
        """Return the shapes of one direction's matrices in a layer, with the rows of all G gates in one matrix: W [G H,
        in], R [G H, S] and, with a projection, [P, H]. in: the number of inputs of the layer; S: the size of h."""
        rows = self.G * self.H
        return [(rows, self.columns(layer)), (rows, self.S)] + ([(self.P, self.H)] if self.P else [])

    def canonical(self) -> tuple[list[tuple[int, int]], list[tuple[int]]]:
        """Return (shapes of all matrices, shapes of all biases) in the order of the buffer, in TensorFlow's canonical
        form: each gate has a separate W, R, bW and bR; a projection is one matrix."""
        weights = []
        for layer in range(self.L):
            # W, R: the shapes of the matrices of all gates together; projection: [] or its shape.
            W, R, *projection = self.matrices(layer)
            gates = [(self.H, columns) for _, columns in (W, R) for _ in range(self.G)]
            weights += (gates + projection) * self.D
        return weights, [(self.H,)] * (self.L * self.D * 2 * self.G)  # 2: bW and bR of each gate

    @property
    def counts(self) -> tuple[int, int]:
        """Return (number of matrices, number of biases) in the buffer. In each layer and direction each gate has two
        matrices, W and R, and two biases; a projection adds one matrix."""
        return self.L * self.D * (2 * self.G + bool(self.P)), self.L * self.D * 2 * self.G

    @property
    def size(self) -> int:
        """Return the number of elements of the parameter buffer. All layers above layer 0 have the same size, so a
        product replaces a loop over the layers, which would be slow if a caller asks for very many layers."""
        # first, other: the elements of one direction's matrices in layer 0, and in any other layer.
        first, other = (sum(map(prod, self.matrices(layer))) for layer in range(2))
        return self.D * (first + (self.L - 1) * other) + self.counts[1] * self.H  # counts[1]: the number of biases


def layer_arrays(where: Layout, params: mx.array) -> list[dict[str, mx.array]]:
    """Return for each layer a dict of its arrays in the shapes that the recurrence takes: `Wx` [D G H, in] (unless
    layer 0 has no input matrices), `Wh` [G H, S] or [2, G H, S], `Wp` (with a projection) [P, H] or [2, P, H], and the
    two biases `bW` and `bR` [D, G H]. params: the parameter buffer; where: its layout. in: the width of the layer's
    input. S: the width of h that a step reads, P with a projection, else H.

    All arrays are views of the buffer, except the `Wx` of two directions: in the buffer other matrices lie between the
    two halves of this array.
    """
    D, GH = where.D, where.G * where.H  # GH: the rows of one direction's matrices of all gates
    # sizes: for each layer the numbers of elements of one direction's matrices W, R and, with a projection, Pr. The
    # buffer is split after the matrices of each layer; the rest contains the biases.
    sizes = [[prod(shape) for shape in where.matrices(layer)] for layer in range(where.L)]
    # MLX cannot compile two equal splits of an array. A forward op and its gradient op in one compiled function both
    # split `params`, so `split_apart` replaces `mx.split`.
    *layers, biases = split_apart(params, list(accumulate(D * sum(of_layer) for of_layer in sizes)))
    biases = biases.reshape(where.L, D, 2, GH)  # [layer, direction, bW or bR, gate and unit]
    by_layer = []
    for layer, of_layer in enumerate(sizes):
        # The matrices of a layer are one row of numbers per direction; `accumulate` gives the end of each matrix in a
        # row.
        Wx, *rest = mx.split(layers[layer].reshape(D, -1), list(accumulate(of_layer))[:-1], axis=1)
        arrays = {} if not of_layer[0] else {"Wx": Wx.reshape(D * GH, -1)}  # of_layer[0]: the size of W
        for name, matrix, shape in zip(("Wh", "Wp"), rest, where.matrices(layer)[1:], strict=False):
            arrays[name] = matrix.reshape(shape if D == 1 else (D, *shape))
        by_layer.append(arrays | {"bW": biases[layer, :, 0], "bR": biases[layer, :, 1]})
    return by_layer


def join_layers(where: Layout, layers: list[dict[str, mx.array]]) -> mx.array:
    """Join the arrays of all layers, or their gradients, into a parameter buffer: the inverse of `layer_arrays`.
    layers: for each layer a dict with Wx, Wh, bW, bR and, with a projection, Wp. The data are copied once."""
    D = where.D
    # rows: for each layer its matrices, each as one row of numbers per direction.
    rows = ([arrays[name].reshape(D, -1) for name in ("Wx", "Wh", "Wp") if name in arrays] for arrays in layers)
    # The order of the buffer: layer by layer, in each layer direction by direction, in each direction Wx, Wh, Wp.
    matrices = [matrix[way] for of_layer in rows for way in range(D) for matrix in of_layer]
    biases = [mx.stack([arrays["bW"], arrays["bR"]], axis=1).reshape(-1) for arrays in layers]  # [D, 2, G H] of a layer
    return mx.concatenate(matrices + biases)


def from_cudnn(
    params: Any,
    *,
    num_layers: int,
    num_units: int,
    input_size: int,
    rnn_mode: str = "lstm",
    bidirectional: bool = False,
    num_proj: int = 0,
) -> Weights:
    """Return the weights in cuDNN's flat parameter buffer.

    Args:
        params (array): [params_size].
        num_layers, num_units, input_size (int): the sizes, which cannot be read from the buffer.
        rnn_mode (str): `"lstm"`, `"gru"`, `"rnn_tanh"` or `"rnn_relu"`. Default: `"lstm"`.
        bidirectional (bool): whether the buffer holds both directions. Default: `False`.
        num_proj (int): the size of the projected h of an lstm; 0, or num_units as in cuDNN, for no projection.
            Default: 0.

    Returns:
        Weights: views of the buffer.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert, torch
        >>> torch.from_weights(convert.from_cudnn(mx.zeros((220,)), num_layers=1, num_units=5, input_size=4))
        LSTM(4, 5)
    """
    op = "from_cudnn"
    check_option(op, "rnn_mode", rnn_mode, tuple(GATES))
    check_flag(op, "bidirectional", bidirectional)
    sizes = {"num_layers": num_layers, "input_size": input_size, "num_units": num_units}
    L, I, H = (check_integer(op, name, value, least=1) for name, value in sizes.items())
    P = check_integer(op, "num_proj", num_proj, least=0)
    if P > H:
        fail(op, f"num_proj must be at most num_units = {H}", P)
    P = P if P < H else 0  # cuDNN turns off a projection that makes h no narrower
    where = Layout(rnn_mode, L, D=2 if bidirectional else 1, I=I, H=H, P=P, skip=False)
    params = to_mlx(params)
    check_array(op, "params", params, ["params_size"])
    if params.size != where.size:
        fail(op, f"params must have {where.size} elements for these sizes", f"{params.size} elements")
    layers = []
    for arrays in layer_arrays(where, params):
        # `part` takes the biases of both directions side by side, [D G H].
        arrays |= {"bx": arrays.pop("bW").reshape(-1), "bh": arrays.pop("bR").reshape(-1)}
        layers.append([part(arrays, way) for way in range(2)] if where.D == 2 else [arrays])
    return checked(op, Weights(CELLS[rnn_mode], layers), title=lambda layer, way, word: f"{word} of layer {layer}")


def to_cudnn(weights: Weights) -> tuple[mx.array, dict[str, Any]]:
    """Return cuDNN's parameter buffer, and the keywords with which `from_cudnn` reads it.

    A single bias becomes the bias of the input's product, as in `to_torch`; a missing bias becomes zeros.

    Returns:
        tuple: the buffer [params_size], and num_layers, num_units, input_size, rnn_mode, bidirectional, num_proj.

    Raises:
        ValueError: cuDNN has no place for an option of the cell.

    Example:
        >>> from mlx_lstm import convert, torch
        >>> params, sizes = convert.to_cudnn(convert.from_torch(torch.GRU(3, 4)))
        >>> params.shape, convert.from_cudnn(params, **sizes)
        ((108,), Weights(GRU, 3 -> 4))
    """
    weights = as_stored("to_cudnn", weights, FORMAT)  # refuses options that the buffer cannot hold
    cell, D, H, P = weights.cell, weights.directions, weights.hidden_size, weights.proj_size
    mode = f"rnn_{cell.activations[0]}" if cell.op == "rnn" else cell.op
    where = Layout(mode, len(weights.layers), D, weights.input_size, H, P, skip=False)
    layers = []
    for layer in weights.layers:
        # directions: the arrays of each direction, with zeros for a missing bias. `join_layers` takes both directions
        # stacked along a new first axis.
        directions = [arrays | dict(zip(("bW", "bR"), two_biases(arrays), strict=True)) for arrays in layer]
        names = ("Wx", "Wh", "Wp", "bW", "bR") if P else ("Wx", "Wh", "bW", "bR")
        layers.append({name: mx.stack([arrays[name] for arrays in directions]) for name in names})
    sizes = {"num_layers": where.L, "num_units": H, "input_size": where.I, "rnn_mode": mode}
    return join_layers(where, layers), sizes | {"bidirectional": D == 2, "num_proj": P}
