"""How the states of a stack of layers lie, one row per layer and direction."""

from __future__ import annotations

import mlx.core as mx


def by_layer(states: mx.array, D: int) -> mx.array:
    """[L, N, D .] out of the states [L D, N, .] of a stack of layers: both directions of a layer side by side."""
    rows, N, width = states.shape
    return mx.swapaxes(states.reshape(rows // D, D, N, width), 1, 2).reshape(rows // D, N, D * width)


def of_layers(states: list[mx.array], D: int) -> mx.array:
    """The way back from `by_layer`, from each layer's [N, D .]."""
    L, (N, width) = len(states), states[0].shape
    return mx.swapaxes(mx.stack(states).reshape(L, N, D, width // D), 1, 2).reshape(L * D, N, width // D)
