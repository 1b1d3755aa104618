"""The recurrent layers of `mlx.nn`, computed by `mlx_lstm.recurrence`, with float or quantized weights.

`Layer` is the base class: it has the constructor, the checks, and the call of the recurrence. A subclass adds the class
of its cell (the formula), and `_names`, {parameter: argument of `mlx_lstm.lstm`, `gru` or `rnn`}.

D: features of the input (input_size; `mlx.nn` prints it as input_dims), H: hidden units (hidden_size), L: time steps,
B: sequences, "...": any number of batch axes. hidden and cell are the states h and c. keep: a factor on the states
before a step. hold: steps that leave the states unchanged. lengths: the number of steps of each sequence. op: the name
of the layer in errors, such as "nn.LSTM".
"""

import math
from collections.abc import Callable, Sequence
from operator import methodcaller
from types import MethodType
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..convert.layers import NONLINEARITIES, activation_of, class_of
from ..engines.at_once import by_mlx, by_numpy, computes_now
from ..engines.cells import Cell, GRUCell, LSTMCell, NormOptions, RNNCell
from ..engines.choice import Engine, check_engine
from ..engines.packing import Quantized, Weight
from ..ground.advice import Advised, advised
from ..ground.checks import NO_UNITS, check_every, check_flag, check_integer, chosen_options, fail, instead_of
from ..recurrence import (
    Call,
    Hold,
    Lengths,
    Norm,
    QuantizedLayer,
    Stepper,
    engine_used,
    first_value,
    in_common_dtype,
    layer_norm_arrays,
    layer_norm_of,
    norm_given,
    pointwise,
    whole_steps,
)


