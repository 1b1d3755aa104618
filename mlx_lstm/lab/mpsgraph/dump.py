"""Read a dump, the arrays that a user saved from an app. Find out what their names and layouts mean, and make a case (a
call of an MPSGraph op) from them."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...ground.budget import Budget, shown
from ...ground.files import Foreign, foreign, read_npy, read_npz, read_safetensors
from ...mpsgraph.layouts import check_descriptor, layouts, title
from .cases import COTANGENTS, GATES, GRADIENTS, RESULTS, Arrays, CompareCase
from .ours import DESCRIPTORS, SAVED

ALWAYS = ("training", "produce_cell")
"""Properties of a descriptor that are turned on in every run of a case, because they do not change the values of
results."""


class Dump(NamedTuple):
    """Arrays that a user saved from an app, together with sizes that explain their shapes. case: the arguments of the
    op, in the layouts of the user's file. results: the saved outputs and gradients. sizes: T steps, N batch items, I
    inputs, H units, G gates, D directions, and K, which equals H and stands for the units of the previous step."""

    case: CompareCase
    results: Arrays
    sizes: dict[str, int]

    def groups(self, name: str) -> list[list[str]]:
        """Return the documented layout of an argument or result: for each axis the letters of the sizes whose product
        is the size of the axis. For example, the weight [4H, H] is [["G", "H"], ["K"]] with G = 4 gates. K equals H,
        but marks the axis that is multiplied by h[t-1], so that a transposed weight is recognised."""
        case, D, G = self.case, self.sizes["D"], GATES[self.case.op]
        # `layouts` has the arguments only. The results h and c have the layout of the argument cell_output_fwd. A
        # gradient such as dbias has the layout of its argument.
        documented = layouts(G, case.bidirectional, projects="input_weight" in case.arrays)
        argument = "cell_output_fwd" if name in ("h", "c") else name.removeprefix("d")
        groups = []
        for axis in documented[argument]:  # a text such as "8H" or "N"
            many = int(axis[:-1] or 1) if axis.endswith("H") else 0  # blocks of H: gates times directions
            # Two directions are either an axis "2", or a factor 2 in an axis such as "2H" or "8H". For an LSTM "8H" is
            # [D, G, H]: 8 blocks for 2 directions of 4 gates.
            direction = axis == "2" or (D == 2 and many in (2, 2 * G))
            gate = G > 1 and many == (2 * G if direction else G)
            unit = "K" if axis == "H" and name.endswith("recurrent_weight") else "H"
            groups.append(["D"] * direction + ["G"] * gate + ([unit] if many else [axis] if axis in "TNI" else []))
        return groups

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the documented shape of an argument or result. The size of an axis is the product of the sizes of its
        letters: an axis [G, H] of 4 gates with H units has 4 H elements."""
        return tuple(math.prod(self.sizes[letter] for letter in letters) for letters in self.groups(name))


Layout = tuple[str, Callable[[np.ndarray], np.ndarray]]
"""A pair (description, function). The description is a layout in words, "" for the documented layout. The function
converts an array from this layout to the documented one."""


def possible_layouts(dump: Dump, name: str, value: np.ndarray) -> list[Layout]:
    """Return the layouts that explain the shape of `value`, the documented one first if it fits. name: the argument or
    result that the array is."""
    groups, sizes, shape = dump.groups(name), dump.sizes, dump.shape(name)
    if value.size != math.prod(shape):
        return []
    # Try all orders of the letters, such as G, H, K. An order fits if consecutive letters can be joined so that their
    # products are the sizes of the array's axes. Axes of size 1 fit everywhere, so they are left out.
    parts = [part for group in groups for part in group if sizes[part] > 1]
    wanted, found = [size for size in value.shape if size > 1], []
    for order in permutations(range(len(parts))):
        lengths = [sizes[parts[place]] for place in order]
        places = grouped(lengths, wanted)
        if places is not None:
            inverse = np.argsort(order) if order else []
            dumped = [[parts[order[n]] for n in group] for group in places]
            # same: whether this is the documented layout: no axes are exchanged, joined or divided.
            same = list(order) == sorted(order) and wanted == [size for size in shape if size > 1]
            words = "" if same else words_of(dumped, sizes)

            # The defaults keep the values that these names have in this round of the loop.
            def to_documented(v: np.ndarray, lengths: Any = lengths, inverse: Any = inverse) -> np.ndarray:
                return v.reshape(lengths).transpose(inverse).reshape(shape)

            # others: the number of axes that the documented layout does not have, for example because two of its axes
            # are joined. Layouts with fewer such axes are likelier, so they come first.
            others = sum(group not in groups for group in dumped)
            found.append(((bool(words), others), (words, to_documented)))
    return [layout for _, layout in sorted(found, key=lambda entry: entry[0])]


