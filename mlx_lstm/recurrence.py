"""THE recurrence: an LSTM, GRU or plain RNN layer over a sequence, with its own gradient. All dialects come here.

The functions `lstm`, `gru` and `rnn` run forward and carry their gradient; `lstm_gradients`, `gru_gradients` and
`rnn_gradients` are that gradient by itself, for callers that kept the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import mlx.core as mx

from . import tuning
from .arguments import check_arrays, check_gru, check_lstm, check_rnn, check_sequences, is_traced
from .autodiff import run, run_backward, tanh_by_numpy
from .cells import Cell, RNNCell
from .checks import check_flag, check_lengths
from .engine_ops_cell import activate
from .engines import choose
from .problem import Problem

Arrays = dict[str, mx.array]
Lengths = mx.array | Sequence[int] | None
Stream = mx.Stream | mx.Device | None


class LSTMOutput(NamedTuple):
    """What `lstm` returns: sequences h [T, B, P], c [T, B, H], gates [T, B, 4H]; last states hT [B, P], cT [B, H].

    Where both directions run, each last axis is twice as wide, the forward direction first.
    """

    h: mx.array
    c: mx.array
    gates: mx.array | None
    hT: mx.array
    cT: mx.array


class GRUOutput(NamedTuple):
    """What `gru` returns: sequences h [T, B, H], gates [T, B, 3H]; the last state hT [B, H]; twice as wide for both
    directions."""

    h: mx.array
    gates: mx.array | None
    hT: mx.array


class RNNOutput(NamedTuple):
    """What `rnn` returns: sequences h and gates, the preactivations, [T, B, H]; the last state hT [B, H]; twice as wide
    for both directions."""

    h: mx.array
    gates: mx.array | None
    hT: mx.array


def lstm(
    x: mx.array,
    Wx: mx.array | None,
    Wh: mx.array,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    c0: mx.array | None = None,
    *,
    gate_order: str = "ifgo",
    activations: Sequence[str] = ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"),
    peephole: mx.array | None = None,
    output_peephole: str = "current",
    mask: mx.array | None = None,
    cell_clip: float | None = None,
    forget_bias: float = 0.0,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    Wp: mx.array | None = None,
    return_gates: bool = False,
    training: bool = True,
    engine: str | None = None,
    stream: Stream = None,
) -> LSTMOutput:
    r"""A long short-term memory layer over a time-major sequence.

    .. math::

        a_k &= x_t W_{x,k}^T + (m_t \odot h_{t-1}) W_{h,k}^T + b_k + p_k \odot c_{t-1}, \quad k \in \{i, f, g, o\} \\
        i, f, g, o &= s_i(a_i),\; s_f(a_f + \text{forget\_bias}),\; s_g(a_g),\; s_o(a_o) \\
        c_t &= f \odot c_{t-1} + i \odot g, \text{ clipped to } \pm\text{cell\_clip} \\
        h_t &= \left(o \odot s_{output}(c_t)\right) W_p^T

    Without options it equals `torch.nn.LSTM` of one layer (b = b_ih + b_hh) and `mlx.nn.LSTM` on a transposed batch.
    The gradient is exact for every array and flows from all five outputs; it keeps the gates and the cell states.

    Args:
        x (array): input, [T, B, I]; or, with `Wx=None`, the already projected input, [T, B, 4H].
        Wx (array, optional): input weights, [4H, I].
        Wh (array): recurrent weights, [4H, P]; P is H, or the projection's width.
        b (array, optional): bias, [4H].
        h0 (array, optional): first h, [B, P]. Default: zeros.
        c0 (array, optional): first c, [B, H]. Default: zeros.
        gate_order (str): order of the four H-blocks on every 4H axis (weights, bias, peephole, gates), a permutation of
            input, forget, candidate and output gate. Default: `"ifgo"`.
        activations (sequence of str): those of i, f, g, o (in this order, whatever `gate_order` is) and of the output,
            each one of `"identity"`, `"relu"`, `"tanh"`, `"sigmoid"`, `"hard_sigmoid"` (clip(0.2 x + 0.5, 0, 1)),
            `"hard_sigmoid_sixth"` (clip(x / 6 + 0.5, 0, 1)).
        peephole (array, optional): peephole weights, [4H]; zeros for a gate that shall not peep.
        output_peephole (str): whether o peeps at c[t], `"current"`, or at c[t-1], `"previous"`. Default: `"current"`.
        mask (array, optional): factor on h[t-1] as it enters the recurrent product; broadcastable to [B, P] or, one per
            step, to [T, B, P].
        cell_clip (float, optional): bound on |c[t]|, greater than 0. The gradient passes straight through, as in
            TensorFlow's block ops.
        forget_bias (float): added to the forget gate's preactivation. Default: 0.
        reverse (bool): process t = T-1 ... 0; outputs stay aligned with the input. Default: `False`.
        bidirectional (bool): run both directions. Then, the forward direction first, Wx is [8H, I], b [8H], Wh
            [2, 4H, P], Wp [2, P, H], peephole [2, 4H], h0 [B, 2P], c0 [B, 2H], a mask that is not shared [.., 2P], a
            projected x [T, B, 8H], and all outputs are twice as wide. Default: `False`.
        lengths (integer array or list, optional): [B], each in 0..T. Past its end an item's outputs are 0, its state is
            carried unchanged and its input never read; with `reverse` the item starts at its end. The range goes
            unchecked under `mx.compile`.
        Wp (array, optional): projection of h, [P, H].
        return_gates (bool): whether `gates` is returned, else it is `None`. Default: `False`.
        training (bool): `False` for inference. The numpy engine then keeps nothing for a gradient; should one be
            asked for, it runs forward again. A graph that MLX traces stays free of our gradient, which
            `mx.export_function` could not write; MLX then derives its own. Default: `True`.
        engine (str, optional): `"fused"`, `"stepwise"` (Metal), `"numpy"` or `"ops"` to force an engine. Default: the
            best for the stream's device and the sizes, see `mlx_lstm.engines.choose`.
        stream (Stream or Device, optional): where to run, as for any MLX op.

    Returns:
        LSTMOutput: h [T, B, P], c [T, B, H] (clipped), gates [T, B, 4H] (after activation, in `gate_order`; `None`
        unless `return_gates`), hT [B, P] and cT [B, H] (the state after the last step processed), in the dtype of x.
        float16 and bfloat16 are computed in float32. Engines on the CPU round once, at the outputs; the Metal engines
        keep the projected input, h and the gates in 16 bits, c in float32.

    Raises:
        ValueError: a rule on an argument is broken, or a forced engine cannot run. Nothing has been computed then.
        RuntimeError: a second or a forward-mode derivative was asked of an engine other than `"ops"`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import lstm
        >>> x = mx.random.normal((10, 2, 3))  # T, B, I
        >>> Wx, Wh, b = mx.zeros((16, 3)), mx.zeros((16, 4)), mx.ones((16,))
        >>> out = lstm(x, Wx, Wh, b)
        >>> out.h.shape, out.cT.shape
        ((10, 2, 4), (2, 4))
        >>> mx.grad(lambda Wh: lstm(x, Wx, Wh, b).hT.sum())(Wh).shape
        (16, 4)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, c0=c0, peephole=peephole, mask=mask, Wp=Wp)
    cell = check_lstm(gate_order, activations, output_peephole, cell_clip, forget_bias)
    plan = Plan(cell, reverse, bidirectional, lengths, return_gates, training, engine, stream)
    return LSTMOutput(**plan.forward(arrays))


