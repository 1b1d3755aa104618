r"""Recurrent cells for `mlx_lstm.pointwise` and `mlx_lstm.nn.Pointwise`, each in a few lines of MLX.

Use them as they are, or copy and change them. The docstring of each names the paper, the order of the gates `a` and of
the states, and the equations. A cell computes one time step. Its arguments are those that `pointwise` passes to it:

- a: the preactivations (what the gates' activation functions get), one array [B, H] for each gate, for B sequences and
  H units. With `apart=True` each gate is a pair: the part from x and the part from h.
- state: the states before the step, arrays [B, H]. h is the first state. c is the cell state of an LSTM.
- The other arguments are arrays with a value for each step (`inputs` of `pointwise`), and parameters (`params`).

A cell returns the new states in the order of `state`. In the equations a prime marks a new state, and sigma is the
sigmoid.
"""

from collections.abc import Sequence

import mlx.core as mx

__all__ = ["augru", "cifg", "gru", "indrnn", "lstm", "minimal_gru", "minimal_gru_log", "peephole_lstm", "slstm"]
__all__ += ["sum_peephole_lstm", "zoneout_lstm"]

Array = mx.array
Arrays = Sequence[mx.array]


def __dir__() -> list[str]:
    """Return the names of the cells."""
    return list(__all__)


def lstm(a: Arrays, state: Arrays) -> tuple[Array, ...]:
    r"""Run a step of an LSTM (Hochreiter and Schmidhuber, Neural Computation 9, 1997; Gers et al., 2000).

    Gates i, f, g, o; states h, c. :math:`c' = \sigma(f) c + \sigma(i) \tanh g`, :math:`h' = \sigma(o) \tanh c'`.
    """
    i, f, g, o = a
    _, c = state
    c = mx.sigmoid(f) * c + mx.sigmoid(i) * mx.tanh(g)
    return mx.sigmoid(o) * mx.tanh(c), c


def zoneout_lstm(a: Arrays, state: Arrays, hold_h: Array, hold_c: Array) -> tuple[Array, ...]:
    r"""Run a step of an LSTM with zoneout (Krueger et al., arXiv:1606.01305).

    Gates i, f, g, o; states h, c; inputs hold_h, hold_c: 1 where h or c keeps its old value, else 0. Draw them for
    each step and unit: `mx.random.bernoulli(p, (T, B, H))`. At inference the paper uses the probabilities p themselves:
    the values may be anything from 0 to 1. :math:`h' = hold_h h + (1 - hold_h) h_{lstm}`, :math:`c' = hold_c c + (1 -
    hold_c) c_{lstm}`, where h_lstm and c_lstm are the result of `lstm`: h_lstm is computed from c_lstm, not from c'.
    """
    h, c = state
    new_h, new_c = lstm(a, state)
    return hold_h * h + (1 - hold_h) * new_h, hold_c * c + (1 - hold_c) * new_c


def cifg(a: Arrays, state: Arrays) -> tuple[Array, ...]:
    r"""Run a step of an LSTM with coupled input and forget gates (Greff et al., arXiv:1503.04069, "CIFG").

    Gates f, g, o; states h, c. :math:`c' = \sigma(f) c + (1 - \sigma(f)) \tanh g`, :math:`h' = \sigma(o) \tanh c'`.
    """
    f, g, o = a
    _, c = state
    f = mx.sigmoid(f)
    c = f * c + (1 - f) * mx.tanh(g)
    return mx.sigmoid(o) * mx.tanh(c), c


def peephole_lstm(a: Arrays, state: Arrays, p_i: Array, p_f: Array, p_o: Array) -> tuple[Array, ...]:
    r"""Run a step of an LSTM with peepholes (Gers, Schraudolph and Schmidhuber, JMLR 3, 2002).

    Gates i, f, g, o with the preactivations a_i, a_f, a_g, a_o; states h, c; params: the peephole weights p_i, p_f,
    p_o. :math:`i = \sigma(a_i + p_i c)`, :math:`f = \sigma(a_f + p_f c)`, :math:`c' = f c + i \tanh a_g`, :math:`o =
    \sigma(a_o + p_o c')`, :math:`h' = o \tanh c'`.
    """
    i, f, g, o = a
    _, c = state
    c = mx.sigmoid(f + p_f * c) * c + mx.sigmoid(i + p_i * c) * mx.tanh(g)
    return mx.sigmoid(o + p_o * c) * mx.tanh(c), c


def sum_peephole_lstm(a: Arrays, state: Arrays, p: Array) -> tuple[Array, ...]:
    r"""Run a step of an LSTM with peepholes in which the gates i, f and o share one peephole weight p per unit.

    Gates i, f, g, o; states h, c; params p. It is `peephole_lstm` with p_i = p_f = p_o.
    """
    return peephole_lstm(a, state, p, p, p)


