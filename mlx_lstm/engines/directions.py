"""Split the arrays of a bidirectional recurrence into the parts of its two directions, and join these parts. The
layouts for D = 2 directions, the forward direction first, with G gates (a cell that the user wrote also has U inputs of
each step, V parameters, and several states side by side in c):

    side by side on the last axis   h, hT, h0 [.., D P]   c, cT, c0 [.., D H]   gates [.., D G H]   mask [.., D P or 1]
                                    keep [T, B, D]
                                    x [T, B, D G H] where it is projected already   inputs [T, B, D U H]
    one after the other, axis 0     Wx [D G H, I]   b [D G H]   bhn [D H]   params [D V H]
    on a separate first axis        Wh [D, G H, P]   Wp [D, P, H]   peephole [D, 4H]
                                    norm_scale, norm_shift, norm_input_scale, norm_input_shift [D, G H]
                                    norm_c_scale, norm_c_shift [D, H]

With one direction D is 1, and these arrays do not have the separate axis. Both directions read the same x
[T, B, I] and lengths. The scales and biases of a quantized weight are arranged like the weight.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from .packing import Quantized
from .problem import Arrays, Problem

ROWS = ("Wx", "b", "bhn", "params")
"""Arrays that hold the rows of both directions one after the other on axis 0."""

OWN_AXIS = ("Wh", "Wp", "peephole", "norm")
"""Arrays with a separate first axis for the directions, by the first part of their names."""

Array = TypeVar("Array", mx.array, np.ndarray)


def one_direction(problem: Problem, d: int) -> Problem:
    """Return the problem of one direction: d = 0 is the forward direction, d = 1 the reverse one."""
    return problem._replace(bidirectional=False, reverse=d == 1)


def by_direction(
    problem: Problem, *values: dict[str, Any], projects: bool | None = None
) -> Iterator[tuple[int, Problem, list[Any]]]:
    """Yield (d, problem, parts) for each direction d: its problem, and for each dict in `values` the dict with the
    parts of the arrays that belong to this direction. projects: as in `part`, whether the call has a Wx."""
    if not problem.bidirectional:
        yield 0, problem, list(values)
        return
    for d in range(2):
        yield d, one_direction(problem, d), [part(arrays, d, projects) for arrays in values]


def part(arrays: dict[str, Array], d: int, projects: bool | None = None) -> dict[str, Array]:
    """Return the parts of all arrays that belong to direction d, as views. The arrays are arguments, outputs or
    cotangents of one call.

    projects: whether the call has a Wx. If it has one, both directions read the same x. If not, x is the product x Wx^T
    already, and each direction reads its own half of it. None: the call has a Wx if `arrays` contains one.
    """
    if projects is None:
        projects = "Wx" in arrays
    return {name: part_of(name, array, d, projects) for name, array in arrays.items()}


def part_of(name: str, array: Array, d: int, projects: bool) -> Array:
    """Return the part of one array that belongs to direction d, as the table at the head of this module says. projects:
    whether the call has Wx, so that both directions read the same x."""
    # Both directions read these arrays as a whole. `is_shared`: the mask has one column, so it is broadcast over h.
    if name == "lengths" or (name == "x" and projects) or (name == "mask" and is_shared(array)):
        return array
    if base(name) in OWN_AXIS:  # base: "Wh" for "Wh_scales", "norm" for "norm_scale"
        return array[d, ...]
    if base(name) in ROWS:
        n = array.shape[0] // 2
        return array[d * n : (d + 1) * n]
    return half(array, d)


def half(array: Array, d: int) -> Array:
    """Return the half of the last axis that belongs to direction d."""
    n = array.shape[-1] // 2  # the width of one direction
    return array[..., d * n : (d + 1) * n]


def join(parts: list[Arrays]) -> Arrays:
    """Join the arguments, outputs or cotangents of both directions into one array per name; with a single direction
    return its arrays. The caller does not pass arrays that the directions share."""
    if len(parts) == 1:
        return parts[0]
    return {name: join_of(name, [part[name] for part in parts]) for name in parts[0]}


def join_of(name: str, parts: list[Any]) -> Any:
    """Join two arrays (or quantized weights) of the same name, one per direction, into one. parts: the array of the
    forward direction, then the array of the reverse direction."""
    # A quantized weight is an object with up to three arrays, such as Wh, Wh_scales and Wh_biases. Join each of them
    # like the weight itself.
    if isinstance(parts[0], Quantized):
        joined = join([part.arrays(name) for part in parts])
        return parts[0]._replace(**dict(zip(("packed", "scales", "biases"), joined.values(), strict=False)))
    if base(name) in OWN_AXIS:
        return mx.stack(parts)
    return mx.concatenate(parts, axis=0 if base(name) in ROWS else -1)


def base(name: str) -> str:
    """Return the first part of an array's name: "Wh" for "Wh_scales", "norm" for "norm_scale"."""
    return name.partition("_")[0]


def join_gradients(parts: list[Arrays], arrays: Arrays) -> Arrays:
    """Join the gradients of both directions into one array per name; with a single direction return its gradients. For
    an array that the directions share, return the sum of both gradients."""
    if len(parts) == 1:
        return parts[0]
    # shared: whether both directions read the whole array. Without Wx each direction has its own part of x.
    shared = {"x": "Wx" in arrays, "mask": "mask" in arrays and is_shared(arrays["mask"])}
    both = {name: [part[name] for part in parts] for name in parts[0]}
    return {name: pair[0] + pair[1] if shared.get(name) else join_of(name, pair) for name, pair in both.items()}


def is_shared(mask: mx.array | np.ndarray) -> bool:
    """Return whether both directions share the mask. They share a mask that has only one column, which is broadcast
    over the width of h."""
    return mask.ndim == 0 or mask.shape[-1] == 1


def state_before(
    problem: Problem, states: np.ndarray, first: np.ndarray, lengths: np.ndarray | None, start: int, stop: int
) -> np.ndarray:
    """Return the state [B, .] of one direction before it processes the steps from `start` to `stop` - 1. states [T, B,
    .]: the state after each step. first [B, .]: the state before all steps. lengths [B]: the number of steps of each
    batch item, or None if every item has T steps.

    The reverse direction processes `stop` - 1 first, and an item begins at its own last step, with the state `first`.
    So an item with at most `stop` steps has that state before these steps. For an item that has none of these steps the
    result is arbitrary.
    """
    last = stop if problem.reverse else start - 1  # the step that is processed just before these steps
    if not 0 <= last < problem.T:
        return first
    if not problem.reverse or lengths is None:
        return states[last]
    return np.where(lengths[:, None] > stop, states[last], first)
