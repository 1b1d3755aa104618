"""Run a step of a cell that the user wrote, by calling the user's function of MLX operations. A trial run of kernels
has only the cell's graph and no function; then the graph's nodes are computed one by one.

B: batch items, H: hidden units, G: gates. A user's cell has one or more states: h, and in c all others side by side.
The function gets the preactivations, or both of their parts: x, the input's part, and p, the recurrent part.
"""

from collections.abc import Callable, Iterable

import mlx.core as mx

from ..cell_tracer import values_of
from ..cells import PointwiseCell
from ..problem import Array, Arrays
from ..tracing import split_apart, view_of, vjp


def blocks(array: Array | None, count: int) -> list[Array]:
    """Split an array [..., count * H] into `count` blocks [..., H]. Return an empty list if there is no array or no
    block."""
    if array is None or count == 0:
        return []
    return [array] if count == 1 else split_apart(array, count, axis=-1)


def joined(parts: list[Array]) -> Array:
    """Join arrays [..., H] to one [..., count * H]."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def chosen(live: Array, one: Array, other: Array) -> Array:
    """Return `one` [B, ...], but `other` for all batch items whose entry in `live` [B] is false. The gradient of a
    number that is not chosen is 0.

    `mx.where` returns the same values, but MLX computes its gradients by multiplying the cotangent by 1 or 0. So a
    number that is not chosen would get the gradient NaN where the cotangent is infinite or NaN. The gradient of a
    gather (`take_along_axis`) has no such product. Only floats have a gradient, so other dtypes use `mx.where`.
    """
    live = live.reshape(1, -1, *[1] * (one.ndim - 1))  # [1, B, 1, ..], to broadcast to `both` below
    if not mx.issubdtype(one.dtype, mx.floating):
        return mx.where(live.squeeze(0), one, other)
    # Take row 1 of (other, one) where `live` is true, else row 0.
    both = mx.stack(list(mx.broadcast_arrays(other, one)))
    return mx.take_along_axis(both, mx.stop_gradient(live.astype(mx.uint32)), axis=0).squeeze(0)


def only_live(live: Array | None, values: Iterable[Array]) -> list[Array]:
    """Return the inputs of a cell, `values` [B, ...], unchanged, but with derivatives that are 0 for all batch items
    whose entry in `live` is false. None: no item has ended.

    The results of an item that has ended are not used, so their gradient is 0. But MLX multiplies this 0 by the cell's
    derivative, and if the derivative is infinite or NaN, the gradient of the cell's inputs becomes NaN. This function
    makes it 0.
    """
    return list(values) if live is None else [chosen(live, value, mx.stop_gradient(value)) for value in values]


def pointwise_step(
    cell: PointwiseCell,
    z: Array,
    product: Array | None,
    states: tuple[Array, Array],
    inputs: Array | None,
    params: Array | None,
    live: Array | None,
) -> tuple[Array, Array, Array]:
    """Run one step of a user's cell. Return (saved [B, K H], c [B, C H], h [B, H]) after the step, where c has the C
    states besides h. `saved` is all zeros: other engines save K values per unit in it for the backward pass, but here
    MLX derives the gradient.

    z, product [B, G H]: the input's part and the recurrent part of the G preactivations; product is None without Wh.
    states: h [B, H] and c [B, C H] before the step; c is not read if there is only h. inputs [B, U H]: the step's U
    inputs per unit. params [V H]: the V parameters per unit. live [B, 1]: false for batch items that have ended, or
    None.
    """
    graph, (h, c) = cell.graph, states
    x, p = blocks(z, graph.gates), blocks(product, graph.gates)
    if not graph.apart and product is not None:
        x, p = [a + b for a, b in zip(x, p, strict=True)], []
    # every: the arguments of the function, in order. per_unit: the parameters, broadcast to all batch items.
    per_unit = [mx.broadcast_to(w, h.shape) for w in blocks(params, graph.params)]
    every = [*x, *p, h, *blocks(c, graph.states - 1), *blocks(inputs, graph.inputs), *per_unit]
    given = only_live(live, every)  # the same values, but without derivatives where an item has ended
    # after: the new states, h first. function: the user's, called with all arrays in order; None in a trial run.
    if graph.function is not None:
        after = list(graph.function(*given))
    else:
        known = {graph.number[name]: a for name, a in zip(graph.names, given, strict=True) if name in graph.number}
        values = values_of(graph.nodes, graph.forward, known, like=h)
        after = [mx.broadcast_to(values[n], h.shape) for n in graph.forward]
    saved = mx.zeros((h.shape[0], cell.kept * h.shape[1]), h.dtype)
    return saved, joined(after[1:]) if len(after) > 1 else c, after[0]


def gradients_by_mlx(function: Callable[[Arrays], Arrays], arrays: Arrays, cotangents: Arrays) -> Arrays:
    """Return the gradients of all arrays except lengths. MLX derives them from `function`, which takes and returns
    arrays by name. cotangents: the cotangents of some of its results."""
    names = [name for name in arrays if name != "lengths"]
    lengths = {name: array for name, array in arrays.items() if name == "lengths"}

    def outputs_of(*values: Array) -> list[Array]:
        outputs = function(dict(zip(names, values, strict=True)) | lengths)
        return [outputs[name] for name in cotangents]

    # Views of the arrays: the forward pass, which runs again here, then shares no operation with the first run. MLX
    # 0.32.4 cannot compile some graphs in which equal operations of both runs read the result of an elementwise one.
    views = [view_of(arrays[name]) for name in names]
    gradients = vjp(outputs_of, views, list(cotangents.values()))[1]
    return dict(zip(names, gradients, strict=True))
