"""Build the kernels of the Metal engines: their source, arrays and launches. No other module calls `metal_kernel`.

A shader is a function template in a file of the folder metal/. The source of a kernel has two parts. The header
contains the shader definitions that the kernel needs. The body contains the template arguments as constants, the struct
of the arrays, and one call of a shader. A launch is a kernel with its grid of threads and the shapes of its outputs; it
is called with a list of arrays. A kernel is built at its first launch and cached. At every call MLX writes and hashes
the whole source. This takes 2 to 3 us, and hardly more for 20 KB than for 50 B.

A shader can use more arrays than a call has. `inputs` and `outputs` list all arrays of the shader; `present` or `given`
are the names of the arrays that the call has. In place of a missing array the source has the value `absent`
(metal/arrays.metal). A threadgroup is a group of threads that share memory and can wait for each other.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar, cast, overload

import mlx.core as mx

from ...ground.machine import shader_folder
from ..cells import AnyCell, GRUCell, known
from ..packing import is_packed
from ..problem import Arrays, Problem

Inputs = dict[str, "mx.array | None"]
"""The inputs of kernels by name. None, or a missing name, means that the call does not have this array."""

Outputs = dict[str, tuple[tuple[int, ...], mx.Dtype] | None]
"""The shape and dtype of each output of a shader, or None if the shader shall not write this output."""

Template = dict[str, int | bool | mx.Dtype]
"""The template arguments of a shader by name: numbers and types."""

Launch = Callable[..., list[mx.array]]
"""Type of a launch: called with `inputs`, a list of arrays, it returns the list of outputs."""

# --- Caches ---

Function = TypeVar("Function", bound=Callable[..., Any])

_clear_caches: list[Callable[[], None]] = []
"""For each function decorated with `cached`, the function that clears its cache."""


def cached(function: Function) -> Function:
    """Decorate a function that builds something, such as a kernel: cache its results until `forget` is called."""
    with_cache = lru_cache(maxsize=1024)(function)
    _clear_caches.append(with_cache.cache_clear)
    return cast(Function, with_cache)


def forget() -> None:
    """Clear the caches of kernels, so that all kernels are built again. The tests need this when they switch between
    MLX and their emulator of a GPU, because a kernel built for MLX does not run in the emulator, and vice versa."""
    for clear in _clear_caches:
        clear()


# --- Arrays as kernels read them ---


@lru_cache(1024)
def constant(numbers: tuple[float, ...], dtype: mx.Dtype) -> mx.array:
    """Return an array with these few numbers. The array is cached, so that it is made only once per process."""
    return mx.array(numbers, dtype)


@overload
def contiguous(array: mx.array) -> mx.array: ...
@overload
def contiguous(array: None) -> None: ...
def contiguous(array: mx.array | None) -> mx.array | None:
    """Return the array in row-major order in memory. Each launch would copy an array in another order again. Here it is
    copied only once."""
    if array is None:
        return None
    # `reshape(-1)` copies an array that is not in row-major order. `mx.contiguous` does the same, but MLX cannot export
    # it. So it is used only for arrays with too many elements for one axis of MLX.
    return mx.contiguous(array) if array.size >= 2**31 else array.reshape(-1).reshape(array.shape)


def whole_mask(problem: Problem, arrays: Arrays) -> mx.array | None:
    """Return the factor on h in the recurrent product: the option `mask` times the option `keep` (factors on the states
    before each step, [T, B, D]). Its shape is [T, B, D P], or [1, B, D P] if all steps share it; P is the width of h.
    Return None if the call has neither option."""
    mask, keep = arrays.get("mask"), arrays.get("keep")
    if keep is not None:
        keep = mx.repeat(keep, problem.P, axis=-1)
        mask = keep if mask is None else keep * mask
    if mask is None:
        return None
    steps = mask.shape[0] if mask.ndim == 3 else 1
    return contiguous(mx.broadcast_to(mask, (steps, problem.B, problem.directions * problem.P)))


# --- The source of kernels ---


@cache
def shader_file(name: str) -> str:
    """Return the contents of a file in the folder metal/."""
    return (shader_folder() / f"{name}.metal").read_text(encoding="ascii")


class Definition(NamedTuple):
    """A top-level definition in a shader file, such as a function or a struct. file, line: the file, and the number of
    the definition's first line in the file. text: its code without comments and indentation. names: the names that it
    defines. words: all identifiers in its code; from them `header` finds the definitions that it uses."""

    file: str
    line: int
    text: str
    names: frozenset[str]
    words: frozenset[str]


DEFINED = re.compile(r"(?:\b(?:struct|enum|using)|#define)\s+(\w+)|\bconstexpr\s+\w+\s+(\w+)|\b(\w+)\(")
"""A pattern that finds the name of a definition (a type, a macro, a constant or a function) in the source outside of
braces."""


@lru_cache(512)
def definitions(file: str, text: str) -> list[Definition]:
    """Return the top-level definitions of a shader file. In the file, blank lines outside of braces separate
    definitions. file: its name. text: its contents. depth: how many braces are open."""
    found: list[Definition] = []
    lines = [line.strip() for line in re.sub(r"//.*", "", text).split("\n")] + [""]
    first = depth = 0
    for number, line in enumerate(lines):
        depth += line.count("{") - line.count("}")
        if line or depth:
            continue
        if number > first:
            part = "\n".join(lines[first:number])
            outside = part  # the text outside of braces, where the names are that other definitions can use
            while "{" in outside:
                outside = re.sub(r"\{[^{}]*\}", ";", outside)
            names = {name for groups in DEFINED.findall(outside) for name in groups if name}
            # An enum outside of a struct also defines the constants inside its braces.
            names |= {*re.findall(r"\w+", part)} if part.startswith("enum ") else set()
            words = frozenset(re.findall(r"\w+", part))
            found.append(Definition(file, first + 1, part, frozenset(names), words))
        first = number + 1
    return found


def header(shaders: Iterable[str], body: str) -> str:
    """Return the source of the definitions that the code `body` needs, in the order of the shader files `shaders`. A
    definition is needed if it defines a word of the body or of another needed definition. `#line` directives tell
    compilers, profilers and the tests' emulator the file and line of each definition. left: the definitions that are
    not needed so far."""
    every = [definition for name in shaders for definition in definitions(f"{name}.metal", shader_file(name))]
    words, left = set(re.findall(r"\w+", body)), every
    while needed := [definition for definition in left if not words.isdisjoint(definition.names)]:
        words.update(*(definition.words for definition in needed))
        left = [definition for definition in left if definition not in needed]
    text, file, line = "", "", 0
    for each in (definition for definition in every if definition not in left):
        # Both empty lines and a #line directive give the next line its correct number; a few empty lines are shorter.
        gap = each.line - line
        text += "\n" * gap if each.file == file and gap < 20 else f'#line {each.line} "{each.file}"\n'
        text += f"{each.text}\n"
        file, line = each.file, each.line + each.text.count("\n") + 1
    return text


def fields_of(names: Iterable[str], present: Collection[str]) -> dict[str, str]:
    """Return the fields of the struct in which a kernel gets its arrays: {name of a field: Metal expression of its
    value}. The expression is the name of the array, or `absent` if the name is not in `present`. A quantized weight has
    three arrays (words, scales and biases); they become one field with the name of the weight. The kernel must then
    have the template parameters BITS and GROUP."""
    fields = {name: name if name in present else "absent" for name in names if not name.endswith(PARTS)}
    for name in fields:
        if is_packed(name, present):
            biases = f"{name}_biases" if f"{name}_biases" in present else "absent"
            fields[name] = f"packed_weights<BITS, GROUP>({name}, {name}_scales, {biases})"
    return fields


PARTS = ("_scales", "_biases")
"""The endings of the names of a quantized weight's scales and biases."""


