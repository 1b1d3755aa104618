"""Run a cell that the user wrote in plain MLX operations, by calling the user's function. In a test run of kernels
there is only the cell's graph and no function; there the graph's nodes are computed one by one."""

from collections.abc import Callable, Iterable

import mlx.core as mx

from ..cell_tracer import values_of
from ..cells import PointwiseCell
from ..problem import Array, Arrays, Problem
from ..tracing import custom_function, vjp


def blocks(array: Array | None, count: int) -> list[Array]:
    """Split an array [..., count * H] into `count` blocks [..., H]. Return an empty list if there is no array or no
    block."""
    return [] if array is None or count == 0 else list(mx.split(array, count, axis=-1))


def only_live(live: Array | None, values: Iterable[Array]) -> list[Array]:
    """Return the values [B, .] unchanged, but with derivatives that are 0 for all batch items whose entry in `live` [B,
    1] is false. None: no item has ended.

    The results of ended items are not used. MLX still multiplies the cell's derivative by their gradient, which is 0.
    If the derivative is infinite or NaN there, the product is NaN. This function replaces it by 0.
    """
    if live is None:
        return list(values)
    identity = custom_function(lambda live, *values: values)

    # Both rules call `only_live` again through `without_ended`: a derivative of higher order may be NaN as well.
    def vjp(primals: tuple[Array, ...], cotangents: tuple[Array, ...], outputs: object) -> tuple[Array, ...]:
        return (mx.zeros_like(primals[0]), *without_ended(primals[0], cotangents))

    def jvp(primals: tuple[Array, ...], tangents: tuple[Array | None, ...]) -> tuple[Array, ...]:
        pairs = zip(primals[1:], tangents[1:], strict=True)
        return without_ended(primals[0], [mx.zeros_like(array) if d is None else d for array, d in pairs])

    identity.vjp(vjp)
    identity.jvp(jvp)
    return list(identity(live, *values))


def without_ended(live: Array, derivatives: Iterable[Array]) -> tuple[Array, ...]:
    """Return the derivatives [B, .] with 0 for all batch items whose entry in `live` [B, 1] is false."""
    return tuple([mx.where(live, d, mx.array(0, d.dtype)) for d in only_live(live, derivatives)])


def pointwise_step(
    cell: PointwiseCell,
    z: Array,
    product: Array | None,
    h: Array,
    c: Array,
    inputs: Array | None,
    params: Array | None,
    live: Array | None,
) -> tuple[Array, Array, Array]:
    """Run one step. Return (saved [B, K H], c [B, C H], h [B, H]) after the step: c has the C states besides h.
    `saved`, which other engines fill with K values per unit for the backward pass, is all zeros: here MLX derives the
    gradient.

    z, product [B, G H]: the input's and the recurrent part of the G preactivations; product is None without Wh. h [B,
    H], c [B, C H]: the states before the step; c is not read if there is only h. inputs [B, U H]: the step's U inputs
    per unit. params [V H]: the V parameters per unit. live [B, 1]: false for batch items that have ended, or None.
    """
    graph = cell.graph
    x, p = blocks(z, graph.gates), blocks(product, graph.gates)
    if not graph.apart and product is not None:
        x, p = [a + b for a, b in zip(x, p, strict=True)], []
    per_unit = [mx.broadcast_to(w, h.shape) for w in blocks(params, graph.params)]
    every = [*x, *p, h, *blocks(c, graph.states - 1), *blocks(inputs, graph.inputs), *per_unit]
    given = only_live(live, every)
    if graph.function is not None:
        states = graph.function(*given)
    else:
        known = {graph.number[name]: a for name, a in zip(graph.names, given, strict=True) if name in graph.number}
        values = values_of(graph.nodes, graph.forward, known, h)
        states = [mx.broadcast_to(values[n], h.shape) for n in graph.forward]
    states = only_live(live, states)
    saved = mx.zeros((h.shape[0], cell.kept * h.shape[1]), h.dtype)
    return saved, mx.concatenate(states[1:], axis=-1) if len(states) > 1 else c, states[0]


def gradients_by_mlx(
    forward: Callable[[Problem, Arrays], Arrays], problem: Problem, arrays: Arrays, cotangents: Arrays
) -> Arrays:
    """Return the gradients of all arrays except lengths. MLX derives them from the forward pass."""
    names = [name for name in arrays if name != "lengths"]
    lengths = {name: array for name, array in arrays.items() if name == "lengths"}

    def outputs_of(*values: Array) -> list[Array]:
        outputs = forward(problem, dict(zip(names, values, strict=True)) | lengths)
        return [outputs[name] for name in cotangents]

    gradients = vjp(outputs_of, [arrays[name] for name in names], list(cotangents.values()))[1]
    return dict(zip(names, gradients, strict=True))
