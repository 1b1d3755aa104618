"""Translate the source of a Metal kernel so that clang accepts it as C++ for OpenCL. Every line keeps its number.

The shim (shim/*.h) replaces Metal's standard library. These six changes of the source do the rest:
  1. the word `thread` behind the parameters of a method is removed,
  2. `threadgroup T x[n];` becomes a reference to memory that the runtime provides,
  3. float literals without a suffix get an `f`, because Metal has no double,
  4. `vec<T, n>(...)` becomes a call of the shim's constructor,
  5. each index of an array of simdgroup matrices is checked, because clang accepts the index one past the end,
  6. the lines `#include <metal_*>` and `#line` become empty. So does MLX's line that instantiates the kernel template;
     a generated function `emu_entry` calls this instance instead.
"""

import re
from dataclasses import dataclass

from .findings import Finding, KernelError, compile_error

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
_TYPE = r"[A-Za-z_][\w:]*(?:\s*<[^;{}()]*?>)?"
_DECLARATORS = r"\w+\s*(?:\[[^\[\];{}=]*\]\s*)*"
_VARIABLE = re.compile(rf"threadgroup\s+(?:alignas\([^)]*\)\s*)?({_TYPE})\s+({_DECLARATORS}(?:,\s*{_DECLARATORS})*);")
_INITIALISED = re.compile(rf"threadgroup\s+{_TYPE}\s+{_DECLARATORS}[={{]")
_FLOAT = re.compile(r"(?<![\w.])(?:(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])")
_METHOD_SPACE = re.compile(r"(?<=\))(\s*(?:const\s+)?)thread\b(?=\s*[{:;])")
_VECTOR_CALL = re.compile(r"(?<!operator )\b(?:metal::)?vec<([^<>;]*)>\s*(?=\()")
_MATRIX = r"simdgroup_(?:matrix\s*<[^;{}()]*?>|\w+8x8)"
_MATRIX_ARRAY = re.compile(rf"{_MATRIX}\s*(?:\(\s*&\s*(\w+)\s*\)\s*\[[^;{{}}()]*\]|([^;{{}}()]*\[[^;{{}}]*?))(?=[;,)])")
_DROPPED_LINE = re.compile(r"^[ \t]*#[ \t]*(?:include[ \t]*<metal_\w+>|line\b).*$", re.M)
INSTANTIATION = re.compile(
    r'template\s*\[\[\s*host_name\("([^"]+)"\)\s*\]\]\s*\[\[\s*kernel\s*\]\]\s*decltype\((.*?)\)\s+\2\s*;', re.S
)
SIGNATURE = re.compile(r"\[\[\s*kernel\b[^;{}]*?\]\]\s*void\s+(\w+)\s*\(|\bkernel\s+void\s+(\w+)\s*\(")
_PARAMETER = re.compile(r"\s*(.*?)\s*(\w+)\s*\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]\s*$", re.S)

# The numbers of the values that Metal provides for each thread. `emu_entry` passes the number to the function
# emu_attribute, which returns the value; the cases of its `switch` in runtime/host.h must have the same numbers.
ATTRIBUTES = {
    "thread_position_in_grid": 0,
    "thread_position_in_threadgroup": 1,
    "threadgroup_position_in_grid": 2,
    "threads_per_grid": 3,
    "grid_size": 3,
    "threads_per_threadgroup": 4,
    "dispatch_threads_per_threadgroup": 5,
    "threadgroups_per_grid": 6,
    "thread_index_in_threadgroup": 7,
    "thread_index_in_simdgroup": 8,
    "simdgroup_index_in_threadgroup": 9,
    "simdgroups_per_threadgroup": 10,
    "dispatch_simdgroups_per_threadgroup": 11,
    "threads_per_simdgroup": 12,
    "thread_execution_width": 12,
    "thread_index_in_quadgroup": 13,
    "quadgroup_index_in_threadgroup": 14,
    "quadgroups_per_threadgroup": 15,
    "dispatch_quadgroups_per_threadgroup": 15,
    "grid_origin": 16,
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel. attribute: "buffer", or the name of a value that Metal provides for each thread, such
    as "thread_position_in_grid"."""

    type: str
    name: str
    attribute: str


@dataclass(frozen=True)
class Lowered:
    """A kernel that clang can compile. text: the translated source. buffers: the names of the kernel's buffers in
    the order of its parameters."""

    text: str
    buffers: tuple[str, ...]


def blank_comments(text: str) -> str:
    """Return the source with comments and strings replaced by spaces. All other characters keep their position."""
    return _COMMENT_OR_STRING.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def line_of(text: str, offset: int) -> int:
    """Return the number of the line (from 1) in which the character at this offset stands."""
    return text.count("\n", 0, offset) + 1


def split_top_level(text: str) -> list[str]:
    """Split a text at the commas that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{<") - (char in ")]}>")
        if char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return parts


