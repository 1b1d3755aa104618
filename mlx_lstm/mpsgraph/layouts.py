"""What the MPSGraph ops have in common: layouts and their checks, activations, masks, lists of gradients.

Sizes are Apple's: T time, N batch, I input, H hidden; D is 2 with `bidirectional`, else 1; G gates of the op.
"""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from ..checks import check_array, check_flag, check_option, check_sizes, fail
from ..convert.mpsgraph import ACTIVATIONS
from ..engines.problem import Arrays

__all__ = ["ACTIVATIONS", "layouts", "size_of", "title"]

MASK_LAYOUTS = ("channels", "directions", "steps")
REQUIRED = ("source", "recurrent_weight", "source_gradient", "z_state", "cell_output_fwd", "output_fwd")
Given = dict[str, mx.array | None]
"""An op's arrays by their names here; None where the caller has none."""

LEADING_ONE = ("init_state", "init_cell", "state_gradient", "cell_gradient")
"""Arguments that may have a leading axis of 1, as PyTorch hands them to Apple's ops."""


def layouts(G: int, bidirectional: bool, projects: bool) -> dict[str, list[str]]:
    """Of each argument, its layout: on each axis T, N, I, a number, or a multiple of H."""
    D = 2 if bidirectional else 1
    own = ["2"] if bidirectional else []
    H, DH, GH, DGH = ("H" if n == 1 else f"{n}H" for n in (1, D, G, D * G))
    sequence, state = ["T", "N", DH], ["N", DH]
    found = {"source": ["T", "N", "I" if projects else DGH], "recurrent_weight": [*own, GH, H]}
    found |= {"input_weight": [DGH, "I"], "bias": [DGH], "secondary_bias": [DH], "peephole": [*own, GH]}
    found |= dict.fromkeys(LEADING_ONE, state)
    found |= dict.fromkeys(("source_gradient", "cell_output_fwd", "output_fwd"), sequence)
    return found | {"z_state": ["T", "N", DGH]}


def translated(
    op: str, arrays: Given, G: int, words: dict[str, str], descriptor: Any, mask_layout: str
) -> dict[str, Any]:
    """The recurrence's arrays and direction, once the arrays' layouts are found right; `words` are its words."""
    given = check_layouts(op, arrays, G, descriptor.bidirectional)
    check_option(op, "mask_layout", mask_layout, MASK_LAYOUTS)
    if mask_layout != MASK_LAYOUTS[0] and "mask" not in given:
        fail(op, f"mask must be given with mask_layout={mask_layout!r}", "None")
    if "mask" in given:
        given["mask"] = check_mask(op, given, descriptor.bidirectional, mask_layout)
    found = {"Wx": None} | {words[name]: array for name, array in given.items()}
    reverse = descriptor.reverse and not descriptor.bidirectional
    return found | {"reverse": reverse, "bidirectional": descriptor.bidirectional}


def check_layouts(op: str, arrays: Given, G: int, bidirectional: bool) -> dict[str, Any]:
    """The arrays that are given, their layouts found right; states without a leading 1. The mask goes unchecked."""
    given: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None or name in REQUIRED}
    expected = layouts(G, bidirectional, "input_weight" in given)
    for name in given.keys() & set(REQUIRED):
        if given[name] is None:
            wrong_layout(op, name, expected[name], {}, "None")
    for name in ("source", "recurrent_weight"):
        check_array(op, title(name), given[name], list(getattr(given[name], "shape", ())))
        if given[name].ndim != len(expected[name]):
            wrong_layout(op, name, expected[name], {}, f"shape {list(given[name].shape)}")
        check_sizes(op, title(name), given[name])
    source, H = given["source"], given["recurrent_weight"].shape[-1]
    sizes = dict(zip("TNI", source.shape, strict=True)) | {"H": H}
    for name, array in given.items():
        if name == "mask":
            continue
        shape = list(getattr(array, "shape", ()))
        check_array(op, title(name), array, shape, source.dtype)
        if name in LEADING_ONE and array.ndim == 3 and array.shape[0] == 1:
            array = given[name] = array[0]
        if list(array.shape) != [size_of(axis, sizes) for axis in expected[name]]:
            wrong_layout(op, name, expected[name], sizes, f"shape {shape}")
    return given


