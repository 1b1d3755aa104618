"""Find all slips of a Python file or of a shader. A slip replaces one part of the text by another."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from metal_emulator.mutations import mutations


class Slip(NamedTuple):
    """One slip: the number of its line, what it changes, and the whole text with the slip."""

    line: int
    what: str
    text: str


SWAPPED = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "|": "&", "&": "|", "<<": ">>"}
SWAPPED |= {">>": "<<", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in"}
SWAPPED |= {"not in": "in", "is": "is not", "is not": "is", "and": "or", "or": "and"}
SIGNS = {"Add": "+", "Sub": "-", "Mult": "*", "Div": "/", "FloorDiv": "//", "Mod": "%", "Pow": "**", "BitOr": "|"}
SIGNS |= {"BitAnd": "&", "LShift": "<<", "RShift": ">>", "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "=="}
SIGNS |= {"NotEq": "!=", "In": "in", "NotIn": "not in", "Is": "is", "IsNot": "is not", "And": "and", "Or": "or"}

# Texts for a reader and types change no result: no slip is planted in them.
UNTOUCHED = {"annotation", "returns", "msg", "exc", "type_params"}


def slips(path: str, text: str) -> list[Slip]:
    """Return all slips of a file. Slips of a shader that are known to change no result are left out."""
    if not path.endswith(".metal"):
        return list(python_slips(text))
    from test_kernel_mutations import HARMLESS, change_of  # imported here: it imports MLX and the library

    lines = text.splitlines()
    found = [Slip(each.line, each.description.partition(": ")[2], each.text) for each in mutations(text)]
    return [slip for slip in found if change_of(lines[slip.line - 1].strip(), slip.what) not in HARMLESS]


def compiles(path: str, text: str) -> bool:
    """Return whether Python accepts a text with a slip. A shader is compiled by the tests."""
    if path.endswith(".metal"):
        return True
    try:
        compile(text, "slip", "exec")
    except SyntaxError:
        return False
    return True


def python_slips(text: str) -> Iterator[Slip]:
    """Yield the slips of a Python text. Columns in `ast` count bytes, so the edits are made in bytes."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def source(node: ast.expr | ast.stmt | ast.keyword) -> str:
        return data[slice(*span(node))].decode()

    def edits(node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
        """Yield (start, end, new text, description) of each slip in one node, without its children."""
        for left, operator, right in operations(node):
            start, end = span(left)[1], span(right)[0]
            if (sign := SIGNS.get(type(operator).__name__)) and (at := data.find(sign.encode(), start, end)) >= 0:
                yield at, at + len(sign), SWAPPED[sign], f"{sign} becomes {SWAPPED[sign]}"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            what = "not" if isinstance(node.op, ast.Not) else "-"
            yield *span(node), source(node.operand), f"{what} dropped"
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield *span(node.test), f"(not ({source(node.test)}))", "a condition is negated"
        if isinstance(node, ast.Constant) and (new := another(node.value)):
            yield *span(node), new, f"{node.value!r} becomes {new}"
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                parts = [source(each) for each in (*node.args, *node.keywords) if each is not keyword]
                what = f"{source(keyword)} dropped" if keyword.arg else "** dropped"
                yield *span(node), f"{source(node.func)}({', '.join(parts)})", what
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
            for dropped in node.elts:
                parts = [source(each) for each in node.elts if each is not dropped]
                yield *span(node), f"({' '.join(f'{part},' for part in parts)})", f"{source(dropped)} dropped"
        if isinstance(node, (ast.Continue, ast.Break)):
            yield *span(node), "pass", f"{source(node)} dropped"

    for node in touched(ast.parse(text)):
        for start, end, new, what in edits(node):
            line = data.count(b"\n", 0, start) + 1
            yield Slip(line, " ".join(what.split()), (data[:start] + new.encode() + data[end:]).decode())


def operations(node: ast.AST) -> Iterator[tuple[ast.expr, ast.AST, ast.expr]]:
    """Yield (left, operator, right) of the operators of a node. A string on the left is a text for a reader."""
    if isinstance(node, ast.BinOp) and not (isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)):
        yield node.left, node.op, node.right
    elif isinstance(node, ast.AugAssign):
        yield node.target, node.op, node.value
    elif isinstance(node, ast.BoolOp):
        yield from ((left, node.op, right) for left, right in zip(node.values, node.values[1:], strict=False))
    elif isinstance(node, ast.Compare):
        yield from zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)


def touched(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it, except those in which no slip is planted."""
    if isinstance(node, ast.Module):  # an alias of a type, such as `Pairs = dict[str, tuple[int, int]]`
        is_alias = [isinstance(each, ast.Assign) and isinstance(each.value, ast.Subscript) for each in node.body]
        node.body = [each for each, alias in zip(node.body, is_alias, strict=True) if not alias]
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name not in UNTOUCHED and isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from touched(child)


def another(value: object) -> str:
    """Return the text of another constant of the same type, or "" for a text or None."""
    if isinstance(value, bool):
        return str(not value)
    return repr(value + 1) if isinstance(value, int) else repr(value * 2 or 0.5) if isinstance(value, float) else ""