def matching(code: str, start: int, opening: str, closing: str) -> int:
    """Return the offset just behind the bracket that closes the one just before `start`."""
    depth = 1
    while depth and start < len(code):
        depth += (code[start] == opening) - (code[start] == closing)
        start += 1
    return start


def _fail(text: str, offset: int, code: str) -> KernelError:
    return KernelError("text", [compile_error(text, line_of(code, offset))])


def _kernel_bodies(code: str) -> list[range]:
    bodies = []
    for m in SIGNATURE.finditer(code):
        start = code.find("{", m.end())
        bodies.append(range(start, matching(code, start + 1, "{", "}")))
    return bodies


def _variable_text(kind: str, declarator: str, number: int, line: int) -> str:
    name, dimensions = re.match(r"\s*(\w+)\s*(.*?)\s*$", declarator, re.S).groups()
    sizes = f"sizeof({kind}{dimensions}), alignof({kind}), metal::emu_granule<{kind}>"
    storage = f'emu_threadgroup_variable({number}, {sizes}, "{name}", {line})'
    return f"threadgroup {kind} (&{name}){dimensions} = *(threadgroup {kind} (*){dimensions}){storage};"


def _threadgroup_edits(code: str) -> list[tuple[int, int, str]]:
    bodies, edits, number = _kernel_bodies(code), [], 0
    for m in re.finditer(r"\bthreadgroup\b", code):
        if code[: m.start()].rstrip()[-1:] not in ("", ";", "{", "}", ":", ")", ">"):
            continue
        variable = _VARIABLE.match(code, m.start())
        if not variable:
            if _INITIALISED.match(code, m.start()):
                raise _fail("a threadgroup variable cannot have an initialiser", m.start(), code)
            continue  # a pointer or reference needs no change: its address space is in its type
        if not any(m.start() in body for body in bodies):
            raise _fail("threadgroup variable outside a kernel function", m.start(), code)
        kind, texts = variable.group(1), []
        for declarator in split_top_level(variable.group(2)):
            texts.append(_variable_text(kind, " ".join(declarator.split()), number, line_of(code, m.start())))
            number += 1
        lines = "\n" * variable.group().count("\n")
        edits.append((m.start(), variable.end(), " ".join(texts) + lines))
    return edits


def text_edits(code: str) -> list[tuple[int, int, str]]:
    edits = [(m.start(), m.end(), m.group() + "f") for m in _FLOAT.finditer(code)]
    edits += [(m.start(), m.end(), m.group(1)) for m in _METHOD_SPACE.finditer(code)]
    edits += [
        (m.start(), m.end(), f"metal::emu_construct<metal::vec<{m.group(1)}>>") for m in _VECTOR_CALL.finditer(code)
    ]
    edits += [(m.start(), m.end(), "") for m in _DROPPED_LINE.finditer(code)]
    return edits


def _matrix_index_edits(code: str) -> list[tuple[int, int, str]]:
    declarations = list(_MATRIX_ARRAY.finditer(code))
    names = {m.group(1) for m in declarations} - {None}
    for m in declarations:
        names |= set(re.findall(r"(\w+)\s*\[", m.group(2) or ""))
    edits = []
    for m in re.finditer(rf"\b({'|'.join(names)})\s*(?=\[)", code) if names else ():
        if any(d.start() <= m.start() < d.end() for d in declarations):
            continue
        array, position = m.group(1), m.end()
        while code[position : position + 1] == "[":
            end = matching(code, position + 1, "[", "]")
            check = f'metal::emu_index<EMU_EXTENT({array})>("{m.group(1)}", {line_of(code, position)}, '
            edits += [(position + 1, position + 1, check), (end - 1, end - 1, ")")]
            array, position = f"{array}[0]", end
    return edits


