"""The layers of `mlx.nn`, each on one recurrence."""

import math
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checks import NO_UNITS, check_every, check_integer, fail, instead_of
from ..engines.at_once import by_mlx, by_numpy, computes_now
from ..engines.cells import Cell, GRUCell, LSTMCell, RNNCell
from ..engines.packing import Quantized, Weight
from ..recurrence import Call, Hold, common_dtype, engine_used, in_dtype, note_engine, weight, whole_steps

NONLINEARITIES = {nn.tanh: "tanh", mx.tanh: "tanh", nn.relu: "relu", nn.sigmoid: "sigmoid", mx.sigmoid: "sigmoid"}
"""The functions that `RNN` can run, and their names in `mlx_lstm.rnn`."""


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
    holds plain MLX ops, which `mx.export_function` can write. In training mode that ends in MLX's "Unable to serialize
    primitive CustomTransforms": call `layer.eval()` first.

    Args:
        input_size (int): size of the features, D.
        hidden_size (int): size of the hidden state, H.
        bias (bool): whether there is a bias. Default: `True`.
        checkpoint_every (int or str, optional): in training, keep the states of every so many steps only and compute
            the rest again for the gradient, as in `mlx_lstm.lstm`; also an attribute, to be set at any time. Default:
            `None`, keep all.
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

    op: str = "nn.LSTM"  # in errors
    engine_used = engine_used
    checkpoint_every: int | str | None = None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        checkpoint_every: int | str | None = None,
        engine: str | None = None,
    ):
        super().__init__()
        input_size = check_integer(self.op, "input_size", input_size, least=1)
        hidden_size = check_integer(self.op, "hidden_size", hidden_size, least=1, why=NO_UNITS)
        self.hidden_size: int = hidden_size
        self.engine: str | None = engine
        self.checkpoint_every = check_every(self.op, checkpoint_every)
        scale = 1.0 / math.sqrt(hidden_size)
        self.Wx: mx.array = mx.random.uniform(-scale, scale, (4 * hidden_size, input_size))
        self.Wh: mx.array = mx.random.uniform(-scale, scale, (4 * hidden_size, hidden_size))
        self.bias: mx.array | None = mx.random.uniform(-scale, scale, (4 * hidden_size,)) if bias else None

    def _extra_repr(self) -> str:
        return f"input_dims={weight(self, 'Wx').shape[1]}, hidden_size={self.hidden_size}, bias={self.bias is not None}"

    def into_quantized(self, group_size: int | None = None, bits: int | None = None, mode: str = "affine") -> nn.Module:
        """`QuantizedLSTM.from_layer` of this layer: `mlx_lstm.nn.quantize` calls it, `mlx.nn.quantize` does not."""
        from ._quantized import QuantizedLSTM

        return QuantizedLSTM.from_layer(self, group_size, bits, mode)

    def __call__(
        self,
        x: mx.array,
        hidden: mx.array | None = None,
        cell: mx.array | None = None,
        *,
        keep: mx.array | None = None,
        hold: Hold = None,
    ) -> tuple[mx.array, mx.array]:
        """The hidden and the cell state at every step.

        Args:
            x (array): [..., L, D]; any number of batch axes, none included.
            hidden (array, optional): the hidden state to start from, [..., H]. May be given alone. Default: zeros.
            cell (array, optional): the cell state to start from, [..., H]. May be given alone. Default: zeros.
            keep (array, optional): [..., L], a factor on both states before each step, as in `mlx_lstm.lstm`: 0 where
                an episode begins. The original has neither this nor hold.
            hold (array or list, optional): [..., L], steps that leave both states as they are, as there.

        Returns:
            tuple: all hidden states and all cell states, each [..., L, H], in the dtype that x, the parameters and the
            states given promote to.
        """
        hidden, cell = run(self, x, {"hidden": hidden, "cell": cell}, keep, hold)
        return hidden, cell

    def step(
        self, x: mx.array, hidden: mx.array | None = None, cell: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """The hidden and the cell state after one step, for what comes in step by step: frames of sound, moves of a
        game, the text that a model writes.

        Equals a call with `x[..., None, :]` and its only step taken from both results; `engine_used`, gradients and
        `mx.compile` are as there. On a CPU it takes less time. The original has no such method.

        Args:
            x (array): [..., D], without an axis of time; any number of batch axes, none included.
            hidden (array, optional): the hidden state before, [..., H]. May be given alone. Default: zeros.
            cell (array, optional): the cell state before, [..., H]. May be given alone. Default: zeros.

        Returns:
            tuple: the hidden and the cell state, each [..., H], in the dtype of a call's results.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_lstm.nn import LSTM
            >>> layer, hidden, cell = LSTM(3, 4), None, None
            >>> for frame in mx.ones((10, 2, 3)):
            ...     hidden, cell = layer.step(frame, hidden, cell)
            >>> hidden.shape, cell.shape
            ((2, 4), (2, 4))
        """
        hidden, cell = run(self, x, {"hidden": hidden, "cell": cell}, step=True)
        return hidden, cell

    def _recurrence(self) -> tuple[str, Cell, dict[str, Any]]:
        """Its name in errors, the cell, the parameters by the recurrence's names."""
        return self.op, LSTMCell(), {"Wx": weight(self, "Wx"), "Wh": weight(self, "Wh"), "b": bias(self, "bias")}


class GRU(nn.Module):
    r"""A GRU layer: `mlx.nn.GRU` with one fused, differentiable recurrence in place of a graph per step.

    Equals `mlx.nn.GRU` as `LSTM` equals the original; shapes of the input and evaluation mode are as there.

    .. math::

        r_t &= \sigma(W_{xr} x_t + W_{hr} h_{t-1} + b_r) \qquad z_t = \sigma(W_{xz} x_t + W_{hz} h_{t-1} + b_z) \\
        n_t &= \tanh(W_{xn} x_t + b_n + r_t \odot (W_{hn} h_{t-1} + b_{hn})) \\
        h_t &= (1 - z_t) \odot n_t + z_t \odot h_{t-1}

    Parameters: `Wx` [3H, D], `Wh` [3H, H], `b` [3H], `bhn` [H]; gate order r, z, n; all drawn from U(-1/sqrt(H),
    1/sqrt(H)).

    Args:
        input_size, hidden_size, bias, checkpoint_every, engine: as in `LSTM`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import GRU
        >>> layer = GRU(3, 4)
        >>> layer
        GRU(input_dims=3, hidden_size=4, bias=True)
        >>> hidden = layer(mx.ones((2, 10, 3)))
        >>> hidden = layer(mx.ones((2, 10, 3)), hidden[:, -1])  # go on from the last state
        >>> hidden.shape
        (2, 10, 4)
    """

    op: str = "nn.GRU"  # in errors
    engine_used = engine_used
    checkpoint_every: int | str | None = None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        checkpoint_every: int | str | None = None,
        engine: str | None = None,
    ):
        super().__init__()
        input_size = check_integer(self.op, "input_size", input_size, least=1)
        hidden_size = check_integer(self.op, "hidden_size", hidden_size, least=1, why=NO_UNITS)
        self.hidden_size: int = hidden_size
        self.engine: str | None = engine
        self.checkpoint_every = check_every(self.op, checkpoint_every)
        scale = 1.0 / math.sqrt(hidden_size)
        self.Wx: mx.array = mx.random.uniform(-scale, scale, (3 * hidden_size, input_size))
        self.Wh: mx.array = mx.random.uniform(-scale, scale, (3 * hidden_size, hidden_size))
        self.b: mx.array | None = mx.random.uniform(-scale, scale, (3 * hidden_size,)) if bias else None
        self.bhn: mx.array | None = mx.random.uniform(-scale, scale, (hidden_size,)) if bias else None

    def _extra_repr(self) -> str:
        return f"input_dims={weight(self, 'Wx').shape[1]}, hidden_size={self.hidden_size}, bias={self.b is not None}"

    def into_quantized(self, group_size: int | None = None, bits: int | None = None, mode: str = "affine") -> nn.Module:
        """`QuantizedGRU.from_layer` of this layer: `mlx_lstm.nn.quantize` calls it, `mlx.nn.quantize` does not."""
        from ._quantized import QuantizedGRU

        return QuantizedGRU.from_layer(self, group_size, bits, mode)

    def __call__(
        self, x: mx.array, hidden: mx.array | None = None, *, keep: mx.array | None = None, hold: Hold = None
    ) -> mx.array:
        """The hidden state at every step.

        Args:
            x (array): [..., L, D]; any number of batch axes, none included.
            hidden (array, optional): the hidden state to start from, [..., H]. Default: zeros.
            keep, hold (array, optional): [..., L], as in `LSTM`.

        Returns:
            array: all hidden states, [..., L, H], in the dtype that x, the parameters and a state given promote to.
        """
        return run(self, x, {"hidden": hidden}, keep, hold)[0]

    def step(self, x: mx.array, hidden: mx.array | None = None) -> mx.array:
        """The hidden state after one step, as `LSTM.step` has both states.

        Args:
            x (array): [..., D], without an axis of time; any number of batch axes, none included.
            hidden (array, optional): the hidden state before, [..., H]. Default: zeros.

        Returns:
            array: the hidden state, [..., H].

        Example:
            >>> import mlx.core as mx
            >>> from mlx_lstm.nn import GRU
            >>> layer = GRU(3, 4)
            >>> layer.step(mx.ones((2, 3)), layer.step(mx.ones((2, 3)))).shape
            (2, 4)
        """
        return run(self, x, {"hidden": hidden}, step=True)[0]

    def _recurrence(self) -> tuple[str, Cell, dict[str, Any]]:
        given = {"Wx": weight(self, "Wx"), "Wh": weight(self, "Wh"), "b": bias(self, "b"), "bhn": bias(self, "bhn")}
        return self.op, GRUCell(), given


