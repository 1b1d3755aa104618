"""List the kernel launches of a function from the graph that MLX builds. This needs no GPU and computes nothing.

MLX exports the graph as nodes. A node names its primitive and the shapes of its inputs and outputs. The node of a
Metal kernel also has the kernel's grid and source.
"""

import re
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_lstm.engines.metal import kernel as kernels

VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unflatten"}
"""Primitives that launch no kernel. One exception: a Reshape of an array that is not contiguous launches a copy."""


class Buffer(NamedTuple):
    """An array that a launch reads or writes. bytes: the memory of the array; a broadcast array takes less than its
    shape says. constant: whether the array is in Metal's constant memory, which our kernels use for a few sizes."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    constant: bool = False


class Launch(NamedTuple):
    """One launch of a kernel or of an MLX primitive. level: the length of the longest chain of dependent launches
    that ends in this launch."""

    name: str
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    level: int
    # Only for our own kernels: number of threadgroups, threads per threadgroup, and the source that MLX compiles.
    groups: tuple[int, int, int] = (1, 1, 1)
    threads: int = 0
    text: str = ""

    @property
    def ours(self) -> bool:
        """Return whether this launch runs one of our own Metal kernels."""
        return bool(self.text)

    @property
    def memory(self) -> int:
        """Return the bytes of threadgroup memory that our kernel declares."""
        declared = re.findall(r"^threadgroup (float|vec<float, 4>) \w+\[(\d+)\];$", self.text, re.M)
        return sum((4 if kind == "float" else 16) * int(count) for kind, count in declared)


class Graph(NamedTuple):
    """The launches of a function in the order of MLX's graph. nodes: the number of primitives in the graph."""

    launches: tuple[Launch, ...]
    nodes: int

    @property
    def depth(self) -> int:
        """Return the length of the longest chain of launches in which each launch waits for the one before it."""
        return max((launch.level for launch in self.launches), default=0)


def trace(function: Callable[..., list[mx.array]], arrays: list[mx.array]) -> Graph:
    """Return the launches of `function(*arrays)`. Only the shapes and dtypes of the arrays matter."""
    nodes: list[dict[str, Any]] = []
    kernels.forget()  # drop cached kernels: the tests' emulator would evaluate the inputs
    # On a Mac, Metal kernels can only be built for the GPU.
    with mx.stream(mx.gpu if mx.is_available(mx.gpu) else mx.cpu):
        mx.export_function(nodes.append, function, *arrays)
    kernels.forget()
    primitives = [node for node in nodes if node.get("type") == "primitive"]
    levels: dict[str, int] = {}
    repeated: dict[str, int] = {}  # broadcast array: number of its elements in memory
    scattered: set[str] = set()  # names of arrays that are not contiguous
    launches: list[Launch] = []
    for node in primitives:
        names = [name for name, *_ in node["inputs"]]
        level = max((levels.get(name, 0) for name in names), default=0)
        copies = node["name"] == "Reshape" and names[0] in scattered
        outputs = [name for name, *_ in node["outputs"]]
        if is_scattered(node, scattered) and not copies:
            scattered.update(outputs)
        if node["name"] == "Broadcast":
            repeated[outputs[0]] = repeated.get(names[0], prod(node["inputs"][0][1]))
        if node["name"] not in VIEWS or copies:
            level += 1
            launches += launches_of(node, level, "Copy" if copies else node["name"], repeated)
        levels.update(dict.fromkeys(outputs, level))
    return Graph(tuple(launches), len(primitives))


def launches_of(node: dict[str, Any], level: int, name: str, repeated: dict[str, int]) -> list[Launch]:
    """Return the launches of one primitive (an op in MLX's graph). The primitive `Concatenate` has one launch for each
    of its inputs, which copies it."""
    if name == "CustomKernel":
        return [launch_of_ours(node, level)]
    reads, writes = (
        [Buffer(name, shape, repeated.get(name, prod(shape)) * dtype.size) for name, shape, dtype in node[side]]
        for side in ("inputs", "outputs")
    )
    if name == "Concatenate":
        return [Launch(name, (read,), (read,), level) for read in reads]
    return [Launch(name, tuple(reads), tuple(writes), level)]


def launch_of_ours(node: dict[str, Any], level: int) -> Launch:
    """Return the launch of one of our Metal kernels. The buffers' names come from the kernel's source. If one array
    is bound to several buffers whose names differ only in a number, its bytes count once."""
    full, source, grid_x, grid_y, grid_z, threads = node["arguments"][:6]
    name = re.sub(r"^custom_kernel_|_without_.*|__.*", "", full)
    declared = re.findall(r"(constant|device) [\w<>, ]+[*&] (\w+) \[\[buffer\(\d+\)\]\]", source)
    arrays = [*node["inputs"], *node["outputs"]]
    bound = [(re.sub(r"\d+$", "", name), array) for (_, name), (array, *_) in zip(declared, arrays, strict=True)]
    buffers = [
        Buffer(name, shape, prod(shape) * dtype.size * (bound[n] not in bound[:n]), space == "constant")
        for n, ((space, name), (_, shape, dtype)) in enumerate(zip(declared, arrays, strict=True))
    ]
    count, groups = len(node["inputs"]), (grid_x // threads, grid_y, grid_z)
    return Launch(name, tuple(buffers[:count]), tuple(buffers[count:]), level, groups, threads, source)


def is_scattered(node: dict[str, Any], scattered: set[str]) -> bool:
    """Return whether the output of a view primitive is not contiguous: transposed, with gaps, or broadcast."""
    inputs: list[tuple[str, tuple[int, ...], mx.Dtype | None]] = node["inputs"] or [("", (), None)]
    name, before, _ = inputs[0]
    after = node["outputs"][0][1]
    if node["name"] == "Transpose":
        moved = [axis for axis in node["arguments"][0] if before[axis] > 1]
        return moved != sorted(moved) or name in scattered
    if node["name"] == "Broadcast":
        return prod(after) != prod(before)
    if node["name"] in ("Slice", "Split"):
        cut = [axis for axis, (b, a) in enumerate(zip(before, after, strict=True)) if a != b]
        return name in scattered or (bool(cut) and prod(before[: cut[-1]]) > 1)
    return node["name"] in VIEWS and name in scattered
