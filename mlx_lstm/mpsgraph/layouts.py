"""Check the arguments of the MPSGraph ops and their layouts, convert masks, and make the lists of gradients.

- Sizes as Apple writes them: T time, N batch, I input, H hidden. D: 2 with `bidirectional`, else 1. G: gates of the op.
- A layout is a list with one string per axis, such as ["T", "N", "4H"]. sizes: {letter: number}, such as {"T": 10}.
- arrays: a dict by Apple's names in Python's spelling: source (x), recurrent_weight (Wh), source_gradient (dh) and so
  on. present: the arrays that are not None. words: {Apple's name: the name in `mlx_lstm.recurrence`}.
"""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from ..convert.mpsgraph import ACTIVATIONS
from ..engines.problem import Arrays
from ..ground.checks import check_array, check_flag, check_option, check_sizes, fail

__all__ = ["ACTIVATIONS", "layouts", "size_of", "title"]

MASK_LAYOUTS = ("channels", "directions", "steps")
"""The values of the option mask_layout, the default first."""

REQUIRED = ("source", "recurrent_weight", "source_gradient", "z_state", "cell_output_fwd", "output_fwd")
"""The names of arguments that must not be None in any op that has them."""

Given = dict[str, mx.array | None]
"""An op's arrays by their names in Python; None for arguments that the caller left out."""

LEADING_ONE = ("init_state", "init_cell", "state_gradient", "cell_gradient")
"""Arguments that may have a leading axis of 1, because PyTorch passes them to Apple's ops with this axis."""


def layouts(G: int, bidirectional: bool, projects: bool) -> dict[str, list[str]]:
    """Return the layout of each argument as a list with one text per axis, such as "T", "2" or "4H". G: the op's number
    of gates. projects: whether the op multiplies source by an input_weight."""
    D = 2 if bidirectional else 1
    direction_axis = ["2"] if bidirectional else []  # the first axis of arrays with one entry per direction
    # The sizes H, D H, G H and D G H as strings, such as "8H".
    H, DH, GH, DGH = ("H" if n == 1 else f"{n}H" for n in (1, D, G, D * G))
    sequence, state = ["T", "N", DH], ["N", DH]
    axes = {"source": ["T", "N", "I" if projects else DGH], "recurrent_weight": [*direction_axis, GH, H]}
    axes |= {"input_weight": [DGH, "I"], "bias": [DGH], "secondary_bias": [DH], "peephole": [*direction_axis, GH]}
    axes |= dict.fromkeys(LEADING_ONE, state)  # the states and their gradients
    axes |= dict.fromkeys(("source_gradient", "cell_output_fwd", "output_fwd"), sequence)
    return axes | {"z_state": ["T", "N", DGH]}


def translated(
    op: str, arrays: Given, G: int, words: dict[str, str], descriptor: Any, mask_layout: str
) -> dict[str, Any]:
    """Check the layouts of an op's arrays, and convert the arrays and the direction to arguments of
    `mlx_lstm.recurrence`. arrays: by Apple's names. G: the op's number of gates. words: {Apple's name: the argument's
    name}. mask_layout: what the axes of the mask are, one of `MASK_LAYOUTS`."""
    present = check_layouts(op, arrays, G, descriptor.bidirectional)
    check_option(op, "mask_layout", mask_layout, MASK_LAYOUTS)
    if mask_layout != MASK_LAYOUTS[0] and "mask" not in present:  # another value than the default needs a mask
        fail(op, f"mask must be given with mask_layout={mask_layout!r}", "None")
    if "mask" in present:
        present["mask"] = check_mask(op, present, descriptor.bidirectional, mask_layout)
    # Without input_weight, Wx is None: source is then the input's part of the preactivations.
    arguments = {"Wx": None} | {words[name]: array for name, array in present.items()}
    reverse = descriptor.reverse and not descriptor.bidirectional
    return arguments | {"reverse": reverse, "bidirectional": descriptor.bidirectional}


def check_layouts(op: str, arrays: Given, G: int, bidirectional: bool) -> dict[str, Any]:
    """Check the layout of every array but the mask. Return the arrays that are not None, with states as [N, .], without
    a leading axis of 1. arrays: by Apple's names. G: the op's number of gates. `REQUIRED` names the arrays that must
    not be None, `LEADING_ONE` the states. N: the batch size."""
    present: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None or name in REQUIRED}
    expected = layouts(G, bidirectional, "input_weight" in present)
    for name in present.keys() & set(REQUIRED):
        if present[name] is None:
            wrong_layout(op, name, expected[name], {}, "None")  # {}: the sizes are not known yet
    # The sizes T, N, I and H are read from these two arrays. title(name): its name in Python, and Apple's spelling.
    for name in ("source", "recurrent_weight"):
        check_array(op, title(name), present[name], shape=None)
        if present[name].ndim != len(expected[name]):
            wrong_layout(op, name, expected[name], {}, f"shape {list(present[name].shape)}")
        check_sizes(op, title(name), present[name])  # no axis of size 0
    source, H = present["source"], present["recurrent_weight"].shape[-1]
    sizes = dict(zip("TNI", source.shape, strict=True)) | {"H": H}
    for name, array in present.items():
        if name == "mask":  # `check_mask` checks it
            continue
        check_array(op, title(name), array, None, source.dtype)  # None: the shape is checked below
        shape = list(array.shape)
        if name in LEADING_ONE and array.ndim == 3 and array.shape[0] == 1:
            array = present[name] = array[0]
        if list(array.shape) != [size_of(axis, sizes) for axis in expected[name]]:
            wrong_layout(op, name, expected[name], sizes, f"shape {shape}")
    return present