class RNN(nn.Module):
    r"""A plain recurrent layer: `mlx.nn.RNN` with one fused, differentiable recurrence in place of a graph per step.

    Equals `mlx.nn.RNN` as `LSTM` equals the original; shapes of the input and evaluation mode are as there.

    .. math:: h_t = s(W_{xh} x_t + W_{hh} h_{t-1} + b)

    Parameters: `Wxh` [H, D], `Whh` [H, H], `bias` [H]; all drawn from U(-1/sqrt(H), 1/sqrt(H)).

    Args:
        input_size, hidden_size, bias, checkpoint_every, engine: as in `LSTM`.
        nonlinearity (callable, optional): s, one of `NONLINEARITIES`: MLX's tanh, relu or sigmoid. Other functions,
            which the original takes, are an error. Default: tanh.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import RNN
        >>> layer = RNN(3, 4, nonlinearity=mx.tanh)
        >>> hidden = layer(mx.ones((2, 10, 3)))
        >>> hidden = layer(mx.ones((2, 10, 3)), hidden[:, -1])  # go on from the last state
        >>> hidden.shape
        (2, 10, 4)
    """

    op: str = "nn.RNN"  # in errors
    engine_used = engine_used
    checkpoint_every: int | str | None = None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: Callable[[mx.array], mx.array] | None = None,
        *,
        checkpoint_every: int | str | None = None,
        engine: str | None = None,
    ):
        super().__init__()
        input_size = check_integer(self.op, "input_size", input_size, least=1)
        hidden_size = check_integer(self.op, "hidden_size", hidden_size, least=1, why=NO_UNITS)
        self.nonlinearity: Callable[[mx.array], mx.array] = nn.tanh if nonlinearity is None else nonlinearity
        activation_of(self.nonlinearity)
        self.hidden_size: int = hidden_size
        self.engine: str | None = engine
        self.checkpoint_every = check_every(self.op, checkpoint_every)
        scale = 1.0 / math.sqrt(hidden_size)
        self.Wxh: mx.array = mx.random.uniform(-scale, scale, (hidden_size, input_size))
        self.Whh: mx.array = mx.random.uniform(-scale, scale, (hidden_size, hidden_size))
        self.bias: mx.array | None = mx.random.uniform(-scale, scale, (hidden_size,)) if bias else None

    def _extra_repr(self) -> str:
        return (
            f"input_dims={weight(self, 'Wxh').shape[1]}, hidden_size={self.hidden_size}, "
            f"nonlinearity={self.nonlinearity}, bias={self.bias is not None}"
        )

    def into_quantized(self, group_size: int | None = None, bits: int | None = None, mode: str = "affine") -> nn.Module:
        """`QuantizedRNN.from_layer` of this layer: `mlx_lstm.nn.quantize` calls it, `mlx.nn.quantize` does not."""
        from ._quantized import QuantizedRNN

        return QuantizedRNN.from_layer(self, group_size, bits, mode)

    def __call__(
        self, x: mx.array, hidden: mx.array | None = None, *, keep: mx.array | None = None, hold: Hold = None
    ) -> mx.array:
        """As `GRU`."""
        return run(self, x, {"hidden": hidden}, keep, hold)[0]

    def step(self, x: mx.array, hidden: mx.array | None = None) -> mx.array:
        """As `GRU.step`."""
        return run(self, x, {"hidden": hidden}, step=True)[0]

    def _recurrence(self) -> tuple[str, Cell, dict[str, Any]]:
        given = {"Wx": weight(self, "Wxh"), "Wh": weight(self, "Whh"), "b": bias(self, "bias")}
        return self.op, RNNCell(activation_of(self.nonlinearity)), given


