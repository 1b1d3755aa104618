"""Layers that drop into any MLX model."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from .checks import fail
from .recurrence import lstm


class LSTM(nn.Module):
    r"""An LSTM layer: `mlx.nn.LSTM` with one fused, differentiable recurrence in place of a graph per step.

    Equals `mlx.nn.LSTM` in constructor, parameters, initialisation, shapes and returns; weight files of either load
    into the other. The input has shape NLD or LD: optional batch axes (any number), sequence length, features.

    .. math::

        i_t &= \sigma(W_{xi} x_t + W_{hi} h_{t-1} + b_i) \qquad f_t = \sigma(W_{xf} x_t + W_{hf} h_{t-1} + b_f) \\
        g_t &= \tanh(W_{xg} x_t + W_{hg} h_{t-1} + b_g) \qquad o_t = \sigma(W_{xo} x_t + W_{ho} h_{t-1} + b_o) \\
        c_t &= f_t \odot c_{t-1} + i_t \odot g_t \qquad\qquad\; h_t = o_t \odot \tanh(c_t)

    Parameters: `Wx` [4H, D], `Wh` [4H, H], `bias` [4H]; gate order i, f, g, o; all drawn from U(-1/sqrt(H), 1/sqrt(H)).

    In evaluation mode (`layer.eval()`) less is kept in memory, gradients cost another forward pass, and a traced graph
    holds plain MLX ops, which `mx.export_function` can write.

    Args:
        input_size (int): size of the features, D.
        hidden_size (int): size of the hidden state, H.
        bias (bool): whether there is a bias. Default: `True`.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: the best for the stream's device.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import LSTM
        >>> layer = LSTM(3, 4)
        >>> layer
        LSTM(input_dims=3, hidden_size=4, bias=True)
        >>> hidden, cell = layer(mx.ones((2, 10, 3)))
        >>> hidden, cell = layer(mx.ones((2, 10, 3)), hidden[:, -1], cell[:, -1])  # go on from the last state
        >>> hidden.shape
        (2, 10, 4)
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, *, engine: str | None = None):
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                fail("nn.LSTM", f"{name} must be an integer greater than 0", repr(size))
        self.hidden_size = hidden_size
        self.engine = engine
        scale = 1.0 / math.sqrt(hidden_size)
        self.Wx = mx.random.uniform(-scale, scale, (4 * hidden_size, input_size))
        self.Wh = mx.random.uniform(-scale, scale, (4 * hidden_size, hidden_size))
        self.bias = mx.random.uniform(-scale, scale, (4 * hidden_size,)) if bias else None

    def _extra_repr(self) -> str:
        return f"input_dims={self.Wx.shape[1]}, hidden_size={self.hidden_size}, bias={self.bias is not None}"

    def __call__(
        self, x: mx.array, hidden: mx.array | None = None, cell: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """The hidden and the cell state at every step.

        Args:
            x (array): [..., L, D]; any number of batch axes, none included.
            hidden (array, optional): the hidden state to start from, [..., H]. May be given alone. Default: zeros.
            cell (array, optional): the cell state to start from, [..., H]. May be given alone. Default: zeros.

        Returns:
            tuple: all hidden states and all cell states, each [..., L, H], in the dtype that x and the parameters
            promote to.
        """
        features, H = self.Wx.shape[1], self.hidden_size
        if not isinstance(x, mx.array) or x.ndim < 2 or x.shape[-1] != features or 0 in x.shape:
            shape = list(x.shape) if isinstance(x, mx.array) else type(x).__name__
            fail("nn.LSTM", f"x must have shape [..., L, D = {features}] without an empty axis", f"shape {shape}")
        batch, (L, D) = x.shape[:-2], x.shape[-2:]

        arrays = {"x": x, "Wx": self.Wx, "Wh": self.Wh, "b": self.bias}
        arrays |= {"h0": state(hidden, "hidden", batch, H), "c0": state(cell, "cell", batch, H)}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        dtype = mx.result_type(*arrays.values())
        arrays = {name: array.astype(dtype) for name, array in arrays.items()}
        arrays["x"] = mx.swapaxes(arrays["x"].reshape(-1, L, D), 0, 1)
        out = lstm(**{"b": None, "h0": None, "c0": None} | arrays, training=self.training, engine=self.engine)
        return tuple(mx.swapaxes(states, 0, 1).reshape(*batch, L, H) for states in (out.h, out.c))


def state(array: mx.array | None, name: str, batch: tuple[int, ...], hidden_size: int) -> mx.array | None:
    """A first state, broadcast over the batch axes and flattened to [B, H]."""
    if array is None:
        return None
    try:
        if not isinstance(array, mx.array):
            raise TypeError
        return mx.broadcast_to(array, (*batch, hidden_size)).reshape(-1, hidden_size)
    except (ValueError, TypeError):
        shape = list(array.shape) if isinstance(array, mx.array) else type(array).__name__
        fail("nn.LSTM", f"{name} must have shape {[*batch, hidden_size]}", f"shape {shape}")