def grouped(lengths: list[int], wanted: list[int]) -> list[list[int]] | None:
    """Divide the list `lengths` into consecutive groups so that the product of the n-th group is wanted[n]. Return for
    each group the list of its indices, or None if this is impossible."""
    found, n = [], 0
    for size in wanted:
        group = []
        while math.prod(lengths[k] for k in group) < size and n < len(lengths):
            group.append(n)
            n += 1
        if math.prod(lengths[k] for k in group) != size:
            return None
        found.append(group)
    return found if n == len(lengths) else None


def words_of(groups: Iterable[Iterable[str]], sizes: dict[str, int]) -> str:
    """Return the layout of an array as text, such as "[H, 4H]". groups: the letters of each axis. The letters D
    (directions) and G (gates) are printed as numbers. K, the axis that is multiplied by h[t-1], is printed as H'."""
    spelled, G = [], sizes["G"]
    for group in groups:
        text = " x ".join(str(sizes[part]) if part in "DG" else "H'" if part == "K" else part for part in group)
        spelled.append({f"{G} x H": f"{G}H", f"2 x {G} x H": f"{2 * G}H"}.get(text, text))
    return f"[{', '.join(spelled)}]"


def load_dump(file: str, op: str, descriptor: str | None) -> list[Dump]:
    """Load arrays that a user saved from an app: a folder of .npy files, an .npz or a .safetensors file. Return a
    `Dump` for each possible choice of sizes. descriptor: JSON text with the properties of the op's descriptor, or None.
    Raise ValueError if an array is unknown, missing, or has a shape that no layout explains."""
    table = names_of(op)
    arguments: Arrays = {}
    results: Arrays = {}
    for word, value in read(file).items():
        name = meaning_of(word, table, f"{op} has no array")
        place = results if name in RESULTS[op] or name.startswith("d") else arguments
        if name in place:
            raise ValueError(f"{shown(word)} is there twice: it is another word for {name}")
        place[name] = value
    check_arrays(op, arguments, results)
    return possible_dumps(CompareCase("your arrays", op, read_descriptor(op, descriptor), arguments), results)


def read(file: str) -> Arrays:
    """Return {name: array} of an .npz, a .safetensors or a folder of .npy files, where an array has its file's name."""
    path = Path(file)
    try:
        arrays: Arrays = {}
        for part in sorted(path.glob("*.npy")) if path.is_dir() else [path]:
            with foreign(part) as opened:  # limits the memory for an untrusted file
                arrays |= arrays_of(opened, alone=part is path)
    except (OSError, ValueError) as error:
        text = f"{file} must be a folder of .npy files, an .npz or a .safetensors: {shown(error, 300)}"
        raise ValueError(text) from None
    if not arrays:
        raise ValueError(f"{file} holds no arrays")
    return arrays


def arrays_of(file: Foreign, alone: bool) -> Arrays:
    """Return the arrays of an open file by their names. alone: False for a file of a folder."""
    if not alone:
        return {file.path.stem: read_npy(file)}
    if file.path.suffix != ".safetensors":
        return read_npz(file)
    arrays, _ = read_safetensors(file)
    low = [name for name, array in arrays.items() if isinstance(array, mx.array)]
    if low:
        raise ValueError(f"{shown(low[0])} must be float32 or float16 but got bfloat16")
    return arrays


