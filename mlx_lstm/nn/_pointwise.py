"""`Pointwise`, a recurrent layer whose cell is a function that the user writes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checks import NO_UNITS, check_array, check_every, check_flag, check_integer, chosen_options, fail
from ..engines.choice import Engine, check_engine
from ..recurrence import Hold, Lengths, pointwise, whole_steps

OP = "nn.Pointwise"


class Pointwise(nn.Module):
    r"""A recurrent layer with a cell of your own: the function of `mlx_lstm.pointwise`, with parameters.

    The input has shape [B, L, D]. Parameters: `Wx` [G H, D], `Wh` [G H, H] unless `recurrent=False`, `bias` [G H], and
    a list `params` of arrays [H], all drawn from U(-1/sqrt(H), 1/sqrt(H)), as in `mlx.nn.LSTM`.

    Args:
        cell (callable): `cell(a, state, *inputs, *params) -> state`, as in `mlx_lstm.pointwise`, where a holds the
            gates' preactivations; for example one of `mlx_lstm.cells`.
        input_size (int): size of the features, D.
        hidden_size (int): size of each state, H.
        gates (int): number of gates, G.
        states (int): number of states, h included. Default: 1.
        params (int): number of parameters per unit. Default: 0.
        bias (bool): whether there is a bias. Default: `True`.
        recurrent (bool): whether the preactivations contain Wh h. Default: `True`.
        apart (bool): pass each gate as a pair, (part from x, part from h). Default: `False`.
        checkpoint_every (int or str, optional): as in `mlx_lstm.lstm`. Also an attribute. Default: `None`.
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
    """

    Wx: mx.array
    Wh: mx.array | None
    bias: mx.array | None
    params: list[mx.array]
    hidden_size: int
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
        checkpoint_every: int | str | None = None,
        engine: Engine | None = None,
    ):
        super().__init__()
        if not callable(cell):
            fail(OP, "cell must be a function", type(cell).__name__)
        I = check_integer(OP, "input_size", input_size, least=1)
        H = check_integer(OP, "hidden_size", hidden_size, least=1, why=NO_UNITS)
        rows = check_integer(OP, "gates", gates, least=1) * H
        counts = check_integer(OP, "states", states, least=1), check_integer(OP, "params", params, least=0)
        for name, flag in (("bias", bias), ("recurrent", recurrent), ("apart", apart)):
            check_flag(OP, name, flag)
        self.hidden_size = H
        self.engine = check_engine(OP, engine)
        self.checkpoint_every = check_every(OP, checkpoint_every)
        self._cell, self._states, self._apart = cell, counts[0], apart
        scale = 1.0 / math.sqrt(H)
        self.Wx = mx.random.uniform(-scale, scale, (rows, I))
        self.Wh = mx.random.uniform(-scale, scale, (rows, H)) if recurrent else None
        self.bias = mx.random.uniform(-scale, scale, (rows,)) if bias else None
        self.params = [mx.random.uniform(-scale, scale, (H,)) for _ in range(counts[1])]

    def _extra_repr(self) -> str:
        rows, I = self.Wx.shape
        sizes = f"input_size={I}, hidden_size={self.hidden_size}, gates={rows // self.hidden_size}"
        name = getattr(self._cell, "__name__", type(self._cell).__name__)
        return f"{name}, {sizes}, states={self._states}, bias={self.bias is not None}{chosen_options(self)}"

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
        """Return h at every step, and the states after the last step.

        Args:
            x (array): input, [B, L, D].
            state (sequence of array, optional): the first states, each [B, H], h first. Default: zeros.
            inputs (sequence of array): the cell's inputs of each step, broadcastable to [B, L, H].
            lengths (integer array or list, optional): [B], the number of steps of each sequence, in 0..L. Past the end
                of a sequence its h is 0 and its state stays.
            keep (array, optional): factor on the states before each step, broadcastable to [B, L]: 0 resets them.
            hold (array or list, optional): steps that leave the state unchanged, broadcastable to [B, L].

        Returns:
            tuple: h [B, L, H], and a tuple of the last states, each [B, H].
        """
        check_array(OP, "x", x, ["B", "L", self.Wx.shape[1]])
        if isinstance(state, mx.array):
            fail(OP, f"state must be a tuple or list of {self._states} arrays", "an array")
        if state is None:
            state = [mx.zeros((x.shape[0], self.hidden_size), x.dtype)] * self._states
        if len(state) != self._states:
            fail(OP, f"state must have {self._states} arrays", len(state))
        options: dict[str, Any] = {"lengths": lengths, "training": self.training, "engine": self.engine}
        by_step = whole_steps(OP, keep, hold, x.shape[:2], "[B, L]")
        options |= {name: mx.swapaxes(array, 0, 1) for name, array in by_step.items()}
        by_time = [mx.swapaxes(array, 0, 1) if array.ndim == 3 else array for array in inputs]
        options |= {"inputs": by_time, "params": self.params, "apart": self._apart}
        try:
            h, last = pointwise(
                *(self._cell, mx.swapaxes(x, 0, 1), self.Wx, self.Wh, self.bias, state),
                **options,
                checkpoint_every=self.checkpoint_every,
            )
        except (TypeError, ValueError) as error:
            # Python's own errors for a wrong number of values, raised by the user's cell
            if not any(text in str(error) for text in (" to unpack", "positional argument")):
                raise
            counts = f"gates={len(self.Wx) // self.hidden_size}, states={self._states}, params={len(self.params)}"
            rule = "gates, states, params and inputs must be as many as the cell takes"
            raise ValueError(f"[{OP}] {rule} but got {counts}, inputs={len(by_time)}: {error}.") from error
        return mx.swapaxes(h, 0, 1), last
