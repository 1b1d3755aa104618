"""Build the kernels of the Metal engines: their source, arrays and launches. No other module calls `metal_kernel`.

A shader is a function template in a file of the folder metal/. The source of a kernel consists of the shader
definitions that it needs (the header) and a body: the template arguments as constants, the struct of its arrays and one
call of a shader. A launch is a kernel with its grid of threads and the shapes of its outputs; it is called with a list
of arrays. A kernel is built at its first launch and cached. At every call MLX writes and hashes the whole source. This
takes 2 to 3 us, and hardly more for 20 KB than for 50 B.

A shader names more arrays than a call may have. `inputs` and `outputs` list all of them; `present` or `given` are the
names of those that the call has. In place of the others the source has the value `absent` (metal/arrays.metal). A
threadgroup is a group of threads that share memory and can wait for each other.
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
"""The functions that clear the caches made by `cached`."""


def cached(function: Function) -> Function:
    """Decorate a function that builds something, such as a kernel: cache its results until `forget` is called."""
    with_cache = lru_cache(maxsize=1024)(function)
    _clear_caches.append(with_cache.cache_clear)
    return cast(Function, with_cache)


def forget() -> None:
    """Drop all cached kernels, so that they are built again. The tests need this when they switch between MLX and
    their emulator of a GPU, because a kernel built for one must not be used with the other."""
    for clear in _clear_caches:
        clear()


# --- Arrays as kernels read them ---


@lru_cache(1024)
def constant(numbers: tuple[float, ...], dtype: mx.Dtype) -> mx.array:
    """Return an array of a few numbers. It is made once per process and cached."""
    return mx.array(numbers, dtype)


@overload
def contiguous(array: mx.array) -> mx.array: ...
@overload
def contiguous(array: None) -> None: ...
def contiguous(array: mx.array | None) -> mx.array | None:
    """Return the array with its elements in row-major order in memory. Each launch that reads an array in another order
    would copy it; here it is copied only once."""
    if array is None:
        return None
    # To make one axis of all elements, MLX copies an array in another order. (`mx.contiguous` would do the same, but it
    # cannot be exported. So only arrays with too many elements for one axis of MLX use it.)
    return mx.contiguous(array) if array.size >= 2**31 else array.reshape(-1).reshape(array.shape)


def whole_mask(problem: Problem, arrays: Arrays) -> mx.array | None:
    """Return the factor on h in the recurrent product: the option `mask` times the option `keep` (factors on the
    states before each step, [T, B, D]). It is [T, B, D P], or [1, B, D P] if all steps share it, for T steps, B batch
    items, D directions and P numbers of h. Return None if the call has neither option."""
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
    the definition's first line in it. text: its code without comments and indentation. names: the names that it
    defines. words: all identifiers in it, by which `header` finds what it uses."""

    file: str
    line: int
    text: str
    names: frozenset[str]
    words: frozenset[str]


DEFINED = re.compile(r"\b(?:struct|enum|using)\s+(\w+)|\bconstexpr\s+\w+\s+(\w+)|\b(\w+)\(")
"""A pattern that finds the name of a definition (a type, a constant or a function) in the source outside of braces."""


@lru_cache(512)
def definitions(file: str, text: str) -> list[Definition]:
    """Return the top-level definitions of a shader file. Blank lines outside of braces separate them. text: the file's
    contents. depth: how many braces are open."""
    found: list[Definition] = []
    lines = [line.strip() for line in re.sub(r"//.*", "", text).split("\n")] + [""]
    first = depth = 0
    for number, line in enumerate(lines):
        depth += line.count("{") - line.count("}")
        if line or depth:
            continue
        if number > first:
            part = "\n".join(lines[first:number])
            outside = part  # the text outside of braces: only what is defined there is a name for other definitions
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
    """Return the definitions in these files that a body needs, in the order of the files. A definition is needed if
    it defines a word of the body or of another needed definition. `#line` directives tell compilers, profilers and
    the tests' emulator the file and line. shaders: the names of the files, without their ending. left: the definitions
    that nothing has needed so far."""
    every = [definition for name in shaders for definition in definitions(f"{name}.metal", shader_file(name))]
    words, left = set(re.findall(r"\w+", body)), every
    while needed := [definition for definition in left if not words.isdisjoint(definition.names)]:
        words.update(*(definition.words for definition in needed))
        left = [definition for definition in left if definition not in needed]
    text, file, line = "", "", 0
    for each in (definition for definition in every if definition not in left):
        # A few empty lines are shorter than a #line directive, and both give the next line its correct number.
        gap = each.line - line
        text += "\n" * gap if each.file == file and gap < 20 else f'#line {each.line} "{each.file}"\n'
        text += f"{each.text}\n"
        file, line = each.file, each.line + each.text.count("\n") + 1
    return text


def fields_of(names: Iterable[str], present: Collection[str]) -> dict[str, str]:
    """Return a dict with the fields of the struct in which a kernel gets its arrays: from each field's name to the
    Metal expression of its value. The expression is the array's name, or `absent` if the name is not in `present`.
    The words, scales and biases of a quantized weight are one field with the name of the weight; the kernel must
    then have the template parameters BITS and GROUP."""
    fields = {name: name if name in present else "absent" for name in names if not name.endswith(PARTS)}
    for name in fields:
        if is_packed(name, present):
            biases = f"{name}_biases" if f"{name}_biases" in present else "absent"
            fields[name] = f"packed_weights<BITS, GROUP>({name}, {name}_scales, {biases})"
    return fields


PARTS = ("_scales", "_biases")
"""The endings of the names of a quantized weight's scales and biases."""