def lstm_gradients(
    x: mx.array,
    Wx: mx.array | None,
    Wh: mx.array,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    c0: mx.array | None = None,
    *,
    gates: mx.array,
    c: mx.array,
    h: mx.array | None = None,
    dh: mx.array | None = None,
    dc: mx.array | None = None,
    dgates: mx.array | None = None,
    dhT: mx.array | None = None,
    dcT: mx.array | None = None,
    gate_order: str = "ifgo",
    activations: Sequence[str] = ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"),
    peephole: mx.array | None = None,
    output_peephole: str = "current",
    mask: mx.array | None = None,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    Wp: mx.array | None = None,
    engine: str | None = None,
    stream: Stream = None,
) -> Arrays:
    """The gradient of `lstm`, from what a forward pass returned.

    Equals what `mx.vjp` gives for the same arguments. No gate is computed again.

    Args:
        x, Wx, Wh, b, h0, c0 and all options: as `lstm` had them. A clip and a forget bias leave no trace in the
            formulas. With `Wx=None` only the shape of x counts.
        gates (array): [T, B, 4H], as `lstm` returned them.
        c (array): [T, B, H], likewise.
        h (array, optional): [T, B, P], likewise. Default: made of gates and c, which a projection does not allow.
        dh, dc, dgates, dhT, dcT (array, optional): the gradients of the outputs, in their shapes. Default: zeros.

    Returns:
        dict: the gradient of each array given, by its name here, in its shape: `"x"`, `"Wx"`, `"Wh"`, `"b"`, `"h0"`,
        `"c0"`, `"peephole"`, `"mask"`, `"Wp"`.

    Raises:
        ValueError: as `lstm`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.recurrence import lstm, lstm_gradients
        >>> x, Wx, Wh = mx.ones((10, 2, 3)), mx.ones((16, 3)), mx.ones((16, 4))
        >>> out = lstm(x, Wx, Wh, return_gates=True)
        >>> lstm_gradients(x, Wx, Wh, gates=out.gates, c=out.c, h=out.h, dh=mx.ones((10, 2, 4)))["Wh"].shape
        (16, 4)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, c0=c0, peephole=peephole, mask=mask, Wp=Wp)
    cell = check_lstm(gate_order, activations, output_peephole, None, 0.0, op="lstm_gradients")
    plan = Plan(cell, reverse, bidirectional, lengths, False, True, engine, stream)
    return plan.backward(arrays, given(h=h, c=c, gates=gates), given(h=dh, c=dc, gates=dgates, hT=dhT, cT=dcT))


def gru(
    x: mx.array,
    Wx: mx.array | None,
    Wh: mx.array,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    *,
    bhn: mx.array | None = None,
    gate_order: str = "rzn",
    activations: Sequence[str] = ("sigmoid", "sigmoid", "tanh"),
    reset: str = "after",
    flip_z: bool = False,
    mask: mx.array | None = None,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    return_gates: bool = False,
    training: bool = True,
    engine: str | None = None,
    stream: Stream = None,
) -> GRUOutput:
    r"""A gated recurrent unit layer over a time-major sequence.

    .. math::

        r, z &= s_k(x_t W_{x,k}^T + (m_t \odot h_{t-1}) W_{h,k}^T + b_k), \quad k \in \{r, z\} \\
        n &= s_n(x_t W_{x,n}^T + b_n + r \odot ((m_t \odot h_{t-1}) W_{h,n}^T + b_{hn})) \\
        h_t &= z \odot h_{t-1} + (1 - z) \odot n

    Without options it equals `torch.nn.GRU` of one layer (b = b_ih + b_hh for r and z, b_in for n; bhn = b_hn) and
    `mlx.nn.GRU`. With `reset="before"` the candidate is :math:`n = s_n(x_t W_{x,n}^T + b_n + (r \odot m_t \odot
    h_{t-1}) W_{h,n}^T)`, as in the first version of the paper, in Keras with `reset_after=False` and in TensorFlow's
    GRUBlockCell. The gradient is exact for every array and flows from all outputs; it keeps the gates.

    Args:
        x (array): input, [T, B, I]; or, with `Wx=None`, the already projected input, [T, B, 3H].
        Wx (array, optional): input weights, [3H, I].
        Wh (array): recurrent weights, [3H, H].
        b (array, optional): bias, [3H].
        h0 (array, optional): first h, [B, H]. Default: zeros.
        bhn (array, optional): bias of the candidate's recurrent product, [H]; needs `reset="after"`.
        gate_order (str): order of the three H-blocks on every 3H axis, a permutation of reset, update and candidate
            gate. Default: `"rzn"`.
        activations (sequence of str): those of r, z, n, in this order, each as in `lstm`.
        reset (str): whether r multiplies the recurrent product, `"after"`, or what goes into it, `"before"`.
            Default: `"after"`.
        flip_z (bool): let z be the weight of n, so that h = (1 - z) h + z n. Default: `False`.
        mask (array, optional): factor on h[t-1] as it enters the recurrent products (not the sum with z);
            broadcastable to [B, H] or, one per step, to [T, B, H].
        reverse, bidirectional, lengths, return_gates, training, engine, stream: as in `lstm`. For both directions Wx is
            [6H, I], b [6H], Wh [2, 3H, H], bhn [2H], h0 [B, 2H], a projected x [T, B, 6H].

    Returns:
        GRUOutput: h [T, B, H], gates [T, B, 3H] (after activation, in `gate_order`; `None` unless `return_gates`) and
        hT [B, H], in the dtype of x.

    Raises:
        ValueError, RuntimeError: as `lstm`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import gru
        >>> x = mx.random.normal((10, 2, 3))  # T, B, I
        >>> out = gru(x, mx.zeros((12, 3)), mx.zeros((12, 4)), mx.ones((12,)))
        >>> out.h.shape, out.hT.shape
        ((10, 2, 4), (2, 4))
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, bhn=bhn, mask=mask)
    cell = check_gru(gate_order, activations, reset, flip_z, bhn)
    plan = Plan(cell, reverse, bidirectional, lengths, return_gates, training, engine, stream)
    return GRUOutput(**plan.forward(arrays))


