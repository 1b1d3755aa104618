"""Packed weights as engine `numpy` multiplies with them: dequantized, and kept as long as they are the same arrays."""

from typing import NamedTuple
from weakref import ref

import mlx.core as mx

from ..ops.packed import dequantized
from ..packing import WEIGHTS, Packing, is_packed
from ..problem import Arrays, Problem
from .arrays import view


class Kept(NamedTuple):
    """A dequantized matrix and what it was made of: where the arrays lay, and themselves, so that nothing else can come
    to lie there. The first of them is known by a reference that ends with it."""

    packed: "ref[mx.array]"
    packing: Packing
    places: list[int]
    made_of: list[mx.array]
    matrix: mx.array


_kept: dict[int, Kept] = {}


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
    mx.eval(list(given.values()))
    packed, places = given[name], [place(array) for array in given.values()]
    known, dtype = _kept.get(id(packed)), x["x"].dtype
    if (
        known
        and known.packed() is packed
        and (known.places, known.packing, known.matrix.dtype) == (places, packing, dtype)
    ):
        return known.matrix
    # Other arrays on the same memory: those given may be written to, or let go.
    made_of = [mx.stop_gradient(array) for array in given.values()]
    matrix = dequantized(packing, given | x)[name]
    mx.eval(matrix, made_of)
    key = id(packed)
    _kept[key] = Kept(ref(packed, lambda _: _kept.pop(key, None)), packing, places, made_of, matrix)
    return matrix


def place(array: mx.array) -> int:
    """Where an array's numbers lie."""
    if array.dtype == mx.bfloat16:  # which NumPy does not know
        array = array.view(mx.uint16)
        mx.eval(array)
    return view(array).__array_interface__["data"][0]
