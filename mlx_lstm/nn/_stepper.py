"""The function `stepper`, which runs a list of layers one time step at a time. The errors of the functions of `stack`
that it calls begin with the name of `stack` (STACK), which is replaced by the name of this function (OP)."""

from collections.abc import Sequence
from typing import Any

from ..engines.at_once import computes_now
from ..engines.choice import Engine, check_engine
from ..ground.checks import fail, in_the_name_of
from ..recurrence import Stepper
from ._stack import OP as STACK
from ._stack import read_depths, read_sides

OP = "nn.stepper"  # the name of the function in error texts


def stepper(layers: Sequence[Any], batch: int | Sequence[int] = (), *, engine: Engine | None = None) -> Stepper:
    """Return a `Stepper` that runs one time step of a list of layers per call and keeps the states inside. Sizes: D
    features, H hidden units, K layers; "..." stands for the batch axes.

    It computes the same as `stack(layers, x)` for an x of one time step, with much less work per step, but has no
    gradient. Only the forward direction is supported, because the reverse direction starts at the end of the sequence.
    For a norm or a residual connection between layers, and for groups of layers, make one stepper per layer and call
    them in turn.

    Args:
        layers (list): layers of `mlx_lstm.nn` or `mlx.nn`, or objects and dicts that have such parameters, as in
            `stack`.
        batch (int or sequence of int): the sizes of the batch axes of a step's input. Default: none, the input is [D].
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: the best for the stream's device.

    Returns:
        Stepper: called as `stepper(x, keep=None)` with x [..., D] of MLX or NumPy, it returns the last layer's hidden
        state [..., H] as the same kind of array. Its `state()` is (h_n, c_n) for LSTMs, a tuple of all states for
        `Pointwise` layers with several, else h_n, each [K, ..., H].

    Raises:
        ValueError: an argument or a parameter breaks a rule, or the call is inside a transformation of MLX.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.nn import LSTM, stepper
        >>> stream = stepper([LSTM(3, 4), LSTM(4, 4)], batch=2)
        >>> for frame in mx.ones((10, 2, 3)):
        ...     hidden = stream(frame)
        >>> h_n, c_n = stream.state()
        >>> hidden.shape, h_n.shape
        ((2, 4), (2, 2, 4))
    """
    check_engine(OP, engine)
    if not isinstance(layers, (list, tuple)):
        fail(OP, "layers must be a list of layers (one layer has the method `stepper`)", type(layers).__name__)

    # Return (cell, parameters, engine) of each layer. The stepper calls this again if parameters have changed.
    def read() -> list[tuple[Any, dict[str, Any], Engine | None]]:
        with in_the_name_of(OP, STACK):
            sides = read_sides(layers, [], computes_now(engine), may_drop=True)
            if len(sides) == 2:
                rule = "layers must have one direction, because the reverse direction starts at the end of the sequence"
                fail(OP, f"{rule},", "both directions")
            # merge: how to join two directions; it has no effect for one. any_width=False: the features that a layer
            # reads must be the h of the layer before, because there is no function `between` that changes h.
            depths = read_depths(sides, groups=1, engine=engine, merge="concat", any_width=False)
        # (layer,): with groups=1 each entry is a list of one layer.
        return [(layer.cell, layer.arrays, layer.engine) for (layer,) in depths]

    return Stepper(OP, read, layers, batch=batch, is_stack=True)
