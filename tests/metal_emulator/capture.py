"""Record the source and the launch parameters that MLX generates for a kernel call, on a machine without Metal.

MLX records custom kernels while it exports a function, even on a machine that cannot run them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Captured:
    """A recorded kernel call. source: header, generated signature, body and instantiation; shape_infos: for each
    input whether the kernel reads its shape, its strides and its number of dimensions."""

    name: str
    source: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shape_infos: list[tuple[bool, bool, bool]]


def capture(call: Callable[..., list[mx.array]], arrays: list[mx.array]) -> Captured:
    """Trace `call(*arrays)`, which must launch exactly one kernel, and return the recorded call. Only the shapes and
    dtypes of the arrays matter."""
    nodes: list[dict] = []
    with mx.stream(mx.gpu if mx.is_available(mx.gpu) else mx.cpu):  # on a Mac, MLX builds kernels only for the GPU
        mx.export_function(nodes.append, call, *arrays)
    kernels = [n for n in nodes if n.get("type") == "primitive" and n.get("name") == "CustomKernel"]
    if len(kernels) != 1:
        raise ValueError(f"[metal_emulator] the traced call must launch one kernel but launched {len(kernels)}")
    state = kernels[0]["arguments"]
    return Captured(state[0], state[1], tuple(state[2:5]), tuple(state[5:8]), state[8])