def struct_of(fields: Mapping[str, str], name: str = "Arrays", variable: str = "a") -> str:
    """Return the Metal source of a struct for the arrays of a kernel, and of a variable of this struct. fields: from
    `fields_of`. name, variable: the names of the struct and of the variable. metal/arrays.metal explains the struct."""
    # decltype(as_field(x)) is the type of the pointer to the array x (metal/arrays.metal). Fields have the same names
    # as the kernel's parameters. C++ does not allow a struct in which a name first means a parameter and then a field.
    # So the types of the fields are named before the struct.
    kinds = {field: "Absent" if value == "absent" else f"{name}_{field}" for field, value in fields.items()}
    present = {kinds[field]: value for field, value in fields.items() if value != "absent"}
    types = "".join(f"using {kind} = decltype(as_field({value}));\n" for kind, value in present.items())
    declared = "".join(f"{kind} {field};\n" for field, kind in kinds.items())
    return f"{types}struct {name} {{\n{declared}}};\nconst {name} {variable} = {{{', '.join(fields.values())}}};\n"


NEVER_REFUSED = 384
"""A number of threads per threadgroup for which Metal never refuses a kernel. According to the published sizes, the
register files of Apple's GPUs hold this many threads, even if each thread uses the largest number of registers."""


def limited(header: str, source: str, threads: int) -> tuple[str, str]:
    """Return the header and source of a kernel with a limit on the threads of a threadgroup: at most `threads`. Without
    this limit the compiler may use so many registers per thread that MLX refuses the launch. MLX itself writes the
    attribute `kernel` between header and source, so a macro of that name adds the limit."""
    if threads <= NEVER_REFUSED:
        return header, source
    limit = f"#define kernel kernel,max_total_threads_per_threadgroup({threads})\n"
    return header + limit, f"{source}\n#undef kernel"


