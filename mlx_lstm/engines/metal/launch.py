"""How a Metal shader is built and launched. The only place that calls `metal_kernel`.

A kernel's text is the shader files it needs, made short, and a body of one call. It is built at its first launch
and kept: MLX rebuilds and hashes the text on every call, so that of a launch per time step has to be short.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..cells import Cell, GRUCell, LSTMCell, known
from .text import BLANKS, macros, shader_folder, shorten

Inputs = dict[str, "mx.array | None"]
Outputs = dict[str, "tuple[tuple[int, ...], mx.Dtype] | None"]


@cache
def shader_file(name: str) -> str:
    """A file of metal/."""
    return (shader_folder() / f"{name}.metal").read_text(encoding="ascii")


def header(names: tuple[str, ...]) -> str:
    """These files, one after the other, made short."""
    return macros() + "".join(shorten(shader_file(name)) for name in names)


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


@cache
def build(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, shaders: tuple[str, ...], threads: int
):
    """The kernel of this text; the name tells apart all texts of one shader, as MLX caches compiled code by it."""
    head, source = limited(header(shaders), source, threads)
    return mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=source, header=head
    )


def launch(
    shader: str,
    shaders: tuple[str, ...],
    inputs: Inputs,
    outputs: Outputs,
    template: dict[str, int | bool | mx.Dtype],
    body: str,
    groups: tuple[int, ...],
    threads: int,
    more_inputs: Inputs | None = None,
    more_outputs: Outputs | None = None,
) -> list[mx.array]:
    """Launch a shader on groups x threads threads.

    `body` is its call, with {arrays} for the inputs in their order and then the outputs, or each by its name in braces;
    `absent` stands for one that is `None`. What `body` itself names is among `more_inputs` and `more_outputs`.
    """
    given = {name: array for name, array in inputs.items() if array is not None} | (more_inputs or {})
    wanted = {name: output for name, output in outputs.items() if output is not None} | (more_outputs or {})
    missing = [name for name in (*inputs, *outputs) if name not in given and name not in wanted]
    arguments = {name: "absent" if name in missing else name for name in (*inputs, *outputs)}
    source = BLANKS.sub("", body.format(arrays=", ".join(arguments.values()), **arguments))
    name = "_".join([shader, "without", *missing]) if missing else shader
    kernel = build(name, tuple(given), tuple(wanted), source, shaders, threads)
    return kernel(
        inputs=list(given.values()),
        template=list(template.items()),
        grid=(groups[0] * threads, *groups[1:], 1)[:3],
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in wanted.values()],
        output_dtypes=[dtype for _, dtype in wanted.values()],
    )


def select(given: Inputs, names: str) -> Inputs:
    """The inputs of a shader, in the order of its parameters."""
    return {name: given[name] for name in names.split()}


ACTIVATIONS = {"identity": 0, "relu": 1, "tanh": 2, "sigmoid": 3, "hard_sigmoid": 4, "hard_sigmoid_sixth": 5}
"""The numbers of metal/cell.metal."""


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
