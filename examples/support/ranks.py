"""The processes of a data-parallel run, each with its share of every batch. docs/distributed.md: how to start them.

With one process everything here hands back what it was given.
"""

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten


class Lost(Exception):
    """Another process is gone, and with it the sum that all of them were to make."""


class Ranks:
    """Process `rank` of `size`. Every process makes the same calls in the same order, or all of them wait for ever."""

    def __init__(self, distributed: bool = False):
        try:
            self.group = mx.distributed.init() if distributed else None  # of size 1 where nothing launched several
        except RuntimeError as error:
            raise Lost(f"the processes have not found each other ({error})") from None
        self.rank, self.size = (self.group.rank(), self.group.size()) if self.group else (0, 1)

    def share(self, rows: int) -> slice:
        """Which of so many rows are this process' own: as equal parts as there can be, in the order of ranks."""
        return slice(rows * self.rank // self.size, rows * (self.rank + 1) // self.size)

    def join(self, means, parts, rows: int):
        """What one process would have for a batch of `rows`: (means over it, parts whose first axis is its rows).

        Trees of float32 arrays, of this process' share of the batch. All go in one message.
        """
        if self.size == 1:
            return means, parts
        own = self.share(rows)
        weight = (own.stop - own.start) / rows
        means = tree_map(lambda array: array * weight, means)
        parts = tree_map(lambda array: mx.zeros((rows, *array.shape[1:])).at[own].add(array), parts)
        arrays = tree_flatten((means, parts))
        message = mx.concatenate([array.reshape(-1) for _, array in arrays])
        pieces = mx.split(self.sum(message), np.cumsum([array.size for _, array in arrays])[:-1].tolist())
        joined = ((name, piece.reshape(array.shape)) for (name, array), piece in zip(arrays, pieces, strict=True))
        return tree_unflatten(list(joined))

    def sum(self, array: mx.array) -> mx.array:
        """The sum over all processes, the same bits in each."""
        if self.size == 1:
            return array
        mx.eval(array)  # so that an error of this process' own is not taken for the loss of another
        try:
            mx.eval(total := mx.distributed.all_sum(array, group=self.group))
        except RuntimeError as error:
            raise Lost(f"process {self.rank} of {self.size} has lost another ({error})") from None
        return total

    def first(self, data: bytes = b"") -> bytes:
        """What process 0 has; the others give nothing."""
        size = self.sum(mx.array(len(data))).item()
        own = mx.array(np.frombuffer(data, np.uint8)) if self.rank == 0 else mx.zeros(size, mx.uint8)
        return np.array(self.sum(own)).tobytes()