# The Metal type of each dtype, as MLX names it in the source of a kernel.
TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t", mx.uint16: "ushort", mx.uint32: "uint"}
TYPES |= {mx.uint64: "ulong", mx.int32: "int", mx.int64: "long"}


class Source(NamedTuple):
    """The parts from which the source of a kernel is built, apart from the template arguments.

    shader: the beginning of the kernel's name. files: the shader files that it needs, in order. body: the source after
    the declarations of the template arguments. index: the integer type that the shader files of `stepwise` call
    `Index`. own: further definitions in Metal, such as the struct of a user's cell. They come after the definitions
    from the shader files and may use them.
    """

    shader: str
    files: tuple[str, ...]
    body: str
    index: str = ""
    own: str = ""


@cached
def build(
    source: Source,
    template: tuple[tuple[str, int | bool | mx.Dtype], ...],
    missing: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    threads: int,
) -> Launch:
    """Build a kernel. MLX caches compiled code by the kernel's name, so each source needs a different name. The name
    contains the shader's name, the names of the arrays that the call does not have (`missing`), and the values of the
    template arguments (`words`).

    template: pairs (name, value) of the template arguments; a type is given as a dtype of MLX. They are written into
    the source, because passing them to MLX would cost 0.8 us at every call. inputs, outputs: the names of the kernel's
    arrays. threads: how many threads a threadgroup has.
    """
    shader, files, body, index, own = source
    words: list[str] = []
    declared = ""
    for key, value in template:
        is_type = isinstance(value, mx.Dtype)
        words.append(TYPES[value] if is_type else str(value).lower())
        declared += f"{'using' if is_type else f'constexpr {type(value).__name__}'} {key} = {words[-1]};\n"
    name = "__".join(["_".join([shader, "without", *missing] if missing else [shader]), *words])
    first = f"using Index = {index};\n" if index else ""
    text = declared + body
    head, text = limited(f'{first}{header(files, own + text)}#line 1 "{name}"\n{own}', text, threads)
    kernel = mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=text, header=head
    )
    return cast(Launch, kernel)


