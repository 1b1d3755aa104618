"""Pack padded sequences of different lengths into one array without padding, and unpack them, as
`torch.nn.utils.rnn` does.

N: sequences, L: steps of the padded batch, P: steps of all sequences together. n: the index of a sequence, t: of a
step. counts: the number of steps of each sequence. order: the indices n of the sequences, the longest sequence first.
op: the name of the user's function; `fail(op, rule, got)` raises the ValueError "[op] rule but got ...".
"""

from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..ground.checks import check_flag, check_integer, check_lengths, check_number, fail
from ._call import Lengths


class PackedSequence(NamedTuple):
    """Sequences of different lengths without padding, as `torch.nn.utils.rnn.PackedSequence`. Make one by
    `pack_padded_sequence`.

    data: [P, ...], the P steps of all sequences: first step 0 of every sequence, the longest sequence first, then
    step 1 of every sequence that has one, and so on. batch_sizes: how many sequences have each step, a tuple of int
    where torch has a tensor. sorted_indices [N], for N sequences: which sequence of the batch comes first, second and
    so on; None: they were sorted. unsorted_indices [N]: the inverse of sorted_indices.
    """

    data: mx.array
    batch_sizes: tuple[int, ...]
    sorted_indices: mx.array | None = None
    unsorted_indices: mx.array | None = None


def pack_padded_sequence(
    input: mx.array, lengths: Lengths, batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """Pack a padded batch: leave out the steps after each sequence's end.

    Equals `torch.nn.utils.rnn.pack_padded_sequence`, with its gradient.

    Args:
        input (array): [L, N, ...], L steps of N sequences; with `batch_first` [N, L, ...].
        lengths (list or integer array): [N], the number of steps of each sequence, in 1..L.
        batch_first (bool): the order of the axes of input. Default: `False`.
        enforce_sorted (bool): whether the lengths must fall, the longest first. With `False` they may have any order.
            Default: `True`.

    Returns:
        PackedSequence: without `sorted_indices` if `enforce_sorted`.

    Raises:
        ValueError: a rule above is broken.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import pack_padded_sequence, pad_packed_sequence
        >>> packed = pack_padded_sequence(mx.array([[1., 2.], [3., 0.]]), [2, 1])  # [L, N]
        >>> packed.data, packed.batch_sizes
        (array([1, 2, 3], dtype=float32), (2, 1))
        >>> pad_packed_sequence(packed)
        (array([[1, 2],
               [3, 0]], dtype=float32), array([2, 1], dtype=int32))
    """
    op = "torch.pack_padded_sequence"
    check_flag(op, "batch_first", batch_first)
    check_flag(op, "enforce_sorted", enforce_sorted)
    if not isinstance(input, mx.array) or input.ndim < 2 or 0 in input.shape[:2]:
        shape = f"shape {list(input.shape)}" if isinstance(input, mx.array) else type(input).__name__
        fail(op, "input must be an mlx.core.array [L, N, ...] with at least one step and one sequence", shape)
    L, N = reversed(input.shape[:2]) if batch_first else input.shape[:2]
    # traced=False: the lengths must have values, because they decide the shape of the result.
    counts = np.array(check_lengths(op, lengths, N, L, traced=False, shortest=1))
    order = np.arange(N)  # the sequences, the longest first
    if not enforce_sorted:
        order = np.argsort(-counts, kind="stable")
    elif (np.diff(counts) > 0).any():  # a sequence is longer than the one before
        fail(op, "lengths must fall, the longest first, or enforce_sorted be False,", counts.tolist())
    # steps: for each t the sequences that have a step t.
    steps = [order[: int((counts > t).sum())] for t in range(int(counts.max()))]
    # places: the row of each packed step in the input after its first two axes are joined.
    places = np.concatenate([n * L + t if batch_first else t * N + n for t, n in enumerate(steps)])
    data = input.reshape(L * N, *input.shape[2:])[mx.array(places.astype(np.int32))]
    sizes = tuple(len(step) for step in steps)
    if enforce_sorted:
        return PackedSequence(data, sizes)
    # np.argsort of a permutation returns its inverse.
    return PackedSequence(data, sizes, *(mx.array(each.astype(np.int32)) for each in (order, np.argsort(order))))


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[mx.array, mx.array]:
    """Unpack sequences into a padded batch, in the order in which they were before `pack_padded_sequence`.

    Equals `torch.nn.utils.rnn.pad_packed_sequence`, with its gradient.

    Args:
        sequence (PackedSequence): the packed sequences, as `pack_padded_sequence` returns them.
        batch_first (bool): whether the result is [N, L, ...] or [L, N, ...], for N sequences of L steps. Default:
            `False`, [L, N, ...].
        padding_value (float): the value after a sequence's end. Default: 0.
        total_length (int, optional): L, at least the length of the longest sequence. Default: that length.

    Returns:
        tuple: the padded batch, and the lengths [N] as an int32 array.

    Raises:
        ValueError: a rule above is broken, or the fields of the sequence do not fit together.
    """
    op = "torch.pad_packed_sequence"
    order, counts = check_packed(op, sequence)
    check_flag(op, "batch_first", batch_first)
    value = check_number(op, "padding_value", padding_value)
    L, N = len(sequence.batch_sizes), len(order)
    if total_length is not None:
        L = check_integer(op, "total_length", total_length, least=L)
    data, P = sequence.data, len(sequence.data)
    # places [L, N]: for each step of each sequence its row in the data. Row P has the padding value: it is appended to
    # the data, and stands for all steps after a sequence's end.
    places = np.full((L, N), P)
    for t, (start, size) in enumerate(zip((0, *accumulate(sequence.batch_sizes)), sequence.batch_sizes, strict=False)):
        places[t, order[:size]] = np.arange(start, start + size)
    padding = mx.full((1, *data.shape[1:]), value, data.dtype)
    whole = mx.concatenate([data, padding])[mx.array((places.T if batch_first else places).astype(np.int32))]
    return whole, mx.array(counts.astype(np.int32))


def check_packed(op: str, sequence: Any) -> tuple[np.ndarray, np.ndarray]:
    """Check that the fields of a packed sequence fit together. Return its order (sorted_indices, or 0..N-1) and the
    lengths of the sequences before they were sorted."""
    if not isinstance(sequence, PackedSequence):
        fail(op, "sequence must be an mlx_lstm.torch.PackedSequence", type(sequence).__name__)
    data, order, sizes = sequence.data, sequence.sorted_indices, np.array(sequence.batch_sizes)
    if sizes.ndim != 1 or not sizes.size or sizes.dtype.kind not in "iu" or sizes[-1] < 1 or (np.diff(sizes) > 0).any():
        fail(op, "batch_sizes must be integers from 1 on that do not rise", sequence.batch_sizes)
    if not isinstance(data, mx.array) or not data.ndim or len(data) != sizes.sum():
        shape = f"shape {list(data.shape)}" if isinstance(data, mx.array) else type(data).__name__
        fail(op, f"data must have {sizes.sum()} steps, the sum of batch_sizes,", shape)
    N = int(sizes[0])
    indices = np.arange(N) if order is None else np.array(order)
    if not np.array_equal(np.sort(indices), np.arange(N)):
        fail(op, f"sorted_indices must hold each of 0..{N - 1} once", indices.tolist())
    # The k-th longest sequence (k from 0) has as many steps as there are batch sizes larger than k.
    counts = np.empty(N, int)
    counts[indices] = (sizes[:, None] > np.arange(N)).sum(axis=0)
    return indices, counts