def size_of(axis: str, sizes: dict[str, int]) -> int:
    """The size of an axis such as "T", "2" or "4H"."""
    if axis.isdigit():
        return int(axis)
    return int(axis[:-1] or 1) * sizes["H"] if axis.endswith("H") else sizes[axis]


def wrong_layout(op: str, name: str, layout: list[str], sizes: dict[str, int], value: str) -> NoReturn:
    """Name the argument, the layout expected and, once the sizes are known, what that comes to."""
    rule = f"{title(name)} must have layout [{', '.join(layout)}]"
    fail(op, rule + (f" = {[size_of(axis, sizes) for axis in layout]}" if sizes else ""), value)


def title(name: str) -> str:
    """An argument's name here and, where it is another, Apple's: "init_state (initState)"."""
    apple = re.sub("_(.)", lambda match: match[1].upper(), name)
    return name if apple == name else f"{name} ({apple})"


def check_mask(op: str, arrays: Arrays, bidirectional: bool, mask_layout: str) -> mx.array:
    """The mask as the recurrence takes it: broadcastable to [N, D H], or with "steps" to [T, N, D H]."""
    mask, source, H = arrays["mask"], arrays["source"], arrays["recurrent_weight"].shape[-1]
    check_array(op, "mask", mask, list(getattr(mask, "shape", ())), source.dtype)
    (T, N, _), D, DH = source.shape, 2 if bidirectional else 1, "2H" if bidirectional else "H"
    expected, shape = {
        "channels": (f"broadcast to [N, {DH}]", (1, N, D * H)),
        "steps": (f"broadcast to [T, N, {DH}]", (T, N, D * H)),
        "directions": ("have three axes that broadcast to [2, N, H]", (2, N, H)),
    }[mask_layout]
    if mask_layout == "directions" and not bidirectional:
        fail(op, "mask_layout='directions' needs bidirectional", "one direction")
    try:
        fits = mask.ndim <= 3 and np.broadcast_shapes(mask.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits or (mask_layout == "directions" and mask.ndim < 3):
        short = list(shape[1:] if mask_layout == "channels" else shape)
        fail(op, f"mask must {expected} = {short}", f"shape {list(mask.shape)}")
    if mask_layout == "directions":
        return mx.concatenate(list(mx.broadcast_to(mask, (2, mask.shape[1], H))), axis=-1)
    return mask


def check_descriptor(op: str, descriptor: Any, kind: type) -> None:
    """The descriptor is of its op's kind, its flags are flags, its activations are among Apple's."""
    if not isinstance(descriptor, kind):
        fail(op, f"descriptor must be a {kind.__name__}", type(descriptor).__name__)
    for field in fields(descriptor):
        name, value = f"descriptor.{title(field.name)}", getattr(descriptor, field.name)
        if isinstance(field.default, bool):
            check_flag(op, name, value)
        else:
            check_option(op, name, value, tuple(ACTIVATIONS))


def check_leading_ones(op: str, leading_ones: object, allowed: Sequence[str]) -> None:
    """`leading_ones` is a sequence of names out of `allowed`."""
    if isinstance(leading_ones, str) or not isinstance(leading_ones, Sequence) or set(leading_ones) - set(allowed):
        fail(op, f"leading_ones must be a sequence out of {', '.join(map(repr, allowed))}", repr(leading_ones))


def gradient_list(
    gradients: Arrays, words: dict[str, str], arrays: Given, leading_ones: Sequence[str]
) -> list[mx.array]:
    """Apple's compact list: `words` has its order, and by argument the recurrence's word; what is absent is left out.

    A gradient has its argument's layout, a state's that without a leading 1; or two leading axes of 1 more.
    """
    given = {name: gradients[word] for name, word in words.items() if arrays.get(name) is not None}
    return [array[None, None] if name in leading_ones else array for name, array in given.items()]