def gru_gradients(
    x: mx.array,
    Wx: mx.array | None,
    Wh: mx.array,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    *,
    gates: mx.array,
    h: mx.array,
    dh: mx.array | None = None,
    dgates: mx.array | None = None,
    dhT: mx.array | None = None,
    bhn: mx.array | None = None,
    gate_order: str = "rzn",
    activations: Sequence[str] = ("sigmoid", "sigmoid", "tanh"),
    reset: str = "after",
    flip_z: bool = False,
    mask: mx.array | None = None,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    engine: str | None = None,
    stream: Stream = None,
) -> Arrays:
    """The gradient of `gru`, from what a forward pass returned; equals what `mx.vjp` gives for the same arguments.

    Args:
        x, Wx, Wh, b, h0 and all options: as `gru` had them.
        gates (array): [T, B, 3H], as `gru` returned them.
        h (array): [T, B, H], likewise.
        dh, dgates, dhT (array, optional): the gradients of the outputs, in their shapes. Default: zeros.

    Returns:
        dict: the gradient of each array given, by its name here, in its shape.

    Raises:
        ValueError: as `gru`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.recurrence import gru, gru_gradients
        >>> x, Wx, Wh = mx.ones((10, 2, 3)), mx.ones((12, 3)), mx.ones((12, 4))
        >>> out = gru(x, Wx, Wh, return_gates=True)
        >>> gru_gradients(x, Wx, Wh, gates=out.gates, h=out.h, dh=mx.ones((10, 2, 4)))["x"].shape
        (10, 2, 3)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, bhn=bhn, mask=mask)
    cell = check_gru(gate_order, activations, reset, flip_z, bhn, op="gru_gradients")
    plan = Plan(cell, reverse, bidirectional, lengths, False, True, engine, stream)
    return plan.backward(arrays, given(h=h, gates=gates), given(h=dh, gates=dgates, hT=dhT))


def rnn(
    x: mx.array,
    Wx: mx.array | None,
    Wh: mx.array,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    *,
    activation: str = "tanh",
    mask: mx.array | None = None,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    return_gates: bool = False,
    training: bool = True,
    engine: str | None = None,
    stream: Stream = None,
) -> RNNOutput:
    r"""A plain recurrent layer over a time-major sequence, as `torch.nn.RNN` of one layer and `mlx.nn.RNN` have it.

    .. math:: h_t = s(x_t W_x^T + (m_t \odot h_{t-1}) W_h^T + b)

    Args:
        x (array): input, [T, B, I]; or, with `Wx=None`, the already projected input, [T, B, H].
        Wx (array, optional): input weights, [H, I].
        Wh (array): recurrent weights, [H, H].
        b (array, optional): bias, [H].
        h0 (array, optional): first h, [B, H]. Default: zeros.
        activation (str): that of h, one of those of `lstm`. Default: `"tanh"`.
        mask, reverse, bidirectional, lengths, training, engine, stream: as in `lstm`. For both directions Wx is
            [2H, I], b [2H], Wh [2, H, H], h0 [B, 2H], a projected x [T, B, 2H].
        return_gates (bool): whether `gates`, here the argument of the activation, is returned. Default: `False`.

    Returns:
        RNNOutput: h [T, B, H], gates [T, B, H] (before activation; `None` unless `return_gates`) and hT [B, H], in the
        dtype of x.

    Raises:
        ValueError, RuntimeError: as `lstm`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import rnn
        >>> rnn(mx.ones((10, 2, 3)), mx.zeros((4, 3)), mx.zeros((4, 4)), activation="relu").h.shape
        (10, 2, 4)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, mask=mask)
    cell = check_rnn(activation)
    plan = Plan(cell, reverse, bidirectional, lengths, return_gates, training, engine, stream)
    return RNNOutput(**plan.forward(arrays))