def names_of(op: str) -> dict[str, str]:
    """Return our name for each name that a user may give to an argument or result of an op: {user's name: our name}."""
    names = [*GRADIENTS[op], "mask", *COTANGENTS[op], *RESULTS[op], *(f"d{name}" for name in GRADIENTS[op])]
    # SAVED has the names of results of the forward op when they are arguments of the gradient op: cellOutputFwd is c.
    others = {"output": "h", "output_fwd": "h"} | SAVED[op]
    return {name: name for name in names} | others


def without_case(word: str) -> str:
    """Return a name in lower case without underscores: recurrentWeight and recurrent_weight become equal."""
    return word.replace("_", "").lower()


def meaning_of(word: str, table: dict[str, str], problem: str) -> str:
    """Return our name for the name `word` in a user's file. table: {allowed name: our name}. For an unknown name raise
    ValueError; its text begins with `problem` and suggests the most similar names."""
    words = {without_case(other): other for other in table}
    if without_case(word) in words:
        return table[words[without_case(word)]]
    near = [words[key] for key in difflib.get_close_matches(without_case(word), words, 2, 0.5)]
    spelled = [title(other) + (f" for {table[other]}" if table[other] != other else "") for other in near or table]
    raise ValueError(f"{problem} {shown(word)!r}: {'did you mean' if near else 'there are'} {', '.join(spelled)}?")


def read_descriptor(op: str, text: str | None) -> dict[str, Any]:
    """Return the properties of a descriptor from JSON text, with names in Apple's or in Python's spelling."""
    try:
        content = Budget(len(text or "")).json(text or "{}")  # raises ValueError for deeply nested text
        if not isinstance(content, dict):
            raise ValueError(f"it is of type {type(content).__name__}")
    except ValueError as error:
        raise ValueError(f"--descriptor must be a JSON object such as '{{\"reverse\": true}}': {error}") from None
    table = {field.name: field.name for field in fields(DESCRIPTORS[op])}
    properties = {}
    for word, value in content.items():
        name = meaning_of(word, table, f"the descriptor of {op} has no property")
        properties[name] = "hard_sigmoid" if value == "hardSigmoid" else value
    check_descriptor(f"compare.{op}", DESCRIPTORS[op](**properties), DESCRIPTORS[op])
    return {name: value for name, value in properties.items() if name not in ALWAYS}  # without those in ALWAYS


def check_arrays(op: str, arguments: Arrays, results: Arrays) -> None:
    """Raise ValueError if an array that the op needs is missing, or if an array has the wrong dtype."""
    for name in ("source", "recurrent_weight"):
        if name not in arguments:
            raise ValueError(f"{title(name)} is missing: without it {op} cannot run")
    if not results:
        raise ValueError(f"there is no result of {op}: any of {', '.join(dict.fromkeys(RESULTS[op]))}, dsource, ...")
    backward = [name for name in (*results, *arguments) if name.startswith("d") or name in COTANGENTS[op]]
    if backward and "source_gradient" not in arguments:
        raise ValueError(f"{title(backward[0])} needs {title('source_gradient')}, the gradient of h that came in")
    dtype = arguments["source"].dtype
    if dtype not in (np.float32, np.float16):
        raise ValueError(f"source must be float32 or float16 but got {dtype}")
    for name, value in (arguments | results).items():
        if value.dtype != dtype:
            raise ValueError(f"{title(name)} must be {dtype}, as source is, but got {value.dtype}")