def prepare(
    source: Source,
    template: Template,
    inputs: Mapping[str, bool],
    outputs: Outputs,
    groups: tuple[int, ...],
    threads: int,
) -> Launch:
    """Return a launch of a shader, which can be called any number of times. It is called with `inputs`, the list of the
    arrays that the call has, in the order of their names in the dict `inputs`.

    inputs: the name of each array that the shader can read, and whether this call has it. outputs: the shape and dtype
    of each output, or None if it is not written. groups: the number of threadgroups along one to three axes. threads:
    the threads of a threadgroup, all along the first axis. MLX takes the grid in threads: groups[0] * threads.
    """
    given = tuple(name for name, is_there in inputs.items() if is_there)
    written = {name: output for name, output in outputs.items() if output is not None}
    missing = tuple(name for name in (*inputs, *outputs) if name not in given and name not in written)
    kernel = build(source, tuple(template.items()), missing, given, tuple(written), threads)
    grid, threadgroup = (groups[0] * threads, *groups[1:], 1)[:3], (threads, 1, 1)
    shapes, dtypes = [shape for shape, _ in written.values()], [dtype for _, dtype in written.values()]

    # A `functools.partial` in place of this function would take 1.2 times as long per call, because it joins two dicts.
    def launch(inputs: list[mx.array]) -> list[mx.array]:
        return kernel(inputs=inputs, grid=grid, threadgroup=threadgroup, output_shapes=shapes, output_dtypes=dtypes)

    return launch


# --- Cells ---

ACTIVATIONS = {"identity": 0, "relu": 1, "tanh": 2, "sigmoid": 3, "hard_sigmoid": 4, "hard_sigmoid_sixth": 5}
"""The number that stands for each activation in the shaders; the enum Activation in metal/cell.metal has the same
numbers."""

STRUCTS = {"lstm": "LSTMCell<OPTIONS>", "gru": "GRUCell<OPTIONS>", "rnn": "RNNCell<OPTIONS>"}
"""The Metal struct of each built-in cell, by the cell's op. The files metal/cell_*.metal define these structs."""


@cache
def cell_number(cell: AnyCell, peephole: bool = False) -> int:
    """Return the options of a cell as one integer, the template argument OPTIONS of the cell's Metal struct.
    metal/cell.metal lists its bits. peephole: whether the call has peepholes. `known` raises an error if ACTIVATIONS
    does not have an activation."""
    order, gates, own = cell.gate_order, {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}[cell.op], 0
    if isinstance(cell, GRUCell):
        own = (cell.reset == "before") + (cell.flip_z << 1)
    elif cell.op == "lstm":
        # sees: which c the peephole of gate o reads: 0 without peepholes, 1 for the new c, 2 for c before the step. The
        # next two bits: whether c is clipped, and whether this clip stops gradients.
        sees = (1 if cell.output_peephole == "current" else 2) if peephole else 0
        own = sees + ((cell.cell_clip is not None) << 2) + (cell.stops_c << 3)
    number = sum(order.index(gate) << 2 * k for k, gate in enumerate(gates))
    number += sum(known("metal", ACTIVATIONS, name) << 8 + 3 * k for k, name in enumerate(cell.activations))
    return number + (own << 23) + (number_of_norm(cell) << 27)


def number_of_norm(cell: AnyCell) -> int:
    """Return the layer normalisation of a cell as one integer, which metal/norm.metal explains: a number from 0 to 4
    for what is normalised before the gates, plus 5 if c is normalised for the output only, or plus 10 if the normalised
    c is also the state."""
    norm = cell.norm
    if norm is None:
        return 0
    of = 0 if norm.of is None else {"product": 1, "sum": 3}[norm.of] + (norm.gates == "each")
    return of + 5 * (None, "output", "state").index(norm.c)


def numbers_of(cell: AnyCell) -> mx.array | None:
    """Return the array of three numbers that an LSTM's kernels read: the forget bias, the limit of the cell state and
    the limit of a projected h. A limit that the cell does not have is 0. Return None for other cells."""
    numbers = cell.forget_bias, cell.cell_clip or 0.0, cell.projection_clip or 0.0
    return constant(numbers, mx.float32) if cell.op == "lstm" else None


def layout_number(cell: AnyCell) -> int:
    """Return the bits of `cell_number` on which the order of weights in memory depends: the gate order, and whether a
    GRU resets before the product. Kernels that only copy weights get this number instead of all options, so that cells
    with different activations share these kernels."""
    return cell_number(cell) & (0xFF | 1 << 23)  # bits 0 to 7, and bit 23