def rnn_gradients(
    x: mx.array,
    Wx: mx.array | None,
    Wh: mx.array,
    b: mx.array | None = None,
    h0: mx.array | None = None,
    *,
    h: mx.array | None = None,
    gates: mx.array | None = None,
    dh: mx.array | None = None,
    dgates: mx.array | None = None,
    dhT: mx.array | None = None,
    activation: str = "tanh",
    mask: mx.array | None = None,
    reverse: bool = False,
    bidirectional: bool = False,
    lengths: Lengths = None,
    engine: str | None = None,
    stream: Stream = None,
) -> Arrays:
    """The gradient of `rnn`, from what a forward pass returned; equals what `mx.vjp` gives for the same arguments.

    Args:
        x, Wx, Wh, b, h0 and all options: as `rnn` had them.
        h, gates (array): [T, B, H], as `rnn` returned them; one of the two, or both.
        dh, dgates, dhT (array, optional): the gradients of the outputs, in their shapes. Default: zeros.

    Returns:
        dict: the gradient of each array given, by its name here, in its shape.

    Raises:
        ValueError: as `rnn`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.recurrence import rnn, rnn_gradients
        >>> x, Wx, Wh = mx.ones((10, 2, 3)), mx.ones((4, 3)), mx.ones((4, 4))
        >>> rnn_gradients(x, Wx, Wh, h=rnn(x, Wx, Wh).h, dh=mx.ones((10, 2, 4)))["Wh"].shape
        (4, 4)
    """
    arrays = given(x=x, Wx=Wx, Wh=Wh, b=b, h0=h0, mask=mask)
    cell = check_rnn(activation, op="rnn_gradients")
    plan = Plan(cell, reverse, bidirectional, lengths, False, True, engine, stream)
    return plan.backward(arrays, given(h=h, gates=gates), given(h=dh, gates=dgates, hT=dhT))