def struct_of(fields: Mapping[str, str], name: str = "Arrays", variable: str = "a") -> str:
    """Return the source of a struct with these fields, and of a variable of this struct. fields: from each field's name
    to the Metal expression of its value (`fields_of`). name, variable: the names of the struct and of the variable.
    metal/arrays.metal explains the struct."""
    # as_field: a declaration with which decltype gives the type of the array's pointer.
    # Fields have the names of the kernel's parameters. C++ forbids that such a name means the parameter in one place of
    # the struct and the field in another, so the types are named before the struct, outside of its braces.
    kinds = {field: "Absent" if value == "absent" else f"{name}_{field}" for field, value in fields.items()}
    present = {kinds[field]: value for field, value in fields.items() if value != "absent"}
    types = "".join(f"using {kind} = decltype(as_field({value}));\n" for kind, value in present.items())
    declared = "".join(f"{kind} {field};\n" for field, kind in kinds.items())
    return f"{types}struct {name} {{\n{declared}}};\nconst {name} {variable} = {{{', '.join(fields.values())}}};\n"


NEVER_REFUSED = 384
"""A number of threads per threadgroup for which Metal never refuses a kernel. According to the published sizes, the
register files of Apple's GPUs hold this many threads, even if each thread uses the largest number of registers."""


def limited(header: str, source: str, threads: int) -> tuple[str, str]:
    """Return the header and source of a kernel, changed so that it is compiled for this number of threads per
    threadgroup. Without this limit the compiler may use so many registers per thread that MLX refuses the launch. MLX
    itself writes the attribute `kernel` between header and source; a macro of that name adds the limit."""
    if threads <= NEVER_REFUSED:
        return header, source
    limit = f"#define kernel kernel,max_total_threads_per_threadgroup({threads})\n"
    return header + limit, f"{source}\n#undef kernel"


# The Metal type of each dtype, as MLX names it in the source of a kernel.
TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t", mx.uint16: "ushort", mx.uint32: "uint"}
TYPES |= {mx.uint64: "ulong", mx.int32: "int", mx.int64: "long"}


class Source(NamedTuple):
    """The text of a kernel, apart from its template arguments.

    shader: the kernel's name. files: the shader files that it needs, in order. body: the source after the declarations
    of the template arguments. index: the integer type that the files of `stepwise` know as `Index`. own: more
    definitions in Metal, such as the struct of a user's cell. They come after the definitions from the shader files and
    may use them.
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
    contains the shader, the arrays that are `missing`, and the template arguments (`words`).

    template: pairs (name, value) of the template arguments; a type is given as a dtype of MLX. They are written into
    the source, because passing them to MLX would cost 0.8 us at every call. inputs, outputs: the names of the arrays
    that the kernel has. threads: the threads of a threadgroup, for which the kernel is compiled.
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
    """Return a launch of a shader. The launch can be called any number of times with `inputs`, the list of the arrays
    that this call has, in the order of their names here.

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

    # A call of a `functools.partial` with these arguments takes 1.2 times as long, because it joins two dictionaries.
    def launch(inputs: list[mx.array]) -> list[mx.array]:
        return kernel(inputs=inputs, grid=grid, threadgroup=threadgroup, output_shapes=shapes, output_dtypes=dtypes)

    return launch


# --- Cells ---

ACTIVATIONS = {"identity": 0, "relu": 1, "tanh": 2, "sigmoid": 3, "hard_sigmoid": 4, "hard_sigmoid_sixth": 5}
"""The number of each activation, as in metal/cell.metal."""

STRUCTS = {"lstm": "LSTMCell<OPTIONS>", "gru": "GRUCell<OPTIONS>", "rnn": "RNNCell<OPTIONS>"}
"""The struct of each cell, by its op; the files cell_*.metal define them."""


@cache
def cell_number(cell: AnyCell, peephole: bool = False) -> int:
    """Return the options of a cell as one integer, the template argument OPTIONS. metal/cell.metal lists its bits: from
    bit 0 on the position of each gate in `gate_order`, from bit 8 the activations, from bit 23 the cell's own options,
    from bit 27 the norm. peephole: whether the call has peepholes. `known` refuses an activation that the table
    lacks."""
    order, gates, own = cell.gate_order, {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}[cell.op], 0
    if isinstance(cell, GRUCell):
        own = (cell.reset == "before") + (cell.flip_z << 1)
    elif cell.op == "lstm":
        # sees: which c the peephole of gate o reads, the new one (1) or that before the step (2); 0 without peepholes.
        # Then whether there is a clip of c, and whether it stops gradients.
        sees = (1 if cell.output_peephole == "current" else 2) if peephole else 0
        own = sees + ((cell.cell_clip is not None) << 2) + (cell.stops_c << 3)
    number = sum(order.index(gate) << 2 * k for k, gate in enumerate(gates))
    number += sum(known("metal", ACTIVATIONS, name) << 8 + 3 * k for k, name in enumerate(cell.activations))
    return number + (own << 23) + (number_of_norm(cell) << 27)


def number_of_norm(cell: AnyCell) -> int:
    """Return how a cell uses layer normalisation as one integer: what is normalised, plus 0, 5 or 10 for no norm of
    c, one for the output only, and one in the state. metal/norm.metal lists these numbers."""
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
    """Return the bits of `cell_number` on which the layout of the arranged weights depends: the gate order, and
    whether a GRU resets before the product. Kernels that only move weights get this number, so that cells with
    other activations share them."""
    return cell_number(cell) & (0xFF | 1 << 23)  # bits 0 to 7, and bit 23