class Layer(Advised):
    """Base class of `LSTM`, `GRU` and `RNN`. It has the constructor, the checks of arguments, and the method that
    runs all time steps."""

    hidden_size: int
    engine: Engine | None
    checkpoint_every: int | str | None
    engine_used = engine_used
    _norm: NormOptions | None = None  # the options of layer normalisation; None without it
    _cell_class: type[Cell]  # its attribute `gates`: a weight matrix has H rows for each gate
    _names: ClassVar[dict[str, str]]  # {parameter: argument of mlx_lstm.lstm, gru or rnn}, the input weight first

    @advised
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        layer_norm: bool | Norm = False,
        checkpoint_every: int | str | None = None,
        engine: Engine | None = None,
    ):
        super().__init__()
        I = check_integer(self.op, "input_size", input_size, least=1)
        H = check_integer(self.op, "hidden_size", hidden_size, least=1, why=NO_UNITS)
        # If bias is an integer, the user probably means the number of layers, which is torch's third argument.
        check_flag(self.op, "bias", bias, " (nn.stack runs several layers)" if type(bias) is int else "")
        self.hidden_size = H
        self.engine = check_engine(self.op, engine)
        self.checkpoint_every = check_every(self.op, checkpoint_every)
        gates = self._cell_class.gates
        rows, scale = gates * H, 1.0 / math.sqrt(H)
        shapes = {"Wx": (rows, I), "Wh": (rows, H), "b": (rows,), "bhn": (H,)}
        # Draw in the same order as the layer of mlx.nn, so that the same random seed gives the same parameters.
        for name, argument in self._names.items():
            is_absent = argument in ("b", "bhn") and not bias
            setattr(self, name, None if is_absent else mx.random.uniform(-scale, scale, shapes[argument]))
        norm = layer_norm_of(self.op, self._cell_class(), layer_norm)
        if norm is not None:
            vars(self)["_norm"] = norm  # MLX would count a tuple attribute among the parameters
            for name, width in layer_norm_arrays(norm, gates, H).items():
                setattr(self, name, first_value(name, [width]))

    def stepper(self, batch: int | Sequence[int] = ()) -> Stepper:
        """Return a `Stepper`: an object that runs one time step per call and keeps the states inside. It computes the
        same as the method `step` with much less work per step, but has no gradient. Sizes: D features, H hidden units;
        "..." stands for the batch axes.

        Args:
            batch (int or sequence of int): the sizes of the batch axes of a step's input. Default: none, the input is
                [D].

        Returns:
            Stepper: called as `stepper(x, keep=None)` with x [..., D] of MLX or NumPy, it returns the hidden state
            [..., H] as the same kind of array.

        Raises:
            ValueError: an argument or a parameter breaks a rule, the call is inside a transformation of MLX, or the
                layer's class redefines `__call__` or `step`.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_lstm.nn import GRU
            >>> stepper = GRU(3, 4).stepper(2)
            >>> for frame in mx.ones((10, 2, 3)):
            ...     hidden = stepper(frame)
            >>> hidden.shape, stepper.state().shape
            ((2, 4), (2, 4))
        """
        op = f"{self.op}.stepper"
        class_of(op, "the layer", self)  # raises an error for a subclass that may compute something else
        # read: returns the layer's cell, parameters and engine; the stepper calls it again if parameters have changed.
        read = lambda: [(self._cell(), self._arrays(), self.engine)]  # noqa: E731
        return Stepper(op, read, [self], batch=batch, is_stack=False)

    def _extra_repr(self, more: str = "") -> str:
        Wx, _, b, *_ = self._names  # the names of the input weight, the recurrent weight and the bias
        D, has_bias = self._parameter(Wx).shape[1], getattr(self, b) is not None
        norm = "" if self._norm is None else f", layer_norm={norm_given(self._norm, {})}"
        return f"input_dims={D}, hidden_size={self.hidden_size}, {more}bias={has_bias}{norm}{chosen_options(self)}"

    def _cell(self) -> Cell:
        """Return the cell: the formula that the recurrence computes at each step."""
        return self._cell_class(norm=self._norm)

    def _parameter(self, name: str) -> Weight:
        """Return the parameter of this name; raise ValueError if it is no MLX array, or a weight without two axes."""
        array: Any = self.get(name)
        if not isinstance(array, mx.array):  # each call of a layer reads its parameters, so test this here first
            array = super()._parameter(name)  # raises the error
        if array.ndim != 2 and self._names.get(name) in ("Wx", "Wh"):
            fail(self.op, f"{name} must have two axes", f"shape {list(array.shape)}")
        return array

    def _arrays(self) -> dict[str, Any]:
        """Return the parameters as a dict by the argument names of `mlx_lstm.lstm`, `gru` or `rnn`, without biases
        that are `None`."""
        arrays = {}
        # Leave out a bias that is None. For a missing matrix, or an array of NumPy, `_parameter` raises an error.
        for name, argument in self._names.items():
            if name in self or argument in ("Wx", "Wh") or getattr(self, name) is not None:
                arrays[argument] = self._parameter(name)
        return arrays | self._norm_arrays()

    def _norm_arrays(self) -> dict[str, Any]:
        """Return {name: array} of the layer's parameters of layer normalisation. `Call`, which runs the recurrence,
        gives its arrays the same names as the layer its attributes, such as "norm_scale"."""
        names = () if self._norm is None else layer_norm_arrays(self._norm, self._cell_class.gates, self.hidden_size)
        return {name: self._parameter(name) for name in names if getattr(self, name, None) is not None}

    def _run(
        self,
        x: mx.array,
        states: dict[str, mx.array | None],
        lengths: Lengths = None,
        keep: mx.array | None = None,
        hold: Hold = None,
        *,
        is_step: bool = False,
    ) -> list[mx.array]:
        """Run all time steps. Return the states at every step, h and for an LSTM c, each [..., L, H]. With `is_step`
        run one step: x is [..., D] and the results are [..., H]. L: steps, D: features, H: hidden units; "...": the
        batch axes.

        states: the states before the first step by the names of the caller's arguments, "hidden" and "cell"; None
        stands for zeros. lengths [...]: the number of steps of each sequence. keep [..., L]: a factor on the states
        before each step. hold [..., L]: true at steps that leave the states unchanged. The results have the dtype to
        which x, the parameters and the states promote.
        """
        op, cell, arrays = self.op, self._cell(), self._arrays()
        D, H = arrays["Wx"].shape[1], arrays["Wh"].shape[1]  # a `Quantized` has the shape of its float matrix
        check_input(op, x, D, arrays["Wx"], is_step)
        batch, L = (x.shape[:-1], 1) if is_step else (x.shape[:-2], x.shape[-2])
        for argument, (name, array) in zip(("h0", "c0"), states.items(), strict=False):  # a GRU has no c0
            if array is not None:
                arrays[argument] = whole_state(op, array, name, (*batch, H), x)
        arrays["x"] = x
        arrays, dtype = in_common_dtype(arrays)
        shape = (*batch, H) if is_step else (*batch, L, H)
        if 0 in batch:
            return [mx.zeros(shape, dtype)] * len(states)
        # `Call` takes exactly one batch axis. With none or several, reshape x to [B, L, D] or [B, D], and the states to
        # [B, H]. run_small(function, array) applies a reshape: by NumPy if the call computes immediately on the CPU,
        # because this is faster there, else by MLX.
        run_small = by_numpy if len(batch) != 1 and computes_now(self.engine) else by_mlx
        if len(batch) != 1:
            for name in [name for name in ("x", "h0", "c0") if name in arrays]:
                features = x.shape[len(batch) :] if name == "x" else (H,)
                arrays[name] = run_small(methodcaller("reshape", (-1, *features)), arrays[name])
            lengths = flat_lengths(op, lengths, batch)
        if keep is not None or hold is not None:
            # steps: keep and hold, checked and broadcast to all batch axes and steps. Join the batch axes to one.
            steps = whole_steps(op, keep, hold, batch if is_step else (*batch, L), "[...]" if is_step else "[..., L]")
            hold = steps["hold"].reshape(-1, L) if hold is not None else None
            if keep is not None:
                arrays["keep"] = steps["keep"].reshape((1, -1) if is_step else (-1, L))
        options = {"engine": self.engine, "checkpoint_every": self.checkpoint_every, "lengths": lengths, "hold": hold}
        call = Call(cell, batch_first=not is_step, one_step=is_step, **options, op=op)
        # A step returns the last states, hT and cT. A call over a sequence returns h and c of all steps, so it does not
        # want the last states.
        outputs, choice = call.forward(arrays, return_gates=False, training=self.training, wants_last=is_step)
        vars(self)["_engine_used"] = choice  # in `vars`, because MLX would count a tuple attribute as parameters
        names = (("hT", "cT") if is_step else ("h", "c"))[: len(states)]
        results = list(map(outputs.__getitem__, names))
        return results if len(batch) == 1 else [run_small(methodcaller("reshape", shape), array) for array in results]


