"""What others' layers come down to: states of one row per layer and direction, two biases."""

import mlx.core as mx

from ..engines.problem import Arrays


def by_layer(states: mx.array, D: int) -> mx.array:
    """[L, N, D .] out of the states [L D, N, .] of a stack of layers: both directions of a layer side by side."""
    rows, N, width = states.shape
    return mx.swapaxes(states.reshape(rows // D, D, N, width), 1, 2).reshape(rows // D, N, D * width)


def of_layers(states: list[mx.array], D: int) -> mx.array:
    """The way back from `by_layer`, from each layer's [N, D .]."""
    L, (N, width) = len(states), states[0].shape
    return mx.swapaxes(mx.stack(states).reshape(L, N, D, width // D), 1, 2).reshape(L * D, N, width // D)


def join_biases(bW: mx.array, bR: mx.array, *, gru: bool) -> Arrays:
    """`b` out of the biases [.., G H] of the input's and the recurrent product, of which only the sum counts; of a GRU
    `bhn` too, the candidate's part of bR, which the reset gate multiplies. Gate orders end with the candidate."""
    if not gru:
        return {"b": bW + bR}
    start = bW.shape[-1] // 3 * 2
    b = mx.concatenate([bW[..., :start] + bR[..., :start], bW[..., start:]], axis=-1)
    return {"b": b, "bhn": bR[..., start:]}
