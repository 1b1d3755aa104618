"""Arrays that somebody dumped from an app: their names, the layouts they may have, the case they make."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..files import parse_json, read_npy, read_npz, read_safetensors, shown
from ..mpsgraph.layouts import check_descriptor, layouts, title
from .cases import COTANGENTS, GATES, GRADIENTS, RESULTS, Arrays, Case
from .ours import DESCRIPTORS, SAVED

ALWAYS = ("training", "produce_cell")
"""Properties of a descriptor that change no value."""


class Dump(NamedTuple):
    """What was found: the case as it lies there, its results, and the sizes T, N, I, H, G, D."""

    case: Case
    results: Arrays
    sizes: dict[str, int]

    def groups(self, name: str) -> list[list[str]]:
        """The documented layout of an argument, or of a result, axis by axis in parts: [4H, H] is [[G, H], [K]]."""
        case, D = self.case, self.sizes["D"]
        expected = layouts(GATES[case.op], case.bidirectional, "input_weight" in case.arrays)
        place = {"h": "cell_output_fwd", "c": "cell_output_fwd", "z_state": "z_state"}
        found = []
        for axis in expected[place.get(name, name.removeprefix("d") if name in self.results else name)]:
            many = int(axis[:-1] or 1) if axis.endswith("H") else 0
            direction = axis == "2" or (D == 2 and many in (2, 2 * GATES[case.op]))
            gate = many // (2 if direction else 1) == GATES[case.op] > 1
            unit = "K" if axis == "H" and name.endswith("recurrent_weight") else "H"
            found.append(["D"] * direction + ["G"] * gate + ([unit] if many else [axis] if axis in "TNI" else []))
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The documented shape of an argument or result."""
        return tuple(math.prod(self.sizes[part] for part in parts) for parts in self.groups(name))


Form = tuple[str, Callable[[np.ndarray], np.ndarray]]
"""A layout in words, "" for the documented one, and the way from it to the documented one."""


def forms(dump: Dump, name: str, value: np.ndarray) -> list[Form]:
    """The layouts that an array of this shape may have, the documented one first."""
    groups, sizes, shape = dump.groups(name), dump.sizes, dump.shape(name)
    if value.size != math.prod(shape):
        return []
    parts = [part for group in groups for part in group if sizes[part] > 1]
    wanted, found = [size for size in value.shape if size > 1], []
    for order in permutations(range(len(parts))):
        lengths = [sizes[parts[place]] for place in order]
        places = grouped(lengths, wanted)
        if places is not None:
            back = np.argsort(order) if order else []
            dumped = [[parts[order[n]] for n in group] for group in places]
            same = list(order) == sorted(order) and wanted == [size for size in shape if size > 1]
            words = "" if same else words_of(dumped, sizes)
            way = lambda v, lengths=lengths, back=back: v.reshape(lengths).transpose(back).reshape(shape)  # noqa: E731
            # What only exchanges axes comes before what changes the inside of one.
            found.append((sum(group not in groups for group in dumped), (words, way)))
    return [form for _, form in sorted(found, key=lambda entry: (bool(entry[1][0]), entry[0]))]


def grouped(lengths: list[int], wanted: list[int]) -> list[list[int]] | None:
    """The places of `lengths` whose products, one after the other, are `wanted`; None if there are none."""
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
    """A layout such as "[H, 4H]": D and G as numbers; K is H, of the step before."""
    spelled = []
    for group in groups:
        text = " x ".join(str(sizes[part]) if part in "DG" else "H'" if part == "K" else part for part in group)
        spelled.append(
            {f"{sizes['G']} x H": f"{sizes['G']}H", f"2 x {sizes['G']} x H": f"{2 * sizes['G']}H"}.get(text, text)
        )
    return f"[{', '.join(spelled)}]"


def load_dump(file: str, op: str, descriptor: str | None) -> list[Dump]:
    """What a folder of .npy files, an .npz or a .safetensors file holds, for every way to understand the sizes.

    ValueError names what is unknown, missing or has a shape that no layout explains.
    """
    table = names_of(op)
    arguments: Arrays = {}
    results: Arrays = {}
    for word, value in read(file).items():
        name = known(word, table, f"{op} has no array")
        place = results if name in RESULTS[op] or name.startswith("d") else arguments
        if name in place:
            raise ValueError(f"{shown(word)} is there twice: it is another word for {name}")
        place[name] = value
    check_arrays(op, arguments, results)
    return understood(Case("your arrays", op, read_descriptor(op, descriptor), arguments), results)


def read(file: str) -> Arrays:
    """Return the arrays of a file or folder, by their names there."""
    path = Path(file)
    try:
        if path.is_dir():
            arrays = {part.stem: read_npy(part) for part in sorted(path.glob("*.npy"))}
        elif path.suffix == ".safetensors":
            loaded, _ = read_safetensors(path)
            low = [name for name, array in loaded.items() if isinstance(array, mx.array)]
            if low:
                raise ValueError(f"{shown(low[0])} must be float32 or float16 but got bfloat16")
            arrays = {name: np.array(array) for name, array in loaded.items()}
        else:
            arrays = read_npz(path)
    except (OSError, ValueError) as error:
        text = f"{file} must be a folder of .npy files, an .npz or a .safetensors: {shown(error, 300)}"
        raise ValueError(text) from None
    if not arrays:
        raise ValueError(f"{file} holds no arrays")
    return arrays


