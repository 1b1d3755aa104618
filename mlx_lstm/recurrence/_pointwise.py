"""The function `pointwise`: it runs a recurrent cell that the user wrote as a Python function. The engines compute the
products with the weights; the function then computes each hidden unit from the numbers of this unit alone.

T: time steps, B: batch items, I: input features, H: hidden units, G: gates (preactivations per unit), S: states, D:
directions. The user's function is cell(a, state, *inputs, *params): a has the gates, the inputs differ from step to
step, the params do not. Tracing the function means to find its graph of operations, from which the engines generate
code. A `Call` gets the first h as its array h0, and all other first states side by side as its array c0.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import mlx.core as mx

from ..engines.cell_tracer import Counts, traced
from ..engines.cells import NormOptions, PointwiseCell
from ..engines.choice import Engine, Stream
from ..engines.problem import Array
from ..engines.tracing import split_apart
from ..ground.checks import check_array, check_flag, fail, instead_of
from ._call import Call, Hold, Lengths
from ._norm import Norm, with_norm
from ._steps import broadcasts

OP = "pointwise"
"""The function that error texts begin with."""


class OwnCell(NamedTuple):
    """A cell that the user wrote, before it is traced: the function and its options, as a layer holds them. gates,
    states, params: how many there are per unit (h is a state). apart: whether the function gets each gate as a pair,
    its part from x and its part from h. recurrent: whether h is multiplied by Wh. norm: the options of layer
    normalisation."""

    function: Callable[..., Any]
    gates: int
    states: int
    params: int
    apart: bool
    recurrent: bool
    norm: NormOptions | None = None

    op = OP

    def traced(self, B: int, H: int, dtype: mx.Dtype, inputs: int = 0) -> PointwiseCell:
        """Trace the user's function: find its graph of operations. Return the cell with this graph, for states [B, H]
        and arrays of this dtype. inputs: the number of inputs of each step. Float64 arrays are traced in float64, all
        others in float32, because engines compute 16-bit arrays in float32. Raise ValueError if the function takes
        another number of arguments. B, H: batch items, hidden units."""
        try:
            # 2: the first arguments, a and state.
            signature(self.function).bind(*[None] * (2 + inputs + self.params))
        except TypeError as error:
            each = f"a, state, {inputs} inputs of each step and {self.params} parameters"
            advice = " (layer.stepper(batch, inputs=1) passes one; nn.stack passes none: call such layers one by one)"
            advice = "" if inputs else advice
            fail(OP, f"cell must take {each}{advice}", error)
        except ValueError:  # a builtin function without a signature
            pass
        # Counts: how many gates, states, inputs and params the function gets.
        counts, wide = Counts(self.gates, self.states, inputs, self.params), dtype == mx.float64
        graph = traced(self.function, counts, self.apart, (B, H), mx.float64 if wide else mx.float32)
        return PointwiseCell(graph, self.recurrent, self.norm)


def pointwise(
    cell: Callable[..., Any],
    x: mx.array,
    Wx: mx.array | None,
    Wh: mx.array | None,
    b: mx.array | None,
    state: Sequence[mx.array],
    *,
    inputs: Sequence[mx.array] = (),
    params: Sequence[mx.array] = (),
    apart: bool = False,
    mask: mx.array | None = None,
    keep: mx.array | None = None,
    hold: Hold = None,
    lengths: Lengths = None,
    reverse: bool = False,
    bidirectional: bool = False,
    norm: Norm | None = None,
    training: bool = True,
    checkpoint_every: int | str | None = None,
    engine: Engine | None = None,
    stream: Stream = None,
) -> tuple[mx.array, tuple[mx.array, ...]]:
    r"""Run a recurrent cell of your own over a time-major sequence, in generated code, with its gradient. Sizes: T time
    steps, B batch items, I input features, H hidden units, G gates.

    .. math::

        a_t &= x_t W_x^T + (m_t \odot h_{t-1}) W_h^T + b, \quad \text{split into } G \text{ gates of width } H \\
        state_t &= cell(a_t, state_{t-1}, inputs_t, params), \quad h_t = state_t[0]

    `cell` is a function of MLX arrays which computes each number from the numbers of the same item and unit:
    arithmetic, comparisons, `mx.where` and functions such as `mx.tanh`. MLX differentiates it. It runs a few times, on
    arrays without values; engines run code generated from it. So it must not depend on anything but its arguments,
    functions and Python numbers; if one of these changes, the code is generated again. An array that it captures from
    outside is refused. The page "Your own cell" lists the operations.

    Where `cell` has no derivative, every engine gives that of MLX: NaN for `arctan2` at (0, 0), where PyTorch gives 0;
    infinity for `sqrt` and `log` at 0; 0 for `abs` at 0. Where MLX multiplies infinity by 0 for a branch that
    `maximum` or `minimum` does not take, it gives NaN, but generated code gives 0.

    With the equations of an LSTM in `cell`, it equals `lstm`. `recurrent` with a step that computes a and calls `cell`
    gives the same results. `recurrent` accepts any function, but is far slower.

    Args:
        cell (callable): `cell(a, state, *inputs, *params) -> state`. a: a tuple of G arrays [B, H], one per gate.
            state: a tuple of S arrays [B, H], of which the first is h. It returns the S new states.
        x (array): input, [T, B, I]; or, with `Wx=None`, the already projected input, [T, B, G H].
        Wx (array, optional): input weights, [G H, I].
        Wh (array, optional): recurrent weights, [G H, H]. `None`: no product of h is added to the preactivations, and
            the units are independent of each other, as in IndRNN and minGRU.
        b (array, optional): bias, [G H].
        state (sequence of array): the S first states, each [B, H].
        inputs (sequence of array): arrays broadcastable to [T, B, H], which differ by step, such as masks; bool,
            integers or floats.
        params (sequence of array): arrays [H], one number per unit, such as peephole weights; or [1] or [], one number
            for all units.
        apart (bool): pass each gate as a pair, (the part of x and b, the part of h), as a GRU needs it. Default:
            `False`, as their sum.
        mask (array, optional): m, a factor on h[t-1] as it enters the product, as in `lstm`.
        keep (array, optional): factor on all states before a step, as in `lstm`.
        hold (array or list, optional): true at steps at which an item's state is carried unchanged, as in `lstm`.
        lengths (integer array or list, optional): [B], the number of steps of each item, 0..T. After the end of an item
            its h is 0, its state is carried unchanged and its input is not read.
        reverse (bool): process t = T-1 ... 0; outputs stay aligned with the input. Default: `False`.
        bidirectional (bool): run both directions. The arrays then hold the forward direction first: Wx [2 G H, I], Wh
            [2, G H, H], b [2 G H], states [B, 2H], inputs [T, B, 2H], params [2H]. Default: `False`.
        norm (Norm, optional): layer normalisation of the preactivations before `cell` gets them, as in `lstm`; needs
            Wh; with `apart` a `Norm` of the sum is refused. Default: `None`.
        training (bool): `False` for inference: the forward pass saves nothing for a gradient. Default: `True`.
        checkpoint_every (int or str, optional): save only the states of every K-th step, as in `lstm`.
        engine (str, optional): `"fused"`, `"stepwise"` (Metal), `"numpy"` or `"ops"` to force an engine. Default: the
            best one that can run the cell.
        stream (Stream or Device, optional): where to run, as for any MLX op.

    Returns:
        tuple: h [T, B, H], and the states after the last step processed, a tuple of S arrays [B, H], all in the dtype
        of x. float16 and bfloat16 are computed in float32.

    Raises:
        ValueError: a rule on an argument is broken, or the cell is not pointwise; the text names the operation and its
            line. Or a forced engine cannot run. Nothing has been computed then.
        RuntimeError: a second or a forward-mode derivative was asked of an engine other than `"ops"`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import pointwise
        >>> def minimal_gru(a, state):
        ...     (z, n), (h,) = a, state
        ...     z = mx.sigmoid(z)
        ...     return (h + z * (mx.tanh(n) - h),)
        >>> x, Wx, Wh, b = mx.ones((10, 2, 3)), mx.ones((8, 3)), mx.ones((8, 4)), mx.zeros(8)
        >>> h, state = pointwise(minimal_gru, x, Wx, Wh, b, (mx.zeros((2, 4)),))
        >>> h.shape, len(state)
        ((10, 2, 4), 1)
        >>> mx.grad(lambda Wh: pointwise(minimal_gru, x, Wx, Wh, b, (mx.zeros((2, 4)),))[0].sum())(Wh).shape
        (8, 4)
    """
    if not callable(cell):
        fail(OP, "cell must be a function", type(cell).__name__)
    D = directions(apart, bidirectional)
    states, B, H = check_states(state, D)
    each = check_sequences_of(inputs, x, H * D)  # the inputs as arrays [T, B, D H]
    numbers = check_params(params, H * D)  # the params as arrays [D H]
    arrays: dict[str, Any] = {"x": x, "Wx": Wx, "Wh": Wh, "b": b, "h0": states[0], "mask": mask, "keep": keep}
    gates = gates_of(x, Wx, H, D)
    if apart and Wh is None:
        fail(OP, "apart must be False where Wh is None, as there is no recurrent part", "True")
    if Wh is None and mask is not None:
        fail(OP, "mask must be None where Wh is None", "an array")
    # counts: how many gates, states, inputs and params the function gets. `traced` calls the function with arrays
    # [B, H] to find its graph of operations. The graph itself does not depend on these sizes.
    counts = Counts(gates, len(states), len(each), len(numbers))
    graph = traced(cell, counts, apart, (B, H), mx.float64 if x.dtype == mx.float64 else mx.float32)
    arrays["c0"] = side_by_side(states[1:], D)
    arrays["inputs"] = side_by_side(each, D)
    arrays["params"] = side_by_side(numbers, D)
    own, arrays = with_norm(OP, PointwiseCell(graph, Wh is not None), norm, arrays)
    call = Call(own, reverse, bidirectional, lengths, engine, stream, hold=hold, checkpoint_every=checkpoint_every)
    given = {name: array for name, array in arrays.items() if array is not None}
    outputs, _ = call.forward(given, return_gates=False, training=training)  # _: the engine that ran
    # cT has all last states except h, side by side. A cell whose only state is h has no cT.
    last = (outputs["hT"], *apart_again(outputs.get("cT"), len(states) - 1, D))
    return outputs["h"], last


def directions(apart: object, bidirectional: object) -> int:
    """Check that two options are True or False: `apart` (a cell gets each gate as a pair, the part from x and the part
    from h) and `bidirectional`. Return the number of directions, 1 or 2."""
    check_flag(OP, "apart", apart)
    check_flag(OP, "bidirectional", bidirectional)
    return 2 if bidirectional else 1


def check_arrays(op: str, name: str, arrays: Any) -> list[mx.array]:
    """Check that `arrays` is a tuple or list of MLX arrays of any dtype. Return it as a list. op, name: the function's
    and the argument's name in errors."""
    if not isinstance(arrays, (tuple, list)):
        fail(op, f"{name} must be a tuple or list of arrays", type(arrays).__name__)
    for k, array in enumerate(arrays):
        if not isinstance(array, mx.array):
            fail(op, f"{name}[{k}] must be an mlx.core.array{instead_of(array)}", type(array).__name__)
    return list(arrays)


