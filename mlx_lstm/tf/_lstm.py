"""Run TensorFlow's LSTM block ops, for one step or a sequence, and their gradients.

Each op checks its arguments, converts them to those of `mlx_lstm.lstm` or `lstm_gradients`, and converts the results
back. Letters in shapes: T steps, N batch items, I inputs, H units. TensorFlow's names: w [I + H, 4H] the weights of the
input (first I rows) and of h, b [4H] the bias, cs the cell state, co = tanh(cs), ci the candidate (g in
`mlx_lstm.lstm`); wci, wcf, wco [H] the peepholes of i, f, o. cs_prev, h_prev: the states before the first step.

given: the arrays that all ops get, in a dict by TensorFlow's names. saved: the outputs of the forward op, and gradients
of outputs, by name. order: the gate order of w and b in the letters of `mlx_lstm.lstm`: ICFO = "igfo" or IFCO = "ifgo".
"""

from typing import Any, NamedTuple

import mlx.core as mx

from ..convert.weights import TF
from ..engines.choice import Engine, Stream, on
from ..engines.problem import Arrays
from ..engines.sequences import joined, tanh
from ..ground.checks import check_every
from ..recurrence import lstm, lstm_gradients
from ._checks import PEEPHOLES, check_attributes, check_block_lstm, check_block_lstm_grad, check_lstm_block_cell

ICFO, IFCO = TF["icfo"], TF["ifco"]
"""TensorFlow's gate orders in the letters of `mlx_lstm.lstm`, "igfo" and "ifgo": TensorFlow's candidate c (or ci) is g
here. The V2 ops have the order IFCO, all others ICFO."""


class BlockLSTMOutput(NamedTuple):
    """Outputs of the LSTM ops, each [T, N, H] (T steps, N batch items, H units); from `lstm_block_cell` [N, H]. The
    gates i, f, o and ci (the candidate) are values after activation; cs is the clipped cell state, co is tanh(cs)."""

    i: mx.array
    cs: mx.array
    f: mx.array
    o: mx.array
    ci: mx.array
    co: mx.array
    h: mx.array


class LSTMBlockCellGradOutput(NamedTuple):
    """Outputs of `lstm_block_cell_grad`, for N batch items and H units: cs_prev_grad [N, H]; dicfo [N, 4H], the
    gradient of the preactivations; wci_grad, wcf_grad, wco_grad [H]."""

    cs_prev_grad: mx.array
    dicfo: mx.array
    wci_grad: mx.array
    wcf_grad: mx.array
    wco_grad: mx.array


class BlockLSTMGradOutput(NamedTuple):
    """Outputs of `block_lstm_grad`: x_grad [T, N, I], cs_prev_grad, h_prev_grad [N, H], w_grad [I + H, 4H],
    wci_grad, wcf_grad, wco_grad [H], b_grad [4H]. Sizes: T steps, N batch items, I inputs, H units."""

    x_grad: mx.array
    cs_prev_grad: mx.array
    h_prev_grad: mx.array
    w_grad: mx.array
    wci_grad: mx.array
    wcf_grad: mx.array
    wco_grad: mx.array
    b_grad: mx.array