def names_of(op: str) -> dict[str, str]:
    """The dialect's name of everything an op takes or gives, by how it may be spelled."""
    names = [*GRADIENTS[op], "mask", *COTANGENTS[op], *RESULTS[op], *(f"d{name}" for name in GRADIENTS[op])]
    return {folded(name): name for name in names} | {folded(name): result for name, result in SAVED[op].items()}


def folded(word: str) -> str:
    """A name without its spelling: recurrentWeight and recurrent_weight are the same."""
    return word.replace("_", "").lower()


def known(word: str, table: dict[str, str], problem: str) -> str:
    """The name that a word stands for; ValueError with the nearest ones."""
    if folded(word) in table:
        return table[folded(word)]
    near = difflib.get_close_matches(folded(word), table, 2, 0.5)
    spelled = [title(table[key]) for key in near] or [title(name) for name in dict.fromkeys(table.values())]
    raise ValueError(f"{problem} {shown(word)!r}: {'did you mean' if near else 'there are'} {', '.join(spelled)}?")


def read_descriptor(op: str, text: str | None) -> dict[str, Any]:
    """A descriptor's properties from JSON, in Apple's spelling or Python's."""
    try:
        given = parse_json(text or "{}")
        if not isinstance(given, dict):
            raise ValueError(f"a {type(given).__name__}")
    except ValueError as error:
        raise ValueError(f"--descriptor must be a JSON object such as '{{\"reverse\": true}}': {error}") from None
    table = {folded(field.name): field.name for field in fields(DESCRIPTORS[op])}
    found = {}
    for word, value in given.items():
        name = known(word, table, f"the descriptor of {op} has no property")
        found[name] = "hard_sigmoid" if value == "hardSigmoid" else value
    check_descriptor(f"compare.{op}", DESCRIPTORS[op](**found), DESCRIPTORS[op])
    return {name: value for name, value in found.items() if name not in ALWAYS}


def check_arrays(op: str, arguments: Arrays, results: Arrays) -> None:
    """ValueError for what is missing, or has another dtype."""
    for name in ("source", "recurrent_weight"):
        if name not in arguments:
            raise ValueError(f"{title(name)} is missing: without it {op} cannot run")
    if not results:
        raise ValueError(f"there is no result of {op}: any of {', '.join(dict.fromkeys(RESULTS[op]))}, dsource, ...")
    backward = [name for name in (*results, *arguments) if name.startswith("d") or name in COTANGENTS[op]]
    if backward and "source_gradient" not in arguments:
        raise ValueError(f"{title(backward[0])} needs {title('source_gradient')}, the gradient of h that came in")
    dtype = arguments["source"].dtype
    for name, value in (arguments | results).items():
        if value.dtype not in (np.float32, np.float16) or value.dtype != dtype:
            raise ValueError(f"{title(name)} must be float32 or float16, as source is, but got {value.dtype}")


def understood(case: Case, results: Arrays) -> list[Dump]:
    """The dump with every choice of sizes that explains all arguments' shapes, most documented layouts first."""
    found = [dump for both in (case.bidirectional, not case.bidirectional) for dump in sized(case, results, both)]
    fitting = [dump for dump in found if all(forms(dump, name, value) for name, value in shaped(dump))]
    if not fitting:
        shapes = {title(name): list(value.shape) for name, value in case.arrays.items() if name != "mask"}
        reason = "the source must have three axes, [T, N, I], and recurrentWeight 4H, 3H or H rows of H"
        if found:
            name, value = next((name, value) for name, value in shaped(found[0]) if not forms(found[0], name, value))
            layout = words_of(found[0].groups(name), found[0].sizes)
            reason = (
                f"{title(name)} must have layout {layout} = {list(found[0].shape(name))}, but got {list(value.shape)}"
            )
        raise ValueError(f"no layout of {case.op} explains these shapes: {reason}; shapes: {shapes}")
    return sorted(fitting, key=lambda dump: sum(bool(forms(dump, name, value)[0][0]) for name, value in shaped(dump)))


def shaped(dump: Dump) -> list[tuple[str, np.ndarray]]:
    """The arguments whose layout is documented."""
    return [(name, value) for name, value in dump.case.arrays.items() if name != "mask"]


def sized(case: Case, results: Arrays, both: bool) -> Iterator[Dump]:
    """The sizes that the element counts of the weights and the axes of the source allow."""
    G, D, arrays = GATES[case.op], 2 if both else 1, case.arrays
    H = math.isqrt(arrays["recurrent_weight"].size // (D * G))
    if arrays["recurrent_weight"].size != D * G * H * H or arrays["source"].ndim != 3:
        return
    width = arrays["input_weight"].size // (D * G * H) if "input_weight" in arrays else D * G * H
    if both != case.bidirectional:
        case = case._replace(descriptor=case.descriptor | {"bidirectional": both})
    seen = []
    for axis in (2, 1, 0):
        rest = [size for n, size in enumerate(arrays["source"].shape) if n != axis]
        for T, N in (rest, rest[::-1]):
            if arrays["source"].shape[axis] == width and (T, N) not in seen:
                seen.append((T, N))
                yield Dump(case, results, {"T": T, "N": N, "I": width, "H": H, "K": H, "G": G, "D": D})
