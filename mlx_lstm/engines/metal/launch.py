"""How a Metal shader is built and launched. The only place that calls `metal_kernel`.

A kernel's text is the shader files it needs and a body of one call. It is built at its first launch and kept. MLX
writes and hashes the whole text at every call; that takes 2 to 3 us, hardly more for 20 KB than for 50 B.
"""

from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from typing import Any, TypeVar, cast

import mlx.core as mx

from ..cells import Cell, GRUCell, LSTMCell, known
from .text import shader_folder, with_lines

Inputs = dict[str, "mx.array | None"]
Output = tuple[tuple[int, ...], mx.Dtype] | None
Outputs = dict[str, Output]
Template = dict[str, "int | bool | mx.Dtype"]
Launch = Callable[..., list[mx.array]]
"""Called with `inputs`, a list of them, it gives the outputs."""

Function = TypeVar("Function", bound=Callable[..., Any])

_kept: list[Callable[[], None]] = []


def kept(function: Function) -> Function:
    """Keeps what a function has built, until `forget`."""
    cached = lru_cache(maxsize=1024)(function)
    _kept.append(cached.cache_clear)
    return cast(Function, cached)


def forget() -> None:
    """Lets all kernels be built again: those of an emulator evaluate their inputs, MLX's do not run in one."""
    for clear in _kept:
        clear()


@cache
def shader_file(name: str) -> str:
    """A file of metal/."""
    return (shader_folder() / f"{name}.metal").read_text(encoding="ascii")


def header(shaders: tuple[str, ...]) -> str:
    """These files, one after the other."""
    return "".join(with_lines(f"{name}.metal", shader_file(name)) for name in shaders)


NEVER_REFUSED = 384
"""Threads of a threadgroup that no kernel is too large for: the published register files of Apple's GPUs hold that
many threads with the most registers a thread can have."""


def limited(header: str, source: str, threads: int) -> tuple[str, str]:
    """Header and source of a kernel that is compiled for so many threads in a threadgroup. Otherwise the compiler may
    give a thread more registers than that leaves, and MLX refuses the launch. MLX writes the attribute `kernel` itself,
    between the two."""
    if threads <= NEVER_REFUSED:
        return header, source
    limit = f"#define kernel kernel,max_total_threads_per_threadgroup({threads})\n"
    return header + limit, f"{source}\n#undef kernel"


TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t", mx.uint16: "ushort", mx.uint32: "uint"}
TYPES |= {mx.uint64: "ulong", mx.uint8: "uchar"}


@kept
def build(
    shader: str,
    names: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    template: tuple[tuple[str, int | bool | mx.Dtype], ...],
    body: str,
    shaders: tuple[str, ...],
    threads: int,
) -> Launch:
    """The kernel of this text. Its name tells apart all texts of one shader, as MLX caches compiled code by it: by
    those `names` of arrays that are absent, and by the template.

    The template's numbers are written into the text: as MLX's own arguments they would cost 0.8 us at every call.
    """
    missing = [name for name in names if name not in inputs and name not in outputs]
    words = {key: TYPES.get(value) or str(value).lower() for key, value in template}
    kinds = {key: "using" if value in TYPES else f"constexpr {type(value).__name__}" for key, value in template}
    declared = "".join(f"{kinds[key]} {key} = {word};\n" for key, word in words.items())
    name = "__".join(["_".join([shader, "without", *missing] if missing else [shader]), *words.values()])
    head, source = limited(f'{header(shaders)}#line 1 "{name}"\n', declared + body, threads)
    return mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=source, header=head
    )


def arguments(arrays: Mapping[str, object]) -> str:
    """What a body hands on: each name, or `absent` for one that is `None`."""
    return ", ".join(["absent" if array is None else name for name, array in arrays.items()])


def prepare(
    shader: str,
    shaders: tuple[str, ...],
    inputs: Mapping[str, Any],
    outputs: Outputs,
    template: Template,
    body: str,
    groups: tuple[int, ...],
    threads: int,
) -> tuple[Launch, dict[str, Any]]:
    """A launch of a shader on groups x threads threads, and its inputs: those that are not `None`. It may be called any
    number of times with `inputs`, a list of them. `body` calls the shader with the template's and the arrays' names."""
    given = {name: array for name, array in inputs.items() if array is not None}
    wanted = {name: output for name, output in outputs.items() if output is not None}
    names = *inputs, *outputs
    kernel = build(shader, names, tuple(given), tuple(wanted), tuple(template.items()), body, shaders, threads)
    call = partial(
        kernel,
        grid=(groups[0] * threads, *groups[1:], 1)[:3],
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in wanted.values()],
        output_dtypes=[dtype for _, dtype in wanted.values()],
    )
    return call, given


def launch(*launch: Any) -> list[mx.array]:
    """Launch a shader once; the arguments are those of `prepare`."""
    call, given = prepare(*launch)
    return call(inputs=list(given.values()))


Present = Mapping[str, bool | None]
"""The names of a shader's inputs, in its order; None for one that is absent."""


def present(order: tuple[str, ...], given: tuple[str, ...]) -> Present:
    """Of a shader's inputs those that are given."""
    return {name: True if name in given else None for name in order}


def select(given: Inputs, names: str) -> Inputs:
    """The inputs of a shader, in the order of its parameters."""
    return {name: given[name] for name in names.split()}


ACTIVATIONS = {"identity": 0, "relu": 1, "tanh": 2, "sigmoid": 3, "hard_sigmoid": 4, "hard_sigmoid_sixth": 5}
"""The numbers of metal/cell.metal."""


@cache
def cell_number(cell: Cell, peephole: bool = False) -> int:
    """The options of a cell as the template number CELL; metal/cell.metal has its bits."""
    if isinstance(cell, LSTMCell):
        order, gates, activations = cell.gate_order, "ifgo", cell.activations
        sees = (1 if cell.output_peephole == "current" else 2) if peephole else 0
        own = sees + ((cell.cell_clip is not None) << 2)
    elif isinstance(cell, GRUCell):
        order, gates, activations = cell.gate_order, "rzn", cell.activations
        own = (cell.reset == "before") + (cell.flip_z << 1)
    else:
        order, gates, activations, own = "h", "h", (cell.act,), 0
    number = sum(order.index(gate) << 2 * k for k, gate in enumerate(gates))
    number += sum(known("metal", ACTIVATIONS, name) << 8 + 3 * k for k, name in enumerate(activations))
    return number + (own << 23)
