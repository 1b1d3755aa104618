"""What is made of parameters for the CPU, and kept as long as these are the same arrays: of packed weights the matrices
that engine `numpy` multiplies with."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx

from ..ops.packed import dequantized
from ..packing import WEIGHTS, Packing, is_packed
from ..problem import Arrays, Problem
from .arrays import view


class Kept(NamedTuple):
    """What was made, how, and of which arrays: where they lay, and themselves, so that nothing else can come to lie
    there. The first of them is known by a reference that ends with it."""

    first: "ref[mx.array]"
    how: Hashable
    places: list[int]
    made_of: list[mx.array]
    made: Any


_kept: dict[int, Kept] = {}


def kept(how: Hashable, arrays: list[mx.array], make: Callable[[], Any]) -> Any:
    """What `make` makes of these arrays, itself new ones; again only where these are others, or one was written to, or
    the first was last used for something else."""
    mx.eval(arrays)
    first, places = arrays[0], [place(array) for array in arrays]
    known = _kept.get(id(first))
    if known and known.first() is first and (known.places, known.how) == (places, how):
        return known.made
    # Other arrays on the same memory: those given may be written to, or let go.
    made_of, made = [mx.stop_gradient(array) for array in arrays], make()
    mx.eval(made, made_of)
    key = id(first)
    _kept[key] = Kept(ref(first, lambda _: _kept.pop(key, None)), how, places, made_of, made)
    return made


def in_floats(problem: Problem, arrays: Arrays) -> Arrays:
    """The arrays with matrices in the dtype of x in place of packed weights."""
    packing = problem.packing
    if packing is None or not (names := [name for name in WEIGHTS if is_packed(name, arrays)]):
        return arrays
    x = {"x": arrays["x"]}
    parts = {name: [f"{name}{end}" for end in ("", "_scales", "_biases") if f"{name}{end}" in arrays] for name in names}
    made_of = {part for each in parts.values() for part in each}
    found = {name: array for name, array in arrays.items() if name not in made_of}
    for name, each in parts.items():
        given = {part: arrays[part] for part in each}
        found[name] = kept_matrix(packing, name, given, x)
    return found


def kept_matrix(packing: Packing, name: str, given: Arrays, x: Arrays) -> mx.array:
    """The matrix of one packed weight."""
    return kept((packing, x["x"].dtype), list(given.values()), lambda: dequantized(packing, given | x)[name])


def place(array: mx.array) -> int:
    """Where an array's numbers lie."""
    if array.dtype == mx.bfloat16:  # which NumPy does not know
        array = array.view(mx.uint16)
        mx.eval(array)
    return view(array).__array_interface__["data"][0]