def lstm_block_cell(
    x: mx.array,
    cs_prev: mx.array,
    h_prev: mx.array,
    w: mx.array,
    wci: mx.array,
    wcf: mx.array,
    wco: mx.array,
    b: mx.array,
    forget_bias: float = 1.0,
    cell_clip: float = 3.0,
    use_peephole: bool = False,
    *,
    engine: Engine | None = None,
    stream: Stream = None,
) -> BlockLSTMOutput:
    """Run one step of an LSTM; equals `tf.raw_ops.LSTMBlockCell`. Gate order ICFO. Sizes: N batch items, I inputs, H
    units.

        [i, ci, f, o] before activation = [x, h_prev] w + b, with peepholes + cs_prev wci on i, + cs_prev wcf on f
        i = sigmoid(i)   ci = tanh(ci)   f = sigmoid(f + forget_bias)
        cs = clip(i ci + f cs_prev)      o = sigmoid(o + cs wco)      co = tanh(cs)      h = o co

    The gradient is exact for a loss of any of the seven outputs, except that it passes through the clip unchanged.
    TensorFlow 2 has no gradient for this op; for a loss of cs and h, the gradient equals the one that TensorFlow 1 had
    registered.

    Args:
        x (array): the input, [N, I].
        cs_prev, h_prev (array): cell state and h of the step before, [N, H].
        w (array): the weights of x (the first I rows) and of h, [I + H, 4H].
        wci, wcf, wco (array): peepholes of i, f, o, [H]. Without `use_peephole` they are not used and may have any
            length.
        b (array): the bias, [4H].
        forget_bias (float): added to f's preactivation. Default: 1.
        cell_clip (float): bound on |cs|; no bound if it is 0, negative or NaN. Default: 3, which TensorFlow's layers
            never use: they pass -1.
        use_peephole (bool): whether i, f, o read the cell state. Default: `False`.

    Returns:
        BlockLSTMOutput: i, cs, f, o, ci, co, h, each [N, H].

    Raises:
        ValueError: an argument breaks a rule. N = 0 and H = 0 are refused, as in TensorFlow.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import tf
        >>> state, peephole = mx.zeros((2, 4)), mx.zeros((4,))
        >>> out = tf.lstm_block_cell(mx.ones((2, 3)), state, state, mx.ones((7, 16)), *[peephole] * 3, mx.ones((16,)))
        >>> out.h.shape
        (2, 4)
    """
    op, given = "lstm_block_cell", common_arrays(x, cs_prev, h_prev, w, wci, wcf, wco, b)
    check_lstm_block_cell(op, given, use_peephole)
    options = check_attributes(op, forget_bias, cell_clip) | {"engine": engine}
    with on(stream, op):
        given["x"], steps = x[None], 1  # [1, N, I]
        out = run_lstm(ICFO, steps, given, use_peephole, options)
        return BlockLSTMOutput(*(array[0] for array in out))


def lstm_block_cell_grad(
    x: mx.array,
    cs_prev: mx.array,
    h_prev: mx.array,
    w: mx.array,
    wci: mx.array,
    wcf: mx.array,
    wco: mx.array,
    b: mx.array,
    i: mx.array,
    cs: mx.array,
    f: mx.array,
    o: mx.array,
    ci: mx.array,
    co: mx.array,
    cs_grad: mx.array,
    h_grad: mx.array,
    use_peephole: bool,
    *,
    engine: Engine | None = None,
    stream: Stream = None,
) -> LSTMBlockCellGradOutput:
    """Return the gradient of `lstm_block_cell`; equals `tf.raw_ops.LSTMBlockCellGrad`. Sizes: N batch items, H units.

    Instead of the gradients of x, h_prev, w and b the op returns dicfo, the gradient of the preactivations. TensorFlow
    1 computed the four gradients from dicfo: [x_grad, h_prev_grad] = dicfo w^T, w_grad = [x, h_prev]^T dicfo, and
    b_grad = the sum of dicfo over N. `mx.grad` of `lstm_block_cell` returns the four gradients directly. The clip
    passes gradients unchanged.

    Differs from TensorFlow: co is computed again from cs. The peepholes' part of cs_prev_grad is added once on every
    device, whereas TensorFlow's CUDA source adds it twice. If TensorFlow writes the gradients of the peepholes into the
    memory of the peepholes, it then reads zeros instead of the peepholes; this op never does.

    Args:
        x, cs_prev, h_prev, w, wci, wcf, wco, b: the arguments of `lstm_block_cell`. Only the shapes of x, h_prev, w and
            b are used.
        i, cs, f, o, ci, co (array): the outputs of `lstm_block_cell`, [N, H]. Only the shape of co is used.
        cs_grad, h_grad (array): the gradients of cs and h, [N, H].
        use_peephole (bool): whether there were peepholes; if not, their gradients are 0.

    Returns:
        LSTMBlockCellGradOutput: cs_prev_grad [N, H]; dicfo [N, 4H], with the gates in the order i, ci, f, o; wci_grad,
        wcf_grad, wco_grad [H].

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import tf
        >>> x, state, peephole = mx.ones((2, 3)), mx.zeros((2, 4)), [mx.zeros((4,))] * 3
        >>> arrays = x, state, state, mx.ones((7, 16)), *peephole, mx.ones((16,))
        >>> i, cs, f, o, ci, co, h = tf.lstm_block_cell(*arrays)
        >>> tf.lstm_block_cell_grad(*arrays, i, cs, f, o, ci, co, cs_grad=cs, h_grad=h, use_peephole=False).dicfo.shape
        (2, 16)
    """
    op, given = "lstm_block_cell_grad", common_arrays(x, cs_prev, h_prev, w, wci, wcf, wco, b)
    saved = {"i": i, "cs": cs, "f": f, "o": o, "ci": ci, "co": co}
    check_lstm_block_cell(op, given | saved | {"cs_grad": cs_grad, "h_grad": h_grad}, use_peephole)
    with on(stream, op):
        # The sequences of `lstm_gradients` have one step here: array[None] is [1, N, .]. gates [1, N, 4H].
        gates = joined([array[None] for array in in_order(ICFO, i, f, ci, o)])
        # Without Wx, `lstm_gradients` takes x as the input's part of the preactivations and returns the gradient of
        # the preactivations. It uses only the shape of x, so pass `gates`, which has this shape, as x.
        arrays = lstm_arguments(ICFO, given, use_peephole) | {"x": gates, "Wx": None}
        arrays |= {"gates": gates, "c": cs[None], "dh": h_grad[None], "dc": cs_grad[None]}
        d = lstm_gradients(**arrays, engine=engine)
        return LSTMBlockCellGradOutput(d["c0"], d["x"][0], *peephole_gradients(ICFO, d, given))


