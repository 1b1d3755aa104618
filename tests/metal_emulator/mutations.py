"""Make small changes that damage a kernel: to its barriers, conditions and indices. Good tests fail for each damaged
kernel."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .lowering import blank_comments, line_of, matching

_BARRIER = re.compile(r"\b(threadgroup_barrier|simdgroup_barrier)\s*\(([^;]*)\)\s*;")
_CONDITION = re.compile(r"\b(?:for|while|if)\s*(?:constexpr\s*)?\(")
_COMPARISON = re.compile(r"(?<=\s)(<=|>=|<|>)(?=\s)")
_OFFSET = re.compile(r"\s[+-]\s1u?\b(?!\s*[*/.])")
_DECLARED = re.compile(
    r"(?:^|[;{}])\s*(?:const\s+|threadgroup\s+|thread\s+|constant\s+|constexpr\s+)*"
    r"(?!return\b)[A-Za-z_][\w:]*(?:<[^;]*>)?\s+[^;=]*$"
)
_SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


@dataclass(frozen=True)
class Mutation:
    """A damaged kernel. description: what was changed, and in which line. text: the whole damaged source."""

    description: str
    line: int
    text: str


def mutations(text: str) -> Iterator[Mutation]:
    """Yield every mutation (damaged version) of a kernel's header or body. Lines are counted from the start of
    `text`."""
    code = blank_comments(text)
    for edits in (_barriers(code), _comparisons(code), _subscripts(code)):
        for start, end, new, what in edits:
            line = line_of(code, start)
            yield Mutation(f"line {line}: {what}", line, text[:start] + new + text[end:])


Edit = tuple[int, int, str, str]


def _barriers(code: str) -> Iterator[Edit]:
    for m in _BARRIER.finditer(code):
        name, flags = m.group(1), [f.strip() for f in m.group(2).split("|")]
        yield m.start(), m.end(), ";", f"{name} removed"
        if flags == ["mem_flags::mem_none"]:
            continue
        if len(flags) == 1:
            weaker = {"mem_none": "mem_flags::mem_none"}
        else:
            weaker = {
                " | ".join(flags[:i] + flags[i + 1 :]): " | ".join(flags[:i] + flags[i + 1 :])
                for i in range(len(flags))
            }
        for label, new in weaker.items():
            yield m.start(2), m.end(2), new, f"{name} weakened to {label}"


def _conditions(code: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each condition in the code: of `if` and `while`, of `a ? b : c`, and of `for`
    loops."""
    for m in _CONDITION.finditer(code):
        end = matching(code, m.end(), "(", ")") - 1
        if m.group().startswith("for"):
            parts = [i for i in range(m.end(), end) if code[i] == ";"]
            if len(parts) == 2:
                yield parts[0], parts[1]
        else:
            yield m.end(), end
    for m in re.finditer(r"\s\?\s", code):  # the condition of `a ? b : c` ends here
        start = max(code.rfind(c, 0, m.start()) for c in ";{}=,(")
        yield start + 1, m.start()


def _comparisons(code: str) -> Iterator[Edit]:
    seen: set[int] = set()
    for start, end in _conditions(code):
        for m in _COMPARISON.finditer(code, start, end):
            if m.start() in seen:
                continue
            seen.add(m.start())
            old = m.group()
            yield m.start(), m.end(), _SWAPPED[old], f"{old} becomes {_SWAPPED[old]}"
            if old == "<":
                yield m.start(), m.end(), "< -1 +", "the bound of < is one less"
            if old == ">=":
                yield m.start(), m.end(), ">= 1 +", "the bound of >= is one more"


def _subscripts(code: str) -> Iterator[Edit]:
    """Yield changes of array indices. An existing +1 or -1 is removed. Each index outside a declaration becomes one
    larger, and one smaller."""
    for m in re.finditer(r"(?<=[\w\])])\[(?!\[)", code):
        end = matching(code, m.end(), "[", "]") - 1
        inside = code[m.end() : end]
        statement = max(code.rfind(c, 0, m.start()) for c in ";{}")
        if not inside.strip() or _DECLARED.match(code[max(statement, 0) : m.start()]):
            continue
        for offset in _OFFSET.finditer(code, m.end(), end):
            yield offset.start(), offset.end(), "", f"{offset.group().strip()} dropped from an index"
        yield end, end, " + 1", f"index [{' '.join(inside.split())}] is one more"
        if not inside.strip().isdigit():
            yield end, end, " - 1", f"index [{' '.join(inside.split())}] is one less"
