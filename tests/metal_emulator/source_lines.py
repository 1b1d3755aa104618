"""Find the statements of a shader file, and the lines of a kernel's source that come from the file."""

import re

from .findings import LINE_DIRECTIVE
from .lowering import blank_comments, line_of, matching

_PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.M)
_SCOPE = re.compile(r"^(?:template\s*<[^{}]*>\s*)?(?:inline\s+)?(?:namespace|struct|class|union|enum)\b")
_CONTROL = re.compile(r"^(?:for|if|while|switch|do|return|else)\b")
_ASSIGNMENT = re.compile(r"^[\w\s.:<>*&\[\]+\-()]+[^=!<>]=[^=]")
_HEADER = re.compile(r"\s*(?:(?:else|do)\b|(?:if|for|while|switch)\s*(?:constexpr\s*)?\()")
_GLOBAL = re.compile(r"^(?:template|inline|constant|constexpr|using|typedef|static|METAL_FUNC)\b")
_NO_CODE = re.compile(
    r"^(?:using|typedef|static_assert|template|struct|class|enum|union|namespace|constexpr|constant|case|default|else"
    r"|break|continue|do|if\s+constexpr|else\s+if\s+constexpr)\b|^\w+\s*:$"
)
_STRUCT = re.compile(r"^[A-Z]\w*(?:\s*<[^;={}]*>)?\s+(\w+)$")  # names of structs begin with a capital letter
_DECLARATION = re.compile(
    r"^(?:const\s+|threadgroup\s+|thread\s+)*(?!return\b)[A-Za-z_][\w:]*(?:\s*<[^;=]*>)?[\s*&]+[^=(){}]*$"
)


def map_lines(kernel_text: str, files: dict[str, str]) -> dict[int, tuple[str, int]]:
    """Return {kernel line: (file, line)} for every line of the kernel's source that comes from one of the files,
    according to the directives `#line N "file"`."""
    mapped, file, line = {}, None, 0
    counts = {name: text.count("\n") + 1 for name, text in files.items()}
    for number, text in enumerate(kernel_text.split("\n"), start=1):
        if m := LINE_DIRECTIVE.match(text):
            file, line = m.group(2) or file, int(m.group(1))
            continue
        if file in counts and line <= counts[file]:
            mapped[number] = (file, line)
        line += 1
    return mapped


def statements(text: str) -> list[tuple[int, int]]:
    """Return (first, last) line of every statement that must produce code when its function is compiled.

    Not counted: what lies outside functions, declarations without a value, constexpr, enum, using, static_assert,
    labels, break, continue, else, `if constexpr` itself, brackets, preprocessor lines and what macros expand to. Nor is
    the return of a struct that was declared without a value: the compiler builds it in the caller's memory, so the
    return itself has no code.
    """
    code = _PREPROCESSOR.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), blank_comments(text))
    chunks = _chunks(code)
    is_body = any(
        depth == 0 and not _GLOBAL.match(c) and (_CONTROL.match(c) or _ASSIGNMENT.match(c)) for _, _, c, depth in chunks
    )
    built = {f"return {m[1]}" for _, _, chunk, _ in chunks if (m := _STRUCT.match(chunk))}
    found = []
    for start, end, chunk, depth in chunks:
        if chunk in built:
            continue
        if (depth > 0 or is_body) and not _NO_CODE.match(chunk) and not _DECLARATION.match(chunk):
            found.append((line_of(code, start), line_of(code, end)))
    return found


def _chunks(code: str) -> list[tuple[int, int, str, int]]:
    """Split the code at `;` and at the brackets of blocks. Return (start, end, text, number of enclosing function
    or control blocks) for each part."""
    chunks, blocks, enums, start, parentheses, i = [], [], [], 0, 0, 0

    def finish(end: int) -> None:
        if enums and enums[-1]:  # the constants of an enum are not statements
            return
        for first, last in _without_control(code, start, end):
            chunks.append((first, last - 1, " ".join(code[first:last].split()), sum(blocks)))

    while i < len(code):
        char = code[i]
        parentheses += (char in "([") - (char in ")]")
        if char == ";" and parentheses == 0:
            finish(i)
            start = i + 1
        elif char == "{":
            header = " ".join(code[start:i].split())
            is_block = not header or header.endswith((")", "else", "do")) or header.endswith(") const")
            if _SCOPE.match(header) or (is_block and parentheses == 0):
                is_function = sum(blocks) == 0 and header.endswith((")", "const")) and not _CONTROL.match(header)
                if not is_function:
                    finish(i)
                blocks.append(not _SCOPE.match(header))
                enums.append(header.startswith("enum"))
                start = i + 1
            else:  # a list in braces inside an expression: not a block
                i = _behind_list(code, i)
                continue
        elif char == "}" and parentheses == 0:
            finish(i)
            if blocks:
                blocks.pop()
                enums.pop()
            start = i + 1
        i += 1
    finish(len(code))
    return chunks


def _without_control(code: str, start: int, end: int) -> list[tuple[int, int]]:
    """Separate headers of control statements, such as `if (...)`, from the statement after them. Return (start, end)
    of each part."""
    parts = []
    while m := _HEADER.match(code, start, end):
        header = matching(code, m.end(), "(", ")") if code[m.end() - 1] == "(" else m.end()
        parts.append((start, header))
        start = header
    parts.append((start, end))
    stripped = [(b - len(code[a:b].lstrip()), a + len(code[a:b].rstrip())) for a, b in parts if code[a:b].strip()]
    return stripped


def _behind_list(code: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(code)):
        depth += (code[i] == "{") - (code[i] == "}")
        if depth == 0:
            return i + 1
    return len(code)