def check_states(state: Any, D: int) -> tuple[list[mx.array], int, int]:
    """Check the first states, each [B, D H]. Return (states, B, H): the states as a list, the batch size, and the
    number of hidden units. D: the number of directions."""
    states = check_arrays(OP, "state", state)
    if not states:
        fail(OP, "state must have at least one array, h,", "none")
    check_array(OP, "state[0]", states[0], ["B", "H" if D == 1 else "2H"])
    B, width = states[0].shape
    if B == 0 or width == 0 or width % D:
        fail(OP, f"state[0] must have shape [B, {'H' if D == 1 else '2H'}] with at least one number", [B, width])
    for k, array in enumerate(states):
        check_array(OP, f"state[{k}]", array, [B, width], states[0].dtype)
    return states, B, width // D


def check_sequences_of(inputs: Any, x: Any, width: int) -> list[mx.array]:
    """Check the argument `inputs`: arrays with values for each time step. Return them as a list, each in the dtype of x
    and broadcast to [T, B, width]. width: the units of all directions. T, B: steps, batch items."""
    check_array(OP, "x", x, ["T", "B", "I"])
    shape, whole = (*x.shape[:2], width), []
    for k, array in enumerate(check_arrays(OP, "inputs", inputs)):
        if array.dtype == mx.complex64:
            fail(OP, f"inputs[{k}] must be real, an integer or bool", array.dtype)
        sizes = (1,) * (3 - array.ndim) + array.shape  # with three axes, as broadcasting adds them
        if not broadcasts(sizes, shape):
            fail(OP, f"inputs[{k}] must broadcast to [T, B, H] = {list(shape)}", f"shape {list(array.shape)}")
        whole.append(mx.broadcast_to(array.astype(x.dtype), shape))
    return whole


