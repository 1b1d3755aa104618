"""Cache of arrays derived from parameters, such as dequantized weights.

An entry is valid while the parameters are the same, unmodified arrays. It holds arrays that share the parameters'
memory, so that MLX can neither free this memory nor write to it: a parameter that MLX changes lies somewhere else.
What is written through a NumPy view of a parameter, as in `np.asarray(layer.Wh)[0] = 1`, is not seen: MLX knows nothing
of it. Assign a new array instead.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..ops.packed import matrix
from ..packing import WEIGHTS, Packing, is_packed, packed_names
from ..problem import Arrays
from .arrays import view


class Entry(NamedTuple):
    """One derived value. `shared` are the parameters it was derived from, as arrays of the cache's own; `key` says
    where these lie. The first parameter is held by a weak reference, which removes the entry when it dies."""

    first: "ref[mx.array]"
    key: Hashable
    shared: Any
    value: Any


_cached: dict[int, Entry] = {}
"""By the `id` of the first parameter: one entry each, that of the latest call."""


def cached(kind: Hashable, parameters: Any, derive: Callable[[Any], Any]) -> Any:
    """Return `derive(parameters)`, from the cache if `parameters` are the same arrays as at the latest call.

    parameters: a tree of evaluated or lazy arrays, and of other hashable values. kind: distinguishes what is derived in
    different ways from the same parameters.
    """
    arrays = [leaf for _, leaf in tree_flatten(parameters) if isinstance(leaf, mx.array)]
    mx.eval(arrays)
    first = arrays[0]
    entry = _cached.get(id(first))
    if entry and entry.first() is first and entry.key == key_of(kind, parameters):
        return entry.value
    # The key is that of the shared arrays, which are also what the value is derived from: should another thread replace
    # a parameter meanwhile, key and value still belong together.
    shared = tree_map(lambda leaf: mx.stop_gradient(leaf) if isinstance(leaf, mx.array) else leaf, parameters)
    mx.eval(shared)
    value = derive(shared)
    mx.eval(value)
    name = id(first)
    _cached[name] = Entry(ref(first, lambda _: _cached.pop(name, None)), key_of(kind, shared), shared, value)
    return value


def key_of(kind: Hashable, parameters: Any) -> Hashable:
    """Return what tells evaluated parameters apart: the address, shape, strides and dtype of each array. The address
    alone does not: a transposed or broadcast view begins where its array does."""
    key: list[Hashable] = [kind]
    for path, leaf in tree_flatten(parameters):
        if isinstance(leaf, mx.array):
            memory = leaf.view(mx.uint16) if leaf.dtype == mx.bfloat16 else leaf  # NumPy has no bfloat16
            mx.eval(memory)
            memory = view(memory)
            leaf = memory.__array_interface__["data"][0], memory.shape, memory.strides, leaf.dtype
        key.append((path, leaf))
    return tuple(key)


def with_float_weights(packing: Packing, arrays: Arrays) -> Arrays:
    """Return the arrays with a matrix in the dtype of x in place of each quantized weight, its scales and biases."""
    dtype, quantized = arrays["x"].dtype, packed_names(arrays)
    floats = {name: array for name, array in arrays.items() if name not in quantized}
    for name in WEIGHTS:
        if is_packed(name, arrays):
            parts = {part: arrays[part] for part in quantized if part.partition("_")[0] == name}
            floats[name] = cached((packing, dtype), parts, lambda parts, name=name: matrix(packing, parts, name, dtype))
    return floats
