"""Translate the states and biases of layer stacks (as torch and cuDNN store them) to single calls of the recurrence,
and join the arrays of two directions.

L: layers of a stack, D: directions (1 or 2), N: sequences, G: gates, H: units. A stack stores the states of all layers
in one array [L D, N, width]: layer by layer, in each layer the forward direction first. A call of the recurrence takes
the states of one layer, [N, D width], with both directions side by side. ROWS: the names of the arrays of a call that
have both directions one after the other on axis 0, such as Wx. OWN_AXIS: the names of the arrays with a first axis of
two directions, such as Wh. A mask is shared if both directions use all of it, such as a mask of width 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..engines.directions import OWN_AXIS, ROWS, is_shared, join
from ..ground.checks import check_array, fail

OUTPUTS = ("h", "c", "gates", "hT", "cT")
"""The names of the outputs of `lstm`, some of which `gru` and `rnn` have, too."""

JOINED = (*ROWS, *OWN_AXIS, "h0", "c0", "mask", "x", *OUTPUTS, *(f"d{name}" for name in OUTPUTS))
"""Names of the arguments and outputs that `join_directions` accepts: each direction has a separate array of this
name."""


def join_directions(forward: Mapping[str, mx.array | None], reverse: Mapping[str, mx.array | None]) -> dict[str, Any]:
    """Join the arrays of two layers, one per direction, into those of a call with `bidirectional=True`.

    The forward direction comes first. `Wx`, `b` and `bhn` are concatenated on axis 0; `Wh`, `Wp` and `peephole` are
    stacked on a new axis 0; all others are concatenated on their last axis.

    Args:
        forward, reverse (dict): arrays by their names as arguments or outputs of `lstm`, `gru`, `rnn` and their
            `_gradients`, the same names and shapes in both. Arrays that are `None` in both are left out. Do not
            pass arrays that both directions share: x if there is a `Wx`, and a shared mask.

    Returns:
        dict: the arrays by name, copied.

    Raises:
        ValueError: an array is missing on one side, or has another shape or dtype there, or cannot be joined.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import join_directions, lstm
        >>> one = {"Wx": mx.ones((16, 3)), "Wh": mx.ones((16, 4)), "b": mx.zeros((16,)), "h0": None}
        >>> both = join_directions(one, {name: None if array is None else -array for name, array in one.items()})
        >>> lstm(mx.ones((10, 2, 3)), **both, bidirectional=True).h.shape
        (10, 2, 8)
    """
    op = "join_directions"
    for word, way in (("forward", forward), ("reverse", reverse)):
        if not isinstance(way, Mapping):
            fail(op, f"{word} must be a dict of arrays", type(way).__name__)
    ways = [{name: array for name, array in way.items() if array is not None} for way in (forward, reverse)]
    if ways[0].keys() != ways[1].keys():
        fail(op, "forward and reverse must have the same arrays", " and ".join(str(sorted(way)) for way in ways))
    for name, array in ways[0].items():
        if name not in JOINED or (name == "x" and "Wx" in ways[0]):
            fail(op, f"arrays must be those of one direction: {', '.join(JOINED)}, x without Wx,", repr(name))
        check_array(op, f"{name} of forward", array, shape=None)
        check_array(op, f"{name} of reverse", ways[1][name], array.shape, array.dtype)
    # A mask of width 1 is shared by both directions. But if h has only one unit, each direction has such a mask.
    mask, Wh = ways[0].get("mask"), ways[0].get("Wh")
    if mask is not None and is_shared(mask) and (Wh is None or Wh.shape[-1] > 1):
        fail(op, "mask must be as wide as h, so that each direction has its own,", f"shape {list(mask.shape)}")
    return join(ways)


def by_layer(states: Any, D: int) -> Any:
    """Reshape the states [L D, N, width] of L layers, D directions and N sequences to [L, N, D width]."""
    rows, N, width = states.shape
    return states.reshape(rows // D, D, N, width).swapaxes(1, 2).reshape(rows // D, N, D * width)


def of_layers(states: Sequence[Any], D: int) -> Any:
    """Join a list of the states [N, D width] of each layer into one array [L D, N, width] for L layers with D
    directions. It is the inverse of `by_layer`. N: the number of sequences."""
    L, (N, width) = len(states), states[0].shape
    return library(states[0]).stack(states).reshape(L, N, D, width // D).swapaxes(1, 2).reshape(L * D, N, width // D)


def split_states(D: int, states: Any) -> list[Any]:
    """Split the states [L D, ..., width] of L layers with D directions into a list of the states [N, D width] of
    each layer. N is the product of the axes in between."""
    if len(states) == 1:
        return [states.reshape(-1, states.shape[-1])]
    return list(by_layer(states.reshape(states.shape[0], -1, states.shape[-1]), D))


def join_states(D: int, shape: Sequence[int], *states: Any) -> Any:
    """Join the states of all layers into one array [layers x directions, batch, width], and reshape it to `shape`.
    Each state is [batch, directions x width]; D is the number of directions. It is the inverse of `split_states`."""
    if len(states) == D == 1:
        return states[0].reshape(shape)
    return of_layers(states, D).reshape(shape)


def join_biases(bW: Any, bR: Any, *, gru: bool) -> dict[str, Any]:
    """Return the bias `b` of a call: the sum of bW, the bias of the input's product, and bR, that of the recurrent
    product, both [.., G H]. A GRU also gets `bhn`, the candidate's part of bR, which is not in the sum because the
    reset gate multiplies it. The candidate must be the last gate. G, H: gates, hidden units."""
    if not gru:
        return {"b": bW + bR}
    start = bW.shape[-1] // 3 * 2  # where the last of three gates begins
    b = library(bW).concatenate([bW[..., :start] + bR[..., :start], bW[..., start:]], axis=-1)
    return {"b": b, "bhn": bR[..., start:]}


def library(array: mx.array | np.ndarray) -> Any:
    return mx if isinstance(array, mx.array) else np
