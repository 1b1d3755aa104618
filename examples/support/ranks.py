"""Data-parallel training: each process computes its share of every batch. docs/distributed.md explains how to start
the processes.

With one process the methods return their arguments.
"""

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map


class Lost(Exception):
    """Another process has ended, so no sum over all processes can be made."""


class Ranks:
    """The processes of a training; this one is number `rank` of `size`. All processes must make the same calls in
    the same order, else they wait for ever."""

    def __init__(self, distributed: bool = False):
        try:
            self.group = mx.distributed.init() if distributed else None  # size 1 without mlx.launch
        except RuntimeError as error:
            raise Lost(f"the processes have not found each other ({error})") from None
        self.rank, self.size = (self.group.rank(), self.group.size()) if self.group else (0, 1)

    def share(self, rows: int) -> slice:
        """Return the slice of `rows` that this process computes; the shares of two processes differ by at most one
        row."""
        return slice(rows * self.rank // self.size, rows * (self.rank + 1) // self.size)

    def join(self, means, parts, rows: int, count: float):
        """Return means over the whole batch of `rows`, and the parts of all processes joined along the first axis.

        means, parts: trees of float32 arrays of this process' share of the batch. count: the number of terms in each
        mean of this process. It is for example the number of its rows, or of its time steps without padding. A process
        with count 0 does not change the means. One message carries all arrays.
        """
        if self.size == 1:
            return means, parts
        means = tree_map(lambda array: array * count if count else mx.zeros_like(array), means)
        own = self.share(rows)
        parts = tree_map(lambda array: mx.zeros((rows, *array.shape[1:])).at[own].add(array), parts)
        arrays = [mx.array(float(count)), *(array for _, array in tree_flatten((means, parts)))]
        message = mx.concatenate([array.reshape(-1) for array in arrays])
        pieces = mx.split(self.sum(message), np.cumsum([array.size for array in arrays])[:-1].tolist())
        total, *sums = (piece.reshape(array.shape) for array, piece in zip(arrays, pieces, strict=True))
        following = iter(sums)
        means, parts = tree_map(lambda _: next(following), (means, parts))
        return tree_map(lambda array: array / total, means), parts

    def sum(self, array: mx.array) -> mx.array:
        """Return the sum of `array` over all processes, bit for bit the same in every process."""
        if self.size == 1:
            return array
        mx.eval(array)  # an error here is from this process; an error below means that another one is lost
        try:
            mx.eval(total := mx.distributed.all_sum(array, group=self.group))
        except RuntimeError as error:
            raise Lost(f"process {self.rank} of {self.size} has lost another ({error})") from None
        return total

    def first(self, data: bytes = b"") -> bytes:
        """Send the data of process 0 to every process and return them."""
        size = self.sum(mx.array(len(data))).item()
        own = mx.array(np.frombuffer(data, np.uint8)) if self.rank == 0 else mx.zeros(size, mx.uint8)
        return np.array(self.sum(own)).tobytes()
