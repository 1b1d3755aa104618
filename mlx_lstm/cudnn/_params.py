"""Compute the size of cuDNN's parameter buffer, split it into arrays, and join arrays into it.

The parameter buffer is one array with all weights and biases of L layers with D directions. TensorFlow calls the
separate arrays canonical: for each gate g one W_g [H, in], which multiplies the layer's input, and one R_g [H, S],
which multiplies h, each with a bias [H]. in: the width of the layer's input, H: units, S: the width of h, P: the width
of the projection. (The arguments T and S of `cudnn_rnn_params_size` are dtypes, as in TensorFlow.)
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ..engines.tracing import split_apart
from ..ground.checks import FLOATS, check_array, check_option, fail
from ._buffer import Attributes, Layout, check_params, count, layout


class CudnnRNNParamsToCanonicalOutput(NamedTuple):
    """The arrays of a parameter buffer in the buffer's order: `weights`, the matrices, and `biases`, each [H]. H: the
    number of units."""

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
    """Return the number of elements of the parameter buffer: TensorFlow's CudnnRNNParamsSize.

    The size equals the number of parameters of a `torch.nn.LSTM`, `GRU` or `RNN`. With skip_input layer 0 has no input
    matrices.

    Args:
        num_layers, num_units, input_size (int): the number of layers L, of units H and of input features I.
        T (Dtype): dtype of the parameters. Default: `mlx.core.float32`.
        S (Dtype): dtype of the result, int32 or, from 2^31 elements on, int64. Default: `mlx.core.int32`.
        rnn_mode (str): `"lstm"`, `"gru"`, `"rnn_tanh"` or `"rnn_relu"`.
        input_mode (str): `"linear_input"`, `"skip_input"` (layer 0 has no input matrices) or `"auto_select"`.
        direction (str): `"unidirectional"` or `"bidirectional"`.
        dropout, seed, seed2: checked as in `cudnn_rnn`, but without effect here.
        num_proj (int): the width P of a projected h, for an lstm only; 0 or H for none. Default: 0.

    Returns:
        array: the size, [1].

    Example:
        >>> from mlx_lstm.cudnn import cudnn_rnn_params_size
        >>> cudnn_rnn_params_size(1, 5, 4).item()
        220
    """
    op = "cudnn_rnn_params_size"
    check_option(op, "T", T, FLOATS)
    check_option(op, "S", S, (mx.int32, mx.int64))
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2, num_proj)
    size = layout(op, num_layers, num_units, input_size, attributes).size
    if size >= 2 ** (8 * S.size - 1):  # S.size: the bytes of an integer, 4 or 8
        fail(op, "the size must be less than 2^31 with S=mlx.core.int32, than 2^63 with S=mlx.core.int64,", size)
    return mx.array([size], S)


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
    """Split the parameter buffer into one array per gate: TensorFlow's CudnnRNNParamsToCanonical.

    The arrays are views of the buffer, and MLX can differentiate this op. `cudnn_rnn_canonical_to_params` is the
    inverse. "in" is the width of a layer's input, S the width of h.

    Args:
        num_layers, num_units, input_size (int): the number of layers L, of units H and of input features I.
        params (array): the buffer, [params_size].
        num_params (int): the number of weight arrays, which is also the number of biases. Per layer and direction it is
            8 for lstm, 6 for gru, 2 for the others.
        rnn_mode (str): `"lstm"`, `"gru"`, `"rnn_tanh"` or `"rnn_relu"`.
        input_mode (str): `"linear_input"`, `"skip_input"` (layer 0 has no input matrices) or `"auto_select"`.
        direction (str): `"unidirectional"` or `"bidirectional"`.
        dropout, seed, seed2: checked as in `cudnn_rnn`, but without effect here.

    Returns:
        CudnnRNNParamsToCanonicalOutput: weights, for each layer and direction W_g [H, in] of every gate, then R_g [H,
        S]; and biases [H] in the same order. With skip_input the W_g of layer 0 are [H, 0]; TensorFlow's op fails in
        this case.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_params_to_canonical
        >>> weights, biases = cudnn_rnn_params_to_canonical(1, 5, 4, mx.zeros((220,)), 8)
        >>> weights[0].shape, weights[4].shape, biases[7].shape
        ((5, 4), (5, 5), (5,))
    """
    op = "cudnn_rnn_params_to_canonical"
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2)
    where = layout(op, num_layers, num_units, input_size, attributes)
    return to_canonical(op, where, params, {"num_params": num_params})


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
    """Split the parameter buffer of layers that may have a projection: TensorFlow's CudnnRNNParamsToCanonicalV2. H: the
    number of units.

    Args:
        num_params_weights (int): the number of weights; an lstm with projection has 9 per layer and direction.
        num_params_biases (int): the number of biases.
        num_proj (int): the width P of a projected h, for an lstm only; 0 or H for none. TensorFlow's op refuses 0.
            Default: 0.
        num_layers, num_units, input_size, params, rnn_mode, input_mode, direction, dropout, seed, seed2: the sizes, the
            buffer and the kind of the layers, as in `cudnn_rnn_params_to_canonical`.

    Returns:
        CudnnRNNParamsToCanonicalOutput: weights, for each layer and direction W_g [H, in] of every gate g, which
        multiplies the layer's input (in: its width); then R_g of every gate, which multiplies h; then the matrix of the
        projection [P, H]. biases: [H] each, in the order of the W_g and R_g.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_params_size, cudnn_rnn_params_to_canonical_v2
        >>> params = mx.zeros((cudnn_rnn_params_size(1, 5, 4, num_proj=2).item(),))
        >>> cudnn_rnn_params_to_canonical_v2(1, 5, 4, params, 9, 8, num_proj=2).weights[-1].shape
        (2, 5)
    """
    op = "cudnn_rnn_params_to_canonical_v2"
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2, num_proj)
    where = layout(op, num_layers, num_units, input_size, attributes)
    counts = {"num_params_weights": num_params_weights, "num_params_biases": num_params_biases}
    return to_canonical(op, where, params, counts)


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
    """Join arrays, one per gate, into the parameter buffer: TensorFlow's CudnnRNNCanonicalToParams.

    Args:
        num_layers, num_units, input_size (int): the number of layers L, of units H and of input features I.
        weights (sequence of arrays): for each layer and direction the matrices W_g [H, in] of every gate g, which
            multiply the layer's input (in: its width), then R_g [H, H], which multiply h.
        biases (sequence of arrays): the biases [H] in the same order. For all these arrays only the number of elements
            is checked, not the shape.
        rnn_mode, input_mode, direction, dropout, seed, seed2: the kind of the layers, as in
            `cudnn_rnn_params_to_canonical`.

    Returns:
        array: params, [params_size].

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_canonical_to_params
        >>> weights = [mx.zeros((5, 4))] * 4 + [mx.zeros((5, 5))] * 4
        >>> cudnn_rnn_canonical_to_params(1, 5, 4, weights, [mx.zeros((5,))] * 8).shape
        (220,)
    """
    op = "cudnn_rnn_canonical_to_params"
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2)
    where = layout(op, num_layers, num_units, input_size, attributes)
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
    """Join the arrays of layers that may have a projection into the buffer: TensorFlow's CudnnRNNCanonicalToParamsV2.
    H: the number of units.

    Args:
        num_proj (int): the width P of a projected h, for an lstm only; 0 or H for none. Default: 0.
        All other arguments: the sizes, arrays and kind of the layers, as in `cudnn_rnn_canonical_to_params`. `weights`
            has for each layer and direction the matrices that multiply the input, one per gate, then the matrices that
            multiply h, one per gate, and last, with a projection, its matrix [P, H].

    Returns:
        array: params, [params_size].

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.cudnn import cudnn_rnn_canonical_to_params_v2
        >>> weights = [mx.zeros((5, 4))] * 4 + [mx.zeros((5, 2))] * 4 + [mx.zeros((2, 5))]
        >>> cudnn_rnn_canonical_to_params_v2(1, 5, 4, weights, [mx.zeros((5,))] * 8, num_proj=2).shape
        (170,)
    """
    op = "cudnn_rnn_canonical_to_params_v2"
    attributes = Attributes(rnn_mode, input_mode, direction, dropout, seed, seed2, num_proj)
    where = layout(op, num_layers, num_units, input_size, attributes)
    return from_canonical(op, where, weights, biases)


def to_canonical(op: str, where: Layout, params: mx.array, counts: dict[str, int]) -> CudnnRNNParamsToCanonicalOutput:
    """Split the parameter buffer into one array per gate. counts: {argument name: the number of weights or of biases
    that the caller passed}; the first version of the op has one number for both."""
    check_params(op, where, params)
    weights, biases = where.canonical()  # the shapes of all arrays, in the buffer's order
    # If there is one number, zip ends after the weights. The first version of the op has as many biases as weights,
    # because it has no projection.
    for (name, number), shapes in zip(counts.items(), (weights, biases), strict=False):
        if count(op, name, number, least=0) != len(shapes):
            fail(op, f"{name} must be {len(shapes)} for these layers", repr(number))
    # `accumulate` returns where each array ends. [:-1]: without the last end, which is the end of the buffer.
    parts = split_apart(params, list(accumulate(map(prod, [*weights, *biases])))[:-1])
    arrays = [part.reshape(shape) for part, shape in zip(parts, [*weights, *biases], strict=True)]
    return CudnnRNNParamsToCanonicalOutput(arrays[: len(weights)], arrays[len(weights) :])


def from_canonical(op: str, where: Layout, weights: Sequence[mx.array], biases: Sequence[mx.array]) -> mx.array:
    """Check the number and the sizes of the arrays, one per gate, and join them into the parameter buffer. As in
    TensorFlow, an array needs the right number of elements, but may have any shape."""
    both = {"weights": weights, "biases": biases}
    for (name, arrays), needed in zip(both.items(), where.counts, strict=True):  # counts: (matrices, biases)
        if not isinstance(arrays, Sequence) or len(arrays) != needed:
            number = len(arrays) if isinstance(arrays, Sequence) else type(arrays).__name__
            fail(op, f"{name} must be {needed} arrays for these layers", number)
    for (name, arrays), shapes in zip(both.items(), where.canonical(), strict=True):
        for n, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
            dtype = getattr(weights[0], "dtype", None)
            check_array(op, f"{name}[{n}]", array, None, dtype)  # None: of any shape; all have one dtype
            if array.size != prod(shape):
                fail(op, f"{name}[{n}] must have {prod(shape)} elements, {list(shape)},", f"shape {list(array.shape)}")
    return mx.concatenate([array.reshape(-1) for array in (*weights, *biases)])