def bias(layer: nn.Module, name: str) -> Weight | None:
    """A layer's bias, if it has one."""
    return None if getattr(layer, name) is None else weight(layer, name)


def activation_of(nonlinearity: object) -> str:
    """Its name in `mlx_lstm.rnn`."""
    # A module, such as nn.Tanh(), cannot be looked up in a dict.
    for function, name in NONLINEARITIES.items():
        if nonlinearity is function:
            return name
    fail("nn.RNN", "nonlinearity must be MLX's tanh, relu or sigmoid, as a function,", repr(nonlinearity))


def run(
    layer: LSTM | GRU | RNN,
    x: mx.array,
    states: dict[str, mx.array | None],
    keep: mx.array | None = None,
    hold: Hold = None,
    *,
    step: bool = False,
) -> tuple[mx.array, ...]:
    """The states at every step, [..., L, H], as many as there are in `states`: the first h and c, by the caller's
    names; with `step` x [..., D] has one, and they are [..., H]. All is computed in the dtype that the arrays given
    promote to."""
    op, cell, parameters = layer._recurrence()
    given = {name: array for name, array in parameters.items() if array is not None}
    features, H = given["Wx"].shape[1], given["Wh"].shape[1]
    check_input(op, x, features, given["Wx"], step)
    given["x"] = x
    batch, L = (x.shape[:-1], 1) if step else (x.shape[:-2], x.shape[-2])
    for name, (word, value) in zip(("h0", "c0"), states.items(), strict=False):
        if value is not None:
            given[name] = state(op, value, word, (*batch, H), x)
    dtype = common_dtype(given.values())
    shape = (*batch, H) if step else (*batch, L, H)
    if 0 in batch:
        return tuple(mx.zeros(shape, dtype) for _ in states)
    small = by_mlx
    if len(batch) != 1:
        small = by_numpy if computes_now(layer.engine) else by_mlx
        for name, of_item in {"x": x.shape[len(batch) :], "h0": (H,), "c0": (H,)}.items():
            if name in given:
                given[name] = small(methodcaller("reshape", (-1, *of_item)), given[name])
    steps = whole_steps(op, keep, hold, (*batch, L), "[..., L]")
    steps = {name: array.reshape(-1, L) for name, array in steps.items()}
    options = {"engine": layer.engine, "checkpoint_every": layer.checkpoint_every, "hold": steps.pop("hold", None)}
    call = Call(cell, batch_first=not step, one_step=step, **options)
    arrays = in_dtype(given, dtype) | steps
    out, choice = call.forward(arrays, return_gates=False, training=layer.training, wants_last=step)
    note_engine(layer, choice)
    found = [out[name] for name, _ in zip(("hT", "cT") if step else "hc", states, strict=False)]
    return tuple(found if len(batch) == 1 else [small(methodcaller("reshape", shape), array) for array in found])