# --- From a call to an engine ----------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A call's cell and options, as the caller gave them: checks them with the arrays, chooses an engine and runs."""

    cell: Cell
    reverse: bool
    bidirectional: bool
    lengths: Lengths
    return_gates: bool
    training: bool
    engine: str | None
    stream: Stream

    def forward(self, arrays: Arrays) -> dict[str, mx.array | None]:
        """The outputs, with their gradient."""
        problem = self.check(arrays, self.cell.op)
        with on(self.stream):
            problem, engine, traced = self.choose(problem, arrays, [], self.cell.op)
            return run(problem, arrays, engine, plain=traced and not self.training)

    def backward(self, arrays: Arrays, saved: Arrays, cotangents: Arrays) -> Arrays:
        """The gradients of the arrays."""
        op = f"{self.cell.op}_gradients"
        problem = self.check(arrays, op)
        check_sequences(problem, arrays, saved, cotangents, op)
        with on(self.stream):
            problem, engine, _ = self.choose(problem, arrays, [*saved.values(), *cotangents.values()], op)
            if "h" not in saved:
                saved = saved | {"h": h_of(problem, saved)}
            return run_backward(problem, arrays, saved, cotangents, engine)

    def check(self, arrays: Arrays, op: str) -> Problem:
        """The problem, but for its lengths, once arrays and flags are found right."""
        for name in ("reverse", "bidirectional", "return_gates", "training"):
            check_flag(op, name, getattr(self, name))
        sizes = check_arrays(arrays, self.cell, self.bidirectional, op)
        options = self.return_gates, self.training, self.bidirectional
        return Problem(*sizes, self.cell, self.reverse and not self.bidirectional, None, *options)

    def choose(self, problem: Problem, arrays: Arrays, others: list[mx.array], op: str) -> tuple[Problem, str, bool]:
        """The problem with its lengths, the engine's word, whether some array has no value yet, where that counts:
        nothing is evaluated for an engine that does without."""
        T, B, H, _ = problem[:4]
        if self.lengths is not None:
            traced = isinstance(self.lengths, mx.array) and is_traced([self.lengths], wait=True)
            problem = problem._replace(lengths=check_lengths(op, self.lengths, B, T, traced=traced))
            others = [*others, problem.lengths]
        metal, on_cpu = mx.metal.is_available(), current_device() == "cpu"
        numpy = on_cpu and self.engine in (None, "numpy")
        traced = (numpy or not self.training) and is_traced([*arrays.values(), *others], wait=numpy)
        word = choose(
            sizes=(T, B, arrays["x"].shape[-1], H),
            dtype=arrays["x"].dtype,
            cell=self.cell,
            bidirectional=self.bidirectional,
            projection="Wp" in arrays,
            device="cpu" if on_cpu else "gpu",
            metal=metal,
            traced=traced,
            requested=self.engine,
            table=tuning.current() if metal else tuning.PREDICTED,
            op=op,
        ).engine
        return problem, word, traced