def slstm(a: Arrays, state: Arrays) -> tuple[Array, ...]:
    r"""Run a step of sLSTM, the LSTM with exponential gates of xLSTM (Beck et al., arXiv:2405.04517, appendix A).

    Gates i, f, z, o (the order of the paper and of FlashRNN); states h, c, n, m, which begin as zeros. The forget gate
    is a sigmoid; :math:`m' = \max(\log \sigma(f) + m, i)` keeps the exponentials small. :math:`i' = e^{i - m'}`,
    :math:`f' = e^{\log \sigma(f) + m - m'}`, :math:`c' = f' c + i' \tanh z`, :math:`n' = f' n + i'`, :math:`h' =
    \sigma(o) c' / n'`. Where n = 0 (at the first step, or where `keep` has reset the states) there is nothing to
    forget: :math:`m' = i`, as in the code of the paper, and :math:`f' = 1`.
    """
    i, f, z, o = a
    _, c, n, m = state
    f = m - mx.logaddexp(0, -f)  # log sigmoid(f) + m
    # The new m is the larger one of f and i, and d = f - i tells which it is. Where n = 0, d is set to 0, which selects
    # i. If m were f there, a very negative i would make the new n 0, and h would be 0 / 0. d is
    # compared only once, because MLX cannot compile some derivatives of graphs with several equal comparisons.
    d = mx.where(n == 0, 0, f - i)
    is_f = d > 0
    m = mx.where(is_f, f, i)
    # The new gates are exp(f - m) and exp(i - m). One of them is 1, so one exponential e is enough. e is not written as
    # exp(-abs(d)), because MLX's gradient of abs at d = 0 is 0.
    e = mx.exp(mx.where(is_f, -d, d))
    i, f = mx.where(is_f, e, 1), mx.where(is_f, 1, e)
    c, n = f * c + i * mx.tanh(z), f * n + i
    return mx.sigmoid(o) * c / n, c, n, m


def gru(a: Arrays, state: Arrays) -> tuple[Array, ...]:
    r"""Run a step of a GRU as in cuDNN and PyTorch (Cho et al., arXiv:1406.1078).

    Call `pointwise` with `apart=True`: the gate n, for example, is then a pair (x_n, p_n), its part from x and its part
    from h. Gates r, z, n; state h. In the equations r and z are the sums of their parts. :math:`n = \tanh(x_n +
    \sigma(r) p_n)`, :math:`h' = n + \sigma(z) (h - n)`.
    """
    (xr, hr), (xz, hz), (xn, hn) = a
    (h,) = state
    n = mx.tanh(xn + mx.sigmoid(xr + hr) * hn)
    return (n + mx.sigmoid(xz + hz) * (h - n),)


def augru(a: Arrays, state: Arrays, attention: Array) -> tuple[Array, ...]:
    r"""Run a step of a GRU whose update gate is scaled by attention (AUGRU; Zhou et al., "DIEN", arXiv:1809.03672).

    The gates are r, u, n, the state is h. The input `attention`, an array [T, B, 1], is one score per step and
    sequence. Call `pointwise` with `apart=True`: the gate n, for example, is then a pair (x_n, p_n), its part from x
    and its part from h. In the equations r and u are the sums of their parts. :math:`n = \tanh(x_n + \sigma(r) p_n)`,
    :math:`u' = attention \sigma(u)`, :math:`h' = (1 - u') h + u' n`.
    """
    (xr, hr), (xu, hu), (xn, hn) = a
    (h,) = state
    n = mx.tanh(xn + mx.sigmoid(xr + hr) * hn)
    return (h + attention * mx.sigmoid(xu + hu) * (n - h),)


def indrnn(a: Arrays, state: Arrays, u: Array) -> tuple[Array, ...]:
    r"""Run a step of an independently recurrent network (IndRNN; Li et al., arXiv:1803.04831).

    Call `pointwise` with `Wh=None`: there is no recurrent matrix. One gate a; state h; params u. :math:`h' = \max(a + u
    h, 0)`.
    """
    return (mx.maximum(a[0] + u * state[0], 0),)


def minimal_gru(a: Arrays, state: Arrays) -> tuple[Array, ...]:
    r"""Run a step of minGRU (Feng et al., "Were RNNs all we needed?", arXiv:2410.01201).

    Call `pointwise` with `Wh=None`: there is no recurrent matrix. Gates z, n; state h. :math:`h' = (1 - \sigma(z)) h +
    \sigma(z) n`.
    """
    (z, n), (h,) = a, state
    return (h + mx.sigmoid(z) * (n - h),)


def minimal_gru_log(a: Arrays, state: Arrays) -> tuple[Array, ...]:
    r"""Run a step of minGRU with the positive candidate of the paper's log-space version.

    Call `pointwise` with `Wh=None`. Gates z, n; state h. It is `minimal_gru` with another candidate in place of n:
    :math:`n + 0.5` where :math:`n \ge 0`, :math:`\sigma(n)` elsewhere.
    """
    z, n = a
    return minimal_gru((z, mx.where(n >= 0, n + 0.5, mx.sigmoid(n))), state)