def check_input(op: str, x: object, features: int, Wx: Weight, step: bool) -> None:
    """That x is a layer's input: [..., L, D], of a step [..., D]."""
    if not isinstance(x, mx.array):
        fail(op, f"x must be an mlx.core.array{instead_of(x)}", type(x).__name__)
    if x.dtype == mx.complex64:
        fail(op, "x must be real", x.dtype)
    if x.ndim < 2 - step or x.shape[-1] != features or 0 in x.shape[-2 + step :]:
        check_loaded(op, Wx)
        axes, least = ("", "") if step else ("L, ", " with at least one step")
        fail(op, f"x must have shape [..., {axes}D = {features}]{least}", f"shape {list(x.shape)}")


def check_loaded(op: str, Wx: Weight) -> None:
    """That an input weight is what its layer's class has: by `strict=False` MLX loads any file into any layer."""
    packed = Wx.packed if isinstance(Wx, Quantized) else Wx
    if isinstance(Wx, Quantized) and packed.dtype != mx.uint32:
        rule = "a quantized layer must hold packed weights, uint32: load float ones before it is quantized,"
        fail(op, rule, packed.dtype)
    if packed is Wx and packed.dtype == mx.uint32:
        fail(op, "a float layer must hold floats: load packed weights into its Quantized kind,", packed.dtype)


def state(op: str, array: object, name: str, shape: tuple[int, ...], x: mx.array) -> mx.array:
    """A first state, broadcast over the batch axes of x."""
    if not isinstance(array, mx.array):
        both = isinstance(array, tuple) and op.endswith("LSTM")
        instead = ": pass hidden and cell, not a tuple," if both else instead_of(array)
        fail(op, f"{name} must be an mlx.core.array{instead}", type(array).__name__)
    if array.dtype == mx.complex64:
        fail(op, f"{name} must be real", array.dtype)
    try:
        return array if array.shape == shape else mx.broadcast_to(array, shape)
    except ValueError:
        time = ["time"] * (x.ndim - len(shape))
        axes = ", ".join([*["batch", "..."][: len(shape) - 1], *time, "features"])
        rule = f"{name} must have shape {list(shape)}, as x is [{axes}] = {list(x.shape)},"
        fail(op, rule, f"shape {list(array.shape)}")