def given(**arrays: mx.array | None) -> Arrays:
    """The arrays that are not None; x and Wh have to be there, which is checked later."""
    return {name: array for name, array in arrays.items() if array is not None or name in ("x", "Wh")}


def on(stream: Stream):
    """The context of a stream, or none."""
    return mx.stream(stream) if stream is not None else nullcontext()


def h_of(problem: Problem, saved: Arrays) -> mx.array:
    """[T, B, D H]: h out of an LSTM's gates and c, where nothing is projected, or of a plain cell's preactivations."""
    cell, D, H, gates = problem.cell, problem.directions, problem.H, saved["gates"]
    if isinstance(cell, RNNCell):
        return activate(cell.act, gates)
    c = saved["c"]
    blocks = gates.reshape(*gates.shape[:2], D, 4 * H)[..., cell.block("o", H)]
    return (blocks.reshape(c.shape) * activate(cell.activation("output"), c)).astype(gates.dtype)


def tanh(c: mx.array) -> mx.array:
    """tanh of a sequence that an engine returned, for dialects that show it. MLX's own is slow on the CPU."""
    slow = current_device() == "cpu" and c.dtype in (mx.float32, mx.float64)
    return tanh_by_numpy(c) if slow and not is_traced([c], wait=True) else mx.tanh(c)


def joined(blocks: list[mx.array]) -> mx.array:
    """[T, B, G H]: gates that a dialect has one by one, [T, B, H], in the memory order of this device's engines."""
    if current_device() != "cpu":
        return mx.concatenate(blocks, axis=-1)
    return mx.swapaxes(mx.concatenate([mx.swapaxes(block, 1, 2) for block in blocks], axis=1), 1, 2)


def current_device() -> str:
    """`"cpu"` or `"gpu"`: where the stream in effect runs."""
    return "cpu" if mx.default_device() == mx.cpu else "gpu"