def check_params(params: Any, width: int) -> list[mx.array]:
    """Check that each parameter has the shape [width], or [1] or [] if it is one number for all units. Return the
    parameters as a list of arrays [width]. width: the units of all directions."""
    arrays = check_arrays(OP, "params", params)
    for k, array in enumerate(arrays):
        shape = array.shape if array.shape in ((), (1,)) else [width]
        check_array(OP, f"params[{k}]", array, shape, why=", one number per unit, or [1] or [] for all units,")
    return [mx.broadcast_to(array, (width,)) for array in arrays]


def gates_of(x: mx.array, Wx: Any, H: int, D: int) -> int:
    """Check the shape of Wx or, without Wx, of x, which is then already projected. Return G, the number of gates per
    unit. Wx must have D G H rows; without Wx, x must have D G H features. D: the number of directions."""
    GH = "G H" if D == 1 else "2 G H"
    if Wx is not None:
        check_array(OP, "Wx", Wx, [GH, x.shape[-1]], x.dtype)
    rows = x.shape[-1] if Wx is None else Wx.shape[0]
    if rows == 0 or rows % (D * H):
        rule = f"x must have {GH} features, as Wx is None," if Wx is None else f"Wx must have {GH} rows"
        fail(OP, f"{rule} with H = {H} as in state[0]", rows)
    return rows // (D * H)


def side_by_side(arrays: list[Array], D: int) -> Array | None:
    """Join n arrays [..., D H] into one [..., D n H], in which the n arrays of each direction lie side by side. D: the
    number of directions. Return None if there are no arrays. H: hidden units."""
    if len(arrays) < 2:
        return arrays[0] if arrays else None
    if D == 1:
        return mx.concatenate(arrays, axis=-1)
    shape = arrays[0].shape  # [..., 2 H]
    parts = [array.reshape(*shape[:-1], 2, shape[-1] // 2) for array in arrays]
    return mx.concatenate(parts, axis=-1).reshape(*shape[:-1], len(arrays) * shape[-1])


def apart_again(joined: Array | None, n: int, D: int) -> list[Array]:
    """Return the n arrays [..., D H] that `side_by_side` joined into one. joined: that array, or None if n is 0. D: the
    number of directions. H: hidden units."""
    if joined is None or n < 2:
        return [] if joined is None else [joined]
    if D == 1:
        return split_apart(joined, n, axis=-1)
    *sizes, width = joined.shape  # width: 2 n H
    parts = mx.split(joined.reshape(*sizes, 2, width // 2), n, axis=-1)
    return [part.reshape(*sizes, width // n) for part in parts]