def apply_edits(text: str, edits: list[tuple[int, int, str]]) -> str:
    parts, position = [], 0
    for start, end, replacement in sorted(edits):
        if start < position:
            continue  # an earlier edit has already replaced this part of the text
        parts += [text[position:start], replacement]
        position = end
    return "".join([*parts, text[position:]])


def lower_library(text: str) -> str:
    """Translate source without kernels (MLX's preamble), so that clang accepts it. The lines `#line` stay."""
    code = blank_comments(text)
    keep_lines = [m for m in text_edits(code) if not code[m[0] : m[1]].lstrip().startswith("#line")]
    return apply_edits(text, keep_lines)


def kernel_parameters(code: str, signature: re.Match) -> list[Parameter]:
    inside = code[signature.end() : matching(code, signature.end(), "(", ")") - 1]
    parameters = []
    for part in split_top_level(inside):
        m = _PARAMETER.match(part)
        if not m:
            raise _fail(f"kernel parameter not understood: {part.strip()!r}", signature.start(), code)
        parameters.append(Parameter(" ".join(m.group(1).split()), m.group(2), m.group(3)))
    return parameters


def _attribute_argument(parameter: Parameter) -> str:
    m = re.match(r"(?:const\s+)?(u?short|u?int)([23])?$", parameter.type)
    number = ATTRIBUTES.get(parameter.attribute)
    if number is None or not m:
        raise KernelError("text", [compile_error(f"attribute {parameter.attribute} as {parameter.type} is unknown")])
    scalar, axes = m.group(1), int(m.group(2) or 1)
    values = [f"({scalar})emu_attribute({number}, {axis})" for axis in range(axes)]
    return values[0] if axes == 1 else f"{scalar}{axes}{{{', '.join(values)}}}"


def _entry_point(callee: str, code: str, signature: re.Match, parameters: list[Parameter]) -> str:
    """Return the source of the function `emu_entry`, which the runtime starts in every fiber (emulated thread). It
    calls the kernel with its buffers and with the values that Metal provides for each thread. callee: the name of
    the kernel, with template arguments if it has any."""
    arguments, buffer = [], 0
    for p in parameters:
        if p.attribute != "buffer":
            arguments.append(_attribute_argument(p))
            continue
        pointer = p.type[:-1].strip() + "*" if p.type.endswith("&") else p.type
        arguments.append(("*" if p.type.endswith("&") else "") + f"({pointer})emu_buffer({buffer})")
        buffer += 1
    # The type of a kernel's parameter may be the name of a type parameter of the kernel's template. `emu_entry` is not
    # a template, so these names are defined in it as aliases of the actual types.
    aliases = ""
    templates = re.search(r"template\s*<([^{};]*)>\s*$", code[: signature.start()])
    if templates and "<" in callee:
        given = split_top_level(callee[callee.index("<") + 1 : callee.rindex(">")])
        for declared, value in zip(split_top_level(templates.group(1)), given, strict=True):
            m = re.match(r"\s*typename\s+(\w+)", declared)
            if m and m.group(1) != value.strip():
                aliases += f"using {m.group(1)} = {value.strip()}; "
    return f'extern "C" void emu_entry() {{ {aliases}{callee}({", ".join(arguments)}); }}\n'


def lower_kernel(text: str) -> Lowered:
    """Translate the source that MLX generates for one kernel (header, signature, body and instantiation), so that
    clang accepts it. Append the entry point, which calls the kernel."""
    code = blank_comments(text)
    instantiation = INSTANTIATION.search(text)
    signature = next(SIGNATURE.finditer(code), None)
    if signature is None:
        raise KernelError("text", [Finding("compile", "no kernel function found")])
    callee = instantiation.group(2) if instantiation else signature.group(1) or signature.group(2)
    parameters = kernel_parameters(code, signature)
    edits = _threadgroup_edits(code) + text_edits(code) + _matrix_index_edits(code)
    if instantiation:
        edits.append((instantiation.start(), instantiation.end(), "\n" * instantiation.group().count("\n")))
    entry = _entry_point(callee, code, signature, parameters)
    lowered = f'#line 1 "kernel.metal"\n{apply_edits(text, edits)}\n#line 1 "entry"\n{entry}'
    return Lowered(lowered, tuple(p.name for p in parameters if p.attribute == "buffer"))
