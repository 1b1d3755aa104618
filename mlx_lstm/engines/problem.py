"""The class `Problem`, which describes a recurrence without its arrays, and the names and shapes of these arrays.

The arrays of a call with one direction have these shapes. T: time steps, B: batch items, I: input features, H: hidden
units, P: the width of h (H, or the width of the projection), G: gates. bhn: the recurrent bias of a GRU's candidate.
mask: a factor on h before the recurrent product. keep: a factor on the states before each step.

    x [T, B, I], or [T, B, G H] without Wx   Wx [G H, I]   Wh [G H, P]   b [G H]   bhn [H]   peephole [4H]   Wp [P, H]
    norm_scale [G H]   norm_shift [G H]   norm_c_scale [H]   norm_c_shift [H]
    norm_input_scale [G H]   norm_input_shift [G H], for the engine `numpy` only
    h0 [B, P]   c0 [B, H]   mask, broadcastable to [T, B, P]   keep [T, B, 1]   lengths [B] int32
    results: h [T, B, P]   c [T, B, H]   gates [T, B, G H]   hT [B, P]   cT [B, H]; a gradient has its array's shape

A user's cell with C states besides h, U inputs of each step, V parameters and K saved values per unit has c, cT, c0
with C H in place of H, gates [T, B, K H], and the arrays inputs [T, B, U H] and params [V H].

Wx, Wh and Wp may be quantized: `Wh` is then `Quantized.packed`, and `Wh_scales`, `Wh_biases` are additional entries. An
array that the caller does not pass is missing from the dict. `engines.directions` says how the two directions of a
bidirectional call share arrays.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .cells import AnyCell
from .packing import Packing

Array = mx.array
"""The type of all arrays of a call."""

CORES = 10
"""The number of GPU cores that is assumed if the real number is not known."""

HALVES = (mx.float16, mx.bfloat16)
"""The 16-bit dtypes. Sums, and engines that compute with them, use float32."""

SEQUENCES = ("h", "c", "gates")
"""The outputs that have one row per step."""

Arrays = dict[str, Array]
"""Arguments, results, cotangents or gradients of a call, by the names that the module's docstring lists."""


class Cut(NamedTuple):
    """How a Metal engine divides its work among the threads of the GPU, in place of the engine's own rules. A cut comes
    from a measurement (`tuning`), or from a trial run of kernels on a GPU without 8 x 8 matrix operations.

    rows: the number of batch items that a threadgroup computes; with 8 or more the kernel multiplies 8 x 8 matrices.
    spare: how many registers of a thread must stay free of weights, in `fused`.
    """

    rows: int
    spare: int = 0


class Chunks(NamedTuple):
    """How a sequence is divided in time.

    steps: how many steps a chunk has. recomputes: whether the backward pass recomputes each chunk; if it does, the
    forward pass saves only the state at the start of each chunk. is_long: whether the sequence has too many steps for
    one graph of the engine, so that each chunk is evaluated before the next one starts.
    """

    steps: int
    recomputes: bool
    is_long: bool


class Limits(NamedTuple):
    """The sizes above which an engine launches different kernels. The trial run of kernels before their first use
    lowers these limits, so that a small call runs the kernels of a large call.

    index: arrays with at least this many elements are indexed with 64 bits instead of 32.
    launch_steps: the largest number of steps in one launch of `fused`. A launch has fewer steps if so many are
        predicted to take more than 20 ms.
    rows_left: each launch of `stepwise` writes its step's results to a new array, and later launches join these arrays
        until at most this many are left. The last launch then reads all of them, and Metal binds up to 31 arrays.
    unchunked: the largest number of steps that are not divided into chunks, or None for the limit of the engine.
    cores: the number of GPU cores, on which the number of threadgroups depends; 0 for the number of this machine.
    """

    index: int = 2**31
    launch_steps: int = 4096
    rows_left: int = 20
    unchunked: int | None = None
    cores: int = 0


LIMITS = Limits()
"""The limits of an ordinary call."""

limits_in_effect: ContextVar[Limits] = ContextVar("limits_in_effect", default=LIMITS)
"""The limits for new calls. Only checks and tests change them, with `limited`."""


@contextmanager
def limited(**changes: Any) -> Iterator[None]:
    """Run the calls inside the context with other `Limits`. changes: the limits that change, by name. The limits are
    part of the key of every cache, so kernels for different limits are not confused."""
    # token: what ContextVar needs to restore the limits that were in effect before.
    token = limits_in_effect.set(limits_in_effect.get()._replace(**changes))
    try:
        yield
    finally:
        limits_in_effect.reset(token)


class Problem(NamedTuple):
    """The description of one recurrence without its arrays. It is hashable and contains everything that selects kernels
    and launches.

    T, B, H, P: the sizes of one direction (time steps, batch items, hidden units, the width of h).
    cell: the cell and its options.
    dtype: the dtype of the arrays.
    names: the names of the arrays that the call has.
    masks_differ: whether each step has a different mask.
    reverse: whether the only direction is the reverse one. bidirectional: whether both directions run.
    batch_first: whether x and the sequences are [B, T, .].
    training: whether the forward pass saves the arrays that the backward pass needs.
    plain: whether nobody can ask for a gradient, so that the outputs need no gradient function.
    return_gates, wants_last: whether the caller wants `gates`, and `hT`, `cT`.
    cotangents: the outputs that have a cotangent, for a gradient op; None for a forward op.
    cut: a measured choice of how the engine `fused` divides its work, or None if `fused` uses its own rules.
    chunks: how the sequence is divided in time, or None if it is not divided.
    packing: how weights are quantized, or None if no weight is quantized.
    limits: the sizes above which different kernels run.
    """

    T: int
    B: int
    H: int
    P: int
    cell: AnyCell
    dtype: mx.Dtype = mx.float32
    names: tuple[str, ...] = ()
    masks_differ: bool = False
    reverse: bool = False
    bidirectional: bool = False
    batch_first: bool = False
    training: bool = True
    plain: bool = False
    return_gates: bool = False
    wants_last: bool = True
    cotangents: tuple[str, ...] | None = None
    cut: Cut | None = None
    chunks: Chunks | None = None
    packing: Packing | None = None
    limits: Limits = LIMITS

    @property
    def directions(self) -> int:
        """The number of directions, 1 or 2. An array that holds the values of both directions side by side, such as h,
        has a last axis wider by this factor."""
        return 2 if self.bidirectional else 1

    @property
    def cores(self) -> int:
        """The number of GPU cores, on which the number of threadgroups of a launch depends."""
        return self.limits.cores or CORES

    def steps(self) -> range:
        """The time indices of one direction, in the order in which they are processed."""
        return range(self.T - 1, -1, -1) if self.reverse else range(self.T)


def masks_differ(arrays: Arrays) -> bool:
    """Return whether the call has a mask that differs from step to step."""
    mask = arrays.get("mask")
    return mask is not None and mask.ndim == 3 and mask.shape[0] > 1


def memory_of(array: Array) -> np.ndarray:
    """Return a NumPy view of the memory of an evaluated array. NumPy has no bfloat16, so the view of a bfloat16
    array has 16-bit integers."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array, copy=False)


def address_of(memory: np.ndarray) -> int:
    """Return the memory address of the first element of a NumPy array."""
    return memory.__array_interface__["data"][0]
