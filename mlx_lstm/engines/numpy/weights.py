"""Cache of arrays derived from parameters, such as dequantized weights.

An entry is valid while the parameters are the same, unmodified arrays. It holds arrays that share the memory of the
parameters, so that MLX can neither free nor overwrite this memory. If MLX modifies a parameter, it must use new memory,
and the cache notices the new address.

The cache does not notice writes through a NumPy view of a parameter, as in `np.asarray(layer.Wh)[0] = 1`. Assign a
new array instead.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..ops.packed import matrix
from ..packing import WEIGHTS, Packing, is_packed, packed_names
from ..problem import Arrays, address_of, memory_of


class Entry(NamedTuple):
    """One cached value.

    first: a weak reference to the first parameter; when that parameter dies, the entry is removed. key: the
    addresses, shapes, strides and dtypes of the parameters. shared: arrays that share the parameters' memory. value:
    what was derived from them.
    """

    first: "ref[mx.array]"
    key: Hashable
    shared: Any
    value: Any


_cached: dict[int, Entry] = {}
"""The cache: {`id` of the first parameter: entry of the latest call with this parameter}."""


def cached(kind: Hashable, parameters: Any, derive: Callable[[Any], Any]) -> Any:
    """Return `derive(parameters)`, from the cache if `parameters` are the same unmodified arrays as in the latest
    call.

    kind: a key that distinguishes different values derived from the same parameters. parameters: nested lists and dicts
    of arrays (evaluated or lazy) and of other hashable values.
    """
    first = next(leaf for _, leaf in tree_flatten(parameters) if isinstance(leaf, mx.array))
    entry = _cached.get(id(first))
    if entry and entry.key == key_of(kind, parameters):
        return entry.value
    # shared: the parameters as new MLX arrays on the same memory. Both the key and the cached value are computed from
    # these, so they belong together even if another thread modifies a parameter meanwhile.
    shared = tree_map(lambda leaf: mx.stop_gradient(leaf) if isinstance(leaf, mx.array) else leaf, parameters)
    mx.eval(shared)
    value = derive(shared)
    mx.eval(value)
    name = id(first)
    _cached[name] = Entry(ref(first, lambda _: _cached.pop(name, None)), key_of(kind, shared), shared, value)
    return value


def key_of(kind: Hashable, parameters: Any) -> Hashable:
    """Evaluate the parameters and return a key that identifies them: the address, shape, strides and dtype of each
    array. The address alone is not enough: a transposed or broadcast view begins at the same address as its array."""
    key: list[Hashable] = [kind]
    for path, leaf in tree_flatten(parameters):
        if isinstance(leaf, mx.array):
            mx.eval(leaf)
            memory = memory_of(leaf)
            leaf = address_of(memory), memory.shape, memory.strides, leaf.dtype
        key.append((path, leaf))
    return tuple(key)


def with_float_weights(packing: Packing, arrays: Arrays) -> Arrays:
    """Return the arrays, in which a dequantized matrix takes the place of each quantized weight. The matrix is float32,
    like x: a call with quantized weights is never in float64."""
    quantized = packed_names(arrays)
    floats = {name: array for name, array in arrays.items() if name not in quantized}
    for name in WEIGHTS:
        if is_packed(name, arrays):
            # The integers, scales and biases of this weight, such as Wh, Wh_scales and Wh_biases.
            parts = {part: arrays[part] for part in quantized if part.partition("_")[0] == name}
            # name=name: the default value stores the current name, because the loop changes the variable.
            floats[name] = cached(packing, parts, lambda parts, name=name: matrix(packing, parts, name, mx.float32))
    return floats