class LSTM(Layer):
    r"""An LSTM layer: `mlx.nn.LSTM` with one fused, differentiable recurrence in place of a graph per step.

    The layer equals `mlx.nn.LSTM` in constructor, parameters, initialisation, shapes and results; a weight file of one
    layer loads into the other. The input has shape NLD or LD: optional batch axes (any number), sequence length,
    features.

    .. math::

        i_t &= \sigma(W_{xi} x_t + W_{hi} h_{t-1} + b_i) \qquad f_t = \sigma(W_{xf} x_t + W_{hf} h_{t-1} + b_f) \\
        g_t &= \tanh(W_{xg} x_t + W_{hg} h_{t-1} + b_g) \qquad o_t = \sigma(W_{xo} x_t + W_{ho} h_{t-1} + b_o) \\
        c_t &= f_t \odot c_{t-1} + i_t \odot g_t \qquad\qquad\; h_t = o_t \odot \tanh(c_t)

    Parameters: `Wx` [4H, D], `Wh` [4H, H], `bias` [4H]; gate order i, f, g, o; all drawn from U(-1/sqrt(H), 1/sqrt(H)).

    This class is a single layer in one direction. `mlx_lstm.nn.stack` runs several layers and both directions;
    `mlx_lstm.torch.LSTM` has them as options.

    In evaluation mode (`layer.eval()`) a call saves nothing for the gradient, so it takes less memory; a gradient
    then costs another forward pass. A graph that MLX traces consists of plain MLX ops, which `mx.export_function` can
    write. In training mode `mx.export_function` fails with MLX's "Unable to serialize primitive CustomTransforms".

    Args:
        input_size (int): size of the features, D.
        hidden_size (int): size of the hidden state, H.
        bias (bool): whether there is a bias. Default: `True`.
        layer_norm (bool or Norm): layer normalisation inside the step. `True`: both products and c are normalised, as
            in Ba et al. (2016) and haste; this is `mlx_lstm.Norm(c="output")`. Or another `Norm` without arrays. The
            scales and shifts are parameters of the layer, `norm_scale`, `norm_input_scale` and so on. Everything that
            is normalised has a scale; only c and a sum have a shift, because `bias` shifts a product. `mlx.nn.LSTM` has
            no such option. Default: `False`.
        checkpoint_every (int or str, optional): in training, save the states of every K-th step only and compute the
            other steps again for the gradient, as in `mlx_lstm.lstm`. Also an attribute. Default: `None`, save all.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Also an attribute. Default: the best for the
            stream's device.

    Raises:
        ValueError: an argument breaks a rule.

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
        >>> sorted(LSTM(3, 4, layer_norm=True).parameters())[-4:]
        ['norm_c_scale', 'norm_c_shift', 'norm_input_scale', 'norm_scale']
    """

    op: str = "nn.LSTM"
    Wx: mx.array
    Wh: mx.array
    bias: mx.array | None
    _cell_class = LSTMCell
    _names: ClassVar = {"Wx": "Wx", "Wh": "Wh", "bias": "b"}

    @advised
    def __call__(
        self,
        x: mx.array,
        hidden: mx.array | None = None,
        cell: mx.array | None = None,
        *,
        lengths: Lengths = None,
        keep: mx.array | None = None,
        hold: Hold = None,
    ) -> tuple[mx.array, mx.array]:
        """Return the hidden and the cell state at every step. Sizes: L time steps, D features, H hidden units; "..."
        stands for the batch axes.

        Args:
            x (array): [..., L, D]; any number of batch axes, none included.
            hidden (array, optional): the hidden state to start from, [..., H], with or without `cell`. Default: zeros.
            cell (array, optional): the cell state to start from, [..., H], with or without `hidden`. Default: zeros.
            lengths (integer array or list, optional): [...], the number of steps of each sequence, in 0..L, if they are
                padded to L. Past the end of a sequence both results are 0 and the input is never read. The last state
                of sequence n is at step `lengths[n] - 1`. `mlx.nn.LSTM` has no lengths, keep and hold.
            keep (array, optional): [..., L], a factor on both states before each step, as in `mlx_lstm.lstm`: 0 where
                an episode begins.
            hold (array or list, optional): [..., L], true at steps that leave both states unchanged, as in
                `mlx_lstm.lstm`.

        Returns:
            tuple: all hidden states and all cell states, each [..., L, H], in the dtype to which x, the parameters and
            the first states promote.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_lstm.nn import LSTM
            >>> hidden, cell = LSTM(3, 4)(mx.ones((2, 10, 3)), lengths=[10, 7])  # the second item is padded
            >>> hidden[1, 7:].max().item()
            0.0
        """
        hidden, cell = self._run(x, {"hidden": hidden, "cell": cell}, lengths, keep, hold)
        return hidden, cell

    def step(
        self, x: mx.array, hidden: mx.array | None = None, cell: mx.array | None = None, *, keep: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return the hidden and the cell state after one step, for input that arrives one step at a time: frames of
        sound, moves of a game, or text that a model generates. Sizes: D features, H hidden units; "..." stands for the
        batch axes.

        The results equal the results of a call with `x[..., None, :]`, but have no axis of time. `engine_used`,
        gradients and `mx.compile` work as for a call. On a CPU a step takes less time than a call.
        `mlx.nn.LSTM` has no such method.

        Args:
            x (array): [..., D], without an axis of time; any number of batch axes, none included.
            hidden (array, optional): the hidden state before, [..., H], with or without `cell`. Default: zeros.
            cell (array, optional): the cell state before, [..., H], with or without `hidden`. Default: zeros.
            keep (array, optional): [...], a factor on both states before the step: 0 where an episode begins.

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
        hidden, cell = self._run(x, {"hidden": hidden, "cell": cell}, keep=keep, is_step=True)
        return hidden, cell


class OneState(Layer):
    """Base class of `GRU` and `RNN`, whose only state is h. It has their calls."""

    @advised
    def __call__(
        self,
        x: mx.array,
        hidden: mx.array | None = None,
        *,
        lengths: Lengths = None,
        keep: mx.array | None = None,
        hold: Hold = None,
    ) -> mx.array:
        """Return the hidden state at every step. Sizes: L time steps, D features, H hidden units; "..." stands for the
        batch axes.

        Args:
            x (array): [..., L, D]; any number of batch axes, none included.
            hidden (array, optional): the hidden state to start from, [..., H]. Default: zeros.
            lengths (integer array or list, optional): [...], the number of steps of each sequence, as in `LSTM`.
            keep (array, optional): [..., L], a factor on the state before each step, as in `LSTM`.
            hold (array, optional): [..., L], true at steps that leave the state unchanged, as in `LSTM`.

        Returns:
            array: all hidden states, [..., L, H], in the dtype to which x, the parameters and the first state promote.
        """
        return self._run(x, {"hidden": hidden}, lengths, keep, hold)[0]

    def step(self, x: mx.array, hidden: mx.array | None = None, *, keep: mx.array | None = None) -> mx.array:
        """Return the hidden state after one step, for input that arrives one step at a time, as in `LSTM.step`. Sizes:
        D features, H hidden units; "..." stands for the batch axes.

        Args:
            x (array): [..., D], without an axis of time; any number of batch axes, none included.
            hidden (array, optional): the hidden state before, [..., H]. Default: zeros.
            keep (array, optional): [...], a factor on the state before the step: 0 where an episode begins.

        Returns:
            array: the hidden state, [..., H].

        Example:
            >>> import mlx.core as mx
            >>> from mlx_lstm.nn import GRU
            >>> layer = GRU(3, 4)
            >>> layer.step(mx.ones((2, 3)), layer.step(mx.ones((2, 3)))).shape
            (2, 4)
        """
        return self._run(x, {"hidden": hidden}, keep=keep, is_step=True)[0]


class GRU(OneState):
    r"""A GRU layer: `mlx.nn.GRU` with one fused, differentiable recurrence in place of a graph per step.

    The layer equals `mlx.nn.GRU` in constructor, parameters, initialisation, shapes and results. Input shapes, several
    layers and evaluation mode are as described for `LSTM`.

    .. math::

        r_t &= \sigma(W_{xr} x_t + W_{hr} h_{t-1} + b_r) \qquad z_t = \sigma(W_{xz} x_t + W_{hz} h_{t-1} + b_z) \\
        n_t &= \tanh(W_{xn} x_t + b_n + r_t \odot (W_{hn} h_{t-1} + b_{hn})) \\
        h_t &= (1 - z_t) \odot n_t + z_t \odot h_{t-1}

    Parameters: `Wx` [3H, D], `Wh` [3H, H], `b` [3H], `bhn` [H]; gate order r, z, n; all drawn from U(-1/sqrt(H),
    1/sqrt(H)).

    Args:
        input_size, hidden_size (int): the sizes D of the features and H of the state.
        bias (bool): whether there are the biases b and bhn. Default: `True`.
        layer_norm (bool or Norm): layer normalisation inside the step, as in `LSTM`; `True` normalises both products,
            as in haste. Default: `False`.
        checkpoint_every (int or str, optional): in training, save the states of every K-th step only, as in `LSTM`.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: the best for the stream's device.

    Raises:
        ValueError: an argument breaks a rule.

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

    op: str = "nn.GRU"
    Wx: mx.array
    Wh: mx.array
    b: mx.array | None
    bhn: mx.array | None
    _cell_class = GRUCell
    _names: ClassVar = {"Wx": "Wx", "Wh": "Wh", "b": "b", "bhn": "bhn"}


class RNN(OneState):
    r"""A plain recurrent layer: `mlx.nn.RNN` with one fused, differentiable recurrence in place of a graph per step.

    The layer equals `mlx.nn.RNN` in constructor, parameters, initialisation, shapes and results. Input shapes, several
    layers and evaluation mode are as described for `LSTM`.

    .. math:: h_t = s(W_{xh} x_t + W_{hh} h_{t-1} + b)

    Parameters: `Wxh` [H, D], `Whh` [H, H], `bias` [H]; all drawn from U(-1/sqrt(H), 1/sqrt(H)).

    Args:
        input_size, hidden_size (int): the sizes D of the features and H of the state.
        bias (bool): whether there is a bias. Default: `True`.
        layer_norm (bool or Norm): layer normalisation inside the step, as in `LSTM`; `True` normalises both products.
            Default: `False`.
        checkpoint_every (int or str, optional): in training, save the states of every K-th step only, as in `LSTM`.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: the best for the stream's device.
        nonlinearity (callable, optional): s, a function of one array that computes each element by itself, such as
            `mlx.nn.gelu`. The functions in `NONLINEARITIES`, such as `mx.tanh`, run in the kernels of `mlx_lstm.rnn`;
            for other functions `mlx_lstm.pointwise` generates code, `engine_used` stays None, and there is no stepper.
            Default: tanh.

    Raises:
        ValueError: an argument breaks a rule.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import RNN
        >>> layer = RNN(3, 4, nonlinearity=mx.tanh)
        >>> hidden = layer(mx.ones((2, 10, 3)))
        >>> hidden = layer(mx.ones((2, 10, 3)), hidden[:, -1])  # go on from the last state
        >>> hidden.shape
        (2, 10, 4)
    """

    op: str = "nn.RNN"
    Wxh: mx.array
    Whh: mx.array
    bias: mx.array | None
    _cell_class = RNNCell
    _names: ClassVar = {"Wxh": "Wx", "Whh": "Wh", "bias": "b"}

    @advised
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: Callable[[mx.array], mx.array] | None = None,
        *,
        layer_norm: bool | Norm = False,
        checkpoint_every: int | str | None = None,
        engine: Engine | None = None,
    ):
        options: Any = {"layer_norm": layer_norm, "checkpoint_every": checkpoint_every, "engine": engine}
        super().__init__(input_size, hidden_size, bias, **options)
        self.nonlinearity: Callable[[mx.array], mx.array] = nn.tanh if nonlinearity is None else nonlinearity
        check_nonlinearity(self.nonlinearity)

    def _extra_repr(self) -> str:
        return super()._extra_repr(f"nonlinearity={self.nonlinearity}, ")

    def _run(
        self,
        x: mx.array,
        states: dict[str, mx.array | None],
        lengths: Lengths = None,
        keep: mx.array | None = None,
        hold: Hold = None,
        *,
        is_step: bool = False,
    ) -> list[mx.array]:
        """Run all time steps, as `Layer._run` does. If `mlx_lstm.rnn` does not have the nonlinearity as an activation,
        run them by `mlx_lstm.pointwise`, which generates code for any function."""
        check_nonlinearity(self.nonlinearity)
        if any(self.nonlinearity is function for function in NONLINEARITIES):
            return super()._run(x, states, lengths, keep, hold, is_step=is_step)
        op, arrays, hidden = self.op, self._arrays(), states["hidden"]
        # `pointwise` takes no quantized weights. So raise the error of `activation_of` about an unknown function.
        if any(isinstance(array, Quantized) for array in arrays.values()):
            activation_of(self.nonlinearity, op)
        (_, D), H = arrays["Wx"].shape, self.hidden_size
        check_input(op, x, D, arrays["Wx"], is_step)
        if is_step:  # a step is run as a sequence of one step; `whole_steps` below refuses a keep of another type
            x, keep = x[..., None, :], keep[..., None] if isinstance(keep, mx.array) else keep
        *batch, L, _ = x.shape
        h0 = mx.zeros((*batch, H), x.dtype)
        arrays |= {"x": x, "h0": h0 if hidden is None else whole_state(op, hidden, "hidden", (*batch, H), x)}
        arrays, dtype = in_common_dtype(arrays)
        vars(self)["_engine_used"] = None  # `pointwise` does not tell which engine runs
        if 0 in batch:
            return [mx.zeros((*batch, H) if is_step else (*batch, L, H), dtype)]
        steps = whole_steps(op, keep, hold, (*batch, L), "[..., L]")
        options: dict[str, Any] = {name: array.reshape(-1, L).T for name, array in steps.items()}  # [L, B]
        options |= {"norm": None if self._norm is None else norm_given(self._norm, arrays)}
        options |= {"lengths": flat_lengths(op, lengths, tuple(batch)), "checkpoint_every": self.checkpoint_every}
        # `pointwise` takes x [L, B, D], with one batch axis and the time first.
        given = arrays["Wx"], arrays["Wh"], arrays.get("b"), [arrays["h0"].reshape(-1, H)]
        # cell: `activated` bound to the nonlinearity as a method. Two such methods of the same function are equal; two
        # lambdas would not be. So `pointwise` traces the cell (finds its graph of operations) only once.
        cell, x = MethodType(activated, self.nonlinearity), arrays["x"].reshape(-1, L, D).swapaxes(0, 1)
        try:
            h, _ = pointwise(cell, x, *given, **options, training=self.training, engine=self.engine)
        # The user passed a nonlinearity. So change an error text about "the cell" into one about the nonlinearity.
        except ValueError as error:
            begin, named, rule = str(error).partition("[pointwise] the cell must")
            if begin or not named:  # the error is not about the cell
                raise
            # The text names our function `activated`, which the user does not know: end the sentence before that.
            rule, cell_named, _ = rule.partition(f" in {activated.__name__}")
            raise ValueError(f"[{op}] nonlinearity must{rule}" + "." * bool(cell_named)) from None
        h = h.swapaxes(0, 1).reshape(*batch, L, H)
        return [h[..., 0, :] if is_step else h]

    def _cell(self) -> Cell:
        return RNNCell(activation_of(self.nonlinearity), self._norm)


class QuantizedLSTM(QuantizedLayer, LSTM):
    """`LSTM` with quantized weights, as `mlx.nn.QuantizedLinear` is `Linear` with quantized weights.

    The layer equals an `LSTM` with the weights that `mx.dequantize` returns. The weights stay quantized in memory: 4
    bits, with float32 scales and biases for groups of 64, take 5 / 32 of the bytes of float32. Use `from_layer(layer,
    group_size, bits, mode)` to make one, or `quantize` for a whole model. The constructor makes a layer with random
    weights, into which `layer.load_weights(file)` can load a file.

    Parameters: `Wx` and `Wh` as `mx.quantize` packs them, uint32; their scales `Wx_scales`, `Wh_scales`; in mode
    "affine" also `Wx_biases`, `Wh_biases`; and `bias` [4H] as in `LSTM`. All are frozen, as in
    `mlx.nn.QuantizedLinear`; after `layer.unfreeze(keys="bias")` the bias is trained. Quantized weights have no
    gradient: asking for one raises a ValueError.

    `Wx` has D = input_size columns. If D is not a multiple of group_size, `Wx` stays a float weight. This costs little
    time: a call reads `Wx` once, but `Wh` at every step.

    Args:
        input_size, hidden_size, bias, engine: as in `LSTM`.
        layer (Module): for `from_layer`, an `mlx_lstm.nn.LSTM` or `mlx.nn.LSTM`, which stays as it is.
        group_size (int, optional): the number of weights that share a scale; H must be a multiple of it. Default: 64
            for "affine", 32 for "mxfp4" and "mxfp8", 16 for "nvfp4".
        bits (int, optional): bits of a weight. Default: 4, for "mxfp8" 8.
        mode (str): "affine" (groups of 32, 64, 128; 1, 2, 3, 4, 5, 6 or 8 bits), "mxfp4", "mxfp8" or "nvfp4", as in
            `mx.quantize`. Default: `"affine"`.

    Raises:
        ValueError: an argument breaks a rule.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import LSTM, QuantizedLSTM
        >>> layer = QuantizedLSTM.from_layer(LSTM(40, 64), bits=8)
        >>> layer
        QuantizedLSTM(input_dims=40, hidden_size=64, bias=True, group_size=64, bits=8, mode=affine)
        >>> hidden, cell = layer(mx.ones((2, 10, 40)))
        >>> sorted(layer.parameters())
        ['Wh', 'Wh_biases', 'Wh_scales', 'Wx', 'bias']
    """

    op = "nn.QuantizedLSTM"
    of, kinds = LSTM, (LSTM, nn.LSTM)


class QuantizedGRU(QuantizedLayer, GRU):
    """`GRU` with quantized weights, which stay quantized in memory, as in `QuantizedLSTM`.

    Parameters: `Wx`, `Wh` with scales and biases as in `QuantizedLSTM`; `b` [3H], `bhn` [H] as in `GRU`.

    Args:
        input_size, hidden_size (int): the sizes D of the features and H of the state.
        bias (bool): whether there are the biases b and bhn, which are not quantized. Default: `True`.
        group_size, bits, mode: how `mx.quantize` packs the weights, as in `QuantizedLSTM`.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: the best for the stream's device.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import GRU, QuantizedGRU
        >>> QuantizedGRU.from_layer(GRU(32, 32), mode="mxfp4")(mx.ones((2, 10, 32))).shape
        (2, 10, 32)
    """

    op = "nn.QuantizedGRU"
    of, kinds = GRU, (GRU, nn.GRU)


class QuantizedRNN(QuantizedLayer, RNN):
    """`RNN` with quantized weights, which stay quantized in memory, as in `QuantizedLSTM`.

    Parameters: `Wxh`, `Whh`, each with scales and biases, `Wxh_scales`, `Wxh_biases` and so on; `bias` [H] as in `RNN`.

    Args:
        input_size, hidden_size (int): the sizes D of the features and H of the state.
        bias (bool): whether there is a bias, which is not quantized. Default: `True`.
        nonlinearity (callable, optional): MLX's tanh, relu or sigmoid. Default: tanh.
        group_size, bits, mode: how `mx.quantize` packs the weights, as in `QuantizedLSTM`.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: the best for the stream's device.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import RNN, QuantizedRNN
        >>> QuantizedRNN.from_layer(RNN(32, 32), group_size=32)(mx.ones((2, 10, 32))).shape
        (2, 10, 32)
    """

    op = "nn.QuantizedRNN"
    of, kinds = RNN, (RNN, nn.RNN)

    def pack(self, group_size: int | None, bits: int | None, mode: str) -> None:
        activation_of(self.nonlinearity, self.op)  # refuse here, not at a call, a function that no quantized layer has
        super().pack(group_size, bits, mode)


def check_nonlinearity(nonlinearity: object) -> None:
    """Raise ValueError unless the nonlinearity of an `RNN` is a function."""
    if not callable(nonlinearity):
        rule = "nonlinearity must be a function of an array, such as mlx.nn.tanh or mlx.nn.gelu,"
        fail("nn.RNN", rule, repr(nonlinearity))


def activated(
    function: Callable[[mx.array], mx.array], a: tuple[mx.array, ...], state: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    """Compute a step of a plain RNN with the activation `function`: a cell as `mlx_lstm.pointwise` takes it. a: a tuple
    of one preactivation, because the cell has one gate; it contains h Wh^T of the old h, so `state` is not read. Return
    a tuple of the new h."""
    return (function(a[0]),)


def check_input(op: str, x: object, D: int, Wx: Weight, is_step: bool) -> None:
    """Check that x is a layer's input [..., L, D], or the input [..., D] of a step. D: the columns of the weight Wx. If
    x has another D, first check whether the wrong kind of weights, quantized or float, was loaded into the layer. L:
    steps; "...": the batch axes."""
    if not isinstance(x, mx.array):
        fail(op, f"x must be an mlx.core.array{instead_of(x, 'x')}", type(x).__name__)
    if x.dtype == mx.complex64:
        fail(op, "x must be real", x.dtype)
    # is_step counts as 1, because the x of a step has no time axis. The axes L and D must not be empty.
    if x.ndim < 2 - is_step or x.shape[-1] != D or 0 in x.shape[-2 + is_step :]:
        check_loaded(op, Wx)  # first, because the wrong kind of weights has another number of columns
        axes, least = ("", "") if is_step else ("L, ", " with at least one step")
        fail(op, f"x must have shape [..., {axes}D = {D}]{least}", f"shape {list(x.shape)}")


def check_loaded(op: str, Wx: Weight) -> None:
    """Check that a quantized layer holds a quantized input weight, and a float layer a float weight.

    A mismatch can come from `load_weights(file, strict=False)`, which loads any file into any layer.
    """
    if isinstance(Wx, Quantized) and Wx.packed.dtype != mx.uint32:
        rule = "a quantized layer must hold packed weights, uint32: load float ones before it is quantized,"
        fail(op, rule, Wx.packed.dtype)
    if isinstance(Wx, mx.array) and Wx.dtype == mx.uint32:
        fail(op, "a float layer must hold floats: load packed weights into its Quantized kind,", Wx.dtype)


def whole_state(op: str, array: object, name: str, shape: tuple[int, ...], x: mx.array) -> mx.array:
    """Check the first state `array`. Return it broadcast to `shape`, [..., H] with the batch axes of x. name: the
    argument, "hidden" or "cell". x: the layer's input, for the error text only."""
    if not isinstance(array, mx.array):
        both = isinstance(array, tuple) and op.endswith("LSTM")
        instead = ": pass hidden and cell, not a tuple," if both else instead_of(array)
        fail(op, f"{name} must be an mlx.core.array{instead}", type(array).__name__)
    if array.dtype == mx.complex64:
        fail(op, f"{name} must be real", array.dtype)
    try:
        return array if array.shape == shape else mx.broadcast_to(array, shape)
    except ValueError:
        time = ["time"] * (x.ndim - len(shape))  # empty for a step, whose x has no axis of time
        # axes: the names of the axes of x. Its batch axes are written as nothing, "batch", or "batch, ..." for several.
        axes = ", ".join([*["batch", "..."][: len(shape) - 1], *time, "features"])
        rule = f"{name} must have shape {list(shape)}, as x is [{axes}] = {list(x.shape)}"
        if array.ndim > len(shape) and time:
            rule += " (layer.step runs one step of a batch, nn.stack takes the states of several layers)"
        fail(op, f"{rule},", f"shape {list(array.shape)}")


def flat_lengths(op: str, lengths: Any, batch: tuple[int, ...]) -> Any:
    """Check that a layer's option `lengths` has the batch axes of x (none, one or several). Return it as [B]."""
    if lengths is None:
        return None
    try:
        array = lengths if isinstance(lengths, mx.array) else np.asarray(lengths)
    except ValueError:  # nested lists of different lengths
        fail(op, f"lengths must have shape {list(batch)}", lengths)
    if array.shape != batch:
        fail(op, f"lengths must have shape {list(batch)}, one per item,", f"shape {list(array.shape)}")
    return array.reshape(-1)
