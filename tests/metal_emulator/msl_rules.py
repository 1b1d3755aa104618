"""Find what the Metal Shading Language (MSL) does not allow, although clang accepts it in C++ for OpenCL. These
functions search the kernel's source, clang's warnings, and the syntax tree (AST) that clang prints."""

import re

from .findings import Finding, compile_error
from .lowering import blank_comments, line_of

_FORBIDDEN = (
    (r"\bgoto\b", "MSL has no goto"),
    (r"\bdynamic_cast\b|\btypeid\b", "MSL has no run-time type information"),
    (r"\bthread_local\b|\bregister\b", "this storage class is not in MSL"),
    (r"#[ \t]*include\b(?![ \t]*<metal_\w+>).*", "only the metal_* headers exist"),
    (r"\basm\b", "MSL has no inline assembly"),
    (r"\bdecltype\((?:[^;{}]*[^\w:.>])?(\w+)\b[^;{}]*\)\s*\1\s*;", "a field must not have a name that its type uses"),
    (r"\[\[buffer\((?:3[1-9]|[4-9]\d|\d{3,})\)\]\]", "a kernel has at most 31 buffers"),
    (r"\b__builtin_\w+|\b(?:metal::)?emu_\w+|\bEMU_\w+", "compiler or emulator internals used in a kernel"),
)
# Warnings of clang that count as errors in a kernel: MSL forbids the code, or it certainly has a bug. MSL 3 is based on
# C++14, so newer C++ is an error. The only exception is `if constexpr` of C++17, which Metal's compiler accepts and
# MLX's own kernels use.
_FATAL_WARNING = re.compile(
    r"to '(?:metal::)?bfloat|to 'double'"
    r"|\[-Wc\+\+20-extensions|^(?!constexpr if ).*\[-Wpre-c\+\+17-compat"
    r"|\[-W(?:uninitialized|sometimes-uninitialized|conditional-uninitialized|return-type|vla|null-dereference|array-bounds|frame-larger-than|logical-op-parentheses)\b"
)
_DIAGNOSTIC = re.compile(r"^([^\s:]+):(\d+):\d+: (warning|error|fatal error): (.*)$", re.M)
_DECLARATION = re.compile(r"(?:ParmVar|Var|Field|Typedef|TypeAlias)Decl 0x\S+ .*?(\w+) '([^']*__generic[^']*)'")
_FUNCTION = re.compile(r"(?:Function|CXXMethod)Decl (0x\w+)(?: parent 0x\w+)?(?: prev (0x\w+))?")
_CALL = re.compile(r"(?:Function|CXXMethod) (0x\w+) '([^']*)'")


def forbidden_text(source: str) -> list[Finding]:
    """Return one finding for each use of a word or construct in the kernel's source that MSL does not have, such as
    goto."""
    code = blank_comments(source)
    found = []
    for pattern, why in _FORBIDDEN:
        for m in re.finditer(pattern, code):
            found.append(compile_error(f"{why}: {m.group()!r}", line_of(code, m.start())))
    return found


def diagnostics(stderr: str) -> list[Finding]:
    """Return a finding for each error that clang reports, and for each warning about the kernel that counts as an
    error. stderr: the messages that clang has printed."""
    found = []
    for file, line, severity, text in _DIAGNOSTIC.findall(stderr):
        if "error" in severity or (file.endswith("kernel.metal") and _FATAL_WARNING.search(text)):
            found.append(compile_error(text, int(line) if file.endswith("kernel.metal") else 0))
    return found


def ast_rules(dump: str) -> list[Finding]:
    """Return a finding for each pointer without an address space and for each recursive function. dump: the syntax
    tree (AST) of the kernel as clang prints it."""
    found, calls, names, alias, function, implicit = [], {}, {}, {}, None, False
    for text in dump.splitlines():
        if "ParmVarDecl" not in text and "Decl 0x" in text:
            # Constructors that the compiler generates are not reported, nor are their parameters.
            implicit = "ConstructorDecl" in text and " implicit " in text
        m = _DECLARATION.search(text) if "__generic" in text and " implicit " not in text and not implicit else None
        if m and "__range" not in m.group(1):
            found.append(compile_error(f"{m.group(1)!r} has no address space ({m.group(2)})"))
        if "Decl 0x" in text and (m := _FUNCTION.search(text)):
            function = m.group(1)
            if m.group(2):
                alias[function] = alias.get(m.group(2), m.group(2))
            function = alias.get(function, function)
        elif function and "DeclRefExpr" in text and (m := _CALL.search(text)):
            calls.setdefault(function, set()).add(alias.get(m.group(1), m.group(1)))
            names[m.group(1)] = m.group(2)
    return found + [compile_error(f"MSL has no recursion: {name!r}") for name in _recursive(calls, names)]


def _recursive(calls: dict[str, set[str]], names: dict[str, str]) -> list[str]:
    """Return the names of all functions that call themselves, directly or through other functions. calls: for each
    function, the functions that it calls."""
    found = []
    for start in calls:
        reached, todo = set(), list(calls[start])
        while todo:
            callee = todo.pop()
            if callee not in reached:
                reached.add(callee)
                todo += calls.get(callee, ())
        if start in reached:
            found.append(names.get(start, "?"))
    return found