def possible_dumps(case: CompareCase, results: Arrays) -> list[Dump]:
    """Return a `Dump` for each choice of sizes (T, N, H and others) that explains the shapes of all saved arrays, first
    those with which most arrays have the documented layouts. Raise ValueError if none fits."""
    # Also try the other number of directions: the user may have forgotten the descriptor's property `bidirectional`.
    both = case.bidirectional
    dumps = [*dumps_of_sizes(case, results, both), *dumps_of_sizes(case, results, not both)]
    # The mask is left out, because Apple documents no layout of it.
    given = {name: value for name, value in case.arrays.items() if name != "mask"}
    found = [(dump, {name: possible_layouts(dump, name, given[name]) for name in given}) for dump in dumps]
    fitting = [(dump, by_name) for dump, by_name in found if all(by_name.values())]
    if not fitting:
        shapes = {title(name): list(value.shape) for name, value in given.items()}
        reason = reason_without_sizes(case)
        if found:
            dump, by_name = found[0]
            name = next(name for name in by_name if not by_name[name])
            layout = f"{words_of(dump.groups(name), dump.sizes)} = {list(dump.shape(name))}"
            reason = f"{title(name)} must have layout {layout}, but got {list(case.arrays[name].shape)}"
        raise ValueError(f"no layout of {case.op} explains these shapes: {reason}; shapes: {shapes}")
    # Sort by the number of arrays that do not have the documented layout, whose description is "". If this layout fits,
    # it is the first of an array's possible layouts.
    fitting.sort(key=lambda entry: sum(layouts[0][0] != "" for layouts in entry[1].values()))
    return [dump for dump, _ in fitting]


def reason_without_sizes(case: CompareCase) -> str:
    """Return the part of an error message that says why no sizes T, N, I, H fit the saved arrays. It names the first
    of recurrentWeight, source and inputWeight with a wrong shape."""
    arrays, G, D = case.arrays, GATES[case.op], case.directions
    rows = f"{G}H" if G > 1 else "H"
    R, source = arrays["recurrent_weight"], arrays["source"]
    H = math.isqrt(R.size // (D * G))
    if R.size != D * G * H * H:
        layout = f"[2, {rows}, H]" if D == 2 else f"[{rows}, H]"
        return f"{title('recurrent_weight')} must have layout {layout}, but got {list(R.shape)}"
    if source.ndim != 3:
        return f"{title('source')} must have three axes, [T, N, I], but got {list(source.shape)}"
    if "input_weight" in arrays:
        layout, shape = f"[{2 * G if D == 2 else rows.removesuffix('H')}H, I]", arrays["input_weight"].shape
        must = f"must have layout {layout} with {D * G * H} rows and as many columns as an axis of source has elements"
        return f"{title('input_weight')} {must}, {list(source.shape)}, but got {list(shape)}"
    return f"{title('source')} must have an axis of {D * G * H} elements, but got {list(source.shape)}"


def dumps_of_sizes(case: CompareCase, results: Arrays, both: bool) -> Iterator[Dump]:
    """Yield a `Dump` for each choice of sizes that fits the weights' numbers of elements and the axes of the source: T
    steps, N batch items, I inputs, H units (also called K), G gates, D directions. results: the saved results. both:
    whether to assume two directions."""
    G, D, arrays = GATES[case.op], 2 if both else 1, case.arrays
    H = math.isqrt(arrays["recurrent_weight"].size // (D * G))
    if arrays["recurrent_weight"].size != D * G * H * H or arrays["source"].ndim != 3:
        return
    I = arrays["input_weight"].size // (D * G * H) if "input_weight" in arrays else D * G * H
    if both != case.bidirectional:
        case = case._replace(descriptor=case.descriptor | {"bidirectional": both})
    # Try the axes of the source in all orders, the documented order [T, N, I] first. Without an input_weight the axis I
    # has D G H numbers.
    seen = []
    for axis in (2, 1, 0):
        rest = [size for n, size in enumerate(arrays["source"].shape) if n != axis]
        for T, N in (rest, rest[::-1]):
            if arrays["source"].shape[axis] == I and (T, N) not in seen:
                seen.append((T, N))
                yield Dump(case, results, {"T": T, "N": N, "I": I, "H": H, "K": H, "G": G, "D": D})