def size_of(axis: str, sizes: dict[str, int]) -> int:
    """Return the size of an axis such as "T", "2" or "4H". sizes: the numbers for the letters T, N, I and H."""
    if axis.isdigit():
        return int(axis)
    return int(axis[:-1] or 1) * sizes["H"] if axis.endswith("H") else sizes[axis]


def wrong_layout(op: str, name: str, layout: list[str], sizes: dict[str, int], value: str) -> NoReturn:
    """Raise an error with the argument's name and layout, and the shape it must have if `sizes` are known (else {}).
    value: what the caller passed, as text."""
    rule = f"{title(name)} must have layout [{', '.join(layout)}]"
    fail(op, rule + (f" = {[size_of(axis, sizes) for axis in layout]}" if sizes else ""), value)


def title(name: str) -> str:
    """Return an argument's name in Python and, where it differs, Apple's: "init_state (initState)"."""
    apple = re.sub("_(.)", lambda match: match[1].upper(), name)
    return name if apple == name else f"{name} ({apple})"


def check_mask(op: str, arrays: Arrays, bidirectional: bool, mask_layout: str) -> mx.array:
    """Check the mask and convert it to the mask of `mlx_lstm.recurrence`, which broadcasts to [N, D H] or, with
    mask_layout "steps", to [T, N, D H]. arrays: the op's arrays by Apple's names. T, N, D, H: steps, batch, directions,
    units."""
    mask, source, H = arrays["mask"], arrays["source"], arrays["recurrent_weight"].shape[-1]
    check_array(op, "mask", mask, None, source.dtype)  # None: its shape is checked below
    (T, N, _), D, DH = source.shape, 2 if bidirectional else 1, "2H" if bidirectional else "H"
    # DH: the width of the mask as a string. expected: the rule for the error text. shape: what the mask must broadcast
    # to.
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
    if mask_layout == "directions":  # put the masks [N, H] of both directions side by side
        return mx.concatenate(list(mx.broadcast_to(mask, (2, mask.shape[1], H))), axis=-1)
    return mask


def check_descriptor(op: str, descriptor: Any, kind: type) -> None:
    """Check that the descriptor has the op's class `kind`, that its flags are bools and its activations are among
    Apple's. An error text names a property in Python's and in Apple's spelling (`title`)."""
    if not isinstance(descriptor, kind):
        fail(op, f"descriptor must be a {kind.__name__}", type(descriptor).__name__)
    for field in fields(descriptor):
        name, value = f"descriptor.{title(field.name)}", getattr(descriptor, field.name)
        if isinstance(field.default, bool):
            check_flag(op, name, value)
        else:  # `ACTIVATIONS` has Apple's names of activations
            check_option(op, name, value, tuple(ACTIVATIONS))


def check_leading_ones(op: str, leading_ones: object, allowed: Sequence[str]) -> None:
    """Check that `leading_ones` is a sequence of names out of `allowed`. It names the arguments whose gradients get two
    leading axes of size 1."""
    names = None if isinstance(leading_ones, str) or not isinstance(leading_ones, Sequence) else leading_ones
    if names is None or not all(name in allowed for name in names):
        fail(op, f"leading_ones must be a sequence out of {', '.join(map(repr, allowed))}", repr(leading_ones))


def gradient_list(
    gradients: Arrays, words: dict[str, str], arrays: Given, leading_ones: Sequence[str]
) -> list[mx.array]:
    """Return the gradients as Apple's list: in the order of `words`, without gradients of arguments that are None.

    gradients: the result of a gradient function of `mlx_lstm.recurrence`, by its names. words: {Apple's name: name in
    `gradients`}. arrays: the op's arguments by Apple's names. leading_ones: the names of the arguments whose gradients
    get two leading axes of size 1. All other gradients have the layout of their argument, but the gradient of a state
    never has a leading axis of 1.
    """
    present = {name: gradients[word] for name, word in words.items() if arrays.get(name) is not None}
    return [array[None, None] if name in leading_ones else array for name, array in present.items()]
