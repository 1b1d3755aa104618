"""`Pointwise`, a recurrent layer whose cell is a function that the user writes. B: sequences, L: time steps, D:
features of the input, H: units, G: gates."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..convert.layers import class_of, whole_lists
from ..engines.choice import Engine, check_engine
from ..ground.checks import NO_UNITS, check_array, check_every, check_flag, check_integer, chosen_options, fail
from ..recurrence import (
    Hold,
    Lengths,
    Norm,
    OwnCell,
    Stepper,
    check_arrays,
    common_dtype,
    first_value,
    in_dtype,
    layer_norm_arrays,
    layer_norm_of,
    norm_given,
    pointwise,
    side_by_side,
    whole_steps,
)

OP = "nn.Pointwise"  # the name of the class in error texts


class Pointwise(nn.Module):
    r"""A recurrent layer with a cell of your own: the function of `mlx_lstm.pointwise`, with parameters.

    The input has shape [B, L, D]. Parameters: `Wx` [G H, D], `Wh` [G H, H] unless `recurrent=False`, `bias` [G H], and
    a list `params` of arrays [H], all drawn from U(-1/sqrt(H), 1/sqrt(H)), as in `mlx.nn.LSTM`. With
    `bidirectional=True` they hold the forward direction first: `Wx` [2 G H, D], `Wh` [2, G H, H], `bias` [2 G H],
    `params` [2H]. `mlx_lstm.nn.stack` and `mlx_lstm.nn.stepper` run several such layers. B: sequences, L: time steps.

    Args:
        cell (callable): `cell(a, state, *inputs, *params) -> state`, as in `mlx_lstm.pointwise`, where a holds the
            gates' preactivations, and inputs are arrays of the step that a call of the layer passes as `inputs=`. It
            must be pointwise: compute each number from the numbers of the same sequence and unit. An example is
            `mlx_lstm.cells.slstm`.
        input_size (int): size of the features, D.
        hidden_size (int): size of each state, H.
        gates (int): number of gates, G.
        states (int): number of states, h included. Default: 1.
        params (int): number of parameters per unit. Default: 0.
        bias (bool): whether there is a bias. Default: `True`.
        recurrent (bool): whether the preactivations contain Wh h. Default: `True`.
        apart (bool): pass each gate as a pair, (part from x, part from h). Default: `False`.
        reverse (bool): run from the last step to the first; outputs stay aligned with the input. Also an attribute.
            Default: `False`.
        bidirectional (bool): run both directions, each with its own parameters. Default: `False`.
        layer_norm (bool or Norm): layer normalisation of the preactivations before the cell gets them. A
            `mlx_lstm.Norm` without arrays: its scales and shifts are parameters of the layer, as in `LSTM`. `True` is
            `Norm()`, which normalises the products x Wx^T and h Wh^T, each by itself. Default: `False`.
        checkpoint_every (int or str, optional): in training, save the states of every K-th step only, as in
            `mlx_lstm.lstm`. Also an attribute. Default: `None`, save all.
        engine (str, optional): force an engine. Also an attribute. Default: the best for the stream's device.

    Raises:
        ValueError: an argument breaks a rule; at a call also if the cell is not pointwise.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import cells
        >>> from mlx_lstm.nn import Pointwise
        >>> layer = Pointwise(cells.slstm, 3, 4, gates=4, states=4)
        >>> layer
        Pointwise(slstm, input_size=3, hidden_size=4, gates=4, states=4, bias=True)
        >>> h, state = layer(mx.ones((2, 10, 3)))
        >>> h, state = layer(mx.ones((2, 5, 3)), state)  # go on from the last state
        >>> h.shape, len(state)
        ((2, 5, 4), 4)
        >>> both = Pointwise(cells.minimal_gru, 3, 4, gates=2, bidirectional=True)
        >>> both(mx.ones((2, 10, 3)))[0].shape
        (2, 10, 8)
    """

    op: str = OP
    Wx: mx.array
    Wh: mx.array | None
    bias: mx.array | None
    params: list[mx.array]
    hidden_size: int
    reverse: bool
    _own_cell: OwnCell
    engine: Engine | None
    checkpoint_every: int | str | None

    def __init__(
        self,
        cell: Callable[..., Any],
        input_size: int,
        hidden_size: int,
        *,
        gates: int,
        states: int = 1,
        params: int = 0,
        bias: bool = True,
        recurrent: bool = True,
        apart: bool = False,
        reverse: bool = False,
        bidirectional: bool = False,
        layer_norm: bool | Norm = False,
        checkpoint_every: int | str | None = None,
        engine: Engine | None = None,
    ):
        super().__init__()
        if not callable(cell):
            fail(OP, "cell must be a function", type(cell).__name__)
        I = check_integer(OP, "input_size", input_size, least=1)
        H = check_integer(OP, "hidden_size", hidden_size, least=1, why=NO_UNITS)
        G = check_integer(OP, "gates", gates, least=1)
        counts = check_integer(OP, "states", states, least=1), check_integer(OP, "params", params, least=0)
        flags = {"bias": bias, "recurrent": recurrent, "apart": apart}
        for name, flag in (flags | {"reverse": reverse, "bidirectional": bidirectional}).items():
            check_flag(OP, name, flag)
        check_one_way(reverse, bidirectional)
        self.hidden_size = H
        self.reverse = reverse
        self.engine = check_engine(OP, engine)
        self.checkpoint_every = check_every(OP, checkpoint_every)
        # These options cannot be changed later, because the shapes of the parameters depend on them. The cell is stored
        # in `vars`, because it is a tuple, and MLX would count a tuple attribute among the parameters.
        self._directions = 2 if bidirectional else 1
        own_cell = OwnCell(cell, G, *counts, apart, recurrent)
        vars(self)["_own_cell"] = own_cell = own_cell._replace(norm=layer_norm_of(OP, own_cell, layer_norm))
        scale, rows = 1.0 / math.sqrt(H), self._directions * G * H
        own = [2] if bidirectional else []  # the first axis of Wh, one entry per direction
        self.Wx = mx.random.uniform(-scale, scale, (rows, I))
        self.Wh = mx.random.uniform(-scale, scale, (*own, G * H, H)) if recurrent else None
        self.bias = mx.random.uniform(-scale, scale, (rows,)) if bias else None
        self.params = [mx.random.uniform(-scale, scale, (self._width,)) for _ in range(counts[1])]
        for name, shape in self._norm_shapes().items():
            setattr(self, name, first_value(name, shape))

    def _validate_keys(self, keys: Any, strict: bool) -> list[str]:
        # MLX's `freeze` and `unfreeze`, also those of a whole model, call this method.
        return whole_lists(self, super()._validate_keys(keys, strict))

    def _norm_shapes(self) -> dict[str, list[int]]:
        """Return {name: shape} of the parameters of layer normalisation; it is empty without layer normalisation."""
        norm, own = self._own_cell.norm, [2] if self._directions == 2 else []
        widths = {} if norm is None else layer_norm_arrays(norm, self._own_cell.gates, self.hidden_size)
        return {name: [*own, width] for name, width in widths.items()}

    @property
    def _width(self) -> int:
        """Return the number of units of all directions."""
        return self._directions * self.hidden_size

    def _extra_repr(self) -> str:
        own, I = self._own_cell, self.Wx.shape[1]
        function, gates, states, *_ = own  # the first fields of the cell
        sizes = f"input_size={I}, hidden_size={self.hidden_size}, gates={gates}"
        name = getattr(function, "__name__", type(function).__name__)
        norm = "" if own.norm is None else f", layer_norm={norm_given(own.norm, {})}"
        ways = ", reverse=True" * self.reverse + ", bidirectional=True" * (self._directions == 2)
        return f"{name}, {sizes}, states={states}, bias={self.bias is not None}{ways}{norm}{chosen_options(self)}"

    def __call__(
        self,
        x: mx.array,
        state: Sequence[mx.array] | None = None,
        *,
        inputs: Sequence[mx.array] = (),
        lengths: Lengths = None,
        keep: mx.array | None = None,
        hold: Hold = None,
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Return h at every step, and the states after the last step processed. Sizes: B sequences, L time steps, D
        features, H hidden units.

        Args:
            x (array): input, [B, L, D].
            state (sequence of array, optional): the first states, each [B, H], h first. Default: zeros.
            inputs (sequence of array): the cell's inputs of each step, broadcastable to [B, L, H].
            lengths (integer array or list, optional): [B], the number of steps of each sequence, in 0..L. Past the end
                of a sequence its h is 0 and its state stays.
            keep (array, optional): factor on the states before each step, broadcastable to [B, L]: 0 resets them.
            hold (array or list, optional): true at steps that leave the state unchanged, broadcastable to [B, L].

        Returns:
            tuple: h [B, L, H], and a tuple of the last states, each [B, H], in the dtype to which x, the parameters and
            the first states promote. With `bidirectional=True` h, all states and `inputs` have 2H in place of H.
        """
        self._check_arrays()
        check_array(OP, "x", x, ["B", "L", self.Wx.shape[1]])
        inputs = check_arrays(OP, "inputs", inputs)
        state = self._first_states(state, x.shape[0], x.dtype)
        norms = {name: getattr(self, name) for name in self._norm_shapes()}  # the arrays of layer normalisation
        weights = self.Wx, self.Wh, self.bias
        dtype = common_dtype([x, *weights, *state, *self.params, *norms.values()])
        Wx, Wh, b = (None if array is None else array.astype(dtype) for array in weights)
        states, params = ([array.astype(dtype) for array in each] for each in (state, self.params))
        options: dict[str, Any] = {"lengths": lengths, "training": self.training, "engine": self.engine}
        # The function `pointwise` takes arrays with the time first, so axes 0 and 1 are exchanged.
        by_step = whole_steps(OP, keep, hold, x.shape[:2], "[B, L]")
        options |= {name: mx.swapaxes(array, 0, 1) for name, array in by_step.items()}
        by_time = [mx.swapaxes(array, 0, 1) if array.ndim == 3 else array for array in inputs]
        own = self._own_cell
        h, last = pointwise(
            *(own.function, mx.swapaxes(x.astype(dtype), 0, 1), Wx, Wh, b, states),
            **options,
            inputs=by_time,
            params=params,
            norm=own.norm and norm_given(own.norm, in_dtype(norms, dtype)),
            apart=own.apart,
            reverse=self.reverse,
            bidirectional=self._directions == 2,
            checkpoint_every=self.checkpoint_every,
        )
        return mx.swapaxes(h, 0, 1), last

    def step(
        self,
        x: mx.array,
        state: Sequence[mx.array] | None = None,
        *,
        inputs: Sequence[mx.array] = (),
        keep: mx.array | None = None,
    ) -> tuple[mx.array, ...]:
        """Return all states after one step, h first, for input that arrives one step at a time. It equals a call with
        an x of one step, and has its gradient. Sizes: B sequences, D features, H hidden units.

        Args:
            x (array): input of the step, [B, D].
            state (sequence of array, optional): the states before the step, each [B, H], h first. Default: zeros.
            inputs (sequence of array): the arrays that the cell takes at this step besides x and the states,
                broadcastable to [B, H].
            keep (array, optional): factor on the states before the step, broadcastable to [B]: 0 resets them.

        Returns:
            tuple: the new states, each [B, H].

        Raises:
            ValueError: an argument breaks a rule, or the layer runs in reverse or in both directions.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_lstm import cells
            >>> from mlx_lstm.nn import Pointwise
            >>> layer = Pointwise(cells.slstm, 3, 4, gates=4, states=4)
            >>> state = layer.step(mx.ones((2, 3)))
            >>> state = layer.step(mx.ones((2, 3)), state)
            >>> len(state), state[0].shape
            (4, (2, 4))
        """
        op = f"{OP}.step"
        self._check_forward(op)
        check_array(op, "Wx", self.Wx, ["G H", "D"])
        check_array(op, "x", x, ["B", self.Wx.shape[1]])
        by_step = whole_steps(op, keep, hold=None, shape=x.shape[:1], axes="[B]")
        by_step = {name: array[:, None] for name, array in by_step.items()}  # with a time axis of one step
        wide = [array[:, None] if array.ndim == 2 else array for array in check_arrays(op, "inputs", inputs)]
        return self(x[:, None], state, inputs=wide, **by_step)[1]  # [1]: the last states

    def stepper(self, batch: int | Sequence[int] = (), *, inputs: int = 0) -> Stepper:
        """Return a `Stepper`: an object that runs one time step per call and keeps the states inside. It computes the
        same as the method `step` with much less work per step, but has no gradient. Sizes: D features, H hidden units;
        "..." stands for the batch axes.

        Args:
            batch (int or sequence of int): the sizes of the batch axes of a step's input. Default: none, the input is
                [D].
            inputs (int): the number of inputs of each step that the cell reads. Default: 0.

        Returns:
            Stepper: called as `stepper(x, keep=None, inputs=())` with x [..., D] of MLX or NumPy, it returns h
            [..., H] as the same kind of array. `state()` returns a tuple of all states, or h if there is no other.

        Raises:
            ValueError: an argument or a parameter breaks a rule, or the layer runs in reverse or in both directions.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_lstm import cells
            >>> from mlx_lstm.nn import Pointwise
            >>> stepper = Pointwise(cells.augru, 3, 4, gates=3, apart=True).stepper(2, inputs=1)
            >>> for frame in mx.ones((10, 2, 3)):
            ...     h = stepper(frame, inputs=[mx.ones((2, 1))])
            >>> h.shape
            (2, 4)
        """
        op = f"{OP}.stepper"
        class_of(op, "the layer", self)  # raises an error for a subclass that may compute something else
        self._check_forward(op)
        count = check_integer(op, "inputs", inputs, least=0)
        # read: returns the cell, the parameters and the engine; the stepper calls it again if parameters have changed.
        read = lambda: [(self._own_cell, self._by_argument(), self.engine)]  # noqa: E731
        return Stepper(op, read, [self], batch=batch, is_stack=False, inputs=count)

    def _check_forward(self, op: str) -> None:
        """Raise an error if the layer does not run forward only."""
        if self.reverse or self._directions == 2:
            rule = "the layer must run forward, because the reverse direction starts at the end of the sequence,"
            fail(op, rule, "both directions" if self._directions == 2 else "reverse=True")

    def _check_arrays(self) -> None:
        """Check that the parameters are arrays of the shapes that the cell needs."""
        # Three fields of the cell decide the shapes: the number of gates, of params, and whether h is multiplied by Wh.
        # In a shape the string "D" stands for any size.
        (_, G, _, params, _, recurrent, _), H, directions = self._own_cell, self.hidden_size, self._directions
        check_one_way(self.reverse, directions == 2)
        check_array(OP, "Wx", self.Wx, [directions * G * H, "D"])
        if recurrent:
            check_array(OP, "Wh", self.Wh, [2, G * H, H] if directions == 2 else [G * H, H])
        elif self.Wh is not None:
            fail(OP, "Wh must be None with recurrent=False", "an array")
        if self.bias is not None:
            check_array(OP, "bias", self.bias, [directions * G * H])
        if not isinstance(self.params, (list, tuple)) or len(self.params) != params:
            what = len(self.params) if isinstance(self.params, (list, tuple)) else type(self.params).__name__
            fail(OP, f"params must be a list of {params} arrays", what)
        for name, shape in self._norm_shapes().items():
            check_array(OP, name, getattr(self, name), shape)
        for k, array in enumerate(self.params):
            check_array(OP, f"params[{k}]", array, [directions * H], why=", one number per unit,")

    def _first_states(self, state: Any, B: int, dtype: mx.Dtype) -> list[mx.array]:
        """Check the first states that the caller passed. Return them as a list. If `state` is None, return zeros of
        this dtype, each [B, H], or [B, 2H] with both directions. B, H: sequences, hidden units."""
        count, shape = self._own_cell.states, [B, self._width]
        if state is None:
            return [mx.zeros(shape, dtype)] * count
        if not isinstance(state, (tuple, list)):
            fail(OP, f"state must be a tuple or list of {count} arrays", type(state).__name__)
        if len(state) != count:
            fail(OP, f"state must have {count} arrays", len(state))
        for k, array in enumerate(state):
            check_array(OP, f"state[{k}]", array, shape)
        return list(state)

    def _by_argument(self) -> dict[str, Any]:
        """Return the parameters as a dict by the argument names of a `Call`: Wx, Wh, b, params (all joined into one
        array), and the arrays of layer normalisation."""
        self._check_arrays()
        params = side_by_side(list(self.params), self._directions)  # None if there are none
        arrays = {"Wx": self.Wx, "Wh": self.Wh, "b": self.bias, "params": params}
        arrays |= {name: getattr(self, name) for name in self._norm_shapes()}
        return {name: array for name, array in arrays.items() if array is not None}


def check_one_way(reverse: bool, bidirectional: bool) -> None:
    """Raise an error if a layer has both options. `reverse` runs a layer of one direction from the last step to the
    first; a bidirectional layer runs in both orders anyway."""
    if reverse and bidirectional:
        fail(OP, "reverse must be False with bidirectional=True, which runs both directions,", "True")