def block_lstm(
    seq_len_max: int | mx.array,
    x: mx.array,
    cs_prev: mx.array,
    h_prev: mx.array,
    w: mx.array,
    wci: mx.array,
    wcf: mx.array,
    wco: mx.array,
    b: mx.array,
    forget_bias: float = 1.0,
    cell_clip: float = 3.0,
    use_peephole: bool = False,
    *,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> BlockLSTMOutput:
    """Run an LSTM over a sequence, `lstm_block_cell` at every step; equals `tf.raw_ops.BlockLSTM`. Gate order ICFO.

    Differs from TensorFlow: at steps t >= seq_len_max all seven outputs are 0. TensorFlow sets only cs and h to 0 there
    and leaves the other outputs unwritten. The gradient is exact for a loss of any of the seven outputs; TensorFlow's
    gradient ignores the cotangents of i, f, o, ci and co. Both gradients pass through the clip unchanged.

    Args:
        seq_len_max (int or integer array of rank 0): the number of steps to run, 0..T, for the whole batch. x is never
            read after them. The last state is the state at step seq_len_max - 1. Inside `mx.compile` seq_len_max has to
            be an int.
        x (array): [T, N, I]: T steps, N batch items, I inputs. H is the number of units.
        cs_prev, h_prev (array): the states before the first step, [N, H].
        w (array): the weights of x and h, [I + H, 4H].
        wci, wcf, wco (array): peepholes of i, f, o, [H]. Without `use_peephole` they are not used.
        b (array): the bias, [4H].
        forget_bias (float): added to f's preactivation. Default: 1.
        cell_clip (float): bound on |cs|; no bound if it is 0, negative or NaN. Default: 3.
        use_peephole (bool): whether i, f, o read the cell state. Default: `False`.
        checkpoint_every (int or str, optional): for `mx.grad`, as in `mlx_lstm.lstm`. It saves memory for the gradient
            only: the seven outputs take memory as long as the caller holds them.

    Returns:
        BlockLSTMOutput: i, cs, f, o, ci, co, h, each [T, N, H]. T, N, H or I may be 0.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import tf
        >>> x, state, peephole = mx.ones((5, 2, 3)), mx.zeros((2, 4)), mx.zeros((4,))
        >>> w, b = mx.ones((7, 16)), mx.ones((16,))
        >>> out = tf.block_lstm(5, x, state, state, w, *[peephole] * 3, b, cell_clip=-1)
        >>> out.h.shape
        (5, 2, 4)
        >>> mx.grad(lambda w: tf.block_lstm(5, x, state, state, w, *[peephole] * 3, b).i.sum())(w).shape
        (7, 16)
    """
    op, given = "block_lstm", common_arrays(x, cs_prev, h_prev, w, wci, wcf, wco, b)
    steps = check_block_lstm(op, seq_len_max, given, use_peephole)
    options = check_attributes(op, forget_bias, cell_clip) | {"engine": engine}
    options["checkpoint_every"] = check_every(op, checkpoint_every)
    with on(stream, op):
        return run_lstm(ICFO, steps, given, use_peephole, options)


def block_lstm_grad(
    seq_len_max: int | mx.array,
    x: mx.array,
    cs_prev: mx.array,
    h_prev: mx.array,
    w: mx.array,
    wci: mx.array,
    wcf: mx.array,
    wco: mx.array,
    b: mx.array,
    i: mx.array,
    cs: mx.array,
    f: mx.array,
    o: mx.array,
    ci: mx.array,
    co: mx.array,
    h: mx.array,
    cs_grad: mx.array,
    h_grad: mx.array,
    use_peephole: bool,
    *,
    engine: Engine | None = None,
    stream: Stream = None,
) -> BlockLSTMGradOutput:
    """Return the gradient of `block_lstm`; equals `tf.raw_ops.BlockLSTMGrad`. Sizes: T steps, N batch items, H units.

    No array is read at steps t >= seq_len_max, and x_grad is 0 there. With seq_len_max = 0 all gradients are 0, also
    the gradients of the states. The gradient does not depend on cell_clip and forget_bias, so the op does not have
    these arguments.

    Differs from TensorFlow: co is computed again from cs. The gradient of w is one matrix product over all steps. With
    N = 0 it is 0; TensorFlow leaves it unwritten.

    Args:
        seq_len_max, x, cs_prev, h_prev, w, wci, wcf, wco, b: the arguments of `block_lstm`. Only the shape of b is
            used.
        i, cs, f, o, ci, co, h (array): the outputs of `block_lstm`, [T, N, H]. Only the shape of co is used.
        cs_grad, h_grad (array): the gradients of cs and h at every step, [T, N, H].
        use_peephole (bool): whether there were peepholes; if not, their gradients are 0.

    Returns:
        BlockLSTMGradOutput: x_grad, cs_prev_grad, h_prev_grad, w_grad, wci_grad, wcf_grad, wco_grad, b_grad, each in
        the shape of its argument. T, N or I may be 0.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import tf
        >>> x, state, peephole = mx.ones((5, 2, 3)), mx.zeros((2, 4)), [mx.zeros((4,))] * 3
        >>> arrays = x, state, state, mx.ones((7, 16)), *peephole, mx.ones((16,))
        >>> out = tf.block_lstm(5, *arrays)
        >>> tf.block_lstm_grad(5, *arrays, *out, cs_grad=out.cs, h_grad=out.h, use_peephole=False).w_grad.shape
        (7, 16)
    """
    given = common_arrays(x, cs_prev, h_prev, w, wci, wcf, wco, b)
    saved = {"i": i, "cs": cs, "f": f, "o": o, "ci": ci, "co": co, "h": h, "cs_grad": cs_grad, "h_grad": h_grad}
    with on(stream, "block_lstm_grad"):
        return run_lstm_gradients("block_lstm_grad", ICFO, seq_len_max, given, saved, use_peephole, engine)


def block_lstm_v2(
    seq_len_max: int | mx.array,
    x: mx.array,
    cs_prev: mx.array,
    h_prev: mx.array,
    w: mx.array,
    wci: mx.array,
    wcf: mx.array,
    wco: mx.array,
    b: mx.array,
    cell_clip: float = 0.0,
    use_peephole: bool = False,
    *,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> BlockLSTMOutput:
    """Run `block_lstm` in gate order IFCO, without forget bias and by default without clip: `tf.raw_ops.BlockLSTMV2`.

    With w = [kernel; recurrent_kernel] and b = bias this op computes Keras' LSTM.

    Differs from TensorFlow: all outputs are 0 at t >= seq_len_max, as in `block_lstm`. The gradient is exact for a loss
    of any output. TensorFlow's own gradient of this op is wrong: it uses the formula of BlockLSTM, which has another
    gate order.

    Args:
        seq_len_max (int or integer array of rank 0): the number of steps to run, 0..T, for the whole batch. Inside
            `mx.compile` it has to be an int.
        x (array): [T, N, I]: T steps, N batch items, I inputs. H is the number of units.
        cs_prev, h_prev (array): the states before the first step, [N, H].
        w (array): the weights of x and h, [I + H, 4H], in the gate order i, f, c, o.
        wci, wcf, wco (array): peepholes of i, f, o, [H]. Without `use_peephole` they are not used.
        b (array): the bias, [4H], in the gate order of w.
        cell_clip (float): bound on |cs|; no bound if it is 0, negative or NaN. Default: 0.
        use_peephole (bool): whether i, f, o read the cell state. Default: `False`.
        checkpoint_every (int or str, optional): for `mx.grad`, as in `mlx_lstm.lstm`.

    Returns:
        BlockLSTMOutput: i, cs, f, o, ci, co, h, each [T, N, H].

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import tf
        >>> x, state, peephole = mx.ones((5, 2, 3)), mx.zeros((2, 4)), [mx.zeros((4,))] * 3
        >>> arrays = x, state, state, mx.ones((7, 16)), *peephole, mx.ones((16,))
        >>> tf.block_lstm_v2(3, *arrays, use_peephole=True).cs[3:].any().item()  # nothing after three steps
        False
    """
    op, given = "block_lstm_v2", common_arrays(x, cs_prev, h_prev, w, wci, wcf, wco, b)
    steps = check_block_lstm(op, seq_len_max, given, use_peephole)
    options = check_attributes(op, 0.0, cell_clip) | {"engine": engine}  # 0.0: the V2 ops have no forget bias
    options["checkpoint_every"] = check_every(op, checkpoint_every)
    with on(stream, op):
        return run_lstm(IFCO, steps, given, use_peephole, options)


def block_lstm_grad_v2(
    seq_len_max: int | mx.array,
    x: mx.array,
    cs_prev: mx.array,
    h_prev: mx.array,
    w: mx.array,
    wci: mx.array,
    wcf: mx.array,
    wco: mx.array,
    b: mx.array,
    i: mx.array,
    cs: mx.array,
    f: mx.array,
    o: mx.array,
    ci: mx.array,
    co: mx.array,
    h: mx.array,
    cs_grad: mx.array,
    h_grad: mx.array,
    use_peephole: bool,
    *,
    engine: Engine | None = None,
    stream: Stream = None,
) -> BlockLSTMGradOutput:
    """Return the gradient of `block_lstm_v2`, in gate order IFCO; equals `tf.raw_ops.BlockLSTMGradV2`. The arguments
    are those of `block_lstm_grad`: the forward op's arguments and outputs, from seq_len_max to h; the gradients cs_grad
    and h_grad [T, N, H] of cs and h; and use_peephole, whether there were peepholes. engine: force an engine, as in
    `mlx_lstm.lstm`. stream: where to run, as for any MLX op. The result is that of `block_lstm_grad`. T, N, H: steps,
    batch items, units."""
    given = common_arrays(x, cs_prev, h_prev, w, wci, wcf, wco, b)
    saved = {"i": i, "cs": cs, "f": f, "o": o, "ci": ci, "co": co, "h": h, "cs_grad": cs_grad, "h_grad": h_grad}
    with on(stream, "block_lstm_grad_v2"):
        return run_lstm_gradients("block_lstm_grad_v2", IFCO, seq_len_max, given, saved, use_peephole, engine)


def common_arrays(*arrays: mx.array) -> Arrays:
    """Return the arrays that all LSTM ops get (x, cs_prev, ..., b, in this order) as a dict by TensorFlow's names."""
    return dict(zip(("x", "cs_prev", "h_prev", "w", *PEEPHOLES, "b"), arrays, strict=True))


def lstm_arguments(order: str, given: Arrays, use_peephole: bool) -> dict[str, Any]:
    """Convert the dict `given` of TensorFlow's arrays, with x [T, N, I], to the arguments of `mlx_lstm.lstm`. Wx and Wh
    are views of w. order: the gate order of w and b, such as "igfo". use_peephole: whether the peepholes are used. T,
    N, I: steps, batch items, inputs."""
    x, w, I = given["x"], given["w"], given["x"].shape[-1]
    # The first I rows of w belong to x, the others to h.
    arrays = {"x": x, "Wx": w[:I].T, "Wh": w[I:].T, "b": given["b"], "h0": given["h_prev"], "c0": given["cs_prev"]}
    if I == 0:
        # Without Wx, `lstm` takes x [T, N, 4H] as the input's part of the preactivations, which is 0 here.
        arrays |= {"x": mx.zeros((*x.shape[:-1], w.shape[1]), x.dtype), "Wx": None}
    if use_peephole:
        # `mlx_lstm.lstm` takes one vector for all gates. The candidate has no peephole, so its block is zeros.
        wci, wcf, wco = (given[name] for name in PEEPHOLES)
        arrays["peephole"] = mx.concatenate(in_order(order, i=wci, f=wcf, g=mx.zeros_like(wci), o=wco))
    return arrays | {"gate_order": order}


def run_lstm(order: str, steps: int, given: Arrays, use_peephole: bool, options: dict[str, Any]) -> BlockLSTMOutput:
    """Run the first `steps` steps of x [T, N, I] and return all outputs, with zeros at all later steps. order: the gate
    order of w and b. given: the arrays of the op by name. options: those of `mlx_lstm.lstm`, such as cell_clip and
    engine. T, N, I: steps, batch items, inputs."""
    x, cs_prev = given["x"], given["cs_prev"]
    T, N, H = x.shape[0], *cs_prev.shape
    if 0 in (steps, N, H):  # nothing to compute
        return BlockLSTMOutput(*[mx.zeros((T, N, H), x.dtype)] * 7)  # 7: the number of outputs
    arrays = lstm_arguments(order, given | {"x": x[:steps]}, use_peephole)
    out = lstm(**arrays, return_gates=True, **options)._asdict()
    gates = dict(zip(order, mx.split(out["gates"], 4, axis=-1), strict=True))  # {letter: gate [steps, N, H]}
    # In the order of BlockLSTMOutput: i, cs, f, o, ci, co, h.
    outputs = gates["i"], out["c"], gates["f"], gates["o"], gates["g"], tanh(out["c"]), out["h"]
    return BlockLSTMOutput(*(with_padding(array, T) for array in outputs))


def run_lstm_gradients(
    op: str, order: str, seq_len_max: object, given: Arrays, saved: Arrays, use_peephole: bool, engine: Engine | None
) -> BlockLSTMGradOutput:
    """Return the gradients of an LSTM over a sequence. order: the gate order of w and b. seq_len_max: the number of
    steps that run. given: the arrays of the forward op by name. saved: the forward op's outputs and the gradients of cs
    and h (cs_grad, h_grad), by name."""
    steps = check_block_lstm_grad(op, seq_len_max, given | saved, use_peephole)
    x, I = given["x"], given["x"].shape[-1]
    if steps == 0 or x.shape[1] == 0:
        # No step, or an empty batch: all gradients are 0. `given` has the arguments in the order of their gradients.
        return BlockLSTMGradOutput(*(mx.zeros_like(array) for array in given.values()))
    arrays = lstm_arguments(order, given | {"x": x[:steps]}, use_peephole)
    saved = {name: array[:steps] for name, array in saved.items()}
    gates = joined(in_order(order, *(saved[name] for name in ("i", "f", "ci", "o"))))  # [steps, N, 4H]
    arrays |= {"gates": gates, "c": saved["cs"], "h": saved["h"], "dh": saved["h_grad"], "dc": saved["cs_grad"]}
    d = lstm_gradients(**arrays, engine=engine)
    x_grad = with_padding(d["x"], x.shape[0]) if I else mx.zeros_like(x)
    # w [I + H, 4H] holds Wx and Wh transposed, one below the other. Without features (I = 0) there is no Wx.
    w_grad = mx.concatenate([d["Wx"], d["Wh"]] if I else [d["Wh"]], axis=1).T
    wci, wcf, wco = peephole_gradients(order, d, given)
    return BlockLSTMGradOutput(x_grad, d["c0"], d["h0"], w_grad, wci, wcf, wco, d["b"])


def peephole_gradients(order: str, gradients: Arrays, given: Arrays) -> list[mx.array]:
    """Return the gradients of the three peepholes wci, wcf and wco, each [H].

    gradients: the result of `lstm_gradients`, by name. Its entry "peephole" [4H] has one block per gate in the gate
    order `order`, such as "igfo"; the block of the candidate g is dropped, because in TensorFlow it has no peephole.
    Without this entry the op runs without peepholes, so the gradients are zeros. given: the arrays of the op by name.
    """
    if "peephole" not in gradients:
        return [mx.zeros_like(given[name]) for name in PEEPHOLES]
    blocks = dict(zip(order, mx.split(gradients["peephole"], 4), strict=True))
    return [blocks[gate] for gate in "ifo"]


def in_order(order: str, i: mx.array, f: mx.array, g: mx.array, o: mx.array) -> list[mx.array]:
    """Return the arrays of the gates i, f, g and o as a list in the gate order `order`, such as "igfo"."""
    return [{"i": i, "f": f, "g": g, "o": o}[gate] for gate in order]


def with_padding(sequence: mx.array, T: int) -> mx.array:
    """Pad a sequence [steps, N, .] with zeros at its end to [T, N, .]. N: batch items."""
    missing = T - sequence.shape[0]
    return mx.pad(sequence, [(0, missing), (0, 0), (0, 0)]) if missing else sequence
